"""Telemetry out of Prometheus, or out of what answers its query API.

Instant queries over range selectors read the raw samples of every metric in the catalogue with
their own timestamps, so that age is known and Prometheus's lookback never passes an old value
off as new. One question becomes a few queries, asked a few at a time; where a server refuses
one for its size, it is split further, and the split is kept.

A question is answered whole or not at all: a group of metrics that is silently missing would
look like a fleet that lost them, while a question that fails makes the tick blind, which is
told to a person. What the server itself calls partial is marked so.

Every question ends by a total deadline and reads at most `max_bytes` a query. Whatever goes
wrong is a DependencyError whose text says what to do. Nothing is retried here: the next tick is.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Final

import msgspec

from sentinel.core.frame import Samples
from sentinel.data import load_catalog
from sentinel.edges.answers import Answers, merged
from sentinel.edges.connection import Access, Connection, Credentials
from sentinel.edges.deadline import Deadline, deadline, joined
from sentinel.edges.parts import Part, whole
from sentinel.edges.refusals import IS_URL, TooMuch, TooSlow, TooWide, error, late
from sentinel.errors import DependencyError

__all__ = ["Prometheus", "TooMuch", "TooSlow", "TooWide"]

_HALVINGS: Final = 12  # of a slice of history, because its answer was too much
_TIMEOUTS: Final = 3  # halvings because it took too long: a hung server must not take hours
_PARTS_EACH: Final = 4  # for each connection: a short part leaves none idle for long
_LEAST_S: Final = 0.5  # of history in one question
# VictoriaMetrics stores what it collects in batches, one CPU's after another's, within 4 s of
# the scrape: until then a scrape may be missing whose successor is there
_SETTLED_S: Final = 5.0

# an answer, or what went wrong
_Outcome = Samples | BaseException


class Prometheus:
    """Connections that are made at the first request. One thread at a time may use it.

    `selector` holds extra matchers for every series, with or without braces; `split_by` lists
    disjoint selectors that together are the fleet, each asked for on its own. `params` are
    sent with every query. `timeout_s` is the longest total time of a question, `max_bytes` the
    largest answer to one query, `concurrency` how many queries are under way at once.
    """

    def __init__(
        self,
        url: str,
        *,
        selector: str = "",
        split_by: Sequence[str] = (),
        basic_auth: tuple[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        secret_headers: Iterable[str] = (),
        renew: Callable[[], Credentials] | None = None,
        params: Mapping[str, str] | None = None,
        ca_file: str | None = None,
        cert_file: str | None = None,
        key_file: str | None = None,
        server_name: str = "",
        gzip: bool = False,
        timeout_s: float = 10.0,
        max_bytes: int = 256 << 20,
        concurrency: int = 1,
        names: tuple[str, ...] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.url, self._clock = url.rstrip("/"), clock
        self._timeout_s, self._concurrency = timeout_s, concurrency
        self._params = dict(params or {})
        self._access = Access(
            self.url,
            basic_auth=basic_auth,
            headers=dict(headers or {}),
            secret_headers=frozenset(secret_headers),
            renew=renew,
            ca_file=ca_file,
            cert_file=cert_file,
            key_file=key_file,
            server_name=server_name,
            gzip=gzip,
            max_bytes=max_bytes,
        )
        asked = names if names is not None else tuple(load_catalog().sources)
        least = concurrency * _PARTS_EACH if concurrency > 1 else 1
        self._parts = whole(asked, selector, split_by, least=least)
        self._is_victoria_metrics = False  # found out by the first answer
        self._answers = Answers()
        self._decoding = threading.Lock()
        self._idle: SimpleQueue[Connection] = SimpleQueue()

    def pull(self, at_s: float, *, window_s: float, deadline_s: float) -> Samples:
        """The raw samples of (at - window, at]. Raises DependencyError.

        Of a server that shows its newest samples out of order those of the last 5 s are left
        for the next time, and the window ends there.
        """
        began_s, most_s = time.monotonic(), min(deadline_s, self._timeout_s)
        while True:
            known = self._is_victoria_metrics
            until_s = min(at_s, self._clock() - _SETTLED_S) if known else at_s
            left_s = max(0.0, most_s - (time.monotonic() - began_s))
            samples = self._ask(until_s, window_s, left_s, TooMuch)
            if known == self._is_victoria_metrics:  # else it was not asked as it must be
                return replace(_within(samples, until_s - window_s, math.inf), at_s=at_s)

    def history(self, start_s: float, end_s: float, *, slice_s: float) -> Iterator[Samples]:
        """The raw samples of (start, end] in slices that join without gap or overlap, in time
        order; a slice is shortened where its answer would be too much. Raises DependencyError.
        """
        span_s, slow = slice_s, 0
        fewer_names_on: type[TooMuch] = TooWide  # less time is tried first where it can help
        while start_s < end_s:
            until_s = min(start_s + span_s, end_s)
            # whole milliseconds, as Prometheus counts: else a sample falls between two slices
            until_s = max(math.floor(until_s * 1000) / 1000, start_s + 0.001)
            known = self._is_victoria_metrics
            try:
                samples = self._ask(until_s, until_s - start_s, self._timeout_s, fewer_names_on)
            except (TooMuch, TooSlow) as err:
                slow += isinstance(err, TooSlow)
                span_s = (until_s - start_s) / 2
                if slow > _TIMEOUTS:
                    raise
                if span_s < max(slice_s / 2**_HALVINGS, _LEAST_S):
                    if fewer_names_on is TooMuch or not self._can_split():
                        raise
                    fewer_names_on, span_s = TooMuch, slice_s
                continue
            if known != self._is_victoria_metrics:
                continue
            yield _within(samples, start_s, until_s)
            start_s, slow = until_s, 0
            if end_s - start_s < 0.001:
                return

    def build_info(self) -> dict[str, str]:
        """What answers, by its own word: version and so on. Raises DependencyError."""
        connection = self._connection()
        with deadline(self._timeout_s) as limit:
            body = connection.get("/api/v1/status/buildinfo", {}, limit)
        self._idle.put(connection)
        try:
            return msgspec.json.decode(body, type=_BuildInfo).data
        except msgspec.MsgspecError as err:
            raise error(self.url, f"does not answer as Prometheus does ({err})", IS_URL) from err

    # ---- one question ---------------------------------------------------------------

    def _ask(
        self, at_s: float, window_s: float, timeout_s: float, split_on: type[TooMuch]
    ) -> Samples:
        """Every part, in one answer. A part that fails by `split_on` is split, for good."""
        todo: SimpleQueue[Part | None] = SimpleQueue()
        done: SimpleQueue[tuple[Part, _Outcome]] = SimpleQueue()
        for part in self._parts:
            todo.put(part)
        waiting, answers = len(self._parts), []
        with deadline(timeout_s) as limit:
            crew = [
                threading.Thread(
                    target=self._work, args=(at_s, window_s, limit, todo, done), daemon=True
                )
                for _ in range(min(self._concurrency, waiting))
            ]
            try:
                for worker in crew:
                    worker.start()
                while waiting:
                    part, outcome = self._next(done, limit)
                    halves = part.halves() if isinstance(outcome, split_on) else ()
                    if halves:
                        self._split(part, halves)
                        for half in halves:
                            todo.put(half)
                        waiting += len(halves) - 1
                    elif isinstance(outcome, BaseException):
                        raise outcome
                    else:
                        answers.append(outcome)
                        waiting -= 1
            except BaseException:
                limit.expire()  # what the others still read is no longer wanted
                raise
            finally:
                for _ in crew:
                    todo.put(None)
                grace_s = time.monotonic() + _LEAST_S
                for worker in crew:  # for its connection; one that hangs is left behind
                    worker.join(max(0.0, grace_s - time.monotonic()))
        return merged(answers)

    def _next(
        self, done: SimpleQueue[tuple[Part, _Outcome]], limit: Deadline
    ) -> tuple[Part, _Outcome]:
        """The next outcome, or the deadline, which a name resolution may not keep."""
        try:
            return done.get(timeout=limit.left_s + _LEAST_S)
        except Empty:
            raise late(self.url, limit.after_s) from None

    def _work(
        self,
        at_s: float,
        window_s: float,
        limit: Deadline,
        todo: SimpleQueue[Part | None],
        done: SimpleQueue[tuple[Part, _Outcome]],
    ) -> None:
        """Asks for parts until there are no more, on a connection of this thread's own."""
        connection = self._connection()
        with joined(limit):
            while (part := todo.get()) is not None:
                outcome: _Outcome
                try:
                    outcome = self._part(connection, part, at_s, window_s, limit)
                except BaseException as err:
                    outcome = err
                done.put((part, outcome))
        self._idle.put(connection)

    def _part(
        self, connection: Connection, part: Part, at_s: float, window_s: float, limit: Deadline
    ) -> Samples:
        if limit.expired:  # another part has failed, or time is over: not worth a connection
            raise late(self.url, limit.after_s)
        unlike_s = self._clock() if self._is_victoria_metrics else None
        form = {
            **self._params,
            "query": part.query(window_s, unlike_s=unlike_s),
            "time": f"{at_s:.3f}",
            "timeout": f"{max(1, math.ceil(limit.left_s))}s",  # lets the server stop when we do
        }
        body = connection.query(form, limit)
        self._is_victoria_metrics |= connection.is_victoria_metrics
        with self._decoding:  # one table of series; a body that waits is one for each connection
            if limit.expired:
                raise late(self.url, limit.after_s)
            try:
                return self._answers.decode(body, at_s)
            except DependencyError as err:
                raise error(self.url, str(err), IS_URL) from err

    def _connection(self) -> Connection:
        try:
            return self._idle.get_nowait()
        except Empty:
            return Connection(self._access)

    def _split(self, part: Part, halves: Sequence[Part]) -> None:
        place = self._parts.index(part)
        self._parts[place : place + 1] = halves

    def _can_split(self) -> bool:
        return any(part.halves() for part in self._parts)


class _BuildInfo(msgspec.Struct):
    data: dict[str, str] = {}


def _within(samples: Samples, after_s: float, until_s: float) -> Samples:
    """Those of (after, until]: up to its version 2 Prometheus gives the lower edge too."""
    new = (samples.times_s > after_s) & (samples.times_s <= until_s)
    if new.all():
        return samples
    return replace(
        samples,
        series=samples.series[new],
        times_s=samples.times_s[new],
        values=samples.values[new],
    )
