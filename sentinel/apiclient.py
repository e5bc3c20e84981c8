"""The command line's way to a running daemon: HTTP, and nothing but HTTP."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import requests

from sentinel.config import Config
from sentinel.configkeys import TOKEN_ENV
from sentinel.errors import ConfigError, DependencyError, SentinelError

URL_ENV: Final = "SENTINEL_URL"
DEFAULT_URL: Final = "http://127.0.0.1:9477"
SCHEMA: Final = 1  # of the answers that this version reads
_TIMEOUT_S: Final = 15.0


class NotThere(SentinelError):
    """The daemon has no such thing, or it is over: a finding, exit code 1."""


class Client:
    """One daemon. Every method raises SentinelError with what to do about it."""

    def __init__(self, url: str, token: str | None) -> None:
        self.url = url.rstrip("/")
        self._token = token
        self._session = requests.Session()
        self._session.trust_env = False  # no proxy and no .netrc on the way to our own daemon

    def get(self, path: str, **query: object) -> Any:
        wanted = {k: str(v) for k, v in query.items() if v is not None}
        return self._ask("GET", path, params=wanted)

    def post(self, path: str, *, actor: str, reason: str, **more: str) -> Any:
        body = {"actor": actor, "reason": reason, **more}
        headers = {"authorization": f"Bearer {self._token}"} if self._token else {}
        return self._ask("POST", path, json=body, headers=headers)

    def _ask(self, method: str, path: str, **options: Any) -> Any:
        url = f"{self.url}/api/v1/{path}"
        try:
            answer = self._session.request(method, url, timeout=_TIMEOUT_S, **options)
        except requests.exceptions.InvalidURL as err:
            raise ConfigError(f"{self.url} is not a URL; write it as http://host:port") from err
        except requests.RequestException as err:
            raise DependencyError(
                f"no daemon answers at {self.url} ({_why(err)}): is `sentinel run` running "
                f"there? Otherwise give --url, --config or ${URL_ENV}"
            ) from err
        if answer.ok:
            return _json(answer)
        raise _refusal(answer, self._token is not None)


def connect(url: str | None, config: Path | None, token_file: Path | None) -> Client:
    """--url, then $SENTINEL_URL, then the configuration, then the default port here."""
    known = Config.load(config) if config is not None else None
    target = url or os.environ.get(URL_ENV) or (known.external_url() if known else DEFAULT_URL)
    if not target.startswith(("http://", "https://")):
        raise ConfigError(f"{target} is not a URL; write it as http://host:port")
    return Client(target, _token(known, token_file))


def segment(text: str) -> str:
    """A name as one part of a path."""
    return quote(text, safe="")


def _token(config: Config | None, token_file: Path | None) -> str | None:
    if token_file is None:
        given = os.environ.get(TOKEN_ENV, "").strip()
        return given or (config.token() if config else None)
    try:
        return token_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as err:
        why = err.strerror if isinstance(err, OSError) else "not text"
        raise ConfigError(f"--token-file {token_file}: cannot be read ({why})") from err


def _refusal(answer: requests.Response, had_token: bool) -> SentinelError:
    said = _detail(answer)
    if answer.status_code == 401 and not had_token:
        return ConfigError(
            f"this needs the daemon's token: give --token-file, --config or ${TOKEN_ENV}"
        )
    if answer.status_code in (401, 403):
        return ConfigError(f"the daemon refuses: {said}")
    if answer.status_code in (404, 409):
        if not _is_ours(answer):
            return DependencyError(
                f"{answer.url} is no page of a sentinel daemon (HTTP {answer.status_code}): check "
                "the URL"
            )
        return NotThere(said)
    return DependencyError(f"the daemon answers {answer.status_code}: {said}")


def _json(answer: requests.Response) -> Any:
    try:
        content = answer.json()
    except ValueError:
        content = None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise DependencyError(
            f"{answer.url} does not answer as a sentinel daemon of this version does (schema "
            f"{SCHEMA}): check the URL, and that both have the same version"
        )
    return content


def _is_ours(answer: requests.Response) -> bool:
    try:
        return "detail" in answer.json()
    except (ValueError, TypeError):
        return False


def _detail(answer: requests.Response) -> str:
    try:
        detail = answer.json()["detail"]
    except (ValueError, KeyError, TypeError):
        return answer.text[:200].strip() or answer.reason
    return detail if isinstance(detail, str) else str(detail)[:500]


def _why(err: requests.RequestException) -> str:
    if isinstance(err, requests.Timeout):
        return f"no answer within {_TIMEOUT_S:.0f} s"
    if isinstance(err, requests.ConnectionError):
        return "the connection was refused or broke"
    return type(err).__name__
