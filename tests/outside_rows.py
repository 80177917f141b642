"""Rows that a program outside the package adds to its tables; each computes what a built-in row computes, in plain torch."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fugaku_megatron.comm.autograd import Saved, apply_saving
from fugaku_megatron.config.decay_shapes import SHAPES, Shape
from fugaku_megatron.config.layer_kinds import IN_PROJ, MIXERS, OUT_PROJ, MixerPart
from fugaku_megatron.config.optimizer import OPTIMIZERS, OptimizerPart
from fugaku_megatron.config.rows import ACTIVATIONS, NORMS, ActivationPart, NormPart
from fugaku_megatron.costs.mixers import MixerCosts
from fugaku_megatron.costs.records import MatmulCollectives
from fugaku_megatron.nn.layers import ColumnParallelLinear, Context, Norm, RowParallelLinear
from fugaku_megatron.nn.parameter import accumulate
from fugaku_megatron.optim.optimizer import ElementUpdate
from fugaku_megatron.pipeline.instruction_lists import with_messages
from fugaku_megatron.pipeline.instructions import BACKWARD, FORWARD, Instruction
from fugaku_megatron.pipeline.schedule import Schedule
from fugaku_megatron.pipeline.schedule_names import SCHEDULES, ScheduleRow


def gate(pre: Tensor) -> Tensor:
    gates, values = pre.chunk(2, -1)
    return gates * torch.sigmoid(gates) * values


def square(pre: Tensor) -> Tensor:
    return F.relu(pre) ** 2


def _normalized(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    def forward() -> tuple[Tensor, Saved]:
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
        return x * rstd * weight, (x, rstd)

    def backward(dy: Tensor, x: Tensor, rstd: Tensor) -> Tensor:
        accumulate(weight, (dy * x * rstd).sum((0, 1)))
        scaled = dy * weight
        return rstd * (scaled - x * rstd.square() * (scaled * x).mean(-1, keepdim=True))

    return apply_saving(forward, backward, x, weight)


class RootMeanSquare(Norm):
    """RMS norm."""

    def __init__(self, name: str, context: Context) -> None:
        super().__init__(name, context)
        self.weight = context.parameter(f"{name}.weight", (context.model.hidden_size,), fill=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return _normalized(x, self.weight, self.epsilon)


class CausalMean(nn.Module):
    """The mean of all tokens so far, channel by channel."""

    output_bias = None

    def __init__(self, name: str, layer: int, context: Context) -> None:
        super().__init__()
        h = context.model.hidden_size
        self.in_proj = ColumnParallelLinear(f"{name}.{IN_PROJ}", h, (h,), context, bias=False)
        self.out_proj = RowParallelLinear(f"{name}.{OUT_PROJ}", h, h, context, bias=False)

    def forward(self, x: Tensor, forward_pass) -> Tensor:
        values = self.in_proj(x, forward_pass)
        tokens = torch.arange(1, len(values) + 1).view(-1, 1, 1)
        return self.out_proj(values.cumsum(0) / tokens, forward_pass)


class CausalMeanCosts(MixerCosts):
    def shapes(self, model):
        return dict.fromkeys((IN_PROJ, OUT_PROJ), (model.hidden_size, model.hidden_size))

    def records(self, run, cp_comm_type, kind):
        around = MatmulCollectives.from_run(run)
        h = run.model.hidden_size
        rows = run.tokens_per_microbatch
        width = h // run.tp
        saved = rows * width * run.element_bytes
        return (
            around.column(IN_PROJ, (rows, width, h), saved_bytes=run.residual_bytes),
            around.row(OUT_PROJ, (rows, h, width), saved_bytes=saved),
        )


def adamw(update: ElementUpdate) -> None:
    """AdamW (Loshchilov and Hutter 2019)."""
    o = update.config
    update.exp_avg.lerp_(update.gradients, 1 - o.adam_beta1)
    update.exp_avg_sq.lerp_(update.gradients.square(), 1 - o.adam_beta2)
    mean = update.exp_avg / (1 - o.adam_beta1**update.step)
    square = update.exp_avg_sq / (1 - o.adam_beta2**update.step)
    update.weights.mul_(1 - update.lr * update.weight_decay)
    update.weights.sub_(update.lr * mean / (square.sqrt() + o.adam_eps))


def momentum(update: ElementUpdate) -> None:
    """Gradient descent with momentum (Polyak 1964)."""
    update.exp_avg.mul_(update.config.adam_beta1).add_(update.gradients)
    update.weights.sub_(update.exp_avg, alpha=update.lr)


def descent(update: ElementUpdate) -> None:
    update.weights.sub_(update.gradients, alpha=update.lr)


def all_forwards_first(schedule: Schedule, stage: int) -> list[Instruction]:
    """GPipe (Huang et al. 2019): all forwards, then all backwards."""
    numbers = range(schedule.microbatches)
    computations = [Instruction(op, m) for op in (FORWARD, BACKWARD) for m in numbers]
    return with_messages(schedule.placement, stage, computations)


ROWS = [
    (ACTIVATIONS, "gate", ActivationPart(function=f"{__name__}:gate", gated=True)),
    (ACTIVATIONS, "square", ActivationPart(function=f"{__name__}:square")),
    (NORMS, "RMS", NormPart(layer=f"{__name__}:RootMeanSquare", vectors=1, statistics=1)),
    (
        MIXERS,
        "causal_mean",
        MixerPart(
            layer=f"{__name__}:CausalMean",
            symbol="M",
            linears=(IN_PROJ, OUT_PROJ),
            costs=f"{__name__}:CausalMeanCosts",
        ),
    ),
    (OPTIMIZERS, "own_adamw", OptimizerPart(elements=f"{__name__}:adamw")),
    (
        OPTIMIZERS,
        "momentum",
        OptimizerPart(elements=f"{__name__}:momentum", states=("exp_avg",)),
    ),
    (OPTIMIZERS, "descent", OptimizerPart(elements=f"{__name__}:descent", states=())),
    (SHAPES, "straight", Shape(factor=lambda fraction: 1 - fraction)),
    (SCHEDULES, "gpipe", ScheduleRow(lists=f"{__name__}:all_forwards_first")),
]
