"""What the scheduler says: names of work, nodes it knows, work it cannot move."""

from __future__ import annotations

import numpy as np
import pytest

from sentinel.core.domain import Coverage, Frame, Gpu, Workload
from sentinel.core.scheduler import (
    Job,
    Node,
    Part,
    View,
    resolve,
    why_immovable,
    why_unconfirmed,
)

TRAIN, SERVE = Workload("job", "71"), Workload("job", "72", "ads")
POD = Workload("pod", "train-0", "ml")
WHOLE = Workload("pytorchjob", "train", "ml")


def frame(*works: Workload | None, index: bool = True) -> Frame:
    gpus = tuple(Gpu(f"GPU-{n}", "n1", n if index else None) for n in range(len(works)))
    rows = len(works)
    return Frame(
        100.0,
        gpus,
        ("temp_c",),
        np.zeros((rows, 1)),
        np.zeros((rows, 1)),
        np.zeros(rows, dtype=np.int8),
        works,
        Coverage(rows, rows),
    )


def view(*jobs: Job) -> View:
    return View(100.0, {"n1": Node("n1.example.net")}, jobs)


def test_without_a_view_the_frame_is_the_same():
    given = frame(None, TRAIN)
    assert resolve(given, None) is given
    assert resolve(given, view()) is given


def test_a_gpu_without_labels_gets_the_job_that_holds_its_index():
    jobs = Job(TRAIN, (Part("n1", (0, 2)),)), Job(SERVE, (Part("n1", (1,)),))
    assert resolve(frame(None, None, None, None), view(*jobs)).workloads == (
        TRAIN,
        SERVE,
        TRAIN,
        None,
    )


def test_an_index_that_two_jobs_hold_or_that_is_not_known_says_nothing():
    jobs = Job(TRAIN, (Part("n1", (0,)),)), Job(SERVE, (Part("n1", (0,)),))
    assert resolve(frame(None), view(*jobs)).workloads == (None,)
    one = Job(TRAIN, (Part("n1", (0,)),))
    assert resolve(frame(None, index=False), view(one)).workloads == (None,)


def test_a_job_that_does_not_tell_its_gpus_is_on_all_of_a_node_that_it_has_alone():
    alone, other = Job(TRAIN, (Part("n1"),)), Job(SERVE, (Part("n1", (0,)),))
    assert resolve(frame(None, None, index=False), view(alone)).workloads == (TRAIN, TRAIN)
    assert resolve(frame(None), view(alone, other)).workloads == (None,)


def test_pieces_become_the_whole_and_a_label_without_tenant_the_job_of_that_id():
    whole = Job(WHOLE, (Part("n1"),), aliases=(POD,))
    assert resolve(frame(POD), view(whole)).workloads == (WHOLE,)
    assert resolve(frame(Workload("job", "72")), view(Job(SERVE, ()))).workloads == (SERVE,)


def test_what_labels_say_of_work_that_the_scheduler_does_not_know_stays():
    assert resolve(frame(POD), view(Job(TRAIN, (Part("n9"),)))).workloads == (POD,)


@pytest.mark.parametrize(
    ("node", "seen", "now_s", "text"),
    [
        ("n1", None, 100.0, "has not been heard"),
        ("n1", view(), 161.0, "has not been heard for 61 s"),
        ("n1", view(), 30.0, "has not been heard"),  # a clock that stepped back
        ("n2", view(), 100.0, "knows no node n2"),
    ],
)
def test_a_node_that_the_scheduler_does_not_confirm(node, seen, now_s, text):
    reason = why_unconfirmed(node, seen, now_s, 60.0)
    assert reason is not None
    assert text in reason.text


def test_a_node_that_it_knows_is_confirmed():
    assert why_unconfirmed("n1", view(), 150.0, 60.0) is None


def test_work_that_cannot_be_moved():
    seen = view(Job(TRAIN, why_not="it was submitted with Requeue=0"), Job(SERVE))
    assert why_immovable(SERVE, seen) is None
    assert "Requeue=0" in why_immovable(TRAIN, seen).text
    assert why_immovable(POD, seen).code == "no_workload"
