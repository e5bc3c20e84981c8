"""Which GPUs work together, and in which role: the mates of each, from labels alone.

A `Workload` is what a scheduler moves; `Mates` is who a GPU may be compared with. A batch job's
id says both. A Kubernetes pod is one replica of something: labels of its controller name that
something where they are there, else the pod's own name does, for every controller builds it in
its own way (hash and suffix, ordinal, role and ordinal). Where a name leaves open whether the
replicas work in step, they are taken not to: unequal load is then no evidence.

Decides who may be compared, never what follows. Read once per label set, never per tick.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from sentinel.core.domain import Mates, Workload

# Each label as it is written in Kubernetes, with every sign but letters and digits made an
# underscore, as relabelling and kube-state-metrics show it. The outermost group comes first: a
# JobSet makes Jobs, and a Job has a name of its own.
GROUP_FROM: Final = (
    "jobset_sigs_k8s_io_jobset_name",
    "training_kubeflow_org_job_name",
    "trainer_kubeflow_org_trainjob_name",
    "leaderworkerset_sigs_k8s_io_name",
    "volcano_sh_job_name",
    "ray_io_cluster",
    "pytorch_job_name",
    "tf_job_name",
    "mpi_job_name",
    "batch_kubernetes_io_job_name",
    "job_name",
)
ROLE_FROM: Final = (
    "jobset_sigs_k8s_io_replicatedjob_name",
    "training_kubeflow_org_replica_type",
    "volcano_sh_task_spec",
    "ray_io_group",
    "ray_io_node_type",
    "leaderworkerset_sigs_k8s_io_role",
    "pytorch_replica_type",
    "tf_replica_type",
    "mpi_job_role",
    "training_kubeflow_org_job_role",
    "replica_type",
)
SERVICE_FROM: Final = (
    "serving_knative_dev_service",
    "serving_kserve_io_inferenceservice",
    "app_kubernetes_io_instance",
)
# Of a Job it is not known whether its pods work in step or through a queue.
_ANY_JOB: Final = frozenset({"batch_kubernetes_io_job_name", "job_name"})
# A scrape that maps every label of the exporter's own pod onto its series puts the exporter's
# release here: such a name counts only for a pod that is called after it.
_CALLED_AFTER: Final = frozenset({"app_kubernetes_io_instance", "job_name"})
_PREFIXES: Final = ("exported_", "kube_pod_label_", "pod_label_", "label_")
_PREFIX_KEPT: Final = 20  # long names are cut when a pod is called after them

# What Kubernetes draws names from: no vowels and no 0, 1, 3, so that no word comes out.
_DRAWN: Final = "bcdfghjklmnpqrstvwxz2456789"
_ROLES: Final = (
    "worker|workers|master|masters|launcher|leader|driver|chief|evaluator|ps|head|trainer|"
    "trainers|coordinator|scheduler|server"
)
_ROLE: Final = re.compile(rf"(?P<group>.+)-(?P<role>{_ROLES})")
_REPLICA_SET: Final = re.compile(rf"(?P<group>.+)-[{_DRAWN}]{{6,10}}-[{_DRAWN}]{{5}}")
_SUFFIX: Final = re.compile(r"(?P<rest>.+)-(?P<drawn>[a-z0-9]{5})")
_ORDINALS: Final = re.compile(r"(?P<rest>.+?)-(?P<numbers>\d{1,5}(?:-\d{1,5}){0,2})")
_IS_DRAWN: Final = re.compile(rf"[{_DRAWN}]{{5}}")


def mates_of(
    labels: Mapping[str, str],
    work: Workload | None,
    *,
    group_from: tuple[str, ...] = GROUP_FROM,
    role_from: tuple[str, ...] = ROLE_FROM,
    service_from: tuple[str, ...] = SERVICE_FROM,
) -> Mates | None:
    """Who works with this GPU; None where no work is named. `labels` are those of a series,
    `work` what `Identity.workload` read of them."""
    if work is None:
        return None
    told = _spelt(labels)
    role = _first(told, role_from)[1].lower()
    if work.kind != "pod":
        return Mates(work.id, work.tenant, role, in_step=True)
    name, group = _first(told, group_from, called=work.id)
    if group:
        by_name = read_pod(work.id)
        # where the labels do not tell the role the pod's name may
        own = by_name.role if by_name.role and by_name.group.startswith(group) else ""
        in_step = name not in _ANY_JOB or by_name.in_step
        return Mates(group, work.tenant, role or own, in_step=in_step)
    found = read_pod(work.id)
    _, service = _first(told, service_from, called=work.id)
    if service and not found.in_step:
        return Mates(service, work.tenant, role, in_step=False)
    return Mates(found.group, work.tenant, role or found.role, found.in_step)


def read_pod(name: str) -> Mates:
    """What a pod's own name tells. A role in it (`llm-worker-3`, `llm-master-0`,
    `llm-launcher-abcde`, `llm-workers-0-3-x2x9z`) makes it one of a job that works in step.
    A name that no controller made stands for itself."""
    found = _REPLICA_SET.fullmatch(name)
    if found:
        return Mates(found["group"], "", "", in_step=False)
    rest, ended = name, False
    suffix = _SUFFIX.fullmatch(name)
    if suffix and not suffix["drawn"].isdecimal():
        stem = suffix["rest"]
        before = _ORDINALS.fullmatch(stem)
        named = _ROLE.fullmatch(before["rest"] if before else stem)
        # five letters may be a word of somebody's: after a role or a number they are not
        if named or before or _IS_DRAWN.fullmatch(suffix["drawn"]):
            rest, ended = stem, True
    ordinals = _ORDINALS.fullmatch(rest)
    if ordinals:
        rest, ended = ordinals["rest"], True
    role = _ROLE.fullmatch(rest) if ended else None
    if role:
        return Mates(role["group"], "", _singular(role["role"]), in_step=True)
    return Mates(rest, "", "", in_step=False)


def _singular(role: str) -> str:
    return role[:-1] if role.endswith("rs") else role


def _spelt(labels: Mapping[str, str]) -> dict[str, str]:
    """Labels by the names that the tables above use. Where Prometheus renamed one to
    `exported_`, that one is the work's and the plain one the exporter's."""
    out: dict[str, str] = {}
    rank: dict[str, int] = {}
    for label, value in labels.items():
        plain = re.sub(r"[^a-z0-9]", "_", label.lower())
        place = len(_PREFIXES)
        for i, prefix in enumerate(_PREFIXES):
            if plain.startswith(prefix):
                plain, place = plain.removeprefix(prefix), min(place, i)
        if value and place < rank.get(plain, len(_PREFIXES) + 1):
            out[plain], rank[plain] = value, place
    return out


def _first(
    told: Mapping[str, str], names: tuple[str, ...], called: str | None = None
) -> tuple[str, str]:
    """(label, value) of the first that is there; two empty texts where none is."""
    for name in names:
        plain = re.sub(r"[^a-z0-9]", "_", name.lower())
        value = told.get(plain, "")
        if not value:
            continue
        loose = plain in _CALLED_AFTER and called is not None
        if loose and not str(called).startswith(value[:_PREFIX_KEPT]):
            continue
        return plain, value
    return "", ""
