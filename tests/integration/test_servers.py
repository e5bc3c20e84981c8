"""The lab's servers are the real ones: ready on return, restartable, and never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import requests

from sentinel.errors import DependencyError
from sentinel.lab import binaries, servers

pytestmark = pytest.mark.integration

ROUTES = {"route": {"receiver": "none"}, "receivers": [{"name": "none"}]}


def query(server: servers.Server, promql: str) -> list[dict[str, object]]:
    answer = requests.get(f"{server.url}/api/v1/query", params={"query": promql}, timeout=10)
    result: list[dict[str, object]] = answer.json()["data"]["result"]
    return result


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def test_prometheus_scrapes_itself_restarts_and_stops(tmp_path: Path) -> None:
    port = servers.free_port()
    own = {"job_name": "self", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
    with servers.prometheus(tmp_path, [own], port) as server:
        first = server.pid
        deadline = time.monotonic() + 20
        while not query(server, "up == 1") and time.monotonic() < deadline:
            time.sleep(0.2)
        assert query(server, "up == 1")
        server.restart()
        assert server.pid != first
        assert server.port == port
        assert gone(first)
        last = server.pid
    assert gone(last)
    assert (tmp_path / "prometheus.log").read_text()


def test_victoria_metrics_scrapes_itself_and_takes_new_targets(tmp_path: Path) -> None:
    port = servers.free_port()
    own = {"job_name": "self", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
    with servers.victoria_metrics(
        tmp_path, port=port, options=["-search.latencyOffset=0s"]
    ) as server:
        assert not query(server, "up")
        server.configure(scrape_configs=[own])
        deadline = time.monotonic() + 20
        while not query(server, "up == 1") and time.monotonic() < deadline:
            time.sleep(0.2)
        assert query(server, "up == 1")
        pid = server.pid
    assert gone(pid)


def test_both_generations_of_prometheus_answer(tmp_path: Path) -> None:
    for own in (True, False):
        program = binaries.prometheus_of_release(own=own)
        with servers.prometheus(tmp_path / str(own), program=program) as server:
            answer = requests.get(f"{server.url}/api/v1/status/buildinfo", timeout=10)
            assert answer.json()["data"]["version"].startswith("2.")


def test_a_paused_server_still_stops(tmp_path: Path) -> None:
    server = servers.prometheus(tmp_path)
    os.kill(server.pid, signal.SIGSTOP)
    pid = server.pid
    server.stop()
    assert gone(pid)


def test_alertmanager_takes_alerts_and_new_routes(tmp_path: Path) -> None:
    with servers.alertmanager(tmp_path, ROUTES) as server:
        alert = {"labels": {"alertname": "Test"}, "annotations": {"summary": "s"}}
        assert requests.post(f"{server.url}/api/v2/alerts", json=[alert], timeout=10).ok
        held = requests.get(f"{server.url}/api/v2/alerts", timeout=10).json()
        assert [a["labels"]["alertname"] for a in held] == ["Test"]
        server.configure("route: {receiver: other}\nreceivers: [{name: other}]\n")
        status = requests.get(f"{server.url}/api/v2/status", timeout=10).json()
        assert "other" in status["config"]["original"]


def test_a_refused_configuration_says_why(tmp_path: Path) -> None:
    with servers.prometheus(tmp_path) as server, pytest.raises(DependencyError, match="job_name"):
        server.configure(scrape_configs=[{"static_configs": []}])


def test_a_taken_port_says_so(tmp_path: Path) -> None:
    with (
        servers.prometheus(tmp_path / "one") as first,
        pytest.raises(DependencyError, match="in use by another"),
    ):
        servers.prometheus(tmp_path / "two", port=first.port)


def test_servers_die_with_a_killed_parent(tmp_path: Path) -> None:
    script = (
        "import sys, threading, time\n"
        "from sentinel.lab import servers\n"
        f"a = servers.alertmanager({str(tmp_path / 'a')!r}, {ROUTES!r})\n"
        "def from_a_short_lived_thread():\n"
        f"    global p; p = servers.prometheus({str(tmp_path / 'p')!r})\n"
        "t = threading.Thread(target=from_a_short_lived_thread); t.start(); t.join()\n"
        "time.sleep(0.5)\n"
        "print(a.pid, p.pid, a.running and p.running, flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        first, second, alive = run.stdout.readline().split()
        assert alive == "True"
        run.kill()
    deadline = time.monotonic() + 5
    pids = [int(first), int(second)]
    while not all(map(gone, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all(map(gone, pids))
