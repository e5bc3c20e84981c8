"""What the scheduler says: which nodes it knows, and which work runs on which of their GPUs.

Decides what that makes of a frame's work and whether a node or a piece of work may be acted
on at all; never what is done. A scheduler that has not been heard lately has said nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from sentinel.core.domain import Frame, Reason, Workload


@dataclass(frozen=True, slots=True)
class Node:
    """One node as the scheduler has it. `name` is its own name for it; `closed_by` says who
    keeps new work away and why, empty where work may land; `ours` that it was us."""

    name: str
    closed_by: str = ""
    ours: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """What a job holds of one node, by the exporter's node name. No indices: not told."""

    node: str
    gpu_indices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """Work that runs now, whole: what one move carries. `aliases` are what labels call its
    pieces (the pods of a training job). `why_not` says why it cannot be moved, empty where it
    can; `checkpoint_at_s` when it last saved its state, where anybody tells."""

    work: Workload
    parts: tuple[Part, ...] = ()
    aliases: tuple[Workload, ...] = ()
    why_not: str = ""
    checkpoint_at_s: float | None = None


@dataclass(frozen=True, slots=True)
class View:
    """What the scheduler said at `at_s`. `nodes` are by the exporter's name for them: one that
    is not here, the scheduler does not know."""

    at_s: float
    nodes: Mapping[str, Node] = field(default_factory=dict)
    jobs: tuple[Job, ...] = ()

    def job(self, work: Workload) -> Job | None:
        return next((j for j in self.jobs if j.work == work), None)


def resolve(frame: Frame, view: View | None) -> Frame:
    """The frame with the scheduler's names for its work: pieces become the whole that they
    belong to, and a GPU that no label speaks for gets the job that holds its index. Of a node
    whose jobs do not tell their GPUs, only a single job is taken to be on all of them."""
    if view is None or not view.jobs:
        return frame
    whole = {alias: job.work for job in view.jobs for alias in (job.work, *job.aliases)}
    by_id: dict[str, set[Workload]] = defaultdict(set)  # labels may lack the tenant
    for job in view.jobs:
        by_id[job.work.id].add(job.work)
    held: dict[tuple[str, int], set[Workload]] = defaultdict(set)
    on: dict[str, set[Workload]] = defaultdict(set)
    vague = set()
    for job in view.jobs:
        for part in job.parts:
            on[part.node].add(job.work)
            for index in part.gpu_indices:
                held[part.node, index].add(job.work)
            if not part.gpu_indices:
                vague.add(part.node)

    def of(row: int, work: Workload | None) -> Workload | None:
        if work is not None:
            named = by_id.get(work.id, set()) if work.kind == "job" else set()
            return whole.get(work) or (next(iter(named)) if len(named) == 1 else work)
        gpu = frame.gpus[row]
        found = on[gpu.node] if gpu.node in vague else held.get((gpu.node, gpu.index or 0), set())
        if gpu.index is None and gpu.node not in vague:
            return None
        return next(iter(found)) if len(found) == 1 else None

    touched = on.keys()
    works = tuple(
        of(row, work) if work is not None or frame.gpus[row].node in touched else None
        for row, work in enumerate(frame.workloads)
    )
    return frame if works == frame.workloads else replace(frame, workloads=works)


def why_unconfirmed(node: str, view: View | None, now_s: float, max_age_s: float) -> Reason | None:
    """Why this node must not be acted on: the scheduler has not said that it knows it."""
    if view is None or abs(now_s - view.at_s) > max_age_s:
        ago = "" if view is None else f" for {now_s - view.at_s:.0f} s"
        return Reason("unconfirmed", f"the scheduler has not been heard{ago}")
    if node not in view.nodes:
        text = f"the scheduler knows no node {node}: set identity.node_rewrite"
        return Reason("unconfirmed", text)
    return None


def why_immovable(work: Workload, view: View) -> Reason | None:
    """Why the scheduler cannot move this work."""
    job = view.job(work)
    if job is None:
        return Reason("no_workload", f"the scheduler runs no {work.kind} {work.id}")
    return Reason("immovable", f"{work.id} cannot be moved: {job.why_not}") if job.why_not else None
