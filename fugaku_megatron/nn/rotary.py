"""The angles of rotary positions: cosines and sines for each position and pair of elements.

Sources: Su et al. 2021, "RoFormer" (arXiv:2104.09864), section 3.2; Llama 3.1's scaling as modeling_rope_utils of transformers has
it (_compute_llama3_parameters). Left out: the turning (`ops.Ops.rotary`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..config.model_config import ROPE
from ..config.run_config import ModelConfig


def frequencies(model: ModelConfig) -> Tensor:
    """Angle per position of each pair of elements, (rotated elements / 2,) in FP32.

    With --use-rope-scaling, waves of up to (original positions / high factor) positions stay as they are, those of (original
    positions / low factor) and more are lengthened by the scaling factor, and those between are mixed of both.
    """
    size = model.rotary_size
    plain = 1.0 / model.rotary_base ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    if not model.use_rope_scaling:
        return plain
    lengthened = plain / model.rope_scaling_factor
    low, high = model.rope_scaling_low_freq_factor, model.rope_scaling_high_freq_factor
    waves = model.rope_scaling_original_max_position_embeddings / (2 * math.pi / plain)  # in the original positions
    share = ((waves - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - share) * lengthened + share * plain


def rotary_angles(model: ModelConfig, positions: Tensor) -> tuple[Tensor, Tensor] | None:
    """(cosines, sines) of positions (s,), each (s, rotated elements / 2) in FP32; None for a model without rotary positions."""
    if model.position_embedding_type != ROPE:
        return None
    angles = torch.outer(positions.float(), frequencies(model))
    return torch.cos(angles), torch.sin(angles)
