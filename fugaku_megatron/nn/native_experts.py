"""The operations of a layer's experts on the C++ kernels; `torch_experts` says what each computes, and is the readable reference.

One crossing into C++ per fused operation; outputs are allocated here. Left out: matmuls of as few rows as generation has, and
activations without a kernel, which are those of `torch_experts`.
Legend: h hidden, f width of an expert, e experts, k of them for each token, n pairs of a token and one of its experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..config.experts_config import SIGMOID
from ..config.run_config import ModelConfig
from .native_blocks import GATES, as_gates
from .parameter import WeightCache, WeightGradients
from .shared import gradient_of, is_frozen
from .torch_experts import NORMALIZER, ExpertOps


class NativeExpertOps(ExpertOps):
    """These operations, for a backend with `kernels` and matmuls."""

    kernels: Any
    weight_cache: WeightCache | None
    weight_gradients: WeightGradients
    few_rows: int

    def route(self, logits: Tensor, bias: Tensor | None, model: ModelConfig) -> tuple[Tensor, Tensor]:
        """logits (rows, e), bias (e,) -> two of (rows, k)."""
        return _Route.apply(self.kernels, logits, None if bias is None else bias.detach().float(), model)

    def order(self, chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
        """chosen (rows, k) -> (e,), (n,), (rows, k)."""
        counts, pairs, places = chosen.new_empty(experts), chosen.new_empty(chosen.numel()), torch.empty_like(chosen)
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

    def scaled_gate_gradient(self, dinner: Tensor, pre: Tensor, factors: Tensor, dpre: Tensor, activation: str) -> Tensor:
        """dinner (n, f), pre and dpre (n, 2 f), or (n, f) without a gate, factors (n,) -> (n,)."""
        if activation not in GATES:
            return super().scaled_gate_gradient(dinner, pre, factors, dpre, activation)
        dfactors = torch.empty_like(factors)
        self.kernels.scaled_gate_backward(dinner, as_gates(pre), factors, as_gates(dpre), dfactors, dinner, GATES[activation])
        return dfactors

    def grouped_matmul(self, x: Tensor, weight: Tensor, counts: Sequence[int], out: Tensor, chunk: int = 0) -> None:
        """out (n, out) = x (n, in) times the transposed weight of each row's group; a matmul each where rows are few."""
        if self.weight_cache is not None or len(x) <= self.few_rows:
            return super().grouped_matmul(x, weight, counts, out, chunk)
        self.kernels.grouped_linear_forward(x, weight.detach().flatten(1, -2), torch.tensor(counts), out, chunk)

    def grouped_data_gradient(self, dy: Tensor, weight: Tensor, counts: Sequence[int], dx: Tensor, chunk: int = 0) -> None:
        """dx (n, in) = dy (n, out) times the weight of each row's group."""
        if self.weight_cache is not None:
            return super().grouped_data_gradient(dy, weight, counts, dx, chunk)
        self.kernels.grouped_linear_data_gradient(dy, weight.detach().flatten(1, -2), torch.tensor(counts), dx, chunk)

    def grouped_weight_gradient(self, dy: Tensor, x: Tensor, weight: Tensor, counts: Sequence[int], chunk: int = 0) -> None:
        """Add dy^T x of each group's rows to the gradient of its weight, now or later; dy (n, out), x (n, in) stay until then."""
        if not is_frozen(weight):
            self.weight_gradients.add(partial(self.kernels.grouped_linear_weight_gradient, dy, x.detach(), torch.tensor(counts),
                                              gradient_of(weight).flatten(1, -2), chunk))

    def grouped_outer_sum(self, dy: Tensor, x: Tensor, counts: Sequence[int]) -> Tensor:
        """dy^T x in FP32 of each group's rows, dy (n, out) and x (n, in) -> (groups, out, in)."""
        total = torch.zeros(len(counts), dy.shape[1], x.shape[1])
        self.kernels.grouped_linear_weight_gradient(dy, x, torch.tensor(counts), total, 0)
        return total


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: Any, logits: Tensor, bias: Tensor | None, model: ModelConfig) -> tuple[Tensor, Tensor]:
        kind = "sigmoid" if model.moe_router_score_function == SIGMOID else (
            "softmax" if model.moe_router_pre_softmax else "softmax_of_chosen")
        scores, scaling = logits.new_empty(len(logits), model.moe_router_topk), model.moe_router_topk_scaling_factor or 1.0
        chosen = torch.empty(scores.shape, dtype=torch.int64)
        kernels.route(logits, bias, scores, chosen, kind, scaling, model.moe_router_num_groups or 0,
                      model.moe_router_group_topk or 0, NORMALIZER)
        ctx.save_for_backward(scores if kind == "softmax_of_chosen" else logits, chosen)
        ctx.kernels, ctx.kind, ctx.scaling, ctx.experts = kernels, kind, scaling, logits.shape[1]
        ctx.mark_non_differentiable(chosen)
        return scores, chosen

    @staticmethod
    def backward(ctx: Any, dscores: Tensor, _: Tensor) -> tuple[None, Tensor, None, None]:
        kept, chosen = ctx.saved_tensors
        dlogits = dscores.new_empty(len(dscores), ctx.experts)
        ctx.kernels.route_backward(dscores.contiguous(), kept, chosen, dlogits, ctx.kind, ctx.scaling, NORMALIZER)
        return None, dlogits, None, None
