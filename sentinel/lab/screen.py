"""The terminal of the demonstration: the fleet, the timeline, the alert, and the job's place."""

from __future__ import annotations

import time
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.layout import Layout
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from sentinel.lab.story import INJECTED, Story

_STYLES: Final = {
    "deviant": "bold yellow",
    "fault": "bold white on red",
    "lost": "bold white on magenta",
    "unknown": "dim",
}
_LEGEND: Final = "■ busy  · idle  △ deviant  ✖ fault\n? lost or silent  (blue: spare hosts)"


def render(story: Story, gpus: list[dict[str, Any]], spare_hosts: list[str]) -> Layout:
    """`gpus` is what the daemon says of every GPU, in any order."""
    layout = Layout()
    layout.split_column(Layout(_headline(story), size=3), Layout(name="middle", ratio=1))
    layout["middle"].split_row(
        Layout(Panel(_fleet(story, gpus, spare_hosts), title="the fleet"), size=40),
        Layout(name="right", ratio=1),
    )
    layout["right"].split_column(
        Layout(Panel(_timeline(story), title="what happened"), ratio=5),
        Layout(Panel(_alert(story), title="the alert, in its own words"), ratio=4),
        Layout(Panel(_place(story), title="the job"), size=5),
    )
    return layout


def _headline(story: Story) -> Panel:
    target = story.target
    moment = story.moments.get(INJECTED)
    since = f"  +{time.time() - moment.at_s:.0f} s" if moment else ""
    text = f"{story.fault} on {target.host} GPU {target.index} ({target.model}){since}"
    return Panel(Text(text, style="bold"), style="red" if story.missing else "green")


def _fleet(story: Story, gpus: list[dict[str, Any]], spare_hosts: list[str]) -> Group:
    by_host: dict[str, list[dict[str, Any]]] = {}
    for gpu in sorted(gpus, key=lambda gpu: (gpu["node"], gpu["index"] or 0)):
        by_host.setdefault(gpu["node"], []).append(gpu)
    job = story.job()
    runs_on = set(job["uuids"]) if job else set()
    fenced = {row["node"] for row in story.view.operations if row["action"] == "fence"}
    lines: list[RenderableType] = []
    for host, mates in by_host.items():
        style = "blue" if host in spare_hosts else "red" if host in fenced else ""
        line = Text(f"{host}  ", style=style)
        for gpu in mates:
            line.append(*_cell(gpu, ours=gpu["uuid"] in runs_on))
            line.append(" ")
        if host in fenced:
            line.append(" fenced", style="red")
        lines.append(line)
    return Group(*lines, Text(), Text(_LEGEND, style="dim"))


def _cell(gpu: dict[str, Any], *, ours: bool) -> tuple[str, str]:
    kind = gpu["kind"]
    if kind in _STYLES:
        return {"deviant": "△", "fault": "✖"}.get(kind, "?"), _STYLES[kind]
    if gpu["workload"] is None:
        return "·", "dim"
    return "■", "bold cyan" if ours else "green"


def _timeline(story: Story) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(justify="right", style="cyan", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(style="dim")
    for row in story.timeline():
        table.add_row(f"{row['seconds_after_fault']:+.1f} s", row["step"], row["detail"])
    for step in story.missing:
        table.add_row("", Text(step, style="dim"), "")
    return table


def _alert(story: Story) -> RenderableType:
    alerts = story.alerts()
    if not alerts:
        return Text("none yet", style="dim")
    last = alerts[-1]
    labels, words = last["labels"], last["annotations"]
    style = "green" if last["status"] == "resolved" else "red"
    head = Text(f"{labels['alertname']} ({labels.get('severity', '')}) {last['status']}", style)
    return Group(head, Text(words.get("summary", "")), Text(words.get("description", ""), "dim"))


def _place(story: Story) -> RenderableType:
    job = story.job()
    if job is None:
        return Text(f"{story.target.job}: the scheduler does not know it", style="red")
    before, now = ", ".join(story.target.nodes), ", ".join(job["nodes"])
    text = f"{job['job']} ({len(job['uuids'])} GPUs) ran on {before}\n"
    return Text(text + f"now on {now}, restarts: {job['restarts']}")
