"""Backward of a subgraph: recompute of activations, and weight gradients that a schedule computes later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..comm.autograd import Function, Gradients, Saved, apply_saving
from .parameter import accumulate


def backward(y: Tensor, dy: Tensor | None) -> None:
    """Run torch.autograd.backward(y, dy) without its import of sympy, 32 MiB a rank. dy: None means ones."""
    dy = torch.ones_like(y) if dy is None else dy
    torch.autograd.Variable._execution_engine.run_backward(
        (y,), (dy,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def attach_loss(x: Tensor, loss: Tensor, factor: float) -> Tensor:
    """Return x; its backward adds `factor` to the gradient of `loss` ()."""

    def backward(dx: Tensor) -> Gradients:
        return dx, torch.tensor(factor, dtype=torch.float32)

    return apply_saving(lambda: (x.view_as(x), ()), backward, x, loss)


class _Recompute(Function[Tensor]):
    @staticmethod
    def forward(
        ctx: Any,
        function: Callable[..., Tensor],
        again: Callable[..., Tensor],
        x: Tensor,
        *args: Any,
    ) -> Tensor:
        ctx.again = again
        ctx.args = args
        ctx.save_for_backward(x)
        return function(x, *args)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Gradients:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.again(x, *ctx.args)
        y.data = y.new_empty(1)  # backward reads none of the result
        backward(y, dy)
        return None, None, x.grad, *(None for _ in ctx.args)


def recompute(
    function: Callable[..., Tensor],
    x: Tensor,
    *args: Any,
    again: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Return function(x, *args), and recompute its intermediate tensors in backward.

    Dropout needs no random state. torch.utils.checkpoint would load torch's compiler, 70 MiB a rank.

    again: called in backward in place of `function`; builds the same graph and may skip values that only the result needs.
    """
    assert x.requires_grad or not torch.is_grad_enabled(), (
        "autograd would drop the function's gradients"
    )
    return _Recompute.apply(function, again or function, x, *args)


def by_autograd(
    function: Callable[..., Any],
    tensors: Sequence[Tensor | None],
    parameters: Sequence[Tensor] = (),
) -> Any:
    """Return function(*tensors, *parameters), a tensor or a tuple; its backward calls the function again and takes autograd's gradients.

    parameters: their gradients are accumulated in FP32
    """

    def forward() -> tuple[Any, Saved]:
        return function(*tensors, *parameters), tuple(tensors)

    def backward(*arguments: Any) -> Gradients:
        count = len(arguments) - len(tensors)
        leaves = [None if x is None else x.detach().requires_grad_() for x in arguments[count:]]
        weights = [weight.detach().float().requires_grad_() for weight in parameters]
        with torch.enable_grad():
            results = function(*leaves, *weights)
        wanted = [x for x in (*leaves, *weights) if x is not None]
        found = iter(torch.autograd.grad(results, wanted, arguments[:count]))
        gradients = [None if x is None else next(found) for x in leaves]
        for weight, gradient in zip(parameters, found, strict=True):
            accumulate(weight, gradient)
        return tuple(gradients)

    return apply_saving(forward, backward, *tensors, *parameters)


@contextmanager
def rebuilt(x: Tensor, rebuild: Callable[[], Tensor]) -> Iterator[None]:
    """Save nothing of x (s, b, ...) inside the block: backward calls `rebuild` for its values."""
    place = x.data_ptr()
    shape = x.shape

    def pack(saved: Tensor) -> Tensor | None:
        is_x = saved.data_ptr() == place and saved.shape == shape
        return None if is_x else saved

    def unpack(saved: Tensor | None) -> Tensor:
        if saved is not None:
            return saved
        with torch.no_grad():
            return rebuild()

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


# A backward splits in two (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", arXiv:2401.10241, section 2): input gradients, for
# which another stage waits, and weight gradients, for which only the optimizer waits. Operations queue weight gradients:
#
#     gradients.add(work)                    runs at once, or
#     with gradients.put_off() as waiting:
#         backward(y, dy)                    computes input gradients alone
#     waiting.run()                          runs the same calls in the same order, so the same bits

Work = Callable[[], object]


class Waiting:
    """Postponed work of one backward, with the tensors that it needs."""

    def __init__(self) -> None:
        self._work: deque[Work] = deque()

    def append(self, work: Work) -> None:
        self._work.append(work)

    @torch.no_grad()  # as autograd calls a backward
    def run(self) -> None:
        while self._work:
            self._work.popleft()()


class WeightGradients:
    """Queue of a rank's weight-gradient work, used by one thread."""

    def __init__(self) -> None:
        self._waiting: Waiting | None = None

    @property
    def waits(self) -> bool:
        """True if added work is postponed: its operands must not change."""
        return self._waiting is not None

    def add(self, work: Work) -> None:
        if self._waiting is None:
            work()
        else:
            self._waiting.append(work)

    @contextmanager
    def put_off(self) -> Iterator[Waiting]:
        """Postpone and return the work that is added inside the block."""
        assert self._waiting is None, "the work of another backward is being put off"
        self._waiting = waiting = Waiting()
        try:
            yield waiting
        finally:
            self._waiting = None
