"""What real exporters say, through a real Prometheus: the right GPUs, the right values.

Every expectation was read off the scrape by hand. The data folder is found at SENTINEL_DATA or
beside the project; nothing of it is kept here.
"""

import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import numpy as np
import pytest

from sentinel.core.domain import Presence, Workload
from sentinel.core.frame import Identity, Telemetry
from sentinel.data import load_catalog
from sentinel.edges.answers import Answers
from sentinel.edges.prometheus import Prometheus
from sentinel.lab import servers
from tests.integration.recordings import need_data

pytestmark = pytest.mark.integration

CATALOG = load_catalog()
IDENTITY = Identity(tenant_from=("exported_namespace", "namespace"))
A100, H100 = "NVIDIA A100-SXM4-40GB", "NVIDIA H100 80GB HBM3"
NO = None  # the GPU has no such value, or a blank in its place

# file (its beginning), GPUs, index of one of them, its node (None: the target), model, values
SCRAPES = [
    ("01_", 1, 0, "cp-bm14r7", "Tesla T4",
     {"temp_c": 74, "mem_temp_c": NO, "power_w": 68.244, "gpu_util_ratio": 0.91,
      "mem_copy_util_ratio": 0.73, "dram_active_ratio": 0.092781, "fb_used_mib": 5120,
      "energy_j": 15152422.938, "pcie_rx_bytes_per_s": 6935930, "xid": NO}),
    ("03_", 1, 0, "gpu1-wl8sg", "NVIDIA L40S",
     {"sm_clock_mhz": 210, "mem_temp_c": NO, "fb_free_mib": 45459, "remap_failure": 0}),
    ("05_", 1, 0, "test-ai-1-node-pool-40c-d5ds8-br9r6-9tb2c", "GRID A100-40C",
     {"sm_clock_mhz": 1410, "temp_c": NO, "power_w": NO, "fb_free_mib": 37739}),
    ("07_", 1, 0, "i-030791dc5a37cd257", "NVIDIA L4", {"power_w": 16.365, "energy_j": 4742.776}),
    ("09_", 8, 6, "ip-10-0-180-136.ec2.internal", H100, {"temp_c": 37, "power_w": 112.67}),
    ("10_", 2, 1, "nvidia-dcgm-exporter-s228n", "Tesla T4",
     {"temp_c": 52, "fb_used_mib": 5, "xid": 0, "nvlink_mb_per_s": 0}),
    ("11_", 1, 0, "nvidia-dcgm-exporter-tl46n", A100,
     {"fb_used_mib": 13 + 6 + 4384 + 6, "fb_free_mib": 9843 + 4857 + 480 + 4857,
      "gr_engine_active_ratio": 0.408493, "temp_c": 35, "energy_j": 6890.956, "xid": 0}),
    ("13_", 1, 0, "nvidia-dcgm-exporter-q28k4", A100,
     {"fb_used_mib": 153 + 98 + 4384, "dram_active_ratio": 0.647986, "gpu_util_ratio": NO}),
    ("14_", 1, 0, "nvidia-dcgm-exporter-drqwq", A100,
     {"gpu_util_ratio": 0, "remapped_correctable": 0, "fb_free_mib": 40384}),
    ("15_", 1, 0, "nvidia-dcgm-exporter-wwvv9", A100,
     {"power_w": 75.96, "gpu_util_ratio": NO, "fb_used_mib": NO}),
    ("17_", 1, 0, "ub20-a100-k8s", "",
     {"tensor_active_ratio": 0.92926, "gr_engine_active_ratio": 0.99563, "power_w": 409.692}),
    ("18_", 1, 0, None, "", {"sm_clock_mhz": 139, "mem_clock_mhz": 405, "mem_temp_c": NO}),
    ("19_", 2, 1, None, "Tesla P4",
     {"temp_c": 39, "power_w": 6, "fb_used_mib": 0, "fb_total_mib": 7606}),
    ("31_", 1, 0, "gpu1", "NVIDIA GeForce RTX 3090", {"sm_clock_mhz": 0, "power_w": 11.568}),
    ("33_", 2, 1, "yg-data-k8s-gpu-a30-node-test-test0003.mt", "NVIDIA A30",
     {"mem_temp_c": 34, "xid": 0, "temp_c": NO}),
    ("34_", 1, 0, "gsrh100-074", H100, {"gr_engine_active_ratio": 0, "fb_used_mib": NO}),
    ("37_", 1, 0, "metal-gpu-08", "NVIDIA A100 80GB PCIe", {"sm_clock_mhz": 1410}),
    ("40_", 1, 0, "dcgm-exporter-6ldbb", "",
     {"temp_c": 54, "power_w": 30.982, "sm_clock_mhz": 585, "mem_clock_mhz": 5000,
      "gpu_util_ratio": 0, "energy_j": 55491669.881}),
    ("41_", 1, 0, None, "",
     {"temp_c": 55, "mem_temp_c": 54, "power_w": 302.206, "gpu_util_ratio": 0.44}),
    ("42_", 1, 0, "k8s-gpu1", "NVIDIA RTX A5000", {"gpu_util_ratio": 0, "fb_used_mib": 21383}),
    ("44_", 1, 0, None, "", {"temp_c": NO, "power_w": NO, "sm_clock_mhz": 0, "xid": 0}),
    ("50_", 4, 3, "axa", A100, {"nvlink_tx_bytes_per_s": 0, "temp_c": NO}),
    ("53_", 0, None, None, "", {}),
    ("55_", 1, 0, "vks-cluster-0-0-np1-worker-xtxww-xw4wp-wn7j2", "GRID A100-8C",
     {"xid": 0, "fb_free_mib": 7531}),
    ("57_", 1, 0, None, "",
     {"temp_c": 39, "mem_temp_c": 42, "power_limit_w": 700, "dram_active_ratio": 4e-6,
      "energy_j": 1225746.728}),
    ("nvidia_gpu_exporter__nvidia-geforce-rtx-4080", 1, 0, None, "NVIDIA GeForce RTX 4080 SUPER",
     {"temp_c": 43, "mem_copy_util_ratio": 0.23, "throttle_reasons": 1, "pcie_link_gen": 1}),
    ("nvidia_gpu_exporter__nvidia-h100-80gb-hbm3__590.48.01__idle", 1, 0, None, H100,
     {"temp_c": 41, "mem_temp_c": 48, "power_w": 69.85, "throttle_reasons": 1}),
    ("nvidia_gpu_exporter__nvidia-h100-80gb-hbm3__590.48.01__load", 1, 0, None, H100,
     {"gpu_util_ratio": 1, "power_w": 631.95, "sm_clock_mhz": 1980, "mem_clock_mhz": 2619,
      "fb_used_mib": 19818, "fb_total_mib": 81559, "throttle_reasons": 0, "recovery_action": 0,
      "ecc_dbe_volatile": 0, "remap_pending": 0, "power_limit_w": 700, "pcie_link_width": 16}),
    ("nvidia_gpu_exporter__nvidia-h200-mig", 1, 0, None, "NVIDIA H200",
     {"power_w": 295.01, "gpu_util_ratio": NO, "fb_used_mib": 16959, "remap_failure": NO}),
    ("nvidia_gpu_exporter__nvidia-l40s", 1, 0, None, "NVIDIA L40S",
     {"temp_c": 63, "power_w": 144.97, "mem_temp_c": NO, "power_violation_s": 200.740215}),
]  # fmt: skip

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


def target(beginning):
    return f"{beginning.strip('_').replace('_', '-')}.test:9400"


@pytest.fixture(scope="module")
def frames(tmp_path_factory):
    """One real Prometheus that scrapes every file as a target of its own; a frame of each."""
    folder = need_data("scrapes")
    texts = {row[0]: next(folder.glob(f"{row[0]}*.prom")).read_bytes() for row in SCRAPES}
    assert len(texts) == len(list(folder.glob("*.prom")))

    class Exporter(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(texts[self.path.rpartition("/")[2]])

        def log_message(self, *args):
            pass

    exporter = ThreadingHTTPServer(("127.0.0.1", 0), Exporter)
    exporter.daemon_threads = True
    Thread(target=exporter.serve_forever, args=(0.05,), daemon=True).start()
    address = f"127.0.0.1:{exporter.server_address[1]}"
    targets = [
        {
            "targets": [address],
            "labels": {"__metrics_path__": f"/of/{beginning}", "instance": target(beginning)},
        }
        for beginning in texts
    ]
    configs = [{"job_name": "exporters", "static_configs": targets}]
    with servers.prometheus(tmp_path_factory.mktemp("prometheus"), configs) as server:
        wait_until_scraped_twice(server.url, len(texts))
        read = {beginning: read_target(server.url, beginning) for beginning in texts}
    exporter.shutdown()
    exporter.server_close()
    return read


def wait_until_scraped_twice(url, targets):
    for _ in range(60):
        samples = Prometheus(url, names=("up",)).pull(time.time(), window_s=60, deadline_s=10)
        if (np.bincount(samples.series, minlength=targets) >= 2).sum() >= targets:
            assert set(samples.values) == {1.0}
            return
        time.sleep(0.5)
    pytest.fail("Prometheus did not scrape every target twice within 30 s")


def read_target(url, beginning):
    prometheus = Prometheus(url, selector=f'instance="{target(beginning)}"')
    telemetry = Telemetry(CATALOG, IDENTITY)
    now = time.time()
    telemetry.add(prometheus.pull(now, window_s=60, deadline_s=10))
    return telemetry.frame(now)


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
    (row,) = (i for i, gpu in enumerate(frame.gpus) if gpu.index == index)
    assert frame.gpus[row].model == model
    read = {name: frame.values[row, frame.metrics.index(name)] for name in values}
    for name, expected in values.items():
        if expected is NO:
            assert np.isnan(read[name]), name
        else:
            assert read[name] == pytest.approx(expected), name


@pytest.mark.parametrize(("where", "work"), WORK.items(), ids=lambda v: str(v)[:20])
def test_the_work_of_a_real_scrape(frames, where, work):
    beginning, index = where
    frame = frames[beginning]
    (row,) = (i for i, gpu in enumerate(frame.gpus) if gpu.index == index)
    assert frame.workloads[row] == work


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
    telemetry = Telemetry(CATALOG, IDENTITY)
    telemetry.add(samples)
    frame = telemetry.frame(samples.times_s.max(initial=0.0))
    assert len(frame.gpus) == gpus
    if busy is not None:
        assert {w.id: w.tenant for w in frame.workloads if w} == busy
