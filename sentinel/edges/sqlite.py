"""Everything that is particular to SQLite: the file, its lock, how a transaction begins.

A store lives in one directory: `state.db` and `lock`. The file is created whole or not at
all, so an empty or foreign one is damage, never a fresh start.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import QueuePool

from sentinel.errors import StateError

FILE: Final = "state.db"
_BUSY_S: Final = 5.0


class Lock:
    """One process owns a state directory. The kernel frees it however that process ends."""

    def __init__(self, directory: Path) -> None:
        path = directory / "lock"
        try:
            self._file = path.open("a+")
        except OSError as err:
            raise StateError(
                f"state.dir {directory}: cannot write there ({err.strerror}): change its owner "
                "or the disk, or set another state.dir"
            ) from err
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            owner = self._file.read(32).strip() or "unknown"
            self._file.close()
            raise StateError(
                f"state.dir {directory} is in use by another daemon, pid {owner}: stop that one, "
                "or give this one a state.dir of its own"
            ) from None
        except OSError as err:
            self._file.close()
            raise StateError(
                f"state.dir {directory}: its filesystem cannot lock files ({err.strerror}): "
                "put it on a local disk"
            ) from err
        try:
            self._file.truncate(0)
            self._file.write(f"{os.getpid()}\n")
            self._file.flush()
        except OSError as err:
            self._file.close()
            raise StateError(f"state.dir {directory}: cannot write {path}: {err.strerror}") from err

    def release(self) -> None:
        self._file.close()


def prepare(directory: Path) -> Lock:
    """The directory exists, can be written, and is ours alone."""
    try:
        directory.mkdir(mode=0o750, parents=True, exist_ok=True)
    except OSError as err:
        raise StateError(
            f"state.dir {directory}: cannot create it: {err.strerror}; create it for the user who "
            "runs this, or name another folder"
        ) from err
    return Lock(directory)


def open_engine(
    directory: Path,
    create: Callable[[Connection], None],
    check: Callable[[Connection, str], None],
) -> Engine:
    """An engine on the directory's file, which `create` fills if there is none yet.

    Raises StateError when the file is damaged, and whatever `check` raises.
    """
    path = directory / FILE
    if not path.exists():
        leftover = path.with_name(FILE + "-wal")
        if leftover.exists():
            raise StateError(
                f"{path} is gone but {leftover.name} is there: restore {FILE} from a backup, or "
                f"move {leftover.name} away to start with an empty state"
            )
        _create(path, create)
    elif path.stat().st_size == 0:
        raise StateError(
            f"{path} is empty, which this program never leaves: restore it from a backup, or "
            "move it away to start with an empty state"
        )
    engine = _engine(path)
    try:
        with engine.connect() as connection:
            found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
            if found != "ok":
                raise StateError(
                    f"{path} is damaged ({found}): restore it from a backup, or move it away to "
                    "start with an empty state"
                )
            check(connection, str(path))
    except SQLAlchemyError as err:
        engine.dispose()
        raise failure(path, err) from err
    except BaseException:
        engine.dispose()
        raise
    return engine


def failure(where: Path | str, err: Exception) -> StateError:
    """A database error in words that say what to do."""
    text = str(getattr(err, "orig", None) or err)
    if "not a database" in text or "malformed" in text:
        return StateError(
            f"{where} is damaged or not a database ({text}): restore it from a backup, or move "
            "it away to start with an empty state"
        )
    if "full" in text:
        return StateError(f"{where}: no space left on its disk: free some; nothing was changed")
    if "locked" in text:
        return StateError(
            f"{where} is locked by another program, a backup or a database shell perhaps: end "
            "that; nothing was changed"
        )
    if "readonly" in text or "unable to open" in text or "I/O" in text:
        return StateError(
            f"{where} cannot be written ({text}): check its owner, and whether the disk is full "
            "or failing; nothing was changed"
        )
    return StateError(f"{where}: {text}; nothing was changed")


def _engine(path: Path) -> Engine:
    def connect() -> sqlite3.Connection:
        # mode=rw: a file that was deleted meanwhile is an error, not a new and empty state
        return sqlite3.connect(
            f"file:{quote(str(path))}?mode=rw",
            uri=True,
            timeout=_BUSY_S,
            isolation_level=None,  # we say BEGIN ourselves
            check_same_thread=False,
        )

    engine = create_engine("sqlite://", creator=connect, poolclass=QueuePool, pool_size=4)

    @event.listens_for(engine, "connect")
    def settings(connection: Any, record: object) -> None:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # a writer takes its lock first: no deadlock halfway, no half-read decision
        writes = connection.get_execution_options().get("writes")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _create(path: Path, create: Callable[[Connection], None]) -> None:
    """Under another name, then renamed: a crash leaves a whole file or none."""
    draft = path.with_name(FILE + ".new")
    try:
        for leftover in path.parent.glob(draft.name + "*"):
            leftover.unlink()
        draft.touch(mode=0o640)
        engine = _engine(draft)
        with engine.begin() as connection:
            create(connection)
        engine.dispose()  # the last connection to close folds the write-ahead log in
        os.rename(draft, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as err:
        raise StateError(f"{path}: cannot create it: {err.strerror}") from err
    except SQLAlchemyError as err:
        raise failure(path, err) from err
