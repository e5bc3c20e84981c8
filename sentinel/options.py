"""Options and output that several commands share."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from sentinel import apiclient

_UNITS_S: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}

F = TypeVar("F", bound=Callable[..., Any])


class When(click.ParamType[float]):
    """RFC 3339, seconds since 1970, `now`, or back from now: `-2h`."""

    name = "time"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if isinstance(value, (int, float)):
            return float(value)
        try:
            return parse_time(str(value), time.time())
        except ValueError as err:
            self.fail(str(err), param, ctx)


def parse_time(text: str, now_s: float) -> float:
    """Seconds since 1970. Raises ValueError that shows how a time is written."""
    text = text.strip()
    if text == "now":
        return now_s
    back = re.fullmatch(r"-(\d+(?:\.\d+)?)([smhdw])", text)
    if back:
        return now_s - float(back[1]) * _UNITS_S[back[2]]
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    try:
        at = datetime.fromisoformat(text.replace("Z", "+00:00").replace("z", "+00:00"))
    except ValueError:
        raise ValueError(
            f"{text!r} is no time: write 2026-01-31T12:00:00Z, seconds since 1970, now, or -2h"
        ) from None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def _stacked(*options: Callable[[F], F]) -> Callable[[F], F]:
    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


as_json = click.option("--json", "json_output", is_flag=True, help="JSON on stdout.")
config_file = click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    default="sentinel.yaml",
    envvar="SENTINEL_CONFIG",
    show_default=True,
    show_envvar=True,
    help="Configuration file.",
)
at_daemon = _stacked(
    click.option("--url", help=f"The daemon's URL.  [env: {apiclient.URL_ENV}]"),
    click.option(
        "--config",
        type=click.Path(dir_okay=False, path_type=Path),
        envvar="SENTINEL_CONFIG",
        show_envvar=True,
        help="Configuration to take the URL and the token from.",
    ),
)
ordering = _stacked(
    at_daemon,
    click.option(
        "--token-file",
        type=click.Path(dir_okay=False, path_type=Path),
        help="File with the daemon's token.  [env: SENTINEL_TOKEN, the token itself]",
    ),
    click.option("--reason", default="", help="Why; it is written into the journal."),
    as_json,
)


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, default=str))
