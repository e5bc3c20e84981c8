"""What people are told: alerts as a projection of the state.

Decides which incidents alert, under which labels and for how long; never whether there is an
incident, nor how it reads (`wording.py`). The same state always gives the same alerts, so that
they can be sent again every tick.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from sentinel.core.domain import Control, Incident, Kind, Severity, SubjectKind
from sentinel.core.incident import RESEND_S, alertname
from sentinel.core.links import Links, links_of
from sentinel.core.policy import Policy
from sentinel.core.wording import description, summary

__all__ = ["Alert", "Links", "alertname", "project", "summary"]

_KEEP_S: Final = 300.0


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
    control: Control,
    policy: Policy,
    now_s: float,
    *,
    external_url: str = "",
    links: Links | None = None,
) -> tuple[Alert, ...]:
    """Every alert to be sent now: those that fire, and for 15 minutes those that are over.

    Where an incident's alert changed its name or severity, the former one is resolved. An
    alert that is over never hides one with the same labels that fires. Incidents of severity
    info are written down only; those that another incident speaks for are told by that one.
    """
    links = Links(status=external_url) if links is None else links
    ends_at_s = now_s + max(4.0 * policy.times.tick_s, _KEEP_S)
    chosen: dict[tuple[tuple[str, str], ...], list[Alert]] = {}
    newest_last = sorted(control.incidents.values(), key=lambda i: (i.opened_at_s, i.id))
    for incident in newest_last:
        if _spoken_for(incident, control):
            continue
        for alert in _alerts(incident, control, policy, now_s, ends_at_s, links):
            known = chosen.setdefault(tuple(sorted(alert.labels.items())), [])
            if known and known[0].resolved:
                known.clear()
            if not known or not alert.resolved:
                known.append(alert)
    return tuple(_merged(alerts) for alerts in chosen.values())


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
    links: Links,
) -> Iterator[Alert]:
    texts = _annotations(incident, control, policy, now_s, links)
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
    incident: Incident, control: Control, policy: Policy, now_s: float, links: Links
) -> dict[str, str]:
    texts = {
        "summary": summary(incident),
        "description": description(incident, control, policy, now_s),
        "incident_id": incident.id,
        "pattern": incident.pattern,
    }
    if incident.subject.kind is SubjectKind.GPU and incident.kind is Kind.DEVIANT:
        texts["score"] = f"{incident.score:.2f}"
    if incident.distance is not None:
        texts["pattern_distance"] = f"{incident.distance:.2f}"
    work = incident.workload
    if work is not None:
        texts["pod" if work.kind == "pod" else "workload"] = work.id
    if incident.subject.kind is SubjectKind.RACK:
        texts["rack"] = incident.subject.id
    return texts | links_of(incident, links, now_s)


def _merged(alerts: list[Alert]) -> Alert:
    """Two events of one fleet have the same labels, and Alertmanager takes them for one alert:
    so that none goes untold, the first tells of the others too."""
    first, *rest = alerts
    if not rest:
        return first
    texts = dict(first.annotations)
    more = "; ".join(other.annotations["summary"] for other in rest)
    texts["summary"] = f"{texts['summary']} | and {len(rest)} more: {more}"
    texts["description"] = "\n\n".join(a.annotations["description"] for a in alerts)
    start_s = min(a.starts_at_s for a in alerts)
    return replace(first, annotations=texts, starts_at_s=start_s)
