"""Learning fault patterns in a process of its own, from the incidents that a daemon wrote down."""

from __future__ import annotations

from typing import Any

from sentinel.config import Config
from sentinel.core.patterns import LEARNT
from sentinel.edges import patterns as files


def relearn(config: Config) -> dict[str, Any]:
    """Learns from what the daemon last gave, and leaves the answer where it takes it from.

    Gives numbers for people. Raises StateError when the files cannot be read or written.
    """
    from sentinel.learn.patterns import learn  # the daemon imports its caller, not scikit-learn

    folder = config.state_dir()
    incidents, kept = files.given(folder)
    made = learn(incidents, config.catalog().patterns.keeping(kept))
    if incidents:
        files.answer(folder, made.patterns)
    learnt = [p for p in made.patterns if p.origin == LEARNT]
    return {
        "incidents": made.incidents,
        "novel": made.novel,
        "patterns": [{"id": p.id, "name": p.name, "incidents": p.past.count} for p in learnt],
    }
