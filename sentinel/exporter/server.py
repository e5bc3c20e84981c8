"""`sentinel exporter`: the process around the collector.

Its exit does not wait for anything: a thread inside a hung driver holds locks that the
library's own clean-up would wait for.
"""

from __future__ import annotations

import gzip
import logging
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import FrameType
from typing import Any, Final

from sentinel.edges import logs, systemd
from sentinel.edges.nvml import advice
from sentinel.errors import ConfigError, DependencyError
from sentinel.exporter.collector import TIMEOUT, Collector
from sentinel.exporter.exposition import exposition

OPEN_WITHIN_S: Final = 30.0
_CONNECTIONS: Final = 64  # further ones are closed
_SHARE: Final = 0.8  # of Prometheus's own patience, where that is shorter than the deadline
_INDEX: Final = b"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>sentinel exporter</title></head>
<body><h1>sentinel exporter</h1>
<p>NVIDIA GPUs of this host, read through NVML.</p>
<ul><li><a href="/metrics">/metrics</a></li><li><a href="/-/healthy">/-/healthy</a></li></ul>
</body></html>
"""
_log = logging.getLogger(__name__)


def parse_listen(text: str) -> tuple[str, int]:
    """`127.0.0.1:9478` or `[::1]:9478`. Raises ConfigError."""
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^:\s]+):(\d{1,5})", text)
    if found is None or int(found[2]) > 65_535:
        raise ConfigError(f"--listen {text}: write HOST:PORT, for example 127.0.0.1:9478")
    return found[1].strip("[]"), int(found[2])


class Server(ThreadingHTTPServer):
    """Bound to its address once made. Raises DependencyError where that is taken."""

    daemon_threads = True
    request_queue_size = 32

    def __init__(self, listen: str, collector: Collector, hostname: str) -> None:
        self.collector, self.hostname = collector, hostname
        self.places = threading.BoundedSemaphore(_CONNECTIONS)
        host, port = parse_listen(listen)
        try:
            self.address_family, *_, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            super().__init__((str(address[0]), int(address[1])), _Handler)
        except OSError as err:
            raise DependencyError(
                f"--listen {listen}: cannot listen there ({err.strerror}): is another exporter "
                "running? Stop it, or give a free address and port"
            ) from err

    def server_bind(self) -> None:
        # not HTTPServer's, which asks the resolver for the host's name
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        if self.places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if isinstance(sys.exception(), OSError):  # the client left
            _log.debug("a request from %s ended early", client_address)
        else:
            _log.exception("a request from %s failed", client_address)

    @property
    def url(self) -> str:
        host = f"[{self.server_name}]" if ":" in self.server_name else self.server_name
        return f"http://{host}:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version = "sentinel-exporter"
    sys_version = ""
    timeout = 60.0  # for a request to come in; longer than Prometheus leaves a connection idle

    def do_GET(self) -> None:
        match self.path.partition("?")[0]:
            case "/metrics":
                scrape = self.server.collector.collect(self._patience_s())
                accept = self.headers.get("Accept", "")
                body, content_type = exposition(scrape, self.server.hostname, accept)
                self._answer(200, body, content_type)
            case "/-/healthy" | "/-/ready":
                self._answer(200, b"ok\n")
            case "/":
                self._answer(200, _INDEX, "text/html; charset=utf-8")
            case _:
                self._answer(404, b"not found: see /\n")

    do_HEAD = do_GET

    def _patience_s(self) -> float | None:
        try:
            told_s = float(self.headers.get("X-Prometheus-Scrape-Timeout-Seconds", ""))
        except ValueError:
            return None
        return told_s * _SHARE if told_s > 0 else None

    def _answer(
        self, status: int, body: bytes, content_type: str = "text/plain; charset=utf-8"
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        if len(body) > 1024 and "gzip" in self.headers.get("Accept-Encoding", ""):
            body = gzip.compress(body, compresslevel=1)
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def run_exporter(
    listen: str, deadline_s: float, *, hostname: str, per_process: bool, json_lines: bool
) -> int:
    """Serves until SIGTERM or SIGINT, and then ends the process. NVML need not be there: it is
    tried again with each scrape. Raises ConfigError and DependencyError before it serves."""
    logs.configure(json_lines=json_lines)
    collector = Collector(deadline_s, per_process=per_process)
    server = Server(listen, collector, hostname)
    stop = threading.Event()

    def end(signal_number: int, frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    collector.prepare(OPEN_WITHIN_S)
    threading.Thread(
        target=server.serve_forever, args=(0.2,), name="http-server", daemon=True
    ).start()
    _log.info("serving %s/metrics", server.url)
    systemd.notify(f"READY=1\nSTATUS=serving {server.url}/metrics")
    while not stop.wait(1.0) and not collector.stale_library.is_set():
        pass
    code = 0
    if collector.stale_library.is_set() and not stop.is_set():
        code = DependencyError.exit_code
        _log.error(
            "the NVML library of this process was replaced by an update and no longer fits the "
            "driver: the exporter ends, to be started anew"
        )
    else:
        _log.info("told to stop")
    systemd.notify("STOPPING=1")
    _leave(code)
    return code


def run_once(
    deadline_s: float, *, hostname: str, per_process: bool, write: Callable[[bytes], object]
) -> int:
    """Writes one exposition. Raises DependencyError that says why NVML cannot be used."""
    logs.configure(json_lines=False, level="ERROR", stream=None)
    logging.getLogger("sentinel.exporter").setLevel(logging.CRITICAL)
    collector = Collector(deadline_s, per_process=per_process, watch_xids=False)
    collector.prepare(OPEN_WITHIN_S)
    reason = collector.opened(OPEN_WITHIN_S)
    if reason:
        _tell_and_leave_if_stuck(collector, reason)
        raise DependencyError(advice(reason))
    scrape = collector.collect()
    write(exposition(scrape, hostname)[0])
    if collector.is_stuck():
        _leave(0)
    return 0


def _tell_and_leave_if_stuck(collector: Collector, reason: str) -> None:
    if collector.is_stuck():
        sys.stderr.write(f"sentinel: {advice(reason if reason else TIMEOUT)}\n")
        _leave(DependencyError.exit_code)


def _leave(code: int) -> None:
    """Ends the process without clean-up: NVML's own would wait for a call that hangs."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
