"""Memory allocators under real training: stock glibc, tuned glibc (ours, no preload), tcmalloc, jemalloc, mimalloc.

    python -m benchmarks alloc --json alloc.json --png alloc.png         every combination, in turn
    python -m benchmarks alloc --quick                                   a small model, few iterations
    python -m benchmarks alloc --kernels torch --ranks 1 --allocators stock tuned tcmalloc

Every figure is read from the log of `mpiexec ... pretrain_gpt.py` with data-parallel ranks. With --kernels torch a step allocates
and frees its tensors as PyTorch programs do, as in the published tables with and without tcmalloc. Left out: starting jobs
(jobs.py), logs of a cluster's jobs (fugaku-megatron log).
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from typing import Any

import torch

from fugaku_megatron.config.fields import check
from fugaku_megatron.text.table import Column

from . import core, jobs, pictures, preloads, shapes

ALLOCATORS = ("stock", "tuned", *preloads.LIBRARIES)
KERNELS = ("native", "torch")
RECOMPUTE = ("none", "full")
QUICK = {"recipe": "demo", "iterations": 2, "rounds": 1}
COLUMNS: tuple[Column, ...] = (
    ("kernels", "<7", "kernels"),
    ("recompute", "<9", "recompute"),
    ("ranks", ">5", "ranks"),
    ("allocator", "<9", "allocator"),
    ("s", ">8.3f", "seconds"),
    ("x stock", ">7.2f", "ratio"),
    ("faults", ">11.0f", "minor_faults"),
    ("system s", ">8.2f", "system_seconds"),
    ("MiB", ">6", "peak_memory_mib"),
    ("TFLOPs", ">7.3f", "tflops"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this family."""
    shapes.add_arguments(parser)
    parser.add_argument(
        "--global-batch-size", type=int, help="samples per iteration (default: 4 micro-batches)"
    )
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--allocators", nargs="+", default=list(ALLOCATORS), choices=ALLOCATORS)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=KERNELS)
    parser.add_argument("--recompute", nargs="+", default=list(RECOMPUTE), choices=RECOMPUTE)
    parser.add_argument(
        "--iterations", type=int, default=3, help="timed iterations of a job (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=2,
        help="jobs of each combination, in turn (default: %(default)s)",
    )
    jobs.add_threads(parser)
    parser.add_argument(
        "--quick", action="store_true", help="the demo's model, two iterations, one round"
    )


def cells(options: argparse.Namespace) -> list[jobs.Cell]:
    """Return every combination; print a line for each allocator whose library is missing."""
    absent = {name: line for name in options.allocators if (line := preloads.missing(name))}
    for line in absent.values():
        print(f"skipped {line}")
    present = [name for name in options.allocators if name not in absent]
    check(present != [], "--allocators: none of them is on this system")
    return [
        jobs.Cell(
            kernels=kernels,
            recompute=recompute == "full",
            ranks=ranks,
            allocator=name,
            mbs=options.micro_batch_size,
            tp=options.tensor_model_parallel_size,
        )
        for kernels, recompute, ranks, name in itertools.product(
            options.kernels, options.recompute, options.ranks, present
        )
    ]


def name_of(cell: jobs.Cell) -> str:
    """Return a combination as its line names it."""
    return f"{cell.kernels} kernels, recompute {RECOMPUTE[cell.recompute]}, {cell.ranks} rank(s), {cell.allocator}"


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every combination in turn. ratio: seconds with the stock allocator over the row's, None without stock."""
    core.apply_quick(options, QUICK)
    batch = options.global_batch_size or 4 * options.micro_batch_size
    planned = {
        name_of(cell): (cell, jobs.job(options, cell, batch, options.iterations))
        for cell in cells(options)
    }
    measured = jobs.in_turn({name: job for name, (_, job) in planned.items()}, options.rounds)
    rows = [
        {
            "kernels": cell.kernels,
            "recompute": RECOMPUTE[cell.recompute],
            "ranks": cell.ranks,
            "allocator": cell.allocator,
            **jobs.summary(measured[name]),
        }
        for name, (cell, _) in planned.items()
    ]
    stock = {
        (r["kernels"], r["recompute"], r["ranks"]): r["seconds"]
        for r in rows
        if r["allocator"] == "stock"
    }
    for row in rows:
        stock_seconds = stock.get((row["kernels"], row["recompute"], row["ranks"]))
        row["ratio"] = stock_seconds / row["seconds"] if stock_seconds else None
    names = (
        "recipe",
        "dtype",
        "micro_batch_size",
        "tensor_model_parallel_size",
        "iterations",
        "rounds",
        "threads",
    )
    return {
        "rows": rows,
        **{name: getattr(options, name) for name in names},
        "global_batch_size": batch,
        "torch": torch.__version__,
        "clock_ghz": statistics.median(row["clock_ghz"] for row in rows),
    }


def text(options: argparse.Namespace, result: dict[str, Any]) -> str:
    """Return the table. Faults and system seconds are of an iteration, of rank 0."""
    title = (
        f"{result['recipe']} {result['dtype']}, micro-batch {result['micro_batch_size']}, global batch "
        f"{result['global_batch_size']}, {result['threads']} threads for all ranks together: measured, "
        f"{result['cpu']}, {result['clock_ghz']:.2f} GHz, PyTorch {result['torch']}"
    )
    return f"{title}\n{core.table(COLUMNS, result['rows'])}"


draw = pictures.draw_allocators
