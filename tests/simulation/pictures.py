"""The plots of `sentinel learn --html`, of three hours of a simulated fleet, for the documentation.

    python -m tests.simulation.pictures docs/images

Writes FOLDER/learn-budget.svg and FOLDER/learn-states.svg.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from sentinel import history, learnplots
from sentinel.config import Config
from sentinel.lab.fleet import Fleet
from tests.simulation.lab_history import LabHistory

STEP_S, START_S, HOURS = 15.0, 1_790_000_010.0, 3.0


def main(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "sentinel.yaml"
        path.write_text("prometheus: {url: 'http://127.0.0.1:9'}\n")
        config = Config.load(path)
        source = LabHistory(Fleet(1, start_s=START_S), STEP_S)
        end_s = START_S + 3600.0 * HOURS
        made = history.learn(config, START_S, end_s, prometheus=source, save=False)
        told = json.loads(json.dumps(history.plain(made, config)))
    for name, picture in learnplots.pictures(told).items():
        (folder / f"learn-{name}.svg").write_text(picture + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
