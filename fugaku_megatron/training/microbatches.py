"""The micro-batches of one iteration, by number, whatever order a schedule runs them in.

Legend: s sequence, b micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

Batch = tuple[Tensor, Tensor]  # tokens (s, b), labels (s, b)


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of one data-parallel rank.

    index: its number in the iteration. tokens, labels: (s, b) on the first and the last stage, None on the stages between.
    first_sample: global index of its first sample, which selects dropout masks.
    """

    index: int
    tokens: Tensor | None
    labels: Tensor | None
    first_sample: int


class MicroBatchWindow:
    """Micro-batches fetched by number from a source that delivers them in data order.

    What the source delivers before it is asked for is held until it is; a schedule decides how far it reads ahead. uses: how many
    chunks of this rank fetch each micro-batch; after the last of them it is dropped.
    """

    def __init__(self, source: Iterator[MicroBatch], uses: int = 1) -> None:
        self._source, self._uses = source, uses
        self._held: dict[int, tuple[MicroBatch, int]] = {}

    def __len__(self) -> int:
        """Micro-batches that are held."""
        return len(self._held)

    def fetch(self, index: int) -> MicroBatch:
        """The micro-batch of this number. KeyError when the iteration has none, or every chunk has fetched it."""
        while index not in self._held:
            batch = next(self._source, None)
            if batch is None:
                raise KeyError(f"micro-batch {index} is not in this iteration, or was fetched before")
            self._held[batch.index] = (batch, self._uses)
        batch, left = self._held.pop(index)
        if left > 1:
            self._held[index] = (batch, left - 1)
        return batch
