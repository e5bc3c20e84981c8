"""What a site allows: the limits, times and mode that decisions are made under.

Built once from the configuration and handed to every step, so that the core never reads
a file. Every default here is the default of the configuration key of the same name.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sentinel.core.domain import Mode, Severity


@dataclass(frozen=True, slots=True)
class Limits:
    """How much may be taken away from a fleet. All of them hold at once."""

    open_moves: int = 1
    fenced_nodes: int = 2
    fenced_percent: float = 1.0  # of the nodes, but at least one node
    gpu_hours_lost_per_day: float = 500.0
    attempts_per_node: int = 3  # migrations of one node within a day
    cooldown_s: float = 300.0  # between two moves away from one node
    coverage_percent: float = 80.0  # of the GPUs known must report
    fleet_hold_percent: float = 10.0  # of the reporting GPUs deviating at once
    fleet_hold_gpus: int = 8  # and at least so many, on at least two nodes


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds; those that a configuration leaves at auto follow the tick (`from_tick`)."""

    tick_s: float = 15.0
    deviant_for_s: float = 120.0
    fault_for_s: float = 0.0
    lost_for_s: float = 15.0
    clear_for_s: float = 300.0
    clear_latched_for_s: float = 1800.0
    sent_timeout_s: float = 60.0
    poll_s: float = 15.0
    migration_deadline_s: float = 900.0
    verify_for_s: float = 60.0
    evidence_max_age_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Budget:
    """How many alerts of soft evidence a week the whole cluster may make, and the score below
    which none of it pages."""

    pages_per_week: float = 2.0
    tickets_per_week: float = 20.0
    page_score: float = 1.3


@dataclass(frozen=True, slots=True)
class Policy:
    cluster: str = "default"
    mode: Mode = Mode.OBSERVE
    limits: Limits = Limits()
    times: Times = Times()
    budget: Budget = Budget()
    fence_severity: Severity = Severity.CRITICAL
    move_severity: Severity = Severity.CRITICAL
    attempts_max: int = 2  # tries of one incident's fence or move after a proven refusal
    spare_nodes: frozenset[str] = field(default_factory=frozenset)
    spare_gpus: frozenset[str] = field(default_factory=frozenset)
    confirm_nodes: bool = False  # a scheduler can be asked: it must know a node to act on it
    view_max_age_s: float = 60.0  # what it said longer ago than this counts as not heard
    assume_spares: bool = False  # backtest without configured spares: a free backup exists
