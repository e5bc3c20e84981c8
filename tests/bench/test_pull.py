"""What a look at a large fleet costs, by how many queries are under way. One run's ratios."""

import statistics
import time

import numpy as np
import pytest

from sentinel.edges.prometheus import Prometheus
from sentinel.lab import servers
from sentinel.lab.remote_write import RemoteWriter
from tests.bench.fleets import SyntheticFleet

GPUS, SCRAPES, INTERVAL_S = 5_000, 4, 15.0
WARM, MEASURED = 1, 5
AT_ONCE = (1, 2)


def fill(url, now_s):
    """Four scrapes of 5,000 GPUs x 20 metrics, which is what a tick reads."""
    fleet = SyntheticFleet(GPUS)
    labels = [{"__name__": key.name, **dict(key.labels)} for key in fleet.keys]
    with RemoteWriter(url) as writer:
        for scrape in range(SCRAPES):
            samples = fleet.samples(now_s - INTERVAL_S * (SCRAPES - 1 - scrape))
            writer.write(labels, np.array([samples.at_s]), samples.values[:, None])
    return len(labels)


@pytest.mark.integration
@pytest.mark.slow
def test_two_queries_at_once_are_faster_than_one(tmp_path, capsys):
    now_s = float(int(time.time()))
    with servers.prometheus(tmp_path) as server:
        series = fill(server.url, now_s)
        readers = {n: Prometheus(server.url, concurrency=n, timeout_s=120.0) for n in AT_ONCE}
        spent = {n: [] for n in AT_ONCE}
        for turn in range(WARM + MEASURED):  # in turns, so that a busy moment meets all of them
            for n, reader in readers.items():
                before = time.perf_counter()
                samples = reader.pull(now_s, window_s=60.0, deadline_s=120.0)
                if turn >= WARM:
                    spent[n].append(time.perf_counter() - before)
                assert len(samples.values) == series * SCRAPES
    median = {n: statistics.median(times) for n, times in spent.items()}
    with capsys.disabled():
        print(f"\n{series:,} series, {series * SCRAPES:,} samples: pull and decode")
        for n, seconds in median.items():
            print(f"{n} at once: {seconds:.2f} s, {seconds / median[1]:.2f} of one")
    assert median[2] <= 1.25 * median[1]  # on cores that others use too nothing is gained
