"""Texts of exporters, served to a real Prometheus, and what the daemon reads of each."""

import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import numpy as np
import pytest

from sentinel.core.domain import Presence
from sentinel.core.frame import Identity, Telemetry
from sentinel.data import load_catalog, load_models
from sentinel.edges.prometheus import Prometheus
from sentinel.lab import servers

CATALOG, LACKS = load_catalog(), load_models().lacks
WITHIN_S = 60.0


def target(name):
    """The value of `instance` of the target that serves the text of that name."""
    return f"{name.strip('_').replace('_', '-')}.test:9400"


@contextmanager
def _served(texts):
    class Exporter(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            with suppress(BrokenPipeError, ConnectionResetError):  # it ran into its timeout
                self.wfile.write(texts[self.path.rpartition("/")[2]])

        def log_message(self, *args):
            pass

    exporter = ThreadingHTTPServer(("127.0.0.1", 0), Exporter)
    exporter.daemon_threads = True
    Thread(target=exporter.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"127.0.0.1:{exporter.server_address[1]}"
    finally:
        exporter.shutdown()
        exporter.server_close()


@contextmanager
def scraped(texts, folder, labels=None):
    """URL of a Prometheus that scrapes every text {name: bytes}, each a target of its own.

    `labels` are more labels of a target {name: [labels, ...]}: one target for each of them.
    """
    with _served(texts) as address:
        targets = [
            {
                "targets": [address],
                "labels": {"__metrics_path__": f"/of/{name}", "instance": target(name), **more},
            }
            for name in texts
            for more in (labels or {}).get(name, [{}])
        ]
        configs = [{"job_name": "exporters", "static_configs": targets}]
        with servers.prometheus(folder, configs) as server:
            _wait_until_scraped_twice(server.url, len(targets))
            yield server.url


def frames_of(texts, folder, labels=None):
    """{name: frame} of every text, as `scraped` takes them."""
    with scraped(texts, folder, labels) as url:
        return {name: _read(url, name) for name in texts}


def _wait_until_scraped_twice(url, targets):
    end_s = time.monotonic() + WITHIN_S
    while time.monotonic() < end_s:
        samples = Prometheus(url, names=("up",)).pull(time.time(), window_s=60, deadline_s=10)
        good = samples.series[samples.values == 1.0]
        if (np.bincount(good, minlength=targets) >= 2).sum() >= targets:
            return
        time.sleep(0.5)
    pytest.fail(f"Prometheus did not scrape every target twice within {WITHIN_S:g} s")


def _read(url, name):
    """The frame of a target; read again where a busy machine let a scrape run into its timeout."""
    prometheus = Prometheus(url, selector=f'instance="{target(name)}"')
    end_s = time.monotonic() + WITHIN_S
    while True:
        telemetry = Telemetry(CATALOG, Identity(), lacks=LACKS)
        now = time.time()
        telemetry.add(prometheus.pull(now, window_s=60, deadline_s=10))
        frame = telemetry.frame(now)
        if (frame.presence == Presence.PRESENT).all() or time.monotonic() > end_s:
            return frame
        time.sleep(0.5)


def row_of(frame, index):
    """The row of the GPU with that index, or of the only one where `index` is None."""
    (row,) = (i for i, gpu in enumerate(frame.gpus) if index is None or gpu.index == index)
    return row


def assert_values(frame, row, values):
    """Each metric of `values` reads so; None: there is no such value."""
    for name, expected in values.items():
        read = frame.values[row, frame.metrics.index(name)]
        if expected is None:
            assert np.isnan(read), f"{name}: {read}"
        else:
            assert read == pytest.approx(expected), name
