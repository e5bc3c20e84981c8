"""Status pages of other servers: one GET each, read whole or not at all, by a deadline.

Unlike the way to telemetry, nothing here is an answer that the daemon lives on: a page that is
not there is told as that, with its status, and the caller decides what that means. Each request
is a connection of its own, so any thread may ask. No secret is ever part of a text.
"""

from __future__ import annotations

import base64
import contextlib
import email.utils
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
import requests
from requests.auth import AuthBase
from urllib3.exceptions import HTTPError

from sentinel.edges.deadline import DeadlineAdapter, deadline

_CHUNK: Final = 1 << 16


class NoReply(Exception):
    """No whole answer: the text says why, in a few words."""


@dataclass(frozen=True, slots=True)
class Page:
    """An answer, whatever its status. Header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def date_s(self) -> float | None:
        """The server's clock, by its Date header, in whole seconds."""
        try:
            return email.utils.parsedate_to_datetime(self.headers.get("date", "")).timestamp()
        except (TypeError, ValueError):
            return None

    def json(self) -> Any:
        """Raises NoReply where the body is something else."""
        try:
            return msgspec.json.decode(self.body)
        except msgspec.DecodeError:
            words = " ".join(self.body[:200].decode(errors="replace").split())[:60]
            raise NoReply(f"not JSON: {words or '(empty)'}") from None

    def data(self) -> Any:
        """The `data` of an answer of Prometheus's API. Raises NoReply where there is none."""
        if not self.ok:
            raise NoReply(f"HTTP {self.status}")
        plain = self.json()
        if not isinstance(plain, dict) or plain.get("status") != "success":
            raise NoReply("not an answer of Prometheus's API")
        return plain.get("data")


@dataclass(frozen=True, slots=True)
class Site:
    """A server and what it takes to speak to it. `secret_headers` names those whose values are
    never repeated, beside Authorization. `proxies`: as the environment names them."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    secret_headers: frozenset[str] = frozenset()
    basic_auth: tuple[str, str] | None = field(default=None, repr=False)
    ca_file: str | None = None
    cert: tuple[str, str] | str | None = None
    server_name: str = ""
    proxies: bool = False

    def get(
        self,
        path: str,
        params: Mapping[str, str] | None = None,
        *,
        timeout_s: float,
        max_bytes: int = 16 << 20,
        root: bool = False,
    ) -> Page:
        """GET of `path` below the URL; at the server's root with `root`. Raises NoReply."""
        base = self.url.rstrip("/")
        if root:
            parts = urlsplit(base)
            base = f"{parts.scheme}://{parts.netloc}"
        with self._session() as session, deadline(timeout_s) as limit:
            try:
                with session.get(
                    f"{base}{path}",
                    params=dict(params or {}),
                    timeout=timeout_s,
                    stream=True,
                    allow_redirects=False,
                    verify=session.verify,  # else the environment's bundle goes before ca_file
                ) as answer:
                    body = _read(answer, max_bytes)
            except (requests.RequestException, HTTPError, OSError, ValueError) as err:
                late = limit.expired or isinstance(err, requests.Timeout)
                why = _late(timeout_s) if late else self._scrubbed(_words(err).encode()).decode()
                raise NoReply(why) from None
            if limit.expired:  # cut off, though it may look like an end
                raise NoReply(_late(timeout_s))
        headers = {name.lower(): value for name, value in answer.headers.items()}
        return Page(answer.status_code, headers, self._scrubbed(body))

    def certificate_ends_s(self, *, timeout_s: float) -> float | None:
        """When the server's certificate ends; None without TLS. Raises NoReply."""
        parts = urlsplit(self.url)
        if parts.scheme != "https" or not parts.hostname:
            return None
        address = (parts.hostname, parts.port or 443)
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            with (
                socket.create_connection(address, timeout_s) as plain,
                context.wrap_socket(
                    plain, server_hostname=self.server_name or parts.hostname
                ) as secured,
            ):
                ends = (secured.getpeercert() or {}).get("notAfter")
        except (OSError, ValueError) as err:
            raise NoReply(_words(err)) from None
        return ssl.cert_time_to_seconds(ends) if isinstance(ends, str) else None

    def _scrubbed(self, text: bytes) -> bytes:
        """The same without our secrets, which an error page may well repeat."""
        hidden = {name.lower() for name in self.secret_headers} | {"authorization"}
        told = [value for name, value in self.headers.items() if name.lower() in hidden]
        secrets = {word for value in told for word in (value.strip(), *value.split()[-1:])}
        if self.basic_auth is not None:
            pair = ":".join(self.basic_auth).encode()
            secrets |= {self.basic_auth[1], base64.b64encode(pair).decode()}
        for secret in sorted(secrets - {""}, key=len, reverse=True):
            text = text.replace(secret.encode(), b"***")
        return text

    @contextlib.contextmanager
    def _session(self) -> Any:
        with requests.Session() as session:
            session.trust_env = self.proxies
            session.verify = self.ca_file or True
            session.cert = self.cert
            session.headers.update({"user-agent": "gpu-sentinel", **self.headers})
            own = any(name.lower() == "authorization" for name in self.headers)
            if self.basic_auth is not None:
                user, password = self.basic_auth
                session.auth = (user.encode(), password.encode())  # type: ignore[assignment]
            elif own:  # a line of ~/.netrc would replace our token
                session.auth = _AsItIs()
            session.mount(self.url, DeadlineAdapter(server_name=self.server_name))
            root = urlsplit(self.url)
            session.mount(
                f"{root.scheme}://{root.netloc}", DeadlineAdapter(server_name=self.server_name)
            )
            yield session


class _AsItIs(AuthBase):
    """The Authorization header is among the headers already."""

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        return request


def _read(answer: requests.Response, max_bytes: int) -> bytes:
    body = bytearray()
    for chunk in answer.iter_content(_CHUNK):
        body += chunk
        if len(body) > max_bytes:
            raise NoReply(f"the answer is larger than {max_bytes >> 20} MiB")
    return bytes(body)


def _late(timeout_s: float) -> str:
    return f"no whole answer within {timeout_s:.3g} s"


def _words(err: BaseException) -> str:
    """The innermost reason, without whatever the outer ones repeat of the request."""
    seen: Any = err
    while True:
        inner = getattr(seen, "reason", None)
        if not isinstance(inner, BaseException):
            inner = seen.__cause__ or seen.__context__
        if inner is None or inner is seen:
            break
        seen = inner
    if isinstance(seen, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {seen.verify_message}"
    if isinstance(seen, socket.gaierror):
        return f"its name does not resolve: {seen.strerror}"
    if isinstance(seen, TimeoutError):
        return "it does not answer"
    return str(getattr(seen, "strerror", None) or seen or type(seen).__name__).lower()
