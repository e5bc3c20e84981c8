"""What a missing metric is worth, and how each exporter is made to show it.

The order of `WANTED` is the order in which a site should add metrics: hard evidence first, then
what tells demand from response, then the rest of what the daemon reads. Metrics that are not in
it are good to have and never asked for.
"""

from __future__ import annotations

import re
from typing import Final

from sentinel.core.catalog import Alias, Catalog, Metric, MetricKind
from sentinel.doctor.facts import Enable

HARD: Final = (
    "xid",
    "ecc_dbe_volatile",
    "remap_failure",
    "remap_pending",
    "recovery_action",
    "retired_pages_pending",
    "sram_threshold_exceeded",
    "ecc_sbe_volatile",
    "remapped_uncorrectable",
    "ecc_dbe_aggregate",
    "pcie_replay",
    "nvlink_crc_errors",
    "nvlink_replay_errors",
    "nvlink_recovery_errors",
)
DEMAND: Final = (
    "gpu_util_ratio",
    "gr_engine_active_ratio",
    "sm_active_ratio",
    "tensor_active_ratio",
    "dram_active_ratio",
    "fb_used_mib",
    "mem_copy_util_ratio",
    "pcie_rx_bytes_per_s",
    "nvlink_tx_bytes_per_s",
)
RESPONSE: Final = (
    "temp_c",
    "power_w",
    "sm_clock_mhz",
    "throttle_reasons",
    "mem_temp_c",
    "mem_clock_mhz",
    "energy_j",
    "power_violation_s",
    "thermal_violation_s",
    "power_limit_w",
    "pcie_link_gen",
    "pcie_link_width",
    "pcie_max_link_gen",
    "pcie_max_link_width",
)
WANTED: Final = (*HARD, *DEMAND, *RESPONSE)
CORE: Final = ("temp_c", "power_w", "sm_clock_mhz")  # without any of these no GPU can be judged

# one of these in its place will do
INSTEAD: Final = {
    "gr_engine_active_ratio": ("sm_active_ratio",),
    "ecc_dbe_aggregate": ("ecc_dbe_volatile",),
    "nvlink_crc_errors": ("nvlink_rx_errors",),
    "nvlink_replay_errors": ("nvlink_rx_errors",),
    "nvlink_tx_bytes_per_s": ("nvlink_rx_bytes_per_s", "nvlink_mb_per_s"),
    "pcie_rx_bytes_per_s": ("pcie_tx_bytes_per_s",),
}
# what the GPUs before row remapping have in its place
BEFORE_REMAP: Final = frozenset({"retired_pages_sbe", "retired_pages_dbe", "retired_pages_pending"})

DCGM_LIST: Final = "dcgm-exporter's list of fields"
SMI_LIST: Final = "nvidia_gpu_exporter's --query-field-names"
_WIDTH: Final = 76
_FIELD: Final = re.compile(r"DCGM_(FI|EXP)_\w+")
_SMI_FIELDS: Final = {
    "gpu_util_ratio": "utilization.gpu",
    "mem_copy_util_ratio": "utilization.memory",
    "enc_util_ratio": "utilization.encoder",
    "dec_util_ratio": "utilization.decoder",
    "fb_used_mib": "memory.used",
    "fb_free_mib": "memory.free",
    "fb_reserved_mib": "memory.reserved",
    "fb_total_mib": "memory.total",
    "temp_c": "temperature.gpu",
    "mem_temp_c": "temperature.memory",
    "temp_margin_c": "temperature.gpu.tlimit",
    "power_w": "power.draw",
    "power_limit_w": "enforced.power.limit",
    "sm_clock_mhz": "clocks.current.sm",
    "sm_clock_max_mhz": "clocks.max.sm",
    "mem_clock_mhz": "clocks.current.memory",
    "throttle_reasons": "clocks_event_reasons.active",
    "power_violation_s": "clocks_event_reasons_counters.sw_power_cap",
    "thermal_violation_s": "clocks_event_reasons_counters.hw_thermal_slowdown",
    "ecc_sbe_volatile": "ecc.errors.corrected.volatile.total",
    "ecc_dbe_volatile": "ecc.errors.uncorrected.volatile.total",
    "ecc_sbe_aggregate": "ecc.errors.corrected.aggregate.total",
    "ecc_dbe_aggregate": "ecc.errors.uncorrected.aggregate.total",
    "sram_threshold_exceeded": "ecc.errors.uncorrected.aggregate.sram.thresholdExceeded",
    "remap_failure": "remapped_rows.failure",
    "remap_pending": "remapped_rows.pending",
    "remapped_uncorrectable": "remapped_rows.uncorrectable",
    "remapped_correctable": "remapped_rows.correctable",
    "retired_pages_sbe": "retired_pages.single_bit_ecc.count",
    "retired_pages_dbe": "retired_pages.double_bit.count",
    "retired_pages_pending": "retired_pages.pending",
    "recovery_action": "gpu_recovery_action",
    "fabric_state": "fabric.state",
    "fan_ratio": "fan.speed",
    "pstate": "pstate",
    "mig_mode": "mig.mode.current",
    "ecc_mode": "ecc.mode.current",
    "pcie_link_gen": "pcie.link.gen.current",
    "pcie_link_width": "pcie.link.width.current",
    "pcie_max_link_gen": "pcie.link.gen.max",
    "pcie_max_link_width": "pcie.link.width.max",
}
_TITLES: Final = {
    "dcgm": "dcgm-exporter",
    "dcgm-4.6": "dcgm-exporter (DCGM 4.6 names)",
    "dcgm-4.7": "dcgm-exporter (DCGM 4.7 names)",
    "dcgm-1.x": "dcgm-exporter (1.x names)",
    "otel-dcgm": "OpenTelemetry dcgmreceiver",
    "telegraf": "Telegraf",
    "sentinel": "sentinel exporter",
    "plain": "an exporter of your own",
    "own": "an exporter of your own",
}


def title(kind: str) -> str:
    """The exporter's name as people know it."""
    return _TITLES.get(kind, kind)


def importance(name: str) -> int:
    """0 for what matters most; every metric that is not asked for comes after all others."""
    return WANTED.index(name) if name in WANTED else len(WANTED)


def enable(catalog: Catalog, metric: Metric, kind: str) -> Enable:
    """How an exporter of this kind is made to show the metric."""
    column = catalog.column(metric.name)
    names = [alias for alias in catalog.names_of(column) if _FIELD.fullmatch(alias.name)]
    if kind in ("dcgm", "dcgm-4.6", "dcgm-4.7") and names:
        return _dcgm(metric, kind, names)
    if kind == "nvidia_gpu_exporter":
        return _smi(metric)
    if kind == "sentinel":
        return Enable(
            kind, "it shows whatever the driver tells: see sentinel_nvml_field_unsupported there"
        )
    if kind == "dcgm-1.x":
        if names:
            return Enable(kind, f"in {DCGM_LIST}", _csv(metric, names[0].name))
        return Enable(kind, "run a later dcgm-exporter, or `sentinel exporter` beside it")
    own = any(alias.exporter == kind for alias in catalog.names_of(column))
    if own:
        return Enable(kind, f"{title(kind)} can show it: see its own configuration")
    return Enable(
        kind, f"{title(kind)} cannot show it: run dcgm-exporter, or `sentinel exporter` beside it"
    )


def _dcgm(metric: Metric, kind: str, names: list[Alias]) -> Enable:
    """In the names of that time where it has one; the old name is valid for all later ones."""
    mine = [alias.name for alias in names if alias.exporter == kind]
    first = [alias.name for alias in names if alias.exporter == "dcgm"]
    return Enable(kind, f"in {DCGM_LIST}", _csv(metric, (mine or first or [names[0].name])[0]))


def _csv(metric: Metric, field: str) -> str:
    """A line as dcgm-exporter reads it, short enough to be copied off a terminal; a comma would
    end the text."""
    kind = "counter" if metric.kind is MetricKind.COUNTER else "gauge"
    line = f"{field}, {kind}, {metric.label.replace(',', ' -')}"
    return line if len(line) <= _WIDTH else f"{field}, {kind}, {metric.name.replace('_', ' ')}"


def _smi(metric: Metric) -> Enable:
    if metric.name == "xid":
        how = "run nvidia_gpu_exporter with --collect.backend=nvml, which alone counts Xids"
        return Enable("nvidia_gpu_exporter", how)
    if metric.name in ("pcie_tx_bytes_per_s", "pcie_rx_bytes_per_s"):
        how = "run nvidia_gpu_exporter with --collect.backend=nvml --collect.pcie-throughput"
        return Enable("nvidia_gpu_exporter", how)
    field = _SMI_FIELDS.get(metric.name)
    if field is None:
        how = "nvidia-smi has no such field: run dcgm-exporter, or `sentinel exporter` beside it"
        return Enable("nvidia_gpu_exporter", how)
    return Enable("nvidia_gpu_exporter", f"in {SMI_LIST}, where that is not AUTO", field)
