"""From YAML to a validated model, and from models back to documentation.

Decides how a mistake in a configuration file is told: every mistake of a file at once, each
with file, line, key, value and what to do. It knows nothing of the keys themselves.
"""

from __future__ import annotations

import difflib
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from sentinel.errors import ConfigError

KeyPath = tuple[str | int, ...]
M = TypeVar("M", bound=BaseModel)

_SHOWN: Final = 60  # characters of a wrong value that are repeated

_EXAMPLE_HEADING: Final = """\
GPU Sentinel's configuration. Check it with `sentinel config check FILE`.

Only prometheus.url is required. A line that begins with # and a key shows the default:
take the # away, from the section above it too, to change it. Times are in seconds where a
key ends in _s. Relative paths are relative to this file. This file is made by
`sentinel config example`."""

_REFERENCE_HEADING: Final = """\
# Configuration

One YAML file, given with `--config`. Every key has a default except `prometheus.url`; unknown
keys and keys given twice are errors, and all mistakes of a file are told at once
(`sentinel config check FILE`, exit code 2). `auto` follows the tick. Relative paths are
relative to the file. Secrets are never in it: they come from files (`*_file`) or from the
environment, which wins over the file: `SENTINEL_TOKEN`, `SENTINEL_HOOK_SECRET`,
`SENTINEL_PROMETHEUS_TOKEN`, `SENTINEL_PROMETHEUS_PASSWORD`, `SENTINEL_PROMETHEUS_HEADER_*`,
`SENTINEL_ALERTMANAGER_TOKEN`, `SENTINEL_ALERTMANAGER_PASSWORD`.

This page is made from the models in `sentinel/configkeys.py` by `make generated`.

"""


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake. `line` is 0 where it has no place in the file (a missing section)."""

    source: str
    line: int
    key: str
    value: str
    text: str

    def __str__(self) -> str:
        where = f"{self.source}:{self.line}" if self.line else self.source
        subject = f" {self.key}:" if self.key else ""
        value = f" {self.value}:" if self.value else ""
        return f"{where}:{subject}{value} {self.text}"


class ConfigProblems(ConfigError):
    """All mistakes of one file; the text has one line for each."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(p) for p in problems))


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed file: plain data, and the line that each key stands on."""

    source: str
    data: dict[str, Any]
    lines: Mapping[KeyPath, int]

    def problem(self, path: KeyPath, text: str, value: object = None) -> Problem:
        shown = "" if value is None else _shown(value)
        return Problem(self.source, self.line(path), dotted(path), shown, text)

    def line(self, path: KeyPath) -> int:
        """The line of the key, or of the nearest section around it; 0 if there is none."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 0)


def parse(text: str, source: str) -> Document:
    """Reads YAML safely. Raises ConfigProblems for what is no YAML mapping or says a key twice."""
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return Document(source, {}, {})
        if not isinstance(root, yaml.MappingNode):
            text = "expected sections such as `prometheus:` at the top level"
            raise ConfigProblems([Problem(source, root.start_mark.line + 1, "", "", text)])
        lines: dict[KeyPath, int] = {}
        doubles = list(_walk(root, (), lines, source, set()))
        if doubles:
            raise ConfigProblems(doubles)
        return Document(source, loader.construct_document(root), lines)
    except yaml.MarkedYAMLError as err:
        mark = err.problem_mark or err.context_mark
        what = " ".join(part for part in (err.context, err.problem) if part)
        text = f"not valid YAML: {what}; {_yaml_hint(what)}"
        raise ConfigProblems([Problem(source, mark.line + 1 if mark else 0, "", "", text)]) from err
    except (yaml.YAMLError, ValueError, RecursionError) as err:
        text = f"not valid YAML: {str(err).splitlines()[0]}"
        raise ConfigProblems([Problem(source, 0, "", "", text)]) from err
    finally:
        loader.dispose()


def _yaml_hint(what: str) -> str:
    if r"'\t'" in what:
        return "indent with spaces, not with tabs"
    if "end of stream" in what or "<stream end>" in what:
        return "close every bracket and quote that is opened"
    return "close every bracket, and quote values that contain any of {}[]:#"


def _walk(
    node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], source: str, seen: set[int]
) -> Iterator[Problem]:
    if id(node) in seen:  # an alias: its anchor has been walked
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            lines.setdefault((*path, i), item.start_mark.line + 1)
            yield from _walk(item, (*path, i), lines, source, seen)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name: KeyPath = (*path, str(key.value))
            line = key.start_mark.line + 1
            if name in lines:
                text = f"this key is given twice, first on line {lines[name]}; keep one"
                yield Problem(source, line, dotted(name), "", text)
                continue
            lines.setdefault(name, line)
            yield from _walk(value, name, lines, source, seen)


def validate(model: type[M], document: Document) -> M:
    """The model made of the document. Raises ConfigProblems with every mistake."""
    try:
        return model.model_validate(document.data)
    except ValidationError as err:
        problems = [_told(model, document, e) for e in err.errors(include_url=False)]
        raise ConfigProblems(sorted(problems, key=lambda p: (p.line, p.key))) from None


def _told(model: type[BaseModel], document: Document, error: Any) -> Problem:
    path: KeyPath = tuple(p for p in error["loc"] if p != "[key]")
    kind, value = error["type"], error.get("input")
    if kind == "extra_forbidden":
        return document.problem(path, _unknown(model, path))
    if kind == "missing":
        inner = list(_required_below(model, path))
        return document.problem((*path, *inner[:1]), "is required")
    if kind in ("model_type", "model_attributes_type"):
        text = f"expected a section with keys {', '.join(_keys_at(model, path))}"
        if isinstance(value, str) and re.match(r"\w+:\S", value):
            text = f"write a space after the colon of a key; {text}"
        return document.problem(path, text, value)
    text = str(error["msg"]).removeprefix("Value error, ")
    if kind == "string_type" and isinstance(value, (dict, list)):
        text += "; put the whole value in single quotes"
    return document.problem(path, text[0].lower() + text[1:], value)


def _unknown(model: type[BaseModel], path: KeyPath) -> str:
    known = list(_keys_at(model, path[:-1]))
    near = difflib.get_close_matches(str(path[-1]), known, n=1)
    if near:
        return f"unknown key; did you mean {near[0]}?"
    return f"unknown key; known here: {', '.join(known)}"


def _keys_at(model: type[BaseModel], path: KeyPath) -> Iterator[str]:
    inner: type[BaseModel] | None = model
    for name in path:
        if isinstance(name, int):
            continue
        inner = section_of(_fields(inner)[name]) if inner and name in _fields(inner) else None
    yield from _fields(inner) if inner else ()


def _required_below(model: type[BaseModel], path: KeyPath) -> Iterator[str]:
    inner: type[BaseModel] | None = model
    for name in path:
        if isinstance(name, str):
            inner = section_of(_fields(inner)[name]) if inner else None
    if inner is not None:
        yield from (name for name, field in _fields(inner).items() if field.is_required())


def _fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """By the name that stands in the file."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The model behind a field, also behind `| None` and `tuple[..., ...]`."""
    return _model_in(field.annotation)


def _model_in(kind: Any) -> type[BaseModel] | None:
    if isinstance(kind, type) and not isinstance(kind, types.GenericAlias):
        return kind if issubclass(kind, BaseModel) else None
    return next((m for a in typing.get_args(kind) if (m := _model_in(a))), None)


def dotted(path: KeyPath) -> str:
    """`alertmanager.urls[1]`, as people write it."""
    out = ""
    for part in path:
        out += f"[{part}]" if isinstance(part, int) else f".{part}" if out else part
    return out


def _shown(value: object) -> str:
    text = re.sub(r"//[^/@]*@", "//***@", repr(value))  # a password in a URL
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


# ---- documentation ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Key:
    """One documented key. `value` is its default, or an example where it has none."""

    path: tuple[str, ...]
    text: str
    unit: str
    value: Any
    required: bool
    allowed: str
    is_example: bool = False


def keys(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[Key]:
    """Every key below a model, in order; a section comes before its keys (unit "section")."""
    for name, field in _fields(model).items():
        here = (*path, name)
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield Key(here, field.description or "", "section", None, field.is_required(), "")
            yield from keys(inner, here)
            continue
        shown = "example" in extra
        value = extra["example"] if shown else field.get_default(call_default_factory=True)
        unit, text = str(extra.get("unit", "")), field.description or ""
        yield Key(here, text, unit, value, field.is_required(), _allowed(field), shown)


def _allowed(field: FieldInfo) -> str:
    for kind in (field.annotation, *typing.get_args(field.annotation)):
        if typing.get_origin(kind) is typing.Literal:
            return " | ".join(str(a) for a in typing.get_args(kind))
    return ""


def example(model: type[BaseModel], heading: str) -> str:
    """A commented file: required keys stand, all others are commented out (`#key`) at their
    default, so that the file says what holds without it."""
    all_keys = list(keys(model))
    needed = {k.path[:n] for k in all_keys if k.required for n in range(1, len(k.path) + 1)}
    out = [f"# {line}".rstrip() for line in heading.splitlines()]
    for key in all_keys:
        indent = "  " * (len(key.path) - 1)
        if len(key.path) == 1:
            out.append("")
        out += [f"{indent}# {line}" for line in _wrap(_sentence(key), 90 - len(indent))]
        mark = "" if key.path in needed else "#"
        value = "" if key.unit == "section" else " " + _yaml(key.value)
        out.append(f"{indent}{mark}{key.path[-1]}:{value}")
    return "\n".join(out) + "\n"


def reference(model: type[BaseModel]) -> str:
    """The keys as Markdown tables, one for each section."""
    out: list[str] = []
    top = [k for k in keys(model) if len(k.path) == 1 and k.unit != "section"]
    rest = [k for k in keys(model) if k not in top]
    if top:
        out += ["## At the top level", "", *_table_head(), *map(_row, top), ""]
    for key in rest:
        if key.unit == "section":
            gap = [""] if out and out[-1].startswith("|") else []
            out += [*gap, f"## {'.'.join(key.path)}", "", key.text, "", *_table_head()]
        else:
            out.append(_row(key))
    return "\n".join(out).rstrip() + "\n"


def _table_head() -> list[str]:
    return ["| key | default | unit | meaning |", "|---|---|---|---|"]


def _row(key: Key) -> str:
    default = "none" if key.is_example else f"`{_yaml(key.value)}`"
    if key.required:
        default = "**required**"
    allowed = f" ({key.allowed.replace(' | ', ', ')})" if key.allowed else ""
    example = f" Such as `{_yaml(key.value)}`." if key.is_example else ""
    text = (key.text + allowed + example).replace("|", "\\|")
    return f"| `{'.'.join(key.path)}` | {default} | {key.unit} | {text} |"


def _sentence(key: Key) -> str:
    parts = [key.text]
    if key.allowed:
        parts.append(f"One of: {key.allowed}.")
    if key.unit and key.unit != "section":
        parts.append(f"[{key.unit}]")
    if key.required and key.unit != "section":
        parts.append("(required)")
    return " ".join(parts)


def _wrap(text: str, width: int) -> list[str]:
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    return [*lines, line] if line else lines


def _yaml(value: Any) -> str:
    """One line of YAML for a value; JSON is YAML."""
    if value is None:
        return "auto"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, str) and value.replace("_", "").isalnum() and not value.isdigit():
        return value
    return json.dumps(value, ensure_ascii=False)


def example_file(model: type[BaseModel]) -> str:
    """What `sentinel config example` prints."""
    return example(model, _EXAMPLE_HEADING)


def reference_page(model: type[BaseModel]) -> str:
    """What docs/configuration.md holds: the keys, and the model's own `notes` on some."""
    notes: Mapping[str, str] = getattr(model, "notes", {})
    more = "".join(f"\n## On {name}\n\n{text}" for name, text in notes.items())
    return _REFERENCE_HEADING + reference(model) + more
