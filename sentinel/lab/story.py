"""The story that the demonstration tells, followed over HTTP alone.

Each step is something that one of the programs says of itself, with its own time: the daemon
of its incidents and migrations, the scheduler of its calls, the receiver of its alerts. A step
that nobody can prove is missing, whatever the others say.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from sentinel.lab.stage import Stage

Row = dict[str, Any]

INJECTED: Final = "fault injected"
DEVIATES: Final = "first deviating sample"
INCIDENT: Final = "incident confirmed"
ALERTED: Final = "alert received"
FENCED: Final = "node fenced"
HOOKED: Final = "hook called"
CALLED_BACK: Final = "callback received"
MOVED: Final = "migration done"
REPAIRED: Final = "GPU repaired"
RESOLVED: Final = "alert resolved"
SCRAPED: Final = "Xid scraped"
UNMOVED: Final = "nothing moved"

APPLICATION_WATCH_S: Final = 30.0
_NO_ENDS_YET: Final = "0001-01-01T00:00:00Z"


class Moment(NamedTuple):
    at_s: float
    detail: str


@dataclass(frozen=True)
class Target:
    """The GPU that the fault is given to, and the work it does at that moment."""

    uuid: str
    host: str
    index: int
    model: str
    job: str
    nodes: tuple[str, ...]


@dataclass
class View:
    """What all programs say at one moment."""

    incidents: list[Row] = field(default_factory=list)
    migrations: list[Row] = field(default_factory=list)
    alerts: list[Row] = field(default_factory=list)
    calls: list[Row] = field(default_factory=list)
    operations: list[Row] = field(default_factory=list)
    callbacks: list[Row] = field(default_factory=list)
    jobs: list[Row] = field(default_factory=list)


def look(stage: Stage) -> View:
    log = stage.get("scheduler", "operations")
    return View(
        incidents=stage.get("daemon", "api/v1/incidents?state=all")["incidents"],
        migrations=stage.get("daemon", "api/v1/migrations?state=all")["migrations"],
        alerts=stage.get("receiver", "alerts"),
        calls=log["calls"],
        operations=log["operations"],
        callbacks=log["callbacks"],
        jobs=stage.get("scheduler", "jobs"),
    )


class Story:
    """One fault from its injection to its last consequence. `poll` asks everybody once."""

    def __init__(self, stage: Stage, fault: str, target: Target) -> None:
        self.stage = stage
        self.fault = fault
        self.target = target
        self.moments: dict[str, Moment] = {}
        self.view = View()
        self.wrong: list[str] = []  # what must not happen, and did
        self._application = fault.startswith("xid-")

    @property
    def steps(self) -> tuple[str, ...]:
        if self._application:
            return (INJECTED, SCRAPED, UNMOVED)
        return (INJECTED, *_WITNESSED, REPAIRED, RESOLVED)

    @property
    def missing(self) -> list[str]:
        return [step for step in self.steps if step not in self.moments]

    @property
    def done(self) -> bool:
        return not self.missing or bool(self.wrong)

    def begin(self) -> None:
        target = self.target
        self.stage.post("exporter", "faults", {"kind": self.fault, "uuid": target.uuid})
        detail = f"{self.fault} on {target.host} GPU {target.index} ({target.uuid})"
        self.moments[INJECTED] = Moment(time.time(), detail)

    def poll(self) -> None:
        self.view = look(self.stage)
        if self._application:
            self._poll_application()
            return
        for operation in self.view.operations:
            if operation["node"] != self.target.host:
                self.wrong.append(f"the daemon asked for {operation['action']} on a healthy node")
        for step, witness in _WITNESSED.items():
            if step not in self.moments and (moment := witness(self)):
                self.moments[step] = moment
        if REPAIRED not in self.moments and not set(_WITNESSED) - set(self.moments):
            self.stage.post("exporter", "repair", {"uuid": self.target.uuid})
            self.moments[REPAIRED] = Moment(time.time(), f"{self.target.host} serviced")
        elif REPAIRED in self.moments and (moment := self._all_resolved()):
            self.moments.setdefault(RESOLVED, moment)

    def timeline(self) -> list[Row]:
        """The moments so far, in order of time."""
        start_s = self.moments[INJECTED].at_s if INJECTED in self.moments else 0.0
        ordered = sorted(self.moments.items(), key=lambda item: item[1].at_s)
        return [
            {
                "step": step,
                "at": datetime.fromtimestamp(moment.at_s, UTC).isoformat(timespec="milliseconds"),
                "seconds_after_fault": round(moment.at_s - start_s, 3),
                "detail": moment.detail,
            }
            for step, moment in ordered
        ]

    def incident(self) -> Row | None:
        """The daemon's incident of this GPU since the fault, if it has one."""
        start_s = self.moments[INJECTED].at_s
        for row in self.view.incidents:
            ours = row["gpu_uuid"] == self.target.uuid
            if ours and (parse(row["opened_at"]) or 0.0) > start_s - 1.0:
                return row
        return None

    def alerts(self) -> list[Row]:
        return [a for a in self.view.alerts if a["labels"].get("gpu_uuid") == self.target.uuid]

    def migration(self, operation: str) -> Row | None:
        """The newest migration of this incident that asks for `operation`."""
        incident = self.incident()
        if incident is None:
            return None
        wanted = (incident["id"], operation)
        found = (m for m in self.view.migrations if (m["incident_id"], m["operation"]) == wanted)
        return next(found, None)

    def operation(self, action: str) -> Row | None:
        """The scheduler's own record of what was asked of it."""
        migration = self.migration(action)
        for row in self.view.operations:
            if migration and row["operation_id"] == migration["operation_id"]:
                return row
        return None

    def job(self) -> Row | None:
        return next((job for job in self.view.jobs if job["job"] == self.target.job), None)

    def _all_resolved(self) -> Moment | None:
        """The incident is over, and after that every alert of this GPU was told as resolved.
        An alert that only changed its severity is told as resolved too: that is not the end."""
        incident = self.incident()
        over_s = parse(incident["resolved_at"]) if incident else None
        if over_s is None:
            return None
        last = {alert["fingerprint"]: alert for alert in self.alerts()}
        if not last or any(alert["status"] != "resolved" for alert in last.values()):
            return None
        at_s = max(alert["received_at_s"] for alert in last.values())
        if at_s < over_s:
            return None
        names = sorted({alert["labels"]["alertname"] for alert in last.values()})
        return Moment(at_s, f"Alertmanager says resolved: {', '.join(names)}")

    def _poll_application(self) -> None:
        if self.view.calls or self.view.migrations:
            self.wrong.append("an application error made the daemon act")
            return
        if SCRAPED not in self.moments:
            code = self.fault.removeprefix("xid-")
            query = f'DCGM_FI_DEV_XID_ERRORS{{UUID="{self.target.uuid}"}} == {code}'
            answer = self.stage.get("prometheus", f"api/v1/query?query={query}")
            for series in answer["data"]["result"]:
                self.moments[SCRAPED] = Moment(series["value"][0], f"Xid {code} in Prometheus")
        elif time.time() - self.moments[SCRAPED].at_s > APPLICATION_WATCH_S:
            told = len({alert["fingerprint"] for alert in self.view.alerts})
            detail = f"no call to the scheduler in {APPLICATION_WATCH_S:.0f} s, {told} alerts"
            self.moments[UNMOVED] = Moment(time.time(), detail)


def parse(text: str | None) -> float | None:
    return datetime.fromisoformat(text).timestamp() if text else None


def _deviates(story: Story) -> Moment | None:
    incident = story.incident()
    if incident is None:
        return None
    times = [parse(item.get("at")) for item in incident["evidence"]]
    known = [at_s for at_s in (*times, parse(incident["opened_at"])) if at_s]
    texts = [item["text"] for item in incident["evidence"]]
    return Moment(min(known), texts[0] if texts else incident["pattern"])


def _confirmed(story: Story) -> Moment | None:
    incident = story.incident()
    at_s = parse(incident["confirmed_at"]) if incident else None
    if incident is None or at_s is None:
        return None
    return Moment(at_s, f"{incident['kind']}, {incident['severity']}: {incident['pattern']}")


def _alerted(story: Story) -> Moment | None:
    for alert in story.alerts():
        if alert["status"] == "firing":
            text = alert["annotations"].get("summary", "")
            return Moment(alert["received_at_s"], f"{alert['labels']['alertname']}: {text}")
    return None


def _fenced(story: Story) -> Moment | None:
    fence = story.operation("fence")
    if fence is None or fence["state"] != "finished" or fence["started"] != 1:
        return None
    return Moment(fence["finished_at_s"], f"{fence['node']} takes no new work")


def _hooked(story: Story) -> Moment | None:
    move = story.operation("move")
    if move is None:
        return None
    return Moment(move["received_at_s"], f"{move['operation_id']}: move {move['job']}")


def _called_back(story: Story) -> Moment | None:
    move = story.operation("move")
    for call in story.view.callbacks:
        ours = move is not None and call["operation_id"] == move["operation_id"]
        if ours and call["state"] == "finished" and 200 <= call["status"] < 300:
            return Moment(call["at_s"], f"{call['operation_id']}: {call['state']}")
    return None


def _moved(story: Story) -> Moment | None:
    """Done for the daemon, and true: the job runs, started once, away from the faulty host."""
    migration, operation, job = story.migration("move"), story.operation("move"), story.job()
    if migration is None or operation is None or job is None or migration["phase"] != "done":
        return None
    runs = {row["job"]: row for row in story.stage.get("exporter", "state")["jobs"]}.get(job["job"])
    true = runs is not None and runs["state"] == "running" and runs["uuids"] == job["uuids"]
    if not true or story.target.host in job["nodes"] or operation["started"] != 1:
        story.wrong.append(f"the daemon says done, and the fleet says {runs}")
        return None
    where = ", ".join(job["nodes"])
    return Moment(parse(migration["since"]) or 0.0, f"{job['job']} runs on {where}")


_WITNESSED: Final[dict[str, Callable[[Story], Moment | None]]] = {
    DEVIATES: _deviates,
    INCIDENT: _confirmed,
    ALERTED: _alerted,
    FENCED: _fenced,
    HOOKED: _hooked,
    CALLED_BACK: _called_back,
    MOVED: _moved,
}
