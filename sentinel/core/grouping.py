"""Medians within groups of GPUs, for many groups and signals at once, by sorting.

Groups are numbers per row; which GPUs make one is decided elsewhere. Built when the roster
changes; all groups of one size are then one array, so that nothing loops over GPUs or groups.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from sentinel.core.domain import Bools, Floats, Ints


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
        self.size: Ints = np.bincount(self.code[self._rows], minlength=len(known)).astype(np.int64)
        self._start = np.cumsum(self.size) - self.size
        # (groups of one size, their rows [groups, size]): of n rows there are at most sqrt(2 n)
        self._classes = [
            (same, self._rows[self._start[same][:, None] + np.arange(size)])
            for size in np.unique(self.size).tolist()
            for same in [np.flatnonzero(self.size == size)]
        ]

    def members(self, group: int) -> Ints:
        """The rows of one group."""
        start = self._start[group]
        return self._rows[start : start + self.size[group]]

    def median(self, values: Floats) -> tuple[Floats, Ints]:
        """(median, values known), both [signals, groups], of values [signals, rows]; a NaN is
        left out, and the median of nothing is NaN."""
        shape = (len(values), len(self.size))
        median, count = np.full(shape, np.nan), np.zeros(shape, dtype=np.int64)
        for groups, rows in self._classes:
            ranked = np.sort(values[:, rows], axis=2)  # NaN comes last
            known = rows.shape[1] - np.isnan(ranked).sum(axis=2)
            below = np.take_along_axis(ranked, np.maximum(known - 1, 0)[:, :, None] // 2, axis=2)
            above = np.minimum(known // 2, rows.shape[1] - 1)[:, :, None]
            middle = 0.5 * (below + np.take_along_axis(ranked, above, axis=2))[:, :, 0]
            median[:, groups] = np.where(known > 0, middle, np.nan)
            count[:, groups] = known
        return median, count

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
