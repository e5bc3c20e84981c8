"""The store: what is committed is read back, what is used is used once, and it says why not."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sentinel.core.domain import (
    Backup,
    Breaker,
    Choice,
    CommandKind,
    Control,
    Decision,
    Evidence,
    Incident,
    IncidentPhase,
    Judgement,
    Kind,
    Migration,
    MigrationPhase,
    Operation,
    Outcome,
    OutcomeKind,
    OutcomeSource,
    Pause,
    Peak,
    Quarantine,
    Reason,
    Severity,
    Step,
    Subject,
    SubjectKind,
    Transition,
    Workload,
)
from sentinel.edges.store import Store
from sentinel.errors import ConfigError, StateError

NOW = 1_800_000_000.0
NOTHING = Judgement(np.zeros(0, np.int8), np.zeros(0))


def incident(id: str = "inc-1", **changed: object) -> Incident:
    made = Incident(
        id=id,
        subject=Subject(SubjectKind.GPU, "GPU-" + id),
        phase=IncidentPhase.CONFIRMED,
        opened_at_s=NOW - 60.0,
        since_s=NOW - 30.0,
        held_s=30.0,
        last_tick_s=NOW,
        kind=Kind.FAULT,
        severity=Severity.CRITICAL,
        pattern="off the bus",
        score=float("inf"),
        evidence=(Evidence("xid", "xid", "Xid 79: the GPU fell off the bus", 79.0, at_s=NOW),),
        gpu_uuid="GPU-" + id,
        node="gpu-03",
        workload=Workload("job", "4711", "physics"),
    )
    return replace(made, **changed)  # type: ignore[arg-type]


def migration(id: str = "op-1", **changed: object) -> Migration:
    made = Migration(
        operation_id=id,
        incident_id="inc-1",
        operation=Operation.MOVE,
        node="gpu-03",
        gpu_uuids=("GPU-inc-1",),
        phase=MigrationPhase.PLANNED,
        attempt=1,
        planned_at_s=NOW,
        since_s=NOW,
        deadline_s=NOW + 900.0,
        evidence_at_s=NOW,
        backups=(Backup("gpu-15", ("GPU-b",)),),
    )
    return replace(made, **changed)  # type: ignore[arg-type]


def step(control: Control, *transitions: Transition, decisions: tuple[Decision, ...] = ()) -> Step:
    return Step(control, NOTHING, decisions, transitions, ())


def outcome(operation_id: str = "op-1", at_s: float = NOW) -> Outcome:
    return Outcome(operation_id, OutcomeKind.ACCEPTED, OutcomeSource.POST, at_s)


FULL = Control(
    incidents={"inc-1": incident()},
    migrations={"op-1": migration()},
    quarantine={"gpu-03": Quarantine("gpu-03", "inc-1", NOW, "op-0")},
    breaker=Breaker(),
    pause=Pause(),
    last_tick_s=NOW,
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(dir=tmp_path / "state")
    yield opened
    opened.close()


def reopened(store: Store) -> Store:
    store.close()
    return Store.open(dir=store._where.parent)


def test_a_new_store_holds_an_empty_state(store: Store) -> None:
    assert store.load() == Control() == store.fold()


def test_what_is_committed_is_read_back_after_a_restart(store: Store) -> None:
    store.commit(Control(), step(FULL))
    again = reopened(store)
    assert again.load() == FULL
    assert again.fold() == FULL
    again.close()


def test_what_leaves_the_state_stays_in_history(store: Store) -> None:
    store.commit(Control(), step(FULL))
    after = replace(FULL, incidents={}, quarantine={}, last_tick_s=NOW + 15)
    store.commit(FULL, step(after))
    assert store.load() == after == store.fold()
    assert store.incident("inc-1") == incident()
    assert store.incidents() == (incident(),)


def any_control(random: random.Random, now_s: float) -> Control:
    phases = list(IncidentPhase)
    ids = [f"inc-{n}" for n in range(8) if random.random() < 0.5]
    operations = [f"op-{n}" for n in range(4) if random.random() < 0.5]
    return Control(
        incidents={i: incident(i, phase=random.choice(phases)) for i in ids},
        migrations={i: migration(i, phase=random.choice(list(MigrationPhase))) for i in operations},
        quarantine={n: Quarantine(n, "inc-1", NOW) for n in "ab" if random.random() < 0.5},
        breaker=Breaker(random.random() < 0.3, "too many", NOW),
        pause=Pause(random.random() < 0.3),
        last_tick_s=now_s,
        peaks={i: Peak(i, random.uniform(1, 3), NOW, now_s, ("GPU-a", "node:n")) for i in ids},
    )


def test_the_journal_folds_into_what_is_loaded_whatever_happened(store: Store) -> None:
    chance = random.Random(7)
    before = Control()
    for tick in range(60):
        after = any_control(chance, NOW + 15 * tick)
        store.commit(before, step(after))
        before = after
        if tick % 20 == 19:
            store.prune(NOW + 15 * tick + 3600)
        assert store.load() == after
        assert store.fold() == after


def test_a_commit_writes_only_what_changed(store: Store) -> None:
    many = {f"inc-{n}": incident(f"inc-{n}") for n in range(100)}
    control = Control(incidents=many, last_tick_s=NOW)
    store.commit(Control(), step(control))
    one = replace(
        control, incidents={**many, "inc-7": incident("inc-7", score=2.0)}, last_tick_s=NOW + 15
    )
    path = store._where
    with sqlite3.connect(path) as db:
        before = db.execute("SELECT max(n) FROM journal").fetchone()[0]
        store.commit(control, step(one))
        written = db.execute("SELECT entity, id FROM journal WHERE n > ?", (before,)).fetchall()
    db.close()
    assert sorted(written) == [("incident", "inc-7"), ("tick", "")]


def test_transitions_and_decisions_are_found_again_newest_first(store: Store) -> None:
    moves = [
        Transition(NOW + n, "incident", "inc-1", "suspected", "confirmed", f"n={n}")
        for n in range(5)
    ]
    held = Decision(NOW, "inc-1", Choice.HOLD, Choice.MOVE, False, "paused", "the daemon is paused")
    store.commit(Control(), step(FULL, *moves, decisions=(held,)))
    rows = store.journal(limit=3, entity="incident", id="inc-1")
    assert [row.type for row in rows] == ["decision", "transition", "transition"]
    assert rows[1].body["reason"] == "n=4"
    older = store.journal(before=rows[-1].n)
    assert [row.body["reason"] for row in older] == ["n=2", "n=1", "n=0"]
    assert store.decisions(incident_id="inc-1") == (held,)
    assert store.decisions(incident_id="inc-2") == ()


def test_incidents_and_migrations_come_newest_first_and_open_ones_alone(store: Store) -> None:
    incidents = {
        "a": incident("a", opened_at_s=NOW - 10),
        "b": incident("b", opened_at_s=NOW - 5, phase=IncidentPhase.RESOLVED),
        "c": incident("c", opened_at_s=NOW - 7),
    }
    migrations = {
        "m": migration("m", incident_id="a"),
        "n": migration("n", incident_id="c", phase=MigrationPhase.DONE, planned_at_s=NOW + 1),
    }
    control = Control(incidents=incidents, migrations=migrations, last_tick_s=NOW)
    store.commit(Control(), step(control))
    assert [i.id for i in store.incidents()] == ["b", "c", "a"]
    assert [i.id for i in store.incidents(limit=1, open_only=True)] == ["c"]
    assert [m.operation_id for m in store.migrations()] == ["n", "m"]
    assert [m.operation_id for m in store.migrations(open_only=True)] == ["m"]
    assert [m.operation_id for m in store.migrations(incident_id="c")] == ["n"]
    assert store.migration("m") == migrations["m"]
    assert store.migration("x") is None


# ---- inboxes ------------------------------------------------------------------------


def test_the_inbox_outlives_a_restart_and_is_used_once(store: Store) -> None:
    command = store.add_command(CommandKind.PAUSE, "", "ada", "maintenance", at_s=NOW)
    arrived = store.add_outcome(outcome())
    again = reopened(store)
    assert again.pending_commands() == (command,)
    assert again.pending_outcomes() == (arrived,)
    again.commit(Control(), step(FULL), commands=(command,), outcomes=(arrived,))
    assert again.pending_commands() == ()
    assert again.pending_outcomes() == ()
    with pytest.raises(StateError, match="used before"):
        again.commit(FULL, step(replace(FULL, last_tick_s=NOW + 15)), commands=(command,))
    assert again.load() == FULL
    assert {row.type for row in again.journal()} == {"command", "outcome"}
    assert again.add_outcome(outcome()).id > arrived.id > command.id
    again.close()


def test_what_comes_in_during_a_commit_waits_for_the_next(store: Store) -> None:
    first = store.add_outcome(outcome())
    taken = store.pending_outcomes()
    second = store.add_outcome(outcome())
    store.commit(Control(), step(FULL), outcomes=taken)
    assert taken == (first,)
    assert store.pending_outcomes() == (second,)


def test_many_threads_write_at_once_and_nothing_is_lost(store: Store) -> None:
    def worker(name: str) -> None:
        for n in range(20):
            store.add_outcome(outcome(f"{name}-{n}"))

    threads = [threading.Thread(target=worker, args=(f"op-{n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    used: list[str] = []
    before = Control()
    while any(t.is_alive() for t in threads) or store.pending_outcomes():
        taken = store.pending_outcomes()
        after = replace(before, last_tick_s=before.last_tick_s + 1)
        store.commit(before, step(after), outcomes=taken)
        used += [o.operation_id for o in taken]
        before = after
    assert len(used) == 160
    assert len(set(used)) == 160


# ---- the last look before a call leaves ---------------------------------------------


def why_not(store: Store, planned: Migration, now_s: float = NOW + 1) -> str:
    answer = store.mark_sent(planned, now_s=now_s, evidence_max_age_s=60.0)
    assert isinstance(answer, Reason), answer
    return answer.code


def test_a_planned_call_leaves_once(store: Store) -> None:
    store.commit(Control(), step(FULL))
    leaving = store.mark_sent(migration(), now_s=NOW + 1, evidence_max_age_s=60.0)
    assert isinstance(leaving, Migration)
    assert leaving.phase is MigrationPhase.SENT
    assert not leaving.post_allowed
    assert store.load().migrations["op-1"] == leaving
    assert store.fold() == store.load()
    assert store.journal(limit=1)[0].body["to_phase"] == "sent"
    assert why_not(store, migration()) == "phase"
    assert why_not(store, leaving) == "phase"


def test_an_unknown_call_leaves_again_only_when_a_404_allowed_it(store: Store) -> None:
    asked = migration(phase=MigrationPhase.UNKNOWN, post_allowed=False)
    control = replace(FULL, migrations={"op-1": asked})
    store.commit(Control(), step(control))
    assert why_not(store, asked) == "phase"
    allowed = replace(asked, post_allowed=True)
    store.commit(control, step(replace(control, migrations={"op-1": allowed})))
    assert isinstance(store.mark_sent(allowed, now_s=NOW + 1, evidence_max_age_s=60.0), Migration)


@pytest.mark.parametrize(
    ("kind", "target", "code"),
    [
        (CommandKind.PAUSE, "", "paused"),
        (CommandKind.CANCEL, "op-1", "cancelled"),
        (CommandKind.RELEASE, "inc-1", "cancelled"),
        (CommandKind.RELEASE, "gpu-03", "cancelled"),
        (CommandKind.RELEASE, "GPU-inc-1", "cancelled"),
    ],
)
def test_a_command_that_waits_holds_the_call(
    store: Store, kind: CommandKind, target: str, code: str
) -> None:
    store.commit(Control(), step(FULL))
    store.add_command(kind, target, "ada", "", at_s=NOW)
    assert why_not(store, migration()) == code
    assert store.load() == FULL


def test_commands_for_others_hold_nothing_and_the_last_word_counts(store: Store) -> None:
    store.commit(Control(), step(FULL))
    store.add_command(CommandKind.CANCEL, "op-2", "ada", "", at_s=NOW)
    store.add_command(CommandKind.PAUSE, "", "ada", "", at_s=NOW)
    store.add_command(CommandKind.RESUME, "", "ada", "", at_s=NOW)
    leaving = store.mark_sent(migration(), now_s=NOW, evidence_max_age_s=60.0)
    assert isinstance(leaving, Migration)


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"breaker": Breaker(True, "too many nodes fenced", NOW)}, "breaker"),
        ({"pause": Pause(True, "maintenance", NOW)}, "paused"),
    ],
)
def test_the_breaker_and_the_pause_on_disk_hold_all_but_recovery(
    store: Store, changed: dict[str, object], code: str
) -> None:
    unfence = migration("op-2", operation=Operation.UNFENCE)
    control = replace(FULL, migrations={**FULL.migrations, "op-2": unfence}, **changed)  # type: ignore[arg-type]
    store.commit(Control(), step(control))
    assert why_not(store, migration()) == code
    recovery = store.mark_sent(unfence, now_s=NOW, evidence_max_age_s=60.0)
    assert isinstance(recovery, Migration) is (code == "breaker")  # paused means nothing leaves


def test_old_evidence_and_a_passed_deadline_hold_the_call(store: Store) -> None:
    store.commit(Control(), step(FULL))
    assert why_not(store, migration(), NOW + 61) == "stale_evidence"
    assert why_not(store, migration(), NOW - 61) == "stale_evidence"
    assert why_not(store, migration(), NOW + 900) == "deadline"
    assert why_not(store, migration(reason="not what is on disk")) == "phase"
    assert why_not(store, migration("op-9")) == "phase"


# ---- what can be wrong with a state directory ---------------------------------------


def test_a_second_daemon_is_told_who_is_there(store: Store) -> None:
    folder = store._where.parent
    program = (
        "import sys; from pathlib import Path; from sentinel.edges.store import Store\n"
        "try: Store.open(dir=Path(sys.argv[1]))\n"
        "except Exception as err: print(type(err).__name__, err)\n"
    )
    run = [sys.executable, "-c", program, str(folder)]
    said = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    assert said.startswith("StateError")
    assert str(folder) in said
    assert f"pid {os.getpid()}" in said
    store.close()
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout == ""


def edit(path: Path, statement: str) -> None:
    db = sqlite3.connect(path)
    with db:
        db.execute(statement)
    db.close()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def scramble(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[4096:] = os.urandom(len(raw) - 4096)
    path.write_bytes(raw)


def make_foreign(path: Path) -> None:
    path.unlink()
    edit(path, "CREATE TABLE other (x)")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda p: p.write_bytes(b""), "is empty"),
        (lambda p: p.write_bytes(b"hello " * 1000), "not a database"),
        (cut, "damaged"),
        (scramble, "damaged"),
        (make_foreign, "belongs to another program"),
        (lambda p: edit(p, "UPDATE sentinel_schema SET version = 2"), "run the newer version"),
        (lambda p: edit(p, "UPDATE sentinel_schema SET version = 0"), "no conversion exists"),
        (lambda p: (p.unlink(), p.with_name("state.db-wal").write_bytes(b"x")), "is gone but"),
        (lambda p: (p.unlink(), p.mkdir()), "unable to open"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_damaged_or_foreign_file_stops_the_start(tmp_path: Path, damage, says: str) -> None:  # type: ignore[no-untyped-def]
    store = Store.open(dir=tmp_path)
    store.commit(Control(), step(FULL))
    store.close()
    damage(tmp_path / "state.db")
    with pytest.raises(StateError, match=says) as err:
        Store.open(dir=tmp_path)
    assert "state.db" in str(err.value)
    with pytest.raises(StateError, match=says):  # and the lock is free again
        Store.open(dir=tmp_path)


@pytest.mark.parametrize(
    "body", ['{"id": 1}', "not json", '{"nobody": "knows"}', "[]", "null", '"x"']
)
def test_a_state_that_cannot_be_read_never_reads_as_empty(tmp_path: Path, body: str) -> None:
    store = Store.open(dir=tmp_path)
    store.commit(Control(), step(FULL))
    edit(tmp_path / "state.db", f"UPDATE entity SET body = '{body}' WHERE kind = 'migration'")
    try:
        with pytest.raises(StateError, match="migration op-1 cannot be read"):
            store.load()
        edit(tmp_path / "state.db", "UPDATE entity SET kind = 'what' WHERE kind = 'migration'")
        with pytest.raises(StateError, match="unknown kind"):
            store.load()
    finally:
        store.close()


def test_a_directory_that_cannot_be_written_says_so() -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(0o555)
        if os.geteuid() == 0:
            os.seteuid(65534)
        with pytest.raises(StateError, match="cannot write there") as err:
            Store.open(dir=folder)
        assert str(folder) in str(err.value)
        with pytest.raises(StateError, match="cannot create it"):
            Store.open(dir=folder / "deeper")
    finally:
        if os.getuid() == 0:
            os.seteuid(0)
        shutil.rmtree(folder)


def test_a_file_in_the_place_of_the_directory_says_so(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    with pytest.raises(StateError, match="cannot create it"):
        Store.open(dir=tmp_path / "state")


def test_an_url_is_not_supported_yet() -> None:
    with pytest.raises(ConfigError, match=r"state\.url"):
        Store.open(url="postgresql+psycopg://localhost/sentinel")


def test_a_deleted_file_is_noticed_before_anything_leaves(store: Store) -> None:
    store.commit(Control(), step(FULL))
    store._where.unlink()
    with pytest.raises(StateError, match="deleted or replaced"):
        store.mark_sent(migration(), now_s=NOW, evidence_max_age_s=60.0)


def test_a_lock_held_by_another_program_is_an_error_in_words(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sentinel.edges import sqlite

    monkeypatch.setattr(sqlite, "_BUSY_S", 0.1)
    fresh = reopened(store)
    other = sqlite3.connect(fresh._where, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StateError, match="locked by another program"):
        fresh.commit(Control(), step(FULL))
    assert fresh.load() == Control()
    other.execute("ROLLBACK")
    other.close()
    fresh.commit(Control(), step(FULL))
    assert fresh.load() == FULL
    fresh.close()


FULL_DISK = """
import resource, sys
from pathlib import Path
from dataclasses import replace
sys.path.insert(0, sys.argv[2])
import test_store as t
from sentinel.edges.store import Store
from sentinel.core.domain import Control
from sentinel.errors import StateError

store = Store.open(dir=Path(sys.argv[1]))
store.commit(Control(), t.step(t.FULL))
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
big = {f"inc-{n}": t.incident(f"inc-{n}") for n in range(2000)}
after = replace(t.FULL, incidents=big, last_tick_s=t.NOW + 15)
why = t.Transition(t.NOW, "incident", "inc-5", "", "confirmed", "kept")
try:
    store.commit(t.FULL, t.step(after, why))
    print("no error")
except StateError as err:
    print(err)
assert store.load() == t.FULL == store.fold()
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
store.commit(t.FULL, t.step(after))
assert store.load() == after == store.fold()
assert store.journal()[0].body["reason"] == "kept"
store.close()
print("went on")
"""


def test_a_file_that_cannot_grow_changes_nothing_and_can_go_on(tmp_path: Path) -> None:
    run = [sys.executable, "-c", FULL_DISK, str(tmp_path / "s"), str(Path(__file__).parent)]
    said = subprocess.run(run, capture_output=True, text=True, check=False)
    assert said.stdout.splitlines()[1:] == ["went on"], said.stderr
    assert "nothing was changed" in said.stdout


def test_a_crash_while_the_file_is_made_leaves_no_trace(tmp_path: Path) -> None:
    (tmp_path / "state.db.new").write_bytes(b"half")
    (tmp_path / "state.db.new-journal").write_bytes(b"half")
    store = Store.open(dir=tmp_path)
    assert store.load() == Control()
    store.close()
    assert {p.name for p in tmp_path.iterdir()} == {"state.db", "lock"}


# ---- housekeeping -------------------------------------------------------------------


def test_pruning_forgets_what_is_over_and_keeps_what_lives(store: Store) -> None:
    told = Transition(NOW, "incident", "inc-1", "", "confirmed", "first")
    store.commit(Control(), step(FULL, told))
    control = FULL
    for tick in range(1, 50):
        held = incident(held_s=30.0 + 15 * tick)
        after = replace(control, incidents={"inc-1": held}, last_tick_s=NOW + 15 * tick)
        store.commit(control, step(after))
        control = after
    rows = sqlite3.connect(store._where)
    count = "SELECT count(*) FROM journal WHERE entity = 'incident' AND type = 'state'"
    assert rows.execute(count).fetchone()[0] == 50
    store.prune(NOW + 3600)
    assert rows.execute(count).fetchone()[0] == 2  # the one with a reason, and the newest
    assert store.fold() == store.load() == control
    without = replace(control, incidents={}, last_tick_s=NOW + 4000)
    store.commit(control, step(without))
    store.prune(NOW + 100 * 86_400)
    assert rows.execute(count).fetchone()[0] == 0
    assert store.incidents() == ()
    assert store.journal() == ()
    assert store.fold() == store.load() == without
    rows.close()


def test_a_commit_is_quick_enough_for_one_a_second(store: Store) -> None:
    """A hundred open incidents change at every tick: a bad day, not a usual one."""
    many = {f"inc-{n}": incident(f"inc-{n}", score=0.0) for n in range(100)}
    control = Control(incidents=many, last_tick_s=NOW)
    store.commit(Control(), step(control))
    took = []
    for tick in range(20):
        moved = {i: dataclasses.replace(v, held_s=tick + 100.0) for i, v in many.items()}
        after = Control(incidents=moved, last_tick_s=NOW + tick + 1)
        began = time.perf_counter()
        store.commit(control, step(after))
        took.append(time.perf_counter() - began)
        control = after
    print(f"100 incidents: median {1e3 * sorted(took)[10]:.1f} ms, most {1e3 * max(took):.1f} ms")
    assert sorted(took)[10] < 0.25


def test_bodies_are_plain_json(store: Store) -> None:
    odd = incident(node="gpu-\u00fc\ud800", score=np.float64(2.5), gpu_uuid=None)
    control = Control(incidents={"inc-1": odd}, last_tick_s=NOW)
    store.commit(Control(), step(control))
    assert store.load() == control
    db = sqlite3.connect(store._where)
    body = db.execute("SELECT body FROM entity WHERE kind = 'incident'").fetchone()[0]
    db.close()
    assert json.loads(body)["score"] == 2.5
