"""Real recordings as dcgm-exporter series, and copies of them with a fault injected.

The data folder is found at SENTINEL_DATA or beside the project; nothing of it is kept here.
"""

import csv
import gzip
import os
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("SENTINEL_DATA", ROOT.parent / "shared" / "data"))

# column of the recording -> dcgm-exporter's field
FIELDS = {
    "power_w": "DCGM_FI_DEV_POWER_USAGE",
    "temp_c": "DCGM_FI_DEV_GPU_TEMP",
    "mem_used_mib": "DCGM_FI_DEV_FB_USED",
    "gpu_util_pct": "DCGM_FI_DEV_GPU_UTIL",
    "mem_util_pct": "DCGM_FI_DEV_MEM_COPY_UTIL",
    "sm_active": "DCGM_FI_PROF_SM_ACTIVE",
    "tensor_active": "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
    "dram_active": "DCGM_FI_PROF_DRAM_ACTIVE",
    "pcie_tx_bytes_s": "DCGM_FI_PROF_PCIE_TX_BYTES",
    "pcie_rx_bytes_s": "DCGM_FI_PROF_PCIE_RX_BYTES",
    "nvlink_tx_bytes_s": "DCGM_FI_PROF_NVLINK_TX_BYTES",
    "nvlink_rx_bytes_s": "DCGM_FI_PROF_NVLINK_RX_BYTES",
    "throttle_reasons": "DCGM_FI_DEV_CLOCKS_EVENT_REASONS",
    "energy_mj": "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
}
TEMP, CLOCK, XID = "DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_SM_CLOCK", "DCGM_FI_DEV_XID_ERRORS"
MODEL = "NVIDIA H100 80GB HBM3"


def need_data(name):
    """The folder or file of the real data, or a skip that says what is missing."""
    path = DATA / name
    if not path.exists():
        pytest.skip(f"no data folder: {path} is missing (set SENTINEL_DATA)")
    return path


def h100(name, *, phase="steady"):
    """One recording at 1 Hz: {field: float64 [seconds, 8]}, NaN where the cell was blank."""
    path = need_data(f"h100/{name}.csv.gz")
    columns = defaultdict(list)
    with gzip.open(path, "rt") as file:
        for row in csv.DictReader(file):
            if row["phase"] == phase:
                columns["t"].append(float(row["timestamp"]))
                columns["gpu"].append(int(row["gpu"]))
                for column in FIELDS:
                    columns[column].append(float(row[column] or "nan"))
    table = {k: np.array(v) for k, v in columns.items()}
    seconds = int(table["t"].max() - table["t"].min())
    wanted = table["t"].min() + np.arange(seconds) + 0.5
    out = {field: np.full((seconds, 8), np.nan) for field in FIELDS.values()}
    for gpu in range(8):
        own = table["gpu"] == gpu
        pick = np.maximum(np.searchsorted(table["t"][own], wanted) - 1, 0)
        for column, field in FIELDS.items():
            out[field][:, gpu] = table[column][own][pick]
    # the recordings have no SM clock: full boost, lower where the power cap is reached
    rng = np.random.default_rng(7)
    capped = np.maximum(out["DCGM_FI_DEV_POWER_USAGE"] - 670.0, 0.0)
    out[CLOCK] = np.round((1980.0 - 8.0 * capped + rng.normal(0, 8, capped.shape)) / 15.0) * 15.0
    out[XID] = np.zeros_like(capped)
    return out


def uuid(recording, gpu):
    return f"GPU-{recording.encode().hex()[:8]:0>8}-0000-4000-8000-{gpu:012d}"


def inject(values, fault, gpu, at):
    """A copy of a recording in which one GPU goes wrong at second `at`."""
    out = {field: array.copy() for field, array in values.items()}
    seconds = np.arange(len(out[TEMP]))
    if fault == "ramp":  # +12 °C within a minute
        out[TEMP][:, gpu] += np.round(12.0 * np.clip((seconds - at) / 60.0, 0.0, 1.0))
    elif fault == "clock":
        out[CLOCK][seconds >= at, gpu] *= 0.8
    elif fault == "xid":
        out[XID][seconds >= at, gpu] = 79.0
    elif fault == "vanish":
        for array in out.values():
            array[seconds >= at, gpu] = np.nan
    else:
        raise ValueError(fault)
    return out


def write_recording(writer, recording, values, start_s, *, host):
    """As one host's dcgm-exporter, scraped every second, with `recording` as a label."""
    seconds = len(values[TEMP])
    times = start_s + np.arange(seconds, dtype=float)
    common = {"Hostname": host, "instance": f"{host}:9400", "job": "dcgm-exporter"}
    common |= {"recording": recording}
    labels, rows = [], []
    for field, array in values.items():
        for gpu in range(array.shape[1]):
            labels.append(
                {
                    "__name__": field,
                    "UUID": uuid(recording, gpu),
                    "gpu": str(gpu),
                    "device": f"nvidia{gpu}",
                    "modelName": MODEL,
                    **common,
                }
            )
            rows.append(array[:, gpu])
    labels.append({"__name__": "up", **common})
    rows.append(np.ones(seconds))
    writer.write(labels, times, np.array(rows))


def h200_series():
    """The H200's scrape history: (labels, times [k], values [n, k]), times from zero."""
    path = need_data("h200/prom_data.openmetrics.txt.gz")
    series = defaultdict(dict)
    with gzip.open(path, "rt") as file:
        for line in file:
            if line.startswith("#"):
                continue
            head, value, at = line.rsplit(" ", 2)
            name, _, inside = head.partition("{")
            pairs = (part.split("=", 1) for part in inside.rstrip("}").split(","))
            key = (name, *sorted((k, v.strip('"')) for k, v in pairs))
            series[key][round(float(at))] = float(value)
    first = min(min(samples) for samples in series.values())
    last = max(max(samples) for samples in series.values())
    values = np.full((len(series), last - first + 1), np.nan)
    for row, samples in enumerate(series.values()):
        values[row, np.array(list(samples)) - first] = list(samples.values())
    labels = [{"__name__": key[0], **dict(key[1:])} for key in series]
    return labels, np.arange(values.shape[1], dtype=float), values
