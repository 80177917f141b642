"""A layer's experts in place of its MLP: those that the router chooses for each token, and a shared one for all tokens.

Tokens are put in the order of their experts, so that each expert's matmuls read consecutive rows. Left out: the choice (`router`),
matmuls and gates, which are the backend's. Where ranks have different experts (expert parallelism, Lepikhin et al. 2020, "GShard",
arXiv:2006.16668), rows are sent to the ranks of their experts and back (`comm.exchange`), a group of each rank's experts after
another, so that one is computed while rows of others are on their way.
Legend: s sequence, b micro-batch, h hidden, f width of an expert of this rank, e experts, k of them for each token, n pairs of a
token and one of its experts, rows = s b.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.autograd import copy_to_tensor_parallel, gather_from_sequence_parallel, gather_sequence
from ..comm.base import Comm
from ..comm.exchange import Exchange, GroupedExchange, copy_rows, map_rows, sum_copied_rows
from ..config.run_config import ModelConfig
from ..costs.experts import exchanged_groups
from .adapters import AdaptedExperts
from .blocks import MLP
from .forward_context import Pass
from .gradients import as_rows
from .layers import Context
from .router import Router, SmallLinear


@dataclass(frozen=True)
class Order:
    """Pairs of tokens and experts in the order of the experts. pairs (n,): numbers row * k + place, those of an expert ascending.

    ops: the backend that moves rows. counts: pairs of each expert. places (rows, k): of each pair in this order, n for one that its
    expert has dropped.
    """

    ops: Any
    pairs: Tensor
    counts: tuple[int, ...]
    places: Tensor

    @staticmethod
    def of(ops: Any, chosen: Tensor, experts: int, keep: Tensor | None = None) -> Order:
        """Sort the pairs of experts chosen (rows, k). keep (rows, k): False for dropped pairs."""
        counts, pairs, places = ops.sort_pairs(
            chosen if keep is None else chosen.masked_fill(~keep, experts), experts
        )
        return Order(ops, pairs, tuple(counts.tolist()), places)

    def dispatch(self, x: Tensor) -> Tensor:
        """Copy the row of each pair's token. x (rows, h) -> (n, h)."""
        return self.ops.permute(x, self.pairs, self.places.shape[1])

    def combine(self, x: Tensor) -> Tensor:
        """Sum the rows of each token's pairs. x (n, h) -> (rows, h)."""
        return self.ops.unpermute(x, self.places)


def kept(
    scores: Tensor,
    chosen: Tensor,
    model: ModelConfig,
    padding: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """Return which pairs (rows, k) fit their expert's capacity, the mean number of pairs times a factor.

    Padding (s, b) has no pairs. With it --moe-token-drop-policy position means the position in the chat, positions (s, b), and then
    the score, so that the choice does not depend on which chats share a sample.
    """
    factor, experts = model.moe_expert_capacity_factor, model.num_experts
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
    ranked = ranking[
        numbers[ranking].argsort(stable=True)
    ]  # the pairs of an expert one after another, the best ones first
    starts = torch.bincount(numbers, minlength=experts + 1).cumsum(0).roll(1)
    starts[0] = 0
    result = torch.empty_like(numbers, dtype=torch.bool)
    result[ranked] = torch.arange(len(numbers)) - starts[numbers[ranked]] < capacity
    return (result & (numbers < experts)).view_as(chosen)


@dataclass(frozen=True)
class Route:
    """Route of one expert group: the ranks that compute this rank's pairs, and the pairs that arrive for its own experts.

    there: exchange with the ranks that have other experts.
    copies: exchange between ranks that share each expert; every rank gets the rows that arrive at any.
    order: order of the arrived rows by this rank's experts.
    """

    there: Exchange
    copies: Exchange
    order: Order

    @staticmethod
    def numbers(experts: int, groups: int, ranks: int) -> Tensor:
        """Return numbers of the experts (e,) with each group of all ranks consecutive."""
        return torch.arange(experts).view(groups, ranks, -1).transpose(0, 1).flatten()

    @staticmethod
    def of(
        ops: Any, counts: tuple[int, ...], groups: int, ep: Comm, etp: Comm
    ) -> tuple[list[Route], list[int]]:
        """Build the route of every expert group, and the order in which groups are processed.

        counts: pairs of each expert of the model, in the order of `numbers`.
        Collective over ep and etp.
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
            there = Exchange(ep, everyone[ep.rank, i].sum(1).tolist(), here.sum(1).tolist())
            copies = Exchange(
                etp, [int(here.sum())] * etp.size, coming[:, :, i].sum((1, 2)).tolist()
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
    """Return the order of groups with so many rows each, with small groups first and last.

    Nothing hides the first dispatch and the last combine; large groups are in flight while others are computed.
    """
    ascending = sorted(range(len(rows)), key=rows.__getitem__)
    return ascending[::2] + ascending[1::2][::-1]


class _Experts(torch.autograd.Function):
    """x (s, b, h), scores (rows, k), weight1 (e, 2, f, h) or (e, f, h), weight2 (e, h, f) -> (rows, h), the sum of score x expert.

    activation: a row of `config.model.ACTIVATIONS`; weight1 has two matrices of an expert where it has a gate.

    The scores multiply what the second matmul reads, which is narrower than what it writes, so that none of that is kept. They and
    the activation are one pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        ops: Any,
        activation: str,
        x: Tensor,
        scores: Tensor,
        order: Order,
        weight1: Tensor,
        weight2: Tensor,
        needs_values: bool,
    ) -> Tensor:
        rows = as_rows(x)
        factors = scores.detach().flatten()[order.pairs]  # (n,)
        inputs = order.dispatch(rows)
        pre = rows.new_empty(len(order.pairs), weight1[0, ..., 0].numel())
        ops.grouped_matmul(inputs, weight1, order.counts, pre)
        ctx.save_for_backward(x, pre, factors)
        ctx.ops = ops
        ctx.activation = activation
        ctx.order = order
        ctx.weights = (weight1, weight2)
        if not needs_values:
            return x.new_empty(1).expand(len(rows), weight2.shape[1])
        inner = ops.scaled_gate(pre, factors, activation)
        out = rows.new_empty(len(pre), weight2.shape[1])
        ops.grouped_matmul(inner, weight2, order.counts, out)
        return order.combine(out)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, pre, factors = ctx.saved_tensors
        weight1, weight2 = ctx.weights
        ops = ctx.ops
        order = ctx.order
        dout = order.dispatch(as_rows(dy))  # (n, h)
        inner = pre.new_empty(len(pre), weight2.shape[2])
        dpre = torch.empty_like(pre)
        ops.grouped_data_gradient(dout, weight2, order.counts, inner)
        dscores = torch.zeros(order.places.numel())
        dscores[order.pairs] = ops.scaled_gate_gradient(
            inner, pre, factors, dpre, ctx.activation
        )  # inner then has its value
        ops.grouped_weight_gradient(dout, inner, weight2, order.counts)
        del dout, inner
        inputs = order.dispatch(as_rows(x).detach())
        dinputs = torch.empty_like(inputs)
        ops.grouped_weight_gradient(dpre, inputs, weight1, order.counts)
        ops.grouped_data_gradient(dpre, weight1, order.counts, dinputs)
        return (
            None,
            None,
            order.combine(dinputs).view_as(x),
            dscores.view_as(order.places),
            None,
            None,
            None,
            None,
        )


class ExpertLinear(nn.Module):
    """One matrix of every expert, (e, *outputs, inputs), and their adapters. split: ranks that share an expert have parts of its
    inputs, else of the last of `outputs`."""

    def __init__(
        self,
        name: str,
        outputs: tuple[int, ...],
        inputs: int,
        split: bool,
        std: float,
        context: Context,
    ) -> None:
        super().__init__()
        experts = (context.model.num_experts or 0,)
        self.weight = context.expert_parameter(
            f"{name}.weight", (*experts, *outputs, inputs), len(outputs) + split, std
        )
        self.adapter = context.adapter(name, inputs, outputs, split, experts)


class ExpertMatrices(nn.Module):
    """The matrices of every expert: (e, 2, f, h), the gate's and that of what it multiplies, or (e, f, h), and (e, h, f)."""

    def __init__(self, name: str, context: Context) -> None:
        super().__init__()
        model = context.model
        f, h = model.moe_ffn_hidden_size or 0, model.hidden_size
        first = (2, f) if model.gated else (f,)
        self.linear_fc1 = ExpertLinear(
            f"{name}.linear_fc1", first, h, False, model.init_method_std, context
        )
        self.linear_fc2 = ExpertLinear(
            f"{name}.linear_fc2", (h,), f, True, context.output_std, context
        )

    @property
    def adapts(self) -> bool:
        """True if any matrix has adapters."""
        return self.linear_fc1.adapter is not None or self.linear_fc2.adapter is not None

    def ops(self, backend: Any) -> Any:
        """Return the operations for these matrices, with their adapters."""
        linears = self.linear_fc1, self.linear_fc2
        return (
            AdaptedExperts(backend, {id(each.weight): each.adapter for each in linears})
            if self.adapts
            else backend
        )


class SharedExpert(nn.Module):
    """An MLP that every token goes through, times the sigmoid of a number for each token where the model has this gate."""

    def __init__(self, name: str, context: Context) -> None:
        super().__init__()
        model, self.context = context.model, context
        self.mlp = MLP(name, context, model.moe_shared_expert_intermediate_size)
        self.gate_weight = None
        if model.moe_shared_expert_gate:
            self.gate_weight = context.parameter(
                f"{name}.gate.weight", (1, model.hidden_size), std=model.init_method_std
            )

    def forward(self, x: Tensor, forward_pass: Pass) -> Tensor:
        """Return the shared expert (s, b, h) of x (s, b, h). Others read x, so that its values are kept."""
        y = self.mlp(x, replace(forward_pass, needs_values=True))
        if self.gate_weight is None:
            return y
        share = torch.sigmoid(SmallLinear.apply(self.context.ops, x, self.gate_weight)).view(
            *x.shape[:2], 1
        )
        return y * share.to(y.dtype)


class Experts(nn.Module):
    """In place of a layer's MLP: h -> k of e experts, h -> f -> h each -> h, and the shared expert if there is one."""

    output_bias = None

    def __init__(self, name: str, context: Context) -> None:
        super().__init__()
        self.context = context
        self.router, self.experts = (
            Router(f"{name}.router", context),
            ExpertMatrices(f"{name}.experts", context),
        )
        shared = context.model.moe_shared_expert_intermediate_size
        self.shared_experts = SharedExpert(f"{name}.shared_experts", context) if shared else None

    def forward(self, x: Tensor, forward_pass: Pass) -> Tensor:
        """Return the experts' output (s, b, h) for x (s, b, h)."""
        if self.experts.adapts and torch.is_grad_enabled() and not x.requires_grad:
            x = (
                x.detach().requires_grad_()
            )  # nothing below is trained: the graph of what is trained begins here
        context, (scores, chosen) = self.context, self.router(x, forward_pass)
        if context.ep is not None and context.etp is not None:
            return self._exchanged(x, scores, chosen, forward_pass, context.ep, context.etp)
        whole, scores, chosen = self._whole(x, scores, chosen)
        order = Order.of(
            self.context.ops, chosen, self._experts, self._kept(scores, chosen, forward_pass, None)
        )
        out = self._computed(whole, scores, order, forward_pass)
        out = context.out_of_matmul(out.view(whole.shape), forward_pass.needs_values)
        return out if self.shared_experts is None else out + self.shared_experts(x, forward_pass)

    @property
    def _experts(self) -> int:
        return self.context.model.num_experts or 0

    def _kept(
        self, scores: Tensor, chosen: Tensor, forward_pass: Pass, part: Comm | None
    ) -> Tensor | None:
        """Return which pairs of these scores and choices (rows, k) are computed: none of padding, and what `kept` says of the
        whole sequence. None: all.

        part: tensor-parallel ranks that have other rows of it, None where there are none.
        """
        context, documents = self.context, forward_pass.documents
        if context.model.moe_expert_capacity_factor is None:
            padding = context.own_rows(documents.padding, part)
            return None if padding is None else ~padding.unsqueeze(1).expand_as(chosen)
        has_room = partial(
            kept, model=context.model, padding=documents.padding, positions=documents.positions
        )
        return context.of_whole_sequence(has_room, scores, chosen, part=part)

    def _computed(self, x: Tensor, scores: Tensor, order: Order, forward_pass: Pass) -> Tensor:
        """Return the sum of score times expert (rows, h) of x (..., h), for this rank's shard of its experts."""
        return _Experts.apply(
            self.experts.ops(self.context.ops),
            self.context.model.activation,
            x,
            scores,
            order,
            self.experts.linear_fc1.weight,
            self.experts.linear_fc2.weight,
            forward_pass.needs_values,
        )

    def _exchanged(
        self, x: Tensor, scores: Tensor, chosen: Tensor, forward_pass: Pass, ep: Comm, etp: Comm
    ) -> Tensor:
        """Return `forward` with expert parallelism: rows are in flight while other experts and the shared one are computed.

        Inside a node all rows are sent at once, by all threads of the ranks.
        """
        far = ep.size > 1 and not ep.inside_node
        groups = exchanged_groups(self._experts // ep.size) if far else 1
        numbers = Route.numbers(self._experts, groups, ep.size)
        order = Order.of(
            self.context.ops,
            numbers[chosen],
            self._experts,
            self._kept(scores, chosen, forward_pass, self.context.sequence),
        )
        (routes, turns), needs_values = (
            Route.of(self.context.ops, order.counts, groups, ep, etp),
            forward_pass.needs_values,
        )
        there, back = (
            GroupedExchange([route.there for route in routes], overlaps, turns)
            for overlaps in (far or self.shared_experts is not None, far)
        )
        leaving = there.dispatch(
            map_rows(as_rows(x), order.dispatch, order.combine),
            scores.flatten()[order.pairs].unsqueeze(1),
        )
        parts = (
            x.tensor_split(2) if far and len(x) > 1 else (x,)
        )  # for the way there and the way back
        shared = self._shared(parts[:1], forward_pass)
        returning = []
        for i in turns:
            copies = routes[i].copies
            rows, factors = (copy_rows(each, copies) for each in there.dispatched(i, leaving))
            part = sum_copied_rows(
                self._computed(rows, factors, routes[i].order, forward_pass), copies, needs_values
            )
            returning.append(back.combine(i, part, needs_values))
        shared += self._shared(parts[1:], forward_pass)
        out = map_rows(
            back.combined(returning),
            order.combine
            if needs_values
            else lambda rows: rows.new_empty(1).expand(len(scores), rows.shape[1]),
            order.dispatch,
        ).view_as(x)
        return out + torch.cat(shared) if shared else out

    def _shared(self, parts: Sequence[Tensor], forward_pass: Pass) -> list[Tensor]:
        """Return the shared expert, if there is one, of segments of the sequence (s, b, h)."""
        return (
            []
            if self.shared_experts is None
            else [self.shared_experts(part, forward_pass) for part in parts]
        )

    def _whole(self, x: Tensor, scores: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gather the whole sequence. Gradients are summed over tensor-parallel ranks, which shard f."""
        context = self.context
        if context.sequence is None:
            return (
                copy_to_tensor_parallel(x, context.tp),
                copy_to_tensor_parallel(scores, context.tp),
                chosen,
            )
        whole, every = (gather_from_sequence_parallel(tensor, context.tp) for tensor in (x, scores))
        return whole, every, gather_sequence(chosen, context.sequence)
