"""What people are told: alerts as a projection of the state, in words and numbers.

Decides how an incident reads at three in the morning; never whether there is one. The same
state always gives the same alerts, so that they can be sent again every tick.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sentinel.core.domain import (
    Control,
    Evidence,
    Incident,
    IncidentPhase,
    Kind,
    Migration,
    MigrationPhase,
    Operation,
    Severity,
    SubjectKind,
)
from sentinel.core.incident import RESEND_S, alertname
from sentinel.core.patterns import likeness
from sentinel.core.placement import describe
from sentinel.core.policy import Policy

__all__ = ["Alert", "alertname", "project", "summary"]

_KEEP_S = 300.0
_EVIDENCE_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert of the Alertmanager API. It is resolved where it ends in the past."""

    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    starts_at_s: float
    ends_at_s: float
    generator_url: str = ""
    resolved: bool = False


def project(
    control: Control, policy: Policy, now_s: float, *, external_url: str = ""
) -> tuple[Alert, ...]:
    """Every alert to be sent now: those that fire, and for 15 minutes those that are over.

    Where an incident's alert changed its name or severity, the former one is resolved. An
    alert that is over never hides one with the same labels that fires. Incidents of severity
    info are written down only.
    """
    ends_at_s = now_s + max(4.0 * policy.times.tick_s, _KEEP_S)
    chosen: dict[tuple[tuple[str, str], ...], Alert] = {}
    newest_last = sorted(control.incidents.values(), key=lambda i: (i.opened_at_s, i.id))
    for incident in newest_last:
        if _spoken_for(incident, control):
            continue
        for alert in _alerts(incident, control, policy, now_s, ends_at_s, external_url):
            key = tuple(sorted(alert.labels.items()))
            other = chosen.get(key)
            if other is None or other.resolved or not alert.resolved:
                chosen[key] = alert
    return tuple(chosen.values())


def _spoken_for(incident: Incident, control: Control) -> bool:
    """Whether another incident, of the node or the job, tells of this one too."""
    group = control.incidents.get(incident.part_of)
    return group is not None and group.fires and group.severity is not Severity.INFO


def _alerts(
    incident: Incident,
    control: Control,
    policy: Policy,
    now_s: float,
    ends_at_s: float,
    external_url: str,
) -> Iterator[Alert]:
    texts = _annotations(incident, control, policy, now_s, external_url)
    url = texts.get("dashboard_url", "")

    def alert(name: str, severity: Severity, start_s: float, end_s: float, over: bool) -> Alert:
        # an alert must not end before, or when, it starts
        end_s = max(end_s, start_s + 1e-3)
        return Alert(_labels(incident, policy, name, severity), texts, start_s, end_s, url, over)

    for past in incident.past_alerts:
        if past.severity is not Severity.INFO and now_s - past.ended_at_s <= RESEND_S:
            yield alert(past.alertname, past.severity, past.started_at_s, past.ended_at_s, True)
    start_s = incident.alert_since_s
    if start_s is None or incident.severity is Severity.INFO:
        return
    name = alertname(incident)
    if incident.fires:
        yield alert(name, incident.severity, start_s, ends_at_s, False)
    elif incident.resolved_at_s is not None and now_s - incident.resolved_at_s <= RESEND_S:
        yield alert(name, incident.severity, start_s, incident.resolved_at_s, True)


def _labels(incident: Incident, policy: Policy, name: str, severity: Severity) -> dict[str, str]:
    labels = {"alertname": name, "severity": severity.value, "cluster": policy.cluster}
    if incident.node:
        labels["node"] = incident.node
    if incident.gpu_uuid:
        labels["gpu_uuid"] = incident.gpu_uuid
    if incident.subject.kind is SubjectKind.JOB:
        labels["workload"] = incident.subject.id
    return labels


def _annotations(
    incident: Incident, control: Control, policy: Policy, now_s: float, external_url: str
) -> dict[str, str]:
    texts = {
        "summary": summary(incident),
        "description": _description(incident, control, policy, now_s),
        "incident_id": incident.id,
        "pattern": incident.pattern,
    }
    if incident.subject.kind is SubjectKind.GPU:
        texts["score"] = f"{incident.score:.2f}"
    if incident.distance is not None:
        texts["pattern_distance"] = f"{incident.distance:.2f}"
    work = incident.workload
    if work is not None:
        texts["pod" if work.kind == "pod" else "workload"] = work.id
    if external_url:
        root = external_url.rstrip("/")
        texts["dashboard_url"] = f"{root}/?incident={incident.id}"
        texts["runbook_url"] = f"{root}/runbooks#{alertname(incident).lower()}"
    return texts


def summary(incident: Incident) -> str:
    """One line: what, where, and whether anything is at risk."""
    if incident.subject.kind is not SubjectKind.GPU:
        first = incident.evidence[0].text if incident.evidence else incident.pattern
        lead = {
            "SentinelBlind": "GPU Sentinel cannot see the fleet",
            "SentinelFleetEvent": "Many GPUs deviate at once, all actions are stopped",
            "SentinelMoveStuck": f"{incident.node} needs a person",
        }.get(alertname(incident), incident.subject.id)
        return f"{lead}: {first}"
    done = ""
    if incident.moved and incident.fenced:
        done = "; its work has moved, the node is fenced"
    elif incident.fenced:
        done = "; the node is fenced"
    return f"{_place(incident)}: {incident.pattern}{done}"


def _place(incident: Incident) -> str:
    number = f" {incident.gpu_index}" if incident.gpu_index is not None else ""
    model = f" ({incident.model})" if incident.model else ""
    return f"GPU{number} of {incident.node}{model}"


def _description(incident: Incident, control: Control, policy: Policy, now_s: float) -> str:
    """What is seen, what is suspected, whom it hurts, what was done, what is left to do."""
    lines = [f"Seen: {_reason(e)}" for e in incident.evidence[:_EVIDENCE_SHOWN]]
    if len(incident.evidence) > _EVIDENCE_SHOWN:
        lines.append(f"and {len(incident.evidence) - _EVIDENCE_SHOWN} more reasons")
    if incident.subject.kind is SubjectKind.GPU:
        lines.append(f"Suspected: {incident.pattern} ({_suspicion(incident)}).")
        if incident.withheld:
            lines.append(f"{incident.withheld[0].upper()}{incident.withheld[1:]}.")
        lines += filter(None, [likeness(incident, control.patterns)])
        lines.append(f"Since: {_span(now_s - incident.opened_at_s)}{_phase(incident, policy)}.")
        lines.append(_work(incident))
        lines += _acts(incident, control)
    elif incident.kind is Kind.UNKNOWN and incident.subject.kind is SubjectKind.FLEET:
        lines.append(
            "While this lasts no GPU is judged, no timer runs and nothing is moved. Look at "
            "Prometheus, the exporters and the network between them."
        )
    elif incident.subject.kind is SubjectKind.FLEET:
        lines.append(
            "Look for what changed: a driver, a job, the cooling. The breaker is latched: "
            "nothing is fenced or moved until a person runs: sentinel reset-breaker"
        )
    elif incident.subject.kind is SubjectKind.NODE:
        lines.append(
            f"Both sides are left alone and no further attempt is made. Look at {incident.node} "
            f"and at the work in the scheduler, then run: sentinel release {incident.node}"
        )
    return "\n".join(lines)


def _reason(evidence: Evidence) -> str:
    return evidence.text or f"{evidence.metric} {evidence.value}"


def _suspicion(incident: Incident) -> str:
    if incident.kind is Kind.DEVIANT:
        return f"{incident.score:.2f} times the radius of normal, 1 is its edge"
    if incident.kind is Kind.LOST:
        return "the GPU no longer reports, its neighbours do"
    return "reported by the hardware or its driver"


def _phase(incident: Incident, policy: Policy) -> str:
    if incident.phase is not IncidentPhase.CLEARING:
        return ""
    times = policy.times
    need_s = times.clear_latched_for_s if incident.latched else times.clear_for_s
    return f"; looks normal again for {_span(incident.held_s)} of {_span(need_s)}"


def _work(incident: Incident) -> str:
    if incident.workload is None:
        return "Work: none known on this GPU."
    tenant = f" of {incident.workload.tenant}" if incident.workload.tenant else ""
    where = len(incident.workload_nodes)
    spread = f", on {where} nodes" if where > 1 else ""
    return f"Work: {incident.workload.kind} {incident.workload.id}{tenant}{spread}."


def _acts(incident: Incident, control: Control) -> list[str]:
    mine = sorted(
        (
            m
            for m in control.migrations.values()
            if m.incident_id == incident.id
            or (m.phase.is_open and incident.node in (m.node, *m.exclude_nodes))
        ),
        key=lambda m: (m.planned_at_s, m.attempt),
    )
    lines = [_act(m) for m in mine]
    if incident.released_by:
        lines.append(f"Released by {incident.released_by}.")
    elif incident.hold_reason:
        lines.append(f"Not done: {incident.hold_reason}.")
    if incident.fenced:
        lines.append(f"When it is repaired, run: sentinel release {incident.node}")
    return lines or ["Action: none."]


def _act(m: Migration) -> str:
    where = m.node
    if m.operation is Operation.MOVE and m.workload is not None:
        target = describe(m.placement or m.backups)
        where = f"{m.workload.id} off {', '.join(m.exclude_nodes)} to {target}"
    state = "done" if m.phase is MigrationPhase.DONE else f"{m.phase} ({m.reason})"
    return f"Action: {m.operation} {where}: {state} [{m.operation_id}]"


def _span(seconds: float) -> str:
    if seconds < 120.0:
        return f"{seconds:.0f} s"
    if seconds < 7200.0:
        return f"{seconds / 60.0:.0f} min"
    return f"{seconds / 3600.0:.1f} h"
