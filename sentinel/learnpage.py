"""The report of `sentinel learn` as one self-contained page: words, tables, and plots as SVG.

Reads nothing but the report's plain values, and asks the network for nothing: the page can be
mailed, kept beside a bundle, and opened years later. Light and dark follow the reader's system.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, Final

from sentinel.learnplots import (
    COLOURS,
    PLOTS,
    coverage_plot,
    rate_plot,
    regime_plot,
    words,
    worth_drawing,
)

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
_REGIMES: Final = 12


def page(told: dict[str, Any]) -> str:
    """The whole page. `told` is what `sentinel learn --json` prints."""
    parts = [_head(told), _refusal(told), _cards(told), _calibration(told)]
    parts += [_cohort(c, (told.get("comparison") or {})) for c in told["cohorts"]]
    parts += [_comparison(told.get("comparison")), _skipped(told["skipped"])]
    title = f"Baseline {escape(told['bundle_id'])}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{COLOURS}{_TEXT}{PLOTS}</style></head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body></html>\n"
    )


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
    shown = worth_drawing(rows)
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
    plot = rate_plot(shown, budget, known)
    return f"{text}{plot}<details><summary>As a table</summary>{table}</details>"


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
        names = ", ".join(map(words, c["lacks"]))
        lacks = f"<p class='warn'>Without data: {names}. Nothing is judged by them.</p>"
    return (
        f"<h2>{name}</h2><p class='soft'>{c['gpus']} GPUs, {c['rows']:,} moments.</p>"
        + _table(("measure", "value", "meaning"), quality, "words")
        + "<h3>States of normal operation</h3>"
        + regime_plot(regimes)
        + _regime_table(regimes)
        + "<h3>What its metrics cover</h3>"
        + coverage_plot(c.get("coverage", {}))
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


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    inside = f"<thead><tr>{names}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="wide"><table class="{kind}">{inside}</table></div>'


def _maybe(value: float | None) -> str:
    return "-" if value is None else _short(value)


def _short(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) < 0.001:
        return "under 0.001"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
