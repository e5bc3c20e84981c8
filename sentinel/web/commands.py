"""The changing half of the API: commands of people, each with its actor, behind the token."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Depends, HTTPException, Request
from pydantic import BaseModel, ConfigDict, Field

from sentinel.core.domain import CommandKind, PatternState
from sentinel.core.patterns import SHARED
from sentinel.web import shapes, views

if TYPE_CHECKING:
    from sentinel.web.app import Face

_NO_TOKEN = (
    "this daemon has no token, so nothing can be changed over HTTP: put one in a file, name it "  # noqa: S105
    "in http.token_file (or set SENTINEL_TOKEN) and restart"
)
_REFUSALS: dict[int | str, dict[str, Any]] = {
    401: {"description": "The bearer token is missing or wrong."},
    403: {"description": "No token is configured."},
    404: {"description": "There is no such thing to act on."},
    409: {"description": "It is over already, or a name that cannot be given."},
}


class Order(BaseModel):
    """Who asks, and why; both are written into the journal."""

    model_config = ConfigDict(extra="forbid")
    actor: str = Field(default="api", max_length=200)
    reason: str = Field(default="", max_length=1000)


class Rename(Order):
    name: str = Field(min_length=1, max_length=60, description="What people will call it.")


class Release(Order):
    target: str = Field(min_length=1, max_length=200, description="Incident, node or GPU UUID.")


def command_routes(face: Face, token: str | None) -> APIRouter:
    def authorised(request: Request) -> None:
        if token is None:
            raise HTTPException(403, _NO_TOKEN)
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        known = hmac.compare_digest(given.strip().encode(), token.encode())
        if scheme.lower() != "bearer" or not known:
            raise HTTPException(
                401, "the bearer token is missing or wrong", {"WWW-Authenticate": "Bearer"}
            )

    router = APIRouter(tags=["change"], dependencies=[Depends(authorised)], responses=_REFUSALS)
    accepted: dict[str, Any] = {"status_code": 202}

    def enqueue(
        kind: CommandKind, order: Order, target: str = "", value: str = ""
    ) -> shapes.CommandAnswer:
        command = face.command(kind, target, order.actor or "api", order.reason, value)
        return shapes.CommandAnswer(command=views.command(command))

    @router.post("/api/v1/migrations/{operation_id}/cancel", **accepted)
    def cancel(operation_id: str, order: Order | None = None) -> shapes.CommandAnswer:
        """Cancels a fence or move that has not been sent."""
        migration = face.journal.migration(operation_id)
        if migration is None:
            raise HTTPException(404, f"no operation {operation_id}")
        if not migration.phase.is_open:
            raise HTTPException(409, f"{operation_id} is {migration.phase.value} already")
        return enqueue(CommandKind.CANCEL, order or Order(), operation_id)

    @router.post("/api/v1/incidents/{incident_id}/release", **accepted)
    def release_incident(incident_id: str, order: Order | None = None) -> shapes.CommandAnswer:
        """Ends an incident by a person's word, and gives its node back."""
        return release(Release(**(order or Order()).model_dump(), target=incident_id))

    @router.post("/api/v1/release", **accepted)
    def release(order: Release) -> shapes.CommandAnswer:
        """Releases what an incident, a node or a GPU UUID names."""
        if not _can_release(face, order.target):
            raise HTTPException(
                404, f"{order.target} is no open incident, and no node or GPU that one holds"
            )
        return enqueue(CommandKind.RELEASE, order, order.target)

    @router.post("/api/v1/pause", **accepted)
    def pause(order: Order | None = None) -> shapes.CommandAnswer:
        """Stops all new action; watching and alerting go on."""
        return enqueue(CommandKind.PAUSE, order or Order())

    @router.post("/api/v1/resume", **accepted)
    def resume(order: Order | None = None) -> shapes.CommandAnswer:
        """Ends a pause."""
        return enqueue(CommandKind.RESUME, order or Order())

    @router.post("/api/v1/breaker/reset", **accepted)
    def reset_breaker(order: Order | None = None) -> shapes.CommandAnswer:
        """Lets action go on after the breaker latched."""
        return enqueue(CommandKind.RESET_BREAKER, order or Order())

    def speak(
        kind: CommandKind, pattern_id: str, order: Order | None, value: str = ""
    ) -> shapes.CommandAnswer:
        snapshot = face.snapshot()
        if snapshot is None or pattern_id not in snapshot.patterns:
            raise HTTPException(404, f"no pattern {pattern_id}")
        if snapshot.patterns[pattern_id].origin == SHARED:
            raise HTTPException(409, f"{pattern_id} is a cause of many GPUs: it keeps its name")
        return enqueue(kind, order or Order(), pattern_id, value)

    @router.post("/api/v1/patterns/learn", **accepted)
    def learn_patterns(order: Order | None = None) -> shapes.CommandAnswer:
        """Learns fault patterns anew from the incidents that were written down."""
        return enqueue(CommandKind.LEARN_PATTERNS, order or Order())

    @router.post("/api/v1/patterns/{pattern_id}/rename", **accepted)
    def rename(pattern_id: str, order: Rename) -> shapes.CommandAnswer:
        """Gives a pattern the name that people here use; it stays through relearning."""
        name = " ".join(order.name.split())
        snapshot = face.snapshot()
        others = snapshot.patterns.values() if snapshot else ()
        if any(p.name.casefold() == name.casefold() and p.id != pattern_id
               and p.state is not PatternState.REJECTED for p in others):  # fmt: skip
            raise HTTPException(409, f"another pattern goes by the name {name!r}")
        if not name:
            raise HTTPException(409, "a name must not be empty")
        return speak(CommandKind.RENAME_PATTERN, pattern_id, order, name)

    @router.post("/api/v1/patterns/{pattern_id}/confirm", **accepted)
    def confirm(pattern_id: str, order: Order | None = None) -> shapes.CommandAnswer:
        """Keeps a pattern as it is, whatever is learnt later."""
        return speak(CommandKind.CONFIRM_PATTERN, pattern_id, order)

    @router.post("/api/v1/patterns/{pattern_id}/reject", **accepted)
    def reject(pattern_id: str, order: Order | None = None) -> shapes.CommandAnswer:
        """Names nothing by this pattern any more; confirming it takes that back."""
        return speak(CommandKind.REJECT_PATTERN, pattern_id, order)

    @router.post("/-/reload")
    def reload() -> dict[str, bool]:
        """Takes up a changed configuration; what is wrong with it is told and changes nothing."""
        face.reload()
        return {"reloaded": True}

    return router


def _can_release(face: Face, target: str) -> bool:
    found = face.journal.incident(target)
    if found is not None and found.is_open:
        return True
    known = face.journal.incidents(100_000, open_only=True)
    if any(target in (i.node, i.gpu_uuid, i.subject.id) for i in known):
        return True
    snapshot = face.snapshot()
    held = snapshot.control.quarantine if snapshot else {}
    return target in held or any(q.incident_id == target for q in held.values())
