"""What moves on many GPUs at once: one cause with a subject of its own, not many faults.

Decides to which job, node, rack or fleet a tick's verdicts belong, and which of them stand on
their own; never how long a cause must stand or what is done. The subject is the one that
explains best what deviates alike: most of it, and little that does not. A GPU belongs to at
most one cause; one that deviates far more than its group, or that the hardware itself accuses,
keeps its own incident. The cost follows what is abnormal, not the fleet.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from sentinel.core import causes
from sentinel.core.causes import BRAKE, HEAT, LINK, PACE, SIGNS
from sentinel.core.domain import (
    Bools,
    Evidence,
    Frame,
    Incident,
    Judgement,
    Kind,
    Presence,
    Severity,
    Shared,
    Subject,
    SubjectKind,
    Traits,
    Verdict,
)
from sentinel.core.evidence import RANK
from sentinel.core.features import INDEX
from sentinel.core.placement import Fleet
from sentinel.core.score import Scores
from sentinel.core.sides import ALIKE_MIN, ALIKE_SHARE, ELSEWHERE, Jobs, Sides, Standing, job_of

_FLEET_SHARE: Final = 0.1  # of the GPUs: jobs that began alike at once are then the fleet's
_AIR_TOLD_C: Final = 4.0  # a host so much warmer than the others is told, though nothing fails
_AIR_STAYS_C: Final = 3.0
_AIR_FOR_S: Final = 900.0  # inlet air moves slowly, and a door that is open is no finding
_COLUMNS: Final = {
    HEAT: (INDEX["temp_excess"], INDEX["mem_temp_excess"]),
    PACE: (INDEX["power"], INDEX["sm_clock"], INDEX["mem_clock"]),
    LINK: (INDEX["pcie_replay"],),
}


@dataclass(frozen=True, slots=True)
class Attribution:
    """`judgement` is the tick's, with the verdicts of members softened: they neither page nor
    act. `owner` maps rows to places in `causes`. `fleet` is the cause that the whole fleet
    shares, if it does. `stays` are rows of no cause on this tick that belong to an incident
    which is not over."""

    judgement: Judgement
    causes: tuple[Shared, ...] = ()
    owner: Mapping[int, int] = field(default_factory=dict)
    fleet: Shared | None = None
    stays: Mapping[int, Incident] = field(default_factory=dict)

    def places(self, kind: SubjectKind) -> list[int]:
        """The places in `causes` of subjects of one kind."""
        return [place for place, cause in enumerate(self.causes) if cause.subject.kind is kind]


def read_traits(frame: Frame, scores: Scores, braked: Bools, deviating: bool) -> Traits:
    """What every GPU shows of each sign, in causal order: the low clock of a GPU that is too hot
    is of the heat, and that of one that brakes is of the brake. `braked` [gpus] is where the
    driver has told of the power brake in the last minutes."""
    none = np.zeros((0, len(SIGNS)))
    throttled = scores.values[:, INDEX["throttled"]]
    if not deviating:
        return Traits(none, scores.air_c, scores.novel, throttled)
    part = scores.contribution
    sums = {sign: part[:, list(columns)].sum(axis=1) for sign, columns in _COLUMNS.items()}
    throttle = part[:, INDEX["throttled"]]
    with np.errstate(invalid="ignore"):
        slowed = throttle > 0.05 * scores.score
        cool = sums[HEAT] < 0.05 * scores.score
        hot = sums[HEAT] * scores.score >= 1.0  # its heat alone is beyond the edge of normal
    brakes = slowed & (braked | cool)
    hot = (hot | slowed) & ~brakes
    whole = throttle + sums[PACE]
    signs = np.zeros((len(frame.gpus), len(SIGNS)))
    signs[:, HEAT] = sums[HEAT] + np.where(hot, whole, 0.0)
    signs[:, BRAKE] = np.where(brakes, whole, 0.0)
    signs[:, PACE] = np.where(slowed | hot, 0.0, sums[PACE])
    signs[:, LINK] = sums[LINK]
    signs = np.sqrt(signs * np.nan_to_num(scores.score)[:, None])
    signs[frame.presence != Presence.PRESENT] = 0.0
    return Traits(signs, scores.air_c, scores.novel, throttled)


def worth_a_look(judgement: Judgement) -> bool:
    """Whether anything on this tick may be shared, or is odd at all."""
    if judgement.verdicts or judgement.jobs:
        return True
    traits = judgement.traits
    return traits is not None and bool(np.any(traits.air_c >= _AIR_STAYS_C))


def attribute(fleet: Fleet, judgement: Judgement, standing: Standing, cluster: str) -> Attribution:
    """The causes that several GPUs share on this tick. `standing` are the shared incidents
    that are open, by subject: what belongs to one stays with it longer than it took to join."""
    jobs = Jobs(fleet.frame)
    found = [causes.slow_job(job, fleet) for job in judgement.jobs]
    taken = {row for cause in found for row in cause.rows}
    open_rows = [
        (fleet.rows[v.gpu.uuid], v)
        for v in judgement.verdicts
        if fleet.rows[v.gpu.uuid] not in taken
    ]
    found += _events(open_rows, fleet, jobs, standing)
    taken |= {row for cause in found for row in cause.rows}
    soft = {row: v for row, v in open_rows if v.kind is Kind.DEVIANT and row not in taken}
    sides = Sides(fleet, jobs, judgement, soft, standing, cluster)
    found += sides.causes()
    joined = _joined(c for c in found if c.subject.kind is not SubjectKind.FLEET)
    joined = _above(joined, fleet, judgement, standing, cluster)
    whole = next((c for c in found if c.subject.kind is SubjectKind.FLEET), None)
    if whole is not None:  # speaks for its GPUs as long as it lasts, also when it is no news
        joined = _joined((*joined, whole))
    owner = {row: place for place, cause in enumerate(joined) for row in cause.rows}
    fleet_subject = Subject(SubjectKind.FLEET, cluster)
    wide = fleet_subject in standing or any(c.subject == fleet_subject for c in joined)
    ill = _ill_nodes(joined, fleet, standing)
    joined = _with_air(joined, fleet, judgement.traits, standing)
    whole = next((c for c in found if c.subject.kind is SubjectKind.FLEET), None)
    stays = sides.staying(owner)
    if not joined and whole is None and not stays:
        return Attribution(judgement)
    verdicts = tuple(
        _softened(v, joined[owner[row]] if row in owner else None, wide or v.gpu.node in ill)
        for v in judgement.verdicts
        for row in (fleet.rows[v.gpu.uuid],)
    )
    return Attribution(replace(judgement, verdicts=verdicts), joined, owner, whole, stays)


# ---- events: what the hardware or its driver says on many GPUs at once ---------------------


def _acts(verdict: Verdict) -> bool:
    """Hard evidence of the GPU's own."""
    return verdict.kind in (Kind.FAULT, Kind.LOST) and (
        verdict.may_fence or verdict.may_move or verdict.latch
    )


def acts_itself(verdict: Verdict) -> bool:
    """Whether a member of a shared cause keeps an incident of its own: the hardware accuses it."""
    return _acts(verdict)


def _event(verdict: Verdict) -> str:
    """What may be said of many GPUs of a job at once: an Xid, or what is but written down."""
    first = verdict.evidence[0] if verdict.evidence else None
    if first and first.kind == "xid" and first.value:
        return f"Xid {first.value:.0f}"
    return verdict.pattern if verdict.severity is Severity.INFO else ""


def _events(
    rows: list[tuple[int, Verdict]], fleet: Fleet, jobs: Jobs, standing: Standing
) -> Iterator[Shared]:
    """One code over many GPUs of one job is that job's; many broken GPUs of a node are the
    node's."""
    crashes: dict[Subject, dict[str, list[tuple[int, Verdict]]]] = defaultdict(dict)
    for row, verdict in rows:
        job, event = job_of(fleet.frame, row), _event(verdict)
        if verdict.kind is Kind.FAULT and not _acts(verdict) and job and event:
            crashes[job].setdefault(event, []).append((row, verdict))
    taken: set[int] = set()
    for job, codes in sorted(crashes.items(), key=lambda item: item[0].id):
        standing_one = standing.get(job)
        kept = [
            (event, members)
            for event, members in sorted(codes.items())
            if _is_burst(members, fleet)
            or (standing_one is not None and _joins(event, members, standing_one))
        ]
        if kept:
            cause = causes.job_event(job, len(jobs.rows(job)), kept, fleet)
            taken.update(cause.rows)
            yield cause
    by_node: dict[str, list[tuple[int, Verdict]]] = defaultdict(list)
    for row, verdict in rows:
        told = RANK[verdict.severity] > RANK[Severity.INFO]
        if verdict.kind in (Kind.FAULT, Kind.LOST) and told and row not in taken:
            by_node[verdict.gpu.node].append((row, verdict))
    for node, members in sorted(by_node.items()):
        known = standing.get(Subject(SubjectKind.NODE, node))
        here = fleet.by_node[node]
        stands = known is not None and known.kind in (Kind.FAULT, Kind.LOST)
        if stands or (len(members) >= ALIKE_MIN and len(members) >= ALIKE_SHARE * len(here)):
            yield causes.node_event(node, members, len(here))


def _is_burst(members: list[tuple[int, Verdict]], fleet: Fleet) -> bool:
    """An application's code on three GPUs is its own; a code that may be the hardware's has to
    be on two nodes before it is the job's."""
    if len({row for row, _ in members}) < ALIKE_MIN:
        return False
    return _harmless(members) or len({v.gpu.node for _, v in members}) > 1


def _joins(event: str, members: list[tuple[int, Verdict]], known: Incident) -> bool:
    """Whether it belongs to what already befell the job: the same code again, or another of the
    application's own. A code that may be the hardware's, on one GPU of a job that crashes for
    it, stays that GPU's."""
    return known.kind is Kind.FAULT and (_harmless(members) or f"{event} " in f"{known.pattern} ")


def _harmless(members: list[tuple[int, Verdict]]) -> bool:
    return all(v.severity is Severity.INFO for _, v in members)


# ---- air: what a host's GPUs have in common before any of them deviates ---------------------


def _with_air(
    found: tuple[Shared, ...], fleet: Fleet, traits: Traits | None, standing: Standing
) -> tuple[Shared, ...]:
    """Hosts, or racks, whose air is clearly warmer than that of the others. Their own part is
    taken off before any GPU is judged, so that without this it would go untold."""
    if traits is None or not np.any(traits.air_c >= _AIR_STAYS_C):
        return found
    told = {c.subject for c in found}
    hosts: dict[str, float] = {}
    rows: dict[str, list[int]] = defaultdict(list)
    for row in map(int, np.flatnonzero(np.isfinite(traits.air_c))):
        node = fleet.frame.gpus[row].node
        hosts[node] = max(float(traits.air_c[row]), hosts.get(node, -np.inf))
        rows[node].append(row)
    if len(hosts) < 2:
        return found  # one host: its air is the room's
    warm: dict[str, float] = {}
    values = np.array(list(hosts.values()))
    for place, (node, air_c) in enumerate(hosts.items()):
        if air_c < _AIR_STAYS_C:
            continue
        rest_c = float(np.median(np.delete(values, place)))
        known = standing.get(Subject(SubjectKind.NODE, node))
        stays = known is not None or Subject(SubjectKind.RACK, fleet.rack_of(node)) in standing
        limit_c = _AIR_STAYS_C if stays else _AIR_TOLD_C
        if air_c >= limit_c and air_c - rest_c >= limit_c:
            warm[node] = air_c - rest_c
    made = []
    racks: dict[str, list[str]] = defaultdict(list)
    for node in warm:
        racks[fleet.rack_of(node)].append(node)
    for rack, nodes in sorted(racks.items()):
        mine = [n for n in fleet.by_rack.get(rack, ()) if n in hosts]
        others = len(hosts) - len(mine)
        whole = rack and len(nodes) > 1 and 2 * len(nodes) >= len(mine) and others > 0
        if whole and len(warm) - len(nodes) <= ELSEWHERE * others:
            subject = Subject(SubjectKind.RACK, rack)
            members = tuple(row for node in nodes for row in rows[node])
            shift_c = float(np.median([warm[node] for node in nodes]))
            made.append(causes.air(subject, members, shift_c, len(nodes), _AIR_FOR_S))
            continue
        for node in sorted(nodes):
            subject = Subject(SubjectKind.NODE, node)
            made.append(causes.air(subject, tuple(rows[node]), warm[node], 1, _AIR_FOR_S))
    hot = {
        fleet.frame.gpus[row].node
        for cause in found
        if cause.subject.kind is SubjectKind.RACK
        for row in cause.rows
    }
    new = [c for c in made if c.subject not in told and c.node not in hot]
    return (*found, *new)


def _above(
    found: tuple[Shared, ...],
    fleet: Fleet,
    judgement: Judgement,
    standing: Standing,
    cluster: str,
) -> tuple[Shared, ...]:
    """Several jobs or nodes whose pace begins to deviate at once share a cause above them: a
    power limit, a driver, a shift of the work. Those that have been told already stay."""
    subject = Subject(SubjectKind.FLEET, cluster)
    own = [
        c
        for c in found
        if c.kind is Kind.DEVIANT
        and c.evidence[0].metric in causes.PACE_METRICS
        and not (c.subject in standing and standing[c.subject].fires)
    ]
    reporting = int(np.count_nonzero(fleet.frame.presence == Presence.PRESENT))
    enough = len(own) >= causes.SUBJECTS_MIN and (
        sum(len(c.rows) for c in own) >= _FLEET_SHARE * reporting
    )
    if not own or not (enough or subject in standing):
        return found
    rest = tuple(c for c in found if c not in own)
    return (*rest, causes.above(own, subject, fleet, judgement))


# ---- putting together -----------------------------------------------------------------------


def _joined(found: Iterable[Shared]) -> tuple[Shared, ...]:
    """One cause per subject: the gravest speaks, the others' evidence comes after it."""
    by_subject: dict[Subject, list[Shared]] = defaultdict(list)
    for cause in found:
        by_subject[cause.subject].append(cause)
    return tuple(_one(own) for own in by_subject.values())


def _one(own: list[Shared]) -> Shared:
    first, *rest = sorted(
        own,
        key=lambda c: (RANK[c.severity], c.kind is not Kind.DEVIANT, len(c.rows), c.pattern),
        reverse=True,
    )
    more = tuple(e for c in rest for e in c.evidence)
    rows = tuple(sorted({row for c in own for row in c.rows}))
    return replace(first, evidence=first.evidence + more, rows=rows)


def _ill_nodes(found: Iterable[Shared], fleet: Fleet, standing: Standing) -> frozenset[str]:
    """The nodes that, or whose rack, something is wrong with as a whole."""
    places = (SubjectKind.NODE, SubjectKind.RACK)
    gpus = fleet.frame.gpus
    now = (gpus[row].node for c in found if c.subject.kind in places for row in c.rows)
    before = (
        m.node
        for i in standing.values()
        if i.subject.kind in places and i.pattern != causes.WARM_AIR
        for m in i.members
    )
    return frozenset((*now, *before))


def _softened(verdict: Verdict, cause: Shared | None, ill: bool) -> Verdict:
    """What is shared is a ticket at most and moves nothing by itself. A GPU that deviates more
    than its ill node does may page, but whether to move off that node is a person's decision."""
    if verdict.kind is not Kind.DEVIANT or (cause is None and not ill):
        return verdict
    if cause is None:
        text = "others of its node, its rack or the fleet deviate too: look there before this GPU"
        note = Evidence(
            "density", "shared", text, at_s=verdict.evidence[0].at_s if verdict.evidence else 0
        )
        evidence = (*verdict.evidence, note)
        return replace(verdict, may_fence=False, may_move=False, evidence=evidence)
    severity = Severity.WARNING if verdict.severity is Severity.CRITICAL else verdict.severity
    return replace(verdict, severity=severity, may_fence=False, may_move=False)
