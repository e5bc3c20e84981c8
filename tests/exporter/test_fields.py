"""What is read of a GPU, by what it and its driver have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.exporter.rig import Rig, Scrape, uuid
from tests.exporter.rig import rig as make_rig

pytestmark = pytest.mark.integration

GIB = float(1 << 30)
BLANK_32, BLANK_64 = 4294967295, 18446744073709551615

# value of GPU 2, metric, labels
VALUES = [
    (0.52, "gpu_utilization_ratio", {}),
    (0.30, "memory_utilization_ratio", {}),
    (0.01, "encoder_utilization_ratio", {}),
    (0.02, "decoder_utilization_ratio", {}),
    (0.03, "jpeg_utilization_ratio", {}),
    (0.04, "ofa_utilization_ratio", {}),
    (80 * GIB, "memory_total_bytes", {}),
    (12 * GIB, "memory_used_bytes", {}),
    (67 * GIB, "memory_free_bytes", {}),
    (1 * GIB, "memory_reserved_bytes", {}),
    (42, "temperature_celsius", {}),
    (52, "memory_temperature_celsius", {}),
    (89, "temperature_limit_celsius", {"threshold": "slowdown"}),
    (92, "temperature_limit_celsius", {"threshold": "shutdown"}),
    (47, "temperature_margin_celsius", {}),
    (302, "power_watts", {}),
    (312, "power_instant_watts", {}),
    (312, "power_average_watts", {}),
    (650, "power_limit_watts", {}),
    (700, "power_default_limit_watts", {}),
    (5000000.002, "energy_joules_total", {}),
    (1755e6, "sm_clock_hertz", {}),
    (2619e6, "memory_clock_hertz", {}),
    (1750e6, "graphics_clock_hertz", {}),
    (1545e6, "video_clock_hertz", {}),
    (1980e6, "sm_clock_max_hertz", {}),
    (0x24, "clocks_event_reasons", {}),
    (1, "clocks_event_active", {"reason": "sw_power_cap"}),
    (1, "clocks_event_active", {"reason": "sw_thermal_slowdown"}),
    (0, "clocks_event_active", {"reason": "hw_thermal_slowdown"}),
    (74, "clocks_violation_seconds_total", {"reason": "power"}),
    (75, "clocks_violation_seconds_total", {"reason": "thermal"}),
    (0, "performance_state", {}),
    (5, "pcie_link_generation", {}),
    (16, "pcie_link_width_max", {}),
    (4, "pcie_replays_total", {}),
    (7e9, "pcie_transmit_bytes_total", {}),
    (180, "pcie_errors_total", {"type": "fatal"}),
    (1, "nvlink_up", {"nvlink": "3"}),
    (2, "nvlink_replay_errors_total", {"nvlink": "2"}),
    (23, "nvlink_crc_flit_errors_total", {"nvlink": "3"}),
    (2 << 20, "nvlink_transmit_bytes_total", {"nvlink": "1"}),
    (4 << 20, "nvlink_receive_bytes_total", {"nvlink": "1"}),
    (102, "ecc_volatile_corrected_errors_total", {}),
    (2, "ecc_volatile_uncorrected_errors_total", {}),
    (112, "ecc_aggregate_corrected_errors_total", {}),
    (12, "ecc_aggregate_uncorrected_errors_total", {}),
    (0, "ecc_sram_threshold_exceeded", {}),
    (3, "remapped_rows_correctable_total", {}),
    (1, "remapped_rows_uncorrectable_total", {}),
    (0, "remapped_rows_pending", {}),
    (0, "remapped_rows_failure", {}),
    (2558, "row_remapper_banks", {"availability": "max"}),
    (0, "recovery_action", {}),
    (2, "processes", {"type": "compute"}),
    (0, "mig_enabled", {}),
    (0.31, "fan_speed_ratio", {"fan": "1"}),
    (1, "persistence_mode_enabled", {}),
]


@pytest.fixture(scope="module")
def healthy(fake: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Rig, Scrape]]:
    with make_rig(tmp_path_factory.mktemp("rig"), fake) as rig:
        yield rig, rig.start().settled()


@pytest.mark.parametrize(("value", "name", "labels"), VALUES, ids=lambda v: str(v)[:40])
def test_values_are_in_base_units(
    healthy: tuple[Rig, Scrape], value: float, name: str, labels: dict[str, str]
) -> None:
    assert healthy[1].gpu(2, name, **labels) == pytest.approx(value, rel=1e-9)


def test_what_names_a_gpu_is_on_every_series_of_it(healthy: tuple[Rig, Scrape]) -> None:
    of_gpu = [(n, labels) for n, labels, _ in healthy[1].series if labels.get("gpu") == "2"]
    assert len(of_gpu) > 100
    for name, labels in of_gpu:
        assert labels["UUID"] == uuid(2), name
        assert labels["model_name"] == "NVIDIA H100 80GB HBM3", name
        assert labels["pci_bus_id"] == "00000000:12:00.0", name
        assert labels["Hostname"] == "host-1", name
    versions, _ = healthy[1].all("driver_info")[0]
    assert versions == {
        "driver_version": "580.65.06",
        "nvml_version": "13.580.65.06",
        "cuda_version": "13.0",
    }


def test_no_series_is_there_twice(healthy: tuple[Rig, Scrape]) -> None:
    seen = [(n, *sorted(labels.items())) for n, labels, _ in healthy[1].series]
    assert len(seen) == len(set(seen))


def test_gpus_whose_uuids_are_blacked_out_are_told_apart_by_place(rig: Rig) -> None:
    rig.control("masked 1")
    rig.start()
    scrape = rig.scrape_until(lambda s: len(s.all("last_xid")) == 8)
    assert {labels["gpu"] for labels, _ in scrape.all("temperature_celsius")} == set("01234567")
    assert not [labels for _, labels, _ in scrape.series if "UUID" in labels]
    rig.control("masked 1", "event 1 4 31")
    scrape = rig.scrape_until(lambda s: bool(s.all("xid_errors_total")))
    assert scrape.one("xid_errors_total", gpu="4", xid="31") == 1
    rig.control("masked 1", "3 * hang")
    scrape = rig.scrape()
    assert [labels["gpu"] for labels, _ in scrape.all("scrape_error")] == ["3"]
    assert len(scrape.all("gpu_up")) == 8


# ---- what a GPU or driver does not have ---------------------------------------------


def test_what_is_not_supported_is_asked_once(rig: Rig) -> None:
    rig.record_calls()
    rig.control("* nvmlDeviceGetFanSpeed_v2 return 3", "* nvmlDeviceGetTotalEccErrors return 3")
    scrape = rig.start().settled()
    for field in ("fan_speed", "ecc_volatile_corrected", "retired_pages_single_bit"):
        assert scrape.gpu(1, "field_unsupported", field=field, reason="not_supported") == 1
    for _ in range(3):
        rig.scrape()
    assert rig.calls("nvmlDeviceGetNumFans", 1) == 1
    assert rig.calls("nvmlDeviceGetTotalEccErrors", 1) == 4
    assert rig.calls("nvmlDeviceGetTemperature", 1) >= 4
    assert rig.log().count("GPU 1 (GPU-000000a1-0000-4000-8000-000000000000) has no") == 1


def test_what_may_not_be_read_is_told_as_such(rig: Rig) -> None:
    rig.control("* nvmlGpmSampleGet return 4")
    scrape = rig.start().settled()
    assert scrape.gpu(0, "field_unsupported", field="gpm", reason="no_permission") == 1
    assert scrape.gpu(0, "pcie_transmit_bytes_per_second") == 1e8


def test_an_old_driver_tells_what_it_knows(old_fake: Path, tmp_path: Path) -> None:
    with make_rig(tmp_path / "rig", old_fake) as rig:
        scrape = rig.start().settled()
        assert scrape.gpu(2, "memory_used_bytes") == 13 * GIB  # with what is reserved
        assert scrape.all("memory_reserved_bytes") == []
        assert scrape.gpu(2, "clocks_event_reasons") == 4
        assert scrape.gpu(2, "processes", type="compute") == 2
        assert scrape.gpu(2, "pcie_transmit_bytes_per_second") == 1e8
        assert scrape.gpu(2, "pcie_receive_bytes_per_second") == 2e8
        told = scrape.all("field_unsupported", UUID=uuid(2), reason="function_not_found")
        assert {labels["field"] for labels, _ in told} >= {
            "jpeg_utilization",
            "remapped_rows",
            "ecc_sram_status",
            "gpm",
            "mps",
        }


# ---- values that are none -----------------------------------------------------------


BLANKS = [
    (f"nvmlDeviceGetPowerUsage value {BLANK_32}", "power_watts"),
    (f"nvmlDeviceGetTotalEnergyConsumption value {BLANK_64}", "energy_joules_total"),
    (f"nvmlDeviceGetUtilizationRates value {BLANK_32}", "gpu_utilization_ratio"),
    (f"field:230 value {BLANK_32}", "recovery_action"),
    (f"field:197 value {BLANK_64}", "pcie_transmit_bytes_total"),
    ("field:82 value 0", "memory_temperature_celsius"),
    ("nvmlDeviceGetPerformanceState value 32", "performance_state"),
    (f"nvmlDeviceGetCurrentClocksEventReasons value {BLANK_64}", "clocks_event_reasons"),
]


def test_blanks_and_impossible_values_are_dropped(rig: Rig) -> None:
    rules = [f"{gpu} {rule}" for gpu, (rule, _) in enumerate(BLANKS)]
    rig.control(*rules, "7 nvmlDeviceGetUtilizationRates value 429496729")
    scrape = rig.start().settled()
    for gpu, (_, metric) in enumerate(BLANKS):
        assert scrape.all(metric, UUID=uuid(gpu)) == [], metric
        assert len(scrape.all(metric)) >= 6, metric
    assert scrape.all("clocks_event_active", UUID=uuid(7)) == []
    assert scrape.all("gpu_utilization_ratio", UUID=uuid(7)) == []
    assert scrape.gpu(7, "gpu_errors_total", reason="impossible_value") == 1
    assert scrape.all("gpu_errors_total", UUID=uuid(0)) == []


def test_a_margin_below_zero_is_no_blank(rig: Rig) -> None:
    rig.control("1 nvmlDeviceGetMarginTemperature value -1")
    assert rig.start().settled().gpu(1, "temperature_margin_celsius") == -1


def test_an_inactive_link_is_told_and_counts_on(rig: Rig) -> None:
    rig.control("1 nvmlDeviceGetNvLinkState:2 value 0")
    scrape = rig.start().settled()
    assert scrape.gpu(1, "nvlink_up", nvlink="2") == 0
    assert scrape.gpu(1, "nvlink_replay_errors_total", nvlink="2") == 2


def test_a_gpu_without_nvlink_has_none(rig: Rig) -> None:
    rig.control("1 field:91 return 3", "1 nvmlDeviceGetNvLinkState return 3")
    scrape = rig.start().settled()
    assert scrape.all("nvlink_up", UUID=uuid(1)) == []
    assert scrape.gpu(1, "field_unsupported", field="nvlink") == 1


# ---- slices, profiling, processes, Xids ---------------------------------------------


def test_slices_are_parts_of_their_gpu(rig: Rig) -> None:
    rig.control("mig 1")
    rig.start().settled()
    scrape = rig.scrape_until(lambda s: bool(s.all("sm_active_ratio", GPU_I_ID="2")))
    assert scrape.gpu(1, "mig_enabled") == 1
    for part, profile in (("1", "3g.40gb"), ("2", "4g.40gb")):
        slice_labels = {"GPU_I_ID": part, "GPU_I_PROFILE": profile}
        assert scrape.gpu(1, "memory_total_bytes", **slice_labels) == 40 * GIB
        assert scrape.gpu(1, "sm_active_ratio", **slice_labels) == pytest.approx(
            0.02 + 0.1 * int(part)
        )
    whole = [
        v for labels, v in scrape.all("memory_used_bytes", UUID=uuid(1)) if "GPU_I_ID" not in labels
    ]
    assert whole == [11 * GIB]
    assert scrape.gpu(1, "temperature_celsius") == 41
    assert scrape.all("gpu_utilization_ratio", UUID=uuid(1)) == []
    rig.control()
    scrape = rig.scrape()
    assert scrape.gpu(1, "gpu_utilization_ratio") == 0.51, "cut no more, all is asked again"


def test_profiling_is_what_happened_between_two_scrapes(rig: Rig) -> None:
    rig.record_calls()
    rig.control("3 gpm:11 return 3")
    rig.start().settled()
    scrape = rig.scrape_until(lambda s: len(s.all("sm_active_ratio")) == 8)
    assert scrape.gpu(3, "sm_active_ratio") == pytest.approx(0.02)
    assert scrape.gpu(3, "tensor_active_ratio") == pytest.approx(0.05)
    assert scrape.gpu(3, "dram_active_ratio") == pytest.approx(0.10)
    assert scrape.gpu(3, "pcie_transmit_bytes_per_second") == 20 * (1 << 20)
    assert scrape.gpu(3, "nvlink_receive_bytes_per_second") == 60 * (1 << 20)
    assert scrape.all("fp64_active_ratio", UUID=uuid(3)) == []
    assert scrape.gpu(2, "fp64_active_ratio") == pytest.approx(0.11)
    for _ in range(5):
        rig.scrape()
    live = rig.calls("nvmlGpmSampleAlloc", -1) - rig.calls("nvmlGpmSampleFree", -1)
    assert live == 8, "one sample is kept of each GPU"


def test_each_process_is_told_only_when_asked_for(rig: Rig) -> None:
    assert rig.start().settled().all("process_memory_used_bytes") == []
    rig.stop()
    rig.start("--per-process")
    scrape = rig.settled()
    assert rig.process is not None
    ((labels, used),) = scrape.all("process_memory_used_bytes", UUID=uuid(0))
    assert (labels["pid"], used) == (str(rig.process.pid), 3 * GIB)
    assert labels["process"].startswith("python")


def test_xids_are_counted_as_they_come(rig: Rig) -> None:
    rig.control("event 1 4 13")  # before anybody waited
    rig.start()
    scrape = rig.scrape_until(lambda s: len(s.all("last_xid")) == 8)
    assert scrape.all("xid_errors_total") == []
    assert scrape.gpu(4, "last_xid") == 0
    lines = ["event 1 4 13", "event 2 4 79", "event 3 4 13", "event 4 6 48", "event 5 4 13"]
    rig.control(*lines)
    scrape = rig.scrape_until(lambda s: sum(v for _, v in s.all("xid_errors_total")) == 4)
    assert scrape.gpu(4, "xid_errors_total", xid="13") == 2
    assert scrape.gpu(4, "xid_errors_total", xid="79") == 1
    assert scrape.gpu(6, "xid_errors_total", xid="48") == 1
    assert scrape.gpu(4, "last_xid") == 13
    assert scrape.gpu(4, "last_xid_timestamp_seconds") > 1.7e9
    assert f"Xid 79 on {uuid(4)}" in rig.log()


def test_a_gpu_that_tells_no_xids_shows_none(rig: Rig) -> None:
    rig.control("4 nvmlDeviceRegisterEvents return 3")
    rig.start()
    scrape = rig.scrape_until(lambda s: len(s.all("last_xid")) == 7)
    assert scrape.all("last_xid", UUID=uuid(4)) == []
    assert f"{uuid(4)} tells no Xids" in rig.log()
