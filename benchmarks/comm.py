"""Collectives between ranks of this machine, now and before: seconds of each by size, in turn, as table, JSON and picture.

    python -m benchmarks comm --png comm.png

Every rank has one thread and by default a core of its own: ranks that share a core wait for each other's time slices. A row is
printed as soon as it is measured. Left out: networks. Test: pytest tests/mpi/test_benchmark_comm.py
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from fugaku_megatron.host import runtime
from fugaku_megatron.run.checks import check
from fugaku_megatron.run.outputs import writing

from . import child, driver, jobs, noise

SIZES = tuple(2**power for power in (16, 18, 20, 22, 24, 26, 28))


def default_ranks(cores: int) -> list[int]:
    """The numbers of ranks that have a core each; two ranks on one core are the least that can be measured."""
    return [ranks for ranks in (2, 4) if ranks <= cores] or [2]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this family."""
    parser.add_argument("--ranks", type=int, nargs="+", default=default_ranks(len(os.sched_getaffinity(0))),
                        help="numbers of ranks (default: those of 2 and 4 for which this process has the cores)")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), metavar="BYTES",
                        help="of a whole tensor (default: 64 KiB to 256 MiB)")
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds of each row (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the rows into FILE (needs matplotlib)")


def run(options: argparse.Namespace) -> None:
    """Measure, print, write --json and --png. ValueError for numbers that cannot be measured."""
    check(options.rounds >= 1, f"--rounds {options.rounds}: give 1 or more")
    check(min(options.ranks) >= 2, f"--ranks {min(options.ranks)}: give 2 or more, one rank has nobody to send to")
    check(min(options.sizes) >= 4 * max(options.ranks), f"--sizes {min(options.sizes)}: give {4 * max(options.ranks)} or more, "
          "four bytes for every rank")
    result: dict[str, Any] = {"rows": [], "cpu": runtime.cpu_model(), "rounds": options.rounds, "repeat": driver.command_line()}
    for ranks in options.ranks:
        watch = noise.Watch(min(ranks, os.cpu_count() or 1), jobs.children_seconds)
        rows = measured(ranks, options)
        result["library"] = rows[0]["library"]
        busy = watch.others() > noise.OTHERS
        result["rows"] += [{**row, "busy": busy} for row in rows[1:]]
        print(f"BUSY MACHINE during the rows of {ranks} ranks\n" * busy, end="")
    print(f"{result['cpu']}, {result['library']}, one thread a rank, measured")
    print(result["repeat"])
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.png:
        draw(options.png, result)


def measured(ranks: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The MPI library, then the rows, each printed when it is measured. RuntimeError when the ranks fail."""
    print(f"{'collective':<15} {'ranks':>5} {'KiB':>8} {'ms now':>9} {'ms before':>10} {'ratio':>6}", flush=True)
    records = []
    for row in child.ranks(ranks, "comm_rank", {"sizes": options.sizes, "rounds": options.rounds}):
        records.append(row)
        if len(records) > 1:
            print(f"{row['op']:<15} {row['ranks']:>5} {row['bytes'] / 1024:>8.0f} {1e3 * row['seconds']:>9.3f} "
                  f"{1e3 * row['before_seconds']:>10.3f} {row['ratio']:>6.2f}", flush=True)
    return records


def draw(path: Path, result: dict[str, Any]) -> None:
    """A panel per collective: GB of the tensor per second by size, now and before. ValueError when it cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row["op"] for row in result["rows"]))
    figure = Figure(figsize=(4 * len(names), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    columns = figure.subplots(1, len(names), squeeze=False, sharey=True)[0]
    for name, axes in zip(names, columns, strict=True):
        for number, ranks in enumerate(dict.fromkeys(row["ranks"] for row in result["rows"])):
            rows = [row for row in result["rows"] if (row["op"], row["ranks"]) == (name, ranks)]
            for column, style, when in (("seconds", "-", "now"), ("before_seconds", ":", "before")):
                axes.plot([row["bytes"] for row in rows], [row["bytes"] / row[column] / 1e9 for row in rows], style, marker="o",
                          markersize=3, color=f"C{number}", label=f"{ranks} ranks, {when}")
        axes.set_xscale("log", base=2)
        axes.set(title=name, xlabel="bytes of the tensor", ylim=(0, None))
        axes.grid(alpha=0.3)
    columns[0].set_ylabel("GB of the tensor per second")
    figure.legend(*columns[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small", frameon=False)
    figure.suptitle(f"Collectives inside a node, FP32, one thread a rank\nmeasured, {result['cpu']}")
    with writing("--png", path):
        figure.savefig(path, dpi=110, format="png")
