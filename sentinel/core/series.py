"""What every series is, understood once and kept as arrays: the roster of the fold.

Tables that refer to each other by number: *series*, the *slots* that hold their values (one
per GPU, metric and part of the GPU), the *exporters* that are scraped, and the *links* between
a GPU and each exporter that shows it. GPUs keep their row while the roster grows. What these
say of a GPU's health or presence is decided in `core/frame.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np

from sentinel.core.catalog import Alias, Catalog, Source
from sentinel.core.domain import Bools, Floats, Ints, Mates, Workload
from sentinel.core.identity import GpuLabels, Identity, read_driver, read_gpu
from sentinel.core.tables import Exporters, Gpus, Links, Series, Slots
from sentinel.core.xid_edges import GAUGE, XidEdges

_T = TypeVar("_T")
_SLICE: Final = ("GPU_I_ID", "gpu_instance_id", "gpu_instance", "compute_index", "mig_uuid")
_WINDOW: Final = "window_size_in_ms"  # of a count of Xids that slides


@dataclass(frozen=True, slots=True)
class SeriesKey:
    """A series: its name, and its labels sorted by name, `__name__` left out."""

    name: str
    labels: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class _Labels:
    """One label set, read once for all the metrics that carry it. `work` and `driver` are codes."""

    plain: dict[str, str]
    node: str
    rank: int
    gpu: GpuLabels
    exporter: tuple[str, str]
    work: int
    driver: int
    rack: str


class Roster:
    """Every series, GPU and exporter known. `renamed` is set when a GPU's words changed."""

    def __init__(self, catalog: Catalog, identity: Identity) -> None:
        self._catalog, self._identity = catalog, identity
        self.series, self.slots, self.links = Series(), Slots(), Links()
        self.exporters, self.gpus = Exporters(), Gpus()
        self.xids = XidEdges()
        self.uuids: list[str] = []
        self.model: list[str] = []
        self.rack: list[str] = []
        self.nodes: list[str] = []
        self.works: list[Workload | None] = [None]
        self.mates: list[Mates | None] = [None]  # by the same codes as `works`
        self.drivers: list[str] = [""]
        self.renamed = False
        self._keys: Sequence[SeriesKey] = ()
        self._known = np.empty(0, dtype=np.int64)
        self._ids: dict[SeriesKey, int] = {}
        self._rows: dict[str, int] = {}
        self._by_place: dict[tuple[int, int], int] = {}  # (exporter, index) -> GPU with a UUID
        self._node_codes: dict[str, int] = {}
        self._work_codes: dict[tuple[Workload | None, Mates | None], int] = {(None, None): 0}
        self._driver_codes: dict[str, int] = {"": 0}
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
        read: dict[tuple[tuple[str, str], ...], _Labels] = {}  # a GPU's metrics share labels
        later: list[tuple[SeriesKey, Alias, _Labels]] = []
        for key in keys:
            labels = read.get(key.labels)
            if labels is None:
                labels = read[key.labels] = self._read(dict(key.labels))
            alias = self._catalog.alias(key.name, labels.plain)
            if alias is None:
                self._ids[key] = -1
            elif labels.gpu.has_uuid or alias.source is Source.UP:
                self._ids[key] = self._series(alias, labels)
            else:
                later.append((key, alias, labels))
        for key, alias, labels in later:  # by now a UUID may be known at their place
            self._ids[key] = self._series(alias, labels)
        for table in (self.series, self.slots, self.links, self.exporters, self.gpus):
            table.flush()

    def _read(self, labels: dict[str, str]) -> _Labels:
        node, rank = self._identity.node(labels)
        work = self._work(labels)
        driver = _code(read_driver(labels), self._driver_codes, self.drivers)
        exporter = self._identity.exporter(labels, node)
        rack = self._identity.rack(labels, node)
        return _Labels(labels, node, rank, read_gpu(labels, node), exporter, work, driver, rack)

    def _series(self, alias: Alias, labels: _Labels) -> int:
        seen = labels.gpu
        if alias.source is Source.UP:
            target = self._exporter(labels.exporter)
            return self.series.add(source=Source.UP, exporter=target)
        if not seen.id or "nvswitch" in labels.plain:
            return -1
        target = self._exporter(labels.exporter)
        gpu = self._gpu(seen, target)
        if labels.rack and not self.rack[gpu]:
            self.rack[gpu], self.renamed = labels.rack, True
        return self.series.add(
            source=alias.source,
            column=alias.column,
            scale=alias.scale,
            offset=alias.offset,
            slot=-1 if alias.column < 0 else self._slot(gpu, alias.column, seen.entity),
            gpu=gpu,
            link=self._link(gpu, target, labels),
            exporter=target,
            work=labels.work,
            driver=labels.driver,
            xid_slot=self._xid_slot(alias, labels, gpu),
            of_slice=any(labels.plain.get(name) for name in _SLICE),
        )

    def _slot(self, gpu: int, column: int, part: str) -> int:
        place = (gpu, column, part)
        if place not in self._slot_rows:
            self._slot_rows[place] = self.slots.add(gpu=gpu, column=column, is_part=bool(part))
        return self._slot_rows[place]

    def _xid_slot(self, alias: Alias, labels: _Labels, gpu: int) -> int:
        if alias.source is Source.XID_GAUGE:
            told, code = labels.plain.get("err_code", ""), GAUGE
        elif alias.source is Source.XID_COUNT:
            told = labels.plain.get(alias.code_label, "")
            code = int(told) if told.isdecimal() else 0
        else:
            return -1
        source = (gpu, labels.gpu.entity, labels.exporter, int(alias.source), told)
        window_ms = labels.plain.get(_WINDOW, "")
        slides = alias.window_s < math.inf and window_ms.isdecimal()
        window_s = int(window_ms) / 1000 if slides else alias.window_s
        return self.xids.slot(source, gpu, code, window_s)

    def _gpu(self, seen: GpuLabels, target: int) -> int:
        place = (target, -1 if seen.index is None else seen.index)
        if not seen.has_uuid and place in self._by_place:
            row = self._by_place[place]
        elif seen.id in self._rows:
            row = self._rows[seen.id]
        else:
            row = self._rows[seen.id] = self.gpus.add()
            self.uuids.append(seen.id)
            self.model.append("")
            self.rack.append("")
            self.renamed = True
        if seen.has_uuid and seen.index is not None:
            self._by_place[place] = row
        if not self.model[row] and seen.model:
            self.model[row], self.renamed = seen.model, True
        return row

    def _exporter(self, where: tuple[str, str]) -> int:
        if where not in self._exporter_rows:
            self._exporter_rows[where] = self.exporters.add()
        return self._exporter_rows[where]

    def _link(self, gpu: int, target: int, labels: _Labels) -> int:
        """The link. Its node is that of the best label, and of the newest series of those; its
        index the newest too, for a reboot may number the GPUs anew."""
        node, rank, index = labels.node, labels.rank, labels.gpu.index
        code = self._node_codes.setdefault(node, len(self.nodes))
        if code == len(self.nodes):
            self.nodes.append(node)
        place = -1 if index is None else index
        found = self._link_rows.get((gpu, target))
        if found is None:
            made = self.links.add(
                gpu=gpu, exporter=target, node=code, was=code, rank=rank, index=place
            )
            self._link_rows[gpu, target] = made
            self.renamed = True
            return made
        old = (self.links.get(found, "rank"), self.links.get(found, "node"))
        if rank < old[0] or (rank == old[0] and code != old[1]):
            self.links.set(found, node=code, was=old[1], rank=rank)
            self.renamed = True
        if place not in (-1, self.links.get(found, "index")):
            self.links.set(found, index=place)
            self.renamed = True
        return found

    def successor(self, target: int, index: int) -> int:
        """The newest GPU with a UUID at a place of an exporter; -1 where there is none."""
        return self._by_place.get((target, index), -1)

    def _work(self, labels: dict[str, str]) -> int:
        work = self._identity.workload(labels)
        mates = self._identity.mates(labels, work)
        code = self._work_codes.setdefault((work, mates), len(self.works))
        if code == len(self.works):
            self.works.append(work)
            self.mates.append(mates)
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
        self.model = [self.model[old] for old in rows]
        self.rack = [self.rack[old] for old in rows]
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


def _code(value: _T, codes: dict[_T, int], known: list[_T]) -> int:
    """The number of a value in `known`, where it is put if it is new."""
    code = codes.setdefault(value, len(known))
    if code == len(known):
        known.append(value)
    return code


def _renumber(numbers: Ints, old: Ints) -> Ints:
    if not len(numbers):
        return np.full(len(old), -1, dtype=np.int64)
    return np.where(old >= 0, numbers[old], -1)
