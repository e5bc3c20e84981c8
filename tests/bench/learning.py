"""What it costs to learn: `python -m tests.bench.learning --gpus 1000 --hours 168`.

Reads a synthetic fleet of 20 metrics per GPU, scraped every minute, in process; with
`--prometheus` a real one is filled first and read over HTTP, as the daemon does.
"""

import argparse
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from sentinel import history
from sentinel.config import Config
from sentinel.core.frame import Samples
from sentinel.lab import servers
from sentinel.lab.remote_write import RemoteWriter
from tests.bench.fleets import SyntheticFleet

SCRAPE_S = 60.0


class SyntheticHistory:
    """Stands where a Prometheus would. `spent_s` is what making the samples cost."""

    def __init__(self, gpus):
        self.fleet, self.spent_s = SyntheticFleet(gpus), 0.0

    def history(self, start_s, end_s, *, slice_s):
        while start_s < end_s:
            until_s, before = min(start_s + slice_s, end_s), time.process_time()
            times = SCRAPE_S * np.arange(start_s // SCRAPE_S + 1, until_s // SCRAPE_S + 1)
            columns = [self.fleet.samples(at_s).values for at_s in times]
            values = np.stack(columns, axis=1).reshape(-1) if columns else np.zeros(0)
            series = np.repeat(self.fleet.series, len(times))
            at_s = np.tile(times, len(self.fleet.series))
            self.spent_s += time.process_time() - before
            yield Samples(until_s, self.fleet.keys, series, at_s, values)
            start_s = until_s


def fill(url, gpus, start_s, end_s):
    """The same fleet written into a Prometheus."""
    fleet = SyntheticFleet(gpus)
    labels = [{"__name__": key.name, **dict(key.labels)} for key in fleet.keys]
    with RemoteWriter(url) as writer:
        for at_s in np.arange(start_s + SCRAPE_S, end_s + 1, SCRAPE_S):
            writer.write(labels, np.array([at_s]), fleet.samples(at_s).values[:, None])


def measured(folder, url, source, start_s, end_s):
    path = Path(folder) / "sentinel.yaml"
    path.write_text(f"prometheus: {{url: '{url}', timeout_s: 120}}\n")
    before, wall = time.process_time(), time.perf_counter()
    made = history.learn(Config.load(path), start_s, end_s, prometheus=source, save=False)
    cpu_s, wall_s = time.process_time() - before, time.perf_counter() - wall
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    made_s = source.spent_s if source else 0.0
    print(
        f"{made.gpus:,} GPUs, {(end_s - start_s) / 3600:g} h: {made.rows:,} rows; "
        f"{wall_s:.0f} s, {cpu_s - made_s:.0f} s of CPU; peak {peak_mb:,.0f} MB"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=1000)
    parser.add_argument("--hours", type=float, default=168.0)
    parser.add_argument("--prometheus", action="store_true")
    args = parser.parse_args()
    end_s = float(int(time.time()) // 60 * 60)
    start_s = end_s - 3600.0 * args.hours
    with tempfile.TemporaryDirectory() as folder:
        if not args.prometheus:
            source = SyntheticHistory(args.gpus)
            measured(folder, "http://127.0.0.1:9", source, start_s, end_s)
            return
        with servers.prometheus(Path(folder)) as server:
            fill(server.url, args.gpus, start_s, end_s)
            measured(folder, server.url, None, start_s, end_s)


if __name__ == "__main__":
    main()
