"""LoRA adapters: y + scale dropout(x) A^T B^T next to a frozen linear layer (`config.lora`).

p matrices of a layer, such as QKV, share A (p, r, in); B (out, r) is sharded like the weight, and row i multiplies the r columns
for its own matrix. Experts have A (e, p, r, in) and B (e, out, r).
    column-parallel   A replicated, B sharded; x A^T is gathered under sequence parallelism
    row-parallel      A sharded, B replicated; x A^T is summed over ranks
r adapter rank, f MLP width, e experts of a rank, n rows of all experts.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.autograd import Gradients, Saved, SavedResult, apply_saving
from ..config.layer_kinds import FC1, IN_PROJ, QKV
from ..config.lora import (
    DROPOUT_COLUMNS,
    IN_PROJ_PARTS,
    MATRICES,
    LoraConfig,
)
from ..config.model import ModelConfig
from .attention.context_parallel import own_segments
from .dropout_key import Dropout, DropoutKey
from .forward_context import Pass
from .ops import Ops
from .ops.activation import Activation, fused_kernel
from .ops.dropout import masked
from .parameter import as_rows, gradient_of, matrix

InputDropout = tuple[float, DropoutKey, int | None]  # probability, mask, first column of a shard
STREAMS = 1 << 32  # first dropout stream; other masks have smaller numbers
MAX_COLUMNS = 1 << 24  # of a sharded input
FINGERPRINTS = 1 << 36  # of frozen weights; sums over any number of ranks are exact in FP64
BLOCK = 1 << 20  # elements whose bits are summed at once


def bits_number(name: str, weight: Tensor) -> int:
    """Return a checksum of a weight's name and BF16 bits; sums are modulo FINGERPRINTS."""
    blocks = weight.reshape(-1).split(BLOCK)
    total = sum(int(block.bfloat16().view(torch.int16).sum(dtype=torch.int64)) for block in blocks)
    return zlib.crc32(name.encode()) * total


def _dropped(kernels: Any, x: Tensor, dropout: InputDropout | None) -> Tensor:
    """Apply dropout to x (s, b, in) or its gradient, by global position.

    A sharded last dimension is masked in samples of DROPOUT_COLUMNS columns.
    """
    if dropout is None:
        return x
    p, key, first_column = dropout
    if first_column is None:
        return masked(kernels, x, Dropout(p, key))
    blocks = x.unflatten(-1, (-1, DROPOUT_COLUMNS))  # (s, b, in / columns, columns)
    made = []
    for number, sample in enumerate(blocks.unbind(1), key.first_sample):
        own = replace(key, first_sample=(number * MAX_COLUMNS + first_column) // DROPOUT_COLUMNS)
        made.append(masked(kernels, sample, Dropout(p, own)))
    return torch.stack(made, 1).view(x.shape)


# Values of `Adapter.divided`: dimension of a linear layer's weight that tensor-parallel ranks share.
OUTPUTS = "outputs"
INPUTS = "inputs"


class Adapter(nn.Module):
    """Adapters of one linear layer.

    outputs: (out,), or (2, f) with a gate.
    divided: OUTPUTS, INPUTS, or None if every tensor-parallel rank has the weight.
    experts: (e,) if each expert has adapters.
    """

    def __init__(
        self,
        name: str,
        parts: tuple[str, ...],
        inputs: int,
        outputs: tuple[int, ...],
        divided: str | None,
        context: Any,
        experts: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.context = context
        self.divided = divided
        self.linear = name.rsplit(".", 1)[-1]
        self.parts = parts
        self.lora: LoraConfig = context.run.lora
        self.stream = STREAMS + zlib.crc32(name.encode())
        rank = self.lora.rank
        make = partial(context.parameter, experts=bool(experts), frozen=False)
        # The variance of peft's uniform initial values.
        self.lora_a = make(
            f"{name}.lora_A.weight",
            (*experts, len(parts), rank, inputs),
            len(experts) + 2 if divided == INPUTS else None,
            (3.0 * inputs) ** -0.5,
        )
        self.lora_b = make(
            f"{name}.lora_B.weight",
            (*experts, *outputs, rank),
            len(experts + outputs) - 1 if divided == OUTPUTS else None,
        )

    @property
    def ops(self) -> Ops:
        ops: Ops = self.context.ops
        return ops.unpacked()

    def mask(self) -> Tensor | None:
        mask = row_mask(self.linear, self.parts, self.lora_a, self.lora_b, self.context.model)
        return None if mask is None else mask.to(self.lora_b.dtype)

    def dropout(self, x: Tensor, forward_pass: Pass) -> InputDropout | None:
        """Return the mask of the adapter's input, by global position, or None."""
        p = self.lora.lora_dropout
        context = self.context
        if not p or not forward_pass.training:
            return None
        segments = context.segments(x)
        first_column = None
        if self.divided == INPUTS:
            segments = own_segments(len(x), context.cp)
            first_column = context.tp.rank * x.shape[-1]
        key = DropoutKey.of_segments(segments, context.seed, self.stream, forward_pass.first_sample)
        return p, key, first_column

    def add(self, x: Tensor, y: Tensor, forward_pass: Pass) -> Tensor:
        """Add the layer's adapters to y.

        column-parallel: x (s, b, in), y (whole sequence, b, out / tp)
        row-parallel: x (whole sequence, b, in / tp), y (s, b, out)
        on every rank: x (s, b, in), y (s, b, out)
        """
        t = _down(self.ops, x, self.lora_a, self.dropout(x, forward_pass))
        if self.divided == INPUTS:
            t = self.context.out_of_matmul(t)
        elif self.divided == OUTPUTS:
            t = self.context.whole_sequence(t)
        return self.up(y, t)

    def merged(self, weight: Tensor) -> Tensor:
        return merged(weight, self.lora_a, self.lora_b, self.mask(), self.lora.scale)

    def up(self, y: Tensor, t: Tensor) -> Tensor:
        return _up(self.ops, y, t, self.lora_b, self.mask(), self.lora.scale)


def row_mask(
    linear: str, parts: tuple[str, ...], a: Tensor, b: Tensor, model: ModelConfig
) -> Tensor | None:
    """Return (rows, p, 1), 1 if a row of a weight shard belongs to an adapter; None: all belong to the only adapter."""
    if parts == (linear,) or linear not in _ROW_OWNERS:
        return None
    rows = torch.arange(b.shape[:-1].numel())
    owners = _ROW_OWNERS[linear](rows, len(rows) // a.shape[:-3].numel(), model)
    numbers = [
        torch.tensor(IN_PROJ_PARTS.get(part, (MATRICES[linear].index(part),))) for part in parts
    ]
    return torch.stack([torch.isin(owners, each) for each in numbers], 1).float().unsqueeze(-1)


def _of_query_groups(rows: Tensor, each: int, model: ModelConfig) -> Tensor:
    """Return the number of each row's matrix: a query group has queries and gates, a key, a value."""
    queries = model.query_widths * model.num_attention_heads // model.query_groups
    slot = rows // model.kv_channels % (queries + 2)
    return (slot - queries + 1).clamp(min=0)


def _of_gates(rows: Tensor, each: int, model: ModelConfig) -> Tensor:
    """Return 0 for rows of gates, 1 for rows of values. each: rows of an expert"""
    return rows % each // (each // 2)


def _of_key_heads(rows: Tensor, each: int, model: ModelConfig) -> Tensor:
    """Return the place of each row in `ModelConfig.key_head_parts`."""
    ends = torch.tensor(model.key_head_parts).cumsum(0)
    return torch.bucketize(rows % int(ends[-1]), ends, right=True)


# Linear layer of several matrices -> owner of each row.
_ROW_OWNERS = {QKV: _of_query_groups, FC1: _of_gates, IN_PROJ: _of_key_heads}


def expanded(b: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Return scale B as one matrix (out, p r), zero outside each row's own columns."""
    b = b.detach().flatten(0, -2)
    if mask is None:
        return (b * scale).contiguous()
    return (b.unsqueeze(1) * (mask * scale)).flatten(1).contiguous()


def merged(weight: Tensor, a: Tensor, b: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Return weight (..., in) + scale B A, computed in FP32."""
    shape = (-1, a.shape[-3:-1].numel(), a.shape[-1])  # (1 or e, p r, in)
    a = a.detach().float().flatten(-3, -2).view(shape)
    b = expanded(b.float(), None if mask is None else mask.float(), scale)
    delta = b.view(len(a), -1, b.shape[-1]) @ a
    return (weight.float() + delta.view(weight.shape)).to(weight.dtype)


def _down(ops: Ops, x: Tensor, a: Tensor, dropout: InputDropout | None) -> Tensor:
    """Return dropout(x) A^T."""
    trained_below = x.requires_grad

    def forward() -> SavedResult:
        rows = as_rows(_dropped(ops.kernels, x, dropout))
        stacked = matrix(a)
        t = rows.new_empty(len(rows), len(stacked))
        ops.matmul(rows, stacked, t)
        return t.view(*x.shape[:-1], -1), (x,)

    def backward(dt: Tensor, x: Tensor) -> Gradients:
        stacked = matrix(a)
        dt = as_rows(dt)
        ops.weight_gradient(dt, as_rows(_dropped(ops.kernels, x, dropout)), stacked, None)
        if not trained_below:
            return ()
        dx = x.new_empty(x.shape)
        ops.data_gradient(dt, stacked, dx.view(len(dt), -1))
        return (_dropped(ops.kernels, dx, dropout),)

    return apply_saving(forward, backward, x, a)


def _accumulate_up(b: Tensor, total: Tensor, mask: Tensor | None, scale: float) -> None:
    """Add the gradient of `expanded` (out, p r) to the gradient of B."""
    if mask is not None:
        total = (total.unflatten(1, (-1, b.shape[-1])) * mask).sum(1)
    gradient_of(b).add_(total.view(b.shape), alpha=scale)


def _up(ops: Ops, y: Tensor, t: Tensor, b: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Return y + scale t B^T."""

    def forward() -> SavedResult:
        rows = as_rows(t)
        whole = expanded(b, mask, scale)
        out = rows.new_empty(len(rows), len(whole))
        ops.matmul(rows, whole, out)
        return out.view(y.shape).add_(y), (rows, mask)

    def backward(dy: Tensor, rows: Tensor, mask: Tensor | None) -> Gradients:
        rows_dy = as_rows(dy)
        ops.weight_gradients.add(
            lambda: _accumulate_up(b, ops.outer_sum(rows_dy, rows), mask, scale)
        )
        dt = torch.empty_like(rows)
        ops.data_gradient(rows_dy, expanded(b, mask, scale), dt)
        return dy, dt.view(*dy.shape[:-1], -1)

    return apply_saving(forward, backward, y, t, b)


def activated_linear(
    context: Any,
    activation: Activation,
    pre: Tensor,
    weight: Tensor,
    adapter: Adapter | None,
    forward_pass: Pass,
) -> tuple[Tensor, Tensor | None]:
    """Return (inner W^T, dropout(inner) A^T) with inner = activation(pre), and save only pre (s, b, f or 2 f).

    The first result is unset if `forward_pass` needs no values.
    """
    a = None
    dropout = None
    if adapter is not None:
        a = adapter.lora_a
        dropout = adapter.dropout(pre[..., : weight.shape[1]], forward_pass)
    ops: Ops = context.ops
    needs_values = forward_pass.needs_values
    lead = pre.shape[:-1]

    def forward() -> tuple[tuple[Tensor, Tensor | None], Saved]:
        rows = as_rows(pre)
        t = None
        inner = ops.activate(rows, activation) if needs_values or a is not None else pre
        if needs_values:
            out = pre.new_empty(len(rows), len(weight))
            ops.matmul(inner, weight, out)
        else:
            out = pre.new_empty(1).expand(len(rows), len(weight))
        if a is not None:
            stacked = matrix(a)
            t = pre.new_empty(len(rows), len(stacked))
            dropped = _dropped(ops.kernels, inner.view(*lead, -1), dropout)
            ops.unpacked().matmul(as_rows(dropped), stacked, t)
            t = t.view(*lead, -1)
        return (out.view(*lead, -1), t), (pre,)

    def backward(dout: Tensor, dt: Tensor | None, pre: Tensor) -> Tensor:
        rows = as_rows(pre)
        total = _inner_gradient(ops, as_rows(dout), weight, rows, activation)
        if a is not None and dt is not None:
            stacked = matrix(a)
            plain = ops.unpacked()
            dt = as_rows(dt)
            inner = ops.activate(rows, activation).view(*lead, -1)
            plain.weight_gradient(dt, as_rows(_dropped(ops.kernels, inner, dropout)), stacked, None)
            del inner
            plain = replace(plain, fp16_sum_length=ops.fp16_sum_length)
            added = _inner_gradient(plain, dt, stacked, rows, activation)
            total.add_(_dropped(ops.kernels, added.view(*lead, -1), dropout).view_as(total))
            del added
        if fused_kernel(ops, activation) is None:
            dpre = torch.empty_like(rows)
            ops.activation_gradient(total, rows, dpre, activation)
            total = dpre
        return total.view(pre.shape)

    return apply_saving(forward, backward, pre, a)


def _inner_gradient(
    ops: Ops, dy: Tensor, weight: Tensor, pre: Tensor, activation: Activation
) -> Tensor:
    """Return dy weight (rows, f), times the derivative at pre if the kernel is fused."""
    dinner = pre.new_empty(len(pre), weight.shape[1])
    fused = fused_kernel(ops, activation)
    ops.data_gradient(dy, weight, dinner, None if fused is None else pre, fused)
    return dinner


@dataclass(frozen=True)
class AdaptedExperts:
    """Operations whose grouped matmuls add the adapters. adapters: by id of the matrix."""

    ops: Ops
    adapters: Mapping[int, Adapter | None]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ops, name)

    def grouped_matmul(self, x: Tensor, weight: Tensor, counts: Sequence[int], out: Tensor) -> None:
        self.ops.grouped_matmul(x, weight, counts, out)
        if adapter := self.adapters[id(weight)]:
            t = _grouped(adapter, x, adapter.lora_a, counts)
            out.add_(_grouped(adapter, t, _up_matrices(adapter), counts))

    def grouped_data_gradient(
        self, dy: Tensor, weight: Tensor, counts: Sequence[int], dx: Tensor
    ) -> None:
        self.ops.grouped_data_gradient(dy, weight, counts, dx)
        if adapter := self.adapters[id(weight)]:
            dt = _grouped_back(adapter, dy, _up_matrices(adapter), counts)
            dx.add_(_grouped_back(adapter, dt, adapter.lora_a, counts))

    def grouped_weight_gradient(
        self, dy: Tensor, x: Tensor, weight: Tensor, counts: Sequence[int]
    ) -> None:
        """Add the adapter gradients, now or later; dy and x must not change until then."""
        adapter = self.adapters[id(weight)]
        x = x.detach()
        if adapter is None:
            return

        def gradients() -> None:
            ops = adapter.ops
            t = _grouped(adapter, x, adapter.lora_a, counts)
            dt = _grouped_back(adapter, dy, _up_matrices(adapter), counts)
            ops.grouped_weight_gradient(dt, x, adapter.lora_a, counts)
            total = ops.grouped_outer_sum(dy, t, counts).flatten(0, 1)
            _accumulate_up(adapter.lora_b, total, adapter.mask(), adapter.lora.scale)

        self.ops.weight_gradients.add(gradients)


def _up_matrices(adapter: Adapter) -> Tensor:
    whole = expanded(adapter.lora_b, adapter.mask(), adapter.lora.scale)
    return whole.view(len(adapter.lora_a), -1, whole.shape[-1])


def _grouped(adapter: Adapter, x: Tensor, matrices: Tensor, counts: Sequence[int]) -> Tensor:
    out = x.new_empty(len(x), matrices.shape[1:-1].numel())
    adapter.ops.grouped_matmul(x, matrices, counts, out)
    return out


def _grouped_back(adapter: Adapter, dy: Tensor, matrices: Tensor, counts: Sequence[int]) -> Tensor:
    dx = dy.new_empty(len(dy), matrices.shape[-1])
    adapter.ops.grouped_data_gradient(dy, matrices, counts, dx)
    return dx
