"""The command line: what it prints, and the code it ends with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console, RenderableType

from sentinel import apiclient, configfile, display, remote, remotepatterns
from sentinel.cli import INTERNAL, main
from sentinel.config import Config
from sentinel.core import domain
from sentinel.core.budget import thresholds
from sentinel.core.policy import Budget
from sentinel.edges.bundle import Refusal
from sentinel.lab.loopback import Answer, server
from sentinel.options import parse_time
from tests.web.moment import TOKEN, Face, moment

URL = 'prometheus: {url: "http://127.0.0.1:9"}\n'


@dataclass(frozen=True)
class Done:
    stdout: str
    stderr: str


class Cli:
    """Runs commands as the process would, with no settings of this machine."""

    def __init__(
        self, folder: Path, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch
    ) -> None:
        self.folder = folder
        self.env = {"COLUMNS": "200"}
        self._capsys = capsys
        self._patch = patch

    def __call__(self, *args: str, code: int = 0) -> Done:
        with self._patch.context() as here:
            here.chdir(self.folder)
            here.setattr(sys, "argv", ["sentinel", *args])
            for name in [n for n in os.environ if n.startswith("SENTINEL_")]:
                here.delenv(name)
            for name, text in self.env.items():
                here.setenv(name, text)
            with pytest.raises(SystemExit) as end:
                main()
        done = Done(*self._capsys.readouterr())
        assert (end.value.code or 0) == code, done.stderr
        assert "Traceback" not in done.stderr
        return done

    def json(self, *args: str, code: int = 0) -> Any:
        return json.loads(self(*args, "--json", code=code).stdout)


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    folder = tmp_path / "cwd"
    folder.mkdir()
    return Cli(folder, capsys, monkeypatch)


@pytest.fixture
def at(cli: Cli, client: httpx.Client) -> Cli:
    """The same, told where a daemon is and its token."""
    cli.env |= {"SENTINEL_URL": str(client.base_url), "SENTINEL_TOKEN": TOKEN}
    return cli


# ---- reading ------------------------------------------------------------------------


def test_reading_commands_show_tables_and_give_the_api_as_json(at: Cli) -> None:
    for command, told in {
        "status": ["ready", "mode", "act", "3 of 4 report", "node-9", "http://b:9093 down"],
        "gpus": ["GPU-0-1", "deviant", "1.62", "job train-7"],
        "incidents": ["inc-1", "confirmed", "gpu GPU-0-1", "12 C above its normal"],
        "migrations": ["op-1", "running", "node-1"],
    }.items():
        shown = at(command).stdout
        assert all(text in shown for text in told), shown
        assert at.json(command)["schema"] == 1


def test_status_says_what_the_budget_asks_and_why_nothing_pages(at: Cli, face: Face) -> None:
    shown = at("status").stdout
    assert "1 of 2 pages this week; the next needs a score of 1.30, from normal time" in shown
    assert "1 deviation was written down only" in shown
    left = Refusal("b-2", 1.0, ("its edge lies at 3.00, 1.50 until now",))
    face.now = moment(limits=thresholds({}, None, Budget(), 1.0), refused=left)
    shown = at("status").stdout
    assert "none yet, no baseline has been learnt yet" in shown
    assert "its edge lies at 3.00" in shown


def test_filters_reach_the_daemon(at: Cli) -> None:
    assert at.json("gpus", "--kind", "unknown")["total"] == 1
    assert at.json("gpus", "--limit", "2")["gpus"][1]["uuid"] == "GPU-1-1"
    assert at.json("incidents", "--all")["total"] == 2
    assert at.json("migrations", "--phase", "done")["migrations"][0]["operation_id"] == "op-0"
    assert "no incidents" in at("incidents", "--node", "node-7").stdout


def test_filters_take_what_the_daemon_takes() -> None:
    assert set(remote.KINDS) == set(domain.Kind)
    assert set(remote.SEVERITIES) == set(domain.Severity)
    assert set(remote.PHASES) == set(domain.MigrationPhase)


def test_status_of_a_daemon_that_is_not_ready_is_a_finding(at: Cli, face: Face) -> None:
    face.now = moment(tick=moment().tick.failed("disk full"))
    assert "NOT READY" in at("status", code=1).stdout
    assert at.json("status", code=1)["reasons"] == ["the last tick failed: disk full"]


def test_what_was_learnt_says_from_how_much() -> None:
    made = {"bundle_id": "bundle-1", "path": "/b", "gpus": 8, "cohorts": [{"gpus": 6}]}
    assert "from 6 of 8 GPUs, 30 rows of 60 s" in drawn(display.bundle(made | {"rows": 30}, 60.0))
    assert "5 min of a GPU: learn again" in drawn(display.bundle(made | {"rows": 30}, 60.0))
    assert "learn again" not in drawn(display.bundle(made | {"rows": 6 * 1440}, 60.0))


def test_a_backtest_says_what_held_an_order_back_and_that_there_was_no_gpu() -> None:
    held = {"action": "fence", "allowed": False, "blocked_by": "fenced_percent"}
    seen = {
        "subject": {"kind": "gpu", "id": "GPU-1"},
        "host": "node-1",
        "confirmed_at": "2023-11-14T22:13:20Z",
        "alertname": "SentinelGpuFault",
        "severity": "critical",
        "pattern": "off the bus",
        "would_migrate": False,
    }
    coverage = {"gpu_days": 2.0, "blind_gpu_days": 0.5}
    report = {"incidents": [seen | {"decisions": [held]}], "coverage": coverage}
    told = drawn(display.backtest(report))
    assert "no: fenced_percent" in told
    assert "1 incident in 2 GPU-days, 0.5 of them blind" in told
    none = {"incidents": [], "coverage": {"gpu_days": 0.0, "blind_gpu_days": 0.0}}
    assert "no GPU reported in this time" in drawn(display.backtest(none))


def test_a_backtest_says_what_the_budget_did() -> None:
    pages = {"told": 0, "allowed": 1.5, "score": None, "calibrated": 1.3, "highest": 1.3}
    tickets = {"told": 9, "allowed": 15.0, "score": 1.4, "calibrated": 1.0, "highest": 1.62}
    budget = {"why": "it is new", "pages": pages, "tickets": tickets}
    budget["held_back"] = [{"reason": "no ticket: 1.10 is not above 1.62"}]
    coverage = {"gpu_days": 2.0, "blind_gpu_days": 0.0}
    told = drawn(display.backtest({"incidents": [], "coverage": coverage, "budget": budget}))
    assert "none may pass, it is new" in told
    assert "9 tickets by soft evidence, 15 are in the budget; the score needed rose from" in told
    assert "1 incident told less loudly than earned, such as: no ticket: 1.10" in told


def drawn(what: RenderableType) -> str:
    console = Console(width=200)
    with console.capture() as text:
        console.print(what)
    return text.get()


def test_patterns_are_shown_with_what_to_do_first(at: Cli) -> None:
    shown = at("patterns", "list").stdout
    assert all(text in shown for text in ("overheating", "2 moved, 1 reset", "10 min", "learnt-1"))
    assert at.json("patterns", "list", "--state", "confirmed")["total"] == 1
    one = at("patterns", "show", "overheating").stdout
    assert all(text in one for text in ("confirmed by ada", "inlet air", "temp +1", "inc-0"))
    assert "no pattern x-y" in at("patterns", "show", "x-y", code=1).stderr
    assert set(remotepatterns.STATES) == set(domain.PatternState)


def test_what_was_learnt_of_patterns_is_said() -> None:
    found = {"incidents": 9, "novel": 2, "patterns": [{"id": "l-1", "name": "n", "incidents": 4}]}
    told = drawn(display.relearnt(found))
    assert "9 incidents, 2 of them like nothing known" in told
    assert "learnt pattern l-1: n, 4 incidents" in told


# ---- changing -----------------------------------------------------------------------


def test_what_people_say_of_patterns_is_queued(at: Cli, face: Face) -> None:
    at("patterns", "rename", "learnt-1", "loose HBM", "--reason", "seen before")
    at("patterns", "confirm", "learnt-1")
    at("patterns", "reject", "hang")
    assert at.json("patterns", "learn")["command"]["kind"] == "learn_patterns"
    kept = face.journal.pending_commands()
    assert [(c.kind.value, c.value) for c in kept[:2]] == [
        ("rename_pattern", "loose HBM"),
        ("confirm_pattern", ""),
    ]
    assert kept[0].reason == "seen before"
    assert "another pattern" in at("patterns", "rename", "hang", "overheating", code=1).stderr


def test_changing_commands_are_queued_with_who_and_why(at: Cli, face: Face) -> None:
    at("pause", "--reason", "maintenance")
    at("resume")
    at("reset-breaker")
    at("release", "node-9")
    assert at.json("cancel", "op-1")["command"]["target"] == "op-1"
    kept = face.journal.pending_commands()
    assert [c.kind.value for c in kept] == ["pause", "resume", "reset_breaker", "release", "cancel"]
    assert kept[0].reason == "maintenance"
    assert all("@" in c.actor for c in kept)


def test_what_is_not_there_is_a_finding(at: Cli) -> None:
    assert "no operation op-9" in at("cancel", "op-9", code=1).stderr
    assert "op-0 is done already" in at("cancel", "op-0", code=1).stderr
    assert "no open incident" in at("release", "../../x?y", code=1).stderr


def test_a_wrong_or_missing_token_says_what_to_give(at: Cli) -> None:
    at.env["SENTINEL_TOKEN"] = "wrong"
    assert "missing or wrong" in at("pause", code=2).stderr
    del at.env["SENTINEL_TOKEN"]
    assert "--token-file" in at("pause", code=2).stderr
    (at.folder / "token").write_text(TOKEN + "\n")
    at("pause", "--token-file", "token")
    assert "nowhere" in at("pause", "--token-file", "nowhere", code=2).stderr


def test_a_daemon_without_a_token_says_so(
    cli: Cli,
    face: Face,
    serve: Callable[..., httpx.Client],
) -> None:
    cli.env["SENTINEL_URL"] = str(serve(face, token=None, hook_secret=None).base_url)
    assert "http.token_file" in cli("pause", code=2).stderr


def test_url_and_token_come_from_the_configuration(cli: Cli, client: httpx.Client) -> None:
    (cli.folder / "api.token").write_text(TOKEN)
    listen = f"{client.base_url.host}:{client.base_url.port}"
    text = f"{URL}http: {{listen: '{listen}', token_file: api.token}}\n"
    (cli.folder / "s.yaml").write_text(text)
    assert cli.json("status", "--config", "s.yaml")["cluster"] == "test"
    cli("pause", "--config", "s.yaml")


# ---- daemons that do not answer -----------------------------------------------------


def test_no_daemon_is_told_in_one_line(cli: Cli) -> None:
    for command in (["status"], ["gpus", "--json"], ["pause"], ["cancel", "op-1"]):
        told = cli(*command, "--url", "http://127.0.0.1:9", code=3).stderr
        assert told.startswith("sentinel: no daemon answers at http://127.0.0.1:9 ")
        assert len(told.splitlines()) == 1
    assert "is not a URL" in cli("status", "--url", "127.0.0.1:9", code=2).stderr


@pytest.mark.parametrize("content", ["hello", [1], {"schema": 2, "ready": True}, None])
def test_something_else_on_the_port_is_told(cli: Cli, content: object) -> None:
    other = server("127.0.0.1:0", lambda _: Answer(200, content))
    threading.Thread(target=other.serve_forever, args=(0.02,), daemon=True).start()
    url = f"http://127.0.0.1:{other.server_address[1]}"
    assert "does not answer as a sentinel daemon" in cli("status", "--url", url, code=3).stderr
    other.shutdown()
    other.server_close()


def test_a_page_of_something_else_is_no_finding(cli: Cli) -> None:
    other = server("127.0.0.1:0", lambda _: Answer(404, "404 page not found"))
    threading.Thread(target=other.serve_forever, args=(0.02,), daemon=True).start()
    url = f"http://127.0.0.1:{other.server_address[1]}"
    assert "is no page of a sentinel daemon" in cli("status", "--url", url, code=3).stderr
    other.shutdown()
    other.server_close()


# ---- configuration ------------------------------------------------------------------


def test_config_check_tells_every_mistake_and_ends_with_2(cli: Cli) -> None:
    (cli.folder / "bad.yaml").write_text("prometheus: {url: x}\nmood: good\n")
    told = cli("config", "check", "bad.yaml", code=2).stderr.splitlines()
    assert len(told) == 2
    assert told[0].startswith("sentinel: bad.yaml:1: prometheus.url:")
    found = cli.json("config", "check", "bad.yaml", code=2)
    assert [(p["line"], p["key"]) for p in found["problems"]] == [
        (1, "prometheus.url"),
        (2, "mood"),
    ]


def test_config_check_reads_the_secrets_too(cli: Cli) -> None:
    (cli.folder / "s.yaml").write_text(URL + "http: {token_file: api.token}\n")
    assert "http.token_file" in cli("config", "check", "s.yaml", code=2).stderr
    (cli.folder / "api.token").write_text("0123456789abcdef")
    assert cli("config", "check", "s.yaml").stdout == "s.yaml: ok\n"


def test_config_example_can_be_checked_as_it_is(cli: Cli) -> None:
    text = cli("config", "example").stdout
    assert text == configfile.example_file(Config)
    (cli.folder / "example.yaml").write_text(text)
    cli("config", "check", "example.yaml")
    assert json.loads(cli("config", "schema").stdout)["required"] == ["prometheus"]


def test_commands_that_need_a_configuration_tell_its_mistakes(cli: Cli) -> None:
    for command in (["run"], ["learn"], ["backtest", "--start", "-2h"]):
        assert "sentinel.yaml: cannot be read" in cli(*command, code=2).stderr
    (cli.folder / "sentinel.yaml").write_text("mode: act\n")
    assert "prometheus.url: is required" in cli("run", code=2).stderr


# ---- the command line itself --------------------------------------------------------


def test_wrong_use_ends_with_2_and_a_hint(cli: Cli) -> None:
    (cli.folder / "sentinel.yaml").write_text(URL)
    for args, told in {
        ("backtest",): "--start",
        ("backtest", "--start", "yesterday"): "'yesterday' is no time",
        ("backtest", "--start", "-1h", "--end", "-2h"): "--start must be before --end",
        ("backtest", "--start", "-1h", "--learn-end", "-2h"): "--learn-end needs --learn-start",
        ("demo", "--fault", "gremlins"): "'gremlins' is none of",
        ("gpus", "--kind", "sick"): "'sick' is not one of 'normal', 'deviant'",
        ("incidents", "--severity", "high"): "'high' is not one of 'critical'",
        ("migrations", "--phase", "over"): "'over' is not one of 'proposed'",
        ("stauts",): "No such command 'stauts'",
    }.items():
        assert told in cli(*args, code=2).stderr


def test_help_names_every_command(cli: Cli) -> None:
    told = cli("--help").stdout
    names = "run learn backtest demo status gpus incidents migrations cancel release pause resume"
    for name in (*names.split(), "reset-breaker", "config"):
        assert f"\n  {name} " in told
    assert "0.1.0" in cli("--version").stdout


def test_a_bug_is_one_line_unless_it_is_asked_for(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("the reactor is on fire")

    monkeypatch.setattr(apiclient, "connect", broken)
    told = cli("status", code=INTERNAL).stderr
    assert len(told.splitlines()) == 1
    assert "the reactor is on fire" in told
    with pytest.raises(AssertionError, match="Traceback"):
        cli("--debug", "status", code=INTERNAL)


def test_the_module_is_the_command_too(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "sentinel.cli", "status", "--url", "http://127.0.0.1:9"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert done.stderr.startswith("sentinel: no daemon answers")


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m sentinel.cli config example | head -n 1"
    shell = ["bash", "-o", "pipefail", "-c", command]
    done = subprocess.run(shell, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_list_faults_needs_no_fleet(cli: Cli) -> None:
    assert "off-the-bus" in cli("demo", "--list-faults").stdout
    assert "thermal" in cli.json("demo", "--list-faults")


@pytest.mark.parametrize(
    ("text", "at_s"),
    [
        ("now", 1000.0),
        ("-2h", -6200.0),
        ("-1.5m", 910.0),
        ("1700000000.5", 1700000000.5),
        ("2023-11-14T22:13:20Z", 1700000000.0),
        ("2023-11-14T23:13:20+01:00", 1700000000.0),
        ("2023-11-14T22:13:20", 1700000000.0),
    ],
)
def test_times_are_written_in_four_ways(text: str, at_s: float) -> None:
    assert parse_time(text, 1000.0) == at_s


@pytest.mark.parametrize("text", ["", "soon", "-2", "2h", "-2y", "2023-13-01"])
def test_what_is_no_time_is_told(text: str) -> None:
    with pytest.raises(ValueError, match="is no time"):
        parse_time(text, 1000.0)
