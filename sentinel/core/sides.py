"""Who deviates alike, and whose that is: the soft verdicts of one tick, sorted by what they show.

Decides which job, node, rack or fleet explains best what deviates in the same way: most of it,
and little that does not. Hard evidence and air are dealt with in `groups.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from sentinel.core import causes
from sentinel.core.causes import BRAKE, HEAT, LINK, PACE, SIGNS, Place
from sentinel.core.context import driver_is_new
from sentinel.core.domain import (
    Frame,
    Incident,
    Judgement,
    Kind,
    Presence,
    Shared,
    Subject,
    SubjectKind,
    Verdict,
)
from sentinel.core.peers import ALIKE
from sentinel.core.placement import Fleet

ALIKE_MIN: Final = 3  # GPUs; two are a coincidence, and fewer mates say nothing
ALIKE_SHARE: Final = 0.5  # of a subject's reporting GPUs
# A cause that stands holds its GPUs as long as this much of it is left, so that a count that
# wavers around the threshold is neither now the one and now the other.
_STAYS_MIN: Final = 2
_PAIR: Final = 2  # GPUs are enough where they are the whole job
_STAYS_SHARE: Final = 0.25
ELSEWHERE: Final = 0.25  # of all other GPUs; if more of them deviate alike, it is not this place
_NEAR: Final = 0.7  # of the way to the edge of normal: a mate so far gone is on its way too
_LIKE: Final = 0.5  # of the typical deviation of a group; less is not alike
_BEYOND: Final = 2.0  # times the typical deviation: that GPU has something of its own
_MAIN: Final = 0.25  # of a score's square: below it a sign is not what deviates
_THROTTLES: Final = 0.25  # of the last minutes: hardware that throttles goes on and off
# where two subjects explain as much, the likelier cause of such a sign
_PREFERRED: Final = {
    HEAT: (SubjectKind.NODE, SubjectKind.RACK, SubjectKind.FLEET),
    BRAKE: (SubjectKind.NODE, SubjectKind.RACK, SubjectKind.FLEET),
    PACE: (SubjectKind.JOB, SubjectKind.NODE, SubjectKind.FLEET),
    LINK: (SubjectKind.NODE, SubjectKind.FLEET),
}
_METRICS: Final = {
    "temp_c": HEAT,
    "mem_temp_c": HEAT,
    "throttle_reasons": HEAT,
    "power_w": PACE,
    "sm_clock_mhz": PACE,
    "mem_clock_mhz": PACE,
    "pcie_replay": LINK,
}
Standing = Mapping[Subject, Incident]


def job_of(frame: Frame, row: int) -> Subject | None:
    work = frame.workloads[row]
    return causes.job_subject(work, frame.mates[row] if frame.mates else None) if work else None


class Jobs:
    """The GPUs of every job, looked up when first asked for."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._rows: dict[Subject, list[int]] | None = None

    def rows(self, job: Subject) -> list[int]:
        if self._rows is None:
            self._rows = defaultdict(list)
            for row in range(len(self._frame.gpus)):
                if (found := job_of(self._frame, row)) is not None:
                    self._rows[found].append(row)
        return self._rows[job]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A subject that may explain what deviates alike. `rows` are those of its GPUs that do."""

    subject: Subject
    rows: tuple[int, ...]
    merit: float  # harmonic mean of how much of it deviates and how much of that it explains


@dataclass(frozen=True, slots=True)
class _Fit:
    """The rows of a subject that deviate alike, those of them that do not stand out of it, how
    many of its GPUs report, and whether that is enough to speak of it."""

    alike: list[int]
    inside: list[int]
    reporting: int
    enough: bool


class Sides:
    """The soft verdicts of one tick, sorted by what they show."""

    def __init__(
        self,
        fleet: Fleet,
        jobs: Jobs,
        judgement: Judgement,
        soft: Mapping[int, Verdict],
        standing: Standing,
        cluster: str,
    ) -> None:
        self._fleet, self._soft, self._standing = fleet, soft, standing
        self._jobs = jobs
        self._total = int(np.count_nonzero(fleet.frame.presence == Presence.PRESENT))
        self._judgement, self._cluster = judgement, cluster
        self._strength = self._strengths()  # of every deviating row: its main sign, how strong

    def causes(self) -> Iterator[Shared]:
        if not self._soft:
            return
        strength = self._strength
        for sign in range(len(SIGNS)):
            if any(own == sign for own, _ in strength.values()):
                yield from self._of_sign(sign, strength)

    def staying(self, owner: Mapping[int, int]) -> dict[int, Incident]:
        """GPUs that an incident has spoken for and that deviate as it does, though too few do on
        this very tick: they wait until it is over."""
        out: dict[int, Incident] = {}
        for incident in self._standing.values():
            if incident.kind is not Kind.DEVIANT:
                continue
            sign = _METRICS.get(incident.evidence[0].metric if incident.evidence else "")
            for member in incident.members:
                row = self._fleet.rows.get(member.gpu_uuid, -1)
                if row in owner or row not in self._strength:
                    continue
                own, much = self._strength[row]
                like = sign is None or own == sign or {own, sign} == {HEAT, BRAKE}
                if like and much <= _BEYOND * max(incident.score, 1.0):
                    out[row] = incident
        return out

    def _strengths(self) -> dict[int, tuple[int, float]]:
        """Of every deviating row: its main sign, and how strong that is."""
        traits, out = self._judgement.traits, {}
        for row, verdict in self._soft.items():
            if traits is not None and len(traits.signs):
                own = traits.signs[row]
                sign = int(np.argmax(own))
                if own[sign] ** 2 >= _MAIN * max(verdict.score, 1e-9) ** 2:
                    out[row] = (sign, float(own[sign]))
                    continue
            parts = np.zeros(len(SIGNS))  # without a baseline: what its mates say of it
            for e in verdict.evidence:
                if e.metric in _METRICS and e.kind in ("density", "peers"):
                    parts[_METRICS[e.metric]] += e.contribution or 1e-9
            if parts.any():
                out[row] = (int(np.argmax(parts)), verdict.score)
        return out

    def _stands_out(self, row: int) -> bool:
        """Whether its mates say that it is unlike them: then it is no part of what they share."""
        verdict = self._soft.get(row)
        told = [e for e in verdict.evidence if e.kind == "peers"] if verdict is not None else []
        return bool(told) and all(e.metric != ALIKE for e in told)

    def _of_sign(self, sign: int, strength: Mapping[int, tuple[int, float]]) -> Iterator[Shared]:
        left = {row: much for row, (own, much) in strength.items() if own == sign}
        traits = self._judgement.traits
        if traits is not None and len(traits.signs):
            for row in map(int, np.flatnonzero(traits.signs[:, sign] >= _NEAR)):
                if row not in strength:  # on its way, or of no verdict of its own
                    left.setdefault(row, float(traits.signs[row, sign]))
        by_subject = self._by_subject(sign, left)
        fit: dict[Subject, _Fit] = {}
        while any(row in self._soft for row in left):
            for subject in by_subject.keys() - fit.keys():
                fit[subject] = self._fit(subject, by_subject[subject], left)
            best = max(
                self._candidates(fit, len(left)),
                key=lambda c: (
                    round(c.merit, 6),
                    -_PREFERRED[sign].index(c.subject.kind),
                    len(c.rows),
                    c.subject.id,
                ),
                default=None,
            )
            if best is None:
                return
            inside = fit[best.subject].inside
            place = Place(best.subject, tuple(inside), fit[best.subject].reporting)
            yield causes.alike(
                place, sign, self._soft, left, self._fleet, self._slowed(best.subject, inside)
            )
            gone = set(best.rows)
            for row in gone:
                left.pop(row)
            for subject, rows in list(by_subject.items()):
                if not gone.isdisjoint(rows):  # only what has lost some is looked at anew
                    by_subject[subject] = [row for row in rows if row not in gone]
                    fit.pop(subject)

    def _slowed(self, subject: Subject, rows: list[int]) -> bool:
        """Whether so many of them are slowed down, by heat or power, that it is a page."""
        traits = self._judgement.traits
        if traits is None or not self._judgement.certified:
            return False
        if subject.kind not in (SubjectKind.NODE, SubjectKind.RACK):
            return False
        told = np.count_nonzero(np.nan_to_num(traits.throttled[rows]) >= _THROTTLES)
        return bool(told >= min(ALIKE_MIN, len(rows)) and told > 0)

    def _by_subject(self, sign: int, left: Mapping[int, float]) -> dict[Subject, list[int]]:
        frame, kinds = self._fleet.frame, _PREFERRED[sign]
        out: dict[Subject, list[int]] = defaultdict(list)
        for row in left:
            gpu, job = frame.gpus[row], job_of(frame, row)
            out[Subject(SubjectKind.NODE, gpu.node)].append(row)
            if SubjectKind.JOB in kinds and job is not None and not self._stands_out(row):
                out[job].append(row)
            if SubjectKind.RACK in kinds and gpu.rack:
                out[Subject(SubjectKind.RACK, gpu.rack)].append(row)
        out[Subject(SubjectKind.FLEET, self._cluster)] = list(left)
        return out

    def _fit(self, subject: Subject, rows: list[int], left: Mapping[int, float]) -> _Fit:
        """What of a subject deviates alike, and whether that is enough of it."""
        reporting = self._reporting(subject)
        if not rows:
            return _Fit([], [], reporting, False)
        much = np.array([left[row] for row in rows])
        kept = much >= _LIKE * np.median(much)
        alike, much = [row for row, yes in zip(rows, kept, strict=True) if yes], much[kept]
        calm = much <= _BEYOND * np.median(much)
        inside = sorted(row for row, yes in zip(alike, calm, strict=True) if yes)
        known = self._standing.get(subject)
        stays = known is not None and known.kind is Kind.DEVIANT
        least, share = (_STAYS_MIN, _STAYS_SHARE) if stays else (ALIKE_MIN, ALIKE_SHARE)
        if subject.kind is SubjectKind.JOB and len(inside) == reporting:
            least = min(least, _PAIR)  # all of a small job: one setting, not two faults at once
        enough = len(inside) >= least and len(inside) >= share * reporting
        enough = enough and any(row in self._soft for row in inside)
        gpus = self._fleet.frame.gpus
        if subject.kind in (SubjectKind.FLEET, SubjectKind.RACK):
            enough = enough and len({gpus[row].node for row in inside}) > 1
        if subject.kind is SubjectKind.JOB:
            enough = enough and not _new_driver(self._fleet.frame, inside)
        return _Fit(alike, inside, reporting, enough)

    def _candidates(self, fit: Mapping[Subject, _Fit], everywhere: int) -> Iterator[_Candidate]:
        for subject, of in fit.items():
            if not of.enough:
                continue
            others, elsewhere = self._total - of.reporting, everywhere - len(of.alike)
            spread = elsewhere > ELSEWHERE * others
            if subject.kind is SubjectKind.RACK and others == 0:
                continue
            if spread and subject.kind in (SubjectKind.NODE, SubjectKind.RACK):
                continue
            precision, recall = len(of.alike) / max(of.reporting, 1), len(of.alike) / everywhere
            merit = 2.0 * precision * recall / (precision + recall)
            yield _Candidate(subject, tuple(of.alike), merit)

    def _reporting(self, subject: Subject) -> int:
        fleet = self._fleet
        match subject.kind:
            case SubjectKind.FLEET:
                return self._total
            case SubjectKind.NODE:
                members: Iterable[int] = fleet.by_node[subject.id]
            case SubjectKind.RACK:
                nodes = fleet.by_rack[subject.id]
                members = (row for node in nodes for row in fleet.by_node[node])
            case _:
                members = self._jobs.rows(subject)
        return sum(fleet.present(row) for row in members)


def _new_driver(frame: Frame, rows: list[int]) -> bool:
    """Whether most of these GPUs have just been given another driver."""
    changed = [row for row in rows if driver_is_new(frame.gpus[row], frame.at_s)]
    return 2 * len(changed) > len(rows)
