"""The table of --report: calls of each replaced operator, share served, seconds, and seconds of PyTorch's own kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..text.table import Column, text_table
from .build import Counts

_COLUMNS: tuple[Column, ...] = (
    ("operator", "<44", lambda row: row[0]),
    ("calls", ">10", lambda row: row[1]),
    ("served %", ">8.1f", lambda row: 100 * row[2] / row[1]),
    ("seconds", ">10.3f", lambda row: row[3]),
    ("with torch", ">10.3f", lambda row: None if math.isnan(row[4]) else row[4]),
)


def report(counts: Sequence[Counts]) -> list[str]:
    """Return the lines of a table. Of the kernels "native" PyTorch's seconds are unknown."""
    if not counts:
        return ["no replaced operator was called on the CPU"]
    columns = list(zip(*counts))
    total = ("all", *(sum(column) for column in columns[1:]))
    return text_table(_COLUMNS, [*counts, total])
