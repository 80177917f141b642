"""Views of this program's tensors in the order of Hugging Face's, for reading and writing.

Legend: h hidden, f MLP width, n heads in g groups, d head size.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ...config.model import ModelConfig

Shape = tuple[int, ...]
Arranged = tuple[list[Tensor], Shape]
Arrangement = Callable[[Tensor, int, ModelConfig], Arranged]
"""(our tensor, number of theirs within ours, model) -> (views of ours that concatenate to theirs; their shape)."""


def _view(theirs: Tensor) -> Arranged:
    return [theirs], tuple(theirs.shape)


def whole(ours: Tensor, part: int, model: ModelConfig) -> Arranged:
    return _view(ours)


def transposed(ours: Tensor, part: int, model: ModelConfig) -> Arranged:
    """Return GPT-2's Conv1D weight (inputs, outputs)."""
    return _view(ours.t())


def conv_query_key_value(ours: Tensor, part: int, model: ModelConfig) -> Arranged:
    """Return GPT-2's c_attn (h, 3 n d), all queries, keys, values; ours (n 3 d, h) is per head."""
    heads = ours.view(model.num_attention_heads, 3, -1, *ours.shape[1:]).transpose(
        0, 1
    )  # (3, n, d, h) or (3, n, d)
    theirs = heads.movedim(-1, 0) if ours.dim() == 2 else heads
    return [theirs], (*ours.shape[1:], len(ours))


def query_key_value(ours: Tensor, part: int, model: ModelConfig) -> Arranged:
    """Return queries (n d, h), keys or values (g d, h); ours has queries, key and value per group.

    Theirs have a query and its gates per head, and ours all queries of a group before their gates.
    """
    heads = model.num_attention_heads // model.query_groups
    queries = model.query_widths * heads
    groups = ours.view(model.query_groups, queries + 2, model.kv_channels, *ours.shape[1:])
    if part == 0:
        theirs = groups[:, :queries].unflatten(1, (model.query_widths, heads)).transpose(1, 2)
    else:
        theirs = groups[:, queries + part - 1]
    return [theirs], (theirs.numel() // ours.shape[1:].numel(), *ours.shape[1:])


def stacked(ours: Tensor, part: int, model: ModelConfig) -> Arranged:
    """Return gate or value (f, h) from ours (2, f, h), or an expert (h, f) from ours (experts, h, f)."""
    return _view(ours[part])


def _neighbours_to_halves(ours: Tensor, rotated: int) -> list[Tensor]:
    """Return the rows of a head, of whose last `rotated` theirs has the even ones before the odd ones."""
    fixed, pairs = ours.split((len(ours) - rotated, rotated))
    return [fixed, pairs.unflatten(0, (-1, 2)).transpose(0, 1)]


def queries_in_halves(ours: Tensor, part: int, model: ModelConfig) -> Arranged:
    """Return latent attention's queries (n d, ...) for rope that rotates elements half the rotated size apart."""
    rotated = model.qk_pos_emb_head_dim
    heads = ours.split(model.kv_channels)
    views = [view for head in heads for view in _neighbours_to_halves(head, rotated)]
    return views, tuple(ours.shape)


def keys_in_halves(ours: Tensor, part: int, model: ModelConfig) -> Arranged:
    """Return latent attention's narrow vector and shared key (rank + r, h), whose key is as in `queries_in_halves`."""
    return _neighbours_to_halves(ours, model.qk_pos_emb_head_dim), tuple(ours.shape)


def fused_query_key_value(ours: Tensor, part: int, model: ModelConfig) -> Arranged:
    """Return all queries, keys, values ((n + 2 g) d, h)."""
    return [query_key_value(ours, number, model)[0][0] for number in range(3)], tuple(ours.shape)


def fused_stacked(ours: Tensor, part: int, model: ModelConfig) -> Arranged:
    """Return gate and value (2 f, h) from ours (2, f, h)."""
    return _view(ours.flatten(0, 1))


def stacked_of_expert(ours: Tensor, part: int, model: ModelConfig) -> Arranged:
    """Return gate 0 (f, h), value 0, gate 1 ... by `part` from ours (experts, 2, f, h)."""
    return _view(ours[part // 2, part % 2])


def stacked_experts(ours: Tensor, part: int, model: ModelConfig) -> Arranged:
    """Return gates before values, (experts, 2 f, h), from ours (experts, 2, f, h)."""
    return _view(ours.flatten(1, 2))


def interleaved(ours: Tensor, part: int, model: ModelConfig) -> Arranged:
    """Return gates and values in turn, (experts, h, 2 f) or (experts, 2 f), from ours (experts, 2, f, h) or (experts, 2, f)."""
    theirs = ours.movedim(1, -1)  # (experts, f, h, 2) or (experts, f, 2)
    if ours.dim() == 4:
        theirs = theirs.transpose(1, 2)
    return [theirs], (*theirs.shape[:-2], 2 * theirs.shape[-2])


def transposed_experts(ours: Tensor, part: int, model: ModelConfig) -> Arranged:
    """Return (experts, f, h) from ours (experts, h, f)."""
    return _view(ours.transpose(1, 2))


def key_heads(ours: Tensor, model: ModelConfig) -> tuple[Tensor, ...]:
    """Return the queries, keys, values, and if present gates, strengths and decays, each (k, rows, ...) of k key heads."""
    heads = ours.view(model.linear_num_key_heads, -1, *ours.shape[1:])
    sizes = model.key_head_parts
    if heads.shape[1] < sum(sizes):
        sizes = sizes[:3]
    parts: tuple[Tensor, ...] = heads.split(sizes, dim=1)
    return parts


def delta_projections(ours: Tensor, part: int, model: ModelConfig) -> Arranged:
    """Return Qwen3-Next's in_proj_qkvz, or in_proj_ba, both by key head."""
    keys = model.linear_num_key_heads
    heads = ours.view(keys, -1, *ours.shape[1:])
    sizes = model.key_head_parts
    theirs = heads.split((sum(sizes[:4]), sum(sizes[4:])), dim=1)[part]
    return [theirs], (keys * theirs.shape[1], *ours.shape[1:])


def delta_parts(ours: Tensor, part: int, model: ModelConfig) -> Arranged:
    """Return Qwen3.5's in_proj_qkv, all queries before all keys and values; in_proj_z, in_proj_b, or in_proj_a."""
    queries, keys, values, *others = key_heads(ours, model)
    theirs = [queries, keys, values] if part == 0 else [others[part - 1]]
    rows = sum(view.shape[0] * view.shape[1] for view in theirs)
    return theirs, (rows, *ours.shape[1:])


def delta_convolution(ours: Tensor, part: int, model: ModelConfig) -> Arranged:
    """Return conv1d (channels, 1, width), all queries before all keys and values."""
    return list(key_heads(ours, model)), (len(ours), 1, ours.shape[1])


# Arrangements of weights that are stored as (inputs, outputs).
INPUTS_FIRST = (transposed, conv_query_key_value, interleaved, transposed_experts)
