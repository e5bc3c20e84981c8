"""Signatures of incidents, the patterns they are like, and what people say of those."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sentinel.core.domain import (
    Command,
    CommandKind,
    Evidence,
    FaultPattern,
    IncidentPhase,
    Kind,
    Past,
    PatternState,
    Severity,
)
from sentinel.core.patterns import (
    DIMENSIONS,
    NAMES,
    NEAR,
    Book,
    adopt,
    likeness,
    named_from,
    pattern_from,
    signature,
    stronger,
    vector,
)
from sentinel.core.step import Inputs, advance
from sentinel.data import load_catalog
from tests.core.scene import Scene

CATALOG = load_catalog()
BOOK = CATALOG.patterns


def density(metric, value, expected, unit=""):
    return Evidence("density", metric, "", value, expected, unit, 1.0)


def xid(code):
    return Evidence("xid", "xid", "", float(code))


HOT = density("temp_c", 80.0, 66.0)
MEM_HOT = density("mem_temp_c", 95.0, 75.0)
SLOW = density("sm_clock_mhz", 1404.0, 1755.0)
WEAK = density("power_w", 400.0, 600.0)
STRONG = density("power_w", 690.0, 500.0)
THROTTLED = density("throttle_reasons", 1.0, 0.0)
BY_HEAT = Evidence("throttle", "throttle_heat", "", 0.9)
BY_BRAKE = Evidence("throttle", "throttle_brake", "", 0.9)
BY_HARDWARE = Evidence("throttle", "throttle_hw", "", 0.9)
STORM = Evidence("ecc", "ecc_sbe_volatile", "", 20.0, 0.0)
DBE = Evidence("ecc", "ecc_dbe_volatile", "", 2.0, 0.0)
LOST = Evidence("lost", "up", "")
PENDING = Evidence("remap", "remap_pending", "", 1.0)
FAILED = Evidence("remap", "remap_failure", "", 1.0)
RESET = Evidence("recovery", "recovery_action", "", 1.0)
THROUGH = Evidence("peers", "tensor_active_ratio", "", 0.0, -0.12, "change", 1.4)


def seen(kind, metric=""):
    return Evidence(kind, metric, "")


# ---- names -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "evidence"),
    [
        ("overheating", [HOT]),
        ("overheating", [HOT, MEM_HOT]),
        ("overheating", [HOT, SLOW]),  # by throttle of heat, whose reason is not exported
        ("overheating with throttling", [HOT, MEM_HOT, THROTTLED, BY_HEAT, SLOW, WEAK]),
        ("overheating with throttling", [HOT, THROTTLED]),  # written down by an older version
        ("overheating with throttling", [BY_HEAT, SLOW]),
        ("memory overheating", [MEM_HOT]),
        ("memory overheating", [MEM_HOT, STRONG]),
        ("power brake", [THROTTLED, BY_BRAKE, SLOW, WEAK]),
        ("hardware throttling", [THROTTLED, SLOW]),
        ("hardware throttling", [THROTTLED, BY_HARDWARE, SLOW, WEAK]),
        ("low SM clock", [SLOW]),
        ("low SM clock", [SLOW, WEAK]),
        ("low SM clock", [SLOW, WEAK, density("temp_c", 69.0, 66.0)]),
        ("low memory clock", [density("mem_clock_mhz", 1500.0, 2619.0), WEAK]),
        ("low power for the load", [WEAK]),
        ("high power for the load", [STRONG]),
        ("slower than its job mates", [THROUGH]),
        ("slower than its job mates", [THROUGH, WEAK]),
        ("hang", [seen("hang"), WEAK]),
        ("memory full", [seen("memory_full"), xid(31)]),
        ("application fault", [xid(13)]),
        ("application fault", [xid(45), xid(31)]),
        ("uncorrectable ECC", [DBE]),
        ("uncorrectable ECC", [xid(48), DBE, PENDING, xid(63), xid(45), RESET]),
        ("uncorrectable ECC", [xid(95), HOT, SLOW]),
        ("correctable ECC storm", [STORM]),
        ("correctable ECC storm", [density("ecc_sbe_volatile", 2000.0, 0.0)]),
        ("memory row remap failure", [FAILED, xid(64)]),
        ("row remap pending", [PENDING]),
        ("NVLink errors", [xid(74)]),
        ("NVLink errors", [seen("nvlink", "nvlink_recovery_errors"), WEAK, xid(45)]),
        ("PCIe link errors", [density("pcie_replay", 3000.0, 0.0)]),
        ("PCIe link slower than before", [seen("pcie_link", "pcie_link_width")]),
        ("off the bus", [xid(79), LOST]),
        ("off the bus", [xid(79), xid(119), HOT]),
        ("GPU lost", [LOST]),
        ("GPU lost", [LOST, HOT, xid(45)]),
        ("firmware fault", [xid(119), xid(45)]),
        ("GPU stopped answering", [xid(109)]),
        ("power supply fault", [xid(54)]),
        ("reset required", [RESET]),
    ],
)
def test_a_fault_has_its_name_from_the_first_day(name, evidence):
    assert BOOK.name(evidence, "nothing") == name
    assert BOOK.name(reversed(evidence), "nothing") == name


@pytest.mark.parametrize(
    "evidence",
    [
        [],
        [seen("peers", "mates")],
        [density("temp_c", None, 66.0)],
        [density("temp_c", math.nan, 66.0)],
        [density("power_w", math.inf, 600.0)],
        [density("power_w", 400.0, 0.0)],
        [density("gpu_util_ratio", 1.0, 0.1)],
        [seen("a kind of later")],
    ],
)
def test_reasons_that_say_nothing_have_no_signature(evidence):
    assert not vector(BOOK.signature(evidence)).any()
    assert BOOK.match(BOOK.signature(evidence)) is None
    assert BOOK.name(evidence, "the verdict's word") == "the verdict's word"


def test_what_is_like_nothing_is_novel_and_says_how_far_it_is():
    odd = BOOK.match(BOOK.signature([density("mem_clock_mhz", 1500.0, 2619.0), STRONG, MEM_HOT]))
    assert not odd.near
    assert NEAR < odd.distance < 1.0


def test_an_xid_that_belongs_nowhere_keeps_the_catalogues_word():
    assert BOOK.name([xid(68)], CATALOG.xid(68).pattern) == "video engine error"


def test_how_far_a_thing_moved_does_not_change_what_it_is_like():
    mild = [density("sm_clock_mhz", 1685.0, 1755.0), density("power_w", 580.0, 600.0)]
    assert BOOK.name(mild, "nothing") == "low SM clock"
    strength = BOOK.signature(mild)["sm_clock"]
    assert -0.4 < strength < -0.3  # but how far it went is kept


# ---- the data ----------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", BOOK.shipped, ids=lambda p: p.id)
def test_every_shipped_pattern_is_like_itself_and_says_what_to_do(pattern):
    for shape in pattern.shapes:
        found = BOOK.match(shape)
        assert (found.pattern.id, found.distance) == (pattern.id, 0.0)
    assert pattern.means
    assert pattern.first
    assert len(pattern.name) <= 40
    assert BOOK.clash(pattern.name, but=pattern.id) == ""


def test_every_dimension_is_shipped_in_some_pattern():
    used = {name for p in BOOK.shipped for shape in p.shapes for name in shape}
    assert set(NAMES) - used == {"other"}


def test_every_xid_that_may_act_has_a_dimension_of_its_own_or_a_name():
    for row in CATALOG.xids():
        assert BOOK.name([xid(row.code)], row.pattern)
    hardware = [
        r.code for r in CATALOG.xids() if r.fence and BOOK.xids.get(r.code) == "application"
    ]
    assert hardware == []


@pytest.mark.parametrize(
    "wrong",
    [{"shapes": [{"warmth": 1}]}, {"may": ["sm_clok-"]}, {"id": "No Slug"}, {"extra": 1},
     {"shapes": []}, {"source": ""}],
)  # fmt: skip
def test_a_bad_row_is_told(wrong):
    row = {"id": "x-y", "name": "n", "means": "m", "first": "f", "shapes": [{"temp": 1}],
           "source": "s"}  # fmt: skip
    assert pattern_from(row).name == "n"
    with pytest.raises((ValueError, KeyError, TypeError)):
        pattern_from({**row, **wrong})


# ---- distance ----------------------------------------------------------------------------

signatures = st.dictionaries(st.sampled_from(NAMES), st.floats(-1.0, 1.0), max_size=6)


@settings(max_examples=200, deadline=None)
@given(signatures, st.floats(0.1, 1.0))
def test_a_distance_is_between_the_same_and_nothing_in_common(of, less):
    found = BOOK.match(of)
    if found is None:
        assert not vector(of).any()
        return
    assert 0.0 <= found.distance <= 1.0
    again = BOOK.match({name: less * value for name, value in of.items()})
    assert again is None or again.distance == pytest.approx(found.distance, abs=1e-6)
    assert named_from(of)


@settings(max_examples=100, deadline=None)
@given(signatures, signatures, signatures)
def test_a_signature_only_ever_grows_whatever_comes_first(a, b, c):
    def size(of):
        return {name: abs(of.get(name, 0.0)) for name in NAMES}

    one, other = stronger(stronger(a, b), c), stronger(stronger(c, b), a)
    assert size(one) == size(other)
    assert all(size(one)[name] >= size(a)[name] for name in NAMES)


def test_names_of_dimensions_read_as_a_sentence():
    assert named_from({"temp": 1.0, "throttled": 0.8}) == "temperature high, clock throttled"
    assert named_from({"sm_clock": -0.9, "power": 0.5, "temp": 0.1}) == "SM clock low, power high"
    assert all(up for up, _ in DIMENSIONS.values())


# ---- over an incident's life -------------------------------------------------------------


class Named(Scene):
    """A scene whose incidents are named by the book."""

    def tick(self, *outcomes, learnt=None, said=()):
        now, told = self.now + 15.0, ()
        for number, (kind, target, value) in enumerate(said, 1):
            told += (Command(number, kind, target, "ada", "why not", now, value),)
        self.now = now
        inputs = Inputs(self.frame(), (), told, self.policy, learnt=learnt)
        book = BOOK.keeping(self.control.patterns)
        done = advance(self.control, self.judge(inputs.frame), inputs, now, book)
        self.control = done.control
        return done


@pytest.fixture
def scene():
    return Named()


def breaks(scene, *evidence, kind=Kind.DEVIANT, node=0, **changes):
    changes.setdefault("severity", Severity.WARNING)
    scene.breaks(node, kind=kind, evidence=tuple(evidence), pattern="the tick's word", **changes)


def only(scene):
    (incident,) = scene.control.incidents.values()
    return incident


def until_confirmed(scene):
    for _ in range(20):
        scene.tick()
        if only(scene).phase is not IncidentPhase.SUSPECTED:
            return
    raise AssertionError("never confirmed")


def test_hot_first_and_throttled_later_is_one_name(scene):
    breaks(scene, HOT)
    scene.tick()
    assert only(scene).pattern == "overheating"
    until_confirmed(scene)
    breaks(scene, HOT, MEM_HOT, THROTTLED, BY_HEAT, SLOW)
    scene.tick()
    breaks(scene, SLOW)  # cooler again, and still slow
    scene.tick()
    incident = only(scene)
    assert (incident.pattern, incident.like) == (
        "overheating with throttling",
        "overheating-throttled",
    )
    assert incident.signature["temp"] == 1.0
    assert incident.distance == 0.0


def test_what_a_suspicion_showed_on_its_way_is_not_kept(scene):
    breaks(scene, HOT, SLOW)
    scene.tick()
    assert only(scene).phase is IncidentPhase.SUSPECTED
    breaks(scene, SLOW)
    until_confirmed(scene)
    assert (only(scene).pattern, "temp" in only(scene).signature) == ("low SM clock", False)


COOLING = density("temp_c", 62.0, 50.0)  # its power fell by half: 70 degrees would be explained
HALVED = density("power_w", 300.0, 600.0)
OVEN = density("temp_c", 90.0, 66.0)  # more than any former power would explain


@pytest.mark.parametrize(
    ("evidence", "hot"),
    [
        ([COOLING, HALVED, SLOW], False),
        ([density("temp_c", 75.0, 50.0), HALVED, SLOW], True),
        ([COOLING, SLOW], True),  # nothing says that its power was another
        ([replace(OVEN, contribution=0.4), SLOW, WEAK], False),  # comes along, is no cause
        ([replace(OVEN, contribution=0.6), SLOW, WEAK], True),
        ([density("temp_c", 45.0, 60.0), SLOW], True),  # too cold is said whatever its power
    ],
)
def test_warmth_of_a_former_power_is_no_heat(evidence, hot):
    assert ("temp" in signature(evidence, BOOK.xids)) is hot


def test_what_is_novel_says_so(scene):
    breaks(scene, density("mem_clock_mhz", 1500.0, 2619.0), STRONG, MEM_HOT)
    scene.tick()
    incident = only(scene)
    assert (incident.pattern, incident.like) == ("novel", "")
    assert likeness(incident, {}) == (
        f"Pattern: novel, like nothing known (distance {incident.distance:.2f})."
    )


def test_reasons_without_a_signature_leave_the_verdicts_word(scene):
    breaks(scene, seen("a kind of later"))
    scene.tick()
    assert (only(scene).pattern, only(scene).distance) == ("the tick's word", None)
    assert likeness(only(scene), {}) == ""


# ---- what became of like ones ------------------------------------------------------------


def lives_and_ends(scene, *evidence, ticks=12):
    breaks(scene, *evidence)
    for _ in range(ticks):
        scene.tick()
    scene.bad.clear()
    for _ in range(30):
        scene.tick()


def test_a_later_incident_tells_what_became_of_like_ones(scene):
    lives_and_ends(scene, SLOW)
    kept = scene.control.patterns["low-sm-clock"]
    assert (kept.past.count, dict(kept.past.endings)) == (1, {"cleared by itself": 1})
    assert kept.shapes == ()  # what is shipped is not kept
    breaks(scene, SLOW, node=1)
    scene.tick()
    newest = max(scene.control.incidents.values(), key=lambda i: i.opened_at_s)
    assert likeness(newest, scene.control.patterns) == (
        "Pattern: low SM clock (distance 0.00); 1 like it before: 1 cleared by itself; 8 min in "
        "the median."
    )


def test_a_suspicion_that_passes_is_no_history(scene):
    lives_and_ends(scene, SLOW, ticks=1)
    assert scene.control.patterns == {}


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"moved": True, "repaired": True}, "moved"), ({"repaired": True}, "reset"),
     ({"released_by": "ada"}, "released"), ({}, "cleared by itself")],
)  # fmt: skip
def test_endings_are_told_apart(scene, changes, word):
    breaks(scene, SLOW)
    for _ in range(12):
        scene.tick()
    (incident,) = scene.control.incidents.values()
    ended = replace(incident, **changes)
    scene.control = replace(scene.control, incidents={ended.id: ended})
    scene.bad.clear()
    for _ in range(30):
        scene.tick()
    assert dict(scene.control.patterns["low-sm-clock"].past.endings) == {word: 1}


# ---- what people say ---------------------------------------------------------------------


def test_a_name_that_a_person_gives_is_used_at_once_and_kept(scene):
    breaks(scene, SLOW)
    scene.tick()
    scene.tick(said=[(CommandKind.RENAME_PATTERN, "low-sm-clock", "  tired   clock ")])
    assert only(scene).pattern == "tired clock"
    kept = scene.control.patterns["low-sm-clock"]
    assert (kept.state, kept.said_by) == (PatternState.CONFIRMED, "ada")
    scene.tick(learnt=())
    assert only(scene).pattern == "tired clock"
    assert "confirmed by ada" in likeness(only(scene), scene.control.patterns)


def test_a_rejected_pattern_names_nothing_until_it_is_confirmed(scene):
    breaks(scene, SLOW)
    scene.tick()
    scene.tick(said=[(CommandKind.REJECT_PATTERN, "low-sm-clock", "")])
    assert (only(scene).pattern, only(scene).like) == ("novel", "")
    scene.tick(learnt=())
    assert only(scene).pattern == "novel"
    scene.tick(said=[(CommandKind.CONFIRM_PATTERN, "low-sm-clock", "")])
    assert only(scene).pattern == "low SM clock"


def test_hard_evidence_whose_pattern_was_rejected_is_novel_and_acts_as_before(scene):
    breaks(scene, xid(79), kind=Kind.FAULT, severity=Severity.CRITICAL)
    scene.tick()
    before = only(scene)
    scene.tick(said=[(CommandKind.REJECT_PATTERN, "off-the-bus", "")])
    after = only(scene)
    assert (before.pattern, after.pattern) == ("off the bus", "novel")
    assert (after.severity, after.may_fence, after.may_move) == (
        before.severity,
        before.may_fence,
        before.may_move,
    )


@pytest.mark.parametrize(
    ("kind", "target", "value", "said"),
    [
        (CommandKind.RENAME_PATTERN, "nothing", "x", "no such pattern is known"),
        (CommandKind.CONFIRM_PATTERN, "", "", "no such pattern is known"),
        (CommandKind.RENAME_PATTERN, "hang", "  ", "must not be empty"),
        (CommandKind.RENAME_PATTERN, "hang", "Overheating", "overheating goes by that name"),
    ],
)
def test_what_cannot_be_done_is_said_in_the_journal(scene, kind, target, value, said):
    done = scene.tick(said=[(kind, target, value)])
    assert [t.entity for t in done.transitions] == ["pattern"]
    assert said in done.transitions[0].reason
    assert scene.control.patterns == {}


# ---- what was learnt ---------------------------------------------------------------------

ODD = {"mem_clock": -1.0, "power": 0.9, "mem_temp": 0.8}
LEARNT = FaultPattern("learnt-1", "memory clock low, power high", shapes=(ODD,))


def test_a_learnt_pattern_names_what_is_open(scene):
    breaks(scene, density("mem_clock_mhz", 1500.0, 2619.0), STRONG, MEM_HOT)
    scene.tick()
    done = scene.tick(learnt=(LEARNT,))
    assert only(scene).like == "learnt-1"
    assert any(t.reason == "learnt: memory clock low, power high" for t in done.transitions)
    scene.tick(learnt=())  # its incidents are gone
    assert only(scene).pattern == "novel"


def test_relearning_keeps_what_people_said_and_brings_the_past_up_to_date():
    said = replace(LEARNT, name="loose HBM", renamed=True, said_by="ada",
                   state=PatternState.CONFIRMED)  # fmt: skip
    shipped = FaultPattern("hang", "stuck kernel", origin="shipped", renamed=True, said_by="bob")
    kept = {p.id: p for p in (said, shipped, FaultPattern("learnt-2", "b", shapes=(ODD,)))}
    past = Past(3, {"moved": 3}, (60.0,))
    after = adopt(kept, [replace(LEARNT, name="other", shapes=({"temp": 1.0},), past=past)])
    assert after == {"learnt-1": replace(said, past=past), "hang": shipped}


def test_a_book_of_nothing_names_nothing():
    assert Book().match({"temp": 1.0}) is None
    assert signature([HOT], {}) == {"temp": 1.0}


# ---- what is about more than one GPU -----------------------------------------------------


def test_a_shared_cause_is_counted_under_its_own_name(scene):
    scene.policy = replace(scene.policy, limits=replace(scene.policy.limits, fleet_hold_gpus=3))
    for _ in range(2):
        for node in range(5):
            breaks(scene, HOT, node=node)
        for _ in range(12):
            scene.tick()
        scene.bad.clear()
        for _ in range(40):
            scene.tick()
    shared = [p for p in scene.control.patterns.values() if p.origin == "shared"]
    (one,) = shared
    assert one.id.startswith("shared-")
    assert one.past.count == 2
    newest = max(
        (i for i in scene.control.incidents.values() if i.pattern == one.name),
        key=lambda i: i.opened_at_s,
    )
    told = likeness(newest, scene.control.patterns)
    assert told.startswith(f"Pattern: {one.name}; 2 like it before: 2 cleared by itself")
    assert BOOK.keeping({one.id: one}).match({"temp": 1.0}).pattern.id == "overheating"
    assert adopt({one.id: one}, []) == {one.id: one}


def test_the_page_tells_every_pattern():
    page = (Path(__file__).parents[2] / "docs" / "patterns.md").read_text()
    for p in BOOK.shipped:
        assert f"| {p.name} | `{p.id}` | {p.means} | {p.first} |" in page
