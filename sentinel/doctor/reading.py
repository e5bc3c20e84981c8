"""Every series of the last minutes, kept as arrays beside the daemon's own fold.

The fold keeps what the daemon needs of a GPU; this keeps what tells about its exporters: which
names, how often, how old, how many times over. Series are understood by the same roster.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from sentinel.core.catalog import Catalog, Source
from sentinel.core.domain import Bools, Floats, Ints
from sentinel.core.frame import Samples, SeriesKey
from sentinel.core.identity import Identity
from sentinel.core.series import Roster

_NEVER: Final = -np.inf
_GROW: Final = 1024


class Reading:
    """Add every answer once, in time order; then read the arrays, one row per series of a GPU
    or of `up`: `first_s`, `last_s` float64, `first`, `last` values, `count` of samples."""

    def __init__(self, catalog: Catalog, identity: Identity) -> None:
        self.catalog, self.identity = catalog, identity
        self.roster = Roster(catalog, identity)
        self.keys: list[SeriesKey] = []
        self.kinds: list[str] = []  # the exporter of the catalogue that each name is of
        self.partial = False
        self._first_s = np.full(0, np.inf)
        self._last_s = np.full(0, _NEVER)
        self._first, self._last = np.empty(0), np.empty(0)
        self._count = np.empty(0, dtype=np.int64)
        self._probe: dict[int, int] = {}  # target -> the series whose times tell its pace
        self._times: dict[int, list[Floats]] = {}

    @property
    def rows(self) -> int:
        return len(self.keys)

    @property
    def first_s(self) -> Floats:
        return self._first_s[: self.rows]

    @property
    def last_s(self) -> Floats:
        return self._last_s[: self.rows]

    @property
    def first(self) -> Floats:
        return self._first[: self.rows]

    @property
    def last(self) -> Floats:
        return self._last[: self.rows]

    @property
    def count(self) -> Ints:
        return self._count[: self.rows]

    @property
    def of_gpu(self) -> Bools:
        """Series that speak of a GPU, whatever they say of it."""
        gpus: Bools = self.roster.series.source[: self.rows] != Source.UP
        return gpus

    def add(self, samples: Samples) -> None:
        self.partial |= samples.partial
        numbers = self.roster.ids(samples.keys)
        self._learn(samples.keys, numbers)
        sid = numbers[samples.series]
        kept = (sid >= 0) & ~np.isnan(samples.values)
        sid, at_s, value = sid[kept], samples.times_s[kept], samples.values[kept]
        order = np.lexsort((at_s, sid))
        sid, at_s, value = sid[order], at_s[order], value[order]
        new = at_s > self._last_s[sid]
        sid, at_s, value = sid[new], at_s[new], value[new]
        if not len(sid):  # answers overlap
            return
        head = np.append(True, sid[1:] != sid[:-1])
        tail = np.append(head[1:], True)
        begins = head & (self._count[sid] == 0)
        self._first_s[sid[begins]], self._first[sid[begins]] = at_s[begins], value[begins]
        self._last_s[sid[tail]], self._last[sid[tail]] = at_s[tail], value[tail]
        self._count += np.bincount(sid, minlength=len(self._count))
        self._note_paces(sid, at_s)

    def interval_s(self, target: int) -> float | None:
        """The median time between a target's scrapes; None before two."""
        times = self._times.get(target, [])
        gaps = np.diff(np.concatenate(times)) if times else np.empty(0)
        return float(np.median(gaps)) if len(gaps) else None

    def labels(self, row: int) -> dict[str, str]:
        return dict(self.keys[row].labels)

    def _learn(self, keys: object, numbers: Ints) -> None:
        seen = len(self.keys)
        if not len(numbers) or int(numbers.max(initial=-1)) < seen:
            return
        for key, sid in zip(keys, numbers.tolist(), strict=False):  # type: ignore[call-overload]
            if sid >= seen:  # numbers are dealt out in order
                while len(self.keys) <= sid:
                    self.keys.append(key)
                    self.kinds.append("")
                self.keys[sid] = key
                alias = self.catalog.alias(key.name, dict(key.labels))
                self.kinds[sid] = alias.exporter if alias else ""
        more = len(self.keys) - len(self._count)
        if more > 0:
            more += _GROW
            self._first_s = np.append(self._first_s, np.full(more, np.inf))
            self._last_s = np.append(self._last_s, np.full(more, _NEVER))
            self._first = np.append(self._first, np.full(more, np.nan))
            self._last = np.append(self._last, np.full(more, np.nan))
            self._count = np.append(self._count, np.zeros(more, dtype=np.int64))

    def _note_paces(self, sid: Ints, at_s: Floats) -> None:
        """`sid` is in order. Of a target the series with most samples tells the pace: mostly `up`,
        which no pod's coming and going ends."""
        series = self.roster.series
        target_of = series.exporter
        one, samples = np.unique(sid, return_counts=True)
        order = np.lexsort((series.source[one] == Source.UP, samples, target_of[one]))
        best = np.append(target_of[one][order][1:] != target_of[one][order][:-1], True)
        for target, row in zip(
            target_of[one][order][best].tolist(), one[order][best].tolist(), strict=True
        ):
            self._probe.setdefault(target, row)
        at = np.flatnonzero(np.isin(sid, np.array(list(self._probe.values()))))
        if not len(at):
            return
        rows, starts = np.unique(sid[at], return_index=True)
        for row, times in zip(rows.tolist(), np.split(at_s[at], starts[1:]), strict=True):
            self._times.setdefault(int(target_of[row]), []).append(times)
