"""AdamW on flat buffers: parameter memory, gradient reduction, clipping, loss scale, ZeRO-1, learning-rate schedule.

One rank's parameters lie in one flat buffer, weight-decayed ones first, so that an update is a few calls on long ranges and a
ZeRO-1 shard is a slice. Left out: tied-embedding gradients (`train`), files (`checkpoint`). Test: pytest tests/test_optim.py
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..checkpoint.shards import Shard
from ..comm.grid import Groups
from ..host import kernels
from ..run.accounting import FLAT_ALIGNMENT, round_up
from ..run.config import OptimizerConfig, PrecisionConfig, RunConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Range:
    """Elements [start, end) of the flat buffer that are treated alike."""

    start: int
    end: int
    decayed: bool
    counted: bool


def _order(parameter: nn.Parameter) -> tuple[bool, bool, bool]:
    """The same on all tensor-parallel ranks, so that their ZeRO-1 shards cut a replicated parameter at the same elements."""
    return parameter.dim() < 2, parameter.partition_dim is None, parameter.init_name != parameter.global_name


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

    def __init__(self, stage: nn.Module, dtype: torch.dtype, seed: int, shards: int) -> None:
        self.parameters = sorted(stage.parameters(), key=_order)
        ends = torch.tensor([p.numel() for p in self.parameters]).cumsum(0).tolist()
        self.starts = [0, *ends[:-1]]
        self.numel = round_up(ends[-1], shards * FLAT_ALIGNMENT)
        self.values = torch.zeros(self.numel, dtype=dtype)
        self.grads = torch.zeros(self.numel)
        self.shard_numel = self.numel // shards
        self.ranges = _merge([Range(start, end, p.dim() > 1, p.counted)
                              for start, end, p in zip(self.starts, ends, self.parameters, strict=True)])
        self._seed = seed
        self._replace(stage)

    def _view(self, flat: Tensor, index: int) -> Tensor:
        parameter, start = self.parameters[index], self.starts[index]
        return flat[start : start + parameter.numel()].view(parameter.shape)

    def _replace(self, stage: nn.Module) -> None:
        """Swap the meta parameters for views into the flat buffer; attributes stay."""
        new = {}
        for index, old in enumerate(self.parameters):
            new[old] = nn.Parameter(self._view(self.values, index))
            new[old].__dict__.update(old.__dict__)
            new[old].main_grad = self._view(self.grads, index)
            new[old].data.copy_(initial_values(new[old], self._seed))
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
                shard[a - start : b - start] = initial_values(parameter, self._seed).flatten()[a - begin : b - begin]
        return shard

    def shards(self, kind: str, tensor: Tensor, start: int, owned: bool) -> list[Shard]:
        """Checkpoint records of `tensor`, which holds elements [start, start + numel) of a flat buffer of this layout.

        `owned`: without parameters that the first tensor-parallel rank holds as well.
        """
        found = []
        for parameter, begin in zip(self.parameters, self.starts, strict=True):
            a, b = max(start, begin), min(start + tensor.numel(), begin + parameter.numel())
            if a < b and (parameter.owned or not owned):
                found.append(Shard(key=f"{kind}/{parameter.global_name}", tensor=tensor[a - start : b - start],
                                   global_shape=parameter.global_shape, offset=parameter.global_offset,
                                   slice_shape=tuple(parameter.shape), flat_start=a - begin))
        return found


def initial_values(parameter: nn.Parameter, seed: int) -> Tensor:
    """FP32 initial weights of this rank's slice: a function of the seed, the name and the global element alone."""
    values = torch.full(tuple(parameter.shape), parameter.init_fill, dtype=torch.float32)
    if parameter.init_std is not None:
        assert parameter.dim() == 2
        row, column = parameter.global_offset
        kernels.philox_normal(values, seed, zlib.crc32(parameter.init_name.encode()), row, column, parameter.global_shape[1],
                              parameter.init_std)
    return values


class LossScaler:
    """Static or dynamic loss scale (Megatron's DynamicGradScaler): halve after `hysteresis` overflows, double after a window."""

    def __init__(self, precision: PrecisionConfig) -> None:
        self.precision = precision
        self.dynamic = precision.fp16 and precision.loss_scale is None
        self.scale = precision.loss_scale or (precision.initial_loss_scale if precision.fp16 else 1.0)
        self.good_steps, self.hysteresis = 0, precision.hysteresis

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
            self.scale, self.good_steps, self.hysteresis = state["scale"], int(state["good_steps"]), int(state["hysteresis"])


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step found: gradient norm (before clipping), zeros among the gradients, and whether it was skipped."""

    grad_norm: float
    num_zeros: float
    skipped: bool


class Optimizer:
    """AdamW over this rank's shard (ZeRO-1) or all of its flat buffer.

    Gradients come in as sums whose mean is taken by the loss's factor, times the loss scale; `step` reduces, unscales, clips,
    updates and, with ZeRO-1, gathers the weights.
    """

    def __init__(self, stage: nn.Module, run: RunConfig, groups: Groups) -> None:
        self.run, self.groups, self.config = run, groups, run.optimizer
        self.sharded = run.parallel.zero_stage == 1
        dtype, fp32 = DTYPES[run.precision.name], run.precision.name == "fp32"
        self.flat = FlatParameters(stage, dtype, run.training.seed, groups.dp.size)
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

    def _reduce_gradients(self) -> Tensor:
        """Sum gradients over data-parallel ranks; returns this rank's part."""
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
        return math.sqrt(self._sum_counted(self.master, kernels.squared_norm, self.sharded))

    def step(self, lr: float, weight_decay: float, count_zeros: bool = False) -> StepResult:
        """Update the weights from the accumulated gradients, or skip the update when they hold an Inf or NaN."""
        grads = self._reduce_gradients()
        norm = math.sqrt(self._sum_counted(grads, kernels.squared_norm, self.sharded)) / self.scaler.scale
        zeros = self._sum_counted(grads, kernels.count_zeros, self.sharded) if count_zeros else 0.0
        scale, overflow = self.scaler.scale, not math.isfinite(norm)
        self.scaler.update(overflow)
        if overflow:
            return StepResult(norm, zeros, True)
        clip = self.config.clip_grad / (norm + 1e-6) if self.config.clip_grad else math.inf
        self.steps += 1
        self._adamw(grads, lr, weight_decay, min(clip, 1.0) / scale)
        if self.sharded:
            self.groups.dp.all_gather(self.flat.values, self.flat.values[self.start : self.end].clone())
        return StepResult(norm, zeros, False)

    def _adamw(self, grads: Tensor, lr: float, weight_decay: float, grad_scale: float) -> None:
        config = self.config
        for r in self.flat.ranges:
            a, b = max(r.start, self.start) - self.start, min(r.end, self.end) - self.start
            if a < b:
                kernels.adamw(self.master[a:b], grads[a:b], self.exp_avg[a:b], self.exp_avg_sq[a:b], lr=lr, beta1=config.adam_beta1,
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
        if self.sharded:
            self.groups.dp.all_gather(self.flat.values, self.flat.values[self.start : self.end].clone())


def _ramp(style: str, fraction: float) -> float:
    """1 at fraction 0, 0 at fraction 1."""
    return {"constant": 1.0, "linear": 1.0 - fraction, "cosine": 0.5 * (math.cos(math.pi * fraction) + 1.0)}[style]


@dataclass(frozen=True)
class ParamSchedule:
    """Learning rate and weight decay as functions of the samples consumed (Megatron's OptimizerParamScheduler)."""

    config: OptimizerConfig
    warmup_samples: int
    decay_samples: int
    total_samples: int

    @staticmethod
    def of(run: RunConfig, global_batch_size: int) -> ParamSchedule:
        """From the -iters or -samples flags; iterations count as full global batches, as in Megatron."""
        o, t = run.optimizer, run.training
        total = t.train_samples if t.train_samples is not None else (t.train_iters or 0) * global_batch_size
        decay = o.lr_decay_samples or (o.lr_decay_iters * global_batch_size if o.lr_decay_iters else total)
        warmup = o.lr_warmup_samples or o.lr_warmup_iters * global_batch_size
        if o.lr_warmup_fraction is not None:
            warmup = int(o.lr_warmup_fraction * decay)
        return ParamSchedule(o, warmup, decay, total)

    def learning_rate(self, samples: int) -> float:
        """Rate of the iteration that starts when `samples` have been consumed (0 in the first iteration of a warm-up)."""
        o = self.config
        if self.warmup_samples and samples <= self.warmup_samples:
            return o.lr * samples / self.warmup_samples
        if o.lr_decay_style == "constant":
            return o.lr
        if samples > self.decay_samples:
            return o.min_lr
        fraction = (samples - self.warmup_samples) / max(1, self.decay_samples - self.warmup_samples)
        return o.min_lr + (o.lr - o.min_lr) * _ramp(o.lr_decay_style, fraction)

    def weight_decay(self, samples: int) -> float:
        """Weight decay of the same iteration."""
        o = self.config
        start = o.weight_decay if o.start_weight_decay is None else o.start_weight_decay
        end = o.weight_decay if o.end_weight_decay is None else o.end_weight_decay
        if o.weight_decay_incr_style == "constant":
            return end
        return end - (end - start) * _ramp(o.weight_decay_incr_style, min(1.0, samples / max(1, self.total_samples)))
