"""The doctor's words: findings, and what they come to."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sentinel.doctor.facts import Facts

SCHEMA: Final = 1
SECTIONS: Final = {
    "configuration": "Configuration",
    "prometheus": "Prometheus",
    "exporters": "Exporters",
    "names": "Node names",
    "gpus": "GPUs",
    "metrics": "Metrics",
    "daemon": "The daemon",
    "alertmanagers": "Alertmanagers",
    "hook": "Hook",
    "state": "State",
    "watchers": "Watching it",
}


class Severity(enum.StrEnum):
    OK = "ok"
    ADVICE = "advice"  # all works; this would be better
    PROBLEM = "problem"  # something is wrong, whether or not the daemon can bear it
    UNKNOWN = "unknown"  # could not be found out


@dataclass(frozen=True, slots=True)
class Finding:
    """`code` names the finding for machines and in docs/doctor.md. `do` are steps in order; a
    step that begins with a blank is text to copy. `exit_code` is what the command ends with
    for it alone, `stops` whether the daemon cannot work at all because of it. `brief` is `what`
    in a few words, where that is long."""

    code: str
    severity: Severity
    section: str
    what: str
    why: str = ""
    do: tuple[str, ...] = ()
    exit_code: int = 0
    stops: bool = False
    brief: str = ""


@dataclass(frozen=True, slots=True)
class Block:
    """Lines to copy: `into` says where they go."""

    kind: str
    into: str
    lines: tuple[str, ...]
    note: str = ""


_FIRST: Final = (2, 3, 1, 70, 0)  # of several exit codes the one that must be seen to first


@dataclass(frozen=True, slots=True)
class Report:
    """`findings` in the order of their sections; `facts` is None where the configuration
    itself is wrong."""

    version: str
    config: str
    cluster: str
    mode: str
    findings: tuple[Finding, ...]
    facts: Facts | None = None
    blocks: tuple[Block, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 the daemon can work, 1 a finding stops or cripples it, 2 the configuration is
        wrong, 3 something it depends on cannot be reached, 70 a bug of ours."""
        return min((f.exit_code for f in self.findings), key=_FIRST.index, default=0)

    @property
    def can_work(self) -> bool:
        return not any(f.stops for f in self.findings)

    @property
    def to_do(self) -> tuple[Finding, ...]:
        """All that is not well: what stops the daemon first, what can wait last."""
        return tuple(
            sorted((f for f in self.findings if f.severity is not Severity.OK), key=_urgency)
        )

    @property
    def summary(self) -> str:
        """One line for the end."""
        problems = [f for f in self.to_do if f.severity is Severity.PROBLEM]
        stops = [f for f in problems if f.stops]
        if stops:
            more = len(problems) - 1
            rest = f" (and {_count(more, 'more problem')})" if more else ""
            return f"The daemon cannot work: {stops[0].brief or stops[0].what}{rest}."
        seen = self._seen()
        cripples = next((f for f in self.to_do if f.exit_code), None)
        if cripples is not None:
            more = len(problems) - 1
            rest = f" (and {_count(more, 'more problem')})" if more else ""
            return f"The daemon can work only in part: {cripples.brief or cripples.what}{rest}."
        parts = [
            _count(sum(f.severity is s for f in self.to_do), word)
            for s, word in (
                (Severity.PROBLEM, "problem"),
                (Severity.UNKNOWN, "question left open"),
                (Severity.ADVICE, "piece of advice"),
            )
            if any(f.severity is s for f in self.to_do)
        ]
        return f"The daemon can work: {'; '.join([seen, ', '.join(parts) or 'nothing to do'])}."

    def _seen(self) -> str:
        fleet = self.facts.fleet if self.facts else None
        if fleet is None:
            return "GPUs not looked at"
        nodes = _count(fleet.naming.nodes, "node")
        return f"{fleet.reporting} of {_count(fleet.gpus, 'GPU')} on {nodes} report"

    def plain(self) -> dict[str, Any]:
        """The body of `--json`."""
        return {
            "schema": SCHEMA,
            "version": self.version,
            "config": self.config,
            "cluster": self.cluster,
            "mode": self.mode,
            "can_work": self.can_work,
            "exit_code": self.exit_code,
            "summary": self.summary,
            "findings": [_plain(f) for f in (*self.to_do, *self._well())],
            "add": [_plain(block) for block in self.blocks],
            "facts": _plain(self.facts),
        }

    def _well(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.severity is Severity.OK)


_SOON: Final = ("hard-evidence-missing", "work-unnamed")  # of all advice, what pays most
_LATER: Final = (  # good to have, or what comes by itself
    "metrics-missing",
    "metrics-blank",
    "baseline-none",
    "baseline-models",
    "rules-missing",
    "daemon-not-scraped",
    "names-domains",
    "peers-few",
    "model-unknown",
    "history-short",
    "retention-short",
)


def _urgency(finding: Finding) -> tuple[int, int]:
    if finding.stops:
        return 0, 0
    if finding.exit_code:
        return 1, _FIRST.index(finding.exit_code)
    if finding.severity is Severity.ADVICE:
        return 3, _LATER.index(finding.code) + 1 if finding.code in _LATER else -(
            finding.code in _SOON
        )
    return (2 if finding.severity is Severity.PROBLEM else 4), 0


def _count(n: int, word: str) -> str:
    if word == "piece of advice":
        return f"{n} {'piece' if n == 1 else 'pieces'} of advice"
    if word == "question left open":
        return f"{n} {'question' if n == 1 else 'questions'} left open"
    return f"{n} {word}" if n == 1 else f"{n} {word}s"


def _plain(value: Any) -> Any:
    """As JSON holds it: no NaN, no infinity, no types of ours."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, enum.StrEnum) else value
