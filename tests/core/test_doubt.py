"""What cannot be so is not known, and is no evidence."""

from dataclasses import replace

import numpy as np
import pytest

from sentinel.core.catalog import Catalog
from sentinel.core.domain import Presence
from sentinel.core.frame import Telemetry
from tests.core.telemetry import CATALOG, IDENTITY, START_S, gpu, key, samples, scrape, value

UTIL, TEMP, POWER = "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_POWER_USAGE"
ENERGY, ACTIVE = "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "DCGM_FI_PROF_GR_ENGINE_ACTIVE"
DRAM, CRC = "DCGM_FI_PROF_DRAM_ACTIVE", "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL"
NVLINK = "DCGM_FI_PROF_NVLINK_TX_BYTES"


def needing(**needs):
    """The catalogue with these needs and no others: {metric: need}."""
    metrics = [
        replace(m, needs=(needs[m.name],) if m.name in needs else ()) for m in CATALOG.metrics
    ]
    return Catalog(metrics, CATALOG.aliases, CATALOG.xids())


PROFILED = needing(gr_engine_active_ratio="profiling", dram_active_ratio="profiling")
LINKED = needing(nvlink_tx_bytes_per_s="nvlink", nvlink_crc_errors="nvlink", gpu_util_ratio="whole")


def frames(telemetry, ticks, story, step_s=15.0):
    """One frame per tick; `story(i)` gives the metrics of GPU 0, its siblings are well."""
    out = []
    for i in range(ticks):
        at_s = START_S + i * step_s
        points = scrape(at_s, [0], **story(i))
        points += scrape(at_s, [1], up=None, **{TEMP: 40 + i % 5, POWER: 60.5 + i % 7})
        telemetry.add(samples(at_s, *points))
        out.append(telemetry.frame(at_s))
    return out


def test_profiling_that_stands_at_zero_while_the_gpu_works_says_nothing():
    telemetry = Telemetry(PROFILED, IDENTITY)
    (frame,) = frames(telemetry, 1, lambda i: {UTIL: 97, ACTIVE: 0.0, DRAM: 0.0, TEMP: 60})
    assert np.isnan(value(frame, "gr_engine_active_ratio"))
    assert np.isnan(value(frame, "dram_active_ratio"))
    assert value(frame, "gpu_util_ratio") == pytest.approx(0.97)
    assert telemetry.rejected == {"profiling at zero": 1}


@pytest.mark.parametrize(
    "shown", [{UTIL: 2, ACTIVE: 0.0, DRAM: 0.0}, {UTIL: 97, ACTIVE: 0.4, DRAM: 0.0}]
)
def test_profiling_that_agrees_with_the_load_counts(shown):
    (frame,) = frames(Telemetry(PROFILED, IDENTITY), 1, lambda i: shown)
    assert value(frame, "gr_engine_active_ratio") == shown[ACTIVE]
    assert value(frame, "dram_active_ratio") == 0.0


def pcie_card(model):
    return frozenset({"nvlink"} if model == "H100" else ())


def test_what_a_model_cannot_have_is_masked_and_counted():
    telemetry = Telemetry(LINKED, IDENTITY, lacks=pcie_card)
    (frame,) = frames(telemetry, 1, lambda i: {NVLINK: 0, CRC: 7, TEMP: 50})
    assert np.isnan(value(frame, "nvlink_tx_bytes_per_s"))
    assert np.isnan(value(frame, "nvlink_crc_errors"))
    assert value(frame, "temp_c") == 50
    assert telemetry.rejected == {"not on this GPU": 2}


def test_traffic_on_a_link_that_the_catalogue_denies_is_believed():
    telemetry = Telemetry(LINKED, IDENTITY, lacks=pcie_card)
    (frame,) = frames(telemetry, 1, lambda i: {NVLINK: 5e9})
    assert value(frame, "nvlink_tx_bytes_per_s") == 5e9


def test_a_gpu_that_is_cut_up_has_no_utilisation_of_zero_and_gets_it_back():
    telemetry = Telemetry(LINKED, IDENTITY)
    slice_ = key("DCGM_FI_PROF_GR_ENGINE_ACTIVE", **gpu(0), GPU_I_ID="1", GPU_I_PROFILE="1g.10gb")

    def add(at_s, *more):
        telemetry.add(samples(at_s, *scrape(at_s, [0], **{UTIL: 0}), *more))
        return telemetry.frame(at_s)

    add(START_S, (slice_, START_S, 0.3))
    assert np.isnan(value(add(START_S + 15, (slice_, START_S + 15, 0.3)), "gpu_util_ratio"))
    assert value(add(START_S + 600), "gpu_util_ratio") == 0.0


BUSY = {UTIL: 90, TEMP: 61, POWER: 431.25}


@pytest.mark.parametrize(
    ("story", "frozen_after_s"),
    [
        (lambda i: BUSY | {ENERGY: 8e9}, 300),
        (lambda i: {UTIL: 0, TEMP: 31, POWER: 71.5, ENERGY: 8e9}, 300),
        (lambda i: BUSY, 900),
        (lambda i: BUSY | {TEMP: 61 + i % 2}, None),
        (lambda i: BUSY | {ENERGY: 8e9 + 6e6 * i}, None),
        (lambda i: BUSY | {ENERGY: 0}, 900),  # a counter that is not there
        (lambda i: BUSY | {POWER: 431}, None),  # whole watts: too coarse to tell
        (lambda i: {UTIL: 0, TEMP: 31, POWER: 71.5}, None),  # idle: may well stand still
        (lambda i: {POWER: 71.5, ENERGY: 8e9}, None),  # too little to tell
    ],
)
def test_values_that_stand_still_are_not_known_any_more(story, frozen_after_s):
    seen = [f.presence[0] for f in frames(Telemetry(CATALOG, IDENTITY), 70, story)]
    first = next((15 * i for i, p in enumerate(seen) if p == Presence.FROZEN), None)
    assert first == frozen_after_s
    last = Presence.PRESENT if frozen_after_s is None else Presence.FROZEN
    assert seen[-1] == last


def test_a_gpu_that_moves_again_is_known_again_and_its_sibling_always_was():
    story = lambda i: BUSY | {ENERGY: 8e9 + (1e6 * i if i > 40 else 0)}  # noqa: E731
    seen = frames(Telemetry(CATALOG, IDENTITY), 60, story)
    assert Presence.FROZEN in {f.presence[0] for f in seen}
    assert seen[-1].presence[0] == Presence.PRESENT
    assert seen[-1].coverage.gpus_reporting == 2
    assert {f.presence[1] for f in seen} == {Presence.PRESENT}
    assert min(f.coverage.gpus_reporting for f in seen) == 1
