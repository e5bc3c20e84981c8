"""A simulated GPU fleet: hosts, jobs, faults, and what its exporters would say.

Deterministic in simulated time: the same seed and the same calls at the same simulated
moments give the same samples, to the bit. It knows no clock, and nothing of whoever watches.
"""

from __future__ import annotations

import heapq
import itertools
import math
import uuid as uuids_
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import numpy as np

from sentinel.core.domain import Bools, Floats, Gpu, Ints
from sentinel.lab import layout, workload
from sentinel.lab.hardware import MODELS, Hardware, Model
from sentinel.lab.series import SCRAPE_JOB, Block, Family, Series, target_labels
from sentinel.lab.site import PLAIN, Site
from sentinel.lab.trouble import Fault, Trouble

__all__ = ["SCRAPE_JOB", "Block", "Family", "Fault", "Fleet", "target_labels"]

_STEP_S: Final = 1.0


class Fleet:
    """`advance` moves it in whole seconds from `start_s`; everything else happens "now".

    `hosts` are named gpu-00, gpu-01, ...; the first half are H100, then A100, then L40S, where
    the site has no mix of its own. The last host of each model is a spare (two of them where a
    model has eight) and stays idle.
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
        site: Site = PLAIN,
    ) -> None:
        if hosts < 1 or not 1 <= gpus_per_host <= 16:
            raise ValueError("a fleet has at least one host, of one to 16 GPUs each")
        self.seed, self.site = seed, site
        self.at_s: float = float(start_s)
        self._load_s, self.xid_visible_s = load_s, xid_visible_s
        late = min(site.late_hosts, hosts - 1)
        names = layout.model_names(hosts - late, site.mix) + [site.late_model] * late
        self.hosts = tuple(f"gpu-{i:02d}" for i in range(hosts))
        idle = {*layout.spares(names[: hosts - late]), *range(hosts - late, hosts)}
        self.spare_hosts = tuple(self.hosts[i] for i in sorted(idle) if i < hosts - late)
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
        slots = [row % gpus_per_host for row in range(n)]
        self.hardware = Hardware(seed, models, host_of, slots, site.physics)
        self.workload = workload.Workload(seed, n, load_s)
        self.series = Series(self.gpus, self.hosts, self.hardware, site)
        self.series.relabel(range(n), self.workload)
        self.trouble = Trouble(self)
        self.trouble.unknown[hosts - late :] = True
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._ticks = 0
        if default_jobs:
            for job in layout.default_jobs(names, gpus_per_host, idle, site.gang_hosts):
                self._assign_running(job.id, job.kind, range(*job.span))
        self._settle()

    @property
    def faults(self) -> dict[tuple[str, str], Fault]:
        """What is the matter now, by kind and GPU."""
        return self.trouble.faults

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
        demand = self.workload.advance(self.at_s, dt, self.hardware.pace, rng)
        self.hardware.step(demand, self.at_s, dt, rng)

    def after(self, delay_s: float, event: Callable[[], None]) -> None:
        """Does it so much later, at the first step that reaches it."""
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
        before = known.rows.tolist() if known else []
        job = self.workload.assign(job_id, code, rows, start)
        self.series.relabel({*before, *rows.tolist()}, self.workload)
        if self.trouble.stopped()[job.rows].any():
            self.workload.set_state(job_id, workload.DOWN, self.at_s)

    def unassign(self, job_id: str) -> None:
        """Raises KeyError where there is no such job."""
        rows = self.workload.jobs[job_id].rows.tolist()
        self.workload.unassign(job_id)
        self.series.relabel(rows, self.workload)

    def start_again(self, job_id: str) -> None:
        """The job runs once more, where it was, from its last checkpoint."""
        self.workload.set_state(job_id, workload.RUNNING, self.at_s)
        if self.site.pods:  # another start is another pod
            self.series.relabel(self.workload.jobs[job_id].rows.tolist(), self.workload)

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
        demand = self.workload.advance(self.at_s, 60.0, self.hardware.pace, rng)
        self.hardware.settle(demand, self.at_s)

    # --- faults ---------------------------------------------------------------------------

    def inject(self, kind: str, uuid: str) -> None:
        """Starts a fault of `faults.KINDS`. Raises KeyError on an unknown kind or GPU."""
        self.trouble.start(kind, uuid)

    def repair(self, uuid: str) -> None:
        """The GPU is healthy and freshly reset; a job that still waits on it starts again."""
        self.trouble.end(uuid)

    # --- what the exporters say -----------------------------------------------------------

    def reporting(self) -> Bools:
        """bool [gpus]: whether a GPU exports anything at all."""
        off = self.trouble.down | self.trouble.unknown
        return ~(self.trouble.gone | off[self.series.host_of])

    def samples(self, rows: Ints | None = None) -> list[Family]:
        """What dcgm-exporter would say now of these rows (all by default), in its order."""
        chosen = np.arange(len(self.gpus)) if rows is None else rows
        return self.series.families(self._matrix(), chosen)

    def history(
        self, start_s: float, end_s: float, step_s: float, block_s: float = 900.0
    ) -> Iterator[Block]:
        """The samples at start_s, start_s + step_s, ... up to end_s, as scraping would store
        them: with `instance`, `job` and the series `up`. The fleet itself moves to end_s.

        Raises ValueError when `start_s` lies in the fleet's past.
        """
        if start_s < self.at_s - 1e-6 or step_s <= 0:
            raise ValueError("history goes forward from where the fleet is, in positive steps")
        self.advance(start_s, step_s)
        if start_s - self.at_s > 1e-6:
            self._tick(start_s - self.at_s)
        self.at_s = float(start_s)
        labels, times = self.series.labels(), [start_s]
        matrices, ups = [self._matrix()], [self._up()]
        for index in range(1, math.floor((end_s - start_s) / step_s + 1e-9) + 1):
            self._tick(start_s + index * step_s - self.at_s)
            now_labels = self.series.labels()
            if now_labels is not labels or times[-1] - times[0] >= block_s:
                yield Block(labels, np.array(times), self.series.columns(matrices, ups))
                labels, times, matrices, ups = now_labels, [], [], []
            times.append(self.at_s)
            matrices.append(self._matrix())
            ups.append(self._up())
        yield Block(labels, np.array(times), self.series.columns(matrices, ups))

    def past(self, start_s: float) -> Fleet:
        """The same fleet as it was at `start_s`: the same GPUs and jobs, all healthy."""
        past = Fleet(
            self.seed,
            len(self.hosts),
            len(self.gpus) // len(self.hosts),
            start_s=start_s,
            load_s=self._load_s,
            xid_visible_s=self.xid_visible_s,
            default_jobs=False,
            site=self.site,
        )
        for job in self.workload.jobs.values():
            past._assign_running(job.id, workload.KIND_NAMES[job.kind], job.rows.tolist())
        past._settle()
        return past

    def _matrix(self) -> Floats:
        trouble = self.trouble
        return self.series.matrix(trouble.gone, trouble.silent, trouble.down | trouble.unknown)

    def _up(self) -> Floats:
        trouble = self.trouble
        return np.where(trouble.unknown, np.nan, np.where(trouble.down, 0.0, 1.0))
