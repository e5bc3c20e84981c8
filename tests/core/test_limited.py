"""A power limit explains a lower power and clock of those that reach it, and nothing else."""

import numpy as np
import pytest

from sentinel.core.features import FEATURES, INDEX
from sentinel.core.limited import excused
from sentinel.core.score import empty_scores

POWER, CLOCK, TEMP = INDEX["power"], INDEX["sm_clock"], INDEX["temp_excess"]


def scores_of(power, expected, parts, clock=1400.0):
    scores = empty_scores(1)
    scores.values[0, [POWER, CLOCK, TEMP]] = power, clock, 5.0
    scores.expected[0, [POWER, CLOCK, TEMP]] = expected, 1600.0, 0.0
    for column, part in parts.items():
        scores.contribution[0, column] = part
    scores.score[0] = scores.contribution.sum()
    return scores


def test_who_draws_what_a_new_limit_allows_is_excused():
    scores = scores_of(590.0, 670.0, {POWER: 0.7, CLOCK: 0.8})
    out = excused(scores, np.array([595.0]))
    assert out.score[0] == 0.0
    assert not out.contribution.any()
    assert scores.score[0] == 1.5  # what came in is left as it was


@pytest.mark.parametrize(
    ("power", "expected", "limit"),
    [
        (420.0, 670.0, 595.0),  # slower for a reason of its own: it could draw more
        (420.0, 450.0, 595.0),  # its work never needed the limit
        (590.0, 670.0, 700.0),  # the limit is where it was
        (590.0, 670.0, np.nan),
    ],
)
def test_who_is_not_held_by_the_limit_is_judged_as_ever(power, expected, limit):
    scores = scores_of(power, expected, {POWER: 0.7, CLOCK: 0.8})
    assert excused(scores, np.array([limit])).score[0] == 1.5


def test_heat_counts_under_any_limit():
    scores = scores_of(590.0, 670.0, {POWER: 0.5, CLOCK: 0.5, TEMP: 3.0})
    out = excused(scores, np.array([595.0]))
    assert out.score[0] == pytest.approx(4.0 * np.sqrt(3.0 / 4.0))
    assert out.contribution.sum() == pytest.approx(out.score[0])
    assert out.contribution[0, TEMP] == pytest.approx(out.score[0])
    assert len(out.contribution[0]) == len(FEATURES)


def test_more_power_than_normal_is_not_what_a_limit_explains():
    scores = scores_of(640.0, 620.0, {POWER: 1.2})
    assert excused(scores, np.array([640.0])).score[0] == pytest.approx(1.2)


def test_where_no_limit_is_shown_the_gpus_own_word_counts():
    scores = scores_of(590.0, 670.0, {POWER: 0.7, CLOCK: 0.8})
    scores.values[0, INDEX["power_capped"]] = 0.9
    assert excused(scores, np.array([np.nan])).score[0] == 0.0
    assert excused(scores, np.array([700.0])).score[0] == 1.5


def test_a_clock_that_is_lower_than_its_power_explains_is_no_matter_of_power():
    scores = scores_of(660.0, 670.0, {POWER: 0.1, CLOCK: 1.4}, clock=1280.0)
    scores.values[0, INDEX["power_capped"]] = 0.9
    assert excused(scores, np.array([np.nan])).score[0] == pytest.approx(1.5)
