"""The sections of a configuration file and their keys.

The only place where a key is spelled, with its default, unit and sentence; the example file,
the reference and the schema are made from here. Decides what one value may be, never what
several mean together.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)

from sentinel.core.identity import JOB_FROM, NODE_FROM, RACK_FROM, REPLICA_FROM, TENANT_FROM
from sentinel.core.jobs import GROUP_FROM, ROLE_FROM, SERVICE_FROM
from sentinel.core.links import FIELDS as DASHBOARD_FIELDS
from sentinel.core.policy import Limits, Policy

TOKEN_ENV: Final = "SENTINEL_TOKEN"  # noqa: S105 - the variable's name, not its value
HOOK_SECRET_ENV: Final = "SENTINEL_HOOK_SECRET"  # noqa: S105
PROMETHEUS_TOKEN_ENV: Final = "SENTINEL_PROMETHEUS_TOKEN"  # noqa: S105
PROMETHEUS_PASSWORD_ENV: Final = "SENTINEL_PROMETHEUS_PASSWORD"  # noqa: S105
PROMETHEUS_HEADER_ENV: Final = "SENTINEL_PROMETHEUS_HEADER_"
ALERTMANAGER_TOKEN_ENV: Final = "SENTINEL_ALERTMANAGER_TOKEN"  # noqa: S105
ALERTMANAGER_PASSWORD_ENV: Final = "SENTINEL_ALERTMANAGER_PASSWORD"  # noqa: S105

_POLICY, _LIMITS = Policy(), Limits()


# ---- values -------------------------------------------------------------------------


def key(default: Any, text: str, unit: str = "", example: Any = None, **rules: Any) -> Any:
    extra = {k: v for k, v in (("unit", unit), ("example", example)) if v not in ("", None)}
    return Field(default=default, description=text, json_schema_extra=extra or None, **rules)


def _number_or_auto(value: object) -> object:
    if value == "auto":
        return None
    if value is None or isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError("must be a number of seconds or auto")
    return value


_AUTO_SCHEMA: Final[dict[str, Any]] = {
    "anyOf": [{"type": "number", "minimum": 0}, {"const": "auto"}],
}
AutoSeconds = Annotated[
    float | None,
    Field(ge=0, allow_inf_nan=False),
    BeforeValidator(_number_or_auto),
    WithJsonSchema(_AUTO_SCHEMA),
]


def _http_url(value: str) -> str:
    try:
        parts = urlsplit(value)
        bad_port = parts.port == 0
    except ValueError:
        raise ValueError("is not a URL; write it as http://host:port") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or bad_port:
        raise ValueError("is not a URL; write it as http://host:port")
    if parts.username or parts.password:
        raise ValueError("a URL must not carry a password; use basic_auth with password_file")
    if parts.query or parts.fragment:
        raise ValueError("a URL here has no ? or # part")
    return value.rstrip("/")


def _maybe_url(value: str) -> str:
    return _http_url(value) if value else ""


def _selector(value: str) -> str:
    text = value.strip()
    if text and not (text.startswith("{") and text.endswith("}")):
        raise ValueError("""write matchers in braces and quotes: '{job="dcgm-exporter"}'""")
    return text


_OWN_PARAMS: Final = frozenset({"query", "time", "timeout", "limit", "start", "end", "step"})


def _param_name(value: str) -> str:
    if value in _OWN_PARAMS:
        raise ValueError("is set by each query itself, or would cut its answer")
    return value


def _header_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", value):
        raise ValueError("is no HTTP header name")
    return value


def _header_value(value: str) -> str:
    if not value.isascii() or not value.isprintable() or value != value.strip():
        raise ValueError("must be printable ASCII text on one line, without space around it")
    return value


def _on_or_off(value: object) -> object:
    """YAML reads a bare on or off as a truth value."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def _label_name(value: str) -> str:
    """Since its version 3 Prometheus takes any text for a name, as OpenTelemetry's host.name."""
    if not value.isprintable() or value != value.strip() or not value:
        raise ValueError("is no label name")
    return value


def _regex(value: str) -> str:
    try:
        re.compile(value)
    except re.error as err:
        raise ValueError(f"is no regular expression: {err}") from None
    return value


def _template(fields: tuple[str, ...]) -> Callable[[str], str]:
    """Checks an address in which only these fields may stand in braces."""

    def check(value: str) -> str:
        unknown = set(re.findall(r"{([^{}]*)}", value)) - set(fields)
        if unknown:
            known = " ".join(f"{{{name}}}" for name in fields)
            raise ValueError(f"knows no {{{min(unknown)}}}; it may hold {known}")
        if value and not re.match(r"https?://", value):
            raise ValueError("is not a URL; write it as https://host/...")
        return value

    return check


def _listen(value: str) -> str:
    host, _, port = value.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError("write it as address:port, for example 127.0.0.1:9477")
    return value


Url = Annotated[str, AfterValidator(_http_url)]
MaybeUrl = Annotated[str, AfterValidator(_maybe_url)]
LabelName = Annotated[str, AfterValidator(_label_name)]
HeaderName = Annotated[str, AfterValidator(_header_name)]
HeaderValue = Annotated[str, AfterValidator(_header_value)]
ParamName = Annotated[str, AfterValidator(_param_name)]
Selector = Annotated[str, AfterValidator(_selector)]


class Section(BaseModel):
    """What all sections are: unknown keys are errors, nothing is converted, nothing changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _empty(cls, value: Any) -> Any:
        """A section whose keys are all commented out is read as null."""
        return {} if value is None else value


def _as_tuple(value: object) -> object:
    if isinstance(value, (list, tuple)):
        return tuple(value)
    raise ValueError("must be a list: [first, second]")


List = BeforeValidator(_as_tuple)
Strings = Annotated[tuple[str, ...], List]
Urls = Annotated[tuple[Url, ...], List]
LabelNames = Annotated[tuple[LabelName, ...], List]


# ---- sections -----------------------------------------------------------------------


class BasicAuth(Section):
    username: str = Field(description="User name for HTTP basic authentication.")
    password_file: str = key("", "File with the password; or set it in the environment.")


class PrometheusSection(Section):
    url: Url = Field(
        description="Base URL of Prometheus, or of what answers its query API.",
        json_schema_extra={"example": "http://127.0.0.1:9090"},
    )
    selector: Selector = key(
        "", "Extra matchers for every series, such as '{job=\"dcgm-exporter\"}'."
    )
    split_by: Annotated[tuple[Selector, ...], List] = key(
        (),
        "Selectors that are disjoint and together the fleet, each asked for on its own; for "
        "fleets beyond the server's limits: ['{dc=\"a\"}', '{dc!=\"a\"}'].",
    )
    basic_auth: BasicAuth | None = key(
        None,
        f"User name and password file (or ${PROMETHEUS_PASSWORD_ENV}).",
        example={"username": "sentinel", "password_file": "prometheus.password"},
    )
    token_file: str = key("", f"File with a bearer token; or set ${PROMETHEUS_TOKEN_ENV}.")
    headers: dict[HeaderName, HeaderValue] = key(
        {}, 'Extra request headers, such as {"X-Scope-OrgID": "gpu"} for a tenant.'
    )
    header_files: dict[HeaderName, str] = key(
        {},
        'Headers whose values are secret, from files: {"X-Api-Key": "key.file"}; or '
        f"set ${PROMETHEUS_HEADER_ENV}X_API_KEY and leave the file empty.",
    )
    params: dict[ParamName, str] = key(
        {}, 'Extra parameters of every query, such as {"dedup": "true"} for Thanos.'
    )
    ca_file: str = key("", "File with the certificates to trust; empty: the system's.")
    cert_file: str = key("", "File with the client's certificate (PEM), where one is asked for.")
    key_file: str = key("", "File with its key, unencrypted; empty: in cert_file.")
    server_name: str = key(
        "", "Name that the server's certificate bears; empty: the host of the URL."
    )
    gzip: Annotated[Literal["auto", "on", "off"], BeforeValidator(_on_or_off)] = key(
        "auto",
        "Compressed answers. auto: only over TLS to a host outside, since it costs the server "
        "more than a fast network gains.",
    )
    timeout_s: float = key(10.0, "Longest total time of one look at the fleet.", "s", gt=0)
    max_bytes: int = key(268_435_456, "Largest answer to one query.", "bytes", ge=65_536)
    concurrency: int = key(
        2, "How many queries are under way at once; 1 asks for all in one.", "queries", ge=1, le=16
    )
    window_s: AutoSeconds = key(
        None,
        "How far back a tick reads raw samples; at least 2.5 scrape intervals. "
        "auto: 60 s or 4 ticks, whichever is longer.",
        "s",
    )


class AlertmanagerSection(Section):
    urls: Urls = key(
        ("http://127.0.0.1:9093",),
        "Every Alertmanager of the cluster, never a load balancer; [] sends no alerts.",
    )
    basic_auth: BasicAuth | None = key(
        None,
        f"User name and password file (or ${ALERTMANAGER_PASSWORD_ENV}), for all of them.",
        example={"username": "sentinel", "password_file": "alertmanager.password"},
    )
    token_file: str = key("", f"File with a bearer token; or set ${ALERTMANAGER_TOKEN_ENV}.")
    ca_file: str = key("", "File with the certificates to trust; empty: the system's.")
    timeout_s: float = key(5.0, "Longest total time of one delivery.", "s", gt=0)


class Rewrite(Section):
    match: Annotated[str, AfterValidator(_regex)] = Field(
        description="Regular expression that is searched for in the exporter's host name."
    )
    replace: str = Field(description=r"What it becomes; \1 is the first group.")


class IdentitySection(Section):
    cluster: str = key("default", "Name of this cluster, as in its alerts.", min_length=1)
    node_from: LabelNames = key(
        NODE_FROM,
        "Labels that name the node; the first that is present counts. localhost, the name of "
        "the exporter's own pod and the address of the target count only without a better one.",
    )
    node_rewrite: Annotated[tuple[Rewrite, ...], List] = key(
        (),
        "Rewrites, in order, that make the exporter's host name the scheduler's node name: "
        r'[{"match": "\\.example\\.net$", "replace": ""}].',
    )
    rack_from: LabelNames = key(
        RACK_FROM,
        "Labels that name the rack of a node; the first that is present counts. Without a rack "
        "nothing is said of racks.",
    )
    rack_pattern: Annotated[str, AfterValidator(_regex)] = key(
        "",
        "Regular expression that finds the rack in the node's name instead, such as ^(r[0-9]+)-; "
        "its first group, or all that matches.",
    )
    replica_from: LabelNames = key(
        REPLICA_FROM,
        "Labels that tell apart several Prometheus servers, or clusters, that scrape a target of "
        "the same job and instance.",
    )


class JobsSection(Section):
    source: Literal["labels"] = key("labels", "Where the work of a GPU is known from.")
    id_from: LabelNames = key(
        JOB_FROM, "Labels that name the work; the first that is present counts."
    )
    tenant_from: LabelNames = key(TENANT_FROM, "Labels that name the tenant the work belongs to.")
    group_from: LabelNames = key(
        GROUP_FROM,
        "Labels that name the job which a pod is a part of, whose GPUs work in step; without them "
        "the pod's name tells. Dots, dashes and slashes count as underscores, and `label_`, "
        "`exported_` before the name as nothing.",
    )
    role_from: LabelNames = key(
        ROLE_FROM, "Labels that name a pod's role in its job: only equals are compared."
    )
    service_from: LabelNames = key(
        SERVICE_FROM, "Labels that name the service of which a pod is one replica, at its own load."
    )
    settle_s: float = key(
        300.0, "Soft evidence is muted for so long after work changes.", "s", ge=0
    )


class DetectionSection(Section):
    pages_per_week: float = key(
        2.0, "Budget of pages by soft evidence, for the whole cluster.", "alerts", gt=0
    )
    tickets_per_week: float = key(
        20.0, "Budget of tickets by soft evidence, for the whole cluster.", "alerts", gt=0
    )
    certify_gpu_days: float = key(
        14.0,
        "How much normal time must have been learnt from before soft evidence may page or act; "
        "until then it makes tickets only. 0: trust any baseline, without proof.",
        "GPU-days",
        ge=0,
    )
    page_score: float = key(
        1.3, "Score at which a deviation pages; 1.0 is the edge of normal.", "ratio", ge=1
    )
    deviant_may: Literal["alert", "fence", "move"] = key(
        "move",
        "The most that a deviation does by itself, once it pages. alert: nothing more; fence and "
        "move: only where three GPUs or more that can be compared do not deviate alike.",
    )
    grid_s: AutoSeconds = key(None, "Width of a cell of the feature window. auto: 4 ticks.", "s")
    max_age_s: AutoSeconds = key(
        None, "Values older than this do not count. auto: as prometheus.window_s.", "s"
    )
    deviant_for_s: AutoSeconds = key(
        None, "How long a deviation lasts before it alerts. auto: 8 ticks, at least 30 s.", "s"
    )
    fault_for_s: float = key(0.0, "How long a hard fault lasts before it alerts.", "s", ge=0)
    lost_for_s: AutoSeconds = key(
        None,
        "How long a GPU is gone before it alerts, beyond two missed scrapes. auto: 1 tick.",
        "s",
    )
    clear_for_s: AutoSeconds = key(
        None, "How long all is well before an alert resolves. auto: 20 ticks, at least 30 s.", "s"
    )
    clear_latched_for_s: float = key(
        1800.0,
        "How long a GPU with hard evidence reports well before its alert resolves.",
        "s",
        ge=0,
    )


class LimitsSection(Section):
    open_moves: int = key(_LIMITS.open_moves, "Moves under way at once.", "moves", ge=0)
    fenced_nodes: int = key(
        _LIMITS.fenced_nodes, "Nodes that may be fenced by this daemon at once.", "nodes", ge=0
    )
    fenced_percent: float = key(
        _LIMITS.fenced_percent,
        "The same, of the cluster's nodes; one is always allowed.",
        "%",
        ge=0,
        le=100,
    )
    gpu_hours_lost_per_day: float = key(
        _LIMITS.gpu_hours_lost_per_day, "Work that moves may cost within a day.", "GPU-hours", ge=0
    )
    attempts_per_node: int = key(
        _LIMITS.attempts_per_node, "Fences and moves of one node within a day.", "tries", ge=1
    )
    attempts_max: int = key(
        _POLICY.attempts_max, "Tries of one fence or move after a proven refusal.", "tries", ge=1
    )
    cooldown_s: float = key(
        _LIMITS.cooldown_s, "Rest between two moves away from one node.", "s", ge=0
    )
    coverage_percent: float = key(
        _LIMITS.coverage_percent, "Share of the known GPUs that must report.", "%", ge=0, le=100
    )
    fleet_hold_percent: float = key(
        _LIMITS.fleet_hold_percent,
        "Nothing moves while this share of the GPUs deviates at once.",
        "%",
        gt=0,
        le=100,
    )
    fleet_hold_gpus: int = key(
        _LIMITS.fleet_hold_gpus, "And at least so many, on two nodes or more.", "GPUs", ge=1
    )
    evidence_max_age_s: AutoSeconds = key(
        None, "Oldest evidence that a call may rest on. auto: 4 ticks, at least 10 s.", "s"
    )
    fence_severity: Literal["critical", "warning"] = key(
        "critical", "Lowest severity that fences a node."
    )
    move_severity: Literal["critical", "warning"] = key(
        "critical", "Lowest severity that moves work."
    )


class StateSection(Section):
    dir: str = key("./state", "Folder of the store and the learnt bundles.", min_length=1)
    url: str = key("", "Database shared by several daemons; not in this version, leave it empty.")


class LinksSection(Section):
    dashboard: Annotated[str, AfterValidator(_template(DASHBOARD_FIELDS))] = key(
        "",
        "Address of a dashboard for an alert, with any of {gpu_uuid} {node} {workload} {from_ms} "
        "{to_ms} {incident_id} in it; empty: the daemon's own status page.",
    )
    prometheus: MaybeUrl = key(
        "",
        "Base URL that people reach Prometheus by, for links to its graphs; empty: "
        "prometheus.url, unless that is on loopback.",
    )
    runbook: Annotated[str, AfterValidator(_template(("alertname",)))] = key(
        "", "Address of a runbook, with {alertname} in it; empty: the daemon's own page."
    )


class TickSection(Section):
    interval_s: float = key(
        15.0, "Time between two looks at the fleet; the scrape interval is best.", "s", ge=0.2
    )
    deadline_s: AutoSeconds = key(
        None, "What has not come by then is dropped. auto: 0.8 ticks, at least 2 s.", "s"
    )


class LearnSection(Section):
    every_h: float = key(6.0, "Time between two relearnings; 0 never relearns.", "h", ge=0)
    window_h: float = key(24.0, "How much history is learnt from.", "h", gt=0)
    slice_s: float = key(600.0, "How much history is read at a time.", "s", ge=10)


class SparesSection(Section):
    hosts: Strings = key((), "Nodes that are backups, by the scheduler's name.")
    gpus: Strings = key((), "Single GPUs that are backups, by UUID.")


class HookSection(Section):
    kind: Literal["webhook"] = key("webhook", "How the scheduler is reached.")
    url: MaybeUrl = key("", "Where fence and move orders are posted; empty: no hook.")
    secret_file: str = key(
        "", f"File with the signing secret (whsec_...); or set ${HOOK_SECRET_ENV}."
    )
    ca_file: str = key("", "File with the certificates to trust; empty: the system's.")
    timeout_s: float = key(10.0, "Longest total time of one call.", "s", gt=0)
    deadline_s: float = key(
        900.0, "An order that is not done by then is stuck and pages a person.", "s", gt=0
    )
    verify_for_s: float = key(
        60.0, "How long the work must be seen healthy on its new place.", "s", ge=0
    )
    checkpoint_mode: Literal["none", "signal", "wait_next"] = key(
        "none", "What the scheduler is asked to do about a checkpoint before it moves work."
    )
    checkpoint_grace_s: float = key(
        0.0, "How long the work may take to write that checkpoint.", "s", ge=0
    )
    poll_s: AutoSeconds = key(
        None, "Time between two questions for an order's state. auto: 1 tick.", "s"
    )


class HttpSection(Section):
    listen: Annotated[str, AfterValidator(_listen)] = key(
        "127.0.0.1:9477", "Address and port of the daemon's own HTTP server."
    )
    external_url: MaybeUrl = key(
        "", "How others reach it, for callbacks and links; empty: as http.listen."
    )
    token_file: str = key(
        "", f"File with the bearer token for all that changes; or set ${TOKEN_ENV}. None: refused."
    )
    per_gpu_metrics: bool = key(True, "Export one score series per GPU on /metrics.")


class LogSection(Section):
    format: Literal["console", "json"] = key("console", "Lines for people or for machines.")
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = key("INFO", "Least that is logged.")
