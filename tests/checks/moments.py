"""Models, sizes and formats for moments that ranks divide."""

from __future__ import annotations

from typing import Any

from fugaku_megatron.config.layout import Layout
from tests.helpers import small_run

SIZES = {
    "hidden_size": 48,
    "ffn_hidden_size": 60,
    "global_batch_size": 4,
    "lr": 5e-3,
    "train_iters": 50,
    "init_method_std": 0.1,
}  # so that blocks of moments would be divided by ranks and parameters
SP = {"sequence_parallel": True}
EXPERTS = {
    "num_experts": 4,
    "moe_ffn_hidden_size": 28,
    "swiglu": True,
    "disable_bias_linear": True,
    "normalization": "RMSNorm",
}
SHARED = {
    **EXPERTS,
    "moe_shared_expert_intermediate_size": 20,
    "moe_shared_expert_gate": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.1,
    "moe_aux_loss_coeff": (0.1,),
}
LORA = {"lora_rank": 3, "lora_alpha": 16.0}
GROUPED = {
    "swiglu": True,
    "group_query_attention": True,
    "num_query_groups": 2,
    "qk_layernorm": True,
    "position_embedding_type": "rope",
}
EP2 = {"expert_model_parallel_size": 2}
PRECISE = {"use_precision_aware_optimizer": True}
BF16_MOMENTS = {**PRECISE, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
EIGHT = {**PRECISE, "exp_avg_dtype": "int8", "exp_avg_sq_dtype": "int8"}


def is_possible(ranks: int, changes: dict[str, Any]) -> bool:
    """Return False for a combination that the program refuses."""
    try:
        Layout.from_run(small_run(**changes), ranks)
    except ValueError:
        return False
    return True
