"""The exporter's routes, over HTTP, with a clock that the test moves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import requests

from sentinel.lab.exporter import LiveFleet, scrape_configs
from sentinel.lab.fleet import Fleet
from sentinel.lab.loopback import server
from sentinel.lab.servers import free_port

T0 = 1_800_000_000.0


@dataclass
class Running:
    url: str
    fleet: Fleet
    now_s: float = T0

    def call(self, method: str, path: str, body: Any = None) -> requests.Response:
        return requests.request(method, self.url + path, json=body, timeout=10)

    def metrics(self, host: str) -> str:
        answer = self.call("GET", f"/host/{host}/metrics")
        assert answer.status_code == 200
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return answer.text

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.call("GET", "/state").json()
        return state


@pytest.fixture
def running() -> Iterator[Running]:
    fleet = Fleet(2, hosts=4, start_s=T0)
    world = Running("", fleet)
    live = LiveFleet(fleet, clock=lambda: world.now_s)
    with server("127.0.0.1:0", live.handle, quiet=True) as http:
        world.url = f"http://127.0.0.1:{http.server_address[1]}"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield world
        http.shutdown()
        thread.join()


def test_a_host_exports_its_own_gpus_as_dcgm_exporter_does(running: Running) -> None:
    text = running.metrics("gpu-01")
    uuids = [gpu.uuid for gpu in running.fleet.gpus if gpu.node == "gpu-01"]
    lines = [line for line in text.splitlines() if line.startswith("DCGM_FI_DEV_GPU_TEMP{")]
    assert [uuid in line for uuid, line in zip(uuids, lines, strict=True)] == [True] * 8
    assert "# TYPE DCGM_FI_DEV_GPU_TEMP gauge" in text
    assert "# TYPE DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION counter" in text
    assert 'Hostname="gpu-01"' in lines[0]
    assert "gpu-00" not in text


def test_time_goes_by_between_scrapes(running: Running) -> None:
    first = running.metrics("gpu-00")
    running.now_s += 10
    assert running.metrics("gpu-00") != first


def test_the_state_names_gpus_jobs_spares_and_faults(running: Running) -> None:
    state = running.state()
    gpu = state["gpus"][0]
    assert gpu["uuid"] == running.fleet.gpus[0].uuid
    assert (gpu["host"], gpu["index"], gpu["spare"], gpu["reporting"]) == ("gpu-00", 0, False, True)
    assert gpu["job"] == state["jobs"][0]["job"]
    assert state["spare_hosts"] == ["gpu-01"]
    assert state["faults"] == []
    assert state["jobs"][0]["state"] == "running"


def test_a_fault_and_its_repair(running: Running) -> None:
    uuid = running.fleet.gpus[2].uuid
    answer = running.call("POST", "/faults", {"kind": "vanished", "uuid": uuid})
    assert answer.status_code == 200
    assert uuid not in running.metrics("gpu-00")
    [fault] = running.state()["faults"]
    assert (fault["kind"], fault["uuid"], fault["hardware"]) == ("vanished", uuid, True)
    running.now_s += 5
    assert running.call("POST", "/repair", {"uuid": uuid}).status_code == 200
    assert uuid in running.metrics("gpu-00")
    assert running.state()["faults"] == []


def test_jobs_move_and_end(running: Running) -> None:
    job = running.state()["jobs"][0]["job"]
    spare = [gpu.uuid for gpu in running.fleet.gpus if gpu.node == "gpu-01"]
    assert running.call("PUT", "/jobs", {"job": job, "uuids": spare}).status_code == 200
    assert f'hpc_job="{job}"' in running.metrics("gpu-01")
    assert "hpc_job" not in running.metrics("gpu-00")
    assert running.call("DELETE", f"/jobs/{job}").status_code == 200
    assert "hpc_job" not in running.metrics("gpu-01")
    assert running.call("DELETE", f"/jobs/{job}").status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/host/gpu-99/metrics", None, 404),
        ("GET", "/nowhere", None, 404),
        ("POST", "/faults", {"kind": "gremlins", "uuid": "first"}, 404),
        ("POST", "/faults", {"kind": "ecc", "uuid": "GPU-none"}, 404),
        ("POST", "/faults", {"kind": "ecc"}, 400),
        ("POST", "/faults", ["ecc"], 400),
        ("POST", "/repair", {"uuid": 7}, 400),
        ("PUT", "/jobs", {"job": "a", "uuids": "first"}, 400),
        ("PUT", "/jobs", {"job": "a", "uuids": []}, 409),
        ("PUT", "/jobs", {"job": "a", "uuids": ["first"]}, 409),
        ("PUT", "/jobs", {"job": "a", "uuids": ["last"], "kind": "poetry"}, 409),
        ("POST", "/backfill", {"remote_write_url": "http://127.0.0.1:1", "hours": 0}, 400),
        ("POST", "/backfill", {"hours": 1, "step_s": 15}, 400),
    ],
)
def test_wrong_orders_get_a_reason(
    running: Running, method: str, path: str, body: Any, status: int
) -> None:
    words = {"first": running.fleet.gpus[0].uuid, "last": running.fleet.gpus[-1].uuid}
    if isinstance(body, dict):
        body = {k: words.get(v, v) if isinstance(v, str) else v for k, v in body.items()}
        if isinstance(body.get("uuids"), list):
            body["uuids"] = [words.get(u, u) for u in body["uuids"]]
    answer = running.call(method, path, body)
    assert answer.status_code == status
    assert answer.json()["error"]


def test_a_backfill_into_nothing_says_so(running: Running) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    answer = running.call(
        "POST", "/backfill", {"remote_write_url": url, "hours": 0.1, "step_s": 15}
    )
    assert answer.status_code == 502
    assert url in answer.json()["error"]
    assert running.state()["at_s"] == T0  # the fleet is as it was


def test_a_sick_fleet_has_no_healthy_past(running: Running) -> None:
    uuid = running.fleet.gpus[0].uuid
    running.call("POST", "/faults", {"kind": "clock", "uuid": uuid})
    order = {"remote_write_url": "http://127.0.0.1:1", "hours": 1, "step_s": 15}
    assert running.call("POST", "/backfill", order).status_code == 409


def test_each_host_is_a_target_of_its_own() -> None:
    [config] = scrape_configs(9400, ["gpu-00", "gpu-01"], interval_s=1)
    assert config["scrape_interval"] == "1000ms"
    assert [one["labels"] for one in config["static_configs"]] == [
        {"__metrics_path__": f"/host/{host}/metrics", "instance": f"{host}:9400"}
        for host in ("gpu-00", "gpu-01")
    ]
