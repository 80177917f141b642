"""What one forward is about, for every layer that it goes through; keys and values of earlier tokens; angles of positions.

A forward of generation works on rows instead of a sequence: x (r, 1, h), the rows of one sample after those of another, without
padding. A sample brings either its whole prompt, as its first rows, or one token. Left out: which tokens those are (`inference`).
Legend: r rows, s rows of a prompt, n heads and g groups of heads of this rank, d head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ..config.model_config import YARN
from ..config.run_config import ModelConfig
from .ops import Ops
from .shared import Angles


@dataclass(frozen=True)
class LayerCache:
    """Keys and values (samples, g, slots, d) of one layer. A position p lies in slot p mod slots, so that a window needs no more
    slots than it has positions."""

    keys: Tensor
    values: Tensor

    @staticmethod
    def empty(
        samples: int, groups: int, slots: int, head_size: int, dtype: torch.dtype
    ) -> LayerCache:
        """Memory for `slots` positions of each sample, two of (samples, g, slots, d)."""
        keys, values = (
            torch.empty(samples, groups, slots, head_size, dtype=dtype) for _ in range(2)
        )
        return LayerCache(keys, values)

    @property
    def slots(self) -> int:
        """Positions of a sample that are kept."""
        return self.keys.shape[2]

    def store(self, sample: int, keys: Tensor, values: Tensor) -> None:
        """Keep the keys and values (s, g, d) of a sample's positions from 0 on, or the last of them."""
        kept = torch.arange(max(0, len(keys) - self.slots), len(keys))
        for cache, new in ((self.keys, keys), (self.values, values)):
            cache[sample].index_copy_(1, kept % self.slots, new[kept].transpose(0, 1))


KeyValueCache = dict[int, LayerCache]  # by the number of the layer, from 1 on


@dataclass(frozen=True)
class Rows:
    """What the rows of a forward are, and the cache of what came before.

    lengths: rows of each sample that has any. samples (that many,): these samples' places in the cache. positions (r,): of every
    row in its sample; angles: of rotary positions, two of (r, rotated elements / 2), None for a model without.
    """

    cache: KeyValueCache
    samples: Tensor
    lengths: tuple[int, ...]
    positions: Tensor
    angles: Angles | None

    @staticmethod
    def of(
        model: ModelConfig,
        cache: KeyValueCache,
        samples: Sequence[int],
        first: Sequence[int],
        lengths: Sequence[int],
    ) -> Rows:
        """Rows of samples whose next positions are `first`."""
        own = [
            torch.arange(begin, begin + length)
            for begin, length in zip(first, lengths, strict=True)
        ]
        positions = torch.cat(own)
        angles = rotary_angles(model, positions, 0)
        if model.rope_dynamic_factor is not None:  # each sample has its own length
            cosines, sines = zip(
                *filter(
                    None, (rotary_angles(model, part, len(part) + int(part[0])) for part in own)
                )
            )
            angles = torch.cat(cosines), torch.cat(sines)
        return Rows(cache, torch.tensor(samples), tuple(lengths), positions, angles)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What differs from one token to the next: samples, positions and angles."""
        return self.samples, self.positions, *(self.angles or ())

    @property
    def last(self) -> Tensor:
        """The last row of each sample, (samples,)."""
        return torch.tensor(self.lengths).cumsum(0) - 1

    @property
    def one_each(self) -> bool:
        """Whether every sample has one row, its next token."""
        return len(self.positions) == len(self.samples)

    def attend(
        self, ops: Ops, layer: int, qkv: Tensor, whole: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Attention of rows to their sample's positions up to their own: qkv (r, 1, g (n/g + 2) d) -> (r, 1, n d).

        whole: the layer's attention of a sequence that has nothing before it, of the same shapes.
        """
        cache = self.cache[layer]
        if self.one_each:
            return ops.cached_attention(qkv, cache.keys, cache.values, self.samples, self.positions)
        context = []
        for sample, part in zip(self.samples.tolist(), qkv.split(self.lengths), strict=True):
            groups = part.view(
                len(part), cache.keys.shape[1], -1, cache.keys.shape[3]
            )  # (s, g, n/g + 2, d)
            cache.store(sample, groups[:, :, -2], groups[:, :, -1])
            context.append(whole(part))
        return torch.cat(context)


class TokenAngles(NamedTuple):
    """Angles of rotary positions, and the row of the angles for each token, int32 (s, b)."""

    angles: Angles
    rows: Tensor


@dataclass(frozen=True)
class Documents:
    """The documents of a micro-batch. starts: int32 (b, s), where that of each position begins, before which attention sees
    nothing; None: with the sample. positions: int32 (s, b), of each token in its document; None: in its sample.
    padding: bool (s, b), the tokens of chats from which nothing is predicted; None: samples are not of chats."""

    starts: Tensor | None = None
    positions: Tensor | None = None
    padding: Tensor | None = None

    @cached_property
    def _angles(self) -> dict[ModelConfig, TokenAngles]:
        return {}

    def angles(self, model: ModelConfig) -> TokenAngles | None:
        """Return the angles of tokens if they depend on the lengths of the documents, else None; computed once for all layers."""
        if model.rope_dynamic_factor is None or self.positions is None:
            return None
        if model not in self._angles:
            self._angles[model] = document_angles(model, self.positions, self.padding)
        return self._angles[model]


@dataclass(frozen=True, kw_only=True)
class Pass:
    """An argument of every layer's forward.

    first_sample: global index of the micro-batch's first sample, which selects dropout masks. training: False in evaluation, where
    nothing is dropped and nothing recomputed. recompute: what backward computes again: None, "selective" (attention) or "full"
    (groups of layers). needs_values: False where backward will follow and nobody reads the values of the last result.
    balance_factor: of the gradients of experts' balancing losses. tokens: of chats, how many a micro-batch of the iteration has in
    the mean, padding left out: by them micro-batches weigh in balancing losses; None: all weigh the same. rows: where tokens are
    generated, what the rows of x are, which then is (rows, 1, h). documents: of the samples. count: by what the sum of the losses
    of labels is divided; None: by their number.
    """

    first_sample: int
    training: bool = True
    recompute: str | None = None
    needs_values: bool = True
    balance_factor: float = 1.0
    rows: Rows | None = None
    documents: Documents = Documents()
    count: float | None = None
    tokens: float | None = None


# The angles of rotary positions: cosines and sines for each position and pair of elements. Sources: Su et al. 2021, "RoFormer"
# (arXiv:2104.09864), section 3.2; Llama 3.1's and dynamic NTK scaling as ROPE_INIT_FUNCTIONS of transformers' modeling_rope_utils
# has them (_compute_llama3_parameters, _compute_dynamic_ntk_parameters);
# Peng et al. 2023, "YaRN" (arXiv:2309.00071) as Megatron-LM has it in
# megatron/core/models/common/embeddings/yarn_rotary_pos_embedding.py, and its linear scaling in
# megatron/core/models/common/embeddings/rotary_pos_embedding.py. Left out: the turning (`ops.Ops.rotary`).


def frequencies(model: ModelConfig, length: int) -> Tensor:
    """Angle per position of each pair of elements, (rotated elements / 2,) in FP32, in a sequence of `length` positions.

    The length matters to --rope-dynamic-factor alone, which raises the base where it exceeds the original positions.
    With --use-rope-scaling, waves of up to (original positions / high factor) positions stay as they are, those of (original
    positions / low factor) and more are lengthened by the scaling factor, and those between are mixed of both.
    """
    size = model.rotary_size
    if model.position_embedding_type == YARN:
        return yarn_frequencies(model)
    base = model.rotary_base
    if model.rope_dynamic_factor is not None:
        longer = max(length / model.rope_scaling_original_max_position_embeddings, 1.0)
        base *= (model.rope_dynamic_factor * longer - (model.rope_dynamic_factor - 1)) ** (
            size / (size - 2)
        )
    plain = 1.0 / base ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    if not model.use_rope_scaling:
        return plain
    lengthened = plain / model.rope_scaling_factor
    low, high = model.rope_scaling_low_freq_factor, model.rope_scaling_high_freq_factor
    waves = model.rope_scaling_original_max_position_embeddings / (
        2 * math.pi / plain
    )  # in the original positions
    share = ((waves - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - share) * lengthened + share * plain


def yarn_frequencies(model: ModelConfig) -> Tensor:
    """`frequencies` where long waves are lengthened: those that turn less often than beta slow within the original positions.

    Those that turn more often than beta fast stay as they are, and a ramp over the pairs' numbers mixes both between them.
    """
    size, base = model.kv_channels, model.rotary_base
    powers = base ** (torch.arange(0, size, 2, dtype=torch.float32) / size)

    def number(turns: float) -> float:
        return (
            size
            * math.log(model.yarn_original_max_position_embeddings / (turns * 2 * math.pi))
            / (2 * math.log(base))
        )

    low, high = number(model.yarn_beta_fast), number(model.yarn_beta_slow)
    if model.yarn_correction_range_round_to_int:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    high += 0.001 * (low == high)
    ramp = ((torch.arange(size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return ramp / (model.rotary_scaling_factor * powers) + (1 - ramp) / powers


def concentration(model: ModelConfig) -> float:
    """By what yarn multiplies queries and keys. For rope it is 1, or what makes the scores those of --attention-multiplier."""
    if model.attention_multiplier is not None:
        return (model.attention_multiplier * model.kv_channels**0.5) ** 0.5
    return model.yarn_attention_factor if model.position_embedding_type == YARN else 1.0


def rotary_angles(model: ModelConfig, positions: Tensor, length: int) -> Angles | None:
    """(cosines, sines) of positions (s,) in a sequence of `length`, each (s, rotated elements / 2) in FP32, times yarn's factor.

    None for a model without rotary positions.
    """
    if not model.rotary:
        return None
    angles = torch.outer(
        positions.float() / (model.rotary_seq_len_interpolation_factor or 1.0),
        frequencies(model, length),
    )
    factor, sines = concentration(model), angles.sin()
    cosines = angles.cos_()
    return (cosines, sines) if factor == 1.0 else (cosines.mul_(factor), sines.mul_(factor))


def document_angles(model: ModelConfig, positions: Tensor, padding: Tensor | None) -> TokenAngles:
    """Return the angles of tokens, each for the length of its document, for --rope-dynamic-factor.

    Documents of one length share their rows, and so do all that are not longer than the original positions.

    Args:
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
    lengths.masked_fill_(lengths <= original, 0)  # of one base
    tables = []
    firsts = torch.zeros(longest + 1, dtype=torch.int64)
    rows = 0
    for length in lengths.unique().tolist():
        table = rotary_angles(model, torch.arange(length or max(1, min(longest, original))), length)
        assert table is not None, "the model has rotary positions"
        firsts[length] = rows
        tables.append(table)
        rows += len(table[0])
    cosines, sines = (torch.cat(angles) for angles in zip(*tables, strict=True))
    places = (firsts[lengths[documents]] + positions) * used
    return TokenAngles((cosines, sines), places.int().contiguous())
