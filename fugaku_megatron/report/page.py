"""The report as one HTML page: its text and inline SVG, without other files or network."""

from __future__ import annotations

import html

from ..text.named_files import JsonObject
from .plots import plots
from .summary import text

STYLE = """body{max-width:1000px;margin:1.5em auto;padding:0 1em;color:#222}pre{font:14px/1.5 sans-serif;white-space:pre-wrap}
.plots{display:flex;flex-wrap:wrap;gap:12px}svg text{font:11px sans-serif}svg{border:1px solid #ddd}"""


def page(data: JsonObject) -> str:
    parts = [
        f"<pre>{html.escape(text(data))}</pre>",
        '<div class="plots">',
        *plots(data["sections"], data.get("hours", [])),
        "</div>",
    ]
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>fugaku-megatron report</title>'
        f"<style>{STYLE}</style></head><body>" + "\n".join(parts) + "</body></html>\n"
    )
