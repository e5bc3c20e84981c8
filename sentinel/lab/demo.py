"""The demonstration: a GPU of a simulated fleet goes wrong, and its work moves to a backup.

Everything else is real: Prometheus, Alertmanager, the daemon, a scheduler and a receiver of
alerts, each its own process. It tells what they did and proves it; it marks nothing itself.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Final

from rich.console import Console
from rich.live import Live

from sentinel.errors import DependencyError, SentinelError
from sentinel.lab import screen
from sentinel.lab.faults import APPLICATION, HARDWARE
from sentinel.lab.stage import Stage
from sentinel.lab.story import Story, Target

# those that lead to a move within the demonstration's time
_MOVES: Final = ("off-the-bus", "vanished", "ecc", "thermal", "clock")
FAULTS: Final = {**{kind: HARDWARE[kind] for kind in _MOVES}, **APPLICATION}
DEFAULT_FAULT: Final = "thermal"
POLL_S: Final = 0.5
CALM_S: Final = 5.0  # without an alert, before the fault
PATIENCE: Final = 10  # polls in a row that may fail


class _Interrupted(Exception):
    """SIGTERM or Ctrl-C: everything is stopped on the way out."""


def run_demo(
    for_s: float = 240.0,
    json_output: bool = False,
    fault: str = DEFAULT_FAULT,
    seed: int = 1,
    keep: bool = False,
) -> int:
    """Tells the story once, in at most `for_s` seconds. 0: complete; 1: a step is missing.

    With `json_output` one JSON document is all of stdout. Logs stay in a folder, which is
    named on failure, or always with `keep`. Raises DependencyError when a part is not to be
    had or does not start, ValueError for an unknown fault.
    """
    if fault not in FAULTS:
        raise ValueError(f"no fault {fault!r}; there are {', '.join(FAULTS)}")
    folder = Path(tempfile.mkdtemp(prefix="sentinel-demo-"))
    console = Console(stderr=json_output, log_path=False)
    ok = False
    try:
        with _interruptible(), Stage(folder, seed=seed, say=console.log) as stage:
            story = _tell(stage, fault, seed, for_s, console, live=not json_output)
        ok = not story.missing and not story.wrong
        _report(story, ok, fault, seed, json_output, console)
    except _Interrupted:
        console.print("interrupted")
    finally:
        if ok and not keep:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            console.print(f"logs are in {folder}", soft_wrap=True)
    return 0 if ok else 1


def _tell(
    stage: Stage, fault: str, seed: int, for_s: float, console: Console, *, live: bool
) -> Story:
    deadline = time.monotonic() + for_s
    stage.start()
    target = choose_target(stage, seed)
    _wait_calm(stage, deadline, console)
    story = Story(stage, fault, target)
    spares = stage.get("exporter", "state")["spare_hosts"]
    shown = Live(console=console, screen=False, auto_refresh=False) if live else nullcontext()
    told = failures = 0
    with shown as view:
        story.begin()
        while not story.done and time.monotonic() < deadline:
            time.sleep(POLL_S)
            try:
                story.poll()
                if view is not None:
                    gpus = stage.get("daemon", "api/v1/gpus")["gpus"]
                    view.update(screen.render(story, gpus, spares), refresh=True)
                failures = 0
            except DependencyError as error:  # one late answer is no end of the story
                failures += 1
                if failures >= PATIENCE:
                    story.wrong.append(str(error))
            for row in [] if live else story.timeline()[told:]:
                console.log(f"+{row['seconds_after_fault']:.1f} s {row['step']}")
            told = len(story.moments)
    return story


def choose_target(stage: Stage, seed: int) -> Target:
    """A busy GPU, drawn by the seed, of a model that has an idle spare host."""
    state = stage.get("exporter", "state")
    jobs = {job["job"]: job for job in state["jobs"] if job["state"] == "running"}
    spared = {gpu["model"] for gpu in state["gpus"] if gpu["spare"]}
    busy = [g for g in state["gpus"] if g["job"] in jobs and g["model"] in spared]
    if not busy:
        raise DependencyError("the simulated fleet has no busy GPU with a spare")
    gpu = random.Random(seed).choice(busy)
    host_of = {g["uuid"]: g["host"] for g in state["gpus"]}
    nodes = dict.fromkeys(host_of[uuid] for uuid in jobs[gpu["job"]]["uuids"])
    return Target(gpu["uuid"], gpu["host"], gpu["index"], gpu["model"], gpu["job"], tuple(nodes))


def _wait_calm(stage: Stage, deadline: float, console: Console) -> None:
    """Until nothing has fired for a while and every GPU is judged: the story starts in peace."""
    console.log("waiting until the daemon finds the whole fleet well")
    calm_since = None
    strange = ["no answer"]
    while time.monotonic() < deadline:
        gpus = stage.get("daemon", "api/v1/gpus")["gpus"]
        incidents = stage.get("daemon", "api/v1/incidents")["incidents"]
        strange = [f"{row['node']}: {row['pattern']}" for row in incidents if row["confirmed_at"]]
        strange += [
            f"{gpu['node']} GPU {gpu['index']} is {gpu['kind']}"
            for gpu in gpus
            if gpu["kind"] not in ("normal", "deviant")
        ]
        calm_since = (calm_since or time.monotonic()) if gpus and not strange else None
        if calm_since and time.monotonic() - calm_since >= CALM_S:
            return
        time.sleep(POLL_S)
    raise DependencyError(f"the fleet was never well before the fault: {', '.join(strange[:5])}")


def _report(
    story: Story, ok: bool, fault: str, seed: int, json_output: bool, console: Console
) -> None:
    if json_output:
        document = {
            "schema": 1,
            "fault": fault,
            "seed": seed,
            "timeline": story.timeline(),
            "missing": story.missing,
            "wrong": story.wrong,
            "ok": ok,
        }
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    for row in [] if json_output else story.timeline():
        console.print(f"{row['seconds_after_fault']:8.1f} s  {row['step']}: {row['detail']}")
    for text in story.wrong:
        console.print(f"wrong: {text}", style="red")
    if story.missing:
        console.print(f"missing: {', '.join(story.missing)}", style="red")
    if ok:
        console.print("the story is complete", style="green")


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM ends the demonstration as Ctrl-C does, with everything stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _Interrupted

    previous = {n: signal.signal(n, interrupt) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sentinel.lab.demo", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--for", dest="for_s", type=float, default=240.0, metavar="SECONDS", help="a ceiling"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document, nothing else")
    parser.add_argument("--fault", choices=FAULTS, default=DEFAULT_FAULT)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="keep the folder with all logs")
    parser.add_argument("--list-faults", action="store_true")
    given = parser.parse_args(argv)
    if given.list_faults:
        for name, text in FAULTS.items():
            sys.stdout.write(f"{name:12} {text}\n")
        return 0
    try:
        return run_demo(given.for_s, given.json, given.fault, given.seed, given.keep)
    except SentinelError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
