"""The published tables' 124M configurations that fit this host: measured, and compared with the performance model.

    python -m benchmarks tables --json host.json --png host.png          all rows, about 12 minutes on two cores
    python -m benchmarks tables --quick                                  a handful, below 3 minutes
    python -m benchmarks tables --rows "TP 2" --json tp.json             rows whose name holds the text
    python -m benchmarks tables --measured host.json tp.json --markdown  rows of earlier runs, modelled again

A row is a real `mpiexec ... pretrain_gpt.py` of a few micro-batches; ranks share this host's threads. The model
(fugaku_megatron.perf, software fugaku_megatron) uses a calibration of this host made in the same run, or --machine. Left out:
starting jobs (jobs.py), the picture (pictures.py).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from fugaku_megatron.config.fields import check
from fugaku_megatron.config.run_config import RunConfig
from fugaku_megatron.host.machine import cpu_model
from fugaku_megatron.planner import machine, model, software
from fugaku_megatron.text.table import write_csv

from . import core, disturbance, jobs, pictures, preloads, shapes
from .child import ROOT, mpiexec
from .jobs import Cell

TOKENS = 4096  # of an iteration, unless one micro-batch on each data-parallel rank has more
WARM_UP = 2  # iterations that do not count
CALIBRATION_SECONDS = 300  # a limit: it takes less than one minute
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
VARIED = ("ranks", "tp", "pp", "mbs", "seq", "recompute", "allocator")  # what a row is known by
QUICK = {"iterations": 1, "tokens": 2048}

PUBLISHED_BATCH = 1024  # samples of an iteration in the published tables
OUR_HEADER = (
    f"scaled to GBS {PUBLISHED_BATCH}, not measured",
    "model Sec/it",
    "model MiB",
    "time error %",
    "memory error %",
)
CSV_LEFT_OUT = ("machine", "model_breakdown")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this family."""
    parser.add_argument("--recipe", default="124m", choices=shapes.RECIPES)
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
    parser.add_argument(
        "--machine", metavar="FILE", help="of fugaku-megatron calibrate (default: calibrate now)"
    )
    parser.add_argument(
        "--measured",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="show the rows that --json wrote there instead of measuring, modelled again",
    )
    parser.add_argument(
        "--markdown", action="store_true", help="Markdown's headings around the tables"
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write one line per row to FILE")
    parser.set_defaults(dtype="fp32")


def name_of(cell: Cell) -> str:
    """Return the name that --rows selects by."""
    words = [f"s {cell.seq}", f"DP {cell.dp}", f"TP {cell.tp}", f"PP {cell.pp}", f"MBS {cell.mbs}"]
    words += ["recompute"] if cell.recompute else []
    return ", ".join(words + ([cell.allocator] if cell.allocator != "tuned" else []))


def cell_of(row: dict[str, Any]) -> Cell:
    """The configuration of a row."""
    return Cell(**{name: row[name] for name in VARIED})


def batch_of(tokens: int, cell: Cell) -> int:
    """Samples of an iteration: at least so many tokens, and a micro-batch on each data-parallel rank."""
    each = cell.mbs * cell.dp
    return max(1, tokens // cell.seq // each) * each


def config(recipe: str, tokens: int, cell: Cell) -> RunConfig:
    """The run of a row."""
    options = argparse.Namespace(recipe=recipe, micro_batch_size=cell.mbs)
    return shapes.run_of(options, **cell.fields(batch_of(tokens, cell)))


def job(options: argparse.Namespace, cell: Cell) -> jobs.Job:
    """The training job of a row. ValueError when the model does not divide."""
    return jobs.job(options, cell, batch_of(options.tokens, cell), options.iterations, WARM_UP)


def plan(options: argparse.Namespace) -> dict[Cell, jobs.Job]:
    """The chosen rows with their jobs; prints which rows are left out because this host cannot run them."""
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


def calibrate(options: argparse.Namespace) -> dict[str, Any]:
    """The contents of --machine, or a calibration made now with a rank for every thread, repeated while others disturb it."""
    if options.machine:
        machine.load(options.machine)
        return json.loads(Path(options.machine).read_text())

    def attempt(number: int) -> tuple[dict[str, Any], bool]:
        print(
            "calibrating this host" + (", again: others took its cores" if number else ""),
            flush=True,
        )
        watch = disturbance.Watch(options.threads)
        return calibrated(max(2, options.threads)), not watch.disturbed()

    return core.quiet_rounds(attempt, 1, ATTEMPTS)[0][-1]


def calibrated(ranks: int) -> dict[str, Any]:
    """The file that calibrate writes with `ranks` ranks of one thread each. RuntimeError when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "host.json"
        program = ["-m", "fugaku_megatron", "calibrate", "--output", str(path)]
        command = [mpiexec(), "-n", str(ranks), sys.executable, *program]
        environment = {**preloads.environment(None), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=CALIBRATION_SECONDS,
            cwd=ROOT,
        )
        if done.returncode:
            raise RuntimeError(
                f"{' '.join(command)} ended with exit code {done.returncode} and said: {done.stderr.strip()[-300:]}"
            )
        return json.loads(path.read_text())


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The rows, measured now or read from --measured, with the model's figures."""
    core.apply_quick(options, QUICK)
    return report(
        earlier_rows(options) if options.measured else measured_rows(options, plan(options))
    )


def measured_rows(
    options: argparse.Namespace, planned: dict[Cell, jobs.Job]
) -> list[dict[str, Any]]:
    """Measured rows, not modelled yet; prints each when it is done."""
    begin = time.perf_counter()
    rows = []
    host = calibrate(options)
    for number, (cell, task) in enumerate(planned.items(), 1):
        measured = quiet(name_of(cell), task)
        rows.append(
            {
                **asdict(measured),
                **{name: getattr(cell, name) for name in VARIED},
                "log": measured.allocator,
                "dp": cell.dp,
                "recipe": options.recipe,
                "gbs": batch_of(options.tokens, cell),
                "tokens": options.tokens,
                "threads": task.threads,
                "busy": measured.others > disturbance.OTHERS,
                "cpu": cpu_model(),
                "torch": torch.__version__,
                "date": time.strftime("%Y-%m-%d"),
                "machine": host,
            }
        )
        print(
            f"  {number} of {len(planned)}, {(time.perf_counter() - begin) / 60:.1f} min: {name_of(cell)}: "
            f"{measured.seconds:.3f} s at {measured.clock_ghz:.2f} GHz"
            + core.mark(rows[-1]["busy"]),
            flush=True,
        )
    return rows


def quiet(name: str, task: jobs.Job) -> jobs.Measured:
    """The job's figures from the least disturbed of up to ATTEMPTS measurements; the first undisturbed one ends them."""

    def attempt(number: int) -> tuple[jobs.Measured, bool]:
        if number:
            print(f"  again, because others took too much of the cores: {name}", flush=True)
        measured = jobs.run(task)
        return measured, measured.others <= disturbance.OTHERS

    return min(core.quiet_rounds(attempt, 1, ATTEMPTS)[0], key=lambda measured: measured.others)


def earlier_rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of --measured in the tables' order, of each name the last one; with --machine they are modelled on that machine."""
    rows_by_cell: dict[Cell, dict[str, Any]] = {}
    for path in options.measured:
        try:
            rows_by_cell |= {cell_of(row): row for row in json.loads(path.read_text())["rows"]}
        except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"--measured {path}: no rows can be read from it ({error}); pass a file that --json wrote"
            ) from None
    order = [cell for cell in ROWS if cell in rows_by_cell and options.rows in name_of(cell)]
    check(order != [], f"--measured: none of the files has a row with {options.rows!r} in its name")
    host = {"machine": calibrate(options)} if options.machine else {}
    return [{**rows_by_cell[cell], **host} for cell in order]


def predicted(row: dict[str, Any]) -> dict[str, Any]:
    """The model's figures for a row on the machine that the row contains."""
    cell = cell_of(row)
    system = model.System(
        machine=machine.from_data("this host", row["machine"]),
        nodes=1,
        ranks_per_node=cell.ranks,
        software=software.load(software.THIS_PROJECT),
    )
    prediction = model.predict(config(row["recipe"], row["tokens"], cell), system)
    return {
        "name": name_of(cell),
        "model_seconds": prediction.seconds,
        "model_lower": prediction.lower,
        "model_upper": prediction.upper,
        "model_memory_mib": prediction.memory_mib_max,
        "model_breakdown": prediction.breakdown,
        "time_error_percent": 100 * (prediction.seconds / row["seconds"] - 1),
        "memory_error_percent": 100 * (prediction.memory_mib_max / row["peak_memory_mib"] - 1),
    }


def report(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The result as JSON; errors are the model's, in per cent of the measured figure."""
    rows = [{**row, **predicted(row)} for row in rows]
    errors = [abs(row["time_error_percent"]) for row in rows]
    memory = [abs(row["memory_error_percent"]) for row in rows]
    return {
        "rows": rows,
        "mean_time_error_percent": sum(errors) / len(errors),
        "largest_time_error_percent": max(errors),
        "mean_memory_error_percent": sum(memory) / len(memory),
    }


def scaled(row: dict[str, Any]) -> float:
    """Seconds per iteration at the published global batch, if time grows in proportion to the batch."""
    return row["seconds"] * PUBLISHED_BATCH / row["gbs"]


def text(options: argparse.Namespace, result: dict[str, Any]) -> str:
    """A table for every sequence length, with and without recompute, and the model's errors. Writes --csv."""
    if options.csv:
        save_csv(options.csv, result)
    parts = []
    heading = "### " if options.markdown else ""
    rows = result["rows"]
    for (recipe, seq, recompute), group in groupby(
        rows, lambda r: (r["recipe"], r["seq"], r["recompute"])
    ):
        mine = list(group)
        title = jobs.published_title(
            recipe, seq, recompute, f"native kernels, fp32: {pictures.measured_on(mine)}"
        )
        parts.append(heading + jobs.published(title, [cells(row) for row in mine], OUR_HEADER))
    parts.append(
        f"A node here is a rank on one machine; one rank has {max(r['threads'] for r in rows)} threads, more ranks share "
        f"them. Model: software {software.THIS_PROJECT} on {rows[0]['machine']['title']}.\n"
        f"Model against {len(rows)} measured rows: mean absolute error of time {result['mean_time_error_percent']:.1f} %, "
        f"largest {result['largest_time_error_percent']:.1f} %; of memory {result['mean_memory_error_percent']:.1f} %."
    )
    return "\n\n".join(parts)


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Return a row: the published columns, then the columns of OUR_HEADER."""
    return (
        *jobs.published_cells(row, row["allocator"] if row["allocator"] != "tuned" else "-"),
        f"{scaled(row):.0f}",
        f"{row['model_seconds']:.2f}",
        f"{row['model_memory_mib']:.0f}",
        f"{row['time_error_percent']:+.1f}",
        f"{row['memory_error_percent']:+.1f}",
    )


def save_csv(path: Path, result: dict[str, Any]) -> None:
    """One line per row, measured and modelled."""
    records = [
        {"scaled_seconds": scaled(row), **{k: v for k, v in row.items() if k not in CSV_LEFT_OUT}}
        for row in result["rows"]
    ]
    write_csv(path, list(records[0]), records)


draw = pictures.draw_tables
