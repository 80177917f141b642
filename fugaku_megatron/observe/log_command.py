"""Run logs as the published tables' rows, CSV and a picture.

    fugaku-megatron log run.log                              a row for each log, from what the log says
    fugaku-megatron log run.log --follow --png run.png       redrawn while the job runs, until it ends
    fugaku-megatron log run.log --csv run.csv --per-iteration    loss, time and rates of every iteration
    fugaku-megatron log checkpoints/history.jsonl --png run.png  the same from the history that train keeps in --save
    fugaku-megatron log tuned_a tuned_b --png both.png --x tokens    several runs, by their --save: which one has the lowest loss
    fugaku-megatron log ranks.jsonl --ranks --png ranks.png  where the time of every rank went, from train --log-ranks
    fugaku-megatron log a100.log --nodes 10 --ranks-per-node 8 --tensor-model-parallel-size 8 \\
        --pipeline-model-parallel-size 10                    a log of another program

Sec/it and TFLOPs (per rank, the log's own) are medians over the last job's iterations after its first two, or over all of them if
it has at most two. With the model known, TFLOPs are also computed again from the time. A run's flags describe logs of Megatron-LM,
Megatron-DeepSpeed and others that print their lines, and histories; logs of `fugaku-megatron train` describe themselves.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..cli import arguments
from ..cli.output_files import check_file, writing
from ..config.fields import check
from ..costs import accounting
from ..text.table import pipe_table
from . import loss_plot, rank_table
from .history import HISTORY
from .iteration_metrics import (
    HEADERS,
    IterationMetrics,
    PublishedRow,
    published_header,
    rate_text,
    seconds_text,
    size_name,
)
from .run_log import FORMULAS, Job, LogFile, LogSummary
from .screen import duration_text

OUR_CSV_COLUMNS = (
    "precision",
    "ac",
    "zero",
    "seq",
    "layers",
    "hidden",
    "heads",
    "recomputed_tflops",
    "iterations",
    "last_iteration",
    "loss",
    "watts",
    "tokens_per_joule",
)


def row_of(log: LogSummary, notes: str | None = None) -> PublishedRow:
    """The log as a row. Raises ValueError for flags that do not fit together. notes: instead of what the log says."""
    job, run = log.job, log.job.run
    return PublishedRow(
        nodes=job.nodes,
        ranks=job.ranks,
        ghz=log.ghz,
        size=size_name(accounting.parameters(run)) if run else "-",
        dp=job.dp,
        tp=job.tp,
        pp=job.pp,
        mbs=job.mbs,
        gbs=log.gbs,
        memory_mib=log.memory_mib,
        seconds=log.seconds,
        tflops=log.tflops,
        notes=_notes(log) if notes is None else notes,
    )


def _notes(log: LogSummary) -> str:
    job, again, loss = (
        log.job,
        log.recomputed_tflops,
        log.iterations[-1].lm_loss if log.iterations else None,
    )
    load = log.iterations[-1].largest_load if log.iterations else None
    parts = (
        Path(log.path).name,
        job.precision,
        job.recompute and f"recompute {job.recompute}",
        None if (zero := job.zero_stage) is None else f"ZeRO {zero}",
        None if again is None else f"{rate_text(again)} TFLOPs recomputed",
        None if loss is None else f"loss {loss:.4g}",
        load and f"an expert has {load:.3g} x the mean load",
        energy_note(log),
    )
    return ", ".join(part for part in parts if part)


def energy_note(log: LogSummary) -> str | None:
    """412 W, 1.23 tokens per joule; None for a log without energy."""
    if log.watts is None:
        return None
    return f"{log.watts:.0f} W" + (
        "" if log.tokens_per_joule is None else f", {log.tokens_per_joule:.4g} tokens per joule"
    )


def text(logs: Sequence[LogSummary], markdown: bool = False) -> str:
    """The table, and beneath it what each row rests on; markdown: with a heading and lists."""
    lines = [("- " if markdown else "  ") + _basis(log) for log in logs]
    title = ["### Runs, measured", ""] if markdown else []
    losses = ["", *pipe_table(final_losses(logs))] if len(logs) > 1 else []
    return "\n".join(
        [
            *title,
            *pipe_table([published_header(), *(row_of(log).cells() for log in logs)]),
            *losses,
            "",
            *lines,
        ]
    )


def final_losses(logs: Sequence[LogSummary]) -> list[tuple[str, ...]]:
    """Rows of a table that compares runs: how far each is, and its last losses; the lowest of a column is marked."""
    trained = [log.iterations[-1].lm_loss if log.iterations else None for log in logs]
    validated = [log.validations[-1][1] if log.validations else None for log in logs]
    columns = [[_marked(loss, losses) for loss in losses] for losses in (trained, validated)]
    lasts = [log.iterations[-1] if log.iterations else None for log in logs]
    places = [
        (str(last.iteration), f"{last.consumed_tokens:,}" if last.consumed_tokens else "-")
        if last
        else ("-", "-")
        for last in lasts
    ]
    return [
        ("Run", "Iterations", "Tokens", "Last lm loss", "Last validation loss"),
        *((name, *place, *losses) for name, place, *losses in zip(names(logs), places, *columns)),
    ]


def _marked(loss: float | None, losses: Sequence[float | None]) -> str:
    if loss is None:
        return "-"
    known = [each for each in losses if each is not None]
    return f"{loss:.6g}" + (" (lowest)" if len(known) > 1 and loss == min(known) else "")


def names(logs: Sequence[LogSummary]) -> list[str]:
    """A short name of each of several logs: its folder where all files have one name, else its path below the common folder."""
    paths = [os.path.abspath(log.path) for log in logs]
    folder = os.path.commonpath([os.path.dirname(path) for path in paths])
    short = [os.path.relpath(path, folder) for path in paths]
    folders = [os.path.dirname(path) for path in short]
    alike = (
        len({os.path.basename(path) for path in paths}) == 1
        and all(folders)
        and len({*folders}) == len(folders)
    )
    return folders if alike else short


def _basis(log: LogSummary) -> str:
    if not log.iterations:
        return f"{log.path}: no iteration yet"
    last = log.iterations[-1]
    state = "" if log.finished else ", not finished"
    return (
        f"{log.path}: medians over {len(log.counted)} lines; iteration {last.iteration} of {last.train_iters}{state}"
        + (f"; {log.machine}" if log.machine else "")
    )


def csv_columns() -> tuple[str, ...]:
    """The columns of the CSV file: the log's name, the published columns, ours."""
    return ("log", *(HEADERS[name] for name in published_header()), *OUR_CSV_COLUMNS)


def record(log: LogSummary) -> dict[str, Any]:
    """A row of the CSV file, under csv_columns(); numbers unrounded, empty where unknown."""
    row, job, run = row_of(log), log.job, log.job.run
    model = (
        {
            "seq": run.model.seq_length,
            "layers": run.model.num_layers,
            "hidden": run.model.hidden_size,
            "heads": run.model.num_attention_heads,
        }
        if run
        else {}
    )
    last = log.iterations[-1] if log.iterations else None
    return {
        "log": log.path,
        **{HEADERS[name]: cell for name, cell in zip(published_header(), row.cells())},
        "seconds": row.seconds,
        "tflops": row.tflops,
        "petaflops": row.petaflops,
        "precision": job.precision,
        "ac": job.recompute,
        "zero": job.zero_stage,
        **model,
        "recomputed_tflops": log.recomputed_tflops,
        "iterations": len(log.counted),
        "last_iteration": last and last.iteration,
        "loss": last and last.lm_loss,
        "watts": log.watts,
        "tokens_per_joule": log.tokens_per_joule,
    }


def write_csv(path: str | os.PathLike, logs: Sequence[LogSummary]) -> None:
    """One row per log."""
    _write_rows(path, csv_columns(), (record(log) for log in logs))


def write_iterations_csv(path: str | os.PathLike, logs: Sequence[LogSummary]) -> None:
    """One row per iteration of every log, in order: the log's name and the fields of IterationMetrics."""
    columns = ("log", *(f.name for f in fields(IterationMetrics)))
    _write_rows(
        path,
        columns,
        ({"log": log.path, **asdict(iteration)} for log in logs for iteration in log.iterations),
    )


def _write_rows(
    path: str | os.PathLike, columns: Sequence[str], rows: Iterable[dict[str, Any]]
) -> None:
    """Written aside and renamed: a reader never sees half a file."""
    aside = Path(f"{path}.tmp")
    with open(aside, "w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            {name: "" if value in (None, "-") else value for name, value in row.items()}
            for row in rows
        )
    aside.replace(path)


def draw(path: str | os.PathLike, logs: Sequence[LogSummary], x: str = "iteration") -> bool:
    """Loss, learning rate and TFLOPs over `x`, of plot.AXES, in one picture; False when there is nothing to draw (and says so)."""
    alone = len(logs) == 1
    runs = {
        ("" if alone else f"{name}\n{_layout(log)}"): _records(log)
        for name, log in zip(names(logs), logs)
    }
    place = os.path.commonpath([os.path.dirname(os.path.abspath(log.path)) for log in logs])
    heading = (
        loss_plot.title(_layout(logs[0]), os.path.abspath(logs[0].path))
        if alone
        else loss_plot.title("", place)
    )
    return loss_plot.loss_curves(path, runs, heading, x)


def _records(log: LogSummary) -> loss_plot.Records:
    tokens = {i.iteration: i.consumed_tokens for i in log.iterations}
    validations = [
        {"kind": "validation", "iteration": n, "lm_loss": loss, "consumed_tokens": tokens.get(n)}
        for n, loss in log.validations
    ]
    return [
        *({"kind": "train", **asdict(i)} for i in log.iterations),
        *validations,
        *filter(None, [log.experts]),
    ]


def _layout(log: LogSummary) -> str:
    """The run's size and layout as far as they are known."""
    job = log.job
    return (
        loss_plot.describe(job.run, job.dp)
        if job.run and job.dp
        else f"{job.ranks} ranks"
        if job.ranks
        else ""
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "logs",
        nargs="+",
        metavar="LOG",
        help="a run's log, or its --save, whose history.jsonl is read",
    )
    parser.add_argument("--csv", metavar="FILE", help="write a row per log into FILE")
    parser.add_argument(
        "--per-iteration",
        action="store_true",
        help="with --csv: a row per iteration (or log interval) instead",
    )
    parser.add_argument(
        "--png",
        metavar="FILE",
        help="draw loss and TFLOPs of all logs into FILE, and of one history "
        "the load of every expert",
    )
    parser.add_argument(
        "--x",
        choices=tuple(loss_plot.AXES),
        default="iteration",
        help="what --png draws over (default: iteration)",
    )
    parser.add_argument(
        "--markdown",
        action="store_true",
        help="print the table with a heading and lists, for a document",
    )
    parser.add_argument(
        "--follow",
        action="store_true",
        help="read on while the jobs run, until their last line or Ctrl-C",
    )
    parser.add_argument(
        "--interval",
        type=float,
        default=2.0,
        metavar="S",
        help="with --follow: seconds between two reads of the logs (default: 2)",
    )
    parser.add_argument(
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
    """Return the job that the flags describe, for logs without a `run:` line. Raise ValueError for wrong or contradictory flags."""
    for name in ("nodes", "ranks_per_node", "interval"):
        value = getattr(options, name)
        check(
            value is None or value > 0,
            f"--{name.replace('_', '-')} is {value}: pass a number above 0",
        )
    flags = arguments.run_flags(vars(options))
    check(
        flags.world_size is None and not flags.dry_run,
        "--world-size and --dry-run have no meaning here: pass --nodes and --ranks-per-node",
    )
    ranks = options.nodes and options.nodes * options.ranks_per_node
    job = Job(
        values=flags.fields,
        recipe=flags.recipe,
        nodes=options.nodes,
        ranks=ranks,
        other_program=True,
    )
    _ = job.run, job.dp  # ValueError for flags that are wrong, before any log is read
    return job


def check_outputs(options: argparse.Namespace) -> None:
    """Raises ValueError, before any log is read, for files that cannot be written, or whose names end as a log's may."""
    check(
        options.csv is not None or not options.per_iteration,
        "--per-iteration needs --csv FILE: pass both",
    )
    for name in ("csv", "png"):
        if path := getattr(options, name):
            check(
                path.endswith(f".{name}"),
                f"--{name} {path}: pass a file whose name ends with .{name}",
            )
            check_file(f"--{name}", path)


def main(options: argparse.Namespace) -> int:
    """Read the logs, print the table and write the files. Raises ValueError, one line, for a user's mistake."""
    if options.ranks:
        return show_ranks(options)
    job = job_of(options)
    check_outputs(options)
    files = [LogFile(_file_of(path), job, options.formula) for path in options.logs]
    logs = follow(files, options) if options.follow else _read(files)
    for log in logs:
        check(
            bool(log.iterations),
            f"{log.path}: has no line of an iteration ('iteration 1/ 100 | ...'): pass a run's log or "
            "history.jsonl",
        )
        check(
            options.x == "iteration" or log.iterations[-1].consumed_tokens,
            f"--x {options.x}: {log.path} does not say how many tokens were consumed: leave it out",
        )
    _write(options, logs)
    print(text(logs, options.markdown))
    return 0


def _file_of(path: str) -> str:
    """The log that a word of the command line names."""
    history = os.path.join(path, HISTORY)
    check(
        not os.path.isdir(path) or os.path.exists(history),
        f"{path}: is a directory without {HISTORY}: pass a run's log or its --save",
    )
    return history if os.path.isdir(path) else path


def show_ranks(options: argparse.Namespace) -> int:
    """--ranks: a table for each file, and the heat map."""
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


def _read(files: Sequence[LogFile]) -> list[LogSummary]:
    for file in files:
        file.poll()
    return [file.finish() for file in files]


def _write(options: argparse.Namespace, logs: Sequence[LogSummary]) -> None:
    if options.csv:
        with writing("--csv", options.csv):
            (write_iterations_csv if options.per_iteration else write_csv)(options.csv, logs)
    if options.png:
        with writing("--png", options.png):
            draw(options.png, logs, options.x)


@dataclass
class _Shown:
    """The iteration that was last shown of a log."""

    iteration: int = 0


def follow(files: Sequence[LogFile], options: argparse.Namespace) -> list[LogSummary]:
    """Read the logs as they grow, saying where they are and redrawing, until each is finished or Ctrl-C."""
    shown = [_Shown() for _ in files]
    try:
        while True:
            grown = [file.poll() for file in files]
            logs = [file.reader.summary() for file in files]
            for log, last in zip(logs, shown):
                _show(log, last)
            if any(grown) and any(log.iterations for log in logs):
                _write(options, [log for log in logs if log.iterations])
            if all(log.finished for log in logs):
                break
            time.sleep(options.interval)
    except KeyboardInterrupt:
        print(file=sys.stderr)
    return [file.finish() for file in files]


def _show(log: LogSummary, shown: _Shown) -> None:
    """One line on standard error when there is a new iteration, with an estimate of what is left."""
    if not log.iterations or log.iterations[-1].iteration == shown.iteration:
        return
    last = log.iterations[-1]
    shown.iteration = last.iteration
    left = (last.train_iters - last.iteration) * (log.seconds or 0)
    loss = "" if last.lm_loss is None else f", loss {last.lm_loss:.4g}"
    tokens = "" if last.tokens_per_second is None else f", {last.tokens_per_second:,.0f} tokens/s"
    print(
        f"{log.path}: iteration {last.iteration} of {last.train_iters}, {seconds_text(log.seconds)} s each, "
        f"{rate_text(log.tflops)} TFLOPs per rank{tokens}{loss}, {duration_text(left)} left",
        file=sys.stderr,
        flush=True,
    )
