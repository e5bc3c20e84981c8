"""When everything is held: too little telemetry, or too much of the fleet at once.

Decides whether this tick may be acted on at all, and the life of the one incident that
says so to people; never for or against one GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from sentinel.core.domain import (
    Control,
    Evidence,
    Frame,
    Incident,
    IncidentPhase,
    Kind,
    Presence,
    Reason,
    Severity,
    Subject,
    SubjectKind,
    Verdict,
)
from sentinel.core.incident import (
    Change,
    closed,
    enters,
    incident_id,
    severity_rank,
    stands,
)
from sentinel.core.policy import Limits

NEW_FOR_S: Final = 1800.0  # a GPU that has been deviating for longer is not news of the fleet

_NODES_NAMED: Final = 8


@dataclass(frozen=True, slots=True)
class FleetHold:
    """Why everything is held, if it is, and whether hard evidence alone is enough for it."""

    reason: Reason | None = None
    hard: bool = False


@dataclass(frozen=True, slots=True)
class _Odd:
    node: str
    hard: bool


def coverage_percent(frame: Frame) -> float:
    """How much of the known fleet this frame speaks for. A GPU that is missing while its
    siblings report has been spoken for: that is evidence, not silence."""
    coverage = frame.coverage
    if coverage.blind or coverage.gpus_expected == 0:
        return 0.0
    told = np.count_nonzero(
        (frame.presence == Presence.PRESENT) | (frame.presence == Presence.VANISHED)
    )
    return 100.0 * max(int(told), coverage.gpus_reporting) / coverage.gpus_expected


def coverage_reason(frame: Frame, limits: Limits) -> Reason | None:
    """Why this tick's telemetry is not enough to act on."""
    coverage = frame.coverage
    because = f": {coverage.reason}" if coverage.reason else ""
    if coverage.blind:
        return Reason("blind", f"no telemetry at all{because}")
    if coverage.gpus_expected == 0:
        return Reason("coverage", f"no GPU has ever been seen{because}")
    percent = coverage_percent(frame)
    if percent < limits.coverage_percent:
        text = (
            f"only {percent:.0f} % of {coverage.gpus_expected} GPUs report, "
            f"{limits.coverage_percent:.0f} % are needed"
        )
        return Reason("coverage", text + because)
    if coverage.partial:
        return Reason("partial", f"the telemetry is marked as partial{because}")
    return None


def fleet_hold(
    frame: Frame,
    verdicts: tuple[Verdict, ...],
    control: Control,
    limits: Limits,
    nodes: int,
    now_s: float,
) -> FleetHold:
    """How much of the fleet newly deviates at once, before this tick's incidents are folded.

    The GPUs that deviate on this very tick count, and those that opened within `NEW_FOR_S`
    and still stand. Fenced nodes do not: they are known. Neither do errors that only the
    application makes: a crashing job of a thousand GPUs is not a fleet that breaks.
    """
    odd = _odd_gpus(verdicts, control, now_s)
    reporting = int(np.count_nonzero(frame.presence == Presence.PRESENT))
    limit = max(float(limits.fleet_hold_gpus), limits.fleet_hold_percent / 100.0 * reporting)
    if nodes <= 1:
        limit = max(limit, 3.0)
    on_nodes = sorted({o.node for o in odd.values()})
    if len(odd) < limit or len(on_nodes) < min(2, nodes):
        return FleetHold()
    more = ", ..." if len(on_nodes) > _NODES_NAMED else ""
    text = (
        f"{len(odd)} GPUs on {len(on_nodes)} nodes began to deviate at once (limit {limit:.0f} "
        f"of {reporting} reporting): more likely the work or the software than so many broken "
        f"GPUs ({', '.join(on_nodes[:_NODES_NAMED])}{more})"
    )
    return FleetHold(Reason("fleet_hold", text), hard=sum(o.hard for o in odd.values()) >= limit)


def _odd_gpus(verdicts: tuple[Verdict, ...], control: Control, now_s: float) -> Mapping[str, _Odd]:
    odd = {
        v.gpu.uuid: _Odd(v.gpu.node, v.kind is not Kind.DEVIANT)
        for v in verdicts
        if v.kind is not Kind.FAULT or v.may_fence or v.latch
    }
    for i in control.incidents.values():
        if i.subject.kind is not SubjectKind.GPU or not i.is_open or i.gpu_uuid is None:
            continue
        if now_s - i.opened_at_s > NEW_FOR_S:
            odd.pop(i.gpu_uuid, None)
        elif (i.phase is IncidentPhase.SUSPECTED or stands(i)) and (
            i.kind is not Kind.FAULT or i.may_fence or i.latched
        ):
            odd[i.gpu_uuid] = _Odd(i.node, i.kind is not Kind.DEVIANT)
    return {uuid: o for uuid, o in odd.items() if o.node not in control.quarantine}


@dataclass(frozen=True, slots=True)
class FleetFinding:
    """Something that concerns the fleet as a whole, as long as it stands."""

    kind: Kind
    severity: Severity
    pattern: str
    text: str
    confirm_for_s: float


def fold_fleet(
    incident: Incident | None,
    finding: FleetFinding | None,
    cluster: str,
    now_s: float,
    dt_s: float,
    clear_for_s: float,
) -> Change | None:
    """One fleet incident, from first sign to all clear. None when there is nothing."""
    if incident is None:
        if finding is None:
            return None
        incident = _fleet_opened(finding, cluster, now_s)
        dt_s = 0.0
    incident = replace(incident, last_tick_s=now_s, held_s=incident.held_s + dt_s)
    if finding is None:
        return _fleet_clears(incident, now_s, dt_s, clear_for_s)
    worst = max(incident.worst, finding.severity, key=severity_rank)
    evidence = (Evidence("fleet", "", finding.text, at_s=now_s),)
    incident = replace(incident, worst=worst, evidence=evidence)
    if incident.phase is IncidentPhase.CONFIRMED:
        return Change(incident)
    suspected = incident.phase is IncidentPhase.SUSPECTED
    if suspected and incident.held_s < finding.confirm_for_s:
        return Change(incident)
    if suspected:
        incident = replace(incident, confirmed_at_s=now_s)
    incident = replace(incident, held_s=0.0)
    return Change(enters(incident, IncidentPhase.CONFIRMED, now_s), finding.text)


def _fleet_opened(finding: FleetFinding, cluster: str, now_s: float) -> Incident:
    subject = Subject(SubjectKind.FLEET, cluster)
    return Incident(
        id=incident_id(cluster, subject, finding.kind, now_s),
        subject=subject,
        phase=IncidentPhase.SUSPECTED,
        opened_at_s=now_s,
        since_s=now_s,
        held_s=0.0,
        last_tick_s=now_s,
        kind=finding.kind,
        severity=finding.severity,
        worst=finding.severity,
        pattern=finding.pattern,
        score=0.0,
        evidence=(),
    )


def _fleet_clears(incident: Incident, now_s: float, dt_s: float, clear_for_s: float) -> Change:
    if incident.phase is IncidentPhase.SUSPECTED:
        left_s = incident.held_s - 2.0 * dt_s  # this tick's time was added above
        if left_s > 0.0:
            return Change(replace(incident, held_s=left_s))
        return Change(closed(replace(incident, held_s=0.0), now_s), "over before confirmed")
    if incident.phase is IncidentPhase.CONFIRMED:
        over = enters(replace(incident, held_s=0.0), IncidentPhase.CLEARING, now_s)
        return Change(over, "no longer seen")
    if incident.held_s < clear_for_s:
        return Change(incident)
    return Change(closed(incident, now_s), f"not seen for {incident.held_s:.0f} s")
