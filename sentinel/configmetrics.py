"""The metrics of a site's own in a configuration file: rows like those of data/metrics.yaml.

Decides what one row may be and what several mean together; `data` merges them into the
catalogue.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field

from sentinel.configkeys import LabelName, List, Section, Strings, key
from sentinel.core.catalog import NEEDS, UP
from sentinel.data import incomplete, shipped

Path = tuple[str | int, ...]

OWN_METRICS: Final = """\
`metrics` holds rows of the same form as those that are shipped
([metrics-read.md](metrics-read.md) shows all of them), merged in by their name. Of a metric that
is shipped, the keys you give replace its own; your aliases come first, and displace any shipped
alias of the same name and labels. A new name makes a new metric: it needs `role`, `valid` and
`aliases`, and is read but not judged.

```yaml
metrics:
  # a name that is not shipped: what your exporter calls the power, and in which unit
  - name: power_w
    aliases:
      - {exporter: bmc, names: [bmc_gpu_power_milliwatts], scale: 0.001}
  # a name that two exporters use with different units: the labels tell them apart
  - name: fb_used_mib
    aliases:
      - {names: [nvidia_memory_used], where: {job: nvidia_smi_exporter}}
  # a GPU of yours that may be hotter than anything shipped allows
  - name: temp_c
    valid: [1, 140]
  # the code of an Xid in a label of a counter
  - name: xid
    aliases:
      - {names: [syslog_gpu_xids_total], code_label: code}
  # a metric that is not shipped at all
  - name: coolant_temp_c
    unit: °C
    label: coolant temperature
    role: state
    valid: [1, 90]
    aliases:
      - {names: [rack_coolant_celsius], where: {side: inlet}}
```

| key of a row | meaning |
|---|---|
| `name` | **required**; canonical name |
| `label`, `unit` | what it is called, and its unit |
| `source`, `adds` | where its range is from, and what one gains by it |
| `role` | demand, response, error, state, info |
| `kind` | gauge, counter, event, bits |
| `valid` | `[lowest, highest]` value that can be true |
| `fold` | how several series of one GPU become one value: max, sum, or |
| `needs` | what a GPU must have: nvlink, profiling, memory_temp, ecc, row_remap, energy, whole |
| `aliases` | names of it, see below |

| key of an alias | default | meaning |
|---|---|---|
| `names` | **required** | names of series |
| `exporter` | own | whose names these are |
| `where` | {} | labels the series must carry; "*" is any value, "" is none |
| `scale`, `offset` | 1, 0 | canonical value = scale x value + offset |
| `flag` | false | the series is 0 or 1, and worth `scale` when it is not 0 |
| `code_label` | none | of `xid` alone: the series counts, and this label holds the code |
| `window_s` | none | with `code_label`: the count is over so many seconds back |
"""


def _metric_name(value: str) -> str:
    if not re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", value):
        raise ValueError("is no name of a series (letters, digits, _ and :)")
    if value == UP:
        raise ValueError("is Prometheus's own verdict on a scrape, and no metric of a GPU")
    return value


def _canonical(value: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", value):
        raise ValueError("write it in small letters, digits and _, its unit last: power_w")
    return value


def _bounds(value: tuple[float, ...]) -> tuple[float, ...]:
    if len(value) != 2 or not value[0] < value[1]:
        raise ValueError("must be [lowest, highest]")
    return value


def _needs(value: tuple[str, ...]) -> tuple[str, ...]:
    for word in value:
        if word not in NEEDS:
            raise ValueError(f"{word!r} is none of {', '.join(NEEDS)}")
    return value


def _some(value: tuple[str, ...]) -> tuple[str, ...]:
    if not value:
        raise ValueError("must have a name in it: [first, second]")
    return value


SeriesName = Annotated[str, AfterValidator(_metric_name)]


class AliasRow(Section):
    names: Annotated[tuple[SeriesName, ...], List, AfterValidator(_some)] = Field(
        description="Names of series."
    )
    exporter: str = key("own", "Whose names these are.", min_length=1)
    where: dict[LabelName, str] = key({}, "Labels that the series must carry.")
    scale: float = key(1.0, "Canonical value = scale x value + offset.")
    offset: float = key(0.0, "See scale.")
    flag: bool = key(False, "The series is 0 or 1, and worth scale when it is not 0.")
    code_label: LabelName | None = key(None, "Label that holds the code of an Xid count.")
    window_s: float | None = key(None, "The count is over so long back.", "s", gt=0)


class MetricRow(Section):
    name: Annotated[str, AfterValidator(_canonical)] = Field(description="Canonical name.")
    label: str | None = key(None, "What people call it.")
    unit: str | None = key(None, "Its unit.")
    role: Literal["demand", "response", "error", "state", "info"] | None = key(None, "Its part.")
    kind: Literal["gauge", "counter", "event", "bits"] | None = key(None, "How it behaves.")
    valid: Annotated[tuple[float, ...], List, AfterValidator(_bounds)] | None = key(
        None, "Lowest and highest value that can be true."
    )
    fold: Literal["max", "sum", "or"] | None = key(None, "How several series make one value.")
    needs: Annotated[Strings, AfterValidator(_needs)] | None = key(None, "What the GPU must have.")
    source: str | None = key(None, "Where its range is from.")
    adds: str | None = key(None, "What one gains by it.")
    aliases: Annotated[tuple[AliasRow, ...], List] = key((), "Names of it.")

    def plain(self) -> dict[str, Any]:
        """The keys that were given, as data/metrics.yaml would hold them."""
        return self.model_dump(mode="json", exclude_unset=True, exclude_none=True)


def contradictions(rows: Sequence[MetricRow]) -> Iterator[tuple[Path, str, object]]:
    """(path below `metrics`, what to do, value) of what is valid by itself and cannot be."""
    known = shipped() if rows else {}
    names: set[str] = set()
    aliases: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
    for place, row in enumerate(rows):
        if row.name in names:
            yield (place, "name"), "is there twice; make one row of them", row.name
        names.add(row.name)
        problem = incomplete(row.plain(), known)
        if problem:
            yield (place, "name"), problem, row.name
        for number, alias in enumerate(row.aliases):
            at = (place, "aliases", number)
            for name in alias.names:
                series = (name, tuple(sorted(alias.where.items())))
                if series in aliases:
                    yield (*at, "names"), "is there twice with the same labels; keep one", name
                aliases.add(series)
            if alias.code_label and row.name != "xid":
                yield (*at, "code_label"), "only of the metric xid", alias.code_label
            if alias.window_s and not alias.code_label:
                yield (*at, "window_s"), "is of no use without code_label", alias.window_s
