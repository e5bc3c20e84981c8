"""A fake NVML, built once, and an exporter over it for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.exporter.rig import Rig, build
from tests.exporter.rig import rig as make_rig


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="session")
def old_fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml-old"), "-DOLD_DRIVER")


@pytest.fixture
def rig(fake: Path, tmp_path: Path) -> Iterator[Rig]:
    """Not started yet."""
    with make_rig(tmp_path / "rig", fake) as made:
        yield made
