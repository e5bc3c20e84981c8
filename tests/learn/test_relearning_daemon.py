"""The daemon has patterns learnt by a child, keeps them, and names by them; no server is needed,
for a tick without Prometheus is blind and obeys all the same."""

import time

from sentinel.config import Config
from sentinel.core.domain import CommandKind, Control, Judgement, PatternState, Step
from sentinel.daemon import Daemon
from sentinel.edges.store import Store
from tests.learn.test_patterns import KNOWN, TIRED, some

DEADLINE_S = 60.0


def until(daemon, reached):
    end_s = time.monotonic() + DEADLINE_S
    daemon.tick()
    while not reached():
        assert time.monotonic() < end_s, daemon.snapshot().tick.error
        time.sleep(0.05)
        daemon.tick()


def test_patterns_are_learnt_on_a_persons_word_and_outlive_a_restart(tmp_path):
    path = tmp_path / "sentinel.yaml"
    path.write_text(
        f"prometheus: {{url: 'http://127.0.0.1:9'}}\nstate: {{dir: '{tmp_path / 'state'}'}}\n"
    )
    config = Config.load(path)
    store = Store.open(dir=config.state_dir())
    ended = {i.id: i for i in (*some(6, TIRED), *some(4, KNOWN, start=50))}
    store.commit(
        Control(), Step(Control(incidents=ended, last_tick_s=1.0), Judgement((), ()), (), (), ())
    )
    store.close()

    daemon = Daemon(config)
    daemon.command(CommandKind.LEARN_PATTERNS, "", "ada", "")
    until(daemon, lambda: any(p.origin == "learnt" for p in daemon.snapshot().patterns.values()))
    known = daemon.snapshot().patterns
    (learnt,) = [p for p in known.values() if p.origin == "learnt"]
    assert (learnt.past.count, known["overheating"].past.count) == (6, 4)
    daemon.command(CommandKind.RENAME_PATTERN, learnt.id, "ada", "", "lazy GPU")
    until(daemon, lambda: daemon.snapshot().patterns[learnt.id].name == "lazy GPU")
    daemon.close()

    again = Store.open(dir=config.state_dir())
    kept = again.load().patterns[learnt.id]
    assert (kept.name, kept.state) == ("lazy GPU", PatternState.CONFIRMED)
    assert again.load() == again.fold()
    told = [row.body["reason"] for row in again.journal(entity="pattern")
            if row.type == "transition"]  # fmt: skip
    assert any("renamed" in reason for reason in told)
    assert any(reason.startswith("learnt: ") for reason in told)
    again.close()
