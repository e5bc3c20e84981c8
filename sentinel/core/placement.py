"""Which GPUs could take over work, and whether they are enough.

Decides where work may go; never whether it should go. A backup is a spare GPU on another
node, of the same model or a better one, present, normal, without work, and in no other
migration.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuModel:
    """One row of the model catalogue. `match` is a regular expression on the model name."""

    name: str
    match: str
    memory_gib: float
    tflops: float  # dense BF16 on tensor cores, FP16 where the model has no BF16
    bandwidth_gb_per_s: float
    power_w: float
    source: str = ""


@dataclass(frozen=True, slots=True)
class ModelRanks:
    """What each GPU model can do, by the model name that exporters report."""

    models: tuple[GpuModel, ...] = ()

    def find(self, model: str) -> GpuModel | None:
        """The catalogue's row for a reported name; the first row that matches."""
        return next((row for row in self.models if re.search(row.match, model, re.I)), None)

    def at_least(self, candidate: str, needed: str) -> bool:
        """Whether work of `needed` runs on `candidate` no worse: the same name, or no less
        memory, compute and bandwidth. A name that nobody knows equals only itself."""
        if candidate == needed:
            return True
        have, want = self.find(candidate), self.find(needed)
        if have is None or want is None:
            return False
        return (
            have.memory_gib >= want.memory_gib
            and have.tflops >= want.tflops
            and have.bandwidth_gb_per_s >= want.bandwidth_gb_per_s
        )
