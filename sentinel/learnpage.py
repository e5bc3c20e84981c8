"""The report of `sentinel learn` as one self-contained page: words, tables, and plots as SVG.

Reads nothing but the report's plain values, and asks the network for nothing: the page can be
mailed, kept beside a bundle, and opened years later. Light and dark follow the reader's system.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any, Final

_COLOURS: Final = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --line: #d1d9e0;
  --paper: #ffffff; --card: #f6f8fa; --mark: #0b62c4; --band: #0b62c426; --bad: #b3261e;
  --warn: #8a5300; --good: #18703a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9aa6b2; --line: #3a434d;
  --paper: #0f1419; --card: #182028; --mark: #6cb0ff; --band: #6cb0ff30; --bad: #ff8f85;
  --warn: #f0b35a; --good: #6fd08c; } }
"""
_TEXT: Final = """
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 62rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1.5rem 0 .25rem; } p { margin: .4rem 0; max-width: 46rem; }
.soft { color: var(--soft); } .bad { color: var(--bad); } .warn { color: var(--warn); }
.good { color: var(--good); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); gap: .75rem;
  margin: 1rem 0; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 6px;
  padding: .6rem .8rem; }
.card b { display: block; font-size: 1.35rem; } .card span { color: var(--soft);
  font-size: .85rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem;
  font-variant-numeric: tabular-nums; } th, td { text-align: right; padding: .25rem .7rem;
  border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; }
th:first-child, td:first-child, .words td:last-child, .words th:last-child { text-align: left; }
svg { display: block; width: 100%; height: auto; max-width: 46rem; margin: .75rem 0; }
"""
_PLOTS: Final = """
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; paint-order: stroke;
  stroke: var(--paper); stroke-width: 3px; stroke-linejoin: round; }
svg .soft { fill: var(--soft); } svg .grid { stroke: var(--line); stroke-width: 1; }
svg .line { fill: none; stroke: var(--mark); stroke-width: 2; } svg .band { fill: var(--band); }
svg .limit { stroke: var(--warn); stroke-width: 1.5; stroke-dasharray: 5 4; }
svg .limit-text { fill: var(--warn); } svg .dot { fill: var(--mark); fill-opacity: .55; }
svg .span { stroke: var(--mark); stroke-width: 1.5; } svg .bar { fill: var(--mark); }
svg .empty { fill: var(--line); }
"""
_W, _H = 720, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 16, 48
_LABELS: Final = {
    "gpu_util": "GPU use",
    "mem_copy_util": "memory use",
    "nvlink_traffic": "NVLink traffic",
    "pcie_traffic": "PCIe traffic",
    "temp_excess": "GPU temperature",
    "mem_temp_excess": "memory temperature",
    "sm_clock": "SM clock",
    "ecc_sbe": "corrected ECC errors",
    "pcie_replay": "PCIe replays",
    "sm_active": "SM activity",
    "gr_active": "engine activity",
    "dram_active": "DRAM activity",
    "tensor_active": "tensor activity",
}
_REGIMES: Final = 12
_LABELLED: Final = 5
_LOG_LOW: Final = -3.0


def page(told: dict[str, Any]) -> str:
    """The whole page. `told` is what `sentinel learn --json` prints."""
    parts = [_head(told), _refusal(told), _cards(told), _calibration(told)]
    parts += [_cohort(c, (told.get("comparison") or {})) for c in told["cohorts"]]
    parts += [_comparison(told.get("comparison")), _skipped(told["skipped"])]
    title = f"Baseline {escape(told['bundle_id'])}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_COLOURS}{_TEXT}{_PLOTS}</style></head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body></html>\n"
    )


def pictures(told: dict[str, Any]) -> dict[str, str]:
    """The plots as SVG files of their own: `budget`, and `states` of the model with most GPUs."""
    largest = max(told["cohorts"], key=lambda c: c["gpus"])
    drawn = {"states": _regime_plot(largest.get("regimes", []))}
    if rows := _drawn(told["calibration"]["table"]):
        drawn["budget"] = _rate_plot(rows, told["budget"], told["calibration"])
    style = _COLOURS.replace(":root", "svg") + _PLOTS.replace("svg ", "")
    head = f'<style>{style}</style><rect width="100%" height="100%" fill="var(--paper)"/>'
    return {
        name: svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(
            "</title>", f"</title>{head}", 1
        )
        for name, svg in drawn.items()
        if svg.startswith("<svg")
    }


def _head(told: dict[str, Any]) -> str:
    return (
        f"<h1>What normal looks like: {escape(told['bundle_id'])}</h1>"
        f'<p class="soft">Learnt by GPU Sentinel from {escape(told["learnt_from"])} to '
        f"{escape(told['learnt_to'])} (UTC).</p>"
    )


def _refusal(told: dict[str, Any]) -> str:
    if not told["refused"]:
        return ""
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in told["refused"])
    return (
        '<p class="bad"><b>Not adopted.</b> It compares badly with the bundle in use, which '
        f"stays:</p><ul>{reasons}</ul><p>Look at what it was learnt from; "
        "<code>sentinel learn --force</code> adopts it all the same.</p>"
    )


def _cards(told: dict[str, Any]) -> str:
    known = told["calibration"]
    state = "yes" if known["certified"] else "no: soft evidence makes tickets only"
    cards = (
        (f"{told['gpus']:,}", "GPUs seen"),
        (f"{told['rows']:,}", "moments of them kept"),
        (_short(known["gpu_days"]), "GPU-days of normal time judged"),
        (f"{known['ticket_score']:.2f}", "score of a ticket (1 = edge of normal)"),
        (f"{known['page_score']:.2f}" if known["certified"] else "none", "score of a page"),
        ("certified" if known["certified"] else "uncertified", f"may page: {state}"),
    )
    boxes = (
        f'<div class="card"><b>{escape(b)}</b><span>{escape(t)}</span></div>' for b, t in cards
    )
    return f'<div class="cards">{"".join(boxes)}</div>'


# ---- calibration --------------------------------------------------------------------


def _calibration(told: dict[str, Any]) -> str:
    known, budget, rows = told["calibration"], told["budget"], told["calibration"]["table"]
    text = (
        "<h2>How often normal time would alert</h2><p>One half of the time was judged by a "
        "baseline of the other half. Deviations of one GPU, host or job at about the same time "
        "count as one incident. The line says how many incidents of at least a score a week of "
        "normal time brings to the whole cluster; the band is its 95 % interval. A ticket or a "
        "page needs the score at which the line has fallen below its budget, and never less "
        "than 1 or <code>detection.page_score</code>.</p>"
    )
    if not known["certified"]:
        text += f'<p class="warn">Not certified: {escape(known["why"])}.</p>'
    if not rows:
        return text + '<p class="soft">Too few deviations to draw.</p>'
    shown = _drawn(rows)
    table = _table(
        ("score", "a week, expected", "95 % interval", "seen in the window"),
        (
            (
                f"{r['score']:.2f}",
                _short(r["per_week"]),
                f"{_short(r['low'])} to {_short(r['high'])}",
                str(r["seen"]),
            )
            for r in shown
        ),
    )
    plot = _rate_plot(shown, budget, known)
    return f"{text}{plot}<details><summary>As a table</summary>{table}</details>"


def _drawn(rows: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """The rows whose rate is worth a look."""
    return [r for r in rows if r["per_week"] >= 10**_LOG_LOW] or rows[:2]


def _rate_plot(
    rows: Sequence[dict[str, Any]], budget: dict[str, Any], known: dict[str, Any]
) -> str:
    limits = (("tickets", budget["tickets_per_week"]), ("pages", budget["pages_per_week"]))
    tops = [math.log10(max(r["per_week"], 1e-9)) for r in rows]
    high = math.ceil(max([*tops, *(math.log10(v) for _, v in limits)]) + 0.2)
    low = max(_LOG_LOW, math.floor(min([*tops, *(math.log10(v) for _, v in limits)])))
    x = _scale(rows[0]["score"], max(rows[-1]["score"], 1.5), _LEFT, _W - _RIGHT)
    y = _scale(low, high, _H - _BOTTOM, _TOP)

    def at(value: float) -> float:
        return y(min(max(math.log10(max(value, 1e-12)), low), high))

    upper = [(x(r["score"]), at(r["high"])) for r in rows]
    lower = [(x(r["score"]), at(r["low"])) for r in rows]
    marks = [f'<polygon class="band" points="{_points([*upper, *reversed(lower)])}"/>']
    line = [(x(r["score"]), at(r["per_week"])) for r in rows]
    marks.append(f'<polyline class="line" points="{_points(line)}"/>')
    for word, value in limits:
        height = at(value)
        marks.append(
            f'<line class="limit" x1="{_LEFT}" x2="{_W - _RIGHT}" y1="{height:.1f}" '
            f'y2="{height:.1f}"/><text class="limit-text" x="{_W - _RIGHT}" '
            f'y="{height - 5:.1f}" text-anchor="end">budget: {value:g} {word} a week</text>'
        )
    ends = rows[0]["score"], max(rows[-1]["score"], 1.5)
    for word, score in (("ticket", known["ticket_score"]), ("page", known["page_score"])):
        if ends[0] <= score <= ends[1]:
            marks.append(
                f'<line class="limit" x1="{x(score):.1f}" x2="{x(score):.1f}" y1="{_TOP}" '
                f'y2="{_H - _BOTTOM}"/><text class="limit-text" x="{x(score) + 5:.1f}" '
                f'y="{_H - _BOTTOM - 8}">a {word}: {score:.2f}</text>'
            )
    powers = [(y(p), _power(p)) for p in range(int(low), int(high) + 1)]
    scores = [(x(v), f"{v:g}") for v in _ticks(*ends)]
    frame = _axes(scores, powers, "score that lasted (1 = edge of normal)", "incidents a week")
    return _svg("Expected incidents a week of normal time, by score", frame + "".join(marks))


def _power(exponent: int) -> str:
    return f"{10**exponent:g}"


# ---- cohorts ------------------------------------------------------------------------


def _cohort(c: dict[str, Any], comparison: dict[str, Any]) -> str:
    stable = c.get("stability")
    quality = [
        ("clusters", str(c["clusters"]), "states of normal operation found"),
        ("noise", f"{c['noise_share']:.2%}", "of the time is in none of them"),
        ("silhouette", _maybe(c.get("silhouette")), "1: well apart, 0: touching"),
        (
            "Calinski-Harabasz",
            _maybe(c.get("calinski_harabasz")),
            "higher: tighter and further apart",
        ),
        ("Davies-Bouldin", _maybe(c.get("davies_bouldin")), "lower: tighter and further apart"),
        ("edge of normal", _maybe(c.get("radius")), "in units of the metrics' own noise"),
    ]
    if stable:
        quality += [
            (
                "stays",
                f"{stable['stay']:.1%}",
                "of the time, in the matching cluster of the last bundle",
            ),
            (
                "adjusted Rand index",
                _maybe(stable["rand"]),
                "1: the same clusters as in the last bundle",
            ),
        ]
    name = escape(c["model"] or "(no model label)")
    regimes, lacks = c.get("regimes", []), ""
    if c.get("lacks"):
        names = ", ".join(map(_words, c["lacks"]))
        lacks = f"<p class='warn'>Without data: {names}. Nothing is judged by them.</p>"
    return (
        f"<h2>{name}</h2><p class='soft'>{c['gpus']} GPUs, {c['rows']:,} moments.</p>"
        + _table(("measure", "value", "meaning"), quality, "words")
        + "<h3>States of normal operation</h3>"
        + _regime_plot(regimes)
        + _regime_table(regimes)
        + "<h3>What its metrics cover</h3>"
        + _coverage_plot(c.get("coverage", {}))
        + lacks
    )


def _regime_table(regimes: Sequence[dict[str, Any]]) -> str:
    names = (
        "gpu_util",
        "tensor_active",
        "dram_active",
        "power",
        "gpu_temp",
        "mem_temp",
        "sm_clock",
    )
    head = ("state", "time", "GPUs", "GPU use", "tensor", "DRAM", "power", "GPU temp.",
            "memory temp.", "SM clock")  # fmt: skip

    def cell(regime: dict[str, Any], name: str) -> str:
        one = regime["typical"].get(name)
        if one is None:
            return "-"
        if not one["unit"]:
            return f"{100 * one['low']:.0f} to {100 * one['high']:.0f} %"
        return f"{one['low']:.0f} to {one['high']:.0f} {one['unit']}"

    rows = (
        (r["name"], f"{r['share']:.1%}", str(r["gpus"]), *(cell(r, n) for n in names))
        for r in regimes[:_REGIMES]
    )
    more = len(regimes) - _REGIMES
    rest = f"<p class='soft'>and {more} smaller ones.</p>" if more > 0 else ""
    note = "<p class='soft'>Values: where 10 % to 90 % of its moments lie.</p>"
    return _table(head, rows) + note + rest


def _regime_plot(regimes: Sequence[dict[str, Any]]) -> str:
    """Power and temperature of each state: the middle as a dot, as large as its share of the
    time, with its range either way."""
    drawn = [r for r in regimes if {"power", "gpu_temp"} <= r["typical"].keys()]
    if not drawn:
        return "<p class='soft'>No power or temperature to draw them by.</p>"
    power = [r["typical"]["power"] for r in drawn]
    temp = [r["typical"]["gpu_temp"] for r in drawn]
    x_ends = (0.0, 1.08 * max(p["high"] for p in power))
    y_ends = (min(t["low"] for t in temp) - 4.0, max(t["high"] for t in temp) + 6.0)
    x, y = _scale(*x_ends, _LEFT, _W - _RIGHT), _scale(*y_ends, _H - _BOTTOM, _TOP)
    marks: list[str] = []
    taken: list[tuple[float, float]] = []
    for place, (r, p, t) in enumerate(zip(drawn, power, temp, strict=True)):
        cx, cy = x(p["median"]), y(t["median"])
        radius = 4.0 + 18.0 * math.sqrt(r["share"])
        marks.append(
            f'<line class="span" x1="{x(p["low"]):.1f}" x2="{x(p["high"]):.1f}" y1="{cy:.1f}" '
            f'y2="{cy:.1f}"/><line class="span" x1="{cx:.1f}" x2="{cx:.1f}" '
            f'y1="{y(t["low"]):.1f}" y2="{y(t["high"]):.1f}"/>'
            f'<circle class="dot" cx="{cx:.1f}" cy="{cy:.1f}" r="{radius:.1f}"><title>'
            f"{escape(r['name'])}: {r['share']:.1%} of the time, {p['median']:.0f} W, "
            f"{t['median']:.0f} °C</title></circle>"
        )
        if place < _LABELLED:
            label = f"{r['name']}, {r['share']:.0%}"
            beside = any(
                0 < x(o["median"]) - cx < 160 and abs(y(u["median"]) - cy) < 30
                for o, u in zip(power, temp, strict=True)
            )
            wide = cx + radius + 6.5 * len(label) > _W - _RIGHT
            side = "end" if wide or beside else "start"
            tx = cx + (radius + 5) * (-1 if side == "end" else 1)
            ty = cy - radius - 3
            while any(abs(ty - other) < 15 and abs(tx - ox) < 150 for ox, other in taken):
                ty += 15
            taken.append((tx, ty))
            marks.append(
                f'<text x="{tx:.1f}" y="{ty:.1f}" text-anchor="{side}">{escape(label)}</text>'
            )
    frame = _axes(
        [(x(v), f"{v:g}") for v in _ticks(*x_ends)],
        [(y(v), f"{v:g}") for v in _ticks(*y_ends)],
        "power (W)",
        "GPU temperature (°C)",
    )
    return _svg("States of normal operation by power and temperature", frame + "".join(marks))


def _coverage_plot(coverage: dict[str, float]) -> str:
    if not coverage:
        return ""
    step, left, wide = 20, 150, 420
    marks = []
    for place, (name, share) in enumerate(coverage.items()):
        top = 6 + step * place
        marks.append(
            f'<text x="{left - 8}" y="{top + 11}" text-anchor="end">{_words(name)}</text>'
            f'<rect class="empty" x="{left}" y="{top + 2}" width="{wide}" height="11"/>'
            f'<rect class="bar" x="{left}" y="{top + 2}" width="{wide * share:.1f}" height="11"/>'
            f'<text class="soft" x="{left + wide + 8}" y="{top + 11}">{share:.0%}</text>'
        )
    height = 12 + step * len(coverage)
    return _svg("Share of the moments that have each metric", "".join(marks), height)


# ---- the rest -----------------------------------------------------------------------


def _comparison(found: dict[str, Any] | None) -> str:
    if not found:
        return ""
    head = ("GPU model", "outside normal", "edge", "hot GPU noticed", "slow GPU noticed", "stays")

    def pair(figures: dict[str, Any], key: str, before: str, form: str) -> str:
        if key not in figures:
            return "-"
        return f"{figures[key]:{form}} (was {figures[before]:{form}})"

    rows = (
        (
            model,
            pair(f, "over_edge", "over_edge_before", ".2%"),
            pair(f, "radius", "radius_before", ".2f"),
            pair(f["notices"], "hot", "hot_before", ".0%"),
            pair(f["notices"], "slow", "slow_before", ".0%"),
            f"{f['stay']:.1%}",
        )
        for model, f in found["models"].items()
    )
    notes = "".join(f"<p class='soft'>{escape(note)}</p>" for note in found["notes"])
    return (
        f"<h2>Beside the bundle in use, {escape(found['with'])}</h2><p>Both judged the "
        "window, as it is, and with one GPU of each host made 12 °C hotter or a fifth slower."
        f"</p>{_table(head, rows)}{notes}"
    )


def _skipped(skipped: Sequence[str]) -> str:
    if not skipped:
        return ""
    rows = "".join(f"<li>{escape(text)}</li>" for text in skipped)
    return f"<h2>Left out</h2><ul class='warn'>{rows}</ul>"


# ---- drawing ------------------------------------------------------------------------


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    wide = (high - low) or 1.0
    return lambda value: start + (value - low) / wide * (end - start)


def _ticks(low: float, high: float) -> list[float]:
    """About six round values between two ends."""
    raw = (high - low) / 6 or 1.0
    size = 10 ** math.floor(math.log10(raw))
    step = next(size * m for m in (1, 2, 5, 10) if size * m >= raw)
    first = math.ceil(low / step)
    count = int((high - first * step) / step + 1e-9) + 1
    return [round((first + k) * step, 6) for k in range(count)]


def _axes(
    xs: Iterable[tuple[float, str]], ys: Iterable[tuple[float, str]], x_name: str, y_name: str
) -> str:
    right, bottom = _W - _RIGHT, _H - _BOTTOM
    grid = [
        f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="soft" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
        for y, text in ys
    ]
    grid += [
        f'<text class="soft" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{text}</text>'
        for x, text in xs
    ]
    middle = (_TOP + bottom) / 2
    return (
        "".join(grid)
        + f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>'
        + f'<text x="{(_LEFT + right) / 2}" y="{_H - 8}" text-anchor="middle">{x_name}</text>'
        + f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">{y_name}'
        "</text>"
    )


def _svg(title: str, inside: str, height: int = _H) -> str:
    return (
        f'<svg viewBox="0 0 {_W} {height}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{inside}</svg>"
    )


def _points(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    inside = f"<thead><tr>{names}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="wide"><table class="{kind}">{inside}</table></div>'


def _words(name: str) -> str:
    return escape(_LABELS.get(name, name.replace("_", " ")))


def _maybe(value: float | None) -> str:
    return "-" if value is None else _short(value)


def _short(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) < 0.001:
        return "under 0.001"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
