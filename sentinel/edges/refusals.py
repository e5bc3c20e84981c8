"""What a refusal of a query API means: ask for less, ask later, or never so.

Every server has its own words and status codes for "this is too much" (Prometheus 422,
VictoriaMetrics 422, Cortex and Mimir 422, a gateway 413), so it is the text that decides. What
counts rows of an index (series, chunks, names) does not shrink with the time span; what counts
samples and bytes does, but for VictoriaMetrics, which counts those of whole blocks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import unescape
from typing import Final
from urllib.parse import urlsplit

from sentinel.edges.answers import Failure
from sentinel.errors import DependencyError

IS_URL: Final = "is it running, and is prometheus.url its base URL?"
_SAID_MAX: Final = 300

_WIDE: Final = re.compile(
    r"timeseries exceeds|(number of|too many|unique) (time ?)?series|series limit"
    r"|number of chunks|chunks (size )?limit|estimated chunks|too long query"
    r"|query size in bytes|samplesperquery",
    re.IGNORECASE,
)
_MUCH: Final = re.compile(
    r"too many samples|sample limit|(data size|bytes) limit|limit: \d+ bytes"
    r"|memory consumed by|not enough memory|message larger than max|max-fetched|max_fetched",
    re.IGNORECASE,
)
_SLOW: Final = re.compile(r"timed? ?out|timeout|deadline exceeded|canceled", re.IGNORECASE)
_SOME_LIMIT: Final = re.compile(r"too many|limit|exceed|too large", re.IGNORECASE)
_NAME: Final = re.compile(r"\w*_\w*")  # of our metrics, where an error repeats the query
_NARROWER: Final = (
    "narrow prometheus.selector, list parts of the fleet in prometheus.split_by, or raise the "
    "limits of the server's queries"
)
_CREDENTIALS: Final = (
    "check prometheus.basic_auth, prometheus.token_file, prometheus.headers and "
    "prometheus.cert_file"
)


class TooMuch(DependencyError):
    """The answer is more than the server or `max_bytes` allows: ask for less at once."""


class TooWide(TooMuch):
    """Too many series or names in one query, whatever its span: ask for fewer names."""


class TooSlow(DependencyError):
    """No complete answer by the deadline."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer that is no success. Header names are in lower case."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def said(self) -> str:
        """The server's own words on one line: its error, a page's title, or the text."""
        text = Failure.read(self.body).error
        if not text:
            page = self.body[:20_000].decode(errors="replace")
            title = re.search(r"<title[^>]*>(.*?)</title>", page, re.IGNORECASE | re.DOTALL)
            text = unescape(title[1] if title else re.sub(r"<[^>]*>", " ", page))
        return " ".join("".join(c if c.isprintable() else " " for c in text).split())

    @property
    def told(self) -> str:
        """The same, short: where errors are wrapped in errors, the last one is the reason."""
        said = self.said
        if len(said) <= _SAID_MAX:
            return said
        return f"{said[: _SAID_MAX // 3]} ... {said[-_SAID_MAX * 2 // 3 :]}"


def error(url: str, what: str, advice: str) -> DependencyError:
    return DependencyError(f"Prometheus at {url}: {what}; {advice}")


def late(url: str, within_s: float) -> TooSlow:
    return TooSlow(
        f"Prometheus at {url}: no complete answer within {within_s:.3g} s; see whether it is "
        "overloaded, narrow prometheus.selector, or raise prometheus.timeout_s"
    )


def refusal(url: str, reply: Reply, within_s: float) -> DependencyError:
    """The error that this reply stands for, with what to do about it."""
    status, said, told = reply.status, reply.said, reply.told
    if 300 <= status < 400:
        return _redirected(url, reply)
    if status in (401, 403):
        return _not_let_in(url, status, told)
    if status == 404:
        return error(url, "has no query API there (HTTP 404)", IS_URL)
    if "parse error" not in said:
        if _WIDE.search(said) or status == 414:
            return TooWide(f"Prometheus at {url}: {told or 'HTTP 414'}; {_NARROWER}")
        if _MUCH.search(said):
            return TooMuch(f"Prometheus at {url}: {told}; {_NARROWER}")
        prose = _NAME.sub(" ", said)
        if status in (408, 422, 500, 503, 504) and _SLOW.search(prose):
            return late(url, within_s)
        if status == 413 or (status == 422 and _SOME_LIMIT.search(prose)):
            return TooMuch(f"Prometheus at {url}: {told or 'HTTP 413'}; {_NARROWER}")
    if status in (400, 422):
        return error(url, f"refuses the query: {told}", "check prometheus.selector")
    return _unwell(url, reply)


def page(url: str, body: bytes) -> DependencyError:
    """A success whose body is a web page."""
    title = Reply(200, body).said[:80]
    return error(
        url,
        f"answers with a web page ({title!r}) and no data, as a login does",
        f"{IS_URL} Behind a login it takes a token or a client certificate",
    )


def _redirected(url: str, reply: Reply) -> DependencyError:
    to = urlsplit(reply.headers.get("location", ""))
    host = to.netloc.rpartition("@")[2]
    # neither query nor fragment: a login's address carries tokens there
    where = f"{to.scheme}://{host}{to.path}" if host else to.path or "nowhere"
    return error(
        url,
        f"redirects to {where} (HTTP {reply.status}), which is not followed",
        "set prometheus.url to where the API really is; a login takes a token instead",
    )


def _not_let_in(url: str, status: int, said: str) -> DependencyError:
    if "org id" in said.lower():
        advice = 'name the tenant in prometheus.headers: {"X-Scope-OrgID": "..."}'
        return error(url, f"asks for a tenant (HTTP {status}: {said})", advice)
    return error(url, f"refuses our credentials (HTTP {status})", _CREDENTIALS)


def _unwell(url: str, reply: Reply) -> DependencyError:
    what = f"HTTP {reply.status}: {reply.told or 'no reason given'}"
    if wait := reply.headers.get("retry-after", "").strip():
        unit = " s" if wait.isdigit() else ""
        what += f" (it asks to wait: {wait[:40]}{unit})"
    if reply.status == 429:
        return error(url, what, "lower prometheus.concurrency, or raise its limit of requests")
    return error(url, what, "see its log; the next tick asks again")
