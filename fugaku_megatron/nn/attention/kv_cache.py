"""Key-value cache and recurrent states of generation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerCache:
    """Keys (samples, g, slots, d) and values (samples, g, slots, v) of one layer. Position p is in slot p mod slots, a ring for windows.

    Of latent attention a key is what all heads' keys and values are computed from, and its value a view of its first v elements.
    """

    keys: Tensor
    values: Tensor

    @property
    def slots(self) -> int:
        return self.keys.shape[2]

    @property
    def has_latents(self) -> bool:
        return self.values.data_ptr() == self.keys.data_ptr()

    def store(self, sample: int, first: int, keys: Tensor, values: Tensor) -> None:
        """Store as many last positions of keys (s, g, d) and values (s, g, v), from position `first`, as fit."""
        kept = torch.arange(max(0, len(keys) - self.slots), len(keys))
        for cache, new in ((self.keys, keys), (self.values, values)):
            cache[sample].index_copy_(1, (first + kept) % self.slots, new[kept].transpose(0, 1))

    def before(self, sample: int, position: int) -> tuple[Tensor, Tensor]:
        """Return the keys (c, g, d) and values (c, g, v) of the last positions before `position`, in order."""
        kept = torch.arange(max(0, position - self.slots), position) % self.slots
        keys, values = (
            cache[sample].index_select(1, kept).transpose(0, 1)
            for cache in (self.keys, self.values)
        )
        return keys, values


@dataclass(frozen=True)
class DeltaState:
    """States of a gated delta net, whose size does not depend on the number of tokens.

    inputs: last inputs of the convolution (samples, w - 1, channels).
    states: of the delta rule, FP32 (samples, n, key size, value size).
    """

    inputs: Tensor
    states: Tensor

    def store(self, sample: int, inputs: Tensor, state: Tensor) -> None:
        """Append new inputs (s, 1, channels), and store the state (1, n, key size, value size) after them."""
        own = self.inputs[sample]
        own.copy_(torch.cat((own, inputs[:, 0]))[len(inputs) :])
        self.states[sample] = state[0]


# By the number of the layer, from 1 on.
Cache = dict[int, LayerCache | DeltaState]
