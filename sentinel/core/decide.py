"""What is done about the incidents that stand: fence first, then move, or hold and say why.

Decides which operations are planned and checks the plans again until they leave; never
sends anything. Every answer is written down once, when it changes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sentinel.core import guards, migration, placement
from sentinel.core.domain import (
    Backup,
    Choice,
    Decision,
    Incident,
    Migration,
    MigrationPhase,
    Operation,
    Reason,
    Severity,
    SubjectKind,
    Workload,
)
from sentinel.core.guards import Facts
from sentinel.core.incident import Change, severity_rank, stands
from sentinel.core.ledger import Ledger
from sentinel.core.placement import Fleet, ModelRanks, Need

_STOPPED = ("mode", "paused")


@dataclass(frozen=True, slots=True)
class _Answer:
    wanted: Choice
    choice: Choice
    code: str
    text: str

    @property
    def key(self) -> str:
        return f"{self.wanted}:{self.choice}:{self.code}"


def _hold(wanted: Choice, reason: Reason) -> _Answer:
    return _Answer(wanted, Choice.HOLD, reason.code, reason.text)


def decide(ledger: Ledger, fleet: Fleet, models: ModelRanks, facts: Facts) -> None:
    """Answers every incident that stands: all fences before all moves, the worst first, so
    that the bad nodes of one workload join its move."""
    waiting = sorted(
        (
            i
            for i in ledger.incidents.values()
            if i.subject.kind is SubjectKind.GPU and stands(i) and not i.released_by
        ),
        key=lambda i: (-severity_rank(i.worst), i.opened_at_s, i.id),
    )
    if not waiting:
        return
    fences = {i.id: _fence(i, ledger, facts) for i in waiting}
    leave = guards.bad_nodes(ledger.view(), facts.policy)
    for incident in waiting:
        fence = fences[incident.id]
        answers = [fence] if fence else []
        if fence is None or (fence.code in _STOPPED and _has_work(incident, fleet)):
            answers.append(_move(incident, leave, ledger, fleet, models, facts))
        _record(incident, answers, ledger)


def recheck(ledger: Ledger, fleet: Fleet, facts: Facts) -> None:
    """Asks the guards again about every plan that has not left: what no longer holds is
    cancelled, the rest is as fresh as this tick. What a person asked for waits instead."""
    for plan in list(ledger.migrations.values()):
        if not migration.may_leave(plan):
            continue
        if plan.operation is Operation.UNFENCE:
            _recheck_unfence(plan, ledger, facts)
            continue
        incident = ledger.incidents.get(plan.incident_id)
        if incident is None or not stands(incident):
            reason: Reason | None = Reason("recovered", "its evidence no longer stands")
            fresh = plan
        else:
            reason = _why_not_leave(plan, incident, ledger, fleet, facts)
            fresh = replace(plan, evidence_at_s=incident.last_tick_s, epoch=facts.epoch)
        if reason is None:
            ledger.migrations[plan.operation_id] = fresh
        else:
            _cancel(plan, f"{reason.code}: {reason.text}", ledger)


def _recheck_unfence(plan: Migration, ledger: Ledger, facts: Facts) -> None:
    reason = guards.why_not_unfence(ledger.view(), facts)
    fresh = replace(plan, evidence_at_s=facts.now_s, epoch=facts.epoch)
    if reason is not None:
        deadline_s = facts.now_s + facts.policy.times.migration_deadline_s
        fresh = replace(fresh, reason=f"waits: {reason.text}", deadline_s=deadline_s)
    ledger.migrations[plan.operation_id] = fresh


def _why_not_leave(
    plan: Migration, incident: Incident, ledger: Ledger, fleet: Fleet, facts: Facts
) -> Reason | None:
    if plan.operation is Operation.FENCE:
        return guards.why_not_fence(incident, ledger.view(), facts, own=plan)

    def need() -> Need | Reason:
        found = _need(incident, frozenset(plan.exclude_nodes), fleet)
        return found if isinstance(found, Reason) else _fits(plan, found)

    def backups(_: Need) -> tuple[Backup, ...] | Reason:
        closed = guards.closed_nodes(facts) & {b.node for b in plan.backups}
        if closed:
            return Reason("no_backup", f"{min(closed)} takes no work now, says the scheduler")
        return placement.still_free(plan.backups, fleet) or plan.backups

    return guards.why_not_move(incident, need, backups, ledger.view(), facts, own=plan)


def _fits(plan: Migration, need: Need) -> Need | Reason:
    """Whether the plan is still one for the work as it now is."""
    reserved = sum(len(b.gpu_uuids) for b in plan.backups)
    assumed = any(b.node.startswith(placement.ASSUMED) for b in plan.backups)
    if need.workload != plan.workload:
        return Reason("no_workload", f"other work runs there now: {need.workload.id}")
    if len(need.models) > reserved and not assumed:
        text = f"the work needs {len(need.models)} GPUs now, {reserved} are reserved"
        return Reason("no_backup", text)
    return need


def _cancel(plan: Migration, why: str, ledger: Ledger, by: str = "") -> None:
    over = migration.ended(plan, MigrationPhase.CANCELLED, ledger.now_s, why)
    ledger.turn(migration.Change(replace(over, cancelled_by=by), why))


def cancel(plan: Migration, by: str, why: str, ledger: Ledger) -> None:
    """A person's word: unlike a guard's, it also keeps the operation from being planned
    again for this incident."""
    _cancel(plan, f"cancelled by {by}" + (f": {why}" if why else ""), ledger, by)


def work_on(incident: Incident, fleet: Fleet) -> Workload | Reason:
    """The work that a move would carry. What a GPU says of itself counts; of one that says
    nothing, the last that was known, unless it has turned up somewhere else since: a
    scheduler that has already restarted it must not have it killed."""
    row = fleet.rows.get(incident.gpu_uuid or "")
    if row is not None and fleet.present(row):
        return fleet.frame.workloads[row] or Reason("no_workload", "no work runs on this GPU")
    work = incident.workload
    if work is None:
        return Reason("no_workload", "which work ran on this GPU is not known")
    running = fleet.nodes_running(work)
    if not incident.workload_nodes and incident.node not in running:
        return Reason("no_workload", f"whether {work.id} still runs here is not known")
    elsewhere = set(running) - set(incident.workload_nodes or running)
    if elsewhere:
        return Reason("no_workload", f"{work.id} already runs on {', '.join(sorted(elsewhere))}")
    return work


def _need(incident: Incident, leave: frozenset[str], fleet: Fleet) -> Need | Reason:
    work = work_on(incident, fleet)
    return work if isinstance(work, Reason) else placement.need_of(work, incident, leave, fleet)


def _has_work(incident: Incident, fleet: Fleet) -> bool:
    return isinstance(work_on(incident, fleet), Workload)


def _own_open(incident: Incident, operation: Operation, ledger: Ledger) -> Migration | None:
    return next(
        (
            m
            for m in ledger.migrations.values()
            if m.incident_id == incident.id and m.operation is operation and m.phase.is_open
        ),
        None,
    )


def _fence(incident: Incident, ledger: Ledger, facts: Facts) -> _Answer | None:
    """None once the node is fenced."""
    if incident.fenced:
        return None
    own = _own_open(incident, Operation.FENCE, ledger)
    if own is not None:
        return _Answer(Choice.FENCE, Choice.FENCE, "", own.reason)
    reason = guards.why_not_fence(incident, ledger.view(), facts)
    if reason is not None:
        return _hold(Choice.FENCE, reason)
    accused = (
        i.gpu_uuid or ""
        for i in ledger.incidents.values()
        if i.node == incident.node
        and i.subject.kind is SubjectKind.GPU
        and stands(i)
        and _acts(i, i.may_fence, facts.policy.fence_severity)
    )
    text = f"fence {incident.node}: {incident.pattern}, {incident.worst}"
    plan = migration.planned(
        incident,
        Operation.FENCE,
        migration.attempts(ledger.view(), incident.id, Operation.FENCE) + 1,
        facts.now_s,
        facts.now_s + facts.policy.times.migration_deadline_s,
        facts.epoch,
        gpu_uuids=tuple(sorted(accused)),
        reason=text,
    )
    ledger.plan(plan)
    return _Answer(Choice.FENCE, Choice.FENCE, "", text)


def _acts(incident: Incident, may: bool, need: Severity) -> bool:
    return may and severity_rank(incident.worst) >= severity_rank(need)


def _move(
    incident: Incident,
    leave: frozenset[str],
    ledger: Ledger,
    fleet: Fleet,
    models: ModelRanks,
    facts: Facts,
) -> _Answer:
    if incident.moved and not _acts(incident, incident.may_move, facts.policy.move_severity):
        # another incident's move took the work along: this one would not have asked for it
        return _hold(Choice.MOVE, Reason("moved", "its work was moved for another GPU's sake"))
    if incident.moved:
        return _Answer(Choice.MOVE, Choice.MOVE, "", "its work has moved")
    own = _own_open(incident, Operation.MOVE, ledger)
    if own is not None:
        return _Answer(Choice.MOVE, Choice.MOVE, "", own.reason)
    found: list[tuple[Need, tuple[Backup, ...]]] = []

    def backups(need: Need) -> tuple[Backup, ...] | Reason:
        avoid = _refused_by(incident, ledger) | guards.closed_nodes(facts)
        answer = placement.place(need, fleet, ledger.view(), facts.policy, models, avoid=avoid)
        if not isinstance(answer, Reason):
            found.append((need, answer))
        return answer

    reason = guards.why_not_move(
        incident, lambda: _need(incident, leave, fleet), backups, ledger.view(), facts
    )
    if reason is not None:
        return _hold(Choice.MOVE, reason)
    plan = _plan_move(incident, *found[0], ledger, fleet, facts)
    ledger.plan(plan)
    return _Answer(Choice.MOVE, Choice.MOVE, "", plan.reason)


def _plan_move(
    incident: Incident,
    need: Need,
    backups: tuple[Backup, ...],
    ledger: Ledger,
    fleet: Fleet,
    facts: Facts,
) -> Migration:
    accused = {i.gpu_uuid for i in ledger.incidents.values() if stands(i)} | {incident.gpu_uuid}
    leaving = tuple(
        uuid
        for uuid in need.gpu_uuids
        if uuid in accused and fleet.frame.gpus[fleet.rows[uuid]].node in need.exclude_nodes
    )
    hours = guards.price(need)
    text = (
        f"move {need.workload.kind} {need.workload.id} (GPUs: {len(need.gpu_uuids)}, nodes: "
        f"{len(need.nodes)}) off {', '.join(need.exclude_nodes)} to "
        f"{placement.describe(backups)}; about {hours:.0f} GPU-hours are lost "
        f"(last checkpoint unknown, {guards.CHECKPOINT_H:.0f} h assumed)"
    )
    return migration.planned(
        incident,
        Operation.MOVE,
        migration.attempts(ledger.view(), incident.id, Operation.MOVE) + 1,
        facts.now_s,
        facts.now_s + facts.policy.times.migration_deadline_s,
        facts.epoch,
        gpu_uuids=leaving,
        reason=text,
        need=need,
        backups=backups,
    )


def _refused_by(incident: Incident, ledger: Ledger) -> frozenset[str]:
    """The backups that an earlier attempt was refused with: the next attempt tries others."""
    return frozenset(
        b.node
        for m in ledger.migrations.values()
        if m.incident_id == incident.id and m.phase is MigrationPhase.REFUSED
        for b in m.backups
    )


def _record(incident: Incident, answers: list[_Answer], ledger: Ledger) -> None:
    key = ";".join(a.key for a in answers)
    told = set(incident.answer.split(";"))
    ledger.decisions.extend(
        Decision(
            at_s=ledger.now_s,
            incident_id=incident.id,
            choice=a.choice,
            wanted=a.wanted,
            allowed=a.choice is not Choice.HOLD,
            blocked_by=a.code,
            reason=a.text,
        )
        for a in answers
        if a.key not in told
    )
    last = answers[-1]
    hold = last.text if last.choice is Choice.HOLD else ""
    if key != incident.answer or hold != incident.hold_reason:
        current = ledger.incidents[incident.id]
        ledger.put(current, Change(replace(current, answer=key, hold_reason=hold)))
