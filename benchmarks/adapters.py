"""Steps of adapters by the storage of the frozen weights, and matmuls of a few rows with 8-bit weights, in turn in one process.

    python -m benchmarks adapters --recipe qwen2.5-0.5b --num-layers 4 --vocab-size 16384 --seq-length 512
    python -m benchmarks adapters --quick

A step has forward, backward and AdamW on adapters of all matrices; the frozen weights are random. `ratio` compares with BF16 weights
stored in BF16. The second table multiplies 1 to 8 rows with a weight of the MLP, as in generation, and names the bytes of the weight
that are read in a second.
"""

from __future__ import annotations

import argparse
import contextlib
from functools import partial
from typing import Any

import torch

from fugaku_megatron.config.fields import check
from fugaku_megatron.costs.sizes import FP32_BYTES
from fugaku_megatron.host import kernels
from fugaku_megatron.host.timing import best_seconds, seconds
from fugaku_megatron.nn.parameter import Q8Weight
from fugaku_megatron.text.table import Column

from . import core, disturbance, shapes

BF16 = "bf16"
FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp32, int8 weights": {"lora_base_format": "int8"},
    BF16: {"bf16": True},
    "bf16, int8 weights": {"bf16": True, "lora_base_format": "int8"},
}
ROWS = (1, 2, 4, 8)
QUICK = {"recipe": "demo", "rounds": 1, "seq_length": 64}
STEPS: tuple[Column, ...] = (
    ("format", "<20", "format"),
    ("s/step", ">9.3f", "seconds"),
    ("ratio", ">7.2f", "ratio"),
    ("weights MiB", ">12.1f", "weights_mib"),
    ("loss", ">9.4f", "loss"),
)
FEW_ROWS: tuple[Column, ...] = (
    ("weight", "<8", "weight"),
    ("rows", ">5", "rows"),
    ("ms", ">8.3f", "milliseconds"),
    ("GB/s", ">7.1f", "gbytes"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this family."""
    shapes.add_solo_arguments(parser)
    parser.add_argument("--num-layers", type=int, help="layers (default: the recipe's)")
    parser.add_argument("--vocab-size", type=int, help="words (default: the recipe's)")
    parser.add_argument("--lora-rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5, help="timed steps (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="threads (default: all cores)")
    parser.add_argument("--quick", action="store_true", help="the demo's model, one round")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of a step by format, and those of matmuls with few rows."""
    core.apply_quick(options, QUICK)
    check(options.lora_rank > 0, f"--lora-rank {options.lora_rank}: pass 1 or more")
    if options.threads:
        kernels.set_num_threads(options.threads)
    watch = disturbance.Watch(kernels.num_threads())
    result = {"steps": steps(options), "few_rows": few_rows(options)}
    return {**result, "threads": kernels.num_threads(), "busy": watch.disturbed()}


def steps(options: argparse.Namespace) -> list[dict[str, Any]]:
    names = ("num_layers", "vocab_size")
    sizes = {name: value for name in names if (value := getattr(options, name)) is not None}
    with contextlib.ExitStack() as stack:
        trainers = []
        for fields in FORMATS.values():
            trainer = shapes.solo_trainer(options, lora_rank=options.lora_rank, **sizes, **fields)
            trainers.append(stack.enter_context(contextlib.closing(trainer)))
        losses = [trainer.train_step().loss for trainer in trainers]
        rounds = [
            [seconds(trainer.train_step) for trainer in trainers] for _ in range(options.rounds)
        ]
        best = [min(times) for times in zip(*rounds, strict=True)]
        return [
            {
                "format": name,
                "seconds": own,
                "ratio": best[list(FORMATS).index(BF16)] / own,
                "weights_mib": sum(
                    memory.values.nbytes for memory in trainer.optimizer.flat.frozen_memory
                )
                / 2**20,
                "loss": loss,
            }
            for name, own, trainer, loss in zip(FORMATS, best, trainers, losses, strict=True)
        ]


def few_rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    model = shapes.run_of(options).model
    weight = torch.randn(model.fc1_widths * model.ffn_hidden_size, model.hidden_size)
    stored = Q8Weight.of(weight)
    half = weight.bfloat16()
    found = []
    for rows in ROWS:
        x = torch.randn(rows, model.hidden_size)
        out = torch.empty(rows, len(weight))
        kinds = {
            "fp32": (weight.nbytes, partial(kernels.linear_few_rows, x, weight, out)),
            "bf16": (
                weight.nbytes * 2 // FP32_BYTES,
                partial(kernels.linear_few_rows, x.bfloat16(), half, out.bfloat16()),
            ),
            "int8": (
                stored.nbytes,
                partial(kernels.linear_few_rows, x, stored.values, out, scales=stored.scales),
            ),
        }
        calls = [call for _, call in kinds.values()]
        for call in calls:
            call()
        for (name, (nbytes, _)), call in zip(kinds.items(), calls, strict=True):
            taken = best_seconds([call], 4 * options.rounds)
            found.append(
                {
                    "weight": name,
                    "rows": rows,
                    "milliseconds": taken * 1e3,
                    "gbytes": nbytes / taken / 1e9,
                }
            )
    return found


def text(options: argparse.Namespace, result: dict[str, Any]) -> str:
    """Return both tables."""
    lines = [
        f"{options.recipe}, {options.seq_length} tokens, rank {options.lora_rank}, "
        f"{result['threads']} threads, {result['cpu']}{core.mark(result['busy'])}",
        core.table(STEPS, result["steps"]),
        core.table(FEW_ROWS, result["few_rows"]),
    ]
    return "\n".join(lines)
