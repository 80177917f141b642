"""Kernels as differentiable operators of torch.library, which torch.compile traces without a break."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..host import kernels


def none() -> Tensor:
    """Return a tensor in place of an absent one, because operators take and return lists of tensors."""
    return torch.empty(0)


def given(tensor: Tensor) -> Tensor | None:
    """Return None for an absent tensor."""
    return tensor if tensor.numel() else None


def launch(name: str, *arguments: Any, **options: Any) -> None:
    """Call a kernel, but not with the tensors without memory of torch.compile."""
    if not any(isinstance(each, FakeTensor) for each in arguments):
        getattr(kernels, name)(*arguments, **options)


def supports(*tensors: Tensor) -> bool:
    """Return whether tensors have elements and one dtype, which the kernels have too."""
    dtype = tensors[0].dtype
    return dtype in (torch.float32, torch.bfloat16) and all(
        x.device.type == "cpu" and x.dtype == dtype and x.numel() for x in tensors
    )


class KernelOperator:
    """Operator `fugaku::name`.

    forward: (*tensors, numbers) -> results; the first ones are for the caller, all are kept for backward.
    backward: (tensors, results, gradients of results, numbers) -> gradients of tensors. An absent one is `none()`.
    """

    def __init__(
        self,
        name: str,
        forward: Callable[..., list[Tensor]],
        backward: Callable[..., list[Tensor]],
    ) -> None:
        self._forward = forward

        def run(tensors: list[Tensor], numbers: list[float]) -> list[Tensor]:
            return forward(*tensors, numbers)

        def run_backward(
            tensors: list[Tensor],
            results: list[Tensor],
            gradients: list[Tensor],
            numbers: list[float],
        ) -> list[Tensor]:
            return backward(tensors, results, gradients, numbers)

        def save(ctx: Any, inputs: tuple[list[Tensor], list[float]], output: list[Tensor]) -> None:
            tensors, ctx.numbers = inputs
            ctx.count = len(tensors)
            ctx.save_for_backward(*tensors, *output)
            ctx.set_materialize_grads(False)

        def differentiate(ctx: Any, gradients: list[Tensor | None]) -> tuple[Any, None]:
            saved = list(ctx.saved_tensors)
            present = [none() if each is None else each.contiguous() for each in gradients]
            results = gradient(saved[: ctx.count], saved[ctx.count :], present, ctx.numbers)
            return [given(each) for each in results], None

        self._operator = torch.library.custom_op(f"fugaku::{name}", run, mutates_args=())
        self._operator.register_fake(run)
        self._operator.register_autograd(differentiate, setup_context=save)
        gradient = torch.library.custom_op(
            f"fugaku::{name}_backward", run_backward, mutates_args=()
        )
        gradient.register_fake(run_backward)

    def __call__(self, *tensors: Tensor | None, numbers: Sequence[float] = ()) -> list[Tensor]:
        """Return the results. Without gradients the kernel is called past the dispatcher."""
        present = [none() if each is None else each for each in tensors]
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            # Autograd does not take an empty list.
            some = [float(each) for each in numbers] or [0.0]
            results: list[Tensor] = self._operator(present, some)
            return results
        return self._forward(*present, numbers)
