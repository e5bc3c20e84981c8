"""How each exporter is made to show a metric: lines that it takes, for every metric."""

import csv
import re

import pytest

from sentinel.core.catalog import MetricKind
from sentinel.doctor import howto
from sentinel.doctor.blocks import blocks
from tests.doctor.seen import CATALOG, FACTS, fleet, without

KINDS = tuple(CATALOG.exporters)


def test_all_that_is_asked_for_is_in_the_catalogue():
    named = {*howto.WANTED, *howto.CORE, *howto.BEFORE_REMAP, *howto.INSTEAD}
    named |= {name for names in howto.INSTEAD.values() for name in names}
    assert named <= set(CATALOG.names)
    assert len(set(howto.WANTED)) == len(howto.WANTED)


def test_hard_evidence_comes_first_and_what_is_not_asked_for_last():
    order = sorted(CATALOG.names, key=howto.importance)
    assert tuple(order[: len(howto.HARD)]) == howto.HARD
    assert set(order[len(howto.WANTED) :]).isdisjoint(howto.WANTED)


@pytest.mark.parametrize("kind", KINDS)
def test_there_is_a_way_for_every_metric(kind):
    for metric in CATALOG.metrics:
        way = howto.enable(CATALOG, metric, kind)
        assert way.kind == kind
        assert way.how


@pytest.mark.parametrize("kind", ["dcgm", "dcgm-4.6", "dcgm-4.7", "dcgm-1.x"])
def test_dcgm_exporter_takes_the_lines(kind):
    for metric in CATALOG.metrics:
        line = howto.enable(CATALOG, metric, kind).line
        if not line:
            assert kind == "dcgm-1.x" or not any(
                a.exporter.startswith("dcgm") and a.name.startswith("DCGM_")
                for a in CATALOG.names_of(CATALOG.column(metric.name))
            )
            continue
        (fields,) = csv.reader([line], skipinitialspace=True)
        name, declared, text = fields
        assert re.fullmatch(r"DCGM_(FI|EXP)_[A-Z0-9_]+", name)
        assert declared == ("counter" if metric.kind is MetricKind.COUNTER else "gauge")
        assert text
        assert CATALOG.alias(name, {}) is not None


def test_the_name_is_of_the_exporters_own_time():
    metric = CATALOG.metrics[CATALOG.column("remap_failure")]
    assert "ROW_REMAP_FAILURE," in howto.enable(CATALOG, metric, "dcgm").line
    assert "ROW_REMAP_FAILED," in howto.enable(CATALOG, metric, "dcgm-4.6").line
    # not renamed: the old name is valid
    metric = CATALOG.metrics[CATALOG.column("ecc_dbe_volatile")]
    assert "ECC_DBE_VOL_TOTAL," in howto.enable(CATALOG, metric, "dcgm-4.6").line


def test_what_nvidia_smi_can_ask_for_is_the_field_of_the_name():
    """`nvidia_smi_` and the field with its dots turned, in the exporter's own spelling."""
    for metric in CATALOG.metrics:
        field = howto.enable(CATALOG, metric, "nvidia_gpu_exporter").line
        if field:
            turned = re.sub(r"([a-z])([A-Z])", r"\1_\2", field).lower().replace(".", "_")
            names = [a.name for a in CATALOG.names_of(CATALOG.column(metric.name))]
            assert any(name.startswith(f"nvidia_smi_{turned}") for name in names), field


def test_only_nvml_counts_xids_for_nvidia_gpu_exporter():
    metric = CATALOG.metrics[CATALOG.column("xid")]
    assert "--collect.backend=nvml" in howto.enable(CATALOG, metric, "nvidia_gpu_exporter").how


def test_the_lines_come_in_order_and_once():
    names = [m.name for m in CATALOG.metrics]
    (block,) = blocks(without(*names))
    assert len(set(block.lines)) == len(block.lines) >= len(howto.WANTED) - len(howto.INSTEAD) - 2
    assert block.lines[0].startswith("DCGM_FI_DEV_XID_ERRORS,")
    hard = [howto.enable(CATALOG, CATALOG.metrics[CATALOG.column(n)], "dcgm").line
            for n in howto.HARD]  # fmt: skip
    assert list(block.lines[: len(hard)]) == hard


def test_nothing_is_to_be_added_where_all_is_there():
    assert blocks(FACTS) == ()
    assert blocks(fleet(metrics=())) == ()


def test_fields_of_nvidia_smi_are_one_line():
    (block,) = blocks(without("ecc_dbe_volatile", "recovery_action", kind="nvidia_gpu_exporter"))
    assert block.lines == ("ecc.errors.uncorrected.volatile.total,gpu_recovery_action",)
    assert "AUTO" in block.into
    names = [m.name for m in CATALOG.metrics]
    (block,) = blocks(without(*names, kind="nvidia_gpu_exporter"))
    assert len(block.lines) > 1
    assert max(map(len, block.lines)) <= 76
    fields = "".join(block.lines).split(",")
    assert "" not in fields
    assert len(set(fields)) == len(fields)
