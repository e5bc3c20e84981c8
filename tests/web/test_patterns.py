"""Fault patterns over HTTP: what is known, what became of it, and what people say."""

from __future__ import annotations

import httpx
import pytest

from sentinel.core.domain import CommandKind
from tests.web.moment import AUTH, PATTERNS, Face

SAID = ("rename", "confirm", "reject")


def get(client: httpx.Client, path: str) -> httpx.Response:
    return client.get(f"/api/v1/{path}")


def post(client: httpx.Client, path: str, **body: str) -> httpx.Response:
    return client.post(f"/api/v1/patterns/{path}", headers=AUTH, json=body)


def test_those_with_most_incidents_come_first(client: httpx.Client) -> None:
    answer = get(client, "patterns").json()
    assert (answer["schema"], answer["total"]) == (1, len(PATTERNS))
    first = answer["patterns"][0]
    assert (first["id"], first["incidents"], first["median_s"]) == ("overheating", 3, 600.0)
    assert first["endings"] == {"moved": 2, "reset": 1}
    assert (first["state"], first["said_by"]) == ("confirmed", "ada")
    assert first["said_at"].startswith("2023-")
    assert first["shapes"] == [{"temp": 1.0}]
    confirmed = get(client, "patterns?state=confirmed").json()
    assert [p["id"] for p in confirmed["patterns"]] == ["overheating"]
    assert get(client, "patterns?state=odd").status_code == 422


def test_one_pattern_with_the_incidents_that_are_like_it(client: httpx.Client) -> None:
    answer = get(client, "patterns/overheating").json()
    assert "hotter than its power explains" in answer["pattern"]["means"]
    assert [i["id"] for i in answer["incidents"]] == ["inc-1", "inc-0"]
    assert get(client, "patterns/learnt-1").json()["incidents"] == []
    assert get(client, "patterns/nothing").status_code == 404


def test_an_incident_tells_what_it_is_like(client: httpx.Client) -> None:
    (incident,) = get(client, "incidents").json()["incidents"]
    assert (incident["like"], incident["distance"]) == ("overheating", 0.12)
    assert incident["signature"] == {"temp": 1.0}
    assert incident["likeness"] == (
        "Pattern: overheating (distance 0.12, confirmed by ada); 3 like it before: 2 moved, "
        "1 reset; 10 min in the median."
    )


def test_what_a_person_says_is_on_disk(client: httpx.Client, face: Face) -> None:
    told = [
        post(client, "learnt-1/rename", name=" loose   HBM ", actor="ada", reason="seen before"),
        post(client, "learnt-1/confirm"),
        post(client, "hang/reject", actor="ada"),
        post(client, "learn"),
    ]
    assert [answer.status_code for answer in told] == [202] * 4
    assert told[0].json()["command"]["value"] == "loose HBM"
    kept = face.journal.pending_commands()
    assert [(c.kind, c.target, c.value) for c in kept] == [
        (CommandKind.RENAME_PATTERN, "learnt-1", "loose HBM"),
        (CommandKind.CONFIRM_PATTERN, "learnt-1", ""),
        (CommandKind.REJECT_PATTERN, "hang", ""),
        (CommandKind.LEARN_PATTERNS, "", ""),
    ]
    assert (kept[0].actor, kept[0].reason) == ("ada", "seen before")


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("nothing/rename", {"name": "x"}, 404),
        ("nothing/confirm", {}, 404),
        ("hang/rename", {"name": "OVERHEATING"}, 409),
        ("hang/rename", {"name": "   "}, 409),
        ("shared-rack-hot/rename", {"name": "x"}, 409),
        ("shared-rack-hot/reject", {}, 409),
        ("hang/rename", {"name": ""}, 422),
        ("hang/rename", {"name": "x" * 61}, 422),
        ("hang/rename", {}, 422),
    ],
)
def test_what_cannot_be_is_refused(
    client: httpx.Client, face: Face, path: str, body: dict[str, str], status: int
) -> None:
    assert post(client, path, **body).status_code == status
    assert face.journal.pending_commands() == ()


def test_nobody_speaks_without_the_token(client: httpx.Client, face: Face) -> None:
    for path in (*(f"hang/{word}" for word in SAID), "learn"):
        answer = client.post(f"/api/v1/patterns/{path}", json={"name": "x"})
        assert answer.status_code == 401
    assert face.journal.pending_commands() == ()


def test_before_the_first_tick_there_is_nothing_to_speak_of(
    client: httpx.Client, face: Face
) -> None:
    face.now = None
    assert get(client, "patterns").status_code == 503
    assert post(client, "hang/confirm").status_code == 404
