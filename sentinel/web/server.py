"""The HTTP server, off the main thread.

The socket is bound by the caller's thread, so that a busy port is told to whoever starts the
daemon and not to a log.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING, Final

import uvicorn

from sentinel.errors import DependencyError

if TYPE_CHECKING:
    from fastapi import FastAPI

_START_WITHIN_S: Final = 10.0
_STOP_WITHIN_S: Final = 5.0


class Server:
    """Serves one application until stopped. `start` and `stop` are for one thread."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._socket: socket.socket | None = None
        self._uvicorn: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def url(self) -> str:
        """Where it listens; the real port where the configured one was 0."""
        if self._socket is None:
            raise DependencyError("the HTTP server is not running")
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def start(self, listen: str) -> None:
        """Returns once requests are answered. Raises DependencyError when they cannot be."""
        self._socket = _bind(listen)
        config = uvicorn.Config(
            self._app,
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            loop="asyncio",
            ws="none",
            server_header=False,
            timeout_keep_alive=10,
            timeout_graceful_shutdown=2,
            limit_concurrency=256,
        )
        self._uvicorn = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + _START_WITHIN_S
        while not self._uvicorn.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                why = self._error or "it did not come up in time"
                self.stop()
                raise DependencyError(f"http.listen {listen}: the HTTP server failed: {why}")
            time.sleep(0.005)

    def _run(self) -> None:
        assert self._uvicorn is not None
        assert self._socket is not None
        try:
            self._uvicorn.run(sockets=[self._socket])
        except BaseException as err:  # told by whoever waits in start()
            self._error = err

    def stop(self) -> None:
        """Lets requests under way end, for a moment. Safe to call twice, or unstarted."""
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(_STOP_WITHIN_S)
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
        self._socket = self._uvicorn = self._thread = None


def _bind(listen: str) -> socket.socket:
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    sock = None
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(128)
        return sock
    except OSError as err:
        if sock is not None:
            sock.close()
        raise DependencyError(
            f"http.listen {listen}: cannot listen there ({err.strerror}): is another sentinel "
            "running? Stop it, or set http.listen to a free address and port"
        ) from err
