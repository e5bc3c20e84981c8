"""The simulated fleet as a history that learning and backtests read, without a server."""

import numpy as np

from sentinel.core.frame import Samples, SeriesKey
from sentinel.lab.fleet import Fleet


class LabHistory:
    """Stands where a Prometheus would: `history(start, end)` moves the fleet through time.

    `events` are (at_s, method, *arguments) of the fleet, applied when their time comes; times
    are on the grid of `step_s`.
    """

    def __init__(self, fleet: Fleet, step_s: float, events=()):
        self._fleet, self._step_s, self._events = fleet, step_s, sorted(events)
        self._keys, self._number = [], {}

    def history(self, start_s, end_s, *, slice_s):
        at_s = start_s
        for event in [*self._events, (end_s, None)]:
            if not start_s <= event[0] <= end_s:
                continue
            until_s = event[0] if event[1] is None else event[0] - self._step_s
            if until_s >= at_s:
                for block in self._fleet.history(at_s, until_s, self._step_s, block_s=slice_s):
                    yield self._samples(block)
                at_s = until_s + self._step_s
            if event[1] is not None:
                getattr(self._fleet, event[1])(*event[2:])

    def _samples(self, block):
        ids = np.array([self._id(labels) for labels in block.labels], dtype=np.int64)
        row, column = np.nonzero(np.isfinite(block.values))
        times = block.times_s[column]
        values = block.values[row, column]
        return Samples(float(block.times_s[-1]), self._keys, ids[row], times, values)

    def _id(self, labels):
        key = tuple(sorted(labels.items()))
        number = self._number.get(key)
        if number is None:
            number = self._number[key] = len(self._keys)
            rest = tuple((name, value) for name, value in key if name != "__name__")
            self._keys.append(SeriesKey(labels["__name__"], rest))
        return number
