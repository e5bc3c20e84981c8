"""Alertmanagers and the scheduler's hook: questions alone. No alert, no order leaves here."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any, Final

import yaml

from sentinel.config import Config
from sentinel.doctor import routing
from sentinel.doctor.ask_prometheus import clock_of
from sentinel.doctor.facts import Alertmanager, Hook, Route
from sentinel.edges.alertmanager import Target
from sentinel.edges.status import NoReply, Page, Site

_TIMEOUT_S: Final = 10.0
# the alerts whose way through the routes is followed, by severity
_ALERTS: Final = {"critical": "SentinelGpuFault", "warning": "SentinelGpuDegraded"}


def alertmanager_site(config: Config, target: Target) -> Site:
    ca_file = config.alertmanager.ca_file
    return Site(
        target.url,
        headers=target.headers(),
        ca_file=str(config.file(ca_file)) if ca_file else None,
    )


def alertmanager(
    at: Site, cluster: str, timeout_s: float, clock: Callable[[], float]
) -> Alertmanager:
    """One Alertmanager. Nothing is raised: what failed is told."""
    timeout_s = min(timeout_s, _TIMEOUT_S)
    before_s = clock()
    try:
        page = at.get("/api/v2/status", timeout_s=timeout_s)
        after_s = clock()
        if not page.ok:
            return Alertmanager(at.url, trouble=_refused(page.status))
        plain = page.json()
    except NoReply as err:
        return Alertmanager(at.url, trouble=str(err))
    if not isinstance(plain, Mapping) or "versionInfo" not in plain:
        return Alertmanager(at.url, trouble="what answers there is no Alertmanager")
    unknown: dict[str, str] = {}
    gossip = _mapping(plain.get("cluster"))
    names, routes = _routes(_mapping(plain.get("config")).get("original"), cluster, unknown)
    return Alertmanager(
        at.url,
        version=str(_mapping(plain.get("versionInfo")).get("version", "")),
        cluster=str(gossip.get("status", "")),
        peers=len(gossip.get("peers") or ()),
        skew_s=_skew(page, before_s, after_s),
        certificate_ends_s=_certificate(at, timeout_s, unknown),
        receivers=names,
        routes=routes,
        unknown=unknown,
    )


def hook(config: Config, clock: Callable[[], float]) -> Hook:
    """Asks for an operation that cannot exist: by the protocol a question without effect."""
    section = config.hook
    at = Site(section.url, ca_file=str(config.file(section.ca_file)) if section.ca_file else None)
    timeout_s = min(section.timeout_s, _TIMEOUT_S)
    before_s = clock()
    try:
        page = at.get(f"/sentinel-doctor-{uuid.uuid4()}", timeout_s=timeout_s)
    except NoReply as err:
        return Hook(section.url, trouble=str(err))
    after_s = clock()
    try:
        speaks = isinstance(page.json(), Mapping)
    except NoReply:
        speaks = False
    skew_s = _skew(page, before_s, after_s)
    ends_s = _certificate(at, timeout_s, {})
    return Hook(section.url, "", page.status, speaks, skew_s, ends_s)


def _routes(
    original: Any, cluster: str, unknown: dict[str, str]
) -> tuple[tuple[str, ...], tuple[Route, ...] | None]:
    """The receivers, and where the daemon's alerts go among them."""
    try:
        plain = yaml.safe_load(original) if isinstance(original, str) else None
        if not isinstance(plain, Mapping):
            raise ValueError("it does not show its configuration")
        names = tuple(str(r.get("name")) for r in plain.get("receivers") or ())
        routes = []
        for severity, alertname in _ALERTS.items():
            labels = {
                "alertname": alertname,
                "severity": severity,
                "cluster": cluster,
                "node": "node",
                "gpu_uuid": "GPU-0",
            }
            found = routing.receivers(plain, labels)
            routes.append(Route(severity, found, routing.told(plain, found)))
    except (ValueError, yaml.YAMLError, AttributeError) as err:
        unknown["routes"] = " ".join(str(err).split())[:120]
        return (), None
    return names, tuple(routes)


def _certificate(at: Site, timeout_s: float, unknown: dict[str, str]) -> float | None:
    try:
        return at.certificate_ends_s(timeout_s=timeout_s)
    except NoReply as err:
        unknown["certificate"] = str(err)
        return None


def _skew(page: Page, before_s: float, after_s: float) -> float | None:
    """Its clock less ours by the Date header, which is of whole seconds."""
    try:
        skew_s, error_s = clock_of(before_s, after_s, page.date_s)
    except NoReply:
        return None
    return skew_s if abs(skew_s) > error_s + 0.5 else 0.0


def _refused(status: int) -> str:
    if status in (401, 403):
        return f"it refuses our credentials (HTTP {status})"
    if status == 404:
        return "no API v2 there (HTTP 404)"
    return f"HTTP {status}"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
