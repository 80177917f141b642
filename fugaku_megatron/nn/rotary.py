"""The angles of rotary positions: cosines and sines for each position and pair of elements.

Sources: Su et al. 2021, "RoFormer" (arXiv:2104.09864), section 3.2; Llama 3.1's scaling as modeling_rope_utils of transformers has
it (_compute_llama3_parameters); Peng et al. 2023, "YaRN" (arXiv:2309.00071) as Megatron-LM has it in
megatron/core/models/common/embeddings/yarn_rotary_pos_embedding.py, and its linear scaling in
megatron/core/models/common/embeddings/rotary_pos_embedding.py. Left out: the turning (`ops.Ops.rotary`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..config.model_config import YARN
from ..config.run_config import ModelConfig


def frequencies(model: ModelConfig) -> Tensor:
    """Angle per position of each pair of elements, (rotated elements / 2,) in FP32.

    With --use-rope-scaling, waves of up to (original positions / high factor) positions stay as they are, those of (original
    positions / low factor) and more are lengthened by the scaling factor, and those between are mixed of both.
    """
    size = model.rotary_size
    if model.position_embedding_type == YARN:
        return yarn_frequencies(model)
    plain = 1.0 / model.rotary_base ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    if not model.use_rope_scaling:
        return plain
    lengthened = plain / model.rope_scaling_factor
    low, high = model.rope_scaling_low_freq_factor, model.rope_scaling_high_freq_factor
    waves = model.rope_scaling_original_max_position_embeddings / (2 * math.pi / plain)  # in the original positions
    share = ((waves - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - share) * lengthened + share * plain


def yarn_frequencies(model: ModelConfig) -> Tensor:
    """`frequencies` where long waves are lengthened: those that turn less often than beta slow within the original positions.

    Those that turn more often than beta fast stay as they are, and a ramp over the pairs' numbers mixes both between them.
    """
    size, base = model.kv_channels, model.rotary_base
    powers = base ** (torch.arange(0, size, 2, dtype=torch.float32) / size)

    def number(turns: float) -> float:
        return size * math.log(model.yarn_original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = number(model.yarn_beta_fast), number(model.yarn_beta_slow)
    if model.yarn_correction_range_round_to_int:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    high += 0.001 * (low == high)
    ramp = ((torch.arange(size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return ramp / (model.rotary_scaling_factor * powers) + (1 - ramp) / powers


def concentration(model: ModelConfig) -> float:
    """By what yarn multiplies queries and keys; 1 for rope."""
    def scale(factor: float) -> float:
        return 0.1 * factor * math.log(model.rotary_scaling_factor) + 1.0 if model.rotary_scaling_factor > 1 else 1.0

    return scale(model.mscale) / scale(model.mscale_all_dim) if model.position_embedding_type == YARN else 1.0


def rotary_angles(model: ModelConfig, positions: Tensor) -> tuple[Tensor, Tensor] | None:
    """(cosines, sines) of positions (s,), each (s, rotated elements / 2) in FP32, times yarn's factor.

    None for a model without rotary positions.
    """
    if not model.rotary:
        return None
    angles = torch.outer(positions.float() / (model.rotary_seq_len_interpolation_factor or 1.0), frequencies(model))
    factor = concentration(model)
    return torch.cos(angles) * factor, torch.sin(angles) * factor
