"""Tables: Markdown, text in fixed columns, CSV.

A Markdown table is as wide as its cells. Rows in fixed columns can be printed one by one while they are measured.
"""

from __future__ import annotations

import csv
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .named_files import StrPath
from .written_files import new_file


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


# (title; format of a cell, such as >8.3f; key or function of a row)
Column = tuple[str, str, str | Callable[[Any], Any]]


def heading(columns: Sequence[Column]) -> str:
    return " ".join(_blank(form, title) for title, form, _ in columns)


def line(columns: Sequence[Column], row: Any) -> str:
    """Return a row in fixed columns. None is an empty cell."""
    cells = []
    for _, form, value in columns:
        cell = value(row) if callable(value) else row[value]
        cells.append(_blank(form) if cell is None else format(cell, form))
    return " ".join(cells).rstrip()


def text_table(columns: Sequence[Column], rows: Iterable[Any]) -> list[str]:
    return [heading(columns), *(line(columns, row) for row in rows)]


def _blank(form: str, text: str = "") -> str:
    return format(text, re.findall("[<>][0-9]+", form)[0])


def write_csv(path: StrPath, columns: Sequence[str], records: Iterable[Mapping[str, Any]]) -> None:
    """Write another file and rename it: a reader never sees half a file."""
    aside = Path(f"{path}.tmp")
    with open(
        aside, "w", newline="", encoding="utf-8", errors="surrogateescape", opener=new_file
    ) as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
    aside.replace(path)
