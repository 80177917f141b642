"""Selection of a dropout mask by global position, independent of the layout of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True)
class DropoutKey:
    """Selects a dropout mask: a function of seed, stream and the element's position in its sample's global tensor.

    `sample_dim` counts samples from `first_sample`, the last dimension columns, all others together rows from `row0`. With two
    segments of a sequence, rows from `cut` on count from `after_cut`.
    """

    seed: int
    stream: int
    first_sample: int
    sample_dim: int
    row0: int = 0
    cut: int | None = None
    after_cut: int = 0

    @staticmethod
    def of_segments(
        segments: Sequence[range], seed: int, stream: int, first_sample: int
    ) -> DropoutKey:
        """Return the key of an activation (s, b, h) at one or two segments."""
        first, *second = segments
        key = DropoutKey(seed, stream, first_sample, sample_dim=1, row0=first.start)
        if not second:
            return key
        return replace(key, cut=len(first), after_cut=second[0].start)

    def row_ranges(self) -> Iterator[tuple[slice, DropoutKey]]:
        """Yield each range of consecutive rows, and its key."""
        if self.cut is None:
            yield slice(None), self
        else:
            yield slice(self.cut), replace(self, cut=None)
            yield slice(self.cut, None), replace(self, row0=self.after_cut, cut=None)


class Dropout(NamedTuple):
    """Probability of zeroing an element, and the key of the mask."""

    p: float
    key: DropoutKey
