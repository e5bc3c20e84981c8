"""The exporter as a program: its command line, its HTTP, its documents and its unit."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
import requests

from sentinel.errors import ConfigError
from sentinel.exporter.metrics import DESCRIBED, GPU_LABELS, SLICE_LABELS, with_table
from sentinel.exporter.server import parse_listen
from sentinel.lab.servers import binaries
from tests.exporter.rig import PREFIX, Rig, Scrape
from tests.exporter.rig import rig as make_rig

ROOT = Path(__file__).parents[2]


# ---- the command line ---------------------------------------------------------------


@pytest.mark.integration
def test_once_prints_one_exposition_and_ends(rig: Rig) -> None:
    done = rig.once()
    assert (done.returncode, done.stderr) == (0, "")
    scrape = Scrape(done.stdout, 0.0)
    assert scrape.with_values() == set(range(8))
    assert scrape.one("up") == 1


@pytest.mark.integration
def test_once_tells_the_gpus_that_answer(rig: Rig) -> None:
    rig.control("3 * hang")
    done = rig.once("--deadline", "0.5")
    assert (done.returncode, done.stderr) == (0, "")
    scrape = Scrape(done.stdout, 0.0)
    assert scrape.with_values() == set(range(8)) - {3}
    assert scrape.one("scrape_error", gpu="3", reason="timeout") == 1


@pytest.mark.integration
@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ("* nvmlInitWithFlags return 9", "modprobe nvidia"),
        ("* nvmlInitWithFlags return 18", "different versions"),
        ("* nvmlInitWithFlags return 4", "/dev/nvidiactl"),
    ],
)
def test_once_without_a_driver_says_what_to_do(rig: Rig, rule: str, says: str) -> None:
    rig.control(rule)
    done = rig.once()
    assert (done.returncode, done.stdout) == (3, "")
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.integration
def test_once_without_a_library_says_so(tmp_path: Path) -> None:
    with make_rig(tmp_path / "rig", None) as rig:
        done = rig.once()
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("sentinel: libnvidia-ml.so.1 is not to be found: install")


@pytest.mark.integration
def test_a_taken_port_is_told_and_ends_it(rig: Rig) -> None:
    with socket.socket() as owner:
        owner.bind(("127.0.0.1", 0))
        owner.listen()
        listen = f"127.0.0.1:{owner.getsockname()[1]}"
        done = subprocess.run(
            rig.argv("--listen", listen), env=rig.env, capture_output=True, text=True, timeout=30
        )
    assert done.returncode == 3
    assert f"--listen {listen}: cannot listen there" in done.stderr


@pytest.mark.parametrize("text", ["9478", "localhost", ":9478", "host:port", "host:99999", "a b:1"])
def test_an_address_that_is_none_is_told(text: str) -> None:
    with pytest.raises(ConfigError, match="write HOST:PORT"):
        parse_listen(text)


def test_addresses_are_hosts_and_ports() -> None:
    assert parse_listen("0.0.0.0:9478") == ("0.0.0.0", 9478)
    assert parse_listen("[::1]:9478") == ("::1", 9478)
    assert parse_listen("gpu-1.example:80") == ("gpu-1.example", 80)


# ---- HTTP ---------------------------------------------------------------------------


@pytest.mark.integration
def test_the_pages(rig: Rig) -> None:
    rig.control("* * hang")
    rig.start()
    healthy = requests.get(f"{rig.url}/-/healthy", timeout=10)
    assert (healthy.status_code, healthy.text) == (200, "ok\n")
    index = requests.get(rig.url, timeout=10)
    assert 'href="/metrics"' in index.text
    assert index.headers["content-type"].startswith("text/html")
    assert requests.get(f"{rig.url}/secret", timeout=10).status_code == 404
    assert requests.post(f"{rig.url}/metrics", timeout=10).status_code == 501
    assert requests.head(f"{rig.url}/", timeout=10).text == ""
    rig.control()


@pytest.mark.integration
def test_both_forms_of_the_text_and_gzip(rig: Rig) -> None:
    rig.start().settled()
    plain = requests.get(f"{rig.url}/metrics", headers={"Accept-Encoding": ""}, timeout=10)
    assert plain.headers["content-type"].startswith("text/plain")
    assert "content-encoding" not in plain.headers
    packed = requests.get(f"{rig.url}/metrics", headers={"Accept-Encoding": "gzip"}, timeout=10)
    assert packed.headers["content-encoding"] == "gzip"
    assert int(packed.headers["content-length"]) < len(plain.content) / 5
    accept = {"Accept": "application/openmetrics-text;version=1.0.0"}
    opened = requests.get(f"{rig.url}/metrics", headers=accept, timeout=10)
    assert opened.headers["content-type"].startswith("application/openmetrics-text")
    assert opened.text.endswith("# EOF\n")


@pytest.mark.integration
def test_a_client_that_leaves_or_says_nothing_harms_nobody(rig: Rig) -> None:
    rig.start().settled()
    host, port = rig.url.removeprefix("http://").split(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(20)]
    for _ in range(20):
        with socket.create_connection((host, int(port))) as leaving:
            leaving.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    with socket.create_connection((host, int(port))) as wrong:
        wrong.sendall(b"\x16\x03\x01\x00 nonsense\r\n\r\n")
    assert rig.scrape().with_values() == set(range(8))
    for connection in silent:
        connection.close()
    assert "Traceback" not in rig.log()


@pytest.mark.integration
def test_systemd_is_told_when_it_serves_and_when_it_stops(rig: Rig, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(20)
        rig.env["NOTIFY_SOCKET"] = str(tmp_path / "notify")
        rig.control("* * hang")
        rig.start()
        assert manager.recv(4096).decode() == f"READY=1\nSTATUS=serving {rig.url}/metrics"
        rig.stop()
        assert manager.recv(4096) == b"STOPPING=1"


# ---- what is told of it -------------------------------------------------------------


@pytest.mark.integration
def test_promtool_finds_nothing_to_say(rig: Rig) -> None:
    rig.control("mig 1", "2 * hang", "4 * return 15", "5 nvmlDeviceGetNumFans return 3")
    rig.start("--per-process", "--deadline", "0.5")
    scrape = rig.scrape_until(lambda s: len(s.all("sm_active_ratio")) > 5)
    done = subprocess.run(
        [str(binaries().promtool), "check", "metrics"],
        input=scrape.text.encode(),
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


@pytest.mark.integration
def test_what_is_exported_is_what_is_described(rig: Rig) -> None:
    """All that healthy GPUs, a hung one and one of the older kind show together."""
    older = ("6 field:29 value 4", "6 field:30 value 1", "6 field:31 value 0")
    rig.control(*older)
    rig.start("--per-process", "--deadline", "0.5").settled()
    rig.scrape_until(lambda s: len(s.all("last_xid")) == 8)
    rig.control(*older, "event 1 2 31", "3 * hang")
    rig.scrape_until(lambda s: bool(s.all("xid_errors_total")))
    scrape = rig.scrape_until(lambda s: len(s.all("sm_active_ratio")) == 7)
    told = {name: set(labels) for name, labels, _ in scrape.series}
    described = {d.name: d for d in DESCRIBED}
    assert set(told) == set(described)
    for name, labels in told.items():
        allowed = set(described[name].labels)
        if described[name].of_gpu:
            allowed |= {*GPU_LABELS, *SLICE_LABELS}
        assert labels <= allowed, name


def test_the_page_has_every_metric() -> None:
    page = (ROOT / "docs" / "exporter.md").read_text()
    assert page == with_table(page), "run `make generated` and commit"
    for described in DESCRIBED:
        assert f"`{PREFIX}{described.name}`" in page


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    text = (ROOT / "deploy" / "sentinel-exporter.service").read_text()
    assert "PrivateDevices=no" in text, "NVML needs the device files"
    assert "DevicePolicy=closed" in text
    assert "ProcSubset=pid" not in text, "NVML reads /proc/driver/nvidia"
    assert "RestartPreventExitStatus=2\n" in text, "a wrong command line is not tried again"
    assert re.search(r"^ExecStart=\S+/sentinel exporter", text, re.M)
    analyze = shutil.which("systemd-analyze")
    if analyze is None:  # nothing more can be said on a machine without systemd
        return
    unit = tmp_path / "sentinel-exporter.service"
    unit.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", text, flags=re.M))
    done = subprocess.run(
        [analyze, "verify", str(unit)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
