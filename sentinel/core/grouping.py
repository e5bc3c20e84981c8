"""Medians within groups of GPUs, for all groups and signals at once, by sorting.

Groups are numbers per row; which GPUs make one is decided elsewhere. Built when the roster
changes; a median is then one sort per signal and no loop over GPUs or groups.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final

import numpy as np

from sentinel.core.domain import Bools, Floats, Ints

_ROOM: Final = 0.5  # of the distance between two groups' numbers is used by values
_LAST: Final = 0.9  # where a missing value sorts within its group


class Grouping:
    """`code` int64 [rows] is the group of each row, -1 for none; `size` int64 [groups]."""

    def __init__(self, keys: Sequence[Hashable | None]) -> None:
        known: dict[Hashable, int] = {}
        self.code: Ints = np.array(
            [-1 if k is None else known.setdefault(k, len(known)) for k in keys], dtype=np.int64
        )
        self.keys: tuple[Hashable, ...] = tuple(known)
        self._rows = np.flatnonzero(self.code >= 0)
        self._rows = self._rows[np.argsort(self.code[self._rows], kind="stable")]
        self._of_rows = self.code[self._rows].astype(np.float64)
        self.size: Ints = np.bincount(self.code[self._rows], minlength=len(known)).astype(np.int64)
        self._start = np.cumsum(self.size) - self.size

    def members(self, group: int) -> Ints:
        """The rows of one group."""
        start = self._start[group]
        return self._rows[start : start + self.size[group]]

    def median(self, values: Floats) -> tuple[Floats, Ints]:
        """(median, values known), both [signals, groups], of values [signals, rows]; a NaN is
        left out, and the median of nothing is NaN."""
        groups = len(self.size)
        if not groups:
            return np.zeros((len(values), 0)), np.zeros((len(values), 0), dtype=np.int64)
        own = values[:, self._rows]
        known = np.isfinite(own)
        count = np.add.reduceat(known, self._start, axis=1, dtype=np.int64)
        low = np.where(known, own, np.inf).min(axis=1, initial=np.inf, keepdims=True)
        high = np.where(known, own, -np.inf).max(axis=1, initial=-np.inf, keepdims=True)
        low = np.where(np.isfinite(low), low, 0.0)
        width = np.where(high > low, high - low, 1.0) / _ROOM
        # one number carries group and value: a plain sort is many times faster than a sort by two
        mixed = np.where(known, (own - low) / width, _LAST) + self._of_rows
        mixed.sort(axis=1)
        below = self._start + np.maximum(count - 1, 0) // 2
        above = self._start + np.minimum(count // 2, np.maximum(self.size - 1, 0))
        middle = 0.5 * (
            np.take_along_axis(mixed, below, axis=1) + np.take_along_axis(mixed, above, axis=1)
        )
        median = (middle - np.arange(groups)) * width + low
        return np.where(count > 0, median, np.nan), count

    def most(self, values: Floats) -> Floats:
        """[rows]: the largest of `values` [rows] in each row's group; NaN counts as none."""
        out = np.full(len(self.code), -np.inf)
        if len(self.size):
            top = np.maximum.reduceat(np.nan_to_num(values[self._rows], nan=-np.inf), self._start)
            out = np.where(self.code >= 0, top[np.maximum(self.code, 0)], -np.inf)
        return out

    def of_rows(self, per_group: Floats) -> Floats:
        """[signals, groups] laid out as [signals, rows]; NaN for a row without a group."""
        if not len(self.size):
            return np.full((len(per_group), len(self.code)), np.nan)
        return np.where(self.code >= 0, per_group[:, np.maximum(self.code, 0)], np.nan)

    def share(self, marked: Bools, among: Bools) -> tuple[Ints, Ints]:
        """(how many of `among` are marked, how many are among), both [groups]."""
        own, of = among[self._rows], self.code[self._rows]
        groups = len(self.size)
        counted = np.bincount(of[own], minlength=groups).astype(np.int64)
        hit = np.bincount(of[own & marked[self._rows]], minlength=groups).astype(np.int64)
        return hit, counted
