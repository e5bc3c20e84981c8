"""A small reference scheduler: it owns simulated jobs and really moves them.

It is the receiving side of the webhook protocol, as a site would write it: every order is
checked by its signature, kept by its id before it is answered, and done at most once. It
decides where a job may run; it never decides whether a GPU is ill. For tests it can also
misbehave, one fault at a time (`Behaviour`), and it remembers every call it received.

    POST /migrate                 an order: fence, move or unfence
    GET  /migrate/{operation_id}  its state and placement, or 404: never received
    GET  /jobs /nodes /operations what it knows, for people and tests
    PUT  /jobs                    submit {"job", "uuids", "tenant"}
    PUT  /behaviour               change how it misbehaves from now on
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import requests

from sentinel.lab.ledger import Job, Ledger, Operation, Placement
from sentinel.lab.loopback import DROPPED, Answer, Request, serve_until_terminated
from sentinel.lab.orders import ALWAYS, Behaviour, Order, Signer, Submission

CALLBACK_TRIES: Final = 4
HANG_S: Final = 3600.0


class Refusal(Exception):
    """Why an order is not, or was not, carried out."""


class Exporter:
    """The lab's GPUs, as far as this scheduler may touch them."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def state(self) -> dict[str, Any]:
        """Its GPUs and jobs. Waits half a minute for the exporter to come up."""
        deadline = time.monotonic() + 30
        while True:
            try:
                answer = requests.get(f"{self.url}/state", timeout=5)
                answer.raise_for_status()
                state: dict[str, Any] = answer.json()
                return state
            except requests.RequestException:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def start(self, job: str, uuids: tuple[str, ...], tenant: str) -> None:
        order = {"job": job, "uuids": uuids, "tenant": tenant}
        requests.put(f"{self.url}/jobs", json=order, timeout=5).raise_for_status()

    def stop(self, job: str) -> None:
        answer = requests.delete(f"{self.url}/jobs/{job}", timeout=5)
        if answer.status_code != 404:  # a job that crashed is gone already
            answer.raise_for_status()


class Scheduler:
    """Owns jobs and cordons. One lock: an order is judged and kept as one step."""

    def __init__(
        self, ledger: Ledger, exporter: Exporter, secret: str, behaviour: Behaviour
    ) -> None:
        self.ledger = ledger
        self.exporter = exporter
        self.behaviour = behaviour
        self._signer = Signer(secret)
        state = exporter.state()
        self._nodes: dict[str, str] = {gpu["uuid"]: gpu["host"] for gpu in state["gpus"]}
        for job in [] if ledger.jobs() else state["jobs"]:  # at first it adopts what runs
            ledger.put_job(job["job"], tuple(job["uuids"]), "")
        self._lock = threading.Lock()
        for operation in ledger.open_operations():  # a restart keeps its promises
            self._begin(operation)

    def submit(self, job: str, uuids: tuple[str, ...], tenant: str = "") -> None:
        """A new job on these GPUs. Raises Refusal when one is unknown or not free."""
        with self._lock:
            unusable = (set(uuids) - set(self._nodes)) | (set(uuids) & self._taken(besides=job))
            if unusable or not uuids:
                raise Refusal(f"job {job}: unknown or not free: {sorted(unusable)}")
            self.ledger.put_job(job, uuids, tenant)
        self.exporter.start(job, uuids, tenant)

    def receive(self, request: Request) -> Answer:
        """The whole of POST /migrate: nothing malformed gets further than 400 or 401."""
        if not self._signer.verified(request.headers, request.body):
            self.ledger.note_call("POST", "", 401)
            return Answer(401, {"error": "no valid signature"})
        try:
            order = msgspec.json.decode(request.body, type=Order)
        except (ValueError, RecursionError) as error:
            self.ledger.note_call("POST", "", 400)
            return Answer(400, {"error": f"not an order: {error}"})
        if not order.operation_id or order.operation_id != request.headers["webhook-id"]:
            self.ledger.note_call("POST", order.operation_id, 400)
            return Answer(400, {"error": "webhook-id is not the operation_id"})
        return self._take(order, request.body)

    def query(self, operation_id: str) -> Answer:
        operation = self.ledger.operation(operation_id)
        self.ledger.note_call("GET", operation_id, 200 if operation else 404)
        if operation is None:
            return Answer(404, {"error": "never received", "operation_id": operation_id})
        return Answer(200, operation.status())

    def jobs(self) -> list[dict[str, Any]]:
        return [
            {**vars(job), "nodes": [part["node"] for part in self._placement(job.uuids)]}
            for job in self.ledger.jobs().values()
        ]

    def nodes(self) -> list[dict[str, Any]]:
        cordons = self.ledger.cordons()
        runs = {uuid: job.job for job in self.ledger.jobs().values() for uuid in job.uuids}
        return [
            {
                "node": part["node"],
                "cordoned_by": cordons.get(part["node"]),
                "gpus": {uuid: runs.get(uuid) for uuid in part["gpu_uuids"]},
            }
            for part in self._placement(tuple(self._nodes))
        ]

    def _take(self, order: Order, body: bytes) -> Answer:
        with self._lock:
            operation = self.ledger.operation(order.operation_id)
            is_new = operation is None
            if is_new and self.behaviour.takes("hang"):
                self.ledger.note_call("POST", order.operation_id, 0)
            elif operation is None:
                operation = self._judge(order)
                self.ledger.add(operation, body)
        if operation is None:
            time.sleep(HANG_S)
            return DROPPED
        status = 422 if operation.state == "refused" else 202
        content = operation.status()
        lost = is_new and self.behaviour.takes("lose_answer")
        self.ledger.note_call("POST", order.operation_id, 0 if lost else status)
        if is_new and operation.is_open:
            self._begin(operation)
        if lost:
            return DROPPED
        time.sleep(self.behaviour.accept_delay_s)
        return Answer(status, content)

    def _judge(self, order: Order) -> Operation:
        operation = Operation(
            operation_id=order.operation_id,
            action=order.action,
            node=order.node,
            job=order.workload.id if order.workload else "",
            callback_url=order.callback_url,
            dry_run=order.dry_run,
        )
        try:
            if self.behaviour.takes("refuse"):
                raise Refusal("told to refuse")
            if _is_past(order.deadline):
                raise Refusal(f"its deadline {order.deadline} has passed")
            if order.node not in self._nodes.values():
                raise Refusal(f"no node {order.node}")
            if order.action == "move":
                operation.placement = self._place(order)
        except Refusal as refusal:
            operation.state, operation.reason = "refused", str(refusal)
        else:
            kinds = ("fail", "no_callback", "lie_finished")
            operation.misdeeds = tuple(kind for kind in kinds if self.behaviour.takes(kind))
        return operation

    def _place(self, order: Order) -> Placement:
        """Where the whole gang goes: it keeps its good GPUs and takes the hint for the rest."""
        job = self.ledger.jobs().get(order.workload.id) if order.workload else None
        if job is None:
            raise Refusal(f"no job {order.workload.id if order.workload else '(none named)'}")
        closed = {order.node, *order.exclude_nodes, *self.ledger.cordons()}
        usable = {uuid for uuid, node in self._nodes.items() if node not in closed}
        kept = [uuid for uuid in job.uuids if uuid in usable]
        hint = [uuid for spare in order.spare_hint for uuid in spare.gpu_uuids]
        usable -= {*self._taken(besides=job.job), *kept}
        free = [uuid for uuid in (hint or self._nodes) if uuid in usable]
        needed = len(job.uuids) - len(kept)
        if len(free) < needed:
            where = "the hint" if hint else "the fleet"
            raise Refusal(
                f"job {job.job} needs {needed} free GPUs away from {', '.join(sorted(closed))}; "
                f"{where} has {len(free)}"
            )
        return self._placement((*kept, *free[:needed]))

    def _placement(self, uuids: tuple[str, ...]) -> Placement:
        nodes = dict.fromkeys(self._nodes[uuid] for uuid in uuids)
        return [
            {"node": node, "gpu_uuids": [uuid for uuid in uuids if self._nodes[uuid] == node]}
            for node in nodes
        ]

    def _taken(self, *, besides: str) -> set[str]:
        """GPUs that run another job or are promised to one."""
        held = [(job.job, job.uuids) for job in self.ledger.jobs().values()]
        held += [(order.job, _uuids(order.placement)) for order in self.ledger.open_operations()]
        return {uuid for job, uuids in held if job != besides for uuid in uuids}

    def _begin(self, operation: Operation) -> None:
        threading.Thread(target=self._carry_out, args=(operation,), daemon=True).start()

    def _carry_out(self, operation: Operation) -> None:
        if operation.state == "accepted":  # what a crash interrupted goes on: no second start
            operation.started += 1
        operation.state = "running"
        self.ledger.update(operation)
        tells = threading.Thread(target=self._call_back, args=(operation.status(), operation))
        tells.start()
        try:
            self._do(operation)
            operation.state = "finished"
        except (requests.RequestException, Refusal) as error:
            operation.state, operation.reason = "failed", str(error)
        self.ledger.update(operation)
        tells.join()  # "finished" is never overtaken by "running"
        self._call_back(operation.status(), operation)

    def _do(self, operation: Operation) -> None:
        if operation.dry_run:
            operation.reason = "dry run: nothing was done"
        elif "fail" in operation.misdeeds:
            time.sleep(self.behaviour.run_s)
            raise Refusal("told to fail")
        elif "lie_finished" in operation.misdeeds:
            time.sleep(self.behaviour.run_s)
        elif operation.action == "fence":
            self.ledger.cordon(operation.node, operation.operation_id)
        elif operation.action == "unfence":
            self.ledger.uncordon(operation.node)
        else:
            self._move(self.ledger.jobs()[operation.job], _uuids(operation.placement))

    def _move(self, job: Job, uuids: tuple[str, ...]) -> None:
        """Restarts the whole gang; doing it again after a crash halfway changes nothing."""
        self.exporter.stop(job.job)
        time.sleep(self.behaviour.run_s)
        self.ledger.put_job(job.job, uuids, job.tenant, restarts=job.restarts + 1)
        self.exporter.start(job.job, uuids, job.tenant)

    def _call_back(self, status: dict[str, Any], operation: Operation) -> None:
        if not operation.callback_url or "no_callback" in operation.misdeeds:
            return
        body = json.dumps(status).encode()
        for attempt in range(CALLBACK_TRIES):
            headers = self._signer.headers(operation.operation_id, body)
            try:
                answer = requests.post(
                    operation.callback_url, data=body, headers=headers, timeout=5
                )
                code, text = answer.status_code, answer.text[:200]
            except requests.RequestException as error:
                code, text = 0, str(error)
            self.ledger.note_callback(operation.operation_id, status["state"], code, text)
            if 200 <= code < 300:
                return
            time.sleep(0.5 * 2**attempt)


def _uuids(placement: Placement) -> tuple[str, ...]:
    return tuple(uuid for part in placement for uuid in part["gpu_uuids"])


def _is_past(deadline: str | float | None) -> bool:
    if isinstance(deadline, str):
        try:
            deadline = datetime.fromisoformat(deadline).timestamp()
        except ValueError:
            return False
    return deadline is not None and deadline < time.time()


def route(scheduler: Scheduler, request: Request) -> Answer:
    match (request.method, *request.path):
        case ("POST", "migrate"):
            return scheduler.receive(request)
        case ("GET", "migrate", operation_id):
            return scheduler.query(operation_id)
        case ("GET", "jobs"):
            return Answer(200, scheduler.jobs())
        case ("GET", "nodes"):
            return Answer(200, scheduler.nodes())
        case ("GET", "operations"):
            return Answer(200, scheduler.ledger.log())
        case ("GET", "-", "ready"):
            return Answer(200, "ready")
        case ("PUT", "jobs"):
            return _submitted(scheduler, request.body)
        case ("PUT", "behaviour"):
            return _behaving(scheduler, request.body)
    return Answer(404, {"error": "nothing here"})


def _submitted(scheduler: Scheduler, body: bytes) -> Answer:
    try:
        wanted = msgspec.json.decode(body, type=Submission)
        scheduler.submit(wanted.job, wanted.uuids, wanted.tenant)
    except (ValueError, Refusal) as error:
        return Answer(422, {"error": str(error)})
    return Answer(200, {"job": wanted.job})


def _behaving(scheduler: Scheduler, body: bytes) -> Answer:
    try:
        scheduler.behaviour = msgspec.json.decode(body, type=Behaviour)
    except ValueError as error:
        return Answer(422, {"error": str(error)})
    return Answer(200, msgspec.to_builtins(scheduler.behaviour))


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m sentinel.lab.scheduler")
    parser.add_argument("--listen", required=True, help="HOST:PORT")
    parser.add_argument("--exporter", required=True, help="the lab exporter's URL")
    parser.add_argument("--secret-file", required=True, type=Path, help='holds "whsec_..."')
    parser.add_argument("--state", required=True, type=Path, help="SQLite file, made at need")
    parser.add_argument("--jobs", type=Path, help='JSON: [{"job", "uuids", "tenant"}]')
    for item in msgspec.structs.fields(Behaviour):
        name = "--" + item.name.removesuffix("_s").replace("_", "-")
        if item.type is float:
            parser.add_argument(name, dest=item.name, type=float, metavar="SECONDS")
        else:
            parser.add_argument(
                name, dest=item.name, type=int, nargs="?", const=ALWAYS, metavar="ORDERS"
            )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    given = _parse(argv)
    chosen = {name: getattr(given, name) for name in Behaviour.__struct_fields__}
    behaviour = Behaviour(**{name: value for name, value in chosen.items() if value is not None})
    scheduler = Scheduler(
        Ledger(given.state),
        Exporter(given.exporter),
        given.secret_file.read_text().strip(),
        behaviour,
    )
    if given.jobs is not None:
        for wanted in msgspec.json.decode(given.jobs.read_bytes(), type=list[Submission]):
            if wanted.job not in scheduler.ledger.jobs():
                scheduler.submit(wanted.job, wanted.uuids, wanted.tenant)
    serve_until_terminated("scheduler", given.listen, partial(route, scheduler))


if __name__ == "__main__":
    main()
