"""Waiting time of training while a checkpoint is written, with and without --async-save, in turn in one process.

    python -m benchmarks save --recipe 124m --seq-length 256 --directory /scratch/me

A round is: a save that the run waits for; some steps; a save overlapped with the run; steps until the checkpoint is complete. Each
save writes the weights and both moments of one rank. Left out: a file system that many ranks share.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from fugaku_megatron.config.fields import check
from fugaku_megatron.host.timing import seconds
from fugaku_megatron.training.trainer import Trainer

from . import core, disturbance, shapes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this family."""
    shapes.add_solo_arguments(parser)
    parser.add_argument(
        "--directory",
        type=Path,
        help="a disk to write to (default: the system's place for temporary files)",
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="counted saves of each kind (default: %(default)s)"
    )


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Medians over the rounds after one that is not counted."""
    check(
        options.directory is None or options.directory.is_dir(),
        f"--directory {options.directory} is not a directory: make it",
    )
    watch = disturbance.Watch(torch.get_num_threads())
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        trainer = shapes.solo_trainer(
            options, train_iters=1000, save=folder, keep_last=1, async_save=True
        )
        rounds = [one_round(trainer, folder) for _ in range(options.rounds + 1)][1:]
        trainer.close()
    result = core.medians(rounds)
    return {
        **result,
        "ratio": result["stall"] / result["waiting"],
        "busy": watch.disturbed(),
        "rounds": rounds,
    }


def one_round(trainer: Trainer, folder: str) -> dict[str, float]:
    """Seconds of a save that the run waits for, of the stall of an overlapped one and until it is complete, and of steps."""
    waiting = seconds(lambda: trainer.save(folder))
    alone = statistics.median(seconds(trainer.train_step) for _ in range(3))
    began = time.perf_counter()
    saving = trainer.save_in_background(folder)
    meanwhile = []
    stall = time.perf_counter() - began
    whole = False
    while not whole:
        meanwhile.append(seconds(trainer.train_step))
        if saving.done:
            started = time.perf_counter()
            whole = saving.advance()
            stall += time.perf_counter() - started
    return {
        "waiting": waiting,
        "stall": stall,
        "until_whole": time.perf_counter() - began,
        "step": alone,
        "step_while_saving": statistics.median(meanwhile),
    }


def text(options: argparse.Namespace, result: dict[str, Any]) -> str:
    """The figures in sentences."""
    return "\n".join(
        [
            f"{options.recipe}, one rank, median of {options.rounds}" + core.mark(result["busy"]),
            f"a save that the run waits for: {result['waiting']:.3f} s",
            f"--async-save: the run waits {result['stall']:.3f} s, {result['ratio']:.1%} of that, and the checkpoint is complete after "
            f"{result['until_whole']:.2f} s",
            f"a step takes {result['step']:.3f} s, overlapped with writing {result['step_while_saving']:.3f} s",
            f"{result['cpu']}, measured",
        ]
    )
