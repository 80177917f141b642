"""Memory allocators under real training: stock glibc, tuned glibc (ours, no preload), tcmalloc, jemalloc, mimalloc.

    python -m benchmarks alloc --json alloc.json --png alloc.png         every combination, in turn
    python -m benchmarks alloc --quick                                   a small model, few iterations
    python -m benchmarks alloc --kernels torch --ranks 1 --allocators stock tuned tcmalloc
    python -m benchmarks alloc --from-logs stock/stdout tcmalloc/stdout  runs of a cluster, such as compare_tcmalloc.sh's

Every figure is read from the log of `mpiexec ... pretrain_gpt.py` with data-parallel ranks. With --kernels torch a step allocates
and frees its tensors as PyTorch programs do, as in the published tables with and without tcmalloc. Left out: starting jobs
(jobs.py), logs of other runs (alloc_logs.py), the picture (pictures.py).
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fugaku_megatron.config.checks import check
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.config.outputs import pipe_table
from fugaku_megatron.host import runtime

from . import alloc_logs, disturbance, driver, jobs, pictures, preloads, published, shapes

ALLOCATORS = ("stock", "tuned", *preloads.LIBRARIES)
KERNELS = ("native", "torch")
RECOMPUTE = {"none": (), "full": ("--checkpoint-activations",)}
QUICK = {"recipe": "demo", "iterations": 2, "rounds": 1}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One combination of kernels, recompute, number of ranks and allocator."""

    kernels: str
    recompute: str
    ranks: int
    allocator: str

    def __str__(self) -> str:
        return f"{self.kernels} kernels, recompute {self.recompute}, {self.ranks} rank(s), {self.allocator}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this family."""
    shapes.add_arguments(parser)
    parser.add_argument("--global-batch-size", type=int, help="samples per iteration (default: 4 micro-batches)")
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--allocators", nargs="+", default=list(ALLOCATORS), choices=ALLOCATORS)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=KERNELS)
    parser.add_argument("--recompute", nargs="+", default=list(RECOMPUTE), choices=RECOMPUTE)
    parser.add_argument("--iterations", type=int, default=3, help="timed iterations of a job (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="jobs of each combination, in turn (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of all ranks together (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="the demo's model, two iterations, one round")
    parser.add_argument("--from-logs", nargs="+", type=Path, metavar="LOG", help="run nothing: the table of these logs of runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the rows into FILE")


def job(options: argparse.Namespace, cell: Cell) -> jobs.Job:
    """The training job of a combination. ValueError when the model does not divide or a library is missing."""
    size = options.global_batch_size or 4 * options.micro_batch_size
    config = shapes.run_of(options, global_batch_size=size)
    Layout.from_run(config, cell.ranks)
    flags = jobs.flags(options, config, 1 + options.iterations, cell.kernels, "--allocator",
                       "tuned" if cell.allocator == "tuned" else "stock", *RECOMPUTE[cell.recompute])
    preload = preloads.find(cell.allocator) if cell.allocator in preloads.LIBRARIES else None
    threads = jobs.threads_each(cell.ranks, options.threads)
    return jobs.Job(ranks=cell.ranks, threads=threads, flags=flags, preload=preload)


def plan(options: argparse.Namespace) -> dict[Cell, jobs.Job]:
    """Every combination with its job. Combinations whose library is missing are left out with a printed line."""
    absent = [name for name in options.allocators if name in preloads.LIBRARIES and preloads.find(name) is None]
    for name in absent:
        print(f"skipped {preloads.missing(name)}")
    present = [name for name in options.allocators if name not in absent]
    cells = itertools.starmap(lambda k, c, r, a: Cell(kernels=k, recompute=c, ranks=r, allocator=a),
                              itertools.product(options.kernels, options.recompute, options.ranks, present))
    return {cell: job(options, cell) for cell in cells}


def run(options: argparse.Namespace) -> None:
    """Measure the combinations in turn, print the tables, write --json and --png; or print the table of --from-logs."""
    if options.from_logs:
        check(not options.json and not options.png, "--from-logs prints a table; for files use fugaku-megatron log")
        return print(alloc_logs.text(alloc_logs.read(options.from_logs)))
    if options.quick:
        vars(options).update({name: value for name, value in QUICK.items() if getattr(options, name) == options.defaults[name]})
    for name in ("iterations", "rounds", "threads"):
        check(getattr(options, name) > 0, f"--{name} {getattr(options, name)}: give 1 or more")
    planned = plan(options)
    check(len(planned) > 0, "--allocators: none of them is on this system")
    measurements: dict[Cell, list[jobs.Measured]] = {cell: [] for cell in planned}
    for turn, (number, (cell, task)) in itertools.product(range(options.rounds), enumerate(planned.items(), 1)):
        measurements[cell].append(measured := jobs.run(task))
        check_allocator(cell, measured)
        print(f"  round {turn + 1} of {options.rounds}, {number} of {len(planned)}: {cell}: {measured.seconds:.3f} s", flush=True)
    result = report(options, measurements)
    print(text(options, result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.png:
        pictures.draw_allocators(options.png, result)


def check_allocator(cell: Cell, measured: jobs.Measured) -> None:
    """RuntimeError when the job ran with another allocator than requested: its figures would be misleading."""
    expected = cell.allocator if cell.allocator in preloads.LIBRARIES else f", {cell.allocator}"
    if expected not in measured.allocator:
        raise RuntimeError(f"{cell}: the job's log says allocator {measured.allocator}; is LD_PRELOAD passed on by this mpiexec?")


def report(options: argparse.Namespace, measurements: dict[Cell, list[jobs.Measured]]) -> dict[str, Any]:
    """The result as JSON. ratio: seconds with the stock allocator over the row's, None when stock was not measured."""
    rows = [{**asdict(cell), **summary(measured)} for cell, measured in measurements.items()]
    stock = {(r["kernels"], r["recompute"], r["ranks"]): r["seconds"] for r in rows if r["allocator"] == "stock"}
    for row in rows:
        stock_seconds = stock.get((row["kernels"], row["recompute"], row["ranks"]))
        row["ratio"] = stock_seconds / row["seconds"] if stock_seconds else None
    return {"rows": rows, "recipe": options.recipe, "dtype": options.dtype, "micro_batch_size": options.micro_batch_size,
            "global_batch_size": options.global_batch_size or 4 * options.micro_batch_size,
            "tensor_model_parallel_size": options.tensor_model_parallel_size, "iterations": options.iterations,
            "rounds": options.rounds, "threads": options.threads, "cpu": runtime.cpu_model(), "torch": torch.__version__,
            "clock_ghz": statistics.median(row["clock_ghz"] for row in rows), "repeat": driver.command_line()}


def summary(measured: list[jobs.Measured]) -> dict[str, Any]:
    """Medians over the rounds of one combination, and the largest memory."""
    names = ("seconds", "tflops", "minor_faults", "system_seconds", "clock_ghz")
    return {**{name: statistics.median(getattr(m, name) for m in measured) for name in names},
            "peak_memory_mib": max(m.peak_memory_mib for m in measured), "log": measured[-1].allocator,
            "busy": any(m.others > disturbance.OTHERS for m in measured)}


def text(options: argparse.Namespace, result: dict[str, Any]) -> str:
    """Tables with the published columns, one for each combination of kernels and recompute."""
    machine = f"measured, {result['cpu']}, {result['clock_ghz']:.2f} GHz"
    model = shapes.run_of(options).model
    parts = []
    for (kernels, recompute), group in itertools.groupby(result["rows"], lambda r: (r["kernels"], r["recompute"])):
        software = f"PyTorch {result['torch']}, {kernels} kernels, {result['dtype']}: {machine}"
        parts.append("### " + published.title(result["recipe"], model.seq_length, recompute == "full", software))
        parts.append("\n".join(pipe_table([published.header(), *(cells(result, row) for row in group)])))
    parts.append(f"A node here is a rank on this one machine, {result['threads']} threads for all ranks together; "
                 f"faults and system time per iteration, of rank 0.\n{result['repeat']}")
    return "\n\n".join(parts)


def cells(result: dict[str, Any], row: dict[str, Any]) -> tuple[str, ...]:
    """A row in the published format; its notes give the allocator's page faults and system time."""
    ratio = f", {row['ratio']:.2f} x stock" if row["ratio"] and row["allocator"] != "stock" else ""
    notes = f"{row['allocator']}{ratio}, {row['minor_faults']:.0f} minor faults, {row['system_seconds']:.2f} s system time"
    return published.cells(
        ranks=row["ranks"], ghz=row["clock_ghz"], size=result["recipe"], tp=result["tensor_model_parallel_size"], pp=1,
        micro_batch_size=result["micro_batch_size"], global_batch_size=result["global_batch_size"], mib=row["peak_memory_mib"],
        seconds=row["seconds"], tflops=row["tflops"], notes=notes + ("  BUSY MACHINE" if row["busy"] else ""))
