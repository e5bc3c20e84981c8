"""What every series is, understood once and kept as arrays: the roster of the fold.

Tables that refer to each other by number: *series*, the *slots* that hold their values (one
per GPU, metric and part of the GPU), the *exporters* that are scraped, and the *links* between
a GPU and each exporter that shows it. GPUs keep their row while the roster grows. What these
say of a GPU's health or presence is decided in `core/frame.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from sentinel.core.catalog import Alias, Catalog, Source
from sentinel.core.domain import Bools, Floats, Ints, Workload
from sentinel.core.identity import GpuLabels, Identity, exporter_of, read_gpu
from sentinel.core.xid_edges import GAUGE, XidEdges

_PACES: Final = 9  # paces of an exporter that are remembered, for their median
_NEVER: Final = -math.inf


@dataclass(frozen=True, slots=True)
class SeriesKey:
    """A series: its name, and its labels sorted by name, `__name__` left out."""

    name: str
    labels: tuple[tuple[str, str], ...]


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
        "xid_slot": (np.int64, -1),
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
    xid_slot: Ints
    last_s: Floats


class Slots(_Table):
    """`is_part`: the value of a slice or a link, not of the whole GPU."""

    columns: ClassVar = {
        "gpu": (np.int64, -1),
        "column": (np.int64, -1),
        "is_part": (np.bool_, False),
        "at_s": (np.float64, _NEVER),
        "value": (np.float64, math.nan),
    }
    gpu: Ints
    column: Ints
    is_part: Bools
    at_s: Floats
    value: Floats


class Links(_Table):
    """`busy_work` is the last work that was named, at `busy_s`; `work` may be none (0)."""

    columns: ClassVar = {
        "gpu": (np.int64, -1),
        "exporter": (np.int64, -1),
        "node": (np.int64, 0),
        "rank": (np.int64, 0),
        "first_s": (np.float64, math.inf),
        "at_s": (np.float64, _NEVER),
        "work": (np.int64, 0),
        "busy_work": (np.int64, 0),
        "busy_s": (np.float64, _NEVER),
    }
    gpu: Ints
    exporter: Ints
    node: Ints
    rank: Ints
    first_s: Floats
    at_s: Floats
    work: Ints
    busy_work: Ints
    busy_s: Floats


class Exporters(_Table):
    """`at_s` is the newest GPU sample; `up` as Prometheus says at `up_s`, 1 where it does not.
    `paces` float64 [exporters, 9] are the last scrape intervals seen, NaN where none."""

    columns: ClassVar = {
        "at_s": (np.float64, _NEVER),
        "up": (np.float64, 1.0),
        "up_s": (np.float64, _NEVER),
        "pace_count": (np.int64, 0),
    }
    at_s: Floats
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
    columns: ClassVar = {"first_s": (np.float64, math.inf)}
    first_s: Floats


class Roster:
    """Every series, GPU and exporter known. `renamed` is set when a GPU's words changed."""

    def __init__(self, catalog: Catalog, identity: Identity) -> None:
        self._catalog, self._identity = catalog, identity
        self.series, self.slots, self.links = Series(), Slots(), Links()
        self.exporters, self.gpus = Exporters(), Gpus()
        self.xids = XidEdges()
        self.uuids: list[str] = []
        self.index: list[int | None] = []
        self.model: list[str] = []
        self.nodes: list[str] = []
        self.works: list[Workload | None] = [None]
        self.renamed = False
        self._keys: Sequence[SeriesKey] = ()
        self._known = np.empty(0, dtype=np.int64)
        self._ids: dict[SeriesKey, int] = {}
        self._rows: dict[str, int] = {}
        self._by_place: dict[tuple[int, int], int] = {}  # (exporter, index) -> GPU with a UUID
        self._node_codes: dict[str, int] = {}
        self._work_codes: dict[Workload | None, int] = {None: 0}
        self._exporter_rows: dict[tuple[str, str], int] = {}
        self._link_rows: dict[tuple[int, int], int] = {}
        self._slot_rows: dict[tuple[int, int, str], int] = {}

    def ids(self, keys: Sequence[SeriesKey]) -> Ints:
        """The number of each key's series; -1 for one that says nothing of a GPU."""
        if keys is not self._keys:
            self._keys, self._known = keys, np.empty(0, dtype=np.int64)
        start = len(self._known)
        if len(keys) > start:
            new = [k for k in keys[start:] if k not in self._ids]
            if new:
                self._learn(new)
            found = np.array([self._ids[k] for k in keys[start:]], dtype=np.int64)
            self._known = np.append(self._known, found)
        return self._known

    def _learn(self, keys: Sequence[SeriesKey]) -> None:
        later = []
        for key in keys:
            labels = dict(key.labels)
            alias = self._catalog.alias(key.name, labels)
            node, rank = self._identity.node(labels)
            gpu = read_gpu(labels, node)
            if alias is not None and not gpu.has_uuid and alias.source is not Source.UP:
                later.append((key, labels, alias, node, rank, gpu))
            else:
                self._ids[key] = self._series(labels, alias, node, rank, gpu)
        for key, labels, alias, node, rank, gpu in later:  # a UUID may know their place by now
            self._ids[key] = self._series(labels, alias, node, rank, gpu)
        for table in (self.series, self.slots, self.links, self.exporters, self.gpus):
            table.flush()

    def _series(
        self, labels: dict[str, str], alias: Alias | None, node: str, rank: int, seen: GpuLabels
    ) -> int:
        if alias is None:
            return -1
        where = exporter_of(labels, node)
        if alias.source is Source.UP:
            return self.series.add(source=Source.UP, exporter=self._exporter(where))
        if not (seen.id or seen.index is not None) or "nvswitch" in labels:
            return -1
        target = self._exporter(where)
        gpu = self._gpu(seen, target)
        link = self._link(gpu, target, node, rank)
        slot = xid_slot = -1
        if alias.column >= 0:
            place = (gpu, alias.column, seen.entity)
            if place not in self._slot_rows:
                part = bool(seen.entity)
                made = self.slots.add(gpu=gpu, column=alias.column, is_part=part)
                self._slot_rows[place] = made
            slot = self._slot_rows[place]
        if alias.source in (Source.XID_GAUGE, Source.XID_COUNT):
            code = GAUGE
            told = labels.get("err_code", "")
            if alias.source is Source.XID_COUNT:
                told = labels.get(alias.code_label, "")
                code = int(told) if told.isdigit() else 0
            source = (gpu, seen.entity, where, int(alias.source), told)
            xid_slot = self.xids.slot(source, gpu, code, alias.window_s)
        return self.series.add(
            source=alias.source,
            column=alias.column,
            scale=alias.scale,
            offset=alias.offset,
            slot=slot,
            gpu=gpu,
            link=link,
            exporter=target,
            work=self._work(self._identity.workload(labels)),
            xid_slot=xid_slot,
        )

    def _gpu(self, seen: GpuLabels, target: int) -> int:
        place = (target, -1 if seen.index is None else seen.index)
        if not seen.has_uuid and place in self._by_place:
            row = self._by_place[place]
        elif seen.id in self._rows:
            row = self._rows[seen.id]
        else:
            row = self._rows[seen.id] = self.gpus.add()
            self.uuids.append(seen.id)
            self.index.append(None)
            self.model.append("")
            self.renamed = True
        if seen.has_uuid and seen.index is not None:
            self._by_place[place] = row
        if self.index[row] is None and seen.index is not None:
            self.index[row], self.renamed = seen.index, True
        if not self.model[row] and seen.model:
            self.model[row], self.renamed = seen.model, True
        return row

    def _exporter(self, where: tuple[str, str]) -> int:
        if where not in self._exporter_rows:
            self._exporter_rows[where] = self.exporters.add()
        return self._exporter_rows[where]

    def _link(self, gpu: int, target: int, node: str, rank: int) -> int:
        """The link; its node is that of the best label, and of the newest series of those."""
        code = self._node_codes.setdefault(node, len(self.nodes))
        if code == len(self.nodes):
            self.nodes.append(node)
        found = self._link_rows.get((gpu, target))
        if found is None:
            made = self.links.add(gpu=gpu, exporter=target, node=code, rank=rank)
            self._link_rows[gpu, target] = made
            return made
        new = self.links._new.get(found)
        old_rank = self.links.rank[found] if new is None else new["rank"]
        old_node = self.links.node[found] if new is None else new["node"]
        if rank < old_rank or (rank == old_rank and code != old_node):
            self.links.set(found, node=code, rank=rank)
            self.renamed = True
        return found

    def _work(self, work: Workload | None) -> int:
        code = self._work_codes.setdefault(work, len(self.works))
        if code == len(self.works):
            self.works.append(work)
        return code

    def heirs(self, heard: Bools, ended: Bools, interval_s: Floats) -> Ints:
        """For each exporter that ended [exporters]: the one that shows its GPUs now, as after a
        restart under another address; -1 where there is none.

        `heard` [links] is where GPUs are heard now. Most of the GPUs must have moved, under the
        same node name, and the new one must have been scraped twice since it came.
        """
        links, count = self.links, len(ended)
        heir = np.full(count, -1, dtype=np.int64)
        old = np.flatnonzero(ended[links.exporter])
        if not len(old):
            return heir
        first_s = np.full(count, np.inf)
        np.minimum.at(first_s, links.exporter, links.first_s)
        settled = self.exporters.at_s - first_s >= 1.5 * interval_s
        now = np.full(len(self.uuids), -1, dtype=np.int64)
        now[links.gpu[heard]] = np.flatnonzero(heard)
        new = now[links.gpu[old]]
        moved = (new >= 0) & (links.node[new] == links.node[old]) & settled[links.exporter[new]]
        members = np.bincount(links.exporter[old], minlength=count)
        pair = links.exporter[old[moved]] * count + links.exporter[new[moved]]
        pairs, shared = np.unique(pair, return_counts=True)
        most = 2 * shared >= members[pairs // count]
        heir[pairs[most] // count] = pairs[most] % count
        return heir

    def forget(self, before_s: float) -> dict[int, int] | None:
        """Drops what was last seen before then. Returns the new row of each GPU that stays,
        or None when nothing was dropped."""
        series, links = self.series, self.links
        stay = series.last_s >= before_s
        if stay.all():
            return None
        link_stays = links.at_s >= before_s
        gpu_stays = np.bincount(links.gpu[link_stays], minlength=len(self.uuids)) > 0
        target_stays = np.bincount(
            links.exporter[link_stays], minlength=self.exporters.rows
        ).astype(np.bool_) | (self.exporters.up_s >= before_s)
        used = series.slot[stay & (series.slot >= 0)]
        slot_stays = np.bincount(used, minlength=self.slots.rows) > 0
        number = series.keep(stay)
        gpu = self.gpus.keep(gpu_stays)
        link, slot = links.keep(link_stays), self.slots.keep(slot_stays)
        target = self.exporters.keep(target_stays)
        for table in (series, links, self.slots):
            table.gpu = _renumber(gpu, table.gpu)
        series.link, series.slot = _renumber(link, series.link), _renumber(slot, series.slot)
        series.exporter = _renumber(target, series.exporter)
        links.exporter = _renumber(target, links.exporter)
        rows = {old: int(new) for old, new in enumerate(gpu) if new >= 0}
        self.uuids = [self.uuids[old] for old in rows]
        self.index = [self.index[old] for old in rows]
        self.model = [self.model[old] for old in rows]
        self._rows = {uuid: row for row, uuid in enumerate(self.uuids)}
        self._ids = {k: int(number[i]) for k, i in self._ids.items() if i >= 0 and number[i] >= 0}
        self._by_place = {
            (int(target[e]), i): rows[row]
            for (e, i), row in self._by_place.items()
            if row in rows and target[e] >= 0
        }
        self._exporter_rows = {
            k: int(target[e]) for k, e in self._exporter_rows.items() if target[e] >= 0
        }
        self._link_rows = {
            (int(gpu[g]), int(target[e])): int(link[i])
            for (g, e), i in self._link_rows.items()
            if link[i] >= 0
        }
        self._slot_rows = {
            (int(gpu[g]), column, part): int(slot[i])
            for (g, column, part), i in self._slot_rows.items()
            if slot[i] >= 0
        }
        self.xids, xid_slot = self.xids.forget(rows)
        series.xid_slot = _renumber(xid_slot, series.xid_slot)
        self._keys, self._known = (), np.empty(0, dtype=np.int64)
        self.renamed = True
        return rows


def _renumber(numbers: Ints, old: Ints) -> Ints:
    if not len(numbers):
        return np.full(len(old), -1, dtype=np.int64)
    return np.where(old >= 0, numbers[old], -1)
