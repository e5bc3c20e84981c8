"""How far a GPU's response lies from the responses known for its demand.

A `Cohort` holds what normal looks like for one GPU model: the cores of the density clusters
in scaled feature space, and a thermal model. Scoring is numpy alone and vectorised over the
fleet. 1.0 is the edge of normal.

The score of a row is the smallest response distance to any core whose demand is near enough,
in units of the cohort's radius:

    z_i   = ease * (x_i - core_i) / scale_i, clipped to +-clip
    score = sqrt(sum of z_i^2 over response features) / radius

Where no core's demand is near, the work is *novel*: the score is then that of the features
which physics makes independent of demand (temperature excess, throttling, error rates), and
a caller is told so. Contributions are score * z_i^2 / sum(z^2), so they sum to the score.

The thermal model is T = T0 + R * P: a heat sink over its inlet air, with P the power that
it still remembers (first-order lag). R and T0 are those of this GPU where its history tells
them, shrunk towards the cohort's; a prediction far from the powers ever seen is uncertain,
and the excess is reduced by that uncertainty instead of shouting. What all GPUs of a host have in
common is their inlet air and is taken off before anything is judged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from sentinel.core.domain import Bools, Floats, Ints
from sentinel.core.features import (
    ACTIVITY,
    DEMAND,
    FEATURES,
    INDEX,
    PHYSICAL,
    WEIGHT,
)

CLIP: Final = 10.0  # drift in one feature cannot shout louder than this
AIR_C: Final = 6.0  # inlet air of a machine room moves by so much without anything failing
_AIR_GPUS: Final = 4
_IDLE_BELOW: Final = 0.05  # activity below this is none
_CAPPED_CLOCK: Final = 0.5
# standard deviations of a heat sink's slope that count as doubt: of a fleet whose GPUs are given
# work far above all that their history shows, some are always beyond one of them
_DOUBT: Final = 2.0
_BATCH: Final = 2048  # rows scored at once: the working set stays in cache


# what a column tells of a signal: its value now, its mean and its spread over the window
NOW: Final = 0
MEAN: Final = 1
SPREAD: Final = 2


@dataclass(frozen=True, slots=True, eq=False)
class Space:
    """The columns that distances are taken over, each array [columns]: which are demand,
    which are independent of demand by physics, and how much a deviation below or above
    counts (0 = harmless). Column k is `kind[k]` (NOW, MEAN or SPREAD over the window) of
    signal `signal[k]`. A deviation counts up to `clip` units; a score is smoothed with the
    mean of the last `smooth_steps` grid steps (1 = not at all)."""

    names: tuple[str, ...]
    demand: Bools
    physical: Bools
    below: Floats
    above: Floats
    signal: Ints
    kind: Ints
    clip: float = CLIP
    smooth_steps: int = 1

    @property
    def signals(self) -> int:
        """How many signals the columns are made of."""
        return int(self.signal.max()) + 1 if len(self.signal) else 0


def signal_space(
    names: tuple[str, ...],
    demand: Bools | None = None,
    kinds: tuple[int, ...] = (NOW,),
    *,
    clip: float = CLIP,
    smooth_steps: int = 1,
) -> Space:
    """A space of these kinds of columns of each signal, in which all deviations count alike.
    `demand` [signals] says which signals are demand; by default none is."""
    count, ask = len(names), np.zeros(len(names), dtype=bool) if demand is None else demand
    words = {NOW: "{}", MEAN: "{} (mean)", SPREAD: "{} (spread)"}
    ones = np.ones(count * len(kinds))
    return Space(
        tuple(words[kind].format(name) for kind in kinds for name in names),
        np.tile(ask, len(kinds)),
        np.zeros(count * len(kinds), dtype=bool),
        ones,
        ones,
        np.tile(np.arange(count), len(kinds)),
        np.repeat(np.array(kinds, dtype=np.int64), count),
        clip,
        smooth_steps,
    )


GPU_SPACE: Final = Space(
    names=tuple(f.name for f in FEATURES),
    demand=DEMAND,
    physical=np.isin(np.arange(len(FEATURES)), PHYSICAL),
    below=np.array([f.ease[0] for f in FEATURES]),
    above=np.array([f.ease[1] for f in FEATURES]),
    signal=np.arange(len(FEATURES)),
    kind=np.full(len(FEATURES), NOW),
)


@dataclass(frozen=True, slots=True, eq=False)
class Density:
    """What normal looks like in one space. `cores` is float64 [cores, columns], NaN where
    there is no such metric; `clusters` [cores] the cluster of each; `scale` [columns] is one
    unit of distance; `radius` the edge of normal in those units. `reach`, a share of the
    radius, is how far a state lies from the cores before it is one of its own (`adapt.py`);
    `regimes` names each cluster. Values beyond `low` and `high` [columns] count as these. Of
    the cores the first `learnt` are from training (None: all), the others were found in
    operation: these excuse a response, and make no demand a known one."""

    space: Space
    cores: Floats
    clusters: npt.NDArray[np.int64]
    scale: Floats
    radius: float
    demand_radius: float
    reach: float = 1.0
    regimes: tuple[str, ...] = ()
    low: Floats | None = None
    high: Floats | None = None
    learnt: int | None = None

    def bounded(self, columns: Floats) -> Floats:
        """Columns [rows, columns] with what lies beyond all bounds drawn in to them."""
        if self.low is None or self.high is None:
            return columns
        return np.clip(columns, self.low, self.high)


@dataclass(frozen=True, slots=True, eq=False)
class Thermal:
    """T = t0_c + r_c_per_w * P for GPU and memory, axis 0 = (GPU, memory); per known GPU
    [2, gpus] and for a GPU never seen [2]. `p_mean_w`, `r_sd` tell how far to trust it."""

    uuids: tuple[str, ...]
    t0_c: Floats
    r_c_per_w: Floats
    p_mean_w: Floats
    r_sd: Floats
    default_t0_c: Floats
    default_r: Floats
    default_p_mean_w: Floats
    default_r_sd: Floats
    default_t0_sd_c: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Cohort:
    """Normal for one GPU model: how it behaves, and how its heat sinks do."""

    model: str
    density: Density
    thermal: Thermal
    rows: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """`score` [gpus], NaN = not scored; `novel` [gpus] = work never seen before;
    `contribution` [gpus, features] sums to the score; `values` and `expected` [gpus,
    features] are in feature units (temperature columns: the excess)."""

    score: Floats
    novel: Bools
    contribution: Floats
    values: Floats
    expected: Floats
    predicted_c: Floats  # [gpus, 2] temperature expected of the GPU and of its memory
    air_c: Floats  # [gpus] what the GPUs of a host have in common, unlimited; NaN = not known


def empty_scores(gpus: int) -> Scores:
    width = len(FEATURES)
    return Scores(
        np.full(gpus, np.nan),
        np.zeros(gpus, dtype=bool),
        np.zeros((gpus, width)),
        np.full((gpus, width), np.nan),
        np.full((gpus, width), np.nan),
        np.full((gpus, 2), np.nan),
        np.full(gpus, np.nan),
    )


def thermal_excess(
    thermal: Thermal,
    known: npt.NDArray[np.int64],
    power_w: Floats,
    temp_c: Floats,
    host: Ints | None = None,
) -> tuple[Floats, Floats]:
    """Temperature above what the power explains, reduced by the model's own uncertainty.

    `known` [rows] is the GPU's place in the thermal table or -1, `temp_c` [rows, 2]; what all
    GPUs of a `host` [rows] have in common is taken off first: where the air is cooler than it
    was, only doubt about the model may not make a GPU look hot beside its mates.
    Returns (excess_c, predicted_c), both [rows, 2]; NaN where power or temperature is.
    """
    pick, seen = np.maximum(known, 0), np.zeros((len(known), 2), dtype=bool)
    if thermal.t0_c.shape[1]:  # one that was left out of learning is in the table without values
        seen = (known >= 0)[:, None] & np.isfinite(thermal.t0_c[:, pick].T)

    def of(table: Floats, default: Floats) -> Floats:
        if table.shape[1] == 0:
            return np.broadcast_to(default, (len(known), 2))
        return np.where(seen, table[:, pick].T, default)

    mean_w = of(thermal.p_mean_w, thermal.default_p_mean_w)
    away_w = power_w[:, None] - mean_w
    predicted = (
        of(thermal.t0_c, thermal.default_t0_c)
        + of(thermal.r_c_per_w, thermal.default_r) * power_w[:, None]
    )
    slack = _DOUBT * of(thermal.r_sd, thermal.default_r_sd) * np.abs(away_w)
    slack = slack + np.where(seen, 0.0, thermal.default_t0_sd_c)
    raw = temp_c - predicted
    if host is not None:
        shift = np.stack([shared_shift(raw[:, k], host) for k in range(2)], axis=1)
        # cold air is believed no further than the model is sure of it: where half of a host
        # rests at powers never learnt, the other half is not hot for that
        sure = np.sign(raw) * np.maximum(np.abs(raw) - slack, 0.0)
        credible = np.stack([shared_shift(sure[:, k], host) for k in range(2)], axis=1)
        shift = np.where(shift < 0.0, np.minimum(np.maximum(shift, credible), 0.0), shift)
        raw, predicted = raw - shift, predicted + shift
    excess: Floats = np.sign(raw) * np.maximum(np.abs(raw) - slack, 0.0)
    return excess, predicted


def asleep(density: Density, values: Floats) -> None:
    """Blanks, in place, what a GPU without work may do as it likes: draw little or much power
    for nothing, and lower its clocks by more than half. A clock a little too low is no sleep.
    """
    busiest = np.max(np.nan_to_num(values[:, ACTIVITY], nan=-np.inf), axis=1)
    idle = (busiest > -np.inf) & (busiest < _IDLE_BELOW)
    values[idle, INDEX["power"]] = np.nan
    for clock in (INDEX["sm_clock"], INDEX["mem_clock"]):
        known = density.cores[:, clock][np.isfinite(density.cores[:, clock])]
        if len(known):
            values[idle & (values[:, clock] < 0.5 * known.max()), clock] = np.nan


def excuses(density: Density, values: Floats) -> Floats:
    """How much of each deviation counts [gpus, features], 1 = all: at its power cap a GPU's
    clock depends on what each watt has to do, and a changed driver or load moves it. Without
    profiling counters nothing tells how heavy the work is, and power is no answer to it:
    utilisation counts any kernel, large or small."""
    out = np.ones_like(values)
    blind = ~np.isfinite(values[:, WEIGHT]).any(axis=1)
    out[blind, INDEX["power"]] = 0.0
    capped, power = values[:, INDEX["power_capped"]], values[:, INDEX["power"]]
    seen = density.cores[:, INDEX["power"]][np.isfinite(density.cores[:, INDEX["power"]])]
    at_cap = capped > 0.5
    if len(seen):  # without the reasons, as with the default list of fields: by the watts
        at_cap |= np.isnan(capped) & (power > 0.95 * seen.max())
    out[at_cap, INDEX["sm_clock"]] = _CAPPED_CLOCK
    return out


def host_median(excess_c: Floats, host: Ints) -> Floats:
    """The median excess over the GPUs of one model on each GPU's host [gpus]; NaN with too few
    GPUs to tell the air from the one that fails."""
    order = np.lexsort((excess_c, host))  # NaN sorts last within its host
    finite = np.bincount(host, np.isfinite(excess_c)).astype(np.int64)
    total = np.bincount(host)
    start = np.cumsum(total) - total
    ranked = excess_c[order]
    last = len(ranked) - 1
    low = ranked[np.minimum(start + np.maximum(finite - 1, 0) // 2, last)]
    high = ranked[np.minimum(start + finite // 2, last)]
    return np.where(finite >= _AIR_GPUS, 0.5 * (low + high), np.nan)[host]


def shared_shift(excess_c: Floats, host: Ints) -> Floats:
    """What all GPUs of one host have in common [gpus]: their inlet air, not their health.

    The median over a host's GPUs of one model, up to `AIR_C` either way; 0 with too few GPUs
    to tell. A host that runs hotter than that still shows."""
    return np.clip(np.nan_to_num(host_median(excess_c, host)), -AIR_C, AIR_C)


def score_rows(
    density: Density, values: Floats, softer: Floats | None = None
) -> tuple[Floats, Bools, Floats, Floats]:
    """(score [n], novel [n], contribution [n, f], expected [n, f]) of feature rows [n, f].

    `softer` [n, f] is the share of each deviation that counts; all of it by default.
    """
    if softer is None:
        softer = np.ones_like(values)
    n = len(values)
    score = np.full(n, np.nan)
    novel = np.zeros(n, dtype=bool)
    contribution = np.zeros_like(values)
    expected = np.full_like(values, np.nan)
    for start in range(0, n, _BATCH):
        part = slice(start, start + _BATCH)
        score[part], novel[part], contribution[part], expected[part] = _score_batch(
            density, values[part], softer[part]
        )
    return score, novel, contribution, expected


def _score_batch(
    density: Density, values: Floats, softer: Floats
) -> tuple[Floats, Bools, Floats, Floats]:
    space, cores = density.space, density.cores
    present = np.isfinite(cores).any(axis=0)
    response = ~space.demand & present
    demand2 = distance2(density, values, cores, space.demand & present)
    response2 = distance2(density, values, cores, response, softer)
    far = demand2 > density.demand_radius**2
    best = np.argmin(np.where(far, np.inf, response2), axis=1)
    novel: Bools = np.all(far[:, : density.learnt], axis=1)
    if novel.any():
        columns = response & space.physical
        physical2 = distance2(density, values[novel], cores, columns, softer[novel])
        best[novel] = np.argmin(physical2[:, : density.learnt], axis=1)
    expected = cores[best]
    z = (values - expected) / density.scale
    z = np.clip(z * softer * np.where(z > 0, space.above, space.below), -space.clip, space.clip)
    counted = np.where(novel[:, None], response & space.physical, response)
    z = np.where(counted & np.isfinite(z), z, 0.0)
    total = (z * z).sum(axis=1)
    answered = np.any(np.isfinite(values) & counted, axis=1)
    score = np.where(answered, np.sqrt(total) / density.radius, np.nan)
    share = np.divide(z * z, total[:, None], out=np.zeros_like(z), where=total[:, None] > 0)
    return score, novel, np.nan_to_num(score)[:, None] * share, expected


def distance2(
    density: Density,
    values: Floats,
    cores: Floats,
    columns: Bools,
    softer: Floats | None = None,
) -> Floats:
    """Clipped, eased squared distance [rows, cores] over the chosen columns. A value that a
    row or a core does not have says nothing: it adds no distance. Each row's result is the
    same to the last bit whichever rows it is computed with."""
    total = np.zeros((len(values), len(cores)), dtype=np.float32)
    if not total.size:
        return total.astype(np.float64)
    chosen, space = np.flatnonzero(columns), density.space
    # about one core: large levels (bytes, MHz) lose nothing in float32
    about, scale = np.nan_to_num(cores[0, chosen]), density.scale[chosen]
    rows = np.ascontiguousarray(((values[:, chosen] - about) / scale).T, dtype=np.float32)
    core = np.ascontiguousarray(((cores[:, chosen] - about) / scale).T, dtype=np.float32)
    gaps: Bools = np.any(np.isnan(rows), axis=1) | np.any(np.isnan(core), axis=1)
    below, above = space.below[chosen].astype(np.float32), space.above[chosen].astype(np.float32)
    eased: Bools = (below != 1.0) | (above != 1.0)
    part = None if softer is None else softer[:, chosen].astype(np.float32).T
    most, work = np.float32(space.clip**2), np.empty_like(total)
    for f in range(len(chosen)):
        np.subtract(rows[f, :, None], core[f], out=work)
        if eased[f]:
            work *= np.where(work > 0, above[f], below[f])
        if part is not None and (part[f] != 1.0).any():
            work *= part[f, :, None]
        np.multiply(work, work, out=work)
        np.minimum(work, most, out=work)
        if gaps[f]:
            np.nan_to_num(work, copy=False, nan=0.0)
        np.add(total, work, out=total)
    return total.astype(np.float64)
