"""The report as one HTML page: text, tables, and inline SVG, without other files or network."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from ..text.named_files import JsonObject
from .plots import plots
from .record import LABEL, rows_of
from .summary import heading, labelled, summary

STYLE = """body{font:15px/1.45 sans-serif;max-width:1000px;margin:1.5em auto;padding:0 1em;color:#222}h1{font-size:1.4em}
h2{font-size:1.1em;margin-top:1.6em}table{border-collapse:collapse;font-size:13px}td,th{border:1px solid #ccc;padding:2px 7px;
text-align:right}td:first-child,th:first-child,.text{text-align:left}.plots{display:flex;flex-wrap:wrap;gap:12px}.severe{color:#b00}
.partial{background:#fff3cd;padding:.4em}svg text{font:11px sans-serif}svg{border:1px solid #ddd}"""


def page(data: JsonObject) -> str:
    sections = data["sections"]
    parts = [f"<h1>{html.escape(heading(data))}</h1>"]
    if not data["complete"]:
        parts.append(
            f'<p class="partial">Partial: {html.escape(str(data["ended"]))}. The sections below were finished.</p>'
        )
    parts += [f"<p>{html.escape(line)}</p>" for line in summary(sections)]
    parts += [
        "<h2>What is wrong with this machine for training</h2>",
        findings_table(data.get("findings", [])),
    ]
    if data.get("hours"):
        parts += [f"<h2>Hours for 10 million tokens, {LABEL}</h2>", hours_table(data["hours"])]
    parts += [
        "<h2>Plots</h2>",
        '<div class="plots">',
        *plots(sections, data.get("hours", [])),
        "</div>",
        *tables(sections),
    ]
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>fugaku-megatron report</title>'
        f"<style>{STYLE}</style></head><body>" + "\n".join(parts) + "</body></html>\n"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    columns = zip(head, zip(*rows))
    lines = ["".join(f"<th{_side(*column)}>{html.escape(name)}</th>" for name, column in columns)]
    lines += ["".join(map(_cell, row)) for row in rows]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _cell(value: Any) -> str:
    shown = str(value)
    if value is None:
        shown = "-"
    elif isinstance(value, float):
        shown = f"{value:.4g}"
    return f"<td{_side(value)}>{html.escape(shown)}</td>"


def _side(*values: Any) -> str:
    return " class=text" if any(isinstance(value, str) for value in values) else ""


def findings_table(found: Sequence[JsonObject]) -> str:
    if not found:
        return "<p>Nothing was found.</p>"
    rows = [[labelled(f), f["measured"], f["expected"], f["remedy"]] for f in found]
    return table(("what", "measured", "expected", "remedy"), rows)


def hours_table(rows: Sequence[JsonObject]) -> str:
    return table(
        ("model", "hours", "tokens/s", "tokens a sample", "GiB needed", "fits", "from"),
        [
            [
                row["model"],
                row["hours"],
                row["tokens_per_s"],
                row["seq_length"],
                row["need_gib"],
                "yes" if row["fits"] else f"no, {row['nodes_needed']} nodes",
                f"{row['from']}, {row['label']}",
            ]
            for row in rows
        ],
    )


def tables(sections: JsonObject) -> list[str]:
    found = []
    for title, rows in (
        ("Kernels against the scalar reference", rows_of(sections, "kernels", "checks")),
        ("Collectives", rows_of(sections, "communication", "collectives")),
        ("124M", rows_of(sections, "training")),
        ("Two layers", rows_of(sections, "layers")),
        ("Ranks", rows_of(sections, "kernels", "ranks")),
    ):
        if rows:
            head = list(dict.fromkeys(name for row in rows for name in row))
            found += [
                f"<h2>{title}</h2>",
                table(head, [[row.get(name) for name in head] for row in rows]),
            ]
    for node in rows_of(sections, "host", "nodes")[:1]:
        found.append(f"<h2>Node 0</h2>{table(('fact', 'value'), list(node.items()))}")
    return found
