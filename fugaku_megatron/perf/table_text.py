"""Benchmark tables as text: the printed cells in their own order and format, then the computed ones, with the errata beneath."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from ..published.errata import Erratum
from ..published.markdown import pipe_table
from ..published.rows import DOCUMENTS
from .comparison import NO_MODEL, Comparison

OUR_HEADER = ("corrected", "recomputed TFLOPs", "model Sec/it", "model range", "model TFLOPs", "model MiB", "time error %",
              "memory error %", "remarks")


def text(comparisons: Sequence[Comparison], markdown: bool = False) -> str:
    """All tables of the rows in `comparisons`, with a summary per document; markdown: with Markdown's headings and lists."""
    parts = []
    for document, group in groupby(comparisons, lambda c: c.row.document):
        document_rows = list(group)
        parts.append(("## " if markdown else "") + f"{document}: {DOCUMENTS[document][1]}")
        parts += [_table(list(rows), markdown) for _, rows in groupby(document_rows, lambda c: c.row.table.id)]
        parts.append(summary(document, document_rows))
    return "\n\n".join(parts)


def _table(comparisons: Sequence[Comparison], markdown: bool) -> str:
    table = comparisons[0].row.table
    title = ("### " if markdown else "") + f"{table.id} {table.title}"
    assumed = [f"assumed, not printed: {', '.join(comparisons[0].row.assumed)}"] if comparisons[0].row.assumed else []
    problems = [f"line {c.row.line} {'cannot run' if c.row.status == 'impossible' else 'is not modelled'}: {c.problem}"
                for c in comparisons if c.problem not in ("", NO_MODEL)]
    notes = [("- " if markdown else "  ") + note for note in assumed + problems + _errata(comparisons)]
    lines = pipe_table([(*table.header, *OUR_HEADER), *map(cells, comparisons)])
    return "\n".join([title, "", *lines, *([""] if notes else []), *notes])


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


def _errata(comparisons: Sequence[Comparison]) -> list[str]:
    """One line per erratum's id and reason, with the lines of the document that it corrects or comments on."""
    lines: dict[tuple[str, str, str], list[str]] = {}
    names = dict(zip(comparisons[0].row.table.columns, comparisons[0].row.table.header))
    for erratum in dict.fromkeys(e for c in comparisons for e in c.row.errata):
        lines.setdefault((erratum.id, names.get(erratum.column, erratum.column), erratum.why), []).append(_place(erratum))
    return [f"{id} {column}, {'; '.join(places)}: {why}" for (id, column, why), places in sorted(lines.items(), key=_by_number)]


def _by_number(item: tuple[tuple[str, str, str], list[str]]) -> tuple[str, int]:
    return item[0][0][0], int(item[0][0][1:])


def _place(erratum: Erratum) -> str:
    where = "every row" if erratum.line is None else f"line {erratum.line}"
    change = f", {erratum.printed or '(nothing)'} -> {erratum.corrected}" if erratum.corrected else ""
    return where + change


def summary(document: str, comparisons: Sequence[Comparison]) -> str:
    """The model's errors on the rows that it is fitted to, in one line; errors on unseen runs are larger (see `fit`)."""
    times = [abs(c.time_error_percent) for c in comparisons if c.time_error_percent is not None and c.row.fit_time]
    memory = [abs(c.memory_error_percent) for c in comparisons if c.memory_error_percent is not None and c.row.fit_memory]
    sentences = [f"model against {len(errors)} printed {name}: mean absolute error {sum(errors) / len(errors):.1f} % in sample, "
            f"largest {max(errors):.1f} %" for name, errors in (("times", times), ("memory sizes", memory)) if errors]
    return f"{document}: {len(comparisons)} rows; " + ("; ".join(sentences) or NO_MODEL)
