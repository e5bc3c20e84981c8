"""GPUs and drivers that fail, go and come back."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.exporter.rig import Rig, Scrape, build, uuid
from tests.exporter.rig import rig as make_rig

pytestmark = pytest.mark.integration

ALL = set(range(8))


@pytest.mark.parametrize(
    ("code", "reason"),
    [(15, "lost"), (28, "gpu_not_found"), (999, "unknown"), (17, "operating_system")],
)
def test_a_gpu_that_fails_takes_no_other_with_it(rig: Rig, code: int, reason: str) -> None:
    rig.start().settled()
    told = "gone" if reason == "gpu_not_found" else reason
    rig.control(f"5 * return {code}")
    scrape = rig.scrape()
    assert scrape.with_values() == ALL - {5}
    assert scrape.up() == {gpu: gpu != 5 for gpu in ALL}
    assert scrape.reasons() == {5: told}
    assert scrape.gpu(5, "gpu_errors_total", reason=told) == 1
    assert rig.scrape().gpu(5, "gpu_errors_total", reason=told) == 2
    rig.control()
    assert rig.settled().with_values() == ALL


def test_a_gpu_that_is_lost_half_way_tells_nothing_of_that_scrape(rig: Rig) -> None:
    rig.start().settled()
    rig.control("5 nvmlDeviceGetPowerUsage return 15")
    scrape = rig.scrape()
    assert scrape.reasons() == {5: "lost"}
    assert scrape.with_values() == ALL - {5}
    assert scrape.all("gpu_utilization_ratio", UUID=uuid(5)) == []


def test_a_gpu_that_needs_a_reset_still_tells_why(rig: Rig) -> None:
    rig.start().settled()
    rig.control("5 nvmlDeviceGetUtilizationRates return 16", "5 field:230 value 1")
    scrape = rig.scrape()
    assert scrape.up()[5] is False
    assert scrape.reasons() == {5: "reset_required"}
    assert scrape.gpu(5, "recovery_action") == 1
    assert scrape.gpu(5, "temperature_celsius") == 45


def test_a_field_that_fails_leaves_the_others_alone(rig: Rig) -> None:
    rig.start().settled()
    rig.control("5 nvmlDeviceGetTemperature return 999", "5 field:82 return 999")
    scrape = rig.scrape()
    assert scrape.up()[5] is True
    assert scrape.with_values() == ALL - {5}
    assert scrape.gpu(5, "power_watts") == 305
    assert scrape.all("memory_temperature_celsius", UUID=uuid(5)) == []
    assert scrape.gpu(5, "gpu_errors_total", reason="unknown") == 2
    rig.control()
    assert rig.scrape().gpu(5, "temperature_celsius") == 45


# ---- coming and going ---------------------------------------------------------------


def test_a_removed_gpu_is_told_as_gone_whatever_takes_its_place(rig: Rig) -> None:
    rig.start()
    rig.scrape_until(lambda s: len(s.all("last_xid")) == 8)
    rig.control("order 0 1 2 4 5 6 7")
    scrape = rig.scrape_until(lambda s: s.one("gpus") == 7 and s.with_values() == ALL - {3})
    assert scrape.up() == {gpu: gpu != 3 for gpu in ALL}
    assert scrape.reasons() == {3: "gone"}
    assert scrape.all("gpu_up", UUID=uuid(4))[0][0]["gpu"] == "3"
    assert scrape.gpu(4, "temperature_celsius") == 44
    rig.control("order 0 1 2 4 5 6 7", "event 1 7 31")
    assert rig.scrape_until(lambda s: bool(s.all("xid_errors_total"))).with_values() == ALL - {3}
    rig.control()
    scrape = rig.settled()
    assert scrape.gpu(7, "xid_errors_total", xid="31") == 1, "told once, though it moved"
    assert scrape.with_values() == ALL
    assert scrape.all("gpu_up", UUID=uuid(4))[0][0]["gpu"] == "4"


def test_an_added_gpu_is_there_in_the_scrape_that_lists_it(rig: Rig) -> None:
    rig.control("order 0 1 2")
    rig.start().settled(3)
    rig.control("order 0 1 2 9")
    assert rig.scrape().with_values() == {0, 1, 2, 9}


def test_no_gpus_at_all_are_none(rig: Rig) -> None:
    rig.control("count 0")
    rig.start()
    scrape = rig.scrape_until(lambda s: s.one("up") == 1)
    assert (scrape.one("gpus"), scrape.all("gpu_up")) == (0, [])


def test_a_lost_gpu_that_is_back_is_found_by_opening_anew(rig: Rig) -> None:
    hurried = "import sentinel.exporter.collector as c; c._REOPEN_S = (0.2, 0.4)"
    rig.program = ("-c", f"{hurried}\nfrom sentinel.cli import main; main()")
    rig.start().settled()
    rig.control("lost 5")
    assert rig.scrape().reasons() == {5: "lost"}
    rig.control()
    scrape = rig.settled()
    assert scrape.with_values() == ALL
    rig.control("event 1 2 31")
    rig.scrape_until(lambda s: bool(s.all("xid_errors_total", UUID=uuid(2))))


def test_nothing_is_opened_anew_while_a_call_hangs(rig: Rig) -> None:
    hurried = "import sentinel.exporter.collector as c; c._REOPEN_S = (0.1, 0.1)"
    rig.program = ("-c", f"{hurried}\nfrom sentinel.cli import main; main()")
    rig.record_calls()
    rig.start().settled()
    rig.control("lost 5", "3 nvmlDeviceGetTemperature hang")
    for _ in range(20):
        assert rig.scrape().with_values() == ALL - {3, 5}
    assert rig.calls("nvmlShutdown") == 0
    rig.control("lost 5")
    rig.scrape_until(lambda s: rig.calls("nvmlShutdown") > 0)


# ---- the driver ---------------------------------------------------------------------


def test_a_driver_that_was_loaded_again_is_met_anew_in_one_scrape(rig: Rig) -> None:
    rig.start().settled()
    rig.control("epoch 1")
    scrape = rig.scrape()
    assert scrape.one("up") == 1
    assert scrape.with_values() == ALL
    rig.control("epoch 1", "event 1 2 79")
    rig.scrape_until(lambda s: bool(s.all("xid_errors_total", UUID=uuid(2))))


def test_support_is_found_out_anew_after_a_reload_and_a_return(rig: Rig) -> None:
    def no_fans(scrape: Scrape) -> set[str]:
        told = scrape.all("field_unsupported", field="fan_speed", reason="not_supported")
        return {labels["gpu"] for labels, _ in told}

    every = {str(gpu) for gpu in ALL}
    rig.control("* nvmlDeviceGetNumFans return 3")
    rig.start()
    assert no_fans(rig.settled()) == every
    rig.control()
    assert no_fans(rig.scrape()) == every, "what is not there is not asked for again"
    rig.control("2 * return 15")
    rig.scrape()
    rig.control()
    assert no_fans(rig.settled()) == every - {"2"}
    rig.control("epoch 1")
    assert no_fans(rig.settled()) == set()


@pytest.mark.parametrize(
    ("code", "reason"),
    [(9, "driver_not_loaded"), (18, "version_mismatch"), (4, "no_permission"), (999, "unknown")],
)
def test_a_driver_that_is_not_there_yet_is_waited_for(rig: Rig, code: int, reason: str) -> None:
    rig.control(f"* nvmlInitWithFlags return {code}")
    rig.start()
    scrape = rig.scrape()
    assert (scrape.one("up"), scrape.library_reason()) == (0, reason)
    assert scrape.all("gpu_up") == []
    rig.control()
    scrape = rig.scrape()
    assert (scrape.one("up"), scrape.with_values()) == (1, ALL)


def test_the_first_scrape_tells_what_is_and_not_what_was_at_the_start(rig: Rig) -> None:
    rig.control("* nvmlInitWithFlags return 9")
    rig.start()
    rig.until(lambda: "driver_not_loaded" in rig.log())
    rig.control()
    assert rig.scrape().with_values() == ALL


def test_a_driver_that_was_unloaded_leaves_gpus_known_and_down(rig: Rig) -> None:
    rig.start().settled()
    rig.control("* * return 9")
    for _ in range(2):
        scrape = rig.scrape()
        assert (scrape.one("up"), scrape.library_reason()) == (0, "driver_not_loaded")
        assert scrape.up() == dict.fromkeys(ALL, False)
        assert set(scrape.reasons().values()) == {"driver_not_loaded"}
        assert scrape.with_values() == set()
    assert rig.log().count("driver_not_loaded: the NVIDIA kernel driver") == 1
    rig.control()
    rig.settled()


def test_gpus_that_deny_the_driver_while_the_list_is_there(rig: Rig) -> None:
    rig.start().settled()
    rig.control(*(f"{gpu} * return 1" for gpu in ALL))
    assert set(rig.scrape().reasons().values()) == {"uninitialized"}
    rig.control()
    assert rig.settled().with_values() == ALL


def test_no_library_is_told_and_then_found(fake: Path, tmp_path: Path) -> None:
    with make_rig(tmp_path / "rig", None) as rig:
        rig.start()
        scrape = rig.scrape()
        assert (scrape.one("up"), scrape.library_reason()) == (0, "library_not_found")
        shutil.copy(fake / "libnvidia-ml.so.1", rig.folder)
        assert rig.settled().with_values() == ALL


def test_an_update_under_its_feet_ends_it_for_a_new_start(tmp_path: Path) -> None:
    library = build(tmp_path / "nvml")
    with make_rig(tmp_path / "rig", library) as rig:
        rig.control("* nvmlInitWithFlags return 18")
        rig.start()
        assert rig.scrape().library_reason() == "version_mismatch"
        (library / "libnvidia-ml.so.1").unlink()
        build(library)
        rig.scrape()
        assert rig.process is not None
        assert rig.process.wait(10) == 3
        assert "replaced by an update" in rig.log()
        rig.control()
        rig.start().settled()
