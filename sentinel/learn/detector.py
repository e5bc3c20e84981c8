"""A detector for any multivariate time series: the daemon's own, on plain arrays.

    found = Detector(false_alarms_per_day=1 / 7).fit(train, step_s=60)
    strange = found.score(test) > found.threshold_

One configuration serves every data set. It is the code that judges GPUs: the window columns
and the smoothing of `core.stream`, the distance to cores of `core.score`, the growth of
normal of `core.adapt`, and cores found by `DensityBaseline`. A fleet of one GPU and this
class give the same scores for the same signals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Self

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from sentinel.core.adapt import BLOCK_STEPS, Adapter
from sentinel.core.domain import Bools, Floats
from sentinel.core.score import MEAN, NOW, SPREAD, Density, Space, score_rows, signal_space
from sentinel.core.stream import STEPS, smooth, window_columns
from sentinel.learn.baseline import DensityBaseline

_MIN_ROWS: Final = 4 * STEPS  # two windows to learn from, and two to set the threshold by
_LEARN_S: Final = 5 * 86_400.0  # of the training time, at most half of it
_CLIP: Final = 20.0
_CORES: Final = 64  # 32 do as well on labelled telemetry, 200 and 500 worse
_FEWEST_CORES: Final = 8
_ROWS_PER_CORE: Final = 100  # with fewer the edge would be drawn around single rows
_SMOOTH_STEPS: Final = 5
_MERGE_S: Final = 900.0  # exceedances so close are one alarm
_HOUR_S: Final = 3600.0  # a person is disturbed again by every hour that an alarm lasts
_DAY_S: Final = 86_400.0
# healthy time ahead reaches a little further than the highest of what has been seen
_MARGIN: Final = 1.1


class Detector(BaseEstimator):
    """Anomaly scores of a time series, one per row, from what came before it alone.

    Parameters
    ----------
    false_alarms_per_day : float
        How many alarms a healthy day may bring at `threshold_`.
    demand : sequence of int or str, optional
        Columns that say what is asked of the machine: numbers, or names where `fit` is given
        a DataFrame. The others, by default all, are its response and are judged given these.
        Under a demand never seen before nothing is known: the score is then 0.
    space, floors : optional
        Columns and smallest deviations worth noticing that are known beforehand, as they are
        for GPUs (`core.score.GPU_SPACE`).

    Attributes
    ----------
    threshold_ : float, from the training rows alone: scores above it are alarms
    baseline_ : DensityBaseline, the model of the training rows
    density_ : core.score.Density, what normal looks like; `density_.space.names` are the
        columns of `contributions`
    n_features_in_ : int
    """

    def __init__(
        self,
        false_alarms_per_day: float = 1 / 7,
        demand: Sequence[int | str] | None = None,
        space: Space | None = None,
        floors: Any = None,
    ) -> None:
        self.false_alarms_per_day = false_alarms_per_day
        self.demand = demand
        self.space = space
        self.floors = floors

    def fit(self, train: Any, y: Any = None, *, step_s: float = 60.0) -> Self:
        """Learns from float rows [rows, metrics] in time order, `step_s` seconds apart, taken to
        be mostly healthy. NaN = unknown. Raises ValueError that says what is wrong with them.

        The threshold is the lowest that keeps the budget on the later part of `train`, judged
        online by a model of the earlier part; the model is then learnt from all of it.
        """
        if not (np.isfinite(step_s) and step_s > 0):
            raise ValueError(f"step_s must be a positive number of seconds, got {step_s}")
        if not (np.isfinite(self.false_alarms_per_day) and self.false_alarms_per_day > 0):
            raise ValueError(
                f"false_alarms_per_day must be positive, got {self.false_alarms_per_day}"
            )
        names = _names(train)
        rows = _checked(train, "train")
        if len(rows) < _MIN_ROWS:
            raise ValueError(f"train has {len(rows)} rows, at least {_MIN_ROWS} are needed")
        self.n_features_in_ = rows.shape[1]
        self.step_s_ = float(step_s)
        space = self.space
        if space is None:
            space = signal_space(
                names or tuple(f"x{i}" for i in range(rows.shape[1])),
                _demand(self.demand, names, rows.shape[1]),
                (NOW, MEAN, SPREAD),
                clip=_CLIP,
                smooth_steps=_SMOOTH_STEPS,
            )
        elif space.signals != rows.shape[1]:
            raise ValueError(f"train has {rows.shape[1]} columns, the space {space.signals}")
        columns = self._columns(space, rows)
        first = min(int(_LEARN_S / step_s), len(rows) // 2)
        held = self._run(self._learn(space, columns[:first]).density_, columns[first:])[0]
        self.baseline_ = self._learn(space, columns)
        self.density_: Density = self.baseline_.density_
        self.threshold_ = _MARGIN * _threshold(held, self.false_alarms_per_day, step_s)
        return self

    def score(self, test: Any, y: Any = None) -> Floats:
        """One anomaly score per row [rows]: 1.0 = the edge of the training rows, higher =
        stranger, 0 where nothing is known.

        Each call begins a new stream with what `fit` left: no time between `train` and `test`
        is assumed, and the same rows give the same scores. New states are learnt on the way;
        the score of a row depends on the rows before it and never on those after.
        """
        check_is_fitted(self)
        rows = self._fitting(test)
        return self._run(self.density_, self._columns(self.density_.space, rows))[0]

    def contributions(self, test: Any) -> Floats:
        """What each column adds to the score [rows, columns of `density_.space`]; sums to it."""
        check_is_fitted(self)
        rows = self._fitting(test)
        return self._run(self.density_, self._columns(self.density_.space, rows))[1]

    def _fitting(self, test: Any) -> Floats:
        rows = _checked(test, "test")
        if rows.shape[1] != self.n_features_in_:
            raise ValueError(
                f"test has {rows.shape[1]} columns, fit was given {self.n_features_in_}"
            )
        return rows

    def _learn(self, space: Space, columns: Floats) -> DensityBaseline:
        if self.floors is None:
            cores = int(np.clip(len(columns) // _ROWS_PER_CORE, _FEWEST_CORES, _CORES))
            return DensityBaseline(space, max_cores=cores, spread=True).fit(columns)
        return DensityBaseline(space, self.floors).fit(columns)

    @staticmethod
    def _columns(space: Space, rows: Floats) -> Floats:
        """Window columns [rows, columns] of a series that begins with its first row."""
        before = np.full((STEPS - 1, rows.shape[1]), np.nan)
        series = np.concatenate([before, rows])
        ring = np.lib.stride_tricks.sliding_window_view(series, len(rows), axis=0)
        return window_columns(space, np.moveaxis(ring, -1, 1))

    def _run(self, density: Density, columns: Floats) -> tuple[Floats, Floats]:
        """(scores [rows], contributions [rows, columns]) of a stream that begins here."""
        adapter = Adapter(density, step_s=self.step_s_)
        columns = density.bounded(columns)
        back = density.space.smooth_steps - 1
        past = np.full(back + len(columns), np.nan)  # raw scores, with room for those before
        score, share = np.zeros(len(columns)), np.zeros_like(columns)
        for start in range(0, len(columns), BLOCK_STEPS):
            part = slice(start, min(start + BLOCK_STEPS, len(columns)))
            block, n = columns[part], part.stop - part.start
            raw, _, contribution, _ = score_rows(adapter.density, block)
            past[back + start : back + part.stop] = raw
            before = np.array([past[start + k : part.stop + k] for k in range(back)])
            smoothed, contribution = smooth(raw, contribution, before)
            score[part], share[part] = np.nan_to_num(smoothed), contribution
            adapter.add(block, raw, np.ones(n, dtype=bool), np.zeros(n, dtype=np.int64), steps=n)
        return score, share


def _names(train: Any) -> tuple[str, ...] | None:
    columns = getattr(train, "columns", None)
    return None if columns is None else tuple(str(name) for name in columns)


def _demand(demand: Sequence[int | str] | None, names: tuple[str, ...] | None, width: int) -> Bools:
    """Which columns are demand [width]. Raises ValueError for one that is not there."""
    out = np.zeros(width, dtype=bool)
    for wanted in demand if demand is not None else ():
        if isinstance(wanted, str):
            if names is None or wanted not in names:
                known = ", ".join(names) if names else "none: give column numbers or a DataFrame"
                raise ValueError(f"demand column {wanted!r} is not in train (names: {known})")
            out[names.index(wanted)] = True
        elif -width <= int(wanted) < width:
            out[int(wanted)] = True
        else:
            raise ValueError(f"demand column {wanted} is not in train, which has {width} columns")
    if width and out.all():
        raise ValueError("every column is demand: no response is left to judge")
    return out


def _checked(given: Any, name: str) -> Floats:
    """Rows as float64 [rows, metrics], or a ValueError that says what is wrong."""
    try:
        rows = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError) as err:
        raise ValueError(f"{name} must be an array of numbers [rows, metrics]: {err}") from err
    if rows.ndim != 2 or rows.shape[1] == 0:
        raise ValueError(f"{name} must have two axes [rows, metrics], its shape is {rows.shape}")
    if np.isinf(rows).any():
        column = int(np.flatnonzero(np.isinf(rows).any(axis=0))[0])
        raise ValueError(f"{name} has an infinite value in column {column}; NaN says unknown")
    return rows


def _threshold(score: Floats, per_day: float, step_s: float) -> float:
    """The lowest threshold that keeps the budget on scores of healthy time [rows]."""
    allowed = int(per_day * len(score) * step_s / _DAY_S)
    levels = np.unique(score)
    low, high = 0, len(levels) - 1
    while low < high:  # a higher level alarms no more often, nearly: bisect
        middle = (low + high) // 2
        if _alarms(score > levels[middle], step_s) <= allowed:
            high = middle
        else:
            low = middle + 1
    return float(levels[low])


def _alarms(exceeds: Bools, step_s: float) -> int:
    """Alarms in a run of exceedances; one that lasts counts again for every hour it starts."""
    at_s = np.flatnonzero(exceeds) * step_s
    if not len(at_s):
        return 0
    cut = np.flatnonzero(np.diff(at_s) > _MERGE_S)
    first = at_s[np.concatenate([[0], cut + 1])]
    last = at_s[np.concatenate([cut, [len(at_s) - 1]])]
    return int((1 + (last - first) // _HOUR_S).sum())
