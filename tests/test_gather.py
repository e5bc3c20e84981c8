"""Rows for learning: what a live tick would have seen, in bounded number, without what was ill."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sentinel.core.features import FEATURES, INDEX, Window
from sentinel.core.frame import Identity, Samples, Telemetry
from sentinel.core.verdict import Settings
from sentinel.data import load_catalog
from sentinel.gather import Exclusion, frames, gather, ticks_between
from tests.bench.fleets import SyntheticFleet

CATALOG = load_catalog()
START_S = 1_790_000_040.0
HOUR_S = 3600.0


class SyntheticHistory:
    """Stands where a Prometheus would: every series scraped each `step_s`, for any window."""

    def __init__(self, gpus, step_s=60.0, offset_s=0.0, change=lambda at_s, values: None):
        self.fleet, self.step_s, self.offset_s = SyntheticFleet(gpus), step_s, offset_s
        self.change, self.read = change, []

    def history(self, start_s, end_s, *, slice_s):
        while start_s < end_s:
            until_s = min(start_s + slice_s, end_s)
            first, last = (np.floor((t - self.offset_s) / self.step_s) for t in (start_s, until_s))
            times = self.offset_s + self.step_s * np.arange(first + 1, last + 1)
            self.read.append((start_s, until_s))
            yield self._samples(times, until_s)
            start_s = until_s

    def _samples(self, times, at_s):
        columns = []
        for time in times:
            values = self.fleet.samples(time).values.reshape(-1, self.fleet.gpus)
            self.change(time, values)
            columns.append(values.reshape(-1))
        series = np.repeat(self.fleet.series, len(times))
        values = np.stack(columns, axis=1).reshape(-1) if columns else np.zeros(0)
        return Samples(
            at_s, self.fleet.keys, series, np.tile(times, len(self.fleet.series)), values
        )


def gathered(source, hours, **given):
    return gather(
        source,
        Telemetry(CATALOG, Identity()),
        CATALOG,
        Settings(),
        START_S,
        START_S + hours * HOUR_S,
        **{"tick_s": 15.0, "slice_s": 600.0, **given},
    )


def only(found):
    (rows,) = found.rows.values()
    return rows


@settings(max_examples=6, deadline=None)
@given(
    step_s=st.sampled_from([5.0, 15.0, 30.0, 60.0]),
    offset_s=st.floats(0.0, 60.0),
    seed=st.integers(0, 99),
)
def test_a_learnt_row_is_what_a_live_tick_would_have_seen(step_s, offset_s, seed):
    """Live ticks come every 15 s whatever the scrapes; learning walks at the pace of the scrapes.
    Their features differ by noise alone: which of two scrapes weighs how much in a mean. That
    is less than the smallest deviation that counts, and nothing in the mean."""
    source = SyntheticHistory(8, step_s, offset_s)
    source.fleet = SyntheticFleet(8, seed)
    rows = only(gathered(source, 1.0))
    source = SyntheticHistory(8, step_s, offset_s)
    source.fleet = SyntheticFleet(8, seed)
    live, window = {}, Window(60.0)
    ticks = ticks_between(START_S, START_S + HOUR_S, 15.0)
    slices = source.history(START_S, START_S + HOUR_S, slice_s=600.0)
    for frame in frames(Telemetry(CATALOG, Identity()), slices, ticks):
        live[frame.at_s] = window.push(frame, max_age_s=60.0)
    floors = np.array([f.floor * (600.0 if f.relative else 1.0) for f in FEATURES])
    apart = []
    for at_s in np.unique(rows.at_s):
        own = rows.at_s == at_s
        if at_s not in live or own.sum() < 8:
            continue
        there = live[at_s]
        apart.append((rows.values[own] - there.values[rows.gpu[own]]) / floors)
        assert np.array_equal(np.isnan(rows.values[own]), np.isnan(there.values))
        np.testing.assert_allclose(rows.power_w[own], there.power_ewma_w, rtol=0.04)
    assert len(apart) >= 50
    assert np.nanmax(np.abs(apart)) < 1.0
    assert np.nanquantile(np.abs(apart), 0.99) < 0.4
    with_any = np.isfinite(apart).any(axis=(0, 1))
    assert np.abs(np.nanmean(np.array(apart)[:, :, with_any], axis=(0, 1))).max() < 0.02


def test_at_the_pace_of_the_live_tick_the_rows_are_equal():
    rows = only(gathered(SyntheticHistory(4, 15.0), 0.5))
    window, checked = Window(60.0), 0
    source = SyntheticHistory(4, 15.0)
    slices = source.history(START_S, START_S + 0.5 * HOUR_S, slice_s=600.0)
    ticks = ticks_between(START_S, START_S + 0.5 * HOUR_S, 15.0)
    for frame in frames(Telemetry(CATALOG, Identity()), slices, ticks):
        live = window.push(frame, max_age_s=60.0)
        own = rows.at_s == frame.at_s
        if own.any():
            np.testing.assert_array_equal(rows.values[own], live.values.astype(np.float32))
            checked += 1
    assert checked >= 100


def test_a_large_fleet_gives_bounded_rows_and_every_gpu_gives_some():
    found = gathered(SyntheticHistory(60), 12.0, rows_total=6000)
    rows = only(found)
    assert found.read_share == pytest.approx(1.0)
    assert 0.8 * 6000 <= len(rows.values) <= 1.3 * 6000
    share = np.bincount(rows.gpu, minlength=60)
    assert share.min() >= 0.3 * share.mean()
    for gpu in range(60):  # in runs of successive rows, so that what lasts can be told
        own = np.diff(rows.at_s[rows.gpu == gpu])
        assert np.mean(own == rows.step_s) > 0.8
    assert rows.step_s == 60.0
    assert rows.values.dtype == rows.power_w.dtype == np.float32


def test_too_much_history_is_read_in_bursts_all_over_the_window():
    source = SyntheticHistory(6)
    whole = 6 * 20 * 60 * 24 * 7
    found = gathered(source, 24.0 * 7, samples_total=whole // 8)
    assert found.samples <= 1.2 * whole / 8
    assert 0.1 <= found.read_share <= 0.15
    hour_of_day = np.unique((only(found).at_s // HOUR_S) % 24)
    assert len(hour_of_day) >= 18
    day = np.bincount(((only(found).at_s - START_S) // (24 * HOUR_S)).astype(int))
    assert day.min() >= 0.4 * day.mean()


def test_after_a_gap_the_windows_fill_before_anything_is_taken():
    source = SyntheticHistory(6)
    found = gathered(source, 72.0, samples_total=6 * 20 * 60 * 24)
    starts = [a for (a, _), (_, b) in zip(source.read[1:], source.read, strict=False) if a > b + 1]
    assert len(starts) >= 5
    at_s = only(found).at_s
    for start in starts:
        assert not np.any((at_s > start) & (at_s < start + 600.0))


def test_what_was_under_an_incident_is_left_out():
    uuid = "GPU-00000002-0000-4000-8000-000000000000"
    from_s, to_s = START_S + HOUR_S, START_S + 2 * HOUR_S
    rows = only(gathered(SyntheticHistory(8), 3.0, exclusions=[Exclusion(uuid, from_s, to_s)]))
    at_s = rows.at_s[rows.gpu == rows.uuids.index(uuid)]
    assert len(at_s) > 60
    assert not np.any((at_s >= from_s) & (at_s <= to_s))
    others = rows.at_s[rows.gpu != rows.uuids.index(uuid)]
    assert np.any((others >= from_s) & (others <= to_s))


def test_hard_evidence_keeps_the_hour_after_it_out():
    fails_s = START_S + HOUR_S

    def xid_79(at_s, values):
        if at_s >= fails_s:
            values[9, 3] = 79.0

    rows = only(gathered(SyntheticHistory(8, change=xid_79), 4.0))
    at_s = rows.at_s[rows.gpu == 3]
    assert not np.any((at_s >= fails_s) & (at_s <= fails_s + HOUR_S))
    assert np.any(at_s > fails_s + HOUR_S)
    assert np.any(at_s < fails_s)


def test_work_that_changes_is_not_learnt_until_it_has_settled():
    changes_s = START_S + HOUR_S

    def more_memory(at_s, values):
        if at_s >= changes_s:
            values[7] = 20_000.0

    rows = only(gathered(SyntheticHistory(4, change=more_memory), 2.0))
    assert not np.any((rows.at_s >= changes_s) & (rows.at_s < changes_s + 300.0))


def test_models_are_kept_apart():
    source = SyntheticHistory(8)
    keys = source.fleet.keys
    for place in range(0, len(keys), 2):
        labels = [(n, "NVIDIA A100" if n == "modelName" else v) for n, v in keys[place].labels]
        keys[place] = type(keys[place])(keys[place].name, tuple(labels))
    found = gathered(source, 1.0)
    assert sorted(found.rows) == ["NVIDIA A100", "NVIDIA H100 80GB HBM3"]
    assert [len(r.uuids) for r in found.rows.values()] == [4, 4]


def test_nothing_to_read_is_no_rows():
    class Silent(SyntheticHistory):
        def _samples(self, times, at_s):
            return super()._samples(times[:0], at_s)

    found = gathered(Silent(4), 1.0)
    assert (found.rows, found.gpus, found.samples) == ({}, 0, 0)


def test_power_is_where_the_catalogue_has_it():
    assert (
        550 < np.nanmean(only(gathered(SyntheticHistory(4), 0.5)).values[:, INDEX["power"]]) < 650
    )
