"""Why many GPUs deviate at once, as far as telemetry tells: what else changed with them.

A driver that was replaced, a limit that was set, air that got warmer, work never seen before.
Decides words only; empty ones where nothing is known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from sentinel.core.domain import Evidence, Floats, Frame, Gpu, Judgement, Presence, Verdict
from sentinel.core.placement import Fleet

_DRIVER_NEW_S: Final = 86_400.0  # a driver this new is a likelier cause than many faults
_ROOM_C: Final = 3.0  # the air of the whole fleet, in the middle, warmer than its history
_MOST: Final = 0.5
_WHYS: Final = ("driver", "temp_c", "demand", "setting")
_SAME: Final = 0.01  # clocks that chips find for themselves differ by more than that
_CAPPED: Final = 1.02  # times the limit: work that took more before is held down by it


def fleet_evidence(
    uuids: Iterable[str], fleet: Fleet, judgement: Judgement, now_s: float
) -> tuple[Evidence, ...]:
    """Why so many deviate at once, as far as telemetry tells: which signals, models and
    drivers; and whether a driver, the air of the room or the demand changed with it."""
    rows = sorted(fleet.rows[uuid] for uuid in uuids if uuid in fleet.rows)
    if not rows:
        return ()
    gpus, chosen = fleet.frame.gpus, set(rows)
    odd = [gpus[row] for row in rows]
    out = []
    own = [v for v in judgement.verdicts if fleet.rows[v.gpu.uuid] in chosen]
    patterns = Counter(v.pattern for v in own).most_common(3)
    if patterns:
        named = ", ".join(f"{pattern} on {n}" for pattern, n in patterns)
        out.append(Evidence("fleet", "signals", f"what moved: {named}", at_s=now_s))
    models, known = Counter(g.model for g in odd), Counter(g.model for g in gpus)
    if any(models):
        named = ", ".join(
            f"{n} of {known[model]} {model or 'GPUs of no known model'}"
            for model, n in models.most_common(3)
        )
        out.append(Evidence("fleet", "models", f"which GPUs: {named}", at_s=now_s))
    for metric, text in (
        ("driver", driver_text(odd, gpus, now_s)),
        ("temp_c", _room_text(judgement, fleet)),
        ("demand", _demand_text(judgement, rows)),
        ("setting", _follows(setting_text(fleet.frame, own, rows))),
    ):
        if text:
            out.append(Evidence("fleet", metric, text, at_s=now_s))
    return tuple(out)


def is_explained(evidence: Iterable[Evidence]) -> bool:
    """Whether something is known that the fleet's shift follows."""
    return any(e.kind == "fleet" and e.metric in _WHYS for e in evidence)


def _follows(text: str) -> str:
    return f"follows a setting: {text}" if text else ""


def driver_is_new(gpu: Gpu, now_s: float) -> bool:
    return gpu.driver_since_s > 0.0 and now_s - gpu.driver_since_s <= _DRIVER_NEW_S


def driver_text(odd: Sequence[Gpu], gpus: Sequence[Gpu], now_s: float) -> str:
    """What the driver has to do with it; empty where it tells nothing."""
    told = Counter(g.driver for g in odd if g.driver)
    if not told:
        return ""
    version, count = told.most_common(1)[0]
    new = [g for g in odd if g.driver == version and driver_is_new(g, now_s)]
    if len(new) > _MOST * len(odd):
        ago_s = now_s - min(g.driver_since_s for g in new)
        return (
            f"follows a driver change: {len(new)} of {len(odd)} got driver {version} within the "
            f"last {_span(ago_s)}"
        )
    everywhere = sum(g.driver == version for g in gpus)
    others = len(gpus) - len(odd)
    if count == len(odd) and others and everywhere - count < 0.1 * others:
        return f"all {count} run driver {version}, which hardly any of the other {others} do"
    return ""


def _room_text(judgement: Judgement, fleet: Fleet) -> str:
    traits = judgement.traits
    if traits is None:
        return ""
    known = traits.air_c[np.isfinite(traits.air_c) & (fleet.frame.presence == Presence.PRESENT)]
    if not len(known) or float(np.median(known)) < _ROOM_C:
        return ""
    middle_c = float(np.median(known))
    return (
        f"follows a common temperature shift: all nodes run {middle_c:.0f} °C warmer than their "
        "history, in the middle: the room or its cooling"
    )


def _demand_text(judgement: Judgement, rows: Sequence[int]) -> str:
    traits = judgement.traits
    if traits is None:
        return ""
    novel = int(np.count_nonzero(traits.novel[list(rows)]))
    if novel <= _MOST * len(rows):
        return ""
    return f"follows a change of demand: {novel} of {len(rows)} do work never seen before"


def setting_text(frame: Frame, verdicts: Sequence[Verdict], rows: Sequence[int]) -> str:
    """What was set by a person or a tool, where the values show it: a power limit below what
    the same work took before, or one clock for all of them."""
    limit_w = _values(frame, "power_limit_w")
    where = {gpu.uuid: row for row, gpu in zip(rows, (frame.gpus[r] for r in rows), strict=True)}
    wanted = {
        where[v.gpu.uuid]: float(e.expected)
        for v in verdicts
        for e in v.evidence
        if e.metric == "power_w" and e.expected is not None and v.gpu.uuid in where
    }
    held = [row for row, watts in wanted.items() if watts > _CAPPED * limit_w[row]]
    if wanted and len(held) > _MOST * len(wanted):
        set_w, before_w = (
            float(np.median([limit_w[row] for row in held])),
            float(np.median([wanted[row] for row in held])),
        )
        return f"a power limit of {set_w:.0f} W is set, the same work took {before_w:.0f} W before"
    clock = _values(frame, "sm_clock_mhz")[list(rows)]
    clock = clock[np.isfinite(clock)]
    if len(clock) > 2 and float(np.ptp(clock)) <= _SAME * float(np.median(clock)):
        return f"all of them run at {float(np.median(clock)):.0f} MHz: a clock that was set"
    return ""


def _values(frame: Frame, metric: str) -> Floats:
    if metric not in frame.metrics:
        return np.full(len(frame.gpus), np.nan)
    out: Floats = frame.values[:, frame.metrics.index(metric)]
    return out


def _span(seconds: float) -> str:
    return f"{seconds / 60.0:.0f} min" if seconds < 7200.0 else f"{seconds / 3600.0:.1f} h"
