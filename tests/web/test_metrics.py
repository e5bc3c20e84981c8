"""The daemon's own metrics: right, documented, and to promtool's taste."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from sentinel.core.budget import thresholds
from sentinel.core.domain import Coverage
from sentinel.core.policy import Budget
from sentinel.edges.bundle import Refusal
from sentinel.lab.servers import binaries
from sentinel.web import metrics
from sentinel.web.snapshot import DURATION_BUCKETS_S, TickStats
from tests.web.moment import FRAME, NOW_S, Face, moment

ROOT = Path(__file__).parents[2]
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(client: httpx.Client) -> Samples:
    answer = client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        (s.name.removeprefix("sentinel_"), tuple(sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(answer.text)
        for s in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


def test_every_number_comes_from_the_snapshot(client: httpx.Client) -> None:
    now = scrape(client)
    assert value(now, "build_info", version="0.1.0", mode="act", cluster="test") == 1
    assert value(now, "up") == 1
    assert value(now, "blind") == 0
    assert value(now, "ticks_total", result="ok") == 2
    assert value(now, "ticks_total", result="failed") == 1
    assert value(now, "gpus", kind="deviant") == 1
    assert value(now, "gpus", kind="lost") == 0
    assert value(now, "gpus_by_presence", presence="present") == 3
    assert value(now, "gpus_by_presence", presence="host_silent") == 1
    assert value(now, "gpus_by_presence", presence="frozen") == 0
    assert value(now, "gpu_anomaly_score", gpu_uuid="GPU-0-1", node="node-0") == 1.62
    assert value(now, "incidents", phase="confirmed", severity="critical") == 1
    assert value(now, "migrations", phase="running", operation="move") == 1
    assert value(now, "quarantined_nodes") == 1
    assert value(now, "breaker_latched") == 0
    assert value(now, "paused") == 0
    assert value(now, "samples_rejected_total", reason="future") == 2
    assert value(now, "bundle_age_seconds") == 601
    assert value(now, "alertmanager_up", url="http://b:9093") == 0
    assert value(now, "last_tick_timestamp_seconds") == NOW_S
    assert not [k for k in now if k[0] == "gpu_anomaly_score" and ("gpu_uuid", "GPU-1-1") in k[1]]


def test_the_budget_is_told_by_loudness(client: httpx.Client, face: Face) -> None:
    now = scrape(client)
    assert value(now, "budget_certified") == 1
    assert value(now, "budget_score", severity="critical") == 1.3
    assert value(now, "budget_alerts_per_week", severity="warning") == 20
    told = {s: value(now, "budget_spent", severity=s) for s in ("critical", "warning", "info")}
    assert told == {"critical": 1, "warning": 0, "info": 1}
    face.now = moment(limits=thresholds({}, None, Budget(), NOW_S), refused=Refusal("b-2", 1.0, ()))
    now = scrape(client)
    assert value(now, "budget_certified") == 0
    assert value(now, "budget_score", severity="critical") == np.inf
    assert value(now, "bundle_refused") == 1


def test_up_falls_when_ticks_stop_and_before_the_first(client: httpx.Client, face: Face) -> None:
    face.now = moment(tick=TickStats().finished(NOW_S - 100, 0.1))
    assert value(scrape(client), "up") == 0
    face.now = None
    now = scrape(client)
    assert value(now, "up") == 0
    assert len(now) == 2


def test_blindness_is_a_metric_of_its_own(client: httpx.Client, face: Face) -> None:
    face.now = moment(frame=replace(FRAME, coverage=Coverage(4, 0, blind=True)))
    now = scrape(client)
    assert (value(now, "up"), value(now, "blind")) == (1, 1)


def test_series_per_gpu_can_be_left_out(face: Face, serve: Callable[..., httpx.Client]) -> None:
    names = {n for n, _ in scrape(serve(face, token=None, hook_secret=None, per_gpu_metrics=False))}
    assert "gpu_anomaly_score" not in names
    assert "gpus" in names


def test_durations_fall_into_their_buckets() -> None:
    stats = TickStats()
    for duration_s in (0.001, 0.01, 0.011, 1.0, 99.0):
        stats = stats.finished(NOW_S, duration_s)
    counts = dict(zip((*DURATION_BUCKETS_S, np.inf), stats.buckets, strict=True))
    assert (counts[0.01], counts[0.025], counts[1.0], counts[np.inf]) == (2, 1, 1, 1)
    assert sum(stats.buckets) == stats.count == 5


def test_the_histogram_is_cumulative(client: httpx.Client) -> None:
    now = scrape(client)
    assert value(now, "tick_duration_seconds_bucket", le="0.025") == 0
    assert value(now, "tick_duration_seconds_bucket", le="0.05") == 1
    assert value(now, "tick_duration_seconds_bucket", le="+Inf") == 2
    assert value(now, "tick_duration_seconds_count") == 2
    assert value(now, "tick_duration_seconds_sum") == pytest.approx(0.23)


def test_what_is_exported_is_what_is_documented(client: httpx.Client) -> None:
    exported = {n for n, _ in scrape(client)}
    described = {d.name for d in metrics.DESCRIBED}
    ends = ("", "_bucket", "_count", "_sum")
    assert {d for d in described if any(d + e in exported for e in ends)} == described
    page = (ROOT / "docs/metrics.md").read_text()
    assert page == metrics.reference_page(), "run `make generated` and commit"


def test_openmetrics_is_spoken_when_asked_for(client: httpx.Client) -> None:
    answer = client.get("/metrics", headers={"accept": "application/openmetrics-text"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


@pytest.mark.integration
def test_promtool_finds_nothing_to_say(client: httpx.Client, face: Face) -> None:
    for now in (moment(), None):
        face.now = now
        done = subprocess.run(
            [str(binaries().promtool), "check", "metrics"],
            input=client.get("/metrics").content,
            capture_output=True,
            timeout=30,
            check=False,
        )
        assert (done.returncode, done.stdout + done.stderr) == (0, b"")
