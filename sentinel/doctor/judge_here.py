"""Findings on this host, and on who watches the daemon itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sentinel import __version__
from sentinel.config import Config
from sentinel.doctor.facts import Facts, Listen, Secret, State
from sentinel.doctor.report import Finding, Severity
from sentinel.doctor.words import count, joined, size

_LITTLE_SPACE: Final = 1 << 30
_NO_SPACE: Final = 64 << 20


def here_findings(config: Config, facts: Facts) -> Iterator[Finding]:
    if facts.state is not None:
        yield from _state(facts.state, facts.listen)
    if facts.listen is not None:
        yield from _listen(facts.listen)
    yield from _secrets(config, facts.secrets)
    yield from _watchers(config, facts)


# ---- this host ----------------------------------------------------------------------


def _state(state: State, listen: Listen | None) -> Iterator[Finding]:
    ours = listen is not None and listen.state == "ours"
    if state.trouble:
        yield Finding(
            "state-unwritable",
            Severity.PROBLEM,
            "state",
            f"state.dir {state.dir}: {state.trouble}",
            "what must survive a crash is kept there; the daemon does not start without",
            ("change its owner, or set another state.dir",),
            exit_code=1,
            stops=True,
        )
        return
    if state.store_trouble or (state.schema is not None and state.schema != state.schema_read):
        told = state.store_trouble or (
            f"has schema {state.schema}, and this version reads {state.schema_read}"
        )
        yield Finding(
            "store-unreadable",
            Severity.PROBLEM,
            "state",
            f"the store in {state.dir} {told}",
            "the daemon does not start with it",
            ("restore state.db from a backup, or move it away to start with an empty state",),
            exit_code=1,
            stops=True,
        )
    if state.held_by_pid is not None and not ours:
        yield Finding(
            "state-held",
            Severity.PROBLEM,
            "state",
            f"{state.dir} is in use by process {state.held_by_pid}, which does not answer at "
            "http.listen",
            "one daemon alone may use a state folder: a second one does not start",
            ("see what it is:", f" ps -fp {state.held_by_pid}"),
            exit_code=1,
            stops=True,
        )
    free = state.free_bytes
    if free is not None and free < _LITTLE_SPACE:
        yield Finding(
            "disk-full",
            Severity.PROBLEM if free < _NO_SPACE else Severity.ADVICE,
            "state",
            f"{size(free)} are free where {state.dir} is",
            "a full disk stops every fence and move",
            ("free some",),
            exit_code=int(free < _NO_SPACE),
        )
    there = f"{state.dir}: " + ("" if state.exists else "will be made; ")
    text = "writable" if free is None else f"writable, {size(free)} free"
    if state.schema is not None:
        text += f", store of schema {state.schema}"
    yield Finding("state-writable", Severity.OK, "state", there + text)


def _listen(listen: Listen) -> Iterator[Finding]:
    if listen.state == "free":
        yield Finding("port-free", Severity.OK, "state", f"{listen.address} is free")
    elif listen.state == "ours":
        ready = {True: "ready", False: "not ready", None: "readiness unknown"}[listen.ready]
        yield Finding(
            "daemon-runs",
            Severity.OK,
            "state",
            f"a daemon {listen.version} runs at {listen.address}, {ready}",
        )
        if listen.version and listen.version != __version__:
            yield Finding(
                "daemon-version",
                Severity.ADVICE,
                "state",
                f"the daemon that runs is {listen.version}, and this command {__version__}",
                "",
                ("restart it after an upgrade:", " systemctl restart gpu-sentinel"),
            )
        if listen.ready is False:
            yield Finding(
                "daemon-not-ready",
                Severity.PROBLEM,
                "state",
                f"the daemon at {listen.address} is not ready",
                "it does not watch at the moment",
                ("it says why:", f" curl http://{listen.address}/-/ready"),
                exit_code=1,
            )
    elif listen.state == "taken":
        yield Finding(
            "port-taken",
            Severity.PROBLEM,
            "state",
            f"{listen.address} is taken by another program ({listen.trouble})",
            "the daemon does not start without its port",
            ("set another http.listen, or end that program; this says which it is:", " ss -ltnp"),
            exit_code=1,
            stops=True,
        )
    else:
        yield Finding(
            "port-wrong",
            Severity.PROBLEM,
            "configuration",
            f"http.listen {listen.address}: {listen.trouble}",
            "the daemon does not start without its port",
            ("set http.listen to an address of this host",),
            exit_code=2,
            stops=True,
        )


def _secrets(config: Config, secrets: tuple[Secret, ...]) -> Iterator[Finding]:
    open_to_all = [s for s in secrets if s.mode and int(s.mode, 8) & 0o007]
    if open_to_all:
        yield Finding(
            "secret-readable",
            Severity.ADVICE,
            "configuration",
            f"{joined([s.path for s in open_to_all])}: every user of this host can read "
            f"{'it' if len(open_to_all) == 1 else 'them'}",
            "who knows a secret can act as the daemon",
            (f" chmod 600 {' '.join(s.path for s in open_to_all)}",),
        )
    names = "file" if len(secrets) == 1 else "files"
    if secrets and all(s.mode for s in secrets) and not open_to_all:
        yield Finding(
            "secrets-kept",
            Severity.OK,
            "configuration",
            f"{len(secrets)} secret {names}, readable by nobody else",
        )


# ---- watchers -----------------------------------------------------------------------


def _watchers(config: Config, facts: Facts) -> Iterator[Finding]:
    if facts.prometheus.trouble:
        return
    rules, scraped = facts.watchers.rules, facts.watchers.scraped
    runs = facts.listen is not None and facts.listen.state == "ours"
    if scraped:
        yield Finding(
            "daemon-scraped", Severity.OK, "watchers", f"scraped at {joined(list(scraped))}"
        )
    elif facts.watchers.targeted and not runs:
        yield Finding(
            "daemon-targeted",
            Severity.OK,
            "watchers",
            f"it will be scraped at {joined(list(facts.watchers.targeted))} once it runs",
        )
    elif scraped is not None:
        port = config.http.listen
        yield Finding(
            "daemon-not-scraped",
            Severity.ADVICE,
            "watchers",
            "Prometheus does not scrape the daemon's /metrics"
            + ("" if runs else "; it does not run yet"),
            "rules about the daemon have nothing to look at, and a daemon that dies is not missed",
            ("add to prometheus.yml, under scrape_configs:",
             " - job_name: gpu-sentinel",
             f"   static_configs: [{{targets: [\"{port}\"]}}]"),
        )  # fmt: skip
    if rules:
        yield Finding(
            "rules-loaded", Severity.OK, "watchers", f"{count(len(rules), 'rule')} watch it"
        )
    elif rules is not None:
        yield Finding(
            "rules-missing",
            Severity.ADVICE,
            "watchers",
            "no alerting rule watches the daemon",
            "if it dies, nobody is told, and firing alerts end by themselves",
            ("load rules/sentinel.rules.yaml in Prometheus: rule_files in prometheus.yml",),
        )
    for name, why in facts.watchers.unknown.items():
        what = (
            "whether alerting rules watch the daemon"
            if name == "rules"
            else ("whether the daemon is scraped")
        )
        yield Finding(
            "not-found-out",
            Severity.UNKNOWN,
            "watchers",
            f"{what} could not be found out: {why}",
            "",
            ("load rules/sentinel.rules.yaml where your rules are evaluated",)
            if name == "rules"
            else (),
        )
