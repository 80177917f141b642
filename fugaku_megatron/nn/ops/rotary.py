"""Rotary positions (Su et al. 2021, arXiv:2104.09864), with the norm of queries and keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...comm.autograd import Saved, apply_conjugates, apply_saving
from ..attention.heads import Angles, Heads
from ..parameter import accumulate, vector_gradient
from .backend import Backend
from .norm import norm_gradients, normalized


class HeadNorms(NamedTuple):
    """Weights (d) of the RMS norms of queries and keys."""

    q_weight: Tensor
    k_weight: Tensor
    epsilon: float


class Rotary(NamedTuple):
    """Arguments of `rotary`.

    angles: cosines and sines (positions, rotated elements / 2) in FP32, or None for no rotation.
    interleaved: pairs are neighbours 2 i and 2 i + 1, else elements i and i + rotated / 2.
    norm: applied before the rotation.
    positions: int32 (s, b), each token's row in `angles`; None: the token's index.
    """

    angles: Angles | None
    heads: Heads
    interleaved: bool
    norm: HeadNorms | None = None
    positions: Tensor | None = None


def rotary(ops: Backend, qkv: Tensor, call: Rotary) -> Tensor:
    """Rotate queries and keys of qkv, after the norm if `call.norm` is given."""
    if not ops.is_native("rowwise"):
        return _torch_rotary(qkv, call)
    if call.angles is None:
        empty = qkv.new_empty(2, len(qkv), 0, dtype=torch.float32)
        call = call._replace(angles=(empty[0], empty[1]), positions=None)
    elif call.positions is None:
        cosines, sines = call.angles
        call = call._replace(angles=(cosines[: len(qkv)], sines[: len(qkv)]))
    if call.norm is not None:
        return _native_rotary_norm(ops.kernels, qkv, call, call.norm)
    return apply_conjugates(
        lambda x: _native_rotated(ops.kernels, x, call, inverse=False),
        lambda dout: _native_rotated(ops.kernels, dout, call, inverse=True),
        qkv,
    )


def _heads(qkv: Tensor, call: Rotary) -> Tensor:
    return qkv.view(*qkv.shape[:2], -1, call.heads.head_size)


def _native_rotated(kernels: Any, qkv: Tensor, call: Rotary, inverse: bool) -> Tensor:
    qkv = qkv.contiguous()
    out = torch.empty_like(qkv)
    assert call.angles is not None
    kernels.rotary(
        _heads(qkv, call),
        *call.angles,
        _heads(out, call),
        call.heads.queries_per_group,
        call.interleaved,
        inverse=inverse,
        positions=call.positions,
    )
    return out


def _native_rotary_norm(kernels: Any, qkv: Tensor, call: Rotary, norm: HeadNorms) -> Tensor:
    assert call.angles is not None
    angles = call.angles
    queries_per_group = call.heads.queries_per_group

    def forward() -> tuple[Tensor, Saved]:
        x = qkv.contiguous()
        out = torch.empty_like(x)
        kernels.rotary_norm(
            _heads(x, call),
            norm.q_weight,
            norm.k_weight,
            *angles,
            _heads(out, call),
            queries_per_group,
            norm.epsilon,
            call.interleaved,
            positions=call.positions,
        )
        # The root mean squares are cheaper to recompute than to save.
        return out, (x,)

    def backward(dout: Tensor, x: Tensor) -> Tensor:
        dx = torch.empty_like(x)
        kernels.rotary_norm_backward(
            _heads(dout.contiguous(), call),
            _heads(x, call),
            norm.q_weight,
            norm.k_weight,
            *angles,
            _heads(dx, call),
            vector_gradient(norm.q_weight),
            vector_gradient(norm.k_weight),
            queries_per_group,
            norm.epsilon,
            call.interleaved,
            positions=call.positions,
        )
        return dx

    return apply_saving(forward, backward, qkv)


def _torch_rotary(qkv: Tensor, call: Rotary) -> Tensor:
    norm = call.norm

    def forward() -> tuple[Tensor, Saved]:
        x = qkv.contiguous()
        out = x.clone()
        queries, keys, _ = call.heads.split(out)
        if norm is not None:
            queries.copy_(normalized(queries, norm.q_weight, norm.epsilon)[0])
            keys.copy_(normalized(keys, norm.k_weight, norm.epsilon)[0])
        for part in (queries, keys):
            part.copy_(_rotated(part, call))
        return out, (() if norm is None else (x,))

    def backward(dout: Tensor, *saved: Tensor) -> Tensor:
        dqkv = dout.clone(memory_format=torch.contiguous_format)
        gradients = call.heads.split(dqkv)[:2]
        for dy in gradients:
            dy.copy_(_rotated(dy, call, inverse=True))
        if norm is not None:
            inputs = call.heads.split(saved[0])[:2]
            for dy, x, weight in zip(gradients, inputs, norm[:2], strict=True):
                # The root mean squares are cheaper to recompute than to save.
                _, rstd = normalized(x, weight, norm.epsilon)
                dx, dweight = norm_gradients(dy, x, rstd, weight)
                accumulate(weight, dweight)
                dy.copy_(dx)
        return dqkv

    return apply_saving(forward, backward, qkv)


def _rotated(x: Tensor, call: Rotary, inverse: bool = False) -> Tensor:
    if call.angles is None:
        return x
    if call.positions is None:
        positions = torch.arange(len(x)).unsqueeze(1)
    else:
        positions = call.positions.long()
    cos, sin = (angle[positions, None, None] for angle in call.angles)
    if inverse:
        sin = -sin
    size = 2 * cos.shape[-1]
    pair_dim = -1 if call.interleaved else -2
    pairs = x[..., :size].float().unflatten(-1, (-1, 2) if call.interleaved else (2, -1))
    first, second = pairs.unbind(pair_dim)
    both = torch.stack((first * cos - second * sin, second * cos + first * sin), pair_dim)
    return torch.cat((both.flatten(-2).to(x.dtype), x[..., size:]), -1)
