"""What must hold after every tick, whatever came in.

Decides nothing: it names the rules that a state breaks, for the tick itself, the tests and
the simulation to judge by.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from sentinel.core.domain import (
    Control,
    IncidentPhase,
    Kind,
    Migration,
    MigrationPhase,
    Operation,
    SubjectKind,
)
from sentinel.core.placement import nodes_of
from sentinel.core.policy import Policy

_NOT_STARTED = (
    MigrationPhase.PROPOSED,
    MigrationPhase.PLANNED,
    MigrationPhase.CANCELLED,
    MigrationPhase.REFUSED,
)
_MUST_NOT_POST = (MigrationPhase.SENT, MigrationPhase.RUNNING, MigrationPhase.VERIFYING)


def check_invariants(control: Control, policy: Policy) -> tuple[str, ...]:
    """Every rule that this state breaks, in words. Empty when all hold. Includes the limits,
    which a site may tighten while more than that is open: advance itself does not."""
    return (*broken_structure(control), *_broken_limits(control, policy))


def broken_structure(control: Control) -> tuple[str, ...]:
    """The rules that hold whatever the configuration says."""
    return (
        *_incidents(control),
        *_one_at_a_time(control),
        *_started_once(control),
        *(text for m in control.migrations.values() for text in _migration(m, control)),
    )


def _twice(what: str, names: Iterable[object]) -> Iterator[str]:
    for name, count in Counter(names).items():
        if count > 1:
            yield f"{what} {name} is in {count} at once"


def _incidents(control: Control) -> Iterator[str]:
    for key, incident in control.incidents.items():
        if key != incident.id:
            yield f"incident {incident.id} is kept as {key}"
        if (incident.phase is IncidentPhase.RESOLVED) != (incident.resolved_at_s is not None):
            yield f"incident {incident.id} is {incident.phase}, resolved {incident.resolved_at_s}"
        if incident.fires and incident.alert_since_s is None:
            yield f"incident {incident.id} fires without a start"
        if incident.held_s < 0.0:
            yield f"incident {incident.id} has a negative timer"
    yield from _twice(
        "open incidents: subject",
        (
            (i.subject.kind.value, i.subject.id, i.kind is Kind.UNKNOWN)
            if i.subject.kind is not SubjectKind.GPU
            else i.subject.id
            for i in control.incidents.values()
            if i.is_open
        ),
    )


def _one_at_a_time(control: Control) -> Iterator[str]:
    """Each node, each GPU and each workload in at most one open migration. A placement that
    the scheduler chose itself is its own affair, so only what we asked for counts."""
    opened = [m for m in control.migrations.values() if m.phase.is_open]
    yield from _twice("open migrations: node", (n for m in opened for n in _asked_nodes(m)))
    yield from _twice(
        "open migrations: GPU",
        (
            uuid
            for m in opened
            for uuid in {*m.gpu_uuids, *(u for b in m.backups for u in b.gpu_uuids)}
        ),
    )
    yield from _twice("open migrations: workload", (m.workload for m in opened if m.workload))


def _asked_nodes(migration: Migration) -> set[str]:
    placed = {b.node for b in migration.placement} - {b.node for b in migration.backups}
    return nodes_of(migration) - (placed - {migration.node, *migration.exclude_nodes})


def _started_once(control: Control) -> Iterator[str]:
    """An unfence is a person's own word each time; fences and moves start once."""
    yield from _twice(
        "started operations: incident",
        (
            (m.incident_id, m.operation.value)
            for m in control.migrations.values()
            if m.operation is not Operation.UNFENCE and m.phase not in _NOT_STARTED
        ),
    )


def _migration(m: Migration, control: Control) -> Iterator[str]:
    name = m.operation_id
    if control.migrations.get(name) is not m:
        yield f"migration {name} is kept under another id"
    if m.phase in _MUST_NOT_POST and m.post_allowed:
        yield f"migration {name} is {m.phase} and could be sent again"
    targets = {b.node for b in m.backups}
    if targets & {m.node, *m.exclude_nodes}:
        yield f"migration {name} has a backup on a node that it leaves"
    if not m.phase.is_open:
        return
    incident = control.incidents.get(m.incident_id)
    if incident is None:
        yield f"migration {name} is open and its incident {m.incident_id} is forgotten"
    elif not incident.is_open and m.operation is not Operation.UNFENCE:
        yield f"migration {name} is open and its incident {m.incident_id} is over"
    if m.operation is Operation.MOVE:
        if m.workload is None:
            yield f"migration {name} moves nothing"
        held = control.quarantine.get(m.node)
        if held is None:
            yield f"migration {name} moves work off {m.node}, which is not fenced"
        if m.phase is MigrationPhase.PLANNED and targets & set(control.quarantine):
            yield f"migration {name} is planned onto a fenced node"


def _broken_limits(control: Control, policy: Policy) -> Iterator[str]:
    limits = policy.limits
    moves = [
        m for m in control.migrations.values() if m.operation is Operation.MOVE and m.phase.is_open
    ]
    if len(moves) > limits.open_moves:
        yield f"{len(moves)} moves are open, limits.open_moves is {limits.open_moves}"
    fenced = {q.node for q in control.quarantine.values() if q.fenced or q.operation_id}
    fenced |= {
        m.node
        for m in control.migrations.values()
        if m.operation is Operation.FENCE and m.phase.is_open
    }
    if len(fenced) > limits.fenced_nodes:
        yield f"{len(fenced)} nodes are fenced, limits.fenced_nodes is {limits.fenced_nodes}"
