"""A layer's experts in place of its MLP: those that the router chooses for each token, and a shared one for all tokens.

Tokens are put in the order of their experts, so that each expert's matmuls read consecutive rows. Left out: the choice (`router`),
matmuls and gates, which are the backend's.
Legend: s sequence, b micro-batch, h hidden, f width of an expert of this rank, e experts, k of them for each token, n pairs of a
token and one of its experts, rows = s b.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..comm.autograd import copy_to_tensor_parallel, gather_from_sequence_parallel, gather_sequence
from ..config.model_config import MLPS
from ..config.run_config import ModelConfig
from .blocks import GatedMLP
from .layers import Context
from .passes import Pass
from .router import Router, SmallLinear
from .shared import as_rows

SWIGLU = MLPS["experts"].activation


@dataclass(frozen=True)
class Order:
    """Pairs of tokens and experts in the order of the experts. pairs (n,): numbers row * k + place, those of an expert ascending.

    counts: pairs of each expert. places (rows, k): of each pair in this order, n for one that its expert has dropped.
    """

    pairs: Tensor
    counts: tuple[int, ...]
    places: Tensor

    @staticmethod
    def of(chosen: Tensor, experts: int, keep: Tensor | None = None) -> Order:
        """That of experts chosen (rows, k). keep (rows, k): False for pairs that are dropped."""
        numbers = chosen.flatten() if keep is None else chosen.masked_fill(~keep, experts).flatten()
        counts = torch.bincount(numbers, minlength=experts)[:experts].tolist()
        pairs = numbers.argsort(stable=True)[: sum(counts)]
        places = torch.full_like(numbers, len(pairs))
        places[pairs] = torch.arange(len(pairs))
        return Order(pairs, tuple(counts), places.view_as(chosen))

    @property
    def tokens(self) -> Tensor:
        """The row of each pair's token, (n,)."""
        return self.pairs // self.places.shape[1]

    def summed(self, x: Tensor) -> Tensor:
        """The sum of each token's pairs (rows, h), from x (n, h)."""
        if not len(x):
            return x.new_zeros(len(self.places), x.shape[1])
        dropped = len(x) < self.places.numel()
        table = torch.cat((x, x.new_zeros(1, x.shape[1]))) if dropped else x
        return F.embedding_bag(self.places, table, mode="sum")


def kept(scores: Tensor, chosen: Tensor, model: ModelConfig) -> Tensor | None:
    """Which pairs (rows, k) their experts have room for, None for all: capacity is the mean number of pairs times its factor."""
    factor, experts = model.moe_expert_capacity_factor, model.num_experts
    if factor is None or experts is None:
        return None
    capacity = math.ceil(chosen.numel() / experts * factor)
    numbers = chosen.flatten()
    ranking = scores.detach().flatten().argsort(descending=True, stable=True)
    if model.moe_token_drop_policy == "position":
        ranking = torch.arange(len(numbers))
    ranked = ranking[numbers[ranking].argsort(stable=True)]  # the pairs of an expert one after another, the best ones first
    starts = torch.bincount(numbers, minlength=experts).cumsum(0).roll(1)
    starts[0] = 0
    result = torch.empty_like(numbers, dtype=torch.bool)
    result[ranked] = torch.arange(len(numbers)) - starts[numbers[ranked]] < capacity
    return result.view_as(chosen)


class _Experts(torch.autograd.Function):
    """x (s, b, h), scores (rows, k), weight1 (e, 2, f, h), weight2 (e, h, f) -> (rows, h): the sum of score times expert.

    The scores multiply what the second matmul reads, which is narrower than what it writes, so that none of that is kept.
    """

    @staticmethod
    def forward(ctx: Any, ops: Any, x: Tensor, scores: Tensor, order: Order, weight1: Tensor, weight2: Tensor,
                needs_values: bool) -> Tensor:
        rows, chunk, factors = as_rows(x), ops.chunk(x), scores.detach().flatten()[order.pairs].unsqueeze(1)  # (n, 1)
        inputs, pre = rows[order.tokens], rows.new_empty(len(order.pairs), 2 * weight1.shape[2])
        ops.grouped_matmul(inputs, weight1, order.counts, pre, chunk)
        ctx.save_for_backward(x, pre, factors)
        ctx.ops, ctx.order, ctx.weights = ops, order, (weight1, weight2)
        if not needs_values:
            return x.new_empty(1).expand(len(rows), weight2.shape[1])
        inner, out = _times(ops.gate(pre, SWIGLU), factors), rows.new_empty(len(pre), weight2.shape[1])
        ops.grouped_matmul(inner, weight2, order.counts, out, chunk)
        return order.summed(out)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, pre, factors), (weight1, weight2), ops, order = ctx.saved_tensors, ctx.weights, ctx.ops, ctx.order
        dout, values, chunk = as_rows(dy)[order.tokens], ops.gate(pre, SWIGLU), ops.chunk(dy)  # (n, h), (n, f)
        dinner, inner = torch.empty_like(values), _times(values, factors)
        ops.grouped_weight_gradient(dout, inner, weight2, order.counts, chunk)
        ops.grouped_data_gradient(dout, weight2, order.counts, dinner, chunk)
        dscores = torch.zeros(order.places.numel())
        dscores[order.pairs] = (dinner.float() * values.float()).sum(-1)
        dpre, inputs = torch.empty_like(pre), as_rows(x).detach()[order.tokens]
        ops.gate_gradient(_times(dinner, factors), pre, dpre, SWIGLU)
        dinputs = torch.empty_like(inputs)
        ops.grouped_weight_gradient(dpre, inputs, weight1, order.counts, chunk)
        ops.grouped_data_gradient(dpre, weight1, order.counts, dinputs, chunk)
        return None, order.summed(dinputs).view_as(x), dscores.view_as(order.places), None, None, None, None


def _times(x: Tensor, factors: Tensor) -> Tensor:
    """x (n, f) times factors (n, 1) in FP32, rounded to x's dtype."""
    return (x * factors).to(x.dtype)


class ExpertMatrices(nn.Module):
    """The two matrices of every expert: (e, 2, f, h), the gate's and that of what it multiplies, and (e, h, f)."""

    def __init__(self, name: str, context: Context) -> None:
        super().__init__()
        model = context.model
        e, f, h = model.num_experts or 0, model.moe_ffn_hidden_size or 0, model.hidden_size
        self.linear_fc1, self.linear_fc2 = nn.Module(), nn.Module()
        self.linear_fc1.weight = context.parameter(f"{name}.linear_fc1.weight", (e, 2, f, h), 2, model.init_method_std)
        self.linear_fc2.weight = context.parameter(f"{name}.linear_fc2.weight", (e, h, f), 2, context.output_std)


class SharedExpert(nn.Module):
    """An MLP that every token goes through, times the sigmoid of a number for each token where the model has this gate."""

    def __init__(self, name: str, context: Context) -> None:
        super().__init__()
        model, self.context = context.model, context
        self.mlp = GatedMLP(name, context, model.moe_shared_expert_intermediate_size)
        self.gate_weight = None
        if model.moe_shared_expert_gate:
            self.gate_weight = context.parameter(f"{name}.gate.weight", (1, model.hidden_size), std=model.init_method_std)

    def forward(self, x: Tensor, forward_pass: Pass) -> Tensor:
        """x (s, b, h) -> (s, b, h). x is read by others, so that its values are needed."""
        y = self.mlp(x, replace(forward_pass, needs_values=True))
        if self.gate_weight is None:
            return y
        share = torch.sigmoid(SmallLinear.apply(self.context.ops, x, self.gate_weight)).view(*x.shape[:2], 1)
        return y * share.to(y.dtype)


class Experts(nn.Module):
    """In place of a layer's MLP: h -> k of e experts, h -> f -> h with SwiGLU each -> h, and the shared expert if there is one."""

    output_bias = None

    def __init__(self, name: str, context: Context) -> None:
        super().__init__()
        self.context = context
        self.router, self.experts = Router(f"{name}.router", context), ExpertMatrices(f"{name}.experts", context)
        shared = context.model.moe_shared_expert_intermediate_size
        self.shared_experts = SharedExpert(f"{name}.shared_experts", context) if shared else None

    def forward(self, x: Tensor, forward_pass: Pass) -> Tensor:
        """x (s, b, h) -> (s, b, h); its values may be anything where `forward_pass` needs none."""
        context, model = self.context, self.context.model
        scores, chosen = self.router(x, forward_pass)
        whole, scores, chosen = self._whole(x, scores, chosen)
        keep = None if forward_pass.rows is not None else kept(scores, chosen, model)
        order = Order.of(chosen, model.num_experts or 0, keep)
        out = _Experts.apply(context.ops.backends["gemm"], whole, scores, order, self.experts.linear_fc1.weight,
                             self.experts.linear_fc2.weight, forward_pass.needs_values)
        out = context.out_of_matmul(out.view(whole.shape), forward_pass.needs_values)
        return out if self.shared_experts is None else out + self.shared_experts(x, forward_pass)

    def _whole(self, x: Tensor, scores: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same of the whole sequence, whose gradients are summed over tensor-parallel ranks: each has a part of f."""
        context = self.context
        if context.sequence is None:
            return copy_to_tensor_parallel(x, context.tp), copy_to_tensor_parallel(scores, context.tp), chosen
        whole, every = (gather_from_sequence_parallel(tensor, context.tp) for tensor in (x, scores))
        return whole, every, gather_sequence(chosen, context.sequence)
