"""MXFP4 weights of experts (OCP Microscaling Formats 1.0): 32 numbers of four bits with a common power of two.

NAME_blocks  uint8 (experts, outputs, inputs / 32, 16), the earlier number of a byte in its low half
NAME_scales  uint8 (experts, outputs, inputs / 32), the exponent + 127
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ...config.fields import check
from .tensor_directory import TensorDirectory, in_bf16

BLOCKS = "_blocks"
SCALES = "_scales"
_BIAS = 127
_BYTES = 16  # of a block
_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_SIZES, *(-size for size in _SIZES))


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the weights in BF16, exactly. blocks (outputs, n, 16), scales (outputs, n) -> (outputs, 32 n)."""
    pairs = torch.tensor([(low, high) for high in _VALUES for low in _VALUES])  # (256, 2), by byte
    numbers = pairs[blocks.int()].flatten(-2)  # (outputs, n, 32)
    exponents = scales.int().unsqueeze(-1) - _BIAS
    return torch.ldexp(numbers, exponents).flatten(-2).to(torch.bfloat16)


def _weight(files: TensorDirectory, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return the weights of all experts in BF16, (experts, inputs, outputs)."""
    blocks = files.read(name + BLOCKS)
    scales = files.read(name + SCALES)
    weight = torch.empty(shape, dtype=torch.bfloat16)
    for expert, own in enumerate(weight):
        own.copy_(dequantized(blocks[expert], scales[expert]).t())
    return weight


def unpacked(files: TensorDirectory) -> TensorDirectory:
    """Return the tensors with packed ones under their NAME. Raise ValueError for shapes that do not fit."""
    tensors = dict(files.tensors)
    computed = {}
    for place in files.tensors:
        name = place.removesuffix(BLOCKS)
        if name == place:
            continue
        file, blocks = files.tensors[place]
        check(
            name + SCALES in files.tensors,
            f"{file.path} holds {place} without {name}{SCALES}: copy the whole directory again",
        )
        scales = files.tensors[name + SCALES][1]
        right = (
            blocks.dtype == scales.dtype == torch.uint8
            and len(blocks.shape) == 4
            and blocks.shape[3] == _BYTES
            and blocks.shape[:3] == scales.shape
        )
        check(
            right,
            f"{file.path}: {place} has shape {list(blocks.shape)} and {name}{SCALES} "
            f"{list(scales.shape)}, which is not MXFP4: copy the whole directory again",
        )
        experts, outputs, count, _ = blocks.shape
        shape = (experts, 2 * _BYTES * count, outputs)
        tensors[name] = file, in_bf16(shape)
        computed[name] = partial(_weight, files, name, shape)
        del tensors[place], tensors[name + SCALES]
    return replace(files, tensors=tensors, computed=computed)
