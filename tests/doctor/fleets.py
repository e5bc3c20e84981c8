"""Small fleets as their exporters show them: texts that move with time, made here.

A fleet is a list of targets, each with the labels that service discovery gives it; the text of a
target is made anew at every scrape, so that counters grow and nothing stands still.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

H100, A100, T4 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB", "Tesla T4"
DRIVER = "580.105.08"

# what dcgm-exporter shows unless told otherwise: field, resting value, value at work
DEFAULT = {
    "DCGM_FI_DEV_SM_CLOCK": (345, 1980),
    "DCGM_FI_DEV_MEM_CLOCK": (2619, 2619),
    "DCGM_FI_DEV_MEMORY_TEMP": (38, 62),
    "DCGM_FI_DEV_GPU_TEMP": (31, 58),
    "DCGM_FI_DEV_POWER_USAGE": (71, 640),
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": None,  # counted
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": (0, 0),
    "DCGM_FI_DEV_GPU_UTIL": (0, 97),
    "DCGM_FI_DEV_MEM_COPY_UTIL": (0, 54),
    "DCGM_FI_DEV_ENC_UTIL": (0, 0),
    "DCGM_FI_DEV_DEC_UTIL": (0, 0),
    "DCGM_FI_DEV_XID_ERRORS": (0, 0),
    "DCGM_FI_DEV_FB_FREE": (80994, 14200),
    "DCGM_FI_DEV_FB_USED": (4, 66800),
    "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL": (0, 210000),
    "DCGM_FI_DEV_VGPU_LICENSE_STATUS": (0, 0),
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": (0, 0),
    "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS": (0, 0),
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": (0, 0),
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": (0, 0.97),
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": (0, 0.46),
    "DCGM_FI_PROF_DRAM_ACTIVE": (0, 0.39),
    "DCGM_FI_PROF_PCIE_TX_BYTES": (120e3, 900e6),
    "DCGM_FI_PROF_PCIE_RX_BYTES": (130e3, 1.2e9),
}
# what a site adds that has read docs/doctor.md
MORE = {
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": (0, 0),
    "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL": (0, 0),
    "DCGM_FI_DEV_ROW_REMAP_PENDING": (0, 0),
    "DCGM_FI_DEV_THRESHOLD_SRM": (0, 0),
    "DCGM_FI_DEV_GET_GPU_RECOVERY_ACTION": (0, 0),
    "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL": (0, 0),
    "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL": (0, 0),
    "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL": (0, 0),
    "DCGM_FI_PROF_SM_ACTIVE": (0, 0.91),
    "DCGM_FI_PROF_NVLINK_TX_BYTES": (0, 90e9),
    "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": (1, 4),
    "DCGM_FI_DEV_POWER_VIOLATION": (0, 0),
    "DCGM_FI_DEV_THERMAL_VIOLATION": (0, 0),
    "DCGM_FI_DEV_ENFORCED_POWER_LIMIT": (700, 700),
    "DCGM_FI_DEV_PCIE_LINK_GEN": (5, 5),
    "DCGM_FI_DEV_PCIE_LINK_WIDTH": (16, 16),
    "DCGM_FI_DEV_PCIE_MAX_LINK_GEN": (5, 5),
    "DCGM_FI_DEV_PCIE_MAX_LINK_WIDTH": (16, 16),
}
# nvidia_gpu_exporter with its default AUTO
SMI = {
    "nvidia_smi_utilization_gpu_ratio": (0, 0.97),
    "nvidia_smi_utilization_memory_ratio": (0, 0.5),
    "nvidia_smi_memory_used_bytes": (4 << 20, 66800 << 20),
    "nvidia_smi_memory_free_bytes": (80994 << 20, 14200 << 20),
    "nvidia_smi_memory_total_bytes": (81559 << 20, 81559 << 20),
    "nvidia_smi_temperature_gpu": (31, 58),
    "nvidia_smi_temperature_memory": (38, 62),
    "nvidia_smi_power_draw_watts": (71, 640),
    "nvidia_smi_enforced_power_limit_watts": (700, 700),
    "nvidia_smi_clocks_current_sm_clock_hz": (345e6, 1980e6),
    "nvidia_smi_clocks_current_memory_clock_hz": (2619e6, 2619e6),
    "nvidia_smi_clocks_event_reasons_active": (1, 4),
    "nvidia_smi_clocks_event_reasons_counters_sw_power_cap_seconds": (5, 5),
    "nvidia_smi_clocks_event_reasons_counters_hw_thermal_slowdown_seconds": (0, 0),
    "nvidia_smi_ecc_errors_corrected_volatile_total": (0, 0),
    "nvidia_smi_ecc_errors_uncorrected_volatile_total": (0, 0),
    "nvidia_smi_ecc_errors_uncorrected_aggregate_sram_threshold_exceeded": (0, 0),
    "nvidia_smi_remapped_rows_failure": (0, 0),
    "nvidia_smi_remapped_rows_pending": (0, 0),
    "nvidia_smi_remapped_rows_uncorrectable": (0, 0),
    "nvidia_smi_gpu_recovery_action": (0, 0),
    "nvidia_smi_pcie_link_gen_current": (5, 5),
    "nvidia_smi_pcie_link_width_current": (16, 16),
    "nvidia_smi_pcie_link_gen_max": (5, 5),
    "nvidia_smi_pcie_link_width_max": (16, 16),
}
PART = ("GR_ENGINE", "TENSOR", "DRAM", "FB_USED", "FB_FREE", "SM_ACTIVE")  # of a MIG slice
NOT_OF_MIG = ("GPU_UTIL", "MEM_COPY", "ENC_UTIL", "DEC_UTIL", "NVLINK_BAND")

Series = tuple[str, dict[str, str], float]


@dataclass(frozen=True)
class Target:
    """One exporter. `show(at_s)` yields its series; None refuses the connection."""

    instance: str
    show: Callable[[float], Iterator[Series]] | None
    labels: Mapping[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    ahead_s: float | None = None  # stamps its samples itself, so far ahead

    def text(self, at_s: float | None = None) -> bytes:
        now_s = time.time() if at_s is None else at_s
        stamp = "" if self.ahead_s is None else f" {round((now_s + self.ahead_s) * 1000)}"
        lines = []
        for name, labels, value in self.show(now_s) if self.show else ():
            inside = ",".join(f'{k}="{v}"' for k, v in labels.items())
            lines.append(f"{name}{{{inside}}} {value:.10g}{stamp}\n")
        return "".join(lines).encode()


def uuid(node: int, gpu: int) -> str:
    return f"GPU-{node:04d}{gpu:04d}-1111-4222-8333-{node * 8 + gpu:012d}"


def _value(rest: float, work: float, busy: bool, at_s: float, gpu: int) -> float:
    """Between rest and work, never quite still where the two differ."""
    if rest == work:
        return float(rest)
    level = work if busy else rest
    wave = 1 + 0.02 * math.sin(at_s / 7.0 + gpu)
    return level * wave


def dcgm(
    node: int,
    fields: Mapping[str, tuple[float, float] | None] = DEFAULT,
    *,
    gpus: int = 8,
    model: str = H100,
    busy: int = 6,
    host: str | None = None,
    pods: int = 1,
    **labels: str,
) -> Callable[[float], Iterator[Series]]:
    """dcgm-exporter on a node: the first `busy` GPUs work, for a pod each (or for several)."""

    def show(at_s: float) -> Iterator[Series]:
        for gpu in range(gpus):
            works = gpu < busy
            own = {
                "gpu": str(gpu),
                "UUID": uuid(node, gpu),
                "pci_bus_id": f"00000000:{gpu + 16:02X}:00.0",
                "device": f"nvidia{gpu}",
                "modelName": model,
                "Hostname": host or f"gpu-{node:02d}",
                "DCGM_FI_DRIVER_VERSION": DRIVER,
                **labels,
            }
            for name, ends in fields.items():
                value = (
                    500_000.0 * (at_s % 1e8) if ends is None else _value(*ends, works, at_s, gpu)
                )
                for pod in range(max(pods, 1) if works else 1):
                    work = (
                        {"pod": f"train-{node}-{pod}", "namespace": "research", "container": "main"}
                        if works and pods
                        else {}
                    )
                    yield name, {**own, **work}, value

    return show


def mig(
    node: int, *, gpus: int = 2, slices: int = 3, host: str | None = None
) -> Callable[[float], Iterator[Series]]:
    """dcgm-exporter on a node of A100s that are cut up: device values repeat per slice."""

    def show(at_s: float) -> Iterator[Series]:
        for name, labels, value in dcgm(node, gpus=gpus, model=A100, busy=gpus, host=host, pods=0)(
            at_s
        ):
            if any(word in name for word in NOT_OF_MIG):
                continue
            for part in range(slices):
                cut = {"GPU_I_PROFILE": "2g.10gb", "GPU_I_ID": str(part + 3)}
                share = value / slices if any(word in name for word in PART) else value
                yield name, {**labels, **cut}, share

    return show


def smi(
    node: int, *, gpus: int = 4, busy: int = 3, model: str = H100
) -> Callable[[float], Iterator[Series]]:
    """nvidia_gpu_exporter on a node: nothing but the UUID on its series."""

    def show(at_s: float) -> Iterator[Series]:
        for gpu in range(gpus):
            own = {"uuid": uuid(node, gpu)}
            info = {"index": str(gpu), "name": model, "driver_version": DRIVER}
            yield "nvidia_smi_gpu_info", {**own, **info}, 1.0
            for name, ends in SMI.items():
                yield name, own, _value(*ends, gpu < busy, at_s, gpu)

    return show


def nothing(at_s: float) -> Iterator[Series]:
    """An exporter that is up and shows no GPU."""
    yield from ()
