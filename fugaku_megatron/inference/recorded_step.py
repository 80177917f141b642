"""Record the kernel calls of one generated token and repeat them for the next.

A repetition copies the inputs and makes all calls in C++ (`kernels.Calls`), without layers,
autograd and allocations, which take longer than a small model's matmuls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..host import kernels

ALLOCATIONS = (
    "aten::empty",
    "aten::new_empty",
    "aten::empty_like",
    "aten::_unsafe_view",
)  # operations of torch without values


class RecordingKernels:
    """Kernel library whose calls in a step are recorded, for replay in C++."""

    def __init__(self, library: Any = kernels) -> None:
        self._library = library
        self._calls: Any = None  # kernels.Calls while calls are recorded

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library if self._calls is None else self._calls, name)

    def record(self, step: Callable[[], Tensor], inputs: Sequence[Tensor]) -> RecordedStep:
        self._calls = calls = kernels.Calls()
        try:
            with _KernelsAlone():  # type: ignore[no-untyped-call]  # torch's class has no types
                result = step()
        finally:
            self._calls = None
        return RecordedStep(calls, tuple(inputs), result)


class RecordedStep:
    """Recorded calls from `inputs` to `result`, at fixed addresses."""

    def __init__(
        self, calls: Callable[[], None], inputs: tuple[Tensor, ...], result: Tensor
    ) -> None:
        self.calls = calls
        self.inputs = inputs
        self.result = result

    def __call__(self, inputs: Sequence[Tensor]) -> Tensor:
        """Compute from inputs of the same shapes; the result is valid until the next call."""
        for own, new in zip(self.inputs, inputs, strict=True):
            own.copy_(new)
        self.calls()
        return self.result


class _KernelsAlone(TorchDispatchMode):
    """Torch mode that allows views and allocation only; a replay would skip other operations."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        assert function.is_view or function._schema.name in ALLOCATIONS, (
            f"{function} computes something that no kernel does"
        )
        return function(*args, **(kwargs or {}))
