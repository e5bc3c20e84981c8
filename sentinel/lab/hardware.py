"""The simulated GPUs as physics: demand in; clocks, power, heat and counters out.

Numbers follow what such GPUs show in the field: an H100 idles at 70 W, at 118 W with a process
on it, reaches its 700 W cap in heavy training and then runs at 1.4 to 1.7 GHz; healthy
neighbours in one chassis differ by up to 10 C and 60 W.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from sentinel.core.domain import Bools, Floats, Ints
from sentinel.lab.site import Physics
from sentinel.lab.workload import Demand, Pace

IDLE, POWER_CAP, HW_SLOWDOWN, SW_THERMAL, HW_THERMAL = 0x1, 0x4, 0x8, 0x20, 0x40
POWER_BRAKE: Final = 0x80

_HW_ABOVE_C: Final = 6.0
_BRAKED: Final = 0.5  # what the power brake leaves of the clock
_FLAPPED: Final = 0.6
_FLAP_S: Final = 60.0  # half of a period
# airflow by position: the second row of a chassis breathes the first row's air
_SLOT_C: Final = (0.0, 0.6, 3.4, 4.2, 0.3, 1.0, 3.9, 4.6)
_SLOT_RESISTANCE: Final = (0.95, 0.96, 1.03, 1.05, 0.95, 0.98, 1.04, 1.06)


@dataclass(frozen=True, slots=True)
class Model:
    """One GPU model. `work_w` is the power of one unit of sm, tensor and dram activity at the
    highest clock, before any cap."""

    name: str
    tdp_w: float
    idle_w: float
    resident_w: float
    work_w: tuple[float, float, float]
    sm_mhz: float
    sm_idle_mhz: float
    sm_step_mhz: float
    mem_mhz: float
    fb_mib: float
    resistance_c_per_w: float
    slowdown_c: float
    pcie_gen: int
    mem_temp: bool = True
    nvlink: bool = True


MODELS: Final = {
    "H100": Model("NVIDIA H100 80GB HBM3", 700, 70, 48, (80, 1550, 200), 1980, 345, 15, 2619,
                  81559, 0.055, 83, 5),
    "A100": Model("NVIDIA A100-SXM4-80GB", 400, 52, 18, (50, 820, 130), 1410, 210, 15, 1593,
                  81920, 0.090, 82, 4),
    "L40S": Model("NVIDIA L40S", 350, 34, 50, (70, 900, 150), 2520, 210, 15, 9001, 46068,
                  0.115, 85, 4, mem_temp=False, nvlink=False),
    "H200": Model("NVIDIA H200", 700, 75, 50, (80, 1500, 260), 1980, 345, 15, 3201,
                  143771, 0.052, 84, 5),
    "B200": Model("NVIDIA B200", 1000, 140, 60, (110, 2100, 330), 1965, 120, 15, 3996,
                  183359, 0.040, 87, 6),
}  # fmt: skip


class Hardware:
    """The state of every GPU; `step` moves it. Faults are arrays that a caller sets."""

    def __init__(
        self,
        seed: int,
        models: list[Model],
        hosts: list[int],
        slots: list[int],
        physics: Physics,
    ) -> None:
        n = len(models)
        self._physics = physics
        rng = np.random.default_rng([seed, 0x6A7D])
        self.models = models
        self._n = n
        self._tdp_w = np.array([float(m.tdp_w) for m in models])
        self._idle_w = np.array([m.idle_w for m in models])
        self._resident_w = np.array([m.resident_w for m in models])
        self._work_w = np.array([m.work_w for m in models])
        self._sm_mhz = np.array([m.sm_mhz for m in models])
        self._sm_idle_mhz = np.array([m.sm_idle_mhz for m in models])
        self._sm_step_mhz = np.array([m.sm_step_mhz for m in models])
        self.power_limit_w = self._tdp_w.copy()
        self._slowdown_c = np.array([m.slowdown_c for m in models])
        self.fb_total_mib = np.array([m.fb_mib for m in models])
        self.has_mem_temp = np.array([m.mem_temp for m in models])
        self.has_nvlink = np.array([m.nvlink for m in models])
        self.mem_mhz = np.array([m.mem_mhz for m in models])

        slot = np.array(slots) % len(_SLOT_C)
        air = physics.air_c + 4 * rng.random(max(hosts) + 1)
        self._air_c = air[np.array(hosts)] + physics.slots * np.array(_SLOT_C)[slot]
        spread = np.clip(rng.normal(1, 0.025, n), 0.95, 1.05)
        base = physics.resistance * np.array([m.resistance_c_per_w for m in models])
        self._resistance = base * np.array(_SLOT_RESISTANCE)[slot] * spread
        self._silicon = np.clip(rng.normal(1, physics.silicon, n), 0.92, 1.08)
        self._tau_s = physics.tau_s + 16 * rng.random(n)
        self._power_noise = np.zeros(n)

        # faults and shifts, each at its healthy value
        self.cooling_goal = np.ones(n)  # thermal resistance, as a multiple
        self.cooling_rate_per_s = np.full(n, np.inf)
        self._cooling = np.ones(n)
        self.clock_factor = np.ones(n)
        self.work_factor = np.ones(n)
        self.efficiency = np.ones(n)  # work done per cycle
        self.mem_factor = np.ones(n)
        self.nvlink_factor = np.ones(n)
        self.pcie_factor = np.ones(n)
        self.locked_mhz = np.full(n, np.inf)
        self.braked = np.zeros(n, bool)
        self.flaps_since_s = np.full(n, np.nan)
        self.hbm_goal_c = np.zeros(n)  # on top of what the memory's own work explains
        self._hbm_c = np.zeros(n)
        self.air_goal_c = np.zeros(n)
        self.air_rate_c_per_s = np.zeros(n)
        self._air_shift_c = np.zeros(n)
        self.sbe_per_s = np.zeros(n)
        self.replays_per_s = np.zeros(n)
        self.nvlink_errors_per_s = np.zeros(n)

        self.power_w = self._idle_w.copy()
        self.clock_mhz = self._sm_idle_mhz.copy()
        self.speed = np.ones(n)  # clock as a share of the model's highest
        self.temp_c = self._air_c + self._resistance * self.power_w
        self.mem_temp_c = self.temp_c + 3
        self.reasons = np.full(n, IDLE, np.int64)
        self.demand: Demand | None = None

        self.energy_mj = np.floor(rng.random(n) * 4e12)
        self.sbe_volatile = np.floor(rng.exponential(0.3, n))
        self.sbe_aggregate = self.sbe_volatile + np.floor(rng.exponential(2, n))
        self.dbe_volatile = np.zeros(n)
        self.dbe_aggregate = np.zeros(n)
        self.remapped_correctable = np.zeros(n)
        self.remapped_uncorrectable = np.floor(rng.exponential(0.12, n))
        self.remap_pending = np.zeros(n)
        self.remap_failure = np.zeros(n)
        self.pcie_replay = np.floor(rng.exponential(1.2, n))
        self.pcie_width = np.full(n, 16.0)
        self.pcie_gen_max = np.array([float(m.pcie_gen) for m in models])
        self._rests_pcie = np.array([not m.nvlink for m in models])
        self.nvlink_crc = np.zeros(n)
        self.nvlink_replay = np.zeros(n)
        self.nvlink_recovery = np.zeros(n)
        self.xid = np.zeros(n)

    def settle(self, demand: Demand, at_s: float) -> None:
        """Starts from the temperatures that this demand leads to, not from cold metal."""
        quiet = np.random.default_rng(0)
        for _ in range(12):
            self.step(demand, at_s, 60.0, quiet)

    def lose_cooling(self, row: int, above_c: float = 25.0) -> None:
        """Bad enough that the present load, whatever it is, ends at the throttle point."""
        goal_c = self._slowdown_c[row] + above_c - self._air_c[row]
        needed = goal_c / (self._resistance[row] * max(self.power_w[row], 1.0))
        self.cooling_goal[row] = np.clip(needed, 2.6 if above_c > 20 else 1.6, 6.0)

    def reset(self, rows: Ints) -> None:
        """As after a repair and a reset: volatile counters start again, the past stays."""
        for factor in (
            self.cooling_goal,
            self._cooling,
            self.clock_factor,
            self.efficiency,
            self.mem_factor,
            self.nvlink_factor,
            self.pcie_factor,
        ):
            factor[rows] = 1.0
        for without in (self.cooling_rate_per_s, self.locked_mhz):
            without[rows] = np.inf
        self.flaps_since_s[rows] = np.nan
        self.braked[rows] = False
        self.pcie_width[rows] = 16.0
        for none in (
            self.hbm_goal_c,
            self.sbe_per_s,
            self.replays_per_s,
            self.nvlink_errors_per_s,
            self.remap_failure,
        ):
            none[rows] = 0.0
        self.restart(rows)

    def restart(self, rows: Ints) -> None:
        """What a reboot alone does: the driver's counters start again."""
        for counter in (
            self.energy_mj,
            self.sbe_volatile,
            self.dbe_volatile,
            self.remap_pending,
            self.pcie_replay,
            self.nvlink_crc,
            self.nvlink_replay,
            self.nvlink_recovery,
            self.xid,
        ):
            counter[rows] = 0.0

    @property
    def pace(self) -> Pace:
        """How fast each GPU can do what it is asked, as the work sees it."""
        memory = 1.0 / self.mem_factor
        return Pace(self.speed, self.efficiency, memory, self.nvlink_factor, self.pcie_factor)

    @property
    def pcie_gen(self) -> Floats:
        """A card without NVLink lets its PCIe link rest while it does."""
        resting = self._rests_pcie & ((self.reasons & IDLE) > 0)
        return np.where(resting, 1.0, self.pcie_gen_max)

    @property
    def mem_mhz_now(self) -> Floats:
        return np.floor(self.mem_mhz * self.mem_factor)

    def step(self, demand: Demand, at_s: float, dt: float, rng: np.random.Generator) -> None:
        """Moves everything `dt` seconds on, to `at_s`. Exact for any step, as relaxation is."""
        self.demand = demand
        physics = self._physics
        work = np.stack([demand.sm, demand.tensor, demand.dram], axis=1)
        full_w = (self._work_w * work).sum(axis=1) * self._silicon * self.work_factor
        base_w = self._idle_w + np.where(demand.resident, self._resident_w, 0.0)

        room_w = np.maximum(0.989 * self.power_limit_w - base_w, 1.0)
        by_power = np.minimum((room_w / np.maximum(full_w, 1.0)) ** (1 / physics.clock_power), 1.0)
        over_c = np.maximum(self.temp_c - self._slowdown_c, 0.0)
        hw_hot = over_c > _HW_ABOVE_C
        by_heat = np.where(hw_hot, 0.5, np.clip(1 - 0.06 * over_c, 0.3, 1.0))
        flapped = (at_s - self.flaps_since_s) % (2 * _FLAP_S) < _FLAP_S  # never where NaN
        by_slot = np.where(self.braked, _BRAKED, np.where(flapped, _FLAPPED, 1.0))
        by_lock = np.minimum(self.locked_mhz / self._sm_mhz, 1.0)
        healthy = np.minimum(np.minimum(by_power, by_heat), np.minimum(by_slot, by_lock))
        self.speed = healthy * self.clock_factor
        asleep = ~demand.resident & (full_w < 1.0)
        raw_mhz = np.where(asleep, self._sm_idle_mhz, self._sm_mhz * self.speed)
        self.clock_mhz = np.floor(raw_mhz / self._sm_step_mhz + 1e-9) * self._sm_step_mhz

        draws = rng.standard_normal((2, self._n))
        kept = float(np.exp(-dt / 3.0))
        self._power_noise = kept * self._power_noise + np.sqrt(1 - kept * kept) * draws[0]
        dynamic_w = full_w * self.speed**physics.clock_power
        # a cap also smooths
        steadiness = physics.noise * np.where(by_power < 1, 0.0025, 0.012)
        power_w = base_w + dynamic_w + self._power_noise * (0.3 + steadiness * dynamic_w)
        self.energy_mj += np.floor((self.power_w + power_w) / 2 * dt * 1000)
        self.power_w = power_w

        capped = (by_power < 1) & (by_power <= healthy) & (self.clock_factor == 1)
        reasons = np.where(asleep, IDLE, 0) | np.where(capped, POWER_CAP, 0)
        reasons |= np.where(over_c > 0, SW_THERMAL, 0)
        reasons |= np.where(self.braked, HW_SLOWDOWN | POWER_BRAKE, 0)
        reasons |= np.where(flapped, HW_SLOWDOWN, 0)
        self.reasons = (reasons | np.where(hw_hot, HW_SLOWDOWN | HW_THERMAL, 0)).astype(np.int64)
        self._heat(demand, at_s, dt, rng)

    def _heat(self, demand: Demand, at_s: float, dt: float, rng: np.random.Generator) -> None:
        missing = (self.cooling_goal - self._cooling) * -np.expm1(-dt / 15.0)
        most = self.cooling_rate_per_s * dt
        self._cooling += np.clip(missing, -most, most)
        most = self.air_rate_c_per_s * dt
        self._air_shift_c += np.clip(self.air_goal_c - self._air_shift_c, -most, most)
        day_c = self._physics.day_c * np.sin(2 * np.pi * at_s / 86400)
        air_c = self._air_c + self._air_shift_c + day_c
        goal_c = air_c + self._resistance * self._cooling * self.power_w
        self.temp_c += (goal_c - self.temp_c) * -np.expm1(-dt / self._tau_s)
        self._hbm_c += (self.hbm_goal_c - self._hbm_c) * -np.expm1(-dt / 60.0)
        mem_goal_c = air_c + 0.72 * (self.temp_c - air_c) + 4 + 14 * demand.dram + self._hbm_c
        self.mem_temp_c += (mem_goal_c - self.mem_temp_c) * -np.expm1(-dt / (1.5 * self._tau_s))
        self._count_rare_errors(dt, rng)

    def _count_rare_errors(self, dt: float, rng: np.random.Generator) -> None:
        corrected = (rng.random(self._n) < 4e-7 * dt).astype(np.int64)
        if self.sbe_per_s.any():
            corrected = corrected + rng.poisson(self.sbe_per_s * dt)
        self.sbe_volatile += corrected
        self.sbe_aggregate += corrected
        replayed = (rng.random(self._n) < 2e-6 * dt).astype(np.int64)
        if self.replays_per_s.any():
            replayed = replayed + rng.poisson(self.replays_per_s * dt)
        self.pcie_replay += replayed
        if self.nvlink_errors_per_s.any():
            self.nvlink_crc += rng.poisson(self.nvlink_errors_per_s * dt)
            self.nvlink_replay += rng.poisson(0.3 * self.nvlink_errors_per_s * dt)
            self.nvlink_recovery += rng.poisson(0.004 * self.nvlink_errors_per_s * dt)

    def uncorrectable_error(self, row: int) -> None:
        self.dbe_volatile[row] += 2
        self.dbe_aggregate[row] += 2

    @property
    def fb_used_mib(self) -> Floats:
        used: Floats = np.zeros(self._n) if self.demand is None else self.demand.fb
        context = np.where(self.resident, 530.0, 3.0)
        usable = self.fb_total_mib - FB_RESERVED_MIB
        return np.floor(np.clip(used * usable + context, 0, usable - 64))

    @property
    def resident(self) -> Bools:
        return np.zeros(self._n, bool) if self.demand is None else self.demand.resident


FB_RESERVED_MIB: Final = 604.0
