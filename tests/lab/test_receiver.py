"""The alert receiver as a process of its own."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from sentinel.lab.servers import Server


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    def argv(port: int) -> list[str]:
        return [sys.executable, "-m", "sentinel.lab.receiver", "--listen", f"127.0.0.1:{port}"]

    with Server("receiver", tmp_path, argv, 0) as receiver:
        yield receiver.url


def notification(*statuses: str) -> dict[str, Any]:
    alerts = [
        {
            "status": status,
            "labels": {"alertname": "SentinelGpuFault", "node": "gpu-01"},
            "annotations": {"summary": "a GPU fell off the bus"},
            "startsAt": "2026-01-01T00:00:00Z",
            "endsAt": "0001-01-01T00:00:00Z",
            "generatorURL": "",
            "fingerprint": "ab12",
        }
        for status in statuses
    ]
    return {"version": "4", "status": "firing", "receiver": "pager", "alerts": alerts}


def test_every_alert_is_kept_in_order_with_its_time(url: str) -> None:
    before_s = time.time()
    for statuses in (["firing"], ["firing", "resolved"]):
        requests.post(url, json=notification(*statuses), timeout=5).raise_for_status()
    kept = requests.get(f"{url}/alerts", timeout=5).json()
    assert [alert["status"] for alert in kept] == ["firing", "firing", "resolved"]
    times = [alert["received_at_s"] for alert in kept]
    assert before_s <= times[0] <= times[1] == times[2] <= time.time()
    assert kept[0]["annotations"] == {"summary": "a GPU fell off the bus"}
    assert kept[0]["receiver"] == "pager"


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"alerts": [1]}', b"[" * 100_000, b"\xff"])
def test_what_is_no_notification_is_400_and_not_kept(url: str, body: bytes) -> None:
    assert requests.post(url, data=body, timeout=5).status_code == 400
    assert requests.get(f"{url}/alerts", timeout=5).json() == []
