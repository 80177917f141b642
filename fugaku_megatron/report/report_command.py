"""Measure this machine for training: a laptop, a node, or all nodes of a job; says what is wrong with it and how to fix it.

    fugaku-megatron report                                         starts one rank for each NUMA domain, if there is an mpiexec
    mpiexec -n 8 fugaku-megatron report --output report.json       the ranks of a job, on one node or on several
    fugaku-megatron report --compare A.json B.json                 two reports next to each other, with ratios

report.json (for --compare and for --machine of plan and predict) and report.txt have all figures, report.html also plots. They are
written after every section, marked partial until the last. Names of users, hosts and paths are left out unless --with-names is passed.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ..cli.output_files import check_file
from ..config.fields import check
from ..start import environment
from .figures import compared
from .record import NAMES
from .start_ranks import restart_with_ranks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of output, time, sections, ranks and comparison."""
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("report.json"),
        metavar="FILE.json",
        help="the report; its text and its page with plots are written next to it (default: report.json)",
    )
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="time that the run may take (default: 10)"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=NAMES,
        metavar="SECTION",
        help=f"measure only these: {', '.join(NAMES)}",
    )
    parser.add_argument(
        "--save",
        type=Path,
        metavar="DIR",
        help="file system whose checkpoints are timed (default: the folder for temporary files)",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        help="without a launcher: start so many ranks by mpiexec (default: one for each NUMA domain, "
        "or up to 4 on one domain; 1: start none)",
    )
    parser.add_argument(
        "--with-names",
        action="store_true",
        help="keep the names of user, host and folder in the files",
    )
    parser.add_argument(
        "--compare",
        type=Path,
        nargs=2,
        metavar=("A", "B"),
        help="print two reports next to each other, and measure nothing",
    )
    parser.add_argument("--shrunk", action="store_true", help=argparse.SUPPRESS)  # shapes for tests
    # seconds of --minutes until the ranks were started
    parser.add_argument("--spent", type=float, default=0.0, help=argparse.SUPPRESS)


def check_arguments(args: argparse.Namespace) -> None:
    """Raise ValueError for values and paths that would fail after the measurement."""
    check(
        0 < args.minutes <= 1440,
        f"--minutes is {args.minutes:g}: pass a number above 0, at most 1440",
    )
    check(args.output.suffix == ".json", f"--output {args.output}: pass a name that ends in .json")
    for suffix in (".json", ".html", ".txt"):
        check_file("--output", args.output.with_suffix(suffix))
    check(
        args.save is None or args.save.is_dir() and os.access(args.save, os.W_OK),
        f"--save {args.save} is not a folder that can be written: make it, or leave --save out",
    )
    check(args.ranks is None or args.ranks > 0, f"--ranks is {args.ranks}: pass a number above 0")
    check(
        args.ranks is None or args.ranks == 1 or not environment.processes()[0],
        f"--ranks {args.ranks}: a launcher started the ranks already: leave it out",
    )


def main(args: argparse.Namespace) -> int:
    """Measure this machine, on ranks that mpiexec starts if possible, or compare two reports."""
    if args.compare:
        print(compared(*args.compare))
        return 0
    check_arguments(args)
    launched = bool(environment.processes()[0])
    kernels_alone = set(args.only or NAMES) <= {"host", "kernels"}
    if not launched and not kernels_alone:
        restart_with_ranks(args)
    from ..comm.base import SoloComm
    from ..comm.job import run_or_abort
    from .measure import measure

    run_or_abort(lambda world: measure(world, args), None if launched else SoloComm())
    return 0
