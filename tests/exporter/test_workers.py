"""Threads for calls that may never return, and results that are awaited together."""

from __future__ import annotations

import threading
import time

import pytest

from sentinel.exporter.workers import Gathering, Worker

SOON_S = 10.0  # generous: nothing here takes so long


@pytest.fixture
def gate() -> threading.Event:
    return threading.Event()


def soon() -> float:
    return time.monotonic() + SOON_S


def test_a_worker_takes_no_second_job_while_the_first_runs(gate: threading.Event) -> None:
    worker: Worker[int] = Worker("test")
    done: list[int] = []
    free = threading.Event()

    def note(result: int) -> None:
        done.append(result)
        free.set()

    assert worker.busy_s() is None
    assert worker.start(lambda: int(gate.wait(SOON_S)), note)
    before = threading.active_count()
    for _ in range(50):
        assert not worker.start(lambda: 2, note)
    assert threading.active_count() == before
    assert worker.busy_s() is not None
    gate.set()
    assert free.wait(SOON_S)
    assert (done, worker.busy_s()) == ([1], None)


def test_a_worker_is_free_when_its_result_is_told() -> None:
    worker: Worker[int] = Worker("test")
    chain: list[int] = []
    ended = threading.Event()

    def note(result: int) -> None:
        chain.append(result)
        if result == 3 or not worker.start(lambda: result + 1, note):
            ended.set()

    assert worker.start(lambda: 1, note)
    assert ended.wait(SOON_S)
    assert chain == [1, 2, 3]


def test_a_worker_outlives_a_job_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    worker: Worker[int] = Worker("test")
    told = threading.Event()

    def fail() -> int:
        raise ValueError("a bug")

    assert worker.start(fail, lambda _: None)
    until = soon()
    while not worker.start(lambda: 1, lambda _: told.set()) and time.monotonic() < until:
        pass
    assert told.wait(SOON_S)
    assert "test: a job failed" in caplog.text


def test_a_gathering_ends_when_all_has_come() -> None:
    gathering = Gathering(soon())
    for key in "abc":
        gathering.expect(key)
        gathering.deliver(key, key.upper())
    gathering.deliver("d", "not asked for")
    assert gathering.wait(soon()) == {"a": "A", "b": "B", "c": "C"}
    assert gathering.is_over()


def test_a_gathering_ends_at_the_earlier_deadline_and_takes_nothing_after() -> None:
    gathering = Gathering(soon())
    gathering.expect("a")
    gathering.expect("b")
    gathering.deliver("a", 1)
    assert gathering.wait(time.monotonic()) == {"a": 1}
    assert not gathering.is_over(), "another may be more patient"
    gathering.shorten(time.monotonic())
    gathering.deliver("b", 2)
    assert gathering.is_over()
    assert gathering.wait(soon()) == {"a": 1}


def test_what_is_asked_again_is_awaited_again() -> None:
    gathering = Gathering(soon())
    gathering.expect("a")
    gathering.deliver("a", "old")
    gathering.expect("a")
    assert gathering.wait(time.monotonic()) == {}
    gathering.deliver("a", "new")
    assert gathering.wait(soon()) == {"a": "new"}


def test_what_will_not_come_is_not_awaited() -> None:
    gathering = Gathering(soon())
    gathering.expect("a")
    gathering.drop("a")
    assert gathering.was_asked("a")
    assert gathering.wait(soon()) == {}


def test_one_key_can_be_awaited_alone() -> None:
    gathering = Gathering(soon())
    gathering.expect("a")
    gathering.expect("b")
    threading.Timer(0.01, gathering.deliver, ("a", 1)).start()
    assert gathering.wait_for("a", soon()) == 1
    assert gathering.wait_for("b", time.monotonic()) is None
