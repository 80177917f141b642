"""Cache of weights in the matmul kernels' layout, until the optimizer changes them (--cache-packed-weights)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .gradients import is_frozen
from .q8_weight import keywords

# Packing once per optimizer step makes a matmul 3 to 5 per cent faster (head: 15), for one copy of the weights in forward and one
# for data gradients. Results have the same bits.


@dataclass
class _Entry:
    """A packed copy. weight: referenced, so that its memory is not reused."""

    weight: Tensor
    buffer: Tensor
    target: str = ""
    valid: bool = False


class WeightCache:
    """Packed copies of one rank's weights. `Optimizer` calls `weights_changed` after every change."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self._entries: dict[tuple[int, tuple[int, ...], bool], _Entry] = {}

    def weights_changed(self, frozen: bool = False) -> None:
        """Mark weights to be packed again. frozen: frozen weights too."""
        for entry in self._entries.values():
            entry.valid = entry.valid and is_frozen(entry.weight) and not frozen

    def packed(self, weight: Tensor, dtype: torch.dtype, transposed: bool) -> Tensor:
        """Return weight (out, in) packed for the active target and activations of `dtype`, as bytes (n,).

        transposed: for linear_data_gradient
        """
        key = (weight.data_ptr(), tuple(weight.shape), transposed)
        target = self._kernels.active()
        size = self._kernels.packed_weight_size(*weight.shape, dtype, transposed)
        entry = self._entries.get(key)
        if entry is None or entry.buffer.numel() != size:
            entry = self._entries[key] = _Entry(weight, torch.empty(size, dtype=torch.uint8))
        if not entry.valid or entry.target != target:
            self._kernels.pack_weight(
                weight, entry.buffer, transposed, dtype=dtype, **keywords(weight)
            )
            entry.valid = True
            entry.target = target
        return entry.buffer
