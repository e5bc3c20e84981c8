"""The plots of the report of `sentinel learn`, as SVG without a library.

Colours are variables of the page they stand in; `pictures` gives files that bring their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any, Final

COLOURS: Final = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --line: #d1d9e0;
  --paper: #ffffff; --card: #f6f8fa; --mark: #0b62c4; --band: #0b62c426; --bad: #b3261e;
  --warn: #8a5300; --good: #18703a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9aa6b2; --line: #3a434d;
  --paper: #0f1419; --card: #182028; --mark: #6cb0ff; --band: #6cb0ff30; --bad: #ff8f85;
  --warn: #f0b35a; --good: #6fd08c; } }
"""
PLOTS: Final = """
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
_LABELLED: Final = 5
_LOG_LOW: Final = -3.0


def pictures(told: dict[str, Any]) -> dict[str, str]:
    """The plots as SVG files of their own: `budget`, and `states` of the model with most GPUs."""
    largest = max(told["cohorts"], key=lambda c: c["gpus"])
    drawn = {"states": regime_plot(largest.get("regimes", []))}
    if rows := worth_drawing(told["calibration"]["table"]):
        drawn["budget"] = rate_plot(rows, told["budget"], told["calibration"])
    style = COLOURS.replace(":root", "svg") + PLOTS.replace("svg ", "")
    head = f'<style>{style}</style><rect width="100%" height="100%" fill="var(--paper)"/>'
    return {
        name: svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(
            "</title>", f"</title>{head}", 1
        )
        for name, svg in drawn.items()
        if svg.startswith("<svg")
    }


def worth_drawing(rows: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """The rows whose rate is worth a look."""
    return [r for r in rows if r["per_week"] >= 10**_LOG_LOW] or rows[:2]


def rate_plot(rows: Sequence[dict[str, Any]], budget: dict[str, Any], known: dict[str, Any]) -> str:
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
    needs = (("ticket", known["ticket_score"], 8), ("page", known["page_score"], 24))
    for word, score, up in needs:
        if ends[0] <= score <= ends[1]:
            marks.append(
                f'<line class="limit" x1="{x(score):.1f}" x2="{x(score):.1f}" y1="{_TOP}" '
                f'y2="{_H - _BOTTOM}"/><text class="limit-text" x="{x(score) + 5:.1f}" '
                f'y="{_H - _BOTTOM - up}">a {word}: {score:.2f}</text>'
            )
    powers = [(y(p), _power(p)) for p in range(int(low), int(high) + 1)]
    scores = [(x(v), f"{v:g}") for v in _ticks(*ends)]
    frame = _axes(scores, powers, "score that lasted (1 = edge of normal)", "incidents a week")
    return _svg("Expected incidents a week of normal time, by score", frame + "".join(marks))


def _power(exponent: int) -> str:
    return f"{10**exponent:g}"


def regime_plot(regimes: Sequence[dict[str, Any]]) -> str:
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


def coverage_plot(coverage: dict[str, float]) -> str:
    if not coverage:
        return ""
    step, left, wide = 20, 150, 420
    marks = []
    for place, (name, share) in enumerate(coverage.items()):
        top = 6 + step * place
        marks.append(
            f'<text x="{left - 8}" y="{top + 11}" text-anchor="end">{words(name)}</text>'
            f'<rect class="empty" x="{left}" y="{top + 2}" width="{wide}" height="11"/>'
            f'<rect class="bar" x="{left}" y="{top + 2}" width="{wide * share:.1f}" height="11"/>'
            f'<text class="soft" x="{left + wide + 8}" y="{top + 11}">{share:.0%}</text>'
        )
    height = 12 + step * len(coverage)
    return _svg("Share of the moments that have each metric", "".join(marks), height)


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


def words(name: str) -> str:
    return escape(_LABELS.get(name, name.replace("_", " ")))
