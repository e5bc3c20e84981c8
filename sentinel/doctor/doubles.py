"""Which GPUs are shown more than once, and why: jobs, exporters, replicas, pods."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np

from sentinel.core.domain import Bools, Floats, Ints
from sentinel.doctor.facts import Doubles
from sentinel.doctor.reading import Reading


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The series of GPUs: numbers of `reading`'s rows, and what each belongs to."""

    row: Ints
    gpu: Ints
    target: Ints
    last_s: Floats
    slot: Ints


def rows_of(reading: Reading) -> Rows:
    series = reading.roster.series
    row = np.flatnonzero(reading.of_gpu & (reading.count > 0))
    return Rows(row, series.gpu[row], series.exporter[row], reading.last_s[row], series.slot[row])


def newest_of(reading: Reading, rows: Rows) -> Floats:
    """The newest sample of every target [targets]."""
    newest = np.full(reading.roster.exporters.rows, -np.inf)
    np.maximum.at(newest, rows.target, rows.last_s)
    return newest


def doubles(reading: Reading, rows: Rows, newest_s: Floats) -> Doubles:
    paces = {t: reading.interval_s(t) or 60.0 for t in np.unique(rows.target).tolist()}
    pace_s = np.array([paces[t] for t in rows.target.tolist()])
    fresh = rows.last_s >= newest_s[rows.target] - 0.5 * pace_s
    alive = newest_s[rows.target] >= newest_s.max(initial=-np.inf) - 3.0 * pace_s
    shown: dict[int, set[int]] = defaultdict(set)
    for gpu, target in zip(
        rows.gpu[fresh & alive].tolist(), rows.target[fresh & alive].tolist(), strict=True
    ):
        shown[gpu].add(target)
    names = _targets(reading, rows)
    replicas = _replicas(reading, rows)
    # two views of one target by two Prometheus servers are no second exporter
    distinct = {gpu: {names[t][:2] for t in targets} for gpu, targets in shown.items()}
    many = {gpu: targets for gpu, targets in distinct.items() if len(targets) > 1}
    example = sorted(next(iter(many.values()), set()))
    return Doubles(
        len(many),
        tuple(f"{job}/{instance}" for job, instance in example),
        tuple(sorted({job for targets in many.values() for job, _ in targets})),
        any(len({i for _, i in targets}) < len(targets) for targets in many.values()),
        _shared(reading, rows, fresh),
        _churned(reading, rows, fresh),
        replicas,
    )


def _targets(reading: Reading, rows: Rows) -> dict[int, tuple[str, str]]:
    """(job, instance) of every target."""
    found: dict[int, tuple[str, str]] = {}
    for row, target in zip(rows.row.tolist(), rows.target.tolist(), strict=True):
        if target not in found:
            labels = reading.labels(row)
            found[target] = (labels.get("job", ""), labels.get("instance", ""))
    return found


def _replicas(reading: Reading, rows: Rows) -> dict[str, tuple[str, ...]]:
    """Labels whose value alone tells two views of one target apart."""
    values: dict[str, dict[tuple[str, str], set[str]]] = defaultdict(lambda: defaultdict(set))
    seen: set[int] = set()
    for row, target in zip(rows.row.tolist(), rows.target.tolist(), strict=True):
        if target in seen:
            continue
        seen.add(target)
        labels = reading.labels(row)
        place = (labels.get("job", ""), labels.get("instance", ""))
        for name in reading.identity.replica_from:
            if labels.get(name):
                values[name][place].add(labels[name])
    return {
        name: tuple(sorted({value for told in places.values() for value in told}))
        for name, places in values.items()
        if any(len(told) > 1 for told in places.values())
    }


def _shared(reading: Reading, rows: Rows, fresh: Bools) -> int:
    """GPUs of which one scrape shows one value several times, for one pod each."""
    gpus = _repeated(reading, rows, fresh)
    return len(gpus)


def _churned(reading: Reading, rows: Rows, fresh: Bools) -> int:
    """GPUs whose series were ended and begun again under other labels of work."""
    everything = _repeated(reading, rows, np.ones(len(fresh), dtype=bool))
    return len(everything - _repeated(reading, rows, fresh))


def _repeated(reading: Reading, rows: Rows, kept: Bools) -> set[int]:
    counts: Counter[tuple[int, int, str]] = Counter()
    gpu_of: dict[tuple[int, int, str], int] = {}
    for at in np.flatnonzero(kept & (rows.slot >= 0)).tolist():
        row = int(rows.row[at])
        place = (int(rows.target[at]), int(rows.slot[at]), reading.keys[row].name)
        counts[place] += 1
        gpu_of[place] = int(rows.gpu[at])
    return {gpu_of[place] for place, n in counts.items() if n > 1}
