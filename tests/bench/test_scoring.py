"""One tick's judgement of 10,000 GPUs x 20 metrics, and what is kept of each GPU for it.

Asserted against a fixed numpy workload of the same run, since machines differ; the figures in
seconds are printed: `make test ARGS="tests/bench/test_scoring.py -s"`.
"""

import gc
import statistics
import time
import tracemalloc

import numpy as np
import pytest

from sentinel.core.frame import Identity, Telemetry
from sentinel.core.verdict import Settings, Watch
from sentinel.data import load_catalog
from tests.bench.fleets import SyntheticFleet, bundle

GPUS, WARM, MEASURED = 10_000, 12, 9
CORES, COLUMNS = 384, 14
MOST_OF_REFERENCE = 3.5  # about 150 ms where the plain search takes 40
MOST_BYTES_PER_GPU = 20_000


def frames(gpus, ticks):
    telemetry, fleet = Telemetry(load_catalog(), Identity()), SyntheticFleet(gpus)
    for tick in range(ticks):
        at_s = 1_000_000.0 + 15.0 * tick
        telemetry.add(fleet.samples(at_s))
        yield telemetry.frame(at_s)


def reference_s(rng):
    """CPU seconds of the plain way to the nearest of 384 cores: 14 columns of differences,
    squared and added up, in single precision and in pieces that fit the cache."""
    rows = rng.standard_normal((GPUS, COLUMNS)).astype(np.float32)
    cores = rng.standard_normal((CORES, COLUMNS)).astype(np.float32)
    before = time.process_time()
    for start in range(0, GPUS, 2048):
        part = rows[start : start + 2048]
        total = np.zeros((len(part), CORES), dtype=np.float32)
        work = np.empty_like(total)
        for column in range(COLUMNS):
            np.subtract(part[:, column, None], cores[None, :, column], out=work)
            np.multiply(work, work, out=work)
            total += work
        total.argmin(axis=1)
    return time.process_time() - before


@pytest.mark.slow
def test_a_tick_of_10_000_gpus_costs_less_than_a_few_plain_distance_searches(capsys):
    learnt, watch, rng = bundle(), Watch(Settings(), load_catalog()), np.random.default_rng(0)
    judged, plain = [], []
    for tick, frame in enumerate(frames(GPUS, WARM + MEASURED)):
        before = time.process_time()
        judgement = watch.judge(frame, learnt)
        after = time.process_time()
        assert judgement.verdicts == ()
        assert np.isfinite(judgement.scores).all() or tick < WARM
        if tick >= WARM:  # in turns, so that a busy moment meets both
            judged.append(after - before)
            plain.append(reference_s(rng))
    cost, unit = statistics.median(judged), statistics.median(plain)
    (cohort,) = learnt.cohorts.values()
    with capsys.disabled():
        print(f"\njudging {GPUS:,} GPUs x 20 metrics, {len(cohort.density.cores)} cores:", end=" ")
        print(f"{cost * 1e3:.0f} ms of one core; plain search {unit * 1e3:.0f} ms", end="; ")
        print(f"ratio {cost / unit:.2f}")
    assert cost <= MOST_OF_REFERENCE * unit


@pytest.mark.slow
def test_what_is_kept_of_each_gpu_is_small(capsys):
    learnt, watch = bundle(), None
    seen = list(frames(GPUS, 3))
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    watch = Watch(Settings(), load_catalog())
    for frame in seen:
        watch.judge(frame, learnt)
    gc.collect()
    kept = (tracemalloc.get_traced_memory()[0] - before) / GPUS
    tracemalloc.stop()
    with capsys.disabled():
        print(f"\nkept of each GPU between ticks: {kept:,.0f} bytes")
    assert 1_000 < kept <= MOST_BYTES_PER_GPU
