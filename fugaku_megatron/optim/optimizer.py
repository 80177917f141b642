"""AdamW and Muon on flat buffers: clipping, loss scale and ZeRO-1."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ..checkpoint.shards import Shard
from ..comm.grid import Groups
from ..config.run_config import RunConfig
from ..costs.memory import bucket_minimum
from ..nn.model import Stage
from ..nn.ops import Ops
from ..nn.parameter import PARAMETER_DTYPES
from .buckets import BucketComm
from .flat import Bucket, FlatParameters, Place, Range
from .int8 import CHUNK, Blocks, EightBitMoment, blocks_of_shard, cut_blocks, share_scales
from .loss_scaler import LossScaler
from .muon import Muon
from .rounding import round_at_random

Moments = tuple[EightBitMoment, EightBitMoment]  # the first and the second


KINDS = ("weight", "exp_avg", "exp_avg_sq")  # beginnings of keys in a checkpoint


NOTHING = torch.empty(0)


Updates = list[tuple[Range, Place | None]]


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step found: gradient norm (before clipping), zeros among the gradients, and whether it was skipped."""

    grad_norm: float
    num_zeros: float
    skipped: bool


@dataclass(frozen=True)
class Chunk:
    """Elements [start, end) of a part that are updated at once. updates: as in `Part`, counted from `start`. blocks: of 8 bits."""

    start: int
    end: int
    updates: Updates
    blocks: Sequence[Blocks]


@dataclass(frozen=True)
class Part:
    """What this rank updates of a bucket: all of it, or its ZeRO-1 shard, n elements from `start` of the flat buffer.

    master: (n,) in FP32, or in BF16 with --main-params-dtype bf16. low: the same elements of the model's weights, None where
    `master` is a view of them. exp_avg, exp_avg_sq: (n,) in the formats of --exp-avg-dtype and --exp-avg-sq-dtype, exp_avg_sq
    without the first `orthogonal` elements, which Muon updates; empty where both are in `eight_bit`. ranges: what lies in them,
    counted from `start`. updates: what each call of the kernel updates, and which elements these are, where something is rounded
    at random. chunks: what is updated at once, where weights or moments are not stored in FP32.
    """

    start: int
    master: Tensor
    low: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor
    eight_bit: Moments | None
    orthogonal: int
    ranges: list[Range]
    updates: Updates
    chunks: Sequence[Chunk] = ()

    @property
    def in_bf16(self) -> bool:
        """Whether `master` is in BF16 and each update is rounded to it."""
        return self.master.dtype == torch.bfloat16

    def round_weights(self, at: slice) -> None:
        """Round updated weights to those of the model."""
        if self.low is not None:
            self.low[at].copy_(self.master[at])


def _inside(updates: Updates, start: int, end: int) -> Updates:
    """What of `updates` lies in elements [start, end), counted from `start`."""
    cut = [(r, place, max(r.start, start), min(r.end, end)) for r, place in updates]
    return [
        (
            replace(r, start=a - start, end=b - start),
            place and replace(place, first=place.first + a - r.start),
        )
        for r, place, a, b in cut
        if a < b
    ]


def _chunks(n: int, updates: Updates) -> list[Chunk]:
    """Return the chunks of a part of n elements: at most CHUNK elements each, so that they stay in the cache."""
    bounds = [(start, min(start + CHUNK, n)) for start in range(0, n, CHUNK)]
    return [Chunk(start, end, _inside(updates, start, end), ()) for start, end in bounds]


def _chunks_of_blocks(updates: Updates, blocks: Sequence[Blocks]) -> list[Chunk]:
    """Return the chunks of blocks of 8 bits, as `_chunks`; padding is in no chunk."""
    chunks = []
    first = 0
    for number, last in enumerate(blocks, 1):
        start = blocks[first].start
        if number == len(blocks) or blocks[number].end - start > CHUNK:
            inside = _inside(updates, start, last.end)
            chunks.append(Chunk(start, last.end, inside, blocks[first:number]))
            first = number
    return chunks


def _shared_blocks(chunks: Sequence[Chunk]) -> list[Blocks]:
    """Return the blocks of 8 bits of which other ZeRO-1 shards have the rest."""
    return [blocks for chunk in chunks for blocks in chunk.blocks if blocks.shared is not None]


class Optimizer:
    """AdamW, or Muon for matrices, over this rank's shard (ZeRO-1) of every bucket, or all of it.

    ops: runs its kernels, and is told of new weights.

    Gradients come in as sums whose mean is taken by the loss's factor, times the loss scale; `step` reduces, unscales, clips,
    updates and, with ZeRO-1, gathers the weights.
    """

    def __init__(self, stage: Stage, run: RunConfig, groups: Groups, ops: Ops) -> None:
        self.run, self.groups, self.ops, self.config = run, groups, ops, run.optimizer
        self.sharded = run.parallel.zero_stage == 1
        self.flat = FlatParameters(
            stage,
            PARAMETER_DTYPES[run.precision.name],
            run.training.seed,
            ops.kernels,
            (groups.dp, groups.edp),
            bucket_minimum(run, groups.dp.size),
            self.config.muon,
        )
        self.buckets = BucketComm(stage, self.flat, run, groups)
        cut = [self._cut_blocks(bucket) for bucket in self.flat.buckets]
        self.parts = [
            self._part(bucket, starts)
            for bucket, starts in zip(self.flat.buckets, cut, strict=True)
        ]
        self._shards = [
            (self.buckets.replicas(bucket), len(starts), _shared_blocks(part.chunks))
            for bucket, starts, part in zip(self.flat.buckets, cut, self.parts, strict=True)
        ]
        self._muon = (
            Muon(self.flat, self.buckets, run, groups, ops.kernels) if self.config.muon else None
        )
        self.scaler, self.steps = LossScaler(run.precision), 0
        self._expanded: dict[
            tuple[str, int], Tensor
        ] = {}  # moments of 8 bits in FP32, for a checkpoint
        self._reduced: list[Tensor] | None = None
        self._norm: float | None = None

    def _cut_blocks(self, bucket: Bucket) -> list[int]:
        """Return the starts of the blocks of 8 bits of which several ranks update a piece."""
        if self.config.exp_avg_dtype != "int8" or not self.sharded:
            return []
        shards = self.buckets.replicas(bucket).size
        return cut_blocks(self.flat, self.run.model, bucket, shards)

    def _part(self, bucket: Bucket, cut: list[int]) -> Part:
        start, end = self.buckets.part(bucket)
        own, masters = self.flat.values[start:end], self.run.masters
        ranges = self.flat.ranges(start, end)
        orthogonal = max((r.end for r in ranges if r.orthogonal), default=0)
        updates = self._updates(start, end, ranges)
        eight: Moments | None = None
        chunks: list[Chunk] = []
        exp_avg = exp_avg_sq = NOTHING
        if self.config.exp_avg_dtype == "int8":
            blocks = blocks_of_shard(self.flat, self.run.model, (start, end), cut)
            scales = sum(each.scales for each in blocks)
            first = EightBitMoment(end - start, scales, signed=True)
            eight = (first, EightBitMoment(end - start, scales, signed=False))
            chunks = _chunks_of_blocks(updates, blocks)
        else:
            exp_avg = torch.zeros(end - start, dtype=PARAMETER_DTYPES[self.config.exp_avg_dtype])
            exp_avg_sq = torch.zeros(
                end - start - orthogonal, dtype=PARAMETER_DTYPES[self.config.exp_avg_sq_dtype]
            )
            if self.config.main_params_dtype == "bf16":
                chunks = _chunks(end - start, updates)
        return Part(
            start,
            self.flat.initial_shard(start, end) if masters else own,
            own if masters else None,
            exp_avg,
            exp_avg_sq,
            eight,
            orthogonal,
            ranges,
            updates,
            chunks,
        )

    def _updates(self, start: int, end: int, ranges: list[Range]) -> Updates:
        """Long ranges, or single parameters where rounding depends on an element's place."""
        if "bf16" in (self.config.exp_avg_sq_dtype, self.config.main_params_dtype):
            return [*self.flat.pieces(start, end)]
        return [(r, None) for r in ranges]

    def zero_grad(self, microbatches: int = 1) -> None:
        """Before the first of an iteration's micro-batches."""
        self._reduced = self._norm = None
        self.buckets.begin(microbatches)
        if microbatches > 1:  # the next forward needs what a backward frees
            self.flat.gradients.zero()
        else:
            self.flat.gradients.free()

    def _sum_counted(self, values: list[Tensor], measure: Callable[[Tensor], float]) -> float:
        """Sum measure(range) over the counted elements of all ranks' shards. values: a tensor for each part."""
        totals = [0.0, 0.0]  # of divided experts the second
        for bucket, part, tensor in zip(self.flat.buckets, self.parts, values, strict=True):
            totals[bucket.expert] += sum(
                measure(tensor[r.start : r.end]) for r in part.ranges if r.counted
            )
        groups, (summed, of_experts) = (
            self.groups,
            torch.tensor(totals, dtype=torch.float64).view(2, 1).unbind(),
        )
        if self.sharded:
            summed += of_experts  # a rank's shards are its own, whatever they are of
        groups.tp.all_reduce(summed)
        if not self.sharded:
            for comm in (groups.etp, groups.ep):
                comm.all_reduce(of_experts)
            summed += of_experts
        for comm in (groups.pp, *([groups.dp] if self.sharded else [])):
            comm.all_reduce(summed)
        return summed.item()

    def params_norm(self) -> float:
        """L2 norm of all weights, each counted once."""
        self.buckets.await_weights()
        return math.sqrt(
            self._sum_counted([part.master for part in self.parts], self.ops.kernels.squared_norm)
        )

    def reduce_gradients(self) -> list[Tensor]:
        """The summed gradients (n,) of each of the parts; the same again until `zero_grad`. Collective the first time."""
        if self._reduced is None:
            self._reduced = self.buckets.reduce()
        return self._reduced

    def grad_norm(self) -> float:
        """L2 norm of the summed gradients without the loss scale, before clipping; the same again until `zero_grad`. Collective."""
        return self._norm_of(self.reduce_gradients())

    def _norm_of(self, grads: list[Tensor]) -> float:
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
        """Update the weights from the accumulated gradients, or skip the update when they hold an Inf or NaN.

        decoupled_lr: of the weights that --decoupled-lr is for; None: theirs is `lr` as well.
        """
        rates = lr, lr if decoupled_lr is None else decoupled_lr
        grads = self.reduce_gradients()
        norm = self._norm_of(grads)
        zeros = self._sum_counted(grads, self.ops.kernels.count_zeros) if count_zeros else 0.0
        scale, overflow = self.scaler.scale, not math.isfinite(norm)
        self.scaler.update(overflow)
        if overflow:
            return StepResult(norm, zeros, True)
        clip = self.config.clip_grad / (norm + 1e-6) if self.config.clip_grad else math.inf
        self.steps += 1
        self._expanded.clear()
        self.ops.weights_changed()  # packed copies of the old ones are no longer used
        factor = min(clip, 1.0) / scale
        shared = share_scales(
            self._shards,
            lambda index, blocks: self._new_moments(
                self.parts[index], blocks, grads[index], rates, weight_decay, factor
            ),
        )
        for index in reversed(
            range(len(self.parts))
        ):  # the next forward needs the last bucket first
            part = self.parts[index]
            if part.chunks:
                self._adamw_by_chunks(
                    part, grads[index], rates, weight_decay, factor, shared[index]
                )
            else:
                self._adamw(part, grads[index], rates, weight_decay, factor)
            if self._muon:
                self._orthogonal(self._muon, index, grads[index], lr, weight_decay, factor)
            self.buckets.gather(index)
        return StepResult(norm, zeros, False)

    def _adamw(
        self,
        part: Part,
        grads: Tensor,
        rates: tuple[float, float],
        weight_decay: float,
        grad_scale: float,
    ) -> None:
        config, adamw = self.config, self.ops.kernels.adamw
        for r, place in part.updates:
            at, after = slice(r.start, r.end), part.orthogonal
            if r.balances:
                self._balance(part, grads, at)
            if r.balances or r.orthogonal:
                continue
            exp_avg_sq = part.exp_avg_sq[r.start - after : r.end - after]
            adamw(
                part.master[at],
                grads[at],
                part.exp_avg[at],
                exp_avg_sq,
                lr=rates[r.decoupled],
                beta1=config.adam_beta1,
                beta2=config.adam_beta2,
                eps=config.adam_eps,
                weight_decay=weight_decay if r.decayed else 0.0,
                step=self.steps,
                grad_scale=grad_scale,
                copy=None if part.low is None else part.low[at],
                **({"seed": self.run.training.seed, **asdict(place)} if place else {}),
            )

    def _adamw_by_chunks(
        self,
        part: Part,
        grads: Tensor,
        rates: tuple[float, float],
        weight_decay: float,
        grad_scale: float,
        shared: Tensor,
    ) -> None:
        """AdamW chunk by chunk, so that what is not stored in FP32 and is updated in it stays in the cache.

        shared: largest elements (2, m) of the blocks that several ZeRO-1 shards have.
        """
        for at in part.chunks:
            own = slice(at.start, at.end)
            first, second = (
                (moment.read(at.blocks) for moment in part.eight_bit)
                if part.eight_bit
                else (part.exp_avg[own], part.exp_avg_sq[own])
            )
            chunk = replace(
                part,
                master=part.master[own].float(),
                low=None if part.low is None else part.low[own],
                exp_avg=first,
                exp_avg_sq=second,
                updates=at.updates,
            )
            self._adamw(chunk, grads[own], rates, weight_decay, grad_scale)
            words = self.run.training.seed, self.steps
            for moment, values, largest in zip(
                part.eight_bit or (), (first, second), shared, strict=False
            ):
                moment.write(at.blocks, values, shared=largest, at_random=words)
            if part.in_bf16:
                self._round(chunk, part.master[own])

    def _new_moments(
        self,
        part: Part,
        blocks: Blocks,
        grads: Tensor,
        rates: tuple[float, float],
        weight_decay: float,
        grad_scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Return both moments (n,) of blocks of 8 bits as the next update computes them. grads (n,): of the part."""
        assert part.eight_bit is not None
        own = slice(blocks.start, blocks.end)
        first, second = (moment.read([blocks]) for moment in part.eight_bit)
        alone = replace(
            part,
            master=part.master[own].to(torch.float32, copy=True),
            low=None,
            exp_avg=first,
            exp_avg_sq=second,
            updates=_inside(part.updates, blocks.start, blocks.end),
        )
        self._adamw(alone, grads[own], rates, weight_decay, grad_scale)
        return first, second

    def _round(self, chunk: Part, weights: Tensor) -> None:
        """Round updated weights to `weights` (n,) in BF16."""
        for r, place in chunk.updates:
            assert place is not None
            weights[r.start : r.end] = round_at_random(
                chunk.master[r.start : r.end], place, self.run.training.seed, self.steps
            )

    def _orthogonal(
        self,
        muon: Muon,
        index: int,
        grads: Tensor,
        lr: float,
        weight_decay: float,
        grad_scale: float,
    ) -> None:
        """Muon's step on the matrices of a bucket, of which other data-parallel ranks compute a part."""
        part, config = self.parts[index], self.config
        at = slice(0, part.orthogonal)
        own, grad = torch.zeros(len(part.master)), grads[at] * grad_scale
        own[at] = momentum = part.exp_avg[at].float().lerp_(grad, 1.0 - config.muon_momentum)
        part.exp_avg[at] = momentum
        if config.muon_nesterov:
            own[at] = grad.lerp_(momentum, config.muon_momentum)
        updates = muon.updates(index, own)
        if updates is None:
            return
        part.master[at].mul_(1.0 - lr * weight_decay).sub_(updates[at], alpha=lr)
        part.round_weights(at)

    def _balance(self, part: Part, excess: Tensor, at: slice) -> None:
        """Lower the bias of experts with more tokens than the mean, and raise that of the others. excess (n,): of the part."""
        part.master[at].sub_(
            torch.sign(excess[at]), alpha=self.run.model.moe_router_bias_update_rate
        )
        part.round_weights(at)

    def checkpoint_shards(self, owned: bool = False) -> list[Shard]:
        """The records of weights and moments that this rank holds; `owned`: that this rank saves, so that each is saved once."""
        self.buckets.await_weights()
        parts = [
            (index, part)
            for index, (bucket, part) in enumerate(zip(self.flat.buckets, self.parts, strict=True))
            if not owned or self.sharded or self.buckets.replicas(bucket).rank == 0
        ]
        return [
            record
            for kind in KINDS
            for index, part in parts
            for record in self.flat.shards(
                kind,
                self._saved(kind, index),
                part.start + part.orthogonal * (kind == "exp_avg_sq"),
                owned,
            )
        ]

    def _saved(self, kind: str, index: int) -> Tensor:
        """What a checkpoint holds of a part, (n,)."""
        part, second = self.parts[index], kind == "exp_avg_sq"
        if kind == "weight":
            stored, expand = part.master, part.master.float if part.in_bf16 else None
        else:
            stored = part.exp_avg_sq if second else part.exp_avg
            expand = partial(self._expand, part, part.eight_bit[second]) if part.eight_bit else None
        if expand is None:
            return stored
        if (kind, index) not in self._expanded:
            self._expanded[kind, index] = expand()
        return self._expanded[kind, index]

    def _expand(self, part: Part, moment: EightBitMoment) -> Tensor:
        """Return a moment of a part in FP32, (n,)."""
        values = torch.zeros(len(part.master))
        for chunk in part.chunks:
            values[chunk.start : chunk.end] = moment.read(chunk.blocks)
        return values

    def after_load(self) -> None:
        """Make the model's weights from the loaded master weights, which the other holders of a shard get from its owner."""
        shares = self.groups.etp.size > 1  # of an expert: the tensor-parallel ranks, or one alone
        whole = {
            f"{kind}/{p.spec.name}"
            for p in self.flat.parameters
            for kind in KINDS
            if p.spec.partition_dim is None and (shares or not p.spec.expert)
        }
        for shard in self.checkpoint_shards():
            if shard.key in whole:
                self.groups.tp.broadcast(
                    shard.tensor
                )  # not split: every tensor-parallel rank holds it, the first one owns it
        for index, part in enumerate(self.parts):
            for kind in KINDS if not self.sharded else ():
                self.buckets.replicas(self.flat.buckets[index]).broadcast(self._saved(kind, index))
            if part.in_bf16:
                part.master.copy_(self._saved("weight", index))
        self._take_moments()
        self._expanded.clear()
        self.ops.weights_changed()
        for index, part in enumerate(self.parts):
            part.round_weights(slice(None))
            self.buckets.gather(index)

    def _take_moments(self) -> None:
        """Round the loaded moments to 8 bits, to nearest: what was saved in the same blocks gives the same codes. Collective."""

        def loaded(index: int, start: int, end: int) -> tuple[Tensor, Tensor]:
            first, second = (self._saved(kind, index)[start:end] for kind in KINDS[1:])
            return first, second

        shared = share_scales(
            self._shards, lambda index, blocks: loaded(index, blocks.start, blocks.end)
        )
        for index, part in enumerate(self.parts):
            if part.eight_bit is None:
                continue
            for chunk in part.chunks:
                values = loaded(index, chunk.start, chunk.end)
                for moment, own, largest in zip(part.eight_bit, values, shared[index], strict=True):
                    moment.write(chunk.blocks, own, shared=largest)
