"""The exporter on a host that has GPUs."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest
import requests

from sentinel.lab.servers import binaries
from tests.exporter.rig import Rig, Scrape
from tests.exporter.rig import rig as make_rig

pytestmark = pytest.mark.integration


def count() -> int:
    try:
        pynvml.nvmlInit()
        found = pynvml.nvmlDeviceGetCount()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return 0
    return int(found)


GPUS = count()
needs_gpu = pytest.mark.skipif(not GPUS, reason="no GPU here")


@pytest.fixture
def real(tmp_path: Path) -> Iterator[Rig]:
    with make_rig(tmp_path / "rig", None) as made:
        for name in ("FAKE_NVML_CONTROL", "LD_LIBRARY_PATH"):
            made.env.pop(name)
        yield made


@needs_gpu
def test_real_gpus_tell_what_any_gpu_can(real: Rig) -> None:
    real.start("--per-process")
    scrape = real.scrape_until(lambda s: len([v for _, v in s.all("gpu_up") if v]) == GPUS)
    assert scrape.one("up") == 1
    assert scrape.one("gpus") == GPUS
    for labels, _ in scrape.all("gpu_up"):
        uuid = labels["UUID"]
        assert re.fullmatch(r"GPU-[0-9a-f-]{36}", uuid)
        assert labels["model_name"]
        assert 1 <= scrape.one("temperature_celsius", UUID=uuid) <= 130
        total = scrape.one("memory_total_bytes", UUID=uuid)
        assert 1 << 30 <= total <= 1 << 40
        assert 0 <= scrape.one("memory_used_bytes", UUID=uuid) <= total
        assert 0 < scrape.one("power_watts", UUID=uuid) < 2000
        assert 0 < scrape.one("sm_clock_hertz", UUID=uuid) < 4e9
    assert not [of for of, _ in scrape.all("gpu_errors_total")], scrape.text


@needs_gpu
def test_promtool_and_a_second_scrape_of_real_gpus(real: Rig) -> None:
    real.start().scrape_until(lambda s: len([v for _, v in s.all("gpu_up") if v]) == GPUS)
    time.sleep(0.5)  # profiling needs some time between two samples
    scrape = real.scrape()
    assert scrape.took_s < 2.0
    done = subprocess.run(
        [str(binaries().promtool), "check", "metrics"],
        input=scrape.text.encode(),
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")
    code, _ = real.stop()
    assert code == 0


@needs_gpu
def test_nvidia_smi_agrees(real: Rig) -> None:
    asked = "uuid,memory.total,clocks.max.sm,pcie.link.gen.max,enforced.power.limit"
    told = subprocess.run(
        ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    scrape: Scrape = real.start().scrape_until(lambda s: bool(s.all("memory_total_bytes")))
    for line in told.splitlines():
        uuid, memory_mib, clock_mhz, generation, limit_w = line.split(", ")
        assert scrape.one("memory_total_bytes", UUID=uuid) == float(memory_mib) * (1 << 20)
        assert scrape.one("sm_clock_max_hertz", UUID=uuid) == float(clock_mhz) * 1e6
        assert scrape.one("pcie_link_generation_max", UUID=uuid) == float(generation)
        assert scrape.one("power_limit_watts", UUID=uuid) == pytest.approx(float(limit_w), abs=0.01)


def test_a_host_without_gpus_is_told_what_is_missing(real: Rig) -> None:
    if GPUS:
        assert real.once().returncode == 0
        return
    done = real.once()
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("sentinel: ")
    real.start()
    answer = requests.get(f"{real.url}/metrics", timeout=10)
    assert "\nsentinel_nvml_up 0.0\n" in answer.text
