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

from sentinel.core.frame import Samples, SeriesKey

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
POWER, ENERGY = "DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"
REASONS, UTIL = "DCGM_FI_DEV_CLOCKS_EVENT_REASONS", "DCGM_FI_DEV_GPU_UTIL"
HBM_TEMP, MEM_CLOCK = "DCGM_FI_DEV_MEMORY_TEMP", "DCGM_FI_DEV_MEM_CLOCK"
REPLAYS, REMAP = "DCGM_FI_DEV_PCIE_REPLAY_COUNTER", "DCGM_FI_DEV_ROW_REMAP_FAILURE"
SBE, DBE = "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL"
# what an exporter of the same host also shows, and stands still on a healthy GPU
STANDING = {MEM_CLOCK: 2619.0, REPLAYS: 0.0, REMAP: 0.0, SBE: 0.0, DBE: 0.0}
MODEL = "NVIDIA H100 80GB HBM3"


def need_data(name):
    """The folder or file of the real data, or a skip that says what is missing."""
    path = DATA / name
    if not path.exists():
        pytest.skip(f"no data folder: {path} is missing (set SENTINEL_DATA)")
    return path


def h100(name, *, phase="steady"):
    """One recording at 1 Hz: {field: float64 [seconds, 8]}, NaN where the cell was blank.
    `phase` None: from an idle host over loading and warm-up to the end."""
    path = need_data(f"h100/{name}.csv.gz")
    columns = defaultdict(list)
    with gzip.open(path, "rt") as file:
        for row in csv.DictReader(file):
            if phase in (None, row["phase"]):
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


def life(*parts, standing=True):
    """Recordings one after another, as of the same eight GPUs: (values, times repeated).

    Every part is (values, times): played to and fro so often, so that nothing jumps within it.
    Energy goes on counting. `standing` adds what a healthy GPU shows unchanged."""
    rows = {field: [] for field in parts[0][0]}
    for values, times in parts:
        for turn in range(times):
            for field, array in values.items():
                rows[field].append(array[:: -1 if turn % 2 else 1])
    out = {field: np.concatenate(arrays) for field, arrays in rows.items()}
    out[ENERGY] = 1e11 + np.cumsum(np.nan_to_num(out[POWER]) * 1e3, axis=0)
    if standing:
        out |= {field: np.full_like(out[TEMP], level) for field, level in STANDING.items()}
    return out


def uuid(recording, gpu):
    return f"GPU-{recording.encode().hex()[:8]:0>8}-0000-4000-8000-{gpu:012d}"


def inject(values, fault, gpu, at):
    """A copy of a recording in which one GPU goes wrong at second `at`."""
    out = {field: array.copy() for field, array in values.items()}
    seconds = np.arange(len(out[TEMP]))
    FAULTS[fault](out, seconds - at, gpu)
    return out


def _ramp(field, rise, over_s):
    def change(out, since, gpu):
        out[field][:, gpu] += np.round(rise * np.clip(since / over_s, 0.0, 1.0))

    return change


def _becomes(field, value):
    def change(out, since, gpu):
        out[field][since >= 0, gpu] = value

    return change


def _slower(field, share):
    def change(out, since, gpu):
        out[field][since >= 0, gpu] *= 1.0 - share

    return change


def _counts(field, per_s, until_s=np.inf):
    def change(out, since, gpu):
        out[field][:, gpu] += np.floor(per_s * np.clip(since, 0.0, until_s))

    return change


def _vanish(out, since, gpu):
    for array in out.values():
        array[since >= 0, gpu] = np.nan


def _cools(out, since, gpu, saved_w):
    """The temperature follows a fall of the power: 0.06 °C per W, within a minute."""
    drop = 0.06 * saved_w * (1.0 - np.exp(-np.clip(since, 0.0, None) / 40.0))
    out[TEMP][:, gpu] = np.round(out[TEMP][:, gpu] - drop)


def _power_brake(out, since, gpu):
    """The node's power supply asks for less: the brake's bit, half the clock, less power."""
    on = since >= 0
    out[REASONS][on, gpu] = 0x80
    out[CLOCK][on, gpu] *= 0.5
    _cools(out, since, gpu, 0.35 * out[POWER][:, gpu])
    out[POWER][on, gpu] *= 0.65


def _slowdown_flaps(out, since, gpu):
    """Hardware thermal slowdown comes and goes, 20 s of every 60."""
    on = (since >= 0) & (since % 60 < 20)
    out[REASONS][on, gpu] = 0x40 | 0x8
    out[CLOCK][on, gpu] *= 0.7


def _hang(out, since, gpu):
    """A kernel that never ends: busy by its utilisation, idle by everything else."""
    on = since >= 0
    _cools(out, since, gpu, out[POWER][:, gpu] - 118.0)
    out[UTIL][on, gpu], out[POWER][on, gpu] = 100.0, 118.0
    for field in out:
        if field.startswith("DCGM_FI_PROF"):
            out[field][on, gpu] = 0.0
    out["DCGM_FI_PROF_SM_ACTIVE"][on, gpu] = 0.008


FAULTS = {
    "ramp": _ramp(TEMP, 12.0, 60.0),
    "clock": _slower(CLOCK, 0.2),
    "xid": _becomes(XID, 79.0),
    "vanish": _vanish,
    "fan creep": _ramp(TEMP, 10.0, 1200.0),
    "power brake": _power_brake,
    "slowdown flaps": _slowdown_flaps,
    "memory clock": _becomes(MEM_CLOCK, 1593.0),
    "ecc storm": _counts(SBE, 40.0),
    "uncorrectable": _counts(DBE, 1.0, 1.0),
    "remap failure": _becomes(REMAP, 1.0),
    "replays": _counts(REPLAYS, 2.0),
    "hang": _hang,
    "10 % clock": _slower(CLOCK, 0.1),
    "HBM hot": _ramp(HBM_TEMP, 10.0, 300.0),
}


class Recorded:
    """Stands where a Prometheus would: what was written to it is its history."""

    def __init__(self):
        self._keys, self._blocks = [], []

    def write(self, labels, times, rows):
        ids = np.arange(len(self._keys), len(self._keys) + len(labels))
        for label in labels:
            pairs = sorted((k, v) for k, v in label.items() if k != "__name__")
            self._keys.append(SeriesKey(label["__name__"], tuple(pairs)))
        self._blocks.append((ids, np.asarray(times), rows))

    def history(self, start_s, end_s, *, slice_s):
        while start_s < end_s:
            until_s = min(start_s + slice_s, end_s)
            parts = [self._part(*block, start_s, until_s) for block in self._blocks]
            series, times, values = (np.concatenate(column) for column in zip(*parts, strict=True))
            yield Samples(until_s, self._keys, series, times, values)
            start_s = until_s

    def _part(self, ids, times, rows, after_s, until_s):
        inside = (times > after_s) & (times <= until_s)
        row, column = np.nonzero(np.isfinite(rows[:, inside]))
        return ids[row], times[inside][column], rows[:, inside][row, column]


def write_recording(
    writer,
    recording,
    values,
    start_s,
    *,
    host,
    every_s=1,
    jitter_s=0.0,
    model=MODEL,
    without=(),
    extra=(),
    gpus=range(8),
):
    """As one host's dcgm-exporter with `recording` as a label, scraped every `every_s`. Left
    out are fields that start with any of `without`; `extra` are (name, value) labels."""
    seconds = len(values[TEMP])
    picked = np.arange(0, seconds, every_s)
    late = np.random.default_rng(11).uniform(0.0, jitter_s, len(picked)) if jitter_s else 0.0
    times = np.round(start_s + picked + late, 3)
    common = {"Hostname": host, "instance": f"{host}:9400", "job": "dcgm-exporter"}
    common |= {"recording": recording, **dict(extra)}
    labels, rows = [], []
    told = {"modelName": model} if model else {}
    for field, array in values.items():
        if field.startswith(tuple(without)):
            continue
        for gpu in gpus:
            labels.append(
                {
                    "__name__": field,
                    "UUID": uuid(recording, gpu),
                    "gpu": str(gpu),
                    "device": f"nvidia{gpu}",
                    **told,
                    **common,
                }
            )
            rows.append(array[picked, gpu])
    labels.append({"__name__": "up", **common})
    rows.append(np.ones(len(picked)))
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
