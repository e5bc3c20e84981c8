"""The documents name only what there is, and leave out nothing that people must find."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sentinel.cli import cli
from sentinel.config import Config
from sentinel.configfile import parse, validate

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_the_readme_names_every_command_and_no_other() -> None:
    told = set(re.findall(r"sentinel ([a-z][a-z-]+)", README.split("## Ten minutes")[1]))
    assert told <= set(cli.commands)
    table = README.split("## Commands")[1].split("| exit code")[0]
    assert set(cli.commands) - {"config"} <= set(re.findall(r"`([a-z-]+)", table))


def test_the_readmes_first_screen_has_the_picture_and_both_commands() -> None:
    first = "\n".join(README.splitlines()[:30])
    assert "docs/images/flow.svg" in first
    assert "\nmake demo" in first
    assert "\nmake test" in first


def test_the_readmes_configurations_are_valid() -> None:
    start = re.findall(r"<<'YAML'\n(.*?)\nYAML", README, re.S)[0]
    act = re.findall(r"```yaml\n(.*?)```", README, re.S)[0]
    assert validate(Config, parse(start, "README")).mode == "observe"
    assert validate(Config, parse(start + "\n" + act, "README")).mode == "act"


def test_every_configuration_of_the_backends_is_valid() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "backends.md").read_text(), re.S)
    assert len(blocks) == 4
    for block in blocks:
        assert Config.parse(block, ROOT / "docs" / "backends.md").prometheus.url


def test_every_make_target_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in [*PAGES, ROOT / ".ci" / "run"]:
        named = re.findall(r"(?:^|`)make (?:--\S+ )?([a-z]+)", page.read_text(), re.M)
        assert set(named) <= targets, page


def test_every_decision_is_in_the_index() -> None:
    index = (ROOT / "docs" / "decisions" / "README.md").read_text()
    for page in (ROOT / "docs" / "decisions").glob("0*.md"):
        assert f"({page.name})" in index
        assert page.read_text().startswith(f"# {page.name[:4]}: ")


def test_the_lock_is_hashed_and_names_no_index() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    pins = re.findall(r"^([a-z0-9._-]+)==\S+ \\\n    --hash=sha256:", lock, re.M)
    assert len(pins) == len(re.findall(r"^[a-z0-9]", lock, re.M))
    assert "://" not in lock
    wanted = (ROOT / "setup.cfg").read_text().split("install_requires")[1].split("[options.pack")[0]
    for name in re.findall(r"^    ([A-Za-z][A-Za-z0-9_-]+)", wanted, re.M):
        assert name.lower().replace("_", "-") in pins, f"{name}: run `make lock`"
