"""Small models of the families that people train: their flags here, and the same model in transformers."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

COMMON = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 48, "vocab_size": 96, "seq_length": 16,
          "normalization": "RMSNorm", "swiglu": True, "position_embedding_type": "rope", "disable_bias_linear": True,
          "group_query_attention": True, "num_query_groups": 2, "layernorm_epsilon": 1e-6}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**COMMON, "use_rope_scaling": True, "rope_scaling_factor": 32.0, "rotary_base": 500000.0},
    "mistral": {**COMMON, "window_size": "4,0", "untie_embeddings_and_output_weights": True, "kv_channels": 12},
    "qwen2": {**COMMON, "add_qkv_bias": True, "rotary_base": 1e6},
    "qwen3": {**COMMON, "qk_layernorm": True, "kv_channels": 16, "untie_embeddings_and_output_weights": True},
}
CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def theirs(family: str) -> Any:
    """The model of transformers, with random weights."""
    import transformers

    ours, rope = FAMILIES[family], {"rope_type": "default"}
    if ours.get("use_rope_scaling"):
        rope = {"rope_type": "llama3", "factor": ours["rope_scaling_factor"], "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192}
    window = {"sliding_window": 5} if family == "mistral" else {}
    config = getattr(transformers, f"{CLASSES[family]}Config")(
        vocab_size=ours["vocab_size"], hidden_size=ours["hidden_size"], intermediate_size=ours["ffn_hidden_size"],
        num_hidden_layers=ours["num_layers"], num_attention_heads=ours["num_attention_heads"],
        num_key_value_heads=ours["num_query_groups"], head_dim=ours.get("kv_channels", 8), max_position_embeddings=64,
        rms_norm_eps=ours["layernorm_epsilon"], rope_parameters={"rope_theta": ours.get("rotary_base", 10000.0), **rope},
        tie_word_embeddings="untie_embeddings_and_output_weights" not in ours, attn_implementation="eager", **window)
    return getattr(transformers, f"{CLASSES[family]}ForCausalLM")(config)


_PLACES = {"input_layernorm": "input_layernorm", "post_attention_layernorm": "pre_mlp_layernorm", "mlp.down_proj": "mlp.linear_fc2",
           "self_attn.o_proj": "self_attention.linear_proj", "self_attn.q_norm": "self_attention.q_layernorm",
           "self_attn.k_norm": "self_attention.k_layernorm"}
_ENDS = {"model.embed_tokens.weight": "embedding.word_embeddings.weight", "model.norm.weight": "decoder.final_layernorm.weight",
         "lm_head.weight": "output_layer.weight"}


def in_ours(name: str, ours: dict[str, Tensor], family: str) -> Tensor:
    """Of our named tensors the one, or the part of one, that is theirs of that name, in their shape."""
    if name in _ENDS:
        return ours[_ENDS[name]]
    layer, place, kind = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name).groups()
    prefix, part = f"decoder.layers.{layer}.", place.split(".")[-1]
    if part in ("gate_proj", "up_proj"):
        return ours[f"{prefix}mlp.linear_fc1.{kind}"][int(part == "up_proj")]
    if part in ("q_proj", "k_proj", "v_proj"):
        groups, heads = FAMILIES[family]["num_query_groups"], FAMILIES[family]["num_attention_heads"]
        each, tensor = heads // groups, ours[f"{prefix}self_attention.linear_qkv.{kind}"]
        slots = tensor.view(groups, each + 2, -1, *tensor.shape[1:])
        rows = {"q_proj": slice(0, each), "k_proj": slice(each, each + 1), "v_proj": slice(each + 1, each + 2)}[part]
        return slots[:, rows].reshape(-1, *tensor.shape[1:])
    return ours[f"{prefix}{_PLACES[place]}.{kind}"]


def copy_to(model: Any, ours: dict[str, Tensor], family: str) -> None:
    """Give the model of transformers our weights."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(in_ours(name, ours, family))
