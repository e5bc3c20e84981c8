"""One run: a site drawn by the seed, a day to learn from, a day in which everything happens."""

from contextlib import suppress
from pathlib import Path

from sentinel import history
from sentinel.backtest import backtest
from sentinel.config import Config
from sentinel.edges import bundle as bundles
from sentinel.errors import DependencyError
from sentinel.lab import faults
from sentinel.lab.fleet import Fleet
from sentinel.lab.site import drawn
from tests.simulation.director import Director
from tests.simulation.judging import judge
from tests.simulation.lab_history import LabHistory, Scraping

# No limit hides what evidence alone would have done.
LIMITS = (
    "limits: {open_moves: 100, fenced_nodes: 1000, fenced_percent: 100, attempts_per_node: 1000, "
    "gpu_hours_lost_per_day: 1000000, cooldown_s: 0}\n"
)
T0_S = 1_790_000_000.0 - 1_790_000_000.0 % 3600.0


def scraping_of(seed, hosts):
    """As scrapes are in the field: each host at its own moment, some late, some failing; one
    host's clock is off, and one is scraped by two servers."""
    return Scraping(
        seed,
        spread=0.9,
        failing=0.0015,
        late=0.02,
        offset_s={hosts[seed % len(hosts)]: -20.0 + 3.0 * (seed % 5)},
        doubled=frozenset({hosts[(seed + 3) % len(hosts)]}) if seed % 3 == 0 else frozenset(),
    )


def every_kind(rate_only=False, repeat=1):
    """All kinds, or all that are harmless hardware-wise, each so many times."""
    kinds = [k for k in faults.KINDS if not rate_only or k not in faults.HARDWARE]
    return kinds * repeat


def replayed(
    folder, seed, kinds, *, hosts=16, step_s=15.0, learn_s=86400.0, replay_s=86400.0,
    progress=lambda share, what: None, seen=None, site=None, plain=False, settings="",
):  # fmt: skip
    """Learns (not with `learn_s` 0), replays and judges one fleet; plain data, see `judging.judge`.

    `seen` gets the blocks of both days, for those who compare. `plain` scrapes perfectly.
    """
    path = Path(folder) / "sentinel.yaml"
    path.write_text(
        f"prometheus: {{url: 'http://127.0.0.1:9'}}\ntick: {{interval_s: {step_s:g}}}\n"
        f"state: {{dir: '{folder}'}}\n{LIMITS}{settings}"
    )
    config = Config.load(path)
    fleet = Fleet(
        seed,
        hosts,
        start_s=T0_S,
        site=drawn(seed) if site is None else site,
        xid_visible_s=60.0 if seed % 2 else 3.0,
    )
    scraping = Scraping() if plain else scraping_of(seed, fleet.hosts)
    learnt_s, end_s = T0_S + learn_s, T0_S + learn_s + replay_s
    source = LabHistory(fleet, step_s, scraping=scraping, seen=seen)
    if learn_s:
        with suppress(DependencyError):  # a few minutes may not be enough: then without
            learnt = history.learn(
                config, T0_S, learnt_s, prometheus=source, save=False,
                progress=lambda share, what: progress(0.35 * share, what),
            )  # fmt: skip
            bundles.save(history.bundle_dir(config), learnt.bundle, created_s=learnt_s)
    start_s = learnt_s + history.warm_up_s(history.settings_of(config))
    director = Director(fleet, seed, kinds, start_s + 300.0, end_s)
    source = LabHistory(fleet, step_s, director.events, scraping=scraping, seen=seen)
    report = backtest(
        config, start_s, end_s, prometheus=source,
        progress=lambda share, what: progress(0.35 + 0.65 * share, what),
    )  # fmt: skip
    done = judge(report, [truth.plain() for truth in director.truths])
    done["unplayed"] = [kind for kind, _ in director.unplayed]
    done["refused"] = [[event[0], str(event[-1])] for event in source.refused]
    return done
