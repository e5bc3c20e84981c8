"""The same assertions against every server that answers the query API and can be had.

Each is asked as it comes, with its defaults. VictoriaMetrics hides the newest 30 s from ordinary
queries by `-search.latencyOffset` and not from ours, which want raw samples; but it shows them
only some seconds after the scrape, and those of new series later still, unless asked anew.
"""

import time

import numpy as np
import pytest

from sentinel import history
from sentinel.config import Config
from sentinel.core.domain import Presence
from sentinel.core.frame import Identity, Telemetry
from sentinel.data import load_catalog
from sentinel.edges.prometheus import Prometheus, TooMuch
from sentinel.errors import DependencyError
from sentinel.lab.fleet import Fleet
from sentinel.lab.remote_write import RemoteWriter
from tests.integration.backends import BACKENDS, TEMP, Exporter

pytestmark = pytest.mark.integration

HOSTS = {"a": [f"GPU-a{n}" for n in range(4)], "b": [f"GPU-b{n}" for n in range(4)]}
INTERVAL_S = 1.0
# between a scrape and our reading it, where a server collects before it stores
BEHIND_S = 6.0
NOW = float(int(time.time()) // 60 * 60)
# a history off the whole seconds, to the millisecond
TIMES = NOW - 3600 + np.arange(200) * 15.007
NAMES = ("DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_GPU_UTIL", "up")
ODD = [
    'say "hi" \\ \u00fcn\u00ef \U0001f525',
    "a{b=~'c'}|d,e",
    "two\nlines",
    " spaces ",
]


@pytest.fixture(scope="module", params=BACKENDS, ids=lambda b: b.name)
def backend(request):
    return request.param


@pytest.fixture(scope="module")
def exporter():
    made = Exporter(HOSTS)
    quoted = [v.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") for v in ODD]
    lines = [f'odd:name_{n}{{label="{v}",empty=""}} {n}' for n, v in enumerate(quoted)]
    lines += ["odd:inf +Inf", "odd:less -Inf", "odd:nan NaN", "odd:small 1e-9", "odd:zero -0"]
    lines += ["odd:large 1e18", "odd:exact 0.1"]
    made.more = "\n".join(lines)
    yield made
    made.close()


@pytest.fixture(scope="module")
def scraped(backend, exporter, tmp_path_factory):
    """A server that scrapes the exporter, once it has each of its GPUs twice."""
    exporter.gone.clear()
    exporter.dead.clear()
    folder = tmp_path_factory.mktemp(backend.name)
    with backend.start(folder, exporter.scrape_configs()) as server:
        reader = Prometheus(server.url, names=(TEMP,))
        until = time.monotonic() + 60
        while time.monotonic() < until:
            samples = reader.pull(time.time(), window_s=30.0, deadline_s=10.0)
            counts = np.bincount(samples.series, minlength=8)
            if len(counts) == 8 and counts.min() >= 4:
                break
            time.sleep(0.2)
        else:
            pytest.fail(f"not scraped:\n{server.log_tail()}")
        yield server


@pytest.fixture(scope="module")
def stored(backend, tmp_path_factory):
    """A server with a history of 16 GPUs in it."""
    with backend.start(tmp_path_factory.mktemp(f"{backend.name}-stored")) as server:
        fill(server)
        yield server


def labels_of(gpus):
    return [
        {"__name__": name, "UUID": f"GPU-{g}", "gpu": str(g), "instance": "h:9400", "job": "dcgm"}
        for name in NAMES[:3]
        for g in range(gpus)
    ]


def fill(server, gpus=16):
    labels = labels_of(gpus)
    values = np.arange(len(labels) * len(TIMES), dtype=float).reshape(len(labels), -1)
    with RemoteWriter(server.url) as writer:
        writer.write(labels, TIMES, values)
    reader = Prometheus(server.url, names=NAMES)
    until = time.monotonic() + 30
    while time.monotonic() < until:  # a server may collect what is written before it is read
        pieces = reader.history(TIMES[0] - 1, NOW, slice_s=3600.0)
        if sum(len(piece.values) for piece in pieces) == len(labels) * len(TIMES):
            return
        time.sleep(0.1)
    pytest.fail("what was written cannot be read")


def pull(server, at_s=None, *, window_s=20.0, **options):
    prometheus = Prometheus(server.url, **options)
    return prometheus.pull(at_s or time.time(), window_s=window_s, deadline_s=10.0)


def by_series(samples):
    """{(name, UUID): [(time, value)]} in time order."""
    found = {}
    for place, at_s, value in zip(samples.series, samples.times_s, samples.values, strict=True):
        key = samples.keys[place]
        uuid = dict(key.labels).get("UUID", "")
        found.setdefault((key.name, uuid), []).append((float(at_s), float(value)))
    return {key: sorted(points) for key, points in found.items()}


# ---- scraped ----------------------------------------------------------------------------


@pytest.mark.parametrize("concurrency", [1, 2])
def test_every_scrape_comes_back_with_its_own_time(scraped, exporter, concurrency):
    at_s = time.time()
    samples = pull(scraped, at_s, concurrency=concurrency)
    assert not samples.partial
    assert samples.warnings == ()
    found = by_series(samples)
    for host, uuids in HOSTS.items():
        for uuid in uuids:
            points = found[TEMP, uuid]
            assert len(points) >= 4
            assert all(at_s - 20.0 < t <= at_s for t, _ in points)
            assert np.diff([v for _, v in points]).tolist() == [1.0] * (len(points) - 1)
            for t, count in points:  # of the scrape, not of the question
                assert abs(t - exporter.served_s[host, int(count)]) < 0.5
    ups = [points for (name, _), points in found.items() if name == "up"]
    assert {v for points in ups for _, v in points} == {1.0}


def test_nothing_new_is_hidden_and_age_is_true(scraped, exporter):
    telemetry = Telemetry(load_catalog(), Identity())
    reader = Prometheus(scraped.url)
    for _ in range(12):
        at_s = time.time()
        telemetry.add(reader.pull(at_s, window_s=20.0, deadline_s=10.0))
        frame = telemetry.frame(at_s)
        column = frame.metrics.index("temp_c")
        assert set(frame.presence) == {Presence.PRESENT}
        for row, gpu in enumerate(frame.gpus):
            age_s, count = frame.age_s[row, column], int(frame.values[row, column])
            said_s = exporter.served_s[gpu.node, count]
            assert abs(at_s - age_s - said_s) < 0.5
            assert age_s < INTERVAL_S + BEHIND_S
        time.sleep(0.37)


def test_labels_names_and_values_of_any_form_are_read(scraped):
    names = tuple(f"odd:name_{n}" for n in range(len(ODD)))
    rest = ("odd:inf", "odd:less", "odd:nan", "odd:small", "odd:zero", "odd:large", "odd:exact")
    samples = pull(scraped, names=names + rest, selector='{instance="a:9400"}')
    labels = {key.name: dict(key.labels) for key in samples.keys}
    assert [labels[name]["label"] for name in names] == ODD
    assert all("empty" not in labels[name] for name in names)
    values = {name: {v for _, v in points} for (name, _), points in by_series(samples).items()}
    assert values["odd:inf"] == {np.inf}
    assert values["odd:less"] == {-np.inf}
    assert values["odd:small"] == {1e-9}
    assert values["odd:zero"] == {0.0}
    assert values["odd:large"] == {1e18}
    assert values["odd:exact"] == {0.1}
    assert all(np.isnan(v) for v in values.get("odd:nan", ()))  # given, or left out


@pytest.mark.parametrize("value", ODD)
def test_a_selector_of_any_characters_selects(scraped, value):
    quoted = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    names = tuple(f"odd:name_{n}" for n in range(len(ODD)))
    samples = pull(scraped, names=names, selector=f'{{label="{quoted}"}}')
    assert {key.name for key in samples.keys} == {f"odd:name_{ODD.index(value)}"}


@pytest.mark.slow
def test_new_work_shows_its_gpu_at_once(scraped, exporter):
    """Its labels change, so its series are new ones: these must not be looked for in vain."""
    telemetry = Telemetry(load_catalog(), Identity())
    reader = Prometheus(scraped.url, concurrency=2)
    exporter.work["GPU-a1"] = f"job-{time.time():.0f}"
    behind_s, jobs = [], set()
    for _ in range(45):
        at_s = time.time()
        telemetry.add(reader.pull(at_s, window_s=20.0, deadline_s=10.0))
        frame = telemetry.frame(at_s)
        row = [gpu.uuid for gpu in frame.gpus].index("GPU-a1")
        behind_s.append(float(frame.last_seen_s.max() - frame.last_seen_s[row]))
        jobs.add(frame.workloads[row].id if frame.workloads[row] else None)
        time.sleep(0.2)
    assert exporter.work["GPU-a1"] in jobs
    assert max(behind_s) < 3.5, "a server that caches what a selector finds hides it for 10 s"


@pytest.mark.slow
def test_one_gpu_that_goes_is_vanished_within_two_scrapes_and_a_dead_host_is_silent(
    scraped, exporter
):
    """In one order, since the server scrapes on: first a GPU, then its neighbour's host."""
    telemetry = Telemetry(load_catalog(), Identity())
    reader = Prometheus(scraped.url)

    seen = []

    def look():
        at_s = time.time()
        telemetry.add(reader.pull(at_s, window_s=20.0, deadline_s=10.0))
        frame = telemetry.frame(at_s)
        last_s = dict(zip((gpu.uuid for gpu in frame.gpus), frame.last_seen_s, strict=True))
        presence = {
            gpu.uuid: Presence(p) for gpu, p in zip(frame.gpus, frame.presence, strict=True)
        }
        missed_s = max(last_s[u] for u in HOSTS["a"]) - last_s["GPU-a2"]
        seen.append((missed_s, presence["GPU-a2"]))
        return frame, presence

    def until(wanted, others):
        end = time.monotonic() + 40
        while time.monotonic() < end:
            frame, presence = look()
            if all(presence[uuid] == kind for uuid, kind in wanted.items()):
                return frame, presence
            assert all(presence[uuid] == Presence.PRESENT for uuid in others), presence
            time.sleep(0.1)
        pytest.fail(f"not within 40 s: {wanted}, but {presence}")

    all_uuids = {uuid for uuids in HOSTS.values() for uuid in uuids}
    until(dict.fromkeys(all_uuids, Presence.PRESENT), ())
    seen.clear()
    exporter.gone.add("GPU-a2")
    frame, presence = until({"GPU-a2": Presence.VANISHED}, all_uuids - {"GPU-a2"})
    assert {u for u, kind in presence.items() if kind != Presence.PRESENT} == {"GPU-a2"}
    rows = [gpu.uuid for gpu in frame.gpus]
    for missed_s, kind in seen:  # a server may show several scrapes at once
        assert (kind == Presence.VANISHED) == (missed_s > 1.5 * INTERVAL_S), seen

    exporter.dead.add("b")
    silent = dict.fromkeys(HOSTS["b"], Presence.HOST_SILENT)
    _, presence = until(silent, set(HOSTS["a"]) - {"GPU-a2"})
    for _ in range(10):  # and so it stays: nothing is taken for lost, nor for an old value
        time.sleep(0.3)
        frame, presence = look()
        assert {presence[u] for u in HOSTS["b"]} == {Presence.HOST_SILENT}
        assert presence["GPU-a2"] == Presence.VANISHED
    ages = [frame.age_s[r, frame.metrics.index("temp_c")] for r, u in enumerate(rows) if "b" in u]
    assert min(ages) > 3.0

    exporter.dead.clear()
    exporter.gone.clear()
    until(dict.fromkeys(all_uuids, Presence.PRESENT), set(HOSTS["a"]) - {"GPU-a2"})


# ---- stored -----------------------------------------------------------------------------


def whole_history(gpus=16):
    values = np.arange(3 * gpus * len(TIMES), dtype=float).reshape(3 * gpus, -1)
    return {
        (labels["__name__"], labels["UUID"]): [
            (round(t, 3), v) for t, v in zip(TIMES.tolist(), row, strict=True)
        ]
        for labels, row in zip(labels_of(gpus), values.tolist(), strict=True)
    }


def read_history(server, slice_s, *, start_s=None, end_s=NOW, **options):
    prometheus = Prometheus(server.url, names=NAMES, **options)
    found = {}
    begin = TIMES[0] - 0.001 if start_s is None else start_s
    for piece in prometheus.history(begin, end_s, slice_s=slice_s):
        assert not piece.partial
        for key, points in by_series(piece).items():
            found.setdefault(key, []).extend((round(t, 3), v) for t, v in points)
    return found


@pytest.mark.parametrize("slice_s", [600.0, 333.3333, 45.021, 1e6])
def test_slices_of_history_join_without_gap_or_overlap(stored, slice_s):
    assert read_history(stored, slice_s, concurrency=2) == whole_history()


def test_history_begins_after_its_start_and_holds_its_end(stored):
    start_s, end_s = round(TIMES[10], 3), round(TIMES[20], 3)
    found = read_history(stored, 45.021, start_s=start_s, end_s=end_s)
    assert {tuple(t for t, _ in points) for points in found.values()} == {
        tuple(round(t, 3) for t in TIMES[11:21])
    }


def test_a_window_has_its_upper_edge_and_not_its_lower(stored):
    at_s = round(TIMES[100], 3)
    samples = pull(stored, at_s, window_s=round(at_s - TIMES[98], 3), names=NAMES)
    assert sorted(set(np.round(samples.times_s, 3))) == [round(t, 3) for t in TIMES[99:101]]


def test_nothing_is_an_answer_too(stored):
    for at_s, selector in (
        (NOW - 86_400, ""),
        (NOW + 86_400, ""),
        (NOW - 3000, '{job="no-such-job"}'),
        (NOW - 3000, '{UUID=~"GPU-[a-z]+"}'),
    ):
        samples = pull(stored, at_s, selector=selector)
        assert (len(samples.values), samples.partial) == (0, False)


@pytest.mark.parametrize(
    "selector", ['{job=~"("}', '{job=="x"}', '{"}', "{job}", '{job="x" job="y"}']
)
@pytest.mark.parametrize("concurrency", [1, 2])
def test_a_wrong_selector_is_a_clear_error(stored, selector, concurrency):
    with pytest.raises(DependencyError, match=r"refuses the query: .*check prometheus.selector"):
        pull(stored, NOW - 3000, selector=selector, concurrency=concurrency)


def test_the_server_says_what_it_is(stored):
    assert isinstance(Prometheus(stored.url).build_info(), dict)


# ---- the server's limits ----------------------------------------------------------------


@pytest.fixture(scope="module")
def limited(backend, tmp_path_factory):
    """A server that lets one query read a little: the history has 48 series of 200 samples."""
    folder = tmp_path_factory.mktemp(f"{backend.name}-limited")
    with backend.start(folder, options=[backend.few_samples]) as server:
        big = [{"__name__": "big", "n": str(n)} for n in range(64)]
        with RemoteWriter(server.url) as writer:
            writer.write(big, TIMES, np.zeros((len(big), len(TIMES))))
        fill(server)
        yield server


@pytest.mark.parametrize("concurrency", [1, 2])
def test_history_beyond_the_limit_of_samples_comes_in_smaller_questions(limited, concurrency):
    assert read_history(limited, 1e6, concurrency=concurrency) == whole_history()


def test_a_pull_beyond_the_limit_of_samples_comes_in_smaller_questions(limited):
    at_s = round(TIMES[-1], 3) + 10.0
    reader = Prometheus(limited.url, names=NAMES)
    first, second = (reader.pull(at_s, window_s=400.0, deadline_s=10.0) for _ in range(2))
    for found in (by_series(first), by_series(second)):
        assert len(found) == 48
        assert {points[-1][0] for points in found.values()} == {round(TIMES[-1], 3)}


def test_what_no_smaller_question_answers_says_what_helps(limited):
    reader = Prometheus(limited.url, names=("big", "up"))
    with pytest.raises(TooMuch, match=r"amples.*prometheus\.split_by"):
        reader.pull(round(TIMES[-1], 3), window_s=3600.0, deadline_s=10.0)


def test_more_series_than_the_limit_come_by_name(backend, tmp_path):
    if not backend.few_series:
        return  # this one counts samples alone
    with backend.start(tmp_path, options=backend.few_series) as server:
        fill(server)
        assert read_history(server, 1e6) == whole_history()
        reader = Prometheus(server.url, names=NAMES)
        assert len(reader.pull(NOW - 3000, window_s=60.0, deadline_s=10.0).values) == 48 * 4


# ---- learning ---------------------------------------------------------------------------


def test_learning_reads_any_of_them(backend, tmp_path):
    end_s = NOW - 60.0
    fleet = Fleet(seed=3, hosts=2, gpus_per_host=8, start_s=end_s - 2400.0, load_s=30.0)
    with backend.start(tmp_path / "server") as server:
        with RemoteWriter(server.url) as writer:
            for block in fleet.history(end_s - 2400.0, end_s, 15.0):
                writer.write(block.labels, block.times_s, block.values)
        time.sleep(BEHIND_S)
        text = f"""
prometheus: {{url: "{server.url}", selector: '{{job="dcgm-exporter"}}'}}
state: {{dir: {tmp_path / "state"}}}
learn: {{slice_s: 600}}
"""
        config = Config.parse(text, tmp_path / "sentinel.yaml")
        report = history.learn(config, end_s - 2400.0, end_s)
    assert report.gpus == 16
    assert report.skipped == []
    assert report.rows > 16 * 20
    assert {row["model"] for row in report.cohorts} == {gpu.model for gpu in fleet.gpus}
