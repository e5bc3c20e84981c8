"""A site at which all is well, as the doctor saw it; tests make it worse, one thing at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from sentinel.config import Config
from sentinel.core.catalog import Catalog
from sentinel.data import load_catalog
from sentinel.doctor import facts, howto
from sentinel.doctor.judge import judge
from sentinel.doctor.report import Finding, Report

CATALOG: Catalog = load_catalog()
NOW_S = 1_800_000_000.0
MODEL = "NVIDIA H100 80GB HBM3"
PULL = facts.Pull(60.0, 12.0, 0.2, 0.1, 400, 1600, 300_000, 268_435_456)
TARGETS = tuple(
    facts.Target("dcgm", f"gpu-{n:02d}:9400", True, "", 200, 0.2, 10.0) for n in range(1, 11)
)
PROMETHEUS = facts.Prometheus(
    "http://127.0.0.1:9090",
    kind="Prometheus",
    version="3.1.0",
    skew_s=0.01,
    skew_error_s=0.02,
    pull=PULL,
    retention="15d",
    retention_s=15 * 86_400.0,
    reach_s=86_400.0,
    wanted_s=86_400.0,
    targets=TARGETS,
    config_ok=True,
)
METRICS = tuple(
    facts.Metric(m.name, m.label, m.role, howto.importance(m.name), 80, 80, adds=m.adds)
    for m in sorted(CATALOG.metrics, key=lambda m: howto.importance(m.name))
)
FLEET = facts.Fleet(
    gpus=80,
    reporting=80,
    presence={"present": 80},
    exporters=(facts.Exporter("dcgm", "dcgm", 10, 10, 80, 2000, 15.0, 4.0, 9.0),),
    naming=facts.Naming(
        10, {"Hostname": 80}, {"plain": 10}, {"plain": "gpu-01"}, ("gpu-01", "gpu-02")
    ),
    models=(facts.Model(MODEL, "H100 SXM", 80, 10, ("580.105.08",)),),
    metrics=METRICS,
    work=facts.Work(5, 2, 70, 70, 0, "pod train-1"),
    verdicts={"normal": 80},
)
ALERTMANAGER = facts.Alertmanager(
    "http://127.0.0.1:9093",
    version="0.28.1",
    cluster="ready",
    peers=2,
    skew_s=0.0,
    receivers=("pager", "tickets"),
    routes=(
        facts.Route("critical", ("pager",), True),
        facts.Route("warning", ("tickets",), True),
    ),
)
HOOK = facts.Hook("http://127.0.0.1:9999/migrate", "", 404, True, 0.0)
STATE = facts.State("/var/lib/sentinel", True, True, "", 50 << 30, 1, 1)
FACTS = facts.Facts(
    NOW_S,
    PROMETHEUS,
    FLEET,
    baseline=facts.Baseline("bundle-1", NOW_S - 3600.0, (MODEL,)),
    alertmanagers=(ALERTMANAGER,),
    hook=HOOK,
    state=STATE,
    listen=facts.Listen("127.0.0.1:9477", "ours", "", True),
    secrets=(facts.Secret("hook.secret_file", "/etc/hook.secret", "600"),),
    watchers=facts.Watchers(("SentinelDown", "SentinelStalled"), ("127.0.0.1:9477",)),
)


def config(text: str = "") -> Config:
    return Config.parse(f'prometheus: {{url: "http://127.0.0.1:9090"}}\n{text}', Path("s.yaml"))


def prometheus(**changes: Any) -> facts.Facts:
    return replace(FACTS, prometheus=replace(PROMETHEUS, **changes))


def pull(**changes: Any) -> facts.Facts:
    return prometheus(pull=replace(PULL, **changes))


def fleet(**changes: Any) -> facts.Facts:
    return replace(FACTS, fleet=replace(FLEET, **changes))


def naming(**changes: Any) -> facts.Facts:
    return fleet(naming=replace(FLEET.naming, **changes))


def doubles(**changes: Any) -> facts.Facts:
    return fleet(doubles=facts.Doubles(**changes))


def without(*names: str, kind: str = "dcgm") -> facts.Facts:
    """The same without these metrics on any GPU."""
    return fleet(
        metrics=tuple(
            replace(
                m,
                present=0,
                enable=(howto.enable(CATALOG, CATALOG.metrics[CATALOG.column(m.name)], kind),),
            )
            if m.name in names
            else m
            for m in METRICS
        )
    )


def targets(*changed: dict[str, Any]) -> tuple[facts.Target, ...]:
    """The first targets changed, the others well."""
    return (
        *(replace(t, **c) for t, c in zip(TARGETS, changed, strict=False)),
        *TARGETS[len(changed) :],
    )


def alertmanager(**changes: Any) -> facts.Facts:
    return replace(FACTS, alertmanagers=(replace(ALERTMANAGER, **changes),))


def findings(seen: facts.Facts, settings: Config | None = None) -> tuple[Finding, ...]:
    return judge(settings or config(), seen, CATALOG)


def report(seen: facts.Facts, settings: Config | None = None) -> Report:
    settings = settings or config()
    return Report(
        "0.1.0", "s.yaml", settings.naming.cluster, settings.mode, findings(seen, settings), seen
    )
