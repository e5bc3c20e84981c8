"""Relearning on a simulated fleet: what may take the old baseline's place, and what may not.

The daemon is the real one, over a Prometheus that does not answer: what it adopts, refuses and
shows of its bundles needs none.
"""

import json
import os

import numpy as np
import pytest
from click.testing import CliRunner

from sentinel import history, learnpage
from sentinel.cli import cli
from sentinel.config import Config
from sentinel.daemon import Daemon
from sentinel.edges import bundle as bundles
from sentinel.lab.fleet import Fleet
from sentinel.web import views
from tests.simulation.lab_history import LabHistory

STEP_S, HOUR_S = 15.0, 3600.0
START_S = 1_790_000_000.0 - 1_790_000_000.0 % STEP_S


class Site:
    """A fleet that lives on from one learning to the next, and a state folder."""

    def __init__(self, folder, seed=1, hosts=4):
        folder.mkdir()
        self.path = folder / "sentinel.yaml"
        self.path.write_text(
            "prometheus: {url: 'http://127.0.0.1:9', timeout_s: 0.2}\n"
            "alertmanager: {urls: []}\n"
            "detection: {certify_gpu_days: 1}\n"
        )
        self.config = Config.load(self.path)
        self.fleet, self.now_s = Fleet(seed, hosts, 8, start_s=START_S), START_S
        self.folder = history.bundle_dir(self.config)

    def learn(self, hours, events=(), **kw):
        """Learns the next `hours`; `events` are (hours from now, method, *arguments)."""
        start_s, end_s = self.now_s, self.now_s + hours * HOUR_S
        timed = [(start_s + STEP_S * round(h * HOUR_S / STEP_S), *rest) for h, *rest in events]
        source = LabHistory(self.fleet, STEP_S, timed)
        made = history.learn(self.config, start_s, end_s, prometheus=source, now_s=end_s, **kw)
        self.now_s = end_s + STEP_S
        if made.path:  # files are ordered by when they were written: here, by the fleet's time
            os.utime(made.path, (end_s, end_s))
        return made

    def busy(self):
        jobs = self.fleet.workload.job_of
        return [gpu.uuid for row, gpu in enumerate(self.fleet.gpus) if jobs[row]]

    def in_use(self):
        found, problems = bundles.load_newest(self.folder, grid_s=60.0)
        assert problems == []
        return found


@pytest.fixture(scope="module")
def lived(tmp_path_factory):
    """Two quiet stretches, then one in which two GPUs are ill nearly all the time: of one, whose
    clock throttles, nothing is learnt; the other, with slow memory, looks well to that check."""
    site = Site(tmp_path_factory.mktemp("relearning") / "site")
    first, second = site.learn(1.5), site.learn(1.5)
    sick = [site.busy()[k] for k in (1, -1)]
    spoilt = site.learn(
        1.5, [(0.1, "inject", "thermal", sick[0]), (0.1, "inject", "mem-clock", sick[1])]
    )
    return site, first, second, spoilt, sick


def test_the_next_quiet_stretch_is_adopted(lived):
    _, first, second, *_ = lived
    assert second.refused == ()
    assert second.comparison["with"] == first.bundle.id
    for figures in second.comparison["models"].values():
        assert figures["over_edge"] < 0.01
        assert figures["stay"] > 0.8


def test_a_spoilt_stretch_is_refused_in_words_and_the_last_stays(lived):
    site, _, second, spoilt, sick = lived
    assert any("calls normal what was abnormal until now on" in r for r in spoilt.refused)
    assert any(uuid in " ".join(spoilt.refused) for uuid in sick)
    assert site.in_use().id == second.bundle.id
    kept = json.loads((site.folder / f"{spoilt.bundle.id}.json").read_text())
    assert kept["refused"] == list(spoilt.refused)
    assert bundles.newest_refusal(site.folder).id == spoilt.bundle.id


def test_however_many_are_refused_the_one_in_use_is_never_pruned(lived):
    site, _, second, _, _ = lived
    bundles.prune(site.folder, keep=1)
    assert site.in_use().id == second.bundle.id


def test_the_daemon_shows_what_it_refused(lived):
    site, _, second, spoilt, _ = lived
    daemon = Daemon(site.config, clock=lambda: site.now_s)
    try:
        daemon._load_bundle(at_start=True)
        daemon.tick()  # blind: Prometheus does not answer
        shown = views.status(daemon.snapshot(), site.now_s)
        assert shown.bundle.id == second.bundle.id
        assert shown.bundle.refused.id == spoilt.bundle.id
        assert shown.bundle.refused.reasons == list(spoilt.refused)
        assert shown.budget.certified
    finally:
        daemon.close()


def test_a_bundle_learnt_by_hand_counts_at_the_next_housekeeping(tmp_path):
    site = Site(tmp_path / "site", hosts=2)
    daemon = Daemon(site.config, clock=lambda: site.now_s)
    try:
        daemon.tick()
        assert views.status(daemon.snapshot(), site.now_s).bundle is None
        assert "no baseline" in views.status(daemon.snapshot(), site.now_s).budget.why
        made = site.learn(1 / 3)
        daemon.housekeep()
        daemon.tick()
        assert views.status(daemon.snapshot(), site.now_s).bundle.id == made.bundle.id
    finally:
        daemon.close()


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    site = Site(tmp_path_factory.mktemp("fresh") / "site", hosts=2)
    return site, site.learn(1 / 3)


class TestColdStart:
    def test_twenty_minutes_are_a_baseline_that_makes_tickets_only(self, fresh):
        _, made = fresh
        known = made.bundle.calibration
        assert made.refused == ()
        assert made.bundle.cohorts
        assert not known.certified
        assert "of the 1 GPU-days" in known.why
        assert (known.ticket_score, known.page_score) == (1.0, 1.3)

    @pytest.mark.parametrize(("minutes", "again"), [(1, False), (9, False), (11, True), (60, True)])
    def test_it_is_learnt_anew_as_soon_as_there_is_half_as_much_again(self, fresh, minutes, again):
        site, made = fresh
        now_s = made.bundle.learnt_to_s + 60.0 * minutes
        assert history.soon_again(site.config, made.bundle, now_s) is again
        assert not history.soon_again(site.config, made.bundle, now_s, tried_s=now_s)

    def test_without_any_it_is_tried_at_once(self, fresh):
        assert history.soon_again(fresh[0].config, None, 0.0)

    def test_a_whole_window_waits_for_its_turn(self, fresh):
        site, made = fresh
        whole = made.bundle.__class__(
            "b", {}, 60.0, 0.0, 0.0, {"span_s": 3600.0 * site.config.learn.every_h}
        )
        assert not history.soon_again(site.config, whole, 1e9)


def test_the_first_minutes_are_no_measure_of_a_whole_day(tmp_path):
    """What knew next to nothing does not hold up what knows more, even if its edge lay closer."""
    site = Site(tmp_path / "site", hosts=2)
    site.learn(1 / 3)
    longer = site.learn(1.5)
    assert longer.refused == ()
    assert any("is no measure" in note for note in longer.comparison["notes"])


def test_a_metric_that_has_gone_missing_holds_a_bundle_up(tmp_path, monkeypatch):
    site = Site(tmp_path / "site", hosts=2)
    site.learn(0.75)
    plain = LabHistory.history

    def without_clock(self, *given, **kw):
        for samples in plain(self, *given, **kw):
            names = np.array([key.name for key in samples.keys])
            keep = names[samples.series] != "DCGM_FI_DEV_SM_CLOCK"
            yield samples.__class__(
                samples.at_s,
                samples.keys,
                samples.series[keep],
                samples.times_s[keep],
                samples.values[keep],
            )

    monkeypatch.setattr(LabHistory, "history", without_clock)
    refused = site.learn(0.75)
    assert any("sm_clock is missing from 100%" in reason for reason in refused.refused)
    forced = site.learn(0.75, force=True)
    assert forced.refused == ()
    assert site.in_use().id == forced.bundle.id


def test_the_report_is_one_page_that_asks_nobody(lived):
    site, _, _, spoilt, _ = lived
    told = json.loads(json.dumps(history.plain(spoilt, site.config)))
    assert told["adopted"] is False
    page = learnpage.page(told)
    assert page.startswith("<!doctype html>")
    assert "http://" not in page
    assert "https://" not in page
    assert "<script" not in page
    for word in ("Not adopted", "How often normal time would alert", "silhouette", "stays"):
        assert word in page
    for cohort in told["cohorts"]:
        assert cohort["model"] in page
        assert cohort["coverage"]["power"] == 1.0
        assert sum(r["share"] for r in cohort["regimes"]) <= 1.0 + 1e-9


def test_learn_writes_the_page_and_ends_with_a_finding_where_it_refuses(tmp_path, monkeypatch):
    site = Site(tmp_path / "site", hosts=2)
    monkeypatch.setattr(history, "connect", lambda config: LabHistory(site.fleet, STEP_S))

    def learn(*more):
        start_s, end_s = site.now_s, site.now_s + 0.5 * HOUR_S
        site.now_s = end_s + STEP_S
        span = ["--start", f"{start_s}", "--end", f"{end_s}"]
        argv = ["learn", "--config", str(site.path), *span, *more]
        return CliRunner().invoke(cli, argv, standalone_mode=False)  # as main() does

    page = tmp_path / "report.html"
    done = learn("--html", str(page))
    assert done.return_value == 0, done.output
    assert "not certified: it rests on" in done.output
    assert "soft evidence makes tickets" in done.output
    assert "What normal looks like" in page.read_text()
    row = next(r for r, job in enumerate(site.fleet.workload.job_of) if job)
    site.fleet.inject("mem-clock", site.fleet.gpus[row].uuid)
    done = learn("--json")
    assert done.return_value == 1, done.output
    told = json.loads(done.stdout)
    assert told["adopted"] is False
    assert any(site.fleet.gpus[row].uuid in reason for reason in told["refused"])
    assert "NOT ADOPTED" in learn().output


def test_learn_says_what_is_wrong_where_nothing_answers(tmp_path):
    site = Site(tmp_path / "site")
    done = CliRunner().invoke(cli, ["learn", "--config", str(site.path), "--html", "x.html"])
    assert done.exit_code != 0
    assert not (tmp_path / "x.html").exists()
