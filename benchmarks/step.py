"""Our trainer's step against another program's, in turn, each in a process of its own; or parallel layouts against one rank.

    python -m benchmarks step --micro-batch-size 4 [--dtype bf16] [--baseline hf] [--baseline-compile] [--baseline-preload tcmalloc]
    python -m benchmarks step --baseline trl [--lora-rank 16 [--lora-base-format int8] [--baseline-load-in 8bit]]
    python -m benchmarks step --micro-batch-size 4 --dtype bf16 --int8 [--int8-wgrad]  INT8 matmuls, our BF16 step in turn as well
    python -m benchmarks step --ranks 2 --global-batch-size 16                        TP2, DP2 and PP2 against one rank
    python -m benchmarks step --ranks 2 --global-batch-size 4 --schedules             PP2 under every schedule against one rank
    python -m benchmarks step --ranks 2 --recipe demo --num-layers 2 --seq-length 65536 --global-batch-size 1 --cp-comm-type a2a p2p

Both sides start from the same weights and use the same tokens, batch, AdamW and clipping, without dropout; their losses are
compared, so both do the same work. Ours runs as pretrain_gpt.py does, the baseline with the system's allocator or
--baseline-preload, and with torch's MKL at full width (preloads.py); with --mkl both a third process has it as shipped. No two of
them compute at the same time. Figures are medians over the rounds that other processes did not disturb; the peak of multiply-adds
is measured between rounds. With --ranks every figure comes from a real `mpiexec ... pretrain_gpt.py`; the jobs take turns, round
after round. Left out: the sides themselves (contestant.py), starting jobs (jobs.py).
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fugaku_megatron.config.fields import check, flag
from fugaku_megatron.config.lora import BASE_FORMATS
from fugaku_megatron.config.parallel import CP_COMM_TYPES
from fugaku_megatron.config.run_config import RunConfig
from fugaku_megatron.costs.flops import model_flops
from fugaku_megatron.costs.stages import model_parameters
from fugaku_megatron.host.machine import clock_ghz, cpu_model, fma_peak_gflops
from fugaku_megatron.text.table import Column

from . import contestant, core, disturbance, jobs, preloads, sft, shapes
from .contestant import Apart, Contestant, Task

SIDES = ("ours", "baseline")
SHIPPED = "shipped"  # the side that --mkl both adds
UNQUANTIZED = "unquantized"  # the side that --int8 and --lora-base-format add: ours without them
INT8_FLAGS = ("int8", "int8_wgrad", "int8_head", "int8_stochastic_rounding")
PRECISIONS = ("fp32", "bf16")
PAUSE = (
    0.1  # s; libgomp's threads spin for some milliseconds after a parallel region, then they sleep
)
PEAK_ROUNDS = 10  # measurements of the FMA peak; the first wakes this process's threads
PATIENCE = 3  # up to so many times as many rounds, while others disturb them
SAME_LOSS = {
    "fp32": 1e-4,
    "bf16": 2e-2,
}  # relative; BF16 rounds weights in ours and not in the baseline's autocast, and bitsandbytes rounds the baseline's
COLUMNS: tuple[Column, ...] = (
    ("", "<32", "label"),
    ("tokens/s", ">9.1f", "tokens_per_s"),
    ("s/step", ">8.3f", "seconds"),
    ("TFLOPs", ">7.4f", "tflops"),
    ("peak MiB", ">9.0f", "peak_rss_mib"),
    ("faults/step", ">12.0f", "minor_faults_per_step"),
    ("system s", ">9.3f", "system_seconds_per_step"),
    ("allocator", "<9", "allocator"),
)


# Fields of the run that are options, with their types.
SIZES: dict[str, tuple[type, str]] = {
    "seq_length": (int, "tokens of a sample"),
    "num_layers": (int, "layers, for a part of a large model"),
    "vocab_size": (int, "words, for a part of a large model"),
    "hidden_size": (int, "elements of a token, for a part of a large model"),
    "num_attention_heads": (int, "heads of attention, for a part of a large model"),
    "ffn_hidden_size": (int, "elements between an MLP's matrices, for a part of a large model"),
    "num_experts": (int, "experts of a layer, for a part of a large model"),
    "moe_ffn_hidden_size": (int, "elements between an expert's matrices, for a part"),
    "moe_shared_expert_intermediate_size": (int, "the same of shared experts, for a part"),
    "moe_layer_freq": (str, "layers with experts, for a part of a large model"),
    "linear_attention_freq": (str, "layers with attention among gated delta nets, for a part"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this family."""
    shapes.add_arguments(parser)
    for name, (kind, words) in SIZES.items():
        parser.add_argument(flag(name), type=kind, help=f"{words} (default: the recipe's)")
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=1, help="with --ranks")
    parser.add_argument(
        "--global-batch-size",
        type=int,
        help="samples per step (default: a micro-batch; with --ranks 16)",
    )
    parser.add_argument("--dtype", default="fp32", choices=PRECISIONS)
    for name in INT8_FLAGS:
        parser.add_argument(
            flag(name),
            action="store_true",
            help="of our side; with --int8 our step without it takes turns as well",
        )
    parser.add_argument(
        "--kernels",
        default="native",
        choices=("native", "torch", "auto"),
        help="ours (default: %(default)s)",
    )
    parser.add_argument(
        "--baseline",
        default="plain",
        choices=contestant.BASELINES,
        help="plain PyTorch; hf: transformers in a loop of PyTorch; trl: its SFTTrainer, with adapters of peft (default: %(default)s)",
    )
    parser.add_argument(
        "--lora-rank",
        type=int,
        help="with --baseline trl: both sides train adapters of this rank of all linear layers",
    )
    parser.add_argument(
        "--lora-base-format",
        choices=BASE_FORMATS,
        help="with --lora-rank: storage of our frozen weights, next to our step with weights of --dtype",
    )
    parser.add_argument(
        "--baseline-load-in",
        choices=sft.LOAD_IN,
        help="with --lora-rank: bitsandbytes quantizes the baseline's frozen weights",
    )
    parser.add_argument(
        "--baseline-compile", action="store_true", help="torch.compile the baseline"
    )
    parser.add_argument(
        "--baseline-preload",
        metavar="LIB",
        help=f"the baseline's allocator: a path, or {', '.join(preloads.LIBRARIES)}",
    )
    preloads.add_mkl(parser, "the baseline's", both=True)
    parser.add_argument(
        "--apart",
        action="store_true",
        help="one process at a time, for two that do not fit into memory",
    )
    parser.add_argument(
        "--schedules",
        action="store_true",
        help="with --ranks: pipelines over all ranks, under every schedule",
    )
    parser.add_argument(
        "--cp-comm-type",
        nargs="+",
        choices=CP_COMM_TYPES,
        metavar="TYPE",
        help="with --ranks: ranks share each sequence by these ways, or by tensor and sequence parallelism",
    )
    parser.add_argument(
        "--recompute",
        action="store_true",
        help="with --ranks: compute all layers again in backward",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        help="compare layouts of that many ranks with one rank, instead of a baseline",
    )
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="default: %(default)s"
    )
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default: %(default)s)")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the sides or the layouts. ValueError for options that do not fit."""
    if options.ranks is not None:
        return measure_layouts(options)
    check(not options.schedules, "--schedules needs --ranks, the stages of the pipelines: pass it")
    check(
        options.tensor_model_parallel_size == options.pipeline_model_parallel_size == 1,
        "--tensor-model-parallel-size and --pipeline-model-parallel-size need --ranks; a baseline is compared on one rank",
    )
    config = shapes.run_of(options, **run_values(options))
    contestant.check_baseline(task(options, "baseline", []))
    preload = [preloads.resolve(options.baseline_preload)] if options.baseline_preload else []
    torch.set_num_threads(options.threads)
    print(f"{cpu_model()}, {options.threads} threads; building both sides", flush=True)
    with ExitStack() as stack:
        made = {
            side: task(options, side, preloads.mkl_preload(options.mkl) + preload) for side in SIDES
        }
        if options.mkl == preloads.BOTH and preloads.narrowed():
            made[SHIPPED] = task(options, "baseline", preload)
        if options.int8 or options.lora_base_format:
            quantized = {**dict.fromkeys(INT8_FLAGS, False), "lora_base_format": None}
            plain = made["ours"].values | quantized
            made[UNQUANTIZED] = replace(made["ours"], values=plain)
        sides = {
            side: Apart(one) if options.apart else stack.enter_context(Contestant(one))
            for side, one in made.items()
        }
        return report(options, config, sides, *take_turns(options, sides))


def sizes_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of the run that the options name."""
    return {name: value for name in SIZES if (value := getattr(options, name)) is not None}


def run_values(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of the run that replace the recipe's: mock tokens, no dropout, no evaluation, a constant learning rate.

    Balancing losses are left out, because the baselines do not compute them.
    """
    sizes = sizes_of(options)
    adapters = {}
    if options.lora_rank is not None:
        model = shapes.run_of(options, **sizes).model
        adapters = {
            "lora_rank": options.lora_rank,
            "lora_target": sft.adapted_matrices(model),
        }
    return {
        "vocab_size": shapes.vocabulary(options.recipe),
        "mask_vocab_padding": "no",  # as the baselines
        **sizes,
        **adapters,
        "lora_base_format": options.lora_base_format,
        "moe_aux_loss_coeff": (0.0,),
        "moe_z_loss_coeff": None,
        "micro_batch_size": options.micro_batch_size,
        "global_batch_size": options.global_batch_size or options.micro_batch_size,
        "mock_data": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bf16": options.dtype == "bf16",
        **{name: True for name in INT8_FLAGS if getattr(options, name)},
        "eval_iters": 0,
        "lr_decay_style": "constant",
        "lr_warmup_iters": 0,
        "train_iters": 1 + PATIENCE * options.rounds,
        "kernels": options.kernels,
    }


def task(options: argparse.Namespace, side: str, preload: list[Path]) -> Task:
    """Return the task of the process of `side`. preload: the baseline's libraries."""
    baseline = {
        "baseline": options.baseline,
        "compiled": options.baseline_compile,
        "load_in": options.baseline_load_in,
        "preload": tuple(map(str, preload)),
    }
    values = run_values(options)
    if side == "baseline":
        values.pop("lora_base_format", None)  # the baseline has a format of its own
    return Task(
        side=side,
        recipe=options.recipe,
        values=values,
        threads=options.threads,
        **(baseline if side == "baseline" else {}),
    )


def take_turns(
    options: argparse.Namespace, sides: dict[str, Contestant]
) -> tuple[list[dict[str, Any]], int]:
    """Return the rounds to report, and the number of discarded rounds or -1. The first steps warm up, and must have the same loss.

    A round: {"ours": a step's record, "baseline": ..., "peak_gflops", "clock_ghz", "others"}.
    """
    first = {side: each.step()["loss"] for side, each in sides.items()}
    rounded = options.int8 or options.lora_base_format or options.baseline_load_in
    tolerance = SAME_LOSS["bf16" if rounded else options.dtype]
    if not math.isclose(first["ours"], first["baseline"], rel_tol=tolerance):
        raise RuntimeError(
            f"the two do not train the same: first losses {first['ours']:.6f} (ours), {first['baseline']:.6f} "
            "(baseline)"
        )

    def one_round(number: int) -> tuple[dict[str, Any], bool]:
        result: dict[str, Any] = {}
        watch = disturbance.Watch(options.threads)
        for side, each in sides.items():
            result[side] = each.step()
            time.sleep(PAUSE)
        result |= {
            "others": watch.others(),
            "peak_gflops": fma_peak_gflops(PEAK_ROUNDS),
            "clock_ghz": clock_ghz(),
        }
        quiet = result["others"] <= disturbance.OTHERS
        steps = ", ".join(f"{side} {result[side]['seconds']:.3f} s" for side in sides)
        print(f"  round {number + 1}: {steps}" + core.mark(not quiet), flush=True)
        return result, quiet

    return core.quiet_rounds(one_round, options.rounds, PATIENCE)


def report(
    options: argparse.Namespace,
    config: RunConfig,
    sides: dict[str, Contestant],
    rounds: list[dict[str, Any]],
    discarded: int,
) -> dict[str, Any]:
    """Return the result as JSON."""
    size = config.batch.global_batch_size
    flops = model_flops(config, size)
    every = {
        side: {
            "label": side,
            **summary([r[side] for r in rounds], flops, size * config.model.seq_length),
            **each.ready,
        }
        for side, each in sides.items()
    }
    for side in sides.keys() - {"ours", UNQUANTIZED}:
        width = (
            "full"
            if not preloads.narrowed() or side == "baseline" and options.mkl != "shipped"
            else "shipped"
        )
        compiled = " compiled" if options.baseline_compile else ""
        load_in = f" {options.baseline_load_in}" if options.baseline_load_in else ""
        lora = "" if options.lora_rank is None else f" LoRA {options.lora_rank}"
        label = f"{options.baseline}{load_in}{lora}{compiled}, MKL {width}"
        every[side] |= {
            "label": label,
            "name": options.baseline,
            "load_in": options.baseline_load_in,
            "compiled": options.baseline_compile,
            "mkl": width,
            "preload": options.baseline_preload,
            "ratio": every[side]["seconds"] / every["ours"]["seconds"],
        }
    if UNQUANTIZED in every:
        words = [flag(name) for name in INT8_FLAGS if getattr(options, name)]
        if options.lora_base_format:
            words.append(f"LoRA on {options.lora_base_format}")
        every["ours"]["label"] = f"ours, {' '.join(words)}"
        ratio = every[UNQUANTIZED]["seconds"] / every["ours"]["seconds"]
        every[UNQUANTIZED] |= {"label": f"ours, {options.dtype}", "ratio": ratio}
    medians = core.medians(rounds, ("peak_gflops", "clock_ghz"))
    ceiling = flops / every["ours"]["seconds"] / medians["peak_gflops"] / 1e9
    names = ("threads", "recipe", "dtype", "micro_batch_size", "lora_rank", "lora_base_format")
    return {
        **every,
        "ratio": every["baseline"]["ratio"],
        **medians,
        **{name: getattr(options, name) for name in names},
        "ceiling_fraction": ceiling if options.dtype == "fp32" and not options.int8 else None,
        "global_batch_size": size,
        "model_flops": flops,
        "parameters": model_parameters(config),
        "torch": torch.__version__,
        "rounds": rounds,
        "busy": discarded < 0,
        "rounds_thrown_away": max(0, discarded),
    }


def summary(steps: list[dict[str, float]], flops: float, tokens: int) -> dict[str, Any]:
    """Return the medians of one side's steps. flops, tokens: of a step; tflops: 10^12 FLOPs per second."""
    medians = core.medians(steps, ("seconds", "minor_faults", "system_seconds", "idle_cpu_seconds"))
    return {
        "tokens_per_s": tokens / medians["seconds"],
        "seconds": medians["seconds"],
        "tflops": flops / medians["seconds"] / 1e12,
        "peak_rss_mib": max(step["peak_rss_mib"] for step in steps),
        "minor_faults_per_step": medians["minor_faults"],
        "system_seconds_per_step": medians["system_seconds"],
        "losses": [step["loss"] for step in steps],
        "idle_cpu_seconds_per_turn": medians["idle_cpu_seconds"],
    }


def text(options: argparse.Namespace, result: dict[str, Any]) -> str:
    """Return the table."""
    if options.ranks is not None:
        return (
            f"{core.table(LAYOUT_COLUMNS, result['layouts'])}\n{result['cpu']} at {result['clock_ghz']:.2f} GHz, measured; "
            f"global batch {result['global_batch_size']}"
        )
    sides = [result[side] for side in (*SIDES, SHIPPED, UNQUANTIZED) if side in result]
    ceiling = (
        f", {100 * result['ceiling_fraction']:.1f} % of the FMA peak"
        if result["ceiling_fraction"] is not None
        else ""
    )
    ratios = ", ".join(f"{side['ratio']:.3f} x as fast as {side['label']}" for side in sides[1:])
    return (
        f"{core.table(COLUMNS, sides)}\nours is {ratios}{ceiling} ({result['peak_gflops']:.0f} GFLOP/s at "
        f"{result['clock_ghz']:.2f} GHz, {result['threads']} threads, {result['cpu']}, measured)"
        + core.mark(result["busy"])
    )


# Layouts --------------------------------------------------------------------------------------------------------------------------

ONE_RANK = "one rank"
MICROBATCHES = 16
LAYOUT_ITERATIONS = 2  # timed ones of each job
SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "interleaved": {"num_virtual_stages_per_pipeline_rank": 2},
    "zb-h1": {"pipeline_schedule": "zb-h1"},
    "zbv": {"pipeline_schedule": "zbv"},
}
MORE_PENDING = 1.5  # micro-batches for each stage that the last pipeline may hold
LAYOUT_COLUMNS: tuple[Column, ...] = (
    ("layout", "<16", "layout"),
    ("ranks x threads", ">16", lambda row: f"{row['ranks']} x {row['threads']:>5}"),
    ("tokens/s", ">9.1f", "tokens_per_s"),
    ("s/step", ">8.3f", "seconds"),
    ("of one rank", ">12.3f", "ratio"),
    ("peak MiB", ">9", "peak_rss_mib"),
    ("loss", ">9.5f", "loss"),
)


def candidates(options: argparse.Namespace) -> dict[str, jobs.Cell]:
    """Return one rank first, then the named layout, the ways to share a sequence, PP under every schedule, or TP, DP and PP."""
    ranks = options.ranks
    tp = options.tensor_model_parallel_size
    pp = options.pipeline_model_parallel_size
    check(ranks >= 2, f"--ranks {ranks}: pass 2 or more, they are compared with one rank")
    check(
        ranks % (tp * pp) == 0,
        f"--ranks {ranks} is not divisible by --tensor-model-parallel-size {tp} x "
        f"--pipeline-model-parallel-size {pp}: change one of them",
    )
    check(
        tp * pp == 1 or not (options.schedules or options.cp_comm_type),
        "--schedules and --cp-comm-type compare layouts over all --ranks: leave the parallel sizes out",
    )
    sizes = sizes_of(options)
    one = jobs.Cell(
        mbs=options.micro_batch_size,
        seq=sizes.pop("seq_length", None),
        recompute=options.recompute,
        more=tuple(sizes.items()),
    )
    every = replace(one, ranks=ranks)
    if options.cp_comm_type:
        return shared_sequences(one, ranks, options.cp_comm_type)
    if options.schedules:
        more = math.ceil(MORE_PENDING * ranks)
        orders = {
            **SCHEDULES,
            f"zbv of {more}": {**SCHEDULES["zbv"], "zero_bubble_max_pending_backward": more},
        }
        return {ONE_RANK: one} | {
            f"PP{ranks} {name}": replace(every, pp=ranks, more=(*one.more, *fields.items()))
            for name, fields in orders.items()
        }
    if tp * pp > 1:
        degrees = {"TP": tp, "PP": pp, "DP": ranks // (tp * pp)}
        name = " x ".join(f"{axis}{degree}" for axis, degree in degrees.items() if degree > 1)
        return {ONE_RANK: one, name: replace(every, tp=tp, pp=pp)}
    return {
        ONE_RANK: one,
        f"TP{ranks}": replace(every, tp=ranks),
        f"DP{ranks}": every,
        f"PP{ranks}": replace(every, pp=ranks),
    }


def shared_sequences(one: jobs.Cell, ranks: int, types: Sequence[str]) -> dict[str, jobs.Cell]:
    """Return the layouts whose ranks share each sequence: context parallelism of each type, or tensor and sequence parallelism."""
    common = (*one.more, ("position_embedding_type", "rope"))
    ways = {
        f"CP{ranks} {name}": (("context_parallel_size", ranks), ("cp_comm_type", (name,)))
        for name in types
    }
    return {
        ONE_RANK: replace(one, more=common),
        **{name: replace(one, ranks=ranks, more=(*common, *way)) for name, way in ways.items()},
        f"TP{ranks}": replace(
            one, ranks=ranks, tp=ranks, more=(*common, ("sequence_parallel", True))
        ),
    }


def batch_of(options: argparse.Namespace) -> int:
    """Return the samples of an iteration."""
    return options.global_batch_size or MICROBATCHES * options.micro_batch_size


def layout_job(options: argparse.Namespace, cell: jobs.Cell) -> jobs.Job:
    """Return the training job of a layout. ValueError when the model does not divide."""
    return jobs.job(
        options,
        cell,
        batch_of(options),
        LAYOUT_ITERATIONS,
        kernels=options.kernels,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )


def measure_layouts(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all layouts in turn. ratio: throughput over one rank's."""
    cells = candidates(options)
    planned = {name: layout_job(options, cell) for name, cell in cells.items()}
    measured = {
        name: jobs.summary(rounds) for name, rounds in jobs.in_turn(planned, options.rounds).items()
    }
    tokens = shapes.run_of(options, **sizes_of(options)).model.seq_length
    rows = []
    for name, cell in cells.items():
        figures = measured[name]
        rows.append(
            {
                "layout": name,
                "ranks": cell.ranks,
                "threads": planned[name].threads,
                "tokens_per_s": figures["samples_per_second"] * tokens,
                "peak_rss_mib": figures["peak_memory_mib"],
                **{key: figures[key] for key in ("seconds", "loss", "busy")},
            }
        )
    rows = [{**row, "ratio": row["tokens_per_s"] / rows[0]["tokens_per_s"]} for row in rows]
    names = ("recipe", "dtype", "micro_batch_size", "threads", "rounds")
    return {
        "layouts": rows,
        **{name: getattr(options, name) for name in names},
        "global_batch_size": batch_of(options),
        "clock_ghz": statistics.median(figures["clock_ghz"] for figures in measured.values()),
    }
