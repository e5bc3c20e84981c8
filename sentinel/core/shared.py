"""The life of an incident that speaks for many GPUs: of a node, a rack, a job or the fleet.

Decides when a shared cause has stood long enough to be told, and when it is over; never which
GPUs share it. Timers grow only on ticks that have data, as those of a GPU's incident do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from sentinel.core.domain import (
    Evidence,
    Gpu,
    Incident,
    IncidentPhase,
    Kind,
    Member,
    Severity,
    Shared,
    SubjectKind,
)
from sentinel.core.incident import (
    Change,
    closed,
    confirm_for_s,
    enters,
    faded,
    incident_id,
    severity_rank,
)
from sentinel.core.policy import Times

MEMBERS_MAX: Final = 1024
_EVIDENCE_MAX: Final = 12
_WEAKER: Final = 0.9  # of the strongest moment: evidence of a weaker one is not taken over


def fold(
    incident: Incident | None,
    cause: Shared | None,
    gpus: tuple[Gpu, ...],
    now_s: float,
    dt_s: float,
    times: Times,
    *,
    cluster: str,
    known: Mapping[str, Incident],
    waits: bool = False,
    clear_for_s: float | None = None,
) -> Change | None:
    """One shared incident after a tick, None when there is nothing. `waits`: the whole fleet
    has a cause that speaks for this one too, unless it has been told already."""
    if incident is None:
        if cause is None:
            return None
        incident = _opened(cause, cluster, now_s, known)
        dt_s = 0.0
    incident = replace(incident, last_tick_s=now_s, held_s=incident.held_s + dt_s)
    if cause is None:
        clear_s = times.clear_for_s if clear_for_s is None else clear_for_s
        return _clears(incident, now_s, dt_s, clear_s)
    incident = _learns(incident, cause, gpus, dt_s, times)
    if incident.phase is IncidentPhase.CONFIRMED:
        return Change(incident)
    suspected = incident.phase is IncidentPhase.SUSPECTED
    need_s = _need_s(cause, times)
    if suspected and (waits or incident.held_s + 0.1 * times.tick_s < need_s):
        return Change(incident)
    if suspected:
        incident = replace(incident, confirmed_at_s=now_s)
    why = cause.evidence[0].text if cause.evidence else cause.pattern
    incident = replace(incident, held_s=0.0)
    return Change(enters(incident, IncidentPhase.CONFIRMED, now_s), why)


def _need_s(cause: Shared, times: Times) -> float:
    return confirm_for_s(cause.kind, times) if cause.confirm_for_s is None else cause.confirm_for_s


def _opened(cause: Shared, cluster: str, now_s: float, known: Mapping[str, Incident]) -> Incident:
    topic = "" if cause.subject.kind is not SubjectKind.FLEET else str(cause.kind)
    name, more = incident_id(cluster, cause.subject, topic, now_s), 1
    while name in known:  # the clock has stepped back to the very same moment
        name, more = incident_id(cluster, cause.subject, f"{topic}{more}", now_s), more + 1
    severity = cause.severity
    if _grows(cause) and severity is Severity.CRITICAL:
        severity = Severity.WARNING
    return Incident(
        id=name,
        subject=cause.subject,
        phase=IncidentPhase.SUSPECTED,
        opened_at_s=now_s,
        since_s=now_s,
        held_s=0.0,
        last_tick_s=now_s,
        kind=cause.kind,
        severity=severity,
        worst=severity,
        pattern=cause.pattern,
        score=0.0,
        evidence=(),
        node=cause.node,
        workload=cause.workload,
        bundle_id=cause.bundle_id,
    )


def _grows(cause: Shared) -> bool:
    """Soft evidence opens as a ticket: a page has to stand as long before it counts."""
    return cause.kind is Kind.DEVIANT and cause.subject.kind is not SubjectKind.FLEET


def _learns(
    incident: Incident, cause: Shared, gpus: tuple[Gpu, ...], dt_s: float, times: Times
) -> Incident:
    members = _with_members(incident.members, cause, gpus)
    worst, stronger_s = incident.worst, faded(incident, dt_s)
    if severity_rank(cause.severity) > severity_rank(worst):
        # the tick at which it first stands begins its time, and adds none
        stronger_s = 0.0 if incident.stronger_s is None else incident.stronger_s + dt_s
        if not _grows(cause) or stronger_s + 0.1 * times.tick_s >= _need_s(cause, times):
            worst, stronger_s = cause.severity, None
    incident = replace(incident, worst=worst, stronger_s=stronger_s, members=members)
    harder = cause.kind is not Kind.DEVIANT and incident.kind is Kind.DEVIANT
    if harder or cause.kind is incident.kind:
        if harder or cause.score >= _WEAKER * incident.score:
            incident = replace(incident, pattern=cause.pattern, evidence=_told(cause, members))
        incident = replace(
            incident,
            kind=cause.kind,
            score=max(incident.score, cause.score),
            workload=cause.workload or incident.workload,
            bundle_id=cause.bundle_id or incident.bundle_id,
        )
    return incident


def _told(cause: Shared, members: tuple[Member, ...]) -> tuple[Evidence, ...]:
    """An event comes in parts: its headline counts all of them."""
    if not cause.evidence:
        return ()
    head, *rest = cause.evidence
    if cause.kind is not Kind.DEVIANT and len(members) > len(cause.rows) > 0:
        head = replace(head, text=f"{head.text}; {len(members)} GPUs in all since it began")
    return (head, *rest)[:_EVIDENCE_MAX]


def _with_members(
    before: tuple[Member, ...], cause: Shared, gpus: tuple[Gpu, ...]
) -> tuple[Member, ...]:
    known = {m.gpu_uuid for m in before}
    new = tuple(
        Member(gpu.uuid, gpu.node, gpu.index)
        for gpu in (gpus[row] for row in cause.rows)
        if gpu.uuid not in known
    )
    return (before + new)[:MEMBERS_MAX] if new else before


def _clears(incident: Incident, now_s: float, dt_s: float, clear_for_s: float) -> Change:
    if incident.phase is IncidentPhase.SUSPECTED:
        left_s = incident.held_s - 2.0 * dt_s  # this tick's time was added before
        if left_s > 0.0:
            return Change(replace(incident, held_s=left_s))
        return Change(closed(replace(incident, held_s=0.0), now_s), "over before confirmed")
    if incident.phase is IncidentPhase.CONFIRMED:
        over = enters(replace(incident, held_s=0.0), IncidentPhase.CLEARING, now_s)
        return Change(over, "no longer seen")
    if incident.held_s < clear_for_s:
        return Change(incident)
    return Change(closed(incident, now_s), f"not seen for {incident.held_s:.0f} s")
