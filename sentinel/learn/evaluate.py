"""What a baseline is worth, in numbers and in words that a person can check.

The rows that it was learnt from are given back to it: which cluster each belongs to, how well
the clusters are set apart, what is typical of each in its own units, and which metrics had
anything to say. Rows outside every cluster are noise and count for no cluster's quality.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from scipy.optimize import linear_sum_assignment
from sklearn.metrics import (
    adjusted_rand_score,
    calinski_harabasz_score,
    davies_bouldin_score,
    silhouette_score,
)

from sentinel.core.domain import Floats, Ints
from sentinel.core.features import FEATURES, INDEX, MEM_TEMP, TEMP
from sentinel.core.score import Cohort, Density, distance2, score_rows
from sentinel.learn.cohort import Rows, prepared

MAX_ROWS: Final = 20_000  # rows that a cohort is described by, evenly spread
_SILHOUETTE_ROWS: Final = 2000  # its cost grows with the square
_SHOWN: Final = ("gpu_util", "tensor_active", "dram_active", "power", "gpu_temp", "sm_clock")
_HAS: Final = 0.05  # a metric that fewer rows have than this share is lacking
_QUANTILES: Final = (0.1, 0.5, 0.9)


def describe(cohort: Cohort, rows: Rows, before: Cohort | None = None) -> dict[str, Any]:
    """What `cohort` is, seen through the rows it was learnt from; `before` is the cohort of the
    last bundle, whose clusters are compared. Plain values throughout."""
    sample = rows.part(_spread(len(rows), MAX_ROWS))
    values, _ = prepared(cohort, sample)
    labels = cluster_of(cohort.density, values)
    return {
        "coverage": _coverage(sample),
        "lacks": [name for name, share in _coverage(sample).items() if share < _HAS],
        **_quality(cohort.density, values, labels),
        "regimes": _regimes(cohort, sample, labels),
        "stability": stability(cohort, before, sample) if before is not None else None,
    }


def cluster_of(density: Density, values: Floats) -> Ints:
    """The cluster of each row [n]: that of the nearest core, -1 where the row is outside the
    edge of normal or does work that no core knows."""
    score, novel, _, _ = score_rows(density, values)
    every = np.ones(values.shape[1], dtype=bool)
    nearest = np.empty(len(values), dtype=np.int64)
    for start in range(0, len(values), 2048):
        part = slice(start, start + 2048)
        nearest[part] = np.argmin(distance2(density, values[part], density.cores, every), axis=1)
    inside = (score <= 1.0) & ~novel
    out: Ints = np.where(inside, density.clusters[nearest], -1)
    return out


def stability(cohort: Cohort, before: Cohort, rows: Rows) -> dict[str, float]:
    """How far two baselines put the same rows together: `rand` is the adjusted Rand index (1 =
    the same clusters, 0 = no more than chance), `stay` the share of rows whose cluster goes on
    in the other as its best match (assignment problem)."""
    new = cluster_of(cohort.density, prepared(cohort, rows)[0])
    old = cluster_of(before.density, prepared(before, rows)[0])
    a, b = (np.unique(x, return_inverse=True)[1] for x in (new, old))
    table = np.zeros((int(a.max()) + 1, int(b.max()) + 1))
    np.add.at(table, (a, b), 1.0)
    matched = table[linear_sum_assignment(-table)].sum()
    return {
        "rand": float(adjusted_rand_score(old, new)),
        "stay": float(matched / len(rows)),
    }


def _coverage(rows: Rows) -> dict[str, float]:
    """Share of the rows that have each feature."""
    known = np.isfinite(rows.values).mean(axis=0)
    return {f.name: round(float(share), 4) for f, share in zip(FEATURES, known, strict=True)}


def _quality(density: Density, values: Floats, labels: Ints) -> dict[str, Any]:
    inside = np.flatnonzero(labels >= 0)
    pick = inside[_spread(len(inside), _SILHOUETTE_ROWS)] if len(inside) else inside
    scaled = np.nan_to_num(values[pick] / density.scale)
    found: dict[str, float | None] = dict.fromkeys(
        ("silhouette", "calinski_harabasz", "davies_bouldin")
    )
    if 2 <= len(np.unique(labels[pick])) < len(pick):
        found["silhouette"] = float(silhouette_score(scaled, labels[pick]))
        found["calinski_harabasz"] = float(calinski_harabasz_score(scaled, labels[pick]))
        found["davies_bouldin"] = float(davies_bouldin_score(scaled, labels[pick]))
    return {
        "clusters": len(np.unique(density.clusters)),
        "cores": len(density.cores),
        "radius": float(density.radius),
        "noise_share": float(1.0 - len(inside) / max(1, len(labels))),
        **found,
    }


def _regimes(cohort: Cohort, rows: Rows, labels: Ints) -> list[dict[str, Any]]:
    """Each cluster, the largest first: its share of the time and what is typical of it."""
    ids, counts = np.unique(labels[labels >= 0], return_counts=True)
    names, out = cohort.density.regimes, []
    for id, count in sorted(zip(ids, counts, strict=True), key=lambda pair: -pair[1]):
        own = rows.part(labels == id)
        out.append(
            {
                "cluster": int(id),
                "name": names[id] if id < len(names) else f"regime {id + 1}",
                "rows": int(count),
                "share": float(count / len(labels)),
                "gpus": len(np.unique(own.gpu)),
                "typical": _typical(own),
            }
        )
    return out


def _typical(rows: Rows) -> dict[str, dict[str, Any]]:
    """Low, middle and high (10, 50, 90 %) of what a person knows a GPU by, in its unit."""
    columns: dict[str, Floats] = {
        name: rows.values[:, INDEX[name]] for name in _SHOWN if name in INDEX
    }
    columns["gpu_temp"] = rows.values[:, TEMP]
    columns["mem_temp"] = rows.values[:, MEM_TEMP]
    units = {f.name: f.unit for f in FEATURES} | {"gpu_temp": "°C", "mem_temp": "°C"}
    out: dict[str, dict[str, Any]] = {}
    for name, column in columns.items():
        known = column[np.isfinite(column)]
        if len(known):
            low, middle, high = (float(q) for q in np.quantile(known, _QUANTILES))
            unit = units[name]
            out[name] = {"low": low, "median": middle, "high": high, "unit": unit}
    return out


def _spread(n: int, most: int) -> Ints:
    """At most `most` of n places, evenly spread."""
    return np.unique(np.linspace(0, max(0, n - 1), min(n, most)).astype(np.int64))
