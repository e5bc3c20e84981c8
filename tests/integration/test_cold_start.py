"""The first minutes on a new site: real telemetry, judged after 20 minutes of history, and none."""

import pytest

from tests.bench.cold_start import one_recording

pytestmark = pytest.mark.slow

TRAINING, INFERENCE = "t2", "i4"
HARD = ("xid", "vanish")
BY_MATES = ("ramp", "clock", "power brake")  # eight GPUs of one job, all but one of them well


@pytest.mark.parametrize("name", [TRAINING, INFERENCE])
@pytest.mark.parametrize("fault", [*HARD, *BY_MATES])
def test_without_any_history_hard_evidence_and_mates_are_enough(tmp_path, name, fault):
    found, elsewhere, after_s = one_recording(tmp_path, name, fault, 0)
    assert (found, elsewhere) == (True, 0)
    assert after_s <= (30.0 if fault in HARD else 300.0)


@pytest.mark.parametrize("name", ["b1", TRAINING])
@pytest.mark.parametrize("fault", ["", "xid", *BY_MATES, "memory clock", "replays"])
def test_twenty_minutes_of_history_make_useful_verdicts(tmp_path, name, fault):
    found, elsewhere, after_s = one_recording(tmp_path, name, fault, 20)
    assert (found, elsewhere) == (bool(fault), 0)
    assert not fault or after_s <= 300.0
