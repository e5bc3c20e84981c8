"""The simulated fleet as a history that learning and backtests read, without a server.

What goes wrong between an exporter and Prometheus happens here, not in the fleet: scrapes that
come at their own moment, late or never, a host whose clock is off, a target scraped twice.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from sentinel.core.frame import Samples, SeriesKey


@dataclass(frozen=True)
class Scraping:
    """How the fleet is scraped. Each host has a phase of its own within `spread` of the
    interval, which never changes; of its scrapes a share fails, and a share is late by up to
    half an interval. `offset_s` is by host; `doubled` are hosts that two servers scrape."""

    seed: int = 0
    spread: float = 0.0
    failing: float = 0.0
    late: float = 0.0
    offset_s: dict[str, float] = field(default_factory=dict)
    doubled: frozenset[str] = frozenset()


PERFECT = Scraping()


class LabHistory:
    """Stands where a Prometheus would: `history(start, end)` moves the fleet through time.

    `events` are (at_s, what, *arguments), applied at that very moment: the first sample that can
    show them is the next one. `what` is a method of the fleet by name, or is called with the
    fleet first and may answer with further events. What the fleet refuses is left out and kept
    in `refused`. `seen` is called with every block, where given.
    """

    def __init__(self, fleet, step_s, events=(), scraping=PERFECT, seen=None):
        self.refused = []
        self._fleet, self._step_s = fleet, step_s
        self._events, self._scraping, self._seen = sorted(events, key=_when), scraping, seen
        self._rng = np.random.default_rng([scraping.seed, 0x5C])
        hosts = fleet.hosts
        self._phase_s = step_s * scraping.spread * self._rng.random(len(hosts))
        self._offset_s = np.array([scraping.offset_s.get(host, 0.0) for host in hosts])
        self._host = {f"{host}:9400": place for place, host in enumerate(hosts)}
        self._doubled = np.isin(hosts, list(scraping.doubled))
        self._plain = scraping == PERFECT
        self._keys, self._number, self._known = [], {}, {}
        self._labels = None

    def history(self, start_s, end_s, *, slice_s):
        at_s = start_s
        left = [event for event in self._events if start_s <= event[0] <= end_s]
        while True:
            event = left.pop(0) if left else (end_s, None)
            steps = math.floor((event[0] - at_s) / self._step_s + 1e-9)
            if steps >= 0:
                until_s = at_s + steps * self._step_s
                for block in self._fleet.history(at_s, until_s, self._step_s, block_s=slice_s):
                    if self._seen is not None:
                        self._seen(block)
                    yield self._samples(block)
                at_s = until_s + self._step_s
            if event[1] is None:
                return
            left += [more for more in self._apply(event) if more[0] <= end_s]
            left.sort(key=_when)

    def _apply(self, event):
        fleet = self._fleet
        fleet.advance(event[0], max(event[0] - fleet.at_s, 1e-3))
        try:
            if callable(event[1]):
                return event[1](fleet, *event[2:])
            getattr(fleet, event[1])(*event[2:])
        except (ValueError, KeyError) as error:
            self.refused.append((*event, str(error)))
        return ()

    def _samples(self, block):
        if block.labels is not self._labels:
            self._labels = block.labels
            self._ids = np.array([self._id(labels) for labels in block.labels], dtype=np.int64)
            self._hosts = np.array([self._host[labels["instance"]] for labels in block.labels])
        shown = np.isfinite(block.values.T)
        if self._scraping.failing:
            shown &= ~self._failed(block)
        column, row = np.nonzero(shown)
        times, values, ids = block.times_s[column], block.values.T[shown], self._ids[row]
        if not self._plain:
            times = times + self._shifts(len(block.times_s))[column, self._hosts[row]]
            ids, times, values = self._twice(ids, times, values, row)
        return Samples(float(block.times_s[-1]), self._keys, ids, times, values)

    def _failed(self, block):
        """bool [times, series]: of a scrape that fails only `up` remains, which says so."""
        failing = self._rng.random((len(block.times_s), len(self._phase_s)))
        failing = (failing < self._scraping.failing)[:, self._hosts]
        ups = np.array([labels["__name__"] == "up" for labels in block.labels])
        block.values[:, :].T[failing & ups] = 0.0
        return failing & ~ups

    def _shifts(self, times):
        late = self._rng.random((times, len(self._phase_s)))
        by_s = 0.5 * self._step_s * self._rng.random(late.shape)
        shifts = self._phase_s + self._offset_s + np.where(late < self._scraping.late, by_s, 0.0)
        return np.round(shifts, 3)

    def _twice(self, ids, times, values, row):
        """The other server scrapes the same targets two seconds later."""
        again = self._doubled[self._hosts[row]]
        if not again.any():
            return ids, times, values
        other = np.array([self._id(self._labels[r], "b") for r in range(len(self._labels))])
        return (
            np.concatenate([ids, other[row[again]]]),
            np.concatenate([times, times[again] + 2.0]),
            np.concatenate([values, values[again]]),
        )

    def _id(self, labels, replica=""):
        known = self._known.get((id(labels), replica))
        if known is not None:
            return known[0]
        shown = {**labels, "prometheus_replica": replica} if replica else labels
        key = tuple(sorted(shown.items()))
        number = self._number.get(key)
        if number is None:
            number = self._number[key] = len(self._keys)
            rest = tuple((name, value) for name, value in key if name != "__name__")
            self._keys.append(SeriesKey(labels["__name__"], rest))
        self._known[id(labels), replica] = (number, labels)  # held, so that its id stays its own
        return number


def _when(event):
    return event[0]
