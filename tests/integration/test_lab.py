"""The lab's exporter process under a real Prometheus: its past and its present are one."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import requests

from sentinel.lab import servers
from sentinel.lab.exporter import scrape_configs

pytestmark = pytest.mark.integration


@dataclass
class World:
    exporter: str
    prometheus: servers.PrometheusServer
    backfill: dict[str, Any]

    def query(self, promql: str) -> list[dict[str, Any]]:
        url = f"{self.prometheus.url}/api/v1/query"
        answer = requests.get(url, params={"query": promql}, timeout=30)
        result: list[dict[str, Any]] = answer.json()["data"]["result"]
        return result

    def number(self, promql: str) -> float:
        result = self.query(promql)
        return float(result[0]["value"][1]) if result else 0.0

    def wait(self, what: Callable[[], bool], within_s: float = 20) -> bool:
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            if what():
                return True
            time.sleep(0.2)
        return False

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = requests.post(self.exporter + path, json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        plain: dict[str, Any] = answer.json()
        return plain


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    port, hosts = servers.free_port(), 4
    command = [sys.executable, "-m", "sentinel.lab.exporter"]
    command += ["--port", str(port), "--seed", "4", "--hosts", str(hosts), "--load-s", "5"]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                try:
                    names = requests.get(f"{url}/state", timeout=5).json()["hosts"]
                    break
                except requests.ConnectionError:
                    time.sleep(0.1)
            with servers.prometheus(tmp_path_factory.mktemp("prometheus")) as running:
                order = {"remote_write_url": running.url, "hours": 1, "step_s": 15}
                done = requests.post(f"{url}/backfill", json=order, timeout=60).json()
                running.configure(scrape_configs=scrape_configs(port, names))
                world = World(url, running, done)
                assert world.wait(lambda: world.number("count(count_over_time(up[8s]) > 2)") == 4)
                yield world
        finally:
            process.terminate()


def test_the_scrape_goes_on_where_the_backfill_ended(world: World) -> None:
    start, end = world.backfill["start_s"], world.backfill["end_s"]
    assert end - start == pytest.approx(3600, abs=10)
    # were one label different, there would be twice as many series
    stored = world.number("count(count_over_time(DCGM_FI_DEV_POWER_USAGE[2h]))")
    assert stored == 32
    assert world.number("count(up == 1)") == 4
    gpu = requests.get(f"{world.exporter}/state", timeout=10).json()["gpus"][0]
    uuid = gpu["uuid"]
    [series] = world.query(f'DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{{UUID="{uuid}"}}[2h]')
    times = [float(t) for t, _ in series["values"]]
    values = [float(v) for _, v in series["values"]]
    assert min(times) == start
    assert max(times) > end + 1
    gaps = [b - a for a, b in pairwise(times)]
    assert max(gaps) < 20, "a hole between history and scrapes"
    assert all(b >= a for a, b in pairwise(values)), "a counter went back"


def test_a_fault_reaches_prometheus_and_its_repair_too(world: World) -> None:
    gpus = requests.get(f"{world.exporter}/state", timeout=10).json()["gpus"]
    uuid = gpus[1]["uuid"]
    count = 'count(DCGM_FI_DEV_GPU_TEMP{instance="gpu-00:9400"})'
    assert world.number(count) == 8
    world.post("/faults", {"kind": "off-the-bus", "uuid": uuid})
    xid = f'max_over_time(DCGM_FI_DEV_XID_ERRORS{{UUID="{uuid}"}}[1m])'
    assert world.wait(lambda: world.number(xid) == 79)
    assert world.wait(lambda: world.number(count) == 7)
    assert world.number("count(up == 1)") == 4
    world.post("/repair", {"uuid": uuid})
    assert world.wait(lambda: world.number(count) == 8)
    assert world.wait(lambda: world.number(f'DCGM_FI_DEV_XID_ERRORS{{UUID="{uuid}"}}') == 0)


def test_promtool_finds_nothing_but_dcgms_own_names(world: World) -> None:
    text = requests.get(f"{world.exporter}/host/gpu-00/metrics", timeout=10).content
    check = [str(servers.binaries().promtool), "check", "metrics"]
    done = subprocess.run(check, input=text, capture_output=True, check=False)
    complaints = (done.stdout + done.stderr).decode().splitlines()
    dcgm = ("in 'snake_case'", 'should have "_total" suffix', "should not include type 'counter'")
    assert [line for line in complaints if not any(known in line for known in dcgm)] == []


def test_the_exporter_says_when_its_port_is_taken(world: World) -> None:
    port = world.exporter.rsplit(":", 1)[1]
    command = [sys.executable, "-m", "sentinel.lab.exporter", "--port", port, "--hosts", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode != 0
    assert "address already in use" in done.stderr
