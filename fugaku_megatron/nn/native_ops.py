"""The operations of a training step on the C++ kernels; `ops` says what each computes, `torch_ops` is the readable reference.

One crossing into C++ per fused operation; outputs are allocated here. Weight gradients go straight into `main_grad`.
Left out: communication, and the loss (`native_blocks`). Legend: s sequence, b micro-batch, h hidden, f MLP width, n heads and v
vocabulary of this rank, d head size, rows = s b.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..comm.autograd import gather_sequence, reduce_scatter_sequence
from ..comm.base import Comm
from .deferred_gradients import WeightGradients
from .dropout import DropoutKey, dropout
from .expert_ops import NativeExpertOps
from .gradients import as_rows, gradient_of, is_frozen, vector_gradient
from .heads import Heads
from .native_blocks import (
    HeadLoss,
    NativeBlockOps,
    call_rowwise,
    column_parts,
    gradient_of_input,
    row_count,
)
from .packed_weights import WeightCache
from .shared_attention import Part, SharedCall


@dataclass(frozen=True)
class NativeOps(NativeExpertOps, NativeBlockOps):
    """The backend on the C++ kernels.

    kernels: the kernel library. fp16_chunk: linear layers with FP16 operands sum this many terms in FP16 before they add in
    FP32 (0: always in FP32); a matmul then raises ValueError where the kernels' target has no FP16 arithmetic. weight_cache:
    packed weights that are kept, None for none. weight_gradients: where linear layers bring the work for their weights' gradients.
    few_rows: matmuls of no more rows than this read the weight as it lies, and keep nothing for a backward.
    """

    kernels: Any
    fp16_chunk: int = 0
    weight_cache: WeightCache | None = None
    weight_gradients: WeightGradients = field(default_factory=WeightGradients)
    few_rows: int = 0

    # Matmuls; `chunk` is 0 or the FP16 chunk of a linear layer. The logits are always summed in FP32. --------------------------

    def chunk(self, x: Tensor) -> int:
        """The FP16 chunk of a linear layer's matmuls with x (any shape)."""
        return self.fp16_chunk if x.dtype == torch.float16 else 0

    def packed(self, weight: Tensor, transposed: bool, chunk: int) -> Tensor | None:
        """weight (out, in) as the cache keeps it, (n,) bytes; None where it is not kept (sums in FP16 have another layout)."""
        return (
            None
            if chunk or self.weight_cache is None
            else self.weight_cache.packed(weight, transposed)
        )

    def matmul(
        self, x: Tensor, weight: Tensor, out: Tensor, *epilogue: Any, chunk: int = 0
    ) -> None:
        """out (rows, out) = x (rows, in) weight^T, weight (out, in), with the epilogue of `linear_forward`."""
        if len(x) <= self.few_rows and not chunk:
            return self.kernels.linear_few_rows(
                x, weight, out, *epilogue[:2]
            )  # bias and activation
        self.kernels.linear_forward(
            x, weight, out, *epilogue, packed=self.packed(weight, False, chunk), fp16_chunk=chunk
        )

    def data_gradient(self, dy: Tensor, weight: Tensor, dx: Tensor, chunk: int = 0) -> None:
        """dx (rows, in) = dy (rows, out) weight, weight (out, in)."""
        self.kernels.linear_data_gradient(
            dy, weight, dx, packed=self.packed(weight, True, chunk), fp16_chunk=chunk
        )

    def weight_gradient(
        self, dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, chunk: int = 0
    ) -> None:
        """Add dy^T x to the gradient of weight (out, in), now or later, and the sum of dy's rows to that of bias (out).

        dy (rows, out) and x (rows, in) stay as they are until that is done.
        """
        if is_frozen(weight):
            return
        x = (
            x.detach()
        )  # what waits must not keep the graph that led to x, and the tensors that it refers to
        gradients = gradient_of(weight), gradient_of(bias)
        self.weight_gradients.add(
            partial(self.kernels.linear_weight_gradient, dy, x, *gradients, chunk)
        )

    def outer_sum(self, dy: Tensor, x: Tensor) -> Tensor:
        """dy^T x in FP32 of dy (rows, out) and x (rows, in), (out, in)."""
        total = torch.zeros(dy.shape[1], x.shape[1])
        self.kernels.linear_weight_gradient(dy, x, total)
        return total

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, sequence: Comm | None = None
    ) -> Tensor:
        """x (..., in), weight (out, in), bias (out) -> (..., out)."""
        return _Linear.apply(self, x, weight, bias, sequence)

    def mlp(
        self,
        x: Tensor,
        weight1: Tensor,
        bias1: Tensor | None,
        weight2: Tensor,
        needs_values: bool = True,
        sequence: Comm | None = None,
        activation: str = "gelu",
    ) -> Tensor:
        """x (s, b, h), weight1 (f, h), bias1 (f), weight2 (h, f) -> (s, b, h)."""
        return _MLP.apply(self, activation, x, weight1, bias1, weight2, needs_values, sequence)

    def attention(
        self,
        qkv: Tensor,
        head_size: int,
        p: float,
        key: DropoutKey,
        groups: int | None = None,
        window: int | None = None,
        starts: Tensor | None = None,
    ) -> Tensor:
        """qkv (s, b, g (n/g + 2) d) -> (s, b, n d)."""
        return _Attention.apply(
            self,
            qkv,
            Heads.of(qkv, head_size, groups),
            p,
            key,
            {"window": window, "starts": starts},
        )

    def part(self, call: SharedCall, part: Part, qkv: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """qkv (q, b, g (n/g + 2) d), kv (k, b, 2 g d) -> (q, b, n d), and the logarithms of the sums (b, n, q)."""
        heads, (q, b, _) = call.heads, qkv.shape
        out = qkv.new_empty(q, b, heads.heads * heads.head_size)
        lse = qkv.new_empty(b, heads.heads, q, dtype=torch.float32)
        self.kernels.attention_part_forward(qkv, kv, out, lse, *_places_and_dropout(call, part))
        return out, lse

    def part_gradients(
        self,
        call: SharedCall,
        part: Part,
        qkv: Tensor,
        kv: Tensor,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dqkv: Tensor,
        dkv: Tensor,
    ) -> None:
        """Add to dqkv and dkv, FP32 and of the shapes of qkv and kv; out, lse: of all keys of these queries."""
        self.kernels.attention_part_backward(
            qkv, kv, out, lse, dout, dqkv, dkv, *_places_and_dropout(call, part)
        )

    def cached_attention(
        self, qkv: Tensor, keys: Tensor, values: Tensor, samples: Tensor, positions: Tensor
    ) -> Tensor:
        """qkv (r, 1, g (n/g + 2) d), keys and values (all samples, g, slots, d), positions (r,) -> (r, 1, n d)."""
        _, groups, _, d = keys.shape
        out = qkv.new_empty(len(qkv), qkv.shape[-1] - 2 * groups * d)
        self.kernels.attention_decode(as_rows(qkv), keys, values, samples, positions, out)
        return out.unsqueeze(1)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
        """x (..., h), weight and bias (h) -> (..., h)."""
        return _LayerNorm.apply(self, x, weight, bias, epsilon)

    def bias_dropout_add(
        self,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        p: float,
        key: DropoutKey,
        needs_values: bool = True,
    ) -> Tensor:
        """x and residual (s, b, h), bias (h) -> (s, b, h)."""
        return _BiasDropoutAdd.apply(self, x, bias, residual, p, key, needs_values)

    def bias_dropout_add_layer_norm(
        self,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        p: float,
        key: DropoutKey,
        weight: Tensor,
        norm_bias: Tensor,
        epsilon: float,
    ) -> tuple[Tensor, Tensor]:
        """x and residual (s, b, h), bias, weight and norm_bias (h) -> two of (s, b, h)."""
        return _BiasDropoutAddLayerNorm.apply(
            self, x, bias, residual, p, key, weight, norm_bias, epsilon
        )

    def dropout(self, x: Tensor, p: float, key: DropoutKey) -> Tensor:
        """x (any shape) -> the same shape."""
        return dropout(self.kernels, x, p, key)

    def embedding(self, tokens: Tensor, weight: Tensor, first_row: int = 0) -> Tensor:
        """tokens (s, b), weight (v, h) -> (s, b, h)."""
        return _Embedding.apply(self, tokens.contiguous(), weight, first_row)

    def add_position(self, x: Tensor, weight: Tensor, first: int = 0) -> Tensor:
        """x (s, b, h), weight (positions, h) -> (s, b, h)."""
        return _AddPosition.apply(self, x, weight, first)

    def head_loss(
        self,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        tp: Comm,
        first_row: int,
        factor: float,
        rows_at_once: int | None = None,
        words: int | None = None,
        z_loss: float = 0.0,
        count: float | None = None,
        z_sum: Tensor | None = None,
    ) -> Tensor:
        """x (s, b, h), weight (v, h), labels (s, b) -> ()."""
        rows = labels.numel()
        return HeadLoss.apply(
            self,
            x,
            weight,
            labels,
            tp,
            first_row,
            factor,
            rows_at_once or rows,
            words,
            z_loss,
            count or rows,
            z_sum,
        )


def _places_and_dropout(call: SharedCall, part: Part) -> tuple[Any, ...]:
    """The arguments of the kernels of a part from `s` on."""
    sight, key = call.sight, call.key
    return (
        sight.length,
        part.queries.start,
        part.keys.start,
        call.dropout,
        key.seed,
        key.stream,
        key.first_sample,
        key.row0 // sight.length,
        sight.window,
        sight.starts,
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ops: NativeOps,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sequence: Comm | None,
    ) -> Tensor:
        out = x.new_empty(row_count(x, sequence), weight.shape[0])
        whole = gather_sequence(x, sequence)
        rows = as_rows(whole)
        ctx.save_for_backward(*([] if is_frozen(weight) else [rows if sequence is None else x]))
        ctx.ops, ctx.weight, ctx.bias, ctx.shape, ctx.sequence = (
            ops,
            weight,
            bias,
            whole.shape,
            sequence,
        )
        ops.matmul(rows, weight, out, bias, chunk=ops.chunk(x))
        return out.view(*whole.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dy, ops, sequence = as_rows(dy), ctx.ops, ctx.sequence
        chunk = ops.chunk(dy)
        if is_frozen(ctx.weight):
            dx = dy.new_empty(len(dy), ctx.shape[-1])
            ops.data_gradient(dy, ctx.weight, dx, chunk)
            return None, reduce_scatter_sequence(dx.view(ctx.shape), sequence), None, None, None
        rows = as_rows(gather_sequence(ctx.saved_tensors[0], sequence))
        ops.weight_gradient(dy, rows, ctx.weight, ctx.bias, chunk)
        gathered = (
            sequence is not None and not ops.weight_gradients.waits
        )  # then it is read no more
        dx = rows if gathered else torch.empty_like(rows)
        ops.data_gradient(dy, ctx.weight, dx, chunk)
        return None, reduce_scatter_sequence(dx.view(ctx.shape), sequence), None, None, None


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ops: NativeOps,
        activation: str,
        x: Tensor,
        weight1: Tensor,
        bias1: Tensor | None,
        weight2: Tensor,
        needs_values: bool,
        sequence: Comm | None,
    ) -> Tensor:
        pre = x.new_empty(
            row_count(x, sequence), weight1.shape[0]
        )  # (rows, f): argument of the activation
        whole, chunk = gather_sequence(x, sequence), ops.chunk(x)
        rows = as_rows(whole)
        if needs_values:
            out, inner = x.new_empty(rows.shape[0], weight2.shape[0]), torch.empty_like(pre)
            ops.matmul(rows, weight1, inner, bias1, activation, pre, chunk=chunk)
            ops.matmul(inner, weight2, out, chunk=chunk)
        else:
            out = x.new_empty(1).expand(rows.shape[0], weight2.shape[0])
            ops.matmul(rows, weight1, pre, bias1, chunk=chunk)
        ctx.save_for_backward(
            rows if sequence is None else x, pre
        )  # its values are cheaper to compute again than to keep
        ctx.ops, ctx.parameters, ctx.shape, ctx.sequence = (
            ops,
            (weight1, bias1, weight2),
            whole.shape,
            sequence,
        )
        ctx.activation, ctx.keeps_input = activation, needs_values and sequence is None
        return out.view(*whole.shape[:-1], weight2.shape[0])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, pre), weight2, dy, ops = ctx.saved_tensors, ctx.parameters[2], as_rows(dy), ctx.ops
        chunk = ops.chunk(dy)
        if ops.weight_gradients.waits:
            dpre = _gradient_of_argument(ops, dy, pre, weight2, ctx.activation, chunk)
        else:
            _to_gradient_of_argument(ops, dy, pre, weight2, ctx.activation, chunk)
            dpre = pre
        return None, None, gradient_of_input(ctx, x, dpre, chunk), None, None, None, None, None


def _second_weight_gradient(
    ops: NativeOps,
    dy: Tensor,
    argument: Tensor,
    activation: str,
    part: Tensor,
    grad: Tensor,
    chunk: int,
) -> None:
    """Add dy^T f(argument) to grad (h, columns). dy (rows, h), argument (rows, columns); part: memory for f(argument)."""
    ops.kernels.activate(argument, None, part, activation)
    ops.kernels.linear_weight_gradient(dy, part, grad, fp16_chunk=chunk)


def _to_gradient_of_argument(
    ops: NativeOps, dy: Tensor, pre: Tensor, weight2: Tensor, activation: str, chunk: int
) -> None:
    """Overwrite pre (rows, f), the activation's argument, with its gradient and add the second weight's, by parts of columns."""
    packed = ops.packed(weight2, True, chunk)
    for columns, part in column_parts(pre, pre.shape[1], packed is not None):
        argument = pre[:, columns]
        if not is_frozen(weight2):
            _second_weight_gradient(
                ops, dy, argument, activation, part, gradient_of(weight2)[:, columns], chunk
            )
        out = (
            part if pre.dtype == torch.float32 else argument
        )  # sums of FP32 lie in the result until the last block of k
        ops.kernels.linear_data_gradient(
            dy, weight2[:, columns], out, argument, activation, packed=packed, fp16_chunk=chunk
        )
        if out is part:
            argument.copy_(part)


def add_second_weight_gradient(
    ops: NativeOps, dy: Tensor, pre: Tensor, weight2: Tensor, activation: str, chunk: int
) -> None:
    """Add dy^T f(pre) to weight2's gradient (h, f), now or later; dy (rows, h) and pre (rows, f) stay until that is done."""

    def second_weight() -> None:
        for columns, part in column_parts(pre, pre.shape[1], whole=False):
            _second_weight_gradient(
                ops, dy, pre[:, columns], activation, part, gradient_of(weight2)[:, columns], chunk
            )

    if not is_frozen(weight2):
        ops.weight_gradients.add(second_weight)


def _gradient_of_argument(
    ops: NativeOps, dy: Tensor, pre: Tensor, weight2: Tensor, activation: str, chunk: int
) -> Tensor:
    """The gradient of pre (rows, f), in new memory; the second weight's gradient is put off, and needs pre and dy (rows, h)."""
    add_second_weight_gradient(ops, dy, pre, weight2, activation, chunk)
    dpre = torch.empty_like(pre)
    ops.kernels.linear_data_gradient(
        dy,
        weight2,
        dpre,
        pre,
        activation,
        packed=ops.packed(weight2, True, chunk),
        fp16_chunk=chunk,
    )
    return dpre


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ops: NativeOps, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float
    ) -> Tensor:
        x = x.contiguous()
        y, mean, rstd = (
            torch.empty_like(x),
            *x.new_empty(2, x.numel() // x.shape[-1], dtype=torch.float32),
        )
        ops.kernels.layer_norm(x, weight, bias, y, mean, rstd, epsilon)
        ctx.save_for_backward(x, mean, rstd)
        ctx.ops, ctx.weight, ctx.bias = ops, weight, bias
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor, None, None, None]:
        x, mean, rstd = ctx.saved_tensors
        dx = torch.empty_like(x)
        ctx.ops.kernels.layer_norm_backward(
            dy.contiguous(),
            x,
            mean,
            rstd,
            ctx.weight,
            dx,
            vector_gradient(ctx.weight),
            vector_gradient(ctx.bias),
        )
        return None, dx, None, None, None


class _BiasDropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ops: NativeOps,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        p: float,
        key: DropoutKey,
        needs_values: bool,
    ) -> Tensor:
        ctx.ops, ctx.bias, ctx.p, ctx.key = ops, bias, p, key
        if not needs_values:
            return residual.new_empty(1).expand_as(residual)
        x = x.contiguous()
        out = torch.empty_like(x)
        call_rowwise(ops.kernels.bias_dropout_add, p, key, x, bias, residual.contiguous(), out)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        dout = dout.contiguous()
        dx = torch.empty_like(dout) if ctx.p else None
        dbias = gradient_of(ctx.bias)
        if dx is not None or dbias is not None:
            call_rowwise(ctx.ops.kernels.bias_dropout_add_backward, ctx.p, ctx.key, dout, dx, dbias)
        return None, dout if dx is None else dx, None, dout, None, None, None


class _BiasDropoutAddLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ops: NativeOps,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        p: float,
        key: DropoutKey,
        weight: Tensor,
        norm_bias: Tensor,
        epsilon: float,
    ) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        total, y = torch.empty_like(x), torch.empty_like(x)
        mean, rstd = x.new_empty(2, *x.shape[:2], dtype=torch.float32)
        call_rowwise(
            ops.kernels.bias_dropout_add_layer_norm,
            p,
            key,
            x,
            bias,
            residual.contiguous(),
            total,
            weight,
            norm_bias,
            y,
            mean,
            rstd,
            epsilon,
        )
        ctx.save_for_backward(total, mean, rstd)
        ctx.ops, ctx.parameters, ctx.p, ctx.key = ops, (bias, weight, norm_bias), p, key
        return total, y

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
        total, mean, rstd = ctx.saved_tensors
        bias, weight, norm_bias = ctx.parameters
        dresidual = torch.empty_like(total)
        dx = torch.empty_like(total) if ctx.p else None
        call_rowwise(
            ctx.ops.kernels.bias_dropout_add_layer_norm_backward,
            ctx.p,
            ctx.key,
            dy.contiguous(),
            dtotal.contiguous(),
            total,
            mean,
            rstd,
            weight,
            dresidual,
            dx,
            vector_gradient(weight),
            vector_gradient(norm_bias),
            gradient_of(bias),
        )
        return None, dresidual if dx is None else dx, None, dresidual, None, None, None, None, None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ops: NativeOps,
        qkv: Tensor,
        heads: Heads,
        p: float,
        key: DropoutKey,
        seen: dict[str, Any],
    ) -> Tensor:
        qkv = qkv.contiguous()
        s, b, _ = qkv.shape
        out = qkv.new_empty(s, b, heads.heads * heads.head_size)
        lse = qkv.new_empty(b, heads.heads, s, dtype=torch.float32)
        ctx.ops, ctx.seen, ctx.dropout = (
            ops,
            seen,
            (p, key.seed, key.stream, key.first_sample, key.row0 // s),
        )
        ops.kernels.attention_forward(qkv, out, lse, *ctx.dropout, **seen)
        ctx.save_for_backward(qkv, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[None, Tensor, None, None, None, None]:
        qkv, out, lse = ctx.saved_tensors
        dqkv = torch.empty_like(qkv)
        ctx.ops.kernels.attention_backward(
            qkv, out, lse, dout.contiguous(), dqkv, *ctx.dropout, **ctx.seen
        )
        return None, dqkv, None, None, None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ops: NativeOps, tokens: Tensor, weight: Tensor, first_row: int) -> Tensor:
        ctx.ops, ctx.tokens, ctx.weight, ctx.first_row = ops, tokens, weight, first_row
        out = weight.new_empty(*tokens.shape, weight.shape[1])
        ops.kernels.embedding(tokens, weight, out, first_row)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[None, None, None, None]:
        ctx.ops.kernels.embedding_backward(
            ctx.tokens, dout.contiguous(), ctx.weight.main_grad, ctx.first_row
        )
        return None, None, None, None


class _AddPosition(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ops: NativeOps, x: Tensor, weight: Tensor, first: int) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        ops.kernels.add_position(x, weight[first:], out)
        ctx.ops, ctx.weight, ctx.first = ops, weight, first
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[None, Tensor, None, None]:
        ctx.ops.kernels.add_position_backward(dout.contiguous(), ctx.weight.main_grad[ctx.first :])
        return None, dout, None, None
