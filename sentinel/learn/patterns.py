"""Fault patterns learnt from incidents: what keeps happening here and has no name yet.

Incidents that are near a known pattern (physics names many from the first day, people others)
are that pattern. The rest is clustered by density (DBSCAN on signatures of unit length, so that
two of the same direction are the same, however far each went); what happens often enough alike
becomes a pattern of its own, named from its strongest dimensions until a person names it. What
is alone stays novel.

Ids are stable: a cluster that lies where a learnt pattern lay keeps its id, and a new one is
called by its place. What a person named or confirmed stays, with its shape, whatever is learnt
later; what a person rejected is not proposed again. Learning twice from the same incidents
gives the same patterns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from sklearn.cluster import DBSCAN

from sentinel.core.domain import FaultPattern, Floats, Incident, Ints, Past, PatternState
from sentinel.core.patterns import (
    LEARNT,
    NAMES,
    Book,
    Match,
    Signature,
    lived_on,
    named_from,
    vector,
)

# between signatures of unit length, an angle of 35 degrees. On 256 incidents of six simulated
# fleets, without any known pattern, the adjusted Rand index is 0.99 with it, 0.84 with 0.5 and 0.97
# with 0.7; HDBSCAN reaches 0.54, since it takes faults of one kind apart where one is tighter
EPS: Final = 0.6
MIN_INCIDENTS: Final = 3  # twice may be chance
_STEP: Final = 0.05  # signatures are told apart in such steps: so many of a kind cost as one
_SAME_PLACE: Final = 0.5  # between unit centres, below which a cluster is the pattern it was
_IN_NAME: Final = 0.2  # of a centre's strongest dimension: less is left out of its shape


@dataclass(frozen=True, slots=True)
class Learnt:
    """What was learnt. `patterns` is to be kept (`core.patterns.adopt`): new ones, those of
    before that still hold, and what became of the incidents of shipped ones. `of` maps each
    incident's id to that of its pattern, empty for novel."""

    patterns: tuple[FaultPattern, ...] = ()
    of: Mapping[str, str] = field(default_factory=dict)
    incidents: int = 0
    novel: int = 0


def learn(incidents: Sequence[Incident], book: Book) -> Learnt:
    """Patterns from these incidents; those of `book` that a person spoke of stay in force, those
    learnt before hold where their incidents still are. Any number of incidents will do."""
    seen = _with_signature(incidents, book)
    said = {id: p for id, p in book.kept.items() if p.said_by or p.origin != LEARNT}
    known = book.keeping(said)
    rest = [s for i, s in seen if not _near(known.match(s))]
    before = [p for p in book.kept.values() if p.origin == LEARNT and p.shapes]
    found = _clusters(rest, before)
    full = book.keeping({**said, **{p.id: p for p in found}})
    of, past = {}, dict.fromkeys(full.patterns, Past())
    for incident, s in sorted(seen, key=lambda pair: (pair[0].resolved_at_s or 0.0, pair[0].id)):
        match = full.match(s)
        id = of[incident.id] = match.pattern.id if match and match.near else ""
        if id and not incident.is_open:
            past[id] = lived_on(past[id], incident)
    made = [
        replace(was.kept(), past=past[id] if past[id].count else was.past)
        for id, was in full.patterns.items()
        if past[id].count or was.origin == LEARNT
    ]
    return Learnt(tuple(made), of, len(of), sum(not id for id in of.values()))


def _with_signature(incidents: Sequence[Incident], book: Book) -> list[tuple[Incident, Signature]]:
    """Confirmed incidents with the signature they keep, or else that of their evidence."""
    pairs = [
        (i, i.signature or book.signature(i.evidence))
        for i in incidents
        if i.confirmed_at_s is not None
    ]
    return [(i, s) for i, s in pairs if vector(s).any()]


def _near(match: Match | None) -> bool:
    return match is not None and match.near


def _clusters(rest: Sequence[Signature], before: Sequence[FaultPattern]) -> list[FaultPattern]:
    """New patterns, largest first, under the ids of those that lay there before."""
    if len(rest) < MIN_INCIDENTS:
        return []
    lines: Floats = _unit(np.array([vector(s) for s in rest]))
    steps, which, counts = np.unique(
        np.round(lines / _STEP).astype(np.int64), axis=0, return_inverse=True, return_counts=True
    )
    rounded: Floats = steps.astype(np.float64) * _STEP
    labels = clustered(_unit(rounded), counts)[which.reshape(-1)]
    # what a person confirmed or named keeps its shape, and these incidents are not like it
    places = {
        p.id: _unit(vector(p.shapes[0])[None])[0]
        for p in before
        if not p.said_by or p.state is PatternState.REJECTED
    }
    rejected = {p.id for p in before if p.state is PatternState.REJECTED}
    out: dict[str, FaultPattern] = {}
    numbers, sizes = np.unique(labels[labels >= 0], return_counts=True)
    for number in numbers[np.argsort(-sizes, kind="stable")]:
        centre = np.median(lines[labels == number], axis=0)
        shape = _shape(centre)
        if not shape:
            continue
        place = _unit(vector(shape)[None])[0]
        near = {id: float(np.linalg.norm(place - at)) for id, at in places.items()}
        nearest = min(near, key=lambda id: (near[id], id), default="")
        if nearest and near[nearest] <= _SAME_PLACE:
            if nearest in rejected or nearest in out:
                continue
            old = next(p for p in before if p.id == nearest)
            out[nearest] = replace(old, name=named_from(shape), shapes=(shape,))
            continue
        id = _id(place)
        while id in out or any(p.id == id for p in before):
            id += "x"
        out[id] = FaultPattern(
            id, named_from(shape), shapes=(shape,),
            means="keeps happening here, and is like nothing that is known",
            first="look at what these incidents have in common, then confirm, rename or reject it",
        )  # fmt: skip
    return list(out.values())


def clustered(lines: Floats, counts: Ints) -> Ints:
    """The cluster of each signature [n], -1 for none; `counts` [n] is how often it was seen."""
    found = DBSCAN(eps=EPS, min_samples=MIN_INCIDENTS).fit(lines, sample_weight=counts)
    labels: Ints = found.labels_.astype(np.int64)
    return labels


def _shape(centre: Floats) -> dict[str, float]:
    most = float(np.abs(centre).max())
    if most <= 0.0:
        return {}
    scaled = centre / most
    return {
        NAMES[i]: round(float(scaled[i]), 2) for i in np.flatnonzero(np.abs(scaled) >= _IN_NAME)
    }


def _unit(lines: Floats) -> Floats:
    length = np.linalg.norm(lines, axis=1, keepdims=True)
    out: Floats = np.divide(lines, length, out=np.zeros_like(lines), where=length > 0.0)
    return out


def _id(place: Floats) -> str:
    """Called by where it lies, in coarse steps."""
    coarse = ",".join(
        f"{NAMES[i]}{round(4 * float(place[i]))}" for i in np.flatnonzero(np.abs(place) >= 0.125)
    )
    return "learnt-" + hashlib.sha256(coarse.encode()).hexdigest()[:8]
