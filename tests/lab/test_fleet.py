"""The simulated fleet: deterministic, physically plausible, and wrong exactly where told to be."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from sentinel.lab import workload
from sentinel.lab.faults import APPLICATION, HARDWARE
from sentinel.lab.fleet import Family, Fleet
from sentinel.lab.hardware import HW_THERMAL, POWER_CAP, SW_THERMAL

T0 = 1_800_000_000.0


def new_fleet(seed: int = 3, hosts: int = 16) -> Fleet:
    fleet = Fleet(seed, hosts, start_s=T0)
    fleet.advance(T0 + 60)
    return fleet


def read(fleet: Fleet, name: str) -> dict[str, float]:
    """Value by UUID of what is exported."""
    [family] = [f for f in fleet.samples() if f.name == f"DCGM_FI_{name}"]
    uuids = [labels["UUID"] for labels in family.labels]
    return dict(zip(uuids, family.values.tolist(), strict=True))


def plain(families: Iterable[Family]) -> list[tuple[str, list[dict[str, str]], list[float]]]:
    return [(f.name, f.labels, f.values.tolist()) for f in families]


def job_rows(fleet: Fleet, job: str) -> list[str]:
    return [fleet.gpus[row].uuid for row in fleet.workload.jobs[job].rows.tolist()]


def victim(fleet: Fleet) -> tuple[str, list[str]]:
    """A GPU in the heavy gang, and its mates."""
    first, *mates = job_rows(fleet, "train-02")
    return first, mates


def test_the_same_seed_and_moments_give_the_same_samples() -> None:
    one, other = Fleet(7, 4, start_s=T0), Fleet(7, 4, start_s=T0)
    one.advance(T0 + 300)
    for second in range(0, 300, 7):
        other.advance(T0 + second + 0.4)
    other.advance(T0 + 300.9)
    assert plain(one.samples()) == plain(other.samples())
    assert plain(Fleet(8, 4, start_s=T0).samples()) != plain(Fleet(7, 4, start_s=T0).samples())


def test_a_healthy_fleet_looks_like_one() -> None:
    fleet = new_fleet()
    power, temp = read(fleet, "DEV_POWER_USAGE"), read(fleet, "DEV_GPU_TEMP")
    model = {gpu.uuid: gpu.model for gpu in fleet.gpus}
    limit = read(fleet, "DEV_POWER_MGMT_LIMIT")
    assert all(power[u] < 1.03 * limit[u] for u in power)
    assert all(22 <= t <= 82 for t in temp.values())
    assert all(v == 0 for v in read(fleet, "DEV_XID_ERRORS").values())
    spare = [g.uuid for g in fleet.gpus if g.node == "gpu-07"]
    assert {round(power[u], -1) for u in spare} == {70}
    assert {read(fleet, "DEV_SM_CLOCK")[u] for u in spare} == {345}
    heavy = job_rows(fleet, "train-02")
    assert {int(read(fleet, "DEV_CLOCKS_EVENT_REASONS")[u]) & POWER_CAP for u in heavy} == {4}
    # chassis slots and silicon: neighbours differ, and not by more than real ones do
    for job in ("train-00", "train-02", "train-08"):
        temps = [temp[u] for u in job_rows(fleet, job)[:8]]
        powers = [power[u] for u in job_rows(fleet, job)[:8]]
        assert 4 <= max(temps) - min(temps) <= 14, (job, temps)
        assert max(powers) - min(powers) <= 80, (job, powers)
    # what a model cannot have is not exported
    assert not {model[u] for u in read(fleet, "DEV_MEMORY_TEMP")} & {"NVIDIA L40S"}
    assert not {model[u] for u in read(fleet, "PROF_NVLINK_TX_BYTES")} & {"NVIDIA L40S"}


def test_labels_are_those_of_dcgm_exporter() -> None:
    fleet = new_fleet()
    labels = fleet.samples()[0].labels
    common = ["gpu", "UUID", "pci_bus_id", "device", "modelName", "Hostname"]
    assert list(labels[0]) == [*common, "DCGM_FI_DRIVER_VERSION", "hpc_job"]
    idle = [one for one in labels if one["Hostname"] == "gpu-15"]
    assert len(idle) == 8
    assert all("hpc_job" not in one for one in idle)
    assert len({one["UUID"] for one in labels}) == 128


def test_counters_only_grow_and_energy_is_power_over_time() -> None:
    fleet = new_fleet(hosts=4)
    uuid = fleet.gpus[0].uuid
    before = read(fleet, "DEV_TOTAL_ENERGY_CONSUMPTION")[uuid]
    joules = 0.0
    for second in range(61, 121):
        fleet.advance(T0 + second)
        joules += read(fleet, "DEV_POWER_USAGE")[uuid]
    grown = read(fleet, "DEV_TOTAL_ENERGY_CONSUMPTION")[uuid] - before
    assert grown / 1000 == pytest.approx(joules, rel=0.02)


def test_heat_has_inertia() -> None:
    fleet = new_fleet()
    spare = [gpu.uuid for gpu in fleet.gpus if gpu.node == "gpu-07"]
    cold = read(fleet, "DEV_GPU_TEMP")[spare[0]]
    fleet.assign("train-02", spare)
    fleet.advance(T0 + 60 + fleet.workload.load_s + 12)
    assert read(fleet, "DEV_POWER_USAGE")[spare[0]] > 500
    soon = read(fleet, "DEV_GPU_TEMP")[spare[0]]
    fleet.advance(T0 + 400)
    late = read(fleet, "DEV_GPU_TEMP")[spare[0]]
    assert cold + 3 < soon < late - 3


def test_off_the_bus_shows_its_xid_then_nothing_and_stops_the_job() -> None:
    fleet = new_fleet()
    uuid, mates = victim(fleet)
    fleet.inject("off-the-bus", uuid)
    fleet.advance(T0 + 62)
    assert read(fleet, "DEV_XID_ERRORS")[uuid] == 79
    assert uuid not in read(fleet, "DEV_GPU_TEMP")
    fleet.advance(T0 + 64)
    assert uuid not in read(fleet, "DEV_XID_ERRORS")
    assert set(mates) < set(read(fleet, "DEV_GPU_TEMP"))
    done = fleet.workload.progress_s("train-02")
    fleet.advance(T0 + 300)
    assert fleet.workload.progress_s("train-02") == done
    assert read(fleet, "DEV_GPU_UTIL")[mates[0]] == 0
    assert read(fleet, "DEV_XID_ERRORS")[mates[0]] == 45  # the teardown, as on real fleets


def test_vanished_says_no_word_and_leaves_the_mates_waiting() -> None:
    fleet = new_fleet()
    uuid, mates = victim(fleet)
    fleet.inject("vanished", uuid)
    fleet.advance(T0 + 65)
    assert all(uuid not in {la["UUID"] for la in f.labels} for f in fleet.samples())
    assert {read(fleet, "DEV_XID_ERRORS")[m] for m in mates} == {0}
    assert read(fleet, "DEV_GPU_UTIL")[mates[0]] == 100  # busy waiting
    assert read(fleet, "PROF_PIPE_TENSOR_ACTIVE")[mates[0]] == 0
    done = fleet.workload.progress_s("train-02")
    fleet.advance(T0 + 700)
    assert fleet.workload.progress_s("train-02") == done
    assert read(fleet, "DEV_GPU_UTIL")[mates[0]] == 0  # their timeout has ended them


def test_ecc_counts_and_names_the_error() -> None:
    fleet = new_fleet()
    uuid, mates = victim(fleet)
    fleet.inject("ecc", uuid)
    fleet.advance(T0 + 61)
    assert read(fleet, "DEV_XID_ERRORS")[uuid] == 48
    assert read(fleet, "DEV_ECC_DBE_VOL_TOTAL")[uuid] == 2
    fleet.advance(T0 + 70)
    assert read(fleet, "DEV_XID_ERRORS")[uuid] == 63
    assert read(fleet, "DEV_ROW_REMAP_PENDING")[uuid] == 1
    assert read(fleet, "DEV_ECC_DBE_VOL_TOTAL")[mates[0]] == 0
    assert fleet.workload.jobs["train-02"].state == workload.DOWN
    fleet.repair(uuid)
    assert read(fleet, "DEV_XID_ERRORS")[uuid] == 0
    assert read(fleet, "DEV_ECC_DBE_VOL_TOTAL")[uuid] == 0
    assert read(fleet, "DEV_ECC_DBE_AGG_TOTAL")[uuid] == 2
    assert fleet.workload.jobs["train-02"].state == workload.RUNNING


@pytest.mark.parametrize("job", ["train-00", "train-02", "train-08", "serve-120"])
def test_lost_cooling_ends_in_thermal_throttling(job: str) -> None:
    fleet = new_fleet()
    uuid, *mates = job_rows(fleet, job)
    model_clock = read(fleet, "DEV_SM_CLOCK")[uuid]
    start = read(fleet, "DEV_GPU_TEMP")[uuid]
    fleet.inject("thermal", uuid)
    seen, hottest, slowest = 0, 0.0, model_clock
    for second in range(61, 400):
        fleet.advance(T0 + second)
        seen |= int(read(fleet, "DEV_CLOCKS_EVENT_REASONS")[uuid])
        hottest = max(hottest, read(fleet, "DEV_GPU_TEMP")[uuid])
        slowest = min(slowest, read(fleet, "DEV_SM_CLOCK")[uuid])
    assert hottest > max(84, start + 15)
    assert seen & SW_THERMAL
    assert slowest < 0.9 * model_clock
    assert hottest < 100
    assert not int(read(fleet, "DEV_CLOCKS_EVENT_REASONS")[mates[0]]) & (SW_THERMAL | HW_THERMAL)


def test_a_slow_clock_gives_no_reason_and_slows_the_whole_gang() -> None:
    fleet = new_fleet()
    uuid, mates = victim(fleet)
    before = {name: read(fleet, name) for name in ("DEV_SM_CLOCK", "PROF_PIPE_TENSOR_ACTIVE")}
    fleet.inject("clock", uuid)
    fleet.advance(T0 + 70)
    expected = 0.8 * before["DEV_SM_CLOCK"][uuid]
    assert read(fleet, "DEV_SM_CLOCK")[uuid] == pytest.approx(expected, rel=0.06)
    assert read(fleet, "DEV_SM_CLOCK")[mates[0]] >= before["DEV_SM_CLOCK"][mates[0]]
    assert read(fleet, "DEV_CLOCKS_EVENT_REASONS")[uuid] == 0
    tensor = read(fleet, "PROF_PIPE_TENSOR_ACTIVE")
    assert tensor[uuid] == pytest.approx(before["PROF_PIPE_TENSOR_ACTIVE"][uuid], rel=0.12)
    assert tensor[mates[0]] < 0.92 * before["PROF_PIPE_TENSOR_ACTIVE"][mates[0]]


@pytest.mark.parametrize("kind", list(APPLICATION))
def test_an_application_error_leaves_the_hardware_healthy(kind: str) -> None:
    fleet = new_fleet()
    uuid, _ = victim(fleet)
    fleet.inject(kind, uuid)
    fleet.advance(T0 + 65)
    assert read(fleet, "DEV_XID_ERRORS")[uuid] == int(kind.removeprefix("xid-"))
    crashed = fleet.workload.jobs["train-02"].state == workload.DOWN
    assert crashed is (kind != "xid-45")
    fleet.advance(T0 + 250)
    assert fleet.workload.jobs["train-02"].state == workload.RUNNING
    assert read(fleet, "DEV_POWER_USAGE")[uuid] > 300
    assert read(fleet, "DEV_ECC_DBE_VOL_TOTAL")[uuid] == 0
    assert read(fleet, "DEV_XID_ERRORS")[uuid] == int(kind.removeprefix("xid-"))  # it sticks


@pytest.mark.parametrize("kind", list(HARDWARE))
def test_repair_brings_every_fault_back_to_normal(kind: str) -> None:
    fleet, healthy = new_fleet(), new_fleet()
    uuid, _ = victim(fleet)
    fleet.inject(kind, uuid)
    fleet.advance(T0 + 120)
    fleet.repair(uuid)
    assert not fleet.faults
    fleet.advance(T0 + 600)
    healthy.advance(T0 + 600)
    for name in ("DEV_GPU_TEMP", "DEV_POWER_USAGE"):
        assert read(fleet, name)[uuid] == pytest.approx(read(healthy, name)[uuid], rel=0.2)
    assert read(fleet, "DEV_XID_ERRORS")[uuid] == 0


def test_a_moved_job_takes_its_label_and_its_checkpoint_along() -> None:
    fleet = Fleet(3, start_s=T0)
    fleet.advance(T0 + 3000)
    done, saved = fleet.workload.progress_s("train-02")
    assert 0 < saved <= done
    uuid, _ = victim(fleet)
    fleet.inject("off-the-bus", uuid)
    fleet.advance(T0 + 3010)
    spare = [gpu.uuid for gpu in fleet.gpus if gpu.node == "gpu-07"]
    fleet.assign("train-02", spare)
    assert fleet.workload.progress_s("train-02") == (saved, saved)
    labels = {la["UUID"]: la.get("hpc_job") for la in fleet.samples()[3].labels}
    assert {labels[u] for u in spare} == {"train-02"}
    fleet.advance(T0 + 3200)
    assert fleet.workload.progress_s("train-02")[0] > saved + 60
    assert read(fleet, "DEV_POWER_USAGE")[spare[0]] > 400


def test_a_job_put_onto_a_dead_gpu_does_not_run() -> None:
    fleet = new_fleet()
    spare = [gpu.uuid for gpu in fleet.gpus if gpu.node == "gpu-07"]
    fleet.inject("vanished", spare[3])
    fleet.assign("new", spare)
    fleet.advance(T0 + 200)
    assert fleet.workload.progress_s("new") == (0, 0)
    fleet.repair(spare[3])
    fleet.advance(T0 + 400)
    assert fleet.workload.progress_s("new")[0] > 100


def test_impossible_orders_are_refused() -> None:
    fleet = new_fleet(hosts=4)
    taken = fleet.gpus[0].uuid
    with pytest.raises(ValueError, match="runs job"):
        fleet.assign("other", [taken])
    with pytest.raises(ValueError, match="once each"):
        fleet.assign("other", [])
    with pytest.raises(KeyError, match="no GPU"):
        fleet.assign("other", ["GPU-none"])
    with pytest.raises(KeyError, match="no fault"):
        fleet.inject("gremlins", taken)
    with pytest.raises(KeyError):
        fleet.unassign("none")
    with pytest.raises(ValueError, match="at least one host"):
        Fleet(1, 0)


def test_history_is_what_scraping_would_have_stored() -> None:
    fleet, scraped = Fleet(5, 4, start_s=T0), Fleet(5, 4, start_s=T0)
    blocks = list(fleet.history(T0, T0 + 100, 1.0, block_s=30))
    times = np.concatenate([b.times_s for b in blocks])
    assert times.tolist() == [T0 + k for k in range(101)]
    scraped.advance(T0 + 100)
    last = {
        (labels["__name__"], labels.get("UUID", labels["instance"])): value
        for labels, value in zip(blocks[-1].labels, blocks[-1].values[:, -1], strict=True)
    }
    for family in scraped.samples():
        for labels, value in zip(family.labels, family.values, strict=True):
            assert last.pop((family.name, labels["UUID"])) == value
    assert last == {("up", f"{host}:9400"): 1 for host in fleet.hosts}
    assert all(b.labels is blocks[0].labels for b in blocks)


def test_the_past_of_a_fleet_is_of_the_same_gpus_and_jobs() -> None:
    fleet = new_fleet(hosts=8)
    spare = [gpu.uuid for gpu in fleet.gpus if gpu.node == fleet.spare_hosts[0]]
    fleet.assign("serve-new", spare[:2])
    past = fleet.past(T0 - 7200)
    [*_, last] = past.history(T0 - 7200, T0, 15)
    assert past.at_s == T0
    now = {(f.name, tuple(sorted(labels.items()))) for f in fleet.samples() for labels in f.labels}
    then = {
        (la["__name__"], tuple(sorted((k, v) for k, v in la.items() if k not in TARGET)))
        for la in last.labels
        if la["__name__"] != "up"
    }
    assert now == then


TARGET = ("__name__", "instance", "job")


def test_benign_surprises_are_unusual_and_reversible() -> None:
    fleet = new_fleet()
    uuid, mates = victim(fleet)
    before = read(fleet, "DEV_FB_USED")[mates[0]]
    fleet.inject("new-workload", uuid)
    fleet.advance(T0 + 61)
    assert read(fleet, "DEV_FB_USED")[mates[0]] != before
    fleet.inject("idle-night", uuid)
    fleet.advance(T0 + 62)
    serving = job_rows(fleet, "serve-120")
    assert read(fleet, "PROF_SM_ACTIVE")[serving[0]] < 0.05
    reasons, power = read(fleet, "DEV_CLOCKS_EVENT_REASONS"), read(fleet, "DEV_POWER_USAGE")
    uncapped = [u for u in power if reasons[u] == 0 and power[u] > 330]
    assert uncapped
    fleet.inject("driver-shift", uuid)
    fleet.advance(T0 + 70)
    shifted = read(fleet, "DEV_POWER_USAGE")
    assert np.mean([shifted[u] / power[u] for u in uncapped]) > 1.015
    fleet.repair(uuid)
    fleet.advance(T0 + 71)
    assert read(fleet, "DEV_FB_USED")[mates[0]] == before


@pytest.mark.parametrize(("hosts", "gpus"), [(1, 1), (2, 8), (3, 4), (5, 8), (40, 8)])
def test_fleets_of_any_size_stand(hosts: int, gpus: int) -> None:
    fleet = Fleet(1, hosts, gpus, start_s=T0)
    fleet.advance(T0 + 5)
    assert len(fleet.gpus) == hosts * gpus
    assert len(read(fleet, "DEV_GPU_TEMP")) == hosts * gpus
    assert len(fleet.spare_hosts) < hosts
