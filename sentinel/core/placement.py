"""Which GPUs could take over work, and whether they are enough.

Decides where work may go; never whether it should go. A backup is a spare GPU outside the
failing nodes, of the same model or a better one, present, normal, without work, and in no
other migration.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final

from sentinel.core import domain
from sentinel.core.domain import (
    Backup,
    Control,
    Frame,
    Incident,
    IncidentPhase,
    Judgement,
    Migration,
    Presence,
    Reason,
    Workload,
)
from sentinel.core.policy import Policy

ASSUMED: Final = "assumed-spare-for-"  # node name of a backup that a backtest takes for granted
_VIRTUAL: Final = r"(^| )GRID |-\d+[ABCQ](ME)?$"  # a share of a GPU: GRID A100-40C, H200-141C


@dataclass(frozen=True, slots=True)
class GpuModel:
    """One row of the model catalogue. `match` is a regular expression on the model name."""

    name: str
    match: str
    memory_gib: float
    tflops: float  # dense BF16 on tensor cores, FP16 where the model has no BF16
    bandwidth_gb_per_s: float
    power_w: float
    host: str = "x86_64"  # work built for one kind of host does not start on another
    source: str = ""
    lacks: tuple[str, ...] = ()  # what it cannot have, of catalog.NEEDS


@dataclass(frozen=True, slots=True)
class Lacking:
    """What every model whose name matches cannot have, of catalog.NEEDS."""

    match: str
    lacks: tuple[str, ...]
    source: str = ""


@dataclass(frozen=True, slots=True)
class ModelRanks:
    """What each GPU model can do, by the model name that exporters report."""

    models: tuple[GpuModel, ...] = ()
    lacking: tuple[Lacking, ...] = ()

    def find(self, model: str) -> GpuModel | None:
        """The catalogue's row for a reported name: the first that matches. None for a virtual
        GPU too, whose share of the real one is not known."""
        if _pattern(_VIRTUAL).search(model):
            return None
        return next((row for row in self.models if _pattern(row.match).search(model)), None)

    def lacks(self, model: str) -> frozenset[str]:
        """What a GPU of this reported name cannot have. What is not known of it, it may have."""
        found = [row.lacks for row in self.lacking if _pattern(row.match).search(model)]
        row = self.find(model)
        return frozenset(word for words in (*found, row.lacks if row else ()) for word in words)

    def at_least(self, candidate: str, needed: str) -> bool:
        """Whether work of `needed` runs on `candidate` no worse: the same name, or no less
        memory, compute and bandwidth. A name that nobody knows equals only itself."""
        if candidate == needed:
            return True
        have, want = self.find(candidate), self.find(needed)
        if have is None or want is None:
            return False
        return (
            have.host == want.host
            and have.memory_gib >= want.memory_gib
            and have.tflops >= want.tflops
            and have.bandwidth_gb_per_s >= want.bandwidth_gb_per_s
        )


@lru_cache(maxsize=256)
def _pattern(match: str) -> re.Pattern[str]:
    """Of a model name. An exporter may have put a dash in place of every blank."""
    return re.compile(match.replace(" ", "[ -]"), re.IGNORECASE)


class Fleet:
    """One tick's fleet, looked up by name. The indexes are built when first asked for, so
    that a quiet tick does not pay for them."""

    def __init__(self, frame: Frame, judgement: Judgement) -> None:
        if len(judgement.kinds) != len(frame.gpus):
            raise ValueError(
                f"a judgement of {len(judgement.kinds)} GPUs on a frame of {len(frame.gpus)}"
            )
        self.frame = frame
        self.kinds = judgement.kinds
        self._running: dict[Workload, tuple[str, ...]] = {}

    @cached_property
    def rows(self) -> dict[str, int]:
        return {gpu.uuid: row for row, gpu in enumerate(self.frame.gpus)}

    @cached_property
    def by_node(self) -> dict[str, list[int]]:
        index: dict[str, list[int]] = defaultdict(list)
        for row, gpu in enumerate(self.frame.gpus):
            index[gpu.node].append(row)
        return index

    @cached_property
    def by_work(self) -> dict[Workload, list[int]]:
        index: dict[Workload, list[int]] = defaultdict(list)
        for row, work in enumerate(self.frame.workloads):
            if work is not None:
                index[work].append(row)
        return index

    @cached_property
    def _racks(self) -> dict[str, str]:
        gpus = self.frame.gpus
        return {
            node: next((gpus[row].rack for row in rows if gpus[row].rack), "")
            for node, rows in self.by_node.items()
        }

    def rack_of(self, node: str) -> str:
        """Empty where it is not known."""
        return self._racks.get(node, "")

    @cached_property
    def by_rack(self) -> dict[str, list[str]]:
        """The nodes of each rack that is known."""
        index: dict[str, list[str]] = defaultdict(list)
        for node, rack in self._racks.items():
            if rack:
                index[rack].append(node)
        return index

    def present(self, row: int) -> bool:
        return bool(self.frame.presence[row] == Presence.PRESENT)

    def healthy(self, row: int) -> bool:
        return self.present(row) and bool(self.kinds[row] == domain.NORMAL)

    def nodes_running(self, work: Workload) -> tuple[str, ...]:
        """The nodes whose telemetry, of this very tick, shows the work."""
        if work not in self._running:
            rows = self.by_work.get(work, [])
            nodes = {self.frame.gpus[r].node for r in rows if self.present(r)}
            self._running[work] = tuple(sorted(nodes))
        return self._running[work]


@dataclass(frozen=True, slots=True)
class Need:
    """What one move has to carry: the whole gang of a workload, and how many GPUs of which
    models it needs elsewhere because they sit on nodes that it must leave."""

    workload: Workload
    nodes: tuple[str, ...]
    gpu_uuids: tuple[str, ...]
    exclude_nodes: tuple[str, ...]
    models: tuple[str, ...]


def need_of(work: Workload, incident: Incident, bad_nodes: Iterable[str], fleet: Fleet) -> Need:
    """The gang of `work`. The incident's own GPU belongs to it even where it has vanished
    and no longer says so; GPUs on healthy nodes may stay."""
    rows = set(fleet.by_work.get(work, []))
    own = fleet.rows.get(incident.gpu_uuid or "")
    if own is not None:
        rows.add(own)
    gpus = [fleet.frame.gpus[r] for r in sorted(rows)]
    nodes = {gpu.node for gpu in gpus} | {incident.node}
    leave = (nodes & set(bad_nodes)) | {incident.node}
    return Need(
        workload=work,
        nodes=tuple(sorted(nodes)),
        gpu_uuids=tuple(gpu.uuid for gpu in gpus),
        exclude_nodes=tuple(sorted(leave)),
        models=tuple(gpu.model for gpu in gpus if gpu.node in leave),
    )


def taken_nodes(control: Control, own: Migration | None = None) -> frozenset[str]:
    """Nodes that an open migration, other than `own`, acts on: as source or as target."""
    taken: set[str] = set()
    for migration in control.migrations.values():
        if migration.phase.is_open and migration is not own:
            taken.update(nodes_of(migration))
    return frozenset(taken)


def nodes_of(migration: Migration) -> set[str]:
    """The nodes that a migration acts on. Healthy nodes of a gang that stay are not meant."""
    targets = {b.node for b in (*migration.backups, *migration.placement)}
    return {migration.node, *migration.exclude_nodes, *targets}


def place(
    need: Need,
    fleet: Fleet,
    control: Control,
    policy: Policy,
    models: ModelRanks,
    own: Migration | None = None,
    avoid: frozenset[str] = frozenset(),
) -> tuple[Backup, ...] | Reason:
    """Backups for the whole need on as few nodes as possible, or why there are none.

    `avoid` are nodes that refused this work before; `own` is the migration whose reservation
    is being checked again, so that it does not stand in its own way.
    """
    if not (policy.spare_nodes or policy.spare_gpus):
        if policy.assume_spares:
            return (Backup(ASSUMED + need.exclude_nodes[0], ()),)
        return Reason("no_backup", "no spare node or GPU is configured")
    wanted, count = set(need.models), len(need.models)
    blocked = _blocked(control, own) | avoid | set(need.exclude_nodes)
    suspects = {
        i.gpu_uuid for i in control.incidents.values() if i.phase is IncidentPhase.SUSPECTED
    }
    free: dict[str, list[str]] = defaultdict(list)
    upgrade: dict[str, bool] = {}  # a better model than asked for: kept for work that needs it
    turned_down: Counter[str] = Counter()
    better: dict[str, bool] = {}
    for row in _spare_rows(fleet, policy):
        gpu = fleet.frame.gpus[row]
        if gpu.model not in better:
            better[gpu.model] = all(models.at_least(gpu.model, model) for model in wanted)
        if gpu.node in blocked:
            turned_down["on a node that is failing, fenced, or in a migration"] += 1
        elif not fleet.healthy(row) or gpu.uuid in suspects:
            turned_down["not known to be healthy"] += 1
        elif fleet.frame.workloads[row] is not None:
            turned_down["busy"] += 1
        elif not better[gpu.model]:
            turned_down[f"a lesser or unknown model than {' and '.join(sorted(wanted))}"] += 1
        else:
            free[gpu.node].append(gpu.uuid)
            upgrade[gpu.node] = gpu.model not in wanted
    chosen = _fewest_nodes(free, count, upgrade)
    if chosen is not None:
        return chosen
    found = sum(map(len, free.values()))
    others = ", ".join(f"{n} {why}" for why, n in sorted(turned_down.items()))
    text = f"the work needs {count} GPUs elsewhere; {found} spare GPUs are free and fit"
    return Reason("no_backup", f"{text} ({others})" if others else text)


def still_free(backups: tuple[Backup, ...], fleet: Fleet) -> Reason | None:
    """Whether the reserved GPUs are still healthy and idle, right before the call leaves."""
    for backup in backups:
        for uuid in backup.gpu_uuids:
            row = fleet.rows.get(uuid)
            if row is None or not fleet.healthy(row):
                return Reason("no_backup", f"backup {uuid} on {backup.node} is no longer healthy")
            if fleet.frame.workloads[row] is not None:
                return Reason("no_backup", f"backup {uuid} on {backup.node} is no longer idle")
    return None


def _spare_rows(fleet: Fleet, policy: Policy) -> list[int]:
    rows = {r for node in policy.spare_nodes for r in fleet.by_node.get(node, ())}
    rows.update(fleet.rows[uuid] for uuid in policy.spare_gpus if uuid in fleet.rows)
    return sorted(rows)


def _blocked(control: Control, own: Migration | None) -> set[str]:
    """Nodes that no work may be moved to, whatever their GPUs look like just now."""
    firing = {i.node for i in control.incidents.values() if i.fires and i.node}
    return firing | set(control.quarantine) | taken_nodes(control, own)


def _fewest_nodes(
    free: dict[str, list[str]], count: int, upgrade: dict[str, bool]
) -> tuple[Backup, ...] | None:
    """The smallest node of the same model that holds all, then one of a better model; else
    the largest first. Ties go by name, so that the same fleet always gives the same answer."""
    whole = [node for node, uuids in free.items() if len(uuids) >= count]
    if whole:
        node = min(whole, key=lambda n: (upgrade[n], len(free[n]), n))
        return (Backup(node, tuple(free[node][:count])),)
    chosen: list[Backup] = []
    for node in sorted(free, key=lambda n: (upgrade[n], -len(free[n]), n)):
        chosen.append(Backup(node, tuple(free[node][:count])))
        count -= len(free[node])
        if count <= 0:
            return tuple(chosen)
    return None


def describe(backups: tuple[Backup, ...]) -> str:
    """Backups for a sentence: node names with their GPU counts."""
    return ", ".join(
        b.node + (f" ({len(b.gpu_uuids)} GPUs)" if len(b.gpu_uuids) > 1 else "") for b in backups
    )
