"""AdamW on flat buffers: gradient reduction, clipping, loss scale, ZeRO-1.

Left out: the buffers (`flat`), tied-embedding gradients (`train`), files (`checkpoint`). Test: pytest tests/test_optim.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..checkpoint.shards import Shard
from ..comm.grid import Groups
from ..nn.ops import Ops
from ..run.config import RunConfig
from .flat import FlatParameters
from .loss_scaler import LossScaler

PARAMETER_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}  # by PrecisionConfig.name


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step found: gradient norm (before clipping), zeros among the gradients, and whether it was skipped."""

    grad_norm: float
    num_zeros: float
    skipped: bool


class Optimizer:
    """AdamW over this rank's shard (ZeRO-1) or all of its flat buffer. ops: runs its kernels, and is told of new weights.

    Gradients come in as sums whose mean is taken by the loss's factor, times the loss scale; `step` reduces, unscales, clips,
    updates and, with ZeRO-1, gathers the weights.
    """

    def __init__(self, stage: nn.Module, run: RunConfig, groups: Groups, ops: Ops) -> None:
        self.run, self.groups, self.ops, self.config = run, groups, ops, run.optimizer
        self.sharded = run.parallel.zero_stage == 1
        dtype, fp32 = PARAMETER_DTYPES[run.precision.name], run.precision.name == "fp32"
        self.flat = FlatParameters(stage, dtype, run.training.seed, groups.dp.size, ops.kernels)
        numel = self.flat.shard_numel if self.sharded else self.flat.numel
        self.start = groups.dp.rank * numel if self.sharded else 0
        self.end = self.start + numel
        own = self.flat.values[self.start : self.end]
        self.master = own if fp32 else self.flat.initial_shard(self.start, self.end)
        self.low = None if fp32 else own
        self.exp_avg, self.exp_avg_sq = torch.zeros(numel), torch.zeros(numel)
        self.scaler, self.steps = LossScaler(run.precision), 0

    def zero_grad(self) -> None:
        """Before the first micro-batch of an iteration."""
        self.flat.grads.zero_()

    def _sum_partial_gradients(self) -> None:
        """Sum over tensor-parallel ranks what each computed from its part of the sequence, as Megatron's allreduce_layernorm_grads.

        One call for all of them: they are small and many.
        """
        partial = [p.main_grad for p in self.flat.parameters if p.spec.sequence_parallel]
        if partial:
            summed = self.groups.tp.all_reduce(torch.cat([grad.flatten() for grad in partial]))
            for grad, part in zip(partial, summed.split([grad.numel() for grad in partial]), strict=True):
                grad.copy_(part.view_as(grad))

    def _reduce_gradients(self) -> Tensor:
        """Sum gradients over the ranks that share them; returns this rank's part."""
        self._sum_partial_gradients()
        grads = self.flat.grads
        if not self.sharded:
            return self.groups.dp.all_reduce(grads)
        if self.groups.dp.size == 1:
            return grads
        return self.groups.dp.reduce_scatter(torch.empty(self.end - self.start), grads)

    def _sum_counted(self, values: Tensor, measure: object, spread: bool) -> float:
        """Sum measure(range) over the counted elements of all tensor, pipeline (and, when `spread`, data) parallel ranks."""
        total = sum(measure(values[max(r.start, self.start) - self.start : min(r.end, self.end) - self.start])
                    for r in self.flat.ranges if r.counted and r.start < self.end and r.end > self.start)
        summed = torch.tensor([float(total)], dtype=torch.float64)
        for comm in (self.groups.tp, self.groups.pp, *([self.groups.dp] if spread else [])):
            comm.all_reduce(summed)
        return summed.item()

    def params_norm(self) -> float:
        """L2 norm of all weights, each counted once."""
        return math.sqrt(self._sum_counted(self.master, self.ops.kernels.squared_norm, self.sharded))

    def step(self, lr: float, weight_decay: float, count_zeros: bool = False) -> StepResult:
        """Update the weights from the accumulated gradients, or skip the update when they hold an Inf or NaN."""
        grads = self._reduce_gradients()
        norm = math.sqrt(self._sum_counted(grads, self.ops.kernels.squared_norm, self.sharded)) / self.scaler.scale
        zeros = self._sum_counted(grads, self.ops.kernels.count_zeros, self.sharded) if count_zeros else 0.0
        scale, overflow = self.scaler.scale, not math.isfinite(norm)
        self.scaler.update(overflow)
        if overflow:
            return StepResult(norm, zeros, True)
        clip = self.config.clip_grad / (norm + 1e-6) if self.config.clip_grad else math.inf
        self.steps += 1
        self._adamw(grads, lr, weight_decay, min(clip, 1.0) / scale)
        self._weights_changed()
        return StepResult(norm, zeros, False)

    def _adamw(self, grads: Tensor, lr: float, weight_decay: float, grad_scale: float) -> None:
        config, adamw = self.config, self.ops.kernels.adamw
        for r in self.flat.ranges:
            a, b = max(r.start, self.start) - self.start, min(r.end, self.end) - self.start
            if a < b:
                adamw(self.master[a:b], grads[a:b], self.exp_avg[a:b], self.exp_avg_sq[a:b], lr=lr, beta1=config.adam_beta1,
                      beta2=config.adam_beta2, eps=config.adam_eps, weight_decay=weight_decay if r.decayed else 0.0,
                      step=self.steps, grad_scale=grad_scale, copy=None if self.low is None else self.low[a:b])

    def checkpoint_shards(self, owned: bool = False) -> list[Shard]:
        """The records of weights and moments that this rank holds; `owned`: that this rank saves, so that each is saved once."""
        if owned and not self.sharded and self.groups.dp.rank > 0:
            return []
        return [shard for kind, tensor in (("weight", self.master), ("exp_avg", self.exp_avg), ("exp_avg_sq", self.exp_avg_sq))
                for shard in self.flat.shards(kind, tensor, self.start, owned)]

    def after_load(self) -> None:
        """Make the model's weights from the loaded master weights."""
        if self.low is not None:
            self.low.copy_(self.master)
        self._weights_changed()

    def _weights_changed(self) -> None:
        """Bring the new weights of all shards to this rank; packed copies of the old ones are no longer used."""
        if self.sharded:
            self.groups.dp.all_gather(self.flat.values, self.flat.values[self.start : self.end].clone())
        self.ops.weights_changed()
