"""Division of a model's layers into virtual stages."""

from __future__ import annotations

from .placement import Placement

SplitCosts = tuple[int, int, int]  # relative costs of F, I and W
VirtualStageCosts = tuple[SplitCosts, ...]
ALIKE: SplitCosts = (1, 1, 1)


def even_cut(layers: int, placement: Placement) -> tuple[int, ...]:
    """Return equally many layers for every virtual stage."""
    stages = placement.virtual_stages
    return tuple(layers // stages for _ in range(stages))


def balanced_cut(layers: int, placement: Placement, layer: float, head: float) -> tuple[int, ...]:
    """Return each virtual stage's layers such that the costliest pipeline stage is cheapest.

    layer, head: cost of a layer and of the logits. The other stages share the remaining layers evenly, later stages first. Each stage
    then divides its layers into model chunks by the same rule.
    """
    with_head, _ = placement.owner(placement.virtual_stages - 1)
    mine = _with_head(layers, placement.stages - 1, placement.model_chunks, layer, head)
    others = evenly(layers - mine, placement.stages - 1)
    return cut_of_stages((*others[:with_head], mine, *others[with_head:]), placement, layer, head)


def cut_of_stages(
    totals: tuple[int, ...], placement: Placement, layer: float, head: float
) -> tuple[int, ...]:
    """Return each virtual stage's layers for given layers per pipeline stage: model chunks with equal cost, if divisible."""
    with_head, _ = placement.owner(placement.virtual_stages - 1)
    chunks = [evenly(total, placement.model_chunks) for total in totals]
    last = _with_head(totals[with_head], placement.model_chunks - 1, 1, layer, head)
    chunks[with_head] = (*evenly(totals[with_head] - last, placement.model_chunks - 1), last)
    return tuple(
        chunks[stage][chunk]
        for stage, chunk in map(placement.owner, range(placement.virtual_stages))
    )


def _with_head(layers: int, others: int, least: int, layer: float, head: float) -> int:
    """Return the layers (at least `least`) of the share with the head, if `others` divide the rest evenly.

    Minimize the costliest share; prefer more layers among equals.
    """
    if others == 0:
        return layers
    numbers = range(layers - others * least, least - 1, -1)
    return min(numbers, key=lambda n: max(-(-(layers - n) // others) * layer, n * layer + head))


def evenly(layers: int, shares: int) -> tuple[int, ...]:
    """Return shares that differ by at most one, later ones larger, because early layers are in flight longest."""
    return tuple((layers + i) // shares for i in range(shares))
