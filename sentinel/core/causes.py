"""What a shared cause is called, and how it reads: names, headlines and evidence.

Decides the words, the kind and the severity of a cause once its GPUs are known; never which
GPUs those are. A cause says how many GPUs of how many deviate alike, how far, and what else is
known that tells why: a driver that was replaced, air that got warmer, work never seen before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from sentinel.core.context import driver_text, fleet_evidence, setting_text
from sentinel.core.domain import (
    Evidence,
    Gpu,
    JobFinding,
    Judgement,
    Kind,
    Mates,
    Severity,
    Shared,
    Subject,
    SubjectKind,
    Verdict,
    Workload,
)
from sentinel.core.evidence import RANK
from sentinel.core.placement import Fleet

# What deviates alike: heat, the power brake, the pace (clocks and power), errors of the link.
HEAT, BRAKE, PACE, LINK = range(4)
SIGNS: Final = ("heat", "power brake", "clocks and power", "PCIe errors")
_METRICS: Final = {
    HEAT: ("temp_c", "mem_temp_c", "throttle_reasons"),
    BRAKE: ("throttle_reasons", "sm_clock_mhz", "power_w"),
    PACE: ("sm_clock_mhz", "power_w", "mem_clock_mhz"),
    LINK: ("pcie_replay",),
}
PACE_METRICS: Final = _METRICS[PACE]
_NAMES: Final = {
    (SubjectKind.NODE, HEAT): "node overheating",
    (SubjectKind.RACK, HEAT): "rack overheating",
    (SubjectKind.NODE, BRAKE): "power brake on the node",
    (SubjectKind.RACK, BRAKE): "power brake in the rack",
    (SubjectKind.NODE, PACE): "clocks or power of the whole node",
    (SubjectKind.JOB, PACE): "clocks or power of the whole job",
    (SubjectKind.NODE, LINK): "PCIe errors of the node",
}
_LOOK: Final = {
    (SubjectKind.NODE, HEAT): "look at the fans, the inlet air and the power supplies of the node",
    (SubjectKind.RACK, HEAT): "look at the cooling of the rack: hot aisle, doors, blanking plates",
    (SubjectKind.NODE, BRAKE): "look at the power supplies of the node and their feeds",
    (SubjectKind.RACK, BRAKE): "look at the power distribution of the rack",
    (SubjectKind.NODE, PACE): "look for a clock or power limit that was set on the node, or a BIOS "
    "or driver change",
    (SubjectKind.JOB, PACE): "most likely the work or a setting of the job: ask its owner",
    (SubjectKind.NODE, LINK): "look at the PCIe switch, risers and cables of the node",
}
FLEET_WIDE: Final = "fleet-wide deviation"
WARM_AIR: Final = "warm inlet air"
_MEMBERS_SHOWN: Final = 7
_NODES_NAMED: Final = 8
_WHOLE: Final = 0.9  # of a job: if so much of it runs at a setting, nobody stands out
SUBJECTS_MIN: Final = 3  # jobs or nodes that begin to deviate alike at once: one cause above them


@dataclass(frozen=True, slots=True)
class Place:
    """A subject, its rows that deviate alike, and how many of its GPUs report at all."""

    subject: Subject
    rows: tuple[int, ...]
    reporting: int


def job_subject(work: Workload, mates: Mates | None) -> Subject:
    """The job that a piece of work is a part of. A pod's name, and that of what it is a replica
    of, are unique in their namespace only."""
    named = mates.group if mates is not None else work.id
    pod_of = work.tenant if work.kind == "pod" else ""
    return Subject(SubjectKind.JOB, f"{pod_of}/{named}" if pod_of else named)


def called(subject: Subject) -> str:
    """A subject in a sentence. A node's name says by itself what it is."""
    if subject.kind is SubjectKind.FLEET:
        return "the fleet"
    return subject.id if subject.kind is SubjectKind.NODE else f"{subject.kind} {subject.id}"


def alike(
    place: Place,
    sign: int,
    verdicts: Mapping[int, Verdict],
    strength: Mapping[int, float],
    fleet: Fleet,
    pages: bool,
) -> Shared:
    """Several GPUs of one subject that deviate alike: as loud as the loudest of them, and a
    ticket at most unless `pages`: the hardware slows them down."""
    subject, frame = place.subject, fleet.frame
    gpus = frame.gpus
    strongest = sorted(place.rows, key=lambda row: (-strength[row], row))
    told = [(row, verdicts[row]) for row in strongest if row in verdicts]
    key = (subject.kind, sign)
    nodes = sorted({gpus[row].node for row in place.rows})
    where = "" if subject.kind is SubjectKind.NODE else f" on {_listed(nodes, 'node')}"
    typical = _typical(sign, [v for _, v in told])
    moved = f": {typical.text}" if typical else ""
    head = (
        f"{len(place.rows)} of {place.reporting} GPUs of {called(subject)}{where} deviate alike "
        f"in {SIGNS[sign]}{moved}"
    )
    value = (typical.value, typical.expected, typical.unit) if typical else (None, None, "")
    metric = typical.metric if typical else _METRICS[sign][0]
    score = float(np.median([strength[row] for row in place.rows]))
    evidence = [Evidence("group", metric, head, *value, score, frame.at_s)]
    if key in _LOOK:
        text = f"more likely one cause than {len(place.rows)} faults: {_LOOK[key]}"
        evidence.append(Evidence("group", "cause", text, at_s=frame.at_s))
    driver = driver_text([gpus[row] for row in place.rows], gpus, frame.at_s)
    if driver:
        evidence.append(Evidence("group", "driver", driver, at_s=frame.at_s))
    setting = setting_text(frame, [v for _, v in told], place.rows) if sign == PACE else ""
    if setting:
        evidence.append(Evidence("group", "setting", setting, at_s=frame.at_s))
    evidence += [_of_member(v) for _, v in told[:_MEMBERS_SHOWN]]
    loudest = max((v.severity for _, v in told), key=lambda s: RANK[s], default=Severity.INFO)
    if loudest is not Severity.INFO:  # below a ticket, its budget is spent
        loudest = Severity.CRITICAL if pages else Severity.WARNING
    whole = len(place.rows) >= _WHOLE * place.reporting
    if setting and whole and subject.kind is SubjectKind.JOB:
        loudest = Severity.INFO  # it was set, and nobody of the job stands out: nothing fails
    return Shared(
        subject,
        Kind.DEVIANT,
        loudest,
        _NAMES.get(key, FLEET_WIDE),
        tuple(evidence),
        place.rows,
        score,
        nodes[0] if subject.kind is SubjectKind.NODE else "",
        _one_work(place.rows, fleet),
        bundle_id=told[0][1].bundle_id if told else "",
    )


def _typical(sign: int, verdicts: Iterable[Verdict]) -> Evidence | None:
    """The sign's most told metric, with the middle of its values and of what is normal."""
    found: dict[str, list[Evidence]] = {}
    for verdict in verdicts:
        for e in verdict.evidence:
            if e.metric in _METRICS[sign] and e.value is not None and e.expected is not None:
                found.setdefault(e.metric, []).append(e)
    if not found:
        return None
    metric = max(found, key=lambda m: (len(found[m]), -_METRICS[sign].index(m)))
    own = found[metric]
    value = float(np.median([e.value for e in own]))
    expected = float(np.median([e.expected for e in own]))
    unit = own[0].unit
    if metric == "throttle_reasons":
        text = f"throttled {value:.0%} of the time in the middle, normally {expected:.0%}"
    elif unit == "°C":
        what = "HBM temperature" if metric == "mem_temp_c" else "GPU temperature"
        text = f"{what} {value:.0f} °C in the middle, {value - expected:+.0f} °C from normal"
    else:
        words = {"sm_clock_mhz": "SM clock", "mem_clock_mhz": "memory clock", "power_w": "power"}
        change = f", {(value - expected) / expected:+.0%} from normal" if expected else ""
        text = f"{words.get(metric, 'PCIe replays')} {value:.0f} {unit} in the middle{change}"
    return Evidence("group", metric, text, value, expected, unit)


def _of_member(verdict: Verdict) -> Evidence:
    first = verdict.evidence[0] if verdict.evidence else Evidence("group", "", verdict.pattern)
    text = f"{place_of(verdict.gpu)}: {first.text}"
    return Evidence(
        "member",
        first.metric,
        text,
        first.value,
        first.expected,
        first.unit,
        first.contribution,
        first.at_s,
    )


def place_of(gpu: Gpu) -> str:
    number = gpu.index if gpu.index is not None else gpu.uuid
    return f"GPU {number} of {gpu.node}"


def job_event(
    subject: Subject,
    size: int,
    codes: Sequence[tuple[str, list[tuple[int, Verdict]]]],
    fleet: Fleet,
) -> Shared:
    """One event, or a few, over many GPUs of one job: the job's own, a ticket at most. `codes`
    are what was told, an Xid by its code, each with (row, verdict) of the GPUs that told it."""
    members = [member for _, own in codes for member in own]
    rows = tuple(sorted({row for row, _ in members}))
    nodes = sorted({v.gpu.node for _, v in members})
    harmless = all(v.severity is Severity.INFO for _, v in members)
    at_s = members[0][1].evidence[0].at_s
    named = " and ".join(code for code, _ in codes)
    head = (
        f"{named} on {len(rows)} of {size} GPUs of {called(subject)} at once, on "
        f"{_listed(nodes, 'node')}: one event of the job, not {len(rows)} broken GPUs"
    )
    first = members[0][1].evidence[0]
    evidence = [Evidence("group", first.metric, head, first.value, 0.0, "", 1.0, at_s)]
    evidence += [_of_member(v) for _, v in members[:_MEMBERS_SHOWN]]
    return Shared(
        subject,
        Kind.FAULT,
        Severity.INFO if harmless else Severity.WARNING,
        f"{named} over a job",
        tuple(evidence),
        rows,
        workload=_one_work(rows, fleet),
    )


def above(own: Sequence[Shared], subject: Subject, fleet: Fleet, judgement: Judgement) -> Shared:
    """Several jobs or nodes that began to deviate alike at once: one event of the fleet, a
    ticket at most, for none of them acts."""
    rows = tuple(sorted({row for cause in own for row in cause.rows}))
    at_s = fleet.frame.at_s
    loud = any(
        v.severity is not Severity.INFO
        for v in judgement.verdicts
        if fleet.rows[v.gpu.uuid] in set(rows)
    )
    names = [called(c.subject) for c in own]
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    head = (
        f"{len(rows)} GPUs of {len(own)} jobs or nodes began to deviate alike at once "
        f"({', '.join(names[:4])}{more}): more likely one change than {len(own)}"
    )
    first = own[0].evidence[0]
    evidence = [
        Evidence("fleet", first.metric, head, first.value, first.expected, first.unit, at_s=at_s),
        *fleet_evidence((fleet.frame.gpus[row].uuid for row in rows), fleet, judgement, at_s),
        *(c.evidence[0] for c in own[:4]),
    ]
    return Shared(
        subject,
        Kind.DEVIANT,
        Severity.WARNING if loud else Severity.INFO,
        FLEET_WIDE,
        tuple(evidence),
        rows,
        max(c.score for c in own),
    )


def slow_job(job: JobFinding, fleet: Fleet) -> Shared:
    """A job that slowed down as a whole, as its GPUs say of one another."""
    work = next((w for row in job.rows if (w := fleet.frame.workloads[row])), None)
    named = Subject(SubjectKind.JOB, job.mates.group)
    return Shared(
        job_subject(work, job.mates) if work is not None else named,
        Kind.DEVIANT,
        Severity.WARNING if RANK[job.severity] > RANK[Severity.WARNING] else job.severity,
        job.pattern,
        (job.evidence,),
        job.rows,
        workload=_one_work(job.rows, fleet),
    )


def _one_work(rows: Iterable[int], fleet: Fleet) -> Workload | None:
    """The work of these GPUs, if it is one."""
    works = {w for row in rows if (w := fleet.frame.workloads[row]) is not None}
    return next(iter(works)) if len(works) == 1 else None


def node_event(node: str, members: Sequence[tuple[int, Verdict]], size: int) -> Shared:
    """Many GPUs of one node broken at once: the node's fault. Their own evidence acts."""
    worst = max((v.severity for _, v in members), key=lambda s: RANK[s])
    kind = Kind.FAULT if any(v.kind is Kind.FAULT for _, v in members) else Kind.LOST
    rows = tuple(sorted({row for row, _ in members}))
    patterns = Counter(v.pattern for _, v in members)
    named = ", ".join(f"{pattern} ({n})" for pattern, n in patterns.most_common(3))
    at_s = max((e.at_s for _, v in members for e in v.evidence), default=0.0)
    head = (
        f"{len(rows)} of {size} GPUs of {node} failed together: {named}; more likely the node "
        f"(power, PCIe switch, driver) than {len(rows)} GPUs"
    )
    evidence = [Evidence("group", "", head, at_s=at_s)]
    evidence += [_of_member(v) for _, v in members[:_MEMBERS_SHOWN]]
    return Shared(
        Subject(SubjectKind.NODE, node),
        kind,
        worst,
        "several GPUs of the node failing",
        tuple(evidence),
        rows,
        node=node,
    )


def air(
    subject: Subject, rows: tuple[int, ...], shift_c: float, hosts: int, confirm_for_s: float
) -> Shared:
    """A host or a rack whose air is warmer than that of the others: a ticket, nothing fails."""
    what = "all its GPUs" if hosts == 1 else f"all GPUs of {hosts} of its nodes"
    head = (
        f"{called(subject)} runs {shift_c:.0f} °C warmer than the other nodes do, each against its "
        f"own history: {what} alike, none fails yet"
    )
    look = _LOOK[(subject.kind, HEAT)]
    evidence = (
        Evidence("group", "temp_c", head, shift_c, 0.0, "°C", 1.0),
        Evidence("group", "cause", f"one cause outside the GPUs: {look}"),
    )
    node = subject.id if subject.kind is SubjectKind.NODE else ""
    return Shared(
        subject,
        Kind.DEVIANT,
        Severity.WARNING,
        WARM_AIR,
        evidence,
        rows,
        node=node,
        confirm_for_s=confirm_for_s,
    )


def _listed(names: Sequence[str], what: str) -> str:
    if len(names) == 1:
        return names[0]
    more = ", ..." if len(names) > _NODES_NAMED else ""
    return f"{len(names)} {what}s ({', '.join(names[:_NODES_NAMED])}{more})"
