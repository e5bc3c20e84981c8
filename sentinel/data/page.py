"""The catalogue of metrics as a page for people."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

from sentinel.core.catalog import Alias, Catalog, Metric, Source

_HEADING: Final = """\
# Metrics that are read

What GPU Sentinel understands of the telemetry that is there, from every exporter that it knows.
Each metric below has one canonical name and unit; whatever an exporter calls it, and in whatever
unit, becomes that. A value outside the range cannot be true, and is dropped and counted. A metric
that your exporter does not show is simply not known: nothing is required but that a GPU can be
told from another. What the page says under *adds* is what you gain by turning it on.

Kinds: a *gauge* goes up and down; a *counter* only grows, but for resets; an *event* is the code
of the last one, which stays; *bits* are a mask of states. What an exporter's `TYPE` line says
does not count: several declare gauges as counters.

**bold**: the exporter shows it unless told not to. A name with `{...}` counts only with these
labels (`*`: any value). The conversion stands behind the name where there is one.

Names of your own are added in the configuration ([configuration.md](configuration.md), `metrics`).
This page is made from `sentinel/data/metrics.yaml` by `make generated`.

## Exporters

| exporter | what it is |
|---|---|
"""

_ROLES: Final = {
    "demand": "what the work asks of the GPU",
    "response": "how the GPU answers",
    "error": "what the hardware says went wrong",
    "state": "how it is set up and how it stands",
    "info": "what it is",
}
_NEEDS: Final = {
    "nvlink": "NVLink",
    "profiling": "profiling counters",
    "memory_temp": "a sensor in the memory",
    "ecc": "ECC",
    "row_remap": "row remapping",
    "energy": "an energy counter",
    "whole": "a GPU that is not cut into slices",
}


def metrics_page(catalog: Catalog) -> str:
    """The content of docs/metrics-read.md."""
    out, order = [_HEADING.rstrip("\n")], list(catalog.exporters)
    out += [f"| `{name}` | {text} |" for name, text in catalog.exporters.items()]
    for role, text in _ROLES.items():
        out += ["", f"## {role.capitalize()}: {text}"]
        for column, metric in enumerate(catalog.metrics):
            if metric.role == role:
                out += _metric(metric, catalog.names_of(column), order)
    counts = [alias for alias in catalog.aliases if alias.source is Source.XID_COUNT]
    out += [
        "",
        "## Xids that are counted",
        "",
        "How often a code was seen, the code in a label.",
        "",
    ]
    out += _names(counts, order)
    info = [alias for alias in catalog.aliases if alias.source is Source.INFO]
    out += ["", "## Series that describe a GPU", "", "Their labels tell index and model.", ""]
    out += _names(info, order)
    return "\n".join(out) + "\n"


def _metric(metric: Metric, aliases: Sequence[Alias], order: Sequence[str]) -> Iterator[str]:
    yield from ("", f"### {metric.name}", "")
    unit = f" in {metric.unit}" if metric.unit else ""
    span = f"{_number(metric.valid_min)} to {_number(metric.valid_max)}"
    yield f"{metric.label[0].upper()}{metric.label[1:]}{unit}; {metric.kind}, {span}."
    if metric.needs:
        yield f"Needs {' and '.join(_NEEDS[need] for need in metric.needs)}."
    if metric.adds:
        yield f"*Adds:* {metric.adds}."
    yield f"*Range from:* {metric.source}."
    yield ""
    yield from _names(aliases, order)


def _names(aliases: Sequence[Alias], order: Sequence[str]) -> Iterator[str]:
    yield from ("| exporter | names |", "|---|---|")
    ordered = sorted(aliases, key=lambda a: order.index(a.exporter))
    for exporter, group in groupby(ordered, key=lambda a: a.exporter):
        yield f"| `{exporter}` | {', '.join(map(_name, group))} |"


def _name(alias: Alias) -> str:
    labels = ", ".join(f'{k}="{v}"' for k, v in alias.where)
    name = f"`{alias.name}{{{labels}}}`" if labels else f"`{alias.name}`"
    parts = [f"**{name}**" if alias.standard else name]
    if alias.source is Source.FLAG:
        parts.append(f"is {_number(alias.scale)} when set")
    elif alias.scale == 0:
        parts.append(f"means {_number(alias.offset)}")
    elif (alias.scale, alias.offset) != (1, 0):
        parts.append(f"x {_number(alias.scale)}")
        parts += [f"+ {_number(alias.offset)}"] if alias.offset else []
    if alias.code_label:
        parts.append(f"(code in `{alias.code_label}`)")
    if math.isfinite(alias.window_s):
        parts.append(f"over {_number(alias.window_s)} s")
    return " ".join(parts)


def _number(value: float) -> str:
    return f"{value:.0f}" if value == int(value) and abs(value) < 1e6 else f"{value:.6g}"
