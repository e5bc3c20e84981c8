"""Where to look next: the addresses that an alert carries.

Decides what an address says of an incident: its GPU or node, its time, and the metric that
speaks loudest. Builds text only; nothing is fetched.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from sentinel.core.domain import Incident, SubjectKind
from sentinel.core.incident import alertname

FIELDS: Final = ("gpu_uuid", "node", "workload", "from_ms", "to_ms", "incident_id")
_PLAIN: Final = frozenset(string.ascii_letters + string.digits + "-._~")
_BEFORE_S: Final = 3600.0  # of normal time, to compare with
_STEP_S: Final = 300.0  # addresses change so seldom, though time goes on
_UUID_LABELS: Final = ("UUID", "uuid", "gpu_uuid")
_NODE_LABELS: Final = ("Hostname", "instance")


@dataclass(frozen=True, slots=True)
class Links:
    """`status` is the daemon's own address; `dashboard` and `runbook` are templates with
    `FIELDS` or {alertname} in braces, empty for the daemon's own pages; `prometheus` is the base
    of graph links, empty for none; `series` maps canonical metrics to exporters' names."""

    status: str = ""
    dashboard: str = ""
    runbook: str = ""
    prometheus: str = ""
    series: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def links_of(incident: Incident, links: Links, now_s: float) -> dict[str, str]:
    """The annotations that are addresses, those that there are."""
    status = links.status.rstrip("/")
    out = {
        "dashboard_url": _filled(links.dashboard, incident, now_s),
        "runbook_url": links.runbook.replace("{alertname}", alertname(incident)),
        "graph_url": _graph(incident, links, now_s),
    }
    if status:
        out["dashboard_url"] = out["dashboard_url"] or f"{status}/?incident={incident.id}"
        own = f"{status}/runbooks#{alertname(incident).lower()}"
        out["runbook_url"] = out["runbook_url"] or own
    return {name: url for name, url in out.items() if url}


def window_s(incident: Incident, now_s: float) -> tuple[float, float]:
    """The time to look at: an hour before it began until it was over."""
    end_s = now_s if incident.resolved_at_s is None else incident.resolved_at_s
    return incident.opened_at_s - _BEFORE_S, (end_s // _STEP_S + 1.0) * _STEP_S


def _filled(template: str, incident: Incident, now_s: float) -> str:
    from_s, to_s = window_s(incident, now_s)
    work = incident.workload.id if incident.workload else ""
    values = {
        "gpu_uuid": incident.gpu_uuid or "",
        "node": incident.node,
        "workload": incident.subject.id if incident.subject.kind is SubjectKind.JOB else work,
        "from_ms": f"{from_s * 1000.0:.0f}",
        "to_ms": f"{to_s * 1000.0:.0f}",
        "incident_id": incident.id,
    }
    for name, value in values.items():
        template = template.replace("{" + name + "}", _quoted(value))
    return template


def _graph(incident: Incident, links: Links, now_s: float) -> str:
    """Prometheus's own graph of the metric that speaks loudest, on this GPU or node."""
    if not links.prometheus:
        return ""
    known = [e for e in incident.evidence if e.metric in links.series]
    if not known:
        return ""
    metric = max(known, key=lambda e: e.contribution).metric
    who = _matchers(incident)
    if not who:
        return ""
    names = "|".join(links.series[metric])
    query = " or ".join(f'{{__name__=~"{names}",{matcher}}}' for matcher in who)
    from_s, to_s = window_s(incident, now_s)
    asked = {
        "g0.expr": query,
        "g0.tab": "0",
        "g0.range_input": f"{max((to_s - from_s) / 60.0, 1.0):.0f}m",
        "g0.end_input": datetime.fromtimestamp(to_s, UTC).strftime("%Y-%m-%d %H:%M:%S"),
    }
    rest = "&".join(f"{name}={_quoted(value)}" for name, value in asked.items())
    return f"{links.prometheus.rstrip('/')}/graph?{rest}"


def _quoted(text: str) -> str:
    """Text as it may stand in an address (RFC 3986)."""
    return "".join(chr(b) if chr(b) in _PLAIN else f"%{b:02X}" for b in text.encode())


def _matchers(incident: Incident) -> list[str]:
    """Exporters name a GPU and a node in their own ways; some leave GPU- away."""
    if incident.gpu_uuid:
        uuid = re.escape(incident.gpu_uuid.removeprefix("GPU-")).replace("\\-", "-")
        uuid = uuid.replace("\\", "\\\\")
        return [f'{label}=~"(GPU-)?{uuid}"' for label in _UUID_LABELS]
    if incident.node:
        node = re.escape(incident.node).replace("\\-", "-").replace("\\", "\\\\")
        return [f'{label}=~"{node}([.:].*)?"' for label in _NODE_LABELS]
    return []
