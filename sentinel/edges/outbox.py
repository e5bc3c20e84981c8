"""Calls to the scheduler, off the tick: a few workers, one request per operation at a time.

What a call brings back goes into the store's inbox, and is read by the next tick. Whatever a
worker meets, an outcome comes of it. A call that has not left when the process ends is not
lost: its migration is SENT on disk, and the next start asks for it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

from sentinel.core.domain import (
    NOT_DELIVERED,
    Incident,
    Migration,
    Outcome,
    OutcomeKind,
    OutcomeSource,
)
from sentinel.edges.logs import Once
from sentinel.errors import StateError

if TYPE_CHECKING:
    from sentinel.edges.hooks.protocol import Hook

log = logging.getLogger("sentinel.outbox")

_WORKERS: Final = 4
_WAIT_MAX_S: Final = 10.0  # an order that waited longer for a worker does not leave any more
_RETRY_S: Final = 1.0


class Inbox(Protocol):
    """Where outcomes are kept until a tick has used them."""

    def add_outcome(self, outcome: Outcome) -> Any: ...


Call = Callable[[], Outcome]


class Outbox:
    """Started when made. `submit_*` never block; any thread may call them."""

    def __init__(
        self,
        hook: Hook,
        inbox: Inbox,
        *,
        workers: int = _WORKERS,
        wait_max_s: float = _WAIT_MAX_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._hook = hook
        self._inbox = inbox
        self._wait_max_s = wait_max_s
        self._clock = clock
        self._once = Once(log)
        self._guard = threading.Lock()
        self._waiting: dict[str, list[Call]] = {}  # an operation is here while one of it runs
        self._ready: queue.SimpleQueue[tuple[str, Call] | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, name=f"outbox-{n}", daemon=True)
            for n in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit_post(self, migration: Migration, incident: Incident) -> None:
        """Orders it, after any question about it that is under way. It is SENT on disk."""
        submitted_s = time.monotonic()

        def call() -> Outcome:
            waited_s = time.monotonic() - submitted_s
            if waited_s > self._wait_max_s:
                why = f"{NOT_DELIVERED} waited {waited_s:.0f} s for earlier calls to end"
                return self._outcome(
                    migration.operation_id, OutcomeKind.REFUSED, OutcomeSource.POST, why
                )
            return self._hook.post(migration, incident)

        self._submit(migration.operation_id, OutcomeSource.POST, call)

    def submit_query(self, migration: Migration) -> None:
        """Asks for it, unless a call about it is under way: the next tick asks again."""
        id = migration.operation_id
        self._submit(id, OutcomeSource.GET, lambda: self._hook.query(migration))

    @property
    def in_flight(self) -> int:
        """Operations of which a call runs or waits."""
        with self._guard:
            return len(self._waiting)

    def close(self, timeout_s: float = 3.0) -> None:
        """Begins nothing more and waits a little for what runs."""
        self._closing.set()
        for _ in self._threads:
            self._ready.put(None)
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _submit(self, id: str, source: OutcomeSource, call: Call) -> None:
        def safe() -> Outcome:
            try:
                return call()
            except Exception as err:  # the order may have left: only a question can tell
                log.exception("%s: the %s call failed unexpectedly", id, source)
                return self._outcome(
                    id, OutcomeKind.UNKNOWN, source, f"{type(err).__name__}: {err}"
                )

        with self._guard:
            if id not in self._waiting:
                self._waiting[id] = []
                self._ready.put((id, safe))
            elif source is OutcomeSource.POST:
                self._waiting[id].append(safe)

    def _outcome(self, id: str, kind: OutcomeKind, source: OutcomeSource, reason: str) -> Outcome:
        return Outcome(id, kind, source, self._clock(), reason)

    def _work(self) -> None:
        while (item := self._ready.get()) is not None:
            if self._closing.is_set():
                continue
            id, call = item
            self._keep(call())
            with self._guard:
                more = self._waiting[id]
                if more:
                    self._ready.put((id, more.pop(0)))
                else:
                    del self._waiting[id]

    def _keep(self, outcome: Outcome) -> None:
        """Tries until the store takes it; at the end of the process the restart asks again."""
        while True:
            try:
                self._inbox.add_outcome(outcome)
            except StateError as err:
                self._once.error("inbox", f"cannot keep an outcome, trying again: {err}")
            else:
                self._once.clear("inbox", "outcomes are kept again")
                return
            if self._closing.wait(_RETRY_S):
                return
