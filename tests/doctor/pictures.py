"""Pictures of what the doctor really prints, of small fleets behind a real Prometheus.

    python -m tests.doctor.pictures FOLDER [--columns N] [NAME ...]

Writes FOLDER/doctor-NAME.svg each. Those of the documentation are made by

    python -m tests.doctor.pictures docs/images default smi mig empty down
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.terminal_theme import MONOKAI

from sentinel.config import Config
from sentinel.doctor.examine import examine
from sentinel.doctor.report import Report
from sentinel.doctor.show import report
from sentinel.lab import servers
from sentinel.lab.remote_write import RemoteWriter
from tests.doctor import site
from tests.doctor.fleets import DEFAULT, MORE, Target, dcgm, mig, nothing, smi

Jobs = dict[str, list[Target]]
NODES = (1, 2, 3)
FLEETS: dict[str, Jobs] = {
    "default": {"dcgm-exporter": [Target(f"gpu-{n:02d}:9400", dcgm(n)) for n in NODES]},
    "full": {
        "dcgm-exporter": [Target(f"gpu-{n:02d}:9400", dcgm(n, DEFAULT | MORE)) for n in NODES]
    },
    "mig": {
        "dcgm-exporter": [
            Target(f"10.0.0.{n}:9400", mig(n, host=f"nvidia-dcgm-exporter-x{n}k7w")) for n in NODES
        ]
    },
    "smi": {"nvidia_gpu_exporter": [Target(f"gpu-{n:02d}:9835", smi(n)) for n in NODES]},
    "empty": {},
    "down": {
        "dcgm-exporter": [
            Target("gpu-01:9400", dcgm(1, DEFAULT | MORE)),
            Target("gpu-02:9400", None),
            Target("gpu-03:9400", nothing),
        ]
    },
}
PORT, ALERT_PORT = 9090, 9093
_STEP_S, _HISTORY_S = 15.0, 86_400.0


def write_history(url: str, jobs: Jobs, end_s: float) -> None:
    """A day of the fleet, a sample a minute, and every 15 s of the last quarter of an hour."""
    early = np.arange(end_s - _HISTORY_S, end_s - 900.0, 60.0)
    times = np.append(early, np.arange(end_s - 900.0, end_s, _STEP_S))
    labels, rows = [], []
    for job, targets in jobs.items():
        for target in targets:
            if target.show is None:
                continue
            names = [
                {"__name__": name, "job": job, "instance": target.instance, **own}
                for name, own, _ in target.show(end_s)
            ]
            values = [[value for _, _, value in target.show(at)] for at in times]
            labels += names
            rows += np.array(values).T.tolist() if names else []
    if labels:
        with RemoteWriter(url) as writer:
            writer.write(labels, times, np.array(rows))


def look(jobs: Jobs, folder: Path) -> Report:
    with ExitStack() as opened:
        address = opened.enter_context(site.exporters(jobs))
        server = opened.enter_context(
            servers.prometheus(folder / "prometheus", port=PORT, scrape_interval_s=_STEP_S)
        )
        opened.enter_context(
            servers.alertmanager(folder / "alertmanager", site.SOMEBODY, port=ALERT_PORT)
        )
        write_history(server.url, jobs, time.time())
        server.configure(
            scrape_configs=site.scrape_configs(jobs, address), scrape_interval_s=_STEP_S
        )
        site.wait_until_scraped(server.url, sum(map(len, jobs.values())), times=1)
        text = (
            f'prometheus: {{url: "{server.url}"}}\n'
            "identity: {cluster: west}\n"
            "state: {dir: /var/lib/gpu-sentinel}\n"
        )
        config = Config.parse(text, folder / "sentinel.yaml")
        return replace(examine(config), config="sentinel.yaml")


def draw(found: Report, path: Path, columns: int) -> None:
    with open("/dev/null", "w", encoding="utf-8") as nowhere:
        console = Console(
            record=True, width=columns, force_terminal=True, color_system="truecolor", file=nowhere
        )
        console.print(report(found))
    text = console.export_svg(title="$ sentinel doctor", theme=MONOKAI, unique_id="doctor")
    # no font from another host: whoever looks has a monospaced one
    text = re.sub(r"\s*@font-face \{.*?\}\n", "\n", text, flags=re.DOTALL)
    text = text.replace("Fira Code, monospace", "DejaVu Sans Mono, Menlo, Consolas, monospace")
    path.write_text("\n".join(map(str.rstrip, text.splitlines())) + "\n", encoding="utf-8")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--columns", type=int, nargs="*", default=[100])
    given = parser.parse_args(arguments)
    for name in given.names or FLEETS:
        with tempfile.TemporaryDirectory() as folder:
            found = look(FLEETS[name], Path(folder))
        for columns in given.columns:
            more = f"-{columns}" if len(given.columns) > 1 else ""
            draw(found, given.folder / f"doctor-{name}{more}.svg", columns)
        sys.stdout.write(f"{name}: {found.summary}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
