"""Benchmark tables as text: the printed cells in their own order and format, then ours, the errata beneath.

Test: pytest tests/test_perf_tables.py
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from ..published.errata import Erratum
from ..published.markdown import pipe_table
from ..published.rows import DOCUMENTS
from .comparison import NO_MODEL, Comparison

OUR_HEADER = ("corrected", "recomputed TFLOPs", "model Sec/it", "model range", "model TFLOPs", "model MiB", "time error %",
              "memory error %", "remarks")


def text(found: Sequence[Comparison], markdown: bool = False) -> str:
    """All tables of `found`, with a summary per document; markdown: with Markdown's headings and lists."""
    parts = []
    for document, group in groupby(found, lambda c: c.row.document):
        of_document = list(group)
        parts.append(("## " if markdown else "") + f"{document}: {DOCUMENTS[document][1]}")
        parts += [_table(list(rows), markdown) for _, rows in groupby(of_document, lambda c: c.row.table.id)]
        parts.append(summary(document, of_document))
    return "\n\n".join(parts)


def _table(found: Sequence[Comparison], markdown: bool) -> str:
    table = found[0].row.table
    title = ("### " if markdown else "") + f"{table.id} {table.title}"
    assumed = [f"assumed, not printed: {', '.join(found[0].row.assumed)}"] if found[0].row.assumed else []
    problems = [f"line {c.row.line} {'cannot run' if c.row.status == 'impossible' else 'is not modelled'}: {c.problem}"
                for c in found if c.problem not in ("", NO_MODEL)]
    notes = [("- " if markdown else "  ") + note for note in assumed + problems + _errata(found)]
    return "\n".join([title, "", *pipe_table([(*table.header, *OUR_HEADER), *map(cells, found)]), *([""] if notes else []), *notes])


def cells(comparison: Comparison) -> tuple[str, ...]:
    """The printed cells of a row, then those of OUR_HEADER."""
    row, p = comparison.row, comparison.prediction
    names = dict(zip(row.table.columns, row.table.header))
    corrected = ", ".join(f"{names.get(column, column)} {cell}" for column, cell in comparison.corrections().items())
    seconds = NO_MODEL if comparison.problem == NO_MODEL else _number(p and p.seconds, ".1f")
    between = f"{p.lower:.1f} to {p.upper:.1f}" if p else "-"
    errors = (_number(comparison.time_error_percent, "+.1f"), _number(comparison.memory_error_percent, "+.1f"))
    return (*row.cells, corrected or "-", _number(comparison.recomputed, ".3f"), seconds, between,
            _number(comparison.model_tflops, ".3f"), _number(p and p.memory_mib_max, ".0f"), *errors,
            ", ".join(comparison.remarks()) or "-")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _errata(found: Sequence[Comparison]) -> list[str]:
    """One line per id and reason, with the lines of the document that it speaks of."""
    lines: dict[tuple[str, str, str], list[str]] = {}
    names = dict(zip(found[0].row.table.columns, found[0].row.table.header))
    for erratum in dict.fromkeys(e for c in found for e in c.row.errata):
        lines.setdefault((erratum.id, names.get(erratum.column, erratum.column), erratum.why), []).append(_place(erratum))
    return [f"{id} {column}, {'; '.join(places)}: {why}" for (id, column, why), places in sorted(lines.items(), key=_by_number)]


def _by_number(item: tuple[tuple[str, str, str], list[str]]) -> tuple[str, int]:
    return item[0][0][0], int(item[0][0][1:])


def _place(erratum: Erratum) -> str:
    where = "every row" if erratum.line is None else f"line {erratum.line}"
    change = f", {erratum.printed or '(nothing)'} -> {erratum.corrected}" if erratum.corrected else ""
    return where + change


def summary(document: str, found: Sequence[Comparison]) -> str:
    """How far the model is from the rows that it is fitted to, in one line: unseen runs are further away."""
    times = [abs(c.time_error_percent) for c in found if c.time_error_percent is not None and c.row.fit_time]
    memory = [abs(c.memory_error_percent) for c in found if c.memory_error_percent is not None and c.row.fit_memory]
    said = [f"model against {len(errors)} printed {name}: mean absolute error {sum(errors) / len(errors):.1f} % in sample, "
            f"largest {max(errors):.1f} %" for name, errors in (("times", times), ("memory sizes", memory)) if errors]
    return f"{document}: {len(found)} rows; " + ("; ".join(said) or NO_MODEL)
