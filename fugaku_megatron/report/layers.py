"""Report section that trains two layers of larger models, and the hours of whole models that follow.

Every tensor-parallel group measures at once. A sample of a whole model takes its FLOPs at the rate of the two layers. An
update comes every UPDATE_TOKENS tokens and takes its parameters at the measured rate, plus the gradients' all-reduce. Left
out: pipelines and recompute.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics

from ..cli.arguments import make_run
from ..config.run_config import RunConfig
from ..costs.flops import model_flops
from ..costs.stages import model_parameters
from ..text.named_files import JsonObject
from .context import Context
from .record import LABEL, rows_of
from .training import PLAIN, USABLE, make_trainer, rank_bytes, repeated

VOCABULARY = 1024  # of two layers: their head costs nothing
SHAPES = {"1B": "llama-3.2-1b", "8B": "llama-3.1-8b"}

TENSOR_PARALLEL = (1, 2, 4, 8)

TOKENS = 10_000_000
UPDATE_TOKENS = 1 << 19
BYTES = 16  # of a parameter: FP32 weights, gradients and both moments
MODEL_SHARE = 0.8  # share of a node's memory that these may take

# meta-llama/Llama-3.2-3B
LLAMA_3B = {
    "num_layers": 28,
    "hidden_size": 3072,
    "ffn_hidden_size": 8192,
    "num_attention_heads": 24,
    "num_query_groups": 8,
    "kv_channels": 128,
}
# Model -> the measured shape whose rate it has, its recipe, what differs from that
MODELS: dict[str, tuple[str, str, JsonObject]] = {
    "0.6B": ("1B", "qwen3-0.6b", {}),
    "1B": ("1B", "llama-3.2-1b", {}),
    "3B": ("8B", "llama-3.2-1b", LLAMA_3B),
    "8B": ("8B", "llama-3.1-8b", {}),
}


def layers_section(context: Context) -> JsonObject:
    """Measure two layers of each shape. Collective."""
    rows = []
    for index, shape in enumerate(SHAPES):
        share = context.agreed(context.left / (len(SHAPES) - index))
        rows.append({"shape": shape, **context.agreed(layers_row(context, shape, share))})
    return {"rows": rows}


def chosen_layers(context: Context, shape: str, seconds: float) -> RunConfig | None:
    """Return a run with two layers of `shape`, a small vocabulary and the longest samples that fit, or None."""
    here = context.nodes.ranks.size
    least = USABLE * context.free / here
    sizes = [tp for tp in TENSOR_PARALLEL if here % tp == 0]
    for s, tp in itertools.product(context.scale.sequences, sizes):
        run = make_run(
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
    tp = run.tp
    group = context.world.split(context.world.rank // tp, context.world.rank)
    with contextlib.closing(make_trainer(run, group)) as trainer:
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


def hours(sections: JsonObject) -> list[JsonObject]:
    """Return a row for each model, from its own shape's layers or else the other's."""
    measured = {
        row["shape"]: row for row in rows_of(sections, "layers") if "gradient_seconds" in row
    }
    if not measured:
        return []
    last = [*measured.values()][-1]
    return [
        whole_model(name, measured.get(shape, last), recipe, changes, sections)
        for name, (shape, recipe, changes) in MODELS.items()
    ]


def whole_model(
    name: str, row: JsonObject, recipe: str, changes: JsonObject, sections: JsonObject
) -> JsonObject:
    """Extrapolate a model's hours for TOKENS tokens and memory in GiB from two layers' `row`."""
    run = make_run(recipe, {**changes, "seq_length": row["seq_length"], "mock_data": True})
    parameters = model_parameters(run)
    tokens = row["seq_length"]
    sample = row["gradient_seconds"] * model_flops(run, 1) / row["flops"]
    update = row["update_seconds"] * parameters / row["parameters"]
    reduce_gbs = sections.get("communication", {}).get("all_reduce_gbs")
    if reduce_gbs and row["groups"] > 1:
        update += 4 * parameters / row["tp"] / reduce_gbs / 1e9
    seconds = TOKENS / (row["groups"] * tokens / sample) + TOKENS / UPDATE_TOKENS * update
    nodes = rows_of(sections, "host", "nodes")
    gib = sum(node["job_memory_gib"] for node in nodes)
    need = BYTES * parameters / 2**30
    return {
        "model": name,
        "parameters": parameters,
        "from": f"two layers of {row['shape']}",
        "label": LABEL,
        "seq_length": tokens,
        "tokens_per_s": TOKENS / seconds,
        "hours": seconds / 3600,
        "need_gib": need,
        "fits": need <= MODEL_SHARE * gib,
        "nodes_needed": math.ceil(need / (MODEL_SHARE * gib / len(nodes))) if gib else None,
    }
