"""What sets one simulated site apart from another: its physics, its exporters, its labels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np


@dataclass(frozen=True, slots=True)
class Physics:
    """Multiples of the usual where no unit is named."""

    resistance: float = 1.0
    tau_s: float = 22.0  # of the quickest heat sink; the slowest needs 16 s more
    noise: float = 1.0
    silicon: float = 0.035  # spread of the power of equal GPUs at equal work
    slots: float = 1.0  # how much warmer the second row of a chassis is
    air_c: float = 22.0  # of the coolest host; the warmest has 4 °C more
    day_c: float = 1.5
    clock_power: float = 2.4  # power goes with clock to this power, voltage included


@dataclass(frozen=True, slots=True)
class Site:
    """How a fleet is set up. `mix` are models with their share of the hosts, by default half
    H100, a quarter A100, the rest L40S. Racks have four hosts each."""

    physics: Physics = field(default_factory=Physics)
    mix: tuple[tuple[str, float], ...] = ()
    rack_label: bool = False
    pods: bool = False  # the exporters name pods instead of Slurm's jobs
    gang_hosts: int = 1  # of a training job
    mig_hosts: int = 0  # of the first model, cut up into two slices a GPU
    late_hosts: int = 0  # the last ones, of a model of their own, come with `new-model`
    late_model: str = "B200"
    left_out: frozenset[str] = frozenset()  # metrics that no exporter here shows


PLAIN: Final = Site()
RACK_HOSTS: Final = 4
# What exporters leave out in the field, because their lists of counters do.
_LEFT_OUT: Final[tuple[frozenset[str], ...]] = (
    frozenset(),
    frozenset({"DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_DEV_POWER_MGMT_LIMIT"}),
    frozenset({"DCGM_FI_DEV_ECC_SBE_AGG_TOTAL", "DCGM_FI_DEV_ECC_DBE_AGG_TOTAL"}),
    frozenset({"DCGM_FI_DEV_MEM_COPY_UTIL", "DCGM_FI_DEV_FB_TOTAL"}),
)
_MIXES: Final[tuple[tuple[tuple[str, float], ...], ...]] = (
    (),
    (("H100", 1.0),),
    (("H200", 0.5), ("A100", 0.5)),
    (("A100", 0.5), ("L40S", 0.5)),
    (("H100", 0.4), ("H200", 0.3), ("L40S", 0.3)),
    (("B200", 0.5), ("H100", 0.5)),
)


def drawn(seed: int, *, mig_hosts: int | None = None, late_hosts: int = 1) -> Site:
    """A site of its own physics, models and labels, the same for the same seed."""
    rng = np.random.default_rng([seed, 0x517E])
    u = rng.random(8)
    physics = Physics(
        resistance=0.85 + 0.3 * u[0],
        tau_s=14 + 40 * u[1],
        noise=0.7 + 1.3 * u[2],
        silicon=0.02 + 0.03 * u[3],
        slots=0.5 + 0.9 * u[4],
        air_c=19 + 6 * u[5],
        day_c=0.5 + 2.5 * u[6],
        clock_power=2.1 + 0.6 * u[7],
    )
    return Site(
        physics=physics,
        mix=_MIXES[seed % len(_MIXES)],
        rack_label=seed % 2 == 0,
        pods=seed % 3 == 2,
        gang_hosts=(1, 2, 1, 4)[seed % 4],
        mig_hosts=(1 if seed % 4 == 1 else 0) if mig_hosts is None else mig_hosts,
        late_hosts=late_hosts,
        late_model="H200" if seed % 6 in (1, 5) else "B200",
        left_out=_LEFT_OUT[seed % len(_LEFT_OUT)],
    )
