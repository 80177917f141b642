"""What heartbeats, the watchdog's thread and the report of slow ranks cost a step: with and without them, in turn in one process.

    python -m benchmarks watch --recipe 124m --micro-batch-size 1 --rounds 20

A round is a step with heartbeats and a report of slow ranks, and one without, in changing order; the thread, which looks once a
second, is there all the time, because starting one for each step costs more than the rest. Beside what the clock says of two steps
stands what is counted: signs of life in a step, times what one takes. Left out: collectives, of which a rank alone has none.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fugaku_megatron.comm.grid import Grid
from fugaku_megatron.comm.solo import SoloComm
from fugaku_megatron.config.checks import check
from fugaku_megatron.data.dataset import MockDataset
from fugaku_megatron.host import runtime
from fugaku_megatron.host.observed import Phases
from fugaku_megatron.training.observers import Heartbeats, Observers
from fugaku_megatron.training.rank_times import RankTimes
from fugaku_megatron.training.train import Trainer
from fugaku_megatron.watchdog.heartbeat import Heartbeat
from fugaku_megatron.watchdog.watch import HangSettings, Watchdog

from . import disturbance, driver, shapes

CALLS = 20_000  # signs of life that are timed
Watched = tuple[Watchdog, RankTimes, Observers]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this family."""
    shapes.add_arguments(parser)
    parser.add_argument("--seq-length", type=int, default=256, help="tokens per sample (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="counted steps of each kind (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")


def run(options: argparse.Namespace) -> None:
    """Measure, print, write --json."""
    check(options.rounds > 0, f"--rounds {options.rounds}: give 1 or more")
    check(options.tensor_model_parallel_size == 1, "--tensor-model-parallel-size: this benchmark has one rank, leave it out")
    watch, config = disturbance.Watch(torch.get_num_threads(), time.process_time), shapes.run_of(
        options, seq_length=options.seq_length, train_iters=10 * options.rounds + 10)
    data = MockDataset(config.model.vocab_size, options.seq_length, 4096, 1)
    trainer = Trainer(config, SoloComm(), Grid(1, 1, 1).groups(SoloComm()), data)
    with tempfile.TemporaryDirectory() as folder:
        with watching(trainer, Path(folder)) as watched:
            rounds = [one_round(trainer, watched, bool(i % 2)) for i in range(-1, options.rounds)][1:]
        result = {**{name: statistics.median(r[name] for r in rounds) for name in rounds[0]}, "nanoseconds": nanoseconds(folder)}
    trainer.close()
    result |= {"ratio": statistics.median(r["watched"] / r["unwatched"] for r in rounds), "rounds": rounds,
               "counted": result["signs"] * result["nanoseconds"] / 1e9 / result["unwatched"],
               "busy": watch.others() > disturbance.OTHERS}
    print(text(options, result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def one_round(trainer: Trainer, watched: Watched, watched_first: bool) -> dict[str, float]:
    """Seconds of a watched step and of another, and the signs of life of the former."""
    watchdog, times, observers = watched
    result: dict[str, float] = {}
    for watches in (watched_first, not watched_first):
        before = watchdog.heart.beat().number
        if watches:
            trainer.watch, trainer.waiting_for_data = observers.watch, observers.reading
            result["watched"] = step(trainer, watchdog, times)
            result["signs"] = watchdog.heart.beat().number - before
        else:
            trainer.watch, trainer.waiting_for_data = None, contextlib.nullcontext
            result["unwatched"] = step(trainer)
    return result


@contextlib.contextmanager
def watching(trainer: Trainer, folder: Path) -> Iterator[Watched]:
    """What watches a rank, as `fugaku-megatron train` has it."""
    watchdog = Watchdog(Heartbeat(folder / "node"), HangSettings(None, folder, None))
    observers = Observers(Phases(), Heartbeats(watchdog.heart, Grid(1), 0), None)
    try:
        yield watchdog, RankTimes(trainer.run, trainer.layout, trainer.world, observers.phases, print), observers
    finally:
        watchdog.close()


def step(trainer: Trainer, watchdog: Watchdog | None = None, times: RankTimes | None = None) -> float:
    """Seconds of a step, with the report of slow ranks if it is watched."""
    began = time.perf_counter()
    if watchdog is None:
        trainer.train_step()
        return time.perf_counter() - began
    times.begin()
    with watchdog.heart.iteration(trainer.progress.iteration + 1):
        result = trainer.train_step()
    watchdog.measured(result.seconds)
    times.end(result.seconds)
    times.finish_interval(trainer.progress.iteration)
    return time.perf_counter() - began


def nanoseconds(folder: str) -> float:
    """What one sign of life takes."""
    heart = Heartbeat(Path(folder) / "timed")
    with heart.iteration(1):
        began = time.perf_counter()
        for microbatch in range(CALLS // 2):
            heart.leave(heart.enter(f"forward of micro-batch {microbatch}"))
        seconds = time.perf_counter() - began
    heart.close()
    return seconds / CALLS * 1e9


def text(options: argparse.Namespace, result: dict[str, Any]) -> str:
    """The figures in sentences."""
    return "\n".join([
        f"{options.recipe}, one rank, median of {options.rounds} rounds" + "  BUSY MACHINE" * result["busy"],
        f"a step takes {result['unwatched']:.4f} s, watched {result['watched']:.4f} s: {result['ratio'] - 1:+.2%}",
        f"counted: {result['signs']:.0f} signs of life of {result['nanoseconds']:.0f} ns in a step, {result['counted']:.4%} of it",
        f"{runtime.cpu_model()}, measured", driver.command_line()])
