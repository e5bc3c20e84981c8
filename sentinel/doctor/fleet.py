"""From what was read to what there is: exporters, names, models, doubles and work, counted.

Pure. Nothing is judged here.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np

from sentinel.core.catalog import Source
from sentinel.core.domain import KINDS, Bools, Floats, Frame, Judgement, Presence, Workload
from sentinel.core.placement import ModelRanks
from sentinel.doctor.doubles import Rows, doubles, newest_of, rows_of
from sentinel.doctor.facts import Exporter, Fleet, Model, Naming, Work
from sentinel.doctor.metrics import metrics
from sentinel.doctor.reading import Reading

_BUSY: Final = 0.05  # utilisation from which a GPU does something
_SHOWN: Final = 5
_SKEW_S: Final = 1.0  # a sample so far in the future was stamped by another clock
_HERE: Final = (Presence.PRESENT, Presence.FROZEN)
_DRIVER: Final = ("DCGM_FI_DRIVER_VERSION", "driver_version", "driver")
_NO_HOST: Final = ("localhost", "localhost.localdomain")
_VIRTUAL: Final = re.compile(r"\b(GRID|vGPU)\b|-\d+[QCBA]$", re.IGNORECASE)
_IS_MASKED: Final = re.compile(r"(^|/)(gpu\d+|[-0xX*#.?GPU]{4,})$")
_ADDRESS: Final = re.compile(r"\[?[0-9a-fA-F:.]+\]?(:\d+)?|.*:\d+")
_IPV4: Final = re.compile(r"\d+(\.\d+){3}")
_CONTAINER: Final = re.compile(r"[0-9a-f]{12}")
_POD: Final = re.compile(r"(?=.*(exporter|dcgm|telegraf|gpud)).*-[a-z0-9]{5}")
_NODE_LIKE: Final = re.compile(r"(^|_)(node|host|hostname|nodename|machine|server)(_|$)|hostname")
_WORK_LIKE: Final = re.compile(r"(^|_)(pod|job|jobid|workload|task|container|user|account)(_|$)")
_NOT_WORK: Final = ("job", "container_name", "pod_ip")


def fleet(
    reading: Reading,
    frame: Frame,
    judgement: Judgement,
    models: ModelRanks,
    rejected: Mapping[str, int],
    at_s: float,
) -> Fleet:
    """The fleet at `at_s`, by the clock that stamped the samples."""
    rows = rows_of(reading)
    here = np.isin(frame.presence, _HERE)
    newest_s = newest_of(reading, rows)
    ahead_s = newest_s[np.isfinite(newest_s)] - at_s
    values = _values(reading, rows)
    counts = Counter(Presence(code).name.lower() for code in frame.presence.tolist())
    verdicts = Counter(str(KINDS[code]) for code in judgement.kinds.tolist())
    return Fleet(
        gpus=len(frame.gpus),
        reporting=int(np.count_nonzero(here)),
        presence=dict(counts),
        up_seen=bool((reading.roster.series.source[: reading.rows] == Source.UP).any()),
        ahead=int(np.count_nonzero(ahead_s > _SKEW_S)),
        ahead_max_s=float(max(ahead_s.max(initial=0.0), 0.0)),
        exporters=_exporters(reading, rows, newest_s, at_s),
        naming=_naming(reading, rows, frame),
        doubles=doubles(reading, rows, newest_s),
        models=_models(reading, rows, frame, models),
        metrics=metrics(reading, frame, here, models, values),
        work=_work(reading, rows, frame, here),
        rejected=dict(rejected),
        idle_profiling=_idle_profiling(reading, frame, values),
        energy_still=_energy_still(reading, rows, frame),
        verdicts=dict(verdicts),
        worst=tuple(
            f"{v.gpu.node} GPU {'?' if v.gpu.index is None else v.gpu.index}: {v.kind}, "
            f"{v.evidence[0].text if v.evidence else v.pattern}"
            for v in judgement.verdicts[:_SHOWN]
        ),
    )


def _values(reading: Reading, rows: Rows) -> Floats:
    """The last values as shown, in canonical units [roster's gpus, metrics]; NaN where none."""
    series, catalog = reading.roster.series, reading.catalog
    out = np.full((len(reading.roster.uuids), len(catalog.metrics)), -np.inf)
    measured = rows.row[series.column[rows.row] >= 0]
    value = reading.last[measured] * series.scale[measured] + series.offset[measured]
    np.maximum.at(out, (series.gpu[measured], series.column[measured]), value)
    out[np.isneginf(out)] = np.nan
    return out


# ---- exporters ----------------------------------------------------------------------


def _exporters(reading: Reading, rows: Rows, newest_s: Floats, at_s: float) -> tuple[Exporter, ...]:
    """One row per kind and job. A target is of the kind that most of its series are of."""
    kinds: dict[int, Counter[str]] = defaultdict(Counter)
    first: dict[int, int] = {}
    for row, target in zip(rows.row.tolist(), rows.target.tolist(), strict=True):
        kinds[target][reading.kinds[row]] += 1
        first.setdefault(target, row)
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for target, counts in kinds.items():
        job = dict(reading.keys[first[target]].labels).get("job", "")
        groups[counts.most_common(1)[0][0], job].append(target)
    nodes = _nodes_of(reading)
    out = []
    for (kind, job), targets in sorted(groups.items()):
        mine = np.isin(rows.target, targets)
        paces = [p for t in targets if (p := reading.interval_s(t)) is not None]
        ages = at_s - newest_s[targets]
        ages = ages[np.isfinite(ages)]
        out.append(
            Exporter(
                kind,
                job,
                len(targets),
                len({name for target in targets for name in nodes[target]}),
                len(np.unique(rows.gpu[mine])),
                int(np.count_nonzero(mine)),
                float(np.median(paces)) if paces else None,
                float(np.median(ages)) if len(ages) else None,
                float(ages.max()) if len(ages) else None,
            )
        )
    return tuple(out)


def _nodes_of(reading: Reading) -> dict[int, set[str]]:
    """The names of the nodes that each target shows."""
    links, nodes = reading.roster.links, reading.roster.nodes
    found: dict[int, set[str]] = defaultdict(set)
    for target, node in zip(links.exporter.tolist(), links.node.tolist(), strict=True):
        found[target].add(nodes[node])
    return found


# ---- names --------------------------------------------------------------------------


def look(name: str) -> str:
    """How a node's name looks: localhost, address, container, pod, fqdn or plain."""
    if name in _NO_HOST or not name:
        return "localhost"
    if _ADDRESS.fullmatch(name) and (":" in name or _IPV4.fullmatch(name)):
        return "address"
    if _CONTAINER.fullmatch(name) and not name.isdigit():
        return "container"
    if _POD.fullmatch(name):
        return "pod"
    return "fqdn" if "." in name else "plain"


def _naming(reading: Reading, rows: Rows, frame: Frame) -> Naming:
    identity = reading.identity
    told_by: Counter[str] = Counter()
    exported: set[str] = set()
    hidden_by = ""
    candidates: dict[str, str] = {}
    named: set[int] = set()
    seen: set[tuple[tuple[str, str], ...]] = set()
    for row, gpu in zip(rows.row.tolist(), rows.gpu.tolist(), strict=True):
        pairs = reading.keys[row].labels
        if pairs in seen:
            continue
        seen.add(pairs)
        labels = dict(pairs)
        exported |= {name for name in labels if name.startswith("exported_")}
        for label in identity.node_from:
            if labels.get(label) in _NO_HOST and label != "instance":
                hidden_by = hidden_by or f"{label}={labels[label]}"
        candidates |= {
            name: value
            for name, value in labels.items()
            if _NODE_LIKE.search(name) and name not in identity.node_from
        }
        if gpu not in named:
            named.add(gpu)
            told_by[_told_by(labels, identity.node_from, identity.node(labels)[0], reading)] += 1
    nodes = sorted({gpu.node for gpu in frame.gpus})
    looks = Counter(look(name) for name in nodes)
    return Naming(
        len(nodes),
        dict(told_by.most_common()),
        dict(looks.most_common()),
        {word: next(name for name in nodes if look(name) == word) for word in looks},
        tuple(nodes[:_SHOWN]),
        dict(sorted(candidates.items())[:_SHOWN]),
        tuple(sorted(exported)),
        hidden_by,
    )


def _told_by(
    labels: Mapping[str, str], node_from: Iterable[str], node: str, reading: Reading
) -> str:
    """The label that gave the node's name, after the rewrites of the configuration."""
    for label in (*node_from, "instance"):
        value = labels.get(label, "")
        if value and reading.identity.node({label: value})[0] == node:
            return label
    return ""


# ---- models, work -------------------------------------------------------------------


def _models(reading: Reading, rows: Rows, frame: Frame, models: ModelRanks) -> tuple[Model, ...]:
    place = {uuid: row for row, uuid in enumerate(reading.roster.uuids)}
    of_slice = reading.roster.series.of_slice[rows.row]
    cut = set(rows.gpu[of_slice].tolist())
    drivers: dict[int, str] = {}
    virtual: set[int] = set()
    for row, gpu in zip(rows.row.tolist(), rows.gpu.tolist(), strict=True):
        if gpu not in drivers:
            labels = reading.labels(row)
            told = next((labels[name] for name in _DRIVER if labels.get(name)), "")
            if told:
                drivers[gpu] = told
            if labels.get("vgpu"):
                virtual.add(gpu)
    out = []
    for name in sorted({gpu.model for gpu in frame.gpus}):
        mine = [gpu for gpu in frame.gpus if gpu.model == name]
        numbers = [place[gpu.uuid] for gpu in mine if gpu.uuid in place]
        row = models.find(name) if name else None
        per_node, fewer = _fewer(Counter(gpu.node for gpu in mine))
        out.append(
            Model(
                name,
                row.name if row else "",
                len(mine),
                len({gpu.node for gpu in mine}),
                tuple(sorted({drivers[n] for n in numbers if n in drivers})),
                sum(n in cut for n in numbers),
                sum(n in virtual or bool(_VIRTUAL.search(name)) for n in numbers),
                sum(bool(_IS_MASKED.search(gpu.uuid)) for gpu in mine),
                tuple(sorted(models.lacks(name))) if name else (),
                per_node,
                fewer,
            )
        )
    return tuple(out)


def _fewer(nodes: Counter[str]) -> tuple[int, dict[str, int]]:
    """How many GPUs most nodes have, and the nodes with fewer. Where no number is that of most,
    or there are but two nodes, nobody knows which is right."""
    if not nodes:
        return 0, {}
    usual, agreeing = Counter(nodes.values()).most_common(1)[0]
    if len(nodes) < 3 or 2 * agreeing <= len(nodes):
        return usual if len(set(nodes.values())) == 1 else 0, {}
    return usual, {node: n for node, n in sorted(nodes.items()) if n < usual}


def _work(reading: Reading, rows: Rows, frame: Frame, here: Bools) -> Work:
    names = list(frame.metrics)
    busy = np.zeros(len(frame.gpus), dtype=bool)
    for name in ("gpu_util_ratio", "gr_engine_active_ratio", "sm_active_ratio"):
        if name in names:
            with np.errstate(invalid="ignore"):
                busy |= frame.values[:, names.index(name)] > _BUSY
    busy &= here
    named = [work for work in frame.workloads if work is not None]
    unnamed = sum(
        bool(does) and work is None for does, work in zip(busy, frame.workloads, strict=True)
    )
    example = f"{named[0].kind} {named[0].id}" if named else ""
    return Work(
        len({(w.kind, w.id, w.tenant) for w in named}),
        len({w.tenant for w in named if w.tenant}),
        len(named),
        int(np.count_nonzero(busy)),
        unnamed,
        example,
        _work_labels(reading, rows, named),
    )


def _work_labels(reading: Reading, rows: Rows, named: list[Workload]) -> dict[str, str]:
    """Labels that look as if they named work, where none that is read does."""
    if named:
        return {}
    found: dict[str, str] = {}
    known = (*reading.identity.job_id_from, *reading.identity.tenant_from, *_NOT_WORK)
    for row in rows.row.tolist():
        for name, value in reading.keys[row].labels:
            if name not in known and name not in found and _WORK_LIKE.search(name.lower()):
                found[name] = value
    return dict(sorted(found.items())[:_SHOWN])


# ---- what cannot be so --------------------------------------------------------------


def _idle_profiling(reading: Reading, frame: Frame, values: Floats) -> int:
    """GPUs whose profiling counters stand at zero while they work."""
    catalog = reading.catalog
    util = values[:, catalog.column("gpu_util_ratio")]
    active = values[:, [catalog.column(n) for n in ("gr_engine_active_ratio", "sm_active_ratio")]]
    with np.errstate(invalid="ignore"):
        works = (util >= 0.5) & (util <= 1.0)
    stands = np.isfinite(active).any(axis=1) & (np.nan_to_num(active) == 0).all(axis=1)
    return int(np.count_nonzero(works & stands))


def _energy_still(reading: Reading, rows: Rows, frame: Frame) -> int:
    """GPUs whose energy counter did not move in two minutes though power is drawn."""
    series, catalog = reading.roster.series, reading.catalog
    column = catalog.column("energy_j")
    mine = rows.row[series.column[rows.row] == column]
    still = (reading.last_s[mine] - reading.first_s[mine] >= 120.0) & (
        reading.first[mine] == reading.last[mine]
    )
    power = frame.values[:, catalog.column("power_w")]
    drawing = {gpu.uuid for gpu, w in zip(frame.gpus, power.tolist(), strict=True) if w >= 5.0}
    gpus = {reading.roster.uuids[g] for g in series.gpu[mine[still]].tolist()}
    return len(gpus & drawing)
