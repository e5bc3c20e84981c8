"""How a report looks on a terminal.

What is well takes a line; what is not is told where it belongs, and once more at the end with
what to do, the first thing first, since the end is what a terminal shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sentinel.doctor import howto
from sentinel.doctor.facts import Fleet, Metric
from sentinel.doctor.judge_metrics import absent
from sentinel.doctor.report import SECTIONS, Finding, Report, Severity

_MARKS: Final = {
    Severity.OK: "✓", Severity.ADVICE: "!", Severity.PROBLEM: "✗", Severity.UNKNOWN: "?",
}  # fmt: skip
_PLAIN: Final = {**_MARKS, Severity.OK: "+", Severity.PROBLEM: "X"}
_STYLES: Final = {
    Severity.OK: "green",
    Severity.ADVICE: "yellow",
    Severity.PROBLEM: "bold red",
    Severity.UNKNOWN: "magenta",
}
_WORST: Final = (Severity.PROBLEM, Severity.UNKNOWN, Severity.ADVICE, Severity.OK)
_TITLE: Final = max(map(len, SECTIONS.values())) + 1
_OK_LINES: Final = 3  # of a section that is well; the rest is counted
_TO_DO: Final = 4  # told with all there is to do; the others in a line each
_METRICS: Final = 6


class _Marks:
    """The marks of the terminal at hand: a plain one cannot draw a tick."""

    def __init__(self, plain: bool) -> None:
        self.step = "-" if plain else "→"
        self._of = _PLAIN if plain else _MARKS

    def of(self, severity: Severity) -> Text:
        mark, style = self._of[severity], _STYLES[severity]
        return Text(mark, style)


def report(found: Report, *, full: bool = False, plain: bool = False) -> RenderableType:
    """The whole report; with `full` nothing is left out, with `plain` it is ASCII but for what
    others have named."""
    marks = _Marks(plain)
    parts: list[RenderableType] = [_head(found), Text()]
    parts += [_section(name, found, full, marks) for name in SECTIONS if _of(name, found)]
    fleet = found.facts.fleet if found.facts else None
    if fleet is not None and fleet.gpus:
        table = _metrics(fleet, full)
        if table is not None:
            parts += [Text(), table]
    for block in found.blocks:
        parts += [Text(), _heading(f"Add to {block.into}:")]
        lines = [Text(f"  {line}", "cyan", overflow="fold") for line in block.lines]
        parts.append(Group(*lines))
        if block.note:
            parts.append(Padding(Text(block.note, "dim"), (0, 0, 0, 2)))
    if found.to_do:
        parts += [Text(), *_to_do(found, full, marks)]
    parts += [Text(), _summary(found)]
    return Group(*parts)


def _head(found: Report) -> Text:
    where = f", cluster {found.cluster}, mode {found.mode}" if found.mode else ""
    return Text.assemble(
        ("GPU Sentinel doctor ", "bold"), (f"{found.version}  {found.config}{where}", "dim")
    )


def _heading(text: str) -> Text:
    return Text(text, "bold")


def _of(section: str, found: Report) -> list[Finding]:
    return [f for f in found.findings if f.section == section]


def _section(name: str, found: Report, full: bool, marks: _Marks) -> RenderableType:
    """What is not well before what is; of that, at most a few lines."""
    findings = sorted(_of(name, found), key=lambda f: _WORST.index(f.severity))
    well = [f for f in findings if f.severity is Severity.OK]
    left_out = 0 if full else max(0, len(well) - _OK_LINES)
    table = Table.grid(padding=(0, 1))
    table.add_column(width=1)
    table.add_column(width=_TITLE, no_wrap=True)
    table.add_column()
    for place, finding in enumerate(findings[: len(findings) - left_out]):
        title = Text(SECTIONS[name], "bold") if place == 0 else Text()
        is_well = finding.severity is Severity.OK
        mark = Text() if is_well and place > 0 else marks.of(finding.severity)
        told = "" if is_well else _STYLES[finding.severity].removeprefix("bold ")
        table.add_row(mark, title, Text(finding.what, told))
    if left_out:
        table.add_row("", "", Text(f"and {left_out} more that are well", "dim"))
    return table


# ---- metrics ------------------------------------------------------------------------


def _metrics(fleet: Fleet, full: bool) -> RenderableType | None:
    """The metrics that are not there, with what matters most spelt out; all with `full`."""
    missing = {m.name for m in absent(fleet.metrics)}
    blank = {m.name for m in fleet.metrics if m.blank and m.name in howto.WANTED}
    listed = [m for m in fleet.metrics if full or m.name in missing | blank]
    if not listed:
        return None
    most = [m for m in listed if full or m.name in (*howto.HARD, *howto.DEMAND)]
    rows = most or listed[:_METRICS]
    title = "Every metric" if full else "Metrics that are missing, what matters most first"
    table = Table(
        box=None, pad_edge=False, header_style="dim", title=title, title_style="bold",
        title_justify="left",
    )  # fmt: skip
    table.add_column("metric", no_wrap=True)
    table.add_column("on GPUs", justify="right", no_wrap=True)
    table.add_column("what it adds", ratio=1)
    for metric in rows:
        table.add_row(Text(metric.label), _share(metric), Text(metric.adds, "dim"))
    rest = [m.label for m in listed if m not in rows]
    if not rest:
        return table
    return Group(table, Text(f"and, of less weight: {', '.join(rest)}", "dim"))


def _share(metric: Metric) -> Text:
    if not metric.able:
        return Text("not on these", "dim")
    text = f"{metric.present} of {metric.able}"
    if metric.present == metric.able:
        return Text(text, "green")
    if metric.blank:
        return Text(f"{text}, blank", "yellow")
    return Text(text, "red" if metric.name in howto.HARD else "yellow")


# ---- what to do ---------------------------------------------------------------------


def _to_do(found: Report, full: bool, marks: _Marks) -> Iterator[RenderableType]:
    yield _heading("To do, the first thing first")
    listed = [f for f in found.to_do if f.do or f.severity is Severity.PROBLEM]
    for number, finding in enumerate(listed, 1):
        brief = not full and number > _TO_DO
        yield _one_to_do(number, finding, marks, brief=brief)
    if not full and len(listed) > _TO_DO:
        yield Text("     --full tells what to do about each", "dim")


def _one_to_do(number: int, finding: Finding, marks: _Marks, *, brief: bool) -> RenderableType:
    parts: list[RenderableType] = [Text(finding.what, _STYLES[finding.severity])]
    if finding.why and not brief:
        parts.append(Text(finding.why, "dim"))
    for step in () if brief else finding.do:
        if step.startswith(" "):
            parts.append(Text(f" {step}", "cyan"))
        else:
            parts.append(_step(step, marks))
    table = Table.grid(padding=(0, 1))
    table.add_column(width=2, justify="right", style="dim")
    table.add_column(width=1)
    table.add_column(ratio=1)
    table.add_row(str(number), marks.of(finding.severity), Group(*parts))
    return table


def _step(text: str, marks: _Marks) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=1)
    table.add_column(ratio=1)
    table.add_row(Text(marks.step, "bold"), text)
    return table


def _summary(found: Report) -> Text:
    problems = any(f.severity is Severity.PROBLEM for f in found.findings)
    style = "bold red" if not found.can_work else "bold yellow" if problems else "bold green"
    return Text(found.summary, style)
