"""The published tables' 124M configurations that fit this host: measured, and compared with the performance model.

    mpiexec -n 2 fugaku-megatron calibrate --output host.json            a rank for every thread
    python -m benchmarks tables --machine host.json --png tables.png     all rows, about 12 minutes on two cores
    python -m benchmarks tables --machine host.json --quick              four rows, below 3 minutes
    python -m benchmarks tables --machine host.json --rows "TP 2"        rows whose name holds the text

A row is a real `mpiexec ... pretrain_gpt.py` of a few micro-batches; ranks share this host's threads. The model is that of
`fugaku-megatron predict` on a calibration of this host. Left out: starting jobs (jobs.py), the picture (pictures.py).
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import asdict, replace
from typing import Any

import torch

from fugaku_megatron.config.fields import check
from fugaku_megatron.config.run_config import RunConfig
from fugaku_megatron.planner import machine, model, software
from fugaku_megatron.text.table import Column

from . import core, disturbance, jobs, pictures, preloads, shapes
from .jobs import Cell

TOKENS = 4096  # of an iteration, unless one micro-batch on each data-parallel rank has more
WARM_UP = 2  # iterations that do not count
ATTEMPTS = 3  # measurements of a row while other processes use this host's cores

SINGLE = Cell(seq=1024)
DP2 = replace(SINGLE, ranks=2)
TP2 = replace(SINGLE, ranks=2, tp=2)
PP2 = replace(SINGLE, ranks=2, pp=2)
LAYOUTS = (SINGLE, DP2, TP2, PP2)
ROWS = (  # in the order of the tables that they are shown in
    SINGLE,
    replace(SINGLE, allocator="tcmalloc"),
    replace(SINGLE, mbs=2),
    replace(SINGLE, mbs=4),
    DP2,
    replace(DP2, allocator="tcmalloc"),
    replace(DP2, mbs=2),
    TP2,
    replace(TP2, mbs=2),
    PP2,
    replace(PP2, mbs=2),
    *(replace(cell, recompute=True) for cell in LAYOUTS),
    *(replace(cell, seq=2048) for cell in LAYOUTS),
    replace(SINGLE, seq=2048, recompute=True),
)
QUICK = {"iterations": 1, "tokens": 2048}

PUBLISHED_BATCH = 1024  # samples of an iteration in the published tables
COLUMNS: tuple[Column, ...] = (
    ("row", "<50", "name"),
    ("GBS", ">4", "gbs"),
    ("s", ">7.2f", "seconds"),
    ("model s", ">8.2f", "model_seconds"),
    ("error %", ">8", lambda row: f"{row['time_error_percent']:+.1f}"),
    ("MiB", ">6", "peak_memory_mib"),
    ("model MiB", ">9.0f", "model_memory_mib"),
    ("error %", ">8", lambda row: f"{row['memory_error_percent']:+.1f}"),
    ("TFLOPs", ">7.3f", "tflops"),
    (f"s scaled to GBS {PUBLISHED_BATCH}, not measured", ">35.0f", "scaled_seconds"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this family."""
    parser.add_argument("--recipe", default="124m", choices=shapes.RECIPES)
    parser.add_argument(
        "--machine", metavar="FILE", help="what fugaku-megatron calibrate wrote on this host"
    )
    parser.add_argument(
        "--rows",
        default="",
        metavar="TEXT",
        help="rows whose name holds TEXT, such as 'TP 2' or 'recompute'",
    )
    parser.add_argument(
        "--quick", action="store_true", help="four rows, one timed iteration of half the tokens"
    )
    parser.add_argument(
        "--iterations",
        type=int,
        default=2,
        help=f"timed ones, after {WARM_UP} others (default: %(default)s)",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=TOKENS,
        help="of an iteration, at least (default: %(default)s)",
    )
    jobs.add_threads(parser)
    parser.set_defaults(dtype="fp32")


def name_of(cell: Cell) -> str:
    """Return the name that --rows selects by."""
    words = [f"s {cell.seq}", f"DP {cell.dp}", f"TP {cell.tp}", f"PP {cell.pp}", f"MBS {cell.mbs}"]
    words += ["recompute"] if cell.recompute else []
    return ", ".join(words + ([cell.allocator] if cell.allocator != "tuned" else []))


def batch_of(tokens: int, cell: Cell) -> int:
    """Return the samples of an iteration: at least so many tokens, and a micro-batch on each data-parallel rank."""
    each = cell.mbs * cell.dp
    return max(1, tokens // cell.seq // each) * each


def config(recipe: str, tokens: int, cell: Cell) -> RunConfig:
    """Return the run of a row."""
    options = argparse.Namespace(recipe=recipe, micro_batch_size=cell.mbs)
    return shapes.run_of(options, **cell.fields(batch_of(tokens, cell)))


def job(options: argparse.Namespace, cell: Cell) -> jobs.Job:
    """Return the training job of a row. ValueError when the model does not divide."""
    return jobs.job(options, cell, batch_of(options.tokens, cell), options.iterations, WARM_UP)


def plan(options: argparse.Namespace) -> dict[Cell, jobs.Job]:
    """Return the chosen rows with their jobs; print the rows that this host cannot run."""
    cells = LAYOUTS if options.quick else ROWS
    planned = {}
    for cell in (cell for cell in cells if options.rows in name_of(cell)):
        if line := preloads.missing(cell.allocator):
            print(f"skipped {name_of(cell)}: {line}")
        elif cell.ranks > options.threads:
            print(
                f"skipped {name_of(cell)}: {cell.ranks} ranks need as many threads, --threads is {options.threads}"
            )
        else:
            planned[cell] = job(options, cell)
    check(
        planned != {},
        f"--rows {options.rows!r}: no row that this host can run has this in its name; a name is "
        f"{name_of(cells[0])!r}",
    )
    return planned


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the rows, and print each with the model's figures."""
    core.apply_quick(options, QUICK)
    check(
        options.machine is not None,
        "--machine is missing: run fugaku-megatron calibrate --output FILE, and pass FILE",
    )
    host = machine.load(options.machine)
    planned = plan(options)
    rows = []
    for number, (cell, task) in enumerate(planned.items(), 1):
        measured = quiet(name_of(cell), task)
        rows.append(row_of(options, cell, measured, host))
        print(
            f"  {number} of {len(planned)}: {name_of(cell)}: {measured.seconds:.3f} s at "
            f"{measured.clock_ghz:.2f} GHz" + core.mark(rows[-1]["busy"]),
            flush=True,
        )
    errors = [abs(row["time_error_percent"]) for row in rows]
    return {
        "rows": rows,
        "mean_time_error_percent": statistics.fmean(errors),
        "largest_time_error_percent": max(errors),
        "mean_memory_error_percent": statistics.fmean(
            abs(row["memory_error_percent"]) for row in rows
        ),
        "recipe": options.recipe,
        "machine": host.title,
        "clock_ghz": statistics.fmean(row["clock_ghz"] for row in rows),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def quiet(name: str, task: jobs.Job) -> jobs.Measured:
    """Return the job's figures from the least disturbed of up to ATTEMPTS measurements; the first undisturbed one ends them."""

    def attempt(number: int) -> tuple[jobs.Measured, bool]:
        if number:
            print(f"  again, because others took too much of the cores: {name}", flush=True)
        measured = jobs.run(task)
        return measured, measured.others <= disturbance.OTHERS

    return min(core.quiet_rounds(attempt, 1, ATTEMPTS)[0], key=lambda measured: measured.others)


def row_of(
    options: argparse.Namespace, cell: Cell, measured: jobs.Measured, host: machine.Machine
) -> dict[str, Any]:
    """Return the measured and the modelled figures of a row; errors are the model's, in per cent of the measured figure."""
    system = model.System(
        machine=host,
        nodes=1,
        ranks_per_node=cell.ranks,
        software=software.load(software.THIS_PROJECT),
    )
    prediction = model.predict(config(options.recipe, options.tokens, cell), system)
    batch = batch_of(options.tokens, cell)
    return {
        "name": name_of(cell),
        **asdict(cell),
        "gbs": batch,
        **asdict(measured),
        "busy": measured.others > disturbance.OTHERS,
        "scaled_seconds": measured.seconds * PUBLISHED_BATCH / batch,
        "model_seconds": prediction.seconds,
        "model_memory_mib": prediction.memory_mib_max,
        "time_error_percent": 100 * (prediction.seconds / measured.seconds - 1),
        "memory_error_percent": 100 * (prediction.memory_mib_max / measured.peak_memory_mib - 1),
    }


def text(options: argparse.Namespace, result: dict[str, Any]) -> str:
    """Return the table, and the model's errors."""
    return "\n".join(
        [
            f"{result['recipe']}, native kernels, fp32: {pictures.measured_on(result)}",
            core.table(COLUMNS, result["rows"]),
            f"Model: software {software.THIS_PROJECT} on {result['machine']}. Mean absolute error of time "
            f"{result['mean_time_error_percent']:.1f} %, largest {result['largest_time_error_percent']:.1f} %; of memory "
            f"{result['mean_memory_error_percent']:.1f} %.",
        ]
    )


draw = pictures.draw_tables
