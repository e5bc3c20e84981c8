"""What a terminal shows: readable at any width, nothing lost, the first thing to do at the end."""

import dataclasses
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from sentinel.doctor import facts
from sentinel.doctor.blocks import blocks
from sentinel.doctor.report import SECTIONS, Severity
from sentinel.doctor.show import report as shown
from tests.doctor.seen import CATALOG, FACTS, alertmanager, report, without
from tests.doctor.test_judge import CASES, settings

DOCS = Path(__file__).parents[2] / "docs"


def printed(found, *, width=100, full=False):
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(shown(found, full=full))
    return console.file.getvalue()


def bare(text):
    """Without line breaks: what was folded is one again."""
    return re.sub(r"\s+", " ", text)


def with_blocks(seen):
    return replace(report(seen), blocks=blocks(seen))


@pytest.mark.parametrize("width", [40, 80, 100, 140])
def test_no_line_is_wider_than_the_terminal_and_none_is_cut_off(width):
    found = with_blocks(without(*CATALOG.names))
    copied = {f"  {line}" for block in found.blocks for line in block.lines}
    text = printed(found, width=width)
    lines = {line.rstrip() for line in text.splitlines()}
    assert max(map(len, lines)) <= width
    assert width < 80 or copied <= lines  # a broken line is worth nothing to whoever copies
    joined = re.sub(r"\s", "", text)
    assert all(re.sub(r"\s", "", line) in joined for line in copied)


@pytest.mark.parametrize("full", [False, True], ids=["brief", "full"])
@pytest.mark.parametrize("case", CASES, ids=[f"{i}-{c[2]}" for i, c in enumerate(CASES)])
def test_every_finding_is_shown(case, full):
    found = report(case[0], settings(case[1]))
    text = bare(printed(found, width=200, full=full))
    for finding in found.findings:
        if finding.severity is not Severity.OK or full:
            assert bare(finding.what) in text
    assert text.strip().endswith(bare(found.summary))


def test_full_leaves_out_nothing_of_what_to_do():
    found = with_blocks(without(*CATALOG.names))
    text = bare(printed(found, width=200, full=True))
    for finding in found.to_do:
        for step in finding.do:
            assert bare(step.strip()) in text
    for metric in found.facts.fleet.metrics:
        assert metric.label in text


def test_the_first_thing_to_do_is_the_first_of_the_list():
    text = printed(report(alertmanager(trouble="connection refused")))
    first = text.split("To do, the first thing first\n")[1].splitlines()[0]
    assert first.split() == ["1", "✗", "http://127.0.0.1:9093:", "connection", "refused"]


def test_a_plain_terminal_is_shown_plain_marks():
    found = with_blocks(without(*CATALOG.names))
    console = Console(width=100, file=io.StringIO(), color_system=None)
    console.print(shown(found, full=True, plain=True))
    assert console.file.getvalue().isascii()


def test_all_well_is_short():
    text = printed(report(FACTS))
    assert len(text.splitlines()) <= len(SECTIONS) + 14
    assert "To do" not in text


@pytest.mark.parametrize("case", CASES, ids=[f"{i}-{c[2]}" for i, c in enumerate(CASES)])
def test_json_holds_every_report(case):
    found = report(case[0], settings(case[1]))
    plain = json.loads(json.dumps(found.plain(), allow_nan=False))
    assert plain["schema"] == 1
    assert plain["exit_code"] == found.exit_code
    assert plain["can_work"] == found.can_work
    assert [f["code"] for f in plain["findings"]][: len(found.to_do)] == [
        f.code for f in found.to_do
    ]
    assert set(plain["facts"]) >= {"prometheus", "fleet", "alertmanagers", "hook", "state"}


def test_not_a_number_is_null():
    fleet = replace(FACTS.fleet, ahead_max_s=float("inf"), at_skew_s=float("nan"))
    plain = report(replace(FACTS, fleet=fleet)).plain()["facts"]["fleet"]
    assert (plain["ahead_max_s"], plain["at_skew_s"]) == (None, None)


def test_the_documentation_explains_every_finding_and_no_other():
    page = (DOCS / "doctor.md").read_text().split("## JSON")[0]
    explained = set(re.findall(r"^\| `([a-z-]+)` \|", page, re.M))
    source = "".join(p.read_text() for p in (DOCS.parent / "sentinel" / "doctor").glob("*.py"))
    codes = set(re.findall(r'Finding\(\s*"([a-z-]+)"', source))
    assert explained == codes
    assert {case[2] for case in CASES} <= codes


def test_the_documentation_names_every_key_of_the_facts():
    page = (DOCS / "doctor.md").read_text().split("Of `facts`")[1]
    named = set(re.findall(r"`([a-z_0-9.]+)`", page))

    def keys(kind):
        for field in dataclasses.fields(kind):
            yield field.name

    for kind in vars(facts).values():
        if dataclasses.is_dataclass(kind):
            assert set(keys(kind)) <= {n.rpartition(".")[2] for n in named}, kind
