"""What every exporter's metric means: one canonical name, unit, range and column each.

Decides nothing about a GPU. It answers three questions from plain data (data/metrics.yaml,
data/xids.yaml): which column and unit a series belongs to, which values are possible at all,
and what an Xid code stands for. A code that nobody described is a warning that acts on nothing.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sentinel.core.domain import Severity
from sentinel.core.patterns import NAMES, Book, pattern_from

ROLES: Final = ("demand", "response", "error", "state", "info")
NEEDS: Final = ("nvlink", "profiling", "memory_temp", "ecc", "row_remap", "energy", "whole")
UP: Final = "up"  # Prometheus's own verdict on a scrape
_ANY: Final = "*"  # in `where`: the label is there, whatever it says


class Fold(enum.StrEnum):
    """How several series of one GPU at one moment make one value."""

    MAX = "max"  # repeated values of the parent GPU, and ratios: the busiest slice
    SUM = "sum"  # amounts and rates that slices or links share out
    OR = "or"  # bit masks


class MetricKind(enum.StrEnum):
    """How a value behaves over time, whatever type its exporter declares."""

    GAUGE = "gauge"
    COUNTER = "counter"  # only grows, but for resets
    EVENT = "event"  # a code that sticks after what it tells of
    BITS = "bits"  # a mask of states


class Source(enum.IntEnum):
    """What a series is to the fold of telemetry."""

    NONE = 0
    VALUE = 1
    FLAG = 2  # 0 or 1, worth `scale` when set: one bit of a mask
    XID_GAUGE = 3  # the last code; also a value
    XID_COUNT = 4  # how often the code in a label was seen
    INFO = 5  # labels that describe a GPU; the value says nothing
    UP = 6


@dataclass(frozen=True, slots=True)
class Metric:
    """One canonical column. `valid_min` and `valid_max` bound what can be true at all.

    `needs` is what a GPU must have to have it; `adds` what one gains by having it.
    """

    name: str
    unit: str
    role: str
    valid_min: float
    valid_max: float
    kind: MetricKind
    fold: Fold
    label: str
    source: str
    needs: tuple[str, ...] = ()
    adds: str = ""


@dataclass(frozen=True, slots=True)
class Alias:
    """One exporter's name for a column: canonical value = scale x value + offset.

    `where` are labels the series must carry ("*" = any value). `code_label` names the Xid of
    a count; `window_s` is the length of a sliding count, infinite for a counter. `standard`:
    the exporter shows it unless told not to.
    """

    exporter: str
    name: str
    column: int
    source: Source
    scale: float = 1.0
    offset: float = 0.0
    where: tuple[tuple[str, str], ...] = ()
    code_label: str = ""
    window_s: float = math.inf
    standard: bool = False

    def fits(self, labels: Mapping[str, str]) -> bool:
        return all(
            labels.get(label, "") != "" if wanted == _ANY else labels.get(label, "") == wanted
            for label, wanted in self.where
        )


@dataclass(frozen=True, slots=True)
class XidRow:
    """What one Xid code means. `fence` and `move`: whether it may, alone, do so."""

    code: int
    meaning: str
    pattern: str
    severity: Severity
    fence: bool
    move: bool
    source: str
    note: str = ""


class Catalog:
    """Immutable after construction. Columns are the metrics in the order of the data."""

    def __init__(
        self,
        metrics: Iterable[Metric],
        aliases: Iterable[Alias],
        xids: Iterable[XidRow] = (),
        exporters: Mapping[str, str] | None = None,
        patterns: Book | None = None,
    ) -> None:
        self.patterns = patterns or Book()
        self.exporters: dict[str, str] = dict(exporters or {})  # its name -> what it is
        self.metrics: tuple[Metric, ...] = tuple(metrics)
        self.names: tuple[str, ...] = tuple(m.name for m in self.metrics)
        self._columns = {name: i for i, name in enumerate(self.names)}
        self.aliases: tuple[Alias, ...] = tuple(aliases)
        self._aliases: dict[str, tuple[Alias, ...]] = {}
        # rows that ask for labels are tried before those that take any series
        for alias in sorted(self.aliases, key=lambda a: -len(a.where)):
            self._aliases[alias.name] = (*self._aliases.get(alias.name, ()), alias)
        self._xids = {row.code: row for row in xids}
        up = Alias("prometheus", UP, -1, Source.UP)
        self._aliases.setdefault(UP, (up,))

    @property
    def sources(self) -> tuple[str, ...]:
        """Every source name that is worth asking for, `up` among them, sorted."""
        return tuple(sorted(self._aliases))

    def column(self, name: str) -> int:
        """The column of a canonical metric. Raises KeyError for any other name."""
        return self._columns[name]

    def alias(self, name: str, labels: Mapping[str, str]) -> Alias | None:
        """The row that a series falls under: the first that fits, special ones first."""
        return next((a for a in self._aliases.get(name, ()) if a.fits(labels)), None)

    def names_of(self, column: int) -> tuple[Alias, ...]:
        """Every exporter's names for a column, in the order of the data."""
        return tuple(alias for alias in self.aliases if alias.column == column)

    def resolve(self, name: str, labels: Mapping[str, str]) -> tuple[int, float, float] | None:
        """(column, scale, offset) of a series that carries a value, else None."""
        alias = self.alias(name, labels)
        if alias is None or alias.column < 0:
            return None
        return alias.column, alias.scale, alias.offset

    def xid(self, code: int) -> XidRow:
        """The row of a code; an unknown one warns and does nothing."""
        row = self._xids.get(code)
        if row is not None:
            return row
        meaning = "not in the catalogue: look it up in NVIDIA's Xid documentation"
        return XidRow(code, meaning, f"Xid {code}", Severity.WARNING, False, False, "unknown code")

    def xids(self) -> tuple[XidRow, ...]:
        return tuple(self._xids[code] for code in sorted(self._xids))

    @classmethod
    def from_plain(
        cls,
        metrics: Mapping[str, Any],
        xids: Mapping[str, Any],
        patterns: Mapping[str, Any] | None = None,
    ) -> Catalog:
        """Builds from the plain content of the files.

        Raises ValueError naming every bad row of all, not only the first.
        """
        problems: list[str] = []
        table, aliases = _metrics(metrics, problems)
        rows = list(_xids(xids, problems))
        book = _book(patterns or {}, problems)
        if problems:
            raise ValueError("\n".join(problems))
        return cls(table, aliases, rows, metrics.get("exporters"), book)


class _Row:
    """One mapping of the data, read key by key; every fault is noted under its name."""

    def __init__(self, where: str, content: Any, problems: list[str]) -> None:
        self.where, self._problems = where, problems
        self._content = dict(content) if isinstance(content, Mapping) else {}
        if not isinstance(content, Mapping):
            self.fault(f"expected a mapping, got {content!r}")

    def fault(self, text: str) -> None:
        self._problems.append(f"{self.where}: {text}")

    def take(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        value = self._content.pop(key, default)
        good = isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool)
        if not good:
            self.fault(f"{key}: missing, or not what is expected here: {value!r}")
        return value if good else default

    def one_of(self, key: str, words: Sequence[str], default: str = "") -> str:
        word = str(self.take(key, str, default))
        if word not in words:
            self.fault(f"{key}: {word!r} is none of {', '.join(words)}")
        return word if word in words else default or words[0]

    def done(self) -> None:
        if self._content:
            self.fault(f"unknown keys {sorted(self._content)}")


_NUMBER: Final = (int, float)


def _metrics(plain: Mapping[str, Any], problems: list[str]) -> tuple[list[Metric], list[Alias]]:
    exporters = set(plain.get("exporters") or {})
    table: list[Metric] = []
    aliases: list[Alias] = []
    seen: dict[tuple[str, tuple[tuple[str, str], ...]], str] = {}
    for place, content in enumerate(plain.get("metrics") or []):
        name = content.get("name", "?") if isinstance(content, Mapping) else "?"
        row = _Row(f"metrics.yaml: metrics[{place}] {name}", content, problems)
        low, high = _bounds(row)
        role = row.one_of("role", ROLES)
        fold = row.one_of("fold", list(Fold), "max")
        kind = row.one_of("kind", list(MetricKind), "gauge")
        needs = row.take("needs", list, [])
        for need in needs:
            if need not in NEEDS:
                row.fault(f"needs: {need!r} is none of {', '.join(NEEDS)}")
        name = row.take("name", str, "?")
        if any(m.name == name for m in table):
            row.fault("this metric is there twice")
        table.append(
            Metric(
                name,
                row.take("unit", str, ""),
                role,
                low,
                high,
                MetricKind(kind),
                Fold(fold),
                row.take("label", str, name),
                row.take("source", str),
                tuple(needs),
                row.take("adds", str, ""),
            )
        )
        source = Source.XID_GAUGE if name == "xid" else Source.VALUE
        made = _aliases(row, row.take("aliases", list, []), exporters, place, source, problems)
        row.done()
        aliases += _unique(made, seen, problems)
    for kind, source in (("xid_counts", Source.XID_COUNT), ("info", Source.INFO)):
        owner = _Row(f"metrics.yaml: {kind}", {}, problems)
        made = _aliases(owner, plain.get(kind) or [], exporters, -1, source, problems)
        aliases += _unique(made, seen, problems)
    return table, aliases


def _bounds(row: _Row) -> tuple[float, float]:
    bounds = row.take("valid", list, [])
    if len(bounds) == 2 and all(isinstance(b, _NUMBER) for b in bounds) and bounds[0] < bounds[1]:
        return float(bounds[0]), float(bounds[1])
    row.fault(f"valid: expected [lowest, highest], got {bounds!r}")
    return -math.inf, math.inf


def _aliases(
    owner: _Row,
    content: list[Any],
    exporters: set[str],
    column: int,
    source: Source,
    problems: list[str],
) -> Iterator[Alias]:
    for place, plain in enumerate(content):
        row = _Row(f"{owner.where}: alias {place}", plain, problems)
        exporter = row.take("exporter", str, "")
        if exporter not in exporters:
            row.fault(f"exporter: {exporter!r} is not under exporters")
        names = row.take("names", list, [])
        if not names:
            row.fault("names: no name")
        where = row.take("where", dict, {})
        flag = row.take("flag", bool, False)
        standard = row.take("standard", bool, False)
        code_label = row.take("code_label", str, "")
        means = Source.FLAG if flag else source
        if code_label and source is Source.XID_GAUGE:  # of the last code too, but counted
            means = Source.XID_COUNT
        elif code_label and source is not Source.XID_COUNT:
            row.fault("code_label: only an Xid has a code")
        elif source is Source.XID_COUNT and not code_label:
            row.fault("code_label: a count needs the label that holds its code")
        scale = float(row.take("scale", _NUMBER, 1.0))
        offset = float(row.take("offset", _NUMBER, 0.0))
        window_s = float(row.take("window_s", _NUMBER, math.inf))
        row.done()
        for name in names:
            yield Alias(
                exporter,
                str(name),
                -1 if means is Source.XID_COUNT else column,
                means,
                scale,
                offset,
                tuple(sorted((str(k), str(v)) for k, v in where.items())),
                code_label,
                window_s,
                standard,
            )


def _unique(
    made: Iterable[Alias],
    seen: dict[tuple[str, tuple[tuple[str, str], ...]], str],
    problems: list[str],
) -> Iterator[Alias]:
    for alias in made:
        key = (alias.name, alias.where)
        if key in seen:
            problems.append(f"metrics.yaml: {alias.name}: under {seen[key]} and {alias.exporter}")
        seen[key] = alias.exporter
        yield alias


def _xids(plain: Mapping[str, Any], problems: list[str]) -> Iterator[XidRow]:
    seen: set[int] = set()
    for place, content in enumerate(plain.get("xids") or []):
        row = _Row(f"xids.yaml: xids[{place}]", content, problems)
        codes = list(_codes(row, row.take("codes", (int, str, list), [])))
        row.where += f" {codes}"
        severity = row.take("severity", str, "")
        if severity not in list(Severity):
            row.fault(f"severity: {severity!r} is none of {', '.join(Severity)}")
            severity = "warning"
        fence, move = row.take("fence", bool, False), row.take("move", bool, False)
        if move and not fence:
            row.fault("move without fence: work would be sent back onto the bad GPU")
        rest = (
            row.take("meaning", str, ""),
            row.take("pattern", str, ""),
            Severity(severity),
            fence,
            move,
            row.take("source", str, ""),
            row.take("note", str, ""),
        )
        row.done()
        for code in codes:
            if code in seen:
                row.fault(f"code {code} is there twice")
            seen.add(code)
            yield XidRow(code, *rest)


def _book(plain: Mapping[str, Any], problems: list[str]) -> Book:
    """The fault patterns that are shipped, and which of their dimensions each Xid belongs to."""
    made = []
    for place, content in enumerate(plain.get("patterns") or []):
        try:
            made.append(pattern_from(content))
        except (KeyError, TypeError, ValueError) as err:
            problems.append(f"patterns.yaml: patterns[{place}]: {err!r}")
    ids = [p.id for p in made]
    problems += [
        f"patterns.yaml: {id} is there twice" for id in sorted(set(ids)) if ids.count(id) > 1
    ]
    dimension: dict[int, str] = {}
    for name, content in (plain.get("xids") or {}).items():
        row = _Row(f"patterns.yaml: xids: {name}", content, problems)
        if name not in NAMES:
            row.fault("is no dimension of a signature")
        row.take("source", str)
        for code in _codes(row, row.take("codes", list, [])):
            if code in dimension:
                row.fault(f"code {code} is under {dimension[code]} too")
            dimension[code] = name
        row.done()
    return Book(made, dimension)


def _codes(row: _Row, plain: Any) -> Iterator[int]:
    """48, "39-41" and ["39-41", 70] all work."""
    for item in plain if isinstance(plain, list) else [plain]:
        first, dash, last = str(item).partition("-")
        if not (first.isdigit() and (last.isdigit() or not dash)):
            row.fault(f"codes: {item!r} is neither a code nor a range of codes")
            continue
        yield from range(int(first), int(last or first) + 1)
