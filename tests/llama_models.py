"""Small models of the families that people train: their flags here, and the same model in transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fugaku_megatron.convert.hugging_face.architectures import ARCHITECTURES
from fugaku_megatron.convert.hugging_face.tensor_mapping import (
    in_their_shape,
    tensor_mappings,
)
from tests.helpers import small_run

COMMON = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_hidden_size": 48,
    "vocab_size": 96,
    "seq_length": 16,
    "normalization": "RMSNorm",
    "swiglu": True,
    "position_embedding_type": "rope",
    "disable_bias_linear": True,
    "group_query_attention": True,
    "num_query_groups": 2,
    "layernorm_epsilon": 1e-6,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        **COMMON,
        "use_rope_scaling": True,
        "rope_scaling_factor": 32.0,
        "rotary_base": 500000.0,
    },
    "mistral": {
        **COMMON,
        "window_size": "4,0",
        "untie_embeddings_and_output_weights": True,
        "kv_channels": 12,
    },
    "qwen2": {**COMMON, "add_qkv_bias": True, "rotary_base": 1e6},
    "qwen3": {
        **COMMON,
        "qk_layernorm": True,
        "kv_channels": 16,
        "untie_embeddings_and_output_weights": True,
    },
}
DELTA_HEADS: dict[str, Any] = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
# Every second layer is attention, the others are gated delta nets.
DELTA_LAYERS: dict[str, Any] = {
    "experimental_attention_variant": "gdn",
    "linear_attention_freq": "2",
    **DELTA_HEADS,
}
DELTA_NETS: dict[str, Any] = {**FAMILIES["qwen3"], "attention_output_gate": True, **DELTA_LAYERS}
LATENT: dict[str, Any] = {
    **COMMON,
    "group_query_attention": False,
    "num_query_groups": None,
    "multi_latent_attention": True,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 16,
    "qk_layernorm": True,
    "rotary_scaling_factor": 4.0,
    "mscale_all_dim": 1.0,
}
CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def theirs(family: str) -> Any:
    """Build the model of transformers with random weights."""
    import transformers

    ours = FAMILIES[family]
    rope = {"rope_type": "default"}
    if ours.get("use_rope_scaling"):
        rope = {
            "rope_type": "llama3",
            "factor": ours["rope_scaling_factor"],
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    window = {"sliding_window": 5} if family == "mistral" else {}
    config = getattr(transformers, f"{CLASSES[family]}Config")(
        vocab_size=ours["vocab_size"],
        hidden_size=ours["hidden_size"],
        intermediate_size=ours["ffn_hidden_size"],
        num_hidden_layers=ours["num_layers"],
        num_attention_heads=ours["num_attention_heads"],
        num_key_value_heads=ours["num_query_groups"],
        head_dim=ours.get("kv_channels", 8),
        max_position_embeddings=64,
        rms_norm_eps=ours["layernorm_epsilon"],
        rope_parameters={"rope_theta": ours.get("rotary_base", 10000.0), **rope},
        tie_word_embeddings="untie_embeddings_and_output_weights" not in ours,
        attn_implementation="eager",
        **window,
    )
    return getattr(transformers, f"{CLASSES[family]}ForCausalLM")(config)


def shaped_like_theirs(ours: dict[str, Tensor], family: str) -> dict[str, Tensor]:
    """Return named tensors with the names and shapes of transformers."""
    row = next(row for row in ARCHITECTURES if row.model_type == family)
    model = small_run(**FAMILIES[family]).model
    made = tensor_mappings(row, model).items()
    return {name: in_their_shape(ours[part.ours], part, model) for name, part in made}


def copy_to(model: Any, ours: dict[str, Tensor], family: str) -> None:
    """Give the model of transformers our weights."""
    converted = shaped_like_theirs(ours, family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(converted[name])
