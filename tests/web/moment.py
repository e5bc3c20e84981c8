"""A made-up moment of a small fleet, and a daemon's face over a real store."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sentinel.core import domain
from sentinel.core.budget import Calibration, thresholds
from sentinel.core.domain import (
    Backup,
    Choice,
    Command,
    CommandKind,
    Control,
    Coverage,
    Decision,
    Evidence,
    FaultPattern,
    Frame,
    Gpu,
    Incident,
    IncidentPhase,
    Judgement,
    Kind,
    Migration,
    MigrationPhase,
    Mode,
    Operation,
    Outcome,
    Past,
    PatternState,
    Peak,
    Presence,
    Quarantine,
    Severity,
    Subject,
    SubjectKind,
    Verdict,
    Workload,
)
from sentinel.core.policy import Budget
from sentinel.data import load_catalog
from sentinel.edges.store import Store
from sentinel.web.snapshot import Snapshot, TickStats

NOW_S = 1_700_000_000.0
LEARNT = FaultPattern("learnt-1", "memory clock low, power high", shapes=({"mem_clock": -1.0},))
PATTERNS = (
    load_catalog()
    .patterns.keeping(
        {
            "learnt-1": LEARNT,
            "shared-rack-hot": FaultPattern("shared-rack-hot", "rack hot", origin="shared"),
            "overheating": FaultPattern(
                "overheating",
                "overheating",
                origin="shipped",
                state=PatternState.CONFIRMED,
                said_by="ada",
                said_at_s=NOW_S - 5000,
                past=Past(3, {"moved": 2, "reset": 1}, (60.0, 600.0, 660.0)),
            ),
        }
    )
    .patterns
)
TOKEN = "a-token-of-the-tests-only"
SECRET = "whsec_c2VjcmV0c2VjcmV0c2VjcmV0"
AUTH = {"authorization": f"Bearer {TOKEN}"}

GPUS = tuple(Gpu(f"GPU-{n}-{i}", f"node-{n}", i, "H100") for n in range(2) for i in range(2))
EVIDENCE = Evidence("density", "temp_c", "12 C above its normal", 84.0, 72.0, "C", 1.4)
INCIDENT = Incident(
    id="inc-1",
    subject=Subject(SubjectKind.GPU, "GPU-0-1"),
    phase=IncidentPhase.CONFIRMED,
    opened_at_s=NOW_S - 300,
    since_s=NOW_S - 100,
    held_s=200.0,
    last_tick_s=NOW_S,
    kind=Kind.DEVIANT,
    severity=Severity.CRITICAL,
    pattern="overheating",
    score=1.62,
    evidence=(EVIDENCE,),
    signature={"temp": 1.0},
    like="overheating",
    distance=0.12,
    gpu_uuid="GPU-0-1",
    node="node-0",
    model="H100",
    workload=Workload("job", "train-7", "red"),
    confirmed_at_s=NOW_S - 100,
)
RESOLVED = replace(
    INCIDENT,
    id="inc-0",
    phase=IncidentPhase.RESOLVED,
    opened_at_s=NOW_S - 9000,
    resolved_at_s=NOW_S - 8000,
    node="node-1",
    gpu_uuid="GPU-1-0",
)
MOVE = Migration(
    operation_id="op-1",
    incident_id="inc-1",
    operation=Operation.MOVE,
    node="node-0",
    gpu_uuids=("GPU-0-1",),
    phase=MigrationPhase.RUNNING,
    attempt=1,
    planned_at_s=NOW_S - 90,
    since_s=NOW_S - 60,
    deadline_s=NOW_S + 800,
    evidence_at_s=NOW_S - 90,
    workload=Workload("job", "train-7", "red"),
    backups=(Backup("node-1", ("GPU-1-0", "GPU-1-1")),),
)
DONE = replace(MOVE, operation_id="op-0", phase=MigrationPhase.DONE, operation=Operation.FENCE)
PEAKS = {
    "inc-1": Peak("inc-1", 1.62, NOW_S - 100, NOW_S, ("GPU-0-1",), True, Severity.CRITICAL),
    "inc-2": Peak("inc-2", 1.1, NOW_S - 9000, NOW_S - 8000, ("GPU-1-0",), False, Severity.INFO),
}
CALIBRATION = Calibration(20.0, True, why="", gpus=4, certify_gpu_days=14.0)
CONTROL = Control(
    peaks=PEAKS,
    incidents={i.id: i for i in (INCIDENT, RESOLVED)},
    migrations={m.operation_id: m for m in (MOVE, DONE)},
    quarantine={"node-9": Quarantine("node-9", "inc-old", NOW_S - 5000)},
    last_tick_s=NOW_S,
)
VERDICT = Verdict(GPUS[1], Kind.DEVIANT, Severity.CRITICAL, "novel", 1.62, (EVIDENCE,))
JUDGEMENT = Judgement(
    np.array([domain.NORMAL, domain.DEVIANT, domain.NORMAL, domain.UNKNOWN], dtype=np.int8),
    np.array([0.4, 1.62, 0.7, np.nan]),
    (VERDICT,),
)
FRAME = Frame(
    at_s=NOW_S,
    gpus=GPUS,
    metrics=("temp_c", "power_w"),
    values=np.array([[60, 300], [84, 310], [61, 305], [np.nan, np.nan]], dtype=np.float64),
    age_s=np.array([[3, 3], [3, 3], [4, 4], [np.inf, np.inf]]),
    presence=np.array([0, 0, 0, Presence.HOST_SILENT], dtype=np.int8),
    workloads=(None, Workload("job", "train-7", "red"), Workload("job", "train-7", "red"), None),
    coverage=Coverage(4, 3),
    last_seen_s=np.array([NOW_S - 3, NOW_S - 3, NOW_S - 4, NOW_S - 90]),
)
DECISION = Decision(NOW_S - 90, "inc-1", Choice.MOVE, Choice.MOVE, True, "", "nothing objects")


class Face:
    """What the daemon gives the API, without the daemon."""

    def __init__(self, store: Store) -> None:
        self.journal = store
        self.now: Snapshot | None = moment()
        self.reloads = 0

    def snapshot(self) -> Snapshot | None:
        return self.now

    def command(
        self, kind: CommandKind, target: str, actor: str, reason: str, value: str = ""
    ) -> Command:
        return self.journal.add_command(kind, target, actor, reason, at_s=NOW_S, value=value)

    def outcome(self, outcome: Outcome) -> Outcome:
        return self.journal.add_outcome(outcome)

    def reload(self) -> None:
        self.reloads += 1


def moment(**changes: object) -> Snapshot:
    made = Snapshot(
        at_s=NOW_S,
        version="0.1.0",
        mode=Mode.ACT,
        cluster="test",
        patterns=PATTERNS,
        control=CONTROL,
        frame=FRAME,
        judgement=JUDGEMENT,
        bundle_id="b-1",
        bundle_learnt_to_s=NOW_S - 600,
        tick=TickStats().finished(NOW_S - 15, 0.2).failed("x").finished(NOW_S, 0.03),
        alertmanagers={"http://127.0.0.1:9093": (True, "ok"), "http://b:9093": (False, "refused")},
        rejected={"future": 2},
        calibration=CALIBRATION,
        limits=thresholds(PEAKS, CALIBRATION, Budget(), NOW_S),
    )
    return replace(made, **changes)  # type: ignore[arg-type]
