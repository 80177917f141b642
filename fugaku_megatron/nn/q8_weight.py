"""Frozen weights in eight bits: int8 values with a BF16 scale for each 64 neighbouring numbers of a row.

A weight (..., in) is about `values * scales`: 1 + 1/32 bytes a parameter. Matmuls read this form and round it to the dtype of the
activations (`kernels_sve/gemm/q8.h`). A matrix in use is a tensor of `values` with the attribute `scales`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..config.rows import Q8_BLOCK
from ..host import kernels


def blocks_of(inputs: int) -> int:
    """Return the scales of a row."""
    return -(-inputs // Q8_BLOCK)


class Q8Weight(NamedTuple):
    """A weight in eight bits.

    values: (..., in) int8
    scales: (..., blocks) BF16
    """

    values: Tensor
    scales: Tensor

    @staticmethod
    def empty(*shape: int) -> Q8Weight:
        scales = torch.empty(*shape[:-1], blocks_of(shape[-1]), dtype=torch.bfloat16)
        return Q8Weight(torch.empty(shape, dtype=torch.int8), scales)

    @staticmethod
    def of(weight: Tensor) -> Q8Weight:
        return Q8Weight.empty(*weight.shape).quantize(weight)

    def quantize(self, weight: Tensor) -> Q8Weight:
        """Quantize `weight` (..., in), of any float dtype."""
        matrices = (tensor.flatten(0, -2) for tensor in (weight, self.values, self.scales))
        kernels.quantize_q8(*matrices)
        return self

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        out = torch.empty(self.values.shape, dtype=dtype)
        kernels.dequantize_q8(
            self.values.flatten(0, -2), self.scales.flatten(0, -2), out.flatten(0, -2)
        )
        return out

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes


def scales_of(weight: Tensor) -> Tensor | None:
    """Return the scales (..., blocks) of a weight in eight bits; None for another weight."""
    return getattr(weight, "scales", None)


def keywords(weight: Tensor) -> dict[str, Any]:
    """Return the keyword with which a kernel takes `weight`."""
    scales = scales_of(weight)
    return {} if scales is None else {"scales": scales}


def columns_of(weight: Tensor, columns: slice) -> tuple[Tensor, dict[str, Any]]:
    """Return columns of a matrix, which begin at a block, and the keyword with which a kernel takes them."""
    scales = scales_of(weight)
    if scales is None:
        return weight[:, columns], {}
    assert columns.start % Q8_BLOCK == 0, columns
    blocks = slice(columns.start // Q8_BLOCK, blocks_of(columns.stop))
    return weight[:, columns], {"scales": scales[:, blocks]}


def as_float(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight for an operation of torch: `weight` itself, or its numbers as `dtype`."""
    scales = scales_of(weight)
    return weight if scales is None else Q8Weight(weight.detach(), scales).dequantize(dtype)
