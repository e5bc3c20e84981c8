"""Finding the servers: PATH wins, and where nothing works the message says what to install."""

from __future__ import annotations

from pathlib import Path

import pytest

from sentinel.errors import DependencyError
from sentinel.lab import binaries


def program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_path_wins_over_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("prometheus", "promtool", "prometheus-alertmanager", "amtool")
    made = [program(tmp_path / "bin" / name) for name in names]
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("SENTINEL_CACHE", str(tmp_path / "cache"))
    found = binaries.find_binaries()
    assert [found.prometheus, found.promtool, found.alertmanager, found.amtool] == made
    assert not (tmp_path / "cache").exists()


def test_a_filled_cache_is_used_without_any_package_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("prometheus", "promtool", "prometheus-alertmanager", "amtool"):
        program(tmp_path / "servers/usr/bin" / name)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setenv("SENTINEL_CACHE", str(tmp_path))
    assert binaries.find_binaries().alertmanager.name == "prometheus-alertmanager"


def apt_without_victoria(path: Path) -> None:
    """A package manager that has none of it, and writes down what it was asked for."""
    for name in ("apt-get", "dpkg"):
        made = program(path / name)
        made.write_text(
            f"#!/bin/sh\necho $0 $* >> {path}/asked\necho 'E: no package' >&2\nexit 1\n"
        )


def test_a_cache_without_victoria_metrics_is_completed_and_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("prometheus", "promtool", "prometheus-alertmanager", "amtool"):
        program(tmp_path / "servers/usr/bin" / name)
    apt_without_victoria(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin")
    monkeypatch.setenv("SENTINEL_CACHE", str(tmp_path))
    binaries.find_binaries()
    assert not (tmp_path / "bin/asked").exists(), "the site's own programs are all there"
    with pytest.raises(DependencyError, match=r"cannot fetch victoria-metrics .*no package"):
        binaries.find_victoria_metrics()
    made = program(tmp_path / "victoria-metrics/usr/bin/victoria-metrics")
    assert binaries.find_victoria_metrics() == made
    assert binaries.prometheus_of_release(own=False) == tmp_path / "servers/usr/bin/prometheus"


def test_a_cache_with_a_program_missing_is_fetched_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = program(tmp_path / "servers/usr/bin/prometheus")
    apt_without_victoria(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin")
    monkeypatch.setenv("SENTINEL_CACHE", str(tmp_path))
    with pytest.raises(DependencyError, match="cannot fetch prometheus and"):
        binaries.find_binaries()
    assert kept.exists(), "what cannot be replaced is left"


def test_only_what_is_asked_for_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apt_without_victoria(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin")
    monkeypatch.setenv("SENTINEL_CACHE", str(tmp_path / "cache"))
    for name in ("apt-get", "dpkg"):
        (tmp_path / "bin" / name).write_text(
            f"#!/bin/sh\necho {name} $* >> {tmp_path}/asked\n"
            'case "$*" in *download*) exit 1;; esac\n'
        )
    for find in (
        binaries.find_binaries,
        binaries.find_victoria_metrics,
        lambda: binaries.prometheus_of_release(own=True),
    ):
        (tmp_path / "asked").write_text("")
        with pytest.raises(DependencyError):
            find()
        asked = [line.split()[-1] for line in (tmp_path / "asked").read_text().splitlines()]
        downloads = {name for name in asked if "prometheus" in name or "victoria" in name}
        victoria = find is binaries.find_victoria_metrics
        assert downloads == ({"victoria-metrics"} if victoria else {"prometheus"})


def test_without_any_way_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SENTINEL_CACHE", str(tmp_path / "cache"))
    with pytest.raises(DependencyError, match="apt-get install prometheus"):
        binaries.find_binaries()


def test_package_sources_that_all_fail_are_each_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("apt-get", "dpkg"):
        failing = program(tmp_path / "bin" / name)
        failing.write_text("#!/bin/sh\necho 'E: no such mirror' >&2\nexit 100\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin")
    monkeypatch.setenv("SENTINEL_CACHE", str(tmp_path / "cache"))
    with pytest.raises(DependencyError, match="no such mirror"):
        binaries.find_binaries()
    assert not (tmp_path / "cache/servers").exists()


def test_an_unwritable_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SENTINEL_CACHE", str(tmp_path / "file/cache"))
    with pytest.raises(DependencyError, match="SENTINEL_CACHE"):
        binaries.find_binaries()
