"""Hard evidence: what the hardware itself says is broken, free of application errors.

Edges are events: a new Xid, an uncorrectable ECC counter that grows. Levels stand while they
stand: a failed row remap, a recovery action that the driver asks for, a GPU that vanished
while its siblings report. An application's Xid never fences or moves (the catalogue says
which); one code over many GPUs of one job is that job's event, not many faults.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

import numpy as np

from sentinel.core.catalog import Catalog
from sentinel.core.domain import Bools, Evidence, Floats, Frame, Gpu, Kind, Presence, Severity

RANK: Final = {Severity.INFO: 0, Severity.WARNING: 1, Severity.CRITICAL: 2}
_COUNTERS: Final = ("ecc_dbe_volatile", "ecc_dbe_aggregate")
_CORRECTED: Final = ("ecc_sbe_volatile", "ecc_sbe_aggregate")
_SINCE_RESET: Final = ("energy_j", "ecc_dbe_volatile")  # both start at 0 with the driver
_KNOWN_S: Final = 60.0  # a GPU seen for so long is known: a counter that it gets is news
_STORM_S: Final = 60.0  # corrected errors are counted over so long
_STORM_PER_S: Final = 10.0  # and at this rate they slow the driver down; healthy memory has none
_BURST_GPUS: Final = 3  # one code on so many GPUs of one job, on two nodes or more, at once
_RECOVERY: Final = {
    1: ("GPU reset required", Severity.CRITICAL, True),
    2: ("node reboot required", Severity.CRITICAL, True),
    3: ("drain of peer-to-peer required", Severity.WARNING, False),
    4: ("drain and reset required", Severity.CRITICAL, True),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One piece of hard evidence on the GPU in frame row `row`."""

    row: int
    kind: Kind
    severity: Severity
    pattern: str
    evidence: Evidence
    fence: bool
    move: bool
    latch: bool


class HardWatch:
    """Remembers the counters of every GPU between ticks, so that only growth is news.

    Counters that are already high when a GPU is first seen are history, not an event. Newer
    exporters leave a counter out until it counts: one that a known GPU gets while none of its
    siblings has it has just begun to count.
    """

    def __init__(self) -> None:
        self._gpus: tuple[Gpu, ...] = ()
        self._last = np.zeros((0, len(_COUNTERS)))
        self._grows = np.zeros((0, len(_SINCE_RESET)))
        self._xid = np.zeros(0)
        self._since_s = np.zeros(0)  # first frame in which each GPU was heard
        # of each count of corrected errors: what it was, when, and the rate since (1/s)
        self._storm = np.zeros((len(_CORRECTED), 3, 0))

    def look(self, frame: Frame, catalog: Catalog) -> tuple[list[Finding], frozenset[int]]:
        """Findings of this tick, and the rows whose GPU has been reset since the last one."""
        self._follow(frame)
        column = {name: i for i, name in enumerate(frame.metrics)}
        findings = [*_vanished(frame), *_levels(frame, column), *_xids(frame, catalog)]
        findings += self._storms(frame, column)
        reset: set[int] = set()
        for c, name in enumerate(_COUNTERS):
            if name not in column:
                continue
            now = frame.values[:, column[name]]
            before = np.where(self._begins(frame, now, self._last[:, c]), 0.0, self._last[:, c])
            grown = map(int, np.flatnonzero(now > before))  # never where either is unknown
            findings += [
                _ecc(frame, row, name, before[row], now[row])
                for row in grown
                if name == _COUNTERS[0] or not _counts(frame, column, _COUNTERS[0], row)
            ]
            self._last[:, c] = np.where(np.isfinite(now), now, before)
        reset.update(self._started_anew(frame, column))
        if "xid" in column:
            now = frame.values[:, column["xid"]]
            reset.update(int(row) for row in np.flatnonzero((self._xid > 0) & (now == 0)))
            self._xid = np.where(np.isfinite(now), now, self._xid)
        heard = frame.presence == Presence.PRESENT
        self._since_s = np.where(heard, np.minimum(self._since_s, frame.at_s), self._since_s)
        return findings, frozenset(reset)

    def _storms(self, frame: Frame, column: dict[str, int]) -> list[Finding]:
        """GPUs whose memory is being corrected all the time. No baseline is needed to say so."""
        worst = np.zeros(len(frame.gpus))
        for c, name in enumerate(_CORRECTED):
            if name not in column:
                continue
            now, (count, at_s, rate) = frame.values[:, column[name]], self._storm[c]
            new = np.isfinite(now) & np.isnan(count)
            due = ~new & (frame.at_s - at_s >= _STORM_S) & np.isfinite(now)
            rate[due] = (now - count)[due] / (frame.at_s - at_s)[due]
            count[new | due], at_s[new | due] = now[new | due], frame.at_s
            worst = np.maximum(worst, rate)
        here = np.flatnonzero((worst >= _STORM_PER_S) & (frame.presence == Presence.PRESENT))
        return [_storm(frame, int(row), float(worst[row])) for row in here]

    def _begins(self, frame: Frame, now: Floats, before: Floats) -> Bools:
        """Where a counter has just begun, of a GPU that is known; never in an answer in part,
        and not where its siblings have it too: then the exporter was told to show it."""
        known = (frame.presence == Presence.PRESENT) & (frame.at_s - self._since_s > _KNOWN_S)
        begins: Bools = np.isnan(before) & (now > 0) & known
        for row in np.flatnonzero(begins):
            node = frame.gpus[row].node
            others = [r for r, g in enumerate(frame.gpus) if g.node == node and r != row]
            if not others or frame.coverage.partial or np.isfinite(now[others]).any():
                begins[row] = False
        return begins

    def _started_anew(self, frame: Frame, column: dict[str, int]) -> set[int]:
        """Rows whose driver or GPU began again: what only ever grows has fallen."""
        out: set[int] = set()
        for c, name in enumerate(_SINCE_RESET):
            if name in column:
                now, before = frame.values[:, column[name]], self._grows[:, c]
                out.update(int(row) for row in np.flatnonzero(now < before))
                self._grows[:, c] = np.where(np.isfinite(now), now, before)
        return out

    def _follow(self, frame: Frame) -> None:
        if frame.gpus is self._gpus:
            return
        old = {gpu.uuid: row for row, gpu in enumerate(self._gpus)}
        last = np.full((len(frame.gpus), len(_COUNTERS)), np.nan)
        grows = np.full((len(frame.gpus), len(_SINCE_RESET)), np.nan)
        xid = np.full(len(frame.gpus), np.nan)
        since_s = np.full(len(frame.gpus), np.inf)
        storm = np.empty((len(_CORRECTED), 3, len(frame.gpus)))
        storm[:] = np.array([np.nan, -np.inf, 0.0])[:, None]
        for row, gpu in enumerate(frame.gpus):
            if gpu.uuid in old:
                was = old[gpu.uuid]
                last[row], xid[row] = self._last[was], self._xid[was]
                grows[row] = self._grows[was]
                since_s[row], storm[:, :, row] = self._since_s[was], self._storm[:, :, was]
        self._last, self._xid, self._since_s, self._gpus = last, xid, since_s, frame.gpus
        self._grows, self._storm = grows, storm


def _counts(frame: Frame, column: dict[str, int], name: str, row: int) -> bool:
    return name in column and bool(np.isfinite(frame.values[row, column[name]]))


def _vanished(frame: Frame) -> list[Finding]:
    out = []
    for row in np.flatnonzero(frame.presence == Presence.VANISHED):
        gpu = frame.gpus[row]
        seen = frame.last_seen_s[row] if len(frame.last_seen_s) else np.nan
        known = bool(np.isfinite(seen)) and seen > 0.0
        since = f" since {_clock(float(seen))}" if known else ""
        text = (
            f"GPU {gpu.index if gpu.index is not None else gpu.uuid} of {gpu.node} has not "
            f"reported{since} while its siblings on the same exporter do"
        )
        evidence = Evidence("lost", "up", text, at_s=float(seen) if known else frame.at_s)
        out.append(
            Finding(int(row), Kind.LOST, Severity.CRITICAL, "GPU lost", evidence, True, True, False)
        )
    return out


def _clock(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%H:%M:%S UTC")


def _levels(frame: Frame, column: dict[str, int]) -> list[Finding]:
    out: list[Finding] = []
    present = frame.presence == Presence.PRESENT

    def rows(name: str) -> tuple[Floats, list[int]]:
        if name not in column:
            return np.empty(0), []
        values = frame.values[:, column[name]]
        return values, [int(r) for r in np.flatnonzero((values >= 1) & present)]

    values, where = rows("remap_failure")
    for row in where:
        text = "row remapping failed: the GPU has no spare memory rows left for a bad one"
        evidence = Evidence(
            "remap", "remap_failure", text, float(values[row]), 0.0, "", 1.0, frame.at_s
        )
        pattern = "memory row remap failure"
        out.append(Finding(row, Kind.FAULT, Severity.CRITICAL, pattern, evidence, True, True, True))
    values, where = rows("remap_pending")
    for row in where:
        text = "a memory row remap is pending: it takes effect at the next GPU reset"
        evidence = Evidence(
            "remap", "remap_pending", text, float(values[row]), 0.0, "", 1.0, frame.at_s
        )
        pattern = "row remap pending"
        out.append(
            Finding(row, Kind.FAULT, Severity.WARNING, pattern, evidence, False, False, False)
        )
    values, where = rows("recovery_action")
    for row in where:
        code = int(values[row])
        pattern, severity, act = _RECOVERY.get(
            code, (f"recovery action {code}", Severity.WARNING, False)
        )
        text = f"the driver asks for a recovery action: {pattern} (code {code})"
        evidence = Evidence(
            "recovery", "recovery_action", text, float(code), 0.0, "", 1.0, frame.at_s
        )
        out.append(Finding(row, Kind.FAULT, severity, pattern, evidence, act, act, False))
    return out


def _ecc(frame: Frame, row: int, name: str, before: float, now: float) -> Finding:
    text = (
        f"uncorrectable ECC errors rose from {before:.0f} to {now:.0f}: data in GPU memory was lost"
    )
    evidence = Evidence("ecc", name, text, float(now), float(before), "errors", 1.0, frame.at_s)
    return Finding(
        row, Kind.FAULT, Severity.CRITICAL, "uncorrectable ECC", evidence, True, True, True
    )


def _storm(frame: Frame, row: int, rate: float) -> Finding:
    text = f"{rate:.0f} corrected ECC errors per second: the memory is failing"
    evidence = Evidence("ecc", _CORRECTED[0], text, rate, 0.0, "1/s", 1.0, frame.at_s)
    pattern = "correctable ECC storm"
    return Finding(row, Kind.FAULT, Severity.WARNING, pattern, evidence, False, False, False)


def _xids(frame: Frame, catalog: Catalog) -> list[Finding]:
    out: list[Finding] = []
    together: dict[tuple[int, str], list[int]] = defaultdict(list)
    for event in frame.xids:
        row = catalog.xid(event.code)
        gpu = frame.gpus[event.row]
        text = f"Xid {event.code} on {gpu.node}: {row.meaning}"
        evidence = Evidence("xid", "xid", text, float(event.code), 0.0, "", 1.0, event.at_s)
        work = frame.workloads[event.row]
        if work is not None:
            together[(event.code, work.id)].append(len(out))
        acts = row.fence or row.move
        out.append(
            Finding(
                event.row,
                Kind.FAULT,
                row.severity,
                row.pattern,
                evidence,
                row.fence,
                row.move,
                acts,
            )
        )
    for (code, job), places in together.items():
        rows = {out[i].row for i in places}
        if len(rows) < _BURST_GPUS or len({frame.gpus[r].node for r in rows}) < 2:
            continue
        for i in places:
            own = out[i]
            hardware = own.fence or own.move
            why = "nothing is moved by itself" if hardware else "the job's event, not a GPU's"
            text = (
                f"{own.evidence.text}; the same Xid {code} on {len(rows)} GPUs of job {job}: {why}"
            )
            evidence = replace(own.evidence, text=text)
            out[i] = replace(own, fence=False, move=False, latch=False, evidence=evidence)
    return out
