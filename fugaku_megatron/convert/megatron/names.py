"""Tensor names in Megatron-LM's checkpoints (megatron/core/models/gpt, megatron/legacy/model)."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ...config.layer_kinds import ATTENTION, MIXERS, LayerKind
from ...config.rows import MLP_OF_EXPERTS

# In this order: what a name of theirs has, and what it is here.
_RENAMES = tuple(
    (re.compile(pattern), ours)
    for pattern, ours in (
        (r"^(module\.|model\.)+", ""),
        (r"^language_model\.", ""),
        (r"^(encoder|transformer)\.", "decoder."),
        (r"\.attention\.", ".self_attention."),
        (r"\.query_key_value\.", ".linear_qkv."),
        (r"\.self_attention\.dense\.", ".self_attention.linear_proj."),
        (r"\.dense_h_to_4h\.", ".linear_fc1."),
        (r"\.dense_4h_to_h\.", ".linear_fc2."),
        (r"\.input_norm\.", ".input_layernorm."),
        (r"\.post_attention_(layer)?norm\.", ".pre_mlp_layernorm."),
        (r"\.final_norm\.", ".final_layernorm."),
        (r"\.self_attention\.(linear_qkv|in_proj)\.layer_norm_", ".input_layernorm."),
        (r"\.self_attention\.linear_(q|kv)_up_proj\.layer_norm_", r".self_attention.\1_layernorm."),
        (r"\.mlp\.linear_fc1\.layer_norm_", ".pre_mlp_layernorm."),
        (r"\.mtp_model_layer\.", ".transformer_layer."),
        (r"\.mlp\.experts\.experts\.", ".mlp.experts."),
        (r"\.shared_experts\.gate_weight", ".shared_experts.gate.weight"),
    )
)

_UNUSED = re.compile(
    r".*(_extra_state|inv_freq).*|word_embeddings_for_head\..*|word_embeddings\..*"
)  # no weights, or copies

MLP_NORM = "pre_mlp_layernorm."


def fused_norms(kind: LayerKind, engine: bool, experts_apart: bool) -> dict[str, str]:
    """Return the norms that are named as parts of the next matmul, and their names.

    engine: the names are those of Transformer Engine's layers
    experts_apart: a layer with experts, which have no such matmul, keeps the name of the MLP's norm
    """
    mixer = MIXERS[kind.mixer or ATTENTION]
    if not (engine or mixer.fused_locally):
        return {}
    norms = {
        f"{norm}.": f"self_attention.{linear}.layer_norm_" for norm, linear in mixer.fused.items()
    }
    if not (experts_apart and kind.mlp == MLP_OF_EXPERTS):
        norms[MLP_NORM] = "mlp.linear_fc1.layer_norm_"
    return norms


def our_name(theirs: str) -> str | None:
    """Return our name for their tensor; None for tensors that are not weights, and copies."""
    name = theirs
    for pattern, ours in _RENAMES:
        name = pattern.sub(ours, name)
    return None if _UNUSED.fullmatch(name) else name


def their_name(ours: str, fused: Mapping[str, str]) -> str:
    """Return Megatron-LM's name of a tensor. fused: as `fused_norms`"""
    for norm, theirs in fused.items():
        ours = ours.replace(norm, theirs)
    return ours.replace(".shared_experts.gate.weight", ".shared_experts.gate_weight")
