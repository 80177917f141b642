"""Report section that trains two layers of larger models, on every tensor-parallel group at once."""

from __future__ import annotations

import itertools
import statistics

from ..cli.arguments import make_run
from ..config.run_config import RunConfig
from ..costs.flops import model_flops
from ..costs.parameters import model_parameters
from ..text.named_files import JsonObject
from .context import Context
from .training import PLAIN, USABLE, rank_bytes, repeated, trainer_of

VOCABULARY = 1024  # of two layers: their head costs nothing
SHAPES = {"1B": "llama-3.2-1b", "8B": "llama-3.1-8b"}

TENSOR_PARALLEL = (1, 2, 4, 8)


def layers_section(context: Context) -> JsonObject:
    """Measure two layers of each shape. Collective."""
    rows = []
    for index, shape in enumerate(SHAPES):
        share = context.agreed(context.left / (len(SHAPES) - index))
        rows.append({"shape": shape, **context.agreed(layers_row(context, shape, share))})
    return {"rows": rows}


def two_layers(context: Context, shape: str, tp: int, s: int) -> RunConfig:
    """Return a run with two layers of `shape`, a small vocabulary and samples of `s` tokens."""
    return make_run(
        SHAPES[shape],
        {
            **PLAIN,
            "global_batch_size": 1,
            "vocab_size": VOCABULARY,
            **context.scale.layers,
            "num_layers": 2,
            "seq_length": s,
            "tensor_model_parallel_size": tp,
        },
    )


def chosen_layers(context: Context, shape: str, seconds: float) -> RunConfig | None:
    here = context.nodes.ranks.size
    least = USABLE * context.free / here
    sizes = [tp for tp in TENSOR_PARALLEL if here % tp == 0]
    for s, tp in itertools.product(context.scale.sequences, sizes):
        run = two_layers(context, shape, tp, s)
        quick = 4 * model_flops(run, 1) / (tp * context.training_flops) < seconds
        if quick and rank_bytes(run, tp) < least:
            return run
    return None


def layers_row(context: Context, shape: str, seconds: float) -> JsonObject:
    """Return seconds for a sample's gradients and for an update, mean of all groups at the same
    time. Collective.
    """
    run = context.agreed(chosen_layers(context, shape, seconds))
    if run is None:
        return {"left_out": "memory or time"}
    tp = run.parallel.tensor_model_parallel_size
    group = context.world.split(context.world.rank // tp, context.world.rank)
    with trainer_of(run, group) as trainer:
        whole, rounds = repeated(group, trainer.train_step, seconds / 2)
        gradients, _ = repeated(group, lambda: trainer.repeat(0, 1.0), seconds / 4)
    everyone = context.world.all_gather_object((whole, gradients))
    whole, gradients = map(statistics.fmean, zip(*everyone, strict=True))
    return {
        "tp": tp,
        "groups": context.world.size // tp,
        "seq_length": run.model.seq_length,
        "gradient_seconds": gradients,
        "update_seconds": max(0.0, whole - gradients),
        "rounds": rounds,
        "parameters": model_parameters(run),
        "flops": model_flops(run, 1),
    }
