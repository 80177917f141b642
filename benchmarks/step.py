"""Our trainer's step against another program's, in turn, each in a process of its own; or parallel layouts against one rank.

    python -m benchmarks step --micro-batch-size 4 [--dtype bf16] [--baseline hf] [--baseline-compile] [--baseline-preload tcmalloc]
    python -m benchmarks step --ranks 2 --global-batch-size 16                        TP2, DP2 and PP2 against one rank
    python -m benchmarks step --ranks 2 --global-batch-size 4 --schedules             PP2 under every schedule against one rank

Both sides start from the same weights and use the same tokens, batch, AdamW and clipping, without dropout; their losses are
compared, so both do the same work. Ours runs as pretrain_gpt.py does, the baseline with the system's allocator or
--baseline-preload, and with torch's MKL at full width (mkl.py); with --mkl both a third process has it as shipped. No two of them
compute at the same time. Figures are medians over the rounds that other processes did not disturb; the peak of multiply-adds is
measured between rounds. Left out: the sides themselves (contestant.py), layouts (layouts.py).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from fugaku_megatron.config.checks import check
from fugaku_megatron.config.run_config import RunConfig
from fugaku_megatron.costs import accounting
from fugaku_megatron.host import runtime
from fugaku_megatron.host.runtime import fma_peak_gflops

from . import baselines, disturbance, driver, layouts, mkl, preloads, shapes
from .contestant import SIDES, Apart, Contestant, Task

SHIPPED = "shipped"  # the side that --mkl both adds
PRECISIONS = ("fp32", "bf16")
PAUSE = 0.1  # s; libgomp's threads spin for some milliseconds after a parallel region, then they sleep
PEAK_ROUNDS = 10  # measurements of the FMA peak; the first wakes this process's threads
PATIENCE = 2  # disturbed rounds are repeated, up to PATIENCE x rounds
SAME_LOSS = {"fp32": 1e-4, "bf16": 2e-2}  # relative; BF16 rounds weights in ours and not in the baseline's autocast


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this family."""
    shapes.add_arguments(parser)
    parser.add_argument("--seq-length", type=int, help="tokens of a sample (default: the recipe's)")
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=1, help="with --ranks")
    parser.add_argument("--global-batch-size", type=int, help="samples per step (default: a micro-batch; with --ranks 16)")
    parser.add_argument("--dtype", default="fp32", choices=PRECISIONS)
    parser.add_argument("--kernels", default="native", choices=("native", "torch", "auto"), help="ours (default: %(default)s)")
    parser.add_argument("--baseline", default="plain", choices=baselines.BASELINES)
    parser.add_argument("--baseline-compile", action="store_true", help="torch.compile the baseline")
    parser.add_argument("--baseline-preload", metavar="LIB",
                        help=f"the baseline's allocator: a path, or {', '.join(preloads.LIBRARIES)}")
    mkl.add_argument(parser, "the baseline's", both=True)
    parser.add_argument("--apart", action="store_true", help="one process at a time, for two that do not fit into memory")
    parser.add_argument("--schedules", action="store_true", help="with --ranks: pipelines over all ranks, under every schedule")
    parser.add_argument("--ranks", type=int, help="compare layouts of that many ranks with one rank, instead of a baseline")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to FILE")


def run_values(options: argparse.Namespace) -> dict[str, Any]:
    """Fields of the run that replace the recipe's: mock tokens, no dropout, no evaluation, a constant learning rate."""
    length = {} if options.seq_length is None else {"seq_length": options.seq_length}
    return {**length, "vocab_size": shapes.vocabulary(options.recipe), "micro_batch_size": options.micro_batch_size,
            "global_batch_size": options.global_batch_size or options.micro_batch_size, "mock_data": True, "hidden_dropout": 0.0,
            "attention_dropout": 0.0, "bf16": options.dtype == "bf16", "eval_iters": 0, "lr_decay_style": "constant",
            "lr_warmup_iters": 0, "train_iters": 1 + (1 + PATIENCE) * options.rounds, "kernels": options.kernels}


def run(options: argparse.Namespace) -> None:
    """Measure, print, write --json. ValueError for options that do not fit."""
    check(options.rounds > 0, f"--rounds {options.rounds}: give 1 or more")
    check(options.threads > 0, f"--threads {options.threads}: give 1 or more")
    if options.ranks is not None:
        return layouts.run(options)
    check(not options.schedules, "--schedules needs --ranks, the stages of the pipelines: give it")
    check(options.tensor_model_parallel_size == options.pipeline_model_parallel_size == 1,
          "--tensor-model-parallel-size and --pipeline-model-parallel-size need --ranks; a baseline is compared on one rank")
    config = shapes.run_of(options, **run_values(options))
    baselines.check_baseline(options.baseline, options.baseline_compile, config.model)
    preload = [preloads.resolve(options.baseline_preload)] if options.baseline_preload else []
    torch.set_num_threads(options.threads)
    print(f"{runtime.cpu_model()}, {options.threads} threads; building both sides", flush=True)
    with ExitStack() as stack:
        made = {side: task(options, side, mkl.preload(options.mkl) + preload) for side in SIDES}
        if options.mkl == mkl.BOTH and mkl.narrowed():
            made[SHIPPED] = task(options, "baseline", preload)
        sides = {side: Apart(one) if options.apart else stack.enter_context(Contestant(one)) for side, one in made.items()}
        result = report(options, config, sides, *measure(options, sides))
    show(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def task(options: argparse.Namespace, side: str, preload: list[Path]) -> Task:
    """The task of the process of `side`. preload: the baseline's libraries."""
    baseline = {"baseline": options.baseline, "compiled": options.baseline_compile, "preload": tuple(map(str, preload))}
    return Task(side=side, recipe=options.recipe, values=run_values(options), threads=options.threads,
                **(baseline if side == "baseline" else {}))


def measure(options: argparse.Namespace, sides: dict[str, Contestant]) -> tuple[list[dict[str, Any]], int]:
    """(rounds to report, number of discarded rounds). The first steps warm up, and must have the same loss.

    A round: {"ours": a step's record, "baseline": ..., "peak_gflops", "clock_ghz", "others"}.
    """
    first = {side: contestant.step()["loss"] for side, contestant in sides.items()}
    if not math.isclose(first["ours"], first["baseline"], rel_tol=SAME_LOSS[options.dtype]):
        raise RuntimeError(f"the two do not train the same: first losses {first['ours']:.6f} (ours), {first['baseline']:.6f} "
                           "(baseline)")
    rounds: list[dict[str, Any]] = []
    quiet: list[dict[str, Any]] = []
    while len(quiet) < options.rounds and len(rounds) < (1 + PATIENCE) * options.rounds:
        rounds.append(one_round(options.threads, sides))
        quiet += rounds[-1:] if rounds[-1]["others"] <= disturbance.OTHERS else []
        steps = ", ".join(f"{side} {rounds[-1][side]['seconds']:.3f} s" for side in sides)
        print(f"  round {len(rounds)}: {steps}" + "  BUSY MACHINE" * (rounds[-1]["others"] > disturbance.OTHERS), flush=True)
    return (quiet, len(rounds) - len(quiet)) if len(quiet) == options.rounds else (rounds, 0)


def one_round(threads: int, sides: dict[str, Contestant]) -> dict[str, Any]:
    """A step of each side, then the machine's peak and clock."""
    result: dict[str, Any] = {}
    watch = disturbance.Watch(threads, lambda: sum(contestant.cpu_seconds() for contestant in sides.values()))
    for side, contestant in sides.items():
        result[side] = contestant.step()
        time.sleep(PAUSE)
    result["others"] = watch.others()
    result["peak_gflops"] = fma_peak_gflops(PEAK_ROUNDS)
    result["clock_ghz"] = runtime.clock_ghz()
    return result


def report(options: argparse.Namespace, config: RunConfig, sides: dict[str, Contestant], rounds: list[dict[str, Any]],
           discarded: int) -> dict[str, Any]:
    """The result as JSON."""
    size = config.batch.global_batch_size
    flops = accounting.model_flops(config, size)
    every = {side: {**summary([r[side] for r in rounds], flops, size * config.model.seq_length), **contestant.ready}
             for side, contestant in sides.items()}
    for side in sides.keys() - {"ours"}:
        full = not mkl.narrowed() or side == "baseline" and options.mkl != "shipped"
        every[side] |= {"name": options.baseline, "compiled": options.baseline_compile, "preload": options.baseline_preload,
                        "mkl": "full" if full else "shipped", "ratio": every[side]["seconds"] / every["ours"]["seconds"]}
    peak = statistics.median(r["peak_gflops"] for r in rounds)
    return {**every, "ratio": every["baseline"]["ratio"], "peak_gflops": peak,
            "ceiling_fraction": flops / every["ours"]["seconds"] / peak / 1e9 if options.dtype == "fp32" else None,
            "clock_ghz": statistics.median(r["clock_ghz"] for r in rounds), "threads": options.threads,
            "cpu": runtime.cpu_model(), "recipe": options.recipe, "dtype": options.dtype,
            "micro_batch_size": options.micro_batch_size, "global_batch_size": size, "model_flops": flops,
            "parameters": accounting.parameters(config), "torch": torch.__version__, "rounds": rounds,
            "busy": any(r["others"] > disturbance.OTHERS for r in rounds), "rounds_thrown_away": discarded,
            "repeat": driver.command_line()}


def summary(steps: list[dict[str, float]], flops: float, tokens: int) -> dict[str, Any]:
    """Medians of one side's steps. flops, tokens: of a step, the former accounting.model_flops; tflops: 10^12 FLOPs per second."""
    medians = {name: statistics.median(step[name] for step in steps) for name in ("seconds", "minor_faults", "system_seconds")}
    return {"tokens_per_s": tokens / medians["seconds"], "seconds": medians["seconds"], "tflops": flops / medians["seconds"] / 1e12,
            "peak_rss_mib": max(step["peak_rss_mib"] for step in steps), "minor_faults_per_step": medians["minor_faults"],
            "system_seconds_per_step": medians["system_seconds"], "losses": [step["loss"] for step in steps],
            "idle_cpu_seconds_per_turn": statistics.median(step["idle_cpu_seconds"] for step in steps)}


def label_of(side: dict[str, Any]) -> str:
    """A baseline as the table names it."""
    return side["name"] + (" compiled" if side["compiled"] else "") + f", MKL {side['mkl']}"


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    print(f"{'':<28} {'tokens/s':>9} {'s/step':>8} {'TFLOPs':>7} {'peak MiB':>9} {'faults/step':>12} {'system s':>9}  allocator")
    others = {label_of(result[side]): result[side] for side in ("baseline", SHIPPED) if side in result}
    for label, side in {"ours": result["ours"], **others}.items():
        print(f"{label:<28} {side['tokens_per_s']:>9.1f} {side['seconds']:>8.3f} {side['tflops']:>7.4f} "
              f"{side['peak_rss_mib']:>9.0f} {side['minor_faults_per_step']:>12.0f} "
              f"{side['system_seconds_per_step']:>9.3f}  {side['allocator']}")
    ceiling = f", {100 * result['ceiling_fraction']:.1f} % of the FMA peak" if result["ceiling_fraction"] is not None else ""
    ratios = ", ".join(f"{side['ratio']:.3f} x as fast as {label}" for label, side in others.items())
    print(f"ours is {ratios}{ceiling} ({result['peak_gflops']:.0f} GFLOP/s at "
          f"{result['clock_ghz']:.2f} GHz, {result['threads']} threads, "
          f"{result['cpu']}, measured)" + ("  BUSY MACHINE" if result["busy"] else ""))
    print(result["repeat"])
