"""The cost of one step grows no faster than the fleet. Ratios of one run, never seconds."""

import statistics
import time

import pytest

from sentinel.core.domain import Control, Mode
from sentinel.core.frame import Identity, Telemetry
from sentinel.core.policy import Policy
from sentinel.core.step import Inputs, advance
from sentinel.core.verdict import Settings, Watch
from sentinel.data import load_catalog, load_models
from tests.bench.fleets import SyntheticFleet, bundle

WARM, MEASURED = 3, 7
SIZES = (1_000, 10_000)


def measure(gpus):
    """Median CPU seconds of each stage of a step over `MEASURED` ticks."""
    catalog, models, learnt = load_catalog(), load_models(), bundle()
    telemetry = Telemetry(catalog, Identity())
    watch = Watch(Settings(), catalog)
    fleet, control = SyntheticFleet(gpus), Control()
    policy = Policy(mode=Mode.ACT)
    spent = {"fold": [], "frame": [], "judge": [], "advance": []}
    for tick in range(WARM + MEASURED):
        at_s = 1_000_000.0 + 15.0 * tick
        samples = fleet.samples(at_s)
        marks = [time.process_time()]
        telemetry.add(samples)
        marks.append(time.process_time())
        frame = telemetry.frame(at_s)
        marks.append(time.process_time())
        judgement = watch.judge(frame, learnt)
        marks.append(time.process_time())
        inputs = Inputs(frame, policy=policy, models=models)
        control = advance(control, judgement, inputs, at_s).control
        marks.append(time.process_time())
        assert len(frame.gpus) == gpus
        assert judgement.verdicts == ()
        if tick >= WARM:
            for name, before, after in zip(spent, marks[:-1], marks[1:], strict=True):
                spent[name].append(after - before)
    return {name: statistics.median(times) for name, times in spent.items()}


@pytest.mark.slow
def test_ten_times_the_gpus_cost_at_most_twelve_times_the_cpu(capsys):
    small, large = (measure(gpus) for gpus in SIZES)
    with capsys.disabled():
        print(f"\n{'stage':<10}{'1,000 GPUs':>14}{'10,000 GPUs':>14}{'ratio':>8}")
        for name in small:
            ratio = large[name] / max(small[name], 1e-9)
            print(f"{name:<10}{small[name]:>12.4f} s{large[name]:>12.4f} s{ratio:>8.1f}")
    step = sum(large.values()) / sum(small.values())
    assert step <= 12.0, f"one step at 10,000 GPUs costs {step:.1f} times one at 1,000"
