"""What passes between the daemon and the child that learns fault patterns: two JSON files.

The daemon writes down what it knows (`give`), the child reads it (`given`) and answers
(`answer`); the daemon reads the answer (`answered`) and keeps it in its own store. Both files
carry a schema number and are written whole or not at all.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

from sentinel.core.domain import FaultPattern, Incident, from_plain, to_plain
from sentinel.errors import StateError

SCHEMA: Final = 1
_ASKED: Final = "incidents.json"
_ANSWER: Final = "patterns.json"

T = TypeVar("T")


def give(folder: Path, incidents: Iterable[Incident], kept: Mapping[str, FaultPattern]) -> None:
    """Writes what patterns are learnt from. Raises StateError when that cannot be written."""
    slim = [replace(i, evidence=()) if i.signature else i for i in incidents]
    rows = {"incidents": [to_plain(i) for i in slim], "patterns": to_plain(kept)}
    _write(folder / _ASKED, rows)


def given(folder: Path) -> tuple[list[Incident], dict[str, FaultPattern]]:
    """What a daemon has given; nothing where none has. Raises StateError when it is damaged."""

    def read(plain: Mapping[str, Any]) -> tuple[list[Incident], dict[str, FaultPattern]]:
        kept = {id: from_plain(FaultPattern, p) for id, p in plain["patterns"].items()}
        return [from_plain(Incident, i) for i in plain["incidents"]], kept

    return _read(folder / _ASKED, read) or ([], {})


def answer(folder: Path, learnt: Sequence[FaultPattern]) -> None:
    """Writes what was learnt. Raises StateError when that cannot be written."""
    _write(folder / _ANSWER, {"patterns": [to_plain(p) for p in learnt]})


def answered(folder: Path) -> tuple[FaultPattern, ...] | None:
    """What was learnt since this was last asked, and takes it away; None for nothing. Raises
    StateError when it is damaged; it is then gone too, so that it is told once."""

    def read(plain: Mapping[str, Any]) -> tuple[FaultPattern, ...]:
        return tuple(from_plain(FaultPattern, p) for p in plain["patterns"])

    path = folder / _ANSWER
    try:
        return _read(path, read)
    finally:
        path.unlink(missing_ok=True)


def _read(path: Path, read: Callable[[Mapping[str, Any]], T]) -> T | None:
    try:
        plain = json.loads(path.read_bytes())
        if plain["schema"] != SCHEMA:
            raise StateError(f"{path}: schema {plain['schema']}, this version reads {SCHEMA}")
        return read(plain)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise StateError(f"{path}: cannot be read ({err}); delete it to go on") from err


def _write(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps({"schema": SCHEMA, **content}, separators=(",", ":")).encode()
    name = ""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".patterns-")
        with os.fdopen(handle, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except OSError as err:
        if name:
            Path(name).unlink(missing_ok=True)
        raise StateError(
            f"cannot write {path}: {err.strerror or err}; make state.dir writable for this user"
        ) from err
