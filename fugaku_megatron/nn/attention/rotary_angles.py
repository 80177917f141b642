"""Rotary angles, with linear, Llama 3.1, dynamic NTK, YaRN and LongRoPE scaling, also by document."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...config.model import ModelConfig
from ...config.rows import YARN
from .heads import Angles


class TokenAngles(NamedTuple):
    """Rotary angles, and each token's row in them, int32 (s, b)."""

    angles: Angles
    rows: Tensor


# Sources: Su et al. 2021, "RoFormer" (arXiv:2104.09864), section 3.2; Llama 3.1 and dynamic NTK scaling as in
# _compute_llama3_parameters and _compute_dynamic_ntk_parameters of transformers' modeling_rope_utils; Peng et al. 2023, "YaRN"
# (arXiv:2309.00071) as in megatron/core/models/common/embeddings/yarn_rotary_pos_embedding.py of Megatron-LM; linear scaling as
# in its rotary_pos_embedding.py; Ding et al. 2024, "LongRoPE" (arXiv:2402.13753) as in _compute_longrope_parameters of transformers.


def frequencies(model: ModelConfig, length: int) -> Tensor:
    """Return the angle per position for each element pair, (rotated elements / 2,) in FP32.

    --rope-dynamic-factor raises the base if `length` exceeds the original positions. --use-rope-scaling keeps waves up to (original
    positions / high factor), lengthens waves from (original positions / low factor) on, and mixes both in between. --longrope-short-factors
    divide frequencies up to the original positions, --longrope-long-factors in a longer sequence.
    """
    size = model.rotary_size
    if model.position_embedding_type == YARN:
        return yarn_frequencies(model)
    base = model.rotary_base
    if model.rope_dynamic_factor is not None:
        ratio = max(length / model.rope_scaling_original_max_position_embeddings, 1.0)
        base *= (model.rope_dynamic_factor * ratio - (model.rope_dynamic_factor - 1)) ** (
            size / (size - 2)
        )
    plain = 1.0 / base ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    if model.longrope_short_factors:
        longer = length > model.rope_scaling_original_max_position_embeddings
        factors = model.longrope_long_factors if longer else model.longrope_short_factors
        return plain / torch.tensor(factors)
    if not model.use_rope_scaling:
        return plain
    lengthened = plain / model.rope_scaling_factor
    low = model.rope_scaling_low_freq_factor
    high = model.rope_scaling_high_freq_factor
    waves = model.rope_scaling_original_max_position_embeddings / (
        2 * math.pi / plain
    )  # in the original positions
    share = ((waves - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - share) * lengthened + share * plain


def yarn_frequencies(model: ModelConfig) -> Tensor:
    """Return YaRN's `frequencies`: waves with fewer than beta slow turns in the original positions are lengthened, waves with more than
    beta fast turns stay.
    """
    size = model.rotary_size
    base = model.rotary_base
    powers = base ** (torch.arange(0, size, 2, dtype=torch.float32) / size)

    def number(turns: float) -> float:
        return (
            size
            * math.log(model.yarn_original_max_position_embeddings / (turns * 2 * math.pi))
            / (2 * math.log(base))
        )

    low = number(model.yarn_beta_fast)
    high = number(model.yarn_beta_slow)
    if model.yarn_correction_range_round_to_int:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, size - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return ramp / (model.rotary_scaling_factor * powers) + (1 - ramp) / powers


def rotary_angles(model: ModelConfig, positions: Tensor, length: int) -> Angles:
    """Return (cosines, sines) for positions (s,) in a sequence of `length`, each (s, rotated elements / 2) in FP32.

    model: a value of `ModelConfig.ropes`.
    Both include the factor on queries and keys, of YaRN, of LongRoPE or from --attention-multiplier.
    """
    angles = torch.outer(
        positions.float() / (model.rotary_seq_len_interpolation_factor or 1.0),
        frequencies(model, length),
    )
    factor = model.yarn_attention_factor * model.longrope_attention_factor
    if model.attention_multiplier is not None:
        factor *= float((model.attention_multiplier * model.kv_channels**0.5) ** 0.5)
    sines = angles.sin()
    cosines = angles.cos_()
    return (cosines, sines) if factor == 1.0 else (cosines.mul_(factor), sines.mul_(factor))


def document_angles(model: ModelConfig, positions: Tensor, padding: Tensor | None) -> TokenAngles:
    """Return the angles of tokens by document length, for angles that depend on it.

    positions: int32 (s, b), position 0 of each sample being 0.
    padding: bool (s, b), tokens that do not lengthen their document and whose angles are not read.
    """
    s, samples = positions.shape
    used = torch.ones_like(positions) if padding is None else (~padding).int()
    documents = (
        (positions == 0).cumsum(0) - 1 + torch.arange(samples) * s
    )  # a number for each document
    lengths = torch.zeros(s * samples, dtype=torch.int64)
    lengths.scatter_reduce_(
        0, documents.flatten(), ((positions + 1) * used).flatten().long(), "amax"
    )
    longest = int(lengths.max())
    original = model.rope_scaling_original_max_position_embeddings
    if model.longrope_short_factors:
        lengths.masked_fill_(lengths > original, longest)
    lengths.masked_fill_(lengths <= original, 0)  # which share their frequencies
    tables = []
    firsts = torch.zeros(longest + 1, dtype=torch.int64)
    rows = 0
    for length in lengths.unique().tolist():
        table = rotary_angles(model, torch.arange(length or max(1, min(longest, original))), length)
        firsts[length] = rows
        tables.append(table)
        rows += len(table[0])
    cosines, sines = (torch.cat(angles) for angles in zip(*tables, strict=True))
    places = (firsts[lengths[documents]] + positions) * used
    return TokenAngles((cosines, sines), places.int().contiguous())
