"""How an incident reads: two lines for a tired person, then the details.

Line 1 (`summary`) says what moved, how far from which normal, and where. Line 2 says since
when, compared with whom, like which pattern and what became of like ones, and what was done or
why not. Decides words only; the same incident at the same time always reads the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final

from sentinel.core.causes import called, place_of
from sentinel.core.domain import (
    Control,
    Evidence,
    Gpu,
    Incident,
    IncidentPhase,
    Kind,
    Migration,
    MigrationPhase,
    Operation,
    SubjectKind,
)
from sentinel.core.patterns import likeness
from sentinel.core.placement import describe
from sentinel.core.policy import Policy

_EVIDENCE_SHOWN: Final = 8
_NODES_NAMED: Final = 4
_AGAINST: Final = (
    ("peers", "its job mates"),
    ("density", "what is normal for its model at this work, and for its own heat sink"),
    ("lost", "its siblings on the same exporter"),
)
_REPORTED: Final = "reported by the hardware or its driver"


def clock(at_s: float) -> str:
    """A moment as people read it at night: the time of day, in UTC."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%H:%M:%S UTC")


def span(seconds: float) -> str:
    if seconds < 120.0:
        return f"{seconds:.0f} s"
    if seconds < 7200.0:
        return f"{seconds / 60.0:.0f} min"
    return f"{seconds / 3600.0:.1f} h"


def summary(incident: Incident) -> str:
    """Line 1: what moved, how far from which normal, and where; and whether work is at risk."""
    first = incident.evidence[0].text if incident.evidence else incident.pattern
    over = "" if incident.is_open else "Over: "
    if incident.subject.kind is not SubjectKind.GPU:
        return f"{over}{_lead(incident)}: {first}{_state(incident)}"
    text = _without_place(first, incident)
    what = incident.pattern if text == incident.pattern else f"{incident.pattern}: {text}"
    return f"{over}{_place(incident)}: {what}{_state(incident)}"


def _lead(incident: Incident) -> str:
    subject = incident.subject
    if subject.kind is SubjectKind.FLEET:
        if incident.kind is Kind.UNKNOWN:
            return "GPU Sentinel cannot see the fleet"
        stopped = ", all actions are stopped" if incident.holds else ""
        return f"Many GPUs deviate at once{stopped}"
    if subject.kind is SubjectKind.NODE and incident.kind is Kind.UNKNOWN:
        return f"{incident.node} needs a person"
    named = called(subject)
    if subject.kind is not SubjectKind.NODE:
        named = f"{named[:1].upper()}{named[1:]}"
    # the headline of an event names it already
    return f"{named}: {incident.pattern}" if incident.kind is Kind.DEVIANT else named


def _place(incident: Incident) -> str:
    number = f" {incident.gpu_index}" if incident.gpu_index is not None else ""
    model = f" ({incident.model})" if incident.model else ""
    return f"GPU{number} of {incident.node}{model}"


def _without_place(text: str, incident: Incident) -> str:
    """Evidence that names its GPU again, without that: the line begins with it."""
    gpu = Gpu(incident.gpu_uuid or "", incident.node, incident.gpu_index)
    return text.removeprefix(f"{place_of(gpu)} ")


def _state(incident: Incident) -> str:
    if incident.moved and incident.fenced:
        return "; its work has moved, the node is fenced"
    if incident.fenced:
        return "; the node is fenced"
    return ""


def description(incident: Incident, control: Control, policy: Policy, now_s: float) -> str:
    """Line 2, then all the reasons, whom it hurts, what was done and what is left to do."""
    lines = [second_line(incident, control, policy, now_s), ""]
    lines += [f"Seen: {_reason(e)}" for e in incident.evidence[:_EVIDENCE_SHOWN]]
    if len(incident.evidence) > _EVIDENCE_SHOWN:
        lines.append(f"and {len(incident.evidence) - _EVIDENCE_SHOWN} more")
    if incident.members:
        lines.append(_members(incident))
    if incident.withheld:
        lines.append(f"{incident.withheld[0].upper()}{incident.withheld[1:]}.")
    kind = incident.subject.kind
    if kind is not SubjectKind.FLEET and (kind is SubjectKind.GPU or incident.workload):
        lines.append(_work(incident))
    lines += _acts(incident, control)
    lines += _to_do(incident)
    return "\n".join(lines)


def second_line(incident: Incident, control: Control, policy: Policy, now_s: float) -> str:
    """Line 2: since when, against whom, like what, and what was done or why not."""
    since_s = began_s(incident)
    lasted = f"Since {clock(since_s)} ({span(max(now_s - since_s, 0.0))})"
    parts = [f"{lasted}{_phase(incident, policy)}"]
    against = _against(incident)
    if against:
        parts.append(against)
    like = likeness(incident, control.patterns)
    like = f"{like[:1].lower()}{like[1:]}"  # in the middle of a sentence
    parts.append((like or _pattern(incident)).rstrip("."))
    parts.append(_done(incident, control))
    return "; ".join(p for p in parts if p) + "."


def began_s(incident: Incident) -> float:
    """When it began: a GPU that is lost was last heard before anybody could miss it, and its
    mates may have seen a straggler before it deviated for long."""
    told = (e.at_s for e in incident.evidence[:1] if e.kind in ("lost", "peers") and e.at_s > 0.0)
    return min((incident.opened_at_s, *told))


def _phase(incident: Incident, policy: Policy) -> str:
    if incident.phase is IncidentPhase.RESOLVED:
        return f", over at {clock(incident.resolved_at_s or incident.last_tick_s)}"
    if incident.phase is not IncidentPhase.CLEARING:
        return ""
    times = policy.times
    need_s = times.clear_latched_for_s if incident.latched else times.clear_for_s
    return f", looks normal again for {span(incident.held_s)} of {span(need_s)}"


def _against(incident: Incident) -> str:
    """With whom it was compared, where it was."""
    subject, kinds = incident.subject.kind, {e.kind for e in incident.evidence}
    if subject is SubjectKind.GPU:
        found = [words for kind, words in _AGAINST if kind in kinds]
        if incident.kind is Kind.FAULT:
            return _REPORTED
        return f"compared with {' and with '.join(found)}" if found else ""
    if incident.kind in (Kind.FAULT, Kind.LOST) and subject is not SubjectKind.FLEET:
        return _REPORTED
    if incident.kind is not Kind.DEVIANT:
        return ""
    others = {
        SubjectKind.NODE: ", and the node with all others",
        SubjectKind.RACK: ", and the rack with all others",
        SubjectKind.JOB: " and with its mates, of which none stands out",
    }
    return f"each GPU compared with its own past{others.get(subject, '')}"


def _pattern(incident: Incident) -> str:
    if incident.subject.kind is SubjectKind.GPU and incident.kind is Kind.DEVIANT:
        return (
            f"pattern: {incident.pattern}, {incident.score:.2f} times as far as the edge of normal"
        )
    if incident.subject.kind is SubjectKind.GPU:
        return f"pattern: {incident.pattern}"
    return ""


def _done(incident: Incident, control: Control) -> str:
    """What was or will be done, or why not, in few words."""
    kind = incident.subject.kind
    if kind is SubjectKind.FLEET:
        if incident.kind is Kind.UNKNOWN:
            return "no GPU is judged and nothing moves while this lasts"
        if incident.holds:
            return "nothing is fenced or moved until a person has looked"
        return "none of them is moved for it"
    if kind is SubjectKind.NODE and incident.kind is Kind.UNKNOWN:
        return "both sides are left alone, no further attempt is made"
    if incident.released_by:
        return f"released by {incident.released_by}"
    mine = _migrations(incident, control)
    done = [_briefly(m) for m in mine if m.phase is not MigrationPhase.CANCELLED]
    if incident.hold_reason:
        done.append(f"not done: {incident.hold_reason}")
    if done:
        return ", ".join(dict.fromkeys(done))
    if kind is SubjectKind.GPU:
        return "nothing is done: it is for a person to look" if incident.is_open else ""
    return "nothing moves by itself"


def _briefly(m: Migration) -> str:
    if m.operation is Operation.MOVE and m.workload is not None:
        what = f"move of {m.workload.id}"
    else:
        what = f"{m.operation} of {m.node}"
    return f"{what} {m.phase}"


def _reason(evidence: Evidence) -> str:
    return evidence.text or f"{evidence.metric} {evidence.value}"


def _members(incident: Incident) -> str:
    """Whom a shared incident speaks for."""
    by_node: dict[str, int] = {}
    for m in incident.members:
        by_node[m.node] = by_node.get(m.node, 0) + 1
    named = [f"{node} ({n})" for node, n in list(by_node.items())[:_NODES_NAMED]]
    more = len(by_node) - len(named)
    rest = f" and {more} more nodes" if more > 0 else ""
    return (
        f"Speaks for {len(incident.members)} GPUs: {', '.join(named)}{rest}; none of them alerts "
        "by itself unless it stands out"
    )


def _work(incident: Incident) -> str:
    if incident.workload is None:
        return "Work: none known on this GPU."
    tenant = f" of {incident.workload.tenant}" if incident.workload.tenant else ""
    where = len(incident.workload_nodes)
    spread = f", on {where} nodes" if where > 1 else ""
    return f"Work: {incident.workload.kind} {incident.workload.id}{tenant}{spread}."


def _migrations(incident: Incident, control: Control) -> list[Migration]:
    """What was planned for this incident, or for a GPU that it speaks for, in time order."""
    own = {incident.id}
    if incident.members:
        own.update(i.id for i in control.incidents.values() if i.part_of == incident.id)
    return sorted(
        (
            m
            for m in control.migrations.values()
            if m.incident_id in own
            or (m.phase.is_open and incident.node and incident.node in (m.node, *m.exclude_nodes))
        ),
        key=lambda m: (m.planned_at_s, m.attempt),
    )


def _acts(incident: Incident, control: Control) -> list[str]:
    if incident.subject.kind is not SubjectKind.GPU and not incident.members:
        return []
    lines = [_act(m) for m in _migrations(incident, control)]
    if incident.released_by:
        lines.append(f"Released by {incident.released_by}.")
    elif incident.hold_reason:
        lines.append(f"Not done: {incident.hold_reason}.")
    if not lines and incident.subject.kind is SubjectKind.GPU:
        lines.append("Action: none.")
    return lines


def _act(m: Migration) -> str:
    where = m.node
    if m.operation is Operation.MOVE and m.workload is not None:
        target = describe(m.placement or m.backups)
        where = f"{m.workload.id} off {', '.join(m.exclude_nodes)} to {target}"
    state = "done" if m.phase is MigrationPhase.DONE else f"{m.phase} ({m.reason})"
    return f"Action: {m.operation} {where}: {state} [{m.operation_id}]"


def _to_do(incident: Incident) -> Iterable[str]:
    """What is left to a person."""
    if not incident.is_open:
        return
    kind = incident.subject.kind
    if kind is SubjectKind.FLEET and incident.kind is Kind.UNKNOWN:
        yield "To do: look at Prometheus, the exporters and the network between them."
    elif kind is SubjectKind.FLEET:
        yield "To do: find what changed: a driver, a limit, a job, the cooling."
        if incident.holds:
            yield (
                "The breaker is latched: nothing is fenced or moved until a person runs: "
                "sentinel reset-breaker"
            )
    elif kind is SubjectKind.NODE and incident.kind is Kind.UNKNOWN:
        yield (
            f"To do: look at {incident.node} and at the work in the scheduler, then run: "
            f"sentinel release {incident.node}"
        )
    elif kind is SubjectKind.JOB:
        yield f"To do: ask the owner of {called(incident.subject)}; no GPU is accused."
    elif kind in (SubjectKind.NODE, SubjectKind.RACK):
        yield f"To do: look at {called(incident.subject)} before any single GPU."
    elif incident.fenced:
        yield f"When it is repaired, run: sentinel release {incident.node}"
