"""What training waits for while a checkpoint is written, with and without --async-save, in turn in one process.

    python -m benchmarks save --recipe 124m --seq-length 256 --directory /scratch/me

A round is: a save that the run waits for; some steps; a save behind the run; steps until it is whole. Written are the weights and
both moments of one rank. Left out: a file system that many ranks share.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fugaku_megatron.comm.grid import Grid
from fugaku_megatron.comm.solo import SoloComm
from fugaku_megatron.config.checks import check
from fugaku_megatron.data.dataset import MockDataset
from fugaku_megatron.host import runtime
from fugaku_megatron.training.train import Trainer

from . import disturbance, driver, shapes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this family."""
    shapes.add_arguments(parser)
    parser.add_argument("--seq-length", type=int, default=256, help="tokens per sample (default: %(default)s)")
    parser.add_argument("--directory", type=Path, help="a disk to write to (default: the system's place for temporary files)")
    parser.add_argument("--rounds", type=int, default=3, help="counted saves of each kind (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")


def run(options: argparse.Namespace) -> None:
    """Measure, print, write --json."""
    check(options.rounds > 0, f"--rounds {options.rounds}: give 1 or more")
    check(options.tensor_model_parallel_size == 1, "--tensor-model-parallel-size: this benchmark has one rank, leave it out")
    check(options.directory is None or options.directory.is_dir(), f"--directory {options.directory} is no directory: make it")
    watch, folder = disturbance.Watch(torch.get_num_threads(), time.process_time), tempfile.mkdtemp(dir=options.directory)
    try:
        trainer = build(options, folder)
        one_round(trainer, folder)
        rounds = [one_round(trainer, folder) for _ in range(options.rounds)]
        trainer.close()
    finally:
        shutil.rmtree(folder)
    result = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
    result |= {"ratio": result["stall"] / result["waiting"], "busy": watch.others() > disturbance.OTHERS, "rounds": rounds}
    print(text(options, result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def build(options: argparse.Namespace, folder: str) -> Trainer:
    """A trainer on one rank that saves into `folder`."""
    config = shapes.run_of(options, seq_length=options.seq_length, train_iters=1000, save=folder, keep_last=1, async_save=True)
    data = MockDataset(config.model.vocab_size, options.seq_length, 4096, 1)
    return Trainer(config, SoloComm(), Grid(1, 1, 1).groups(SoloComm()), data)


def one_round(trainer: Trainer, folder: str) -> dict[str, float]:
    """Seconds: a save that the run waits for, the stall of one behind it, until that is whole, and steps without and beside it."""
    waiting = seconds(lambda: trainer.save(folder))
    alone = statistics.median(seconds(trainer.train_step) for _ in range(3))
    began = time.perf_counter()
    saving, beside = trainer.save_behind(folder), []
    stall, whole = time.perf_counter() - began, False
    while not whole:
        beside.append(seconds(trainer.train_step))
        if saving.done:
            started = time.perf_counter()
            whole = saving.advance()
            stall += time.perf_counter() - started
    return {"waiting": waiting, "stall": stall, "until_whole": time.perf_counter() - began, "step": alone,
            "step_beside": statistics.median(beside)}


def seconds(work: Callable[[], Any]) -> float:
    """How long a call takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def text(options: argparse.Namespace, result: dict[str, Any]) -> str:
    """The figures in sentences."""
    return "\n".join([
        f"{options.recipe}, one rank, median of {options.rounds}" + "  BUSY MACHINE" * result["busy"],
        f"a save that the run waits for: {result['waiting']:.3f} s",
        f"--async-save: the run waits {result['stall']:.3f} s, {result['ratio']:.1%} of that, and the checkpoint is whole after "
        f"{result['until_whole']:.2f} s",
        f"a step takes {result['step']:.3f} s, beside the writing {result['step_beside']:.3f} s",
        f"{runtime.cpu_model()}, measured", driver.command_line()])
