"""What must hold however often the daemon was killed, told from the scheduler's own log."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from sentinel.core.domain import Control


def check_calls(log: dict[str, list[dict[str, Any]]]) -> set[tuple[str, str]]:
    """An order leaves again only after a 404, and of one incident and kind one is started.

    `log` is the answer of the scheduler's GET /operations. Returns (incident, action) of all
    that was started.
    """
    calls: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for call in log["calls"]:
        calls[call["operation_id"]].append((call["method"], call["answered"]))
    for id, made in calls.items():
        allowed = True
        for method, answered in made:
            if method == "POST":
                assert allowed, f"{id} was ordered again without a 404: {made}"
                allowed = False
            elif answered == 404:
                allowed = True
    started: dict[tuple[str, str], list[str]] = defaultdict(list)
    for operation in log["operations"]:
        assert operation["started"] <= 1, f"{operation['operation_id']} was started twice"
        if operation["started"]:
            key = operation["order"]["incident"]["id"], operation["action"]
            started[key].append(operation["operation_id"])
    twice = {key: ids for key, ids in started.items() if len(ids) > 1}
    assert not twice, f"started more than once: {twice}"
    return set(started)


def check_remembered(control: Control, log: dict[str, list[dict[str, Any]]]) -> None:
    """Whatever the scheduler was asked for has an end in the store, and the same one."""
    for operation in log["operations"]:
        known = control.migrations.get(operation["operation_id"])
        assert known is not None, f"{operation['operation_id']} was forgotten"
        assert not known.phase.is_open, f"{known.operation_id} is still {known.phase}"
