"""A day in the life of 128 simulated GPUs, learnt and replayed by the real core.

A tool, not the proof by itself: the recordings of real GPUs in tests/integration are judged
by the same code. A failing seed is replayed by the command that its message prints.
"""

from datetime import datetime

import numpy as np
import pytest

from sentinel import history
from sentinel.backtest import backtest
from sentinel.config import Config
from sentinel.edges import bundle as bundles
from sentinel.lab.fleet import Fleet
from tests.simulation.lab_history import LabHistory

pytestmark = pytest.mark.slow

STEP_S = 15.0
START_S = 1_790_000_000.0 - 1_790_000_000.0 % STEP_S
LEARN_S, REPLAY_S = 3 * 3600.0, 2 * 3600.0
HARD = ("off-the-bus", "vanished", "ecc")
SOFT = ("thermal", "clock")
APPLICATION = ("xid-13", "xid-31", "xid-43", "xid-45")
BENIGN = ("driver-shift", "new-workload", "idle-night")
REPAIRED_AFTER_S = 900.0


def seconds(text):
    return datetime.fromisoformat(text).timestamp()


def on_grid(at_s):
    return START_S + STEP_S * round((at_s - START_S) / STEP_S)


def replayed(tmp_path, seed, faults, benign=()):
    """(report, {uuid: (fault, at_s)}): each fault on a busy GPU of its own, one after another."""
    path = tmp_path / "sentinel.yaml"
    path.write_text(f"prometheus: {{url: 'http://127.0.0.1:9'}}\ntick: {{interval_s: {STEP_S}}}\n")
    config, fleet = Config.load(path), Fleet(seed, start_s=START_S)
    learnt_s, end_s = START_S + LEARN_S, START_S + LEARN_S + REPLAY_S
    learnt = history.learn(
        config, START_S, learnt_s, prometheus=LabHistory(fleet, STEP_S), save=False
    )
    bundles.save(history.bundle_dir(config), learnt.bundle, created_s=learnt_s)
    rng = np.random.default_rng(seed)
    busy = rng.permutation([i for i in range(len(fleet.gpus)) if fleet.workload.job_of[i]])
    truth, events = {}, []
    every_s = (REPLAY_S - 1800.0) / max(1, len(faults))
    for k, kind in enumerate(faults):
        uuid, at_s = fleet.gpus[busy[k]].uuid, on_grid(learnt_s + 1000.0 + k * every_s)
        truth[uuid] = (kind, at_s)
        events.append((at_s, "inject", kind, uuid))
        events.append((on_grid(at_s + REPAIRED_AFTER_S), "repair", uuid))
    for k, kind in enumerate(benign):
        at_s = on_grid(learnt_s + 900.0 + 1500.0 * k)
        events.append((at_s, "inject", kind, fleet.gpus[busy[-1 - k]].uuid))
    source = LabHistory(fleet, STEP_S, events)
    warm_s = history.warm_up_s(history.settings_of(config))
    report = backtest(config, learnt_s + warm_s, end_s, prometheus=source)
    return report, truth


def again(seed):
    return f"replay: pytest tests/simulation/test_lab_fleet.py -k 'seed{seed}'"


@pytest.mark.parametrize("seed", [1, 2], ids=lambda s: f"seed{s}")
def test_every_fault_is_found_where_it_is_and_nothing_else_is(tmp_path, seed):
    report, truth = replayed(tmp_path, seed, HARD + SOFT + APPLICATION)
    found = {i["gpu_uuid"]: i for i in report["incidents"]}
    hardware = {uuid for uuid, (kind, _) in truth.items() if kind in HARD + SOFT}
    assert set(found) == hardware, again(seed)
    for uuid, incident in found.items():
        kind, at_s = truth[uuid]
        delay_s = seconds(incident["confirmed_at"]) - (at_s + STEP_S)  # the first that shows it
        assert 0.0 <= delay_s <= (2 * STEP_S if kind in HARD else 300.0), f"{kind}: {again(seed)}"
        assert incident["would_migrate"], f"{kind}: {again(seed)}"
    assert not any(i["would_migrate"] for i in report["written_down"]), again(seed)


@pytest.mark.parametrize("seed", [3], ids=lambda s: f"seed{s}")
def test_unusual_and_healthy_is_no_incident(tmp_path, seed):
    report, _ = replayed(tmp_path, seed, (), BENIGN)
    assert report["incidents"] == [], again(seed)
    assert report["coverage"]["gpu_days"] > 128 * (REPLAY_S - 1200) / 86_400
