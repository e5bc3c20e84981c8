"""What passes between the daemon and the child that learns patterns, and what the store keeps."""

import pytest

from sentinel.core.domain import (
    CommandKind,
    Control,
    FaultPattern,
    Judgement,
    Past,
    PatternState,
    Step,
)
from sentinel.edges import patterns as files
from sentinel.edges.store import Store
from sentinel.errors import StateError
from tests.learn.test_patterns import TIRED, some

PATTERN = FaultPattern(
    id="learnt-1",
    name="loose HBM",
    state=PatternState.CONFIRMED,
    shapes=({"mem_clock": -1.0, "power": 0.9},),
    may=("temp-",),
    renamed=True,
    said_by="ada",
    said_at_s=12.0,
    past=Past(2, {"moved": 2}, (60.0, 90.5)),
)


def test_both_ways_whole(tmp_path):
    incidents = some(3, TIRED)
    files.give(tmp_path, incidents, {PATTERN.id: PATTERN})
    assert files.given(tmp_path) == (incidents, {PATTERN.id: PATTERN})
    files.answer(tmp_path, [PATTERN])
    assert files.answered(tmp_path) == (PATTERN,)
    assert files.answered(tmp_path) is None
    assert [p.name for p in tmp_path.iterdir()] == ["incidents.json"]


def test_nothing_given_is_nothing(tmp_path):
    assert files.given(tmp_path) == ([], {})


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"schema": 1}', '{"schema": 2, "patterns": []}',
     '{"schema": 1, "patterns": [{"id": 1}], "incidents": []}', "\x00\xff"],
)  # fmt: skip
def test_a_damaged_file_is_told_once(tmp_path, content):
    for name in ("incidents.json", "patterns.json"):
        (tmp_path / name).write_text(content)
    with pytest.raises(StateError, match=r"patterns\.json"):
        files.answered(tmp_path)
    assert files.answered(tmp_path) is None
    with pytest.raises(StateError, match=r"incidents\.json"):
        files.given(tmp_path)


def test_a_folder_that_cannot_be_written_says_what_to_do(tmp_path):
    with pytest.raises(StateError, match=r"state\.dir"):
        files.answer(tmp_path / "nowhere", [PATTERN])


def test_the_store_keeps_patterns_through_a_restart(tmp_path):
    store = Store.open(dir=tmp_path)
    after = Control(patterns={PATTERN.id: PATTERN}, last_tick_s=1.0)
    store.commit(Control(), Step(after, Judgement((), ()), (), (), ()))
    command = store.add_command(
        CommandKind.RENAME_PATTERN, "hang", "ada", "", at_s=2.0, value="stuck kernel"
    )
    store.close()
    again = Store.open(dir=tmp_path)
    assert again.load() == again.fold() == after
    assert again.pending_commands() == (command,)
    assert command.value == "stuck kernel"
    again.close()
