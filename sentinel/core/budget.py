"""The weekly budget of alerts: what soft evidence may tell people, and why it is held back.

Decides how loud a deviation may be; never whether there is one, and nothing about hard
evidence. Two things raise the score that a ticket or a page needs. *Calibration*: what a
fleet in its normal time reaches, learnt with the bundle, says which score is reached less
often than the budget allows. *The past*: of the declustered soft incidents of the last two
weeks only the highest, as many as the budget has room for, would have passed; a new one has
to be higher than the rest. Nothing here lowers a threshold below what the configuration
says, and what is held back is written down with its reason.

Incidents of one GPU, host, job or fleet at about the same time have one cause and count as
one. The height of an incident is the highest score that lasted as long as a deviation must:
the peak of one noisy tick raises nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from sentinel.core.domain import (
    Incident,
    IncidentPhase,
    Kind,
    Peak,
    Severity,
    SubjectKind,
    Verdict,
)
from sentinel.core.incident import severity_rank
from sentinel.core.policy import Budget

PAST_S: Final = 14 * 86_400.0  # two weeks hold two working weeks and two weekends
WEEK_S: Final = 7 * 86_400.0
TOGETHER_S: Final = 1800.0  # what begins so soon after another of its GPU, host or job is the same
EDGE: Final = 1.0  # the edge of normal: no ticket below it
_KEPT_MIN: Final = 500
_KEYS_MAX: Final = 256
_TOUCH_S: Final = 300.0  # a peak that stands is written down again so often
_FLEET: Final = "fleet:"
_WIDE: Final = ("node:", "job:", _FLEET)  # keys that GPUs share; a GPU's own key is its UUID
_UNCALIBRATED: Final = "no baseline has been learnt yet"


@dataclass(frozen=True, slots=True)
class Expected:
    """One row of a calibration: how many declustered soft incidents of at least `score` a week
    of normal time is expected to bring to the whole cluster, with its 95 % interval, and how
    many the learning window held."""

    score: float
    per_week: float
    low: float
    high: float
    seen: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """What held-out normal time reaches. `table` ascends in score. `why` says why it is not
    certified, empty when it is; `gpus` is the size of the cluster that the rates are for."""

    gpu_days: float = 0.0
    certified: bool = False
    ticket_score: float = EDGE
    page_score: float = 1.3
    why: str = _UNCALIBRATED
    gpus: int = 0
    certify_gpu_days: float = 0.0
    incidents: int = 0
    table: tuple[Expected, ...] = ()

    def score_for(self, per_week: float) -> float:
        """The lowest score of the table that is expected at most `per_week` times a week;
        between two rows the logarithm of the rate is taken as straight. Past its end the
        table's last slope goes on, so that a small budget is not served too low."""
        rows = self.table
        if not rows:
            return EDGE
        if rows[0].per_week <= per_week:
            return rows[0].score
        for low, high in itertools.pairwise(rows):
            if high.per_week <= per_week:
                return _between(low, high, per_week)
        if len(rows) < 2:
            return rows[-1].score
        return max(_between(rows[-2], rows[-1], per_week), rows[-1].score)


UNCALIBRATED: Final = Calibration()


def _between(low: Expected, high: Expected, per_week: float) -> float:
    if not 0.0 < high.per_week < low.per_week:
        return high.score
    share = math.log(low.per_week / per_week) / math.log(low.per_week / high.per_week)
    return low.score + share * (high.score - low.score)


@dataclass(frozen=True, slots=True)
class Line:
    """What one loudness (ticket or page) needs now. `floor` comes from calibration and
    configuration; `past` holds the `room` highest peaks of the last two weeks and the next
    one, descending."""

    word: str
    per_week: float
    floor: float
    floor_why: str
    room: int
    past: tuple[float, ...] = ()

    @property
    def raised(self) -> float:
        """What the past asks of a new incident; 0 while there is room."""
        return self._raised(None)

    @property
    def now(self) -> float:
        return max(self.floor, self.raised)

    def _raised(self, own: float | None) -> float:
        """The lowest score that still belongs to the `room` highest, the incident's own peak
        (`own`) left out: it does not stand in its own way."""
        place = self.room
        if own is not None and len(self.past) >= place and own >= self.past[place - 1]:
            place += 1
        return self.past[place - 1] if len(self.past) >= place else 0.0

    def why_not(self, score: float, own: float | None = None) -> str:
        """Why an incident of this score is not told so loudly; empty when it is."""
        if score < self.floor:
            return f"no {self.word}: {score:.2f} is below {self.floor:.2f}, {self.floor_why}"
        raised = self._raised(own)
        if raised and score <= raised:
            return (
                f"no {self.word}: the budget of {self.per_week:g} {self.word}s a week is spent: "
                f"{score:.2f} is not above {raised:.2f}, the lowest of the {self.room} strongest "
                "incidents of the last two weeks"
            )
        return ""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What soft evidence needs at one moment. `certified` is False while the baseline knows too
    little, with the reason in `why`: soft evidence then makes tickets only and never acts."""

    certified: bool
    why: str
    ticket: Line
    page: Line
    standing: Mapping[str, float]  # heights of the incidents that stand now, by GPU

    def held(self, verdict: Verdict) -> Verdict:
        """The verdict as loud as the budget lets it be. Hard evidence is returned as it is."""
        if verdict.kind is not Kind.DEVIANT:
            return verdict
        own = self.standing.get(verdict.gpu.uuid)
        severity, withheld = verdict.severity, ""
        if severity is Severity.CRITICAL:
            withheld = self._no_page(verdict.score, own)
            if withheld:
                severity = Severity.WARNING
        if severity is Severity.WARNING:
            no_ticket = self.ticket.why_not(verdict.score, own)
            if no_ticket:
                severity, withheld = Severity.INFO, no_ticket
        acts = self.certified and not withheld
        return replace(
            verdict,
            severity=severity,
            earned=verdict.severity,
            withheld=withheld,
            may_fence=verdict.may_fence and acts,
            may_move=verdict.may_move and acts,
        )

    def _no_page(self, score: float, own: float | None) -> str:
        if not self.certified:
            return f"no page: the baseline is not certified, {self.why}"
        return self.page.why_not(score, own)


def thresholds(
    peaks: Mapping[str, Peak],
    calibration: Calibration | None,
    budget: Budget,
    now_s: float,
    *,
    gpus: int = 0,
) -> Thresholds:
    """What a ticket and a page need now. `gpus` is the size of the cluster: one that has grown
    since it was calibrated brings as many more incidents."""
    known = calibration or UNCALIBRATED
    certified = known.certified
    growth = max(1.0, gpus / known.gpus) if known.gpus else 1.0
    recent = sorted(
        (p for p in peaks.values() if now_s - p.last_s <= PAST_S), key=lambda p: -p.score
    )
    pages = [p.score for p in recent if p.page and p.score >= budget.page_score]
    return Thresholds(
        certified,
        known.why,
        _line("ticket", budget.tickets_per_week, EDGE, known, growth, [p.score for p in recent]),
        _line("page", budget.pages_per_week, budget.page_score, known, growth, pages),
        {
            key: p.score
            for p in recent
            if abs(now_s - p.last_s) <= TOGETHER_S
            for key in p.keys
            if not key.startswith(_WIDE)
        },
    )


def _line(
    word: str,
    per_week: float,
    lowest: float,
    known: Calibration,
    growth: float,
    past: list[float],
) -> Line:
    floor, why = lowest, "where a page begins (detection.page_score)"
    if word == "ticket":
        why = "the edge of normal"
    learnt = known.score_for(per_week / growth) if known.certified else 0.0
    if learnt > lowest:
        floor = learnt
        why = f"which normal time reaches {per_week:g} times a week"
    room = max(1, math.floor(per_week * PAST_S / WEEK_S + 1e-9))
    return Line(word, per_week, floor, why, room, tuple(past[: room + 1]))


def spent(peaks: Mapping[str, Peak], now_s: float) -> tuple[int, int, int]:
    """(pages, tickets, written down only) of the last seven days."""
    told = [p.told for p in peaks.values() if now_s - p.at_s <= WEEK_S]
    counts = (Severity.CRITICAL, Severity.WARNING, Severity.INFO)
    pages, tickets, held = (told.count(severity) for severity in counts)
    return pages, tickets, held


# ---- remembering --------------------------------------------------------------------


def fold(
    peaks: Mapping[str, Peak],
    incidents: Iterable[Incident],
    verdicts: Iterable[Verdict],
    budget: Budget,
    now_s: float,
) -> Mapping[str, Peak]:
    """The peaks after this tick; the same object where nothing changed. Bounded: what is older
    than two weeks goes, and of too many the lowest."""
    soft = [i for i in incidents if _counts(i)]
    if not soft and not peaks:
        return peaks
    earned = {v.gpu.uuid: v.earned or v.severity for v in verdicts if v.kind is Kind.DEVIANT}
    after = {id: _dated(p, now_s) for id, p in peaks.items() if now_s - p.last_s <= PAST_S}
    of_key: dict[str, set[str]] = {}  # which peaks concern whom: a storm has many incidents
    for peak in after.values():
        _index(of_key, peak)
    for incident in sorted(soft, key=lambda i: (i.confirmed_at_s or 0.0, i.id)):
        word = earned.get(incident.gpu_uuid or "", Severity.INFO)
        _add(after, of_key, incident, word, now_s)
    room = max(1, math.floor(max(budget.tickets_per_week, budget.pages_per_week) * 2.0))
    most = max(_KEPT_MIN, 2 * (room + 1))
    if len(after) > most:
        keep = sorted(after.values(), key=lambda p: (-p.score, -p.last_s))[:most]
        after = {p.id: p for p in keep}
    return peaks if after == dict(peaks) else after


def _counts(incident: Incident) -> bool:
    """Soft, and told or written down as an incident; hard evidence is under no budget."""
    return incident.kind is Kind.DEVIANT and incident.phase is IncidentPhase.CONFIRMED


def _dated(peak: Peak, now_s: float) -> Peak:
    """A peak from the future was written under a wrong clock, and must age all the same."""
    if peak.last_s <= now_s:
        return peak
    return replace(peak, at_s=min(peak.at_s, now_s), last_s=now_s)


def _keys(incident: Incident) -> tuple[str, ...]:
    """Whom it concerns. A GPU's key is its UUID."""
    if incident.subject.kind is SubjectKind.FLEET:
        return (_FLEET,)
    keys = [incident.gpu_uuid] if incident.gpu_uuid else []
    if incident.node:
        keys.append(f"node:{incident.node}")
    if incident.workload is not None:
        keys.append(f"job:{incident.workload.id}")
    if incident.subject.kind is SubjectKind.JOB:
        keys.append(f"job:{incident.subject.id}")
    if incident.subject.kind is not SubjectKind.GPU:  # its own, as a UUID is a GPU's
        keys.append(f"{incident.subject.kind}={incident.subject.id}")
    return tuple(dict.fromkeys(keys))


def _height(incident: Incident) -> float:
    """What lasted of a GPU's score, the middle of its GPUs' where many share one cause; a
    fleet's event has no height of its own and raises nothing."""
    if incident.subject.kind is SubjectKind.GPU:
        return max(incident.level, EDGE)
    return incident.score if incident.subject.kind is not SubjectKind.FLEET else 0.0


def _index(of_key: dict[str, set[str]], peak: Peak) -> None:
    for key in peak.keys:
        of_key.setdefault(key, set()).add(peak.id)


def _add(
    peaks: dict[str, Peak],
    of_key: dict[str, set[str]],
    incident: Incident,
    earned: Severity,
    now_s: float,
) -> None:
    new = Peak(
        id=incident.id,
        score=round(_height(incident), 3),
        at_s=incident.confirmed_at_s or now_s,
        last_s=now_s,
        keys=_keys(incident),
        page=earned is Severity.CRITICAL,
        told=incident.worst,
    )
    if _FLEET in new.keys:
        near = set(peaks)
    else:
        near = set().union(*(of_key.get(key, ()) for key in (*new.keys, _FLEET)))
    same = [peaks[id] for id in near if id in peaks and _together(peaks[id], new)]
    if not same:
        peaks[new.id] = new
        _index(of_key, new)
        return
    first = min(same, key=lambda p: (p.at_s, p.id))
    if len(same) == 1 and _adds_nothing(first, new):
        return
    joined = first
    for peak in (*same, new):
        joined = _joined(joined, peak)
        peaks.pop(peak.id, None)
    peaks[first.id] = joined
    _index(of_key, joined)


def _adds_nothing(known: Peak, new: Peak) -> bool:
    """What stands is written down again only once in a while."""
    told = severity_rank(new.told) <= severity_rank(known.told)
    full = len(known.keys) >= _KEYS_MAX or set(new.keys) <= set(known.keys)
    fresh = new.last_s - known.last_s < _TOUCH_S
    return new.score <= known.score and told and new.page <= known.page and full and fresh


def _together(old: Peak, new: Peak) -> bool:
    """The same GPU again before the other was long over; or another GPU of its host, job or
    fleet that began at about the same time."""
    shared = set(old.keys) & set(new.keys)
    if any(not key.startswith(_WIDE) for key in shared):
        return new.at_s - old.last_s <= TOGETHER_S
    wide = bool(shared) or _FLEET in old.keys or _FLEET in new.keys
    return wide and abs(new.at_s - old.at_s) <= TOGETHER_S


def _joined(a: Peak, b: Peak) -> Peak:
    return replace(
        a,
        score=max(a.score, b.score),
        at_s=min(a.at_s, b.at_s),
        last_s=max(a.last_s, b.last_s),
        keys=tuple(dict.fromkeys((*a.keys, *b.keys)))[:_KEYS_MAX],
        page=a.page or b.page,
        told=max(a.told, b.told, key=severity_rank),
    )
