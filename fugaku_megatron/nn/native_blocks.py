"""The operations of Llama's, Mistral's and Qwen's blocks on the C++ kernels: RMS norm, gated MLP, rotary positions; the loss.

What they share with `native_ops` comes first: memory for a gathered input, parts of a wide tensor, the end of an MLP. `ops` says
what each computes, `torch_blocks` is the readable reference. One crossing into C++ per fused operation; outputs are allocated here.
Left out: grouped attention (`native_ops`).
Legend: s sequence, b micro-batch, h hidden, f MLP width, n heads of this rank in g groups, d head size,
v vocabulary of this rank, rows = s b.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from ..comm.autograd import gather_sequence, reduce_scatter_sequence
from ..comm.base import Comm
from .deferred_gradients import WeightGradients
from .dropout import DropoutKey
from .gradients import as_rows, gradient_of, is_frozen, vector_gradient
from .heads import Angles
from .torch_blocks import BlockOps, matrix

GATES = {"swiglu": "silu", "geglu": "gelu"}  # the kernels' names for what a gate applies
MLP_PARTS, MLP_COLUMNS = (
    4,
    512,
)  # backward holds this part of the MLP's inner tensor twice, and at least so many columns


def row_count(x: Tensor, sequence: Comm | None) -> int:
    """Rows of x (..., h) when it is gathered. What is kept gets its memory before what is gathered, which leaves no holes then."""
    return x.numel() // x.shape[-1] * (1 if sequence is None else sequence.size)


def call_rowwise(kernel: Callable[..., Any], p: float, key: DropoutKey, *args: Any) -> None:
    """kernel(*args, arguments of dropout), for each run of rows whose numbers in the sequence follow one another.

    Of args, tensors (s, b, h) are cut by rows, and statistics (s, b), which the kernel takes as (s b,); all others are passed on.
    """
    assert key.sample_dim == 1
    for part, own in key.runs():
        kernel(*(_run(x, part) for x in args), p, own.seed, own.stream, own.first_sample, own.row0)


def _run(x: Any, part: slice | None) -> Any:
    if not isinstance(x, Tensor) or x.dim() == 1:
        return x
    rows = x if part is None else x[part]
    return rows if x.dim() == 3 else rows.flatten()


def column_parts(pre: Tensor, width: int, whole: bool) -> Iterator[tuple[slice, Tensor]]:
    """Parts of `width` columns, or all at once: where they are, and memory (rows, columns) for each in turn, with pre's rows."""
    columns = width if whole else min(max(MLP_COLUMNS, -(-width // MLP_PARTS // 64) * 64), width)
    buffer = pre.new_empty(len(pre) * columns)
    for first in range(0, width, columns):
        part = slice(first, min(first + columns, width))
        yield part, buffer[: len(pre) * (part.stop - first)].view(len(pre), -1)


def gradient_of_input(ctx: Any, x: Tensor, dpre: Tensor, chunk: int) -> Tensor:
    """The end of an MLP's backward: from the gradient dpre (rows, out) of its first matmul, the first weight's, and that of x.

    ctx: of the autograd function, with ops, parameters (the first matmul's weight and bias before others), shape, sequence and
    keeps_input; without the latter the result, which has x's shape, is written into x's memory.
    """
    ops, (weight, bias, *_) = ctx.ops, ctx.parameters
    if is_frozen(weight) and ctx.sequence is not None:
        dx = dpre.new_empty(len(dpre), x.shape[-1])
        ops.data_gradient(dpre, weight, dx, chunk)
        return reduce_scatter_sequence(dx.view(ctx.shape), ctx.sequence)
    rows = as_rows(gather_sequence(x, ctx.sequence))
    ops.weight_gradient(dpre, rows, weight, bias, chunk)
    dx = torch.empty_like(rows) if ctx.keeps_input or ops.weight_gradients.waits else rows
    ops.data_gradient(dpre, weight, dx, chunk)
    return reduce_scatter_sequence(dx.view(ctx.shape), ctx.sequence)


class NativeBlockOps(BlockOps):
    """These operations, for a backend with `kernels`, `weight_gradients` and matmuls; the others are torch's."""

    kernels: Any
    weight_gradients: WeightGradients

    def gated_mlp(
        self,
        x: Tensor,
        weight1: Tensor,
        bias1: Tensor | None,
        weight2: Tensor,
        needs_values: bool = True,
        sequence: Comm | None = None,
        activation: str = "swiglu",
    ) -> Tensor:
        """x (s, b, h), weight1 (2, f, h), bias1 (2, f), weight2 (h, f) -> (s, b, h)."""
        return _GatedMLP.apply(
            self, activation, x, matrix(weight1), matrix(bias1), weight2, needs_values, sequence
        )

    def gate(self, pre: Tensor, activation: str) -> Tensor:
        """pre (rows, 2 f), or (rows, f) without a gate -> (rows, f)."""
        if activation not in GATES:
            inner = torch.empty_like(pre)
            self.kernels.activate(pre, None, inner, activation)
            return inner
        inner = pre.new_empty(len(pre), pre.shape[1] // 2)
        self.kernels.gate(as_gates(pre), inner, GATES[activation])
        return inner

    def gate_gradient(self, dinner: Tensor, pre: Tensor, dpre: Tensor, activation: str) -> None:
        """dinner (rows, f), pre and dpre (rows, 2 f), or (rows, f) without a gate."""
        if activation not in GATES:
            return super().gate_gradient(dinner, pre, dpre, activation)
        self.kernels.gate_backward(dinner, as_gates(pre), as_gates(dpre), GATES[activation])

    def gated_weight_gradient(
        self, dy: Tensor, pre: Tensor, weight: Tensor, activation: str, chunk: int
    ) -> None:
        """dy (rows, h), pre (rows, 2 f), weight (h, f)."""

        def second_weight() -> None:
            for columns, inner in column_parts(pre, weight.shape[1], whole=False):
                _second_weight_gradient(
                    self,
                    dy,
                    as_gates(pre)[:, :, columns],
                    activation,
                    inner,
                    gradient_of(weight)[:, columns],
                    chunk,
                )

        if not is_frozen(weight):
            self.weight_gradients.add(second_weight)

    def rotary(
        self,
        qkv: Tensor,
        angles: Angles | None,
        heads: int,
        groups: int,
        head_size: int,
        interleaved: bool,
        first_position: int = 0,
        q_weight: Tensor | None = None,
        k_weight: Tensor | None = None,
        epsilon: float = 1e-5,
        positions: Tensor | None = None,
    ) -> Tensor:
        """qkv (s, b, g (n/g + 2) d) -> the same shape."""
        if angles is None:
            positions = None
        rows = (
            slice(first_position, first_position + len(qkv)) if positions is None else slice(None)
        )
        turns = (
            qkv.new_empty(2, len(qkv), 0, dtype=torch.float32)
            if angles is None
            else [angle[rows] for angle in angles]
        )
        if q_weight is None:
            return _Rotary.apply(
                self, qkv, turns, heads // groups, head_size, interleaved, positions
            )
        return _RotaryNorm.apply(
            self,
            qkv,
            turns,
            heads // groups,
            head_size,
            interleaved,
            (q_weight, k_weight),
            epsilon,
            positions,
        )

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """x (..., h), weight (h) -> (..., h)."""
        return _RMSNorm.apply(self, x, weight, epsilon)

    def bias_dropout_add_rms_norm(
        self,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        p: float,
        key: DropoutKey,
        weight: Tensor,
        epsilon: float,
    ) -> tuple[Tensor, Tensor]:
        """x and residual (s, b, h), bias and weight (h) -> two of (s, b, h)."""
        return _BiasDropoutAddRMSNorm.apply(self, x, bias, residual, p, key, weight, epsilon)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ops: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        x = x.contiguous()
        y, rstd = torch.empty_like(x), x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)
        ops.kernels.rms_norm(x, weight, y, rstd, epsilon)
        ctx.save_for_backward(x, rstd)
        ctx.ops, ctx.weight = ops, weight
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor, None, None]:
        x, rstd = ctx.saved_tensors
        dx = torch.empty_like(x)
        ctx.ops.kernels.rms_norm_backward(
            dy.contiguous(), x, rstd, ctx.weight, dx, vector_gradient(ctx.weight)
        )
        return None, dx, None, None


class _BiasDropoutAddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ops: Any,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        p: float,
        key: DropoutKey,
        weight: Tensor,
        epsilon: float,
    ) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        total, y, rstd = (
            torch.empty_like(x),
            torch.empty_like(x),
            x.new_empty(x.shape[:2], dtype=torch.float32),
        )
        call_rowwise(
            ops.kernels.bias_dropout_add_rms_norm,
            p,
            key,
            x,
            bias,
            residual.contiguous(),
            total,
            weight,
            y,
            rstd,
            epsilon,
        )
        ctx.save_for_backward(total, rstd)
        ctx.ops, ctx.bias, ctx.weight, ctx.p, ctx.key = ops, bias, weight, p, key
        return total, y

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
        total, rstd = ctx.saved_tensors
        dresidual = torch.empty_like(total)
        dx = torch.empty_like(total) if ctx.p else None
        call_rowwise(
            ctx.ops.kernels.bias_dropout_add_rms_norm_backward,
            ctx.p,
            ctx.key,
            dy.contiguous(),
            dtotal.contiguous(),
            total,
            rstd,
            ctx.weight,
            dresidual,
            dx,
            vector_gradient(ctx.weight),
            gradient_of(ctx.bias),
        )
        return None, dresidual if dx is None else dx, None, dresidual, None, None, None, None


class _GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ops: Any,
        activation: str,
        x: Tensor,
        weight1: Tensor,
        bias1: Tensor | None,
        weight2: Tensor,
        needs_values: bool,
        sequence: Comm | None,
    ) -> Tensor:
        pre = x.new_empty(
            row_count(x, sequence), len(weight1)
        )  # (rows, 2 f): the gates, then what they multiply
        whole, chunk = gather_sequence(x, sequence), ops.chunk(x)
        rows = as_rows(whole)
        ops.matmul(rows, weight1, pre, bias1, chunk=chunk)
        out = (
            x.new_empty(len(pre), len(weight2))
            if needs_values
            else x.new_empty(1).expand(len(pre), len(weight2))
        )
        if needs_values:
            ops.matmul(ops.gate(pre, activation), weight2, out, chunk=chunk)
        ctx.save_for_backward(
            rows if sequence is None else x, pre
        )  # the gated values are cheaper to compute again than to keep
        ctx.ops, ctx.parameters, ctx.shape, ctx.sequence = (
            ops,
            (weight1, bias1, weight2),
            whole.shape,
            sequence,
        )
        ctx.activation, ctx.keeps_input = activation, needs_values and sequence is None
        return out.view(*whole.shape[:-1], len(weight2))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, pre), weight2, ops, dy = ctx.saved_tensors, ctx.parameters[2], ctx.ops, as_rows(dy)
        chunk = ops.chunk(dy)
        if ops.weight_gradients.waits:
            dpre = _gradient_of_gates(ops, dy, pre, weight2, ctx.activation, chunk)
        else:
            _to_gradient_of_gates(ops, dy, pre, weight2, ctx.activation, chunk)
            dpre = pre
        return None, None, gradient_of_input(ctx, x, dpre, chunk), None, None, None, None, None


def as_gates(pre: Tensor) -> Tensor:
    """pre (rows, 2 f) as the kernels take it: (rows, 2, f)."""
    return pre.view(len(pre), 2, pre.shape[-1] // 2)


def _second_weight_gradient(
    ops: Any, dy: Tensor, gates: Tensor, activation: str, inner: Tensor, grad: Tensor, chunk: int
) -> None:
    """Add dy^T gate(gates) to grad (h, columns). dy (rows, h), gates (rows, 2, columns); inner: memory for gate(gates)."""
    ops.kernels.gate(gates, inner, GATES[activation])
    ops.kernels.linear_weight_gradient(dy, inner, grad, fp16_chunk=chunk)


def _to_gradient_of_gates(
    ops: Any, dy: Tensor, pre: Tensor, weight2: Tensor, activation: str, chunk: int
) -> None:
    """Overwrite pre (rows, 2 f) with its gradient and add the second weight's gradient, by parts of columns."""
    packed = ops.packed(weight2, True, chunk)
    for columns, inner in column_parts(pre, weight2.shape[1], packed is not None):
        gates = as_gates(pre)[:, :, columns]
        if not is_frozen(weight2):
            _second_weight_gradient(
                ops, dy, gates, activation, inner, gradient_of(weight2)[:, columns], chunk
            )
        ops.kernels.linear_data_gradient(
            dy, weight2[:, columns], inner, packed=packed, fp16_chunk=chunk
        )
        ops.kernels.gate_backward(inner, gates, gates, GATES[activation])


def _gradient_of_gates(
    ops: Any, dy: Tensor, pre: Tensor, weight2: Tensor, activation: str, chunk: int
) -> Tensor:
    """The gradient of pre (rows, 2 f), in new memory; the second weight's gradient is put off, and needs pre and dy (rows, h)."""
    ops.gated_weight_gradient(dy, pre, weight2, activation, chunk)
    dpre, dinner = torch.empty_like(pre), pre.new_empty(len(pre), weight2.shape[1])
    ops.data_gradient(dy, weight2, dinner, chunk)
    ops.gate_gradient(dinner, pre, dpre, activation)
    return dpre


def _heads(qkv: Tensor, head_size: int) -> Tensor:
    """qkv (s, b, g (n/g + 2) d) as the kernels take it: (s, b, heads of all kinds, d)."""
    return qkv.view(*qkv.shape[:2], -1, head_size)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ops: Any,
        qkv: Tensor,
        turns: Any,
        queries: int,
        head_size: int,
        interleaved: bool,
        positions: Tensor | None,
    ) -> Tensor:
        qkv = qkv.contiguous()
        out = torch.empty_like(qkv)
        ops.kernels.rotary(
            _heads(qkv, head_size),
            *turns,
            _heads(out, head_size),
            queries,
            interleaved,
            positions=positions,
        )
        ctx.ops, ctx.turns, ctx.queries, ctx.head_size, ctx.interleaved = (
            ops,
            turns,
            queries,
            head_size,
            interleaved,
        )
        ctx.positions = positions
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        dout, d = dout.contiguous(), ctx.head_size
        dqkv = torch.empty_like(dout)
        ctx.ops.kernels.rotary(
            _heads(dout, d),
            *ctx.turns,
            _heads(dqkv, d),
            ctx.queries,
            ctx.interleaved,
            inverse=True,
            positions=ctx.positions,
        )
        return None, dqkv, None, None, None, None, None


class _RotaryNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ops: Any,
        qkv: Tensor,
        turns: Any,
        queries: int,
        head_size: int,
        interleaved: bool,
        weights: tuple[Tensor, Tensor],
        epsilon: float,
        positions: Tensor | None,
    ) -> Tensor:
        qkv = qkv.contiguous()
        out, ctx.scalars = torch.empty_like(qkv), (queries, epsilon, interleaved)
        ops.kernels.rotary_norm(
            _heads(qkv, head_size),
            *weights,
            *turns,
            _heads(out, head_size),
            *ctx.scalars,
            positions=positions,
        )
        ctx.save_for_backward(
            qkv
        )  # a head's root mean square is cheaper to compute again than to keep
        ctx.ops, ctx.turns, ctx.weights, ctx.head_size, ctx.positions = (
            ops,
            turns,
            weights,
            head_size,
            positions,
        )
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        (qkv,), d = ctx.saved_tensors, ctx.head_size
        dqkv = torch.empty_like(qkv)
        ctx.ops.kernels.rotary_norm_backward(
            _heads(dout.contiguous(), d),
            _heads(qkv, d),
            *ctx.weights,
            *ctx.turns,
            _heads(dqkv, d),
            *map(vector_gradient, ctx.weights),
            *ctx.scalars,
            positions=ctx.positions,
        )
        return None, dqkv, None, None, None, None, None, None, None


# The language-model head with its loss, in chunks of rows so that the full logits never exist ------------------------------------


class Matmuls(Protocol):
    """What the head needs of `NativeOps`: the kernels, and matmuls with weights that may be kept packed."""

    kernels: Any

    def matmul(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """out (rows, out) = x (rows, in) weight^T, weight (out, in)."""

    def data_gradient(self, dy: Tensor, weight: Tensor, dx: Tensor) -> None:
        """dx (rows, in) = dy (rows, out) weight, weight (out, in)."""


class HeadLoss(torch.autograd.Function):
    """Each chunk's loss, and its gradients while the chunk's logits are there.

    `factor` is the gradient that backward will bring, because weight gradients are accumulated before it comes. words: how many
    of the weight's first rows take part in the softmax, None for all.
    """

    @staticmethod
    def forward(
        ctx: Any,
        ops: Matmuls,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        tp: Comm,
        first_row: int,
        factor: float,
        chunk: int,
        words: int | None,
        z_loss: float,
        count: float,
        z_sum: Tensor | None,
    ) -> Tensor:
        """x (s, b, h), weight (v, h), labels (s, b) -> ()."""
        rows, labels = x.contiguous().view(-1, x.shape[-1]), labels.reshape(-1)
        total, ctx.factor, ctx.shape = 0.0, factor, x.shape
        z_total = 0.0
        dx = (
            rows if ctx.needs_input_grad[1] else None
        )  # its rows are read no more when their gradient is known
        buffer = x.new_empty(min(chunk, len(rows)), weight.shape[0], dtype=torch.float32)
        gradients = (
            None
            if dx is None
            else buffer
            if x.dtype == buffer.dtype
            else torch.empty_like(buffer, dtype=x.dtype)
        )
        for start in range(0, len(rows), chunk):
            part = slice(start, start + chunk)
            logits = buffer[: len(rows[part])]
            dlogits = None if gradients is None else gradients[: len(logits)]
            ops.matmul(rows[part], weight, logits)
            if words is not None:
                logits[:, words:] = -math.inf  # its exponential, and so its gradient, is exactly 0
            loss, z_part = _chunk_loss(
                ops.kernels, logits, labels[part], tp, first_row, factor / count, dlogits, z_loss
            )
            total += loss
            z_total += z_part
            if dx is not None and dlogits is not None:
                if not is_frozen(weight):
                    ops.kernels.linear_weight_gradient(dlogits, rows[part], gradient_of(weight))
                ops.data_gradient(dlogits, weight, dx[part])
        if dx is not None:
            ctx.save_for_backward(dx)
        if z_sum is not None:
            z_sum += z_total / count
        return torch.tensor(total / count, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        """dloss () -> gradient of x (s, b, h)."""
        assert dloss.item() == torch.tensor(ctx.factor, dtype=torch.float32).item(), (
            dloss.item(),
            ctx.factor,
        )
        return None, ctx.saved_tensors[0].view(ctx.shape), *(None for _ in range(10))


def _chunk_loss(
    kernels: Any,
    logits: Tensor,
    labels: Tensor,
    tp: Comm,
    first_row: int,
    factor: float,
    dlogits: Tensor | None,
    z_loss: float = 0.0,
) -> tuple[float, float]:
    """Sum of the losses of some rows of logits (rows, v), and unless None dlogits, their gradient times `factor`; may be logits.

    Rows with a label below 0 add nothing, and their gradient is 0. z_loss: a row's loss has z_loss (log sum exp)^2 added; the
    second result is this part of the sum.
    """
    row_max, sum_exp, target_logit = torch.empty(3, len(labels))
    if tp.size == 1:
        kernels.cross_entropy_forward(logits, labels, row_max, sum_exp, target_logit)
    else:
        kernels.cross_entropy_max(logits, row_max)
        tp.all_reduce(row_max, "max")
        kernels.cross_entropy_sum(logits, row_max, labels, first_row, sum_exp, target_logit)
        tp.all_reduce(sum_exp)
        tp.all_reduce(target_logit)
    if dlogits is not None:
        factors = torch.full_like(sum_exp, factor)
        kernels.cross_entropy_backward(
            logits, row_max, sum_exp, labels, first_row, factors, dlogits, z_loss
        )
    log_sum = torch.log(sum_exp)
    z = log_sum + row_max
    added = z_loss * z * z
    losses = (log_sum - target_logit + added).masked_fill_(labels < 0, 0.0)
    z_part = 0.0
    if z_loss:
        z_part = added.masked_fill_(labels < 0, 0.0).sum(dtype=torch.float64).item()
    return losses.sum(dtype=torch.float64).item(), z_part
