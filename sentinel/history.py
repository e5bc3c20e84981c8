"""Learning and backtesting: the live core, walked over Prometheus history by a virtual clock.

Nothing here alerts, calls a hook or touches live state. Both read history in slices, so
memory stays bounded, and fold every slice tick by tick through the same telemetry, features
and verdicts that the daemon uses.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from sentinel.config import Config
from sentinel.core.domain import Floats, Frame, Ints, Presence
from sentinel.core.evidence import HardWatch
from sentinel.core.features import CELLS, FEATURES, MEM_TEMP, TEMP, Window
from sentinel.core.frame import Samples, Telemetry
from sentinel.core.score import GPU_SPACE, Cohort, thermal_excess
from sentinel.core.verdict import Bundle, Settings
from sentinel.data import load_models
from sentinel.edges import bundle as bundles
from sentinel.edges.connection import wants_gzip
from sentinel.edges.prometheus import Prometheus
from sentinel.errors import DependencyError, StateError

ROWS_PER_GPU: Final = 3000
ROWS_TOTAL: Final = 2_000_000
MIN_ROWS: Final = 20  # of one GPU model; fewer teach nothing
_FAULT_SHADOW_S: Final = 3600.0  # rows of a GPU left out after hard evidence on it

Progress = Callable[[float, str], None]  # share done in 0..1, what is being done


@dataclass(frozen=True, slots=True)
class Exclusion:
    """A GPU's time that must not be learnt as normal: it was under an incident."""

    gpu_uuid: str
    from_s: float
    to_s: float


@dataclass(frozen=True, slots=True)
class LearnReport:
    """What was learnt. `cohorts` is one row per GPU model, `skipped` says what was not."""

    bundle: Bundle
    path: str
    rows: int
    gpus: int
    cohorts: list[dict[str, Any]]
    skipped: list[str]


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


@dataclass
class _Rows:
    """Feature rows gathered per GPU model while history is walked."""

    values: list[Floats] = field(default_factory=list)
    power: list[Floats] = field(default_factory=list)
    gpu: list[Ints] = field(default_factory=list)
    code: dict[str, int] = field(default_factory=dict)


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
    gathered, gpus = _gather(config, source, settings, start_s, end_s, progress, exclusions)
    cohorts: dict[str, Cohort] = {}
    report: list[dict[str, Any]] = []
    skipped: list[str] = []
    for done, (model, rows) in enumerate(sorted(gathered.items())):
        name = model or "(no model label)"
        progress(0.9 + 0.1 * done / len(gathered), f"clustering {name}")
        count = sum(len(v) for v in rows.values)
        if count < MIN_ROWS:
            skipped.append(
                f"{name}: only {count} usable moments of its GPUs, {MIN_ROWS} are needed; wait"
            )
            continue
        cohort, evaluation = _fit(model, rows, settings, config, end_s - start_s)
        cohorts[model] = cohort
        report.append({"model": model, "gpus": len(rows.code), "rows": count, **evaluation})
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
    )
    path = ""
    if save:
        created_s = end_s if now_s is None else now_s
        path = str(bundles.save(bundle_dir(config), made, created_s=created_s))
    progress(1.0, "done")
    return LearnReport(made, path, sum(r["rows"] for r in report), gpus, report, skipped)


def _gather(
    config: Config,
    source: Prometheus,
    settings: Settings,
    start_s: float,
    end_s: float,
    progress: Progress,
    exclusions: Sequence[Exclusion],
) -> tuple[dict[str, _Rows], int]:
    catalog = config.catalog()
    telemetry = Telemetry(catalog, config.identity(), lacks=load_models().lacks)
    window, hard = Window(settings.grid_s), HardWatch()
    ticks = ticks_between(start_s, end_s, config.tick.interval_s)
    gathered: dict[str, _Rows] = {}
    shadow: dict[str, float] = {}
    away = _by_gpu(exclusions)
    stride, seen = 0, 0
    slices = source.history(start_s, end_s, slice_s=config.learn.slice_s)
    for place, frame in enumerate(frames(telemetry, slices, ticks)):
        features = window.push(frame, max_age_s=settings.max_age_s)
        for finding in hard.look(frame, catalog)[0]:
            if finding.fence:
                shadow[frame.gpus[finding.row].uuid] = frame.at_s + _FAULT_SHADOW_S
        if not len(frame.gpus):
            continue
        if len(frame.gpus) > seen:
            seen = len(frame.gpus)
            stride = max(1, round(len(ticks) / min(ROWS_PER_GPU, ROWS_TOTAL / seen)))
        if place % 16 == 0:
            progress(0.9 * place / len(ticks), f"reading history of {seen} GPUs")
        if place % stride:
            continue
        usable = features.ready & (features.settled_s >= settings.settle_s)
        usable &= frame.presence == Presence.PRESENT
        for uuid, until in shadow.items():
            if until >= frame.at_s:
                usable &= np.array([gpu.uuid != uuid for gpu in frame.gpus])
        for row, gpu in enumerate(frame.gpus) if away else ():
            if any(a <= frame.at_s <= b for a, b in away.get(gpu.uuid, ())):
                usable[row] = False
        _take(gathered, frame, features.values, features.power_ewma_w, usable)
    return gathered, seen


def _take(
    gathered: dict[str, _Rows], frame: Frame, values: Floats, power: Floats, usable: Any
) -> None:
    by_model: dict[str, list[int]] = {}
    for row in np.flatnonzero(usable):
        by_model.setdefault(frame.gpus[row].model, []).append(int(row))
    for model, members in by_model.items():
        rows = gathered.setdefault(model, _Rows())
        rows.values.append(values[members].astype(np.float32))
        rows.power.append(power[members])
        rows.gpu.append(
            np.array(
                [rows.code.setdefault(frame.gpus[r].uuid, len(rows.code)) for r in members],
                dtype=np.int64,
            )
        )


def _by_gpu(exclusions: Sequence[Exclusion]) -> dict[str, list[tuple[float, float]]]:
    out: dict[str, list[tuple[float, float]]] = {}
    for e in exclusions:
        out.setdefault(e.gpu_uuid, []).append((e.from_s, e.to_s))
    return out


def _fit(
    model: str, rows: _Rows, settings: Settings, config: Config, span_s: float
) -> tuple[Cohort, dict[str, Any]]:
    # here, since the daemon imports this module and must not load scikit-learn
    from sentinel.learn.baseline import DensityBaseline, fit_thermal

    values = np.concatenate(rows.values).astype(np.float64)
    power, gpu = np.concatenate(rows.power), np.concatenate(rows.gpu)
    temps = values[:, [TEMP, MEM_TEMP]]
    thermal = fit_thermal(tuple(rows.code), gpu, power, temps, span_s=span_s)
    values[:, [TEMP, MEM_TEMP]] = np.maximum(thermal_excess(thermal, gpu, power, temps)[0], 0.0)
    reference = np.ones(len(FEATURES))
    for f, feature in enumerate(FEATURES):
        known = values[:, f][np.isfinite(values[:, f])]
        if feature.relative and len(known):
            reference[f] = max(float(np.quantile(known, 0.99)), 1.0)
    floors = np.array([f.floor for f in FEATURES]) * reference
    spacing_s = span_s * len(rows.code) / max(1, len(values))
    hold = max(1, round(config.policy().times.deviant_for_s / spacing_s))
    estimator = DensityBaseline(space=GPU_SPACE, floors=floors)
    estimator.fit(values, groups=gpu, hold_rows=hold)
    cohort = Cohort(model, estimator.density_, thermal, len(values))
    return cohort, dict(estimator.evaluation_)


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
