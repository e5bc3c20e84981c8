"""A synchronous training job as frames: unlike slots, noise, phases, and what goes wrong.

The ranks of a job wait for the slowest. While a rank waits its tensor and DRAM pipes rest, its
SMs are held by the collective's own kernel in part, its power falls, and its utilisation stays
at 100 %. Physics of its own, apart from the simulated fleet's.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from sentinel.core.domain import Coverage, Frame, Gpu, Mates, Workload
from sentinel.core.features import Window
from sentinel.core.peers import PeerWatch

METRICS = (
    "gpu_util_ratio", "sm_active_ratio", "tensor_active_ratio", "dram_active_ratio", "power_w",
    "temp_c", "mem_temp_c", "sm_clock_mhz", "mem_clock_mhz", "throttle_reasons", "fb_used_mib",
    "nvlink_tx_bytes_per_s",
)  # fmt: skip
UTIL, SM, TENSOR, DRAM, POWER, TEMP, MEM_TEMP, CLOCK, MEM_CLOCK, REASONS, FB, NVLINK = range(
    len(METRICS)
)
MODEL = "NVIDIA H100 80GB HBM3"
TDP_W, IDLE_W, BOOST_MHZ = 700.0, 118.0, 1980.0


@dataclass
class Job:
    """`load` is how much there is to do (1.0 keeps most GPUs under the power cap); `stages` of
    a pipeline have unlike work. `slow` maps a rank to its speed, as a share of the job's, with no
    low clock; `clock` a rank to its clock's factor, `hot` a rank to extra degrees, `extra` a
    rank to a factor of its own work. `in_step` False: each GPU has a load of its own."""

    gpus: int = 8
    seed: int = 0
    step_s: float = 15.0
    load: float = 0.8
    stages: int = 1
    name: str = "4711"
    model: str = MODEL
    in_step: bool = True
    prof: bool = True
    role: str = ""
    slow: dict = field(default_factory=dict)
    clock: dict = field(default_factory=dict)
    hot: dict = field(default_factory=dict)
    idle: tuple = ()
    extra: dict = field(default_factory=dict)
    util_of_rank: dict = field(default_factory=dict)
    phase: str = "train"
    pace: float = 1.0  # what holds up all ranks alike
    fb_mib: float = 60_000.0
    at_s: float = 1_000_000.0

    def __post_init__(self):
        n, rng = self.gpus, np.random.default_rng([self.seed, self.gpus])
        self.rng = rng
        stage = np.arange(n) * self.stages // n
        self.work = np.linspace(1.0, 0.82, self.stages)[stage] * np.clip(
            rng.normal(1, 0.01, n), 0.97, 1.03
        )
        self.silicon = np.clip(rng.normal(1, 0.035, n), 0.92, 1.08)
        self.sink = 0.06 * np.clip(rng.normal(1, 0.12, n), 0.8, 1.25)
        self.air = 26 + 4 * rng.random(n // 8 + 1)[np.arange(n) // 8]
        self.temp = self.air + self.sink * 400
        self.jitter = np.zeros(n)
        self.wander = 0.0
        self.own = rng.uniform(0.3, 1.0, n)
        self.list = tuple(
            Gpu(f"GPU-{self.name}-{i}", f"{self.name}-n{i // 8}", i % 8, self.model)
            for i in range(n)
        )
        self.workloads = (Workload("job", self.name),) * n
        self.mates = (Mates(self.name, "", self.role, self.in_step),) * n

    def values(self):
        """One scrape [gpus, metrics], `step_s` after the one before."""
        n, rng, dt = self.gpus, self.rng, self.step_s
        self.at_s += dt
        keep = np.exp(-dt / 8.0)
        self.jitter = keep * self.jitter + np.sqrt(1 - keep**2) * rng.standard_normal(n)
        keep = np.exp(-dt / 150.0)
        self.wander = keep * self.wander + np.sqrt(1 - keep**2) * rng.standard_normal()
        work = self.work * np.array([self.extra.get(i, 1.0) for i in range(n)])
        clock = np.array([self.clock.get(i, 1.0) for i in range(n)])
        hidden = np.array([self.slow.get(i, 1.0) for i in range(n)])
        effort = self.load * work * (1 + 0.02 * self.wander + 0.02 * self.jitter)
        if not self.in_step:
            step = rng.normal(0, 0.05, n)
            self.own = np.clip(self.own + step * np.sqrt(dt / 60), 0.1, 1.0)
            effort = self.load * self.own
        if self.phase == "evaluate":
            effort = 0.55 * effort
        elif self.phase == "checkpoint":
            effort = np.full(n, 0.01)
        elif self.phase == "one-evaluates":
            effort = np.where(np.arange(n) == 0, 0.6 * effort, 0.01)
        effort = np.where(np.isin(np.arange(n), self.idle), 0.004, effort)
        full_w = 620 * effort * self.silicon  # at boost clock
        cap = np.minimum(((TDP_W - IDLE_W) / np.maximum(full_w, 1)) ** (1 / 2.4), 1.0)
        busy = np.isin(np.arange(n), self.idle, invert=True) & self.in_step
        healthy = cap / np.maximum(work, 0.1)
        speed = healthy * clock
        at_pace = np.where(hidden < 1, healthy[busy].min(initial=9.0) * hidden, speed)
        pace = at_pace[busy].min(initial=9.0)
        through = np.minimum(pace / at_pace, 1.0) * self.pace  # share of time not waiting
        told = np.minimum(pace / speed, 1.0) * self.pace
        tensor, dram = 0.62 * effort * told, 0.5 * effort * told
        sm = 0.95 * np.minimum(effort, 1.0) * (through + 0.2 * (1 - through))
        noise = 1 + 0.015 * rng.standard_normal((4, n))
        draw = (IDLE_W + full_w * (cap * clock) ** 2.4 * told) * noise[0] ** 0.3
        goal = self.air + self.sink * draw + np.array([self.hot.get(i, 0.0) for i in range(n)])
        self.temp += (goal - self.temp) * -np.expm1(-dt / 30.0)
        mhz = np.floor(BOOST_MHZ * cap * clock / 15) * 15
        util = np.where(effort > 0.05, 1.0, 0.02)
        out = np.full((n, len(METRICS)), np.nan)
        out[:, UTIL] = util if self.in_step else np.clip(1.3 * effort, 0, 1)
        for rank, value in self.util_of_rank.items():
            out[rank, UTIL] = value
        if self.prof:
            out[:, SM], out[:, TENSOR] = sm * noise[1], tensor * noise[2]
            out[:, DRAM] = dram * noise[3]
            # per step the same, whatever a step costs; so many steps as the load lets be
            steps = tensor / np.maximum(self.load * work, 0.01) / 0.62
            out[:, NVLINK] = 4e9 * steps * (0.8 / self.load) * noise[3]
        out[:, POWER], out[:, TEMP] = draw, np.round(self.temp)
        out[:, MEM_TEMP] = np.round(self.temp + 8)
        out[:, CLOCK], out[:, MEM_CLOCK] = mhz, 2619.0
        out[:, REASONS] = np.where((cap < 1) & (clock == 1), 4.0, 0.0)
        out[:, FB] = self.fb_mib
        return out

    def frame(self):
        return frame_of([self])


def frame_of(jobs):
    """Jobs side by side in one fleet, each one scrape further."""
    values = np.concatenate([job.values() for job in jobs])
    if len(jobs) == 1:
        gpus, work, mates = jobs[0].list, jobs[0].workloads, jobs[0].mates
    else:
        gpus, work, mates = (
            tuple(x for job in jobs for x in getattr(job, name))
            for name in ("list", "workloads", "mates")
        )
    return Frame(
        at_s=jobs[0].at_s,
        gpus=gpus,
        metrics=METRICS,
        values=values,
        age_s=np.zeros_like(values),
        presence=np.zeros(len(gpus), np.int8),
        workloads=work,
        coverage=Coverage(len(gpus), len(gpus)),
        last_seen_s=np.full(len(gpus), jobs[0].at_s),
        mates=mates,
    )


class Seat:
    """Peers over a job, tick by tick. `words` are (tick, row, why) of every tick's word."""

    def __init__(self, *jobs, settle_s=300.0):
        self.jobs, self.settle_s = jobs, settle_s
        self.window, self.watch = Window(4 * jobs[0].step_s), PeerWatch()
        self.ticks, self.words, self.job_words = 0, [], []
        self.worst = 0.0
        self.frame = self.peers = None
        self._gpus = None

    def run(self, ticks, **changes):
        """`ticks` more, after attributes of the first job have changed."""
        for name, value in changes.items():
            setattr(self.jobs[0], name, value)
        for _ in range(ticks):
            frame = frame_of(self.jobs)
            if self._gpus == frame.gpus:  # the fold hands the same tuples out while nothing changed
                frame = _same(frame, self.frame)
            self._gpus, self.frame = frame.gpus, frame
            features = self.window.push(frame, max_age_s=60.0)
            self.peers = self.watch.look(frame, features, self.settle_s)
            odd = np.flatnonzero(self.peers.score > 1.0)
            self.words += [(self.ticks, int(r), int(self.peers.why[r])) for r in odd]
            self.job_words += [(self.ticks, f) for f in self.peers.jobs]
            self.worst = max(self.worst, float(np.nanmax(self.peers.score, initial=0.0)))
            self.ticks += 1
        return self


def _same(frame, before):
    return replace(frame, gpus=before.gpus, workloads=before.workloads, mates=before.mates)
