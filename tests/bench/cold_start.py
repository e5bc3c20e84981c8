"""How soon after its start the product is useful: by how much history there was to learn from.

`python -m tests.bench.cold_start` prints one table over the lab's fleets and one over the real
recordings (where the data folder is): share of the injected faults found, false incidents, and
the median time to find.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np

from sentinel import history
from sentinel.backtest import backtest
from sentinel.config import Config
from sentinel.edges import bundle as bundles
from sentinel.errors import DependencyError
from tests.integration.recordings import (
    TEMP,
    Recorded,
    h100,
    inject,
    life,
    uuid,
    write_recording,
)
from tests.simulation.judging import figures
from tests.simulation.replay import every_kind, replayed

MINUTES = (0, 5, 20, 60, 1440)
RECORDINGS = ("b1", "i4", "t2", "t3")
HARD = ("xid", "vanish", "uncorrectable", "remap failure", "ecc storm")
SOFT = ("ramp", "clock", "memory clock", "replays", "power brake", "slowdown flaps")
START_S, STEP_S = 1_790_000_000.0, 15.0
GPU, REPLAY_S, FAULT_AFTER_S = 5, 1500, 120


def one_recording(folder, name, fault, minutes):
    """(found on its GPU, incidents elsewhere, seconds to the first) after so much history."""
    path = Path(folder) / "sentinel.yaml"
    path.write_text(
        f"prometheus: {{url: 'http://127.0.0.1:9'}}\ntick: {{interval_s: {STEP_S:g}}}\n"
        f"state: {{dir: '{folder}/{name}-{fault}-{minutes}'}}\n"
    )
    config, own = Config.load(path), h100(name)
    learnt_s, warm_s = 60 * minutes, 660
    rounds = int(np.ceil((learnt_s + warm_s + REPLAY_S) / len(own[TEMP])))
    values = life((own, rounds))
    at = learnt_s + warm_s + FAULT_AFTER_S
    values = inject(values, fault, GPU, at) if fault else values
    source = Recorded()
    write_recording(
        source, "life", values, START_S, host="node-1", every_s=15, extra=[("hpc_job", "1")]
    )
    if minutes:
        try:
            learnt = history.learn(
                config, START_S, START_S + learnt_s, prometheus=source, save=False
            )
            bundles.save(history.bundle_dir(config), learnt.bundle, created_s=START_S + learnt_s)
        except DependencyError:
            pass  # not enough yet: hard evidence and mates alone
    start_s = START_S + learnt_s + warm_s
    report = backtest(config, start_s, start_s + REPLAY_S, prometheus=source)
    told = report["incidents"]
    mine = [i for i in told if fault and i["gpu_uuid"] == uuid("life", GPU)]
    delays = [_seconds(i["confirmed_at"]) - (START_S + at) for i in mine]
    return bool(mine), len(told) - len(mine), min(delays, default=np.nan)


def _seconds(text):
    return float(np.datetime64(text.rstrip("Z"), "ms").astype(np.int64)) / 1e3


def recordings(minutes, names=RECORDINGS):
    """One row of the table over the recordings."""
    with tempfile.TemporaryDirectory() as folder:
        hard = [one_recording(folder, n, f, minutes) for n in names for f in HARD]
        soft = [one_recording(folder, n, f, minutes) for n in names for f in SOFT]
        healthy = [one_recording(folder, n, "", minutes) for n in names]
    every = hard + soft
    return {
        "hard": float(np.mean([found for found, _, _ in hard])),
        "soft": float(np.mean([found for found, _, _ in soft])),
        "false": sum(false for _, false, _ in every + healthy),
        "runs": len(every) + len(healthy),
        "hard_s": _median([d for _, _, d in hard]),
        "soft_s": _median([d for _, _, d in soft]),
    }


def _median(values):
    known = [v for v in values if np.isfinite(v)]
    return float(np.median(known)) if known else np.nan


def lab(minutes, seeds, *, hours, hosts):
    """One row of the table over the lab's fleets, all kinds of faults and traps."""
    runs = []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            runs.append(
                replayed(
                    folder, seed, every_kind(), hosts=hosts,
                    learn_s=60.0 * minutes, replay_s=3600.0 * hours,
                )
            )  # fmt: skip
    found = figures(runs)
    return {
        "hard": found["recall_hard"],
        "soft": found["recall_soft"],
        "false": found["false_alerts"],
        "runs": f"{found['gpu_days']:.0f} GPU-days",
        "hard_s": found["delay_hard_s"] or np.nan,
        "soft_s": found["delay_soft_s"] or np.nan,
    }


def show(title, rows):
    print(
        f"\n{title}\n{'history':>10}{'hard':>8}{'soft':>8}{'false':>7}{'hard, s':>9}{'soft, s':>9}"
    )
    for minutes, row in rows:
        print(
            f"{minutes:>6} min{row['hard']:>8.2f}{row['soft']:>8.2f}{row['false']:>7}"
            f"{row['hard_s']:>9.0f}{row['soft_s']:>9.0f}   of {row['runs']}",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", default=",".join(map(str, MINUTES)))
    parser.add_argument("--seeds", default="1,2")
    parser.add_argument("--hours", type=float, default=12.0, help="of each lab fleet")
    parser.add_argument("--hosts", type=int, default=16)
    parser.add_argument("--no-lab", action="store_true")
    parser.add_argument("--no-recordings", action="store_true")
    args = parser.parse_args()
    minutes = [int(m) for m in args.minutes.split(",")]
    if not args.no_recordings:
        short = [m for m in minutes if m <= 60]  # five minutes to and fro: a day says no more
        show("recordings", [(m, recordings(m)) for m in short])
    if not args.no_lab:
        seeds = [int(s) for s in args.seeds.split(",")]
        for m in minutes:
            show("lab", [(m, lab(m, seeds, hours=args.hours, hosts=args.hosts))])


if __name__ == "__main__":
    main()
