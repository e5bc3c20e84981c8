"""What every way to a scheduler offers, whatever is behind it.

An order is given once and asked about afterwards, by the migration that was written down
before it left. Nothing here raises for what the scheduler does: a doubt is an outcome
(UNKNOWN), and only proof that nothing was begun is a refusal.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from sentinel.core.domain import Incident, Migration, Outcome
from sentinel.core.scheduler import View


class Hook(Protocol):
    """Orders to a scheduler. Idempotent by `migration.operation_id`; called from any thread;
    raises nothing."""

    def post(self, migration: Migration, incident: Incident) -> Outcome:
        """Gives the order. A refusal is only what proves that nothing was begun."""
        ...

    def query(self, migration: Migration) -> Outcome:
        """What became of it, and what moves it on. NOT_FOUND only where it provably never
        arrived; `at_s` is when it was asked, not when it was answered."""
        ...


class Source(Protocol):
    """What a scheduler says of its nodes and of the work on them."""

    def view(self, nodes: Collection[str]) -> View:
        """Of these nodes (the exporters' names). DependencyError when it cannot be had."""
        ...
