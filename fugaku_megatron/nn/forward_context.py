"""Arguments of one forward for every layer: positions, documents, recompute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from ..config.model import ModelConfig
from .attention.heads import Angles
from .attention.kv_cache import Cache
from .attention.rotary_angles import TokenAngles, document_angles, rotary_angles


@dataclass(frozen=True)
class Rows:
    """Rows of a forward with a cache.

    lengths: rows of each sample with any.
    samples: (len(lengths),), places in the cache.
    positions: (r,), each row's position in its sample.
    angles: two tensors (r, rotated elements / 2) by `LayerKind.rope`.
    """

    cache: Cache
    samples: Tensor
    lengths: tuple[int, ...]
    positions: Tensor
    angles: dict[str, Angles]

    @staticmethod
    def of(
        model: ModelConfig,
        cache: Cache,
        samples: Tensor,
        first: Tensor,
        lengths: Sequence[int],
        tables: Mapping[str, Angles],
    ) -> Rows:
        """Build the rows of samples (n,) whose next positions are first (n,).

        tables: angles of every position by `LayerKind.rope`, except angles that depend on a sample's length
        """
        if len(lengths) == sum(lengths):
            positions = first
        else:
            own = zip(first.tolist(), lengths, strict=True)
            positions = torch.cat([torch.arange(begin, begin + length) for begin, length in own])
        angles: dict[str, Angles] = {}
        for rope, rotated in model.ropes.items():
            if rope in tables:
                cosines, sines = tables[rope]
                angles[rope] = cosines.index_select(0, positions), sines.index_select(0, positions)
                continue
            parts = [  # each sample has its own length
                rotary_angles(rotated, part, len(part) + int(part[0]))
                for part in positions.split(tuple(lengths))
            ]
            cosines, sines = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
            angles[rope] = cosines, sines
        return Rows(cache, samples, tuple(lengths), positions, angles)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Inputs that change with each token."""
        return self.samples, self.positions, *chain(*self.angles.values())

    @property
    def last(self) -> Tensor:
        return torch.tensor(self.lengths).cumsum(0) - 1

    @property
    def one_each(self) -> bool:
        return len(self.positions) == len(self.samples)

    def of_samples(self) -> Iterator[tuple[int, int, slice]]:
        """Yield each sample's place in the cache, the position of its first row, and its rows."""
        begin = 0
        for sample, length in zip(self.samples.tolist(), self.lengths, strict=True):
            yield sample, int(self.positions[begin]), slice(begin, begin + length)
            begin += length


@dataclass(frozen=True)
class PackedDocuments:
    """Documents of a micro-batch.

    starts: int32 (b, s), first position of each token's document; None: the sample is one document.
    positions: int32 (s, b), each token's position in its document; None: in its sample.
    padding: bool (s, b), padding tokens of chats; None: samples are not chats.
    """

    starts: Tensor | None = None
    positions: Tensor | None = None
    padding: Tensor | None = None

    @cached_property
    def _angles(self) -> dict[ModelConfig, TokenAngles]:
        return {}

    def angles(self, model: ModelConfig) -> TokenAngles | None:
        """Return angles that depend on document lengths, computed once, or None."""
        if not model.rope_follows_length or self.positions is None:
            return None
        if model not in self._angles:
            self._angles[model] = document_angles(model, self.positions, self.padding)
        return self._angles[model]


class Prediction(NamedTuple):
    """Input and labels of an MTP module: a micro-batch rolled to the left.

    tokens: (rows, b), tokens whose embeddings the module reads
    labels: (rows, b); -1 if a label does not count
    divisor: of the summed losses
    """

    tokens: Tensor
    labels: Tensor
    divisor: float


@dataclass(frozen=True, kw_only=True)
class Pass:
    """An argument of every layer's forward.

    first_sample: global index of the micro-batch's first sample; selects dropout masks.
    training: False in evaluation, without dropout and recompute.
    recompute: None, "selective" (attention) or "full" (groups of layers).
    needs_values: False if a backward follows and the last result is not read.
    balance_factor: factor on gradients of balancing losses.
    rows: rows of x, then (rows, 1, h), in generation.
    count: divisor of the summed losses; None: number of labels.
    tokens: mean tokens per micro-batch without padding, a weight in balancing losses; None: equal weights.
    predictions: of the MTP modules, in training.
    """

    first_sample: int
    training: bool = True
    recompute: str | None = None
    needs_values: bool = True
    balance_factor: float = 1.0
    rows: Rows | None = None
    documents: PackedDocuments = PackedDocuments()
    count: float | None = None
    tokens: float | None = None
    predictions: tuple[Prediction, ...] = ()
