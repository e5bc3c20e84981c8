"""Who a GPU, a node, an exporter and a piece of work are, by the labels of many exporters."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sentinel.core.domain import Workload
from sentinel.core.identity import REPLICA_FROM, Identity, exporter_of, read_gpu

UUID = "GPU-3f2a9c1e-52d4-41c8-a1b7-0c9d2e4f6a80"
BARE = UUID.removeprefix("GPU-")
MIG = "MIG-7c1d2e3f-0a1b-5c2d-8e3f-4a5b6c7d8e9f"
ZERO = "00000000-0000-0000-0000-000000000000"
IDENTITY = Identity()


@pytest.mark.parametrize(
    ("labels", "id", "index", "model", "entity"),
    [
        # dcgm-exporter: by GPU, old namespace, by link, by slice
        ({"UUID": UUID, "gpu": "3", "modelName": "Tesla T4"}, UUID, 3, "Tesla T4", ""),
        ({"uuid": UUID, "gpu": "3", "device": "nvidia3"}, UUID, 3, "", ""),
        (
            {"gpu": "0", "gpu_uuid": UUID, "model_name": "GB200", "nvlink": "7"},
            UUID,
            0,
            "GB200",
            "7",
        ),
        ({"UUID": UUID, "gpu": "0", "GPU_I_ID": "7", "GPU_I_PROFILE": "1g"}, UUID, 0, "", "7"),
        ({"UUID": UUID, "gpu": "0", "vgpu": "3"}, UUID, 0, "", ""),  # repeats the whole GPU
        # nvidia_gpu_exporter, a0s, gpud
        ({"uuid": BARE}, UUID, None, "", ""),
        ({"uuid": BARE.upper()}, UUID, None, "", ""),
        ({"uuid": UUID, "gpu_instance_id": "2", "mig_uuid": MIG}, UUID, None, "", "2"),
        ({"gpu_id": UUID}, UUID, None, "", ""),
        ({"gpud_metric_label": UUID}, UUID, None, "", ""),
        # Telegraf: the GPU, and one of its slices
        (
            {"index": "1", "uuid": UUID, "name": "Tesla T4", "pstate": "P0"},
            UUID,
            1,
            "Tesla T4",
            "",
        ),
        (
            {"index": "0", "gpu_index": "9", "compute_index": "0", "uuid": UUID, "pstate": "P0"},
            UUID,
            None,
            "",
            "9",
        ),
        # mindprince and its forks
        ({"minor_number": "2", "uuid": UUID, "name": "V100"}, UUID, 2, "V100", ""),
        ({"minor_number": "2", "uuid": MIG, "GPU_I_ID": "9"}, "n/gpu2", 2, "", "9"),
        # BugRoger: `minor` alone, and an info series with name and UUID the wrong way round
        ({"minor": "1"}, "n/gpu1", 1, "", ""),
        ({"minor": "1", "index": "0", "name": UUID, "uuid": "V100"}, UUID, 1, "V100", ""),
        # OpenTelemetry, pytimer
        ({"gpu_number": "4", "gpu_uuid": UUID, "gpu_model": "L4"}, UUID, 4, "L4", ""),
        ({"name": "Tesla P4", "path": "/dev/nvidia1", "uuid": UUID}, UUID, 1, "Tesla P4", ""),
        # slices by their own UUID, new and old
        ({"UUID": MIG, "gpu": "0"}, "n/gpu0", 0, "", MIG),
        ({"uuid": f"MIG-{UUID}/3/0"}, UUID, None, "", "3/0"),
        ({"UUID": UUID, "modelName": "NVIDIA A30 MIG 1g.6gb"}, UUID, None, "NVIDIA A30", ""),
        ({"UUID": UUID, "modelName": "NVIDIA A30, MIG 1g.6gb"}, UUID, None, "NVIDIA A30", ""),
        # UUIDs that are short, blank, masked, or no UUIDs
        ({"UUID": "GPU-7ad09335-aadb", "gpu": "0"}, "GPU-7ad09335-aadb", 0, "", ""),
        ({"UUID": "my-gpu", "gpu": "0"}, "my-gpu", 0, "", ""),
        ({"UUID": "", "gpu": "0"}, "n/gpu0", 0, "", ""),
        ({"UUID": "[N/A]", "gpu": "0"}, "n/gpu0", 0, "", ""),
        ({"UUID": "N/A", "uuid": UUID}, UUID, None, "", ""),
        ({"uuid": ZERO}, f"n/{ZERO}", None, "", ""),
        ({"uuid": ZERO, "index": "0"}, f"n/{ZERO}", 0, "", ""),  # describes the same GPU
        ({"UUID": f"GPU-{ZERO}", "gpu": "5"}, "n/gpu5", 5, "", ""),
        ({"UUID": "GPU-xxxxxxxx-xxxx-xxxx", "gpu": "5"}, "n/gpu5", 5, "", ""),
        ({"UUID": "GPU-...", "gpu": "5"}, "n/gpu5", 5, "", ""),
        ({"UUID": "GPU-<uuid>", "gpu": "5"}, "n/gpu5", 5, "", ""),
        ({"UUID": "GPU-\u2026", "gpu": "5"}, "n/gpu5", 5, "", ""),
        ({"uuid": "[REDACTED]", "minor_number": "5"}, "n/gpu5", 5, "", ""),
        ({"UUID": "GPU-0", "gpu": "0"}, "GPU-0", 0, "", ""),
        ({"uuid": "GPU-********", "index": "5", "pstate": "P8"}, "n/gpu5", 5, "", ""),
        # no GPU at all
        ({"gpu": "all"}, "", None, "", ""),
        ({}, "", None, "", ""),
    ],
)
def test_who_a_gpu_is(labels, id, index, model, entity):
    seen = read_gpu(labels, "n")
    assert (seen.id, seen.index, seen.model, seen.entity) == (id, index, model, entity)
    assert seen.has_uuid == (bool(id) and not id.startswith("n/gpu"))


@pytest.mark.parametrize(
    ("labels", "node"),
    [
        ({"Hostname": "gpu-7", "instance": "10.0.0.7:9400"}, "gpu-7"),
        ({"hostname": "gpu-7", "instance": "10.0.0.7:9400"}, "gpu-7"),
        ({"node": "gpu-7", "instance": "10.0.0.7:9835"}, "gpu-7"),
        ({"kubernetes_node": "gpu-7", "instance": "10.0.0.7:9400"}, "gpu-7"),
        ({"host": "gpu-7", "instance": "10.0.0.7:9273"}, "gpu-7"),
        ({"host_name": "gpu-7", "instance": "collector:8889"}, "gpu-7"),
        ({"exported_instance": "gpu-7", "instance": "pushgateway:9091"}, "gpu-7"),
        ({"instance": "gpu-7:9400"}, "gpu-7:9400"),
        ({"Hostname": "localhost", "instance": "10.0.0.7:9400"}, "10.0.0.7:9400"),
        ({"Hostname": "localhost", "node": "gpu-7", "instance": "10.0.0.7:9400"}, "gpu-7"),
        ({"Hostname": "localhost"}, "localhost"),
        ({"Hostname": "localhost", "instance": "localhost:9400", "node": "gpu-7"}, "gpu-7"),
        ({"exported_instance": "127.0.0.1:9400", "instance": "gpu-7:9400"}, "gpu-7:9400"),
        ({"instance": "[::1]:9400"}, "[::1]:9400"),
        # the exporter's pod for a host: better than an address, worse than the node's name
        ({"Hostname": "dcgm-exporter-x7k2p", "instance": "10.0.0.7:9400"}, "dcgm-exporter-x7k2p"),
        ({"Hostname": "dcgm-exporter-x7k2p", "node": "gpu-7"}, "gpu-7"),
        ({"hostname": "mon-0", "pod": "mon-0", "node": "gpu-7"}, "gpu-7"),
        ({"Hostname": "4a47de3f4e0c", "instance": "10.0.0.7:9400"}, "4a47de3f4e0c"),
        ({"Hostname": "4a47de3f4e0c", "host": "gpu-7"}, "gpu-7"),
        ({"Hostname": "...", "instance": "10.0.0.7:9400"}, "10.0.0.7:9400"),
        ({"Hostname": "<node>", "instance": "10.0.0.7:9400"}, "10.0.0.7:9400"),
        ({}, ""),
    ],
)
def test_what_a_node_is_called(labels, node):
    assert IDENTITY.node(labels)[0] == node


def test_labels_that_are_asked_for_come_in_the_order_they_are_asked_for():
    labels = {"Hostname": "a", "instance": "b", "rack_host": "c"}
    assert Identity(node_from=("instance", "Hostname")).node(labels) == ("b", 0)
    assert Identity(node_from=("rack_host",)).node(labels) == ("c", 0)
    assert Identity(node_from=("gone",)).node(labels)[0] == "b"
    rewrite = Identity(node_from=("Hostname",), node_rewrite=(("^", "gpu-"), ("a$", "1")))
    assert rewrite.node(labels) == ("gpu-1", 0)


def test_a_name_that_tells_less_ranks_later_whatever_label_it_stands_in():
    told = [
        {"node": "gpu-7"},
        {"host": "gpu-7"},
        {"Hostname": "dcgm-exporter-x7k2p"},
        {"instance": "10.0.0.7:9400"},
        {"Hostname": "localhost"},
        {},
    ]
    ranks = [IDENTITY.node(labels)[1] for labels in told]
    assert ranks == sorted(set(ranks))


@pytest.mark.parametrize(
    ("labels", "work"),
    [
        ({"pod": "train-0", "namespace": "ml", "container": "c"}, ("pod", "train-0", "ml")),
        ({"pod_name": "train-0", "pod_namespace": "ml"}, ("pod", "train-0", "ml")),
        ({"pod_name": "train-0", "namespace_name": "ml"}, ("pod", "train-0", "ml")),
        (
            {"exported_pod": "a", "exported_namespace": "ml", "pod": "e", "namespace": "mon"},
            ("pod", "a", "ml"),
        ),
        ({"exported_pod": "a", "pod": "e", "namespace": "mon"}, ("pod", "a", "")),
        ({"hpc_job": "4711", "pod": "train-0"}, ("job", "4711", "")),
        ({"jobid": "4711", "userid": "1000"}, ("job", "4711", "")),
        ({"slurmjobid": "0"}, None),
        ({"hpc_job": "0", "pod": "train-0", "namespace": "ml"}, ("pod", "train-0", "ml")),
        # the exporter's own pod is nobody's work
        ({"pod": "dcgm-exporter-x7k2p", "namespace": "gpu-operator"}, None),
        ({"pod": "telegraf-ds-x7k2p", "namespace": "mon"}, None),
        ({"pod": "nv-x7k2p", "job": "gpu-operator/nv"}, None),
        ({"pod": "mon-0", "Hostname": "mon-0"}, None),
        ({"pod": "mon-0", "hostname": "mon-0"}, None),
        # but a load test of DCGM is work, and prometheus in its name makes no exporter
        ({"pod": "dcgmproftester-1", "namespace": "qa"}, ("pod", "dcgmproftester-1", "qa")),
        # the rest is context, not work
        ({"dra_claim_name": "c", "dra_driver_name": "gpu.nvidia.com", "container": "x"}, None),
        ({}, None),
    ],
)
def test_what_a_gpu_works_on(labels, work):
    assert IDENTITY.workload(labels) == (Workload(*work) if work else None)


@pytest.mark.parametrize("label", REPLICA_FROM)
def test_two_servers_that_scrape_one_target_are_two_views_of_it(label):
    target = {"job": "dcgm", "instance": "10.0.0.7:9400", "Hostname": "gpu-7"}
    first, second = ({**target, label: f"{label}-{n}"} for n in (0, 1))
    assert exporter_of(first, "gpu-7") != exporter_of(second, "gpu-7")
    assert exporter_of(first, "gpu-7") == exporter_of({**first, "UUID": UUID}, "gpu-7")
    assert Identity(replica_from=()).exporter(first, "") == exporter_of(target, "")


def test_an_exporter_without_an_instance_is_known_by_its_node():
    assert exporter_of({"job": "dcgm"}, "gpu-7") == ("dcgm", "gpu-7")
    assert exporter_of({"job": "dcgm", "instance": "a:1"}, "gpu-7") == ("dcgm", "a:1")


LABEL = st.sampled_from(
    ["UUID", "uuid", "gpu_uuid", "gpu", "index", "minor", "name", "gpu_id", "modelName", "pstate",
     "GPU_I_ID", "compute_index", "gpu_index", "device", "Hostname", "host", "pod", "namespace",
     "exported_pod", "instance", "replica"]
)  # fmt: skip
VALUE = st.sampled_from(
    ["", "0", "7", UUID, BARE, MIG, f"MIG-{UUID}/1/0", ZERO, "GPU-x", "[N/A]", "nvidia0",
     "Tesla T4", "localhost", "gpu-7", "dcgm-exporter-x7k2p"]
) | st.text("aGPU019-_/.[]*x ", max_size=8)  # fmt: skip


@given(st.dictionaries(LABEL, VALUE, max_size=8))
def test_any_labels_are_read_and_work_never_makes_another_gpu(labels):
    node, rank = IDENTITY.node(labels)
    assert rank >= 0
    seen = read_gpu(labels, node)
    assert not seen.has_uuid or seen.id
    assert seen.index is None or seen.index >= 0
    busy = {**labels, "exported_pod": "w", "namespace": "n", "hpc_job": "1", "dra_claim": "c"}
    assert read_gpu(busy, node) == seen
    assert IDENTITY.workload(busy) == Workload("job", "1", IDENTITY.workload(busy).tenant)
