"""GPU performance monitoring: what the parts of a GPU did between two samples.

NVML hands out opaque samples; the difference of two is the average over the time between them.
Hopper and later have it; without it the values stay away.
"""

from __future__ import annotations

import contextlib
from typing import Any, Final

import pynvml

from sentinel.edges.nvml import Handle
from sentinel.edges.nvml_fields import GPM, Labels, Row

# two samples closer than this say nothing (a limit of the hardware); further apart than the
# other, they tell of a past that nobody asked about
_SHORTEST_S: Final = 0.1
_LONGEST_S: Final = 300.0


class Gpm:
    """The samples of one GPU and of its slices. For one thread."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[Any, float]] = {}
        self._rows: dict[str, tuple[Row, ...]] = {}

    @staticmethod
    def supported(handle: Handle) -> bool:
        return bool(pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice)

    def read(
        self, handle: Handle, now_s: float, part: str = "", gpu_instance: int | None = None
    ) -> tuple[Row, ...]:
        """Rows of the time since the last reading; none at the first. `part` is the identity
        of a slice: one that was made anew under an old number starts anew. Raises NvmlError.
        """
        before, before_s = self._last.get(part, (None, 0.0))
        if before is not None and now_s - before_s < _SHORTEST_S:
            return self._rows.get(part, ())  # of at most a moment ago
        sample = pynvml.nvmlGpmSampleAlloc()
        try:
            if gpu_instance is None:
                pynvml.nvmlGpmSampleGet(handle, sample)
            else:
                pynvml.nvmlGpmMigSampleGet(handle, gpu_instance, sample)
        except pynvml.NVMLError:
            pynvml.nvmlGpmSampleFree(sample)
            raise
        rows: tuple[Row, ...] = ()
        try:
            if before is not None and now_s - before_s <= _LONGEST_S:
                rows = _difference(before, sample)
        finally:
            self._last[part], self._rows[part] = (sample, now_s), rows
            if before is not None:
                pynvml.nvmlGpmSampleFree(before)
        return rows

    def keep_only(self, parts: set[str]) -> None:
        """Lets the samples of slices go that are no more."""
        for part in [p for p in self._last if p not in parts]:
            self._free(part)

    def release(self) -> None:
        """Frees all samples, while the library that made them is still open."""
        for part in list(self._last):
            self._free(part)

    def _free(self, part: str) -> None:
        sample, _ = self._last.pop(part)
        self._rows.pop(part, None)
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlGpmSampleFree(sample)

    def abandon(self) -> None:
        """Forgets samples of a library that has gone; to free them would be to use it."""
        self._last.clear()
        self._rows.clear()


def _difference(before: Any, after: Any) -> tuple[Row, ...]:
    asked = pynvml.c_nvmlGpmMetricsGet_t()
    asked.version = pynvml.NVML_GPM_METRICS_GET_VERSION
    asked.numMetrics = len(GPM)
    asked.sample1, asked.sample2 = before, after
    for place, (metric_id, _, _) in enumerate(GPM):
        asked.metrics[place].metricId = metric_id
    pynvml.nvmlGpmMetricsGet(asked)
    rows = []
    for place, (_, metric, scale) in enumerate(GPM):
        told = asked.metrics[place]
        if told.nvmlReturn == pynvml.NVML_SUCCESS:
            rows.append(Row(metric, told.value, scale))
    return tuple(rows)


def labelled(rows: tuple[Row, ...], labels: Labels) -> list[Row]:
    return [row._replace(labels=labels) for row in rows]
