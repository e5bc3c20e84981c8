"""Looks at everything at once and puts together what was found, within a bounded time.

Every probe is a thread of its own that ends by its own deadline; one that hangs where no deadline
reaches (a name that does not resolve, a dead network disk) is left behind, and told.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from functools import partial
from typing import Any, Final, TypeVar

from sentinel import __version__
from sentinel.config import Config
from sentinel.core.catalog import Catalog
from sentinel.data import load_models
from sentinel.doctor import ask_fleet, ask_local, ask_others, ask_prometheus, facts
from sentinel.doctor.ask_prometheus import Build, Clock, Reach, Runtime
from sentinel.doctor.blocks import blocks
from sentinel.doctor.judge import BUG, judge
from sentinel.doctor.report import Finding, Report, Severity
from sentinel.edges.status import NoReply
from sentinel.errors import ConfigError, SentinelError

WITHIN_S: Final = 120.0
_FILES_S: Final = 10.0
T = TypeVar("T")
Progress = Callable[[float, str], None]


class _Crew:
    """Probes under way. What a probe returned, or why not, is asked for by its name."""

    def __init__(self, within_s: float) -> None:
        self._until_s = time.monotonic() + within_s
        self._within_s = within_s
        self._futures: dict[str, Future[Any]] = {}
        self.titles: dict[str, str] = {}

    def start(self, name: str, title: str, probe: Callable[[], Any]) -> None:
        future: Future[Any] = Future()
        self._futures[name], self.titles[name] = future, title

        def work() -> None:
            try:
                future.set_result(probe())
            except BaseException as err:
                future.set_exception(err)

        threading.Thread(target=work, name=f"doctor-{name}", daemon=True).start()

    @property
    def left_s(self) -> float:
        return max(0.0, self._until_s - time.monotonic())

    def wait(self, progress: Progress) -> None:
        """Until all have ended or time is up."""
        names = list(self._futures)
        while self.left_s and not all(f.done() for f in self._futures.values()):
            open_ = [n for n in names if not self._futures[n].done()]
            share = 1.0 - len(open_) / len(names)
            progress(share, f"waiting for {self.titles[open_[0]]}")
            threading.Event().wait(min(0.1, self.left_s))
        progress(1.0, "done")

    def get(self, name: str, default: T, unknown: dict[str, str], *, wait_s: float = 0.0) -> T:
        """Its result; `default` where there is none, with the reason in `unknown`."""
        future = self._futures.get(name)
        if future is None:
            return default
        try:
            result: T = future.result(timeout=wait_s)
            return result
        except Late:
            unknown[name] = f"no answer within {wait_s or self._within_s:.3g} s"
        except (NoReply, SentinelError) as err:
            unknown[name] = str(err)
        except Exception as err:
            unknown[name] = _bug(err)
        return default


def _bug(err: Exception) -> str:
    """What the report of a bug needs, on one line."""
    place = traceback.extract_tb(err.__traceback__)[-1]
    where = f"{place.filename.rpartition('sentinel/')[2]}:{place.lineno}"
    return f"{BUG} ({type(err).__name__} at {where}: {err})"


def examine(
    config: Config,
    *,
    within_s: float = WITHIN_S,
    clock: Callable[[], float] = time.time,
    progress: Progress = lambda share, what: None,
) -> Report:
    """Looks at all that the configuration names. Ends within about `within_s`, and changes
    nothing anywhere."""
    catalog = config.catalog()
    crew = _Crew(within_s)
    crew.start("files", "the secret files", lambda: _configuration(config))
    late: dict[str, str] = {}
    none: tuple[Finding, ...] = ()
    wrong = crew.get("files", none, late, wait_s=min(_FILES_S, 0.4 * within_s))
    if late:  # a network disk that is gone, perhaps: whoever needs a secret would hang too
        text = f"the secret files could not be read: {late['files']}"
        wrong = tuple(_wrong([f"{text}; is the disk that they are on there?"]))
    else:
        _start_prometheus(crew, config, catalog, clock)
        _start_alertmanagers(crew, config, clock)
    _start_others(crew, config, clock)
    crew.wait(progress)
    found = _facts(crew, config, clock())
    findings = (*wrong, *judge(config, found, catalog))
    return Report(
        __version__,
        str(config.path or ""),
        config.naming.cluster,
        config.mode,
        findings,
        found,
        blocks(found),
    )


def misconfigured(path: str, err: ConfigError) -> Report:
    """The report where the configuration cannot even be read."""
    problems = [p.text if not p.key else f"{p.key}: {p.text}" for p in getattr(err, "problems", ())]
    return Report(__version__, path, "", "", tuple(_wrong(problems or str(err).splitlines())))


def _configuration(config: Config) -> tuple[Finding, ...]:
    try:
        config.check_files()
    except ConfigError as err:
        return tuple(_wrong(str(err).splitlines()))
    return ()


def _wrong(lines: list[str]) -> list[Finding]:
    return [
        Finding(
            "configuration-wrong",
            Severity.PROBLEM,
            "configuration",
            line.partition("; ")[0],
            "the daemon does not start with it",
            (line.partition("; ")[2] or "correct it; `sentinel config check FILE` checks it",),
            exit_code=2,
            stops=True,
        )
        for line in lines
    ]


# ---- probes -------------------------------------------------------------------------


def _start_prometheus(
    crew: _Crew, config: Config, catalog: Catalog, clock: Callable[[], float]
) -> None:
    try:
        server = ask_prometheus.Prometheus(config, ask_prometheus.site(config), clock)
    except ConfigError:
        return  # told already
    models = load_models()

    def look() -> ask_fleet.Looked:
        skew = crew.get("clock", None, {}, wait_s=crew.left_s)
        return ask_fleet.look(config, catalog, models, skew.skew_s if skew else 0.0, clock)

    def targets() -> Any:
        looked = crew.get("fleet", None, {}, wait_s=0.6 * crew.left_s)
        return server.targets(looked.jobs if looked else ())

    def elsewhere() -> Any:
        looked = crew.get("fleet", None, {}, wait_s=0.6 * crew.left_s)
        fleet = looked.fleet if looked else None
        return server.elsewhere(catalog) if fleet is not None and not fleet.gpus else None

    window_s = 3600.0 * config.learn.window_h
    crew.start("clock", "Prometheus's clock", server.skew)
    crew.start("fleet", "the fleet", look)
    crew.start("build", "Prometheus's version", server.build)
    crew.start("runtime", "Prometheus's retention", server.runtime)
    crew.start("reach", "history", lambda: server.reach(catalog, window_s))
    crew.start("targets", "scrape targets", targets)
    crew.start("elsewhere", "other GPU series", elsewhere)
    crew.start("rules", "alerting rules", server.rules)
    crew.start("scraped", "the daemon's own metrics", server.scraped)
    crew.start("targeted", "the daemon as a target", server.targeted)
    crew.start("certificate", "Prometheus's certificate", server.certificate)


def _start_alertmanagers(crew: _Crew, config: Config, clock: Callable[[], float]) -> None:
    try:
        targets = config.alertmanager_targets()
    except ConfigError:
        targets = ()  # told already
    for number, target in enumerate(targets):
        at = ask_others.alertmanager_site(config, target)
        ask = partial(
            ask_others.alertmanager,
            at,
            config.naming.cluster,
            config.alertmanager.timeout_s,
            clock,
        )
        crew.start(f"alertmanager-{number}", f"Alertmanager {target.url}", ask)


def _start_others(crew: _Crew, config: Config, clock: Callable[[], float]) -> None:
    if config.hook.url:
        crew.start("hook", "the hook", lambda: ask_others.hook(config, clock))
    crew.start("state", "the state folder", lambda: ask_local.state(config))
    crew.start("baseline", "the baseline", lambda: ask_fleet.baseline(config)[1])
    crew.start("listen", "the daemon's port", lambda: ask_local.listen(config))
    crew.start("secrets", "secret files", lambda: ask_local.secrets(config))


# ---- put together -------------------------------------------------------------------


def _facts(crew: _Crew, config: Config, now_s: float) -> facts.Facts:
    unfinished: dict[str, str] = {}
    looked = crew.get("fleet", None, unfinished)
    hook = crew.get("hook", None, unfinished)
    if config.hook.url and hook is None:
        hook = facts.Hook(config.hook.url, unfinished.pop("hook", ""))
    watching: dict[str, str] = {}
    return facts.Facts(
        now_s,
        _prometheus(crew, config, looked, unfinished),
        looked.fleet if looked else None,
        crew.get("elsewhere", None, unfinished),
        crew.get("baseline", None, unfinished),
        tuple(_alertmanager(crew, n, url) for n, url in enumerate(config.alertmanager.urls)),
        hook,
        crew.get("state", None, unfinished),
        crew.get("listen", None, unfinished),
        crew.get("secrets", (), unfinished),
        facts.Watchers(
            crew.get("rules", None, watching),
            crew.get("scraped", None, watching),
            crew.get("targeted", (), {}),
            watching,
        ),
        unfinished,
    )


def _prometheus(
    crew: _Crew, config: Config, looked: ask_fleet.Looked | None, unfinished: dict[str, str]
) -> facts.Prometheus:
    unknown: dict[str, str] = {}
    clock = crew.get("clock", Clock(0.0, float("inf")), unknown)
    build = crew.get("build", Build("", ""), unknown)
    runtime = crew.get("runtime", Runtime(), unknown)
    reach = crew.get("reach", Reach(None, 0.0), unknown)
    pull = looked.pull if looked else None
    if pull is None and "clock" in unknown:  # neither answers: it is not that we read badly
        unfinished.pop("fleet", None)
        trouble = unknown["clock"]
    else:
        trouble = pull.trouble if pull else ""
    return facts.Prometheus(
        config.prometheus.url,
        trouble,
        build.kind,
        build.version,
        None if "clock" in unknown or clock.error_s == float("inf") else clock.skew_s,
        clock.error_s,
        crew.get("certificate", None, unknown),
        pull,
        runtime.retention,
        runtime.retention_s,
        reach.reach_s,
        3600.0 * config.learn.window_h,
        reach.gap_share,
        runtime.limits,
        crew.get("targets", None, unknown),
        runtime.config_ok,
        unknown,
    )


def _alertmanager(crew: _Crew, number: int, url: str) -> facts.Alertmanager:
    unknown: dict[str, str] = {}
    name = f"alertmanager-{number}"
    found: facts.Alertmanager | None = crew.get(name, None, unknown)
    return found or facts.Alertmanager(url, unknown.get(name, "not asked: see configuration"))


__all__ = ["WITHIN_S", "examine", "misconfigured"]
