"""The daemon: wires the edges to the core and calls it on time.

One tick: pull, fold, judge, decide, write down, act, tell. The tick thread alone owns the
state. Everything slow happens elsewhere: hook calls in the outbox's workers, alerts in their
senders, learning in a child process that can be killed. What those bring back is durable
first and is read by the next tick.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers.background import BackgroundScheduler

from sentinel import __version__, history
from sentinel.config import Config
from sentinel.core.alert import project
from sentinel.core.budget import UNCALIBRATED, thresholds
from sentinel.core.domain import (
    ActionKind,
    Command,
    CommandKind,
    Control,
    FaultPattern,
    Frame,
    Incident,
    IncidentPhase,
    Judgement,
    Migration,
    Outcome,
    Reason,
    Severity,
    Step,
    SubjectKind,
)
from sentinel.core.frame import Telemetry
from sentinel.core.scheduler import View
from sentinel.core.step import Inputs, housekeep, resume, step
from sentinel.core.verdict import Bundle, Watch
from sentinel.data import load_models
from sentinel.edges import bundle as bundles
from sentinel.edges import logs, patterns, systemd
from sentinel.edges.alertmanager import Alertmanagers
from sentinel.edges.hooks import open_hook, open_source
from sentinel.edges.outbox import Outbox
from sentinel.edges.store import Store
from sentinel.edges.views import Views
from sentinel.errors import ConfigError, DependencyError, SentinelError, StateError
from sentinel.web.app import create_app
from sentinel.web.server import Server
from sentinel.web.snapshot import Snapshot, TickStats

log = logging.getLogger("sentinel")

_START_WAIT_S: Final = 10.0  # Prometheus may come up with us after a reboot
_RELOADABLE: Final = frozenset({"limits", "spares", "links", "log"})
_FIRST_LEARN_S: Final = 300.0  # how often a daemon without a baseline tries to get one
_LEARN_LIMIT_S: Final = 3600.0
_LEARN_MEMORY: Final = 4 << 30
_INCIDENTS_LEARNT: Final = 10_000  # newest ones: enough for patterns, and 20 MB at most


class Daemon:
    """Everything that lives as long as the process."""

    def __init__(self, config: Config, *, clock: Callable[[], float] = time.time) -> None:
        self.config = config
        self._clock = clock
        self._policy = config.policy()
        self._links = config.alert_links()
        self._catalog = config.catalog()
        self._models = load_models()
        self._once = logs.Once(log)
        self._telemetry = Telemetry(self._catalog, config.identity(), lacks=self._models.lacks)
        self._watch = Watch(history.settings_of(config), self._catalog)
        self._prometheus = history.connect(config)
        self._store = Store.open(dir=config.state_dir())
        self._control, self._committed = Control(), Control()
        self._applied: tuple[tuple[Command, ...], tuple[Outcome, ...]] = ((), ())
        self._bundle: Bundle | None = None
        self._refused: bundles.Refusal | None = None
        self._outbox = _outbox(config, self._store)
        source = open_source(config)
        self._views = None if source is None else Views(source)
        self._alertmanagers = Alertmanagers(
            config.alertmanager_targets(), timeout_s=config.alertmanager.timeout_s
        )
        self._snapshot: Snapshot | None = None
        self._stats = TickStats(interval_s=config.tick.interval_s)
        self._learner: subprocess.Popen[bytes] | None = None
        self._learn_started_s = 0.0
        self._learnt: tuple[FaultPattern, ...] | None = None
        self._asked = False  # a person wants fault patterns learnt

    # ---- start and stop -------------------------------------------------------------

    def start(self) -> None:
        """Loads what was, and refills the rings. Raises SentinelError when it cannot work."""
        now = self._clock()
        before = self._store.load()
        control, transitions = resume(before, now)
        if transitions:
            nothing = Judgement(np.zeros(0, dtype=np.int8), np.zeros(0))
            self._store.commit(before, Step(control, nothing, (), transitions, ()))
            for t in transitions:
                log.warning("after a restart: %s %s: %s", t.entity, t.id, t.reason)
        self._control = self._committed = control
        self._load_bundle(at_start=True)
        self._refill(now)

    def _refill(self, now: float) -> None:
        """The window before now, folded like live ticks: features are ready at once, and
        what already stood before we came is history, not news."""
        span_s = history.warm_up_s(self._watch.settings)
        deadline = time.monotonic() + _START_WAIT_S
        while True:
            try:
                ticks = history.ticks_between(now - span_s, now, self.config.tick.interval_s)
                slices = self._prometheus.history(now - span_s, now, slice_s=span_s)
                for frame in history.frames(self._telemetry, slices, ticks):
                    self._watch.judge(frame, None)
                return
            except DependencyError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(1.0)

    def _load_bundle(self, *, at_start: bool = False) -> None:
        folder = history.bundle_dir(self.config)
        found, problems = bundles.load_newest(folder, grid_s=self._watch.settings.grid_s)
        for problem in problems:
            log.warning("bundle passed over: %s", problem)
        if found is None and problems and at_start:
            raise StateError(f"no bundle in {folder} can be used: {problems[0]}")
        if found is not None and (self._bundle is None or found.id != self._bundle.id):
            log.info("baseline %s: %d GPU models", found.id, len(found.cohorts))
            self._bundle = found
        before, self._refused = self._refused, bundles.newest_refusal(folder)
        if self._refused is not None and self._refused != before:
            why = "; ".join(self._refused.reasons)
            log.warning("bundle %s not adopted: %s", self._refused.id, why)

    def close(self) -> None:
        if self._learner is not None:
            self._learner.kill()
            self._learner.wait()
        if self._outbox is not None:
            self._outbox.close()
        if self._views is not None:
            self._views.close()
        self._alertmanagers.close()
        self._store.close()

    # ---- the tick -------------------------------------------------------------------

    def tick(self) -> None:
        """One turn of the loop. Never raises: a tick that fails is logged and counted."""
        began = time.monotonic()
        try:
            self._turn(began)
        except SentinelError as err:
            self._once.error("tick", f"tick failed: {err}")
            self._failed(str(err))
        except Exception as err:  # a bug in one tick must not end the watch
            log.exception("tick failed unexpectedly")
            self._failed(repr(err))
        else:
            self._once.clear("tick", "ticks work again")
            systemd.notify("WATCHDOG=1")

    def _failed(self, error: str) -> None:
        """Readers keep what the last good tick saw, and learn that this one failed."""
        self._stats = self._stats.failed(error)
        if self._snapshot is not None:
            self._snapshot = replace(
                self._snapshot, tick=self._stats, alertmanagers=self._alertmanagers.status()
            )

    def _turn(self, began: float) -> None:
        # the inbox first: were the store unreadable, no telemetry would have been used up
        commands, outcomes = self._store.pending_commands(), self._store.pending_outcomes()
        now = self._clock()
        frame = self._pull(now)
        self._reap_learner()
        done_commands, done_outcomes = self._applied
        inputs = Inputs(
            frame=frame,
            outcomes=tuple(o for o in outcomes if o not in done_outcomes),
            commands=tuple(c for c in commands if c not in done_commands),
            policy=self._policy,
            models=self._models,
            learnt=self._learnt,
            scheduler=self._heard(frame),
        )
        done = step(self._control, self._watch, self._bundle, inputs, now)
        # The step holds in memory even if the disk refuses it (evidence is not seen twice),
        # but nothing leaves this process until it is written down.
        self._control, self._applied, self._learnt = done.control, (commands, outcomes), None
        try:
            self._store.commit(self._committed, done, commands=commands, outcomes=outcomes)
        except StateError:
            self._alert(now)  # a full disk stops acts, never alerts
            raise
        self._committed, self._applied = done.control, ((), ())
        _log_transitions(done)
        self._act(done)
        self._tell(frame, done, now, began)
        self._asked |= any(c.kind is CommandKind.LEARN_PATTERNS for c in inputs.commands)
        if self._asked and self._learner is None:
            self._asked = False
            self.learn(patterns_only=True)

    def _heard(self, frame: Frame) -> View | None:
        """What the scheduler said last; a new answer is asked for meanwhile."""
        if self._views is None:
            return None
        self._views.ask({gpu.node for gpu in frame.gpus})
        return self._views.latest

    def _pull(self, now: float) -> Frame:
        deadline_s = self.config.tick_deadline_s()
        try:
            samples = self._prometheus.pull(
                now, window_s=self.config.pull_window_s(), deadline_s=deadline_s
            )
        except DependencyError as err:
            self._once.error("pull", f"blind: {err}")
            return self._telemetry.blind(now, str(err))
        self._once.clear("pull", "Prometheus answers again")
        self._telemetry.add(samples)
        frame = self._telemetry.frame(now)
        if frame.coverage.gpus_expected:
            self._once.clear("no GPU", "GPUs report")
        else:
            self._once.error(
                "no GPU",
                "Prometheus answers without any GPU: check prometheus.selector and the exporters; "
                "`sentinel doctor` says which",
            )
        return frame

    def _act(self, done: Step) -> None:
        for action in done.actions:
            migration = self._control.migrations.get(action.operation_id)
            if migration is None or self._outbox is None:
                continue
            if action.kind is ActionKind.QUERY:
                self._outbox.submit_query(migration)
                continue
            try:
                sent = self._store.mark_sent(
                    migration,
                    now_s=self._clock(),  # not the tick's time: we may have stood still since
                    evidence_max_age_s=self._policy.times.evidence_max_age_s,
                )
            except StateError as err:  # people are still told in this tick
                self._once.error("mark_sent", f"{migration.operation_id} not sent: {err}")
                continue
            if isinstance(sent, Reason):
                log.warning("%s not sent: %s", migration.operation_id, sent.text)
                continue
            self._replace(sent)
            self._outbox.submit_post(sent, self._control.incidents[sent.incident_id])
            log.info(
                "%s sent: %s %s", sent.operation_id, sent.operation, sent.node, extra=_ids(sent)
            )

    def _replace(self, migration: Migration) -> None:
        """SENT is on disk already: memory follows."""
        migrations = {**self._control.migrations, migration.operation_id: migration}
        self._control = self._committed = replace(self._control, migrations=migrations)

    def _alert(self, now: float) -> None:
        self._alertmanagers.send(project(self._control, self._policy, now, links=self._links))

    def _tell(self, frame: Frame, done: Step, now: float, began: float) -> None:
        self._alert(now)
        duration_s = time.monotonic() - began
        self._stats = self._stats.finished(now, duration_s)
        open_incidents = sum(1 for i in self._control.incidents.values() if i.is_open)
        log.debug(
            "tick: %d of %d GPUs report, %d not normal, %d incidents open, %.0f ms",
            frame.coverage.gpus_reporting,
            frame.coverage.gpus_expected,
            len(done.judgement.verdicts),
            open_incidents,
            1000 * duration_s,
        )
        calibration = self._bundle.calibration if self._bundle else UNCALIBRATED
        self._snapshot = Snapshot(
            at_s=now,
            version=__version__,
            mode=self._policy.mode,
            cluster=self._policy.cluster,
            control=self._control,
            frame=frame,
            judgement=done.judgement,
            bundle_id=self._bundle.id if self._bundle else "",
            bundle_learnt_to_s=self._bundle.learnt_to_s if self._bundle else 0.0,
            tick=self._stats,
            alertmanagers=self._alertmanagers.status(),
            rejected=dict(self._telemetry.rejected),
            calibration=calibration,
            limits=thresholds(
                self._control.peaks,
                calibration,
                self._policy.budget,
                now,
                gpus=len(frame.gpus),
            ),
            refused=self._refused,
            patterns=self._watch.reads(self._control.patterns).patterns,
        )

    # ---- other jobs -----------------------------------------------------------------

    def learn(self, *, patterns_only: bool = False) -> None:
        """Starts a child that learns from the last days; at most one at a time."""
        if self._learner is not None or self.config.path is None:
            return
        incidents = self._store.incidents(limit=_INCIDENTS_LEARNT)
        self._write_exclusions(incidents)
        self._give(incidents)
        self._learn_started_s = time.monotonic()
        command = [sys.executable, "-m", "sentinel.cli", "learn", "--config", str(self.config.path)]
        command += ["--patterns"] if patterns_only else []
        self._learner = subprocess.Popen(
            [*command, "--json"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        _hold_back(self._learner.pid)
        log.info("learning started", extra={"pid": self._learner.pid})

    def learn_first(self) -> None:
        """Without a baseline there are only hard evidence and patience: try again soon. One of
        a few minutes is learnt anew whenever there is half as much history again."""
        tried_s = self._refused.learnt_to_s if self._refused else 0.0
        if history.soon_again(self.config, self._bundle, self._clock(), tried_s=tried_s):
            self.learn()

    def _reap_learner(self) -> None:
        child = self._learner
        if child is None:
            return
        if child.poll() is None:
            if time.monotonic() - self._learn_started_s < _LEARN_LIMIT_S:
                return
            log.error("learning took over %.0f s and was stopped", _LEARN_LIMIT_S)
            child.kill()
        _, err = child.communicate()
        self._learner = None
        self._take_patterns()
        if child.returncode in (0, 1):  # 1: it was refused, and says so itself
            self._load_bundle()
        else:
            tail = err.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
            self._once.error("learn", f"learning failed ({child.returncode}): {tail[0]}")

    def _give(self, incidents: tuple[Incident, ...]) -> None:
        """What fault patterns are learnt from, for the child."""
        try:
            patterns.give(self.config.state_dir(), incidents, self._control.patterns)
        except StateError as err:
            self._once.error("give", f"fault patterns are not learnt: {err}")

    def _take_patterns(self) -> None:
        """What the child has made of them, for the next tick; whatever else went wrong."""
        try:
            self._learnt = patterns.answered(self.config.state_dir()) or self._learnt
        except (StateError, OSError) as err:
            self._once.error("patterns", f"learnt fault patterns are lost: {err}")

    def _write_exclusions(self, incidents: tuple[Incident, ...]) -> None:
        """Windows under an incident, for the child to leave out of what is normal."""
        hardware = (SubjectKind.NODE, SubjectKind.RACK)  # a job's or a fleet's new ways are learnt
        rows = [
            {"gpu_uuid": uuid, "from_s": i.opened_at_s - 600.0, "to_s": i.resolved_at_s}
            for i in incidents
            if i.confirmed_at_s is not None
            for uuid in (
                [i.gpu_uuid]
                if i.gpu_uuid
                else [m.gpu_uuid for m in i.members if i.subject.kind in hardware]
            )
        ]
        history.exclusions_path(self.config).write_text(json.dumps(rows))

    def housekeep(self) -> None:
        """Runs in the tick's thread: drops what nobody needs any more from live state."""
        try:
            # memory alone: the next commit tells the store what was dropped
            self._control = housekeep(self._control, self._clock())
            self._store.prune(self._clock())
            bundles.prune(history.bundle_dir(self.config), keep=10)
            self._load_bundle()  # one that was learnt by hand counts without a restart
        except (SentinelError, OSError) as err:
            self._once.error("housekeep", f"housekeeping failed: {err}")

    # ---- the face -------------------------------------------------------------------

    def snapshot(self) -> Snapshot | None:
        return self._snapshot

    def command(
        self, kind: CommandKind, target: str, actor: str, reason: str, value: str = ""
    ) -> Command:
        return self._store.add_command(kind, target, actor, reason, at_s=self._clock(), value=value)

    def outcome(self, outcome: Outcome) -> None:
        self._store.add_outcome(outcome)

    def reload(self) -> None:
        """Takes up new limits, times and spares from the file. Raises ConfigError, and keeps
        the old ones, when the file is wrong or something else has changed in it."""
        if self.config.path is None:
            raise ConfigError("this configuration was not read from a file")
        new = Config.load(self.config.path)
        fixed = [
            name
            for name in type(new).model_fields
            if name not in _RELOADABLE and getattr(new, name) != getattr(self.config, name)
        ]
        if fixed:
            raise ConfigError(
                f"{', '.join(fixed)}: changes there need a restart; nothing was taken"
            )
        self.config, self._policy, self._links = new, new.policy(), new.alert_links()
        log.info("configuration reloaded from %s", new.path)

    def reload_quietly(self) -> None:
        """For SIGHUP, where nobody waits for an answer."""
        try:
            self.reload()
        except SentinelError as err:
            log.error("not reloaded: %s", err)

    @property
    def journal(self) -> Store:
        return self._store


def run_daemon(config: Config) -> int:
    """Runs until SIGTERM or SIGINT. Raises SentinelError when it cannot start."""
    logs.configure(json_lines=config.log.format == "json", level=config.log.level)
    daemon = Daemon(config)
    stop = threading.Event()
    app = create_app(
        daemon,
        token=config.token(),
        hook_secret=config.hook_secret(),
        per_gpu_metrics=config.http.per_gpu_metrics,
    )
    server = Server(app)
    scheduler = _schedule(daemon, config)
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        signal.signal(signal.SIGHUP, lambda *_: daemon.reload_quietly())
        server.start(config.http.listen)
        daemon.start()
        scheduler.start()
        log.info(
            "watching %s in mode %s",
            config.prometheus.url,
            config.mode,
            extra={"pid": os.getpid(), "listen": config.http.listen},
        )
        systemd.notify("READY=1")
        stop.wait()
        log.info("stopping")
        systemd.notify("STOPPING=1")
        return 0
    finally:
        if scheduler.running:
            scheduler.shutdown(wait=True)
        server.stop()
        daemon.close()


def _outbox(config: Config, store: Store) -> Outbox | None:
    """The way to the scheduler; None where none is configured, or none may be called."""
    hook = open_hook(config) if config.mode == "act" else None
    return None if hook is None else Outbox(hook, store)


def _schedule(daemon: Daemon, config: Config) -> BackgroundScheduler:
    scheduler = BackgroundScheduler(
        executors={"default": ThreadPoolExecutor(2), "tick": ThreadPoolExecutor(1)},
        # the defaults drop a run that is a second late; a late tick is better than none
        job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": None},
        timezone="UTC",
    )
    every: dict[str, Any] = {"trigger": "interval", "executor": "tick"}
    scheduler.add_job(daemon.tick, **every, seconds=config.tick.interval_s, id="tick")
    scheduler.add_job(daemon.housekeep, **every, minutes=10, id="housekeep")
    if config.learn.every_h > 0:
        scheduler.add_job(daemon.learn, **every, hours=config.learn.every_h, id="learn")
        scheduler.add_job(daemon.learn_first, **every, seconds=_FIRST_LEARN_S, id="learn-first")
    return scheduler


def _log_transitions(done: Step) -> None:
    for t in done.transitions:
        # a suspicion is a passing thought until it is confirmed
        passing = IncidentPhase.SUSPECTED in (t.from_phase, t.to_phase)
        quiet = passing and t.to_phase != IncidentPhase.CONFIRMED
        incident = done.control.incidents.get(t.id)
        pages = incident is not None and incident.severity is Severity.CRITICAL
        level = logging.WARNING if pages else logging.INFO
        log.log(
            logging.DEBUG if quiet else level,
            "%s %s%s: %s -> %s: %s",
            t.entity,
            t.id,
            f" ({incident.subject.kind} {incident.subject.id}, {incident.node or 'no node'})"
            if incident is not None
            else "",
            t.from_phase or "-",
            t.to_phase,
            t.reason,
        )


def _hold_back(pid: int) -> None:
    """Bounded memory and the lowest priority: learning never costs a tick."""
    try:
        resource.prlimit(pid, resource.RLIMIT_AS, (_LEARN_MEMORY, _LEARN_MEMORY))
        os.setpriority(os.PRIO_PROCESS, pid, 10)
    except (ProcessLookupError, PermissionError) as err:
        log.warning("learning runs without limits: %s", err)


def _ids(migration: Migration) -> dict[str, str]:
    return {"operation_id": migration.operation_id, "incident_id": migration.incident_id}
