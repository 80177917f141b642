"""The report as one HTML page: its text and inline SVG, without other files or network."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence

from ..text.named_files import JsonObject
from .figures import MATMULS
from .figures import text as text_of
from .record import LABEL, rows_of

Points = Sequence[tuple[float, float]]

# a plot's size and margins, pixels
WIDTH = 460
HEIGHT = 270
LEFT = 58
RIGHT = 12
TOP = 28
BOTTOM = 40
COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b")
STYLE = """body{max-width:1000px;margin:1.5em auto;padding:0 1em;color:#222}pre{font:14px/1.5 sans-serif;white-space:pre-wrap}
.plots{display:flex;flex-wrap:wrap;gap:12px}svg text{font:11px sans-serif}svg{border:1px solid #ddd}"""


def page(data: JsonObject) -> str:
    """Return the report's text and plots."""
    parts = [
        f"<pre>{html.escape(text_of(data))}</pre>",
        '<div class="plots">',
        *plots(data["sections"], data.get("hours", [])),
        "</div>",
    ]
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>fugaku-megatron report</title>'
        f"<style>{STYLE}</style></head><body>" + "\n".join(parts) + "</body></html>\n"
    )


def plots(sections: JsonObject, hours: Sequence[JsonObject]) -> list[str]:
    """Draw the measured sections and modelled hours as SVG figures."""
    kernels = sections.get("kernels")
    found = []
    if kernels:
        found.append(
            lines(
                "Share of the FP32 FMA peak",
                "matrix side, or tokens",
                {
                    **{
                        f"matmul{precision}": [(n, share) for n, _, share in kernels[key]]
                        for key, precision in MATMULS.items()
                        if key in kernels
                    },
                    "attention forward": [(row[0], row[3]) for row in kernels["attention"]],
                    "attention backward": [(row[0], row[4]) for row in kernels["attention"]],
                },
                from_zero=True,
            )
        )
        found.append(
            bars(
                "Element-wise kernels, share of STREAM's triad",
                [(row["kernel"], row["of_triad"]) for row in kernels["elementwise"]],
            )
        )
    rows = rows_of(sections, "communication", "collectives")
    for where in dict.fromkeys(row["where"] for row in rows):
        chosen = [row for row in rows if row["where"] == where and row["verb"] == "all_reduce"]
        series = {
            name: [(row["bytes"], row[key]) for row in chosen]
            for name, key in (
                ("measured", "seconds"),
                ("MPI alone", "mpi_seconds"),
                ("model", "model_seconds"),
            )
        }
        found.append(lines(f"All-reduce {where} nodes, seconds", "bytes", series, log_y=True))
    steps = [
        (row["ranks"], row["tokens_per_s"])
        for row in rows_of(sections, "training")
        if "tokens_per_s" in row
    ]
    if steps:
        first_ranks, first_rate = steps[0]
        ideal = [(ranks, first_rate * ranks / first_ranks) for ranks, _ in steps]
        series = {"measured": steps, "proportional": ideal}
        found.append(lines("124M, tokens/s", "ranks", series, from_zero=True))
    if hours:
        found.append(
            bars(f"Hours for 10 M tokens, {LABEL}", [(row["model"], row["hours"]) for row in hours])
        )
    return found


def frame(title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" aria-label="{html.escape(title)}">'
        f'<text x="{WIDTH / 2}" y="16" text-anchor="middle" font-weight="bold">{html.escape(title)}</text>'
        + "".join(parts)
        + "</svg>"
    )


def lines(
    title: str,
    label: str,
    series: Mapping[str, Points],
    log_y: bool = False,
    from_zero: bool = False,
) -> str:
    """Plot lines over a logarithmic axis. log_y: the other axis too. from_zero: begin it at 0"""
    xs, ys = ([point[i] for points in series.values() for point in points] for i in (0, 1))
    low = 0.0 if from_zero else min(ys)
    high = max(ys) or 1.0
    across = _scale(min(xs), max(xs), LEFT, WIDTH - RIGHT, log=True)
    # room for the names above the lines
    up = _scale(low, high * (10 if log_y else 1.3), HEIGHT - BOTTOM, TOP, log=log_y)
    parts = [
        f'<path d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}" fill="none" stroke="#888"/>',
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, label),
    ]
    parts += [_text(across(x), HEIGHT - BOTTOM + 14, _short(x)) for x in sorted(set(xs))]
    parts += [_text(LEFT - 5, up(y) + 4, _tick(y), "end") for y in _ticks(low, high, log_y)]
    for number, (name, points) in enumerate(series.items()):
        color = COLORS[number]
        path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="3" fill="{color}"/>'
            for x, y in points
        ]
        parts.append(_text(LEFT + 8, TOP + 12 + 14 * number, name, "start", color))
    return frame(title, parts)


def bars(title: str, values: Sequence[tuple[str, float]]) -> str:
    """Draw horizontal bars as SVG, scaled to the largest value."""
    most = max(value for _, value in values) or 1.0
    step = min(28.0, (HEIGHT - TOP - 8) / len(values))
    parts = []
    left = 190
    for number, (name, value) in enumerate(values):
        y = TOP + step * number
        length = value / most * (WIDTH - left - 60)
        parts += [
            f'<rect x="{left}" y="{y + step * 0.15:.1f}" width="{length:.1f}" height="{step * 0.7:.1f}" fill="{COLORS[0]}"/>',
            _text(left - 6, y + step / 2 + 4, name, "end"),
            _text(left + length + 5, y + step / 2 + 4, f"{value:.3g}", "start"),
        ]
    return frame(title, parts)


def _scale(
    low: float, high: float, begin: float, end: float, log: bool
) -> Callable[[float], float]:
    def of(value: float) -> float:
        return math.log(max(value, 1e-12)) if log else value

    span = of(high) - of(low) or 1.0
    return lambda value: begin + (of(value) - of(low)) / span * (end - begin)


def _ticks(low: float, high: float, log: bool) -> list[float]:
    if log:
        return [
            10.0**power
            for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
        ] or [low, high]
    return [low + (high - low) * part / 4 for part in range(5)]


def _tick(number: float) -> str:
    return f"{number:.0f}" if 100 <= number < 1e6 else f"{number:.2g}"


def _text(x: float, y: float, text: str, anchor: str = "middle", color: str = "#222") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{html.escape(text)}</text>'


def _short(number: float) -> str:
    for power, letter in ((30, "G"), (20, "M"), (10, "K")):
        if number >= 1 << power and number % (1 << power) == 0:
            return f"{number / (1 << power):.0f}{letter}"
    return f"{number:g}"
