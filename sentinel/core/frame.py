"""From raw samples to one moment of the fleet: the fold of telemetry.

`Telemetry` remembers the newest sample of every series. `add` takes answers in any order and
overlap; `frame` lays the newest values out as [gpus, metrics] with their age, tells why a GPU
does not report, and hands out every Xid once. It decides what was measured and what was not,
never whether that is normal. Series are understood once (`core/series.py`); after that a tick
is array work, with no loop over GPUs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from sentinel.core.catalog import Catalog, Fold, Source
from sentinel.core.domain import (
    Bools,
    Coverage,
    Floats,
    Frame,
    Gpu,
    Ints,
    Mates,
    Presence,
    Workload,
    XidEvent,
)
from sentinel.core.doubt import Doubt, Lacks, nothing_known
from sentinel.core.identity import Identity
from sentinel.core.presence import BEHIND, TOGETHER_S, Attendance
from sentinel.core.series import Roster, SeriesKey
from sentinel.core.xid_edges import Edge, Known

__all__ = ["Identity", "Samples", "SeriesKey", "Telemetry"]

FORGET_S: Final = 86_400.0  # a GPU or a series unseen for so long is dropped
_FORGET_EVERY_S: Final = 3600.0
_SKEW_S: Final = 5.0  # a sample from further in the future is refused
_FOLDS: Final = (Fold.MAX, Fold.SUM, Fold.OR)
# What drivers and exporters write instead of "none": the blanks of DCGM in 32 and 64 bits and
# as a float (seen times 100 too), and all ones.
_BLANKS: Final = (
    (2147483632.0, 2147483647.0),
    (4294967280.0, 4294967295.0),
    (140737488355328.0, 140737488355343.0),
    (14073748835532800.0, 14073748835534300.0),
    (9.2e18, np.inf),
)


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Raw samples of one answer: `series` int64 [n] indexes `keys`, `times_s` float64 [n] are
    their own timestamps. `at_s` is the moment asked for. Readers hand the same growing `keys`
    every time, so that a series is looked up once; `partial`: the server left something out."""

    at_s: float
    keys: Sequence[SeriesKey]
    series: Ints
    times_s: Floats
    values: Floats
    partial: bool = False
    warnings: tuple[str, ...] = ()


class Telemetry:
    """The fold. Mutable, owned by one thread, no input or output of its own.

    `stale_after_s`: when an exporter without samples counts as silent; by default 60 s or
    three of its scrape intervals. `lacks` says what a model cannot have. `rejected` counts
    refused samples by reason.
    """

    def __init__(
        self,
        catalog: Catalog,
        identity: Identity,
        *,
        stale_after_s: float | None = None,
        lacks: Lacks = nothing_known,
    ) -> None:
        self.rejected: dict[str, int] = defaultdict(int)
        self._catalog = catalog
        self._low = np.array([m.valid_min for m in catalog.metrics])
        self._high = np.array([m.valid_max for m in catalog.metrics])
        self._fold = np.array([_FOLDS.index(m.fold) for m in catalog.metrics], dtype=np.int8)
        self._roster = Roster(catalog, identity)
        self._present = Attendance(self._roster, stale_after_s)
        self._doubt = Doubt(catalog, self._roster, lacks)
        self._edges: list[Edge] = []
        self._partial: tuple[bool, str] = (False, "")
        self._forgot_s = np.nan
        self._gpus: tuple[Gpu, ...] = ()
        self._home = np.zeros(0, dtype=np.int64)
        self._workloads: tuple[Workload | None, ...] = ()
        self._mates: tuple[Mates | None, ...] = ()
        self._work = np.zeros(0, dtype=np.int64)

    @property
    def scrape_interval_s(self) -> float | None:
        """The median scrape interval over the exporters, as seen; None before two scrapes."""
        known = self._roster.exporters.interval_s
        known = known[np.isfinite(known)]
        return float(np.median(known)) if len(known) else None

    # ---- samples in -----------------------------------------------------------------

    def add(self, samples: Samples) -> None:
        """Takes in an answer. A sample not newer than the newest of its series is passed over
        in silence (answers overlap); a refused one is counted. O(samples) array work."""
        if samples.partial:
            self._partial = (True, "; ".join(samples.warnings) or "no reason given")
        sid = self._roster.ids(samples.keys)[samples.series]
        series = self._roster.series
        at_s, value = samples.times_s, samples.values
        kept = sid >= 0
        sid, at_s, value = sid[kept], at_s[kept], value[kept]
        kept = ~(at_s <= series.last_s[sid])
        future = kept & ~(at_s <= samples.at_s + _SKEW_S)
        self._reject("future", future)
        nothing = kept & ~future & np.isnan(value)  # a stale marker is no sign of life
        self._reject("not a number", nothing)
        kept &= ~(future | nothing)
        sid, at_s, value = sid[kept], at_s[kept], value[kept]
        if not len(sid):
            return
        sid, at_s, value = _in_order(sid, at_s, value)
        link_before_s = self._note(sid, at_s, value)
        self._note_values(sid, at_s, value, link_before_s)

    def _reject(self, reason: str, refused: Bools) -> None:
        count = int(np.count_nonzero(refused))
        if count:
            self.rejected[reason] += count

    def _note(self, sid: Ints, at_s: Floats, value: Floats) -> Floats:
        """Who was heard, when and at what pace: series, GPUs and exporters.

        Returns the newest sample of every link before this batch.
        """
        series, links, exporters = self._roster.series, self._roster.links, self._roster.exporters
        head = np.append(True, sid[1:] != sid[:-1])
        tail = np.append(head[1:], True)
        before_s = np.where(head, series.last_s[sid], np.roll(at_s, 1))
        pace_s = at_s - before_s
        paced = np.isfinite(pace_s)
        exporters.note_paces(series.exporter[sid[paced]], pace_s[paced])
        series.last_s[sid[tail]] = at_s[tail]
        up = np.flatnonzero((series.source[sid] == Source.UP) & tail)
        exporters.up_s[series.exporter[sid[up]]] = at_s[up]
        exporters.up[series.exporter[sid[up]]] = value[up]
        link_before_s = links.at_s.copy()
        gpu = np.flatnonzero(series.link[sid] >= 0)
        s, gpu_at_s = sid[gpu], at_s[gpu]
        link = series.link[s]
        np.minimum.at(links.first_s, link, gpu_at_s)
        np.maximum.at(links.at_s, link, gpu_at_s)
        gpus, of_slice = self._roster.gpus, series.of_slice[s]
        np.minimum.at(gpus.first_s, series.gpu[s], gpu_at_s)
        np.maximum.at(gpus.cut_s, series.gpu[s[of_slice]], gpu_at_s[of_slice])
        self._present.note_returns(series.exporter[s], gpu_at_s)
        np.maximum.at(exporters.at_s, series.exporter[s], gpu_at_s)
        # the series of the newest scrape tell the work; one that names none yields to others
        newest = gpu_at_s >= links.at_s[link] - TOGETHER_S
        link, work = link[newest], series.work[s[newest]]
        links.work[link[links.at_s[link] > link_before_s[link] + TOGETHER_S]] = 0
        np.maximum.at(links.work, link, work)
        self._note_drivers(s[newest], gpu_at_s[newest])
        busy = link[work > 0]
        links.busy_work[busy], links.busy_s[busy] = links.work[busy], links.at_s[busy]
        return link_before_s

    def _note_drivers(self, sid: Ints, at_s: Floats) -> None:
        """The driver that the newest scrape tells of each GPU, and when it replaced another."""
        series, gpus = self._roster.series, self._roster.gpus
        told = series.driver[sid] > 0
        gpu, at_s = series.gpu[sid[told]], at_s[told]
        newest = np.zeros(gpus.rows, dtype=np.int64)
        np.maximum.at(newest, gpu, series.driver[sid[told]])
        other = gpu[newest[gpu] != gpus.driver[gpu]]
        if not len(other):
            return
        moment_s = np.zeros(gpus.rows)
        np.maximum.at(moment_s, gpu, at_s)
        replaced = other[gpus.driver[other] > 0]
        gpus.driver_s[replaced] = moment_s[replaced]
        gpus.driver[other] = newest[other]
        self._roster.renamed = True

    def _note_values(self, sid: Ints, at_s: Floats, raw: Floats, link_before_s: Floats) -> None:
        """Canonical values into their slots, and codes into the watch for Xids."""
        series = self._roster.series
        blank = np.zeros(len(raw), dtype=bool)
        for low, high in _BLANKS:
            blank |= (raw >= low) & (raw <= high)
        source, column = series.source[sid], series.column[sid]
        blank &= source != Source.UP
        self._reject("blank", blank)
        value = raw * series.scale[sid] + series.offset[sid]
        flag = source == Source.FLAG
        value[flag] = np.where(raw[flag] != 0, series.scale[sid[flag]], 0.0)
        measured = ~blank & (column >= 0)
        impossible = measured & ~((value >= self._low[column]) & (value <= self._high[column]))
        self._reject("out of range", impossible)
        measured &= ~impossible
        at, interval_s = np.flatnonzero(measured), self._present.intervals_s()
        foreign = np.zeros(len(raw), dtype=bool)
        foreign[at] = self._doubt.not_its_own(
            series.gpu[sid[at]],
            column[at],
            value[at],
            at_s[at],
            interval_s[series.exporter[sid[at]]],
        )
        self._reject("not on this GPU", foreign)
        measured &= ~foreign
        counted = (source == Source.XID_COUNT) & ~blank & (raw >= 0)
        coded = np.flatnonzero(((source == Source.XID_GAUGE) & measured) | counted)
        if len(coded):
            self._note_xids(sid[coded], at_s[coded], value[coded], link_before_s)
        self._fold_in(sid[measured], at_s[measured], value[measured])

    def _note_xids(self, sid: Ints, at_s: Floats, value: Floats, link_before_s: Floats) -> None:
        roster, series = self._roster, self._roster.series
        link = series.link[sid]
        known = Known(
            roster.links.first_s[link],
            link_before_s[link],
            roster.gpus.first_s[series.gpu[sid]],
            self._present.intervals_s()[series.exporter[sid]],
        )
        self._edges += roster.xids.observe(series.xid_slot[sid], at_s, value, known)

    def _fold_in(self, sid: Ints, at_s: Floats, value: Floats) -> None:
        """The newest value of each slot; of several at one moment the largest, or all bits."""
        slots = self._roster.slots
        slot = self._roster.series.slot[sid]
        before, touched = slots.value.copy(), slot
        before_s = slots.at_s[slot]
        np.maximum.at(slots.at_s, slot, at_s)
        newest = at_s >= slots.at_s[slot] - TOGETHER_S
        fresh = slot[newest & (before_s < slots.at_s[slot] - TOGETHER_S)]
        slot, value = slot[newest], value[newest]
        bits = self._fold[slots.column[slot]] == _FOLDS.index(Fold.OR)
        slots.value[fresh] = -np.inf
        np.maximum.at(slots.value, slot[~bits], value[~bits])
        if bits.any():
            mine, place = np.unique(slot[bits], return_inverse=True)
            mask = np.maximum(slots.value[mine], 0.0).astype(np.int64)
            np.bitwise_or.at(mask, place, value[bits].astype(np.int64))
            slots.value[mine] = mask
        changed = touched[slots.value[touched] != before[touched]]
        slots.changed_s[changed] = slots.at_s[changed]

    # ---- frames out -----------------------------------------------------------------

    def frame(self, at_s: float) -> Frame:
        """The fleet at `at_s`, with the Xids since the last frame."""
        self._forget(at_s)
        partial, why = self._partial
        self._partial = (False, "")
        edges, self._edges = self._edges, []
        xids = tuple(XidEvent(e.gpu, e.code, e.at_s) for e in edges)
        values, times = self._laid_out()
        presence = self._present.of_gpus(at_s, complete=not partial)
        still = self._doubt.stands_still(values, self._present.gpu_intervals_s())
        presence[still & (presence == Presence.PRESENT)] = Presence.FROZEN
        reporting = int(np.count_nonzero(presence == Presence.PRESENT))
        reason = f"Prometheus answered only in part: {why}" if partial else ""
        coverage = Coverage(self._heard_of(), reporting, False, partial, reason)
        return self._made(at_s, values, times, presence, coverage, xids)

    def blind(self, at_s: float, reason: str) -> Frame:
        """A moment in which nothing could be read: the last values, with their true age."""
        presence = np.full(len(self._roster.uuids), Presence.BLIND, dtype=np.int8)
        coverage = Coverage(self._heard_of(), 0, True, False, reason)
        return self._made(at_s, *self._laid_out(), presence, coverage, ())

    def _heard_of(self) -> int:
        """GPUs that ever reported: a slice of history names some before their first sample."""
        return int(np.count_nonzero(self._roster.gpus.first_s < np.inf))

    def _made(
        self,
        at_s: float,
        values: Floats,
        times: Floats,
        presence: npt.NDArray[np.int8],
        coverage: Coverage,
        xids: tuple[XidEvent, ...],
    ) -> Frame:
        roster = self._roster
        last_s = np.full(len(roster.uuids), -np.inf)
        np.maximum.at(last_s, roster.links.gpu, roster.links.at_s)
        self._describe(last_s)
        return Frame(
            at_s=at_s,
            gpus=self._gpus,
            metrics=self._catalog.names,
            values=values,
            age_s=np.maximum(at_s - times, 0.0),
            presence=presence,
            workloads=self._workloads,
            coverage=coverage,
            xids=xids,
            last_seen_s=last_s,
            mates=self._mates,
        )

    def _laid_out(self) -> tuple[Floats, Floats]:
        """The newest values and their times [gpus, metrics], less those that cannot be so."""
        shape = (len(self._roster.uuids), len(self._catalog.metrics))
        values, times = np.full(shape, np.nan), np.full(shape, -np.inf)
        self._spread(values.reshape(-1), times.reshape(-1))
        idle = self._doubt.idle_profiling(values)
        if idle.any():
            self._reject("profiling at zero", idle)
            self._doubt.mask_profiling(values, times, idle)
        return values, times

    def _spread(self, values: Floats, times: Floats) -> None:
        """Slots into cells [gpus x metrics]. A series of the whole GPU wins over its parts."""
        slots = self._roster.slots
        cell = slots.gpu * len(self._catalog.metrics) + slots.column
        held = slots.at_s > -np.inf
        whole = np.flatnonzero(held & ~slots.is_part)
        values[cell[whole]], times[cell[whole]] = slots.value[whole], slots.at_s[whole]
        part = np.flatnonzero(held & slots.is_part)
        if not len(part):
            return
        newest = np.full(len(values), -np.inf)
        here = cell[part]
        np.maximum.at(newest, here, slots.at_s[part])
        use = (newest[here] > times[here] + TOGETHER_S) & (
            slots.at_s[part] >= newest[here] - TOGETHER_S
        )
        part, here = part[use], here[use]
        part_value, fold = slots.value[part], self._fold[slots.column[part]]
        times[here], values[here] = newest[here], np.where(fold == 0, -np.inf, 0.0)
        np.maximum.at(values, here[fold == 0], part_value[fold == 0])
        np.add.at(values, here[fold == 1], part_value[fold == 1])
        bits = fold == 2
        mask = np.zeros(len(values), dtype=np.int64)
        np.bitwise_or.at(mask, here[bits], part_value[bits].astype(np.int64))
        values[here[bits]] = mask[here[bits]]
        over = values[here] > self._high[slots.column[part]]  # a sum may leave the range
        values[here[over]], times[here[over]] = np.nan, -np.inf

    def _describe(self, last_s: Floats) -> None:
        """Names, places and work of the GPUs; the same tuples while nothing changed."""
        roster, links = self._roster, self._roster.links
        pace_s = BEHIND * self._present.intervals_s()[links.exporter]
        recent = links.at_s >= last_s[links.gpu] - pace_s
        # the exporter that names the node best; of two as good the newer one
        order = np.lexsort((np.arange(links.rows), -links.rank, recent, links.gpu))
        home = np.zeros(len(last_s), dtype=np.int64)
        home[links.gpu[order]] = order
        told = order[links.index[order] >= 0]
        index = np.full(len(last_s), -1, dtype=np.int64)
        index[links.gpu[told]] = links.index[told]
        if roster.renamed or not np.array_equal(home, self._home):
            roster.renamed, self._home = False, home
            self._gpus = tuple(
                Gpu(
                    uuid,
                    roster.nodes[links.node[home[row]]],
                    int(index[row]) if index[row] >= 0 else None,
                    roster.model[row],
                    roster.rack[row],
                    roster.drivers[roster.gpus.driver[row]],
                    float(roster.gpus.driver_s[row]),
                )
                for row, uuid in enumerate(roster.uuids)
            )
        # one scrape without the labels of work is a gap in the labels, not an end of the work
        with np.errstate(invalid="ignore"):  # neither time is known: nothing to hold on to
            held = (links.work == 0) & (links.at_s - links.busy_s < pace_s)
        told = np.where(held, links.busy_work, links.work)
        work = np.zeros(len(last_s), dtype=np.int64)
        np.maximum.at(work, links.gpu[recent], told[recent])
        if len(work) != len(self._workloads) or not np.array_equal(work, self._work):
            self._work = work
            self._workloads = tuple(roster.works[code] for code in work)
            self._mates = tuple(roster.mates[code] for code in work)

    def _forget(self, at_s: float) -> None:
        """Drops what was not seen for a day, at most once an hour: fleets change, pods churn."""
        if not at_s - self._forgot_s < _FORGET_EVERY_S:
            self._forgot_s = at_s
            rows = self._roster.forget(at_s - FORGET_S)
            if rows is not None:
                self._edges = [
                    Edge(rows[e.gpu], e.code, e.at_s) for e in self._edges if e.gpu in rows
                ]


def _in_order(sid: Ints, at_s: Floats, value: Floats) -> tuple[Ints, Floats, Floats]:
    """By series, then time; of repeats of one sample the largest value."""
    rising = (sid[1:] > sid[:-1]) | ((sid[1:] == sid[:-1]) & (at_s[1:] > at_s[:-1]))
    if rising.all():
        return sid, at_s, value
    order = np.lexsort((value, at_s, sid))
    sid, at_s, value = sid[order], at_s[order], value[order]
    last = np.append((sid[1:] != sid[:-1]) | (at_s[1:] != at_s[:-1]), True)
    return sid[last], at_s[last], value[last]
