"""Operations of a layer's experts: routing scores, permutation of rows, activations times scores. All follow the choice of "gemm".

f expert width, e experts, k per token, n pairs of a token and an expert, numbered row * k + place.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ...comm.autograd import Saved, apply_saving
from ...config.experts import SIGMOID
from ...config.model import ModelConfig
from .activation import Activation, activate, activation_gradient, as_gates, kernel
from .backend import Backend

NORMALIZER = 1e-20  # added to the sum of sigmoid scores, as in Megatron-LM


def kind_of_scores(model: ModelConfig) -> str:
    if model.moe_router_score_function == SIGMOID:
        return "sigmoid"
    return "softmax" if model.moe_router_pre_softmax else "softmax_of_chosen"


def route(
    ops: Backend, logits: Tensor, bias: Tensor | None, model: ModelConfig
) -> tuple[Tensor, Tensor]:
    """Choose each token's experts. Return (scores, expert numbers), both (rows, k), best first.

    Among equal experts the lower number wins. Scores have a gradient.

    logits: (rows, e) in FP32
    bias: (e,), added to the scores for the choice
    """
    if not ops.is_native("gemm"):
        return _torch_route(logits, bias, model)
    kernels = ops.kernels
    kind = kind_of_scores(model)
    scaling = model.moe_router_topk_scaling_factor or 1.0
    experts = logits.shape[1]

    def forward() -> tuple[tuple[Tensor, Tensor], Saved]:
        scores = logits.new_empty(len(logits), model.moe_router_topk)
        chosen = torch.empty(scores.shape, dtype=torch.int64)
        kernels.route(
            logits,
            None if bias is None else bias.detach().float(),
            scores,
            chosen,
            kind,
            scaling,
            model.moe_router_num_groups or 0,
            model.moe_router_group_topk or 0,
            NORMALIZER,
        )
        return (scores, chosen), (scores if kind == "softmax_of_chosen" else logits, chosen)

    def backward(dscores: Tensor, _: Tensor, saved: Tensor, chosen: Tensor) -> Tensor:
        dlogits = dscores.new_empty(len(dscores), experts)
        kernels.route_backward(
            dscores.contiguous(), saved, chosen, dlogits, kind, scaling, NORMALIZER
        )
        return dlogits

    return apply_saving(forward, backward, logits)


def _torch_route(logits: Tensor, bias: Tensor | None, model: ModelConfig) -> tuple[Tensor, Tensor]:
    kind = kind_of_scores(model)
    scores = logits
    if kind == "sigmoid":
        scores = torch.sigmoid(logits)
    elif kind == "softmax":
        scores = torch.softmax(logits, -1)
    wish = scores if model.moe_router_num_groups or bias is not None else logits
    wish = wish.detach()
    chosen = _chosen(wish if bias is None else wish + bias.float(), model)
    own = scores.gather(1, chosen)
    if kind == "sigmoid" and model.moe_router_topk > 1:
        own = own / (own.sum(-1, keepdim=True) + NORMALIZER)
    elif kind == "softmax_of_chosen":
        own = torch.softmax(own, -1)
    return own * (model.moe_router_topk_scaling_factor or 1.0), chosen


def _best(x: Tensor, count: int) -> Tensor:
    """Return the indices (rows, count) of each row's largest elements; NaN counts as infinity."""
    finite = torch.nan_to_num(x, math.inf, math.inf, -math.inf)
    return finite.argsort(dim=-1, descending=True, stable=True)[:, :count]


def _chosen(wish: Tensor, model: ModelConfig) -> Tensor:
    k = model.moe_router_topk
    groups = model.moe_router_num_groups
    group_count = model.moe_router_group_topk
    if groups and group_count:
        grouped = wish.view(len(wish), groups, -1)
        totals = grouped.sort(-1, descending=True).values[..., : k // group_count].sum(-1)
        is_open = torch.zeros(len(wish), groups, dtype=torch.bool)
        is_open.scatter_(1, _best(totals, group_count), True)
        wish = wish.masked_fill(~is_open.repeat_interleave(grouped.shape[2], 1), -math.inf)
    return _best(wish, k)


def sort_pairs(ops: Backend, chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort pairs by expert. chosen: (rows, k), `experts` for a dropped pair.

    Return (pairs of each expert (e,), pair numbers (n,) in expert order, place (rows, k) of each pair in that order, n if dropped).
    """
    if ops.is_native("gemm"):
        counts = chosen.new_empty(experts)
        pairs = chosen.new_empty(chosen.numel())
        places = torch.empty_like(chosen)
        ops.kernels.sort_pairs(chosen, counts, pairs, places)
        return counts, pairs[: int(counts.sum())], places
    numbers = chosen.flatten()
    counts = torch.bincount(numbers, minlength=experts)[:experts]
    pairs = numbers.argsort(stable=True)[: int(counts.sum())]
    places = torch.full_like(numbers, len(pairs))
    places[pairs] = torch.arange(len(pairs))
    return counts, pairs, places.view_as(chosen)


def permute(ops: Backend, x: Tensor, pairs: Tensor, k: int) -> Tensor:
    """Copy the row of each pair's token. x (rows, h), pairs (n,) -> (n, h)."""
    if not ops.is_native("gemm"):
        return x[pairs // k]
    out = x.new_empty(len(pairs), x.shape[1])
    ops.kernels.permute(x.contiguous(), pairs, out, k)
    return out


def unpermute(ops: Backend, x: Tensor, places: Tensor) -> Tensor:
    """Sum the rows of each token's pairs. x (n, h), places (rows, k) -> (rows, h)."""
    if ops.is_native("gemm"):
        out = x.new_empty(len(places), x.shape[1])
        ops.kernels.unpermute(x.contiguous(), places, out)
        return out
    if not len(x):
        return x.new_zeros(len(places), x.shape[1])
    table = torch.cat((x, x.new_zeros(1, x.shape[1]))) if len(x) < places.numel() else x
    return F.embedding_bag(places, table, mode="sum")


def scaled_gate(ops: Backend, pre: Tensor, factors: Tensor, activation: Activation) -> Tensor:
    """Return the activation of pre (n, f or 2 f) times factors (n,) -> (n, f)."""
    name = kernel(ops, activation)
    if name is None or not activation.gated:
        return _scaled(activate(ops, pre, activation), factors)
    inner = pre.new_empty(len(pre), pre.shape[1] // 2)
    ops.kernels.scaled_gate(as_gates(pre), factors, inner, name)
    return inner


def scaled_gate_gradient(
    ops: Backend, dinner: Tensor, pre: Tensor, factors: Tensor, dpre: Tensor, activation: Activation
) -> Tensor:
    """Write the gradient of pre (n, f or 2 f) to dpre, and return the gradient of factors (n,).

    dinner: (n, f), overwritten with the value of `scaled_gate`.
    """
    name = kernel(ops, activation)
    if name is not None and activation.gated:
        dfactors = torch.empty_like(factors)
        ops.kernels.scaled_gate_backward(
            dinner, as_gates(pre), factors, as_gates(dpre), dfactors, dinner, name
        )
        return dfactors
    values = activate(ops, pre, activation)
    dfactors = (dinner.float() * values.float()).sum(-1)
    activation_gradient(ops, _scaled(dinner, factors), pre, dpre, activation)
    dinner.copy_(_scaled(values, factors))
    return dfactors


def _scaled(x: Tensor, factors: Tensor) -> Tensor:
    return (x * factors.unsqueeze(1)).to(x.dtype)
