"""What can be read of one GPU with one call each, and what its answer means.

`CALLS` are functions of NVML, `FIELD_VALUES` numbered fields that one call reads together. A
`Row` holds NVML's own number and the scale to the metric's base unit, so that blanks are seen
before they are scaled. Field numbers above 250 mean different things to different drivers and
are not used.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import pynvml

from sentinel.edges.nvml import Handle

Labels = tuple[tuple[str, str], ...]
Way = Callable[[Handle], Any]

PERCENT: Final = 0.01
MILLI: Final = 1e-3
NANO: Final = 1e-9
MEGA: Final = 1e6
KIB: Final = 1024.0
MIB: Final = 1024.0 * 1024.0

EVENT_REASONS: Final = (
    (0x1, "gpu_idle"),
    (0x2, "applications_clocks_setting"),
    (0x4, "sw_power_cap"),
    (0x8, "hw_slowdown"),
    (0x10, "sync_boost"),
    (0x20, "sw_thermal_slowdown"),
    (0x40, "hw_thermal_slowdown"),
    (0x80, "hw_power_brake_slowdown"),
    (0x100, "display_clock_setting"),
)


class Row(NamedTuple):
    """One value as NVML gave it. The metric has it times `scale`."""

    metric: str
    raw: float
    scale: float = 1.0
    labels: Labels = ()


@dataclass(frozen=True)
class Call:
    """A field that NVML answers with a function. `ways` are tried in turn: newer drivers know
    more. `rows` reads the answer."""

    field: str
    ways: tuple[Way, ...]
    rows: Callable[[Any], Iterable[Row]]


class FieldValue(NamedTuple):
    field: str
    id: int
    metric: str
    scale: float = 1.0
    labels: Labels = ()


def _by(name: str, *args: Any) -> Way:
    """A call by name, looked up when made: pynvml may be older than the name."""
    return lambda handle: getattr(pynvml, name)(handle, *args)


def _is(metric: str, scale: float = 1.0, labels: Labels = ()) -> Callable[[Any], Iterable[Row]]:
    return lambda told: [Row(metric, told, scale, labels)]


def _at(
    place: int, metric: str, scale: float = 1.0, labels: Labels = ()
) -> Callable[[Any], Iterable[Row]]:
    return lambda told: [Row(metric, told[place], scale, labels)]


def _clock(kind: str, number: int) -> list[Call]:
    return [
        Call(
            f"{kind}_clock",
            (_by("nvmlDeviceGetClockInfo", number),),
            _is(f"{kind}_clock_hertz", MEGA),
        ),
        Call(
            f"{kind}_clock_max",
            (_by("nvmlDeviceGetMaxClockInfo", number),),
            _is(f"{kind}_clock_max_hertz", MEGA),
        ),
    ]


def _limit(threshold: str, number: int) -> Call:
    return Call(
        f"temperature_limit_{threshold}",
        (_by("nvmlDeviceGetTemperatureThreshold", number),),
        _is("temperature_limit_celsius", 1.0, (("threshold", threshold),)),
    )


def _ecc(counter: str, which: int, kind: str, error: int) -> Call:
    return Call(
        f"ecc_{counter}_{kind}",
        (_by("nvmlDeviceGetTotalEccErrors", error, which),),
        _is(f"ecc_{counter}_{kind}_errors_total"),
    )


def _memory(told: Any) -> Iterable[Row]:
    yield Row("memory_total_bytes", told.total)
    yield Row("memory_used_bytes", told.used)
    yield Row("memory_free_bytes", told.free)
    if hasattr(told, "reserved"):  # the older answer counts it as used
        yield Row("memory_reserved_bytes", told.reserved)


def _event_reasons(mask: int) -> Iterable[Row]:
    yield Row("clocks_event_reasons", mask)
    if mask < 1 << 32:
        for bit, reason in EVENT_REASONS:
            yield Row("clocks_event_active", bool(mask & bit), 1.0, (("reason", reason),))


def _utilization(told: Any) -> Iterable[Row]:
    yield Row("gpu_utilization_ratio", told.gpu, PERCENT)
    yield Row("memory_utilization_ratio", told.memory, PERCENT)


def _remapped_rows(told: Any) -> Iterable[Row]:
    yield Row("remapped_rows_correctable_total", told[0])
    yield Row("remapped_rows_uncorrectable_total", told[1])
    yield Row("remapped_rows_pending", told[2])
    yield Row("remapped_rows_failure", told[3])


def _row_remapper(told: Any) -> Iterable[Row]:
    for availability in ("max", "high", "partial", "low", "none"):
        labels = (("availability", availability),)
        yield Row("row_remapper_banks", getattr(told, availability), 1.0, labels)


def _performance_state(state: int) -> Iterable[Row]:
    if state <= 15:  # 32 is unknown
        yield Row("performance_state", state)


def _sram_status(handle: Handle) -> Any:
    status = pynvml.c_nvmlEccSramErrorStatus_v1_t()
    pynvml.nvmlDeviceGetSramEccErrorStatus(handle, ctypes.byref(status))
    return status


def _processes(handle: Handle, kind: str) -> list[Any]:
    """The processes of one kind: MPS clients are compute processes under another call."""
    name = f"nvmlDeviceGet{kind}RunningProcesses"
    try:
        found: list[Any] = getattr(pynvml, f"{name}_v3")(handle)
    except pynvml.NVMLError_FunctionNotFound:
        found = getattr(pynvml, f"{name}_v2")(handle)
    return found


def processes(kind: str) -> Way:
    return lambda handle: _processes(handle, kind)


PROCESS_KINDS: Final = (
    ("compute", processes("Compute")),
    ("graphics", processes("Graphics")),
    ("mps", processes("MPSCompute")),
)

MEMORY_WAYS: Final[tuple[Way, ...]] = (
    lambda handle: pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2),
    _by("nvmlDeviceGetMemoryInfo"),
)
MEMORY: Final = Call("memory", MEMORY_WAYS, _memory)

CALLS: Final[tuple[Call, ...]] = (
    Call("utilization", (_by("nvmlDeviceGetUtilizationRates"),), _utilization),
    Call(
        "encoder_utilization",
        (_by("nvmlDeviceGetEncoderUtilization"),),
        _at(0, "encoder_utilization_ratio", PERCENT),
    ),
    Call(
        "decoder_utilization",
        (_by("nvmlDeviceGetDecoderUtilization"),),
        _at(0, "decoder_utilization_ratio", PERCENT),
    ),
    Call(
        "jpeg_utilization",
        (_by("nvmlDeviceGetJpgUtilization"),),
        _at(0, "jpeg_utilization_ratio", PERCENT),
    ),
    Call(
        "ofa_utilization",
        (_by("nvmlDeviceGetOfaUtilization"),),
        _at(0, "ofa_utilization_ratio", PERCENT),
    ),
    MEMORY,
    Call(
        "temperature",
        (_by("nvmlDeviceGetTemperature", 0), _by("nvmlDeviceGetTemperatureV", 0)),
        _is("temperature_celsius"),
    ),
    _limit("shutdown", 0),
    _limit("slowdown", 1),
    _limit("memory_max", 2),
    _limit("gpu_max", 3),
    Call(
        "temperature_margin",
        (_by("nvmlDeviceGetMarginTemperature"),),
        _is("temperature_margin_celsius"),
    ),
    Call("power", (_by("nvmlDeviceGetPowerUsage"),), _is("power_watts", MILLI)),
    Call("power_limit", (_by("nvmlDeviceGetEnforcedPowerLimit"),), _is("power_limit_watts", MILLI)),
    Call(
        "power_default_limit",
        (_by("nvmlDeviceGetPowerManagementDefaultLimit"),),
        _is("power_default_limit_watts", MILLI),
    ),
    Call(
        "energy", (_by("nvmlDeviceGetTotalEnergyConsumption"),), _is("energy_joules_total", MILLI)
    ),
    *_clock("graphics", 0),
    *_clock("sm", 1),
    *_clock("memory", 2),
    *_clock("video", 3),
    Call(
        "clocks_event_reasons",
        (
            _by("nvmlDeviceGetCurrentClocksEventReasons"),
            _by("nvmlDeviceGetCurrentClocksThrottleReasons"),
        ),
        _event_reasons,
    ),
    Call("performance_state", (_by("nvmlDeviceGetPerformanceState"),), _performance_state),
    Call(
        "pcie_link_generation",
        (_by("nvmlDeviceGetCurrPcieLinkGeneration"),),
        _is("pcie_link_generation"),
    ),
    Call("pcie_link_width", (_by("nvmlDeviceGetCurrPcieLinkWidth"),), _is("pcie_link_width")),
    Call(
        "pcie_link_generation_max",
        (_by("nvmlDeviceGetMaxPcieLinkGeneration"),),
        _is("pcie_link_generation_max"),
    ),
    Call(
        "pcie_link_width_max", (_by("nvmlDeviceGetMaxPcieLinkWidth"),), _is("pcie_link_width_max")
    ),
    Call("pcie_replays", (_by("nvmlDeviceGetPcieReplayCounter"),), _is("pcie_replays_total")),
    Call("ecc_mode", (_by("nvmlDeviceGetEccMode"),), _at(0, "ecc_enabled")),
    _ecc("volatile", 0, "corrected", 0),
    _ecc("volatile", 0, "uncorrected", 1),
    _ecc("aggregate", 1, "corrected", 0),
    _ecc("aggregate", 1, "uncorrected", 1),
    Call(
        "ecc_sram_status",
        (_sram_status,),
        lambda told: [Row("ecc_sram_threshold_exceeded", told.bThresholdExceeded)],
    ),
    Call("remapped_rows", (_by("nvmlDeviceGetRemappedRows"),), _remapped_rows),
    Call("row_remapper", (_by("nvmlDeviceGetRowRemapperHistogram"),), _row_remapper),
    Call(
        "persistence_mode",
        (_by("nvmlDeviceGetPersistenceMode"),),
        _is("persistence_mode_enabled"),
    ),
)

# Read only where the GPU has no better source of it: each call watches the bus for 20 ms.
PCIE_RATES: Final = (
    Call(
        "pcie_transmit_rate",
        (_by("nvmlDeviceGetPcieThroughput", 0),),
        _is("pcie_transmit_bytes_per_second", 1000.0),
    ),
    Call(
        "pcie_receive_rate",
        (_by("nvmlDeviceGetPcieThroughput", 1),),
        _is("pcie_receive_bytes_per_second", 1000.0),
    ),
)


def _labelled(
    field: str, metric: str, label: str, ids: Iterable[tuple[str, int]], scale: float = 1.0
) -> list[FieldValue]:
    return [FieldValue(f"{field}_{v}", i, metric, scale, ((label, v),)) for v, i in ids]


FIELD_VALUES: Final[tuple[FieldValue, ...]] = (
    FieldValue("memory_temperature", 82, "memory_temperature_celsius"),
    FieldValue("power_average", 185, "power_average_watts", MILLI),
    FieldValue("power_instant", 186, "power_instant_watts", MILLI),
    FieldValue("recovery_action", 230, "recovery_action"),
    FieldValue("pcie_transmit_bytes", 197, "pcie_transmit_bytes_total"),
    FieldValue("pcie_receive_bytes", 198, "pcie_receive_bytes_total"),
    *_labelled(
        "clocks_violation",
        "clocks_violation_seconds_total",
        "reason",
        (
            ("power", 74),
            ("thermal", 75),
            ("sync_boost", 76),
            ("board_limit", 77),
            ("low_utilization", 78),
            ("reliability", 79),
            ("app_clocks", 80),
            ("base_clocks", 81),
        ),
        NANO,
    ),
    *_labelled(
        "pcie_errors",
        "pcie_errors_total",
        "type",
        (
            ("l0_to_recovery", 169),
            ("correctable", 173),
            ("nak_received", 174),
            ("receiver", 175),
            ("bad_tlp", 176),
            ("nak_sent", 177),
            ("bad_dllp", 178),
            ("non_fatal", 179),
            ("fatal", 180),
            ("unsupported_request", 181),
            ("lcrc", 182),
            ("lane", 183),
        ),
    ),
    *_labelled(
        "retired_pages",
        "retired_pages_total",
        "cause",
        (("single_bit", 29), ("double_bit", 30)),
    ),
    FieldValue("retired_pages_pending", 31, "retired_pages_pending"),
)

# Per NVLink: numbered fields whose scope is the link.
LINK_COUNT: Final = 91
LINK_VALUES: Final[tuple[FieldValue, ...]] = (
    FieldValue("nvlink_transmit_bytes", 138, "nvlink_transmit_bytes_total", KIB),
    FieldValue("nvlink_receive_bytes", 139, "nvlink_receive_bytes_total", KIB),
    *_labelled(
        "nvlink_port_errors",
        "nvlink_port_errors_total",
        "type",
        (
            ("receive", 208),
            ("local_link_integrity", 211),
            ("transmit_discard", 212),
            ("recovery_failed", 214),
            ("recovery", 215),
            ("symbol", 221),
        ),
    ),
)
# Per NVLink: error counters of NVLink 2 to 4, by their number in nvmlNvLinkErrorCounter_t.
LINK_ERRORS: Final = (
    ("nvlink_replay_errors", 0),
    ("nvlink_recovery_errors", 1),
    ("nvlink_crc_flit_errors", 2),
    ("nvlink_crc_data_errors", 3),
    ("nvlink_ecc_data_errors", 4),
)

# GPU performance monitoring (Hopper and later): what happened between two samples.
GPM: Final = (
    (1, "graphics_active_ratio", PERCENT),
    (2, "sm_active_ratio", PERCENT),
    (3, "sm_occupancy_ratio", PERCENT),
    (5, "tensor_active_ratio", PERCENT),
    (10, "dram_active_ratio", PERCENT),
    (11, "fp64_active_ratio", PERCENT),
    (12, "fp32_active_ratio", PERCENT),
    (13, "fp16_active_ratio", PERCENT),
    (20, "pcie_transmit_bytes_per_second", MIB),
    (21, "pcie_receive_bytes_per_second", MIB),
    (61, "nvlink_transmit_bytes_per_second", MIB),
    (60, "nvlink_receive_bytes_per_second", MIB),
)


def value_of(told: Any) -> float | None:
    """The number in a field value, by its type; None for a type that is not known."""
    names = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
    if told.valueType >= len(names):
        return None
    return float(getattr(told.value, names[told.valueType]))
