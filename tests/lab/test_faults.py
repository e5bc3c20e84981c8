"""Each fault shows in the telemetry that a real one shows in, and nowhere else by itself."""

from __future__ import annotations

import numpy as np
import pytest

from sentinel.lab import faults
from sentinel.lab.fleet import Fleet
from sentinel.lab.hardware import HW_SLOWDOWN, POWER_BRAKE
from sentinel.lab.site import PLAIN, Site, drawn
from tests.lab.test_fleet import T0, job_rows, new_fleet, read


def before_and_after(
    kind: str, name: str, after_s: float = 120.0, job: str = "train-02", at: int = 0
) -> tuple[dict[str, float], dict[str, float], str, list[str]]:
    """A metric by GPU without and with the fault; who has it; the mates."""
    healthy, faulty = new_fleet(), new_fleet()
    rows = job_rows(faulty, job)
    uuid = rows[at]
    faulty.inject(kind, uuid)
    for fleet in (healthy, faulty):
        fleet.advance(T0 + 60 + after_s, 10.0 if after_s > 600 else 1.0)
    return read(healthy, name), read(faulty, name), uuid, [u for u in rows if u != uuid]


def test_every_kind_has_one_line_and_one_place() -> None:
    assert all(len(text) < 80 for text in faults.KINDS.values())
    assert set(faults.HARDWARE) == faults.HARD | faults.SOFT
    assert set(faults.KINDS) >= (faults.NODE | faults.RACK | faults.FLEET | faults.NEVER_MOVES)


@pytest.mark.parametrize(
    ("kind", "name", "change"),
    [
        ("slow-10", "DEV_SM_CLOCK", (0.87, 0.93)),
        ("power-brake", "DEV_SM_CLOCK", (0.4, 0.8)),
        ("power-brake", "DEV_POWER_USAGE", (0.2, 0.7)),
        ("mem-clock", "DEV_MEM_CLOCK", (0.55, 0.65)),
        ("hbm-hot", "DEV_MEMORY_TEMP", (1.15, 1.5)),
        ("hbm-hot", "DEV_GPU_TEMP", (0.99, 1.01)),
        ("nvlink-errors", "PROF_NVLINK_TX_BYTES", (0.4, 0.7)),
        ("pcie-link", "DEV_PCIE_LINK_WIDTH", (0.5, 0.5)),
        ("pcie-link", "PROF_PCIE_RX_BYTES", (0.4, 0.6)),
        ("hang", "DEV_POWER_USAGE", (0.1, 0.4)),
        ("memory-full", "DEV_FB_USED", (1.05, 2.0)),
        ("slow-hidden", "DEV_SM_CLOCK", (0.95, 1.1)),
    ],
)
def test_a_fault_moves_its_metric(kind: str, name: str, change: tuple[float, float]) -> None:
    healthy, faulty, uuid, _ = before_and_after(kind, name)
    assert change[0] <= faulty[uuid] / healthy[uuid] <= change[1]


@pytest.mark.parametrize(
    ("kind", "name", "least"),
    [
        ("ecc-storm", "DEV_ECC_SBE_VOL_TOTAL", 1500),
        ("pcie-replays", "DEV_PCIE_REPLAY_COUNTER", 400),
        ("nvlink-errors", "DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", 600),
        ("nvlink-errors", "DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL", 150),
        ("remap-failure", "DEV_ROW_REMAP_FAILURE", 1),
        ("remap-failure", "DEV_XID_ERRORS", 64),
        ("gsp", "DEV_XID_ERRORS", 119),
        ("nvlink-xid", "DEV_XID_ERRORS", 74),
    ],
)
def test_a_fault_counts(kind: str, name: str, least: float) -> None:
    healthy, faulty, uuid, _ = before_and_after(kind, name)
    assert faulty[uuid] - healthy[uuid] >= least
    others = {u for u in faulty if u != uuid and name != "DEV_XID_ERRORS"}
    assert all(abs(faulty[u] - healthy[u]) <= 2 for u in others)


@pytest.mark.parametrize("kind", ["slow-10", "slow-hidden", "nvlink-errors"])
def test_mates_wait_for_a_slow_gpu_and_it_works_through(kind: str) -> None:
    healthy, faulty, uuid, mates = before_and_after(kind, "PROF_SM_ACTIVE")
    assert faulty[uuid] == pytest.approx(healthy[uuid], rel=0.04)
    assert np.mean([faulty[m] / healthy[m] for m in mates]) < 0.95
    _, util, _, _ = before_and_after(kind, "DEV_GPU_UTIL")
    assert min(util[m] for m in [uuid, *mates]) > 80


def test_a_hung_kernel_looks_busy_long_after_its_mates_gave_up() -> None:
    _, util, uuid, mates = before_and_after("hang", "DEV_GPU_UTIL", after_s=900)
    assert util[uuid] == 100
    assert {util[m] for m in mates} == {0}


def test_a_slow_leak_takes_its_time() -> None:
    healthy, soon, uuid, _ = before_and_after("memory-leak", "DEV_FB_USED", after_s=300)
    assert 1.0 < soon[uuid] / healthy[uuid] < 1.15
    _, late, uuid, _ = before_and_after("memory-leak", "DEV_FB_USED", after_s=2700)
    _, free, uuid, _ = before_and_after("memory-leak", "DEV_FB_FREE", after_s=2700)
    assert late[uuid] / (late[uuid] + free[uuid]) > 0.985


def test_cooling_that_creeps_away_ends_hot() -> None:
    healthy, soon, uuid, _ = before_and_after("fan-creep", "DEV_GPU_TEMP", after_s=300)
    assert soon[uuid] - healthy[uuid] < 8
    healthy, late, uuid, _ = before_and_after("fan-creep", "DEV_GPU_TEMP", after_s=3600)
    assert late[uuid] > 80


def test_flapping_comes_and_goes() -> None:
    fleet = new_fleet()
    uuid = job_rows(fleet, "train-02")[0]
    fleet.inject("flapping", uuid)
    seen = []
    for second in range(61, 361, 10):
        fleet.advance(T0 + second)
        seen.append(bool(int(read(fleet, "DEV_CLOCKS_EVENT_REASONS")[uuid]) & HW_SLOWDOWN))
    assert 0.3 < np.mean(seen) < 0.7


@pytest.mark.parametrize(
    ("kind", "name", "hosts"),
    [
        ("fan-tray", "DEV_GPU_TEMP", {"gpu-02"}),
        ("psu", "DEV_CLOCKS_EVENT_REASONS", {"gpu-02"}),
        ("hot-aisle", "DEV_GPU_TEMP", {f"gpu-0{i}" for i in range(4)}),
    ],
)
def test_a_cause_outside_the_gpu_befalls_its_neighbours(
    kind: str, name: str, hosts: set[str]
) -> None:
    healthy, faulty = new_fleet(), new_fleet()
    uuid = next(g.uuid for g in faulty.gpus if g.node == "gpu-02")
    faulty.inject(kind, uuid)
    for fleet in (healthy, faulty):
        fleet.advance(T0 + 900, 10.0)
    one, other = read(healthy, name), read(faulty, name)
    if kind == "psu":
        moved = {u for u in one if int(other[u]) & POWER_BRAKE}
        assert len(moved) == 8
    else:
        moved = {u for u in one if other[u] - one[u] > 5}
    assert {g.node for g in faulty.gpus if g.uuid in moved} == hosts
    faulty.repair(uuid)
    faulty.advance(T0 + 3600, 10.0)
    healthy.advance(T0 + 3600, 10.0)
    one, other = read(healthy, name), read(faulty, name)
    assert all(abs(one[u] - other[u]) < 8 for u in moved)


@pytest.mark.parametrize("seed", range(6))
def test_every_kind_begins_and_ends_on_every_site(seed: int) -> None:
    fleet = Fleet(seed, 12, start_s=T0, site=drawn(seed))
    fleet.advance(T0 + 60)
    at_s = T0 + 60
    for place, kind in enumerate(faults.KINDS):
        busy = [row for row, job in enumerate(fleet.workload.job_of) if job]
        idle = [row for row, gpu in enumerate(fleet.gpus) if gpu.node in fleet.spare_hosts]
        row = idle[0] if kind == "burn-in" and idle else busy[place % len(busy)]
        uuid = fleet.gpus[row].uuid
        fleet.inject(kind, uuid)
        at_s += 660.0
        for block in fleet.history(at_s - 600, at_s, 60.0):
            assert np.nanmin(block.values) >= 0
        fleet.repair(uuid)
        assert not fleet.faults
    assert fleet.reporting().all()
    assert not fleet.trouble.down.any()


def test_sites_differ_by_seed_and_are_their_own() -> None:
    sites = [drawn(seed) for seed in range(12)]
    assert len({site.physics.resistance for site in sites}) == 12
    assert drawn(3) == drawn(3)
    assert {site.rack_label for site in sites} == {site.pods for site in sites} == {True, False}


def labels_of(site: Site, name: str = "DCGM_FI_DEV_FB_USED") -> list[dict[str, str]]:
    fleet = Fleet(3, 6, start_s=T0, site=site)
    [block] = fleet.history(T0, T0, 15.0)
    return [labels for labels in block.labels if labels["__name__"] == name]


def test_racks_pods_and_slices_show_where_the_site_has_them() -> None:
    assert all("rack" not in labels for labels in labels_of(PLAIN))
    assert {labels["rack"] for labels in labels_of(Site(rack_label=True))} == {"r00", "r01"}
    pods = {labels.get("pod", "") for labels in labels_of(Site(pods=True))}
    assert any(pod.endswith("-worker-0") for pod in pods)
    cut = [labels for labels in labels_of(Site(mig_hosts=1)) if "GPU_I_ID" in labels]
    assert len(cut) == 16
    assert {labels["Hostname"] for labels in cut} == {"gpu-00"}
    util = labels_of(Site(mig_hosts=1), "DCGM_FI_DEV_GPU_UTIL")
    assert "gpu-00" not in {labels["Hostname"] for labels in util}


def test_a_late_model_joins_when_told() -> None:
    fleet = Fleet(3, 6, start_s=T0, site=Site(late_hosts=1))
    assert not fleet.reporting()[-8:].any()
    fleet.inject("new-model", fleet.gpus[0].uuid)
    fleet.advance(T0 + 10)
    assert fleet.reporting().all()
    fleet.advance(T0 + 2000)
    assert fleet.workload.job_of[-1] == "train-new-5"


def test_maintenance_takes_the_series_and_gives_them_back_with_new_counters() -> None:
    fleet = new_fleet()
    uuid = job_rows(fleet, "train-02")[0]
    before = read(fleet, "DEV_TOTAL_ENERGY_CONSUMPTION")[uuid]
    fleet.inject("maintenance", uuid)
    fleet.advance(T0 + 120)
    assert uuid not in read(fleet, "DEV_GPU_TEMP")
    [block] = fleet.history(T0 + 120, T0 + 120, 15.0)
    up = [
        v
        for la, v in zip(block.labels, block.values[:, 0], strict=True)
        if la.get("__name__") == "up"
    ]
    assert sorted(up)[:2] == [0.0, 1.0]
    fleet.advance(T0 + 700)
    assert read(fleet, "DEV_TOTAL_ENERGY_CONSUMPTION")[uuid] < before
    assert fleet.workload.jobs["train-02"].state == 0


def test_jobs_come_go_shrink_and_move() -> None:
    fleet = new_fleet()
    uuid, *_ = job_rows(fleet, "train-02")
    fleet.inject("job-resize", uuid)
    assert len(job_rows(fleet, "train-02")) == 4
    fleet.inject("job-move", uuid)
    assert uuid not in job_rows(fleet, "train-02")
    uuid = job_rows(fleet, "train-03")[0]
    fleet.inject("job-churn", uuid)
    assert fleet.workload.job_of[fleet.row(uuid)] is None
    fleet.advance(T0 + 240)
    assert str(fleet.workload.job_of[fleet.row(uuid)]).startswith("train-03.")
    fleet.inject("job-end", uuid)
    assert fleet.workload.job_of[fleet.row(uuid)] is None
