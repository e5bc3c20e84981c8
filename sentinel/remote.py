"""Commands that ask or tell a running daemon, over HTTP and nothing else."""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from sentinel import apiclient, display
from sentinel.options import as_json, at_daemon, ordering, print_json

# what the daemon's API takes; written out, for these commands know nothing of its core
KINDS: Final = ("normal", "deviant", "fault", "lost", "unknown")
SEVERITIES: Final = ("critical", "warning", "info")
PHASES: Final = (
    *("proposed", "planned", "sent", "running", "unknown", "verifying"),
    *("done", "cancelled", "refused", "failed", "stuck"),
)


@click.command(short_help="Tell how the daemon fares.")
@at_daemon
@as_json
def status(url: str | None, config: Path | None, json_output: bool) -> int:
    """Tell how the daemon fares; exit code 1 when it is not ready."""
    answer = apiclient.connect(url, config, None).get("status")
    show(answer, json_output, display.status)
    return 0 if answer["ready"] else 1


@click.command()
@at_daemon
@click.option("--kind", type=click.Choice(KINDS), help="Only these.")
@click.option("--node", help="Only this node.")
@click.option("--model", help="Only this GPU model.")
@click.option("--job", help="Only where this work runs.")
@click.option("--limit", type=click.IntRange(min=1), help="At most so many, worst first.")
@as_json
def gpus(
    url: str | None,
    config: Path | None,
    kind: str | None,
    node: str | None,
    model: str | None,
    job: str | None,
    limit: int | None,
    json_output: bool,
) -> None:
    """List the GPUs, worst first."""
    client = apiclient.connect(url, config, None)
    answer = client.get("gpus", kind=kind, node=node, model=model, job=job, limit=limit)
    show(answer, json_output, display.gpus)


@click.command()
@at_daemon
@click.option("--all", "every", is_flag=True, help="The resolved ones too.")
@click.option("--severity", type=click.Choice(SEVERITIES), help="Only these.")
@click.option("--node", help="Only this node.")
@click.option("--limit", type=click.IntRange(min=1), help="At most so many, newest first.")
@as_json
def incidents(
    url: str | None,
    config: Path | None,
    every: bool,
    severity: str | None,
    node: str | None,
    limit: int | None,
    json_output: bool,
) -> None:
    """List the incidents, newest first."""
    client = apiclient.connect(url, config, None)
    state = "all" if every else "open"
    answer = client.get("incidents", state=state, severity=severity, node=node, limit=limit)
    show(answer, json_output, display.incidents)


@click.command()
@at_daemon
@click.option("--all", "every", is_flag=True, help="Those that are over, too.")
@click.option("--phase", type=click.Choice(PHASES), help="Only these, over or not.")
@click.option("--node", help="Only away from this node.")
@click.option("--limit", type=click.IntRange(min=1), help="At most so many, newest first.")
@as_json
def migrations(
    url: str | None,
    config: Path | None,
    every: bool,
    phase: str | None,
    node: str | None,
    limit: int | None,
    json_output: bool,
) -> None:
    """List fences, moves and unfences, newest first."""
    client = apiclient.connect(url, config, None)
    state = "all" if every or phase else "open"
    answer = client.get("migrations", state=state, phase=phase, node=node, limit=limit)
    show(answer, json_output, display.migrations)


# ---- changing -----------------------------------------------------------------------


@click.command()
@click.argument("operation_id")
@ordering
def cancel(operation_id: str, **options: Any) -> None:
    """Cancel a fence or move that has not been sent."""
    order(f"migrations/{apiclient.segment(operation_id)}/cancel", **options)


@click.command(short_help="Release an incident, a node or a GPU.")
@click.argument("target")
@ordering
def release(target: str, **options: Any) -> None:
    """Release an incident, a node or a GPU, and give a fenced node back."""
    order("release", {"target": target}, **options)


@click.command()
@ordering
def pause(**options: Any) -> None:
    """Stop all new action; watching and alerting go on."""
    order("pause", **options)


@click.command()
@ordering
def resume(**options: Any) -> None:
    """End a pause."""
    order("resume", **options)


@click.command("reset-breaker")
@ordering
def reset_breaker(**options: Any) -> None:
    """Let action go on after the breaker latched."""
    order("breaker/reset", **options)


def order(
    path: str,
    body: dict[str, str] | None = None,
    *,
    url: str | None,
    config: Path | None,
    token_file: Path | None,
    reason: str,
    json_output: bool,
) -> None:
    """Sends one command, and says that it is on disk."""
    client = apiclient.connect(url, config, token_file)
    answer = client.post(path, actor=_actor(), reason=reason, **(body or {}))
    if json_output:
        print_json(answer)
    else:
        made = answer["command"]
        what = f"{made['kind']} {made['target']}".strip()
        click.echo(f"command {made['id']} ({what}) is on disk; the next tick carries it out")


def _actor() -> str:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # no such user in this container
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def show(answer: Any, json_output: bool, render: Callable[[Any], Any]) -> None:
    """An answer, as JSON or as people read it."""
    if json_output:
        print_json(answer)
    else:
        display.show(render(answer))


COMMANDS = (
    status,
    gpus,
    incidents,
    migrations,
    cancel,
    release,
    pause,
    resume,
    reset_breaker,
)
