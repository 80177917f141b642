"""Times cases of kernels in turn with their baselines, next to the machine's own limits measured in the same run.

A family of kernels is a module with `cases(options)` that makes the rest of a family (core.py) from it: `measure, text =
driver.family(cases)`. Every round runs the kernels, the baseline and a loop of independent multiply-adds once, and then the same
work in other processes (`Rival`): which kernels MKL and OpenBLAS use is settled when a process starts, so torch with its MKL as
shipped and OpenBLAS need processes of their own. These make the same cases and sleep while others compute. So all sides meet the
same clock and the same neighbours; figures are medians over the rounds. FLOPs and bytes of a case come from its kernels' rows
(kernels_sve/kernels.inc). Memory is set up as the trainer sets it up (allocator.tune), for all sides. A round in which another
process had one of our cores (disturbance.py) is run again, up to PATIENCE times as many rounds; a row with too few quiet rounds
says so.
Left out: what is compared (gemm.py and the other families). Test: python -m benchmarks gemm --recipe demo
"""

from __future__ import annotations

import argparse
import functools
import importlib
import math
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from fugaku_megatron.config.fields import check
from fugaku_megatron.host import allocator, kernel_costs, kernels
from fugaku_megatron.host.machine import (
    clock_ghz,
    cpu_model,
    fma_gflops,
    fma_peak_gflops,
    triad_gbs,
)
from fugaku_megatron.host.timing import seconds

from . import child, core, openblas, preloads, shapes
from .disturbance import Settling, multiply_adds

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
INT8 = "int8"  # --dtype of BF16 operands that are quantized while they are packed
CLOCK_STEPS = 50_000_000
PATIENCE = 10
TORCH = "torch"
SHIPPED = "MKL shipped"
OPENBLAS = "OpenBLAS"
PAUSE = 0.05  # s; threads of OpenMP and OpenBLAS spin for some tens of milliseconds after their work, then they sleep
TRIAD_ELEMENTS = 1 << 25  # three arrays of 128 MiB: beyond the caches
Cases = Callable[[argparse.Namespace], Iterator["Case"]]


class Call:
    """A call of a kernel by its name, with its arguments: run() makes it."""

    def __init__(self, name: str, *args: Any, **kwargs: Any) -> None:
        self.name = name
        self.args = args
        self.kwargs = kwargs
        self.run = functools.partial(getattr(kernels, name), *args, **kwargs)

    @property
    def flops(self) -> float:
        """Multiplies and adds counted apart; 0 for a kernel that is bound by memory."""
        return kernel_costs.flops(self.name, *self.args, **self.kwargs)

    @property
    def bytes(self) -> float:
        """Bytes that the call must read and write."""
        return kernel_costs.moved_bytes(self.name, *self.args, **self.kwargs)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison. `run` and `baseline_run` do the same work once; `error` compares what the first `run` left with double precision.

    rivals: by name, functions that prepare the same work in a rival's process and return what does it once.
    """

    op: str
    shape: tuple[int, ...]
    calls: tuple[Call, ...]
    baseline_run: Callable[[], object]
    error: Callable[[], float]
    baseline: str = TORCH
    rivals: Mapping[str, Callable[[], Callable[[], object]]] = field(default_factory=dict)
    details: dict = field(default_factory=dict)
    shows_bandwidth: bool = False  # beside the rate of operations

    def run(self) -> None:
        """Run the kernels, one after another."""
        for call in self.calls:
            call.run()

    @property
    def name(self) -> str:
        """Name that --only selects by."""
        return f"{self.op} {'x'.join(map(str, self.shape))}"


def relative_error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest exact value. Any shape."""
    return float((ours.double() - exact).abs().max() / exact.abs().max())


def add_arguments(parser: argparse.ArgumentParser, dtypes: Sequence[str] = tuple(DTYPES)) -> None:
    """Add the options of every family of kernels. dtypes: choices of --dtype."""
    shapes.add_arguments(parser)
    parser.add_argument(
        "--target", default=kernels.active(), help="kernel target, or all (default: %(default)s)"
    )
    parser.add_argument("--dtype", default="fp32", choices=dtypes)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    preloads.add_mkl(parser, "torch's", both=True)
    parser.add_argument(
        "--rounds", type=int, default=9, help="timed rounds of each row (default: %(default)s)"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose name holds TEXT")


def family(cases: Cases) -> tuple[Callable[..., dict[str, Any]], Callable[..., str]]:
    """Return `measure` and `text` of a family that compares `cases`."""
    return functools.partial(measure, cases), text


def measure(cases: Cases, options: argparse.Namespace) -> dict[str, Any]:
    """Measure every selected case on every selected target; print each row. ValueError when --only selects nothing."""
    known = [*kernels.runnable_targets(), "all"]
    check(
        options.target in known,
        f"--target {options.target} cannot run here: pass {' or '.join(known)}",
    )
    shapes.run_of(options)  # refuses sizes that do not fit, before anything is measured
    torch.set_num_threads(options.threads)
    memory = allocator.tune("tuned")
    limits = machine(options.dtype)
    done = []
    print(
        f"{cpu_model()}, {options.threads} threads, torch {torch.__version__} with MKL {preloads.mkl_width()}, allocator "
        f"of both sides: {memory}"
    )
    print(
        "machine: " + ", ".join(f"{name} {value:.4g}" for name, value in limits.items()), flush=True
    )
    for target in kernels.runnable_targets() if options.target == "all" else [options.target]:
        with kernels.target(target), ExitStack() as stack:
            rivals: list[Rival] | None = None
            settling = Settling(multiply_adds)
            for case in selected(cases, options):
                rivals = start_rivals(stack, options, case) if rivals is None else rivals
                done.append(measured_row(case, options, target, limits, settling, rivals))
                print(f"{line(done[-1])}\n{'':>17} {done[-1]['repeat']}", flush=True)
    check(done != [], f"--only {options.only!r}: no row has this in its name")
    return {
        "command": sys.argv[1:],
        "torch": torch.__version__,
        "mkl": preloads.mkl_width(),
        "allocator": memory,
        "machine": limits,
        "rows": done,
    }


def machine(dtype: str) -> dict:
    """Measure the clock in GHz from dependent additions, FMA peak in GFLOP/s, triad bandwidth in GB/s (12 bytes an element).

    Rows of --dtype int8 add the peak of INT8 in Gop/s.
    """
    int8 = {"int8_gops": fma_peak_gflops(5, int8=True)} if dtype == INT8 else {}
    return {
        "clock_ghz": clock_ghz(CLOCK_STEPS),
        "fma_gflops": fma_peak_gflops(5),
        **int8,
        "triad_gb_per_second": triad_gbs(TRIAD_ELEMENTS),
    }


def selected(cases: Cases, options: argparse.Namespace) -> Iterator[Case]:
    """Return the cases that --only leaves."""
    return (case for case in cases(options) if options.only in case.name)


def measured_row(
    case: Case,
    options: argparse.Namespace,
    target: str,
    limits: dict,
    settling: Settling,
    rivals: Sequence[Rival],
) -> dict:
    """Measure the row of one case; the rate of operations is None where memory bounds it. rivals: are at the case before."""
    case.run()
    max_error = case.error()
    case.baseline_run()
    for rival in rivals:
        rival.ask("next")
    turns, discarded = core.quiet_rounds(
        lambda number: one_round(case, options, settling, rivals, number % 2 == 1),
        options.rounds,
        PATIENCE,
    )
    ours, baseline, peak, *theirs = (
        statistics.median(column) for column in zip(*turns, strict=True)
    )
    flops = sum(call.flops for call in case.calls)
    rate = sum(call.bytes for call in case.calls) / ours / 1e9
    gflops = flops / ours / 1e9 if flops else None
    return {
        "op": case.op,
        "shape": list(case.shape),
        "dtype": options.dtype,
        "target": target,
        "threads": options.threads,
        "seconds": ours,
        "gflops": gflops,
        "baseline": case.baseline,
        "baseline_seconds": baseline,
        "ratio": baseline / ours,
        "peak_gflops": peak,
        "peak_fraction": gflops and gflops / peak,
        "gb_per_second": rate,
        "bandwidth_fraction": rate / limits["triad_gb_per_second"],
        "shows_bandwidth": case.shows_bandwidth,
        "rivals": {
            rival.name: {"seconds": one, "ratio": one / ours}
            for rival, one in zip(rivals, theirs, strict=True)
        },
        "max_error": max_error,
        "busy": discarded < 0,
        "repeat": repeat_line(case, options, target),
        **case.details,
    }


def one_round(
    case: Case,
    options: argparse.Namespace,
    settling: Settling,
    rivals: Sequence[Rival],
    baseline_first: bool,
) -> tuple[tuple[float, ...], bool]:
    """Return ((seconds, the baseline's, GFLOP/s of multiply-adds, the rivals' seconds), whether other processes left us the cores).

    The second of the two finds what both read in the caches.
    """

    def both() -> tuple[float, float, float]:
        before = seconds(case.baseline_run) if baseline_first else None
        own = seconds(case.run)
        theirs = seconds(case.baseline_run) if before is None else before
        return own, theirs, fma_gflops(int8=options.dtype == INT8)

    own, quiet = settling.run(both, time.process_time, options.threads)
    turns = [rival.take_turn() for rival in rivals]
    return (*own, *(each for each, _ in turns)), quiet and all(alone for _, alone in turns)


def repeat_line(case: Case, options: argparse.Namespace, target: str) -> str:
    """Return the command that measures this row again: options that are not at their defaults, and this row alone."""
    words = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in vars(options).items()
        if value != options.defaults.get(name, value) and name not in ("json", "only", "target")
    ]
    return shlex.join(
        [
            "python",
            "-m",
            "benchmarks",
            options.family,
            *words,
            f"--target={target}",
            f"--only={case.name}",
        ]
    )


def line(row: dict) -> str:
    """Return a row as printed."""
    bandwidth = f"{100 * row['bandwidth_fraction']:5.1f} % of triad"
    if row["gflops"] is None:
        speed = f"{row['gb_per_second']:8.1f} GB/s    {bandwidth}   "
    else:
        speed = (
            f"{row['gflops']:8.1f} GFLOP/s {100 * row['peak_fraction']:5.1f} % of {peak_name(row)}"
        )
        if row["shows_bandwidth"]:
            speed += f"  {row['gb_per_second']:.1f} GB/s {bandwidth}"
    all_ratios = {
        row["baseline"]: row["ratio"],
        **{name: rival["ratio"] for name, rival in row["rivals"].items()},
    }
    ratios = "  ".join(f"{ratio:.3f} x {name}" for name, ratio in all_ratios.items())
    return (
        f"{row['op']:>17} {'x'.join(map(str, row['shape'])):>16} {row['dtype']} {row['target']:>10} "
        f"{row['seconds'] * 1e3:9.3f} ms {speed}  {ratios}  "
        f"error {row['max_error']:.1e}" + core.mark(row["busy"])
    )


def peak_name(row: dict) -> str:
    """Return the name of the peak that a row's "peak_fraction" refers to."""
    return "INT8 peak" if row["dtype"] == INT8 else "FMA peak"


def text(options: argparse.Namespace, result: dict[str, Any]) -> str:
    """Return the geometric means of all rows."""
    rows = result["rows"]
    of_each = {
        "the baseline": [row["ratio"] for row in rows],
        **{name: [row["rivals"][name]["ratio"] for row in rows] for name in rows[0]["rivals"]},
    }
    means = ", ".join(
        f"{geometric_mean(some):.3f} x {name} (min {min(some):.3f})"
        for name, some in of_each.items()
    )
    busy = sum(row["busy"] for row in rows)
    fractions = [r["peak_fraction"] for r in rows if r["peak_fraction"] is not None]
    return (
        f"geometric mean of {len(rows)} rows: {means}"
        + (
            f", {100 * geometric_mean(fractions):.1f} % of {peak_name(rows[0])}"
            if fractions
            else ""
        )
        + (f"; {busy} rows on a busy machine" if busy else "")
    )


def geometric_mean(values: list[float]) -> float:
    """Return the exponential of the mean logarithm."""
    return math.exp(statistics.fmean(map(math.log, values)))


# Rivals in other processes --------------------------------------------------------------------------------------------------------


class Rival(child.Child):
    """The parent's end. `name` says which library it is, and which of its kernels run."""

    def __init__(self, kind: str, options: argparse.Namespace, environment: dict[str, str]) -> None:
        values = {
            name: value for name, value in vars(options).items() if name not in ("json", "defaults")
        }
        command = child.python("driver", {"kind": kind, "options": values})
        super().__init__(command, {**environment, "OMP_NUM_THREADS": str(options.threads)}, kind)
        self.ready = self.answer()
        self.name = self.ready["name"]

    def take_turn(self) -> tuple[float, bool]:
        """Return (seconds of the case that `ask("next")` went to, whether nobody disturbed it)."""
        time.sleep(PAUSE)
        done = self.ask("run")
        time.sleep(PAUSE)
        return done["seconds"], done["quiet"]


def start_rivals(stack: ExitStack, options: argparse.Namespace, case: Case) -> list[Rival]:
    """Start the rivals that differ from what this process measures; they end with the stack. Prints a line if numpy has no OpenBLAS.

    case: the family's first one.
    """
    environments = {}
    if case.baseline == TORCH and options.mkl == preloads.BOTH and preloads.narrowed():
        environments[SHIPPED] = preloads.mkl_environment("shipped")
    for kind in case.rivals:
        environments[kind] = preloads.mkl_environment("shipped")
        if kind == OPENBLAS:
            environments[kind] |= openblas.environment(options.threads)
    started = [
        stack.enter_context(Rival(kind, options, environment))
        for kind, environment in environments.items()
    ]
    for rival in started:
        if "missing" in rival.ready:
            print(f"no {rival.name}: {rival.ready['missing']}", flush=True)
    return [rival for rival in started if "missing" not in rival.ready]


def introduction(kind: str) -> dict[str, str]:
    """Return the name of a rival's library, and what is missing for it."""
    if kind != OPENBLAS:
        return {"name": kind}
    try:
        return {"name": f"{OPENBLAS} {openblas.core()}"}
    except ValueError as error:
        return {"name": OPENBLAS, "missing": str(error)}


def main() -> None:
    """Run a rival's process, which answers the lines "next" and "run"."""
    order, answer = child.order()
    kind = order["kind"]
    options = argparse.Namespace(**order["options"])
    torch.set_num_threads(options.threads)
    allocator.tune("tuned")
    answer(introduction(kind))
    cases = selected(importlib.import_module(f"{__package__}.{options.family}").cases, options)
    run = settling = None
    for request in sys.stdin:
        settling = settling or Settling(openblas.work if kind == OPENBLAS else multiply_adds)
        if request == "next\n":
            case = next(cases)
            run = case.rivals[kind]() if kind in case.rivals else case.baseline_run
            run()
            answer({})
        else:
            taken, quiet = settling.run(functools.partial(seconds, run), time.thread_time, 1)
            answer({"seconds": taken, "quiet": quiet})


if __name__ == "__main__":
    main()
