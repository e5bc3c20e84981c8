"""What users of such systems have been misled by: one case per public report of telemetry.

Each case tells the data as the fold gets it and what may be made of it, through the real fold
and the real judgement. The reports are of NVIDIA/dcgm-exporter (E), NVIDIA/DCGM (D),
NVIDIA/NVSentinel (N), NVIDIA/gpu-operator (O), NVIDIA/k8s-device-plugin (P),
guilbaults/slurm-job-exporter (S), aws/eks-node-monitoring-agent (A), aws/containers-roadmap
(C), leptonai/gpud (G).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from sentinel.core.domain import Kind, Presence, Severity, Workload
from sentinel.core.frame import Telemetry
from sentinel.core.verdict import Settings, Watch
from tests.core.telemetry import CATALOG, IDENTITY, START_S, gpu, key, samples

STEP_S = 15.0
UTIL, TEMP = "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_GPU_TEMP"
POWER, CLOCK = "DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_SM_CLOCK"
MEMORY, ENERGY = "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"
XID, XIDS = "DCGM_FI_DEV_XID_ERRORS", "DCGM_EXP_XID_ERRORS_COUNT"
SBE, DBE = "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL"
ENGINE, NVLINK = "DCGM_FI_PROF_GR_ENGINE_ACTIVE", "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL"
WELL = {TEMP: 55, POWER: 310.5, CLOCK: 1410, UTIL: 80}
Points = list[tuple[Any, float, float]]


def shown(
    at_s: float, n: int, host: str = "a", values: dict[str, float] | None = None, **labels: Any
) -> Points:
    """One GPU as an exporter shows it, all well unless `values` say otherwise; None leaves a
    metric out."""
    wanted = WELL | (values or {})
    return [
        (key(name, **gpu(n, host, **labels)), at_s, v)
        for name, v in wanted.items()
        if v is not None
    ]


def up(at_s: float, host: str = "a", value: float = 1.0) -> Points:
    return [(key("up", instance=f"{host}:9400", job="dcgm-exporter"), at_s, value)]


def fleet(at_s: float, hosts: str = "a", gpus: int = 2, **bent: dict[str, float]) -> Points:
    """Every GPU of every host; `a0={...}` bends the values of one."""
    return [
        point
        for host in hosts
        for point in (
            *up(at_s, host),
            *(p for n in range(gpus) for p in shown(at_s, n, host, bent.get(f"{host}{n}"))),
        )
    ]


@dataclass
class Seen:
    """All that the fold and the judgement said, tick by tick."""

    telemetry: Telemetry
    frames: list[Any] = field(default_factory=list)
    judgements: list[Any] = field(default_factory=list)

    def row(self, uuid: str) -> int:
        return next(i for i, g in enumerate(self.frames[-1].gpus) if g.uuid == uuid)

    def value(self, metric: str, uuid: str = "GPU-a0") -> float:
        frame = self.frames[-1]
        return float(frame.values[self.row(uuid), frame.metrics.index(metric)])

    def kind(self, uuid: str = "GPU-a0", tick: int = -1) -> Kind:
        code = self.judgements[tick].kinds[self.row(uuid)]
        return list(Kind)[int(code)]

    def xids(self) -> list[tuple[int, str, int]]:
        """(tick, GPU, code)"""
        return [
            (tick, frame.gpus[x.row].uuid, x.code)
            for tick, frame in enumerate(self.frames)
            for x in frame.xids
        ]

    @property
    def verdicts(self) -> list[Any]:
        return [v for j in self.judgements for v in j.verdicts]

    @property
    def gpus(self) -> list[str]:
        return sorted(g.uuid for g in self.frames[-1].gpus)

    def calm(self) -> bool:
        return not self.verdicts and self.kinds() <= {Kind.NORMAL}

    def kinds(self) -> set[Kind]:
        return {list(Kind)[int(k)] for j in self.judgements for k in j.kinds}

    def acts(self) -> bool:
        return any(v.may_fence or v.may_move for v in self.verdicts)


@dataclass
class Trap:
    reports: str
    symptom: str
    story: Callable[[float, int], Points]  # (time, tick) -> what Prometheus holds of it
    judged: Callable[[Seen], bool]
    ticks: int = 12
    lacks: Callable[[str], frozenset[str]] = lambda model: frozenset()


def sticks(t, i):
    return fleet(t, a0={XID: 31 if i >= 4 else 0})


def counted(t, i):
    count = {4: 1, 5: 1, 6: 1, 7: 2, 8: 2}.get(i, 0 if i < 4 else 2)
    return [
        *fleet(t, a0={XID: 79 if i >= 4 else 0}),
        (key(XIDS, **gpu(0), xid="79", window_size_in_ms="300000"), t, count),
    ]


def masked(t, i):
    points = fleet(t, a0={XID: 0 if i < 4 else 62 if i < 5 else 45})
    if i >= 4:
        points.append((key(XIDS, **gpu(0), xid="62"), t, 1))
    if i >= 5:
        points.append((key(XIDS, **gpu(0), xid="45"), t, 1))
    return points


def absent_until_first(t, i):
    return fleet(t, a0={} if i < 7 else {DBE: 1, XID: 48}, a1={})


def newer_list(t, i):
    """The exporter is told to show ECC: both GPUs get the series, with old counts."""
    return fleet(t, a0={} if i < 7 else {DBE: 3}, a1={} if i < 7 else {DBE: 0})


def typed_counter(t, i):
    """NVLink bandwidth is called a counter; it goes up and down."""
    return fleet(t, a0={NVLINK: [800, 120, 950, 3][i % 4]})


def mig(t, i):
    whole = {UTIL: 0, MEMORY: None}
    points = fleet(t, a0=whole, gpus=1)
    for part, active in (("1", 0.4), ("2", 0.1)):
        labels = gpu(0) | {"GPU_I_ID": part, "GPU_I_PROFILE": "3g.40gb"}
        points.append((key(ENGINE, **labels), t, active))
        points.append((key(CLOCK, **labels), t, 1410))
        points.append((key(POWER, **labels), t, 310.5))
    return points


def time_sliced(t, i):
    points = up(t)
    for pod in ("one", "two", "three"):
        points += shown(t, 0, values={MEMORY: 30_000}, exported_pod=pod, exported_namespace="ml")
    return points


def churn(t, i):
    return up(t) + shown(t, 0, exported_pod=f"job-{i}", exported_namespace="ml") + shown(t, 1)


def exporters_pod(t, i):
    return up(t) + shown(t, 0, pod="dcgm-exporter-x7k2p", namespace="gpu-operator")


def labels_gap(t, i):
    pod = {} if i == 6 else {"exported_pod": "train-0", "exported_namespace": "ml"}
    return up(t) + shown(t, 0, **pod)


def dead_pod(t, i):
    """The label of the pod that ended stays for half an hour beside that of the new one."""
    points = up(t)
    for pod, lives in (("old", i < 4), ("new", i >= 4)):
        if lives:
            points += shown(t, 0, exported_pod=pod, exported_namespace="ml")
    return points


def renamed_label(t, i):
    label = {"Hostname": "node-a"} if i < 6 else {"Hostname": None, "hostname": "node-a"}
    return up(t) + shown(t, 0, **label) + shown(t, 1, **label)


def localhost(t, i):
    return [
        p
        for host in "ab"
        for p in (
            *up(t, host),
            *shown(t, 0, host, Hostname="localhost"),
            *shown(t, 1, host, Hostname="localhost"),
        )
    ]


def pod_name(t, i):
    """The exporter's pod restarts under a new name, which it says is the host."""
    name = "dcgm-exporter-abcde" if i < 6 else "dcgm-exporter-fghij"
    return up(t) + shown(t, 0, Hostname=name) + shown(t, 1, Hostname=name)


def hangs(t, i):
    """Samples come for ever, all from one cached scrape."""
    frozen = {ENERGY: 5e9}
    return fleet(t, a0=frozen, a1=frozen)


def one_gone(t, i):
    return fleet(t, gpus=2 if i < 6 else 1)


def scrape_timeouts(t, i):
    """Every third scrape runs into the exporter's time limit: no series, up 0."""
    return up(t, value=0.0) if i % 3 == 2 else fleet(t)


def killed(t, i):
    """The exporter is killed; it comes back, and the GPU's firmware has timed out."""
    if 4 <= i < 8:
        return up(t, value=0.0)
    return fleet(t, a0={XID: 119 if i >= 8 else 0}, a1={XID: 0})


def fields_conflict(t, i):
    """ECC and NVLink fields take turns, as their groups conflict."""
    return fleet(t, a0={DBE: 0, NVLINK: None} if i % 2 else {DBE: None, NVLINK: 300})


def spike(t, i):
    return fleet(t, a0={UTIL: 4294967295 if i == 5 else 80})


def idle_profiling(t, i):
    return fleet(t, a0={ENGINE: 0.0 if i >= 4 else 0.9, XID: 31 if i >= 4 else 0})


def profiler(t, i):
    return fleet(t, a0={ENGINE: None if i >= 4 else 0.9})


def one_nanosecond(t, i):
    return fleet(t, a0={"DCGM_FI_DEV_POWER_VIOLATION": 1 if i >= 4 else 0})


def health_warns(t, i):
    points = fleet(t)
    points.append((key("DCGM_EXP_GPU_HEALTH_STATUS", **gpu(0), health_watch="THERMAL"), t, 10))
    return points


def links_down(t, i):
    return fleet(t, a0={NVLINK: 0}, a1={NVLINK: 0})


def corrected(t, i):
    """17,700 corrected errors a second; the exporter's answers come every third tick."""
    return fleet(t, a0={SBE: 1e6 + 17_700 * STEP_S * i}, a1={SBE: 0}) if i % 3 == 0 else up(t)


def zero_series(t, i):
    return fleet(t) if i < 5 else up(t)


def sentinels(t, i):
    blanks = [2147483632, 9223372036854775794, 140737488355328, 18446744073709551615]
    return fleet(t, a0=dict.fromkeys((UTIL, TEMP, POWER, MEMORY), blanks[i % 4]))


def crash(t, i):
    """A job of 77 nodes crashes: each GPU tears its channels down."""
    points = []
    for n in range(8):
        host = "abcdefgh"[n]
        points += up(t, host)
        for g in range(2):
            points += shown(t, g, host, {XID: 45 if i >= 5 else 0}, hpc_job="4711")
    return points


def page_fault(t, i):
    return fleet(t, a0={XID: 31 if i >= 5 else 0})


def pcie_nvlink(t, i):
    count = "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL"
    return fleet(t, a0={count: 1000.0 * i, NVLINK: 0})


def bootstrap(t, i):
    """DCGM restarts: GPUs come back one after the other, with blanks at first."""
    if 4 <= i < 6:
        return up(t, value=0.0)
    if i in (6, 7):
        return up(t) + shown(t, 1)
    return fleet(t, a0={TEMP: 2147483632} if i == 8 else {})


def history_replayed(t, i):
    """We start while a code stands, and the counts of it too."""
    return [
        *fleet(t, a0={XID: 79, DBE: 4}),
        (key(XIDS, **gpu(0), xid="79"), t, 3),
    ]


def noisy(t, i):
    """One node repeats Xid 95 without end; another falls off the bus meanwhile."""
    points = fleet(t, hosts="ab", b1={XID: 79 if i >= 7 else 0})
    points.append(
        (key("nvidia_smi_xid_errors_total", **gpu(0), xid="95"), t, 800_000.0 * max(i - 3, 0))
    )
    return points


def contained(t, i):
    return fleet(t, a0={XID: 94 if i >= 4 else 0}, a1={XID: 109 if i >= 4 else 0})


def remap(t, i):
    return fleet(t, a0={"DCGM_FI_DEV_ROW_REMAP_FAILURE": 1 if i >= 4 else 0})


def unreachable(t, i):
    """The engine behind the exporters of one node is gone; the node works."""
    return fleet(t, hosts="ab") if i < 5 else fleet(t, hosts="b") + up(t, "a")


def health_clears(t, i):
    return fleet(t, a0={XID: 79 if 3 <= i < 6 else 0})


def replicas(t, i):
    """A pair of Prometheus; one of them cannot reach the exporter."""
    points = []
    for replica, reaches in (("p-0", True), ("p-1", i < 4)):
        points.append(
            (
                key("up", instance="a:9400", job="dcgm-exporter", prometheus_replica=replica),
                t + 0.5,
                float(reaches),
            )
        )
        for n in (0, 1):
            if reaches:
                points += shown(t, n, prometheus_replica=replica)
    return points


PCIE = lambda model: frozenset({"nvlink"})  # noqa: E731
TRAPS = [
    Trap("E500 D277", "the Xid gauge sticks until the exporter restarts", sticks,
         lambda s: s.xids() == [(4, "GPU-a0", 31)] and not s.acts()),
    Trap("E190", "the same Xid twice changes nothing in the gauge", counted,
         lambda s: s.xids() == [(4, "GPU-a0", 79), (7, "GPU-a0", 79)]),
    Trap("D235", "Xid 62 is hidden by a later 45", masked,
         lambda s: (4, "GPU-a0", 62) in s.xids() and len(s.xids()) == 2 and s.acts()),
    Trap("E700 E646", "series of errors are left out until there is one", absent_until_first,
         lambda s: s.kind(tick=6) is Kind.NORMAL and s.kind(tick=7) is Kind.FAULT and s.acts()),
    Trap("E646", "series that begin on all GPUs of a host are a new list, not new errors",
         newer_list, lambda s: s.calm()),
    Trap("E417 E658 E87", "gauges are typed counter", typed_counter,
         lambda s: s.calm() and s.value("nvlink_mb_per_s") == 3),
    Trap("E105 E216 E430 E380 E50", "under MIG utilisation is 0 or missing, memory missing, "
         "and every slice repeats the clocks and power of its parent", mig,
         lambda s: s.gpus == ["GPU-a0"] and math.isnan(s.value("gpu_util_ratio"))
         and s.value("power_w") == 310.5 and s.value("sm_clock_mhz") == 1410
         and s.value("gr_engine_active_ratio") == 0.4 and s.calm()),
    Trap("E582 E587", "time slicing repeats the values of the device per pod", time_sliced,
         lambda s: s.gpus == ["GPU-a0"] and s.value("fb_used_mib") == 30_000 and s.calm()),
    Trap("E340 E237", "pods come and go: one GPU in many series", churn,
         lambda s: s.gpus == ["GPU-a0", "GPU-a1"] and s.calm()),
    Trap("E27 E85", "`pod` is the exporter's own", exporters_pod,
         lambda s: s.frames[-1].workloads == (None,)),
    Trap("E342", "the labels of the work vanish for one scrape", labels_gap,
         lambda s: {f.workloads[0] for f in s.frames[1:]} == {Workload("pod", "train-0", "ml")}
         and s.calm()),
    Trap("E140", "the label of a dead pod stays", dead_pod,
         lambda s: s.frames[-1].workloads[0].id == "new" and s.gpus == ["GPU-a0"]),
    Trap("E655 E709", "Hostname becomes hostname", renamed_label,
         lambda s: {g.node for f in s.frames for g in f.gpus} == {"node-a"} and s.calm()),
    Trap("E572", "Hostname is localhost on every host", localhost,
         lambda s: {g.node for g in s.frames[-1].gpus} == {"a:9400", "b:9400"} and s.calm()),
    Trap("E78", "Hostname is the name of the exporter's pod", pod_name,
         lambda s: s.gpus == ["GPU-a0", "GPU-a1"] and s.calm()),
    Trap("E164", "the exporter hangs and repeats one scrape", hangs,
         lambda s: s.kinds() == {Kind.NORMAL, Kind.UNKNOWN} and s.kind() is Kind.UNKNOWN
         and s.frames[-1].presence[0] == Presence.FROZEN, ticks=40),
    Trap("E164 E348", "one GPU is lost, the exporter lives and says nothing", one_gone,
         lambda s: s.kind("GPU-a1", 6) is Kind.NORMAL and s.kind("GPU-a1", 7) is Kind.LOST
         and s.kind("GPU-a0") is Kind.NORMAL),
    Trap("E607 E625", "scrapes time out", scrape_timeouts,
         lambda s: not s.verdicts and s.kinds() <= {Kind.NORMAL, Kind.UNKNOWN}, ticks=24),
    Trap("E84", "a killed exporter leaves Xid 119: evidence only when it is there", killed,
         lambda s: s.kind("GPU-a0", 7) is Kind.UNKNOWN and s.xids() == [(8, "GPU-a0", 119)]),
    Trap("E581", "fields take turns", fields_conflict, lambda s: s.calm()),
    Trap("D199", "utilisation spikes to 4294967295", spike,
         lambda s: s.calm() and s.telemetry.rejected == {"blank": 1}),
    Trap("D303", "profiling stands at 0 after Xid 31 while the GPU works", idle_profiling,
         lambda s: math.isnan(s.value("gr_engine_active_ratio")) and not s.acts()),
    Trap("D56", "a profiler takes the profiling fields away", profiler, lambda s: s.calm()),
    Trap("D285", "a power violation of 1 ns", one_nanosecond, lambda s: s.calm()),
    Trap("D270", "the health watch warns at a normal temperature", health_warns,
         lambda s: s.calm()),
    Trap("D198", "all NVLinks idle or down: no diagnosis of one GPU", links_down,
         lambda s: s.calm()),
    Trap("D313 N1748", "17,700 corrected errors a second and a healthy word", corrected,
         lambda s: s.kind() is Kind.FAULT and not s.acts()
         and {v.severity for v in s.verdicts} == {Severity.WARNING}, ticks=13),
    Trap("O2854", "the exporter is ready and shows no series", zero_series,
         lambda s: not s.verdicts and s.kind() is Kind.UNKNOWN),
    Trap("S30 S53", "blanks of every width in ratios", sentinels,
         lambda s: s.calm() and all(math.isnan(s.value(m)) for m in
         ("gpu_util_ratio", "temp_c", "power_w", "fb_used_mib"))),
    Trap("N1629 N1710", "a job's crash shows Xid 45 on all its nodes", crash,
         lambda s: len(s.xids()) == 16 and not s.acts()
         and {v.severity for v in s.verdicts} == {Severity.INFO}),
    Trap("N911", "Xid 31 of an application cordons", page_fault, lambda s: not s.acts()),
    Trap("N1481 N1471", "NVLink is down on cards that have none", pcie_nvlink,
         lambda s: s.calm() and math.isnan(s.value("nvlink_crc_errors")), lacks=PCIE),
    Trap("N1423 N1642", "DCGM restarts and finds its GPUs one by one", bootstrap,
         lambda s: not s.verdicts),
    Trap("N1280 N895", "after our restart old codes stand", history_replayed,
         lambda s: s.calm() and not s.xids()),
    Trap("N1120 N1517", "one node repeats itself without end and starves the others", noisy,
         lambda s: (7, "GPU-b1", 79) in s.xids()),
    Trap("P1974", "94 hits one application, 109 the GPU", contained,
         lambda s: {(v.gpu.uuid, v.may_move) for v in s.verdicts}
         == {("GPU-a0", False), ("GPU-a1", True)}),
    Trap("A245", "a failed row remap is not watched", remap,
         lambda s: s.kind() is Kind.FAULT and s.acts()),
    Trap("C2555", "DCGM cannot be reached: the node is not bad", unreachable,
         lambda s: not s.verdicts and s.kind("GPU-a0") is Kind.UNKNOWN
         and s.kind("GPU-b0") is Kind.NORMAL),
    Trap("P234 G1072", "unhealthy for ever: a code that was cleared is seen to be", health_clears,
         lambda s: s.kind(tick=3) is Kind.FAULT and s.kind() is Kind.NORMAL
         and any(j.resets for j in s.judgements)),
    Trap("HA pair", "one of two replicas cannot reach the exporter", replicas,
         lambda s: s.calm() and s.gpus == ["GPU-a0", "GPU-a1"]),
]  # fmt: skip


def tell(trap: Trap) -> Seen:
    """The story as the daemon reads it: each tick it gets the last minute once more."""
    seen = Seen(Telemetry(CATALOG, IDENTITY, lacks=trap.lacks))
    watch = Watch(Settings(), CATALOG)
    past: list[Points] = []
    for i in range(trap.ticks):
        at_s = START_S + STEP_S * i
        past.append(trap.story(at_s, i))
        window = [point for points in past[-4:] for point in points]
        seen.telemetry.add(samples(at_s + 1, *window))
        seen.frames.append(seen.telemetry.frame(at_s + 1))
        seen.judgements.append(watch.judge(seen.frames[-1], None))
    return seen


@pytest.mark.parametrize("trap", TRAPS, ids=lambda t: f"{t.reports}: {t.symptom[:50]}")
def test_a_known_trap_misleads_nobody(trap):
    seen = tell(trap)
    told = [(v.gpu.uuid, v.kind, v.severity, v.evidence[0].text) for v in seen.verdicts]
    assert trap.judged(seen), (trap.symptom, seen.xids(), told, seen.kinds())


@pytest.mark.parametrize("trap", TRAPS, ids=lambda t: t.reports)
def test_no_value_leaves_its_range_in_any_trap(trap):
    seen = tell(trap)
    low = np.array([m.valid_min for m in CATALOG.metrics])
    high = np.array([m.valid_max for m in CATALOG.metrics])
    for frame in seen.frames:
        known = np.isfinite(frame.values)
        assert ((frame.values >= low) & (frame.values <= high))[known].all()
        assert not np.isinf(frame.values).any()


def test_time_goes_on_and_rows_stay():
    seen = tell(TRAPS[0])
    assert all(b.at_s > a.at_s for a, b in pairwise(seen.frames))
    assert {f.gpus for f in seen.frames} == {seen.frames[0].gpus}
