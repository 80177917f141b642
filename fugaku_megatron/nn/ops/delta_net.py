"""Gated delta rule (Yang et al. 2024, arXiv:2412.06464), with the convolution, the gates and the norm of its layer.

A head has a state S (key size x value size). Token t with unit key k, unit query q, value v, log decay g and strength beta updates it:
    S = exp(g) S,   S = S + beta k (v - S^T k)^T,   out = S^T q / sqrt(key size)
A chunk of 64 tokens is a few matmuls and a triangular solve. Backward recomputes each chunk from its first state.

r rows of generation; qkv as in `DeltaHeads`.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ...comm.autograd import Gradients, Saved, SavedResult, apply_saving
from ...costs.delta_net import CHUNK
from ..backward import by_autograd
from ..parameter import vector_gradient
from .backend import Backend
from .norm import torch_rms_norm

L2_EPSILON = 1e-6


class DeltaHeads(NamedTuple):
    """Heads of a rank. A key head belongs to value_heads / key_heads consecutive value heads.

    qkv (s, b, 2 key_heads key_size + value_heads value_size): of each key head its query, its key and its value heads' values.
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int

    @property
    def group(self) -> int:
        return self.value_heads // self.key_heads

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return views of queries and keys (s, b, key_heads, key_size), and values (s, b, key_heads, group, value_size)."""
        sizes = (self.key_size, self.key_size, self.group * self.value_size)
        queries, keys, values = qkv.unflatten(-1, (self.key_heads, -1)).split(sizes, -1)
        return queries, keys, values.unflatten(-1, (self.group, -1))


class DeltaGates(NamedTuple):
    """FP32 (s, b, value_heads): log decay, at most 0, and strength of the update."""

    decay: Tensor
    beta: Tensor


def delta_gates(
    ops: Backend, alpha: Tensor, beta: Tensor, a_log: Tensor, dt_bias: Tensor
) -> DeltaGates:
    """Return log decays -exp(a_log) softplus(alpha + dt_bias), and sigmoid(beta).

    alpha, beta: (s, b, value_heads). a_log, dt_bias: parameters (value_heads).
    """

    def gates(alpha: Tensor, beta: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        decay = -a_log.float().exp() * F.softplus(alpha.float() + dt_bias.float())
        return decay, torch.sigmoid(beta.float())

    return DeltaGates(*by_autograd(gates, (alpha, beta), (a_log, dt_bias)))


def gated_delta_rule(
    ops: Backend,
    qkv: Tensor,
    gates: DeltaGates,
    heads: DeltaHeads,
    starts: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the result (s, b, value_heads value_size) and the state after the last token.

    starts: int32 (b, s), first token of each token's document, before which the state is zero.
    state: FP32 (b, value_heads, key_size, value_size), the state before the first token; None: zero.
    """
    if state is None:
        shape = (qkv.shape[1], heads.value_heads, heads.key_size, heads.value_size)
        state = qkv.new_zeros(shape, dtype=torch.float32)
    if not ops.is_native("attention"):
        return _torch_rule(qkv, gates, heads, starts, state)
    kernels = ops.kernels

    def forward() -> tuple[tuple[Tensor, Tensor], Saved]:
        inputs = (qkv.contiguous(), gates.decay.contiguous(), gates.beta.contiguous())
        s, b, _ = qkv.shape
        segments = -(-s // kernels.DELTA_SEGMENT)
        states = state.new_empty(segments + 1, *state.shape)
        states[0] = state
        out = qkv.new_empty(s, b, heads.value_heads * heads.value_size)
        kernels.delta_rule_forward(*inputs, states, out, starts=starts)
        return (out, states[-1].clone()), (*inputs, states)

    def backward(dout: Tensor, dstate: Tensor, *saved: Tensor) -> Gradients:
        gradients = [torch.empty_like(x) for x in saved[:3]]
        # The kernel replaces the gradient of the last state by that of the first.
        dstate = dstate.clone(memory_format=torch.contiguous_format)
        kernels.delta_rule_backward(*saved, dout.contiguous(), dstate, *gradients, starts=starts)
        return *gradients, dstate

    return apply_saving(forward, backward, qkv, *gates, state)


def _unit(x: Tensor) -> Tensor:
    """Return x (..., d) divided by its length, in FP32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPSILON)


def _chunk_rule(
    qkv: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    heads: DeltaHeads,
    starts: Tensor | None,
    first: int,
) -> tuple[Tensor, Tensor]:
    """Return the result (c, b, value_heads value_size) and the next state of a chunk of c tokens.

    first: position of the first token.
    """
    queries, keys, values = heads.split(qkv)
    queries, keys, values = (
        x.permute(1, 2, 0, 3).float() for x in (queries, keys, values.flatten(2, 3))
    )  # (b, heads, c, size)
    queries = _unit(queries).repeat_interleave(heads.group, 1)
    keys = _unit(keys).repeat_interleave(heads.group, 1)
    beta = beta.permute(1, 2, 0).unsqueeze(-1)
    # Differences of long sums: in double.
    sums = decay.permute(1, 2, 0).double().cumsum(-1)
    count = len(qkv)
    visible = torch.ones(count, count, dtype=torch.bool).tril()
    reached = torch.ones(count, dtype=torch.bool)
    if starts is not None:
        own_starts = starts[:, None, first : first + count]
        visible = visible & (torch.arange(first, first + count) >= own_starts.unsqueeze(-1))
        reached = own_starts < max(first, 1)
    # Decay from token j to token i (b, n, c, c), 0 for j > i and another document.
    pairwise = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).masked_fill(~visible, -torch.inf)
    pairwise = pairwise.exp().float()
    from_state = (sums.exp().float() * reached).unsqueeze(-1)
    to_state = pairwise[..., -1, :].unsqueeze(-1)
    products = (keys @ keys.mT * pairwise).tril(-1)
    updates = torch.linalg.solve_triangular(
        products * beta,
        (values - from_state * (keys @ state)) * beta,
        upper=False,
        unitriangular=True,
    )
    scores = queries @ keys.mT * pairwise
    results = from_state * (queries @ state) + scores @ updates
    state = from_state[..., -1:, :] * state + (to_state * keys).mT @ updates
    results = (results * heads.key_size**-0.5).permute(2, 0, 1, 3)
    return results.flatten(2).to(qkv.dtype), state


def _torch_rule(
    qkv: Tensor, gates: DeltaGates, heads: DeltaHeads, starts: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    results = []
    chunks = zip(*(x.split(CHUNK) for x in (qkv, *gates)))
    for number, chunk in enumerate(chunks):
        rule = partial(_chunk_rule, heads=heads, starts=starts, first=number * CHUNK)
        result, state = by_autograd(rule, (*chunk, state))
        results.append(result)
    return torch.cat(results), state


def cached_delta_rule(
    ops: Backend,
    qkv: Tensor,
    gates: DeltaGates,
    heads: DeltaHeads,
    states: Tensor,
    samples: Tensor,
) -> Tensor:
    """Update the states of one new token per sample, qkv (r, 1, ...) -> (r, 1, value_heads value_size). Nothing is saved.

    states: FP32 (samples, value_heads, key_size, value_size). samples: int64 (r,), each row's sample.
    """
    rows = qkv.squeeze(1)
    decay = gates.decay.squeeze(1)
    beta = gates.beta.squeeze(1)
    if ops.is_native("attention"):
        result = qkv.new_empty(len(rows), heads.value_heads * heads.value_size)
        ops.kernels.delta_rule_decode(rows, decay, beta, states, samples, result)
        return result.unsqueeze(1)
    queries, keys, values = heads.split(rows)
    queries, keys = (
        _unit(x).repeat_interleave(heads.group, 1).unsqueeze(-1) for x in (queries, keys)
    )  # (r, n, key_size, 1)
    state = states[samples] * decay[..., None, None].exp()
    predicted = (keys * state).sum(-2)
    updates = (values.flatten(1, 2).float() - predicted) * beta.unsqueeze(-1)
    state = state + keys * updates.unsqueeze(-2)
    states[samples] = state
    out: Tensor = (queries * state).sum(-2) * heads.key_size**-0.5
    return out.flatten(1).unsqueeze(1).to(qkv.dtype)


def causal_convolution(
    ops: Backend,
    x: Tensor,
    weight: Tensor,
    starts: Tensor | None = None,
    earlier: Tensor | None = None,
) -> Tensor:
    """Return silu of the depthwise convolution of x (s, b, channels) over each token and the w - 1 before it.

    weight: parameter (channels, w), the token itself last. starts: see `gated_delta_rule`.
    earlier: (w - 1, b, channels), inputs before the first token; None: zeros.
    """
    if not ops.is_native("rowwise"):

        def convolve(x: Tensor, earlier: Tensor | None, weight: Tensor) -> Tensor:
            total = _convolve(_taps(x, weight.shape[1], starts, earlier), weight)
            return F.silu(total).to(x.dtype)

        return by_autograd(convolve, (x, earlier), (weight,))  # type: ignore[no-any-return]
    kernels = ops.kernels

    def forward() -> SavedResult:
        y = x.new_empty(x.shape)
        before = None if earlier is None else earlier.contiguous()
        kernels.convolution_forward(x, weight, y, starts=starts, earlier=before)
        return y, (x, starts, before)

    def backward(dy: Tensor, x: Tensor, starts: Tensor | None, earlier: Tensor | None) -> Gradients:
        dx = x.new_empty(x.shape)
        dearlier = None if earlier is None else torch.empty_like(earlier)
        kernels.convolution_backward(
            dy.contiguous(),
            x,
            weight,
            dx,
            vector_gradient(weight),
            starts=starts,
            earlier=earlier,
            dearlier=dearlier,
        )
        return dx, dearlier

    return apply_saving(forward, backward, x, earlier, weight)


def _taps(x: Tensor, width: int, starts: Tensor | None, earlier: Tensor | None) -> list[Tensor]:
    """Return the inputs (s, b, channels) of each tap, of the token itself last, in FP32."""
    s = len(x)
    if earlier is None:
        earlier = x.new_zeros(width - 1, *x.shape[1:])
    padded = torch.cat((earlier, x)).float()
    taps = [padded[tap : tap + s] for tap in range(width)]
    if starts is None:
        return taps
    positions = torch.arange(s).unsqueeze(1)
    # The first document contains the earlier inputs.
    starts = starts.t().masked_fill(starts.t() == 0, -width)
    return [
        taps[tap] * (positions - (width - 1 - tap) >= starts).unsqueeze(-1) for tap in range(width)
    ]


def _convolve(taps: list[Tensor], weight: Tensor) -> Tensor:
    total = torch.zeros_like(taps[0])
    for tap, inputs in enumerate(taps):
        total += inputs * weight[:, tap].float()
    return total


def cached_convolution(
    ops: Backend, x: Tensor, weight: Tensor, inputs: Tensor, samples: Tensor
) -> Tensor:
    """Convolve one new token per sample, x (r, 1, channels) -> the same shape. Nothing is saved.

    inputs: (samples, w - 1, channels), the last inputs of each sample, to which x is appended. samples: int64 (r,).
    """
    if ops.is_native("rowwise"):
        y = x.new_empty(len(x), x.shape[-1])
        ops.kernels.convolution_decode(x.squeeze(1), weight, inputs, samples, y)
        return y.unsqueeze(1)
    window = torch.cat((inputs[samples], x), 1)  # (r, w, channels)
    inputs[samples] = window[:, 1:]
    return F.silu(_convolve(list(window.float().unbind(1)), weight)).unsqueeze(1).to(x.dtype)


def _tokens(x: Tensor) -> Tensor:
    """Return x (..., heads, h) as (tokens, heads, h), copied only if tokens have different distances."""
    return x.flatten(0, -3) if x.dim() > 3 else x


def gated_rms_norm(ops: Backend, x: Tensor, gate: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return the RMS norm of each head of x times silu(gate), computed in FP32. x, gate: (..., heads, h). weight: parameter (h)."""
    if not ops.is_native("rowwise"):

        def norm(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
            y = torch_rms_norm(x.float(), weight.float(), epsilon)
            return (y * F.silu(gate.float())).to(x.dtype)

        return by_autograd(norm, (x, gate), (weight,))  # type: ignore[no-any-return]
    kernels = ops.kernels

    def forward() -> SavedResult:
        rows = x.contiguous()
        y = torch.empty_like(rows)
        kernels.gated_norm(_tokens(rows), _tokens(gate), weight, _tokens(y), epsilon)
        return y, (rows, gate)

    def backward(dy: Tensor, x: Tensor, gate: Tensor) -> Gradients:
        dx = torch.empty_like(x)
        dgate = torch.empty_like(x)
        kernels.gated_norm_backward(
            _tokens(dy.contiguous()),
            _tokens(x),
            _tokens(gate),
            weight,
            _tokens(dx),
            _tokens(dgate),
            vector_gradient(weight),
            epsilon,
        )
        return dx, dgate

    return apply_saving(forward, backward, x, gate, weight)
