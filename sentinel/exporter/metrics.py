"""Every metric of the exporter. One table says what there is; the exposition and the table in
docs/exporter.md are made from it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final, NamedTuple

PREFIX: Final = "sentinel_nvml_"
# on every series of a GPU
GPU_LABELS: Final = ("UUID", "gpu", "model_name", "pci_bus_id", "Hostname")
# beside those, where a series is of a slice of a GPU that is cut up
SLICE_LABELS: Final = ("GPU_I_ID", "GPU_I_PROFILE")
_BEGIN: Final = "<!-- metrics: made by `make generated` -->\n"
_END: Final = "<!-- end of metrics -->\n"


class Described(NamedTuple):
    """`labels` are those beyond GPU_LABELS, which a metric of a GPU (`of_gpu`) has too."""

    name: str
    type: str
    help: str
    labels: tuple[str, ...] = ()
    of_gpu: bool = True


def _gauge(name: str, help: str, *labels: str) -> Described:
    return Described(name, "gauge", help, labels)


def _counter(name: str, help: str, *labels: str) -> Described:
    return Described(name, "counter", help, labels)


DESCRIBED: Final = (
    # ---- the exporter itself and what it reaches ----
    Described("build_info", "gauge", "Always 1; says what runs.", ("version",), False),
    Described("up", "gauge", "1 if NVML could be used in this scrape.", (), False),
    Described(
        "driver_info",
        "gauge",
        "Always 1; versions of driver, NVML and CUDA.",
        ("driver_version", "nvml_version", "cuda_version"),
        False,
    ),
    Described("gpus", "gauge", "GPUs that NVML lists.", (), False),
    Described("scrape_duration_seconds", "gauge", "Time this scrape took.", (), False),
    _gauge("gpu_up", "1 if the GPU answered in this scrape; if not, its values are left out."),
    _gauge(
        "scrape_error",
        "1 for whatever did not answer in this scrape, and why; without GPU labels, NVML itself.",
        "reason",
    ),
    _gauge("gpu_read_seconds", "Time it took to read the GPU."),
    _gauge("gpu_unanswered_seconds", "Time a call to the GPU has been waiting, while one does."),
    _counter("gpu_errors_total", "Readings, or fields of them, that failed.", "reason"),
    _gauge(
        "field_unsupported",
        "1 for each field that this GPU, driver or user does not have, and why.",
        "field",
        "reason",
    ),
    # ---- what the work asks ----
    _gauge("gpu_utilization_ratio", "Share of time in which a kernel ran."),
    _gauge("memory_utilization_ratio", "Share of time in which memory was read or written."),
    _gauge("encoder_utilization_ratio", "Use of the video encoders."),
    _gauge("decoder_utilization_ratio", "Use of the video decoders."),
    _gauge("jpeg_utilization_ratio", "Use of the JPEG engine."),
    _gauge("ofa_utilization_ratio", "Use of the optical flow engine."),
    _gauge("graphics_active_ratio", "Share of time in which any engine worked (GPM)."),
    _gauge("sm_active_ratio", "Share of time in which the SMs had work (GPM)."),
    _gauge("sm_occupancy_ratio", "Warps on the SMs, of those possible (GPM)."),
    _gauge("tensor_active_ratio", "Share of time in which tensor cores worked (GPM)."),
    _gauge("dram_active_ratio", "Memory bandwidth used, of that possible (GPM)."),
    _gauge("fp64_active_ratio", "Share of time in which FP64 units worked (GPM)."),
    _gauge("fp32_active_ratio", "Share of time in which FP32 units worked (GPM)."),
    _gauge("fp16_active_ratio", "Share of time in which FP16 units worked (GPM)."),
    _gauge("memory_total_bytes", "Memory of the GPU."),
    _gauge("memory_used_bytes", "Memory in use; with older drivers, reserved memory too."),
    _gauge("memory_free_bytes", "Memory that is free."),
    _gauge("memory_reserved_bytes", "Memory that driver and firmware keep."),
    _gauge("processes", "Processes that use the GPU.", "type"),
    _gauge(
        "process_memory_used_bytes",
        "Memory that a process uses; only with --per-process.",
        "pid",
        "process",
    ),
    # ---- how the GPU answers ----
    _gauge("temperature_celsius", "Temperature of the GPU."),
    _gauge("memory_temperature_celsius", "Temperature of the memory."),
    _gauge("temperature_limit_celsius", "Temperature at which something is done.", "threshold"),
    _gauge("temperature_margin_celsius", "Degrees below the temperature of slowdown."),
    _gauge("power_watts", "Power drawn, as nvidia-smi shows it."),
    _gauge("power_instant_watts", "Power drawn at this moment."),
    _gauge("power_average_watts", "Power drawn, on average over a second."),
    _gauge("power_limit_watts", "Power limit that is enforced."),
    _gauge("power_default_limit_watts", "Power limit that the GPU comes with."),
    _counter("energy_joules_total", "Energy used since the driver was loaded."),
    _gauge("sm_clock_hertz", "Clock of the SMs."),
    _gauge("sm_clock_max_hertz", "Highest clock of the SMs."),
    _gauge("memory_clock_hertz", "Clock of the memory."),
    _gauge("memory_clock_max_hertz", "Highest clock of the memory."),
    _gauge("graphics_clock_hertz", "Clock of the graphics engine."),
    _gauge("graphics_clock_max_hertz", "Highest clock of the graphics engine."),
    _gauge("video_clock_hertz", "Clock of the video engines."),
    _gauge("video_clock_max_hertz", "Highest clock of the video engines."),
    _gauge("clocks_event_reasons", "Why the clocks are as they are, as NVML's bit mask."),
    _gauge("clocks_event_active", "The same, 0 or 1 for each reason.", "reason"),
    _counter(
        "clocks_violation_seconds_total", "Time in which a limit lowered the clocks.", "reason"
    ),
    _gauge("performance_state", "Performance state, from 0 (highest) to 15."),
    _gauge("fan_speed_ratio", "Speed that a fan is told to have.", "fan"),
    _gauge("persistence_mode_enabled", "1 if the driver stays loaded without clients."),
    _gauge("mig_enabled", "1 if the GPU is cut into slices."),
    # ---- PCIe and NVLink ----
    _gauge("pcie_link_generation", "PCIe generation now; it falls while the GPU idles."),
    _gauge("pcie_link_generation_max", "Highest PCIe generation of GPU and slot."),
    _gauge("pcie_link_width", "PCIe lanes now."),
    _gauge("pcie_link_width_max", "Most PCIe lanes of GPU and slot."),
    _gauge("pcie_transmit_bytes_per_second", "PCIe traffic from the GPU."),
    _gauge("pcie_receive_bytes_per_second", "PCIe traffic to the GPU."),
    _counter("pcie_transmit_bytes_total", "Bytes from the GPU over PCIe; may wrap."),
    _counter("pcie_receive_bytes_total", "Bytes to the GPU over PCIe; may wrap."),
    _counter("pcie_replays_total", "PCIe packets that were sent again."),
    _counter("pcie_errors_total", "PCIe errors by kind.", "type"),
    _gauge("nvlink_up", "1 if the link is active; without a bridge it never is.", "nvlink"),
    _gauge("nvlink_transmit_bytes_per_second", "NVLink traffic from the GPU, all links (GPM)."),
    _gauge("nvlink_receive_bytes_per_second", "NVLink traffic to the GPU, all links (GPM)."),
    _counter("nvlink_transmit_bytes_total", "Payload sent over the link.", "nvlink"),
    _counter("nvlink_receive_bytes_total", "Payload received over the link.", "nvlink"),
    _counter("nvlink_replay_errors_total", "Packets that were sent again.", "nvlink"),
    _counter("nvlink_recovery_errors_total", "Recoveries of the link.", "nvlink"),
    _counter("nvlink_crc_flit_errors_total", "CRC errors in flow control.", "nvlink"),
    _counter("nvlink_crc_data_errors_total", "CRC errors in data.", "nvlink"),
    _counter("nvlink_ecc_data_errors_total", "ECC errors in data.", "nvlink"),
    _counter("nvlink_port_errors_total", "Errors of NVLink 5 ports by kind.", "nvlink", "type"),
    # ---- what the hardware says went wrong ----
    _counter("xid_errors_total", "Xids since the exporter started, by code.", "xid"),
    _gauge("last_xid", "The last Xid since the exporter started, 0 if none."),
    _gauge("last_xid_timestamp_seconds", "When the last Xid came, Unix time."),
    _gauge(
        "recovery_action",
        "What NVML asks for: 0 nothing, 1 reset the GPU, 2 reboot, 3 drain "
        "peer-to-peer, 4 drain and reset.",
    ),
    _gauge("ecc_enabled", "1 if memory errors are corrected."),
    _counter(
        "ecc_volatile_corrected_errors_total", "Corrected memory errors since the driver loaded."
    ),
    _counter(
        "ecc_volatile_uncorrected_errors_total",
        "Uncorrectable memory errors since the driver was loaded.",
    ),
    _counter("ecc_aggregate_corrected_errors_total", "Corrected memory errors over its life."),
    _counter("ecc_aggregate_uncorrected_errors_total", "Uncorrectable ones over its life."),
    _gauge("ecc_sram_threshold_exceeded", "1 once SRAM errors are more than the GPU should have."),
    _counter("remapped_rows_correctable_total", "Rows remapped after correctable errors."),
    _counter("remapped_rows_uncorrectable_total", "Rows remapped after uncorrectable errors."),
    _gauge("remapped_rows_pending", "1 if rows wait for a reset to be remapped."),
    _gauge("remapped_rows_failure", "1 if a row could not be remapped."),
    _gauge("row_remapper_banks", "Banks of memory by spare rows left.", "availability"),
    _counter("retired_pages_total", "Pages taken out of use (before Ampere).", "cause"),
    _gauge("retired_pages_pending", "1 if pages wait for a reset to be taken out of use."),
)
BY_NAME: Final = {d.name: d for d in DESCRIBED}


def table() -> str:
    """What docs/exporter.md says of every metric."""
    rows = "".join(
        f"| `{PREFIX}{d.name}` | {d.type} | {', '.join(d.labels) or ('' if d.of_gpu else '-')} "
        f"| {d.help} |\n"
        for d in DESCRIBED
    )
    return "| metric | type | more labels | meaning |\n|---|---|---|---|\n" + rows


def with_table(page: str) -> str:
    """The page with its table made anew."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n{table()}\n{_END}{after}"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(with_table(Path(name).read_text()))
