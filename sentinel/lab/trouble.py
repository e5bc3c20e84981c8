"""How each fault and each harmless surprise begins in a simulated fleet, and how it ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from sentinel.core.domain import Bools, Ints
from sentinel.lab import workload
from sentinel.lab.courses import COURSES, STATES
from sentinel.lab.faults import APPLICATION, BENIGN, FLEET, KINDS, NODE, RACK, STOPPING
from sentinel.lab.site import RACK_HOSTS

if TYPE_CHECKING:
    from sentinel.lab.fleet import Fleet

_CRASH_AFTER_S: Final = 2.0
_APPLICATION_RESTART_S: Final = 20.0
_HANG_TIMEOUT_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class Fault:
    kind: str
    uuid: str
    since_s: float


class Trouble:
    """What is the matter with a fleet, and the orders that change it."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        n, hosts = len(fleet.gpus), len(fleet.hosts)
        self.faults: dict[tuple[str, str], Fault] = {}
        self.silent = np.zeros(n, bool)  # only the Xid is exported any more
        self.gone = np.zeros(n, bool)
        self.down = np.zeros(hosts, bool)  # the exporter does not answer
        self.unknown = np.zeros(hosts, bool)  # Prometheus does not know it yet

    def scope(self, kind: str, row: int) -> Ints:
        """The rows that a fault of this kind befalls when it is given to this row."""
        host_of = self.fleet.series.host_of
        if kind in RACK:
            return np.flatnonzero(host_of // RACK_HOSTS == host_of[row] // RACK_HOSTS)
        if kind in NODE:
            return np.flatnonzero(host_of == host_of[row])
        if kind in FLEET:
            return np.arange(len(host_of))
        return np.array([row])

    def start(self, kind: str, uuid: str) -> None:
        """Raises KeyError on an unknown kind or GPU."""
        if kind not in KINDS:
            raise KeyError(f"no fault {kind!r}; there are {', '.join(KINDS)}")
        fleet = self.fleet
        row = fleet.row(uuid)
        self.faults[(kind, uuid)] = Fault(kind, uuid, fleet.at_s)
        if kind in APPLICATION:
            fleet.hardware.xid[row] = int(kind.removeprefix("xid-"))
            if kind != "xid-45":
                self.crash(fleet.workload.job_of[row], row, restart=True)
        elif kind in STATES:
            STATES[kind](fleet, self.scope(kind, row))
        else:
            COURSES[kind](self, row, uuid)

    def end(self, uuid: str) -> None:
        """All that was given to this GPU is over; hardware is as after a repair and a reset."""
        fleet = self.fleet
        row = fleet.row(uuid)
        kinds = [kind for kind, of in self.faults if of == uuid]
        for kind in kinds:
            del self.faults[(kind, uuid)]
            self._undo(kind, row)
        if not kinds or any(kind not in BENIGN for kind in kinds):
            for kind in kinds or [""]:
                rows = self.scope(kind, row)
                fleet.hardware.reset(rows)
                fleet.workload.calm(rows)
                self.silent[rows] = self.gone[rows] = False
        job_id = fleet.workload.job_of[row]
        if job_id is None:
            return
        job = fleet.workload.jobs[job_id]
        if job.state != workload.RUNNING and not self.stopped()[job.rows].any():
            fleet.start_again(job_id)

    def _undo(self, kind: str, row: int) -> None:
        fleet = self.fleet
        rows, job_id = self.scope(kind, row), fleet.workload.job_of[row]
        if kind == "driver-shift":
            fleet.hardware.work_factor[:] = 1.0
        elif kind == "idle-night":
            fleet.workload.quiet = False
        elif kind in ("heat-wave", "hot-aisle"):
            fleet.hardware.air_goal_c[rows] = 0.0
        elif kind == "power-cap":
            fleet.hardware.power_limit_w /= 0.85
        elif kind == "burn-in":
            for mine in {fleet.workload.job_of[r] for r in rows.tolist()} - {None}:
                if mine is not None and mine.startswith("burn-in"):
                    fleet.unassign(mine)
        elif kind in ("new-workload", "evaluation", "memory-hungry") and job_id is not None:
            fleet.workload.set_character(job_id, job_id)
        elif kind in ("pipeline", "idle-rank", "skew", "locked-clocks") and job_id is not None:
            mates = fleet.workload.jobs[job_id].rows
            fleet.workload.calm(mates)
            fleet.hardware.locked_mhz[mates] = np.inf
        elif kind == "single-bits":
            fleet.hardware.sbe_per_s[rows] = 0.0

    def stopped(self) -> Bools:
        """bool [gpus]: where no job can run."""
        stopped = self.down[self.fleet.series.host_of] & self._rebooting()
        for kind, uuid in self.faults:
            stopped[self.fleet.row(uuid)] |= kind in STOPPING
        return stopped

    def _rebooting(self) -> Bools:
        rows = np.zeros(len(self.fleet.gpus), bool)
        for kind, uuid in self.faults:
            if kind == "maintenance":
                rows[self.scope(kind, self.fleet.row(uuid))] = True
        return rows

    def later(self, fault: tuple[str, str], delay_s: float, event: Callable[[], None]) -> None:
        """Does it then, if the fault still is."""
        given = self.faults[fault]
        self.fleet.after(delay_s, lambda: event() if self.faults.get(fault) is given else None)

    # --- what befalls jobs ----------------------------------------------------------------

    def crash(self, job_id: str | None, row: int, *, restart: bool = False) -> None:
        """All of the job's processes end soon, and its other GPUs report the teardown."""
        if job_id is None:
            return
        fleet, job = self.fleet, self.fleet.workload.jobs[job_id]
        incarnation = job.incarnation

        def fall() -> None:
            if self._is_current(job_id, incarnation):
                fleet.workload.set_state(job_id, workload.DOWN, fleet.at_s)
                mates = job.rows[job.rows != row]
                xid = fleet.hardware.xid
                xid[mates] = np.where(xid[mates] == 0, 45, xid[mates])
                if restart:
                    fleet.after(_APPLICATION_RESTART_S, rise)

        def rise() -> None:
            if self._is_current(job_id, incarnation) and not self.stopped()[job.rows].any():
                fleet.start_again(job_id)

        fleet.after(_CRASH_AFTER_S, fall)

    def hang(self, job_id: str | None) -> None:
        """The other ranks wait in a collective until their own timeout ends them."""
        if job_id is None:
            return
        fleet, job = self.fleet, self.fleet.workload.jobs[job_id]
        hangs = job.kind == workload.TRAINING and len(job.rows) > 1
        fleet.workload.set_state(job_id, workload.HUNG if hangs else workload.DOWN, fleet.at_s)
        incarnation = job.incarnation

        def give_up() -> None:
            if self._is_current(job_id, incarnation):
                fleet.workload.set_state(job_id, workload.DOWN, fleet.at_s)

        fleet.after(_HANG_TIMEOUT_S, give_up)

    def _is_current(self, job_id: str, incarnation: int) -> bool:
        job = self.fleet.workload.jobs.get(job_id)
        return job is not None and job.incarnation == incarnation
