"""Why a GPU reports or does not: the causes of absence told apart.

One GPU that is missing while its siblings on the same exporter report is evidence; a host, an
exporter or a network that is silent says nothing of any GPU. Every doubt is resolved towards
not knowing: an exporter that has only just come back may still be finding its GPUs, and an
answer in part leaves out what it likes.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from sentinel.core.domain import Bools, Floats, Ints, Presence
from sentinel.core.series import Roster

TOGETHER_S: Final = 1e-3  # samples so close are of one scrape
BEHIND: Final = 1.5  # scrape intervals behind its siblings: two scrapes were missed
_INTERVAL_S: Final = 60.0  # assumed of an exporter that was seen only once
_RETURN_S: Final = 180.0  # an exporter that comes back shows its GPUs by then, or 6 intervals
_SILENT_S: Final = 60.0  # an exporter that says nothing for so long, or 3 intervals, is silent


class Attendance:
    """Reads who is there off the roster's links and exporters. `stale_after_s`: when an
    exporter without samples counts as silent; by default 60 s or three of its intervals."""

    def __init__(self, roster: Roster, stale_after_s: float | None = None) -> None:
        self._roster, self._stale_after_s = roster, stale_after_s

    def intervals_s(self) -> Floats:
        """The scrape interval of each exporter [exporters], assumed where it is unknown."""
        interval_s = self._roster.exporters.interval_s
        return np.where(np.isfinite(interval_s), interval_s, _INTERVAL_S)

    def gpu_intervals_s(self) -> Floats:
        """The longest scrape interval of the exporters that show each GPU [gpus]."""
        links, out = self._roster.links, np.zeros(len(self._roster.uuids))
        np.maximum.at(out, links.gpu, self.intervals_s()[links.exporter])
        return out

    def note_returns(self, exporter: Ints, at_s: Floats) -> None:
        """When an exporter speaks again after it missed a scrape or more. One that falls silent
        again soon is still coming back: a flapping one must not hide a lost GPU for ever."""
        exporters, limit_s = self._roster.exporters, BEHIND * self.intervals_s()
        first_s = np.full(exporters.rows, np.inf)
        np.minimum.at(first_s, exporter, at_s)
        last_s = np.full(exporters.rows, -np.inf)
        np.maximum.at(last_s, exporter, at_s)
        new = np.isfinite(first_s) & np.isneginf(exporters.at_s)
        exporters.first_s[new] = first_s[new]
        back = ~new & np.isfinite(first_s) & (first_s - exporters.at_s > limit_s)
        settled = first_s - exporters.resumed_s >= self._return_s()
        exporters.resumed_s[back & settled] = first_s[back & settled]
        for row in np.flatnonzero(last_s - first_s > limit_s):  # several scrapes in one answer
            times = np.unique(at_s[exporter == row])
            for at in times[1:][np.diff(times) > limit_s[row]]:
                if at - exporters.resumed_s[row] >= self._return_s()[row]:
                    exporters.resumed_s[row] = at

    def of_gpus(self, at_s: float, *, complete: bool) -> npt.NDArray[np.int8]:
        """`Presence` of every GPU [gpus]. A GPU has one link per exporter that ever showed it.

        It vanished if the exporter that showed it last goes on with its siblings, or if those
        siblings have moved together to a new exporter; never on an answer in part. Where that
        exporter has itself only just come back, the GPU may still be on its way. Where another
        has come to its place since, it was taken out.
        """
        links, exporters = self._roster.links, self._roster.exporters
        interval_s = self.intervals_s()
        alive = self._alive(at_s, interval_s)
        on = links.exporter
        with np.errstate(invalid="ignore"):  # neither was heard yet: not behind
            behind = exporters.at_s[on] - links.at_s >= BEHIND * interval_s[on]
        heard = alive[on] & ~behind
        gpus = len(self._roster.uuids)
        present = np.bincount(links.gpu[heard], minlength=gpus) > 0
        out = np.where(present, Presence.PRESENT, Presence.HOST_SILENT).astype(np.int8)
        if not complete or present.all():
            return out
        last = np.zeros(gpus, dtype=np.int64)
        order = np.lexsort((links.at_s, links.gpu))
        last[links.gpu[order]] = order  # the last of each GPU is its newest link
        home = on[last]
        heir = self._roster.heirs(heard, ~alive, interval_s)
        moved = ~alive[home] & (heir[home] >= 0)
        home = np.where(moved, heir[home], home)
        coming = np.zeros(gpus, dtype=bool)
        for since_s in (exporters.first_s, exporters.resumed_s):
            with np.errstate(invalid="ignore"):  # one that was never heard is not coming back
                lately = exporters.at_s - since_s < self._return_s()
            coming |= lately[home] & (links.at_s[last] < since_s[home])
        gone = ~present & alive[home] & ~coming & self._left_siblings(heard, last, home, moved)
        for row in np.flatnonzero(gone):
            if not self._was_replaced(int(row), int(last[row]), int(home[row])):
                out[row] = Presence.VANISHED
        return out

    def _left_siblings(self, heard: Bools, last: Ints, home: Ints, moved: Bools) -> Bools:
        """Whether `home` goes on with GPUs [gpus] of the same node that it showed, or where
        they moved there that were known, before the GPU left it.

        Others are no siblings: one exporter may speak for several nodes, and an address may
        come to another node, or to a virtual machine with other GPUs.
        """
        links, first_s = self._roster.links, self._roster.gpus.first_s
        nodes, at = len(self._roster.nodes), np.flatnonzero(heard)
        if not len(at):
            return np.zeros(len(home), dtype=bool)
        base = links.exporter[at] * nodes
        # a node whose name has changed since the GPU left is still its node
        groups, group = np.unique(
            np.append(base + links.node[at], base + links.was[at]), return_inverse=True
        )
        since_s, known_s = np.full(len(groups), np.inf), np.full(len(groups), np.inf)
        np.minimum.at(since_s, group, np.tile(links.first_s[at], 2))
        np.minimum.at(known_s, group, np.tile(first_s[links.gpu[at]], 2))
        own = home * nodes + links.node[last]
        found = np.minimum(np.searchsorted(groups, own), len(groups) - 1)
        there_s = np.where(moved, known_s[found], since_s[found])
        left: Bools = (groups[found] == own) & (there_s <= links.at_s[last])
        return left

    def _was_replaced(self, row: int, link: int, home: int) -> bool:
        """Whether a GPU that nobody had seen before has come to the place of one that is gone."""
        links = self._roster.links
        other = self._roster.successor(home, int(links.index[link]))
        came_s = self._roster.gpus.first_s[other] if other >= 0 else -np.inf
        return other != row and bool(came_s > links.at_s[link])

    def _alive(self, at_s: float, interval_s: Floats) -> Bools:
        exporters = self._roster.exporters
        limit_s = np.maximum(_SILENT_S, 3.0 * interval_s)
        if self._stale_after_s is not None:
            limit_s = np.full(len(interval_s), self._stale_after_s)
        down = (exporters.up == 0) & (exporters.up_s >= exporters.at_s - TOGETHER_S)
        alive: Bools = ~down & (at_s - exporters.at_s <= limit_s)
        return alive

    def _return_s(self) -> Floats:
        return np.maximum(_RETURN_S, 6.0 * self.intervals_s())
