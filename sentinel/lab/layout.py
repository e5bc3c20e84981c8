"""Which GPU models the simulated hosts have, which hosts are spares, and who works where."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sentinel.lab.hardware import MODELS


def model_names(hosts: int) -> list[str]:
    h100 = math.ceil(hosts / 2)
    a100 = hosts // 4
    return ["H100"] * h100 + ["A100"] * a100 + ["L40S"] * (hosts - h100 - a100)


def spares(names: Sequence[str]) -> list[int]:
    """The hosts kept idle: the last of each model, two where it has eight or more."""
    kept: list[int] = []
    for name in MODELS:
        of_model = [i for i, n in enumerate(names) if n == name]
        keep = 2 if len(of_model) >= 8 else 1 if len(of_model) >= 2 else 0
        kept += of_model[len(of_model) - keep :]
    return kept


class DefaultJob(NamedTuple):
    id: str
    kind: str
    span: tuple[int, int]  # the rows it runs on, from and up to


def default_jobs(names: Sequence[str], gpus_per_host: int) -> Iterator[DefaultJob]:
    """The first two H100 hosts are one gang; then gangs of a host; of every fourth host, and
    of L40S hosts, pairs of GPUs serve. Spare hosts get none."""
    idle = set(spares(names))
    busy = [host for host in range(len(names)) if host not in idle]
    joined = busy[1] if len(busy) > 1 and names[busy[1]] == "H100" else None
    met: Counter[str] = Counter()
    for host in busy:
        if host == joined:
            continue
        first, after = host * gpus_per_host, (host + 1) * gpus_per_host
        number = met[names[host]]
        met[names[host]] += 1
        if names[host] == "L40S" or number % 4 == 3:
            for start in range(first, after, 2):
                job_id = f"serve-{host:02d}{start - first}"
                yield DefaultJob(job_id, "inference", (start, min(start + 2, after)))
        elif host == busy[0] and joined is not None:
            yield DefaultJob(f"train-{host:02d}", "training", (first, after + gpus_per_host))
        else:
            yield DefaultJob(f"train-{host:02d}", "training", (first, after))
