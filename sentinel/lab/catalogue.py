"""The metrics that the simulated dcgm-exporter exports, in its names and units."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from sentinel.core.domain import Bools, Floats
from sentinel.lab.hardware import FB_RESERVED_MIB, Hardware
from sentinel.lab.workload import Demand

Reader = Callable[[Hardware], Floats]


@dataclass(frozen=True, slots=True)
class Exported:
    """`read` gives float64 [gpus]; `capable` bool [gpus], which GPUs can have it at all."""

    name: str
    type: str
    help: str
    read: Reader
    capable: Callable[[Hardware], Bools]


def _every(hardware: Hardware) -> Bools:
    return np.ones(len(hardware.models), bool)


def _demand(pick: Callable[[Demand], Floats], scale: float = 1.0, decimals: int = 0) -> Reader:
    def read(hardware: Hardware) -> Floats:
        if hardware.demand is None:
            return np.zeros(len(hardware.models))
        return np.round(pick(hardware.demand) * scale, decimals)

    return read


def _fb_free(hardware: Hardware) -> Floats:
    return hardware.fb_total_mib - FB_RESERVED_MIB - hardware.fb_used_mib


def _mem_clock(hardware: Hardware) -> Floats:
    return hardware.mem_mhz_now


def _gauge(
    name: str, text: str, read: Reader, capable: Callable[[Hardware], Bools] = _every
) -> Exported:
    return Exported(f"DCGM_FI_{name}", "gauge", text, read, capable)


def _counter(
    name: str, text: str, read: Reader, capable: Callable[[Hardware], Bools] = _every
) -> Exported:
    return Exported(f"DCGM_FI_{name}", "counter", text, read, capable)


def _has_nvlink(hardware: Hardware) -> Bools:
    return hardware.has_nvlink


FAMILIES: Final[tuple[Exported, ...]] = (
    _gauge("DEV_SM_CLOCK", "SM clock frequency (in MHz).", lambda h: h.clock_mhz),
    _gauge("DEV_MEM_CLOCK", "Memory clock frequency (in MHz).", _mem_clock),
    _gauge(
        "DEV_MEMORY_TEMP",
        "Memory temperature (in C).",
        lambda h: np.round(h.mem_temp_c),
        lambda h: h.has_mem_temp,
    ),
    _gauge("DEV_GPU_TEMP", "GPU temperature (in C).", lambda h: np.round(h.temp_c)),
    _gauge("DEV_POWER_USAGE", "Power draw (in W).", lambda h: np.round(h.power_w, 3)),
    _counter(
        "DEV_TOTAL_ENERGY_CONSUMPTION",
        "Total energy consumption since boot (in mJ).",
        lambda h: h.energy_mj,
    ),
    _counter("DEV_PCIE_REPLAY_COUNTER", "Total number of PCIe retries.", lambda h: h.pcie_replay),
    _gauge("DEV_PCIE_LINK_GEN", "PCIe Current Link Generation.", lambda h: h.pcie_gen),
    _gauge("DEV_PCIE_LINK_WIDTH", "PCIe Current Link Width.", lambda h: h.pcie_width),
    _gauge("DEV_PCIE_MAX_LINK_GEN", "PCIe Max Link Generation.", lambda h: h.pcie_gen_max),
    _gauge(
        "DEV_PCIE_MAX_LINK_WIDTH",
        "PCIe Max Link Width.",
        lambda h: np.full(len(h.models), 16.0),
    ),
    _gauge("DEV_GPU_UTIL", "GPU utilization (in %).", _demand(lambda d: d.util, 100)),
    _gauge("DEV_MEM_COPY_UTIL", "Memory utilization (in %).", _demand(lambda d: d.dram, 130)),
    _gauge("DEV_XID_ERRORS", "Value of the last XID error encountered.", lambda h: h.xid),
    _gauge(
        "DEV_CLOCKS_EVENT_REASONS",
        "Current clock event reasons (bitmask).",
        lambda h: h.reasons.astype(np.float64),
    ),
    _gauge("DEV_POWER_MGMT_LIMIT", "Power limit (in W).", lambda h: h.power_limit_w),
    _gauge("DEV_FB_FREE", "Frame buffer memory free (in MB).", _fb_free),
    _gauge("DEV_FB_USED", "Frame buffer memory used (in MB).", lambda h: h.fb_used_mib),
    _gauge("DEV_FB_TOTAL", "Frame buffer memory total (in MB).", lambda h: h.fb_total_mib),
    _counter(
        "DEV_ECC_SBE_VOL_TOTAL",
        "Total number of single-bit volatile ECC errors.",
        lambda h: h.sbe_volatile,
    ),
    _counter(
        "DEV_ECC_DBE_VOL_TOTAL",
        "Total number of double-bit volatile ECC errors.",
        lambda h: h.dbe_volatile,
    ),
    _counter(
        "DEV_ECC_SBE_AGG_TOTAL",
        "Total number of single-bit persistent ECC errors.",
        lambda h: h.sbe_aggregate,
    ),
    _counter(
        "DEV_ECC_DBE_AGG_TOTAL",
        "Total number of double-bit persistent ECC errors.",
        lambda h: h.dbe_aggregate,
    ),
    _counter(
        "DEV_UNCORRECTABLE_REMAPPED_ROWS",
        "Number of remapped rows for uncorrectable errors.",
        lambda h: h.remapped_uncorrectable,
    ),
    _counter(
        "DEV_CORRECTABLE_REMAPPED_ROWS",
        "Number of remapped rows for correctable errors.",
        lambda h: h.remapped_correctable,
    ),
    _gauge(
        "DEV_ROW_REMAP_FAILURE",
        "Whether remapping of rows has failed.",
        lambda h: h.remap_failure,
    ),
    _gauge(
        "DEV_ROW_REMAP_PENDING",
        "Whether remapping of rows is pending.",
        lambda h: h.remap_pending,
    ),
    _counter(
        "DEV_NVLINK_BANDWIDTH_TOTAL",
        "Total number of NVLink bandwidth counters for all lanes.",
        _demand(lambda d: d.nvlink, 1.95e-6),
        _has_nvlink,
    ),
    _counter(
        "DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL",
        "Total number of NVLink flow-control CRC errors.",
        lambda h: h.nvlink_crc,
        _has_nvlink,
    ),
    _counter(
        "DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL",
        "Total number of NVLink retries.",
        lambda h: h.nvlink_replay,
        _has_nvlink,
    ),
    _counter(
        "DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL",
        "Total number of NVLink recovery errors.",
        lambda h: h.nvlink_recovery,
        _has_nvlink,
    ),
    _gauge(
        "PROF_GR_ENGINE_ACTIVE",
        "Ratio of time the graphics engine is active.",
        _demand(lambda d: d.util, 1, 6),
    ),
    _gauge(
        "PROF_SM_ACTIVE",
        "The ratio of cycles an SM has at least 1 warp assigned.",
        _demand(lambda d: d.sm, 1, 6),
    ),
    _gauge(
        "PROF_PIPE_TENSOR_ACTIVE",
        "Ratio of cycles the tensor (HMMA) pipe is active.",
        _demand(lambda d: d.tensor, 1, 6),
    ),
    _gauge(
        "PROF_DRAM_ACTIVE",
        "Ratio of cycles the device memory interface is active sending or receiving data.",
        _demand(lambda d: d.dram, 1, 6),
    ),
    _gauge(
        "PROF_PCIE_TX_BYTES",
        "The rate of data transmitted over the PCIe bus (in B/s).",
        _demand(lambda d: d.pcie_tx),
    ),
    _gauge(
        "PROF_PCIE_RX_BYTES",
        "The rate of data received over the PCIe bus (in B/s).",
        _demand(lambda d: d.pcie_rx),
    ),
    _gauge(
        "PROF_NVLINK_TX_BYTES",
        "The rate of data transmitted over NVLink (in B/s).",
        _demand(lambda d: d.nvlink),
        _has_nvlink,
    ),
    _gauge(
        "PROF_NVLINK_RX_BYTES",
        "The rate of data received over NVLink (in B/s).",
        _demand(lambda d: d.nvlink, 0.95),
        _has_nvlink,
    ),
)
# A GPU that is cut up shows no utilisation; of these each slice shows its own part.
NOT_OF_SLICES: Final = ("DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_MEM_COPY_UTIL")
OF_SLICES: Final = (
    "DCGM_FI_DEV_FB_FREE",
    "DCGM_FI_DEV_FB_USED",
    "DCGM_FI_DEV_FB_TOTAL",
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE",
    "DCGM_FI_PROF_SM_ACTIVE",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
    "DCGM_FI_PROF_DRAM_ACTIVE",
)
