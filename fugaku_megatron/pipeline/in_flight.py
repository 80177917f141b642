"""Micro-batches in flight on a pipeline stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .instructions import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Instruction


@dataclass(frozen=True)
class InFlight:
    """Micro-batches of each model chunk at one moment.

    activations: between F and I or B. weight_inputs: between I and W.
    """

    activations: tuple[int, ...]
    weight_inputs: tuple[int, ...]


def peaks_in_flight(instructions: Sequence[Instruction], chunks: int = 1) -> tuple[InFlight, ...]:
    """Return a list's moments that can need most memory: no other moment has as much in every respect."""
    now = [0] * (2 * chunks)  # activations, then weight inputs, of each model chunk
    moments = set()
    for i in instructions:
        if i.op in (FORWARD, BACKWARD, BACKWARD_INPUT):
            now[i.model_chunk] += 1 if i.op == FORWARD else -1
        if i.op in (BACKWARD_INPUT, BACKWARD_WEIGHT):
            now[chunks + i.model_chunk] += 1 if i.op == BACKWARD_INPUT else -1
        moments.add(tuple(now))
    largest: list[tuple[int, ...]] = []
    for moment in sorted(moments, key=sum, reverse=True):
        if not any(all(a <= b for a, b in zip(moment, other)) for other in largest):
            largest.append(moment)
    return tuple(InFlight(moment[:chunks], moment[chunks:]) for moment in largest)
