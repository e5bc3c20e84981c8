"""The simulated jobs, and what they ask of each GPU from second to second.

Everything is an array over the fleet's GPUs. A job's character (how hard, how much memory,
when it checkpoints, restarts or bursts) is drawn from its own name and the fleet's seed, so a
job keeps it wherever it runs. Nothing here knows temperature or power.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Final

import numpy as np

from sentinel.core.domain import Bools, Floats, Ints

DAY_S: Final = 86400.0
NOTHING, TRAINING, INFERENCE = 0, 1, 2
RUNNING, HUNG, DOWN = 0, 1, 2
KIND_NAMES: Final = {TRAINING: "training", INFERENCE: "inference"}
STATE_NAMES: Final = {RUNNING: "running", HUNG: "hung", DOWN: "crashed"}

_WANDER_TAU_S: Final = 150.0
_JITTER_TAU_S: Final = 4.0
_BURST_EVERY_S: Final = 1500.0
_BURST_S: Final = 90.0


@dataclass(slots=True)
class Job:
    """`incarnation` counts its starts: what was due to an earlier one no longer applies."""

    id: str
    kind: int
    rows: Ints
    started_s: float
    state: int = RUNNING
    incarnation: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Pace:
    """What each GPU is able to do, float64 [gpus]: `speed` its clock as a share of its best,
    `efficiency` the work done per cycle, `memory` how many times longer the memory is busy for
    it, `nvlink` and `pcie` the share of their traffic that passes."""

    speed: Floats
    efficiency: Floats
    memory: Floats
    nvlink: Floats
    pcie: Floats


@dataclass(frozen=True, slots=True)
class Demand:
    """What the work asks of each GPU at one moment. Ratios 0..1, traffic in bytes per second.

    `resident` is True where a process holds the GPU, which keeps it out of deep idle.
    """

    util: Floats
    sm: Floats
    tensor: Floats
    dram: Floats
    fb: Floats
    pcie_tx: Floats
    pcie_rx: Floats
    nvlink: Floats
    resident: Bools


# The parameters of a job's character, one array each over the GPUs.
_CHARACTER: Final = (
    "sm",
    "tensor",
    "dram",
    "nvlink",
    "fb",
    "checkpoint_period_s",
    "checkpoint_s",
    "evaluate_period_s",
    "evaluate_s",
    "restart_period_s",
    "daily_phase_s",
)


class Workload:
    """Which job runs where, and the demand that follows. `advance` moves it in time."""

    def __init__(self, seed: int, gpus: int, load_s: float) -> None:
        self.jobs: dict[str, Job] = {}
        self.job_of: list[str | None] = [None] * gpus
        self.load_s = load_s
        self.quiet = False  # an idle night: every inference job's users are asleep
        self._seed = seed
        self._gpus = gpus
        self._character = {name: np.ones(gpus) for name in _CHARACTER}
        self._kind = np.zeros(gpus, np.int64)
        self._state = np.zeros(gpus, np.int64)
        self._started_s = np.zeros(gpus)
        self._leader = np.arange(gpus)  # the first row of the GPU's job: one per job
        self._wander = np.zeros(gpus)
        self._jitter = np.zeros(gpus)
        self._burst_until_s = np.zeros(gpus)
        self._progress_s = np.zeros(gpus)
        self._saved_s = np.zeros(gpus)
        self._saving = np.zeros(gpus, bool)
        self.hung = np.zeros(gpus, bool)  # a kernel of its own hangs
        self.share = np.ones(gpus)  # of its job's effort: stages, skew, an idle rank
        self.restless = np.zeros(gpus, bool)  # its share of requests comes in bursts
        self.leak_per_s = np.zeros(gpus)  # share of the memory
        self._leaked = np.zeros(gpus)

    def assign(self, job_id: str, kind: int, rows: Ints, started_s: float) -> Job:
        """Starts the job on these rows, from its last checkpoint if it ran before."""
        saved, incarnation = 0.0, 0
        before = self.jobs.get(job_id)
        if before is not None:
            saved = float(self._saved_s[before.rows[0]])
            incarnation = before.incarnation + 1
            self.unassign(job_id)
        job = Job(job_id, kind, rows, started_s, RUNNING, incarnation)
        self.jobs[job_id] = job
        for row in rows.tolist():
            self.job_of[row] = job_id
        self._kind[rows] = kind
        self._state[rows] = RUNNING
        self._started_s[rows] = started_s
        self._leader[rows] = rows[0]
        self._progress_s[rows] = saved
        self._saved_s[rows] = saved
        self._saving[rows] = False
        self.set_character(job_id, job_id)
        return job

    def unassign(self, job_id: str) -> None:
        """Raises KeyError where there is no such job."""
        rows = self.jobs.pop(job_id).rows
        for row in rows.tolist():
            self.job_of[row] = None
        self._kind[rows] = NOTHING
        self._state[rows] = RUNNING
        self._leader[rows] = rows
        self.calm(rows)

    def calm(self, rows: Ints) -> None:
        """Nothing is the matter with the work on these rows."""
        self.hung[rows] = self.restless[rows] = False
        self.share[rows] = 1.0
        self.leak_per_s[rows] = self._leaked[rows] = 0.0

    def reshape(self, job_id: str, **character: float) -> None:
        """Changes parts of a job's character, until `set_character` gives it another."""
        rows = self.jobs[job_id].rows
        for key, value in character.items():
            self._character[key][rows] = value

    def set_character(self, job_id: str, name: str) -> None:
        """Gives the job the character that belongs to `name`; its own is its id's."""
        job = self.jobs[job_id]
        drawn = _draw(self._seed, name, job.kind)
        for key, value in drawn.items():
            self._character[key][job.rows] = value

    def set_state(self, job_id: str, state: int, at_s: float) -> None:
        """RUNNING restarts it from its last checkpoint."""
        job = self.jobs[job_id]
        job.state = state
        self._state[job.rows] = state
        if state == RUNNING:
            job.incarnation += 1
            job.started_s = at_s
            self._started_s[job.rows] = at_s
            self._progress_s[job.rows] = self._saved_s[job.rows]

    def progress_s(self, job_id: str) -> tuple[float, float]:
        """Seconds of work done, and how many of them the last checkpoint holds."""
        row = self.jobs[job_id].rows[0]
        return float(self._progress_s[row]), float(self._saved_s[row])

    def advance(self, at_s: float, dt: float, able: Pace, rng: np.random.Generator) -> Demand:
        """The demand at `at_s`, `dt` seconds after the last call.

        A training job goes at the pace of its slowest GPU; the others wait for it, which shows
        in their demand.
        """
        slower = able.efficiency / (1 + self._character["dram"] * (able.memory - 1))
        speed = able.speed * slower
        draws = rng.standard_normal((2, self._gpus))
        self._wander = _ou(self._wander, draws[0], dt, _WANDER_TAU_S)
        self._jitter = _ou(self._jitter, draws[1], dt, _JITTER_TAU_S)
        starting = rng.random(self._gpus) < -np.expm1(-dt / _BURST_EVERY_S)
        lasting = at_s + _BURST_S * (0.5 + rng.random(self._gpus))
        self._burst_until_s = np.where(starting, lasting, self._burst_until_s)

        training = self._kind == TRAINING
        age = np.maximum(at_s - self._started_s, 0.0) % self._character["restart_period_s"]
        loading = (self._kind != NOTHING) & (age < self.load_s)
        saving = training & ~loading & self._within("checkpoint", age)
        evaluating = training & ~loading & ~saving & self._within("evaluate", age)

        pace = np.full(self._gpus, np.inf)
        np.minimum.at(pace, self._leader, np.where(self._state == RUNNING, speed, np.inf))
        waiting = np.where(training, np.minimum(pace[self._leader] / np.maximum(speed, 0.05), 1), 1)
        steady = (self._state == RUNNING) & (self._kind != NOTHING) & ~loading & ~saving
        self._progress_s += dt * steady * np.where(np.isfinite(pace), pace, 0)[self._leader]
        finished = self._saving & ~saving & (self._state == RUNNING)
        self._saved_s = np.where(finished, self._progress_s, self._saved_s)
        self._saving = saving
        self._leaked = np.minimum(self._leaked + self.leak_per_s * dt, 1.0)
        return self._demand(at_s, age, waiting, loading, saving, evaluating, able, slower)

    def _within(self, what: str, age: Floats) -> Bools:
        """Whether the age lies in the last part of a period of `what`."""
        period = self._character[f"{what}_period_s"]
        return (age - self.load_s) % period > period - self._character[f"{what}_s"]

    def _demand(
        self,
        at_s: float,
        age: Floats,
        waiting: Floats,
        loading: Bools,
        saving: Bools,
        evaluating: Bools,
        able: Pace,
        slower: Floats,
    ) -> Demand:
        c = self._character
        busy = self._kind != NOTHING
        serving = self._kind == INFERENCE
        wander = self._wander[self._leader]

        day = 0.55 - 0.45 * np.cos(2 * np.pi * (at_s + c["daily_phase_s"]) / DAY_S)
        burst = np.where(self._burst_until_s[self._leader] > at_s, 1.6, 1.0)
        traffic = np.clip(day * burst * (1 + 0.15 * wander + 0.1 * self._jitter), 0.02, 1.3)
        if self.quiet:
            traffic = np.full(self._gpus, 0.02)
        effort = np.where(serving, traffic, (1 + 0.02 * wander + 0.03 * self._jitter) * waiting)
        effort = np.where(evaluating, 0.6 * effort, effort)
        effort = np.where(saving, 0.03, effort)
        bursting = self.restless & (np.sin(at_s / 47.0) > 0.3)
        share = np.where(bursting, 1.8, self.share)
        effort = np.where(loading, 0.005, effort) * busy * share

        # a slower GPU takes longer for the same work: serving it is busier, training it is not,
        # since all wait; less tensor and memory work is done in each of its seconds
        stretched = np.where(serving, 1.0 / slower, 1.0)
        sm = np.clip(c["sm"] * effort * stretched, 0, 0.98)
        done = np.where(serving, 1.0, slower)
        tensor = np.clip(c["tensor"] * effort * done, 0, 0.95) * np.where(evaluating, 0.6, 1.0)
        dram = np.clip(c["dram"] * effort * done * able.memory, 0, 0.95)
        ramp = np.clip((age + 1) / self.load_s, 0.02, 1.0)
        fb = np.where(busy, np.minimum(c["fb"] * ramp + self._leaked, 0.993), 0.0)
        noise = 1 + 0.08 * self._jitter
        rx = np.where(serving, 3e8 * effort, 5e7 * effort) + np.where(loading, 2.5e9, 0.0)
        tx = np.where(serving, 3e7 * effort, 1e7 * effort) + np.where(saving, 1.2e9, 0.0)
        rx, tx = rx * able.pcie, tx * able.pcie
        nvlink = np.where(loading | saving, 0.0, c["nvlink"] * effort * able.nvlink)

        # a hung collective spins: the GPU looks fully used and does nothing
        hung = (self._state == HUNG) | self.hung
        alive = (self._state == RUNNING) & ~self.hung
        sm = np.where(hung, np.where(self.hung, 0.01, 0.11), sm * alive)
        util = np.where(hung, 1.0, np.minimum(1.04 * -np.expm1(-4.2 * sm), 1.0))
        working = alive & busy
        return Demand(
            util=util * busy,
            sm=sm * busy,
            tensor=tensor * working,
            dram=np.where(hung, 0.005, dram * working) * busy,
            fb=np.where(alive | hung, fb, 0.0),
            pcie_tx=np.maximum(6.5e5 + tx * working, 0) * np.abs(noise),
            pcie_rx=np.maximum(5.4e5 + rx * working, 0) * np.abs(noise),
            nvlink=np.maximum(nvlink * working * noise, 0),
            resident=busy & (alive | hung) & (age > 0.1 * self.load_s),
        )


def kind_of(job_id: str) -> int:
    """What a job is, where only its name tells."""
    return INFERENCE if job_id.startswith(("serve", "infer", "llm")) else TRAINING


def _draw(seed: int, name: str, kind: int) -> dict[str, float]:
    rng = np.random.default_rng([seed, zlib.crc32(name.encode()), kind])
    u = rng.random(12)
    if kind == TRAINING:
        tensor = 0.18 + 0.42 * u[0]
        compute = {"sm": 0.52 + 0.62 * tensor, "tensor": tensor, "dram": 0.30 + 0.15 * u[1]}
        nvlink, fb = 4e9 + 2.4e10 * u[2], 0.55 + 0.37 * u[3]
    else:
        sm = 0.22 + 0.40 * u[0]
        compute = {"sm": sm, "tensor": 0.2 * sm, "dram": 0.15 + 0.40 * u[1]}
        nvlink, fb = 2e9 * u[2], 0.70 + 0.22 * u[3]
    return {
        **compute,
        "nvlink": nvlink,
        "fb": fb,
        "checkpoint_period_s": 600 + 1200 * u[4],
        "checkpoint_s": 12 + 13 * u[5],
        "evaluate_period_s": 3600 + 3600 * u[6],
        "evaluate_s": 90 + 150 * u[7],
        "restart_period_s": 9000 + 9000 * u[8],
        "daily_phase_s": 7200 * (u[9] - 0.5),
    }


def _ou(state: Floats, draws: Floats, dt: float, tau_s: float) -> Floats:
    """One exact step of a unit-variance process with this correlation time."""
    kept = float(np.exp(-dt / tau_s))
    moved: Floats = kept * state + np.sqrt(1 - kept * kept) * draws
    return moved
