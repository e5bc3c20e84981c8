"""Alerts to every Alertmanager, off the tick.

Alerts are a projection of state that is sent again at every tick, so only the newest matters:
each Alertmanager has a sender of its own with room for one projection. One that hangs or is
gone delays neither the tick nor the others, and misses nothing that it is not told again.
"""

from __future__ import annotations

import base64
import logging
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec

from sentinel.core.alert import Alert
from sentinel.edges.exchange import Interrupted, NotDelivered, exchange
from sentinel.edges.hooks.webhook import rfc3339
from sentinel.edges.logs import Once

log = logging.getLogger("sentinel.alertmanager")

BATCH: Final = 256
_PATH: Final = "/api/v2/alerts"


@dataclass(frozen=True, slots=True)
class Target:
    """One Alertmanager and how it wants to be spoken to."""

    url: str
    username: str = ""
    password: str = field(default="", repr=False)
    bearer: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = None

    def headers(self) -> dict[str, str]:
        plain = {"content-type": "application/json", "user-agent": "gpu-sentinel"}
        if self.bearer:
            return {**plain, "authorization": f"Bearer {self.bearer}"}
        if self.username:
            both = base64.b64encode(f"{self.username}:{self.password}".encode()).decode()
            return {**plain, "authorization": f"Basic {both}"}
        return plain


class Delivery(NamedTuple):
    """How the last delivery to one Alertmanager went. `last_ok_s` is 0.0 before the first."""

    ok: bool
    text: str
    last_ok_s: float = 0.0
    failed: int = 0  # deliveries that failed so far


class Alertmanagers:
    """Started when made. `send` never blocks."""

    def __init__(
        self,
        targets: Iterable[str | Target],
        *,
        timeout_s: float = 5.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        made = [Target(t) if isinstance(t, str) else t for t in targets]
        once = Once(log)
        self._senders = [_Sender(target, timeout_s, clock, once) for target in made]

    def send(self, alerts: Iterable[Alert]) -> None:
        """Replaces what each sender has not begun to send. None at all is sent too: so an
        Alertmanager that is gone is known before it is needed."""
        batches = tuple(_batches(alerts))
        for sender in self._senders:
            sender.offer(batches)

    def status(self) -> dict[str, tuple[bool, str]]:
        """By URL: whether the last delivery went through, and why not."""
        return {url: (last.ok, last.text) for url, last in self.deliveries().items()}

    def deliveries(self) -> dict[str, Delivery]:
        return {sender.target.url: sender.last for sender in self._senders}

    def flush(self, timeout_s: float) -> bool:
        """Waits until everything offered was sent or failed; False when time ran out."""
        until = time.monotonic() + timeout_s
        return all(sender.idle(max(0.0, until - time.monotonic())) for sender in self._senders)

    def close(self, timeout_s: float = 2.0) -> None:
        """Waits a little for the last projection, then stops."""
        self.flush(timeout_s)
        for sender in self._senders:
            sender.stop()


class _Sender:
    def __init__(
        self, target: Target, timeout_s: float, clock: Callable[[], float], once: Once
    ) -> None:
        self.target = target
        self.last = Delivery(False, "nothing sent yet")
        self._url = target.url.rstrip("/") + _PATH
        self._timeout_s = timeout_s
        self._clock = clock
        self._once = once
        self._changed = threading.Condition()
        self._next: tuple[bytes, ...] | None = None
        self._busy = False
        self._stopped = False
        name = f"alerts-{target.url}"
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def offer(self, batches: tuple[bytes, ...]) -> None:
        with self._changed:
            self._next = batches
            self._changed.notify_all()

    def idle(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._next is None and not self._busy, timeout_s)

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._stopped or self._next is not None)
                if self._stopped:
                    return
                batches, self._next = self._next or (), None
                self._busy = True
            try:
                self._note(self._deliver(batches))
            except Exception as err:  # no alert may end the sending of all others
                log.exception("sending to %s failed unexpectedly", self.target.url)
                self._note(f"{type(err).__name__}: {err}")

    def _deliver(self, batches: tuple[bytes, ...]) -> str:
        """Empty when all went through, else why not. The deadline is for all batches."""
        until = time.monotonic() + self._timeout_s
        trouble = ""
        for batch in batches:
            left_s = until - time.monotonic()
            if left_s <= 0:
                return trouble or f"no answer within {self._timeout_s:g} s"
            try:
                answer = exchange(
                    "POST",
                    self._url,
                    headers=self.target.headers(),
                    body=batch,
                    timeout_s=left_s,
                    tls=self.target.tls,
                )
            except (NotDelivered, Interrupted, ValueError) as err:
                return str(err)
            if not 200 <= answer.status < 300:  # the others of a refused batch were taken
                trouble = f"HTTP {answer.status}: {answer.excerpt}"
        return trouble

    def _note(self, trouble: str) -> None:
        last, url = self.last, self.target.url
        if trouble:
            self.last = last._replace(ok=False, text=trouble, failed=last.failed + 1)
            self._once.error(url, f"Alertmanager {url}: {trouble}")
        else:
            self.last = last._replace(ok=True, text="ok", last_ok_s=self._clock())
            self._once.clear(url, f"Alertmanager {url} takes alerts again")


def _batches(alerts: Iterable[Alert]) -> Iterator[bytes]:
    plain = [_plain(alert) for alert in alerts]
    for start in range(0, max(len(plain), 1), BATCH):
        yield msgspec.json.encode(plain[start : start + BATCH])


def _plain(alert: Alert) -> dict[str, Any]:
    return {
        "labels": dict(alert.labels),
        "annotations": dict(alert.annotations),
        "startsAt": rfc3339(alert.starts_at_s),
        "endsAt": rfc3339(alert.ends_at_s),
        "generatorURL": alert.generator_url,
    }
