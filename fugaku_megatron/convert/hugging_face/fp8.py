"""FP8 weights with a scale for each block, as DeepSeek-V3 was published.

NAME            F8_E4M3 (outputs, inputs)
NAME_scale_inv  floats (blocks of outputs, blocks of inputs), by which the numbers of a block are multiplied

The last blocks of a row and a column may be smaller.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...config.fields import check, is_off
from ...text.named_files import JsonObject
from .rules import FILE
from .tensor_directory import TensorDirectory, in_bf16

FP8 = torch.float8_e4m3fn
SCALE = "_scale_inv"
# Fields of quantization_config. The modules that are not in FP8 are known from the files; scales are stored as numbers.
_READ = ("quant_method", "fmt", "activation_scheme", "weight_block_size")
_IGNORED = ("modules_to_not_convert", "ignored_layers", "scale_fmt")


class BlockSize(NamedTuple):
    """Outputs and inputs of a block."""

    rows: int
    columns: int

    def counts(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the numbers of blocks of a weight (outputs, inputs)."""
        return -(-shape[0] // self.rows), -(-shape[1] // self.columns)


def block_size(quantization: JsonObject) -> BlockSize:
    """Return the block size of a quantization_config. Raise ValueError for another form of FP8."""
    sizes = quantization.get("weight_block_size")
    right = (
        isinstance(sizes, list)
        and len(sizes) == 2
        and all(type(size) is int and size > 0 for size in sizes)
        and quantization.get("fmt", "e4m3") == "e4m3"
        and quantization.get("activation_scheme", "dynamic") == "dynamic"
        and all(
            name in (*_READ, *_IGNORED) or is_off(value) for name, value in quantization.items()
        )
    )
    check(
        right,
        f"{FILE}: quantization_config is {quantization!r:.120}, and FP8 is read with fmt e4m3, a "
        "weight_block_size of two numbers, and activation_scheme dynamic",
    )
    assert isinstance(sizes, list)
    return BlockSize(*sizes)


def _widened(files: TensorDirectory, name: str, block: BlockSize) -> Tensor:
    """Return the products of FP8 numbers (outputs, inputs) and their blocks' scales, rounded to BF16."""
    weight = files.read(name)
    scales = files.read(name + SCALE)
    result = torch.empty(weight.shape, dtype=torch.bfloat16)
    columns = weight.shape[1]
    for number, row in enumerate(scales.float()):
        rows = slice(number * block.rows, (number + 1) * block.rows)
        factors = row.repeat_interleave(block.columns)[:columns]
        result[rows] = weight[rows].float() * factors
    return result


def without_scales(files: TensorDirectory, block: BlockSize) -> TensorDirectory:
    """Return the tensors, FP8 ones in BF16. Raise ValueError for scales that are missing or do not fit."""
    tensors = dict(files.tensors)
    computed = {}
    for name, (file, stored) in files.tensors.items():
        if stored.dtype != FP8:
            continue
        scale = name + SCALE
        check(
            scale in files.tensors,
            f"{file.path} holds {name} in FP8 without {scale}: copy the whole directory again",
        )
        found = files.tensors[scale][1]
        right = (
            len(stored.shape) == 2
            and found.shape == block.counts(stored.shape)
            and found.dtype.is_floating_point
            and found.dtype != FP8
        )
        check(
            right,
            f"{file.path}: {name} has shape {list(stored.shape)} and {scale} {list(found.shape)}, which is not FP8 "
            f"in blocks of {block.rows} x {block.columns}: copy the whole directory again",
        )
        tensors[name] = file, in_bf16(stored.shape)
        computed[name] = partial(_widened, files, name, block)
        del tensors[scale]
    return replace(files, tensors=tensors, computed=computed)
