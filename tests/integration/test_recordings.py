"""Real GPUs, healthy and with faults injected into copies, through a real Prometheus.

Everything is judged with the same configuration: no key is tuned to a recording.
"""

import time

import pytest

from sentinel.backtest import backtest
from sentinel.config import Config
from sentinel.configkeys import DetectionSection
from sentinel.lab import servers
from sentinel.lab.remote_write import RemoteWriter
from tests.integration.recordings import h100, h200_series, inject, uuid, write_recording

pytestmark = [pytest.mark.integration, pytest.mark.slow]

RECORDINGS = ("b1", "i4", "t2", "t3")
FAULTS = ("ramp", "clock", "xid", "vanish")
FAULTY_GPU, FAULT_AFTER_S = 5, 10  # seconds into the second half


@pytest.fixture(scope="module")
def base_s():
    return float(int(time.time()) - 3600)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory, base_s):
    with servers.prometheus(tmp_path_factory.mktemp("prometheus")) as server:
        writer = RemoteWriter(server.url)
        for name in RECORDINGS:
            values = h100(name)
            half = len(values["DCGM_FI_DEV_GPU_TEMP"]) // 2
            write_recording(writer, name, values, base_s, host=f"node-{name}")
            for fault in FAULTS:
                broken = inject(values, fault, FAULTY_GPU, half + FAULT_AFTER_S)
                copy = f"{name}-{fault}"
                write_recording(writer, copy, broken, base_s, host=f"node-{copy}")
        yield server


@pytest.fixture
def configure(tmp_path, prometheus):
    def write(selector, interval_s=1):
        path = tmp_path / "sentinel.yaml"
        path.write_text(
            f"prometheus: {{url: '{prometheus.url}', selector: '{selector}'}}\n"
            f"tick: {{interval_s: {interval_s}}}\n"
        )
        return Config.load(path)

    return write


def run(config, name, base_s):
    """Learns on the first half of a recording and replays the second."""
    seconds = len(h100(name)["DCGM_FI_DEV_GPU_TEMP"])
    half = base_s + seconds // 2
    return backtest(config, half, base_s + seconds - 1, learn_start_s=base_s, learn_end_s=half)


@pytest.mark.parametrize("name", RECORDINGS)
def test_a_healthy_recording_gives_no_incident(configure, base_s, name):
    report = run(configure(f'{{recording="{name}"}}'), name, base_s)
    assert report["incidents"] == []
    assert report["written_down"] == []
    assert report["coverage"]["gpu_days"] * 86_400 > 8 * 120
    assert report["coverage"]["blind_gpu_days"] == 0


def test_four_healthy_hosts_together_give_no_incident(configure, base_s):
    report = run(configure('{recording=~"b1|i4|t2|t3"}'), "b1", base_s)
    assert report["incidents"] == []
    assert report["written_down"] == []


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", RECORDINGS)
def test_an_injected_fault_is_found_on_its_gpu_and_nothing_else(configure, base_s, name, fault):
    copy = f"{name}-{fault}"
    report = run(configure(f'{{recording="{copy}"}}'), name, base_s)
    assert [i["gpu_uuid"] for i in report["incidents"]] == [uuid(copy, FAULTY_GPU)]
    incident = report["incidents"][0]
    assert incident["host"] == f"node-{copy}"
    # minutes of one host certify no baseline: its soft evidence makes a ticket and moves nothing
    hard = fault in ("xid", "vanish")
    assert incident["would_migrate"] is hard
    assert incident["severity"] == ("critical" if hard else "warning")
    page = not hard and incident["score"] >= DetectionSection().page_score
    # t3 runs at its power limit, whose bit stays set in the copy: such a clock pages nobody
    page &= (name, fault) != ("t3", "clock")
    assert ("not certified" in incident["withheld"]) is page
    assert {"ramp": "deviant", "clock": "deviant", "xid": "fault", "vanish": "lost"}[
        fault
    ] == incident["kind"]
    metric = {"ramp": "temp_c", "clock": "sm_clock_mhz", "xid": "xid", "vanish": "up"}[fault]
    assert incident["evidence"][0]["metric"] == metric


def test_four_faults_at_once_on_four_hosts_are_four_incidents(configure, base_s):
    """Different things go wrong on one GPU of each host in the same minute: four faults, and
    no fleet-wide event."""
    copies = [f"{name}-{fault}" for name, fault in zip(RECORDINGS, FAULTS, strict=True)]
    report = run(configure(f'{{recording=~"{"|".join(copies)}"}}'), "b1", base_s)
    found = sorted(i["gpu_uuid"] or i["subject"]["id"] for i in report["incidents"])
    assert found == sorted(uuid(copy, FAULTY_GPU) for copy in copies)


@pytest.fixture(scope="module")
def h200(tmp_path_factory, base_s):
    labels, times, values = h200_series()
    start = base_s - len(times)
    with servers.prometheus(tmp_path_factory.mktemp("h200")) as server:
        RemoteWriter(server.url).write(labels, start + times, values)
        yield server.url, start, start + float(times[-1])


@pytest.mark.parametrize("interval_s", [1, 15])
@pytest.mark.parametrize("learnt", [False, True])
def test_112_healthy_minutes_of_an_h200_give_no_incident(tmp_path, h200, interval_s, learnt):
    url, start, end = h200
    path = tmp_path / "sentinel.yaml"
    path.write_text(f"prometheus: {{url: '{url}'}}\ntick: {{interval_s: {interval_s}}}\n")
    window = {"learn_start_s": start, "learn_end_s": start + 1800} if learnt else {}
    report = backtest(Config.load(path), start, end, **window)
    assert report["incidents"] == []
    assert report["written_down"] == []
    assert report["coverage"]["gpu_days"] == pytest.approx((end - start) / 86_400, rel=0.02)
