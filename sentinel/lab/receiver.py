"""An Alertmanager webhook receiver that only remembers: the pager of the lab.

POST /        a notification of Alertmanager (webhook version 4)
GET  /alerts  every alert of every notification, oldest first, with the time it came
"""

from __future__ import annotations

import argparse
import threading
import time
from typing import Any

import msgspec

from sentinel.lab.loopback import Answer, Request, serve_until_terminated


class Alert(msgspec.Struct, frozen=True):
    """One alert of one notification, under Alertmanager's own names."""

    status: str
    labels: dict[str, str]
    annotations: dict[str, str]
    startsAt: str
    endsAt: str = ""
    fingerprint: str = ""


class Notification(msgspec.Struct, frozen=True):
    alerts: list[Alert]
    receiver: str = ""


class Pager:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._received: list[dict[str, Any]] = []

    def route(self, request: Request) -> Answer:
        match (request.method, *request.path):
            case ("POST", *_):
                return self._keep(request.body)
            case ("GET", "alerts"):
                with self._lock:
                    return Answer(200, list(self._received))
            case ("GET", "-", "ready"):
                return Answer(200, "ready")
        return Answer(404, {"error": "nothing here"})

    def _keep(self, body: bytes) -> Answer:
        now_s = time.time()
        try:
            notification = msgspec.json.decode(body, type=Notification)
        except (ValueError, RecursionError) as error:
            return Answer(400, {"error": f"not a notification of Alertmanager: {error}"})
        alerts = [
            {"received_at_s": now_s, "receiver": notification.receiver}
            | msgspec.structs.asdict(alert)
            for alert in notification.alerts
        ]
        with self._lock:
            self._received += alerts
        return Answer(200, {"kept": len(alerts)})


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m sentinel.lab.receiver")
    parser.add_argument("--listen", required=True, help="HOST:PORT")
    given = parser.parse_args(argv)
    serve_until_terminated("receiver", given.listen, Pager().route)


if __name__ == "__main__":
    main()
