"""How answers look on a terminal: tables for people. `--json` never passes through here."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

STYLES: Final = {
    "critical": "bold red",
    "fault": "bold red",
    "lost": "bold red",
    "stuck": "bold red",
    "failed": "bold red",
    "warning": "yellow",
    "deviant": "yellow",
    "confirmed": "yellow",
    "unknown": "magenta",
    "running": "cyan",
    "sent": "cyan",
    "verifying": "cyan",
    "normal": "green",
    "done": "green",
    "resolved": "green",
    "rejected": "dim",
}

_LITTLE_MIN: Final = 60.0
_REGIMES: Final = 6  # of one GPU model; the rest in --json and --html


def status(answer: dict[str, Any]) -> RenderableType:
    ready = Text("ready", "green") if answer["ready"] else Text("NOT READY", "bold red")
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    tick, coverage = answer["tick"], answer["coverage"]
    table.add_row("daemon", Text.assemble(f"{answer['version']}, ", ready))
    for reason in answer["reasons"]:
        table.add_row("", Text(reason, "bold red"))
    table.add_row("cluster", answer["cluster"])
    table.add_row("mode", _mode(answer))
    table.add_row("last tick", f"{clock(answer['at'])}, {1000 * tick['duration_s']:.0f} ms")
    table.add_row(
        "GPUs",
        Text.assemble(
            f"{coverage['gpus_reporting']} of {coverage['gpus_expected']} report: ",
            _counts(answer["gpus"]),
        ),
    )
    table.add_row("incidents", _counts(answer["incidents"]))
    table.add_row("migrations", _counts(answer["migrations"]))
    if answer["quarantine"]:
        table.add_row("quarantine", ", ".join(q["node"] for q in answer["quarantine"]))
    bundle = answer["bundle"]
    learnt = f"{bundle['id']}, learnt up to {clock(bundle['learnt_to'])}" if bundle else None
    table.add_row("baseline", learnt or Text("none: hard evidence alone counts", "yellow"))
    if bundle and bundle["refused"]:
        left = bundle["refused"]
        why = f"{left['id']}, learnt up to {clock(left['learnt_to'])}: {'; '.join(left['reasons'])}"
        table.add_row("refused", Text(why, "yellow"))
    for text in _budget(answer["budget"]) if answer["budget"] else ():
        table.add_row("budget", text)
    for one in answer["alertmanagers"]:
        state = Text("up", "green") if one["up"] else Text(f"down: {one['text']}", "bold red")
        table.add_row("alertmanager", Text.assemble(f"{one['url']} ", state))
    return table


def _budget(budget: dict[str, Any]) -> list[Text]:
    """Pages, tickets, and why soft evidence may not page yet."""
    lines = []
    for word in ("pages", "tickets"):
        one = budget[word]
        text = f"{one['spent']} of {one['per_week']:g} {word} this week"
        if one["score"] is None:
            lines.append(Text.assemble(f"{text}: ", (f"none yet, {budget['why']}", "yellow")))
            continue
        raised = one["raised"] > one["calibrated"]
        why = "raised by the last two weeks" if raised else "from normal time"
        lines.append(Text(f"{text}; the next needs a score of {one['score']:.2f}, {why}"))
    if budget["written_down"]:
        count = budget["written_down"]
        noun = "deviation was" if count == 1 else "deviations were"
        lines.append(Text(f"{count} {noun} written down only: sentinel incidents", "dim"))
    return lines


def _mode(answer: dict[str, Any]) -> Text:
    text = Text(answer["mode"])
    for name, word in (("pause", "paused"), ("breaker", "breaker latched")):
        switch = answer[name]
        if switch["on"]:
            text.append(f", {word} since {clock(switch['since'])}: {switch['reason']}", "bold red")
    return text


def gpus(answer: dict[str, Any]) -> RenderableType:
    table = _table("node", "gpu", "uuid", "model", "kind", "score", "pattern", "work")
    for g in answer["gpus"]:
        score = "" if g["score"] is None else f"{g['score']:.2f}"
        index = "" if g["index"] is None else str(g["index"])
        kind = _word(g["kind"])
        table.add_row(
            g["node"], index, g["uuid"], g["model"], kind, score, g["pattern"] or "", _work(g)
        )
    return _with_rest(table, answer["total"], len(answer["gpus"]), "GPUs")


def incidents(answer: dict[str, Any]) -> RenderableType:
    table = _table(
        "id",
        "phase",
        "severity",
        "subject",
        "node",
        "pattern",
        "distance",
        "score",
        "opened",
        "why",
    )
    for i in answer["incidents"]:
        subject = _subject(i)
        why = i["evidence"][0]["text"] if i["evidence"] else i["hold_reason"]
        table.add_row(
            i["id"],
            _word(i["phase"]),
            _word(i["severity"]),
            subject,
            i["node"],
            i["pattern"],
            "" if i["distance"] is None else f"{i['distance']:.2f}",
            "" if i["score"] is None else f"{i['score']:.2f}",
            clock(i["opened_at"]),
            why,
        )
    return _with_rest(table, answer["total"], len(answer["incidents"]), "incidents")


def migrations(answer: dict[str, Any]) -> RenderableType:
    table = _table("operation", "what", "phase", "from", "to", "work", "since", "reason")
    for m in answer["migrations"]:
        places = m["placement"] or m["backups"]
        table.add_row(
            m["operation_id"],
            m["operation"],
            _word(m["phase"]),
            m["node"],
            ", ".join(p["node"] for p in places),
            _work(m),
            clock(m["since"]),
            m["reason"],
        )
    return _with_rest(table, answer["total"], len(answer["migrations"]), "migrations")


def patterns(answer: dict[str, Any]) -> RenderableType:
    table = _table("id", "name", "state", "incidents", "ended", "open for", "what it means")
    for p in answer["patterns"]:
        table.add_row(
            p["id"],
            p["name"],
            _word(p["state"]),
            str(p["incidents"] or ""),
            _endings(p),
            _lasted(p["median_s"]),
            p["means"],
        )
    return _with_rest(table, answer["total"], len(answer["patterns"]), "patterns")


def pattern(answer: dict[str, Any]) -> RenderableType:
    p = answer["pattern"]
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    said = f" by {p['said_by']}, {clock(p['said_at'])}" if p["said_by"] else ""
    table.add_row("pattern", f"{p['name']} ({p['id']}, {p['origin']})")
    table.add_row("state", Text.assemble(_word(p["state"]), said))
    table.add_row("means", p["means"])
    table.add_row("first", p["first"])
    for shape in p["shapes"]:
        table.add_row("looks like", ", ".join(f"{name} {s:+.2g}" for name, s in shape.items()))
    past = f"{p['incidents']}: {_endings(p)}" if p["incidents"] else "none yet"
    table.add_row("ended", past)
    if p["median_s"] is not None:
        table.add_row("open for", f"{_lasted(p['median_s'])} in the median")
    rows = answer["incidents"]
    shown = {"total": len(rows), "incidents": rows}
    return Group(table, incidents(shown)) if rows else table


def relearnt(found: dict[str, Any]) -> RenderableType:
    """What came of learning fault patterns."""
    head = f"{found['incidents']} incidents, {found['novel']} of them like nothing known"
    lines = [Text(head, "dim")]
    lines += [
        Text(f"learnt pattern {p['id']}: {p['name']}, {p['incidents']} incidents")
        for p in found["patterns"]
    ]
    return Group(*lines)


def _endings(p: dict[str, Any]) -> str:
    ways = sorted(p["endings"].items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{n} {how}" for how, n in ways)


def _lasted(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds / 3600:.1f} h" if seconds >= 7200 else f"{seconds / 60:.0f} min"


def learnt(told: dict[str, Any]) -> RenderableType:
    """The report of `sentinel learn`: quality and regimes of each GPU model, and the budget."""
    quality = _table(
        "model", "GPUs", "rows", "clusters", "noise", "silhouette", "C-H", "D-B", "edge", "stable"
    )
    regimes = _table("model", "regime", "time", "GPU use", "power", "temperature", "SM clock")
    lacks = []
    for c in told["cohorts"]:
        stable = c.get("stability") or {}
        quality.add_row(
            c["model"] or "(no model label)",
            str(c["gpus"]),
            str(c["rows"]),
            str(c["clusters"]),
            f"{c['noise_share']:.1%}",
            _number(c.get("silhouette")),
            _number(c.get("calinski_harabasz")),
            _number(c.get("davies_bouldin")),
            _number(c.get("radius")),
            _number(stable.get("stay")),
        )
        for r in c.get("regimes", ())[:_REGIMES]:
            regimes.add_row(
                c["model"],
                r["name"],
                f"{r['share']:.1%}",
                *(_typical(r, name) for name in ("gpu_util", "power", "gpu_temp", "sm_clock")),
            )
        more = len(c.get("regimes", ())) - _REGIMES
        if more > 0:
            regimes.add_row(c["model"], Text(f"and {more} smaller", "dim"), *[""] * 5)
        if c.get("lacks"):
            lacks.append(f"{c['model']} has no {', '.join(c['lacks'])}: nothing is judged by them")
    left = [Text(f"left out: {text}", "yellow") for text in told["skipped"]]
    lines = [Text(text, "dim") for text in lacks]
    return Group(quality, Text(), regimes, *lines, *left, *_calibration(told))


def _typical(regime: dict[str, Any], name: str) -> str:
    """Low to high of one value in its unit."""
    one = regime["typical"].get(name)
    if one is None:
        return ""
    if name == "gpu_util":
        return f"{one['low']:.0%} to {one['high']:.0%}"
    return f"{one['low']:.0f} to {one['high']:.0f} {one['unit']}"


def _calibration(told: dict[str, Any]) -> list[Text]:
    known, budget = told["calibration"], told["budget"]
    scores = (
        f"a ticket from a score of {known['ticket_score']:.2f} "
        f"({budget['tickets_per_week']:g} a week), a page from {known['page_score']:.2f} "
        f"({budget['pages_per_week']:g} a week)"
    )
    rests = f"{known['gpu_days']:.3g} GPU-days of held-out normal time"
    lines = [Text(), Text(f"calibration: {scores}; from {rests}")]
    if not known["certified"]:
        lines.append(Text(f"not certified: {known['why']}; soft evidence makes tickets", "yellow"))
    if told["refused"]:
        lines.append(Text("NOT ADOPTED, the last bundle stays in use:", "bold red"))
        lines += [Text(f"  {reason}", "red") for reason in told["refused"]]
        lines.append(Text("look at what was learnt from, or adopt it with --force", "dim"))
    return lines


def bundle(made: dict[str, Any], grid_s: float) -> RenderableType:
    """What was learnt from: a row is one GPU for `grid_s`."""
    rows, used = made["rows"], sum(c["gpus"] for c in made["cohorts"])
    of = f"{used} of {made['gpus']} GPUs" if used < made["gpus"] else f"{used} GPUs"
    minutes = rows * grid_s / 60.0 / max(used, 1)
    what = f"bundle {made['bundle_id']} from {of}, {rows} rows of {grid_s:g} s: {made['path']}"
    lines = [Text(what)]
    if minutes < _LITTLE_MIN:
        hint = f"that is {minutes:.0f} min of a GPU: learn again when there is a day to learn from"
        lines.append(Text(hint, "yellow"))
    rest = "a running daemon takes it up within ten minutes"
    if made.get("refused"):
        rest = "it is kept beside the others for you to look at"
    return Group(*lines, Text(rest, "dim"))


def backtest(report: dict[str, Any]) -> RenderableType:
    table = _table("confirmed", "subject", "host", "alert", "severity", "pattern", "would migrate")
    for i in report["incidents"]:
        subject = _subject(i)
        would = Text("yes", "bold") if i["would_migrate"] else Text(_not_moved(i), "dim")
        confirmed, name = clock(i["confirmed_at"]), i["alertname"] or ""
        severity, pattern = _word(i["severity"]), i["pattern"]
        table.add_row(confirmed, subject, i["host"] or "", name, severity, pattern, would)
    days, blind = report["coverage"]["gpu_days"], report["coverage"]["blind_gpu_days"]
    count = len(report["incidents"])
    rate = f", {count / days:.4g} per GPU-day" if days else ""
    noun = "incident" if count == 1 else "incidents"
    lines = [Text(f"{count} {noun} in {days:.3g} GPU-days, {blind:.3g} of them blind{rate}")]
    lines += [Text(f"assumed: {text}", "dim") for text in report.get("assumes", ())]
    if not days:
        hint = "no GPU reported in this time: check prometheus.selector and --start"
        lines.append(Text(hint, "yellow"))
    if report.get("budget"):
        lines += _spent(report["budget"])
    return Group(table, *lines) if count else Group(*lines)


def _spent(budget: dict[str, Any]) -> list[Text]:
    """What the weekly budget let through and held back."""
    lines = []
    for word in ("pages", "tickets"):
        one = budget[word]
        text = f"{one['told']} {word} by soft evidence, {one['allowed']:.3g} are in the budget"
        if one["score"] is None:
            lines.append(Text(f"{text}: none may pass, {budget['why']}", "yellow"))
            continue
        if one["highest"] > one["calibrated"]:
            text += f"; the score needed rose from {one['calibrated']:.2f} to {one['highest']:.2f}"
        lines.append(Text(text))
    count = len(budget["held_back"])
    if count:
        noun = "incident" if count == 1 else "incidents"
        text = f"{count} {noun} told less loudly than earned, such as: "
        lines.append(Text(text + budget["held_back"][0]["reason"], "dim"))
    return lines


def _subject(incident: dict[str, Any]) -> str:
    """Whom an incident is about, and for how many GPUs it speaks."""
    kind, name = incident["subject"]["kind"], incident["subject"]["id"]
    members = len(incident.get("members") or ())
    if incident.get("part_of"):
        return f"{kind} {name} (told by {incident['part_of']})"
    return f"{kind} {name} ({members} GPUs)" if members else f"{kind} {name}"


def _not_moved(incident: dict[str, Any]) -> str:
    """`no`, and what held the first order back."""
    held = (d["blocked_by"] for d in incident["decisions"] if not d["allowed"])
    why = next((w for w in held if w), "")
    return f"no: {why}" if why else "no"


def clock(at: str | None) -> str:
    """An RFC 3339 time as people here read it."""
    if not at:
        return "never"
    local = datetime.fromisoformat(at.replace("Z", "+00:00")).astimezone()
    today = datetime.now(local.tzinfo).date() == local.date()
    return local.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M")


def show(what: RenderableType) -> None:
    """On stdout; at its full width where that is no terminal, so that grep sees whole lines."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=400)
    console.print(what)


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in names:
        whole = name in ("id", "operation", "uuid", "phase", "severity", "kind")
        table.add_column(name, overflow="fold", no_wrap=whole)
    return table


def _with_rest(table: Table, total: int, shown: int, what: str) -> RenderableType:
    if not total:
        return Text(f"no {what}", "green" if what == "incidents" else "dim")
    if shown < total:
        return Group(table, Text(f"and {total - shown} more {what}", "dim"))
    return table


def _counts(counts: dict[str, int]) -> Text:
    parts = [Text(f"{n} {word}", STYLES.get(word, "")) for word, n in counts.items() if n]
    return Text(", ").join(parts) if parts else Text("none", "dim")


def _word(word: str) -> Text:
    return Text(word, STYLES.get(word, ""))


def _work(row: dict[str, Any]) -> str:
    work = row["workload"]
    return f"{work['kind']} {work['id']}" if work else ""


def _number(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else "" if value is None else str(value)
