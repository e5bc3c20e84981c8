"""Telemetry out of Prometheus, or out of what answers its query API.

One instant query over a range selector reads the raw samples of every metric in the catalogue
with their own timestamps, so that age is known and Prometheus's lookback never passes an old
value off as new. prometheus-api-client carries the connection (URL, headers, authentication,
TLS); its retries and its decoding are not used. Nothing is retried here: the next tick is.

Every request ends by a total deadline and reads at most `max_bytes`. Whatever goes wrong is a
DependencyError whose text says what to do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import msgspec
import requests
from prometheus_api_client import PrometheusConnect
from urllib3.exceptions import HTTPError
from urllib3.util.retry import Retry

from sentinel.core.frame import Samples
from sentinel.data import load_catalog
from sentinel.edges.answers import Answers, Failure
from sentinel.edges.deadline import DeadlineAdapter, deadline
from sentinel.errors import DependencyError

_CHUNK: Final = 1 << 18
_HALVINGS: Final = 12  # of a slice of history, because its answer was too much
_TIMEOUTS: Final = 3  # halvings because it took too long: a hung server must not take hours


class TooMuch(DependencyError):
    """The answer is more than the server or `max_bytes` allows: ask for less at once."""


class TooSlow(DependencyError):
    """No complete answer by the deadline."""


class Prometheus:
    """A connection that is made at the first request. One thread at a time may use it.

    `selector` holds extra matchers for every series, with or without braces. `timeout_s` is
    the longest total time of a request, `max_bytes` the largest answer that is read.
    """

    def __init__(
        self,
        url: str,
        *,
        selector: str = "",
        basic_auth: tuple[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        ca_file: str | None = None,
        timeout_s: float = 10.0,
        max_bytes: int = 256 << 20,
        names: tuple[str, ...] | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._timeout_s, self._max_bytes = timeout_s, max_bytes
        session = requests.Session()
        session.verify = ca_file or True
        session.headers["Accept-Encoding"] = "identity"  # gzip costs the server most of a tick
        if basic_auth is None and any(h.lower() == "authorization" for h in headers or {}):
            session.trust_env = False  # else a line of ~/.netrc would replace our token
        self._client = PrometheusConnect(
            url=self.url,
            headers=dict(headers or {}),
            auth=basic_auth,
            session=session,
            timeout=timeout_s,
            retry=Retry(total=0),
        )
        self._session = session
        session.mount(self.url, DeadlineAdapter())
        matchers = selector.strip().removeprefix("{").removesuffix("}").strip().strip(",")
        asked = "|".join(names if names is not None else load_catalog().sources)
        self._series = f'{{__name__=~"{asked}"{"," + matchers if matchers else ""}}}'
        self._answers = Answers()
        self._method = "POST"

    def pull(self, at_s: float, *, window_s: float, deadline_s: float) -> Samples:
        """The raw samples of (at - window, at]. Raises DependencyError."""
        body = self._query(at_s, window_s, min(deadline_s, self._timeout_s))
        return self._decode(body, at_s)

    def history(self, start_s: float, end_s: float, *, slice_s: float) -> Iterator[Samples]:
        """The raw samples of (start, end] in slices that join without gap or overlap, in time
        order; a slice is shortened where its answer would be too much. Raises DependencyError.
        """
        span_s, slow = slice_s, 0
        least_s = slice_s / 2**_HALVINGS
        while start_s < end_s:
            until_s = min(start_s + span_s, end_s)
            # whole milliseconds, as Prometheus counts: else a sample falls between two slices
            until_s = max(math.floor(until_s * 1000) / 1000, start_s + 0.001)
            try:
                body = self._query(until_s, until_s - start_s, self._timeout_s)
            except (TooMuch, TooSlow) as err:
                slow += isinstance(err, TooSlow)
                span_s = (until_s - start_s) / 2
                if slow > _TIMEOUTS or span_s < max(least_s, 0.5):
                    raise
                continue
            samples = self._decode(body, until_s)
            new = (samples.times_s > start_s) & (samples.times_s <= until_s)
            yield replace(
                samples,
                series=samples.series[new],
                times_s=samples.times_s[new],
                values=samples.values[new],
            )
            start_s, slow = until_s, 0
            if end_s - start_s < 0.001:
                return

    def build_info(self) -> dict[str, str]:
        """What answers, by its own word: version and so on. Raises DependencyError."""
        body = self._ask("GET", "/api/v1/status/buildinfo", {}, self._timeout_s)
        try:
            return msgspec.json.decode(body, type=_BuildInfo).data
        except msgspec.MsgspecError as err:
            raise self._error(f"does not answer as Prometheus does ({err})", _IS_URL) from err

    # ---- requests -------------------------------------------------------------------

    def _query(self, at_s: float, window_s: float, timeout_s: float) -> bytearray:
        window_ms = max(1, math.ceil(round(window_s * 1000, 3)))
        window = f"{window_ms // 1000}s" if window_ms % 1000 == 0 else f"{window_ms}ms"
        form = {
            "query": f"{self._series}[{window}]",
            "time": f"{at_s:.3f}",
            "timeout": f"{max(1, math.ceil(timeout_s))}s",  # lets the server stop when we do
        }
        return self._ask(self._method, "/api/v1/query", form, timeout_s)

    def _ask(self, method: str, path: str, form: Mapping[str, str], timeout_s: float) -> bytearray:
        client, session = self._client, self._session
        content = {"params": form} if method == "GET" else {"data": form}
        with deadline(timeout_s) as limit:
            try:
                with session.request(
                    method,
                    f"{client.url}{path}",
                    headers=client.headers,
                    auth=client.auth,
                    verify=session.verify,
                    timeout=timeout_s,
                    stream=True,
                    **content,  # type: ignore[arg-type]
                ) as response:
                    body = self._read(response)
            except (requests.RequestException, HTTPError, OSError, ValueError) as err:
                if limit.expired or isinstance(err, requests.Timeout):
                    raise self._late(timeout_s) from err
                raise self._unreachable(err) from err
            if limit.expired:  # cut off, though it may look like an end
                raise self._late(timeout_s)
        if response.status_code == 200:
            return body
        if response.status_code in (403, 405) and method == "POST":
            self._method = "GET"  # a proxy that lets only reading methods through
            return self._ask("GET", path, form, timeout_s)
        raise self._refused(response.status_code, bytes(body))

    def _read(self, response: requests.Response) -> bytearray:
        body = bytearray()
        for chunk in response.iter_content(_CHUNK):
            body += chunk
            if len(body) > self._max_bytes:
                raise TooMuch(
                    f"Prometheus at {self.url}: the answer is larger than {self._max_bytes} bytes; "
                    "narrow prometheus.selector, shorten prometheus.window_s, or raise "
                    "prometheus.max_bytes"
                )
        return body

    def _decode(self, body: bytearray, at_s: float) -> Samples:
        try:
            return self._answers.decode(body, at_s)
        except DependencyError as err:
            raise self._error(str(err), _IS_URL) from err

    # ---- what went wrong ------------------------------------------------------------

    def _error(self, what: str, advice: str) -> DependencyError:
        return DependencyError(f"Prometheus at {self.url}: {what}; {advice}")

    def _late(self, timeout_s: float) -> TooSlow:
        return TooSlow(
            f"Prometheus at {self.url}: no complete answer within {timeout_s:.3g} s; see whether "
            "it is overloaded, narrow prometheus.selector, or raise prometheus.timeout_s"
        )

    def _unreachable(self, err: BaseException) -> DependencyError:
        if isinstance(err, requests.exceptions.SSLError):
            return self._error(f"TLS failed ({_cause(err)})", "check prometheus.ca_file and url")
        if isinstance(err, requests.exceptions.ConnectionError):
            return self._error(f"cannot be reached ({_cause(err)})", _IS_URL)
        return self._error(f"the request failed ({_cause(err)})", _IS_URL)

    def _refused(self, status: int, body: bytes) -> DependencyError:
        said = Failure.read(body).error or body[:200].decode(errors="replace").strip()
        if status in (401, 403):
            return self._error(
                f"refuses our credentials (HTTP {status})",
                "check prometheus.basic_auth, prometheus.token_file and prometheus.headers",
            )
        if status == 404:
            return self._error("has no query API there (HTTP 404)", _IS_URL)
        if status == 422 and ("too many" in said or "limit" in said or "exceed" in said):
            return TooMuch(
                f"Prometheus at {self.url}: {said}; narrow prometheus.selector, or raise the "
                "limits of the server's queries"
            )
        if status == 503 and ("timed out" in said or "timeout" in said):
            return self._late(self._timeout_s)
        if status in (400, 422):
            return self._error(f"refuses the query: {said}", "check prometheus.selector")
        return self._error(f"HTTP {status}: {said}", "see its log; the next tick asks again")


_IS_URL: Final = "is it running, and is prometheus.url its base URL?"


class _BuildInfo(msgspec.Struct):
    data: dict[str, str] = {}


def _cause(err: BaseException) -> str:
    """The innermost reason, in its own words."""
    seen: Any = err
    while True:
        inner = getattr(seen, "reason", None) or seen.__cause__ or seen.__context__
        if not isinstance(inner, BaseException) or inner is seen:
            break
        seen = inner
    text = getattr(seen, "strerror", None) or str(seen)
    return (text or type(seen).__name__).lower()
