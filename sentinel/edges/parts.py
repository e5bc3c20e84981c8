"""How one question for a fleet becomes several queries.

A part asks for some of the metric names under some matchers. Names are dealt out so that
neighbours of the catalogue, which mostly come from one exporter, land in different parts.
Parts of one question are disjoint and together the whole, but each is answered on its own: a
scrape that arrives between two answers is in the later one alone, so metrics of one GPU may be
a scrape apart. The fold of telemetry takes that for what it is, and the next tick has both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

_NO_LABEL = "sentinel_asked_at"  # that no series has
_SPECIAL = re.compile(r"([\\.+*?()|\[\]{}^$])")


@dataclass(frozen=True, slots=True)
class Part:
    """`matchers` is the inside of a selector, without braces, and may be empty."""

    names: tuple[str, ...]
    matchers: str = ""

    def query(self, window_s: float, *, unlike_s: float | None = None) -> str:
        """A range selector: the raw samples of the window, in every version of PromQL.

        `unlike_s`, the present, makes its text unlike that of any other moment.
        """
        pattern = "|".join(_SPECIAL.sub(r"\\\1", name) for name in self.names)
        text = pattern.replace("\\", "\\\\").replace('"', '\\"')
        more = f",{self.matchers}" if self.matchers else ""
        if unlike_s is not None:
            more += f',{_NO_LABEL}!="{unlike_s:.3f}"'
        return f'{{__name__=~"{text}"{more}}}[{_duration(window_s)}]'

    def halves(self) -> tuple[Part, ...]:
        """Two parts that together are this one; none where it has a single name."""
        if len(self.names) < 2:
            return ()
        return replace(self, names=self.names[::2]), replace(self, names=self.names[1::2])


def whole(
    names: Sequence[str], selector: str, split_by: Sequence[str] = (), *, least: int = 1
) -> list[Part]:
    """The parts to begin with, at least `least` of them where there are so many names: all of
    the names under the selector, and under each of `split_by` in turn."""
    common = _inside(selector)
    parts = [
        Part(tuple(names), ",".join(m for m in (common, _inside(each)) if m))
        for each in (split_by or ("",))
    ]
    groups = min(math.ceil(least / len(parts)), max(1, len(names)))
    return [replace(part, names=part.names[i::groups]) for part in parts for i in range(groups)]


def _inside(selector: str) -> str:
    return selector.strip().removeprefix("{").removesuffix("}").strip().strip(",")


def _duration(value_s: float) -> str:
    value_ms = max(1, math.ceil(round(value_s * 1000, 3)))
    return f"{value_ms // 1000}s" if value_ms % 1000 == 0 else f"{value_ms}ms"
