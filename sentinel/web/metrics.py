"""/metrics: the daemon's own metrics, read from the newest snapshot when scraped.

One table says what there is; the exposition and docs/metrics.md are made from it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

import numpy as np
from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from sentinel import __version__
from sentinel.core.budget import spent
from sentinel.core.domain import KINDS, Presence
from sentinel.web.snapshot import DURATION_BUCKETS_S, Snapshot


class Described(NamedTuple):
    name: str
    type: str
    labels: tuple[str, ...]
    help: str


DESCRIBED: Final = (
    Described("build_info", "gauge", ("version", "mode", "cluster"), "Always 1; says what runs."),
    Described("up", "gauge", (), "1 while ticks finish in time, 0 when the last is overdue."),
    Described("blind", "gauge", (), "1 while nothing is known of any GPU."),
    Described("ticks_total", "counter", ("result",), "Ticks since the start, ok or failed."),
    Described("tick_duration_seconds", "histogram", (), "Time from pull to snapshot of a tick."),
    Described(
        "last_tick_timestamp_seconds", "gauge", (), "When the last tick finished, Unix time."
    ),
    Described("gpus", "gauge", ("kind",), "GPUs by the last tick's verdict."),
    Described(
        "gpus_by_presence",
        "gauge",
        ("presence",),
        "GPUs by whether they report: present, vanished (alone), host_silent, blind, or frozen "
        "(the same values for ever).",
    ),
    Described(
        "gpu_anomaly_score",
        "gauge",
        ("gpu_uuid", "node"),
        "How far a GPU is from its normal; 1 is the edge. Absent while it is not scored.",
    ),
    Described("incidents", "gauge", ("phase", "severity"), "Incidents that are not resolved."),
    Described("migrations", "gauge", ("phase", "operation"), "Fences and moves, the recent too."),
    Described("quarantined_nodes", "gauge", (), "Nodes fenced by this daemon and not released."),
    Described("breaker_latched", "gauge", (), "1 once the breaker is latched; a person resets it."),
    Described("paused", "gauge", (), "1 while a person has paused all action."),
    Described("samples_rejected_total", "counter", ("reason",), "Samples that did not count."),
    Described("bundle_age_seconds", "gauge", (), "Time since the end of what was learnt from."),
    Described(
        "bundle_refused",
        "gauge",
        (),
        "1 while the newest bundle learnt compared badly with the one in use and was not adopted.",
    ),
    Described(
        "budget_certified",
        "gauge",
        (),
        "1 once the baseline knows enough normal time for soft evidence to page and act.",
    ),
    Described(
        "budget_score",
        "gauge",
        ("severity",),
        "Score that soft evidence needs now for a page (critical) or a ticket (warning); +Inf "
        "while nothing of the kind may pass.",
    ),
    Described(
        "budget_alerts_per_week",
        "gauge",
        ("severity",),
        "The budget: pages (critical) and tickets (warning) of soft evidence a week.",
    ),
    Described(
        "budget_spent",
        "gauge",
        ("severity",),
        "Soft incidents of the last seven days by how loudly they were told; info: written down "
        "only. Those with one cause count once.",
    ),
    Described("alertmanager_up", "gauge", ("url",), "1 if the last alerts were taken there."),
)
_BY_NAME: Final = {d.name: d for d in DESCRIBED}


class SnapshotCollector(Collector):
    """Turns the snapshot of the moment into metric families."""

    def __init__(
        self, snapshot: Callable[[], Snapshot | None], clock: Callable[[], float], per_gpu: bool
    ) -> None:
        self._snapshot = snapshot
        self._clock = clock
        self._per_gpu = per_gpu

    def collect(self) -> Iterator[Metric]:
        snapshot = self._snapshot()
        if snapshot is None:  # started, and no tick has finished
            yield _gauge("build_info", [((__version__, "", ""), 1)])
            yield _gauge("up", [((), 0)])
            return
        now_s = self._clock()
        yield _gauge("build_info", [((snapshot.version, snapshot.mode, snapshot.cluster), 1)])
        yield from _loop(snapshot, now_s)
        yield from _fleet(snapshot)
        if self._per_gpu:
            yield _scores(snapshot)
        yield from _actions(snapshot)
        yield _counter("samples_rejected_total", [((r,), n) for r, n in snapshot.rejected.items()])
        if snapshot.bundle_id:
            age_s = now_s - snapshot.bundle_learnt_to_s
            yield _gauge("bundle_age_seconds", [((), age_s)])
            yield _gauge("bundle_refused", [((), snapshot.refused is not None)])
        yield from _budget(snapshot, now_s)
        yield _gauge(
            "alertmanager_up", [((url,), ok) for url, (ok, _) in snapshot.alertmanagers.items()]
        )


def registry(
    snapshot: Callable[[], Snapshot | None], *, clock: Callable[[], float], per_gpu: bool
) -> CollectorRegistry:
    """A registry of the daemon's metrics alone."""
    made = CollectorRegistry()
    made.register(SnapshotCollector(snapshot, clock, per_gpu))
    return made


def _loop(snapshot: Snapshot, now_s: float) -> Iterator[Metric]:
    tick = snapshot.tick
    yield _gauge("up", [((), not tick.overdue_s(now_s))])
    yield _gauge("blind", [((), snapshot.frame.coverage.blind)])
    yield _counter("ticks_total", [(("ok",), tick.count), (("failed",), tick.failures)])
    buckets = [
        (str(limit), int(n))
        for limit, n in zip((*DURATION_BUCKETS_S, "+Inf"), np.cumsum(tick.buckets), strict=True)
    ]
    family = HistogramMetricFamily(*_named("tick_duration_seconds"))
    family.add_metric([], buckets, tick.duration_sum_s)
    yield family
    yield _gauge("last_tick_timestamp_seconds", [((), tick.last_finished_s)])


def _fleet(snapshot: Snapshot) -> Iterator[Metric]:
    codes = np.bincount(snapshot.judgement.kinds, minlength=len(KINDS))
    yield _gauge("gpus", [((kind,), int(codes[code])) for code, kind in enumerate(KINDS)])
    heard = np.bincount(snapshot.frame.presence, minlength=len(Presence))
    yield _gauge("gpus_by_presence", [((p.name.lower(),), int(heard[p])) for p in Presence])
    open_now = [i for i in snapshot.control.incidents.values() if i.is_open]
    counts = Counter((i.phase.value, i.severity.value) for i in open_now)
    yield _gauge("incidents", list(counts.items()))


def _scores(snapshot: Snapshot) -> Metric:
    scores = snapshot.judgement.scores
    rows = np.flatnonzero(np.isfinite(scores))
    gpus = snapshot.frame.gpus
    return _gauge(
        "gpu_anomaly_score", [((gpus[r].uuid, gpus[r].node), float(scores[r])) for r in rows]
    )


def _actions(snapshot: Snapshot) -> Iterator[Metric]:
    control = snapshot.control
    migrations = control.migrations.values()
    counts = Counter((m.phase.value, m.operation.value) for m in migrations)
    yield _gauge("migrations", list(counts.items()))
    yield _gauge("quarantined_nodes", [((), len(control.quarantine))])
    yield _gauge("breaker_latched", [((), control.breaker.latched)])
    yield _gauge("paused", [((), control.pause.paused)])


def _budget(snapshot: Snapshot, now_s: float) -> Iterator[Metric]:
    limits = snapshot.limits
    if limits is None:
        return
    yield _gauge("budget_certified", [((), limits.certified)])
    page = limits.page.now if limits.certified else math.inf
    yield _gauge("budget_score", [(("critical",), page), (("warning",), limits.ticket.now)])
    yield _gauge(
        "budget_alerts_per_week",
        [(("critical",), limits.page.per_week), (("warning",), limits.ticket.per_week)],
    )
    told = zip(("critical", "warning", "info"), spent(snapshot.control.peaks, now_s), strict=True)
    yield _gauge("budget_spent", [((severity,), count) for severity, count in told])


Rows = Iterable[tuple[tuple[str, ...], float]]


def _gauge(name: str, rows: Rows) -> Metric:
    return _filled(GaugeMetricFamily(*_named(name), labels=_BY_NAME[name].labels), rows)


def _counter(name: str, rows: Rows) -> Metric:
    return _filled(CounterMetricFamily(*_named(name), labels=_BY_NAME[name].labels), rows)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, rows: Rows) -> Metric:
    for labels, value in rows:
        family.add_metric(labels, float(value))
    return family


def _named(name: str) -> tuple[str, str]:
    return f"sentinel_{name}", _BY_NAME[name].help


def reference_page() -> str:
    """What docs/metrics.md holds."""
    rows = "".join(
        f"| `sentinel_{d.name}` | {d.type} | {', '.join(d.labels)} | {d.help} |\n"
        for d in DESCRIBED
    )
    return (
        "# Metrics\n\n"
        "The daemon's own metrics, on `/metrics` of `http.listen`. They describe the newest\n"
        "finished tick. `sentinel_gpu_anomaly_score` is one series per GPU and is left out with\n"
        "`http.per_gpu_metrics: false`. `rules/sentinel.rules.yaml` watches the daemon by them.\n\n"
        "| metric | type | labels | meaning |\n|---|---|---|---|\n" + rows + "\n"
        "This page is made from `sentinel/web/metrics.py` by `make generated`.\n"
    )
