"""Attention heads of a rank: query groups and head sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...config.model import ModelConfig

Angles = tuple[Tensor, Tensor]  # cosines and sines (positions, rotated elements / 2), FP32


@dataclass(frozen=True)
class Heads:
    """Layout of qkv (s, b, g (n/g d + d + v)): for each group n/g queries and a key of d elements, and a value of v.

    head_size: d
    narrow_values: v; None: d
    scale: factor of the scores; None: 1 / sqrt(d)
    """

    heads: int
    groups: int
    head_size: int
    narrow_values: int | None = None
    scale: float | None = None

    @staticmethod
    def of(model: ModelConfig, ranks: int, copies: int = 1) -> Heads:
        """Return the heads on one of `ranks`. copies: of each query group's key and value, on different ranks"""
        heads = model.num_attention_heads // ranks
        groups = model.query_groups * copies // ranks
        scale = model.attention_scale if model.multi_latent_attention else None
        return Heads(heads, groups, model.kv_channels, model.value_size, scale)

    @property
    def queries_per_group(self) -> int:
        return self.heads // self.groups

    @property
    def value_size(self) -> int:
        return self.head_size if self.narrow_values is None else self.narrow_values

    @property
    def qkv_width(self) -> int:
        """Elements per token in qkv."""
        return self.heads * self.head_size + self.groups * (self.head_size + self.value_size)

    @property
    def context_width(self) -> int:
        """Elements per token in the attention output."""
        return self.heads * self.value_size

    @property
    def score_scale(self) -> float:
        return self.head_size**-0.5 if self.scale is None else self.scale

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of attention's kernels besides tensors, mask and dropout."""
        return {"key_size": self.head_size, "scale": self.scale}

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return views of queries (s, b, g, n/g, d), keys (s, b, g, 1, d) and values (s, b, g, 1, v)."""
        d = self.head_size
        parts = (self.queries_per_group * d, d, self.value_size)
        queries, keys, values = qkv.unflatten(2, (self.groups, sum(parts))).split(parts, dim=3)
        return queries.unflatten(3, (-1, d)), keys.unsqueeze(3), values.unsqueeze(3)

    def split_keys(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of keys (k, b, g, d) and values (k, b, g, v) in kv (k, b, g (d + v))."""
        keys, values = kv.unflatten(2, (self.groups, -1)).split(
            (self.head_size, self.value_size), 3
        )
        return keys, values
