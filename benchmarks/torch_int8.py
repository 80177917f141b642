"""PyTorch's INT8 matmuls on CPUs, the rivals of `benchmarks gemm --dtype int8`.

    torch._int_mm alone  oneDNN's matmul of operands that are INT8 already, with INT32 results
    torch._int_mm        the same with quantization and scales in torch's operations, as eager programs on top of it compute

A right operand that is a weight is quantized and packed outside the timing, as ours is. torchao calls torch._int_mm on CPUs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LARGEST = 127
Run = Callable[[], object]


def quantize(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return (INT8 values, FP32 scales), with one scale for the elements along `dim`."""
    values = x.float()
    scales = values.abs().amax(dim, keepdim=True) / LARGEST
    return (values / scales).round_().to(torch.int8), scales


def matmul_alone(left: Tensor, right: Tensor, out: Tensor, is_weight: bool) -> Run:
    """Return the INT32 product of left (m, k) and right (k, n), both quantized outside the timing."""
    a = quantize(left, 1)[0]
    b = quantize(right, 0)[0]
    return lambda: torch._int_mm(a, b)


def scaled_matmul(left: Tensor, right: Tensor, out: Tensor, is_weight: bool) -> Run:
    """Return left @ right in out; a right operand that is no weight is quantized too, and the product added."""
    weight = quantize(right, 0) if is_weight else None

    def run() -> None:
        a, a_scales = quantize(left, 1)
        b, b_scales = weight if is_weight else quantize(right, 0)
        product = torch._int_mm(a, b) * a_scales * b_scales
        if is_weight:
            out.copy_(product)
        else:
            out.add_(product)

    return run


RIVALS: dict[str, Callable[[Tensor, Tensor, Tensor, bool], Run]] = {
    "torch._int_mm alone": matmul_alone,
    "torch._int_mm": scaled_matmul,
}
