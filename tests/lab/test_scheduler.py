"""The reference scheduler as a process of its own, spoken to over HTTP alone."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import requests
from standardwebhooks import Webhook

from sentinel.lab.loopback import Answer, Request, server
from sentinel.lab.servers import Server

SECRET = "whsec_" + base64.b64encode(b"a secret of the tests only").decode()
NODES = [f"node-{n}" for n in range(4)]
FLEET = [{"uuid": f"GPU-{n}-{i}", "host": f"node-{n}"} for n in range(4) for i in range(2)]
JOB = {"job": "train", "uuids": ["GPU-0-0", "GPU-0-1", "GPU-1-0", "GPU-1-1"], "tenant": "red"}


class Neighbour:
    """A loopback server that keeps what it received: the exporter, or the caller back."""

    def __init__(self, answers: Callable[[Request], Answer]) -> None:
        self.received: list[Request] = []
        self._answers = answers
        self._server = server("127.0.0.1:0", self._handle)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def _handle(self, request: Request) -> Answer:
        self.received.append(request)
        return self._answers(request)

    def changes(self) -> list[tuple[str, str, Any]]:
        """What was asked of the exporter, reading apart."""
        return [
            (r.method, "/".join(r.path), json.loads(r.body) if r.body else None)
            for r in self.received
            if r.method != "GET"
        ]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class World:
    """A scheduler process, its exporter, and somebody to call back."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: list[dict[str, Any]] = []
        fleet = {"gpus": FLEET, "jobs": self.running}
        self.exporter = Neighbour(lambda request: Answer(200, fleet))
        self.back_answers = [200]
        self.back = Neighbour(lambda request: Answer(self._next_back()))
        self.process: Server | None = None
        (folder / "secret").write_text(SECRET + "\n")
        (folder / "jobs.json").write_text(json.dumps([JOB]))

    def _next_back(self) -> int:
        return self.back_answers.pop(0) if len(self.back_answers) > 1 else self.back_answers[0]

    def start(self, *flags: str) -> None:
        def argv(port: int) -> list[str]:
            given = {
                "--listen": f"127.0.0.1:{port}",
                "--exporter": self.exporter.url,
                "--secret-file": str(self.folder / "secret"),
                "--state": str(self.folder / "state.sqlite"),
                "--jobs": str(self.folder / "jobs.json"),
                "--run": "0.05",
            }
            words = [word for pair in given.items() for word in pair]
            return [sys.executable, "-m", "sentinel.lab.scheduler", *words, *flags]

        self.process = Server("scheduler", self.folder, argv, 0).start()

    @property
    def url(self) -> str:
        assert self.process is not None
        return self.process.url

    def order(self, operation_id: str, action: str = "move", **fields: Any) -> dict[str, Any]:
        return {
            "schema": 1,
            "operation_id": operation_id,
            "epoch": 0,
            "action": action,
            "attempt": 1,
            "dry_run": False,
            "deadline": (datetime.now(UTC) + timedelta(minutes=5)).isoformat(),
            "callback_url": f"{self.back.url}/api/v1/migrations/{operation_id}/status",
            "node": "node-0",
            "gpu_uuids": ["GPU-0-0"],
            "workload": None if action != "move" else {"kind": "job", "id": "train"},
            "exclude_nodes": ["node-0"] if action == "move" else [],
            "spare_hint": [{"node": "node-3", "gpu_uuids": ["GPU-3-0", "GPU-3-1"]}],
            "checkpoint": {"mode": "none", "grace_s": 0},
            "incident": {"id": "inc-1", "kind": "fault", "severity": "critical"},
            **fields,
        }

    def post(self, order: dict[str, Any], timeout_s: float = 5) -> requests.Response:
        body = json.dumps(order).encode()
        return requests.post(
            f"{self.url}/migrate",
            data=body,
            headers=signed(order["operation_id"], body),
            timeout=timeout_s,
        )

    def query(self, operation_id: str) -> requests.Response:
        return requests.get(f"{self.url}/migrate/{operation_id}", timeout=5)

    def get(self, path: str) -> Any:
        return requests.get(f"{self.url}/{path}", timeout=5).json()

    def wait_state(self, operation_id: str, state: str) -> dict[str, Any]:
        return wait_for(
            lambda: next(
                (s for s in [self.query(operation_id).json()] if s.get("state") == state), None
            )
        )

    def close(self) -> None:
        if self.process is not None:
            self.process.stop()
        self.exporter.close()
        self.back.close()


def signed(message_id: str, body: bytes, *, secret: str = SECRET, age_s: float = 0) -> dict:
    now = datetime.now(UTC) - timedelta(seconds=age_s)
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": Webhook(secret).sign(message_id, now, body.decode()),
    }


def wait_for(read: Callable[[], Any], timeout_s: float = 5) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := read():
            return found
        time.sleep(0.02)
    raise AssertionError(f"nothing within {timeout_s} s")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def test_a_move_restarts_the_whole_gang_on_the_hint_and_keeps_its_good_nodes(
    world: World,
) -> None:
    world.start()
    assert world.exporter.changes() == [("PUT", "jobs", JOB)]

    answer = world.post(world.order("op-1"))

    assert answer.status_code == 202
    assert answer.json()["operation_id"] == "op-1"
    done = world.wait_state("op-1", "finished")
    assert done["placement"] == [
        {"node": "node-1", "gpu_uuids": ["GPU-1-0", "GPU-1-1"]},
        {"node": "node-3", "gpu_uuids": ["GPU-3-0", "GPU-3-1"]},
    ]
    gang = ["GPU-1-0", "GPU-1-1", "GPU-3-0", "GPU-3-1"]
    assert world.exporter.changes()[1:] == [
        ("DELETE", "jobs/train", None),
        ("PUT", "jobs", {**JOB, "uuids": gang}),
    ]
    [job] = world.get("jobs")
    assert (job["nodes"], job["uuids"], job["restarts"]) == (["node-1", "node-3"], gang, 1)


def test_jobs_that_run_already_are_adopted_and_not_started_again(world: World) -> None:
    world.running.append({"job": "older", "uuids": ["GPU-2-0"]})
    world.start()
    assert [job["job"] for job in world.get("jobs")] == ["older", "train"]
    assert world.exporter.changes() == [("PUT", "jobs", JOB)]


def test_a_fenced_node_takes_no_work_until_it_is_unfenced(world: World) -> None:
    world.start()
    hint = [{"node": "node-3", "gpu_uuids": ["GPU-3-0", "GPU-3-1"]}]
    world.post(world.order("op-1", "fence", node="node-3"))
    world.wait_state("op-1", "finished")
    cordons = {node["node"]: node["cordoned_by"] for node in world.get("nodes")}
    assert cordons == {"node-0": None, "node-1": None, "node-2": None, "node-3": "op-1"}

    refused = world.post(world.order("op-2", spare_hint=hint))
    assert (refused.status_code, refused.json()["operation_id"]) == (422, "op-2")
    assert "needs 2 free GPUs" in refused.json()["reason"]

    world.post(world.order("op-3", "unfence", node="node-3"))
    world.wait_state("op-3", "finished")
    assert world.post(world.order("op-4", spare_hint=hint)).status_code == 202


def test_a_hint_that_is_taken_is_refused_and_stays_refused(world: World) -> None:
    world.start()
    other = {"job": "other", "uuids": ["GPU-3-0"]}
    assert requests.put(f"{world.url}/jobs", json=other, timeout=5).status_code == 200

    for _ in range(2):
        answer = world.post(world.order("op-1"))
        assert answer.status_code == 422
        assert answer.json()["operation_id"] == "op-1"
        assert answer.json()["state"] == "refused"
    assert world.query("op-1").json()["state"] == "refused"
    assert len(world.exporter.changes()) == 2  # both submissions, no move


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"workload": {"kind": "job", "id": "nobody"}}, "no job nobody"),
        ({"workload": None}, "no job"),
        ({"node": "node-99"}, "no node node-99"),
        ({"deadline": "2020-01-01T00:00:00Z"}, "deadline"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_id_and_a_reason(
    world: World, fields: dict[str, Any], why: str
) -> None:
    world.start()
    answer = world.post(world.order("op-1", **fields))
    assert (answer.status_code, answer.json()["operation_id"]) == (422, "op-1")
    assert why in answer.json()["reason"]


def test_one_id_starts_once_however_often_it_is_posted(world: World) -> None:
    world.start()
    answers: list[int] = []
    order = world.order("op-1")

    def post() -> None:
        answers.append(world.post(order).status_code)

    threads = [threading.Thread(target=post) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert answers == [202] * 12
    world.wait_state("op-1", "finished")
    [operation] = world.get("operations")["operations"]
    assert operation["started"] == 1
    assert [c[0] for c in world.exporter.changes()] == ["PUT", "DELETE", "PUT"]
    assert len([c for c in world.get("operations")["calls"] if c["method"] == "POST"]) == 12


def test_two_moves_are_never_promised_the_same_gpus(world: World) -> None:
    world.start("--run", "1")
    other = {"job": "other", "uuids": ["GPU-2-0", "GPU-2-1"]}
    requests.put(f"{world.url}/jobs", json=other, timeout=5).raise_for_status()
    assert world.post(world.order("op-1")).status_code == 202
    second = world.order("op-2", node="node-2", workload={"kind": "job", "id": "other"})
    assert world.post(second).status_code == 422


def test_an_order_outlives_a_crash_of_the_scheduler(world: World) -> None:
    world.start("--lose-answer", "--run", "30")
    with pytest.raises(requests.ConnectionError):
        world.post(world.order("op-1"))
    world.wait_state("op-1", "running")
    assert world.process is not None
    world.process.kill()

    world.start()
    world.wait_state("op-1", "finished")
    assert world.post(world.order("op-1")).status_code == 202
    assert world.get("operations")["operations"][0]["started"] == 1
    [job] = world.get("jobs")
    assert (job["nodes"], job["restarts"]) == (["node-1", "node-3"], 1)


def test_an_order_that_hung_was_never_received(world: World) -> None:
    world.start("--hang", "1")
    order = world.order("op-1")
    with pytest.raises(requests.Timeout):
        world.post(order, timeout_s=0.3)
    assert world.query("op-1").status_code == 404
    assert world.post(order).status_code == 202
    calls = [(c["method"], c["answered"]) for c in world.get("operations")["calls"]]
    assert calls == [("POST", 0), ("GET", 404), ("POST", 202)]


def test_a_lost_answer_was_kept_and_started(world: World) -> None:
    world.start("--lose-answer", "1")
    with pytest.raises(requests.ConnectionError):
        world.post(world.order("op-1"))
    world.wait_state("op-1", "finished")
    assert world.get("operations")["operations"][0]["started"] == 1


def test_callbacks_are_signed_in_order_and_tried_again(world: World) -> None:
    world.back_answers = [503, 200]
    world.start()
    world.post(world.order("op-1"))
    wait_for(lambda: len(world.back.received) == 3)

    for request in world.back.received:
        Webhook(SECRET).verify(request.body, dict(request.headers))  # raises when wrong
        assert request.headers["webhook-id"] == "op-1"
        assert "/".join(request.path) == "api/v1/migrations/op-1/status"
    told = [json.loads(request.body) for request in world.back.received]
    assert [status["state"] for status in told] == ["running", "running", "finished"]
    assert told[-1] == world.query("op-1").json()
    callbacks = wait_for(lambda: (found := world.get("operations")["callbacks"])[2:] and found)
    assert [(c["state"], c["status"]) for c in callbacks] == [
        ("running", 503),
        ("running", 200),
        ("finished", 200),
    ]


@pytest.mark.parametrize(
    ("flag", "state", "moved", "called_back"),
    [
        ("--fail", "failed", False, True),
        ("--lie-finished", "finished", False, True),
        ("--no-callback", "finished", True, False),
    ],
)
def test_misdeeds(world: World, flag: str, state: str, moved: bool, called_back: bool) -> None:
    world.start(flag, "1")
    assert world.post(world.order("op-1")).status_code == 202
    world.wait_state("op-1", state)
    assert (len(world.exporter.changes()) == 3) is moved
    if called_back:
        wait_for(lambda: len(world.back.received) == 2)
    else:
        time.sleep(0.2)
        assert world.back.received == []


def test_behaviour_changes_while_it_runs(world: World) -> None:
    world.start("--refuse")
    assert world.post(world.order("op-1")).status_code == 422
    url = f"{world.url}/behaviour"
    assert requests.put(url, json={"run_s": 0.0}, timeout=5).status_code == 200
    assert requests.put(url, json={"nonsense": 1}, timeout=5).status_code == 422
    assert world.post(world.order("op-2")).status_code == 202


def test_a_dry_run_finishes_and_changes_nothing(world: World) -> None:
    world.start()
    world.post(world.order("op-1", dry_run=True))
    assert "dry run" in world.wait_state("op-1", "finished")["reason"]
    assert len(world.exporter.changes()) == 1


def test_only_a_good_signature_is_heard(world: World) -> None:
    world.start()
    body = json.dumps(world.order("op-1")).encode()
    good = signed("op-1", body)
    other = "whsec_" + base64.b64encode(b"another secret").decode()
    bad: list[dict[str, str]] = [
        {},
        {**good, "webhook-id": "op-2"},
        {**good, "webhook-timestamp": "yesterday"},
        {**good, "webhook-timestamp": "nan"},
        {**good, "webhook-timestamp": "1e400"},
        {**good, "webhook-signature": "v1"},
        {**good, "webhook-signature": "v1,not base64"},
        {**good, "webhook-signature": "v1,\xff\xfe"},
        {**good, "webhook-signature": "v1,a,b"},
        {**good, "webhook-signature": "v2," + good["webhook-signature"][3:]},
        signed("op-1", body, secret=other),
        signed("op-1", body, age_s=3600),
        signed("op-1", body, age_s=-3600),
        signed("op-1", body + b" "),
    ]
    for headers in bad:
        answer = requests.post(f"{world.url}/migrate", data=body, headers=headers, timeout=5)
        assert answer.status_code == 401, headers
    undecodable = requests.post(f"{world.url}/migrate", data=b"\xff\xfe{", headers=good, timeout=5)
    assert undecodable.status_code == 401
    assert world.query("op-1").status_code == 404


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b'{"schema": 1}',
        b"[" * 100_000,
        b'{"schema": 2, "operation_id": "op-1", "action": "fence", "node": "node-0"}',
        b'{"schema": 1, "operation_id": "op-1", "action": "burn", "node": "node-0"}',
        b'{"schema": 1, "operation_id": 7, "action": "fence", "node": "node-0"}',
        b'{"schema": 1, "operation_id": "op-2", "action": "fence", "node": "node-0"}',
        b'{"schema": 1, "operation_id": "op-1", "action": "fence", "node": ["node-0"]}',
        b'{"schema": 1, "operation_id": "op-1", "action": "move", "node": "n", "workload": 1}',
    ],
)
def test_a_signed_body_that_is_no_order_is_400(world: World, body: bytes) -> None:
    world.start()
    answer = requests.post(
        f"{world.url}/migrate", data=body, headers=signed("op-1", body), timeout=5
    )
    assert answer.status_code == 400
    assert world.query("op-1").status_code == 404
    assert world.get("operations")["operations"] == []


def test_a_taken_port_is_said_in_one_line(world: World) -> None:
    world.start()
    assert world.process is not None
    argv = world.process._argv(world.process.port)
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].endswith("address already in use")
