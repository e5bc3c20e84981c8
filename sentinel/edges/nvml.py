"""NVML: the library, its GPUs and its events, through pynvml.

A call into NVML may hang inside the driver for as long as the machine runs, and nothing can
take it back. So nothing here has a deadline: call it from a thread that can be spared. No
error text is asked of the library, for the same reason.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import pynvml

Handle = Any  # pynvml's pointer to a device
NvmlError = pynvml.NVMLError

# NVML's return codes in the words of the metrics' `reason`
REASONS: Final[Mapping[int, str]] = {
    1: "uninitialized",
    2: "invalid_argument",
    3: "not_supported",
    4: "no_permission",
    6: "not_found",
    7: "insufficient_size",
    8: "insufficient_power",
    9: "driver_not_loaded",
    10: "nvml_timeout",
    11: "interrupt_issue",
    12: "library_not_found",
    13: "function_not_found",
    14: "corrupted_inforom",
    15: "lost",
    16: "reset_required",
    17: "operating_system",
    18: "version_mismatch",
    19: "in_use",
    20: "out_of_memory",
    21: "no_data",
    22: "vgpu_ecc_not_supported",
    23: "insufficient_resources",
    25: "argument_version_mismatch",
    26: "deprecated",
    27: "not_ready",
    28: "gpu_not_found",
    29: "invalid_state",
    999: "unknown",
}
# This GPU or this driver does not have it, and asking again changes nothing.
UNSUPPORTED: Final = frozenset(
    {
        "invalid_argument",
        "not_supported",
        "no_permission",
        "function_not_found",
        "vgpu_ecc_not_supported",
        "argument_version_mismatch",
        "deprecated",
    }
)
# The whole library is out; it must be opened again.
LIBRARY_WIDE: Final = frozenset(
    {"uninitialized", "driver_not_loaded", "library_not_found", "version_mismatch"}
)
# The GPU itself is out: no other question to it is worth asking.
GPU_WIDE: Final = frozenset({"lost", "gpu_not_found"}) | LIBRARY_WIDE

_ADVICE: Final[Mapping[str, str]] = {
    "library_not_found": "libnvidia-ml.so.1 is not to be found: install the NVIDIA driver, and in "
    "a container pass it through (NVIDIA_DRIVER_CAPABILITIES=utility)",
    "driver_not_loaded": "the NVIDIA kernel driver is not loaded: load it (modprobe nvidia)",
    "version_mismatch": "the NVML library and the loaded kernel driver are of different versions, "
    "as after an update: load the new driver or restart the host",
    "no_permission": "this user may not open /dev/nvidiactl: see its mode and group",
    "unknown": "NVML says no more than 'unknown error'; in a container the device files may have "
    "been taken away: start the container anew",
    "timeout": "NVML does not answer; look for Xid 79, 119 or 120 in the kernel's log",
}


def reason_of(err: Exception) -> str:
    """An error of NVML, or of pynvml around it, as one word."""
    if isinstance(err, pynvml.NVMLError):
        code = err.value
        return REASONS.get(code, f"error_{code}")
    if isinstance(err, (AttributeError, pynvml.NVMLLibraryMismatchError)):
        return "function_not_found"  # newer than this pynvml, or than this driver
    return "bad_answer"


def advice(reason: str) -> str:
    """What a person can do about a library that cannot be used."""
    return _ADVICE.get(reason, f"NVML cannot be used ({reason.replace('_', ' ')})")


@dataclass(frozen=True, slots=True)
class GpuId:
    """Which GPU: `uuid` is the identity; the rest are places and names that may change."""

    index: int
    uuid: str
    model: str
    pci_bus_id: str

    @property
    def key(self) -> str:
        """The UUID; where that is blacked out, the place."""
        return self.uuid if self.uuid.strip("GPU-0") else f"#{self.index}"


class Library:
    """NVML of this process. For one thread; the GPUs are then read from others."""

    def __init__(self) -> None:
        self._opened = 0

    def open(self, *, quiet: bool = True) -> None:
        """Opens it, or opens it anew. `quiet`: no other thread is inside a call; only then is
        the old session ended first, since that frees what such a call stands on."""
        if quiet:
            self._close()
        pynvml.nvmlInitWithFlags(pynvml.NVML_INIT_FLAG_NO_GPUS)
        self._opened += 1

    def _close(self) -> None:
        with contextlib.suppress(pynvml.NVMLError):
            while self._opened:  # the library counts too, and ends with the last
                pynvml.nvmlShutdown()
                self._opened -= 1

    def count(self) -> int:
        return int(pynvml.nvmlDeviceGetCount())

    def versions(self) -> dict[str, str]:
        """Label and value of each version that can be told."""
        found: dict[str, str] = {}
        for label, call in (
            ("driver_version", pynvml.nvmlSystemGetDriverVersion),
            ("nvml_version", pynvml.nvmlSystemGetNVMLVersion),
            ("cuda_version", pynvml.nvmlSystemGetCudaDriverVersion),
        ):
            try:
                told = call()
            except Exception:
                told = ""
            if isinstance(told, int):  # 12040 is 12.4
                told = f"{told // 1000}.{told % 1000 // 10}"
            found[label] = told
        return found


def find(index: int) -> tuple[Handle, GpuId]:
    """The GPU at a place, of which only the handle is sure. Raises NvmlError."""
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    uuid = str(pynvml.nvmlDeviceGetUUID(handle))
    return handle, GpuId(index, uuid, _name(handle), _pci_bus_id(handle))


def _name(handle: Handle) -> str:
    try:
        return str(pynvml.nvmlDeviceGetName(handle))
    except (pynvml.NVMLError, UnicodeDecodeError) as err:
        if reason_of(err) in GPU_WIDE:
            raise
        return ""


def _pci_bus_id(handle: Handle) -> str:
    try:
        return str(pynvml.nvmlDeviceGetPciInfo(handle).busId)
    except (pynvml.NVMLError, UnicodeDecodeError) as err:
        if reason_of(err) in GPU_WIDE:
            raise
        return ""


def library_was_replaced() -> bool:
    """Whether the NVML in this process is no longer the file on disk, as after an update of
    the driver. Nothing but a new process loads the new one."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            lines = [line.split(maxsplit=5) for line in maps if "libnvidia-ml.so" in line]
    except OSError:
        return False
    for parts in lines:
        if len(parts) < 6:
            continue
        path, inode = parts[5].strip(), parts[4]
        if path.endswith(" (deleted)"):
            return True
        try:
            if str(os.stat(path).st_ino) != inode:
                return True
        except OSError:
            return True
    return False


class XidEvents:
    """The Xids of one GPU as they happen, from now on. Raises NvmlError where it has none."""

    def __init__(self, handle: Handle) -> None:
        wanted = pynvml.nvmlEventTypeXidCriticalError
        if not pynvml.nvmlDeviceGetSupportedEventTypes(handle) & wanted:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        self._set = pynvml.nvmlEventSetCreate()
        try:
            pynvml.nvmlDeviceRegisterEvents(handle, wanted, self._set)
        except pynvml.NVMLError:
            self.close()
            raise

    def wait(self, timeout_ms: int) -> int | None:
        """The next code, None when none came in time."""
        try:
            data = pynvml.nvmlEventSetWait_v2(self._set, timeout_ms)
        except pynvml.NVMLError as err:
            if err.value == pynvml.NVML_ERROR_TIMEOUT:
                return None
            raise
        if data.eventType != pynvml.nvmlEventTypeXidCriticalError:
            return None
        return int(data.eventData)

    def close(self) -> None:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlEventSetFree(self._set)
