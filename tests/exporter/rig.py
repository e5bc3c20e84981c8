"""The exporter as a process of its own, over a driver's library that does as a test says."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Self

import requests
from prometheus_client.parser import text_string_to_metric_families

SOURCE: Final = Path(__file__).parent / "fake_nvml.c"
WITHIN_S: Final = 20.0
PREFIX: Final = "sentinel_nvml_"
Labels = dict[str, str]


def build(folder: Path, *flags: str) -> Path:
    """The fake library, in a folder that LD_LIBRARY_PATH can name."""
    compiler = shutil.which("cc")
    assert compiler, "a C compiler is needed to build the fake NVML (Debian: apt-get install gcc)"
    folder.mkdir(parents=True, exist_ok=True)
    strict = ("-std=c11", "-D_GNU_SOURCE", "-O1", "-Wall", "-Wextra", "-Werror")
    linked = ("-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1")
    library = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, *strict, *linked, *flags, "-o", library, SOURCE], check=True)
    return folder


def uuid(gpu: int) -> str:
    return f"GPU-{0xA0 + gpu:08x}-0000-4000-8000-000000000000"


class Scrape:
    """What one scrape told, without the prefix."""

    def __init__(self, text: str, took_s: float) -> None:
        self.text, self.took_s = text, took_s
        self.series: list[tuple[str, Labels, float]] = [
            (s.name.removeprefix(PREFIX), s.labels, s.value)
            for family in text_string_to_metric_families(text)
            for s in family.samples
        ]

    def all(self, name: str, **labels: str) -> list[tuple[Labels, float]]:
        return [
            (found, value)
            for metric, found, value in self.series
            if metric == name and labels.items() <= found.items()
        ]

    def one(self, name: str, **labels: str) -> float:
        found = self.all(name, **labels)
        assert len(found) == 1, (name, labels, found)
        return found[0][1]

    def gpu(self, gpu: int, name: str, **labels: str) -> float:
        return self.one(name, UUID=uuid(gpu), **labels)

    def up(self) -> dict[int, bool]:
        """By physical GPU, for those of a known UUID."""
        told = self.all("gpu_up")
        return {int(of["UUID"][4:12], 16) - 0xA0: bool(v) for of, v in told if "UUID" in of}

    def with_values(self) -> set[int]:
        return {int(of["UUID"][4:12], 16) - 0xA0 for of, _ in self.all("temperature_celsius")}

    def reasons(self) -> dict[int, str]:
        told = self.all("scrape_error")
        return {int(of["UUID"][4:12], 16) - 0xA0: of["reason"] for of, _ in told if "UUID" in of}

    def library_reason(self) -> str:
        return "".join(of["reason"] for of, _ in self.all("scrape_error") if "gpu" not in of)


class Rig:
    """One exporter over one fake. `control` replaces what the fake does, at once."""

    def __init__(self, folder: Path, library: Path | None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._control, self._calls = folder / "control", folder / "calls"
        self.log_path = folder / "exporter.log"
        self.control()
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith("SENTINEL")},
            "FAKE_NVML_CONTROL": str(self._control),
            "LD_LIBRARY_PATH": str(library or folder),
        }
        self.program: tuple[str, ...] = ("-m", "sentinel.cli")
        self.process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def control(self, *lines: str) -> None:
        new = self._control.with_suffix(".new")
        new.write_text("".join(f"{line}\n" for line in lines))
        new.rename(self._control)

    def record_calls(self) -> None:
        """From the next start on."""
        self.env["FAKE_NVML_CALLS"] = str(self._calls)

    def calls(self, name: str, gpu: int | None = None) -> int:
        wanted = name if gpu is None else f"{name} {gpu}"
        lines = self._calls.read_text().splitlines()
        return sum(line == wanted or line.rpartition(" ")[0] == wanted for line in lines)

    def argv(self, *options: str) -> list[str]:
        return [sys.executable, *self.program, "exporter", "--hostname", "host-1", *options]

    def start(self, *options: str) -> Self:
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                self.argv("--listen", "127.0.0.1:0", *options), env=self.env, stderr=log
            )
        self.url = self.until(lambda: re.search(r"serving (http://\S+)/metrics", self.log()))[1]
        return self

    def once(self, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.argv("--once", *options),
            env=self.env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def scrape(self, **headers: str) -> Scrape:
        start_s = time.monotonic()
        answer = requests.get(f"{self.url}/metrics", headers=headers, timeout=WITHIN_S)
        took_s = time.monotonic() - start_s
        assert answer.status_code == 200
        return Scrape(answer.text, took_s)

    def scrape_until(self, right: Callable[[Scrape], bool]) -> Scrape:
        seen: list[Scrape] = []

        def ask() -> Scrape | None:
            seen.append(self.scrape())
            return seen[-1] if right(seen[-1]) else None

        return self.until(ask, lambda: seen[-1].text)

    def settled(self, gpus: int = 8) -> Scrape:
        """The first scrape in which all answer."""
        return self.scrape_until(lambda s: sum(s.up().values()) == gpus)

    def until(self, ask: Callable[[], object], told: Callable[[], str] = lambda: "") -> object:
        deadline = time.monotonic() + WITHIN_S
        while time.monotonic() < deadline:
            found = ask()
            if found:
                return found
            assert self.process is None or self.process.poll() is None, self.log()
            time.sleep(0.02)
        raise AssertionError(f"not within {WITHIN_S} s\n{told()}\n{self.log()}")

    def status(self, name: str) -> int:
        """A number of /proc/PID/status, in its own unit."""
        assert self.process is not None
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(rf"^{name}:\s+(\d+)", text, re.M)[1])

    def stop(self) -> tuple[int, float]:
        """Its exit code after SIGTERM, and how long it took to go."""
        assert self.process is not None
        start_s = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(WITHIN_S)
        self.process = None
        return code, time.monotonic() - start_s

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@contextmanager
def rig(folder: Path, library: Path | None) -> Iterator[Rig]:
    made = Rig(folder, library)
    try:
        yield made
    finally:
        made.close()
