"""Instructions of a pipeline schedule, their execution, and micro-batches in flight.

F, B, I and W are forward, backward, and backward's halves: input gradient and weight gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

FORWARD = "forward"
BACKWARD = "backward"
BACKWARD_INPUT = "backward_input"
BACKWARD_WEIGHT = "backward_weight"
RECV_FORWARD = "recv_forward"
SEND_FORWARD = "send_forward"
RECV_BACKWARD = "recv_backward"
SEND_BACKWARD = "send_backward"
SENDS = (SEND_FORWARD, SEND_BACKWARD)
RECEIVES = (RECV_FORWARD, RECV_BACKWARD)


@dataclass(frozen=True)
class Instruction:
    """model_chunk: from 0"""

    op: str
    microbatch: int
    model_chunk: int = 0


Instructions = list[Instruction]


class Executor(Protocol):
    """One method per op, called with the whole instruction."""

    def forward(self, instruction: Instruction) -> None: ...
    def backward(self, instruction: Instruction) -> None: ...
    def backward_input(self, instruction: Instruction) -> None: ...
    def backward_weight(self, instruction: Instruction) -> None: ...
    def recv_forward(self, instruction: Instruction) -> None: ...
    def send_forward(self, instruction: Instruction) -> None: ...
    def recv_backward(self, instruction: Instruction) -> None: ...
    def send_backward(self, instruction: Instruction) -> None: ...


def execute(instructions: Iterable[Instruction], executor: Executor) -> None:
    for instruction in instructions:
        getattr(executor, instruction.op)(instruction)


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
