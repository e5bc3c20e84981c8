"""The smallest HTTP server that the lab's programs need: JSON in, JSON out, on loopback.

Content that is text already (`str`) goes out as it is.

It can also do what a polite server cannot: close the connection without a word
(`DROPPED`), as a scheduler that crashes between its work and its answer would.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, NamedTuple, NoReturn

BODY_MAX_BYTES: Final = 4 << 20
TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"


class Request(NamedTuple):
    method: str
    path: tuple[str, ...]  # "/migrate/op-1" is ("migrate", "op-1")
    headers: Mapping[str, str]  # names in lower case
    body: bytes


class Answer(NamedTuple):
    status: int
    content: Any = None


DROPPED: Final = Answer(0)

Handle = Callable[[Request], Answer]


def parse_listen(text: str) -> tuple[str, int]:
    """`127.0.0.1:9999` as host and port. ValueError on anything else."""
    host, separator, port = text.rpartition(":")
    if not separator or not host:
        raise ValueError(f"{text!r} is not HOST:PORT")
    return host, int(port)


def server(listen: str, handle: Handle, *, quiet: bool = False) -> ThreadingHTTPServer:
    """Bound, not yet serving; `quiet` writes no line per request. OSError when the port is
    taken."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            answer = self._read_and_handle()
            if answer is DROPPED:
                self.close_connection = True
                return
            text = isinstance(answer.content, str)
            content = (answer.content if text else json.dumps(answer.content) + "\n").encode()
            with contextlib.suppress(OSError):  # the caller may have gone meanwhile
                self.send_response(answer.status)
                self.send_header("Content-Type", TEXT if text else "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        def _read_and_handle(self) -> Answer:
            stated = self.headers.get("Content-Length") or "0"
            if "Transfer-Encoding" in self.headers or not stated.isdecimal():
                self.close_connection = True
                return Answer(411, {"error": "a plain Content-Length is needed"})
            if int(stated) > BODY_MAX_BYTES:
                self.close_connection = True
                return Answer(413, {"error": f"more than {BODY_MAX_BYTES} bytes"})
            body = self.rfile.read(int(stated))
            path = tuple(self.path.partition("?")[0].strip("/").split("/"))
            headers = {name.lower(): value for name, value in self.headers.items()}
            try:
                return handle(Request(self.command, path, headers, body))
            except Exception as error:
                traceback.print_exc()
                return Answer(500, {"error": repr(error)})

        do_GET = do_POST = do_PUT = do_DELETE = _serve

        def log_message(self, format: str, *args: Any) -> None:
            if not quiet:
                sys.stderr.write(f"{time.time():.3f} {format % args}\n")

    class Loopback(ThreadingHTTPServer):
        daemon_threads = True
        allow_reuse_address = True
        request_queue_size = 128

    return Loopback(parse_listen(listen), Handler)


def serve_until_terminated(name: str, listen: str, handle: Handle, *, quiet: bool = False) -> None:
    """Serves until SIGTERM or SIGINT. Exits 3 with one line when the port is taken."""
    try:
        running = server(listen, handle, quiet=quiet)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise SystemExit(f"{name}: cannot listen on {listen}: {reason}") from error

    def stop(*_: object) -> NoReturn:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    host, port = running.server_address[0], running.server_address[1]
    sys.stderr.write(f"{name}: listening on http://{host!s}:{port}\n")
    with running:
        running.serve_forever(poll_interval=0.1)
