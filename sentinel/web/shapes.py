"""The shapes of the API's answers, apart from the program's own types.

A field may be added; none changes its meaning or goes within a schema number. Times are
RFC 3339 in UTC; null is "never" or "not known".
"""

from __future__ import annotations

from typing import Final, Literal

from pydantic import BaseModel, Field

SCHEMA: Final = 1
Schema = Literal[1]


class Versioned(BaseModel):
    """A whole answer, as opposed to a part of one."""

    schema_: Schema = Field(default=SCHEMA, serialization_alias="schema")


class WorkloadView(BaseModel):
    kind: str
    id: str
    tenant: str


class EvidenceView(BaseModel):
    kind: str
    metric: str
    text: str
    value: float | None
    expected: float | None
    unit: str
    contribution: float
    at: str | None


class TickView(BaseModel):
    interval_s: float
    count: int
    failures: int
    duration_s: float
    last_finished_at: str | None
    error: str


class CoverageView(BaseModel):
    gpus_expected: int
    gpus_reporting: int
    blind: bool
    partial: bool
    reason: str


class SwitchView(BaseModel):
    """The breaker (on = latched) or the pause (on = paused)."""

    on: bool
    reason: str
    since: str | None


class QuarantineView(BaseModel):
    node: str
    incident_id: str
    since: str | None
    fenced: bool
    released_by: str


class RefusedView(BaseModel):
    """A newer bundle that compared badly with the one in use, and was not adopted."""

    id: str
    learnt_to: str | None
    reasons: list[str]


class BundleView(BaseModel):
    id: str
    learnt_to: str | None
    refused: RefusedView | None = None


class BudgetLineView(BaseModel):
    """Pages or tickets of soft evidence: `spent` in the last seven days, and the `score` that
    the next one needs (null: none may pass while the budget is not certified). It is the higher
    of `calibrated`, from normal time, and `raised`, from the last two weeks (0: there is room).
    """

    per_week: float
    spent: int
    score: float | None
    calibrated: float
    raised: float


class BudgetView(BaseModel):
    """`why` says why soft evidence makes tickets only, empty once it is certified; `gpu_days` is
    the normal time that the baseline rests on; `written_down` counts the soft incidents of the
    last seven days that were told to nobody."""

    certified: bool
    why: str
    gpu_days: float
    certify_gpu_days: float
    pages: BudgetLineView
    tickets: BudgetLineView
    written_down: int


class AlertmanagerView(BaseModel):
    url: str
    up: bool
    text: str


class StatusView(Versioned):
    version: str
    at: str | None
    mode: str
    cluster: str
    ready: bool
    reasons: list[str]
    tick: TickView
    coverage: CoverageView
    gpus: dict[str, int]
    incidents: dict[str, int]
    migrations: dict[str, int]
    breaker: SwitchView
    pause: SwitchView
    quarantine: list[QuarantineView]
    bundle: BundleView | None
    budget: BudgetView | None
    alertmanagers: list[AlertmanagerView]
    samples_rejected: dict[str, int]


class GpuView(BaseModel):
    uuid: str
    node: str
    index: int | None
    model: str
    kind: str
    presence: str
    score: float | None
    severity: str | None
    pattern: str | None
    last_seen_at: str | None
    workload: WorkloadView | None


class MetricView(BaseModel):
    name: str
    value: float
    age_s: float


class GpuDetailView(GpuView):
    metrics: list[MetricView]
    evidence: list[EvidenceView]


class SubjectView(BaseModel):
    kind: str
    id: str


class MemberView(BaseModel):
    gpu_uuid: str
    node: str
    index: int | None


class IncidentView(BaseModel):
    """`part_of` is the incident that speaks for this one; `members` are the GPUs that this one
    speaks for. `gpu_uuid` is null unless the subject is a GPU, and `score` unless it deviates:
    hard evidence is not measured by it."""

    id: str
    subject: SubjectView
    gpu_uuid: str | None
    node: str
    model: str
    phase: str
    kind: str
    severity: str
    pattern: str
    score: float | None
    alertname: str | None
    opened_at: str | None
    confirmed_at: str | None
    resolved_at: str | None
    held_s: float
    workload: WorkloadView | None
    moved: bool
    fenced: bool
    latched: bool
    hold_reason: str
    released_by: str
    withheld: str
    bundle_id: str
    part_of: str | None
    members: list[MemberView]
    evidence: list[EvidenceView]
    like: str = Field(description="The pattern that it is like; empty where it is novel.")
    distance: float | None = Field(description="From the nearest pattern: 0 the same, 1 nothing.")
    signature: dict[str, float] = Field(description="What moved, which way and how far: -1..1.")
    likeness: str = Field(description="One line for people: the pattern, and like incidents.")


class PatternView(BaseModel):
    """One way in which GPUs fail. `shapes` are signatures, each of which is this pattern."""

    id: str
    name: str
    origin: str
    state: str
    means: str
    first: str
    shapes: list[dict[str, float]]
    incidents: int = Field(description="How many incidents like it have ended.")
    endings: dict[str, int]
    median_s: float | None = Field(description="How long they were open, in the median.")
    said_by: str
    said_at: str | None


class PlaceView(BaseModel):
    node: str
    gpu_uuids: list[str]


class MigrationView(BaseModel):
    operation_id: str
    incident_id: str
    operation: str
    phase: str
    node: str
    gpu_uuids: list[str]
    workload: WorkloadView | None
    attempt: int
    planned_at: str | None
    since: str | None
    deadline_at: str | None
    backups: list[PlaceView]
    placement: list[PlaceView]
    reason: str
    cancelled_by: str


class DecisionView(BaseModel):
    at: str | None
    incident_id: str
    wanted: str
    choice: str
    allowed: bool
    blocked_by: str
    reason: str


class CommandView(BaseModel):
    id: int
    kind: str
    target: str
    actor: str
    reason: str
    at: str | None
    value: str


class GpusAnswer(Versioned):
    """`total` counts what matched, `gpus` holds the first of them."""

    at: str | None
    total: int
    gpus: list[GpuView]


class GpuAnswer(Versioned):
    at: str | None
    gpu: GpuDetailView


class IncidentsAnswer(Versioned):
    total: int
    incidents: list[IncidentView]


class IncidentAnswer(Versioned):
    """One incident, with what was decided and done about it, newest first."""

    incident: IncidentView
    decisions: list[DecisionView]
    migrations: list[MigrationView]


class MigrationsAnswer(Versioned):
    total: int
    migrations: list[MigrationView]


class MigrationAnswer(Versioned):
    migration: MigrationView


class DecisionsAnswer(Versioned):
    decisions: list[DecisionView]


class PatternsAnswer(Versioned):
    """Those with most incidents first."""

    total: int
    patterns: list[PatternView]


class PatternAnswer(Versioned):
    """One pattern with the newest incidents that are like it."""

    pattern: PatternView
    incidents: list[IncidentView]


class CommandAnswer(Versioned):
    """A command that is on disk; the next tick carries it out, or says why not."""

    command: CommandView
