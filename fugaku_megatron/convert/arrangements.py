"""How tensors of Hugging Face lie in ours: each function is a view of our tensor with the elements of one of theirs, in its order.

One view serves both ways: what is read is copied into it, and what is written is copied out of it.
Legend: h hidden, n heads, g groups of heads that share a key and a value, d head size, f MLP width.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..run.model_config import ModelConfig

Shape = tuple[int, ...]
Arrangement = Callable[[Tensor, int, ModelConfig], tuple[Tensor, Shape]]
"""(our tensor, number of theirs among those that make it, model) -> (a view of ours with the elements of theirs, their shape)."""


def whole(ours: Tensor, part: int, model: ModelConfig) -> tuple[Tensor, Shape]:
    """The same tensor."""
    return ours, tuple(ours.shape)


def transposed(ours: Tensor, part: int, model: ModelConfig) -> tuple[Tensor, Shape]:
    """GPT-2's Conv1D holds (inputs, outputs)."""
    return ours.t(), tuple(ours.t().shape)


def conv_query_key_value(ours: Tensor, part: int, model: ModelConfig) -> tuple[Tensor, Shape]:
    """GPT-2's c_attn: (h, 3 n d), all queries, all keys, all values; ours has a head's three after another, (n 3 d, h)."""
    heads = ours.view(model.num_attention_heads, 3, -1, *ours.shape[1:]).transpose(0, 1)  # (3, n, d, h) or (3, n, d)
    theirs = heads.movedim(-1, 0) if ours.dim() == 2 else heads
    return theirs, (*ours.shape[1:], len(ours))


def query_key_value(ours: Tensor, part: int, model: ModelConfig) -> tuple[Tensor, Shape]:
    """Queries (n d, h), keys (g d, h) or values (g d, h); ours has of each group its queries, its key and its value."""
    queries = model.num_attention_heads // model.query_groups
    groups = ours.view(model.query_groups, queries + 2, model.kv_channels, *ours.shape[1:])
    theirs = groups[:, (slice(0, queries), slice(queries, queries + 1), slice(queries + 1, queries + 2))[part]]
    return theirs, (theirs.shape[0] * theirs.shape[1] * theirs.shape[2], *ours.shape[1:])


def stacked(ours: Tensor, part: int, model: ModelConfig) -> tuple[Tensor, Shape]:
    """The gate (f, h) and what it multiplies, (f, h); ours is (2, f, h)."""
    return ours[part], tuple(ours.shape[1:])
