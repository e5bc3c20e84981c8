"""One tick after the verdict: incidents, guards, plans, and what became of earlier plans.

`advance` folds a judgement, the outcomes and the commands into the state that survives a
restart and says what is to be done; it does nothing itself. Nothing leaves the process
before the caller has committed the step it came from.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from sentinel.core.domain import (
    Command,
    Control,
    Frame,
    Judgement,
    Migration,
    MigrationPhase,
    Outcome,
    Step,
    Transition,
)
from sentinel.core.placement import ModelRanks
from sentinel.core.policy import Policy


@dataclass(frozen=True, slots=True)
class Inputs:
    """What one tick is given. `epoch` is the lease under which this daemon acts."""

    frame: Frame
    outcomes: tuple[Outcome, ...] = ()
    commands: tuple[Command, ...] = ()
    policy: Policy = Policy()
    models: ModelRanks = ModelRanks()
    epoch: int = 0


def advance(control: Control, judgement: Judgement, inputs: Inputs, now_s: float) -> Step:
    """The state after this tick, the decisions taken, and the calls that may now leave."""
    after = dataclasses.replace(control, last_tick_s=now_s)
    return Step(after, judgement, (), (), ())


def resume(control: Control, now_s: float) -> tuple[Control, tuple[Transition, ...]]:
    """The state to start from after a restart: what may have left is only asked about."""
    return control, ()


def sent(migration: Migration, now_s: float) -> Migration:
    """The same migration as its call leaves; written down right before. ValueError if it
    must not leave."""
    return dataclasses.replace(
        migration, phase=MigrationPhase.SENT, since_s=now_s, post_allowed=False
    )


def housekeep(control: Control, now_s: float) -> Control:
    """Without what is over and no longer counts against any limit."""
    return control


def check_invariants(control: Control, policy: Policy) -> tuple[str, ...]:
    """Every rule that this state breaks, in words. Empty when all hold."""
    return ()
