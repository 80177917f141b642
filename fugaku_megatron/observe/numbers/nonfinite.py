"""Search for an iteration's first Inf or NaN: rank, layer and operation.

Nonfinite gradients leave the weights unchanged, so the iteration is repeated with the same samples and dropout masks, and every
operation is inspected. The search finds the first operation with finite inputs and a nonfinite result, ordered by sample, then
forward through the model and backward again.
"""

from __future__ import annotations

import inspect
import math
import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...comm.agreement import first_text
from ...comm.autograd import Function, Gradients
from ...data.sampler import first_sample
from ...host.observed import Arguments, Keywords, Observed
from ...nn.layers import dropout_layer
from ...nn.model import Stage
from ...nn.parameter import scales_of
from ...optim.flat import FlatParameter, stage_units
from ...pipeline.instructions import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Instruction
from ...training.trainer import Trainer

# Methods of `nn.ops.Ops`.
OPERATIONS = (
    "linear",
    "column_linear",
    "row_linear",
    "mlp",
    "overlapped_mlp",
    "attention",
    "rotary",
    "layer_norm",
    "rms_norm",
    "bias_dropout_add",
    "bias_dropout_add_layer_norm",
    "bias_dropout_add_rms_norm",
    "dropout",
    "embedding",
    "add_position",
    "head_loss",
)
KEY_LENGTH = 4


class Finding(NamedTuple):
    """A nonfinite tensor.

    key: (first sample, 1 in backward, virtual stage in the pass's order, inspection), equal on an operation's tensor-parallel ranks
    """

    key: tuple[int, int, int, int]
    text: str


class _Tap(Function[Tensor]):
    @staticmethod
    def forward(ctx: Any, x: Tensor, observe: Callable[[Tensor], None]) -> Tensor:
        ctx.observe = observe
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Gradients:
        ctx.observe(dy)
        return dy, None


def _tap(x: Tensor, observe: Callable[[Tensor], None]) -> Tensor:
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x
    return _Tap.apply(x, observe)


@dataclass
class _Call:
    """An operation in a forward. finite_gradients: its results' gradients were finite so far."""

    name: str
    finite_gradients: bool = True


def _describe_nonfinite(tensors: Iterable[Any]) -> str | None:
    for tensor in tensors:
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            count = tensor.numel() - int(torch.isfinite(tensor).sum())
            if count:
                return f"{count:,} of {tensor.numel():,} elements"
    return None


def _name(operation: str, arguments: dict[str, Any], previous: str) -> str:
    if operation == "head_loss":
        return f"{operation}, output_layer"
    weight = arguments.get("weight")
    if "weights" in arguments:  # of an MLP
        weight = arguments["weights"].weight1
    elif "norm" in arguments:
        weight = arguments["norm"].weight
    if weight is not None:
        return f"{operation}, {weight.spec.name.removesuffix('.weight')}"
    dropped = arguments.get("dropped")
    if dropped is None:  # rotary has neither weight nor dropout
        return f"{operation}, after {previous}"
    layer = dropout_layer(dropped.key.stream)
    if layer == 0:
        return f"{operation}, embedding"
    return f"{operation}, decoder.layers.{layer - 1}"  # Megatron's names count from 0


class Search:
    """Inspection of this rank's operations in a repeated iteration.

    produced: first nonfinite result with finite inputs
    """

    def __init__(self, trainer: Trainer, consumed: int) -> None:
        self.trainer = trainer
        self.consumed = consumed
        self.produced: Finding | None = None
        self.met: Finding | None = None
        self._inspections = 0
        self._previous = "the input"  # name of the operation before
        self._instruction = Instruction(FORWARD, 0)
        ops: Any = Observed(trainer.ops, OPERATIONS, self._operation)  # has the methods of `Ops`
        self.stage = Stage(trainer.run, trainer.groups, ops)
        for module, original in zip(self.stage.modules(), trainer.stage.modules(), strict=True):
            for name, parameter in original.named_parameters(recurse=False):
                setattr(module, name, parameter)

    def watch(self, executor: Any) -> Any:
        computations = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
        return Observed(executor, computations, self._computation)

    def _computation(
        self, op: str, function: Callable[..., Any], args: Arguments, kwargs: Keywords
    ) -> Any:
        self._instruction = args[0]
        result = function(*args, **kwargs)
        if op != FORWARD and not (self.produced or self.met):
            self._inspect_weight_gradients()
        return result

    def _inspect_weight_gradients(self) -> None:
        for unit in stage_units(self.trainer.stage):
            for parameter in unit:
                assert isinstance(parameter, FlatParameter)
                if count := _describe_nonfinite([parameter.main_grad]):
                    where = f"the gradient of {parameter.spec.name}, after finite gradients of activations"
                    self._found(where, count, produced=True)
                    return

    def _operation(
        self, name: str, function: Callable[..., Any], args: Arguments, kwargs: Keywords
    ) -> Any:
        self._inspections += 1
        bound = inspect.signature(function).bind(*args, **kwargs)
        arguments = bound.arguments
        call = _Call(_name(name, arguments, self._previous))
        self._previous = call.name
        # Without needs_values the result is arbitrary, and so may be the input.
        valid = arguments.get("needs_values", True)
        nonfinite_input = None
        if valid:
            nonfinite_input = _describe_nonfinite(
                value for value in arguments.values() if not isinstance(value, nn.Parameter)
            )
        for key, value in arguments.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                arguments[key] = _tap(value, partial(self._gradient, call, False))
        result = function(*bound.args, **bound.kwargs)
        results = result if isinstance(result, tuple) else (result,)
        if valid and (count := nonfinite_input or _describe_nonfinite(results)):
            self._found(f"forward of {call.name}", count, produced=not nonfinite_input)
        tapped = tuple(_tap(each, partial(self._gradient, call, True)) for each in results)
        return tapped if isinstance(result, tuple) else tapped[0]

    def _gradient(self, call: _Call, of_result: bool, grad: Tensor) -> None:
        self._inspections += 1
        if count := _describe_nonfinite([grad]):
            call.finite_gradients &= not of_result
            self._found(f"backward of {call.name}", count, produced=call.finite_gradients)

    def _found(self, where: str, count: str, produced: bool) -> None:
        if produced and self.produced or not produced and self.met:
            return
        trainer = self.trainer
        groups = trainer.groups
        instruction = self._instruction
        size = trainer.run.batch.micro_batch_size
        microbatch = instruction.microbatch
        first = first_sample(self.consumed, microbatch, size, groups.data_rank, groups.data_size)
        batch = trainer.plan.skips.samples(self.consumed, trainer.plan.batch_sizes(self.consumed))
        begin = batch[first - self.consumed]
        end = batch[first - self.consumed + size - 1]
        if produced:
            explanation = "its inputs are finite, its result is not"
        else:
            explanation = "its inputs are not finite"
        text = (
            f"{where}, micro-batch {microbatch} (samples {begin} to {end}): {explanation} ({count})"
        )
        part = trainer.stage.placement.virtual_stage(groups.pp.rank, instruction.model_chunk)
        place = (0, part) if instruction.op == FORWARD else (1, -part)
        finding = Finding((first, *place, self._inspections), text)
        if produced:
            self.produced = finding
        else:
            self.met = finding


def _first_finding(trainer: Trainer, finding: Finding | None) -> str | None:
    """Return all ranks' first finding, with rank and node. Collective."""
    world = trainer.world
    key = finding.key if finding else None
    place = f"rank {world.rank} (node {platform.node()})"
    return first_text(world, key, KEY_LENGTH, lambda: f"{place}, {finding and finding.text}")


def find_nonfinite(trainer: Trainer, consumed: int, scale: float) -> str:
    """Repeat the iteration from sample `consumed`; describe the origin of its first Inf or NaN.
    Collective.

    The weights must be unchanged since. Overwrites the gradients.
    """
    trainer.optimizer.buckets.await_weights()
    flat = trainer.optimizer.flat
    weight = None
    for parameter in [*flat.parameters, *flat.frozen]:
        scales = scales_of(parameter)  # a block with an Inf or NaN has such a scale
        if count := _describe_nonfinite([parameter if scales is None else scales]):
            weight = Finding((0, 0, 0, 0), f"weight {parameter.spec.name}: {count}")
            break
    if text := _first_finding(trainer, weight):
        return f"the weights were not finite before: {text}"
    search = Search(trainer, consumed)
    trainer.repeat(consumed, scale, search.stage, search.watch)
    if text := _first_finding(trainer, search.produced):
        return f"first produced by {text}"
    if text := _first_finding(trainer, search.met):
        return f"first seen by {text}, and no operation produced it: what lies between is communication"
    if math.isfinite(trainer.optimizer.grad_norm()):
        return "it does not occur when the iteration is repeated from the same state: memory or network of a node may be faulty"
    return "the gradients of every rank are finite, but their sum over the ranks is not"
