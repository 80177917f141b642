"""Steps of torch.optim.AdamW and Adam, FP32: the fused operators, also for the loop of small ones that is the CPU's default."""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import adam as torch_adam

from ..host import kernels
from . import build


class Step(NamedTuple):
    """Arguments of ATen's operator after its lists."""

    lr: float
    beta1: float
    beta2: float
    weight_decay: float
    eps: float
    amsgrad: bool
    maximize: bool
    grad_scale: Tensor | None
    found_inf: Tensor | None

    @property
    def is_served(self) -> bool:
        if self.amsgrad or self.grad_scale is not None or self.found_inf is not None:
            return False
        return self.eps > 0 and 0 <= self.beta1 < 1 and 0 <= self.beta2 < 1


def adamw(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor],
    state_steps: list[Tensor],
    *others: Any,
) -> object:
    """Update parameters and moments in place. others: see `Step`"""
    step = Step(*others)
    counts = [int(each) for each in state_steps]
    states = list(zip(params, grads, exp_avgs, exp_avg_sqs))
    if not step.is_served or min(counts, default=0) < 1 or not all(map(_can_update, states)):
        return NotImplemented
    for state, count in zip(states, counts):
        kernels.adamw(
            *state,
            lr=step.lr,
            beta1=step.beta1,
            beta2=step.beta2,
            eps=step.eps,
            weight_decay=step.weight_decay,
            step=count,
            grad_scale=-1.0 if step.maximize else 1.0,
        )
    return None


def adam(*arguments: Any) -> object:
    """Update parameters and moments in place, without weight decay, which Adam adds to the gradient."""
    return NotImplemented if Step(*arguments[6:]).weight_decay else adamw(*arguments)


def fuse_default_step() -> None:
    """Replace the default step of torch.optim.Adam and AdamW, which has the fused step's arguments."""
    default = torch_adam._single_tensor_adam

    @functools.wraps(default)
    def step(params: list[Tensor], *states: list[Tensor], **options: object) -> None:
        chosen = torch_adam._fused_adam if _can_fuse(params, *states, **options) else default
        chosen(params, *states, **options)  # type: ignore[arg-type]

    torch_adam._single_tensor_adam = step  # type: ignore[assignment]


def _can_fuse(*tensors: list[Tensor], **options: object) -> bool:
    """Return True for FP32 tensors of the CPU and numbers as options, outside a compiled function."""
    if torch.compiler.is_compiling() or build.load().in_use() == "torch":
        return False
    if options["capturable"] or options["differentiable"] or isinstance(options["lr"], Tensor):
        return False
    return all(
        type(each) in (Tensor, Parameter) and each.dtype == torch.float32 and each.is_cpu
        for each in itertools.chain(*tensors)
    )


def _can_update(state: tuple[Tensor, ...]) -> bool:
    """Return True for contiguous FP32 tensors that share no memory."""
    shape = state[0].shape
    for each in state:
        if each.dtype != torch.float32 or each.shape != shape or not each.is_contiguous():
            return False
    begins = sorted(each.data_ptr() for each in state)
    size = 4 * state[0].numel()
    return all(after - before >= size for before, after in zip(begins, begins[1:]))
