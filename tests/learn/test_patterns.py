"""Patterns learnt from incidents: what keeps happening gets a name, and people's names stay."""

import json
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from sentinel.core.domain import (
    Evidence,
    Incident,
    IncidentPhase,
    Kind,
    PatternState,
    Severity,
    Subject,
    SubjectKind,
)
from sentinel.core.patterns import NAMES, adopt
from sentinel.data import load_catalog
from sentinel.edges import patterns as files
from sentinel.learn.patterns import MIN_INCIDENTS, learn

BOOK = load_catalog().patterns
AT_S = 1_790_000_000.0
# kinds of fault that no prototype knows
COLD_FAST = {"mem_clock": -1.0, "power": 0.9, "mem_temp": 0.8}
TIRED = {"sm_clock": 0.9, "power": -1.0}
KNOWN = {"temp": 1.0, "mem_temp": 0.6}


def incident(n, signature, *, evidence=(), **changes):
    made = Incident(
        id=f"inc-{n:05}",
        subject=Subject(SubjectKind.GPU, f"GPU-{n}"),
        phase=IncidentPhase.RESOLVED,
        opened_at_s=AT_S + n,
        since_s=AT_S + n,
        held_s=0.0,
        last_tick_s=AT_S + n,
        kind=Kind.DEVIANT,
        severity=Severity.WARNING,
        pattern="novel",
        score=1.4,
        evidence=evidence,
        confirmed_at_s=AT_S + n + 60,
        resolved_at_s=AT_S + n + 600,
        signature=signature,
    )
    return replace(made, **changes)


def noisy(signature, rng):
    return {name: float(np.clip(v + rng.normal(0, 0.08), -1, 1)) for name, v in signature.items()}


def some(count, *kinds, seed=0, start=0):
    rng = np.random.default_rng(seed)
    return [incident(start + i, noisy(kinds[i % len(kinds)], rng)) for i in range(count)]


def proposed(learnt):
    return [p for p in learnt.patterns if p.origin == "learnt"]


def kept(learnt, before=None):
    return adopt(before or {}, learnt.patterns)


@pytest.mark.parametrize("count", [0, 1, MIN_INCIDENTS - 1])
def test_too_few_teach_nothing(count):
    made = learn(some(count, TIRED), BOOK)
    assert made.patterns == ()
    assert (made.incidents, made.novel) == (count, count)


def test_what_keeps_happening_gets_a_name_from_what_moved():
    incidents = some(5, TIRED)
    made = learn(incidents, BOOK)
    (pattern,) = proposed(made)
    assert pattern.name == "power low, SM clock high"
    assert pattern.state is PatternState.PROPOSED
    assert pattern.past.count == 5
    assert dict(pattern.past.endings) == {"cleared by itself": 5}
    assert set(made.of.values()) == {pattern.id}
    book = BOOK.keeping(kept(made))
    assert all(book.match(i.signature).pattern.id == pattern.id for i in incidents)


def test_what_has_a_name_is_not_learnt_again():
    made = learn(some(30, KNOWN), BOOK)
    assert proposed(made) == []
    assert set(made.of.values()) == {"overheating"}
    (overheating,) = made.patterns
    assert (overheating.id, overheating.past.count, overheating.shapes) == ("overheating", 30, ())


def test_incidents_of_before_are_read_from_their_evidence():
    hot = Evidence("density", "temp_c", "", 80.0, 66.0, "°C", 1.4)
    old = [incident(n, {}, evidence=(hot,)) for n in range(3)]
    nothing = incident(9, {}, evidence=(Evidence("migration", "op-1", "stuck"),))
    suspected = incident(10, TIRED, confirmed_at_s=None)
    made = learn([*old, nothing, suspected], BOOK)
    assert made.of == {i.id: "overheating" for i in old}


def test_ids_and_names_stay_as_incidents_come_in():
    first = some(6, TIRED)
    before = kept(learn(first, BOOK))
    more = some(200, TIRED, COLD_FAST, KNOWN, seed=1, start=100)
    after = kept(learn(first + more, BOOK.keeping(before)), before)
    assert set(before) <= set(after)
    (tired,) = before
    assert after[tired].name == before[tired].name
    assert len([p for p in after.values() if p.origin == "learnt"]) == 2


def test_the_order_of_incidents_does_not_matter():
    incidents = some(60, TIRED, COLD_FAST, KNOWN)
    one, other = learn(incidents, BOOK), learn(incidents[::-1], BOOK)
    assert one.of == other.of
    assert {p.id: p.shapes for p in one.patterns} == {p.id: p.shapes for p in other.patterns}


def test_a_persons_name_stays_wherever_the_cluster_drifts():
    (pattern,) = proposed(learn(some(6, TIRED), BOOK))
    said = replace(pattern, name="lazy GPU", renamed=True, said_by="ada",
                   state=PatternState.CONFIRMED)  # fmt: skip
    drifted = {"sm_clock": 0.6, "power": -1.0, "temp": -0.5}
    before = {said.id: said}
    made = learn(some(40, drifted, seed=2), BOOK.keeping(before))
    after = kept(made, before)
    assert (after[said.id].name, after[said.id].shapes) == ("lazy GPU", said.shapes)
    empty = kept(learn([], BOOK.keeping(before)), before)
    assert empty[said.id] == said


def test_what_a_person_rejected_is_not_proposed_again():
    incidents = some(20, TIRED)
    (pattern,) = proposed(learn(incidents, BOOK))
    before = {pattern.id: replace(pattern, state=PatternState.REJECTED, said_by="ada")}
    made = learn(incidents, BOOK.keeping(before))
    assert pattern.id not in made.of.values()
    assert kept(made, before)[pattern.id].state is PatternState.REJECTED
    assert [p.id for p in proposed(made)] == [pattern.id]


def test_a_rejected_word_of_ours_leaves_room_for_what_is_learnt():
    before = {
        "low-sm-clock": replace(BOOK.patterns["low-sm-clock"].kept(), said_by="ada",
                                state=PatternState.REJECTED)
    }  # fmt: skip
    made = learn(some(9, {"sm_clock": -1.0, "power": -0.8}), BOOK.keeping(before))
    (pattern,) = proposed(made)
    assert pattern.name == "SM clock low, power low"
    assert set(made.of.values()) == {pattern.id}


def test_five_thousand_incidents_of_any_kind_take_seconds():
    rng = np.random.default_rng(3)
    kinds = [
        {NAMES[d]: float(rng.choice([-1, 1])) for d in rng.choice(12, size=3, replace=False)}
        for _ in range(25)
    ]
    incidents = some(5000, *kinds)
    began = time.process_time()
    made = learn(incidents, BOOK)
    assert time.process_time() - began < 20.0
    assert made.incidents == 5000
    assert 10 <= len(proposed(made)) <= 25
    assert len({p.name for p in proposed(made)}) >= 0.8 * len(proposed(made))
    again = learn(incidents, BOOK.keeping(kept(made)))
    assert {p.id for p in again.patterns} == {p.id for p in made.patterns}


# ---- the child --------------------------------------------------------------------------


def test_the_command_learns_what_a_daemon_has_given(tmp_path):
    config = tmp_path / "sentinel.yaml"
    config.write_text(
        f"prometheus: {{url: 'http://127.0.0.1:9'}}\nstate: {{dir: '{tmp_path / 'state'}'}}\n"
    )
    (tmp_path / "state").mkdir()
    files.give(tmp_path / "state", some(6, TIRED), {})
    command = [sys.executable, "-m", "sentinel.cli", "learn", "--config", str(config)]
    done = subprocess.run(
        [*command, "--patterns", "--json"], capture_output=True, text=True, check=True
    )
    told = json.loads(done.stdout)
    assert (told["incidents"], told["novel"], len(told["patterns"])) == (6, 0, 1)
    (learnt,) = files.answered(tmp_path / "state")
    assert (learnt.id, learnt.past.count) == (told["patterns"][0]["id"], 6)
    assert files.answered(tmp_path / "state") is None
