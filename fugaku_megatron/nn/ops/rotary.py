"""Rotary positions (Su et al. 2021, arXiv:2104.09864), with the norm of queries and keys."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...comm.autograd import SavedResult, apply_conjugates, apply_saving
from ..attention.heads import Angles, Heads
from ..backward import by_autograd
from ..parameter import vector_gradient
from .backend import Backend
from .norm import torch_rms_norm


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
    norm = call.norm
    if norm is None:
        return apply_conjugates(
            lambda x: rotate(ops, x, call), lambda dout: rotate(ops, dout, call, inverse=True), qkv
        )
    if not ops.is_native("rowwise"):
        return _torch_rotary_norm(qkv, call, norm)
    kernels = ops.kernels
    angles, positions = _of_rows(call, qkv)
    queries_per_group = call.heads.queries_per_group

    def forward() -> SavedResult:
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
            positions=positions,
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
            positions=positions,
        )
        return dx

    return apply_saving(forward, backward, qkv)


def rotate(ops: Backend, qkv: Tensor, call: Rotary, inverse: bool = False) -> Tensor:
    """Return qkv with its queries and keys rotated, or rotated back, without autograd."""
    if not ops.is_native("rowwise"):
        out = qkv.clone(memory_format=torch.contiguous_format)
        for part in call.heads.split(out)[:2]:
            part.copy_(_rotated(part, call, inverse))
        return out
    qkv = qkv.contiguous()
    out = torch.empty_like(qkv)
    angles, positions = _of_rows(call, qkv)
    ops.kernels.rotary(
        _heads(qkv, call),
        *angles,
        _heads(out, call),
        call.heads.queries_per_group,
        call.interleaved,
        inverse=inverse,
        positions=positions,
    )
    return out


def _of_rows(call: Rotary, qkv: Tensor) -> tuple[Angles, Tensor | None]:
    """Return the angles and positions that the kernels take for qkv."""
    if call.angles is None:
        empty = qkv.new_empty(2, len(qkv), 0, dtype=torch.float32)
        return (empty[0], empty[1]), None
    if call.positions is not None:
        return call.angles, call.positions
    cosines, sines = call.angles
    return (cosines[: len(qkv)], sines[: len(qkv)]), None


def _heads(qkv: Tensor, call: Rotary) -> Tensor:
    return qkv.view(*qkv.shape[:2], -1, call.heads.head_size)


def _torch_rotary_norm(qkv: Tensor, call: Rotary, norm: HeadNorms) -> Tensor:
    def formula(qkv: Tensor, q_weight: Tensor, k_weight: Tensor) -> Tensor:
        queries, keys, values = call.heads.split(qkv)
        queries = _rotated(torch_rms_norm(queries, q_weight, norm.epsilon), call)
        keys = _rotated(torch_rms_norm(keys, k_weight, norm.epsilon), call)
        each = (x.flatten(3) for x in (queries, keys, values))
        return torch.cat((*each,), 3).flatten(2)

    return by_autograd(formula, (qkv,), norm[:2])  # type: ignore[no-any-return]


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
