"""How far each GPU lies from its mates, less what was so earlier in its job.

    x         one signal of one GPU, smoothed (clocks, power and activity as logarithms)
    r = x - median of the group          pipeline stages and chassis slots differ when healthy
    d = (r - earlier r) - median of the same over the group
    c = x - earlier x                     the GPU's own change; its median is the group's pace

What was so earlier is a mean over the job epoch that turns slow as it grows old, and that does
not learn while the GPU deviates, so that a fault does not become its own excuse. The second
median takes off what a group that gains or loses a member shifts for all of them. An epoch ends
with a change of work, of mates, or a step in memory use.

Arrays are [signals, gpus]; NaN says nothing is known. No loop over GPUs, except to name the
groups when the roster or the labels change. Says how far, never whether that is bad.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from sentinel.core.domain import Bools, Floats, Frame, Gpu, Mates, Presence
from sentinel.core.features import ACTIVITY, INDEX, Features
from sentinel.core.grouping import Grouping
from sentinel.core.jobs import mates_of

OTHERS: Final = 3  # fewer mates say nothing
SIGNALS: Final = (
    "sm_clock",
    "mem_clock",
    "power",
    "temp_excess",
    "mem_temp_excess",
    "throttled",
    "sm_active",
    "tensor_active",
    "dram_active",
    "nvlink_traffic",
)
CLOCK, MEM_CLOCK, POWER, HEAT, MEM_HEAT, THROTTLED, SM, TENSOR, DRAM, NVLINK = range(len(SIGNALS))
ACT: Final = [SM, TENSOR, DRAM]
_LOG: Final = [CLOCK, MEM_CLOCK, POWER, SM, TENSOR, DRAM]
_PACED: Final = [CLOCK, POWER, SM, TENSOR, DRAM, NVLINK]  # what the work moves on all alike
_ACT_METRICS: Final = ("sm_active_ratio", "tensor_active_ratio", "dram_active_ratio")
_COLUMN: Final = [INDEX[name] for name in SIGNALS]
_LEAST: Final = 0.02  # activity below this is not told apart
# The smallest distance that means something to a person, the edge of normal: logarithms (0.05
# is 5 %), °C, and the share of time. Where the spread among the mates or within the GPU's own
# past is more, so many times that: of a thousand healthy mates the oddest is odder than of eight.
FLOOR: Final = np.array([0.05, 0.05, 0.10, 8.0, 9.0, 0.5, 0.05, 0.05, 0.05, 0.2])
_SPREADS: Final = 4.0
_SPREADS_PER_DOUBLING: Final = 0.25  # of the group, beyond 8
_MAD_TO_SD: Final = 1.4826
_MEAN_TO_SD: Final = 1.2533
_CAPPED_CLOCK: Final = 1.4  # at its power cap a clock hangs on what each watt has to do
_C_PER_W: Final = 0.07  # of a usual heat sink; only the power's *change* is put down to it
_C_PER_W_SLACK: Final = 0.04  # and so far heat sinks differ from it
_AIR_C: Final = 6.0  # what all GPUs of a node share, up to this, is their inlet air
_WORKS: Final = 0.05  # activity below this is none
# Single samples are noisy, those of activity more so; at much longer ticks nothing changes.
_SMOOTH_S: Final = np.array([20.0] * 6 + [45.0] * 4)[:, None]
_BRIEF_S: Final = 10.0  # activity of this very moment, less the noise of ticks of a second
_STEADY_S: Final = 60.0  # over so long a slow job is slow at most moments
_BRIEF: Final = (-0.8, -0.02)  # as a logarithm: a stop is deeper, and a job that goes on is not
LEARN_S: Final = 60.0  # and at least so many ticks, before "earlier" means anything:
LEARN_TICKS: Final = 8.0
_STRANGERS: Final = 5.0  # so much longer where nothing but the model is shared
_SLOW_S: Final = 6 * 3600.0  # then it follows this slowly
_PACE_SLOW_S: Final = 7200.0  # a job that goes slower from now on: so long until that is normal
_PACE_FAST_S: Final = 600.0  # one that goes faster
_NOISE_S: Final = 3600.0  # a GPU's own restlessness is learnt over so long
_NOISE_MOST: Final = 0.6  # of the floor: more hides nothing, or a slow fault would widen its edge
_STILL: Final = 0.03  # pace: less is no change
_QUIET: Final = 0.5  # of the edge: beyond it the past does not learn
_GAP_TICKS: Final = 4.0  # a longer silence starts the smoothing anew


@dataclass(frozen=True, slots=True, eq=False)
class Residuals:
    """One tick. `x`, `d`, `c`, `edge` are [signals, gpus]; `absolute` is x less the group's
    median, `clock_spread` [gpus] the robust spread of that over the group for the SM clock;
    `pace` [signals, gpus] is the group's median own change, 0 for signals that the work does not
    move on all alike; `steadily` [gpus] is the share of recent moments at which the group's
    activity was low and had not stopped. `valid` [gpus]: present, at work and settled; `known`
    [signals, gpus]: what was so earlier is known; `others` [gpus]: valid mates."""

    at_s: float
    dt_s: float
    x: Floats
    absolute: Floats
    d: Floats
    c: Floats
    edge: Floats
    clock_spread: Floats
    pace: Floats
    steadily: Floats
    valid: Bools
    known: Bools
    others: Floats
    capped: Floats
    util: Floats


@dataclass(slots=True, eq=False)
class Roster:
    """Who is compared with whom; made anew when the roster or the labels change. `first`
    [gpus]: with mates of its job or service, and not only with others of its model; `in_step`
    [gpus]: and those wait for one another."""

    gpus: tuple[Gpu, ...] = ()
    source: object = None
    mates: tuple[Mates | None, ...] = ()
    groups: Grouping = field(default_factory=lambda: Grouping(()))
    jobs: Grouping = field(default_factory=lambda: Grouping(()))  # all roles of a job together
    nodes: Grouping = field(default_factory=lambda: Grouping(()))
    models: Grouping = field(default_factory=lambda: Grouping(()))
    first: Bools = field(default_factory=lambda: np.zeros(0, dtype=bool))
    in_step: Bools = field(default_factory=lambda: np.zeros(0, dtype=bool))


def roster_of(frame: Frame) -> Roster:
    """Mates of the same job and role and model first; where those are too few, the GPUs of the
    same model that have no better mates either."""
    if frame.mates is not None:
        mates = frame.mates
    else:
        mates = tuple(mates_of({}, work) for work in frame.workloads)
    keys = [
        (m.group, m.tenant, m.role, gpu.model) if m is not None else None
        for m, gpu in zip(mates, frame.gpus, strict=True)
    ]
    own = Grouping(keys)
    enough = np.zeros(len(keys), dtype=bool)
    named = own.code >= 0
    enough[named] = own.size[own.code[named]] > OTHERS
    chosen = [
        key if many else ("", gpu.model)
        for key, many, gpu in zip(keys, enough.tolist(), frame.gpus, strict=True)
    ]
    in_step = np.array([m is not None and m.in_step for m in mates], dtype=bool)
    return Roster(
        gpus=frame.gpus,
        source=_source(frame),
        mates=mates,
        groups=Grouping(chosen),
        jobs=Grouping([(m.group, m.tenant) if m is not None else None for m in mates]),
        nodes=Grouping([(gpu.node, gpu.model) for gpu in frame.gpus]),
        models=Grouping([gpu.model for gpu in frame.gpus]),
        first=enough,
        in_step=enough & in_step,
    )


def _source(frame: Frame) -> object:
    return frame.mates if frame.mates is not None else frame.workloads


class Past:
    """What each GPU was like earlier in its job. Owned by the tick, follows GPUs by UUID."""

    def __init__(self) -> None:
        self.roster = Roster()
        self._at_s = -np.inf
        self._key: dict[str, object] = {}
        self._changed_s = np.zeros(0)
        # smoothed now, earlier residual, earlier level, seconds learnt, own restlessness
        self._table = np.zeros((5, len(SIGNALS), 0))
        self._brief = np.zeros((len(ACT), 0))
        self._steadily = np.zeros(0)

    def look(self, frame: Frame, features: Features, settle_s: float) -> Residuals:
        """The residuals of this tick, from which the past has not learnt yet (`learn`)."""
        self._follow(frame)
        dt_s = frame.at_s - self._at_s
        tick_s = dt_s if np.isfinite(dt_s) and dt_s > 0 else 0.0
        self._at_s = frame.at_s
        changed_s = features.at_s - features.settled_s
        self._table[:, :, changed_s > self._changed_s] = np.nan
        self._changed_s = changed_s
        busiest = np.max(np.nan_to_num(features.values[:, ACTIVITY], nan=-np.inf), axis=1)
        valid = (
            (frame.presence == Presence.PRESENT)
            & features.ready
            & (features.settled_s >= settle_s)
            & (busiest >= _WORKS)
        )
        tick_s = min(tick_s, 60.0 * _GAP_TICKS)
        self._notice_pace(frame, valid, tick_s)
        return self._residuals(features, valid, tick_s)

    def learn(self, seen: Residuals, deviates: Bools, held_up: Bools) -> None:
        """Takes this tick into the past, but for GPUs that deviate [gpus]. A job that is held up
        by one of its GPUs [gpus] does not get used to its pace."""
        _, earlier, level, learnt_s, noise = self._table
        residual = seen.absolute
        known = np.isfinite(residual)
        new = known & ~np.isfinite(learnt_s)
        earlier[new], level[new] = residual[new], seen.x[new]
        learnt_s[new], noise[new] = 0.0, 0.0
        with np.errstate(invalid="ignore"):
            quiet = np.isfinite(seen.d) & (np.abs(seen.d) < _QUIET * seen.edge)
            calm = known & ~deviates & (quiet | ~seen.known)
        learnt_s[known] += seen.dt_s
        young = seen.dt_s / np.maximum(learnt_s, max(seen.dt_s, 1e-9))
        slow = np.maximum(young, _rate(seen.dt_s, _SLOW_S))
        step = np.nan_to_num(_step(seen, residual, earlier))
        earlier[calm] += (slow * step)[calm]
        pace = np.nan_to_num(seen.pace)
        still = np.abs(pace) < _STILL
        rate = np.where(still, slow, _rate(seen.dt_s, _PACE_SLOW_S))
        rate = np.where(pace >= _STILL, _rate(seen.dt_s, _PACE_FAST_S), rate)
        rate = np.where(held_up & seen.known, 0.0, np.where(seen.known, rate, slow))
        level[calm] += (rate * np.nan_to_num(seen.x - level))[calm]
        # while young also of what is not quiet, or restlessness would pass for a fault
        restless = np.maximum(young, _rate(seen.dt_s, _NOISE_S))
        size = np.minimum(np.abs(step), np.where(seen.known, seen.edge, np.inf))
        youth_s = 2.0 * _STRANGERS * max(LEARN_S, LEARN_TICKS * seen.dt_s)
        counted = calm | (known & ~deviates & (learnt_s < youth_s))
        noise[counted] += (restless * (size - noise))[counted]

    def _notice_pace(self, frame: Frame, valid: Bools, tick_s: float) -> None:
        """Whether the group is slow at this very moment, or stands still now and then: windows
        of minutes cannot tell the one from the other."""
        where = {name: i for i, name in enumerate(frame.metrics)}
        now = np.full_like(self._brief, np.nan)
        for k, name in enumerate(_ACT_METRICS):
            if name in where:
                now[k] = np.log(np.maximum(frame.values[:, where[name]], _LEAST))
        now[:, ~valid] = np.nan
        kept = np.isfinite(self._brief) & np.isfinite(now)
        rate = _rate(tick_s, _BRIEF_S)
        self._brief = np.where(kept, self._brief + rate * (now - self._brief), now)
        groups = self.roster.groups
        pace = groups.of_rows(groups.median(self._brief - self._table[2][ACT])[0])
        with np.errstate(invalid="ignore"):
            low = ((pace >= _BRIEF[0]) & (pace <= _BRIEF[1])).any(axis=0)
        self._steadily += _rate(tick_s, _STEADY_S) * (low - self._steadily)

    def _residuals(self, features: Features, valid: Bools, tick_s: float) -> Residuals:
        smooth, earlier, level, learnt_s, noise = self._table
        groups, power_w = self.roster.groups, features.power_ewma_w
        x = np.where(valid, _signals(features), np.nan)
        capped = features.values[:, INDEX["power_capped"]]
        # out of step each GPU has its own load, and with it its own place under the cap
        x[CLOCK, ~self.roster.in_step & (np.nan_to_num(capped) > 0.5)] = np.nan
        kept = np.isfinite(smooth) & np.isfinite(x)
        x = np.where(kept, smooth - np.expm1(-tick_s / _SMOOTH_S) * (x - smooth), x)
        self._table[0] = x
        middle, count = groups.median(x)
        absolute = x - groups.of_rows(middle)
        need_s = max(LEARN_S, LEARN_TICKS * tick_s)
        ready = learnt_s >= np.where(self.roster.first, need_s, _STRANGERS * need_s)
        excess = np.where(ready, absolute - earlier, np.nan)
        centre, _ = groups.median(excess)
        d = excess - groups.of_rows(centre)
        c = np.where(ready, x - level, np.nan)
        pace = np.zeros_like(c)
        pace[_PACED] = groups.of_rows(groups.median(c[_PACED])[0])
        self._take_off_heat(d, level, power_w)
        spread = _MAD_TO_SD * groups.of_rows(groups.median(np.abs(d))[0])
        floor = np.broadcast_to(FLOOR[:, None], d.shape).copy()
        floor[CLOCK] *= np.where(np.nan_to_num(capped) > 0.5, _CAPPED_CLOCK, 1.0)
        own = _MEAN_TO_SD * np.minimum(np.nan_to_num(noise), _NOISE_MOST * FLOOR[:, None])
        others = groups.of_rows(count.max(axis=0, keepdims=True).astype(np.float64))[0] - 1.0
        doublings = np.log2(np.maximum(np.nan_to_num(others) + 1.0, 8.0) / 8.0)
        times = _SPREADS + _SPREADS_PER_DOUBLING * doublings
        edge = np.maximum(floor, times * np.maximum(np.nan_to_num(spread), own))
        return Residuals(
            at_s=features.at_s,
            dt_s=tick_s,
            x=x,
            absolute=absolute,
            d=d,
            c=c,
            edge=edge,
            clock_spread=_MAD_TO_SD
            * groups.of_rows(groups.median(np.abs(absolute[[CLOCK]]))[0])[0],
            pace=pace,
            steadily=self._steadily,
            valid=valid,
            known=ready & np.isfinite(x),
            others=np.where(valid, np.nan_to_num(others, nan=0.0), 0.0),
            capped=capped,
            util=features.values[:, INDEX["gpu_util"]],
        )

    def _take_off_heat(self, d: Floats, level: Floats, power_w: Floats) -> None:
        """Less what the inlet air of the node explains, and what a changed power may."""
        heat = d[[HEAT, MEM_HEAT]]
        shared, count = self.roster.nodes.median(heat)
        shared = np.where(count > OTHERS, np.clip(shared, -_AIR_C, _AIR_C), 0.0)
        heat = heat - np.nan_to_num(self.roster.nodes.of_rows(shared))
        slack = _C_PER_W_SLACK * np.abs(np.nan_to_num(power_w - np.exp(level[POWER])))
        d[[HEAT, MEM_HEAT]] = np.sign(heat) * np.maximum(np.abs(heat) - slack, 0.0)

    def _follow(self, frame: Frame) -> None:
        before = self.roster
        if frame.gpus is before.gpus and _source(frame) is before.source:
            return
        self.roster = roster_of(frame)
        rows = {gpu.uuid: row for row, gpu in enumerate(before.gpus)}
        source = np.array([rows.get(gpu.uuid, -1) for gpu in frame.gpus], dtype=np.int64)
        code, keys = self.roster.groups.code.tolist(), self.roster.groups.keys
        key = {gpu.uuid: keys[code[row]] for row, gpu in enumerate(frame.gpus)}
        same = np.array([self._key.get(gpu.uuid) == key[gpu.uuid] for gpu in frame.gpus], bool)
        table = np.full((*self._table.shape[:2], len(source)), np.nan)
        kept = np.flatnonzero((source >= 0) & same)
        table[:, :, kept] = self._table[:, :, source[kept]]
        changed_s = np.full(len(source), -np.inf)
        changed_s[source >= 0] = self._changed_s[source[source >= 0]]
        self._table, self._changed_s, self._key = table, changed_s, key
        brief, steadily = np.full((len(ACT), len(source)), np.nan), np.zeros(len(source))
        brief[:, kept], steadily[kept] = self._brief[:, source[kept]], self._steadily[source[kept]]
        self._brief, self._steadily = brief, steadily


def _step(seen: Residuals, residual: Floats, earlier: Floats) -> Floats:
    """What the earlier residual lacks of today's; before it is known, all of it."""
    return np.where(np.isfinite(seen.d), seen.d, residual - earlier)


def _signals(features: Features) -> Floats:
    """[signals, gpus] of the features; temperatures less what the recent power explains."""
    x = features.values[:, _COLUMN].T.copy()
    x[[SM, TENSOR, DRAM]] = np.maximum(x[[SM, TENSOR, DRAM]], _LEAST)
    x[POWER] = np.maximum(x[POWER], 1.0)
    with np.errstate(invalid="ignore"):
        x[_LOG] = np.log(x[_LOG])
    warmth = _C_PER_W * np.nan_to_num(features.power_ewma_w)
    x[[HEAT, MEM_HEAT]] -= warmth
    x[NVLINK] *= np.log(10.0)
    return x


def _rate(dt_s: float, tau_s: float) -> float:
    return float(-np.expm1(-dt_s / tau_s))
