"""Catalogues: data with provenance per row, and what a site adds to them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any, Final

import yaml

from sentinel.core.catalog import NEEDS, Catalog
from sentinel.core.placement import GpuModel, Lacking, ModelRanks

_SAFE: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # safe both; one may not be built
OWN: Final = "own"  # the exporter of an alias that a site adds without naming one
_WHOLE: Final = ("role", "valid", "aliases")  # what a metric that is new must have


def load_catalog(extra: Iterable[Mapping[str, Any]] = ()) -> Catalog:
    """Metrics, Xids and fault patterns, from metrics.yaml, xids.yaml and patterns.yaml, with the
    rows of `extra` merged into the metrics.

    Raises ValueError naming bad rows.
    """
    metrics = merged(_read("metrics.yaml"), extra)
    return Catalog.from_plain(metrics, _read("xids.yaml"), _read("patterns.yaml"))


def load_models() -> ModelRanks:
    """What each GPU model can do and lacks, from gpus.yaml. Raises TypeError, KeyError or
    ValueError on a bad row."""
    plain = _read("gpus.yaml")
    return ModelRanks(
        tuple(GpuModel(**_checked(row)) for row in plain["models"]),
        tuple(Lacking(**_checked(row)) for row in plain["lacking"]),
    )


def merged(plain: Mapping[str, Any], extra: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The content of metrics.yaml with rows of the same form merged in by their name.

    The keys that a row gives replace those of the metric; its aliases come first, and displace
    any other alias of the same name and labels. A row of an unknown name is a new metric, after
    all others. What was given is left as it was.
    """
    rows = [dict(row) for row in extra]
    added = [_alias(alias) for row in rows for alias in row.get("aliases", ())]
    taken = {(name, _where(alias)) for alias in added for name in alias["names"]}
    metrics = {m["name"]: {**m, "aliases": _left(m["aliases"], taken)} for m in plain["metrics"]}
    for row in rows:
        old = metrics.get(row["name"], {"source": "the configuration", "aliases": []})
        aliases = [_alias(alias) for alias in row.get("aliases", ())] + old["aliases"]
        metrics[row["name"]] = {**old, **row, "aliases": aliases}
    known = plain["exporters"]
    own = {a["exporter"]: "named in the configuration" for a in added if a["exporter"] not in known}
    return {
        **plain,
        "exporters": {**known, **own},
        "metrics": list(metrics.values()),
        "xid_counts": _left(plain.get("xid_counts", ()), taken),
        "info": _left(plain.get("info", ()), taken),
    }


def shipped() -> dict[str, Mapping[str, Any]]:
    """The rows of metrics.yaml by their name."""
    return {row["name"]: row for row in _read("metrics.yaml")["metrics"]}


def incomplete(row: Mapping[str, Any], known: Mapping[str, Mapping[str, Any]]) -> str:
    """What a row of a site's own lacks, or may not say of a metric that is `known`; "" for
    nothing."""
    metric = known.get(row["name"])
    if metric is None:
        missing = [key for key in _WHOLE if not row.get(key)]
        return f"is a new metric, and needs {', '.join(missing)}" if missing else ""
    unit = metric.get("unit", "")
    if row.get("unit", unit) != unit:
        return f"is in {unit or 'no unit'} here: leave that, and give its aliases a scale"
    return ""


def _alias(alias: Mapping[str, Any]) -> dict[str, Any]:
    return {"exporter": OWN, **alias}


def _where(alias: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((str(k), str(v)) for k, v in alias.get("where", {}).items()))


def _left(
    aliases: Iterable[Mapping[str, Any]], taken: set[tuple[str, tuple[tuple[str, str], ...]]]
) -> list[dict[str, Any]]:
    """The aliases, less the names that are taken."""
    left = []
    for alias in aliases:
        names = [name for name in alias["names"] if (name, _where(alias)) not in taken]
        if names:
            left.append({**alias, "names": names})
    return left


def _checked(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of gpus.yaml, with tuples for its lists."""
    re.compile(row["match"])
    unknown = set(row.get("lacks", ())) - set(NEEDS)
    if unknown:
        raise ValueError(f"gpus.yaml: {row['match']}: lacks {sorted(unknown)}: no metric needs it")
    return {**row, "lacks": tuple(row.get("lacks", ()))}


def _read(name: str) -> Any:
    text = resources.files(__name__).joinpath(name).read_text(encoding="utf-8")
    return yaml.load(text, Loader=_SAFE)  # noqa: S506 - either is safe
