"""The simulated fleet as a process of its own: dcgm-exporter text, and levers to pull.

    GET    /host/<hostname>/metrics   what the exporter of that host says now
    GET    /state                     GPUs, jobs and active faults as JSON
    POST   /faults    {"kind", "uuid"}
    POST   /repair    {"uuid"}
    PUT    /jobs      {"job", "uuids", "kind"?}   starts it there, or moves it there
    DELETE /jobs/<id>
    POST   /backfill  {"remote_write_url", "hours", "step_s"}
    GET    /-/ready

It runs in real time. A backfill writes the fleet's own past, up to now, with the labels that a
scrape by `scrape_configs` gives; scraping may begin once it has returned.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from sentinel.core.domain import Ints
from sentinel.errors import SentinelError
from sentinel.lab import workload
from sentinel.lab.catalogue import FAMILIES
from sentinel.lab.faults import HARDWARE
from sentinel.lab.fleet import SCRAPE_JOB, Fleet, target_labels
from sentinel.lab.loopback import Answer, Request, serve_until_terminated
from sentinel.lab.remote_write import RemoteWriter

_HOURS_MAX: Final = 24 * 90
_CLOSE_ENOUGH_S: Final = 2.0


def scrape_configs(
    port: int, hosts: Sequence[str], *, interval_s: float | None = None
) -> list[dict[str, Any]]:
    """Prometheus's scrape_configs for this exporter: one target, `<host>:9400`, per host."""
    config: dict[str, Any] = {
        "job_name": SCRAPE_JOB,
        "static_configs": [
            {
                "targets": [f"127.0.0.1:{port}"],
                "labels": {
                    "__metrics_path__": f"/host/{host}/metrics",
                    "instance": target_labels(host)["instance"],
                },
            }
            for host in hosts
        ],
    }
    if interval_s is not None:
        text = f"{round(interval_s * 1000)}ms"
        config |= {"scrape_interval": text, "scrape_timeout": text}
    return [config]


class LiveFleet:
    """A fleet that keeps up with the clock. One lock; every answer is of one moment."""

    def __init__(self, fleet: Fleet, clock: Callable[[], float] = time.time) -> None:
        self._fleet = fleet
        self._clock = clock
        self._lock = threading.Lock()
        self._backfilling = threading.Lock()

    def handle(self, request: Request) -> Answer:
        """Routes and answers: 400 malformed, 404 unknown, 409 impossible now."""
        try:
            return self._route(request)
        except KeyError as error:
            return Answer(404, {"error": str(error.args[0])})
        except _Malformed as error:
            return Answer(400, {"error": str(error)})
        except ValueError as error:
            return Answer(409, {"error": str(error)})
        except SentinelError as error:
            return Answer(502, {"error": str(error)})

    def _route(self, request: Request) -> Answer:
        match (request.method, request.path):
            case ("GET", ("host", host, "metrics")):
                return Answer(200, self._metrics(host))
            case ("GET", ("state",)):
                with self._now() as fleet:
                    return Answer(200, state_of(fleet))
            case ("GET", ("-", "ready")):
                return Answer(200, {"ready": True})
            case ("POST", ("faults",)):
                body = _body(request)
                kind, uuid = _text(body, "kind"), _text(body, "uuid")
                with self._now() as fleet:
                    fleet.inject(kind, uuid)
                    return Answer(200, {"kind": kind, "uuid": uuid, "since_s": fleet.at_s})
            case ("POST", ("repair",)):
                uuid = _text(_body(request), "uuid")
                with self._now() as fleet:
                    fleet.repair(uuid)
                    return Answer(200, {"uuid": uuid, "at_s": fleet.at_s})
            case ("PUT", ("jobs",)):
                body = _body(request)
                uuids = body.get("uuids")
                if not isinstance(uuids, list) or not all(isinstance(u, str) for u in uuids):
                    raise _Malformed("uuids must be a list of GPU UUIDs")
                job, kind = _text(body, "job"), str(body.get("kind") or "")
                with self._now() as fleet:
                    fleet.assign(job, uuids, kind)
                return Answer(200, {"job": job, "uuids": uuids})
            case ("DELETE", ("jobs", job)):
                with self._now() as fleet:
                    fleet.unassign(job)
                return Answer(200, {"job": job})
            case ("POST", ("backfill",)):
                return Answer(200, self._backfill(_body(request)))
        return Answer(404, {"error": f"no {request.method} /{'/'.join(request.path)}"})

    @contextmanager
    def _now(self) -> Iterator[Fleet]:
        """The fleet, moved on to now, while nobody else touches it."""
        with self._lock:
            self._fleet.advance(self._clock())
            yield self._fleet

    def _metrics(self, host: str) -> str:
        with self._now() as fleet:
            rows = [row for row, gpu in enumerate(fleet.gpus) if gpu.node == host]
            if not rows:
                raise KeyError(f"no host {host} in this fleet")
            return exposition(fleet, np.array(rows, np.int64))

    def _backfill(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Replaces the fleet by one that has lived the past it writes. Labels, jobs and GPUs
        stay; counters and temperatures become those of that past."""
        url = _text(body, "remote_write_url")
        hours, step_s = _number(body, "hours", _HOURS_MAX), _number(body, "step_s", 3600)
        if not self._backfilling.acquire(blocking=False):
            raise ValueError("a backfill is running")
        try:
            with self._now() as fleet:
                if any(fault["hardware"] for fault in state_of(fleet)["faults"]):
                    raise ValueError("a history is written of a healthy fleet: repair it first")
                past = fleet.past(float(int(fleet.at_s - hours * 3600)))
            started, first_s = time.monotonic(), past.at_s
            with RemoteWriter(url) as writer:
                _write(past, writer, first_s, self._clock(), step_s)
                # writing took a while: go on by single seconds until the join is tight
                while self._clock() - past.at_s > _CLOSE_ENOUGH_S:
                    _write(past, writer, past.at_s + 1, self._clock(), 1.0)
            with self._lock:
                self._take_over(past)
            return {
                "samples": writer.samples_sent,
                "start_s": first_s,
                "end_s": past.at_s,
                "took_s": round(time.monotonic() - started, 3),
            }
        finally:
            self._backfilling.release()

    def _take_over(self, past: Fleet) -> None:
        """The past becomes the present; what people did meanwhile is done to it too."""
        live = self._fleet.workload.jobs
        for job_id in list(past.workload.jobs):
            if job_id not in live or list(live[job_id].rows) != list(
                past.workload.jobs[job_id].rows
            ):
                past.unassign(job_id)
        for job in state_of(self._fleet)["jobs"]:
            if job["job"] not in past.workload.jobs:
                past.assign(job["job"], job["uuids"], job["kind"])
        for fault in self._fleet.faults.values():
            past.inject(fault.kind, fault.uuid)
        self._fleet = past


class _Malformed(Exception):
    """The request's body is not what the route takes."""


def exposition(fleet: Fleet, rows: Ints) -> str:
    """Prometheus text, in dcgm-exporter's manner, for these rows of the fleet."""
    lines: list[str] = []
    for exported, family in zip(FAMILIES, fleet.samples(rows), strict=True):
        if not family.labels:
            continue
        lines.append(f"# HELP {family.name} {exported.help}")
        lines.append(f"# TYPE {family.name} {exported.type}")
        for labels, value in zip(family.labels, family.values.tolist(), strict=True):
            inner = ",".join(f'{name}="{text}"' for name, text in labels.items())
            number = f"{value:.0f}" if value == int(value) else f"{value:.6f}"
            lines.append(f"{family.name}{{{inner}}} {number}")
    return "\n".join(lines) + "\n" if lines else ""


def state_of(fleet: Fleet) -> dict[str, Any]:
    """Everything that a scheduler or a person may know, as plain JSON values."""
    reporting = fleet.reporting()
    jobs = []
    for job in fleet.workload.jobs.values():
        done, saved = fleet.workload.progress_s(job.id)
        jobs.append(
            {
                "job": job.id,
                "kind": workload.KIND_NAMES[job.kind],
                "uuids": [fleet.gpus[row].uuid for row in job.rows.tolist()],
                "state": workload.STATE_NAMES[job.state],
                "started_s": job.started_s,
                "progress_s": done,
                "checkpoint_s": saved,
            }
        )
    gpus = [
        {
            "uuid": gpu.uuid,
            "index": gpu.index,
            "host": gpu.node,
            "model": gpu.model,
            "job": fleet.workload.job_of[row],
            "spare": gpu.node in fleet.spare_hosts,
            "reporting": bool(reporting[row]),
        }
        for row, gpu in enumerate(fleet.gpus)
    ]
    faults = [
        {"kind": f.kind, "uuid": f.uuid, "since_s": f.since_s, "hardware": f.kind in HARDWARE}
        for f in fleet.faults.values()
    ]
    return {
        "at_s": fleet.at_s,
        "seed": fleet.seed,
        "hosts": list(fleet.hosts),
        "spare_hosts": list(fleet.spare_hosts),
        "gpus": gpus,
        "jobs": jobs,
        "faults": faults,
    }


def _write(fleet: Fleet, writer: RemoteWriter, start_s: float, end_s: float, step_s: float) -> None:
    for block in fleet.history(start_s, end_s, step_s):
        writer.write(block.labels, block.times_s, block.values)


def _body(request: Request) -> Mapping[str, Any]:
    try:
        body = json.loads(request.body)
    except ValueError as error:
        raise _Malformed(f"not JSON: {error}") from error
    if not isinstance(body, dict):
        raise _Malformed("a JSON object is needed")
    return body


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise _Malformed(f"{name} must be a text")
    return value


def _number(body: Mapping[str, Any], name: str, largest: float) -> float:
    value = body.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= largest:
        raise _Malformed(f"{name} must be a number above 0, at most {largest:g}")
    return float(value)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m sentinel.lab.exporter", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--port", type=int, default=9400, help="on loopback; 0 takes a free one")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hosts", type=int, default=16)
    parser.add_argument("--gpus-per-host", type=int, default=8)
    parser.add_argument("--load-s", type=float, default=45.0, help="how long a job takes to load")
    parser.add_argument(
        "--xid-visible-s",
        type=float,
        default=3.0,
        help="how long a GPU off the bus, or with memory errors, shows its first Xid",
    )
    parser.add_argument("--no-jobs", action="store_true", help="start with an idle fleet")
    given = parser.parse_args(argv)
    fleet = Fleet(
        given.seed,
        given.hosts,
        given.gpus_per_host,
        start_s=float(int(time.time())),
        load_s=given.load_s,
        xid_visible_s=given.xid_visible_s,
        default_jobs=not given.no_jobs,
    )
    live = LiveFleet(fleet)
    serve_until_terminated("exporter", f"127.0.0.1:{given.port}", live.handle, quiet=True)


if __name__ == "__main__":
    main()
