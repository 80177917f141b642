"""Cost of heartbeats, the watchdog's thread and the report of slow ranks in a step: with and without them, in turn in one process.

    python -m benchmarks watch --recipe 124m --micro-batch-size 1 --rounds 20

A round is a step with heartbeats and a report of slow ranks, and one without, in changing order; the thread, which looks once a
second, runs all the time, because starting one for each step costs more than the rest. Next to the measured seconds of both kinds
of steps stands a count: signs of life in a step, times what one takes. Left out: collectives, of which a single rank has none.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fugaku_megatron.comm.grid import Grid
from fugaku_megatron.host.observed import Phases
from fugaku_megatron.host.timing import seconds
from fugaku_megatron.observe.hang.heartbeat import Heartbeat
from fugaku_megatron.observe.hang.stragglers import RankTimes
from fugaku_megatron.observe.hang.watchdog import HangSettings, Watchdog
from fugaku_megatron.observe.observers import Heartbeats, Observers
from fugaku_megatron.training.trainer import Trainer

from . import core, disturbance, shapes

CALLS = 4_000  # signs of life that are timed at a time
TRIES = 5  # how often they are timed: the fastest counts
Watched = tuple[Watchdog, RankTimes, Observers]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this family."""
    shapes.add_solo_arguments(parser)
    parser.add_argument(
        "--rounds", type=int, default=20, help="counted steps of each kind (default: %(default)s)"
    )


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Medians over the rounds after one that is not counted."""
    watch = disturbance.Watch(torch.get_num_threads())
    trainer = shapes.solo_trainer(options, train_iters=10 * options.rounds + 10)
    with tempfile.TemporaryDirectory() as folder:
        with watching(trainer, Path(folder)) as watched:
            rounds = [one_round(trainer, watched, bool(i % 2)) for i in range(-1, options.rounds)][
                1:
            ]
        result = {**core.medians(rounds), "nanoseconds": nanoseconds(folder)}
    trainer.close()
    return {
        **result,
        "ratio": statistics.median(r["watched"] / r["unwatched"] for r in rounds),
        "rounds": rounds,
        "counted": result["signs"] * result["nanoseconds"] / 1e9 / result["unwatched"],
        "busy": watch.disturbed(),
    }


def one_round(trainer: Trainer, watched: Watched, watched_first: bool) -> dict[str, float]:
    """Return the seconds of a watched step and of another, and the watched step's signs of life."""
    watchdog, times, observers = watched
    result: dict[str, float] = {}
    for watches in (watched_first, not watched_first):
        before = watchdog.heart.beat().number
        if watches:
            trainer.watch = observers.watch
            trainer.waiting_for_data = observers.reading
            result["watched"] = seconds(lambda: watched_step(trainer, watchdog, times))
            result["signs"] = watchdog.heart.beat().number - before
        else:
            trainer.watch = None
            trainer.waiting_for_data = contextlib.nullcontext
            result["unwatched"] = seconds(trainer.train_step)
    return result


@contextlib.contextmanager
def watching(trainer: Trainer, folder: Path) -> Iterator[Watched]:
    """Yield the watchdog, times and observers of a rank, as `fugaku-megatron train` has them."""
    watchdog = Watchdog(Heartbeat(folder / "node"), HangSettings(None, folder, None))
    observers = Observers(Phases(), Heartbeats(watchdog.heart, Grid(1), 0), None)
    try:
        yield (
            watchdog,
            RankTimes(trainer.run, trainer.layout, trainer.world, observers.phases, print),
            observers,
        )
    finally:
        watchdog.close()


def watched_step(trainer: Trainer, watchdog: Watchdog, times: RankTimes) -> None:
    """A step with its heartbeats and the report of slow ranks."""
    times.begin()
    with watchdog.heart.iteration(trainer.progress.iteration + 1):
        result = trainer.train_step()
    watchdog.measured(result.seconds)
    times.end(result)
    times.report(trainer.progress.iteration)


def nanoseconds(folder: str) -> float:
    """Return the nanoseconds of one sign of life."""
    heart = Heartbeat(Path(folder) / "timed")

    def beat() -> None:
        for microbatch in range(CALLS // 2):
            heart.enter(heart.enter(f"forward of micro-batch {microbatch}"))

    with heart.iteration(1):
        fastest = min(seconds(beat) for _ in range(TRIES))
    heart.close()
    return fastest / CALLS * 1e9


def text(options: argparse.Namespace, result: dict[str, Any]) -> str:
    """The figures in sentences."""
    return "\n".join(
        [
            f"{options.recipe}, one rank, median of {options.rounds} rounds"
            + core.mark(result["busy"]),
            f"a step takes {result['unwatched']:.4f} s, watched {result['watched']:.4f} s: {result['ratio'] - 1:+.2%}",
            f"counted: {result['signs']:.0f} signs of life of {result['nanoseconds']:.0f} ns in a step, {result['counted']:.4%} of it",
            f"{result['cpu']}, measured",
        ]
    )
