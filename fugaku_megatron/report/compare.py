"""Two reports next to each other, with the ratio of each rate: second to first, above 1 where the second machine is faster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..config.command_line import pipe_table
from .record import read

LESS_IS_MORE = ("us", "s", "hours")  # units of which less is faster


def figures(data: dict[str, Any]) -> dict[tuple[str, str], float]:
    """(name, unit) -> value of everything that two reports may share."""
    sections = data["sections"]
    found: dict[tuple[str, str], float] = {}
    kernels, communication = sections.get("kernels"), sections.get("communication", {})
    if kernels:
        rank = kernels["ranks"][0]
        found |= {("clock under load", "GHz"): rank["clock_ghz"], ("FMA peak of a rank", "GFLOP/s"): rank["fma_gflops"],
                  ("triad of a rank", "GB/s"): rank["triad_gbs"]}
        found |= {(f"matmul {n}", "GFLOP/s"): rate for n, rate, _ in kernels["gemm"]}
        found |= {(f"matmul {n}, BF16", "GFLOP/s"): rate for n, rate, _ in kernels["gemm_bf16"]}
        for s, forward, backward, *_ in kernels["attention"]:
            found |= {(f"attention forward {s}", "GFLOP/s"): forward, (f"attention backward {s}", "GFLOP/s"): backward}
        found |= {(row["kernel"], "GB/s"): row["gbs"] for row in kernels["elementwise"]}
    for where in ("inside", "between"):
        if messages := communication.get(where):
            found |= {(f"message {where} nodes", "us"): messages["alpha_us"], (f"link {where} nodes", "GB/s"): messages["gbs"]}
    found |= {(f"{row['verb']} {row['where']}, {row['bytes']} bytes, {row['ranks']} ranks", "s"): row["seconds"]
              for row in communication.get("collectives", [])}
    found |= {(f"124M, {row['ranks']} ranks", "tokens/s"): row["tokens_per_s"]
              for row in sections.get("training", {}).get("rows", []) if "tokens_per_s" in row}
    if storage := sections.get("storage"):
        found |= {("checkpoint written", "GB/s"): storage["write_gbs"], ("checkpoint read", "GB/s"): storage["read_gbs"]}
    return found | {(f"10 M tokens of {row['model']} (extrapolated)", "hours"): row["hours"] for row in data.get("hours", [])}


def compared(first: Path, second: Path) -> str:
    """The table. Raises ValueError, one line, for a file that is not a report."""
    one, two = read("--compare", first), read("--compare", second)
    lines = [f"{letter}: {title(data)}" for letter, data in (("A", one), ("B", two))]
    a, b = figures(one), figures(two)
    rows = [["", "unit", "A", "B", "B is x as fast"]]
    for name, unit in dict.fromkeys([*a, *b]):
        values = a.get((name, unit)), b.get((name, unit))
        rows.append([name, unit, *("-" if value is None else f"{value:.4g}" for value in values), ratio(unit, *values)])
    return "\n".join([*lines, "", *pipe_table(rows), "", same_bits(one, two)])


def ratio(unit: str, first: float | None, second: float | None) -> str:
    """How many times as fast the second is; "-" where one is missing."""
    if not first or not second:
        return "-"
    return f"{first / second if unit in LESS_IS_MORE else second / first:.2f}"


def title(data: dict[str, Any]) -> str:
    """A report's machine in a line."""
    nodes = data["sections"].get("host", {}).get("nodes", [])
    what = f"{len(nodes)} x {nodes[0]['cpu']}, {nodes[0]['cores']} cores" if nodes else "an unknown machine"
    return f"{what}, {data['date']}" + ("" if data["complete"] else f", PARTIAL: {data['ended']}")


def same_bits(first: dict[str, Any], second: dict[str, Any]) -> str:
    """How many kernels computed the same bits."""
    sums = [{(row["kernel"], row["dtype"]): row["checksum"] for row in data["sections"].get("kernels", {}).get("checks", [])}
            for data in (first, second)]
    both = sums[0].keys() & sums[1].keys()
    return f"{sum(sums[0][key] == sums[1][key] for key in both)} of {len(both)} kernels compute the same bits"
