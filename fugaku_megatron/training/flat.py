"""Memory of a stage's parameters: one flat buffer of values and one of gradients.

Weight-decayed parameters lie first, so that an update is a few calls on long ranges and a ZeRO-1 shard is a slice.
Left out: the update (`optim`), files (`checkpoint`). Test: pytest tests/test_optim.py
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.shards import Shard
from ..run.accounting import FLAT_ALIGNMENT, round_up


@dataclass(frozen=True)
class Range:
    """Elements [start, end) of the flat buffer that are treated alike."""

    start: int
    end: int
    decayed: bool
    counted: bool


def _order(parameter: nn.Parameter) -> tuple[bool, bool, bool]:
    """The same on all tensor-parallel ranks, so that their ZeRO-1 shards cut a replicated parameter at the same elements."""
    return parameter.dim() < 2, parameter.spec.partition_dim is None, parameter.spec.init_name != parameter.spec.name


def _merge(ranges: list[Range]) -> list[Range]:
    merged: list[Range] = []
    for r in ranges:
        last = merged[-1] if merged else None
        if last and (last.decayed, last.counted, last.end) == (r.decayed, r.counted, r.start):
            merged[-1] = Range(last.start, r.end, r.decayed, r.counted)
        else:
            merged.append(r)
    return merged


class FlatParameters:
    """Memory of a stage's parameters: `values` (the model's dtype) and `grads` (FP32), both flat and padded for `shards` ranks.

    After construction every parameter of the stage is a view into `values`, holds its initial weights and has `.main_grad`.
    """

    def __init__(self, stage: nn.Module, dtype: torch.dtype, seed: int, shards: int, kernels: Any) -> None:
        self.parameters = sorted(stage.parameters(), key=_order)
        ends = torch.tensor([p.numel() for p in self.parameters]).cumsum(0).tolist()
        self.starts = [0, *ends[:-1]]
        self.numel = round_up(ends[-1], shards * FLAT_ALIGNMENT)
        self.values = torch.zeros(self.numel, dtype=dtype)
        self.grads = torch.zeros(self.numel)
        self.shard_numel = self.numel // shards
        self.ranges = _merge([Range(start, end, p.dim() > 1, p.spec.counted)
                              for start, end, p in zip(self.starts, ends, self.parameters, strict=True)])
        self._seed, self._kernels = seed, kernels
        self._replace(stage)

    def _view(self, flat: Tensor, index: int) -> Tensor:
        parameter, start = self.parameters[index], self.starts[index]
        return flat[start : start + parameter.numel()].view(parameter.shape)

    def _replace(self, stage: nn.Module) -> None:
        """Swap the meta parameters for views into the flat buffer, which have the same `spec`."""
        new = {}
        for index, old in enumerate(self.parameters):
            new[old] = nn.Parameter(self._view(self.values, index))
            new[old].spec = old.spec
            new[old].main_grad = self._view(self.grads, index)
            new[old].data.copy_(initial_values(new[old], self._seed, self._kernels))
        for module in stage.modules():
            for name, old in list(module.named_parameters(recurse=False)):
                setattr(module, name, new[old])
        self.parameters = [new[old] for old in self.parameters]

    def initial_shard(self, start: int, end: int) -> Tensor:
        """FP32 initial weights of elements [start, end), not rounded to the model's dtype."""
        shard = torch.zeros(end - start)
        for parameter, begin in zip(self.parameters, self.starts, strict=True):
            a, b = max(start, begin), min(end, begin + parameter.numel())
            if a < b:
                shard[a - start : b - start] = initial_values(parameter, self._seed, self._kernels).flatten()[a - begin : b - begin]
        return shard

    def shards(self, kind: str, tensor: Tensor, start: int, owned: bool) -> list[Shard]:
        """Checkpoint records of `tensor`, which holds elements [start, start + numel) of a flat buffer of this layout.

        `owned`: without parameters that the first tensor-parallel rank holds as well.
        """
        shards = []
        for parameter, begin in zip(self.parameters, self.starts, strict=True):
            a, b = max(start, begin), min(start + tensor.numel(), begin + parameter.numel())
            if a < b and (parameter.spec.owned or not owned):
                spec = parameter.spec
                shards.append(Shard(key=f"{kind}/{spec.name}", tensor=tensor[a - start : b - start], global_shape=spec.shape,
                                    offset=spec.offset, slice_shape=tuple(parameter.shape), flat_start=a - begin))
        return shards


def initial_values(parameter: nn.Parameter, seed: int, kernels: Any) -> Tensor:
    """FP32 initial weights of this rank's slice, (parameter's shape): a function of the seed, the name and the global element."""
    spec, values = parameter.spec, torch.full(tuple(parameter.shape), parameter.spec.init_fill, dtype=torch.float32)
    if spec.init_std is not None:
        assert parameter.dim() == 2
        kernels.philox_normal(values, seed, zlib.crc32(spec.init_name.encode()), *spec.offset, spec.shape[1], spec.init_std)
    return values
