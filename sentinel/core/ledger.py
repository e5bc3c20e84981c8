"""The working copy of one tick: every change to what survives a restart goes through here.

Decides what follows from a phase that was reached (a node is now fenced, a person is needed,
a target is held back); never which phase is reached. Lives for one tick and is owned by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sentinel.core import incident as incidents
from sentinel.core import migration as migrations
from sentinel.core.domain import (
    Action,
    ActionKind,
    Breaker,
    Control,
    Decision,
    Evidence,
    FaultPattern,
    Incident,
    IncidentPhase,
    Kind,
    Migration,
    MigrationPhase,
    Operation,
    PatternState,
    Pause,
    Quarantine,
    SubjectKind,
    Transition,
)
from sentinel.core.patterns import SHARED, Book, adopt, lived_on, shared_id
from sentinel.core.placement import ASSUMED, nodes_of

_BAD_END = (MigrationPhase.FAILED, MigrationPhase.STUCK)


class Ledger:
    """Mutable, for the length of one tick; `view` shows it to the guards as it now is."""

    def __init__(self, control: Control, cluster: str, now_s: float) -> None:
        self.cluster = cluster
        self.now_s = now_s
        self.incidents: dict[str, Incident] = dict(control.incidents)
        self.migrations: dict[str, Migration] = dict(control.migrations)
        self.quarantine: dict[str, Quarantine] = dict(control.quarantine)
        self.breaker = control.breaker
        self.pause = control.pause
        self.patterns = control.patterns  # replaced, never changed in place
        self.peaks = control.peaks
        self.decisions: list[Decision] = []
        self.transitions: list[Transition] = []
        self.actions: list[Action] = []

    def view(self) -> Control:
        return Control(
            self.incidents,
            self.migrations,
            self.quarantine,
            self.breaker,
            self.pause,
            self.now_s,
            self.patterns,
            self.peaks,
        )

    def note(self, entity: str, id: str, before: str, after: str, why: str) -> None:
        self.transitions.append(Transition(self.now_s, entity, id, before, after, why))

    def put(self, before: Incident | None, change: incidents.Change) -> Incident:
        """An incident as this tick leaves it."""
        after = incidents.settle(before, change.incident, self.now_s)
        self.incidents[after.id] = after
        if before is None:
            self.note("incident", after.id, "", IncidentPhase.SUSPECTED, after.pattern)
        phase = before.phase if before else IncidentPhase.SUSPECTED
        if phase is not after.phase:
            self.note("incident", after.id, phase, after.phase, change.why)
        elif before and (before.kind, before.severity) != (after.kind, after.severity):
            was, now = f"{before.kind}, {before.severity}", f"{after.kind}, {after.severity}"
            self.note("incident", after.id, phase, phase, f"was {was}, is {now}: {after.pattern}")
        return after

    def plan(self, migration: Migration) -> None:
        self.migrations[migration.operation_id] = migration
        self.note("migration", migration.operation_id, "", migration.phase, migration.reason)

    def turn(self, change: migrations.Change) -> None:
        """A migration as this tick leaves it, with all that follows from it."""
        after = change.migration
        before = self.migrations[after.operation_id]
        self.migrations[after.operation_id] = after
        if change.why and (before.phase is not after.phase or before.reason != change.why):
            self.note("migration", after.operation_id, before.phase, after.phase, change.why)
        if change.alarm:
            self.alarm(after, change.why)
        if before.phase is not after.phase:
            self._follow(after, change.why)

    def ask(self, kind: ActionKind, operation_id: str) -> None:
        self.actions.append(Action(kind, operation_id))

    def alarm(self, migration: Migration, why: str) -> Incident:
        """A migration that needs a person becomes an incident of its node, one per node."""
        text = f"{migration.operation} of {migration.node} ({migration.operation_id}): {why}"
        pattern = f"{migration.operation} {migration.phase}"
        before = next(
            (
                i
                for i in self.incidents.values()
                if i.is_open
                and i.subject.kind is SubjectKind.NODE
                and i.kind is Kind.UNKNOWN
                and i.node == migration.node
            ),
            None,
        )
        if before is not None:
            new = Evidence("migration", migration.operation_id, text, at_s=self.now_s)
            more = replace(before, pattern=pattern, evidence=(new, *before.evidence)[:12])
            return self.put(before, incidents.Change(more))
        opened = incidents.stuck_incident(
            self.cluster, migration.node, pattern, text, migration.operation_id, self.now_s
        )
        return self.put(None, incidents.Change(opened, text))

    def latch(self, why: str) -> None:
        if not self.breaker.latched:
            self.breaker = Breaker(True, why, self.now_s)
            self.note("breaker", "breaker", "closed", "latched", why)

    def set_pause(self, paused: bool, why: str) -> None:
        if paused is not self.pause.paused:
            before, after = ("running", "paused") if paused else ("paused", "running")
            self.note("pause", "pause", before, after, why)
        self.pause = Pause(paused, why, self.now_s)

    def keep_pattern(self, pattern: FaultPattern, why: str = "") -> None:
        """A pattern as people, or what has happened, now have it."""
        before = self.patterns.get(pattern.id)
        self.patterns = {**self.patterns, pattern.id: pattern}
        if why:
            was = before.state if before else PatternState.PROPOSED
            self.note("pattern", pattern.id, was, pattern.state, why)

    def relearn(self, learnt: tuple[FaultPattern, ...]) -> None:
        after = adopt(self.patterns, learnt)
        told = {p.id: p.name for p in learnt if p.shapes and p.id not in self.patterns}
        for id, name in told.items():
            self.note("pattern", id, "", PatternState.PROPOSED, f"learnt: {name}")
        self.patterns = after

    def remember_ended(self, before: Mapping[str, Incident], book: Book) -> None:
        """Counts what became of confirmed incidents that have ended in this tick."""
        for i in self.incidents.values():
            was = before.get(i.id)
            if i.is_open or i.confirmed_at_s is None or was is None or not was.is_open:
                continue
            known = self.patterns.get(i.like) or book.patterns.get(i.like)
            if id := shared_id(i):
                known = self.patterns.get(id) or FaultPattern(id, i.pattern, origin=SHARED)
            if known is not None:
                self.keep_pattern(replace(known.kept(), past=lived_on(known.past, i)))

    def hold_node(self, held: Quarantine, why: str) -> None:
        if held.node not in self.quarantine:
            self.note("quarantine", held.node, "", "held", why)
        self.quarantine[held.node] = held

    def free_node(self, node: str, why: str) -> None:
        if self.quarantine.pop(node, None) is not None:
            self.note("quarantine", node, "held", "free", why)

    def _follow(self, m: Migration, why: str) -> None:
        phase = m.phase
        if m.operation is Operation.UNFENCE:
            if phase is MigrationPhase.DONE:
                self.free_node(m.node, f"given back ({m.operation_id})")
            elif phase in (*_BAD_END, MigrationPhase.REFUSED):
                self.alarm(m, why)
            return
        if m.operation is Operation.FENCE and phase is MigrationPhase.DONE:
            held = Quarantine(m.node, m.incident_id, self.now_s, m.operation_id)
            self.hold_node(held, f"fenced ({m.operation_id})")
        if phase not in _BAD_END:
            return
        alarm = self.alarm(m, why)
        if m.operation is Operation.FENCE and phase is MigrationPhase.STUCK:
            held = Quarantine(m.node, m.incident_id, self.now_s, m.operation_id, fenced=False)
            self.hold_node(held, f"perhaps fenced ({m.operation_id})")
        if m.operation is Operation.MOVE:
            for node in sorted(nodes_of(m) - {m.node, *m.exclude_nodes}):
                if node not in self.quarantine and not node.startswith(ASSUMED):
                    held = Quarantine(node, alarm.id, self.now_s, fenced=False)
                    self.hold_node(held, f"target of {m.operation_id}, which ended {phase}")
