"""GPUs that must not be learnt as normal: slower than all their mates the whole time.

A GPU that was slow all through the learning window would teach that slow is normal for it. It is
found by comparison with the other GPUs of its model: at work and below its power cap, their
clocks are alike, so one whose median lies far below theirs is left out and named. Where the
other GPUs of its own node are as low, it is a setting, and nobody is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from sentinel.core.domain import Bools, Floats, Ints
from sentinel.core.features import ACTIVITY, INDEX

_WORKS: Final = 0.3  # activity from which on a clock is at its full height
_ROWS: Final = 10  # of one GPU at work; fewer say nothing
_GPUS: Final = 4  # fewer mates say nothing
_LOW: Final = 0.06  # of the clock: beyond what healthy chips of one model differ by
_SPREADS: Final = 6.0  # and so many robust spreads of the mates' own medians
_NEAR_CAP: Final = 0.95  # of the highest power: the clock is the cap's, where no reason is told
_MOST: Final = 0.1  # of the GPUs; more are a kind of their own, not suspects


@dataclass(frozen=True, slots=True)
class Suspect:
    """A GPU (a place in the rows' `uuids`) and its clock beside its mates'."""

    gpu: int
    clock_mhz: float
    mates_mhz: float

    def text(self, uuid: str, node: str) -> str:
        """Why it was left out, for a person."""
        return (
            f"{uuid} on {node}: suspect, not learnt as normal: its SM clock at work was "
            f"{self.clock_mhz:.0f} MHz all the time, its mates' {self.mates_mhz:.0f} MHz; test it"
        )


def suspects(values: Floats, gpu: Ints, nodes: tuple[str, ...]) -> list[Suspect]:
    """The suspects among GPUs of one model. `values` is [rows, features], `gpu` [rows] indexes
    `nodes` [gpus]."""
    clock = values[:, INDEX["sm_clock"]]
    own = _medians(clock, gpu, _at_full_clock(values), len(nodes))
    known = np.isfinite(own)
    if known.sum() <= _GPUS:
        return []
    typical = float(np.median(own[known]))
    spread = 1.4826 * float(np.median(np.abs(own[known] - typical)))
    low = known & (own < typical - max(_LOW * typical, _SPREADS * spread))
    if not low.any() or low.sum() > max(1.0, _MOST * known.sum()):
        return []
    node = np.unique(np.array(nodes), return_inverse=True)[1]
    out = []
    for k in map(int, np.flatnonzero(low)):
        mates = own[(node == node[k]) & known & (np.arange(len(own)) != k)]
        beside = float(np.median(mates)) if len(mates) else typical
        if own[k] < (1.0 - _LOW) * beside:
            out.append(Suspect(k, float(own[k]), beside))
    return out


def _at_full_clock(values: Floats) -> Bools:
    with np.errstate(invalid="ignore"):
        busy = np.nan_to_num(values[:, ACTIVITY], nan=0.0).max(axis=1) >= _WORKS
        capped, power = values[:, INDEX["power_capped"]], values[:, INDEX["power"]]
        watts = power[np.isfinite(power)]
        near = power > _NEAR_CAP * (np.quantile(watts, 0.99) if len(watts) else np.inf)
        free = np.where(np.isfinite(capped), capped < 0.05, ~near)
    use: Bools = busy & free & np.isfinite(values[:, INDEX["sm_clock"]])
    return use


def _medians(clock: Floats, gpu: Ints, use: Bools, gpus: int) -> Floats:
    """The median of each GPU's used rows [gpus], NaN where there are too few."""
    order = np.lexsort((clock[use], gpu[use]))
    ranked, count = clock[use][order], np.bincount(gpu[use], minlength=gpus)
    start = np.cumsum(count) - count
    out = np.full(gpus, np.nan)
    enough = count >= _ROWS
    out[enough] = ranked[(start + count // 2)[enough]]
    return out
