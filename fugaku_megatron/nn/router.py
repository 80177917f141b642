"""The router of a layer with experts: which experts each token goes through, with which scores, and what keeps their load even.

It computes what megatron/core/transformer/moe/router.py and megatron/core/transformer/moe/moe_utils.py of Megatron-LM do, in FP32.
Padding (`passes.Documents`) is in no loss, no choice among other tokens and no load.
Left out: the choice by scores, which is the backend's (`ops.experts`), the experts and what they drop (`experts`), which losses
and loads a log shows (`observe.memory`).
Legend: s sequence, b micro-batch, h hidden, e experts, k of them for each token, rows = s b.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..config.experts import SEQUENCE_AUX, SIGMOID
from ..config.run_config import ModelConfig
from .forward_context import Pass
from .gradients import accumulate, as_rows
from .layers import Context
from .ops.experts import NORMALIZER

SINKHORN_TOLERANCE = 1e-4  # as in Megatron-LM
SINKHORN_ROUNDS = 1000


class SmallLinear(torch.autograd.Function):
    """A linear layer with few outputs, computed in FP32."""

    @staticmethod
    def forward(ctx: Any, ops: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Return x W^T. x (s, b, h), weight (e, h) -> (rows, e)."""
        ctx.save_for_backward(x)
        ctx.ops = ops
        ctx.weight = weight
        return as_rows(x).float() @ weight.detach().float().t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor, None]:
        """Return the gradient of x (s, b, h) from dy (rows, e)."""
        (x,) = ctx.saved_tensors
        weight = ctx.weight
        rows = as_rows(x).detach()
        ctx.ops.weight_gradients.add(lambda: accumulate(weight, dy.t() @ rows.float()))
        return None, (dy @ weight.detach().float()).to(x.dtype).view_as(x), None


class _Counted(torch.autograd.Function):
    """Identity of the scores; backward adds each expert's tokens beyond the mean, (e,), to the bias gradient."""

    @staticmethod
    def forward(ctx: Any, ops: Any, scores: Tensor, counts: Tensor, bias: Tensor) -> Tensor:
        ctx.ops = ops
        ctx.excess = counts - counts.mean()
        ctx.bias = bias
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, dscores: Tensor) -> tuple[None, Tensor, None, None]:
        ctx.ops.weight_gradients.add(partial(accumulate, ctx.bias, ctx.excess))
        return None, dscores, None, None


class _WithLoss(torch.autograd.Function):
    """Identity of the scores; backward adds `factor` to the gradient of `loss` ()."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, loss: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, dscores: Tensor) -> tuple[Tensor, Tensor, None]:
        return dscores, torch.tensor(ctx.factor, dtype=torch.float32), None


def route(
    ops: Any, logits: Tensor, bias: Tensor | None, model: ModelConfig, ranks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose each token's experts. Return (scores, expert numbers), both (rows, k). logits (rows, e), bias (e,).

    ranks (rows, e): what the choice of --moe-router-load-balancing-type sinkhorn is by; None: by scores.
    """
    if not model.sinkhorn:
        return ops.route(logits, bias, model)
    scores = torch.sigmoid(logits) if model.moe_router_topk == 1 else torch.softmax(logits, -1)
    chosen = (scores.detach() if ranks is None else ranks).topk(model.moe_router_topk).indices
    return scores.gather(1, chosen) * (model.moe_router_topk_scaling_factor or 1.0), chosen


def evenly(logits: Tensor, padding: Tensor | None = None) -> Tensor:
    """Scale rows and columns of exp(logits) (rows, e) to equal row sums and equal column sums (Sinkhorn), in FP64.

    padding: bool (rows,), the rows that are zeros and change nothing.
    Source: Clark et al. 2022, "Unified Scaling Laws for Routed Language Models" (arXiv:2202.01169), section 3.1.
    """
    if padding is not None:
        result = logits.new_zeros(logits.shape, dtype=torch.float64)
        result[~padding] = evenly(logits[~padding])
        return result
    cost = logits.double().exp()
    rows = cost.new_ones(len(cost))
    columns = cost.new_ones(cost.shape[1])
    for _ in range(SINKHORN_ROUNDS):
        rows = 1 / (len(rows) * ((cost * columns).sum(1) + 1e-8))
        last = columns
        columns = 1 / (len(columns) * ((cost * rows.unsqueeze(1)).sum(0) + 1e-8))
        if (columns - last).abs().mean() <= SINKHORN_TOLERANCE:
            break
    return columns * cost * rows.unsqueeze(1)


def balancing_scores(logits: Tensor, chosen: Tensor, model: ModelConfig) -> tuple[Tensor, Tensor]:
    """Return (scores that sum to 1, 1 for each token's best experts by these scores), both (rows, e), for balancing losses.

    chosen (rows, k): each token's experts, which are the best unless a bias or groups took part in the choice.
    """
    if model.moe_router_score_function == SIGMOID:
        scores = torch.sigmoid(logits)
        scores = scores / (scores.sum(-1, keepdim=True) + NORMALIZER)
    else:
        scores = torch.softmax(logits, -1)
    if model.moe_router_enable_expert_bias or model.moe_router_num_groups:
        chosen = scores.detach().topk(model.moe_router_topk).indices
    return scores, torch.zeros_like(scores).scatter_(1, chosen, 1.0)


def balancing_loss(scores: Tensor, counts: Tensor, tokens: int, k: int) -> Tensor:
    """Return e times the sum over experts of (share of all choices) (mean score), (); 1 if the load is even.

    scores (rows, e) of this rank. counts (e,) and tokens: of all ranks that share the sequence, whose results are summed.
    Source: Fedus et al. 2021, "Switch Transformers" (arXiv:2101.03961), equation 4, for k experts of a token.
    """
    return (scores.sum(0) * counts).sum() * (len(counts) / (k * tokens * tokens))


def padded_balancing_loss(scores: Tensor, counts: Tensor, tokens: Tensor, k: int) -> Tensor:
    """Return the mean `balancing_loss` () of several sets of tokens, of those sets that have any.

    Args:
        scores: (rows, sets e) of this rank, 0 for padding.
        counts: (sets e,), of all ranks that share the sequence.
        tokens: (sets,), how many there are without padding, of all these ranks.
    """
    sums = (scores.sum(0) * counts).view(len(tokens), -1).sum(1)
    experts = len(counts) // len(tokens)
    some = (tokens > 0).sum().clamp(min=1)
    return (sums / tokens.clamp(min=1).square()).sum() * experts / (k * some)


class Router(nn.Module):
    """Chooses each token's experts. loads: of each micro-batch since they were forgotten, by its first sample: (e + 2,) in FP64,
    tokens of every expert, padding left out, the sum of balancing losses without their factors, and the z-loss without its own;
    shares of ranks add up.

    Keyed by the micro-batch, so that recompute counts nothing twice.
    """

    def __init__(self, name: str, context: Context) -> None:
        super().__init__()
        model = context.model
        self.context = context
        experts = model.num_experts
        assert experts is not None
        self.weight = context.parameter(
            f"{name}.weight", (experts, model.hidden_size), std=model.init_method_std
        )
        biased = model.moe_router_enable_expert_bias
        self.expert_bias = (
            context.parameter(f"{name}.expert_bias", (experts,), balances=True) if biased else None
        )
        self.loads: dict[int, Tensor] = {}

    def forward(self, x: Tensor, forward_pass: Pass) -> tuple[Tensor, Tensor]:
        """Return (scores in FP32, experts), both (rows, k), for x (s, b, h). Rows of padding are arbitrary."""
        ops = self.context.ops
        model = self.context.model
        logits = SmallLinear.apply(ops, x, self.weight)
        padding = forward_pass.documents.padding
        ranks = self._ranks(logits, padding) if model.sinkhorn and forward_pass.training else None
        scores, chosen = route(ops, logits, self.expert_bias, model, ranks)
        if not forward_pass.training:
            return scores, chosen
        own = self.context.own_rows(padding, self.context.sequence)
        counted = chosen if own is None else chosen[~own]
        counts = torch.bincount(counted.flatten(), minlength=logits.shape[1]).float()
        load = torch.cat((counts, torch.zeros(2))).double()
        if torch.is_grad_enabled():
            scores = self._with_losses(scores, logits, chosen, x.shape[1], forward_pass, load)
            if self.expert_bias is not None:
                scores = _Counted.apply(ops, scores, counts, self.expert_bias)
        self.loads[forward_pass.first_sample] = load
        return scores, chosen

    def _ranks(self, logits: Tensor, padding: Tensor | None) -> Tensor:
        """Return this rank's rows (rows, e) of `evenly` over the whole micro-batch. padding: (s, b) of the whole sequence."""
        even = partial(evenly, padding=None if padding is None else padding.flatten())
        return self.context.of_whole_sequence(even, logits, part=self.context.sequence)

    def _with_losses(
        self,
        scores: Tensor,
        logits: Tensor,
        chosen: Tensor,
        samples: int,
        forward_pass: Pass,
        load: Tensor,
    ) -> Tensor:
        """Return the scores (rows, k) with the balancing losses attached to their backward, and record the losses in `load`."""
        model = self.context.model
        ranks = self.context.sequence_shares
        padding = forward_pass.documents.padding
        own = self.context.own_rows(padding, self.context.sequence)
        balance_factor = (
            forward_pass.balance_factor * self.context.cp.size
        )  # gradients are averaged over the ranks of a sequence
        weight = 1.0
        if padding is not None and forward_pass.tokens is not None:
            weight = int((~padding).sum()) / forward_pass.tokens
        if model.moe_z_loss_coeff:
            squares = torch.logsumexp(logits, -1).square()
            if own is None or padding is None:
                z_loss = squares.mean() / ranks
            else:
                z_loss = squares[~own].sum() / max(int((~padding).sum()), 1)
            load[-1] = weight * z_loss.detach()
            scores = _WithLoss.apply(
                scores, model.moe_z_loss_coeff * z_loss, balance_factor * weight
            )
        for kind, factor in model.balances:
            shares, hits = balancing_scores(logits, chosen, model)
            if own is not None:
                shares = shares.masked_fill(own.unsqueeze(1), 0.0)
                hits = hits.masked_fill(own.unsqueeze(1), 0.0)
            parts = (
                samples if kind == SEQUENCE_AUX else 1
            )  # a sequence's experts count as experts of their own
            shares = shares.reshape(len(shares) // parts, -1)
            counts = hits.reshape(len(hits) // parts, -1).sum(0)
            self.context.sum_over_sequence(counts)
            if padding is None:
                loss = (
                    balancing_loss(shares, counts, ranks * len(shares), model.moe_router_topk)
                    / parts**2
                )
            else:
                tokens = (~padding).sum(0).view(parts, -1).sum(1)
                loss = padded_balancing_loss(shares, counts, tokens, model.moe_router_topk)
            load[-2] += weight * loss.detach()
            scores = _WithLoss.apply(scores, factor * loss, balance_factor * weight)
        return scores

    def take_load(self) -> Tensor:
        """Return the sum of `loads`, (e + 2,), and reset them."""
        total = sum(self.loads.values(), torch.zeros(len(self.weight) + 2, dtype=torch.float64))
        self.loads.clear()
        return total
