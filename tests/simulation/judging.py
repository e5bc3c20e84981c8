"""Which incident is about which event: the definition that all figures of the lab rest on.

- An *event* is a hardware fault that was given to the fleet. An *alert* is a confirmed incident
  that alerts somebody (severity warning or critical); what is only written down is none.
- An alert is *true* when it was confirmed between the event's begin and `GRACE_S` after its end,
  and is about the GPU that has the fault; for a fault of a node or rack, about one of its GPUs,
  its node or its rack, and for one of a rack (a quarter of these fleets) about the fleet; for a
  fault whose culprit the telemetry may not show (`JOINT`), about the GPU or its job. Anything
  else is *false*: also an alert about a mate of the faulty GPU.
- A false alert is *near* the surprise in whose time (and `GRACE_S` after) and scope it falls.
- One alert about the whole fleet, of severity warning, during a surprise that does befall the
  whole fleet, is *told*: neither true nor false. So is a warning about a host that is silent,
  and one about the job of a GPU that has a fault at that time.
- An event is *found* when it has a true alert; its delay is from its begin to the first one.
- A fault of `faults.NEVER_MOVES`, an application's matter, is found too when it is written down.
- An event on a GPU about which a false alert already stands is *hidden*, and counts neither as
  found nor as missed: one incident is all that a GPU has at a time.
- Precision is found / (found + false): further alerts about a found event count for nothing.
- A *wrong move* is a fence or move that a surprise, an application error, a fault of
  `faults.NEVER_MOVES`, or nothing at all, would have led to.
"""

from collections import Counter
from datetime import datetime

import numpy as np

from sentinel.lab import faults

GRACE_S = 900.0
JOINT = frozenset({"slow-10", "slow-hidden", "clock", "hang", "nvlink-errors"})


def seconds(text):
    return datetime.fromisoformat(text).timestamp()


def judge(report, truths):
    """Plain data of one run: `events` and `alerts`, each with what the other side says.

    `report` is a backtest's; `truths` are the director's, as dictionaries.
    """
    events = [{**t, "found": None, "delay_s": None, "pattern": None, "moves": False, "severity":
               None, "on": None} for t in truths]  # fmt: skip
    alerts = [_alert(row, events) for row in report["incidents"]]
    for event in events:
        event["hidden"] = any(_stands(alert, event) for alert in alerts)
    for alert in sorted(alerts, key=lambda a: a["at_s"]):
        if alert["verdict"] != "true":
            continue
        _find(events[alert["event"]], alert)
    quiet = [_alert(row, events) for row in report["written_down"]]
    for note in sorted(quiet, key=lambda a: a["at_s"]):
        if note["verdict"] == "true" and events[note["event"]]["kind"] in faults.NEVER_MOVES:
            _find(events[note["event"]], note)
    wrong = [a for a in alerts + quiet if a["moves"] and not _may_move(a, events)]
    return {
        "events": events,
        "alerts": alerts,
        "wrong_moves": wrong,
        "gpu_days": report["coverage"]["gpu_days"],
        "blind_gpu_days": report["coverage"]["blind_gpu_days"],
    }


def _find(event, alert):
    event["moves"] |= alert["moves"]
    if event["found"] is None:
        event["found"], event["hidden"] = alert["id"], False
        event["delay_s"] = alert["at_s"] - event["at_s"]
        event["pattern"], event["severity"] = alert["pattern"], alert["severity"]
        event["on"] = alert["subject"]


def _stands(alert, event):
    """Whether a false alert about the GPU of the event was open when the event began."""
    return event["uuids"] == [alert["uuid"]] and alert["at_s"] < event["at_s"] < (
        alert["until_s"] or np.inf
    )


def _may_move(alert, events):
    return alert["verdict"] == "true" and (events[alert["event"]]["kind"] not in faults.NEVER_MOVES)


def _alert(row, events):
    at_s = seconds(row["confirmed_at"])
    alert = {
        "id": row["id"],
        "at_s": at_s,
        "until_s": row["resolved_at"] and seconds(row["resolved_at"]),
        "subject": row["subject"]["kind"],
        "subject_id": row["subject"]["id"],
        "uuid": row["gpu_uuid"],
        "node": row["host"],
        "severity": row["severity"],
        "kind": row["kind"],
        "pattern": row["pattern"],
        "score": row["score"],
        "moves": bool(row["would_migrate"]),
        "why": [e["text"] for e in row["evidence"]][:4],
        "verdict": "false",
        "event": None,
        "near": "nothing",
    }
    within = [
        (place, e) for place, e in enumerate(events)
        if e["at_s"] <= at_s <= e["end_s"] + GRACE_S
    ]  # fmt: skip
    for place, event in within:
        if event["kind"] in faults.HARDWARE and _about(alert, event):
            return {**alert, "verdict": "true", "event": place, "near": event["kind"]}
    for _, event in within:
        if event["kind"] in faults.HARDWARE and _beside(alert, event):
            alert["near"] = f"beside {event['kind']}"
    wide = [e for _, e in within if e["kind"] in faults.FLEET]
    narrow = [
        e
        for _, e in within
        if e["kind"] in faults.KINDS.keys() - faults.HARDWARE.keys() - faults.FLEET
        and (_about(alert, e) or _beside(alert, e))
    ]
    for event in narrow + wide:  # the last word is with what befalls everybody
        if alert["near"] == "nothing" or (event in wide and "beside" not in alert["near"]):
            alert["near"] = event["kind"]
        if _told(alert, event):
            alert["verdict"] = "told"
    if any(_slowed(alert, event) for _, event in within):
        alert["verdict"] = "told"
    return alert


def _slowed(alert, event):
    """Whether it says, truly, that the job of a faulty GPU is slower: the same cause again."""
    return (
        alert["subject"] == "job"
        and alert["severity"] == "warning"
        and event["kind"] in faults.HARDWARE
        and event["job"] is not None
        and event["job"] in alert["subject_id"]
    )


def _told(alert, event):
    if alert["severity"] == "critical" or alert["moves"]:
        return False
    if alert["subject"] == "fleet":
        return event["kind"] in faults.FLEET
    return alert["subject"] == "host" and event["kind"] in ("lost-host", "maintenance")


def _about(alert, event):
    """Whether the subject of the alert is what the event befell."""
    kind, subject = event["kind"], alert["subject"]
    if subject == "gpu":
        return alert["uuid"] in event["uuids"]
    if subject in ("host", "node"):
        return kind in (faults.NODE | faults.RACK | faults.FLEET) and (
            alert["subject_id"] in event["nodes"]
        )
    if subject == "rack":
        return kind in (faults.RACK | faults.FLEET) and (
            alert["subject_id"] == event["rack"] or alert["node"] in event["nodes"]
        )
    if subject == "job":
        return kind in JOINT and event["job"] is not None and event["job"] in alert["subject_id"]
    return subject == "fleet" and kind in faults.FLEET | faults.RACK


def _beside(alert, event):
    """Whether it is about a neighbour or a mate of what the event befell."""
    if alert["subject"] == "job":
        return event["job"] is not None and event["job"] in alert["subject_id"]
    return alert["uuid"] in event["mates"] or alert["node"] in event["nodes"]


def figures(runs):
    """The figures of several judged runs, and rows by kind."""
    events = [
        e for run in runs for e in run["events"] if e["kind"] in faults.HARDWARE and not e["hidden"]
    ]
    alerts = [a for run in runs for a in run["alerts"]]
    false = [a for a in alerts if a["verdict"] == "false"]
    hard = [e for e in events if e["kind"] in faults.HARD]
    soft = [e for e in events if e["kind"] in faults.SOFT]
    found = [e for e in events if e["found"]]
    days = sum(run["gpu_days"] for run in runs)
    near = Counter(a["near"].removeprefix("beside ") for a in false)
    rows = []
    for kind in faults.KINDS:
        of_kind = [e for run in runs for e in run["events"] if e["kind"] == kind]
        if not of_kind:
            continue
        told = Counter(e["pattern"] for e in of_kind if e["found"])
        rows.append(
            {
                "kind": kind,
                "class": _class(kind),
                "events": len(of_kind),
                "hidden": sum(e["hidden"] for e in of_kind),
                "found": sum(e["found"] is not None for e in of_kind),
                "delay_s": _median([e["delay_s"] for e in of_kind if e["found"]]),
                "moves": sum(e["moves"] for e in of_kind),
                "false": near.get(kind, 0),
                "patterns": dict(told.most_common(3)),
                "on": dict(Counter(e["on"] for e in of_kind if e["found"])),
            }
        )
    return {
        "events": len(events),
        "hidden": sum(row["hidden"] for row in rows if row["kind"] in faults.HARDWARE),
        "recall_hard": _share(hard),
        "recall_soft": _share(soft),
        "precision": len(found) / max(len(found) + len(false), 1),
        "false_alerts": len(false),
        "false_pages": sum(a["severity"] == "critical" for a in false),
        "told": sum(a["verdict"] == "told" for a in alerts),
        "false_near_nothing": near.get("nothing", 0),
        "wrong_moves": sum(len(run["wrong_moves"]) for run in runs),
        "delay_hard_s": _median([e["delay_s"] for e in hard if e["found"]]),
        "delay_soft_s": _median([e["delay_s"] for e in soft if e["found"]]),
        "gpu_days": days,
        "false_alerts_per_gpu_day": len(false) / days if days else None,
        "rows": rows,
    }


def _class(kind):
    if kind in faults.HARDWARE:
        return "hard" if kind in faults.HARD else "soft"
    return "application" if kind in faults.APPLICATION else "benign"


def _share(events):
    return sum(e["found"] is not None for e in events) / len(events) if events else None


def _median(values):
    return float(np.median(values)) if values else None
