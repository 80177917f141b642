"""The operations of a layer's experts: the choice of experts, rows in their order and back, matmuls of groups, gates.

`ExpertOps` has them in torch, readable, for both backends; `NativeExpertOps` replaces those for which there is a C++ kernel, one
crossing into C++ for a fused operation. Left out of it: matmuls of as few rows as generation has. Left out of both: balancing
losses and an even choice (`router`), where rows are computed (`experts`), and the matmuls of one group, which are the backend's.
Legend: h hidden, f width of an expert, e experts, k of them for each token, n pairs of a token and one of its experts, with
numbers row * k + place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..config.experts import SIGMOID
from ..config.run_config import ModelConfig
from .deferred_gradients import WeightGradients
from .gradients import gradient_of, is_frozen, parts
from .native_blocks import GATES, as_gates
from .packed_weights import WeightCache
from .torch_blocks import part_of

NORMALIZER = 1e-20  # added to the sum of sigmoid scores, as in Megatron-LM


class ExpertOps:
    """These operations, for a backend with matmuls and gates, and no kernels of its own for them."""

    matmul: Callable[..., None]
    data_gradient: Callable[..., None]
    weight_gradient: Callable[..., None]
    outer_sum: Callable[..., Tensor]
    gate: Callable[..., Tensor]
    gate_gradient: Callable[..., None]

    def route(
        self, logits: Tensor, bias: Tensor | None, model: ModelConfig
    ) -> tuple[Tensor, Tensor]:
        """(scores, numbers) of each token's experts, two of (rows, k), from FP32 logits (rows, e) and the bias (e,) of the choice.

        The best one comes first, and of equal ones that with the lower number. Where neither groups nor a bias take part, the
        choice is by logits, with which scores grow. Autograd knows the scores.
        """
        return route(logits, bias, model)

    def order(self, chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
        """Pairs in the order of their experts chosen (rows, k), those of an expert ascending; expert e stands for a dropped pair.

        (counts (e,) of each expert, numbers (n,) of pairs, places (rows, k) of each pair in this order, n of a dropped one).
        """
        numbers = chosen.flatten()
        counts = torch.bincount(numbers, minlength=experts)[:experts]
        pairs = numbers.argsort(stable=True)[: int(counts.sum())]
        places = torch.full_like(numbers, len(pairs))
        places[pairs] = torch.arange(len(pairs))
        return counts, pairs, places.view_as(chosen)

    def permute(self, x: Tensor, pairs: Tensor, k: int) -> Tensor:
        """The row of each pair's token (n, h), from x (rows, h)."""
        return x[pairs // k]

    def unpermute(self, x: Tensor, places: Tensor) -> Tensor:
        """The sum of each token's pairs (rows, h), from x (n, h)."""
        if not len(x):
            return x.new_zeros(len(places), x.shape[1])
        table = torch.cat((x, x.new_zeros(1, x.shape[1]))) if len(x) < places.numel() else x
        return F.embedding_bag(places, table, mode="sum")

    def scaled_gate(self, pre: Tensor, factors: Tensor, activation: str) -> Tensor:
        """`gate` of pre (n, 2 f), or (n, f) without a gate, times factors (n,) -> (n, f)."""
        return _times(self.gate(pre, activation), factors)

    def scaled_gate_gradient(
        self, dinner: Tensor, pre: Tensor, factors: Tensor, dpre: Tensor, activation: str
    ) -> Tensor:
        """From the gradient dinner (n, f) of `scaled_gate`: dpre, that of pre, and the result, the gradient of factors (n,).

        Leaves the value of `scaled_gate` in dinner's memory.
        """
        values = self.gate(pre, activation)
        dfactors = (dinner.float() * values.float()).sum(-1)
        self.gate_gradient(_times(dinner, factors), pre, dpre, activation)
        dinner.copy_(_times(values, factors))
        return dfactors

    def grouped_matmul(
        self, x: Tensor, weight: Tensor, counts: Sequence[int], out: Tensor, chunk: int = 0
    ) -> None:
        """out (n, out) = x (n, in) times the transposed weight of each row's group, weight (groups, ..., in).

        The first counts[0] rows are in group 0, those after them in group 1; a group may have none.
        """
        for number, part in parts(counts):
            self.matmul(x[part], part_of(weight, number), out[part], chunk=chunk)

    def grouped_data_gradient(
        self, dy: Tensor, weight: Tensor, counts: Sequence[int], dx: Tensor, chunk: int = 0
    ) -> None:
        """dx (n, in) = dy (n, out) times the weight of each row's group, weight (groups, ..., in)."""
        for number, part in parts(counts):
            self.data_gradient(dy[part], part_of(weight, number), dx[part], chunk)

    def grouped_weight_gradient(
        self, dy: Tensor, x: Tensor, weight: Tensor, counts: Sequence[int], chunk: int = 0
    ) -> None:
        """Add dy^T x of each group's rows to the gradient of its weight, now or later; dy (n, out), x (n, in) stay until then."""
        for number, part in parts(counts):
            self.weight_gradient(dy[part], x[part], part_of(weight, number), None, chunk)

    def grouped_outer_sum(self, dy: Tensor, x: Tensor, counts: Sequence[int]) -> Tensor:
        """dy^T x in FP32 of each group's rows, dy (n, out) and x (n, in) -> (groups, out, in)."""
        total = torch.zeros(len(counts), dy.shape[1], x.shape[1])
        for number, part in parts(counts):
            total[number] = self.outer_sum(dy[part], x[part])
        return total


def best(x: Tensor, count: int) -> Tensor:
    """Numbers (rows, count) of the largest in each row of x (rows, n); of equal ones the first, and NaN counts as infinity."""
    whole = torch.nan_to_num(x, math.inf, math.inf, -math.inf)
    return whole.argsort(dim=-1, descending=True, stable=True)[:, :count]


def chosen_by(wish: Tensor, model: ModelConfig) -> Tensor:
    """Numbers (rows, k) of the best of wish (rows, e). With groups, of those in the best groups by the sum of the best in each."""
    k, groups, chosen = (
        model.moe_router_topk,
        model.moe_router_num_groups,
        model.moe_router_group_topk,
    )
    if groups and chosen:
        grouped = wish.view(len(wish), groups, -1)
        totals = grouped.sort(-1, descending=True).values[..., : k // chosen].sum(-1)
        open_groups = torch.zeros(len(wish), groups, dtype=torch.bool).scatter_(
            1, best(totals, chosen), True
        )
        wish = wish.masked_fill(~open_groups.repeat_interleave(grouped.shape[2], 1), -math.inf)
    return best(wish, k)


def kind_of_scores(model: ModelConfig) -> str:
    """Which scores a token's experts get: "sigmoid", "softmax" over all experts, or "softmax_of_chosen"."""
    if model.moe_router_score_function == SIGMOID:
        return "sigmoid"
    return "softmax" if model.moe_router_pre_softmax else "softmax_of_chosen"


def route(logits: Tensor, bias: Tensor | None, model: ModelConfig) -> tuple[Tensor, Tensor]:
    """`ExpertOps.route`: logits (rows, e), bias (e,) -> two of (rows, k)."""
    kind = kind_of_scores(model)
    scores = (
        torch.sigmoid(logits)
        if kind == "sigmoid"
        else torch.softmax(logits, -1)
        if kind == "softmax"
        else logits
    )
    wish = scores if model.moe_router_num_groups or bias is not None else logits
    chosen = chosen_by(wish.detach() if bias is None else wish.detach() + bias.float(), model)
    own = scores.gather(1, chosen)
    if kind == "sigmoid" and model.moe_router_topk > 1:
        own = own / (own.sum(-1, keepdim=True) + NORMALIZER)
    elif kind == "softmax_of_chosen":
        own = torch.softmax(own, -1)
    return own * (model.moe_router_topk_scaling_factor or 1.0), chosen


def _times(x: Tensor, factors: Tensor) -> Tensor:
    """x (n, f) times factors (n,) in FP32, rounded to x's dtype."""
    return (x * factors.unsqueeze(1)).to(x.dtype)


# C++ kernels ---------------------------------------------------------------------------------------------------------------------


class NativeExpertOps(ExpertOps):
    """These operations, for a backend with `kernels` and matmuls."""

    kernels: Any
    weight_cache: WeightCache | None
    weight_gradients: WeightGradients
    few_rows: int

    def route(
        self, logits: Tensor, bias: Tensor | None, model: ModelConfig
    ) -> tuple[Tensor, Tensor]:
        """logits (rows, e), bias (e,) -> two of (rows, k)."""
        return _Route.apply(
            self.kernels, logits, None if bias is None else bias.detach().float(), model
        )

    def order(self, chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
        """chosen (rows, k) -> (e,), (n,), (rows, k)."""
        counts, pairs, places = (
            chosen.new_empty(experts),
            chosen.new_empty(chosen.numel()),
            torch.empty_like(chosen),
        )
        self.kernels.sort_pairs(chosen, counts, pairs, places)
        return counts, pairs[: int(counts.sum())], places

    def permute(self, x: Tensor, pairs: Tensor, k: int) -> Tensor:
        """x (rows, h), pairs (n,) -> (n, h)."""
        out = x.new_empty(len(pairs), x.shape[1])
        self.kernels.permute(x.contiguous(), pairs, out, k)
        return out

    def unpermute(self, x: Tensor, places: Tensor) -> Tensor:
        """x (n, h), places (rows, k) -> (rows, h)."""
        out = x.new_empty(len(places), x.shape[1])
        self.kernels.unpermute(x.contiguous(), places, out)
        return out

    def scaled_gate(self, pre: Tensor, factors: Tensor, activation: str) -> Tensor:
        """pre (n, 2 f), or (n, f) without a gate, factors (n,) -> (n, f)."""
        if activation not in GATES:
            return super().scaled_gate(pre, factors, activation)
        inner = pre.new_empty(len(pre), pre.shape[1] // 2)
        self.kernels.scaled_gate(as_gates(pre), factors, inner, GATES[activation])
        return inner

    def scaled_gate_gradient(
        self, dinner: Tensor, pre: Tensor, factors: Tensor, dpre: Tensor, activation: str
    ) -> Tensor:
        """dinner (n, f), pre and dpre (n, 2 f), or (n, f) without a gate, factors (n,) -> (n,)."""
        if activation not in GATES:
            return super().scaled_gate_gradient(dinner, pre, factors, dpre, activation)
        dfactors = torch.empty_like(factors)
        self.kernels.scaled_gate_backward(
            dinner, as_gates(pre), factors, as_gates(dpre), dfactors, dinner, GATES[activation]
        )
        return dfactors

    def grouped_matmul(
        self, x: Tensor, weight: Tensor, counts: Sequence[int], out: Tensor, chunk: int = 0
    ) -> None:
        """out (n, out) = x (n, in) times the transposed weight of each row's group; a matmul each where rows are few."""
        if self.weight_cache is not None or len(x) <= self.few_rows:
            return super().grouped_matmul(x, weight, counts, out, chunk)
        self.kernels.grouped_linear_forward(
            x, weight.detach().flatten(1, -2), torch.tensor(counts), out, chunk
        )

    def grouped_data_gradient(
        self, dy: Tensor, weight: Tensor, counts: Sequence[int], dx: Tensor, chunk: int = 0
    ) -> None:
        """dx (n, in) = dy (n, out) times the weight of each row's group."""
        if self.weight_cache is not None:
            return super().grouped_data_gradient(dy, weight, counts, dx, chunk)
        self.kernels.grouped_linear_data_gradient(
            dy, weight.detach().flatten(1, -2), torch.tensor(counts), dx, chunk
        )

    def grouped_weight_gradient(
        self, dy: Tensor, x: Tensor, weight: Tensor, counts: Sequence[int], chunk: int = 0
    ) -> None:
        """Add dy^T x of each group's rows to the gradient of its weight, now or later; dy (n, out), x (n, in) stay until then."""
        if not is_frozen(weight):
            self.weight_gradients.add(
                partial(
                    self.kernels.grouped_linear_weight_gradient,
                    dy,
                    x.detach(),
                    torch.tensor(counts),
                    gradient_of(weight).flatten(1, -2),
                    chunk,
                )
            )

    def grouped_outer_sum(self, dy: Tensor, x: Tensor, counts: Sequence[int]) -> Tensor:
        """dy^T x in FP32 of each group's rows, dy (n, out) and x (n, in) -> (groups, out, in)."""
        total = torch.zeros(len(counts), dy.shape[1], x.shape[1])
        self.kernels.grouped_linear_weight_gradient(dy, x, torch.tensor(counts), total, 0)
        return total


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernels: Any, logits: Tensor, bias: Tensor | None, model: ModelConfig
    ) -> tuple[Tensor, Tensor]:
        kind = kind_of_scores(model)
        scores, scaling = (
            logits.new_empty(len(logits), model.moe_router_topk),
            model.moe_router_topk_scaling_factor or 1.0,
        )
        chosen = torch.empty(scores.shape, dtype=torch.int64)
        kernels.route(
            logits,
            bias,
            scores,
            chosen,
            kind,
            scaling,
            model.moe_router_num_groups or 0,
            model.moe_router_group_topk or 0,
            NORMALIZER,
        )
        ctx.save_for_backward(scores if kind == "softmax_of_chosen" else logits, chosen)
        ctx.kernels, ctx.kind, ctx.scaling, ctx.experts = kernels, kind, scaling, logits.shape[1]
        ctx.mark_non_differentiable(chosen)
        return scores, chosen

    @staticmethod
    def backward(ctx: Any, dscores: Tensor, _: Tensor) -> tuple[None, Tensor, None, None]:
        kept, chosen = ctx.saved_tensors
        dlogits = dscores.new_empty(len(dscores), ctx.experts)
        ctx.kernels.route_backward(
            dscores.contiguous(), kept, chosen, dlogits, ctx.kind, ctx.scaling, NORMALIZER
        )
        return None, dlogits, None, None
