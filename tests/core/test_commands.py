"""What people ask for: cancel, release, pause, resume, reset."""

from dataclasses import replace

import pytest

from sentinel.core.domain import (
    Breaker,
    CommandKind,
    MigrationPhase,
    Operation,
    OutcomeKind,
    OutcomeSource,
    SubjectKind,
)
from tests.core.scene import Scene, failed, moved, uuid

P, K = MigrationPhase, OutcomeKind
FENCE, MOVE, UNFENCE = Operation.FENCE, Operation.MOVE, Operation.UNFENCE


@pytest.fixture
def scene():
    """A job of four GPUs on node-0, and a node of spares."""
    scene = Scene()
    scene.runs([0])
    return scene


class TestCommands:
    def test_cancel_before_it_leaves_and_it_is_not_planned_again(self, scene):
        scene.post = False
        failed(scene)
        operation = scene.last(FENCE).operation_id
        scene.tick(commands=[scene.command(CommandKind.CANCEL, operation)])
        assert scene.phase(FENCE) is P.CANCELLED
        scene.post = True
        scene.ticks(10)
        assert scene.posts == []
        assert scene.blocked() == "cancelled"
        assert "ada" in scene.incident().hold_reason

    def test_cancel_after_it_left_is_too_late_and_says_so(self, scene):
        failed(scene)
        scene.tick(commands=[scene.command(CommandKind.CANCEL, scene.posts[-1])])
        assert scene.phase(FENCE) is P.SENT
        assert any("too late" in t.reason for t in scene.transitions)

    def test_release_gives_back_only_what_we_fenced(self, scene):
        moved(scene)
        scene.bad.clear()
        scene.tick(commands=[scene.command(CommandKind.RELEASE, uuid(0))])
        assert scene.incidents() == []
        unfence = scene.last(UNFENCE)
        assert (unfence.node, unfence.phase) == ("node-0", P.SENT)
        assert "node-0" in scene.control.quarantine  # until it is really given back
        scene.tick(scene.finishes(unfence.operation_id))
        assert scene.control.quarantine == {}
        # never fenced by us, so nothing to undo
        failed(scene, 1)
        scene.bad.clear()
        scene.tick(scene.says(scene.posts[-1], K.REFUSED), commands=[])
        scene.tick(scene.says(scene.posts[-1], K.REFUSED), commands=[])
        count = len(scene.posts)
        scene.tick(commands=[scene.command(CommandKind.RELEASE, "node-1")])
        scene.tick()
        assert len(scene.posts) == count
        assert scene.incidents() == []

    def test_release_works_while_the_breaker_is_open_and_waits_while_paused(self, scene):
        moved(scene)
        scene.bad.clear()
        scene.control = replace(scene.control, breaker=Breaker(True, "test", scene.now))
        pause = scene.command(CommandKind.PAUSE)
        scene.tick(commands=[pause, scene.command(CommandKind.RELEASE, "node-0")])
        scene.ticks(100)  # past any deadline
        assert scene.phase(UNFENCE) is P.PLANNED
        assert "paused" in scene.last(UNFENCE).reason
        scene.tick(commands=[scene.command(CommandKind.RESUME)])
        assert scene.phase(UNFENCE) is P.SENT

    def test_release_waits_for_what_is_under_way(self, scene):
        failed(scene)
        scene.bad.clear()
        scene.tick(commands=[scene.command(CommandKind.RELEASE, "node-0")])
        assert scene.incident().released_by == "ada"
        assert scene.blocked() == ""
        scene.tick(scene.finishes(scene.posts[-1]))
        assert scene.incidents() == []
        assert scene.phase(UNFENCE) is P.SENT
        assert scene.last(MOVE) is None

    def test_a_node_with_another_bad_gpu_stays_fenced(self, scene):
        scene.breaks(0, 0)
        scene.breaks(0, 1)
        scene.tick()
        scene.tick(scene.finishes(scene.posts[-1]))
        scene.tick(scene.says(scene.posts[-1], K.REFUSED))
        del scene.bad[uuid(0, 1)]
        scene.tick(commands=[scene.command(CommandKind.RELEASE, uuid(0, 1))])
        scene.tick()
        assert scene.last(UNFENCE) is None
        assert "node-0" in scene.control.quarantine

    def test_release_of_a_stuck_move_frees_its_targets(self, scene):
        failed(scene)
        scene.tick(scene.finishes(scene.posts[-1]))
        scene.ticks(70)
        (page,) = [i for i in scene.incidents() if i.subject.kind is SubjectKind.NODE]
        scene.tick(commands=[scene.command(CommandKind.RELEASE, page.id)])
        assert set(scene.control.quarantine) == {"node-0"}

    def test_an_unfence_that_is_refused_pages_and_may_be_asked_for_again(self, scene):
        moved(scene)
        scene.bad.clear()
        scene.tick(commands=[scene.command(CommandKind.RELEASE, "node-0")])
        scene.tick(scene.says(scene.posts[-1], K.REFUSED, OutcomeSource.POST))
        assert scene.incident().pattern == "unfence refused"
        scene.tick(commands=[scene.command(CommandKind.RELEASE, "node-0")])
        assert scene.last(UNFENCE).attempt == 2
        scene.tick(scene.finishes(scene.posts[-1]))
        assert scene.control.quarantine == {}

    @pytest.mark.parametrize("kind", [CommandKind.RELEASE, CommandKind.CANCEL])
    def test_a_command_for_nothing_is_answered_in_the_journal(self, scene, kind):
        scene.tick(commands=[scene.command(kind, "nowhere")])
        assert scene.transitions[-1].id == "nowhere"

    def test_nothing_is_fenced_again_after_release_without_new_evidence(self, scene):
        moved(scene)
        scene.bad.clear()
        scene.tick(commands=[scene.command(CommandKind.RELEASE, "node-0")])
        scene.tick(scene.finishes(scene.posts[-1]))
        posts = list(scene.posts)
        scene.ticks(200)
        assert scene.posts == posts
