"""Writes a history into Prometheus by remote write 1.0, fast enough to do it in a test.

The protobuf is simple enough to be laid out by hand: a series is its label bytes followed by
samples of one fixed width, which numpy builds for all series at once.

    WriteRequest  { repeated TimeSeries = 1 }
    TimeSeries    { repeated Label = 1; repeated Sample = 2 }
    Label         { string name = 1; string value = 2 }
    Sample        { double value = 1; int64 timestamp_ms = 2 }
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Final, Self
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
import requests

from sentinel.errors import DependencyError

# Prometheus refuses what is an hour older than its newest sample, and it meets the series of
# one request one after another: no request may span that long.
_SPAN_MAX_S: Final = 1500.0
_SAMPLES_PER_REQUEST: Final = 120_000
_HEADERS: Final = {
    "Content-Encoding": "snappy",
    "Content-Type": "application/x-protobuf",
    "X-Prometheus-Remote-Write-Version": "0.1.0",
}

Labels = Mapping[str, str]


class RemoteWriter:
    """Sends samples to one receiver. `url` is Prometheus itself, or a full write endpoint."""

    def __init__(self, url: str, *, timeout_s: float = 120.0) -> None:
        """Raises DependencyError where the snappy codec is not installed."""
        self.url = url if urlsplit(url).path.strip("/") else f"{url.rstrip('/')}/api/v1/write"
        self.samples_sent = 0
        self._timeout_s = timeout_s
        self._compress = _snappy()
        self._session = requests.Session()
        self._series: Sequence[Labels] | None = None
        self._encoded: list[bytes] = []

    def write(
        self,
        series_labels: Sequence[Labels],
        times_s: npt.NDArray[np.float64],
        values: npt.NDArray[np.float64],
    ) -> int:
        """Sends `values` float64 [n series, k times]; NaN is "no sample". Returns the number
        of samples sent.

        `times_s` float64 [k] is strictly increasing; successive calls go forward in time. The
        same `series_labels` object given again is not encoded again, so it must not change.

        Raises ValueError on shapes, times or labels that cannot be sent, DependencyError when
        the receiver refuses or does not answer.
        """
        times_ms = _milliseconds(times_s)
        if values.shape != (len(series_labels), len(times_ms)):
            raise ValueError(
                f"values are {values.shape}, for {len(series_labels)} series and "
                f"{len(times_ms)} times"
            )
        if series_labels is not self._series:
            self._encoded = [_encode_labels(labels) for labels in series_labels]
            self._series = series_labels
        before = self.samples_sent
        for rows, columns in _blocks(len(series_labels), times_ms):
            body, count = _encode(self._encoded[rows], times_ms[columns], values[rows, columns])
            if count:
                self._post(body)
                self.samples_sent += count
        return self.samples_sent - before

    def _post(self, body: bytes) -> None:
        packed = self._compress(body)
        try:
            answer = self._session.post(
                self.url, data=packed, headers=_HEADERS, timeout=self._timeout_s
            )
        except requests.RequestException as error:
            raise DependencyError(f"remote write to {self.url} failed: {error}") from error
        if answer.ok:
            return
        text = answer.text.strip()[:300]
        hint = ""
        if "out of order" in text or "out of bounds" in text:
            hint = (
                "; Prometheus already holds newer samples: write a history before scraping "
                "begins, in time order, or set storage.tsdb.out_of_order_time_window"
            )
        elif answer.status_code == 404:
            hint = "; is Prometheus running with --web.enable-remote-write-receiver?"
        raise DependencyError(
            f"remote write to {self.url} refused: HTTP {answer.status_code}: {text}{hint}"
        )

    def close(self) -> None:
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _snappy() -> Callable[[bytes], bytes]:
    try:
        import cramjam
    except ImportError as error:
        raise DependencyError(
            "writing a history needs the package cramjam: pip install 'gpu-sentinel[lab]'"
        ) from error
    return lambda body: bytes(cramjam.snappy.compress_raw(body))


def _milliseconds(times_s: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    times = np.asarray(times_s, dtype=np.float64)
    if times.ndim != 1 or not np.isfinite(times).all() or (times < 0).any():
        raise ValueError("times are finite seconds since the epoch, in one dimension")
    times_ms = np.rint(times * 1000).astype(np.int64)
    if (np.diff(times_ms) <= 0).any():
        raise ValueError("times must increase, by a millisecond at least")
    return times_ms


def _blocks(series: int, times_ms: npt.NDArray[np.int64]) -> Iterator[tuple[slice, slice]]:
    """(series, times) blocks in time order: all series of one span before the next span."""
    rows = max(1, min(series, _SAMPLES_PER_REQUEST))
    columns_max = max(1, _SAMPLES_PER_REQUEST // rows)
    start = 0
    while start < len(times_ms):
        span_end = np.searchsorted(times_ms, times_ms[start] + _SPAN_MAX_S * 1000, side="right")
        stop = min(start + columns_max, int(span_end))
        for first in range(0, series, rows):
            yield slice(first, first + rows), slice(start, stop)
        start = stop


def _encode(
    encoded: Sequence[bytes],
    times_ms: npt.NDArray[np.int64],
    values: npt.NDArray[np.float64],
) -> tuple[bytes, int]:
    """The WriteRequest and how many samples are in it."""
    present = ~np.isnan(values)
    count = int(present.sum())
    records = _sample_records(times_ms, values)
    width = records.shape[2]
    kept = records[present].tobytes()  # row-major: each series' samples lie together
    parts: list[bytes] = []
    start = 0
    for labels, samples in zip(encoded, present.sum(axis=1).tolist(), strict=True):
        if samples:
            end = start + samples * width
            parts.append(b"\x0a" + _varint(len(labels) + end - start))
            parts.append(labels)
            parts.append(kept[start:end])
            start = end
    return b"".join(parts), count


def _sample_records(
    times_ms: npt.NDArray[np.int64], values: npt.NDArray[np.float64]
) -> npt.NDArray[np.uint8]:
    """uint8 [n, k, width]: every sample as a length-delimited field 2 of its series."""
    n, k = values.shape
    stamps = _varints(times_ms)
    width = 2 + 9 + 1 + stamps.shape[1]
    records = np.empty((n, k, width), np.uint8)
    records[:, :, 0] = 0x12
    records[:, :, 1] = width - 2
    records[:, :, 2] = 0x09
    doubles = np.ascontiguousarray(values, dtype="<f8").view(np.uint8)
    records[:, :, 3:11] = doubles.reshape(n, k, 8)
    records[:, :, 11] = 0x10
    records[:, :, 12:] = stamps
    return records


def _varints(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """uint8 [k, width] of one width: a shorter number is padded, which every decoder takes."""
    width = len(_varint(int(numbers.max())))
    shifts = np.arange(width, dtype=np.int64) * 7
    groups = ((numbers[:, None] >> shifts) & 0x7F).astype(np.uint8)
    groups[:, :-1] |= 0x80
    return groups


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _encode_labels(labels: Labels) -> bytes:
    """Sorted by name, as Prometheus wants; empty values are the same as no label."""
    if not labels.get("__name__"):
        raise ValueError(f"a series without __name__: {dict(labels)}")
    out = bytearray()
    for name, value in sorted(labels.items()):
        if value:
            pair = _text(1, name) + _text(2, value)
            out += b"\x0a" + _varint(len(pair)) + pair
    return bytes(out)


def _text(number: int, text: str) -> bytes:
    raw = text.encode()
    return bytes([number << 3 | 2]) + _varint(len(raw)) + raw
