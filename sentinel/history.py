"""Learning and backtesting: the live core, walked over Prometheus history by a virtual clock.

Nothing here alerts, calls a hook or touches live state. Both read history in slices, so
memory stays bounded, and fold every slice tick by tick through the same telemetry, features
and verdicts that the daemon uses.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sentinel.config import Config
from sentinel.core.budget import Calibration
from sentinel.core.domain import to_plain
from sentinel.core.features import CELLS
from sentinel.core.frame import Telemetry
from sentinel.core.score import Cohort
from sentinel.core.verdict import Bundle, Settings
from sentinel.data import load_models
from sentinel.edges import bundle as bundles
from sentinel.edges.connection import wants_gzip
from sentinel.edges.prometheus import Prometheus
from sentinel.errors import DependencyError, StateError
from sentinel.gather import (
    Exclusion,
    Gathered,
    Rows,
    Source,
    frames,
    gather,
    ticks_between,
)

if TYPE_CHECKING:
    from sentinel.learn.adopt import Comparison
    from sentinel.learn.calibrate import Series
    from sentinel.learn.cohort import Rows as CohortRows

__all__ = ["Exclusion", "frames", "learn", "ticks_between"]

_MORE: Final = 1.5  # a short baseline is learnt anew with so many times its history
MIN_ROWS: Final = 20  # of one GPU model; fewer teach nothing

Progress = Callable[[float, str], None]  # share done in 0..1, what is being done


@dataclass(frozen=True, slots=True)
class LearnReport:
    """What was learnt. `cohorts` is one row per GPU model, `skipped` says what was not; the
    bundle was not adopted where `refused` has reasons. `comparison` is with the last one."""

    bundle: Bundle
    path: str
    rows: int
    gpus: int
    cohorts: list[dict[str, Any]]
    skipped: list[str]
    refused: tuple[str, ...] = ()
    comparison: dict[str, Any] | None = None


def learn(
    config: Config,
    start_s: float,
    end_s: float,
    *,
    progress: Progress = lambda share, what: None,
    prometheus: Prometheus | None = None,
    exclusions: Sequence[Exclusion] = (),
    save: bool = True,
    force: bool = False,
    now_s: float | None = None,
) -> LearnReport:
    """Learns a bundle from (start_s, end_s], and with `save` compares it with the one in use:
    it is kept in any case, and marked as refused where it compares badly, unless `force`.

    Raises DependencyError when Prometheus cannot be read or has nothing to learn from,
    StateError when the bundle cannot be written."""
    source = prometheus or connect(config)
    settings = settings_of(config)
    gathered = _gather(config, source, settings, start_s, end_s, progress, exclusions)
    last = _last(config, settings) if save else None
    rows = {model: _rows(model, own) for model, own in gathered.rows.items()}
    found = _learn_models(config, rows, last, end_s - start_s, progress)
    if not found.cohorts:
        raise DependencyError(
            f"nothing to learn between {_when(start_s)} and {_when(end_s)}: "
            f"{_why_nothing(found.skipped, gathered.gpus)}"
        )
    seen_s = max(float(np.ptp(own.at_s)) for own in rows.values())
    made = Bundle(
        bundles.bundle_id(found.cohorts, end_s),
        found.cohorts,
        settings.grid_s,
        start_s,
        end_s,
        {"cohorts": found.report, "skipped": found.skipped, "span_s": seen_s},
        _calibrate(found.held, gathered.gpus, config),
    )
    comparison = _compare(made, last, rows)
    path, refused = "", () if force or comparison is None else comparison.reasons
    if save:
        created_s = end_s if now_s is None else now_s
        saved = bundles.save(bundle_dir(config), made, created_s=created_s, refused=refused)
        path = str(saved)
    progress(1.0, "done")
    return LearnReport(
        made,
        path,
        sum(r["rows"] for r in found.report),
        gathered.gpus,
        found.report,
        found.skipped,
        refused,
        comparison.plain() if comparison is not None else None,
    )


@dataclass
class _Models:
    """What was learnt of each GPU model, and the scores of its held-out time."""

    cohorts: dict[str, Cohort] = field(default_factory=dict)
    report: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    held: list[Series] = field(default_factory=list)


def _learn_models(
    config: Config,
    rows: dict[str, CohortRows],
    last: Bundle | None,
    span_s: float,
    progress: Progress,
) -> _Models:
    from sentinel.learn.cohort import fit, held_out  # not before: it loads scikit-learn
    from sentinel.learn.evaluate import describe
    from sentinel.learn.suspects import suspects

    out, hold_s = _Models(), config.policy().times.deviant_for_s
    for done, (model, own) in enumerate(list(rows.items())):
        name = model or "(no model label)"
        progress(0.9 + 0.1 * done / len(rows), f"clustering {name}")
        if len(own) < MIN_ROWS:
            out.skipped.append(
                f"{name}: only {len(own)} usable moments of its GPUs, {MIN_ROWS} are needed; wait"
            )
            continue
        found = suspects(own.values, own.gpu, own.nodes)
        out.skipped += [s.text(own.uuids[s.gpu], own.nodes[s.gpu]) for s in found]
        if found:
            own = rows[model] = own.part(~np.isin(own.gpu, [s.gpu for s in found]))
        if not model:
            out.skipped.append(
                f"{name}: {len(own.uuids)} GPUs tell no model and are judged as one kind; if they "
                "are several, a slow one may pass: let the exporter give modelName"
            )
        cohort, evaluation = fit(own, deviant_for_s=hold_s, span_s=span_s)
        held = held_out(own, deviant_for_s=hold_s, span_s=span_s, number=len(out.held))
        out.held += [held] if held is not None else []
        out.cohorts[model] = cohort
        evaluation |= describe(cohort, own, last.cohorts.get(model) if last else None)
        of = {"model": model, "gpus": len(own.uuids), "rows": len(own)}
        out.report.append({**of, **evaluation})
    return out


def plain(made: LearnReport, config: Config) -> dict[str, Any]:
    """The report of `sentinel learn` as JSON has it."""
    budget = config.policy().budget
    return {
        "schema": 1,
        "bundle_id": made.bundle.id,
        "path": made.path,
        "adopted": not made.refused,
        "refused": list(made.refused),
        "learnt_from": _when(made.bundle.learnt_from_s),
        "learnt_to": _when(made.bundle.learnt_to_s),
        "rows": made.rows,
        "gpus": made.gpus,
        "cohorts": made.cohorts,
        "skipped": made.skipped,
        "calibration": to_plain(made.bundle.calibration),
        "budget": to_plain(budget),
        "comparison": made.comparison,
    }


def _why_nothing(skipped: list[str], gpus: int) -> str:
    if skipped:
        return "; ".join(skipped)
    if gpus:
        return (
            f"{gpus} GPUs reported, none for long enough at one work (jobs.settle_s); wait, or "
            "start `sentinel run`, which learns by itself"
        )
    return (
        "no GPU reported in it. Check prometheus.selector and Prometheus's retention, or "
        "give another window"
    )


def _rows(model: str, own: Rows) -> CohortRows:
    from sentinel.learn.cohort import Rows as CohortRows

    return CohortRows(
        model,
        own.values.astype(np.float64),
        own.power_w.astype(np.float64),
        own.at_s,
        own.gpu,
        own.work,
        own.uuids,
        own.nodes,
        own.step_s,
    )


def _last(config: Config, settings: Settings) -> Bundle | None:
    """The bundle in use, which a new one is compared with."""
    return bundles.load_newest(bundle_dir(config), grid_s=settings.grid_s)[0]


def _compare(made: Bundle, last: Bundle | None, rows: dict[str, CohortRows]) -> Comparison | None:
    from sentinel.learn.adopt import compare

    if last is None or last.id == made.id:
        return None
    had: dict[str, dict[str, float]] = {}
    told = last.evaluation.get("cohorts")
    for one in told if isinstance(told, list) else ():
        had[one["model"]] = one.get("coverage", {})
    return compare(made, last, rows, had)


def _gather(
    config: Config,
    source: Source,
    settings: Settings,
    start_s: float,
    end_s: float,
    progress: Progress,
    exclusions: Sequence[Exclusion],
) -> Gathered:
    catalog = config.catalog()
    return gather(
        source,
        Telemetry(catalog, config.identity(), lacks=load_models().lacks),
        catalog,
        settings,
        start_s,
        end_s,
        tick_s=config.tick.interval_s,
        slice_s=config.learn.slice_s,
        exclusions=exclusions,
        progress=lambda share, gpus: progress(0.9 * share, f"reading history of {gpus} GPUs"),
    )


def _calibrate(series: Sequence[Series], gpus: int, config: Config) -> Calibration:
    from sentinel.learn.calibrate import calibrate

    policy = config.policy()
    return calibrate(
        series,
        gpus=gpus,
        budget=policy.budget,
        deviant_for_s=policy.times.deviant_for_s,
        certify_gpu_days=config.detection.certify_gpu_days,
    )


def connect(config: Config) -> Prometheus:
    """The configured Prometheus; connects at the first request."""
    section, tls = config.prometheus, config.prometheus_tls()
    return Prometheus(
        section.url,
        selector=section.selector,
        split_by=section.split_by,
        basic_auth=config.prometheus_auth(),
        headers=config.prometheus_headers(),
        secret_headers=section.header_files,
        renew=lambda: (config.prometheus_auth(), config.prometheus_headers()),
        params=section.params,
        ca_file=tls["ca_file"],
        cert_file=tls["cert_file"],
        key_file=tls["key_file"],
        server_name=section.server_name,
        gzip=section.gzip == "on"
        or (section.gzip == "auto" and wants_gzip(section.url, tls["ca_file"])),
        timeout_s=section.timeout_s,
        max_bytes=section.max_bytes,
        concurrency=section.concurrency,
        names=config.catalog().sources,
    )


def settings_of(config: Config) -> Settings:
    """How telemetry is judged under this configuration."""
    detection = config.detection
    return Settings(
        grid_s=config.grid_s(),
        settle_s=config.jobs.settle_s,
        page_score=detection.page_score,
        max_age_s=config.max_age_s(),
        deviant_may=detection.deviant_may,
    )


def soon_again(
    config: Config, bundle: Bundle | None, now_s: float, *, tried_s: float = 0.0
) -> bool:
    """Whether to learn before `learn.every_h` is over: there is no baseline yet, or it rests on
    little and half as much history again has come since, or since the last try (`tried_s`)."""
    if bundle is None:
        return True
    told = bundle.evaluation.get("span_s")
    if not isinstance(told, float):
        return False
    enough_s = 3600.0 * min(config.learn.every_h, config.learn.window_h)
    has_s = told + max(0.0, now_s - max(bundle.learnt_to_s, tried_s))
    return told < 0.9 * enough_s and has_s >= _MORE * told


def warm_up_s(settings: Settings) -> float:
    """How much history fills the rings before the first tick that judges."""
    return CELLS * settings.grid_s + settings.max_age_s


def bundle_dir(config: Config) -> Path:
    return config.state_dir() / "bundles"


def exclusions_path(config: Config) -> Path:
    return config.state_dir() / "exclusions.json"


def read_exclusions(config: Config, *, now_s: float) -> list[Exclusion]:
    """What the daemon said was under an incident; nothing where there is no such file."""
    path = exclusions_path(config)
    if not path.exists():
        return []
    try:
        rows = json.loads(path.read_bytes())
        return [
            Exclusion(str(r["gpu_uuid"]), float(r["from_s"]), float(r["to_s"] or now_s))
            for r in rows
        ]
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise StateError(f"{path}: cannot be read ({err}); delete it to go on") from err


def _when(at_s: float) -> str:
    return str(np.datetime64(int(at_s), "s")) + "Z"
