"""CI lets no test be skipped in silence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = """
import pytest

def test_data():
    pytest.skip("the data folder is absent")

@pytest.mark.skip(reason="no GPU here")
def test_gpu():
    pass

def test_lazy():
    pytest.skip("did not feel like it")

@pytest.mark.skipif(True, reason="Tuesday")
def test_marked():
    pass

@pytest.mark.xfail(reason="known")
def test_known():
    assert False
"""


def test_only_a_missing_data_folder_or_gpu_may_skip(tmp_path: Path) -> None:
    path = tmp_path / "test_lazy.py"
    path.write_text(TESTS)
    assert run(path).endswith("4 skipped, 1 xfailed")
    told = run(path, "--no-skips")
    assert told.endswith("1 failed, 2 skipped, 1 xfailed, 1 error")


def test_a_whole_module_may_not_skip_itself_either(tmp_path: Path) -> None:
    path = tmp_path / "test_module.py"
    path.write_text("import pytest\npytest.importorskip('no_such_module')\n")
    assert run(path).endswith("1 skipped")
    assert run(path, "--no-skips").endswith("1 error")


def run(path: Path, *flags: str) -> str:
    """The counts in the closing line."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"),
            *("--rootdir", str(path.parent), *flags, str(path)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.splitlines()[-1].strip("= ").rsplit(" in ", 1)[0]
