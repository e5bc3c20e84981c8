"""Commands about fault patterns: what is known, and what people say of it. HTTP alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click

from sentinel import apiclient, display
from sentinel.options import as_json, at_daemon, ordering
from sentinel.remote import order, show

STATES: Final = ("proposed", "confirmed", "rejected")


@click.group()
def patterns() -> None:
    """List the ways in which GPUs fail, and say what you make of them."""


@patterns.command("list")
@at_daemon
@click.option("--state", type=click.Choice(STATES), help="Only these.")
@as_json
def list_patterns(
    url: str | None, config: Path | None, state: str | None, json_output: bool
) -> None:
    """List the fault patterns, those with most incidents first."""
    answer = apiclient.connect(url, config, None).get("patterns", state=state)
    show(answer, json_output, display.patterns)


@patterns.command("show")
@click.argument("pattern_id")
@at_daemon
@click.option("--limit", type=click.IntRange(min=1), help="At most so many incidents.")
@as_json
def show_pattern(
    pattern_id: str, url: str | None, config: Path | None, limit: int | None, json_output: bool
) -> None:
    """Show a pattern, what to do first, and the newest incidents like it."""
    client = apiclient.connect(url, config, None)
    answer = client.get(f"patterns/{apiclient.segment(pattern_id)}", limit=limit)
    show(answer, json_output, display.pattern)


@patterns.command()
@click.argument("pattern_id")
@click.argument("name")
@ordering
def rename(pattern_id: str, name: str, **options: Any) -> None:
    """Give a pattern the name that people here use. It stays."""
    order(f"patterns/{apiclient.segment(pattern_id)}/rename", {"name": name}, **options)


@patterns.command()
@click.argument("pattern_id")
@ordering
def confirm(pattern_id: str, **options: Any) -> None:
    """Keep a pattern as it is, whatever is learnt later."""
    order(f"patterns/{apiclient.segment(pattern_id)}/confirm", **options)


@patterns.command()
@click.argument("pattern_id")
@ordering
def reject(pattern_id: str, **options: Any) -> None:
    """Name nothing by this pattern any more."""
    order(f"patterns/{apiclient.segment(pattern_id)}/reject", **options)


@patterns.command("learn")
@ordering
def learn_patterns(**options: Any) -> None:
    """Learn patterns anew from all incidents. The daemon does so by itself, too."""
    order("patterns/learn", **options)
