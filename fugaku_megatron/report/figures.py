"""The text of a report, and two reports next to each other: both name every figure alike."""

from __future__ import annotations

from pathlib import Path

from ..text.named_files import JsonObject
from ..text.table import pipe_table
from .record import LABEL, clock, read, rows_of

LESS_IS_MORE = ("us", "s", "hours")  # units of which less is faster
# rows of a report -> end of a name; earlier reports have no INT8
MATMULS = {"gemm": "", "gemm_bf16": ", BF16", "gemm_int8": ", INT8"}

Figure = tuple[str, str]  # name, unit


def text(data: JsonObject) -> str:
    """Return the report as text: findings with remedies, extrapolated hours, and all figures."""
    lines = [heading(data), *facts(data["sections"]), ""]
    if data.get("findings"):
        lines.append("What is wrong with this machine for training (measured; expected; remedy):")
        lines += [
            f"{number}. {labelled(f)}: {f['measured']}; {f['expected']}; {f['remedy']}"
            for number, f in enumerate(data["findings"], 1)
        ]
    else:
        end = "." if data["complete"] else " so far."
        lines.append(f"Nothing was found that is wrong with this machine for training{end}")
    if data.get("hours"):
        lines += [
            "",
            f"Hours for 10 million tokens on all nodes of this report, {LABEL} from measured layers, FP32:",
        ]
        lines += [hours_line(row) for row in data["hours"]]
    rows = [[name, unit, f"{value:.4g}"] for (name, unit), value in figures(data).items()]
    return "\n".join([*lines, "", *pipe_table([["", "unit", "measured"], *rows])]) + "\n"


def heading(data: JsonObject) -> str:
    state = "complete" if data["complete"] else f"PARTIAL, {data['ended']}"
    line = f"fugaku-megatron report, version {data['program']}, {data['date']}: {state} after {clock(data['seconds'])}"
    if left_out := data.get("left_out"):
        line += f"; no time left within --minutes for {', '.join(left_out)}"
    if data["sections"].get("kernels", {}).get("shrunk"):
        line += "; SHRUNK SHAPES, whose rates are not this machine's"
    return line


def facts(sections: JsonObject) -> list[str]:
    """Return the lines about what is not a figure."""
    lines = []
    if nodes := rows_of(sections, "host", "nodes"):
        node = nodes[0]
        pages = node["huge_pages"]["transparent"] or "unknown"
        lines += [
            f"machine: {len(nodes)} x {node['cpu']}, {node['cores']} cores of {node['cpus']} CPUs for this process; "
            f"{node['topology']}; {node['job_memory_gib']:.1f} GiB, huge pages {pages}, torch {node['torch']}",
            f"power: {node['energy']}",
        ]
    if kernels := sections.get("kernels"):
        good = sum(row["good"] for row in kernels["checks"])
        lines.append(
            f"kernels: {kernels['target']}, {good} of {len(kernels['checks'])} agree with the reference; "
            f"{len(kernels['ranks'])} ranks of {kernels['ranks'][0]['threads']} threads at the same time"
        )
    if communication := sections.get("communication"):
        lines.append(f"communication: {communication['library']}")
    for name in ("training", "layers"):
        lines += [
            f"{name}: {row.get('shape', row.get('ranks'))} left out ({row['left_out']})"
            for row in rows_of(sections, name)
            if "left_out" in row
        ]
    if storage := sections.get("storage"):
        lines.append(
            f"checkpoint: {storage['file_system']} ({storage['place']}, {storage['bytes'] / 1e6:.0f} MB)"
        )
    return lines


def labelled(finding: JsonObject) -> str:
    return f"SEVERE: {finding['what']}" if finding["severe"] else finding["what"]


def hours_line(row: JsonObject) -> str:
    short = ""
    if not row["fits"]:
        short = f"; needs {row['need_gib']:.0f} GiB, {row['nodes_needed']} such nodes"
    return (
        f"  {row['model']:>5}  {row['hours']:>9.4g} h  {row['tokens_per_s']:>9.4g} tokens/s, {row['from']}, "
        f"{row['seq_length']} tokens{short}"
    )


def figures(data: JsonObject) -> dict[Figure, float]:
    """Return every figure of a record, by its name and unit."""
    sections = data["sections"]
    found = kernel_figures(sections["kernels"]) if "kernels" in sections else {}
    communication = sections.get("communication", {})
    for where in ("inside", "between"):
        if messages := communication.get(where):
            found |= {
                (f"message {where} nodes", "us"): messages["alpha_us"],
                (f"link {where} nodes", "GB/s"): messages["gbs"],
            }
    for row in rows_of(sections, "communication", "collectives"):
        name = f"{row['verb']} {row['where']}, {row['bytes']} bytes, {row['ranks']} ranks"
        found[name, "s"] = row["seconds"]
    for row in rows_of(sections, "training"):
        if "tokens_per_s" in row:
            found[f"124M, {row['ranks']} ranks", "tokens/s"] = row["tokens_per_s"]
        if row.get("watts"):
            found[f"124M, {row['ranks']} ranks", "W"] = row["watts"]
            found[f"124M, {row['ranks']} ranks", "tokens/J"] = row["tokens_per_joule"]
    for row in rows_of(sections, "layers"):
        if "gradient_seconds" in row:
            name = f"two layers of {row['shape']}, {row['seq_length']} tokens, TP {row['tp']}"
            found[name, "s"] = row["gradient_seconds"]
    if storage := sections.get("storage"):
        found |= {
            ("checkpoint written", "GB/s"): storage["write_gbs"],
            ("checkpoint read", "GB/s"): storage["read_gbs"],
        }
    return found | {
        (f"10 M tokens of {row['model']} (extrapolated)", "hours"): row["hours"]
        for row in data.get("hours", [])
    }


def kernel_figures(kernels: JsonObject) -> dict[Figure, float]:
    """Return the figures of kernels on the first rank."""
    rank = kernels["ranks"][0]
    found = {
        ("clock under load", "GHz"): rank["clock_ghz"],
        ("FMA peak of a rank", "GFLOP/s"): rank["fma_gflops"],
        ("triad of a rank", "GB/s"): rank["triad_gbs"],
    }
    for key, precision in MATMULS.items():
        found |= {
            (f"matmul {n}{precision}", "GFLOP/s"): rate for n, rate, _ in kernels.get(key, [])
        }
    for s, forward, backward, *_ in kernels["attention"]:
        found |= {
            (f"attention forward {s}", "GFLOP/s"): forward,
            (f"attention backward {s}", "GFLOP/s"): backward,
        }
    return found | {(row["kernel"], "GB/s"): row["gbs"] for row in kernels["elementwise"]}


def compared(first: Path, second: Path) -> str:
    """Return the table of two reports' figures and ratios, and the comparison of checksums.

    Ratios are second to first: above 1 if the second machine is faster.
    """
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
