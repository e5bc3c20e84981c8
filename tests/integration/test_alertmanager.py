"""The senders against a real Alertmanager: alerts fire, resolve, and outlive its absence."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests

from sentinel.core.alert import Alert
from sentinel.edges.alertmanager import Alertmanagers
from sentinel.lab import servers

pytestmark = pytest.mark.integration

ROUTES = {"route": {"receiver": "none"}, "receivers": [{"name": "none"}]}


@pytest.fixture
def alertmanager(tmp_path: Path) -> Iterator[servers.AlertmanagerServer]:
    with servers.alertmanager(tmp_path, ROUTES) as server:
        yield server


def alert(n: int = 0, ends_in_s: float = 300.0) -> Alert:
    labels = {"alertname": "SentinelGpuFault", "severity": "critical", "gpu_uuid": f"GPU-{n}"}
    now_s = time.time()
    return Alert(labels, {"summary": "off the bus"}, now_s - 60.0, now_s + ends_in_s)


def held(server: servers.Server) -> list[dict[str, Any]]:
    answer = requests.get(f"{server.url}/api/v2/alerts", params={"active": "true"}, timeout=5)
    found: list[dict[str, Any]] = answer.json()
    return found


def until(true: Callable[[], bool], within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_alerts_fire_and_resolve(alertmanager: servers.AlertmanagerServer) -> None:
    senders = Alertmanagers([alertmanager.url])
    senders.send([])
    assert senders.flush(5)
    assert senders.status()[alertmanager.url] == (True, "ok")  # none is no error to it
    first = alert()
    senders.send([first])
    assert senders.flush(5)
    (found,) = held(alertmanager)
    assert found["labels"] == dict(first.labels)
    assert found["annotations"] == {"summary": "off the bus"}
    senders.send([replace(first, ends_at_s=time.time() - 0.1, resolved=True)])
    assert senders.flush(5)
    until(lambda: held(alertmanager) == [])
    senders.close()


def test_many_at_once_are_all_taken(alertmanager: servers.AlertmanagerServer) -> None:
    senders = Alertmanagers([alertmanager.url])
    senders.send([alert(n) for n in range(1000)])
    assert senders.flush(10)
    assert senders.status()[alertmanager.url] == (True, "ok")
    assert len(held(alertmanager)) == 1000
    senders.close()


def test_one_bad_alert_costs_no_other(alertmanager: servers.AlertmanagerServer) -> None:
    good, bad = alert(1), alert(2)
    bad = replace(bad, ends_at_s=bad.starts_at_s - 1.0)
    senders = Alertmanagers([alertmanager.url])
    senders.send([bad, good])
    assert senders.flush(5)
    ok, text = senders.status()[alertmanager.url]
    assert not ok
    assert "400" in text
    assert [a["labels"]["gpu_uuid"] for a in held(alertmanager)] == ["GPU-1"]
    senders.close()


def test_nothing_is_lost_over_an_outage(alertmanager: servers.AlertmanagerServer) -> None:
    """What fired before, and what fired while it was gone, is there after the next tick."""
    senders = Alertmanagers([alertmanager.url], timeout_s=1.0)
    senders.send([alert(1)])
    assert senders.flush(5)
    alertmanager.kill()
    senders.send([alert(1), alert(2)])
    assert senders.flush(5)
    assert senders.status()[alertmanager.url] == (False, "connection refused")
    alertmanager.start()
    senders.send([alert(1), alert(2)])
    assert senders.flush(5)
    assert senders.status()[alertmanager.url] == (True, "ok")
    assert len(held(alertmanager)) == 2
    senders.close()
