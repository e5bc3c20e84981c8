"""What an exporter shows and what cannot be so.

Three doubts, each resolved by not knowing: a metric that this GPU cannot have, profiling
counters that stand at zero while the GPU works, and values that stand still while time goes
on. None of them is evidence against a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from sentinel.core.catalog import Catalog
from sentinel.core.domain import Bools, Floats, Ints
from sentinel.core.series import Roster

Lacks = Callable[[str], frozenset[str]]  # model name -> what it lacks, of catalog.NEEDS
_WORKS: Final = 0.5  # utilisation at which profiling counters cannot stand at zero
_CUT_S: Final = 60.0  # a slice seen within so long, or 3 intervals: the GPU is cut up
_STILL_S: Final = 300.0  # all that a GPU shows, its energy too, stands still for so long
_ALL_STILL_S: Final = 900.0  # the same where no energy is shown; or 20 intervals, if longer
_DRAWS_W: Final = 5.0
_ACTIVE: Final = ("gr_engine_active_ratio", "sm_active_ratio")
_LIVELY: Final = 3  # so many live readings must stand still together


def nothing_known(model: str) -> frozenset[str]:
    """What a model lacks, where nobody knows: it may have everything."""
    return frozenset()


class Doubt:
    """Reads the roster and the values laid out; keeps only what it knows of the models."""

    def __init__(self, catalog: Catalog, roster: Roster, lacks: Lacks = nothing_known) -> None:
        self._catalog, self._roster, self._lacks = catalog, roster, lacks
        self._needs = {
            need: np.array([need in m.needs for m in catalog.metrics])
            for need in {need for m in catalog.metrics for need in m.needs}
        }
        links = self._needs.get("nvlink", np.zeros(len(catalog.metrics), dtype=bool))
        self._link_error = links & np.array([m.role == "error" for m in catalog.metrics])
        self._live = np.array([m.role in ("demand", "response") for m in catalog.metrics])
        self._models: list[str] = []
        self._unable = np.zeros((0, len(catalog.metrics)), dtype=bool)
        self._profiling = np.flatnonzero(self._needs.get("profiling", np.zeros(0, dtype=bool)))

    def unable(self) -> Bools:
        """Where a GPU cannot have a metric [gpus, metrics], by its model."""
        models = self._roster.model
        if models != self._models:
            rows: dict[str, Bools] = {}
            for model in set(models):
                row = np.zeros(len(self._catalog.metrics), dtype=bool)
                for need in self._lacks(model):
                    row |= self._needs.get(need, False)
                rows[model] = row
            if models:
                self._unable = np.stack([rows[model] for model in models])
            else:
                self._unable = np.zeros((0, len(self._catalog.metrics)), dtype=bool)
            self._models = list(models)
        return self._unable

    def not_its_own(
        self, gpu: Ints, column: Ints, value: Floats, at_s: Floats, interval_s: Floats
    ) -> Bools:
        """Samples [n] of a metric that their GPU cannot have. What is not zero was measured,
        whatever the catalogue says; but errors of links that are not there are none."""
        unable = self.unable()[gpu, column]
        if "whole" in self._needs:
            cut = at_s - self._roster.gpus.cut_s[gpu] <= np.maximum(_CUT_S, 3.0 * interval_s)
            unable |= cut & self._needs["whole"][column]
        not_its_own: Bools = unable & ((value == 0) | self._link_error[column])
        return not_its_own

    def idle_profiling(self, values: Floats) -> Bools:
        """GPUs [gpus] whose profiling counters stand at zero while they work, as after some
        Xids or while a profiler holds the counters: these say nothing then."""
        gpus = len(values)
        if not len(self._profiling):
            return np.zeros(gpus, dtype=bool)
        active = values[:, [self._catalog.column(name) for name in _ACTIVE]]
        known = np.isfinite(active)
        stands = known.any(axis=1) & (np.where(known, active, 0.0) == 0).all(axis=1)
        with np.errstate(invalid="ignore"):
            works = values[:, self._catalog.column("gpu_util_ratio")] >= _WORKS
        idle: Bools = stands & works
        return idle

    def mask_profiling(self, values: Floats, times: Floats, rows: Bools) -> None:
        """Takes the profiling counters of these GPUs out of `values`, in place."""
        cells = np.ix_(rows, self._profiling)
        values[cells], times[cells] = np.nan, -np.inf

    def stands_still(self, values: Floats, interval_s: Floats) -> Bools:
        """GPUs [gpus] of which nothing at all changes though samples come: an exporter that
        repeats what it once read. `interval_s` is that of each GPU's exporter.

        Energy that does not grow while power is drawn proves it soon. Without that counter
        only a GPU at work is judged, after longer: an idle one may well stand still.
        """
        slots, gpus = self._roster.slots, len(values)
        live = self._live[slots.column] & np.isfinite(slots.value)
        live_s = np.full(gpus, np.inf)
        still_s = slots.at_s[live] - slots.changed_s[live]
        np.minimum.at(live_s, slots.gpu[live], still_s)
        enough = np.bincount(slots.gpu[live], minlength=gpus) >= _LIVELY
        with np.errstate(invalid="ignore"):
            power_w = values[:, self._catalog.column("power_w")]
            counts = values[:, self._catalog.column("energy_j")] > 0
            works = values[:, self._catalog.column("gpu_util_ratio")] > 0
            proof = counts & (power_w >= _DRAWS_W)
            fine = power_w != np.floor(power_w)  # whole watts may stand for long
        soon = proof & (live_s >= np.maximum(_STILL_S, 20.0 * interval_s))
        late = works & fine & (live_s >= np.maximum(_ALL_STILL_S, 20.0 * interval_s))
        frozen: Bools = enough & np.isfinite(live_s) & (soon | late)
        return frozen
