"""Real training jobs to measure: runs mpiexec ... pretrain_gpt.py and reads its log.

Left out: processes of this package (child.py), which jobs are compared (alloc.py, step.py, tables.py).
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from fugaku_megatron.config.fields import check, flag_words
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.observe.export.metrics_writer import parse_peak_memory
from fugaku_megatron.observe.log.iteration_metrics import parse_log
from fugaku_megatron.observe.log.run_log import exact_seconds

from . import core, disturbance, preloads, shapes
from .child import ROOT, mpiexec

PROGRAM = ROOT / "pretrain_gpt.py"
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A configuration that is compared with others. The host's threads are divided among `ranks`."""

    ranks: int = 1
    tp: int = 1
    pp: int = 1
    mbs: int = 1
    seq: int | None = None  # the recipe's
    recompute: bool = False
    kernels: str = "native"
    allocator: str = "tuned"
    more: tuple[tuple[str, Any], ...] = ()  # other fields of the run

    @property
    def dp(self) -> int:
        return self.ranks // (self.tp * self.pp)

    def fields(self, batch: int) -> dict[str, Any]:
        """Return the fields of the run with a global batch of `batch` samples."""
        length = {"seq_length": self.seq, "max_position_embeddings": self.seq} if self.seq else {}
        return {
            **length,
            "micro_batch_size": self.mbs,
            "global_batch_size": batch,
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            **({"recompute_granularity": "full"} if self.recompute else {}),
            **dict(self.more),
        }


@dataclass(frozen=True, kw_only=True)
class Job:
    """Job to run. preload: an allocator's library for LD_PRELOAD. warm_up: number of first iterations that are not measured."""

    ranks: int
    threads: int
    flags: tuple[str, ...]
    allocator: str = ""  # what the log must say; nothing: it is not looked at
    preload: Path | None = None
    warm_up: int = 1

    def command(self) -> list[str]:
        """Return the command line; LD_PRELOAD and OMP_NUM_THREADS are in `environment`."""
        return [mpiexec(), "-n", str(self.ranks), sys.executable, str(PROGRAM), *self.flags]

    def environment(self) -> dict[str, str]:
        """Return the variables of the job's processes."""
        return {**preloads.environment(self.preload), "OMP_NUM_THREADS": str(self.threads)}


def add_threads(parser: argparse.ArgumentParser) -> None:
    """Add the option for the cores that the ranks share."""
    parser.add_argument(
        "--threads",
        type=int,
        default=torch.get_num_threads(),
        help="of all ranks together (default: %(default)s)",
    )


def job(
    options: argparse.Namespace,
    cell: Cell,
    batch: int,
    iterations: int,
    warm_up: int = 1,
    **more: Any,
) -> Job:
    """Return the training job of a cell on mock tokens. options: recipe, threads, dtype; more: fields of the run.

    ValueError when the model does not divide or there are too few threads.
    """
    run = shapes.run_of(
        argparse.Namespace(recipe=options.recipe, micro_batch_size=cell.mbs), **cell.fields(batch)
    )
    Layout.from_run(run, cell.ranks)
    check(
        cell.ranks <= options.threads,
        f"--ranks {cell.ranks} needs {cell.ranks} cores, one thread each; this run has "
        f"{options.threads}: pass fewer ranks",
    )
    preload = preloads.find(cell.allocator) if cell.allocator in preloads.LIBRARIES else None
    fields = {
        "vocab_size": run.model.vocab_size,
        "mock_data": True,
        "eval_iters": 0,
        "log_interval": 1,
        "train_iters": warm_up + iterations,
        "kernels": cell.kernels,
        **({"bf16": True} if options.dtype == "bf16" else {}),
        "allocator": "tuned" if cell.allocator == "tuned" else "stock",
        **more,
        **cell.fields(batch),
    }
    words = (word for name, value in fields.items() for word in flag_words(name, value))
    return Job(
        ranks=cell.ranks,
        threads=options.threads // cell.ranks,
        flags=("--recipe", options.recipe, *words),
        allocator=cell.allocator,
        preload=preload,
        warm_up=warm_up,
    )


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Figures from the log: medians over the iterations after the warm-up; faults, system time and clock come from rank 0.

    others: share of our cores that other processes used, see disturbance.py.
    """

    seconds: float
    tflops: float
    samples_per_second: float
    minor_faults: float
    system_seconds: float
    clock_ghz: float
    peak_memory_mib: int
    allocator: str
    loss: float
    others: float


def run(job: Job) -> Measured:
    """Run it to the end. RuntimeError, with the last line of its standard error, when it fails."""
    watch = disturbance.Watch(job.ranks * job.threads)
    done = subprocess.run(
        job.command(),
        env=job.environment(),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    others = watch.others()
    lines = done.stdout.splitlines()
    iterations = parse_log(lines)[job.warm_up :]
    memory = parse_peak_memory(lines)
    if done.returncode or not iterations or memory is None:
        message = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        raise RuntimeError(
            f"{' '.join(job.command())} ended with exit code {done.returncode} and said: {message}"
        )
    names = ("tflops", "minor_faults", "system_seconds", "clock_ghz")
    seconds = statistics.median(exact_seconds(i) for i in iterations)
    measured = Measured(
        seconds=seconds,
        samples_per_second=iterations[-1].global_batch_size / seconds,
        peak_memory_mib=memory,
        allocator=allocator(done.stdout),
        loss=iterations[-1].lm_loss,
        others=others,
        **core.medians([vars(i) for i in iterations], names),
    )
    check_allocator(job.allocator, measured.allocator)
    return measured


def allocator(log: str) -> str:
    """Return the allocator that the log names: "tcmalloc", "glibc 2.36, tuned" ..., or "unknown"."""
    match = re.search(r" threads, allocator (.*?)(?:: tensors| \(preloaded|, torch)", log)
    return match[1] if match else "unknown"


def check_allocator(wanted: str, logged: str) -> None:
    """Raise RuntimeError when a job ran with another allocator than it should: its figures would be misleading."""
    if (wanted if wanted in preloads.LIBRARIES else f", {wanted}" if wanted else "") not in logged:
        raise RuntimeError(
            f"{wanted}: the job's log says allocator {logged}; is LD_PRELOAD passed on by this mpiexec?"
        )


def in_turn(planned: Mapping[K, Job], rounds: int) -> dict[K, list[Measured]]:
    """Run every job once in each round, with a line for each."""
    done: dict[K, list[Measured]] = {key: [] for key in planned}
    for turn in range(rounds):
        for number, (key, task) in enumerate(planned.items(), 1):
            done[key].append(run(task))
            print(
                f"  round {turn + 1} of {rounds}, {number} of {len(planned)}: {key}: {done[key][-1].seconds:.3f} s",
                flush=True,
            )
    return done


def summary(measured: Sequence[Measured]) -> dict[str, Any]:
    """Return the medians over the rounds of one job, the largest memory, the last loss, and whether any of them was disturbed."""
    names = (
        "seconds",
        "tflops",
        "samples_per_second",
        "minor_faults",
        "system_seconds",
        "clock_ghz",
    )
    return {
        **core.medians([asdict(m) for m in measured], names),
        "peak_memory_mib": max(m.peak_memory_mib for m in measured),
        "loss": measured[-1].loss,
        "log": measured[-1].allocator,
        "busy": any(m.others > disturbance.OTHERS for m in measured),
    }
