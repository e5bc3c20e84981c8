"""From signals to a score, step by step of the grid: one code for any number of rows.

A *ring* holds the last `STEPS` grid steps of signals [steps, rows, signals], oldest first.
Rows are GPUs at one moment (the daemon), or the moments of one series (`learn.detector`):
the arithmetic is the same, value by value, and knows nothing of the other rows.

A score is smoothed so that what lasts outranks what flickers, without waiting for it:

    score = sqrt(s * mean of s over the last grid steps), s = distance / radius

A blip of one step among five counts half, in the square root; a lasting deviation in full.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from sentinel.core.domain import Bools, Floats, Ints
from sentinel.core.score import MEAN, NOW, SPREAD, Density, Space, score_rows

STEPS: Final = 10  # grid steps of the window; 20 and 60 rank worse on labelled telemetry
_ENOUGH: Final = STEPS // 2  # known steps, below which a mean and a spread say nothing


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """`score` [rows], NaN = not scored, 1.0 = the edge; `novel` [rows]; `contribution` [rows,
    columns] sums to the score; `expected` [rows, columns]; `raw` [rows] is the score before
    smoothing."""

    score: Floats
    novel: Bools
    contribution: Floats
    expected: Floats
    raw: Floats


def window_columns(space: Space, ring: Floats) -> Floats:
    """The columns of a space [rows, columns] at the newest step of a ring [steps, rows,
    signals]. Unknown values (NaN) are left out of means and spreads, which are NaN
    themselves until half of the window is known."""
    out = np.empty((ring.shape[1], len(space.names)))
    now, mean, spread = (space.kind == kind for kind in (NOW, MEAN, SPREAD))
    out[:, now] = ring[-1][:, space.signal[now]]
    if not (mean.any() or spread.any()):
        return out
    # step by step, never a reduction whose order numpy chooses: a prefix gives equal bits
    total, count, square = (np.zeros(ring.shape[1:]) for _ in range(3))
    for step in ring:
        known = np.isfinite(step)
        total += np.where(known, step, 0.0)
        count += known
    with np.errstate(invalid="ignore", divide="ignore"):
        about = total / count
        for step in ring:
            away = step - about
            square += np.where(np.isfinite(away), away * away, 0.0)
        deviation = np.sqrt(square / count)
    about[count < _ENOUGH] = np.nan
    deviation[count < _ENOUGH] = np.nan
    out[:, mean] = about[:, space.signal[mean]]
    out[:, spread] = deviation[:, space.signal[spread]]
    return out


def smooth(raw: Floats, contribution: Floats, before: Floats) -> tuple[Floats, Floats]:
    """(score, contribution) of raw scores [rows] and their contributions [rows, columns];
    `before` [steps, rows] are the raw scores of the steps before, NaN where there was none."""
    if not len(before):
        return raw, contribution
    total, count = np.where(np.isfinite(raw), raw, 0.0), np.isfinite(raw).astype(np.float64)
    for earlier in before:
        known = np.isfinite(earlier)
        total += np.where(known, earlier, 0.0)
        count += known
    score: Floats = np.sqrt(raw * (total / np.maximum(count, 1.0)))
    share = np.divide(score, raw, out=np.zeros_like(raw), where=raw > 0)
    return score, contribution * share[:, None]


class Stream:
    """The ring of one cohort, fed at every tick. Within one grid step the latest word counts.

    Rows are the caller's; `follow` moves what is known when they change.
    """

    def __init__(self, space: Space) -> None:
        self.space = space
        windowed = bool((space.kind != NOW).any())
        self._steps = STEPS if windowed else 1
        self._ring = np.full((self._steps, 0, space.signals), np.nan)
        self._raw = np.full((space.smooth_steps, 0), np.nan)
        self._step = -1

    def follow(self, source: Ints) -> None:
        """Rows come from `source`, their place before; -1 is a new row without a past."""
        kept = source >= 0
        for name, old in (("_ring", self._ring), ("_raw", self._raw)):
            new = np.full((len(old), len(source), *old.shape[2:]), np.nan)
            new[:, kept] = old[:, source[kept]]
            setattr(self, name, new)

    def push(
        self, step: int, signals: Floats, density: Density, softer: Floats | None = None
    ) -> tuple[Scored, Floats]:
        """Takes the signals [rows, signals] of grid step `step` (they only grow) and gives
        (scores, columns). Steps that were missed are unknown."""
        if step != self._step:
            self._ring = _shift(self._ring, step - self._step)
            self._raw = _shift(self._raw, step - self._step)
            self._step = step
        self._ring[-1] = signals
        columns = density.bounded(window_columns(self.space, self._ring))
        raw, novel, contribution, expected = score_rows(density, columns, softer)
        score, contribution = smooth(raw, contribution, self._raw[:-1])
        self._raw[-1] = raw
        return Scored(score, novel, contribution, expected, raw), columns


def _shift(ring: Floats, steps: int) -> Floats:
    """A ring [steps, ...] moved on, the new places unknown."""
    out = np.full_like(ring, np.nan)
    if 0 < steps < len(ring):
        out[:-steps] = ring[steps:]
    return out
