"""Learning and backtesting: the live core, walked over Prometheus history by a virtual clock.

Nothing here alerts, calls a hook or touches live state. Both read history in slices, so
memory stays bounded, and fold every slice tick by tick through the same telemetry, features
and verdicts that the daemon uses.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sentinel.config import Config
from sentinel.core.budget import Calibration
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
    from sentinel.learn.calibrate import Series

__all__ = ["Exclusion", "frames", "learn", "ticks_between"]

MIN_ROWS: Final = 20  # of one GPU model; fewer teach nothing

Progress = Callable[[float, str], None]  # share done in 0..1, what is being done


@dataclass(frozen=True, slots=True)
class LearnReport:
    """What was learnt. `cohorts` is one row per GPU model, `skipped` says what was not."""

    bundle: Bundle
    path: str
    rows: int
    gpus: int
    cohorts: list[dict[str, Any]]
    skipped: list[str]


def learn(
    config: Config,
    start_s: float,
    end_s: float,
    *,
    progress: Progress = lambda share, what: None,
    prometheus: Prometheus | None = None,
    exclusions: Sequence[Exclusion] = (),
    save: bool = True,
    now_s: float | None = None,
) -> LearnReport:
    """Learns a bundle from (start_s, end_s]. Raises DependencyError when Prometheus cannot be
    read or has nothing to learn from, StateError when the bundle cannot be written."""
    source = prometheus or connect(config)
    settings = settings_of(config)
    gathered = _gather(config, source, settings, start_s, end_s, progress, exclusions)
    gpus = gathered.gpus
    cohorts: dict[str, Cohort] = {}
    report: list[dict[str, Any]] = []
    skipped: list[str] = []
    series: list[Series] = []
    for done, (model, rows) in enumerate(gathered.rows.items()):
        name = model or "(no model label)"
        progress(0.9 + 0.1 * done / len(gathered.rows), f"clustering {name}")
        count = len(rows.values)
        if count < MIN_ROWS:
            skipped.append(
                f"{name}: only {count} usable moments of its GPUs, {MIN_ROWS} are needed; wait"
            )
            continue
        cohort, evaluation, held = _fit(model, rows, config, len(series), end_s - start_s)
        cohorts[model] = cohort
        series += held
        report.append({"model": model, "gpus": len(rows.uuids), "rows": count, **evaluation})
    if not cohorts:
        why = "; ".join(skipped) or (
            f"{gpus} GPUs reported, none for long enough at one work (jobs.settle_s); wait, or "
            "start `sentinel run`, which learns by itself"
            if gpus
            else "no GPU reported in it. Check prometheus.selector and Prometheus's retention, or "
            "give another window"
        )
        raise DependencyError(
            f"nothing to learn between {_when(start_s)} and {_when(end_s)}: {why}"
        )
    made = Bundle(
        bundles.bundle_id(cohorts, end_s),
        cohorts,
        settings.grid_s,
        start_s,
        end_s,
        {"cohorts": report, "skipped": skipped},
        _calibrate(series, gpus, config),
    )
    path = ""
    if save:
        created_s = end_s if now_s is None else now_s
        path = str(bundles.save(bundle_dir(config), made, created_s=created_s))
    progress(1.0, "done")
    return LearnReport(made, path, sum(r["rows"] for r in report), gpus, report, skipped)


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


def _fit(
    model: str, gathered: Rows, config: Config, number: int, span_s: float
) -> tuple[Cohort, dict[str, Any], list[Series]]:
    """The baseline of one GPU model, its evaluation, and the scores of its held-out time."""
    # here, since the daemon imports this module and must not load scikit-learn
    from sentinel.learn import cohort

    rows = cohort.Rows(
        model,
        gathered.values.astype(np.float64),
        gathered.power_w.astype(np.float64),
        gathered.at_s,
        gathered.gpu,
        gathered.work,
        gathered.uuids,
        gathered.nodes,
        gathered.step_s,
    )
    deviant_for_s = config.policy().times.deviant_for_s
    learnt, evaluation = cohort.fit(rows, deviant_for_s=deviant_for_s, span_s=span_s)
    held = cohort.held_out(rows, deviant_for_s=deviant_for_s, span_s=span_s, number=number)
    return learnt, evaluation, [held] if held is not None else []


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
