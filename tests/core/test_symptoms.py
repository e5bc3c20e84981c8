"""What the counters and states of one GPU say: late rather than wrong, and never acted on."""

import numpy as np
import pytest

from sentinel.core.domain import Coverage, Frame, Gpu, Kind, Severity, Workload
from sentinel.core.symptoms import Symptoms

TICK_S = 15.0
GPUS = tuple(Gpu(f"GPU-{i}", f"node-{i // 4}", i % 4, "H100") for i in range(8))
JOB = (Workload("job", "train"),) * 8
BUSY = {
    "gpu_util_ratio": 0.98,
    "sm_active_ratio": 0.8,
    "tensor_active_ratio": 0.4,
    "dram_active_ratio": 0.3,
    "throttle_reasons": 0.0,
    "fb_used_mib": 40_000.0,
    "fb_free_mib": 40_000.0,
    "pcie_link_width": 16.0,
    "pcie_link_gen": 5.0,
    "nvlink_crc_errors": 7.0,
    "nvlink_replay_errors": 3.0,
    "nvlink_recovery_errors": 2.0,
    "nvlink_recovery_failed": 0.0,
    "power_w": 600.0,
}
BLIND = dict.fromkeys(("sm_active_ratio", "tensor_active_ratio", "dram_active_ratio"), np.nan)
NAMES = tuple(BUSY)
STUCK = {"sm_active_ratio": 0.007, "tensor_active_ratio": 0.0, "dram_active_ratio": 0.002}
WAITS = {"sm_active_ratio": 0.11, "tensor_active_ratio": 0.0, "dram_active_ratio": 0.005}
IDLE = {**STUCK, "gpu_util_ratio": 0.0, "sm_active_ratio": 0.0}


class Fleet:
    def __init__(self):
        self.symptoms, self.at_s, self.work, self.gpus = Symptoms(), 0.0, JOB, GPUS
        self.count = np.zeros((8, len(NAMES)))

    def tick(self, rows=(), grow=None, presence=None, **changes):
        """`changes` on `rows`; `grow` adds to counters of those rows, for good."""
        self.at_s += TICK_S
        values = np.tile(np.array([BUSY[n] for n in NAMES]), (8, 1))
        for name, step in (grow or {}).items():
            self.count[list(rows), NAMES.index(name)] += step
        values += self.count
        for name, value in changes.items():
            values[list(rows), NAMES.index(name)] = value
        frame = Frame(
            self.at_s, self.gpus, NAMES, values, np.zeros_like(values),
            np.zeros(8, np.int8) if presence is None else presence, self.work, Coverage(8, 8),
        )  # fmt: skip
        return self.symptoms.look(frame)

    def ticks(self, minutes, *args, **kw):
        out = []
        for _ in range(round(60 * minutes / TICK_S)):
            out = self.tick(*args, **kw)
        return out


@pytest.fixture
def fleet():
    made = Fleet()
    assert made.ticks(20) == []
    return made


def only(findings, row, pattern, metric):
    (found,) = findings
    assert (found.row, found.pattern, found.evidence.metric) == (row, pattern, metric)
    assert found.evidence.text
    assert (found.fence, found.move, found.latch) == (False, False, False)
    assert found.severity is not Severity.CRITICAL
    return found


def test_a_gpu_that_says_it_works_and_does_nothing_hangs(fleet):
    assert fleet.ticks(4.5, [3], **STUCK) == []
    found = only(fleet.ticks(1, [3], **STUCK), 3, "hang", "gpu_util_ratio")
    assert found.kind is Kind.DEVIANT
    assert "worked earlier in this job" in found.evidence.text
    assert fleet.tick() == []


@pytest.mark.parametrize(
    ("rows", "state"),
    [
        (range(8), STUCK),  # the whole job: its own matter
        ([2], WAITS),  # in a collective: some of its processors spin
        ([2], IDLE),  # without any work
        ([2], {"sm_active_ratio": np.nan, "tensor_active_ratio": np.nan,
               "dram_active_ratio": np.nan}),  # nothing is known of its activity
    ],
)  # fmt: skip
def test_what_only_looks_like_a_hang_is_none(fleet, rows, state):
    assert fleet.ticks(30, rows, **state) == []


def test_without_labels_the_node_stands_for_the_job():
    fleet = Fleet()
    fleet.work = (None,) * 8
    fleet.ticks(20)
    assert fleet.ticks(10, range(4), **STUCK) == []
    fleet.ticks(2)
    only(fleet.ticks(6, [1], **STUCK), 1, "hang", "gpu_util_ratio")


def test_where_no_activity_is_known_power_tells_a_hang():
    fleet = Fleet()
    assert fleet.ticks(20, range(8), **BLIND) == []
    seen = []
    for minute in range(20):
        fleet.tick(range(8), **BLIND)  # and none of it from one low moment
        fleet.ticks(1, range(8), **BLIND, power_w=600.0 if minute % 2 else 130.0)
        seen += fleet.tick([3], **BLIND)
    assert seen == []

    def hung(minutes, rows, watts):
        for _ in range(round(60 * minutes / TICK_S)):
            power = np.where(np.isin(np.arange(8), rows), watts, 600.0)
            out = fleet.tick(range(8), **BLIND, power_w=power)
        return out

    assert hung(14, [3], 130.0) == []
    found = only(hung(2, [3], 130.0), 3, "hang", "power_w")
    assert "at 130 W" in found.evidence.text
    assert "600 W earlier" in found.evidence.text
    assert hung(1, [], 130.0) == []
    assert hung(30, [3], 260.0) == []  # lighter work, or one that waits
    assert hung(30, range(8), 130.0) == []  # the whole job: its own matter


def test_a_gpu_that_never_worked_in_this_job_does_not_hang(fleet):
    fleet.work = (*JOB[:3], Workload("job", "another"), *JOB[4:])
    assert fleet.ticks(30, [3], **STUCK) == []


def test_a_gap_in_telemetry_is_no_time(fleet):
    fleet.ticks(4, [3], **STUCK)
    fleet.at_s += 3600.0
    assert fleet.tick([3], **STUCK) == []


@pytest.mark.parametrize(("metric", "less"), [("pcie_link_width", 8.0), ("pcie_link_gen", 3.0)])
def test_a_link_that_is_slower_under_work_than_it_was(fleet, metric, less):
    assert fleet.ticks(4, [5], **{metric: less}) == []
    found = only(fleet.ticks(2, [5], **{metric: less}), 5, "PCIe link slower than before", metric)
    assert (found.evidence.value, found.evidence.expected) == (less, BUSY[metric])
    assert fleet.tick() == []


def test_a_link_that_rests_while_nothing_works_is_well(fleet):
    assert fleet.ticks(30, [5], pcie_link_gen=1.0, **IDLE) == []


def test_a_link_that_was_never_faster_is_how_it_is():
    fleet = Fleet()
    assert fleet.ticks(30, range(8), pcie_link_width=8.0, pcie_link_gen=3.0) == []


@pytest.mark.parametrize(
    ("metric", "per_tick", "minutes"),
    [
        ("nvlink_crc_errors", 120.0, 3),
        ("nvlink_replay_errors", 30.0, 2),
        ("nvlink_recovery_errors", 1.0, 2),
    ],
)
def test_errors_of_nvlink_that_go_on_are_a_ticket(fleet, metric, per_tick, minutes):
    found = only(fleet.ticks(minutes, [1], grow={metric: per_tick}), 1, "NVLink errors", metric)
    assert found.severity is Severity.WARNING
    assert fleet.ticks(25) == []


def test_one_link_that_cannot_be_brought_back_is_enough(fleet):
    only(fleet.tick([1], grow={"nvlink_recovery_failed": 1.0}), 1, "NVLink errors",
         "nvlink_recovery_failed")  # fmt: skip


def test_a_counter_that_jumps_once_is_an_exporter_that_counts_otherwise(fleet):
    everywhere = {"nvlink_crc_errors": 1e6, "nvlink_replay_errors": 1e6}
    assert fleet.tick(range(8), grow=everywhere) == []
    assert fleet.ticks(30) == []


def test_errors_now_and_then_are_healthy(fleet):
    for _ in range(20):
        assert fleet.tick([1], grow={"nvlink_crc_errors": 4.0, "nvlink_replay_errors": 1.0}) == []
        assert fleet.ticks(3) == []


def test_a_counter_that_starts_again_is_no_error(fleet):
    fleet.count[1, NAMES.index("nvlink_crc_errors")] = 5e6
    fleet.ticks(25)
    fleet.count[1, NAMES.index("nvlink_crc_errors")] = 0.0
    assert fleet.ticks(2) == []


FULL = {"fb_used_mib": 79_200.0, "fb_free_mib": 800.0}


def test_memory_that_filled_up_is_written_down_and_told_to_nobody(fleet):
    found = only(fleet.ticks(2, [6], **FULL), 6, "memory full", "fb_used_mib")
    assert found.severity is Severity.INFO


def test_memory_that_was_full_from_the_start_is_how_it_is_meant(fleet):
    fleet.work = (Workload("job", "server"),) * 8
    assert fleet.ticks(30, range(8), **FULL) == []


def test_reasons_for_throttling_are_told_apart(fleet):
    for row, bits in ((0, 0x20), (1, 0x8 | 0x40), (2, 0x8 | 0x80), (3, 0x8), (4, 0x4), (5, 0x1)):
        fleet.ticks(2, [row], throttle_reasons=float(bits))
        told = [e.metric for e in fleet.symptoms.throttling(row, fleet.at_s)]
        assert told == {0: ["throttle_heat"], 1: ["throttle_heat"], 2: ["throttle_brake"],
                        3: ["throttle_hw"]}.get(row, [])  # fmt: skip
    fleet.ticks(10)
    assert not any(fleet.symptoms.throttling(row, fleet.at_s) for row in range(8))


def test_what_is_known_of_a_gpu_follows_it_through_a_new_roster(fleet):
    fleet.ticks(4.5, [3], **STUCK)
    fleet.gpus = (GPUS[3], *GPUS[:3], *GPUS[4:])
    only(fleet.ticks(1, [0], **STUCK), 0, "hang", "gpu_util_ratio")


def test_ten_thousand_gpus_in_which_nothing_is_wrong_cost_little():
    gpus = tuple(Gpu(f"GPU-{i}", f"node-{i // 8}", i % 8, "H100") for i in range(10_000))
    values = np.tile(np.array([BUSY[n] for n in NAMES]), (10_000, 1))
    work = tuple(Workload("job", f"j{i // 64}") for i in range(10_000))
    symptoms = Symptoms()
    for k in range(3):
        found = symptoms.look(
            Frame(15.0 * k, gpus, NAMES, values, np.zeros_like(values),
                  np.zeros(10_000, np.int8), work, Coverage(10_000, 10_000))
        )  # fmt: skip
        assert found == []
