"""What people are told: labels that identify, words that explain, and a clean end."""

from dataclasses import replace
from importlib import resources

import pytest

from sentinel.core.alert import project
from sentinel.core.domain import (
    CommandKind,
    Evidence,
    Kind,
    Mode,
    Operation,
    OutcomeKind,
    OutcomeSource,
    Severity,
    Workload,
)
from tests.core.scene import JOB, Scene, uuid

ALERTS = {
    "SentinelGpuFault",
    "SentinelGpuDegraded",
    "SentinelGpuLost",
    "SentinelNodeFault",
    "SentinelJobSuspect",
    "SentinelFleetEvent",
    "SentinelBlind",
    "SentinelMoveStuck",
}
HOT = Evidence("density", "temp_c", "GPU temperature 86 °C, +14 °C from the 72 °C normal", 86, 72)


@pytest.fixture
def scene():
    scene = Scene()
    scene.runs([0])
    return scene


@pytest.fixture
def watched():
    """The same, where nothing is done about it."""
    return Scene(mode=Mode.OBSERVE)


def told(scene, **kw):
    return project(scene.control, scene.policy, scene.now, **kw)


def firing(scene, **kw):
    return [a for a in told(scene, **kw) if not a.resolved]


def name_of(alert):
    return alert.labels["alertname"], alert.labels["severity"]


def test_suspicions_and_a_healthy_fleet_say_nothing(scene):
    scene.tick()
    assert told(scene) == ()
    scene.breaks(0, kind=Kind.LOST)
    scene.tick()
    assert told(scene) == ()
    scene.bad.clear()
    scene.ticks(2)
    assert told(scene) == ()


def test_labels_are_exactly_these_and_hold_no_number_that_moves(scene):
    scene.breaks(0)
    scene.tick()
    (alert,) = told(scene)
    assert alert.labels == {
        "alertname": "SentinelGpuFault",
        "severity": "critical",
        "cluster": "default",
        "node": "node-0",
        "gpu_uuid": uuid(0),
    }
    assert alert.starts_at_s == scene.now
    assert alert.ends_at_s == scene.now + 300.0


def test_slow_ticks_keep_an_alert_alive_for_four_of_them(scene):
    scene.policy = replace(scene.policy, times=replace(scene.policy.times, tick_s=120.0))
    scene.breaks(0)
    scene.tick(dt=120.0)
    (alert,) = told(scene)
    assert alert.ends_at_s == scene.now + 480.0


def test_a_tired_person_learns_what_where_why_and_what_was_done(scene):
    scene.breaks(0, 2, kind=Kind.DEVIANT, evidence=(HOT,), score=1.75)
    scene.ticks(9)
    scene.tick(scene.finishes(scene.posts[-1]))
    (alert,) = told(scene, external_url="https://sentinel.example/")
    texts = alert.annotations
    assert texts["summary"] == (
        "GPU 2 of node-0 (H100): overheating: GPU temperature 86 °C, +14 °C from the 72 °C normal; "
        "the node is fenced"
    )
    for words in (
        "Seen: GPU temperature 86 °C, +14 °C from the 72 °C normal",
        "Since 13:46:55 UTC (2 min); compared with what is normal for its model",
        "pattern: overheating, 1.75 times as far as the edge of normal",
        "fence of node-0 done, move of 4711 sent",
        "Work: job 4711",
        "Action: fence node-0: done",
        "Action: move 4711 off node-0 to node-5 (4 GPUs): sent",
        "sentinel release node-0",
    ):
        assert words in texts["description"]
    assert (texts["score"], texts["pattern"]) == ("1.75", "overheating")
    assert texts["workload"] == "4711"
    assert texts["incident_id"] == scene.incident().id
    assert texts["dashboard_url"] == f"https://sentinel.example/?incident={scene.incident().id}"
    assert texts["runbook_url"] == "https://sentinel.example/runbooks#sentinelgpudegraded"
    assert all(texts.values())


@pytest.mark.parametrize("name", sorted(ALERTS))
def test_every_alert_has_a_runbook(name):
    page = resources.files("sentinel.web").joinpath("static/runbooks.html").read_text()
    assert f'id="{name.lower()}"' in page


def test_why_nothing_was_done_is_said_too():
    scene = Scene(mode=Mode.OBSERVE)
    scene.runs([0], Workload("pod", "train-0", "team-a"))
    scene.breaks(0)
    scene.tick()
    (alert,) = told(scene)
    assert "Not done: the mode is observe" in alert.annotations["description"]
    assert "Work: pod train-0 of team-a" in alert.annotations["description"]
    assert alert.annotations["pod"] == "train-0"
    assert "dashboard_url" not in alert.annotations


def test_it_is_told_as_over_for_a_quarter_of_an_hour_and_then_no_more(watched):
    watched.breaks(0, kind=Kind.LOST)
    watched.ticks(2)
    start_s = watched.now
    watched.bad.clear()
    watched.ticks(20)
    assert [a.resolved for a in told(watched)] == [False]  # clearing still fires
    watched.tick()
    over_s = watched.now
    (alert,) = told(watched)
    assert (alert.resolved, alert.starts_at_s, alert.ends_at_s) == (True, start_s, over_s)
    watched.ticks(60)
    assert len(told(watched)) == 1
    watched.tick()
    assert told(watched) == ()


def test_blindness_never_resolves_an_alert(watched):
    watched.breaks(0)
    watched.tick()
    watched.ticks(500, blind=True)
    names = [name_of(a) for a in firing(watched)]
    assert sorted(names) == [("SentinelBlind", "critical"), ("SentinelGpuFault", "critical")]
    assert all(a.ends_at_s > watched.now for a in told(watched))


def test_when_the_labels_change_the_former_alert_is_resolved(watched):
    watched.breaks(0, kind=Kind.DEVIANT, severity=Severity.WARNING)
    watched.ticks(9)
    start_s = watched.now
    assert [name_of(a) for a in firing(watched)] == [("SentinelGpuDegraded", "warning")]
    watched.breaks(0)
    watched.tick()
    now = {name_of(a): a for a in told(watched)}
    former, current = now["SentinelGpuDegraded", "warning"], now["SentinelGpuFault", "critical"]
    assert (former.resolved, former.starts_at_s, former.ends_at_s) == (True, start_s, watched.now)
    assert (current.resolved, current.starts_at_s) == (False, watched.now)
    watched.ticks(61)
    assert [name_of(a) for a in told(watched)] == [("SentinelGpuFault", "critical")]


def test_moved_work_turns_the_page_into_a_ticket(scene):
    scene.breaks(0)
    scene.fence()
    move = scene.last(Operation.MOVE)
    scene.carry(move)
    scene.tick(scene.finishes(move.operation_id, move.backups))
    scene.ticks(5)
    (page,) = [a for a in told(scene) if a.resolved]
    (ticket,) = firing(scene)
    assert name_of(page) == ("SentinelGpuFault", "critical")
    assert name_of(ticket) == ("SentinelGpuFault", "warning")
    assert ticket.annotations["summary"].endswith("its work has moved, the node is fenced")


def test_a_former_identity_that_returns_fires_and_is_not_resolved_beside_itself(watched):
    watched.breaks(0, kind=Kind.LOST)
    watched.ticks(2)
    watched.bad.clear()
    watched.ticks(22)
    assert [a.resolved for a in told(watched)] == [True]
    watched.breaks(0, kind=Kind.LOST)
    watched.ticks(2)
    (alert,) = told(watched)  # the same labels: one alert, and it fires
    assert not alert.resolved


def test_info_is_written_down_and_never_told(scene):
    harmless = {"may_fence": False, "may_move": False, "latch": False}
    scene.breaks(0, severity=Severity.INFO, **harmless)
    scene.ticks(3)
    assert scene.incident().fires
    assert told(scene) == ()
    scene.breaks(0)
    scene.tick()
    assert [name_of(a) for a in told(scene)] == [("SentinelGpuFault", "critical")]


def test_a_stuck_move_pages_with_its_node_and_what_to_do(scene):
    scene.breaks(0)
    scene.fence()
    scene.tick(scene.says(scene.posts[-1], OutcomeKind.UNKNOWN, OutcomeSource.POST))
    scene.ticks(70)
    (page,) = [a for a in firing(scene) if a.labels["alertname"] == "SentinelMoveStuck"]
    assert page.labels == {
        "alertname": "SentinelMoveStuck",
        "severity": "critical",
        "cluster": "default",
        "node": "node-0",
    }
    assert "sentinel release node-0" in page.annotations["description"]
    assert scene.posts[-1] in page.annotations["summary"]
    scene.tick(commands=[scene.command(CommandKind.RELEASE, "node-0")])
    now = {name_of(a): a.resolved for a in told(scene)}
    assert now["SentinelMoveStuck", "critical"]


def test_fleet_alerts_carry_the_cluster_alone_and_say_how_to_go_on(scene):
    for n in range(6):
        scene.breaks(n % 3, n // 3)
    scene.tick()
    (alert,) = [a for a in firing(scene) if a.labels["alertname"] == "SentinelFleetEvent"]
    assert set(alert.labels) == {"alertname", "severity", "cluster"}
    assert "sentinel reset-breaker" in alert.annotations["description"]
    assert "node-0, node-1, node-2" in alert.annotations["summary"]
    assert JOB.id not in alert.annotations["summary"]


def test_no_alert_ends_before_it_starts_even_when_the_clock_steps_back(scene):
    scene.breaks(0)
    scene.tick()
    scene.bad.clear()
    scene.tick(dt=-7200.0, commands=[scene.command(CommandKind.CANCEL, scene.posts[0])])
    for alert in told(scene):
        assert alert.ends_at_s > alert.starts_at_s or not alert.resolved
