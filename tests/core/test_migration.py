"""What answers and silence make of an operation: started once, ended once."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sentinel.core import migration
from sentinel.core.domain import (
    Backup,
    Kind,
    Migration,
    MigrationPhase,
    Operation,
    Outcome,
    OutcomeKind,
    OutcomeSource,
    Severity,
)
from sentinel.core.policy import Times
from tests.core.scene import JOB, Scene, uuid

P, K, S = MigrationPhase, OutcomeKind, OutcomeSource
BACKUPS = (Backup("node-5", ("GPU-5-0",)),)
TERMINAL = [P.DONE, P.CANCELLED, P.REFUSED, P.FAILED, P.STUCK]


def moving(phase=P.SENT, operation=Operation.MOVE, **changes):
    given = {
        "operation_id": "op-1",
        "incident_id": "inc-1",
        "operation": operation,
        "node": "node-0",
        "gpu_uuids": ("GPU-0-0",),
        "phase": phase,
        "attempt": 1,
        "planned_at_s": 100.0,
        "since_s": 100.0,
        "deadline_s": 1000.0,
        "evidence_at_s": 100.0,
        "workload": JOB,
        "exclude_nodes": ("node-0",),
        "backups": BACKUPS,
        "post_allowed": phase is P.PLANNED,
        "polled_at_s": 110.0 if phase in (P.UNKNOWN, P.RUNNING) else 0.0,
        "accepted": phase in (P.RUNNING, P.VERIFYING),
    }
    return Migration(**{**given, **changes})


def hear(before, kind, source=S.GET, at_s=120.0, placement=()):
    return migration.heard(before, Outcome("op-1", kind, source, at_s, "", placement), 120.0)


@pytest.mark.parametrize(
    ("phase", "kind", "source", "then"),
    [
        (P.SENT, K.ACCEPTED, S.POST, P.RUNNING),
        (P.SENT, K.RUNNING, S.CALLBACK, P.RUNNING),
        (P.SENT, K.FINISHED, S.CALLBACK, P.VERIFYING),
        (P.SENT, K.REFUSED, S.POST, P.REFUSED),
        (P.SENT, K.FAILED, S.CALLBACK, P.FAILED),
        (P.SENT, K.UNKNOWN, S.POST, P.UNKNOWN),
        (P.SENT, K.NOT_FOUND, S.GET, P.SENT),
        (P.SENT, K.NOT_FOUND, S.POST, P.SENT),
        (P.RUNNING, K.ACCEPTED, S.POST, P.RUNNING),
        (P.RUNNING, K.UNKNOWN, S.POST, P.RUNNING),
        (P.RUNNING, K.UNKNOWN, S.GET, P.RUNNING),
        (P.RUNNING, K.FINISHED, S.GET, P.VERIFYING),
        (P.RUNNING, K.FAILED, S.GET, P.FAILED),
        (P.RUNNING, K.REFUSED, S.CALLBACK, P.FAILED),
        (P.RUNNING, K.NOT_FOUND, S.GET, P.UNKNOWN),
        (P.UNKNOWN, K.ACCEPTED, S.POST, P.RUNNING),
        (P.UNKNOWN, K.RUNNING, S.GET, P.RUNNING),
        (P.UNKNOWN, K.FINISHED, S.GET, P.VERIFYING),
        (P.UNKNOWN, K.REFUSED, S.GET, P.REFUSED),
        (P.UNKNOWN, K.FAILED, S.GET, P.FAILED),
        (P.UNKNOWN, K.UNKNOWN, S.GET, P.UNKNOWN),
        (P.VERIFYING, K.RUNNING, S.CALLBACK, P.VERIFYING),
        (P.VERIFYING, K.REFUSED, S.CALLBACK, P.VERIFYING),
        (P.VERIFYING, K.NOT_FOUND, S.GET, P.VERIFYING),
        (P.VERIFYING, K.FAILED, S.CALLBACK, P.FAILED),
        (P.PLANNED, K.REFUSED, S.POST, P.PLANNED),
        (P.PLANNED, K.UNKNOWN, S.GET, P.PLANNED),
    ],
)
def test_an_answer_moves_it_on_and_never_back(phase, kind, source, then):
    change = hear(moving(phase), kind, source)
    assert change.migration.phase is then
    if then not in (P.PLANNED,):
        assert not change.migration.post_allowed
    if then is not phase:
        assert change.why


@pytest.mark.parametrize("operation", [Operation.FENCE, Operation.UNFENCE])
def test_a_fence_that_finished_is_done_and_needs_no_telemetry(operation):
    assert hear(moving(operation=operation), K.FINISHED).migration.phase is P.DONE


def test_finished_without_a_placement_is_checked_on_the_planned_backups():
    change = hear(moving(), K.FINISHED)
    assert change.migration.placement == BACKUPS
    assert "no placement reported" in change.why
    placed = (Backup("node-4", ("GPU-4-1",)),)
    assert hear(moving(), K.FINISHED, placement=placed).migration.placement == placed


class TestNotFound:
    def test_the_answer_to_our_question_lets_the_same_call_leave_again(self):
        after = hear(moving(P.UNKNOWN), K.NOT_FOUND).migration
        assert after.phase is P.UNKNOWN
        assert migration.may_leave(after)
        again = migration.sent(after, 130.0)
        assert (again.phase, again.post_allowed, again.operation_id) == (P.SENT, False, "op-1")

    @pytest.mark.parametrize("source", [S.POST, S.CALLBACK])
    def test_nobody_else_can_prove_it(self, source):
        assert not migration.may_leave(hear(moving(P.UNKNOWN), K.NOT_FOUND, source).migration)

    def test_an_answer_from_before_the_question_proves_nothing(self):
        assert not migration.may_leave(hear(moving(P.UNKNOWN), K.NOT_FOUND, at_s=105.0).migration)
        unasked = moving(P.UNKNOWN, polled_at_s=0.0)
        assert not migration.may_leave(hear(unasked, K.NOT_FOUND).migration)

    def test_what_was_once_accepted_is_never_sent_again(self):
        lost = hear(moving(P.RUNNING), K.NOT_FOUND).migration
        asked = replace(lost, polled_at_s=125.0)
        assert not migration.may_leave(hear(asked, K.NOT_FOUND, at_s=130.0).migration)


@pytest.mark.parametrize("phase", [p for p in P if p not in (P.PLANNED,)])
def test_sending_what_may_have_left_is_an_error(phase):
    with pytest.raises(ValueError, match="must not be sent"):
        migration.sent(moving(phase, post_allowed=phase is P.SENT), 200.0)


@pytest.mark.parametrize("phase", TERMINAL)
@pytest.mark.parametrize("kind", list(K))
@pytest.mark.parametrize("source", list(S))
def test_what_has_ended_stays_ended(phase, kind, source):
    before = moving(phase)
    change = hear(before, kind, source)
    assert change.migration == before
    runs = kind in (K.ACCEPTED, K.RUNNING, K.FINISHED)
    assert change.alarm is (runs and phase in (P.CANCELLED, P.REFUSED))


ANSWERS = st.lists(st.tuples(st.sampled_from(K), st.sampled_from(S)), max_size=12)
ORDER = {P.SENT: 0, P.UNKNOWN: 0, P.RUNNING: 0, P.VERIFYING: 1, P.DONE: 2, P.FAILED: 2}
ORDER |= {P.REFUSED: 2, P.CANCELLED: 2, P.STUCK: 2}


@given(ANSWERS, st.sampled_from(Operation))
def test_no_order_of_answers_goes_backwards_or_starts_it_twice(answers, operation):
    now = moving(operation=operation)
    for kind, source in answers:
        after = hear(now, kind, source).migration
        assert ORDER[after.phase] >= ORDER[now.phase]
        if ORDER[now.phase] == 2:
            assert after is now
        if after.post_allowed:
            assert kind is K.NOT_FOUND or now.post_allowed
            assert not after.accepted
        now = after


@pytest.mark.parametrize(
    ("phase", "now_s", "then"),
    [
        (P.SENT, 159.0, P.SENT),
        (P.SENT, 160.0, P.UNKNOWN),
        (P.PLANNED, 999.0, P.PLANNED),
        (P.PLANNED, 1000.0, P.CANCELLED),
        (P.RUNNING, 999.0, P.RUNNING),
        (P.RUNNING, 1000.0, P.STUCK),
        (P.UNKNOWN, 999.0, P.UNKNOWN),
        (P.UNKNOWN, 1000.0, P.STUCK),
        (P.DONE, 9999.0, P.DONE),
    ],
)
def test_what_time_makes_of_it(phase, now_s, then):
    change = migration.waited(moving(phase), now_s, Times())
    assert change.migration.phase is then
    assert bool(change.why) is (then is not phase)


def test_what_provably_never_arrived_is_cancelled_at_its_deadline_not_stuck():
    unsent = moving(P.UNKNOWN, post_allowed=True)
    assert migration.waited(unsent, 1000.0, Times()).migration.phase is P.CANCELLED


def test_after_a_long_standstill_it_is_asked_about_before_it_is_given_up():
    doubted = migration.doubted(moving(P.SENT), 5000.0, "restarted")
    assert migration.waited(doubted, 5000.0, Times()).migration.phase is P.UNKNOWN
    assert migration.question_due(doubted, 5000.0, Times())
    assert migration.waited(doubted, 5030.0, Times()).migration.phase is P.STUCK


@pytest.mark.parametrize(
    ("before", "due"),
    [
        (moving(P.UNKNOWN, polled_at_s=0.0), True),
        (moving(P.UNKNOWN, polled_at_s=110.0), False),
        (moving(P.UNKNOWN, polled_at_s=100.0), True),
        (moving(P.UNKNOWN, polled_at_s=0.0, post_allowed=True), False),
        (moving(P.RUNNING, polled_at_s=105.0), True),
        (moving(P.RUNNING, polled_at_s=110.0), False),
        (moving(P.SENT), False),
        (moving(P.VERIFYING), False),
        (moving(P.STUCK), False),
    ],
)
def test_when_the_scheduler_is_asked(before, due):
    assert migration.question_due(before, 120.0, Times()) is due


def test_operation_ids_differ_by_incident_operation_and_attempt():
    ids = {
        migration.operation_id(incident, operation, attempt)
        for incident in ("inc-1", "inc-2")
        for operation in Operation
        for attempt in (1, 2)
    }
    assert len(ids) == 12
    assert all(i.startswith("op-") and len(i) == 19 for i in ids)


class TestVerifying:
    """A move is done when telemetry shows it, whatever the scheduler says."""

    @pytest.fixture
    def scene(self):
        scene = Scene()
        scene.runs([0])
        scene.breaks(0)
        scene.fence()
        self.move = scene.last(Operation.MOVE)
        scene.tick(scene.finishes(self.move.operation_id, self.move.backups))
        assert scene.phase(Operation.MOVE) is P.VERIFYING
        return scene

    def test_it_takes_the_work_there_healthy_and_gone_here_for_a_while(self, scene):
        scene.carry(self.move)
        scene.ticks(4)
        assert scene.phase(Operation.MOVE) is P.VERIFYING
        scene.tick()
        assert scene.phase(Operation.MOVE) is P.DONE
        assert scene.incident().moved
        assert scene.incident().severity is Severity.WARNING

    def test_work_that_is_also_still_at_the_source_is_not_moved(self, scene):
        scene.carry(self.move)
        scene.work[uuid(0)] = JOB
        scene.ticks(70)
        assert scene.phase(Operation.MOVE) is P.STUCK
        assert "still there" in scene.last(Operation.MOVE).reason

    def test_a_source_that_reports_nothing_counts_as_left(self, scene):
        scene.carry(self.move)
        scene.work[uuid(0)] = JOB
        scene.silent.add("node-0")
        scene.ticks(5)
        assert scene.phase(Operation.MOVE) is P.DONE

    def test_other_work_on_the_target_is_not_this_work(self, scene):
        scene.carry(self.move)
        scene.work[uuid(5)] = replace(JOB, id="other")
        scene.ticks(10)
        assert scene.phase(Operation.MOVE) is P.VERIFYING

    @pytest.mark.parametrize("how", ["blind", "silent"])
    def test_not_seeing_the_target_stops_the_timer(self, scene, how):
        scene.carry(self.move)
        scene.ticks(3)
        before = scene.last(Operation.MOVE).verified_s
        if how == "silent":
            scene.silent.add("node-5")
        scene.ticks(10, blind=how == "blind")
        assert scene.last(Operation.MOVE).verified_s == before
        scene.silent.clear()
        scene.ticks(2)
        assert scene.phase(Operation.MOVE) is P.DONE

    def test_a_target_that_fails_ends_it_and_nothing_hops_again(self, scene):
        scene.carry(self.move)
        scene.ticks(2)
        scene.breaks(5, kind=Kind.FAULT)
        scene.tick()
        assert scene.phase(Operation.MOVE) is P.FAILED
        scene.ticks(100)
        moves = [m for m in scene.control.migrations.values() if m.operation is Operation.MOVE]
        assert len(moves) == 1
        assert any(i.pattern == "move failed" and i.fires for i in scene.incidents())

    def test_one_odd_tick_of_the_target_only_starts_the_timer_again(self, scene):
        scene.carry(self.move)
        scene.ticks(3)
        scene.breaks(5, kind=Kind.DEVIANT)
        scene.tick()
        assert scene.last(Operation.MOVE).verified_s == 0.0
        del scene.bad[uuid(5)]
        scene.ticks(5)
        assert scene.phase(Operation.MOVE) is P.DONE

    def test_put_back_on_the_failing_node_is_no_success(self):
        scene = Scene()
        scene.runs([0])
        scene.breaks(0)
        scene.fence()
        back = [Backup("node-0", (uuid(0, 1),))]
        scene.tick(scene.finishes(scene.posts[-1], back))
        scene.tick()
        assert scene.phase(Operation.MOVE) is P.FAILED
        assert "back on node-0" in scene.last(Operation.MOVE).reason

    def test_a_place_that_telemetry_does_not_know_ends_stuck(self):
        scene = Scene()
        scene.runs([0])
        scene.breaks(0)
        scene.fence()
        scene.tick(scene.finishes(scene.posts[-1], [Backup("elsewhere", ("GPU-x",))]))
        scene.ticks(61)
        assert scene.phase(Operation.MOVE) is P.STUCK

    def test_a_node_named_without_gpus_means_those_that_show_the_work(self, scene):
        scene.put(replace(self.move, phase=P.VERIFYING, post_allowed=False, placement=()))
        found = replace(scene.last(Operation.MOVE), placement=(Backup("node-5", ()),))
        scene.put(found)
        scene.ticks(3)
        assert scene.last(Operation.MOVE).verified_s == 0.0
        scene.carry(self.move)
        scene.ticks(5)
        assert scene.phase(Operation.MOVE) is P.DONE

    def test_a_restart_goes_on_verifying(self, scene):
        scene.carry(self.move)
        scene.ticks(3)
        scene.restart()
        assert scene.phase(Operation.MOVE) is P.VERIFYING
        scene.tick(dt=7200.0)  # long past its deadline, but healthy there
        scene.tick()
        assert scene.phase(Operation.MOVE) is P.DONE
