"""Who plays what and when: faults and harmless surprises over the hours of a simulated fleet.

Times and kinds are fixed by the seed before the run; on whom each falls is chosen when it
begins, since jobs move. Everything that was done is kept as `truths`.
"""

from dataclasses import asdict, dataclass

import numpy as np

from sentinel.lab import faults
from sentinel.lab.site import RACK_HOSTS
from sentinel.lab.workload import INFERENCE, TRAINING

LASTS_S = 1800.0
SLOW_LASTS_S = 4500.0
TRAP_LASTS_S = 2700.0
FLEET_TRAP_LASTS_S = 5400.0
HEAT_WAVE_LASTS_S = 3 * 3600.0
AGAIN_S = 420.0  # where nobody is free
REST_S = 2700.0  # a host that had its share is left alone for so long
# Begins and is over by itself.
COURSES = frozenset(
    {"maintenance", "exporter-restart", "exporter-upgrade", "lost-host", "new-model"}
    | {"job-end", "job-churn", "job-resize", "job-move", "crash-loop", "sticky-xid"}
)
NEEDS_GANG = frozenset({"slow-10", "slow-hidden", "hang", "nvlink-errors", "pipeline", "idle-rank"})
NEEDS_NVLINK = frozenset({"nvlink-errors", "nvlink-xid"})


@dataclass(slots=True)
class Truth:
    """What was done, to whom. `uuids` and `nodes` are what it befell; `job` ran there."""

    kind: str
    at_s: float
    end_s: float
    uuids: list[str]
    nodes: list[str]
    job: str | None
    mates: list[str]
    rack: str | None
    model: str

    plain = asdict

    @property
    def harmless(self):
        return self.kind not in faults.HARDWARE


def lasts_s(kind):
    if kind in faults.HARDWARE:
        return SLOW_LASTS_S if kind in faults.SLOW else LASTS_S
    if kind == "heat-wave":
        return HEAT_WAVE_LASTS_S
    if kind in faults.FLEET:
        return FLEET_TRAP_LASTS_S
    return LASTS_S if kind in faults.APPLICATION or kind in COURSES else TRAP_LASTS_S


class Director:
    """Plans `kinds`, evenly in a shuffled order over (start_s, end_s], for a LabHistory.

    What finds nobody free is tried again; what would not be over by `end_s` is left out.
    """

    def __init__(self, fleet, seed, kinds, start_s, end_s, *, jitter=0.6):
        self.truths, self.unplayed = [], []
        self._fleet = fleet
        self._rng = np.random.default_rng([seed, 0xD1])
        self._busy_until_s = dict.fromkeys(fleet.hosts, 0.0)
        self._fleet_until_s, self._until_s = 0.0, end_s
        self.events = []
        order = [kinds[i] for i in self._rng.permutation(len(kinds))]
        # those that last longest first, so that they fit in
        order.sort(key=lambda kind: lasts_s(kind) > 4000, reverse=True)
        for place, kind in enumerate(order):
            room_s = max(end_s - start_s - lasts_s(kind) - 300.0, 0.0)
            share = (place + jitter * self._rng.random()) / max(len(order), 1)
            at_s = float(np.round(start_s + min(share * (end_s - start_s), room_s), 1))
            self.events.append((at_s, self._begin, kind, at_s + lasts_s(kind)))

    def _begin(self, fleet, kind, end_s):
        if kind in faults.FLEET:  # one at a time: what happens shall have one cause
            if fleet.at_s < self._fleet_until_s:
                again_s = self._fleet_until_s + 60.0
                return ((again_s, self._begin, kind, again_s + lasts_s(kind)),)
            self._fleet_until_s = end_s + 1200.0
        row = self._choose(kind, fleet.at_s)
        if row is None:
            again_s = fleet.at_s + AGAIN_S
            if again_s + lasts_s(kind) <= self._until_s:
                return ((again_s, self._begin, kind, again_s + lasts_s(kind)),)
            self.unplayed.append((kind, fleet.at_s))
            return ()
        rows = fleet.trouble.scope(kind, row)
        job_id = fleet.workload.job_of[row]
        of_job = fleet.workload.jobs[job_id].rows.tolist() if job_id else [row]
        nodes = sorted({fleet.gpus[r].node for r in rows.tolist()})
        touched = {fleet.gpus[r].node for r in of_job} | set(nodes)
        if kind not in faults.FLEET:
            for node in touched:
                self._busy_until_s[node] = end_s + REST_S
        uuid = fleet.gpus[row].uuid
        rack = int(fleet.series.host_of[row]) // RACK_HOSTS
        truth = Truth(
            kind,
            fleet.at_s,
            end_s,
            [fleet.gpus[r].uuid for r in rows.tolist()],
            nodes,
            job_id,
            [fleet.gpus[r].uuid for r in of_job if r != row],
            f"r{rack:02d}",
            fleet.gpus[row].model,
        )
        self.truths.append(truth)
        fleet.inject(kind, uuid)
        if kind in COURSES:
            return ()
        return ((end_s, self._end, uuid),)

    @staticmethod
    def _end(fleet, uuid):
        fleet.repair(uuid)
        return ()

    def _choose(self, kind, at_s):
        """A row that this can happen to, on a host where nothing else happens."""
        fleet = self._fleet
        work, host_of = fleet.workload, fleet.series.host_of
        free = np.array([self._busy_until_s[host] <= at_s for host in fleet.hosts])
        whole = np.array([not work.job_of[r] or self._all_free(work.job_of[r], free) for r in
                          range(len(fleet.gpus))])  # fmt: skip
        may = whole & free[host_of] & fleet.reporting() & ~fleet.series.sliced
        running = np.array([work.job_of[r] is not None and work.jobs[work.job_of[r]].state == 0
                            for r in range(len(fleet.gpus))])  # fmt: skip
        may &= ~running if kind == "burn-in" else running
        if kind in NEEDS_GANG or (kind == "psu" or kind in ("fan-tray", "hot-aisle")):
            may &= np.array([self._gang(r) for r in range(len(fleet.gpus))])
        if kind == "skew":  # of requests: the ranks of a training job share alike
            may &= np.array([self._serves(r) for r in range(len(fleet.gpus))])
        if kind in NEEDS_NVLINK:
            may &= fleet.hardware.has_nvlink
        if kind == "hbm-hot":
            may &= fleet.hardware.has_mem_temp
        if kind == "hot-aisle":
            racks = host_of // RACK_HOSTS
            crowded = [bool(free[np.unique(host_of[racks == rack])].all()) for rack in racks]
            may &= np.array(crowded)
        if kind in faults.FLEET:
            may |= running & fleet.reporting()
        rows = np.flatnonzero(may)
        return int(rows[self._rng.integers(len(rows))]) if len(rows) else None

    def _all_free(self, job_id, free):
        return bool(free[self._fleet.series.host_of[self._fleet.workload.jobs[job_id].rows]].all())

    def _serves(self, row):
        job_id = self._fleet.workload.job_of[row]
        return job_id is not None and self._fleet.workload.jobs[job_id].kind == INFERENCE

    def _gang(self, row):
        job_id = self._fleet.workload.job_of[row]
        if job_id is None:
            return False
        job = self._fleet.workload.jobs[job_id]
        return job.kind == TRAINING and len(job.rows) >= 4
