"""The report as text."""

from __future__ import annotations

from collections.abc import Callable

from ..text.named_files import JsonObject
from .findings import Sections
from .record import LABEL, clock, rows_of


def text(data: JsonObject) -> str:
    """Return the report as text: summary, findings with remedies, and extrapolated hours."""
    sections = data["sections"]
    lines = [heading(data), *summary(sections), ""]
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
    return "\n".join(lines) + "\n"


def labelled(finding: JsonObject) -> str:
    return f"SEVERE: {finding['what']}" if finding["severe"] else finding["what"]


def heading(data: JsonObject) -> str:
    state = "complete" if data["complete"] else f"PARTIAL, {data['ended']}"
    shrunk = data["sections"].get("kernels", {}).get("shrunk")
    line = f"fugaku-megatron report, version {data['program']}, {data['date']}: {state} after {clock(data['seconds'])}"
    if left_out := data.get("left_out"):
        line += f"; no time left within --minutes for {', '.join(left_out)}"
    if shrunk:
        line += "; SHRUNK SHAPES, whose rates are not this machine's"
    return line


def hours_line(row: JsonObject) -> str:
    short = ""
    if not row["fits"]:
        short = f"; needs {row['need_gib']:.0f} GiB, {row['nodes_needed']} such nodes"
    return (
        f"  {row['model']:>5}  {row['hours']:>9.4g} h  {row['tokens_per_s']:>9.4g} tokens/s, {row['from']}, "
        f"{row['seq_length']} tokens{short}"
    )


def summary(sections: Sections) -> list[str]:
    """Return the lines of the measured sections, and of power."""
    makers: dict[str, Callable[[JsonObject], str]] = {
        "host": host_line,
        "kernels": kernels_line,
        "communication": communication_line,
        "training": training_line,
        "layers": layers_line,
        "storage": storage_line,
    }
    lines = [make(sections[name]) for name, make in makers.items() if name in sections]
    rows = [row for row in rows_of(sections, "training") if row.get("watts")]
    if rows:
        watts = rows[-1]["watts"]
        efficiency = rows[-1]["tokens_per_joule"]
        lines.append(
            f"power: {watts:.0f} W on all nodes while 124M trains, {efficiency:.3g} tokens per joule"
        )
    elif "host" in sections:
        lines.append(f"power: {sections['host']['nodes'][0]['energy']}")
    return [part for line in lines for part in line.splitlines()]


def host_line(host: JsonObject) -> str:
    node = host["nodes"][0]
    count = len(host["nodes"])
    pages = node["huge_pages"]["transparent"] or "unknown"
    return (
        f"machine: {count} x {node['cpu']}, {node['cores']} cores of {node['cpus']} CPUs for this process; "
        f"{node['topology']}; {node['job_memory_gib']:.1f} GiB, huge pages {pages}, torch {node['torch']}"
    )


def kernels_line(kernels: JsonObject) -> str:
    """Return two lines: checks and shares of peak, then a rank's clock and rates."""
    good = sum(row["good"] for row in kernels["checks"])
    rank = kernels["ranks"][0]
    n, _, share = max(kernels["gemm"], key=lambda row: row[0])
    slowest = min(row["of_triad"] for row in kernels["elementwise"])
    ratios = [
        f"{name} {kernels[key][-1][2]:.2f} x"
        for name, key in (("BF16", "gemm_bf16"), ("INT8", "gemm_int8"))
        if key in kernels  # earlier reports have no INT8
    ]
    return (
        f"kernels: {kernels['target']}, {good} of {len(kernels['checks'])} agree with the reference; matmul {share:.0%} of "
        f"peak at {n}, in {' and in '.join(ratios)} FP32's peak, slowest element-wise kernel {slowest:.0%} of "
        "triad\n"
        f"threads of a rank: {rank['threads']}; {rank['clock_ghz']:.2f} GHz under load, FMA peak {rank['fma_gflops']:.3g} "
        f"GFLOP/s, STREAM triad {rank['triad_gbs']:.1f} GB/s; {len(kernels['ranks'])} ranks at the same time"
    )


def communication_line(found: JsonObject) -> str:
    parts = [
        f"{where} nodes {m['alpha_us']:.1f} us, {m['gbs']:.2f} GB/s"
        for where in ("inside", "between")
        if (m := found[where])
    ]
    line = f"communication: {found['library']}; "
    line += ", ".join(parts) or "one rank, nothing measured"
    if found["all_reduce_gbs"]:
        line += f"; large all-reduce {found['all_reduce_gbs']:.2f} GB/s"
    return line


def training_line(found: JsonObject) -> str:
    done = []
    for row in found["rows"]:
        if "seconds" in row:
            text = f"{row['ranks']}: {row['tokens_per_s']:.0f}"
            if row["model_seconds"]:
                text += f" (model {row['model_seconds'] / row['seconds']:.2f} x)"
            done.append(text)
    return "124M, tokens/s by ranks: " + (", ".join(done) or "left out")


def layers_line(found: JsonObject) -> str:
    done = [
        f"{row['shape']}: {row['gradient_seconds']:.3g} s a sample of {row['seq_length']} tokens, TP {row['tp']}"
        if "tp" in row
        else f"{row['shape']}: left out ({row['left_out']})"
        for row in found["rows"]
    ]
    return "two layers: " + "; ".join(done)


def storage_line(found: JsonObject) -> str:
    return (
        f"checkpoint: {found['write_gbs']:.2f} GB/s written, {found['read_gbs']:.2f} GB/s read, {found['file_system']} "
        f"({found['place']}, {found['bytes'] / 1e6:.0f} MB)"
    )
