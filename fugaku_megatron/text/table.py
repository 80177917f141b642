"""Markdown tables with aligned columns."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence


def pipe_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table, aligned to the right except for the last column."""
    widths = [max(_width(cell) for cell in column) for column in zip(*rows)]
    rule = [*("-" * (width - 1) + ":" for width in widths[:-1]), "-" * widths[-1]]
    padded = []
    for *cells, last in rows:
        right = [" " * (width - _width(cell)) + cell for cell, width in zip(cells, widths)]
        padded.append([*right, last.ljust(widths[-1])])
    return [f"| {' | '.join(row)} |" for row in (padded[0], rule, *padded[1:])]


def _width(cell: str) -> int:
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in cell)
