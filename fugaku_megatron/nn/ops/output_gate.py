"""Sigmoid gate on attention's output (Qiu et al. 2025, arXiv:2505.06708), computed next to the queries.

n heads of this rank in g query groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...comm.autograd import apply_conjugates
from ..attention.heads import Heads
from ..backward import by_autograd


def split_gate(projected: Tensor, heads: Heads) -> tuple[Tensor, Tensor]:
    """Return qkv as in `Heads` and gates (s, b, n d).

    projected: (s, b, g (2 n/g + 2) d), for each group queries, their gates, a key and a value
    """

    def forward(projected: Tensor) -> tuple[Tensor, Tensor]:
        each = heads.queries_per_group
        slots = projected.unflatten(-1, (heads.groups, -1, heads.head_size))
        queries, gates, others = slots.split((each, each, 2), dim=3)
        qkv = torch.cat((queries, others), 3).flatten(2)
        return qkv, gates.flatten(2).contiguous()

    def backward(dqkv: Tensor, dgates: Tensor) -> Tensor:
        dqueries, *others = heads.split(dqkv.contiguous())
        dgate = dgates.unflatten(-1, dqueries.shape[2:])
        return torch.cat((dqueries, dgate, *others), 3).flatten(2)

    return apply_conjugates(forward, backward, projected)


def gated(context: Tensor, gates: Tensor) -> Tensor:
    """Return context * sigmoid(gates), (s, b, n d), computed in FP32."""

    def formula(context: Tensor, gates: Tensor) -> Tensor:
        return (context * torch.sigmoid(gates.float())).to(context.dtype)

    return by_autograd(formula, (context, gates))  # type: ignore[no-any-return]
