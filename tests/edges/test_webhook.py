"""The webhook hook: what leaves, and what each kind of answer, or silence, is taken to prove."""

from __future__ import annotations

import base64
import json
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks import Webhook

from sentinel.core.domain import (
    Backup,
    Evidence,
    Incident,
    IncidentPhase,
    Kind,
    Migration,
    MigrationPhase,
    Operation,
    OutcomeKind,
    OutcomeSource,
    Severity,
    Subject,
    SubjectKind,
    Workload,
)
from sentinel.edges.exchange import Answer, exchange
from sentinel.edges.hooks.webhook import (
    WebhookHook,
    body,
    read_callback,
    read_get,
    read_post,
    sign,
    verify,
)

SECRET = "whsec_" + base64.b64encode(b"0123456789abcdef0123456789abcdef").decode()
OP = "op-0123456789abcdef"

INCIDENT = Incident(
    id="inc-1",
    subject=Subject(SubjectKind.GPU, "GPU-1"),
    phase=IncidentPhase.CONFIRMED,
    opened_at_s=1_800_000_000.0,
    since_s=1_800_000_000.0,
    held_s=0.0,
    last_tick_s=1_800_000_000.0,
    kind=Kind.FAULT,
    severity=Severity.CRITICAL,
    pattern="off the bus",
    score=0.0,
    evidence=(Evidence("xid", "xid", "Xid 79: the GPU fell off the bus", 79.0, float("nan")),),
    gpu_uuid="GPU-1",
    node="gpu-03",
)
MIGRATION = Migration(
    operation_id=OP,
    incident_id="inc-1",
    operation=Operation.MOVE,
    node="gpu-03",
    gpu_uuids=("GPU-1",),
    phase=MigrationPhase.SENT,
    attempt=2,
    planned_at_s=1_800_000_000.0,
    since_s=1_800_000_000.0,
    deadline_s=1_800_000_900.5,
    evidence_at_s=1_800_000_000.0,
    workload=Workload("job", "4711", "physics"),
    workload_nodes=("gpu-03", "gpu-04"),
    workload_gpu_uuids=("GPU-1", "GPU-2"),
    exclude_nodes=("gpu-03",),
    backups=(Backup("gpu-15", ("GPU-b",)),),
)


class Peer:
    """A server that reads one whole request per connection, then does as it is told."""

    def __init__(self, act: Callable[[socket.socket], None], tls: ssl.SSLContext | None = None):
        self.requests: list[bytes] = []
        self._act, self._tls = act, tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._one, args=(connection,), daemon=True).start()

    def _one(self, connection: socket.socket) -> None:
        try:
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
            with connection:
                connection.settimeout(10)
                raw = b""
                while b"\r\n\r\n" not in raw:
                    raw += connection.recv(65536)
                head, _, rest = raw.partition(b"\r\n\r\n")
                length = 0
                for line in head.lower().split(b"\r\n"):
                    if line.startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                while len(rest) < length:
                    rest += connection.recv(65536)
                self.requests.append(head + b"\r\n\r\n" + rest)
                self._act(connection)
        except OSError:
            connection.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)


def says(status: str, content: bytes = b"", *headers: str) -> Callable[[socket.socket], None]:
    head = [f"HTTP/1.1 {status}", f"Content-Length: {len(content)}", *headers]
    raw = "\r\n".join(head).encode() + b"\r\n\r\n" + content
    return lambda connection: connection.sendall(raw)


@pytest.fixture
def peer() -> Iterator[Callable[..., Peer]]:
    made: list[Peer] = []

    def make(act: Callable[[socket.socket], None], tls: ssl.SSLContext | None = None) -> Peer:
        made.append(Peer(act, tls))
        return made[-1]

    yield make
    for one in made:
        one.close()


def echo(state: str = "accepted", **more: object) -> bytes:
    return json.dumps({"operation_id": OP, "state": state, **more}).encode()


def hook(url: str, timeout_s: float = 5.0) -> WebhookHook:
    return WebhookHook(url, SECRET, external_url="http://me:9477/", timeout_s=timeout_s)


# ---- what leaves --------------------------------------------------------------------


def test_the_order_is_as_the_protocol_says() -> None:
    assert json.loads(body(MIGRATION, INCIDENT, external_url="http://me:9477")) == {
        "schema": 1,
        "operation_id": OP,
        "epoch": 0,
        "action": "move",
        "attempt": 2,
        "dry_run": False,
        "deadline": "2027-01-15T08:15:00.500000Z",
        "callback_url": f"http://me:9477/api/v1/migrations/{OP}/status",
        "node": "gpu-03",
        "gpu_uuids": ["GPU-1"],
        "workload": {
            "kind": "job",
            "id": "4711",
            "tenant": "physics",
            "nodes": ["gpu-03", "gpu-04"],
            "gpus": ["GPU-1", "GPU-2"],
        },
        "exclude_nodes": ["gpu-03"],
        "spare_hint": [{"node": "gpu-15", "gpu_uuids": ["GPU-b"]}],
        "checkpoint": {"mode": "none", "grace_s": 0.0},
        "incident": {
            "id": "inc-1",
            "kind": "fault",
            "severity": "critical",
            "pattern": "off the bus",
            "summary": "GPU of gpu-03: off the bus: Xid 79: the GPU fell off the bus",
            "evidence": [
                {
                    "kind": "xid",
                    "metric": "xid",
                    "text": "Xid 79: the GPU fell off the bus",
                    "value": 79.0,
                    "expected": None,
                    "unit": "",
                }
            ],
        },
    }


def test_a_fence_without_work_names_none() -> None:
    fence = replace(MIGRATION, operation=Operation.FENCE, workload=None)
    order = json.loads(body(fence, INCIDENT, dry_run=True))
    assert (order["action"], order["workload"], order["dry_run"]) == ("fence", None, True)
    assert order["callback_url"] == ""


def test_the_post_is_signed_as_the_standard_says(peer: Callable[..., Peer]) -> None:
    server = peer(says("202 Accepted", echo()))
    outcome = hook(server.url + "/migrate/").post(MIGRATION, INCIDENT)
    assert outcome.kind is OutcomeKind.ACCEPTED
    head, _, content = server.requests[0].partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
    assert first == "POST /migrate HTTP/1.1"
    assert headers["webhook-id"] == OP
    Webhook(SECRET).verify(content, headers)  # raises when it does not hold
    assert verify(headers, content, SECRET)


def test_a_query_asks_for_the_operation(peer: Callable[..., Peer]) -> None:
    server = peer(says("200 OK", echo("finished", placement=[{"node": "n", "gpu_uuids": ["g"]}])))
    outcome = hook(server.url + "/migrate").query(MIGRATION)
    assert outcome.kind is OutcomeKind.FINISHED
    assert outcome.source is OutcomeSource.GET
    assert outcome.placement == (Backup("n", ("g",)),)
    assert server.requests[0].startswith(f"GET /migrate/{OP} HTTP/1.1".encode())


# ---- what an answer proves ----------------------------------------------------------

UNKNOWN, REFUSED, ACCEPTED = OutcomeKind.UNKNOWN, OutcomeKind.REFUSED, OutcomeKind.ACCEPTED
OTHER = b'{"operation_id": "op-other", "state": "refused"}'


@pytest.mark.parametrize(
    ("status", "content", "kind"),
    [
        (200, b"", ACCEPTED),
        (202, echo(), ACCEPTED),
        (204, b"", ACCEPTED),
        (299, b"<html>", ACCEPTED),
        (200, echo("running"), OutcomeKind.RUNNING),
        (200, echo("finished"), OutcomeKind.FINISHED),
        (200, echo("failed"), OutcomeKind.FAILED),
        (200, echo("refused"), ACCEPTED),
        (200, echo("what"), ACCEPTED),
        (200, OTHER, ACCEPTED),
        (409, echo("refused", reason="no capacity"), REFUSED),
        (422, echo(), REFUSED),
        (422, json.dumps({"operation_id": OP}).encode(), REFUSED),
        (409, b"", UNKNOWN),
        (409, b"conflict", UNKNOWN),
        (422, OTHER, UNKNOWN),
        (409, b'{"operation_id": 7}', UNKNOWN),
        (409, b"[" * 100_000, UNKNOWN),
        (400, echo("refused"), UNKNOWN),
        (401, echo("refused"), UNKNOWN),
        (403, b"", UNKNOWN),
        (404, echo(), UNKNOWN),
        (408, b"", UNKNOWN),
        (429, echo("refused"), UNKNOWN),
        (500, echo("refused"), UNKNOWN),
        (502, b"<h1>Bad gateway</h1>", UNKNOWN),
        (503, b"", UNKNOWN),
        (301, echo(), UNKNOWN),
        (307, echo(), UNKNOWN),
        (103, b"", UNKNOWN),
    ],
)
def test_what_the_answer_to_an_order_proves(status: int, content: bytes, kind: OutcomeKind) -> None:
    outcome = read_post(OP, Answer(status, content, complete=True), 1.0)
    assert outcome.kind is kind
    assert outcome.operation_id == OP
    assert outcome.reason or kind not in (REFUSED, UNKNOWN)


@pytest.mark.parametrize(
    ("status", "content", "kind"),
    [
        (200, echo("accepted"), ACCEPTED),
        (200, echo("running"), OutcomeKind.RUNNING),
        (200, echo("finished"), OutcomeKind.FINISHED),
        (200, echo("failed", reason="node lost"), OutcomeKind.FAILED),
        (200, echo("refused", reason="no capacity"), REFUSED),
        (200, echo("done"), UNKNOWN),
        (200, echo("finished", placement="there"), UNKNOWN),
        (200, OTHER, UNKNOWN),
        (200, b"", UNKNOWN),
        (204, b"", UNKNOWN),
        (404, b"", OutcomeKind.NOT_FOUND),
        (404, b"<html>", OutcomeKind.NOT_FOUND),
        (410, echo("refused"), UNKNOWN),
        (302, b"", UNKNOWN),
        (500, echo("finished"), UNKNOWN),
    ],
)
def test_what_the_answer_to_a_question_proves(
    status: int, content: bytes, kind: OutcomeKind
) -> None:
    assert read_get(OP, Answer(status, content, complete=True), 1.0).kind is kind


@given(status=st.integers(100, 999), content=st.binary(max_size=60), complete=st.booleans())
def test_nonsense_never_proves_a_refusal(status: int, content: bytes, complete: bool) -> None:
    outcome = read_post(OP, Answer(status, content, complete=complete), 1.0)
    assert outcome.kind is (ACCEPTED if 200 <= status < 300 else UNKNOWN)
    asked = read_get(OP, Answer(status, content, complete=complete), 1.0)
    assert asked.kind is (OutcomeKind.NOT_FOUND if status == 404 else UNKNOWN)


# ---- what silence proves ------------------------------------------------------------


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()


def hang(connection: socket.socket) -> None:
    time.sleep(2)


def drip_head(connection: socket.socket) -> None:
    for byte in b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100:
        connection.sendall(bytes([byte]))
        time.sleep(0.1)


def drip_body(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 409 Conflict\r\nContent-Length: 100\r\n\r\n")
    for _ in range(40):
        connection.sendall(b"x")
        time.sleep(0.1)


def cut_short(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 422 No\r\nContent-Length: 500\r\n\r\n" + echo("refused"))


def flood(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 422 No\r\n\r\n" + b" " * (1 << 20) + echo("refused"))


@pytest.mark.parametrize(
    "act",
    [
        lambda c: None,
        reset,
        hang,
        drip_head,
        drip_body,
        cut_short,
        flood,
        lambda c: c.sendall(b"SSH-2.0-OpenSSH_9.2\r\n"),
        lambda c: c.sendall(b"HTTP/1.1 20"),
        lambda c: c.sendall(b"HTTP/1.1 abc OK\r\n\r\n"),
        says("307 Temporary Redirect", b"", "Location: /elsewhere"),
    ],
    ids=[
        "closed",
        "reset",
        "hang",
        "drip_head",
        "drip_body",
        "cut_short",
        "flood",
        "ssh",
        "half_line",
        "no_number",
        "307",
    ],
)
def test_silence_after_the_order_left_proves_nothing_and_repeats_nothing(
    peer: Callable[..., Peer], act: Callable[[socket.socket], None]
) -> None:
    server = peer(act)
    began = time.monotonic()
    outcome = hook(server.url, timeout_s=0.5).post(MIGRATION, INCIDENT)
    assert time.monotonic() - began < 1.5
    assert outcome.kind is UNKNOWN
    assert outcome.reason
    asked = hook(server.url, timeout_s=0.5).query(MIGRATION)
    assert asked.kind is UNKNOWN
    assert [r.split()[0] for r in server.requests] == [b"POST", b"GET"]


def test_an_accepted_order_stays_accepted_whatever_its_body_does(
    peer: Callable[..., Peer],
) -> None:
    def accept_then_hang(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 202 Accepted\r\nContent-Length: 100\r\n\r\n{")
        time.sleep(1)

    server = peer(accept_then_hang)
    assert hook(server.url, timeout_s=0.3).post(MIGRATION, INCIDENT).kind is ACCEPTED


def test_a_peer_that_closes_kept_connections_is_asked_once_each(
    peer: Callable[..., Peer],
) -> None:
    """A client with a pool would find its idle connection closed, and send the order again."""
    server = peer(says("200 OK", echo(), "Connection: keep-alive"))
    sender = hook(server.url)
    for _ in range(3):
        assert sender.post(MIGRATION, INCIDENT).kind is ACCEPTED
    assert len(server.requests) == 3
    assert all(b"connection: close" in r.lower() for r in server.requests)


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def test_a_refused_connection_proves_that_nothing_left() -> None:
    outcome = hook(f"http://127.0.0.1:{closed_port()}").post(MIGRATION, INCIDENT)
    assert (outcome.kind, outcome.reason) == (REFUSED, "not delivered: connection refused")
    asked = hook(f"http://127.0.0.1:{closed_port()}").query(MIGRATION)
    assert asked.kind is UNKNOWN


def test_a_name_that_does_not_resolve_proves_it_too() -> None:
    outcome = hook("http://no-such-host.invalid").post(MIGRATION, INCIDENT)
    assert outcome.kind is REFUSED
    assert outcome.reason.startswith("not delivered: its name does not resolve")
    label_too_long = hook("http://" + "a" * 70 + ".invalid").post(MIGRATION, INCIDENT)
    assert label_too_long.kind is REFUSED


def test_a_connection_that_is_never_made_proves_it_too() -> None:
    """A listener whose queue is full answers no SYN."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        port = full.getsockname()[1]
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
        time.sleep(0.1)
        began = time.monotonic()
        outcome = hook(f"http://127.0.0.1:{port}", timeout_s=0.4).post(MIGRATION, INCIDENT)
        assert time.monotonic() - began < 1.0
        for one in waiting:
            one.close()
    assert (outcome.kind, outcome.reason) == (REFUSED, "not delivered: no answer within 0.4 s")


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext"
    names = ["subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)
    return key, cert


def test_tls_is_checked_before_anything_leaves(
    peer: Callable[..., Peer], certificate: tuple[Path, Path]
) -> None:
    key, cert = certificate
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    server = peer(says("202 Accepted", echo()), context)
    outcome = hook(server.url).post(MIGRATION, INCIDENT)
    assert outcome.kind is REFUSED
    assert outcome.reason.startswith("not delivered: its certificate is not trusted")
    assert server.requests == []
    trusting = ssl.create_default_context(cafile=str(cert))
    assert WebhookHook(server.url, SECRET, tls=trusting).post(MIGRATION, INCIDENT).kind is ACCEPTED


def test_an_url_that_is_none_is_refused() -> None:
    for url in ("ftp://x/", "gpu-15:80", "http:///path", "http://x:port/"):
        with pytest.raises(ValueError, match=r"URL|[Pp]ort|nonnumeric"):
            exchange("GET", url, timeout_s=1.0)


# ---- callbacks ----------------------------------------------------------------------


def test_a_signature_holds_for_its_body_its_secret_and_five_minutes() -> None:
    content, now = b'{"state": "finished"}', time.time()
    other = "whsec_" + base64.b64encode(b"another").decode()
    good = sign(OP, content, SECRET, now)
    assert verify(good, content, SECRET)
    assert verify({k.title(): v for k, v in good.items()}, content, SECRET)
    assert verify(sign(OP, content, SECRET, now - 290), content, SECRET)
    assert not verify(good, content + b" ", SECRET)
    assert not verify(good, content, other)
    assert not verify(sign(OP, content, SECRET, now - 310), content, SECRET)
    assert not verify(sign(OP, content, SECRET, now + 310), content, SECRET)
    assert not verify({**good, "webhook-id": "op-2"}, content, SECRET)
    assert not verify({}, content, SECRET)


@given(
    id=st.text(max_size=20),
    stamp=st.one_of(st.text(max_size=20), st.just(str(int(time.time())))),
    signature=st.one_of(st.text(max_size=60), st.text(max_size=30).map(lambda t: "v1," + t)),
    content=st.binary(max_size=40),
    secret=st.one_of(st.just(SECRET), st.text(max_size=20)),
)
def test_a_malformed_signature_is_no_signature(
    id: str, stamp: str, signature: str, content: bytes, secret: str
) -> None:
    headers = {"webhook-id": id, "webhook-timestamp": stamp, "webhook-signature": signature}
    assert verify(headers, content, secret) is False


def test_a_callback_is_read_or_is_none() -> None:
    told = read_callback(OP, echo("finished", placement=[{"node": "n", "gpu_uuids": ["g"]}]), 3.0)
    assert told is not None
    assert (told.kind, told.source, told.at_s) == (
        OutcomeKind.FINISHED,
        OutcomeSource.CALLBACK,
        3.0,
    )
    assert read_callback(OP, OTHER, 3.0) is None
    assert read_callback(OP, echo("what"), 3.0) is None
    assert read_callback(OP, b"\xff", 3.0) is None
