"""One tick's word on every GPU: NORMAL, DEVIANT, FAULT, LOST or UNKNOWN, with its reasons.

Hard evidence comes first, then the density score. Not knowing is a verdict of its own:
a GPU whose host is silent, or of a fleet that cannot be seen, is UNKNOWN, never deviant.
Work never seen before, and work that has just changed, is no evidence against hardware.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import numpy as np

from sentinel.core import domain
from sentinel.core.budget import UNCALIBRATED, Calibration, Thresholds
from sentinel.core.catalog import Catalog
from sentinel.core.domain import (
    Evidence,
    FaultPattern,
    Frame,
    Ints,
    Judgement,
    Kind,
    Presence,
    Severity,
    Verdict,
)
from sentinel.core.evidence import RANK, Finding, HardWatch
from sentinel.core.features import FEATURES, INDEX, MEM_TEMP, TEMP, Features, Window
from sentinel.core.groups import read_traits
from sentinel.core.limited import capped, excused, power_limits
from sentinel.core.live import LiveScores
from sentinel.core.patterns import Book
from sentinel.core.peers import ALIKE, STRAGGLER, Peers, PeerWatch, Why
from sentinel.core.residuals import OTHERS
from sentinel.core.score import Cohort, Scores, empty_scores
from sentinel.core.symptoms import Symptoms

_SHOWN: Final = 4  # features named in a verdict
DeviantMay = Literal["alert", "fence", "move"]
# corrected errors lose no data: they make tickets
_PAGES: Final = np.array(
    [
        INDEX[name]
        for name in (
            "power",
            "sm_clock",
            "mem_clock",
            "temp_excess",
            "mem_temp_excess",
            "throttled",
        )
    ]
)
# nor do the clock and power of a GPU that a limit in software holds back
_PAGES_CAPPED: Final = np.setdiff1d(_PAGES, [INDEX["power"], INDEX["sm_clock"]])
_CAPPED: Final = INDEX["power_capped"]
_CODE: Final = {
    Kind.DEVIANT: domain.DEVIANT,
    Kind.FAULT: domain.FAULT,
    Kind.LOST: domain.LOST,
}


@dataclass(frozen=True, slots=True)
class Settings:
    """How telemetry is judged. `page_score` is where a deviation pages instead of making a
    ticket; `settle_s` mutes soft evidence after a GPU's work changes; `max_age_s` is how old
    a value may be and still count; `deviant_may` is the most that soft evidence does."""

    grid_s: float = 60.0
    settle_s: float = 300.0
    page_score: float = 1.3
    max_age_s: float = 60.0
    deviant_may: DeviantMay = "move"


@dataclass(frozen=True, slots=True, eq=False)
class Bundle:
    """What has been learnt, immutable: one cohort per GPU model."""

    id: str
    cohorts: dict[str, Cohort]
    grid_s: float
    learnt_from_s: float = 0.0
    learnt_to_s: float = 0.0
    evaluation: dict[str, object] = field(default_factory=dict)
    calibration: Calibration = UNCALIBRATED


class Watch:
    """What the tick thread keeps between ticks: rings and counters, never persisted."""

    def __init__(self, settings: Settings, catalog: Catalog) -> None:
        self.settings = settings
        self.catalog = catalog
        self.window = Window(settings.grid_s)
        self.hard = HardWatch()
        self.symptoms = Symptoms()
        self.live = LiveScores(settings.grid_s)
        self.peers = PeerWatch()
        self.features: Features | None = None
        self.scores: Scores | None = None
        self.book = catalog.patterns
        self._kept: Mapping[str, FaultPattern] = {}

    def reads(self, kept: Mapping[str, FaultPattern]) -> Book:
        """The patterns to name things by, with what was learnt and what people said of them."""
        if kept is not self._kept:
            self._kept, self.book = kept, self.catalog.patterns.keeping(kept)
        return self.book

    def judge(
        self,
        frame: Frame,
        bundle: Bundle | None,
        limits: Thresholds | None = None,
        under: frozenset[str] = frozenset(),
    ) -> Judgement:
        """The verdicts of one frame. A blind frame says UNKNOWN of all and teaches nothing.
        `limits` is what the budget lets soft evidence say; without it, what evidence earns.
        `under` are the GPUs, by UUID, of open incidents: nothing is learnt from them."""
        if frame.coverage.blind:
            unknown = np.full(len(frame.gpus), domain.UNKNOWN, dtype=np.int8)
            return Judgement(unknown, np.full(len(frame.gpus), np.nan))
        findings, resets = self.hard.look(frame, self.catalog)
        findings += self.symptoms.look(frame)
        features = self.window.push(frame, max_age_s=self.settings.max_age_s)
        scores = (
            self.live.score(bundle.cohorts, frame.gpus, features)
            if bundle
            else empty_scores(len(frame.gpus))
        )
        scores = excused(scores, power_limits(frame))
        held_down = capped(features.values[:, _CAPPED]) | capped(scores.values[:, _CAPPED])
        self.features, self.scores = features, scores
        kinds = np.zeros(len(frame.gpus), dtype=np.int8)
        silent = np.isin(frame.presence, (Presence.HOST_SILENT, Presence.FROZEN))
        kinds[silent | (frame.presence == Presence.BLIND)] = domain.UNKNOWN
        verdicts: dict[int, Verdict] = {}
        settled = features.settled_s >= self.settings.settle_s
        present = frame.presence == Presence.PRESENT
        outside = (scores.score > 1.0) & present
        kinds[outside & ~settled] = domain.UNKNOWN  # neither healthy nor evidence: time stands
        peers = self.peers.look(frame, features, self.settings.settle_s)
        for row in np.flatnonzero(outside & settled).tolist():
            pages = _PAGES_CAPPED if held_down[row] else _PAGES
            verdicts[row] = self._soft(frame, row, features, scores, bundle, pages)
        for row in np.flatnonzero(peers.score > 1.0).tolist():
            limited = held_down[row] and peers.why[row] == Why.LOW_CLOCK
            mine = self._peers(frame, row, peers, bundle, acts=not limited)
            known = verdicts.get(row)
            verdicts[row] = _both(known, mine, self.book) if known else mine
        odd = (outside & settled) | (peers.score > 1.0)
        for row, soft in verdicts.items():
            if self.peers.mates_too(row, odd):
                soft = _with_mates(soft, frame.at_s)
            agree = peers.comparable[row] >= OTHERS
            verdicts[row] = self._allowed(soft, bool(agree))
        if limits is not None:
            verdicts = {row: limits.held(verdict) for row, verdict in verdicts.items()}
        by_row: dict[int, list[Finding]] = defaultdict(list)
        for finding in findings:
            by_row[finding.row].append(finding)
        for row, own in by_row.items():
            verdicts[row] = _hard(frame, own, scores, verdicts.get(row), bundle, self.book)
        for row, verdict in verdicts.items():
            kinds[row] = _CODE[verdict.kind]
        score = np.where(silent, np.nan, scores.score)
        unlike = peers.score > 1.0
        score[unlike] = np.fmax(score, peers.score)[unlike]
        normal = (kinds == domain.NORMAL) & present & settled & features.ready & ~unlike
        self.live.learn(normal, under)
        ordered = tuple(verdicts[row] for row in sorted(verdicts))
        certified = limits is None or limits.certified
        traits = read_traits(frame, scores, self.symptoms.brakes(), bool(ordered))
        return Judgement(kinds, score, ordered, resets, certified, peers.jobs, traits)

    def _peers(
        self, frame: Frame, row: int, peers: Peers, bundle: Bundle | None, acts: bool
    ) -> Verdict:
        """What the mates alone say of a GPU. `acts` is whether it may page."""
        score = float(peers.score[row])
        page = acts and bool(peers.acts[row]) and score >= self.settings.page_score
        evidence = self.peers.explain(row, peers, frame.at_s)
        shared = self.peers.alike(row, peers)
        if shared:
            text = f"{shared} deviate alike: more likely their work or a setting than this GPU"
            evidence += (Evidence("peers", ALIKE, text, at_s=frame.at_s),)
        return Verdict(
            gpu=frame.gpus[row],
            kind=Kind.DEVIANT,
            severity=Severity.CRITICAL if page else Severity.WARNING,
            pattern=self.book.name(evidence, STRAGGLER),
            score=score,
            evidence=evidence,
            may_fence=page,
            may_move=page,
            bundle_id=bundle.id if bundle else "",
        )

    def _allowed(self, soft: Verdict, agree: bool) -> Verdict:
        """Soft evidence acts only where the policy allows it and peers agree: three GPUs or more
        that could be compared with it are there. What many show alike becomes a cause of its own
        (groups.py)."""
        may = self.settings.deviant_may
        return replace(
            soft,
            may_fence=soft.may_fence and agree and may != "alert",
            may_move=soft.may_move and agree and may == "move",
        )

    def _soft(
        self,
        frame: Frame,
        row: int,
        features: Features,
        scores: Scores,
        bundle: Bundle | None,
        pages: Ints,
    ) -> Verdict:
        """`pages` are the features that may page: corrected errors never do, they move no work."""
        score = float(scores.score[row])
        share = scores.contribution[row]
        top = [int(f) for f in np.argsort(-share)[:_SHOWN] if share[f] > 0.05 * score]
        evidence = tuple(_explain(f, row, features, scores, frame.at_s) for f in top)
        evidence += self.symptoms.throttling(row, frame.at_s)
        page = bool(np.sqrt(score * share[pages].sum()) >= self.settings.page_score)
        return Verdict(
            gpu=frame.gpus[row],
            kind=Kind.DEVIANT,
            severity=Severity.CRITICAL if page else Severity.WARNING,
            pattern=self.book.name(evidence, domain.NOVEL),
            score=score,
            evidence=evidence,
            may_fence=page,
            may_move=page,
            bundle_id=bundle.id if bundle else "",
        )


def _both(density: Verdict, peers: Verdict, book: Book) -> Verdict:
    """One deviation, seen by the baseline and by the mates: the stronger word, all reasons."""
    evidence = density.evidence + tuple(replace(e, contribution=0.0) for e in peers.evidence)
    page = Severity.CRITICAL in (density.severity, peers.severity)
    return replace(
        density,
        severity=Severity.CRITICAL if page else density.severity,
        pattern=book.name(evidence, peers.pattern),
        score=max(density.score, peers.score),
        evidence=evidence,
        may_fence=density.may_fence or peers.may_fence,
        may_move=density.may_move or peers.may_move,
    )


def _with_mates(soft: Verdict, at_s: float) -> Verdict:
    """A deviation that the few mates of a small job share: a ticket at most, and no act."""
    text = "the other GPUs of its job deviate too: more likely their work or a setting of it"
    return replace(
        soft,
        severity=min(soft.severity, Severity.WARNING, key=RANK.__getitem__),
        evidence=(*soft.evidence, Evidence("peers", ALIKE, text, at_s=at_s)),
        may_fence=False,
        may_move=False,
    )


def _hard(
    frame: Frame,
    findings: list[Finding],
    scores: Scores,
    soft: Verdict | None,
    bundle: Bundle | None,
    book: Book,
) -> Verdict:
    """The strongest finding speaks; the others, and the density's evidence, come after it."""
    ordered = sorted(
        findings, key=lambda f: (RANK[f.severity], f.kind is Kind.LOST, f.fence), reverse=True
    )
    first = ordered[0]
    if soft is not None and RANK[soft.severity] > RANK[first.severity]:
        first_evidence = tuple(f.evidence for f in ordered)
        return Verdict(
            soft.gpu,
            soft.kind,
            soft.severity,
            soft.pattern,
            soft.score,
            soft.evidence + first_evidence,
            soft.may_fence,
            soft.may_move,
            False,
            soft.bundle_id,
            soft.earned,
            soft.withheld,
        )
    score = float(np.nan_to_num(scores.score[first.row]))
    evidence = tuple(f.evidence for f in ordered) + (soft.evidence if soft else ())
    return Verdict(
        gpu=frame.gpus[first.row],
        kind=first.kind,
        severity=first.severity,
        pattern=book.name(evidence, first.pattern),
        score=max(score, 1.0),
        evidence=evidence,
        may_fence=any(f.fence for f in findings),
        may_move=any(f.move for f in findings),
        latch=any(f.latch for f in findings),
        bundle_id=bundle.id if bundle else "",
    )


def _explain(f: int, row: int, features: Features, scores: Scores, at_s: float) -> Evidence:
    """One feature's part in a score, as a person would say it."""
    feature = FEATURES[f]
    value, expected = float(scores.values[row, f]), float(scores.expected[row, f])
    part = float(scores.contribution[row, f])
    if f in (TEMP, MEM_TEMP):
        temp = float(features.values[row, f])
        normal = float(scores.predicted_c[row, 0 if f == TEMP else 1])
        text = (
            f"{feature.label} {temp:.0f} °C, {temp - normal:+.0f} °C from the {normal:.0f} °C "
            f"normal for this GPU at {features.power_ewma_w[row]:.0f} W"
        )
        return Evidence("density", feature.metric, text, temp, normal, "°C", part, at_s)
    if feature.name == "throttled":
        text = f"throttled by heat or hardware {value:.0%} of the time, normally {expected:.0%}"
        return Evidence("density", feature.metric, text, value, expected, "", part, at_s)
    if feature.unit == "events":  # held as a logarithm
        value, expected = 10.0**value - 1.0, 10.0**expected - 1.0
        text = f"{value:.0f} {feature.label} within minutes, normally {expected:.0f}"
        return Evidence("density", feature.metric, text, value, expected, "events", part, at_s)
    change = (value - expected) / expected if expected else 0.0
    text = (
        f"{feature.label} {value:.0f} {feature.unit}, {change:+.0%} from the {expected:.0f} "
        f"{feature.unit} normal for this work"
    )
    return Evidence("density", feature.metric, text, value, expected, feature.unit, part, at_s)
