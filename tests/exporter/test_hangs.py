"""A GPU, or all of NVML, that stops answering: the scrape goes on without it."""

from __future__ import annotations

import threading

import pytest

from tests.exporter.rig import Rig, Scrape

pytestmark = pytest.mark.integration

PROMISED_S = 2.0
DEADLINE_S = 1.5  # of the command, unless told otherwise
OTHERS = {0, 1, 2, 4, 5, 6, 7}


@pytest.mark.parametrize(
    "hang", ["3 * hang", "3 nvmlDeviceGetTemperature hang", "3 nvmlDeviceGetHandleByIndex_v2 hang"]
)
def test_one_hung_gpu_of_eight_costs_its_own_series_alone(rig: Rig, hang: str) -> None:
    rig.start().settled()
    rig.control(hang)
    for scrape in (rig.scrape(), rig.scrape(), rig.scrape()):
        assert scrape.took_s < PROMISED_S
        assert scrape.with_values() == OTHERS
        assert scrape.up() == {gpu: gpu != 3 for gpu in range(8)}
        assert scrape.reasons() == {3: "timeout"}
        assert scrape.one("up") == 1
        assert scrape.gpu(3, "gpu_unanswered_seconds") > 0
    assert scrape.took_s < DEADLINE_S, "one that hangs already is not waited for again"
    assert scrape.gpu(3, "gpu_errors_total", reason="timeout") == 3
    rig.control()
    assert rig.settled().with_values() == OTHERS | {3}
    assert "GPU 3 (GPU-000000a3-0000-4000-8000-000000000000) answers again" in rig.log()


def test_a_gpu_that_hangs_from_the_start_is_known_by_its_place(rig: Rig) -> None:
    rig.control("3 * hang")
    rig.start()
    scrape = rig.scrape_until(lambda s: s.with_values() == OTHERS)
    assert scrape.took_s < PROMISED_S
    assert scrape.one("gpu_up", gpu="3") == 0
    assert scrape.one("scrape_error", gpu="3", reason="timeout") == 1
    assert "UUID" not in scrape.all("gpu_up", gpu="3")[0][0]
    rig.control()
    rig.settled()


def test_all_gpus_hung_leave_the_health_series(rig: Rig) -> None:
    rig.start().settled()
    rig.control("* * hang")
    scrape = rig.scrape()
    assert scrape.took_s < PROMISED_S
    assert scrape.with_values() == set()
    assert scrape.up() == dict.fromkeys(range(8), False)
    assert (scrape.one("up"), scrape.library_reason()) == (0, "timeout")
    assert rig.scrape().took_s < DEADLINE_S
    rig.control()
    rig.settled()


def test_a_library_that_hangs_when_opened_leaves_the_health_series(rig: Rig) -> None:
    rig.control("* nvmlInitWithFlags hang")
    rig.start()
    scrape = rig.scrape()
    assert scrape.took_s < PROMISED_S
    assert (scrape.one("up"), scrape.all("gpu_up")) == (0, [])
    assert scrape.library_reason() in ("starting", "timeout")
    rig.control()
    rig.settled()


def test_a_list_that_hangs_does_not_take_the_known_gpus_with_it(rig: Rig) -> None:
    rig.start().settled()
    rig.control("* nvmlDeviceGetCount_v2 hang")
    for _ in range(2):
        scrape = rig.scrape()
        assert scrape.took_s < PROMISED_S
        assert scrape.with_values() == set(range(8))
        assert (scrape.one("up"), scrape.library_reason()) == (0, "timeout")
    assert scrape.took_s < DEADLINE_S
    rig.control()
    assert rig.scrape_until(lambda s: s.one("up") == 1).with_values() == set(range(8))


def test_a_slow_gpu_is_late_and_then_not_told_as_new(rig: Rig) -> None:
    rig.start("--deadline", "0.5").settled()
    rig.control("3 nvmlDeviceGetTemperature sleep 1000", "3 nvmlDeviceGetTemperature value 99")
    assert rig.scrape().reasons() == {3: "timeout"}
    rig.control("3 nvmlDeviceGetTemperature value 77")
    told: list[float] = []

    def right(scrape: Scrape) -> bool:
        told.extend(value for _, value in scrape.all("temperature_celsius", gpu="3"))
        return scrape.up()[3]

    rig.scrape_until(right)
    assert told == [77]


def test_a_hundred_scrapes_of_a_hung_gpu_grow_neither_threads_nor_memory(rig: Rig) -> None:
    rig.start().settled()
    rig.control("3 * hang")
    for _ in range(20):
        rig.scrape()
    threads, kib = rig.status("Threads"), rig.status("VmRSS")
    for _ in range(100):
        assert rig.scrape().with_values() == OTHERS
    assert rig.status("Threads") <= threads + 2  # a connection may be closing
    assert rig.status("VmRSS") - kib < 8 * 1024


def test_the_limit_of_a_scraper_counts_where_it_is_shorter(rig: Rig) -> None:
    rig.start("--deadline", "10").settled()
    rig.control("3 * hang")
    scrape = rig.scrape(**{"X-Prometheus-Scrape-Timeout-Seconds": "1"})
    assert scrape.took_s < DEADLINE_S
    assert scrape.with_values() == OTHERS


def test_two_scrapes_at_once_share_one_reading(rig: Rig) -> None:
    rig.record_calls()
    rig.control("* nvmlDeviceGetTemperature sleep 300")
    rig.start().settled()
    before = rig.calls("nvmlDeviceGetTemperature", 0)
    told: list[Scrape] = []
    together = [threading.Thread(target=lambda: told.append(rig.scrape())) for _ in range(4)]
    for thread in together:
        thread.start()
    for thread in together:
        thread.join()
    assert [s.with_values() for s in told] == [set(range(8))] * 4
    assert rig.calls("nvmlDeviceGetTemperature", 0) == before + 1


@pytest.mark.parametrize("hang", ["3 * hang", "* * hang", ""])
def test_sigterm_ends_it_whatever_hangs(rig: Rig, hang: str) -> None:
    rig.start().settled()
    rig.control(hang)
    rig.scrape()
    code, took_s = rig.stop()
    assert code == 0
    assert took_s < 5.0
    assert "told to stop" in rig.log()


def test_xids_of_a_gpu_that_hangs_are_told_while_they_are_news(rig: Rig) -> None:
    rig.start()
    rig.scrape_until(lambda s: len(s.all("last_xid")) == 8)
    rig.control("3 nvmlDeviceGetTemperature hang")
    assert rig.scrape().all("last_xid", gpu="3") == []
    rig.control("3 nvmlDeviceGetTemperature hang", "event 1 3 119")
    scrape = rig.scrape_until(lambda s: bool(s.all("xid_errors_total")))
    assert scrape.gpu(3, "xid_errors_total", xid="119") == 1
    assert scrape.up()[3] is False
