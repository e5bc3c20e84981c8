"""Every kind of alert as somebody reads it who was woken by it: word by word.

Line 1 is the summary, the rest the description; all of them stand in alert_texts.txt, where a
change of wording shows as a person will see it.
"""

import re
import sys
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from sentinel.core.alert import Links, project
from sentinel.core.domain import (
    Evidence,
    FaultPattern,
    JobFinding,
    Kind,
    Mates,
    Mode,
    OutcomeKind,
    OutcomeSource,
    Past,
    PatternState,
    Severity,
    Workload,
)
from tests.core.scene import Scene, uuid

GOLDEN = Path(__file__).with_name("alert_texts.txt")
LLAMA = Workload("job", "llama-70b", "research")
LINKS = Links(
    "https://sentinel.example",
    "https://grafana.example/d/gpu?var-uuid={gpu_uuid}&var-node={node}&from={from_ms}&to={to_ms}",
    "",
    "https://prometheus.example",
    {"temp_c": ("DCGM_FI_DEV_GPU_TEMP", "nvidia_smi_temperature_gpu")},
)


def hot(gpu, watts=640, own=72.0):
    excess = 14.0 + gpu.index
    text = (
        f"GPU temperature {own + excess:.0f} °C, {excess:+.0f} °C from the {own:.0f} °C normal "
        f"for this GPU at {watts} W"
    )
    return Evidence("density", "temp_c", text, own + excess, own, "°C", 1.7)


def slow(gpu, mhz=1410.0):
    text = f"SM clock {mhz:.0f} MHz, -21% from the 1785 MHz normal for this work"
    return Evidence("density", "sm_clock_mhz", text, mhz, 1785.0, "MHz", 1.5)


def xid(code, meaning, node):
    text = f"Xid {code} on {node}: {meaning}"
    return Evidence("xid", "xid", text, float(code), 0.0, "", 1.0)


def small(**kw):
    scene = Scene(nodes=8, per_node=8, spares=("node-7",), **kw)
    scene.runs([0, 1], LLAMA)
    return scene


def gpu_fault():
    scene = small()
    evidence = (xid(79, "GPU has fallen off the bus", "node-0"),)
    scene.breaks(0, 3, evidence=evidence)
    scene.tick()
    scene.tick(scene.finishes(scene.posts[-1]))
    return scene


def gpu_fault_observed():
    scene = small(mode=Mode.OBSERVE)
    evidence = Evidence("ecc", "ecc_dbe_volatile", "uncorrectable ECC errors rose from 0 to 2: "
                        "data in GPU memory was lost", 2.0, 0.0, "errors", 1.0)  # fmt: skip
    scene.breaks(4, 5, evidence=(evidence,), pattern="uncorrectable ECC")
    scene.ticks(3)
    return scene


def gpu_degraded():
    """Like a pattern that people know, with what became of it."""
    scene = small()
    scene.breaks(0, 2, kind=Kind.DEVIANT, evidence=(hot(scene.gpu(0, 2)), slow(scene.gpu(0, 2))))
    scene.ticks(9)
    (incident,) = scene.incidents()
    past = Past(4, {"released after a reset": 3, "over by itself": 1}, (2400.0, 3600.0))
    known = FaultPattern("thermal", "overheating", state=PatternState.CONFIRMED, past=past)
    told = replace(incident, like="thermal", distance=0.18)
    scene.control = replace(
        scene.control, incidents={incident.id: told}, patterns={known.id: known}
    )
    return scene


def straggler():
    scene = small()
    text = (
        "SM clock 1590 MHz, -10% against 15 mates of job llama-70b, less the difference earlier "
        "in this job, for 4 min"
    )
    evidence = Evidence("peers", "sm_clock_mhz", text, 1590.0, 1770.0, "MHz", 1.2, scene.now - 120)
    scene.breaks(1, 6, kind=Kind.DEVIANT, severity=Severity.WARNING, evidence=(evidence,),
                 pattern="slower than its job mates", score=1.2)  # fmt: skip
    scene.ticks(10)
    return scene


def gpu_lost():
    scene = small()
    text = (
        "GPU 4 of node-0 has not reported since 13:46:25 UTC while its siblings on the same "
        "exporter do"
    )
    scene.breaks(
        0, 4, kind=Kind.LOST, evidence=(Evidence("lost", "up", text, at_s=scene.now - 15),)
    )
    scene.ticks(2)
    return scene


def node_hot():
    scene = small()
    for n in range(8):
        scene.breaks(3, n, kind=Kind.DEVIANT, evidence=(hot(scene.gpu(3, n)),))
    scene.ticks(9)
    return scene


def node_broken():
    """All its GPUs at once: one page, though each of them is fenced for."""
    scene = small()
    for n in range(8):
        scene.breaks(0, n, evidence=(xid(79, "GPU has fallen off the bus", "node-0"),))
    scene.tick()
    return scene


def job_crash():
    scene = small()
    for n in range(8):
        harmless = {"may_fence": False, "may_move": False, "latch": False}
        for node in (0, 1):
            seen = (xid(94, "a memory error was contained to one application", f"node-{node}"),)
            scene.breaks(node, n, severity=Severity.WARNING, evidence=seen, **harmless)
    scene.tick()
    return scene


def job_slow():
    """No GPU of it stands out: the mates say so, not a verdict."""
    scene = small()
    text = (
        "tensor activity -18% and DRAM activity -17% on 16 GPUs of job llama-70b for 11 min, at "
        "full utilisation: they wait, and none of them stands out"
    )
    evidence = Evidence("peers", "tensor_active_ratio", text, 0.82, 1.0, "of its earlier pace")
    rows = tuple(range(16))
    finding = JobFinding(Mates("llama-70b", in_step=True), Severity.WARNING,
                         "job slower than before", evidence, scene.now, rows)  # fmt: skip
    judge = scene.judge
    scene.judge = lambda frame, resets=(): replace(judge(frame, resets), jobs=(finding,))
    scene.ticks(9)
    return scene


def rack_hot():
    scene = small()
    scene.gpus = tuple(
        replace(g, rack="r1" if g.node in ("node-2", "node-3") else "r2") for g in scene.gpus
    )
    scene._by_uuid = {g.uuid: g for g in scene.gpus}
    for node in (2, 3):
        for n in range(8):
            scene.breaks(node, n, kind=Kind.DEVIANT, evidence=(hot(scene.gpu(node, n)),))
    scene.ticks(9)
    return scene


def fleet_event():
    scene = small()
    scene.gpus = tuple(
        replace(g, driver="570.86", driver_since_s=scene.now - 600) for g in scene.gpus
    )
    scene._by_uuid = {g.uuid: g for g in scene.gpus}
    for gpu in scene.gpus:
        if gpu.node in ("node-2", "node-3", "node-4", "node-5", "node-6"):
            scene.breaks(int(gpu.node[-1]), gpu.index, kind=Kind.DEVIANT,
                         pattern="low SM clock", evidence=(slow(gpu),))  # fmt: skip
    scene.ticks(9)
    return scene


def blind():
    scene = small()
    scene.ticks(4, blind=True)
    return scene


def move_stuck():
    scene = small()
    scene.breaks(0, 3, evidence=(xid(79, "GPU has fallen off the bus", "node-0"),))
    scene.tick()
    scene.tick(scene.finishes(scene.posts[-1]))
    scene.tick(scene.says(scene.posts[-1], OutcomeKind.UNKNOWN, OutcomeSource.POST))
    scene.ticks(70)
    return scene


STORIES = {
    "SentinelGpuFault, acted upon": gpu_fault,
    "SentinelGpuFault, only watched": gpu_fault_observed,
    "SentinelGpuDegraded, overheating like others before": gpu_degraded,
    "SentinelGpuDegraded, a straggler": straggler,
    "SentinelGpuLost": gpu_lost,
    "SentinelNodeFault, hot": node_hot,
    "SentinelNodeFault, all its GPUs failed": node_broken,
    "SentinelJobSuspect, one Xid": job_crash,
    "SentinelJobSuspect, slow as a whole": job_slow,
    "SentinelFleetEvent, a rack": rack_hot,
    "SentinelFleetEvent": fleet_event,
    "SentinelBlind": blind,
    "SentinelMoveStuck": move_stuck,
}


def told(name):
    """The alerts of a story that go by its name."""
    scene = STORIES[name]()
    alerts = project(scene.control, scene.policy, scene.now, links=LINKS)
    return [a for a in alerts if a.labels["alertname"] == name.partition(",")[0]]


def read(alert):
    labels = ", ".join(f"{k}={v}" for k, v in alert.labels.items() if k != "alertname")
    return f"[{labels}]\n{alert.annotations['summary']}\n\n{alert.annotations['description']}\n"


def page():
    """All of them, as they are read."""
    return "\n".join(f"=== {name}\n{read(one)}" for name in STORIES for one in told(name))


def test_they_read_as_they_did():
    """After a change of wording: python -m tests.core.test_alert_texts, and read it."""
    assert page() == GOLDEN.read_text(encoding="utf-8")


def test_the_examples_of_the_guide_are_read_like_that():
    guide = (Path(__file__).parents[2] / "docs" / "incidents.md").read_text(encoding="utf-8")
    examples = re.findall(r"```\n(\[.*?)```", guide, flags=re.DOTALL)
    assert len(examples) == 6
    assert all(example in GOLDEN.read_text(encoding="utf-8") for example in examples)


@pytest.mark.parametrize("name", STORIES)
def test_one_story_is_one_alert_and_two_lines_say_what_is_needed(name):
    (alert,) = told(name)
    first, second = alert.annotations["summary"], alert.annotations["description"].split("\n")[0]
    assert "\n" not in first
    assert second.startswith("Since ")
    assert second.endswith(".")
    for text in (first, *alert.annotations.values()):
        assert "nan" not in text.split()
        assert "None" not in text
    assert alert.annotations["runbook_url"].endswith(f"#{name.partition(',')[0].lower()}")


@pytest.mark.parametrize("name", [n for n in STORIES if "Gpu" not in n and "Stuck" not in n])
def test_what_many_share_is_told_once(name):
    scene = STORIES[name]()
    alerts = project(scene.control, scene.policy, scene.now, links=LINKS)
    assert [a.labels["alertname"] for a in alerts] == [name.partition(",")[0]]


def test_the_links_lead_to_the_gpu_its_time_and_its_strongest_metric():
    (alert,) = told("SentinelGpuDegraded, overheating like others before")
    texts = alert.annotations
    began_ms, now_s = 1000 * (1_000_015 - 3600), 1_000_135
    assert f"var-uuid={uuid(0, 2)}&var-node=node-0&from={began_ms}" in texts["dashboard_url"]
    assert int(texts["dashboard_url"].partition("&to=")[2]) >= 1000 * now_s
    asked = parse_qs(urlsplit(texts["graph_url"]).query)
    assert asked["g0.expr"][0].startswith(
        '{__name__=~"DCGM_FI_DEV_GPU_TEMP|nvidia_smi_temperature_gpu",UUID=~"(GPU-)?0-2"}'
    )
    assert asked["g0.end_input"] == ["1970-01-12 13:50:00"]


def test_without_a_prometheus_that_people_reach_there_is_no_graph():
    scene = gpu_degraded()
    (alert,) = project(scene.control, scene.policy, scene.now, external_url="http://s.example/")
    assert "graph_url" not in alert.annotations
    assert alert.annotations["dashboard_url"].startswith("http://s.example/?incident=inc-")


if __name__ == "__main__":
    GOLDEN.write_text(page(), encoding="utf-8")
    sys.stdout.write(page())
