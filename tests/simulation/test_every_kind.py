"""Every fault and every harmless surprise of the lab, over two small fleets with physics, labels
and scrapes of their own. `python -m tests.bench.detection` measures the same at full length.
"""

import pytest

from sentinel.lab import faults
from tests.simulation.judging import figures, judge
from tests.simulation.replay import every_kind, replayed

pytestmark = pytest.mark.slow

SEEDS = (4, 7)
HOURS = 3600.0
JUDGED_H = {4: 7, 7: 9}  # so long that everything finds its place


def kinds_of(seed):
    """Every other kind, so that all appear over the two seeds."""
    return every_kind()[SEEDS.index(seed) :: len(SEEDS)]


def again(seed, what):
    kinds = ",".join(kinds_of(seed))
    return (
        f"{what}; again: python -m tests.bench.detection --no-smd --no-simple --seeds {seed} "
        f"--learn-hours 4 --hours {JUDGED_H[seed]} --kinds {kinds}"
    )


def test_all_kinds_appear():
    assert {kind for seed in SEEDS for kind in kinds_of(seed)} == set(faults.KINDS)


@pytest.mark.parametrize("seed", SEEDS, ids=lambda s: f"seed{s}")
def test_faults_are_found_and_surprises_move_nothing(tmp_path, seed):
    judged_s = JUDGED_H[seed] * HOURS
    done = replayed(tmp_path, seed, kinds_of(seed), learn_s=4 * HOURS, replay_s=judged_s)
    told = figures([done])
    missed = [e["kind"] for e in done["events"] if e["kind"] in faults.HARD and not e["found"]]
    assert not missed, again(seed, f"missed: {missed}")
    assert told["recall_soft"] >= 0.85, again(seed, told)
    assert told["precision"] >= 0.9, again(seed, told)
    assert not done["wrong_moves"], again(seed, done["wrong_moves"])
    assert not told["false_pages"], again(seed, told)
    assert not done["unplayed"], again(seed, done["unplayed"])


def report_of(*rows):
    return {
        "incidents": [row for row in rows if row["severity"] != "info"],
        "written_down": [row for row in rows if row["severity"] == "info"],
        "coverage": {"gpu_days": 1.0, "blind_gpu_days": 0.0},
    }


def incident(minute, uuid="a", host="n0", subject="gpu", id_=None, **more):
    return {
        "id": f"{uuid}{minute}",
        "subject": {"kind": subject, "id": id_ or uuid},
        "gpu_uuid": uuid if subject == "gpu" else None,
        "host": host,
        "confirmed_at": f"2026-09-21T10:{minute:02d}:00Z",
        "resolved_at": None,
        "severity": "warning",
        "kind": "deviant",
        "pattern": "novel",
        "score": 1.0,
        "would_migrate": False,
        "evidence": [],
        **more,
    }


T0_S = 1789984800.0  # 10:00


def truth(kind, minute=10, to=40, uuids=("a",), nodes=("n0",), job="j", mates=("b",)):
    return {
        "kind": kind,
        "at_s": T0_S + 60 * minute,
        "end_s": T0_S + 60 * to,
        "uuids": list(uuids),
        "nodes": list(nodes),
        "job": job,
        "mates": list(mates),
        "rack": "r00",
        "model": "m",
    }


@pytest.mark.parametrize(
    ("row", "event", "verdict"),
    [
        (incident(12), truth("thermal"), "true"),
        (incident(9), truth("thermal"), "false"),  # before it began
        (incident(54), truth("thermal"), "true"),  # within the grace
        (incident(56), truth("thermal"), "false"),
        (incident(12, "b"), truth("slow-10"), "false"),  # a mate of the culprit
        (incident(12, subject="job", id_="j"), truth("slow-10"), "true"),
        (incident(12, subject="job", id_="j"), truth("thermal"), "told"),  # it is slower for that
        (incident(12, subject="host", id_="n0"), truth("psu", uuids=("a", "b")), "true"),
        (incident(12, "b"), truth("psu", uuids=("a", "b")), "true"),
        (incident(12, subject="host", id_="n0"), truth("thermal"), "false"),
        (incident(12, subject="fleet", id_="gpu"), truth("power-cap"), "told"),
        (
            incident(12, subject="fleet", id_="gpu", severity="critical"),
            truth("power-cap"),
            "false",
        ),
        (incident(12), truth("new-workload"), "false"),
        (incident(12), truth("xid-13"), "false"),
    ],
)
def test_an_alert_is_judged_by_its_time_and_its_subject(row, event, verdict):
    done = judge(report_of(row), [event])
    assert [a["verdict"] for a in done["alerts"]] == [verdict]


def test_what_acts_without_a_fault_of_the_hardware_is_a_wrong_move():
    moves = incident(12, would_migrate=True, severity="critical")
    for kind, wrong in (("thermal", 0), ("xid-13", 1), ("locked-clocks", 1), ("memory-full", 1)):
        assert len(judge(report_of(moves), [truth(kind)])["wrong_moves"]) == wrong, kind
    quiet = incident(12, would_migrate=True, severity="info")
    assert len(judge(report_of(quiet), [truth("xid-13")])["wrong_moves"]) == 1


def test_figures_count_events_once_and_leave_the_hidden_out():
    rows = [incident(12), incident(14), incident(30, "z", "n9"), incident(2, "h", "n5")]
    events = [truth("thermal"), truth("clock", uuids=("h",), nodes=("n5",), mates=())]
    told = figures([judge(report_of(*rows), events)])
    assert (told["events"], told["hidden"]) == (1, 1)
    assert told["recall_soft"] == 1.0
    assert told["precision"] == pytest.approx(1 / 3)  # z, and h before its fault
    assert told["delay_soft_s"] == 120.0
