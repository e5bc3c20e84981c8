"""The stage of the demonstration: every program of a small site, each a process of its own.

A simulated fleet's exporter, Prometheus with that fleet's past, Alertmanager, a scheduler, a
receiver of alerts, and the daemon in mode act. They share nothing but HTTP and one secret.
"""

from __future__ import annotations

import base64
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Self

import requests
import yaml

from sentinel.errors import DependencyError
from sentinel.lab import servers
from sentinel.lab.exporter import scrape_configs

HISTORY_H: Final = 0.5
LEARN_WITHIN_S: Final = 180.0
TICK_S: Final = 1.0

Say = Callable[[str], None]


class Stage:
    """Starts everything in order and stops it in the opposite one. A context manager.

    `start` raises DependencyError, with the end of a log, when a part does not come up.
    """

    def __init__(self, folder: Path, *, seed: int = 1, say: Say = lambda text: None) -> None:
        self.folder = folder
        self.seed = seed
        self._say = say
        self._parts = ExitStack()
        self._http = requests.Session()
        self.urls: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._parts.close()
        self._http.close()

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._say("finding Prometheus and Alertmanager")
        servers.binaries()
        self._say("starting the exporter of 16 hosts with 8 GPUs each")
        seed = str(self.seed)
        exporter = self._module("exporter", lambda port: ["--port", str(port), "--seed", seed])
        self._say("starting Prometheus and Alertmanager")
        receiver = self._module("receiver", lambda port: ["--listen", f"127.0.0.1:{port}"])
        prometheus = servers.prometheus(self.folder / "prometheus")
        self._own(prometheus)
        alertmanager = servers.alertmanager(
            self.folder / "alertmanager", alertmanager_config(receiver.url)
        )
        self._own(alertmanager)
        self._say(f"writing {HISTORY_H * 60:.0f} minutes of the fleet's past into Prometheus")
        self._backfill(prometheus.url)
        prometheus.configure(
            scrape_configs=scrape_configs(exporter.port, self.get("exporter", "state")["hosts"]),
            scrape_interval_s=TICK_S,
        )
        self._write_secrets()
        self._say("starting the scheduler")
        self._module("scheduler", self._scheduler_flags)
        self._say("learning what normal looks like")
        config = self._write_config(servers.free_port())
        self._learn(config)
        self._say("starting the daemon")
        self._start_daemon(config)

    def get(self, part: str, path: str) -> Any:
        """JSON of a GET. Raises DependencyError on anything but a 2xx."""
        return self._ask("GET", part, path)

    def post(self, part: str, path: str, content: Any = None) -> Any:
        return self._ask("POST", part, path, content)

    def _ask(
        self, method: str, part: str, path: str, content: Any = None, timeout_s: float = 5.0
    ) -> Any:
        url = f"{self.urls[part]}/{path}"
        try:
            answer = self._http.request(method, url, json=content, timeout=timeout_s)
        except requests.RequestException as error:
            raise DependencyError(f"{part} at {url} does not answer: {error}") from error
        if not answer.ok:
            raise DependencyError(f"{part} at {url}: {answer.status_code} {answer.text[:300]}")
        return answer.json()

    def _own(self, server: servers.Server) -> servers.Server:
        self._parts.callback(server.stop)
        self.urls[server.name] = server.url
        return server

    def _module(self, name: str, flags: Callable[[int], Sequence[str]]) -> servers.Server:
        def argv(port: int) -> list[str]:
            return [sys.executable, "-m", f"sentinel.lab.{name}", *flags(port)]

        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        server = servers.Server(name, folder, argv, 0)
        self._parts.callback(server.stop)
        return self._own(server.start())

    def _backfill(self, prometheus_url: str) -> None:
        order = {
            "remote_write_url": f"{prometheus_url}/api/v1/write",
            "hours": HISTORY_H,
            "step_s": TICK_S,
        }
        done = self._ask("POST", "exporter", "backfill", order, timeout_s=120)
        self._say(f"{done['samples']:,} samples written")

    def _scheduler_flags(self, port: int) -> list[str]:
        return [
            "--listen",
            f"127.0.0.1:{port}",
            "--exporter",
            self.urls["exporter"],
            "--secret-file",
            str(self.folder / "hook.secret"),
            "--state",
            str(self.folder / "scheduler" / "state.sqlite"),
        ]

    def _write_secrets(self) -> None:
        key = base64.b64encode(secrets.token_bytes(24)).decode()
        _write_private(self.folder / "hook.secret", f"whsec_{key}")
        _write_private(self.folder / "api.token", secrets.token_urlsafe(32))

    def _write_config(self, port: int) -> Path:
        self.urls["daemon"] = f"http://127.0.0.1:{port}"
        path = self.folder / "sentinel.yaml"
        content = daemon_config(self.urls, self.get("exporter", "state")["spare_hosts"])
        path.write_text(yaml.safe_dump(content, sort_keys=False))
        return path

    def _learn(self, config: Path) -> None:
        argv = [sys.executable, "-m", "sentinel.cli", "learn", "--config", str(config)]
        log = self.folder / "learn.log"
        with log.open("wb") as out:
            done = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=LEARN_WITHIN_S,
                check=False,
            )
        if done.returncode:
            tail = log.read_text(errors="replace").strip()[-2000:]
            raise DependencyError(f"sentinel learn failed ({done.returncode}):\n{tail}")

    def _start_daemon(self, config: Path) -> None:
        folder = self.folder / "daemon"
        folder.mkdir(exist_ok=True)
        argv = [sys.executable, "-m", "sentinel.cli", "run", "--config", str(config)]
        port = int(self.urls["daemon"].rpartition(":")[2])
        daemon = servers.Server("daemon", folder, lambda _: argv, port)
        self._parts.callback(daemon.stop)
        daemon.start()


def alertmanager_config(receiver_url: str) -> dict[str, Any]:
    """Every alert to the receiver, each by itself, at once."""
    return {
        "route": {
            "receiver": "pager",
            "group_by": ["..."],
            "group_wait": "0s",
            "group_interval": "1s",
            "repeat_interval": "1h",
        },
        "receivers": [
            {
                "name": "pager",
                "webhook_configs": [{"url": f"{receiver_url}/", "send_resolved": True}],
            }
        ],
    }


def daemon_config(urls: dict[str, str], spare_hosts: Sequence[str]) -> dict[str, Any]:
    """A site's configuration in mode act, with times short enough to watch."""
    return {
        "mode": "act",
        "prometheus": {"url": urls["prometheus"], "selector": '{job="dcgm-exporter"}'},
        "alertmanager": {"urls": [urls["alertmanager"]]},
        "identity": {"cluster": "lab"},
        "jobs": {"id_from": ["hpc_job"], "settle_s": 20.0},
        # half an hour of history certifies no baseline, and soft faults would make tickets
        # only: here it is trusted without proof, so that the whole story can be shown
        "detection": {
            "deviant_for_s": 10.0,
            "clear_for_s": 8.0,
            "clear_latched_for_s": 10.0,
            "certify_gpu_days": 0.0,
        },
        "spares": {"hosts": list(spare_hosts)},
        "hook": {
            "kind": "webhook",
            "url": f"{urls['scheduler']}/migrate",
            "secret_file": "hook.secret",
            "deadline_s": 120.0,
            "verify_for_s": 5.0,
        },
        "state": {"dir": "state"},
        "tick": {"interval_s": TICK_S},
        "learn": {"every_h": 0.0, "window_h": HISTORY_H},
        "http": {"listen": urls["daemon"].removeprefix("http://"), "token_file": "api.token"},
    }


def _write_private(path: Path, text: str) -> None:
    """A file that only this user may read, from its first byte on."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(text + "\n")
