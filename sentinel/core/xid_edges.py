"""Xids as events: each told once, when it happens.

The gauge of the last Xid sticks until the driver is loaded again, and some exporters leave it
out until there is one; others count codes in a label. An event is a gauge that changes to a
code, or a count that grows. What stands at the first sight of a GPU is history. The same event
told by a gauge and by a count, by several slices or by two exporters, is one event.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from sentinel.core.domain import Bools, Floats, Ints

GAUGE: Final = -1  # in place of a code: the value is the code
_PAIR_S: Final = 90.0  # a gauge and a count may tell of one event so far apart
_HOLD_S: Final = 300.0  # so long another source's standing code is the same event
_SETTLED_S: Final = 60.0  # a GPU seen for so long is known when a new exporter shows it


@dataclass(frozen=True, slots=True)
class Edge:
    """A new Xid on the GPU in roster row `gpu`."""

    gpu: int
    code: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Known:
    """What else is known at each of the samples, float64 [n].

    `link_first_s`: first sample of the GPU from this exporter. `link_before_s`: newest such
    sample before this batch. `gpu_first_s`: the GPU's first sample of all. `interval_s`: of
    the scrapes.
    """

    link_first_s: Floats
    link_before_s: Floats
    gpu_first_s: Floats
    interval_s: Floats


class XidEdges:
    """One slot per source of codes: (GPU, slice, exporter), and the code where a label has it."""

    def __init__(self) -> None:
        self._slots: dict[tuple[object, ...], int] = {}
        self._gpu: list[int] = []
        self._code: list[int] = []
        self._window_s: list[float] = []
        # by slot, as long as the lists above once `_grow` has run
        self._value, self._at_s = np.zeros(0), np.zeros(0)
        self._window = np.zeros(0)
        self._gauge = np.zeros(0, dtype=bool)
        self._of_gpu: dict[int, list[int]] = {}
        self._told: dict[tuple[int, int, bool], float] = {}  # (gpu, code, by gauge) -> time
        self._paired: set[tuple[int, int, bool]] = set()

    def slot(self, key: tuple[object, ...], gpu: int, code: int, window_s: float) -> int:
        """The slot of a source; `code` is GAUGE, or what a count counts within `window_s`."""
        found = self._slots.get(key)
        if found is not None:
            return found
        self._slots[key] = made = len(self._gpu)
        self._gpu.append(gpu)
        self._code.append(code)
        self._window_s.append(window_s)
        self._of_gpu.setdefault(gpu, []).append(made)
        return made

    def _grow(self) -> None:
        more = len(self._gpu) - len(self._value)
        if more:
            self._value = np.append(self._value, np.full(more, np.nan))
            self._at_s = np.append(self._at_s, np.full(more, -np.inf))
            self._window = np.array(self._window_s)
            self._gauge = np.array(self._code) == GAUGE

    def observe(self, slot: Ints, at_s: Floats, value: Floats, known: Known) -> list[Edge]:
        """Events in samples [n] of slots, in any order; each newer than the slot's last."""
        if not len(slot):
            return []
        self._grow()
        order = np.lexsort((value, at_s, slot))
        slot, at_s, value = slot[order], at_s[order], value[order]
        # repeats of one moment, as of pods that share a GPU: the largest
        last = np.append((slot[1:] != slot[:-1]) | (at_s[1:] != at_s[:-1]), True)
        keep = np.flatnonzero(last & (at_s > self._at_s[slot]))
        order, slot, at_s, value = order[keep], slot[keep], at_s[keep], value[keep]
        head = np.ones(len(slot), dtype=bool)
        head[1:] = slot[1:] != slot[:-1]
        before = np.where(head, self._value[slot], np.roll(value, 1))
        absent = head & self._was_absent(slot, at_s, known, order)
        before = np.where(absent & np.isfinite(before), 0.0, before)
        changed = (value != before) & ~(np.isnan(before) & (value <= 0))
        edges: list[Edge] = []
        for i in np.flatnonzero(changed)[np.argsort(at_s[changed], kind="stable")]:
            k = int(slot[i])
            unseen, j = bool(np.isnan(before[i])), order[i]
            if not self._fires(k, 0.0 if unseen else float(before[i]), float(value[i])):
                pass
            elif not unseen or _is_news(j, float(at_s[i]), known):
                new_link = unseen and known.link_first_s[j] > at_s[i] - _HOLD_S
                edges += self._tell(k, float(value[i]), float(at_s[i]), bool(new_link))
            self._value[k], self._at_s[k] = value[i], at_s[i]
        tail = np.append(head[1:], True)
        self._value[slot[tail]], self._at_s[slot[tail]] = value[tail], at_s[tail]
        return edges

    def _was_absent(self, slot: Ints, at_s: Floats, known: Known, order: Ints) -> Bools:
        """Where a source fell silent while its GPU still reported: it had gone back to zero."""
        gone_s = 1.5 * known.interval_s[order]  # two scrapes: one may lose a series
        seen_without = known.link_before_s[order] > self._at_s[slot] + gone_s
        slid_out = at_s - self._at_s[slot] > self._window[slot]
        return np.where(self._gauge[slot], seen_without, slid_out)

    def _fires(self, slot: int, before: float, value: float) -> bool:
        if self._code[slot] == GAUGE:
            return value > 0 and value != before
        restarted = 0 < value < before and self._window_s[slot] == np.inf
        return value > before or restarted

    def _tell(self, slot: int, value: float, at_s: float, new_link: bool) -> list[Edge]:
        gpu, gauge = self._gpu[slot], self._code[slot] == GAUGE
        code = int(value) if gauge else self._code[slot]
        if code <= 0:
            return []
        if gauge:  # a twin that stands at this code told it already
            for twin in self._of_gpu[gpu]:
                stands = self._code[twin] == GAUGE and self._value[twin] == code
                if twin != slot and stands and (new_link or at_s - self._at_s[twin] <= _HOLD_S):
                    return []
        this, other = (gpu, code, gauge), (gpu, code, not gauge)
        if not gauge and abs(at_s - self._told.get(this, -np.inf)) < 1.0:
            return []
        near = abs(at_s - self._told.get(other, -np.inf)) <= _PAIR_S
        if near and other not in self._paired:
            self._paired.add(other)
            return []
        self._told[this] = at_s
        self._paired.discard(this)
        return [Edge(gpu, code, at_s)]

    def forget(self, rows: dict[int, int]) -> tuple[XidEdges, Ints]:
        """The same memory over a roster whose old rows became `rows`, others dropped, and the
        new number of each old slot, -1 for the dropped."""
        self._grow()
        kept, numbers = XidEdges(), np.full(len(self._gpu), -1, dtype=np.int64)
        for key, k in self._slots.items():
            gpu = rows.get(self._gpu[k])
            if gpu is not None:
                new_key = (gpu, *key[1:])
                numbers[k] = kept.slot(new_key, gpu, self._code[k], self._window_s[k])
        kept._grow()
        stayed = numbers >= 0
        kept._value[numbers[stayed]] = self._value[stayed]
        kept._at_s[numbers[stayed]] = self._at_s[stayed]
        for (gpu, code, gauge), at_s in self._told.items():
            if gpu in rows:
                kept._told[(rows[gpu], code, gauge)] = at_s
        kept._paired = {(rows[g], code, by) for g, code, by in self._paired if g in rows}
        return kept, numbers


def _is_news(j: int, at_s: float, known: Known) -> bool:
    """At the first sight of a source: whether its GPU was already known."""
    same_exporter = known.link_first_s[j] < at_s - 1e-3
    return bool(same_exporter or known.gpu_first_s[j] < at_s - _SETTLED_S)
