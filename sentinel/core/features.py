"""From frames to features: what each GPU is asked, and how it answers.

A `Window` is a ring of grid cells owned by the tick. Every frame is added to its cell; the
features of a tick are recomputed from the ring, so nothing drifts. Windows are in seconds,
so the same code serves live ticks, learning and backtests whatever their pace.

*Demand* is what the work asks of a GPU (utilisation, tensor and memory activity, traffic);
*response* is how the GPU answers (power, temperature, clocks, throttling, error rates).
Two of the response features, the excess of GPU and of memory temperature over what the
recent power explains, are filled in by the thermal model of the baseline (`score.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from sentinel.core.domain import Bools, Floats, Frame, Gpu, Workload

CELLS: Final = 10  # cells in the ring
RECENT_CELLS: Final = 2  # the current cell and the one before it: "now", less its noise
THERMAL_TAU_S: Final = 40.0  # first-order thermal time constant of a heat sink under load
# bits of the clocks-event-reasons mask that mean trouble: HW slowdown, SW thermal, HW thermal,
# power brake. SW power cap (4) is the normal state of a GPU under a heavy load.
TROUBLE_BITS: Final = 0x8 | 0x20 | 0x40 | 0x80
POWER_CAP_BIT: Final = 0x4


@dataclass(frozen=True, slots=True)
class Feature:
    """One column. `floor` is the smallest deviation worth one unit of distance, in `unit`;
    where `relative` is set it is a share of the cohort's own reference level instead.
    `ease` weakens deviations in the harmless direction: (below, above)."""

    name: str
    metric: str
    unit: str
    demand: bool
    floor: float
    relative: bool = False
    ease: tuple[float, float] = (1.0, 1.0)
    label: str = ""


_EVENTS: Final = "events"  # held as log10(1 + events counted over the ring)

FEATURES: Final = (
    Feature("gpu_util", "gpu_util_ratio", "", True, 0.10, label="GPU utilisation"),
    Feature("mem_copy_util", "mem_copy_util_ratio", "", True, 0.10, label="memory utilisation"),
    Feature("sm_active", "sm_active_ratio", "", True, 0.10, label="SM activity"),
    Feature("gr_active", "gr_engine_active_ratio", "", True, 0.10, label="engine activity"),
    Feature("tensor_active", "tensor_active_ratio", "", True, 0.10, label="tensor activity"),
    Feature("dram_active", "dram_active_ratio", "", True, 0.10, label="DRAM activity"),
    Feature("nvlink_traffic", "nvlink_tx_bytes_per_s", "log10 B/s", True, 1.0, label="NVLink"),
    Feature("pcie_traffic", "pcie_rx_bytes_per_s", "log10 B/s", True, 1.0, label="PCIe traffic"),
    Feature("power", "power_w", "W", False, 0.09, True, (1.0, 0.5), "power"),
    Feature("temp_excess", "temp_c", "°C", False, 3.5, ease=(0.4, 1.0), label="GPU temperature"),
    Feature(
        "mem_temp_excess", "mem_temp_c", "°C", False, 4.5, ease=(0.4, 1.0), label="HBM temperature"
    ),
    Feature("sm_clock", "sm_clock_mhz", "MHz", False, 0.04, True, (1.0, 0.0), "SM clock"),
    Feature("mem_clock", "mem_clock_mhz", "MHz", False, 0.04, True, (1.0, 0.0), "memory clock"),
    Feature("throttled", "throttle_reasons", "", False, 0.2, ease=(0.0, 1.0), label="throttling"),
    # explains a low clock, and is nothing by itself: a capped GPU is a busy GPU
    Feature("power_capped", "throttle_reasons", "", False, 1.0, ease=(0, 0), label="power cap"),
    Feature("ecc_sbe", "ecc_sbe_volatile", _EVENTS, False, 1.0, ease=(0, 1), label="ECC errors"),
    Feature("pcie_replay", "pcie_replay", _EVENTS, False, 1.0, ease=(0, 1), label="PCIe replays"),
)
NAMES: Final = tuple(f.name for f in FEATURES)
DEMAND: Final[Bools] = np.array([f.demand for f in FEATURES])
INDEX: Final = {name: i for i, name in enumerate(NAMES)}
# any of these above _IDLE_BELOW means that the GPU works
ACTIVITY: Final = tuple(
    INDEX[name] for name in ("gpu_util", "mem_copy_util", "sm_active", "gr_active", "tensor_active")
)
# any of these tells how heavy the work is; GPU utilisation only that there is some
WEIGHT: Final = tuple(INDEX[name] for name in ("sm_active", "tensor_active", "dram_active"))
TEMP, MEM_TEMP = INDEX["temp_excess"], INDEX["mem_temp_excess"]
# what physics makes independent of the work: scored even for work never seen before
# (memory is heated by its own activity beside the GPU's power, so its temperature is not; its
# clock has few steps, and whatever the work, one that works has the highest)
PHYSICAL: Final = tuple(
    INDEX[name] for name in ("temp_excess", "mem_clock", "throttled", "ecc_sbe", "pcie_replay")
)
_LOG = [INDEX["nvlink_traffic"], INDEX["pcie_traffic"]]
_COUNTS = [INDEX["ecc_sbe"], INDEX["pcie_replay"]]
_CLOCKS = [INDEX["sm_clock"], INDEX["mem_clock"]]
_THROTTLED, _CAPPED = INDEX["throttled"], INDEX["power_capped"]
_POWER = INDEX["power"]


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """`values` is float64 [gpus, FEATURES], NaN where unknown. In the two temperature
    columns it holds the temperature itself (°C) until a thermal model turns it into the
    excess. `power_ewma_w` [gpus] is the power that the heat sink still remembers.
    `ready` [gpus] is False until two cells have data."""

    at_s: float
    values: Floats
    power_ewma_w: Floats
    ready: Bools
    settled_s: Floats  # seconds since this GPU's work last changed


class Window:
    """The ring: sums and counts per cell [cells, gpus, features], updated in place.

    `push` costs O(gpus x features) numpy work and no loop over GPUs. Rows follow the
    frame's; when the roster changes, what is known of a GPU moves with its UUID.
    """

    def __init__(self, grid_s: float) -> None:
        if not grid_s > 0:
            raise ValueError(f"grid_s must be positive, got {grid_s}")
        self.grid_s = grid_s
        self.gpus: tuple[Gpu, ...] = ()
        self.at_s = -np.inf
        self._cell = np.full(CELLS, -1, dtype=np.int64)  # absolute number of the cell held
        width = len(FEATURES)
        self._sum = np.zeros((CELLS, 0, width))
        self._count = np.zeros((CELLS, 0, width))
        self._ewma = np.zeros(0)
        self._counter = np.zeros((0, len(_COUNTS)))  # last value of each monotonic counter
        self._changed_s = np.zeros(0)
        self._work = np.zeros(0, dtype=np.int64)
        self._fb_used = np.zeros(0)
        self._columns: tuple[str, ...] = ()
        self._take = np.zeros(width, dtype=np.int64)
        self._work_codes: dict[str, int] = {}
        self._workloads: tuple[Workload | None, ...] = ()

    def push(self, frame: Frame, *, max_age_s: float) -> Features:
        """Adds one frame (values older than `max_age_s` are left out) and gives its features."""
        self._follow(frame)
        now, dt_s = frame.at_s, frame.at_s - self.at_s
        fresh = np.where(frame.age_s <= max_age_s, frame.values, np.nan)
        row = self._row(frame, fresh, dt_s)
        cell = int(now // self.grid_s)
        slot = cell % CELLS
        if self._cell[slot] != cell:
            self._cell[slot] = cell
            self._sum[slot] = 0.0
            self._count[slot] = 0.0
        known = np.isfinite(row)
        self._sum[slot] += np.where(known, row, 0.0)
        self._count[slot] += known
        self._remember_power(row[:, _POWER], dt_s)
        self._notice_work(frame, now)
        self.at_s = now
        return self._features(cell, now)

    def _features(self, cell: int, now: float) -> Features:
        recent = np.isin(self._cell, np.arange(cell - RECENT_CELLS + 1, cell + 1))
        count = self._count[recent].sum(axis=0)
        with np.errstate(invalid="ignore", divide="ignore"):
            values = self._sum[recent].sum(axis=0) / count
        values[:, _COUNTS] = np.log10(1.0 + self._events(cell))
        held = ((self._cell > cell - CELLS)[:, None] & (self._count.max(axis=2) > 0)).sum(axis=0)
        return Features(now, values, self._ewma.copy(), held >= 2, now - self._changed_s)

    def _events(self, cell: int) -> Floats:
        """Events counted over the whole ring [gpus, counters]; NaN where never counted.
        A count, not a rate: one event is one event, however short the ring."""
        live = self._cell > cell - CELLS
        counted = self._count[live][:, :, _COUNTS].sum(axis=0)
        return np.where(counted > 0, self._sum[live][:, :, _COUNTS].sum(axis=0), np.nan)

    def _row(self, frame: Frame, fresh: Floats, dt_s: float) -> Floats:
        """One frame in feature columns [gpus, features]; counters become increments."""
        if frame.metrics != self._columns:
            self._columns = frame.metrics
            where = {name: i for i, name in enumerate(frame.metrics)}
            self._take = np.array([where.get(f.metric, -1) for f in FEATURES], dtype=np.int64)
        row = np.where(self._take >= 0, fresh[:, np.maximum(self._take, 0)], np.nan)
        clocks = row[:, _CLOCKS]
        row[:, _CLOCKS] = np.where(clocks > 0, clocks, np.nan)  # a sensor that says nothing
        row[:, _LOG] = np.log10(1.0 + np.maximum(row[:, _LOG], 0.0))
        mask = row[:, _THROTTLED]
        known = np.isfinite(mask)
        bits = np.where(known, mask, 0.0).astype(np.int64)
        row[:, _THROTTLED] = np.where(known, (bits & TROUBLE_BITS) != 0, np.nan)
        row[:, _CAPPED] = np.where(known, (bits & POWER_CAP_BIT) != 0, np.nan)
        counters = row[:, _COUNTS]
        step = counters - self._counter
        step[step < 0] = 0.0  # a reset is not an event
        if not dt_s < 2 * CELLS * self.grid_s:
            step[:] = np.where(np.isfinite(counters), 0.0, np.nan)  # after a gap: unknown, not many
        self._counter = np.where(np.isfinite(counters), counters, self._counter)
        row[:, _COUNTS] = np.where(np.isfinite(counters) & ~np.isfinite(step), 0.0, step)
        return row

    def _remember_power(self, power_w: Floats, dt_s: float) -> None:
        weight = 1.0 - np.exp(-max(dt_s, 0.0) / THERMAL_TAU_S) if np.isfinite(dt_s) else 1.0
        start = ~np.isfinite(self._ewma)
        known = np.isfinite(power_w)
        moved = self._ewma + weight * (power_w - self._ewma)
        self._ewma = np.where(known, np.where(start, power_w, moved), self._ewma)

    def _notice_work(self, frame: Frame, now: float) -> None:
        """A change of workload, or a step in memory use, starts a new epoch of that GPU."""
        if frame.workloads is not self._workloads:  # the same tuple while nothing changed
            codes = self._work_codes
            work = np.array(
                [codes.setdefault(w.id if w else "", len(codes) + 1) for w in frame.workloads],
                dtype=np.int64,
            )
            self._changed_s[(self._work > 0) & (work != self._work)] = now
            self._work, self._workloads = work, frame.workloads
        where = {name: i for i, name in enumerate(frame.metrics)}
        if "fb_used_mib" in where:
            used = frame.values[:, where["fb_used_mib"]]
            before = self._fb_used
            step = np.abs(used - before) > np.maximum(1024.0, 0.25 * np.maximum(used, before))
            self._changed_s[step & np.isfinite(before)] = now
            self._fb_used = np.where(np.isfinite(used), used, before)

    def _follow(self, frame: Frame) -> None:
        if frame.gpus is self.gpus:
            return
        old = {gpu.uuid: row for row, gpu in enumerate(self.gpus)}
        source = np.array([old.get(gpu.uuid, -1) for gpu in frame.gpus], dtype=np.int64)
        self._sum = _rows(self._sum, source, axis=1, fill=0.0)
        self._count = _rows(self._count, source, axis=1, fill=0.0)
        self._ewma = _rows(self._ewma, source, axis=0, fill=np.nan)
        self._counter = _rows(self._counter, source, axis=0, fill=np.nan)
        self._changed_s = _rows(self._changed_s, source, axis=0, fill=-np.inf)
        self._fb_used = _rows(self._fb_used, source, axis=0, fill=np.nan)
        work = np.zeros(len(source), dtype=np.int64)
        work[source >= 0] = self._work[source[source >= 0]]
        self._work = work
        self.gpus = frame.gpus


def _rows(array: Floats, source: npt.NDArray[np.int64], *, axis: int, fill: float) -> Floats:
    """`array` with its rows taken from `source` along `axis`; -1 is a new row of `fill`."""
    shape = list(array.shape)
    shape[axis] = len(source)
    out = np.full(shape, fill)
    kept = source >= 0
    if axis == 0:
        out[kept] = array[source[kept]]
    else:
        out[:, kept] = array[:, source[kept]]
    return out
