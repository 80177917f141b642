"""Bit sums of a rank's outputs and gradients in an iteration, to compare with a repetition of the iteration."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...comm.grid import Groups
from ...config.run_config import RunConfig
from ...host.topology import format_list
from ...nn.blocks import TransformerLayer
from ...nn.forward_context import Pass
from ...nn.model import Chunk
from ...optim.bits import bit_sum
from ...training.trainer import Trainer
from ..hang.heartbeat import stat_words

TOKENS = 0
OUTPUT = 1
INPUT_GRADIENT = 2
WEIGHT_GRADIENT = 3
AFTER_SAMPLES = 2**61  # in place of the first sample
LARGEST = 2**40
KEY_LENGTH = 4
# First sample, kind, virtual stage in the pass's order, and a parameter's start, or a module: in forward in the order in which
# modules end, in backward against the order in which they begin.
Key = tuple[int, int, int, int]
Sums = dict[Key, int]  # of bits


class Fingerprints:
    """Bit sums of this rank's outputs, input gradients and weight gradients while `active`, from hooks."""

    def __init__(self, trainer: Trainer) -> None:
        self.active = False
        self.sums: Sums = {}
        self._names: dict[tuple[int, int, int], str] = {}  # without the first sample
        self._flat = trainer.optimizer.flat
        self._groups = trainer.groups
        placement = trainer.stage.placement
        for number, chunk in enumerate(trainer.stage.chunks):
            stage = placement.virtual_stage(trainer.groups.pp.rank, number)
            begins = {module: index for index, module in enumerate(chunk.modules())}
            for index, (name, module) in enumerate(_modules(chunk)):
                output = (OUTPUT, stage, index)
                gradient = (INPUT_GRADIENT, -stage, -begins[module])
                self._names[output] = self._names[gradient] = name
                module.register_forward_hook(partial(self._forward, output, gradient))
        trainer.optimizer.buckets.before_sum = self._weights

    def take(self) -> Sums:
        sums = self.sums
        self.sums = {}
        return sums

    def describe(self, key: Key) -> str:
        """Return the tensor and the micro-batch of a bit sum in words."""
        sample, kind, stage, number = key
        if kind == WEIGHT_GRADIENT:
            name = "the tied embedding"
            if stage < len(self._flat.buckets):  # the bucket's number
                name = next(self._flat.overlaps(number, number + 1))[0].spec.name
            return f"the gradient of {name}"
        if kind == TOKENS:
            return f"the tokens, micro-batch from sample {sample}"
        name = self._names[key[1:]]
        tensor = f"the output of {name}" if kind == OUTPUT else f"the gradient of {name}'s input"
        return f"{tensor}, micro-batch from sample {sample}"

    def of_experts(self, key: Key) -> bool:
        """Return True for a result that expert-parallel ranks compute together."""
        if self._groups.ep.size == 1 or key[1] == WEIGHT_GRADIENT:
            return False
        return self._names[key[1:]].endswith(".mlp")

    def _forward(
        self,
        place: tuple[int, int, int],
        gradient: tuple[int, int, int],
        module: nn.Module,
        args: tuple[Any, ...],
        output: Any,
    ) -> None:
        forward_pass = next((each for each in args if isinstance(each, Pass)), None)
        if not self.active or forward_pass is None or not forward_pass.training:
            return
        sample = forward_pass.first_sample
        if isinstance(module, Chunk):
            tokens = [x for x in args[:2] if isinstance(x, Tensor) and not x.is_floating_point()]
            self.sums[sample, TOKENS, 0, 0] = _sum(tokens)
        key = (sample, *place)
        if key not in self.sums:  # recompute repeats a forward, and may leave its result unset
            tensors = output if isinstance(output, tuple) else (output,)
            self.sums[key] = _sum(x for x in tensors if isinstance(x, Tensor))
        x = args[0]
        if torch.is_grad_enabled() and x.requires_grad:
            x.register_hook(partial(self._backward, (sample, *gradient)))

    def _backward(self, key: Key, grad: Tensor) -> None:
        self.sums[key] = bit_sum(grad)

    def _weights(self, index: int, grads: Tensor) -> None:
        """Add a bucket's weight gradients before their sum over ranks. index: -1 for the tied embedding"""
        if not self.active:
            return
        if index < 0:
            self.sums[AFTER_SAMPLES, WEIGHT_GRADIENT, len(self._flat.buckets), 0] = bit_sum(grads)
            return
        bucket = self._flat.buckets[index]
        for parameter, start, _, _ in self._flat.overlaps(bucket.start, bucket.end):
            first = start - bucket.start
            own = grads[first : first + parameter.numel()]
            self.sums[AFTER_SAMPLES, WEIGHT_GRADIENT, index, start] = bit_sum(own)


def _sum(tensors: Iterable[Tensor]) -> int:
    """Return the sum of the tensors' bits as a signed number of 64 bits."""
    return (sum(map(bit_sum, tensors)) + 2**63) % 2**64 - 2**63


def _modules(chunk: Chunk) -> Iterator[tuple[str, nn.Module]]:
    """Yield a model chunk's modules with their names in the model, in the order in which they end."""
    if chunk.is_first:
        yield from _inside("embedding", chunk.embedding)
    for layer in chunk.layers:
        assert isinstance(layer, TransformerLayer)
        yield from _inside(f"decoder.layers.{layer.layer - 1}", layer)
    for depth, module in enumerate(chunk.predictions):
        yield from _inside(f"mtp.layers.{depth}", module)
    yield ("the head" if chunk.is_last else "the model chunk", chunk)


def _inside(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        yield from _inside(f"{name}.{child_name}", child)
    yield name, module


def first_difference(one: Sums, other: Sums) -> Key | None:
    keys = one.keys() | other.keys()
    return min((key for key in keys if one.get(key) != other.get(key)), default=None)


def search_key(key: Key | None, sums: Sums) -> tuple[int, ...] | None:
    """Return a key for `first_rank`, with the micro-batch's place among those of `sums` instead of its first sample."""
    if key is None:
        return None
    samples = sorted({each[0] for each in sums})
    return (samples.index(key[0]), key[1], key[2] + LARGEST, key[3] + LARGEST)


def of_own_samples(groups: Groups, own: Sums, computed: Sums, distance: int) -> Sums:
    """Return the fingerprints that the rank `distance` data-parallel ranks before this one computed from this rank's samples.

    Collective.
    own: fingerprints of this rank's samples by this rank
    computed: by this rank, of the samples of the rank `distance` after it
    """
    dp = groups.dp
    distance *= groups.cp.size
    values = torch.tensor([computed[key] for key in sorted(computed)], dtype=torch.int64)
    if distance % dp.size:
        sending = dp.isend(values, (dp.rank + distance) % dp.size)
        values = dp.recv(torch.empty_like(values), (dp.rank - distance) % dp.size)
        sending.wait()
    return dict(zip(sorted(own), values.tolist(), strict=True))


def neighbour_distance(run: RunConfig, groups: Groups) -> int:
    """Return the data-parallel ranks to the nearest rank with the same weights, also of its experts; 0: there is none.

    Expert-parallel ranks compute together, so that whole groups of them exchange their samples.
    """
    experts = groups.ep.size * groups.etp.size if run.parallel.divides_experts else 1
    ranks = groups.cp.size * groups.tp.size
    return experts // math.gcd(experts, ranks) % groups.data_size


def contradicted(values: Sequence[int]) -> int | None:
    """Return the index, 0 or 1, of the value that a third one contradicts, or None."""
    if len(values) < 3 or values[2] not in values[:2]:
        return None
    return 1 - values[:2].index(values[2])


def cores() -> str:
    """Name a single thread's current core, or all cores that this rank's threads may use."""
    try:
        if torch.get_num_threads() == 1:
            return f"core {stat_words('thread-self')[36]}"
        tasks = map(int, os.listdir("/proc/self/task"))
        allowed = set().union(*map(os.sched_getaffinity, tasks))
        return f"cores {format_list(allowed)}"
    except OSError:
        return f"cores {format_list(os.sched_getaffinity(0))}"
