"""Xids as they happen: one thread per GPU waits for them.

NVML tells of an Xid once, to those who are waiting; what came before is not to be had. Each
GPU has an event set of its own, so that one that is lost or hangs silences no other.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Final

from sentinel.edges.nvml import UNSUPPORTED, Handle, XidEvents, reason_of

_WAIT_MS: Final = 500
_AGAIN_S: Final = 10.0
_LAST_CODE: Final = 65_535  # anything above is no Xid
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Xids:
    """Those of one GPU: how often each code came, the last one and when (Unix time)."""

    counts: dict[int, int]
    last: int = 0
    last_s: float = 0.0


class XidLog:
    """What came, by the key of the GPU. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, Counter[int]] = {}
        self._last: dict[str, tuple[int, float]] = {}

    def watched(self, key: str) -> None:
        with self._lock:
            self._counts.setdefault(key, Counter())

    def note(self, key: str, code: int, at_s: float) -> None:
        with self._lock:
            self._counts.setdefault(key, Counter())[code] += 1
            self._last[key] = (code, at_s)

    def of(self, key: str) -> Xids | None:
        """None where Xids cannot be had."""
        with self._lock:
            if key not in self._counts:
                return None
            last, last_s = self._last.get(key, (0, 0.0))
            return Xids(dict(self._counts[key]), last, last_s)


@dataclass(frozen=True, slots=True)
class _Target:
    handle: Handle
    session: int


class XidWatch:
    """Waits for the Xids of one GPU. `follow` and `pause` are for any thread."""

    def __init__(self, key: str, log: XidLog) -> None:
        self._key, self._log = key, log
        self._changed = threading.Condition()
        self._target: _Target | None = None
        self._thread: threading.Thread | None = None
        self._inside = False

    def follow(self, handle: Handle, session: int) -> None:
        """Waits from now on; `session` grows when handles are no longer good."""
        with self._changed:
            if self._target is not None and self._target.session == session:
                return
            self._target = _Target(handle, session)
            self._changed.notify_all()
            if self._thread is None:
                name = f"xids of {self._key}"
                thread = threading.Thread(target=self._run, name=name, daemon=True)
                thread.start()
                self._thread = thread

    def pause(self) -> None:
        with self._changed:
            self._target = None
            self._changed.notify_all()

    def is_inside(self) -> bool:
        """Whether a call of NVML may be under way."""
        return self._inside

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._target is None:
                    self._changed.wait()
                target, self._inside = self._target, True
            try:
                self._watch(target)
                reason = ""
            except Exception as err:
                reason = reason_of(err)
            with self._changed:
                self._inside = False
                if reason and self._target is target:
                    self._put_off(target, reason)

    def _watch(self, target: _Target) -> None:
        events = XidEvents(target.handle)
        try:
            self._log.watched(self._key)
            while self._target is target:
                code = events.wait(_WAIT_MS)
                if code is not None and 0 < code <= _LAST_CODE:
                    self._log.note(self._key, code, time.time())
                    _log.warning("Xid %d on %s", code, self._key)
        finally:
            events.close()

    def _put_off(self, target: _Target, reason: str) -> None:
        """With the lock held: waits before the next try, or for another GPU or session."""
        if reason in UNSUPPORTED:
            _log.info("%s tells no Xids: %s", self._key, reason)
            self._changed.wait_for(lambda: self._target is not target)
        else:
            self._changed.wait_for(lambda: self._target is not target, _AGAIN_S)
