"""Feature rows out of history, for learning: the live telemetry and features, thinned early.

History is read in slices of a bounded number of samples and walked at the pace of its scrapes,
through the same `Telemetry`, `Window` and `HardWatch` as a live tick, so that a learnt row is
what a tick would have seen. Two things bound the work and the memory however large the fleet
and long the window: history that is too much to read whole is read in bursts spread over the
window, and of too many rows each GPU gives its own runs of successive ones, in turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, Protocol

import numpy as np

from sentinel.core.catalog import Catalog
from sentinel.core.domain import Bools, Floats, Frame, Gpu, Ints, Presence, Workload
from sentinel.core.evidence import HardWatch
from sentinel.core.features import CELLS, Features, Window
from sentinel.core.frame import Samples, Telemetry
from sentinel.core.verdict import Settings

ROWS_PER_GPU: Final = 3000
ROWS_TOTAL: Final = 600_000  # of all features: 10,000 GPUs still give 60 each
SAMPLES_TOTAL: Final = 250_000_000  # read for one learning: a week of 1,000 GPUs at 1 minute
_SLICE_SAMPLES: Final = 2_000_000  # read at a time: some 150 MB while it is decoded
_LONGEST_SLICES: Final = 6.0  # a slice grows to so many of the configured ones
_LEAST_SHARE: Final = 0.02  # of a window is read in any case
_BURST_S: Final = 2400.0  # read without a gap: long enough to be worth its warm-up
_RUN_S: Final = 1200.0  # successive rows of one GPU, so that what lasts can be told
_SHADOW_S: Final = 3600.0  # rows of a GPU left out after hard evidence on it
_GOLDEN: Final = 0.6180339887498949  # spreads evenly, and in step with no hour or day


class Source(Protocol):
    """What history is read from: `edges.prometheus.Prometheus`, or a stand-in."""

    def history(self, start_s: float, end_s: float, *, slice_s: float) -> Iterator[Samples]: ...


@dataclass(frozen=True, slots=True)
class Exclusion:
    """A GPU's time that must not be learnt as normal: it was under an incident."""

    gpu_uuid: str
    from_s: float
    to_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Feature rows of one GPU model, in time order. `values` is float32 [rows, features],
    `power_w` float32 [rows] what the heat sink remembers, `gpu` [rows] indexes `uuids` and
    `nodes`, `work` [rows] is a code of the work it did (-1: none), `at_s` float64 [rows].
    Successive rows of a GPU are `step_s` apart within a run."""

    uuids: tuple[str, ...]
    values: Floats
    power_w: Floats
    gpu: Ints
    at_s: Floats
    step_s: float
    nodes: tuple[str, ...]
    work: Ints


@dataclass(frozen=True, slots=True)
class Gathered:
    """All that was gathered: rows by model, and how many GPUs were seen at all.
    `read_share` is the share of the window that was read, `samples` how many samples."""

    rows: dict[str, Rows]
    gpus: int
    read_share: float
    samples: int


def walk(slices: Iterable[Samples], ticks: Sequence[float]) -> Iterator[tuple[float, Samples]]:
    """Deals samples out to the ticks that first could see them: (tick, samples up to it).

    `ticks` ascend; samples after the last tick are dropped. Slices come in time order.
    """
    place = 0
    for piece in slices:
        order = np.argsort(piece.times_s, kind="stable")
        times = piece.times_s[order]
        start = 0
        while place < len(ticks) and ticks[place] <= piece.at_s:
            stop = int(np.searchsorted(times, ticks[place], side="right"))
            yield ticks[place], _part(piece, order[start:stop], ticks[place])
            start, place = stop, place + 1
        if start < len(order) and place < len(ticks):  # seen by the first tick of the next slice
            yield ticks[place], _part(piece, order[start:], ticks[place])


def _part(piece: Samples, pick: Ints, at_s: float) -> Samples:
    return Samples(
        at_s,
        piece.keys,
        piece.series[pick],
        piece.times_s[pick],
        piece.values[pick],
        piece.partial,
        piece.warnings,
    )


def frames(
    telemetry: Telemetry, slices: Iterable[Samples], ticks: Sequence[float]
) -> Iterator[Frame]:
    """One frame per tick, from history."""
    pending: float | None = None
    for tick, samples in walk(slices, ticks):
        if pending is not None and tick != pending:
            yield telemetry.frame(pending)
        telemetry.add(samples)
        pending = tick
    if pending is not None:
        yield telemetry.frame(pending)


def ticks_between(start_s: float, end_s: float, step_s: float) -> list[float]:
    """Tick times in (start, end], ending at `end`."""
    count = int((end_s - start_s) / step_s + 1e-9)
    return [end_s - step_s * k for k in range(count - 1, -1, -1)]


def gather(
    source: Source,
    telemetry: Telemetry,
    catalog: Catalog,
    settings: Settings,
    start_s: float,
    end_s: float,
    *,
    tick_s: float,
    slice_s: float,
    exclusions: Sequence[Exclusion] = (),
    progress: Callable[[float, int], None] = lambda share, gpus: None,
    samples_total: int = SAMPLES_TOTAL,
    rows_total: int = ROWS_TOTAL,
) -> Gathered:
    """Rows of (start_s, end_s]. `tick_s` is the live tick, `slice_s` the configured slice.

    `progress` is told the share of the window done and how many GPUs were seen.
    """
    reader = _Reader(source, start_s, end_s, slice_s, samples_total, CELLS * settings.grid_s)
    panel = _Panel(exclusions, settings, rows_total)
    window, hard = Window(settings.grid_s), HardWatch()
    step_s: float | None = None
    for burst in reader.bursts():
        slices = reader.slices(burst)
        first = next(slices, None)
        if first is None:
            continue
        if step_s is None:  # values between two scrapes only repeat: nothing new to see there
            step_s = min(max(_pace_s(first) or tick_s, tick_s), settings.grid_s)
        panel.plan((end_s - start_s) * burst.share / step_s)
        ticks = ticks_between(burst.from_s, burst.to_s, step_s)
        for frame in frames(telemetry, chain([first], slices), ticks):
            features = window.push(frame, max_age_s=settings.max_age_s)
            panel.follow(frame)
            for finding in hard.look(frame, catalog)[0]:
                if finding.fence:
                    panel.shade(finding.row, frame.at_s + _SHADOW_S)
            progress((frame.at_s - start_s) / (end_s - start_s), len(frame.gpus))
            if frame.at_s >= burst.warm_s and len(frame.gpus):
                panel.take(frame, features)
    share = reader.read_s / (end_s - start_s)
    return Gathered(panel.rows(step_s or tick_s), panel.seen, share, reader.samples)


def _pace_s(samples: Samples) -> float | None:
    """The median time between two samples of one series; None where no series has two."""
    order = np.lexsort((samples.times_s, samples.series))
    same = np.diff(samples.series[order]) == 0
    pace_s = np.diff(samples.times_s[order])[same]
    return float(np.median(pace_s)) if len(pace_s) else None


@dataclass(frozen=True, slots=True)
class _Burst:
    """History read without a gap: rows are taken from `warm_s` on, and about `share` of the
    window will have been read in the end."""

    from_s: float
    to_s: float
    warm_s: float
    share: float


class _Reader:
    """Reads a window whole, or in bursts where that would be more than `most` samples."""

    def __init__(
        self,
        source: Source,
        start_s: float,
        end_s: float,
        slice_s: float,
        most: int,
        warm_up_s: float,
    ) -> None:
        self._source, self._start_s, self._end_s = source, start_s, end_s
        self._slice_s, self._most, self._warm_up_s = slice_s, most, warm_up_s
        self.samples, self.read_s = 0, 0.0

    def bursts(self) -> Iterator[_Burst]:
        at_s, warm_s, share, turn = self._start_s, self._start_s, 1.0, 0
        while self._end_s - at_s > 1e-3:
            to_s = min(at_s + _BURST_S, self._end_s)
            if self._end_s - to_s < 0.5 * _BURST_S:
                to_s = self._end_s
            yield _Burst(at_s, to_s, warm_s, share)
            self.read_s += to_s - at_s
            at_s = warm_s = to_s
            share = self._affordable(to_s)
            if share < 1.0:  # each period has one burst, at a place of its own in it
                idle_s = _BURST_S * (1.0 / share - 1.0)
                here, there = (math.modf((turn + k) * _GOLDEN)[0] for k in (0, 1))
                at_s = to_s + idle_s * (1.0 + there - here)
                warm_s = at_s + self._warm_up_s
                turn += 1

    def _affordable(self, from_s: float) -> float:
        """The share of the rest of the window that may still be read."""
        left = self.samples / max(self.read_s, 1e-9) * (self._end_s - from_s)
        may = max(self._most - self.samples, _LEAST_SHARE * left)
        return min(1.0, may / left) if left > 0 else 1.0

    def slices(self, burst: _Burst) -> Iterator[Samples]:
        slice_s = self._slice_s
        if self.samples:
            fitting_s = _SLICE_SAMPLES * self.read_s / self.samples
            slice_s = min(max(fitting_s, slice_s / 10), slice_s * _LONGEST_SLICES)
        for piece in self._source.history(burst.from_s, burst.to_s, slice_s=slice_s):
            self.samples += len(piece.values)
            yield piece


@dataclass
class _Model:
    """What was taken of one GPU model."""

    code: dict[str, int] = field(default_factory=dict)
    node: dict[str, str] = field(default_factory=dict)  # of each UUID
    work: list[Ints] = field(default_factory=list)
    values: list[Floats] = field(default_factory=list)
    power: list[Floats] = field(default_factory=list)
    gpu: list[Ints] = field(default_factory=list)
    at_s: list[Floats] = field(default_factory=list)


class _Panel:
    """Which rows are kept. The roster is read once while it stays the same; a tick is array
    work over the fleet."""

    def __init__(
        self, exclusions: Sequence[Exclusion], settings: Settings, rows_total: int
    ) -> None:
        self._settings, self._rows_total = settings, rows_total
        self._away: dict[str, list[Exclusion]] = {}
        for exclusion in exclusions:
            self._away.setdefault(exclusion.gpu_uuid, []).append(exclusion)
        self._shade: dict[str, float] = {}
        self._gpus: tuple[Gpu, ...] | None = None
        self._models: dict[str, _Model] = {}
        self._members: list[tuple[_Model, Ints, Ints]] = []  # rows, and their codes
        self._until_s = np.zeros(0)
        self._away_row, self._away_s = np.zeros(0, dtype=np.int64), np.zeros((0, 2))
        self._number = np.zeros(0, dtype=np.int64)
        self._workloads: tuple[Workload | None, ...] = ()
        self._work = np.zeros(0, dtype=np.int64)
        self._works: dict[Workload, int] = {}
        self._ticks, self._turns = 1.0, 1
        self.seen = 0

    def plan(self, ticks: float) -> None:
        """How many ticks there are to be in all: of too many rows GPUs give theirs in turns."""
        self._ticks = ticks
        most = min(ROWS_PER_GPU, self._rows_total / max(1, len(self._gpus or ())))
        self._turns = max(1, round(ticks / most))

    def follow(self, frame: Frame) -> None:
        """The roster of this frame, read once while it stays the same."""
        self.seen = max(self.seen, frame.coverage.gpus_expected)
        if frame.gpus is self._gpus:
            return
        self._gpus = frame.gpus
        members: dict[str, list[int]] = {}
        for row, gpu in enumerate(frame.gpus):
            members.setdefault(gpu.model, []).append(row)
        self._members = []
        for name, rows in members.items():
            model = self._models.setdefault(name, _Model())
            codes = [model.code.setdefault(frame.gpus[row].uuid, len(model.code)) for row in rows]
            model.node.update((frame.gpus[row].uuid, frame.gpus[row].node) for row in rows)
            self._members.append((model, np.array(rows), np.array(codes)))
        uuids = [gpu.uuid for gpu in frame.gpus]
        self._until_s = np.array([self._shade.get(uuid, -np.inf) for uuid in uuids])
        away = [(row, e) for row, uuid in enumerate(uuids) for e in self._away.get(uuid, ())]
        self._away_row = np.array([row for row, _ in away], dtype=np.int64)
        self._away_s = np.array([(e.from_s, e.to_s) for _, e in away]).reshape(-1, 2)
        # the GPUs of a host take turns together: they share their air, and often their work
        host: dict[str, int] = {}
        numbers = [host.setdefault(gpu.node, len(host)) for gpu in frame.gpus]
        self._number = np.array(numbers, dtype=np.int64)
        self.plan(self._ticks)

    def shade(self, row: int, until_s: float) -> None:
        """Nothing of this GPU is taken until then: hard evidence was seen on it."""
        if self._gpus is not None:
            self._shade[self._gpus[row].uuid] = self._until_s[row] = until_s

    def take(self, frame: Frame, features: Features) -> None:
        """The rows of this tick whose turn it is and that show normal operation."""
        at_s = frame.at_s
        usable: Bools = features.ready & (features.settled_s >= self._settings.settle_s)
        usable &= (frame.presence == Presence.PRESENT) & (self._until_s < at_s)
        if frame.workloads is not self._workloads:  # the same tuple while nothing changed
            known = self._works
            works = [-1 if w is None else known.setdefault(w, len(known)) for w in frame.workloads]
            self._work, self._workloads = np.array(works, dtype=np.int64), frame.workloads
        usable[self._away_row[(self._away_s[:, 0] <= at_s) & (at_s <= self._away_s[:, 1])]] = False
        if self._turns > 1:
            turn = int(math.modf(math.floor(at_s / _RUN_S) * _GOLDEN)[0] * self._turns)
            usable &= self._number % self._turns == turn
        for model, rows, codes in self._members:
            mine = usable[rows]
            picked = rows[mine]
            if len(picked):
                model.values.append(features.values[picked].astype(np.float32))
                model.power.append(features.power_ewma_w[picked].astype(np.float32))
                model.gpu.append(codes[mine])
                model.work.append(self._work[picked])
                model.at_s.append(np.full(len(picked), at_s))

    def rows(self, step_s: float) -> dict[str, Rows]:
        """All that was taken, by model; what was gathered is given away."""
        out = {}
        for name, model in sorted(self._models.items()):
            if not model.values:
                continue
            out[name] = Rows(
                tuple(model.code),
                np.concatenate(model.values),
                np.concatenate(model.power),
                np.concatenate(model.gpu),
                np.concatenate(model.at_s),
                step_s,
                tuple(model.node[uuid] for uuid in model.code),
                np.concatenate(model.work),
            )
            model.values.clear()
        return out
