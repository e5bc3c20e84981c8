"""Normal, learnt by density clustering from history that is taken to be mostly healthy.

`DensityBaseline` is a scikit-learn estimator on feature rows. It thins the rows to a bounded
set of leaders (a greedy cover, Hartigan 1975), clusters those with DBSCAN weighted by how
many rows each stands for (memory stays bounded, where DBSCAN on all rows would hold every
neighbourhood), keeps the leaders of dense regions as cores and drops the rest as noise.
Scoring is `core.score`: distance of the response to the nearest core whose demand fits.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any, Final, Self

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.cluster import DBSCAN, MiniBatchKMeans
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import calinski_harabasz_score, silhouette_score
from sklearn.utils.validation import check_is_fitted, validate_data

from sentinel.core.domain import Bools, Floats, Ints
from sentinel.core.score import (
    NOW,
    Density,
    Space,
    distance2,
    score_rows,
    signal_space,
)
from sentinel.learn.regimes import name_regimes

_LEVEL_SHARE: Final = 0.01  # of a signal's highest level: smaller deviations are noise
_NEVER: Final = 1e-12
_EDGE: Final = 0.99  # of the training rows lie inside the edge
_REACH: Final = 0.95  # of the training rows are no states of their own
_SMALLEST_REACH: Final = 0.33  # of the radius: what lies nearer than that is the same state
_SMALLEST_RADIUS: Final = 1e-6


class DensityBaseline(BaseEstimator):
    """Density clusters of normal rows and the distance to them.

    Parameters
    ----------
    space : Space, optional
        Which columns are demand and how deviations count; default: all are response.
    floors : array [features], optional
        Smallest deviation worth one unit of distance. Default: 5 % of the robust range.
    max_rows, max_cores : int
        Bounds of the sample and of the model: cost is O(max_rows x max_cores x features).
    min_radius, max_radius : float
        Bounds of the edge of normal, in units of `scale_`.
    demand_radius : float
        How near a core's demand must be for its response to count.
    noise_share : float
        A region with fewer of the rows is noise and not learnt.
    spread : bool
        For data of which nothing is known beforehand: one unit of distance is the standard
        deviation, at least 1 % of the signal's level; the edge holds 99 % of the rows. Cores
        are then centroids instead of leaders.

    Attributes
    ----------
    density_ : Density
    labels_ : int [sample rows], the cluster of each sampled row, -1 = noise
    evaluation_ : dict of silhouette, calinski_harabasz (None with fewer than two clusters),
        noise_share, clusters, cores, radius
    """

    def __init__(
        self,
        space: Space | None = None,
        floors: Any = None,
        max_rows: int = 20_000,
        max_cores: int = 384,
        min_radius: float = 1.5,
        max_radius: float = 3.0,
        demand_radius: float = 2.0,
        noise_share: float = 0.001,
        spread: bool = False,
    ) -> None:
        self.space = space
        self.floors = floors
        self.max_rows = max_rows
        self.max_cores = max_cores
        self.min_radius = min_radius
        self.max_radius = max_radius
        self.demand_radius = demand_radius
        self.noise_share = noise_share
        self.spread = spread

    def fit(self, X: Any, y: Any = None, *, groups: Any = None, hold_rows: int = 1) -> Self:
        """Learns from rows [n, features] in time order per group (a group is one GPU).

        `hold_rows` is how many successive rows of one GPU a deviation must last before anyone
        acts: the edge is calibrated on deviations that last so long.
        """
        rows = validate_data(self, X, ensure_all_finite="allow-nan", dtype=np.float64)
        who = np.zeros(len(rows), dtype=np.int64) if groups is None else np.asarray(groups)
        space = self.space or signal_space(tuple(f"x{i}" for i in range(rows.shape[1])))
        low = high = None
        if self.spread:
            mean, scale = _spread(space, rows)
            low, high = mean - space.clip * scale, mean + space.clip * scale
        else:
            scale = self._scale(rows, who)
        blank = Density(
            space,
            rows[:0],
            np.zeros(0, dtype=np.int64),
            scale,
            1.0,
            self.demand_radius,
            low=low,
            high=high,
        )
        sample = blank.bounded(rows[_stride(len(rows), self.max_rows)])
        density, labels = self._cores(blank, sample)
        inside = score_rows(density, sample)[0]
        inside = inside[np.isfinite(inside)] if np.isfinite(inside).any() else np.ones(1)
        if self.spread:
            radius = max(float(np.quantile(inside, _EDGE)), _SMALLEST_RADIUS)
        else:
            radius = self._radius(blank, rows, who, max(1, hold_rows))
        reach = max(_reach(density, sample) / radius, _SMALLEST_REACH)
        density = dataclasses.replace(density, radius=radius, reach=reach)
        counts = np.bincount(labels[labels >= 0], minlength=int(density.clusters.max()) + 1)
        self.density_ = dataclasses.replace(density, regimes=name_regimes(density, counts))
        self.labels_ = labels
        self.evaluation_ = _evaluate(self.density_, sample, labels)
        return self

    def anomaly_score(self, X: Any) -> Floats:
        """Distance from normal of each row [n]; 1.0 = the edge, higher = stranger."""
        check_is_fitted(self)
        rows = validate_data(self, X, reset=False, ensure_all_finite="allow-nan", dtype=np.float64)
        score: Floats = np.nan_to_num(score_rows(self.density_, rows)[0])
        return score

    def score_samples(self, X: Any) -> Floats:
        """Opposite of the anomaly score, as scikit-learn's detectors have it."""
        return -self.anomaly_score(X)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def _scale(self, rows: Floats, groups: Ints) -> Floats:
        """One unit of distance: the floor, or the GPU's own short-term noise up to 3 floors."""
        with np.errstate(invalid="ignore"):
            if self.floors is None:
                low, high = _quantiles(rows, (0.01, 0.99))
                floors = np.where(high > low, 0.05 * (high - low), 1.0)
            else:
                floors = np.asarray(self.floors, dtype=np.float64)
            order = np.argsort(groups, kind="stable")
            step = np.abs(np.diff(rows[order], axis=0))[np.diff(groups[order]) == 0]
        if len(step) == 0:
            return floors
        noise = 1.4826 / np.sqrt(2.0) * _quantiles(step, (0.5,))[0]
        scale: Floats = np.clip(np.nan_to_num(noise), floors, 3.0 * floors)
        return scale

    def _cores(self, blank: Density, sample: Floats) -> tuple[Density, Ints]:
        if self.spread:
            return self._centroids(blank, sample)
        reach = 0.5
        while True:
            leaders, owner = _leaders(blank, sample, reach, self.max_cores)
            if leaders is not None:
                break
            reach *= 1.4
        centres = _means(sample, owner, len(leaders))
        return self._dense(blank, sample, centres, owner, max(1.5, 1.5 * reach))

    def _centroids(self, blank: Density, sample: Floats) -> tuple[Density, Ints]:
        """Cores as the centroids of mini-batch k-means: in the hundred columns of a window
        space a greedy cover takes many times as long and is no better."""
        level = np.nan_to_num(_quantiles(sample, (0.5,))[0])
        z = (np.where(np.isfinite(sample), sample, level) - level) / blank.scale
        z = z[:, np.ptp(z, axis=0) > 0] if z.any() else z[:, :1]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # fewer states than asked for
            owner = MiniBatchKMeans(
                min(self.max_cores, len(z)), random_state=0, n_init=3, batch_size=1024
            ).fit_predict(z.astype(np.float32))
        owner = np.unique(owner, return_inverse=True)[1].astype(np.int64)
        centres = _means(sample, owner, int(owner.max()) + 1)
        away = np.nan_to_num((sample - centres[owner]) / blank.scale)
        own = np.sqrt(np.minimum(away**2, blank.space.clip**2).sum(axis=1))
        # two cores belong together where the rows of the one reach those of the other
        return self._dense(blank, sample, centres, owner, 2.0 * float(np.quantile(own, _REACH)))

    def _dense(
        self, blank: Density, sample: Floats, centres: Floats, owner: Ints, eps: float
    ) -> tuple[Density, Ints]:
        """Clusters of centres [k, columns] by DBSCAN, each weighing as many rows as it stands
        for; sparse ones are noise and no cores. Returns (density, cluster of each row)."""
        count = np.bincount(owner, minlength=len(centres)).astype(np.float64)
        every = np.ones(sample.shape[1], dtype=bool)
        apart = np.sqrt(distance2(blank, centres, centres, every))
        cluster = DBSCAN(
            eps=max(eps, 1e-9),
            min_samples=max(3, round(self.noise_share * len(sample))),
            metric="precomputed",
        ).fit_predict(np.maximum(apart, apart.T), sample_weight=count)
        kept = cluster >= 0
        if not kept.any():  # so few rows that nothing is dense: all of them are what we know
            cluster, kept = np.zeros_like(cluster), np.ones_like(kept)
        density = dataclasses.replace(blank, cores=centres[kept], clusters=cluster[kept])
        return density, cluster[owner]

    def _radius(self, blank: Density, rows: Floats, groups: Ints, hold: int) -> float:
        """The edge: what sustained healthy deviation reaches when one half of the time is
        judged by the other half, over GPUs' worst cases (not over autocorrelated rows)."""
        half = _second_half(groups)
        worst: list[float] = []
        for train, test in ((~half, half), (half, ~half)):
            picked = rows[train]
            if len(picked) < 4 or not test.any():
                continue
            density, _ = self._cores(blank, picked[_stride(len(picked), self.max_rows // 2)])
            judged = _stride_groups(groups, test, self.max_rows)
            score, novel, _, _ = score_rows(density, rows[judged])
            score = np.where(novel, np.nan, score)
            worst.extend(_sustained_worst(score, groups[judged], hold))
        if not worst:
            return self.min_radius
        reached = 1.25 * float(np.quantile(worst, 0.98))
        return float(np.clip(reached, self.min_radius, self.max_radius))


def _reach(density: Density, sample: Floats) -> float:
    """The distance, demand included, that `_REACH` of the sample keep to their nearest core."""
    every = np.ones(sample.shape[1], dtype=bool)
    pick = sample[_stride(len(sample), 4000)]
    return float(
        np.quantile(np.sqrt(distance2(density, pick, density.cores, every).min(1)), _REACH)
    )


def _spread(space: Space, rows: Floats) -> tuple[Floats, Floats]:
    """(mean, one unit of distance) [columns]: the standard deviation, at least `_LEVEL_SHARE`
    of the highest level of the signal, so that bytes and ratios are alike. A signal that never
    left zero has no level: whatever it does then is far."""
    known = np.isfinite(rows)
    count = np.maximum(known.sum(axis=0), 1)
    filled = np.where(known, rows, 0.0)
    level = np.abs(filled).max(axis=0)
    unit = np.where(level > 0, level, 1.0)  # squares of bytes and of ratios both stay in range
    mean = (filled / unit).sum(axis=0) / count
    away = np.where(known, rows / unit - mean, 0.0)
    deviation = unit * np.sqrt((away**2).sum(axis=0) / count)
    own = np.zeros(space.signals)
    own[space.signal[space.kind == NOW]] = level[space.kind == NOW]
    floor = _LEVEL_SHARE * np.maximum(own[space.signal], 0.0)
    return unit * mean, np.maximum(np.maximum(deviation, floor), _NEVER * unit)


def _stride(n: int, most: int) -> Ints:
    """At most `most` of n rows, evenly spread: deterministic, and keeps the order."""
    return np.unique(np.linspace(0, n - 1, min(n, most)).astype(np.int64))


def _stride_groups(groups: Ints, mask: Bools, most: int) -> Ints:
    """Whole groups of the masked rows until `most` rows: a run must stay unbroken."""
    rows = np.flatnonzero(mask)
    if len(rows) <= most:
        return rows
    ids, counts = np.unique(groups[rows], return_counts=True)
    order = _stride(len(ids), max(1, int(most / counts.mean())))
    return rows[np.isin(groups[rows], ids[order])]


def _second_half(groups: Ints) -> Bools:
    """True for the later half of each group's rows."""
    out = np.zeros(len(groups), dtype=bool)
    order = np.argsort(groups, kind="stable")
    _, start, count = np.unique(groups[order], return_index=True, return_counts=True)
    place = np.arange(len(groups)) - np.repeat(start, count)
    out[order] = place >= np.repeat(count, count) / 2
    return out


def _sustained_worst(score: Floats, groups: Ints, hold: int) -> list[float]:
    """Per group, the highest score that lasted `hold` rows in a row."""
    worst = []
    for group in np.unique(groups):
        own = np.nan_to_num(score[groups == group])
        if len(own) < hold:
            continue
        windows = np.lib.stride_tricks.sliding_window_view(own, hold)
        worst.append(float(windows.min(axis=1).max()))
    return worst


def _leaders(
    blank: Density, rows: Floats, reach: float, most: int
) -> tuple[Floats, Ints] | tuple[None, Ints]:
    """Greedy cover: rows such that every row lies within `reach` of one. None if that takes
    more than `most`. Returns (leaders [k, f], owner [n])."""
    every = np.ones(rows.shape[1], dtype=bool)
    owner = np.full(len(rows), -1, dtype=np.int64)
    left = np.arange(len(rows))
    chosen: list[int] = []
    while len(left):
        if len(chosen) >= most:
            return None, owner
        lead = left[0]
        near = distance2(blank, rows[left], rows[lead][None, :], every)[:, 0] <= reach**2
        near[0] = True
        owner[left[near]] = len(chosen)
        chosen.append(int(lead))
        left = left[~near]
    return rows[chosen], owner


def _means(rows: Floats, owner: Ints, groups: int) -> Floats:
    """Mean of each group's rows [groups, f], NaN where none of them has a value."""
    known = np.isfinite(rows)
    total = np.zeros((groups, rows.shape[1]))
    count = np.zeros_like(total)
    np.add.at(total, owner, np.where(known, rows, 0.0))
    np.add.at(count, owner, known)
    return np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)


def _quantiles(rows: Floats, q: tuple[float, ...]) -> Floats:
    """NaN-aware quantiles by column [q, f]; NaN for a column without any value."""
    out = np.full((len(q), rows.shape[1]), np.nan)
    for f in range(rows.shape[1]):
        own = rows[:, f][np.isfinite(rows[:, f])]
        if len(own):
            out[:, f] = np.quantile(own, q)
    return out


def _evaluate(density: Density, sample: Floats, labels: Ints) -> dict[str, float | int | None]:
    """Silhouette and Calinski-Harabasz over clustered rows only: noise is no cluster."""
    inside = labels >= 0
    clusters = len(np.unique(labels[inside]))
    silhouette = calinski = None
    scaled = np.nan_to_num(sample / density.scale)
    pick = np.flatnonzero(inside)[_stride(int(inside.sum()), 2000)] if inside.any() else inside
    if clusters >= 2 and len(np.unique(labels[pick])) >= 2 and len(pick) > clusters:
        silhouette = float(silhouette_score(scaled[pick], labels[pick]))
        calinski = float(calinski_harabasz_score(scaled[pick], labels[pick]))
    return {
        "silhouette": silhouette,
        "calinski_harabasz": calinski,
        "noise_share": float(1.0 - inside.mean()) if len(labels) else 0.0,
        "clusters": clusters,
        "cores": len(density.cores),
        "radius": density.radius,
    }
