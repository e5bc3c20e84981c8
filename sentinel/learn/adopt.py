"""Whether a newly learnt bundle may take the place of the one in use.

Relearning is how a fault becomes normal without anybody noticing: a week of a GPU that runs
hot, a window without the nights, an exporter that lost its clocks. So a new bundle is compared
with the last one on the rows that both can judge, and is left out, with its reasons, where it
would see less, call more of the fleet abnormal, or know less than the one it replaces.

A bundle that knew much less itself (the first minutes of a new site) is no measure: what
replaces it only has to know as many models and metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from sentinel.core.domain import Bools
from sentinel.core.features import INDEX, TEMP
from sentinel.core.score import Cohort
from sentinel.core.verdict import Bundle
from sentinel.learn.cohort import Rows, score_history
from sentinel.learn.evaluate import stability

YOUNG: Final = 0.5  # a bundle of less than this share of the new one's time is no measure
_RECENT: Final = 0.25  # of the window: a fault that began there must not hide in the rest
_ROWS: Final = 20_000
_MORE_OVER: Final = 0.01  # share of normal rows that a new edge may put outside more than the old
_EDGE: Final = 1.8  # how far the edge may move, as a factor; its bounds are a factor of two apart
_BLINDER: Final = 0.2  # share of made-up faults that a new bundle may miss more than the old
_GPU_OVER: Final = 0.2  # a GPU is abnormal to a bundle with this share of its rows outside
_MATES: Final = 0.25  # what this share of a model's GPUs show is a change, not a fault
_THRESHOLD: Final = 1.5  # how far calibrated scores may rise, as a factor
_COVERAGE: Final = 0.5  # share of the rows that may lose a metric
_PROBES: Final = (("12 °C hotter", "hot"), ("a fifth of the SM clock less", "slow"))
_HOT_C: Final = 12.0
_SLOW: Final = 0.8
_NAMED: Final = 3


@dataclass(frozen=True, slots=True)
class Comparison:
    """A new bundle beside the last: `reasons` not to adopt it (none: adopt), `notes` that are
    no reason, and the figures per model."""

    with_id: str
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def adopt(self) -> bool:
        return not self.reasons

    def plain(self) -> dict[str, Any]:
        return {
            "with": self.with_id,
            "adopted": self.adopt,
            "reasons": list(self.reasons),
            "notes": list(self.notes),
            "models": {name: dict(figures) for name, figures in self.models.items()},
        }


def compare(
    new: Bundle,
    last: Bundle,
    rows: Mapping[str, Rows],
    coverage: Mapping[str, Mapping[str, float]],
) -> Comparison:
    """`rows` are the new window's by GPU model, also of models that taught nothing; `coverage`
    is the share of rows with each feature that the last bundle had, by model."""
    reasons: list[str] = []
    notes: list[str] = []
    models: dict[str, dict[str, Any]] = {}
    gone = [m for m in last.cohorts if m not in new.cohorts and m in rows]
    reasons += [f"{m or 'a model'}: still reports and has no baseline any more" for m in gone]
    young = last.calibration.gpu_days < YOUNG * new.calibration.gpu_days
    if young:
        notes.append(
            f"{last.id} rests on {last.calibration.gpu_days:.3g} GPU-days, this one on "
            f"{new.calibration.gpu_days:.3g}: it is no measure"
        )
    else:
        reasons += _certification(new, last)
    for model, cohort in new.cohorts.items():
        before = last.cohorts.get(model)
        if before is None:
            notes.append(f"{model}: new")
            continue
        sample = _thinned(rows[model])
        figures, told = _compare_cohort(cohort, before, sample)
        models[model] = figures
        if not young:
            reasons += [f"{model}: {text}" for text in told]
        reasons += [f"{model}: {text}" for text in _lost(sample, coverage.get(model, {}))]
    return Comparison(last.id, tuple(reasons), tuple(notes), models)


def _certification(new: Bundle, last: Bundle) -> list[str]:
    now, was = new.calibration, last.calibration
    if was.certified and not now.certified:
        return [f"the last bundle was certified and this one is not: {now.why}"]
    if not (was.certified and now.certified):
        return []
    return [
        f"{word}s would need a score of {after:.2f}, {before:.2f} until now"
        for word, after, before in (
            ("ticket", now.ticket_score, was.ticket_score),
            ("page", now.page_score, was.page_score),
        )
        if after > _THRESHOLD * before
    ]


def _compare_cohort(cohort: Cohort, before: Cohort, rows: Rows) -> tuple[dict[str, Any], list[str]]:
    told: list[str] = []
    over, was_over = (np.nan_to_num(score_history(c, rows)[0]) > 1.0 for c in (cohort, before))
    share, was = float(over.mean()), float(was_over.mean())
    edge = cohort.density.radius / before.density.radius
    if share > was + _MORE_OVER and share > 2.0 * was:
        told.append(f"{share:.1%} of normal time would be abnormal, {was:.1%} until now")
    if not 1.0 / _EDGE <= edge <= _EDGE:
        told.append(
            f"its edge lies at {cohort.density.radius:.2f}, {before.density.radius:.2f} until now"
        )
    late = _late(rows)
    told += _learnt_away(over, was_over, rows) or _learnt_away(
        over[late], was_over[late], rows.part(late)
    )
    sees: dict[str, float] = {}
    for text, kind in _PROBES:
        probe, bent = _spoilt(rows, kind)
        if not bent.any():
            continue
        scores = (score_history(c, probe)[0][bent] for c in (cohort, before))
        after, until = (float((np.nan_to_num(s) > 1.0).mean()) for s in scores)
        sees[kind], sees[f"{kind}_before"] = after, until
        if after < until - _BLINDER:
            told.append(f"it would notice {text} on {after:.0%} of the time, {until:.0%} until now")
    figures = {
        "rows": len(rows),
        "over_edge": share,
        "over_edge_before": was,
        "radius": cohort.density.radius,
        "radius_before": before.density.radius,
        "notices": sees,
        **stability(cohort, before, rows),
    }
    return figures, told


def _learnt_away(over: Bools, was_over: Bools, rows: Rows) -> list[str]:
    """GPUs that the last bundle called abnormal and the new one calls normal. Few of them are
    faults that were learnt; many together are a change of the whole fleet."""
    gpus = len(rows.uuids)
    count = np.bincount(rows.gpu, minlength=gpus)
    safe = np.maximum(count, 1)
    was = np.bincount(rows.gpu, was_over, gpus) / safe >= _GPU_OVER
    now = np.bincount(rows.gpu, over, gpus) / safe >= 0.5 * _GPU_OVER
    away = np.flatnonzero(was & ~now & (count > 0))
    if not len(away) or (len(away) > 1 and len(away) >= _MATES * np.count_nonzero(count)):
        return []
    names = ", ".join(f"{rows.uuids[g]} of {rows.nodes[g]}" for g in away[:_NAMED])
    more = f" and {len(away) - _NAMED} more" if len(away) > _NAMED else ""
    return [f"it calls normal what was abnormal until now on {names}{more}"]


def _lost(rows: Rows, had: Mapping[str, float]) -> list[str]:
    known = np.isfinite(rows.values).mean(axis=0)
    return [
        f"{name} is missing from {1.0 - known[INDEX[name]]:.0%} of the time, "
        f"from {1.0 - share:.0%} until now"
        for name, share in had.items()
        if name in INDEX and known[INDEX[name]] < share - _COVERAGE
    ]


def _thinned(rows: Rows) -> Rows:
    """Rows all over the window: its last hours may be a night that shows no load."""
    if len(rows) <= _ROWS:
        return rows
    return rows.part(np.unique(np.linspace(0, len(rows) - 1, _ROWS).astype(np.int64)))


def _late(rows: Rows) -> Bools:
    """Which rows [n] are of the last quarter: a fault may be no older than that."""
    end_s, start_s = float(rows.at_s.max()), float(rows.at_s.min())
    out: Bools = rows.at_s >= end_s - _RECENT * (end_s - start_s)
    return out


def _spoilt(rows: Rows, kind: str) -> tuple[Rows, Bools]:
    """The rows with a fault on the first GPU of each host, and which rows [n] are its: what a
    whole host shares would be taken for its air."""
    column = TEMP if kind == "hot" else INDEX["sm_clock"]
    _, first = np.unique(np.array(rows.nodes), return_index=True)
    bent = np.isin(rows.gpu, first) & np.isfinite(rows.values[:, column])
    values = rows.values.copy()
    if kind == "hot":
        values[bent, column] += _HOT_C
    else:
        values[bent, column] *= _SLOW
    return replace(rows, values=values), bent
