"""The daemon's HTTP face: pages, health, metrics, the API, the scheduler's callbacks.

Readers get the newest snapshot or the store's history. Whatever changes something becomes a
durable command or outcome that the next tick uses; nothing here touches live state. Reading is
open (the server listens on loopback by default), changing needs the bearer token, a callback
needs the hook's signature.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client.exposition import choose_encoder
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sentinel import __version__
from sentinel.core.domain import (
    Command,
    CommandKind,
    Decision,
    Incident,
    Migration,
    Outcome,
)
from sentinel.edges.hooks.webhook import read_callback, verify
from sentinel.errors import ConfigError, SentinelError
from sentinel.web import metrics
from sentinel.web.commands import command_routes
from sentinel.web.pages import page_routes
from sentinel.web.reads import read_routes
from sentinel.web.snapshot import Snapshot

BODY_MAX = 65_536


class Journal(Protocol):
    """What the API reads of the store; any thread may call it."""

    def incidents(self, limit: int = ..., *, open_only: bool = ...) -> tuple[Incident, ...]: ...

    def migrations(
        self, limit: int = ..., *, open_only: bool = ..., incident_id: str | None = ...
    ) -> tuple[Migration, ...]: ...

    def incident(self, id: str) -> Incident | None: ...

    def migration(self, operation_id: str) -> Migration | None: ...

    def decisions(
        self, limit: int = ..., *, incident_id: str | None = ...
    ) -> tuple[Decision, ...]: ...


class Face(Protocol):
    """What the daemon shows of itself. Every method may be called from any thread."""

    def snapshot(self) -> Snapshot | None:
        """The newest; None until the first tick has finished."""

    def command(
        self, kind: CommandKind, target: str, actor: str, reason: str, value: str = ""
    ) -> Command:
        """On disk when it returns."""
        ...

    def outcome(self, outcome: Outcome) -> object:
        """On disk when it returns."""

    def reload(self) -> None:
        """Takes up a changed configuration. Raises SentinelError, and changes nothing, when
        it is wrong or asks for what only a restart can change."""

    @property
    def journal(self) -> Journal: ...


def create_app(
    face: Face,
    *,
    token: str | None,
    hook_secret: str | None,
    per_gpu_metrics: bool = True,
    clock: Callable[[], float] = time.time,
) -> FastAPI:
    """The application. Without `token` nothing can be changed, without `hook_secret` no
    callback is taken; each says so."""
    app = FastAPI(
        title="GPU Sentinel",
        version=__version__,
        openapi_url="/api/v1/openapi.json",
        docs_url=None,  # its page would load scripts from another host
        redoc_url=None,
    )
    app.add_middleware(BodyLimit, limit=BODY_MAX)
    app.add_exception_handler(SentinelError, _sentinel_error)
    page_routes(app)
    _health_routes(app, face, clock)
    _metrics_route(app, face, clock, per_gpu_metrics)
    app.include_router(read_routes(face, clock), prefix="/api/v1")
    app.include_router(command_routes(face, token))
    _callback_route(app, face, hook_secret, clock)
    return app


def _health_routes(app: FastAPI, face: Face, clock: Callable[[], float]) -> None:
    @app.get("/-/healthy", tags=["health"], response_class=PlainTextResponse)
    def healthy() -> str:
        """Whether the process answers at all."""
        return "GPU Sentinel is alive.\n"

    @app.get("/-/ready", tags=["health"], responses={503: {"description": "Not ready."}})
    def ready() -> JSONResponse:
        """Whether it watches: ticks finish in time and telemetry arrives."""
        snapshot = face.snapshot()
        reasons = snapshot.reasons(clock()) if snapshot else ("no tick has finished yet",)
        body = {"ready": not reasons, "reasons": list(reasons)}
        return JSONResponse(body, status_code=503 if reasons else 200)


def _metrics_route(app: FastAPI, face: Face, clock: Callable[[], float], per_gpu: bool) -> None:
    registry = metrics.registry(face.snapshot, clock=clock, per_gpu=per_gpu)

    @app.get("/metrics", tags=["health"], response_class=PlainTextResponse)
    def exposition(request: Request) -> Response:
        """The daemon's own metrics, for Prometheus."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": content_type})


def _callback_route(
    app: FastAPI, face: Face, secret: str | None, clock: Callable[[], float]
) -> None:
    def keep(operation_id: str, body: bytes) -> None:
        outcome = read_callback(operation_id, body, clock())
        if outcome is None:
            raise HTTPException(400, "the body is no status of this operation")
        if face.journal.migration(operation_id) is None:
            raise HTTPException(404, f"no operation {operation_id} was ever planned here")
        face.outcome(outcome)

    @app.post("/api/v1/migrations/{operation_id}/status", tags=["callback"], status_code=202)
    async def callback(operation_id: str, request: Request) -> dict[str, bool]:
        """The scheduler tells an operation's state, signed as the orders to it are."""
        if secret is None:
            raise HTTPException(
                403, "callbacks are not taken: set hook.secret_file, so that they can be verified"
            )
        body = await request.body()
        if not verify(request.headers, body, secret):
            raise HTTPException(401, "the signature is missing, wrong, or over five minutes old")
        await run_in_threadpool(keep, operation_id, body)
        return {"accepted": True}


async def _sentinel_error(_: Request, error: Exception) -> Response:
    code = 400 if isinstance(error, ConfigError) else 503
    return JSONResponse({"detail": str(error)}, status_code=code)


class BodyLimit:
    """Refuses bodies over a limit, announced or not, before they fill memory."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if not announced.isdigit() or int(announced) > self._limit:
            response = JSONResponse({"detail": self._text()}, status_code=413)
            await response(scope, receive, send)
            return
        read = 0

        async def bounded() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._limit:
                raise HTTPException(413, self._text())
            return message

        await self._app(scope, bounded, send)

    def _text(self) -> str:
        return f"the body is over {self._limit} bytes"
