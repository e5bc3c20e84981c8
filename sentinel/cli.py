"""The command line: `sentinel`, or `python -m sentinel.cli`.

Reading and changing commands talk HTTP to a running daemon and nothing else; `run`, `learn`
and `backtest` read the configuration. Results go to stdout, everything else to stderr.

Exit codes: 0 ok, 1 a finding (not ready, not there, not adopted, a step is missing), 2 the
configuration or the command line, 3 a dependency that is unreachable or wrong, 4 the state, 70 a
bug.
"""

from __future__ import annotations

import io
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from sentinel import __version__, configfile, display, remote, remotepatterns
from sentinel.config import Config
from sentinel.errors import ConfigError, DependencyError, SentinelError, StateError
from sentinel.options import When, as_json, config_file, print_json

INTERNAL: Final = 70
Report = Callable[[float, str], None]


def main() -> None:
    """Runs a command and ends the process: one line on stderr for each error, no traceback."""
    debug = "--debug" in sys.argv[1:] or bool(os.environ.get("SENTINEL_DEBUG"))
    try:
        sys.exit(cli.main(prog_name="sentinel", standalone_mode=False) or 0)
    except click.exceptions.Exit as err:
        sys.exit(err.exit_code)
    except click.ClickException as err:
        err.show()
        sys.exit(err.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except BrokenPipeError:  # `sentinel gpus | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except SentinelError as err:
        _tell(err, debug)
        sys.exit(err.exit_code)
    except Exception as err:
        _tell(err, debug, "internal error, please report it (--debug shows where): ")
        sys.exit(INTERNAL)


def _tell(err: Exception, debug: bool, before: str = "") -> None:
    if debug:
        traceback.print_exc()
    for line in (str(err) or repr(err)).splitlines():
        click.echo(f"sentinel: {before}{line}", err=True)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="sentinel")
@click.option("--debug", is_flag=True, help="Show where an error comes from.")
def cli(debug: bool) -> None:
    """Watches a GPU fleet, explains what goes wrong, and moves work off failing GPUs."""


# ---- running ------------------------------------------------------------------------


@cli.command()
@config_file
def run(config: Path) -> int:
    """Watch, until stopped."""
    loaded = Config.load(config)
    loaded.check_files()
    from sentinel.daemon import run_daemon

    return run_daemon(loaded)


@cli.command(short_help="Look at all of it, and say what to fix first.")
@config_file
@click.option("--for", "for_s", type=click.FloatRange(min=5), default=120.0, show_default=True,
              help="Longest time it may take, in seconds.")  # fmt: skip
@click.option(
    "--full", is_flag=True, help="Leave nothing out: every metric, every piece of advice."
)
@as_json
def doctor(config: Path, for_s: float, full: bool, json_output: bool) -> int:
    """Look at all that the configuration names, and say what to fix first. Changes nothing."""
    from sentinel.doctor import examine, show

    try:
        loaded = Config.load(config)
    except ConfigError as err:
        if not json_output:
            raise
        found = examine.misconfigured(str(config), err)
    else:
        with _progress() as report:
            found = examine.examine(loaded, within_s=for_s, progress=report)
    if json_output:
        print_json(found.plain())
    else:
        plain = not sys.stdout.encoding.lower().startswith("utf")
        if plain and isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # for names that others have given
        display.show(show.report(found, full=full, plain=plain))
    return found.exit_code


@cli.command()
@config_file
@click.option("--start", type=When(), help="Learn from here on.  [default: learn.window_h back]")
@click.option("--end", type=When(), default="now", show_default=True, help="Up to here.")
@click.option("--patterns", "patterns_only", is_flag=True,
              help="Only fault patterns, from incidents; no Prometheus is asked.")  # fmt: skip
@click.option("--force", is_flag=True, help="Adopt it though it compares badly with the last one.")
@click.option(
    "--html",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    metavar="FILE",
    help="Write the report as a page with plots, too.",
)
@as_json
def learn(
    config: Path,
    start: float | None,
    end: float,
    patterns_only: bool,
    force: bool,
    html: Path | None,
    json_output: bool,
) -> int:
    """Learn what is normal, and write a bundle that `run` reads; and what fails alike, from the
    incidents that a daemon has written down.

    A bundle that compares badly with the one in use is kept and not adopted: exit code 1, with
    the reasons; --force adopts it.
    """
    loaded = Config.load(config)
    from sentinel.relearn import relearn

    try:
        found = relearn(loaded)
    except StateError as err:
        if patterns_only:
            raise
        click.echo(f"sentinel: fault patterns are not learnt: {err}", err=True)
        found = {"incidents": 0, "novel": 0, "patterns": []}
    if patterns_only:
        print_json({"schema": 1, **found}) if json_output else display.show(display.relearnt(found))
        return 0
    start_s = end - 3600.0 * loaded.learn.window_h if start is None else start
    _check_window(start_s, end, "--start", "--end")
    from sentinel import history

    now_s = time.time()
    exclusions = history.read_exclusions(loaded, now_s=now_s)
    with _progress() as report:
        made = history.learn(
            loaded, start_s, end, progress=report, exclusions=exclusions, now_s=now_s, force=force
        )
    told = history.plain(made, loaded) | {"fault_patterns": found}
    if html is not None:
        from sentinel.learnpage import page

        _write(html, page(told))
    if json_output:
        print_json(told)
    else:
        display.show(display.learnt(told))
        display.show(display.bundle(told, made.bundle.grid_s))
        if found["incidents"]:
            display.show(display.relearnt(found))
    return 1 if made.refused else 0


@cli.command(short_help="Tell what would have alerted and moved.")
@config_file
@click.option("--start", type=When(), required=True, help="First moment to replay.")
@click.option("--end", type=When(), default="now", show_default=True, help="Last moment.")
@click.option("--learn-start", type=When(), help="Learn first, from here on.")
@click.option("--learn-end", type=When(), help="Up to here.  [default: --start]")
@as_json
def backtest(
    config: Path,
    start: float,
    end: float,
    learn_start: float | None,
    learn_end: float | None,
    json_output: bool,
) -> None:
    """Tell what would have alerted and moved, on your own history. Nothing is acted on."""
    loaded = Config.load(config)
    _check_window(start, end, "--start", "--end")
    if learn_start is None and learn_end is not None:
        raise click.UsageError("--learn-end needs --learn-start")
    if learn_start is not None:
        learn_end = start if learn_end is None else learn_end
        _check_window(learn_start, learn_end, "--learn-start", "--learn-end")
    from sentinel.backtest import backtest as replay

    with _progress() as report:
        found = replay(
            loaded, start, end, learn_start_s=learn_start, learn_end_s=learn_end, progress=report
        )
    if json_output:
        print_json(found)
    else:
        display.show(display.backtest(found))


@cli.command(short_help="Show the whole story on a simulated fleet.")
@click.option("--for", "for_s", type=click.FloatRange(min=1), default=240.0, show_default=True,
              help="Longest time it may take, in seconds.")  # fmt: skip
@click.option("--fault", help="What goes wrong; see --list-faults.")
@click.option("--list-faults", is_flag=True, help="List what can go wrong, and end.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of the simulated fleet.")
@click.option("--keep", is_flag=True, help="Keep logs and data, and say where they are.")
@as_json
def demo(
    for_s: float, fault: str | None, list_faults: bool, seed: int, keep: bool, json_output: bool
) -> int:
    """Show the whole story on a simulated fleet with a real Prometheus and Alertmanager."""
    try:
        from sentinel.lab import demo as lab
    except ImportError as err:
        raise DependencyError(
            f"the demonstration needs the extra `lab` ({err}): pip install 'gpu-sentinel[lab]'"
        ) from err
    if list_faults:
        if json_output:
            print_json(dict(lab.FAULTS))
        else:
            width = max(map(len, lab.FAULTS))
            for name, text in lab.FAULTS.items():
                click.echo(f"{name:{width}}  {text}")
        return 0
    name = fault or lab.DEFAULT_FAULT
    if name not in lab.FAULTS:
        raise click.BadParameter(
            f"{name!r} is none of {', '.join(lab.FAULTS)}", param_hint="--fault"
        )
    return lab.run_demo(for_s=for_s, json_output=json_output, fault=name, seed=seed, keep=keep)


@cli.command(short_help="Serve this host's NVIDIA GPUs to Prometheus.")
@click.option("--listen", default="127.0.0.1:9478", show_default=True, help="Where to serve.")
@click.option("--deadline", "deadline_s", type=click.FloatRange(0.1, 60.0), default=1.5,
              show_default=True, help="Longest a scrape waits for GPUs, in seconds.")  # fmt: skip
@click.option("--hostname", help="Value of the label Hostname.  [default: the system's]")
@click.option("--per-process", is_flag=True, help="Tell the memory of each process too.")
@click.option("--json-log", is_flag=True, help="Log in JSON lines.")
@click.option("--once", is_flag=True, help="Print one exposition, and end.")
def exporter(
    listen: str,
    deadline_s: float,
    hostname: str | None,
    per_process: bool,
    json_log: bool,
    once: bool,
) -> int:
    """Serve this host's NVIDIA GPUs to Prometheus, read through NVML. Needs no configuration."""
    from sentinel.exporter import server

    host = hostname or socket.gethostname()
    if once:
        return server.run_once(
            deadline_s,
            hostname=host,
            per_process=per_process,
            write=lambda text: click.echo(text, nl=False),
        )
    return server.run_exporter(
        listen, deadline_s, hostname=host, per_process=per_process, json_lines=json_log
    )


for _command in (*remote.COMMANDS, remotepatterns.patterns):
    cli.add_command(_command)


# ---- configuration ------------------------------------------------------------------


@cli.group()
def config() -> None:
    """Check and document configuration files."""


@config.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@as_json
def check(file: Path, json_output: bool) -> int:
    """Check FILE and the secrets that it names; every mistake is told at once."""
    try:
        Config.load(file).check_files()
    except SentinelError as err:
        if not json_output:
            raise
        problems = [
            {"line": p.line, "key": p.key, "text": p.text} for p in getattr(err, "problems", ())
        ]
        lines = [{"line": 0, "key": "", "text": line} for line in str(err).splitlines()]
        print_json({"ok": False, "file": str(file), "problems": problems or lines})
        return err.exit_code
    if json_output:
        print_json({"ok": True, "file": str(file), "problems": []})
    else:
        click.echo(f"{file}: ok")
    return 0


@config.command()
def example() -> None:
    """Print a commented configuration file with every key."""
    click.echo(configfile.example_file(Config), nl=False)


@config.command()
def schema() -> None:
    """Print the JSON Schema of the configuration."""
    print_json(Config.model_json_schema())


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as err:
        raise StateError(f"{path}: cannot be written ({err.strerror or err})") from err


def _check_window(start_s: float, end_s: float, start: str, end: str) -> None:
    if start_s >= end_s:
        raise click.UsageError(f"{start} must be before {end}")


@contextmanager
def _progress() -> Iterator[Report]:
    """A bar on stderr while a terminal looks on; nothing otherwise."""
    columns = (
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("starting", total=1.0)

        def report(share: float, what: str) -> None:
            bar.update(task, completed=share, description=what)

        yield report


if __name__ == "__main__":
    main()
