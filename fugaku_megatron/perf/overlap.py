"""The part of gradient reduction and weight gathering that computation cannot hide. Times are in seconds.

Only the last micro-batch's backward hides a reduction, since gradients are complete in no earlier one, and only buckets before
the last: that one is complete when backward ends. The tied embedding's sum waits for both stages that hold a copy. ZeRO-1 gathers
behind the next forward, which cannot start before its first bucket has come. Nothing hides longer than the computation takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..config import features
from ..costs.accounting import Collective


def exposed(collectives: Sequence[Collective], seconds: Callable[[Collective], float], forward: float, backward: float,
            active: frozenset[str]) -> float:
    """Seconds per iteration in which a stage waits for `collectives`, those of its buckets in the order of backward.

    forward, backward: seconds of one micro-batch on the stage. active: offers in use.
    """
    reductions = [c for c in collectives if c.group == "dp" and c.verb != "all_gather"]
    gathers = [c for c in collectives if c.verb == "all_gather"]
    others = [c for c in collectives if c not in reductions and c not in gathers]
    waiting = sum(map(seconds, others))
    if features.OVERLAP_GRAD_REDUCE in active:
        waiting += _behind_backward([(c.bytes, seconds(c)) for c in reductions], backward)
    else:
        waiting += sum(map(seconds, reductions))
    if features.OVERLAP_PARAM_GATHER in active:
        return waiting + _before_forward([(c.bytes, seconds(c)) for c in reversed(gathers)], forward)
    return waiting + sum(map(seconds, gathers))


def _behind_backward(buckets: Sequence[tuple[int, float]], backward: float) -> float:
    """Seconds after the end of a backward until all buckets, (bytes, seconds), are reduced, one after the other.

    A backward takes as long for a bucket's layers as their bytes are of all.
    """
    whole, ready, clock = sum(size for size, _ in buckets), 0.0, 0.0
    for size, seconds in buckets:
        ready += backward * size / whole
        clock = max(clock, ready) + seconds
    return max(0.0, clock - backward)


def _before_forward(buckets: Sequence[tuple[int, float]], forward: float) -> float:
    """Seconds by which a forward ends later because each bucket's layers wait until it, (bytes, seconds), is gathered."""
    whole, gathered, clock = sum(size for size, _ in buckets), 0.0, 0.0
    for size, seconds in buckets:
        gathered += seconds
        clock = max(clock, gathered) + forward * size / whole
    return max(0.0, clock - forward)
