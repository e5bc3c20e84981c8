"""A loopback server that answers a query API's requests as a test tells it to."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

AT_S = 1_700_000_000.0


def matrix(*series, **more):
    """An answer of series given as (labels, [(time, value), ...])."""
    result = [{"metric": labels, "values": values} for labels, values in series]
    return {"status": "success", "data": {"resultType": "matrix", "result": result}, **more}


def failure(text, kind="execution"):
    return {"status": "error", "errorType": kind, "error": text}


class Server:
    """A loopback server; `answer(request)` gives (status, body) or handles the socket itself."""

    def __init__(self, tls=None):
        self.requests = []
        self.answer = lambda request: (200, matrix())
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def handle_any(self):
                split = urlsplit(self.path)
                body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
                form = {k: v[0] for k, v in parse_qs(body or split.query).items()}
                self.form, self.route = form, split.path
                owner.requests.append((self.command, split.path, form, dict(self.headers)))
                reply = owner.answer(self)
                if reply is None:
                    self.close_connection = True
                    return
                status, content, *more = reply
                text = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                for name, value in (more[0] if more else {}).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = handle_any

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.http.handle_error = lambda request, address: None  # a client that goes is no news
        scheme = "http" if tls is None else "https"
        if tls is not None:
            self.http.socket = tls.wrap_socket(
                self.http.socket, server_side=True, do_handshake_on_connect=False
            )
        self.url = f"{scheme}://127.0.0.1:{self.http.server_address[1]}"
        self.released = threading.Event()
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def close(self):
        self.released.set()
        self.http.shutdown()
        self.http.server_close()


def hang(server):
    def answer(request):
        server.released.wait(20)

    return answer


def drip_body(server):
    def answer(request):
        request.send_response(200)
        request.send_header("Content-Length", "1000000")
        request.end_headers()
        while not server.released.wait(0.05):
            request.wfile.write(b" ")

    return answer


def drip_chunks(server):
    def answer(request):
        request.send_response(200)
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        while not server.released.wait(0.05):
            request.wfile.write(b"1\r\n \r\n")

    return answer


def drip_headers(server):
    def answer(request):
        request.wfile.write(b"HTTP/1.1 200 OK\r\n")
        while not server.released.wait(0.05):
            request.wfile.write(b"X-Slow: y\r\n")

    return answer


def cut_short(server):
    def answer(request):
        request.send_response(200)
        request.send_header("Content-Length", "1000")
        request.end_headers()
        request.wfile.write(b'{"status":"success"')
        request.wfile.flush()
        request.connection.close()

    return answer


class Held:
    """Series that a server holds, and its limits: an `answer` for `Server`.

    Selects as PromQL does, as far as our queries go. `left_open`: as Prometheus 3 reads a range,
    without its lower edge; before, with it.
    """

    def __init__(self, series, *, max_series=None, max_samples=None, left_open=True):
        self.series = series  # [(labels, times)]
        self.max_series, self.max_samples, self.left_open = max_series, max_samples, left_open

    def __call__(self, request):
        inside, window = re.fullmatch(r"\{(.*)\}\[(.+)\]", request.form["query"]).groups()
        matchers = re.findall(r'(\w+)(=~|!~|!=|=)"((?:[^"\\]|\\.)*)"', inside)
        seconds = float(window[:-2]) / 1000 if window.endswith("ms") else float(window[:-1])
        end = float(request.form["time"])
        rows = []
        for labels, times in self.series:
            if all(_matches(labels.get(name, ""), *rest) for name, *rest in matchers):
                since = end - seconds
                found = [
                    [t, "1"] for t in times if (since < t or (since == t and not self.left_open))
                ]
                rows.append((labels, [point for point in found if point[0] <= end]))
        rows = [row for row in rows if row[1]]
        if self.max_series is not None and len(rows) > self.max_series:
            text = f"the number of matching timeseries exceeds {self.max_series}; either narrow"
            return 422, failure(f"{text} down the search or increase -search.max*", "422")
        if self.max_samples is not None and sum(len(r[1]) for r in rows) > self.max_samples:
            return 422, failure(
                "query processing would load too many samples into memory in query execution"
            )
        return 200, matrix(*rows)


def _matches(value, operator, pattern):
    pattern = pattern.replace("\\\\", "\\").replace('\\"', '"')
    if operator in ("=", "!="):
        return (value == pattern) == (operator == "=")
    return bool(re.fullmatch(pattern, value)) == (operator == "=~")
