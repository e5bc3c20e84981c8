"""One moment of the daemon, frozen, as every reader outside the tick thread sees it.

The tick thread swaps in a new one at the end of each tick; nobody else writes. It decides one
thing: whether the daemon may be relied on right now (`reasons`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from sentinel.core.budget import UNCALIBRATED, Calibration, Thresholds
from sentinel.core.domain import Control, FaultPattern, Frame, Judgement, Mode
from sentinel.edges.bundle import Refusal

DURATION_BUCKETS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_OVERDUE_TICKS: Final = 4.0
_OVERDUE_MIN_S: Final = 15.0


@dataclass(frozen=True, slots=True)
class TickStats:
    """How the loop has fared since the daemon started.

    `buckets[i]` counts the finished ticks of at most `DURATION_BUCKETS_S[i]` seconds that took
    longer than the bucket before it; the last one counts all that were longer still.
    """

    interval_s: float = 15.0
    count: int = 0
    failures: int = 0
    duration_s: float = 0.0
    duration_sum_s: float = 0.0
    last_finished_s: float = 0.0
    error: str = ""  # of the last tick, if it failed
    buckets: tuple[int, ...] = (0,) * (len(DURATION_BUCKETS_S) + 1)

    def finished(self, now_s: float, duration_s: float) -> TickStats:
        place = sum(duration_s > limit for limit in DURATION_BUCKETS_S)
        counts = tuple(n + (i == place) for i, n in enumerate(self.buckets))
        return replace(
            self,
            count=self.count + 1,
            duration_s=duration_s,
            duration_sum_s=self.duration_sum_s + duration_s,
            last_finished_s=now_s,
            error="",
            buckets=counts,
        )

    def failed(self, error: str) -> TickStats:
        return replace(self, failures=self.failures + 1, error=error)

    def overdue_s(self, now_s: float) -> float:
        """Seconds since the last finished tick, if that is too long; else 0."""
        age_s = now_s - self.last_finished_s
        return age_s if age_s > max(_OVERDUE_MIN_S, _OVERDUE_TICKS * self.interval_s) else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    at_s: float
    version: str
    mode: Mode
    cluster: str
    control: Control
    frame: Frame
    judgement: Judgement
    bundle_id: str = ""
    bundle_learnt_to_s: float = 0.0
    tick: TickStats = TickStats()
    alertmanagers: Mapping[str, tuple[bool, str]] = field(default_factory=dict)
    rejected: Mapping[str, int] = field(default_factory=dict)
    calibration: Calibration = UNCALIBRATED
    limits: Thresholds | None = None  # what the budget asks of soft evidence now
    patterns: Mapping[str, FaultPattern] = field(default_factory=dict)
    refused: Refusal | None = None  # a newer bundle that was learnt and not adopted

    def reasons(self, now_s: float) -> tuple[str, ...]:
        """Why the daemon is not to be relied on; empty when it is."""
        found = []
        overdue_s = self.tick.overdue_s(now_s)
        if overdue_s:
            found.append(f"the last tick finished {overdue_s:.0f} s ago")
        if self.tick.error:
            found.append(f"the last tick failed: {self.tick.error}")
        if self.frame.coverage.blind:
            found.append(f"blind: {self.frame.coverage.reason or 'no telemetry'}")
        elif not self.frame.coverage.gpus_expected:
            found.append("no GPU is seen: check prometheus.selector and the exporters")
        return tuple(found)
