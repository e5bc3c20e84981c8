"""Peers: the GPU that answers unlike its mates, and the job that slows down without one.

Mates are told by `jobs.py`, distances by `residuals.py`; here they become a word on a GPU.
1.0 is the edge of normal, as for the density; it needs no learnt baseline.

A job in step goes at the pace of its slowest GPU. The others wait: their tensor and DRAM
activity and power fall together while their utilisation stays at 100 %, which is therefore no
evidence. So activity that *falls* accuses nobody; the culprit is the GPU whose answer is odd
(clock low, hot, throttled) or whose activity does *not* fall while all others' does. Where a
pace falls and none stands out, the subject is the job.

Abstains where it cannot know: fewer than three mates, work that has just changed, no activity
metrics where they are needed, a GPU that does other work than its mates, more than a quarter
of the mates odd at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np

from sentinel.core.domain import (
    Bools,
    Evidence,
    Floats,
    Frame,
    Gpu,
    Ints,
    JobFinding,
    Mates,
    Severity,
)
from sentinel.core.features import Features
from sentinel.core.residuals import (
    ACT,
    CLOCK,
    DRAM,
    FLOOR,
    HEAT,
    MEM_CLOCK,
    MEM_HEAT,
    NVLINK,
    OTHERS,
    POWER,
    SM,
    TENSOR,
    THROTTLED,
    Past,
    Residuals,
)

STRAGGLER: Final = "slower than its job mates"
ALIKE: Final = "alike"  # the metric of evidence that its neighbours share what it shows
SLOW_JOB: Final = "job slower than before"

_SLACK: Final = 0.3  # of the edge that its own change may lack
_MORE_WORK: Final = 0.05  # activity of its own that grew by so much: it is asked to do more
_POWER_FELL: Final = -0.02  # a clock that is low for a fault draws less
_MORE_POWER: Final = 0.10  # than its mates: of GPUs with loads of their own it does more work
_LESS_WORK: Final = -0.10  # activity below its mates' by so much: it does less, or waits itself
_UTIL_LESS: Final = 0.10
_AT_WORK: Final = 0.3  # utilisation: below it clocks may rest between requests
_PACE_FELL: Final = -0.035  # the mates wait: so much less tensor and DRAM activity,
_ITS_FELL: Final = -0.02  # and so much in the signal told: a collective holds some SMs
_PACE_STOPS: Final = -0.8  # (to 45 %) a stop for evaluation or a checkpoint, not a slow mate
_MATES_STOP: Final = -0.45  # (to 64 %) and so much less is work that went elsewhere
_MOMENTS: Final = 0.5  # so many of the recent ones are slow, where it is slow and does not stop
_STEADY: Final = 0.5  # of the mates' fall: its own activity falls by less than that,
_FALLS: Final = 0.06  # and than this,
_RISES: Final = 0.06  # and rises by no more, where it had to wait for others before
_STANDS_OUT: Final = 0.75  # of the first: others that go on as well are noise, unless as far
_ALIKE: Final = 0.5  # of its own deviation, in the median of its neighbours
_ODD_SHARE: Final = 0.25  # of a group: more of them odd is no fault of one
# From the start: a clock below the mates' by so much, at like demand and no more power, where
# the mates agree among themselves. Healthy chips at one power cap differ by 3 to 4 %, and 15 %
# more activity costs under the cap another 6 %.
DEFICIT: Final = -np.log(1.0 - 0.13)
_AGREE: Final = 0.03
_LIKE_LOW: Final = -0.16  # activity, as a logarithm: at least 85 % of the mates'
_LIKE_HIGH: Final = 0.14  # at most 15 % more, unless it draws less power than they
_LIKE_POWER: Final = -0.03
_BUSY: Final = 0.5  # utilisation: below it clocks rest
_JOB_FELL: Final = -0.083  # 8 %
_SAME_WORK: Final = 0.3  # tensor and DRAM activity fall alike where it is only slower
_PAUSE_S: Final = 300.0
_JOB_FOR_S: Final = 600.0
_JOB_FOR_TICKS: Final = 40.0
_JOB_UTIL: Final = 0.9


class Why(IntEnum):
    """What stands out on a GPU; the order of a tie."""

    NOTHING = 0
    LOW_CLOCK = 1
    LOW_MEM_CLOCK = 2
    HOT = 3
    HOT_MEMORY = 4
    THROTTLED = 5
    WORKS_THROUGH = 6
    LOW_FROM_START = 7


_OWN: Final = (Why.LOW_CLOCK, Why.LOW_MEM_CLOCK, Why.HOT, Why.HOT_MEMORY, Why.THROTTLED)
_SIGNAL: Final = {
    Why.LOW_CLOCK: CLOCK,
    Why.LOW_MEM_CLOCK: MEM_CLOCK,
    Why.HOT: HEAT,
    Why.HOT_MEMORY: MEM_HEAT,
    Why.THROTTLED: THROTTLED,
    Why.LOW_FROM_START: CLOCK,
}
_METRIC: Final = (
    "sm_clock_mhz",
    "mem_clock_mhz",
    "power_w",
    "temp_c",
    "mem_temp_c",
    "throttle_reasons",
    "sm_active_ratio",
    "tensor_active_ratio",
    "dram_active_ratio",
    "nvlink_tx_bytes_per_s",
)
_LABEL: Final = (
    "SM clock",
    "memory clock",
    "power",
    "GPU temperature",
    "HBM temperature",
    "throttling by heat or hardware",
    "SM activity",
    "tensor activity",
    "DRAM activity",
    "NVLink traffic",
)


@dataclass(frozen=True, slots=True, eq=False)
class Peers:
    """One tick's word. `score` [gpus], NaN where it abstains; `why` int8 [gpus] of `Why`;
    `acts` [gpus]: what stands out is the GPU's own answer and its neighbours do not share it,
    so it may page; `comparable` [gpus]: GPUs that it was compared with; `abstains` [gpus]:
    why there is no word, in the words of `ABSTAINS`."""

    score: Floats
    why: Ints
    acts: Bools
    comparable: Ints
    abstains: Ints
    jobs: tuple[JobFinding, ...] = ()


ABSTAINS: Final = (
    "",
    "not present, without work, or work that has just changed",
    "fewer than three comparable GPUs",
    "what is normal for it in this job is still being learnt",
    "too many of its mates are odd at once",
)


class PeerWatch:
    """What the tick keeps to compare GPUs with their mates; never persisted."""

    def __init__(self) -> None:
        self.past = Past()
        self._since_s: dict[str, tuple[float, float]] = {}  # first and last seen to stand out
        self._slow_s = np.zeros(0)
        self._gpus: tuple[Gpu, ...] = ()
        self._seen: Residuals | None = None
        self._scores = np.zeros((len(Why), 0))

    def look(self, frame: Frame, features: Features, settle_s: float) -> Peers:
        """Compares every GPU with its mates, then learns. O(gpus log gpus), no loop over GPUs."""
        seen = self.past.look(frame, features, settle_s)
        roster, groups = self.past.roster, self.past.roster.groups
        comparable = self._comparable(seen, frame)
        with np.errstate(invalid="ignore"):
            scores = self._scored(seen)
        scores[:, seen.others < OTHERS] = np.nan
        best = np.nan_to_num(scores, nan=-np.inf).max(axis=0)
        odd = best > 1.0
        hit, among = groups.share(odd, seen.valid)
        crowd = (hit > 1) & (hit > _ODD_SHARE * among)
        crowded = np.zeros(len(best), dtype=bool)
        if len(groups.size):
            crowded = (groups.code >= 0) & crowd[np.maximum(groups.code, 0)]
        scores[:, crowded & odd] = np.nan
        ranked = np.nan_to_num(scores, nan=-1.0)
        score = np.where(np.isfinite(scores).any(axis=0), np.maximum(ranked.max(axis=0), 0), np.nan)
        # its own answer explains why it alone goes on, not the other way round
        own = ranked[list(_OWN)].max(axis=0) > 1.0
        ranked[np.ix_([Why.WORKS_THROUGH, Why.LOW_FROM_START], own)] = -1.0
        why = np.where(np.isnan(score), 0, np.argmax(ranked, axis=0))
        self._seen, self._scores = seen, scores
        out = score > 1.0
        jobs = self._slow_jobs(frame, seen, out)
        self._remember(frame, out)
        self.past.learn(seen, odd, roster.jobs.most(np.where(out, 1.0, 0.0)) > 0.0)
        abstains = np.zeros(len(score), dtype=np.int64)
        abstains[np.isnan(score)] = 3
        abstains[crowded & odd] = 4
        abstains[seen.others < OTHERS] = 2
        abstains[~seen.valid] = 1
        acts = out & roster.first & np.isin(why, _OWN) & ~self._with_neighbours(score, why)
        return Peers(score, why.astype(np.int64), acts, comparable, abstains, jobs)

    # ---- what stands out ------------------------------------------------------------

    def _scored(self, seen: Residuals) -> Floats:
        """[Why, gpus] in units of the edge; NaN where there is no word."""
        roster = self.past.roster
        scores = np.full((len(Why), seen.d.shape[1]), np.nan)
        scaled = _moved_itself(seen) / seen.edge
        asked = self._asked_alike(seen)
        scores[Why.LOW_CLOCK] = np.where(asked, -scaled[CLOCK], np.nan)
        scores[Why.LOW_MEM_CLOCK] = np.where(asked, -scaled[MEM_CLOCK], np.nan)
        scores[Why.HOT], scores[Why.HOT_MEMORY] = scaled[HEAT], scaled[MEM_HEAT]
        scores[Why.THROTTLED] = scaled[THROTTLED]
        scores[Why.WORKS_THROUGH] = self._culprit(scores, _works_through(seen))
        scores[Why.LOW_FROM_START] = np.where(roster.first, _from_the_start(seen), np.nan)
        return scores

    def _culprit(self, scores: Floats, through: Floats) -> Floats:
        """Of those who do not wait, the one that stands out; where another GPU of the job has
        an odd answer of its own, nobody but it."""
        roster = self.past.roster
        own = scores[list(_OWN)].max(axis=0, initial=-np.inf, where=np.isfinite(scores[list(_OWN)]))
        first = through >= _STANDS_OUT * roster.jobs.most(through)
        explained = (roster.jobs.most(own) > 1.0) & ~(own > 1.0)
        return np.where(roster.in_step & first & ~explained, through, np.nan)

    def _asked_alike(self, seen: Residuals) -> Bools:
        """Where a low clock says something: the GPU does not do less than its mates, and was
        not given more to do, which under a power cap costs clock."""
        act = seen.d[ACT]
        told = np.isfinite(act).any(axis=0)
        least = np.nan_to_num(act, nan=-np.inf).max(axis=0)
        groups, in_step = self.past.roster.groups, self.past.roster.in_step
        util, _ = groups.median(np.where(seen.valid, seen.util, np.nan)[None])
        waits = seen.util < np.where(in_step, groups.of_rows(util)[0] - _UTIL_LESS, _AT_WORK)
        less = np.where(told & in_step, least < _LESS_WORK, waits)
        grown = (seen.c - np.maximum(np.nan_to_num(seen.pace), 0.0))[[*ACT, POWER]]
        more = np.nan_to_num(grown[:3], nan=-np.inf).max(axis=0) > _MORE_WORK
        more &= in_step & ~(grown[3] < _POWER_FELL)
        more |= ~in_step & (np.nan_to_num(seen.d[POWER]) > _MORE_POWER)
        unsure = ~told & (np.nan_to_num(seen.capped, nan=1.0) > 0.5) & ~(grown[3] < _POWER_FELL)
        asked: Bools = ~(less | more | unsure)
        return asked

    def _comparable(self, seen: Residuals, frame: Frame) -> Ints:
        """GPUs that each could be compared with: its mates, else all of its model that are at
        work or all that rest, as it does."""
        models = self.past.roster.models
        out = np.where(seen.others >= OTHERS, seen.others, 0.0)
        present = frame.presence == 0
        for alike in (seen.valid, present & ~seen.valid):
            _, among = models.share(alike, alike)
            if len(among):
                many = among[np.maximum(models.code, 0)] - 1.0
                out = np.where(alike & (out < OTHERS), many, out)
        return out.astype(np.int64)

    def _with_neighbours(self, score: Floats, why: Ints) -> Bools:
        """Whether the other GPUs of its node, in the median, stand out in the same way."""
        alike = np.zeros(len(score), dtype=bool)
        nodes = self.past.roster.nodes
        for row in np.flatnonzero(score > 1.0).tolist():
            others = nodes.members(int(nodes.code[row]))
            others = others[(others != row) & np.isfinite(self._scores[why[row], others])]
            if len(others) >= OTHERS:
                typical = float(np.median(self._scores[why[row], others]))
                alike[row] = typical >= _ALIKE * score[row]
        return alike

    # ---- jobs -----------------------------------------------------------------------

    def _slow_jobs(self, frame: Frame, seen: Residuals, out: Bools) -> tuple[JobFinding, ...]:
        """Jobs in step whose pace fell for long, with nobody to blame."""
        if frame.gpus is not self._gpus:
            before = {gpu.uuid: s for gpu, s in zip(self._gpus, self._slow_s, strict=True)}
            self._slow_s = np.array([before.get(gpu.uuid, 0.0) for gpu in frame.gpus])
            self._gpus = frame.gpus
        roster = self.past.roster
        tensor, dram, traffic = seen.pace[[TENSOR, DRAM, NVLINK]]
        with np.errstate(invalid="ignore"):
            fell = np.maximum(tensor, dram)
            slow = roster.in_step & seen.valid & (fell <= _JOB_FELL) & (fell >= _PACE_STOPS)
            slow &= np.abs(tensor - dram) <= _SAME_WORK * np.abs(fell) + 0.02
            slow &= np.abs(seen.c[TENSOR] - tensor) <= _SAME_WORK * np.abs(fell) + 0.02
            # a job that was given less to do takes its steps more often: traffic tells them apart
            slow &= np.abs(traffic - tensor) <= _SAME_WORK * np.abs(fell) + 0.05
            slow &= (seen.util >= _JOB_UTIL) & (seen.others >= OTHERS)
            slow &= seen.steadily >= _MOMENTS
        self._slow_s = np.maximum(self._slow_s + np.where(slow, seen.dt_s, -seen.dt_s), 0.0)
        wait_s = max(_JOB_FOR_S, _JOB_FOR_TICKS * seen.dt_s)
        told = slow & (self._slow_s >= wait_s)
        if not told.any():
            return ()
        hit, among = roster.jobs.share(told, seen.valid)
        blamed, _ = roster.jobs.share(out, seen.valid)
        found = np.flatnonzero((hit > OTHERS) & (hit >= 0.5 * among) & (blamed == 0))
        return tuple(self._job_finding(int(g), seen, told) for g in found)

    def _job_finding(self, group: int, seen: Residuals, told: Bools) -> JobFinding:
        rows = self.past.roster.jobs.members(group)
        rows = rows[told[rows]]
        mates = self.past.roster.mates[int(rows[0])]
        assert mates is not None
        fell = float(np.expm1(np.median(seen.pace[TENSOR, rows])))
        long_s = float(np.median(self._slow_s[rows]))
        text = (
            f"tensor and DRAM activity and NVLink traffic {fell:+.0%} on {len(rows)} GPUs of job "
            f"{mates.group} for {_span(long_s)}, at full utilisation: they wait, and none of them "
            "stands out"
        )
        evidence = Evidence(
            "peers", _METRIC[TENSOR], text, 1.0 + fell, 1.0, "of its earlier pace", at_s=seen.at_s
        )
        return JobFinding(
            mates,
            Severity.WARNING,
            SLOW_JOB,
            evidence,
            seen.at_s - long_s,
            tuple(int(r) for r in rows),
        )

    # ---- words ----------------------------------------------------------------------

    def explain(self, row: int, peers: Peers, at_s: float) -> tuple[Evidence, ...]:
        """What stands out on a GPU: how far, against whom, since when; then what else moved."""
        seen, why = self._seen, Why(int(peers.why[row]))
        assert seen is not None
        uuid = self.past.roster.gpus[row].uuid
        since_s, _ = self._since_s.get(uuid, (at_s, at_s))
        against = self._against(row)
        score = float(peers.score[row])
        if why is Why.WORKS_THROUGH:
            signal = _strongest(seen, row)
            fell = float(np.expm1(seen.pace[signal, row]))
            own = float(np.expm1(seen.c[signal, row]))
            text = (
                f"{_LABEL[signal]} {own:+.0%} while that of {against} fell by {-fell:.0%}: they "
                f"wait, this GPU does not{_since(at_s, since_s)}"
            )
            value, expected, unit = own, fell, "change"
        else:
            signal = _SIGNAL[why]
            text, value, expected, unit = _told(signal, row, seen, why, against)
            text += _since(at_s, since_s)
        first = Evidence("peers", _METRIC[signal], text, value, expected, unit, score, at_s=since_s)
        also = _also(signal, row, seen)
        return (first, also) if also else (first,)

    def alike(self, row: int, peers: Peers) -> str:
        """The neighbours that share what stands out on a GPU, in words; empty where none do."""
        if peers.acts[row] or Why(int(peers.why[row])) not in _OWN:
            return ""
        if not self.past.roster.first[row]:
            return ""
        return f"the other GPUs of {self.past.roster.gpus[row].node}"

    def mates_too(self, row: int, odd: Bools) -> bool:
        """Whether another GPU of the same work is odd [gpus] as well, where they are too few to
        be compared with: more likely their work or a setting of it."""
        roster = self.past.roster
        job = int(roster.jobs.code[row])
        if roster.first[row] or job < 0:
            return False
        members = roster.jobs.members(job)
        return bool(odd[members[members != row]].any())

    def _against(self, row: int) -> str:
        roster = self.past.roster
        count = int(self._seen.others[row]) if self._seen else 0
        mates = roster.mates[row]
        if not roster.first[row] or mates is None:
            return f"{count} other {roster.gpus[row].model or 'GPUs'} at work"
        return f"{count} mates of {_named(mates)}"

    def _remember(self, frame: Frame, out: Bools) -> None:
        """Since when each GPU stands out. A checkpoint's pause is no new beginning."""
        now_s = frame.at_s
        kept = {u: (a, b) for u, (a, b) in self._since_s.items() if now_s - b <= _PAUSE_S}
        for row in np.flatnonzero(out).tolist():
            uuid = frame.gpus[row].uuid
            kept[uuid] = (kept.get(uuid, (now_s, now_s))[0], now_s)
        self._since_s = kept


def _moved_itself(seen: Residuals) -> Floats:
    """[signals, gpus]: the distance from the mates, as far as the GPU itself moved that way. Of
    GPUs that wait the clocks rise from under their power cap, and who goes on falls behind."""
    slack = _SLACK * FLOOR[:, None]
    way = np.sign(seen.d)
    moved: Floats = way * np.minimum(np.abs(seen.d), np.maximum(way * seen.c + slack, 0.0))
    return moved


def _works_through(seen: Residuals) -> Floats:
    """[gpus]: the mates wait, in tensor and in DRAM activity, and this GPU does not."""
    pace = seen.pace[[TENSOR, DRAM]]
    fell = np.nan_to_num(pace, nan=-np.inf).max(axis=0)
    waiting = (fell <= _PACE_FELL) & (fell >= _MATES_STOP) & (seen.steadily >= _MOMENTS)
    waiting &= np.nan_to_num(seen.c[ACT], nan=-np.inf).max(axis=0) <= _RISES
    best = np.full(seen.d.shape[1], np.nan)
    for signal in ACT:
        own, its_pace = seen.c[signal], seen.pace[signal]
        steady = (own >= _STEADY * its_pace) & (own >= -_FALLS)
        through = waiting & (its_pace <= _ITS_FELL) & steady
        best = np.fmax(best, np.where(through, seen.d[signal] / seen.edge[signal], np.nan))
    return best


def _from_the_start(seen: Residuals) -> Floats:
    """[gpus]: a clock far below the mates', at like demand and no more power."""
    agree = seen.clock_spread <= _AGREE
    act = seen.absolute[ACT]
    told = np.isfinite(act).any(axis=0)
    least = np.nan_to_num(act, nan=np.inf).min(axis=0)
    most = np.nan_to_num(act, nan=-np.inf).max(axis=0)
    power = seen.absolute[POWER]
    # without activity metrics only a clock that is low together with power is told
    like = np.where(
        told,
        (least >= _LIKE_LOW) & ((most <= _LIKE_HIGH) | (power <= _LIKE_POWER)),
        (seen.util >= _BUSY) & (power <= _LIKE_POWER),
    )
    like &= (power <= -_LIKE_POWER) & ~(seen.util < _BUSY)
    return np.where(agree & like, -seen.absolute[CLOCK] / DEFICIT, np.nan)


def _strongest(seen: Residuals, row: int) -> int:
    return max(ACT, key=lambda s: np.nan_to_num(seen.d[s, row] / seen.edge[s, row], nan=-1.0))


def _told(
    signal: int, row: int, seen: Residuals, why: Why, against: str
) -> tuple[str, float, float, str]:
    """(text, value, expected, unit) of one signal."""
    label, d, x = _LABEL[signal], float(seen.d[signal, row]), float(seen.x[signal, row])
    if why is Why.LOW_FROM_START:
        off = float(seen.absolute[signal, row])
        value, expected = float(np.exp(x)), float(np.exp(x - off))
        text = (
            f"{label} {value:.0f} MHz, {np.expm1(off):+.0%} from the {expected:.0f} MHz of "
            f"{against}, at like demand and no more power: so since they were first compared"
        )
        return text, value, expected, "MHz"
    if signal in (HEAT, MEM_HEAT):
        text = f"{label} {d:+.0f} °C against {against}, less the difference earlier in this job"
        return text, d, 0.0, "°C"
    if signal == THROTTLED:
        text = f"{label} {x:.0%} of the time, {d:+.0%} against {against}"
        return text, x, x - d, ""
    value, expected = float(np.exp(x)), float(np.exp(x - d))
    unit = "W" if signal == POWER else "MHz"
    text = (
        f"{label} {value:.0f} {unit}, {np.expm1(d):+.0%} against {against}, less the difference "
        "earlier in this job"
    )
    return text, value, expected, unit


def _also(first: int, row: int, seen: Residuals) -> Evidence | None:
    """What else moved on this GPU against its mates, in one line."""
    parts = []
    for signal in (CLOCK, POWER, HEAT, THROTTLED, TENSOR, SM, DRAM):
        d, floor = float(seen.d[signal, row]), float(FLOOR[signal])
        if signal == first or not abs(d) >= 0.6 * floor:
            continue
        off = f"{d:+.0f} °C" if signal == HEAT else f"{d:+.0%}"
        off = off if signal in (HEAT, THROTTLED) else f"{np.expm1(d):+.0%}"
        parts.append(f"{_LABEL[signal]} {off}")
    if not parts:
        return None
    text = "also against its mates: " + ", ".join(parts[:4])
    return Evidence("peers", "mates", text, at_s=seen.at_s)


def _named(mates: Mates) -> str:
    kind = "job" if mates.in_step else "service"
    role = f", role {mates.role}" if mates.role else ""
    return f"{kind} {mates.group}{role}"


def _since(at_s: float, since_s: float) -> str:
    return f", for {_span(at_s - since_s)}" if at_s > since_s else ""


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120.0 else f"{seconds / 60.0:.0f} min"
