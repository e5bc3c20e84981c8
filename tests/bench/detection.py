"""How well faults are told, measured in one run and printed as one table.

    python -m tests.bench.detection                        everything: the lab and the recordings
    python -m tests.bench.detection --seeds 1,2 --hours 6  a quick look
    python -m tests.bench.detection --rate                 what a fault-free fleet is paged for
    python -m tests.bench.detection --merge a.json b.json  one table of what ran in pieces

Results gather in the file of --out by what was asked for, so that a run goes on where the last
one ended. The definitions are those of tests/simulation/judging.py; a seed that misses, or tells
wrongly, prints the command that runs it alone.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from sentinel.lab import faults
from sentinel.lab.fleet import Fleet
from sentinel.lab.site import drawn
from tests.bench import series, simple_methods
from tests.simulation.director import Truth
from tests.simulation.judging import figures, judge
from tests.simulation.replay import T0_S, every_kind, replayed

PREVALENCE = 2e-4  # real faults per GPU-day in fleets of some 16,000 GPUs
RATE_REPEATS = 6  # how often each surprise comes, in a fleet of 1,024 GPUs and a day
_share = None


def main(argv=None):
    given = _arguments(argv)
    console = Console(stderr=given.json, width=None if sys.stdout.isatty() else 150)
    if given.merge:
        results = _merged([Path(name) for name in given.merge])
    else:
        results = _gather(given, console)
    summary = summarise(results)
    if not given.no_smd and not given.rate:
        summary["recordings"] = recordings(console)
    if given.json:
        print(json.dumps(summary, indent=1))
    else:
        show(summary, console)
    return 0


def _arguments(argv):
    parser = argparse.ArgumentParser(prog="python -m tests.bench.detection", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rate", action="store_true", help="no faults, large fleets, 60 s scrapes")
    parser.add_argument("--seeds", help="as 1,2 or 1-10  [default: 1-10; 1-4 with --rate]")
    parser.add_argument("--hosts", type=int, help="of 8 GPUs  [default: 16; 128 with --rate]")
    parser.add_argument("--hours", type=float, help="judged  [default: 24; 96 with --rate]")
    parser.add_argument("--learn-hours", type=float, default=24.0, help="[default: 24]")
    parser.add_argument("--step-s", type=float, help="[default: 15; 60 with --rate]")
    parser.add_argument("--kinds", help="only these, with commas between")
    parser.add_argument("--workers", type=int, default=1, help="processes  [default: 1]")
    parser.add_argument("--out", help="gather results in this JSON file")
    parser.add_argument("--merge", nargs="+", metavar="FILE", help="run nothing, show these")
    parser.add_argument("--no-simple", action="store_true", help="leave out the simple methods")
    parser.add_argument("--no-smd", action="store_true", help="leave out the recordings")
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")
    given = parser.parse_args(argv)
    given.seeds = _numbers(given.seeds or ("1-4" if given.rate else "1-10"))
    given.hosts = given.hosts or (128 if given.rate else 16)
    given.hours = given.hours or (96.0 if given.rate else 24.0)
    given.step_s = given.step_s or (60.0 if given.rate else 15.0)
    given.kinds = given.kinds.split(",") if given.kinds else None
    unknown = set(given.kinds or ()) - set(faults.KINDS)
    if unknown:
        parser.error(f"no kind {', '.join(sorted(unknown))}; there are {', '.join(faults.KINDS)}")
    return given


def _numbers(text):
    out = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        out += range(int(first), int(last or first) + 1)
    return out


def _tasks(given):
    """What is to be run, by a key that says all of it."""
    for seed in given.seeds:
        task = {
            "seed": seed,
            "hosts": given.hosts,
            "hours": given.hours,
            "learn_hours": given.learn_hours,
            "step_s": given.step_s,
            "rate": given.rate,
            "kinds": given.kinds,
            "simple": not (given.no_simple or given.rate),
        }
        what = "rate" if given.rate else "lab"
        kinds = "+".join(given.kinds or ["all"])
        size = f"{given.hosts} hosts, {given.learn_hours:g}+{given.hours:g} h, {given.step_s:g} s"
        yield f"{what} seed {seed}, {size}, {kinds}", task


def _gather(given, console):
    out = Path(given.out) if given.out else None
    results = json.loads(out.read_text()) if out and out.exists() else {}
    asked = dict(_tasks(given))
    left = {key: task for key, task in asked.items() if key not in results}
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        for key, done in _run_all(left, given.workers, progress):
            results[key] = done
            if out:
                _write(out, {**(json.loads(out.read_text()) if out.exists() else {}), key: done})
            _complain(asked[key], done, console)
    return results if given.out else {key: results[key] for key in asked}


def _write(path, results):
    part = path.with_suffix(".part")
    part.write_text(json.dumps(results))
    os.replace(part, path)


def _merged(paths):
    results = {}
    for path in paths:
        results |= json.loads(path.read_text())
    return results


def _run_all(tasks, workers, progress):
    bars = {key: progress.add_task(key, total=1.0) for key in tasks}
    if workers == 1:
        for key, task in tasks.items():
            yield key, run(task, lambda share, what, key=key: progress.update(
                bars[key], completed=share))  # fmt: skip
            progress.update(bars[key], completed=1.0)
        return
    context = multiprocessing.get_context("spawn")
    shares = context.Array("d", len(tasks), lock=False)
    with context.Pool(workers, _begin, (shares,)) as pool:
        running = {
            key: pool.apply_async(_run_one, (place, task))
            for place, (key, task) in enumerate(tasks.items())
        }
        place = {key: number for number, key in enumerate(tasks)}
        while running:
            time.sleep(0.5)
            for key in list(running):
                progress.update(bars[key], completed=shares[place[key]])
                if running[key].ready():
                    yield key, running.pop(key).get()


def _begin(shares):
    global _share
    _share = shares


def _run_one(place, task):
    def note(share, what):
        _share[place] = share

    return run(task, note)


def run(task, progress=lambda share, what: None):
    """One fleet, judged; plain data."""
    began = time.process_time()
    seed, hosts, step_s = task["seed"], task["hosts"], task["step_s"]
    learn_s, replay_s = 3600 * task["learn_hours"], 3600 * task["hours"]
    kinds = task["kinds"]
    if kinds is None and task["rate"]:
        repeat = max(1, round(RATE_REPEATS * hosts / 128 * replay_s / 86400))
        kinds = every_kind(rate_only=True, repeat=repeat)
    elif kinds is None:
        kinds = every_kind()
    seen = None
    fleet = Fleet(seed, hosts, start_s=T0_S, site=drawn(seed))
    if task["simple"]:
        seen = simple_methods.Recorder([gpu.uuid for gpu in fleet.gpus])
    with tempfile.TemporaryDirectory() as folder:
        done = replayed(
            folder, seed, kinds, hosts=hosts, step_s=step_s, learn_s=learn_s, replay_s=replay_s,
            progress=lambda share, what: progress(0.9 * share, what), seen=seen,
        )  # fmt: skip
    done["cpu_s"] = round(time.process_time() - began, 1)
    done["task"], done["methods"] = task, {}
    truths = [{name: event[name] for name in Truth.__slots__} for event in done["events"]]
    for name in simple_methods.METHODS if task["simple"] else ():
        report = simple_methods.report_of(name, seen, fleet.gpus, T0_S + learn_s)
        judged = judge(report, truths)
        done["methods"][name] = {key: judged[key] for key in ("events", "alerts", "gpu_days")}
        done["methods"][name]["wrong_moves"] = []
    return done


def _complain(task, done, console):
    events = done["events"]
    missed = [e["kind"] for e in events if e["kind"] in faults.HARD and not e["found"]]
    pages = [a for a in done["alerts"] if a["verdict"] == "false" and a["severity"] == "critical"]
    if missed or pages or done["wrong_moves"]:
        kinds = f" --kinds {','.join(task['kinds'])}" if task["kinds"] else ""
        console.print(
            f"seed {task['seed']}: hard faults missed: {', '.join(missed) or 'none'}; "
            f"false pages: {len(pages)}; wrong moves: {len(done['wrong_moves'])}. Again: "
            f"python -m tests.bench.detection {'--rate ' if task['rate'] else ''}--no-smd "
            f"--seeds {task['seed']} --hosts {task['hosts']} --hours {task['hours']:g} "
            f"--learn-hours {task['learn_hours']:g} --step-s {task['step_s']:g}{kinds}",
            soft_wrap=True,
        )


# --- what it comes to ---------------------------------------------------------------------


def summarise(results):
    """Figures of all runs, of the simple methods, and of the rate, as far as they ran."""
    runs = [done for key, done in results.items() if key.startswith("lab ")]
    rate = [done for key, done in results.items() if key.startswith("rate ")]
    summary = {"lab": None, "methods": {}, "rate": None}
    if runs:
        summary["lab"] = {
            **figures(runs),
            "runs": len(runs),
            "cpu_s": sum(r["cpu_s"] for r in runs),
        }
        for name in simple_methods.METHODS:
            of_method = [r["methods"][name] for r in runs if name in r["methods"]]
            if of_method:
                summary["methods"][name] = figures(of_method)
    if rate:
        summary["rate"] = _rate(rate)
    return summary


def _rate(runs):
    told = figures(runs)
    days, pages = told["gpu_days"], told["false_pages"]
    faults_expected = PREVALENCE * days
    pages_at_most = pages + 1.15 + 1.3 * (pages + 0.8) ** 0.5  # about the 90 % limit of a Poisson
    recall = 1.0
    return {
        "gpu_days": days,
        "runs": len(runs),
        "false_pages": pages,
        "false_tickets": told["false_alerts"] - pages,
        "wrong_moves": told["wrong_moves"],
        "told": told["told"],
        "surprises": sum(len(run["events"]) for run in runs),
        "near": {row["kind"]: row["false"] for row in told["rows"] if row["false"]},
        "false_near_nothing": told["false_near_nothing"],
        "precision_at_prevalence": recall * faults_expected / (faults_expected + pages),
        "precision_at_least": recall * faults_expected / (faults_expected + pages_at_most),
        "cpu_s": sum(run["cpu_s"] for run in runs),
    }


def recordings(console):
    """The part on real machines, where it and its data are here."""
    try:
        return series.show(series.smd_table(progress=lambda line: console.print(line, style="dim")))
    except FileNotFoundError as error:
        console.print(f"recordings: {error}: skipped")
        return None


def show(summary, console):
    lab = summary["lab"]
    if lab:
        console.print(_kinds_table(lab))
        console.print(_methods_table(summary))
        console.print(
            f"{lab['runs']} fleets, {lab['gpu_days']:.0f} GPU-days, {lab['events']} faults "
            f"({lab['hidden']} hidden); false alerts {lab['false_alerts']}, of them pages "
            f"{lab['false_pages']}, near nothing {lab['false_near_nothing']}; told of the whole "
            f"fleet or a silent host {lab['told']}; wrong moves {lab['wrong_moves']}; "
            f"{lab['cpu_s']:.0f} s of CPU",
            soft_wrap=True,
        )
    if summary["rate"]:
        console.print(_rate_table(summary["rate"]))
    if summary.get("recordings"):
        console.print("Recordings of real machines")
        console.print(summary["recordings"], highlight=False)


def _kinds_table(lab):
    table = Table(title="By kind")
    for name in ("kind", "class", "events", "found", "median delay", "acts", "false near"):
        table.add_column(name, justify="left" if name in ("kind", "class") else "right")
    table.add_column("named (on)")
    for row in lab["rows"]:
        named = ", ".join(f"{name} {count}" for name, count in row["patterns"].items())
        on = ", ".join(f"{name} {count}" for name, count in row["on"].items() if name != "gpu")
        table.add_row(
            row["kind"],
            row["class"],
            str(row["events"]) + (f" ({row['hidden']} hidden)" if row["hidden"] else ""),
            str(row["found"]) if row["class"] in ("hard", "soft") else "",
            "" if row["delay_s"] is None else f"{row['delay_s']:.0f} s",
            str(row["moves"] or ""),
            str(row["false"] or ""),
            named + (f" ({on})" if on else ""),
        )
    return table


def _methods_table(summary):
    table = Table(title="All kinds together")
    names = ("method", "hard recall", "soft recall", "precision", "false / GPU-day", "hard delay",
             "soft delay", "wrong moves")  # fmt: skip
    for name in names:
        table.add_column(name, justify="left" if name == "method" else "right")
    for name, row in {"GPU Sentinel": summary["lab"], **summary["methods"]}.items():
        table.add_row(
            name,
            _ratio(row["recall_hard"]),
            _ratio(row["recall_soft"]),
            _ratio(row["precision"]),
            f"{row['false_alerts_per_gpu_day']:.4f}",
            _seconds(row["delay_hard_s"]),
            _seconds(row["delay_soft_s"]),
            str(row["wrong_moves"]) if name == "GPU Sentinel" else "",
        )
    return table


def _rate_table(rate):
    table = Table(title="Without any fault")
    table.add_column("what")
    table.add_column("measured", justify="right")
    precision = (
        f"{rate['precision_at_prevalence']:.2f}, at least {rate['precision_at_least']:.2f} (90 %)"
    )
    rows = (
        ("GPU-days", f"{rate['gpu_days']:.0f} in {rate['runs']} fleets"),
        ("harmless surprises played", str(rate["surprises"])),
        ("false pages", str(rate["false_pages"])),
        ("false tickets", str(rate["false_tickets"])),
        ("fences and moves", str(rate["wrong_moves"])),
        ("tickets near", ", ".join(f"{k} {n}" for k, n in rate["near"].items()) or "none"),
        ("near nothing", str(rate["false_near_nothing"])),
        (f"precision of pages at {PREVALENCE:g} faults per GPU-day, if all are found", precision),
        ("CPU", f"{rate['cpu_s']:.0f} s"),
    )  # fmt: skip
    for row in rows:
        table.add_row(*row)
    return table


def _ratio(value):
    return "" if value is None else f"{value:.3f}"


def _seconds(value):
    return "" if value is None else f"{value:.0f} s"


if __name__ == "__main__":
    sys.exit(main())
