"""What real exporters say, through a real Prometheus: the right GPUs, the right values.

Every expectation was read off the scrape by hand. The data folder is found at SENTINEL_DATA or
beside the project; nothing of it is kept here.
"""

import re
import time

import numpy as np
import pytest

from sentinel.core.domain import Presence, Workload
from sentinel.core.frame import Identity, Telemetry
from sentinel.edges.answers import Answers
from tests.integration.recordings import need_data
from tests.integration.scraping import CATALOG, LACKS, assert_values, frames_of, row_of, target

pytestmark = pytest.mark.integration

A100, H100 = "NVIDIA A100-SXM4-40GB", "NVIDIA H100 80GB HBM3"
NO = None  # the GPU has no such value, or a blank in its place

# file (its beginning), GPUs, index of one of them, its node (None: the target), model, values
SCRAPES = [
    ("01_", 1, 0, "cp-bm14r7", "Tesla T4",
     {"sm_clock_mhz": 660, "mem_clock_mhz": 5000, "temp_c": 74, "mem_temp_c": NO,
      "power_w": 68.244, "energy_j": 15152422.938, "pcie_replay": 0, "gpu_util_ratio": 0.91,
      "mem_copy_util_ratio": 0.73, "enc_util_ratio": 0, "dec_util_ratio": 0, "fb_free_mib": 9791,
      "fb_used_mib": 5120, "fb_reserved_mib": 447, "vgpu_license": 0,
      "gr_engine_active_ratio": 0.156205, "tensor_active_ratio": 0.005822,
      "dram_active_ratio": 0.092781, "pcie_tx_bytes_per_s": 4791810,
      "pcie_rx_bytes_per_s": 6935930, "xid": NO, "nvlink_mb_per_s": NO}),
    ("03_", 1, 0, "gpu1-wl8sg", "NVIDIA L40S",
     {"sm_clock_mhz": 210, "mem_clock_mhz": 405, "temp_c": 32, "mem_temp_c": NO, "power_w": 35.686,
      "energy_j": 5551899.580, "fb_free_mib": 45459, "fb_used_mib": 0, "fb_reserved_mib": 608,
      "remapped_uncorrectable": 0, "remapped_correctable": 0, "remap_failure": 0,
      "dram_active_ratio": 0.000131, "pcie_tx_bytes_per_s": 175084, "pcie_replay": 0}),
    ("05_", 1, 0, "test-ai-1-node-pool-40c-d5ds8-br9r6-9tb2c", "GRID A100-40C",
     {"sm_clock_mhz": 1410, "mem_clock_mhz": 1215, "temp_c": NO, "mem_temp_c": NO, "power_w": NO,
      "energy_j": NO, "gpu_util_ratio": 0, "mem_copy_util_ratio": 0, "fb_free_mib": 37739,
      "fb_used_mib": 0, "fb_reserved_mib": 3220, "vgpu_license": 1}),
    ("07_", 1, 0, "i-030791dc5a37cd257", "NVIDIA L4",
     {"power_w": 16.365, "energy_j": 4742.776, "temp_c": 31, "mem_temp_c": NO, "sm_clock_mhz": 210,
      "fb_free_mib": 22563, "fb_reserved_mib": 470, "remap_failure": 0,
      "pcie_tx_bytes_per_s": 112603, "pcie_rx_bytes_per_s": 17544, "gr_engine_active_ratio": 0}),
    ("09_", 8, 6, "ip-10-0-180-136.ec2.internal", H100,
     {"temp_c": 37, "power_w": 112.67, "gpu_util_ratio": 0, "mem_copy_util_ratio": NO}),
    ("09_", 8, 1, "ip-10-0-180-136.ec2.internal", H100,
     {"temp_c": 33, "power_w": 67.219, "gpu_util_ratio": 0, "mem_copy_util_ratio": 0}),
    ("10_", 2, 1, "nvidia-dcgm-exporter-s228n", "Tesla T4",
     {"sm_clock_mhz": 300, "mem_clock_mhz": 405, "temp_c": 52, "power_w": 17.035,
      "energy_j": 8855.497, "pcie_replay": 0, "gpu_util_ratio": 0, "xid": 0, "fb_free_mib": 14955,
      "fb_used_mib": 5, "dram_active_ratio": 1e-6, "pcie_tx_bytes_per_s": 10888,
      "nvlink_mb_per_s": NO}),  # 0, of a card without NVLink
    ("11_", 1, 0, "nvidia-dcgm-exporter-tl46n", A100,
     {"fb_used_mib": 13 + 6 + 4384 + 6, "fb_free_mib": 9843 + 4857 + 480 + 4857,
      "gr_engine_active_ratio": 0.408493, "tensor_active_ratio": 0.000048,
      "dram_active_ratio": 0.250816, "temp_c": 35, "mem_temp_c": 36, "power_w": 112.252,
      "sm_clock_mhz": 1410, "energy_j": 6890.956, "xid": 0, "pcie_replay": 0,
      "nvlink_mb_per_s": NO, "gpu_util_ratio": NO}),
    ("13_", 1, 0, "nvidia-dcgm-exporter-q28k4", A100,
     {"fb_used_mib": 153 + 98 + 4384, "fb_free_mib": 9702 + 4766 + 480,
      "gr_engine_active_ratio": 0.999917, "tensor_active_ratio": 0.000118,
      "dram_active_ratio": 0.647986, "temp_c": 37, "mem_temp_c": 39, "power_w": 116.163,
      "energy_j": 57585.599, "gpu_util_ratio": NO, "nvlink_mb_per_s": NO}),
    ("14_", 1, 0, "nvidia-dcgm-exporter-drqwq", A100,
     {"gpu_util_ratio": 0, "remapped_uncorrectable": 0, "remapped_correctable": 0,
      "remap_failure": 0, "fb_free_mib": 40384, "fb_used_mib": 0, "sm_clock_mhz": 210,
      "mem_clock_mhz": 1215, "temp_c": 29, "mem_temp_c": 28, "power_w": 45.999,
      "energy_j": 424405.577, "nvlink_mb_per_s": 0, "xid": 0, "pcie_rx_bytes_per_s": 11775}),
    ("15_", 1, 0, "nvidia-dcgm-exporter-wwvv9", A100,
     {"power_w": 75.96, "temp_c": 32, "mem_temp_c": 30, "sm_clock_mhz": 1410,
      "energy_j": 8981.778, "gpu_util_ratio": NO, "fb_used_mib": NO, "nvlink_mb_per_s": 0,
      "gr_engine_active_ratio": 0.000033, "dram_active_ratio": 0.000005,
      "pcie_tx_bytes_per_s": 563898, "pcie_rx_bytes_per_s": 1161041}),
    ("17_", 1, 0, "ub20-a100-k8s", "",
     {"tensor_active_ratio": 0.92926, "gr_engine_active_ratio": 0.99563,
      "dram_active_ratio": 0.690789, "power_w": 409.692, "temp_c": 61, "mem_temp_c": 69,
      "sm_clock_mhz": 1215, "fb_free_mib": 35690, "fb_used_mib": 4845, "vgpu_license": 0,
      "pcie_tx_bytes_per_s": 33011804, "pcie_rx_bytes_per_s": 97863601, "energy_j": 319159.391}),
    ("18_", 1, 0, None, "", {"sm_clock_mhz": 139, "mem_clock_mhz": 405, "mem_temp_c": NO}),
    ("19_", 2, 1, None, "Tesla P4",
     {"temp_c": 39, "power_w": 6, "fb_used_mib": 0, "fb_total_mib": 7606}),
    ("19_", 2, 0, None, "Tesla P4",
     {"temp_c": 45, "power_w": 7, "fb_used_mib": 0, "fb_total_mib": 7606}),
    ("31_", 1, 0, "gpu1", "NVIDIA GeForce RTX 3090",
     {"sm_clock_mhz": 0, "mem_clock_mhz": 405, "temp_c": 37, "power_w": 11.568}),
    ("33_", 2, 1, "yg-data-k8s-gpu-a30-node-test-test0003.mt", "NVIDIA A30",
     {"mem_temp_c": 34, "xid": 0, "temp_c": NO}),
    ("33_", 2, 0, "yg-data-k8s-gpu-a30-node-test-test0003.mt", "NVIDIA A30",
     {"mem_temp_c": 35, "xid": 0, "fb_used_mib": NO}),
    ("34_", 1, 0, "gsrh100-074", H100,
     {"gr_engine_active_ratio": 0, "fb_used_mib": NO, "gpu_util_ratio": NO}),
    ("37_", 1, 0, "metal-gpu-08", "NVIDIA A100 80GB PCIe", {"sm_clock_mhz": 1410, "power_w": NO}),
    ("40_", 1, 0, "dcgm-exporter-6ldbb", "",
     {"temp_c": 54, "power_w": 30.982, "sm_clock_mhz": 585, "mem_clock_mhz": 5000,
      "gpu_util_ratio": 0, "energy_j": 55491669.881, "pcie_replay": 0}),
    ("41_", 1, 0, None, "",
     {"temp_c": 55, "mem_temp_c": 54, "power_w": 302.206, "gpu_util_ratio": 0.44,
      "sm_clock_mhz": 1530, "mem_clock_mhz": 877, "energy_j": 4335301.032, "pcie_replay": 0}),
    ("42_", 1, 0, "k8s-gpu1", "NVIDIA RTX A5000", {"gpu_util_ratio": 0, "fb_used_mib": 21383}),
    ("44_", 1, 0, None, "",
     {"temp_c": NO, "mem_temp_c": NO, "power_w": NO, "sm_clock_mhz": 0, "xid": 0, "energy_j": 0,
      "gpu_util_ratio": 0, "pcie_tx_bytes_per_s": 0, "power_violation_s": 0, "pcie_replay": 0}),
    ("50_", 4, 3, "axa", A100, {"nvlink_tx_bytes_per_s": 0, "nvlink_rx_bytes_per_s": NO}),
    ("53_", 0, None, None, "", {}),
    ("55_", 1, 0, "vks-cluster-0-0-np1-worker-xtxww-xw4wp-wn7j2", "GRID A100-8C",
     {"xid": 0, "fb_free_mib": 7531, "dec_util_ratio": 0}),
    ("57_", 1, 0, None, "",
     {"sm_clock_mhz": 345, "mem_clock_mhz": 3201, "temp_c": 39, "mem_temp_c": 42,
      "power_w": 81.203, "power_limit_w": 700, "energy_j": 1225746.728, "pcie_replay": 0,
      "fb_free_mib": 143166, "fb_used_mib": 0, "fb_reserved_mib": 604, "remap_failure": 0,
      "dram_active_ratio": 4e-6, "gr_engine_active_ratio": 0, "pcie_tx_bytes_per_s": 253703,
      "pcie_rx_bytes_per_s": 171406, "vgpu_license": 0}),
    ("nvidia_gpu_exporter__nvidia-geforce-rtx-4080", 1, 0, None, "NVIDIA GeForce RTX 4080 SUPER",
     {"temp_c": 43, "mem_copy_util_ratio": 0.23, "gpu_util_ratio": 0, "throttle_reasons": 1,
      "pcie_link_gen": 1, "pcie_max_link_gen": 4, "pcie_link_width": 16, "power_w": 26.2,
      "power_limit_w": 320, "sm_clock_mhz": 210, "sm_clock_max_mhz": 3165, "mem_clock_mhz": 405,
      "fb_used_mib": 596, "fb_free_mib": 15348, "fb_reserved_mib": 434, "fb_total_mib": 16376,
      "pstate": 8, "fan_ratio": 0, "recovery_action": 0, "ecc_dbe_volatile": NO,
      "remap_failure": NO, "mig_mode": NO}),
    ("nvidia_gpu_exporter__nvidia-h100-80gb-hbm3__590.48.01__idle", 1, 0, None, H100,
     {"temp_c": 41, "mem_temp_c": 48, "temp_margin_c": 46, "power_w": 69.85, "power_limit_w": 700,
      "throttle_reasons": 1, "gpu_util_ratio": 0, "sm_clock_mhz": 345, "fb_used_mib": 0,
      "fb_free_mib": 81081, "fb_reserved_mib": 479, "mig_mode": 0, "ecc_mode": 1,
      "fabric_state": 3, "ecc_sbe_volatile": 0, "remapped_uncorrectable": 0, "pcie_link_gen": 5}),
    ("nvidia_gpu_exporter__nvidia-h100-80gb-hbm3__590.48.01__load", 1, 0, None, H100,
     {"gpu_util_ratio": 1, "power_w": 631.95, "sm_clock_mhz": 1980, "mem_clock_mhz": 2619,
      "fb_used_mib": 19818, "fb_total_mib": 81559, "throttle_reasons": 0, "recovery_action": 0,
      "ecc_dbe_volatile": 0, "remap_pending": 0, "power_limit_w": 700, "pcie_link_width": 16}),
    ("nvidia_gpu_exporter__nvidia-h200-mig", 1, 0, None, "NVIDIA H200",
     {"power_w": 295.01, "gpu_util_ratio": NO, "fb_used_mib": 16959, "fb_free_mib": 126199,
      "remap_failure": NO, "temp_c": 36, "mem_temp_c": 39, "temp_margin_c": 46, "mig_mode": 1,
      "sm_clock_mhz": 1980, "mem_clock_mhz": 3201, "ecc_dbe_aggregate": 0, "fabric_state": 3}),
    ("nvidia_gpu_exporter__nvidia-l40s", 1, 0, None, "NVIDIA L40S",
     {"temp_c": 63, "power_w": 144.97, "power_limit_w": 350, "mem_temp_c": NO,
      "power_violation_s": 200.740215, "thermal_violation_s": 0, "gpu_util_ratio": 1,
      "mem_copy_util_ratio": 0.09, "sm_clock_mhz": 2520, "mem_clock_mhz": 9001,
      "fb_total_mib": 46068, "sram_threshold_exceeded": 0, "remap_pending": 0, "pcie_link_gen": 4}),
]  # fmt: skip

# what no alias covers, on purpose: nothing there tells of a GPU's health or its work
LEFT_OUT = re.compile(
    r"nvidia_gpu_num_devices|nvidia_smi_("
    r"accounting|c2c|compute|count|command|failed|last_collect|driver|kmd|umd|cuda|vbios|"
    r"display|driver_model|gsp|gom|inforom|serial|name|index|pci_|platform|persistence|protected|"
    r"addressing|dramEncryption|dramencryption|hostname|timestamp|edpp|"
    r"fabric_(clique|cluster|health|status|guid)|mig_mode_pending|ecc_mode_pending|"
    r"remapped_rows_(histogram|.*_inactive)|"
    r"ecc_errors_.*_(device_memory|dram|sram|l1_cache|l2_cache|register_file|texture|cbu|"
    r"sram_\w+)|"  # parts of the totals
    r"clocks_(max_memory|max_graphics|current_graphics|current_video|applications|default)|"
    r"clocks_event_reasons_(supported|counters_(sync_boost|hw_power_brake)\w*)|"
    r"pcie_link_gen_(gpucurrent|gpumax|hostmax)|"
    r"power_(default|max|min)_limit|power_draw_(average|instant)|module_power|"
    r"encoder_stats|utilization_(jpeg|ofa)|temperature_(?!gpu|memory)|retired_pages_blacklist)"
)

WORK = {
    ("09_", 6): Workload("pod", "llama-3-2-1b-7577f87fc7-dhb97", "nim-workload"),
    ("09_", 0): None,
    ("10_", 0): Workload(
        "pod", "runai-reservation-gpu-qa-mig-worker-gpu-1-kvltw", "runai-reservation"
    ),
    ("10_", 1): None,
    ("11_", 0): None,
    ("40_", 0): None,
}


@pytest.fixture(scope="module")
def frames(tmp_path_factory):
    folder = need_data("scrapes")
    texts = {row[0]: next(folder.glob(f"{row[0]}*.prom")).read_bytes() for row in SCRAPES}
    assert len(texts) == len(list(folder.glob("*.prom")))
    return frames_of(texts, tmp_path_factory.mktemp("prometheus"))


@pytest.mark.parametrize(
    ("beginning", "count", "index", "node", "model", "values"), SCRAPES, ids=lambda v: str(v)[:30]
)
def test_a_real_scrape_reads_right(frames, beginning, count, index, node, model, values):
    frame = frames[beginning]
    assert len(frame.gpus) == len({gpu.uuid for gpu in frame.gpus}) == count
    assert {gpu.node for gpu in frame.gpus} == ({node or target(beginning)} if count else set())
    assert (frame.presence == Presence.PRESENT).all()
    assert frame.xids == ()  # a code that stands when we come is history
    if not count:
        return
    row = row_of(frame, index)
    assert frame.gpus[row].model == model
    assert_values(frame, row, values)


@pytest.mark.parametrize("beginning", sorted({row[0] for row in SCRAPES}), ids=lambda b: b[:60])
def test_every_series_of_a_real_scrape_is_read_or_left_out_on_purpose(beginning):
    text = next(need_data("scrapes").glob(f"{beginning}*.prom")).read_text()
    left = set()
    for line in text.splitlines():
        name, _, rest = line.partition("{") if "{" in line else line.partition(" ")
        labels = dict(re.findall(r'(\w+)="([^"]*)"', rest))
        if line and not line.startswith("#") and CATALOG.alias(name, labels) is None:
            left.add(name)
    assert {name for name in left if not LEFT_OUT.match(name)} == set()


@pytest.mark.parametrize(("where", "work"), WORK.items(), ids=lambda v: str(v)[:20])
def test_the_work_of_a_real_scrape(frames, where, work):
    beginning, index = where
    frame = frames[beginning]
    assert frame.workloads[row_of(frame, index)] == work


@pytest.mark.parametrize(
    ("beginning", "series", "gpus", "busy"),
    [
        ("02_", 0, 0, {}),
        ("06_", 0, 0, {}),  # the list of targets: no samples in it
        ("07_", 1, 1, {}),
        ("08_", 1, 1, {}),
        ("09_", 16, 16, {"vllm-agg-0-vllmdecodeworker-s65j5": "dynamo-workload"}),
        ("11_", 16, 16, {"vllm-agg-0-vllmdecodeworker-s65j5": "dynamo-workload"}),
        ("13_", 16, 16, None),
    ],
)
def test_a_real_answer_of_the_query_api_decodes(beginning, series, gpus, busy):
    body = next(need_data("api").glob(f"{beginning}*.json")).read_bytes()
    samples = Answers().decode(body, time.time())
    assert len(samples.values) == series
    assert np.isfinite(samples.values).all()
    telemetry = Telemetry(CATALOG, Identity(), lacks=LACKS)
    telemetry.add(samples)
    frame = telemetry.frame(samples.times_s.max(initial=0.0))
    assert len(frame.gpus) == gpus
    if busy is not None:
        assert {w.id: w.tenant for w in frame.workloads if w} == busy
