"""Two reports next to each other. Ratios are second to first: above 1 if the second machine is faster."""

from __future__ import annotations

from pathlib import Path

from ..text.named_files import JsonObject
from ..text.table import pipe_table
from .record import read, rows_of

LESS_IS_MORE = ("us", "s", "hours")  # units of which less is faster


def figures(data: JsonObject) -> dict[tuple[str, str], float]:
    """Return (name, unit) -> value."""
    sections = data["sections"]
    found: dict[tuple[str, str], float] = {}
    kernels = sections.get("kernels")
    communication = sections.get("communication", {})
    if kernels:
        rank = kernels["ranks"][0]
        found |= {
            ("clock under load", "GHz"): rank["clock_ghz"],
            ("FMA peak of a rank", "GFLOP/s"): rank["fma_gflops"],
            ("triad of a rank", "GB/s"): rank["triad_gbs"],
        }
        found |= {(f"matmul {n}", "GFLOP/s"): rate for n, rate, _ in kernels["gemm"]}
        found |= {(f"matmul {n}, BF16", "GFLOP/s"): rate for n, rate, _ in kernels["gemm_bf16"]}
        int8 = kernels.get("gemm_int8", [])  # earlier reports have none
        found |= {(f"matmul {n}, INT8", "GFLOP/s"): rate for n, rate, _ in int8}
        for s, forward, backward, *_ in kernels["attention"]:
            found |= {
                (f"attention forward {s}", "GFLOP/s"): forward,
                (f"attention backward {s}", "GFLOP/s"): backward,
            }
        found |= {(row["kernel"], "GB/s"): row["gbs"] for row in kernels["elementwise"]}
    for where in ("inside", "between"):
        if messages := communication.get(where):
            found |= {
                (f"message {where} nodes", "us"): messages["alpha_us"],
                (f"link {where} nodes", "GB/s"): messages["gbs"],
            }
    found |= {
        (f"{row['verb']} {row['where']}, {row['bytes']} bytes, {row['ranks']} ranks", "s"): row[
            "seconds"
        ]
        for row in rows_of(sections, "communication", "collectives")
    }
    found |= {
        (f"124M, {row['ranks']} ranks", "tokens/s"): row["tokens_per_s"]
        for row in rows_of(sections, "training")
        if "tokens_per_s" in row
    }
    if storage := sections.get("storage"):
        found |= {
            ("checkpoint written", "GB/s"): storage["write_gbs"],
            ("checkpoint read", "GB/s"): storage["read_gbs"],
        }
    return found | {
        (f"10 M tokens of {row['model']} (extrapolated)", "hours"): row["hours"]
        for row in data.get("hours", [])
    }


def compared(first: Path, second: Path) -> str:
    """Return the table of two reports' rates and ratios, and the comparison of checksums."""
    one = read("--compare", first)
    two = read("--compare", second)
    a = figures(one)
    b = figures(two)
    rows = [["", "unit", "A", "B", "B is x as fast"]]
    for name, unit in a | b:
        values = [data.get((name, unit)) for data in (a, b)]
        shown = ["-" if value is None else f"{value:.4g}" for value in values]
        rows.append([name, unit, *shown, ratio(unit, *values)])
    lines = [f"A: {title(one)}", f"B: {title(two)}", "", *pipe_table(rows), ""]
    return "\n".join([*lines, same_bits(one, two)])


def ratio(unit: str, first: float | None, second: float | None) -> str:
    if not first or not second:
        return "-"
    return f"{first / second if unit in LESS_IS_MORE else second / first:.2f}"


def title(data: JsonObject) -> str:
    what = "an unknown machine"
    if nodes := rows_of(data["sections"], "host", "nodes"):
        what = f"{len(nodes)} x {nodes[0]['cpu']}, {nodes[0]['cores']} cores"
    state = "" if data["complete"] else f", PARTIAL: {data['ended']}"
    return f"{what}, {data['date']}{state}"


def same_bits(first: JsonObject, second: JsonObject) -> str:
    one, two = (
        {
            (row["kernel"], row["dtype"]): row["checksum"]
            for row in rows_of(data["sections"], "kernels", "checks")
        }
        for data in (first, second)
    )
    both = one.keys() & two.keys()
    return f"{len(one.items() & two.items())} of {len(both)} kernels compute the same bits"
