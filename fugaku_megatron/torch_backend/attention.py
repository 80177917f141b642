"""Attention of queries (b, n, q, d) to keys and values (b, g, k, d) in g groups, causal or with a mask of contiguous keys.

Samples are packed in turn into rows (q, g, n / g + 2, d) for the kernels: the queries of a group, its key, its value. If queries do
not attend to the keys at and before their own positions, keys and values are packed apart, as pairs (k, g, 2, d).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..host import kernels
from .served import is_served

Numbers = npt.NDArray[np.intp]
# Mean queries of a segment from which on the kernels gain more than calling them costs.
SHORTEST_SEGMENTS = 32


class Heads(NamedTuple):
    """Tensors of the operator: queries (b, n, q, d), keys and values (b, g, k, d)."""

    query: Tensor
    key: Tensor
    value: Tensor

    @property
    def supported(self) -> bool:
        """True for one FP32 or BF16 type and heads of a multiple of 4 elements, which the kernels take."""
        query, key, value = self
        if key.shape != value.shape or not is_served(*self):
            return False
        b, n, _, d = query.shape
        g, k = key.shape[1:3]
        return key.shape == (b, g, k, d) and n % g == 0 and d % 4 == 0


class Packed(NamedTuple):
    """Queries, keys and values of a sample, or their gradients. pairs: None if keys and values are in the rows"""

    rows: Tensor
    pairs: Tensor | None

    @staticmethod
    def empty(heads: Heads, whole: bool) -> Packed:
        query, key, _ = heads
        _, n, q, d = query.shape
        g, k = key.shape[1:3]
        pairs = None if whole else query.new_empty(k, g, 2, d)
        return Packed(query.new_empty(q, g, n // g + 2, d), pairs)

    def empty_gradients(self) -> Packed:
        """Build buffers of gradients, which the kernels add in FP32 if there are pairs."""
        if self.pairs is None:
            return Packed(torch.empty_like(self.rows), None)
        rows, pairs = (torch.empty_like(x, dtype=torch.float32) for x in (self.rows, self.pairs))
        return Packed(rows, pairs)

    def views(self) -> tuple[Tensor, ...]:
        """Return queries (g, n / g, q, d), keys and values (g, 1, k, d)."""
        last = self.rows[..., -2:, :] if self.pairs is None else self.pairs
        each = (self.rows[..., :-2, :], last[..., :1, :], last[..., 1:, :])
        return tuple(x.permute(1, 2, 0, 3) for x in each)

    def fill(self, heads: Heads, sample: int) -> None:
        """Pack a sample."""
        for view, x in zip(self.views(), heads, strict=True):
            view.copy_(x[sample].unflatten(0, view.shape[:2]))

    def clear(self) -> None:
        """Zero the gradients that the kernels add to."""
        if self.pairs is not None:
            for view in self.views():
                view.zero_()


class Segment(NamedTuple):
    """Consecutive queries that one call of the kernels attends for.

    queries, keys: of a sample.
    first_query: position of the first query; the first key of the segment has 0. A query sees no key after its position.
    starts: int32 (1, positions), first position of each position's document; None: all are of one document.
    window: keys up to its own position that a query sees of its document; None: all.
    """

    queries: slice
    keys: slice
    first_query: int
    starts: Tensor | None = None
    window: int | None = None

    def tensors(self, packed: Packed) -> list[Tensor]:
        """Return the segment's rows (q, 1, (n + 2 g) d), and its pairs (k, 1, 2 g d) if there are any."""
        rows = [packed.rows[self.queries]]
        if packed.pairs is not None:
            rows.append(packed.pairs[self.keys])
        return [x.flatten(1).unsqueeze(1) for x in rows]

    @property
    def length(self) -> int:
        """Number of queries."""
        return self.queries.stop - self.queries.start  # type: ignore[no-any-return]


def _visible_ranges(mask: Tensor) -> tuple[Numbers, Numbers] | None:
    """Return each query's first visible key and the key after the last one, or None for other masks (q, k)."""
    # NumPy compares and finds bits several times as fast as torch.
    bits = torch.int32 if mask.element_size() == 4 else torch.int16
    numbers = mask.view(bits).numpy()
    visible = numbers == 0
    if not np.array_equal(numbers == mask.new_tensor(-math.inf).view(bits).item(), ~visible):
        return None
    count = np.count_nonzero(visible, axis=1)
    runs = np.count_nonzero(visible[:, 0]) + np.count_nonzero(visible[:, 1:] & ~visible[:, :-1])
    if runs != np.count_nonzero(count):
        return None
    begin = visible.argmax(axis=1)
    return begin, begin + count


def _segment(first: int, begin: Numbers, end: Numbers, step: int) -> Segment | None:
    """Build the segment of queries from `first` on, or return None if no documents and window have their visible keys.

    begin, end: visible keys of each query.
    step: see `_segments`.
    """
    queries = slice(first, first + len(begin))
    keys = slice(int(begin[0]), int(end[-1]))
    first_query = (int(end[0]) - 1 if step else keys.stop) - keys.start
    if begin[0] == begin[-1]:
        return Segment(queries, keys, first_query)
    order = np.arange(len(begin))
    offsets = begin - keys.start
    positions = first_query + order
    window = int((positions - offsets).max()) + 1
    starts = offsets[np.maximum.accumulate(np.where(offsets == positions, order, 0))]
    # The kernels leave out queries if a document begins anywhere but at its first query.
    if not np.array_equal(offsets, np.maximum(starts, positions - window + 1)):
        return None
    documents = None
    if starts[-1]:
        documents = torch.zeros(1, first_query + len(starts), dtype=torch.int32)
        documents[0, first_query:] = torch.from_numpy(starts)
    has_window = not np.array_equal(starts, offsets)
    return Segment(queries, keys, first_query, documents, window if has_window else None)


def _segments(begin: Numbers, end: Numbers) -> Iterator[Segment | None]:
    """Split queries where the end of visible keys neither stays (step 0) nor advances with each query (step 1)."""
    sees_keys = begin < end
    steps = np.diff(end)
    splits = np.diff(sees_keys) | (np.diff(begin) < 0)
    first = 0
    while first < len(end):
        step = int(first < len(steps) and steps[first] == 1)
        found = np.flatnonzero(splits[first:] | (steps[first:] != step))
        last = first + 1 + int(found[0]) if len(found) else len(end)
        if sees_keys[first]:
            yield _segment(first, begin[first:last], end[first:last], step)
        first = last


def _masked_segments(mask: Tensor) -> list[Segment] | None:
    """Return the segments of a sample's mask (q, k), without queries that see no key; None if the kernels lack the mask."""
    q = len(mask)
    repeats = q if mask.stride(0) == 0 else 1
    ranges = _visible_ranges(mask[: q // repeats])
    if ranges is None:
        return None
    segments: list[Segment] = []
    for segment in _segments(*(np.tile(each, repeats) for each in ranges)):
        if segment is None or len(segments) > q // SHORTEST_SEGMENTS:
            return None
        segments.append(segment)
    return segments


def _samples(heads: Heads, is_causal: bool, mask: Tensor | None) -> list[list[Segment]] | None:
    """Return the segments of each sample, or None if the kernels lack the mask."""
    b, n, q, _ = heads.query.shape
    k = heads.key.shape[2]
    if mask is None:
        keys = slice(0, min(q, k) if is_causal else k)
        segment = Segment(slice(0, q), keys, first_query=0 if is_causal else k)
        return [[segment] for _ in range(b)]
    mask = mask.expand(b, n, q, k)
    if is_causal or mask.dtype == torch.bool or (n > 1 and mask.stride(1)):
        return None
    samples: list[list[Segment]] = []
    repeats = b if mask.stride(0) == 0 else 1
    for sample in range(b // repeats):
        segments = _masked_segments(mask[sample, 0])
        if segments is None:
            return None
        samples.append(segments)
    return samples * repeats


def _flat(rows: Tensor) -> Tensor:
    """Return rows (q, n, d) as the kernels' (q, 1, n d)."""
    return rows.flatten(1).unsqueeze(1).contiguous()


class Plan(NamedTuple):
    """Calls of the kernels that serve a call of the operator.

    samples: segments of each sample.
    packed: buffers for one sample.
    scale: of scores, None: d**-0.5.
    dropout_p, seed: of the probabilities.
    """

    samples: list[list[Segment]]
    packed: Packed
    scale: float | None = None
    dropout_p: float = 0.0
    seed: int = 0

    @staticmethod
    def of(
        heads: Heads,
        is_causal: bool,
        attn_mask: Tensor | None,
        scale: float | None,
        dropout_p: float = 0.0,
    ) -> Plan | None:
        """Return the calls, or None if the kernels do not serve the operator's call. attn_mask: added to scores"""
        if not heads.supported or (scale is not None and scale <= 0):
            return None
        samples = _samples(heads, is_causal, attn_mask)
        if samples is None:
            return None
        same_positions = is_causal and heads.query.shape[2] == heads.key.shape[2]
        packed = Packed.empty(heads, same_positions)
        seed = int(torch.randint(1 << 50, ())) if dropout_p else 0
        return Plan(samples, packed, scale, dropout_p, seed)

    def calls(self, name: str, sample: int) -> Iterator[tuple[Segment, Callable[..., None]]]:
        """Yield the segments of a sample, with the kernel of a name that gets its arguments after the inputs."""
        for stream, segment in enumerate(self.samples[sample]):
            random = {"seed": self.seed, "stream": stream, "first_sample": sample}
            options = {"p": self.dropout_p, "scale": self.scale, **random}
            kernel = getattr(kernels, f"attention_{name}")
            if self.packed.pairs is not None:
                kernel = partial(
                    getattr(kernels, f"attention_part_{name}"),
                    s=max(
                        segment.first_query + segment.length, segment.keys.stop - segment.keys.start
                    ),
                    first_query=segment.first_query,
                    first_key=0,
                    starts=segment.starts,
                    window=segment.window,
                )
            yield segment, partial(kernel, *segment.tensors(self.packed), **options)

    def forward(self, heads: Heads) -> tuple[Tensor, Tensor]:
        """Return the context, laid out as the queries, and the natural log of the sums (b, n, q)."""
        query = heads.query
        _, n, q, _ = query.shape
        out = torch.empty_like(query)
        # Queries that see no key have log-sum 0 and context 0.
        lse = query.new_zeros(len(query), q, n, dtype=torch.float32).transpose(1, 2)
        for sample, segments in enumerate(self.samples):
            self.packed.fill(heads, sample)
            context = out[sample].transpose(0, 1)
            rows = context if context.is_contiguous() else context.new_empty(context.shape)
            if sum(segment.length for segment in segments) < q:
                rows.zero_()
            for segment, kernel in self.calls("forward", sample):
                part = _flat(rows[segment.queries])
                sums = lse.new_empty(1, n, len(part))
                kernel(part, sums)
                lse[sample, :, segment.queries] = sums[0]
            if rows is not context:
                context.copy_(rows)
        return out, lse

    def backward(
        self, grad_out: Tensor, heads: Heads, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the gradients of query, key and value, each laid out as (b, q or k, n, d)."""
        results = tuple(x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in heads)
        gradients = self.packed.empty_gradients()
        for sample in range(len(out)):
            self.packed.fill(heads, sample)
            gradients.clear()
            for segment, kernel in self.calls("backward", sample):
                kernel(
                    _flat(out[sample, :, segment.queries].transpose(0, 1)),
                    lse[sample : sample + 1, :, segment.queries].contiguous(),
                    _flat(grad_out[sample, :, segment.queries].transpose(0, 1)),
                    *segment.tensors(gradients),
                )
            for result, gradient in zip(results, gradients.views(), strict=True):
                result[sample].unflatten(0, gradient.shape[:2]).copy_(gradient)
        return results


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float, *options: Any
) -> object:
    """Return the context and the log-sums, see `Plan.forward`. options: see `Plan.of`"""
    heads = Heads(query, key, value)
    # The operator has no seed that its backward could repeat.
    plan = None if dropout_p else Plan.of(heads, *options)
    return NotImplemented if plan is None else plan.forward(heads)


def flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    *options: Any,
) -> object:
    """Return the gradients, see `Plan.backward`. options: see `Plan.of`"""
    heads = Heads(query, key, value)
    plan = None if dropout_p else Plan.of(heads, *options)
    return NotImplemented if plan is None else plan.backward(grad_out, heads, out, logsumexp)
