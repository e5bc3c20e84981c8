"""The whole thing, end to end, as a user runs it: real servers, real processes, HTTP alone."""

from __future__ import annotations

import json
import subprocess
import sys
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
