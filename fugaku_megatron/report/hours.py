"""Model the hours for 10 million tokens of whole models from two measured layers.

A sample takes its FLOPs at the rate of the two layers. An update comes every UPDATE_TOKENS tokens
and takes its parameters at the measured rate, plus the gradients' all-reduce. Left out: pipelines
and recompute.
"""

from __future__ import annotations

import math

from ..cli.arguments import make_run
from ..costs.flops import model_flops
from ..costs.stages import model_parameters
from ..text.named_files import JsonObject
from .record import LABEL, rows_of

TOKENS = 10_000_000
UPDATE_TOKENS = 1 << 19
BYTES = 16  # of a parameter: FP32 weights, gradients and both moments
MODEL_SHARE = 0.8  # share of a node's memory that these may take

LLAMA_3B = {
    "num_layers": 28,
    "hidden_size": 3072,
    "ffn_hidden_size": 8192,
    "num_attention_heads": 24,
    "num_query_groups": 8,
    "kv_channels": 128,
}  # meta-llama/Llama-3.2-3B
# Model -> the measured shape whose rate it has, its recipe, what differs from that
MODELS: dict[str, tuple[str, str, JsonObject]] = {
    "0.6B": ("1B", "qwen3-0.6b", {}),
    "1B": ("1B", "llama-3.2-1b", {}),
    "3B": ("8B", "llama-3.2-1b", LLAMA_3B),
    "8B": ("8B", "llama-3.1-8b", {}),
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
