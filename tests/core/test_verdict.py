"""Verdicts: hard evidence before soft, not knowing before both, and words a person can use."""

from dataclasses import replace

import numpy as np
import pytest

from sentinel.core import domain
from sentinel.core.domain import Coverage, Frame, Gpu, Kind, Presence, Severity, Workload, XidEvent
from sentinel.core.features import FEATURES, INDEX
from sentinel.core.score import GPU_SPACE, Cohort, Density
from sentinel.core.verdict import Bundle, Settings, Watch
from sentinel.data import load_catalog
from sentinel.learn.thermal import fit_thermal

CATALOG = load_catalog()
METRICS = (
    *("gpu_util_ratio", "sm_active_ratio", "power_w"),
    *("temp_c", "sm_clock_mhz", "throttle_reasons", "xid"),
)
GPUS = tuple(Gpu(f"GPU-{i}", f"node-{i // 4}", i % 4, "H100") for i in range(8))
NORMAL = {
    "gpu_util_ratio": 0.9,
    "sm_active_ratio": 0.8,
    "power_w": 600.0,
    "temp_c": 66.0,
    "sm_clock_mhz": 1755.0,
    "throttle_reasons": 0.0,
    "xid": 0.0,
}


def bundle():
    core = np.full((1, len(FEATURES)), np.nan)
    for name, value in {
        "gpu_util": 0.9, "sm_active": 0.8, "power": 600.0, "temp_excess": 0.0,
        "sm_clock": 1755.0, "throttled": 0.0,
    }.items():  # fmt: skip
        core[0, INDEX[name]] = value
    scale = np.array(
        [
            f.floor * (600.0 if f.name == "power" else 1755.0 if f.relative else 1.0)
            for f in FEATURES
        ]
    )
    density = Density(GPU_SPACE, core, np.zeros(1, dtype=int), scale, 1.5, 2.0)
    gpu = np.repeat(np.arange(8), 50)
    power = np.tile(np.linspace(100, 700, 50), 8)
    temp = np.stack([30 + 0.06 * power, np.full(400, np.nan)], axis=1)
    thermal = fit_thermal(tuple(g.uuid for g in GPUS), gpu, power, temp, span_s=86_400.0)
    return Bundle("bundle-1", {"H100": Cohort("H100", density, thermal, 400)}, 60.0)


def frame(at_s, xids=(), presence=None, work="job-1", **changes):
    values = np.array([[NORMAL[m] for m in METRICS]] * 8)
    for metric, by_row in changes.items():
        for row, value in by_row.items():
            values[row, METRICS.index(metric)] = value
    return Frame(
        at_s=at_s,
        gpus=GPUS,
        metrics=METRICS,
        values=values,
        age_s=np.zeros_like(values),
        presence=np.zeros(8, np.int8) if presence is None else presence,
        workloads=(Workload("job", work),) * 8,
        coverage=Coverage(8, 8),
        xids=tuple(XidEvent(row, code, at_s) for row, code in xids),
        last_seen_s=np.full(8, at_s),
    )


def judged(*, settle_s=300.0, ticks=12, baseline=True, then=None, **changes):
    """The judgement after `ticks` normal ticks and as many with the changes."""
    watch = Watch(Settings(settle_s=settle_s), CATALOG)
    learnt = bundle() if baseline else None
    for k in range(ticks):
        watch.judge(frame(15.0 * k), learnt)
    for k in range(ticks, 2 * ticks):
        out = watch.judge((then or frame)(15.0 * k, **changes), learnt)
    return out


def test_a_healthy_fleet_has_nothing_to_say():
    out = judged()
    assert out.verdicts == ()
    assert (out.kinds == domain.NORMAL).all()
    assert np.nanmax(out.scores) < 0.2


@pytest.mark.parametrize(
    ("changes", "pattern", "metric"),
    [
        ({"temp_c": {3: 80.0}}, "overheating", "temp_c"),
        (
            {"temp_c": {3: 86.0}, "throttle_reasons": {3: 0x60}},
            "overheating with throttling",
            "temp_c",
        ),
        (
            {"sm_clock_mhz": {3: 1404.0}, "power_w": {3: 470.0}, "temp_c": {3: 58.0}},
            "low SM clock",
            None,
        ),
        ({"power_w": {3: 400.0}, "temp_c": {3: 54.0}}, "low power for the load", "power_w"),
        ({"throttle_reasons": {3: 0x80}}, "power brake", "throttle_reasons"),
        ({"throttle_reasons": {3: 0x8}}, "hardware throttling", "throttle_reasons"),
    ],
)
def test_a_deviation_is_named_and_explained(changes, pattern, metric):
    (verdict,) = judged(**changes).verdicts
    assert (verdict.gpu.uuid, verdict.kind, verdict.pattern) == ("GPU-3", Kind.DEVIANT, pattern)
    assert verdict.severity is Severity.CRITICAL
    assert verdict.bundle_id == "bundle-1"
    if metric:
        assert verdict.evidence[0].metric == metric
    assert sum(e.contribution for e in verdict.evidence) <= verdict.score + 1e-9


def test_without_profiling_counters_power_is_no_answer_to_the_work():
    """Utilisation counts any kernel: the same 90 % may take 400 or 600 W."""
    blind = {"sm_active_ratio": dict.fromkeys(range(8), np.nan)}
    assert judged(power_w={3: 400.0}, temp_c={3: 54.0}, **blind).verdicts == ()
    (hot,) = judged(temp_c={3: 80.0}, **blind).verdicts
    assert hot.pattern == "overheating"


def test_the_explanation_says_how_hot_and_what_was_expected():
    (verdict,) = judged(temp_c={3: 80.0}).verdicts
    assert verdict.evidence[0].text == (
        "GPU temperature 80 °C, +14 °C from the 66 °C normal for this GPU at 600 W"
    )


def test_just_outside_makes_a_ticket_and_may_not_act():
    (verdict,) = judged(temp_c={3: 73.5}).verdicts
    assert 1.0 < verdict.score < 1.3
    assert verdict.severity is Severity.WARNING
    assert not verdict.may_move


@pytest.mark.parametrize("baseline", [True, False])
def test_a_clock_that_a_power_limit_in_software_holds_makes_a_ticket(baseline):
    """At its usual power with the limit's bit set: no fault that a move would mend."""
    slow = {"sm_clock_mhz": {3: 1350.0}}
    (free,) = judged(baseline=baseline, **slow).verdicts
    assert (free.severity, free.may_move) == (Severity.CRITICAL, True)
    (held,) = judged(baseline=baseline, **slow, throttle_reasons={3: 0x4}).verdicts
    assert (held.severity, held.may_fence, held.may_move) == (Severity.WARNING, False, False)


@pytest.mark.parametrize("changes", [{"temp_c": {3: 84.0}}, {"throttle_reasons": {3: 0x84}}])
def test_what_a_power_limit_cannot_explain_pages_beside_it(changes):
    held = {"throttle_reasons": {3: 0x4}} | changes
    (verdict,) = judged(sm_clock_mhz={3: 1350.0}, **held).verdicts
    assert (verdict.severity, verdict.may_move) == (Severity.CRITICAL, True)


def test_without_a_baseline_hard_evidence_and_mates_speak():
    assert judged(baseline=False, temp_c=dict.fromkeys(range(8), 71.0)).verdicts == ()
    (verdict,) = judged(baseline=False, temp_c={3: 95.0}).verdicts
    assert (verdict.gpu.uuid, verdict.evidence[0].kind) == ("GPU-3", "peers")
    (verdict,) = judged(baseline=False, ticks=1, xids=[(3, 79)]).verdicts
    assert verdict.kind is Kind.FAULT
    assert verdict.latch


def test_hard_evidence_leads_and_keeps_the_soft_reasons():
    watch, learnt = Watch(Settings(), CATALOG), bundle()
    for k in range(12):
        watch.judge(frame(15.0 * k, temp_c={3: 80.0}), learnt)
    (verdict,) = watch.judge(frame(180.0, xids=[(3, 48)], temp_c={3: 80.0}), learnt).verdicts
    assert [e.kind for e in verdict.evidence[:2]] == ["xid", "density"]
    assert verdict.pattern == "uncorrectable ECC"


def test_an_application_xid_does_not_hide_a_worse_deviation():
    watch, learnt = Watch(Settings(), CATALOG), bundle()
    for k in range(12):
        watch.judge(frame(15.0 * k, temp_c={3: 80.0}), learnt)
    (verdict,) = watch.judge(frame(180.0, xids=[(3, 31)], temp_c={3: 80.0}), learnt).verdicts
    assert verdict.kind is Kind.DEVIANT
    assert "xid" in [e.kind for e in verdict.evidence]


def test_a_silent_host_is_unknown_whatever_its_last_values():
    presence = np.zeros(8, np.int8)
    presence[4:] = Presence.HOST_SILENT
    out = judged(presence=presence, temp_c={3: 80.0, 5: 95.0})
    assert [v.gpu.uuid for v in out.verdicts] == ["GPU-3"]
    assert (out.kinds[4:] == domain.UNKNOWN).all()
    assert np.isnan(out.scores[4:]).all()


def test_a_blind_frame_says_nothing_of_anybody():
    def blind(at_s, **_):
        return replace(frame(at_s), coverage=Coverage(8, 0, blind=True, reason="down"))

    out = judged(then=blind)
    assert (out.kinds == domain.UNKNOWN).all()
    assert out.verdicts == ()


def test_work_that_has_just_changed_is_neither_healthy_nor_evidence():
    out = judged(work="job-2", temp_c={3: 80.0})  # 12 ticks are 180 s, less than settle_s
    assert out.verdicts == ()
    assert out.kinds[3] == domain.UNKNOWN
    assert (np.delete(out.kinds, 3) == domain.NORMAL).all()
    assert len(judged(settle_s=60.0, work="job-2", temp_c={3: 80.0}).verdicts) == 1


def test_a_room_that_warms_is_no_fault():
    assert judged(temp_c=dict.fromkeys(range(8), 71.0)).verdicts == ()
