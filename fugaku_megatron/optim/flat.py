"""A stage's parameter memory: one flat value buffer, and gradients by bucket.

Gradients are allocated at first use, often in memory that backward has freed.
"""

from __future__ import annotations

import math
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
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
from ..costs.buckets import FLAT_ALIGNMENT, bucket_ranges
from ..costs.sizes import round_up
from ..nn.adapters import FINGERPRINTS, bits_number
from ..nn.model import VOCABULARY, Stage
from ..nn.parameter import GradientMemory, ModelParameter, Q8Weight, blocks_of, parameters_of

PIECE = 1 << 20  # elements initialised at a time
BATCH = 1 << 24  # elements of frozen weights that are loaded in FP32 before they are quantized


@dataclass(frozen=True)
class Range:
    """Elements [start, end) of the flat buffer with equal treatment."""

    start: int
    end: int
    decayed: bool
    counted: bool
    decoupled: bool = False
    balances: bool = False
    orthogonal: bool = False


@dataclass(frozen=True, kw_only=True)
class Place:
    """Global positions of a parameter's elements, independent of the layout.

    Element i is number offset + (first + i) // columns * row + (first + i) % columns.
    """

    stream: int
    offset: int
    first: int
    columns: int
    row: int

    def numbers(self, n: int) -> Tensor:
        return self.numbers_of(torch.arange(self.first, self.first + n))

    def numbers_of(self, elements: Tensor) -> Tensor:
        """Return the global numbers of elements (n,) in the rank's slice."""
        if self.row == self.columns:
            return self.offset + elements
        return self.offset + elements // self.columns * self.row + elements % self.columns


@dataclass(frozen=True)
class Bucket:
    """Elements [start, end) of the flat buffer: consecutive units' dense or expert parameters, and padding."""

    start: int
    end: int
    units: range
    expert: bool = False


class Gradients:
    """FP32 gradients by bucket. A parameter's first gradient of an iteration overwrites the memory, further ones are added.

    iteration: counts the calls of `begin`
    """

    def __init__(self, buckets: list[Bucket]) -> None:
        self._buckets = buckets
        self._memory: list[Tensor | None] = [None] * len(buckets)
        self._members: list[list[FlatParameter]] = [[] for _ in buckets]
        self.iteration = 0

    def add_member(self, parameter: FlatParameter, index: int) -> None:
        self._members[index].append(parameter)

    def begin(self, keep_memory: bool) -> None:
        """Begin an iteration. keep_memory: allocate all memory or keep it, instead of releasing it except for referenced views."""
        self.iteration += 1
        if not keep_memory:
            self._memory = [None] * len(self._buckets)
            return
        for index in range(len(self._buckets)):
            self.memory(index)

    def memory(self, index: int) -> Tensor:
        """Return a bucket's memory, allocated at first use; its padding is zeros, and parameters that have no gradient yet undefined."""
        memory = self._memory[index]
        if memory is None:
            bucket = self._buckets[index]
            memory = torch.empty(bucket.end - bucket.start)
            memory[sum(p.numel() for p in self._members[index]) :].zero_()
            self._memory[index] = memory
        return memory

    def of(self, index: int) -> Tensor:
        """Return a bucket's gradients, zeros for parameters that have none."""
        for parameter in self._members[index]:
            parameter.begin_main_grad()
        return self.memory(index)

    def find(self, tensor: Tensor) -> int | None:
        """Return the flat-buffer element whose gradient is the first of `tensor`, or None."""
        for bucket, memory in zip(self._buckets, self._memory, strict=True):
            if memory is not None and (offset := _offset(tensor, memory)) is not None:
                return bucket.start + offset
        return None


def _offset(view: Tensor, memory: Tensor) -> int | None:
    offset = view.data_ptr() - memory.data_ptr()
    return offset // memory.element_size() if 0 <= offset < memory.nbytes else None


class FlatParameter(ModelParameter):
    """A trained parameter: a view into the flat buffer of values."""

    def place(self, gradients: Gradients, bucket: int, start: int) -> FlatParameter:
        self._gradients = gradients
        self._bucket = bucket
        self._start = start
        self._begun = -1  # the iteration of the last gradient
        gradients.add_member(self, bucket)
        return self

    @property
    def main_grad(self) -> Tensor:
        """FP32 gradients in the parameter's shape, a view that is valid for one iteration."""
        self.begin_main_grad()
        return self._view()

    def begin_main_grad(self) -> None:
        """Set the gradient to zeros if the iteration has none yet."""
        gradient = self.take_main_grad()
        if gradient.overwrite:
            gradient.values.zero_()

    def take_main_grad(self) -> GradientMemory:
        """Return the memory of `main_grad`; the first call of an iteration obliges the caller to overwrite all of it."""
        iteration = self._gradients.iteration
        overwrite = self._begun != iteration
        self._begun = iteration
        return GradientMemory(self._view(), overwrite)

    def _view(self) -> Tensor:
        bucket = self._gradients.memory(self._bucket)
        return bucket[self._start : self._start + self.numel()].view(self.shape)


class FrozenParameter(ModelParameter):
    """A parameter that is not trained. scales: for a weight in eight bits."""

    frozen = True
    main_grad = None
    scales: Tensor | None = None

    @property
    def q8(self) -> Q8Weight:
        assert self.scales is not None
        return Q8Weight(self.data, self.scales)


def stage_units(stage: Stage) -> list[list[ModelParameter]]:
    tied = [] if stage.tied_copy is None else [stage.tied_copy]
    units = [
        [p for p in _trained(module) if not any(p is t for t in tied)]
        for module in unit_modules(stage)
    ]
    if stage.last and not stage.tied and not stage.last.output_weight.spec.frozen:
        units[0].append(stage.last.output_weight)
    return [*units, tied] if tied else units


def _trained(module: nn.Module) -> list[ModelParameter]:
    return [p for p in parameters_of(module) if not p.spec.frozen]


def unit_modules(stage: Stage) -> list[nn.Module]:
    """Return a stage's unit modules: final norm (with an untied output weight), MTP modules, layers, embeddings."""
    modules: list[nn.Module] = []
    if stage.last:
        modules.append(stage.last.final_layernorm)
    for model_chunk in reversed(list(stage.chunks)):
        modules += reversed([*model_chunk.layers, *model_chunk.predictions])
    if stage.first:
        modules.append(stage.first.embedding)
    return modules


def _order(matrices_first: bool, parameter: ModelParameter) -> tuple[bool, bool, bool, bool]:
    """Return a sort key that is equal on all tensor-parallel ranks: ZeRO-1 cuts replicated parameters alike."""
    spec = parameter.spec
    return (
        matrices_first and not spec.orthogonal,
        not spec.decayed,
        spec.partition_dim is None,
        spec.init_name != spec.name,
    )


class FlatParameters:
    """Parameter memory: flat `values` in the model's dtype, and `gradients`, in buckets padded for ZeRO-1 shards.

    Construction turns every parameter into a FlatParameter or FrozenParameter with initial weights. A node's ranks share
    `frozen_memory`: dense, experts, then values and scales in eight bits of both.

    alike: ranks with the same dense parameters, ranks with the same experts
    minimum: bucket size, see `costs.buckets.bucket_ranges`; None: one bucket, and `stage` may be any module
    """

    def __init__(
        self,
        stage: Stage | nn.Module,
        dtype: torch.dtype,
        seed: int,
        kernels: Any,
        alike: tuple[Comm, Comm] = (ALONE, ALONE),
        minimum: int | None = None,
        matrices_first: bool = False,
    ) -> None:
        self._matrices_first = matrices_first
        self._alike = alike
        self.starts: list[int] = []
        self.buckets: list[Bucket] = []
        declared = self._lay_out(
            stage, (alike[0].size * FLAT_ALIGNMENT, alike[1].size * FLAT_ALIGNMENT), minimum
        )
        self.numel = self.buckets[-1].end if self.buckets else 0
        self.values = torch.zeros(self.numel, dtype=dtype)
        self.gradients = Gradients(self.buckets)
        self._seed = seed
        self._kernels = kernels
        self._quantized_bits = [0, 0]  # of frozen weights in eight bits, dense and experts
        self.parameters = self._replace(stage, declared)

    def _lay_out(
        self, stage: Stage | nn.Module, paddings: tuple[int, int], minimum: int | None
    ) -> list[ModelParameter]:
        if minimum is not None and isinstance(stage, Stage):
            units = stage_units(stage)
            tied = stage.tied_copy is not None
        else:
            units = [_trained(stage)]
            tied = False
        parameters: list[ModelParameter] = []
        end = 0
        for bucket in bucket_ranges(
            [sum(p.numel() for p in unit) for unit in units], minimum or 1, tied
        ):
            members = [p for i in bucket for p in units[i]]
            members.sort(key=partial(_order, self._matrices_first))
            for expert, padding in enumerate(paddings):
                kind = [p for p in members if p.spec.expert == bool(expert)]
                if not kind:
                    continue
                start = end
                self.starts += accumulate((p.numel() for p in kind[:-1]), initial=start)
                end = start + round_up(sum(p.numel() for p in kind), padding)
                parameters += kind
                self.buckets.append(Bucket(start, end, bucket, expert=bool(expert)))
        return parameters

    def ranges(self, start: int, end: int) -> list[Range]:
        """Return the ranges inside elements [start, end), counted from `start`, without padding."""
        merged: list[Range] = []
        for r, _ in self.pieces(start, end):
            if merged and merged[-1] == replace(r, start=merged[-1].start, end=r.start):
                r = replace(r, start=merged.pop().start)
            merged.append(r)
        return merged

    def pieces(self, start: int, end: int) -> list[tuple[Range, Place]]:
        """Return each parameter's range in elements [start, end), counted from `start`, and its global place."""
        pieces = []
        for parameter, begin, first, last in self.overlaps(start, end):
            spec = parameter.spec
            piece = Range(
                begin + first - start,
                begin + last - start,
                decayed=spec.decayed,
                counted=spec.counted,
                decoupled=spec.decoupled,
                balances=spec.balances,
                orthogonal=self._matrices_first and spec.orthogonal,
            )
            pieces.append((piece, place_of(parameter, first)))
        return pieces

    def overlaps(self, start: int, end: int) -> Iterator[tuple[FlatParameter, int, int, int]]:
        """Yield (parameter, its start, first, last): [first, last) are its elements inside [start, end)."""
        for index in range(max(0, bisect_right(self.starts, start) - 1), len(self.starts)):
            parameter = self.parameters[index]
            begin = self.starts[index]
            if begin >= end:
                return
            first = max(0, start - begin)
            last = min(parameter.numel(), end - begin)
            if first < last:
                yield parameter, begin, first, last

    def _replace(self, stage: nn.Module, declared: list[ModelParameter]) -> list[FlatParameter]:
        new: dict[nn.Parameter, FlatParameter] = {}
        bucket_starts = [bucket.start for bucket in self.buckets]
        for old, start in zip(declared, self.starts, strict=True):
            bucket = bisect_right(bucket_starts, start) - 1
            values = self.values[start : start + old.numel()].view(old.shape)
            new[old] = FlatParameter(values).place(
                self.gradients, bucket, start - bucket_starts[bucket]
            )
            new[old].spec = old.spec
            fill_initial(new[old].data, new[old], self._seed, self._kernels)
        frozen = self._freeze([p for p in parameters_of(stage) if p.spec.frozen])
        self.frozen = [*frozen.values()]
        for module in stage.modules():
            for name, own in list(module.named_parameters(recurse=False)):
                setattr(module, name, frozen[own] if own in frozen else new[own])
        return [new[old] for old in declared]

    def _freeze(self, declared: list[ModelParameter]) -> dict[nn.Parameter, FrozenParameter]:
        self.frozen_memory: list[NodeTensor] = []
        new: dict[nn.Parameter, FrozenParameter] = {}
        kinds = [[p for p in declared if p.spec.expert == bool(i)] for i in (0, 1)]
        for kind, comm in zip(kinds, self._alike, strict=True):
            plain = [p for p in kind if not p.spec.quantized]
            shared = self._share(comm, [p.shape for p in plain], self.values.dtype)
            for old, values in zip(plain, shared, strict=True):
                new[old] = _frozen(old, values)
        for kind, comm in zip(kinds, self._alike, strict=True):
            quantized = [p for p in kind if p.spec.quantized]
            shared = self._share(comm, [p.shape for p in quantized], torch.int8)
            scales = self._share(comm, [_scales_shape(p) for p in quantized], torch.bfloat16)
            for old, values, factors in zip(quantized, shared, scales, strict=True):
                new[old] = _frozen(old, values)
                new[old].scales = factors
        dense, experts, *quantized_memory = self.frozen_memory
        for kind, memories in zip(
            kinds,
            ((dense, *quantized_memory[:2]), (experts, *quantized_memory[2:])),
            strict=True,
        ):
            if all(memory.writes for memory in memories):
                for old in kind:
                    self._fill_frozen(new[old])
            for memory in memories:
                memory.written()
        return new

    def _share(
        self, comm: Comm, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype
    ) -> list[Tensor]:
        """Allocate tensors, one copy for a node's ranks. Collective."""
        sizes = [math.prod(shape) for shape in shapes]
        memory = NodeTensor(comm, sum(sizes), dtype)
        self.frozen_memory.append(memory)
        parts = memory.values.split(sizes) if sizes else ()
        return [values.view(shape) for values, shape in zip(parts, shapes, strict=True)]

    def _fill_frozen(self, parameter: FrozenParameter) -> None:
        if parameter.scales is None:
            fill_initial(parameter.data, parameter, self._seed, self._kernels)
        else:
            parameter.q8.quantize(initial_values(parameter, self._seed, self._kernels))

    def initial_shard(self, start: int, end: int) -> Tensor:
        """Return the FP32 initial weights of elements [start, end), not rounded."""
        shard = torch.zeros(end - start)
        for parameter, begin, first, last in self.overlaps(start, end):
            initial = initial_values(parameter, self._seed, self._kernels).flatten()
            shard[begin + first - start : begin + last - start] = initial[first:last]
        return shard

    def shards(self, kind: str, tensor: Tensor, start: int, owned: bool) -> list[Shard]:
        """Return the checkpoint records for `tensor`, elements from `start` on in a flat buffer.

        owned: skip replicated parameters except on the first tensor-parallel rank
        """
        return [
            _shard(kind, parameter, tensor[begin + first - start : begin + last - start], first)
            for parameter, begin, first, last in self.overlaps(start, start + tensor.numel())
            if parameter.spec.owned or not owned
        ]

    def frozen_shards(self, owned: bool) -> list[Shard]:
        """Return the checkpoint records for frozen weights, on the first of the ranks that have the same ones. owned: as in `shards`"""
        return [
            _weight_shard(p, p.data)
            for p in self.frozen
            if self._alike[p.spec.expert].rank == 0 and (p.spec.owned or not owned)
        ]

    def broadcast_frozen(self) -> None:
        """Broadcast the frozen weights from the ranks that read them. Collective."""
        for memory in self.frozen_memory:
            memory.broadcast()

    def fill_frozen(self, fill: Callable[[list[Shard]], object], world: Comm) -> None:
        """Load the frozen weights, those in eight bits in batches of FP32 tensors that are then quantized. Collective.

        fill: reads the tensors of checkpoint records, on all ranks of `world` together
        """
        read = [p for p in self.frozen if self._alike[p.spec.expert].rank == 0]
        fill([_weight_shard(p, p.data) for p in read if p.scales is None])
        batches = _batches([p for p in read if p.scales is not None])
        count = int(world.all_reduce(torch.tensor(len(batches)), "max"))
        totals = [0, 0]  # dense, experts
        for batch in [*batches, *[[]] * (count - len(batches))]:
            numbers = [torch.empty(p.shape) for p in batch]
            fill([_weight_shard(p, x) for p, x in zip(batch, numbers, strict=True)])
            for parameter, x in zip(batch, numbers, strict=True):
                parameter.q8.quantize(x)
                if parameter.spec.counted:
                    totals[int(parameter.spec.expert)] += bits_number(parameter.spec.name, x)
        bits = torch.tensor([total % FINGERPRINTS for total in totals])
        for expert, comm in enumerate(self._alike):
            comm.broadcast(bits[expert : expert + 1])
        self._quantized_bits = bits.tolist()
        self.broadcast_frozen()

    def fingerprint(self, words: int, groups: Groups) -> int:
        """Return a hash of the frozen weights as they were loaded, equal in every layout and dtype. Collective.

        words: unpadded vocabulary rows
        """
        totals = [*self._quantized_bits]  # dense, experts
        for parameter in self.frozen:
            spec = parameter.spec
            values = parameter.data
            if spec.counted and parameter.scales is None:
                if spec.name in VOCABULARY:
                    values = values[: max(0, words - spec.offset[0])]
                totals[int(spec.expert)] += bits_number(spec.name, values)
        summed = torch.tensor(
            [[float(total % FINGERPRINTS)] for total in totals], dtype=torch.float64
        )
        for comm in (groups.etp, groups.ep):
            comm.all_reduce(summed[1])
        groups.tp.all_reduce(summed[0])
        return int(groups.pp.all_reduce(summed.sum(0)).item()) % FINGERPRINTS


def _frozen(declared: ModelParameter, values: Tensor) -> FrozenParameter:
    parameter = FrozenParameter(values, requires_grad=False)
    parameter.spec = declared.spec
    return parameter


def _scales_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    return (*parameter.shape[:-1], blocks_of(parameter.shape[-1]))


def _batches(parameters: list[FrozenParameter]) -> list[list[FrozenParameter]]:
    batches: list[list[FrozenParameter]] = []
    room = 0
    for parameter in parameters:
        if not batches or parameter.numel() > room:
            batches.append([])
            room = BATCH
        batches[-1].append(parameter)
        room -= parameter.numel()
    return batches


def _weight_shard(parameter: FrozenParameter, tensor: Tensor) -> Shard:
    return _shard(WEIGHT.rstrip("/"), parameter, tensor.view(-1), 0)


def _shard(
    kind: str, parameter: FlatParameter | FrozenParameter, tensor: Tensor, first: int
) -> Shard:
    spec = parameter.spec
    alias = None
    if spec.init_name != spec.name:  # a tied copy, which not every layout has
        alias = f"{kind}/{spec.init_name}"
    return Shard(
        key=f"{kind}/{spec.name}",
        tensor=tensor,
        global_shape=spec.shape,
        offset=spec.offset,
        slice_shape=tuple(parameter.shape),
        flat_start=first,
        alias=alias,
    )


def random_stream(parameter: ModelParameter) -> int:
    return zlib.crc32(parameter.spec.init_name.encode())


def place_of(parameter: ModelParameter, first: int) -> Place:
    """Return the global place of a parameter's elements from `first` on."""
    spec = parameter.spec
    split = spec.partition_dim or 0
    inside = math.prod(spec.shape[split + 1 :])
    offset = spec.offset[split] * inside
    if split:  # experts are sharded in dimension 0 too
        offset += spec.offset[0] * math.prod(spec.shape[1:])
    return Place(
        stream=random_stream(parameter),
        offset=offset,
        first=first,
        columns=parameter.shape[split] * inside,
        row=spec.shape[split] * inside,
    )


def initial_values(parameter: ModelParameter, seed: int, kernels: Any) -> Tensor:
    """Return this rank's FP32 initial weights, a function of seed, name and global position."""
    return fill_initial(torch.empty(parameter.shape), parameter, seed, kernels)


def fill_initial(values: Tensor, parameter: ModelParameter, seed: int, kernels: Any) -> Tensor:
    """Set `values` (any dtype) to `initial_values`, by pieces."""
    spec = parameter.spec
    if spec.log_range is not None:
        return values.copy_(_log_uniform(parameter, seed, kernels))
    if spec.init_std is None:
        return values.fill_(spec.init_fill)
    rows, columns = (1, *spec.shape)[-2:]  # a vector is one row
    band = max(1, PIECE // columns)
    first = 0
    if len(spec.shape) > 2:
        first = spec.offset[0] * math.prod(spec.shape[1:-2])
    first_row = (0, *spec.offset)[-2]
    own_rows, own_columns = (1, *values.shape)[-2:]
    for index, matrix in enumerate(values.view(-1, own_rows, own_columns), first):
        for start, block in zip(count(index * rows + first_row, band), matrix.split(band)):
            drawn = block if block.dtype == torch.float32 else torch.empty(block.shape)
            kernels.philox_normal(
                drawn,
                seed,
                random_stream(parameter),
                start,
                spec.offset[-1],
                columns,
                spec.init_std,
            )
            block.copy_(drawn)
    return values


def _log_uniform(parameter: ModelParameter, seed: int, kernels: Any) -> Tensor:
    """Return logarithms (n,) of uniform numbers in `spec.log_range`."""
    spec = parameter.spec
    assert spec.log_range is not None
    low, high = spec.log_range
    normal = torch.empty(1, len(parameter))
    stream = random_stream(parameter)
    kernels.philox_normal(normal, seed, stream, 0, spec.offset[0], spec.shape[0], 1.0)
    return torch.log(low + (high - low) * torch.special.ndtr(normal[0]))
