"""The words this program thinks in: frozen values, no behaviour beyond reading themselves.

Times are seconds since the epoch (`_s`, float). A GPU is known by its UUID, never by the
labels of whatever runs on it. Everything here can be written down and read back
(`to_plain`, `from_plain`), because the store keeps exactly these values.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

NOVEL: Final = "novel"
NOT_DELIVERED: Final = "not delivered:"  # how a refusal's reason begins where no byte was sent


class Kind(enum.StrEnum):
    """What one tick says of one GPU."""

    NORMAL = "normal"
    DEVIANT = "deviant"
    FAULT = "fault"
    LOST = "lost"
    UNKNOWN = "unknown"


class Severity(enum.StrEnum):
    """critical pages a person, warning makes a ticket, info is only written down."""

    CRITICAL = "critical"
    WARNING = "warning"
    INFO = "info"


class Mode(enum.StrEnum):
    OBSERVE = "observe"
    RECOMMEND = "recommend"
    ACT = "act"


class Presence(enum.IntEnum):
    """Why a GPU has, or has not, reported: the causes of absence told apart."""

    PRESENT = 0
    VANISHED = 1  # its siblings on the same exporter report and it does not
    HOST_SILENT = 2  # the exporter or the host is gone: nothing is known of the GPU
    BLIND = 3  # Prometheus or the way to it is gone: nothing is known of any GPU
    FROZEN = 4  # samples come and repeat what was once read: nothing is known of it now


class SubjectKind(enum.StrEnum):
    GPU = "gpu"
    NODE = "node"
    RACK = "rack"
    JOB = "job"
    FLEET = "fleet"


class IncidentPhase(enum.StrEnum):
    SUSPECTED = "suspected"
    CONFIRMED = "confirmed"
    CLEARING = "clearing"
    RESOLVED = "resolved"


class MigrationPhase(enum.StrEnum):
    PROPOSED = "proposed"
    PLANNED = "planned"
    SENT = "sent"
    RUNNING = "running"
    UNKNOWN = "unknown"
    VERIFYING = "verifying"
    DONE = "done"
    CANCELLED = "cancelled"
    REFUSED = "refused"
    FAILED = "failed"
    STUCK = "stuck"

    @property
    def is_open(self) -> bool:
        return self in _OPEN_PHASES


_OPEN_PHASES = frozenset(
    {
        MigrationPhase.PROPOSED,
        MigrationPhase.PLANNED,
        MigrationPhase.SENT,
        MigrationPhase.RUNNING,
        MigrationPhase.UNKNOWN,
        MigrationPhase.VERIFYING,
    }
)


class Operation(enum.StrEnum):
    """What a migration asks the scheduler for."""

    FENCE = "fence"
    MOVE = "move"
    UNFENCE = "unfence"


class Choice(enum.StrEnum):
    FENCE = "fence"
    MOVE = "move"
    UNFENCE = "unfence"
    HOLD = "hold"


class OutcomeKind(enum.StrEnum):
    ACCEPTED = "accepted"
    REFUSED = "refused"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    NOT_FOUND = "not_found"
    UNKNOWN = "unknown"


class OutcomeSource(enum.StrEnum):
    POST = "post"
    GET = "get"
    CALLBACK = "callback"


class CommandKind(enum.StrEnum):
    CANCEL = "cancel"  # target: operation id
    RELEASE = "release"  # target: incident id, node or GPU UUID
    PAUSE = "pause"
    RESUME = "resume"
    RESET_BREAKER = "reset_breaker"
    RENAME_PATTERN = "rename_pattern"  # target: pattern id, value: its new name
    CONFIRM_PATTERN = "confirm_pattern"
    REJECT_PATTERN = "reject_pattern"
    LEARN_PATTERNS = "learn_patterns"


class PatternState(enum.StrEnum):
    """What people think of a fault pattern."""

    PROPOSED = "proposed"
    CONFIRMED = "confirmed"
    REJECTED = "rejected"  # its name is used no more


class ActionKind(enum.StrEnum):
    POST = "post"
    QUERY = "query"


@dataclass(frozen=True, slots=True)
class Gpu:
    uuid: str
    node: str
    index: int | None = None
    model: str = ""
    rack: str = ""
    driver: str = ""  # version, where an exporter tells it
    driver_since_s: float = 0.0  # when it was seen to replace another; 0 = not seen


@dataclass(frozen=True, slots=True)
class Workload:
    """The work a GPU does, as far as labels tell. `kind` is job or pod."""

    kind: str
    id: str
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Mates:
    """Who a GPU may be compared with: all of one group, one tenant and one role. `in_step`
    where they wait for one another, as the ranks of a training job do; replicas that each
    answer for themselves do not. Nothing that acts reads this: work is moved by `Workload`."""

    group: str
    tenant: str = ""
    role: str = ""
    in_step: bool = False


@dataclass(frozen=True, slots=True)
class XidEvent:
    """One new Xid: an edge, never a standing gauge. `row` is the GPU's row in the frame."""

    row: int
    code: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of the fleet this frame speaks for. `reason` is empty when all is well."""

    gpus_expected: int
    gpus_reporting: int
    blind: bool = False
    partial: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """One moment of the fleet.

    `values` and `age_s` are float64 [gpus, metrics] in the units of the catalogue; NaN is
    "no value", and its age is inf. Rows keep their order while the roster only grows.
    `presence` is int8 [gpus] of `Presence`. `workloads` has one entry per row, and so has
    `mates` where labels were read; both stay the same tuple while nothing changed.
    """

    at_s: float
    gpus: tuple[Gpu, ...]
    metrics: tuple[str, ...]
    values: Floats
    age_s: Floats
    presence: npt.NDArray[np.int8]
    workloads: tuple[Workload | None, ...]
    coverage: Coverage
    xids: tuple[XidEvent, ...] = ()
    last_seen_s: Floats = field(default_factory=lambda: np.empty(0))
    mates: tuple[Mates | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """One reason, in words and numbers. `contribution` sums to the score over density rows."""

    # xid, ecc, remap, recovery, lost, density, peers, throttle, hang, memory_full, nvlink,
    # pcie_link
    kind: str
    metric: str
    text: str
    value: float | None = None
    expected: float | None = None
    unit: str = ""
    contribution: float = 0.0
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    gpu: Gpu
    kind: Kind
    severity: Severity
    pattern: str = NOVEL
    score: float = 0.0
    evidence: tuple[Evidence, ...] = ()
    may_fence: bool = False
    may_move: bool = False
    latch: bool = False  # hard evidence: clears by reset, long health or a person
    bundle_id: str = ""
    earned: Severity | None = None  # before the budget, where it has spoken
    withheld: str = ""  # why the budget tells it less loudly than that


@dataclass(frozen=True, slots=True)
class JobFinding:
    """What is wrong with a job as a whole, where none of its GPUs stands out: nothing moves.
    `rows` are the frame rows that show it, `since_s` when it began."""

    mates: Mates
    severity: Severity
    pattern: str
    evidence: Evidence
    since_s: float
    rows: tuple[int, ...]


# The codes of `Judgement.kinds`, in this order.
KINDS: Final = (Kind.NORMAL, Kind.DEVIANT, Kind.FAULT, Kind.LOST, Kind.UNKNOWN)
NORMAL, DEVIANT, FAULT, LOST, UNKNOWN = range(5)


@dataclass(frozen=True, slots=True, eq=False)
class Judgement:
    """What one tick says of the whole fleet, by frame row.

    `kinds` is int8 [gpus], an index into `KINDS`; `scores` is float64 [gpus], 1.0 = the edge
    of normal, NaN = not scored. `verdicts` holds DEVIANT, FAULT and LOST rows only, in row
    order: thousands of UNKNOWN rows cost nothing.
    """

    kinds: npt.NDArray[np.int8]
    scores: Floats
    verdicts: tuple[Verdict, ...] = ()
    resets: frozenset[int] = frozenset()  # rows whose GPU was reset or rebooted this tick
    certified: bool = True  # False: too little is known for soft evidence to page anybody
    jobs: tuple[JobFinding, ...] = ()  # for whoever makes subjects of them; no GPU's verdict
    traits: Traits | None = None


@dataclass(frozen=True, slots=True)
class Subject:
    kind: SubjectKind
    id: str


@dataclass(frozen=True, slots=True)
class Shared:
    """What several GPUs have in common on one tick: one cause, with a subject of its own.

    `rows` are its GPUs, as rows of the frame; their own soft suspicions wait while it stands.
    It makes an alert after `confirm_for_s`, or after as long as its kind takes.
    """

    subject: Subject
    kind: Kind
    severity: Severity
    pattern: str
    evidence: tuple[Evidence, ...]
    rows: tuple[int, ...] = ()
    score: float = 0.0
    node: str = ""
    workload: Workload | None = None
    confirm_for_s: float | None = None
    bundle_id: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Traits:
    """What all GPUs show, for telling what they share, by frame row. `signs` is float64 [gpus,
    `groups.SIGNS`], the part of the score that each sign has by itself, or of no rows where none
    deviates; `air_c` float64 [gpus] is how much warmer than its history the air of the host is,
    NaN = not known; `novel` bool [gpus] is work never seen before; `throttled` float64 [gpus] is
    the share of the last minutes in which heat or hardware slowed it down."""

    signs: Floats
    air_c: Floats
    novel: Bools
    throttled: Floats


@dataclass(frozen=True, slots=True)
class Member:
    """A GPU that a shared incident speaks for."""

    gpu_uuid: str
    node: str
    index: int | None = None


@dataclass(frozen=True, slots=True)
class PastAlert:
    """An alert that an incident raised under other labels, and that must be resolved."""

    alertname: str
    severity: Severity
    started_at_s: float
    ended_at_s: float


@dataclass(frozen=True, slots=True)
class Incident:
    """A deviation with a life of its own. `held_s` grows only on ticks that have data.

    `severity` is what its alert says; `worst` is what its evidence earned: the two differ
    once the work has moved off a fenced node. `last_tick_s` is the last tick that had data.
    """

    id: str
    subject: Subject
    phase: IncidentPhase
    opened_at_s: float
    since_s: float
    held_s: float
    last_tick_s: float
    kind: Kind
    severity: Severity
    pattern: str
    score: float
    evidence: tuple[Evidence, ...]
    gpu_uuid: str | None = None
    node: str = ""
    model: str = ""
    workload: Workload | None = None
    latched: bool = False
    may_fence: bool = False
    may_move: bool = False
    moved: bool = False
    fenced: bool = False
    repaired: bool = False  # its GPU was reset, or came back, since the incident opened
    confirmed_at_s: float | None = None
    resolved_at_s: float | None = None
    bundle_id: str = ""
    hold_reason: str = ""
    worst: Severity = Severity.INFO
    stronger_s: float | None = None  # how long a stronger verdict than this has stood
    gpu_index: int | None = None
    workload_nodes: tuple[str, ...] = ()  # where its work ran when it opened; () = not kept
    answer: str = ""  # the last decision, as codes: only a change is news
    alert_since_s: float | None = None
    past_alerts: tuple[PastAlert, ...] = ()
    released_by: str = ""  # a person ended it; it closes once nothing of its own is under way
    signature: Mapping[str, float] = field(default_factory=dict)  # the strongest seen, in -1..1
    like: str = ""  # the id of the pattern that it is like; empty: novel
    distance: float | None = None  # from the nearest pattern, 0 = the same; None = not compared
    level: float = 0.0  # the highest score that lasted as long as a deviation must
    low: float | None = None  # the lowest score of the last `low_s` seconds
    low_s: float = 0.0
    withheld: str = ""  # why the budget tells it less loudly than its evidence would
    part_of: str = ""  # the shared incident that speaks for it, as long as that one fires
    holds: bool = False  # of a fleet's event: it has latched the breaker
    members: tuple[Member, ...] = ()  # of a shared incident: all that ever joined, up to 1,024

    @property
    def is_open(self) -> bool:
        return self.phase is not IncidentPhase.RESOLVED

    @property
    def fires(self) -> bool:
        return self.phase in (IncidentPhase.CONFIRMED, IncidentPhase.CLEARING)


@dataclass(frozen=True, slots=True)
class Peak:
    """How high one soft incident rose, with all of its GPU, host, job or fleet that began with
    it; `id` is that of the first. `page` says that its evidence alone would have paged, `told`
    how loudly it was told. Kept for two weeks: the budget looks back on them."""

    id: str
    score: float
    at_s: float
    last_s: float
    keys: tuple[str, ...]
    page: bool = False
    told: Severity = Severity.INFO


@dataclass(frozen=True, slots=True)
class Backup:
    node: str
    gpu_uuids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Migration:
    """One fence, move or unfence, from plan to verified end."""

    operation_id: str
    incident_id: str
    operation: Operation
    node: str
    gpu_uuids: tuple[str, ...]
    phase: MigrationPhase
    attempt: int
    planned_at_s: float
    since_s: float
    deadline_s: float
    evidence_at_s: float
    epoch: int = 0
    workload: Workload | None = None
    workload_nodes: tuple[str, ...] = ()
    workload_gpu_uuids: tuple[str, ...] = ()
    exclude_nodes: tuple[str, ...] = ()
    backups: tuple[Backup, ...] = ()
    placement: tuple[Backup, ...] = ()
    reason: str = ""
    post_allowed: bool = True  # False once sent; True again only after a 404 for this id
    polled_at_s: float = 0.0
    verified_s: float = 0.0
    last_tick_s: float = 0.0
    accepted: bool = False  # the scheduler once said that it has it: a later 404 is no proof
    cancelled_by: str = ""  # the person who cancelled it: it is not planned again
    gpu_hours: float = 0.0  # its price: work lost since the last checkpoint, as far as known


@dataclass(frozen=True, slots=True)
class Past:
    """What became of the incidents of one pattern: how many ended, how, and how long the
    newest of them were open (oldest first)."""

    count: int = 0
    endings: Mapping[str, int] = field(default_factory=dict)
    durations_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class FaultPattern:
    """One way in which GPUs fail. `shapes` are signatures, any of which is this pattern; `may`
    names what can come along with it ("sm_clock-": downwards only). A shipped pattern that is
    kept in the state has no shapes: those are the program's."""

    id: str
    name: str
    origin: str = "learnt"  # or shipped, or shared: the cause of a node, rack, job or fleet
    state: PatternState = PatternState.PROPOSED
    means: str = ""
    first: str = ""  # what a person does first
    shapes: tuple[Mapping[str, float], ...] = ()
    may: tuple[str, ...] = ()
    renamed: bool = False  # the name is a person's
    said_by: str = ""
    said_at_s: float | None = None
    past: Past = Past()
    schema: int = 1  # of the dimensions of `shapes`

    def kept(self) -> FaultPattern:
        """As it is kept in the state: of a shipped one, only what is not shipped."""
        if self.origin != "shipped":
            return self
        return dataclasses.replace(self, shapes=(), may=(), means="", first="")


@dataclass(frozen=True, slots=True)
class Reason:
    """Why something is not done: a code for machines, a sentence for people."""

    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Decision:
    at_s: float
    incident_id: str
    choice: Choice
    wanted: Choice
    allowed: bool
    blocked_by: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Transition:
    """A change worth one line: of an incident, a migration, the breaker or the pause."""

    at_s: float
    entity: str  # incident, migration, breaker, pause, quarantine
    id: str
    from_phase: str
    to_phase: str
    reason: str


@dataclass(frozen=True, slots=True)
class Action:
    kind: ActionKind
    operation_id: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the scheduler, or the way to it, said of one operation."""

    operation_id: str
    kind: OutcomeKind
    source: OutcomeSource
    at_s: float
    reason: str = ""
    placement: tuple[Backup, ...] = ()
    id: int = 0  # its number once it is durable


@dataclass(frozen=True, slots=True)
class Command:
    """What a person asked for; durable before it is answered."""

    id: int
    kind: CommandKind
    target: str = ""
    actor: str = ""
    reason: str = ""
    at_s: float = 0.0
    value: str = ""  # what it sets, where it sets something


@dataclass(frozen=True, slots=True)
class Breaker:
    latched: bool = False
    reason: str = ""
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Pause:
    paused: bool = False
    reason: str = ""
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Quarantine:
    """A node that we fenced: no backup is taken from it until a person releases it."""

    node: str
    incident_id: str
    since_s: float
    operation_id: str = ""  # the fence to undo at release; empty: the scheduler was not asked
    fenced: bool = True  # False: it may not be, or is held back in our books alone
    released_by: str = ""


@dataclass(frozen=True, slots=True)
class Control:
    """Everything that must survive a restart. Keys are ids; resolved things are dropped
    from here once `housekeep` has seen them, and stay in the store's journal."""

    incidents: Mapping[str, Incident] = field(default_factory=dict)
    migrations: Mapping[str, Migration] = field(default_factory=dict)
    quarantine: Mapping[str, Quarantine] = field(default_factory=dict)
    breaker: Breaker = Breaker()
    pause: Pause = Pause()
    last_tick_s: float = 0.0
    patterns: Mapping[str, FaultPattern] = field(default_factory=dict)
    peaks: Mapping[str, Peak] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Step:
    control: Control
    judgement: Judgement
    decisions: tuple[Decision, ...]
    transitions: tuple[Transition, ...]
    actions: tuple[Action, ...]


T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """A frozen value of this module as dicts, lists, strings and numbers, for JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_plain(v) for v in value]
    return value


def from_plain(cls: type[T], plain: Any) -> T:
    """The inverse of `to_plain`. Raises TypeError, KeyError or ValueError on anything else."""
    return typing.cast(T, _build(cls, plain))


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _build(kind: Any, plain: Any) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if plain is None:
            return None
        return _build(next(a for a in args if a is not type(None)), plain)
    if origin is tuple:
        return tuple(_build(args[0], item) for item in plain)
    if origin is not None and issubclass(origin, Mapping):
        return {key: _build(args[1], item) for key, item in plain.items()}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(plain)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = _hints(kind)
        unknown = set(plain) - set(hints)
        if unknown:
            raise TypeError(f"{kind.__name__}: unknown fields {sorted(unknown)}")
        return kind(**{name: _build(hints[name], item) for name, item in plain.items()})
    if kind is float:
        return float(plain)
    if not isinstance(plain, kind):
        raise TypeError(f"expected {kind.__name__}, got {type(plain).__name__}: {plain!r}")
    return plain
