"""Which GPU models the simulated hosts have, which hosts are spares, and who works where."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from sentinel.lab.hardware import MODELS


def model_names(hosts: int, mix: Sequence[tuple[str, float]] = ()) -> list[str]:
    """One a host, the models of the mix one after another by their shares."""
    if mix:
        shares = np.cumsum([share for _, share in mix])
        place = (np.arange(hosts) + 0.5) / hosts * shares[-1]
        return [mix[int(np.searchsorted(shares, p))][0] for p in place]
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


def default_jobs(
    names: Sequence[str], gpus_per_host: int, idle: Collection[int], gang_hosts: int = 1
) -> Iterator[DefaultJob]:
    """The first two hosts are one gang; then gangs of `gang_hosts` hosts; of every fourth host,
    and of L40S hosts, pairs of GPUs serve. Idle hosts get none."""
    busy = [host for host in range(len(names)) if host not in idle]
    met: Counter[str] = Counter()
    taken: set[int] = set()

    def more(host: int, at_most: int) -> list[int]:
        """The hosts after it that may join its gang: neighbours of its model."""
        after = range(host + 1, min(host + at_most, len(names)))
        return [h for h in after if h in busy and h not in taken and names[h] == names[host]]

    for host in busy:
        if host in taken:
            continue
        first, after = host * gpus_per_host, (host + 1) * gpus_per_host
        number = met[names[host]]
        met[names[host]] += 1
        if names[host] == "L40S" or number % 4 == 3:
            for start in range(first, after, 2):
                job_id = f"serve-{host:02d}{start - first}"
                yield DefaultJob(job_id, "inference", (start, min(start + 2, after)))
            continue
        size = max(gang_hosts, 2 if host == busy[0] else 1)
        joined = more(host, size)
        taken.update(joined)
        yield DefaultJob(
            f"train-{host:02d}", "training", (first, after + len(joined) * gpus_per_host)
        )
