"""What speaks against a new bundle, by itself; a whole fleet is relearnt in tests/simulation."""

from dataclasses import replace

import numpy as np
import pytest

from sentinel.core.budget import Calibration
from sentinel.core.features import FEATURES, INDEX, TEMP
from sentinel.core.verdict import Bundle
from sentinel.learn.adopt import compare
from sentinel.learn.cohort import Rows, fit, held_out, score_history
from tests.learn.test_baseline import regimes

CERTIFIED = Calibration(30.0, True, 1.0, 1.3, "")
GPUS, EACH = 8, 200


def rows(seed=0, **bend):
    """Eight GPUs of two hosts; `bend` maps a feature to (GPUs, what is added)."""
    parts = []
    for gpu in range(GPUS):
        x = regimes(EACH, seed=100 * seed + gpu)
        x[:, TEMP] += 30.0 + 0.06 * x[:, INDEX["power"]]
        for name, (gpus, much) in bend.items():
            if gpu in gpus:
                x[:, INDEX[name]] += much
        parts.append(x)
    values = np.stack(parts, axis=1).reshape(-1, len(FEATURES))
    return Rows(
        "H100",
        values,
        values[:, INDEX["power"]],
        np.repeat(1e9 + 60.0 * np.arange(EACH), GPUS),
        np.tile(np.arange(GPUS), EACH),
        np.full(EACH * GPUS, -1),
        tuple(f"GPU-{g}" for g in range(GPUS)),
        tuple(f"node-{g // 4}" for g in range(GPUS)),
        60.0,
    )


def bundle(name, own=None, calibration=CERTIFIED):
    cohorts = {}
    if own is not None:
        cohorts["H100"] = fit(own, deviant_for_s=120.0, span_s=12_000.0)[0]
    return Bundle(name, cohorts, 60.0, calibration=calibration)


@pytest.fixture(scope="module")
def usual():
    return bundle("usual", rows())


def against(last, own, new=None):
    return compare(new or bundle("new", own), last, {"H100": own}, {})


def test_another_draw_of_the_same_fleet_is_adopted(usual):
    found = against(usual, rows(1))
    assert found.adopt, found.reasons
    figures = found.models["H100"]
    assert figures["notices"]["hot"] > 0.9
    assert figures["stay"] > 0.9
    assert found.plain()["with"] == "usual"


def test_one_gpu_learnt_as_slow_is_a_fault_and_all_of_them_are_a_change(usual):
    one = against(usual, rows(1, sm_clock=({3}, -400.0)))
    assert any("abnormal until now on GPU-3 of node-0" in reason for reason in one.reasons)
    every = against(usual, rows(1, sm_clock=(set(range(GPUS)), -400.0)))
    assert not any("abnormal until now" in reason for reason in every.reasons)


def test_a_bundle_that_would_call_much_of_the_fleet_abnormal(usual):
    strange = bundle("strange", rows(1, power=(set(range(GPUS)), 250.0)))
    found = against(usual, rows(2), strange)
    assert any("of normal time would be abnormal" in reason for reason in found.reasons)


@pytest.mark.parametrize(
    ("was", "now", "says"),
    [
        (CERTIFIED, replace(CERTIFIED, certified=False, why="too calm"), "was certified"),
        (CERTIFIED, replace(CERTIFIED, ticket_score=1.6), "tickets would need a score of 1.60"),
        (CERTIFIED, replace(CERTIFIED, page_score=2.0), "pages would need a score of 2.00"),
        (CERTIFIED, replace(CERTIFIED, page_score=1.6), ""),
        (replace(CERTIFIED, certified=False), CERTIFIED, ""),
        (replace(CERTIFIED, gpu_days=1.0), replace(CERTIFIED, page_score=2.0), ""),
    ],
)
def test_a_worse_calibration_counts_unless_the_last_knew_little(was, now, says):
    found = compare(bundle("new", calibration=now), bundle("last", calibration=was), {}, {})
    assert bool(found.reasons) is bool(says)
    assert says in " ".join(found.reasons)


def test_a_model_that_still_reports_keeps_its_baseline(usual):
    found = compare(bundle("new"), usual, {"H100": rows(1)}, {})
    assert found.reasons == ("H100: still reports and has no baseline any more",)
    assert compare(bundle("new"), usual, {}, {}).adopt  # its GPUs are gone


def test_held_out_time_is_judged_by_the_other_half():
    own = rows()
    late = own.at_s >= np.median(own.at_s)
    own.values[late & (own.gpu == 5), INDEX["sm_clock"]] *= 0.7
    held = held_out(own, deviant_for_s=120.0, span_s=12_000.0)
    busy = own.values[:, INDEX["gpu_util"]] > 0.5
    sick = late & (own.gpu == 5) & busy
    assert np.median(held.score[sick]) > 1.3
    assert np.nanquantile(held.score[~sick & (own.gpu != 5)], 0.99) < 1.0
    whole, _ = score_history(fit(own, deviant_for_s=120.0, span_s=12_000.0)[0], own)
    assert np.median(whole[sick]) < np.median(held.score[sick])  # it has learnt it


def test_one_row_is_no_half():
    assert held_out(rows().part(np.arange(30)), deviant_for_s=120.0, span_s=60.0) is None
