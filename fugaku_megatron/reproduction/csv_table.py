"""Strict reading of the package's small CSV files: every error names file, line, column, value and what is expected."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.checks import check


@dataclass(frozen=True)
class Record:
    """One line of a CSV file: its cells by column, with the file and the line's number."""

    path: Path
    line: int
    cells: Mapping[str, str]

    def expect(self, condition: bool, column: str, expected: str, value: str | None = None) -> None:
        """Raise ValueError with file, line, column, value and what is expected, unless `condition` holds."""
        shown = self.cells.get(column, "") if value is None else value
        check(condition, f"{self.path}, line {self.line}, column {column}: {shown!r} is given, {expected} is expected")

    def convert(self, column: str, parse: Callable[[str], Any], expected: str, value: str | None = None) -> Any:
        """The cell, or `value` in its place, converted by `parse`; ValueError as in `expect` when `parse` refuses it."""
        try:
            return parse(self.cells[column] if value is None else value)
        except (ValueError, KeyError):  # no number or no match of a pattern, no key of a dictionary
            self.expect(False, column, expected, value)


def read(path: Path, required: tuple[str, ...], allowed: tuple[str, ...] = ()) -> Iterator[Record]:
    """The records of `path`. Its header must hold all `required` columns and may hold `allowed` ones, no others."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); install the package again") from None
    lines = csv.reader(text.splitlines())
    header = next(lines, [])
    for column in required:
        check(column in header, f"{path}, line 1: column {column} is missing, the header is {','.join(header)!r}")
    for column in header:
        check(column in required + allowed and header.count(column) == 1,
              f"{path}, line 1, column {column}: unknown or given twice, one each of {', '.join(required + allowed)} is expected")
    for cells in lines:
        check(len(cells) == len(header), f"{path}, line {lines.line_num}, column {header[min(len(cells), len(header) - 1)]}: "
              f"the row {','.join(cells)!r} has {len(cells)} cells, {len(header)} are expected ({','.join(header)})")
        yield Record(path, lines.line_num, dict(zip(header, cells)))
