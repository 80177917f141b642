"""A step of generation made of kernel calls alone: recorded once, called again for every following token.

The next token of as many samples takes the same calls with the same weights, and where results lie in the same memory again, with
the same tensors: only what the inputs hold is new. So a recording keeps each call with its tensors, and a repetition copies its
inputs and makes the calls, all of them in C++ (`kernels.Calls`): without layers, autograd, allocations and checks, which take
longer than the products of a small model.
Left out: when a step may be repeated (`inference.generation`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..host import kernels

ALLOCATIONS = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::_unsafe_view")  # operations of torch without values


class RecordingKernels:
    """The kernel library, whose calls are kept while `record` runs."""

    def __init__(self) -> None:
        self._calls: Any = None  # kernels.Calls while calls are recorded

    def __getattr__(self, name: str) -> Any:
        return getattr(kernels if self._calls is None else self._calls, name)

    def record(self, step: Callable[[], Tensor], inputs: Sequence[Tensor]) -> RecordedStep:
        """Run `step`, which reads `inputs` and computes with kernels alone.

        AssertionError when torch computes something, AttributeError when a kernel does whose calls cannot be kept.
        """
        self._calls = calls = kernels.Calls()
        try:
            with _KernelsAlone():
                result = step()
        finally:
            self._calls = None
        return RecordedStep(calls, tuple(inputs), result)


class RecordedStep:
    """Calls of kernels from `inputs` to `result`, both of which keep their memory."""

    def __init__(self, calls: Callable[[], None], inputs: tuple[Tensor, ...], result: Tensor) -> None:
        self.calls, self.inputs, self.result = calls, inputs, result

    def __call__(self, inputs: Sequence[Tensor]) -> Tensor:
        """The result for other inputs of the same shapes; it holds until the next call."""
        for own, new in zip(self.inputs, inputs, strict=True):
            own.copy_(new)
        self.calls()
        return self.result


class _KernelsAlone(TorchDispatchMode):
    """Lets torch make views and allocate, and nothing else: a repetition would leave it out."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function.is_view or function._schema.name in ALLOCATIONS, f"{function} computes something that no kernel does"
        return function(*args, **(kwargs or {}))
