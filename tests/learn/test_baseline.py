"""The baseline: what it learns, what it refuses to learn, and that its arithmetic holds."""

import numpy as np
import pytest
from sklearn.utils.estimator_checks import check_estimator

from sentinel.core.features import FEATURES, INDEX, NAMES
from sentinel.core.score import GPU_SPACE, score_rows, shared_shift, thermal_excess
from sentinel.learn.baseline import DensityBaseline
from sentinel.learn.thermal import fit_thermal

FLOORS = np.array([f.floor * (1000.0 if f.relative else 1.0) for f in FEATURES])


def regimes(rows=600, seed=0):
    """Two operating regimes of one GPU model: idle, and loaded with its own answer."""
    rng = np.random.default_rng(seed)
    x = np.full((rows, len(FEATURES)), np.nan)
    busy = np.arange(rows) // 50 % 3 > 0
    x[:, INDEX["gpu_util"]] = np.where(busy, 0.95, 0.0) + rng.normal(0, 0.01, rows)
    x[:, INDEX["tensor_active"]] = np.where(busy, 0.5, 0.0) + rng.normal(0, 0.01, rows)
    x[:, INDEX["power"]] = np.where(busy, 600.0, 80.0) + rng.normal(0, 8, rows)
    x[:, INDEX["sm_clock"]] = np.where(busy, 1755.0, 345.0) + rng.normal(0, 5, rows)
    x[:, INDEX["temp_excess"]] = rng.normal(0, 0.5, rows)
    return x


@pytest.fixture(scope="module")
def baseline():
    return DensityBaseline(space=GPU_SPACE, floors=FLOORS).fit(regimes())


def one(baseline, **changes):
    row = regimes(150, seed=9)[149].copy()  # a loaded row
    for name, value in changes.items():
        row[INDEX[name]] = value
    score, novel, contribution, expected = score_rows(baseline.density_, row[None, :])
    return float(score[0]), bool(novel[0]), contribution[0], expected[0]


def test_healthy_rows_of_another_draw_stay_inside(baseline):
    assert baseline.anomaly_score(regimes(seed=5)).max() < 0.7


def test_two_regimes_are_two_clusters_with_little_noise(baseline):
    evaluation = baseline.evaluation_
    assert evaluation["clusters"] == 2
    assert evaluation["noise_share"] < 0.01
    assert evaluation["silhouette"] > 0.9


@pytest.mark.parametrize(
    ("changes", "feature"),
    [
        ({"temp_excess": 12.0}, "temp_excess"),
        ({"sm_clock": 1755.0 * 0.8}, "sm_clock"),
        ({"power": 380.0}, "power"),
    ],
)
def test_an_abnormal_answer_to_a_known_demand_is_outside(baseline, changes, feature):
    score, novel, contribution, _ = one(baseline, **changes)
    assert score > 1.3
    assert not novel
    assert NAMES[int(np.argmax(contribution))] == feature
    assert contribution.sum() == pytest.approx(score)


def test_the_idle_answer_is_not_normal_under_load(baseline):
    """345 MHz is normal for an idle GPU: the demand decides which answer is expected."""
    score, _, _, expected = one(baseline, sm_clock=345.0)
    assert score > 2.0
    assert expected[INDEX["sm_clock"]] == pytest.approx(1755, abs=10)


def test_work_never_seen_is_novel_and_not_deviant(baseline):
    score, novel, _, _ = one(
        baseline, tensor_active=0.95, dram_active=0.9, power=690.0, gpu_util=0.5
    )
    assert novel
    assert score < 0.5


def test_novel_work_still_shows_what_physics_forbids(baseline):
    score, novel, contribution, _ = one(
        baseline, tensor_active=0.95, gpu_util=0.5, temp_excess=15.0
    )
    assert novel
    assert score > 1.3
    assert NAMES[int(np.argmax(contribution))] == "temp_excess"


def test_drift_in_one_feature_is_clipped(baseline):
    assert one(baseline, temp_excess=1e6)[0] == one(baseline, temp_excess=1e9)[0]


def test_cooler_or_faster_than_normal_weighs_less(baseline):
    assert one(baseline, temp_excess=-9.0)[0] < one(baseline, temp_excess=9.0)[0] / 2


def test_unknown_values_neither_deviate_nor_hide_the_rest(baseline):
    assert one(baseline, power=np.nan)[0] < 0.5
    assert one(baseline, power=np.nan, temp_excess=12.0)[0] > 1.3


def test_a_rare_excursion_in_history_is_not_learnt_as_normal():
    rows = regimes(6000)
    rows[3000:3003, INDEX["temp_excess"]] = 25.0
    learnt = DensityBaseline(space=GPU_SPACE, floors=FLOORS).fit(rows)
    assert one(learnt, temp_excess=25.0)[0] > 1.3


def test_the_model_stays_bounded_however_long_the_history():
    learnt = DensityBaseline(space=GPU_SPACE, floors=FLOORS, max_cores=64).fit(regimes(30_000))
    assert len(learnt.density_.cores) <= 64


def test_learning_is_deterministic():
    a, b = (DensityBaseline(space=GPU_SPACE, floors=FLOORS).fit(regimes()) for _ in range(2))
    np.testing.assert_array_equal(a.density_.cores, b.density_.cores)
    assert a.density_.radius == b.density_.radius


def test_scikit_learn_accepts_it_as_an_estimator():
    check_estimator(DensityBaseline(), on_skip=None)


class TestThermal:
    def fleet(self, slope=(0.05, 0.07), base=(28.0, 30.0), span_s=86_400.0, load_w=600.0):
        rng = np.random.default_rng(1)
        gpu = np.tile(np.arange(2), 1000)
        power = np.where(np.arange(2000) % 4 < 2, 80.0, load_w) + rng.normal(0, 5, 2000)
        temp = np.array(base)[gpu] + np.array(slope)[gpu] * power + rng.normal(0, 0.5, 2000)
        both = np.stack([temp, np.full(2000, np.nan)], axis=1)
        return fit_thermal(("GPU-a", "GPU-b"), gpu, power, both, span_s=span_s)

    def test_each_gpu_has_its_own_slope(self):
        np.testing.assert_allclose(self.fleet().r_c_per_w[0], (0.05, 0.07), atol=0.002)

    def test_excess_is_what_power_does_not_explain(self):
        model = self.fleet()
        temp = np.array([[28.0 + 0.05 * 400 + 12.0, np.nan]])
        excess, predicted = thermal_excess(model, np.array([0]), np.array([400.0]), temp)
        assert excess[0, 0] == pytest.approx(12.0, abs=0.8)  # less its own doubt
        assert predicted[0, 0] == pytest.approx(48.0, abs=0.6)
        assert np.isnan(excess[0, 1])

    def test_learnt_only_at_idle_it_does_not_shout_at_the_first_load(self):
        model = self.fleet(load_w=80.0, span_s=135.0)
        temp = np.array([[28.0 + 0.05 * 680, np.nan]])
        excess, _ = thermal_excess(model, np.array([0]), np.array([680.0]), temp)
        assert abs(excess[0, 0]) < 3.0

    def test_heat_that_soaks_in_under_one_load_is_no_slope(self):
        """A hotter chip leaks more: at a steady load power and temperature rise together."""
        gpu, warm = np.repeat(np.arange(2), 300), np.tile(np.linspace(0.0, 1.0, 300), 2)
        power = 530.0 + 40.0 * warm
        temp = np.stack([58.0 + 9.0 * warm, np.full(600, np.nan)], axis=1)
        model = fit_thermal(("GPU-a", "GPU-b"), gpu, power, temp, span_s=1200.0)
        assert 0.03 < model.default_r[0] < 0.09
        idle = np.array([[35.0, np.nan]])
        excess, _ = thermal_excess(model, np.array([0]), np.array([120.0]), idle)
        assert excess[0, 0] < 3.0

    def minutely(self, loads_w, gpus=12, hours=24):
        """Scrapes a minute apart of work whose power comes and goes in between: what a scrape
        shows of it is not what has heated the sink."""
        rng = np.random.default_rng(2)
        n = 60 * hours
        air = 24.0 + rng.normal(0, 2, gpus)
        shown, temp = np.empty((gpus, n)), np.empty((gpus, n))
        for g in range(gpus):
            level = np.resize(np.repeat(loads_w[g % len(loads_w)], 240), n)
            heated = level + rng.normal(0, 25, n)  # the mean since the last scrape
            shown[g] = heated + rng.normal(0, 60, n)
            temp[g] = air[g] + 0.06 * heated + rng.normal(0, 0.5, n)
        gpu, at_s = np.repeat(np.arange(gpus), n), np.tile(60.0 * np.arange(n), gpus)
        both = np.stack([temp.ravel(), np.full(gpus * n, np.nan)], axis=1)
        uuids = tuple(f"GPU-{g}" for g in range(gpus))
        return fit_thermal(
            uuids, gpu, shown.ravel(), both, span_s=3600.0 * hours, at_s=at_s, spacing_s=60.0
        )

    def test_power_unseen_between_two_scrapes_does_not_flatten_the_slope(self):
        model = self.minutely([[670.0], [640.0], [300.0], [70.0]])  # each GPU at one load all day
        np.testing.assert_allclose(model.default_r[0], 0.06, atol=0.006)
        np.testing.assert_allclose(model.r_c_per_w[0], 0.06, atol=0.012)

    def test_one_load_on_every_gpu_leaves_the_slope_that_such_gpus_have(self):
        model = self.minutely([[670.0]])
        assert 0.05 < model.default_r[0] < 0.07

    def test_a_gpu_never_seen_is_judged_by_its_model_with_more_slack(self):
        model = self.fleet()
        at = np.array([[50.0 + 10.0, np.nan]])
        known, _ = thermal_excess(model, np.array([0]), np.array([400.0]), at)
        unseen, _ = thermal_excess(model, np.array([-1]), np.array([400.0]), at)
        assert 0.0 <= unseen[0, 0] < known[0, 0]


class TestSharedAir:
    def test_what_a_host_has_in_common_is_its_air(self):
        excess = np.array([3.0, 3.2, 2.8, 15.0, 3.1, 0.1, -0.1, 0.0, 0.2])
        host = np.array([0, 0, 0, 0, 0, 1, 1, 1, 1])
        shift = shared_shift(excess, host)
        np.testing.assert_allclose(shift[:5], 3.1)
        np.testing.assert_allclose(shift[5:], 0.05)

    def test_a_host_hotter_than_any_room_still_shows(self):
        assert shared_shift(np.full(8, 20.0), np.zeros(8, dtype=int))[0] == 6.0

    def test_where_all_are_cooler_than_ever_doubt_alone_makes_none_hot(self):
        """Learnt idle at 80 W, judged at 300 W in colder air: what the model says of that
        power is uncertain, and one that is only less cool than its mates is not hot."""
        gpu = np.repeat(np.arange(8), 50)
        both = np.stack([np.full(400, 34.0), np.full(400, np.nan)], axis=1)
        uuids = tuple(f"GPU-{i}" for i in range(8))
        model = fit_thermal(uuids, gpu, np.full(400, 80.0), both, span_s=600.0)
        temp = np.stack([np.array([38.0] * 7 + [44.0]), np.full(8, np.nan)], axis=1)
        place, power, host = np.arange(8), np.full(8, 300.0), np.zeros(8, dtype=int)
        excess, _ = thermal_excess(model, place, power, temp, host)
        assert excess[7, 0] < 1.0

    def test_few_gpus_or_unknown_ones_do_not_tell_the_air(self):
        host = np.zeros(6, dtype=int)
        few = np.array([9.0, 9.0, 9.0, np.nan, np.nan, np.nan])
        assert (shared_shift(few, host) == 0.0).all()
        some = np.array([1.0, 2.0, 3.0, 4.0, np.nan, np.nan])
        np.testing.assert_allclose(shared_shift(some, host), 2.5)


def test_regimes_are_named_by_what_they_ask(baseline):
    assert sorted(baseline.density_.regimes) == ["compute-bound", "idle"]


def test_regimes_of_columns_that_mean_nothing_are_numbered_by_size():
    rng = np.random.default_rng(0)
    rows = np.concatenate([rng.normal(0, 0.1, (300, 2)), rng.normal(9, 0.1, (100, 2))])
    learnt = DensityBaseline(floors=[0.3, 0.3]).fit(rows)
    assert learnt.density_.regimes == ("regime 1", "regime 2")
