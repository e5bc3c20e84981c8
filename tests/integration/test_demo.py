"""The whole thing, end to end, as a user runs it: real servers, real processes, HTTP alone."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.slow]

WITHIN_S = 240


def demo(fault: str) -> tuple[int, dict[str, Any], str]:
    argv = [sys.executable, "-m", "sentinel.lab.demo", "--json", "--fault", fault]
    done = subprocess.run(
        [*argv, "--for", str(WITHIN_S)],
        capture_output=True,
        text=True,
        timeout=WITHIN_S + 60,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.timeout(WITHIN_S + 90)
@pytest.mark.parametrize("fault", ["off-the-bus", "thermal"])
def test_a_fault_is_found_and_its_work_moves_to_a_backup(fault: str) -> None:
    code, story, log = demo(fault)
    assert (code, story["ok"], story["missing"], story["wrong"]) == (0, True, [], []), log
    at = {row["step"]: row["seconds_after_fault"] for row in story["timeline"]}
    order = [
        "fault injected",
        "first deviating sample",
        "incident confirmed",
        "hook called",
        "callback received",
        "migration done",
        "GPU repaired",
        "alert resolved",
    ]
    times = [at[step] for step in order]
    assert times == sorted(times), story["timeline"]
    assert at["incident confirmed"] <= at["alert received"] <= at["alert resolved"]


@pytest.mark.timeout(WITHIN_S + 90)
def test_an_error_of_the_application_moves_nothing() -> None:
    code, story, log = demo("xid-43")
    assert (code, story["ok"], story["missing"], story["wrong"]) == (0, True, [], []), log
    assert [row["step"] for row in story["timeline"]] == [
        "fault injected",
        "Xid scraped",
        "nothing moved",
    ]


def test_an_interrupted_demonstration_leaves_no_process_behind() -> None:
    argv = [sys.executable, "-m", "sentinel.lab.demo", "--json", "--for", "60"]
    running = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stderr is not None
    for line in running.stderr:
        if "starting the scheduler" in line:
            break
    children = running_under(running.pid)
    assert len(children) >= 4, children  # exporter, receiver, Prometheus, Alertmanager
    running.send_signal(signal.SIGTERM)
    out, log = running.communicate(timeout=60)
    assert (running.returncode, out) == (1, "")
    folder = Path(log.split("logs are in ")[1].split()[0])
    assert (folder / "exporter" / "exporter.log").exists()
    shutil.rmtree(folder)
    assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []


def running_under(parent: int) -> list[int]:
    """Its children; each of the lab's servers is one."""
    text = Path(f"/proc/{parent}/task").glob("*/children")
    return [int(pid) for path in text for pid in path.read_text().split()]


def test_the_faults_on_offer() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sentinel.lab.demo", "--list-faults"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert names[:5] == ["off-the-bus", "vanished", "ecc", "thermal", "clock"]
    assert {"xid-13", "xid-31", "xid-43", "xid-45"} <= set(names)
