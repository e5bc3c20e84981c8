"""The fold of telemetry: what was measured, whether a GPU is there, whose work it does."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sentinel.core.domain import Presence, Workload
from sentinel.core.frame import Identity
from tests.core.telemetry import CATALOG, IDENTITY, START_S, fold, gpu, key, samples, scrape, value

TEMP, UTIL = "DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_GPU_UTIL"


def walk(telemetry, *batches, step_s=15.0):
    """Adds batches of points one tick apart; the frame after the last."""
    frame = None
    for i, points in enumerate(batches):
        at_s = START_S + i * step_s
        telemetry.add(samples(at_s, *points(at_s) if callable(points) else points))
        frame = telemetry.frame(at_s)
    return frame


def one(name, raw, **labels):
    """The frame after one sample of one GPU."""
    telemetry = fold()
    telemetry.add(samples(START_S, (key(name, **gpu(0, **labels)), START_S, raw)))
    return telemetry, telemetry.frame(START_S)


# ---- values -----------------------------------------------------------------------------


def test_the_newest_value_of_each_metric_with_its_age():
    telemetry = fold()
    points = [(key(TEMP, **gpu(0)), START_S + t, 40 + t) for t in (30, 10, 20)]
    points.append((key(UTIL, **gpu(0)), START_S + 5, 80))
    telemetry.add(samples(START_S + 31, *points))
    frame = telemetry.frame(START_S + 31)
    assert value(frame, "temp_c") == 70
    assert value(frame, "gpu_util_ratio") == pytest.approx(0.8)
    assert frame.age_s[0, frame.metrics.index("temp_c")] == pytest.approx(1)
    assert frame.age_s[0, frame.metrics.index("gpu_util_ratio")] == pytest.approx(26)
    assert math.isnan(value(frame, "power_w"))
    assert frame.age_s[0, frame.metrics.index("power_w")] == math.inf
    assert frame.last_seen_s[0] == START_S + 30


def test_an_older_answer_that_comes_late_changes_nothing():
    telemetry = fold()
    telemetry.add(samples(START_S + 30, (key(TEMP, **gpu(0)), START_S + 30, 70)))
    telemetry.add(samples(START_S + 31, (key(TEMP, **gpu(0)), START_S + 10, 40)))
    assert value(telemetry.frame(START_S + 31), "temp_c") == 70


@pytest.mark.parametrize(
    "blank",
    [
        2147483632,
        2147483635,
        4294967295,
        9223372036854775792,
        9223372036854775794,
        18446744073709551615,
        140737488355328,
        140737488355331,
        14073748835532800,
    ],
)
@pytest.mark.parametrize(
    "name", [TEMP, UTIL, "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"]
)
def test_a_blank_of_any_width_is_no_value(name, blank):
    telemetry, frame = one(name, blank)
    assert not np.isfinite(frame.values).any()
    assert telemetry.rejected == {"blank": 1}
    assert frame.presence[0] == Presence.PRESENT


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        (UTIL, 101),
        (UTIL, -1),
        (TEMP, 0),
        (TEMP, 900),
        ("DCGM_FI_DEV_POWER_USAGE", 0),
        ("DCGM_FI_DEV_MEMORY_TEMP", 0),
        ("DCGM_FI_DEV_SM_CLOCK", 99999),
        ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", -3),
        (TEMP, math.inf),
    ],
)
def test_an_impossible_value_is_dropped_and_counted(name, raw):
    telemetry, frame = one(name, raw)
    assert not np.isfinite(frame.values).any()
    assert sum(telemetry.rejected.values()) == 1


def test_a_value_that_was_dropped_leaves_the_last_good_one_to_age():
    telemetry = fold()
    k = key(TEMP, **gpu(0))
    telemetry.add(samples(START_S + 15, (k, START_S, 60), (k, START_S + 15, 4294967295)))
    frame = telemetry.frame(START_S + 15)
    assert value(frame, "temp_c") == 60
    assert frame.age_s[0, frame.metrics.index("temp_c")] == 15


def test_a_stale_marker_is_no_sign_of_life():
    frame = walk(
        fold(),
        *(lambda t: scrape(t, [0, 1]) for _ in range(3)),
        *(lambda t: [*scrape(t, [1]), (key(TEMP, **gpu(0)), t, math.nan)] for _ in range(3)),
    )
    assert list(frame.presence) == [Presence.VANISHED, Presence.PRESENT]


def test_a_sample_from_the_future_is_refused():
    telemetry = fold()
    points = [(key(TEMP, **gpu(0)), START_S + t, 50 + t) for t in (0, 4, 6, 3600)]
    telemetry.add(samples(START_S, *points))
    assert value(telemetry.frame(START_S), "temp_c") == 54
    assert telemetry.rejected == {"future": 2}


def test_a_counter_that_starts_again_is_told_as_it_is():
    name = "DCGM_FI_DEV_PCIE_REPLAY_COUNTER"
    counts = [[(key(name, **gpu(0)), START_S + 15 * i, v)] for i, v in enumerate((7, 9, 0))]
    assert value(walk(fold(), *counts), "pcie_replay") == 0


def test_bits_of_several_series_make_one_mask():
    telemetry = fold()
    bits = {"sw_power_cap": 1, "hw_slowdown": 1, "sw_thermal_slowdown": 0, "gpu_idle": 0}
    telemetry.add(
        samples(
            START_S,
            *(
                (key(f"nvidia_smi_clocks_event_reasons_{name}", uuid="u", instance="i"), START_S, v)
                for name, v in bits.items()
            ),
        )
    )
    assert value(telemetry.frame(START_S), "throttle_reasons") == 4 + 8
    later = key("nvidia_smi_clocks_event_reasons_sw_power_cap", uuid="u", instance="i")
    telemetry.add(samples(START_S + 15, (later, START_S + 15, 0)))
    assert value(telemetry.frame(START_S + 15), "throttle_reasons") == 0


# ---- parts of a GPU ---------------------------------------------------------------------


def slices(t, values, name="DCGM_FI_DEV_FB_USED", **labels):
    return [
        (key(name, **gpu(0, GPU_I_ID=str(i), GPU_I_PROFILE="1g.10gb", **labels)), t, v)
        for i, v in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("name", "values", "metric", "expected"),
    [
        ("DCGM_FI_DEV_FB_USED", (100, 200, 0), "fb_used_mib", 300),
        ("DCGM_FI_PROF_GR_ENGINE_ACTIVE", (0.1, 0.9, 0), "gr_engine_active_ratio", 0.9),
        (TEMP, (60, 60, 60), "temp_c", 60),
        ("DCGM_FI_DEV_POWER_USAGE", (300, 300, 300), "power_w", 300),
        ("DCGM_FI_DEV_CLOCKS_EVENT_REASONS", (4, 4, 8), "throttle_reasons", 12),
    ],
)
def test_slices_fold_into_their_gpu(name, values, metric, expected):
    telemetry = fold()
    telemetry.add(samples(START_S, *slices(START_S, values, name)))
    frame = telemetry.frame(START_S)
    assert len(frame.gpus) == 1
    assert value(frame, metric) == pytest.approx(expected)


def test_a_series_of_the_whole_gpu_wins_over_its_slices():
    telemetry = fold()
    whole = (key("DCGM_FI_DEV_FB_USED", **gpu(0)), START_S, 1000)
    telemetry.add(samples(START_S, whole, *slices(START_S, (100, 200))))
    assert value(telemetry.frame(START_S), "fb_used_mib") == 1000


def test_a_slice_that_went_away_counts_no_more():
    frame = walk(fold(), lambda t: slices(t, (100, 200, 50)), lambda t: slices(t, (100, 200)))
    assert value(frame, "fb_used_mib") == 300


def test_pods_that_share_a_gpu_do_not_multiply_its_memory():
    telemetry = fold()
    points = [
        (key("DCGM_FI_DEV_FB_USED", **gpu(0, pod=pod, namespace="x")), START_S, 500)
        for pod in ("one", "two", "three")
    ]
    telemetry.add(samples(START_S, *points))
    frame = telemetry.frame(START_S)
    assert (len(frame.gpus), value(frame, "fb_used_mib")) == (1, 500)


def test_links_add_up_and_switches_are_no_gpus():
    telemetry = fold()
    name = "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL"
    common = {"gpu_uuid": "GPU-a0", "instance": "a:9400", "gpu": "0"}
    points = [(key(name, **common, nvlink=str(i)), START_S, 2) for i in range(3)]
    points.append((key(name, instance="a:9400", nvswitch="0", gpu="0"), START_S, 2))
    telemetry.add(samples(START_S, *points))
    frame = telemetry.frame(START_S)
    assert [g.uuid for g in frame.gpus] == ["GPU-a0"]
    assert value(frame, "nvlink_crc_errors") == 6


# ---- identity ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "uuid", "index", "model", "node"),
    [
        (gpu(3), "GPU-a3", 3, "H100", "node-a"),
        ({"gpu": "1", "Hostname": "h"}, "h/gpu1", 1, "", "h"),
        ({"gpu": "1", "instance": "h:9400"}, "h:9400/gpu1", 1, "", "h:9400"),
        (
            {"uuid": "842ab6f5-3678-470d-b573-701a545a8ec1", "instance": "i"},
            "GPU-842ab6f5-3678-470d-b573-701a545a8ec1",
            None,
            "",
            "i",
        ),
        (
            {"UUID": "GPU-7ad09335-aadb-19c3-e3a8", "gpu": "0", "Hostname": "h"},
            "GPU-7ad09335-aadb-19c3-e3a8",
            0,
            "",
            "h",
        ),
        (
            {"uuid": "GPU-x", "path": "/dev/nvidia5", "name": "Tesla P4", "instance": "i"},
            "GPU-x",
            5,
            "Tesla P4",
            "i",
        ),
        ({"UUID": "MIG-GPU-ab/7/0", "gpu": "2", "Hostname": "h"}, "GPU-ab", 2, "", "h"),
        ({"UUID": "GPU-x", "Hostname": "localhost", "instance": "i"}, "GPU-x", None, "", "i"),
        ({"UUID": "GPU-x", "hostname": "new", "instance": "i"}, "GPU-x", None, "", "new"),
        (
            {"uuid": "00000000-0000-0000-0000-000000000000", "instance": "i"},
            "i/00000000-0000-0000-0000-000000000000",
            None,
            "",
            "i",
        ),
    ],
)
def test_who_a_gpu_is(labels, uuid, index, model, node):
    telemetry = fold()
    telemetry.add(samples(START_S, (key(TEMP, **labels), START_S, 50)))
    (found,) = telemetry.frame(START_S).gpus
    assert (found.uuid, found.index, found.model, found.node) == (uuid, index, model, node)


def test_a_series_that_names_no_gpu_is_left_out():
    telemetry = fold()
    telemetry.add(samples(START_S, (key(TEMP, instance="i"), START_S, 50)))
    assert telemetry.frame(START_S).gpus == ()


def test_a_series_without_uuid_joins_the_gpu_at_its_place():
    telemetry = fold()
    bare = {"gpu": "0", "instance": "a:9400", "job": "dcgm-exporter"}
    points = [(key(UTIL, **bare), START_S, 50), (key(TEMP, **gpu(0)), START_S, 61)]
    telemetry.add(samples(START_S, *points))
    frame = telemetry.frame(START_S)
    assert [g.uuid for g in frame.gpus] == ["GPU-a0"]
    assert value(frame, "gpu_util_ratio") == 0.5


def test_an_info_series_tells_index_and_model_by_uuid():
    telemetry = fold()
    uuid = {"uuid": "842ab6f5-3678-470d-b573-701a545a8ec1", "instance": "i"}
    info = {"name": "NVIDIA L4", "index": "4", "driver_version": "595"}
    telemetry.add(
        samples(
            START_S,
            (key("nvidia_smi_temperature_gpu", **uuid), START_S, 50),
            (key("nvidia_smi_gpu_info", **uuid, **info), START_S, 1),
        )
    )
    (found,) = telemetry.frame(START_S).gpus
    assert (found.index, found.model) == (4, "NVIDIA L4")


def test_node_names_are_rewritten_in_order():
    identity = Identity(
        node_from=("Hostname",),
        node_rewrite=((r"\.example\.net$", ""), (r"^ip-(\d+)$", r"gpu-\1")),
        job_id_from=(),
    )
    telemetry = fold(identity)
    labels = gpu(0, Hostname="ip-12.example.net")
    telemetry.add(samples(START_S, (key(TEMP, **labels), START_S, 50)))
    assert telemetry.frame(START_S).gpus[0].node == "gpu-12"


def test_two_exporters_of_one_gpu_make_one_gpu_with_the_better_node_name():
    telemetry = fold()
    bare = "842ab6f5-3678-470d-b573-701a545a8ec1"
    for i in range(3):
        t = START_S + 15 * i
        smi = key("nvidia_smi_power_draw_watts", uuid=bare, instance="a:9835", job="smi")
        dcgm = key(TEMP, **gpu(0, UUID=f"GPU-{bare}"))
        telemetry.add(samples(t, (dcgm, t - 7, 50), (smi, t, 300)))
        frame = telemetry.frame(t)
    assert [g.node for g in frame.gpus] == ["node-a"]
    assert (value(frame, "temp_c"), value(frame, "power_w")) == (50, 300)


# ---- work -------------------------------------------------------------------------------


OWN = {"service": "nvidia-dcgm-exporter", "container": "nvidia-dcgm-exporter"}


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ({}, None),
        ({"pod": "", "namespace": "", "container": ""}, None),
        (
            {"pod": "trainer-0", "namespace": "ml", "container": "main"},
            Workload("pod", "trainer-0", "ml"),
        ),
        ({"pod": "nvidia-dcgm-exporter-abcde", "namespace": "gpu-operator", **OWN}, None),
        (
            {
                "pod": "nvidia-dcgm-exporter-abcde",
                "namespace": "gpu-operator",
                **OWN,
                "exported_pod": "trainer-0",
                "exported_namespace": "ml",
            },
            Workload("pod", "trainer-0", "ml"),
        ),
        ({"hpc_job": "4711"}, Workload("job", "4711", "")),
        (
            {"hpc_job": "4711", "pod": "nvidia-dcgm-exporter-abcde", "namespace": "monitoring"},
            Workload("job", "4711", ""),
        ),
        ({"pod": "metrics-x7x", "service": "metrics", "namespace": "mon"}, None),
        ({"pod": "node-a", "namespace": "mon"}, None),  # the exporter's pod is its host name
    ],
)
def test_whose_work_a_gpu_does(labels, expected):
    telemetry = fold()
    telemetry.add(samples(START_S, (key(TEMP, **gpu(0, **labels)), START_S, 50)))
    assert telemetry.frame(START_S).workloads == (expected,)


def test_work_comes_and_goes_and_the_gpu_stays():
    def labelled(pod):
        return lambda t: [(key(TEMP, **gpu(0, pod=pod, namespace="ml")), t, 50)]

    telemetry = fold()
    seen = [
        walk(telemetry, points) if i == 0 else None for i, points in enumerate([labelled("one")])
    ]
    works = [seen[0].workloads[0].id]
    for i, pod in enumerate(["two", "two", "", "", ""], start=1):
        t = START_S + 15 * i
        telemetry.add(samples(t, *labelled(pod)(t)))
        frame = telemetry.frame(t)
        works.append(frame.workloads[0].id if frame.workloads[0] else None)
        assert [g.uuid for g in frame.gpus] == ["GPU-a0"]
    # one scrape without labels is a gap in the labels, two are an end of the work
    assert works == ["one", "two", "two", "two", None, None]


def test_the_same_tuples_while_nothing_changes():
    telemetry = fold()
    first = walk(telemetry, lambda t: scrape(t, [0, 1]))
    telemetry.add(samples(START_S + 15, *scrape(START_S + 15, [0, 1])))
    second = telemetry.frame(START_S + 15)
    assert second.gpus is first.gpus
    assert second.workloads is first.workloads
    assert second.metrics is first.metrics
    assert second.values is not first.values


# ---- presence ---------------------------------------------------------------------------


def presences(*batches, step_s=15.0, **options):
    return [int(p) for p in walk(fold(**options), *batches, step_s=step_s).presence]


BOTH = [lambda t: scrape(t, [0, 1])] * 4


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ([lambda t: scrape(t, [1])] * 1, [Presence.PRESENT, Presence.PRESENT]),
        ([lambda t: scrape(t, [1])] * 2, [Presence.VANISHED, Presence.PRESENT]),
        ([lambda t: scrape(t, [1])] * 9, [Presence.VANISHED, Presence.PRESENT]),
        ([lambda t: scrape(t, [])] * 2, [Presence.PRESENT, Presence.PRESENT]),
        ([lambda t: scrape(t, [], up=0)], [Presence.HOST_SILENT, Presence.HOST_SILENT]),
        ([lambda t: []] * 6, [Presence.HOST_SILENT, Presence.HOST_SILENT]),
        ([lambda t: scrape(t, [])] * 6, [Presence.HOST_SILENT, Presence.HOST_SILENT]),
        ([lambda t: scrape(t, [1], up=0)] * 3, [Presence.HOST_SILENT, Presence.HOST_SILENT]),
        ([lambda t: scrape(t, [1])] * 3 + [lambda t: scrape(t, [0, 1])], [0, 0]),
    ],
)
def test_the_causes_of_absence_are_told_apart(after, expected):
    assert presences(*BOTH, *after) == [int(p) for p in expected]


def test_a_lonely_gpu_never_vanishes():
    for after in ([lambda t: scrape(t, [])] * 9, [lambda t: []] * 9):
        assert presences(*[lambda t: scrape(t, [0])] * 4, *after) == [Presence.HOST_SILENT]


@pytest.mark.parametrize("interval_s", [1.0, 15.0, 60.0])
def test_vanishing_follows_the_scrape_interval(interval_s):
    one_missed = presences(*BOTH, lambda t: scrape(t, [1]), step_s=interval_s)
    two_missed = presences(*BOTH, *[lambda t: scrape(t, [1])] * 2, step_s=interval_s)
    assert (one_missed[0], two_missed[0]) == (Presence.PRESENT, Presence.VANISHED)


def test_an_answer_in_part_makes_nothing_vanish():
    telemetry = fold()
    walk(telemetry, *BOTH)
    for i in range(4, 8):
        t = START_S + 15 * i
        telemetry.add(samples(t, *scrape(t, [1]), partial=True, warnings=("store b is down",)))
        frame = telemetry.frame(t)
    assert list(frame.presence) == [Presence.HOST_SILENT, Presence.PRESENT]
    assert frame.coverage.partial
    assert "store b is down" in frame.coverage.reason


def test_one_host_is_silent_and_the_other_loses_a_gpu():
    healthy = [lambda t: scrape(t, [0, 1]) + scrape(t, [0, 1], host="b")] * 4
    after = [lambda t: scrape(t, [0]) + scrape(t, [], host="b", up=0)] * 3
    frame = walk(fold(), *healthy, *after)
    by_uuid = dict(zip([g.uuid for g in frame.gpus], frame.presence, strict=True))
    assert by_uuid == {
        "GPU-a0": Presence.PRESENT,
        "GPU-a1": Presence.VANISHED,
        "GPU-b0": Presence.HOST_SILENT,
        "GPU-b1": Presence.HOST_SILENT,
    }


def moved(t, gpus, address):
    return [(key(TEMP, **gpu(n, instance=address)), t, 50) for n in gpus]


def test_an_exporter_that_returns_under_another_address_without_a_gpu_lost_it():
    before = [lambda t: moved(t, range(4), "10.0.0.1:9400")] * 4
    after = [lambda t: moved(t, range(3), "10.0.0.2:9400")] * 15
    assert presences(*before, *after[:8]) == [0, 0, 0, Presence.HOST_SILENT]
    assert presences(*before, *after) == [0, 0, 0, Presence.VANISHED]


def test_a_gpu_that_moved_to_another_host_says_nothing_of_its_old_siblings():
    def both(t):
        return scrape(t, range(4)) + scrape(t, [0], host="b")

    def one_moved(t):
        far = gpu(3, Hostname="node-b", instance="b:9400")
        return [*scrape(t, [0], host="b"), (key(TEMP, **far), t, 50)]

    frame = walk(fold(), *[both] * 4, *[one_moved] * 8)
    by_uuid = dict(zip([g.uuid for g in frame.gpus], frame.presence, strict=True))
    assert by_uuid["GPU-a3"] == Presence.PRESENT
    assert {by_uuid[f"GPU-a{n}"] for n in range(3)} == {Presence.HOST_SILENT}


def shown(t, *gpus, **labels):
    """A scrape of host a's address that shows GPUs by their labels."""
    return [(key(TEMP, **gpu(0, **(labels | own))), t, 50) for own in gpus]


def by_uuid(frame):
    return dict(zip([g.uuid for g in frame.gpus], frame.presence, strict=True))


def test_an_address_that_goes_to_another_node_makes_nothing_vanish():
    """A pod's address is given again: to a new node, or to one that was known elsewhere."""
    old = [lambda t: scrape(t, [0, 1])] * 4
    other = {"Hostname": "node-b", "instance": "a:9400"}
    new = [lambda t: shown(t, {"UUID": "GPU-b0"}, {"UUID": "GPU-b1", "gpu": "1"}, **other)] * 30
    for known in (False, True):
        before = [lambda t, k=known: scrape(t, [0, 1]) + (scrape(t, [0, 1], host="b") * k)] * 4
        found = by_uuid(walk(fold(), *before, *new))
        assert {found["GPU-a0"], found["GPU-a1"]} == {Presence.HOST_SILENT}
        assert found["GPU-b0"] == Presence.PRESENT
    # a machine made anew under its old name, as spot instances and vGPU guests are
    anew = [lambda t: shown(t, {"UUID": "GPU-x0"}, {"UUID": "GPU-x1", "gpu": "1"})] * 30
    assert by_uuid(walk(fold(), *old, *anew))["GPU-a0"] == Presence.HOST_SILENT


def test_one_exporter_for_many_nodes_tells_a_silent_node_from_a_lost_gpu():
    def gateway(t, **gone):
        rows = [(n, h) for h in "ab" for n in range(2) if n not in gone.get(h, ())]
        return [(key(TEMP, **gpu(n, h, instance="gateway:8889")), t, 50) for n, h in rows]

    before = [gateway] * 4
    found = by_uuid(walk(fold(), *before, *[lambda t: gateway(t, a=(0, 1))] * 30))
    assert (found["GPU-a0"], found["GPU-b0"]) == (Presence.HOST_SILENT, Presence.PRESENT)
    found = by_uuid(walk(fold(), *before, *[lambda t: gateway(t, a=(0,))] * 3))
    assert (found["GPU-a0"], found["GPU-a1"]) == (Presence.VANISHED, Presence.PRESENT)


def test_a_node_that_gets_another_name_keeps_its_lost_gpu():
    """A container's name is another each time it is made; the GPU was lost meanwhile."""
    again = [lambda t: shown(t, {"UUID": "GPU-a1", "gpu": "1"}, Hostname="3f0c2d1b9a77")] * 16
    found = by_uuid(walk(fold(), *BOTH, *again))
    assert found == {"GPU-a0": Presence.VANISHED, "GPU-a1": Presence.PRESENT}


def test_a_gpu_whose_place_another_has_taken_was_replaced():
    new = {"UUID": "GPU-new", "gpu": "0"}
    swapped = [lambda t: shown(t, new, {"UUID": "GPU-a1", "gpu": "1"})] * 30
    found = by_uuid(walk(fold(), *BOTH, *[lambda t: []] * 30, *swapped))
    assert found["GPU-a0"] == Presence.HOST_SILENT
    # but a lost GPU whose sibling moves up to its place is lost
    moved_up = [lambda t: shown(t, {"UUID": "GPU-a1", "gpu": "0"})] * 3
    assert by_uuid(walk(fold(), *BOTH, *moved_up))["GPU-a0"] == Presence.VANISHED


def test_gpus_that_a_reboot_numbers_anew_keep_their_rows_and_change_their_index():
    crossed = [lambda t: shown(t, {"UUID": "GPU-a0", "gpu": "1"}, {"UUID": "GPU-a1"})] * 2
    frame = walk(fold(), *BOTH, *[lambda t: []] * 12, *crossed)
    assert [(g.uuid, g.index) for g in frame.gpus] == [("GPU-a0", 1), ("GPU-a1", 0)]
    assert list(frame.presence) == [Presence.PRESENT] * 2
    # a series without an index takes none away, nor does an exporter that tells none
    info = key("nvidia_smi_gpu_info", uuid="GPU-a0", index="1", instance="a:9835")
    plain = key("nvidia_smi_temperature_gpu", uuid="GPU-a0", instance="a:9835")
    frame = walk(fold(), lambda t: [(info, t, 1), (plain, t, 50)], lambda t: [(plain, t, 51)])
    assert [g.index for g in frame.gpus] == [1]


def test_blindness_tells_of_no_gpu_and_keeps_the_true_ages():
    telemetry = fold()
    walk(telemetry, *BOTH)
    frame = telemetry.blind(START_S + 145, "Prometheus is away")
    assert set(frame.presence) == {Presence.BLIND}
    assert (frame.coverage.blind, frame.coverage.gpus_reporting) == (True, 0)
    assert frame.coverage.reason == "Prometheus is away"
    assert frame.age_s[0, frame.metrics.index("temp_c")] == 100


def test_a_gpu_unseen_for_a_day_leaves_and_the_others_keep_what_is_known():
    telemetry = fold()
    walk(telemetry, *BOTH)
    day = START_S + 90_000
    for t in (day, day + 15, day + 30):
        telemetry.add(samples(t, *scrape(t, [1], **{TEMP: 55, "DCGM_FI_DEV_XID_ERRORS": 0})))
        frame = telemetry.frame(t)
    assert [g.uuid for g in frame.gpus] == ["GPU-a1"]
    assert value(frame, "temp_c") == 55
    assert list(frame.presence) == [Presence.PRESENT]
    telemetry.add(samples(day + 45, *scrape(day + 45, [0, 1])))
    assert [g.uuid for g in telemetry.frame(day + 45).gpus] == ["GPU-a1", "GPU-a0"]


def test_the_scrape_interval_is_seen():
    telemetry = fold()
    assert telemetry.scrape_interval_s is None
    walk(telemetry, *BOTH, step_s=30.0)
    assert telemetry.scrape_interval_s == 30.0


# ---- Xids -------------------------------------------------------------------------------

XID, COUNT = "DCGM_FI_DEV_XID_ERRORS", "DCGM_EXP_XID_ERRORS_COUNT"


def codes(*scrapes, step_s=15.0):
    """All Xids told over scrapes; each is a dict of extra points {(name, labels): value}."""
    telemetry, told = fold(), []
    for i, extra in enumerate(scrapes):
        t = START_S + i * step_s
        points = scrape(t, [0, 1])
        for spec, v in extra.items():
            name, labels = spec if isinstance(spec, tuple) else (spec, ())
            points.append((key(name, **gpu(0, **dict(labels))), t, v))
        telemetry.add(samples(t, *points))
        frame = telemetry.frame(t)
        told += [
            (frame.gpus[e.row].uuid, e.code, round((e.at_s - START_S) / step_s)) for e in frame.xids
        ]
    return told


def gauge(*values):
    return [{} if v is None else {XID: v} for v in values]


def labelled(name, **labels):
    return (name, tuple(labels.items()))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((0, 0, 79, 79, 79), [(79, 2)]),
        ((31, 31, 79, 79), [(79, 2)]),
        ((79, 79, 79), []),  # it stood when we came
        ((None, None, 79, 79), [(79, 2)]),  # left out until there is one
        ((0, 43, 0, 43, 43), [(43, 1), (43, 3)]),
        ((0, 43, None, None, 43), [(43, 1), (43, 4)]),  # the series went away: it was zero
        ((0, 13, 31, 43), [(13, 1), (31, 2), (43, 3)]),
    ],
)
def test_a_sticky_gauge_is_one_event_when_it_changes(values, expected):
    assert codes(*gauge(*values)) == [("GPU-a0", code, at) for code, at in expected]


def test_every_sample_of_an_answer_is_looked_at():
    telemetry = fold()
    points = []
    for i, v in enumerate((0, 79, 31, 31, 0, 31)):
        t = START_S + 15 * i
        points += [*scrape(t, [0, 1]), (key(XID, **gpu(0)), t, v)]
    telemetry.add(samples(START_S + 75, *points))
    assert [e.code for e in telemetry.frame(START_S + 75).xids] == [79, 31, 31]
    telemetry.add(samples(START_S + 76, *points))  # the next answer overlaps
    assert telemetry.frame(START_S + 76).xids == ()


def test_another_pod_does_not_make_a_standing_code_new():
    told = codes(
        {labelled(XID, pod="one"): 0},
        {labelled(XID, pod="one"): 31},
        {labelled(XID, pod="two"): 31},
        {labelled(XID): 31},
    )
    assert [code for _, code, _ in told] == [31]


def test_slices_tell_of_one_event_together():
    def both(v):
        return {labelled(XID, GPU_I_ID=str(i)): v for i in range(3)}

    assert [c for _, c, _ in codes(both(0), both(0), both(95), both(95))] == [95]


def test_a_code_on_one_slice_is_not_hidden_by_another():
    first = labelled(XID, GPU_I_ID="1")
    second = labelled(XID, GPU_I_ID="2")
    told = codes({first: 31, second: 0}, {first: 31, second: 0}, {first: 31, second: 13})
    assert [code for _, code, _ in told] == [13]


def test_labels_of_codes_tell_each_once():
    def coded(*values):
        return {labelled(XID, err_code=str(v), err_msg="m"): v for v in values}

    clear = (coded(0), coded(0))  # one scrape alone may have lost a series
    told = codes(coded(0), coded(31), coded(31), coded(31, 79), coded(79), *clear, coded(79))
    assert [(code, at) for _, code, at in told] == [(31, 1), (79, 3), (79, 7)]


def test_counts_tell_of_repeats_that_a_gauge_hides():
    n = labelled(COUNT, xid="31", window_size_in_ms="300000")
    told = codes(
        {XID: 0}, {XID: 31, n: 1}, {XID: 31, n: 1}, *[{XID: 31, n: 1}] * 6, {XID: 31, n: 2}
    )
    assert [(code, at) for _, code, at in told] == [(31, 1), (31, 9)]


@pytest.mark.parametrize(("window_ms", "told_again"), [("60000", True), ("300000", False)])
def test_a_count_that_slid_out_of_its_own_window_begins_anew(window_ms, told_again):
    n = labelled(COUNT, xid="48", window_size_in_ms=window_ms)
    told = codes({}, {n: 1}, *[{}] * 6, {n: 1})  # 105 s apart
    assert len(told) == (2 if told_again else 1)


def test_a_count_alone_tells_every_growth_and_no_shrinking():
    n = labelled(COUNT, xid="48")
    told = codes({}, {n: 1}, {n: 1}, {n: 3}, {n: 2}, {n: 1}, {n: 2})
    assert [(code, at) for _, code, at in told] == [(48, 1), (48, 3), (48, 6)]


def test_a_count_that_stood_when_we_came_is_history():
    assert codes({labelled(COUNT, xid="48"): 2}, {labelled(COUNT, xid="48"): 2}) == []


def test_two_exporters_that_both_see_a_code_tell_it_once():
    other = labelled(XID, instance="a:9401", job="second")
    told = codes({XID: 0, other: 0}, {XID: 79, other: 0}, {XID: 79, other: 79}, {XID: 79})
    assert [code for _, code, _ in told] == [79]


def test_an_exporter_restarted_under_another_address_repeats_nothing():
    def at(address, v):
        return {labelled(XID, instance=address): v}

    old, new = "10.0.0.1:9400", "10.0.0.2:9400"
    told = codes(at(old, 0), at(old, 79), *[at(old, 79)] * 5, *[at(new, 79)] * 5)
    assert [code for _, code, _ in told] == [79]


# ---- whatever comes ---------------------------------------------------------------------

_NAMES = (TEMP, UTIL, "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_POWER_USAGE", XID)
_RAW = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.integers(-5, 200).map(float),
    st.sampled_from([2147483635.0, 9.223372036854775807e18, 140737488355328.0, 4294967295.0]),
)


@given(
    raw=st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 8), _RAW), max_size=40
    ),
    slices_too=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_no_value_is_ever_outside_its_range(raw, slices_too):
    telemetry = fold()
    points = []
    for name, n, tick, v in raw:
        labels = gpu(n % 2, GPU_I_ID=str(n)) if slices_too else gpu(n)
        points.append((key(_NAMES[name], **labels), START_S + 15.0 * tick, v))
    telemetry.add(samples(START_S + 120, *points))
    frame = telemetry.frame(START_S + 120)
    low = np.array([m.valid_min for m in CATALOG.metrics])
    high = np.array([m.valid_max for m in CATALOG.metrics])
    known = np.isfinite(frame.values)
    assert not np.isinf(frame.values).any()
    inside = (frame.values >= low) & (frame.values <= high)
    assert inside[known].all()
    assert (np.isfinite(frame.age_s) == known).all()
    assert (frame.age_s >= 0).all()


@st.composite
def _histories(draw):
    """Ticks of three hosts of two GPUs: what each host answered, and how the answer arrived."""
    state = st.sampled_from(["whole", "whole", "whole", "down", "silent", "without 1"])
    ticks = draw(
        st.lists(st.fixed_dictionaries(dict.fromkeys("abc", state)), min_size=3, max_size=9)
    )
    return ticks, draw(st.randoms(use_true_random=False))


@given(_histories())
@settings(max_examples=80, deadline=None)
def test_order_repeats_and_loss_never_make_a_gpu_vanish_while_its_host_is_silent(history):
    ticks, random = history
    telemetry = fold()
    answered: dict[str, list[int]] = {host: [] for host in "abc"}
    sent = []
    for i, hosts in enumerate(ticks):
        t = START_S + 15 * i
        for host, state in hosts.items():
            if state == "silent":
                continue
            gpus = {"whole": [0, 1], "without 1": [0], "down": []}[state]
            points = scrape(t, gpus, host=host, up=int(state != "down"))
            if gpus and random.random() < 0.2:  # some series of the scrape are lost
                points = points[: max(1, len(points) - 1)]
            answered[host] += [i] * bool(gpus)
            sent += points
        batch = [p for p in sent if p[1] > t - 60]
        batch += random.choices(batch, k=len(batch) // 3) if batch else []
        random.shuffle(batch)
        telemetry.add(samples(t, *batch))
        frame = telemetry.frame(t)
        for seen, presence in zip(frame.gpus, frame.presence, strict=True):
            host = seen.uuid[4]
            if presence != Presence.VANISHED:
                continue
            assert hosts[host] != "down"
            assert answered[host]
            assert i - answered[host][-1] < 4
            assert seen.uuid.endswith("1") or any(s[host] == "whole" for s in ticks[: i + 1])


@given(st.randoms(use_true_random=False), st.lists(_RAW, min_size=6, max_size=6))
@settings(max_examples=40, deadline=None)
def test_an_answer_means_the_same_in_any_order(random, raw):
    points = []
    for i in range(6):
        t = START_S + 15 * i
        points += scrape(t, [0, 1], **{TEMP: 40 + i, XID: 0})
        points.append((key(UTIL, **gpu(0)), t, raw[i]))
    shuffled = points + random.choices(points, k=5)
    random.shuffle(shuffled)
    frames = []
    for order in (points, shuffled):
        telemetry = fold(IDENTITY)
        telemetry.add(samples(START_S + 75, *order))
        frame = telemetry.frame(START_S + 75)
        rows = np.argsort([g.uuid for g in frame.gpus])
        frames.append((frame.values[rows], frame.age_s[rows], frame.presence[rows]))
    for left, right in zip(*frames, strict=True):
        np.testing.assert_array_equal(left, right)
