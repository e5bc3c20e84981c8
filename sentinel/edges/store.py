"""What must survive a crash: open incidents and migrations, what was decided, what came in.

One transaction per tick writes the entities that changed and appends to the journal what
changed, why, and what was consumed; the journal folds back into the same `Control`. Commands
and outcomes wait in an inbox until the transaction that used them takes them out, so none is
lost or used twice. It decides one thing only: whether a planned call may still leave
(`mark_sent`), because that must be read and written in one transaction.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from sqlalchemy import (
    Connection,
    Engine,
    and_,
    bindparam,
    delete,
    exists,
    func,
    insert,
    select,
)
from sqlalchemy.exc import SQLAlchemyError

from sentinel.core.domain import (
    Breaker,
    Command,
    CommandKind,
    Control,
    Decision,
    Incident,
    Migration,
    Operation,
    Outcome,
    Pause,
    Reason,
    Step,
    Transition,
    from_plain,
)
from sentinel.core.migration import may_leave, sent
from sentinel.edges import sqlite, tables
from sentinel.edges.tables import SINGLE
from sentinel.edges.tables import entity as _entity
from sentinel.edges.tables import inbox as _inbox
from sentinel.edges.tables import journal as _journal
from sentinel.errors import ConfigError, StateError

_OWED_MAX: Final = 10_000
_INBOX_MAX: Final = 1_000  # of one kind in one tick; the rest waits for the next
_SETTLED_S: Final = 600.0  # after this, only the lasting states of an entity are kept

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class JournalRow:
    """One line of the journal; `body` is the plain form of what `type` names."""

    n: int
    at_s: float
    type: str
    entity: str
    id: str
    body: Any


class Store:
    """Opened once per daemon; every method may be called from any thread."""

    def __init__(self, engine: Engine, where: Path, lock: sqlite.Lock) -> None:
        self._engine = engine
        self._writer = engine.execution_options(writes=True)
        self._where = where
        self._lock = lock
        self._inode = where.stat().st_ino
        self._writing_now = threading.Lock()
        self._owed: list[dict[str, Any]] = []  # journal lines of commits that failed

    @classmethod
    def open(cls, *, dir: Path | None = None, url: str | None = None) -> Store:
        """The store in `dir`, made if there is none. StateError says why it cannot be used."""
        if url is not None or dir is None:
            raise ConfigError("state.url is not supported yet: set state.dir")
        lock = sqlite.prepare(dir)
        try:
            engine = sqlite.open_engine(dir, tables.create, tables.check_schema)
        except BaseException:
            lock.release()
            raise
        return cls(engine, dir / sqlite.FILE, lock)

    def close(self) -> None:
        self._engine.dispose()
        self._lock.release()

    # ---- the tick -------------------------------------------------------------------

    def load(self) -> Control:
        """What the last commit left. StateError when any of it does not read back."""
        with self._reading() as db:
            rows = db.execute(
                select(_entity.c.kind, _entity.c.id, _entity.c.body).where(_entity.c.live)
            ).all()
        return self._control((kind, id, body) for kind, id, body in rows)

    def commit(
        self,
        before: Control,
        step: Step,
        *,
        commands: tuple[Command, ...] = (),
        outcomes: tuple[Outcome, ...] = (),
    ) -> None:
        """One transaction: what differs from `before` (the last state committed), the
        journal of this tick, and the inbox without what this tick used."""
        now_s = step.control.last_tick_s
        changed = list(tables.changes(before, step.control))
        lines = tables.tick_lines(step, changed, now_s)
        lines += [tables.line(now_s, "command", "command", str(c.id), c) for c in commands]
        lines += [tables.line(now_s, "outcome", "migration", o.operation_id, o) for o in outcomes]
        used = [{"number": n} for n in (*(c.id for c in commands), *(o.id for o in outcomes))]
        try:
            with self._writing() as db:
                tables.write_entities(db, changed, now_s)
                if self._owed or lines:
                    db.execute(insert(_journal), self._owed + lines)
                self._use_up(db, used)
        except StateError:
            # the state is written with the next commit; why it came about would be lost
            told = [line for line in lines if line["type"] in ("transition", "decision")]
            self._owed = (self._owed + told)[-_OWED_MAX:]
            raise
        self._owed = []

    def _use_up(self, db: Connection, used: list[dict[str, int]]) -> None:
        if not used:
            return
        gone = db.execute(delete(_inbox).where(_inbox.c.n == bindparam("number")), used).rowcount
        if gone != len(used):
            raise StateError(
                f"{self._where}: {len(used) - gone} of {len(used)} commands and outcomes were "
                "used before; nothing was changed"
            )

    def mark_sent(
        self, migration: Migration, *, now_s: float, evidence_max_age_s: float
    ) -> Migration | Reason:
        """The migration as SENT, on disk, or why its call must not leave.

        Reads what the tick could not know: commands that came meanwhile, the breaker and the
        phase as they are on disk, and the age that the evidence has by now.
        """
        with self._writing() as db:
            reason = self._why_not_send(db, migration, now_s, evidence_max_age_s)
            if reason is not None:
                return reason
            leaving = sent(migration, now_s)
            told = Transition(
                now_s,
                "migration",
                migration.operation_id,
                migration.phase,
                leaving.phase,
                f"call {leaving.attempt} leaves",
            )
            tables.write_entities(db, [("migration", leaving.operation_id, leaving)], now_s)
            lines = [
                tables.line(now_s, "state", "migration", leaving.operation_id, leaving),
                tables.line(now_s, "transition", "migration", leaving.operation_id, told),
            ]
            db.execute(insert(_journal), lines)
            return leaving

    def _why_not_send(
        self, db: Connection, migration: Migration, now_s: float, evidence_max_age_s: float
    ) -> Reason | None:
        id = migration.operation_id
        known = self._one(db, Migration, "migration", id)
        if known is None or known != migration:
            phase = known.phase if known else "nothing"
            return Reason("phase", f"the store knows {id} as {phase}, not as it is in memory")
        if not may_leave(known):
            return Reason("phase", f"{id} is {known.phase}: its call may have left already")
        if now_s >= known.deadline_s:
            return Reason("deadline", f"{id} is past its deadline")
        paused = (self._one(db, Pause, "pause", SINGLE) or Pause()).paused
        recovers = known.operation is Operation.UNFENCE
        targets = {known.incident_id, known.node, *known.gpu_uuids}
        for command in self._pending(db, "command", Command):
            if command.kind in (CommandKind.PAUSE, CommandKind.RESUME):
                paused = command.kind is CommandKind.PAUSE
            elif command.kind is CommandKind.CANCEL and command.target == id:
                return Reason("cancelled", f"{id} is being cancelled by {command.actor}")
            elif command.kind is CommandKind.RELEASE and command.target in targets and not recovers:
                return Reason("cancelled", f"{command.target} is being released by {command.actor}")
        if paused:
            return Reason("paused", "the daemon is paused")
        breaker = self._one(db, Breaker, "breaker", SINGLE) or Breaker()
        if breaker.latched and not recovers:
            return Reason("breaker", f"the breaker is latched: {breaker.reason}")
        age_s = now_s - known.evidence_at_s
        if abs(age_s) > evidence_max_age_s:  # a clock that stepped back proves nothing either
            return Reason("stale_evidence", f"the evidence for {id} is {age_s:.0f} s old")
        return None

    # ---- inboxes --------------------------------------------------------------------

    def add_command(
        self,
        kind: CommandKind,
        target: str,
        actor: str,
        reason: str,
        *,
        at_s: float,
        value: str = "",
    ) -> Command:
        """On disk, and numbered, when it returns."""
        command = Command(0, kind, target, actor, reason, at_s, value)
        return dataclasses.replace(command, id=self._add("command", command))

    def add_outcome(self, outcome: Outcome) -> Outcome:
        """On disk, and numbered, when it returns."""
        return dataclasses.replace(outcome, id=self._add("outcome", outcome))

    def pending_commands(self) -> tuple[Command, ...]:
        with self._reading() as db:
            return self._pending(db, "command", Command)[:_INBOX_MAX]

    def pending_outcomes(self) -> tuple[Outcome, ...]:
        with self._reading() as db:
            return self._pending(db, "outcome", Outcome)[:_INBOX_MAX]

    def _add(self, type: str, value: Command | Outcome) -> int:
        with self._writing() as db:
            made = db.execute(insert(_inbox).values(type=type, body=tables.text(value)))
            assert made.inserted_primary_key is not None
            number: int = made.inserted_primary_key[0]
            return number

    def _pending(self, db: Connection, type: str, cls: type[T]) -> tuple[T, ...]:
        query = select(_inbox.c.n, _inbox.c.body).where(_inbox.c.type == type).order_by(_inbox.c.n)
        read = []
        for n, body in db.execute(query):
            value: Any = self._value(cls, type, str(n), body)
            read.append(dataclasses.replace(value, id=n))
        return tuple(read)

    # ---- reading back, newest first -------------------------------------------------

    def incidents(self, limit: int = 100, *, open_only: bool = False) -> tuple[Incident, ...]:
        return self._entities(Incident, "incident", limit, open_only)

    def migrations(
        self, limit: int = 100, *, open_only: bool = False, incident_id: str | None = None
    ) -> tuple[Migration, ...]:
        return self._entities(Migration, "migration", limit, open_only, incident_id)

    def incident(self, id: str) -> Incident | None:
        with self._reading() as db:
            return self._one(db, Incident, "incident", id)

    def migration(self, operation_id: str) -> Migration | None:
        with self._reading() as db:
            return self._one(db, Migration, "migration", operation_id)

    def decisions(
        self, limit: int = 100, *, incident_id: str | None = None
    ) -> tuple[Decision, ...]:
        rows = self._rows(limit, ["decision"], "incident", incident_id, None)
        return tuple(self._value(Decision, "decision", row.id, row.body) for row in rows)

    def journal(
        self,
        limit: int = 100,
        *,
        before: int | None = None,
        entity: str | None = None,
        id: str | None = None,
    ) -> tuple[JournalRow, ...]:
        """Transitions, decisions, commands and outcomes; `before` pages on by number."""
        types = ["transition", "decision", "command", "outcome"]
        rows = self._rows(limit, types, entity, id, before)
        return tuple(
            JournalRow(r.n, r.at_s, r.type, r.entity, r.id, json.loads(r.body)) for r in rows
        )

    def fold(self) -> Control:
        """`Control` from the journal alone: what `load` must equal."""
        newest = select(func.max(_journal.c.n)).where(_journal.c.type == "state")
        newest = newest.group_by(_journal.c.entity, _journal.c.id)
        query = select(_journal.c.entity, _journal.c.id, _journal.c.body)
        with self._reading() as db:
            rows = db.execute(query.where(_journal.c.n.in_(newest))).all()
        return self._control((kind, id, body) for kind, id, body in rows if body is not None)

    # ---- housekeeping ---------------------------------------------------------------

    def prune(self, now_s: float, *, keep_days: float = 90.0) -> None:
        """Forgets what is over and older than `keep_days`, and of the states that only
        timers moved through, all but the newest. What is live is kept whatever its age."""
        j, e = _journal.c, _entity.c
        newest = select(func.max(j.n)).where(j.type == "state").group_by(j.entity, j.id)
        newest_scalar = newest.scalar_subquery()
        old_s = now_s - keep_days * 86_400.0
        state, known = j.type == "state", exists().where(and_(e.kind == j.entity, e.id == j.id))
        with self._writing() as db:
            db.execute(
                delete(_journal).where(
                    state, ~j.lasting, j.at_s < now_s - _SETTLED_S, j.n.not_in(newest_scalar)
                )
            )
            db.execute(delete(_entity).where(~e.live, e.updated_at_s < old_s))
            db.execute(delete(_journal).where(state, ~known))
            db.execute(delete(_journal).where(j.at_s < old_s, ~state | j.n.not_in(newest_scalar)))

    # ---- inside ---------------------------------------------------------------------

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        try:
            with self._engine.connect() as db:
                yield db
        except SQLAlchemyError as err:
            raise sqlite.failure(self._where, err) from err

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        with self._writing_now:
            self._still_there()
            try:
                with self._writer.begin() as db:
                    yield db
            except SQLAlchemyError as err:
                raise sqlite.failure(self._where, err) from err

    def _still_there(self) -> None:
        """What is written to a deleted file is forgotten at the next start."""
        try:
            same = self._where.stat().st_ino == self._inode
        except OSError:
            same = False
        if not same:
            raise StateError(
                f"{self._where} was deleted or replaced under the running daemon: restart it"
            )

    def _control(self, rows: Iterable[tuple[str, str, str]]) -> Control:
        found: dict[str, dict[str, Any]] = {kind: {} for kind in tables.KINDS}
        for kind, id, body in rows:
            if kind not in tables.KINDS:
                raise StateError(f"{self._where}: unknown kind of entity {kind!r}")
            found[kind][id] = self._value(tables.KINDS[kind], kind, id, body)
        return Control(
            incidents=found["incident"],
            migrations=found["migration"],
            quarantine=found["quarantine"],
            breaker=found["breaker"].get(SINGLE, Breaker()),
            pause=found["pause"].get(SINGLE, Pause()),
            last_tick_s=found["tick"].get(SINGLE, 0.0),
            patterns=found["pattern"],
            peaks=found["peak"],
        )

    def _value(self, cls: type[T], kind: str, id: str, body: str) -> T:
        try:
            return from_plain(cls, json.loads(body))
        except (TypeError, KeyError, ValueError, AttributeError) as err:
            raise StateError(
                f"{self._where}: {kind} {id} cannot be read ({err}): restore the file from a "
                "backup, or move it away to start with an empty state"
            ) from err

    def _one(self, db: Connection, cls: type[T], kind: str, id: str) -> T | None:
        query = select(_entity.c.body).where(_entity.c.kind == kind, _entity.c.id == id)
        body = db.execute(query).scalar()
        return None if body is None else self._value(cls, kind, id, body)

    def _entities(
        self, cls: type[T], kind: str, limit: int, open_only: bool, parent: str | None = None
    ) -> tuple[T, ...]:
        e = _entity.c
        query = select(e.id, e.body).where(e.kind == kind)
        if open_only:
            query = query.where(e.open)
        if parent is not None:
            query = query.where(e.parent == parent)
        with self._reading() as db:
            rows = db.execute(query.order_by(e.opened_at_s.desc(), e.id).limit(limit)).all()
        return tuple(self._value(cls, kind, id, body) for id, body in rows)

    def _rows(
        self, limit: int, types: list[str], entity: str | None, id: str | None, before: int | None
    ) -> Sequence[Any]:
        j = _journal.c
        query = select(j.n, j.at_s, j.type, j.entity, j.id, j.body).where(j.type.in_(types))
        for column, wanted in ((j.entity, entity), (j.id, id)):
            if wanted is not None:
                query = query.where(column == wanted)
        if before is not None:
            query = query.where(j.n < before)
        with self._reading() as db:
            return db.execute(query.order_by(j.n.desc()).limit(limit)).all()
