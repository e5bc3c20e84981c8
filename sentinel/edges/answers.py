"""Prometheus's query answers, decoded straight into flat arrays.

Label sets are interned by their bytes: a series that was seen before costs one dictionary
look-up, and its key is the same object in every answer. What is not a query answer raises
DependencyError with what was found instead.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any, Final

import msgspec
import numpy as np

from sentinel.core.frame import Samples, SeriesKey
from sentinel.errors import DependencyError

_FORGET_S: Final = 86_400.0
_SWEEP_EVERY_S: Final = 3600.0
_RAW: Final = ("matrix", "vector", "")
_SHORT: Final = re.compile("partial|truncat|incomplete|limit|unavailable", re.IGNORECASE)


class _Row(msgspec.Struct, gc=False):
    """One series of a matrix (`values`) or of a vector (`value`)."""

    metric: msgspec.Raw = msgspec.Raw(b"{}")
    values: list[tuple[float, float]] = []
    value: tuple[float, float] | None = None


class _TextRow(msgspec.Struct, gc=False):
    """The same with values as text: "+Inf" is a float to Prometheus, not to the decoder."""

    metric: msgspec.Raw = msgspec.Raw(b"{}")
    values: list[tuple[float, str]] = []
    value: tuple[float, str] | None = None


class _Data(msgspec.Struct):
    resultType: str = ""
    result: list[_Row] | None = None


class _TextData(msgspec.Struct):
    resultType: str = ""
    result: list[_TextRow] | None = None


class _Answer(msgspec.Struct):
    status: str
    data: _Data | None = None
    warnings: list[str] | None = None
    infos: list[str] | None = None
    isPartial: bool = False


class _TextAnswer(msgspec.Struct):
    status: str
    data: _TextData | None = None
    warnings: list[str] | None = None
    infos: list[str] | None = None
    isPartial: bool = False


class Failure(msgspec.Struct):
    """An answer that says what went wrong; both fields are empty where it does not."""

    errorType: str = ""
    error: str = ""

    @classmethod
    def read(cls, body: bytes) -> Failure:
        try:
            return msgspec.json.decode(body, type=cls)
        except msgspec.MsgspecError:
            return cls()


class Answers:
    """The decoder and its table of series, which forgets what was not seen for a day."""

    def __init__(self) -> None:
        self._keys: list[SeriesKey] = []
        self._rows: dict[bytes, int] = {}
        self._seen_s: list[float] = []
        self._swept_s = -np.inf
        self._labels: dict[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]] = {}
        self._decoder = msgspec.json.Decoder(_Answer, strict=False)
        self._text_decoder = msgspec.json.Decoder(_TextAnswer)

    def decode(self, body: bytes | bytearray, at_s: float) -> Samples:
        """The samples of an answer to the moment `at_s`; none at all is a valid answer.

        Raises DependencyError when it is no successful answer of a query.
        """
        with _no_collection():
            answer = self._parse(body)
            if answer.status != "success":
                failure = Failure.read(bytes(body))
                raise DependencyError(f"the query failed: {failure.error or answer.status}")
            kind = answer.data.resultType if answer.data else "nothing"
            if answer.data is None or kind not in _RAW:
                raise DependencyError(f"the answer holds {kind}, not raw samples")
            rows: list[Any] = answer.data.result or []
            self._sweep(at_s)
            found = [self._key(row.metric) for row in rows]
            for place in found:
                self._seen_s[place] = at_s
            points = [row.values or ([row.value] if row.value else []) for row in rows]
            counts = np.fromiter(map(len, points), dtype=np.int64, count=len(points))
            flat = chain.from_iterable(chain.from_iterable(points))
            numbers = np.fromiter(map(float, flat), np.float64, 2 * int(counts.sum()))
        warnings = tuple(answer.warnings or ())
        left_out = [w for w in warnings if not _is_of_the_query(w)]
        left_out += [i for i in answer.infos or () if _SHORT.search(i) and not _is_of_the_query(i)]
        warnings += tuple(w for w in left_out if w not in warnings)
        partial = answer.isPartial or bool(left_out)
        series = np.repeat(np.array(found, dtype=np.int64), counts)
        return Samples(at_s, self._keys, series, numbers[::2], numbers[1::2], partial, warnings)

    def _parse(self, body: bytes | bytearray) -> _Answer | _TextAnswer:
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError:
            pass
        except msgspec.DecodeError as err:
            raise DependencyError(f"the answer is not JSON ({err}): {_excerpt(body)}") from err
        try:
            return self._text_decoder.decode(body)
        except msgspec.ValidationError as err:
            raise DependencyError(
                f"the answer is not one of Prometheus's query API ({err}): {_excerpt(body)}"
            ) from err

    def _key(self, metric: msgspec.Raw) -> int:
        raw = bytes(metric)
        place = self._rows.get(raw)
        if place is None:
            try:
                labels = msgspec.json.decode(raw, type=dict[str, str])
            except msgspec.MsgspecError as err:
                raise DependencyError(f"the answer has a series without labels: {err}") from err
            name = labels.pop("__name__", "")
            pairs = tuple(sorted(labels.items()))
            # the metrics of one GPU share one label set
            key = SeriesKey(name, self._labels.setdefault(pairs, pairs))
            place = self._rows[raw] = len(self._keys)
            self._keys.append(key)
            self._seen_s.append(-np.inf)
        return place

    def _sweep(self, at_s: float) -> None:
        if at_s - self._swept_s < _SWEEP_EVERY_S:
            return
        self._swept_s = at_s
        seen = np.array(self._seen_s)
        if not len(seen) or (seen >= at_s - _FORGET_S).all():
            return
        kept = np.flatnonzero(seen >= at_s - _FORGET_S)
        number = {int(old): new for new, old in enumerate(kept)}
        # a new list: whoever numbered the old one must number this one anew
        self._keys = [self._keys[old] for old in number]
        self._seen_s = [self._seen_s[old] for old in number]
        self._rows = {raw: number[old] for raw, old in self._rows.items() if old in number}
        self._labels = {key.labels: key.labels for key in self._keys}


def merged(answers: Sequence[Samples]) -> Samples:
    """One answer made of several to the same moment, which one `Answers` has decoded."""
    return replace(
        answers[0],  # they share one table of series
        series=np.concatenate([a.series for a in answers]),
        times_s=np.concatenate([a.times_s for a in answers]),
        values=np.concatenate([a.values for a in answers]),
        partial=any(a.partial for a in answers),
        warnings=tuple(dict.fromkeys(w for a in answers for w in a.warnings)),
    )


def _is_of_the_query(annotation: str) -> bool:
    """What Prometheus remarks on a query's form is harmless. All other warnings are of data
    that was left out: a store that is away, a limit that cut the result."""
    return annotation.lstrip().lower().startswith(("promql info", "promql warning"))


def _excerpt(body: bytes | bytearray) -> str:
    words = bytes(body[:200]).decode(errors="replace").split()
    return " ".join(words)[:120] or "(empty)"


@contextmanager
def _no_collection() -> Iterator[None]:
    """Hundreds of thousands of short-lived tuples would start a full collection each time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
