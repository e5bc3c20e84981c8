"""Alerts reach every Alertmanager that can take them, and none that cannot delays anything."""

from __future__ import annotations

import base64
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sentinel.core.alert import Alert
from sentinel.edges.alertmanager import Alertmanagers, Target

NOW = 1_800_000_000.25


class Receiver(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.got: list[list[dict[str, object]]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.status = 200
        self.open = threading.Event()
        self.open.set()
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append(json.loads(body))
        self.server.headers.append({k.lower(): v for k, v in self.headers.items()})
        self.server.paths.append(self.path)
        self.server.open.wait(5)
        self.send_response(self.server.status)
        self.end_headers()
        if self.server.status != 200:
            self.wfile.write(b"start time must be before end time\n")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[Callable[[], Receiver]]:
    made: list[Receiver] = []

    def make() -> Receiver:
        made.append(Receiver())
        return made[-1]

    yield make
    for one in made:
        one.open.set()
        one.shutdown()
        one.server_close()


def alert(n: int = 0) -> Alert:
    labels = {"alertname": "SentinelGpuFault", "gpu_uuid": f"GPU-{n}"}
    return Alert(labels, {"summary": "off the bus"}, NOW, NOW + 300.0, "http://me/?incident=1")


def test_alerts_are_as_the_api_wants_them(receiver: Callable[[], Receiver]) -> None:
    one = receiver()
    senders = Alertmanagers([one.url + "/"], clock=lambda: 7.0)
    senders.send([alert()])
    assert senders.flush(5)
    assert one.paths == ["/api/v2/alerts"]
    assert one.got == [
        [
            {
                "labels": {"alertname": "SentinelGpuFault", "gpu_uuid": "GPU-0"},
                "annotations": {"summary": "off the bus"},
                "startsAt": "2027-01-15T08:00:00.250000Z",
                "endsAt": "2027-01-15T08:05:00.250000Z",
                "generatorURL": "http://me/?incident=1",
            }
        ]
    ]
    assert senders.status() == {one.url + "/": (True, "ok")}
    assert senders.deliveries()[one.url + "/"].last_ok_s == 7.0
    senders.close()


def test_many_go_in_batches_and_none_is_still_a_sign_of_life(
    receiver: Callable[[], Receiver],
) -> None:
    one = receiver()
    senders = Alertmanagers([one.url])
    senders.send([alert(n) for n in range(600)])
    assert senders.flush(5)
    senders.send([])
    assert senders.flush(5)
    assert [len(batch) for batch in one.got] == [256, 256, 88, 0]
    senders.close()


def test_a_hung_one_delays_nobody_and_then_hears_the_newest(
    receiver: Callable[[], Receiver],
) -> None:
    hung, well = receiver(), receiver()
    hung.open.clear()
    senders = Alertmanagers([hung.url, well.url], timeout_s=0.3)
    began = time.monotonic()
    for n in range(50):
        senders.send([alert(n)])
        time.sleep(0.001)
    assert time.monotonic() - began < 0.2
    deadline = time.monotonic() + 3
    while [alert(49).labels["gpu_uuid"]] != [a["labels"]["gpu_uuid"] for a in well.got[-1]]:  # type: ignore[index]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not senders.flush(0.05)
    assert senders.flush(3)
    assert senders.status()[hung.url] == (False, "no answer within 0.3 s")
    assert senders.status()[well.url] == (True, "ok")
    assert [batch[0]["labels"]["gpu_uuid"] for batch in hung.got] == ["GPU-0", "GPU-49"]  # type: ignore[index]
    hung.open.set()
    senders.send([alert(50)])
    assert senders.flush(3)
    assert senders.status()[hung.url] == (True, "ok")
    senders.close()


def test_the_same_trouble_is_said_once_and_counted(
    receiver: Callable[[], Receiver], caplog: pytest.LogCaptureFixture
) -> None:
    one = receiver()
    one.status = 400
    senders = Alertmanagers([one.url])
    with caplog.at_level(logging.INFO):
        for _ in range(5):
            senders.send([alert(n) for n in range(300)])
            assert senders.flush(5)
        one.status = 200
        senders.send([alert()])
        assert senders.flush(5)
    senders.close()
    lines = [r.getMessage() for r in caplog.records]
    said = f"Alertmanager {one.url}: HTTP 400: start time must be before end time"
    assert lines[0] == said
    assert len(lines) == 2
    assert "takes alerts again (after 5 times" in lines[1]
    assert [len(batch) for batch in one.got[:2]] == [256, 44]  # a refused batch ends nothing
    assert senders.deliveries()[one.url].failed == 5


def test_nobody_listening_is_a_status_not_an_error() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as closed:  # type: ignore[arg-type]
        url = f"http://127.0.0.1:{closed.server_address[1]}"
    senders = Alertmanagers([url])
    assert senders.status()[url] == (False, "nothing sent yet")
    senders.send([alert()])
    assert senders.flush(5)
    assert senders.status()[url] == (False, "connection refused")
    senders.close()


def test_credentials_go_in_headers_and_into_no_text(receiver: Callable[[], Receiver]) -> None:
    one = receiver()
    basic = Target(one.url, username="sentinel", password="s3cret")
    bearer = Target(one.url, bearer="t0ken")
    for target in (basic, bearer):
        senders = Alertmanagers([target])
        senders.send([])
        assert senders.flush(5)
        senders.close()
    expected = "Basic " + base64.b64encode(b"sentinel:s3cret").decode()
    assert [h["authorization"] for h in one.headers] == [expected, "Bearer t0ken"]
    assert "s3cret" not in repr(basic)
    assert "t0ken" not in repr(bearer)


def test_the_last_projection_is_sent_before_the_end(receiver: Callable[[], Receiver]) -> None:
    one = receiver()
    senders = Alertmanagers([one.url])
    senders.send([alert()])
    senders.close()
    assert len(one.got) == 1


def test_no_alertmanager_at_all_is_allowed() -> None:
    senders = Alertmanagers([])
    senders.send([alert()])
    assert senders.flush(0.1)
    assert senders.status() == {}
    senders.close()
