"""Key-value cache of generation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
