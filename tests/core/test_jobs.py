"""Who works with whom: pod names of every controller, and labels in every spelling."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sentinel.core.domain import Mates, Workload
from sentinel.core.identity import Identity
from sentinel.core.jobs import mates_of, read_pod
from tests.core.telemetry import fold, gpu, key, samples


def pod(name, tenant=""):
    return Workload("pod", name, tenant)


@pytest.mark.parametrize(
    ("name", "group", "role", "in_step"),
    [
        ("llm-7d9f8c6b5d-x2x9z", "llm", "", False),  # Deployment
        ("llm-chat-v2-5c9b7d84f-ktq8w", "llm-chat-v2", "", False),
        ("vllm-3", "vllm", "", False),  # StatefulSet
        ("array-12-bq7xk", "array", "", False),  # indexed Job
        ("batch-gpu-x2x9z", "batch-gpu", "", False),  # Job
        ("llama-worker-3", "llama", "worker", True),  # Kubeflow
        ("llama-master-0", "llama", "master", True),
        ("llama-launcher-abcde", "llama", "launcher", True),  # MPI
        ("jobset-workers-0-3-xxxxx", "jobset", "worker", True),  # JobSet
        ("jobset-leader-0-0-qv4rt", "jobset", "leader", True),
        ("ray-gpu-group-worker-x2x9z", "ray-gpu-group", "worker", True),
        ("ray-head-7m5kd", "ray", "head", True),
        ("train", "train", "", False),
        ("my-worker", "my-worker", "", False),  # no controller made it
        ("ann-notes", "ann-notes", "", False),  # five letters that are a word
        ("run-12345", "run", "", False),
        ("gpt-4", "gpt", "", False),
        ("", "", "", False),
    ],
)
def test_a_pods_name_tells_what_it_is_a_part_of(name, group, role, in_step):
    assert read_pod(name) == Mates(group, "", role, in_step)


@pytest.mark.parametrize(
    ("labels", "work", "mates"),
    [
        ({}, None, None),
        ({}, Workload("job", "4711", "a"), Mates("4711", "a", "", True)),
        ({"job_name": "train"}, Workload("job", "4711"), Mates("4711", "", "", True)),
        (
            {
                "training.kubeflow.org/job-name": "llama",
                "training.kubeflow.org/replica-type": "Worker",
            },
            pod("llama-worker-3", "ml"),
            Mates("llama", "ml", "worker", True),
        ),
        (
            {"label_training_kubeflow_org_job_name": "llama"},
            pod("llama-master-0"),
            Mates("llama", "", "master", True),
        ),
        (
            {
                "jobset_sigs_k8s_io_jobset_name": "big",
                "jobset_sigs_k8s_io_replicatedjob_name": "actors",
                "batch_kubernetes_io_job_name": "big-actors-1",
                "job_name": "big-actors-1",
            },
            pod("big-actors-1-0-x2x9z"),
            Mates("big", "", "actors", True),
        ),
        (
            {"exported_job_name": "fit", "job_name": "dcgm"},
            pod("fit-0-x2x9z"),
            Mates("fit", "", "", False),
        ),
        (
            {"volcano_sh_job_name": "v", "volcano_sh_task_spec": "worker"},
            pod("v-worker-7"),
            Mates("v", "", "worker", True),
        ),
        (
            {"app_kubernetes_io_instance": "chat"},
            pod("chat-vllm-7d9f8c6b5d-x2x9z"),
            Mates("chat", "", "", False),
        ),
        # a labelmap has put the exporter's own labels on its series
        (
            {"app_kubernetes_io_instance": "gpu-operator", "job_name": "node-exporter"},
            pod("llm-7d9f8c6b5d-x2x9z"),
            Mates("llm", "", "", False),
        ),
        # a service's label does not break a job apart
        (
            {"app_kubernetes_io_instance": "llama-worker"},
            pod("llama-worker-0"),
            Mates("llama", "", "worker", True),
        ),
    ],
)
def test_labels_win_where_they_are_there(labels, work, mates):
    assert mates_of(labels, work) == mates


def test_labels_of_ones_own_name_the_job():
    identity = Identity(group_from=("team.example/run",), role_from=("stage",))
    labels = {"label_team_example_run": "r7", "stage": "2"}
    assert identity.mates(labels, pod("x-0")) == Mates("r7", "", "2", True)


_PART = st.from_regex(r"[a-z][a-z0-9]{0,8}(-[a-z][a-z0-9]{0,8}){0,2}", fullmatch=True)
_DRAWN = st.text("bcdfghjklmnpqrstvwxz2456789", min_size=5, max_size=5)


@given(_PART, st.integers(0, 9999), st.integers(0, 9999), _DRAWN, _DRAWN)
def test_all_pods_of_a_controller_are_mates(name, one, other, drawn, again):
    for made in (
        lambda i, d: f"{name}-{i}",
        lambda i, d: f"{name}-worker-{i}",
        lambda i, d: f"{name}-worker-0-{i}-{d}",
        lambda i, d: f"{name}-{i}-{d}",
        lambda i, d: f"{name}-7d9f8c6b5d-{d}",
        lambda i, d: f"{name}-launcher-{d}",
    ):
        assert read_pod(made(one, drawn)) == read_pod(made(other, again))


@given(st.dictionaries(st.text(max_size=12), st.text(max_size=12), max_size=4), st.text())
def test_any_label_and_name_is_read(labels, name):
    mates = mates_of(labels, pod(name))
    assert isinstance(mates, Mates)


def test_the_fold_hands_mates_out_and_leaves_the_work_as_it_was():
    telemetry = fold()
    points = [
        (key("DCGM_FI_DEV_GPU_TEMP", **gpu(n, pod=f"llama-worker-{n}", namespace="ml")), 0.0, 50.0)
        for n in range(2)
    ]
    telemetry.add(samples(0.0, *points))
    frame = telemetry.frame(0.0)
    assert [w.id for w in frame.workloads] == ["llama-worker-0", "llama-worker-1"]
    assert set(frame.mates) == {Mates("llama", "ml", "worker", True)}
    assert telemetry.frame(1.0).mates is frame.mates
