"""Labelled machine telemetry: how well a score ranks it, and what it costs to be woken by it.

    python -m tests.bench.series [--machines machine-1-6 ...] [--methods detector kmeans ...]

prints one table per machine and one of means. From Python:

    table = smd_table(["machine-1-6"], methods={"detector": detector})
    table["detector"]["machine-1-6"]  # a Result
    mean_of(table["detector"].values())  # the mean Result over machines
    show(table)  # as text

A *method* is a function (train [rows, metrics], test [rows, metrics], step_s) -> (score [test
rows], threshold). The threshold comes from `train` alone; labels are seen by the judge only.
`METHODS` has ours and the simple ones it is compared with, each in its usual form.

Ranking is VUS-PR (Paparrizos et al., VLDB 2022) with 250 thresholds and all buffers up to the
period of the first metric, as TSB-AD measures it. Events: exceedances at most 15 minutes apart
are one alarm; every started hour of a false alarm counts again; 15 minutes before and 30
after a label are neither right nor wrong; an event is found when the score exceeds the
threshold between its start and its end, or within 10 minutes of its start if that is later.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("SENTINEL_DATA", ROOT.parent / "shared" / "data")) / "smd"
STEP_S = 60.0  # SMD has one row a minute
THRESHOLDS = 250
DEFAULT_PERIOD = 125  # where the first metric shows none
MERGE_S, BEFORE_S, AFTER_S, EARLY_S, HOUR_S = 900.0, 900.0, 1800.0, 600.0, 3600.0
WEEK_S = 7 * 86_400.0
BUDGET_PER_DAY = 1 / 7

Method = Callable[[np.ndarray, np.ndarray, float], tuple[np.ndarray, float]]


@dataclass(frozen=True)
class Result:
    """One method on one machine. Means over machines have the same fields."""

    vus_pr: float
    recall: float  # events found at the train-only threshold
    precision: float  # alarms that were right: found events to found events plus false alarms
    false_alarms_per_week: float
    delay_s: float  # median over the events found, NaN where none was


def machines() -> list[str]:
    """Names of the machines that are there; empty where the data folder is not."""
    return sorted(p.stem for p in DATA.glob("machine-*.npz"))


def load(machine: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(train, test, label) of one machine, float64 [rows, 38] and bool [rows]."""
    with np.load(DATA / f"{machine}.npz") as file:
        return (
            file["train"].astype(np.float64),
            file["test"].astype(np.float64),
            file["label"].astype(bool),
        )


def segments(mask: np.ndarray) -> np.ndarray:
    """First and last index of every run of True [runs, 2]."""
    edge = np.diff(np.concatenate([[0], mask.astype(np.int8), [0]]))
    return np.stack([np.flatnonzero(edge == 1), np.flatnonzero(edge == -1) - 1], axis=1)


def period(values: np.ndarray) -> int:
    """The lag of the highest local maximum of the autocorrelation between 6 and 303 rows."""
    x = np.asarray(values, dtype=np.float64)[:20_000]
    x = x - x.mean()
    size = 1 << int(2 * len(x) - 1).bit_length()
    spectrum = np.fft.rfft(x, size)
    acf = np.fft.irfft(spectrum * np.conj(spectrum), size)[: min(401, len(x))]
    if not acf[0] > 0:
        return DEFAULT_PERIOD
    acf = (acf / acf[0])[3:]
    peaks = 1 + np.flatnonzero((acf[1:-1] > acf[:-2]) & (acf[1:-1] > acf[2:]))
    if not len(peaks):
        return DEFAULT_PERIOD
    best = int(peaks[np.argsort(acf[peaks])[::-1][0]])
    return best + 3 if 3 <= best <= 300 else DEFAULT_PERIOD


def vus_pr(label: np.ndarray, score: np.ndarray, buffer: int) -> float:
    """Volume under the surface of range precision and recall over buffers 0..`buffer`.

    A point enters at the first threshold that it reaches, so one cumulative sum per buffer
    gives every threshold at once.
    """
    label = np.asarray(label, dtype=bool)
    n, runs = len(label), segments(np.asarray(label, dtype=bool))
    positives = float(label.sum())
    ordered = -np.sort(-score)
    levels = ordered[np.linspace(0, n - 1, THRESHOLDS).astype(int)]
    entry = np.searchsorted(-levels, -score, side="left")  # first threshold that includes it
    predicted = np.cumsum(np.bincount(entry, minlength=THRESHOLDS + 1)[:THRESHOLDS])
    area = []
    for width in range(buffer + 1):
        soft = label.astype(np.float64)
        half = width // 2
        for start, end in runs:
            after = np.arange(end + 1, min(end + half + 1, n))
            soft[after] += np.sqrt(1 - (after - end) / width) if width else 0.0
            before = np.arange(max(start - half, 0), start)
            soft[before] += np.sqrt(1 - (start - before) / width) if width else 0.0
        soft = np.minimum(soft, 1.0)
        near = soft > 0
        found = np.cumsum(np.bincount(entry[near], soft[near], THRESHOLDS + 1)[:THRESHOLDS])
        halo = near & ~label
        extra = np.cumsum(np.bincount(entry[halo], soft[halo], THRESHOLDS + 1)[:THRESHOLDS])
        ranges = _widened(runs, half, n)
        first = np.array([entry[a : b + 1].min() for a, b in ranges])
        seen = np.cumsum(np.bincount(first, minlength=THRESHOLDS + 1)[:THRESHOLDS]) / len(ranges)
        recall = np.minimum(found / ((positives + positives + extra) / 2), 1.0) * seen
        precision = found / predicted
        area.append(float(np.dot(np.diff(np.concatenate([[0.0], recall])), precision)))
    return float(np.mean(area))


def _widened(runs: np.ndarray, half: int, n: int) -> list[tuple[int, int]]:
    """The labelled ranges with their buffers; those that touch are one."""
    out = []
    start = max(int(runs[0, 0]) - half, 0)
    for (_, end), (following, _) in itertools.pairwise(runs):
        if end + half < following - half:
            out.append((start, int(end) + half))
            start = int(following) - half
    out.append((start, min(int(runs[-1, 1]) + half, n - 1)))
    return out


def alarms(exceeds: np.ndarray, step_s: float) -> int:
    """Alarms of a run of exceedances, a long one counted again for every hour it starts."""
    at_s = np.flatnonzero(exceeds) * step_s
    if not len(at_s):
        return 0
    cut = np.flatnonzero(np.diff(at_s) > MERGE_S)
    first = at_s[np.concatenate([[0], cut + 1])]
    last = at_s[np.concatenate([cut, [len(at_s) - 1]])]
    return int((1 + (last - first) // HOUR_S).sum())


def train_threshold(score: np.ndarray, step_s: float, per_day: float = BUDGET_PER_DAY) -> float:
    """The lowest threshold that keeps the budget on scores of healthy time."""
    allowed = max(1, int(per_day * len(score) * step_s / 86_400.0))
    levels = np.unique(score)
    low, high = 0, len(levels) - 1  # alarms fall with the level, nearly: bisect
    while low < high:
        middle = (low + high) // 2
        if alarms(score > levels[middle], step_s) <= allowed:
            high = middle
        else:
            low = middle + 1
    return float(levels[low])


def judge(
    label: np.ndarray, score: np.ndarray, threshold: float, step_s: float, buffer: int
) -> Result:
    """What one score is worth on one labelled series."""
    n, exceeds = len(label), score > threshold
    before, after = int(BEFORE_S / step_s), int(AFTER_S / step_s)
    excused, delays, runs = np.zeros(n, dtype=bool), [], segments(label)
    for start, end in runs:
        excused[max(0, start - before) : end + after + 1] = True
        reach = max(end, start + int(EARLY_S / step_s))
        hits = np.flatnonzero(exceeds[start : reach + 1])
        if len(hits):
            delays.append(float(hits[0]) * step_s)
    false = alarms(exceeds & ~excused, step_s)
    return Result(
        vus_pr(label, score, buffer),
        len(delays) / len(runs),
        len(delays) / (len(delays) + false) if delays else 0.0,
        false / (n * step_s / WEEK_S),
        float(np.median(delays)) if delays else float("nan"),
    )


# The methods. Each fits on train, and takes its threshold from train alone.


def detector(train: np.ndarray, test: np.ndarray, step_s: float) -> tuple[np.ndarray, float]:
    """Ours, with its defaults."""
    from sentinel.learn.detector import Detector

    found = Detector(false_alarms_per_day=BUDGET_PER_DAY).fit(train, step_s=step_s)
    return found.score(test), found.threshold_


def _z(train: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return (rows - train.mean(axis=0)) / np.maximum(train.std(axis=0), 0.01)


def _halves(
    fit: Callable[[np.ndarray], Callable[[np.ndarray], np.ndarray]],
    train: np.ndarray,
    test: np.ndarray,
    step_s: float,
) -> tuple[np.ndarray, float]:
    """Score of a method that is fitted once; the threshold from each half of train judged by
    the other, so that it has not seen what it judges."""
    middle = len(train) // 2
    first, second = train[:middle], train[middle:]
    held = np.concatenate([fit(second)(first), fit(first)(second)])
    return fit(train)(test), train_threshold(held, step_s)


def z_rms(train: np.ndarray, test: np.ndarray, step_s: float) -> tuple[np.ndarray, float]:
    """Root mean square of the z-scores of all metrics."""

    def fit(rows: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        return lambda x: np.sqrt((_z(rows, x) ** 2).mean(axis=1))

    return _halves(fit, train, test, step_s)


def static_rules(train: np.ndarray, test: np.ndarray, step_s: float) -> tuple[np.ndarray, float]:
    """Any metric more than 3 standard deviations from its mean; the score is the largest."""
    return np.abs(_z(train, test)).max(axis=1), 3.0


def adaptive_band(train: np.ndarray, test: np.ndarray, step_s: float) -> tuple[np.ndarray, float]:
    """Share of metrics outside a band of 3 deviations about their own last day, as alerting on
    moving averages does it."""
    day = max(10, int(86_400 / step_s))
    rows = np.concatenate([train, test])
    total = np.cumsum(np.concatenate([np.zeros((1, rows.shape[1])), rows]), axis=0)
    square = np.cumsum(np.concatenate([np.zeros((1, rows.shape[1])), rows**2]), axis=0)
    end = np.arange(len(rows))
    start = np.maximum(end - day, 0)
    count = np.maximum(end - start, 1)[:, None]
    mean = (total[end] - total[start]) / count
    deviation = np.sqrt(np.maximum((square[end] - square[start]) / count - mean**2, 0.0))
    share = (np.abs(rows - mean) > 3.0 * np.maximum(deviation, 0.01)).mean(axis=1)
    return share[len(train) :], train_threshold(share[day : len(train)], step_s)


def kmeans_rate(train: np.ndarray, test: np.ndarray, step_s: float) -> tuple[np.ndarray, float]:
    """As Netdata does it: per metric two k-means clusters of six smoothed, differenced, lagged
    values; a metric is odd beyond its 99th training percentile; the score is the share of odd
    metrics, meaned over five rows."""
    from sklearn.cluster import KMeans

    def lagged(x: np.ndarray) -> np.ndarray:
        change = np.diff(x, prepend=x[:1])
        smooth = np.convolve(np.concatenate([np.zeros(2), change]), np.ones(3) / 3, "valid")
        wide = np.concatenate([np.full(5, smooth[0]), smooth])
        return np.lib.stride_tricks.sliding_window_view(wide, 6)

    odd_train, odd_test = [], []
    for column in range(train.shape[1]):
        own, new = lagged(train[:, column]), lagged(test[:, column])
        if np.ptp(own) == 0.0:
            odd_train.append(np.zeros(len(own)))
            odd_test.append(np.ptp(new, axis=1) > 0)
            continue
        centres = KMeans(2, n_init=1, random_state=0).fit(own[::5]).cluster_centers_
        far = [
            np.min(np.linalg.norm(x[:, None, :] - centres[None], axis=2), axis=1)
            for x in (own, new)
        ]
        edge = np.quantile(far[0], 0.99)
        odd_train.append(far[0] > edge)
        odd_test.append(far[1] > edge)

    def rate(odd: list[np.ndarray]) -> np.ndarray:
        share = np.mean(np.array(odd, dtype=np.float64), axis=0)
        return np.convolve(np.concatenate([np.zeros(4), share]), np.ones(5) / 5, "valid")

    return rate(odd_test), train_threshold(rate(odd_train), step_s)


def windowed(rows: np.ndarray, steps: int = 10) -> np.ndarray:
    """Trailing means and deviations over `steps` rows [rows, 2 x metrics]."""
    wide = np.concatenate([np.repeat(rows[:1], steps - 1, axis=0), rows])
    view = np.lib.stride_tricks.sliding_window_view(wide, steps, axis=0)
    return np.concatenate([view.mean(axis=-1), view.std(axis=-1)], axis=1)


def isolation_forest(
    train: np.ndarray, test: np.ndarray, step_s: float
) -> tuple[np.ndarray, float]:
    """Isolation forest on window features, scikit-learn's defaults."""
    from sklearn.ensemble import IsolationForest

    def fit(rows: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        forest = IsolationForest(random_state=0).fit(windowed(rows))
        return lambda x: -forest.score_samples(windowed(x))

    return _halves(fit, train, test, step_s)


def nearest(train: np.ndarray, test: np.ndarray, step_s: float) -> tuple[np.ndarray, float]:
    """Distance to the fifth nearest of 3,000 training rows, on standardised window features."""
    from sklearn.neighbors import NearestNeighbors

    def fit(rows: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        known = windowed(rows)
        mean, scale = known.mean(axis=0), np.maximum(known.std(axis=0), 0.01)
        picked = known[np.linspace(0, len(known) - 1, min(3000, len(known))).astype(int)]
        search = NearestNeighbors(n_neighbors=5, algorithm="brute").fit((picked - mean) / scale)
        return lambda x: search.kneighbors((windowed(x) - mean) / scale)[0][:, -1]

    return _halves(fit, train, test, step_s)


METHODS: Mapping[str, Method] = {
    "detector": detector,
    "z-score": z_rms,
    "static rules": static_rules,
    "adaptive band": adaptive_band,
    "k-means rate": kmeans_rate,
    "isolation forest": isolation_forest,
    "nearest neighbours": nearest,
}


def smd_table(
    names: Sequence[str] | None = None,
    methods: Mapping[str, Method] = METHODS,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, dict[str, Result]]:
    """{method: {machine: Result}} over machines of the Server Machine Dataset.

    Raises FileNotFoundError where the data folder is absent.
    """
    names = machines() if names is None else list(names)
    if not names:
        raise FileNotFoundError(f"no data folder: {DATA} is missing (set SENTINEL_DATA)")
    table: dict[str, dict[str, Result]] = {method: {} for method in methods}
    for machine in names:
        train, test, label = load(machine)
        buffer = period(test[:, 0])
        for method, run in methods.items():
            progress(f"{machine}: {method}")
            score, threshold = run(train, test, STEP_S)
            table[method][machine] = judge(label, score, threshold, STEP_S, buffer)
    return table


def mean_of(results: Iterable[Result]) -> Result:
    """The mean over machines, field by field; machines without a delay have none to average."""
    rows = np.array([dataclasses.astuple(r) for r in results], dtype=np.float64)
    known = np.isfinite(rows)
    total = np.where(known, rows, 0.0).sum(axis=0)
    return Result(*(total / np.maximum(known.sum(axis=0), 1)))


def show(table: Mapping[str, Mapping[str, Result]]) -> str:
    """The table as text: a line per method with its means, then ours machine by machine."""
    head = f"{'':<22}{'VUS-PR':>8}{'recall':>8}{'precision':>11}{'false/week':>12}{'delay':>9}"

    def line(name: str, r: Result) -> str:
        return (
            f"{name:<22}{r.vus_pr:>8.3f}{r.recall:>8.2f}{r.precision:>11.2f}"
            f"{r.false_alarms_per_week:>12.2f}{r.delay_s / 60:>5.0f} min"
        )

    out = [head] + [line(method, mean_of(rows.values())) for method, rows in table.items()]
    for method in [m for m in table if m == "detector"] or list(table)[:1]:
        out += ["", f"{method}, by machine"]
        out += [line(machine, result) for machine, result in table[method].items()]
    return "\n".join(out)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="VUS-PR and events on labelled machines")
    parser.add_argument("--machines", nargs="*", help="by default all that are there")
    parser.add_argument("--methods", nargs="*", choices=list(METHODS), help="by default all")
    chosen = parser.parse_args(argv)
    methods = {m: METHODS[m] for m in chosen.methods or METHODS}
    try:
        table = smd_table(
            chosen.machines, methods, lambda line: print(line, file=sys.stderr, flush=True)
        )
    except FileNotFoundError as err:
        print(f"skipped: {err}", file=sys.stderr)
        return 0
    print(show(table))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
