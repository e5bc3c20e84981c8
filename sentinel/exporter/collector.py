"""Reads all GPUs of this host at once, under one deadline.

Each GPU has a thread of its own, and so has the library. A scrape asks all that are free,
waits until the deadline at most, and tells what has come. A GPU whose thread is still inside
an earlier call is not asked again and not waited for; it counts as unanswered until the call
returns. Nothing of an earlier scrape is told again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from sentinel.edges.logs import Once
from sentinel.edges.nvml import (
    LIBRARY_WIDE,
    GpuId,
    Handle,
    Library,
    advice,
    library_was_replaced,
    reason_of,
)
from sentinel.edges.nvml_gpu import GpuReader, Reading, Sample
from sentinel.exporter.workers import Gathering, Worker
from sentinel.exporter.xids import XidLog, Xids, XidWatch

TIMEOUT: Final = "timeout"
GONE: Final = "gone"
RESET: Final = "reset_required"  # a GPU that still tells why
_LIBRARY: Final = "library"
_QUIET_WITHIN_S: Final = 2.0
_HANGS_S: Final = 10.0  # an opening that takes longer is not waited for any more
_REOPEN_S: Final = (60.0, 3600.0)  # for GPUs that are lost: first pause, longest pause
# a GPU that does not answer still shows its Xids for so long, and is then silent
_XID_NEWS_S: Final = 120.0
_GPUS_MAX: Final = 256
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GpuState:
    """One GPU in one scrape. `reason` is empty while it is up; `id` is None when a GPU has
    never said who it is; `at` is the field whose call is waiting."""

    index: int
    id: GpuId | None
    reason: str
    samples: tuple[Sample, ...] = ()
    unsupported: Mapping[str, str] = field(default_factory=dict)
    errors: Mapping[str, int] = field(default_factory=dict)
    read_s: float | None = None
    unanswered_s: float | None = None
    at: str = ""
    xids: Xids | None = None


@dataclass(frozen=True, slots=True)
class Scrape:
    """`reason` is why NVML as a whole could not be used, empty if it could. `count` is how
    many GPUs it lists."""

    reason: str
    count: int | None
    versions: Mapping[str, str]
    gpus: tuple[GpuState, ...]
    took_s: float


@dataclass(frozen=True, slots=True)
class _Survey:
    reason: str
    count: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)
    reopened: bool = False


class _Seat:
    """A place in NVML's list: its thread, its reader, and which GPU it last held."""

    def __init__(self, index: int, *, per_process: bool) -> None:
        self.reader = GpuReader(index, per_process=per_process)
        self.worker: Worker[Reading] = Worker(f"gpu-{index}")
        self.id: GpuId | None = None


class Collector:
    """`collect` may be called by several threads at once: they share one collection.

    `deadline_s`: the longest that a collection lasts. `watch_xids`: wait for Xids in the
    background. `stale_library` is set once the library in this process was replaced on disk
    and no longer fits the driver: only a new process helps.
    """

    def __init__(
        self, deadline_s: float, *, per_process: bool = False, watch_xids: bool = True
    ) -> None:
        self.stale_library = threading.Event()
        self._deadline_s = deadline_s
        self._per_process, self._watch_xids = per_process, watch_xids
        self._lock = threading.RLock()
        self._library = Library()
        self._librarian: Worker[_Survey] = Worker("nvml")
        self._surveyed = _Survey("starting")
        self._open = self._opening = False
        self._session = 0
        self._seats: dict[int, _Seat] = {}
        self._known: dict[str, GpuId] = {}
        self._ledger = _Ledger()
        self._xids = XidLog()
        self._watches: dict[str, XidWatch] = {}  # by GPU: places change hands
        self._current: Gathering | None = None
        self._counted: Gathering | None = None
        self._reopen_pause_s, self._reopen_at_s = _REOPEN_S[0], 0.0

    # ---- one scrape ---------------------------------------------------------------------

    def prepare(self, within_s: float) -> None:
        """Begins to open NVML and to read, and waits for neither."""
        with self._lock:
            self._current = Gathering(time.monotonic() + within_s)
            self._ask_library(self._current)

    def opened(self, within_s: float) -> str:
        """After `prepare`: waits for NVML. Returns why it cannot be used, empty if it can."""
        assert self._current is not None
        found = self._current.wait_for(_LIBRARY, time.monotonic() + within_s)
        return TIMEOUT if found is None else str(found.reason)

    def collect(self, deadline_s: float | None = None) -> Scrape:
        """One scrape. It takes no longer than its deadline, whatever NVML does."""
        start_s = time.monotonic()
        until_s = start_s + min(self._deadline_s, deadline_s or self._deadline_s)
        with self._lock:
            gathering = self._current
            if gathering is None or gathering.is_over() or gathering.is_complete():
                gathering = self._current = self._begin(start_s + self._deadline_s)
        results = gathering.wait(until_s)
        with self._lock:
            first = self._counted is not gathering
            self._counted = gathering
            reason = self._reason(results)
            gpus = self._states(results, reason)
            if not reason:  # else it is not the GPUs that are to blame
                self._ledger.note(gpus, results, count=first)
            scrape = Scrape(
                reason,
                self._surveyed.count if _LIBRARY in results else None,
                self._surveyed.versions,
                tuple(replace(g, errors=self._ledger.errors(g)) for g in gpus),
                time.monotonic() - start_s,
            )
            self._plan_reopening(scrape)
        return scrape

    def is_stuck(self) -> bool:
        """Whether a thread is inside a call of NVML now."""
        return self._librarian.busy_s() is not None or any(
            seat.worker.busy_s() is not None for seat in self._seats.values()
        )

    def _begin(self, until_s: float) -> Gathering:
        gathering = Gathering(until_s)
        self._ask_library(gathering)
        if self._open:
            self._ask_gpus(gathering)
        return gathering

    def _ask_library(self, gathering: Gathering) -> None:
        gathering.expect(_LIBRARY)
        self._opening = self._opening or not self._open
        if not self._librarian.start(self._survey, self._note_survey) and not self._is_opening():
            gathering.drop(_LIBRARY)

    def _is_opening(self) -> bool:
        return self._opening and (self._librarian.busy_s() or 0.0) < _HANGS_S

    def _ask_gpus(self, gathering: Gathering, *, again: bool = False) -> None:
        for index in range(self._surveyed.count):
            if again or not gathering.was_asked(index):
                self._ask_gpu(index, gathering)

    def _ask_gpu(self, index: int, gathering: Gathering) -> None:
        seat = self._seats.get(index)
        if seat is None:
            seat = _Seat(index, per_process=self._per_process)
            self._seats[index] = seat
        gathering.expect(index)
        asked = seat.worker.start(
            lambda: seat.reader.read(gathering.is_over),
            lambda reading: self._note_reading(seat, reading, gathering),
        )
        if not asked:
            gathering.drop(index)

    def _note_reading(self, seat: _Seat, reading: Reading, gathering: Gathering) -> None:
        with self._lock:
            if reading.id is not None:
                seat.id = reading.id
                self._known[reading.id.key] = reading.id
                if self._watch_xids and self._open and not reading.reason:
                    self._watch(reading.id.key, reading.handle)
            gathering.deliver(seat.reader.index, reading)

    def _watch(self, key: str, handle: Handle) -> None:
        watch = self._watches.get(key)
        if watch is None:
            watch = self._watches[key] = XidWatch(key, self._xids)
        watch.follow(handle, self._session)

    # ---- what came of it ----------------------------------------------------------------

    def _reason(self, results: Mapping[Hashable, Any]) -> str:
        if _LIBRARY in results:
            return str(results[_LIBRARY].reason)
        if self._is_opening():
            return "reopening" if self._session else "starting"
        return TIMEOUT

    def _states(self, results: Mapping[Hashable, Any], library_reason: str) -> list[GpuState]:
        """Every GPU that is listed, then those that once were: of a GPU one state."""
        states: list[GpuState] = []
        told = {r.id.key for i, r in results.items() if i != _LIBRARY and r.id is not None}
        covered: set[str] = set()
        for index in range(self._surveyed.count):
            seat, reading = self._seats.get(index), results.get(index)
            if reading is not None and reading.id is not None:
                if reading.id.key in covered:  # the list moved while it was read
                    continue
                state = self._answered(index, reading.id, reading)
            else:
                last = seat.id if seat and seat.id and seat.id.key not in told else None
                if last is not None and last.key in covered:
                    last = None
                state = self._silent(index, last, seat, reading, library_reason)
            if state.id is not None:
                covered.add(state.id.key)
            states.append(state)
        for key, gpu in self._known.items():
            if key not in covered:
                states.append(self._silent(gpu.index, gpu, None, None, library_reason or GONE))
        return states

    def _answered(self, index: int, gpu: GpuId, reading: Reading) -> GpuState:
        tells = reading.reason in ("", RESET)
        return GpuState(
            index,
            gpu,
            reading.reason,
            reading.samples if tells else (),
            reading.unsupported,
            read_s=reading.took_s,
            xids=self._xids_of(gpu, tells=tells),
        )

    def _silent(
        self,
        index: int,
        gpu: GpuId | None,
        seat: _Seat | None,
        reading: Reading | None,
        reason: str,
    ) -> GpuState:
        return GpuState(
            index,
            gpu,
            reading.reason if reading else reason or TIMEOUT,
            at=seat.reader.now_at if seat and not reading else "",
            unanswered_s=seat.worker.busy_s() if seat and not reading else None,
            xids=self._xids_of(gpu, tells=False),
        )

    def _xids_of(self, gpu: GpuId | None, *, tells: bool) -> Xids | None:
        """While a GPU does not answer, only what is news: a GPU whose every series ends is
        seen to be gone."""
        xids = self._xids.of(gpu.key) if gpu else None
        if xids is None or tells or time.time() - xids.last_s < _XID_NEWS_S:
            return xids
        return None

    # ---- the library --------------------------------------------------------------------

    def _survey(self) -> _Survey:
        """In the library's thread: opens it where need be, and counts the GPUs."""
        reopened, reason = False, ""
        while not reopened:
            try:
                if not self._open:
                    reopened = True
                    self._reopen()
                count = min(self._library.count(), _GPUS_MAX)
                versions = self._library.versions() if reopened else self._surveyed.versions
                return _Survey("", count, versions, reopened)
            except Exception as err:
                self._open, reason = False, reason_of(err)
        if reason == "version_mismatch" and library_was_replaced():
            self.stale_library.set()
        return _Survey(reason, self._surveyed.count)

    def _reopen(self) -> None:
        """Ends the old session first, but only while nobody is inside a call."""
        with self._lock:  # from here on nothing new is asked
            self._open = False
            seats, watches = list(self._seats.values()), list(self._watches.values())
            for watch in watches:
                watch.pause()
        until_s, quiet = time.monotonic() + _QUIET_WITHIN_S, False
        while not quiet and time.monotonic() < until_s:
            time.sleep(0.01)
            busy = any(seat.worker.busy_s() is not None for seat in seats)
            quiet = not busy and not any(watch.is_inside() for watch in watches)
        for seat in seats:
            if seat.worker.busy_s() is None:
                seat.reader.library_closes(quiet=quiet)
        self._library.open(quiet=quiet)
        self._session += 1

    def _note_survey(self, found: _Survey) -> None:
        with self._lock:
            self._surveyed, self._opening = found, False
            self._open = not found.reason
            self._ledger.note_library(found.reason, found.count)
            gathering = self._current
            if gathering is None:
                return
            if self._open and not gathering.is_over():
                if found.reopened:  # the GPUs are read from here on
                    gathering.shorten(time.monotonic() + self._deadline_s)
                self._ask_gpus(gathering, again=found.reopened)
            gathering.deliver(_LIBRARY, found)

    def _plan_reopening(self, scrape: Scrape) -> None:
        """A lost GPU that is back is only seen by a library that was opened since. So it is
        opened anew now and then, ever more rarely, and never while a call hangs."""
        down = [gpu.reason for gpu in scrape.gpus if gpu.reason not in ("", TIMEOUT)]
        if scrape.reason or not down:
            self._reopen_pause_s, self._reopen_at_s = _REOPEN_S[0], 0.0
            return
        if len(down) == len(scrape.gpus) and LIBRARY_WIDE.issuperset(down):
            self._open = False  # the next scrape opens it
            return
        now_s = time.monotonic()
        if not self._reopen_at_s:
            self._reopen_at_s = now_s + self._reopen_pause_s
        if now_s < self._reopen_at_s or self.is_stuck():
            return
        self._reopen_pause_s = min(2 * self._reopen_pause_s, _REOPEN_S[1])
        self._reopen_at_s = now_s + self._reopen_pause_s
        self._open, self._opening = False, True
        self._librarian.start(self._survey, self._note_survey)


class _Ledger:
    """Counts failures, and tells the log when something stops or starts to answer."""

    def __init__(self) -> None:
        self._errors: dict[str, Counter[str]] = {}
        self._lacks: dict[str, frozenset[str]] = {}
        self._told = Once(_log)

    def errors(self, gpu: GpuState) -> dict[str, int]:
        return dict(self._errors.get(_key(gpu), ()))

    def note_library(self, reason: str, count: int) -> None:
        if reason:
            self._told.error(_LIBRARY, f"{reason}: {advice(reason)}")
        else:
            self._told.clear(_LIBRARY, f"NVML answers: {count} GPUs")

    def note(
        self, gpus: Iterable[GpuState], results: Mapping[Hashable, Any], *, count: bool
    ) -> None:
        """`count`: these results have not been counted yet."""
        for gpu in gpus:
            key = _key(gpu)
            self._tell(key, gpu)
            if count:
                counter = self._errors.setdefault(key, Counter())
                reading = results.get(gpu.index)
                counter.update(reading.failed.values() if reading else ())
                counter.update([gpu.reason] if gpu.reason else ())

    def _tell(self, key: str, gpu: GpuState) -> None:
        name = f"GPU {gpu.index} ({gpu.id.uuid if gpu.id else 'unknown'})"
        if gpu.reason:
            at = f" in {gpu.at}" if gpu.at else ""
            self._told.error(key, f"{name} does not answer: {gpu.reason}{at}")
        else:
            self._told.clear(key, f"{name} answers again")
            self._note_lacks(key, name, gpu.unsupported)

    def _note_lacks(self, key: str, name: str, unsupported: Mapping[str, str]) -> None:
        lacks = frozenset(unsupported)
        if lacks and lacks != self._lacks.get(key):
            why = ", ".join(f"{f} ({r})" for f, r in sorted(unsupported.items()))
            _log.info("%s has no %s", name, why)
        self._lacks[key] = lacks


def _key(gpu: GpuState) -> str:
    return gpu.id.key if gpu.id else f"#{gpu.index}"
