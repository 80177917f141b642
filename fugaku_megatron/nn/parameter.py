"""Parameters: place in the global model, gradient, views, and weights in eight bits or packed for the matmul kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..config.rows import Q8_BLOCK
from ..host import kernels


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """Place and meaning of a parameter in the whole model.

    name, shape: global.
    offset: first element of this rank's slice in each dimension.
    partition_dim: dimension sharded over tensor-parallel ranks; None for a replica.
    init_std: of normal initial values; None: `init_fill`.
    log_range: initial values are logarithms of uniform numbers in this range.
    init_name: selects the random stream (a tied head starts like the embedding).
    owned: this rank saves it.
    counted: this rank's copy counts in norms.
    sequence_parallel: replica with partial gradients, from a sequence shard or own heads, summed over tensor-parallel ranks.
    expert: of divided experts; ranks with the same experts reduce its gradient.
    quantized: stored in eight bits (`Q8Weight`).
    decays: a vector to which weight decay applies.
    balances: bias on router scores. The optimizer uses only the sign of its gradient, tokens beyond the mean per expert.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    partition_dim: int | None
    init_std: float | None
    init_fill: float
    init_name: str
    owned: bool
    counted: bool
    log_range: tuple[float, float] | None = None
    sequence_parallel: bool = False
    expert: bool = False
    decays: bool = False
    balances: bool = False
    frozen: bool = False
    quantized: bool = False

    @cached_property
    def is_matrix(self) -> bool:
        return len(self.shape) > 1 and not self.name.endswith(".bias")

    @cached_property
    def decayed(self) -> bool:
        """True if weight decay applies."""
        return self.is_matrix or self.decays

    @cached_property
    def orthogonal(self) -> bool:
        """True if Muon orthogonalizes the updates: for matrices but embeddings, logits and convolutions."""
        outside = self.init_name.startswith(("embedding.", "output_layer."))
        return self.is_matrix and not outside and not self.name.endswith(".conv1d.weight")

    @cached_property
    def decoupled(self) -> bool:
        """True for --decoupled-lr: the word embedding and the logits' weight."""
        return self.init_name in ("embedding.word_embeddings.weight", "output_layer.weight")


class ModelParameter(nn.Parameter):
    """A parameter that knows its place in the whole model."""

    spec: ParameterSpec


def parameters_of(module: nn.Module) -> list[ModelParameter]:
    """Return the parameters of a module whose layers are built by `nn.layers.Context`."""
    return cast("list[ModelParameter]", [*module.parameters()])


PARAMETER_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}  # by PrecisionConfig.name


def as_rows(x: Tensor) -> Tensor:
    """Return x (..., h) as contiguous rows (rows, h)."""
    return x.contiguous().view(-1, x.shape[-1])


def row_groups(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Yield (number, rows) of each nonempty group."""
    start = 0
    for number, count in enumerate(counts):
        if count:
            yield number, slice(start, start + count)
        start += count


def gradient_of(parameter: Tensor) -> Tensor:
    """Return the FP32 `main_grad`; None if the parameter is frozen."""
    gradient: Tensor = parameter.main_grad  # type: ignore[attr-defined]  # torch's class does not know it
    return gradient


class GradientMemory(NamedTuple):
    """A parameter's `main_grad` for the next gradient.

    overwrite: the values are undefined, and the caller must write all of them instead of adding
    """

    values: Tensor
    overwrite: bool


def take_gradient(parameter: Tensor) -> GradientMemory:
    """Return the memory to which an unfrozen parameter's gradient is added or, as an iteration's first one, written."""
    take = getattr(parameter, "take_main_grad", None)
    if take is None:
        return GradientMemory(gradient_of(parameter), overwrite=False)
    memory: GradientMemory = take()
    return memory


def bias_gradient(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else gradient_of(bias)


def is_frozen(parameter: Tensor) -> bool:
    return getattr(parameter, "frozen", False)


def vector_gradient(parameter: Tensor) -> Tensor:
    """Return `gradient_of` (h), or scratch memory if the parameter is frozen."""
    return torch.zeros(parameter.shape) if is_frozen(parameter) else gradient_of(parameter)


def accumulate(parameter: Tensor, grad: Tensor) -> None:
    """Add `grad` (any float dtype) to an unfrozen parameter's gradient."""
    if not is_frozen(parameter):
        gradient_of(parameter).add_(grad)


def blocks_of(inputs: int) -> int:
    """Return the scales of a row."""
    return -(-inputs // Q8_BLOCK)


class Q8Weight(NamedTuple):
    """A frozen weight in eight bits, about `values * scales`: int8 values with a scale for each 64 neighbouring numbers of a row.

    That takes 1 + 1/32 bytes a parameter. Matmuls read this form and round it to the dtype of the activations
    (`kernels_sve/gemm/q8.h`). A matrix in use is a tensor of `values` with the attribute `scales`.

    values: (..., in) int8
    scales: (..., blocks) BF16
    """

    values: Tensor
    scales: Tensor

    @staticmethod
    def of(weight: Tensor) -> Q8Weight:
        *rows, inputs = weight.shape
        scales = torch.empty(*rows, blocks_of(inputs), dtype=torch.bfloat16)
        return Q8Weight(torch.empty(weight.shape, dtype=torch.int8), scales).quantize(weight)

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


def scales_of(weight: Tensor) -> Tensor | None:
    """Return the scales (..., blocks) of a weight in eight bits; None for another weight."""
    return getattr(weight, "scales", None)


def scales_keyword(weight: Tensor) -> dict[str, Any]:
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


class _View(Tensor):
    """A tensor with the parameter's gradient in another shape, looked up in backward: it may have no memory before."""

    # Results are plain tensors, as with a parameter.
    __torch_function__: Any = torch._C._disabled_torch_function_impl
    parameter: Tensor
    part_of: Callable[[Tensor], Tensor]

    @property
    def frozen(self) -> bool:
        return is_frozen(self.parameter)

    @property
    def scales(self) -> Tensor | None:
        """Scales of a weight in eight bits (`Q8Weight`)."""
        scales = scales_of(self.parameter)
        return None if scales is None else self.part_of(scales).view(*self.shape[:-1], -1)

    @property
    def main_grad(self) -> Tensor | None:
        gradient: Tensor | None = gradient_of(self.parameter)
        return None if gradient is None else self.part_of(gradient).view(self.shape)

    def take_main_grad(self) -> GradientMemory:
        """Return the memory for a gradient, which may overwrite it if the view has all elements of the parameter."""
        if self.numel() != self.parameter.numel():
            return GradientMemory(gradient_of(self), overwrite=False)
        whole = take_gradient(self.parameter)
        return whole._replace(values=self.part_of(whole.values).view(self.shape))


def derived(
    parameter: Tensor, values: Tensor, part_of: Callable[[Tensor], Tensor] = lambda whole: whole
) -> _View:
    """Attach the parameter's gradient to `values`, a function with slope 1.

    part_of: returns what belongs to `values`, of the gradient and of a weight's scales
    """
    view = values.as_subclass(_View)
    view.parameter = parameter
    view.part_of = part_of
    return view


def view_of(parameter: Tensor, part_of: Callable[[Tensor], Tensor]) -> Tensor:
    """Return part_of(parameter), with its gradient."""
    return derived(parameter, part_of(parameter.detach()), part_of)


def matrix_of(parameter: Tensor, number: int) -> Tensor:
    """Return matrix `number` (outputs, h) of a parameter (e, ..., h), with its gradient."""
    return view_of(parameter, lambda whole: whole[number].flatten(0, -2))


def matrix(parameter: Tensor) -> Tensor:
    """Return a parameter (2, f, ...) as (2 f, ...), with its gradient."""
    return view_of(parameter, lambda whole: whole.flatten(0, 1))


# Packing once per optimizer step makes a matmul 3 to 5 per cent faster (head: 15), for one copy of the weights in forward and one
# for data gradients. Results have the same bits.


@dataclass
class _PackedCopy:
    """A packed copy. weight: referenced, so that its memory is not reused."""

    weight: Tensor
    buffer: Tensor
    target: str = ""
    valid: bool = False


class WeightCache:
    """Weights of one rank in the matmul kernels' layout (--cache-packed-weights).

    `Optimizer` calls `weights_changed` after every change.
    """

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self._entries: dict[tuple[int, tuple[int, ...], bool], _PackedCopy] = {}

    def weights_changed(self, frozen: bool = False) -> None:
        """Mark weights to be packed again. frozen: frozen weights too."""
        for entry in self._entries.values():
            entry.valid = entry.valid and is_frozen(entry.weight) and not frozen

    def packed(self, weight: Tensor, dtype: torch.dtype, transposed: bool) -> Tensor:
        """Return weight (out, in) packed for the active target and activations of `dtype`, as bytes (n,).

        transposed: for linear_data_gradient
        """
        key = (weight.data_ptr(), tuple(weight.shape), transposed)
        target = self._kernels.active()
        size = self._kernels.packed_weight_size(*weight.shape, dtype, transposed)
        entry = self._entries.get(key)
        if entry is None or entry.buffer.numel() != size:
            entry = self._entries[key] = _PackedCopy(weight, torch.empty(size, dtype=torch.uint8))
        if not entry.valid or entry.target != target:
            self._kernels.pack_weight(
                weight, entry.buffer, transposed, dtype=dtype, **scales_keyword(weight)
            )
            entry.valid = True
            entry.target = target
        return entry.buffer
