"""The scheduler behind a webhook: orders go out signed, and answers are taken for no more
than they prove.

Only two things prove that an order was not taken: a connection that failed before its first
byte, and a 409 or 422 that echoes the operation's id. Any 2xx is accepted. Whatever else
happens (a timeout, a reset, a 5xx, a proxy's page) the order may have been taken, so the
outcome is UNKNOWN, and the caller may only ask. Nothing here repeats a request.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import quote

import msgspec
from standardwebhooks import Webhook

from sentinel.core.alert import summary
from sentinel.core.domain import (
    NOT_DELIVERED,
    Backup,
    Evidence,
    Incident,
    Migration,
    Outcome,
    OutcomeKind,
    OutcomeSource,
)
from sentinel.edges.exchange import Answer, Interrupted, NotDelivered, exchange

SCHEMA: Final = 1
_REASON_MAX: Final = 500
_CONNECT_S: Final = 3.0

_STATES: Final = {
    "accepted": OutcomeKind.ACCEPTED,
    "running": OutcomeKind.RUNNING,
    "finished": OutcomeKind.FINISHED,
    "failed": OutcomeKind.FAILED,
    "refused": OutcomeKind.REFUSED,
}


class _Place(msgspec.Struct, frozen=True):
    node: str
    gpu_uuids: list[str] = []


class Status(msgspec.Struct, frozen=True):
    """What a scheduler says of an operation: the answer to a GET, and a callback's body."""

    operation_id: str
    state: str = ""
    reason: str | None = None
    placement: list[_Place] | None = None


class WebhookHook:
    """`url` takes POSTs; `url`/operation_id answers GETs. Safe to use from many threads."""

    def __init__(
        self,
        url: str,
        secret: str | None,
        *,
        external_url: str = "",
        dry_run: bool = False,
        timeout_s: float = 10.0,
        checkpoint: tuple[str, float] = ("none", 0.0),
        tls: ssl.SSLContext | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.url = url.rstrip("/")
        self._secret = secret
        self._external_url = external_url.rstrip("/")
        self._dry_run = dry_run
        self._timeout_s = timeout_s
        self._checkpoint = checkpoint
        self._tls = tls
        self._clock = clock

    def post(self, migration: Migration, incident: Incident) -> Outcome:
        """Orders it once. The caller has written down that it leaves."""
        content = body(
            migration,
            incident,
            external_url=self._external_url,
            dry_run=self._dry_run,
            checkpoint=self._checkpoint,
        )
        now_s = self._clock()
        headers = {"content-type": "application/json", "webhook-id": migration.operation_id}
        if self._secret is not None:
            headers = sign(migration.operation_id, content, self._secret, now_s)
        id = migration.operation_id
        try:
            answer = self._exchange("POST", self.url, headers, content)
        except NotDelivered as err:
            return _outcome(id, "refused", OutcomeSource.POST, now_s, f"{NOT_DELIVERED} {err}")
        except Interrupted as err:
            return _outcome(id, "unknown", OutcomeSource.POST, now_s, str(err))
        return read_post(id, answer, now_s)

    def query(self, migration: Migration) -> Outcome:
        """Asks what became of it; `at_s` is when it was asked, not when it was answered."""
        operation_id, now_s = migration.operation_id, self._clock()
        url = f"{self.url}/{quote(operation_id, safe='')}"
        try:
            answer = self._exchange("GET", url, {}, None)
        except (NotDelivered, Interrupted) as err:
            return _outcome(operation_id, "unknown", OutcomeSource.GET, now_s, str(err))
        return read_get(operation_id, answer, now_s)

    def _exchange(
        self, method: str, url: str, headers: Mapping[str, str], content: bytes | None
    ) -> Answer:
        return exchange(
            method,
            url,
            headers={"user-agent": "gpu-sentinel", **headers},
            body=content,
            timeout_s=self._timeout_s,
            connect_timeout_s=_CONNECT_S,
            tls=self._tls,
        )


def read_post(operation_id: str, answer: Answer, at_s: float) -> Outcome:
    """What the answer to an order proves."""
    status = _status(operation_id, answer)
    if 200 <= answer.status < 300:
        # a state that contradicts the 2xx is for the next question to settle
        known = status is not None and status.state in ("running", "finished", "failed")
        state = status.state if status is not None and known else "accepted"
        return _outcome(operation_id, state, OutcomeSource.POST, at_s, "", status)
    if answer.status in (409, 422) and status is not None:
        reason = status.reason or f"HTTP {answer.status}"
        return _outcome(operation_id, "refused", OutcomeSource.POST, at_s, reason)
    return _outcome(operation_id, "unknown", OutcomeSource.POST, at_s, _unexpected(answer))


def read_get(operation_id: str, answer: Answer, at_s: float) -> Outcome:
    """What the answer to a question proves."""
    if answer.status == 404:
        return _outcome(operation_id, "not_found", OutcomeSource.GET, at_s, "never received")
    status = _status(operation_id, answer)
    if answer.status != 200 or status is None or status.state not in _STATES:
        return _outcome(operation_id, "unknown", OutcomeSource.GET, at_s, _unexpected(answer))
    return _outcome(operation_id, status.state, OutcomeSource.GET, at_s, "", status)


def read_callback(operation_id: str, content: bytes, at_s: float) -> Outcome | None:
    """The outcome that a callback (its signature checked) tells; None when it is malformed."""
    status = _status(operation_id, Answer(200, content, complete=True))
    if status is None or status.state not in _STATES:
        return None
    return _outcome(operation_id, status.state, OutcomeSource.CALLBACK, at_s, "", status)


def sign(message_id: str, content: bytes, secret: str, at_s: float) -> dict[str, str]:
    """The headers of a signed message, by Standard Webhooks."""
    at = datetime.fromtimestamp(at_s, UTC)
    return {
        "content-type": "application/json",
        "webhook-id": message_id,
        "webhook-timestamp": str(int(at_s)),
        "webhook-signature": Webhook(secret).sign(message_id, at, content.decode()),
    }


def verify(headers: Mapping[str, str], content: bytes, secret: str) -> bool:
    """Whether this was signed with our secret within the last five minutes. Never raises."""
    try:
        Webhook(secret).verify(content, dict(headers), json_parse=False)
    except Exception:  # the library raises ValueError, binascii.Error and more for nonsense
        return False
    return True


def body(
    migration: Migration,
    incident: Incident,
    *,
    external_url: str = "",
    dry_run: bool = False,
    checkpoint: tuple[str, float] = ("none", 0.0),
) -> bytes:
    """The order as it is sent, JSON. The same migration always gives the same bytes."""
    callback_url = f"{external_url}/api/v1/migrations/{migration.operation_id}/status"
    work = migration.workload
    return msgspec.json.encode(
        {
            "schema": SCHEMA,
            "operation_id": migration.operation_id,
            "epoch": migration.epoch,
            "action": migration.operation,
            "attempt": migration.attempt,
            "dry_run": dry_run,
            "deadline": rfc3339(migration.deadline_s),
            "callback_url": callback_url if external_url else "",
            "node": migration.node,
            "gpu_uuids": migration.gpu_uuids,
            "workload": work
            and {
                "kind": work.kind,
                "id": work.id,
                "tenant": work.tenant,
                "nodes": migration.workload_nodes,
                "gpus": migration.workload_gpu_uuids,
            },
            "exclude_nodes": migration.exclude_nodes,
            "spare_hint": migration.backups,
            "checkpoint": {"mode": checkpoint[0], "grace_s": checkpoint[1]},
            "incident": _incident(incident),
        }
    )


def rfc3339(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat().replace("+00:00", "Z")


def _incident(incident: Incident) -> dict[str, Any]:
    return {
        "id": incident.id,
        "kind": incident.kind,
        "severity": incident.severity,
        "pattern": incident.pattern,
        "summary": summary(incident),
        "evidence": [_evidence(item) for item in incident.evidence],
    }


def _evidence(item: Evidence) -> dict[str, Any]:
    names = ("kind", "metric", "text", "value", "expected", "unit")
    return {name: getattr(item, name) for name in names}


def _status(operation_id: str, answer: Answer) -> Status | None:
    """The body, if all of it came, it reads, and it is about this operation."""
    if not answer.complete:
        return None
    try:
        status = msgspec.json.decode(answer.body, type=Status)
    except (ValueError, RecursionError):
        return None
    return status if status.operation_id == operation_id else None


def _outcome(
    operation_id: str,
    state: str,
    source: OutcomeSource,
    at_s: float,
    reason: str,
    status: Status | None = None,
) -> Outcome:
    placement: tuple[Backup, ...] = ()
    if status is not None:
        reason = status.reason or reason
        placement = tuple(Backup(p.node, tuple(p.gpu_uuids)) for p in status.placement or ())
    kind = _STATES.get(state) or OutcomeKind(state)
    return Outcome(operation_id, kind, source, at_s, reason[:_REASON_MAX], placement)


def _unexpected(answer: Answer) -> str:
    said = f": {answer.excerpt}" if answer.excerpt else ""
    return f"HTTP {answer.status} proves nothing{said}"
