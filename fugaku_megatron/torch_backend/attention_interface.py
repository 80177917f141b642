"""`attn_implementation="fugaku"` of transformers: our attention for the masks that the kernels express, else transformers' own.

A mask (b, 1, s, k) is read once: its contents are kept with the tensor for the other layers.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .attention_kernel import Heads, Visible, attend, attend_cached
from .kernel_operators import supports

NAME = "fugaku"
HIDDEN_BELOW = -1e4  # in a mask that is added to scores


class MaskContents(NamedTuple):
    """Visible keys of a mask.

    is_reversed: `visible` describes the keys in reversed order, in which those of padding come first.
    positions: int64 (b,), the last key of each sample's only query, which sees all keys before it; None: any other mask.
    blind: (b, s, 1, 1), queries that see no key, whose context is 0; None: there are none.
    """

    visible: Visible
    is_reversed: bool = False
    positions: Tensor | None = None
    blind: Tensor | None = None


def register() -> None:
    """Add the implementation to transformers."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, create_mask)


def create_mask(*arguments: Any, **options: Any) -> Tensor | None:
    """Return transformers' mask for scaled_dot_product_attention, or None for the plain causal one."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    # transformers returns None for it as well, but not while torch.compile traces.
    plain = (
        torch.compiler.is_compiling()
        and options.get("allow_is_causal_skip", True)
        and options.get("mask_function") is causal_mask_function
        and options.get("attention_mask") is None
        and options.get("q_length") == options.get("kv_length")
        and isinstance(options.get("q_offset"), int)
    )
    return None if plain else sdpa_mask(*arguments, **options)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return the context (b, s, n, d) of queries (b, n, s, d), and None for the probabilities."""
    heads = (query, key, value)
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        heads = (query.to(dtype), key.to(dtype), value.to(dtype))
    contents = None
    if _are_supported(heads, options):
        is_causal = options.get("is_causal")
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        window = options.get("sliding_window")
        contents = _contents(query, key, attention_mask, is_causal, window)
    if contents is None:
        return _transformers_attention(module, (query, key, value), attention_mask, options)
    return _native_attention(heads, contents, options), None


def _are_supported(heads: Heads, options: dict[str, Any]) -> bool:
    query, key, value = heads
    b, n, _, d = query.shape
    unknown = ("softcap", "position_bias", "cache", "output_attentions")
    is_special = options.get("s_aux") is not None or torch.compiler.is_compiling()
    return (
        supports(*heads)
        and d % 4 == 0
        and value.shape[-1] == d
        and key.shape[0] == b
        and n % key.shape[1] == 0
        and not (options.get("dropout") and is_special)
        and not any(options.get(name) for name in unknown)
    )


def _native_attention(heads: Heads, contents: MaskContents, options: dict[str, Any]) -> Tensor:
    query, key, value = heads
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    sinks = options.get("s_aux")
    visible = contents.visible
    if contents.positions is not None and sinks is None and not torch.is_grad_enabled():
        return attend_cached(
            (query, key.contiguous(), value.contiguous()), contents.positions, scale
        )
    if contents.is_reversed:
        key = key.flip(2)
        value = value.flip(2)
    if visible.first_query < key.shape[2]:
        # The last slots of a static cache are empty.
        filled = visible.first_query + query.shape[2]
        key = key[:, :, :filled]
        value = value[:, :, :filled]
    out = attend((query, key, value), visible, scale, options.get("dropout", 0.0), sinks)
    return out if contents.blind is None else out.masked_fill(contents.blind, 0.0)


def _contents(
    query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, window: int | None
) -> MaskContents | None:
    b, _, s, _ = query.shape
    k = key.shape[2]
    if mask is None:
        if is_causal and s > 1:
            return MaskContents(Visible(0)) if s <= k else None
        only_query = s == 1 and not torch.compiler.is_compiling()
        return MaskContents(Visible(k), positions=torch.full((b,), k - 1) if only_query else None)
    if torch.compiler.is_compiling() or mask.dim() != 4 or mask.shape[-2:] != (s, k):
        return None
    of = (mask._version, b, window)
    known: tuple[Any, MaskContents | None] = getattr(mask, "_fugaku_contents", (None, None))
    if known[0] != of:
        known = (of, read_mask(mask, b, window))
        mask._fugaku_contents = known  # type: ignore[attr-defined]
    return known[1]


def read_mask(mask: Tensor, b: int, window: int | None) -> MaskContents | None:
    """Return the contents of a mask (b or 1, 1, s, k), or None if the kernels do not express it.

    mask: True, or 0 in a mask that is added to scores, is visible.
    window: the layer's window, if the mask has it
    """
    if mask.shape[1] != 1 and mask.stride(1) != 0:
        return None
    visible = mask[:, 0]
    if mask.dtype != torch.bool:
        visible = visible == 0
        if not (visible | (mask[:, 0] < HIDDEN_BELOW)).all():
            return None
    visible = visible.expand(b, -1, -1)
    if visible.shape[1] == 1 or bool((visible == visible[:, :1]).all()):
        return _read_equal_rows(visible)
    return _read_causal(visible, window)


def _first_and_last(visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return each row's first and last visible key, 0 and -1 if there is none, and whether all between are visible.

    visible: (..., k)
    """
    bits = visible.to(torch.uint8)
    counts = visible.sum(-1)
    first = bits.argmax(-1)
    last = (visible.shape[-1] - 1 - bits.flip(-1).argmax(-1)).masked_fill(counts == 0, -1)
    return first, last, counts == last - first + 1


def _read_equal_rows(visible: Tensor) -> MaskContents | None:
    """Read a mask whose queries see the same keys, as those of an encoder or of a single token."""
    _, s, k = visible.shape
    first, last, is_range = _first_and_last(visible[:, 0])
    to_end = bool((last == k - 1).all())
    from_begin = bool((first == 0).all())
    if not is_range.all() or not (to_end or from_begin):
        return None
    positions = last if s == 1 and from_begin else None
    starts = (first if to_end else k - 1 - last).unsqueeze(1)
    if not starts.any():
        return MaskContents(Visible(k), positions=positions)
    # Hidden keys are a document of their own.
    documents = starts.masked_fill(torch.arange(k + s) < starts, 0).to(torch.int32)
    return MaskContents(Visible(k, documents), not to_end, positions)


def _read_causal(visible: Tensor, window: int | None) -> MaskContents | None:
    """Read a mask whose query i sees the keys of its document up to i. The queries of padding may see others, and are ignored."""
    b, s, k = visible.shape
    first, last, is_range = _first_and_last(visible)
    offset = int((last - torch.arange(s)).max())
    if offset < 0 or offset + s > k:
        return None
    positions = torch.arange(s) + offset
    # No query sees the key of padding, not even its own.
    ignored = ~visible.any(1)[:, offset : offset + s]
    cut = positions - (window or k) + 1  # first key of the window
    if not (ignored | is_range & (last == positions) & (first >= cut)).all():
        return None
    is_begin = ~ignored & (first > cut)
    begins = torch.where(is_begin, first, 0).cummax(-1).values
    documents = torch.cat((begins[:, :1].expand(b, offset), begins), 1)
    documents = documents.masked_fill(torch.arange(offset + s) < documents, 0)
    consistent = (documents.gather(1, documents) == documents).all()
    if not consistent or not (~is_begin | (begins == first)).all():
        return None
    starts = documents.to(torch.int32).contiguous() if documents.any() else None
    blind = last < 0
    return MaskContents(
        Visible(offset, starts, window), blind=blind[..., None, None] if blind.any() else None
    )


def _transformers_attention(
    module: torch.nn.Module,
    heads: Heads,
    mask: Tensor | None,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Call torch's attention, or the model's own if it has sinks or capped scores, which torch's has not."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    result: tuple[Tensor, Tensor | None]
    if eager is None or all(options.get(name) is None for name in ("s_aux", "softcap")):
        result = ALL_ATTENTION_FUNCTIONS["sdpa"](module, *heads, mask, **options)
        return result
    query, key, _ = heads
    if mask is None and query.shape[2] > 1 and getattr(module, "is_causal", True):
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()[None, None]
    if mask is not None and mask.dtype == torch.bool:
        lowest = torch.finfo(query.dtype).min
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, lowest)
    result = eager(module, *heads, mask, **options)
    return result
