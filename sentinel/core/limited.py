"""What a power limit explains is no evidence against a GPU.

A limit that was set lower than it was when normal was learnt makes every GPU at work draw less
and run slower than ever before. A GPU that reaches its present limit obeys it; one that is
slow for another reason draws less than it may.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from sentinel.core.domain import Bools, Floats, Frame
from sentinel.core.features import INDEX
from sentinel.core.score import Scores

_WANTED: Final = 0.95  # normal power at this share of the limit or above: the limit binds
_REACHED: Final = 0.92  # and this share of it drawn, pauses between steps included
_MOSTLY: Final = 0.5  # of the time
# Part of the power is drawn at any clock, so that near the cap a clock may fall by more than the
# power does, and what both normally are is known no better than that; a clock that is low while
# the power stays has another cause.
_CLOCK_PER_POWER: Final = 2.5
_FED: Final = 0.02  # of the clock: less is noise
_POWER, _CLOCK, _CAPPED = INDEX["power"], INDEX["sm_clock"], INDEX["power_capped"]


def power_limits(frame: Frame) -> Floats:
    """The power limit of each GPU (W) [gpus]; NaN where it is not known."""
    if "power_limit_w" not in frame.metrics:
        return np.full(len(frame.gpus), np.nan)
    limits: Floats = frame.values[:, frame.metrics.index("power_limit_w")]
    return limits


def capped(share: Floats) -> Bools:
    """Whether each GPU says that a power limit in software holds its clock most of the time
    [gpus]; `share` is the part of the time, NaN = it does not say. What it cannot reach for want
    of power is the limit's doing: its pace makes tickets and never acts. A clock that hardware
    or heat holds is told by other bits."""
    return np.asarray(np.nan_to_num(share) > _MOSTLY)


def excused(scores: Scores, limit_w: Floats) -> Scores:
    """The scores without the lower power and clock that the present limit explains.

    `limit_w` [gpus]; a GPU is excused where its work would normally draw as much as the limit
    or more, and where it does draw what it may. Where no limit is shown, its own word that
    power caps its clock counts, if what its clock lacks is in keeping with the power it lacks.
    """
    power, expected = scores.values[:, _POWER], scores.expected[:, _POWER]
    with np.errstate(invalid="ignore", divide="ignore"):
        held = (expected >= _WANTED * limit_w) & (power >= _REACHED * limit_w)
        lacks_power = 1.0 - power / expected
        lacks_clock = 1.0 - scores.values[:, _CLOCK] / scores.expected[:, _CLOCK]
        fed = np.isnan(lacks_clock) | (lacks_clock <= _CLOCK_PER_POWER * lacks_power + _FED)
        held |= np.isnan(limit_w) & capped(scores.values[:, _CAPPED]) & fed
        lower = scores.values < scores.expected
    out = np.zeros_like(scores.contribution, dtype=bool)
    for column in (_POWER, _CLOCK):
        out[:, column] = held & lower[:, column] & (scores.contribution[:, column] > 0)
    if not out.any():
        return scores
    kept = np.where(out, 0.0, scores.contribution)
    rows = out.any(axis=1)
    before = scores.score[rows]
    share = np.clip(kept[rows].sum(axis=1) / before, 0.0, 1.0)
    score, contribution = scores.score.copy(), kept
    score[rows] = before * np.sqrt(share)
    # contributions sum to the score, which went with the root of their sum
    contribution[rows] = np.divide(
        kept[rows], np.sqrt(share)[:, None], out=np.zeros_like(kept[rows]), where=share[:, None] > 0
    )
    return replace(scores, score=score, contribution=contribution)
