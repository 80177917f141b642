"""The angles of rotary positions: cosines and sines for each position and pair of elements.

Sources: Su et al. 2021, "RoFormer" (arXiv:2104.09864), section 3.2; Llama 3.1's scaling as modeling_rope_utils of transformers has
it (_compute_llama3_parameters). Left out: the turning (`ops.Ops.rotary`). Test: pytest tests/test_llama.py
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..run.config import ModelConfig
from ..run.model_config import ROPE

# Llama 3.1's constants, which Megatron-LM does not have as flags either: waves of up to 8192 / 4 positions stay as they are, those
# of 8192 / 1 and more are lengthened by the factor, and what lies between is mixed of both.
ORIGINAL_POSITIONS, LOW_FREQUENCY_FACTOR, HIGH_FREQUENCY_FACTOR = 8192, 1.0, 4.0


def frequencies(model: ModelConfig) -> Tensor:
    """Angle per position of each pair of elements, (rotated elements / 2,) in FP32."""
    size = model.rotary_size
    plain = 1.0 / model.rotary_base ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    if not model.use_rope_scaling:
        return plain
    lengthened = plain / model.rope_scaling_factor
    waves = ORIGINAL_POSITIONS / (2 * math.pi / plain)  # in the original positions
    share = ((waves - LOW_FREQUENCY_FACTOR) / (HIGH_FREQUENCY_FACTOR - LOW_FREQUENCY_FACTOR)).clamp(0.0, 1.0)
    return (1 - share) * lengthened + share * plain


def rotary_angles(model: ModelConfig, positions: Tensor) -> tuple[Tensor, Tensor] | None:
    """(cosines, sines) of positions (s,), each (s, rotated elements / 2) in FP32; None for a model without rotary positions."""
    if model.position_embedding_type != ROPE:
        return None
    angles = torch.outer(positions.float(), frequencies(model))
    return torch.cos(angles), torch.sin(angles)
