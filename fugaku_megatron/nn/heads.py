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

    @staticmethod
    def of(qkv: Tensor, head_size: int, groups: int | None) -> Heads:
        slots = qkv.shape[-1] // head_size
        return (
            Heads(slots // 3, slots // 3, head_size)
            if groups is None
            else Heads(slots - 2 * groups, groups, head_size)
        )

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return views of queries (s, b, g, n/g, d), keys and values (s, b, g, 1, d)."""
        queries = self.queries_per_group
        return qkv.view(*qkv.shape[:2], self.groups, queries + 2, self.head_size).split(
            (queries, 1, 1), dim=3
        )
