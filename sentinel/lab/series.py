"""Which series the exporters of a simulated fleet show, with which labels and values.

A series is a metric of a GPU, or of a slice of one. All values of a moment are one array
[metrics, GPUs]; series pick theirs out of it by number, so that history is array work.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from sentinel.core.domain import Bools, Floats, Gpu, Ints
from sentinel.lab import workload
from sentinel.lab.catalogue import FAMILIES, NOT_OF_SLICES, OF_SLICES
from sentinel.lab.hardware import Hardware
from sentinel.lab.site import RACK_HOSTS, Site
from sentinel.lab.workload import Workload

SCRAPE_JOB: Final = "dcgm-exporter"
DRIVER: Final = "550.90.07"
NAMES: Final = tuple(family.name for family in FAMILIES)
XID: Final = NAMES.index("DCGM_FI_DEV_XID_ERRORS")
_BUS_IDS: Final = (0x1B, 0x43, 0x52, 0x61, 0x9D, 0xC3, 0xD1, 0xDF)
_SLICES: Final = 2  # of a GPU that is cut up, by halves
_SLICE_SHARE: Final = (1.1, 0.9)  # how busy each is, next to the whole

Labels = dict[str, str]


class Family(NamedTuple):
    """One metric of the fleet: `labels[i]` belongs to `values[i]`."""

    name: str
    labels: list[Labels]
    values: Floats


class Block(NamedTuple):
    """A stretch of history, ready for remote write: values float64 [series, times], NaN = no
    sample. Blocks share the `labels` object while nothing changed, and the labels of one
    series are one object for as long as they stay the same."""

    labels: list[Labels]
    times_s: Floats
    values: Floats


class Series:
    """The series of a fleet. `hidden` bool [metrics, hosts]: what the exporter of a host does
    not show; `host_of` int64 [gpus]."""

    def __init__(
        self, gpus: Sequence[Gpu], hosts: Sequence[str], hardware: Hardware, site: Site
    ) -> None:
        self._gpus, self._hosts, self._hardware, self._site = gpus, hosts, hardware, site
        number = {host: place for place, host in enumerate(hosts)}
        self.host_of: Ints = np.array([number[gpu.node] for gpu in gpus])
        self.hidden = np.zeros((len(FAMILIES), len(hosts)), bool)
        self.capable = np.array([family.capable(hardware) for family in FAMILIES])
        for name in site.left_out:
            self.capable[NAMES.index(name)] = False
        self.sliced = self.host_of < site.mig_hosts
        for name in NOT_OF_SLICES:
            self.capable[NAMES.index(name)] &= ~self.sliced
        self._of_slices = np.isin(NAMES, OF_SLICES)
        self._take, self._scale = self._numbers()
        self._own: list[list[Labels]] = [[] for _ in gpus]  # by GPU, one per slice
        self._scraped: list[list[Labels]] = [[] for _ in gpus]
        self._up = [{"__name__": "up", **target_labels(host)} for host in hosts]
        self._all: list[Labels] | None = None

    def _numbers(self) -> tuple[Ints, Floats]:
        """Of every series its place in [metrics x GPUs], and its share of the value there."""
        take, scale = [], []
        n = len(self._gpus)
        for row in range(n):
            mine = np.flatnonzero(self.capable[:, row])
            parts = _SLICES if self.sliced[row] else 1
            for part in range(parts):
                take.append(mine * n + row)
                share = _SLICE_SHARE[part] if parts > 1 else 1.0
                scale.append(np.where(self._of_slices[mine] & (parts > 1), share / parts, 1.0))
        return np.concatenate(take), np.concatenate(scale)

    def relabel(self, rows: Iterable[int], work: Workload) -> None:
        """The work on these rows has changed."""
        for row in rows:
            self._own[row] = self._labels_of(row, work)
            mine = np.flatnonzero(self.capable[:, row]).tolist()
            target = target_labels(self._gpus[row].node, self._rack(row))
            self._scraped[row] = [
                {"__name__": NAMES[f], **own, **target} for own in self._own[row] for f in mine
            ]
        self._all = None

    def _rack(self, row: int) -> str:
        return f"r{self.host_of[row] // RACK_HOSTS:02d}" if self._site.rack_label else ""

    def _labels_of(self, row: int, work: Workload) -> list[Labels]:
        gpu = self._gpus[row]
        slot = gpu.index or 0
        labels = {
            "gpu": str(slot),
            "UUID": gpu.uuid,
            "pci_bus_id": f"00000000:{_BUS_IDS[slot % 8] + slot // 8:02X}:00.0",
            "device": f"nvidia{slot}",
            "modelName": gpu.model,
            "Hostname": gpu.node,
            "DCGM_FI_DRIVER_VERSION": DRIVER,
        }
        job_id = work.job_of[row]
        if job_id is not None:
            labels |= self._work_labels(work.jobs[job_id], row)
        if not self.sliced[row]:
            return [labels]
        cut = {"GPU_I_PROFILE": "3g.40gb"}
        return [{**labels, **cut, "GPU_I_ID": str(part + 1)} for part in range(_SLICES)]

    def _work_labels(self, job: workload.Job, row: int) -> Labels:
        if not self._site.pods:
            return {"hpc_job": job.id}
        node = int(self.host_of[row] - self.host_of[job.rows].min())
        if job.kind == workload.TRAINING:
            pod = f"{job.id}-worker-{node}"
        else:  # of a deployment: another name at every start
            start = zlib.crc32(f"{job.id} {job.incarnation}".encode())
            pod = f"{job.id}-{start % 0xFFFFF:05x}-{start // 0x1000 % 0xFFFFF:05x}"
        return {"pod": pod, "namespace": "research", "container": "main"}

    # --- values ---------------------------------------------------------------------------

    def matrix(self, gone: Bools, silent: Bools, off: Bools) -> Floats:
        """float64 [metrics, GPUs] of this moment, NaN where nothing is shown: all of a GPU
        that is `gone` or whose host is `off`, all but its Xid where it is `silent`."""
        values = np.array([family.read(self._hardware) for family in FAMILIES])
        values[~self.capable] = np.nan
        missing = gone | off[self.host_of]
        if missing.any():
            values[:, missing] = np.nan
        if silent.any():
            xid = values[XID].copy()
            values[:, silent] = np.nan
            values[XID] = xid
        if self.hidden.any():
            values[self.hidden[:, self.host_of]] = np.nan
        return values

    def families(self, values: Floats, rows: Ints) -> list[Family]:
        """What `matrix` gave, as the exporters of these rows say it, in their order."""
        found = []
        for f, family in enumerate(FAMILIES):
            labels: list[Labels] = []
            shown: list[float] = []
            for row in rows[np.isfinite(values[f, rows])].tolist():
                own = self._own[row]
                labels += own
                if len(own) == 1:
                    shown.append(float(values[f, row]))
                    continue
                shares = [s / _SLICES for s in _SLICE_SHARE] if self._of_slices[f] else [1.0] * 2
                shown += [float(values[f, row]) * share for share in shares]
            found.append(Family(family.name, labels, np.array(shown)))
        return found

    def labels(self) -> list[Labels]:
        """Of every series as scraped, in the order of `columns`; then one `up` per host."""
        if self._all is None:
            self._all = [labels for row in self._scraped for labels in row] + self._up
        return self._all

    def columns(self, matrices: Sequence[Floats], ups: Sequence[Floats]) -> Floats:
        """[series, times] of what `matrix` gave at each time."""
        stacked = np.array(matrices).reshape(len(matrices), -1)
        values = stacked[:, self._take] * self._scale
        return np.concatenate([values, np.array(ups)], axis=1).T


def target_labels(host: str, rack: str = "") -> Mapping[str, str]:
    """What Prometheus adds to the samples of this host's exporter."""
    labels = {"instance": f"{host}:9400", "job": SCRAPE_JOB}
    return {**labels, "rack": rack} if rack else labels
