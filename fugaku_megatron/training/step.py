"""One rank's part of an iteration: what each instruction of a schedule does.

Left out: the schedules (`schedule`), reduction and update (`optim`). Legend: s sequence, b micro-batch, h hidden.
Test: pytest tests/test_step.py tests/test_parallel.py
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import schedule
from ..comm.base import Comm, Handle
from ..nn.model import Stage
from ..nn.ops import backward
from ..nn.passes import Pass
from ..schedule import Instruction
from .microbatches import MicroBatchWindow

FORWARD_TAG, BACKWARD_TAG = 0, 1
Key = tuple[int, int]  # chunk, micro-batch


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """What the micro-batches of an iteration have in common.

    activation: (s, b, h) between stages, s being a part of the sequence with sequence parallelism. dtype: its element type.
    loss_factor: scales the loss before backward. training: False in evaluation. recompute: see `Pass`.
    """

    activation: tuple[int, int, int]
    dtype: torch.dtype
    loss_factor: float
    training: bool
    recompute: str | None


class StepExecutor:
    """Runs the instructions of one iteration on this rank's chunks of layers.

    Everything in flight is keyed by (chunk, micro-batch). chunks: this rank's parts of the model. pp: the pipeline, whose
    neighbours it sends to and receives from. batches: this rank's micro-batches. watch: puts an observer between the schedule and
    this executor.
    """

    def __init__(self, chunks: Sequence[Stage], pp: Comm, batches: MicroBatchWindow, shape: StepShape,
                 watch: Callable[[StepExecutor], schedule.Executor] | None = None) -> None:
        self.chunks, self.pp, self.batches, self.shape = chunks, pp, batches, shape
        self.watched = watch(self) if watch else self
        self.inputs: dict[Key, Tensor] = {}
        self.outputs: dict[Key, Tensor] = {}
        self.gradients: dict[Key, Tensor] = {}
        self.losses: dict[int, Tensor] = {}
        self.sending: deque[Handle] = deque()

    def run(self, instructions: list[Instruction]) -> list[Tensor]:
        """Walk the schedule; returns the losses () of the micro-batches in data order (last stage; empty elsewhere)."""
        schedule.run(instructions, self.watched)
        while self.sending:
            self.sending.popleft().wait()
        return [self.losses[index] for index in sorted(self.losses)]

    def forward(self, instruction: Instruction) -> None:
        """Tokens or input (s, b, h) -> output (s, b, h), or the loss () on the last stage."""
        key, chunk = _key(instruction), self.chunks[instruction.chunk]
        batch = self.batches.fetch(instruction.microbatch)
        x = batch.tokens if chunk.is_first else self.inputs[key]
        at = Pass(first_sample=batch.first_sample, training=self.shape.training, recompute=self.shape.recompute)
        output = chunk(x, batch.labels, at, self.shape.loss_factor)
        if chunk.is_last:
            self.losses[instruction.microbatch] = output.detach() / self.shape.loss_factor
        if torch.is_grad_enabled() or not chunk.is_last:
            self.outputs[key] = output
        if not torch.is_grad_enabled():
            self.inputs.pop(key, None)

    def backward(self, instruction: Instruction) -> None:
        """Gradient of the output (s, b, h) -> weight gradients, and gradient of the input (s, b, h)."""
        key = _key(instruction)
        backward(self.outputs.pop(key), self.gradients.pop(key, None))
        if not self.chunks[instruction.chunk].is_first:
            self.gradients[key] = self.inputs.pop(key).grad

    def recv_forward(self, instruction: Instruction) -> None:
        """The input (s, b, h), from the previous stage."""
        x = self.pp.recv(self._empty(), self.pp.rank - 1, FORWARD_TAG)
        self.inputs[_key(instruction)] = x.requires_grad_(torch.is_grad_enabled())

    def send_forward(self, instruction: Instruction) -> None:
        """The output (s, b, h), to the next stage."""
        key = _key(instruction)
        output = self.outputs[key] if torch.is_grad_enabled() else self.outputs.pop(key)
        self._send(output.detach(), self.pp.rank + 1, FORWARD_TAG)

    def recv_backward(self, instruction: Instruction) -> None:
        """The gradient of the output (s, b, h), from the next stage."""
        self.gradients[_key(instruction)] = self.pp.recv(self._empty(), self.pp.rank + 1, BACKWARD_TAG)

    def send_backward(self, instruction: Instruction) -> None:
        """The gradient of the input (s, b, h), to the previous stage."""
        self._send(self.gradients.pop(_key(instruction)), self.pp.rank - 1, BACKWARD_TAG)

    def _empty(self) -> Tensor:
        return torch.empty(self.shape.activation, dtype=self.shape.dtype)

    def _send(self, tensor: Tensor, to: int, tag: int) -> None:
        # A bounded queue frees sent tensors; twice the stages is more than 1F1B ever has under way, so the wait is not a stall.
        self.sending.append(self.pp.isend(tensor.contiguous(), to, tag))
        if len(self.sending) > 2 * self.pp.size:
            self.sending.popleft().wait()


def _key(instruction: Instruction) -> Key:
    return instruction.chunk, instruction.microbatch
