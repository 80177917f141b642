"""Executor for a pipeline schedule's instructions for one iteration."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm.base import Comm, Handle
from ..nn.backward import Waiting
from ..nn.forward_context import Pass, Prediction
from ..nn.model import Stage
from ..nn.ops import backward
from ..pipeline.instruction_lists import receives, send_queue
from ..pipeline.instructions import (
    RECV_BACKWARD,
    SEND_BACKWARD,
    Executor,
    Instruction,
    execute,
)
from ..pipeline.schedule import Schedule
from ..pipeline.schedule_names import row
from .micro_batches import MicroBatchWindow

Key = tuple[int, int]  # chunk, micro-batch


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """Properties that all micro-batches of an iteration share.

    activation: shape (s, b, h) between stages; s is a shard with sequence parallelism.
    dtype: of activations. loss_factor: scale of the loss before backward.
    prediction_counts: of each MTP module, see `Pass.predictions`; empty: they do not run.
    """

    activation: tuple[int, int, int]
    dtype: torch.dtype
    loss_factor: float
    training: bool
    recompute: str | None
    count: float | None = None
    tokens: float | None = None
    prediction_counts: tuple[float, ...] = ()


class StepExecutor:
    """Executor for one iteration's instructions on this rank's model chunks.

    watch: wraps this executor in an observer.
    """

    def __init__(
        self,
        stage: Stage,
        pp: Comm,
        batches: MicroBatchWindow,
        shape: StepShape,
        watch: Callable[[Executor], Executor] | None = None,
    ) -> None:
        self.stage = stage
        self.chunks = stage.chunks
        self.placement = stage.placement
        self.pp = pp
        self.batches = batches
        self.shape = shape
        self.watched = watch(self) if watch else self
        self.inputs: dict[Key, Tensor] = {}
        self.outputs: dict[Key, Tensor] = {}
        self.gradients: dict[Key, Tensor] = {}
        self.weight_work: dict[Key, Waiting] = {}
        self.losses: dict[int, Tensor] = {}
        self._to_receive: dict[tuple[str, int], deque[Instruction]] = {}
        self._receiving: dict[Instruction, tuple[Tensor, Handle]] = {}
        self._sending: deque[Handle] = deque()
        self._sends_under_way = 0

    def run(self, lists: Schedule) -> list[Tensor]:
        """Run this rank's instructions; return micro-batch losses () in data order, on the last stage; empty elsewhere."""
        instructions = [each for each in lists.instructions(self.pp.rank) if self._is_needed(each)]
        self._sends_under_way = send_queue(lists, self.pp.rank)
        self._to_receive = {tag: deque(waiting) for tag, waiting in receives(instructions).items()}
        for _ in range(row(lists.name).receives_ahead):
            for tag in self._to_receive:
                self._receive_ahead(tag)
        execute(instructions, self.watched)
        while self._sending:
            self._sending.popleft().wait()
        return [self.losses[index] for index in sorted(self.losses)]

    # Computation ----------------------------------------------------------------------------------------------------------------

    def forward(self, instruction: Instruction) -> None:
        """Compute the output (s, b, h); in the last chunk the loss ()."""
        key = _key(instruction)
        chunk = self.chunks[instruction.model_chunk]
        batch = self.batches.fetch(instruction.microbatch)
        x = batch.tokens if chunk.is_first else self.inputs[key]
        shape = self.shape
        labels = None
        predictions: tuple[Prediction, ...] = ()
        if chunk.is_last:
            labels = batch.labels
            counts = enumerate(shape.prediction_counts, 1)
            predictions = tuple(batch.prediction(depth, count) for depth, count in counts)
        forward_pass = Pass(
            first_sample=batch.first_sample,
            training=shape.training,
            recompute=shape.recompute,
            documents=batch.documents,
            count=shape.count,
            tokens=shape.tokens,
            balance_factor=shape.loss_factor,
            predictions=predictions,
        )
        output = chunk(x, labels, forward_pass, shape.loss_factor)
        if not output.requires_grad:
            self.inputs.pop(key, None)
        if chunk.is_last:
            self.losses[instruction.microbatch] = output.detach()
            output = output * shape.loss_factor
        if torch.is_grad_enabled() or not chunk.is_last:
            self.outputs[key] = output
        if (following := self._own_neighbour(instruction, 1)) is not None:
            self.inputs[following] = self._chunk_input(self._take_output(key), following[0])

    def backward(self, instruction: Instruction) -> None:
        """Compute weight gradients and the input gradient (s, b, h)."""
        key = _key(instruction)
        output = self.outputs.pop(key)
        if not output.requires_grad:  # up to here the model is frozen
            return
        backward(output, self.gradients.pop(key, None))
        if self.chunks[instruction.model_chunk].needs_input_gradient:
            previous = self._own_neighbour(instruction, -1)
            gradient = self.inputs.pop(key).grad
            assert gradient is not None, "backward has reached the input"
            self.gradients[key if previous is None else previous] = gradient

    def backward_input(self, instruction: Instruction) -> None:
        with self.stage.ops.weight_gradients.put_off() as waiting:
            self.backward(instruction)
        self.weight_work[_key(instruction)] = waiting

    def backward_weight(self, instruction: Instruction) -> None:
        self.weight_work.pop(_key(instruction)).run()

    # Messages -------------------------------------------------------------------------------------------------------------------

    def recv_forward(self, instruction: Instruction) -> None:
        received = self._received(instruction)
        self.inputs[_key(instruction)] = self._chunk_input(received, instruction.model_chunk)

    def send_forward(self, instruction: Instruction) -> None:
        self._send(self._take_output(_key(instruction)), instruction)

    def recv_backward(self, instruction: Instruction) -> None:
        self.gradients[_key(instruction)] = self._received(instruction)

    def send_backward(self, instruction: Instruction) -> None:
        self._send(self.gradients.pop(_key(instruction)), instruction)

    def _is_needed(self, instruction: Instruction) -> bool:
        """Return False for messages with a gradient that no trained parameter needs."""
        chunk = self.chunks[instruction.model_chunk]
        if instruction.op == SEND_BACKWARD:
            return bool(chunk.needs_input_gradient)
        return instruction.op != RECV_BACKWARD or bool(chunk.needs_gradient)

    def _chunk_input(self, values: Tensor, model_chunk: int) -> Tensor:
        needs_gradient = self.chunks[model_chunk].needs_input_gradient
        return values.requires_grad_(torch.is_grad_enabled() and needs_gradient)

    def _take_output(self, key: Key) -> Tensor:
        if not torch.is_grad_enabled():
            return self.outputs.pop(key)
        values = self.outputs[key].detach()
        # Backward needs the output's graph, not its values: without `.data`, the graph would keep them until then,
        # for as many micro-batches as are in flight. Megatron-LM's deallocate_output_tensor frees them in the same way.
        self.outputs[key].data = values.new_empty(1)
        return values

    def _own_neighbour(self, instruction: Instruction, step: int) -> Key | None:
        """Return the key of this micro-batch in the next (1) or previous (-1) chunk, if on this rank."""
        neighbour = self.placement.neighbour(self.pp.rank, instruction.model_chunk, step)
        if neighbour is None:
            return None
        stage, chunk = neighbour
        return (chunk, instruction.microbatch) if stage == self.pp.rank else None

    def _receive_ahead(self, tag: tuple[str, int]) -> None:
        if self._to_receive[tag]:
            instruction = self._to_receive[tag].popleft()
            tensor = torch.empty(self.shape.activation, dtype=self.shape.dtype)
            handle = self.pp.irecv(tensor, *self.placement.peer(self.pp.rank, instruction))
            self._receiving[instruction] = (tensor, handle)

    def _received(self, instruction: Instruction) -> Tensor:
        tensor, handle = self._receiving.pop(instruction)
        self._receive_ahead((instruction.op, instruction.model_chunk))
        handle.wait()
        return tensor

    def _send(self, tensor: Tensor, instruction: Instruction) -> None:
        while self._sending and (
            len(self._sending) >= self._sends_under_way or self._sending[0].done()
        ):
            self._sending.popleft().wait()
        self._sending.append(
            self.pp.isend(tensor.contiguous(), *self.placement.peer(self.pp.rank, instruction))
        )


def _key(instruction: Instruction) -> Key:
    return instruction.model_chunk, instruction.microbatch
