"""The weekly budget: what it lets through, what it holds back, and that it says why."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sentinel.core import budget as budgets
from sentinel.core.budget import PAST_S, TOGETHER_S, WEEK_S, Calibration, Expected, fold, spent
from sentinel.core.domain import (
    Control,
    Evidence,
    Gpu,
    Incident,
    IncidentPhase,
    Kind,
    Peak,
    Severity,
    Subject,
    SubjectKind,
    Verdict,
    Workload,
    from_plain,
    to_plain,
)
from sentinel.core.policy import Budget
from tests.core.scene import Scene

CRITICAL, WARNING, INFO = Severity.CRITICAL, Severity.WARNING, Severity.INFO
NOW = 1_000_000_000.0
DAY = 86_400.0
CERTIFIED = Calibration(gpu_days=100.0, certified=True, why="", gpus=128)
BUDGET = Budget(pages_per_week=2.0, tickets_per_week=20.0, page_score=1.3)


def soft(score, severity=CRITICAL, uuid="GPU-a"):
    acts = severity is CRITICAL
    return Verdict(
        Gpu(uuid, "node-1"),
        Kind.DEVIANT,
        severity,
        "overheating",
        score,
        may_fence=acts,
        may_move=acts,
    )


def peak(score, at_s=NOW - 3 * DAY, *, id=None, keys=None, page=True, told=INFO, last_s=None):
    id = id or f"inc-{score}-{at_s}"
    return Peak(id, score, at_s, at_s if last_s is None else last_s, keys or (id,), page, told)


def by_id(*peaks):
    return {p.id: p for p in peaks}


def limits(peaks=(), calibration=CERTIFIED, budget=BUDGET, now_s=NOW, **kw):
    return budgets.thresholds(by_id(*peaks), calibration, budget, now_s, **kw)


def incident(id="inc-1", uuid="GPU-a", node="node-1", level=1.5, at_s=NOW, **changes):
    made = Incident(
        id=id,
        subject=Subject(SubjectKind.GPU, uuid),
        phase=IncidentPhase.CONFIRMED,
        opened_at_s=at_s - 120.0,
        since_s=at_s,
        held_s=120.0,
        last_tick_s=at_s,
        kind=Kind.DEVIANT,
        severity=WARNING,
        worst=WARNING,
        pattern="overheating",
        score=level,
        evidence=(),
        gpu_uuid=uuid,
        node=node,
        confirmed_at_s=at_s,
        level=level,
    )
    return replace(made, **changes)


class TestHeld:
    @pytest.mark.parametrize(
        ("score", "earned", "told"),
        [(1.5, CRITICAL, CRITICAL), (1.1, WARNING, WARNING), (1.31, CRITICAL, CRITICAL)],
    )
    def test_with_room_and_a_calm_fleet_nothing_is_held_back(self, score, earned, told):
        verdict = limits().held(soft(score, earned))
        assert (verdict.severity, verdict.withheld, verdict.earned) == (told, "", earned)
        assert verdict.may_move is (told is CRITICAL)

    @pytest.mark.parametrize("kind", [Kind.FAULT, Kind.LOST])
    def test_hard_evidence_is_under_no_budget(self, kind):
        hard = replace(soft(1.0), kind=kind)
        spent_all = limits([peak(9.0 + i / 10) for i in range(60)], calibration=None)
        assert spent_all.held(hard) is hard

    def test_uncertified_soft_evidence_makes_tickets_only_and_never_acts(self):
        unknown = replace(CERTIFIED, certified=False, why="it rests on 0.3 of the 14 GPU-days")
        verdict = limits(calibration=unknown).held(soft(9.0))
        assert verdict.severity is WARNING
        assert (verdict.may_fence, verdict.may_move) == (False, False)
        assert "not certified" in verdict.withheld
        assert "0.3 of the 14 GPU-days" in verdict.withheld

    def test_without_any_bundle_soft_evidence_makes_tickets_only(self):
        verdict = limits(calibration=None).held(soft(9.0))
        assert verdict.severity is WARNING
        assert "no baseline" in verdict.withheld

    def test_uncertified_tickets_that_might_act_do_not(self):
        verdict = replace(soft(1.2, WARNING), may_fence=True)
        assert not limits(calibration=None).held(verdict).may_fence

    def test_a_spent_budget_says_so_in_numbers(self):
        spent_pages = limits([peak(1.6 + i / 10) for i in range(4)])
        verdict = spent_pages.held(soft(1.4))
        assert verdict.severity is WARNING
        assert verdict.withheld == (
            "no page: the budget of 2 pages a week is spent: 1.40 is not above 1.60, the lowest "
            "of the 4 strongest incidents of the last two weeks"
        )
        assert not verdict.may_fence

    def test_a_strong_deviation_still_passes(self):
        spent_pages = limits([peak(1.6 + i / 10) for i in range(4)])
        assert spent_pages.held(soft(2.5)).severity is CRITICAL

    def test_what_makes_no_ticket_is_written_down(self):
        verdict = limits([peak(1.2 + i / 100) for i in range(40)]).held(soft(1.1, WARNING))
        assert verdict.severity is INFO
        assert "no ticket: the budget of 20 tickets a week is spent" in verdict.withheld

    def test_an_incident_does_not_stand_in_its_own_way(self):
        """Four incidents, four pages: the weakest of them pages as long as it stands."""
        own = peak(1.6, NOW - 600.0, keys=("GPU-a",))
        four = limits([own, *(peak(1.7 + i / 10) for i in range(3))])
        assert four.held(soft(1.61)).severity is CRITICAL
        five = limits([own, *(peak(1.7 + i / 10) for i in range(4))])
        assert five.held(soft(1.61)).severity is WARNING


class TestCalibrated:
    TABLE = tuple(
        Expected(1.0 + k / 10, 100.0 * 0.1**k, 0.0, 1e3, 0)  # a tenth per 0.1
        for k in range(6)
    )

    def test_a_restless_fleet_needs_more_for_a_ticket(self):
        known = replace(CERTIFIED, table=self.TABLE)
        assert limits(calibration=known).ticket.floor == pytest.approx(1.0699, abs=1e-3)
        verdict = limits(calibration=known).held(soft(1.05, WARNING))
        assert verdict.severity is INFO
        assert "normal time reaches 20 times a week" in verdict.withheld

    def test_thresholds_never_fall_below_what_is_configured(self):
        calm = replace(CERTIFIED, table=(Expected(0.5, 1e-6, 0.0, 1.0, 0),))
        got = limits(calibration=calm)
        assert (got.ticket.floor, got.page.floor) == (1.0, 1.3)

    def test_an_uncertified_table_raises_nothing(self):
        unknown = replace(CERTIFIED, certified=False, table=self.TABLE)
        assert limits(calibration=unknown).ticket.floor == 1.0

    def test_a_cluster_that_has_grown_needs_more(self):
        known = replace(CERTIFIED, table=self.TABLE)
        assert limits(calibration=known, gpus=1280).ticket.floor == pytest.approx(1.17, abs=1e-3)
        assert limits(calibration=known, gpus=12).ticket.floor == pytest.approx(1.07, abs=1e-3)

    def test_beyond_its_end_the_table_goes_on(self):
        known = replace(CERTIFIED, table=self.TABLE)
        tiny = Budget(pages_per_week=1e-5, tickets_per_week=20.0)
        assert limits(calibration=known, budget=tiny).page.floor == pytest.approx(1.7, abs=1e-3)


class TestFold:
    def folded(self, peaks, *incidents, now_s=NOW, earned=CRITICAL, budget=BUDGET):
        verdicts = [replace(soft(9, uuid=i.gpu_uuid or ""), earned=earned) for i in incidents]
        return fold(peaks, incidents, verdicts, budget, now_s)

    def test_a_confirmed_soft_incident_is_remembered_with_the_height_that_lasted(self):
        (kept,) = self.folded({}, incident(level=1.52, score=4.0)).values()
        assert (kept.score, kept.told, kept.page) == (1.52, WARNING, True)

    @pytest.mark.parametrize(
        "changes",
        [{"kind": Kind.FAULT}, {"kind": Kind.LOST}, {"phase": IncidentPhase.SUSPECTED}],
    )
    def test_hard_or_unconfirmed_incidents_are_not(self, changes):
        assert self.folded({}, incident(**changes)) == {}

    def test_nothing_new_is_the_very_same_object(self):
        once = self.folded({}, incident())
        assert self.folded(once, incident(), now_s=NOW + 15.0) is once

    def test_what_stands_is_kept_fresh(self):
        once = self.folded({}, incident())
        (later,) = self.folded(once, incident(), now_s=NOW + 400.0).values()
        assert later.last_s == NOW + 400.0

    @pytest.mark.parametrize(
        ("other", "count"),
        [
            ({"uuid": "GPU-b", "node": "node-2"}, 2),
            ({"uuid": "GPU-b"}, 1),  # its host, at the same time
            ({"uuid": "GPU-b", "at_s": NOW + TOGETHER_S + 60.0}, 2),  # its host, much later
            ({"at_s": NOW + TOGETHER_S}, 1),  # the same GPU again
            ({"at_s": NOW + TOGETHER_S + 60.0}, 2),
        ],
    )
    def test_what_has_one_cause_counts_once(self, other, count):
        second = incident("inc-2", **other)
        peaks = self.folded({}, incident())
        assert len(self.folded(peaks, second, now_s=second.confirmed_at_s)) == count

    def test_a_whole_job_counts_once_with_its_highest(self):
        job = Workload("job", "4711")
        many = [
            incident(f"inc-{n}", f"GPU-{n}", f"node-{n}", 1.1 + n / 10, workload=job)
            for n in range(5)
        ]
        (kept,) = self.folded({}, *many).values()
        assert kept.score == 1.5

    def test_a_fleet_event_takes_up_all_that_began_with_it(self):
        alone = [incident(f"inc-{n}", f"GPU-{n}", f"node-{n}") for n in range(3)]
        peaks = self.folded({}, *alone)
        assert len(peaks) == 3
        fleet = incident(
            "inc-f",
            subject=Subject(SubjectKind.FLEET, "c"),
            gpu_uuid=None,
            node="",
            worst=CRITICAL,
        )
        (kept,) = self.folded(peaks, *alone, fleet).values()
        assert kept.told is CRITICAL

    def test_two_weeks_later_it_is_forgotten(self):
        once = self.folded({}, incident())
        assert self.folded(once, now_s=NOW + PAST_S + 1.0) == {}

    def test_a_clock_that_was_ahead_leaves_nothing_behind_for_ever(self):
        ahead = self.folded({}, incident(at_s=NOW + 400 * DAY), now_s=NOW + 400 * DAY)
        back = self.folded(ahead, now_s=NOW)
        assert [p.last_s for p in back.values()] == [NOW]
        assert self.folded(back, now_s=NOW + PAST_S + 1.0) == {}

    def test_it_stays_bounded_and_keeps_the_highest(self):
        many = by_id(*(peak(1.0 + k / 1000, id=f"p{k}", keys=(f"G{k}",)) for k in range(3000)))
        kept = self.folded(many, incident(uuid="GPU-new", level=9.0))
        assert len(kept) == 500
        assert min(p.score for p in kept.values()) == pytest.approx(1.0 + 2501 / 1000)

    def test_spent_counts_the_week_by_loudness(self):
        told = [
            peak(1.5, NOW - DAY, told=CRITICAL),
            peak(1.4, NOW - DAY, told=WARNING),
            peak(1.2, NOW - 6 * DAY, told=WARNING),
            peak(1.1, NOW - DAY, told=INFO),
            peak(1.9, NOW - WEEK_S - 1, told=CRITICAL),
        ]
        assert spent(by_id(*told), NOW) == (1, 2, 1)


@given(
    scores=st.lists(st.floats(1.0, 5.0), max_size=80),
    score=st.floats(1.0, 6.0),
    tickets=st.floats(0.1, 30.0),
    pages=st.floats(0.1, 5.0),
)
def test_at_most_the_budget_of_the_past_is_above_what_passes(scores, score, tickets, pages):
    given_budget = Budget(pages, tickets, 1.3)
    past = [peak(round(s, 3), NOW - 3 * DAY - k, id=f"p{k}") for k, s in enumerate(scores)]
    line = limits(past, budget=given_budget)
    told = line.held(soft(score))
    room = max(1, int(tickets * 2 + 1e-9))
    stronger = sum(p.score >= score for p in past)
    if stronger < room:
        assert told.severity is not INFO
    if stronger > room:
        assert told.severity in (INFO, CRITICAL)
    assert (told.severity is CRITICAL) == (told.withheld == "")
    assert told.severity is CRITICAL or not (told.may_fence or told.may_move)
    if score > max([*(p.score for p in past), 1.3]):
        assert told.severity is CRITICAL  # the strongest of all always passes


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3))
def test_the_rate_that_passes_is_the_budget(seed, weekly):
    """Ten times as many incidents as the budget, for 12 weeks, of no particular heights: what
    pages stays near the budget."""
    rng = np.random.default_rng(seed)
    given_budget = Budget(weekly, 1000.0, 1.3)
    peaks, passed, weeks = {}, 0, 12
    times = np.sort(rng.uniform(0, weeks * WEEK_S, rng.poisson(10 * weekly * weeks)))
    for k, (at_s, score) in enumerate(
        zip(times, 1.3 + rng.exponential(0.3, len(times)), strict=True)
    ):
        now_s = NOW + at_s
        line = budgets.thresholds(peaks, CERTIFIED, given_budget, now_s)
        told = line.held(soft(score, uuid=f"GPU-{k}"))
        passed += (told.severity is CRITICAL) and at_s > 2 * WEEK_S
        own = incident(f"inc-{k}", f"GPU-{k}", f"node-{k}", score, at_s=now_s, worst=told.severity)
        peaks = fold(peaks, [own], [told], given_budget, now_s)
    expected = weekly * (weeks - 2)
    assert passed <= expected + 4.5 * np.sqrt(expected) + 2


class TestInTheTick:
    """Through `advance`: what an incident says, and what survives a restart."""

    def scene(self):
        scene = Scene()
        scene.runs([0])
        return scene

    def held(self, scene, node, score, peaks, **kw):
        line = budgets.thresholds(peaks, CERTIFIED, BUDGET, scene.now)
        verdict = Verdict(
            scene.gpu(node),
            Kind.DEVIANT,
            CRITICAL,
            "overheating",
            score,
            (Evidence("density", "temp_c", "hot"),),
            True,
            True,
        )
        scene.bad[verdict.gpu.uuid] = line.held(verdict)

    def test_the_height_of_an_incident_is_what_lasted(self):
        scene = self.scene()
        for score in [1.4] * 5 + [9.0] + [1.4] * 12:
            scene.breaks(0, kind=Kind.DEVIANT, severity=WARNING, score=score)
            scene.tick()
        (kept,) = scene.control.peaks.values()
        assert kept.score == 1.4
        assert scene.incident().score == 9.0

    def test_what_is_written_down_only_alerts_nobody_and_says_why(self):
        scene = self.scene()
        low = by_id(*(peak(1.5 + k / 100, scene.now - DAY, id=f"p{k}") for k in range(40)))
        scene.control = replace(scene.control, peaks=low)
        for _ in range(12):
            self.held(scene, 0, 1.4, scene.control.peaks)
            scene.tick()
        found = scene.incident()
        assert (found.phase, found.worst) == (IncidentPhase.CONFIRMED, INFO)
        assert "the budget of 20 tickets a week is spent" in found.withheld
        assert any("is spent" in t.reason for t in scene.transitions)
        assert scene.posts == []
        assert len(scene.control.peaks) == 41

    def test_peaks_survive_being_written_down(self):
        scene = self.scene()
        scene.breaks(0, kind=Kind.DEVIANT, severity=WARNING)
        scene.ticks(12)
        assert len(scene.control.peaks) == 1
        assert from_plain(Control, to_plain(scene.control)) == scene.control
        scene.restart()
        assert len(scene.control.peaks) == 1

    def test_a_deviation_that_grows_earns_its_page_after_all(self):
        scene = self.scene()
        low = by_id(*(peak(1.5 + k / 100, scene.now - DAY, id=f"p{k}") for k in range(40)))
        scene.control = replace(scene.control, peaks=low)
        for score in [1.2] * 12 + [3.0] * 12:
            self.held(scene, 0, score, scene.control.peaks)
            scene.tick()
        found = scene.incident()
        assert (found.worst, found.withheld) == (CRITICAL, "")
        assert len(scene.posts) == 1
