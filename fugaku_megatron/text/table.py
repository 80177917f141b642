"""Markdown tables with aligned columns."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence


def pipe_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table between pipes, aligned to the right except for the last column."""
    widths = [max(_width(cell) for cell in column) for column in zip(*rows)]
    rule = (
        "| "
        + " | ".join("-" * (width - 1) + ":" for width in widths[:-1])
        + " | "
        + "-" * widths[-1]
        + " |"
    )
    padded = [
        [" " * (w - _width(cell)) + cell for cell, w in zip(row[:-1], widths)]
        + [row[-1].ljust(widths[-1])]
        for row in rows
    ]
    lines = [f"| {' | '.join(row)} |" for row in padded]
    return [lines[0], rule, *lines[1:]]


def _width(cell: str) -> int:
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in cell)
