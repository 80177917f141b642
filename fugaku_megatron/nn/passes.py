"""What one forward is about, for every layer that it goes through; keys and values of earlier tokens in generation.

A forward of generation works on rows instead of a sequence: x (r, 1, h), the rows of one sample after those of another, without
padding. A sample brings either its whole prompt, as its first rows, or one token. Left out: which tokens those are (`inference`).
Legend: r rows, s rows of a prompt, n heads and g groups of heads of this rank, d head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config.run_config import ModelConfig
from .ops import Ops
from .rotary import rotary_angles
from .shared import Angles


@dataclass(frozen=True)
class LayerCache:
    """Keys and values (samples, g, slots, d) of one layer. A position p lies in slot p mod slots, so that a window needs no more
    slots than it has positions."""

    keys: Tensor
    values: Tensor

    @staticmethod
    def empty(samples: int, groups: int, slots: int, head_size: int, dtype: torch.dtype) -> LayerCache:
        """Memory for `slots` positions of each sample, two of (samples, g, slots, d)."""
        keys, values = (torch.empty(samples, groups, slots, head_size, dtype=dtype) for _ in range(2))
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
    def of(model: ModelConfig, cache: KeyValueCache, samples: Sequence[int], first: Sequence[int], lengths: Sequence[int]) -> Rows:
        """Rows of samples whose next positions are `first`."""
        positions = torch.tensor([p for begin, length in zip(first, lengths, strict=True) for p in range(begin, begin + length)])
        return Rows(cache, torch.tensor(samples), tuple(lengths), positions, rotary_angles(model, positions))

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

    def attend(self, ops: Ops, layer: int, qkv: Tensor, whole: Callable[[Tensor], Tensor]) -> Tensor:
        """Attention of rows to their sample's positions up to their own: qkv (r, 1, g (n/g + 2) d) -> (r, 1, n d).

        whole: the layer's attention of a sequence that has nothing before it, of the same shapes.
        """
        cache = self.cache[layer]
        if self.one_each:
            return ops.cached_attention(qkv, cache.keys, cache.values, self.samples, self.positions)
        context = []
        for sample, part in zip(self.samples.tolist(), qkv.split(self.lengths), strict=True):
            groups = part.view(len(part), cache.keys.shape[1], -1, cache.keys.shape[3])  # (s, g, n/g + 2, d)
            cache.store(sample, groups[:, :, -2], groups[:, :, -1])
            context.append(whole(part))
        return torch.cat(context)


@dataclass(frozen=True, kw_only=True)
class Pass:
    """An argument of every layer's forward.

    first_sample: global index of the micro-batch's first sample, which selects dropout masks. training: False in evaluation, where
    nothing is dropped and nothing recomputed. recompute: what backward computes again: None, "selective" (attention) or "full"
    (groups of layers). needs_values: False where backward will follow and nobody reads the values of the last result. rows: where
    tokens are generated, what the rows of x are, which then is (rows, 1, h).
    """

    first_sample: int
    training: bool = True
    recompute: str | None = None
    needs_values: bool = True
    rows: Rows | None = None
