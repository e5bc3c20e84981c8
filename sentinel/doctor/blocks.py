"""What is missing, as lines to copy into each exporter's list of fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sentinel.doctor import howto
from sentinel.doctor.facts import Facts
from sentinel.doctor.judge_metrics import absent
from sentinel.doctor.report import Block

_SMI: Final = "nvidia_gpu_exporter"
_WIDTH: Final = 74
_DCGM_INTO: Final = (
    "dcgm-exporter's list of fields: the file of its option -f (/etc/dcgm-exporter/*.csv); with "
    "the gpu-operator the ConfigMap that dcgmExporter.config.name names"
)
_DCGM_NOTE: Final = (
    "Newer DCGM leaves error counts out while they are 0: what your list has already is well. "
    "A field that your DCGM does not know stops the exporter; leave that line out then."
)
_SMI_INTO: Final = (
    "nvidia_gpu_exporter's --query-field-names (one list), where you set it: its default, AUTO, "
    "has all that the GPU shows"
)


def blocks(facts: Facts) -> tuple[Block, ...]:
    """One block per kind of exporter that has a list of fields, what matters most first."""
    if facts.fleet is None:
        return ()
    lines: dict[str, list[str]] = {}
    hidden = False
    for metric in absent(facts.fleet.metrics):
        for way in metric.enable:
            if way.line:
                lines.setdefault(way.kind, []).append(way.line)
                hidden |= metric.hidden_at_zero
    several = sum(kind != _SMI for kind in lines) > 1
    out = []
    for kind, found in lines.items():
        fields = tuple(dict.fromkeys(found))
        if kind == _SMI:
            out.append(Block(kind, _SMI_INTO, tuple(_rows(fields))))
            continue
        into = f"{_DCGM_INTO} [{howto.title(kind)}]" if several else _DCGM_INTO
        out.append(Block(kind, into, fields, _DCGM_NOTE if hidden else ""))
    return tuple(out)


def _rows(fields: tuple[str, ...]) -> Iterator[str]:
    """One list in rows of a terminal's width, broken behind commas alone."""
    row = ""
    for place, field in enumerate(fields):
        piece = field if place == len(fields) - 1 else f"{field},"
        if row and len(row) + len(piece) > _WIDTH:
            yield row
            row = ""
        row += piece
    if row:
        yield row
