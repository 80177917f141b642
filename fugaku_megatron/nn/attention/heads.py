"""Attention heads of a rank: query groups and head size."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

Angles = tuple[Tensor, Tensor]  # cosines and sines (positions, rotated elements / 2), FP32


@dataclass(frozen=True)
class Heads:
    """Layout of qkv (s, b, g (n/g + 2) d): for each group n/g queries, a key and a value, d elements each."""

    heads: int
    groups: int
    head_size: int

    @property
    def queries_per_group(self) -> int:
        return self.heads // self.groups

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return views of queries (s, b, g, n/g, d), keys and values (s, b, g, 1, d)."""
        slots = qkv.view(*qkv.shape[:2], self.groups, -1, self.head_size)
        queries, keys, values = slots.split((self.queries_per_group, 1, 1), dim=3)
        return queries, keys, values
