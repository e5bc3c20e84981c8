"""The whole daemon, killed fifty times at random moments while GPUs fail one after another.

Everything is real but the fleet: Prometheus, Alertmanager, the reference scheduler and the
daemon are processes of their own. Between its lives the daemon keeps nothing but its state
directory. What is checked is what the scheduler saw and what the store says at the end.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from sentinel.core.domain import Control, IncidentPhase, MigrationPhase
from sentinel.edges.store import Store
from sentinel.errors import DependencyError
from sentinel.lab.demo import choose_target
from sentinel.lab.stage import Stage
from sentinel.lab.story import Target
from tests.edges.promises import check_calls, check_remembered

pytestmark = [pytest.mark.integration, pytest.mark.slow]

KILLS = 50
FAULT = "off-the-bus"
SETTLE_S = 90.0


class Site(Stage):
    """The stage of the demonstration, but the daemon is ours to start and to kill."""

    def _start_daemon(self, config: Path) -> None:
        plain = yaml.safe_load(config.read_text())
        plain["limits"] = {
            "fenced_nodes": 16,
            "fenced_percent": 100.0,
            "gpu_hours_lost_per_day": 1e6,
            "open_moves": 4,
        }
        plain["hook"] |= {"verify_for_s": 3.0, "deadline_s": 300.0}
        config.write_text(yaml.safe_dump(plain))
        self.config = config
        self.log = self.folder / "daemon.log"

    def live(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "sentinel.cli", "run", "--config", str(self.config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def slow_orders(self) -> None:
        """Answers take a moment and moves a while, so that many kills meet one under way."""
        self._ask("PUT", "scheduler", "behaviour", {"accept_delay_s": 0.3, "run_s": 10.0})

    def state(self) -> Control:
        """What the store says while no daemon runs."""
        store = Store.open(dir=self.folder / "state")
        try:
            control = store.load()
            assert store.fold() == control
            return control
        finally:
            store.close()

    def try_get(self, path: str) -> Any:
        try:
            return self.get("daemon", path)
        except DependencyError:
            return None


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with Site(tmp_path / "site") as made:
        made.start()
        yield made


def wait_ready(site: Site, daemon: subprocess.Popen[bytes], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        assert daemon.poll() is None, site.log.read_text(errors="replace")[-3000:]
        try:
            if requests.get(f"{site.urls['daemon']}/-/ready", timeout=2).ok:
                return
        except requests.RequestException:
            pass
        time.sleep(0.05)
    raise AssertionError(f"never ready:\n{site.log.read_text(errors='replace')[-3000:]}")


def settle(site: Site, uuid: str) -> None:
    """Lets the daemon live until nothing is under way and the GPU's work has moved."""
    daemon = site.live()
    try:
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline:
            assert daemon.poll() is None, site.log.read_text(errors="replace")[-3000:]
            told = site.try_get("api/v1/incidents")
            moves = site.try_get("api/v1/migrations")
            mine = [i for i in (told or {}).get("incidents", []) if i["gpu_uuid"] == uuid]
            still = [
                m for m in (moves or {}).get("migrations", []) if MigrationPhase(m["phase"]).is_open
            ]
            if mine and mine[0]["moved"] and moves is not None and not still:
                return
            time.sleep(0.3)
        raise AssertionError(
            f"not settled: {mine} {still}\n{site.log.read_text(errors='replace')[-3000:]}"
        )
    finally:
        daemon.kill()
        daemon.wait()


def one_of_each_model(site: Site) -> list[Target]:
    """Every model has a spare host of its own, so that each of them can move."""
    found: dict[str, Target] = {}
    for seed in range(100):
        target = choose_target(site, seed)
        found.setdefault(target.model, target)
    return list(found.values())


@pytest.mark.timeout(900)
def test_fifty_kills_start_nothing_twice_and_forget_nothing(site: Site) -> None:
    chance = random.Random(1)
    daemon = site.live()
    began = time.monotonic()
    wait_ready(site, daemon)
    ready_s = time.monotonic() - began
    daemon.kill()
    daemon.wait()

    site.slow_orders()
    kills, while_open = 0, 0
    targets = one_of_each_model(site)
    for number, target in enumerate(targets, start=1):
        site.post("exporter", "faults", {"kind": FAULT, "uuid": target.uuid})
        while kills < KILLS * number / len(targets):
            daemon = site.live()
            time.sleep(ready_s * chance.uniform(0.6, 1.0) + chance.uniform(0.0, 2.0))
            assert daemon.poll() is None, site.log.read_text(errors="replace")[-3000:]
            daemon.kill()
            daemon.wait()
            kills += 1
            while_open += any(m.phase.is_open for m in site.state().migrations.values())
        settle(site, target.uuid)

    log = site.get("scheduler", "operations")
    started = check_calls(log)
    control = site.state()
    check_remembered(control, log)
    for target in targets:
        incidents = [i for i in control.incidents.values() if i.gpu_uuid == target.uuid]
        assert [i.phase for i in incidents] == [IncidentPhase.CONFIRMED]
        assert {(incidents[0].id, "fence"), (incidents[0].id, "move")} <= started
    assert not [m for m in control.migrations.values() if m.phase is MigrationPhase.STUCK]
    assert kills >= KILLS
    print(f"ready after {ready_s:.1f} s; {while_open} of {kills} kills with an order under way")
    assert while_open >= 5
