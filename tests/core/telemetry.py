"""A small language for telemetry: one scrape as text-like pieces, folded by the real fold."""

import numpy as np

from sentinel.core.frame import Identity, Samples, SeriesKey, Telemetry
from sentinel.data import load_catalog

CATALOG = load_catalog()
START_S = 1_700_000_000.0
IDENTITY = Identity(
    node_from=("Hostname", "hostname", "instance"),
    node_rewrite=(),
    job_id_from=("hpc_job", "exported_pod", "pod"),
    tenant_from=("exported_namespace", "namespace"),
)


def fold(identity=IDENTITY, **options):
    return Telemetry(CATALOG, identity, **options)


def key(name, /, **labels):
    return SeriesKey(name, tuple(sorted(labels.items())))


def gpu(n, host="a", **labels):
    """Labels of dcgm-exporter for GPU `n` of `host`."""
    known = {
        "UUID": f"GPU-{host}{n}",
        "gpu": str(n),
        "Hostname": f"node-{host}",
        "instance": f"{host}:9400",
        "job": "dcgm-exporter",
        "modelName": "H100",
    }
    return {k: v for k, v in (known | labels).items() if v is not None}


def samples(at_s, *points, partial=False, warnings=()):
    """`points` are (key, time, value)."""
    keys = list(dict.fromkeys(k for k, _, _ in points))
    place = {k: i for i, k in enumerate(keys)}
    return Samples(
        at_s,
        keys,
        np.array([place[k] for k, _, _ in points], dtype=np.int64),
        np.array([t for _, t, _ in points], dtype=float),
        np.array([v for _, _, v in points], dtype=float),
        partial,
        warnings,
    )


def scrape(at_s, gpus, *, host="a", up=1, **metrics):
    """Points of one scrape of one host: `gpus` are numbers, metrics apply to all of them."""
    metrics = metrics or {"DCGM_FI_DEV_GPU_TEMP": 50}
    points = [(key(name, **gpu(n, host)), at_s, v) for n in gpus for name, v in metrics.items()]
    if up is not None:
        points.append((key("up", instance=f"{host}:9400", job="dcgm-exporter"), at_s, up))
    return points


def value(frame, metric, row=0):
    return frame.values[row, frame.metrics.index(metric)]
