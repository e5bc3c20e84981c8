"""What real fleets show and what it must not be taken for: a simulated fleet's history, bent
the way field telemetry is bent, through learning and the whole core.

No server: the history is handed over as the answers that Prometheus would give.
"""

import functools

import numpy as np
import pytest

from sentinel.backtest import backtest
from sentinel.config import Config
from sentinel.core.frame import Samples, SeriesKey
from sentinel.lab.fleet import Fleet

STEP_S = 15.0
START_S = 1_700_006_400.0
LEARNT_S = START_S + 5400.0
AT_S = LEARNT_S + 300.0  # when the unusual begins
END_S = LEARNT_S + 1500.0
ECC, REPLAY = "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", "DCGM_FI_DEV_PCIE_REPLAY_COUNTER"
HOST, GPU = "gpu-01", "3"  # busy in one gang with gpu-00


@functools.cache
def lived(change=None, hosts=6):
    """{labels: (times, values)} of a fleet; `change(fleet)` happens at AT_S."""
    fleet = Fleet(5, hosts, 8, start_s=START_S)
    parts = {}
    for first, last in ((START_S, AT_S - STEP_S), (AT_S, END_S)):
        if first == AT_S and change is not None:
            change(fleet)
        for block in fleet.history(first, last, STEP_S):
            for labels, values in zip(block.labels, block.values, strict=True):
                known = np.isfinite(values)
                key = tuple(sorted(labels.items()))
                parts.setdefault(key, []).append((block.times_s[known], values[known]))
    return {
        key: tuple(np.concatenate(p) for p in zip(*own, strict=True)) for key, own in parts.items()
    }


class History:
    """Answers as Prometheus gives them, from memory. `bend(labels, times, values)` returns the
    series that stand in for one."""

    def __init__(self, series, bend=None):
        self.keys, times, values, number = [], [], [], []
        for key, (t, v) in series.items():
            for labels, t2, v2 in bend(dict(key), t, v.copy()) if bend else [(dict(key), t, v)]:
                name = labels.pop("__name__")
                self.keys.append(SeriesKey(name, tuple(sorted(labels.items()))))
                times.append(t2)
                values.append(v2)
                number.append(np.full(len(t2), len(self.keys) - 1))
        order = np.argsort(np.concatenate(times), kind="stable")
        self.times = np.concatenate(times)[order]
        self.values = np.concatenate(values)[order]
        self.number = np.concatenate(number)[order].astype(np.int64)

    def history(self, start_s, end_s, *, slice_s):
        while start_s < end_s:
            until_s = min(start_s + slice_s, end_s)
            a, b = np.searchsorted(self.times, [start_s, until_s], side="right")
            yield Samples(until_s, self.keys, self.number[a:b], self.times[a:b], self.values[a:b])
            start_s = until_s


@pytest.fixture
def replay(tmp_path):
    def run(bend=None, change=None):
        path = tmp_path / "sentinel.yaml"
        # 90 minutes certify no baseline; what is tested here is what a trusted one does
        path.write_text(
            "prometheus: {url: 'http://127.0.0.1:1'}\ndetection: {certify_gpu_days: 0}\n"
        )
        source = History(lived(change), bend)
        window = {"learn_start_s": START_S, "learn_end_s": LEARNT_S}
        return backtest(Config.load(path), LEARNT_S, END_S, prometheus=source, **window)

    return run


def host(labels):
    return labels.get("Hostname") or labels["instance"].partition(":")[0]


def keep(pick):
    """Drops samples of HOST: `pick(labels, times)` says which stay."""

    def bend(labels, t, v):
        kept = pick(labels, t) if host(labels) == HOST else np.ones(len(t), dtype=bool)
        return [(labels, t[kept], v[kept])]

    return bend


def moved(report):
    return [i["gpu_uuid"] for i in report["incidents"] if i["would_migrate"]]


# ---- who is there -----------------------------------------------------------------------


@pytest.mark.parametrize("apart_s", [15, 30])
def test_an_exporter_that_restarts_and_finds_its_gpus_one_by_one_lost_none(replay, apart_s):
    def pick(labels, t):
        late = 30 + min(apart_s * int(labels.get("gpu", 0)), 170)
        return ~((t > AT_S) & (t <= AT_S + late))

    assert replay(keep(pick))["incidents"] == []


def test_an_exporter_under_a_new_address_that_finds_its_gpus_one_by_one_lost_none(replay):
    def bend(labels, t, v):
        if host(labels) != HOST:
            return [(labels, t, v)]
        new = {**labels, "instance": f"{HOST}:9500"}
        before, after = t < AT_S, t >= AT_S + 30 + 15 * int(labels.get("gpu", 0))
        return [(labels, t[before], v[before]), (new, t[after], v[after])]

    assert replay(bend)["incidents"] == []


def test_a_gpu_that_does_not_come_back_with_its_exporter_is_lost_within_five_minutes(replay):
    def pick(labels, t):
        return ~((t > AT_S) & ((t <= AT_S + 30) | (labels.get("gpu") == GPU)))

    report = replay(keep(pick))
    (incident,) = report["incidents"]
    assert incident["kind"] == "lost"
    assert incident["would_migrate"]
    waited = np.datetime64(incident["confirmed_at"][:-1]) - np.datetime64(int(AT_S), "s")
    assert np.timedelta64(150, "s") < waited < np.timedelta64(300, "s")


def test_a_flapping_exporter_does_not_hide_a_lost_gpu_for_ever(replay):
    def pick(labels, t):
        flaps = (t > AT_S) & ((t - AT_S) % 120 < 30)
        return ~(flaps | ((t > AT_S) & (labels.get("gpu") == GPU)))

    report = replay(keep(pick))
    assert [i["kind"] for i in report["incidents"]] == ["lost"]


def test_a_host_that_is_taken_away_is_no_fault(replay):
    assert replay(keep(lambda labels, t: t < AT_S))["incidents"] == []


# ---- counters ---------------------------------------------------------------------------


def counter(name, on_gpu, others=lambda t, v: v):
    def bend(labels, t, v):
        if labels["__name__"] != name:
            return [(labels, t, v)]
        mine = host(labels) == HOST and labels["gpu"] == GPU
        new = (on_gpu if mine else others)(t, v)
        known = np.isfinite(new)
        return [(labels, t[known], new[known])]

    return bend


def nothing(t, v):
    return np.full(len(t), np.nan)


def from_then(count):
    return lambda t, v: np.where(t > AT_S, count, np.nan)


def test_an_error_counter_that_is_left_out_until_it_counts_is_an_error_when_it_does(replay):
    report = replay(counter(ECC, from_then(2.0), nothing))
    (incident,) = report["incidents"]
    assert incident["pattern"] == "uncorrectable ECC"
    assert incident["would_migrate"]


def test_an_error_counter_that_an_exporter_was_told_to_show_is_history(replay):
    assert replay(counter(ECC, from_then(2.0), from_then(0.0)))["incidents"] == []


def test_errors_that_were_corrected_make_a_ticket_and_move_nothing(replay):
    report = replay(counter(REPLAY, lambda t, v: v + np.where(t > AT_S, 500.0, 0.0)))
    (incident,) = report["incidents"]
    assert incident["severity"] == "warning"
    assert not incident["would_migrate"]
    assert not any("alike" in e["text"] for e in incident["evidence"])


# ---- settings and faults ----------------------------------------------------------------


def lock_clocks(fleet):
    fleet.hardware.clock_factor[8:16] = 0.8


def slow_gpu(fleet):
    fleet.inject("clock", fleet.gpus[8].uuid)


def slow_fans(fleet):
    fleet.hardware.cooling_goal[8:16] = 2.5


def test_clocks_that_are_locked_on_a_whole_host_move_nothing(replay):
    report = replay(change=lock_clocks)
    assert report["incidents"]
    assert moved(report) == []
    (incident,) = report["incidents"]
    assert incident["subject"] == {"kind": "node", "id": HOST}
    assert incident["severity"] == "warning"
    assert incident["evidence"][0]["text"].startswith(f"8 of 8 GPUs of {HOST} deviate alike")


def test_one_gpu_whose_clock_is_low_moves_its_work(replay):
    report = replay(change=slow_gpu)
    assert moved(report) == [i["gpu_uuid"] for i in report["incidents"]]
    assert len(report["incidents"]) == 1


def test_a_host_whose_fans_fail_is_one_page_for_the_node_and_moves_nothing_by_itself(replay):
    report = replay(change=slow_fans)
    (incident,) = report["incidents"]
    assert incident["subject"] == {"kind": "node", "id": HOST}
    assert incident["pattern"] == "node overheating"
    assert incident["severity"] == "critical"  # the hardware throttles
    assert moved(report) == []
