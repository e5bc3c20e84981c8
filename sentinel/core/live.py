"""Scores of a fleet, tick after tick: one stream and one growing density per GPU model.

The signals of a GPU are its features after physics has had its say (`score.py`: the thermal
model, the air of its host, sleep, excuses). From there on it is the code of `stream.py` and
`adapt.py`, as for any other series.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from sentinel.core.adapt import Adapter
from sentinel.core.domain import Bools, Floats, Gpu, Ints
from sentinel.core.features import MEM_TEMP, TEMP, Features
from sentinel.core.score import (
    Cohort,
    Scores,
    asleep,
    empty_scores,
    excuses,
    host_median,
    thermal_excess,
)
from sentinel.core.stream import Stream

# nothing is learnt in operation that the cores of training do not call normal
_WITHIN: Final = 1.0


@dataclass
class _Members:
    """One cohort's rows in the frame, their places in the thermal table (-1: not known), the
    numbers of their hosts and of themselves, and what is kept of them between ticks."""

    rows: Ints
    known: Ints
    host: Ints
    number: Ints
    stream: Stream
    adapter: Adapter
    # the last word of the present grid step: columns, raw scores, and who may be learnt from
    word: tuple[Floats, Floats, Bools] | None = field(default=None)


class LiveScores:
    """What scoring keeps between ticks. Rows are found anew only when the roster or the
    bundle changes; what is known of a GPU moves with its UUID."""

    def __init__(self, grid_s: float) -> None:
        self._grid_s = grid_s
        self._members: dict[str, _Members] = {}
        self._numbers: dict[str, int] = {}
        self._gpus: tuple[Gpu, ...] = ()
        self._cohorts: Mapping[str, Cohort] | None = None
        self._step = -1

    @property
    def grown(self) -> dict[str, int]:
        """Cores found in operation, by GPU model."""
        return {model: own.adapter.added for model, own in self._members.items()}

    def score(
        self, cohorts: Mapping[str, Cohort], gpus: tuple[Gpu, ...], features: Features
    ) -> Scores:
        """Scores of a whole fleet; GPUs of a model without a cohort stay unscored (NaN)."""
        out = empty_scores(len(gpus))
        step = int(features.at_s // self._grid_s)
        if step != self._step:
            self._end_step(step - self._step)
            self._step = step
        self._follow(cohorts, gpus)
        for model, own in self._members.items():
            _score_cohort(out, cohorts[model], own, features, step)
        return out

    def learn(self, may_learn: Bools, under: frozenset[str] = frozenset()) -> None:
        """Ends a tick: which rows [gpus] are normal beyond doubt, so that their present state
        may become part of normal, less the GPUs of these UUIDs. The last tick of a grid step
        has the say."""
        suspects = [self._numbers[uuid] for uuid in under if uuid in self._numbers]
        for own in self._members.values():
            if own.word is not None:
                columns, raw, _ = own.word
                allowed = may_learn[own.rows] & ~np.isin(own.number, suspects)
                own.word = (columns, raw, allowed)

    def _end_step(self, steps: int) -> None:
        for own in self._members.values():
            if own.word is not None:
                own.adapter.add(*own.word, own.number, steps=max(1, steps))
            own.word = None

    def _follow(self, cohorts: Mapping[str, Cohort], gpus: tuple[Gpu, ...]) -> None:
        if gpus is self._gpus and cohorts is self._cohorts:
            return
        rows_of: dict[str, list[int]] = {}
        for row, gpu in enumerate(gpus):
            if gpu.model in cohorts:
                rows_of.setdefault(gpu.model, []).append(row)
        before, self._members = self._members, {}
        for model, rows in rows_of.items():
            cohort, old = cohorts[model], before.get(model)
            where = {uuid: i for i, uuid in enumerate(cohort.thermal.uuids)}
            hosts: dict[str, int] = {}
            number = [self._numbers.setdefault(gpus[r].uuid, len(self._numbers)) for r in rows]
            stream = old.stream if old else Stream(cohort.density.space)
            place = {int(n): i for i, n in enumerate(old.number)} if old else {}
            stream.follow(np.array([place.get(n, -1) for n in number], dtype=np.int64))
            adapter = old.adapter if old else None
            if adapter is None or cohorts is not self._cohorts:
                adapter = Adapter(
                    cohort.density, step_s=self._grid_s, gpus=len(rows), within=_WITHIN
                )
            adapter.cohort_of(len(rows))
            self._members[model] = _Members(
                np.array(rows),
                np.array([where.get(gpus[r].uuid, -1) for r in rows], dtype=np.int64),
                np.array([hosts.setdefault(gpus[r].node, len(hosts)) for r in rows]),
                np.array(number, dtype=np.int64),
                stream,
                adapter,
            )
        self._gpus, self._cohorts = gpus, cohorts


def _score_cohort(
    out: Scores, cohort: Cohort, own: _Members, features: Features, step: int
) -> None:
    """Fills in the rows of one cohort."""
    rows = own.rows
    temps = features.values[rows][:, [TEMP, MEM_TEMP]]
    power_w = features.power_ewma_w[rows]
    excess, predicted = thermal_excess(cohort.thermal, own.known, power_w, temps, own.host)
    values = features.values[rows].copy()
    values[:, [TEMP, MEM_TEMP]] = np.maximum(excess, 0.0)  # cooler is no evidence
    asleep(cohort.density, values)
    softer = excuses(cohort.density, values)
    scored, columns = own.stream.push(step, values, own.adapter.density, softer)
    out.score[rows] = np.where(features.ready[rows], scored.score, np.nan)
    out.novel[rows] = scored.novel
    out.contribution[rows] = scored.contribution
    out.values[rows] = values
    out.expected[rows] = scored.expected
    out.predicted_c[rows] = predicted
    alone, _ = thermal_excess(cohort.thermal, own.known, power_w, temps)
    out.air_c[rows] = host_median(alone[:, 0], own.host)
    own.word = (columns, scored.raw, np.zeros(len(rows), dtype=bool))
