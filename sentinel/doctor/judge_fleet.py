"""Findings on the telemetry: exporters, names, GPUs, metrics, and what the daemon makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from sentinel.config import Config
from sentinel.doctor import howto
from sentinel.doctor.facts import Elsewhere, Facts, Fleet, Metric, Model, Target
from sentinel.doctor.judge_names import naming_findings
from sentinel.doctor.report import Finding, Severity
from sentinel.doctor.words import count, joined, some, span

_FUTURE_S: Final = 5.0  # a sample from further in the future is refused
_NEAR_TIMEOUT: Final = 0.8
_SLOW_SCRAPE_S: Final = 8.0  # where the timeout is not known: its default is 10 s
_RARE_S: Final = 60.0
_PEERS: Final = 4  # GPUs of one model, one of which is judged by the others
LEAST_HISTORY_S: Final = 1200.0  # a baseline needs so much
_OLD_S: Final = 7 * 86_400.0
_NOISE: Final = ("blank", "not on this GPU", "profiling at zero")  # as designed; told elsewhere


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
    yield from _metrics(fleet)
    yield from _values(fleet)
    yield from _verdicts(config, facts, fleet)


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
    if elsewhere.by_job and config.prometheus.selector:
        jobs = sorted(elsewhere.by_job, key=lambda job: -elsewhere.by_job[job])
        what = (
            f"no GPU is seen: prometheus.selector {config.prometheus.selector} matches no GPU "
            f"series, though there are some of {count(len(jobs), 'job')}: {some(jobs)}"
        )
        steps = ("set it to that job:", f" prometheus: {{selector: '{{job=\"{jobs[0]}\"}}'}}")
    elif any(t.up is False for t in targets):
        steps = ("bring back the exporters that cannot be scraped (see above)",)
    elif any(t.up and t.samples == 0 for t in targets):
        steps = ("see why the exporters show no metric (see above)",)
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
            need = 2.5 * e.interval_s
            yield Finding(
                "window-short",
                Severity.PROBLEM,
                "exporters",
                f"job {e.job} is scraped every {span(e.interval_s)}, and the daemon looks back "
                f"{config.pull_window_s():g} s",
                "one missed scrape, and every GPU there looks silent",
                (
                    "scrape every 15 s (scrape_interval in prometheus.yml)",
                    f"or set prometheus.window_s to {need:.0f} or more",
                ),
                exit_code=int(e.interval_s > config.pull_window_s()),
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
            f"{count(fleet.ahead, 'target')} stamp samples up to {span(fleet.ahead_max_s)} in "
            "the future",
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
            f"{count(doubles.by_targets, 'GPU')} are scraped twice: {joined(doubles.example)} are "
            "one exporter under two jobs",
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
            f"{count(doubles.by_targets, 'GPU')} are shown by several exporters: "
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
            f"{count(doubles.shared, 'GPU')} are shared by several pods (time slicing or MPS), and "
            "count once",
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
            f"{silent} of {count(fleet.gpus, 'GPU')} do not report now: their exporter is silent",
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
            f"{count(frozen, 'GPU')} show the same values again and again",
            "the exporter repeats what it once read: nothing is known of them now",
            ("restart the exporter there; if it hangs, look for Xids in dmesg",),
        )


def _newest(fleet: Fleet) -> str:
    ages = [e.age_p50_s for e in fleet.exporters if e.age_p50_s is not None]
    return span(min(ages)) if ages else "too"


def _models(fleet: Fleet) -> Iterator[Finding]:
    for model in fleet.models:
        yield Finding("model", Severity.OK, "gpus", model_text(model))
    nameless = sum(m.gpus for m in fleet.models if not m.name)
    if nameless:
        yield Finding(
            "model-nameless",
            Severity.ADVICE,
            "gpus",
            f"{count(nameless, 'GPU')} come without the name of their model",
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
            f"{count(virtual, 'GPU')} are virtual (vGPU)",
            "a guest sees neither temperature, power nor memory errors of the real GPU",
            ("watch the hosts as well: the evidence is there",),
        )
    masked = sum(m.masked for m in fleet.models)
    if masked:
        yield Finding(
            "uuid-masked",
            Severity.ADVICE,
            "gpus",
            f"{count(masked, 'GPU')} are known by node and index alone, for want of a UUID",
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


# ---- metrics ------------------------------------------------------------------------


def absent(metrics: tuple[Metric, ...]) -> list[Metric]:
    """What should be added: asked for, possible, not on all GPUs, and not there otherwise."""
    there = {m.name for m in metrics if m.present and m.present >= m.able}
    return [
        m
        for m in metrics
        if m.name in howto.WANTED
        and m.present + m.blank < m.able
        and not there.intersection(howto.INSTEAD.get(m.name, ()))
    ]


def _metrics(fleet: Fleet) -> Iterator[Finding]:
    wanted = [m for m in fleet.metrics if m.name in howto.WANTED and m.able]
    missing = absent(fleet.metrics)
    there = len(wanted) - len(missing) - sum(m.blank > 0 and m not in missing for m in wanted)
    yield Finding(
        "metrics-present",
        Severity.OK,
        "metrics",
        f"{there} of {len(wanted)} that matter are there for all GPUs that can have them",
    )
    core = [m for m in missing if m.name in howto.CORE and not m.present]
    if len(core) == len(howto.CORE):
        yield Finding(
            "metrics-core-missing",
            Severity.PROBLEM,
            "metrics",
            "no GPU shows temperature, power or clock",
            "nothing of how a GPU answers to its work can be judged: only hard errors are left",
            ("add them to the exporter's list of fields (see the lines to add)",),
            exit_code=1,
        )
    hard = [m for m in missing if m.name in howto.HARD]
    rest = [m for m in missing if m.name not in howto.HARD]
    if hard:
        yield Finding(
            "hard-evidence-missing",
            Severity.ADVICE,
            "metrics",
            f"{count(len(hard), 'kind')} of hard evidence not shown for {_for_whom(hard)}: "
            f"{some([m.label for m in hard])}",
            "these are the errors that the hardware itself tells: without them a dying GPU is "
            "noticed late, or never",
            _how_to_add(hard),
        )
    if rest:
        yield Finding(
            "metrics-missing",
            Severity.ADVICE,
            "metrics",
            f"{count(len(rest), 'other metric')} not shown for {_for_whom(rest)}: "
            f"{some([m.label for m in rest])}",
            "they tell what work asks of a GPU and how it answers: each that is missing makes a "
            "slow GPU harder to tell from an idle one",
            _how_to_add(rest),
        )


def _for_whom(missing: list[Metric]) -> str:
    return "some GPUs" if any(m.present for m in missing) else "any GPU"


def _how_to_add(missing: list[Metric]) -> tuple[str, ...]:
    """Where the lines to copy go, and what to do for exporters without such a list."""
    ways = [way for metric in missing for way in metric.enable]
    steps = [
        f"add the lines above to {name}"
        for name in (howto.DCGM_LIST,)
        if any(way.line and way.kind.startswith("dcgm") for way in ways)
    ]
    others = [way.how for way in ways if not (way.line and way.kind.startswith("dcgm"))]
    common = sorted(set(others), key=lambda how: -others.count(how))
    return (*steps, *common[:2])


def _values(fleet: Fleet) -> Iterator[Finding]:
    blank = [m for m in fleet.metrics if m.blank and m.blank + m.present >= m.able > 0]
    wanted = [m for m in blank if m.name in howto.WANTED]
    if wanted:
        yield Finding(
            "metrics-blank",
            Severity.ADVICE,
            "metrics",
            f"shown, and never with a value that can be so: {some([m.label for m in wanted], 4)}",
            "blanks and impossible values are dropped: it is as if the metric were not there",
            (
                "see whether nvidia-smi -q shows it on that host; if not, the GPU or its driver "
                "does not have it, and all is as well as it can be",
            ),
        )
    if fleet.idle_profiling:
        yield Finding(
            "profiling-zero",
            Severity.PROBLEM,
            "metrics",
            f"profiling counters stand at 0 on {count(fleet.idle_profiling, 'GPU')} that work",
            "another profiler holds them, or they died with an Xid: they are not used",
            (
                "end other profilers there (Nsight, dcgmi profiling): dcgmi profile --pause and "
                "--resume shows who has them",
                "or restart nv-hostengine and the exporter there",
            ),
        )
    if fleet.energy_still:
        yield Finding(
            "energy-still",
            Severity.ADVICE,
            "metrics",
            f"the energy counter of {count(fleet.energy_still, 'GPU')} stands still though power "
            "is drawn",
            "the exporter repeats what it once read; after a while such a GPU counts as unknown",
            ("restart the exporter there",),
        )
    odd = {r: n for r, n in fleet.rejected.items() if r not in _NOISE and n}
    if odd:
        told = joined([f"{n} {reason}" for reason, n in odd.items()])
        yield Finding(
            "samples-rejected",
            Severity.ADVICE,
            "metrics",
            f"samples of the last minutes that did not count: {told}",
            "they are dropped, and the value before them grows old",
        )


# ---- what the daemon makes of it ----------------------------------------------------


def _verdicts(config: Config, facts: Facts, fleet: Fleet) -> Iterator[Finding]:
    counts = joined([f"{n} {kind}" for kind, n in fleet.verdicts.items() if n])
    yield Finding("verdicts", Severity.OK, "daemon", f"it would say now: {counts}")
    if fleet.worst:
        yield Finding(
            "verdicts-bad",
            Severity.ADVICE,
            "daemon",
            f"it would say of these that something is wrong: {some(fleet.worst)}",
            "see that this is so before you let it act",
            ("what it would have said before:", " sentinel backtest --start -24h"),
        )
    yield from _work(fleet)
    yield from _baseline(facts, fleet)


def _work(fleet: Fleet) -> Iterator[Finding]:
    work = fleet.work
    if work.jobs:
        tenants = f" of {count(work.tenants, 'tenant')}" if work.tenants else ""
        yield Finding(
            "work-seen",
            Severity.OK,
            "daemon",
            f"{count(work.jobs, 'job')}{tenants} on {count(work.named, 'GPU')}, such as "
            f"{work.example}",
        )
    if work.unnamed and work.unnamed >= 0.5 * max(work.busy, 1):
        steps = [
            "let dcgm-exporter name the work: in Kubernetes --kubernetes (DCGM_EXPORTER_KUBERNETES"
            "=true), under Slurm --hpc-job-mapping-dir with a prolog that writes the job there"
        ]
        if work.candidates:
            label, value = next(iter(work.candidates.items()))
            steps.insert(0, f"if label {label} (such as {value}) names it:")
            steps.insert(1, f" jobs: {{id_from: [{label}]}}")
        yield Finding(
            "work-unnamed",
            Severity.ADVICE,
            "daemon",
            f"{work.unnamed} of {count(work.busy, 'busy GPU')} do work that no label names",
            "without it no work can be moved, the GPUs of one job are not compared with each "
            "other, and a job that crashes looks like many faults",
            tuple(steps),
        )


def _learn(facts: Facts) -> tuple[str, ...]:
    """The command, where there is anything yet to learn from."""
    return () if (facts.prometheus.reach_s or 0.0) < LEAST_HISTORY_S else (" sentinel learn",)


def _baseline(facts: Facts, fleet: Fleet) -> Iterator[Finding]:
    baseline = facts.baseline
    if baseline is None:
        return
    if not baseline.id and baseline.problems:
        yield Finding(
            "baseline-unusable",
            Severity.PROBLEM,
            "daemon",
            f"no baseline can be used: {baseline.problems[0]}",
            "the daemon does not start beside bundles of which none can be used",
            ("move them away, or learn anew:", " sentinel learn"),
            exit_code=1,
            stops=True,
            brief="no baseline can be used",
        )
        return
    if not baseline.id:
        yield Finding(
            "baseline-none",
            Severity.ADVICE,
            "daemon",
            "no baseline has been learnt yet",
            "until then hard evidence and patience alone count; it learns by itself, and you can "
            "do it now",
            _learn(facts),
        )
        return
    age_s = facts.at_s - baseline.learnt_to_s
    yield Finding(
        "baseline",
        Severity.OK,
        "daemon",
        f"baseline {baseline.id} of {count(len(baseline.models), 'model')}, {span(age_s)} old",
    )
    if age_s > _OLD_S:
        yield Finding(
            "baseline-old",
            Severity.ADVICE,
            "daemon",
            f"the baseline is {span(age_s)} old",
            "work and cooling change: relearning seems to fail",
            ("see why:", " sentinel learn"),
        )
    without = [m.name for m in fleet.models if m.name not in baseline.models]
    if without:
        yield Finding(
            "baseline-models",
            Severity.ADVICE,
            "daemon",
            f"the baseline knows nothing of {some(without)}",
            "of these, hard evidence alone counts",
            _learn(facts),
        )
