"""A PyTorch program as it is against the same program with the torch backend, in turn, each run a process of its own.

    git clone https://github.com/karpathy/nanoGPT
    python -m benchmarks programs --directory nanoGPT train.py --device=cpu --dtype=float32 --compile=False --batch_size=4 ...

The program prints a line with its loss and time for each iteration, as nanoGPT does: "iter 3: loss 10.2, time 812.5ms". The first
--skip iterations of a run are not timed. Sides: torch as shipped, torch with MKL at full width and tcmalloc, and ours.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from fugaku_megatron.config.fields import check
from fugaku_megatron.text.table import Column

from . import core, preloads
from .disturbance import OTHERS, Watch

PRINTED = re.compile(r"iter \d+: loss ([\d.]+), time ([\d.]+)ms")
BACKEND = ("-m", "fugaku_megatron.torch_backend")
AUTOCAST = str(Path(__file__).with_name("autocast.py"))
SIDES = ("shipped", "full width and tcmalloc", "ours")
COLUMNS: tuple[Column, ...] = (
    ("side", "<24", "side"),
    ("ms", ">9.1f", "milliseconds"),
    ("x ours", ">7.3f", "ratio"),
    ("peak MiB", ">9.0f", "peak_mib"),
    ("last loss", ">10.4f", "loss"),
    ("loss error", ">11.1e", "loss_error"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this family."""
    parser.add_argument("program", help="Python file of the program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    parser.add_argument("--directory", type=Path, default=Path(), help="where it runs")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side, in turn")
    parser.add_argument("--autocast", action="store_true", help="BF16 where it has no autocast")
    parser.add_argument("--skip", type=int, default=2, help="iterations of a run before timing")


def environments() -> dict[str, dict[str, str]]:
    """Return the environment of each side's processes."""
    return {
        "shipped": preloads.environment(),
        "full width and tcmalloc": preloads.environment(
            *preloads.mkl_preload("full"), preloads.resolve("tcmalloc")
        ),
        "ours": preloads.environment(),
    }


def run_program(options: argparse.Namespace, side: str) -> dict[str, Any]:
    """Run the program once. Return its losses, milliseconds of the timed iterations and peak memory."""
    launcher = BACKEND if side == "ours" else ()
    autocast = (AUTOCAST,) if options.autocast else ()
    command = [sys.executable, *launcher, *autocast, options.program, *options.arguments]
    root = str(Path(__file__).resolve().parents[1])
    environment = {
        **environments()[side],
        "OMP_NUM_THREADS": str(options.threads),
        "PYTHONPATH": root,
        "PYTHONUNBUFFERED": "1",
    }
    with subprocess.Popen(
        command, cwd=options.directory, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        watch: Watch | None = None
        pairs = []
        for line in process.stdout:
            if not (printed := PRINTED.search(line)):
                continue
            pairs.append((float(printed[1]), float(printed[2])))
            watch = watch or Watch(options.threads)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    check(process.returncode == 0, f"{options.program}: exit status {process.returncode}")
    check(
        len(pairs) > options.skip,
        f"{options.program} printed {len(pairs)} iterations: more than --skip {options.skip} are needed",
    )
    return {
        "losses": [loss for loss, _ in pairs],
        "milliseconds": [milliseconds for _, milliseconds in pairs[options.skip :]],
        "peak_mib": usage.ru_maxrss / 1024,
        "busy": watch is not None and watch.others() > OTHERS,
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run every side in turn. ratio: a side's median time over ours; loss_error: the largest difference from "shipped"."""
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for number in range(options.rounds):
        for side in SIDES:
            run = run_program(options, side)
            runs[side].append(run)
            typical = statistics.median(run["milliseconds"])
            print(f"  round {number}: {side} {typical:.1f} ms{core.mark(run['busy'])}", flush=True)
    medians = {
        side: statistics.median(value for run in each for value in run["milliseconds"])
        for side, each in runs.items()
    }
    expected = runs["shipped"][0]["losses"]
    rows = [
        {
            "side": side,
            "milliseconds": medians[side],
            "ratio": medians[side] / medians["ours"],
            "peak_mib": statistics.median(run["peak_mib"] for run in each),
            "loss": each[0]["losses"][-1],
            "loss_error": max(abs(a - b) for a, b in zip(each[0]["losses"], expected)),
            "busy": any(run["busy"] for run in each),
        }
        for side, each in runs.items()
    ]
    return {"threads": options.threads, "rows": rows}


def text(options: argparse.Namespace, result: dict[str, Any]) -> str:
    """Return the table of the sides."""
    head = f"{result['cpu']}, {result['threads']} threads: {options.program}, medians of iterations"
    return f"{head}\n{core.table(COLUMNS, result['rows'])}"
