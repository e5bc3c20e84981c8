"""Whatever comes in, in whatever order: nothing starts twice and nothing acts when held.

A storm of verdicts, outages, lost and doubled and false answers, commands, crashes and
restarts drives the real tick; its seed is what a failure prints. The judges here share no
code with what they judge.
"""

import random
from collections import Counter, defaultdict
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from sentinel.core import breaker, guards, migration, placement
from sentinel.core.domain import (
    Backup,
    Breaker,
    CommandKind,
    Control,
    IncidentPhase,
    Kind,
    MigrationPhase,
    Mode,
    Operation,
    OutcomeKind,
    OutcomeSource,
    Severity,
    Workload,
    from_plain,
    to_plain,
)
from sentinel.core.policy import Times
from sentinel.core.step import housekeep, sent
from tests.core.scene import ROOMY, Scene, uuid

P, K, S = MigrationPhase, OutcomeKind, OutcomeSource
ENDED = {P.DONE, P.CANCELLED, P.REFUSED, P.FAILED, P.STUCK}
NODES, PER_NODE = 8, 2
KINDS = [k for k in CommandKind if "pattern" not in k]  # these change names, never what is done
JOBS = [Workload("job", "a"), Workload("job", "b")]
TIMES = replace(
    Times(),
    deviant_for_s=30.0,
    clear_for_s=45.0,
    clear_latched_for_s=120.0,
    migration_deadline_s=240.0,
    verify_for_s=30.0,
)


class Storm:
    """One seeded run. `calls` keeps, for each operation, when it left and when a GET said
    404; `seen` counts what the run came through, so that a storm in a glass is noticed."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        limits = replace(ROOMY, open_moves=dice.choice([1, 2]), fenced_nodes=dice.choice([2, 4]))
        limits = replace(limits, cooldown_s=dice.choice([0.0, 300.0]), attempts_per_node=20)
        limits = replace(limits, fleet_hold_gpus=dice.choice([4, 6]))
        mode = dice.choices([Mode.ACT, Mode.OBSERVE], [9, 1])[0]
        spares = ("node-5", "node-6", "node-7")
        scene = Scene(NODES, PER_NODE, spares, mode, limits=limits, times=TIMES)
        scene.runs([0, 1], JOBS[0])
        scene.runs([2], JOBS[1])
        scene.post = False
        self.scene = scene
        self.outcomes, self.commands, self.late = [], [], []
        self.calls = defaultdict(list)
        self.ended = {}
        self.seen = Counter()

    def run(self, ticks: int) -> Counter:
        for _ in range(ticks):
            for chance, event in (
                (0.12, self.breaks),
                (0.25, self.heals),
                (0.03, self.falls_silent),
                (0.10, self.runs),
                (0.25, self.honest_answer),
                (0.15, self.false_answer),
                (0.15, self.commanded),
                (0.04, self.crashes),
            ):
                if self.dice.random() < chance:
                    event()
            self.tick()
            self.judge()
        return self.seen

    # ---- what happens ----

    def breaks(self):
        kind = self.dice.choices([Kind.DEVIANT, Kind.FAULT, Kind.LOST], [3, 3, 2])[0]
        severity = self.dice.choices([Severity.CRITICAL, Severity.WARNING], [3, 1])[0]
        n, i = self.dice.randrange(NODES), self.dice.randrange(PER_NODE)
        self.scene.breaks(n, i, kind, severity)

    def heals(self):
        for name in self.dice.sample(sorted(self.scene.bad), k=min(2, len(self.scene.bad))):
            del self.scene.bad[name]
        if self.dice.random() < 0.7:
            self.scene.silent.clear()

    def falls_silent(self):
        self.scene.silent.add(f"node-{self.dice.randrange(NODES)}")

    def runs(self):
        n, job = self.dice.randrange(5), self.dice.choice([None, *JOBS])
        for i in range(PER_NODE):
            self.scene.work.pop(uuid(n, i), None)
            if job:
                self.scene.work[uuid(n, i)] = job

    def honest_answer(self):
        """The scheduler gets on with everything that reached it."""
        for m in self.scene.control.migrations.values():
            if m.phase in ENDED or not self.calls[m.operation_id]:
                continue
            if self.dice.random() < 0.3:
                self.outcomes.append(self.scene.says(m.operation_id, K.ACCEPTED, S.POST))
                continue
            if m.operation is Operation.MOVE:
                self.scene.carry(m)
            placed = m.backups if self.dice.random() < 0.8 else ()
            self.outcomes.append(self.scene.finishes(m.operation_id, placed))
            self.late.append(self.outcomes[-1])

    def false_answer(self):
        migrations = self.scene.control.migrations
        known = sorted(migrations) or ["op-unheard-of"]
        if self.dice.random() < 0.7:
            known = sorted(op for op, m in migrations.items() if m.phase not in ENDED) or known
        kind, source = self.dice.choice(list(K)), self.dice.choice(list(S))
        n = self.dice.randrange(NODES)
        placed = self.dice.choice([(), (Backup(f"node-{n}", (uuid(n),)),)])
        self.outcomes.append(self.scene.says(self.dice.choice(known), kind, source, placed))
        if self.late and self.dice.random() < 0.5:
            self.outcomes.append(self.dice.choice(self.late))

    def commanded(self):
        kind = self.dice.choices(
            KINDS,
            [{CommandKind.PAUSE: 1, CommandKind.RELEASE: 9}.get(k, 3) for k in KINDS],
        )[0]
        known = sorted(self.scene.control.migrations) or [""]
        target = ""
        if kind is CommandKind.CANCEL:
            target = self.dice.choice(known)
        elif kind is CommandKind.RELEASE:
            n = self.dice.randrange(NODES)
            target = self.dice.choice([f"node-{n}", uuid(n)])
        self.commands.append(self.scene.command(kind, target))

    def crashes(self):
        stored = from_plain(Control, to_plain(self.scene.control))
        assert stored == self.scene.control
        self.scene.restart()
        self.seen["restart"] += 1
        if self.dice.random() < 0.5:
            self.scene.control = housekeep(self.scene.control, self.scene.now)

    def tick(self):
        scene, dice = self.scene, self.dice
        outcomes, commands = tuple(self.outcomes), tuple(self.commands)
        self.outcomes, self.commands = [], []
        for o in outcomes:
            if o.kind is K.NOT_FOUND and o.source is S.GET:
                self.calls[o.operation_id].append("404")
        blind, partial = dice.random() < 0.04, dice.random() < 0.04
        dt = dice.choices([15.0, 1.0, 3600.0, -600.0], [60, 5, 1, 1])[0]
        step = scene.tick(*outcomes, commands=commands, blind=blind, partial=partial, dt=dt)
        for action in step.actions:
            m = scene.control.migrations[action.operation_id]
            if action.kind == "post" and dice.random() < 0.75:
                self.leaves(m, blind or partial)
            elif action.kind == "query" and dice.random() < 0.5:
                reached = "post" in self.calls[m.operation_id] and dice.random() < 0.7
                answer = K.RUNNING if reached else K.NOT_FOUND
                self.outcomes.append(scene.says(m.operation_id, answer, S.GET))

    # ---- the judges ----

    def leaves(self, m, unseen):
        """A call leaves: this is where every promise is kept or broken."""
        scene, control = self.scene, self.scene.control
        earlier = self.calls[m.operation_id]
        assert "post" not in earlier or earlier[-1] == "404", "no 404 since it last left"
        assert not control.pause.paused
        assert scene.policy.mode is Mode.ACT
        if m.operation is not Operation.UNFENCE:
            incident = control.incidents[m.incident_id]
            assert not control.breaker.latched
            assert not unseen
            assert len(scene.silent) <= 1  # of eight nodes: two leave 75 % of the fleet
            assert incident.worst is Severity.CRITICAL
            assert incident.confirmed_at_s is not None
            assert incident.phase in (IncidentPhase.CONFIRMED, IncidentPhase.CLEARING)
            assert not incident.released_by
        if m.operation is Operation.MOVE:
            assert control.quarantine[m.node].fenced
            for target in (u for b in m.backups for u in b.gpu_uuids):
                assert target not in scene.bad
                assert target not in scene.work
                assert scene.gpu(*target.split("-")[1:]).node not in scene.silent
        earlier.append("post")
        self.seen[f"{m.operation} sent"] += 1
        scene.put(sent(m, scene.now))

    def judge(self):
        control = self.scene.control
        busy, started = Counter(), Counter()
        for op, m in control.migrations.items():
            if op in self.ended:
                assert m.phase is self.ended[op], f"{op} was {self.ended[op]}, is {m.phase}"
            elif m.phase in ENDED:
                self.ended[op] = m.phase
                self.seen[f"{m.operation} {m.phase}"] += 1
            if m.phase not in ENDED:
                busy.update({m.node, *m.exclude_nodes, *(b.node for b in m.backups)})
            left = self.calls[op] and self.calls[op][-1] == "post"
            if left and m.phase is not P.REFUSED and m.operation is not Operation.UNFENCE:
                started[m.incident_id, m.operation] += 1
        assert all(count == 1 for count in busy.values()), busy
        assert all(count == 1 for count in started.values()), started
        limits = self.scene.policy.limits
        going = [m for m in control.migrations.values() if m.phase not in ENDED]
        assert sum(m.operation is Operation.MOVE for m in going) <= limits.open_moves
        fenced = {q.node for q in control.quarantine.values() if q.operation_id}
        fenced |= {m.node for m in going if m.operation is Operation.FENCE}
        assert len(fenced) <= limits.fenced_nodes
        self.seen["latched"] += control.breaker.latched


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_nothing_starts_twice_and_nothing_acts_when_held(seed):
    Storm(seed).run(150)


def test_the_storm_reaches_every_corner():
    """The judges above would pass a world in which nothing ever happens."""
    seen = Counter()
    for seed in range(40):
        seen += Storm(seed).run(150)
    for corner in (
        "fence sent",
        "move sent",
        "unfence sent",
        "fence done",
        "fence refused",
        "fence failed",
        "fence stuck",
        "fence cancelled",
        "move done",
        "move refused",
        "move failed",
        "move cancelled",
        "unfence done",
        "restart",
        "latched",
    ):
        assert seen[corner] > 0, f"{corner} never came about: {seen}"


def _any_unknown_may_leave(m):
    return m.phase in (P.PLANNED, P.UNKNOWN)


MUTANTS = {
    "a pause, the mode and the breaker forbid nothing": (guards, "_stopped", lambda *_: None),
    "a paused daemon still unfences": (guards, "why_not_unfence", lambda *_: None),
    "what failed is tried again": (guards, "_tried", lambda *_: None),
    "little telemetry is enough": (breaker, "coverage_reason", lambda *_: None),
    "weak evidence is enough": (guards, "_evidence", lambda *_: None),
    "the fenced nodes are not counted": (guards, "_fenced_nodes", lambda *_: None),
    "a node may be in two migrations": (guards, "_node_taken", lambda *_: None),
    "a sick GPU may be a backup": (placement.Fleet, "healthy", lambda *_: True),
    "an unknown call leaves again unasked": (migration, "may_leave", _any_unknown_may_leave),
    "what has ended begins again": (migration, "_too_late", None),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_judges_notice_what_is_broken(mutant, monkeypatch):
    module, name, broken = MUTANTS[mutant]
    if broken is None:

        def broken(m, outcome, said):
            return migration._while_started(m, outcome, outcome.at_s, said)

    monkeypatch.setattr(module, name, broken)
    storms = (Storm(seed).run(150) for seed in range(400))
    with pytest.raises((AssertionError, ValueError)):
        Counter(bool(seen) for seen in storms)


@pytest.mark.parametrize("seed", range(5))
def test_a_healed_world_comes_to_rest(seed):
    """After any storm, with an honest scheduler and a person, nothing stays open."""
    storm = Storm(seed)
    storm.run(100)
    scene = storm.scene
    scene.bad.clear()
    scene.silent.clear()
    scene.post = True
    clear = [CommandKind.RESUME, CommandKind.RESET_BREAKER]
    scene.policy = replace(scene.policy, mode=Mode.ACT)
    for _ in range(300):
        answers = []
        for m in scene.control.migrations.values():
            if m.phase in (P.SENT, P.RUNNING, P.UNKNOWN):
                answers.append(scene.finishes(m.operation_id, m.backups))
            if m.operation is Operation.MOVE and m.phase is P.VERIFYING:
                scene.carry(m)
        names = sorted(set(scene.control.quarantine) | {i.node for i in scene.incidents()} - {""})
        commands = [scene.command(kind) for kind in clear]
        commands += [scene.command(CommandKind.RELEASE, name) for name in names]
        scene.tick(*answers, commands=commands)
    assert scene.incidents() == []
    assert scene.control.quarantine == {}
    assert not any(m.phase.is_open for m in scene.control.migrations.values())
    assert scene.control.breaker == Breaker()
