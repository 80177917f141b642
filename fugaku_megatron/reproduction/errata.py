"""Strict reading of the package's small CSV files, and seeds/errata.csv: corrections of the printed tables and further facts.

Every error names file, line, column, value and what is expected. R1, R2, ... correct a cell or, where `corrected` is empty, comment
on it; S1, S2, ... add facts that are printed outside the table. A record for line * applies to every row of its table and replaces
`printed` inside the cell. `unfit` (time or memory) excludes a row from that fit.
"""

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
        check(condition, f"{self.path}, line {self.line}, column {column}: {shown!r}, expected {expected}")

    def convert(self, column: str, parse: Callable[[str], Any], expected: str, value: str | None = None) -> Any:
        """The cell, or `value` in its place, converted by `parse`; ValueError as in `expect` when `parse` refuses it."""
        try:
            return parse(self.cells[column] if value is None else value)
        except (ValueError, KeyError):  # no number or no match of a pattern, no key of a dictionary
            self.expect(False, column, expected, value)


def read_csv(path: Path, required: tuple[str, ...], allowed: tuple[str, ...] = ()) -> Iterator[Record]:
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
              f"{path}, line 1, column {column}: unknown or repeated, expected one each of {', '.join(required + allowed)}")
    for cells in lines:
        check(len(cells) == len(header), f"{path}, line {lines.line_num}, column {header[min(len(cells), len(header) - 1)]}: "
              f"the row {','.join(cells)!r} has {len(cells)} cells, {len(header)} are expected ({','.join(header)})")
        yield Record(path, lines.line_num, dict(zip(header, cells)))


Parsers = Mapping[str, tuple[Callable[[str], Any], str]]  # column -> (conversion of a cell, what is expected)
COLUMNS = ("id", "table", "line", "column", "printed", "corrected", "unfit", "why")


@dataclass(frozen=True, kw_only=True)
class Erratum:
    """One record. line: of the document; None for every row of the table. printed: the cell, or a part of it if line is None."""

    id: str
    table: str
    line: int | None
    column: str
    printed: str
    corrected: str
    unfit: str
    why: str
    place: str  # file and line of this record

    def holds(self, table: str, line: int, cell: str) -> bool:
        """Whether the record applies to this row."""
        return self.table == table and (line == self.line or self.line is None and self.printed in cell)

    def apply(self, cell: str) -> str:
        """The corrected cell; empty for a comment. Raises ValueError when the record's `printed` is not this cell."""
        if self.line is None:
            return cell.replace(self.printed, self.corrected) if self.corrected else ""
        if cell != self.printed:
            raise ValueError(f"{self.place}, column printed: {self.printed!r}, expected {cell!r}: line {self.line}, "
                             f"column {self.column} of table {self.table}")
        return self.corrected


def read(path: Path, parsers: Parsers) -> tuple[Erratum, ...]:
    """The records of `path`; `parsers` are those of the columns that may be corrected. Raises ValueError for a wrong cell."""
    return tuple(_erratum(record, parsers) for record in read_csv(path, COLUMNS))


def _erratum(record: Record, parsers: Parsers) -> Erratum:
    cells = dict(record.cells)
    record.expect(cells["id"][:1] in ("R", "S") and cells["id"][1:].isdigit(), "id", "R or S and a number")
    record.expect(cells["column"] in parsers, "column", " or ".join(sorted(parsers)))
    record.expect(cells["unfit"] in ("", "time", "memory"), "unfit", "time, memory or nothing")
    record.expect(cells["why"] != "", "why", "a reason")
    line = None if cells["line"] == "*" else record.convert("line", int, "a line number or *")
    if line is not None:  # for every row it is only a part of the cell
        record.convert("corrected", *parsers[cells["column"]])
    del cells["line"]
    return Erratum(line=line, place=f"{record.path}, line {record.line}", **cells)
