"""How often normal time reaches which score: the rate that the budget is kept by.

Samples of one GPU say nearly the same for minutes, and all GPUs of a job say it together, so
nothing is counted sample by sample. Held-out normal time becomes incidents first, as the
daemon would see them: the score that lasted for `deviant_for_s`, its runs over a level, runs
of one GPU that follow closely taken as one, and those of one host or job that begin together
taken as one (declustering, Leadbetter et al. 1983). Of each only the height counts.

How often a height is passed is then read off three ways, and the most pessimistic is kept:

- the count itself plus one, over all incidents seen (the conformal bound: exchangeable
  incidents alone are assumed), as far as any were seen;
- an exponential tail over the level, which exceedances of light-tailed scores follow;
- a generalised Pareto tail (Pickands 1975), by probability-weighted moments (Hosking and
  Wallis 1987), where it is heavier.

Beyond the highest incident seen no count can promise anything, and the tails alone speak.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from sentinel.core.budget import EDGE, TOGETHER_S, WEEK_S, Calibration, Expected
from sentinel.core.domain import Bools, Floats, Ints
from sentinel.core.policy import Budget

_ENOUGH: Final = 30  # incidents that a tail is fitted to, if there are levels that have so many
_FEWEST: Final = 3  # with fewer the time was too short, or there was no load in it
# what is believed of a tail before any incident is seen: a tenth of the edge, as three would say
_PRIOR_MEAN, _PRIOR_N = 0.1, 3
_HEAVIEST: Final = 0.5  # a Pareto shape from here on has no variance: nothing can be promised
_LEVELS: Final = (0.50, 0.70, 0.80, 0.90, 0.95, 0.98, 0.99, 0.995, 0.998)  # shares of the time
_TABLE: Final = tuple(round(0.05 * i, 2) for i in range(10, 101))  # 0.5 to 5.0
_SHAPE_SD: Final = 0.2  # scores are bounded, so their tails are rarely far from exponential
_TINY: Final = 1e-6  # a week: rates below this are written down as this
_Z95: Final = 1.96


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """Held-out normal time of one cohort, whole GPUs of it: `score` [n] (NaN: not judged) at
    `at_s` [n] of GPU `gpu` [n] on `node` [n] at `work` [n] (-1: none), codes that are unique
    over all cohorts. A row stands for `spacing_s`; `stands_for` is how many GPUs of the
    cluster each GPU here speaks for."""

    score: Floats
    at_s: Floats
    gpu: Ints
    node: Ints
    work: Ints
    spacing_s: float
    stands_for: float = 1.0
    names: Mapping[int, str] = field(default_factory=dict)  # of the GPUs, by code


@dataclass(frozen=True, slots=True, eq=False)
class Heights:
    """Declustered incidents over `level`: their highest lasting score [n], how many incidents
    of the cluster each stands for [n], and where the highest of all was."""

    level: float
    score: Floats
    weight: Floats
    highest: str = ""  # which GPU, and when


@dataclass(frozen=True, slots=True)
class Tail:
    """P(height > s | height > level), exponential and Pareto; `n` incidents it rests on, and
    `raw_shape` the Pareto shape as they alone would have it."""

    level: float
    mean: float
    shape: float
    raw_shape: float
    n: int

    def beyond(self, score: Floats) -> Floats:
        """The larger of both tails [n]."""
        over = np.maximum(score - self.level, 0.0)
        out: Floats = np.exp(-over / self.mean)
        if self.shape > 0.0:
            scale = self.mean * (1.0 - self.shape)
            pareto = (1.0 + self.shape * over / scale) ** (-1.0 / self.shape)
            out = np.maximum(out, pareto)
        return out


def calibrate(
    series: Sequence[Series],
    *,
    gpus: int,
    budget: Budget,
    deviant_for_s: float,
    certify_gpu_days: float,
) -> Calibration:
    """What a week of normal time brings to a cluster of `gpus`, and the scores that keep the
    budget. Not certified, with the reason, where too little time or no usable tail is there;
    certified scores are never below the edge of normal and `budget.page_score`."""
    days = sum(float(np.isfinite(s.score).sum()) * s.spacing_s for s in series) / 86_400.0
    lasting = [lasting_score(s, deviant_for_s) for s in series]
    found = _best_level(series, lasting, deviant_for_s)
    tail = fit_tail(found) if found is not None else None
    why = _why_not(days, certify_gpu_days, found, tail)
    table: tuple[Expected, ...] = ()
    if found is not None and tail is not None:
        seen_s = sum(
            float(np.isfinite(held).sum()) * s.spacing_s * s.stands_for
            for s, held in zip(series, lasting, strict=True)
        )
        table = _table(found, tail, seen_s / WEEK_S / max(gpus, 1))
    rough = Calibration(table=table)
    counts = bool(table) and not why  # what is not certified raises nothing
    return Calibration(
        gpu_days=days,
        certified=not why,
        ticket_score=max(EDGE, rough.score_for(budget.tickets_per_week)) if counts else EDGE,
        page_score=max(budget.page_score, rough.score_for(budget.pages_per_week))
        if counts
        else budget.page_score,
        why=why,
        gpus=gpus,
        certify_gpu_days=certify_gpu_days,
        incidents=len(found.score) if found is not None else 0,
        table=table,
    )


def _why_not(days: float, needed: float, found: Heights | None, tail: Tail | None) -> str:
    if needed == 0.0:  # the site has chosen to trust its baseline without proof
        return ""
    if days < needed:
        return f"it rests on {days:.3g} of the {needed:g} GPU-days that certify it"
    if found is None or tail is None:
        return f"normal time shows fewer than {_FEWEST} separate deviations to judge others by"
    if tail.raw_shape > _HEAVIEST:
        return (
            "the deviations of normal time have no regular tail, one of them may be a fault: "
            f"{found.highest}"
        )
    return ""


# ---- incidents ----------------------------------------------------------------------


def heights(series: Sequence[Series], level: float, deviant_for_s: float) -> Heights:
    """The declustered incidents over `level` in all series together."""
    lasting = [lasting_score(s, deviant_for_s) for s in series]
    return _heights(series, lasting, level, deviant_for_s)


def lasting_score(series: Series, deviant_for_s: float) -> Floats:
    """Per row, the lowest score of the `deviant_for_s` up to it [n]: what lasted so long. NaN
    where the GPU's series does not reach back so far without a gap."""
    order = np.lexsort((series.at_s, series.gpu))
    score = series.score[order].astype(np.float64)
    gap_s = np.diff(series.at_s[order], prepend=-np.inf)
    new = (np.diff(series.gpu[order], prepend=-1) != 0) | (gap_s > 1.5 * series.spacing_s)
    place = np.arange(len(order))
    start = np.maximum.accumulate(np.where(new, place, 0))
    rows = int(deviant_for_s / series.spacing_s + 0.1) + 1  # n + 1 ticks span n intervals
    held, width = score.copy(), 1
    while width < rows:  # minimum over a window that doubles, then over the rest of it
        step = min(width, rows - width)
        moved = np.concatenate([np.full(step, np.nan), held[: len(held) - step]])
        held = np.minimum(held, moved)  # NaN wins: what is not known has not lasted
        width += step
    held[place - start < rows - 1] = np.nan
    out = np.empty_like(held)
    out[order] = held
    return out


def _heights(
    series: Sequence[Series], lasting: Sequence[Floats], level: float, deviant_for_s: float
) -> Heights:
    runs = [_runs(s, held, level) for s, held in zip(series, lasting, strict=True)]
    start, end, gpu, node, work, height = (
        np.concatenate([run[k] for run in runs]) for k in range(6)
    )
    weight = np.concatenate(
        [
            np.full(len(run[0]), s.stands_for * max(1.0, s.spacing_s / deviant_for_s))
            for s, run in zip(series, runs, strict=True)
        ]
    )  # rows further apart than a deviation lasts miss as many of them
    if not len(start):
        return Heights(level, height, weight)
    edges = [
        _same(gpu, start, end, np.ones(len(gpu), dtype=bool), by_end=True),
        _same(node, start, end, node >= 0, by_end=False),
        _same(work, start, end, work >= 0, by_end=False),
    ]
    a, b = (np.concatenate([e[k] for e in edges]) for k in range(2))
    graph = coo_array((np.ones(len(a)), (a, b)), shape=(len(start), len(start)))
    _, group = connected_components(graph, directed=False)
    count = int(group.max()) + 1
    top = np.full(count, -np.inf)
    np.maximum.at(top, group, height)
    stands = np.zeros(count)
    np.maximum.at(stands, group, weight)
    worst = int(np.argmax(height))
    names = {code: name for s in series for code, name in s.names.items()}
    name = names.get(int(gpu[worst]), "a GPU")
    when = np.datetime64(int(start[worst]), "s")
    return Heights(level, top, stands, f"{name} reached {height[worst]:.2f} at {when}Z")


def _runs(series: Series, held: Floats, level: float) -> tuple[npt.NDArray[np.generic], ...]:
    """Unbroken runs of one GPU over the level: start, end, gpu, node, work, height."""
    over = np.flatnonzero(held >= level)
    over = over[np.lexsort((series.at_s[over], series.gpu[over]))]
    at_s, gpu = series.at_s[over], series.gpu[over]
    first = np.diff(gpu, prepend=-1) != 0
    first |= np.diff(at_s, prepend=-np.inf) > 1.5 * series.spacing_s
    begin = np.flatnonzero(first)
    if not len(begin):
        none = np.empty(0)
        code = np.empty(0, dtype=np.int64)
        return none, none, code, code, code, none
    last = np.append(begin[1:], len(over)) - 1
    return (
        at_s[begin],
        at_s[last],
        gpu[begin],
        series.node[over][begin],
        series.work[over][begin],
        np.maximum.reduceat(held[over], begin),
    )


def _same(key: Ints, start: Floats, end: Floats, has: Bools, *, by_end: bool) -> tuple[Ints, Ints]:
    """Pairs of runs that are one incident: of one key, and the later begins within
    `TOGETHER_S` of the end (`by_end`) or the beginning of the one before it."""
    own = np.flatnonzero(has)
    own = own[np.lexsort((start[own], key[own]))]
    before, after = own[:-1], own[1:]
    since = end[before] if by_end else start[before]
    pair = (key[before] == key[after]) & (start[after] - since <= TOGETHER_S)
    return before[pair], after[pair]


# ---- tails --------------------------------------------------------------------------


def _best_level(
    series: Sequence[Series], lasting: Sequence[Floats], deviant_for_s: float
) -> Heights | None:
    """The highest level that still has enough incidents over it, or the one that has most."""
    if not lasting:
        return None
    known = np.concatenate([held[np.isfinite(held)] for held in lasting])
    if not len(known):
        return None
    best: Heights | None = None
    for share in reversed(_LEVELS):
        level = float(np.quantile(known, share))
        if level >= EDGE:  # the tail must begin where normal time still is
            continue
        found = _heights(series, lasting, level, deviant_for_s)
        if len(found.score) >= _ENOUGH:
            return found
        if best is None or len(found.score) > len(best.score):
            best = found
    return best if best is not None and len(best.score) >= _FEWEST else None


def fit_tail(found: Heights) -> Tail:
    """Both tails of the heights over their level, by moments. The shape is drawn towards the
    exponential as far as the few incidents leave it open (variance 4/(3 n) there)."""
    over = np.sort(found.score - found.level)
    n = len(over)
    place = (np.arange(1, n + 1) - 0.35) / n
    first, second = float(over.mean()), float(((1.0 - place) * over).mean())
    spread = first - 2.0 * second
    raw = 2.0 - first / spread if spread > 0.0 else 0.0
    mean = (n * first + _PRIOR_N * _PRIOR_MEAN) / (n + _PRIOR_N)
    prior = _SHAPE_SD**2
    shape = min(raw, _HEAVIEST) * prior / (prior + 4.0 / (3.0 * n))
    return Tail(found.level, mean, shape, raw, n)


def _table(found: Heights, tail: Tail, weeks: float) -> tuple[Expected, ...]:
    score = np.array(_TABLE)
    score = score[score >= found.level]
    seen = (found.score[None, :] >= score[:, None]).sum(axis=1)
    each = float(found.weight.mean())
    total = float(found.weight.sum()) / weeks
    rate = total * tail.beyond(score)
    counted = each * (seen + 1.0) / weeks
    rate = np.where(seen > 0, np.maximum(rate, counted), rate)
    rate = np.maximum(np.minimum.accumulate(rate), _TINY)
    # delta method: the count of incidents, and the mean height of their excess
    relative = np.sqrt((1.0 + ((score - found.level) / tail.mean) ** 2) / tail.n)
    wide = np.exp(np.minimum(_Z95 * relative, 50.0))
    high = np.minimum.accumulate(rate * wide)  # no more come over a higher score
    return tuple(
        Expected(float(s), float(r), float(r / w), float(h), int(k))
        for s, r, w, h, k in zip(score, rate, wide, high, seen, strict=True)
    )
