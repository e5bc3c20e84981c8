"""What servers really say when they refuse, and what becomes of it."""

import json

import pytest

from sentinel.edges.refusals import Reply, TooMuch, TooSlow, TooWide, page, refusal
from sentinel.errors import DependencyError

URL = "http://prometheus.test:9090"
OTHER = DependencyError  # neither to be asked for less, nor late


def told(text, kind="execution"):
    return json.dumps({"status": "error", "errorType": kind, "error": text}).encode()


CASES = [
    # Prometheus
    (422, "query processing would load too many samples into memory in query execution", TooMuch),
    (422, "expanding series: exceeded sample limit (50000000)", TooMuch),
    (503, "query timed out in expression evaluation", TooSlow),
    (503, "query was canceled in query execution", TooSlow),
    (400, 'invalid parameter "query": 1:17: parse error: unexpected "}" in label matching', OTHER),
    (400, 'invalid parameter "query": 1:9: parse error: too many series, {limit="x"}', OTHER),
    (422, "vector cannot contain metrics with the same labelset", OTHER),
    # VictoriaMetrics
    (422, "error when exporting data: cannot fetch data: error during search: cannot find metric "
     "names: the number of matching timeseries exceeds 5; either narrow down the search or "
     "increase -search.max* command-line flag values at vmselect", TooWide),
    (422, "the number of matching unique timeseries exceeds 300000; either narrow down the search "
     "or increase -search.maxUniqueTimeseries", TooWide),
    (422, "cannot select more than -search.maxSamplesPerQuery=1000000000 samples; possible "
     "solutions: increase the -search.maxSamplesPerQuery; reduce time range for the query; use "
     "more specific label filters in order to select fewer series", TooWide),
    (422, "too long query; got 17000 bytes; mustn't exceed `-search.maxQueryLen=16384` bytes",
     TooWide),
    (422, "not enough memory for processing 123456 data points across 4567 time series with 2 "
     "points in each time series", TooMuch),
    (422, "timeout exceeded during query execution: 10.000 seconds", TooSlow),
    (429, "couldn't start executing the request in 10.000 seconds, since "
     "-search.maxConcurrentRequests=4 concurrent requests are executed. Possible solutions: to "
     "reduce query load; to add more compute resources to the server; to increase "
     "-search.maxQueueDuration=10s; to increase -search.maxQueryDuration=30s", OTHER),
    (503, "error when exporting data: cannot fetch query results from vmstorage nodes: cannot dial "
     "storageNode vmstorage-2:8401: connection refused", OTHER),
    (422, 'error when executing query="{__name__=~\\"DCGM_FI_DEV_POWER_LIMIT|job_timeout\\"}[60s'
     "]\" for (time=1, step=300000): some new words", OTHER),
    (422, 'error when exporting data for query="{__name__=~\\"' + "|".join(["DCGM_FI_DEV_X"] * 90)
     + '\\"}": the number of matching timeseries exceeds 5; either narrow down', TooWide),
    # Thanos, with partial_response=false
    (422, "expanding series: proxy Series(): rpc error: code = ResourceExhausted desc = exceeded "
     "series limit: limit 100 violated (got 101)", TooWide),
    (422, "expanding series: rpc error: code = Unknown desc = fetch series for block: exceeded "
     "chunks limit: limit 2000 violated (got 2003)", TooWide),
    (422, "expanding series: exceeded bytes limit while fetching postings: limit 10 violated",
     TooMuch),
    (500, "rpc error: code = ResourceExhausted desc = grpc: received message larger than max "
     "(104857601 vs. 104857600)", TooMuch),
    # Cortex and Mimir
    (422, "the query hit the max number of series limit (limit: 100 series)", TooWide),
    (422, "the query hit the max number of chunks limit (limit: 2000000 chunks)", TooWide),
    (422, "the query hit the aggregated chunks size limit (limit: 4096 bytes)", TooWide),
    (422, "the query hit the aggregated data size limit (limit: 4096 bytes)", TooMuch),
    (422, "expanding series: the query exceeded the maximum number of series (limit: 3 series) "
     "(err-mimir-max-series-per-query). To adjust the related per-tenant limit, configure "
     "-querier.max-fetched-series-per-query, or contact your service administrator.", TooWide),
    (422, "the query exceeded the maximum number of chunks (limit: 10 chunks) "
     "(err-mimir-max-chunks-per-query).", TooWide),
    (422, "the query exceeded the maximum allowed estimated amount of memory consumed by a single "
     "query (limit: 1024 bytes) (err-mimir-max-estimated-memory-consumption-per-query).", TooMuch),
    (400, "the raw query size in bytes exceeds the limit (query size: 9000, limit: 4096) "
     "(err-mimir-max-query-expression-size-bytes).", TooWide),
    (422, "the query time range exceeds the limit (query length: 800h0m0s, limit: 768h0m0s)",
     TooMuch),
    (429, "too many outstanding requests", OTHER),
    (429, "the request has been rejected because the tenant exceeded the request rate limit, set "
     "to 10 requests/s across all distributors with a maximum allowed burst of 5 "
     "(err-mimir-tenant-max-request-rate).", OTHER),
    (500, "at least 2 live replicas required, could only find 1", OTHER),
    (504, "context deadline exceeded", TooSlow),
]  # fmt: skip


@pytest.mark.parametrize(("status", "text", "kind"), CASES, ids=lambda v: str(v)[:40])
def test_the_words_of_a_server_decide_what_is_done(status, text, kind):
    for body in (told(text), text.encode()):  # a proxy between may drop the JSON
        err = refusal(URL, Reply(status, body), 10.0)
        assert type(err) is kind
        assert URL in str(err)
        if kind is not TooSlow:
            assert text[:60] in str(err)
            assert text[-40:] in str(err)


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (Reply(401, b"Unauthorized"), "prometheus.token_file"),
        (Reply(403, b"<html><title>403 Forbidden</title></html>"), "prometheus.basic_auth"),
        (Reply(401, told("no org id", "")), '{"X-Scope-OrgID": "..."}'),
        (Reply(404, b"404 page not found"), "base URL"),
        (Reply(407, b"Proxy Authentication Required"), "HTTP 407"),
        (Reply(413, b"Request Entity Too Large"), "prometheus.split_by"),
        (Reply(414, b""), "HTTP 414"),
        (Reply(429, b"", {"retry-after": "30"}), "it asks to wait: 30 s"),
        (
            Reply(503, b"upstream", {"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}),
            "wait: Wed, 21 Oct",
        ),
        (Reply(500, b""), "no reason given"),
        (
            Reply(502, b"<html><head><title>502 Bad Gateway</title></head><body>x</body></html>"),
            "HTTP 502: 502 Bad Gateway;",
        ),
        (
            Reply(503, b"<html><body><h1>Down</h1>\n for  repair</body>"),
            "HTTP 503: Down for repair;",
        ),
        (Reply(500, b"\x1b[31mred\x07\xff" * 9), "HTTP 500: [31mred"),
        (Reply(200 + 99, b""), "HTTP 299"),
    ],
)
def test_every_refusal_says_what_to_do(reply, said):
    text = str(refusal(URL, reply, 10.0))
    assert said in text
    assert text.startswith(f"Prometheus at {URL}: ")
    assert text.isprintable()
    assert len(text) < 700


@pytest.mark.parametrize(
    ("location", "where"),
    [
        ("https://login.test/auth?state=s3cret#t0ken", "https://login.test/auth "),
        ("https://user:hunter2@login.test/x", "https://login.test/x "),
        ("/prometheus/api/v1/query", "/prometheus/api/v1/query "),
        ("", "nowhere "),
    ],
)
def test_a_redirect_names_where_to_without_its_secrets(location, where):
    text = str(refusal(URL, Reply(302, b"", {"location": location}), 10.0))
    assert f"redirects to {where}" in text
    assert "prometheus.url" in text
    assert not any(secret in text for secret in ("s3cret", "t0ken", "hunter2"))


def test_a_web_page_for_an_answer_is_told_by_its_title():
    text = str(page(URL, b"<!DOCTYPE html>\n<html><title>Sign in &amp; go</title>..."))
    assert "'Sign in & go'" in text
    assert "is prometheus.url its base URL?" in text
