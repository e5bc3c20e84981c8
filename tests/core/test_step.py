"""The main line of a tick: who is fenced, what moves, and that nothing happens twice."""

import time
from dataclasses import replace

import numpy as np
import pytest

from sentinel.core.domain import (
    Choice,
    CommandKind,
    Control,
    IncidentPhase,
    Kind,
    MigrationPhase,
    Operation,
    OutcomeKind,
    OutcomeSource,
    Severity,
    SubjectKind,
    from_plain,
    to_plain,
)
from sentinel.core.step import Inputs, advance, check_invariants, housekeep, resume
from tests.core.scene import JOB, Backup, Scene, failed, moved, uuid

P, K = MigrationPhase, OutcomeKind
FENCE, MOVE, UNFENCE = Operation.FENCE, Operation.MOVE, Operation.UNFENCE


@pytest.fixture
def scene():
    """A job of four GPUs on node-0, and a node of spares."""
    scene = Scene()
    scene.runs([0])
    return scene


class TestMainLine:
    def test_a_fault_fences_at_once_then_moves_then_is_verified(self, scene):
        failed(scene)
        fence = scene.last(FENCE)
        assert (fence.node, fence.gpu_uuids, fence.phase) == ("node-0", (uuid(0),), P.SENT)
        assert scene.last(MOVE) is None
        scene.tick(scene.finishes(fence.operation_id))
        assert scene.control.quarantine["node-0"].operation_id == fence.operation_id
        move = scene.last(MOVE)
        assert (move.workload, move.exclude_nodes) == (JOB, ("node-0",))
        assert move.backups == (Backup("node-5", tuple(uuid(5, n) for n in range(4))),)
        assert move.workload_gpu_uuids == tuple(uuid(0, n) for n in range(4))
        assert move.gpu_hours == 4.0
        scene.carry(move)
        scene.tick(scene.finishes(move.operation_id, move.backups))
        scene.ticks(5)
        assert scene.phase(MOVE) is P.DONE
        assert [(d.wanted, d.allowed) for d in scene.decisions] == [
            (Choice.FENCE, True),
            (Choice.MOVE, True),
        ]
        assert len(scene.posts) == 2
        scene.ticks(500)
        assert len(scene.posts) == 2  # nothing more, ever
        assert "node-0" in scene.control.quarantine  # until a person releases it

    def test_an_application_error_beside_a_fault_is_never_said_to_have_acted(self, scene):
        """The job's other GPU reports its crash: the move takes it along, for the fault's sake."""
        scene.breaks(0, 1, severity=Severity.INFO, latch=False)
        moved(scene)
        assert scene.phase(MOVE) is P.DONE
        assert scene.last(FENCE).gpu_uuids == (uuid(0),)
        beside = scene.incident(0, 1).id
        told = [d for d in scene.decisions if d.incident_id == beside]
        assert told
        assert not any(d.allowed for d in told)

    def test_what_was_planned_survives_being_written_down(self, scene):
        moved(scene)
        assert from_plain(Control, to_plain(scene.control)) == scene.control

    def test_a_page_of_soft_evidence_acts_and_a_ticket_does_not(self, scene):
        failed(scene, kind=Kind.DEVIANT, severity=Severity.WARNING)
        scene.ticks(20)
        assert scene.posts == []
        assert scene.blocked() == "severity"
        assert len(scene.decisions) == 1  # an answer is news once
        failed(scene, kind=Kind.DEVIANT)
        scene.ticks(8)
        assert scene.phase(FENCE) is P.SENT

    def test_idle_hardware_is_fenced_and_nothing_moves(self, scene):
        scene.work.clear()
        failed(scene)
        scene.tick(scene.finishes(scene.posts[-1]))
        assert scene.blocked() == "no_workload"
        assert scene.incident().fenced
        assert not scene.incident().moved

    def test_evidence_that_by_itself_never_acts(self, scene):
        failed(scene, may_fence=False)
        assert scene.blocked() == "evidence"
        scene = Scene()
        scene.runs([0])
        failed(scene, may_move=False)
        scene.tick(scene.finishes(scene.posts[-1]))
        assert scene.blocked() == "evidence"
        assert scene.last(MOVE) is None

    def test_several_gpus_of_one_node_share_one_fence_and_one_move(self, scene):
        scene.breaks(0, 0)
        scene.breaks(0, 1, kind=Kind.LOST)
        scene.ticks(2)
        fences = [m for m in scene.control.migrations.values() if m.operation is FENCE]
        assert len(fences) == 1
        scene.tick(scene.finishes(scene.posts[-1]))
        scene.tick()
        move = scene.last(MOVE)
        scene.carry(move)
        scene.tick(scene.finishes(move.operation_id, move.backups))
        scene.ticks(6)
        assert all(i.moved for i in scene.incidents())
        assert len(scene.posts) == 2

    def test_all_bad_nodes_of_a_workload_join_one_move(self):
        scene = Scene(nodes=8, spares=("node-5", "node-6", "node-7"))
        scene.runs([0, 1, 2])
        scene.breaks(0)
        scene.breaks(1)
        scene.tick()
        first, second = scene.posts
        scene.tick(scene.finishes(first))
        assert scene.blocked() == "not_fenced"  # the other node's fence is waited for
        scene.tick(scene.finishes(second))
        move = scene.last(MOVE)
        assert move.exclude_nodes == ("node-0", "node-1")
        assert sum(len(b.gpu_uuids) for b in move.backups) == 8
        assert len(scene.posts) == 3

    def test_a_lost_gpu_names_its_last_known_work(self, scene):
        scene.breaks(0, kind=Kind.LOST)
        scene.vanished.add(uuid(0))
        scene.ticks(2)
        scene.tick(scene.finishes(scene.posts[-1]))
        assert scene.last(MOVE).workload == JOB

    def test_work_that_its_scheduler_has_restarted_elsewhere_is_left_alone(self, scene):
        scene.work = {uuid(0): JOB}
        scene.breaks(0, kind=Kind.LOST)
        scene.vanished.add(uuid(0))
        scene.ticks(2)
        scene.work[uuid(3)] = JOB
        scene.tick(scene.finishes(scene.posts[-1]))
        assert scene.last(MOVE) is None
        assert scene.blocked() == "no_workload"
        assert "already runs on node-3" in scene.decisions[-1].reason


class TestOnce:
    """At most one started operation per incident and kind, whatever becomes of it."""

    def test_refusal_tries_again_and_no_more_than_allowed(self, scene):
        failed(scene)
        scene.tick(scene.says(scene.posts[-1], K.REFUSED, OutcomeSource.POST))
        assert scene.last(FENCE).attempt == 2
        scene.tick(scene.says(scene.posts[-1], K.REFUSED, OutcomeSource.POST))
        scene.ticks(50)
        assert len(scene.posts) == len(set(scene.posts)) == 2
        assert scene.blocked() == "refused"

    def test_a_scheduler_that_is_away_for_a_while_is_tried_again_and_again_later(self, scene):
        """A proven non-delivery is no refusal: it is tried after 4 ticks, then after 8."""
        failed(scene)
        for tries, wait in ((1, 4), (2, 8)):
            assert len(scene.posts) == tries
            away = scene.says(scene.posts[-1], K.REFUSED, OutcomeSource.POST)
            scene.tick(replace(away, reason="not delivered: connection refused"))
            assert scene.blocked() == "not_delivered"
            scene.ticks(wait - 1)
            assert len(scene.posts) == tries
            scene.tick()
        assert len(scene.posts) == len(set(scene.posts)) == 3
        scene.tick(scene.finishes(scene.posts[-1]))
        assert scene.control.quarantine["node-0"].fenced

    def test_a_refused_move_takes_the_next_backup(self, scene):
        scene.policy = replace(scene.policy, spare_nodes=frozenset({"node-4", "node-5"}))
        failed(scene)
        scene.tick(scene.finishes(scene.posts[-1]))
        assert [b.node for b in scene.last(MOVE).backups] == ["node-4"]
        scene.tick(scene.says(scene.posts[-1], K.REFUSED, OutcomeSource.POST))
        assert [b.node for b in scene.last(MOVE).backups] == ["node-5"]

    @pytest.mark.parametrize("end", [K.FAILED, K.UNKNOWN])
    @pytest.mark.parametrize("operation", [FENCE, MOVE])
    def test_a_failure_or_a_riddle_is_never_tried_again(self, scene, operation, end):
        failed(scene)
        if operation is MOVE:
            scene.tick(scene.finishes(scene.posts[-1]))
        scene.tick(scene.says(scene.posts[-1], end, OutcomeSource.POST))
        posts = list(scene.posts)
        scene.ticks(100)
        assert scene.posts == posts
        assert scene.phase(operation) is (P.FAILED if end is K.FAILED else P.STUCK)
        pages = [i for i in scene.incidents() if i.subject.kind is SubjectKind.NODE]
        assert [(i.severity, i.node) for i in pages] == [(Severity.CRITICAL, "node-0")]
        assert scene.blocked() == ("failed" if end is K.FAILED else "stuck")

    def test_a_stuck_move_keeps_both_sides_out_of_use(self, scene):
        failed(scene)
        scene.tick(scene.finishes(scene.posts[-1]))
        scene.ticks(70)
        assert scene.phase(MOVE) is P.STUCK
        assert set(scene.control.quarantine) == {"node-0", "node-5"}

    def test_silence_is_asked_about_and_a_404_lets_the_same_call_leave_again(self, scene):
        failed(scene)
        operation = scene.posts[-1]
        scene.ticks(4)
        assert scene.phase(FENCE) is P.UNKNOWN
        assert scene.queries == [operation]
        scene.tick()
        assert scene.queries == [operation]  # every poll_s
        scene.tick(scene.says(operation, K.NOT_FOUND, OutcomeSource.GET))
        assert scene.posts == [operation, operation]
        assert scene.phase(FENCE) is P.SENT

    def test_after_a_404_the_guards_are_asked_again(self, scene):
        failed(scene)
        scene.ticks(5)
        pause = scene.command(CommandKind.PAUSE)
        answer = scene.says(scene.posts[-1], K.NOT_FOUND, OutcomeSource.GET)
        scene.tick(answer, commands=[pause])
        assert scene.phase(FENCE) is P.CANCELLED
        assert len(scene.posts) == 1

    @pytest.mark.parametrize("phase", [P.PLANNED, P.SENT, P.RUNNING, P.UNKNOWN])
    def test_a_restart_asks_before_anything_else(self, scene, phase):
        scene.post = phase is not P.PLANNED
        failed(scene)
        operation = scene.last(FENCE).operation_id
        if phase is P.RUNNING:
            scene.tick(scene.says(operation, K.RUNNING))
        if phase is P.UNKNOWN:
            scene.tick(scene.says(operation, K.UNKNOWN, OutcomeSource.POST))
        assert scene.phase(FENCE) is phase
        scene.restart()
        scene.post, posts = True, list(scene.posts)
        scene.tick()
        assert scene.phase(FENCE) is P.UNKNOWN
        assert scene.queries == [operation]
        assert scene.posts == posts
        scene.tick(scene.says(operation, K.NOT_FOUND, OutcomeSource.GET))
        sent_again = [] if phase is P.RUNNING else [operation]  # it once said that it had it
        assert scene.posts == posts + sent_again

    def test_lost_callbacks_are_made_up_for_by_asking(self, scene):
        failed(scene)
        scene.tick(scene.says(scene.posts[-1], K.ACCEPTED, OutcomeSource.POST))
        assert scene.phase(FENCE) is P.RUNNING
        scene.tick()
        assert scene.queries == scene.posts

    def test_outcomes_of_nobody_are_noted_and_ignored(self, scene):
        before = scene.tick().control
        scene.tick(scene.finishes("op-unheard-of"))
        assert scene.control.migrations == before.migrations
        assert "nothing of this id is known" in scene.transitions[-1].reason

    def test_a_scheduler_that_runs_what_was_cancelled_needs_a_person(self, scene):
        failed(scene)
        scene.ticks(5)
        answer = scene.says(scene.posts[-1], K.NOT_FOUND, OutcomeSource.GET)
        scene.tick(answer, commands=[scene.command(CommandKind.PAUSE)])
        scene.tick(scene.finishes(scene.posts[-1]))
        assert scene.phase(FENCE) is P.CANCELLED
        assert any(i.subject.kind is SubjectKind.NODE and i.fires for i in scene.incidents())

    def test_an_open_migration_keeps_its_incident_open(self, scene):
        failed(scene, latch=False)
        scene.tick(scene.says(scene.posts[-1], K.RUNNING))
        scene.bad.clear()
        scene.ticks(45)
        assert scene.phase(FENCE) is P.RUNNING
        assert scene.incident(0).phase is IncidentPhase.CLEARING
        scene.tick(scene.finishes(scene.posts[-1]))
        scene.tick()
        assert scene.incidents() == []


class TestRepair:
    """An incident whose work was taken away: the GPU idles, and looks well because it does."""

    @pytest.mark.parametrize("kind", [Kind.DEVIANT, Kind.FAULT])
    def test_it_stays_open_until_the_gpu_was_reset(self, scene, kind):
        failed(scene, kind=kind)
        scene.ticks(20)
        scene.tick(scene.finishes(scene.posts[-1]))
        move = scene.last(MOVE)
        scene.carry(move)
        scene.tick(scene.finishes(move.operation_id, move.backups))
        scene.bad.clear()
        scene.ticks(1000)
        assert scene.incident(0).phase is IncidentPhase.CLEARING
        assert scene.incident(0).severity is Severity.WARNING
        scene.tick(resets={uuid(0)})
        scene.ticks(25)
        assert scene.incidents() == []
        assert "node-0" in scene.control.quarantine  # until a person releases it

    @pytest.mark.parametrize("looks", ["still deviant", "unknown"])
    def test_a_reset_counts_whatever_the_gpu_looks_like_then(self, scene, looks):
        failed(scene, kind=Kind.DEVIANT)
        scene.ticks(20)
        scene.tick(scene.finishes(scene.posts[-1]))
        move = scene.last(MOVE)
        scene.carry(move)
        scene.tick(scene.finishes(move.operation_id, move.backups))
        if looks == "unknown":
            scene.silent.add("node-0")
        scene.tick(resets={uuid(0)})
        scene.silent.clear()
        scene.bad.clear()
        scene.ticks(30)
        assert scene.incidents() == []

    def test_a_release_ends_it_too(self, scene):
        moved(scene)
        scene.bad.clear()
        scene.ticks(200)
        assert scene.incidents()
        scene.tick(commands=[scene.command(CommandKind.RELEASE, "node-0")])
        scene.tick(scene.finishes(scene.posts[-1]))
        assert scene.incidents() == []

    def test_a_lost_gpu_that_is_back_is_repaired(self, scene):
        failed(scene, kind=Kind.LOST)
        scene.ticks(2)
        scene.tick(scene.finishes(scene.posts[-1]))
        move = scene.last(MOVE)
        scene.carry(move)
        scene.tick(scene.finishes(move.operation_id, move.backups))
        scene.bad.clear()
        scene.ticks(30)
        assert scene.incidents() == []


class TestHousekeeping:
    def test_what_is_over_goes_and_what_still_counts_stays(self, scene):
        moved(scene)
        scene.bad.clear()
        scene.tick(resets={uuid(0)})
        scene.ticks(25)
        assert scene.incidents() == []
        later = housekeep(scene.control, scene.now + 26 * 3600)
        assert set(later.migrations) == {scene.control.quarantine["node-0"].operation_id} | {
            scene.last(MOVE).operation_id
        }
        assert len(later.incidents) == 1  # release will need it
        released = replace(scene.control, quarantine={})
        assert housekeep(released, scene.now + 3300).incidents
        assert housekeep(released, scene.now + 3700).incidents == {}
        assert len(housekeep(released, scene.now + 24 * 3600).migrations) == 2
        assert housekeep(released, scene.now + 26 * 3600).migrations == {}

    def test_what_an_open_incident_has_tried_is_never_forgotten(self, scene):
        failed(scene)
        scene.tick(scene.says(scene.posts[-1], K.FAILED))
        scene.control = housekeep(scene.control, scene.now + 100 * 3600)
        scene.tick(dt=100 * 3600.0)
        scene.ticks(5)
        assert len(scene.posts) == 1

    def test_suspicions_that_came_to_nothing_go_at_once(self, scene):
        scene.breaks(0, kind=Kind.LOST)
        scene.tick()
        scene.bad.clear()
        scene.tick()
        assert housekeep(scene.control, scene.now).incidents == {}


def test_a_state_that_breaks_a_rule_stops_the_tick(scene):
    failed(scene)
    twin = replace(scene.last(FENCE), operation_id="op-twin")
    scene.put(twin)
    assert any(
        "started operations" in text for text in check_invariants(scene.control, scene.policy)
    )
    with pytest.raises(AssertionError, match="node node-0 is in 2 at once"):
        scene.tick()


def test_resume_of_nothing_changes_nothing():
    assert resume(Control(), 0.0) == (Control(), ())


def test_a_quiet_tick_of_ten_thousand_gpus_costs_next_to_nothing():
    scene = Scene(nodes=1250, per_node=8)
    scene.runs(range(1000))
    frame = scene.frame()
    judgement = scene.judge(frame)
    inputs = Inputs(frame, policy=scene.policy)
    spent = []
    for _ in range(5):
        began = time.perf_counter()
        advance(Control(), judgement, inputs, scene.now)
        spent.append(time.perf_counter() - began)
    assert min(spent) < 0.003
    assert np.count_nonzero(judgement.kinds) == 0


def test_of_very_large_work_only_what_is_seen_to_run_here_is_moved():
    scene = Scene(nodes=80, per_node=2, spares=("node-79",))
    scene.runs(range(70))
    scene.breaks(0, kind=Kind.LOST)
    scene.vanished.add(uuid(0))
    scene.ticks(2)
    assert scene.incident().workload_nodes == ()
    for index in range(2):
        del scene.work[uuid(0, index)]
    scene.tick(scene.finishes(scene.posts[-1]))
    assert scene.blocked() == "no_workload"
    scene.work[uuid(0, 1)] = JOB
    scene.tick()
    assert scene.phase(MOVE) is P.SENT
