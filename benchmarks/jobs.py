"""Real jobs to measure: runs mpiexec ... pretrain_gpt.py and reads its log.

Left out: processes of this package (child.py), which jobs are compared (alloc.py, layouts.py).
"""

from __future__ import annotations

import argparse
import re
import resource
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from fugaku_megatron.config.checks import check
from fugaku_megatron.config.run_config import RunConfig
from fugaku_megatron.logs.iteration import parse_log
from fugaku_megatron.logs.metrics import parse_peak_memory
from fugaku_megatron.logs.run_log import exact_seconds

from . import disturbance, preloads
from .child import ROOT, mpiexec

PROGRAM = ROOT / "pretrain_gpt.py"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to run. preload: an allocator's library for LD_PRELOAD. warm_up: number of first iterations that are not measured."""

    ranks: int
    threads: int
    flags: tuple[str, ...]
    preload: Path | None = None
    warm_up: int = 1

    def command(self) -> list[str]:
        """The command line; LD_PRELOAD and OMP_NUM_THREADS are in `environment`."""
        return [mpiexec(), "-n", str(self.ranks), sys.executable, str(PROGRAM), *self.flags]

    def environment(self) -> dict[str, str]:
        """The variables of the job's processes."""
        return {**preloads.environment(self.preload), "OMP_NUM_THREADS": str(self.threads)}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Figures from the log: medians over the iterations after the warm-up; faults, system time and clock are those of rank 0.

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
    watch = disturbance.Watch(job.ranks * job.threads, children_seconds)
    done = subprocess.run(job.command(), env=job.environment(), capture_output=True, text=True, stdin=subprocess.DEVNULL)
    others, lines = watch.others(), done.stdout.splitlines()
    iterations, memory = parse_log(lines)[job.warm_up:], parse_peak_memory(lines)
    if done.returncode or not iterations or memory is None:
        message = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        raise RuntimeError(f"{' '.join(job.command())} ended with exit code {done.returncode} and said: {message}")
    medians = {name: statistics.median(getattr(i, name) for i in iterations)
              for name in ("tflops", "minor_faults", "system_seconds", "clock_ghz")}
    seconds = statistics.median(exact_seconds(i) for i in iterations)
    return Measured(seconds=seconds, samples_per_second=iterations[-1].global_batch_size / seconds, peak_memory_mib=memory,
                    allocator=allocator(done.stdout), loss=iterations[-1].lm_loss,
                    others=others, **medians)


def children_seconds() -> float:
    """CPU seconds of all processes that this one started and waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def allocator(log: str) -> str:
    """The allocator that the log names: "tcmalloc", "glibc 2.36, tuned" ..., or "unknown"."""
    match = re.search(r" threads, allocator (.*?)(?:: tensors| \(preloaded|, torch)", log)
    return match[1] if match else "unknown"


def flags(options: argparse.Namespace, run: RunConfig, iterations: int, kernels: str, *more: object) -> tuple[str, ...]:
    """The command line of `run`, which `options` (see shapes.add_arguments, and dtype) describe, on mock tokens."""
    parallel, batch = run.parallel, run.batch
    words = ("--recipe", options.recipe, "--vocab-size", run.model.vocab_size, "--mock-data", "--eval-iters", 0, "--log-interval",
             1, "--train-iters", iterations, "--micro-batch-size", batch.micro_batch_size, "--global-batch-size",
             batch.global_batch_size, "--tensor-model-parallel-size", parallel.tensor_model_parallel_size,
             "--pipeline-model-parallel-size", parallel.pipeline_model_parallel_size, "--kernels", kernels,
             *(["--bf16"] if options.dtype == "bf16" else []), *more)
    return tuple(map(str, words))


def threads_each(ranks: int, threads: int) -> int:
    """Threads of one of `ranks` ranks that share `threads` cores. ValueError when there are not enough."""
    check(ranks <= threads, f"--ranks {ranks} needs {ranks} cores, one thread each; this run has {threads}: give fewer ranks")
    return threads // ranks
