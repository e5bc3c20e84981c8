"""Whatever happens to samples on their way, a healthy GPU stays healthy or becomes unknown.

A healthy fleet is told through an unreliable world: samples are lost, repeated, delayed,
shuffled and spoilt, hosts fall silent, answers come in part. The judge is independent of the
fold: it knows what was delivered.
"""

from collections import defaultdict
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sentinel.core.domain import Kind, Presence
from sentinel.core.frame import Telemetry
from sentinel.core.verdict import Settings, Watch
from tests.core.telemetry import CATALOG, IDENTITY, START_S, gpu, key, samples

STEP_S, HOSTS, GPUS = 15.0, "abc", 3
SILENT_S = 60.0
KINDS = list(Kind)
SPOILT = (np.nan, np.inf, -1.0, 2147483635.0, 4294967295.0, 140737488355328.0, 2.0**63, 1e30)
HEALTHY = {
    "DCGM_FI_DEV_GPU_TEMP": lambda r: r.randint(35, 70),
    "DCGM_FI_DEV_POWER_USAGE": lambda r: r.uniform(80, 650),
    "DCGM_FI_DEV_GPU_UTIL": lambda r: r.randint(0, 100),
    "DCGM_FI_DEV_SM_CLOCK": lambda r: r.randint(300, 1980),
    "DCGM_FI_DEV_XID_ERRORS": lambda r: 0,
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": lambda r: 0,
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": lambda r: 0,
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": lambda r: r.random(),
}


class World:
    """What every host says each tick, and what of it has been delivered by when."""

    def __init__(self, random, loss, delay, spoil):
        self.random, self.loss, self.delay, self.spoil = random, loss, delay, spoil
        self.waiting = defaultdict(list)
        self.newest = {}  # GPU -> time of its newest delivered sample
        self.up = {}  # host -> (time, value) of the newest delivered
        self.down = dict.fromkeys(HOSTS, 0)

    def points(self, i):
        """What arrives at tick `i`."""
        at_s = START_S + STEP_S * i
        for host in HOSTS:
            if self.down[host]:
                self.down[host] -= 1
                if self.random.random() < 0.5:  # scraped in vain; else nothing is known at all
                    self._send(i, "up", host, None, at_s, 0.0)
                continue
            if self.random.random() < 0.08:
                self.down[host] = self.random.randint(1, 12)
            self._send(i, "up", host, None, at_s, 1.0)
            for n in range(GPUS):
                for name, value in HEALTHY.items():
                    spoilt = self.random.random() < self.spoil
                    raw = self.random.choice(SPOILT) if spoilt else value(self.random)
                    self._send(i, name, host, n, at_s, float(raw))
        arrived = self.waiting.pop(i, [])
        self.random.shuffle(arrived)
        return arrived

    def _send(self, i, name, host, n, at_s, value):
        if self.random.random() < self.loss:
            return
        labels = (
            gpu(n, host) if n is not None else {"instance": f"{host}:9400", "job": "dcgm-exporter"}
        )
        late = self.random.randint(1, 6) if self.random.random() < self.delay else 0
        copies = 2 if self.random.random() < 0.1 else 1
        self.waiting[i + late] += [(key(name, **labels), at_s, value)] * copies

    def note(self, points):
        for one, at_s, value in points:
            labels = dict(one.labels)
            if one.name == "up":
                host = labels["instance"][0]
                self.up[host] = max(self.up.get(host, (0.0, 0.0)), (at_s, value))
            elif not np.isnan(value):
                uuid = labels["UUID"]
                self.newest[uuid] = max(self.newest.get(uuid, 0.0), at_s)

    def host_is_unknown(self, host, now_s):
        """Nothing of the host for a minute, or the newest word is that it cannot be scraped."""
        return self.last(host) < now_s - SILENT_S or self.cannot_be_scraped(host)

    def cannot_be_scraped(self, host):
        up_s, value = self.up.get(host, (0.0, 1.0))
        return value == 0 and up_s >= self.last(host)

    def last(self, host):
        return max((t for g, t in self.newest.items() if g[4] == host), default=-np.inf)


def live(seed, ticks, loss=0.0, delay=0.0, spoil=0.0, partial=0.0):
    random = Random(seed)
    world = World(random, loss, delay, spoil)
    telemetry = Telemetry(CATALOG, IDENTITY)
    watch = Watch(Settings(), CATALOG)
    for i in range(ticks):
        now_s = START_S + STEP_S * i + 1.0
        points = world.points(i)
        world.note(points)
        in_part = random.random() < partial
        telemetry.add(samples(now_s, *points, partial=in_part))
        frame = telemetry.frame(now_s)
        judgement = watch.judge(frame, None)
        yield i, world, frame, judgement, in_part


SEEDS = st.integers(0, 2**32 - 1)
SHARES = st.sampled_from([0.0, 0.02, 0.15, 0.4])
LOW = np.array([m.valid_min for m in CATALOG.metrics])
HIGH = np.array([m.valid_max for m in CATALOG.metrics])


@given(seed=SEEDS, loss=SHARES, delay=SHARES, spoil=SHARES, partial=SHARES)
@settings(max_examples=60, deadline=None)
def test_a_healthy_gpu_is_never_at_fault_and_lost_only_when_it_really_is_missing(
    seed, loss, delay, spoil, partial
):
    for _, world, frame, judgement, in_part in live(seed, 16, loss, delay, spoil, partial):
        known = np.isfinite(frame.values)
        assert ((frame.values >= LOW) & (frame.values <= HIGH))[known].all()
        assert not np.isinf(frame.values).any()
        for seen, code in zip(frame.gpus, judgement.kinds, strict=True):
            kind, host = KINDS[int(code)], seen.uuid[4]
            assert kind is not Kind.FAULT, judgement.verdicts
            if world.cannot_be_scraped(host):
                assert kind is Kind.UNKNOWN
            if kind is Kind.LOST:
                assert not in_part
                assert not world.host_is_unknown(host, frame.at_s)
                # at least two scrapes of its host were delivered without it
                assert world.last(host) - world.newest[seen.uuid] >= 2 * STEP_S - 1e-6
        assert not any(
            v.may_fence or v.may_move for v in judgement.verdicts if v.kind is Kind.FAULT
        )


@given(seed=SEEDS)
@settings(max_examples=30, deadline=None)
def test_repeats_and_order_alone_change_nothing(seed):
    """With no loss and no delay the fleet is normal at every tick that a host is up."""
    for _, world, frame, judgement, _ in live(seed, 12):
        for seen, code, presence in zip(frame.gpus, judgement.kinds, frame.presence, strict=True):
            if presence == Presence.PRESENT:
                assert KINDS[int(code)] is Kind.NORMAL
            else:
                assert world.host_is_unknown(seen.uuid[4], frame.at_s)
                assert KINDS[int(code)] is Kind.UNKNOWN


def test_the_world_is_bad_enough_to_mean_something():
    """The judge above would pass a world in which nothing ever goes wrong."""
    seen = defaultdict(int)
    for seed in range(12):
        for _, _, frame, judgement, _ in live(seed, 16, 0.4, 0.15, 0.15, 0.15):
            for kind, presence in zip(judgement.kinds, frame.presence, strict=True):
                seen[KINDS[int(kind)], Presence(presence)] += 1
    assert seen[Kind.NORMAL, Presence.PRESENT] > 100
    assert seen[Kind.UNKNOWN, Presence.HOST_SILENT] > 20
