"""Catalogues: data with provenance per row."""

from __future__ import annotations

from importlib import resources
from typing import Any

import yaml

from sentinel.core.catalog import Catalog
from sentinel.core.placement import GpuModel, ModelRanks


def load_catalog() -> Catalog:
    """Metrics and Xids, from metrics.yaml and xids.yaml. Raises ValueError naming bad rows."""
    return Catalog.from_plain(_read("metrics.yaml"), _read("xids.yaml"))


def load_models() -> ModelRanks:
    """What each GPU model can do, from gpus.yaml. Raises TypeError or KeyError on a bad row."""
    rows = _read("gpus.yaml")["models"]
    return ModelRanks(tuple(GpuModel(**row) for row in rows))


def _read(name: str) -> Any:
    text = resources.files(__name__).joinpath(name).read_text(encoding="utf-8")
    return yaml.safe_load(text)
