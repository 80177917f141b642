"""The command `log`: run logs as rows of the published tables, CSV and plots.

    fugaku-megatron log run.log                              a row for each log
    fugaku-megatron log run.log --follow --png run.png       redrawn while the job runs, until it ends
    fugaku-megatron log run.log --csv run.csv --per-iteration    loss, time and rates of every iteration
    fugaku-megatron log tuned_a tuned_b --png both.png --x tokens    several runs, by their --save, with the lowest loss
    fugaku-megatron log my_run --hours-png hours.png         a --save: also effective training time, and lost time by cause
    fugaku-megatron log ranks.jsonl --ranks --png ranks.png  every rank's seconds by phase, from train --log-ranks
    fugaku-megatron log a100.log --nodes 10 --ranks-per-node 8 --tensor-model-parallel-size 8 \\
        --pipeline-model-parallel-size 10                    a log of another program

Sec/it and TFLOPs (per rank) are medians over the last job's iterations, without its first two if it has more. TFLOPs are recomputed
from the time if the model is known. Logs of Megatron-LM and Megatron-DeepSpeed, and histories, need flags that describe the run.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from ...cli import arguments
from ...cli.output_files import check_file, writing
from ...config.fields import check, check_positive, flag
from ...costs.stages import model_parameters
from ...text.named_files import JsonObject, StrPath
from ...text.numbers import duration_text, say
from ...text.table import pipe_table, write_csv
from ..export.history import HISTORY
from ..export.hours import HOURS
from . import loss_plot, rank_table
from .effective_time import draw as draw_hours
from .effective_time import effective_time
from .iteration_metrics import (
    HEADERS,
    UNKNOWN,
    IterationMetrics,
    PublishedRow,
    rate_text,
    seconds_text,
    size_name,
)
from .run_log import FORMULAS, Job, RunLog

ITERATION_COLUMNS = ("log", *(f.name for f in fields(IterationMetrics)))


def row_of(log: RunLog, notes: str) -> PublishedRow:
    """Return a log's row in the published table."""
    job = log.job
    run = job.run
    return PublishedRow(
        nodes=job.nodes,
        ranks=job.ranks,
        ghz=log.ghz,
        size=size_name(model_parameters(run)) if run else "-",
        dp=job.dp,
        tp=job.tp,
        pp=job.pp,
        mbs=job.mbs,
        gbs=log.gbs,
        memory_mib=log.memory_mib,
        seconds=log.seconds,
        tflops=log.tflops,
        notes=notes,
    )


def _notes(name: str, log: RunLog) -> str:
    job = log.job
    notes: list[str | None] = [name, job.precision]
    if job.recompute:
        notes.append(f"recompute {job.recompute}")
    if job.zero_stage is not None:
        notes.append(f"ZeRO {job.zero_stage}")
    if log.recomputed_tflops is not None:
        notes.append(f"{rate_text(log.recomputed_tflops)} TFLOPs recomputed")
    if log.last:
        if log.last.lm_loss is not None:
            notes.append(f"loss {log.last.lm_loss:.4g}")
        if log.last.largest_load:
            notes.append(f"an expert has {log.last.largest_load:.3g} x the mean load")
    if log.watts is not None:
        notes.append(f"{log.watts:.0f} W")
    if log.tokens_per_joule is not None:
        notes.append(f"{log.tokens_per_joule:.4g} tokens per joule")
    return ", ".join(filter(None, notes))


def text(logs: Sequence[RunLog], markdown: bool = False) -> str:
    lines = ["### Runs, measured", ""] if markdown else []
    notes = [_notes(name, log) for name, log in zip(names(logs), logs)]
    rows = [row_of(log, note).cells() for log, note in zip(logs, notes)]
    lines += pipe_table([[*rows[0]], *([*row.values()] for row in rows)])
    if len(logs) > 1:
        lines += ["", *pipe_table(final_losses(logs))]
    indent = "- " if markdown else "  "
    lines += ["", *(indent + _basis(log) for log in logs)]
    return "\n".join(lines)


def final_losses(logs: Sequence[RunLog]) -> list[tuple[str, ...]]:
    """Return rows that compare progress and last losses of runs, each column's lowest loss marked."""
    trained = [log.last.lm_loss if log.last else None for log in logs]
    validated = [log.validations[-1][1] if log.validations else None for log in logs]
    rows: list[tuple[str, ...]] = [
        ("Run", "Iterations", "Tokens", "Last lm loss", "Last validation loss")
    ]
    for name, log, loss, validation in zip(names(logs), logs, trained, validated):
        iteration = "-"
        tokens = "-"
        if log.last:
            iteration = str(log.last.iteration)
            if log.last.consumed_tokens:
                tokens = f"{log.last.consumed_tokens:,}"
        rows.append(
            (name, iteration, tokens, _marked(loss, trained), _marked(validation, validated))
        )
    return rows


def _marked(loss: float | None, losses: Sequence[float | None]) -> str:
    if loss is None:
        return "-"
    known = [each for each in losses if each is not None]
    mark = " (lowest)" if len(known) > 1 and loss == min(known) else ""
    return f"{loss:.6g}{mark}"


def names(logs: Sequence[RunLog]) -> list[str]:
    """Return short names: what distinguishes the paths. A history alone has the name of its folder."""
    paths = [Path(os.path.abspath(log.path)) for log in logs]
    if len(paths) == 1 and paths[0].name == HISTORY:
        return [paths[0].parent.name]
    common = os.path.commonpath([path.parent for path in paths])
    parts = [path.relative_to(common).parts for path in paths]
    while all(len(each) > 1 for each in parts) and len({each[-1] for each in parts}) == 1:
        parts = [each[:-1] for each in parts]
    return [os.path.join(*each) for each in parts]


def _basis(log: RunLog) -> str:
    if not log.last:
        return f"{log.path}: no iteration yet"
    basis = (
        f"{log.path}: medians over {len(log.counted)} lines; "
        f"iteration {log.last.iteration} of {log.last.train_iters}"
    )
    if not log.finished:
        basis += ", not finished"
    if log.machine:
        basis += f"; {log.machine}"
    return basis


def record(log: RunLog, name: str) -> JsonObject:
    """Return a log's CSV record: published cells, exact numbers and the model's shape."""
    job = log.job
    row = row_of(log, _notes(name, log))
    model = job.run.model if job.run else None
    last = log.last
    return {
        "log": log.path,
        **{
            HEADERS[title]: None if cell == UNKNOWN else cell for title, cell in row.cells().items()
        },
        "seconds": row.seconds,
        "tflops": row.tflops,
        "petaflops": row.petaflops,
        "precision": job.precision,
        "ac": job.recompute,
        "zero": job.zero_stage,
        "seq": model and model.seq_length,
        "layers": model and model.num_layers,
        "hidden": model and model.hidden_size,
        "heads": model and model.num_attention_heads,
        "recomputed_tflops": log.recomputed_tflops,
        "iterations": len(log.counted),
        "last_iteration": last and last.iteration,
        "loss": last and last.lm_loss,
        "watts": log.watts,
        "tokens_per_joule": log.tokens_per_joule,
    }


def draw(path: StrPath, logs: Sequence[RunLog], x: str = "iteration") -> bool:
    """Plot loss, learning rate and TFLOPs over `x` (a key of loss_plot.AXES); print why if nothing is drawn."""
    if len(logs) == 1:
        (log,) = logs
        heading = loss_plot.title(_layout(log), os.path.abspath(log.path))
        return loss_plot.loss_curves(path, {"": _records(log)}, heading, x)
    runs = {f"{name}\n{_layout(log)}": _records(log) for name, log in zip(names(logs), logs)}
    place = os.path.commonpath([os.path.dirname(os.path.abspath(log.path)) for log in logs])
    return loss_plot.loss_curves(path, runs, loss_plot.title("", place), x)


def _records(log: RunLog) -> loss_plot.Records:
    tokens = {i.iteration: i.consumed_tokens for i in log.iterations}
    records = [{"kind": "train", **asdict(i)} for i in log.iterations]
    records += [
        {"kind": "validation", "iteration": n, "lm_loss": loss, "consumed_tokens": tokens.get(n)}
        for n, loss in log.validations
    ]
    if log.experts:
        records.append(log.experts)
    return records


def _layout(log: RunLog) -> str:
    job = log.job
    if job.run and job.dp:
        return loss_plot.describe(job.run, job.dp)
    return f"{job.ranks} ranks" if job.ranks else ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add flags of tables and plots, and flags that describe a run."""
    add = parser.add_argument
    add(
        "logs",
        nargs="+",
        metavar="LOG",
        help="a run's log, or its --save, whose history.jsonl is read",
    )
    add("--csv", metavar="FILE", help="write a row per log into FILE")
    add(
        "--per-iteration",
        action="store_true",
        help="with --csv: a row per iteration (or log interval) instead",
    )
    add(
        "--png",
        metavar="FILE",
        help="draw loss and TFLOPs of all logs into FILE, and of one history "
        "the load of every expert",
    )
    add(
        "--hours-png",
        metavar="FILE",
        help="draw the run's time by cause over days or hours; LOG is its --save",
    )
    add(
        "--x",
        choices=tuple(loss_plot.AXES),
        default="iteration",
        help="what --png draws over (default: iteration)",
    )
    add(
        "--markdown",
        action="store_true",
        help="print the table with a heading and lists, for a document",
    )
    add(
        "--follow",
        action="store_true",
        help="read on while the jobs run, until their last line or Ctrl-C",
    )
    add(
        "--interval",
        type=float,
        default=2.0,
        metavar="S",
        help="with --follow: seconds between two reads of the logs (default: 2)",
    )
    add(
        "--ranks",
        action="store_true",
        help="the files are those of train --log-ranks: min, mean and max of each "
        "phase over the ranks; with --png and one file a heat map of all ranks",
    )
    group = parser.add_argument_group(
        "logs of other programs, and histories: flags that describe the run"
    )
    group.add_argument("--nodes", type=int, help="nodes of the job")
    group.add_argument(
        "--ranks-per-node", type=int, default=1, help="ranks, or GPUs, of a node (default: 1)"
    )
    group.add_argument(
        "--formula",
        default="hardware",
        choices=sorted(FORMULAS),
        help="how TFLOPs are computed again: hardware as Narayanan et al. (2021), parameter as 8 (6 without "
        "recompute) per parameter of the layers and token",
    )
    arguments.add_train_flags(
        parser, "they describe the run of a log that does not describe itself"
    )


def job_of(options: argparse.Namespace) -> Job:
    """Return the job that flags describe, for logs without a description."""
    check_positive(options, "nodes", "ranks_per_node", "interval")
    flags = arguments.run_flags(vars(options))
    check(
        flags.world_size is None and not flags.dry_run,
        "--world-size and --dry-run have no meaning here: pass --nodes and --ranks-per-node",
    )
    job = Job(
        values=flags.fields,
        recipe=flags.recipe,
        nodes=options.nodes,
        ranks=options.nodes and options.nodes * options.ranks_per_node,
        other_program=True,
    )
    job.check()  # before any log is read
    return job


def check_outputs(options: argparse.Namespace) -> None:
    """Raise ValueError if a file of --csv or --png cannot be written."""
    check(
        options.csv is not None or not options.per_iteration,
        "--per-iteration needs --csv FILE: pass both",
    )
    for name in ("csv", "png", "hours_png"):
        if path := getattr(options, name):
            ending = name.rpartition("_")[2]
            check(
                path.endswith(f".{ending}"),
                f"{flag(name)} {path}: pass a file whose name ends with .{ending}",
            )
            check_file(flag(name), path)


def main(options: argparse.Namespace) -> int:
    """Print a table of all logs, and write the CSV and PNG files."""
    if options.ranks:
        return show_ranks(options)
    job = job_of(options)
    check_outputs(options)
    logs = [RunLog(_file_of(path), job, options.formula) for path in options.logs]
    if options.follow:
        follow(logs, options)
    for log in logs:
        log.finish()
        check(
            options.x == "iteration" or log.last and log.last.consumed_tokens,
            f"--x {options.x}: {log.path} does not say how many tokens were consumed: leave it out",
        )
    _write(options, logs)
    print(text(logs, options.markdown))
    show_hours(options)
    return 0


def show_hours(options: argparse.Namespace) -> None:
    """Print and draw the effective training time of a run that is named by its --save."""
    found = effective_time(options.logs[0]) if len(options.logs) == 1 else None
    check(
        found or not options.hours_png,
        f"--hours-png {options.hours_png}: {', '.join(options.logs)}: pass the --save of one run, with its {HOURS}",
    )
    if not found:
        return
    print("", *found.text(), sep="\n")
    if options.hours_png:
        with writing("--hours-png", options.hours_png):
            draw_hours(options.hours_png, found)


def _file_of(path: str) -> str:
    if not os.path.isdir(path):
        return path
    history = os.path.join(path, HISTORY)
    check(
        os.path.exists(history),
        f"{path}: is a directory without {HISTORY}: pass a run's log or its --save",
    )
    return history


def show_ranks(options: argparse.Namespace) -> int:
    """Print each phase's times over ranks, and draw the heat map of --png."""
    check_outputs(options)
    check(
        not options.csv and not options.follow,
        "--ranks writes no CSV file and does not follow a log: omit --csv and --follow",
    )
    check(
        not options.png or len(options.logs) == 1,
        f"--png {options.png} draws the ranks of one file, and there are "
        f"{len(options.logs)}: pass one",
    )
    for path in options.logs:
        intervals = rank_table.read(path)
        print(rank_table.text(path, intervals))
        if options.png:
            rank_table.draw(options.png, path, intervals)
    return 0


def _write(options: argparse.Namespace, logs: Sequence[RunLog]) -> None:
    if options.csv:
        with writing("--csv", options.csv):
            if options.per_iteration:
                rows = ({"log": log.path, **asdict(i)} for log in logs for i in log.iterations)
                write_csv(options.csv, ITERATION_COLUMNS, rows)
            else:
                records = list(map(record, logs, names(logs)))
                write_csv(options.csv, list(records[0]), records)
    if options.png:
        with writing("--png", options.png):
            draw(options.png, logs, options.x)


def follow(logs: Sequence[RunLog], options: argparse.Namespace) -> None:
    """Print progress and rewrite outputs while logs grow, until the last line or Ctrl-C."""
    shown: dict[str, int] = {}  # path -> iteration
    try:
        while True:
            grown = [log.poll() for log in logs]
            for log in logs:
                if log.last and log.last.iteration != shown.get(log.path, 0):
                    shown[log.path] = log.last.iteration
                    _print_progress(log, log.last)
            known = [log for log in logs if log.iterations]
            if any(grown) and known:
                _write(options, known)
            if all(log.finished for log in logs):
                break
            time.sleep(options.interval)
    except KeyboardInterrupt:
        print(file=sys.stderr)


def _print_progress(log: RunLog, last: IterationMetrics) -> None:
    left = (last.train_iters - last.iteration) * (log.seconds or 0)
    tokens = "" if last.tokens_per_second is None else f", {last.tokens_per_second:,.0f} tokens/s"
    loss = "" if last.lm_loss is None else f", loss {last.lm_loss:.4g}"
    say(
        f"{log.path}: iteration {last.iteration} of {last.train_iters}, {seconds_text(log.seconds)} s each, "
        f"{rate_text(log.tflops)} TFLOPs per rank{tokens}{loss}, {duration_text(left)} left"
    )
