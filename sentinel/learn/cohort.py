"""From the gathered rows of one GPU model to its baseline, and to the scores of its own time.

`fit` learns normal from rows; `held_out` learns it from one half of the time and scores the
other, both ways round, as the daemon would have: what calibration is made from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from sentinel.core.domain import Bools, Floats, Ints
from sentinel.core.features import FEATURES, MEM_TEMP, TEMP
from sentinel.core.score import (
    GPU_SPACE,
    Cohort,
    asleep,
    excuses,
    score_rows,
    thermal_excess,
)
from sentinel.learn.baseline import DensityBaseline
from sentinel.learn.calibrate import Series
from sentinel.learn.thermal import fit_thermal

MAX_ROWS: Final = 300_000  # rows scored for calibration: whole hosts, evenly spread
_CODES: Final = 10_000_000  # more GPUs, hosts or jobs than any one cohort has
_FEWEST_ROWS: Final = 20  # of one half of the time; fewer teach nothing


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Normal time of one GPU model: feature `values` [n, f] with temperatures as they are,
    `power_w` [n] as the heat sink remembers it, at `at_s` [n], of GPU `gpu` [n] (an index into
    `uuids` and `nodes`), doing `work` [n] (a code, -1: none)."""

    model: str
    values: Floats
    power_w: Floats
    at_s: Floats
    gpu: Ints
    work: Ints
    uuids: tuple[str, ...]
    nodes: tuple[str, ...]
    spacing_s: float  # between two rows of one GPU: what one row stands for

    def __len__(self) -> int:
        return len(self.at_s)

    def part(self, mask: Bools | Ints) -> Rows:
        return Rows(
            self.model,
            self.values[mask],
            self.power_w[mask],
            self.at_s[mask],
            self.gpu[mask],
            self.work[mask],
            self.uuids,
            self.nodes,
            self.spacing_s,
        )


def fit(rows: Rows, *, deviant_for_s: float, span_s: float) -> tuple[Cohort, dict[str, Any]]:
    """The baseline of one GPU model, learnt over `span_s`, and the estimator's own evaluation
    of it."""
    temps = rows.values[:, [TEMP, MEM_TEMP]]
    thermal = fit_thermal(
        rows.uuids,
        rows.gpu,
        rows.power_w,
        temps,
        span_s=span_s,
        at_s=rows.at_s,
        spacing_s=rows.spacing_s,
    )
    values = rows.values.copy()
    excess = thermal_excess(thermal, rows.gpu, rows.power_w, temps)[0]
    values[:, [TEMP, MEM_TEMP]] = np.maximum(excess, 0.0)
    reference = np.ones(len(FEATURES))
    for f, feature in enumerate(FEATURES):
        known = values[:, f][np.isfinite(values[:, f])]
        if feature.relative and len(known):
            reference[f] = max(float(np.quantile(known, 0.99)), 1.0)
    floors = np.array([f.floor for f in FEATURES]) * reference
    hold = max(1, round(deviant_for_s / rows.spacing_s))
    estimator = DensityBaseline(space=GPU_SPACE, floors=floors)
    estimator.fit(values, groups=rows.gpu, hold_rows=hold)
    return Cohort(rows.model, estimator.density_, thermal, len(rows)), dict(estimator.evaluation_)


def prepared(cohort: Cohort, rows: Rows) -> tuple[Floats, Floats]:
    """(values [n, f], share of each deviation that counts [n, f]) as a tick of that moment would
    have handed them to the density: temperatures as excess, what a host shares taken off."""
    where = {uuid: i for i, uuid in enumerate(cohort.thermal.uuids)}
    place = np.array([where.get(uuid, -1) for uuid in rows.uuids], dtype=np.int64)
    node = _node_codes(rows)
    moment = np.unique(rows.at_s, return_inverse=True)[1].astype(np.int64)
    host = np.unique(moment * (len(node) + 1) + node[rows.gpu], return_inverse=True)[1]
    temps = rows.values[:, [TEMP, MEM_TEMP]]
    excess, _ = thermal_excess(cohort.thermal, place[rows.gpu], rows.power_w, temps, host)
    values = rows.values.copy()
    values[:, [TEMP, MEM_TEMP]] = np.maximum(excess, 0.0)
    asleep(cohort.density, values)
    return values, excuses(cohort.density, values)


def score_history(cohort: Cohort, rows: Rows) -> tuple[Floats, Bools]:
    """(score [n], novel [n]) of past rows, as a tick of that moment would have scored them."""
    score, novel, _, _ = score_rows(cohort.density, *prepared(cohort, rows))
    return score, novel


def held_out(rows: Rows, *, deviant_for_s: float, span_s: float, number: int = 0) -> Series | None:
    """Scores of each half of the time by a baseline of the other half; None where one half
    teaches nothing. `number` sets the codes of several cohorts apart."""
    first_code = number * _CODES
    early = rows.at_s < np.median(rows.at_s)
    judged = rows.part(_whole_hosts(rows, MAX_ROWS))
    scores = np.full(len(judged), np.nan)
    judged_early = judged.at_s < np.median(rows.at_s)
    for train, test in ((early, ~judged_early), (~early, judged_early)):
        if train.sum() < _FEWEST_ROWS or not test.any():
            return None
        half = rows.part(train)
        cohort, _ = fit(half, deviant_for_s=deviant_for_s, span_s=0.5 * span_s)
        scores[test] = score_history(cohort, judged.part(test))[0]
    node = _node_codes(rows)
    return Series(
        scores,
        judged.at_s,
        judged.gpu + first_code,
        node[judged.gpu] + first_code,
        np.where(judged.work >= 0, judged.work + first_code, -1),
        rows.spacing_s,
        len(np.unique(rows.gpu)) / max(1, len(np.unique(judged.gpu))),
        {
            first_code + code: f"{uuid} of {host}"
            for code, (uuid, host) in enumerate(zip(rows.uuids, rows.nodes, strict=True))
        },
    )


def _node_codes(rows: Rows) -> Ints:
    """A number for the node of each GPU [gpus]."""
    known: dict[str, int] = {}
    return np.array([known.setdefault(n, len(known)) for n in rows.nodes], dtype=np.int64)


def _whole_hosts(rows: Rows, most: int) -> Ints:
    """Rows of whole hosts, evenly spread over them, about `most` of them."""
    if len(rows) <= most:
        return np.arange(len(rows))
    node = _node_codes(rows)
    count = max(1, int((node.max() + 1) * most / len(rows)))
    chosen = np.unique(np.linspace(0, node.max(), count).astype(np.int64))
    return np.flatnonzero(np.isin(node[rows.gpu], chosen))
