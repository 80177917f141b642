"""Search for the origin of the first Inf or NaN of an iteration: rank, layer and operation.

When the gradients of an iteration are not finite, its weights are as they were, so its forwards and backwards are repeated with the
same samples and dropout masks on the same parameters, with a look at what goes into every operation of the layers and what comes
out, and at the gradients on their way back. The first operation with finite inputs and a result that is not finite is named; first
means along the samples, then forward through the parts of the model and backward again. An iteration whose gradients are finite
pays nothing.

Left out: when to look (`session`); two faults in one micro-batch (the first is named); which of the tensor-parallel ranks it was
where sequence parallelism makes their sum a part of a linear layer's backward (the first of them is named).
"""

from __future__ import annotations

import inspect
import math
import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.agreement import first_rank
from ..data.sampler import first_sample
from ..host.observed import Observed
from ..nn.layers import dropout_layer
from ..nn.model import Stage
from ..nn.parameter import spec_of
from ..optim.flat import FlatParameter, stage_units
from ..pipeline.instructions import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Instruction
from ..training.trainer import Trainer

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
)  # of `nn.ops.Ops`


KEY_LENGTH = 4


@dataclass(frozen=True)
class Finding:
    """A tensor that is not finite. key: (first sample, 1 in backward, part of the model in the order of the pass, number of the
    look on this rank), which is the same for the tensor-parallel ranks of one operation. text: where, for the log."""

    key: tuple[int, int, int, int]
    text: str


class _Tap(torch.autograd.Function):
    """The identity; backward shows the gradient that comes by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, see: Callable[[Tensor], None]) -> Tensor:
        ctx.see = see
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        ctx.see(dy)
        return dy, None


@dataclass
class _Call:
    """One operation in one forward. clean: the gradients of its results were finite so far."""

    name: str
    clean: bool = True


def _bad(tensors: Iterable[Any]) -> str | None:
    """Return how many elements of the first nonfinite tensor are not finite, in words; None if all tensors are finite."""
    for tensor in tensors:
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            count = tensor.numel() - int(torch.isfinite(tensor).sum())
            if count:
                return f"{count:,} of {tensor.numel():,} elements"
    return None


def _name(operation: str, given: dict[str, Any], before: str) -> str:
    """linear, decoder.layers.0.self_attention.linear_qkv: an operation and what it belongs to, of the arguments that it got.

    before: the name of the operation before it.
    """
    if operation == "head_loss":
        return f"{operation}, output_layer"
    weight = given.get("weight", given.get("weight1"))
    if weight is not None:
        return f"{operation}, {weight.spec.name.removesuffix('.weight')}"
    if "key" not in given:  # queries and keys are turned between two operations that have names
        return f"{operation}, after {before}"
    layer = dropout_layer(given["key"].stream)
    return f"{operation}, {f'decoder.layers.{layer - 1}' if layer else 'embedding'}"  # Megatron's names count from 0


class Search:
    """Looks at the operations of a repeated iteration on this rank.

    made: the first result that is not finite although the inputs were; met: the first input or gradient that is not. consumed:
    samples before the iteration.
    """

    def __init__(self, trainer: Trainer, consumed: int) -> None:
        self.trainer, self.consumed = trainer, consumed
        self.made: Finding | None = None
        self.met: Finding | None = None
        self._looks, self._before = 0, "the input"  # the name of the operation before
        self._now = Instruction(FORWARD, 0)
        self.stage = self._observed_stage()

    def _observed_stage(self) -> Stage:
        """A stage on the trainer's parameters, without its hooks, whose operations this search sees."""
        trained = self.trainer.stage
        ops: Any = Observed(
            self.trainer.ops, OPERATIONS, self._operation
        )  # has the methods of `Ops`
        trainer = self.trainer
        stage = Stage(trainer.run, trainer.layout, trainer.groups, ops)
        for module, original in zip(stage.modules(), trained.modules(), strict=True):
            for name, parameter in original.named_parameters(recurse=False):
                setattr(module, name, parameter)
        return stage

    # What the schedule does -----------------------------------------------------------------------------------------------------

    def watch(self, executor: Any) -> Any:
        """The executor, its computation seen."""
        return Observed(
            executor, (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT), self._instruction
        )

    def _instruction(self, op: str, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        self._now = args[0]
        result = function(*args, **kwargs)
        if op != FORWARD and not (self.made or self.met):
            self._look_at_weight_gradients()
        return result

    def _look_at_weight_gradients(self) -> None:
        """Look for a nonfinite weight gradient on this rank: a sum of finite numbers may overflow."""
        for parameter in (p for unit in stage_units(self.trainer.stage) for p in unit):
            assert isinstance(parameter, FlatParameter)
            if found := _bad([parameter.main_grad]):
                return self._found(
                    True,
                    f"the gradient of {parameter.spec.name}, after finite gradients of activations",
                    found,
                )
        return None

    # What an operation does -----------------------------------------------------------------------------------------------------

    def _operation(self, name: str, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        self._looks += 1
        bound = inspect.signature(function).bind(*args, **kwargs)
        call, given = _Call(_name(name, bound.arguments, self._before)), bound.arguments
        self._before = call.name
        inputs = [v for v in given.values() if not isinstance(v, nn.Parameter)]
        valid = given.get(
            "needs_values", True
        )  # else neither result nor, after an operation of that kind, input must be
        before = _bad(inputs) if valid else None
        for key, value in given.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                given[key] = self._tap(value, partial(self._outgoing, call))
        result = function(*bound.args, **bound.kwargs)
        results = result if isinstance(result, tuple) else (result,)
        if valid and (found := before or _bad(results)):
            self._found(not before, f"forward of {call.name}", found)
        tapped = tuple(self._tap(each, partial(self._incoming, call)) for each in results)
        return tapped if isinstance(result, tuple) else tapped[0]

    def _tap(self, x: Tensor, see: Callable[[Tensor], None]) -> Tensor:
        return _Tap.apply(x, see) if x.requires_grad and torch.is_grad_enabled() else x

    def _incoming(self, call: _Call, grad: Tensor) -> None:
        """The gradient of a result."""
        self._looks += 1
        if found := _bad([grad]):
            call.clean = False
            self._found(False, f"backward of {call.name}", found)

    def _outgoing(self, call: _Call, grad: Tensor) -> None:
        """The gradient of an input."""
        self._looks += 1
        if found := _bad([grad]):
            self._found(call.clean, f"backward of {call.name}", found)

    def _found(self, made: bool, where: str, how_many: str) -> None:
        """Keep the first finding of its kind. The looks have the same numbers on tensor-parallel ranks, which hold the same."""
        if self.made if made else self.met:
            return
        trainer, now = self.trainer, self._now
        groups, size = trainer.groups, trainer.run.batch.micro_batch_size
        first = first_sample(
            self.consumed, now.microbatch, size, groups.data_rank, groups.data_size
        )
        backward, part = (
            now.op != FORWARD,
            trainer.stage.placement.virtual_stage(trainer.groups.pp.rank, now.model_chunk),
        )
        what = "its inputs are finite, its result is not" if made else "its inputs are not finite"
        batch = trainer.skips.samples(self.consumed, trainer.batch_size(self.consumed))
        ends = batch[first - self.consumed], batch[first - self.consumed + size - 1]
        text = f"{where}, micro-batch {now.microbatch} (samples {ends[0]} to {ends[1]}): {what} ({how_many})"
        finding = Finding((first, int(backward), -part if backward else part, self._looks), text)
        self.made, self.met = (finding, self.met) if made else (self.made, finding)


def _say(trainer: Trainer, finding: Finding | None, form: str) -> str | None:
    """The first finding of all ranks, with its rank and node; None where there is none. Collective."""
    world = trainer.world
    rank = first_rank(world, finding.key if finding else None, KEY_LENGTH)
    if rank is None:
        return None
    own = (
        form.format(f"rank {rank} (node {platform.node()}), {finding.text}")
        if finding and rank == world.rank
        else ""
    )
    return world.broadcast_object(own, root=rank)


def _bad_weight(trainer: Trainer) -> Finding | None:
    flat = trainer.optimizer.flat
    for parameter in [*flat.parameters, *flat.frozen]:
        if found := _bad([parameter]):
            return Finding((0, 0, 0, 0), f"weight {spec_of(parameter).name}: {found}")
    return None


def find_nonfinite(trainer: Trainer, consumed: int, scale: float) -> str:
    """Repeat the iteration that began at sample `consumed`, with loss scale `scale`, and say where its first Inf or NaN was made.

    The weights must be those that the iteration began with. What is left in the gradients is of no use. Collective; the same text
    on every rank.
    """
    trainer.optimizer.buckets.await_weights()
    if text := _say(trainer, _bad_weight(trainer), "the weights were not finite before: {}"):
        return text
    search = Search(trainer, consumed)
    trainer.repeat(consumed, scale, search.stage, search.watch)
    text = _say(trainer, search.made, "first produced by {}") or _say(
        trainer,
        search.met,
        "first seen by {}, and no operation produced it: what lies between is communication",
    )
    if text:
        return text
    if math.isfinite(trainer.optimizer.grad_norm()):
        return "it does not occur when the iteration is repeated from the same state: memory or network of a node may be faulty"
    return "the gradients of every rank are finite, but their sum over the ranks is not"
