"""Layouts of the campaign: small ones, each with code of its own, and layouts drawn at random."""

from __future__ import annotations

import random
from typing import Any

from fugaku_megatron.config.layout import Layout
from fugaku_megatron.config.run_config import RunConfig
from tests.helpers import DROPOUT, lay_out

EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "moe_layer_freq": "([0]+[1]*3)",
    "moe_aux_loss_coeff": (0.01,),
    "disable_bias_linear": True,
    "swiglu": True,
}
LLAMA: dict[str, Any] = {
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "disable_bias_linear": True,
    "swiglu": True,
}
LORA = {**LLAMA, "lora_rank": 4, "lora_dropout": 0.25}
MOMENTS_IN_INT8 = {
    "use_precision_aware_optimizer": True,
    "exp_avg_dtype": "int8",
    "exp_avg_sq_dtype": "int8",
}
UNTIED = {"untie_embeddings_and_output_weights": True}
FOUR = {"global_batch_size": 4}
EIGHT = {"global_batch_size": 8}

# In the order in which a mutant is tried.
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 sequence": FOUR,
    "pp2": EIGHT,
    "dp2 overlap": FOUR,
    "cp2 p2p": {**UNTIED, **FOUR},
    "tp2 dp2 ep2 sequence zero": {**EXPERTS, **FOUR},
    "pp2 zbv full": {**LLAMA, **EIGHT},
    "tp2": {**LORA, **FOUR},
    "pp2 dp2 zero interleaved": EIGHT,
    "cp2 a2a": {**LLAMA, **FOUR, "group_query_attention": True, "num_query_groups": 2},
    "tp2 sequence blocks selective": FOUR,
    "cp2 allgather": FOUR,
    "pp2 zb-h1 bf16": EIGHT,
    "dp2 zero int8 bf16": FOUR,
}
SHARES = 3  # layouts in which a mutant is tried, at most

SIZES = ("", "", "2", "2", "4")
WORDS = {
    "tp": ("sequence", "sequence blocks", ""),
    "pp": ("", "interleaved", "zb-h1", "zbv"),
    "dp": ("zero", "overlap", ""),
    "cp": ("p2p", "a2a", "allgather"),
}
RECOMPUTE = ("", "", "full", "selective")
FORMATS = ("", "", "", "bf16", "bf16 int8")
OTHERS: tuple[dict[str, Any], ...] = (
    {},
    UNTIED,
    EXPERTS,
    {**EXPERTS, **UNTIED, "moe_router_topk": 2},
    {**EXPERTS, "moe_shared_expert_intermediate_size": 32, "moe_z_loss_coeff": 0.001},
    {**EXPERTS, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    LLAMA,
    {**LLAMA, "group_query_attention": True, "num_query_groups": 2},
    {**LLAMA, "qk_layernorm": True, "kv_channels": 16},
    {**LLAMA, "window_size": "6,0"},
    LORA,
    {"norm_placement": "post", "disable_bias_linear": True},
    {"add_qkv_bias": True, "hidden_size": 64},
    {"clip_grad": 0.1, "weight_decay": 0.1},
    {"optimizer": "muon"},
    {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
)


def draw(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Draw a layout of two to eight ranks that this program accepts, and its flags."""
    while True:
        words = []
        for name, options in WORDS.items():
            size = rng.choice(SIZES)
            if size:
                words += [name + size, rng.choice(options)]
        flags = {**DROPOUT, **rng.choice(OTHERS), **EIGHT}
        if "num_experts" in flags:
            words.append(rng.choice(("ep2", "ep2", "")))
        words += [rng.choice(RECOMPUTE), rng.choice(FORMATS)]
        layout = " ".join(filter(None, words))
        try:
            run, ranks = run_of(layout, flags)
            Layout.from_run(run, ranks)
        except ValueError:
            continue
        if 2 <= ranks <= 8:
            return layout, flags


def run_of(layout: str, flags: dict[str, Any]) -> tuple[RunConfig, int]:
    """Return a layout's run and its ranks."""
    return lay_out(layout, {**DROPOUT, **flags})
