"""Weights of gated delta nets in Megatron-LM's torch_dist checkpoints.

The input projection and the convolution are a tensor for each of their parts, all heads in order. With --apply-layernorm-1p
the norm after the delta rule stores its weight minus 1, and here the weight itself.
Sources: megatron/core/ssm/gated_delta_net/gdn.py, common.py (sharded_state_dict).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...config.model import ModelConfig
from ..hugging_face.tensor_views import key_heads

# Keys behind a weight's, in the order of `ModelConfig.key_head_parts`.
_PARTS = {
    ".self_attention.in_proj.weight": ("query", "key", "value", "z", "beta", "alpha"),
    ".self_attention.conv1d.weight": ("query", "key", "value"),
}
_OUT_NORM = ".self_attention.out_norm.weight"


def parts_of(name: str) -> tuple[str, ...]:
    """Return the names of the tensors that a weight consists of, () if the weight is one tensor."""
    suffixes = next((row for end, row in _PARTS.items() if name.endswith(end)), ())
    return tuple(f"{name}.{suffix}" for suffix in suffixes)


def joined_parts(parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
    """Return the rows of one key head after another, of parts with all heads each."""
    heads = [part.unflatten(0, (model.linear_num_key_heads, -1)) for part in parts]
    return torch.cat(heads, 1).flatten(0, 1)


def split_parts(name: str, whole: Tensor, model: ModelConfig) -> list[Tensor]:
    """Return the parts of a weight in the shapes of Megatron-LM."""
    parts = [part.flatten(0, 1) for part in key_heads(whole, model)]
    if name.endswith(".conv1d.weight"):
        return [part.unsqueeze(1) for part in parts]
    return parts


def is_shifted(name: str, model: ModelConfig) -> bool:
    """Return True for a weight from which Megatron-LM's checkpoint subtracts 1."""
    return name.endswith(_OUT_NORM) and model.apply_layernorm_1p


def shifted(weight: Tensor, amount: float, dtype: torch.dtype) -> Tensor:
    """Return weight + amount in `dtype`, or in FP32 if `dtype` would round the sum."""
    exact = weight.float() + amount
    rounded = exact.to(dtype)
    return rounded if torch.equal(rounded.float(), exact) else exact
