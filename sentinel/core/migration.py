"""One fence, move or unfence, from plan to verified end.

Decides what an answer, or the lack of one, makes of an operation; never whether one should
begin. A call that may have left is only asked about: nothing is started twice, and nothing
that has ended begins again, whatever arrives late, doubled or out of order.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Final

from sentinel.core.domain import (
    Backup,
    Control,
    Incident,
    Migration,
    MigrationPhase,
    Operation,
    Outcome,
    OutcomeKind,
    OutcomeSource,
    Workload,
)
from sentinel.core.guards import price
from sentinel.core.placement import ASSUMED, Fleet, Need
from sentinel.core.policy import Times

_P: Final = MigrationPhase
_STARTED: Final = (_P.SENT, _P.RUNNING, _P.UNKNOWN)
_RUNS: Final = (OutcomeKind.ACCEPTED, OutcomeKind.RUNNING, OutcomeKind.FINISHED)


@dataclass(frozen=True, slots=True)
class Change:
    """A migration after something was said of it. `why` is empty when nothing is news;
    `alarm` when the scheduler contradicts what was thought to be over."""

    migration: Migration
    why: str = ""
    alarm: bool = False


def operation_id(incident_id: str, operation: Operation, attempt: int) -> str:
    text = f"{incident_id}|{operation}|{attempt}"
    return "op-" + hashlib.sha256(text.encode()).hexdigest()[:16]


def attempts(control: Control, incident_id: str, operation: Operation) -> int:
    """How often this operation has been planned for the incident so far."""
    return sum(
        m.incident_id == incident_id and m.operation is operation
        for m in control.migrations.values()
    )


def planned(
    incident: Incident,
    operation: Operation,
    attempt: int,
    now_s: float,
    deadline_s: float,
    epoch: int,
    *,
    gpu_uuids: tuple[str, ...],
    reason: str,
    need: Need | None = None,
    backups: tuple[Backup, ...] = (),
) -> Migration:
    """The plan, to be written down before anything leaves."""
    return Migration(
        operation_id=operation_id(incident.id, operation, attempt),
        incident_id=incident.id,
        operation=operation,
        node=incident.node,
        gpu_uuids=gpu_uuids,
        phase=_P.PLANNED,
        attempt=attempt,
        planned_at_s=now_s,
        since_s=now_s,
        deadline_s=deadline_s,
        evidence_at_s=incident.last_tick_s,
        epoch=epoch,
        workload=need.workload if need else None,
        workload_nodes=need.nodes if need else (),
        workload_gpu_uuids=need.gpu_uuids if need else (),
        exclude_nodes=need.exclude_nodes if need else (),
        backups=backups,
        reason=reason,
        gpu_hours=price(need) if need else 0.0,
    )


def may_leave(migration: Migration) -> bool:
    """Whether its call has provably not left, so that it may, or may still be cancelled."""
    if migration.phase is _P.UNKNOWN:
        return migration.post_allowed
    return migration.phase is _P.PLANNED and migration.post_allowed


def sent(migration: Migration, now_s: float) -> Migration:
    """The same migration as its call leaves. Raises ValueError if it must not leave."""
    if not may_leave(migration):
        raise ValueError(
            f"{migration.operation_id} is {migration.phase} and must not be sent"
            + ("" if migration.post_allowed else " again before a GET has answered 404")
        )
    return replace(migration, phase=_P.SENT, since_s=now_s, post_allowed=False, polled_at_s=0.0)


def doubted(migration: Migration, now_s: float, why: str) -> Migration:
    """Its call may have left and nobody knows what came of it: from here on only ask."""
    return replace(
        migration,
        phase=_P.UNKNOWN,
        since_s=now_s,
        post_allowed=False,
        polled_at_s=0.0,
        reason=why,
    )


def ended(migration: Migration, phase: MigrationPhase, now_s: float, why: str) -> Migration:
    return replace(migration, phase=phase, since_s=now_s, post_allowed=False, reason=why)


def heard(migration: Migration, outcome: Outcome, now_s: float) -> Change:
    """What one outcome makes of it."""
    said = f"{outcome.kind} ({outcome.source})" + (f": {outcome.reason}" if outcome.reason else "")
    if not migration.phase.is_open:
        return _too_late(migration, outcome, said)
    if migration.phase is _P.VERIFYING:
        return _while_verifying(migration, outcome, now_s, said)
    if migration.phase not in _STARTED and outcome.kind not in _RUNS:
        return Change(migration, f"ignored {said}: nothing was sent yet")
    return _while_started(migration, outcome, now_s, said)


def _while_started(migration: Migration, outcome: Outcome, now_s: float, said: str) -> Change:
    running = migration.phase is _P.RUNNING
    match outcome.kind:
        case OutcomeKind.ACCEPTED | OutcomeKind.RUNNING:
            if running:
                return Change(migration)
            begun = replace(
                migration,
                phase=_P.RUNNING,
                since_s=now_s,
                accepted=True,
                post_allowed=False,
                polled_at_s=now_s,
                reason=said,
            )
            return Change(begun, said)
        case OutcomeKind.FINISHED:
            return _finished(migration, outcome, now_s, said)
        case OutcomeKind.FAILED:
            return Change(ended(migration, _P.FAILED, now_s, said), said)
        case OutcomeKind.REFUSED:
            if running or migration.accepted:
                why = f"accepted before, now {said}"
                return Change(ended(migration, _P.FAILED, now_s, why), why)
            return Change(ended(migration, _P.REFUSED, now_s, said), said)
        case OutcomeKind.NOT_FOUND:
            return _not_found(migration, outcome, now_s, said)
        case OutcomeKind.UNKNOWN:
            if migration.phase is _P.SENT and outcome.source is OutcomeSource.POST:
                return Change(doubted(migration, now_s, said), said)
            return Change(migration)


def _not_found(migration: Migration, outcome: Outcome, now_s: float, said: str) -> Change:
    """Only the answer to our own question proves that a call never arrived, and only if the
    scheduler never said that it had it."""
    if outcome.source is not OutcomeSource.GET:
        return Change(migration, f"ignored {said}: only a GET can prove that")
    if migration.phase is _P.RUNNING:
        why = f"accepted before, now {said}"
        return Change(doubted(migration, now_s, why), why)
    asked = 0.0 < migration.polled_at_s <= outcome.at_s
    if migration.phase is not _P.UNKNOWN or migration.accepted or not asked:
        return Change(migration)
    if migration.post_allowed:
        return Change(migration)
    why = "not received: the scheduler does not know it"
    return Change(replace(migration, post_allowed=True, reason=why), why)


def _finished(migration: Migration, outcome: Outcome, now_s: float, said: str) -> Change:
    if migration.operation is not Operation.MOVE:
        return Change(ended(migration, _P.DONE, now_s, said), said)
    why, placement = said, outcome.placement
    if not placement:
        placement = migration.backups
        why = f"{said}; no placement reported: the planned backups are checked instead"
    verifying = replace(
        migration,
        phase=_P.VERIFYING,
        since_s=now_s,
        accepted=True,
        post_allowed=False,
        placement=placement,
        verified_s=0.0,
        last_tick_s=0.0,
        reason=why,
    )
    return Change(verifying, why)


def _while_verifying(migration: Migration, outcome: Outcome, now_s: float, said: str) -> Change:
    if outcome.kind is OutcomeKind.FAILED:
        why = f"finished before, now {said}"
        return Change(ended(migration, _P.FAILED, now_s, why), why)
    if outcome.kind is OutcomeKind.FINISHED:
        if outcome.placement and outcome.placement != migration.placement:
            moved = replace(migration, placement=outcome.placement, verified_s=0.0, last_tick_s=0.0)
            return Change(moved, f"another placement: {said}")
        return Change(migration)
    if outcome.kind in (OutcomeKind.REFUSED, OutcomeKind.NOT_FOUND):
        return Change(migration, f"ignored {said}: it has finished")
    return Change(migration)


def _too_late(migration: Migration, outcome: Outcome, said: str) -> Change:
    """What has ended stays ended. But a scheduler that runs what was thought never to have
    begun needs a person."""
    if outcome.kind in _RUNS and migration.phase in (_P.CANCELLED, _P.REFUSED):
        why = f"was {migration.phase}, but the scheduler says {said}"
        return Change(migration, why, alarm=True)
    same = {
        _P.DONE: _RUNS,
        _P.FAILED: (OutcomeKind.FAILED,),
        _P.REFUSED: (OutcomeKind.REFUSED,),
    }
    if outcome.kind is OutcomeKind.UNKNOWN or outcome.kind in same.get(migration.phase, ()):
        return Change(migration)
    return Change(migration, f"ignored {said}: it is {migration.phase}")


def waited(migration: Migration, now_s: float, times: Times) -> Change:
    """What the passing of time makes of a migration, answers apart."""
    over = now_s >= migration.deadline_s
    since_s = now_s - migration.since_s
    if migration.phase is _P.SENT and since_s >= times.sent_timeout_s:
        why = f"no answer for {since_s:.0f} s"
        return Change(doubted(migration, now_s, why), why)
    if may_leave(migration) and over:
        why = "the deadline passed before it could be sent"
        return Change(ended(migration, _P.CANCELLED, now_s, why), why)
    if migration.phase is _P.RUNNING and over:
        why = f"still running after {now_s - migration.planned_at_s:.0f} s: a person decides"
        return Change(ended(migration, _P.STUCK, now_s, why), why)
    # after a long standstill it is asked about before it is given up
    asked = since_s >= max(2.0 * times.poll_s, times.tick_s)
    if migration.phase is _P.UNKNOWN and over and asked:
        why = f"nobody knows what became of it ({migration.reason}): a person decides"
        return Change(ended(migration, _P.STUCK, now_s, why), why)
    return Change(migration)


def question_due(migration: Migration, now_s: float, times: Times) -> bool:
    """Whether to ask the scheduler about it now: callbacks may be lost."""
    if migration.phase is _P.UNKNOWN and not migration.post_allowed:
        return migration.polled_at_s == 0.0 or now_s - migration.polled_at_s >= times.poll_s
    return migration.phase is _P.RUNNING and now_s - migration.polled_at_s >= times.poll_s


def verify(
    migration: Migration,
    fleet: Fleet,
    control: Control,
    now_s: float,
    dt_s: float,
    times: Times,
) -> Change:
    """Whether the reported placement's own telemetry shows the work there and healthy, and
    the source shows it gone. Not seeing the target is no answer: the timer stands still."""
    placed = {b.node for b in migration.placement}
    if placed and all(node.startswith(ASSUMED) for node in placed):
        why = "assumed: this backup exists in a backtest alone"
        return Change(ended(migration, _P.DONE, now_s, why), why)
    back = placed & set(migration.exclude_nodes)
    if back:
        why = f"the scheduler put the work back on {', '.join(sorted(back))}"
        return Change(ended(migration, _P.FAILED, now_s, why), why)
    rows = placed_rows(migration, fleet)
    failing = _failing(rows or [], fleet, control)
    if failing is not None:
        why = f"the target {failing.node} fails too: {failing.pattern}"
        return Change(ended(migration, _P.FAILED, now_s, why), why)
    here, seen = _arrived(rows, fleet, migration.workload)
    left = _left(migration, fleet)
    over = now_s >= migration.deadline_s
    if not seen:
        if over:
            return Change(*_gave_up(migration, now_s, "the target's telemetry does not show it"))
        return Change(migration)
    if not (here and left):
        if over:
            missing = "the work is not on the target" if not here else "the work is still there"
            return Change(*_gave_up(migration, now_s, missing))
        return Change(replace(migration, verified_s=0.0, last_tick_s=0.0))
    verified_s = migration.verified_s + dt_s if migration.last_tick_s else 0.0
    migration = replace(migration, verified_s=verified_s, last_tick_s=now_s)
    if verified_s + 0.1 * times.tick_s < times.verify_for_s:
        return Change(migration)
    why = f"the work runs healthy on {', '.join(sorted(placed))} for {verified_s:.0f} s"
    return Change(ended(migration, _P.DONE, now_s, why), why)


def _gave_up(migration: Migration, now_s: float, what: str) -> tuple[Migration, str]:
    why = f"finished, but {what}: a person decides"
    return ended(migration, _P.STUCK, now_s, why), why


def placed_rows(migration: Migration, fleet: Fleet) -> list[int] | None:
    """Frame rows of the reported placement; None while any of it is unknown to telemetry. A
    node reported without GPUs means those of its GPUs that show the work."""
    rows: list[int] = []
    work = migration.workload
    for backup in migration.placement:
        if backup.gpu_uuids:
            found = [fleet.rows[uuid] for uuid in backup.gpu_uuids if uuid in fleet.rows]
            if len(found) < len(backup.gpu_uuids):
                return None
        else:
            running = fleet.by_work.get(work, []) if work else []
            found = [r for r in running if fleet.frame.gpus[r].node == backup.node]
            if not found:
                return None
        rows.extend(found)
    return rows or None


def _failing(rows: list[int], fleet: Fleet, control: Control) -> Incident | None:
    """A confirmed incident on one of these GPUs: a single odd tick is not a failing target."""
    uuids = {fleet.frame.gpus[r].uuid for r in rows}
    return next((i for i in control.incidents.values() if i.fires and i.gpu_uuid in uuids), None)


def _arrived(rows: list[int] | None, fleet: Fleet, work: Workload | None) -> tuple[bool, bool]:
    """(the work is there and healthy, telemetry is able to tell)."""
    if rows is None or not all(fleet.present(r) for r in rows):
        return False, False
    shown = all(fleet.frame.workloads[r] == work for r in rows)
    return shown and all(fleet.healthy(r) for r in rows), True


def _left(migration: Migration, fleet: Fleet) -> bool:
    """No GPU of the nodes to leave still shows the work. One that reports nothing counts as
    left, since the scheduler has said that the move is finished."""
    if migration.workload is None:
        return True
    return not set(fleet.nodes_running(migration.workload)) & set(migration.exclude_nodes)
