"""Pipeline schedules as pure lists of instructions, and the small loop that walks one.

`perf` costs the same lists. Left out: what a forward or a backward does (`training.step.StepExecutor`).
An instruction names its micro-batch and its chunk of layers, so that interleaved schedules fit.
Test: pytest tests/test_schedule.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

FORWARD, BACKWARD = "forward", "backward"
RECV_FORWARD, SEND_FORWARD = "recv_forward", "send_forward"
RECV_BACKWARD, SEND_BACKWARD = "recv_backward", "send_backward"


@dataclass(frozen=True)
class Instruction:
    """Do `op` for micro-batch `microbatch` on the stage's layer chunk `chunk`."""

    op: str
    microbatch: int
    chunk: int = 0


class Executor(Protocol):
    """What walks a schedule must offer: one method per op, which receives the whole instruction."""

    def forward(self, instruction: Instruction) -> None: ...
    def backward(self, instruction: Instruction) -> None: ...
    def recv_forward(self, instruction: Instruction) -> None: ...
    def send_forward(self, instruction: Instruction) -> None: ...
    def recv_backward(self, instruction: Instruction) -> None: ...
    def send_backward(self, instruction: Instruction) -> None: ...


def _forward(stage: int, stages: int, microbatch: int) -> list[Instruction]:
    receive = [Instruction(RECV_FORWARD, microbatch)] if stage > 0 else []
    send = [Instruction(SEND_FORWARD, microbatch)] if stage < stages - 1 else []
    return [*receive, Instruction(FORWARD, microbatch), *send]


def _backward(stage: int, stages: int, microbatch: int) -> list[Instruction]:
    receive = [Instruction(RECV_BACKWARD, microbatch)] if stage < stages - 1 else []
    send = [Instruction(SEND_BACKWARD, microbatch)] if stage > 0 else []
    return [*receive, Instruction(BACKWARD, microbatch), *send]


def one_f_one_b(stage: int, stages: int, microbatches: int) -> list[Instruction]:
    """1F1B for one stage: fill with forwards, then alternate, then drain.

    At most `stages - stage` micro-batches are in flight. Sends are nonblocking, receives block.
    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", figure 4 (2021).
    """
    assert 0 <= stage < stages and microbatches >= 0
    fill = min(stages - stage - 1, microbatches)
    instructions = [i for m in range(fill) for i in _forward(stage, stages, m)]
    for m in range(fill, microbatches):
        instructions += _forward(stage, stages, m) + _backward(stage, stages, m - fill)
    for m in range(microbatches - fill, microbatches):
        instructions += _backward(stage, stages, m)
    return instructions


def forward_only(stage: int, stages: int, microbatches: int) -> list[Instruction]:
    """Evaluation: forwards alone."""
    return [i for m in range(microbatches) for i in _forward(stage, stages, m)]


def in_flight(instructions: list[Instruction]) -> int:
    """The largest number of micro-batches whose activations are held at once."""
    held = peak = 0
    for instruction in instructions:
        held += (instruction.op == FORWARD) - (instruction.op == BACKWARD)
        peak = max(peak, held)
    return peak


def max_in_flight(stage: int, stages: int, microbatches: int) -> int:
    """`in_flight` of `one_f_one_b` without its list, which is long where a batch has millions of micro-batches."""
    return min(stages - stage, microbatches)


def run(instructions: list[Instruction], executor: Executor) -> None:
    """Walk the list."""
    for instruction in instructions:
        getattr(executor, instruction.op)(instruction)
