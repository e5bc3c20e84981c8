"""Every part around the daemon goes away while it works, hangs, and comes back.

One small site of real programs, each a process of its own, is shared by all tests here and
lives through them in order: first outages of a healthy fleet, under which nothing may be
moved; then outages while a GPU fails, under which nothing may be lost or begun twice.
"""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import requests
import yaml
from prometheus_client.parser import text_string_to_metric_families

from sentinel.errors import DependencyError
from sentinel.lab import servers
from sentinel.lab.demo import choose_target
from sentinel.lab.exporter import scrape_configs
from sentinel.lab.stage import TICK_S, Stage
from sentinel.lab.story import Target
from tests.edges.promises import check_calls

pytestmark = [pytest.mark.integration, pytest.mark.slow]

FAULT = "off-the-bus"
POLL_S = 0.2
Found = TypeVar("Found")


class Site(Stage):
    """The stage of the demonstration, with a hand on each of its programs."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.parts: dict[str, servers.Server] = {}

    def _own(self, server: servers.Server) -> servers.Server:
        self.parts[server.name] = server
        return super()._own(server)

    def _start_daemon(self, config: Path) -> None:
        """With limits that let one fault after another be acted on."""
        plain = yaml.safe_load(config.read_text())
        plain["limits"] = {"fenced_nodes": 16, "fenced_percent": 100.0, "open_moves": 4}
        plain["hook"]["verify_for_s"] = 2.0
        config.write_text(yaml.safe_dump(plain))
        self.config = config
        folder = self.folder / "daemon"
        folder.mkdir(exist_ok=True)
        argv = [sys.executable, "-m", "sentinel.cli", "run", "--config", str(config)]
        port = int(self.urls["daemon"].rpartition(":")[2])
        daemon = servers.Server("daemon", folder, lambda _: argv, port)
        self._own(daemon)
        self._parts.callback(daemon.stop)
        daemon.start()

    def reasons(self) -> list[str]:
        """Why the daemon is not ready; empty when it is."""
        answer = requests.get(f"{self.urls['daemon']}/-/ready", timeout=5)
        found: list[str] = answer.json()["reasons"]
        assert (answer.status_code == 200) == (not found)
        return found

    def metric(self, name: str, **labels: str) -> float:
        text = requests.get(f"{self.urls['daemon']}/metrics", timeout=5).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == f"sentinel_{name}" and sample.labels == labels:
                    return float(sample.value)
        raise AssertionError(f"no metric {name} {labels}")

    def kinds(self) -> dict[str, set[str]]:
        """The GPUs of the last tick by the kind of their verdict."""
        found: dict[str, set[str]] = defaultdict(set)
        for gpu in self.get("daemon", "api/v1/gpus")["gpus"]:
            found[gpu["kind"]].add(gpu["uuid"])
        return dict(found)

    def incidents(self, state: str = "all") -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("daemon", f"api/v1/incidents?state={state}")[
            "incidents"
        ]
        return found

    def migrations(self, incident_id: str) -> list[dict[str, Any]]:
        """Oldest first."""
        answer = self.get("daemon", f"api/v1/migrations?state=all&incident_id={incident_id}")
        found: list[dict[str, Any]] = answer["migrations"]
        return sorted(found, key=lambda m: (m["planned_at"], m["attempt"]))

    def alerts(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("receiver", "alerts")
        return found

    def log(self) -> dict[str, list[dict[str, Any]]]:
        """All that the scheduler was asked for and did."""
        found: dict[str, list[dict[str, Any]]] = self.get("scheduler", "operations")
        return found

    def all_normal(self) -> bool:
        """Air that wanders on one host is watched for a quarter of an hour before it is told."""
        told = [
            i
            for i in self.incidents("open")
            if i["confirmed_at"] or i["pattern"] != "warm inlet air"
        ]
        return not self.reasons() and not told and set(self.kinds()) == {"normal"}

    def until(self, what: str, asked: Callable[[], Found | None], within_s: float = 20.0) -> Found:
        """The first answer that is true."""
        deadline = time.monotonic() + within_s
        last: object = None
        while time.monotonic() < deadline:
            try:
                if answer := asked():
                    return answer
                last = answer
            except (DependencyError, requests.RequestException) as error:
                last = error
            time.sleep(POLL_S)
        tail = self.parts["daemon"].log_tail(30)
        raise AssertionError(
            f"not within {within_s:.0f} s: {what} ({last})\n{self.sight()}\n{tail}"
        )

    def sight(self) -> str:
        """What the daemon says of the fleet, for a test that failed."""
        try:
            odd = [g for g in self.get("daemon", "api/v1/gpus")["gpus"] if g["kind"] != "normal"]
            return f"not ready: {self.reasons()}\nopen: {self.incidents('open')}\nodd: {odd[:5]}"
        except (DependencyError, requests.RequestException) as error:
            return f"no sight: {error}"

    @contextmanager
    def away(self, part: str) -> Iterator[None]:
        """Stopped in here, and started again on the same port and data."""
        self.parts[part].stop()
        try:
            yield
        finally:
            self.parts[part].start()

    @contextmanager
    def frozen(self, part: str) -> Iterator[None]:
        """In here it takes connections and never answers."""
        os.kill(self.parts[part].pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.parts[part].pid, signal.SIGCONT)

    def misbehave(self, **behaviour: float) -> None:
        """How the scheduler behaves until it is started again."""
        self._ask("PUT", "scheduler", "behaviour", behaviour)


@pytest.fixture(scope="module")
def living(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with Site(tmp_path_factory.mktemp("outages") / "site") as made:
        made.start()
        yield made


@pytest.fixture
def site(living: Site) -> Site:
    """Every part runs and the daemon watches."""
    living.until("every part is up", lambda: not living.reasons() and bool(living.log()))
    return living


@pytest.fixture
def calm(site: Site) -> Site:
    """And the whole fleet is well."""
    site.until("the fleet is normal", site.all_normal, 30.0)
    return site


@contextmanager
def nothing_but(site: Site, *alertnames: str) -> Iterator[None]:
    """In here the scheduler is not called, nothing is planned, and exactly these alerts are
    received: each fires once, and then resolves."""
    seen = len(site.alerts())
    calls = site.log()["calls"]
    yield
    site.until("the fleet is normal again", site.all_normal)
    site.until(
        "every alert is resolved",
        lambda: (
            len([a for a in site.alerts()[seen:] if a["status"] == "resolved"]) >= len(alertnames)
        ),
    )
    time.sleep(2 * TICK_S)  # for what must not follow
    told = [(a["labels"]["alertname"], a["status"]) for a in site.alerts()[seen:]]
    assert told == [(name, status) for name in alertnames for status in ("firing", "resolved")]
    assert site.log()["calls"] == calls
    assert not site.get("daemon", "api/v1/migrations?state=all")["migrations"]
    wrong = [
        i for i in site.incidents() if i["kind"] == "lost" or (i["confirmed_at"] and i["node"])
    ]
    assert not wrong


def blind(site: Site) -> bool:
    return any("blind" in reason for reason in site.reasons())


def test_prometheus_stopped_is_one_alert_and_no_move(calm: Site) -> None:
    with nothing_but(calm, "SentinelBlind"), calm.away("prometheus"):
        calm.until("the daemon says that it is blind", lambda: blind(calm))
        began = calm.metric("ticks_total", result="ok")
        time.sleep(6 * TICK_S)
        assert blind(calm)
        assert calm.metric("blind") == 1
        assert calm.metric("ticks_total", result="ok") >= began + 4, "blind ticks go on"


def test_prometheus_that_hangs_is_one_alert_and_no_move(calm: Site) -> None:
    with nothing_but(calm, "SentinelBlind"), calm.frozen("prometheus"):
        calm.until("the daemon says that it is blind", lambda: blind(calm))
        began = calm.metric("ticks_total", result="ok")
        time.sleep(4 * TICK_S)
        assert calm.metric("ticks_total", result="ok") >= began + 1, "each has a deadline"


def test_an_exporter_that_dies_for_the_whole_fleet_is_one_alert_and_no_move(calm: Site) -> None:
    with nothing_but(calm, "SentinelBlind"), calm.away("exporter"):
        calm.until("nothing is known of any GPU", lambda: set(calm.kinds()) == {"unknown"})
        time.sleep(3 * TICK_S)
        assert set(calm.kinds()) == {"unknown"}


def test_one_host_that_cannot_be_scraped_is_unknown_and_not_lost(calm: Site) -> None:
    target = choose_target(calm, 1)
    state = calm.get("exporter", "state")
    uuids = {gpu["uuid"] for gpu in state["gpus"] if gpu["host"] == target.host}
    prometheus = calm.parts["prometheus"]
    assert isinstance(prometheus, servers.PrometheusServer)
    good = scrape_configs(calm.parts["exporter"].port, state["hosts"])
    dead = f"127.0.0.1:{servers.free_port()}"
    elsewhere = [host for host in state["hosts"] if host != target.host]
    broken = scrape_configs(calm.parts["exporter"].port, elsewhere)
    row = scrape_configs(calm.parts["exporter"].port, [target.host])[0]["static_configs"][0]
    broken[0]["static_configs"].append({**row, "targets": [dead]})
    with nothing_but(calm):
        prometheus.configure(scrape_configs=broken, scrape_interval_s=TICK_S)
        try:
            calm.until("its GPUs are unknown", lambda: calm.kinds().get("unknown") == uuids)
            time.sleep(3 * TICK_S)
            assert calm.kinds().keys() == {"normal", "unknown"}
            assert calm.reasons() == []
        finally:
            prometheus.configure(scrape_configs=good, scrape_interval_s=TICK_S)


def test_a_state_that_cannot_be_written_is_told_until_it_can(calm: Site) -> None:
    with nothing_but(calm):
        database = sqlite3.connect(calm.folder / "state" / "state.db", isolation_level=None)
        database.execute("BEGIN IMMEDIATE")
        try:
            told = calm.until("the failed tick is told", calm.reasons)
            assert told[0].startswith("the last tick failed")
            assert "is locked by another program" in told[0]
            assert calm.metric("ticks_total", result="failed") >= 1
        finally:
            database.close()


def test_a_daemon_that_stood_still_takes_up_where_it_was(calm: Site) -> None:
    with nothing_but(calm), calm.frozen("daemon"):
        time.sleep(20 * TICK_S)


@pytest.fixture(scope="module")
def targets(living: Site) -> Iterator[Target]:
    """A GPU of each model: each has a spare host of its own."""
    found: dict[str, Target] = {}
    for seed in range(100):
        target = choose_target(living, seed)
        found.setdefault(target.model, target)
    return iter(found.values())


def fail(site: Site, target: Target) -> None:
    site.post("exporter", "faults", {"kind": FAULT, "uuid": target.uuid})


def incident_of(site: Site, target: Target) -> dict[str, Any] | None:
    mine = [i for i in site.incidents() if i["gpu_uuid"] == target.uuid and i["confirmed_at"]]
    assert len(mine) <= 1, "one fault is one incident"
    return mine[0] if mine else None


def settled(site: Site, target: Target) -> dict[str, Any] | None:
    """Its incident, once the work has moved and the node is fenced."""
    found = incident_of(site, target)
    return found if found and found["moved"] and found["fenced"] else None


def ordered(site: Site, incident_id: str) -> dict[str, Any] | None:
    """The first of its orders that the scheduler has kept."""
    mine = [o for o in site.log()["operations"] if o["order"]["incident"]["id"] == incident_id]
    return mine[0] if mine else None


def firing(site: Site, target: Target, since: int) -> list[dict[str, Any]]:
    return [
        alert
        for alert in site.alerts()[since:]
        if alert["labels"].get("gpu_uuid") == target.uuid and alert["status"] == "firing"
    ]


def test_alertmanager_away_while_a_gpu_fails_loses_nothing(
    site: Site, targets: Iterator[Target]
) -> None:
    target, alertmanager = next(targets), site.parts["alertmanager"]
    seen = len(site.alerts())
    with site.away("alertmanager"):
        fail(site, target)
        incident = site.until("the work moves all the same", lambda: settled(site, target), 40.0)
        assert site.metric("alertmanager_up", url=alertmanager.url) == 0
        assert site.reasons() == []
    first = site.until("the alert arrives", lambda: firing(site, target, seen))
    assert {a["annotations"]["incident_id"] for a in first} == {incident["id"]}

    again = len(site.alerts())
    with site.away("alertmanager"):
        shutil.rmtree(alertmanager.dir / "data")
    second = site.until("the alert arrives once more", lambda: firing(site, target, again))
    assert second[0]["startsAt"] == first[-1]["startsAt"]
    assert {(incident["id"], "fence"), (incident["id"], "move")} <= check_calls(site.log())


def test_a_scheduler_that_is_away_refuses_and_one_later_try_goes_through(
    site: Site, targets: Iterator[Target]
) -> None:
    target = next(targets)
    with site.away("scheduler"):
        fail(site, target)
        incident = site.until("the incident", lambda: incident_of(site, target))
        refused = site.until(
            "two tries are refused",
            lambda: [m for m in site.migrations(incident["id"]) if m["phase"] == "refused"][1:],
            30.0,
        )
        assert all("not delivered" in m["reason"] for m in refused)
        told = incident_of(site, target)
        assert told is not None
        assert "not reached" in told["hold_reason"]

    site.until("the next try goes through", lambda: settled(site, target), 60.0)
    log = site.log()
    assert {(incident["id"], "fence"), (incident["id"], "move")} <= check_calls(log)
    ids = {m["operation_id"] for m in site.migrations(incident["id"]) if m["phase"] == "refused"}
    assert not ids & {call["operation_id"] for call in log["calls"]}


def test_a_scheduler_that_dies_while_it_answers_is_asked_and_goes_on(
    site: Site, targets: Iterator[Target]
) -> None:
    target, scheduler = next(targets), site.parts["scheduler"]
    # the order is kept and begun, no callback tells of it, and its answer never comes
    site.misbehave(accept_delay_s=30.0, no_callback=-1)
    fail(site, target)
    incident = site.until("the incident", lambda: incident_of(site, target))
    fence = site.until("the order arrives", lambda: ordered(site, incident["id"]))
    scheduler.kill()
    site.until(
        "nobody knows what became of it",
        lambda: [m["phase"] for m in site.migrations(incident["id"])] == ["unknown"],
    )
    time.sleep(2 * TICK_S)
    assert [m["phase"] for m in site.migrations(incident["id"])] == ["unknown"]  # it waits

    scheduler.start()
    site.until("it goes on to the end", lambda: settled(site, target), 40.0)
    log = site.log()
    assert {(incident["id"], "fence"), (incident["id"], "move")} <= check_calls(log)
    mine = [c for c in log["calls"] if c["operation_id"] == fence["operation_id"]]
    assert [c["method"] for c in mine].count("POST") == 1
    assert ("GET", 200) in {(c["method"], c["answered"]) for c in mine}


def children(pid: int) -> set[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return {int(child) for task in tasks for child in task.read_text().split()}


def test_sigterm_ends_cleanly_while_prometheus_hangs_and_a_child_learns(site: Site) -> None:
    site.parts["daemon"].stop()
    plain = yaml.safe_load(site.config.read_text())
    plain["learn"]["every_h"] = 3 * TICK_S / 3600.0
    site.config.write_text(yaml.safe_dump(plain))
    argv = [sys.executable, "-m", "sentinel.cli", "run", "--config", str(site.config)]
    with (site.folder / "last.log").open("wb") as log:
        daemon = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        found = site.until("a child learns", lambda: children(daemon.pid))
        with site.frozen("prometheus"):
            time.sleep(1.5 * TICK_S)
            daemon.terminate()
            assert daemon.wait(5) == 0
        assert not [child for child in found if Path(f"/proc/{child}").exists()]
    finally:
        daemon.kill()
        daemon.wait()
