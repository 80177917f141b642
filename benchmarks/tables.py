"""The published tables' 124M configurations that fit this host: measured, and compared with the performance model.

    python -m benchmarks tables --json host.json --png host.png          all rows, about 12 minutes on two cores
    python -m benchmarks tables --quick                                  a handful, below 3 minutes
    python -m benchmarks tables --rows "TP 2" --json tp.json             rows whose name holds the text
    python -m benchmarks tables --measured host.json tp.json --markdown  rows of earlier runs, modelled again

A row is a real `mpiexec ... pretrain_gpt.py` of a few micro-batches; ranks share this host's threads. The model
(fugaku_megatron.perf, software fugaku_megatron) uses a calibration of this host made in the same run, or --machine. Left out:
starting jobs (jobs.py), how rows are shown (tables_text.py, pictures.py).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fugaku_megatron.config.checks import check
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.config.run_config import RunConfig
from fugaku_megatron.host import runtime
from fugaku_megatron.perf import machine, model, software

from . import alloc, disturbance, driver, jobs, pictures, preloads, shapes, tables_text
from .child import ROOT, mpiexec

TOKENS = 4096  # of an iteration, unless one micro-batch on each data-parallel rank has more
WARM_UP = 2  # iterations that do not count

CALIBRATION_SECONDS = 300  # a limit: it takes less than one minute
ATTEMPTS = 3  # measurements of a row while other processes use this host's cores


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A configuration of the tables. The host's threads are divided among `ranks`."""

    ranks: int = 1
    tp: int = 1
    pp: int = 1
    mbs: int = 1
    seq: int = 1024
    recompute: bool = False
    allocator: str = "tuned"

    @property
    def dp(self) -> int:
        return self.ranks // (self.tp * self.pp)

    def __str__(self) -> str:
        words = [f"s {self.seq}", f"DP {self.dp}", f"TP {self.tp}", f"PP {self.pp}", f"MBS {self.mbs}"]
        words += ["recompute"] if self.recompute else []
        return ", ".join(words + ([self.allocator] if self.allocator != "tuned" else []))


DP2, TP2, PP2 = Cell(ranks=2), Cell(ranks=2, tp=2), Cell(ranks=2, pp=2)
ROWS = (  # in the order of the tables that they are shown in
    Cell(), Cell(allocator="tcmalloc"), Cell(mbs=2), Cell(mbs=4), DP2, replace(DP2, allocator="tcmalloc"), replace(DP2, mbs=2),
    TP2, replace(TP2, mbs=2), PP2, replace(PP2, mbs=2),
    Cell(recompute=True), *(replace(cell, recompute=True) for cell in (DP2, TP2, PP2)),
    Cell(seq=2048), *(replace(cell, seq=2048) for cell in (DP2, TP2, PP2)), Cell(seq=2048, recompute=True))
QUICK_ROWS = (Cell(), DP2, TP2, PP2)
QUICK = {"iterations": 1, "tokens": 2048}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this family."""
    parser.add_argument("--recipe", default="124m", choices=shapes.RECIPES)
    parser.add_argument("--rows", default="", metavar="TEXT", help="rows whose name holds TEXT, such as 'TP 2' or 'recompute'")
    parser.add_argument("--quick", action="store_true", help="four rows, one timed iteration of half the tokens")
    parser.add_argument("--iterations", type=int, default=2, help=f"timed ones, after {WARM_UP} others (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of an iteration, at least (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of all ranks together (default: %(default)s)")
    parser.add_argument("--machine", metavar="FILE", help="of fugaku-megatron calibrate (default: calibrate now)")
    parser.add_argument("--measured", nargs="+", type=Path, default=[], metavar="FILE",
                        help="show the rows that --json wrote there instead of measuring, modelled again")
    parser.add_argument("--markdown", action="store_true", help="Markdown's headings around the tables")
    for name, what in (("json", "rows and machine"), ("csv", "one line per row"), ("png", "measured against modelled")):
        parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=f"write {what} to FILE")


def config(options: argparse.Namespace, cell: Cell) -> RunConfig:
    """The run of a row."""
    each = cell.mbs * cell.dp
    sizes = argparse.Namespace(recipe=options.recipe, micro_batch_size=cell.mbs, tensor_model_parallel_size=cell.tp)
    return shapes.run_of(sizes, pipeline_model_parallel_size=cell.pp, seq_length=cell.seq, max_position_embeddings=cell.seq,
                         global_batch_size=max(1, options.tokens // cell.seq // each) * each,
                         recompute_granularity="full" if cell.recompute else None)


def job(options: argparse.Namespace, cell: Cell) -> jobs.Job:
    """The training job of a row. ValueError when the model does not divide."""
    run = config(options, cell)
    Layout.from_run(run, cell.ranks)
    preload = preloads.find(cell.allocator) if cell.allocator in preloads.LIBRARIES else None
    flags = jobs.flags(argparse.Namespace(recipe=options.recipe, dtype="fp32"), run, WARM_UP + options.iterations, "native",
                       "--seq-length", cell.seq, "--max-position-embeddings", cell.seq,
                       *(["--recompute-granularity", "full"] if cell.recompute else []),
                       "--allocator", "stock" if preload else "tuned")
    return jobs.Job(ranks=cell.ranks, threads=jobs.threads_each(cell.ranks, options.threads), flags=flags, preload=preload,
                    warm_up=WARM_UP)


def plan(options: argparse.Namespace) -> dict[Cell, jobs.Job]:
    """The chosen rows with their jobs; prints which rows are left out because this host cannot run them."""
    cells, planned = QUICK_ROWS if options.quick else ROWS, {}
    for cell in (cell for cell in cells if options.rows in str(cell)):
        if cell.allocator in preloads.LIBRARIES and preloads.find(cell.allocator) is None:
            print(f"skipped {cell}: {preloads.missing(cell.allocator)}")
        elif cell.ranks > options.threads:
            print(f"skipped {cell}: {cell.ranks} ranks need as many threads, --threads is {options.threads}")
        else:
            planned[cell] = job(options, cell)
    check(planned != {}, f"--rows {options.rows!r}: no row that this host can run has this in its name; a name is "
          f"{str(cells[0])!r}")
    return planned


def calibrate(options: argparse.Namespace) -> dict[str, Any]:
    """The contents of --machine, or a calibration made now with a rank for every thread, repeated while others disturb it."""
    if options.machine:
        machine.load(options.machine)
        return json.loads(Path(options.machine).read_text())
    for attempt in range(ATTEMPTS):
        print("calibrating this host" + (", again: others took its cores" if attempt else ""), flush=True)
        watch = disturbance.Watch(options.threads, jobs.children_seconds)
        host = calibrated(max(2, options.threads))
        if watch.others() <= disturbance.OTHERS:
            break
    return host


def calibrated(ranks: int) -> dict[str, Any]:
    """The file that calibrate writes with `ranks` ranks of one thread each. RuntimeError when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "host.json"
        program = ["-m", "fugaku_megatron", "calibrate", "--output", str(path)]
        command = [mpiexec(), "-n", str(ranks), sys.executable, *program]
        environment = {**preloads.environment(None), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL,
                              timeout=CALIBRATION_SECONDS, cwd=ROOT)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with exit code {done.returncode} and said: {done.stderr.strip()[-300:]}")
        return json.loads(path.read_text())


def run(options: argparse.Namespace) -> None:
    """Measure the rows or read --measured, model them, print the tables and write --json, --csv and --png."""
    if options.quick:
        vars(options).update({name: value for name, value in QUICK.items() if getattr(options, name) == options.defaults[name]})
    for name in ("iterations", "threads", "tokens"):
        check(getattr(options, name) > 0, f"--{name} {getattr(options, name)}: give 1 or more")
    result = report(options, earlier_result(options) if options.measured else measure(options, plan(options)))
    print(tables_text.text(result, options.markdown))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.csv:
        tables_text.write_csv(options.csv, result)
    if options.png:
        pictures.draw_tables(options.png, result)


def measure(options: argparse.Namespace, planned: dict[Cell, jobs.Job]) -> list[dict[str, Any]]:
    """Measured rows, not modelled yet; prints each when it is done."""
    begin, rows = time.perf_counter(), []
    host = calibrate(options)
    for number, (cell, task) in enumerate(planned.items(), 1):
        measured = quiet(cell, task)
        rows.append({**asdict(measured), **asdict(cell), "log": measured.allocator, "dp": cell.dp, "recipe": options.recipe,
                     "gbs": config(options, cell).batch.global_batch_size, "tokens": options.tokens, "threads": task.threads,
                     "busy": measured.others > disturbance.OTHERS, "cpu": runtime.cpu_model(), "torch": torch.__version__,
                     "date": time.strftime("%Y-%m-%d"), "machine": host})
        print(f"  {number} of {len(planned)}, {(time.perf_counter() - begin) / 60:.1f} min: {cell}: {measured.seconds:.3f} s at "
              f"{measured.clock_ghz:.2f} GHz" + ("  BUSY MACHINE" if rows[-1]["busy"] else ""), flush=True)
    return rows


def quiet(cell: Cell, task: jobs.Job) -> jobs.Measured:
    """The job's figures from the least disturbed of up to ATTEMPTS measurements; the first undisturbed one ends them."""
    tried: list[jobs.Measured] = []
    while not tried or (tried[-1].others > disturbance.OTHERS and len(tried) < ATTEMPTS):
        if tried:
            print(f"  again, because others took {tried[-1].others:.0%} of the cores: {cell}", flush=True)
        tried.append(jobs.run(task))
        alloc.check_allocator(cell, tried[-1])
    return min(tried, key=lambda measured: measured.others)


def earlier_result(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of --measured in the tables' order, of each name the last one; with --machine they are modelled on that machine."""
    rows_by_cell: dict[Cell, dict[str, Any]] = {}
    for path in options.measured:
        try:
            rows = json.loads(path.read_text())["rows"]
            rows_by_cell |= {Cell(**{name: row[name] for name in Cell.__dataclass_fields__}): row for row in rows}
        except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"--measured {path}: no rows can be read from it ({error}); give a file that --json wrote") from None
    order = [cell for cell in ROWS if cell in rows_by_cell and options.rows in str(cell)]
    check(order != [], f"--measured: none of the files has a row with {options.rows!r} in its name")
    host = {"machine": calibrate(options)} if options.machine else {}
    return [{**rows_by_cell[cell], **host} for cell in order]


def predicted(row: dict[str, Any]) -> dict[str, Any]:
    """The model's figures for a row on the machine that the row contains."""
    cell = Cell(**{name: row[name] for name in Cell.__dataclass_fields__})
    system = model.System(machine=machine.from_data("this host", row["machine"]), nodes=1, ranks_per_node=cell.ranks,
                          software=software.load(software.THIS_PROJECT))
    run = config(argparse.Namespace(recipe=row["recipe"], tokens=row["tokens"]), cell)
    prediction = model.predict(run, system)
    return {"name": str(cell), "model_seconds": prediction.seconds,
            "model_lower": prediction.lower, "model_upper": prediction.upper,
            "model_memory_mib": prediction.memory_mib_max, "model_breakdown": prediction.breakdown,
            "time_error_percent": 100 * (prediction.seconds / row["seconds"] - 1),
            "memory_error_percent": 100 * (prediction.memory_mib_max / row["peak_memory_mib"] - 1)}


def report(options: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The result as JSON; errors are the model's, in per cent of the measured figure."""
    rows = [{**row, **predicted(row)} for row in rows]
    errors = [abs(row["time_error_percent"]) for row in rows]
    memory = [abs(row["memory_error_percent"]) for row in rows]
    return {"rows": rows, "mean_time_error_percent": sum(errors) / len(errors), "largest_time_error_percent": max(errors),
            "mean_memory_error_percent": sum(memory) / len(memory), "repeat": driver.command_line()}
