"""What can go wrong in the simulated fleet, and what only looks as if it did."""

from __future__ import annotations

from typing import Final

# Hardware: lasting until repaired.
HARDWARE: Final = {
    "off-the-bus": "the GPU falls off the bus: Xid 79, then its series end",
    "vanished": "the GPU's series end without a word, while its neighbours report",
    "ecc": "uncorrectable memory errors: Xid 48, then 63",
    "thermal": "cooling is lost: the temperature climbs until the GPU throttles",
    "clock": "the SM clock is 20 % low at the same demand, with no reason given",
    "slow-10": "the SM clock is 10 % low with no reason given: the mates of its job wait",
    "slow-hidden": "the GPU works 12 % slower at normal clocks: its mates wait, it works through",
    "power-brake": "the hardware's power brake holds: clock and power fall",
    "mem-clock": "the memory clock has fallen to a lower state",
    "hbm-hot": "the memory grows 18 °C hotter, the GPU does not",
    "fan-creep": "cooling is lost slowly, over an hour, until the GPU throttles",
    "ecc-storm": "20 corrected memory errors a second",
    "remap-failure": "a memory row cannot be remapped any more: Xid 64 and the failure flag",
    "gsp": "the GPU's system processor answers no more: Xid 119, the job is lost",
    "nvlink-xid": "an NVLink fails: Xid 74, the job is lost and cannot start again",
    "nvlink-errors": "NVLink errors and replays grow, traffic falls, its job slows down",
    "pcie-replays": "PCIe replays, five a second",
    "pcie-link": "the PCIe link falls to half its lanes: traffic with the host halves",
    "hang": "a kernel hangs: utilisation 100 %, no activity, little power, no Xid",
    "memory-leak": "memory fills up over 40 minutes, to 99 %",
    "memory-full": "memory fills up within a minute, to 99 %",
    "flapping": "the hardware slows the GPU down and lets it go again, minute by minute",
    "fan-tray": "a node loses a fan tray: all of its GPUs grow hotter",
    "psu": "a node loses a power supply: the power brake holds all of its GPUs",
    "hot-aisle": "the air of a rack grows 12 °C warmer within ten minutes",
}

# Application errors: the hardware is healthy.
APPLICATION: Final = {
    "xid-13": "graphics engine exception: the job crashes and starts again",
    "xid-31": "MMU fault of the application: the job crashes and starts again",
    "xid-43": "the application faulted: the job crashes and starts again",
    "xid-45": "a channel is torn down: the job goes on",
}

# Benign: unusual and healthy.
BENIGN: Final = {
    "driver-shift": "the whole fleet draws 6 % more power from now on, as after an update",
    "new-workload": "the job on this GPU does something it has never done",
    "idle-night": "every inference job's users are asleep",
    "heat-wave": "the air of the whole fleet grows 4 °C warmer over two hours",
    "power-cap": "the power limit of the whole fleet is set to 85 %",
    "maintenance": "the host is rebooted: its series end for 8 minutes, its counters start anew",
    "exporter-restart": "the host's exporter starts again: a minute without series",
    "exporter-upgrade": "a new exporter on the host shows some metrics no more, and others",
    "lost-host": "the host goes silent for ten minutes: nothing is known of its GPUs",
    "job-end": "the job on this GPU ends",
    "job-churn": "the job on this GPU ends, and two minutes later another begins",
    "job-resize": "the job on this GPU goes on with half of its GPUs",
    "job-move": "the job on this GPU goes on elsewhere",
    "evaluation": "the job on this GPU evaluates every ten minutes, for three",
    "pipeline": "the job on this GPU becomes a pipeline whose stages differ in work",
    "idle-rank": "this GPU does nothing for its job, and holds its memory",
    "skew": "this GPU gets more of its job's requests than its mates, in bursts",
    "burn-in": "a benchmark loads an idle host as nothing did before",
    "new-model": "hosts with another GPU model join the fleet",
    "crash-loop": "the application crashes with Xid 31 every two minutes, for twenty",
    "sticky-xid": "an Xid 13 of the application has stood in the exporter since long ago",
    "single-bits": "a corrected memory error now and then, five an hour",
    "locked-clocks": "the job on this GPU sets lower clocks for itself",
    "memory-hungry": "the job on this GPU fills 97 % of the memory, and is well",
}

KINDS: Final = {**HARDWARE, **APPLICATION, **BENIGN}
# Hardware faults that the hardware itself names; the others show in how a GPU answers.
HARD: Final = frozenset(
    {"off-the-bus", "vanished", "ecc", "remap-failure", "gsp", "nvlink-xid"},
)
SOFT: Final = frozenset(HARDWARE) - HARD
# Hardware faults under which no job can run.
STOPPING: Final = frozenset({"off-the-bus", "vanished", "ecc", "gsp", "nvlink-xid"})
# What befalls more than the GPU it is given to: its node, its rack, the whole fleet.
NODE: Final = frozenset(
    {"fan-tray", "psu", "maintenance", "exporter-restart", "exporter-upgrade", "lost-host"}
    | {"burn-in"}
)
RACK: Final = frozenset({"hot-aisle"})
FLEET: Final = frozenset({"driver-shift", "idle-night", "heat-wave", "power-cap", "new-model"})
# Matters of an application that somebody wants named, and that never move work.
NEVER_MOVES: Final = frozenset({"memory-leak", "memory-full"})
# Nobody sees them at once: they grow.
SLOW: Final = frozenset({"fan-creep", "memory-leak"})
