"""Which model a benchmark measures: the options of every family and the run that they mean.

Left out: the sizes themselves (fugaku_megatron/config/recipes.py) and what follows from them (fugaku_megatron/costs/accounting.py).
"""

from __future__ import annotations

import argparse
from typing import Any

from fugaku_megatron.config.arguments import make_run
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.config.recipes import RECIPES
from fugaku_megatron.config.run_config import RunConfig

VOCABULARY = 8192  # of recipes that take theirs from a tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model's shapes."""
    parser.add_argument("--recipe", default="124m", choices=RECIPES)
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)


def run_of(options: argparse.Namespace, **fields: Any) -> RunConfig:
    """The run of `options`, with other `fields`. ValueError for sizes that do not fit together."""
    values = {"micro_batch_size": options.micro_batch_size, "tensor_model_parallel_size": options.tensor_model_parallel_size,
              "global_batch_size": options.micro_batch_size, "vocab_size": vocabulary(options.recipe),
              **attention_fields(options), **fields}
    run = make_run(options.recipe, values)
    Layout.from_run(run, run.parallel.tensor_model_parallel_size * run.parallel.pipeline_model_parallel_size)
    return run


def add_attention_arguments(parser: argparse.ArgumentParser) -> None:
    """Groups and window, where the recipe has others."""
    parser.add_argument("--num-query-groups", type=int, metavar="N", help="groups of heads that share a key and a value")
    parser.add_argument("--window-size", metavar="LEFT,0", help="a token sees itself and LEFT tokens before it")


def attention_fields(options: argparse.Namespace) -> dict[str, Any]:
    """What the options of `add_attention_arguments` say; nothing in families without them."""
    groups, window = (getattr(options, name, None) for name in ("num_query_groups", "window_size"))
    return ({"group_query_attention": True, "num_query_groups": groups} if groups is not None else {}) | (
        {"window_size": window} if window is not None else {})


def vocabulary(recipe: str) -> int:
    """The recipe's vocabulary, or VOCABULARY."""
    return RECIPES[recipe]().model.vocab_size or VOCABULARY
