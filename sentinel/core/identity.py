"""Which GPU, exporter and work a series speaks of, from its labels alone.

A GPU is its UUID; the labels of work come and go without making it another GPU. Slices and
links are parts of the GPU that holds them. Nothing is remembered here, and nothing decided
about a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from sentinel.core.domain import Mates, Workload
from sentinel.core.jobs import GROUP_FROM, ROLE_FROM, SERVICE_FROM, mates_of

NODE_FROM: Final = (
    "Hostname",
    "hostname",
    "node",
    "node_name",
    "kubernetes_node",
    "k8s_node_name",
    "nodename",
    "host",
    "host_name",
    "exported_instance",
    "instance",
)
REPLICA_FROM: Final = (
    "prometheus_replica",
    "replica",
    "__replica__",
    "receive_replica",
    "prometheus",
    "cluster",
)
JOB_FROM: Final = (
    "hpc_job",
    "slurmjobid",
    "jobid",
    "exported_pod",
    "exported_pod_name",
    "pod",
    "pod_name",
    "gpu_pod_name",
)
RACK_FROM: Final = (
    "rack",
    "topology_kubernetes_io_rack",
    "rack_name",
    "rack_id",
    "label_topology_kubernetes_io_rack",
)
TENANT_FROM: Final = (
    "exported_namespace",
    "exported_pod_namespace",
    "pod_namespace",
    "namespace_name",
    "namespace",
)

_UUID: Final = ("UUID", "uuid", "gpu_uuid", "GPU_UUID", "device_uuid")
_AT_TIMES_UUID: Final = ("gpu_id", "gpud_metric_label", "gpu", "name")
# a minor number names the device, where an index is but an order
_PLACE: Final = ("gpu", "minor_number", "minor", "gpu_number", "gpu_index", "ordinal", "gpu_id")
_INDEX: Final = (*_PLACE, "index", "device", "path")
_MODEL: Final = (
    "modelName",
    "model_name",
    "gpu_name",
    "gpu_model",
    "name",
    "model",
    "product_name",
    "gpu_type",
)
_ENTITY: Final = ("GPU_I_ID", "gpu_instance_id", "gi_id", "nvlink")
_DRIVER: Final = ("DCGM_FI_DRIVER_VERSION", "driver_version", "driver", "nvidia_driver_version")
_VERSION: Final = re.compile(r"\d+(\.\d+)+")
_HEX: Final = r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_FULL_UUID: Final = re.compile(rf"(?:GPU-)?({_HEX})", re.IGNORECASE)
_LIKE_UUID: Final = re.compile(rf"GPU-[0-9a-f]|MIG-|{_HEX}$", re.IGNORECASE)
_HIDDEN: Final = r"[x*#.?]{3,}|\u2026|<[^<>]*>|[\[(]?redacted[\])]?"  # by people who publish it
_MASKED: Final = re.compile(rf"(GPU-)?([-0x*#.?]{{4,}}|{_HIDDEN})", re.IGNORECASE)
_NO_UUID: Final = re.compile(r"\W*(0|n/?a|none|null|unknown( error)?|not supported)?\W*", re.I)
_DEVICE: Final = re.compile(r"(?:/dev/)?(?:nvidia|gpu)?(\d+)")
_EXPORTER: Final = re.compile(r"exporter|telegraf|gpud|node-agent", re.IGNORECASE)
_EXPORTER_POD: Final = re.compile(r"(?=.*(?:exporter|telegraf|gpud)).*-[a-z0-9]{5}")
_NO_HOST: Final = re.compile(
    rf"(localhost(\.localdomain)?|127(\.\d+){{3}}|\[?::1\]?|0\.0\.0\.0|{_HIDDEN})(:\d+)?",
    re.IGNORECASE,
)
_CONTAINER: Final = re.compile(r"[0-9a-f]{12}")  # the name that Docker gives one
_NO_WORK: Final = frozenset({"", "0", "none", "None", "N/A"})
_EXPORTED: Final = "exported_"


@dataclass(frozen=True)
class Identity:
    """How labels become nodes, work and tenants; each list in order of preference.

    `node_rewrite` are (regular expression, replacement) pairs, applied in order.
    `replica_from` are labels that tell the same target apart where several servers scrape it.
    `group_from`, `role_from` and `service_from` name what a pod is a part of (`core/jobs.py`).
    `rack_pattern` finds the rack in the node's name (its first group, or all that matches) and
    comes before the labels of `rack_from`.
    """

    node_from: tuple[str, ...] = NODE_FROM
    node_rewrite: tuple[tuple[str, str], ...] = ()
    job_id_from: tuple[str, ...] = JOB_FROM
    tenant_from: tuple[str, ...] = TENANT_FROM
    replica_from: tuple[str, ...] = REPLICA_FROM
    group_from: tuple[str, ...] = GROUP_FROM
    role_from: tuple[str, ...] = ROLE_FROM
    service_from: tuple[str, ...] = SERVICE_FROM
    rack_from: tuple[str, ...] = RACK_FROM
    rack_pattern: str = ""

    @cached_property
    def _rewrites(self) -> tuple[tuple[re.Pattern[str], str], ...]:
        return tuple((re.compile(match), replace) for match, replace in self.node_rewrite)

    @cached_property
    def _rack(self) -> re.Pattern[str] | None:
        return re.compile(self.rack_pattern) if self.rack_pattern else None

    def rack(self, labels: Mapping[str, str], node: str) -> str:
        """The rack that a node stands in; empty where nothing tells."""
        found = self._rack.search(node) if self._rack else None
        if found:
            return next((g for g in found.groups() if g), "") or found.group()
        return next((labels[label] for label in self.rack_from if labels.get(label)), "")

    def node(self, labels: Mapping[str, str]) -> tuple[str, int]:
        """(name of the node, rank of what told it: its place in `node_from`, later for a name
        that tells less).

        A name that every host has tells nothing unless there is no other; nor does that of the
        exporter's own pod, which every restart changes, but before the address of the target.
        """
        order = self.node_from if "instance" in self.node_from else (*self.node_from, "instance")
        resort = "instance" if order[-1] == "instance" else ""
        told = [
            (_weakness(labels[label], labels, label == resort), rank, labels[label])
            for rank, label in enumerate(order)
            if labels.get(label)
        ]
        weakness, rank, name = min(told, default=(3, 0, ""))
        for pattern, replacement in self._rewrites:
            name = pattern.sub(replacement, name)
        return name, weakness * len(order) + rank

    def workload(self, labels: Mapping[str, str]) -> Workload | None:
        """The work that the labels name, if any; the exporter's own pod is nobody's work."""
        own = _is_own_pod(labels)
        for label in self.job_id_from:
            value = labels.get(label, "")
            if value in _NO_WORK:
                continue
            kind = "pod" if label.endswith(("pod", "pod_name")) else "job"
            mine = own and kind == "pod" and value == labels["pod"]
            if mine and not label.startswith(_EXPORTED):
                continue
            return Workload(kind, value, self._tenant(labels, label, own))
        return None

    def mates(self, labels: Mapping[str, str], work: Workload | None) -> Mates | None:
        """Who works with this GPU; None where `work` is."""
        return mates_of(
            labels,
            work,
            group_from=self.group_from,
            role_from=self.role_from,
            service_from=self.service_from,
        )

    def exporter(self, labels: Mapping[str, str], node: str) -> tuple[str, str]:
        """The scrape target of a series as one server sees it, the same for its `up`.

        Two servers that scrape one target are two views of it: one may reach it while the
        other does not. The second part is for comparing alone.
        """
        seen_by = [labels[name] for name in self.replica_from if labels.get(name)]
        target = labels.get("instance", "") or node
        return labels.get("job", ""), "\x1f".join((target, *seen_by))

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
    sliced = bool(labels.get("compute_index"))  # Telegraf: both indexes are those of a slice
    index = None if sliced else _index(labels, _INDEX)
    part = ",".join(labels[name] for name in _ENTITY if labels.get(name))
    if sliced:
        part = labels.get("gpu_index", "") or labels["compute_index"]
    model = _model(labels)
    masked = ""
    for value in _uuids(labels):
        if value.startswith("MIG-GPU-"):  # an old driver's slice: parent, instances
            parent, _, rest = value.removeprefix("MIG-").partition("/")
            return GpuLabels(_spelt(parent), True, index, model, part or rest)
        if value.startswith("MIG-"):
            part = part or value
        elif _MASKED.fullmatch(value):
            masked = masked or value
        else:
            return GpuLabels(_spelt(value), True, index, model, part)
    place = index
    if masked:  # a UUID that was blacked out is still one GPU of its node, or one for each place
        # an index alone may stand on the one series that describes the GPU, and on no other
        place = index if labels.get("pstate") else _index(labels, _PLACE)
        if place is None:
            return GpuLabels(f"{node}/{masked}", True, index, model, part)
    return GpuLabels("" if place is None else f"{node}/gpu{place}", False, place, model, part)


def read_driver(labels: Mapping[str, str]) -> str:
    """The version of the driver, where the labels tell it."""
    told = (labels.get(name, "") for name in _DRIVER)
    return next((t for t in told if _VERSION.fullmatch(t)), "")


def exporter_of(labels: Mapping[str, str], node: str) -> tuple[str, str]:
    """`Identity.exporter` with the labels of replicas that are known."""
    return _DEFAULT.exporter(labels, node)


_DEFAULT: Final = Identity()


def _uuids(labels: Mapping[str, str]) -> Iterator[str]:
    swapped = _LIKE_UUID.match(labels.get("name", ""))  # name and uuid the wrong way round
    for name in _UUID:
        value = labels.get(name, "").strip()
        if swapped and not _LIKE_UUID.match(value):
            continue
        if not _NO_UUID.fullmatch(value):
            yield value
    for name in _AT_TIMES_UUID:
        value = labels.get(name, "").strip()
        if _LIKE_UUID.match(value):
            yield value


def _spelt(uuid: str) -> str:
    """A whole UUID in one spelling, whoever wrote it; anything else as it is."""
    found = _FULL_UUID.fullmatch(uuid)
    return f"GPU-{found.group(1).lower()}" if found else uuid


def _model(labels: Mapping[str, str]) -> str:
    names = (*_MODEL, "uuid") if _LIKE_UUID.match(labels.get("name", "")) else _MODEL
    told = (labels.get(name, "") for name in names)
    name = next((t for t in told if t and not _LIKE_UUID.match(t)), "")
    return name.partition(" MIG ")[0].rstrip(
        ", "
    )  # "NVIDIA A100-SXM4-40GB MIG 1g.5gb" is a part of one


def _index(labels: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    for name in names:
        found = _DEVICE.fullmatch(labels.get(name, ""))
        if found:
            return int(found.group(1))
    return None


def _weakness(name: str, labels: Mapping[str, str], is_resort: bool) -> int:
    """How little a node's name tells: 0 a name, 1 a pod, a container or an address, 2 what
    all are called."""
    if _NO_HOST.fullmatch(name):
        return 2
    passing = _EXPORTER_POD.fullmatch(name) or _CONTAINER.fullmatch(name)
    return int(is_resort or name == labels.get("pod") or bool(passing))


def _is_own_pod(labels: Mapping[str, str]) -> bool:
    """Whether `pod` is that of the exporter itself, as service discovery sets it."""
    pod, container = labels.get("pod", ""), labels.get("container", "")
    if not pod:
        return False
    if f"{_EXPORTED}pod" in labels or pod in (labels.get("Hostname"), labels.get("hostname")):
        return True
    if _EXPORTER.search(pod) or _EXPORTER.search(container):
        return True
    owners = (labels.get("service", ""), labels.get("job", ""), labels.get("app", ""))
    return any(owner and pod.startswith(f"{owner.rpartition('/')[2]}-") for owner in owners)
