"""What is said of what was seen: one row per finding, from a site at which all is well."""

from dataclasses import replace

import pytest

from sentinel.doctor import facts
from sentinel.doctor.report import SECTIONS, Severity
from tests.doctor.seen import (
    ALERTMANAGER,
    FACTS,
    FLEET,
    HOOK,
    MODEL,
    NOW_S,
    STATE,
    alertmanager,
    config,
    doubles,
    findings,
    fleet,
    naming,
    prometheus,
    pull,
    report,
    targets,
    without,
)

ACT = 'mode: act\nhook: {url: "http://127.0.0.1:9999/migrate"}\n'
OK, ADVICE, PROBLEM, UNKNOWN = Severity
DAY_S = 86_400.0


def state(**changes):
    return replace(FACTS, state=replace(STATE, **changes))


def listen(*what, **more):
    return replace(FACTS, listen=facts.Listen("127.0.0.1:9477", *what, **more))


def hook(**changes):
    return replace(FACTS, hook=replace(HOOK, **changes))


def models(*rows):
    return fleet(models=tuple(facts.Model(*row) for row in rows))


def baseline(*what):
    return replace(FACTS, baseline=facts.Baseline(*what))


def metrics(**changes):
    """Every metric changed alike."""
    return fleet(metrics=tuple(replace(m, **changes) for m in FLEET.metrics))


def exporter(**changes):
    return fleet(exporters=(replace(FLEET.exporters[0], **changes),))


NONE = facts.Fleet()
NO_GPU = replace(FACTS, fleet=NONE)

# what was seen, the configuration, the finding, its severity, exit code, whether it stops all
CASES = [
    # Prometheus
    (prometheus(trouble="Prometheus at http://x: cannot be reached; is it running?"), "",
     "prometheus-unreachable", PROBLEM, 3, True),
    (prometheus(skew_s=60.0), "", "clock-skew", PROBLEM, 1, False),  # we are behind: old news
    (prometheus(skew_s=-20.0), "", "clock-skew", PROBLEM, 1, False),
    (prometheus(skew_s=-31.0), "", "clock-skew", PROBLEM, 1, True),  # we see nothing at all
    (prometheus(skew_s=2.0), "", "clock-skew", ADVICE, 0, False),
    (pull(again_s=7.0), "", "query-slow", ADVICE, 0, False),
    (pull(again_s=13.0), "", "query-slow", PROBLEM, 1, True),
    (pull(bytes_about=250_000_000), "", "answer-large", ADVICE, 0, False),
    (replace(FACTS, prometheus=replace(FACTS.prometheus, limits={"query.max-samples": "2000"})),
     "", "query-limit", ADVICE, 0, False),
    (pull(partial=True, warnings=("no store matched",)), "", "answer-partial", PROBLEM, 1, False),
    (pull(warnings=("PromQL info: metric might not be a counter",)), "", "answer-warnings",
     ADVICE, 0, False),
    (prometheus(retention="6h", retention_s=21_600.0), "", "retention-short", ADVICE, 0, False),
    (prometheus(reach_s=7200.0), "", "history-short", ADVICE, 0, False),
    (prometheus(reach_s=3.0), "", "history-short", ADVICE, 0, False),
    (prometheus(gap_share=0.3), "", "history-gaps", ADVICE, 0, False),
    (prometheus(config_ok=False), "", "prometheus-configuration", PROBLEM, 0, False),
    (prometheus(certificate_ends_s=NOW_S + DAY_S), "", "certificate-ends", ADVICE, 0, False),
    (prometheus(certificate_ends_s=NOW_S - DAY_S), "", "certificate-ends", PROBLEM, 0, False),
    (prometheus(unknown={"runtime": "HTTP 404"}), "", "not-found-out", UNKNOWN, 0, False),
    (fleet(trouble="Prometheus at http://x: too many samples; raise limits"), "",
     "history-unreadable", PROBLEM, 3, True),
    # exporters
    (prometheus(targets=targets({"up": False, "error": "connection refused"})), "",
     "targets-down", PROBLEM, 0, False),
    (prometheus(targets=targets(*[{"up": False}] * 3)), "", "targets-down", PROBLEM, 1, False),
    (prometheus(targets=targets(*[{"up": False}] * 3)), "limits: {coverage_percent: 70}",
     "targets-down", PROBLEM, 0, False),
    (prometheus(targets=targets({"samples": 0})), "", "targets-empty", PROBLEM, 0, False),
    (prometheus(targets=targets(*[{"samples": 0}] * 10)), "", "targets-empty", PROBLEM, 1, False),
    (prometheus(targets=targets({"duration_s": 9.4})), "", "scrape-slow", PROBLEM, 0, False),
    (prometheus(targets=targets({"duration_s": 8.5, "timeout_s": None})), "", "scrape-slow",
     PROBLEM, 0, False),
    (exporter(interval_s=30.0), "", "window-short", ADVICE, 0, False),
    (exporter(interval_s=60.0), "", "window-short", PROBLEM, 1, False),
    (exporter(interval_s=120.0), "", "window-short", PROBLEM, 1, False),
    (exporter(interval_s=60.0), "prometheus: {url: 'http://x', window_s: 300}", "scraped-rarely",
     ADVICE, 0, False),
    (fleet(ahead=2, ahead_max_s=3.0), "", "exporter-clock", ADVICE, 0, False),
    (fleet(ahead=2, ahead_max_s=120.0), "", "exporter-clock", PROBLEM, 0, False),
    (fleet(ahead=2, ahead_max_s=120.0, reporting=0), "", "exporter-clock", PROBLEM, 1, False),
    (fleet(up_seen=False), "", "up-missing", ADVICE, 0, False),
    (doubles(by_targets=8, example=("a/x:9400", "b/x:9400"), jobs=("a", "b"), same_exporter=True),
     "", "scraped-twice", ADVICE, 0, False),
    (doubles(by_targets=8, example=("a/x:9400", "b/x:9835"), jobs=("a", "b")), "", "shown-twice",
     ADVICE, 0, False),
    (doubles(replicas={"prometheus_replica": ("a", "b")}), "", "replicas", ADVICE, 0, False),
    (doubles(shared=4), "", "time-slicing", OK, 0, False),
    # names
    (naming(looks={"localhost": 1}, examples={"localhost": "localhost"}), "", "names-localhost",
     PROBLEM, 1, False),
    (naming(hidden_by="Hostname=localhost", looks={"address": 10}), "", "names-localhost",
     ADVICE, 0, False),
    (naming(hidden_by="Hostname=localhost"), ACT, "names-localhost", PROBLEM, 1, False),
    (naming(looks={"pod": 3}, examples={"pod": "nvidia-dcgm-exporter-x1k7w"}), "", "names-pods",
     PROBLEM, 0, False),
    (naming(looks={"pod": 3}, examples={"pod": "nvidia-dcgm-exporter-x1k7w"}), ACT, "names-pods",
     PROBLEM, 1, False),
    (naming(looks={"container": 1}, examples={"container": "0123456789ab"}), "",
     "names-containers", PROBLEM, 0, False),
    (naming(looks={"address": 2}, examples={"address": "gpu-01:9400"}), "", "names-addresses",
     ADVICE, 0, False),
    (naming(looks={"address": 2}, examples={"address": "gpu-01:9400"}), ACT, "names-addresses",
     PROBLEM, 1, False),
    (naming(looks={"fqdn": 10}, examples={"fqdn": "gpu-01.example.net"}), ACT, "names-domains",
     ADVICE, 0, False),
    (naming(exported=("exported_pod",)), "", "labels-exported", OK, 0, False),
    # GPUs
    (NO_GPU, "", "no-gpus", PROBLEM, 1, True),
    (replace(NO_GPU, prometheus=replace(FACTS.prometheus, targets=targets(*[{"up": False}] * 10))),
     "", "targets-down", PROBLEM, 1, True),
    (fleet(reporting=0, presence={"host_silent": 80}), "", "all-silent", PROBLEM, 1, True),
    (fleet(reporting=72, presence={"present": 72, "host_silent": 8}), "", "gpus-silent", PROBLEM,
     0, False),
    (fleet(reporting=60, presence={"present": 60, "host_silent": 20}), "", "gpus-silent", PROBLEM,
     1, False),
    (fleet(presence={"present": 79, "vanished": 1}), "", "gpus-vanished", PROBLEM, 0, False),
    (fleet(presence={"present": 79, "frozen": 1}), "", "gpus-frozen", PROBLEM, 0, False),
    (models(("", "", 80, 10)), "", "model-nameless", ADVICE, 0, False),
    (models(("NVIDIA X9000", "", 80, 10)), "", "model-unknown", ADVICE, 0, False),
    (models(("GRID A100-8C", "", 80, 10, (), 0, 80)), "", "gpus-virtual", ADVICE, 0, False),
    (models((MODEL, "H100 SXM", 80, 10, (), 0, 0, 80)), "", "uuid-masked", ADVICE, 0, False),
    (models((MODEL, "H100 SXM", 79, 10, (), 0, 0, 0, (), 8, {"gpu-03": 7})), "", "gpus-fewer",
     PROBLEM, 0, False),
    (models((MODEL, "H100 SXM", 78, 10), ("NVIDIA L4", "L4", 2, 1)), "", "peers-few", ADVICE, 0,
     False),
    # metrics
    (without("xid", "ecc_dbe_volatile"), "", "hard-evidence-missing", ADVICE, 0, False),
    (without("tensor_active_ratio", "throttle_reasons"), "", "metrics-missing", ADVICE, 0, False),
    (without("temp_c", "power_w", "sm_clock_mhz"), "", "metrics-core-missing", PROBLEM, 1, False),
    (metrics(present=0, blank=80), "", "metrics-blank", ADVICE, 0, False),
    (fleet(idle_profiling=3), "", "profiling-zero", PROBLEM, 0, False),
    (fleet(energy_still=3), "", "energy-still", ADVICE, 0, False),
    (fleet(rejected={"future": 12, "blank": 900}), "", "samples-rejected", ADVICE, 0, False),
    (fleet(rejected={"out of range": 12, "blank": 900}), "", "samples-rejected", OK, 0, False),
    # what the daemon makes of it
    (fleet(worst=("gpu-01 GPU 3: fault, Xid 79",)), "", "verdicts-bad", ADVICE, 0, False),
    (fleet(work=facts.Work(0, 0, 0, 70, 70)), "", "work-unnamed", ADVICE, 0, False),
    (baseline(), "", "baseline-none", ADVICE, 0, False),
    (baseline("", 0.0, (), ("x.json: schema 9",)), "", "baseline-unusable", PROBLEM, 1, True),
    (baseline("b", NOW_S - 8 * DAY_S, (MODEL,)), "", "baseline-old", ADVICE, 0, False),
    (baseline("b", NOW_S - 10.0, ("Tesla T4",)), "", "baseline-models", ADVICE, 0, False),
    # Alertmanagers
    (replace(FACTS, alertmanagers=()), "", "alertmanager-none", ADVICE, 0, False),
    (alertmanager(trouble="connection refused"), "", "alertmanager-unreachable", PROBLEM, 3,
     False),
    (alertmanager(routes=(facts.Route("critical", ("null",), False),
                          facts.Route("warning", ("null",), False))), "", "nobody-told", PROBLEM,
     1, False),
    (alertmanager(routes=(facts.Route("critical", ("pager",), True),
                          facts.Route("warning", ("null",), False))), "", "nobody-told", PROBLEM,
     0, False),
    (alertmanager(cluster="settling"), "", "alertmanager-cluster", ADVICE, 0, False),
    (alertmanager(skew_s=-90.0), "", "clock-skew", ADVICE, 0, False),
    (alertmanager(certificate_ends_s=NOW_S + 60.0), "", "certificate-ends", ADVICE, 0, False),
    (alertmanager(routes=None, unknown={"routes": "not shown"}), "", "not-found-out", UNKNOWN, 0,
     False),
    # hook
    (replace(FACTS, hook=None), "", "hook-none", OK, 0, False),
    (hook(trouble="connection refused", status=None), "", "hook-unreachable", ADVICE, 0, False),
    (hook(trouble="connection refused", status=None), ACT, "hook-unreachable", PROBLEM, 3, False),
    (hook(speaks=False), ACT, "hook-page", ADVICE, 0, False),
    (hook(status=401), ACT, "hook-refuses", PROBLEM, 1, False),
    (hook(status=200), ACT, "hook-invents", PROBLEM, 1, False),
    (hook(status=200), "", "hook-invents", ADVICE, 0, False),
    (hook(status=500), ACT, "hook-fails", PROBLEM, 1, False),
    (hook(url="http://scheduler.example.net/migrate"), ACT, "hook-plain", ADVICE, 0, False),
    (hook(skew_s=400.0), ACT, "clock-skew", PROBLEM, 1, False),
    (hook(skew_s=30.0), ACT, "clock-skew", ADVICE, 0, False),
    # this host
    (state(trouble="/var cannot be written by this user"), "", "state-unwritable", PROBLEM, 1,
     True),
    (state(schema=9), "", "store-unreadable", PROBLEM, 1, True),
    (state(store_trouble="file is not a database", schema=None), "", "store-unreadable", PROBLEM,
     1, True),
    (replace(state(held_by_pid=77), listen=facts.Listen("127.0.0.1:9477")), "", "state-held",
     PROBLEM, 1, True),
    (state(free_bytes=500 << 20), "", "disk-full", ADVICE, 0, False),
    (state(free_bytes=1 << 20), "", "disk-full", PROBLEM, 1, False),
    (listen("free"), "", "port-free", OK, 0, False),
    (listen("ours", "9.9.9", True), "", "daemon-version", ADVICE, 0, False),
    (listen("ours", "", False), "", "daemon-not-ready", PROBLEM, 1, False),
    (listen("taken", trouble="it answers HTTP 404"), "", "port-taken", PROBLEM, 1, True),
    (listen("wrong", trouble="cannot assign requested address"), "", "port-wrong", PROBLEM, 2,
     True),
    (replace(FACTS, secrets=(facts.Secret("hook.secret_file", "/etc/hook.secret", "644"),)), "",
     "secret-readable", ADVICE, 0, False),
    # watchers
    (replace(FACTS, watchers=facts.Watchers((), ("x",))), "", "rules-missing", ADVICE, 0, False),
    (replace(FACTS, watchers=facts.Watchers(("x",), ())), "", "daemon-not-scraped", ADVICE, 0,
     False),
    (replace(listen("free"), watchers=facts.Watchers(("x",), (), ("gpu-head:9477",))), "",
     "daemon-targeted", OK, 0, False),
    (replace(FACTS, watchers=facts.Watchers(None, ("x",), (), {"rules": "HTTP 404"})), "",
     "not-found-out", UNKNOWN, 0, False),
    # not found out
    (replace(FACTS, fleet=None, unfinished={"fleet": "no answer within 60 s"}), "",
     "fleet-unread", PROBLEM, 1, False),
    (replace(FACTS, state=None, unfinished={"state": "no answer within 60 s"}), "",
     "not-found-out", UNKNOWN, 0, False),
    (replace(FACTS, state=None, unfinished={
        "state": "internal error, please report it (KeyError at doctor/x.py:1: 'a')"}), "",
     "not-found-out", UNKNOWN, 70, False),
]  # fmt: skip


def settings(text):
    if text.startswith("prometheus:"):
        return config().__class__.parse(text, config().path)
    return config(text)


def test_nothing_is_to_be_done_where_all_is_well():
    found = report(FACTS)
    assert [f for f in found.findings if f.severity is not OK] == []
    assert (found.exit_code, found.can_work) == (0, True)
    assert found.summary == (
        "The daemon can work: 80 of 80 GPUs on 10 nodes report; nothing to do."
    )


@pytest.mark.parametrize(
    ("seen", "text", "code", "severity", "exit_code", "stops"),
    CASES,
    ids=[f"{i}-{case[2]}" for i, case in enumerate(CASES)],
)
def test_each_finding(seen, text, code, severity, exit_code, stops):
    found = [f for f in findings(seen, settings(text)) if f.code == code]
    assert len(found) == 1
    (finding,) = found
    assert (finding.severity, finding.exit_code, finding.stops) == (severity, exit_code, stops)
    assert finding.section in SECTIONS
    assert finding.what
    assert severity is not PROBLEM or (finding.why and finding.do)


def test_every_row_adds_its_own_finding_and_what_follows_from_it_alone():
    well = {f.code for f in findings(FACTS)}
    for seen, text, code, severity, _, _ in CASES:
        bad = {
            f.code
            for f in findings(seen, settings(text))
            if f.severity in (PROBLEM, ADVICE) and f.code != code
        }
        assert severity is OK or code not in well or code == "not-found-out"
        if code in ("no-gpus", "targets-down", "targets-empty", "all-silent", "query-slow",
                    "exporter-clock", "metrics-core-missing", "metrics-blank"):  # fmt: skip
            continue
        assert len(bad) <= 1, (code, bad)


def test_nothing_is_said_of_what_would_have_been_read_from_a_prometheus_that_is_gone():
    seen = replace(
        prometheus(trouble="cannot be reached; is it running?", pull=None),
        fleet=None,
        watchers=facts.Watchers(None, None, (), {"rules": "refused", "scraped": "refused"}),
    )
    bad = [f.code for f in findings(seen) if f.severity is not OK]
    assert bad == ["prometheus-unreachable"]


@pytest.mark.parametrize(
    ("elsewhere", "text", "words"),
    [
        (facts.Elsewhere({"gpu-metrics": 40}), "prometheus: {url: 'http://x', selector: "
         "'{job=\"dcgm\"}'}", ("gpu-metrics", "selector")),
        (facts.Elsewhere({}, ("acme_gpu_heat",)), "", ("acme_gpu_heat",)),
        (facts.Elsewhere(), "", ("scrape_configs", "dcgm-exporter")),
    ],
)  # fmt: skip
def test_where_there_is_no_gpu_the_likeliest_cause_is_told(elsewhere, text, words):
    seen = replace(NO_GPU, elsewhere=elsewhere)
    (finding,) = [f for f in findings(seen, settings(text)) if f.code == "no-gpus"]
    for word in words:
        assert word in " ".join([finding.what, *finding.do])


def test_the_cause_of_an_empty_fleet_is_told_first():
    seen = replace(
        NO_GPU, prometheus=replace(FACTS.prometheus, targets=targets(*[{"samples": 0}] * 10))
    )
    found = report(seen)
    assert [f.code for f in found.to_do][:2] == ["targets-empty", "no-gpus"]
    assert found.summary == (
        "The daemon cannot work: 10 exporters answer without any metric (and 1 more problem)."
    )


def test_what_there_is_in_its_place_spares_a_metric():
    assert not [f for f in findings(without("gr_engine_active_ratio")) if f.severity is ADVICE]


def test_a_rewrite_is_offered_that_works():
    for example, name in (("gpu-01:9400", "gpu-01"), ("gpu-01.example.net", "gpu-01")):
        look = "address" if ":" in example else "fqdn"
        seen = naming(looks={look: 2}, examples={look: example})
        (step,) = [
            s for f in findings(seen) for s in f.do if s.startswith(" identity: {node_rewrite")
        ]
        assert config(step.strip() + "\n").identity().node({"Hostname": example})[0] == name


def test_a_label_that_may_name_the_node_is_offered():
    seen = naming(
        looks={"pod": 3},
        examples={"pod": "dcgm-exporter-x1k7w"},
        candidates={"hostname_short": "gpu-01"},
    )
    (finding,) = [f for f in findings(seen) if f.code == "names-pods"]
    assert " identity: {node_from: [hostname_short]}" in finding.do
    assert config(finding.do[1].strip() + "\n").identity().node_from == ("hostname_short",)


def test_one_of_two_alertmanagers_that_is_gone_leaves_the_other():
    gone = replace(ALERTMANAGER, url="http://127.0.0.1:9094", trouble="connection refused")
    seen = replace(FACTS, alertmanagers=(ALERTMANAGER, gone))
    (finding,) = [f for f in findings(seen) if f.code == "alertmanager-unreachable"]
    assert finding.why == "alerts go to the others alone"


def test_the_code_that_must_be_seen_to_first_is_the_exit_code():
    everything = replace(
        alertmanager(trouble="connection refused"),
        listen=facts.Listen("192.0.2.9:9477", "wrong", trouble="cannot assign"),
        fleet=NONE,
    )
    assert report(everything).exit_code == 2
    assert report(replace(everything, listen=None)).exit_code == 3
    assert report(replace(everything, listen=None, alertmanagers=())).exit_code == 1
