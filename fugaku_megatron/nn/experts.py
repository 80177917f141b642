"""Mixture of experts in place of a layer's MLP: routed experts, and a shared expert for all tokens.

With expert parallelism (Lepikhin et al. 2020, "GShard", arXiv:2006.16668) rows are dispatched and combined (`comm.all_to_all`) in
groups of experts: one group is computed while rows of others are in flight.
f expert width of this rank, e experts, k per token, n pairs of token and expert.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..comm.all_to_all import AllToAll, GroupedAllToAll, copy_rows, sum_copied_rows
from ..comm.autograd import (
    Gradients,
    SavedResult,
    apply_conjugates,
    apply_saving,
    gather_sequence,
)
from ..comm.base import Comm
from ..config.model import ModelConfig
from ..costs.mlp import exchanged_groups
from .adapters import INPUTS, OUTPUTS, AdaptedExperts
from .blocks import MLP
from .forward_context import Pass
from .layers import Context, Layer, LinearLayer
from .ops import Ops
from .ops.activation import Activation
from .parameter import as_rows, gradient_of, is_frozen, row_groups
from .router import Router, small_linear


@dataclass(frozen=True)
class Order:
    """Pairs of tokens and experts, sorted by expert.

    ops: operations that permute rows.
    pairs: (n,), numbers row * k + place, ascending within an expert.
    counts: pairs of each expert.
    places: (rows, k), index in `pairs`, n if dropped.
    """

    ops: Ops
    pairs: Tensor
    counts: tuple[int, ...]
    places: Tensor

    @staticmethod
    def of(ops: Ops, chosen: Tensor, experts: int, keep: Tensor | None = None) -> Order:
        """Sort the pairs of experts chosen (rows, k). keep: False for dropped pairs."""
        counts, pairs, places = ops.sort_pairs(
            chosen if keep is None else chosen.masked_fill(~keep, experts), experts
        )
        return Order(ops, pairs, tuple(counts.tolist()), places)

    def dispatch(self, x: Tensor) -> Tensor:
        """Copy the row of each pair's token, (rows, h) -> (n, h)."""
        return self.ops.permute(x, self.pairs, self.places.shape[1])

    def combine(self, x: Tensor) -> Tensor:
        """Sum the rows of each token's pairs, (n, h) -> (rows, h)."""
        return self.ops.unpermute(x, self.places)


def kept(
    scores: Tensor,
    chosen: Tensor,
    model: ModelConfig,
    padding: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """Return which pairs (rows, k) fit the expert capacity, the mean number of pairs times a factor.

    Padding (s, b) has no pairs. With padding, --moe-token-drop-policy position ranks by positions (s, b) in the chat, then by score.
    """
    factor = model.moe_expert_capacity_factor
    experts = model.num_experts
    assert factor is not None and experts is not None, "called where experts have a capacity"
    k = chosen.shape[1]
    used = chosen.numel() if padding is None else k * int((~padding).sum())
    capacity = math.ceil(used / experts * factor)
    numbers = chosen.flatten()
    if padding is not None:
        numbers = chosen.masked_fill(padding.view(-1, 1), experts).flatten()
    ranking = scores.detach().flatten().argsort(descending=True, stable=True)
    if model.moe_token_drop_policy == "position":
        if padding is None or positions is None:
            ranking = torch.arange(len(numbers))
        else:
            ranking = ranking[positions.flatten()[ranking // k].argsort(stable=True)]
    ranked = ranking[numbers[ranking].argsort(stable=True)]  # by expert, best first
    starts = torch.bincount(numbers, minlength=experts + 1).cumsum(0).roll(1)
    starts[0] = 0
    result = torch.empty_like(numbers, dtype=torch.bool)
    result[ranked] = torch.arange(len(numbers)) - starts[numbers[ranked]] < capacity
    return (result & (numbers < experts)).view_as(chosen)


@dataclass(frozen=True)
class Route:
    """Route of one expert group.

    there: exchange with the ranks that have other experts.
    copies: exchange between ranks that share each expert; every rank gets all arriving rows.
    order: arrived rows by this rank's experts.
    """

    there: AllToAll
    copies: AllToAll
    order: Order

    @staticmethod
    def numbers(experts: int, groups: int, ranks: int) -> Tensor:
        """Return expert numbers (e,); each group over all ranks is consecutive."""
        return torch.arange(experts).view(groups, ranks, -1).transpose(0, 1).flatten()

    @staticmethod
    def of(
        ops: Ops, counts: tuple[int, ...], groups: int, ep: Comm, etp: Comm
    ) -> tuple[list[Route], list[int]]:
        """Build every expert group's route, and the order in which groups are processed. Collective over ep and etp.

        counts: pairs of each expert of the model, in the order of `numbers`.
        """
        own = len(counts) // ep.size
        each = own // groups
        everyone = ep.all_gather(
            torch.empty(ep.size, groups, ep.size, each, dtype=torch.int64), torch.tensor(counts)
        )
        to_here = everyone[:, :, ep.rank].contiguous()  # (ep, groups, each)
        coming = etp.all_gather(torch.empty(etp.size, *to_here.shape, dtype=torch.int64), to_here)
        experts = torch.arange(own).view(groups, each)
        routes = []
        for i, here in enumerate(to_here.unbind(1)):  # (ep, each)
            there = AllToAll(ep, everyone[ep.rank, i].sum(1).tolist(), here.sum(1).tolist())
            rows = int(here.sum())
            copies = AllToAll(
                etp, [rows for _ in range(etp.size)], coming[:, :, i].sum((1, 2)).tolist()
            )
            numbers = (
                experts[i].repeat(etp.size * ep.size).repeat_interleave(coming[:, :, i].flatten())
            )
            routes.append(Route(there, copies, Order.of(ops, numbers.unsqueeze(1), own)))
        if groups == 1:
            return routes, [0]
        most = everyone.sum((0, 3)).amax(1)  # rows of each group that come to a rank
        return routes, in_turn(etp.all_reduce(most).tolist())


def in_turn(rows: Sequence[int]) -> list[int]:
    """Order groups by row counts, small groups first and last, since nothing hides their first dispatch and last combine."""
    ascending = sorted(range(len(rows)), key=rows.__getitem__)
    return ascending[::2] + ascending[1::2][::-1]


class ExpertWeights(NamedTuple):
    """Matrices and biases of this rank's experts, and their activation.

    weight1, bias1: (e, f, h) and (e, f), or with a gate (e, 2, f, h) and (e, 2, f).
    weight2, bias2: (e, h, f) and (e, h).
    ranks: ranks that share an expert and sum their results; each adds 1 / ranks of bias2.
    """

    weight1: Tensor
    bias1: Tensor | None
    weight2: Tensor
    bias2: Tensor | None
    activation: Activation
    ranks: int

    @property
    def matrices(self) -> tuple[Tensor, Tensor, Activation]:
        return self.weight1, self.weight2, self.activation

    def add_first_bias(self, pre: Tensor, counts: Sequence[int]) -> None:
        """Add bias1 of each row's expert to pre (n, f or 2 f)."""
        if self.bias1 is None:
            return
        for number, rows in row_groups(counts):
            pre[rows] += self.bias1[number].detach().flatten()

    def add_second_bias(self, out: Tensor, counts: Sequence[int], factors: Tensor) -> None:
        """Add bias2 of each row's expert times factors (n,) to out (n, h)."""
        if self.bias2 is None:
            return
        shares = (factors / self.ranks).to(out.dtype)
        for number, rows in row_groups(counts):
            out[rows].addr_(shares[rows], self.bias2[number].detach())

    def add_first_bias_gradient(self, dpre: Tensor, counts: Sequence[int]) -> None:
        bias = self.bias1
        if bias is None or is_frozen(bias):
            return
        for number, rows in row_groups(counts):
            gradient = gradient_of(bias)[number]
            gradient += dpre[rows].float().sum(0).view_as(gradient)

    def second_bias_gradient(
        self, dout: Tensor, counts: Sequence[int], factors: Tensor
    ) -> Tensor | float:
        """Add the gradient of bias2, and return the gradient of factors (n,). dout: (n, h)"""
        bias = self.bias2
        if bias is None:
            return 0.0
        dfactors = torch.empty_like(factors)
        for number, rows in row_groups(counts):
            own = dout[rows].float() / self.ranks
            torch.mv(own, bias[number].detach().float(), out=dfactors[rows])
            if not is_frozen(bias):
                gradient_of(bias)[number] += factors[rows] @ own
        return dfactors


def _sum_of_experts(
    ops: Any,
    x: Tensor,
    scores: Tensor,
    order: Order,
    weights: ExpertWeights,
    needs_values: bool,
) -> Tensor:
    """Return the sum of score x expert: x (s, b, h), scores (rows, k) -> (rows, h).

    Scores multiply the second matmul's input.
    """
    counts = order.counts

    def forward() -> SavedResult:
        weight1, weight2, activation = weights.matrices
        rows = as_rows(x)
        factors = scores.detach().flatten()[order.pairs]  # (n,)
        inputs = order.dispatch(rows)
        pre = rows.new_empty(len(order.pairs), weight1[0, ..., 0].numel())
        ops.grouped_matmul(inputs, weight1, counts, pre)
        weights.add_first_bias(pre, counts)
        if not needs_values:
            return x.new_empty(1).expand(len(rows), weight2.shape[1]), (x, pre, factors)
        inner = ops.scaled_gate(pre, factors, activation)
        out = rows.new_empty(len(pre), weight2.shape[1])
        ops.grouped_matmul(inner, weight2, counts, out)
        weights.add_second_bias(out, counts, factors)
        return order.combine(out), (x, pre, factors)

    def backward(dy: Tensor, x: Tensor, pre: Tensor, factors: Tensor) -> Gradients:
        weight1, weight2, activation = weights.matrices
        dout = order.dispatch(as_rows(dy))  # (n, h)
        inner = pre.new_empty(len(pre), weight2.shape[2])
        dpre = torch.empty_like(pre)
        ops.grouped_data_gradient(dout, weight2, counts, inner)
        dscores = torch.zeros(order.places.numel())
        dscores[order.pairs] = ops.scaled_gate_gradient(
            inner, pre, factors, dpre, activation
        )  # inner then has its value
        ops.grouped_weight_gradient(dout, inner, weight2, counts)
        dscores[order.pairs] += weights.second_bias_gradient(dout, counts, factors)
        del dout, inner
        inputs = order.dispatch(as_rows(x).detach())
        dinputs = torch.empty_like(inputs)
        ops.grouped_weight_gradient(dpre, inputs, weight1, counts)
        weights.add_first_bias_gradient(dpre, counts)
        ops.grouped_data_gradient(dpre, weight1, counts, dinputs)
        dx = order.combine(dinputs).view_as(x)
        return dx, dscores.view_as(order.places)

    return apply_saving(forward, backward, x, scores)


class ExpertMatrices(nn.Module):
    """Matrices of every expert: (e, 2, f, h) with a gate or (e, f, h), and (e, h, f)."""

    def __init__(self, name: str, context: Context) -> None:
        super().__init__()
        model = context.model
        f = model.expert_width
        h = model.hidden_size
        first = (2, f) if model.gated else (f,)
        bias = not model.disable_bias_linear
        experts = (model.expert_count,)
        self.linear_fc1 = LinearLayer(
            f"{name}.linear_fc1", h, first, OUTPUTS, context, bias, experts
        )
        self.linear_fc2 = LinearLayer(f"{name}.linear_fc2", f, (h,), INPUTS, context, bias, experts)

    @property
    def adapts(self) -> bool:
        return self.linear_fc1.adapter is not None or self.linear_fc2.adapter is not None

    def ops(self, backend: Any) -> Any:
        if not self.adapts:
            return backend
        linears = self.linear_fc1, self.linear_fc2
        return AdaptedExperts(backend, {id(each.weight): each.adapter for each in linears})


class SharedExpert(Layer):
    """An MLP for every token, optionally scaled by a sigmoid gate per token."""

    def __init__(self, name: str, context: Context) -> None:
        super().__init__(context)
        model = context.model
        self.mlp = MLP(name, context, model.moe_shared_expert_intermediate_size)
        self.gate_weight = None
        if model.moe_shared_expert_gate:
            self.gate_weight = context.parameter(
                f"{name}.gate.weight", (1, model.hidden_size), std=model.init_method_std
            )

    def forward(self, x: Tensor, forward_pass: Pass) -> Tensor:
        """Apply the MLP, (s, b, h) -> (s, b, h), without overwriting x."""
        y: Tensor = self.mlp(x, replace(forward_pass, needs_values=True))
        if self.gate_weight is None:
            return y
        gate = torch.sigmoid(small_linear(self.ops, x, self.gate_weight))
        return y * gate.view(*x.shape[:2], 1).to(y.dtype)


class Experts(Layer):
    """Routed experts, k of e per token, h -> f -> h each, and the shared expert."""

    output_bias = None

    def __init__(self, name: str, context: Context) -> None:
        super().__init__(context)
        self.router = Router(f"{name}.router", context)
        self.experts = ExpertMatrices(f"{name}.experts", context)
        shared = context.model.moe_shared_expert_intermediate_size
        self.shared_experts = SharedExpert(f"{name}.shared_experts", context) if shared else None

    def forward(self, x: Tensor, forward_pass: Pass) -> Tensor:
        """Route, dispatch, compute and combine tokens, (s, b, h) -> (s, b, h)."""
        if self.experts.adapts and torch.is_grad_enabled() and not x.requires_grad:
            x = x.detach().requires_grad_()  # nothing below is trained: the graph begins here
        context = self.context
        scores, chosen = self.router(x, forward_pass)
        if context.expert_groups is not None:
            return self._exchanged(x, scores, chosen, forward_pass, *context.expert_groups)
        whole = context.whole_sequence(x)
        scores = context.whole_sequence(scores)
        chosen = gather_sequence(chosen, context.sequence)
        order = Order.of(
            self.ops,
            chosen,
            self.model.expert_count,
            self._kept(scores, chosen, forward_pass, None),
        )
        out = self._computed(whole, scores, order, forward_pass)
        out = context.out_of_matmul(out.view(whole.shape), forward_pass.needs_values)
        return out if self.shared_experts is None else out + self.shared_experts(x, forward_pass)

    def _kept(
        self, scores: Tensor, chosen: Tensor, forward_pass: Pass, sequence: Comm | None
    ) -> Tensor | None:
        """Return which pairs (rows, k) of this rank are neither padding nor dropped; None: all."""
        context = self.context
        documents = forward_pass.documents
        if context.model.moe_expert_capacity_factor is None:
            padding = context.own_rows(documents.padding, sequence)
            return None if padding is None else ~padding.unsqueeze(1).expand_as(chosen)
        has_room = partial(
            kept, model=context.model, padding=documents.padding, positions=documents.positions
        )
        return context.of_whole_sequence(has_room, scores, chosen, sequence=sequence)

    def _computed(self, x: Tensor, scores: Tensor, order: Order, forward_pass: Pass) -> Tensor:
        """Return the sum of score x expert (rows, h) for this rank's expert shard."""
        experts = self.experts
        context = self.context
        weights = ExpertWeights(
            experts.linear_fc1.weight,
            experts.linear_fc1.bias,
            experts.linear_fc2.weight,
            experts.linear_fc2.bias,
            Activation.of(context.model),
            context.run.etp,
        )
        ops = experts.ops(context.ops)
        return _sum_of_experts(ops, x, scores, order, weights, forward_pass.needs_values)

    def _exchanged(
        self, x: Tensor, scores: Tensor, chosen: Tensor, forward_pass: Pass, ep: Comm, etp: Comm
    ) -> Tensor:
        """Return `forward` with expert parallelism. Inside a node all rows are sent at once, by all threads."""
        far = ep.size > 1 and not ep.inside_node
        groups = exchanged_groups(self.model.expert_count // ep.size) if far else 1
        numbers = Route.numbers(self.model.expert_count, groups, ep.size)
        order = Order.of(
            self.ops,
            numbers[chosen],
            self.model.expert_count,
            self._kept(scores, chosen, forward_pass, self.context.sequence),
        )
        routes, turns = Route.of(self.ops, order.counts, groups, ep, etp)
        needs_values = forward_pass.needs_values
        there, back = (
            GroupedAllToAll([route.there for route in routes], overlaps, turns)
            for overlaps in (far or self.shared_experts is not None, far)
        )
        leaving = there.dispatch(
            apply_conjugates(order.dispatch, order.combine, as_rows(x)),
            scores.flatten()[order.pairs].unsqueeze(1),
        )
        # One segment is computed during dispatch, the other during combine.
        segments = x.tensor_split(2) if far and len(x) > 1 else (x,)
        shared = self._shared(segments[:1], forward_pass)
        returning = []
        for i in turns:
            copies = routes[i].copies
            rows, factors = (copy_rows(each, copies) for each in there.dispatched(i, leaving))
            computed = self._computed(rows, factors, routes[i].order, forward_pass)
            total = sum_copied_rows(computed, copies, needs_values)
            returning.append(back.combine(i, total, needs_values))
        shared += self._shared(segments[1:], forward_pass)
        out: Tensor = apply_conjugates(
            order.combine
            if needs_values
            else lambda rows: rows.new_empty(1).expand(len(scores), rows.shape[1]),
            order.dispatch,
            back.combined(returning),
        ).view_as(x)
        return out + torch.cat(shared) if shared else out

    def _shared(self, segments: Sequence[Tensor], forward_pass: Pass) -> list[Tensor]:
        if self.shared_experts is None:
            return []
        return [self.shared_experts(segment, forward_pass) for segment in segments]
