"""The published benchmark tables in their own format, with corrected, recomputed and modelled values next to the printed ones.

"recomputed TFLOPs" follow from the corrected time by the formula that the table used (`costs.flops`). Printed TFLOPs have an
error of up to 0.005: two digits, or x.xx5 as the mean of two values. PetaFLOPs are TFLOPs x nodes / 1024 (erratum R6), rounded to the
digits they show, in document 002 truncated. Columns named "model" are modelled, for planned rows too; "error %" is the difference
of the modelled from the corrected value. A table's errata follow it. Documents 000 and 002 are 124M and 001 is 30B on
A64FX; 004 is A100.

    fugaku-megatron tables --document 001 --png 30b.png
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from ..cli.output_files import check_file, check_picture, picture, writing
from ..costs.flops import hardware_flops, parameter_flops
from ..observe.log.iteration_metrics import or_dash
from ..planner.model import Prediction
from ..text.table import pipe_table, write_csv
from .rows import DOCUMENTS, Erratum, Row, load, predict_row

TFLOPS_ROUNDING = 0.005
_SLACK = 1e-9  # for rounding errors of binary fractions


def flops(row: Row) -> float:
    """Return an iteration's FLOPs by the table's formula."""
    if row.formula == "parameter":
        return parameter_flops(row.run(), row.gbs, replicas=True)
    return hardware_flops(row.run(), row.gbs)


def tflops(row: Row, seconds: float) -> float:
    """Return TFLOPs per node (A64FX) or GPU (A100)."""
    return flops(row) / seconds / row.devices / 1e12


def unit(cell: str) -> float:
    """Return one step in the last digit."""
    return 10.0 ** -len(cell.partition(".")[2])


def interval(row: Row) -> tuple[float, float]:
    """Return the smallest and largest TFLOPs that agree with the corrected time's rounding."""
    assert row.seconds is not None
    half = unit(row.corrected("seconds")) / 2
    return tflops(row, row.seconds + half), tflops(row, row.seconds - half)


def agrees(row: Row, printed: float) -> bool:
    low, high = interval(row)
    return low - TFLOPS_ROUNDING - _SLACK <= printed <= high + TFLOPS_ROUNDING + _SLACK


def petaflops(row: Row) -> float | None:
    """Return PetaFLOPs from the corrected TFLOPs; None if not printed."""
    return None if row.petaflops is None or row.tflops is None else row.tflops * row.devices / 1000


def finding(row: Row) -> str:
    """Compare TFLOPs: "equal", "erratum" (equal when corrected), "unexplained", or "" (no values)."""
    if row.seconds is None or row.tflops is None:
        return ""
    if not agrees(row, row.tflops):
        return "unexplained"
    seconds = row.corrected("seconds") == row.cell("seconds")
    printed = row.corrected("tflops") == row.cell("tflops")
    return "equal" if printed and (seconds or not row.cell("seconds")) else "erratum"


_STATUS_REMARKS = {
    "ran": "",
    "planned": "planned: model only",
    "oom": "out of memory",
    "failed": "failed",
    "impossible": "impossible",
}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Row and computed values. prediction: None with a `problem`."""

    row: Row
    prediction: Prediction | None
    problem: str = ""

    @property
    def recomputed(self) -> float | None:
        """TFLOPs per rank for the corrected time, or None."""
        return None if self.row.seconds is None else tflops(self.row, self.row.seconds)

    @property
    def model_tflops(self) -> float | None:
        return None if self.prediction is None else tflops(self.row, self.prediction.seconds)

    @property
    def time_error_percent(self) -> float | None:
        """Modelled minus corrected time, in per cent, or None."""
        if self.prediction is None or self.row.seconds is None:
            return None
        return 100 * (self.prediction.seconds / self.row.seconds - 1)

    @property
    def memory_error_percent(self) -> float | None:
        """Modelled minus printed memory, in per cent; None for failed runs."""
        if self.prediction is None or self.row.memory_mib is None or self.row.status != "ran":
            return None
        return 100 * (self.prediction.memory_mib_max / self.row.memory_mib - 1)

    def corrections(self) -> dict[str, str]:
        """Column -> corrected cell, from this row's errata."""
        return {
            e.column: e.corrected for e in self.row.errata if e.line is not None and e.corrected
        }

    def remarks(self) -> list[str]:
        remarks = [_STATUS_REMARKS[self.row.status]]
        if self.prediction is not None and self.prediction.oom:
            remarks.append("model: out of memory")
        if self.row.duplicate_of is not None:
            remarks.append(f"as line {self.row.duplicate_of}")
        remarks += dict.fromkeys(e.id for e in self.row.errata if e.line is not None)
        return [*filter(None, remarks)]


def compare(rows: Sequence[Row], predict: Callable[[Row], Prediction]) -> list[Comparison]:
    """Predict every row; for a row that cannot run or is not modelled, record the problem."""
    found = []
    for row in _with_progress(rows):
        prediction = None
        problem = row.problem() or ""
        if not problem:
            try:
                prediction = predict(row)
            except ValueError as error:
                problem = str(error)
        found.append(Comparison(row=row, prediction=prediction, problem=problem))
    return found


def _with_progress(rows: Sequence[Row]) -> Iterable[Row]:
    if not sys.stderr.isatty() or importlib.util.find_spec("tqdm") is None:
        return rows
    from tqdm import tqdm

    shown: Iterable[Row] = tqdm(rows, unit="row", leave=False)
    return shown


OUR_HEADER = (
    "corrected",
    "recomputed TFLOPs",
    "model Sec/it",
    "model range",
    "model TFLOPs",
    "model MiB",
    "time error %",
    "memory error %",
    "remarks",
)


def text(comparisons: Sequence[Comparison], markdown: bool = False) -> str:
    parts = []
    for document, group in groupby(comparisons, lambda c: c.row.document):
        document_rows = list(group)
        parts.append(("## " if markdown else "") + f"{document}: {DOCUMENTS[document][1]}")
        parts += [
            _table(list(rows), markdown)
            for _, rows in groupby(document_rows, lambda c: c.row.table.id)
        ]
        parts.append(summary(document, document_rows))
    return "\n\n".join(parts)


def _table(comparisons: Sequence[Comparison], markdown: bool) -> str:
    table = comparisons[0].row.table
    heading = "### " if markdown else ""
    bullet = "- " if markdown else "  "
    notes = []
    if table.assumed:
        notes.append(f"assumed, not printed: {', '.join(table.assumed)}")
    for c in comparisons:
        if c.problem:
            what = "cannot run" if c.row.status == "impossible" else "is not modelled"
            notes.append(f"line {c.row.line} {what}: {c.problem}")
    notes += _errata(comparisons)
    lines = [f"{heading}{table.id} {table.title}", ""]
    lines += pipe_table([(*table.header, *OUR_HEADER), *map(cells, comparisons)])
    if notes:
        lines += ["", *(bullet + note for note in notes)]
    return "\n".join(lines)


def cells(comparison: Comparison) -> tuple[str, ...]:
    """Return the cells as printed, then corrections, modelled values, and errors in per cent."""
    row = comparison.row
    p = comparison.prediction
    names = dict(zip(row.table.columns, row.table.header))
    corrected = ", ".join(
        f"{names.get(column, column)} {cell}" for column, cell in comparison.corrections().items()
    )
    between = f"{p.lower:.1f} to {p.upper:.1f}" if p else "-"
    return (
        *row.cells,
        corrected or "-",
        or_dash(comparison.recomputed, ".3f"),
        or_dash(p.seconds if p else None, ".1f"),
        between,
        or_dash(comparison.model_tflops, ".3f"),
        or_dash(p.memory_mib_max if p else None, ".0f"),
        or_dash(comparison.time_error_percent, "+.1f"),
        or_dash(comparison.memory_error_percent, "+.1f"),
        ", ".join(comparison.remarks()) or "-",
    )


def _errata(comparisons: Sequence[Comparison]) -> list[str]:
    lines: dict[tuple[str, str, str], list[str]] = {}
    table = comparisons[0].row.table
    names = dict(zip(table.columns, table.header))
    for erratum in dict.fromkeys(e for c in comparisons for e in c.row.errata):
        key = (erratum.id, names.get(erratum.column, erratum.column), erratum.why)
        lines.setdefault(key, []).append(_place(erratum))
    return [
        f"{id} {column}, {'; '.join(places)}: {why}"
        for (id, column, why), places in sorted(
            lines.items(), key=lambda item: (item[0][0][0], int(item[0][0][1:]))
        )
    ]


def _place(erratum: Erratum) -> str:
    place = "every row" if erratum.line is None else f"line {erratum.line}"
    if erratum.corrected:
        place += f", {erratum.printed or '(nothing)'} -> {erratum.corrected}"
    return place


def summary(document: str, comparisons: Sequence[Comparison]) -> str:
    """Format errors on fitted rows; errors on unseen runs are larger (see `fit`)."""
    times = [c.time_error_percent for c in comparisons if c.row.fit_time]
    memory = [c.memory_error_percent for c in comparisons if c.row.fit_memory]
    sentences = []
    for name, values in (("times", times), ("memory sizes", memory)):
        if errors := [abs(error) for error in values if error is not None]:
            sentences.append(
                f"model against {len(errors)} printed {name}: mean absolute error {fmean(errors):.1f} % in sample, "
                f"largest {max(errors):.1f} %"
            )
    found = "; ".join(sentences) or "the model has no row to be compared with"
    return f"{document}: {len(comparisons)} rows; {found}"


BAND = 0.1  # part of the printed time: the grey band around the diagonal
MARKERS = "os^Dv"
# The one trait of a document's rows that its colours show -> the text in the legend.
_TRAITS: dict[str, Callable[[Any], str]] = {
    "000": lambda row: f"sequence {row.seq}, {row.ghz} GHz",
    "001": lambda row: f"TP {row.tp}",
    "002": lambda row: "tcmalloc" if "tcmalloc" in row.software else "glibc",
    "004": lambda row: f"micro-batch {row.mbs}",
    "005": lambda row: f"TP {row.tp}, {row.ranks // row.nodes} ranks per node",
}


def draw(path: Path, comparisons: Sequence[Comparison]) -> None:
    """Draw modelled against printed seconds per iteration, with a panel for each document."""
    documents = [d for d in DOCUMENTS if any(c.row.document == d for c in comparisons)]
    columns = min(2, len(documents))
    rows = -(-len(documents) // columns)
    with picture(path, 4.6 * columns, 4.6 * rows + 0.4, dpi=110) as figure:
        grid = figure.add_gridspec(rows, columns)
        for number, document in enumerate(documents):
            panel = figure.add_subplot(grid[divmod(number, columns)])
            _draw_document(document, panel, [c for c in comparisons if c.row.document == document])
        figure.suptitle(
            f"Published runs: seconds per iteration, modelled against printed; grey: within {BAND:.0%}",
            fontsize="medium",
        )


def _draw_document(document: str, panel: Any, comparisons: Sequence[Comparison]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    # as in the text's summary
    pairs = [c for c in comparisons if c.time_error_percent is not None and c.row.fit_time]
    trait = _TRAITS.get(document, attrgetter("software"))
    for number, name in enumerate(sorted({trait(c.row) for c in pairs})):
        points = [_times(c) for c in pairs if trait(c.row) == name]
        panel.plot(
            *zip(*points),
            linestyle="none",
            marker=MARKERS[number % len(MARKERS)],
            markersize=6,
            alpha=0.75,
            color=f"C{number % 10}",
            markeredgecolor="white",
            markeredgewidth=0.5,
            label=name,
        )
    panel.set(xscale="log", yscale="log", xlabel="printed, s", ylabel="modelled, s")
    panel.set_title(_title(document, comparisons, pairs), fontsize="medium")
    panel.grid(alpha=0.3)
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())  # they would overlap
    if pairs:
        _diagonal(panel, [time for c in pairs for time in _times(c)])
        panel.legend(fontsize="small", loc="upper left")


def _times(comparison: Comparison) -> tuple[float, float]:
    assert comparison.row.seconds is not None and comparison.prediction is not None
    return comparison.row.seconds, comparison.prediction.seconds


def _title(document: str, comparisons: Sequence[Comparison], pairs: Sequence[Comparison]) -> str:
    name = f"{document}: {DOCUMENTS[document][1]}"
    errors = [abs(error) for c in pairs if (error := c.time_error_percent) is not None]
    if not errors:
        return f"{name}\n{sum(c.row.seconds is not None for c in comparisons)} printed times, none of them modelled"
    return f"{name}\n{len(pairs)} rows, mean error {fmean(errors):.1f} %"


def _diagonal(panel: Any, times: Sequence[float]) -> None:
    ends = [min(times) / 1.3, max(times) * 1.3]
    panel.plot(ends, ends, color="grey", linewidth=0.8, zorder=0)
    panel.fill_between(
        ends,
        [(1 - BAND) * t for t in ends],
        [(1 + BAND) * t for t in ends],
        color="grey",
        alpha=0.2,
        zorder=0,
    )
    panel.set(xlim=ends, ylim=ends, aspect="equal")


_NO_COLUMNS = (
    "table",
    "cells",
    "synchronous",
    "petaflops",
    "errata",
    "duplicate_of",
)
_FIELDS = (
    "document",
    *(f.name for f in fields(Row) if f.name not in _NO_COLUMNS),
    "fit_time",
    "fit_memory",
    "duplicate_of",
)
_PRINTED = ("dp", "gbs", "mem", "seconds", "tflops", "petaflops")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that select documents and output formats."""
    parser.add_argument(
        "--document",
        nargs="+",
        default=[],
        metavar="ID",
        help=f"any of {', '.join(DOCUMENTS)} (default: all)",
    )
    parser.add_argument(
        "--markdown", action="store_true", help="Markdown's headings and lists around the tables"
    )
    parser.add_argument(
        "--csv",
        metavar="FILE",
        help="one line per row: printed, corrected, recomputed and modelled",
    )
    parser.add_argument(
        "--png",
        metavar="FILE",
        help="time and TFLOPs against nodes, printed against modelled (needs matplotlib)",
    )


def main(args: argparse.Namespace) -> int:
    rows = load(args.document)
    check_file("--csv", args.csv)
    check_picture(args.png)
    comparisons = compare(rows, predict_row)
    print(text(comparisons, args.markdown))
    if args.csv:
        save_csv(Path(args.csv), comparisons)
    if args.png:
        draw(Path(args.png), comparisons)
    return 0


def save_csv(path: Path, comparisons: Sequence[Comparison]) -> None:
    records = [_record(comparison) for comparison in comparisons]
    with writing("--csv", path):
        write_csv(path, list(records[0]), records)


def _record(comparison: Comparison) -> dict[str, Any]:
    row = comparison.row
    p = comparison.prediction
    return {
        "table": row.table.id,
        "title": row.table.title,
        **{name: getattr(row, name) for name in _FIELDS},
        **{f"printed_{name}": row.cell(name) for name in _PRINTED},
        "petaflops": petaflops(row),
        "recomputed_tflops": comparison.recomputed,
        "finding": finding(row),
        "model_seconds": p and p.seconds,
        "model_lower": p and p.lower,
        "model_upper": p and p.upper,
        "model_tflops": comparison.model_tflops,
        "model_memory_mib": p and p.memory_mib_max,
        "model_oom": p and p.oom,
        "time_error_percent": comparison.time_error_percent,
        "memory_error_percent": comparison.memory_error_percent,
        "problem": comparison.problem,
        "errata": " ".join(dict.fromkeys(e.id for e in row.errata)),
        "remarks": ", ".join(comparison.remarks()),
    }
