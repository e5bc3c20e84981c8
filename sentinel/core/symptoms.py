"""What the counters and states of one GPU say beside its density score.

Two things come from here. *Reasons for throttling*, apart: heat, the power brake of the
system, or the hardware's own word without either; they name a deviation, and are none by
themselves. And *symptoms*, each a ticket that never moves work: a GPU that says it is busy and
does nothing, NVLink errors, a PCIe link that came back slower than it was, memory that filled up
under one job. They are conservative: each compares a GPU with itself under the same work and
takes minutes; what a whole job shows at once is the job's, and is said of no GPU.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from sentinel.core.domain import (
    Bools,
    Evidence,
    Floats,
    Frame,
    Gpu,
    Ints,
    Kind,
    Presence,
    Severity,
    Workload,
)
from sentinel.core.evidence import Finding

_TAU_S: Final = 60.0  # how long a throttle reason is remembered
_SEEN: Final = 0.2  # share of the recent time from which on a reason is worth telling
# name, bits any of which say it, bits which explain it away, words
_REASONS: Final = (
    ("throttle_heat", 0x60, 0x0, "throttled by heat"),
    ("throttle_brake", 0x80, 0x0, "held back by the system's power brake"),
    ("throttle_hw", 0x8, 0xE0, "throttled by the hardware, which gives no reason"),
)
_ACTIVITY: Final = ("sm_active_ratio", "tensor_active_ratio", "dram_active_ratio")
_BUSY: Final = 0.9  # GPU_UTIL from which on a GPU says that it works
_NOTHING: Final = 0.03  # activity below this is none: a collective that waits shows more
_WORKED: Final = 0.1  # activity from which on a GPU has worked in this job ...
_WORKED_S: Final = 600.0  # ... and for so long, before standing still is odd
# Without activity metrics power tells: a kernel that spins draws little more than an idle GPU,
# and work that waits for others, or decodes for few, more than this share of what it drew before.
_DRAWS_NOTHING: Final = 0.35
_HANG_BY_POWER_S: Final = 900.0  # and it is the weaker word of the two
_HANG_S: Final = 300.0  # work that waits for data or writes a checkpoint shows no utilisation
_LINK_BUSY_S: Final = 300.0  # a link that idles saves power at a lower generation
_LINKS: Final = ("pcie_link_width", "pcie_link_gen")
_SPAN_S: Final = 600.0  # errors are counted over so long
_STEPS: Final = 3  # in so many ticks of it
# errors of a healthy link are rare and corrected; each is per `_SPAN_S`
_NVLINK: Final = (
    ("nvlink_recovery_failed", 1.0, "links that could not be brought back"),
    ("nvlink_recovery_errors", 5.0, "times that a link was trained again"),
    ("nvlink_replay_errors", 100.0, "NVLink replays"),
    ("nvlink_crc_data_errors", 100.0, "NVLink CRC errors in data"),
    ("nvlink_crc_errors", 1000.0, "NVLink CRC errors"),
    ("nvlink_rx_errors", 100.0, "NVLink receive errors"),
)
_FULL: Final = 0.985  # of the memory that can be had
_ROOM: Final = 0.85  # had by the same work, and for `_WORKED_S`, before memory filled up


class Symptoms:
    """Remembers each GPU between ticks. `look` costs O(gpus) numpy work, no loop over GPUs."""

    def __init__(self) -> None:
        self._gpus: tuple[Gpu, ...] = ()
        self._at_s = -np.inf
        self._workloads: tuple[Workload | None, ...] = ()
        self._codes: dict[Workload, float] = {}  # of the jobs that run now; 0 is no job
        self._jobs = 0.0
        self._state = np.zeros((_WIDTH, 0))
        self._node = np.zeros(0, dtype=np.int64)

    def look(self, frame: Frame) -> list[Finding]:
        """Symptoms that stand in this frame, each a ticket."""
        self._follow(frame)
        dt_s = frame.at_s - self._at_s
        dt_s = dt_s if 0.0 < dt_s <= _SPAN_S else 0.0
        self._at_s = frame.at_s
        column = {name: i for i, name in enumerate(frame.metrics)}
        present = frame.presence == Presence.PRESENT

        def values(name: str) -> Floats:
            if name not in column:
                return np.full(len(frame.gpus), np.nan)
            return np.where(present, frame.values[:, column[name]], np.nan)

        self._new_work(frame)
        self._throttled(values("throttle_reasons"), dt_s)
        activity = _highest([values(name) for name in _ACTIVITY])
        util = values("gpu_util_ratio")
        out = self._hangs(frame, util, activity, dt_s)
        out += self._spins(frame, util, activity, values("power_w"), dt_s)
        busy = (np.nan_to_num(util) > 0.1) | (np.nan_to_num(activity) > 0.1)
        for k, name in enumerate(_LINKS):
            if name in column:
                out += self._links(frame, k, values(name), busy, dt_s)
        for k, (name, many, words) in enumerate(_NVLINK):
            if name in column:
                out += self._errors(frame, k, name, values(name), many, words)
        out += self._fills(frame, values("fb_used_mib"), values("fb_free_mib"), dt_s)
        return out

    def brakes(self) -> Bools:
        """Where the power brake has been on in the last minutes [gpus]."""
        out: Bools = self._state[_REASON + 1] >= _SEEN
        return out

    def throttling(self, row: int, at_s: float) -> tuple[Evidence, ...]:
        """Why this GPU has been throttled in the last minutes, if it was."""
        out = []
        for k, (name, _, _, words) in enumerate(_REASONS):
            share = float(self._state[_REASON + k, row])
            if share >= _SEEN:
                text = f"{words} {min(share, 1.0):.0%} of the last minutes"
                out.append(Evidence("throttle", name, text, share, 0.0, "", 0.0, at_s))
        return tuple(out)

    def _throttled(self, mask: Floats, dt_s: float) -> None:
        known = np.isfinite(mask)
        bits = np.where(known, mask, 0.0).astype(np.int64)
        weight = 1.0 - np.exp(-dt_s / _TAU_S)
        for k, (_, any_of, but, _) in enumerate(_REASONS):
            now = ((bits & any_of) != 0) & ((bits & but) == 0)
            share = self._state[_REASON + k]
            self._state[_REASON + k] = np.where(known, share + weight * (now - share), share)

    def _hangs(self, frame: Frame, util: Floats, activity: Floats, dt_s: float) -> list[Finding]:
        state = self._state
        state[_DID] += np.where(activity >= _WORKED, dt_s, 0.0)
        stands = (util >= _BUSY) & (activity < _NOTHING) & (state[_DID] >= _WORKED_S)
        known = np.isfinite(util) & np.isfinite(activity)
        state[_STOOD] = np.where(stands, state[_STOOD] + dt_s, np.where(known, 0.0, state[_STOOD]))
        long = np.flatnonzero(stands & (state[_STOOD] >= _HANG_S))
        out = []
        for row in map(int, self._own(long)):
            minutes = state[_STOOD, row] / 60.0
            text = (
                f"GPU utilisation {util[row]:.0%} and no activity for {minutes:.0f} min, though "
                "it worked earlier in this job"
            )
            evidence = Evidence(
                "hang", "gpu_util_ratio", text, float(activity[row]), _WORKED, "", 0.0, frame.at_s
            )
            out.append(_ticket(row, "hang", evidence, Kind.DEVIANT))
        return out

    def _spins(
        self, frame: Frame, util: Floats, activity: Floats, power_w: Floats, dt_s: float
    ) -> list[Finding]:
        """The same where no activity is known: full utilisation at a fraction of the power that
        the same work drew at full utilisation before."""
        state = self._state
        known = np.isfinite(util) & np.isfinite(power_w) & np.isnan(activity)
        busy = known & (util >= _BUSY)
        low = busy & (power_w < _DRAWS_NOTHING * state[_DREW]) & (state[_DRAWN] >= _WORKED_S)
        works = busy & ~low
        weight = np.where(works, dt_s / np.maximum(np.minimum(state[_DRAWN], _SPAN_S) + dt_s, 1), 0)
        state[_DREW] += weight * np.where(works, power_w - state[_DREW], 0.0)
        state[_DRAWN] += np.where(works, dt_s, 0.0)
        state[_SPUN] = np.where(low, state[_SPUN] + dt_s, np.where(known, 0.0, state[_SPUN]))
        out = []
        for row in map(int, self._own(np.flatnonzero(low & (state[_SPUN] >= _HANG_BY_POWER_S)))):
            minutes, drew_w = state[_SPUN, row] / 60.0, float(state[_DREW, row])
            text = (
                f"GPU utilisation {util[row]:.0%} at {power_w[row]:.0f} W for {minutes:.0f} min, "
                f"though it drew {drew_w:.0f} W earlier in this job"
            )
            evidence = Evidence(
                "hang", "power_w", text, float(power_w[row]), drew_w, "W", 0.0, frame.at_s
            )
            out.append(_ticket(row, "hang", evidence, Kind.DEVIANT))
        return out

    def _links(self, frame: Frame, k: int, now: Floats, busy: Bools, dt_s: float) -> list[Finding]:
        """A link that under work is slower than it once was under work, and stays so."""
        best, slow = self._state[_LINK + 2 * k], self._state[_LINK + 2 * k + 1]
        known = busy & np.isfinite(now) & (now > 0)
        lower = known & (now < best)
        slow = np.where(lower, slow + dt_s, np.where(known, 0.0, slow))
        self._state[_LINK + 2 * k] = np.where(known, np.fmax(best, now), best)
        self._state[_LINK + 2 * k + 1] = slow
        out = []
        for row in map(int, np.flatnonzero(lower & (slow >= _LINK_BUSY_S))):
            what = "lanes" if _LINKS[k].endswith("width") else "generation"
            text = f"PCIe {what} {now[row]:.0f} under work, was {best[row]:.0f}"
            evidence = Evidence(
                "pcie_link", _LINKS[k], text, float(now[row]), float(best[row]), "", 0.0, frame.at_s
            )
            out.append(_ticket(row, "PCIe link slower than before", evidence))
        return out

    def _errors(
        self, frame: Frame, k: int, name: str, now: Floats, many: float, words: str
    ) -> list[Finding]:
        """Growth of an error counter over a span of its own, that begins again when it ends; what
        a span has shown stands until the next one has been seen."""
        place = _ERROR + 5 * k
        last, since_s, count, times, shown = self._state[place : place + 5]
        step = np.where(np.isfinite(now - last), np.maximum(now - last, 0.0), 0.0)
        over = frame.at_s - since_s >= _SPAN_S
        # one jump, however far, may be an exporter that counts otherwise from now on
        enough = (times >= _STEPS) | (many <= 1.0)
        shown = np.where(over, np.where(enough, count, 0.0), shown)
        count = np.where(over, 0.0, count) + step
        times = np.where(over, 0.0, times) + (step > 0)
        since_s = np.where(over, frame.at_s, since_s)
        last = np.where(np.isfinite(now), now, last)
        self._state[place : place + 5] = last, since_s, count, times, shown
        enough = (times >= _STEPS) | (many <= 1.0)
        worst = np.fmax(np.where(enough, count, 0.0), shown)
        out = []
        for row in map(int, np.flatnonzero((worst >= many) & np.isfinite(now))):
            text = f"{worst[row]:.0f} {words} within 10 minutes"
            evidence = Evidence(
                "nvlink", name, text, float(worst[row]), 0.0, "errors", 0.0, frame.at_s
            )
            out.append(_ticket(row, "NVLink errors", evidence))
        return out

    def _fills(self, frame: Frame, used: Floats, free: Floats, dt_s: float) -> list[Finding]:
        """Memory that grew under one job until almost none was left. Written down, told to
        nobody: many servers fill their memory on purpose, and at once."""
        with np.errstate(invalid="ignore", divide="ignore"):
            share = used / (used + free)
        state = self._state
        state[_ROOMY] += np.where(share < _ROOM, dt_s, 0.0)
        full = (share >= _FULL) & (state[_ROOMY] >= _WORKED_S)
        state[_FILLED] = np.where(full, state[_FILLED] + dt_s, 0.0)
        out = []
        for row in map(int, np.flatnonzero(full & (state[_FILLED] >= 60.0))):
            text = (
                f"GPU memory {share[row]:.1%} full, {free[row]:.0f} MiB free; the same work had "
                f"left {1 - _ROOM:.0%} of it free"
            )
            evidence = Evidence(
                "memory_full", "fb_used_mib", text, float(used[row]), None, "MiB", 0.0, frame.at_s
            )
            out.append(_ticket(row, "memory full", evidence, severity=Severity.INFO))
        return out

    def _own(self, rows: Ints) -> Ints:
        """Those of the rows whose job mates are, in their majority, not among them; where no job
        is known, the GPUs of the node that have none either."""
        if not len(rows):
            return rows
        work = self._state[_WORK].astype(np.int64)
        _, group = np.unique(np.where(work > 0, work, -1 - self._node), return_inverse=True)
        size = np.bincount(group)
        stand = np.bincount(group[rows], minlength=len(size))
        own: Ints = rows[(stand <= 0.5 * size)[group[rows]] | (size[group[rows]] == 1)]
        return own

    def _new_work(self, frame: Frame) -> None:
        """Another job begins a new account of what a GPU has done under it."""
        if frame.workloads is self._workloads:
            return
        codes: dict[Workload, float] = {}
        for w in frame.workloads:
            if w is not None and w not in codes:
                self._jobs += w not in self._codes
                codes[w] = self._codes.get(w, self._jobs)
        work = np.array([codes[w] if w else 0.0 for w in frame.workloads])
        self._codes = codes
        new = work != self._state[_WORK]
        self._state[_WORK] = work
        self._state[_DID : _FILLED + 1, new] = 0.0
        self._workloads = frame.workloads

    def _follow(self, frame: Frame) -> None:
        if frame.gpus is self._gpus:
            return
        old = {gpu.uuid: row for row, gpu in enumerate(self._gpus)}
        source = np.array([old.get(gpu.uuid, -1) for gpu in frame.gpus], dtype=np.int64)
        fresh = np.zeros((_WIDTH, len(source)))
        for k in range(len(_NVLINK)):
            fresh[_ERROR + 5 * k] = np.nan
            fresh[_ERROR + 5 * k + 1] = frame.at_s
        kept = source >= 0
        fresh[:, kept] = self._state[:, source[kept]]
        self._state, self._gpus, self._workloads = fresh, frame.gpus, ()
        number: dict[str, int] = {}
        nodes = [number.setdefault(gpu.node, len(number)) for gpu in frame.gpus]
        self._node = np.array(nodes, dtype=np.int64)


# rows of the state, [rows, gpus]
_REASON: Final = 0
_WORK: Final = _REASON + len(_REASONS)
_DID, _STOOD, _DREW, _DRAWN, _SPUN, _ROOMY, _FILLED = range(_WORK + 1, _WORK + 8)
_LINK: Final = _FILLED + 1  # of each: the best under work, and how long it has been slower
_ERROR: Final = _LINK + 2 * len(
    _LINKS
)  # of each: last value, since when, count, steps, the last count
_WIDTH: Final = _ERROR + 5 * len(_NVLINK)


def _highest(arrays: list[Floats]) -> Floats:
    """The highest of what is known; NaN where nothing is."""
    out = arrays[0]
    for array in arrays[1:]:
        out = np.fmax(out, array)
    return out


def _ticket(
    row: int,
    pattern: str,
    evidence: Evidence,
    kind: Kind = Kind.FAULT,
    severity: Severity = Severity.WARNING,
) -> Finding:
    """What the counters of one GPU say is a fault of its own and no sign of a fleet that drifts;
    none of it fences, moves or stays once it is over."""
    return Finding(row, kind, severity, pattern, evidence, False, False, False)
