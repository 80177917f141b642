"""Cuts of a model's layers into the chunks of pipeline stages."""

from __future__ import annotations

from .placement import Placement

SplitCosts = tuple[
    int, int, int
]  # of a forward, of the gradients of its input and of its weights, relative to each other


PartCosts = tuple[SplitCosts, ...]  # of each part of the model


ALIKE: SplitCosts = (1, 1, 1)


def even_cut(layers: int, placement: Placement) -> tuple[int, ...]:
    """The same number of layers in every part."""
    return (layers // placement.virtual_stages,) * placement.virtual_stages


def balanced_cut(layers: int, placement: Placement, layer: float, head: float) -> tuple[int, ...]:
    """Layers of each part, such that the costliest stage is cheapest. layer, head: the cost of a layer and of the logits.

    The stage that has the logits, too, gets its number of layers by cost; the others share the rest evenly, the later ones taking
    what does not divide. Then each stage cuts its layers into chunks by the same rule.
    """
    with_head, _ = placement.owner(placement.virtual_stages - 1)
    mine = _with_head(layers, placement.stages - 1, placement.model_chunks, layer, head)
    others = evenly(layers - mine, placement.stages - 1)
    return cut_of_stages((*others[:with_head], mine, *others[with_head:]), placement, layer, head)


def cut_of_stages(
    totals: tuple[int, ...], placement: Placement, layer: float, head: float
) -> tuple[int, ...]:
    """Layers of each part where the stages' layers are given: chunks of a stage cost the same, as far as the layers divide."""
    with_head, _ = placement.owner(placement.virtual_stages - 1)
    chunks = [evenly(total, placement.model_chunks) for total in totals]
    last = _with_head(totals[with_head], placement.model_chunks - 1, 1, layer, head)
    chunks[with_head] = (*evenly(totals[with_head] - last, placement.model_chunks - 1), last)
    return tuple(
        chunks[stage][chunk]
        for stage, chunk in map(placement.owner, range(placement.virtual_stages))
    )


def _with_head(layers: int, others: int, least: int, layer: float, head: float) -> int:
    """Layers, at least `least`, of the one that has the head, too, where `others` share the rest evenly.

    The number for which the costliest is cheapest; of equals the largest, which leaves the others least.
    """
    if others == 0:
        return layers
    numbers = range(layers - others * least, least - 1, -1)
    return min(numbers, key=lambda n: max(-(-(layers - n) // others) * layer, n * layer + head))


def evenly(layers: int, shares: int) -> tuple[int, ...]:
    """Shares that differ by at most one, the later ones being larger: what comes first in a model is held longest."""
    return tuple((layers + i) // shares for i in range(shares))
