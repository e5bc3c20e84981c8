"""Everything that forbids an act: each guard, its code, and the order."""

from dataclasses import replace

import pytest

from sentinel.core.domain import (
    Breaker,
    Choice,
    CommandKind,
    Control,
    IncidentPhase,
    Kind,
    MigrationPhase,
    Mode,
    Operation,
    OutcomeKind,
    Quarantine,
    Workload,
)
from sentinel.core.policy import Limits
from sentinel.core.scheduler import Job, Node, View
from tests.core.scene import JOB, ROOMY, Scene, failed, moved, uuid

P, K = MigrationPhase, OutcomeKind
FENCE, MOVE, UNFENCE = Operation.FENCE, Operation.MOVE, Operation.UNFENCE


@pytest.fixture
def scene():
    """A job of four GPUs on node-0, and a node of spares."""
    scene = Scene()
    scene.runs([0])
    return scene


class TestHeld:
    """Every guard, by its code, in the order in which they are asked."""

    @pytest.mark.parametrize("mode", [Mode.OBSERVE, Mode.RECOMMEND])
    def test_a_mode_that_watches_says_what_it_would_do(self, mode):
        scene = Scene(mode=mode)
        scene.runs([0])
        failed(scene)
        scene.ticks(5)
        assert [(d.wanted, d.choice, d.blocked_by) for d in scene.decisions] == [
            (Choice.FENCE, Choice.HOLD, "mode"),
            (Choice.MOVE, Choice.HOLD, "mode"),
        ]
        assert scene.control.migrations == {}
        assert "observe" in scene.incident().hold_reason or mode is Mode.RECOMMEND

    def stop(self, scene, how):
        match how:
            case "paused":
                scene.tick(commands=[scene.command(CommandKind.PAUSE)])
            case "breaker":
                scene.control = replace(scene.control, breaker=Breaker(True, "test", scene.now))
            case "coverage":
                scene.silent.update({"node-2", "node-3"})
            case "fleet_hold":
                for n in range(4):
                    scene.breaks(2, n, kind=Kind.DEVIANT)
                    scene.breaks(3, n, kind=Kind.DEVIANT)

    @pytest.mark.parametrize("how", ["paused", "breaker", "coverage", "fleet_hold"])
    def test_nothing_is_fenced_while_everything_is_held(self, scene, how):
        self.stop(scene, how)
        failed(scene)
        assert scene.posts == []
        assert how in {
            d.blocked_by for d in scene.decisions if d.incident_id == scene.incident(0).id
        }
        assert not any(m.phase.is_open for m in scene.control.migrations.values())

    @pytest.mark.parametrize("how", ["paused", "breaker", "coverage", "fleet_hold"])
    def test_nothing_is_moved_while_everything_is_held(self, scene, how):
        failed(scene)
        self.stop(scene, how)
        scene.tick(scene.finishes(scene.posts[-1]))
        assert scene.last(MOVE) is None
        assert scene.incident(0).fenced

    @pytest.mark.parametrize("how", ["paused", "breaker", "coverage", "fleet_hold"])
    def test_a_plan_that_has_not_left_is_cancelled_when_a_guard_objects(self, scene, how):
        scene.post = False
        failed(scene)
        assert scene.phase(FENCE) is P.PLANNED
        self.stop(scene, how)
        scene.tick()
        assert scene.phase(FENCE) is P.CANCELLED
        assert how in scene.last(FENCE).reason

    def test_it_is_planned_anew_once_nothing_forbids_it(self, scene):
        scene.post = False
        failed(scene)
        scene.tick(commands=[scene.command(CommandKind.PAUSE)])
        scene.post = True
        scene.tick(commands=[scene.command(CommandKind.RESUME)])
        assert scene.phase(FENCE) is P.SENT
        assert scene.last(FENCE).attempt == 2

    def test_blind_or_partial_telemetry_acts_on_nothing(self, scene):
        failed(scene, kind=Kind.LOST)
        scene.tick(blind=True)
        assert scene.posts == []
        scene.tick(partial=True)
        assert scene.posts == []
        assert scene.blocked() == "partial"
        scene.tick()
        assert len(scene.posts) == 1

    def test_a_loss_on_a_host_that_went_silent_is_not_acted_on(self, scene):
        scene.post = False
        scene.breaks(0, kind=Kind.LOST)
        scene.ticks(2)
        assert scene.phase(FENCE) is P.PLANNED
        scene.silent.add("node-0")
        scene.tick()
        assert scene.phase(FENCE) is P.CANCELLED
        assert "frozen" in scene.last(FENCE).reason

    def test_a_fault_outlives_its_hosts_silence_for_a_minute(self, scene):
        scene.post = False
        failed(scene)
        scene.silent.add("node-0")
        scene.ticks(4)
        assert scene.phase(FENCE) is P.PLANNED
        scene.tick()
        assert "stale" in scene.last(FENCE).reason

    def test_a_plan_whose_evidence_has_gone_is_cancelled(self, scene):
        scene.post = False
        scene.breaks(0, kind=Kind.LOST)
        scene.ticks(2)
        scene.bad.clear()
        scene.tick()
        assert scene.phase(FENCE) is P.CANCELLED
        assert "recovered" in scene.last(FENCE).reason

    def test_hard_evidence_is_acted_on_though_the_gpu_looks_well(self, scene):
        failed(scene)
        scene.bad.clear()
        scene.tick(scene.finishes(scene.posts[-1]))
        assert scene.incident().phase is IncidentPhase.CLEARING
        assert scene.phase(MOVE) is P.SENT

    def test_fenced_nodes_absolute_and_as_a_share(self):
        limits = replace(ROOMY, fenced_nodes=2)
        scene = Scene(limits=limits)
        for node in range(3):
            failed(scene, node)
        assert len(scene.posts) == 2
        assert scene.blocked() == "fenced_nodes"
        scene = Scene(limits=replace(ROOMY, fenced_percent=1.0))
        failed(scene, 0)
        failed(scene, 1)
        assert len(scene.posts) == 1  # one node of a small fleet may always be fenced
        assert scene.blocked() == "fenced_percent"

    def test_what_is_quarantined_counts_as_fenced(self):
        scene = Scene(limits=replace(ROOMY, fenced_nodes=1))
        scene.control = Control(quarantine={"node-3": Quarantine("node-3", "inc-old", 0.0)})
        failed(scene)
        assert scene.blocked() == "fenced_nodes"

    def test_open_moves(self, scene):
        scene.policy = replace(scene.policy, limits=replace(ROOMY, open_moves=1))
        scene.policy = replace(scene.policy, spare_nodes=frozenset({"node-4", "node-5"}))
        scene.runs([1], Workload("job", "other"))
        scene.breaks(0)
        scene.breaks(1)
        scene.tick()
        scene.tick(*(scene.finishes(op) for op in scene.posts))
        assert scene.blocked() == "open_moves"
        assert [m.operation for m in scene.control.migrations.values()].count(MOVE) == 1

    def test_gpu_hours(self, scene):
        scene.policy = replace(scene.policy, limits=replace(ROOMY, gpu_hours_lost_per_day=3.0))
        failed(scene)
        scene.tick(scene.finishes(scene.posts[-1]))
        assert scene.blocked() == "gpu_hours"
        assert "about 4 GPU-hours" in scene.incident().hold_reason

    def test_capacity_is_for_the_whole_gang(self, scene):
        scene.work[uuid(5)] = Workload("job", "squatter")
        failed(scene)
        scene.tick(scene.finishes(scene.posts[-1]))
        assert scene.blocked() == "no_backup"
        assert "3 spare GPUs are free and fit (1 busy)" in scene.incident().hold_reason
        del scene.work[uuid(5)]
        scene.tick()
        assert scene.phase(MOVE) is P.SENT  # moved as soon as there is room

    def test_a_backup_that_falls_ill_before_the_call_leaves_is_not_used(self, scene):
        failed(scene)
        scene.post = False
        scene.tick(scene.finishes(scene.posts[-1]))
        assert scene.phase(MOVE) is P.PLANNED
        scene.breaks(5, 2, kind=Kind.DEVIANT)
        scene.tick()
        assert scene.phase(MOVE) is P.CANCELLED
        assert scene.blocked() == "no_backup"

    def test_attempts_per_node_within_a_day(self):
        scene = Scene(limits=replace(ROOMY, attempts_per_node=1, cooldown_s=0.0))
        scene.runs([0])
        moved(scene)
        scene.bad.clear()
        scene.tick(commands=[scene.command(CommandKind.RELEASE, "node-0")])
        scene.tick(scene.finishes(scene.posts[-1]))
        assert scene.control.quarantine == {}
        failed(scene)
        assert scene.blocked() == "attempts"

    def test_a_node_just_released_is_not_fenced_in_the_same_breath(self, scene):
        moved(scene)
        scene.bad.clear()
        scene.tick(commands=[scene.command(CommandKind.RELEASE, "node-0")])
        scene.tick(scene.finishes(scene.posts[-1]))
        failed(scene)
        assert scene.blocked() == "cooldown"
        scene.ticks(20)
        assert scene.phase(FENCE) is P.SENT

    def test_a_newer_daemon_has_taken_over(self, scene):
        failed(scene)
        scene.put(replace(scene.last(FENCE), epoch=7))
        scene.runs([1], Workload("job", "other"))
        failed(scene, 1)
        assert scene.blocked() == "epoch"

    def test_everything_forbids_in_the_same_order(self, scene):
        scene.policy = replace(scene.policy, mode=Mode.OBSERVE)
        self.stop(scene, "breaker")
        self.stop(scene, "fleet_hold")
        failed(scene, may_fence=False)
        assert scene.incident(0).answer.startswith("fence:hold:mode")
        scene.policy = replace(scene.policy, mode=Mode.ACT)
        scene.tick()
        assert scene.incident(0).answer == "fence:hold:breaker"
        scene.tick(commands=[scene.command(CommandKind.RESET_BREAKER)])
        assert scene.incident(0).answer == "fence:hold:fleet_hold"
        scene.silent.update({"node-1", "node-4"})
        scene.tick()
        assert scene.incident(0).answer == "fence:hold:coverage"


class TestScheduler:
    """What a scheduler that can be asked must have said before anything is done."""

    @pytest.fixture
    def asked(self):
        scene = Scene(confirm_nodes=True)
        scene.runs([0])
        self.says(scene)
        return scene

    def says(self, scene, closed=(), unknown=(), **job):
        nodes = {
            gpu.node: Node(gpu.node, "drained by an operator" if gpu.node in closed else "")
            for gpu in scene.gpus
            if gpu.node not in unknown
        }
        scene.view = View(scene.now, nodes, (Job(JOB, **job),))

    def test_a_node_that_it_knows_is_acted_on(self, asked):
        failed(asked)
        assert asked.phase(FENCE) is P.SENT

    @pytest.mark.parametrize("unknown", [{"node-0"}, None])
    def test_a_node_that_it_does_not_confirm_is_not(self, asked, unknown):
        if unknown is None:
            asked.view = None
        else:
            self.says(asked, unknown=unknown)
        failed(asked)
        assert asked.blocked() == "unconfirmed"
        assert asked.posts == []

    def test_what_it_said_too_long_ago_is_not_heard(self, asked):
        asked.now += 120.0
        failed(asked)
        assert asked.blocked() == "unconfirmed"

    def test_work_that_it_cannot_move_stays_and_says_why(self, asked):
        self.says(asked, why_not="it was submitted with Requeue=0")
        failed(asked)
        asked.tick(asked.finishes(asked.posts[-1]))
        assert asked.blocked() == "immovable"
        assert "Requeue=0" in asked.incident().hold_reason

    @pytest.mark.parametrize("how", ["closed", "unknown"])
    def test_no_backup_on_a_node_that_takes_no_work(self, asked, how):
        self.says(asked, **{how: {"node-5"}})
        failed(asked)
        asked.tick(asked.finishes(asked.posts[-1]))
        assert asked.blocked() == "no_backup"

    def test_a_backup_that_is_closed_before_the_call_leaves_is_not_used(self, asked):
        failed(asked)
        asked.post = False
        asked.tick(asked.finishes(asked.posts[-1]))
        assert asked.phase(MOVE) is P.PLANNED
        self.says(asked, closed={"node-5"})
        asked.tick()
        assert asked.phase(MOVE) is P.CANCELLED


def test_limits_that_ship_hold_a_small_fleet_to_one_node():
    scene = Scene(limits=Limits())
    failed(scene, 0)
    failed(scene, 1)
    assert len(scene.posts) == 1
