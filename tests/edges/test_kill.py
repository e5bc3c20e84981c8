"""SIGKILL at every boundary of a fence and a move: nothing starts twice, nothing is forgotten.

The process that is killed runs the real store, step, outbox and webhook (`kill_driver`); the
scheduler it speaks to is the reference one, and lives on. What is checked is what the
scheduler saw, and what the store says at the end.
"""

from __future__ import annotations

import base64
import json
import multiprocessing
import random
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sentinel.core.domain import MigrationPhase, Operation
from sentinel.edges.store import Store
from sentinel.lab.ledger import Ledger
from sentinel.lab.loopback import Answer, server
from sentinel.lab.orders import Behaviour
from sentinel.lab.scheduler import Exporter, Scheduler, route
from tests.edges import kill_driver
from tests.edges.promises import check_calls, check_remembered

SECRET = "whsec_" + base64.b64encode(b"0123456789abcdef0123456789abcdef").decode()
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["sentinel.edges.store", "sentinel.core.step", "requests"])


class World:
    """The reference scheduler with one job on the node that fails, and the driver's folder."""

    def __init__(self, folder: Path, **behaviour: Any) -> None:
        self.folder = folder
        gpus = [{"uuid": g.uuid, "host": g.node} for g in kill_driver.FLEET]
        job = {"job": "train", "uuids": ["GPU-0-0", "GPU-0-1"]}
        state = {"gpus": gpus, "jobs": [job]}
        self._fleet = self._serve(lambda request: Answer(200, state))
        url = f"http://127.0.0.1:{self._fleet.server_address[1]}"
        self.ledger = Ledger(folder / "scheduler.sqlite")
        given = {"run_s": 0.1, **behaviour}
        self.scheduler = Scheduler(self.ledger, Exporter(url), SECRET, Behaviour(**given))
        self._front = self._serve(partial(route, self.scheduler))
        self.url = f"http://127.0.0.1:{self._front.server_address[1]}/migrate"

    def _serve(self, handle: Any) -> Any:
        made = server("127.0.0.1:0", handle, quiet=True)
        threading.Thread(target=made.serve_forever, args=(0.02,), daemon=True).start()
        return made

    def run(self, kill_at: str = "", kill_after_s: float | None = None) -> int:
        """One life of the driver; its exit code, -9 where it was killed."""
        arguments = (str(self.folder / "state"), self.url, SECRET, kill_at)
        process = _forks.Process(target=kill_driver.run, args=arguments, daemon=True)
        process.start()
        if kill_after_s is not None:
            process.join(kill_after_s)
            process.kill()
        process.join(30)
        code = process.exitcode
        assert code is not None
        process.close()
        return code

    def close(self) -> None:
        for one in (self._front, self._fleet):
            one.shutdown()
            one.server_close()
        deadline = time.monotonic() + 5
        while self.ledger.open_operations() and time.monotonic() < deadline:
            time.sleep(0.02)
        self.ledger.close()

    def check(self) -> None:
        """The promises, from the scheduler's side and from the store's."""
        seen = self.ledger.log()
        started = check_calls(seen)
        assert {action for _, action in started} == {"fence", "move"}
        assert [job.restarts for job in self.ledger.jobs().values()] == [1]

        store = Store.open(dir=self.folder / "state")
        try:
            control = store.load()
            assert store.fold() == control
            assert kill_driver.settled(control)
            check_remembered(control, seen)
            for migration in control.migrations.values():
                assert migration.phase is not MigrationPhase.STUCK
            ends = {m.operation: m.phase for m in control.migrations.values()}
            assert ends[Operation.MOVE] is MigrationPhase.DONE
        finally:
            store.close()


@pytest.fixture
def world(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(tmp_path, **getattr(request, "param", {}))
    yield made
    made.close()


def test_without_a_kill_the_node_is_fenced_and_its_work_moves(world: World) -> None:
    assert world.run() == 0
    world.check()
    methods = [call["method"] for call in world.ledger.log()["calls"]]
    assert methods.count("POST") == 2


# The first of each is met by the fence, the second by the move.
POINTS = [
    "stepped:1",
    *(f"{point}:{n}" for point in ("planned", "marking", "marked") for n in (1, 2)),
    *(f"{point}:{n}" for point in ("posting", "answered", "kept") for n in (1, 2)),
    *(f"{point}:{n}" for point in ("running", "done", "asked") for n in (1, 2)),
    "verifying:1",
]


@pytest.mark.parametrize("kill_at", POINTS)
def test_killed_at_a_boundary(world: World, kill_at: str) -> None:
    killed = world.run(kill_at)
    assert killed == -9
    assert world.run() == 0
    world.check()


@pytest.mark.parametrize("world", [{"accept_delay_s": 0.4}], indirect=True)
@pytest.mark.parametrize("kill_at", ["posted:1", "posted:2"])
def test_killed_after_the_order_was_taken_and_before_the_answer(world: World, kill_at: str) -> None:
    assert world.run(kill_at) == -9
    assert world.run() == 0
    world.check()
    posts = [c for c in world.ledger.log()["calls"] if c["method"] == "POST"]
    assert len(posts) == 2  # it was only asked about


@pytest.mark.parametrize("world", [{"hang": 1}], indirect=True)
def test_killed_while_an_order_hangs_that_is_never_taken(world: World) -> None:
    assert world.run("posted:1") == -9
    assert world.run() == 0
    world.check()
    fence = [(c["method"], c["answered"]) for c in world.ledger.log()["calls"]][:3]
    assert fence == [("POST", 0), ("GET", 404), ("POST", 202)]


@pytest.mark.parametrize("world", [{"lose_answer": 2}], indirect=True)
def test_an_answer_that_is_lost_is_asked_for(world: World) -> None:
    assert world.run() == 0
    world.check()
    methods = [c["method"] for c in world.ledger.log()["calls"]]
    assert methods.count("POST") == 2


def test_killed_again_at_every_restart(world: World) -> None:
    for kill_at in ("marked:1", "resumed:1", "asked:1", "planned:1", "posting:1", "resumed:1"):
        assert world.run(kill_at) in (-9, 0)
    assert world.run() == 0
    world.check()


@pytest.mark.parametrize("seed", range(3))
def test_killed_at_random_moments(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    moments = [round(chance.uniform(0.05, 0.6), 3) for _ in range(6)]
    world = World(tmp_path, accept_delay_s=0.1)
    try:
        for moment in moments:
            world.run(kill_after_s=moment)
        assert world.run() == 0
        world.check()
    except AssertionError:
        print(f"seed {seed}: {json.dumps(moments)}")
        raise
    finally:
        world.close()
