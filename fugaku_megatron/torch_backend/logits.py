"""Logits that are computed only if something reads them: a loss takes the output layer's input instead.

An accelerated output layer returns `LazyLogits`. Conversions and views of rows are lazy as well, and
torch.nn.functional.cross_entropy computes the loss in blocks; every other function of torch gets the computed logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from .linear_loss import Head, cross_entropy
from .served import compute_dtype, is_served

# Answered by the tensor that stands for the logits.
DESCRIPTIONS = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point),
}


class LazyLogits(Tensor):
    """Logits (..., v) of x (..., h) in a dtype of their own. The elements are NaN."""

    x: Tensor
    head: Head
    known: Tensor | None

    @staticmethod
    def of(x: Tensor, head: Head, dtype: torch.dtype) -> LazyLogits:
        shape = (*x.shape[:-1], len(head.weight))
        logits = torch.full((), torch.nan, dtype=dtype).expand(shape).as_subclass(LazyLogits)
        logits.x = x
        logits.head = head
        logits.known = None
        return logits

    def computed(self) -> Tensor:
        """Return the logits."""
        if self.known is None:
            with torch.enable_grad(), torch.autocast("cpu", enabled=False):
                self.known = F.linear(self.x, *self.head.to(self.x.dtype)).to(self.dtype)
        return self.known

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Describe the logits, call a lazy form, or compute them."""
        kwargs = kwargs or {}
        if func in DESCRIPTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else None
        if func in LAZY and isinstance(first, LazyLogits) and first.known is None:
            result = LAZY[func](*args, **kwargs)
            if result is not NotImplemented:
                return result
        args, kwargs = tree_map_only(LazyLogits, LazyLogits.computed, (args, kwargs))
        return func(*args, **kwargs)


def _to(logits: LazyLogits, dtype: Any = torch.float32, **options: Any) -> Any:
    if options or not isinstance(dtype, torch.dtype):
        return NotImplemented
    return LazyLogits.of(logits.x, logits.head, dtype)


def _view(logits: LazyLogits, *shape: Any) -> Any:
    """Flatten the rows."""
    if shape != (-1, logits.shape[-1]):
        return NotImplemented
    return LazyLogits.of(logits.x.flatten(0, -2), logits.head, logits.dtype)


def _cross_entropy(logits: LazyLogits, target: Tensor, weight: Any = None, **options: Any) -> Any:
    defaults = {"size_average": None, "reduce": None, "label_smoothing": 0.0}
    ignore_index = options.pop("ignore_index", -100)
    mean = {"mean": True, "sum": False}.get(options.pop("reduction", "mean"))
    if (
        weight is not None
        or mean is None
        or any(defaults[name] != options[name] for name in options)
    ):
        return NotImplemented
    if target.dtype != torch.int64 or target.shape != logits.shape[:1] or logits.ndim != 2:
        return NotImplemented
    return cross_entropy(logits.x, logits.head, target, ignore_index, mean).to(logits.dtype)


LAZY: dict[Any, Callable[..., Any]] = {
    Tensor.float: _to,
    Tensor.to: _to,
    Tensor.contiguous: lambda logits: logits,
    Tensor.view: _view,
    Tensor.reshape: _view,
    F.cross_entropy: _cross_entropy,
}


def lazy_linear(self: Any, x: Tensor) -> Tensor:
    """Forward of an output layer, lazy while gradients are recorded."""
    x = x.to(compute_dtype(x))
    records = torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad)
    if not records or not is_served(x):
        return F.linear(x, self.weight, self.bias)
    return LazyLogits.of(x, Head(self.weight, self.bias), x.dtype)
