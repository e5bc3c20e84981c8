"""Findings on metrics, and on what the daemon makes of them: verdicts, work, baseline."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sentinel.config import Config
from sentinel.doctor import howto
from sentinel.doctor.facts import Facts, Fleet, Metric
from sentinel.doctor.report import Finding, Severity
from sentinel.doctor.words import count, joined, some, span

# what exporters write where a GPU has no such value, and what is told by itself
_BLANKS: Final = ("blank", "out of range", "not on this GPU", "profiling at zero")
LEAST_HISTORY_S: Final = 1200.0  # a baseline needs so much
_OLD_S: Final = 7 * 86_400.0


def metric_findings(config: Config, facts: Facts, fleet: Fleet) -> Iterator[Finding]:
    yield from _metrics(fleet)
    yield from _values(fleet)
    yield from _verdicts(config, facts, fleet)


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
    dropped = {reason: n for reason, n in fleet.rejected.items() if n}
    if dropped:
        told = joined([f"{n} {reason}" for reason, n in dropped.items()])
        yield Finding(
            "samples-rejected",
            Severity.OK if dropped.keys() <= set(_BLANKS) else Severity.ADVICE,
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
            f"no label names the work of {work.unnamed} of {count(work.busy, 'busy GPU')}",
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
