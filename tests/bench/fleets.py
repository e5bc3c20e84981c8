"""Synthetic fleets as samples, for benchmarks: every GPU busy, healthy and a little noisy."""

import numpy as np

from sentinel.core.features import FEATURES, INDEX
from sentinel.core.frame import Samples, SeriesKey
from sentinel.core.score import GPU_SPACE, Cohort
from sentinel.core.verdict import Bundle
from sentinel.learn.baseline import DensityBaseline
from sentinel.learn.thermal import fit_thermal

MODEL = "NVIDIA H100 80GB HBM3"
# (field, level, spread): 20 metrics per GPU
FIELDS = (
    ("DCGM_FI_DEV_GPU_TEMP", 62, 1),
    ("DCGM_FI_DEV_MEMORY_TEMP", 74, 1),
    ("DCGM_FI_DEV_POWER_USAGE", 600, 8),
    ("DCGM_FI_DEV_SM_CLOCK", 1755, 10),
    ("DCGM_FI_DEV_MEM_CLOCK", 2619, 0),
    ("DCGM_FI_DEV_GPU_UTIL", 97, 1),
    ("DCGM_FI_DEV_MEM_COPY_UTIL", 48, 2),
    ("DCGM_FI_DEV_FB_USED", 71_000, 0),
    ("DCGM_FI_DEV_FB_FREE", 9_900, 0),
    ("DCGM_FI_DEV_XID_ERRORS", 0, 0),
    ("DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", 0, 0),
    ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", 0, 0),
    ("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", 3, 0),
    ("DCGM_FI_DEV_CLOCKS_EVENT_REASONS", 0, 0),
    ("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", 0.5, 0.01),
    ("DCGM_FI_PROF_DRAM_ACTIVE", 0.35, 0.01),
    ("DCGM_FI_PROF_SM_ACTIVE", 0.85, 0.01),
    ("DCGM_FI_PROF_PCIE_RX_BYTES", 1e7, 1e5),
    ("DCGM_FI_PROF_NVLINK_TX_BYTES", 9e9, 1e8),
    ("DCGM_FI_DEV_ROW_REMAP_FAILURE", 0, 0),
)


class SyntheticFleet:
    """`samples(at_s)` is one scrape of all its GPUs, as the reader hands it over."""

    def __init__(self, gpus, seed=0):
        self.gpus = gpus
        self._rng = np.random.default_rng(seed)
        self.keys = []
        for field, _, _ in FIELDS:
            for g in range(gpus):
                labels = {
                    "UUID": f"GPU-{g:08x}-0000-4000-8000-000000000000",
                    "gpu": str(g % 8),
                    "Hostname": f"node-{g // 8:05d}",
                    "instance": f"node-{g // 8:05d}:9400",
                    "job": "dcgm-exporter",
                    "hpc_job": str(g // 64),
                    "modelName": MODEL,
                }
                self.keys.append(SeriesKey(field, tuple(sorted(labels.items()))))
        self.series = np.arange(len(self.keys), dtype=np.int64)

    def samples(self, at_s):
        n = self.gpus
        values = np.concatenate(
            [level + spread * self._rng.standard_normal(n) for _, level, spread in FIELDS]
        )
        times = np.full(len(values), at_s)
        return Samples(at_s, self.keys, self.series, times, values)


def bundle(grid_s=60.0, cores=384, seed=0):
    """A baseline as large as they get, around the synthetic fleet's normal."""
    rng = np.random.default_rng(seed)
    level = {
        "gpu_util": (0.97, 0.1), "mem_copy_util": (0.48, 0.1), "sm_active": (0.85, 0.2),
        "tensor_active": (0.5, 0.3), "dram_active": (0.35, 0.2), "nvlink_traffic": (9.9, 0.5),
        "pcie_traffic": (7.0, 0.5), "power": (600, 60), "temp_excess": (0, 1.5),
        "mem_temp_excess": (0, 1.5), "sm_clock": (1755, 80), "mem_clock": (2619, 1),
        "throttled": (0, 0.01), "ecc_sbe": (0, 0.01), "pcie_replay": (0, 0.01),
    }  # fmt: skip
    rows = np.full((6000, len(FEATURES)), np.nan)
    for name, (mean, spread) in level.items():
        rows[:, INDEX[name]] = mean + spread * rng.standard_normal(len(rows))
    floors = np.array([f.floor * (600.0 if f.relative else 1.0) for f in FEATURES])
    learnt = DensityBaseline(space=GPU_SPACE, floors=floors, max_cores=cores).fit(rows)
    gpu = np.zeros(1000, dtype=np.int64)
    power = rng.uniform(100, 700, 1000)
    temp = np.stack([26 + 0.06 * power, 38 + 0.06 * power], axis=1)
    thermal = fit_thermal(("GPU-none",), gpu, power, temp, span_s=86_400.0)
    return Bundle("bench", {MODEL: Cohort(MODEL, learnt.density_, thermal, len(rows))}, grid_s)
