"""The ring: windows, gaps, rosters, and that live and whole series are one arithmetic."""

import numpy as np
import pytest

from sentinel.core.score import MEAN, NOW, SPREAD, Density, signal_space
from sentinel.core.stream import STEPS, Stream, smooth, window_columns

SPACE = signal_space(("a", "b"), kinds=(NOW, MEAN, SPREAD), smooth_steps=5)


def density(space=SPACE):
    width = len(space.names)
    return Density(space, np.zeros((1, width)), np.zeros(1, int), np.ones(width), 2.0, 2.0)


def test_columns_are_now_mean_and_spread_of_what_is_known():
    ring = np.full((STEPS, 1, 2), np.nan)
    ring[-6:, 0, 0] = [1, 2, 4, 5, np.nan, 6]
    columns = window_columns(SPACE, ring)[0]
    assert columns[0] == 6
    assert columns[2] == pytest.approx(3.6)
    assert columns[4] == pytest.approx(np.std([1, 2, 4, 5, 6]))
    assert np.isnan(columns[[1, 3, 5]]).all()


def test_within_one_grid_step_the_latest_word_counts():
    stream, known = Stream(SPACE), density()
    stream.follow(np.array([-1]))
    for step, value in ((0, 1.0), (0, 9.0), (1, 3.0), (2, 6.0), (3, 5.0), (4, 7.0)):
        _, columns = stream.push(step, np.array([[value, 0.0]]), known)
    assert columns[0, 2] == pytest.approx(6)


def test_steps_that_were_missed_are_unknown_and_a_long_gap_empties_the_ring():
    stream, known = Stream(SPACE), density()
    stream.follow(np.array([-1]))
    for step in (0, 1, 2, 3):
        stream.push(step, np.array([[5.0, 0.0]]), known)
    assert stream.push(7, np.array([[10.0, 0.0]]), known)[1][0, 2] == pytest.approx(6)
    assert np.isnan(stream.push(7 + STEPS, np.array([[1.0, 0.0]]), known)[1][0, 2])


def test_rows_keep_their_past_when_the_roster_changes():
    stream, known = Stream(SPACE), density()
    stream.follow(np.array([-1, -1]))
    for step in (0, 1, 2, 3):
        stream.push(step, np.array([[1.0, 0.0], [5.0, 0.0]]), known)
    stream.follow(np.array([1, -1]))
    columns = stream.push(4, np.array([[10.0, 0.0], [3.0, 0.0]]), known)[1]
    assert columns[0, 2] == pytest.approx(6.0)
    assert np.isnan(columns[1, 2])


def test_a_blip_counts_half_and_a_lasting_deviation_in_full():
    raw, none = np.array([2.0]), np.zeros((1, 1))
    score, share = smooth(raw, np.array([[2.0]]), np.zeros((4, 1)))
    assert score[0] == pytest.approx(2 * np.sqrt(0.2))
    assert share.sum() == pytest.approx(score[0])
    assert smooth(raw, none, np.full((4, 1), 2.0))[0][0] == pytest.approx(2)
    assert smooth(raw, none, np.full((4, 1), np.nan))[0][0] == pytest.approx(2)
