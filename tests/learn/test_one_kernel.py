"""One detector: the daemon on a fleet of one GPU and the time-series entry give equal scores."""

import numpy as np
import pytest

from sentinel.core.adapt import BLOCK_STEPS
from sentinel.core.domain import Coverage, Frame, Gpu, Presence
from sentinel.core.features import FEATURES, INDEX
from sentinel.core.score import GPU_SPACE, Cohort
from sentinel.core.verdict import Bundle, Settings, Watch
from sentinel.data import load_catalog
from sentinel.learn.detector import Detector
from sentinel.learn.thermal import fit_thermal

GRID_S = 60.0
METRICS = (
    "gpu_util_ratio", "tensor_active_ratio", "power_w", "temp_c", "sm_clock_mhz", "throttle_reasons"
)  # fmt: skip
ONE = (Gpu("GPU-a", "node-1", 0, "H100"),)
FLOORS = np.array([f.floor * (1755.0 if "clock" in f.name else 600.0 if f.relative else 1.0)
                   for f in FEATURES])  # fmt: skip


def telemetry(rows, seed, slower=(), louder=()):
    """One GPU at two kinds of work, minute by minute; `slower` and `louder` are slices in
    which its clock, or its power, is a little and lastingly off."""
    rng = np.random.default_rng(seed)
    busy = np.arange(rows) // 40 % 3 > 0
    x = np.zeros((rows, len(METRICS)))
    x[:, 0] = np.where(busy, 0.95, 0.55) + rng.normal(0, 0.01, rows)
    x[:, 1] = np.where(busy, 0.50, 0.20) + rng.normal(0, 0.01, rows)
    x[:, 2] = np.where(busy, 600.0, 300.0) + rng.normal(0, 6.0, rows)
    x[:, 4] = np.where(busy, 1755.0, 1830.0) + rng.normal(0, 5.0, rows)
    for part in slower:
        x[part, 4] -= 85.0
    for part in louder:
        x[part, 2] += 75.0
    x[:, 3] = 30.0 + 0.06 * x[:, 2] + rng.normal(0, 0.3, rows)
    return x


def frames(rows, start_s):
    for k, row in enumerate(rows):
        at_s = start_s + GRID_S * k
        yield Frame(
            at_s=at_s,
            gpus=ONE,
            metrics=METRICS,
            values=row[None, :],
            age_s=np.zeros((1, len(METRICS))),
            presence=np.full(1, Presence.PRESENT, dtype=np.int8),
            workloads=(None,),
            coverage=Coverage(1, 1),
            last_seen_s=np.full(1, at_s),
        )


def watched(rows, start_s, bundle):
    """(scores [rows], signals [rows, features], cores grown) of the daemon's own way."""
    watch = Watch(Settings(grid_s=GRID_S), load_catalog())
    score, signals = [], []
    for frame in frames(rows, start_s):
        score.append(watch.judge(frame, bundle).scores[0])
        signals.append(watch.scores.values[0])
    return np.array(score), np.array(signals), watch.live.grown["H100"]


@pytest.fixture(scope="module")
def both():
    train, thermal_rows = telemetry(1500, 0), telemetry(400, 5)
    temp = np.stack([thermal_rows[:, 3], np.full(400, np.nan)], axis=1)
    thermal = fit_thermal(
        ("GPU-a",), np.zeros(400, dtype=np.int64), thermal_rows[:, 2], temp, span_s=86_400.0
    )
    found = Detector(space=GPU_SPACE, floors=FLOORS)
    # any density shows what the signals of the training time are
    rough = Detector(space=GPU_SPACE, floors=FLOORS).fit(np.zeros((100, len(FEATURES))))
    known = Bundle("rough", {"H100": Cohort("H100", rough.density_, thermal)}, GRID_S)
    _, signals, _ = watched(train, 0.0, known)
    found.fit(signals[2:], step_s=GRID_S)
    bundle = Bundle("one", {"H100": Cohort("H100", found.density_, thermal)}, GRID_S)
    test = telemetry(1100, 3, slower=[slice(200, 600)], louder=[slice(700, 950)])
    score, signals, grown = watched(test, GRID_S * 5000, bundle)
    return score, found.score(signals), signals, grown, found


def test_the_daemon_and_the_detector_agree_on_every_grid_step(both):
    daemon, detector, _, _, _ = both
    assert np.isnan(daemon[0])  # not ready: one cell has data
    np.testing.assert_allclose(daemon[1:], detector[1:], rtol=0, atol=1e-6)


def test_and_normal_grew_in_both(both):
    daemon, _, signals, grown, found = both
    assert grown >= 1
    before = daemon[220 : 200 + 5 * BLOCK_STEPS].max()
    after = daemon[200 + 9 * BLOCK_STEPS : 600]
    assert before > found.density_.reach
    assert after.max() < before
    without = found.baseline_.anomaly_score(signals[400:])
    assert without[:150].max() > after.max()


def test_columns_are_one_per_feature(both):
    assert both[2].shape[1] == len(INDEX)
