"""Arguments of one forward that every layer sees: positions, documents, recompute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..config.run_config import ModelConfig
from .heads import Angles
from .kv_cache import KeyValueCache
from .ops import Ops
from .positions import TokenAngles, document_angles, rotary_angles


@dataclass(frozen=True)
class Rows:
    """Rows of a forward with a key-value cache of earlier tokens.

    lengths: rows of each sample that has any.
    samples: (len(lengths),), place of each of these samples in the cache.
    positions: (r,), position of every row in its sample.
    angles: two tensors (r, rotated elements / 2); None without rotary positions.
    """

    cache: KeyValueCache
    samples: Tensor
    lengths: tuple[int, ...]
    positions: Tensor
    angles: Angles | None

    @staticmethod
    def of(
        model: ModelConfig,
        cache: KeyValueCache,
        samples: Tensor,
        first: Tensor,
        lengths: Sequence[int],
        table: Angles | None,
    ) -> Rows:
        """Build the rows of samples (n,) whose next positions are first (n,).

        table: angles of every position; None if there are none, or if they depend on the length of a sample
        """
        if len(lengths) == sum(lengths):
            positions = first
        else:
            own = zip(first.tolist(), lengths, strict=True)
            positions = torch.cat([torch.arange(begin, begin + length) for begin, length in own])
        angles: Angles | None = None
        if table is not None:
            cosines, sines = table
            angles = cosines[positions], sines[positions]
        elif model.rotary:  # each sample has its own length
            parts = [
                rotary_angles(model, part, len(part) + int(part[0]))
                for part in positions.split(tuple(lengths))
            ]
            cosines, sines = (torch.cat(tensors) for tensors in zip(*filter(None, parts)))
            angles = cosines, sines
        return Rows(cache, samples, tuple(lengths), positions, angles)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Samples, positions and angles: the inputs that change with each token."""
        return self.samples, self.positions, *(self.angles or ())

    @property
    def last(self) -> Tensor:
        """Last row of each sample, (samples,)."""
        return torch.tensor(self.lengths).cumsum(0) - 1

    @property
    def one_each(self) -> bool:
        """True if every sample has one row, its next token."""
        return len(self.positions) == len(self.samples)

    def attend(
        self, ops: Ops, layer: int, qkv: Tensor, whole: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Attend from each row to the earlier positions of its sample. qkv (r, 1, g (n/g + 2) d) -> (r, 1, n d).

        whole: the layer's attention of a sequence that has nothing before it, of the same shapes.
        """
        cache = self.cache[layer]
        if self.one_each:
            return ops.cached_attention(qkv, cache.keys, cache.values, self.samples, self.positions)
        context = []
        for sample, part in zip(self.samples.tolist(), qkv.split(self.lengths), strict=True):
            groups = part.view(
                len(part), cache.keys.shape[1], -1, cache.keys.shape[3]
            )  # (s, g, n/g + 2, d)
            cache.store(sample, groups[:, :, -2], groups[:, :, -1])
            context.append(whole(part))
        return torch.cat(context)


@dataclass(frozen=True)
class Documents:
    """The documents of a micro-batch. starts: int32 (b, s), where that of each position begins, before which attention sees
    nothing; None: with the sample. positions: int32 (s, b), of each token in its document; None: in its sample.
    padding: bool (s, b), the tokens of chats from which nothing is predicted; None: samples are not of chats."""

    starts: Tensor | None = None
    positions: Tensor | None = None
    padding: Tensor | None = None

    @cached_property
    def _angles(self) -> dict[ModelConfig, TokenAngles]:
        return {}

    def angles(self, model: ModelConfig) -> TokenAngles | None:
        """Return the angles of tokens if they depend on the lengths of the documents, else None; computed once for all layers."""
        if model.rope_dynamic_factor is None or self.positions is None:
            return None
        if model not in self._angles:
            self._angles[model] = document_angles(model, self.positions, self.padding)
        return self._angles[model]


@dataclass(frozen=True, kw_only=True)
class Pass:
    """An argument of every layer's forward.

    first_sample: global index of the micro-batch's first sample, which selects dropout masks. training: False in evaluation, where
    nothing is dropped and nothing recomputed. recompute: what backward computes again: None, "selective" (attention) or "full"
    (groups of layers). needs_values: False where backward will follow and nobody reads the values of the last result.
    balance_factor: of the gradients of experts' balancing losses. tokens: of chats, how many a micro-batch of the iteration has in
    the mean, padding left out: by them micro-batches weigh in balancing losses; None: all weigh the same. rows: where tokens are
    generated, what the rows of x are, which then is (rows, 1, h). documents: of the samples. count: by what the sum of the losses
    of labels is divided; None: by their number.
    """

    first_sample: int
    training: bool = True
    recompute: str | None = None
    needs_values: bool = True
    balance_factor: float = 1.0
    rows: Rows | None = None
    documents: Documents = Documents()
    count: float | None = None
    tokens: float | None = None
