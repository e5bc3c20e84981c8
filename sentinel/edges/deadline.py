"""A total deadline for requests: whatever a server does, a request ends.

The timeouts of `requests` are per read, so a server that drips a byte now and then, in its
headers or its body, holds a request for ever. Here a timer shuts the socket down at the
deadline, whichever phase the request is in; only name resolution is out of its reach. Several
threads can share one deadline: each joins it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

_running = threading.local()


class Deadline:
    """Ends every connection that is used by the threads within `deadline()` or `joined()`."""

    def __init__(self, after_s: float) -> None:
        self.after_s = after_s
        self.expired = False
        self._until_s = time.monotonic() + after_s
        self._lock = threading.Lock()
        self._handles: list[socket.socket] = []
        self._closed = False

    @property
    def left_s(self) -> float:
        """Time that is left; 0 once it expired, by the clock or by `expire()`."""
        return 0.0 if self.expired else max(0.0, self._until_s - time.monotonic())

    def watch(self, sock: socket.socket) -> None:
        # a handle of our own: a TLS handshake takes the socket object away from its maker
        handle = socket.socket(fileno=os.dup(sock.fileno()))
        with self._lock:
            self._handles.append(handle)
        if self._closed:  # by a thread that was left behind
            self.expire()
            self.close()
        elif self.expired:
            self.expire()

    def expire(self) -> None:
        """Ends it now: by the timer, or because the rest is no longer wanted."""
        self.expired = True
        with self._lock:
            for handle in self._handles:
                with contextlib.suppress(OSError):
                    handle.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._closed = True
        with self._lock:
            for handle in self._handles:
                handle.close()
            self._handles.clear()


@contextlib.contextmanager
def deadline(after_s: float) -> Iterator[Deadline]:
    """Within this, this thread's requests through a `DeadlineAdapter` end after `after_s`."""
    current = Deadline(after_s)
    timer = threading.Timer(max(after_s, 0.0), current.expire)
    timer.daemon = True
    timer.start()
    try:
        with joined(current):
            yield current
    finally:
        timer.cancel()
        current.close()


@contextlib.contextmanager
def joined(current: Deadline) -> Iterator[None]:
    """Within this, this thread's requests end by a deadline that another thread has set."""
    before: Deadline | None = getattr(_running, "deadline", None)
    _running.deadline = current
    try:
        yield
    finally:
        _running.deadline = before


def _watch(sock: socket.socket | None) -> None:
    current: Deadline | None = getattr(_running, "deadline", None)
    if current is not None and sock is not None:
        current.watch(sock)


class _Connection(HTTPConnection):
    def _new_conn(self) -> socket.socket:
        sock = super()._new_conn()
        _watch(sock)
        return sock

    def putrequest(self, *args: Any, **kwargs: Any) -> None:
        _watch(self.sock)  # kept alive since an earlier request
        super().putrequest(*args, **kwargs)


class _TlsConnection(HTTPSConnection):
    def _new_conn(self) -> socket.socket:
        sock = super()._new_conn()
        _watch(sock)
        return sock

    def putrequest(self, *args: Any, **kwargs: Any) -> None:
        _watch(self.sock)
        super().putrequest(*args, **kwargs)


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Connection


class _TlsPool(HTTPSConnectionPool):
    ConnectionCls = _TlsConnection


class DeadlineAdapter(HTTPAdapter):
    """Like its base, with connections that `deadline()` can end, and no retry of its own.

    `server_name` is the name that a server's certificate must bear, where it is not the URL's.
    """

    def __init__(self, *, connections: int = 4, server_name: str = "") -> None:
        self._server_name = server_name
        super().__init__(pool_maxsize=connections, max_retries=0)

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        if self._server_name:
            kwargs["server_hostname"] = self._server_name
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = {"http": _Pool, "https": _TlsPool}

    def proxy_manager_for(self, *args: Any, **kwargs: Any) -> Any:
        if self._server_name:
            kwargs["server_hostname"] = self._server_name
        manager = super().proxy_manager_for(*args, **kwargs)
        manager.pool_classes_by_scheme = {"http": _Pool, "https": _TlsPool}
        return manager
