"""Corrections of the printed tables and facts that they leave out: one record each, in seeds/errata.csv.

R1, R2, ... correct a cell or, where `corrected` is empty, comment on it; S1, S2, ... add facts that are printed outside the table.
A record for line * applies to every row of its table and replaces `printed` inside the cell. `unfit` (time or memory) excludes a
row from that fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import csv_table

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
            raise ValueError(f"{self.place}, column printed: {self.printed!r} is given, {cell!r} is expected: line {self.line}, "
                             f"column {self.column} of table {self.table}")
        return self.corrected


def read(path: Path, parsers: Parsers) -> tuple[Erratum, ...]:
    """The records of `path`; `parsers` are those of the columns that may be corrected. Raises ValueError for a wrong cell."""
    return tuple(_erratum(record, parsers) for record in csv_table.read(path, COLUMNS))


def _erratum(record: csv_table.Record, parsers: Parsers) -> Erratum:
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
