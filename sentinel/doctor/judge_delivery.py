"""Findings on whom the daemon tells: Alertmanagers, and the scheduler's hook."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

from sentinel.config import Config
from sentinel.doctor.facts import Alertmanager, Facts, Hook
from sentinel.doctor.report import Finding, Severity
from sentinel.doctor.words import joined, span

_SKEW_S: Final = 5.0
_SIGNED_S: Final = 240.0  # a receiver refuses a signature of more than five minutes ago
_SOON_S: Final = 14 * 86_400.0
_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")


def delivery_findings(config: Config, facts: Facts) -> Iterator[Finding]:
    yield from _alertmanagers(config, facts)
    if facts.hook is not None:
        yield from _hook(config, facts.hook, facts.at_s)
    else:
        yield Finding(
            "hook-none",
            Severity.OK,
            "hook",
            "none is configured: the daemon watches and alerts, and moves nothing",
        )


# ---- Alertmanagers ------------------------------------------------------------------


def _alertmanagers(config: Config, facts: Facts) -> Iterator[Finding]:
    if not facts.alertmanagers:
        yield Finding(
            "alertmanager-none",
            Severity.ADVICE,
            "alertmanagers",
            "none is configured: no alert is sent to anybody",
            "whoever does not look at the status page learns of nothing",
            ("name each one in alertmanager.urls",),
        )
    reached = [a for a in facts.alertmanagers if not a.trouble]
    for one in facts.alertmanagers:
        if one.trouble:
            yield _not_reached(one, bool(reached))
            continue
        yield from _alertmanager(one, facts.at_s)


def _not_reached(one: Alertmanager, others: bool) -> Finding:
    credentials = "credentials" in one.trouble
    return Finding(
        "alertmanager-unreachable",
        Severity.PROBLEM,
        "alertmanagers",
        f"{one.url}: {one.trouble}",
        "alerts go to the others alone" if others else "nobody is told of any alert",
        ("check alertmanager.basic_auth and alertmanager.token_file",)
        if credentials
        else (
            "is it running, and is that its base URL? try:",
            f" curl {one.url}/api/v2/status",
        ),
        exit_code=3,
        brief=f"Alertmanager {one.url} cannot be reached",
    )


def _alertmanager(one: Alertmanager, now_s: float) -> Iterator[Finding]:
    untold = [r for r in one.routes or () if not r.told]
    routes = ", ".join(f"{r.severity} to {joined(r.receivers)}" for r in one.routes or () if r.told)
    yield Finding(
        "alertmanager-answers",
        Severity.OK,
        "alertmanagers",
        f"{one.url}: Alertmanager {one.version}"
        + (f", cluster of {one.peers}" if one.peers > 1 else "")
        + (f"; {routes}" if routes else ""),
    )
    if untold:
        all_of_them = len(untold) == len(one.routes or ())
        severities = joined([r.severity for r in untold])
        names = joined(list(dict.fromkeys(name for r in untold for name in r.receivers)))
        yield Finding(
            "nobody-told",
            Severity.PROBLEM,
            "alertmanagers",
            f"{one.url}: {severities} alerts go to receiver {names}, which tells nobody",
            "the daemon alerts, and nobody hears of it",
            (
                "give that receiver an integration in alertmanager.yml (email, Slack, PagerDuty, "
                "webhook); deploy/alertmanager.example.yaml has routes for these alerts",
            ),
            exit_code=int(all_of_them or untold[0].severity == "critical"),
            brief="nobody is told of critical alerts",
        )
    if one.cluster and one.cluster not in ("ready", "disabled"):
        yield Finding(
            "alertmanager-cluster",
            Severity.ADVICE,
            "alertmanagers",
            f"{one.url}: its cluster is {one.cluster}",
            "until it is ready, one alert may be told several times",
            ("check that its peers reach each other (--cluster.peer, port 9094)",),
        )
    yield from _skewed("alertmanagers", one.url, one.skew_s)
    yield from certificate_ends("alertmanagers", one.url, one.certificate_ends_s, now_s)
    for name, why in one.unknown.items():
        what = "where its routes send alerts" if name == "routes" else f"its {name}"
        yield Finding(
            "not-found-out",
            Severity.UNKNOWN,
            "alertmanagers",
            f"{one.url}: {what} could not be found out: {why}",
        )


# ---- hook ---------------------------------------------------------------------------


def _hook(config: Config, hook: Hook, now_s: float) -> Iterator[Finding]:
    acts = config.mode == "act"
    if hook.trouble:
        yield Finding(
            "hook-unreachable",
            Severity.PROBLEM if acts else Severity.ADVICE,
            "hook",
            f"{hook.url}: {hook.trouble}",
            "no node is fenced and no work moved" if acts else "it is needed in mode act alone",
            (
                "is it running? try (404 is right):",
                f" curl -i {hook.url}/no-such-operation",
            ),
            exit_code=3 if acts else 0,
            brief="the hook cannot be reached",
        )
        return
    yield _hook_answer(hook, acts)
    parts = urlsplit(hook.url)
    if parts.scheme == "http" and (parts.hostname or "") not in _LOOPBACK:
        yield Finding(
            "hook-plain",
            Severity.ADVICE,
            "hook",
            f"orders to {parts.hostname} travel unencrypted",
            "they are signed, so none can be forged; but who listens can read them",
            ("use an https URL, with hook.ca_file for a certificate of your own",),
        )
    skew_s = hook.skew_s or 0.0
    if abs(skew_s) > _SIGNED_S:
        yield Finding(
            "clock-skew",
            Severity.PROBLEM,
            "hook",
            f"its clock is {span(skew_s)} {'ahead of' if skew_s > 0 else 'behind'} ours",
            "signatures hold for five minutes: it will refuse every order",
            ("set both hosts' clocks by NTP",),
            exit_code=int(acts),
        )
    else:
        yield from _skewed("hook", hook.url, hook.skew_s)
    yield from certificate_ends("hook", hook.url, hook.certificate_ends_s, now_s)


def _hook_answer(hook: Hook, acts: bool) -> Finding:
    """To a question for an operation that cannot exist, 404 alone is right."""
    status = hook.status or 0
    if status == 404 and hook.speaks:
        return Finding(
            "hook-answers", Severity.OK, "hook", f"{hook.url} answers as the protocol asks"
        )
    if status == 404:
        return Finding(
            "hook-page",
            Severity.ADVICE,
            "hook",
            f"{hook.url} answers 404, and not in JSON: any web server does that",
            "a wrong path would look the same",
            ("check that hook.url is the receiver's own path",),
        )
    problem = Severity.PROBLEM if acts else Severity.ADVICE
    if status in (401, 403):
        return Finding(
            "hook-refuses",
            problem,
            "hook",
            f"{hook.url}: a question for an operation is refused (HTTP {status})",
            "questions are not signed; without their answers a lost order stays unknown for ever",
            ("let GET requests in from this host: they change nothing",),
            exit_code=int(acts),
        )
    if 200 <= status < 300:
        return Finding(
            "hook-invents",
            problem,
            "hook",
            f"{hook.url}: it claims to know an operation that was never ordered (HTTP {status})",
            "an order that was lost would count as received, and would never be sent again",
            ("answer 404 for an operation_id that is not known",),
            exit_code=int(acts),
        )
    return Finding(
        "hook-fails",
        problem,
        "hook",
        f"{hook.url}: HTTP {status} to a question for an unknown operation, where 404 is right",
        "the daemon cannot tell an order that was lost from one that is under way",
        ("see the receiver's log",),
        exit_code=int(acts),
    )


# ---- shared -------------------------------------------------------------------------


def _skewed(section: str, url: str, skew_s: float | None) -> Iterator[Finding]:
    if skew_s is None or abs(skew_s) <= _SKEW_S:
        return
    yield Finding(
        "clock-skew",
        Severity.ADVICE,
        section,
        f"{url}: its clock is {span(skew_s)} {'ahead of' if skew_s > 0 else 'behind'} ours",
        "alerts and orders carry times; what is over may look open, and what is new old",
        ("set both hosts' clocks by NTP",),
    )


def certificate_ends(
    section: str, url: str, ends_s: float | None, now_s: float
) -> Iterator[Finding]:
    """What is to be said of a certificate that ends then."""
    if ends_s is None or ends_s - now_s > _SOON_S:
        return
    over = ends_s <= now_s
    yield Finding(
        "certificate-ends",
        Severity.PROBLEM if over else Severity.ADVICE,
        section,
        f"the certificate of {url} "
        + (f"ended {span(ends_s - now_s)} ago" if over else f"ends in {span(ends_s - now_s)}"),
        "no connection is made with one that has ended",
        ("renew it",),
    )
