"""A large fleet is asked for in several queries that together are one answer, or none."""

import random
import socket
import threading
import time
from urllib.parse import urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sentinel.data import load_catalog
from sentinel.edges.parts import Part, whole
from sentinel.edges.prometheus import Prometheus, TooMuch, TooSlow, TooWide
from sentinel.errors import DependencyError
from tests.edges.query_server import AT_S, Held, Server, failure, hang, matrix

NAMES = tuple(f"metric_{n:02d}" for n in range(16))


def fleet(gpus, names=NAMES, times=(AT_S - 15, AT_S)):
    return [({"__name__": n, "gpu": str(g)}, list(times)) for n in names for g in range(gpus)]


def queries(server):
    return [form["query"] for _, _, form, _ in server.requests]


def series(samples):
    """{(name, gpu): [times]}"""
    found = {}
    for place, at_s in zip(samples.series, samples.times_s, strict=True):
        key = samples.keys[place]
        found.setdefault((key.name, dict(key.labels)["gpu"]), []).append(float(at_s))
    return found


def pull(prometheus, at_s=AT_S, **more):
    return prometheus.pull(at_s, **{"window_s": 60.0, "deadline_s": 10.0, **more})


@pytest.fixture
def server():
    running = Server()
    running.answer = Held(fleet(8))
    yield running
    running.close()


# ---- parts ------------------------------------------------------------------------------


@given(
    names=st.lists(st.text("abc_:", min_size=1), unique=True, min_size=1, max_size=40),
    split_by=st.lists(st.sampled_from(['{a="1"}', '{a="2"}', '{a!~"1|2"}']), unique=True),
    least=st.integers(1, 40),
    halvings=st.integers(0, 40),
    seed=st.integers(0, 1000),
)
def test_parts_are_disjoint_and_together_the_whole(names, split_by, least, halvings, seed):
    parts = whole(names, '{job="x"}', split_by, least=least)
    rng = random.Random(seed)
    assert len(parts) >= min(least, len(names))
    for _ in range(halvings):
        part = parts.pop(rng.randrange(len(parts)))
        parts += part.halves() or (part,)
    asked = sorted((name, part.matchers) for part in parts for name in part.names)
    wanted = [f'job="x",{each.strip("{}")}' for each in split_by] or ['job="x"']
    assert asked == sorted((name, matchers) for name in names for matchers in wanted)


@pytest.mark.parametrize(
    ("part", "query"),
    [
        (Part(("up",)), '{__name__=~"up"}[15s]'),
        (Part(("up", "a:b"), 'job="x",z!=""'), '{__name__=~"up|a:b",job="x",z!=""}[15s]'),
        # names that Prometheus 3 allows
        (Part(("gpu.temp", "{odd}|")), '{__name__=~"gpu\\\\.temp|\\\\{odd\\\\}\\\\|"}[15s]'),
        (Part(('say "hi"\\',)), '{__name__=~"say \\"hi\\"\\\\\\\\"}[15s]'),
    ],
)
def test_the_query_of_a_part(part, query):
    assert part.query(15.0) == query


# ---- several queries, one answer --------------------------------------------------------


@pytest.mark.parametrize("concurrency", [1, 2, 3, 16])
def test_the_answer_is_the_same_however_many_are_under_way(server, concurrency):
    prometheus = Prometheus(server.url, names=NAMES, concurrency=concurrency)
    samples = pull(prometheus)
    assert series(samples) == {(n, str(g)): [AT_S - 15, AT_S] for n in NAMES for g in range(8)}
    assert len(server.requests) == (1 if concurrency == 1 else min(16, 4 * concurrency))
    assert len(set(queries(server))) == len(server.requests)
    assert {form["time"] for _, _, form, _ in server.requests} == {f"{AT_S:.3f}"}
    again = pull(prometheus)
    assert again.keys is samples.keys
    assert len(again.keys) == 128


def test_no_more_queries_are_under_way_than_allowed(server):
    held, lock, now, most = server.answer, threading.Lock(), [0], [0]
    both = threading.Barrier(2)

    def answer(request):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        both.wait(10)  # the queries come in pairs, or never
        reply = held(request)
        with lock:
            now[0] -= 1
        return reply

    server.answer = answer
    pull(Prometheus(server.url, names=NAMES, concurrency=2))
    assert most[0] == 2


def test_one_failed_part_fails_the_pull(server):
    held = server.answer

    def answer(request):
        if "metric_03" in request.form["query"]:
            return 500, failure("disk on fire", "internal")
        return held(request)

    server.answer = answer
    with pytest.raises(DependencyError, match="disk on fire"):
        pull(Prometheus(server.url, names=NAMES, concurrency=2))


def test_one_partial_part_makes_the_whole_partial(server):
    held = server.answer

    def answer(request):
        status, body = held(request)
        if "metric_03" in request.form["query"]:
            body["warnings"] = ["store b is away"]
        return status, body

    server.answer = answer
    samples = pull(Prometheus(server.url, names=NAMES, concurrency=2))
    assert samples.partial
    assert samples.warnings == ("store b is away",)
    assert len(samples.values) == 256


def test_a_failed_part_ends_the_others_at_once(server):
    hung = hang(server)

    def answer(request):
        if "metric_00" in request.form["query"]:
            return 500, failure("disk on fire", "internal")
        return hung(request)

    server.answer = answer
    start = time.monotonic()
    with pytest.raises(DependencyError, match="disk on fire"):
        pull(Prometheus(server.url, names=NAMES, concurrency=2, timeout_s=30), deadline_s=30)
    assert time.monotonic() - start < 5


def test_one_deadline_is_over_all_parts(server):
    held = server.answer

    def answer(request):
        server.released.wait(0.3)  # each in time, all of them not
        return held(request)

    server.answer = answer
    start = time.monotonic()
    with pytest.raises(TooSlow, match=r"within 0\.8 s"):
        pull(Prometheus(server.url, names=NAMES, concurrency=2), deadline_s=0.8)
    assert time.monotonic() - start < 3


@pytest.mark.parametrize("concurrency", [1, 2])
def test_a_name_that_takes_for_ever_to_resolve_costs_no_more_than_the_deadline(
    server, concurrency, monkeypatch
):
    """The one phase of a request that no socket's end reaches."""
    resolve, first = socket.getaddrinfo, threading.Event()

    def slow(*args, **kwargs):
        if not first.is_set():
            server.released.wait(20)
        return resolve(*args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    prometheus = Prometheus(server.url, names=NAMES, concurrency=concurrency)
    start = time.monotonic()
    with pytest.raises(TooSlow, match=r"within 0\.3 s"):
        pull(prometheus, deadline_s=0.3)
    assert time.monotonic() - start < 5
    first.set()
    assert len(series(pull(prometheus))) == 128


def test_after_a_late_answer_the_next_pull_is_whole(server):
    held = server.answer
    prometheus = Prometheus(server.url, names=NAMES, concurrency=2)
    first = pull(prometheus)
    server.answer = hang(server)
    with pytest.raises(TooSlow):
        pull(prometheus, deadline_s=0.3)
    server.answer = held
    assert series(pull(prometheus)) == series(first)


def test_workers_are_gone_after_each_pull(server):
    before = threading.active_count()
    prometheus = Prometheus(server.url, names=NAMES, concurrency=4)
    for _ in range(10):
        pull(prometheus)
    until = time.monotonic() + 10
    while threading.active_count() > before + 8 and time.monotonic() < until:
        time.sleep(0.01)  # the server has a thread for each of four connections
    assert threading.active_count() <= before + 8
    clients = {headers["Host"] for _, _, _, headers in server.requests}
    assert len(clients) == 1


def test_selectors_of_the_user_split_the_fleet(server):
    halves = ['{gpu=~"[0-3]"}', '{gpu!~"[0-3]"}']
    prometheus = Prometheus(server.url, names=NAMES, split_by=halves)
    assert series(pull(prometheus)) == series(
        pull(Prometheus(server.url, names=NAMES, concurrency=2))
    )
    assert queries(server)[0].endswith(',gpu=~"[0-3]"}[60s]')


# ---- what is refused for its size -------------------------------------------------------


@pytest.mark.parametrize(
    "limit", [{"max_series": 24}, {"max_samples": 50}, {"max_series": 8, "max_samples": 16}]
)
def test_what_is_too_much_is_split_and_the_split_is_kept(server, limit):
    server.answer = Held(fleet(8), **limit)
    prometheus = Prometheus(server.url, names=NAMES)
    samples = pull(prometheus)
    assert len(series(samples)) == 128
    tries = len(server.requests)
    pull(prometheus)
    second = len(server.requests) - tries
    assert second < tries
    server.requests.clear()
    pull(prometheus)
    assert len(server.requests) == second, "nothing is refused any more"


def test_an_answer_over_the_byte_cap_is_asked_for_in_parts(server):
    server.answer = Held(fleet(60))
    prometheus = Prometheus(server.url, names=NAMES, max_bytes=1 << 15)
    assert len(series(pull(prometheus))) == 16 * 60


def test_one_metric_that_is_too_much_is_an_error_that_says_what_helps(server):
    server.answer = Held(fleet(8), max_series=7)
    prometheus = Prometheus(server.url, names=NAMES, concurrency=2)
    with pytest.raises(TooWide, match=r"exceeds 7; .*prometheus\.split_by"):
        pull(prometheus)
    helped = Prometheus(server.url, names=NAMES, split_by=['{gpu=~"[0-3]"}', '{gpu!~"[0-3]"}'])
    assert len(series(pull(helped))) == 128


def test_a_busy_server_is_not_asked_for_more(server):
    server.answer = lambda r: (429, b"too many outstanding requests", {"Retry-After": "7"})
    with pytest.raises(DependencyError, match=r"429.*wait: 7 s.*concurrency"):
        pull(Prometheus(server.url, names=NAMES))
    assert len(server.requests) == 1


# ---- history ----------------------------------------------------------------------------


@pytest.mark.parametrize("left_open", [True, False])
@pytest.mark.parametrize("concurrency", [1, 2])
@pytest.mark.parametrize(
    "limit", [{}, {"max_series": 20}, {"max_samples": 400}, {"max_series": 8, "max_samples": 60}]
)
def test_history_is_whole_whatever_the_limits(server, left_open, concurrency, limit):
    times = [AT_S + 10.0 * k for k in range(61)]
    server.answer = Held(fleet(4, times=times), left_open=left_open, **limit)
    prometheus = Prometheus(server.url, names=NAMES, concurrency=concurrency)
    read = {}
    for piece in prometheus.history(AT_S, AT_S + 600, slice_s=150.0):
        for key, found in series(piece).items():
            read.setdefault(key, []).extend(sorted(found))
    assert read == {(n, str(g)): times[1:] for n in NAMES for g in range(4)}


def test_history_of_more_samples_than_names_can_save_gives_up(server):
    names, times = NAMES[:4], [AT_S + k / 10 for k in range(600)]
    server.answer = Held(fleet(4, names, times), max_samples=10)
    prometheus = Prometheus(server.url, names=names)
    with pytest.raises(TooMuch, match="too many samples"):
        list(prometheus.history(AT_S, AT_S + 60, slice_s=60.0))


# ---- by GET -----------------------------------------------------------------------------


def test_a_proxy_that_wants_get_gets_urls_that_fit(server):
    names = tuple(load_catalog().sources)
    held = Held([({"__name__": name, "gpu": "0"}, [AT_S]) for name in names])
    server.answer = lambda r: (405, b"no") if r.command == "POST" else held(r)
    prometheus = Prometheus(server.url, names=names)
    assert len(series(pull(prometheus))) == len(names)
    lengths = [len(urlencode(form)) for method, _, form, _ in server.requests if method == "GET"]
    assert len(lengths) >= 2
    assert max(lengths) < 7000
    server.requests.clear()
    pull(prometheus)
    assert {method for method, *_ in server.requests} == {"GET"}


def test_a_selector_that_fits_no_url_says_so(server):
    server.answer = lambda r: (405, b"no") if r.command == "POST" else (200, matrix())
    hosts = "|".join(f"host-{n}" for n in range(2000))
    with pytest.raises(TooWide, match="only by GET"):
        pull(Prometheus(server.url, names=NAMES, selector=f'{{host=~"{hosts}"}}'))
