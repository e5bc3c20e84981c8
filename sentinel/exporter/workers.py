"""Threads for calls that may never return.

A thread inside a hung call cannot be ended. So each has one task for its life and takes no
second job while the first runs: as many threads hang as there are things that hang, however
often they are asked for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Worker(Generic[T]):
    """One daemon thread, started by its first job. `start` may be called from any thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[tuple[Callable[[], T], Callable[[T], None]]] = SimpleQueue()
        self._lock = threading.Lock()
        self._since_s: float | None = None
        self._thread: threading.Thread | None = None

    def start(self, job: Callable[[], T], done: Callable[[T], None]) -> bool:
        """False, and nothing is done, while a job runs. `done` is called in the thread once it
        is free for the next job. Neither may raise."""
        with self._lock:
            if self._since_s is not None:
                return False
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._thread = thread
            self._since_s = time.monotonic()
        self._jobs.put((job, done))
        return True

    def busy_s(self) -> float | None:
        """How long the present job has run; None without one."""
        since_s = self._since_s
        return None if since_s is None else time.monotonic() - since_s

    def _run(self) -> None:
        while True:
            job, done = self._jobs.get()
            try:
                result = job()
            except Exception:
                _log.exception("%s: a job failed", self._name)
                with self._lock:
                    self._since_s = None
                continue
            with self._lock:
                self._since_s = None
            done(result)
            del job, done, result


class Gathering:
    """Results that are awaited together until a common deadline (`time.monotonic`).

    What comes later is dropped: whoever asked has answered without it.
    """

    def __init__(self, until_s: float) -> None:
        self._until_s = until_s
        self._changed = threading.Condition()
        self._asked: set[Hashable] = set()
        self._awaited: set[Hashable] = set()
        self._results: dict[Hashable, Any] = {}
        self._closed = False

    def expect(self, key: Hashable) -> None:
        """An answer under this key will come; one that came before no longer counts."""
        with self._changed:
            self._asked.add(key)
            self._awaited.add(key)
            self._results.pop(key, None)

    def drop(self, key: Hashable) -> None:
        """No answer will come under this key."""
        with self._changed:
            self._awaited.discard(key)
            self._changed.notify_all()

    def was_asked(self, key: Hashable) -> bool:
        with self._changed:
            return key in self._asked

    def deliver(self, key: Hashable, result: Any) -> None:
        with self._changed:
            if not self.is_over() and key in self._awaited:
                self._awaited.discard(key)
                self._results[key] = result
                self._changed.notify_all()

    def shorten(self, until_s: float) -> None:
        with self._changed:
            self._until_s = min(self._until_s, until_s)
            self._changed.notify_all()

    def is_over(self) -> bool:
        """Whether nobody waits any more."""
        return self._closed or time.monotonic() >= self._until_s

    def is_complete(self) -> bool:
        """Whether nothing is awaited any more: whoever asks now is to be told what is now."""
        with self._changed:
            return not self._awaited

    def wait(self, until_s: float) -> dict[Hashable, Any]:
        """What has come when all has, or at the earlier of both deadlines."""
        with self._changed:
            self._wait_while(lambda: bool(self._awaited), until_s)
            if not self._awaited:
                self._closed = True
            return dict(self._results)

    def wait_for(self, key: Hashable, until_s: float) -> Any:
        """What has come under one key; None if nothing has."""
        with self._changed:
            self._wait_while(lambda: key in self._awaited, until_s)
            return self._results.get(key)

    def _wait_while(self, missing: Callable[[], bool], until_s: float) -> None:
        while missing():
            left_s = min(until_s, self._until_s) - time.monotonic()
            if left_s <= 0:
                return
            self._changed.wait(left_s)
