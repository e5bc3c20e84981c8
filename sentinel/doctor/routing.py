"""Where Alertmanager's routes send an alert, and whether anybody is at the end of them.

Follows the tree as Alertmanager does: the first child that matches takes the alert, further
ones only behind `continue`; where no child does, the route itself. Times that mute a route are
not looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

_MATCHER: Final = re.compile(r'\s*"?([^"=!~\s{},]+)"?\s*(=~|!~|!=|=)\s*("(?:[^"\\]|\\.)*"|[^,]*)')
_ESCAPED: Final = re.compile(r"\\(.)")
_SYMBOLS: Final = {"n": "\n"}


def receivers(config: Mapping[str, Any], labels: Mapping[str, str]) -> tuple[str, ...]:
    """The receivers of an alert with these labels, in the order of the routes.

    Raises ValueError where the configuration is none that can be followed.
    """
    route = config.get("route")
    if not isinstance(route, Mapping):
        raise ValueError("no route")
    return tuple(dict.fromkeys(_walk(route, labels, str(route.get("receiver", "")))))


def told(config: Mapping[str, Any], names: Sequence[str]) -> bool:
    """Whether one of these receivers passes alerts on to anything at all."""
    listed = config.get("receivers") or []
    integrated = {
        str(receiver.get("name"))
        for receiver in listed
        if isinstance(receiver, Mapping)
        and any(key.endswith("_configs") and value for key, value in receiver.items())
    }
    return any(name in integrated for name in names)


def _walk(route: Mapping[str, Any], labels: Mapping[str, str], inherited: str) -> Iterator[str]:
    receiver = str(route.get("receiver") or inherited)
    taken = False
    for child in route.get("routes") or []:
        if not _matches(child, labels):
            continue
        taken = True
        yield from _walk(child, labels, receiver)
        if not child.get("continue"):
            break
    if not taken:
        yield receiver


def _matches(route: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    equal = all(labels.get(k, "") == str(v) for k, v in (route.get("match") or {}).items())
    like = all(_like(v, labels.get(k, "")) for k, v in (route.get("match_re") or {}).items())
    return equal and like and all(_fits(text, labels) for text in route.get("matchers") or [])


def _fits(text: Any, labels: Mapping[str, str]) -> bool:
    """One line of matchers; several stand behind commas, in braces or not."""
    inside = str(text).strip().removeprefix("{").removesuffix("}")
    place, fits = 0, True
    while inside[place:].strip(" ,"):
        found = _MATCHER.match(inside, place)
        if found is None:
            raise ValueError(f"a matcher that cannot be read: {text}")
        name, operator, quoted = found.groups()
        value = _unquoted(quoted)
        actual = labels.get(name, "")
        holds = {
            "=": actual == value,
            "!=": actual != value,
            "=~": _like(value, actual),
            "!~": not _like(value, actual),
        }[operator]
        fits = fits and holds
        place = found.end()
        while place < len(inside) and inside[place] in " ,":
            place += 1
    return fits


def _unquoted(text: str) -> str:
    text = text.strip()
    if len(text) >= 2 and text[0] == text[-1] == '"':
        return _ESCAPED.sub(lambda m: _SYMBOLS.get(m.group(1), m.group(1)), text[1:-1])
    return text


def _like(pattern: Any, value: str) -> bool:
    try:
        return re.fullmatch(str(pattern), value, re.DOTALL) is not None
    except re.error as err:
        raise ValueError(f"a pattern that cannot be read: {pattern}: {err}") from err
