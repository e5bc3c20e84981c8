"""The life of an incident: what it takes to be believed, and to be over."""

import pytest

from sentinel.core.domain import (
    CommandKind,
    Evidence,
    IncidentPhase,
    Kind,
    Mode,
    Severity,
    SubjectKind,
    from_plain,
    to_plain,
)
from sentinel.core.incident import alertname, stands
from sentinel.core.policy import Limits, Policy, Times
from tests.core.scene import Scene, uuid

SUSPECTED, CONFIRMED = IncidentPhase.SUSPECTED, IncidentPhase.CONFIRMED
CLEARING, RESOLVED = IncidentPhase.CLEARING, IncidentPhase.RESOLVED


@pytest.fixture
def scene():
    return Scene(mode=Mode.OBSERVE)


@pytest.mark.parametrize(
    ("kind", "ticks_to_confirm", "name"),
    [
        (Kind.FAULT, 1, "SentinelGpuFault"),
        (Kind.LOST, 2, "SentinelGpuLost"),
        (Kind.DEVIANT, 9, "SentinelGpuDegraded"),
    ],
)
def test_each_kind_confirms_after_its_own_time(scene, kind, ticks_to_confirm, name):
    scene.breaks(0, kind=kind)
    for _ in range(ticks_to_confirm - 1):
        scene.tick()
        assert scene.incident().phase is SUSPECTED
    scene.tick()
    incident = scene.incident()
    assert incident.phase is CONFIRMED
    assert incident.confirmed_at_s == scene.now
    assert alertname(incident) == name
    assert incident.subject.id == incident.gpu_uuid == uuid(0)
    assert from_plain(type(incident), to_plain(incident)) == incident


@pytest.mark.parametrize("kind", list(Kind)[1:4])
def test_no_time_to_confirm_means_the_very_same_tick(kind):
    times = Times(deviant_for_s=0.0, fault_for_s=0.0, lost_for_s=0.0)
    scene = Scene(mode=Mode.OBSERVE, times=times)
    scene.breaks(0, kind=kind)
    scene.tick()
    assert scene.incident().phase is CONFIRMED
    assert scene.incident().severity is Severity.CRITICAL


def test_ticks_that_come_milliseconds_early_cost_no_extra_tick(scene):
    scene.breaks(0, kind=Kind.LOST)
    scene.tick()
    scene.tick(dt=14.98)
    assert scene.incident().phase is CONFIRMED


def test_a_loss_that_is_over_at_the_next_tick_was_none(scene):
    scene.breaks(0, kind=Kind.LOST)
    scene.tick()
    scene.bad.clear()
    scene.tick()
    assert scene.incidents() == []
    assert scene.incident(0).confirmed_at_s is None
    assert scene.transitions[-1].reason == "normal again before confirmed"


def test_a_brief_normal_tick_does_not_throw_minutes_of_evidence_away(scene):
    scene.breaks(0, kind=Kind.DEVIANT)
    scene.ticks(7)  # 90 s
    bad = dict(scene.bad)
    scene.bad.clear()
    scene.tick()  # fades to 75 s
    scene.bad.update(bad)
    scene.ticks(2)
    assert scene.incident().phase is SUSPECTED
    scene.tick()
    assert scene.incident().phase is CONFIRMED


def test_soft_evidence_fades_as_slowly_as_it_grew_and_then_is_gone(scene):
    scene.breaks(0, kind=Kind.DEVIANT)
    scene.ticks(4)
    scene.bad.clear()
    scene.ticks(2)
    assert scene.incident().phase is SUSPECTED
    scene.tick()
    assert scene.incidents() == []


@pytest.mark.parametrize("phase", [SUSPECTED, CONFIRMED, CLEARING])
@pytest.mark.parametrize("how", ["blind", "silent"])
def test_not_knowing_changes_nothing_and_stops_every_timer(scene, phase, how):
    scene.breaks(0, kind=Kind.DEVIANT)
    scene.ticks(4 if phase is SUSPECTED else 12)
    if phase is CLEARING:
        scene.bad.clear()
        scene.ticks(3)
    before = scene.incident(0)
    assert before.phase is phase
    if how == "silent":
        scene.silent.add("node-0")
    scene.ticks(40, blind=how == "blind")
    assert scene.incident(0) == before
    scene.silent.clear()
    scene.tick()
    after = scene.incident(0)
    assert after.phase is phase
    assert after.held_s - before.held_s == pytest.approx(15.0)


def test_a_lost_gpu_whose_whole_host_goes_silent_is_never_confirmed(scene):
    scene.breaks(0, kind=Kind.LOST)
    scene.tick()
    scene.silent.add("node-0")
    scene.ticks(100)
    assert scene.incident().phase is SUSPECTED


def test_a_long_gap_between_ticks_counts_as_one_tick(scene):
    scene.breaks(0, kind=Kind.DEVIANT)
    scene.ticks(2)
    scene.tick(dt=3600.0)
    assert scene.incident().held_s == pytest.approx(30.0)


def test_a_clock_that_steps_back_adds_no_time_and_opens_no_twin(scene):
    scene.breaks(0, kind=Kind.DEVIANT)
    scene.ticks(2)
    scene.tick(dt=-3600.0)
    assert scene.incident().held_s == pytest.approx(15.0)
    scene.bad.clear()
    scene.ticks(4)
    first = scene.incident(0)
    scene.breaks(0, kind=Kind.DEVIANT)
    scene.tick(dt=first.opened_at_s - scene.now)  # back to the very moment it opened
    assert len(scene.incidents()) == 1
    assert scene.incident().id != first.id


def test_it_clears_when_normal_for_long_enough_and_not_before(scene):
    scene.breaks(0, kind=Kind.DEVIANT)
    scene.ticks(9)
    identity = scene.incident().id
    scene.bad.clear()
    scene.tick()
    assert scene.incident().phase is CLEARING
    assert scene.incident().fires
    scene.breaks(0, kind=Kind.DEVIANT)
    scene.tick()
    assert scene.incident().phase is CONFIRMED
    scene.bad.clear()
    scene.ticks(20)
    assert scene.incident().phase is CLEARING
    scene.tick()
    (over,) = scene.incidents(open_only=False)
    assert (over.id, over.phase, over.resolved_at_s) == (identity, RESOLVED, scene.now)


def test_hard_evidence_stays_until_long_health(scene):
    scene.breaks(0, kind=Kind.FAULT)
    scene.tick()
    scene.bad.clear()
    scene.ticks(120)
    assert scene.incident().phase is CLEARING
    assert stands(scene.incident())
    scene.tick()
    assert scene.incidents() == []


def test_a_reset_turns_hard_evidence_into_ordinary_clearing(scene):
    scene.breaks(0, kind=Kind.FAULT)
    scene.tick()
    scene.bad.clear()
    scene.ticks(5)
    scene.tick(resets=[uuid(0)])
    assert not stands(scene.incident())
    scene.ticks(15)
    assert scene.incidents() == []


def test_release_ends_hard_evidence(scene):
    scene.breaks(0, kind=Kind.FAULT)
    scene.tick()
    scene.bad.clear()
    scene.tick(commands=[scene.command(CommandKind.RELEASE, scene.incident().id)])
    assert scene.incidents() == []
    assert scene.transitions[-1].reason == "released by ada"


def test_a_hard_event_is_not_repeated_and_still_confirms_where_a_site_wants_time():
    scene = Scene(mode=Mode.OBSERVE, times=Times(fault_for_s=45.0))
    scene.breaks(0, kind=Kind.FAULT)
    scene.tick()
    scene.bad.clear()
    scene.ticks(2)
    assert scene.incident().phase is SUSPECTED
    scene.tick()
    assert scene.incident().phase is CONFIRMED


class TestEscalation:
    def test_a_fault_takes_over_a_ticket_at_once_and_keeps_its_id(self, scene):
        scene.breaks(0, kind=Kind.DEVIANT, severity=Severity.WARNING)
        scene.ticks(9)
        identity = scene.incident().id
        assert scene.incident().severity is Severity.WARNING
        scene.breaks(0, kind=Kind.FAULT)
        scene.tick()
        after = scene.incident()
        assert (after.id, after.kind, after.severity) == (identity, Kind.FAULT, Severity.CRITICAL)
        assert after.pattern == "off the bus"
        assert after.latched
        assert after.may_fence
        told = [t.reason for t in scene.transitions]
        assert "was deviant, warning, is fault, critical: off the bus" in told

    def test_a_loss_has_to_last_even_where_a_deviation_has_lasted(self, scene):
        scene.breaks(0, kind=Kind.DEVIANT, severity=Severity.WARNING)
        scene.ticks(12)
        scene.breaks(0, kind=Kind.LOST)
        scene.tick()
        assert scene.incident().kind is Kind.DEVIANT
        assert not scene.incident().may_fence
        scene.tick()
        assert scene.incident().kind is Kind.LOST

    @pytest.mark.parametrize("at_tick", [0, 4, 8, 11])
    def test_one_tick_of_a_page_makes_no_page(self, scene, at_tick):
        for n in range(13):
            severity = Severity.CRITICAL if n == at_tick else Severity.WARNING
            scene.breaks(0, kind=Kind.DEVIANT, severity=severity)
            scene.tick()
        assert scene.incident().phase is CONFIRMED
        assert scene.incident().severity is Severity.WARNING
        assert not scene.incident().may_fence

    def test_a_page_that_stands_as_long_as_any_deviation_is_one(self, scene):
        scene.breaks(0, kind=Kind.DEVIANT, severity=Severity.CRITICAL)
        scene.ticks(9)
        assert scene.incident().severity is Severity.CRITICAL
        assert scene.incident().may_fence

    def test_a_weaker_verdict_never_weakens(self, scene):
        scene.breaks(0, kind=Kind.FAULT, score=3.0)
        scene.tick()
        scene.breaks(0, kind=Kind.DEVIANT, severity=Severity.WARNING)
        scene.ticks(20)
        after = scene.incident()
        assert (after.kind, after.severity, after.score) == (Kind.FAULT, Severity.CRITICAL, 3.0)
        assert after.pattern == "off the bus"
        assert after.phase is CONFIRMED

    def test_what_came_first_stays_first_and_later_hard_evidence_is_added(self, scene):
        xid = Evidence("xid", "xid", "Xid 79", 79.0)
        gone = Evidence("lost", "up", "gone for 15 s")
        later = Evidence("lost", "up", "gone for 30 s")
        scene.breaks(0, kind=Kind.FAULT, evidence=(xid,))
        scene.tick()
        scene.breaks(0, kind=Kind.LOST, evidence=(gone,))
        scene.tick()
        scene.breaks(0, kind=Kind.LOST, evidence=(later,))
        scene.tick()
        assert scene.incident().evidence == (xid, later)
        assert scene.incident().kind is Kind.FAULT

    def test_density_evidence_follows_its_strongest_moment(self, scene):
        hot = Evidence("density", "temp_c", "86 °C")
        warm = Evidence("density", "temp_c", "75 °C")
        scene.breaks(0, kind=Kind.DEVIANT, score=1.2, evidence=(warm,))
        scene.tick()
        scene.breaks(0, kind=Kind.DEVIANT, score=2.4, evidence=(hot,))
        scene.tick()
        scene.breaks(0, kind=Kind.DEVIANT, score=1.2, evidence=(warm,))
        scene.tick()
        assert scene.incident().evidence == (hot,)
        assert scene.incident().score == 2.4


class TestFleetSubjects:
    def test_one_blind_tick_is_no_news_two_are_one_alert(self, scene):
        scene.tick(blind=True)
        assert not any(i.fires for i in scene.incidents())
        scene.ticks(3, blind=True)
        incident = scene.incident()
        assert (incident.subject.kind, incident.kind) == (SubjectKind.FLEET, Kind.UNKNOWN)
        assert alertname(incident) == "SentinelBlind"
        assert "Prometheus is down" in incident.evidence[0].text
        scene.ticks(2)
        assert scene.incidents() == []
        confirmed = [i for i in scene.incidents(open_only=False) if i.confirmed_at_s]
        assert len(confirmed) == 1

    def test_low_coverage_is_blindness_too_and_a_vanished_gpu_is_not(self, scene):
        scene.silent.update({"node-1", "node-2"})
        scene.ticks(2)
        assert scene.incident().severity is Severity.WARNING
        assert "67 %" in scene.incident().evidence[0].text
        scene.silent.clear()
        scene.ticks(3)
        scene.vanished.update(g.uuid for g in scene.gpus if g.index < 3)
        scene.ticks(3)
        assert scene.incidents() == []

    def test_a_fleet_never_seen_is_told_after_minutes_not_seconds(self):
        scene = Scene(nodes=0, mode=Mode.OBSERVE)
        scene.ticks(20)
        assert not any(i.fires for i in scene.incidents())
        scene.tick()
        assert alertname(scene.incident()) == "SentinelBlind"

    def shift(self, scene, kind=Kind.DEVIANT, count=6):
        for n in range(count):
            scene.breaks(n % 3, n // 3, kind=kind)

    def test_a_shift_of_the_fleet_is_one_alert_and_opens_the_breaker(self, scene):
        self.shift(scene)
        scene.ticks(8)
        assert not scene.control.breaker.latched
        scene.ticks(3)
        firing = [i for i in scene.incidents() if i.fires]
        assert [alertname(i) for i in firing] == ["SentinelFleetEvent"]
        assert "6 GPUs on 3 nodes" in firing[0].evidence[0].text
        assert scene.control.breaker.latched  # in mode observe as well
        scene.bad.clear()
        scene.ticks(40)
        assert scene.incidents() == []
        assert scene.control.breaker.latched  # only a person resets it

    def test_hard_faults_in_number_open_the_breaker_at_once(self, scene):
        self.shift(scene, Kind.FAULT)
        scene.tick()
        assert scene.control.breaker.latched
        assert {alertname(i) for i in scene.incidents() if i.fires} == {
            "SentinelFleetEvent",
            "SentinelGpuFault",
        }

    def test_a_passing_blip_over_the_fleet_opens_nothing(self, scene):
        self.shift(scene)
        scene.tick()
        scene.bad.clear()
        scene.ticks(20)
        assert not scene.control.breaker.latched
        assert all(i.confirmed_at_s is None for i in scene.incidents(open_only=False))

    def test_reset_does_not_latch_again_while_the_same_event_goes_on(self, scene):
        self.shift(scene)
        scene.ticks(10)
        scene.tick(commands=[scene.command(CommandKind.RESET_BREAKER)])
        scene.ticks(5)
        assert not scene.control.breaker.latched

    def test_errors_of_an_application_are_no_event_of_the_fleet(self, scene):
        for n in range(12):
            harmless = {"may_fence": False, "may_move": False, "latch": False}
            scene.breaks(n % 4, n // 4, severity=Severity.WARNING, **harmless)
        scene.ticks(20)
        assert not scene.control.breaker.latched

    def test_a_fleet_of_one_node_is_not_held_by_one_or_two_gpus(self):
        scene = Scene(nodes=1, per_node=8, mode=Mode.OBSERVE, limits=Limits(fleet_hold_gpus=1))
        scene.breaks(0, 0)
        scene.breaks(0, 1)
        scene.ticks(3)
        assert not scene.control.breaker.latched
        scene.breaks(0, 2)
        scene.tick()
        assert scene.control.breaker.latched

    def test_many_gpus_of_one_node_are_that_nodes_fault(self, scene):
        for index in range(4):
            scene.breaks(0, index)
        scene.policy = Policy(limits=Limits(fleet_hold_gpus=2))
        scene.tick()
        assert not scene.control.breaker.latched

    def test_what_has_stood_for_long_is_no_news_of_the_fleet(self, scene):
        self.shift(scene, count=5)
        scene.ticks(150)
        scene.breaks(4, 0, kind=Kind.DEVIANT)
        scene.ticks(20)
        assert not scene.control.breaker.latched
