"""Memory of a stage's parameters: one flat buffer of values, and gradients bucket by bucket (`costs.memory`).

Inside a bucket weight-decayed parameters lie first, so that an update is a few calls on long ranges and a ZeRO-1 shard is one slice
of each bucket; with Muon its matrices lie before them, so that what has a second moment is one range. A bucket's gradients get
memory with their first use, so that in an iteration of one micro-batch they take what backward has freed.
Left out: the update (`optim`), reductions (`buckets`), files (`checkpoint`).
"""

from __future__ import annotations

import math
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, count
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.shards import WEIGHT, Shard
from ..comm.base import Comm
from ..comm.grid import ALONE, Groups
from ..comm.node import NodeTensor
from ..costs.accounting import FLAT_ALIGNMENT, round_up
from ..costs.memory import cut
from ..nn.adapters import FINGERPRINTS, bits_number
from ..nn.model import VOCABULARY, Stage
from ..nn.parameter import ParameterSpec, spec_of

PIECE = 1 << 20  # elements of a tensor that are copied at once


@dataclass(frozen=True)
class Range:
    """Elements [start, end) of the flat buffer that are treated alike."""

    start: int
    end: int
    decayed: bool
    counted: bool
    decoupled: bool = False
    balances: bool = False
    orthogonal: bool = False


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which elements of its global tensor a piece of one parameter holds, whatever the layout, and that tensor's random numbers.

    Element i of the piece is number offset + (first + i) // columns * row + (first + i) % columns. stream: see `random_stream`.
    """

    stream: int
    offset: int
    first: int
    columns: int
    row: int

    def numbers(self, n: int) -> Tensor:
        """Of the first n elements, (n,)."""
        return self.numbers_of(torch.arange(self.first, self.first + n))

    def numbers_of(self, elements: Tensor) -> Tensor:
        """Return the numbers of elements (n,) of the rank's slice, (n,)."""
        if self.row == self.columns:
            return self.offset + elements
        return self.offset + elements // self.columns * self.row + elements % self.columns


@dataclass(frozen=True)
class Bucket:
    """Elements [start, end) of the flat buffer: what units of the stage have of one kind, and padding. units: their numbers.

    expert: the kind is experts, which fewer ranks hold alike than other parameters.
    """

    start: int
    end: int
    units: range
    expert: bool = False


class Gradients:
    """FP32 gradients of a stage's buckets, zeros until something is added; a bucket has memory from its first use until `free`."""

    def __init__(self, buckets: list[Bucket]) -> None:
        self._buckets = buckets
        self._memory: list[Tensor | None] = [None] * len(buckets)

    def of(self, index: int) -> Tensor:
        """The gradients of bucket `index`, (n,)."""
        memory = self._memory[index]
        if memory is None:
            memory = self._memory[index] = torch.zeros(
                self._buckets[index].end - self._buckets[index].start
            )
        return memory

    def zero(self) -> None:
        """Fill every bucket with zeros, which allocates its memory."""
        for index, memory in enumerate(self._memory):
            self.of(index) if memory is None else memory.zero_()

    def free(self) -> None:
        """Free all memory. Views of it keep what they show."""
        self._memory = [None] * len(self._buckets)

    def find(self, tensor: Tensor) -> int | None:
        """Of which element of the flat buffer the first of `tensor` is the gradient, None for other memory."""
        for bucket, memory in zip(self._buckets, self._memory, strict=True):
            if memory is not None and (offset := _offset(tensor, memory)) is not None:
                return bucket.start + offset
        return None


def _offset(part: Tensor, whole: Tensor) -> int | None:
    """Which element of `whole`, in one piece, is the first of `part`, None where it lies elsewhere."""
    offset = part.data_ptr() - whole.data_ptr()
    return offset // whole.element_size() if 0 <= offset < whole.nbytes else None


class FlatParameter(nn.Parameter):
    """A parameter with memory: a view into the flat buffer of values. spec: see `nn.parameter`."""

    spec: ParameterSpec

    def place(self, gradients: Gradients, bucket: int, start: int) -> FlatParameter:
        """Say where its gradients lie: from element `start` of a bucket on."""
        self._gradients, self._bucket, self._start = gradients, bucket, start
        return self

    @property
    def main_grad(self) -> Tensor:
        """The view of its FP32 gradients, in its shape; not to be kept from one iteration to the next."""
        return self._gradients.of(self._bucket)[self._start : self._start + self.numel()].view(
            self.shape
        )


class FrozenParameter(nn.Parameter):
    """A parameter with memory that is not trained. spec: see `nn.parameter`."""

    spec: ParameterSpec
    frozen, main_grad = True, None


def stage_units(stage: Stage) -> list[list[nn.Parameter]]:
    """A stage's trained parameters in units, in the order in which backward finishes them; `costs.memory.stage_units` has their
    sizes."""
    tied = [] if stage.tied_copy is None else [stage.tied_copy]
    units = [
        [p for p in _trained(module) if not any(p is t for t in tied)]
        for module in unit_modules(stage)
    ]
    if stage.last and not stage.tied and not spec_of(stage.last.output_weight).frozen:
        units[0].append(stage.last.output_weight)
    return [*units, tied] if tied else units


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if not spec_of(p).frozen]


def unit_modules(stage: Stage) -> list[nn.Module]:
    """The modules whose parameters form the stage's units: final norm, layers, embeddings; a tied copy is one more unit.

    A head's own weight belongs to the final norm's unit, which comes before it in forward and after it in backward.
    """
    chunks = list(reversed(stage.chunks))
    head = [stage.last.final_layernorm] if stage.last else []
    embedding = [stage.first.embedding] if stage.first else []
    return [*head, *(layer for chunk in chunks for layer in reversed(chunk.layers)), *embedding]


def _order(muon: bool, parameter: nn.Parameter) -> tuple[bool, bool, bool, bool]:
    """The same on all tensor-parallel ranks, so that their ZeRO-1 shards cut a replicated parameter at the same elements."""
    spec = spec_of(parameter)
    return (
        muon and not spec.orthogonal,
        not spec.decayed,
        spec.partition_dim is None,
        spec.init_name != spec.name,
    )


def _range(start: int, end: int, spec: ParameterSpec, muon: bool) -> Range:
    return Range(
        start,
        end,
        spec.decayed,
        spec.counted,
        spec.decoupled,
        spec.balances,
        muon and spec.orthogonal,
    )


def _merge(ranges: list[Range]) -> list[Range]:
    merged: list[Range] = []
    for r in ranges:
        last = merged[-1] if merged else None
        if last and replace(last, start=r.start, end=r.end) == r and last.end == r.start:
            merged[-1] = replace(r, start=last.start)
        else:
            merged.append(r)
    return merged


class FlatParameters:
    """Memory of a stage's parameters: `values` (the model's dtype), flat, and `gradients`, each bucket padded for ZeRO-1 shards.
    frozen: the parameters that are not trained, in memory that ranks of a node share, `frozen_memory`: divided experts follow the
    others. alike: the ranks that hold the same parameters, and the same divided experts.
    minimum: elements of a bucket, see `costs.memory.cut`; None takes any module as `stage`, and makes one bucket of it.
    muon: whether the optimizer is Muon.

    After construction every parameter of the stage is a FlatParameter, or a FrozenParameter, and holds its initial weights.
    """

    def __init__(
        self,
        stage: Stage | nn.Module,
        dtype: torch.dtype,
        seed: int,
        kernels: Any,
        alike: tuple[Comm, Comm] = (ALONE, ALONE),
        minimum: int | None = None,
        muon: bool = False,
    ) -> None:
        self._muon, self._alike = muon, alike
        self.starts: list[int] = []
        self.buckets: list[Bucket] = []
        declared = self._lay_out(
            stage, (alike[0].size * FLAT_ALIGNMENT, alike[1].size * FLAT_ALIGNMENT), minimum
        )
        self.numel = self.buckets[-1].end
        self.values = torch.zeros(self.numel, dtype=dtype)
        self.gradients = Gradients(self.buckets)
        self._ranges = _merge(
            [
                _range(start, start + p.numel(), spec_of(p), muon)
                for start, p in zip(self.starts, declared, strict=True)
            ]
        )
        self._seed, self._kernels = seed, kernels
        self.parameters = self._replace(stage, declared)

    def _lay_out(
        self, stage: Stage | nn.Module, paddings: tuple[int, int], minimum: int | None
    ) -> list[nn.Parameter]:
        """Set the place of every parameter, bucket by bucket; returns them in this order. paddings: of experts the second."""
        if minimum is not None and isinstance(stage, Stage):
            units, tied = stage_units(stage), stage.tied_copy is not None
        else:
            units, tied = [_trained(stage)], False
        parameters: list[nn.Parameter] = []
        end = 0
        for bucket in cut([sum(p.numel() for p in unit) for unit in units], minimum or 1, tied):
            members = sorted((p for i in bucket for p in units[i]), key=partial(_order, self._muon))
            for expert in (False, True):
                start, kind = end, [p for p in members if spec_of(p).expert == expert]
                self.starts += (
                    accumulate((p.numel() for p in kind[:-1]), initial=start) if kind else ()
                )
                end = start + round_up(sum(p.numel() for p in kind), paddings[expert])
                parameters += kind
                self.buckets += [Bucket(start, end, bucket, expert)] if kind else []
        return parameters

    def ranges(self, start: int, end: int) -> list[Range]:
        """What lies in elements [start, end), counted from `start`; padding is in no range."""
        inside = [(r, max(r.start, start), min(r.end, end)) for r in self._ranges]
        return [replace(r, start=a - start, end=b - start) for r, a, b in inside if a < b]

    def pieces(self, start: int, end: int) -> list[tuple[Range, Place]]:
        """`ranges` cut where one parameter ends and the next begins."""
        pieces = []
        for parameter, begin, first, last in self.overlaps(start, end):
            at = begin + first - start
            piece = _range(at, at + last - first, parameter.spec, self._muon)
            pieces.append((piece, place_of(parameter, first)))
        return pieces

    def overlaps(self, start: int, end: int) -> Iterator[tuple[FlatParameter, int, int, int]]:
        """Yield (parameter, its start, first, last) of every parameter that has elements in [start, end).

        These are the elements [first, last) of this rank's slice of the parameter.
        """
        for index in range(max(0, bisect_right(self.starts, start) - 1), len(self.starts)):
            parameter, begin = self.parameters[index], self.starts[index]
            if begin >= end:
                return
            first = max(0, start - begin)
            last = min(parameter.numel(), end - begin)
            if first < last:
                yield parameter, begin, first, last

    def owner(self, tensor: Tensor) -> FlatParameter | None:
        """The parameter whose values or gradients begin `tensor`, None for other memory."""
        element = _offset(tensor, self.values)
        element = self.gradients.find(tensor) if element is None else element
        return None if element is None else self.parameters[bisect_right(self.starts, element) - 1]

    def _replace(self, stage: nn.Module, declared: list[nn.Parameter]) -> list[FlatParameter]:
        """Swap the meta parameters for views into the flat buffer, which have the same `spec`; returns these."""
        new: dict[nn.Parameter, FlatParameter] = {}
        bucket_starts = [bucket.start for bucket in self.buckets]
        for old, start in zip(declared, self.starts, strict=True):
            bucket = bisect_right(bucket_starts, start) - 1
            values = self.values[start : start + old.numel()].view(old.shape)
            new[old] = FlatParameter(values).place(
                self.gradients, bucket, start - bucket_starts[bucket]
            )
            new[old].spec = spec_of(old)
            fill_initial(new[old].data, new[old], self._seed, self._kernels)
        frozen = self._freeze([p for p in stage.parameters() if spec_of(p).frozen])
        self.frozen = [*frozen.values()]
        for module in stage.modules():
            for name, old in list(module.named_parameters(recurse=False)):
                setattr(module, name, frozen[old] if old in frozen else new[old])
        return [new[old] for old in declared]

    def _freeze(self, declared: list[nn.Parameter]) -> dict[nn.Parameter, FrozenParameter]:
        """Memory for the parameters that are not trained, with initial weights."""
        self.frozen_memory: list[NodeTensor] = []
        new: dict[nn.Parameter, FrozenParameter] = {}
        for expert, comm in enumerate(self._alike):
            kind = [p for p in declared if spec_of(p).expert == expert]
            sizes = [p.numel() for p in kind]
            memory = NodeTensor(comm, sum(sizes), self.values.dtype)
            for old, values in zip(kind, memory.values.split(sizes) if kind else (), strict=True):
                new[old] = FrozenParameter(values.view(old.shape), requires_grad=False)
                new[old].spec = spec_of(old)
                if memory.writes:
                    fill_initial(new[old].data, new[old], self._seed, self._kernels)
            memory.written()
            self.frozen_memory.append(memory)
        return new

    def initial_shard(self, start: int, end: int) -> Tensor:
        """FP32 initial weights of elements [start, end), not rounded to the model's dtype."""
        shard = torch.zeros(end - start)
        for parameter, begin in zip(self.parameters, self.starts, strict=True):
            a, b = max(start, begin), min(end, begin + parameter.numel())
            if a < b:
                shard[a - start : b - start] = initial_values(
                    parameter, self._seed, self._kernels
                ).flatten()[a - begin : b - begin]
        return shard

    def shards(self, kind: str, tensor: Tensor, start: int, owned: bool) -> list[Shard]:
        """Checkpoint records of `tensor`, which holds elements [start, start + numel) of a flat buffer of this layout.

        `owned`: without parameters that the first tensor-parallel rank holds as well.
        """
        shards = []
        for parameter, begin in zip(self.parameters, self.starts, strict=True):
            a, b = max(start, begin), min(start + tensor.numel(), begin + parameter.numel())
            if a < b and (parameter.spec.owned or not owned):
                shards.append(_shard(kind, parameter, tensor[a - start : b - start], a - begin))
        return shards

    def frozen_shards(self) -> list[Shard]:
        """Where the weights that are not trained go, of those that this rank reads for all that hold them."""
        return [
            _shard(WEIGHT.rstrip("/"), parameter, parameter.data.view(-1), 0)
            for parameter in self.frozen
            if self._alike[parameter.spec.expert].rank == 0
        ]

    def fingerprint(self, words: int, groups: Groups) -> int:
        """A number of the frozen weights, the same in every layout, in FP32 and BF16. words: rows of the vocabulary. Collective."""
        totals = [0, 0]  # of divided experts the second
        for parameter in self.frozen:
            spec, values = parameter.spec, parameter.data
            if spec.counted:
                values = (
                    values[: max(0, words - spec.offset[0])] if spec.name in VOCABULARY else values
                )
                totals[spec.expert] += bits_number(spec.name, values)
        summed = torch.tensor(
            [[float(total % FINGERPRINTS)] for total in totals], dtype=torch.float64
        )
        for comm in (groups.etp, groups.ep):
            comm.all_reduce(summed[1])
        groups.tp.all_reduce(summed[0])
        return int(groups.pp.all_reduce(summed.sum(0)).item()) % FINGERPRINTS


def _shard(
    kind: str, parameter: FlatParameter | FrozenParameter, tensor: Tensor, first: int
) -> Shard:
    """That of a parameter's elements from number `first` on, which `tensor` (n,) holds."""
    spec = parameter.spec
    copied = (
        f"{kind}/{spec.init_name}" if spec.init_name != spec.name else None
    )  # a tied copy, not in every layout
    return Shard(
        key=f"{kind}/{spec.name}",
        tensor=tensor,
        global_shape=spec.shape,
        offset=spec.offset,
        slice_shape=tuple(parameter.shape),
        flat_start=first,
        alias=copied,
    )


def random_stream(parameter: nn.Parameter) -> int:
    """The stream of a parameter's random numbers, one for both copies of a tied weight."""
    return zlib.crc32(spec_of(parameter).init_name.encode())


def place_of(parameter: nn.Parameter, first: int) -> Place:
    """Return the place of a piece that begins at element `first` of this rank's slice."""
    spec = spec_of(parameter)
    split = spec.partition_dim or 0
    inside = math.prod(spec.shape[split + 1 :])
    offset = spec.offset[split] * inside + (
        spec.offset[0] * math.prod(spec.shape[1:]) if split else 0
    )  # of experts the first ones
    return Place(
        stream=random_stream(parameter),
        offset=offset,
        first=first,
        columns=parameter.shape[split] * inside,
        row=spec.shape[split] * inside,
    )


def initial_values(parameter: nn.Parameter, seed: int, kernels: Any) -> Tensor:
    """FP32 initial weights of this rank's slice, (parameter's shape): a function of the seed, the name and the global element."""
    return fill_initial(torch.empty(parameter.shape), parameter, seed, kernels)


def fill_initial(values: Tensor, parameter: nn.Parameter, seed: int, kernels: Any) -> Tensor:
    """Set `values` (parameter's shape, any dtype) to `initial_values`, some rows at a time; returns it."""
    spec = spec_of(parameter)
    if spec.init_std is None:
        return values.fill_(spec.init_fill)
    rows, columns = spec.shape[-2:]
    first, band = (
        spec.offset[0] * math.prod(spec.shape[1:-2]) if len(spec.shape) > 2 else 0,
        max(1, PIECE // columns),
    )
    for index, matrix in enumerate(
        values.view(-1, *values.shape[-2:]), first
    ):  # a gated linear layer has two
        for start, part in zip(count(index * rows + spec.offset[-2], band), matrix.split(band)):
            drawn = part if part.dtype == torch.float32 else torch.empty(part.shape)
            kernels.philox_normal(
                drawn,
                seed,
                random_stream(parameter),
                start,
                spec.offset[-1],
                columns,
                spec.init_std,
            )
            part.copy_(drawn)
    return values
