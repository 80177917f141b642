"""Memory allocators under real training: stock glibc, tuned glibc (ours, no preload), tcmalloc, jemalloc, mimalloc.

    python -m benchmarks alloc --json alloc.json --png alloc.png         every combination, in turn
    python -m benchmarks alloc --quick                                   a small model, few iterations
    python -m benchmarks alloc --kernels torch --ranks 1 --allocators stock tuned tcmalloc
    python -m benchmarks alloc --from-logs stock/stdout tcmalloc/stdout  runs of a cluster, such as compare_tcmalloc.sh's

Every figure is read from the log of `mpiexec ... pretrain_gpt.py` with data-parallel ranks. With --kernels torch a step allocates
and frees its tensors as PyTorch programs do, as in the published tables with and without tcmalloc. --from-logs prints the published
table of logs of one run with several allocators, the first the baseline. Left out: starting jobs (jobs.py), reading a log
(fugaku_megatron/observe/log/run_log.py).
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fugaku_megatron.config.fields import check
from fugaku_megatron.costs.parameters import model_parameters
from fugaku_megatron.observe.log.log_command import energy_note, row_of, size_name
from fugaku_megatron.observe.log.run_log import LogSummary, read_log

from . import core, jobs, pictures, preloads, shapes

ALLOCATORS = ("stock", "tuned", *preloads.LIBRARIES)
KERNELS = ("native", "torch")
RECOMPUTE = ("none", "full")
QUICK = {"recipe": "demo", "iterations": 2, "rounds": 1}
MAY_DIFFER = ("cpu_frequency",)  # values in which runs of --from-logs may differ


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this family."""
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
    parser.add_argument(
        "--from-logs",
        nargs="+",
        type=Path,
        metavar="LOG",
        help="run nothing: the table of these logs of runs",
    )


def cells(options: argparse.Namespace) -> list[jobs.Cell]:
    """Every combination; a line for each allocator whose library is missing."""
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
    """A combination as its line names it."""
    return f"{cell.kernels} kernels, recompute {RECOMPUTE[cell.recompute]}, {cell.ranks} rank(s), {cell.allocator}"


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Every combination in turn. ratio: seconds with the stock allocator over the row's, None when stock was not measured."""
    if options.from_logs:
        check(
            not options.json and not options.png,
            "--from-logs prints a table; for files use fugaku-megatron log",
        )
        return {"logs": text_of_logs(read(options.from_logs))}
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
    """Tables with the published columns, one for each combination of kernels and recompute."""
    if options.from_logs:
        return result["logs"]
    machine = f"measured, {result['cpu']}, {result['clock_ghz']:.2f} GHz"
    model = shapes.run_of(options).model
    parts = []
    for (kernels, recompute), group in itertools.groupby(
        result["rows"], lambda r: (r["kernels"], r["recompute"])
    ):
        software = f"PyTorch {result['torch']}, {kernels} kernels, {result['dtype']}: {machine}"
        title = jobs.published_title(
            result["recipe"], model.seq_length, recompute == "full", software
        )
        parts.append(
            jobs.published(f"### {title}", [published_cells(result, row) for row in group])
        )
    parts.append(
        f"A node here is a rank on this one machine, {result['threads']} threads for all ranks together; "
        f"faults and system time per iteration, of rank 0."
    )
    return "\n\n".join(parts)


def published_cells(result: dict[str, Any], row: dict[str, Any]) -> tuple[str, ...]:
    """A row in the published format; its notes name the allocator's page faults and system time."""
    ratio = f", {row['ratio']:.2f} x stock" if row["ratio"] and row["allocator"] != "stock" else ""
    notes = f"{row['allocator']}{ratio}, {row['minor_faults']:.0f} minor faults, {row['system_seconds']:.2f} s system time"
    model = {
        "recipe": result["recipe"],
        "tp": result["tensor_model_parallel_size"],
        "pp": 1,
        "mbs": result["micro_batch_size"],
        "gbs": result["global_batch_size"],
    }
    return jobs.published_cells({**row, **model}, notes)


draw = pictures.draw_allocators


def read(paths: Sequence[Path]) -> list[LogSummary]:
    """The logs. ValueError for a log that cannot be read, or that is of another run than the first."""
    check(
        len(paths) > 1,
        f"--from-logs {paths[0]}: pass two logs or more, the first is what the others are compared with",
    )
    logs = [read_log(path) for path in paths]
    first = _run(logs[0])
    for log in logs:
        check(
            log.job.run is not None,
            f"--from-logs {log.path}: has no 'run:' line; for logs of other programs use "
            "fugaku-megatron log with their flags",
        )
        check(
            log.finished,
            f"--from-logs {log.path}: the run is not at its end, or was killed; wait for it or pass another",
        )
        for name in sorted(first.keys() | _run(log).keys()):
            expected = first.get(name)
            actual = _run(log).get(name)
            check(
                actual == expected,
                f"--from-logs: {logs[0].path} has {name} {expected}, {log.path} {actual}: pass logs of one run",
            )
    return logs


def _run(log: LogSummary) -> dict[str, Any]:
    values = {name: value for name, value in log.job.values.items() if name not in MAY_DIFFER}
    return {**values, "nodes": log.job.nodes, "ranks": log.job.ranks}


def text_of_logs(logs: Sequence[LogSummary]) -> str:
    """The table with its title; in the notes the allocator and what it costs, and below the table where the rows are from."""
    run = logs[0].job.run
    title = jobs.published_title(
        size_name(model_parameters(run)),
        run.model.seq_length,
        run.training.recompute_granularity == "full",
        f"{run.precision.name}, measured",
    )
    rows = [row_of(log, _notes(logs[0], log)).cells() for log in logs]
    basis = [
        f"{log.path}: medians over {len(log.counted)} iterations; {log.machine}" for log in logs
    ]
    return "\n".join([jobs.published(f"### {title}", rows), "", *basis])


def _notes(first: LogSummary, log: LogSummary) -> str:
    parts = [jobs.allocator(log.machine)]
    if log is not first:
        parts.append(f"{first.seconds / log.seconds:.2f} x {jobs.allocator(first.machine)}")
    for name, form, unit in (
        ("minor_faults", ".0f", "minor faults"),
        ("system_seconds", ".2f", "s system time"),
    ):
        if values := [value for i in log.counted if (value := getattr(i, name)) is not None]:
            parts.append(f"{statistics.median(values):{form}} {unit}")
    if note := energy_note(log):
        parts.append(note)
    if log is not first and log.tokens_per_joule and first.tokens_per_joule:
        parts.append(
            f"{log.tokens_per_joule / first.tokens_per_joule:.2f} x the first row's tokens per joule"
        )
    return ", ".join(parts)
