"""The doctor before real servers: what it finds out of each fleet, and of what stands around it."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
import requests

from sentinel.config import Config
from sentinel.doctor.examine import examine
from sentinel.doctor.report import Severity
from sentinel.edges.store import Store
from sentinel.lab import servers
from tests.doctor import site
from tests.doctor.fleets import A100, DEFAULT, MORE, Target, dcgm, mig, nothing, smi

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
FULL = DEFAULT | MORE
FLEETS = {
    "default": [Target("gpu-01:9400", dcgm(1)), Target("gpu-02:9400", dcgm(2))],
    "full": [Target(f"gpu-{n}:9400", dcgm(n, FULL)) for n in (11, 12)],
    "mig": [Target(f"10.0.2.{n}:9400", mig(n, host=f"dcgm-exporter-x{n}k7")) for n in (21, 22)],
    "smi": [Target(f"gpu-{n}:9835", smi(n)) for n in (31, 32)],
    "down": [
        Target("gpu-41:9400", dcgm(41, FULL)),
        Target("gpu-42:9400", None),
        Target("gpu-43:9400", nothing),
    ],
    "localhost": [Target("10.0.5.1:9400", dcgm(51, FULL, host="localhost"))],
    "ahead": [Target("gpu-61:9400", dcgm(61, FULL), ahead_s=90.0)],
    "twice-a": [Target("gpu-71:9400", dcgm(71, FULL))],
    "twice-b": [Target("gpu-71:9400", dcgm(71, FULL))],
    "gpu-slow": [Target("gpu-81:9400", dcgm(81, FULL), delay_s=3.3)],
    'odd "job" (1+1)\\': [Target("gpu-91:1234", dcgm(91, FULL)), Target("gpu-92:1234", None)],
    "others": [Target("web-1:9100", lambda at_s: iter([("http_requests", {}, 1.0)]))],
    "gpu-sentinel": [
        Target(
            "127.0.0.1:9477",
            lambda at_s: iter([("sentinel_build_info", {"version": "0.1.0"}, 1.0)]),
        )
    ],
}


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory):
    """One Prometheus that scrapes every fleet, as a job each, and has our rules."""
    folder = tmp_path_factory.mktemp("prometheus")
    rules = [ROOT / "rules" / "sentinel.rules.yaml"]
    with site.prometheus(FLEETS, folder, rule_files=rules) as server:
        yield server.url


@pytest.fixture
def look(prometheus, tmp_path):
    """Looks at one fleet, and gives what there is to be done by its code."""

    def at(selector="", more="", url=prometheus, **options):
        matchers = f"{{{selector}}}" if selector else ""
        text = f"prometheus: {{url: '{url}', selector: '{matchers}'}}\n" + more
        for section, content in (
            ("alertmanager:", "alertmanager: {urls: []}\n"),
            ("http:", f'http: {{listen: "127.0.0.1:{servers.free_port()}"}}\n'),
        ):
            text += content if f"\n{section}" not in text else ""
        found = examine(Config.parse(text, tmp_path / "sentinel.yaml"), **options)
        by_code = {f.code: f for f in found.findings}
        bad = {code for code, f in by_code.items() if f.severity is not Severity.OK}
        # of a history of seconds, and without Alertmanagers: not what these tests are about
        bad -= {"history-short", "baseline-none", "alertmanager-none"}
        return SimpleNamespace(report=found, facts=found.facts, bad=bad, by=by_code)

    return at


def job(name):
    return f'job="{name}"'


def comes_to(look, exit_code, *of, within_s=30.0):
    """Looks until it ends with this code: on a busy machine a scrape may miss its second."""
    deadline = time.monotonic() + within_s
    while (seen := look(*of)).report.exit_code != exit_code:
        assert time.monotonic() < deadline, [(f.code, f.what) for f in seen.report.to_do]
        time.sleep(0.5)
    return True


# ---- fleets -------------------------------------------------------------------------


def test_the_default_list_lacks_hard_evidence_and_its_lines_are_given(look):
    seen = look(job("default"))
    assert seen.bad == {"hard-evidence-missing", "metrics-missing"}
    assert (seen.report.exit_code, seen.report.can_work) == (0, True)
    fleet = seen.facts.fleet
    assert (fleet.gpus, fleet.reporting, fleet.naming.first) == (16, 16, ("gpu-01", "gpu-02"))
    assert fleet.exporters[0].interval_s == pytest.approx(1.0, abs=0.2)
    (block,) = seen.report.blocks
    assert block.lines[0] == "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL, counter, uncorrectable ECC errors"
    fields = {line.partition(",")[0] for line in block.lines}
    assert fields.isdisjoint(DEFAULT)
    assert {"DCGM_FI_DEV_ROW_REMAP_PENDING", "DCGM_FI_PROF_SM_ACTIVE"} <= fields


def test_the_lines_that_are_given_are_the_ones_that_help(look):
    """Whoever adds them all is asked for nothing more."""
    (block,) = look(job("default")).report.blocks
    asked = {line.partition(",")[0] for line in block.lines}
    assert asked - set(FULL) == {"DCGM_FI_DEV_ECC_DBE_AGG_TOTAL"}  # spared by the volatile one
    assert look(job("full")).report.blocks == ()


def test_the_full_list_lacks_nothing(look):
    seen = look(job("full"))
    assert seen.bad == set()
    assert seen.report.exit_code == 0
    assert seen.facts.fleet.verdicts == {"normal": 16}
    assert seen.facts.fleet.work.jobs == 2
    assert seen.report.summary.startswith("The daemon can work: 16 of 16 GPUs on 2 nodes report")


def test_mig_is_one_gpu_each_named_by_pods_that_come_and_go(look):
    seen = look(job("mig"))
    assert [(m.name, m.gpus, m.mig) for m in seen.facts.fleet.models] == [(A100, 4, 4)]
    assert {"names-pods", "hard-evidence-missing", "work-unnamed"} <= seen.bad
    (util,) = [m for m in seen.facts.fleet.metrics if m.name == "gpu_util_ratio"]
    assert util.able == 0
    assert seen.report.exit_code == 0
    act = 'mode: act\nhook: {url: "http://127.0.0.1:9/x", secret_file: s}\n'
    assert look(job("mig"), act).by["names-pods"].exit_code == 1


def test_nvidia_gpu_exporter_lacks_xids_and_names(look):
    seen = look(job("smi"))
    assert {"hard-evidence-missing", "names-addresses", "work-unnamed"} <= seen.bad
    assert seen.facts.fleet.exporters[0].kind == "nvidia_gpu_exporter"
    steps = " ".join(seen.by["hard-evidence-missing"].do)
    assert "--collect.backend=nvml" in steps
    assert seen.report.exit_code == 0
    rewrite = next(s for s in seen.by["names-addresses"].do if s.startswith(" identity"))
    again = look(job("smi"), rewrite.strip() + "\n")
    assert again.facts.fleet.naming.first == ("gpu-31", "gpu-32")
    assert "names-addresses" not in again.bad


def test_an_empty_prometheus_is_told_how_to_begin(look, tmp_path):
    with servers.prometheus(tmp_path / "empty") as server:
        seen = look(url=server.url)
    assert seen.bad == {"no-gpus", "rules-missing", "daemon-not-scraped"}
    assert (seen.report.exit_code, seen.report.can_work) == (1, False)
    assert any("scrape_configs" in step for step in seen.by["no-gpus"].do)


def test_a_selector_that_matches_nothing_is_told_what_would(look):
    seen = look(job("dcgm-exporter"))
    finding = seen.by["no-gpus"]
    assert "selector" in finding.what
    assert "full" in seen.facts.elsewhere.by_job
    assert look(job("full")).facts.elsewhere is None


def test_an_exporter_that_is_down_and_one_that_shows_nothing(look):
    seen = look(job("down"))
    down, empty = seen.by["targets-down"], seen.by["targets-empty"]
    assert "1 of 3" in down.what
    assert "gpu-42:9400" in down.what
    assert "gpu-43:9400" in empty.what
    assert seen.report.exit_code == 1  # below limits.coverage_percent
    assert comes_to(look, 0, job("down"), "limits: {coverage_percent: 50}\n")
    # what is down elsewhere is not the business of this selector
    assert "targets-down" not in look(job("full")).bad


def test_a_host_that_calls_itself_localhost(look):
    seen = look(job("localhost"))
    assert seen.bad == {"names-localhost"}
    assert "10.0.5.1:9400" in seen.by["names-localhost"].what


def test_one_exporter_under_two_jobs(look):
    seen = look('job=~"twice-."')
    assert seen.bad == {"scraped-twice"}
    assert seen.facts.fleet.gpus == 8
    assert " prometheus: {selector: '{job=\"twice-a\"}'}" in seen.by["scraped-twice"].do


def test_a_slow_exporter_is_told_before_it_fails(look):
    assert "scrape-slow" in look(job("gpu-slow")).bad


def test_an_exporter_whose_clock_is_ahead(look):
    seen = look(job("ahead"))
    assert "exporter-clock" in seen.bad or "no-gpus" in seen.bad
    assert seen.report.exit_code == 1


def test_a_selector_by_a_label_that_no_scrape_has(look):
    seen = look('Hostname=~"gpu-9."')
    assert seen.bad == {"up-missing", "targets-down"}
    assert [t.instance for t in seen.facts.prometheus.targets] == ["gpu-91:1234", "gpu-92:1234"]


# ---- clocks -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours_s", "works", "exit_code"),
    [(120.0, False, 1), (-120.0, True, 1), (0.0, True, 0)],
    ids=["ahead", "behind", "right"],
)
def test_our_clock_is_wrong(look, ours_s, works, exit_code):
    seen = look(job("full"), clock=lambda: time.time() + ours_s)
    assert (seen.report.can_work, seen.report.exit_code) == (works, exit_code)
    assert ("clock-skew" in seen.bad) == (ours_s != 0)
    assert seen.facts.prometheus.skew_s == pytest.approx(-ours_s, abs=0.5)
    assert seen.facts.fleet.gpus == 16  # by the server's clock the fleet is described all the same


# ---- other backends -----------------------------------------------------------------


def test_victoria_metrics_is_known_by_itself(look, tmp_path):
    jobs = {name: FLEETS[name] for name in ("full", "down")}
    with (
        site.exporters(jobs) as address,
        servers.victoria_metrics(
            tmp_path / "vm",
            site.scrape_configs(jobs, address),
            options=("-search.latencyOffset=0s",),
        ) as server,
    ):
        site.wait_until_scraped(server.url, 5)
        seen = look(url=server.url)
        full = look(job("full"), url=server.url)
    assert seen.facts.prometheus.kind == "VictoriaMetrics"
    assert seen.facts.prometheus.retention == "10y"
    assert abs(seen.facts.prometheus.skew_s) < 5.0  # its answers are late, its clock is not wrong
    assert "gpu-42:9400" in seen.by["targets-down"].what
    assert "gpu-43:9400" in seen.by["targets-empty"].what
    assert full.bad == {"rules-missing", "daemon-not-scraped"}
    assert full.facts.fleet.gpus == 16
    assert full.report.exit_code == 0


@contextmanager
def querier(behind):
    """What stands before many stores: queries alone, one store of them missing."""

    class Querier(BaseHTTPRequestHandler):
        def do_GET(self, body=None):
            if not self.path.startswith("/api/v1/query"):
                self.answer(404, b"404 page not found")
                return
            headers = {"Content-Type": self.headers.get("Content-Type", "")}
            done = requests.request(
                self.command, behind + self.path, data=body, headers=headers, timeout=10
            )
            partial = done.json() | {"warnings": ["no StoreAPIs matched: store-2 is gone"]}
            self.answer(done.status_code, json.dumps(partial).encode())

        def do_POST(self):
            self.do_GET(self.rfile.read(int(self.headers["Content-Length"])))

        def answer(self, status, body):
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Querier)
    server.daemon_threads = True
    Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def test_a_querier_that_has_queries_alone(look, prometheus):
    with querier(prometheus) as url:
        seen = look(job("full"), url=url)
    assert seen.bad == {"answer-partial", "not-found-out"}
    assert seen.report.exit_code == 1
    assert seen.facts.fleet.gpus == 16
    assert len(seen.facts.prometheus.targets) == 2  # by `up`, for want of a list
    assert seen.facts.watchers.rules is None  # not: there are none
    assert set(seen.facts.prometheus.unknown) == {"build", "runtime"}


# ---- around it ----------------------------------------------------------------------


@contextmanager
def alertmanager(folder, config):
    with servers.alertmanager(folder, config) as server:
        yield server.url


def test_an_alertmanager_that_tells_nobody(look, tmp_path):
    with alertmanager(tmp_path / "a", site.NOBODY) as one:
        seen = look(job("full"), f'alertmanager: {{urls: ["{one}"]}}\n')
    assert seen.bad == {"nobody-told"}
    assert seen.report.exit_code == 1
    assert seen.report.can_work


def test_alertmanagers_one_of_which_is_down(look, tmp_path):
    gone = f"http://127.0.0.1:{servers.free_port()}"
    with alertmanager(tmp_path / "a", site.SOMEBODY) as one:
        seen = look(job("full"), f'alertmanager: {{urls: ["{one}", "{gone}"]}}\n')
    assert seen.bad == {"alertmanager-unreachable"}
    assert seen.report.exit_code == 3
    first, second = seen.facts.alertmanagers
    assert [(r.severity, r.receivers, r.told) for r in first.routes] == [
        ("critical", ("pager",), True),
        ("warning", ("tickets",), True),
    ]
    assert first.skew_s == 0.0
    assert second.trouble == "connection refused"


def test_the_rules_and_the_daemon_that_is_scraped_are_seen(look):
    seen = look(job("full"))
    assert "SentinelDown" in seen.facts.watchers.rules
    assert seen.facts.watchers.scraped == ("127.0.0.1:9477",)


def test_a_prometheus_that_is_down(look):
    seen = look(url=f"http://127.0.0.1:{servers.free_port()}")
    assert seen.bad == {"prometheus-unreachable"}
    assert seen.report.exit_code == 3


def test_a_state_folder_that_another_daemon_holds(look, tmp_path):
    store = Store.open(dir=tmp_path / "state")
    try:
        seen = look(job("full"))
    finally:
        store.close()
    assert seen.bad == {"state-held"}
    assert not seen.report.can_work
