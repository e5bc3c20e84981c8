"""Arrays that grow and shrink together: the tables of the fold of telemetry.

Each table's rows are numbers that the other tables refer to. Nothing here knows what they mean
beyond their names; `core/series.py` fills them and `core/frame.py` reads them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from sentinel.core.catalog import Source
from sentinel.core.domain import Bools, Floats, Ints

_PACES: Final = 9  # paces of an exporter that are remembered, for their median
_NEVER: Final = -math.inf


class _Table:
    """Arrays of one length. `columns` gives each its type and the value of a new row."""

    columns: ClassVar[Mapping[str, tuple[Any, float]]]

    def __init__(self) -> None:
        self.rows = 0  # rows promised so far; the arrays follow at `flush`
        self._new: dict[int, dict[str, float]] = {}
        for name, (dtype, _) in self.columns.items():
            setattr(self, name, np.empty(0, dtype=dtype))

    def add(self, **values: float) -> int:
        """Promises a new row; what is not given has its default."""
        self._new[self.rows] = values
        self.rows += 1
        return self.rows - 1

    def get(self, row: int, name: str) -> float:
        """One value of a row, promised or real."""
        if row in self._new:
            return self._new[row].get(name, self.columns[name][1])
        return float(getattr(self, name)[row])

    def set(self, row: int, **values: float) -> None:
        """Changes a row, promised or real."""
        if row in self._new:
            self._new[row].update(values)
        else:
            for name, value in values.items():
                getattr(self, name)[row] = value

    def flush(self) -> None:
        if not self._new:
            return
        for name, (dtype, fill) in self.columns.items():
            new = np.array([row.get(name, fill) for row in self._new.values()], dtype=dtype)
            setattr(self, name, np.concatenate([getattr(self, name), new]))
        self._new.clear()

    def keep(self, kept: Bools) -> Ints:
        """Drops rows; returns the new number of each old row, -1 for the dropped."""
        for name in self.columns:
            setattr(self, name, getattr(self, name)[kept])
        self.rows = int(np.count_nonzero(kept))
        return np.where(kept, np.cumsum(kept) - 1, -1)


class Series(_Table):
    columns: ClassVar = {
        "source": (np.int8, Source.NONE),
        "column": (np.int64, -1),
        "scale": (np.float64, 1.0),
        "offset": (np.float64, 0.0),
        "slot": (np.int64, -1),
        "gpu": (np.int64, -1),
        "link": (np.int64, -1),
        "exporter": (np.int64, -1),
        "work": (np.int64, 0),
        "driver": (np.int64, 0),
        "xid_slot": (np.int64, -1),
        "of_slice": (np.bool_, False),
        "last_s": (np.float64, _NEVER),
    }
    source: npt.NDArray[np.int8]
    column: Ints
    scale: Floats
    offset: Floats
    slot: Ints
    gpu: Ints
    link: Ints
    exporter: Ints
    work: Ints
    driver: Ints
    xid_slot: Ints
    of_slice: Bools
    last_s: Floats


class Slots(_Table):
    """`is_part`: the value of a slice or a link, not of the whole GPU. `changed_s`: the sample
    at which the value was last another than before, or was first seen."""

    columns: ClassVar = {
        "gpu": (np.int64, -1),
        "column": (np.int64, -1),
        "is_part": (np.bool_, False),
        "at_s": (np.float64, _NEVER),
        "value": (np.float64, math.nan),
        "changed_s": (np.float64, _NEVER),
    }
    gpu: Ints
    column: Ints
    is_part: Bools
    at_s: Floats
    value: Floats
    changed_s: Floats


class Links(_Table):
    """`was` is the node's name before the last change, if it changed; `index` the GPU's place
    by this exporter's count, -1 where it tells none. `busy_work` is the last work that was
    named, at `busy_s`; `work` may be none (0)."""

    columns: ClassVar = {
        "gpu": (np.int64, -1),
        "exporter": (np.int64, -1),
        "node": (np.int64, 0),
        "was": (np.int64, 0),
        "rank": (np.int64, 0),
        "index": (np.int64, -1),
        "first_s": (np.float64, math.inf),
        "at_s": (np.float64, _NEVER),
        "work": (np.int64, 0),
        "busy_work": (np.int64, 0),
        "busy_s": (np.float64, _NEVER),
    }
    gpu: Ints
    exporter: Ints
    node: Ints
    was: Ints
    rank: Ints
    index: Ints
    first_s: Floats
    at_s: Floats
    work: Ints
    busy_work: Ints
    busy_s: Floats


class Exporters(_Table):
    """`at_s` is the newest GPU sample; `first_s` the first of all and `resumed_s` the first
    after a silence, -inf before there is one; `up` as Prometheus says at `up_s`, 1 where it
    does not.
    `paces` float64 [exporters, 9] are the last scrape intervals seen, NaN where none."""

    columns: ClassVar = {
        "at_s": (np.float64, _NEVER),
        "first_s": (np.float64, _NEVER),
        "resumed_s": (np.float64, _NEVER),
        "up": (np.float64, 1.0),
        "up_s": (np.float64, _NEVER),
        "pace_count": (np.int64, 0),
    }
    at_s: Floats
    first_s: Floats
    resumed_s: Floats
    up: Floats
    up_s: Floats
    pace_count: Ints

    def __init__(self) -> None:
        super().__init__()
        self.paces = np.empty((0, _PACES))
        self.interval_s = np.empty(0)

    def flush(self) -> None:
        super().flush()
        more = self.rows - len(self.paces)
        self.paces = np.concatenate([self.paces, np.full((more, _PACES), np.nan)])
        self.interval_s = np.append(self.interval_s, np.full(more, np.nan))

    def keep(self, kept: Bools) -> Ints:
        self.paces, self.interval_s = self.paces[kept], self.interval_s[kept]
        return super().keep(kept)

    def note_paces(self, exporter: Ints, pace_s: Floats) -> None:
        """Times between neighbouring samples of one series. An exporter's interval is the
        median of the last few batches' shortest: missed scrapes and returning series are long,
        a shifted scrape is one short."""
        shortest = np.full(self.rows, np.inf)
        np.minimum.at(shortest, exporter, pace_s)
        seen = np.flatnonzero(np.isfinite(shortest))
        self.paces[seen, self.pace_count[seen] % _PACES] = shortest[seen]
        self.pace_count[seen] += 1
        count = np.minimum(self.pace_count[seen], _PACES)
        ordered = np.sort(self.paces[seen], axis=1)  # NaN last
        self.interval_s[seen] = ordered[np.arange(len(seen)), (count - 1) // 2]


class Gpus(_Table):
    """`cut_s` is the newest sample of a slice: a GPU that is cut up (MIG) has some. `driver` is
    its driver's version, as a code, 0 where none is told; `driver_s` when that replaced another,
    0 where it was not seen to."""

    columns: ClassVar = {
        "first_s": (np.float64, math.inf),
        "cut_s": (np.float64, _NEVER),
        "driver": (np.int64, 0),
        "driver_s": (np.float64, 0.0),
    }
    first_s: Floats
    cut_s: Floats
    driver: Ints
    driver_s: Floats
