"""The life of an incident: suspected, confirmed, clearing, resolved.

Decides when a deviation has stood long enough to be told, and when it is over; never what
is done about it. Timers grow only by the time of ticks that have data. What an incident
claims is earned by time: a stronger verdict takes it over only once it has stood as long as
its kind must, so that one noisy tick neither pages nor acts.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from sentinel.core.domain import (
    NOVEL,
    Evidence,
    Incident,
    IncidentPhase,
    Kind,
    PastAlert,
    Severity,
    Subject,
    SubjectKind,
    Verdict,
    Workload,
)
from sentinel.core.patterns import Book, Signature, stronger
from sentinel.core.policy import Times

RESEND_S: Final = 900.0  # how long a resolved alert is told again
_EVIDENCE_MAX: Final = 12
_SEVERITY_RANK: Final = {Severity.INFO: 0, Severity.WARNING: 1, Severity.CRITICAL: 2}
# a fault names its cause, so it outranks a GPU that is merely gone
_KIND_RANK: Final = {Kind.DEVIANT: 1, Kind.LOST: 2, Kind.FAULT: 3}
_OF_A_MOMENT: Final = ("density", "peers")  # kinds of evidence that hold now or not at all
_GPU_ALERTS: Final = {
    Kind.FAULT: "SentinelGpuFault",
    Kind.LOST: "SentinelGpuLost",
    Kind.DEVIANT: "SentinelGpuDegraded",
}


@dataclass(frozen=True, slots=True)
class Change:
    """An incident after one tick, and why its phase changed if it did."""

    incident: Incident
    why: str = ""


@dataclass(frozen=True, slots=True)
class Sighting:
    """A verdict with what else the tick knows of its GPU."""

    verdict: Verdict
    workload: Workload | None = None
    workload_nodes: tuple[str, ...] = ()


def alertname(incident: Incident) -> str:
    """The name that this incident's alert goes by."""
    if incident.subject.kind is SubjectKind.RACK:
        return "SentinelFleetEvent"
    if incident.subject.kind is SubjectKind.FLEET:
        return "SentinelBlind" if incident.kind is Kind.UNKNOWN else "SentinelFleetEvent"
    if incident.subject.kind is SubjectKind.NODE:
        return "SentinelMoveStuck" if incident.kind is Kind.UNKNOWN else "SentinelNodeFault"
    if incident.subject.kind is SubjectKind.JOB:
        return "SentinelJobSuspect"
    return _GPU_ALERTS.get(incident.kind, "SentinelGpuDegraded")


def incident_id(cluster: str, subject: Subject, topic: str, opened_at_s: float) -> str:
    """Deterministic: the same opening always has the same name."""
    text = f"{cluster}|{subject.kind}:{subject.id}:{topic}|{opened_at_s!r}"
    return "inc-" + hashlib.sha256(text.encode()).hexdigest()[:12]


def severity_rank(severity: Severity) -> int:
    return _SEVERITY_RANK[severity]


def stands(incident: Incident) -> bool:
    """Whether its evidence holds right now: confirmed, or hard evidence that has not been
    cleared by a reset, long health or a person, though the GPU looks well at the moment."""
    if incident.phase is IncidentPhase.CLEARING:
        return incident.latched
    return incident.phase is IncidentPhase.CONFIRMED


def confirm_for_s(kind: Kind, times: Times) -> float:
    return {Kind.FAULT: times.fault_for_s, Kind.LOST: times.lost_for_s}.get(
        kind, times.deviant_for_s
    )


def _long_enough(stood_s: float, kind: Kind, times: Times) -> bool:
    # ticks come a few milliseconds early or late; that must not cost a whole tick
    return stood_s + 0.1 * times.tick_s >= confirm_for_s(kind, times)


def opened(
    sighting: Sighting,
    cluster: str,
    now_s: float,
    known: Mapping[str, Incident] | None = None,
    book: Book | None = None,
) -> Incident:
    """A suspicion, before any time has passed. Soft evidence opens as a ticket at most: a
    page has to stand as long as any deviation before it counts. `book` names what it is like;
    without one it goes by the verdict's word."""
    verdict = sighting.verdict
    subject = Subject(SubjectKind.GPU, verdict.gpu.uuid)
    name, topic = incident_id(cluster, subject, "", now_s), 1
    while known and name in known:  # the clock has stepped back to the very same moment
        name, topic = incident_id(cluster, subject, str(topic), now_s), topic + 1
    soft = verdict.kind is Kind.DEVIANT
    severity = verdict.severity
    if soft and severity is Severity.CRITICAL:
        severity = Severity.WARNING
    incident = Incident(
        id=name,
        subject=subject,
        phase=IncidentPhase.SUSPECTED,
        opened_at_s=now_s,
        since_s=now_s,
        held_s=0.0,
        last_tick_s=now_s,
        kind=verdict.kind,
        severity=severity,
        worst=severity,
        pattern=verdict.pattern,
        score=_known(verdict.score),
        evidence=verdict.evidence[:_EVIDENCE_MAX],
        gpu_uuid=verdict.gpu.uuid,
        gpu_index=verdict.gpu.index,
        node=verdict.gpu.node,
        model=verdict.gpu.model,
        workload=sighting.workload,
        workload_nodes=sighting.workload_nodes,
        latched=verdict.latch,
        may_fence=verdict.may_fence and not soft,
        may_move=verdict.may_move and not soft,
        bundle_id=verdict.bundle_id,
        low=_known(verdict.score) if soft else None,
        withheld=verdict.withheld,
    )
    return _likened(incident, verdict, book)


def _likened(incident: Incident, verdict: Verdict, book: Book | None) -> Incident:
    """With the signature that its reasons have shown so far, and the name that goes with it.
    Nothing that a suspicion of soft evidence showed on its way is kept: while means still
    fill with the new state, what moves last looks as if it stayed behind."""
    if book is None:
        return incident
    seen: Signature = book.signature(verdict.evidence)
    begins = incident.phase is IncidentPhase.SUSPECTED and verdict.kind is Kind.DEVIANT
    if not begins or incident.kind is not Kind.DEVIANT:
        seen = stronger(incident.signature, seen)
    return named(replace(incident, signature=seen), book)


def named(incident: Incident, book: Book) -> Incident:
    """With the name of the pattern that its signature is like, and how far it is. Where none is
    near, soft evidence is novel; the hardware's own word keeps the catalogue's name for it."""
    found = book.match(incident.signature)
    if found is None:
        return incident
    like, name = "", incident.pattern
    if found.near:
        like, name = found.pattern.id, found.pattern.name
    elif incident.kind is Kind.DEVIANT or book.called(incident.like) == name:
        name = NOVEL
    return replace(incident, like=like, pattern=name, distance=round(found.distance, 3))


def deviates(
    incident: Incident,
    verdict: Verdict,
    now_s: float,
    dt_s: float,
    times: Times,
    folded: bool = False,
    book: Book | None = None,
) -> Change:
    """One more tick that is not normal. `folded`: the whole fleet deviates and one fleet
    incident speaks for all, so soft suspicions wait. `book` names what it is like."""
    incident = _levelled(_learns(incident, verdict, dt_s, times), verdict, dt_s, times)
    incident = _likened(incident, verdict, book)
    incident = replace(incident, last_tick_s=now_s)
    held_s = incident.held_s + dt_s
    if incident.phase is IncidentPhase.CONFIRMED:
        return Change(replace(incident, held_s=held_s))
    if incident.phase is IncidentPhase.CLEARING:
        back = enters(replace(incident, held_s=0.0), IncidentPhase.CONFIRMED, now_s)
        return Change(back, f"{verdict.kind} again")
    return _suspected(replace(incident, held_s=held_s), now_s, times, folded)


def recovers(
    incident: Incident, now_s: float, dt_s: float, times: Times, *, reset: bool, busy: bool
) -> Change:
    """One tick that is normal. `reset`: the GPU was reset or its host rebooted; `busy`: a
    migration of this incident is under way, so it stays open."""
    incident = replace(
        incident, last_tick_s=now_s, stronger_s=faded(incident, dt_s), low=None, low_s=0.0
    )
    if reset:
        incident = was_reset(incident)
    if incident.phase is IncidentPhase.SUSPECTED:
        return _doubts(incident, now_s, dt_s, times)
    if incident.phase is IncidentPhase.CONFIRMED:
        why = "normal after a reset" if reset else "normal again"
        return Change(enters(replace(incident, held_s=0.0), IncidentPhase.CLEARING, now_s), why)
    incident = replace(incident, held_s=incident.held_s + dt_s)
    wait_s = times.clear_latched_for_s if incident.latched else times.clear_for_s
    if incident.held_s < wait_s or busy or _waits_for_repair(incident):
        return Change(incident)
    return Change(closed(incident, now_s), f"normal for {incident.held_s:.0f} s")


def was_reset(incident: Incident) -> Incident:
    """Its GPU began anew, whatever it looks like at that moment: a reset is seen only once."""
    return replace(incident, latched=False, repaired=True)


def _waits_for_repair(incident: Incident) -> bool:
    """A GPU whose work was taken away looks well because it idles. Its incident ends by a
    reset, by a person's release, or, if it was lost, by its coming back."""
    taken = incident.moved and incident.fenced
    return taken and not incident.repaired and incident.kind is not Kind.LOST


def closed(incident: Incident, now_s: float) -> Incident:
    return replace(enters(incident, IncidentPhase.RESOLVED, now_s), resolved_at_s=now_s)


def _doubts(incident: Incident, now_s: float, dt_s: float, times: Times) -> Change:
    """A normal tick within a suspicion. Hard evidence is an event and stands without being
    repeated; soft evidence fades as slowly as it grew; a GPU that came back was never lost."""
    if incident.latched and incident.kind is Kind.FAULT:
        return _suspected(replace(incident, held_s=incident.held_s + dt_s), now_s, times, False)
    left_s = incident.held_s - dt_s if incident.kind is Kind.DEVIANT else 0.0
    if left_s > 0.0:
        return Change(replace(incident, held_s=left_s))
    return Change(closed(replace(incident, held_s=0.0), now_s), "normal again before confirmed")


def _suspected(incident: Incident, now_s: float, times: Times, folded: bool) -> Change:
    waits = folded and incident.kind is Kind.DEVIANT
    if waits or not _long_enough(incident.held_s, incident.kind, times):
        return Change(incident)
    incident = replace(incident, confirmed_at_s=now_s)
    why = f"{incident.kind} for {incident.held_s:.0f} s: {incident.pattern}"
    if incident.withheld:
        why += f"; {incident.withheld}"
    return Change(enters(incident, IncidentPhase.CONFIRMED, now_s), why)


def _learns(incident: Incident, verdict: Verdict, dt_s: float, times: Times) -> Incident:
    """What a verdict adds: the same claim is refreshed, a stronger one takes over once it
    has stood long enough, a weaker one may still bring hard evidence."""
    ours = (_SEVERITY_RANK[incident.worst], _KIND_RANK.get(incident.kind, 0))
    theirs = (_SEVERITY_RANK[verdict.severity], _KIND_RANK.get(verdict.kind, 0))
    if theirs > ours:
        # the tick at which it first stands begins its time, and adds none
        stood_s = 0.0 if incident.stronger_s is None else incident.stronger_s + dt_s
        if _long_enough(stood_s, verdict.kind, times):
            return _taken_over(incident, verdict)
        return replace(_refreshed(incident, verdict), stronger_s=stood_s)
    incident = replace(_refreshed(incident, verdict), stronger_s=faded(incident, dt_s))
    if theirs < ours:
        return incident
    return replace(
        incident,
        withheld=verdict.withheld or incident.withheld,
        score=max(incident.score, _known(verdict.score)),
        may_fence=incident.may_fence or verdict.may_fence,
        may_move=incident.may_move or verdict.may_move,
        latched=incident.latched or verdict.latch,
    )


def _levelled(incident: Incident, verdict: Verdict, dt_s: float, times: Times) -> Incident:
    """The height that lasted, for the budget: the lowest score of one stretch of time after the
    other, each as long as a deviation must last."""
    if verdict.kind is not Kind.DEVIANT:
        return incident
    score = _known(verdict.score)
    if incident.low is None:
        return replace(incident, low=score, low_s=0.0)
    low, low_s = min(incident.low, score), incident.low_s + dt_s
    if not _long_enough(low_s, Kind.DEVIANT, times):
        return replace(incident, low=low, low_s=low_s)
    return replace(incident, level=max(incident.level, low), low=None, low_s=0.0)


def faded(incident: Incident, dt_s: float) -> float | None:
    """How long a stronger claim has stood, after a tick without it."""
    left_s = (incident.stronger_s or 0.0) - dt_s
    return left_s if left_s > 0.0 else None


def _refreshed(incident: Incident, verdict: Verdict) -> Incident:
    """Newer reasons without newer claims. Soft ones are of one moment, the strongest."""
    hard = tuple(e for e in verdict.evidence if e.kind not in _OF_A_MOMENT)
    fresh = verdict.kind is Kind.DEVIANT and verdict.score >= 0.9 * incident.score
    if verdict.kind is not incident.kind or not fresh:
        return replace(incident, evidence=_joined(incident.evidence, hard))
    return replace(
        incident,
        score=max(incident.score, _known(verdict.score)),
        pattern=verdict.pattern,
        evidence=_headed(incident.evidence, verdict.evidence),
    )


def _taken_over(incident: Incident, verdict: Verdict) -> Incident:
    return replace(
        incident,
        kind=verdict.kind,
        worst=verdict.severity,
        pattern=verdict.pattern,
        score=max(incident.score, _known(verdict.score)),
        evidence=_headed(incident.evidence, verdict.evidence),
        may_fence=verdict.may_fence,
        may_move=verdict.may_move,
        latched=incident.latched or verdict.latch,
        stronger_s=None,
        bundle_id=verdict.bundle_id or incident.bundle_id,
        withheld=verdict.withheld,
    )


def _known(score: float) -> float:
    return score if math.isfinite(score) else 0.0


def _source(evidence: Evidence) -> tuple[str, str, float | None]:
    """What one entry stands for: a source of hard evidence, and for an Xid also its code."""
    code = evidence.value if evidence.kind == "xid" else None
    return evidence.kind, evidence.metric, code


def _headed(old: tuple[Evidence, ...], new: tuple[Evidence, ...]) -> tuple[Evidence, ...]:
    """The new evidence first. Soft reasons are of one moment: they go together."""
    known = {_source(e) for e in new}
    kept = tuple(e for e in old if e.kind not in _OF_A_MOMENT and _source(e) not in known)
    return (new + kept)[:_EVIDENCE_MAX]


def _joined(old: tuple[Evidence, ...], new: tuple[Evidence, ...]) -> tuple[Evidence, ...]:
    """The old evidence first, brought up to date: what came first is nearest the cause."""
    latest = {_source(e): e for e in new}
    kept = tuple(latest.pop(_source(e), e) for e in old)
    return (kept + tuple(latest.values()))[:_EVIDENCE_MAX]


def _alert_severity(worst: Severity, incident: Incident) -> Severity:
    """Once its work has left a fenced node nothing is at risk, and a page becomes a ticket."""
    calm = incident.moved and incident.fenced
    return Severity.WARNING if calm and worst is Severity.CRITICAL else worst


def enters(incident: Incident, phase: IncidentPhase, now_s: float) -> Incident:
    return replace(incident, phase=phase, since_s=now_s)


def _shown(before: Incident, after: Incident, now_s: float) -> Incident:
    """With its alert's identity kept track of: labels that change end one alert and begin
    another, and the ended one has to be told as resolved or it would hang."""
    after = replace(after, severity=_alert_severity(after.worst, after))
    if not after.fires:
        return after
    if not before.fires or before.alert_since_s is None:
        return replace(after, alert_since_s=now_s)
    name, severity = alertname(before), before.severity
    if (name, severity) == (alertname(after), after.severity):
        return after
    ended = PastAlert(name, severity, before.alert_since_s, now_s)
    recent = tuple(p for p in before.past_alerts if now_s - p.ended_at_s <= RESEND_S)
    return replace(after, alert_since_s=now_s, past_alerts=(*recent, ended))


def settle(before: Incident | None, after: Incident, now_s: float) -> Incident:
    """The last touch of every change: severity and alert identity as they are now told."""
    return _shown(before or replace(after, phase=IncidentPhase.SUSPECTED), after, now_s)


def stuck_incident(
    cluster: str, node: str, pattern: str, text: str, operation_id: str, now_s: float
) -> Incident:
    """A migration that needs a person: confirmed at once, closed by release alone."""
    subject = Subject(SubjectKind.NODE, node)
    return Incident(
        id=incident_id(cluster, subject, operation_id, now_s),
        subject=subject,
        phase=IncidentPhase.CONFIRMED,
        opened_at_s=now_s,
        since_s=now_s,
        held_s=0.0,
        last_tick_s=now_s,
        kind=Kind.UNKNOWN,
        severity=Severity.CRITICAL,
        worst=Severity.CRITICAL,
        pattern=pattern,
        score=0.0,
        evidence=(Evidence("migration", operation_id, text, at_s=now_s),),
        node=node,
        confirmed_at_s=now_s,
    )
