"""Real GPUs in other forms: work that the baseline has never seen, other scrapes, other labels,
metrics that are missing, parts of a host; and more kinds of faults in copies.

The recordings are read in process, through the same telemetry, learning and backtest: what a
real Prometheus adds is judged in `test_recordings.py`. One configuration for everything.
"""

from itertools import permutations

import numpy as np
import pytest

from sentinel import history
from sentinel.backtest import backtest
from sentinel.config import Config
from tests.integration.recordings import (
    CLOCK,
    ENERGY,
    HBM_TEMP,
    TEMP,
    Recorded,
    h100,
    h200_series,
    inject,
    life,
    uuid,
    write_recording,
)

pytestmark = pytest.mark.slow

START_S = 1_790_000_000.0
RECORDINGS = ("b1", "i4", "t2", "t3")
ROUNDS = 4  # a recording of 4 to 5 minutes, to and fro: longer than any change mutes
FAULTY_GPU = 5
WORKS = "DCGM_FI_PROF"

# forms of the same data: what is written, and how it is looked at
FORMS = {
    "every 5 s": {"every_s": 5, "tick_s": 5},
    "every 30 s, looked at every 15 s": {"every_s": 30},
    "every 60 s": {"every_s": 60, "tick_s": 60},
    "every 60 s, looked at every 15 s": {"every_s": 60},
    "scrapes up to 10 s late": {"jitter_s": 10.0},
    "no profiling metrics": {"without": (WORKS,)},
    "no throttle reasons": {"without": ("DCGM_FI_DEV_CLOCKS",)},
    "no clocks": {"without": (CLOCK,)},
    "no model, no energy": {"model": "", "without": (ENERGY,)},
    "no memory in use": {"without": ("DCGM_FI_DEV_FB",)},
    "utilisation, power, temperature alone": {
        "without": (WORKS, "DCGM_FI_DEV_CLOCKS", CLOCK, ENERGY, "DCGM_FI_DEV_MEM_COPY")
    },
    "half of the GPUs": {"gpus": range(0, 8, 2)},
    "two GPUs": {"gpus": (0, 5)},
    "one GPU": {"gpus": (3,)},
}


@pytest.fixture
def configure(tmp_path):
    def write(tick_s):
        path = tmp_path / "sentinel.yaml"
        path.write_text(
            f"prometheus: {{url: 'http://127.0.0.1:9'}}\ntick: {{interval_s: {tick_s}}}\n"
        )
        return Config.load(path)

    return write


def replayed(configure, values, learnt_s, *, tick_s=15, every_s=15, **form):
    """Learns on the first seconds of a life of eight GPUs and replays the rest."""
    source = Recorded()
    write_recording(source, "life", values, START_S, host="node-1", every_s=every_s, **form)
    split_s, end_s = START_S + learnt_s, START_S + len(values[TEMP]) - 1
    return backtest(
        configure(tick_s),
        split_s,
        end_s,
        learn_start_s=START_S,
        learn_end_s=split_s,
        prometheus=source,
    )


def told(report):
    return [
        (i["gpu_uuid"] or i["subject"]["id"], i["kind"], i["evidence"][0]["text"])
        for i in report["incidents"] + report["written_down"]
    ]


def changed(configure, before, after, **form):
    first = life((h100(before), ROUNDS))
    values = life((first, 1), (h100(after), ROUNDS))
    return replayed(configure, values, len(first[TEMP]), **form)


@pytest.mark.parametrize(("before", "after"), list(permutations(RECORDINGS, 2)))
def test_work_that_the_baseline_has_never_seen_is_no_incident(configure, before, after):
    """Also after learning on an idle host alone: b1 is idle with a model loaded."""
    report = changed(configure, before, after)
    assert told(report) == []
    assert report["coverage"]["gpu_days"] * 86_400 > 8 * 900


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("before", "after"), [("t2", "t3"), ("t3", "t2")])
def test_the_same_in_another_form_is_no_incident(configure, before, after, form):
    assert told(changed(configure, before, after, **FORMS[form])) == []


@pytest.mark.parametrize("name", ["i4", "t3"])
def test_from_an_empty_host_over_loading_and_warming_up_to_the_end_is_no_incident(configure, name):
    """The phases that the other tests leave out, on a baseline of other work, every second."""
    first = life((h100("t2"), 2))
    values = life((first, 1), (h100(name, phase=None), 1))
    assert told(replayed(configure, values, len(first[TEMP]), tick_s=1, every_s=1)) == []


# kind of the verdict, a word of its pattern, and the recordings it is tried on
KINDS = {
    "fan creep": ("deviant", "overheating", ("i4", "t2")),
    "power brake": ("deviant", "power brake", ("i4", "t3")),
    "slowdown flaps": ("deviant", "throttling", ("b1", "t3")),
    "memory clock": ("deviant", "memory clock", ("i4",)),
    "ecc storm": ("fault", "ECC storm", ("t2",)),
    "uncorrectable": ("fault", "uncorrectable ECC", ("b1",)),
    "remap failure": ("fault", "remap failure", ("i4",)),
    "replays": ("deviant", "PCIe", ("t3",)),
    "hang": ("deviant", "hang", ("i4", "t2")),
    "10 % clock": ("deviant", "low SM clock", ("b1", "t2")),
}
TRIED = [(fault, name) for fault, (_, _, names) in KINDS.items() for name in names]


@pytest.mark.parametrize(("fault", "name"), TRIED)
def test_an_injected_fault_is_found_on_its_gpu_and_nothing_else(configure, fault, name):
    own = h100(name)
    values = life((own, ROUNDS), (own, 6 if fault == "fan creep" else ROUNDS))
    half = ROUNDS * len(own[TEMP])
    broken = inject(values, fault, FAULTY_GPU, half + 60)
    report = replayed(configure, broken, half, extra=[("hpc_job", "1")])
    assert {i["gpu_uuid"] for i in report["incidents"]} == {uuid("life", FAULTY_GPU)}
    kind, word, _ = KINDS[fault]
    assert report["incidents"][0]["kind"] == kind
    assert any(word in i["pattern"] for i in report["incidents"])
    hard = kind == "fault" and fault != "ecc storm"
    assert report["incidents"][0]["would_migrate"] is hard


@pytest.mark.parametrize("form", ["every 60 s", "no profiling metrics", "no model, no energy"])
@pytest.mark.parametrize("fault", ["ramp", "xid"])
def test_in_another_form_a_fault_is_still_found(configure, fault, form):
    values = life((h100("t2"), 2 * ROUNDS))
    half = len(values[TEMP]) // 2
    broken = inject(values, fault, FAULTY_GPU, half + 60)
    report = replayed(configure, broken, half, **FORMS[form])
    assert {i["gpu_uuid"] for i in report["incidents"]} == {uuid("life", FAULTY_GPU)}


def test_a_gpu_that_was_slow_all_through_the_learning_is_named_and_found(configure):
    own = inject(life((h100("t2"), 2 * ROUNDS)), "clock", FAULTY_GPU, 0)
    half = len(own[TEMP]) // 2
    source = Recorded()
    write_recording(source, "life", own, START_S, host="node-1", every_s=15)
    split_s, config = START_S + half, configure(15)
    learnt = history.learn(config, START_S, split_s, prometheus=source, save=False)
    (said,) = [text for text in learnt.skipped if "suspect" in text]
    assert uuid("life", FAULTY_GPU) in said
    report = replayed(configure, own, half)
    assert {i["gpu_uuid"] for i in report["incidents"]} == {uuid("life", FAULTY_GPU)}


def test_learning_says_so_where_no_gpu_tells_its_model(configure):
    source = Recorded()
    values = life((h100("t2"), ROUNDS))
    write_recording(source, "life", values, START_S, host="node-1", every_s=15, model="")
    learnt = history.learn(
        configure(15), START_S, START_S + len(values[TEMP]), prometheus=source, save=False
    )
    assert any("tell no model" in text for text in learnt.skipped)


def test_memory_of_an_h200_that_grows_hot_is_found(configure):
    labels, times, values = h200_series()
    at = 4000
    row = next(k for k, label in enumerate(labels) if label["__name__"] == HBM_TEMP)
    values[row] += np.round(10.0 * np.clip((times - at) / 300.0, 0.0, 1.0))
    source = Recorded()
    source.write(labels, START_S + times[::15], values[:, ::15])
    report = backtest(
        configure(15),
        START_S + 3600,
        START_S + times[-1],
        learn_start_s=START_S,
        learn_end_s=START_S + 3600,
        prometheus=source,
    )
    assert [i["evidence"][0]["metric"] for i in report["incidents"]] == ["mem_temp_c"]
