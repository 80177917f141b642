"""How the tensors of Hugging Face's models lie in ours: views of ours, which both reading and writing use.

Legend: h hidden, f MLP width, n heads in g groups, d head size.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..config.model_config import ModelConfig

Shape = tuple[int, ...]
Arrangement = Callable[[Tensor, int, ModelConfig], tuple[list[Tensor], Shape]]
"""(our tensor, number of theirs among those that make it, model) -> (views of ours, whose elements one view after another are those
of theirs; their shape)."""


def whole(ours: Tensor, part: int, model: ModelConfig) -> tuple[list[Tensor], Shape]:
    """The same tensor."""
    return [ours], tuple(ours.shape)


def transposed(ours: Tensor, part: int, model: ModelConfig) -> tuple[list[Tensor], Shape]:
    """GPT-2's Conv1D holds (inputs, outputs)."""
    return [ours.t()], tuple(ours.t().shape)


def conv_query_key_value(ours: Tensor, part: int, model: ModelConfig) -> tuple[list[Tensor], Shape]:
    """GPT-2's c_attn: (h, 3 n d), all queries, all keys, all values; ours has a head's three after another, (n 3 d, h)."""
    heads = ours.view(model.num_attention_heads, 3, -1, *ours.shape[1:]).transpose(0, 1)  # (3, n, d, h) or (3, n, d)
    theirs = heads.movedim(-1, 0) if ours.dim() == 2 else heads
    return [theirs], (*ours.shape[1:], len(ours))


def query_key_value(ours: Tensor, part: int, model: ModelConfig) -> tuple[list[Tensor], Shape]:
    """Queries (n d, h), keys (g d, h) or values (g d, h); ours has of each group its queries, its key and its value."""
    queries = model.num_attention_heads // model.query_groups
    groups = ours.view(model.query_groups, queries + 2, model.kv_channels, *ours.shape[1:])
    theirs = groups[:, (slice(0, queries), slice(queries, queries + 1), slice(queries + 1, queries + 2))[part]]
    return [theirs], (theirs.shape[0] * theirs.shape[1] * theirs.shape[2], *ours.shape[1:])


def stacked(ours: Tensor, part: int, model: ModelConfig) -> tuple[list[Tensor], Shape]:
    """The gate (f, h) and what it multiplies, (f, h); ours is (2, f, h)."""
    return [ours[part]], tuple(ours.shape[1:])


def fused_query_key_value(ours: Tensor, part: int, model: ModelConfig) -> tuple[list[Tensor], Shape]:
    """All queries, all keys, all values, ((n + 2 g) d, h); ours as in `query_key_value`."""
    return [query_key_value(ours, number, model)[0][0] for number in range(3)], tuple(ours.shape)


def fused_stacked(ours: Tensor, part: int, model: ModelConfig) -> tuple[list[Tensor], Shape]:
    """The gate and what it multiplies, (2 f, h); ours is (2, f, h)."""
    return [ours], (2 * ours.shape[1], *ours.shape[2:])


def of_expert(ours: Tensor, part: int, model: ModelConfig) -> tuple[list[Tensor], Shape]:
    """The matrix (h, f) of expert `part`; ours is (experts, h, f)."""
    return [ours[part]], tuple(ours.shape[1:])


def stacked_of_expert(ours: Tensor, part: int, model: ModelConfig) -> tuple[list[Tensor], Shape]:
    """The gate (f, h) of expert 0, what it multiplies, (f, h), the gate of expert 1 and so on; ours is (experts, 2, f, h)."""
    return [ours[part // 2, part % 2]], tuple(ours.shape[2:])
