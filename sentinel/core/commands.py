"""What a person asks for: cancel, release, pause, resume, reset the breaker.

Decides what a command does to the state, at once or once nothing stands in its way; a
command that can do nothing is answered in the journal, never dropped without a word.
"""

from __future__ import annotations

from dataclasses import replace

from sentinel.core import migration
from sentinel.core.decide import cancel
from sentinel.core.domain import (
    Breaker,
    Command,
    CommandKind,
    Incident,
    Operation,
    PatternState,
    Quarantine,
    SubjectKind,
)
from sentinel.core.incident import Change, closed
from sentinel.core.ledger import Ledger
from sentinel.core.patterns import SHARED, Book
from sentinel.core.placement import taken_nodes
from sentinel.core.policy import Times


def obey(ledger: Ledger, commands: tuple[Command, ...], book: Book | None = None) -> None:
    """`book` holds the fault patterns that a person can speak of."""
    for command in commands:
        match command.kind:
            case CommandKind.PAUSE:
                ledger.set_pause(True, _said(command))
            case CommandKind.RESUME:
                ledger.set_pause(False, _said(command))
            case CommandKind.RESET_BREAKER:
                _reset(ledger, command)
            case CommandKind.CANCEL:
                _cancel(ledger, command)
            case CommandKind.RELEASE:
                _release(ledger, command)
            case (
                CommandKind.RENAME_PATTERN
                | CommandKind.CONFIRM_PATTERN
                | CommandKind.REJECT_PATTERN
            ):
                _speak(ledger, command, book)
            case CommandKind.LEARN_PATTERNS:  # the daemon's: it starts the learner
                ledger.note("pattern", "", "", "", f"learning asked for by {_said(command)}")


def finish_releases(ledger: Ledger, times: Times, epoch: int) -> None:
    """Closes released incidents once nothing of theirs is under way, and gives back the
    nodes that we fenced ourselves. A node with another open incident stays fenced."""
    waiting = [i for i in ledger.incidents.values() if i.is_open and i.released_by]
    for incident in waiting:
        for m in list(ledger.migrations.values()):
            if m.incident_id == incident.id and migration.may_leave(m):
                cancel(m, incident.released_by, "released", ledger)
        if any(
            m.incident_id == incident.id and m.phase.is_open for m in ledger.migrations.values()
        ):
            continue
        why = f"released by {incident.released_by}"
        ledger.put(incident, Change(closed(incident, ledger.now_s), why))
        _free_held(ledger, incident)
    for held in list(ledger.quarantine.values()):
        if held.released_by and held.node not in taken_nodes(ledger.view()):
            _give_back(ledger, held, times, epoch)


def _said(command: Command) -> str:
    by = command.actor or "an unnamed person"
    return f"{by}: {command.reason}" if command.reason else by


def _reset(ledger: Ledger, command: Command) -> None:
    if not ledger.breaker.latched:
        ledger.note("breaker", "breaker", "closed", "closed", "reset, but it was not latched")
        return
    ledger.breaker = Breaker()
    ledger.note("breaker", "breaker", "latched", "closed", f"reset by {_said(command)}")


def _cancel(ledger: Ledger, command: Command) -> None:
    m = ledger.migrations.get(command.target)
    if m is None:
        ledger.note("migration", command.target, "", "", "cancel: no such operation is known")
    elif migration.may_leave(m):
        cancel(m, command.actor or "an unnamed person", command.reason, ledger)
    else:
        why = f"cancel: too late, it is {m.phase}"
        ledger.note("migration", m.operation_id, m.phase, m.phase, why)


def _release(ledger: Ledger, command: Command) -> None:
    by, found = _said(command), False
    for i in list(ledger.incidents.values()):
        if i.is_open and command.target in (i.id, i.node, i.gpu_uuid, i.subject.id):
            ledger.put(i, Change(replace(i, released_by=by)))
            found = True
    held = ledger.quarantine.get(command.target)
    if held is not None:
        ledger.quarantine[held.node] = replace(held, released_by=by)
        found = True
    if not found:
        ledger.note("incident", command.target, "", "", f"release by {by}: nothing is open there")


def _speak(ledger: Ledger, command: Command, book: Book | None) -> None:
    """What a person says of a fault pattern; it outlives relearning."""
    known = ledger.patterns.get(command.target)
    shown = book.patterns.get(command.target) if book else known
    if shown is None:
        ledger.note("pattern", command.target, "", "", f"{command.kind}: no such pattern is known")
        return
    if shown.origin == SHARED:
        why = "the cause of a node, rack, job or fleet goes by what it is"
        ledger.note("pattern", command.target, "", "", f"{command.kind}: {why}")
        return
    by = command.actor or "an unnamed person"
    after = replace((known or shown).kept(), said_by=by, said_at_s=ledger.now_s)
    match command.kind:
        case CommandKind.RENAME_PATTERN:
            name = " ".join(command.value.split())
            other = book.clash(name, but=command.target) if book else ""
            if not name or other:
                why = f"{other} goes by that name" if other else "a name must not be empty"
                ledger.note("pattern", command.target, "", "", f"rename: {why}")
                return
            after = replace(after, name=name, renamed=True, state=PatternState.CONFIRMED)
            why = f"renamed from {shown.name!r} to {name!r} by {_said(command)}"
        case CommandKind.CONFIRM_PATTERN:
            after = replace(after, state=PatternState.CONFIRMED)
            why = f"confirmed by {_said(command)}"
        case _:
            after = replace(after, state=PatternState.REJECTED)
            why = f"rejected by {_said(command)}: its name is used no more"
    ledger.keep_pattern(after, why)


def _free_held(ledger: Ledger, incident: Incident) -> None:
    """Marks what the end of one incident sets free."""
    if incident.subject.kind is SubjectKind.GPU:
        accused = any(
            i.node == incident.node
            and i.fires
            and i.subject.kind is SubjectKind.GPU
            and not i.released_by
            for i in ledger.incidents.values()
        )
        nodes = [] if accused else [incident.node]
    else:
        nodes = [q.node for q in ledger.quarantine.values() if q.incident_id == incident.id]
    for node in nodes:
        held = ledger.quarantine.get(node)
        if held is not None:
            ledger.quarantine[node] = replace(held, released_by=incident.released_by)


def _give_back(ledger: Ledger, held: Quarantine, times: Times, epoch: int) -> None:
    why = f"released by {held.released_by}"
    incident = ledger.incidents.get(held.incident_id)
    fence = ledger.migrations.get(held.operation_id)
    if fence is None or incident is None:  # held back in our own books alone
        ledger.free_node(held.node, why)
        return
    ledger.quarantine[held.node] = replace(held, released_by="")
    plan = migration.planned(
        incident,
        Operation.UNFENCE,
        migration.attempts(ledger.view(), incident.id, Operation.UNFENCE) + 1,
        ledger.now_s,
        ledger.now_s + times.migration_deadline_s,
        epoch,
        gpu_uuids=fence.gpu_uuids,
        reason=f"unfence {held.node}: {why}",
    )
    ledger.plan(replace(plan, evidence_at_s=ledger.now_s))
