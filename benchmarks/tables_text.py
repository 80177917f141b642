"""`benchmarks tables` as text and CSV: the published columns with measured values, then scaled and modelled ones."""

from __future__ import annotations

import csv
from itertools import groupby
from pathlib import Path
from typing import Any

from fugaku_megatron.config.outputs import pipe_table
from fugaku_megatron.perf.software import THIS_PROJECT

from . import published

PUBLISHED_BATCH = 1024  # samples of an iteration in the published tables
OUR_HEADER = (f"scaled to GBS {PUBLISHED_BATCH}, not measured", "model Sec/it", "model MiB", "time error %", "memory error %")
CSV_LEFT_OUT = ("machine", "model_breakdown")


def scaled(row: dict[str, Any]) -> float:
    """Seconds per iteration at the published global batch, if time grows in proportion to the batch."""
    return row["seconds"] * PUBLISHED_BATCH / row["gbs"]


def text(result: dict[str, Any], markdown: bool = False) -> str:
    """A table for every sequence length, with and without recompute, and the model's errors beneath."""
    parts, heading = [], "### " if markdown else ""
    for (recipe, seq, recompute), group in groupby(result["rows"], lambda r: (r["recipe"], r["seq"], r["recompute"])):
        rows = list(group)
        parts.append(heading + published.title(recipe, seq, recompute, f"native kernels, fp32: {machine(rows)}"))
        parts.append("\n".join(pipe_table([(*published.header(), *OUR_HEADER), *map(cells, rows)])))
    rows = result["rows"]
    parts.append(f"A node here is a rank on one machine; one rank has {max(r['threads'] for r in rows)} threads, more ranks share "
                 f"them. Model: software {THIS_PROJECT} on {rows[0]['machine']['title']}.\n"
                 f"Model against {len(rows)} measured rows: mean absolute error of time {result['mean_time_error_percent']:.1f} %, "
                 f"largest {result['largest_time_error_percent']:.1f} %; of memory {result['mean_memory_error_percent']:.1f} %.\n"
                 f"{result['repeat']}")
    return "\n\n".join(parts)


def machine(rows: list[dict[str, Any]]) -> str:
    """Where and when `rows` were measured."""
    clocks = [row["clock_ghz"] for row in rows]
    return f"measured, {rows[0]['cpu']}, {sum(clocks) / len(clocks):.2f} GHz, {rows[0]['date']}"


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row: the published columns, then those of OUR_HEADER."""
    notes = (row["allocator"] if row["allocator"] != "tuned" else "-") + (", BUSY MACHINE" if row["busy"] else "")
    measured = published.cells(
        ranks=row["ranks"], ghz=row["clock_ghz"], size=row["recipe"], tp=row["tp"], pp=row["pp"], micro_batch_size=row["mbs"],
        global_batch_size=row["gbs"], mib=row["peak_memory_mib"], seconds=row["seconds"], tflops=row["tflops"], notes=notes)
    return (*measured, f"{scaled(row):.0f}", f"{row['model_seconds']:.2f}", f"{row['model_memory_mib']:.0f}",
            f"{row['time_error_percent']:+.1f}", f"{row['memory_error_percent']:+.1f}")


def write_csv(path: Path, result: dict[str, Any]) -> None:
    """One line per row, measured and modelled."""
    records = [{"scaled_seconds": scaled(row), **{k: v for k, v in row.items() if k not in CSV_LEFT_OUT}} for row in result["rows"]]
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
