"""Which model a benchmark measures: the options of many families, and the run and the trainer that they mean.

Left out: the sizes themselves (fugaku_megatron/config/recipes.py) and what follows from them (fugaku_megatron/costs).
"""

from __future__ import annotations

import argparse
import math
from typing import Any

from fugaku_megatron.cli.arguments import make_run
from fugaku_megatron.comm.base import Comm
from fugaku_megatron.comm.grid import Groups
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.config.recipes import RECIPES
from fugaku_megatron.config.run_config import RunConfig

VOCABULARY = 8192  # of recipes that take theirs from a tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose a model's shapes."""
    parser.add_argument("--recipe", default="124m", choices=RECIPES)
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)


def run_of(options: argparse.Namespace, **fields: Any) -> RunConfig:
    """Return the run of `options`, with other `fields`. ValueError for sizes that do not fit together."""
    names = ("micro_batch_size", "tensor_model_parallel_size", "num_query_groups", "window_size")
    given = {name: value for name in names if (value := getattr(options, name, None)) is not None}
    grouped = {"group_query_attention": True} if "num_query_groups" in given else {}
    values = {
        "global_batch_size": options.micro_batch_size,
        "vocab_size": vocabulary(options.recipe),
        **given,
        **grouped,
        **fields,
    }
    run = make_run(options.recipe, values)
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    Layout.from_run(run, math.prod(getattr(run.parallel, name) for name in sizes))
    return run


def run_from_json(recipe: str | None, values: dict[str, Any]) -> RunConfig:
    """Return the recipe's run with fields that came as JSON, which has lists for tuples."""
    fields = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }
    return make_run(recipe, fields)


def vocabulary(recipe: str) -> int:
    """Return the recipe's vocabulary, or VOCABULARY."""
    return RECIPES[recipe]().model.vocab_size or VOCABULARY


def trainer_of(run: RunConfig, world: Comm, groups: Groups) -> Any:
    """Return the trainer as run/assemble.py builds it, without observers."""
    from fugaku_megatron.costs.plan import Plan
    from fugaku_megatron.run.data import open_data
    from fugaku_megatron.run.kernel_choice import build_ops, choose_kernels
    from fugaku_megatron.run.sources import Sources
    from fugaku_megatron.training.trainer import Trainer

    plan = Plan.of(run, world.size)
    ops = build_ops(run, choose_kernels(plan, world).backends)
    return Trainer(plan, world, groups, *open_data(plan, groups, Sources()), ops=ops)
