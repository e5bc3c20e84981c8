"""The budget's promise, on series whose rates are known: it is kept in time never seen before."""

import numpy as np
import pytest

from sentinel.core.budget import Calibration
from sentinel.core.policy import Budget
from sentinel.learn.calibrate import Series, calibrate, fit_tail, heights, lasting_score

HOLD_S, STEP_S, DAY_S = 120.0, 60.0, 86_400.0


def autocorrelated(gpus, hours, seed, *, spread=0.12, per_host=8, shared=0.0, level=0.45):
    """Scores of a healthy fleet: an hour's memory per GPU, and a share that a host has in
    common."""
    rng = np.random.default_rng(seed)
    n = int(hours * 3600 / STEP_S)
    memory = np.exp(-STEP_S / 3600.0)
    hosts = (gpus + per_host - 1) // per_host

    def ar(count):
        noise = rng.standard_normal((n, count))
        out = np.empty_like(noise)
        out[0] = noise[0]
        for k in range(1, n):
            out[k] = memory * out[k - 1] + np.sqrt(1 - memory**2) * noise[k]
        return out

    own = (
        np.sqrt(1 - shared) * ar(gpus)
        + np.sqrt(shared) * np.repeat(ar(hosts), per_host, 1)[:, :gpus]
    )
    score = level + spread * own
    gpu = np.tile(np.arange(gpus), n)
    return Series(
        score.ravel(),
        np.repeat(1e9 + STEP_S * np.arange(n), gpus),
        gpu,
        gpu // per_host,
        np.full(n * gpus, -1),
        STEP_S,
    )


def calibrated(series, gpus, budget=None, **kw):
    kw = {"certify_gpu_days": 1.0, "deviant_for_s": HOLD_S, **kw}
    return calibrate([series], gpus=gpus, budget=budget or Budget(), **kw)


def counted(series, score):
    """Incidents of at least this height that really came."""
    return len(heights([series], score, HOLD_S).score)


class TestPromise:
    @pytest.mark.parametrize("shared", [0.0, 0.8])
    @pytest.mark.parametrize("seed", [1, 2, 3])
    def test_fresh_weeks_bring_no_more_than_the_budget(self, seed, shared):
        """A day of 64 GPUs is learnt from; three weeks of the same fleet follow. Scores wander
        so far that today's edge would make hundreds of tickets."""
        learnt = autocorrelated(64, 24, seed, shared=shared, spread=0.25)
        known = calibrated(learnt, 64, Budget(2.0, 20.0, 1.0))
        assert known.certified, known.why
        assert known.ticket_score > 1.0
        later = autocorrelated(64, 3 * 168, seed + 100, shared=shared, spread=0.25)
        for word, score, weekly in (
            ("ticket", known.ticket_score, 20.0),
            ("page", known.page_score, 2.0),
        ):
            allowed = 3 * weekly
            came = counted(later, score)
            assert came <= allowed + 3 * np.sqrt(allowed), f"{word} {score}"
        assert counted(later, 1.0) > 3 * 60.0

    def test_it_is_not_far_too_careful_either(self):
        learnt = autocorrelated(64, 48, 5, spread=0.25)
        known = calibrated(learnt, 64, Budget(2.0, 20.0, 1.0))
        later = autocorrelated(64, 336, 6, spread=0.25)
        assert counted(later, known.ticket_score - 0.25) > 40.0

    def test_a_calm_fleet_keeps_todays_thresholds(self):
        known = calibrated(autocorrelated(64, 24, 1, spread=0.06), 64)
        assert known.certified
        assert (known.ticket_score, known.page_score) == (1.0, 1.3)


class TestCertified:
    def test_too_little_time_is_said_in_numbers(self):
        known = calibrated(autocorrelated(8, 1, 1), 8, certify_gpu_days=14.0)
        assert not known.certified
        assert known.why == "it rests on 0.333 of the 14 GPU-days that certify it"

    def test_a_site_may_trust_without_proof(self):
        assert calibrated(autocorrelated(8, 1, 1), 8, certify_gpu_days=0.0).certified

    def test_nothing_at_all_is_uncertified(self):
        known = calibrate([], gpus=0, budget=Budget(), deviant_for_s=HOLD_S, certify_gpu_days=14.0)
        assert known.certified is False
        assert known.table == ()

    def test_one_fault_in_the_learning_window_spoils_the_certificate(self):
        series = autocorrelated(64, 24, 3)
        sick = (series.gpu == 5) & (series.at_s > 1e9 + 12 * 3600)
        series.score[sick] += 3.0
        series.names.update({5: "GPU-5 of node-0"})
        known = calibrated(series, 64)
        assert not known.certified
        assert "one of them may be a fault: GPU-5 of node-0 reached 3." in known.why

    def test_scores_that_never_move_are_calm_not_unknown(self):
        series = autocorrelated(64, 24, 1, spread=0.0)
        series.score[:] = 0.0
        known = calibrated(series, 64)
        assert known.ticket_score == 1.0


class TestIncidents:
    def series(self, rows, gpus=1, per_host=8, work=None):
        score = np.array(rows, dtype=float).reshape(-1, gpus)
        n = len(score)
        gpu = np.tile(np.arange(gpus), n)
        return Series(
            score.ravel(),
            np.repeat(STEP_S * np.arange(n, dtype=float), gpus),
            gpu,
            gpu // per_host,
            np.full(n * gpus, -1) if work is None else np.tile(np.array(work), n),
            STEP_S,
        )

    def test_what_lasted_is_the_lowest_of_its_time(self):
        held = lasting_score(self.series([1, 5, 2, 9, 3]), HOLD_S)
        np.testing.assert_array_equal(held, [np.nan, np.nan, 1, 2, 2])

    def test_a_gap_or_an_unknown_breaks_it(self):
        held = lasting_score(self.series([1, 1, np.nan, 1, 1, 1]), HOLD_S)
        np.testing.assert_array_equal(np.isfinite(held), [0, 0, 0, 0, 0, 1])

    @pytest.mark.parametrize(
        ("rest", "count"),
        [(10, 1), (25, 1), (40, 2)],  # minutes of rest between two runs
    )
    def test_runs_of_one_gpu_that_follow_closely_are_one(self, rest, count):
        found = heights([self.series([2] * 6 + [0] * rest + [3] * 6)], 1.0, HOLD_S)
        assert len(found.score) == count
        assert found.score.max() == 3.0

    def test_a_host_that_begins_together_is_one_incident(self):
        rows = np.zeros((30, 4))
        rows[5:15, :] = [1.5, 1.6, 1.7, 1.8]
        assert list(heights([self.series(rows, 4)], 1.0, HOLD_S).score) == [1.8]
        apart = heights([self.series(rows, 4, per_host=1)], 1.0, HOLD_S)
        assert len(apart.score) == 4

    def test_a_job_over_several_hosts_is_one_incident(self):
        rows = np.zeros((30, 4))
        rows[5:15, :] = 1.5
        job = heights([self.series(rows, 4, per_host=1, work=[7, 7, 7, -1])], 1.0, HOLD_S)
        assert len(job.score) == 2

    def test_another_gpu_of_the_host_much_later_is_another(self):
        rows = np.zeros((90, 2))
        rows[5:15, 0] = rows[60:70, 1] = 1.5
        assert len(heights([self.series(rows, 2)], 1.0, HOLD_S).score) == 2


def test_an_exponential_tail_is_found_as_one():
    rng = np.random.default_rng(4)
    series = autocorrelated(8, 1, 1)
    found = heights([series], 0.0, HOLD_S)
    over = rng.exponential(0.2, 400)
    tail = fit_tail(type(found)(0.5, 0.5 + over, np.ones(400)))
    assert tail.mean == pytest.approx(0.2, rel=0.15)
    assert abs(tail.shape) < 0.15


def test_the_table_falls_and_is_read_between_its_rows():
    known = calibrated(autocorrelated(64, 24, 1, spread=0.25), 64)
    rates = [row.per_week for row in known.table]
    assert rates == sorted(rates, reverse=True)
    assert all(row.low <= row.per_week <= row.high for row in known.table)
    a, b = known.table[3], known.table[4]
    middle = np.sqrt(a.per_week * b.per_week)
    assert a.score < known.score_for(middle) < b.score
    assert Calibration().score_for(1.0) == 1.0
