"""When everything is held: too little telemetry, or too much of the fleet at once.

Decides whether this tick may be acted on at all; never for or against one GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from sentinel.core.domain import (
    Control,
    Frame,
    IncidentPhase,
    Kind,
    Presence,
    Reason,
    Shared,
    Subject,
    SubjectKind,
    Verdict,
)
from sentinel.core.incident import stands
from sentinel.core.policy import Limits

NEW_FOR_S: Final = 1800.0  # a GPU that has been deviating for longer is not news of the fleet

_NODES_NAMED: Final = 8


@dataclass(frozen=True, slots=True)
class FleetHold:
    """Why everything is held, if it is, and whether hard evidence alone is enough for it.
    `uuids` are the GPUs that deviate."""

    reason: Reason | None = None
    hard: bool = False
    uuids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Odd:
    node: str
    hard: bool


def coverage_percent(frame: Frame) -> float:
    """How much of the known fleet this frame speaks for. A GPU that is missing while its
    siblings report has been spoken for: that is evidence, not silence."""
    coverage = frame.coverage
    if coverage.blind or coverage.gpus_expected == 0:
        return 0.0
    told = np.count_nonzero(
        (frame.presence == Presence.PRESENT) | (frame.presence == Presence.VANISHED)
    )
    return 100.0 * max(int(told), coverage.gpus_reporting) / coverage.gpus_expected


def coverage_reason(frame: Frame, limits: Limits) -> Reason | None:
    """Why this tick's telemetry is not enough to act on."""
    coverage = frame.coverage
    because = f": {coverage.reason}" if coverage.reason else ""
    if coverage.blind:
        return Reason("blind", f"no telemetry at all{because}")
    if coverage.gpus_expected == 0:
        return Reason("coverage", f"no GPU has ever been seen{because}")
    percent = coverage_percent(frame)
    if percent < limits.coverage_percent:
        text = (
            f"only {percent:.0f} % of {coverage.gpus_expected} GPUs report, "
            f"{limits.coverage_percent:.0f} % are needed"
        )
        return Reason("coverage", text + because)
    if coverage.partial:
        return Reason("partial", f"the telemetry is marked as partial{because}")
    return None


def fleet_hold(
    frame: Frame,
    verdicts: tuple[Verdict, ...],
    control: Control,
    limits: Limits,
    nodes: int,
    now_s: float,
    explained: Mapping[str, Subject] | None = None,
    whole: Shared | None = None,
) -> FleetHold:
    """How much of the fleet newly deviates at once, before this tick's incidents are folded.

    The GPUs that deviate on this very tick count, and those that opened within `NEW_FOR_S`
    and still stand. Fenced nodes do not: they are known. Neither do errors that only the
    application makes: a crashing job of a thousand GPUs is not a fleet that breaks.

    `explained` tells which node, rack or job speaks for a GPU: the largest of them is one cause
    and does not count, two are a coincidence that does. `whole` is what the fleet deviates in
    alike, which is enough by itself in a fleet too small for the limits.
    """
    odd = _odd_gpus(verdicts, control, now_s)
    reporting = int(np.count_nonzero(frame.presence == Presence.PRESENT))
    limit = max(float(limits.fleet_hold_gpus), limits.fleet_hold_percent / 100.0 * reporting)
    if nodes <= 1:
        limit = max(limit, 3.0)
    on_nodes = sorted({o.node for o in odd.values()})
    spoken_for = Counter(explained[uuid] for uuid in odd if explained and uuid in explained)
    rest = len(odd) - max(spoken_for.values(), default=0)
    if whole is None and (rest < limit or len(on_nodes) < min(2, nodes)):
        return FleetHold()
    if not on_nodes:
        return FleetHold()
    more = ", ..." if len(on_nodes) > _NODES_NAMED else ""
    text = (
        f"{len(odd)} GPUs on {len(on_nodes)} nodes began to deviate at once (limit {limit:.0f} "
        f"of {reporting} reporting): more likely the work or the software than so many broken "
        f"GPUs ({', '.join(on_nodes[:_NODES_NAMED])}{more})"
    )
    hard = sum(o.hard for o in odd.values()) >= limit
    return FleetHold(Reason("fleet_hold", text), hard, tuple(sorted(odd)))


def _odd_gpus(verdicts: tuple[Verdict, ...], control: Control, now_s: float) -> Mapping[str, _Odd]:
    odd = {
        v.gpu.uuid: _Odd(v.gpu.node, v.kind is not Kind.DEVIANT)
        for v in verdicts
        if v.kind is not Kind.FAULT or v.may_fence or v.latch
    }
    for i in control.incidents.values():
        if i.subject.kind is not SubjectKind.GPU or not i.is_open or i.gpu_uuid is None:
            continue
        if now_s - i.opened_at_s > NEW_FOR_S:
            odd.pop(i.gpu_uuid, None)
        elif (i.phase is IncidentPhase.SUSPECTED or stands(i)) and (
            i.kind is not Kind.FAULT or i.may_fence or i.latched
        ):
            odd[i.gpu_uuid] = _Odd(i.node, i.kind is not Kind.DEVIANT)
    return {uuid: o for uuid, o in odd.items() if o.node not in control.quarantine}
