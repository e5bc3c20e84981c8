"""From what was seen to findings: what is right, what is wrong, and what to do about it.

Pure. Each section is judged by itself, root causes before what they bring about; where
Prometheus cannot be reached nothing is said of what would have been read there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sentinel.config import Config
from sentinel.core.catalog import Catalog
from sentinel.doctor.facts import Facts, Prometheus, Pull
from sentinel.doctor.judge_delivery import certificate_ends, delivery_findings
from sentinel.doctor.judge_fleet import fleet_findings
from sentinel.doctor.judge_here import here_findings
from sentinel.doctor.judge_metrics import LEAST_HISTORY_S
from sentinel.doctor.report import Finding, Severity
from sentinel.doctor.words import count, size, span

BUG: Final = "internal error, please report it"  # how the text of a bug of ours begins
BUG_EXIT: Final = 70
_TOLD_SKEW_S: Final = 1.0
_BAD_SKEW_S: Final = 5.0


def judge(config: Config, facts: Facts, catalog: Catalog) -> tuple[Finding, ...]:
    """All findings, in the order of their sections."""
    found = [*_prometheus(config, facts)]
    if not facts.prometheus.trouble:
        found += fleet_findings(config, facts)
    found += delivery_findings(config, facts)
    found += here_findings(config, facts)
    found += [_unfinished(name, why) for name, why in facts.unfinished.items()]
    return tuple(found)


def _unfinished(name: str, why: str) -> Finding:
    section, title = _SECTION_OF.get(name, "daemon"), _TITLES.get(name, name)
    if name == "fleet":
        return Finding(
            "fleet-unread",
            Severity.PROBLEM,
            section,
            f"the fleet could not be read: {why}",
            "whether the daemon can work was not found out",
            ("give it more time: --for 300", "or narrow prometheus.selector"),
            exit_code=BUG_EXIT if why.startswith(BUG) else 1,
        )
    return Finding(
        "not-found-out",
        Severity.UNKNOWN,
        section,
        f"{title} could not be found out: {why}",
        exit_code=BUG_EXIT if why.startswith(BUG) else 0,
    )


_SECTION_OF: Final = {
    "fleet": "gpus",
    "elsewhere": "gpus",
    "baseline": "daemon",
    "state": "state",
    "listen": "state",
    "secrets": "configuration",
}
_TITLES: Final = {
    "elsewhere": "whether there are other GPU series",
    "baseline": "the baseline",
    "state": "the state folder",
    "listen": "whether the daemon's port is free",
    "secrets": "who may read the secret files",
}


def _prometheus(config: Config, facts: Facts) -> Iterator[Finding]:
    seen = facts.prometheus
    if seen.trouble:
        yield _unreachable(config, seen)
        return
    yield from _clock(config, seen)
    if seen.pull is not None:
        yield _answers(seen, seen.pull)
        yield from _query(config, seen.pull, seen)
    if facts.fleet is not None and facts.fleet.trouble:
        yield _no_history(facts.fleet.trouble)
    yield from _history(config, seen)
    if seen.config_ok is False:
        yield Finding(
            "prometheus-configuration",
            Severity.PROBLEM,
            "prometheus",
            "Prometheus could not load its own configuration when it last tried",
            "it goes on with the one before: new scrape jobs and rules are not there",
            ("see its log, or:", " promtool check config prometheus.yml"),
        )
    yield from certificate_ends("prometheus", seen.url, seen.certificate_ends_s, facts.at_s)
    yield from _left_open(seen)


def _unreachable(config: Config, seen: Prometheus) -> Finding:
    told = seen.trouble or "nothing is known of it"
    what, _, advice = told.partition("; ")
    steps = [advice] if advice else ["is it running, and is prometheus.url its base URL?"]
    steps += ["try:", f" curl '{seen.url}/api/v1/query?query=up'"]
    return Finding(
        "prometheus-unreachable",
        Severity.PROBLEM,
        "prometheus",
        what,
        "all that the daemon knows of GPUs comes from there",
        tuple(steps),
        exit_code=3,
        stops=True,
    )


def _answers(seen: Prometheus, pull: Pull) -> Finding:
    name = " ".join(word for word in (seen.kind or "what answers", seen.version) if word)
    text = (
        f"{name} answers the daemon's query in {span(pull.again_s)}: "
        f"{count(pull.series, 'series', 'series')}, about {size(pull.bytes_about)}"
    )
    if seen.retention:
        text += f"; it keeps {seen.retention}"
    return Finding("prometheus-answers", Severity.OK, "prometheus", text)


def _clock(config: Config, seen: Prometheus) -> Iterator[Finding]:
    skew_s = seen.skew_s
    if skew_s is None or abs(skew_s) <= _TOLD_SKEW_S + seen.skew_error_s:
        return
    side = "behind" if skew_s > 0 else "ahead of"
    what = f"this host's clock is {span(skew_s)} {side} that of {seen.kind or 'Prometheus'}"
    steps = (
        "set both hosts' clocks by NTP; this says on each whether it is:",
        " timedatectl",
    )
    window_s = config.pull_window_s()
    if -skew_s >= window_s / 2:
        yield Finding(
            "clock-skew",
            Severity.PROBLEM,
            "prometheus",
            what,
            f"the daemon asks for the last {window_s:g} s by its own clock, and there the newest "
            "samples are missing: every GPU looks silent",
            steps,
            exit_code=1,
            stops=True,
        )
        return
    bad = abs(skew_s) > _BAD_SKEW_S + seen.skew_error_s
    why = (
        f"the daemon sees the fleet as it was {span(skew_s)} ago"
        if skew_s > 0
        else ("a GPU seems older than it is, and is taken for silent too early")
    )
    yield Finding(
        "clock-skew",
        Severity.PROBLEM if bad else Severity.ADVICE,
        "prometheus",
        what,
        f"{why}; alerts bear the wrong times",
        steps,
        exit_code=1 if bad else 0,
    )


def _no_history(trouble: str) -> Finding:
    what, _, advice = trouble.partition("; ")
    return Finding(
        "history-unreadable",
        Severity.PROBLEM,
        "prometheus",
        f"the last minutes cannot be read at once: {what}",
        "the daemon reads them when it starts, and does not start without",
        (advice or "raise the limits of the server's queries",),
        exit_code=3,
        stops=True,
    )


def _query(config: Config, pull: Pull, seen: Prometheus) -> Iterator[Finding]:
    took_s = pull.again_s
    if took_s > 0.5 * pull.deadline_s:
        late = took_s > pull.deadline_s
        yield Finding(
            "query-slow",
            Severity.PROBLEM if late else Severity.ADVICE,
            "prometheus",
            f"the daemon's query takes {span(took_s)}, and a tick waits {span(pull.deadline_s)}",
            "a tick without an answer sees nothing"
            if late
            else "one slow answer more is a tick that sees nothing",
            (
                "narrow prometheus.selector to the GPU exporters' jobs",
                "raise prometheus.concurrency, or list parts of the fleet in prometheus.split_by",
                "or make ticks rarer: tick.interval_s",
            ),
            exit_code=int(late),
            stops=late,
        )
    if pull.max_bytes and pull.bytes_about > 0.7 * pull.max_bytes:
        yield Finding(
            "answer-large",
            Severity.ADVICE,
            "prometheus",
            f"one look at the fleet is about {size(pull.bytes_about)}, and prometheus.max_bytes "
            f"is {size(pull.max_bytes)}",
            "an answer that is larger is not read",
            ("narrow prometheus.selector, or raise prometheus.max_bytes",),
        )
    most = seen.limits.get("query.max-samples", "")
    if most.isdigit() and pull.samples > 0.7 * int(most):
        yield Finding(
            "query-limit",
            Severity.ADVICE,
            "prometheus",
            f"one look at the fleet is {pull.samples} samples, and the server allows {most}",
            "a query beyond that is refused",
            ("raise --query.max-samples there, or use prometheus.split_by",),
        )
    if pull.partial:
        told = "; ".join(pull.warnings) or "no reason given"
        yield Finding(
            "answer-partial",
            Severity.PROBLEM,
            "prometheus",
            f"it answers only in part: {told}",
            "nothing is moved on a partial view, and GPUs that are left out look silent",
            ("bring back the part of it that does not answer (a store, a storage node)",),
            exit_code=1,
        )
    elif pull.warnings:
        yield Finding(
            "answer-warnings",
            Severity.ADVICE,
            "prometheus",
            f"it answers with warnings: {pull.warnings[0]}",
        )


def _history(config: Config, seen: Prometheus) -> Iterator[Finding]:
    wanted_s = seen.wanted_s
    if seen.retention_s is not None and seen.retention_s < wanted_s:
        yield Finding(
            "retention-short",
            Severity.ADVICE,
            "prometheus",
            f"it keeps {seen.retention}, and learn.window_h asks for {span(wanted_s)}",
            "the baseline is learnt from less than was asked for",
            ("raise --storage.tsdb.retention.time there, or lower learn.window_h",),
        )
    if seen.reach_s is None or not wanted_s:
        return
    if seen.reach_s < 0.9 * wanted_s:
        soon = seen.reach_s < LEAST_HISTORY_S
        yield Finding(
            "history-short",
            Severity.ADVICE,
            "prometheus",
            f"GPU history reaches back {span(seen.reach_s)} of the {span(wanted_s)} that "
            "learn.window_h asks for"
            if seen.reach_s >= 60.0
            else "there is no GPU history yet",
            "there is too little to learn a baseline from, so it comes later by itself"
            if soon
            else "the baseline is learnt from less than was asked for",
        )
    if seen.gap_share > 0.1:
        yield Finding(
            "history-gaps",
            Severity.ADVICE,
            "prometheus",
            f"{seen.gap_share:.0%} of the GPU history of the last {span(seen.reach_s)} is missing",
            "what was not seen is not learnt",
            ("see when, in a graph of:", " count(up)"),
        )


_OPEN: Final = {
    "clock": "what time it is there",
    "build": "what answers",
    "runtime": "how long it keeps samples, and what it allows a query",
    "reach": "how far back GPU history reaches",
    "targets": "how its scrapes fare",
    "certificate": "when its certificate ends",
}


def _left_open(seen: Prometheus) -> Iterator[Finding]:
    for name, why in seen.unknown.items():
        yield Finding(
            "not-found-out",
            Severity.UNKNOWN,
            "prometheus",
            f"{_OPEN.get(name, name)} could not be found out: {why}",
        )
