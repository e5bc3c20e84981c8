"""One connection to a query API: who we are, how it is secured, and one exchange at a time.

prometheus-api-client carries the URL, the headers and the authentication; its retries and its
decoding are not used. Redirects are not followed, since what stands behind them is seldom the
API and must not be given our credentials. No secret is ever part of an error.
"""

from __future__ import annotations

import ipaddress
import re
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

import requests
from prometheus_api_client import PrometheusConnect
from requests.auth import AuthBase
from urllib3.exceptions import HTTPError
from urllib3.util.retry import Retry

from sentinel.edges.deadline import Deadline, DeadlineAdapter
from sentinel.edges.refusals import IS_URL, Reply, TooMuch, TooWide, error, late, page, refusal
from sentinel.errors import ConfigError, DependencyError

_CHUNK: Final = 1 << 18
_REFUSAL_BYTES: Final = 1 << 16
_URL_MAX: Final = 7000  # common servers and proxies take a request line of 8 KiB
_NOT_BY_POST: Final = (403, 405)  # a proxy that lets only reading methods through

# user name and password, if any; all extra headers
Credentials = tuple[tuple[str, str] | None, Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Access:
    """How the API is reached. `secret_headers` names those whose values no error may repeat,
    beside Authorization. `renew` reads the credentials anew, when the server no longer takes
    the old ones. `max_bytes` bounds one answer."""

    url: str
    basic_auth: tuple[str, str] | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    secret_headers: frozenset[str] = frozenset()
    renew: Callable[[], Credentials] | None = field(default=None, repr=False)
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    server_name: str = ""
    gzip: bool = False
    max_bytes: int = 256 << 20


class Connection:
    """Connects at the first request. One thread at a time may use it.

    `is_victoria_metrics` is known after the first answer. It finds a selector that it has seen
    before in a memory of up to 10 s, in which series that are new since then are missing.
    """

    def __init__(self, access: Access) -> None:
        self.is_victoria_metrics = False
        self._access = access
        self._by_get = False
        session = requests.Session()
        session.verify = access.ca_file or True
        if access.cert_file:
            key = access.key_file
            session.cert = (access.cert_file, key) if key else access.cert_file
        session.headers["Accept-Encoding"] = "gzip" if access.gzip else "identity"
        self._client = PrometheusConnect(url=access.url, session=session, retry=Retry(total=0))
        self._session = session
        session.mount(access.url, DeadlineAdapter(server_name=access.server_name))
        self._use(access.basic_auth, access.headers)

    def query(self, form: Mapping[str, str], limit: Deadline) -> bytearray:
        """The body of a successful answer of `/api/v1/query`. Raises DependencyError."""
        path = "/api/v1/query"
        if not self._by_get:
            reply = self._exchange("POST", path, form, limit)
            if not isinstance(reply, Reply):
                return reply
            if reply.status not in _NOT_BY_POST:
                raise self._refused(reply, limit)
            self._by_get = reply.status == 405
        if len(self._access.url + path + urlencode(form)) > _URL_MAX:
            raise TooWide(
                f"Prometheus at {self._access.url}: takes queries only by GET, and this one is "
                "too long for that; shorten prometheus.selector and prometheus.split_by"
            )
        body = self.get(path, form, limit)
        self._by_get = True
        return body

    def get(self, path: str, form: Mapping[str, str], limit: Deadline) -> bytearray:
        """The body of a successful answer. Raises DependencyError."""
        reply = self._exchange("GET", path, form, limit)
        if isinstance(reply, Reply):
            raise self._refused(reply, limit)
        return reply

    def close(self) -> None:
        self._session.close()

    # ---- one exchange ---------------------------------------------------------------

    def _exchange(
        self, method: str, path: str, form: Mapping[str, str], limit: Deadline
    ) -> bytearray | Reply:
        reply = self._send(method, path, form, limit)
        if isinstance(reply, Reply) and reply.status in (401, 403) and self._renewed():
            reply = self._send(method, path, form, limit)
        return reply

    def _send(
        self, method: str, path: str, form: Mapping[str, str], limit: Deadline
    ) -> bytearray | Reply:
        client, session = self._client, self._session
        content: dict[str, Any] = {"params": form} if method == "GET" else {"data": form}
        url, left_s = self._access.url, max(limit.left_s, 0.001)
        try:
            with session.request(
                method,
                f"{client.url}{path}",
                headers=client.headers,
                auth=client.auth,
                verify=session.verify,  # else the environment's bundle goes before ca_file
                timeout=left_s,
                stream=True,
                allow_redirects=False,
                **content,
            ) as response:
                self.is_victoria_metrics |= _is_victoria_metrics(response.headers)
                ok = response.status_code == 200
                body = self._read(response) if ok else _beginning(response)
        except (requests.RequestException, HTTPError, OSError, ValueError) as err:
            if limit.expired or isinstance(err, requests.Timeout):
                raise late(url, limit.after_s) from None
            raise self._failed(err) from None  # its cause may repeat a header
        if limit.expired:  # cut off, though it may look like an end
            raise late(url, limit.after_s)
        if not ok:
            headers = {name.lower(): value for name, value in response.headers.items()}
            return Reply(response.status_code, bytes(body), headers)
        if body[:64].lstrip().startswith(b"<"):
            raise self._scrubbed(page(url, bytes(body)))
        return body

    def _read(self, response: requests.Response) -> bytearray:
        body, most = bytearray(), self._access.max_bytes
        for chunk in response.iter_content(_CHUNK):
            body += chunk
            if len(body) > most:
                raise TooMuch(
                    f"Prometheus at {self._access.url}: the answer is larger than {most} bytes; "
                    "narrow prometheus.selector, shorten prometheus.window_s, or raise "
                    "prometheus.max_bytes"
                )
        return body

    # ---- credentials ----------------------------------------------------------------

    def _use(self, basic_auth: tuple[str, str] | None, headers: Mapping[str, str]) -> None:
        client = self._client
        client.headers = dict(headers)
        if basic_auth is not None:
            client.auth = (basic_auth[0].encode(), basic_auth[1].encode())
        else:  # a line of ~/.netrc would replace our token
            own = any(name.lower() == "authorization" for name in headers)
            client.auth = _AsItIs() if own else None
        hidden = {name.lower() for name in self._access.secret_headers} | {"authorization"}
        values = [value for name, value in headers.items() if name.lower() in hidden]
        words = {word for value in values for word in (value.strip(), *value.split()[-1:])}
        if basic_auth:
            words |= {basic_auth[1], b64encode(":".join(basic_auth).encode()).decode()}
        self._secrets = sorted(words - {""}, key=len, reverse=True)

    def _renewed(self) -> bool:
        """Whether the credentials have changed since we read them."""
        access = self._access
        if access.renew is None:
            return False
        try:
            basic_auth, headers = access.renew()
        except ConfigError:  # as it was at the start, or else it would not have started
            return False
        if (basic_auth, dict(headers)) == (access.basic_auth, dict(access.headers)):
            return False
        self._access = replace(access, basic_auth=basic_auth, headers=headers)
        self._use(basic_auth, headers)
        return True

    # ---- what went wrong ------------------------------------------------------------

    def _refused(self, reply: Reply, limit: Deadline) -> DependencyError:
        return self._scrubbed(refusal(self._access.url, reply, limit.after_s))

    def _failed(self, err: BaseException) -> DependencyError:
        url = self._access.url
        if isinstance(err, requests.exceptions.SSLError):
            advice = "check prometheus.ca_file, prometheus.cert_file and url"
            return self._scrubbed(error(url, f"TLS failed ({_cause(err)})", advice))
        what = "the request failed"
        if isinstance(err, requests.exceptions.ConnectionError):
            what = "cannot be reached"
        return self._scrubbed(error(url, f"{what} ({_cause(err)})", IS_URL))

    def _scrubbed(self, err: DependencyError) -> DependencyError:
        """The same error without any secret that the server or a library repeats."""
        text = str(err)
        for secret in self._secrets:
            text = re.sub(re.escape(secret), "***", text, flags=re.IGNORECASE)
        return type(err)(text)


def wants_gzip(url: str, ca_file: str | None) -> bool:
    """Whether compression is worth its cost, which is half of an answer's time on a fast
    network: only towards a server outside, reached by TLS that the public vouches for."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme != "https" or ca_file or "." not in host:
        return False
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return not host.endswith((".local", ".internal", ".svc", ".localhost"))


class _AsItIs(AuthBase):
    """The Authorization header is among the headers already."""

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        return request


def _is_victoria_metrics(headers: Mapping[str, str]) -> bool:
    """By what it alone says; either may be switched off, or taken away by a proxy."""
    return "X-Server-Hostname" in headers or "stream+json" in headers.get("Content-Type", "")


def _beginning(response: requests.Response) -> bytearray:
    body = bytearray()
    for chunk in response.iter_content(_REFUSAL_BYTES):
        body += chunk
        if len(body) >= _REFUSAL_BYTES:
            break
    return body


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
