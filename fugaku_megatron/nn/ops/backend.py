"""The kernels that operations run on, native (C++) or torch's own, for each family of operations."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..backward import WeightGradients
from ..parameter import WeightCache

if TYPE_CHECKING:
    from typing_extensions import Self

FAMILIES = ("gemm", "attention", "rowwise", "loss", "embedding")
BACKENDS = ("native", "torch")


@dataclass(frozen=True)
class Backend:
    """The backend of every family, and the state that operations share.

    choice: "native" or "torch" for each name in FAMILIES; checkpoints record it.
    kernels: C++ library, also for the optimizer, initial weights, and the dropout masks of both backends.
    fp16_sum_length: terms that a native linear layer with FP16 operands sums in FP16 before it adds in FP32; 0: none. A matmul raises
        ValueError if the kernels' target has no FP16 arithmetic.
    weight_cache: packed weights that are reused until the optimizer's next step.
    weight_gradients: work that a schedule may postpone.
    few_rows: native matmuls with at most so many rows read the weight unpacked and save nothing for a backward.
    unquantized: with INT8 matmuls, the operations of matmuls that are not quantized; None: no matmul is.
    int8_head: the head is quantized too.
    """

    choice: dict[str, str]
    kernels: Any
    fp16_sum_length: int = 0
    weight_cache: WeightCache | None = None
    weight_gradients: WeightGradients = field(default_factory=WeightGradients)
    few_rows: int = 0
    unquantized: Self | None = None
    int8_head: bool = False

    def is_native(self, family: str) -> bool:
        return self.choice[family] == "native"

    def unpacked(self) -> Self:
        """Return the operations for rebuilt weights: without a cache, not quantized, summed in FP32."""
        plain = self.unquantized or self
        return replace(plain, weight_cache=None, few_rows=0, fp16_sum_length=0)

    def for_head(self) -> Self:
        """Return the operations of the output layer."""
        return self if self.int8_head else self.unquantized or self

    def sum_length(self, x: Tensor) -> int:
        return self.fp16_sum_length if x.dtype == torch.float16 else 0

    def packed(self, weight: Tensor, dtype: torch.dtype, transposed: bool) -> Tensor | None:
        """Return the cached bytes (n,) of weight (out, in) for activations of `dtype`, or None, also for sums in FP16."""
        if self.weight_cache is None or (dtype == torch.float16 and self.fp16_sum_length):
            return None
        return self.weight_cache.packed(weight, dtype, transposed)

    def weights_changed(self, frozen: bool = False) -> None:
        """Invalidate packed weights. frozen: untrained weights too."""
        if self.weight_cache is not None:
            self.weight_cache.weights_changed(frozen)
        if self.unquantized is not None:
            self.unquantized.weights_changed(frozen)
