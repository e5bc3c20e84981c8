"""Whatever keeps the daemon from working is one clear message and a documented exit code."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sentinel.lab.loopback import Answer, server

pytestmark = pytest.mark.integration


def sentinel(folder: Path, *args: str) -> tuple[int, str]:
    """Exit code and what was said on stderr, log lines left out."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("SENTINEL_")}
    done = subprocess.run(
        [sys.executable, "-m", "sentinel.cli", *args],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("sentinel: ")]
    assert len(told) == 1, done.stderr
    return done.returncode, told[0]


def configure(folder: Path, prometheus: str = "http://127.0.0.1:9", more: str = "") -> None:
    text = f'prometheus: {{url: "{prometheus}"}}\nalertmanager: {{urls: []}}\n{more}'
    if "http:" not in more:
        text += 'http: {listen: "127.0.0.1:0"}\n'
    (folder / "sentinel.yaml").write_text(text)


@pytest.fixture
def locked() -> Iterator[str]:
    """A Prometheus that lets nobody in."""
    made = server("127.0.0.1:0", lambda _: Answer(401, {"status": "error"}))
    threading.Thread(target=made.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{made.server_address[1]}"
    made.shutdown()
    made.server_close()


def test_an_unreachable_prometheus(tmp_path: Path) -> None:
    configure(tmp_path)
    for command in (["run"], ["learn"], ["backtest", "--start", "-1h"]):
        code, told = sentinel(tmp_path, *command)
        assert code == 3
        assert "http://127.0.0.1:9" in told
        assert "refused" in told


def test_wrong_credentials(tmp_path: Path, locked: str) -> None:
    configure(tmp_path, locked)
    code, told = sentinel(tmp_path, "learn")
    assert code == 3
    assert "401" in told
    assert locked in told


def test_a_busy_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        listen = f"127.0.0.1:{other.getsockname()[1]}"
        configure(tmp_path, more=f'http: {{listen: "{listen}"}}\n')
        code, told = sentinel(tmp_path, "run")
    assert code == 3
    assert f"http.listen {listen}" in told


@pytest.mark.parametrize("folder", ["a-file", "/proc/gpu-sentinel"])
def test_a_state_folder_that_cannot_be_used(tmp_path: Path, folder: str) -> None:
    (tmp_path / "a-file").touch()
    configure(tmp_path, more=f'state: {{dir: "{folder}"}}\n')
    code, told = sentinel(tmp_path, "run")
    assert code == 4
    assert "state.dir" in told
    assert folder in told


def test_a_store_that_is_no_database(tmp_path: Path) -> None:
    configure(tmp_path)
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "state.db").write_bytes(b"no database" * 1000)
    code, told = sentinel(tmp_path, "run")
    assert code == 4
    assert "state.db" in told


def test_a_corrupt_bundle(tmp_path: Path) -> None:
    configure(tmp_path)
    bundles = tmp_path / "state" / "bundles"
    bundles.mkdir(parents=True)
    (bundles / "b-1.json").write_text('{"schema": 1')
    code, told = sentinel(tmp_path, "run")
    assert code == 4
    assert "b-1.json" in told


def test_a_wrong_configuration(tmp_path: Path) -> None:
    configure(tmp_path, more="mode: acts\n")
    code, told = sentinel(tmp_path, "run")
    assert code == 2
    assert "sentinel.yaml:3: mode: 'acts'" in told
