"""A GPU that was slow all through the learning window is named, and no setting is."""

import numpy as np

from sentinel.core.features import FEATURES, INDEX
from sentinel.learn.suspects import suspects

NODES = tuple(f"node-{g // 8}" for g in range(24))


def rows(clock_of, *, capped=0.0, busy=0.9, seed=0):
    rng = np.random.default_rng(seed)
    gpu = np.repeat(np.arange(24), 40)
    values = np.full((len(gpu), len(FEATURES)), np.nan)
    values[:, INDEX["gpu_util"]] = busy
    values[:, INDEX["power"]] = 500.0
    values[:, INDEX["power_capped"]] = capped
    clock = np.full(24, 1755.0) + rng.normal(0, 10, 24)
    for g, share in clock_of.items():
        clock[g] *= share
    values[:, INDEX["sm_clock"]] = clock[gpu] + rng.normal(0, 15, len(gpu))
    return values, gpu


def test_one_slow_gpu_is_named_with_its_mates_clock():
    (found,) = suspects(*rows({5: 0.8}), NODES)
    assert found.gpu == 5
    text = found.text("GPU-5", "node-0")
    assert "suspect, not learnt as normal" in text
    assert f"{found.mates_mhz:.0f} MHz" in text


def test_a_healthy_fleet_has_none():
    assert suspects(*rows({}), NODES) == []


def test_chips_differ_a_little():
    assert suspects(*rows({3: 0.96}), NODES) == []


def test_a_whole_node_at_a_lower_clock_is_a_setting():
    assert suspects(*rows(dict.fromkeys(range(8), 0.8)), NODES) == []
    assert suspects(*rows({0: 0.8, 1: 0.8}), NODES[:2] + ("x",) * 22) == []


def test_at_the_power_cap_and_without_work_clocks_say_nothing():
    assert suspects(*rows({5: 0.8}, capped=1.0), NODES) == []
    assert suspects(*rows({5: 0.8}, busy=0.0), NODES) == []


def test_too_few_gpus_tell_nothing():
    values, gpu = rows({1: 0.7})
    few = gpu < 3
    assert suspects(values[few], gpu[few], NODES[:3]) == []
