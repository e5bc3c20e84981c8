"""What answers beside Prometheus 2: the forms of others, and answers in part, on loopback.

Real Prometheus 2 and VictoriaMetrics are in tests/integration/test_backends.py.
"""

import gzip
import json

import numpy as np
import pytest

from sentinel.core.domain import Presence
from sentinel.core.frame import Identity, SeriesKey, Telemetry
from sentinel.data import load_catalog
from sentinel.edges.connection import wants_gzip
from sentinel.edges.prometheus import Prometheus
from sentinel.errors import DependencyError
from tests.edges.query_server import AT_S, Held, Server, failure, matrix

UP = ({"__name__": "up", "instance": "a"}, [[AT_S, "1"]])


@pytest.fixture
def server():
    running = Server()
    yield running
    running.close()


def pull(server, **options):
    prometheus = Prometheus(server.url, **{"names": ("up",), **options})
    return prometheus.pull(AT_S, window_s=60.0, deadline_s=5.0)


# ---- Prometheus 3 -----------------------------------------------------------------------


def test_a_left_open_range_gives_the_same_as_a_closed_one(server):
    times = [AT_S - 60, AT_S - 45, AT_S]  # the first lies on the edge
    seen = []
    for left_open in (True, False):
        server.answer = Held([({"__name__": "up"}, times)], left_open=left_open)
        seen.append(list(pull(server).times_s))
    assert seen == [[AT_S - 45, AT_S]] * 2


def test_metric_and_label_names_of_any_characters_are_read(server):
    labels = {"__name__": "gpu.temp °C", "k8s.pod/name": 'a "b"\n', "ünï": "\\ \U0001f525"}
    server.answer = lambda r: (200, matrix((labels, [[AT_S, "61"]])))
    samples = pull(server, names=("gpu.temp °C",), selector='{"k8s.pod/name"!=""}')
    assert server.requests[0][2]["query"] == (
        '{__name__=~"gpu\\\\.temp °C","k8s.pod/name"!=""}[60s]'
    )
    rest = tuple(sorted((k, v) for k, v in labels.items() if k != "__name__"))
    assert list(samples.keys) == [SeriesKey("gpu.temp °C", rest)]


def test_a_success_of_prometheus_3_is_read(server):
    body = matrix(UP, warnings=[], infos=["PromQL info: metric might not be a counter"])
    body["data"]["result"].append(
        {"metric": {"__name__": "h"}, "histograms": [[AT_S, {"count": "1", "buckets": []}]]}
    )
    server.answer = lambda r: (200, body)
    samples = pull(server)
    assert (list(samples.values), samples.partial) == ([1.0], False)


def test_the_limit_of_samples_of_prometheus_3_becomes_smaller_questions(server):
    # its default counts the samples of a range selector as version 2 does, with the same words
    series = [({"__name__": f"m{n}"}, [AT_S - 1, AT_S]) for n in range(8)]
    server.answer = Held(series, max_samples=4)
    samples = pull(server, names=tuple(f"m{n}" for n in range(8)))
    assert len(samples.values) == 16


# ---- VictoriaMetrics --------------------------------------------------------------------


@pytest.mark.parametrize(
    "header", [{"X-Server-Hostname": "vm"}, {"Content-Type": "application/stream+json; charset=x"}]
)
def test_a_server_that_remembers_selectors_is_never_asked_the_same_twice(server, header):
    server.answer = lambda r: (200, matrix(UP), header)
    now = [AT_S]
    prometheus = Prometheus(server.url, names=("up",), selector='job="x"', clock=lambda: now[0])
    for _ in range(3):
        prometheus.pull(AT_S - 1000, window_s=60.0, deadline_s=5.0)
        now[0] += 15
    queries = [form["query"] for _, _, form, _ in server.requests]
    assert queries[0] == '{__name__=~"up",job="x"}[60s]', "and at once again as it must be"
    assert queries[1:] == [
        f'{{__name__=~"up",job="x",sentinel_asked_at!="{AT_S + 15 * tick:.3f}"}}[60s]'
        for tick in (0, 1, 2)
    ]


def test_what_it_may_still_show_out_of_order_is_left_for_the_next_tick(server):
    held = Held([({"__name__": "up"}, [AT_S - 30 + k for k in range(61)])])
    server.answer = lambda r: (*held(r), {"X-Server-Hostname": "vm"})
    prometheus = Prometheus(server.url, names=("up",), clock=lambda: AT_S + 3)
    for tick in range(4):
        samples = prometheus.pull(AT_S + tick, window_s=20.0, deadline_s=5.0)
        assert samples.at_s == AT_S + tick
    assert (samples.times_s.min(), samples.times_s.max()) == (AT_S - 21, AT_S - 2)
    past = prometheus.pull(AT_S - 10, window_s=20.0, deadline_s=5.0)
    assert past.times_s.max() == AT_S - 10, "what is past has settled"


def test_others_are_asked_as_ever(server):
    prometheus = Prometheus(server.url, names=("up",))
    for tick in range(3):
        prometheus.pull(AT_S + 15 * tick, window_s=60.0, deadline_s=5.0)
    assert {form["query"] for _, _, form, _ in server.requests} == {'{__name__=~"up"}[60s]'}


# ---- in part ----------------------------------------------------------------------------

LOST_STORE = (
    'receive series from Addr: 10.1.0.7:10901 LabelSets: {cluster="a"} MinTime: 1699990000000 '
    "MaxTime: 9223372036854775807: rpc error: code = Unavailable desc = error reading from server"
)
PARTIAL = [
    {"warnings": [LOST_STORE]},
    {"warnings": ["No StoreAPIs matched for this query"]},
    {"warnings": ['fetch series for {cluster="b"} Addr: b:10901: context deadline exceeded']},
    {"warnings": ["exceeded series limit: limit 100 violated (got 101)"]},
    {"warnings": ["results truncated due to limit"]},
    {"warnings": ["Query result may contain partial data."]},
    {"warnings": ["remote_read: remote server http://b/read returned HTTP status 503"]},
    {"warnings": ["PromQL info: harmless", "2 more warning annotations omitted"]},
    {"infos": ["results truncated due to limit"]},
    {"isPartial": True},
    {"isPartial": True, "stats": {"seriesFetched": "1"}},
    {"isPartial": "true"},
]
WHOLE = [
    {},
    {"warnings": None},
    {"warnings": [], "infos": []},
    {"isPartial": False},
    {"stats": {"seriesFetched": "1", "executionTimeMsec": 3}, "trace": {"message": "x"}},
    {"analysis": {"name": "x"}, "isPartial": False},
    {"warnings": ['PromQL info: metric might not be a counter: "partial_limit" (1:1)']},
    {"warnings": ["PromQL warning: encountered a mix of histograms and floats for metric name"]},
    {"infos": ["PromQL info: input to histogram_quantile needed to be fixed for monotonicity"]},
    {"infos": ["served from cache"]},
]


@pytest.mark.parametrize("more", PARTIAL, ids=str)
def test_what_is_in_part_is_never_taken_as_whole(server, more):
    server.answer = lambda r: (200, matrix(UP, **more))
    samples = pull(server)
    assert samples.partial
    wanted = more.get("warnings") or more.get("infos") or []
    assert set(wanted) == set(samples.warnings)


@pytest.mark.parametrize("more", WHOLE, ids=str)
def test_what_is_harmless_never_makes_a_tick_partial(server, more):
    server.answer = lambda r: (200, matrix(UP, **more))
    assert not pull(server).partial


def test_a_gpu_that_a_lost_store_held_is_not_taken_for_vanished(server):
    def series(gpus, *ticks):
        return [
            (
                {"__name__": "DCGM_FI_DEV_GPU_TEMP", "UUID": f"GPU-{g}", "gpu": str(g),
                 "Hostname": "a", "instance": "a:9400", "job": "dcgm"},
                [AT_S + 15 * t for t in ticks],
            )
            for g in gpus
        ]  # fmt: skip

    telemetry = Telemetry(load_catalog(), Identity())
    server.answer, rest = Held(series((0, 1), *range(8))), Held(series((0,), *range(12)))
    prometheus = Prometheus(server.url)
    seen = {}
    for tick in range(12):
        at_s = AT_S + 15 * tick + 1
        if tick == 8:
            server.answer = lambda r: (200, {**rest(r)[1], "warnings": [LOST_STORE]})
        if tick == 11:
            server.answer = rest
        telemetry.add(prometheus.pull(at_s, window_s=60.0, deadline_s=5.0))
        frame = telemetry.frame(at_s)
        rows = [gpu.uuid for gpu in frame.gpus]
        seen[tick] = Presence(frame.presence[rows.index("GPU-1")])
        assert frame.coverage.partial == (8 <= tick < 11)
    assert seen[7] == Presence.PRESENT
    assert seen[10] == Presence.HOST_SILENT, "nothing is known of it"
    assert seen[11] == Presence.VANISHED, "said in full"


@pytest.mark.parametrize(
    ("params", "sent"),
    [
        ({}, {}),
        ({"dedup": "false", "partial_response": "false"},) * 2,
        ({"deny_partial_response": "1"},) * 2,
    ],
)
def test_parameters_of_the_user_go_with_every_query(server, params, sent):
    pull(server, params=params, names=("a", "b"), concurrency=2)
    for _, _, form, _ in server.requests:
        assert {k: v for k, v in form.items() if k not in ("query", "time", "timeout")} == sent


# ---- no answer at all -------------------------------------------------------------------


def chunked(*pieces, end=b""):
    def answer(request):
        request.send_response(200)
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        for piece in pieces:
            request.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        request.wfile.write(end)
        request.wfile.flush()
        request.connection.close()

    return answer


WHOLE_BODY = json.dumps(matrix(UP)).encode()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda r: (302, b"", {"Location": "https://login.test/x?rd=t0ken"}), "redirects to https"),
        (lambda r: (307, b"", {"Location": "/elsewhere"}), "redirects to /elsewhere"),
        (lambda r: (200, b"<!doctype html><title>Sign in</title>"), "a web page ('Sign in')"),
        (lambda r: (200, b"\n <html>"), "a web page"),
        (lambda r: (200, b""), "(empty)"),
        (lambda r: (204, b""), "HTTP 204"),
        (lambda r: (200, b"null"), "query API"),
        (lambda r: (200, {"status": "success"}), "holds nothing"),
        (lambda r: (200, {"status": "success", "data": {"resultType": "scalar"}}), "scalar"),
        (lambda r: (200, WHOLE_BODY[:-9]), "not JSON"),
        (lambda r: (200, WHOLE_BODY + failure("and then")["error"].encode()), "not JSON"),
        (lambda r: (200, matrix(UP, warnings="all")), "query API"),
        (chunked(WHOLE_BODY[:20]), "request failed"),  # and not another word
        (chunked(WHOLE_BODY[:20], end=b"0\r\n\r\n"), "not JSON"),
        (chunked(end=b"ffff\r\nxx"), "request failed"),
        (
            lambda r: (200, gzip.compress(WHOLE_BODY)[:-20], {"Content-Encoding": "gzip"}),
            "not JSON",
        ),
        (lambda r: (200, b"nonsense", {"Content-Encoding": "gzip"}), "request failed"),
    ],
)
def test_what_is_no_answer_is_a_clear_error(server, answer, said):
    server.answer = answer
    with pytest.raises(DependencyError) as error:
        pull(server)
    assert said in str(error.value)
    assert server.url in str(error.value)
    assert "t0ken" not in str(error.value)
    assert len(server.requests) == 1


def test_an_answer_that_ends_in_chunks_is_whole(server):
    server.answer = chunked(WHOLE_BODY[:7], WHOLE_BODY[7:], end=b"0\r\n\r\n")
    assert list(pull(server).values) == [1.0]


def test_no_result_at_all_is_an_empty_answer(server):
    server.answer = lambda r: (200, {"status": "success", "data": {"resultType": "matrix",
                                                                   "result": None}})  # fmt: skip
    assert len(pull(server).values) == 0


# ---- compression ------------------------------------------------------------------------


@pytest.mark.parametrize("on", [True, False])
def test_answers_are_compressed_only_where_it_is_wanted(server, on):
    def answer(request):
        if "gzip" in request.headers["Accept-Encoding"]:
            return 200, gzip.compress(WHOLE_BODY), {"Content-Encoding": "gzip"}
        return 200, WHOLE_BODY

    server.answer = answer
    np.testing.assert_array_equal(pull(server, gzip=on).values, [1.0])
    assert server.requests[0][3]["Accept-Encoding"] == ("gzip" if on else "identity")


@pytest.mark.parametrize(
    ("url", "ca_file", "on"),
    [
        ("https://prometheus-eu.grafana.test", None, True),
        ("https://prometheus-eu.grafana.test", "ca.pem", False),
        ("http://prometheus-eu.grafana.test", None, False),
        ("https://8.8.8.8:9090", None, True),
        ("https://10.0.0.8:9090", None, False),
        ("https://127.0.0.1:9090", None, False),
        ("https://[::1]:9090", None, False),
        ("https://prometheus:9090", None, False),
        ("https://thanos-querier.monitoring.svc:9091", None, False),
        ("https://prometheus.corp.internal", None, False),
    ],
)
def test_compression_by_itself_is_for_servers_outside(url, ca_file, on):
    assert wants_gzip(url, ca_file) is on
