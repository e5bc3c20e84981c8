"""New normal: what a cohort has come to do since it was learnt, once it has earned it.

A row that lies further than the density's `reach` from every core is a *state* of its own.
States like it gather under one provisional state, which becomes a core when

- it has been shown for `DWELL_S` in all, over moments at which it `may_learn` (the caller says
  False for a GPU under an incident or with hard evidence against it), and
- enough different GPUs have shown it, each for its share of that time: `GPUS`, or the whole
  cohort where it is smaller. One GPU that is ill teaches a fleet nothing.

A caller may also bound how far `within` normal a state must lie, so that growth cannot creep
on from core to core. Growth excuses and never accuses: demand that no training has seen
stays novel. A provisional state that is not seen for `FORGET_S` is forgotten. What physics makes
independent of demand (heat above what the power explains, throttling, errors) is never
learnt so: a new core takes these columns from the nearest core of old.

Everything is bounded and in a fixed order: the same rows give the same cores. Cores grow only
at every `BLOCK_STEPS`-th grid step, so that series can be scored in blocks.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import numpy as np

from sentinel.core.domain import Bools, Floats, Ints
from sentinel.core.score import Density, distance2, score_rows

DWELL_S: Final = 3 * 3600.0
FORGET_S: Final = 14 * 86_400.0
GPUS: Final = 3
BLOCK_STEPS: Final = 30
_JOIN: Final = 1.0
_PANEL: Final = 64  # GPUs listened to in one block: `GPUS` of them are enough
_PROVISIONAL: Final = 256
_ADDED: Final = 256  # cores found in operation; then the oldest of them goes
_SHOWN_BY: Final = 8  # GPUs remembered per provisional state


class Adapter:
    """The density of one cohort as it grows. `density` is the one to score with now.

    `gpus` is how many GPUs the cohort has, `step_s` the length of a grid step, `within` the
    score by the cores of training beyond which nothing is learnt.
    """

    def __init__(
        self, density: Density, *, step_s: float, gpus: int = 1, within: float = np.inf
    ) -> None:
        self.density = dataclasses.replace(density, learnt=len(density.cores))
        self._within = within
        self._step_s = step_s
        self._gpus = min(GPUS, max(1, gpus))
        self._learnt = len(density.cores)
        self._columns: Bools = np.any(np.isfinite(density.cores), axis=0)
        self._steps = 0
        self._panel: dict[int, None] = {}
        self._rows: list[Floats] = []
        self._who: list[Ints] = []
        width = density.cores.shape[1]
        # provisional states: sums and counts of their rows, when last seen, and by whom how long
        self._sum, self._count = np.zeros((0, width)), np.zeros((0, width))
        self._seen_s = np.zeros(0)
        self._shown = np.full((0, _SHOWN_BY), -1, dtype=np.int64)
        self._dwell_s = np.zeros((0, _SHOWN_BY))

    def cohort_of(self, gpus: int) -> None:
        """Says how many GPUs the cohort has now."""
        self._gpus = min(GPUS, max(1, gpus))

    @property
    def added(self) -> int:
        """How many cores have been found in operation."""
        return len(self.density.cores) - self._learnt

    def add(
        self, columns: Floats, raw: Floats, may_learn: Bools, gpu: Ints, *, steps: int = 1
    ) -> None:
        """Rows of the next `steps` grid steps in time order: their columns [rows, columns] and
        raw scores [rows] by the present density, whether each may be learnt from, and whose
        it is (`gpu`, a number of its own). Where steps were missed nothing is known of them."""
        strange = np.flatnonzero(may_learn & (raw > self.density.reach))
        for row in strange:
            who = int(gpu[row])
            if who in self._panel or len(self._panel) < _PANEL:
                self._panel[who] = None
        if len(strange):
            heard = strange[np.isin(gpu[strange], list(self._panel))]
            self._rows.append(columns[heard])
            self._who.append(gpu[heard])
        before, self._steps = self._steps, self._steps + steps
        if before // BLOCK_STEPS != self._steps // BLOCK_STEPS:
            self._fold()

    def _fold(self) -> None:
        """One block: rows join provisional states, and those that have earned it are cores."""
        now_s = self._steps * self._step_s
        self._keep(now_s - self._seen_s <= FORGET_S)
        rows = np.concatenate(self._rows) if self._rows else np.zeros((0, len(self._columns)))
        who = np.concatenate(self._who) if self._who else np.zeros(0, dtype=np.int64)
        self._rows, self._who, self._panel = [], [], {}
        if not len(rows):
            return
        nearest = self._join(rows)
        np.add.at(self._sum, nearest, np.nan_to_num(rows))
        np.add.at(self._count, nearest, np.isfinite(rows))
        self._seen_s[nearest] = now_s
        pairs, times = np.unique(np.stack([nearest, who]), axis=1, return_counts=True)
        for state, gpu, rows_shown in zip(pairs[0], pairs[1], times, strict=True):
            self._credit(int(state), int(gpu), float(rows_shown) * self._step_s)
        enough = (self._dwell_s >= DWELL_S / self._gpus).sum(axis=1) >= self._gpus
        if enough.any():
            self._promote(self._states()[enough])
            self._keep(~enough)
        if len(self._seen_s) > _PROVISIONAL:  # the longest shown stay
            order = np.lexsort((-self._seen_s, -self._dwell_s.sum(axis=1)))
            kept = np.zeros(len(order), dtype=bool)
            kept[order[:_PROVISIONAL]] = True
            self._keep(kept)

    def _states(self) -> Floats:
        return np.divide(
            self._sum, self._count, out=np.full_like(self._sum, np.nan), where=self._count > 0
        )

    def _join(self, rows: Floats) -> Ints:
        """The provisional state of each row [rows]; a row near none begins one."""
        far = (_JOIN * self.density.reach * self.density.radius) ** 2
        apart = distance2(self.density, rows, self._states(), self._columns)
        left = np.flatnonzero(~(apart <= far).any(axis=1))
        between = distance2(self.density, rows[left], rows[left], self._columns)
        chosen = left[_leaders(between > far)]
        new = len(chosen)
        if new:
            apart = np.concatenate(
                [apart, distance2(self.density, rows, rows[chosen], self._columns)], axis=1
            )
            apart[chosen, np.arange(apart.shape[1] - new, apart.shape[1])] = 0.0
            width = len(self._columns)
            self._sum = np.concatenate([self._sum, np.zeros((new, width))])
            self._count = np.concatenate([self._count, np.zeros((new, width))])
            self._seen_s = np.concatenate([self._seen_s, np.zeros(new)])
            none = np.full((new, _SHOWN_BY), -1, dtype=np.int64)
            self._shown = np.concatenate([self._shown, none])
            self._dwell_s = np.concatenate([self._dwell_s, np.zeros((new, _SHOWN_BY))])
        nearest: Ints = np.argmin(apart, axis=1)
        return nearest

    def _credit(self, state: int, gpu: int, shown_s: float) -> None:
        """Adds to a GPU's time in a state; of many GPUs those that showed it longest are kept."""
        own = np.flatnonzero(self._shown[state] == gpu)
        slot = int(own[0]) if len(own) else int(np.argmin(self._dwell_s[state]))
        if not len(own):
            if self._dwell_s[state, slot] > shown_s:
                return
            self._shown[state, slot], self._dwell_s[state, slot] = gpu, 0.0
        self._dwell_s[state, slot] += shown_s

    def _promote(self, states: Floats) -> None:
        density = self.density
        learnt = dataclasses.replace(density, cores=density.cores[: self._learnt])
        states = states[score_rows(learnt, states)[0] <= self._within]
        old = density.cores[: self._learnt]
        every = self._columns & ~density.space.physical
        nearest = np.argmin(distance2(density, states, old, every), axis=1)
        physical = density.space.physical
        states[:, physical] = old[nearest][:, physical]
        states[:, ~self._columns] = np.nan
        cores = np.concatenate([density.cores[self._learnt :], states])[-_ADDED:]
        clusters = np.concatenate([density.clusters[self._learnt :], density.clusters[nearest]])[
            -_ADDED:
        ]
        self.density = dataclasses.replace(
            density,
            cores=np.concatenate([old, cores]),
            clusters=np.concatenate([density.clusters[: self._learnt], clusters]),
        )

    def _keep(self, kept: Bools) -> None:
        if kept.all():
            return
        self._sum, self._count = self._sum[kept], self._count[kept]
        self._seen_s = self._seen_s[kept]
        self._shown, self._dwell_s = self._shown[kept], self._dwell_s[kept]


def _leaders(apart: Bools) -> Ints:
    """Rows such that every row is near one of them, each the first that was near none before;
    `apart` [rows, rows] says which are not near."""
    chosen: list[int] = []
    left = np.arange(len(apart))
    while len(left):
        chosen.append(int(left[0]))
        left = left[1:][apart[left[1:], left[0]]]
    return np.array(chosen, dtype=np.int64)
