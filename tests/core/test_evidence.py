"""Hard evidence: edges are news once, levels stand, applications are not hardware."""

import numpy as np
import pytest

from sentinel.core.domain import Coverage, Frame, Gpu, Kind, Presence, Severity, Workload, XidEvent
from sentinel.core.evidence import HardWatch
from sentinel.data import load_catalog

METRICS = ("xid", "ecc_dbe_volatile", "ecc_dbe_aggregate", "remap_failure", "remap_pending")
METRICS += ("recovery_action", "energy_j", "ecc_sbe_volatile", "ecc_sbe_aggregate")
CATALOG = load_catalog()
GPUS = tuple(Gpu(f"GPU-{i}", f"node-{i // 2}", i % 2, "H100") for i in range(6))


def frame(at_s=0.0, gpus=GPUS, xids=(), presence=None, workloads=None, **columns):
    values = np.zeros((len(gpus), len(METRICS)))
    for name, by_row in columns.items():
        for row, value in by_row.items():
            values[row, METRICS.index(name)] = value
    return Frame(
        at_s=at_s,
        gpus=gpus,
        metrics=METRICS,
        values=values,
        age_s=np.zeros_like(values),
        presence=np.zeros(len(gpus), np.int8) if presence is None else presence,
        workloads=workloads or (None,) * len(gpus),
        coverage=Coverage(len(gpus), len(gpus)),
        xids=tuple(XidEvent(row, code, at_s) for row, code in xids),
        last_seen_s=np.full(len(gpus), at_s),
    )


def seen(*frames):
    """Findings of the last frame after the others."""
    watch = HardWatch()
    for one in frames[:-1]:
        watch.look(one, CATALOG)
    return watch.look(frames[-1], CATALOG)


def test_a_fatal_xid_faults_its_gpu_and_latches():
    ((finding,), _) = seen(frame(), frame(15.0, xids=[(3, 79)]))
    assert (finding.row, finding.kind, finding.severity) == (3, Kind.FAULT, Severity.CRITICAL)
    assert finding.fence
    assert finding.move
    assert finding.latch
    assert "79" in finding.evidence.text
    assert "node-1" in finding.evidence.text


@pytest.mark.parametrize("code", [13, 31, 43, 45, 8, 66, 69, 94, 109999])
def test_an_application_or_unknown_xid_never_acts(code):
    ((finding,), _) = seen(frame(), frame(15.0, xids=[(3, code)]))
    assert not finding.fence
    assert not finding.move
    assert not finding.latch
    assert finding.severity is not Severity.CRITICAL


@pytest.mark.parametrize(("code", "says"), [(119, "moved by itself"), (43, "the job's event")])
def test_one_code_over_many_gpus_of_one_job_never_acts(code, says):
    job = (Workload("job", "42"),) * 6
    findings, _ = seen(frame(), frame(15.0, xids=[(i, code) for i in range(6)], workloads=job))
    assert len(findings) == 6
    assert not any(f.fence or f.move for f in findings)
    assert "job 42" in findings[0].evidence.text
    assert says in findings[0].evidence.text
    assert (findings[0].severity is Severity.CRITICAL) is (code == 119)  # it still pages


def test_a_burst_is_never_made_worse_than_its_code():
    job = (Workload("job", "42"),) * 6
    findings, _ = seen(frame(), frame(15.0, xids=[(i, 45) for i in range(6)], workloads=job))
    assert {f.severity for f in findings} == {Severity.INFO}


def test_the_same_code_on_one_node_is_that_nodes_hardware():
    job = (Workload("job", "42"),) * 6
    findings, _ = seen(frame(), frame(15.0, xids=[(0, 119), (1, 119)], workloads=job))
    assert all(f.fence for f in findings)


def test_uncorrectable_ecc_is_news_when_it_grows():
    first, second = frame(ecc_dbe_volatile={2: 4}), frame(15.0, ecc_dbe_volatile={2: 6})
    assert seen(first) == ([], frozenset())  # high at first sight is history
    ((finding,), _) = seen(first, second)
    assert finding.row == 2
    assert "from 4 to 6" in finding.evidence.text
    assert seen(first, second, second)[0] == []


def test_the_aggregate_counter_is_not_counted_twice():
    findings, _ = seen(frame(), frame(15.0, ecc_dbe_volatile={2: 1}, ecc_dbe_aggregate={2: 1}))
    assert len(findings) == 1


def test_a_counter_or_xid_that_falls_back_is_a_reset():
    assert seen(frame(ecc_dbe_volatile={2: 4}), frame(15.0))[1] == {2}
    assert seen(frame(xid={1: 79}), frame(15.0))[1] == {1}
    assert seen(frame(energy_j={4: 9e9}), frame(15.0, energy_j={4: 700.0}))[1] == {4}
    assert seen(frame(xid={1: 31}), frame(15.0, xid={1: 79}))[1] == frozenset()


def test_a_failed_remap_stands_from_first_sight():
    for frames in ([frame(remap_failure={1: 1})], [frame(), frame(15.0, remap_failure={1: 1})]):
        ((finding,), _) = seen(*frames)
        assert finding.fence
        assert finding.severity is Severity.CRITICAL


def test_a_pending_remap_makes_a_ticket_and_moves_nothing():
    ((finding,), _) = seen(frame(remap_pending={1: 1}))
    assert finding.severity is Severity.WARNING
    assert not finding.fence


@pytest.mark.parametrize(
    ("code", "acts"), [(1, True), (2, True), (3, False), (4, True), (9, False)]
)
def test_the_drivers_own_advice_is_followed(code, acts):
    ((finding,), _) = seen(frame(recovery_action={1: code}))
    assert (finding.fence, finding.move) == (acts, acts)


def test_a_vanished_gpu_is_lost_and_says_for_how_long():
    presence = np.zeros(6, np.int8)
    presence[4] = Presence.VANISHED
    ((finding,), _) = seen(frame(presence=presence))
    assert finding.kind is Kind.LOST
    assert finding.fence
    assert "siblings" in finding.evidence.text


@pytest.mark.parametrize("absence", [Presence.HOST_SILENT, Presence.BLIND])
def test_not_knowing_is_no_evidence(absence):
    assert seen(frame(presence=np.full(6, absence, np.int8)))[0] == []


def test_counters_stay_with_their_gpu_when_the_roster_changes():
    watch = HardWatch()
    watch.look(frame(gpus=GPUS[2:], ecc_dbe_volatile={0: 7}), CATALOG)
    assert watch.look(frame(15.0, gpus=GPUS, ecc_dbe_volatile={2: 7}), CATALOG)[0] == []
    findings, _ = watch.look(frame(30.0, gpus=GPUS, ecc_dbe_volatile={2: 8}), CATALOG)
    assert [f.row for f in findings] == [2]


def errors(per_s, ticks, name="ecc_sbe_volatile", start=5e6):
    return [frame(15.0 * i, **{name: {2: start + per_s * 15.0 * i}}) for i in range(ticks)]


@pytest.mark.parametrize("name", ["ecc_sbe_volatile", "ecc_sbe_aggregate"])
def test_a_storm_of_corrected_errors_is_a_ticket_without_any_baseline(name):
    findings, _ = seen(*errors(17_700.0, 6, name))
    (finding,) = [f for f in findings if f.row == 2]
    assert (finding.kind, finding.severity) == (Kind.FAULT, Severity.WARNING)
    assert (finding.fence, finding.move, finding.latch) == (False, False, False)
    assert "17700 corrected ECC errors per second" in finding.evidence.text


def test_a_storm_is_over_when_it_is_over():
    frames = errors(17_700.0, 6)
    after = [frame(90.0 + 15 * i, ecc_sbe_volatile={2: 1e9}) for i in range(12)]
    assert seen(*frames, *after)[0] == []


@pytest.mark.parametrize("per_s", [0.0, 1.0, -50.0])
def test_a_few_corrected_errors_or_a_reset_are_no_storm(per_s):
    assert seen(*errors(per_s, 12))[0] == []


def test_a_high_count_that_stands_is_history():
    assert seen(*errors(0.0, 12, start=9e9))[0] == []
