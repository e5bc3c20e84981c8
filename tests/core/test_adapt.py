"""New normal: earned by time and by company, never by what is under suspicion."""

import numpy as np
import pytest

from sentinel.core.adapt import BLOCK_STEPS, DWELL_S, Adapter
from sentinel.core.score import GPU_SPACE, Density, score_rows, signal_space

STEP_S = 60.0
BLOCKS = int(DWELL_S / STEP_S / BLOCK_STEPS)


def density(space=None, width=3):
    space = space or signal_space(tuple("abc"))
    width = len(space.names)
    return Density(
        space, np.zeros((1, width)), np.zeros(1, dtype=int), np.ones(width), 2.0, 2.0, reach=0.5
    )


def show(adapter, state, blocks, gpus=1, may_learn=True):
    """`gpus` GPUs in one state for so many blocks of grid steps."""
    rows = np.tile(np.asarray(state, dtype=float), (gpus, 1))
    who = np.arange(gpus)
    for _ in range(blocks * BLOCK_STEPS):
        raw = score_rows(adapter.density, rows)[0]
        adapter.add(rows, raw, np.full(gpus, may_learn), who)


def test_a_state_is_normal_after_its_dwell_and_not_before():
    adapter = Adapter(density(), step_s=STEP_S)
    show(adapter, [5, 0, 0], BLOCKS - 1)
    assert adapter.added == 0
    show(adapter, [5, 0, 0], 1)
    assert adapter.added == 1
    assert score_rows(adapter.density, np.array([[5.0, 0, 0]]))[0][0] == pytest.approx(0, abs=1e-6)


def test_dwell_adds_up_over_visits():
    adapter = Adapter(density(), step_s=STEP_S)
    for _ in range(BLOCKS):
        show(adapter, [5, 0, 0], 1)
        show(adapter, [0, 0, 0], 3)
    assert adapter.added == 1


def test_a_state_not_seen_for_two_weeks_begins_anew():
    adapter = Adapter(density(), step_s=3600.0)
    show(adapter, [5, 0, 0], 1)  # 30 hours: learnt at once
    assert adapter.added == 1
    slow = Adapter(density(), step_s=STEP_S)
    show(slow, [5, 0, 0], BLOCKS - 1)
    show(slow, [0, 0, 0], int(14 * 86_400 / STEP_S / BLOCK_STEPS) + 2)
    show(slow, [5, 0, 0], BLOCKS - 1)
    assert slow.added == 0


def test_what_is_under_suspicion_teaches_nothing():
    adapter = Adapter(density(), step_s=STEP_S)
    show(adapter, [5, 0, 0], 3 * BLOCKS, may_learn=False)
    assert adapter.added == 0


def test_one_ill_gpu_teaches_its_fleet_nothing_and_three_do():
    alone = Adapter(density(), step_s=STEP_S, gpus=100)
    show(alone, [5, 0, 0], 10 * BLOCKS, gpus=1)
    assert alone.added == 0
    together = Adapter(density(), step_s=STEP_S, gpus=100)
    show(together, [5, 0, 0], BLOCKS, gpus=3)
    assert together.added == 1


def test_many_gpus_do_not_make_it_quicker_than_their_share_of_the_dwell():
    adapter = Adapter(density(), step_s=STEP_S, gpus=1000)
    show(adapter, [5, 0, 0], BLOCKS // 3 - 1, gpus=500)
    assert adapter.added == 0
    show(adapter, [5, 0, 0], 1, gpus=500)
    assert adapter.added == 1


def test_heat_is_never_learnt_as_normal():
    adapter = Adapter(density(GPU_SPACE), step_s=STEP_S)
    hot = np.zeros(len(GPU_SPACE.names))
    hot[GPU_SPACE.names.index("temp_excess")] = 8.0
    hot[GPU_SPACE.names.index("power")] = 6.0
    show(adapter, hot, 2 * BLOCKS)
    assert (adapter.density.cores[:, GPU_SPACE.physical] == 0).all()


def test_it_stays_bounded_in_a_storm_of_new_states():
    adapter = Adapter(density(), step_s=STEP_S, gpus=1)
    rng = np.random.default_rng(0)
    for _ in range(40):
        rows = rng.uniform(-1e3, 1e3, (BLOCK_STEPS, 3))
        adapter.add(
            rows,
            np.full(len(rows), 9.0),
            np.ones(len(rows), bool),
            np.zeros(len(rows), int),
            steps=BLOCK_STEPS,
        )
    assert len(adapter._seen_s) <= 256


def test_gaps_in_a_state_do_not_matter():
    adapter = Adapter(density(), step_s=STEP_S)
    show(adapter, [5, np.nan, 0], BLOCKS)
    assert adapter.added == 1
