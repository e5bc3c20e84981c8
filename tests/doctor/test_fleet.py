"""What a fleet's series say of its exporters, names, models, doubles and work, counted."""

import numpy as np
import pytest

from sentinel.core.frame import Samples, SeriesKey, Telemetry
from sentinel.core.identity import Identity
from sentinel.core.verdict import Settings, Watch
from sentinel.data import load_catalog, load_models
from sentinel.doctor.fleet import fleet, look
from sentinel.doctor.reading import Reading
from tests.doctor.fleets import A100, DEFAULT, H100, MORE, Target, dcgm, mig, nothing, smi

CATALOG, MODELS = load_catalog(), load_models()
NOW_S = 1_800_000_000.0
EVERY_S = 15.0


def read(jobs, *, scrapes=12, identity=None, late=()):
    """The fleet after some scrapes of every target; those in `late` miss the last four."""
    identity = identity or Identity()
    reading = Reading(CATALOG, identity)
    telemetry = Telemetry(CATALOG, identity, lacks=MODELS.lacks)
    keys, places = [], {}
    for scrape in range(scrapes):
        at_s = NOW_S - EVERY_S * (scrapes - 1 - scrape) - 2.0
        rows, values = [], []
        for job, targets in jobs.items():
            for target in targets:
                if target.instance in late and scrape >= scrapes - 4:
                    continue
                up = ("up", {}, float(target.show is not None))
                for name, own, value in [up, *(target.show(at_s) if target.show else ())]:
                    labels = {"job": job, "instance": target.instance, **target.labels, **own}
                    key = SeriesKey(name, tuple(sorted(labels.items())))
                    if key not in places:
                        places[key] = len(keys)
                        keys.append(key)
                    rows.append(places[key])
                    values.append(value)
        samples = Samples(
            at_s,
            keys,
            np.array(rows, dtype=np.int64),
            np.full(len(rows), at_s),
            np.array(values, dtype=np.float64),
        )
        reading.add(samples)
        telemetry.add(samples)
    frame = telemetry.frame(NOW_S)
    judgement = Watch(Settings(), CATALOG).judge(frame, None)
    return fleet(reading, frame, judgement, MODELS, telemetry.rejected, NOW_S)


def metric(seen, name):
    return next(m for m in seen.metrics if m.name == name)


def one(*targets, job="dcgm"):
    return {job: list(targets)}


def test_a_plain_fleet_is_counted():
    seen = read(one(Target("gpu-01:9400", dcgm(1)), Target("gpu-02:9400", dcgm(2))))
    assert (seen.gpus, seen.reporting, seen.presence) == (16, 16, {"present": 16})
    (exporter,) = seen.exporters
    assert (exporter.kind, exporter.job, exporter.targets) == ("dcgm", "dcgm", 2)
    assert (exporter.nodes, exporter.gpus) == (2, 16)
    assert exporter.series == 2 * 8 * len(DEFAULT)
    assert exporter.interval_s == EVERY_S
    assert exporter.age_max_s == pytest.approx(2.0)
    assert seen.naming.told_by == {"Hostname": 16}
    assert seen.naming.looks == {"plain": 2}
    assert [(m.name, m.row, m.gpus, m.nodes) for m in seen.models] == [(H100, "H100 SXM", 16, 2)]
    assert seen.models[0].drivers == ("580.105.08",)
    assert (seen.work.jobs, seen.work.tenants, seen.work.named, seen.work.unnamed) == (2, 1, 12, 0)
    assert seen.verdicts == {"normal": 16}
    assert seen.up_seen


def test_a_node_with_fewer_gpus_than_most_is_told():
    jobs = [Target(f"gpu-{n}:9400", dcgm(n, gpus=7 if n == 3 else 8)) for n in range(1, 5)]
    (model,) = read(one(*jobs)).models
    assert (model.per_node, model.fewer) == (8, {"gpu-03": 7})
    (model,) = read(one(*jobs[1:3])).models  # of two nobody knows which is right
    assert (model.per_node, model.fewer) == (0, {})


def test_what_is_missing_is_counted_over_the_gpus_that_can_have_it():
    both = one(Target("a:9400", dcgm(1, DEFAULT | MORE)), Target("b:9400", dcgm(2)))
    seen = read(both)
    found = metric(seen, "ecc_dbe_volatile")
    assert (found.present, found.able, found.blank) == (8, 16, 0)
    assert [way.line for way in found.enable] == [
        "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL, counter, uncorrectable ECC errors"
    ]
    assert metric(seen, "temp_c").enable == ()
    assert [m.importance for m in seen.metrics] == sorted(m.importance for m in seen.metrics)


def test_a_gpu_that_cannot_have_a_metric_does_not_miss_it():
    seen = read(one(Target("a:9400", dcgm(1, gpus=2, model="NVIDIA L4"))))
    assert metric(seen, "nvlink_crc_errors").able == 0
    assert metric(seen, "mem_temp_c").able == 0
    assert metric(seen, "temp_c").able == 2
    # what the GPUs before row remapping have in its place is not asked of later ones
    assert metric(seen, "retired_pages_pending").able == 0
    old = read(one(Target("a:9400", dcgm(1, gpus=2, model="Tesla V100-SXM2-32GB"))))
    assert metric(old, "retired_pages_pending").able == 2
    assert metric(old, "remap_pending").able == 0


def test_blanks_are_told_from_what_is_not_shown():
    blank = DEFAULT | {
        "DCGM_FI_DEV_MEMORY_TEMP": (0, 0),
        "DCGM_FI_DEV_POWER_USAGE": (2147483632,) * 2,
    }
    seen = read(one(Target("a:9400", dcgm(1, blank))))
    for name in ("mem_temp_c", "power_w"):
        assert (metric(seen, name).present, metric(seen, name).blank) == (0, 8)
    assert seen.rejected["blank"] > 0


def test_slices_are_parts_of_their_gpu():
    seen = read(one(Target("a:9400", mig(1))))
    assert [(m.name, m.gpus, m.mig) for m in seen.models] == [(A100, 2, 2)]
    assert metric(seen, "gpu_util_ratio").able == 0
    assert metric(seen, "fb_used_mib").present == 2
    assert seen.doubles.shared == 0  # a slice is no second view
    assert seen.work.busy == 2


def test_nvidia_gpu_exporter_is_read_by_its_own_labels():
    seen = read(one(Target("gpu-01:9835", smi(1)), job="smi"))
    assert seen.exporters[0].kind == "nvidia_gpu_exporter"
    assert seen.naming.told_by == {"instance": 4}
    assert seen.naming.looks == {"address": 1}
    assert seen.models[0].drivers == ("580.105.08",)
    assert [way.line for way in metric(seen, "xid").enable] == [""]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpu-01", "plain"), ("dgx", "plain"), ("", "localhost"), ("localhost", "localhost"),
        ("gpu-01.example.net", "fqdn"), ("ip-10-0-180-136.ec2.internal", "fqdn"),
        ("10.0.0.1", "address"), ("10.0.0.1:9400", "address"), ("gpu-01:9400", "address"),
        ("[2001:db8::1]:9400", "address"), ("2001:db8::1", "address"),
        ("nvidia-dcgm-exporter-x1k7w", "pod"), ("dcgm-exporter-6ldbb", "pod"),
        ("0123456789ab", "container"), ("202612031200", "plain"), ("node-7f9c", "plain"),
    ],
)  # fmt: skip
def test_how_a_name_looks(name, expected):
    assert look(name) == expected


def test_a_host_name_that_all_have_names_none():
    seen = read(
        one(
            Target("10.0.0.1:9400", dcgm(1, host="localhost")),
            Target("10.0.0.2:9400", dcgm(2, host="localhost")),
        )
    )
    assert seen.naming.hidden_by == "Hostname=localhost"
    assert seen.naming.nodes == 2
    assert seen.naming.told_by == {"instance": 16}


def test_other_labels_that_may_name_the_node_are_found():
    labels = {"kubernetes_io_hostname": "gpu-01", "exported_pod": "x"}
    seen = read(one(Target("10.0.0.1:9400", smi(1), labels), job="smi"))
    assert seen.naming.candidates == {"kubernetes_io_hostname": "gpu-01"}
    assert seen.naming.exported == ("exported_pod",)


def test_the_name_after_a_rewrite_is_that_of_its_label():
    identity = Identity(node_rewrite=((r"\..*$", ""),))
    seen = read(one(Target("a:9400", dcgm(1, host="gpu-01.example.net"))), identity=identity)
    assert seen.naming.told_by == {"Hostname": 8}
    assert seen.naming.first == ("gpu-01",)


def test_one_exporter_under_two_jobs_is_scraped_twice():
    target = Target("gpu-01:9400", dcgm(1))
    seen = read({"a": [target], "b": [target]})
    assert (seen.gpus, seen.doubles.by_targets, seen.doubles.same_exporter) == (8, 8, True)
    assert seen.doubles.jobs == ("a", "b")
    assert [e.job for e in seen.exporters] == ["a", "b"]


def test_two_exporters_on_one_host_are_no_second_scrape():
    seen = read({"dcgm": [Target("gpu-01:9400", dcgm(1, gpus=4))],
                 "smi": [Target("gpu-01:9835", smi(1))]})  # fmt: skip
    assert (seen.gpus, seen.doubles.by_targets, seen.doubles.same_exporter) == (4, 4, False)


def test_copies_of_prometheus_are_told_by_their_label():
    views = [Target("gpu-01:9400", dcgm(1), {"prometheus_replica": r}) for r in "ab"]
    seen = read(one(*views))
    assert seen.doubles.replicas == {"prometheus_replica": ("a", "b")}
    assert seen.doubles.by_targets == 0


def test_a_gpu_that_pods_share_counts_once():
    seen = read(one(Target("a:9400", dcgm(1, pods=3))))
    assert (seen.gpus, seen.doubles.shared) == (8, 6)
    assert seen.doubles.churned == 0


def test_pods_that_come_and_go_are_not_shared_gpus():
    def show(at_s):
        old = at_s < NOW_S - 90.0
        for name, labels, value in dcgm(1, busy=8)(at_s):
            yield name, labels | {"pod": "before" if old else "after"}, value

    seen = read(one(Target("a:9400", show)))
    assert (seen.doubles.shared, seen.doubles.churned) == (0, 8)


def test_work_that_no_label_names_is_counted_and_a_label_offered():
    def show(at_s):
        for name, labels, value in dcgm(1, pods=0)(at_s):
            yield name, labels | {"slurm_job": "4711"}, value

    seen = read(one(Target("a:9400", show)))
    assert (seen.work.busy, seen.work.unnamed, seen.work.named) == (6, 6, 0)
    assert seen.work.candidates == {"slurm_job": "4711"}


def test_profiling_counters_at_zero_on_working_gpus_are_seen():
    dead = {name: (0, 0) for name in DEFAULT if "PROF" in name}
    assert read(one(Target("a:9400", dcgm(1, DEFAULT | dead)))).idle_profiling == 6
    assert read(one(Target("a:9400", dcgm(1)))).idle_profiling == 0


def test_an_energy_counter_that_stands_is_seen():
    stands = DEFAULT | {"DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": (5e9, 5e9)}
    assert read(one(Target("a:9400", dcgm(1, stands)))).energy_still == 8


def test_an_exporter_that_falls_silent_is_old_and_its_gpus_unknown():
    jobs = one(Target("a:9400", dcgm(1)), Target("b:9400", dcgm(2)))
    seen = read(jobs, late=("b:9400",))
    assert seen.presence == {"present": 8, "host_silent": 8}
    assert seen.exporters[0].age_max_s == pytest.approx(2.0 + 4 * EVERY_S)
    # what cannot be seen now misses nothing
    assert metric(seen, "temp_c").able == metric(seen, "temp_c").present == 8


def test_samples_from_the_future_are_seen():
    def show(at_s):
        yield from dcgm(1)(at_s)

    reading = read(one(Target("a:9400", show)))
    assert reading.ahead == 0
    identity = Identity()
    future = Reading(CATALOG, identity)
    telemetry = Telemetry(CATALOG, identity)
    names = list(show(NOW_S))
    keys = [
        SeriesKey(n, tuple(sorted({"instance": "a:9400", **own}.items()))) for n, own, _ in names
    ]
    samples = Samples(
        NOW_S,
        keys,
        np.arange(len(keys)),
        np.full(len(keys), NOW_S + 120.0),
        np.array([value for _, _, value in names]),
    )
    future.add(samples)
    telemetry.add(samples)
    frame = telemetry.frame(NOW_S)
    judgement = Watch(Settings(), CATALOG).judge(frame, None)
    seen = fleet(future, frame, judgement, MODELS, telemetry.rejected, NOW_S)
    assert (seen.ahead, seen.ahead_max_s) == (1, pytest.approx(120.0))


def test_no_fleet_is_a_fleet_of_none():
    seen = read(one(Target("a:9400", nothing), Target("b:9400", None)))
    assert (seen.gpus, seen.reporting, seen.exporters, seen.models) == (0, 0, (), ())
    assert read({}).gpus == 0
