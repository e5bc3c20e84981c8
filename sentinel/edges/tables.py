"""The store's tables, and how `Control` and what happened to it become their rows.

`entity` holds the newest state of everything, `journal` every state and what led to it,
`inbox` what came in and no tick has used yet. Portable SQLAlchemy Core: no word of any one
database here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Float,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    bindparam,
    delete,
    insert,
    inspect,
    select,
    update,
)

from sentinel.core.domain import (
    Breaker,
    Control,
    FaultPattern,
    Incident,
    Migration,
    Pause,
    Peak,
    Quarantine,
    Step,
    to_plain,
)
from sentinel.errors import StateError

SCHEMA: Final = 1
SINGLE: Final = ""  # the id of what there is only one of
KINDS: Final[dict[str, type]] = {
    "incident": Incident,
    "migration": Migration,
    "quarantine": Quarantine,
    "breaker": Breaker,
    "pause": Pause,
    "tick": float,
    "pattern": FaultPattern,
    "peak": Peak,
}

Change = tuple[str, str, Any]  # kind, id, and the new value: None where it is no longer there

_tables = MetaData()
_number = BigInteger().with_variant(Integer, "sqlite")
schema = Table("sentinel_schema", _tables, Column("version", Integer, primary_key=True))
entity = Table(
    "entity",
    _tables,
    Column("kind", String, primary_key=True),
    Column("id", String, primary_key=True),
    Column("parent", String, nullable=False),  # of a migration: its incident
    Column("opened_at_s", Float, nullable=False),
    Column("updated_at_s", Float, nullable=False),
    Column("open", Boolean, nullable=False),
    Column("live", Boolean, nullable=False),  # part of Control; else history alone
    Column("body", Text, nullable=False),
    Index("entity_newest", "kind", "opened_at_s"),
    Index("entity_live", "live"),
)
journal = Table(
    "journal",
    _tables,
    Column("n", _number, primary_key=True, autoincrement=True),
    Column("at_s", Float, nullable=False),
    Column("type", String, nullable=False),  # state, transition, decision, command, outcome
    Column("entity", String, nullable=False),
    Column("id", String, nullable=False),
    Column("lasting", Boolean, nullable=False),  # False: a state that only timers led to
    Column("body", Text),  # None: no part of Control any more
    Index("journal_of", "entity", "id", "type", "n"),
    Index("journal_type", "type", "n"),
    sqlite_autoincrement=True,
)
inbox = Table(
    "inbox",
    _tables,
    Column("n", _number, primary_key=True, autoincrement=True),
    Column("type", String, nullable=False),  # command, outcome
    Column("body", Text, nullable=False),
    sqlite_autoincrement=True,  # a number is never given twice
)


def create(db: Connection) -> None:
    _tables.create_all(db)
    db.execute(insert(schema).values(version=SCHEMA))


def check_schema(db: Connection, where: str) -> None:
    """StateError when these are not tables that this version wrote."""
    ours = inspect(db).has_table(schema.name)
    found = db.execute(select(schema.c.version)).scalar() if ours else None
    if found is None:
        raise StateError(f"{where} belongs to another program: set another state.dir")
    if found != SCHEMA:
        remedy = "run the newer version that wrote it" if found > SCHEMA else "no conversion exists"
        raise StateError(
            f"{where} has schema {found} and this version reads schema {SCHEMA}: {remedy}, or "
            "move it away to start with an empty state"
        )


def changes(before: Control, after: Control) -> Iterator[Change]:
    """Whatever differs between two states."""
    for kind, was, now in zip(KINDS, _parts(before), _parts(after), strict=True):
        for id, value in now.items():
            old = was.get(id)
            if old is not value and old != value:
                yield kind, id, value
        for id in was.keys() - now.keys():
            yield kind, id, None


def _parts(control: Control) -> tuple[dict[str, Any], ...]:
    """One mapping per kind, in the order of `KINDS`."""
    return (
        dict(control.incidents),
        dict(control.migrations),
        dict(control.quarantine),
        {SINGLE: control.breaker},
        {SINGLE: control.pause},
        {SINGLE: control.last_tick_s},
        dict(control.patterns),
        dict(control.peaks),
    )


def write_entities(db: Connection, changed: list[Change], now_s: float) -> None:
    this = (entity.c.kind == bindparam("k"), entity.c.id == bindparam("i"))
    keys = [{"k": kind, "i": id} for kind, id, value in changed if value is not None]
    gone = [{"k": kind, "i": id} for kind, id, value in changed if value is None]
    if gone:
        db.execute(update(entity).where(*this).values(live=False, updated_at_s=now_s), gone)
    if keys:
        db.execute(delete(entity).where(*this), keys)
        rows = [_entity_row(*change, now_s) for change in changed if change[2] is not None]
        db.execute(insert(entity), rows)


def tick_lines(step: Step, changed: list[Change], now_s: float) -> list[dict[str, Any]]:
    """The journal of one tick: the states it led to, and why."""
    told = {(t.entity, t.id) for t in step.transitions}
    lines = [
        line(now_s, "state", kind, id, value, lasting=_lasts(kind, id, value, told))
        for kind, id, value in changed
    ]
    lines += [line(t.at_s, "transition", t.entity, t.id, t) for t in step.transitions]
    lines += [line(d.at_s, "decision", "incident", d.incident_id, d) for d in step.decisions]
    return lines


def _lasts(kind: str, id: str, value: Any, told: set[tuple[str, str]]) -> bool:
    return (
        value is None or (kind, id) in told or kind in ("breaker", "pause", "quarantine", "pattern")
    )


def line(
    at_s: float, type: str, entity: str, id: str, value: Any, *, lasting: bool = True
) -> dict[str, Any]:
    body = None if value is None else text(value)
    row = {"at_s": at_s, "type": type, "entity": entity, "id": id}
    return {**row, "lasting": lasting, "body": body}


def text(value: Any) -> str:
    return json.dumps(to_plain(value), separators=(",", ":"), default=_number_of)


def _number_of(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"cannot write down {value!r}")


def _entity_row(kind: str, id: str, value: Any, now_s: float) -> dict[str, Any]:
    opened_s, is_open, parent = now_s, True, ""
    if isinstance(value, Incident):
        opened_s, is_open = value.opened_at_s, value.is_open
    elif isinstance(value, Migration):
        opened_s, is_open, parent = value.planned_at_s, value.phase.is_open, value.incident_id
    row = {"kind": kind, "id": id, "parent": parent, "opened_at_s": opened_s}
    return {**row, "updated_at_s": now_s, "open": is_open, "live": True, "body": text(value)}
