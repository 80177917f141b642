"""AdamW and Muon on flat buffers: clipping, loss scale and ZeRO-1."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checkpoint.shards import Shard
from ..comm.grid import Groups
from ..config.optimizer import MOMENTS, OPTIMIZERS, OptimizerConfig
from ..config.run_config import RunConfig
from ..costs.buckets import bucket_minimum
from ..nn.model import Stage
from ..nn.ops import Ops
from ..nn.parameter import PARAMETER_DTYPES
from .buckets import (
    AdamWBlock,
    BucketComm,
    BucketShard,
    StepFactors,
    Updates,
    adamw_blocks,
    adamw_blocks_of_eight_bit,
    updates_inside,
)
from .flat import Bucket, FlatParameters
from .int8 import Blocks, EightBitMoment, blocks_of_shard, cut_blocks, share_scales
from .loss_scaler import LossScaler
from .muon import Muon
from .rounding import round_at_random


class ElementUpdate(NamedTuple):
    """Elements for the `elements` function of a row of `OPTIMIZERS`, FP32 (n,), updated in place.

    gradients: averaged and clipped; free to overwrite
    exp_avg, exp_avg_sq: empty if the row's `states` lack the moment
    step: counts from 1
    """

    weights: Tensor
    gradients: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    lr: float
    weight_decay: float
    step: int
    config: OptimizerConfig


@dataclass(frozen=True)
class StepResult:
    """An optimizer step's result. grad_norm: before clipping. num_zeros: zeros among the gradients."""

    grad_norm: float
    num_zeros: float
    skipped: bool


class Optimizer:
    """Optimizer over this rank's shard of every bucket.

    Gradients are sums, already multiplied by the loss's 1 / tokens and the loss scale. `step` reduces, unscales, clips and updates,
    and gathers the weights under ZeRO-1.
    """

    def __init__(self, stage: Stage, run: RunConfig, groups: Groups, ops: Ops) -> None:
        self.run = run
        self.groups = groups
        self.ops = ops
        self.config = run.optimizer
        self.kinds = ("weight", *run.optimizer.states)  # prefixes of checkpoint keys
        self.sharded = run.parallel.zero_stage == 1
        row = OPTIMIZERS[self.config.optimizer]
        self._elements: Callable[[ElementUpdate], None] | None = None
        if row.elements is not None:
            self._elements = resolve_name(row.elements)
        matrices: type[Muon] | None = None
        if row.matrices is not None:
            matrices = resolve_name(row.matrices)
        self.flat = FlatParameters(
            stage,
            PARAMETER_DTYPES[run.precision.name],
            seed=run.training.seed,
            kernels=ops.kernels,
            alike=(groups.dp, groups.edp),
            minimum=bucket_minimum(run, groups.dp.size),
            matrices_first=matrices is not None,
        )
        self.buckets = BucketComm(stage, self.flat, run=run, groups=groups)
        cut = [self._cut_blocks(bucket) for bucket in self.flat.buckets]
        self.shards = [
            self._shard(bucket, starts)
            for bucket, starts in zip(self.flat.buckets, cut, strict=True)
        ]
        self._eight_bit_shards = [
            (self.buckets.replicas(bucket), len(starts), shard.shared_blocks())
            for bucket, starts, shard in zip(self.flat.buckets, cut, self.shards, strict=True)
        ]
        self.matrices: Muon | None = None
        if matrices is not None:
            self.matrices = matrices(
                self.flat, self.buckets, run=run, groups=groups, kernels=ops.kernels
            )
        self.scaler = LossScaler(run.precision)
        self.steps = 0
        self._expanded: dict[tuple[str, int], Tensor] = {}  # FP32 checkpoint copies
        self._reduced: list[Tensor] | None = None
        self._norm: float | None = None
        self.loads = 0  # loaded states
        # Called with every shard's gradients before an update; returns work for after the update.
        self.around_update: Callable[[list[Tensor], StepFactors], Callable[[], None]] | None = None

    def _cut_blocks(self, bucket: Bucket) -> list[int]:
        if self.config.exp_avg_dtype != "int8" or not self.sharded:
            return []
        shards = self.buckets.replicas(bucket).size
        return cut_blocks(self.flat, self.run.model, bucket, shards)

    def _shard(self, bucket: Bucket, cut: list[int]) -> BucketShard:
        start, end = self.buckets.shard(bucket)
        n = end - start
        own = self.flat.values[start:end]
        masters = self.run.masters
        ranges = self.flat.ranges(start, end)
        orthogonal = max((r.end for r in ranges if r.orthogonal), default=0)
        updates = self.updates_of(start, end)
        eight: tuple[EightBitMoment, EightBitMoment] | None = None
        in_blocks: list[AdamWBlock] = []
        exp_avg = torch.empty(0)
        exp_avg_sq = torch.empty(0)
        if self.config.exp_avg_dtype == "int8":
            blocks = blocks_of_shard(self.flat, self.run.model, (start, end), cut)
            scales = sum(each.scales for each in blocks)
            first = EightBitMoment(n, scales, signed=True)
            eight = (first, EightBitMoment(n, scales, signed=False))
            in_blocks = adamw_blocks_of_eight_bit(updates, blocks)
        else:
            exp_avg = self._moment("exp_avg", n, self.config.exp_avg_dtype)
            exp_avg_sq = self._moment("exp_avg_sq", n - orthogonal, self.config.exp_avg_sq_dtype)
            if self.config.main_params_dtype == "bf16":
                in_blocks = adamw_blocks(n, updates)
        return BucketShard(
            start,
            master=self.flat.initial_shard(start, end) if masters else own,
            model_weights=own if masters else None,
            exp_avg=exp_avg,
            exp_avg_sq=exp_avg_sq,
            eight_bit=eight,
            orthogonal=orthogonal,
            ranges=ranges,
            updates=updates,
            adamw_blocks=in_blocks,
        )

    def updates_of(self, start: int, end: int) -> Updates:
        """Return the kernel calls that update elements [start, end) of the flat buffer."""
        if "bf16" in (self.config.exp_avg_sq_dtype, self.config.main_params_dtype):
            return [*self.flat.pieces(start, end)]  # rounding depends on an element's place
        return [(r, None) for r in self.flat.ranges(start, end)]

    def _moment(self, state: str, n: int, dtype: str) -> Tensor:
        """Return a moment's zeros, (n,), or (0,) if the optimizer has no such moment."""
        return torch.zeros(n if state in self.config.states else 0, dtype=PARAMETER_DTYPES[dtype])

    def zero_grad(self, microbatches: int = 1) -> None:
        self._reduced = None
        self._norm = None
        self.buckets.begin(microbatches)
        # With several micro-batches the next forward needs the memory that a backward frees.
        self.flat.gradients.begin(keep_memory=microbatches > 1)

    def _sum_counted(self, values: list[Tensor], measure: Callable[[Tensor], float]) -> float:
        """Sum measure(range) over all ranks' counted elements. Collective."""
        totals = [0.0, 0.0]  # dense, experts
        for bucket, shard, tensor in zip(self.flat.buckets, self.shards, values, strict=True):
            totals[int(bucket.expert)] += sum(
                measure(tensor[r.start : r.end]) for r in shard.ranges if r.counted
            )
        groups = self.groups
        summed, of_experts = torch.tensor(totals, dtype=torch.float64).view(2, 1).unbind()
        if self.sharded:
            summed += of_experts  # shards are disjoint
        groups.tp.all_reduce(summed)
        if not self.sharded:
            for comm in (groups.etp, groups.ep):
                comm.all_reduce(of_experts)
            summed += of_experts
        groups.pp.all_reduce(summed)
        if self.sharded:
            groups.dp.all_reduce(summed)
        return summed.item()

    def params_norm(self) -> float:
        """Return the weights' L2 norm. Collective."""
        self.buckets.await_weights()
        masters = [shard.master for shard in self.shards]
        return math.sqrt(self._sum_counted(masters, self.ops.kernels.squared_norm))

    def reduce_gradients(self) -> list[Tensor]:
        """Return each shard's summed gradients (n,), cached until `zero_grad`. Collective at the first call."""
        if self._reduced is None:
            self._reduced = self.buckets.reduce()
        return self._reduced

    def grad_norm(self) -> float:
        """Return the unscaled gradients' L2 norm before clipping, cached. Collective."""
        grads = self.reduce_gradients()
        if self._norm is None:
            self._norm = (
                math.sqrt(self._sum_counted(grads, self.ops.kernels.squared_norm))
                / self.scaler.scale
            )
        return self._norm

    def step(
        self,
        lr: float,
        weight_decay: float,
        count_zeros: bool = False,
        decoupled_lr: float | None = None,
    ) -> StepResult:
        """Update the weights from the accumulated gradients, unless a gradient is Inf or NaN. decoupled_lr: default: `lr`"""
        grads = self.reduce_gradients()
        norm = self.grad_norm()
        zeros = 0.0
        if count_zeros:
            zeros = self._sum_counted(grads, self.ops.kernels.count_zeros)
        scale = self.scaler.scale
        overflow = not math.isfinite(norm)
        self.scaler.update(overflow)
        if overflow:
            return StepResult(norm, zeros, skipped=True)
        clip = self.config.clip_grad / (norm + 1e-6) if self.config.clip_grad else math.inf
        factors = StepFactors(
            lr,
            lr if decoupled_lr is None else decoupled_lr,
            weight_decay=weight_decay,
            grad_scale=min(clip, 1.0) / scale,
        )
        self.steps += 1
        self._expanded.clear()
        self.ops.weights_changed()
        finish = self.around_update(grads, factors) if self.around_update else None
        largest = share_scales(
            self._eight_bit_shards,
            lambda index, blocks: self._new_moments(
                self.shards[index], blocks, grads=grads[index], factors=factors
            ),
        )
        for index in reversed(range(len(self.shards))):  # the next forward starts at the last
            shard = self.shards[index]
            if shard.adamw_blocks:
                self._adamw_by_blocks(shard, grads[index], factors=factors, largest=largest[index])
            else:
                self.update_elements(shard, grads[index], factors)
            if self.matrices:
                self.matrices.step(index, shard, grads=grads[index], factors=factors)
            self.buckets.gather(index)
        if finish:
            finish()
        return StepResult(norm, zeros, skipped=False)

    def update_elements(self, shard: BucketShard, grads: Tensor, factors: StepFactors) -> None:
        """Update a shard's weights and moments, except in matrices that Muon updates."""
        config = self.config
        after = shard.orthogonal
        for r, place in shard.updates:
            at = slice(r.start, r.end)
            if r.balances:
                self._balance(shard, grads, at)
            if r.balances or r.orthogonal:
                continue
            lr = factors.decoupled_lr if r.decoupled else factors.lr
            weight_decay = factors.weight_decay if r.decayed else 0.0
            exp_avg_sq = shard.exp_avg_sq[r.start - after : r.end - after]
            if self._elements is not None:
                update = ElementUpdate(
                    shard.master[at],
                    grads[at] * factors.grad_scale,
                    shard.exp_avg[at],
                    exp_avg_sq,
                    lr=lr,
                    weight_decay=weight_decay,
                    step=self.steps,
                    config=config,
                )
                self._elements(update)
                shard.round_weights(at)
                continue
            rounding: dict[str, Any] = {}
            if place:
                rounding = {"seed": self.run.training.seed, **asdict(place)}
            self.ops.kernels.adamw(
                shard.master[at],
                grads[at],
                shard.exp_avg[at],
                exp_avg_sq,
                lr=lr,
                beta1=config.adam_beta1,
                beta2=config.adam_beta2,
                eps=config.adam_eps,
                weight_decay=weight_decay,
                step=self.steps,
                grad_scale=factors.grad_scale,
                copy=None if shard.model_weights is None else shard.model_weights[at],
                **rounding,
            )

    def _adamw_by_blocks(
        self, shard: BucketShard, grads: Tensor, factors: StepFactors, largest: Tensor
    ) -> None:
        """Convert, update and round one AdamW block after another, so that its FP32 values stay in the cache.

        largest: (2, m), see `share_scales`
        """
        for each in shard.adamw_blocks:
            own = slice(each.start, each.end)
            if shard.eight_bit:
                first, second = (moment.read(each.blocks) for moment in shard.eight_bit)
            else:
                first = shard.exp_avg[own]
                second = shard.exp_avg_sq[own]
            block = replace(
                shard,
                master=shard.master[own].float(),
                model_weights=None if shard.model_weights is None else shard.model_weights[own],
                exp_avg=first,
                exp_avg_sq=second,
                updates=each.updates,
            )
            self.update_elements(block, grads[own], factors)
            at_random = (self.run.training.seed, self.steps)
            for moment, values, shared in zip(
                shard.eight_bit or (), (first, second), largest, strict=False
            ):
                moment.write(each.blocks, values, shared=shared, at_random=at_random)
            if shard.in_bf16:
                self._round(block, shard.master[own])

    def _new_moments(
        self, shard: BucketShard, blocks: Blocks, grads: Tensor, factors: StepFactors
    ) -> tuple[Tensor, Tensor]:
        assert shard.eight_bit is not None
        own = slice(blocks.start, blocks.end)
        first, second = (moment.read([blocks]) for moment in shard.eight_bit)
        alone = replace(
            shard,
            master=shard.master[own].to(torch.float32, copy=True),
            model_weights=None,
            exp_avg=first,
            exp_avg_sq=second,
            updates=updates_inside(shard.updates, blocks.start, blocks.end),
        )
        self.update_elements(alone, grads[own], factors)
        return first, second

    def _round(self, block: BucketShard, weights: Tensor) -> None:
        for r, place in block.updates:
            assert place is not None
            weights[r.start : r.end] = round_at_random(
                block.master[r.start : r.end], place, seed=self.run.training.seed, step=self.steps
            )

    def _balance(self, shard: BucketShard, excess: Tensor, at: slice) -> None:
        """Lower the router bias of experts with more tokens than the mean, and raise the others."""
        shard.master[at].sub_(
            torch.sign(excess[at]), alpha=self.run.model.moe_router_bias_update_rate
        )
        shard.round_weights(at)

    def checkpoint_shards(self, owned: bool = False) -> list[Shard]:
        """Return checkpoint records for weights and moments."""
        self.buckets.await_weights()
        records: list[Shard] = []
        for kind in self.kinds:
            for index, shard in enumerate(self.shards):
                replicas = self.buckets.replicas(self.flat.buckets[index])
                if owned and not self.sharded and replicas.rank != 0:
                    continue
                start = shard.start
                if kind == "exp_avg_sq":
                    start += shard.orthogonal
                records += self.flat.shards(
                    kind, self._saved(kind, index), start=start, owned=owned
                )
        return records

    def _saved(self, kind: str, index: int) -> Tensor:
        """Return the tensor that is saved and loaded: stored, or an FP32 copy until the next step."""
        shard = self.shards[index]
        if (kind, index) in self._expanded:
            return self._expanded[kind, index]
        if kind == "weight":
            if not shard.in_bf16:
                return shard.master
            expanded = shard.master.float()
        else:
            expanded = shard.moment(MOMENTS.index(kind))
            if shard.eight_bit is None:
                return expanded
        self._expanded[kind, index] = expanded
        return expanded

    def after_load(self) -> None:
        """Broadcast loaded weights and moments to the ranks that share them, and round to the model's formats. Collective."""
        sharing = {
            f"{kind}/{p.spec.name}": self.groups.etp if p.spec.expert else self.groups.tp
            for p in self.flat.parameters
            for kind in self.kinds
            if p.spec.partition_dim is None
        }
        for record in self.checkpoint_shards():
            if record.key in sharing:
                sharing[record.key].broadcast(record.tensor)
        if not self.run.lora.on:
            self.flat.broadcast_frozen()
        for index, shard in enumerate(self.shards):
            if not self.sharded:
                replicas = self.buckets.replicas(self.flat.buckets[index])
                for kind in self.kinds:
                    replicas.broadcast(self._saved(kind, index))
            if shard.in_bf16:
                shard.master.copy_(self._saved("weight", index))
        self._load_eight_bit()
        self.loads += 1
        self._expanded.clear()
        self.ops.weights_changed(frozen=True)
        for index, shard in enumerate(self.shards):
            shard.round_weights(slice(None))
            self.buckets.gather(index)

    def _load_eight_bit(self) -> None:
        """Round the loaded moments to nearest, which restores the saved codes. Collective."""

        def loaded(index: int, start: int, end: int) -> tuple[Tensor, Tensor]:
            first, second = (self._saved(kind, index)[start:end] for kind in MOMENTS)
            return first, second

        largest = share_scales(
            self._eight_bit_shards,
            lambda index, blocks: loaded(index, blocks.start, blocks.end),
        )
        for index, shard in enumerate(self.shards):
            if shard.eight_bit is None:
                continue
            for block in shard.adamw_blocks:
                values = loaded(index, block.start, block.end)
                for moment, own, shared in zip(
                    shard.eight_bit, values, largest[index], strict=True
                ):
                    moment.write(block.blocks, own, shared=shared)
