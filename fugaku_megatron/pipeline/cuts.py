"""Division of a model's layers into virtual stages."""

from __future__ import annotations

from .placement import Placement

SplitCosts = tuple[int, int, int]  # relative costs of F, I and W
VirtualStageCosts = tuple[SplitCosts, ...]
ALIKE: SplitCosts = (1, 1, 1)


def even_cut(layers: int, placement: Placement) -> tuple[int, ...]:
    stages = placement.virtual_stages
    return tuple(layers // stages for _ in range(stages))


def balanced_cut(layers: int, placement: Placement, layer: float, head: float) -> tuple[int, ...]:
    """Return each virtual stage's layers such that the costliest pipeline stage is cheapest.

    layer, head: cost of a layer and of the logits. The other stages share the remaining layers evenly, later stages first, and so do
    the model chunks of a stage.
    """
    others = placement.stages - 1
    with_head = _with_head(layers, others, placement.model_chunks, layer, head)
    totals = list(evenly(layers - with_head, others))
    totals.insert(placement.last_stage, with_head)
    return cut_of_stages(tuple(totals), placement, layer, head)


def cut_of_stages(
    totals: tuple[int, ...], placement: Placement, layer: float, head: float
) -> tuple[int, ...]:
    chunks = [evenly(total, placement.model_chunks) for total in totals]
    total = totals[placement.last_stage]
    others = placement.model_chunks - 1
    with_head = _with_head(total, others, 1, layer, head)
    chunks[placement.last_stage] = (*evenly(total - with_head, others), with_head)
    owners = map(placement.owner, range(placement.virtual_stages))
    return tuple(chunks[stage][chunk] for stage, chunk in owners)


def _with_head(layers: int, others: int, least: int, layer: float, head: float) -> int:
    """Return the layers (at least `least`) of the share with the head, so that the costliest share is cheapest."""
    if others == 0:
        return layers

    def costliest(with_head: int) -> float:
        largest = -(-(layers - with_head) // others)
        return max(largest * layer, with_head * layer + head)

    return min(range(layers - others * least, least - 1, -1), key=costliest)


def evenly(layers: int, shares: int) -> tuple[int, ...]:
    """Return shares that differ by at most one, later ones larger, because early layers are in flight longest."""
    return tuple((layers + i) // shares for i in range(shares))
