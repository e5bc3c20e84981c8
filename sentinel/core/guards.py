"""Why something is not done: every guard between an incident and an act, in order.

Decides what is forbidden; never what is wanted. Each guard returns a readable reason or
None. The order is fixed, so that the same situation always gives the same answer:
stopped by a person or the mode - breaker - telemetry - too much at once - evidence -
already under way or tried - limits - the node unknown to the scheduler - and, for moves, work
that it cannot move, and capacity.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from sentinel.core.domain import (
    NOT_DELIVERED,
    Backup,
    Control,
    Incident,
    Migration,
    MigrationPhase,
    Mode,
    Operation,
    Reason,
    Severity,
    SubjectKind,
)
from sentinel.core.incident import severity_rank, stands
from sentinel.core.placement import Need, taken_nodes
from sentinel.core.policy import Limits, Policy
from sentinel.core.scheduler import View, why_immovable, why_unconfirmed

_RETRY_TICKS: Final = 4.0  # a scheduler that is away is tried again after so long, then twice that
DAY_S: Final = 86_400.0
CHECKPOINT_H: Final = 1.0  # hours of work lost by a move where nobody knows the checkpoint
_NEVER_LEFT: Final = (MigrationPhase.CANCELLED, MigrationPhase.PROPOSED)


@dataclass(frozen=True, slots=True)
class Facts:
    """What the guards of one tick know besides the state. `coverage` and `hold` are the
    reasons not to act that this tick's telemetry gives, `nodes` the size of the fleet."""

    now_s: float
    policy: Policy
    nodes: int = 0
    epoch: int = 0
    coverage: Reason | None = None
    hold: Reason | None = None
    scheduler: View | None = None


def why_not_fence(
    incident: Incident, control: Control, facts: Facts, own: Migration | None = None
) -> Reason | None:
    """Why the incident's node is not fenced, or None. Knows nothing of spares. `own` is the
    plan that is being checked again before it leaves: it does not stand in its own way."""
    limits = facts.policy.limits
    return (
        _stopped(control, facts)
        or facts.coverage
        or facts.hold
        or _evidence(incident, incident.may_fence, facts.policy.fence_severity, facts)
        or _tried(incident, Operation.FENCE, control, facts, own)
        or _node_taken(incident.node, control, own)
        or _fenced_nodes(incident.node, control, facts, own)
        or _attempts(incident.node, Operation.FENCE, control, facts, own)
        or _just_released(incident.node, control, facts.now_s, limits)
        or _unconfirmed(incident.node, facts)
    )


def why_not_move(
    incident: Incident,
    find_need: Callable[[], Need | Reason],
    find_backups: Callable[[Need], tuple[Backup, ...] | Reason],
    control: Control,
    facts: Facts,
    own: Migration | None = None,
) -> Reason | None:
    """Why the work on the incident's GPU is not moved, or None. The work is looked for once
    nothing forbids to act, and its backups last: both cost a walk over the fleet."""
    limits = facts.policy.limits
    first = (
        _stopped(control, facts)
        or facts.coverage
        or facts.hold
        or _evidence(incident, incident.may_move, facts.policy.move_severity, facts)
        or _tried(incident, Operation.MOVE, control, facts, own)
    )
    if first is not None:
        return first
    need = find_need()
    if isinstance(need, Reason):
        return need
    second = (
        _not_fenced(incident, need, control)
        or _work_taken(need, control, own)
        or _open_moves(control, limits, own)
        or _gpu_hours(need, control, facts, own)
        or _cooldown(incident.node, control, facts, own)
        or _attempts(incident.node, Operation.MOVE, control, facts, own)
        or _unmovable(incident.node, need, facts)
    )
    if second is not None:
        return second
    backups = find_backups(need)
    return backups if isinstance(backups, Reason) else None


def _unconfirmed(node: str, facts: Facts) -> Reason | None:
    policy = facts.policy
    if not policy.confirm_nodes:
        return None
    return why_unconfirmed(node, facts.scheduler, facts.now_s, policy.view_max_age_s)


def _unmovable(node: str, need: Need, facts: Facts) -> Reason | None:
    if reason := _unconfirmed(node, facts):
        return reason
    if not facts.policy.confirm_nodes or facts.scheduler is None:
        return None
    return why_immovable(need.workload, facts.scheduler)


def closed_nodes(facts: Facts) -> frozenset[str]:
    """Nodes that the scheduler gives no new work, or does not know: no backup is on them."""
    if not facts.policy.confirm_nodes or facts.scheduler is None:
        return frozenset()
    known = facts.scheduler.nodes
    spares = facts.policy.spare_nodes
    return frozenset(n for n, node in known.items() if node.closed_by) | (spares - known.keys())


def why_not_unfence(control: Control, facts: Facts) -> Reason | None:
    """Why a released node is not given back yet. A person asked for it, so it needs neither
    telemetry nor a closed breaker; but paused means that nothing leaves."""
    return _paused(control, facts) or _newer_daemon(control, facts)


def price(need: Need) -> float:
    """GPU-hours that a move throws away: the whole gang back to its last checkpoint."""
    return len(need.gpu_uuids) * CHECKPOINT_H


def fenced_nodes(control: Control, own: Migration | None = None) -> frozenset[str]:
    """Nodes that are fenced or held back, or are being fenced."""
    open_fences = {
        m.node
        for m in control.migrations.values()
        if m.operation is Operation.FENCE and m.phase.is_open and m is not own
    }
    return frozenset(control.quarantine) | open_fences


def nodes_allowed(limits: Limits, nodes: int) -> int:
    """How many nodes may be fenced at once: both limits hold, but a small fleet may always
    lose one."""
    return min(limits.fenced_nodes, max(1, int(limits.fenced_percent / 100.0 * nodes)))


def bad_nodes(control: Control, policy: Policy) -> frozenset[str]:
    """Nodes that work has to leave: fenced ones, and those that stand accused as badly."""
    need = severity_rank(policy.fence_severity)
    accused = frozenset(
        i.node
        for i in control.incidents.values()
        if i.subject.kind is SubjectKind.GPU
        and stands(i)
        and i.may_fence
        and severity_rank(i.worst) >= need
    )
    return accused | frozenset(control.quarantine)


def _stopped(control: Control, facts: Facts) -> Reason | None:
    if reason := _paused(control, facts):
        return reason
    if control.breaker.latched:
        return Reason(
            "breaker", f"the breaker is latched until a person resets it: {control.breaker.reason}"
        )
    return _newer_daemon(control, facts)


def _paused(control: Control, facts: Facts) -> Reason | None:
    if control.pause.paused:
        return Reason("paused", f"paused: {control.pause.reason or 'no reason given'}")
    if facts.policy.mode is not Mode.ACT:
        return Reason("mode", f"the mode is {facts.policy.mode}: nothing is done by itself")
    return None


def _newer_daemon(control: Control, facts: Facts) -> Reason | None:
    newest = max((m.epoch for m in control.migrations.values()), default=0)
    if newest > facts.epoch:
        return Reason(
            "epoch", f"a newer daemon has taken over (epoch {newest}, ours {facts.epoch})"
        )
    return None


def _evidence(incident: Incident, allowed: bool, need: Severity, facts: Facts) -> Reason | None:
    if incident.released_by:
        return Reason("released", f"released by {incident.released_by}")
    if severity_rank(incident.worst) < severity_rank(need):
        because = f" ({incident.withheld})" if incident.withheld else ""
        return Reason("severity", f"its severity is {incident.worst}, acts need {need}{because}")
    if not allowed:
        return Reason("evidence", f"{incident.pattern} by itself is never acted on")
    age_s = facts.now_s - incident.last_tick_s
    if age_s > 0.0 and not incident.latched:
        return Reason("frozen", f"its host has been silent for {age_s:.0f} s: nothing is known")
    if age_s > facts.policy.times.evidence_max_age_s:
        limit_s = facts.policy.times.evidence_max_age_s
        return Reason("stale", f"the evidence is {age_s:.0f} s old, at most {limit_s:.0f} s count")
    return None


def _tried(
    incident: Incident,
    operation: Operation,
    control: Control,
    facts: Facts,
    own: Migration | None,
) -> Reason | None:
    """At most one started operation per incident and kind. Only a proven refusal is tried
    again; what may have run, or failed half way, is a person's."""
    refused, undelivered = 0, []
    for m in control.migrations.values():
        if m.incident_id != incident.id or m.operation is not operation or m is own:
            continue
        if m.phase.is_open:
            return Reason("open", f"{m.operation_id} is {m.phase}")
        if m.cancelled_by:
            return Reason("cancelled", f"{m.operation_id} was cancelled by {m.cancelled_by}")
        if m.phase in (MigrationPhase.FAILED, MigrationPhase.STUCK, MigrationPhase.DONE):
            return Reason(m.phase.value, f"{m.operation_id} ended {m.phase}: {m.reason}")
        if m.phase is MigrationPhase.REFUSED and NOT_DELIVERED in m.reason:
            undelivered.append(m.since_s)
        else:
            refused += m.phase is MigrationPhase.REFUSED
    if undelivered:
        wait_s = _RETRY_TICKS * facts.policy.times.tick_s * 2 ** (len(undelivered) - 1)
        if facts.now_s < max(undelivered) + wait_s:
            times = "once" if len(undelivered) == 1 else f"{len(undelivered)} times"
            text = f"the scheduler was not reached, {times}; the next try is after {wait_s:.0f} s"
            return Reason("not_delivered", text)
    if refused >= facts.policy.attempts_max:
        return Reason("refused", f"the scheduler refused {refused} times: a person decides")
    return None


def _node_taken(node: str, control: Control, own: Migration | None) -> Reason | None:
    if node in taken_nodes(control, own):
        return Reason("open", f"a migration that touches {node} is under way")
    return None


def _fenced_nodes(
    node: str, control: Control, facts: Facts, own: Migration | None
) -> Reason | None:
    limits = facts.policy.limits
    fenced = fenced_nodes(control, own) - {node}
    if len(fenced) >= limits.fenced_nodes:
        text = (
            f"{len(fenced)} nodes are fenced or held back, "
            f"limits.fenced_nodes is {limits.fenced_nodes}"
        )
        return Reason("fenced_nodes", text)
    if len(fenced) >= nodes_allowed(limits, facts.nodes):
        text = (
            f"{len(fenced)} of {facts.nodes} nodes are fenced or held back, "
            f"limits.fenced_percent is {limits.fenced_percent:g} (at least one node)"
        )
        return Reason("fenced_percent", text)
    return None


def _attempts(
    node: str, operation: Operation, control: Control, facts: Facts, own: Migration | None
) -> Reason | None:
    limit = facts.policy.limits.attempts_per_node
    done = sum(
        m.node == node
        and m.operation is operation
        and m.phase not in _NEVER_LEFT
        and m is not own
        and facts.now_s - m.planned_at_s < DAY_S
        for m in control.migrations.values()
    )
    if done >= limit:
        text = (
            f"{done} attempts to {operation} {node} within a day, "
            f"limits.attempts_per_node is {limit}"
        )
        return Reason("attempts", text)
    return None


def _just_released(node: str, control: Control, now_s: float, limits: Limits) -> Reason | None:
    """A person who has just given a node back is not overruled in the same breath."""
    given_back = max(
        (
            m.planned_at_s
            for m in control.migrations.values()
            if m.node == node and m.operation is Operation.UNFENCE
        ),
        default=None,
    )
    if given_back is not None and now_s - given_back < limits.cooldown_s:
        ago_s = now_s - given_back
        text = (
            f"{node} was released {ago_s:.0f} s ago, limits.cooldown_s is {limits.cooldown_s:.0f}"
        )
        return Reason("cooldown", text)
    return None


def _not_fenced(incident: Incident, need: Need, control: Control) -> Reason | None:
    """The failing node is fenced first, or the work would come back to it. Other bad nodes
    of the work are waited for while their fences are under way; where a limit forbids one,
    the move still leaves that node."""
    for m in control.migrations.values():
        if m.operation is Operation.FENCE and m.phase.is_open and m.node in need.nodes:
            return Reason("not_fenced", f"{m.node} is still being fenced ({m.operation_id})")
    held = control.quarantine.get(incident.node)
    if held is None or not held.fenced:
        return Reason(
            "not_fenced", f"{incident.node} is not fenced: the work could come back to it"
        )
    return None


def _work_taken(need: Need, control: Control, own: Migration | None) -> Reason | None:
    for m in control.migrations.values():
        if m.operation is Operation.MOVE and m is not own and m.workload == need.workload:
            if m.phase.is_open:
                return Reason("open", f"{need.workload.id} is being moved ({m.operation_id})")
            if m.phase in (MigrationPhase.FAILED, MigrationPhase.STUCK) and _unsettled(m, control):
                text = f"an earlier move of {need.workload.id} ended {m.phase} ({m.operation_id})"
                return Reason(m.phase.value, text)
    taken = taken_nodes(control, own) & set(need.exclude_nodes)
    if taken:
        return Reason("open", f"a migration that touches {min(taken)} is under way")
    return None


def _unsettled(migration: Migration, control: Control) -> bool:
    incident = control.incidents.get(migration.incident_id)
    return incident is not None and incident.is_open


def _open_moves(control: Control, limits: Limits, own: Migration | None) -> Reason | None:
    moves = sum(
        m.operation is Operation.MOVE and m.phase.is_open and m is not own
        for m in control.migrations.values()
    )
    if moves >= limits.open_moves:
        text = f"{moves} moves are under way, limits.open_moves is {limits.open_moves}"
        return Reason("open_moves", text)
    return None


def _gpu_hours(need: Need, control: Control, facts: Facts, own: Migration | None) -> Reason | None:
    limit = facts.policy.limits.gpu_hours_lost_per_day
    spent = sum(
        m.gpu_hours
        for m in control.migrations.values()
        if m.operation is Operation.MOVE
        and m is not own
        and m.phase not in (*_NEVER_LEFT, MigrationPhase.REFUSED)
        and facts.now_s - m.planned_at_s < DAY_S
    )
    cost = price(need)
    if spent + cost > limit:
        text = (
            f"the move costs about {cost:.0f} GPU-hours, {spent:.0f} were spent within a day, "
            f"limits.gpu_hours_lost_per_day is {limit:.0f}"
        )
        return Reason("gpu_hours", text)
    return None


def _cooldown(node: str, control: Control, facts: Facts, own: Migration | None) -> Reason | None:
    cooldown_s = facts.policy.limits.cooldown_s
    last_s = max(
        (
            m.planned_at_s
            for m in control.migrations.values()
            if m.operation is Operation.MOVE
            and node in (m.node, *m.exclude_nodes)
            and m is not own
            and m.phase not in (*_NEVER_LEFT, MigrationPhase.REFUSED)
        ),
        default=None,
    )
    if last_s is not None and facts.now_s - last_s < cooldown_s:
        ago_s = facts.now_s - last_s
        text = (
            f"the last move off {node} was {ago_s:.0f} s ago, limits.cooldown_s is {cooldown_s:.0f}"
        )
        return Reason("cooldown", text)
    return None
