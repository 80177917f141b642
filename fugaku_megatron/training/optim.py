"""AdamW and Muon on flat buffers: clipping, loss scale and ZeRO-1.

Left out: the buffers (`flat`), sums of gradients and gathers of weights (`buckets`), learning rates (`param_schedule`), files
(`checkpoint`).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ..checkpoint.shards import Shard
from ..comm.grid import Groups
from ..config.run_config import PrecisionConfig, RunConfig
from ..costs.memory import bucket_minimum
from ..nn.model import Stage
from ..nn.ops import Ops
from ..nn.parameter import PARAMETER_DTYPES
from .buckets import BucketComm
from .flat import FlatParameters, Place, Range
from .optim_math import EightBitMoment, Muon, round_at_random

Moments = tuple[EightBitMoment, EightBitMoment]  # the first and the second
KINDS = ("weight", "exp_avg", "exp_avg_sq")  # beginnings of keys in a checkpoint
NOTHING = torch.empty(0)
CHUNK = 1 << 17  # elements; a multiple of the block


class LossScaler:
    """Static or dynamic loss scale (Megatron's DynamicGradScaler): halve after `hysteresis` overflows, double after a window."""

    def __init__(self, precision: PrecisionConfig) -> None:
        self.precision = precision
        self.dynamic = precision.fp16 and precision.loss_scale is None
        self.scale = precision.loss_scale or (
            precision.initial_loss_scale if precision.fp16 else 1.0
        )
        self.good_steps, self.hysteresis = 0, precision.hysteresis

    @property
    def falling(self) -> bool:
        """Whether an overflow is expected, because the scale can still fall."""
        return self.dynamic and self.scale > self.precision.min_loss_scale

    def update(self, overflow: bool) -> None:
        """Tell whether the gradients of this step had an Inf or NaN."""
        if not self.dynamic:
            return
        if overflow:
            self.good_steps, self.hysteresis = 0, self.hysteresis - 1
            if self.hysteresis <= 0:
                self.scale = max(self.scale / 2, self.precision.min_loss_scale)
            return
        self.good_steps += 1
        if self.good_steps == self.precision.loss_scale_window:
            self.good_steps, self.hysteresis = 0, self.precision.hysteresis
            self.scale *= 2

    def state(self) -> dict[str, float]:
        """For the checkpoint."""
        return {"scale": self.scale, "good_steps": self.good_steps, "hysteresis": self.hysteresis}

    def load(self, state: dict[str, float]) -> None:
        """Back from the checkpoint."""
        if self.dynamic:
            self.scale, self.good_steps, self.hysteresis = (
                state["scale"],
                int(state["good_steps"]),
                int(state["hysteresis"]),
            )


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step found: gradient norm (before clipping), zeros among the gradients, and whether it was skipped."""

    grad_norm: float
    num_zeros: float
    skipped: bool


@dataclass(frozen=True)
class Part:
    """What this rank updates of a bucket: all of it, or its ZeRO-1 shard, n elements from `start` of the flat buffer.

    master: (n,) in FP32, or in BF16 with --main-params-dtype bf16. low: the same elements of the model's weights, None where
    `master` is a view of them. exp_avg, exp_avg_sq: (n,) in the formats of --exp-avg-dtype and --exp-avg-sq-dtype, exp_avg_sq
    without the first `orthogonal` elements, which Muon updates; empty where both are in `eight_bit`. ranges: what lies in them,
    counted from `start`. updates: what each call of the kernel updates, and which elements these are, where something is rounded
    at random.
    """

    start: int
    master: Tensor
    low: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor
    eight_bit: Moments | None
    orthogonal: int
    ranges: list[Range]
    updates: list[tuple[Range, Place | None]]

    @property
    def in_bf16(self) -> bool:
        """Whether `master` is in BF16 and each update is rounded to it."""
        return self.master.dtype == torch.bfloat16

    def round_weights(self, at: slice) -> None:
        """Round updated weights to those of the model."""
        if self.low is not None:
            self.low[at].copy_(self.master[at])


def _inside(
    updates: list[tuple[Range, Place | None]], start: int, end: int
) -> list[tuple[Range, Place | None]]:
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
        self.parts = [self._part(*self.buckets.part(bucket)) for bucket in self.flat.buckets]
        self._muon = (
            Muon(self.flat, self.buckets, run, groups, ops.kernels) if self.config.muon else None
        )
        self.scaler, self.steps = LossScaler(run.precision), 0
        self._expanded: dict[
            tuple[str, int], Tensor
        ] = {}  # moments of 8 bits in FP32, for a checkpoint
        self._reduced: list[Tensor] | None = None
        self._norm: float | None = None

    def _part(self, start: int, end: int) -> Part:
        own, masters = self.flat.values[start:end], self.run.masters
        ranges = self.flat.ranges(start, end)
        orthogonal = max((r.end for r in ranges if r.orthogonal), default=0)
        if self.config.exp_avg_dtype == "int8":
            eight, exp_avg, exp_avg_sq = (
                (EightBitMoment(end - start, True), EightBitMoment(end - start, False)),
                NOTHING,
                NOTHING,
            )
        else:
            eight, exp_avg = (
                None,
                torch.zeros(end - start, dtype=PARAMETER_DTYPES[self.config.exp_avg_dtype]),
            )
            exp_avg_sq = torch.zeros(
                end - start - orthogonal, dtype=PARAMETER_DTYPES[self.config.exp_avg_sq_dtype]
            )
        return Part(
            start,
            self.flat.initial_shard(start, end) if masters else own,
            own if masters else None,
            exp_avg,
            exp_avg_sq,
            eight,
            orthogonal,
            ranges,
            self._updates(start, end, ranges),
        )

    def _updates(
        self, start: int, end: int, ranges: list[Range]
    ) -> list[tuple[Range, Place | None]]:
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
        for index in reversed(
            range(len(self.parts))
        ):  # the next forward needs the last bucket first
            part, factor = self.parts[index], min(clip, 1.0) / scale
            if part.eight_bit or part.in_bf16:
                self._adamw_by_chunks(part, grads[index], rates, weight_decay, factor)
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
    ) -> None:
        """AdamW chunk by chunk, so that what is not stored in FP32 and is updated in it stays in the cache."""
        for start in range(0, len(part.master), CHUNK):
            end = min(start + CHUNK, len(part.master))
            at, moments = slice(start, end), part.eight_bit or ()
            first, second = (
                (moment.read(start, end) for moment in moments)
                if moments
                else (part.exp_avg[at], part.exp_avg_sq[at])
            )
            chunk = replace(
                part,
                master=part.master[at].float(),
                low=None if part.low is None else part.low[at],
                exp_avg=first,
                exp_avg_sq=second,
                updates=_inside(part.updates, start, end),
            )
            self._adamw(chunk, grads[at], rates, weight_decay, grad_scale)
            seed = zlib.crc32(
                f"{self.run.training.seed} {self.steps} {part.start + start}".encode()
            )
            for moment, values in zip(moments, (first, second), strict=False):
                moment.write(start, values, seed)
            if part.in_bf16:
                self._round(chunk, part.master[at])

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
            expand = (
                partial(part.eight_bit[second].read, 0, len(part.master))
                if part.eight_bit
                else None
            )
        if expand is None:
            return stored
        if (kind, index) not in self._expanded:
            self._expanded[kind, index] = expand()
        return self._expanded[kind, index]

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
            for kind, moment in zip(KINDS[1:], part.eight_bit or (), strict=False):
                moment.write(0, self._saved(kind, index), seed=0)
            if part.in_bf16:
                part.master.copy_(self._saved("weight", index))
        self._expanded.clear()
        self.ops.weights_changed()
        for index, part in enumerate(self.parts):
            part.round_weights(slice(None))
            self.buckets.gather(index)
