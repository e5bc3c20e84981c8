"""The daemon's order of work with verdicts from a script, for tests that kill it.

The store, the step, the outbox and the webhook are the real ones; telemetry is the
scheduler's own list of jobs. `kill_at` is "point:n": the process sends itself SIGKILL when it
passes that point for the n-th time. Run once per process; it ends when the work has moved.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import requests

from sentinel.core.domain import (
    FAULT,
    NORMAL,
    ActionKind,
    Control,
    Coverage,
    Evidence,
    Frame,
    Gpu,
    Incident,
    Judgement,
    Kind,
    Migration,
    MigrationPhase,
    Mode,
    Operation,
    Outcome,
    Severity,
    Step,
    Verdict,
    Workload,
)
from sentinel.core.policy import Limits, Policy, Times
from sentinel.core.step import Inputs, advance, check_invariants, resume
from sentinel.edges.hooks.webhook import WebhookHook
from sentinel.edges.outbox import Outbox
from sentinel.edges.store import Store

TICK_S = 0.05
FLEET = tuple(Gpu(f"GPU-{n}-{i}", f"node-{n}", i, "H100") for n in range(4) for i in range(2))
JOB = Workload("job", "train")
BAD = FLEET[0]
POLICY = Policy(
    mode=Mode.ACT,
    limits=Limits(fenced_percent=50.0, fleet_hold_percent=60.0),
    times=Times(
        tick_s=TICK_S,
        sent_timeout_s=1.5,
        poll_s=0.1,
        migration_deadline_s=20.0,
        verify_for_s=0.2,
        evidence_max_age_s=5.0,
    ),
    spare_nodes=frozenset({"node-3"}),
)


@dataclass
class Fate:
    """Where the process dies."""

    kill_at: str = ""

    def __post_init__(self) -> None:
        self._passed: Counter[str] = Counter()

    def reach(self, point: str, *, after_s: float = 0.0) -> None:
        self._passed[point] += 1
        if f"{point}:{self._passed[point]}" != self.kill_at:
            return
        if after_s:
            threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        else:
            os.kill(os.getpid(), signal.SIGKILL)


class MortalHook:
    def __init__(self, hook: WebhookHook, fate: Fate) -> None:
        self._hook, self._fate = hook, fate

    def post(self, migration: Migration, incident: Incident) -> Outcome:
        self._fate.reach("posting")
        self._fate.reach("posted", after_s=0.1)
        outcome = self._hook.post(migration, incident)
        self._fate.reach("answered")
        return outcome

    def query(self, migration: Migration) -> Outcome:
        outcome = self._hook.query(migration)
        self._fate.reach("asked")
        return outcome


class MortalInbox:
    def __init__(self, store: Store, fate: Fate) -> None:
        self._store, self._fate = store, fate

    def add_outcome(self, outcome: Outcome) -> None:
        self._store.add_outcome(outcome)
        self._fate.reach("kept")


def see(hook_url: str, now_s: float) -> tuple[Frame, Judgement]:
    jobs = requests.get(hook_url.replace("/migrate", "/jobs"), timeout=5).json()
    runs = {uuid for job in jobs for uuid in job["uuids"]}
    n = len(FLEET)
    frame = Frame(
        at_s=now_s,
        gpus=FLEET,
        metrics=("temp_c",),
        values=np.full((n, 1), 50.0),
        age_s=np.zeros((n, 1)),
        presence=np.zeros(n, np.int8),
        workloads=tuple(JOB if g.uuid in runs else None for g in FLEET),
        coverage=Coverage(n, n),
        last_seen_s=np.full(n, now_s),
    )
    kinds = np.full(n, NORMAL, np.int8)
    kinds[0] = FAULT
    seen = (Evidence("xid", "xid", "Xid 79: the GPU fell off the bus", 79.0, at_s=now_s),)
    verdict = Verdict(
        BAD,
        Kind.FAULT,
        Severity.CRITICAL,
        "off the bus",
        evidence=seen,
        may_fence=True,
        may_move=True,
        latch=True,
    )
    return frame, Judgement(kinds, np.zeros(n), (verdict,))


class Driver:
    def __init__(self, folder: Path, hook_url: str, secret: str, fate: Fate) -> None:
        self.url, self.fate = hook_url, fate
        self.store = Store.open(dir=folder)
        hook = MortalHook(WebhookHook(hook_url, secret, timeout_s=1.0), fate)
        self.outbox = Outbox(hook, MortalInbox(self.store, fate))
        before = self.store.load()
        assert self.store.fold() == before
        self.control, transitions = resume(before, time.time())
        self.control = replace(self.control, last_tick_s=time.time())
        nothing = Judgement(np.zeros(0, np.int8), np.zeros(0))
        self.store.commit(before, Step(self.control, nothing, (), transitions, ()))
        fate.reach("resumed")

    def tick(self) -> None:
        now_s = time.time()
        frame, judgement = see(self.url, now_s)
        outcomes = self.store.pending_outcomes()
        inputs = Inputs(frame=frame, outcomes=outcomes, policy=POLICY)
        step = advance(self.control, judgement, inputs, now_s)
        self.fate.reach("stepped")
        self.store.commit(self.control, step, outcomes=outcomes)
        self.control = step.control
        broken = check_invariants(self.control, POLICY)
        assert not broken, broken
        for turned in step.transitions:
            if turned.entity == "migration":
                self.fate.reach(turned.to_phase)
        for action in step.actions:
            planned = self.control.migrations[action.operation_id]
            if action.kind is ActionKind.QUERY:
                self.outbox.submit_query(planned)
                continue
            self.fate.reach("marking")
            leaving = self.store.mark_sent(planned, now_s=now_s, evidence_max_age_s=5.0)
            self.fate.reach("marked")
            if isinstance(leaving, Migration):
                migrations = {**self.control.migrations, leaving.operation_id: leaving}
                self.control = replace(self.control, migrations=migrations)
                self.outbox.submit_post(leaving, self.control.incidents[leaving.incident_id])

    @property
    def settled(self) -> bool:
        return settled(self.control)


def settled(control: Control) -> bool:
    """The node is fenced, its work has moved, and nothing is under way."""
    done = {m.operation for m in control.migrations.values() if m.phase is MigrationPhase.DONE}
    still = any(m.phase.is_open for m in control.migrations.values())
    return done >= {Operation.FENCE, Operation.MOVE} and not still


def run(folder: str, hook_url: str, secret: str, kill_at: str = "", for_s: float = 15.0) -> None:
    """Exit 0 when settled, 1 when time is up."""
    driver = Driver(Path(folder), hook_url, secret, Fate(kill_at))
    until = time.monotonic() + for_s
    while time.monotonic() < until and not driver.settled:
        began = time.monotonic()
        driver.tick()
        time.sleep(max(0.0, TICK_S - (time.monotonic() - began)))
    driver.outbox.close()
    driver.store.close()
    raise SystemExit(0 if driver.settled else 1)
