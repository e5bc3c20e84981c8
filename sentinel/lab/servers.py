"""Real Prometheus, Alertmanager and VictoriaMetrics as ordinary child processes on loopback.

Each server keeps its configuration, data and log in a folder that the caller gives, is ready
when its function returns, and dies with the process that started it, even by SIGKILL.
Nothing here is a system service and nothing outside the given folder is written.
`python -m sentinel.lab.servers` finds (and fetches, at need) the programs and prints them.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, Final, Self

import requests
import yaml

from sentinel.errors import DependencyError
from sentinel.lab.binaries import Binaries, find_binaries, find_victoria_metrics

_READY_WITHIN_S: Final = 60.0
_STOP_WITHIN_S: Final = 15.0
_PORT_TRIES: Final = 4
_TEMPLATE: Final = Path("/usr/share/prometheus/alertmanager/default.tmpl")

binaries = cache(find_binaries)


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
        return False


class Server:
    """A child process that answers `/-/ready` on `url`. Use it as a context manager."""

    def __init__(
        self, name: str, directory: Path, argv: Callable[[int], Sequence[str]], port: int
    ) -> None:
        self.name = name
        self.dir = directory
        self.log_path = directory / f"{name}.log"
        self.port = port
        self._argv = argv
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise DependencyError(f"{self.name} is not running")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Starts and waits until ready; the first start chooses a port where none was given.

        Raises DependencyError with the end of the log.
        """
        chosen_here = self.port == 0
        for _ in range(_PORT_TRIES if chosen_here else 1):
            if chosen_here:
                self.port = free_port()
            elif _is_taken(self.port):  # its present owner would answer in our server's name
                raise DependencyError(f"{self.name}: port {self.port} is in use by another program")
            self._process = _spawn(self._argv(self.port), self.dir, self.log_path)
            if self._wait_ready():
                return self
            self.kill()
            if "address already in use" not in self.log_tail():
                break
        tail = self.log_tail() or "(the log is empty)"
        raise DependencyError(f"{self.name} did not start on {self.url}; end of its log:\n{tail}")

    def stop(self) -> None:
        """Asks it to end, waits, kills at the deadline. Safe to call twice."""
        if self._process is None:
            return
        if self.running:
            self._process.send_signal(signal.SIGCONT)  # a paused process hears no SIGTERM
            self._process.terminate()
            try:
                self._process.wait(_STOP_WITHIN_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()
        self._process = None

    def kill(self) -> None:
        """SIGKILL, as a crash would be."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> Self:
        """Stops and starts again on the same port and data."""
        self.stop()
        return self.start()

    def log_tail(self, lines: int = 15) -> str:
        if not self.log_path.exists():
            return ""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def _wait_ready(self) -> bool:
        deadline = time.monotonic() + _READY_WITHIN_S
        while self.running and time.monotonic() < deadline:
            try:
                if requests.get(f"{self.url}/-/ready", timeout=2).ok:
                    return self.running
            except requests.RequestException:
                pass
            time.sleep(0.05)
        return False

    def __enter__(self) -> Self:
        return self if self.running else self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()


class PrometheusServer(Server):
    """A Server whose scrape targets and rules can change while it runs."""

    def configure(
        self,
        *,
        scrape_configs: Sequence[Mapping[str, Any]] = (),
        scrape_interval_s: float = 1.0,
        rule_files: Sequence[str | Path] = (),
        alertmanager_urls: Sequence[str] = (),
        out_of_order_s: float = 0.0,
        external_labels: Mapping[str, str] | None = None,
    ) -> None:
        """Writes the configuration; a running server reloads it at once.

        A new target's first scrape comes up to 6 s later: Prometheus batches such changes.
        Raises DependencyError when the server refuses it.
        """
        interval = _duration(scrape_interval_s)
        config: dict[str, Any] = {
            "global": {
                "scrape_interval": interval,
                "scrape_timeout": interval,
                "evaluation_interval": interval,
                "external_labels": dict(external_labels or {}),
            },
            "scrape_configs": [dict(item) for item in scrape_configs],
            "rule_files": [str(Path(item).absolute()) for item in rule_files],
        }
        if out_of_order_s:
            window = {"out_of_order_time_window": _duration(out_of_order_s)}
            config["storage"] = {"tsdb": window}
        if alertmanager_urls:
            hosts = [url.removeprefix("http://").rstrip("/") for url in alertmanager_urls]
            alerting = {"api_version": "v2", "static_configs": [{"targets": hosts}]}
            config["alerting"] = {"alertmanagers": [alerting]}
        _write_yaml(self.dir / "prometheus.yml", config)
        if self.running:
            _reload(self)


class AlertmanagerServer(Server):
    """A Server whose routes can change while it runs."""

    def configure(self, config: Mapping[str, Any] | str) -> None:
        """Writes the configuration (a mapping, or YAML text); a running server reloads it."""
        plain = yaml.safe_load(config) if isinstance(config, str) else dict(config)
        _write_yaml(self.dir / "alertmanager.yml", plain)
        if self.running:
            _reload(self)


def prometheus(
    dir: str | Path,
    scrape_configs: Sequence[Mapping[str, Any]] = (),
    port: int = 0,
    *,
    scrape_interval_s: float = 1.0,
    rule_files: Sequence[str | Path] = (),
    alertmanager_urls: Sequence[str] = (),
    out_of_order_s: float = 0.0,
    external_labels: Mapping[str, str] | None = None,
    program: Path | None = None,
    options: Sequence[str] = (),
) -> PrometheusServer:
    """A running Prometheus with remote write, admin API and reload switched on.

    Ten years are kept, so that a history of any age may be written in. `port` 0 takes a free
    one. `program` is used instead of the one that is found; `options` are more of its flags.
    Raises DependencyError.
    """
    directory = _prepared(dir)
    binary = str(program or binaries().prometheus)

    def argv(chosen: int) -> list[str]:
        return [
            binary,
            f"--config.file={directory}/prometheus.yml",
            f"--storage.tsdb.path={directory}/data",
            "--storage.tsdb.retention.time=10y",
            f"--web.listen-address=127.0.0.1:{chosen}",
            "--web.enable-lifecycle",
            "--web.enable-admin-api",
            "--web.enable-remote-write-receiver",
            *options,
        ]

    server = PrometheusServer("prometheus", directory, argv, port)
    server.configure(
        scrape_configs=scrape_configs,
        scrape_interval_s=scrape_interval_s,
        rule_files=rule_files,
        alertmanager_urls=alertmanager_urls,
        out_of_order_s=out_of_order_s,
        external_labels=external_labels,
    )
    return server.start()


class VictoriaMetricsServer(Server):
    """A Server whose scrape targets can change while it runs."""

    def configure(
        self, *, scrape_configs: Sequence[Mapping[str, Any]] = (), scrape_interval_s: float = 1.0
    ) -> None:
        """Writes the configuration; a running server reloads it at once."""
        interval = _duration(scrape_interval_s)
        config = {
            "global": {"scrape_interval": interval, "scrape_timeout": interval},
            "scrape_configs": [dict(item) for item in scrape_configs],
        }
        _write_yaml(self.dir / "scrape.yml", config)
        if self.running:
            _reload(self)


def victoria_metrics(
    dir: str | Path,
    scrape_configs: Sequence[Mapping[str, Any]] = (),
    port: int = 0,
    *,
    scrape_interval_s: float = 1.0,
    options: Sequence[str] = (),
) -> VictoriaMetricsServer:
    """A running single-server VictoriaMetrics, with its defaults but for `options`, which are
    more of its flags, such as `-search.latencyOffset=0s`. Raises DependencyError."""
    directory = _prepared(dir)
    program = str(find_victoria_metrics())

    def argv(chosen: int) -> list[str]:
        return [
            program,
            f"-storageDataPath={directory}/data",
            "-retentionPeriod=10y",
            f"-httpListenAddr=127.0.0.1:{chosen}",
            f"-promscrape.config={directory}/scrape.yml",
            *options,
        ]

    server = VictoriaMetricsServer("victoria-metrics", directory, argv, port)
    server.configure(scrape_configs=scrape_configs, scrape_interval_s=scrape_interval_s)
    return server.start()


def alertmanager(
    dir: str | Path,
    config: Mapping[str, Any] | str,
    port: int = 0,
) -> AlertmanagerServer:
    """A running Alertmanager, alone (no cluster). Raises DependencyError."""
    directory = _prepared(dir)
    programs = binaries()

    def argv(chosen: int) -> list[str]:
        command = [
            str(programs.alertmanager),
            f"--config.file={directory}/alertmanager.yml",
            f"--storage.path={directory}/data",
            f"--web.listen-address=127.0.0.1:{chosen}",
            "--cluster.listen-address=",
        ]
        return _with_share(programs, command)

    server = AlertmanagerServer("alertmanager", directory, argv, port)
    server.configure(config)
    return server.start()


def _with_share(programs: Binaries, command: list[str]) -> list[str]:
    """Lets Debian's Alertmanager see the unpacked /usr/share, and nobody else.

    A mount namespace of its own does that, for root and, where the kernel lets ordinary users
    have one, for them. Elsewhere root copies the one template; others are told what to do.
    """
    if programs.share is None:
        return command
    mount = f"mount --bind {shlex.quote(str(programs.share))} /usr/share"
    for unshare in (["unshare", "-m"], ["unshare", "-Urm"]):
        if _works([*unshare, "sh", "-c", f"{mount} && test -e {_TEMPLATE}"]):
            # the new credentials of a user namespace clear the death signal: set it inside
            inner = shlex.join([*_dies_with_parent(), *command])
            return [*unshare, "sh", "-c", f"{mount} && exec {inner}"]
    if os.geteuid() == 0:
        _TEMPLATE.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(programs.share / _TEMPLATE.relative_to("/usr/share"), _TEMPLATE)
        return command
    raise DependencyError(
        f"Debian's Alertmanager needs {_TEMPLATE}, and this system allows no user namespace to "
        "provide it: install the package prometheus-alertmanager, or put an upstream "
        "alertmanager on PATH"
    )


def _works(argv: Sequence[str]) -> bool:
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


# The kernel's death signal follows the *thread* that started the child: one thread that lives
# as long as the process starts them all, whoever asks.
_starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="lab-servers")
_starting = threading.Lock()


def _spawn(argv: Sequence[str], cwd: Path, log_path: Path) -> subprocess.Popen[bytes]:
    def start() -> subprocess.Popen[bytes]:
        with log_path.open("ab") as log:
            return subprocess.Popen(
                [*_dies_with_parent(), *argv],
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is the caller's to handle, in its own order
            )

    with _starting:
        return _starter.submit(start).result()


def _dies_with_parent() -> list[str]:
    return ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []


def _prepared(directory: str | Path) -> Path:
    path = Path(directory).absolute()
    path.mkdir(parents=True, exist_ok=True)
    return path


def _write_yaml(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(yaml.safe_dump(dict(content), sort_keys=False))


def _reload(server: Server) -> None:
    try:
        answer = requests.post(f"{server.url}/-/reload", timeout=30)
    except requests.RequestException as error:
        raise DependencyError(f"{server.name} at {server.url} does not reload: {error}") from error
    if not answer.ok:
        raise DependencyError(f"{server.name} refuses its configuration: {answer.text.strip()}")


def _duration(seconds: float) -> str:
    return f"{round(seconds * 1000)}ms"


def main() -> None:
    found = binaries()
    for name in ("prometheus", "promtool", "alertmanager", "amtool"):
        sys.stdout.write(f"{name}: {getattr(found, name)}\n")


if __name__ == "__main__":
    main()
