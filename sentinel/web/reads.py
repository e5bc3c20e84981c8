"""The reading half of the API."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from fastapi import APIRouter, HTTPException, Query

from sentinel.core.domain import (
    KINDS,
    FaultPattern,
    IncidentPhase,
    Kind,
    MigrationPhase,
    PatternState,
    Severity,
)
from sentinel.web import shapes, views
from sentinel.web.snapshot import Snapshot

if TYPE_CHECKING:
    from sentinel.web.app import Face

Limit = Annotated[int, Query(ge=1, le=100_000, description="At most so many rows.")]
State = Annotated[
    Literal["open", "all"], Query(description="What is open now, or the history too.")
]
Exactly = Annotated[str | None, Query(max_length=256)]


def read_routes(face: Face, clock: Callable[[], float]) -> APIRouter:
    router = APIRouter(tags=["read"])

    def known() -> Mapping[str, FaultPattern]:
        snapshot = face.snapshot()
        return snapshot.patterns if snapshot else {}

    def newest() -> Snapshot:
        snapshot = face.snapshot()
        if snapshot is None:
            raise HTTPException(503, "no tick has finished yet; ask again in a moment")
        return snapshot

    @router.get("/status")
    def status() -> shapes.StatusView:
        """The whole daemon at one glance."""
        return views.status(newest(), clock())

    @router.get("/gpus")
    def gpus(
        kind: Kind | None = None,
        node: Exactly = None,
        model: Exactly = None,
        job: Exactly = None,
        limit: Limit = 100_000,
    ) -> shapes.GpusAnswer:
        """The GPUs of the last tick, worst first."""
        snapshot = newest()
        frame, kinds = snapshot.frame, snapshot.judgement.kinds

        def matches(row: int) -> bool:
            gpu, work = frame.gpus[row], frame.workloads[row]
            return (
                (kind is None or KINDS[kinds[row]] is kind)
                and (node is None or gpu.node == node)
                and (model is None or gpu.model == model)
                and (job is None or (work is not None and work.id == job))
            )

        rows = [row for row in views.worst_first(snapshot) if matches(row)]
        return shapes.GpusAnswer(
            at=views.rfc3339(snapshot.at_s),
            total=len(rows),
            gpus=views.gpus(snapshot, rows[:limit]),
        )

    @router.get("/gpus/{uuid}", responses={404: {"description": "No such GPU."}})
    def gpu(uuid: str) -> shapes.GpuAnswer:
        """One GPU with its metrics and the evidence against it."""
        snapshot = newest()
        row = next((r for r, g in enumerate(snapshot.frame.gpus) if g.uuid == uuid), None)
        if row is None:
            raise HTTPException(404, f"no GPU {uuid} in the last tick")
        detail = views.gpu_detail(snapshot, row)
        return shapes.GpuAnswer(at=views.rfc3339(snapshot.at_s), gpu=detail)

    @router.get("/incidents")
    def incidents(
        state: State = "open",
        phase: IncidentPhase | None = None,
        severity: Severity | None = None,
        node: Exactly = None,
        gpu_uuid: Exactly = None,
        limit: Limit = 1000,
    ) -> shapes.IncidentsAnswer:
        """Incidents, newest first."""
        found = [
            i
            for i in face.journal.incidents(limit=100_000, open_only=state == "open")
            if (phase is None or i.phase is phase)
            and (severity is None or i.severity is severity)
            and (node is None or i.node == node)
            and (gpu_uuid is None or i.gpu_uuid == gpu_uuid)
        ]
        patterns = known()
        rows = [views.incident(i, patterns) for i in found[:limit]]
        return shapes.IncidentsAnswer(total=len(found), incidents=rows)

    @router.get("/incidents/{incident_id}", responses={404: {"description": "No such incident."}})
    def incident(incident_id: str) -> shapes.IncidentAnswer:
        """One incident, with what was decided and done about it."""
        found = face.journal.incident(incident_id)
        if found is None:
            raise HTTPException(404, f"no incident {incident_id}")
        decisions = face.journal.decisions(limit=1000, incident_id=incident_id)
        migrations = face.journal.migrations(limit=1000, incident_id=incident_id)
        return shapes.IncidentAnswer(
            incident=views.incident(found, known()),
            decisions=[views.decision(d) for d in decisions],
            migrations=[views.migration(m) for m in migrations],
        )

    @router.get("/patterns")
    def patterns(state: PatternState | None = None) -> shapes.PatternsAnswer:
        """The ways in which GPUs fail that are known, those with most incidents first."""
        newest()
        rows = {id: p for id, p in known().items() if state is None or p.state is state}
        return shapes.PatternsAnswer(total=len(rows), patterns=views.patterns(rows))

    @router.get("/patterns/{pattern_id}", responses={404: {"description": "No such pattern."}})
    def pattern(pattern_id: str, limit: Limit = 20) -> shapes.PatternAnswer:
        """One pattern, with the newest incidents that are like it."""
        newest()
        every = known()
        if pattern_id not in every:
            raise HTTPException(404, f"no pattern {pattern_id}")
        like = [i for i in face.journal.incidents(limit=100_000) if i.like == pattern_id]
        return shapes.PatternAnswer(
            pattern=views.pattern(every[pattern_id]),
            incidents=[views.incident(i, every) for i in like[:limit]],
        )

    @router.get("/migrations")
    def migrations(
        state: State = "open",
        phase: MigrationPhase | None = None,
        incident_id: Exactly = None,
        node: Exactly = None,
        limit: Limit = 1000,
    ) -> shapes.MigrationsAnswer:
        """Fences, moves and unfences, newest first."""
        every = face.journal.migrations(
            limit=100_000, open_only=state == "open", incident_id=incident_id
        )
        found = [
            m
            for m in every
            if (phase is None or m.phase is phase) and (node is None or m.node == node)
        ]
        rows = [views.migration(m) for m in found[:limit]]
        return shapes.MigrationsAnswer(total=len(found), migrations=rows)

    @router.get(
        "/migrations/{operation_id}", responses={404: {"description": "No such operation."}}
    )
    def migration(operation_id: str) -> shapes.MigrationAnswer:
        """One operation."""
        found = face.journal.migration(operation_id)
        if found is None:
            raise HTTPException(404, f"no operation {operation_id}")
        return shapes.MigrationAnswer(migration=views.migration(found))

    @router.get("/decisions")
    def decisions(incident_id: Exactly = None, limit: Limit = 1000) -> shapes.DecisionsAnswer:
        """What was decided and why, newest first."""
        rows = face.journal.decisions(limit=limit, incident_id=incident_id)
        return shapes.DecisionsAnswer(decisions=[views.decision(d) for d in rows])

    return router
