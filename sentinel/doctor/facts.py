"""What was seen of everything that the configuration names: plain frozen values.

No word here says whether that is good; `judge` does. These are also the body of `--json`, so a
field may be added and none changes its meaning within a schema number (docs/doctor.md). Times
are seconds since the epoch (`_s`); None is "not known", and `unknown` says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Pull:
    """The daemon's own question for the fleet, asked as a tick would ask it.

    `first_s` and `again_s` are how long it took, the second time with warm caches;
    `bytes_about` is the size of all answers together, reckoned from what was read.
    """

    window_s: float
    deadline_s: float
    first_s: float = 0.0
    again_s: float = 0.0
    series: int = 0
    samples: int = 0
    bytes_about: int = 0
    max_bytes: int = 0
    partial: bool = False
    warnings: tuple[str, ...] = ()
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Target:
    """One scrape target that is, or looks like, a GPU exporter. `samples` is what its last
    scrape brought, `duration_s` how long that took."""

    job: str
    instance: str
    up: bool | None = None
    error: str = ""
    samples: int | None = None
    duration_s: float | None = None
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Prometheus:
    """`kind` is what answers, as far as it tells: Prometheus, VictoriaMetrics, Thanos, Mimir.

    `skew_s` is its clock less ours, known to within `skew_error_s`. `reach_s` is how far back
    it has GPU series, at most `wanted_s`, and `gap_share` the part of that without any.
    """

    url: str
    trouble: str = ""
    kind: str = ""
    version: str = ""
    skew_s: float | None = None
    skew_error_s: float = 0.0
    certificate_ends_s: float | None = None
    pull: Pull | None = None
    retention: str = ""
    retention_s: float | None = None
    reach_s: float | None = None
    wanted_s: float = 0.0
    gap_share: float = 0.0
    limits: Mapping[str, str] = field(default_factory=dict)
    targets: tuple[Target, ...] | None = None
    config_ok: bool | None = None  # whether it could load its own configuration last
    unknown: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Exporter:
    """All targets of one kind under one job. `kind` is a name of the catalogue's exporters."""

    kind: str
    job: str
    targets: int
    nodes: int
    gpus: int
    series: int
    interval_s: float | None = None
    age_p50_s: float | None = None
    age_max_s: float | None = None


@dataclass(frozen=True, slots=True)
class Naming:
    """How GPUs come by their nodes' names. `told_by` counts GPUs by the label that named
    theirs, `looks` counts nodes by how their names look, `examples` has one of each look.
    `candidates` are other labels that might name the node, with a value of each."""

    nodes: int = 0
    told_by: Mapping[str, int] = field(default_factory=dict)
    looks: Mapping[str, int] = field(default_factory=dict)
    examples: Mapping[str, str] = field(default_factory=dict)
    first: tuple[str, ...] = ()
    candidates: Mapping[str, str] = field(default_factory=dict)
    exported: tuple[str, ...] = ()  # labels of work that Prometheus renamed
    hidden_by: str = ""  # a host name that is the same for all, and so names none


@dataclass(frozen=True, slots=True)
class Doubles:
    """GPUs that are shown more than once. `by_targets` are those that several targets show at
    once, with an example; `shared` those whose values are repeated for each of several pods;
    `replicas` the labels that tell copies of Prometheus apart, with their values."""

    by_targets: int = 0
    example: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    same_exporter: bool = False
    shared: int = 0
    churned: int = 0
    replicas: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Model:
    """`row` is the catalogue's name for it, empty where there is none. `lacks` is what it
    cannot have. `per_node` is how many most nodes have, `fewer` the nodes that show less."""

    name: str
    row: str
    gpus: int
    nodes: int
    drivers: tuple[str, ...] = ()
    mig: int = 0
    virtual: int = 0
    masked: int = 0
    lacks: tuple[str, ...] = ()
    per_node: int = 0
    fewer: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Enable:
    """How one kind of exporter is made to show a metric: `line` goes into its list of fields
    (`how` says which), or is empty where only `how` helps."""

    kind: str
    how: str
    line: str = ""


@dataclass(frozen=True, slots=True)
class Metric:
    """A canonical metric: on how many of the GPUs that can have it there is a value.

    `blank` are GPUs for which the exporter shows it without ever a possible value. `standard`:
    some exporter here shows it by default. `importance` is 0 for what matters most.
    """

    name: str
    label: str
    role: str
    importance: int
    able: int
    present: int
    blank: int = 0
    adds: str = ""
    standard: bool = False
    hidden_at_zero: bool = False
    enable: tuple[Enable, ...] = ()


@dataclass(frozen=True, slots=True)
class Work:
    """What the GPUs work on, by their labels. `busy` GPUs do something, `unnamed` are those of
    them whose work no label names; `candidates` are labels that might."""

    jobs: int = 0
    tenants: int = 0
    named: int = 0
    busy: int = 0
    unnamed: int = 0
    example: str = ""
    candidates: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Fleet:
    """The GPUs as the daemon reads them. `presence` and `verdicts` count GPUs; `worst` are
    the gravest verdicts in words. `at_skew_s` is set where the fleet could be read by the
    server's clock alone."""

    gpus: int = 0
    reporting: int = 0
    presence: Mapping[str, int] = field(default_factory=dict)
    up_seen: bool = True
    ahead: int = 0  # targets whose samples come from the future
    ahead_max_s: float = 0.0
    exporters: tuple[Exporter, ...] = ()
    naming: Naming = Naming()
    doubles: Doubles = Doubles()
    models: tuple[Model, ...] = ()
    metrics: tuple[Metric, ...] = ()
    work: Work = Work()
    rejected: Mapping[str, int] = field(default_factory=dict)
    idle_profiling: int = 0
    energy_still: int = 0
    verdicts: Mapping[str, int] = field(default_factory=dict)
    worst: tuple[str, ...] = ()
    at_skew_s: float = 0.0
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """GPU series that the daemon does not read. `by_job`: with the selector left out;
    `strange`: names that look like a GPU exporter's and that the catalogue does not know."""

    by_job: Mapping[str, int] = field(default_factory=dict)
    strange: tuple[str, ...] = ()
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Baseline:
    """The newest bundle that can be used. `models` are those it was learnt of."""

    id: str = ""
    learnt_to_s: float = 0.0
    models: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Route:
    """Where an alert of one severity goes. `told`: whether some receiver there has an
    integration, so that somebody hears of it."""

    severity: str
    receivers: tuple[str, ...]
    told: bool


@dataclass(frozen=True, slots=True)
class Alertmanager:
    url: str
    trouble: str = ""
    version: str = ""
    cluster: str = ""
    peers: int = 0
    skew_s: float | None = None
    certificate_ends_s: float | None = None
    receivers: tuple[str, ...] = ()
    routes: tuple[Route, ...] | None = None
    unknown: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Hook:
    """`status` is the answer to a question for an operation that cannot exist."""

    url: str
    trouble: str = ""
    status: int | None = None
    speaks: bool = False  # the answer is in the protocol's words, not a web server's page
    skew_s: float | None = None
    certificate_ends_s: float | None = None


@dataclass(frozen=True, slots=True)
class State:
    dir: str
    exists: bool = False
    writable: bool = False
    trouble: str = ""
    free_bytes: int | None = None
    schema: int | None = None
    schema_read: int = 0  # the one that this version reads
    store_trouble: str = ""
    held_by_pid: int | None = None


@dataclass(frozen=True, slots=True)
class Listen:
    """What is at `http.listen`. `state` is free, ours (a daemon of ours), taken or wrong."""

    address: str
    state: str = "free"
    version: str = ""
    ready: bool | None = None
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Secret:
    """One file that the configuration names. `mode` are its permission bits as chmod takes
    them, empty where it cannot be looked at."""

    key: str
    path: str
    mode: str = ""
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Watchers:
    """Who watches the daemon. `rules` are the names of alerting rules that look at its
    metrics, None where the server has no rules API; `scraped` the instances it is scraped
    from, `targeted` those at its port that are scraped, whether or not it answers there."""

    rules: tuple[str, ...] | None = None
    scraped: tuple[str, ...] | None = None
    targeted: tuple[str, ...] = ()
    unknown: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything. A part that could not be found out at all is in `unfinished`, with why."""

    at_s: float
    prometheus: Prometheus
    fleet: Fleet | None = None
    elsewhere: Elsewhere | None = None
    baseline: Baseline | None = None
    alertmanagers: tuple[Alertmanager, ...] = ()
    hook: Hook | None = None
    state: State | None = None
    listen: Listen | None = None
    secrets: tuple[Secret, ...] = ()
    watchers: Watchers = Watchers()
    unfinished: Mapping[str, str] = field(default_factory=dict)
