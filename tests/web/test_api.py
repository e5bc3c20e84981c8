"""The API's answers, and who may change what."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from sentinel.core.domain import Coverage, OutcomeKind, OutcomeSource
from sentinel.edges.hooks.webhook import sign
from sentinel.errors import ConfigError, StateError
from sentinel.web.app import BODY_MAX
from tests.web.moment import AUTH, FRAME, NOW_S, SECRET, TOKEN, Face, moment


def get(client: httpx.Client, path: str, **query: Any) -> Any:
    answer = client.get(f"/api/v1/{path}", params=query)
    assert answer.status_code == 200, answer.text
    assert answer.json()["schema"] == 1
    return answer.json()


# ---- health -------------------------------------------------------------------------


def test_ready_while_ticks_finish_and_telemetry_arrives(client: httpx.Client) -> None:
    assert client.get("/-/healthy").status_code == 200
    answer = client.get("/-/ready")
    assert (answer.status_code, answer.json()) == (200, {"ready": True, "reasons": []})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"frame": replace(FRAME, coverage=Coverage(4, 0, blind=True, reason="refused"))}, "blind"),
        ({"frame": replace(FRAME, coverage=Coverage(0, 0))}, "no GPU is seen"),
        ({"tick": moment().tick.failed("disk full")}, "the last tick failed: disk full"),
        ({"tick": moment().tick.finished(NOW_S - 100, 0.1)}, "the last tick finished 101 s ago"),
    ],
)
def test_not_ready_says_why(
    client: httpx.Client, face: Face, changes: dict[str, Any], reason: str
) -> None:
    face.now = moment(**changes)
    answer = client.get("/-/ready")
    assert answer.status_code == 503
    assert reason in answer.json()["reasons"][0]
    assert get(client, "status")["ready"] is False


def test_before_the_first_tick_readers_are_told_to_wait(client: httpx.Client, face: Face) -> None:
    face.now = None
    assert client.get("/-/ready").status_code == 503
    assert client.get("/-/healthy").status_code == 200
    for path in ("status", "gpus", "gpus/GPU-0-0"):
        answer = client.get(f"/api/v1/{path}")
        assert answer.status_code == 503
        assert "no tick has finished yet" in answer.json()["detail"]


# ---- reading ------------------------------------------------------------------------


def test_status_is_the_daemon_at_a_glance(client: httpx.Client) -> None:
    status = get(client, "status")
    assert status["mode"] == "act"
    assert status["at"] == "2023-11-14T22:13:20.000Z"
    assert status["gpus"] == {"normal": 2, "deviant": 1, "fault": 0, "lost": 0, "unknown": 1}
    assert status["incidents"] == {"critical": 1, "warning": 0, "info": 0}
    assert status["migrations"] == {"done": 1, "running": 1}
    assert status["breaker"] == {"on": False, "reason": "", "since": None}
    assert status["bundle"]["id"] == "b-1"
    assert status["budget"]["certified"] is True
    assert status["budget"]["pages"] == {
        "per_week": 2.0,
        "spent": 1,
        "score": 1.3,
        "calibrated": 1.3,
        "raised": 0.0,
    }
    assert status["budget"]["written_down"] == 1
    assert [a["up"] for a in status["alertmanagers"]] == [True, False]
    assert status["quarantine"][0]["node"] == "node-9"


def test_gpus_come_worst_first_and_unknown_ones_have_no_score(client: httpx.Client) -> None:
    rows = get(client, "gpus")["gpus"]
    assert [r["uuid"] for r in rows] == ["GPU-0-1", "GPU-1-1", "GPU-1-0", "GPU-0-0"]
    assert rows[0]["score"] == 1.62
    assert rows[0]["workload"] == {"kind": "job", "id": "train-7", "tenant": "red"}
    assert (rows[1]["kind"], rows[1]["score"], rows[1]["presence"]) == (
        "unknown",
        None,
        "host_silent",
    )


@pytest.mark.parametrize(
    ("query", "uuids"),
    [
        ({"kind": "deviant"}, ["GPU-0-1"]),
        ({"node": "node-1"}, ["GPU-1-1", "GPU-1-0"]),
        ({"job": "train-7", "limit": 1}, ["GPU-0-1"]),
        ({"model": "A100"}, []),
    ],
)
def test_gpus_are_filtered(client: httpx.Client, query: dict[str, Any], uuids: list[str]) -> None:
    assert [g["uuid"] for g in get(client, "gpus", **query)["gpus"]] == uuids


def test_one_gpu_tells_its_metrics_and_the_evidence(client: httpx.Client) -> None:
    gpu = get(client, "gpus/GPU-0-1")["gpu"]
    assert gpu["metrics"][0] == {"name": "temp_c", "value": 84.0, "age_s": 3.0}
    assert gpu["evidence"][0]["text"] == "12 C above its normal"
    assert get(client, "gpus/GPU-1-1")["gpu"]["metrics"] == []
    assert client.get("/api/v1/gpus/GPU-9").status_code == 404


def test_incidents_are_the_open_ones_unless_all_are_asked_for(client: httpx.Client) -> None:
    assert [i["id"] for i in get(client, "incidents")["incidents"]] == ["inc-1"]
    every = get(client, "incidents", state="all")
    assert [i["id"] for i in every["incidents"]] == ["inc-1", "inc-0"]
    assert get(client, "incidents", state="all", node="node-1")["total"] == 1
    assert get(client, "incidents", severity="warning")["incidents"] == []
    found = get(client, "incidents")["incidents"][0]
    assert found["alertname"] == "SentinelGpuDegraded"
    assert found["subject"] == {"kind": "gpu", "id": "GPU-0-1"}
    assert found["resolved_at"] is None


def test_one_incident_comes_with_what_was_decided_and_done(client: httpx.Client) -> None:
    answer = get(client, "incidents/inc-1")
    assert answer["decisions"][0]["wanted"] == "move"
    assert {m["operation_id"] for m in answer["migrations"]} == {"op-0", "op-1"}
    assert client.get("/api/v1/incidents/inc-x").status_code == 404


def test_migrations_are_filtered(client: httpx.Client) -> None:
    assert [m["operation_id"] for m in get(client, "migrations")["migrations"]] == ["op-1"]
    done = get(client, "migrations", state="all", phase="done")["migrations"]
    assert [m["operation_id"] for m in done] == ["op-0"]
    move = get(client, "migrations/op-1")["migration"]
    assert move["backups"] == [{"node": "node-1", "gpu_uuids": ["GPU-1-0", "GPU-1-1"]}]
    assert get(client, "decisions", incident_id="inc-1")["decisions"][0]["allowed"] is True


def test_a_filter_that_cannot_be_is_refused(client: httpx.Client) -> None:
    for path in ("gpus?kind=sick", "incidents?limit=0", "migrations?state=maybe"):
        assert client.get(f"/api/v1/{path}").status_code == 422


# ---- changing -----------------------------------------------------------------------

CHANGES = [
    "/api/v1/pause",
    "/api/v1/resume",
    "/api/v1/breaker/reset",
    "/api/v1/migrations/op-1/cancel",
    "/api/v1/incidents/inc-1/release",
    "/-/reload",
]


@pytest.mark.parametrize("path", CHANGES)
def test_nothing_changes_without_the_token(client: httpx.Client, face: Face, path: str) -> None:
    wrong = [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": TOKEN},
        {"authorization": f"Basic {TOKEN}"},
        {"authorization": "Bearer \u00e9".encode("latin-1")},
        {"authorization": "Bearer"},
    ]
    for headers in wrong:
        answer = client.post(path, headers=headers)
        assert answer.status_code == 401, headers
        assert answer.headers["www-authenticate"] == "Bearer"
    assert face.journal.pending_commands() == ()
    assert face.reloads == 0


@pytest.mark.parametrize("path", CHANGES)
def test_without_a_configured_token_every_change_is_refused(
    face: Face, serve: Callable[..., httpx.Client], path: str
) -> None:
    client = serve(face, token=None, hook_secret=None)
    for headers in ({}, AUTH, {"authorization": "Bearer None"}, {"authorization": "Bearer"}):
        answer = client.post(path, headers=headers)
        assert answer.status_code == 403
        assert "http.token_file" in answer.json()["detail"]
    assert face.journal.pending_commands() == ()


def test_commands_are_on_disk_with_their_actor_when_they_are_answered(
    client: httpx.Client, face: Face
) -> None:
    for path in CHANGES[:5]:
        body = {"actor": "ada", "reason": "drill"}
        answer = client.post(path, headers=AUTH, json=body)
        assert answer.status_code == 202, answer.text
    kept = face.journal.pending_commands()
    assert [(c.kind.value, c.target) for c in kept] == [
        ("pause", ""),
        ("resume", ""),
        ("reset_breaker", ""),
        ("cancel", "op-1"),
        ("release", "inc-1"),
    ]
    assert {(c.actor, c.reason) for c in kept} == {("ada", "drill")}
    assert client.post("/api/v1/pause", headers=AUTH).json()["command"]["actor"] == "api"


@pytest.mark.parametrize("target", ["inc-1", "node-0", "GPU-0-1", "node-9", "inc-old"])
def test_what_is_held_can_be_released_by_any_of_its_names(
    client: httpx.Client, target: str
) -> None:
    answer = client.post("/api/v1/release", headers=AUTH, json={"target": target})
    assert answer.status_code == 202
    assert answer.json()["command"]["target"] == target


def test_what_is_not_there_or_over_is_told(client: httpx.Client, face: Face) -> None:
    post = {"headers": AUTH}
    assert client.post("/api/v1/migrations/op-x/cancel", **post).status_code == 404
    over = client.post("/api/v1/migrations/op-0/cancel", **post)
    assert (over.status_code, over.json()["detail"]) == (409, "op-0 is done already")
    assert client.post("/api/v1/incidents/inc-0/release", **post).status_code == 404
    assert client.post("/api/v1/pause", headers=AUTH, json={"acter": "x"}).status_code == 422
    assert face.journal.pending_commands() == ()


def test_reload_tells_what_is_wrong(
    client: httpx.Client, face: Face, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert client.post("/-/reload", headers=AUTH).json() == {"reloaded": True}

    def refuse() -> None:
        raise ConfigError("sentinel.yaml:3: mode: is wrong")

    monkeypatch.setattr(face, "reload", refuse)
    answer = client.post("/-/reload", headers=AUTH)
    assert (answer.status_code, answer.json()["detail"]) == (400, "sentinel.yaml:3: mode: is wrong")


def test_a_store_that_cannot_be_written_is_503_with_its_reason(
    client: httpx.Client, face: Face, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise StateError("state.sqlite: disk full")

    monkeypatch.setattr(face, "command", full)
    answer = client.post("/api/v1/pause", headers=AUTH)
    assert (answer.status_code, answer.json()["detail"]) == (503, "state.sqlite: disk full")


# ---- callbacks ----------------------------------------------------------------------

STATUS = b'{"operation_id": "op-1", "state": "finished", "placement": [{"node": "node-1", "gpu_uuids": ["GPU-1-0"]}]}'  # noqa: E501
PATH = "/api/v1/migrations/op-1/status"


def test_a_signed_callback_becomes_an_outcome(client: httpx.Client, face: Face) -> None:
    headers = sign("op-1", STATUS, SECRET, time.time())
    assert client.post(PATH, content=STATUS, headers=headers).status_code == 202
    (outcome,) = face.journal.pending_outcomes()
    assert (outcome.kind, outcome.source) == (OutcomeKind.FINISHED, OutcomeSource.CALLBACK)
    assert outcome.placement[0].node == "node-1"
    assert outcome.at_s == NOW_S + 1


@pytest.mark.parametrize(
    "changes",
    [
        {"webhook-signature": ""},
        {"webhook-signature": "v1,AAAA"},
        {"webhook-signature": "nonsense"},
        {"webhook-signature": "v1"},
        {"webhook-signature": "v1,\u00e9".encode("latin-1")},
        {"webhook-signature": "v1,not/base64!"},
        {"webhook-timestamp": "soon"},
        {"webhook-timestamp": "1e999"},
        {"webhook-timestamp": "nan"},
        {"webhook-timestamp": "-1"},
        {"webhook-timestamp": "1000000000"},
        {"webhook-id": "op-2"},
        {"webhook-id": ""},
    ],
)
def test_a_malformed_signature_is_401(
    client: httpx.Client, face: Face, changes: dict[str, Any]
) -> None:
    headers = sign("op-1", STATUS, SECRET, time.time()) | changes
    assert client.post(PATH, content=STATUS, headers=headers).status_code == 401
    assert client.post(PATH, content=STATUS).status_code == 401
    assert client.post(PATH, content=b"\xff\xfe", headers=headers).status_code == 401
    assert face.journal.pending_outcomes() == ()


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"not json", 400),
        (b"[" * 60_000, 400),
        (b'{"operation_id": "op-1", "state": "perhaps"}', 400),
        (b'{"operation_id": "op-0", "state": "finished"}', 400),
        (b'{"operation_id": "op-1"}', 400),
        (b"x" * (BODY_MAX + 1), 413),
    ],
)
def test_a_signed_callback_that_makes_no_sense_is_refused(
    client: httpx.Client, face: Face, body: bytes, code: int
) -> None:
    headers = sign("op-1", body, SECRET, time.time())
    assert client.post(PATH, content=body, headers=headers).status_code == code
    assert face.journal.pending_outcomes() == ()


def test_an_operation_never_planned_here_is_404(client: httpx.Client) -> None:
    body = STATUS.replace(b"op-1", b"op-7")
    headers = sign("op-7", body, SECRET, time.time())
    path = "/api/v1/migrations/op-7/status"
    assert client.post(path, content=body, headers=headers).status_code == 404


def test_an_endless_body_is_cut_off(client: httpx.Client) -> None:
    def endless() -> Any:
        for _ in range(1000):
            yield b"x" * 65_536

    assert client.post(PATH, content=endless()).status_code == 413
    assert client.post("/api/v1/pause", headers=AUTH, content=endless()).status_code in (400, 413)


def test_without_a_secret_no_callback_is_taken(
    face: Face, serve: Callable[..., httpx.Client]
) -> None:
    client = serve(face, token=TOKEN, hook_secret=None)
    answer = client.post(PATH, content=STATUS, headers=AUTH)
    assert (answer.status_code, "hook.secret_file" in answer.json()["detail"]) == (403, True)


def test_the_openapi_description_can_be_read(client: httpx.Client) -> None:
    paths = client.get("/api/v1/openapi.json").json()["paths"]
    assert {"/metrics", "/-/ready", "/api/v1/status", PATH.replace("op-1", "{operation_id}")} <= {
        *paths
    }
    assert client.get("/docs").status_code == 404
