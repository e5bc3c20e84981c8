"""The exporter, a real Prometheus and the daemon's reading of it, end to end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from sentinel.core.domain import Frame, Presence
from sentinel.core.frame import Telemetry
from sentinel.core.identity import Identity
from sentinel.data import load_catalog
from sentinel.edges.prometheus import Prometheus
from sentinel.lab import servers
from tests.exporter.rig import Rig, build, uuid
from tests.exporter.rig import rig as make_rig

pytestmark = [pytest.mark.integration, pytest.mark.slow]

CATALOG = load_catalog()
WITHIN_S = 60.0
MIB_OF_GIB = 1024.0

# canonical metric of GPU 2, as its fake tells it
CANONICAL = {
    "gpu_util_ratio": 0.52,
    "mem_copy_util_ratio": 0.30,
    "enc_util_ratio": 0.01,
    "dec_util_ratio": 0.02,
    "gr_engine_active_ratio": 0.01,
    "sm_active_ratio": 0.02,
    "sm_occupancy_ratio": 0.03,
    "tensor_active_ratio": 0.05,
    "dram_active_ratio": 0.10,
    "fb_used_mib": 12 * MIB_OF_GIB,
    "fb_free_mib": 67 * MIB_OF_GIB,
    "fb_reserved_mib": 1 * MIB_OF_GIB,
    "fb_total_mib": 80 * MIB_OF_GIB,
    "pcie_tx_bytes_per_s": 20 * (1 << 20),
    "pcie_rx_bytes_per_s": 21 * (1 << 20),
    "nvlink_tx_bytes_per_s": 61 * (1 << 20),
    "nvlink_rx_bytes_per_s": 60 * (1 << 20),
    "temp_c": 42,
    "mem_temp_c": 52,
    "power_w": 302,
    "power_limit_w": 650,
    "sm_clock_mhz": 1755,
    "sm_clock_max_mhz": 1980,
    "mem_clock_mhz": 2619,
    "throttle_reasons": 0x24,
    "energy_j": 5000000.002,
    "power_violation_s": 74,
    "thermal_violation_s": 75,
    "slowdown_temp_c": 89,
    "temp_margin_c": 47,
    "fan_ratio": 0.31,
    "pstate": 0,
    "xid": 0,
    "ecc_sbe_volatile": 102,
    "ecc_dbe_volatile": 2,
    "ecc_sbe_aggregate": 112,
    "ecc_dbe_aggregate": 12,
    "ecc_mode": 1,
    "sram_threshold_exceeded": 0,
    "remap_failure": 0,
    "remap_pending": 0,
    "remapped_uncorrectable": 1,
    "remapped_correctable": 3,
    "recovery_action": 0,
    "mig_mode": 0,
    "pcie_replay": 4,
    "pcie_correctable_errors": 173,
    "pcie_link_gen": 5,
    "pcie_link_width": 16,
    "pcie_max_link_gen": 5,
    "pcie_max_link_width": 16,
    "nvlink_replay_errors": 0 + 1 + 2 + 3,
    "nvlink_crc_errors": 20 + 21 + 22 + 23,
    "nvlink_crc_data_errors": 30 + 31 + 32 + 33,
    "nvlink_links_up": 4,
}


class Watcher:
    """What the daemon sees of the exporter, tick after tick."""

    def __init__(self, url: str) -> None:
        self._prometheus = Prometheus(url, selector='job="sentinel-exporter"')
        self._telemetry = Telemetry(CATALOG, Identity())
        self.xids: list[tuple[str, int]] = []

    def frame(self) -> Frame:
        now_s = time.time()
        self._telemetry.add(self._prometheus.pull(now_s, window_s=60, deadline_s=10))
        frame = self._telemetry.frame(now_s)
        self.xids += [(frame.gpus[x.row].uuid, x.code) for x in frame.xids]
        return frame

    def until(self, right: Callable[[Frame], bool]) -> Frame:
        deadline = time.monotonic() + WITHIN_S
        while time.monotonic() < deadline:
            frame = self.frame()
            if right(frame):
                return frame
            time.sleep(0.3)
        raise AssertionError(f"not within {WITHIN_S} s: {frame.presence} {self.xids}")


def row(frame: Frame, gpu: int) -> int:
    return next(i for i, g in enumerate(frame.gpus) if g.uuid == uuid(gpu))


def value(frame: Frame, gpu: int, metric: str) -> float:
    return float(frame.values[row(frame, gpu), frame.metrics.index(metric)])


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Rig, Watcher]]:
    folder = tmp_path_factory.mktemp("exporter")
    library: Path = build(folder / "nvml")
    with make_rig(folder / "rig", library) as rig:
        rig.start("--deadline", "0.4").settled()
        target = rig.url.removeprefix("http://")
        configs = [{"job_name": "sentinel-exporter", "static_configs": [{"targets": [target]}]}]
        with servers.prometheus(folder / "prometheus", configs) as server:
            yield rig, Watcher(server.url)


@pytest.mark.timeout(240)
def test_the_daemon_reads_the_exporter_right(watched: tuple[Rig, Watcher]) -> None:
    rig, watcher = watched
    frame = watcher.until(
        lambda f: len(f.gpus) == 8 and bool(np.isfinite(value(f, 2, "sm_active_ratio")))
    )
    assert (frame.presence == Presence.PRESENT).all()
    gpu = frame.gpus[row(frame, 2)]
    assert (gpu.index, gpu.model, gpu.node) == (2, "NVIDIA H100 80GB HBM3", "host-1")
    for metric, expected in CANONICAL.items():
        assert value(frame, 2, metric) == pytest.approx(expected, rel=1e-6), metric
    assert watcher.xids == []

    rig.control("event 1 4 79")
    watcher.until(lambda f: bool(watcher.xids))
    rig.control("event 1 4 79", "event 2 4 79")
    watcher.until(lambda f: len(watcher.xids) > 1)
    assert watcher.xids == [(uuid(4), 79), (uuid(4), 79)], "the same code twice is two"


@pytest.mark.timeout(240)
def test_a_hung_gpu_vanishes_while_its_siblings_report(watched: tuple[Rig, Watcher]) -> None:
    rig, watcher = watched
    rig.control("event 1 4 79", "event 2 4 79", "6 * hang")
    # an exporter that has only just come does not yet prove that a GPU is gone
    frame = watcher.until(lambda f: f.presence[row(f, 6)] != Presence.PRESENT)
    others = [row(frame, gpu) for gpu in range(8) if gpu != 6]
    assert (frame.presence[others] == Presence.PRESENT).all()
    assert frame.presence[row(frame, 6)] == Presence.VANISHED
    rig.control("event 1 4 79", "event 2 4 79")
    frame = watcher.until(lambda f: bool((f.presence == Presence.PRESENT).all()))
    assert value(frame, 6, "temp_c") == 46


@pytest.mark.timeout(240)
def test_slices_fold_into_their_gpu(watched: tuple[Rig, Watcher]) -> None:
    rig, watcher = watched
    rig.control("mig 1")
    frame = watcher.until(lambda f: value(f, 1, "mig_mode") == 1)
    frame = watcher.until(lambda f: value(f, 1, "sm_active_ratio") == pytest.approx(0.22))
    assert len(frame.gpus) == 8
    assert value(frame, 1, "fb_total_mib") == 80 * MIB_OF_GIB
    assert value(frame, 1, "temp_c") == 41
