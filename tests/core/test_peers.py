"""Peers: a slow GPU is found among its mates, and nobody where all is well."""

import functools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sentinel.core.domain import Kind, Mates, Presence, Severity, Workload
from sentinel.core.grouping import Grouping
from sentinel.core.peers import ABSTAINS, SLOW_JOB, STRAGGLER, Why
from sentinel.core.verdict import Settings, Watch
from sentinel.data import load_catalog
from tests.core.training import CLOCK, METRICS, POWER, Job, Seat, frame_of
from tests.integration.recordings import h100

# ticks until a deviation that began at once is confirmed: 8 ticks, at least 30 s
WITHIN_TICKS, WITHIN_S = 20, 300.0


def confirmed_at(seat, row, since, step_s):
    """The tick after `since` at which an incident would be confirmed, counted as incidents do:
    up by a tick that deviates, down by one that does not."""
    told = {tick - since for tick, who, _ in seat.words if who == row}
    held_s = 0.0
    for tick in range(seat.ticks - since):
        held_s = max(held_s + (step_s if tick in told else -step_s), 0.0)
        if held_s >= max(30.0, 8 * step_s) + step_s:
            return tick
    return None


# ---- fail-slow ------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [{"clock": {1: 0.9}}, {"slow": {1: 0.9}}], ids=["clock", "slow"])
@pytest.mark.parametrize("load", [0.75, 1.1], ids=["below its cap", "at its cap"])
@pytest.mark.parametrize(
    ("gpus", "step_s", "warm"),
    [(4, 15.0, 50), (8, 1.0, 150), (8, 15.0, 50), (8, 60.0, 50), (64, 15.0, 50), (1024, 15.0, 40)],
)
def test_ten_percent_slow_is_found_within_five_minutes(gpus, step_s, warm, load, fault):
    seat = Seat(Job(gpus, seed=1, load=load, step_s=step_s)).run(warm)
    assert seat.words == []
    since = seat.ticks
    seat.run(max(WITHIN_TICKS, int(WITHIN_S / step_s)) + 1, **fault)
    assert {row for _, row, _ in seat.words} == {1}
    when = confirmed_at(seat, 1, since, step_s)
    assert when is not None
    assert when <= WITHIN_TICKS or when * step_s <= WITHIN_S
    assert seat.job_words == []
    low = "clock" in fault
    assert Why(int(seat.peers.why[1])) is (Why.LOW_CLOCK if low else Why.WORKS_THROUGH)
    assert bool(seat.peers.acts[1]) is low  # that it alone goes on is a ticket


@pytest.mark.parametrize("fault", [{"clock": {5: 0.9}}, {"slow": {5: 0.9}}], ids=["clock", "slow"])
def test_a_lasting_fault_is_not_learnt(fault):
    seat = Seat(Job(8, seed=3)).run(60)
    seat.run(500, **fault)  # two hours
    last = [row for tick, row, _ in seat.words if tick >= seat.ticks - 40]
    assert set(last) == {5}
    if "clock" in fault:
        assert len(last) == 40


def test_a_slow_gpu_of_a_pipeline_is_found_among_stages_that_differ():
    seat = Seat(Job(32, seed=2, stages=4)).run(60)
    assert seat.words == []
    seat.run(30, clock={1: 0.9})
    assert {row for _, row, _ in seat.words} == {1}


def test_a_gpu_that_grows_hot_is_found_without_a_baseline():
    seat = Seat(Job(16, seed=2)).run(60)
    seat.run(30, hot={6: 12.0})
    assert {(row, why) for _, row, why in seat.words} == {(6, Why.HOT)}
    assert seat.peers.acts[6]


def test_a_node_whose_air_warms_is_not_sixteen_faults():
    seat = Seat(Job(16, seed=2)).run(60).run(60, hot=dict.fromkeys(range(8), 5.0))
    assert seat.words == []


def test_neighbours_that_are_slow_alike_do_not_act():
    seat = Seat(Job(64, seed=2)).run(60).run(30, clock=dict.fromkeys(range(8), 0.85))
    assert {row for _, row, _ in seat.words} == set(range(8))
    assert not seat.peers.acts.any()
    assert seat.watch.alike(3, seat.peers) == "the other GPUs of 4711-n0"


def test_a_quarter_of_the_mates_odd_at_once_is_no_fault_of_one():
    seat = Seat(Job(16, seed=2)).run(60).run(30, clock=dict.fromkeys(range(0, 14, 2), 0.88))
    assert not (seat.peers.score > 1).any()
    assert ABSTAINS[seat.peers.abstains[0]] == "too many of its mates are odd at once"


# ---- slow from the start ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("job", "told"),
    [
        (Job(8, seed=1, clock={1: 0.82}), True),
        (Job(8, seed=1, clock={1: 0.84}, load=1.1), True),
        (Job(8, seed=1, clock={1: 0.82}, prof=False), True),
        (Job(8, seed=1, clock={1: 0.94}), False),  # chips differ
        (Job(8, seed=1, clock={1: 0.94}, load=1.2), False),
        (Job(16, seed=1, clock=dict.fromkeys(range(8), 0.82)), False),  # half: a setting
        (Job(8, seed=1, extra={1: 1.3}, load=1.1), False),  # more work under the cap
        (Job(8, seed=1, stages=4, load=1.2), False),
        (Job(8, seed=1, idle=(1,), clock={1: 0.2}), False),
    ],
)
def test_a_gpu_that_was_slow_from_the_start_is_a_ticket(job, told):
    seat = Seat(job).run(60)
    assert {(row, why) for _, row, why in seat.words} == ({(1, 7)} if told else set())
    assert not seat.peers.acts.any()


# ---- benign -----------------------------------------------------------------------------

TRAPS = {
    "evaluates": lambda s: [s.run(12, phase="evaluate").run(40, phase="train") for _ in range(3)],
    "checkpoints": lambda s: [
        s.run(3, phase="checkpoint").run(30, phase="train") for _ in range(4)
    ],
    "one evaluates": lambda s: [
        s.run(10, phase="one-evaluates").run(40, phase="train") for _ in range(3)
    ],
    "one evaluates often": lambda s: [
        s.run(2, phase="one-evaluates").run(6, phase="train") for _ in range(20)
    ],
    "a rank goes idle": lambda s: s.run(80, idle=(3,)),
    "a rank gets more work": lambda s: s.run(80, extra={3: 1.15}),
    "lighter work": lambda s: s.run(80, load=0.5),
    "heavier work": lambda s: s.run(80, load=1.15),
    "waits for its data": lambda s: s.run(30, pace=0.8),
    "new memory": lambda s: s.run(80, fb_mib=75_000.0, clock={3: 1.0}),
}  # fmt: skip


@pytest.mark.parametrize("gpus", [8, 64])
@pytest.mark.parametrize("trap", TRAPS)
def test_what_only_looks_odd_lasts_too_short_to_be_told(trap, gpus):
    seat = Seat(Job(gpus, seed=4)).run(50)
    TRAPS[trap](seat)
    assert all(confirmed_at(seat, row, 0, 15.0) is None for row in range(gpus)), seat.words
    assert len(seat.words) <= 2
    if trap != "a rank gets more work":
        assert seat.job_words == []


@given(
    st.integers(0, 10_000),
    st.sampled_from([4, 8, 16, 64]),
    st.sampled_from([0.3, 0.7, 0.9, 1.2]),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=12, deadline=None)
def test_healthy_jobs_of_any_kind_are_not_talked_about(seed, gpus, load, stages, in_step, prof):
    job = Job(gpus, seed, load=load, stages=stages, in_step=in_step, prof=prof)
    seat = Seat(job).run(70)
    assert seat.words == []
    assert seat.job_words == []


def test_replicas_with_loads_of_their_own_are_compared_by_their_clocks_alone():
    seat = Seat(Job(16, seed=2, in_step=False)).run(200)
    assert seat.words == []
    seat.run(40, clock={1: 0.88})
    assert {row for _, row, _ in seat.words} == {1}


@pytest.mark.parametrize("prof", [True, False])
def test_heavy_work_among_light_is_no_slow_gpu(prof):
    """Under its power cap a clock is lower; it draws more for it, and a slow GPU less."""
    job = Job(16, seed=2, in_step=False, load=0.5, prof=prof)
    seat = Seat(job).run(200)
    assert seat.words == []
    frame = job.values

    def heavy():
        values = frame()
        values[1, CLOCK], values[1, POWER], values[1, 0] = 1740.0, 695.0, 1.0
        values[:, METRICS.index("throttle_reasons")] = np.nan  # not in the exporters' own list
        return values

    job.values = heavy
    seat.run(60)
    assert seat.words == []


def test_jobs_side_by_side_are_not_compared():
    jobs = [Job(8, seed=k, name=f"j{k}", load=0.3 + 0.2 * k) for k in range(4)]
    seat = Seat(*jobs).run(60)
    assert seat.words == []
    seat.run(30, clock={1: 0.9})
    assert {row for _, row, _ in seat.words} == {1}


# ---- jobs -------------------------------------------------------------------------------


def test_a_job_that_slows_down_with_nobody_to_blame_is_the_subject_itself():
    seat = Seat(Job(16, seed=2)).run(60).run(80, pace=0.8)
    assert seat.words == []
    first, finding = seat.job_words[0]
    assert first >= 60 + 40  # not before ten minutes
    assert (finding.mates.group, finding.pattern, finding.severity) == (
        "4711",
        SLOW_JOB,
        Severity.WARNING,
    )
    assert finding.rows == tuple(range(16))
    assert "on 16 GPUs of job 4711 for 10 min" in finding.evidence.text


# ---- abstaining -------------------------------------------------------------------------


def test_without_activity_metrics_a_hidden_slowness_is_not_guessed_at():
    seat = Seat(Job(16, seed=2, prof=False)).run(60).run(60, slow={1: 0.9})
    assert seat.words == []
    assert seat.job_words == []
    seat.run(30, slow={}, clock={1: 0.9})
    assert {row for _, row, _ in seat.words} == {1}


def test_two_mates_say_nothing():
    seat = Seat(Job(3, seed=2)).run(60).run(30, clock={1: 0.8})
    assert seat.words == []
    assert {ABSTAINS[a] for a in seat.peers.abstains} == {"fewer than three comparable GPUs"}
    assert seat.peers.comparable.tolist() == [2, 2, 2]


def test_small_jobs_are_compared_by_model_and_never_act_on_it():
    jobs = [Job(2, seed=k, name=f"j{k}") for k in range(6)]
    seat = Seat(*jobs).run(60)
    assert seat.words == []
    seat.run(30, clock={1: 0.88})
    assert {row for _, row, _ in seat.words} == {1}
    assert not seat.peers.acts.any()
    assert seat.peers.comparable[1] == 11


def test_a_job_that_has_just_begun_is_left_alone():
    job = Job(8, seed=2)
    seat = Seat(job).run(60)
    job.workloads, job.mates = (Workload("job", "b"),) * 8, (Mates("b", "", "", True),) * 8
    seat.frame = replace(seat.frame, workloads=job.workloads, mates=job.mates)
    seat.run(19, clock={1: 0.8})
    assert seat.words == []
    assert {ABSTAINS[a] for a in seat.peers.abstains} == {ABSTAINS[1]}


def test_a_step_in_memory_use_begins_anew():
    seat = Seat(Job(8, seed=2)).run(60).run(19, fb_mib=20_000.0, clock={1: 0.9})
    assert seat.words == []
    seat.run(60)  # settled, and its clock of 90 % is what it has in this epoch
    assert seat.words == []


@given(st.integers(0, 200), st.integers(0, 7))
@settings(max_examples=8, deadline=None)
def test_a_mate_that_goes_silent_shifts_nobody(seed, gone):
    job = Job(8, seed, stages=2)
    seat = Seat(job).run(40)
    for _ in range(30):
        frame = replace(frame_of([job]), gpus=seat.frame.gpus, mates=seat.frame.mates)
        frame.presence[gone] = Presence.HOST_SILENT
        peers = seat.watch.look(frame, seat.window.push(frame, max_age_s=60.0), 300.0)
        assert not (peers.score > 1).any()
        assert np.isnan(peers.score[gone])


def test_a_roster_in_another_order_keeps_every_past():
    job = Job(8, seed=5)
    seat = Seat(job).run(40)
    order = np.array([7, 3, 0, 1, 2, 6, 5, 4])
    gpus, mates = tuple(job.list[i] for i in order), job.mates
    job.clock = {1: 0.9}
    for _ in range(20):
        frame = frame_of([job])
        frame = replace(frame, values=frame.values[order], gpus=gpus, mates=mates)
        peers = seat.watch.look(frame, seat.window.push(frame, max_age_s=60.0), 300.0)
    assert np.flatnonzero(peers.score > 1).tolist() == [3]  # where GPU 1 now is


# ---- the verdict ------------------------------------------------------------------------


def judged(job, ticks=30, then=30, may="move", **changes):
    watch = Watch(Settings(grid_s=60.0, deviant_may=may), load_catalog())
    first = job.frame()
    out = []
    for tick in range(ticks + then):
        if tick == ticks:
            for name, value in changes.items():
                setattr(job, name, value)
        frame = replace(job.frame(), gpus=first.gpus, mates=first.mates)
        out.append(watch.judge(frame, None))
    return out


def test_the_verdict_says_what_moved_how_far_against_whom_and_since_when():
    verdict = judged(Job(16, seed=2), clock={4: 0.9})[-1].verdicts[0]
    assert (verdict.kind, verdict.pattern) == (Kind.DEVIANT, "low SM clock")
    assert verdict.severity is Severity.CRITICAL
    first = verdict.evidence[0]
    assert (first.kind, first.metric, first.unit) == ("peers", "sm_clock_mhz", "MHz")
    assert first.value < 0.92 * first.expected
    assert "-11% against 15 mates of job 4711, less the difference earlier in this job" in (
        first.text
    )
    assert first.text.endswith("for 6 min")
    assert verdict.evidence[1].text.startswith("also against its mates: ")


def test_who_goes_on_while_all_others_wait_is_a_ticket():
    verdict = judged(Job(16, seed=2), slow={4: 0.88})[-1].verdicts[0]
    assert (verdict.severity, verdict.pattern) == (Severity.WARNING, STRAGGLER)
    assert not verdict.may_fence
    assert "they wait, this GPU does not" in verdict.evidence[0].text


@pytest.mark.parametrize(
    ("may", "fence", "move"),
    [("alert", False, False), ("fence", True, False), ("move", True, True)],
)
def test_what_a_deviation_may_do_is_policy(may, fence, move):
    verdict = judged(Job(8, seed=2), may=may, clock={4: 0.85})[-1].verdicts[0]
    assert verdict.severity is Severity.CRITICAL
    assert (verdict.may_fence, verdict.may_move) == (fence, move)


# ---- medians ----------------------------------------------------------------------------


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_medians_of_groups_are_those_of_numpy(data):
    rows = data.draw(st.integers(0, 30))
    keys = data.draw(st.lists(st.sampled_from([None, "a", "b", "c"]), min_size=rows, max_size=rows))
    cell = st.one_of(st.just(np.nan), st.floats(-1e6, 1e6))
    values = np.array([data.draw(st.lists(cell, min_size=rows, max_size=rows)) for _ in range(2)])
    groups = Grouping(keys)
    median, count = groups.median(values.reshape(2, rows))
    assert set(groups.keys) == {k for k in keys if k is not None}
    for g, key in enumerate(groups.keys):
        mine = [r for r, k in enumerate(keys) if k == key]
        assert groups.members(g).tolist() == mine
        for s in range(2):
            known = values[s, mine][np.isfinite(values[s, mine])]
            assert count[s, g] == len(known)
            assert (
                median[s, g] == pytest.approx(np.median(known))
                if len(known)
                else np.isnan(median[s, g])
            )
    laid = groups.of_rows(median)
    assert np.isnan(laid[:, [r for r, k in enumerate(keys) if k is None]]).all()


# ---- real trainings ---------------------------------------------------------------------

FIELDS = {
    "gpu_util_ratio": ("DCGM_FI_DEV_GPU_UTIL", 0.01),
    "sm_active_ratio": ("DCGM_FI_PROF_SM_ACTIVE", 1.0),
    "tensor_active_ratio": ("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", 1.0),
    "dram_active_ratio": ("DCGM_FI_PROF_DRAM_ACTIVE", 1.0),
    "power_w": ("DCGM_FI_DEV_POWER_USAGE", 1.0),
    "temp_c": ("DCGM_FI_DEV_GPU_TEMP", 1.0),
    "sm_clock_mhz": ("DCGM_FI_DEV_SM_CLOCK", 1.0),
    "throttle_reasons": ("DCGM_FI_DEV_CLOCKS_EVENT_REASONS", 1.0),
    "fb_used_mib": ("DCGM_FI_DEV_FB_USED", 1.0),
    "nvlink_tx_bytes_per_s": ("DCGM_FI_PROF_NVLINK_TX_BYTES", 1.0),
}
ACTIVITY = [
    METRICS.index(n) for n in ("sm_active_ratio", "tensor_active_ratio", "dram_active_ratio")
]


recording = functools.cache(h100)


class Recorded(Job):
    """A recording as a job: `step_s` apart, to and fro as often as asked."""

    def __init__(self, name, step_s, times):
        super().__init__(8, step_s=step_s)
        series = recording(name)
        count = len(series["DCGM_FI_DEV_GPU_TEMP"])
        order = np.arange(0, count, int(step_s))
        order = np.concatenate([order if k % 2 == 0 else order[::-1] for k in range(times)])
        self.told = np.full((len(order), 8, len(METRICS)), np.nan)
        for metric, (field, scale) in FIELDS.items():
            self.told[:, :, METRICS.index(metric)] = series[field][order] * scale
        self.place, self.low, self.waits = 0, 1.0, 1.0

    def values(self):
        self.at_s += self.step_s
        out = self.told[self.place].copy()
        self.place += 1
        out[5, CLOCK] *= self.low
        others = np.arange(8) != 5
        out[np.ix_(others, ACTIVITY)] *= self.waits
        return out


@pytest.mark.parametrize(("step_s", "times"), [(1.0, 1), (15.0, 8)])
@pytest.mark.parametrize("name", ["t2", "t3"])
def test_a_real_training_is_healthy_and_a_slow_gpu_in_it_is_found(name, step_s, times):
    half = len(Recorded(name, step_s, times).told) // 2
    healthy = Seat(Recorded(name, step_s, times)).run(2 * half)
    assert healthy.words == []
    assert healthy.worst < 0.5
    for change in ({"low": 0.9}, {"waits": 0.88}):
        seat = Seat(Recorded(name, step_s, times)).run(half)
        seat.run(half, **change)
        assert {row for _, row, _ in seat.words} == {5}, change
        assert confirmed_at(seat, 5, half, step_s) is not None, change
