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
}

KINDS: Final = {**HARDWARE, **APPLICATION, **BENIGN}
# Hardware faults under which no job can run.
STOPPING: Final = frozenset({"off-the-bus", "vanished", "ecc"})
