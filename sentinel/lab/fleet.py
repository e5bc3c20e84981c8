"""A simulated GPU fleet: hosts, jobs, faults, and what its exporters would say.

Deterministic in simulated time: the same seed and the same calls at the same simulated
moments give the same samples, to the bit. It knows no clock, and nothing of whoever watches.
"""

from __future__ import annotations

import heapq
import itertools
import math
import uuid as uuids_
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from sentinel.core.domain import Bools, Floats, Gpu, Ints
from sentinel.lab import layout, workload
from sentinel.lab.catalogue import FAMILIES, Exported
from sentinel.lab.faults import APPLICATION, KINDS, STOPPING
from sentinel.lab.hardware import MODELS, Hardware, Model

SCRAPE_JOB: Final = "dcgm-exporter"
DRIVER: Final = "550.90.07"
_STEP_S: Final = 1.0
_CRASH_AFTER_S: Final = 2.0
_APPLICATION_RESTART_S: Final = 20.0
_HANG_TIMEOUT_S: Final = 600.0
_BUS_IDS: Final = (0x1B, 0x43, 0x52, 0x61, 0x9D, 0xC3, 0xD1, 0xDF)


class Family(NamedTuple):
    """One metric of the fleet: `labels[i]` belongs to `values[i]`."""

    name: str
    labels: list[dict[str, str]]
    values: Floats


class Block(NamedTuple):
    """A stretch of history, ready for remote write: values float64 [series, times], NaN = no
    sample. Consecutive blocks share the `labels` object while nothing changed."""

    labels: list[dict[str, str]]
    times_s: Floats
    values: Floats


@dataclass(frozen=True, slots=True)
class Fault:
    kind: str
    uuid: str
    since_s: float


class Fleet:
    """`advance` moves it in whole seconds from `start_s`; everything else happens "now".

    `hosts` are named gpu-00, gpu-01, ...; the first half are H100, then A100, then L40S. The
    last host of each model is a spare (two of them where a model has eight) and stays idle.
    """

    def __init__(
        self,
        seed: int,
        hosts: int = 16,
        gpus_per_host: int = 8,
        *,
        start_s: float = 0.0,
        load_s: float = 45.0,
        xid_visible_s: float = 3.0,
        default_jobs: bool = True,
    ) -> None:
        if hosts < 1 or not 1 <= gpus_per_host <= 16:
            raise ValueError("a fleet has at least one host, of one to 16 GPUs each")
        self.seed, self.at_s = seed, float(start_s)
        self._options = {"load_s": load_s, "xid_visible_s": xid_visible_s}
        self._xid_visible_s = xid_visible_s
        names = layout.model_names(hosts)
        self.hosts = tuple(f"gpu-{i:02d}" for i in range(hosts))
        self.spare_hosts = tuple(self.hosts[i] for i in layout.spares(names))
        ids = np.random.default_rng([seed, 0x1D])
        self.gpus = tuple(
            Gpu(f"GPU-{uuids_.UUID(bytes=ids.bytes(16), version=4)}", host, slot, MODELS[name].name)
            for host, name in zip(self.hosts, names, strict=True)
            for slot in range(gpus_per_host)
        )
        self._row = {gpu.uuid: row for row, gpu in enumerate(self.gpus)}
        n = len(self.gpus)
        host_of = [row // gpus_per_host for row in range(n)]
        models: list[Model] = [MODELS[names[h]] for h in host_of]
        self.hardware = Hardware(seed, models, host_of, [r % gpus_per_host for r in range(n)])
        self.workload = workload.Workload(seed, n, load_s)
        self.faults: dict[tuple[str, str], Fault] = {}
        self._silent = np.zeros(n, bool)  # only the Xid is exported any more
        self._gone = np.zeros(n, bool)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._ticks = 0
        self._labels: list[dict[str, str]] | None = None
        if default_jobs:
            for job in layout.default_jobs(names, gpus_per_host):
                self._assign_running(job.id, job.kind, range(*job.span))
        self._settle()

    # --- time -----------------------------------------------------------------------------

    def advance(self, to_s: float, step_s: float = _STEP_S) -> None:
        """Moves on in whole steps, to the last one at or before `to_s`. Never goes back."""
        steps = math.floor((to_s - self.at_s) / step_s + 1e-9)
        for _ in range(steps):
            self._tick(step_s)

    def _tick(self, dt: float) -> None:
        self.at_s += dt
        self._ticks += 1
        while self._due and self._due[0][0] <= self.at_s:
            heapq.heappop(self._due)[2]()
        rng = np.random.Generator(np.random.Philox(key=[self.seed, self._ticks]))
        demand = self.workload.advance(self.at_s, dt, self.hardware.speed, rng)
        self.hardware.step(demand, self.at_s, dt, rng)

    def _after(self, delay_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.at_s + delay_s, next(self._order), event))

    # --- jobs -----------------------------------------------------------------------------

    def assign(
        self, job_id: str, uuids: Sequence[str], kind: str = "", started_s: float | None = None
    ) -> None:
        """Runs the job on these GPUs, from its last checkpoint if it ran before.

        `kind` is training or inference; a new job without one is what its name says. On a GPU
        that cannot run it stays crashed. Raises KeyError for an unknown GPU, ValueError when
        one is taken or given twice.
        """
        rows = np.array([self.row(uuid) for uuid in uuids], np.int64)
        if not len(rows) or len(set(rows.tolist())) != len(rows):
            raise ValueError(f"job {job_id}: GPUs are given once each, and at least one")
        for row in rows.tolist():
            if self.workload.job_of[row] not in (None, job_id):
                holder = self.workload.job_of[row]
                raise ValueError(f"job {job_id}: {self.gpus[row].uuid} runs job {holder}")
        known = self.workload.jobs.get(job_id)
        code = {name: number for number, name in workload.KIND_NAMES.items()}.get(kind)
        if code is None:
            if kind:
                raise ValueError(f"job {job_id}: unknown kind {kind!r}")
            code = known.kind if known else workload.kind_of(job_id)
        start = self.at_s if started_s is None else started_s
        job = self.workload.assign(job_id, code, rows, start)
        self._labels = None
        if self._stopped()[job.rows].any():
            self.workload.set_state(job_id, workload.DOWN, self.at_s)

    def unassign(self, job_id: str) -> None:
        """Raises KeyError where there is no such job."""
        self.workload.unassign(job_id)
        self._labels = None

    def row(self, uuid: str) -> int:
        if uuid not in self._row:
            raise KeyError(f"no GPU {uuid} in this fleet")
        return self._row[uuid]

    def _assign_running(self, job_id: str, kind: str, rows: Iterable[int]) -> None:
        """As if it had been started some while ago."""
        uuids = [self.gpus[row].uuid for row in rows]
        age = np.random.default_rng([self.seed, self.row(uuids[0]), 7]).uniform(300, 9000)
        self.assign(job_id, uuids, kind, self.at_s - float(age))

    def _settle(self) -> None:
        rng = np.random.default_rng([self.seed, 0x5E])
        demand = self.workload.advance(self.at_s, 60.0, self.hardware.speed, rng)
        self.hardware.settle(demand, self.at_s)

    # --- faults ---------------------------------------------------------------------------

    def inject(self, kind: str, uuid: str) -> None:
        """Starts a fault of `faults.KINDS`. Raises KeyError on an unknown kind or GPU."""
        if kind not in KINDS:
            raise KeyError(f"no fault {kind!r}; there are {', '.join(KINDS)}")
        row = self.row(uuid)
        self.faults[(kind, uuid)] = Fault(kind, uuid, self.at_s)
        hardware, job_id = self.hardware, self.workload.job_of[row]
        if kind == "off-the-bus":
            hardware.xid[row] = 79
            self._silent[row] = True
            self._after(self._xid_visible_s, lambda: self._end(kind, uuid, self._gone))
            self._crash(job_id, row)
        elif kind == "vanished":
            self._gone[row] = True
            self._hang(job_id)
        elif kind == "ecc":
            hardware.uncorrectable_error(row)
            hardware.xid[row] = 48
            self._after(self._xid_visible_s, lambda: self._remap(uuid))
            self._crash(job_id, row)
        elif kind == "thermal":
            hardware.lose_cooling(row)
        elif kind == "clock":
            hardware.clock_factor[row] = 0.8
        elif kind in APPLICATION:
            hardware.xid[row] = int(kind.removeprefix("xid-"))
            if kind != "xid-45":
                self._crash(job_id, row, restart=True)
        elif kind == "driver-shift":
            hardware.work_factor[:] = 1.06
        elif kind == "new-workload" and job_id is not None:
            self.workload.set_character(job_id, f"{job_id} {kind} {self.at_s}")
        elif kind == "idle-night":
            self.workload.quiet = True

    def repair(self, uuid: str) -> None:
        """The GPU is healthy and freshly reset; a job that still waits on it starts again."""
        row = self.row(uuid)
        kinds = [kind for kind, of in self.faults if of == uuid]
        for kind in kinds:
            del self.faults[(kind, uuid)]
        self.hardware.reset(row)
        self._silent[row] = self._gone[row] = False
        if "driver-shift" in kinds:
            self.hardware.work_factor[:] = 1.0
        if "idle-night" in kinds:
            self.workload.quiet = False
        job_id = self.workload.job_of[row]
        if job_id is None:
            return
        job = self.workload.jobs[job_id]
        if "new-workload" in kinds:
            self.workload.set_character(job_id, job_id)
        if job.state != workload.RUNNING and not self._stopped()[job.rows].any():
            self.workload.set_state(job_id, workload.RUNNING, self.at_s)

    def _stopped(self) -> Bools:
        stopped = np.zeros(len(self.gpus), bool)
        for kind, uuid in self.faults:
            stopped[self.row(uuid)] |= kind in STOPPING
        return stopped

    def _end(self, kind: str, uuid: str, series: Bools) -> None:
        if (kind, uuid) in self.faults:
            series[self.row(uuid)] = True

    def _remap(self, uuid: str) -> None:
        if ("ecc", uuid) in self.faults:
            row = self.row(uuid)
            self.hardware.xid[row] = 63
            self.hardware.remap_pending[row] = 1
            self.hardware.remapped_uncorrectable[row] += 1

    def _crash(self, job_id: str | None, row: int, *, restart: bool = False) -> None:
        """All of the job's processes end soon, and its other GPUs report the teardown."""
        if job_id is None:
            return
        job = self.workload.jobs[job_id]
        incarnation = job.incarnation

        def fall() -> None:
            if self._is_current(job_id, incarnation):
                self.workload.set_state(job_id, workload.DOWN, self.at_s)
                mates = job.rows[job.rows != row]
                self.hardware.xid[mates] = np.where(
                    self.hardware.xid[mates] == 0, 45, self.hardware.xid[mates]
                )
                if restart:
                    self._after(_APPLICATION_RESTART_S, rise)

        def rise() -> None:
            if self._is_current(job_id, incarnation) and not self._stopped()[job.rows].any():
                self.workload.set_state(job_id, workload.RUNNING, self.at_s)

        self._after(_CRASH_AFTER_S, fall)

    def _hang(self, job_id: str | None) -> None:
        """The other ranks wait in a collective until their own timeout ends them."""
        if job_id is None:
            return
        job = self.workload.jobs[job_id]
        hangs = job.kind == workload.TRAINING and len(job.rows) > 1
        self.workload.set_state(job_id, workload.HUNG if hangs else workload.DOWN, self.at_s)
        incarnation = job.incarnation

        def give_up() -> None:
            if self._is_current(job_id, incarnation):
                self.workload.set_state(job_id, workload.DOWN, self.at_s)

        self._after(_HANG_TIMEOUT_S, give_up)

    def _is_current(self, job_id: str, incarnation: int) -> bool:
        job = self.workload.jobs.get(job_id)
        return job is not None and job.incarnation == incarnation

    # --- what the exporters say -----------------------------------------------------------

    def reporting(self) -> Bools:
        """bool [gpus]: whether a GPU exports anything at all."""
        return ~self._gone

    def samples(self, rows: Ints | None = None) -> list[Family]:
        """What dcgm-exporter would say now of these rows (all by default), in its order."""
        chosen = np.arange(len(self.gpus)) if rows is None else rows
        labels = self._gpu_labels()
        families = []
        for family in FAMILIES:
            values, exported = self._values(family)
            kept = chosen[exported[chosen]].tolist()
            families.append(Family(family.name, [labels[row] for row in kept], values[kept]))
        return families

    def history(
        self, start_s: float, end_s: float, step_s: float, block_s: float = 900.0
    ) -> Iterator[Block]:
        """The samples at start_s, start_s + step_s, ... up to end_s, as scraping would store
        them: with `instance`, `job` and the series `up`. The fleet itself moves to end_s.

        Raises ValueError when `start_s` lies in the fleet's past.
        """
        if start_s < self.at_s - 1e-6 or step_s <= 0:
            raise ValueError("history goes forward from where the fleet is, in positive steps")
        self.advance(start_s)
        self.at_s = float(start_s)
        labels, times, columns = self._scraped_labels(), [start_s], [self._column()]
        for index in range(1, math.floor((end_s - start_s) / step_s + 1e-9) + 1):
            self._tick(start_s + index * step_s - self.at_s)
            now_labels = self._scraped_labels()
            if now_labels is not labels or times[-1] - times[0] >= block_s:
                yield Block(labels, np.array(times), np.stack(columns, axis=1))
                labels, times, columns = now_labels, [], []
            times.append(self.at_s)
            columns.append(self._column())
        yield Block(labels, np.array(times), np.stack(columns, axis=1))

    def past(self, start_s: float) -> Fleet:
        """The same fleet as it was at `start_s`: the same GPUs and jobs, all healthy."""
        past = Fleet(
            self.seed,
            len(self.hosts),
            len(self.gpus) // len(self.hosts),
            start_s=start_s,
            default_jobs=False,
            **self._options,
        )
        for job in self.workload.jobs.values():
            past._assign_running(job.id, workload.KIND_NAMES[job.kind], job.rows.tolist())
        past._settle()
        return past

    def _values(self, family: Exported) -> tuple[Floats, Bools]:
        exported = ~self._gone & family.capable(self.hardware)
        if family.name != "DCGM_FI_DEV_XID_ERRORS":
            exported &= ~self._silent
        return family.read(self.hardware), exported

    def _column(self) -> Floats:
        parts = []
        for family in FAMILIES:
            values, exported = self._values(family)
            parts.append(np.where(exported, values, np.nan)[family.capable(self.hardware)])
        parts.append(np.ones(len(self.hosts)))
        return np.concatenate(parts)

    def _gpu_labels(self) -> list[dict[str, str]]:
        if self._labels is None:
            self._scraped: list[dict[str, str]] | None = None
            self._labels = [self._labels_of(row) for row in range(len(self.gpus))]
        return self._labels

    def _labels_of(self, row: int) -> dict[str, str]:
        gpu = self.gpus[row]
        slot = gpu.index or 0
        labels = {
            "gpu": str(slot),
            "UUID": gpu.uuid,
            "pci_bus_id": f"00000000:{_BUS_IDS[slot % 8] + slot // 8:02X}:00.0",
            "device": f"nvidia{slot}",
            "modelName": gpu.model,
            "Hostname": gpu.node,
            "DCGM_FI_DRIVER_VERSION": DRIVER,
        }
        job_id = self.workload.job_of[row]
        return labels if job_id is None else {**labels, "hpc_job": job_id}

    def _scraped_labels(self) -> list[dict[str, str]]:
        of_gpu = self._gpu_labels()
        if self._scraped is None:
            self._scraped = [
                {"__name__": family.name, **of_gpu[row], **target_labels(self.gpus[row].node)}
                for family in FAMILIES
                for row in np.flatnonzero(family.capable(self.hardware)).tolist()
            ] + [{"__name__": "up", **target_labels(host)} for host in self.hosts]
        return self._scraped


def target_labels(host: str) -> Mapping[str, str]:
    """What Prometheus adds to the samples of this host's exporter."""
    return {"instance": f"{host}:9400", "job": SCRAPE_JOB}
