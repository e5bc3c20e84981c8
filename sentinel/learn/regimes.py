"""Names for operating regimes, from what the typical work of each cluster asks of a GPU."""

from __future__ import annotations

from typing import Final

import numpy as np

from sentinel.core.domain import Floats, Ints
from sentinel.core.score import NOW, Density

_IDLE_BELOW: Final = 0.05  # activity
_LIGHT_BELOW: Final = 0.3
_TENSOR: Final = 0.25  # tensor cores: half of the peak is a very good training step
_SM: Final = 0.7
_DRAM: Final = 0.45
_NVLINK: Final = 9.7  # log10 B/s: 5 GB/s
_PCIE: Final = 9.7


def name_regimes(density: Density, rows: Ints) -> tuple[str, ...]:
    """A name per cluster [clusters], `rows` [clusters] being how many it has: idle, light,
    memory-bound, compute-bound, communication-bound, busy; or regime 1, 2, ... by size where
    the columns do not tell. Of regimes alike, the largest has the plain name."""
    typical = _typical(density, len(rows))
    order = np.argsort(-rows, kind="stable")
    out = [""] * len(rows)
    seen: dict[str, int] = {}
    for place, cluster in enumerate(order):
        name = _name(typical[cluster], density) or f"regime {place + 1}"
        seen[name] = seen.get(name, 0) + 1
        out[cluster] = name if seen[name] == 1 else f"{name} {seen[name]}"
    return tuple(out)


def _typical(density: Density, clusters: int) -> Floats:
    """Median core of each cluster [clusters, columns], NaN where nothing is known."""
    out = np.full((clusters, density.cores.shape[1]), np.nan)
    for cluster in range(clusters):
        own = density.cores[density.clusters == cluster]
        for f in np.flatnonzero(np.isfinite(own).any(axis=0)):
            out[cluster, f] = np.nanmedian(own[:, f])
    return out


def _name(typical: Floats, density: Density) -> str:
    """The name of what one cluster typically asks [columns], empty where it cannot be told."""
    space = density.space
    of = {n: float(typical[i]) for i, n in enumerate(space.names) if space.kind[i] == NOW}

    def most(*names: str) -> float:
        return max((of[n] for n in names if np.isfinite(of.get(n, np.nan))), default=np.nan)

    activity = most("gpu_util", "mem_copy_util", "sm_active", "gr_active", "tensor_active")
    if not np.isfinite(activity):
        return ""
    if activity < _IDLE_BELOW:
        return "idle"
    if most("tensor_active") >= _TENSOR:
        return "compute-bound"
    if most("dram_active", "mem_copy_util") >= _DRAM:
        return "memory-bound"
    if most("nvlink_traffic") >= _NVLINK or most("pcie_traffic") >= _PCIE:
        return "communication-bound"
    if most("sm_active") >= _SM:
        return "compute-bound"
    return "light load" if activity < _LIGHT_BELOW else "busy"
