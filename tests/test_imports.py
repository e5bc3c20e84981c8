"""What a process loads: the daemon's ticks need numpy, never scikit-learn."""

import subprocess
import sys

import pytest

HEAVY = ("sklearn", "scipy", "pandas", "matplotlib", "joblib")


@pytest.mark.parametrize("module", ["sentinel.daemon", "sentinel.backtest", "sentinel.cli"])
def test_learning_libraries_are_loaded_by_learning_alone(module):
    code = f"import sys, {module}; print(*[m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == ""
