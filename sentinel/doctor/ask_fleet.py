"""The fleet as the daemon will read it: its own query, its own fold, its own verdict.

The same steps as a daemon that starts: the window before now is folded tick by tick, then one
more look is taken and judged against the newest bundle.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Final, NamedTuple

from sentinel import history
from sentinel.config import Config
from sentinel.core.catalog import Catalog
from sentinel.core.frame import Samples, Telemetry
from sentinel.core.placement import ModelRanks
from sentinel.core.verdict import Bundle, Watch
from sentinel.doctor.facts import Baseline, Fleet, Pull
from sentinel.doctor.fleet import fleet
from sentinel.doctor.reading import Reading
from sentinel.edges import bundle as bundles
from sentinel.edges.prometheus import Prometheus
from sentinel.errors import DependencyError

SKEW_S: Final = 5.0  # from here on our clock and the server's do not see the same moment


class Looked(NamedTuple):
    pull: Pull
    fleet: Fleet | None
    jobs: tuple[str, ...] = ()


def baseline(config: Config) -> tuple[Bundle | None, Baseline]:
    """The bundle that the daemon would load. Reads files alone."""
    found, problems = bundles.load_newest(history.bundle_dir(config), grid_s=config.grid_s())
    if found is None:
        return None, Baseline(problems=tuple(problems))
    models = tuple(sorted(found.cohorts))
    return found, Baseline(found.id, found.learnt_to_s, models, tuple(problems))


def look(
    config: Config,
    catalog: Catalog,
    models: ModelRanks,
    skew_s: float,
    clock: Callable[[], float] = time.time,
) -> Looked:
    """`skew_s` is the server's clock less ours. Nothing is raised: what failed is told."""
    source = history.connect(config)
    pull, samples = _pulled(config, source, clock)
    if samples is None:
        return Looked(pull, None)
    # by our clock the daemon would see another moment than now, or none
    shift_s = skew_s if abs(skew_s) > SKEW_S else 0.0
    reading = Reading(catalog, config.identity())
    telemetry = Telemetry(catalog, config.identity(), lacks=models.lacks)
    watch = Watch(history.settings_of(config), catalog)
    trouble = _refilled(config, source, telemetry, watch, reading, clock() + shift_s)
    try:
        at_s = clock() + shift_s
        samples = source.pull(
            at_s, window_s=config.pull_window_s(), deadline_s=config.prometheus.timeout_s
        )
    except DependencyError:  # the one before it will do
        at_s = samples.at_s
    reading.add(samples)
    telemetry.add(samples)
    frame = telemetry.frame(at_s)
    judgement = watch.judge(frame, baseline(config)[0])
    seen = fleet(reading, frame, judgement, models, telemetry.rejected, at_s)
    jobs = tuple(sorted({e.job for e in seen.exporters if e.job}))
    return Looked(pull, replace(seen, at_skew_s=shift_s, trouble=trouble), jobs)


def _pulled(
    config: Config, source: Prometheus, clock: Callable[[], float]
) -> tuple[Pull, Samples | None]:
    """One tick's question, twice: the first time its caches are cold."""
    window_s = config.pull_window_s()
    limit_s = config.prometheus.timeout_s  # longer than a tick waits: to tell how much too long
    deadline_s = min(config.tick_deadline_s(), limit_s)
    took_s: list[float] = []
    samples: Samples | None = None
    for _ in range(2):
        began = time.monotonic()
        try:
            samples = source.pull(clock(), window_s=window_s, deadline_s=limit_s)
        except DependencyError as err:
            if samples is None:
                return Pull(window_s, deadline_s, trouble=str(err)), None
            break
        took_s.append(time.monotonic() - began)
    assert samples is not None
    return (
        Pull(
            window_s,
            deadline_s,
            took_s[0],
            took_s[-1],
            len(set(samples.series.tolist())),
            len(samples.values),
            size_of(samples),
            config.prometheus.max_bytes,
            samples.partial,
            samples.warnings,
        ),
        samples,
    )


def _refilled(
    config: Config,
    source: Prometheus,
    telemetry: Telemetry,
    watch: Watch,
    reading: Reading,
    now_s: float,
) -> str:
    """Folds the window before now, as the daemon does at its start; why not, if it failed."""
    span_s = history.warm_up_s(watch.settings)
    ticks = history.ticks_between(now_s - span_s, now_s, config.tick.interval_s)

    def noted(slices: Iterable[Samples]) -> Iterator[Samples]:
        for samples in slices:
            reading.add(samples)
            yield samples

    try:
        slices = source.history(now_s - span_s, now_s, slice_s=span_s)
        for frame in history.frames(telemetry, noted(slices), ticks):
            watch.judge(frame, None)
    except DependencyError as err:
        return str(err)
    return ""


def size_of(samples: Samples) -> int:
    """About how many bytes the answer had: labels once a series, 26 a sample."""
    labels: dict[int, int] = {}
    total = 26 * len(samples.values)
    for row in set(samples.series.tolist()):
        key = samples.keys[row]
        place = id(key.labels)
        if place not in labels:
            labels[place] = sum(len(k) + len(v) + 6 for k, v in key.labels)
        total += labels[place] + len(key.name) + 40
    return total
