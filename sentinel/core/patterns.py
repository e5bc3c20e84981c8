"""What a fault looks like: the signature of an incident, and the known pattern it is like.

A signature says which dimensions moved, which way and how far, in -1..1 each, and which hard
evidence there is; it is read from evidence alone, so that incidents already written down have
one too. Over an incident's life it keeps the strongest that each dimension has shown: a GPU
that loses its cooling is hot first and throttles later, and both belong to the name.

A `Book` holds the patterns that are known: those that physics names from the first day, those
learnt from incidents, and what people said of either. The distance of a signature `s` from a
shape `p` (the direction in which that kind of fault moves things) is

    d^2 = (unexplained + missing) / (|s|^2 + |p|^2),   0 = the same, 1 = nothing in common

where *unexplained* is what moved and is no part of the shape, *missing* what the shape moves
and did not, and what the pattern may drag along (a throttled clock) counts as neither.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final

import numpy as np

from sentinel.core.domain import (
    NOVEL,
    Bools,
    Evidence,
    FaultPattern,
    Floats,
    Incident,
    Kind,
    Past,
    PatternState,
    SubjectKind,
)
from sentinel.core.features import FEATURES

SHIPPED, LEARNT, SHARED = "shipped", "learnt", "shared"  # where a pattern is from
SCHEMA: Final = 1  # of the dimensions: one may be added, none changes its meaning within a number
# more than a quarter of what moved, and of what should have, is not as the pattern has it: a
# second thing that moved as much as the first already puts a signature at 0.58
NEAR: Final = 0.5
_FULL_UNITS: Final = 3.0  # units of a feature's floor at which a deviation counts in full
_FULL_THROTTLE: Final = 0.35  # share of the time, the floor of the throttling feature
_HEAT: Final = frozenset({"temp_c", "mem_temp_c"})
_HEAT_SHARE: Final = 0.2  # of the whole deviation: less of it comes along and is no cause
_AIR_C: Final = 30.0  # about what a GPU without power would be at
_NAMED: Final = 0.4  # of the strongest dimension: less does not show in a name
_PAST_KEPT: Final = 64

# dimension -> words for "moved up" and "moved down"; hard evidence only ever goes up
DIMENSIONS: Final[Mapping[str, tuple[str, str]]] = {
    "temp": ("temperature high", "temperature low"),
    "mem_temp": ("HBM temperature high", "HBM temperature low"),
    "power": ("power high", "power low"),
    "sm_clock": ("SM clock high", "SM clock low"),
    "mem_clock": ("memory clock high", "memory clock low"),
    "throttled": ("clock throttled", ""),
    "throttle_heat": ("throttled by heat", ""),
    "throttle_brake": ("power brake", ""),
    "throttle_hw": ("throttled by hardware", ""),
    "slower": ("slower than its mates", ""),
    "hang": ("busy without doing anything", ""),
    "memory_full": ("memory full", ""),
    "corrected": ("corrected ECC errors", ""),
    "uncorrectable": ("uncorrectable ECC errors", ""),
    "remap_pending": ("row remap pending", ""),
    "remap_failed": ("row remap failed", ""),
    "nvlink": ("NVLink errors", ""),
    "pcie": ("PCIe errors", ""),
    "pcie_link": ("PCIe link slower", ""),
    "bus": ("fell off the bus", ""),
    "lost": ("reports no more", ""),
    "stopped": ("GPU stopped answering", ""),
    "firmware": ("firmware fault", ""),
    "supply": ("power supply fault", ""),
    "recovery": ("driver asks for a reset", ""),
    "application": ("application error", ""),
    "other": ("another Xid", ""),
}
NAMES: Final = tuple(DIMENSIONS)
_PLACE: Final = {name: i for i, name in enumerate(NAMES)}
# what may come along with any fault of the hardware's own word, and says nothing against it
SOFT: Final = ("temp", "mem_temp", "power", "sm_clock", "mem_clock", "throttled", "throttle_heat",
               "throttle_brake", "throttle_hw", "slower", "hang", "memory_full")  # fmt: skip

_DENSITY: Final = {
    "temp_c": "temp",
    "mem_temp_c": "mem_temp",
    "power_w": "power",
    "sm_clock_mhz": "sm_clock",
    "mem_clock_mhz": "mem_clock",
    "throttle_reasons": "throttled",
    "ecc_sbe_volatile": "corrected",
    "pcie_replay": "pcie",
}
_RESPONSE: Final = {f.metric: f for f in reversed(FEATURES) if not f.demand}
# hard evidence by its kind, and by its metric where that decides
_HARD: Final[Mapping[tuple[str, str], str]] = {
    ("ecc", "ecc_dbe_volatile"): "uncorrectable",
    ("ecc", "ecc_dbe_aggregate"): "uncorrectable",
    ("ecc", "ecc_sbe_volatile"): "corrected",
    ("ecc", "ecc_sbe_aggregate"): "corrected",
    ("remap", "remap_failure"): "remap_failed",
    ("remap", "remap_pending"): "remap_pending",
    ("recovery", "recovery_action"): "recovery",
    ("lost", "up"): "lost",
}
_SYMPTOMS: Final = frozenset({"hang", "memory_full", "nvlink", "pcie_link", "slower"})
_PACE: Final = "change"  # the unit of a pace that its mates lost and this GPU did not
_THROTTLE: Final = frozenset({"throttle_heat", "throttle_brake", "throttle_hw"})

Signature = Mapping[str, float]  # dimension -> -1..1; what did not move is left out


def signature(evidence: Iterable[Evidence], xids: Mapping[int, str]) -> dict[str, float]:
    """The signature of these reasons; `xids` gives the dimension of an Xid's code."""
    every = tuple(evidence)
    out: dict[str, float] = {}
    for e in every:
        if e.kind == "density" and e.metric in _HEAT and not _is_heat(e, every):
            continue
        name, strength = _read(e, xids)
        if name and abs(strength) > abs(out.get(name, 0.0)):
            out[name] = round(strength, 3)
    return out


def _read(e: Evidence, xids: Mapping[int, str]) -> tuple[str, float]:
    if e.kind == "xid":
        return xids.get(int(e.value or 0), "other"), 1.0
    if e.kind == "peers" and e.unit == _PACE:
        return "slower", 1.0
    if e.kind in ("density", "peers"):
        return _DENSITY.get(e.metric, ""), _deviation(e)
    if e.kind == "throttle" and e.metric in _THROTTLE:
        return e.metric, min(1.0, (e.value or 0.0) / _FULL_THROTTLE)
    if e.kind in _SYMPTOMS:
        return e.kind, 1.0
    return _HARD.get((e.kind, e.metric), ""), 1.0


def _is_heat(e: Evidence, every: tuple[Evidence, ...]) -> bool:
    """Whether a deviating temperature is heat of its own. A GPU whose power fell within seconds
    is still as warm as its former power made it: above what its power of now explains, below
    what its power of before did. Newton's law of cooling, from the air's temperature up."""
    density = [x for x in every if x.kind == "density"]
    if e.value is None or e.expected is None or e.value < e.expected:
        return True
    if e.contribution < _HEAT_SHARE * sum(x.contribution for x in density):
        return False
    usual_c = e.expected
    for x in density:
        if x.metric == "power_w" and x.value and x.expected and 0.0 < x.value < x.expected:
            usual_c += max(e.expected - _AIR_C, 0.0) * (x.expected / x.value - 1.0)
    return e.value > usual_c


def _deviation(e: Evidence) -> float:
    """How far a feature lies from what was expected, in its floor's units, as -1..1."""
    feature = _RESPONSE.get(e.metric)
    if feature is None or e.value is None or e.expected is None:
        return 0.0
    value, expected = e.value, e.expected
    if feature.unit == "events":
        value, expected = np.log10(1.0 + max(value, 0.0)), np.log10(1.0 + max(expected, 0.0))
    unit = feature.floor * (abs(expected) if feature.relative else 1.0)
    if not unit > 0.0 or not np.isfinite(value - expected):
        return 0.0
    full = 1.0 if e.metric == "throttle_reasons" else _FULL_UNITS
    return float(np.clip((value - expected) / (unit * full), -1.0, 1.0))


def stronger(a: Signature, b: Signature) -> Signature:
    """The strongest that each dimension shows in either; `a` itself where `b` adds nothing."""
    more = {k: v for k, v in b.items() if abs(v) > abs(a.get(k, 0.0))}
    return {**a, **more} if more else a


def vector(of: Signature) -> Floats:
    """float64 [len(NAMES)], scaled so that its strongest dimension is 1: what a thing is like
    is the direction in which it moves, not how far. What is no dimension is left out."""
    out = np.zeros(len(NAMES))
    for name, strength in of.items():
        if name in _PLACE:
            out[_PLACE[name]] = strength
    most = np.abs(out).max()
    return out / most if most > 0.0 else out


def named_from(of: Signature) -> str:
    """A name from the strongest dimensions: "temperature high, clock throttled"."""
    line = vector(of)
    order = [i for i in np.argsort(-np.abs(line), kind="stable") if abs(line[i]) >= _NAMED]
    said = [DIMENSIONS[NAMES[i]][0 if line[i] > 0 else 1] for i in order[:3]]
    return ", ".join(word for word in said if word) or NOVEL


@dataclass(frozen=True, slots=True)
class Match:
    """The nearest pattern and how far it is; `near` says whether that is a likeness."""

    pattern: FaultPattern
    distance: float

    @property
    def near(self) -> bool:
        return self.distance <= NEAR


class Book:
    """Every pattern that is known, in the order in which they win ties. Immutable."""

    def __init__(
        self, shipped: Sequence[FaultPattern] = (), xids: Mapping[int, str] | None = None,
        kept: Mapping[str, FaultPattern] | None = None,
    ) -> None:  # fmt: skip
        self.shipped, self.xids, self.kept = tuple(shipped), dict(xids or {}), dict(kept or {})
        known = {p.id: p for p in self.shipped}
        every = [_said(p, self.kept.get(p.id)) for p in self.shipped]
        every += [p for p in self.kept.values() if p.id not in known and p.origin != SHIPPED]
        self.patterns: dict[str, FaultPattern] = {p.id: p for p in every}
        used = [p for p in every if p.state is not PatternState.REJECTED]
        pairs = [(p, shape) for p in used for shape in p.shapes]
        self._owner = [p for p, _ in pairs]
        self._shapes = np.array([vector(s) for _, s in pairs]).reshape(-1, len(NAMES))
        self._free = np.array([_free(p, s) for p, s in pairs], dtype=bool).reshape(
            -1, 2, len(NAMES)
        )
        self._known: dict[tuple[tuple[str, float], ...], Match | None] = {}

    def keeping(self, kept: Mapping[str, FaultPattern]) -> Book:
        """This book with what was learnt and what people said."""
        return Book(self.shipped, self.xids, kept)

    def signature(self, evidence: Iterable[Evidence]) -> dict[str, float]:
        return signature(evidence, self.xids)

    def match(self, of: Signature) -> Match | None:
        """The nearest pattern; None where nothing moved or nothing is known."""
        key = tuple(sorted(of.items()))
        if key not in self._known:
            if len(self._known) > 4096:
                self._known.clear()
            self._known[key] = self._nearest(of)
        return self._known[key]

    def _nearest(self, of: Signature) -> Match | None:
        line = vector(of)
        if not self._owner or not line.any():
            return None
        distance = distances(line, self._shapes, self._free)
        best = int(np.argmin(np.round(distance, 6)))
        return Match(self._owner[best], float(distance[best]))

    def called(self, id: str) -> str:
        """The name of a pattern, whatever people think of it; empty for none."""
        known = self.patterns.get(id)
        return known.name if known else ""

    def clash(self, name: str, *, but: str) -> str:
        """The id of another pattern in use that goes by this name; empty for none."""
        wanted = name.casefold()
        for p in self.patterns.values():
            same = p.name.casefold() == wanted and p.state is not PatternState.REJECTED
            if same and p.id != but:
                return p.id
        return ""

    def name(self, evidence: Iterable[Evidence], otherwise: str) -> str:
        """The name of the pattern that these reasons are like, else `otherwise`."""
        found = self.match(self.signature(evidence))
        return found.pattern.name if found and found.near else otherwise


def distances(line: Floats, shapes: Floats, free: Bools) -> Floats:
    """Distance [shapes] of one signature from each shape; `free` [shapes, 2, dimensions] is
    what may move up or down along with it and counts neither way."""
    part = shapes != 0.0
    s = np.broadcast_to(line, shapes.shape)
    let = ~part & np.where(s > 0.0, free[:, 0], free[:, 1])
    against = s * np.sign(shapes) < 0.0
    missing = np.where(
        against, np.abs(s) + np.abs(shapes), np.maximum(np.abs(shapes) - np.abs(s), 0.0)
    )
    wrong = np.where(part, missing, np.where(let, 0.0, s))
    size = np.where(let, 0.0, s * s).sum(axis=1) + (shapes * shapes).sum(axis=1)
    share = (wrong * wrong).sum(axis=1) / np.where(size > 0.0, size, 1.0)
    out: Floats = np.sqrt(np.clip(share, 0.0, 1.0))
    return out


def _free(pattern: FaultPattern, shape: Signature) -> Bools:
    """[2, dimensions]: what may move up, and down. Other shapes of a pattern are its own."""
    free = np.zeros((2, len(NAMES)), dtype=bool)
    others = [name for other in pattern.shapes for name in other if name not in shape]
    for word in (*pattern.may, *others):
        name, sign = (word[:-1], word[-1]) if word[-1] in "+-" else (word, "")
        for place in SOFT if name == "soft" else (name,):
            if place in _PLACE:
                free[0, _PLACE[place]] |= sign != "-"
                free[1, _PLACE[place]] |= sign != "+"
    return free


def _said(shipped: FaultPattern, kept: FaultPattern | None) -> FaultPattern:
    """A shipped pattern with what people said of it; its shape is what this version ships."""
    if kept is None:
        return shipped
    name = kept.name if kept.renamed else shipped.name
    return replace(
        shipped, name=name, renamed=kept.renamed, state=kept.state, said_by=kept.said_by,
        said_at_s=kept.said_at_s, past=kept.past,
    )  # fmt: skip


def pattern_from(plain: Mapping[str, Any]) -> FaultPattern:
    """One row of patterns.yaml. Raises ValueError, KeyError or TypeError naming what is wrong."""
    row = dict(plain)
    made = FaultPattern(
        id=row.pop("id"),
        name=row.pop("name"),
        origin=SHIPPED,
        means=row.pop("means"),
        first=row.pop("first"),
        shapes=tuple({str(k): float(v) for k, v in s.items()} for s in row.pop("shapes")),
        may=tuple(row.pop("may", ())),
    )
    source = row.pop("source")
    used = {name for shape in made.shapes for name in shape}
    used |= {word.rstrip("+-") for word in made.may} - {"soft"}
    unknown = sorted(used - set(NAMES)) + sorted(row)
    if unknown or not source or not made.shapes or not re.fullmatch(r"[a-z][a-z0-9-]+", made.id):
        raise ValueError(f"patterns.yaml: {made.id}: unknown {unknown}, or a key is empty")
    return made


# ---- what became of like incidents ------------------------------------------------------


def ending(incident: Incident) -> str:
    """How an incident ended, in one word for counting."""
    if incident.moved:
        return "moved"
    if incident.repaired:
        return "reset"
    return "released" if incident.released_by else "cleared by itself"


def shared_id(incident: Incident) -> str:
    """The id of the pattern of an incident that is about more than one GPU: it goes by the name
    of its cause. Empty for a GPU's, for blindness, and for what waits for a person."""
    if incident.subject.kind is SubjectKind.GPU or incident.kind is Kind.UNKNOWN:
        return ""
    return "shared-" + re.sub(r"[^a-z0-9]+", "-", incident.pattern.lower()).strip("-")


def lived_on(past: Past, incident: Incident) -> Past:
    """`past` with one more incident, that has ended."""
    how = ending(incident)
    lasted_s = max(0.0, (incident.resolved_at_s or 0.0) - incident.opened_at_s)
    return Past(
        past.count + 1,
        {**past.endings, how: past.endings.get(how, 0) + 1},
        (*past.durations_s, round(lasted_s, 1))[-_PAST_KEPT:],
    )


def likeness(incident: Incident, kept: Mapping[str, FaultPattern]) -> str:
    """One line: which pattern an incident is like, how near, and what became of like ones.
    Empty where its reasons have no signature."""
    if incident.distance is None:
        shared = kept.get(shared_id(incident))
        return f"Pattern: {shared.name}{_before(shared)}" if shared else ""
    if not incident.like:
        return (
            f"Pattern: {incident.pattern}, like nothing known (distance {incident.distance:.2f})."
        )
    known = kept.get(incident.like)
    said = f", {known.state} by {known.said_by}" if known and known.said_by else ""
    head = f"Pattern: {incident.pattern} (distance {incident.distance:.2f}{said})"
    return head + _before(known)


def _before(known: FaultPattern | None) -> str:
    if known is None or not known.past.count:
        return "; the first of its kind here."
    past = known.past
    parts = sorted(past.endings.items(), key=lambda item: (-item[1], item[0]))
    told = ", ".join(f"{n} {how}" for how, n in parts)
    lasted = _span(median(past.durations_s))
    return f"; {past.count} like it before: {told}; {lasted} in the median."


def _span(seconds: float) -> str:
    if seconds < 120.0:
        return f"{seconds:.0f} s"
    return f"{seconds / 60.0:.0f} min" if seconds < 7200.0 else f"{seconds / 3600.0:.1f} h"


# ---- what was learnt, and what people say ------------------------------------------------


def adopt(
    kept: Mapping[str, FaultPattern], learnt: Sequence[FaultPattern]
) -> dict[str, FaultPattern]:
    """What is kept after relearning. What a person named, confirmed or rejected stays as it
    was, and only its history is brought up to date; of the rest the newest learning decides."""
    fresh = {p.id: p for p in learnt}
    out = {
        id: replace(old, past=fresh[id].past) if id in fresh else old
        for id, old in kept.items()
        if old.said_by or old.origin != LEARNT
    }
    out.update((id, new) for id, new in fresh.items() if id not in out)
    return out
