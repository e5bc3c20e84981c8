"""What the reference scheduler must not forget: orders, cordons, jobs and every call.

One SQLite file, each change on disk (synchronous=FULL) when its method returns, so an order
that was answered is still known after a SIGKILL. Decides nothing.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_TABLES = """
CREATE TABLE IF NOT EXISTS operations (
    operation_id TEXT PRIMARY KEY, received_at_s REAL, state TEXT, started INTEGER,
    finished_at_s REAL, order_json TEXT, operation_json TEXT);
CREATE TABLE IF NOT EXISTS calls (
    n INTEGER PRIMARY KEY, at_s REAL, method TEXT, operation_id TEXT, answered INTEGER);
CREATE TABLE IF NOT EXISTS callbacks (
    n INTEGER PRIMARY KEY, at_s REAL, operation_id TEXT, state TEXT, status INTEGER, text TEXT);
CREATE TABLE IF NOT EXISTS cordons (node TEXT PRIMARY KEY, operation_id TEXT);
CREATE TABLE IF NOT EXISTS jobs (
    job TEXT PRIMARY KEY, tenant TEXT, uuids_json TEXT, restarts INTEGER, since_s REAL);
"""

Placement = list[dict[str, Any]]  # [{"node", "gpu_uuids"}], as the protocol says it


@dataclass
class Operation:
    """One order and what became of it. `started` counts how often its work was begun."""

    operation_id: str
    action: str
    node: str
    job: str = ""
    callback_url: str = ""
    dry_run: bool = False
    misdeeds: tuple[str, ...] = ()
    state: str = "accepted"
    reason: str = ""
    placement: Placement = field(default_factory=list)
    started: int = 0

    @property
    def is_open(self) -> bool:
        return self.state in ("accepted", "running")

    def status(self) -> dict[str, Any]:
        """The body of the GET and of the callback."""
        return {
            "operation_id": self.operation_id,
            "state": self.state,
            "reason": self.reason,
            "placement": self.placement,
        }


@dataclass(frozen=True)
class Job:
    job: str
    tenant: str
    uuids: tuple[str, ...]
    restarts: int
    since_s: float


class Ledger:
    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._db.row_factory = sqlite3.Row
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.executescript(_TABLES)

    def close(self) -> None:
        self._db.close()

    def add(self, operation: Operation, order: bytes) -> None:
        self._change(
            "INSERT INTO operations VALUES (?, ?, ?, ?, NULL, ?, ?)",
            operation.operation_id,
            time.time(),
            operation.state,
            operation.started,
            order.decode(),
            json.dumps(vars(operation)),
        )

    def update(self, operation: Operation) -> None:
        self._change(
            "UPDATE operations SET state = ?, started = ?, finished_at_s = ?, operation_json = ? "
            "WHERE operation_id = ?",
            operation.state,
            operation.started,
            None if operation.is_open else time.time(),
            json.dumps(vars(operation)),
            operation.operation_id,
        )

    def operation(self, operation_id: str) -> Operation | None:
        rows = self._rows("SELECT * FROM operations WHERE operation_id = ?", operation_id)
        return _operation(rows[0]) if rows else None

    def open_operations(self) -> list[Operation]:
        where = "WHERE state IN ('accepted', 'running') ORDER BY received_at_s"
        return [_operation(row) for row in self._rows(f"SELECT * FROM operations {where}")]

    def put_job(self, job: str, uuids: tuple[str, ...], tenant: str, *, restarts: int = 0) -> None:
        self._change(
            "INSERT OR REPLACE INTO jobs VALUES (?, ?, ?, ?, ?)",
            job,
            tenant,
            json.dumps(uuids),
            restarts,
            time.time(),
        )

    def jobs(self) -> dict[str, Job]:
        return {
            row["job"]: Job(
                row["job"],
                row["tenant"],
                tuple(json.loads(row["uuids_json"])),
                row["restarts"],
                row["since_s"],
            )
            for row in self._rows("SELECT * FROM jobs ORDER BY job")
        }

    def cordon(self, node: str, operation_id: str) -> None:
        self._change("INSERT OR IGNORE INTO cordons VALUES (?, ?)", node, operation_id)

    def uncordon(self, node: str) -> None:
        self._change("DELETE FROM cordons WHERE node = ?", node)

    def cordons(self) -> dict[str, str]:
        return {row["node"]: row["operation_id"] for row in self._rows("SELECT * FROM cordons")}

    def note_call(self, method: str, operation_id: str, answered: int) -> None:
        """One call received; `answered` 0 is a connection closed without a word."""
        self._change(
            "INSERT INTO calls VALUES (NULL, ?, ?, ?, ?)",
            time.time(),
            method,
            operation_id,
            answered,
        )

    def note_callback(self, operation_id: str, state: str, status: int, text: str) -> None:
        self._change(
            "INSERT INTO callbacks VALUES (NULL, ?, ?, ?, ?, ?)",
            time.time(),
            operation_id,
            state,
            status,
            text,
        )

    def log(self) -> dict[str, list[dict[str, Any]]]:
        """Everything that was received, done and sent, oldest first."""
        operations = [
            {
                **vars(_operation(row)),
                "received_at_s": row["received_at_s"],
                "finished_at_s": row["finished_at_s"],
                "order": json.loads(row["order_json"]),
            }
            for row in self._rows("SELECT * FROM operations ORDER BY received_at_s")
        ]
        calls = [dict(row) for row in self._rows("SELECT * FROM calls ORDER BY n")]
        callbacks = [dict(row) for row in self._rows("SELECT * FROM callbacks ORDER BY n")]
        return {"operations": operations, "calls": calls, "callbacks": callbacks}

    def _change(self, statement: str, *values: Any) -> None:
        with self._lock:
            self._db.execute(statement, values)

    def _rows(self, query: str, *values: Any) -> list[sqlite3.Row]:
        with self._lock:
            return self._db.execute(query, values).fetchall()


def _operation(row: sqlite3.Row) -> Operation:
    plain = json.loads(row["operation_json"])
    return Operation(**{**plain, "misdeeds": tuple(plain["misdeeds"])})
