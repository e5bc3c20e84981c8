"""The outbox: one call per operation at a time, an outcome of everything, nothing dropped."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from sentinel.core.domain import (
    Incident,
    IncidentPhase,
    Kind,
    Migration,
    MigrationPhase,
    Operation,
    Outcome,
    OutcomeKind,
    OutcomeSource,
    Severity,
    Subject,
    SubjectKind,
)
from sentinel.edges.outbox import Outbox
from sentinel.errors import StateError

INCIDENT = Incident(
    "inc-1",
    Subject(SubjectKind.GPU, "GPU-1"),
    IncidentPhase.CONFIRMED,
    0.0,
    0.0,
    0.0,
    0.0,
    Kind.FAULT,
    Severity.CRITICAL,
    "off the bus",
    0.0,
    (),
)


def migration(id: str) -> Migration:
    return Migration(
        id, "inc-1", Operation.FENCE, "gpu-03", (), MigrationPhase.SENT, 1, 0.0, 0.0, 900.0, 0.0
    )


class Scheduler:
    """Answers when told to, and remembers what ran at the same time."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.together: list[list[str]] = []
        self.gate = threading.Event()
        self.gate.set()
        self._running: list[str] = []
        self._guard = threading.Lock()

    def post(self, migration: Migration, incident: Incident) -> Outcome:
        return self._call("POST", migration.operation_id, OutcomeSource.POST)

    def query(self, migration: Migration) -> Outcome:
        return self._call("GET", migration.operation_id, OutcomeSource.GET)

    def _call(self, method: str, id: str, source: OutcomeSource) -> Outcome:
        with self._guard:
            self.calls.append((method, id))
            self._running.append(id)
            self.together.append(sorted(self._running))
        assert self.gate.wait(10)
        with self._guard:
            self._running.remove(id)
        if id == "op-broken":
            raise RuntimeError("a bug")
        return Outcome(id, OutcomeKind.ACCEPTED, source, 1.0)


class Inbox:
    def __init__(self) -> None:
        self.kept: list[Outcome] = []
        self.failures = 0

    def add_outcome(self, outcome: Outcome) -> None:
        if self.failures:
            self.failures -= 1
            raise StateError("no space left on its disk")
        self.kept.append(outcome)


def until(true: Callable[[], bool], within_s: float = 5.0) -> None:
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler()


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


@pytest.fixture
def outbox(scheduler: Scheduler, inbox: Inbox) -> Iterator[Outbox]:
    made = Outbox(scheduler, inbox, workers=3)
    yield made
    scheduler.gate.set()
    made.close()


def test_every_call_leaves_an_outcome(outbox: Outbox, inbox: Inbox) -> None:
    outbox.submit_post(migration("op-1"), INCIDENT)
    outbox.submit_query(migration("op-2"))
    until(lambda: len(inbox.kept) == 2)
    assert {(o.operation_id, o.source) for o in inbox.kept} == {
        ("op-1", OutcomeSource.POST),
        ("op-2", OutcomeSource.GET),
    }
    until(lambda: outbox.in_flight == 0)


def test_one_call_of_an_operation_at_a_time_and_no_order_dropped(
    outbox: Outbox, scheduler: Scheduler, inbox: Inbox
) -> None:
    scheduler.gate.clear()
    outbox.submit_query(migration("op-1"))
    until(lambda: scheduler.calls == [("GET", "op-1")])
    outbox.submit_query(migration("op-1"))  # asked already
    outbox.submit_post(migration("op-1"), INCIDENT)
    outbox.submit_query(migration("op-1"))  # the order says more
    outbox.submit_post(migration("op-2"), INCIDENT)  # another operation does not wait
    until(lambda: ("POST", "op-2") in scheduler.calls)
    assert outbox.in_flight == 2
    scheduler.gate.set()
    until(lambda: len(inbox.kept) == 3)
    assert scheduler.calls == [("GET", "op-1"), ("POST", "op-2"), ("POST", "op-1")]
    assert all(len(set(ids)) == len(ids) for ids in scheduler.together)


def test_calls_are_bounded(outbox: Outbox, scheduler: Scheduler, inbox: Inbox) -> None:
    scheduler.gate.clear()
    for n in range(20):
        outbox.submit_query(migration(f"op-{n}"))
    time.sleep(0.05)
    assert len(scheduler.calls) == 3
    scheduler.gate.set()
    until(lambda: len(inbox.kept) == 20)
    assert max(len(ids) for ids in scheduler.together) == 3


def test_a_bug_in_a_call_is_an_unknown_outcome(
    outbox: Outbox, inbox: Inbox, caplog: pytest.LogCaptureFixture
) -> None:
    outbox.submit_post(migration("op-broken"), INCIDENT)
    outbox.submit_post(migration("op-1"), INCIDENT)
    until(lambda: len(inbox.kept) == 2)
    broken = next(o for o in inbox.kept if o.operation_id == "op-broken")
    assert broken.kind is OutcomeKind.UNKNOWN
    assert broken.reason == "RuntimeError: a bug"
    assert "op-broken: the post call failed unexpectedly" in caplog.text


def test_an_outcome_that_the_disk_refuses_is_tried_again(
    outbox: Outbox, inbox: Inbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sentinel.edges.outbox._RETRY_S", 0.01)
    inbox.failures = 20
    with caplog.at_level(logging.INFO):
        outbox.submit_post(migration("op-1"), INCIDENT)
        until(lambda: len(inbox.kept) == 1 and len(caplog.records) == 2)
    lines = [r.getMessage() for r in caplog.records]
    assert "cannot keep an outcome" in lines[0]
    assert "after 20 times" in lines[1]


def test_an_order_that_waited_too_long_provably_never_left(
    scheduler: Scheduler, inbox: Inbox
) -> None:
    outbox = Outbox(scheduler, inbox, workers=1, wait_max_s=0.05)
    scheduler.gate.clear()
    outbox.submit_query(migration("op-1"))
    until(lambda: bool(scheduler.calls))
    outbox.submit_post(migration("op-2"), INCIDENT)
    time.sleep(0.1)
    scheduler.gate.set()
    until(lambda: len(inbox.kept) == 2)
    assert inbox.kept[1].kind is OutcomeKind.REFUSED
    assert inbox.kept[1].reason.startswith("not delivered: waited")
    assert scheduler.calls == [("GET", "op-1")]
    outbox.close()


def test_closing_waits_shortly_and_begins_nothing_more(scheduler: Scheduler, inbox: Inbox) -> None:
    outbox = Outbox(scheduler, inbox, workers=1)
    scheduler.gate.clear()
    outbox.submit_post(migration("op-1"), INCIDENT)
    outbox.submit_post(migration("op-2"), INCIDENT)
    until(lambda: bool(scheduler.calls))
    began = time.monotonic()
    outbox.close(timeout_s=0.1)
    assert time.monotonic() - began < 0.5
    scheduler.gate.set()
    until(lambda: len(inbox.kept) == 1)
    time.sleep(0.05)
    assert scheduler.calls == [("POST", "op-1")]
