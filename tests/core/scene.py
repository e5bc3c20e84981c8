"""A small fleet, told in verdicts, that drives `advance` tick by tick."""

from dataclasses import replace

import numpy as np

from sentinel.core import domain
from sentinel.core.domain import (
    ActionKind,
    Backup,
    Command,
    Control,
    Coverage,
    Evidence,
    Frame,
    Gpu,
    Judgement,
    Kind,
    MigrationPhase,
    Mode,
    Operation,
    Outcome,
    OutcomeKind,
    OutcomeSource,
    Presence,
    Severity,
    Verdict,
    Workload,
)
from sentinel.core.placement import ModelRanks
from sentinel.core.policy import Limits, Policy
from sentinel.core.step import Inputs, advance, check_invariants, resume, sent

TICK_S = 15.0
CODES = {kind: code for code, kind in enumerate(domain.KINDS)}
JOB = Workload("job", "4711")
ROOMY = Limits(fenced_nodes=4, fenced_percent=100.0, open_moves=4, fleet_hold_gpus=6)


def verdict(gpu, kind=Kind.FAULT, severity=Severity.CRITICAL, **changes):
    """What judge would say: a fault latches and acts, a loss acts, a page of a deviation acts."""
    critical = severity is Severity.CRITICAL
    given = {
        "pattern": {Kind.FAULT: "off the bus", Kind.LOST: "GPU lost"}.get(kind, "overheating"),
        "score": 1.5,
        "evidence": (Evidence("xid" if kind is Kind.FAULT else "density", "x", f"seen {kind}"),),
        "may_fence": critical,
        "may_move": critical,
        "latch": kind is Kind.FAULT and critical,
    }
    return Verdict(gpu, kind, severity, **{**given, **changes})


def uuid(node, index=0):
    return f"GPU-{node}-{index}"


class Scene:
    """`bad` maps UUIDs to standing verdicts, `silent` holds nodes without telemetry, `work`
    maps UUIDs to workloads. POST actions are sent at once and kept in `posts`."""

    def __init__(self, nodes=6, per_node=4, spares=("node-5",), mode=Mode.ACT, **policy):
        names = [f"node-{n}" for n in range(nodes)]
        self.gpus = tuple(
            Gpu(f"GPU-{n}-{i}", name, i, "H100")
            for n, name in enumerate(names)
            for i in range(per_node)
        )
        self._by_uuid = {gpu.uuid: gpu for gpu in self.gpus}
        policy.setdefault("limits", ROOMY)
        self.policy = Policy(mode=mode, spare_nodes=frozenset(spares), **policy)
        self.control = Control()
        self.now = 1_000_000.0
        self.bad, self.work, self.silent, self.vanished = {}, {}, set(), set()
        self.posts, self.queries, self.decisions, self.transitions = [], [], [], []
        self.post = True
        self.view = None  # what the scheduler says, where one is asked

    def gpu(self, node, index=0):
        return self._by_uuid[uuid(node, index)]

    def runs(self, nodes, work=JOB):
        for gpu in self.gpus:
            if gpu.node in {f"node-{n}" for n in nodes}:
                self.work[gpu.uuid] = work

    def breaks(self, node, index=0, kind=Kind.FAULT, severity=Severity.CRITICAL, **changes):
        self.bad[uuid(node, index)] = verdict(self.gpu(node, index), kind, severity, **changes)

    def frame(self, blind=False, partial=False):
        count = len(self.gpus)
        presence = np.zeros(count, np.int8)
        for row, gpu in enumerate(self.gpus):
            if gpu.node in self.silent:
                presence[row] = Presence.HOST_SILENT
            elif gpu.uuid in self.vanished:
                presence[row] = Presence.VANISHED
        if blind:
            presence[:] = Presence.BLIND
        reporting = int(np.count_nonzero(presence == Presence.PRESENT))
        empty = np.empty((count, 0))
        return Frame(
            self.now,
            self.gpus,
            (),
            empty,
            empty,
            presence,
            tuple(self.work.get(gpu.uuid) for gpu in self.gpus),
            Coverage(count, reporting, blind, partial, "Prometheus is down" if blind else ""),
        )

    def judge(self, frame, resets=()):
        kinds = np.zeros(len(self.gpus), np.int8)
        kinds[frame.presence >= Presence.HOST_SILENT] = domain.UNKNOWN
        verdicts = []
        for row, gpu in enumerate(self.gpus):
            if gpu.uuid in self.bad and kinds[row] != domain.UNKNOWN:
                verdicts.append(self.bad[gpu.uuid])
                kinds[row] = CODES[self.bad[gpu.uuid].kind]
        rows = frozenset(r for r, gpu in enumerate(self.gpus) if gpu.uuid in resets)
        return Judgement(kinds, np.zeros(len(self.gpus)), tuple(verdicts), rows)

    def tick(self, *outcomes, commands=(), dt=TICK_S, blind=False, partial=False, resets=()):
        self.now += dt
        frame = self.frame(blind, partial)
        inputs = Inputs(
            frame, outcomes, tuple(commands), self.policy, ModelRanks(), scheduler=self.view
        )
        step = advance(self.control, self.judge(frame, resets), inputs, self.now)
        self.control = step.control
        assert check_invariants(step.control, self.policy) == ()
        self.decisions.extend(step.decisions)
        self.transitions.extend(step.transitions)
        self.queries = [a.operation_id for a in step.actions if a.kind is ActionKind.QUERY]
        for action in step.actions:
            if action.kind is ActionKind.POST and self.post:
                self.put(sent(self.control.migrations[action.operation_id], self.now))
                self.posts.append(action.operation_id)
        return step

    def put(self, migration):
        """What the daemon does when a call leaves."""
        known = {**self.control.migrations, migration.operation_id: migration}
        self.control = replace(self.control, migrations=known)

    def ticks(self, count, **kw):
        for _ in range(count):
            step = self.tick(**kw)
        return step

    def restart(self):
        self.control, transitions = resume(self.control, self.now)
        self.transitions.extend(transitions)

    def command(self, kind, target=""):
        return Command(len(self.transitions) + 1, kind, target, "ada", "", self.now)

    # ---- what the scheduler says ----

    def says(self, operation_id, kind, source=OutcomeSource.CALLBACK, placement=()):
        return Outcome(operation_id, kind, source, self.now, "", tuple(placement))

    def finishes(self, operation_id, placement=()):
        return self.says(operation_id, OutcomeKind.FINISHED, placement=placement)

    def fence(self):
        """Ticks until the node's fence has been called and is done."""
        self.tick()
        return self.tick(self.finishes(self.posts[-1]))

    def carry(self, migration):
        """The scheduler really moves the work of a move to its backups."""
        for gpu in self.gpus:
            leaves = gpu.node in migration.exclude_nodes
            if leaves and self.work.get(gpu.uuid) == migration.workload:
                del self.work[gpu.uuid]
        for backup in migration.backups:
            for target in backup.gpu_uuids:
                self.work[target] = migration.workload

    # ---- what the state says ----

    def incidents(self, open_only=True):
        found = self.control.incidents.values()
        return [i for i in found if i.is_open or not open_only]

    def incident(self, node=None, index=0):
        """The newest incident of a GPU, or the only open one."""
        if node is None:
            (only,) = self.incidents()
            return only
        own = [i for i in self.control.incidents.values() if i.gpu_uuid == uuid(node, index)]
        return max(own, key=lambda i: i.opened_at_s)

    def last(self, operation):
        own = [m for m in self.control.migrations.values() if m.operation is operation]
        return max(own, key=lambda m: (m.planned_at_s, m.attempt)) if own else None

    def phase(self, operation):
        found = self.last(operation)
        return found.phase if found else None

    def blocked(self):
        """The code of the newest decision."""
        return self.decisions[-1].blocked_by


def failed(scene, node=0, **kw):
    """The scene once a GPU of the node has failed."""
    scene.breaks(node, **kw)
    scene.tick()
    return scene


def moved(scene):
    """The scene after the whole story: failed, fenced, moved, verified."""
    failed(scene)
    scene.tick(scene.finishes(scene.posts[-1]))
    move = scene.last(Operation.MOVE)
    scene.carry(move)
    scene.tick(scene.finishes(move.operation_id, move.backups))
    scene.ticks(5)
    return scene


__all__ = [
    "JOB",
    "ROOMY",
    "TICK_S",
    "Backup",
    "MigrationPhase",
    "Operation",
    "Scene",
    "failed",
    "moved",
    "uuid",
    "verdict",
]
