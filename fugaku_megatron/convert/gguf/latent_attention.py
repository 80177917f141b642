"""Latent attention and the experts next to it in GGUF, as llama.cpp's deepseek2 and minicpm3 compute them.

deepseek2 attends with keys of the narrow vectors, one for all heads, and has the up-projection in two tensors.
Sources: conversion/deepseek.py, conversion/minicpm.py, src/models/deepseek2.cpp and minicpm3.cpp of llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ...config.experts import SIGMOID
from ...config.model import ModelConfig
from ...config.rows import MLP_OF_EXPERTS, YARN
from ...text.optional_packages import optional_package

# Parts of an up-projection in their names: the keys' without rotation, and the values'.
_UP = "kv_b_proj"
_KEYS = "attn_k_b"
_VALUES = "attn_v_b"
# Numbers of layers by which llama.cpp's deepseek2 knows a model without --q-lora-rank, and another with this vocabulary.
_LITE = (26, 27)
_LITE_OF_VOCABULARY = (48, 128256)
# What llama.cpp's minicpm3 multiplies by has no keys in a file.
_EMBEDDING_SCALE = 12.0
_DEPTH_SCALE = 1.4
_LOGITS_WIDTH = 256
# llama.cpp divides a file's multiplier by this.
_YARN_UNIT = 0.1


def parts_of(name: str) -> tuple[str, ...]:
    """Return the names of the tensors that Hugging Face's tensor becomes in deepseek2."""
    if _UP not in name:
        return (name,)
    return name.replace(_UP, "k_b_proj"), name.replace(_UP, "v_b_proj")


def part_of(tensor: Tensor, module: str, model: ModelConfig) -> Tensor:
    """Return a part of an up-projection (heads x (keys + values), rank), or another tensor as it is.

    module: in GGUF. Keys are (heads, rank, keys), values (heads, values, rank).
    """
    if module not in (_KEYS, _VALUES):
        return tensor
    heads = tensor.view(model.num_attention_heads, -1, tensor.shape[-1])
    keys = heads[:, : model.qk_head_dim]
    values = heads[:, model.qk_head_dim :]
    return keys.transpose(1, 2) if module == _KEYS else values


def absorbed_differences(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yield the differences from deepseek2, as `conversion._differences`."""
    lite = model.num_layers in _LITE or (model.num_layers, model.vocab_size) == _LITE_OF_VOCABULARY
    if lite != (model.q_lora_rank is None):
        of_layers = f"--q-lora-rank {model.q_lora_rank} and {model.num_layers} layers"
        yield of_layers, f"None with {' or '.join(map(str, _LITE))} layers alone"
    mlps = list(model.mlps)
    if MLP_OF_EXPERTS in mlps[: _dense_layers(model)]:
        yield "layers without experts behind others", ""
    if model.moe_router_num_groups and model.moe_router_score_function != SIGMOID:
        yield "groups of experts with one score each", "the sum of two scores"
    scaled = model.position_embedding_type == YARN and model.rotary_scaling_factor != 1.0
    if scaled and model.mscale != model.mscale_all_dim:
        yield f"--mscale {model.mscale}", f"--mscale-all-dim, {model.mscale_all_dim}"


def scaled_differences(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yield the differences from minicpm3, as `conversion._differences`."""
    if model.q_lora_rank is None:
        yield "queries without --q-lora-rank", ""
    assumed = {
        "embedding_multiplier": _EMBEDDING_SCALE,
        "residual_multiplier": _DEPTH_SCALE / math.sqrt(model.num_layers),
        "logits_scaling": model.hidden_size / _LOGITS_WIDTH,
    }
    for name, needed in assumed.items():
        value = getattr(model, name)
        if not math.isclose(value, needed, rel_tol=1e-6):
            yield f"{name} {value:.6g}", f"{needed:.6g}"


def add_numbers(writer: Any, model: ModelConfig, absorbed: bool) -> None:
    """Write the sizes of heads. absorbed: keys and values are narrow vectors, as in deepseek2"""
    if model.q_lora_rank is not None:
        writer.add_q_lora_rank(model.q_lora_rank)
    writer.add_kv_lora_rank(model.kv_lora_rank)
    writer.add_rope_dimension_count(model.qk_pos_emb_head_dim)
    if not absorbed:
        writer.add_key_length(model.kv_channels)
        writer.add_value_length(model.v_head_dim)
        return
    writer.add_key_length(model.kv_lora_rank + model.qk_pos_emb_head_dim)
    writer.add_value_length(model.kv_lora_rank)
    writer.add_key_length_mla(model.kv_channels)
    writer.add_value_length_mla(model.v_head_dim)
    if model.position_embedding_type == YARN:
        writer.add_rope_scaling_yarn_log_mul(_YARN_UNIT * model.mscale_all_dim)
    _add_experts(writer, model)


def _add_experts(writer: Any, model: ModelConfig) -> None:
    """Write what deepseek2 needs besides the numbers of every model with experts."""
    writer.add_leading_dense_block_count(_dense_layers(model))
    if not model.num_experts:
        writer.add_expert_feed_forward_length(model.ffn_hidden_size)
        writer.add_expert_shared_count(0)
        return
    kinds = optional_package("gguf", "gguf", "--to-gguf").ExpertGatingFuncType
    shared = model.moe_shared_expert_intermediate_size or 0
    writer.add_expert_shared_count(shared // (model.moe_ffn_hidden_size or 1))
    sigmoid = model.moe_router_score_function == SIGMOID
    writer.add_expert_gating_func(kinds.SIGMOID if sigmoid else kinds.SOFTMAX)
    writer.add_expert_weights_norm(sigmoid or not model.moe_router_pre_softmax)
    writer.add_expert_weights_scale(model.moe_router_topk_scaling_factor or 1.0)
    if model.moe_router_num_groups:
        writer.add_expert_group_count(model.moe_router_num_groups)
        writer.add_expert_group_used_count(model.moe_router_group_topk)


def _dense_layers(model: ModelConfig) -> int:
    return sum(mlp != MLP_OF_EXPERTS for mlp in model.mlps)


def epsilon_note(model: ModelConfig) -> str | None:
    """Return a note if the norms of narrow vectors have another epsilon than the rest, which llama.cpp does not read."""
    if not model.multi_latent_attention or model.latent_epsilon == model.layernorm_epsilon:
        return None
    return (
        f"llama.cpp adds {model.layernorm_epsilon:g} in the norms of --kv-lora-rank and --q-lora-rank numbers, as in the others, and "
        f"the model {model.latent_epsilon:g}"
    )
