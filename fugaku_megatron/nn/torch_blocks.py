"""The operations of other blocks than GPT-2's in torch: RMS norm, gated and other MLPs, rotary positions, grouped attention.

Both backends run them (`torch_ops`; `native_ops` for what has no C++ kernel); they keep from forward to backward what
`costs.accounting` counts. Left out: their matmuls, which are the backend's.
Legend: s sequence, b micro-batch, h hidden, f MLP width, n heads of this rank in g groups, d head size, rows = s b.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, overload

import torch
from torch import Tensor
from torch.nn import functional as F

from ..comm.autograd import gather_sequence, reduce_scatter_sequence
from ..comm.base import Comm
from .dropout import DropoutKey
from .gradients import accumulate, as_rows, gradient_of, is_frozen
from .heads import Angles, Heads
from .shared_attention import Part, SharedCall


class BlockOps:
    """The operations of these blocks, for a backend with matmuls and `bias_dropout_add`, and no kernels of its own for them.

    `ops.Ops` says what each computes.
    """

    matmul: Callable[..., None]
    data_gradient: Callable[..., None]
    weight_gradient: Callable[..., None]
    bias_dropout_add: Callable[..., Tensor]

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
        return mlp(
            self, x, matrix(weight1), matrix(bias1), weight2, needs_values, sequence, activation
        )

    def gate(self, pre: Tensor, activation: str) -> Tensor:
        """The activation of pre (rows, 2 f), whose first f columns are the gates; without a gate (rows, f) -> (rows, f)."""
        return ACTIVATIONS[activation][0](pre)

    def gate_gradient(self, dinner: Tensor, pre: Tensor, dpre: Tensor, activation: str) -> None:
        """dpre, the gradient of pre, both as `gate`'s argument, from that of its result, dinner (rows, f)."""
        dpre.copy_(ACTIVATIONS[activation][1](dinner, pre))

    def gated_weight_gradient(
        self, dy: Tensor, pre: Tensor, weight: Tensor, activation: str, chunk: int
    ) -> None:
        """Add dy^T gate(pre) to the gradient of weight (h, f), now or later; dy (rows, h) and pre (rows, 2 f) stay until then."""
        if not is_frozen(weight):
            self.weight_gradient(dy, self.gate(pre, activation), weight, None, chunk)

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
        rows = (
            torch.arange(first_position, first_position + len(qkv)).unsqueeze(1)
            if positions is None
            else positions.long()
        )
        return rotary(
            qkv,
            angles,
            Heads(heads, groups, head_size),
            interleaved,
            rows,
            q_weight,
            k_weight,
            epsilon,
        )

    def cached_attention(
        self, qkv: Tensor, keys: Tensor, values: Tensor, samples: Tensor, positions: Tensor
    ) -> Tensor:
        """qkv (r, 1, g (n/g + 2) d), keys and values (all samples, g, slots, d), samples, positions (r,) -> (r, 1, n d)."""
        return cached_attention(qkv, keys, values, samples, positions)

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """x (..., h), weight (h) -> (..., h)."""
        return rms_norm(x, weight, epsilon)

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
        total = self.bias_dropout_add(x, bias, residual, p, key)
        return total, self.rms_norm(total, weight, epsilon)


# RMS norm (Zhang and Sennrich 2019, arXiv:1910.07467) ---------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dimension. x (..., h), weight (h) -> (..., h)."""
    return _RMSNorm.apply(x, weight, epsilon)


def _normalized(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """(the RMS norm of x (..., h), 1 / root mean square of each row (..., 1) in FP32)."""
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + epsilon)
    return (x * rstd * weight).to(x.dtype), rstd


def _norm_gradients(dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient of x (..., h), gradient of weight (h) in FP32) of `_normalized`; dy as x."""
    unit, dy = x.float() * rstd, dy.float()
    scaled = dy * weight
    dx = rstd * (scaled - unit * (scaled * unit).mean(-1, keepdim=True))
    return dx.to(x.dtype), as_rows(dy * unit).sum(0)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        y, rstd = _normalized(x, weight, epsilon)
        ctx.save_for_backward(x, rstd)
        ctx.weight = weight
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        x, rstd = ctx.saved_tensors
        dx, dweight = _norm_gradients(dy, x, rstd, ctx.weight)
        accumulate(ctx.weight, dweight)
        return dx, None, None


# Gated MLP (Shazeer 2020, arXiv:2002.05202) -------------------------------------------------------------------------------------


class _Derived(Tensor):
    """A tensor made of a parameter, whose gradient is the parameter's in another shape.

    The gradient is asked for in backward: before, it need not have memory.
    """

    __torch_function__: Any = (
        torch._C._disabled_torch_function_impl
    )  # results are plain tensors, as a parameter's are
    parameter: Tensor

    @property
    def frozen(self) -> bool:
        return is_frozen(self.parameter)

    @property
    def main_grad(self) -> Tensor | None:
        gradient: Tensor | None = gradient_of(self.parameter)
        return None if gradient is None else gradient.view(self.shape)


def derived(parameter: Tensor, values: Tensor) -> Tensor:
    """`values` (any shape of as many elements), made of a parameter by a function of slope 1, with the parameter's gradient."""
    made = values.as_subclass(_Derived)
    made.parameter = parameter
    return made


class _Part(_Derived):
    """One matrix of a parameter that holds several."""

    number: int

    @property
    def main_grad(self) -> Tensor | None:
        return gradient_of(self.parameter)[self.number].view(self.shape)


def part_of(parameter: Tensor, number: int) -> Tensor:
    """Matrix `number` of a parameter (e, ..., h), with its gradient, as what a matmul takes: (outputs, h)."""
    made = parameter.detach()[number].flatten(0, -2).as_subclass(_Part)
    made.parameter, made.number = parameter, number
    return made


@overload
def matrix(parameter: Tensor) -> Tensor: ...
@overload
def matrix(parameter: None) -> None: ...
def matrix(parameter: Tensor | None) -> Tensor | None:
    """A parameter (2, f, ...) as (2 f, ...), with its gradient: of a weight what a matmul takes, of a bias a vector."""
    return None if parameter is None else derived(parameter, parameter.detach().flatten(0, 1))


def gate(pre: Tensor) -> Tensor:
    """silu(gates) * values of pre (rows, 2 f), whose first f columns are the gates -> (rows, f)."""
    gates, values = pre.chunk(2, -1)
    return F.silu(gates) * values


def gate_gradient(dinner: Tensor, pre: Tensor) -> Tensor:
    """The gradient of pre (rows, 2 f) from that of `gate`, dinner (rows, f); computed in FP32."""
    gates, values = pre.float().chunk(2, -1)
    dinner, sigmoid = dinner.float(), torch.sigmoid(gates)
    slope = sigmoid * (1.0 + gates * (1.0 - sigmoid))
    return torch.cat((dinner * values * slope, dinner * gates * sigmoid), -1).to(pre.dtype)


def _squared_relu_gradient(dy: Tensor, x: Tensor) -> Tensor:
    return 2.0 * dy * F.relu(x)


def _gelu_gradient(dy: Tensor, x: Tensor) -> Tensor:
    return dy * (
        0.5 * (1.0 + torch.erf(x * math.sqrt(0.5)))
        + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    )


def _geglu(x: Tensor) -> Tensor:
    gates, values = x.chunk(2, -1)
    return F.gelu(gates, approximate="tanh") * values


def _geglu_gradient(dy: Tensor, x: Tensor) -> Tensor:
    gates, values = x.chunk(2, -1)
    tanh = torch.tanh(math.sqrt(2 / math.pi) * (gates + 0.044715 * gates**3))
    slope = 0.5 * (1.0 + tanh) + 0.5 * gates * (1.0 - tanh * tanh) * math.sqrt(2 / math.pi) * (
        1.0 + 3 * 0.044715 * gates * gates
    )
    return torch.cat((dy * values * slope, 0.5 * dy * gates * (1.0 + tanh)), -1)


def _in_fp32(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function computed in FP32, of tensors in any dtype; its result has the last one's dtype."""
    return lambda *tensors: function(*(tensor.float() for tensor in tensors)).to(tensors[-1].dtype)


# The values of what stands between an MLP's matmuls, and the gradient of its argument from that of the values. Squared ReLU: So et
# al. 2021 (arXiv:2109.08668); exact GELU: Hendrycks and Gimpel 2016 (arXiv:1606.08415); gates: Shazeer 2020, gates first.
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "squared_relu": (_in_fp32(lambda x: F.relu(x).square()), _in_fp32(_squared_relu_gradient)),
    "gelu_exact": (_in_fp32(F.gelu), _in_fp32(_gelu_gradient)),
    "geglu": (_in_fp32(_geglu), _in_fp32(_geglu_gradient)),
    "swiglu": (gate, gate_gradient),
    "gelu": (
        functools.partial(F.gelu, approximate="tanh"),
        lambda dy, x: torch.ops.aten.gelu_backward(dy, x, approximate="tanh"),
    ),
}


def mlp(
    ops: Any,
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    needs_values: bool,
    sequence: Comm | None,
    activation: str,
) -> Tensor:
    """activation(x W1^T + b) W2^T on the backend's matmuls; see `Ops.mlp`."""
    return _MLP.apply(ops, activation, x, weight1, bias1, weight2, needs_values, sequence)


class _MLP(torch.autograd.Function):
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
        whole, chunk = gather_sequence(x, sequence), ops.chunk(x)
        rows = as_rows(whole)
        pre = rows.new_empty(len(rows), len(weight1))
        ops.matmul(rows, weight1, pre, bias1, chunk=chunk)
        out = (
            x.new_empty(len(rows), len(weight2))
            if needs_values
            else x.new_empty(1).expand(len(rows), len(weight2))
        )
        if needs_values:
            ops.matmul(ops.gate(pre, activation), weight2, out, chunk=chunk)
        ctx.save_for_backward(
            rows if sequence is None else x, pre
        )  # its values are cheaper to compute again than to keep
        ctx.ops, ctx.activation, ctx.parameters = ops, activation, (weight1, bias1, weight2)
        ctx.shape, ctx.sequence = whole.shape, sequence
        return out.view(*whole.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, pre), (weight1, bias1, weight2), ops, dy = (
            ctx.saved_tensors,
            ctx.parameters,
            ctx.ops,
            as_rows(dy),
        )
        chunk, rows = ops.chunk(dy), as_rows(gather_sequence(x, ctx.sequence))
        ops.gated_weight_gradient(dy, pre, weight2, ctx.activation, chunk)
        dinner, dpre = pre.new_empty(len(pre), weight2.shape[1]), torch.empty_like(pre)
        ops.data_gradient(dy, weight2, dinner, chunk)
        ops.gate_gradient(dinner, pre, dpre, ctx.activation)
        ops.weight_gradient(dpre, rows, weight1, bias1, chunk)
        dx = torch.empty_like(rows)
        ops.data_gradient(dpre, weight1, dx, chunk)
        return (
            None,
            None,
            reduce_scatter_sequence(dx.view(ctx.shape), ctx.sequence),
            None,
            None,
            None,
            None,
            None,
        )


# Rotary positions (Su et al. 2021, arXiv:2104.09864) ----------------------------------------------------------------------------


def rotary(
    qkv: Tensor,
    angles: Angles | None,
    heads: Heads,
    interleaved: bool,
    positions: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    epsilon: float,
) -> Tensor:
    """Queries and keys of qkv normalised, where weights are passed, and turned, where angles are; see `Ops.rotary`."""
    return _Rotary.apply(qkv, angles, heads, interleaved, positions, (q_weight, k_weight), epsilon)


def turned(
    x: Tensor, angles: Angles | None, interleaved: bool, positions: Tensor, back: bool = False
) -> Tensor:
    """x (s, b, g, k, d) with pairs of its first elements turned by the angles of positions (s, b or 1), or back; FP32 inside."""
    if angles is None:
        return x
    cos, sin = (angle[positions, None, None] for angle in angles)  # (s, b or 1, 1, 1, rotated / 2)
    sin, size = -sin if back else sin, 2 * cos.shape[-1]
    pairs = x[..., :size].float().unflatten(-1, (-1, 2) if interleaved else (2, -1))
    first_of, second_of = pairs.unbind(-1 if interleaved else -2)
    both = torch.stack(
        (first_of * cos - second_of * sin, second_of * cos + first_of * sin),
        -1 if interleaved else -2,
    )
    return torch.cat((both.flatten(-2).to(x.dtype), x[..., size:]), -1)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        angles: Angles | None,
        heads: Heads,
        interleaved: bool,
        positions: Tensor,
        weights: tuple[Tensor | None, Tensor | None],
        epsilon: float,
    ) -> Tensor:
        qkv = qkv.contiguous()
        out = qkv.clone()
        for x, weight in zip(heads.split(out), weights):
            normed = x if weight is None else _normalized(x, weight, epsilon)[0]
            x.copy_(turned(normed, angles, interleaved, positions))
        ctx.save_for_backward(*([] if weights[0] is None else [qkv]))
        ctx.angles, ctx.heads, ctx.weights, ctx.epsilon, ctx.how = (
            angles,
            heads,
            weights,
            epsilon,
            (interleaved, positions),
        )
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        dqkv = dout.clone(memory_format=torch.contiguous_format)
        gradients = ctx.heads.split(dqkv)[:2]
        interleaved, positions = ctx.how
        for dy in gradients:
            dy.copy_(turned(dy, ctx.angles, interleaved, positions, back=True))
        for dy, x, weight in (
            zip(gradients, ctx.heads.split(*ctx.saved_tensors), ctx.weights)
            if ctx.saved_tensors
            else ()
        ):
            _, rstd = _normalized(x, weight, ctx.epsilon)  # cheaper to compute again than to keep
            dx, dweight = _norm_gradients(dy, x, rstd, weight)
            accumulate(weight, dweight)
            dy.copy_(dx)
        return dqkv, *(None for _ in range(6))


# Attention (groups: Ainslie et al. 2023, arXiv:2305.13245; window: Beltagy et al. 2020, arXiv:2004.05150) ------------------------


def seen_keys(s: int, window: int | None, starts: Tensor | None) -> Tensor | None:
    """Whether a query sees a key, (s, s), or with starts (b, s) that differ (b, 1, s, s); None: every query sees all before it."""
    if starts is None and (window is None or window >= s):
        return None
    seen = torch.ones(s, s, dtype=torch.bool).tril().triu(1 - min(window or s, s))
    return (
        seen if starts is None else (seen & (torch.arange(s) >= starts.unsqueeze(-1))).unsqueeze(1)
    )


def attention(
    qkv: Tensor,
    heads: Heads,
    window: int | None,
    dropout: Callable[[Tensor], Tensor] | None,
    starts: Tensor | None = None,
) -> Tensor:
    """Causal attention of qkv (s, b, g (n/g + 2) d) -> (s, b, n d); see `Ops.attention`. dropout: of probabilities (b, n, s, s)."""
    s, b, d = qkv.shape[0], qkv.shape[1], heads.head_size
    queries, keys, values = (
        x.permute(1, 2, 3, 0, 4).flatten(1, 2) for x in heads.split(qkv)
    )  # (b, n or g, s, d)
    seen = seen_keys(s, window, starts)
    if dropout is None:
        context = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=seen,
            is_causal=seen is None,
            enable_gqa=heads.groups < heads.heads,
        )  # (b, n, s, d)
        return context.permute(2, 0, 1, 3).reshape(s, b, -1)
    future = torch.ones(s, s, dtype=torch.bool).triu(1) if seen is None else ~seen
    stacked = queries.unflatten(1, (heads.groups, -1)).flatten(
        2, 3
    )  # (b, g, n/g s, d): no key or value is repeated
    scores = torch.matmul(stacked, keys.transpose(-1, -2)).reshape(b, heads.heads, s, s) * d**-0.5
    probabilities = dropout(torch.softmax(scores.masked_fill(future, float("-inf")), dim=-1))
    context = torch.matmul(probabilities.view(b, heads.groups, -1, s), values).reshape(
        b, heads.heads, s, d
    )
    return context.permute(2, 0, 1, 3).reshape(s, b, -1)


def _part_scores(
    call: SharedCall, part: Part, qkv: Tensor, kv: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of a part of `shared_attention` in FP32: scores (b, n, q, k), -inf where hidden, queries (b, n, q, d), keys and values
    (b, n, k, d)."""
    heads, sight = call.heads, call.sight
    queries = heads.split(qkv)[0].permute(1, 2, 3, 0, 4).flatten(1, 2).float()
    shape = (*kv.shape[:2], heads.groups, 2, heads.head_size)
    keys, values = (
        kv.view(shape)
        .permute(3, 1, 2, 0, 4)
        .repeat_interleave(heads.heads // heads.groups, 2)
        .float()
    )
    query, key = (torch.arange(run.start, run.stop) for run in (part.queries, part.keys))
    distance = query.unsqueeze(1) - key
    seen = ((distance >= 0) & (distance < (sight.window or sight.length))).expand(
        qkv.shape[1], -1, -1
    )
    if sight.starts is not None:
        seen = seen & (key >= sight.starts[:, query].unsqueeze(-1))
    scores = (queries @ keys.transpose(-1, -2)) * heads.head_size**-0.5
    return scores.masked_fill(~seen.unsqueeze(1), -torch.inf), queries, keys, values


def _part_mask(
    call: SharedCall, part: Part, samples: int, drop: Callable[..., Tensor]
) -> Tensor | float:
    """By what dropout multiplies the probabilities of a part, (b, n, q, k): rows and columns are those of the whole sequence."""
    if not call.dropout:
        return 1.0
    ones = torch.ones(samples, len(part.queries), part.keys.stop)
    rows = (
        call.key.row0 + head * call.sight.length + part.queries.start
        for head in range(call.heads.heads)
    )
    masks = [drop(ones, key=replace(call.key, row0=row))[..., part.keys.start :] for row in rows]
    return torch.stack(masks, 1)


def attention_part(
    call: SharedCall, part: Part, qkv: Tensor, kv: Tensor, drop: Callable[..., Tensor]
) -> tuple[Tensor, Tensor]:
    """`NativeOps.part`. drop(x, key=key): dropout."""
    scores, *_, values = _part_scores(call, part, qkv, kv)
    lse = torch.logsumexp(scores, -1)
    probabilities = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
    out = (probabilities * _part_mask(call, part, len(scores), drop)) @ values
    return out.permute(2, 0, 1, 3).flatten(2).to(qkv.dtype), lse


def add_part_gradients(
    call: SharedCall,
    part: Part,
    tensors: tuple[Tensor, ...],
    dqkv: Tensor,
    dkv: Tensor,
    drop: Callable[..., Tensor],
) -> None:
    """`NativeOps.part_gradients`. tensors: qkv, kv, out, lse, dout."""
    qkv, kv, out, lse, dout = tensors
    heads = call.heads
    scores, queries, keys, values = _part_scores(call, part, qkv, kv)
    grad, context = (
        x.float().unflatten(2, (heads.heads, -1)).permute(1, 2, 0, 3) for x in (dout, out)
    )  # (b, n, q, d)
    probabilities, mask = (
        torch.exp(scores - lse.unsqueeze(-1)),
        _part_mask(call, part, len(scores), drop),
    )
    delta = (grad * context).sum(-1, keepdim=True)
    dscores = (
        probabilities * (grad @ values.transpose(-1, -2) * mask - delta) * heads.head_size**-0.5
    )
    dqueries = (
        (dscores @ keys).unflatten(1, (heads.groups, -1)).permute(3, 0, 1, 2, 4)
    )  # (q, b, g, n/g, d)
    heads.split(dqkv)[0].add_(dqueries)
    both = torch.stack(
        (dscores.transpose(-1, -2) @ queries, (probabilities * mask).transpose(-1, -2) @ grad)
    )  # (2, b, n, k, d)
    dkv.add_(both.unflatten(2, (heads.groups, -1)).sum(3).permute(3, 1, 2, 0, 4).reshape(dkv.shape))


def cached_attention(
    qkv: Tensor, keys: Tensor, values: Tensor, samples: Tensor, positions: Tensor
) -> Tensor:
    """One new token (r, 1, g (n/g + 2) d) of each sample -> (r, 1, n d); see `Ops.cached_attention`.

    keys, values (all samples, g, slots, d), samples, positions (r,). The queries of a group are attention's rows: nothing is
    repeated.
    """
    _, groups, slots, d = keys.shape
    context = []
    rows = qkv.view(len(qkv), groups, -1, d)
    for row, sample, position in zip(rows, samples.tolist(), positions.tolist(), strict=True):
        keys[sample, :, position % slots], values[sample, :, position % slots] = (
            row[:, -2],
            row[:, -1],
        )
        known = slice(sample, sample + 1), slice(None), slice(min(position + 1, slots))
        context.append(
            F.scaled_dot_product_attention(row[None, :, :-2], keys[known], values[known])
        )  # (1, g, n / g, d)
    return torch.cat(context).view(len(qkv), 1, -1)
