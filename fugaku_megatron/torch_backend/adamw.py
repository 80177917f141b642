"""Steps of torch.optim.AdamW(fused=True) and Adam(fused=True), FP32."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..host import kernels


class Step(NamedTuple):
    """Arguments of ATen's operator after the learning rate."""

    beta1: float
    beta2: float
    weight_decay: float
    eps: float
    amsgrad: bool
    maximize: bool
    grad_scale: Tensor | None
    found_inf: Tensor | None


def adamw(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor],
    state_steps: list[Tensor],
    lr: float,
    *others: object,
) -> object:
    """Update parameters and moments in place."""
    step = Step(*others)  # type: ignore[arg-type]
    counts = [int(each) for each in state_steps]
    states = list(zip(params, grads, exp_avgs, exp_avg_sqs))
    if not _is_served(step) or min(counts, default=0) < 1 or not all(map(_can_update, states)):
        return NotImplemented
    for state, count in zip(states, counts):
        kernels.adamw(
            *state,
            lr=lr,
            beta1=step.beta1,
            beta2=step.beta2,
            eps=step.eps,
            weight_decay=step.weight_decay,
            step=count,
            grad_scale=-1.0 if step.maximize else 1.0,
        )
    return None


def adam(*arguments: object) -> object:
    """Update parameters and moments in place, without weight decay, which Adam adds to the gradient."""
    weight_decay = arguments[9]
    if weight_decay:
        return NotImplemented
    return adamw(*arguments)  # type: ignore[arg-type]


def _is_served(step: Step) -> bool:
    if step.amsgrad or step.grad_scale is not None or step.found_inf is not None:
        return False
    return step.eps > 0 and 0 <= step.beta1 < 1 and 0 <= step.beta2 < 1


def _can_update(state: tuple[Tensor, ...]) -> bool:
    """Return True for contiguous FP32 tensors that share no memory."""
    shape = state[0].shape
    for each in state:
        if each.dtype != torch.float32 or each.shape != shape or not each.is_contiguous():
            return False
    begins = sorted(each.data_ptr() for each in state)
    size = 4 * state[0].numel()
    return all(after - before >= size for before, after in zip(begins, begins[1:]))
