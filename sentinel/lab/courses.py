"""What each fault and each harmless surprise does to a simulated fleet."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sentinel.core.domain import Ints
from sentinel.lab import workload
from sentinel.lab.series import NAMES

if TYPE_CHECKING:
    from sentinel.lab.fleet import Fleet
    from sentinel.lab.trouble import Trouble

_REBOOT_S: Final = 480.0
_SILENT_S: Final = 600.0
_EXPORTER_AWAY_S: Final = 55.0
_BETWEEN_JOBS_S: Final = 120.0
_LOOP_S: Final = 120.0
_JOINED_S: Final = 1800.0  # from a new host's first sample to its first job
_LOOPS: Final = 10
_STORM_PER_S: Final = 20.0
# What a new version of an exporter shows no more, drawn by host.
_DROPPED: Final = (
    ("DCGM_FI_DEV_MEM_COPY_UTIL",),
    ("DCGM_FI_DEV_MEM_CLOCK", "DCGM_FI_DEV_FB_TOTAL"),
    ("DCGM_FI_DEV_CLOCKS_EVENT_REASONS",),
    ("DCGM_FI_PROF_DRAM_ACTIVE", "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"),
)


def _xid(trouble: Trouble, row: int, code: int, *, crash: bool = True) -> None:
    trouble.fleet.hardware.xid[row] = code
    if crash:
        trouble.crash(trouble.fleet.workload.job_of[row], row)


def _off_the_bus(trouble: Trouble, row: int, uuid: str) -> None:
    _xid(trouble, row, 79)
    trouble.silent[row] = True

    def gone() -> None:
        trouble.gone[row] = True

    trouble.later(("off-the-bus", uuid), trouble.fleet.xid_visible_s, gone)


def _vanished(trouble: Trouble, row: int, uuid: str) -> None:
    trouble.gone[row] = True
    trouble.hang(trouble.fleet.workload.job_of[row])


def _ecc(trouble: Trouble, row: int, uuid: str) -> None:
    hardware = trouble.fleet.hardware
    hardware.uncorrectable_error(row)
    _xid(trouble, row, 48)

    def remap() -> None:
        hardware.xid[row] = 63
        hardware.remap_pending[row] = 1
        hardware.remapped_uncorrectable[row] += 1

    trouble.later(("ecc", uuid), trouble.fleet.xid_visible_s, remap)


def _remap_failure(trouble: Trouble, row: int, uuid: str) -> None:
    trouble.fleet.hardware.remap_failure[row] = 1
    _xid(trouble, row, 64, crash=False)


def _gsp(trouble: Trouble, row: int, uuid: str) -> None:
    _xid(trouble, row, 119)


def _nvlink_xid(trouble: Trouble, row: int, uuid: str) -> None:
    trouble.fleet.hardware.nvlink_crc[row] += 40
    _xid(trouble, row, 74)


def _hang(trouble: Trouble, row: int, uuid: str) -> None:
    work = trouble.fleet.workload
    trouble.hang(work.job_of[row])
    work.hung[row] = True


def _maintenance(trouble: Trouble, row: int, uuid: str) -> None:
    fleet, host = trouble.fleet, trouble.fleet.series.host_of[row]
    rows = trouble.scope("maintenance", row)
    jobs = sorted({j for j in (fleet.workload.job_of[r] for r in rows.tolist()) if j})
    trouble.down[host] = True
    for job_id in jobs:
        fleet.workload.set_state(job_id, workload.DOWN, fleet.at_s)

    def back() -> None:
        del trouble.faults[("maintenance", uuid)]
        trouble.down[host] = False
        fleet.hardware.restart(rows)
        for job_id in jobs:
            job = fleet.workload.jobs.get(job_id)
            if job and not trouble.stopped()[job.rows].any():
                fleet.start_again(job_id)

    trouble.later(("maintenance", uuid), _REBOOT_S, back)


def _away(trouble: Trouble, kind: str, row: int, uuid: str, for_s: float, *, forgets: bool) -> None:
    host, rows = trouble.fleet.series.host_of[row], trouble.scope(kind, row)
    trouble.down[host] = True

    def back() -> None:
        trouble.down[host] = False
        if forgets:  # it only ever told of the last Xid since it began
            trouble.fleet.hardware.xid[rows] = 0

    trouble.later((kind, uuid), for_s, back)


def _exporter_restart(trouble: Trouble, row: int, uuid: str) -> None:
    _away(trouble, "exporter-restart", row, uuid, _EXPORTER_AWAY_S, forgets=True)


def _lost_host(trouble: Trouble, row: int, uuid: str) -> None:
    _away(trouble, "lost-host", row, uuid, _SILENT_S, forgets=False)


def _exporter_upgrade(trouble: Trouble, row: int, uuid: str) -> None:
    series, host = trouble.fleet.series, int(trouble.fleet.series.host_of[row])
    series.hidden[:, host] = False  # what it did not show before, it shows now
    for name in _DROPPED[host % len(_DROPPED)]:
        series.hidden[NAMES.index(name), host] = True
    _away(trouble, "exporter-upgrade", row, uuid, _EXPORTER_AWAY_S, forgets=True)


def _new_model(trouble: Trouble, row: int, uuid: str) -> None:
    fleet = trouble.fleet

    def begin() -> None:
        for host in late:
            rows = np.flatnonzero(fleet.series.host_of == host).tolist()
            if all(fleet.workload.job_of[r] is None for r in rows):
                fleet.assign(f"train-new-{host}", [fleet.gpus[r].uuid for r in rows])

    late = np.flatnonzero(trouble.unknown).tolist()
    trouble.unknown[:] = False
    fleet.after(_JOINED_S, begin)


def _crash_loop(trouble: Trouble, row: int, uuid: str) -> None:
    def again(left: int) -> None:
        job_id = trouble.fleet.workload.job_of[row]
        trouble.fleet.hardware.xid[row] = 31 if left % 2 else 43
        trouble.crash(job_id, row, restart=True)
        if left:
            trouble.later(("crash-loop", uuid), _LOOP_S, lambda: again(left - 1))

    again(_LOOPS)


def _job_end(trouble: Trouble, row: int, uuid: str) -> None:
    job_id = trouble.fleet.workload.job_of[row]
    if job_id is not None:
        trouble.fleet.unassign(job_id)


def _job_churn(trouble: Trouble, row: int, uuid: str) -> None:
    fleet, job_id = trouble.fleet, trouble.fleet.workload.job_of[row]
    if job_id is None:
        return
    job = fleet.workload.jobs[job_id]
    uuids = [fleet.gpus[r].uuid for r in job.rows.tolist()]
    fleet.unassign(job_id)

    def begin() -> None:
        if not any(fleet.workload.job_of[fleet.row(u)] for u in uuids):
            name = f"{job_id.split('.')[0]}.{int(fleet.at_s) % 100000}"
            fleet.assign(name, uuids, workload.KIND_NAMES[job.kind])

    trouble.later(("job-churn", uuid), _BETWEEN_JOBS_S, begin)


def _job_resize(trouble: Trouble, row: int, uuid: str) -> None:
    fleet, job_id = trouble.fleet, trouble.fleet.workload.job_of[row]
    if job_id is not None and len(fleet.workload.jobs[job_id].rows) > 1:
        rows = fleet.workload.jobs[job_id].rows
        fleet.assign(job_id, [fleet.gpus[r].uuid for r in rows[: len(rows) // 2].tolist()])


def _job_move(trouble: Trouble, row: int, uuid: str) -> None:
    """To idle GPUs of its model, where there are enough."""
    fleet, job_id = trouble.fleet, trouble.fleet.workload.job_of[row]
    if job_id is None:
        return
    need, model = len(fleet.workload.jobs[job_id].rows), fleet.gpus[row].model
    free = [
        gpu.uuid
        for r, gpu in enumerate(fleet.gpus)
        if fleet.workload.job_of[r] is None and gpu.model == model and not _unfit(trouble, r)
    ]
    if len(free) >= need:
        fleet.assign(job_id, free[:need])


def _unfit(trouble: Trouble, row: int) -> bool:
    host = trouble.fleet.series.host_of[row]
    return bool(trouble.gone[row] or trouble.down[host] or trouble.unknown[host])


def _burn_in(trouble: Trouble, row: int, uuid: str) -> None:
    fleet = trouble.fleet
    rows = [r for r in trouble.scope("burn-in", row).tolist() if not fleet.workload.job_of[r]]
    if rows:
        name = f"burn-in-{fleet.gpus[row].node}"
        fleet.assign(name, [fleet.gpus[r].uuid for r in rows], "training")
        fleet.workload.reshape(name, sm=0.98, tensor=0.95, dram=0.9, fb=0.93)


def _set(part: str, name: str, value: Any) -> Callable[[Fleet, Ints], None]:
    """An array of the hardware or the work takes this value on the rows befallen."""

    def state(fleet: Fleet, rows: Ints) -> None:
        getattr(getattr(fleet, part), name)[rows] = value

    return state


def _slow(efficiency: float, **factors: float) -> Callable[[Fleet, Ints], None]:
    def state(fleet: Fleet, rows: Ints) -> None:
        fleet.hardware.efficiency[rows] = efficiency
        for name, value in factors.items():
            getattr(fleet.hardware, name)[rows] = value

    return state


def _air(shift_c: float, within_s: float) -> Callable[[Fleet, Ints], None]:
    def state(fleet: Fleet, rows: Ints) -> None:
        fleet.hardware.air_goal_c[rows] = shift_c
        fleet.hardware.air_rate_c_per_s[rows] = shift_c / within_s

    return state


def _creep(fleet: Fleet, rows: Ints) -> None:
    for row in rows.tolist():
        fleet.hardware.lose_cooling(row, above_c=10.0)
    goal = fleet.hardware.cooling_goal[rows]
    fleet.hardware.cooling_rate_per_s[rows] = (goal - 1) / 3600.0


def _thermal(fleet: Fleet, rows: Ints) -> None:
    for row in rows.tolist():
        fleet.hardware.lose_cooling(row)


def _job(change: Callable[[Fleet, str, Ints], None]) -> Callable[[Fleet, Ints], None]:
    """The job on the GPU changes; its rows are handed over."""

    def state(fleet: Fleet, rows: Ints) -> None:
        job_id = fleet.workload.job_of[int(rows[0])]
        if job_id is not None:
            change(fleet, job_id, fleet.workload.jobs[job_id].rows)

    return state


def _reshape(**character: float) -> Callable[[Fleet, Ints], None]:
    return _job(lambda fleet, job_id, rows: fleet.workload.reshape(job_id, **character))


def _stages(fleet: Fleet, job_id: str, rows: Ints) -> None:
    fleet.workload.share[rows] = np.linspace(1.0, 0.6, len(rows))


def _lock(fleet: Fleet, job_id: str, rows: Ints) -> None:
    fleet.hardware.locked_mhz[rows] = np.floor(0.8 * fleet.hardware.clock_mhz[rows].min())


def _new_work(fleet: Fleet, job_id: str, rows: Ints) -> None:
    fleet.workload.set_character(job_id, f"{job_id} new-workload {fleet.at_s}")


def _limit(fleet: Fleet, rows: Ints) -> None:
    fleet.hardware.power_limit_w *= 0.85


def _quiet(fleet: Fleet, rows: Ints) -> None:
    fleet.workload.quiet = True


def _flap(fleet: Fleet, rows: Ints) -> None:
    fleet.hardware.flaps_since_s[rows] = fleet.at_s


def _skewed(fleet: Fleet, rows: Ints) -> None:
    fleet.workload.share[rows] = 1.3
    fleet.workload.restless[rows] = True


# What is a state of the hardware or of the work, and lasts until it is ended.
STATES: Final[dict[str, Callable[[Fleet, Ints], None]]] = {
    "thermal": _thermal,
    "clock": _set("hardware", "clock_factor", 0.8),
    "slow-10": _set("hardware", "clock_factor", 0.9),
    "slow-hidden": _slow(0.88),
    "power-brake": _set("hardware", "braked", True),
    "psu": _set("hardware", "braked", True),
    "mem-clock": _set("hardware", "mem_factor", 0.6),
    "hbm-hot": _set("hardware", "hbm_goal_c", 18.0),
    "fan-creep": _creep,
    "fan-tray": _set("hardware", "cooling_goal", 1.8),
    "hot-aisle": _air(12.0, 600.0),
    "ecc-storm": _set("hardware", "sbe_per_s", _STORM_PER_S),
    "nvlink-errors": _slow(0.85, nvlink_factor=0.6, nvlink_errors_per_s=8.0),
    "pcie-replays": _set("hardware", "replays_per_s", 5.0),
    "pcie-link": _slow(0.95, pcie_factor=0.5, pcie_width=8.0),
    "memory-leak": _set("workload", "leak_per_s", 0.45 / 2400),
    "memory-full": _set("workload", "leak_per_s", 0.45 / 60),
    "driver-shift": _set("hardware", "work_factor", 1.06),
    "idle-night": _quiet,
    "heat-wave": _air(4.0, 2 * 3600.0),
    "power-cap": _limit,
    "new-workload": _job(_new_work),
    "evaluation": _reshape(evaluate_period_s=600.0, evaluate_s=180.0),
    "memory-hungry": _reshape(fb=0.965),
    "pipeline": _job(_stages),
    "idle-rank": _set("workload", "share", 0.004),
    "skew": _skewed,
    "locked-clocks": _job(_lock),
    "single-bits": _set("hardware", "sbe_per_s", 5.0 / 3600),
    "sticky-xid": _set("hardware", "xid", 13.0),
    "flapping": _flap,
}
# What takes a course of its own.
COURSES: Final[dict[str, Callable[[Trouble, int, str], None]]] = {
    "off-the-bus": _off_the_bus,
    "vanished": _vanished,
    "ecc": _ecc,
    "remap-failure": _remap_failure,
    "gsp": _gsp,
    "nvlink-xid": _nvlink_xid,
    "hang": _hang,
    "maintenance": _maintenance,
    "exporter-restart": _exporter_restart,
    "exporter-upgrade": _exporter_upgrade,
    "lost-host": _lost_host,
    "new-model": _new_model,
    "crash-loop": _crash_loop,
    "job-end": _job_end,
    "job-churn": _job_churn,
    "job-resize": _job_resize,
    "job-move": _job_move,
    "burn-in": _burn_in,
}
