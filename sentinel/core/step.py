"""One tick: the verdict, then incidents, guards, plans, and what became of earlier plans.

`advance` folds a judgement, the outcomes and the commands into the state that survives a
restart and says what is to be done; it does nothing itself. Nothing leaves the process
before the caller has committed the step it came from. Its cost follows what is abnormal,
not the size of the fleet.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace

from sentinel.core import (
    breaker,
    budget,
    causes,
    commands,
    context,
    domain,
    groups,
    guards,
    invariants,
    migration,
    shared,
)
from sentinel.core.decide import decide, recheck
from sentinel.core.domain import (
    ActionKind,
    Command,
    Control,
    Evidence,
    FaultPattern,
    Frame,
    Incident,
    Judgement,
    Kind,
    Migration,
    MigrationPhase,
    Operation,
    Outcome,
    Severity,
    Shared,
    Step,
    Subject,
    SubjectKind,
    Transition,
    Verdict,
    Workload,
)
from sentinel.core.groups import Attribution
from sentinel.core.guards import Facts
from sentinel.core.incident import (
    Change,
    Sighting,
    deviates,
    named,
    opened,
    recovers,
    was_reset,
)
from sentinel.core.invariants import check_invariants
from sentinel.core.ledger import Ledger
from sentinel.core.migration import sent
from sentinel.core.patterns import Book
from sentinel.core.placement import Fleet, ModelRanks
from sentinel.core.policy import Policy, Times
from sentinel.core.scheduler import View, resolve
from sentinel.core.verdict import Bundle, Watch

__all__ = ["Inputs", "advance", "check_invariants", "housekeep", "resume", "sent", "step"]

_EMPTY_FOR_S = 300.0  # a fleet of which nothing was ever seen may still be starting
_SPREAD_KEPT = 64
_SHARED = (SubjectKind.NODE, SubjectKind.RACK, SubjectKind.JOB, SubjectKind.FLEET)
_RESOLVED_KEPT_S = 3600.0
_MIGRATION_KEPT_S = 25 * 3600.0  # limits look back a day


@dataclass(frozen=True, slots=True)
class Inputs:
    """What one tick is given. `epoch` is the lease under which this daemon acts."""

    frame: Frame
    outcomes: tuple[Outcome, ...] = ()
    commands: tuple[Command, ...] = ()
    policy: Policy = field(default_factory=Policy)
    models: ModelRanks = field(default_factory=ModelRanks)
    epoch: int = 0
    learnt: tuple[FaultPattern, ...] | None = None  # newly learnt fault patterns
    scheduler: View | None = None  # what the scheduler said last, where one can be asked


def step(
    control: Control, window: Watch, bundle: Bundle | None, inputs: Inputs, now_s: float
) -> Step:
    """One whole tick: what the telemetry means, then what follows from it.

    `window` is the ring of recent telemetry, updated in place; all else is a value.
    """
    limits = budget.thresholds(
        control.peaks,
        bundle.calibration if bundle else None,
        inputs.policy.budget,
        now_s,
        gpus=len(inputs.frame.gpus),
    )
    inputs = replace(inputs, frame=resolve(inputs.frame, inputs.scheduler))
    book = window.reads(control.patterns)
    under = {i.gpu_uuid for i in control.incidents.values() if i.is_open and i.gpu_uuid}
    judgement = window.judge(inputs.frame, bundle, limits, frozenset(under))
    return advance(control, judgement, inputs, now_s, book)


def advance(
    control: Control, judgement: Judgement, inputs: Inputs, now_s: float, book: Book | None = None
) -> Step:
    """The state after this tick, the decisions taken, and the calls that may now leave.
    `book` names what incidents are like; without one they go by their verdict's word.

    Raises AssertionError where the state would break a rule that no input may break.
    """
    policy = inputs.policy
    dt_s = _data_time_s(control.last_tick_s, now_s, policy.times.tick_s)
    frame = inputs.frame
    fleet = Fleet(frame, judgement)
    ledger = Ledger(control, policy.cluster, now_s)
    blind = frame.coverage.blind

    commands.obey(ledger, inputs.commands, book)
    if inputs.learnt is not None:
        ledger.relearn(inputs.learnt)
    if book is not None and ledger.patterns is not control.patterns:
        book = book.keeping(ledger.patterns)
        _rename(ledger, book)
    _hear(ledger, inputs.outcomes)
    quiet = not (
        groups.worth_a_look(judgement)
        or any(i.is_open for i in ledger.incidents.values())
        or any(m.phase.is_open for m in ledger.migrations.values())
    )
    nodes = 0 if quiet else len(fleet.by_node)
    hold = breaker.FleetHold()
    if not blind and not quiet:
        found = groups.attribute(fleet, judgement, _standing(ledger), policy.cluster)
        judgement = found.judgement
        hold = breaker.fleet_hold(
            frame,
            judgement.verdicts,
            ledger.view(),
            policy.limits,
            nodes,
            now_s,
            _explained(ledger, fleet, found),
            found.fleet,
        )
        held = hold.reason is not None
        speaks = _fold_groups(ledger, fleet, found, policy.times, dt_s, held)
        event = _fold_fleet(ledger, fleet, judgement, hold, found, policy, dt_s)
        if event is not None:
            speaks.update((place, event) for place in found.places(SubjectKind.FLEET))
        _fold_gpus(ledger, found, speaks, fleet, policy.times, dt_s, held, book)
    _fold_blindness(ledger, frame, policy, dt_s)
    if not blind:
        ledger.peaks = budget.fold(
            ledger.peaks, ledger.incidents.values(), judgement.verdicts, policy.budget, now_s
        )
    _wait(ledger, fleet, policy.times, dt_s, blind)
    _mark(ledger)
    _mark_nodes(ledger)
    commands.finish_releases(ledger, policy.times, inputs.epoch)
    if book is not None:
        ledger.remember_ended(control.incidents, book)
    facts = Facts(
        now_s,
        policy,
        nodes,
        inputs.epoch,
        breaker.coverage_reason(frame, policy.limits),
        hold.reason,
        inputs.scheduler,
    )
    recheck(ledger, fleet, facts)
    decide(ledger, fleet, inputs.models, facts)
    _call(ledger, facts)

    after = ledger.view()
    broken = invariants.broken_structure(after)
    assert not broken, "; ".join(broken)
    return Step(
        after,
        judgement,
        tuple(ledger.decisions),
        tuple(ledger.transitions),
        tuple(ledger.actions),
    )


def resume(control: Control, now_s: float) -> tuple[Control, tuple[Transition, ...]]:
    """The state to start from after a restart: what may have left is only asked about."""
    migrations = dict(control.migrations)
    transitions = []
    doubtful = (
        MigrationPhase.PLANNED,
        MigrationPhase.SENT,
        MigrationPhase.RUNNING,
        MigrationPhase.UNKNOWN,
    )
    for m in control.migrations.values():
        if m.phase not in doubtful:
            continue
        why = f"restarted while it was {m.phase}: ask before anything else"
        migrations[m.operation_id] = migration.doubted(m, now_s, why)
        transitions.append(
            Transition(now_s, "migration", m.operation_id, m.phase, MigrationPhase.UNKNOWN, why)
        )
    return replace(control, migrations=migrations), tuple(transitions)


def housekeep(control: Control, now_s: float) -> Control:
    """Without what is over and counts against no limit any more. What an open incident has
    tried is kept as long as the incident: forgetting it would let it be tried again."""
    needed = {q.incident_id for q in control.quarantine.values()}
    needed |= {m.incident_id for m in control.migrations.values() if m.phase.is_open}
    fences = {q.operation_id for q in control.quarantine.values()}

    def kept_incident(i: Incident) -> bool:
        if i.is_open or i.id in needed:
            return True
        told = i.confirmed_at_s is not None
        return told and now_s - (i.resolved_at_s or 0.0) <= _RESOLVED_KEPT_S

    incidents = {i.id: i for i in control.incidents.values() if kept_incident(i)}

    def kept_migration(m: Migration) -> bool:
        if m.phase.is_open or m.operation_id in fences or m.incident_id in needed:
            return True
        incident = incidents.get(m.incident_id)
        if incident is not None and incident.is_open:
            return True
        return now_s - max(m.planned_at_s, m.since_s) <= _MIGRATION_KEPT_S

    migrations = {m.operation_id: m for m in control.migrations.values() if kept_migration(m)}
    return replace(control, incidents=incidents, migrations=migrations)


def _data_time_s(last_s: float, now_s: float, tick_s: float) -> float:
    """How much time this tick's data stands for. A long gap proves nothing about what lay
    in it, and a clock that steps back no time at all."""
    gap_s = now_s - last_s
    if last_s <= 0.0 or gap_s <= 0.0:
        return 0.0
    return tick_s if gap_s > 3.0 * tick_s else gap_s


def _hear(ledger: Ledger, outcomes: tuple[Outcome, ...]) -> None:
    for outcome in outcomes:
        known = ledger.migrations.get(outcome.operation_id)
        if known is None:
            why = f"ignored {outcome.kind} ({outcome.source}): nothing of this id is known"
            ledger.note("migration", outcome.operation_id, "", "", why)
            continue
        ledger.turn(migration.heard(known, outcome, ledger.now_s))


def _standing(ledger: Ledger) -> dict[Subject, Incident]:
    """The incidents that speak for many GPUs and are open, by subject."""
    return {
        i.subject: i
        for i in ledger.incidents.values()
        if i.is_open and i.subject.kind in _SHARED and i.kind is not Kind.UNKNOWN
    }


def _explained(ledger: Ledger, fleet: Fleet, found: Attribution) -> dict[str, Subject]:
    """Which node, rack or job speaks for a GPU, now or since its suspicion arose."""
    gpus = fleet.frame.gpus
    out = {gpus[row].uuid: found.causes[place].subject for row, place in found.owner.items()}
    for i in ledger.incidents.values():
        group = ledger.incidents.get(i.part_of) if i.part_of and i.is_open else None
        if group is not None and group.is_open and i.gpu_uuid is not None:
            out.setdefault(i.gpu_uuid, group.subject)
    return out


def _fold_groups(
    ledger: Ledger, fleet: Fleet, found: Attribution, times: Times, dt_s: float, held: bool
) -> dict[int, Incident]:
    """The incidents of the tick's causes, by their place in `found.causes`."""
    now_s, standing, out = ledger.now_s, _standing(ledger), {}

    def folded(before: Incident | None, cause: Shared | None) -> Incident | None:
        change = shared.fold(
            before,
            cause,
            fleet.frame.gpus,
            now_s,
            dt_s,
            times,
            cluster=ledger.cluster,
            known=ledger.incidents,
            waits=held and cause is not None and cause.kind is Kind.DEVIANT,
        )
        return None if change is None else ledger.put(before, change)

    standing.pop(Subject(SubjectKind.FLEET, ledger.cluster), None)  # an event of its own
    for place, cause in enumerate(found.causes):
        if cause.subject.kind is SubjectKind.FLEET:
            continue
        after = folded(standing.pop(cause.subject, None), cause)
        if after is not None:
            out[place] = after
    spoken_for = {i.part_of for i in ledger.incidents.values() if i.fires and i.part_of}
    for before in standing.values():
        if before.id in spoken_for and before.fires:
            continue  # an Xid is seen once: what it says stands as long as its GPUs' incidents do
        rows = [fleet.rows[m.gpu_uuid] for m in before.members if m.gpu_uuid in fleet.rows]
        unknown = sum(found.judgement.kinds[row] == domain.UNKNOWN for row in rows)
        if 2 * unknown <= len(rows):  # else nothing is known of it: no timer runs
            folded(before, None)
    return out


def _fold_gpus(
    ledger: Ledger,
    found: Attribution,
    speaks: dict[int, Incident],
    fleet: Fleet,
    times: Times,
    dt_s: float,
    held: bool,
    book: Book | None,
) -> None:
    now_s, judgement = ledger.now_s, found.judgement
    open_on = {
        i.gpu_uuid: i
        for i in ledger.incidents.values()
        if i.is_open and i.subject.kind is SubjectKind.GPU
    }
    for verdict in judgement.verdicts:
        before = open_on.pop(verdict.gpu.uuid, None)
        row = fleet.rows[verdict.gpu.uuid]
        group = speaks.get(found.owner.get(row, -1)) or _stays(before, row, found, times)
        if group is not None and before is None and _only_a_member(verdict):
            continue
        incident = before
        if incident is None:
            work = fleet.frame.workloads[row]
            sighting = Sighting(verdict, work, _spread(work, verdict.gpu.node, fleet))
            incident = opened(sighting, ledger.cluster, now_s, ledger.incidents, book)
        else:
            incident = _with_work(incident, row, fleet)
            if row in judgement.resets:
                incident = was_reset(incident)
        if incident.phase is domain.IncidentPhase.SUSPECTED:
            incident = _as_member(incident, group)
        dt = dt_s if before else 0.0
        waits = held or group is not None
        ledger.put(before, deviates(incident, verdict, now_s, dt, times, waits, book))
    busy = {m.incident_id for m in ledger.migrations.values() if m.phase.is_open}
    for uuid, before in open_on.items():
        row = fleet.rows.get(uuid or "", -1)
        if row < 0:
            continue
        if judgement.kinds[row] != domain.NORMAL:  # unknown: nothing moves, no timer runs
            if row in judgement.resets:
                ledger.put(before, Change(was_reset(before)))
            continue
        change = recovers(
            _with_work(before, row, fleet),
            now_s,
            dt_s,
            times,
            reset=row in judgement.resets,
            busy=before.id in busy,
        )
        ledger.put(before, change)


def _rename(ledger: Ledger, book: Book) -> None:
    """The patterns have changed: what is open goes by the names that hold now."""
    for i in list(ledger.incidents.values()):
        after = named(i, book) if i.is_open else i
        if after != i:
            ledger.put(i, Change(after))


def _stays(
    incident: Incident | None, row: int, found: Attribution, times: Times
) -> Incident | None:
    """The incident that a GPU still belongs to. One that has not been told keeps it from being
    told no longer than twice the time it would take by itself."""
    group = found.stays.get(row)
    if group is None or group.fires or incident is None:
        return group
    return group if incident.held_s < 2.0 * times.deviant_for_s else None


def _as_member(incident: Incident, group: Incident | None) -> Incident:
    """Once its group has been told, what is left of a GPU has to stand by itself from then on.
    Before that its time goes on: a group that wavers must not keep its GPUs from being told."""
    told = group is not None and group.fires and incident.kind is Kind.DEVIANT
    held_s = 0.0 if told else incident.held_s
    return replace(incident, part_of=group.id if group else "", held_s=held_s)


def _only_a_member(verdict: Verdict) -> bool:
    """An event that accuses no GPU by itself: its group's incident tells all there is."""
    return verdict.kind is Kind.FAULT and not groups.acts_itself(verdict)


def _with_work(incident: Incident, row: int, fleet: Fleet) -> Incident:
    """The last work that the GPU itself showed, and where the rest of it ran."""
    work = fleet.frame.workloads[row]
    if work is None or work == incident.workload or not fleet.present(row):
        return incident
    nodes = _spread(work, incident.node, fleet)
    return replace(incident, workload=work, workload_nodes=nodes)


def _spread(work: Workload | None, node: str, fleet: Fleet) -> tuple[str, ...]:
    """Where the work runs, the failing node included. Empty for very large work: a list of a
    thousand names in each of a thousand incidents would be worth less than it costs."""
    running = fleet.nodes_running(work) if work else ()
    return () if len(running) > _SPREAD_KEPT else tuple(sorted({*running, node}))


def _fold_fleet(
    ledger: Ledger,
    fleet: Fleet,
    judgement: Judgement,
    hold: breaker.FleetHold,
    found: Attribution,
    policy: Policy,
    dt_s: float,
) -> Incident | None:
    """The event that the whole fleet shares. Only one that holds everything latches the
    breaker: of jobs that merely began to deviate alike, none acts."""
    now_s, frame = ledger.now_s, fleet.frame
    subject = Subject(SubjectKind.FLEET, policy.cluster)
    event = next((i for s, i in _standing(ledger).items() if s == subject), None)
    cause = next((c for c in found.causes if c.subject.kind is SubjectKind.FLEET), None)
    if hold.reason is not None:
        told = context.fleet_evidence(hold.uuids, fleet, judgement, now_s)
        # a baseline that is not certified has no page, not even for the whole fleet; and a shift
        # whose cause is known is no emergency
        pages = hold.hard or (judgement.certified and not context.is_explained(told))
        cause = Shared(
            subject,
            Kind.FAULT if hold.hard else Kind.DEVIANT,
            Severity.CRITICAL if pages else Severity.WARNING,
            causes.FLEET_WIDE,
            (Evidence("fleet", "", hold.reason.text, at_s=now_s), *told),
            tuple(fleet.rows[uuid] for uuid in hold.uuids if uuid in fleet.rows),
        )
    change = shared.fold(
        event,
        cause,
        frame.gpus,
        now_s,
        dt_s,
        policy.times,
        cluster=policy.cluster,
        known=ledger.incidents,
    )
    if change is None:
        return None
    after = ledger.put(event, change)
    if hold.reason is not None and after.phase is domain.IncidentPhase.CONFIRMED:
        held_before = event is not None and event.phase is after.phase and event.holds
        if not held_before:
            ledger.latch(hold.reason.text)
            after = ledger.put(after, Change(replace(after, holds=True)))
    return after


def _fold_blindness(ledger: Ledger, frame: Frame, policy: Policy, dt_s: float) -> None:
    before = next(
        (
            i
            for i in ledger.incidents.values()
            if i.is_open and i.subject.kind is SubjectKind.FLEET and i.kind is Kind.UNKNOWN
        ),
        None,
    )
    change = shared.fold(
        before,
        _blindness(frame, policy, ledger.now_s),
        frame.gpus,
        ledger.now_s,
        dt_s,
        policy.times,
        cluster=policy.cluster,
        known=ledger.incidents,
        clear_for_s=0.5 * policy.times.tick_s,
    )
    if change is not None:
        ledger.put(before, change)


def _blindness(frame: Frame, policy: Policy, now_s: float) -> Shared | None:
    """Blind or nearly so, on two ticks in a row."""
    coverage = frame.coverage
    percent = breaker.coverage_percent(frame)
    if not coverage.blind and percent >= policy.limits.coverage_percent:
        return None
    reason = breaker.coverage_reason(frame, policy.limits)
    text = reason.text if reason else ""
    never = coverage.gpus_expected == 0 and not coverage.blind
    return Shared(
        Subject(SubjectKind.FLEET, policy.cluster),
        Kind.UNKNOWN,
        Severity.CRITICAL if coverage.blind or never else Severity.WARNING,
        "telemetry missing",
        (Evidence("fleet", "", text, at_s=now_s),),
        confirm_for_s=_EMPTY_FOR_S if never else 0.5 * policy.times.tick_s,
    )


def _wait(ledger: Ledger, fleet: Fleet, times: Times, dt_s: float, blind: bool) -> None:
    for m in list(ledger.migrations.values()):
        if not m.phase.is_open:
            continue
        if m.phase is not MigrationPhase.VERIFYING:
            ledger.turn(migration.waited(m, ledger.now_s, times))
        elif not blind:
            change = migration.verify(m, fleet, ledger.view(), ledger.now_s, dt_s, times)
            ledger.turn(change)


def _mark(ledger: Ledger) -> None:
    """Writes on every open GPU incident what has been done about it."""
    moves = [
        m
        for m in ledger.migrations.values()
        if m.operation is Operation.MOVE and m.phase is MigrationPhase.DONE
    ]
    for i in list(ledger.incidents.values()):
        if not i.is_open or i.subject.kind is not SubjectKind.GPU:
            continue
        held = ledger.quarantine.get(i.node)
        fenced = held is not None and held.fenced
        moved = i.moved or any(_moved_by(m, i) for m in moves)
        if (fenced, moved) != (i.fenced, i.moved):
            ledger.put(i, Change(replace(i, fenced=fenced, moved=moved)))


def _mark_nodes(ledger: Ledger) -> None:
    """A node whose GPUs act for themselves is at rest once the work of all of them has moved."""
    own: dict[str, list[Incident]] = defaultdict(list)
    for i in ledger.incidents.values():
        if i.part_of and i.is_open and i.kind is not Kind.DEVIANT:
            own[i.part_of].append(i)
    for id, members in own.items():
        node = ledger.incidents.get(id)
        if node is None or not node.is_open:
            continue
        fenced, moved = all(i.fenced for i in members), all(i.moved for i in members)
        if (fenced, moved) != (node.fenced, node.moved):
            ledger.put(node, Change(replace(node, fenced=fenced, moved=moved)))


def _moved_by(m: Migration, incident: Incident) -> bool:
    """Whether this move carried the incident's work: its own, or one that it joined."""
    joined = incident.node in m.exclude_nodes and m.workload == incident.workload
    return m.incident_id == incident.id or (joined and m.since_s >= incident.opened_at_s)


def _call(ledger: Ledger, facts: Facts) -> None:
    """What may leave now: plans that every guard agrees to, and questions that are due."""
    stopped = guards.why_not_unfence(ledger.view(), facts)
    for m in list(ledger.migrations.values()):
        if migration.may_leave(m):
            if m.operation is not Operation.UNFENCE or stopped is None:
                ledger.ask(ActionKind.POST, m.operation_id)
        elif migration.question_due(m, facts.now_s, facts.policy.times):
            ledger.migrations[m.operation_id] = replace(m, polled_at_s=facts.now_s)
            ledger.ask(ActionKind.QUERY, m.operation_id)
