"""One rank's part of an iteration: what each instruction of a schedule does.

Left out: the schedules (`schedule`), reduction and update (`optim`). Legend: s sequence, b micro-batch, h hidden.
Test: pytest tests/test_parallel.py
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .. import schedule
from ..comm.base import Comm, Handle
from ..nn import ops
from ..nn.model import Stage

FORWARD_TAG, BACKWARD_TAG = 0, 1
Batch = tuple[Tensor, Tensor]  # tokens (s, b), labels (s, b)


class StepExecutor:
    """Runs forwards and backwards of one iteration, sending to and receiving from the neighbouring stages.

    batches: this rank's micro-batches in order (first and last stage). first_sample(m): global index of micro-batch m's first
    sample. shape, dtype: of the activation between stages, (s, b, h). loss_factor: scales the loss before backward. watch: what
    stands between the schedule and this executor, to observe it.
    """

    def __init__(self, stage: Stage, pp: Comm, batches: Iterator[Batch] | None, first_sample: Callable[[int], int],
                 shape: tuple[int, int, int], dtype: torch.dtype, loss_factor: float,
                 watch: Callable[[StepExecutor], schedule.Executor] | None = None) -> None:
        self.stage, self.pp, self.batches, self.first_sample = stage, pp, batches, first_sample
        self.shape, self.dtype, self.loss_factor = shape, dtype, loss_factor
        self.watched = watch(self) if watch else self
        self.inputs: dict[int, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}
        self.gradients: dict[int, Tensor] = {}
        self.sending: deque[Handle] = deque()
        self.losses: list[Tensor] = []

    def run(self, instructions: list[schedule.Instruction]) -> list[Tensor]:
        """Walk the schedule; returns the micro-batches' losses (last stage; empty elsewhere)."""
        schedule.run(instructions, self.watched)
        while self.sending:
            self.sending.popleft().wait()
        return self.losses

    def forward(self, microbatch: int) -> None:
        """Input, labels -> output, or loss on the last stage."""
        tokens = labels = None
        if self.stage.is_first or self.stage.is_last:
            tokens, labels = next(self.batches)
        x = tokens if self.stage.is_first else self.inputs[microbatch]
        output = self.stage(x, labels, self.first_sample(microbatch), self.loss_factor)
        if self.stage.is_last:
            self.losses.append(output.detach() / self.loss_factor)
        if torch.is_grad_enabled():
            self.outputs[microbatch] = output
        else:
            self.inputs.pop(microbatch, None)
            self.outputs = {microbatch: output}

    def backward(self, microbatch: int) -> None:
        """Gradient of the output -> weight gradients and gradient of the input."""
        ops.backward(self.outputs.pop(microbatch), self.gradients.pop(microbatch, None))
        if not self.stage.is_first:
            self.gradients[microbatch] = self.inputs.pop(microbatch).grad

    def recv_forward(self, microbatch: int) -> None:
        """From the previous stage."""
        x = self.pp.recv(torch.empty(self.shape, dtype=self.dtype), self.pp.rank - 1, FORWARD_TAG)
        self.inputs[microbatch] = x.requires_grad_(torch.is_grad_enabled())

    def send_forward(self, microbatch: int) -> None:
        """To the next stage."""
        self._send(self.outputs[microbatch].detach(), self.pp.rank + 1, FORWARD_TAG)

    def recv_backward(self, microbatch: int) -> None:
        """From the next stage."""
        self.gradients[microbatch] = self.pp.recv(torch.empty(self.shape, dtype=self.dtype), self.pp.rank + 1, BACKWARD_TAG)

    def send_backward(self, microbatch: int) -> None:
        """To the previous stage."""
        self._send(self.gradients.pop(microbatch), self.pp.rank - 1, BACKWARD_TAG)

    def _send(self, tensor: Tensor, to: int, tag: int) -> None:
        # A bounded queue frees sent tensors; twice the stages is more than 1F1B ever has under way, so the wait is not a stall.
        self.sending.append(self.pp.isend(tensor.contiguous(), to, tag))
        if len(self.sending) > 2 * self.pp.size:
            self.sending.popleft().wait()
