"""Collectives between ranks of this machine, now and before: seconds of each by size, in turn, as table, JSON and picture.

    python -m benchmarks comm --png comm.png

Every rank has one thread and by default a core of its own: ranks that share a core wait for each other's time slices. A row is
printed as soon as it is measured. Left out: networks.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from fugaku_megatron.config.checks import check
from fugaku_megatron.host import runtime

from . import child, disturbance, driver, jobs, pictures

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
        watch = disturbance.Watch(min(ranks, os.cpu_count() or 1), jobs.children_seconds)
        rows = measured(ranks, options)
        result["library"] = rows[0]["library"]
        busy = watch.others() > disturbance.OTHERS
        result["rows"] += [{**row, "busy": busy} for row in rows[1:]]
        print(f"BUSY MACHINE during the rows of {ranks} ranks\n" * busy, end="")
    print(f"{result['cpu']}, {result['library']}, one thread a rank, measured")
    print(result["repeat"])
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.png:
        pictures.draw_collectives(options.png, result)


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
