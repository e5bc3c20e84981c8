"""What each exporter, of every era, says: the right GPUs, the right values, the right work.

The texts in `exporters/` are written for this test, each with the labels, units and quirks of
one exporter; a real Prometheus scrapes them. Every expectation was read off the text by hand.
"""

import time
from pathlib import Path

import numpy as np
import pytest

from sentinel import history
from sentinel.config import Config
from sentinel.core.domain import Presence, Workload
from sentinel.core.frame import Telemetry
from tests.integration.scraping import CATALOG, assert_values, frames_of, row_of, scraped, target

pytestmark = pytest.mark.integration

TEXTS = {path.stem: path.read_bytes() for path in Path(__file__).parent.glob("exporters/*.prom")}
NO = None  # the GPU has no such value

# what service discovery and several servers add to a target
LABELS = {
    "dcgm_gke": [{"pod": "dcgm-exporter-z9x8c", "namespace": "gmp", "container": "exporter"}],
    "mindprince": [{"node": "p100-3", "pod": "gpu-exporter-ds-q2w3e", "namespace": "mon"}],
    "dcgm_46": [{"prometheus_replica": "prom-0"}, {"prometheus_replica": "prom-1"}],
    "dcgm_mig": [{"replica": "a"}, {"replica": "b"}],
}

# text, GPUs, index of one of them (None: it has none), UUID, node (None: the target), model, values
EXPORTERS = [
    ("dcgm_1x", 2, 0, "GPU-1a0b7c44-96f1-4c0e-8d11-5b7e0c2f9a01", None, "",
     {"sm_clock_mhz": 1380, "mem_clock_mhz": 877, "temp_c": 62, "mem_temp_c": 58,
      "power_w": 248.113, "energy_j": 918273645.546, "pcie_tx_bytes_per_s": 2200e3,
      "pcie_rx_bytes_per_s": 51e6, "gpu_util_ratio": 0.97, "mem_copy_util_ratio": 0.44,
      "fb_used_mib": 31276, "fb_free_mib": 1234, "power_violation_s": 7.5, "xid": 0,
      "thermal_violation_s": 0, "ecc_sbe_volatile": 3, "ecc_sbe_aggregate": 12,
      "retired_pages_sbe": 2, "nvlink_crc_errors": 5, "nvlink_crc_data_errors": 1,
      "nvlink_mb_per_s": 18250}),
    ("dcgm_1x", 2, 1, "GPU-1a0b7c44-96f1-4c0e-8d11-5b7e0c2f9a02", None, "",
     {"mem_temp_c": NO, "pcie_replay": 17, "thermal_violation_s": 2, "ecc_dbe_aggregate": 1,
      "retired_pages_dbe": 1, "nvlink_recovery_errors": 4, "xid": 31, "gpu_util_ratio": 0}),
    ("dcgm_gke", 1, 0, "GPU-2b1c8d55-07a2-4d1f-9e22-6c8f1d3a0b01", "gke-pool-l4-3c1d", "NVIDIA L4",
     {"temp_c": 51, "mem_temp_c": NO, "power_w": 71.406, "gpu_util_ratio": 0.63,
      "fb_used_mib": 20480, "fb_total_mib": 23034, "energy_j": 99887.766,
      "sm_active_ratio": 0.402118, "sm_occupancy_ratio": 0.118002, "dram_active_ratio": 0.377001,
      "pcie_tx_bytes_per_s": 8800123, "nvlink_tx_bytes_per_s": NO}),
    ("dcgm_gb200", 2, 0, "GPU-3c2d9e66-18b3-4e20-8f33-7d901e4b1c01", "gb200-r01-t04",
     "NVIDIA GB200",
     {"power_w": 1187.402, "temp_c": 57, "mem_temp_c": 61, "fb_used_mib": 177400,
      "nvlink_tx_bytes_per_s": 3.01e11, "nvlink_rx_bytes_per_s": 2.99e11, "nvlink_rx_errors": 3,
      "nvlink_recovery_errors": 3, "nvlink_recovery_failed": 0, "nvlink_links_up": 3,
      "fabric_state": 3, "throttle_reasons": 4, "recovery_action": 0, "dcgm_health": NO,
      "gr_engine_active_ratio": 0.998112, "memory_unrepairable": 0}),
    ("dcgm_gb200", 2, 1, "GPU-3c2d9e66-18b3-4e20-8f33-7d901e4b1c02", "gb200-r01-t04",
     "NVIDIA GB200",
     {"nvlink_recovery_failed": 1, "nvlink_links_up": 2, "fabric_state": 4, "dcgm_health": 10,
      "remapped_uncorrectable": 2, "remap_pending": 1, "recovery_action": 1,
      "pcie_correctable_errors": 6, "nvlink_rx_errors": 0}),
    ("dcgm_46", 1, 0, "GPU-4d3eaf77-29c4-4f31-9044-8ea12f5c2d01", "h200-11", "NVIDIA H200",
     {"temp_c": 66, "mem_temp_c": 71, "power_w": 641.22, "gpu_util_ratio": 0.98, "xid": 13,
      "pcie_replay": 4, "remapped_uncorrectable": 1, "remapped_correctable": 2,
      "remap_failure": 0, "remap_pending": 1, "sram_threshold_exceeded": 0,
      "retired_pages_dbe": 0, "nvlink_mb_per_s": 402000, "nvlink_crc_errors": 7,
      "nvlink_crc_data_errors": 6, "nvlink_replay_errors": 5, "nvlink_recovery_errors": 3,
      "power_limit_w": 700, "slowdown_temp_c": 89, "temp_margin_c": 21, "pstate": 0,
      "ecc_mode": 1, "recovery_action": 2, "power_violation_s": 9, "thermal_violation_s": 1.5,
      "gr_engine_active_ratio": 0.971, "sm_active_ratio": 0.902, "sm_occupancy_ratio": 0.411,
      "tensor_active_ratio": 0.533, "dram_active_ratio": 0.644}),
    ("dcgm_47", 1, 0, "GPU-4d3eaf78-29c4-4f31-9044-8ea12f5c2d01", "h200-12", "NVIDIA H200",
     {"sm_clock_mhz": 1980, "mem_clock_mhz": 3201, "sm_clock_max_mhz": 1980, "temp_c": 70,
      "fb_used_mib": 65536, "fb_free_mib": 79872, "fb_reserved_mib": 604, "fb_total_mib": 146012,
      "energy_j": 123456789, "power_violation_s": 12.25, "thermal_violation_s": 0.5,
      "mem_copy_util_ratio": 0.41, "nvlink_mb_per_s": 250000}),
    ("dcgm_vgpu_masked", 2, 1, "vm-vgpu-3/gpu1", "vm-vgpu-3", "GRID A100D-20C",
     {"gpu_util_ratio": 0.7, "fb_used_mib": 1001, "vgpu_license": 0, "power_w": NO,
      "mem_temp_c": NO, "nvlink_mb_per_s": NO, "sm_clock_mhz": 1410}),
    ("dcgm_vgpu_masked", 2, 0, "vm-vgpu-3/gpu0", "vm-vgpu-3", "GRID A100D-20C",
     {"gpu_util_ratio": 0.3, "fb_used_mib": 1000, "vgpu_license": 1}),
    ("dcgm_mig", 1, 2, "GPU-5e4fb088-3ad5-4042-8155-9fb2306d3e01", "mig-host-2",
     "NVIDIA H100 80GB HBM3",
     {"power_w": 311.5, "temp_c": 49, "mem_temp_c": 55, "energy_j": 44556677.889,
      "fb_used_mib": 12000 + 17 + 9000, "fb_free_mib": 28000 + 19800 + 800,
      "gr_engine_active_ratio": 0.33, "dram_active_ratio": 0.7, "gpu_util_ratio": NO,
      "ecc_dbe_volatile": 0, "remap_pending": 0, "xid": 0}),
    ("dcgm_mig_old", 1, 0, "GPU-6f50c199-4be6-4153-9266-a0c3417e4f01", "mig-host-old", "",
     {"fb_used_mib": 4600, "fb_free_mib": 5000, "temp_c": 40, "power_w": 88.125}),
    ("dcgm_time_slicing", 1, 0, "GPU-7061d2aa-5cf7-4264-8377-b1d4528f5001",
     "ip-10-1-2-3.eu-west-1.compute.internal", "Tesla T4",
     {"fb_used_mib": 9000, "fb_free_mib": 5900, "power_w": 55.25, "gpu_util_ratio": 0.77,
      "pcie_rx_bytes_per_s": 1000000, "nvlink_mb_per_s": NO}),
    ("nvidia_gpu_exporter_old", 2, "8172e3bb-6d08-4375-9488-c2e5639a6101",
     "GPU-8172e3bb-6d08-4375-9488-c2e5639a6101", None, "NVIDIA GeForce RTX 2080 SUPER",
     {"temp_c": 54, "power_w": 180.5, "power_limit_w": 250, "gpu_util_ratio": 0.87,
      "mem_copy_util_ratio": 0.4, "fb_used_mib": 4096, "fb_total_mib": 7979.1875,
      "sm_clock_mhz": 1860, "mem_clock_mhz": 7750, "sm_clock_max_mhz": 2100, "fan_ratio": 0.62,
      "pstate": 2, "throttle_reasons": 4, "pcie_link_gen": 3, "pcie_link_width": 16}),
    ("nvidia_gpu_exporter_old", 2, "8172e3bb-6d08-4375-9488-c2e5639a6102",
     "GPU-8172e3bb-6d08-4375-9488-c2e5639a6102", None, "NVIDIA GeForce RTX 2080 SUPER",
     {"throttle_reasons": 1, "pcie_link_gen": 1, "pcie_max_link_gen": 3, "pcie_link_width": 8,
      "pcie_max_link_width": 16, "pstate": 8, "fb_used_mib": 5}),
    ("nvidia_gpu_exporter_nvml", 1, 3, "GPU-9283f4cc-7e19-4486-8599-d3f674ab7201", None,
     "NVIDIA A100-SXM4-80GB",
     {"fb_used_mib": 10240 + 1000, "gr_engine_active_ratio": 0.75, "tensor_active_ratio": 0.11,
      "mig_mode": 1, "energy_j": 7.7001e6, "pcie_rx_bytes_per_s": 1.2e9,
      "pcie_tx_bytes_per_s": 3.4e8, "temp_c": 44, "mem_temp_c": 52, "power_w": 211.4,
      "remap_pending": 1, "ecc_dbe_volatile": 2, "fabric_state": 3, "gpu_util_ratio": NO}),
    ("nvidia_smi_exporter", 1, None, "GPU-a394050d-8f2a-4597-86aa-e40785bc8301", None, "",
     {"gpu_util_ratio": 0.94, "mem_copy_util_ratio": 0.55, "temp_c": 71, "power_w": 201.45,
      "power_limit_w": 250, "sm_clock_mhz": 1873, "mem_clock_mhz": 5705,
      "sm_clock_max_mhz": 2012, "fb_used_mib": 9216, "fb_free_mib": 2048, "fb_total_mib": 11264,
      "fan_ratio": 0.35, "pstate": 2}),
    ("telegraf", 2, 0, "GPU-b4a5161e-903b-46a8-87bb-f51896cd9401", "telegraf-node-9",
     "NVIDIA A100-SXM4-40GB",
     {"temp_c": 41, "mem_temp_c": 47, "gpu_util_ratio": 0.93, "mem_copy_util_ratio": 0.51,
      "fb_used_mib": 30720, "fb_free_mib": 9727, "fb_total_mib": 40960, "fb_reserved_mib": 513,
      "power_w": 287.44, "power_limit_w": 400, "sm_clock_mhz": 1410, "mem_clock_mhz": 1215,
      "fan_ratio": 0.3, "pcie_link_width": 16, "pcie_rx_bytes_per_s": 1.2e6,
      "pcie_tx_bytes_per_s": 3e5, "throttle_reasons": 4, "remap_failure": 0, "remap_pending": 0,
      "ecc_sbe_volatile": 4, "slowdown_temp_c": 92}),
    ("telegraf", 2, 1, "GPU-b4a5161e-903b-46a8-87bb-f51896cd9402", "telegraf-node-9",
     "NVIDIA A100-SXM4-40GB",
     {"temp_c": 88, "throttle_reasons": 8 + 64, "remap_pending": 1, "remapped_uncorrectable": 2,
      "remapped_correctable": 1, "ecc_dbe_volatile": 1, "fb_used_mib": 11000,
      "pcie_link_width": 8, "sm_clock_mhz": 600}),
    ("gpud", 1, None, "GPU-c5b6272f-a14c-47b9-88cc-0629a7dea501", None, "",
     {"temp_c": 59, "mem_temp_c": 66, "temp_margin_c": 28, "slowdown_temp_c": 87,
      "power_w": 498.123, "power_limit_w": 700, "gpu_util_ratio": 0.88,
      "mem_copy_util_ratio": 0.4, "fb_total_mib": 81559, "fb_used_mib": 40960,
      "fb_free_mib": 40117, "fb_reserved_mib": 482, "sm_clock_mhz": 1905, "mem_clock_mhz": 2619,
      "throttle_reasons": 128, "ecc_sbe_volatile": 9, "ecc_dbe_volatile": 0,
      "ecc_sbe_aggregate": 19, "ecc_dbe_aggregate": 1, "remapped_uncorrectable": 3,
      "remap_pending": 1, "remap_failure": 0, "nvlink_crc_errors": 2, "nvlink_replay_errors": 1,
      "sm_occupancy_ratio": 0.335, "tensor_active_ratio": 0.215}),
    ("gpud_old", 1, None, "GPU-c5b6272f-a14c-47b9-88cc-0629a7dea502", None, "",
     {"temp_c": 52, "power_w": 301.5, "gpu_util_ratio": 0.71, "ecc_dbe_volatile": 1,
      "throttle_reasons": 64}),
    ("mindprince", 2, 0, "GPU-d6c73830-b25d-48ca-89dd-173ab8efb601", "p100-3",
     "Tesla P100-PCIE-16GB",
     {"gpu_util_ratio": 0.99, "fan_ratio": 0, "fb_total_mib": 16280.875, "fb_used_mib": 15360,
      "power_w": 231, "temp_c": 67}),
    ("mindprince", 2, 1, "GPU-d6c73830-b25d-48ca-89dd-173ab8efb602", "p100-3",
     "Tesla P100-PCIE-16GB", {"power_w": 27.5, "temp_c": 30, "gpu_util_ratio": 0}),
    ("mindprince_aliyun", 1, 0, "GPU-d6c73830-b25d-48ca-89dd-173ab8efb603",
     "cn-beijing.192.168.3.9", "Tesla V100-SXM2-32GB",
     {"gpu_util_ratio": 0.64, "fb_used_mib": 1024, "power_w": 190.5, "temp_c": 58}),
    ("jobstats", 1, 0, "GPU-d6c73830-b25d-48ca-89dd-173ab8efb604", None, "NVIDIA A100-SXM4-80GB",
     {"gpu_util_ratio": 0.96, "fb_used_mib": 71680, "fb_total_mib": 81920, "power_w": 388.25,
      "temp_c": 63, "sm_clock_mhz": 1290, "mem_clock_mhz": 1593, "throttle_reasons": 4,
      "ecc_sbe_volatile": 2, "ecc_dbe_volatile": 0, "ecc_dbe_aggregate": 1,
      "sm_active_ratio": 0.87, "sm_occupancy_ratio": 0.45, "tensor_active_ratio": 0.52,
      "dram_active_ratio": 0.61, "pcie_rx_bytes_per_s": 1.5e9, "nvlink_tx_bytes_per_s": 9.1e10}),
    ("bugroger", 2, 0, "GPU-e7d84941-c36e-49db-8aee-284bc900c701", None, "Tesla P40",
     {"temp_c": 66, "power_w": 148.5, "gpu_util_ratio": 0.83, "mem_copy_util_ratio": 0.27,
      "fb_total_mib": 22919.0625, "fb_used_mib": 11264, "fan_ratio": 0}),
    ("bugroger", 2, 1, "GPU-e7d84941-c36e-49db-8aee-284bc900c702", None, "Tesla P40",
     {"temp_c": 31, "power_w": 9.8, "gpu_util_ratio": 0, "fb_used_mib": 0}),
    ("otel_dcgm", 1, 5, "GPU-f8e95a52-d47f-4aec-8bff-395cda11d801", "otel-node-4",
     "NVIDIA A100-SXM4-80GB",
     {"gr_engine_active_ratio": 0.93, "gpu_util_ratio": NO, "sm_active_ratio": 0.81,
      "sm_occupancy_ratio": 0.36, "tensor_active_ratio": 0.47, "dram_active_ratio": 0.58,
      "enc_util_ratio": 0, "dec_util_ratio": 0.02, "fb_used_mib": 61440, "fb_free_mib": 20000,
      "fb_reserved_mib": 600, "temp_c": 60, "sm_clock_mhz": 1410, "energy_j": 5.5e6,
      "ecc_sbe_volatile": 3, "ecc_dbe_volatile": 0, "power_violation_s": 120.5,
      "thermal_violation_s": 1.25, "pcie_tx_bytes_per_s": NO}),
    ("otel_dcgm_v1", 1, 0, "GPU-f8e95a52-d47f-4aec-8bff-395cda11d802", None,
     "Tesla V100-SXM2-16GB", {"gpu_util_ratio": 0.44, "fb_used_mib": 1024, "fb_free_mib": 16000}),
]  # fmt: skip

WORK = {
    ("dcgm_1x", 0): Workload("pod", "bert-large-0", "nlp"),
    ("dcgm_1x", 1): None,
    ("dcgm_gke", 0): Workload("pod", "gemma-7f9c4d-x2x8p", "serving"),
    ("dcgm_gb200", 0): Workload("pod", "llama-405b-worker-3", "train"),
    ("dcgm_gb200", 1): None,
    ("mindprince", 0): None,  # the pod is the exporter's
    ("mindprince_aliyun", 0): Workload("pod", "resnet-worker-1", "cv"),
    ("jobstats", 0): Workload("job", "51234567", ""),
    ("telegraf", 0): None,
}


@pytest.fixture(scope="module")
def frames(tmp_path_factory):
    assert {row[0] for row in EXPORTERS} == set(TEXTS)
    return frames_of(TEXTS, tmp_path_factory.mktemp("prometheus"), LABELS)


@pytest.mark.parametrize(
    ("name", "count", "index", "uuid", "node", "model", "values"),
    EXPORTERS,
    ids=[f"{row[0]}-{row[2]}" for row in EXPORTERS],
)
def test_an_exporter_reads_right(frames, name, count, index, uuid, node, model, values):
    frame = frames[name]
    assert len(frame.gpus) == len({gpu.uuid for gpu in frame.gpus}) == count
    assert (frame.presence == Presence.PRESENT).all()
    assert frame.xids == ()  # a code that stands when we come is history
    (row,) = (i for i, gpu in enumerate(frame.gpus) if gpu.uuid == uuid)
    gpu = frame.gpus[row]
    assert gpu.index == (index if isinstance(index, int) else None)
    assert (gpu.node, gpu.model) == (node or target(name), model)
    assert_values(frame, row, values)


@pytest.mark.parametrize(("where", "work"), WORK.items(), ids=lambda v: str(v)[:20])
def test_the_work_that_an_exporter_tells(frames, where, work):
    name, index = where
    assert frames[name].workloads[row_of(frames[name], index)] == work


def test_pods_that_share_a_gpu_are_each_its_work(frames):
    assert frames["dcgm_time_slicing"].workloads[0].id in {"web-0", "web-1", "batch-5"}
    assert frames["dcgm_mig"].workloads[0].id in {"notebook-a-0", "notebook-b-0"}


def test_a_gpu_that_telegraf_shows_in_slices_has_no_utilisation_of_its_own(frames):
    frame = frames["telegraf"]
    assert_values(frame, row_of(frame, 1), {"gpu_util_ratio": NO, "mem_copy_util_ratio": NO})
    assert_values(frame, row_of(frame, 0), {"gpu_util_ratio": 0.93})


def test_every_known_exporter_is_met_here_or_by_a_test_of_its_own(frames):
    elsewhere = {"gpu-exporter", "nvgpu-exporter", "plain", "sentinel"}
    names = {line.split("{")[0] for text in TEXTS.values() for line in text.decode().splitlines()}
    met = {alias.exporter for alias in CATALOG.aliases if alias.name in names}
    assert met | elsewhere == set(CATALOG.exporters)


def test_nothing_is_read_of_what_is_no_gpus(frames):
    read = {gpu.uuid for frame in frames.values() for gpu in frame.gpus}
    assert {row[3] for row in EXPORTERS} <= read
    assert len(read) == len({row[3] for row in EXPORTERS})  # no switch, no driver, no process
    assert all(np.isfinite(frame.values).any(axis=1).all() for frame in frames.values())


OWN_TEXT = b"""
nvidia_power_usage{minor="0"} 181
nvidia_memory_used{minor="0"} 9000
nvidia_temperatures{minor="0"} 62
bmc_hot_spot_celsius{minor="0",sensor="gpu"} 81
bmc_hot_spot_celsius{minor="0",sensor="nic"} 55
"""
OWN_ROWS = """
prometheus: {url: "URL"}
metrics:
  - name: power_w
    aliases: [{exporter: phstudy, names: [nvidia_power_usage]}]
  - name: fb_used_mib
    aliases: [{exporter: phstudy, names: [nvidia_memory_used], where: {minor: "*"}}]
  - name: hot_spot_c
    role: state
    valid: [1, 130]
    aliases: [{names: [bmc_hot_spot_celsius], where: {sensor: gpu}}]
"""


def test_names_of_ones_own_are_asked_for_and_read(tmp_path):
    """An exporter that has another's names in other units, and a metric that nobody ships."""
    with scraped({"own": OWN_TEXT}, tmp_path / "prometheus") as url:
        config = Config.parse(OWN_ROWS.replace("URL", url), tmp_path / "sentinel.yaml")
        telemetry = Telemetry(config.catalog(), config.identity())
        now = time.time()
        telemetry.add(history.connect(config).pull(now, window_s=60, deadline_s=10))
    frame = telemetry.frame(now)
    (gpu,) = frame.gpus
    assert gpu.uuid == f"{target('own')}/gpu0"
    assert_values(frame, 0, {"power_w": 181, "fb_used_mib": 9000, "temp_c": 62, "hot_spot_c": 81})
