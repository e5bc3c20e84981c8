"""Reading Prometheus from a server that misbehaves in every way servers do."""

import base64
import json
import time

import numpy as np
import pytest

from sentinel.core.frame import SeriesKey
from sentinel.edges.answers import Answers
from sentinel.edges.prometheus import Prometheus, TooMuch, TooSlow
from sentinel.errors import DependencyError
from tests.edges.query_server import (
    AT_S,
    Server,
    cut_short,
    drip_body,
    drip_chunks,
    drip_headers,
    failure,
    hang,
    matrix,
)


@pytest.fixture
def server():
    running = Server()
    yield running
    running.close()


def pull(server, *, window_s=60.0, deadline_s=5.0, **options):
    prometheus = Prometheus(server.url, names=("up", "DCGM_FI_DEV_GPU_TEMP"), **options)
    return prometheus.pull(AT_S, window_s=window_s, deadline_s=deadline_s)


# ---- what is asked and what comes back --------------------------------------------------


def test_one_query_asks_for_raw_samples_and_gets_flat_arrays(server):
    labels = {"__name__": "DCGM_FI_DEV_GPU_TEMP", "gpu": "0", "UUID": "GPU-a"}
    up = {"__name__": "up", "instance": "a"}
    server.answer = lambda r: (
        200,
        matrix((labels, [[AT_S - 15.25, "60"], [AT_S - 0.25, "61.5"]]), (up, [[AT_S, "1"]])),
    )
    samples = pull(server)
    (method, path, form, _), *more = server.requests
    assert (method, path, more) == ("POST", "/api/v1/query", [])
    assert form["query"] == '{__name__=~"up|DCGM_FI_DEV_GPU_TEMP"}[60s]'
    assert float(form["time"]) == AT_S
    assert form["timeout"] == "5s"
    assert list(samples.keys) == [
        SeriesKey("DCGM_FI_DEV_GPU_TEMP", (("UUID", "GPU-a"), ("gpu", "0"))),
        SeriesKey("up", (("instance", "a"),)),
    ]
    np.testing.assert_array_equal(samples.series, [0, 0, 1])
    np.testing.assert_array_equal(samples.times_s, [AT_S - 15.25, AT_S - 0.25, AT_S])
    np.testing.assert_array_equal(samples.values, [60, 61.5, 1])
    assert (samples.at_s, samples.partial, samples.warnings) == (AT_S, False, ())


@pytest.mark.parametrize(
    "selector", ['{job="dcgm"}', 'job="dcgm"', ' { job="dcgm" } ', 'job="dcgm",']
)
def test_the_selector_joins_the_query_with_or_without_braces(server, selector):
    pull(server, selector=selector, window_s=2.5)
    assert server.requests[0][2]["query"].endswith(',job="dcgm"}[2500ms]')


def test_every_metric_of_the_catalogue_is_asked_for(server):
    Prometheus(server.url).pull(AT_S, window_s=60, deadline_s=5)
    query = server.requests[0][2]["query"]
    for name in ("DCGM_FI_DEV_GPU_TEMP", "dcgm_gpu_temp", "nvidia_smi_gpu_info", "|up"):
        assert name in query


def test_keys_are_the_same_objects_in_every_answer(server):
    labels = {"__name__": "up", "instance": "a"}
    server.answer = lambda r: (200, matrix((labels, [[AT_S, "1"]])))
    prometheus = Prometheus(server.url, names=("up",))
    first = prometheus.pull(AT_S, window_s=60, deadline_s=5)
    second = prometheus.pull(AT_S + 15, window_s=60, deadline_s=5)
    assert first.keys is second.keys
    assert len(first.keys) == 1


def test_an_empty_answer_is_valid(server):
    samples = pull(server)
    assert len(samples.values) == len(samples.series) == len(samples.times_s) == 0


def test_credentials_and_headers_reach_the_server(server):
    pull(server, basic_auth=("sentinel", "pass:word"), headers={"X-Scope-OrgID": "gpu"})
    headers = server.requests[0][3]
    assert base64.b64decode(headers["Authorization"].split()[1]) == b"sentinel:pass:word"
    assert headers["X-Scope-OrgID"] == "gpu"


def test_a_token_is_not_replaced_by_a_netrc_line(server, tmp_path, monkeypatch):
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login someone password else\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    pull(server, headers={"Authorization": "Bearer t0ken"})
    assert server.requests[0][3]["Authorization"] == "Bearer t0ken"


def test_a_proxy_that_lets_only_get_through_is_asked_by_get(server):
    server.answer = lambda r: (405, b"no") if r.command == "POST" else (200, matrix())
    prometheus = Prometheus(server.url, names=("up",))
    for _ in range(2):
        prometheus.pull(AT_S, window_s=60, deadline_s=5)
    assert [r[0] for r in server.requests] == ["POST", "GET", "GET"]
    assert server.requests[1][2]["query"] == '{__name__=~"up"}[60s]'


@pytest.mark.parametrize(
    ("more", "partial"),
    [
        ({"isPartial": True}, True),
        ({"warnings": ["no store matched: store-b is unavailable"]}, True),
        ({"warnings": ["PromQL warning: metric might not be a counter"]}, False),
        ({"infos": ["PromQL info: something"]}, False),
        ({"stats": {"seriesFetched": "2"}}, False),  # as VictoriaMetrics adds
    ],
)
def test_an_answer_in_part_says_so(server, more, partial):
    server.answer = lambda r: (200, matrix(({"__name__": "up"}, [[AT_S, "1"]]), **more))
    samples = pull(server)
    assert samples.partial is partial
    assert samples.warnings == tuple(more.get("warnings", ()))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([[1700000000, "5"]], [5.0]),  # VictoriaMetrics writes whole seconds
        ([[AT_S, "NaN"], [AT_S + 1, "2"]], [np.nan, 2.0]),
        ([[AT_S, "+Inf"], [AT_S + 1, "-Inf"], [AT_S + 2, "3"]], [np.inf, -np.inf, 3.0]),
        ([[AT_S, "1e3"]], [1000.0]),
        ([], []),
    ],
)
def test_every_way_to_write_a_number_is_read(server, values, expected):
    server.answer = lambda r: (200, matrix(({"__name__": "up"}, values)))
    np.testing.assert_array_equal(pull(server).values, expected)


def test_histograms_in_an_answer_are_passed_over(server):
    row = {"metric": {"__name__": "h"}, "histograms": [[AT_S, {"count": "1"}]]}
    body = matrix(({"__name__": "up"}, [[AT_S, "1"]]))
    body["data"]["result"].append(row)
    server.answer = lambda r: (200, body)
    assert list(pull(server).values) == [1.0]


# ---- what goes wrong --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (400, failure('parse error: unexpected "}"', "bad_data"), "prometheus.selector"),
        (401, b"Unauthorized", "prometheus.token_file"),
        (404, b"404 page not found", "base URL"),
        (422, failure("query processing would load too many samples into memory"), "narrow"),
        (422, failure("some execution error"), "some execution error"),
        (503, failure("query timed out in expression evaluation", "timeout"), "no complete answer"),
        (503, b"Service Unavailable", "HTTP 503"),
        (502, b"<html>bad gateway</html>", "HTTP 502"),
        (200, failure("nonsense"), "nonsense"),
        (200, b"<!doctype html><html>login</html>", "is prometheus.url its base URL?"),
        (200, b"", "not JSON"),
        (200, b'{"status":"success","data":{"result":[{"metric"', "not JSON"),
        (200, {"status": "success", "data": {"result": [[1, 2]]}}, "query API"),
        (200, {"hello": "world"}, "query API"),
    ],
)
def test_an_error_says_what_to_do(server, status, body, said):
    server.answer = lambda r: (status, body)
    with pytest.raises(DependencyError) as error:
        pull(server)
    assert said in str(error.value)
    assert server.url in str(error.value)


def test_a_forbidden_query_is_tried_by_get_before_it_is_an_error(server):
    server.answer = lambda r: (403, b"forbidden")
    with pytest.raises(DependencyError, match="refuses our credentials"):
        pull(server)
    assert [r[0] for r in server.requests] == ["POST", "GET"]


def test_nothing_listens():
    with pytest.raises(DependencyError, match=r"cannot be reached .*refused") as error:
        Prometheus("http://127.0.0.1:9", names=("up",)).pull(AT_S, window_s=60, deadline_s=2)
    assert "prometheus.url" in str(error.value)


def test_a_host_that_does_not_exist():
    with pytest.raises(DependencyError, match="cannot be reached"):
        Prometheus("http://no.such.host.invalid", names=("up",)).pull(
            AT_S, window_s=60, deadline_s=5
        )


def test_tls_to_a_server_that_speaks_none(server):
    with pytest.raises(DependencyError):
        Prometheus(server.url.replace("http", "https"), names=("up",)).pull(
            AT_S, window_s=60, deadline_s=2
        )


def test_a_password_is_in_no_error(server):
    server.answer = lambda r: (401, b"Unauthorized")
    with pytest.raises(DependencyError) as error:
        pull(server, basic_auth=("user", "hunter2"))
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize("misbehave", [hang, drip_body, drip_chunks, drip_headers])
def test_whatever_a_server_does_the_request_ends_by_its_deadline(server, misbehave):
    server.answer = misbehave(server)
    start = time.monotonic()
    with pytest.raises(TooSlow, match=r"within 0\.5 s"):
        pull(server, deadline_s=0.5)
    assert 0.3 < time.monotonic() - start < 1.5


def test_the_shorter_of_deadline_and_timeout_holds(server):
    server.answer = hang(server)
    start = time.monotonic()
    with pytest.raises(TooSlow):
        pull(server, deadline_s=30.0, timeout_s=0.4)
    assert time.monotonic() - start < 1.5


def test_a_body_that_is_cut_short_is_an_error(server):
    server.answer = cut_short(server)
    with pytest.raises(DependencyError):
        pull(server, deadline_s=2.0)


def test_a_connection_lives_on_after_a_slow_one(server):
    prometheus = Prometheus(server.url, names=("up",))
    prometheus.pull(AT_S, window_s=60, deadline_s=5)
    server.answer = hang(server)
    with pytest.raises(TooSlow):
        prometheus.pull(AT_S, window_s=60, deadline_s=0.3)
    server.answer = lambda r: (200, matrix())
    prometheus.pull(AT_S, window_s=60, deadline_s=5)


def test_a_huge_body_is_read_no_further_than_the_cap(server):
    sent = []

    def flood(request):
        request.send_response(200)
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        piece = b" " * 65536
        try:
            while len(sent) < 1000:
                request.wfile.write(b"10000\r\n" + piece + b"\r\n")
                sent.append(1)
        except OSError:
            pass

    server.answer = flood
    with pytest.raises(TooMuch, match="max_bytes"):
        pull(server, max_bytes=1 << 20)
    assert len(sent) < 500


# ---- history ----------------------------------------------------------------------------


def stored(times):
    """A server that holds one series at these times, and answers left-closed like 2.x."""

    def answer(request):
        window = request.form["query"].rpartition("[")[2].removesuffix("]")
        seconds = float(window[:-2]) / 1000 if window.endswith("ms") else float(window[:-1])
        end = float(request.form["time"])
        inside = [[t, "1"] for t in times if end - seconds <= t <= end]
        return 200, matrix(({"__name__": "up"}, inside)) if inside else matrix()

    return answer


@pytest.mark.parametrize("slice_s", [30.0, 33.3333, 100.0, 1e6])
@pytest.mark.parametrize("start_s", [0.0, 0.0004])
def test_history_joins_without_gap_or_overlap(server, slice_s, start_s):
    times = [round(AT_S + t * 1.001, 3) for t in range(100)]
    server.answer = stored(times)
    start = AT_S + 10 + start_s
    pieces = list(Prometheus(server.url, names=("up",)).history(start, AT_S + 90, slice_s=slice_s))
    read = [t for piece in pieces for t in piece.times_s]
    assert read == [t for t in times if start < t <= AT_S + 90]
    assert all((piece.times_s <= piece.at_s).all() for piece in pieces)
    assert [p.at_s for p in pieces] == sorted(p.at_s for p in pieces)


def test_history_asks_for_less_where_an_answer_is_too_much(server):
    times = [AT_S + t for t in range(0, 3600, 10)]
    honest = stored(times)

    def answer(request):
        window = request.form["query"].rpartition("[")[2]
        seconds = float(window.removesuffix("]").removesuffix("s"))
        if seconds > 1000:
            return 422, failure("query processing would load too many samples into memory")
        return honest(request)

    server.answer = answer
    pieces = list(Prometheus(server.url, names=("up",)).history(AT_S, AT_S + 3600, slice_s=3600))
    assert sum(len(p.values) for p in pieces) == len(times) - 1
    # once found, the shorter slice is kept
    assert len(server.requests) == 2 + 4


def test_history_halves_at_the_byte_cap_and_gives_up_in_the_end(server):
    server.answer = lambda r: (200, b" " * 100_000)
    prometheus = Prometheus(server.url, names=("up",), max_bytes=65_536)
    with pytest.raises(TooMuch):
        list(prometheus.history(AT_S, AT_S + 64, slice_s=64))
    assert 3 < len(server.requests) < 20


def test_a_hung_server_does_not_hold_history_for_hours(server):
    server.answer = hang(server)
    prometheus = Prometheus(server.url, names=("up",), timeout_s=0.2)
    start = time.monotonic()
    with pytest.raises(TooSlow):
        list(prometheus.history(AT_S, AT_S + 86_400, slice_s=86_400))
    assert time.monotonic() - start < 3


def test_an_error_in_history_is_told_at_once(server):
    server.answer = lambda r: (401, b"")
    with pytest.raises(DependencyError, match="credentials"):
        list(Prometheus(server.url, names=("up",)).history(AT_S, AT_S + 60, slice_s=60))
    assert len(server.requests) == 1


# ---- the rest ---------------------------------------------------------------------------


def test_build_info_tells_what_answers(server):
    server.answer = lambda r: (200, {"status": "success", "data": {"version": "2.53.3"}})
    assert Prometheus(server.url).build_info() == {"version": "2.53.3"}
    assert server.requests[0][:2] == ("GET", "/api/v1/status/buildinfo")
    server.answer = lambda r: (200, {"status": "success"})  # VictoriaMetrics has only a stub
    assert Prometheus(server.url).build_info() == {}
    server.answer = lambda r: (200, b"<html>")
    with pytest.raises(DependencyError, match="base URL"):
        Prometheus(server.url).build_info()


def test_series_unseen_for_a_day_are_forgotten():
    answers = Answers()

    def body(*instances):
        rows = [({"__name__": "up", "instance": i}, [[AT_S, "1"]]) for i in instances]
        return json.dumps(matrix(*rows)).encode()

    first = answers.decode(body("a", "b"), AT_S)
    assert answers.decode(body("b"), AT_S + 80_000).keys is first.keys
    later = answers.decode(body("b", "c"), AT_S + 90_000)
    assert [dict(k.labels)["instance"] for k in later.keys] == ["b", "c"]
    assert list(later.series) == [0, 1]
    assert [dict(k.labels)["instance"] for k in first.keys] == ["a", "b"]  # still what it was
