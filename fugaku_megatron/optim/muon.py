"""Muon: orthogonalised momentum updates for weight matrices."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..comm.grid import Groups
from ..config.model import ModelConfig
from ..config.run_config import RunConfig
from ..nn.parameter import ParameterSpec
from .buckets import BucketComm, BucketShard, StepFactors
from .flat import Bucket, FlatParameter, FlatParameters

# Newton-Schulz iteration x <- a x + (b A + c A^2) x with A = x x^T; steps cycle through the rows (a, b, c), as in
# emerging_optimizers >= 0.2, which Megatron-LM uses. simple: coefficients of the first version of Muon.
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
    """Return an FP32 matrix with the singular vectors of `matrix` and singular values near 1."""
    wide = matrix.shape[0] <= matrix.shape[1]
    x = (matrix if wide else matrix.T).contiguous()
    x = x / max(math.sqrt(kernels.squared_norm(x.flatten())), NORM_EPS)
    gram = x.new_empty(len(x), len(x))
    square = x.new_empty(len(x), len(x))
    moved = torch.empty_like(x)
    for step in range(steps):
        a, b, c = coefficients[step % len(coefficients)]
        kernels.linear_forward(x, x, gram)
        kernels.linear_forward(gram, gram, square)  # gram is symmetric
        kernels.linear_data_gradient(gram.mul_(b).add_(square, alpha=c), x, moved)
        x, moved = moved.add_(x, alpha=a), x
    return x if wide else x.T


def matrices_of(
    weight: Tensor, spec: ParameterSpec, model: ModelConfig, split_qkv: bool
) -> Iterator[Tensor]:
    """Yield views (k, rows, columns) of a weight or tensor-parallel shard; each view is one matrix (k rows, columns)."""
    if spec.name.endswith("linear_qkv.weight") and split_qkv:
        d = model.kv_channels
        group = model.num_attention_heads // model.query_groups
        sizes = (*(group * d for _ in range(model.query_widths)), d, d)
        yield from weight.view(-1, sum(sizes), weight.shape[-1]).split(sizes, dim=1)
    elif _in_experts(spec):
        yield from weight.view(len(weight), 1, -1, weight.shape[-1])
    else:
        yield weight.view(1, -1, weight.shape[-1])


def _in_experts(spec: ParameterSpec) -> bool:
    return ".experts." in spec.name


class Muon:
    """Momentum and orthogonal updates for the weight matrices in a rank's buckets.

    shards, expert_shards: equal shards of this rank's weights, each of which is orthogonalized alone
    """

    def __init__(
        self,
        flat: FlatParameters,
        buckets: BucketComm,
        run: RunConfig,
        groups: Groups,
        kernels: Any,
    ) -> None:
        self.config = run.optimizer
        self.model = run.model
        self.flat = flat
        self.buckets = buckets
        self.kernels = kernels
        self.groups = groups
        self.shards = 1
        self.expert_shards = 1
        self._assigned = [self._assign(bucket) for bucket in flat.buckets]

    def update_as(self, tp: int, etp: int) -> None:
        """Compute the updates of `tp` tensor-parallel ranks, of which `etp` share an expert, on one rank.

        With --muon-tp-mode blockwise they depend on the shards.
        """
        if self.config.muon_tp_mode == "blockwise":
            self.shards = tp
            self.expert_shards = etp

    def _assign(self, bucket: Bucket) -> list[tuple[FlatParameter, int]] | None:
        """Return this rank's matrices in a bucket, with their starts and balanced by cost; tensor-parallel ranks get the same."""
        matrices = [
            (p, start - bucket.start)
            for p, start in zip(self.flat.parameters, self.flat.starts, strict=True)
            if p.spec.orthogonal and bucket.start <= start < bucket.end
        ]
        if not matrices:
            return None
        replicas = self.buckets.replicas(bucket)
        costs = [0.0 for _ in range(replicas.size)]
        own = []
        for parameter, start in sorted(matrices, key=lambda each: -_cost(each[0])):
            rank = costs.index(min(costs))
            costs[rank] += _cost(parameter)
            if rank == replicas.rank:
                own.append((parameter, start))
        return own

    def step(self, index: int, shard: BucketShard, grads: Tensor, factors: StepFactors) -> None:
        """Update the matrices in this rank's shard of bucket `index`. Collective."""
        config = self.config
        at = slice(0, shard.orthogonal)
        own = torch.zeros(len(shard.master))
        grad = grads[at] * factors.grad_scale
        momentum = shard.exp_avg[at].float().lerp_(grad, 1.0 - config.muon_momentum)
        own[at] = momentum
        shard.exp_avg[at] = momentum
        if config.muon_nesterov:
            own[at] = grad.lerp_(momentum, config.muon_momentum)
        updates = self._updates(index, own)
        if updates is None:
            return
        shard.master[at].mul_(1.0 - factors.lr * factors.weight_decay).sub_(
            updates[at], alpha=factors.lr
        )
        shard.round_weights(at)

    def _updates(self, index: int, momentum: Tensor) -> Tensor | None:
        """Return this rank's updates (n,) from its momentum (n,), or None. Collective."""
        assigned = self._assigned[index]
        bucket = self.flat.buckets[index]
        if assigned is None:
            return None
        replicas = self.buckets.replicas(bucket)
        result = torch.zeros(bucket.end - bucket.start)
        if self.buckets.sharded and replicas.size > 1:
            gathered = torch.empty_like(result)
            replicas.all_gather(gathered, momentum)
            momentum = gathered
        for parameter, start in assigned:
            at = slice(start, start + parameter.numel())
            result[at].view(parameter.shape).copy_(
                self._orthogonal(parameter.spec, momentum[at].view(parameter.shape))
            )
        if replicas.size == 1:
            return result
        if not self.buckets.sharded:
            return replicas.all_reduce(result)
        first, last = self.buckets.shard(bucket)
        own = result[first - bucket.start : last - bucket.start]
        replicas.reduce_scatter(own, result)
        return own

    def _orthogonal(self, spec: ParameterSpec, own: Tensor) -> Tensor:
        dim = spec.partition_dim
        if dim is None:
            return self._whole(spec, own)
        tp = self.groups.etp if spec.expert else self.groups.tp
        if tp.size == 1 or self.config.muon_tp_mode == "blockwise":
            shards = own.chunk(self.expert_shards if _in_experts(spec) else self.shards, dim)
            return torch.cat([self._whole(spec, each.contiguous()) for each in shards], dim)
        gathered = tp.all_gather(own.new_empty(tp.size, *own.shape), own.contiguous())
        return self._whole(spec, torch.cat(list(gathered), dim)).chunk(tp.size, dim)[tp.rank]

    def _whole(self, spec: ParameterSpec, weight: Tensor) -> Tensor:
        """Return the updates of a weight's matrices."""
        result = torch.empty_like(weight)
        sources, targets = (
            matrices_of(each, spec, model=self.model, split_qkv=not self.config.muon_no_split_qkv)
            for each in (weight, result)
        )
        for source, target in zip(sources, targets, strict=True):
            matrix = source.reshape(-1, source.shape[-1])
            target.copy_(self._scaled(matrix, spec, weight.shape).view(target.shape))
        return result

    def _scaled(self, matrix: Tensor, spec: ParameterSpec, shape: torch.Size) -> Tensor:
        """Return a matrix's update, scaled by the global sizes."""
        config = self.config
        rows, columns = matrix.shape
        dim = spec.partition_dim
        if dim is not None:
            ranks = spec.shape[dim] // shape[dim]
            if dim < len(shape) - 1:
                rows *= ranks
            else:
                columns *= ranks
        update = orthogonalized(
            matrix,
            COEFFICIENTS[config.muon_coefficient_type],
            steps=config.muon_num_ns_steps,
            kernels=self.kernels,
        )
        return update * (
            SCALES[config.muon_scale_mode](rows, columns) * config.muon_extra_scale_factor
        )


def _cost(parameter: FlatParameter) -> float:
    small, large = sorted((parameter.numel() // parameter.shape[-1], parameter.shape[-1]))
    return float(small * small * large)
