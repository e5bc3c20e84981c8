"""Findings on the telemetry: exporters, names and GPUs; of metrics there is a module more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from sentinel.config import Config
from sentinel.doctor import howto
from sentinel.doctor.facts import Elsewhere, Facts, Fleet, Model, Target
from sentinel.doctor.judge_metrics import metric_findings
from sentinel.doctor.judge_names import naming_findings
from sentinel.doctor.report import Finding, Severity
from sentinel.doctor.words import count, joined, some, span

_FUTURE_S: Final = 5.0  # a sample from further in the future is refused
_NEAR_TIMEOUT: Final = 0.8
_SLOW_SCRAPE_S: Final = 8.0  # where the timeout is not known: its default is 10 s
_RARE_S: Final = 60.0
_PEERS: Final = 4  # GPUs of one model, one of which is judged by the others


def fleet_findings(config: Config, facts: Facts) -> Iterator[Finding]:
    fleet, targets = facts.fleet, facts.prometheus.targets or ()
    if fleet is None:
        return
    if not fleet.gpus:
        # what keeps the exporters from being read comes first: it is the cause
        yield from (replace(f, exit_code=1, stops=True) for f in _targets(config, targets))
        yield _no_gpus(config, facts, targets)
        return
    yield from _targets(config, targets)
    yield from _exporters(config, fleet)
    yield from _doubles(fleet)
    yield from naming_findings(config, fleet.naming)
    yield from _presence(config, fleet)
    yield from _models(fleet)
    yield from metric_findings(config, facts, fleet)


# ---- exporters ----------------------------------------------------------------------


def _targets(config: Config, targets: tuple[Target, ...]) -> Iterator[Finding]:
    down = [t for t in targets if t.up is False]
    if down:
        share = 100.0 * (1.0 - len(down) / len(targets))
        reasons = [f"{_name(t)}: {_reason(t.error)}" if t.error else _name(t) for t in down]
        yield Finding(
            "targets-down",
            Severity.PROBLEM,
            "exporters",
            f"{len(down)} of {count(len(targets), 'GPU exporter')} cannot be scraped: "
            f"{some(reasons)}",
            "nothing is known of the GPUs there: they count as unknown, and are never moved from",
            (
                "does it run there, and does a firewall let Prometheus in? try from its host:",
                f" curl http://{down[0].instance}/metrics",
            ),
            exit_code=int(share < config.limits.coverage_percent),
            brief=f"{len(down)} of {count(len(targets), 'GPU exporter')} cannot be scraped",
        )
    empty = [t for t in targets if t.up and t.samples == 0]
    if empty:
        yield Finding(
            "targets-empty",
            Severity.PROBLEM,
            "exporters",
            f"{count(len(empty), 'exporter answers', 'exporters answer')} without any metric: "
            f"{some(map(_name, empty))}",
            "it counts as up, and yet nothing is known of the GPUs there",
            (
                "look at its log: no driver, no DCGM, or a list of fields that it could not read",
                "and see what it shows:",
                f" curl http://{empty[0].instance}/metrics",
            ),
            exit_code=int(len(empty) == len(targets)),
            brief=f"{count(len(empty), 'exporter answers', 'exporters answer')} without any metric",
        )
    slow = [t for t in targets if t.up and t.duration_s and t.duration_s > _limit_s(t)]
    if slow:
        worst = max(slow, key=lambda t: t.duration_s or 0.0)
        yield Finding(
            "scrape-slow",
            Severity.PROBLEM,
            "exporters",
            f"{count(len(slow), 'exporter takes', 'exporters take')} nearly the whole scrape "
            f"timeout: {_name(worst)} {span(worst.duration_s or 0.0)}",
            "a little slower, and every scrape fails: the GPUs there then look silent",
            (
                "raise scrape_timeout (and scrape_interval) of that job in prometheus.yml",
                "show fewer fields there, or collect them in the background "
                "(dcgm-exporter -c 30000)",
            ),
        )


def _limit_s(target: Target) -> float:
    return _NEAR_TIMEOUT * target.timeout_s if target.timeout_s else _SLOW_SCRAPE_S


def _reason(error: str) -> str:
    """The end of the error: what comes before it is the URL, more than once."""
    return error.rpartition('": ')[2]


def _name(target: Target) -> str:
    return f"{target.instance} (job {target.job})"


def _no_gpus(config: Config, facts: Facts, targets: tuple[Target, ...]) -> Finding:
    """No GPU at all: the most common first evening, with its most common causes in order."""
    elsewhere = facts.elsewhere or Elsewhere()
    what = "no GPU is seen: Prometheus has no GPU series for the daemon"
    steps: tuple[str, ...]
    if any(t.up is False for t in targets):
        steps = ("bring back the exporters that cannot be scraped (see above)",)
    elif any(t.up and t.samples == 0 for t in targets):
        steps = ("see why the exporters show no metric (see above)",)
    elif elsewhere.by_job and config.prometheus.selector:
        jobs = sorted(elsewhere.by_job, key=lambda job: -elsewhere.by_job[job])
        what = (
            f"no GPU is seen: prometheus.selector {config.prometheus.selector} matches no GPU "
            f"series, though there are some of {count(len(jobs), 'job')}: {some(jobs)}"
        )
        steps = ("set it to that job:", f" prometheus: {{selector: '{{job=\"{jobs[0]}\"}}'}}")
    elif elsewhere.strange:
        what += f"; there are series of names that it does not know: {some(elsewhere.strange)}"
        steps = (
            "tell what they mean with rows of your own, as in sentinel/data/metrics.yaml",
            "or run dcgm-exporter or `sentinel exporter` on the GPU hosts",
        )
    else:
        steps = (
            "run an exporter on every GPU host: dcgm-exporter (port 9400), or "
            "`sentinel exporter` (port 9478) where there is no DCGM",
            "and let Prometheus scrape it, in prometheus.yml under scrape_configs:",
            " - job_name: dcgm-exporter",
            '   static_configs: [{targets: ["gpu-01:9400", "gpu-02:9400"]}]',
        )
    return Finding(
        "no-gpus",
        Severity.PROBLEM,
        "gpus",
        what,
        "there is nothing to watch",
        steps,
        exit_code=1,
        stops=True,
        brief="no GPU is seen",
    )


def _exporters(config: Config, fleet: Fleet) -> Iterator[Finding]:
    for e in fleet.exporters:
        text = (
            f"{howto.title(e.kind)}, job {e.job or '(none)'}: "
            f"{count(e.targets, 'target')}, {count(e.gpus, 'GPU')}"
        )
        if e.interval_s is not None:
            text += f", every {span(e.interval_s)}"
        if e.age_p50_s is not None:
            text += f", newest {span(max(e.age_p50_s, 0.0))} old"
        yield Finding("exporter", Severity.OK, "exporters", text)
        if e.interval_s is not None and 2.5 * e.interval_s > config.pull_window_s():
            gone = e.interval_s >= config.pull_window_s()
            yield Finding(
                "window-short",
                Severity.PROBLEM if gone else Severity.ADVICE,
                "exporters",
                f"job {e.job} is scraped every {span(e.interval_s)}, and the daemon looks back "
                f"{config.pull_window_s():g} s",
                "between two scrapes every value there is too old to count"
                if gone
                else "one missed scrape, and every value there is too old to count",
                (
                    "scrape every 15 s (scrape_interval in prometheus.yml), or look back further:",
                    f" prometheus: {{window_s: {2.5 * e.interval_s:.0f}}}",
                ),
                exit_code=int(gone),
            )
        elif e.interval_s is not None and e.interval_s >= _RARE_S:
            yield Finding(
                "scraped-rarely",
                Severity.ADVICE,
                "exporters",
                f"job {e.job} is scraped every {span(e.interval_s)}",
                "a lost GPU is noticed after two scrapes, and short bouts of throttling not at all",
                ("scrape every 15 s (scrape_interval in prometheus.yml)",),
            )
    if fleet.ahead:
        refused = fleet.ahead_max_s > _FUTURE_S
        yield Finding(
            "exporter-clock",
            Severity.PROBLEM if refused else Severity.ADVICE,
            "exporters",
            f"{count(fleet.ahead, 'target stamps', 'targets stamp')} samples up to "
            f"{span(fleet.ahead_max_s)} in the future",
            "samples from more than 5 s ahead are refused" if refused else "its clock goes wrong",
            ("set the clocks there by NTP, or scrape with honor_timestamps: false",),
            exit_code=int(refused and fleet.reporting == 0),
        )
    if not fleet.up_seen:
        yield Finding(
            "up-missing",
            Severity.ADVICE,
            "exporters",
            "the series `up` of the exporters is not among what the daemon reads",
            "a host that is down and one GPU that vanished are told apart later",
            (
                "let prometheus.selector match labels that `up` has too: job and instance, and "
                "those of scrape_configs",
            ),
        )


def _doubles(fleet: Fleet) -> Iterator[Finding]:
    doubles = fleet.doubles
    if doubles.by_targets and doubles.same_exporter:
        yield Finding(
            "scraped-twice",
            Severity.ADVICE,
            "exporters",
            f"{count(doubles.by_targets, 'GPU is', 'GPUs are')} scraped twice: "
            f"{joined(doubles.example)} are one exporter under two jobs",
            "the daemon bears it, and takes them for one; each answer and scrape is twice as large",
            (
                "drop one of the jobs in prometheus.yml, or choose one for the daemon:",
                f" prometheus: {{selector: '{{job=\"{doubles.jobs[0]}\"}}'}}",
            ),
        )
    elif doubles.by_targets:
        yield Finding(
            "shown-twice",
            Severity.ADVICE,
            "exporters",
            f"{count(doubles.by_targets, 'GPU is', 'GPUs are')} shown by several exporters: "
            f"{joined(doubles.example)}",
            "that is well where they show different metrics; where two show the same one, the "
            "larger value counts",
            ("choose one with prometheus.selector if they show the same",),
        )
    for label, values in doubles.replicas.items():
        yield Finding(
            "replicas",
            Severity.ADVICE,
            "exporters",
            f"every series is there {len(values)} times, by label {label}: {some(values)}",
            "copies of one Prometheus are not merged: each answer is so many times as large",
            (
                "ask one of them, or let the querier merge them (Thanos: "
                f'--query.replica-label={label}, prometheus.params: {{"dedup": "true"}})',
            ),
        )
    if doubles.shared:
        yield Finding(
            "time-slicing",
            Severity.OK,
            "exporters",
            f"{count(doubles.shared, 'GPU is', 'GPUs are')} shared by several pods (time slicing "
            "or MPS); each counts once",
        )


# ---- GPUs ---------------------------------------------------------------------------


def _presence(config: Config, fleet: Fleet) -> Iterator[Finding]:
    silent = fleet.presence.get("host_silent", 0)
    share = 100.0 * fleet.reporting / fleet.gpus
    if fleet.reporting == 0:
        yield Finding(
            "all-silent",
            Severity.PROBLEM,
            "gpus",
            f"none of {count(fleet.gpus, 'GPU')} reports now: the newest samples are "
            f"{_newest(fleet)} old",
            "the daemon knows nothing of any GPU at present",
            ("see why the exporters are not scraped: the page Status > Targets of Prometheus",),
            exit_code=1,
            stops=True,
        )
    elif silent:
        low = share < config.limits.coverage_percent
        yield Finding(
            "gpus-silent",
            Severity.PROBLEM,
            "gpus",
            f"not reporting now: {silent} of {count(fleet.gpus, 'GPU')}, whose exporter is silent",
            f"below {config.limits.coverage_percent:g} % nothing is moved"
            if low
            else "they count as unknown, and are never moved from",
            ("see why those exporters are not scraped",),
            exit_code=int(low),
        )
    vanished = fleet.presence.get("vanished", 0)
    if vanished:
        yield Finding(
            "gpus-vanished",
            Severity.PROBLEM,
            "gpus",
            f"{count(vanished, 'GPU')} vanished while others on the same host report",
            "that is evidence of a GPU that fell off its bus: the daemon will say so at once",
            ("look at that host: nvidia-smi -L, and dmesg for Xid 79",),
        )
    frozen = fleet.presence.get("frozen", 0)
    if frozen:
        yield Finding(
            "gpus-frozen",
            Severity.PROBLEM,
            "gpus",
            f"{count(frozen, 'GPU shows', 'GPUs show')} the same values again and again",
            "the exporter repeats what it once read: nothing is known of them now",
            ("restart the exporter there; if it hangs, look for Xids in dmesg",),
        )


def _newest(fleet: Fleet) -> str:
    ages = [e.age_p50_s for e in fleet.exporters if e.age_p50_s is not None]
    return span(min(ages)) if ages else "too"


def _models(fleet: Fleet) -> Iterator[Finding]:
    for model in fleet.models:
        yield Finding("model", Severity.OK, "gpus", model_text(model))
    for model in fleet.models:
        if model.fewer:
            told = [f"{node} {n}" for node, n in model.fewer.items()]
            yield Finding(
                "gpus-fewer",
                Severity.PROBLEM,
                "gpus",
                f"{count(len(told), 'node shows', 'nodes show')} fewer than {model.per_node} "
                f"{model.name or 'GPUs'}: {some(told)}",
                "a GPU that was gone before the daemon came is never missed by it",
                (
                    "look there: is one off the bus, or given to a virtual machine?",
                    " nvidia-smi -L; dmesg | grep -i xid",
                ),
            )
    nameless = sum(m.gpus for m in fleet.models if not m.name)
    if nameless:
        yield Finding(
            "model-nameless",
            Severity.ADVICE,
            "gpus",
            f"{count(nameless, 'GPU comes', 'GPUs come')} without the name of the model",
            "they are judged as one model, whatever they are, and none can stand in for another",
            ("update the exporter: it should show modelName (dcgm-exporter 2.4 or later)",),
        )
    strange = [m for m in fleet.models if m.name and not m.row and not m.virtual]
    if strange:
        yield Finding(
            "model-unknown",
            Severity.ADVICE,
            "gpus",
            f"not in the catalogue: {some([m.name for m in strange])}",
            "it is watched like any other, but only the very same model can stand in for it",
        )
    virtual = sum(m.virtual for m in fleet.models)
    if virtual:
        yield Finding(
            "gpus-virtual",
            Severity.ADVICE,
            "gpus",
            f"{count(virtual, 'GPU is', 'GPUs are')} virtual (vGPU)",
            "a guest sees neither temperature, power nor memory errors of the real GPU",
            ("watch the hosts as well: the evidence is there",),
        )
    masked = sum(m.masked for m in fleet.models)
    if masked:
        yield Finding(
            "uuid-masked",
            Severity.ADVICE,
            "gpus",
            f"{count(masked, 'GPU is', 'GPUs are')} known by node and index alone: no UUID shown",
            "a GPU that is swapped or renumbered is taken for the old one",
            ("let the exporter show UUIDs",),
        )
    few = [m for m in fleet.models if m.gpus < _PEERS]
    if few and fleet.gpus >= _PEERS:
        yield Finding(
            "peers-few",
            Severity.ADVICE,
            "gpus",
            f"fewer than {_PEERS} of {some([m.name or '(no model)' for m in few])}",
            "too few to compare one with its peers: they are judged by their own past alone",
        )


def model_text(model: Model) -> str:
    """One line on a model."""
    text = f"{model.gpus} x {model.name or '(no model name)'} on {count(model.nodes, 'node')}"
    if model.mig:
        text += f", {model.mig} cut up (MIG)"
    if model.virtual:
        text += f", {model.virtual} virtual"
    if model.drivers:
        text += f"; driver {some(model.drivers)}"
    return text
