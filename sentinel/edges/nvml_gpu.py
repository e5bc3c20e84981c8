"""Reads one GPU whole: every field that it has, in the metrics' base units.

What a GPU or its driver cannot tell is found out once and not asked again until there is
reason to: the GPU came back, its MIG mode changed, or an hour has passed. A field that fails
leaves the others alone; a GPU that is lost is not asked further.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pynvml

from sentinel.edges import nvml_fields as fields
from sentinel.edges.nvml import GPU_WIDE, UNSUPPORTED, GpuId, Handle, find, reason_of
from sentinel.edges.nvml_fields import Call, Labels, Row
from sentinel.edges.nvml_gpm import Gpm, labelled

_ASK_AGAIN_S: Final = 3600.0
_LONG_S: Final = 60.0
_MIG_NAME: Final = " MIG "
# what NVML writes where a number is not to be had: all ones, in 32 and in 64 bits
_BLANKS: Final = (0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF, 2.0**64)
_NOT_THERE: Final = frozenset({"invalid_argument", "not_found", "gpu_not_found"})


@dataclass(frozen=True, slots=True)
class Sample:
    """A value in its metric's unit; `metric` is without the prefix."""

    metric: str
    value: float
    labels: Labels = ()


@dataclass(frozen=True, slots=True)
class Reading:
    """What one GPU told at one time. `reason` says why it told no more, empty if it told all.

    `unsupported` and `failed` hold fields and why; `handle` is good while the library stays
    open.
    """

    id: GpuId | None
    reason: str
    samples: tuple[Sample, ...] = ()
    unsupported: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    handle: Handle = None
    took_s: float = 0.0


class GpuReader:
    """The GPU at one place of NVML's list. For one thread.

    `now_at` names the field that is being read, for whoever waits for it. `per_process`: tell
    each process's memory too.
    """

    def __init__(self, index: int, *, per_process: bool = False) -> None:
        self.index = index
        self.now_at = ""
        self._per_process = per_process
        self._key = ""
        self._mig = False
        self._gpm = Gpm()
        self._forget(0.0)

    def _forget(self, now_s: float) -> None:
        self._way: dict[str, int] = {}
        self._unsupported: dict[str, str] = {}
        self._asked_s = now_s
        self._whole = False

    def read(self, is_over: Callable[[], bool] = lambda: False) -> Reading:
        """Never raises. `is_over` is asked between fields: nobody waits any more."""
        start_s = time.monotonic()
        if not self._whole or start_s - self._asked_s > _ASK_AGAIN_S:
            self._forget(start_s)
        self._rows: list[Row] = []
        self._failed: dict[str, str] = {}
        self._reason = ""
        handle, gpu = None, None
        try:
            self.now_at = "handle"
            handle, gpu = find(self.index)
            if gpu.key != self._key:
                self._forget(start_s)
                self._gpm.release()
                self._key = gpu.key
            self._read_fields(handle, is_over)
        except Exception as err:
            told = reason_of(err)
            self._reason = "gone" if handle is None and told in _NOT_THERE else told
        samples = self._samples()
        if not self._reason and not samples:
            self._reason = next(iter(self._failed.values()), "no_data")
        took_s = time.monotonic() - start_s
        # a slow GPU goes on where it was; what hung for long, or was out, is met anew
        self._whole = self._reason in ("", "timeout") and took_s < _LONG_S
        self.now_at = ""
        return Reading(
            gpu, self._reason, samples, dict(self._unsupported), self._failed, handle, took_s
        )

    def library_closes(self, *, quiet: bool) -> None:
        """While this is not reading. `quiet`: the library is still whole, and takes back what
        it lent."""
        if quiet:
            self._gpm.release()
        else:
            self._gpm.abandon()
        self._whole = False

    # ---- fields -------------------------------------------------------------------------

    def _read_fields(self, handle: Handle, is_over: Callable[[], bool]) -> None:
        self._read_mig_mode(handle)
        parts: list[tuple[str, Callable[[], Iterable[Row]]]] = [
            *((call.field, self._asking(call, handle)) for call in fields.CALLS),
            ("field_values", lambda: self._field_values(handle)),
            ("nvlink", lambda: self._nvlink(handle)),
            ("fan_speed", lambda: _fans(handle)),
            ("gpm", lambda: self._profiling(handle)),
            *((kind, self._counting(kind, way, handle)) for kind, way in fields.PROCESS_KINDS),
        ]
        if self._mig:
            parts.append(("mig_instances", lambda: self._instances(handle)))
        for name, read in parts:
            if is_over():
                self._reason = "timeout"
                return
            self._try(name, read)
        if "gpm" in self._unsupported or self._mig:
            for call in fields.PCIE_RATES:
                self._try(call.field, self._asking(call, handle))

    def _try(self, name: str, read: Callable[[], Iterable[Row]]) -> None:
        """Rows of a field, or the reason why there are none. Raises where the GPU is out."""
        if name in self._unsupported:
            return
        self.now_at = name
        try:
            self._rows.extend(read())
        except Exception as err:
            self._note(name, err)

    def _note(self, name: str, err: Exception) -> None:
        reason = reason_of(err)
        if reason in GPU_WIDE:
            raise err
        if reason in UNSUPPORTED:
            self._unsupported[name] = reason
            return
        self._failed[name] = reason
        if reason == "reset_required":  # what it still tells may name the remedy
            self._reason = reason

    def _asking(self, call: Call, handle: Handle) -> Callable[[], Iterable[Row]]:
        def ask() -> Iterable[Row]:
            while True:
                way = self._way.get(call.field, 0)
                try:
                    return call.rows(call.ways[way](handle))
                except Exception as err:
                    if reason_of(err) not in UNSUPPORTED or way + 1 >= len(call.ways):
                        raise
                    self._way[call.field] = way + 1

        return ask

    def _read_mig_mode(self, handle: Handle) -> None:
        def ask() -> Iterable[Row]:
            now = bool(pynvml.nvmlDeviceGetMigMode(handle)[0])
            if now != self._mig:
                self._forget(self._asked_s)
            self._mig = now
            yield Row("mig_enabled", now)

        self._try("mig_mode", ask)

    def _field_values(self, handle: Handle) -> Iterable[Row]:
        asked = [f for f in fields.FIELD_VALUES if f.field not in self._unsupported]
        told = pynvml.nvmlDeviceGetFieldValues(handle, [f.id for f in asked]) if asked else ()
        for wanted, got in zip(asked, told, strict=True):
            if got.nvmlReturn != pynvml.NVML_SUCCESS:
                self._note(wanted.field, pynvml.NVMLError(got.nvmlReturn))
            elif wanted.field == "memory_temperature" and fields.value_of(got) == 0:
                self._unsupported[wanted.field] = "not_supported"  # a sensor that is not there
            elif (value := fields.value_of(got)) is not None:
                yield Row(wanted.metric, value, wanted.scale, wanted.labels)

    def _nvlink(self, handle: Handle) -> Iterable[Row]:
        links = _link_states(handle)
        for link, active in links.items():
            yield Row("nvlink_up", active, 1.0, (("nvlink", str(link)),))
        for name, counter in fields.LINK_ERRORS:
            if name in self._unsupported:
                continue
            found, err = _link_errors(handle, links, counter)
            if err is not None and not found:
                self._note(name, err)
            for link, count in found.items():
                yield Row(f"{name}_total", count, 1.0, (("nvlink", str(link)),))
        yield from self._link_values(handle, list(links))

    def _link_values(self, handle: Handle, links: list[int]) -> Iterable[Row]:
        wanted = [f for f in fields.LINK_VALUES if f.field not in self._unsupported]
        asked = [(f, link) for f in wanted for link in links]
        if not asked:
            return
        told = pynvml.nvmlDeviceGetFieldValues(handle, [(f.id, link) for f, link in asked])
        heard: set[str] = set()
        failed: dict[str, Exception] = {}
        for (value_field, link), got in zip(asked, told, strict=True):
            if got.nvmlReturn != pynvml.NVML_SUCCESS:
                failed[value_field.field] = pynvml.NVMLError(got.nvmlReturn)
            elif (value := fields.value_of(got)) is not None:
                heard.add(value_field.field)
                labels = (("nvlink", str(link)), *value_field.labels)
                yield Row(value_field.metric, value, value_field.scale, labels)
        for name, err in failed.items():
            if name not in heard:  # one link that is down does not speak for the others
                self._note(name, err)

    def _profiling(self, handle: Handle) -> Iterable[Row]:
        if not self._gpm.supported(handle):
            self._unsupported["gpm"] = "not_supported"
            return ()
        if self._mig:  # told slice by slice
            return ()
        return self._gpm.read(handle, time.monotonic())

    def _counting(
        self, kind: str, way: Callable[[Handle], Any], handle: Handle
    ) -> Callable[[], Iterable[Row]]:
        def count() -> Iterable[Row]:
            running = way(handle)
            yield Row("processes", len(running), 1.0, (("type", kind),))
            if self._per_process:
                for process in running:
                    if process.usedGpuMemory is not None:
                        labels = _process_labels(process)
                        yield Row("process_memory_used_bytes", process.usedGpuMemory, 1.0, labels)

        return count

    def _instances(self, handle: Handle) -> Iterable[Row]:
        """The GPU instances: compute instances share their memory, and are not told apart."""
        seen: set[str] = {""}
        done: set[int] = set()
        for slot in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            try:
                mig = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)
            except pynvml.NVMLError as err:
                if reason_of(err) in GPU_WIDE:
                    raise
                continue  # an empty slot
            instance = int(pynvml.nvmlDeviceGetGpuInstanceId(mig))
            if instance in done:
                continue
            done.add(instance)
            labels = (("GPU_I_ID", str(instance)), ("GPU_I_PROFILE", _profile(mig)))
            memory = self._asking(fields.MEMORY, mig)()
            yield from labelled(tuple(memory), labels)
            if "gpm" not in self._unsupported:
                part = str(pynvml.nvmlDeviceGetUUID(mig))
                seen.add(part)
                rows = self._gpm.read(handle, time.monotonic(), part, instance)
                yield from labelled(rows, labels)
        self._gpm.keep_only(seen)

    # ---- values -------------------------------------------------------------------------

    def _samples(self) -> tuple[Sample, ...]:
        made: dict[tuple[str, Labels], Sample] = {}
        for row in self._rows:
            raw = float(row.raw)
            if not math.isfinite(raw) or raw in _BLANKS:
                continue
            value = raw * row.scale
            if row.metric.endswith("_ratio") and not 0.0 <= value <= _most(row.metric):
                self._failed[row.metric] = "impossible_value"
                continue
            made[row.metric, row.labels] = Sample(row.metric, value, row.labels)
        return tuple(made.values())


def _most(ratio: str) -> float:
    """The largest that can be: profiling overshoots 1 by a little, fans may do so by much."""
    if ratio.startswith("fan_"):
        return 2.0
    return 1.05 if ratio.endswith("_active_ratio") else 1.0


def _process_labels(process: Any) -> Labels:
    labels = (("pid", str(process.pid)), ("process", _comm(process.pid)))
    if process.gpuInstanceId in _BLANKS:
        return labels
    return (("GPU_I_ID", str(process.gpuInstanceId)), *labels)


def _link_states(handle: Handle) -> dict[int, bool]:
    told = pynvml.nvmlDeviceGetFieldValues(handle, [fields.LINK_COUNT])[0]
    known = told.nvmlReturn == pynvml.NVML_SUCCESS
    links = int(fields.value_of(told) or 0) if known else pynvml.NVML_NVLINK_MAX_LINKS
    states: dict[int, bool] = {}
    for link in range(min(links, pynvml.NVML_NVLINK_MAX_LINKS)):
        try:
            states[link] = bool(pynvml.nvmlDeviceGetNvLinkState(handle, link))
        except pynvml.NVMLError as err:
            if reason_of(err) not in UNSUPPORTED or (not known and not states):
                raise
            break
    return states


def _link_errors(
    handle: Handle, links: Iterable[int], counter: int
) -> tuple[dict[int, int], Exception | None]:
    """Counts by link, and why one of them did not tell."""
    found: dict[int, int] = {}
    why: Exception | None = None
    for link in links:
        try:
            found[link] = pynvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, counter)
        except pynvml.NVMLError as err:
            why = err
            if reason_of(err) in GPU_WIDE:
                raise
            if reason_of(err) == "function_not_found":
                break
    return found, why


def _fans(handle: Handle) -> Iterable[Row]:
    for fan in range(pynvml.nvmlDeviceGetNumFans(handle)):
        speed = pynvml.nvmlDeviceGetFanSpeed_v2(handle, fan)
        yield Row("fan_speed_ratio", speed, fields.PERCENT, (("fan", str(fan)),))


def _profile(mig: Handle) -> str:
    """The slice's size as NVML names it, 1g.10gb; made of its parts where no name has it."""
    name = str(pynvml.nvmlDeviceGetName(mig))
    if _MIG_NAME in name:
        return name.rpartition(_MIG_NAME)[2]
    size = pynvml.nvmlDeviceGetAttributes_v2(mig)
    return f"{size.gpuInstanceSliceCount}g.{math.ceil(size.memorySizeMB / 1024)}gb"


def _comm(pid: int) -> str:
    """The short name of a process of this host, empty where it may not be seen."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return ""
