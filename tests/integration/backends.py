"""The servers that the same tests run against, and an exporter that does as it is told."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread

from sentinel.lab import servers
from sentinel.lab.binaries import prometheus_of_release

TEMP, POWER = "DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_POWER_USAGE"


@dataclass(frozen=True)
class Backend:
    """`start(folder, scrape_configs, options)` gives a running server; the flags limit what one
    query may read, to some of a history of 48 series of 200 samples."""

    name: str
    start: Callable[..., servers.Server]
    few_samples: str
    few_series: tuple[str, ...] = ()


def _prometheus(own):
    def start(folder: Path, scrape_configs=(), options=()):
        program = prometheus_of_release(own=own)
        return servers.prometheus(folder, scrape_configs, program=program, options=options)

    return start


def _victoria_metrics(folder: Path, scrape_configs=(), options=()):
    return servers.victoria_metrics(folder, scrape_configs, options=options)


BACKENDS = [
    Backend("prometheus", _prometheus(False), "--query.max-samples=500"),
    Backend("prometheus-of-the-release", _prometheus(True), "--query.max-samples=500"),
    Backend(
        "victoria-metrics",
        _victoria_metrics,
        "-search.maxSamplesPerQuery=3300",  # it counts whole blocks, whatever the time span
        ("-search.maxExportSeries=20", "-search.maxUniqueTimeseries=20"),
    ),
]


class Exporter:
    """Hosts with GPUs, each host a target of its own.

    The temperature counts the scrapes of its host; `served_s[host, count]` is when it was said.
    """

    def __init__(self, hosts: dict[str, list[str]]):
        self.hosts = hosts
        self.gone: set[str] = set()  # GPUs
        self.dead: set[str] = set()  # hosts that answer 503
        self.work: dict[str, str] = {}  # job of a GPU, as a label
        self.more = ""  # lines that each host says besides
        self.served_s: dict[tuple[str, int], float] = {}
        self._count = dict.fromkeys(hosts, 0)
        self._lock = Lock()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                text = owner.text(self.path.split("/")[2])
                self.send_response(503 if text is None else 200)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.end_headers()
                self.wfile.write((text or "").encode())

            def log_message(self, *args):
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()

    def text(self, host: str) -> str | None:
        if host in self.dead:
            return None
        with self._lock:
            self._count[host] += 1
            count = self._count[host]
            self.served_s[host, count] = time.time()
        lines = [f"# TYPE {TEMP} gauge", f"# TYPE {POWER} gauge"]
        for index, uuid in enumerate(self.hosts[host]):
            labels = f'gpu="{index}",UUID="{uuid}",Hostname="{host}",modelName="NVIDIA H100"'
            if job := self.work.get(uuid):
                labels += f',hpc_job="{job}"'
            if uuid not in self.gone:
                lines += [f"{TEMP}{{{labels}}} {count}", f"{POWER}{{{labels}}} 300.5"]
        return "\n".join([*lines, self.more, ""])

    def scrape_configs(self):
        port = self._http.server_address[1]
        targets = [
            {
                "targets": [f"127.0.0.1:{port}"],
                "labels": {"__metrics_path__": f"/host/{host}", "instance": f"{host}:9400"},
            }
            for host in self.hosts
        ]
        return [{"job_name": "dcgm", "static_configs": targets}]

    def close(self):
        self._http.shutdown()
        self._http.server_close()
