"""Where work may go: equal or better, healthy, idle, elsewhere, all of it."""

from dataclasses import replace

import numpy as np
import pytest

from sentinel.core.catalog import NEEDS
from sentinel.core.domain import (
    Backup,
    Control,
    Kind,
    Operation,
    Quarantine,
    Reason,
    Workload,
)
from sentinel.core.placement import ASSUMED, Fleet, ModelRanks, need_of, place, still_free
from sentinel.core.policy import Policy
from sentinel.data import load_models
from tests.core.scene import JOB, Scene, uuid

MODELS = load_models()


@pytest.fixture
def scene():
    scene = Scene(nodes=6, spares=("node-4", "node-5"))
    scene.runs([0])
    scene.breaks(0)
    scene.post = False
    return scene


def ask(scene, work=JOB, leave=("node-0",), control=None, models=MODELS, **kw):
    scene.tick()
    frame = scene.frame()
    fleet = Fleet(frame, scene.judge(frame))
    need = need_of(work, scene.incident(0), leave, fleet)
    control = control or Control(incidents=scene.control.incidents)
    return place(need, fleet, control, scene.policy, models, **kw), need, fleet


def nodes(answer):
    return [(b.node, len(b.gpu_uuids)) for b in answer]


def test_the_whole_need_on_one_node_and_the_smallest_that_holds_it(scene):
    scene.work[uuid(5)] = Workload("job", "other")
    answer, need, _ = ask(scene)
    assert nodes(answer) == [("node-4", 4)]
    assert (need.nodes, need.exclude_nodes) == (("node-0",), ("node-0",))
    scene.work = {k: v for k, v in scene.work.items() if k in (uuid(0), uuid(5))}
    answer, _, _ = ask(scene)
    assert nodes(answer) == [("node-5", 1)]  # three are free there, four on the other
    assert nodes(ask(scene, avoid=frozenset({"node-5"}))[0]) == [("node-4", 1)]


def test_a_better_model_is_kept_for_work_that_needs_it(scene):
    models = {"node-0": "NVIDIA L40S", "node-4": "NVIDIA H100 80GB HBM3", "node-5": "NVIDIA L40S"}
    with_models(scene, models)
    scene.work = {uuid(0): Workload("job", "4711"), uuid(4): Workload("job", "other")}
    answer, _, _ = ask(scene)
    assert nodes(answer) == [("node-5", 1)]  # though fewer are free on the better one
    assert nodes(ask(scene, avoid=frozenset({"node-5"}))[0]) == [("node-4", 1)]


def test_a_gang_on_two_bad_nodes_needs_both_and_may_keep_the_healthy_rest(scene):
    scene.runs([0, 1, 2])
    answer, need, _ = ask(scene, leave=("node-0", "node-1", "node-3"))
    assert need.nodes == ("node-0", "node-1", "node-2")
    assert need.exclude_nodes == ("node-0", "node-1")
    assert len(need.gpu_uuids) == 12
    assert len(need.models) == 8
    assert nodes(answer) == [("node-4", 4), ("node-5", 4)]


def test_a_gpu_that_vanished_still_belongs_to_its_gang(scene):
    del scene.work[uuid(0)]
    _, need, _ = ask(scene)
    assert uuid(0) in need.gpu_uuids
    assert len(need.models) == 4


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda s: s.silent.update({"node-4", "node-5"}), "8 not known to be healthy"),
        (lambda s: s.runs([4, 5], Workload("job", "x")), "8 busy"),
        (lambda s: s.breaks(4, kind=Kind.DEVIANT), "7 spare GPUs are free"),
    ],
)
def test_what_is_not_healthy_or_not_idle_is_no_backup(scene, spoil, why):
    scene.runs([0, 1])
    spoil(scene)
    answer, _, _ = ask(scene, leave=("node-0", "node-1"))
    assert isinstance(answer, Reason)
    assert answer.code == "no_backup"
    assert "needs 8 GPUs" in answer.text
    assert why in answer.text


def test_fenced_accused_and_reserved_nodes_are_no_backups(scene):
    held = Quarantine("node-4", "inc-x", 0.0)
    answer, _, _ = ask(scene, control=Control(quarantine={"node-4": held}))
    assert nodes(answer) == [("node-5", 4)]
    scene.breaks(4, 3)  # accused, but that GPU is not even needed
    answer, _, _ = ask(scene)
    assert nodes(answer) == [("node-5", 4)]
    del scene.bad[uuid(4, 3)]
    busy = scene.last(Operation.FENCE)
    onto = replace(busy, operation_id="op-x", node="node-1", backups=(Backup("node-5", ()),))
    answer, _, _ = ask(scene, control=Control(migrations={"op-x": onto}))
    assert nodes(answer) == [("node-4", 4)]


def test_a_spare_gpu_counts_by_uuid_and_never_on_a_node_to_leave(scene):
    scene.policy = replace(
        scene.policy,
        spare_nodes=frozenset(),
        spare_gpus=frozenset({uuid(0, 3), uuid(3, 1), uuid(3, 2)}),
    )
    scene.work = {uuid(0): JOB}
    answer, _, _ = ask(scene)
    assert answer == (Backup("node-3", (uuid(3, 1),)),)


def test_without_spares_there_is_none_unless_a_backtest_assumes_one(scene):
    scene.policy = Policy()
    answer, _, _ = ask(scene)
    assert "no spare" in answer.text
    scene.policy = Policy(assume_spares=True)
    answer, _, _ = ask(scene)
    assert answer[0].node == ASSUMED + "node-0"


def with_models(scene, by_node):
    scene.gpus = tuple(
        replace(g, model=by_node.get(g.node, "NVIDIA H100 PCIe")) for g in scene.gpus
    )


@pytest.mark.parametrize(
    ("model", "fits"),
    [
        ("NVIDIA H100 PCIe", True),
        ("NVIDIA H100 80GB HBM3", True),
        ("NVIDIA H200", True),
        ("NVIDIA A100-SXM4-80GB", False),
        ("NVIDIA GH200 480GB", False),  # its hosts are of another architecture
        ("NVIDIA Unheard Of 9000", False),
    ],
)
def test_the_same_model_or_a_better_one(scene, model, fits):
    with_models(scene, {"node-4": model, "node-5": model})
    answer, _, _ = ask(scene)
    assert isinstance(answer, tuple) is fits
    if not fits:
        assert "8 a lesser or unknown model than NVIDIA H100 PCIe" in answer.text


def test_an_unknown_model_is_equal_only_to_itself():
    assert MODELS.at_least("GRID A100-40C", "GRID A100-40C")
    assert not MODELS.at_least("NVIDIA A100-SXM4-40GB", "GRID A100-8C")
    assert not MODELS.at_least("GRID A100-40C", "GRID A100-8C")
    assert not ModelRanks().at_least("NVIDIA H200", "NVIDIA H100 PCIe")


@pytest.mark.parametrize(
    ("reported", "row"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100 SXM 40GB"),
        ("A100-SXM4-80GB", "A100 SXM 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A10", "A10"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-32GB", "V100 SXM 32GB"),
        ("NVIDIA GeForce RTX 4090", "GeForce RTX 4090"),
        ("NVIDIA RTX A5000", "RTX A5000"),
        ("GRID A100-40C", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "A100 SXM 40GB"),
    ],
)
def test_names_that_exporters_report_find_their_row(reported, row):
    found = MODELS.find(reported)
    assert (found.name if found else None) == row


def test_every_row_of_the_catalogue_is_whole_and_says_where_it_is_from():
    assert len({m.name for m in MODELS.models}) == len(MODELS.models)
    for m in MODELS.models:
        assert m.source
        assert m.memory_gib > 0
        assert 1 < m.tflops < 5000
        assert 100 < m.bandwidth_gb_per_s < 20_000
        assert 50 <= m.power_w <= 2000


def test_a_reservation_is_looked_at_again(scene):
    answer, _, fleet = ask(scene)
    assert still_free(answer, fleet) is None
    scene.work[answer[0].gpu_uuids[0]] = Workload("job", "quick")
    frame = scene.frame()
    assert "no longer idle" in still_free(answer, Fleet(frame, scene.judge(frame))).text
    scene.silent.add(answer[0].node)
    frame = scene.frame()
    assert "no longer healthy" in still_free(answer, Fleet(frame, scene.judge(frame))).text


def test_a_judgement_of_another_frame_is_refused(scene):
    frame = scene.frame()
    judgement = replace(scene.judge(frame), kinds=np.zeros(3, np.int8))
    with pytest.raises(ValueError, match="3 GPUs on a frame of 24"):
        Fleet(frame, judgement)


@pytest.mark.parametrize(
    ("model", "row", "lacks"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 SXM", ""),
        ("NVIDIA-H100-80GB-HBM3", "H100 SXM", ""),  # an exporter that writes no blanks
        ("nvidia-gb200", "GB200", ""),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM 80GB", ""),
        ("NVIDIA L40S", "L40S", "nvlink memory_temp"),
        ("Tesla T4", "T4", "nvlink memory_temp row_remap"),
        ("Tesla V100-SXM2-32GB", "V100 SXM 32GB", "row_remap"),
        ("Tesla V100-PCIE-16GB", "V100 PCIe 16GB", "nvlink row_remap"),
        ("Tesla P100-SXM2-16GB", "P100 SXM2", "profiling energy row_remap"),
        ("Tesla K80", None, "nvlink profiling memory_temp energy row_remap"),
        ("NVIDIA GeForce RTX 3090", "GeForce RTX 3090", "profiling memory_temp row_remap ecc"),
        ("NVIDIA GeForce RTX 3090 Ti", None, "profiling memory_temp row_remap"),
        ("NVIDIA GeForce RTX 4080 SUPER", None, "nvlink profiling memory_temp row_remap"),
        ("NVIDIA RTX 4000 SFF Ada Generation", None, "nvlink"),
        ("NVIDIA GB10", None, "nvlink profiling row_remap"),
        ("a model of tomorrow", None, ""),
        ("", None, ""),
    ],
)
def test_what_a_model_is_and_what_it_cannot_have(model, row, lacks):
    found = MODELS.find(model)
    assert (found.name if found else None) == row
    assert MODELS.lacks(model) == set(lacks.split())


@pytest.mark.parametrize(
    "model", ["GRID A100-40C", "GRID-T4-16Q", "NVIDIA H200-141C", "NVIDIA A100-1-5CME", "L40S-48Q"]
)
def test_a_virtual_gpu_is_no_row_and_lacks_nearly_everything(model):
    assert MODELS.find(model) is None
    assert MODELS.lacks(model) == {"nvlink", "profiling", "memory_temp", "row_remap", "energy"}
    assert not MODELS.at_least("NVIDIA H200", model)


def test_every_row_of_the_models_is_sound():
    assert len({row.name for row in MODELS.models}) == len(MODELS.models)
    for row in MODELS.models:
        assert row.source
        assert min(row.memory_gib, row.tflops, row.bandwidth_gb_per_s, row.power_w) > 0
        assert set(row.lacks) <= set(NEEDS)
    for rule in MODELS.lacking:
        assert rule.source
        assert set(rule.lacks) <= set(NEEDS)
        assert MODELS.lacks("no such thing") == set()
