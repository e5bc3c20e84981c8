"""Which GPU, exporter and work a series speaks of, from its labels alone.

A GPU is its UUID; the labels of work come and go without making it another GPU. Slices and
links are parts of the GPU that holds them. Nothing is remembered here, and nothing decided
about a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from sentinel.core.domain import Workload

_UUID: Final = ("UUID", "uuid", "gpu_uuid", "GPU_UUID", "gpu_id")
_INDEX: Final = ("gpu", "index", "minor_number", "minor", "gpu_index", "device", "path")
_MODEL: Final = ("modelName", "model_name", "gpu_name", "name", "model", "product_name")
_ENTITY: Final = ("GPU_I_ID", "gpu_instance_id", "nvlink", "vgpu")
_BARE_UUID: Final = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_MASKED: Final = re.compile(r"(GPU-)?[0-]+")
_DEVICE: Final = re.compile(r"(?:/dev/)?(?:nvidia|gpu)?(\d+)")
_EXPORTER: Final = re.compile(r"exporter|dcgm|telegraf|gpud|node-agent|prometheus", re.IGNORECASE)
_NO_HOST: Final = frozenset({"", "localhost", "localhost.localdomain"})
_EXPORTED: Final = "exported_"


@dataclass(frozen=True)
class Identity:
    """How labels become nodes, work and tenants; each list in order of preference.

    `node_rewrite` are (regular expression, replacement) pairs, applied in order.
    """

    node_from: tuple[str, ...] = ("Hostname", "hostname", "instance")
    node_rewrite: tuple[tuple[str, str], ...] = ()
    job_id_from: tuple[str, ...] = ("hpc_job", "exported_pod", "pod")
    tenant_from: tuple[str, ...] = ("namespace", "exported_namespace")

    @cached_property
    def _rewrites(self) -> tuple[tuple[re.Pattern[str], str], ...]:
        return tuple((re.compile(match), replace) for match, replace in self.node_rewrite)

    def node(self, labels: Mapping[str, str]) -> tuple[str, int]:
        """(name of the node, place in `node_from` of the label that told it).

        A name that every host has tells nothing unless there is no other.
        """
        told = [(labels.get(label, ""), rank) for rank, label in enumerate(self.node_from)]
        told.append((labels.get("instance", ""), len(told)))
        name, rank = next((t for t in told if t[0] not in _NO_HOST), ("", len(told)))
        if not name:
            name, rank = next((t for t in told if t[0]), ("", len(told)))
        for pattern, replacement in self._rewrites:
            name = pattern.sub(replacement, name)
        return name, rank

    def workload(self, labels: Mapping[str, str]) -> Workload | None:
        """The work that the labels name, if any; the exporter's own pod is nobody's work."""
        own = _is_own_pod(labels)
        for label in self.job_id_from:
            value = labels.get(label, "")
            if not value or (own and not label.startswith(_EXPORTED) and value == labels["pod"]):
                continue
            kind = "pod" if label.endswith(("pod", "pod_name")) else "job"
            return Workload(kind, value, self._tenant(labels, label, own))
        return None

    def _tenant(self, labels: Mapping[str, str], told_by: str, own: bool) -> str:
        # where the work's pod was renamed to exported_pod, plain `namespace` is the exporter's
        foreign = own or told_by.startswith(_EXPORTED)
        for label in self.tenant_from:
            if labels.get(label) and not (foreign and label == "namespace"):
                return labels[label]
        return ""


@dataclass(frozen=True, slots=True)
class GpuLabels:
    """What the labels of one series say of its GPU. `id` is empty when they name none.

    `entity` is the part of the GPU that the series measures; empty for all of it.
    """

    id: str
    has_uuid: bool
    index: int | None
    model: str
    entity: str


def read_gpu(labels: Mapping[str, str], node: str) -> GpuLabels:
    """The GPU of a series: its UUID, else its place in its node, else nothing."""
    index = _index(labels)
    part = ",".join(labels[name] for name in _ENTITY if labels.get(name))
    model = next((labels[name] for name in _MODEL if labels.get(name)), "")
    masked = ""
    for name in _UUID:
        value = labels.get(name, "")
        if value.startswith("MIG-GPU-"):  # an old driver's slice: parent, instances
            parent, _, rest = value.removeprefix("MIG-").partition("/")
            return GpuLabels(parent, True, index, model, part or rest)
        if value.startswith("MIG-"):
            part = part or value
        elif _MASKED.fullmatch(value):
            masked = value if "-" in value else masked
        elif _BARE_UUID.fullmatch(value):
            return GpuLabels(f"GPU-{value.lower()}", True, index, model, part)
        elif value.startswith("GPU-") or (value and name != "gpu_id"):
            return GpuLabels(value, True, index, model, part)
    if masked:  # a UUID that was blacked out is still one GPU of its node
        return GpuLabels(f"{node}/{masked}", True, index, model, part)
    return GpuLabels("" if index is None else f"{node}/gpu{index}", False, index, model, part)


def _index(labels: Mapping[str, str]) -> int | None:
    for name in _INDEX:
        found = _DEVICE.fullmatch(labels.get(name, ""))
        if found:
            return int(found.group(1))
    return None


def exporter_of(labels: Mapping[str, str], node: str) -> tuple[str, str]:
    """The scrape target of a series, the same for its `up`."""
    return labels.get("job", ""), labels.get("instance", "") or node


def _is_own_pod(labels: Mapping[str, str]) -> bool:
    """Whether `pod` is that of the exporter itself, as service discovery sets it."""
    pod, container = labels.get("pod", ""), labels.get("container", "")
    if not pod:
        return False
    if f"{_EXPORTED}pod" in labels or pod == labels.get("Hostname", ""):
        return True
    if _EXPORTER.search(pod) or _EXPORTER.search(container):
        return True
    owners = (labels.get("service", ""), labels.get("job", ""), labels.get("app", ""))
    return any(owner and pod.startswith(f"{owner.rpartition('/')[2]}-") for owner in owners)
