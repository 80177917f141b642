"""Times cases in turn with their baselines, beside the machine's own limits measured in the same run; prints rows, writes JSON.

Every round runs the kernels, the baseline and a loop of independent multiply-adds once, and then the same work in the processes of
rivals (rivals.py), so that all of them meet the same clock and the same neighbours; figures are medians over the rounds. FLOPs and
bytes of a case are those of its kernels' rows (kernels_sve/kernels.inc). Memory is set up as the trainer sets it up
(allocator.tune), for all sides. A round in which somebody else had one of our cores (disturbance.py) is run again, up to PATIENCE
times as many rounds; a row that never saw enough quiet says so.
Left out: what is compared (gemm.py and the other families). Test: python -m benchmarks gemm --recipe demo
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fugaku_megatron.config.checks import check
from fugaku_megatron.host import allocator, kernels, runtime
from fugaku_megatron.host.runtime import fma_gflops, fma_peak_gflops

from . import mkl, openblas, shapes
from .child import Child, python
from .disturbance import Settling, multiply_adds

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CLOCK_STEPS = 50_000_000
PATIENCE = 10
SHIPPED, OPENBLAS = "MKL shipped", "OpenBLAS"
PAUSE = 0.05  # s; threads of OpenMP and OpenBLAS spin for some tens of milliseconds after their work, then they sleep
TRIAD_ELEMENTS = 1 << 25  # three arrays of 128 MiB: beyond the caches


class Call:
    """A call of a kernel by its name, with its arguments: run() makes it."""

    def __init__(self, name: str, *args: Any, **kwargs: Any) -> None:
        self.name, self.args, self.kwargs = name, args, kwargs
        self.run = functools.partial(getattr(kernels, name), *args, **kwargs)

    @property
    def flops(self) -> float:
        """Multiplies and adds counted apart; 0 for a kernel that is bound by memory."""
        return kernels.table.flops(self.name, *self.args, **self.kwargs)

    @property
    def bytes(self) -> float:
        """That it must read and write."""
        return kernels.table.bytes(self.name, *self.args, **self.kwargs)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison. `run`, `baseline_run` and `openblas_run` do the same work once, the last where OpenBLAS has it; `error`
    compares what `run` left with double precision.
    """

    op: str
    shape: tuple[int, ...]
    calls: tuple[Call, ...]
    baseline: str
    baseline_run: Callable[[], object]
    error: Callable[[], float]
    openblas_run: Callable[[], object] | None = None
    details: dict = field(default_factory=dict)

    def run(self) -> None:
        """The kernels, one after another."""
        for call in self.calls:
            call.run()

    @property
    def name(self) -> str:
        """What --only selects by."""
        return f"{self.op} {'x'.join(map(str, self.shape))}"


class Rival(Child):
    """The parent's end. `name` says which library it is, and which of its kernels run."""

    def __init__(self, kind: str, words: Sequence[str], environment: dict[str, str]) -> None:
        super().__init__(python("rivals", kind, *words), environment, kind)
        self.ready = self.answer()
        self.name = self.ready["name"]

    def take_turn(self) -> tuple[float, bool]:
        """(seconds of the case that `ask("next")` went to, whether nobody disturbed it)."""
        time.sleep(PAUSE)
        done = self.ask("run")
        time.sleep(PAUSE)
        return done["seconds"], done["quiet"]


def start_rivals(stack: ExitStack, options: argparse.Namespace, case: Case, words: Sequence[str]) -> list[Rival]:
    """Those that differ from what this process measures; they end with the stack.

    case: the family's first one. words: a command line with these options. Where numpy has no OpenBLAS, a line says so.
    """
    environments = {}
    if options.mkl == mkl.BOTH and mkl.narrowed():
        environments[SHIPPED] = mkl.environment("shipped")
    if case.openblas_run is not None:
        environments[OPENBLAS] = {**mkl.environment("shipped"), **openblas.environment(options.threads)}
    threads = {"OMP_NUM_THREADS": str(options.threads)}
    started = [stack.enter_context(Rival(kind, words, {**environment, **threads})) for kind, environment in environments.items()]
    for rival in started:
        if "missing" in rival.ready:
            print(f"no {rival.name}: {rival.ready['missing']}", flush=True)
    return [rival for rival in started if "missing" not in rival.ready]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of every family."""
    parser.add_argument("--target", default=kernels.active(), help="kernel target, or all (default: %(default)s)")
    parser.add_argument("--dtype", default="fp32", choices=DTYPES)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    mkl.add_argument(parser, "torch's", both=True)
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds of each row (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose name holds TEXT")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE")


def seconds(f: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    f()
    return time.perf_counter() - start


def machine() -> dict:
    """Clock in GHz from dependent additions, FMA peak in GFLOP/s, triad bandwidth in GB/s (12 bytes an element); best of five."""
    x, y, out = (torch.ones(TRIAD_ELEMENTS) for _ in range(3))
    triad = min(seconds(lambda: kernels.bench_triad(out, x, y, 2.0)) for _ in range(5))
    clock = min(seconds(lambda: kernels.bench_clock(CLOCK_STEPS)) for _ in range(5))
    return {"clock_ghz": CLOCK_STEPS / clock / 1e9, "fma_gflops": fma_peak_gflops(5),
            "triad_gb_per_second": 12 * TRIAD_ELEMENTS / triad / 1e9}


def measure(case: Case, options: argparse.Namespace, target: str, limits: dict, settling: Settling,
            others: Sequence[Rival]) -> dict:
    """The row of one case; the rate of operations is None where memory bounds it. others: rivals, which are at the case before."""
    case.run()
    max_error = case.error()
    case.baseline_run()
    for rival in others:
        rival.ask("next")
    rounds, busy = timed_rounds(case, options, settling, others)
    ours, baseline, peak, *theirs = (statistics.median(column) for column in zip(*rounds, strict=True))
    flops, rate = sum(call.flops for call in case.calls), sum(call.bytes for call in case.calls) / ours / 1e9
    gflops = flops / ours / 1e9 if flops else None
    return {"op": case.op, "shape": list(case.shape), "dtype": options.dtype, "target": target, "threads": options.threads,
            "seconds": ours, "gflops": gflops, "baseline": case.baseline, "baseline_seconds": baseline, "ratio": baseline / ours,
            "peak_gflops": peak, "peak_fraction": gflops and gflops / peak, "gb_per_second": rate,
            "bandwidth_fraction": rate / limits["triad_gb_per_second"],
            "rivals": {rival.name: {"seconds": one, "ratio": one / ours} for rival, one in zip(others, theirs, strict=True)},
            "max_error": max_error, "busy": busy, "repeat": repeat_line(case, options, target), **case.details}


def timed_rounds(case: Case, options: argparse.Namespace, settling: Settling,
                 others: Sequence[Rival]) -> tuple[list[tuple[float, ...]], bool]:
    """Rounds as `one_round` has them, and whether the machine was too busy to find quiet ones."""
    everything, quiet = [], []
    while len(quiet) < options.rounds and len(everything) < PATIENCE * options.rounds:
        columns, alone = one_round(case, options.threads, settling, others, len(everything) % 2 == 1)
        everything.append(columns)
        quiet += [columns] * alone
    busy = len(quiet) < options.rounds
    return (everything if busy else quiet), busy


def one_round(case: Case, threads: int, settling: Settling, others: Sequence[Rival],
              baseline_first: bool) -> tuple[tuple[float, ...], bool]:
    """((seconds, the baseline's, GFLOP/s of multiply-adds, the rivals' seconds), whether other processes left us the cores).

    Who comes second finds what both read in the caches.
    """
    def both() -> tuple[float, float, float]:
        before = seconds(case.baseline_run) if baseline_first else None
        own = seconds(case.run)
        return own, seconds(case.baseline_run) if before is None else before, fma_gflops()

    own, quiet = settling.run(both, time.process_time, threads)
    turns = [rival.take_turn() for rival in others]
    return (*own, *(each for each, _ in turns)), quiet and all(alone for _, alone in turns)


def repeat_line(case: Case, options: argparse.Namespace, target: str) -> str:
    """The command that measures this row again."""
    return shlex.join(["python", "-m", "benchmarks", *words(options), f"--target={target}", f"--only={case.name}"])


def words(options: argparse.Namespace) -> list[str]:
    """The family and the options that are not at their defaults, without those that say which rows, and where to."""
    changed = {name: value for name, value in vars(options).items() if value != options.defaults.get(name, value)}
    return [options.family, *(f"--{name.replace('_', '-')}={value}" for name, value in changed.items()
                              if name not in ("json", "only", "target"))]


def command_line() -> str:
    """The command of this process, to be run again."""
    return shlex.join(["python", "-m", __package__, *sys.argv[1:]])


def geometric_mean(values: list[float]) -> float:
    """exp of the mean logarithm."""
    return math.exp(statistics.fmean(map(math.log, values)))


def selected(options: argparse.Namespace, cases: Callable[[argparse.Namespace], Iterator[Case]]) -> Iterator[Case]:
    """The cases that --only leaves."""
    return (case for case in cases(options) if options.only in case.name)


def rows(options: argparse.Namespace, cases: Callable[[argparse.Namespace], Iterator[Case]], limits: dict) -> Iterator[dict]:
    """Measures every selected case on every selected target."""
    for target in kernels.runnable_targets() if options.target == "all" else [options.target]:
        with kernels.target(target), ExitStack() as stack:
            others: list[Rival] | None = None
            settling = Settling(multiply_adds)
            for case in selected(options, cases):
                if others is None:
                    others = start_rivals(stack, options, case, [*words(options), f"--only={options.only}"])
                yield measure(case, options, target, limits, settling, others)


def line(row: dict) -> str:
    """A row as printed."""
    fraction, rate = ("peak_fraction", f"{row['gflops']:8.1f} GFLOP/s") if row["gflops"] is not None else (
        "bandwidth_fraction", f"{row['gb_per_second']:8.1f} GB/s   ")
    limit = "FMA peak" if fraction == "peak_fraction" else "triad   "
    shape = "x".join(map(str, row["shape"]))
    return (f"{row['op']:>17} {shape:>16} {row['dtype']} {row['target']:>10} {row['seconds'] * 1e3:9.3f} ms "
            f"{rate} {100 * row[fraction]:5.1f} % of {limit}  {ratios(row)}  error {row['max_error']:.1e}"
            + ("  BUSY MACHINE" if row["busy"] else ""))


def ratios(row: dict) -> str:
    """Of the baseline and the rivals."""
    all_ratios = {row["baseline"]: row["ratio"], **{name: rival["ratio"] for name, rival in row["rivals"].items()}}
    return "  ".join(f"{ratio:.3f} x {name}" for name, ratio in all_ratios.items())


def totals(done: list[dict]) -> str:
    """Geometric means of all rows."""
    of_each = {"the baseline": [row["ratio"] for row in done]}
    for name in done[0]["rivals"]:
        of_each[name] = [row["rivals"][name]["ratio"] for row in done]
    means = ", ".join(f"{geometric_mean(some):.3f} x {name} (min {min(some):.3f})" for name, some in of_each.items())
    busy = sum(row["busy"] for row in done)
    fractions = [r["peak_fraction"] for r in done if r["peak_fraction"] is not None]
    return (f"geometric mean of {len(done)} rows: {means}"
            + (f", {100 * geometric_mean(fractions):.1f} % of FMA peak" if fractions else "")
            + (f"; {busy} rows on a busy machine" if busy else ""))


def run(options: argparse.Namespace, cases: Callable[[argparse.Namespace], Iterator[Case]]) -> None:
    """Prints a line per row and the geometric means; writes --json. ValueError when --only selects nothing."""
    for name in ("rounds", "threads"):
        check(getattr(options, name) > 0, f"--{name} {getattr(options, name)}: give 1 or more")
    known = [*kernels.runnable_targets(), "all"]
    check(options.target in known, f"--target {options.target} cannot run here: give {' or '.join(known)}")
    shapes.run_of(options)  # refuses sizes that do not fit, before anything is measured
    torch.set_num_threads(options.threads)
    memory, limits, done = allocator.tune("tuned"), machine(), []
    print(f"{runtime.cpu_model()}, {options.threads} threads, torch {torch.__version__} with MKL {mkl.width()}, allocator of both "
          f"sides: {memory}")
    print("machine: " + ", ".join(f"{name} {value:.4g}" for name, value in limits.items()), flush=True)
    for row in rows(options, cases, limits):
        done.append(row)
        print(line(row), flush=True)
        print(f"{'':>17} {row['repeat']}", flush=True)
    check(done != [], f"--only {options.only!r}: no row has this in its name")
    print(totals(done), flush=True)
    if options.json:
        report = {"command": sys.argv[1:], "torch": torch.__version__, "mkl": mkl.width(), "cpu": runtime.cpu_model(),
                  "allocator": memory, "machine": limits, "rows": done}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
