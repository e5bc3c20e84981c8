"""What is missing, as lines to copy into each exporter's list of fields."""

from __future__ import annotations

from typing import Final

from sentinel.doctor.facts import Facts
from sentinel.doctor.judge_fleet import absent
from sentinel.doctor.report import Block

_DCGM_INTO: Final = (
    "dcgm-exporter's list of fields: the file of its option -f (/etc/dcgm-exporter/*.csv); with "
    "the gpu-operator the ConfigMap that dcgmExporter.config.name names"
)
_DCGM_NOTE: Final = (
    "Newer DCGM leaves error counts out while they are 0: what your list has already is well. "
    "A field that your DCGM does not know stops the exporter; leave that line out then."
)
_SMI_INTO: Final = (
    "nvidia_gpu_exporter's --query-field-names, where you set it: its default, AUTO, has all that "
    "the GPU shows"
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
    out = []
    for kind, found in lines.items():
        if kind == "nvidia_gpu_exporter":
            out.append(Block(kind, _SMI_INTO, (",".join(found),)))
        else:
            out.append(
                Block(
                    kind, f"{_DCGM_INTO}", tuple(dict.fromkeys(found)), _DCGM_NOTE if hidden else ""
                )
            )
    return tuple(out)
