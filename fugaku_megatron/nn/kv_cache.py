"""Key-value cache of generation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerCache:
    """Keys and values (samples, g, slots, d) of one layer. Position p is in slot p mod slots, a ring for windows."""

    keys: Tensor
    values: Tensor

    @staticmethod
    def empty(
        samples: int, groups: int, slots: int, head_size: int, dtype: torch.dtype
    ) -> LayerCache:
        keys = torch.empty(samples, groups, slots, head_size, dtype=dtype)
        return LayerCache(keys, torch.empty_like(keys))

    @property
    def slots(self) -> int:
        return self.keys.shape[2]

    def store(self, sample: int, keys: Tensor, values: Tensor) -> None:
        """Store as many last positions of keys and values (s, g, d), from position 0, as fit."""
        kept = torch.arange(max(0, len(keys) - self.slots), len(keys))
        for cache, new in ((self.keys, keys), (self.values, values)):
            cache[sample].index_copy_(1, kept % self.slots, new[kept].transpose(0, 1))


KeyValueCache = dict[int, LayerCache]  # by the number of the layer, from 1 on
