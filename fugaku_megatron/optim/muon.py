"""Muon: orthogonalised momentum updates of weight matrices."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..comm.base import Comm
from ..comm.grid import Groups
from ..config.run_config import ModelConfig, OptimizerConfig, RunConfig
from ..nn.parameter import ParameterSpec
from .buckets import BucketComm
from .flat import Bucket, FlatParameter, FlatParameters

# (a, b, c) of x <- a x + (b A + c A^2) x with A = x x^T, one after another, and after the last one from the first again, as the
# library that Megatron-LM uses does (emerging_optimizers 0.2 and newer). Quintic: coefficients that grow small singular values fast,
# by Jordan et al. and their followers; simple: those of Muon's first version.
COEFFICIENTS = {
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "simple": ((3.4445, -4.7750, 2.0315),),
}


SCALES = {
    "spectral": lambda rows, columns: math.sqrt(max(rows, columns)),
    "unit_rms_norm": lambda rows, columns: math.sqrt(rows / columns),
    "shape_scaling": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
}


NORM_EPS = 1e-7


def orthogonalized(
    matrix: Tensor, coefficients: tuple[tuple[float, float, float], ...], steps: int, kernels: Any
) -> Tensor:
    """A matrix (rows, columns) in FP32 with the singular vectors of `matrix` and singular values near 1."""
    wide = matrix.shape[0] <= matrix.shape[1]
    x = (matrix if wide else matrix.T).contiguous()
    x = x / max(math.sqrt(kernels.squared_norm(x.flatten())), NORM_EPS)
    gram, square = (x.new_empty(len(x), len(x)) for _ in range(2))
    moved = torch.empty_like(x)
    for step in range(steps):
        a, b, c = coefficients[step % len(coefficients)]
        kernels.linear_forward(x, x, gram)
        kernels.linear_forward(gram, gram, square)  # gram is symmetric
        kernels.linear_data_gradient(gram.mul_(b).add_(square, alpha=c), x, moved)
        x, moved = moved.add_(x, alpha=a), x
    return x if wide else x.T


def parts_of(
    whole: Tensor, spec: ParameterSpec, model: ModelConfig, split_qkv: bool
) -> Iterator[Tensor]:
    """Views (k, rows, columns) of a weight, each of which is one matrix (k rows, columns): both halves of a gated layer are one.

    whole: the weight or a tensor-parallel rank's part of it, in the parameter's dimensions.
    """
    if spec.name.endswith("linear_qkv.weight") and split_qkv:
        d, group = model.kv_channels, model.num_attention_heads // model.query_groups
        heads = whole.view(-1, (group + 2) * d, whole.shape[-1])
        yield from heads.split((group * d, d, d), dim=1)
    elif ".experts." in spec.name:
        yield from whole.view(len(whole), 1, -1, whole.shape[-1])
    else:
        yield whole.view(1, -1, whole.shape[-1])


class Muon:
    """Orthogonal updates of a rank's buckets."""

    def __init__(
        self,
        flat: FlatParameters,
        buckets: BucketComm,
        run: RunConfig,
        groups: Groups,
        kernels: Any,
    ) -> None:
        self.config: OptimizerConfig = run.optimizer
        self.model, self.flat, self.buckets, self.kernels = run.model, flat, buckets, kernels
        self.tp: Comm | None = (
            groups.tp if groups.tp.size > 1 and self.config.muon_tp_mode != "blockwise" else None
        )
        self.dp = groups.dp
        self._own = [self._share(bucket) for bucket in flat.buckets]

    def _share(self, bucket: Bucket) -> list[tuple[FlatParameter, int]] | None:
        """This rank's share of a bucket's matrices with their places in it, of about the same cost for all; None without any.

        The same on all tensor-parallel ranks, which compute a matrix at the same time.
        """
        there = [
            (p, start - bucket.start)
            for p, start in zip(self.flat.parameters, self.flat.starts, strict=True)
            if p.spec.orthogonal and bucket.start <= start < bucket.end
        ]
        costs, own = [0.0] * self.dp.size, []
        for parameter, start in sorted(there, key=lambda each: -_cost(each[0])):
            rank = costs.index(min(costs))
            costs[rank] += _cost(parameter)
            own += [(parameter, start)] * (rank == self.dp.rank)
        return own if there else None

    def updates(self, index: int, own: Tensor) -> Tensor | None:
        """What weights of this rank's part of a bucket move by at a learning rate of -1, (n,); None without matrices. Collective.

        own: the part's momentum (n,), with anything where no matrix is.
        """
        share, bucket = self._own[index], self.flat.buckets[index]
        if share is None:
            return None
        whole, result = own, torch.zeros(bucket.end - bucket.start)
        if self.buckets.sharded and self.dp.size > 1:
            self.dp.all_gather(whole := torch.empty_like(result), own)
        for parameter, start in share:
            at = slice(start, start + parameter.numel())
            result[at].view(parameter.shape).copy_(
                self._orthogonal(parameter.spec, whole[at].view(parameter.shape))
            )
        if self.dp.size == 1:
            return result
        if not self.buckets.sharded:
            return self.dp.all_reduce(result)
        first, last = self.buckets.part(bucket)
        self.dp.reduce_scatter(part := result[first - bucket.start : last - bucket.start], result)
        return part

    def _orthogonal(self, spec: ParameterSpec, own: Tensor) -> Tensor:
        """The scaled update of this tensor-parallel rank's part of a weight, of its shape."""
        whole, tp, dim = own, self.tp, spec.partition_dim
        if tp and dim is not None:
            gathered = tp.all_gather(own.new_empty(tp.size, *own.shape), own.contiguous())
            whole = torch.cat(list(gathered), dim)
        result = torch.empty_like(whole)
        sources, targets = (
            parts_of(each, spec, self.model, not self.config.muon_no_split_qkv)
            for each in (whole, result)
        )
        for source, target in zip(sources, targets, strict=True):
            matrix = source.reshape(-1, source.shape[-1])
            target.copy_(self._scaled(matrix, spec, own.shape, whole.shape).view(target.shape))
        return result if tp is None or dim is None else result.chunk(tp.size, dim)[tp.rank]

    def _scaled(
        self, matrix: Tensor, spec: ParameterSpec, own: torch.Size, whole: torch.Size
    ) -> Tensor:
        """One matrix's update. Its scale is that of the whole matrix, also where a rank has a part of it."""
        config = self.config
        parts = (
            1
            if spec.partition_dim is None
            else spec.shape[spec.partition_dim] // whole[spec.partition_dim]
        )
        by_rows = spec.partition_dim is not None and spec.partition_dim < len(own) - 1
        rows, columns = (
            matrix.shape[0] * (parts if by_rows else 1),
            matrix.shape[1] * (1 if by_rows else parts),
        )
        update = orthogonalized(
            matrix,
            COEFFICIENTS[config.muon_coefficient_type],
            config.muon_num_ns_steps,
            self.kernels,
        )
        return update * (
            SCALES[config.muon_scale_mode](rows, columns) * config.muon_extra_scale_factor
        )


def _cost(parameter: FlatParameter) -> float:
    """About the FLOPs of one iteration of a weight, up to a factor."""
    small, large = sorted((parameter.numel() // parameter.shape[-1], parameter.shape[-1]))
    return float(small * small * large)
