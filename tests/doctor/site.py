"""Targets served on loopback to a real Prometheus: a site for the doctor to look at."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote

import pytest
import requests

from sentinel.lab import servers
from tests.doctor.fleets import Target

WITHIN_S = 60.0
NOBODY = {"route": {"receiver": "none"}, "receivers": [{"name": "none"}]}
SOMEBODY = {
    "route": {"receiver": "tickets", "routes": [
        {"matchers": ['severity="critical"'], "receiver": "pager"}]},
    "receivers": [
        {"name": "pager", "webhook_configs": [{"url": "http://127.0.0.1:9/page"}]},
        {"name": "tickets", "webhook_configs": [{"url": "http://127.0.0.1:9/ticket"}]},
    ],
}  # fmt: skip


@contextmanager
def exporters(jobs: Mapping[str, Sequence[Target]]) -> Iterator[str]:
    """The address of one server that answers for every target, by its path."""

    class Exporter(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            _, job, number = unquote(self.path).rsplit("/", 2)
            target = jobs[job][int(number)]
            if target.show is None:
                self.close_connection = True
                return
            time.sleep(target.delay_s)
            with suppress(BrokenPipeError, ConnectionResetError):  # it ran into its timeout
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.end_headers()
                self.wfile.write(target.text())

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Exporter)
    server.daemon_threads = True
    Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def scrape_configs(jobs: Mapping[str, Sequence[Target]], address: str) -> list[dict[str, Any]]:
    return [
        {
            "job_name": job,
            # a slow exporter is given time in which a busy machine does not show
            **({"scrape_interval": "4s", "scrape_timeout": "4s"} if _slow(targets) else {}),
            "static_configs": [
                {
                    "targets": [address],
                    "labels": {
                        "__metrics_path__": f"/of/{job}/{number}",
                        "instance": target.instance,
                        **target.labels,
                    },
                }
                for number, target in enumerate(targets)
            ],
        }
        for job, targets in jobs.items()
    ]


def _slow(targets: Sequence[Target]) -> bool:
    return any(target.delay_s for target in targets)


@contextmanager
def prometheus(
    jobs: Mapping[str, Sequence[Target]], folder: Path, **options: Any
) -> Iterator[servers.PrometheusServer]:
    """A Prometheus that has scraped every target of every job three times."""
    with exporters(jobs) as address:
        configs = scrape_configs(jobs, address)
        with servers.prometheus(folder, configs, **options) as server:
            wait_until_scraped(server.url, sum(map(len, jobs.values())))
            yield server


def wait_until_scraped(url: str, targets: int, times: int = 3) -> None:
    end_s = time.monotonic() + WITHIN_S
    if not targets:
        return
    query = f"count(count_over_time(up[1m]) >= {times})"
    while time.monotonic() < end_s:
        answer = requests.get(f"{url}/api/v1/query", params={"query": query}, timeout=10)
        result = answer.json()["data"]["result"]
        if result and int(result[0]["value"][1]) >= targets:
            return
        time.sleep(0.3)
    pytest.fail(f"not every target was scraped {times} times within {WITHIN_S:g} s")
