"""One HTTP exchange, on a connection of its own, that ends by its deadline.

No pool, no retry, no redirect, no proxy and no netrc: a request leaves at most once, and the
caller learns for certain whether it can have left at all. That is why this is not a session
of a client library: whether the first byte was sent must be known there, not guessed from the
kind of its exception.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit


class NotDelivered(Exception):
    """The connection failed before the first byte of the request was sent."""


class Interrupted(Exception):
    """The request left, at least in part, and no answer came back."""


@dataclass(frozen=True, slots=True)
class Answer:
    """`body` is what arrived by the deadline, at most `max_bytes`; `complete` if all of it."""

    status: int
    body: bytes
    complete: bool

    @property
    def excerpt(self) -> str:
        """The first words of the body, for a person."""
        words = self.body[:300].decode(errors="replace").split()
        return " ".join("".join(c for c in word if c.isprintable()) for word in words)[:200]


def exchange(
    method: str,
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    body: bytes | None = None,
    timeout_s: float,
    connect_timeout_s: float | None = None,
    max_bytes: int = 64 << 10,
    tls: ssl.SSLContext | None = None,
) -> Answer:
    """Sends and reads once. `timeout_s` bounds the whole exchange but for name resolution.

    Raises NotDelivered or Interrupted; ValueError when the URL is none.
    """
    until = time.monotonic() + timeout_s
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"not an http or https URL: {url!r}")
    wait_s = min(timeout_s, connect_timeout_s or timeout_s)
    connection = _connection(parts.scheme, parts.hostname, parts.port, wait_s, tls)
    with contextlib.closing(connection):
        try:
            connection.connect()
        except (OSError, UnicodeError) as err:  # a TLS handshake, too, is before any request
            raise NotDelivered(_words(err, wait_s)) from err
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        # a timeout is per read: whoever sends a byte now and then is stopped by this
        with _cut_off(connection.sock, until - time.monotonic()):
            try:
                sent = {"Connection": "close", "Accept-Encoding": "identity", **(headers or {})}
                connection.request(method, target, body, sent)
                response = connection.getresponse()
            except (OSError, http.client.HTTPException, ValueError) as err:
                late = time.monotonic() >= until
                raise Interrupted(_words(TimeoutError() if late else err, timeout_s)) from err
            with contextlib.closing(response):
                return _read(response, until, max_bytes)


def _connection(
    scheme: str, host: str, port: int | None, timeout_s: float, tls: ssl.SSLContext | None
) -> http.client.HTTPConnection:
    if scheme == "http":
        return http.client.HTTPConnection(host, port, timeout=timeout_s)
    context = tls or ssl.create_default_context()
    return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)


@contextlib.contextmanager
def _cut_off(sock: socket.socket, after_s: float) -> Iterator[None]:
    def cut() -> None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    sock.settimeout(max(after_s, 0.001))
    timer = threading.Timer(max(after_s, 0.0), cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _read(response: http.client.HTTPResponse, until: float, max_bytes: int) -> Answer:
    """The status is an answer even where the body is not."""
    body = b""
    try:
        while len(body) <= max_bytes and time.monotonic() < until:
            piece = response.read1(max_bytes + 1 - len(body))
            if not piece:
                whole = response.length in (None, 0)
                return Answer(response.status, body, complete=whole and time.monotonic() < until)
            body += piece
    except (OSError, http.client.HTTPException, ValueError):
        pass
    return Answer(response.status, body[:max_bytes], complete=False)


def _words(err: Exception, timeout_s: float) -> str:
    if isinstance(err, TimeoutError):
        return f"no answer within {timeout_s:.3g} s"
    if isinstance(err, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {err.verify_message}"
    if isinstance(err, socket.gaierror):
        return f"its name does not resolve: {err.strerror}"
    if isinstance(err, OSError) and err.strerror:
        return err.strerror.lower()
    return str(err) or type(err).__name__
