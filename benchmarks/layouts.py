"""`benchmarks step --ranks N`: N ranks as TP, DP and PP (or the layout of the options) against one rank with all threads, in turn.

Every figure comes from a real `mpiexec ... pretrain_gpt.py`; the jobs take turns, round after round.
Left out: starting jobs (jobs.py).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from dataclasses import dataclass, replace
from typing import Any

from fugaku_megatron.config.checks import check, flag
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.host import runtime

from . import disturbance, driver, jobs, shapes

MICROBATCHES = 16
ITERATIONS = 3  # of each job; the first warms up


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout and its name. schedule: fields of the run that choose its schedule."""

    name: str
    ranks: int
    tp: int = 1
    pp: int = 1
    schedule: tuple[tuple[str, Any], ...] = ()

    @property
    def dp(self) -> int:
        return self.ranks // (self.tp * self.pp)


SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {}, "interleaved": {"num_virtual_stages_per_pipeline_rank": 2}, "zb-h1": {"pipeline_schedule": "zb-h1"},
    "zbv": {"pipeline_schedule": "zbv"}}
MORE_PENDING = 1.5  # micro-batches for each stage that the last pipeline may hold


def candidates(options: argparse.Namespace) -> list[Candidate]:
    """One rank first, then the layout that the options name, PP under every schedule, or TP, DP and PP over all ranks."""
    ranks, tp, pp = options.ranks, options.tensor_model_parallel_size, options.pipeline_model_parallel_size
    check(ranks >= 2, f"--ranks {ranks}: give 2 or more, they are compared with one rank")
    check(ranks % (tp * pp) == 0, f"--ranks {ranks} is not divisible by --tensor-model-parallel-size {tp} x "
          f"--pipeline-model-parallel-size {pp}: change one of them")
    if options.schedules:
        check(tp * pp == 1, "--schedules compares pipelines over all --ranks: leave the parallel sizes out")
        more = math.ceil(MORE_PENDING * ranks)
        orders = {**SCHEDULES, f"zbv of {more}": {**SCHEDULES["zbv"], "zero_bubble_max_pending_backward": more}}
        pipelines = [Candidate(name=f"PP{ranks} {name}", ranks=ranks, pp=ranks, schedule=tuple(fields.items()))
                     for name, fields in orders.items()]
        return [Candidate(name="one rank", ranks=1), *pipelines]
    if tp * pp > 1:
        named = Candidate(name="", ranks=ranks, tp=tp, pp=pp)
        sizes = [f"{name}{size}" for name, size in (("TP", tp), ("PP", pp), ("DP", named.dp)) if size > 1]
        return [Candidate(name="one rank", ranks=1), replace(named, name=" x ".join(sizes))]
    return [Candidate(name="one rank", ranks=1), Candidate(name=f"TP{ranks}", ranks=ranks, tp=ranks),
            Candidate(name=f"DP{ranks}", ranks=ranks), Candidate(name=f"PP{ranks}", ranks=ranks, pp=ranks)]


def job(options: argparse.Namespace, candidate: Candidate) -> jobs.Job:
    """The training job of a layout. ValueError when the model does not divide."""
    size = options.global_batch_size or MICROBATCHES * options.micro_batch_size
    config = shapes.run_of(options, tensor_model_parallel_size=candidate.tp, pipeline_model_parallel_size=candidate.pp,
                           global_batch_size=size, **dict(candidate.schedule))
    Layout.from_run(config, candidate.ranks)
    order = (word for name, value in candidate.schedule for word in (flag(name), value))
    flags = jobs.flags(options, config, ITERATIONS, options.kernels, "--hidden-dropout", 0, "--attention-dropout", 0, *order)
    threads = jobs.threads_each(candidate.ranks, options.threads)
    return jobs.Job(ranks=candidate.ranks, threads=threads, flags=flags)


def run(options: argparse.Namespace) -> None:
    """Measure in turn, print, write --json."""
    planned = [(candidate, job(options, candidate)) for candidate in candidates(options)]
    measurements: dict[str, list[jobs.Measured]] = {candidate.name: [] for candidate, _ in planned}
    for turn in range(options.rounds):
        for candidate, task in planned:
            measurements[candidate.name].append(jobs.run(task))
            seconds = measurements[candidate.name][-1].seconds
            print(f"  round {turn + 1} of {options.rounds}: {candidate.name} {seconds:.3f} s", flush=True)
    result = report(options, planned, measurements)
    show(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def report(options: argparse.Namespace, planned: list[tuple[Candidate, jobs.Job]],
           measurements: dict[str, list[jobs.Measured]]) -> dict[str, Any]:
    """The result as JSON. ratio: throughput over that of one rank."""
    rows = []
    tokens = shapes.run_of(options).model.seq_length
    for candidate, task in planned:
        measured = measurements[candidate.name]
        rate = statistics.median(m.samples_per_second for m in measured)
        rows.append({"layout": candidate.name, "ranks": candidate.ranks, "threads": task.threads, "tp": candidate.tp,
                     "pp": candidate.pp, "dp": candidate.dp, "seconds": statistics.median(m.seconds for m in measured),
                     "tokens_per_s": rate * tokens, "peak_rss_mib": max(m.peak_memory_mib for m in measured),
                     "loss": measured[-1].loss, "busy": any(m.others > disturbance.OTHERS for m in measured)})
    rows = [{**row, "ratio": row["tokens_per_s"] / rows[0]["tokens_per_s"]} for row in rows]
    clock = statistics.median(m.clock_ghz for measured in measurements.values() for m in measured)
    return {"layouts": rows, "recipe": options.recipe, "dtype": options.dtype, "micro_batch_size": options.micro_batch_size,
            "global_batch_size": options.global_batch_size or MICROBATCHES * options.micro_batch_size, "threads": options.threads,
            "rounds": options.rounds, "cpu": runtime.cpu_model(), "clock_ghz": clock, "repeat": driver.command_line()}


def show(result: dict[str, Any]) -> None:
    """The table."""
    print(f"{'layout':<16} {'ranks x threads':>16} {'tokens/s':>9} {'s/step':>8} {'of one rank':>12} {'peak MiB':>9} {'loss':>9}")
    for row in result["layouts"]:
        print(f"{row['layout']:<16} {row['ranks']:>8} x {row['threads']:>5} {row['tokens_per_s']:>9.1f} {row['seconds']:>8.3f} "
              f"{row['ratio']:>12.3f} {row['peak_rss_mib']:>9} {row['loss']:>9.5f}"
              + ("  BUSY MACHINE" if row["busy"] else ""))
    print(f"{result['cpu']} at {result['clock_ghz']:.2f} GHz, measured; global batch {result['global_batch_size']}")
    print(result["repeat"])
