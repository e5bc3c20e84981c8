"""The window: grid cells, gaps, rosters that change, counters and epochs of work."""

import numpy as np
import pytest

from sentinel.core.domain import Coverage, Frame, Gpu, Workload
from sentinel.core.features import CELLS, INDEX, Window

METRICS = ("power_w", "sm_clock_mhz", "fb_used_mib", "throttle_reasons", "pcie_replay")


def frame(at_s, values, gpus, workloads=None, age_s=0.0):
    array = np.asarray(values, dtype=float)
    return Frame(
        at_s=at_s,
        gpus=gpus,
        metrics=METRICS,
        values=array,
        age_s=np.full_like(array, age_s),
        presence=np.zeros(len(gpus), dtype=np.int8),
        workloads=workloads or (None,) * len(gpus),
        coverage=Coverage(len(gpus), len(gpus)),
    )


def fleet(*names):
    return tuple(Gpu(name, "node-1", i, "H100") for i, name in enumerate(names))


def feed(window, gpus, rows, start_s=0.0, step_s=15.0, **more):
    out = None
    for k, values in enumerate(rows):
        out = window.push(frame(start_s + k * step_s, values, gpus, **more), max_age_s=60.0)
    return out


def test_recent_mean_covers_this_cell_and_the_one_before():
    gpus = fleet("a")
    out = feed(Window(60.0), gpus, [[[100 + k, 1980, 0, 0, 0]] for k in range(12)])
    assert out.values[0, INDEX["power"]] == pytest.approx(np.mean(range(104, 112)))


def test_not_ready_until_two_cells_have_data():
    gpus, window = fleet("a"), Window(60.0)
    assert not feed(window, gpus, [[[100, 1980, 0, 0, 0]]] * 4).ready[0]
    assert feed(window, gpus, [[[100, 1980, 0, 0, 0]]], start_s=60.0).ready[0]


def test_after_a_long_gap_the_old_cells_are_gone():
    gpus, window = fleet("a"), Window(60.0)
    feed(window, gpus, [[[100, 1980, 0, 0, 0]]] * 8)
    out = feed(window, gpus, [[[500, 1980, 0, 0, 0]]], start_s=60.0 * (CELLS + 5))
    assert out.values[0, INDEX["power"]] == 500
    assert not out.ready[0]


def test_old_values_are_unknown_not_current():
    out = feed(Window(60.0), fleet("a"), [[[100, 1980, 0, 0, 0]]] * 8, age_s=61.0)
    assert np.isnan(out.values[0, INDEX["power"]])


def test_a_clock_of_zero_is_a_sensor_that_says_nothing():
    out = feed(Window(60.0), fleet("a"), [[[600, 0, 0, 0, 0]]] * 8)
    assert np.isnan(out.values[0, INDEX["sm_clock"]])
    assert out.values[0, INDEX["power"]] == 600


def test_a_gpu_keeps_its_past_when_the_roster_changes_around_it():
    window, b = Window(60.0), fleet("b")
    feed(window, b, [[[200, 1980, 0, 0, 0]]] * 8)
    both = fleet("a", "b")
    out = feed(window, both, [[[900, 1, 0, 0, 0], [200, 1980, 0, 0, 0]]], start_s=120.0)
    assert list(out.ready) == [False, True]
    assert out.values[1, INDEX["power"]] == 200


def test_counters_become_events_and_a_reset_is_no_event():
    gpus, window = fleet("a"), Window(60.0)
    out = feed(window, gpus, [[[1, 1, 0, 0, c]] for c in (1000, 1000, 1000, 3, 3)])
    assert out.values[0, INDEX["pcie_replay"]] == 0.0
    out = feed(window, gpus, [[[1, 1, 0, 0, 13]]], start_s=75.0)
    assert out.values[0, INDEX["pcie_replay"]] == pytest.approx(np.log10(1 + 10))


def test_only_thermal_and_hardware_bits_count_as_throttling():
    gpus = fleet("a", "b")
    out = feed(Window(60.0), gpus, [[[1, 1, 0, 4, 0], [1, 1, 0, 0x40, 0]]] * 4)
    assert list(out.values[:, INDEX["throttled"]]) == [0.0, 1.0]


def test_new_work_or_a_step_in_memory_starts_an_epoch():
    gpus, window = fleet("a", "b", "c"), Window(60.0)
    calm = [[1, 1, 10_000, 0, 0]] * 3
    jobs = (Workload("job", "1"), Workload("job", "1"), None)
    feed(window, gpus, [calm] * 4, workloads=jobs)
    moved = (Workload("job", "2"), Workload("job", "1"), None)
    rows = [[1, 1, 10_000, 0, 0], [1, 1, 60_000, 0, 0], [1, 1, 10_050, 0, 0]]
    out = feed(window, gpus, [rows], start_s=60.0, workloads=moved)
    assert list(out.settled_s) == [0.0, 0.0, np.inf]


def test_remembered_power_follows_with_the_heat_sinks_lag():
    gpus, window = fleet("a"), Window(60.0)
    feed(window, gpus, [[[100, 1, 0, 0, 0]]] * 10, step_s=1.0)
    out = feed(window, gpus, [[[500, 1, 0, 0, 0]]] * 40, start_s=10.0, step_s=1.0)
    assert out.power_ewma_w[0] == pytest.approx(500 - 400 * np.exp(-1), rel=0.02)
