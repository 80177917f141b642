"""The published benchmark tables in their own format, with corrected, recomputed and modelled values beside the printed ones.

"recomputed TFLOPs" follow from the corrected time by the formula that the table used; published/recompute.py explains the tables'
rounding. Columns named "model" are modelled, not measured, and are filled for planned rows too; "error %" is the difference of the
modelled from the corrected value. A table's errata stand beneath it. Documents 000 and 002 are 124M and 001 is 30B on A64FX; 004 is
A100.

    fugaku-megatron tables --document 001 --png 30b.png
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..published.recompute import finding, petaflops
from ..published.rows import DOCUMENTS, load
from ..run.outputs import check_file, check_picture, writing
from .comparison import Comparison, compare, predictor
from .table_text import text

_FIELDS = ("document", "line", "status", "machine", "software", "precision", "size", "nodes", "ranks", "ghz", "layers", "hidden",
           "heads", "seq", "vocabulary", "dp", "tp", "pp", "mbs", "gbs", "recompute", "zero", "formula", "seconds", "tflops",
           "memory_mib", "notes", "fit_time", "fit_memory", "duplicate_of")
_PRINTED = ("dp", "gbs", "mem", "seconds", "tflops", "petaflops")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's flags."""
    parser.add_argument("--document", nargs="+", default=[], metavar="ID", help=f"any of {', '.join(DOCUMENTS)} (default: all)")
    parser.add_argument("--markdown", action="store_true", help="Markdown's headings and lists around the tables")
    parser.add_argument("--csv", metavar="FILE", help="one line per row: printed, corrected, recomputed and modelled")
    parser.add_argument("--png", metavar="FILE", help="time and TFLOPs against nodes, printed against modelled (needs matplotlib)")


def main(args: argparse.Namespace) -> int:
    """Prints the tables and writes --csv and --png. Raises ValueError for unknown documents and files that cannot be written."""
    rows = load(args.document)
    check_file("--csv", args.csv)
    check_picture(args.png)
    comparisons = compare(rows, predictor())
    print(text(comparisons, args.markdown))
    if args.csv:
        write_csv(Path(args.csv), comparisons)
    if args.png:
        from .table_plot import draw

        draw(Path(args.png), comparisons)
    return 0


def write_csv(path: Path, comparisons: Sequence[Comparison]) -> None:
    """One line per row; cells are empty where nothing is known. Raises ValueError when `path` cannot be written."""
    records = [_record(comparison) for comparison in comparisons]
    with writing("--csv", path), open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)


def _record(comparison: Comparison) -> dict[str, Any]:
    row, p = comparison.row, comparison.prediction
    return {
        "table": row.table.id, "title": row.table.title, **{name: getattr(row, name) for name in _FIELDS},
        **{f"printed_{name}": row.cell(name) for name in _PRINTED},
        "petaflops": petaflops(row), "recomputed_tflops": comparison.recomputed, "finding": finding(row),
        "model_seconds": p and p.seconds, "model_lower": p and p.lower, "model_upper": p and p.upper,
        "model_tflops": comparison.model_tflops, "model_memory_mib": p and p.memory_mib_max, "model_oom": p and p.oom,
        "time_error_percent": comparison.time_error_percent,
        "memory_error_percent": comparison.memory_error_percent,
        "problem": comparison.problem, "errata": " ".join(dict.fromkeys(e.id for e in row.errata)),
        "remarks": ", ".join(comparison.remarks()),
    }
