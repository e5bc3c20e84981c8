"""What the scheduler says of itself, asked for off the tick: one question at a time.

The tick never waits for it. It asks, and reads whatever came last; how old that may be is the
guards' affair.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection

from sentinel.core.scheduler import View
from sentinel.edges.hooks.protocol import Source
from sentinel.edges.logs import Once
from sentinel.errors import DependencyError

log = logging.getLogger("sentinel.views")


class Views:
    """Started when made; any thread may call its methods."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._once = Once(log)
        self._latest: View | None = None
        self._nodes: frozenset[str] = frozenset()
        self._due = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="views", daemon=True)
        self._thread.start()

    @property
    def latest(self) -> View | None:
        return self._latest

    def ask(self, nodes: Collection[str]) -> None:
        """Wants a new view of these nodes, unless one is on its way."""
        self._nodes = frozenset(nodes)
        self._due.set()

    def close(self, timeout_s: float = 3.0) -> None:
        self._closing = True
        self._due.set()
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while True:
            self._due.wait()
            self._due.clear()
            if self._closing:
                return
            try:
                self._latest = self._source.view(self._nodes)
                self._once.clear("view", "the scheduler tells its nodes and jobs again")
            except DependencyError as err:
                self._once.error("view", f"the scheduler tells nothing: {err}")
            except Exception:  # a bug in one adapter must not end the watch
                log.exception("the scheduler's answer could not be read")
