"""This host: the state folder, the port, the files with secrets. Looked at, never touched."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import quote

from sentinel.config import Config
from sentinel.doctor.facts import Listen, Secret, State
from sentinel.edges import sqlite
from sentinel.edges.status import NoReply, Site
from sentinel.edges.tables import SCHEMA

_TIMEOUT_S: Final = 5.0
_ANYWHERE: Final = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "::": "[::1]"}  # noqa: S104
_ALIVE: Final = b"GPU Sentinel"


def state(config: Config) -> State:
    """The state folder and its store."""
    try:
        return _state(config.state_dir())
    except OSError as err:
        why = (err.strerror or str(err)).lower()
        return State(str(config.state_dir()), True, False, why)


def _state(folder: Path) -> State:
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    free: int | None = None
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(there).free
    if folder.exists() and not folder.is_dir():
        return State(str(folder), True, trouble="is a file, not a folder", free_bytes=free)
    writable = os.access(there, os.W_OK | os.X_OK) and not _read_only(there)
    trouble = "" if writable else f"{there} cannot be written by this user"
    schema, store_trouble = _schema(folder / sqlite.FILE)
    return State(
        str(folder),
        folder.exists(),
        writable,
        trouble,
        free,
        schema,
        SCHEMA,
        store_trouble,
        _holder(folder / "lock"),
    )


def _read_only(folder: Path) -> bool:
    """Root may write anywhere but there."""
    try:
        return bool(os.statvfs(folder).f_flag & os.ST_RDONLY)
    except OSError:
        return False


def _schema(path: Path) -> tuple[int | None, str]:
    """The version of the store's tables. Opened so that not even SQLite's own files change:
    what a running daemon has not yet folded in is left out, which the version never is."""
    if not path.exists():
        return None, ""
    if path.stat().st_size == 0:
        return None, "is empty, which this program never leaves"
    try:
        connection = sqlite3.connect(f"file:{quote(str(path))}?mode=ro&immutable=1", uri=True)
        try:
            row = connection.execute("SELECT version FROM sentinel_schema").fetchone()
        finally:
            connection.close()
    except sqlite3.Error as err:
        return None, str(err)
    return (int(row[0]), "") if row else (None, "belongs to another program")


def _holder(path: Path) -> int | None:
    """The process that holds the state folder's lock, as the kernel lists it."""
    try:
        found = path.stat()
        place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if len(words) >= 6 and words[1] == "FLOCK" and words[5] == place:
                return int(words[4])
    except (OSError, ValueError):
        pass
    return None


def listen(config: Config) -> Listen:
    """Whether the daemon's port is free, or who is there."""
    address = config.http.listen
    host, _, port = address.rpartition(":")
    at = Site(f"http://{_ANYWHERE.get(host, host)}:{port}")
    try:
        page = at.get("/-/healthy", timeout_s=_TIMEOUT_S)
    except NoReply as err:
        if "refused" in str(err):
            return _bindable(address, host, int(port))
        if "not assign" in str(err) or "resolve" in str(err) or "no route" in str(err):
            return Listen(address, "wrong", trouble=str(err))
        return Listen(address, "taken", trouble=str(err))
    if not page.body.startswith(_ALIVE):
        return Listen(address, "taken", trouble=f"it answers HTTP {page.status}")
    version, ready = "", None
    try:
        ready = at.get("/-/ready", timeout_s=_TIMEOUT_S).ok
        version = str(at.get("/api/v1/status", timeout_s=_TIMEOUT_S).json().get("version", ""))
    except (NoReply, AttributeError):
        pass
    return Listen(address, "ours", version, ready)


def _bindable(address: str, host: str, port: int) -> Listen:
    """Nobody listens. Another port of the same address tells whether that is this host's."""
    if 0 < port < 1024 and os.geteuid() != 0:
        return Listen(address, "wrong", trouble="ports below 1024 are root's")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as trial:
            trial.bind((host.strip("[]"), 0))
    except OSError as err:
        return Listen(address, "wrong", trouble=(err.strerror or str(err)).lower())
    return Listen(address, "free")


def secrets(config: Config) -> tuple[Secret, ...]:
    """The files that hold secrets, and who may read them."""
    return tuple(_secret(config, key, name) for key, name in _named(config) if name)


def _named(config: Config) -> Iterator[tuple[str, str]]:
    for section in ("prometheus", "alertmanager"):
        content = getattr(config, section)
        if content.basic_auth is not None:
            yield f"{section}.basic_auth.password_file", content.basic_auth.password_file
        yield f"{section}.token_file", content.token_file
        yield f"{section}.key_file", getattr(content, "key_file", "")
    for name, file in getattr(config.prometheus, "header_files", {}).items():
        yield f"prometheus.header_files[{name}]", file
    yield "hook.secret_file", config.hook.secret_file
    yield "http.token_file", config.http.token_file


def _secret(config: Config, key: str, name: str) -> Secret:
    path = config.file(name)
    try:
        return Secret(key, str(path), f"{path.stat().st_mode & 0o777:03o}")
    except OSError as err:
        return Secret(key, str(path), "", (err.strerror or str(err)).lower())
