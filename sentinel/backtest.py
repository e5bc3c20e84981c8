"""What would have happened: the live core over Prometheus history, with a virtual clock.

The policy is mode act with the site's own limits, applied in time order; the scheduler is
assumed to do what it is asked. Nothing alerts, no hook is called, live state is not touched.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from sentinel import history
from sentinel.config import Config
from sentinel.core import domain
from sentinel.core.alert import alertname
from sentinel.core.budget import WEEK_S, Line, Thresholds, thresholds
from sentinel.core.domain import (
    ActionKind,
    Choice,
    Command,
    CommandKind,
    Control,
    Decision,
    Incident,
    IncidentPhase,
    Kind,
    MigrationPhase,
    Mode,
    Outcome,
    OutcomeKind,
    OutcomeSource,
    Presence,
    Severity,
    SubjectKind,
    to_plain,
)
from sentinel.core.frame import Telemetry
from sentinel.core.policy import Policy
from sentinel.core.step import Inputs, housekeep, sent, step
from sentinel.core.verdict import Bundle, Watch
from sentinel.data import load_models
from sentinel.edges import bundle as bundles
from sentinel.edges.prometheus import Prometheus


class _Replay:
    """Live state of a backtest: what advance needs, and what the report is made of."""

    def __init__(self, config: Config, bundle: Bundle | None) -> None:
        policy = config.policy()
        self.policy: Policy = replace(
            policy,
            mode=Mode.ACT,
            assume_spares=not (policy.spare_nodes or policy.spare_gpus),
        )
        self.bundle = bundle
        self.watch = Watch(history.settings_of(config), config.catalog())
        self.models = load_models()
        self.control = Control()
        self.outcomes: tuple[Outcome, ...] = ()
        self.incidents: dict[str, Incident] = {}
        self.decisions: dict[str, list[Decision]] = {}
        self.highest: dict[str, float] = {}  # score that a page and a ticket needed at most
        self.budget_s = 0.0
        self.gpu_s = 0.0
        self.blind_gpu_s = 0.0

    def tick(self, frame: domain.Frame, dt_s: float) -> None:
        inputs = Inputs(frame, self.outcomes, self._releases(frame.at_s), self.policy, self.models)
        done = step(self.control, self.watch, self.bundle, inputs, frame.at_s)
        self.budget_s += dt_s
        self.gpu_s += dt_s * float(np.count_nonzero(frame.presence == Presence.PRESENT))
        unknown = (done.judgement.kinds == domain.UNKNOWN) & np.isfinite(frame.last_seen_s)
        self.blind_gpu_s += dt_s * float(np.count_nonzero(unknown))
        self.control, self.outcomes = self._obey(done, frame.at_s)
        for decision in done.decisions:
            self.decisions.setdefault(decision.incident_id, []).append(decision)
        self.incidents.update(
            (i.id, i) for i in self.control.incidents.values() if i.confirmed_at_s is not None
        )

    def limits(self, now_s: float) -> Thresholds:
        """What the budget asks of soft evidence now."""
        known = self.bundle.calibration if self.bundle else None
        found = thresholds(self.control.peaks, known, self.policy.budget, now_s)
        for one in (found.page, found.ticket):
            self.highest[one.word] = max(self.highest.get(one.word, 0.0), one.now)
        return found

    def _releases(self, at_s: float) -> tuple[Command, ...]:
        """The assumed operator: gives a node back once everything on it has looked well for as
        long as an alert takes to clear, and resets the breaker once the fleet is calm again, or
        the limits would hold for a whole history."""
        times = self.policy.times

        def over(i: Incident) -> bool:
            wait_s = times.clear_latched_for_s if i.latched else times.clear_for_s
            return i.phase is IncidentPhase.CLEARING and i.held_s >= wait_s

        ill = {i.node for i in self.control.incidents.values() if i.is_open and not over(i)}
        fleet = SubjectKind.FLEET
        calm = not any(
            i.is_open and i.subject.kind is fleet for i in self.control.incidents.values()
        )
        orders = [
            (CommandKind.RELEASE, q.node, "repaired")
            for q in self.control.quarantine.values()
            if q.node not in ill and not q.released_by
        ]
        if self.control.breaker.latched and calm:
            orders.append((CommandKind.RESET_BREAKER, "", "the fleet is calm again"))
        return tuple(
            Command(number, kind, target, "backtest", why, at_s)
            for number, (kind, target, why) in enumerate(orders)
        )

    def _obey(self, done: domain.Step, at_s: float) -> tuple[Control, tuple[Outcome, ...]]:
        """The assumed scheduler: every call is answered with success by the next tick."""
        migrations = dict(done.control.migrations)
        answers = []
        for action in done.actions:
            if action.kind is not ActionKind.POST:
                continue
            asked = sent(migrations[action.operation_id], at_s)
            migrations[action.operation_id] = asked
            answers.append(
                Outcome(
                    asked.operation_id,
                    OutcomeKind.FINISHED,
                    OutcomeSource.POST,
                    at_s,
                    "assumed by the backtest",
                    asked.backups,
                )
            )
        for op, migration in migrations.items():
            if migration.phase is MigrationPhase.VERIFYING:
                # recorded telemetry cannot show a move that never took place
                migrations[op] = replace(migration, phase=MigrationPhase.DONE, since_s=at_s)
        return replace(done.control, migrations=migrations), tuple(answers)


def backtest(
    config: Config,
    start_s: float,
    end_s: float,
    *,
    learn_start_s: float | None = None,
    learn_end_s: float | None = None,
    progress: history.Progress = lambda share, what: None,
    prometheus: Prometheus | None = None,
) -> dict[str, Any]:
    """Replays (start_s, end_s] and reports every confirmed incident, with its decisions:
    those that alert under `incidents`, those of severity info under `written_down`. A GPU that
    a node's alert speaks for stands under `incidents` without an alert of its own.

    Learns first from (learn_start_s, learn_end_s] when given, without saving anything;
    otherwise the newest bundle of state.dir is used, or hard evidence alone if there is none.
    """
    source = prometheus or history.connect(config)
    settings = history.settings_of(config)
    bundle: Bundle | None
    if learn_start_s is not None and learn_end_s is not None:
        bundle = history.learn(
            config,
            learn_start_s,
            learn_end_s,
            progress=lambda share, what: progress(0.4 * share, what),
            prometheus=source,
            save=False,
        ).bundle
    else:
        bundle, _ = bundles.load_newest(history.bundle_dir(config), grid_s=settings.grid_s)
    replay = _Replay(config, bundle)
    telemetry = Telemetry(config.catalog(), config.identity(), lacks=replay.models.lacks)
    step_s = config.tick.interval_s
    warm_s = history.warm_up_s(settings)
    ticks = history.ticks_between(start_s - warm_s, end_s, step_s)
    slices = source.history(start_s - warm_s, end_s, slice_s=config.learn.slice_s)
    base = 0.4 if learn_start_s is not None else 0.0
    for place, frame in enumerate(history.frames(telemetry, slices, ticks)):
        if frame.at_s <= start_s + 1e-6:
            replay.watch.judge(frame, None)
            continue
        replay.tick(frame, step_s)
        if place % 64 == 0:
            replay.control = housekeep(replay.control, frame.at_s)
            replay.limits(frame.at_s)
            share = base + (1.0 - base) * place / len(ticks)
            progress(share, f"replaying {_rfc3339(frame.at_s)}")
    progress(1.0, "done")
    return _report(replay, start_s, end_s, step_s)


def _report(replay: _Replay, start_s: float, end_s: float, step_s: float) -> dict[str, Any]:
    ordered = sorted(replay.incidents.values(), key=lambda i: (i.confirmed_at_s or 0.0, i.id))
    rows = [_row(i, replay.decisions.get(i.id, [])) for i in ordered]
    return {
        "schema": 1,
        "window": {"start": _rfc3339(start_s), "end": _rfc3339(end_s), "step_s": step_s},
        "bundle_id": replay.bundle.id if replay.bundle else None,
        "assumes": _assumed(replay.policy),
        "coverage": {
            "gpu_days": replay.gpu_s / 86_400.0,
            "blind_gpu_days": replay.blind_gpu_s / 86_400.0,
        },
        "budget": _budget(replay, end_s),
        "incidents": [row for row in rows if row["alertname"] or row["part_of"]],
        "written_down": [row for row in rows if not (row["alertname"] or row["part_of"])],
    }


def _assumed(policy: Policy) -> list[str]:
    """What recorded telemetry cannot show, in words."""
    out = [
        "the scheduler does all that it is asked, at once",
        "a fenced node is given back once all on it has looked well for as long as an alert "
        "takes to clear",
    ]
    if policy.assume_spares:
        out.append("a free spare exists for every move, since none is configured (spares.hosts)")
    return out


def _budget(replay: _Replay, end_s: float) -> dict[str, Any]:
    """What the weekly budget did: the scores that it asked for at the end, the highest that it
    asked for on the way, and every incident that it kept from being told as loudly as earned."""
    limits = replay.limits(end_s)
    weeks = replay.budget_s / WEEK_S
    held = [i for i in replay.incidents.values() if i.withheld]
    told = [i for i in replay.incidents.values() if i.kind is Kind.DEVIANT]

    def line(one: Line, severity: Severity, passes: bool) -> dict[str, Any]:
        return {
            "per_week": one.per_week,
            "told": sum(i.worst is severity for i in told),
            "allowed": one.per_week * weeks,
            "score": round(one.now, 3) if passes else None,
            "calibrated": round(one.floor, 3),
            "highest": round(replay.highest.get(one.word, one.floor), 3),
        }

    return {
        "certified": limits.certified,
        "why": limits.why,
        "gpu_days": replay.bundle.calibration.gpu_days if replay.bundle else 0.0,
        "pages": line(limits.page, Severity.CRITICAL, limits.certified),
        "tickets": line(limits.ticket, Severity.WARNING, True),
        "held_back": [
            {
                "id": i.id,
                "confirmed_at": _rfc3339(i.confirmed_at_s),
                "score": round(i.score, 3),
                "severity": i.worst.value,
                "reason": i.withheld,
            }
            for i in sorted(held, key=lambda i: (i.confirmed_at_s or 0.0, i.id))
        ],
    }


def _row(incident: Incident, decisions: list[Decision]) -> dict[str, Any]:
    acts = (Choice.FENCE, Choice.MOVE)
    alerts = incident.worst is not Severity.INFO and not incident.part_of
    return {
        "id": incident.id,
        "subject": {"kind": incident.subject.kind.value, "id": incident.subject.id},
        "gpu_uuid": incident.gpu_uuid if incident.subject.kind is SubjectKind.GPU else None,
        "part_of": incident.part_of or None,
        "members": [to_plain(m) for m in incident.members],
        "host": incident.node,
        "started_at": _rfc3339(incident.opened_at_s),
        "confirmed_at": _rfc3339(incident.confirmed_at_s),
        "resolved_at": _rfc3339(incident.resolved_at_s),
        "alertname": alertname(incident) if alerts else None,
        "kind": incident.kind.value,
        "pattern": incident.pattern,
        "like": incident.like,
        "distance": incident.distance,
        "signature": dict(incident.signature),
        "severity": incident.worst.value,
        "score": round(incident.score, 3),
        "withheld": incident.withheld,
        "evidence": [to_plain(e) for e in incident.evidence],
        "decisions": [
            {
                "at": _rfc3339(d.at_s),
                "action": d.wanted.value,
                "allowed": d.allowed,
                "blocked_by": d.blocked_by or None,
                "reason": d.reason,
            }
            for d in decisions
        ],
        "would_migrate": any(d.allowed and d.wanted in acts for d in decisions),
    }


def _rfc3339(at_s: float | None) -> str | None:
    if at_s is None:
        return None
    text = datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")
