"""The table of canonical metrics: on how many GPUs each is, of those that can have it."""

from __future__ import annotations

import numpy as np

from sentinel.core.catalog import Metric as Column
from sentinel.core.catalog import Source
from sentinel.core.domain import Bools, Floats, Frame
from sentinel.core.placement import ModelRanks
from sentinel.doctor import howto
from sentinel.doctor.facts import Metric
from sentinel.doctor.reading import Reading


def metrics(
    reading: Reading, frame: Frame, here: Bools, models: ModelRanks, shown: Floats
) -> tuple[Metric, ...]:
    """Every metric of the catalogue, what matters most first. `here` bool [gpus of the frame]
    are those that report, `shown` [gpus of the roster, metrics] what their exporters say."""
    catalog = reading.catalog
    place = {uuid: row for row, uuid in enumerate(reading.roster.uuids)}
    rows = np.array([place.get(gpu.uuid, -1) for gpu in frame.gpus], dtype=np.int64)
    told = np.isfinite(shown[rows]) & (rows >= 0)[:, None] if len(rows) else shown[:0] == 0
    valued = np.isfinite(frame.values)
    able = _able(reading, frame, models)
    counted = np.isin(rows, _counted(reading))
    kinds = _kinds(reading)
    out = []
    for column, metric in enumerate(catalog.metrics):
        can = able[:, column] & here
        has = can & valued[:, column]
        if metric.name == "xid":  # a count of Xids by code says as much
            has |= can & counted
        missing = sorted(
            kind
            for kind in kinds
            if (can & ~has & np.isin(rows, np.array(sorted(kinds[kind]), dtype=np.int64))).any()
        )
        out.append(
            Metric(
                metric.name,
                metric.label,
                metric.role,
                howto.importance(metric.name),
                int(np.count_nonzero(can)),
                int(np.count_nonzero(has)),
                int(np.count_nonzero(can & ~has & told[:, column])),
                metric.adds,
                _standard(reading, column, kinds),
                _hidden_at_zero(metric, missing),
                tuple(howto.enable(catalog, metric, kind) for kind in missing),
            )
        )
    return tuple(sorted(out, key=lambda m: m.importance))


def _able(reading: Reading, frame: Frame, models: ModelRanks) -> Bools:
    """Where a GPU can have a metric [gpus, metrics], by its model and whether it is cut up."""
    catalog, series = reading.catalog, reading.roster.series
    of_slice = series.of_slice[: reading.rows] & (reading.count > 0)
    cut = {reading.roster.uuids[g] for g in np.unique(series.gpu[: reading.rows][of_slice])}
    able = np.ones((len(frame.gpus), len(catalog.metrics)), dtype=bool)
    lacking: dict[tuple[str, bool], Bools] = {}
    for row, gpu in enumerate(frame.gpus):
        kind = (gpu.model, gpu.uuid in cut)
        if kind not in lacking:
            lacks = set(models.lacks(gpu.model)) if gpu.model else set()
            lacks |= {"whole"} if kind[1] else set()
            lacking[kind] = np.array([_can(metric, lacks) for metric in catalog.metrics])
        able[row] = lacking[kind]
    return able


def _can(metric: Column, lacks: set[str]) -> bool:
    if metric.name in howto.BEFORE_REMAP:
        return "row_remap" in lacks and "ecc" not in lacks
    return not lacks.intersection(metric.needs)


def _counted(reading: Reading) -> list[int]:
    """GPUs [of the roster] of which some exporter counts Xids by their code."""
    series = reading.roster.series
    counts = (series.source[: reading.rows] == Source.XID_COUNT) & (reading.count > 0)
    gpus: list[int] = np.unique(series.gpu[: reading.rows][counts]).tolist()
    return gpus


def _kinds(reading: Reading) -> dict[str, set[int]]:
    """The GPUs [of the roster] that each kind of exporter shows; the names of one dcgm-exporter
    may be of several times, and count as the one that most are of."""
    series = reading.roster.series
    target_kind: dict[int, dict[str, int]] = {}
    rows = np.flatnonzero(reading.of_gpu & (reading.count > 0)).tolist()
    for row in rows:
        counts = target_kind.setdefault(int(series.exporter[row]), {})
        counts[reading.kinds[row]] = counts.get(reading.kinds[row], 0) + 1
    main = {target: max(counts, key=lambda k: counts[k]) for target, counts in target_kind.items()}
    kinds: dict[str, set[int]] = {}
    for row in rows:
        kinds.setdefault(main[int(series.exporter[row])], set()).add(int(series.gpu[row]))
    return kinds


def _standard(reading: Reading, column: int, kinds: dict[str, set[int]]) -> bool:
    """Whether some exporter here shows it unless told not to."""
    family = {"dcgm"} if any(k.startswith("dcgm-4") for k in kinds) else set()
    return any(
        alias.standard and alias.exporter in family | set(kinds)
        for alias in reading.catalog.names_of(column)
    )


def _hidden_at_zero(metric: Column, missing: list[str]) -> bool:
    """Newer DCGM leaves out error counts and the last Xid until there is one."""
    return metric.role == "error" and any(kind.startswith("dcgm") for kind in missing)
