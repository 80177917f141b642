"""The operations of a training step on torch's own kernels; `ops` says what each computes.

Also the readable reference of `native_ops`. Left out: communication, except inside the loss and of a matmul's split input.
Legend: s sequence, b micro-batch, h hidden, n heads of this rank, d head size, v vocabulary of this rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..comm.autograd import gather_sequence, reduce_scatter_sequence
from ..comm.base import Comm
from . import dropout as dropout_module
from . import torch_blocks
from .deferred_gradients import WeightGradients
from .dropout import DropoutKey
from .expert_ops import ExpertOps
from .gradients import accumulate, gradient_of, is_frozen
from .heads import Heads
from .shared_attention import Part, SharedCall
from .torch_blocks import BlockOps


@dataclass(frozen=True)
class TorchOps(ExpertOps, BlockOps):
    """The backend on torch's kernels. kernels: the C++ library, for dropout's masks alone, which both backends share.

    weight_gradients: where linear layers bring the work for their weights' gradients.
    """

    kernels: Any
    weight_gradients: WeightGradients = field(default_factory=WeightGradients)

    # Matmuls, as the native backend has them ---------------------------------------------------------------------------------

    def chunk(self, x: Tensor) -> int:
        """0: torch's matmuls have no chunks that are summed in FP16."""
        return 0

    def matmul(
        self, x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None, chunk: int = 0
    ) -> None:
        """out (rows, out) = x (rows, in) weight^T + bias, weight (out, in), bias (out)."""
        out.copy_(F.linear(x, weight, bias))

    def data_gradient(self, dy: Tensor, weight: Tensor, dx: Tensor, chunk: int = 0) -> None:
        """dx (rows, in) = dy (rows, out) weight, weight (out, in)."""
        torch.mm(dy, weight, out=dx)

    def weight_gradient(
        self, dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, chunk: int = 0
    ) -> None:
        """Add dy^T x to the gradient of weight (out, in), now or later, and the sum of dy's rows to that of bias (out)."""
        if not is_frozen(weight):
            self.weight_gradients.add(
                partial(_linear_weight_gradient, dy, x.detach(), weight, bias)
            )

    def outer_sum(self, dy: Tensor, x: Tensor) -> Tensor:
        """dy^T x in FP32 of dy (rows, out) and x (rows, in), (out, in)."""
        return dy.t().float() @ x.float()

    # Operations, as in `ops` -------------------------------------------------------------------------------------------------

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
        """x (s, b, h), weight1 (f, h), bias1 (f), weight2 (h, f) -> (s, b, h). With "gelu" the values are always computed."""
        if activation != "gelu":
            return torch_blocks.mlp(
                self, x, weight1, bias1, weight2, needs_values, sequence, activation
            )
        return self.linear(gelu(self.linear(x, weight1, bias1, sequence)), weight2)

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
        dropout = partial(self.dropout, p=p, key=key) if p else None
        return torch_blocks.attention(
            qkv, Heads.of(qkv, head_size, groups), window, dropout, starts
        )

    def part(self, call: SharedCall, part: Part, qkv: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """qkv (q, b, g (n/g + 2) d), kv (k, b, 2 g d) -> (q, b, n d), and the logarithms of the sums (b, n, q)."""
        return torch_blocks.attention_part(
            call, part, qkv, kv, partial(self.dropout, p=call.dropout)
        )

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
        torch_blocks.add_part_gradients(
            call, part, (qkv, kv, out, lse, dout), dqkv, dkv, partial(self.dropout, p=call.dropout)
        )

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
        """x (..., h), weight and bias (h) -> (..., h)."""
        return _LayerNorm.apply(x, weight, bias, epsilon)

    def bias_dropout_add(
        self,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        p: float,
        key: DropoutKey,
        needs_values: bool = True,
    ) -> Tensor:
        """x and residual (s, b, h), bias (h) -> (s, b, h). The values are always computed."""
        return residual + self.dropout(x if bias is None else add_bias(x, bias), p, key)

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
        total = self.bias_dropout_add(x, bias, residual, p, key)
        return total, self.layer_norm(total, weight, norm_bias, epsilon)

    def dropout(self, x: Tensor, p: float, key: DropoutKey) -> Tensor:
        """x (any shape) -> the same shape."""
        return dropout_module.dropout(self.kernels, x, p, key)

    def embedding(self, tokens: Tensor, weight: Tensor, first_row: int = 0) -> Tensor:
        """tokens (s, b), weight (v, h) -> (s, b, h)."""
        return _Embedding.apply(tokens, weight, first_row)

    def add_position(self, x: Tensor, weight: Tensor, first: int = 0) -> Tensor:
        """x (s, b, h), weight (positions, h) -> (s, b, h)."""
        return _AddPosition.apply(x, weight, first)

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
        """x (s, b, h), weight (v, h), labels (s, b) -> (). factor and rows_at_once change nothing here.

        The weight's gradient is never put off, as in the native backend, so that it comes before the embedding's in a shared one.
        """
        logits = _Linear.apply(TorchOps(self.kernels), x, weight, None, None)
        if words is not None:
            logits[..., words:] = -math.inf
        divisor = count or labels.numel()
        z_part = None if z_sum is None else torch.zeros(())
        losses = vocab_parallel_cross_entropy(logits, labels, tp, first_row, z_loss, z_part)
        if z_sum is not None and z_part is not None:
            z_sum += z_part / divisor
        return losses.sum() / divisor


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ops: TorchOps,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sequence: Comm | None,
    ) -> Tensor:
        ctx.save_for_backward(*([] if is_frozen(weight) else [x]))
        ctx.ops, ctx.weight, ctx.bias, ctx.sequence = ops, weight, bias, sequence
        return F.linear(gather_sequence(x, sequence), weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, dy_rows = ctx.weight, dy.reshape(-1, dy.shape[-1])  # (s b, out)
        if ctx.saved_tensors:
            x = gather_sequence(ctx.saved_tensors[0], ctx.sequence)
            ctx.ops.weight_gradient(dy_rows, x.reshape(-1, x.shape[-1]), weight, ctx.bias)
        return (
            None,
            reduce_scatter_sequence((dy_rows @ weight).view(*dy.shape[:-1], -1), ctx.sequence),
            None,
            None,
            None,
        )


def _linear_weight_gradient(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Add the gradients of weight (out, in) and bias (out). dy (rows, out), x (rows, in)."""
    if weight.dtype == torch.float32:
        gradient_of(weight).addmm_(dy.t(), x)
    else:
        accumulate(weight, dy.t() @ x)
    if bias is not None:
        accumulate(bias, dy.sum(0, dtype=torch.float32))


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
        y, mean, rstd = torch.native_layer_norm(x, (x.shape[-1],), weight, bias, epsilon)
        ctx.save_for_backward(x, mean, rstd)
        ctx.weight, ctx.bias = weight, bias
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        x, mean, rstd = ctx.saved_tensors
        dx, dw, db = torch.ops.aten.native_layer_norm_backward(
            dy.contiguous(), x, (x.shape[-1],), mean, rstd, ctx.weight, ctx.bias, [True, True, True]
        )
        accumulate(ctx.weight, dw)
        accumulate(ctx.bias, db)
        return dx, None, None, None


def gelu(x: Tensor) -> Tensor:
    """GELU of x (any shape) in the tanh approximation, as GPT-2 has it."""
    return F.gelu(x, approximate="tanh")


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, first_row: int) -> Tensor:
        rows = tokens - first_row
        ctx.weight, ctx.elsewhere = weight, (rows < 0) | (rows >= weight.shape[0])
        rows = rows.masked_fill(ctx.elsewhere, 0)
        ctx.save_for_backward(rows)
        return F.embedding(rows, weight).masked_fill_(ctx.elsewhere.unsqueeze(-1), 0.0)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, None, None]:
        dy = dy.float().masked_fill(ctx.elsewhere.unsqueeze(-1), 0.0)
        ctx.weight.main_grad.index_add_(0, ctx.saved_tensors[0].flatten(), dy.flatten(0, 1))
        return None, None, None


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        tp: Comm,
        first_row: int,
        z_loss: float,
        z_sum: Tensor | None,
    ) -> Tensor:
        ctx.dtype, logits = logits.dtype, logits.float()  # (s, b, v)
        row_max = tp.all_reduce(logits.amax(-1), "max")  # (s, b)
        exponentials = torch.exp(logits - row_max.unsqueeze(-1))
        sum_exp = tp.all_reduce(exponentials.sum(-1))
        rows = labels - first_row
        elsewhere = (rows < 0) | (rows >= logits.shape[-1])
        rows = rows.masked_fill(elsewhere, 0).unsqueeze(-1)
        target_logit = tp.all_reduce(
            (logits.gather(-1, rows).squeeze(-1) - row_max).masked_fill(elsewhere, 0.0)
        )
        log_sum = torch.log(sum_exp)
        z = log_sum + row_max
        probabilities, ignored = exponentials.div_(sum_exp.unsqueeze(-1)), labels < 0
        if z_loss:
            probabilities.mul_(1 + 2 * z_loss * z.unsqueeze(-1))
        probabilities[ignored] = 0.0
        ctx.save_for_backward(probabilities, rows, elsewhere)
        added = z_loss * z * z
        if z_sum is not None:
            z_sum += added.masked_fill(ignored, 0.0).sum()
        return (log_sum - target_logit + added).masked_fill_(ignored, 0.0)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, rows, elsewhere = ctx.saved_tensors
        dlogits = probabilities
        dlogits.scatter_add_(-1, rows, (elsewhere.float() - 1.0).unsqueeze(-1))
        return dlogits.mul_(dloss.unsqueeze(-1)).to(ctx.dtype), None, None, None, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    tp: Comm,
    first_row: int,
    z_loss: float = 0.0,
    z_sum: Tensor | None = None,
) -> Tensor:
    """-log softmax(logits)[label] + z_loss (log sum exp)^2 in FP32, the vocabulary being split over `tp`.

    logits (s, b, v), labels (s, b) -> (s, b). Where a label is below 0, the loss and the gradient are 0. z_sum: () or None, to
    which the sum of the second term is added.

    The gradient is computed in place of the saved probabilities, so backward runs once.
    """
    return _CrossEntropy.apply(logits, labels, tp, first_row, z_loss, z_sum)


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.bias = bias
        return x + bias

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        accumulate(ctx.bias, dy.sum((0, 1), dtype=torch.float32))
        return dy, None


def add_bias(x: Tensor, bias: Tensor) -> Tensor:
    """x (s, b, h) + bias (h)."""
    return _AddBias.apply(x, bias)


class _AddPosition(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, first: int) -> Tensor:
        ctx.weight, ctx.rows = weight, slice(first, first + x.shape[0])
        return x + weight[ctx.rows].unsqueeze(1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        ctx.weight.main_grad[ctx.rows].add_(dy.sum(1, dtype=torch.float32))
        return dy, None, None
