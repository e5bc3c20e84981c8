"""From the program's types to the shapes that the API answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np

from sentinel.core import budget
from sentinel.core.domain import (
    KINDS,
    NORMAL,
    Backup,
    Command,
    Decision,
    Evidence,
    FaultPattern,
    Frame,
    Incident,
    Kind,
    Migration,
    Presence,
    Quarantine,
    Severity,
    Verdict,
    Workload,
)
from sentinel.core.incident import alertname
from sentinel.core.patterns import likeness
from sentinel.web.shapes import (
    AlertmanagerView,
    BudgetLineView,
    BudgetView,
    BundleView,
    CommandView,
    CoverageView,
    DecisionView,
    EvidenceView,
    GpuDetailView,
    GpuView,
    IncidentView,
    MemberView,
    MetricView,
    MigrationView,
    PatternView,
    PlaceView,
    QuarantineView,
    RefusedView,
    StatusView,
    SubjectView,
    SwitchView,
    TickView,
    WorkloadView,
)
from sentinel.web.snapshot import Snapshot


def rfc3339(at_s: float | None) -> str | None:
    """None for never."""
    if at_s is None or not np.isfinite(at_s) or at_s <= 0:
        return None
    text = datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def status(snapshot: Snapshot, now_s: float) -> StatusView:
    control, tick, coverage = snapshot.control, snapshot.tick, snapshot.frame.coverage
    reasons = list(snapshot.reasons(now_s))
    codes = np.bincount(snapshot.judgement.kinds, minlength=len(KINDS))
    open_now = [i for i in control.incidents.values() if i.is_open]
    migrations = [m.phase.value for m in control.migrations.values()]
    return StatusView(
        version=snapshot.version,
        at=rfc3339(snapshot.at_s),
        mode=snapshot.mode.value,
        cluster=snapshot.cluster,
        ready=not reasons,
        reasons=reasons,
        tick=TickView(
            interval_s=tick.interval_s,
            count=tick.count,
            failures=tick.failures,
            duration_s=tick.duration_s,
            last_finished_at=rfc3339(tick.last_finished_s),
            error=tick.error,
        ),
        coverage=CoverageView(
            gpus_expected=coverage.gpus_expected,
            gpus_reporting=coverage.gpus_reporting,
            blind=coverage.blind,
            partial=coverage.partial,
            reason=coverage.reason,
        ),
        gpus={kind.value: int(codes[code]) for code, kind in enumerate(KINDS)},
        incidents={s.value: sum(i.severity is s for i in open_now) for s in Severity},
        migrations={phase: migrations.count(phase) for phase in sorted(set(migrations))},
        breaker=SwitchView(
            on=control.breaker.latched,
            reason=control.breaker.reason,
            since=rfc3339(control.breaker.at_s),
        ),
        pause=SwitchView(
            on=control.pause.paused,
            reason=control.pause.reason,
            since=rfc3339(control.pause.at_s),
        ),
        quarantine=[_quarantine(q) for _, q in sorted(control.quarantine.items())],
        bundle=_bundle(snapshot),
        budget=_budget(snapshot, now_s),
        alertmanagers=[
            AlertmanagerView(url=url, up=ok, text=text)
            for url, (ok, text) in snapshot.alertmanagers.items()
        ],
        samples_rejected=dict(snapshot.rejected),
    )


def _bundle(snapshot: Snapshot) -> BundleView | None:
    if not snapshot.bundle_id:
        return None
    refused = None
    if snapshot.refused is not None:
        refused = RefusedView(
            id=snapshot.refused.id,
            learnt_to=rfc3339(snapshot.refused.learnt_to_s),
            reasons=list(snapshot.refused.reasons),
        )
    learnt_to = rfc3339(snapshot.bundle_learnt_to_s)
    return BundleView(id=snapshot.bundle_id, learnt_to=learnt_to, refused=refused)


def _budget(snapshot: Snapshot, now_s: float) -> BudgetView | None:
    limits = snapshot.limits
    if limits is None:
        return None
    pages, tickets, written_down = budget.spent(snapshot.control.peaks, now_s)

    def line(one: budget.Line, spent: int, passes: bool) -> BudgetLineView:
        return BudgetLineView(
            per_week=one.per_week,
            spent=spent,
            score=round(one.now, 3) if passes else None,
            calibrated=round(one.floor, 3),
            raised=round(one.raised, 3),
        )

    return BudgetView(
        certified=limits.certified,
        why=limits.why,
        gpu_days=round(snapshot.calibration.gpu_days, 3),
        certify_gpu_days=snapshot.calibration.certify_gpu_days,
        pages=line(limits.page, pages, limits.certified),
        tickets=line(limits.ticket, tickets, True),
        written_down=written_down,
    )


def gpus(snapshot: Snapshot, rows: Iterable[int]) -> list[GpuView]:
    verdicts = {v.gpu.uuid: v for v in snapshot.judgement.verdicts}
    return [GpuView(**_gpu(snapshot, row, verdicts)) for row in rows]


def gpu_detail(snapshot: Snapshot, row: int) -> GpuDetailView:
    frame = snapshot.frame
    uuid = frame.gpus[row].uuid
    verdicts = {v.gpu.uuid: v for v in snapshot.judgement.verdicts if v.gpu.uuid == uuid}
    verdict = verdicts.get(uuid)
    metrics = [
        MetricView(name=name, value=float(value), age_s=float(age_s))
        for name, value, age_s in zip(
            frame.metrics, frame.values[row], frame.age_s[row], strict=True
        )
        if np.isfinite(value)
    ]
    return GpuDetailView(
        **_gpu(snapshot, row, verdicts),
        metrics=metrics,
        evidence=list(map(_evidence, verdict.evidence if verdict else ())),
    )


def _gpu(snapshot: Snapshot, row: int, verdicts: dict[str, Verdict]) -> dict[str, Any]:
    frame, gpu = snapshot.frame, snapshot.frame.gpus[row]
    score = float(snapshot.judgement.scores[row])
    verdict = verdicts.get(gpu.uuid)
    return {
        "uuid": gpu.uuid,
        "node": gpu.node,
        "index": gpu.index,
        "model": gpu.model,
        "kind": KINDS[snapshot.judgement.kinds[row]].value,
        "presence": Presence(frame.presence[row]).name.lower(),
        "score": round(score, 4) if np.isfinite(score) else None,
        "severity": verdict.severity.value if verdict else None,
        "pattern": verdict.pattern if verdict else None,
        "last_seen_at": rfc3339(_last_seen(frame, row)),
        "workload": _workload(frame.workloads[row]),
    }


def _last_seen(frame: Frame, row: int) -> float | None:
    return float(frame.last_seen_s[row]) if row < len(frame.last_seen_s) else None


def worst_first(snapshot: Snapshot) -> Iterator[int]:
    """Rows of the frame: what is not normal first, then by score."""
    kinds, scores = snapshot.judgement.kinds, np.nan_to_num(snapshot.judgement.scores)
    yield from map(int, np.lexsort((-scores, kinds == NORMAL)))


def incident(i: Incident, patterns: Mapping[str, FaultPattern]) -> IncidentView:
    """`patterns` are those that are known, by their id."""
    return IncidentView(
        id=i.id,
        subject=SubjectView(kind=i.subject.kind.value, id=i.subject.id),
        gpu_uuid=i.gpu_uuid,
        node=i.node,
        model=i.model,
        phase=i.phase.value,
        kind=i.kind.value,
        severity=i.severity.value,
        pattern=i.pattern,
        score=i.score if i.kind is Kind.DEVIANT and np.isfinite(i.score) else None,
        alertname=alertname(i) if i.confirmed_at_s is not None else None,
        opened_at=rfc3339(i.opened_at_s),
        confirmed_at=rfc3339(i.confirmed_at_s),
        resolved_at=rfc3339(i.resolved_at_s),
        held_s=i.held_s,
        workload=_workload(i.workload),
        moved=i.moved,
        fenced=i.fenced,
        latched=i.latched,
        hold_reason=i.hold_reason,
        released_by=i.released_by,
        withheld=i.withheld,
        bundle_id=i.bundle_id,
        part_of=i.part_of or None,
        members=[MemberView(gpu_uuid=m.gpu_uuid, node=m.node, index=m.index) for m in i.members],
        evidence=list(map(_evidence, i.evidence)),
        like=i.like,
        distance=i.distance,
        signature=dict(i.signature),
        likeness=likeness(i, patterns),
    )


def patterns(known: Mapping[str, FaultPattern]) -> list[PatternView]:
    """Those with most incidents first, and in the order of the catalogue."""
    return [pattern(p) for p in sorted(known.values(), key=lambda p: -p.past.count)]


def pattern(p: FaultPattern) -> PatternView:
    return PatternView(
        id=p.id,
        name=p.name,
        origin=p.origin,
        state=p.state.value,
        means=p.means,
        first=p.first,
        shapes=[dict(shape) for shape in p.shapes],
        incidents=p.past.count,
        endings=dict(p.past.endings),
        median_s=float(np.median(p.past.durations_s)) if p.past.durations_s else None,
        said_by=p.said_by,
        said_at=rfc3339(p.said_at_s),
    )


def migration(m: Migration) -> MigrationView:
    return MigrationView(
        operation_id=m.operation_id,
        incident_id=m.incident_id,
        operation=m.operation.value,
        phase=m.phase.value,
        node=m.node,
        gpu_uuids=list(m.gpu_uuids),
        workload=_workload(m.workload),
        attempt=m.attempt,
        planned_at=rfc3339(m.planned_at_s),
        since=rfc3339(m.since_s),
        deadline_at=rfc3339(m.deadline_s),
        backups=list(map(_place, m.backups)),
        placement=list(map(_place, m.placement)),
        reason=m.reason,
        cancelled_by=m.cancelled_by,
    )


def decision(d: Decision) -> DecisionView:
    return DecisionView(
        at=rfc3339(d.at_s),
        incident_id=d.incident_id,
        wanted=d.wanted.value,
        choice=d.choice.value,
        allowed=d.allowed,
        blocked_by=d.blocked_by,
        reason=d.reason,
    )


def command(c: Command) -> CommandView:
    return CommandView(
        id=c.id,
        kind=c.kind.value,
        target=c.target,
        actor=c.actor,
        reason=c.reason,
        at=rfc3339(c.at_s),
        value=c.value,
    )


def _quarantine(q: Quarantine) -> QuarantineView:
    return QuarantineView(
        node=q.node,
        incident_id=q.incident_id,
        since=rfc3339(q.since_s),
        fenced=q.fenced,
        released_by=q.released_by,
    )


def _workload(w: Workload | None) -> WorkloadView | None:
    return WorkloadView(kind=w.kind, id=w.id, tenant=w.tenant) if w else None


def _evidence(e: Evidence) -> EvidenceView:
    return EvidenceView(
        kind=e.kind,
        metric=e.metric,
        text=e.text,
        value=_finite(e.value),
        expected=_finite(e.expected),
        unit=e.unit,
        contribution=e.contribution,
        at=rfc3339(e.at_s),
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and np.isfinite(value) else None


def _place(b: Backup) -> PlaceView:
    return PlaceView(node=b.node, gpu_uuids=list(b.gpu_uuids))
