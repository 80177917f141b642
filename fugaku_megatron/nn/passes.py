"""What one forward of a micro-batch is about, for every layer that it goes through."""

from __future__ import annotations

from dataclasses import dataclass

from .cache import Rows


@dataclass(frozen=True, kw_only=True)
class Pass:
    """An argument of every layer's forward.

    first_sample: global index of the micro-batch's first sample, which selects dropout masks. training: False in evaluation, where
    nothing is dropped and nothing recomputed. recompute: what backward computes again: None, "selective" (attention) or "full"
    (groups of layers). needs_values: False where backward will follow and nobody reads the values of the last result. rows: where
    tokens are generated, what the rows of x are, which then is (rows, 1, h).
    """

    first_sample: int
    training: bool = True
    recompute: str | None = None
    needs_values: bool = True
    rows: Rows | None = None
