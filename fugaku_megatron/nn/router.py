"""Router of a layer with experts: choice of experts, scores and load balancing.

Computes what megatron/core/transformer/moe/router.py and moe_utils.py of Megatron-LM do, in FP32. Padding (`PackedDocuments`) takes no
part in losses, loads, and choices for other tokens.
e experts, k experts per token.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..comm.autograd import SavedResult, apply_saving
from ..config.experts import SEQUENCE_AUX, SIGMOID
from ..config.model import ModelConfig
from .backward import attach_loss
from .forward_context import Pass
from .layers import Context, Layer
from .ops import Ops
from .ops.experts import NORMALIZER
from .parameter import accumulate, as_rows

SINKHORN_TOLERANCE = 1e-4  # as in Megatron-LM
SINKHORN_ROUNDS = 1000


def small_linear(ops: Ops, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + bias in FP32, with few outputs. x (s, b, h), weight (e, h), bias (e,) -> (rows, e)."""

    def forward() -> SavedResult:
        y = as_rows(x).float() @ weight.detach().float().mT
        return y if bias is None else y + bias.detach().float(), (x,)

    def backward(dy: Tensor, x: Tensor) -> Tensor:
        if bias is not None:
            accumulate(bias, dy.sum(0))
        rows = as_rows(x).detach()
        ops.weight_gradients.add(lambda: accumulate(weight, dy.mT @ rows.float()))
        return (dy @ weight.detach().float()).to(x.dtype).view_as(x)

    return apply_saving(forward, backward, x, weight, bias)


def _counted(ops: Ops, scores: Tensor, counts: Tensor, bias: Tensor) -> Tensor:
    """Return the scores; backward adds each expert's tokens beyond the mean, (e,), to the bias gradient."""
    excess = counts - counts.mean()

    def backward(dscores: Tensor) -> Tensor:
        ops.weight_gradients.add(partial(accumulate, bias, excess))
        return dscores

    return apply_saving(lambda: (scores.view_as(scores), ()), backward, scores, bias)


def route(
    ops: Ops, logits: Tensor, bias: Tensor | None, model: ModelConfig, ranks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose each token's experts. Return (scores, expert numbers), both (rows, k). logits (rows, e), bias (e,).

    ranks: (rows, e), ranking for --moe-router-load-balancing-type sinkhorn; None: rank by scores.
    """
    if not model.sinkhorn:
        return ops.route(logits, bias, model)
    scores = torch.sigmoid(logits) if model.moe_router_topk == 1 else torch.softmax(logits, -1)
    chosen = (scores.detach() if ranks is None else ranks).topk(model.moe_router_topk).indices
    return scores.gather(1, chosen) * (model.moe_router_topk_scaling_factor or 1.0), chosen


def evenly(logits: Tensor, padding: Tensor | None = None) -> Tensor:
    """Scale rows and columns of exp(logits) (rows, e) to equal row sums and equal column sums (Sinkhorn), in FP64.

    padding: bool (rows,), rows that are zeros and change nothing.
    Source: Clark et al. 2022 (arXiv:2202.01169), section 3.1.
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
    """Return normalized scores and a 0/1 mask of each token's best experts, both (rows, e), for balancing losses.

    chosen is ranked again by score if a bias or groups affected it.
    """
    if model.moe_router_score_function == SIGMOID:
        scores = torch.sigmoid(logits)
        scores = scores / (scores.sum(-1, keepdim=True) + NORMALIZER)
    else:
        scores = torch.softmax(logits, -1)
    if model.moe_router_enable_expert_bias or model.moe_router_num_groups:
        chosen = scores.detach().topk(model.moe_router_topk).indices
    return scores, torch.zeros_like(scores).scatter_(1, chosen, 1.0)


def balancing_loss(scores: Tensor, counts: Tensor, tokens: Tensor, k: int) -> Tensor:
    """Return the mean, (), over all tokens of the loss of each token's set.

    A set's loss is e times the sum over experts of (share of all choices) (mean score); 1 if the load is even. A mean over tokens
    does not depend on the samples that share a micro-batch.

    scores: (rows, sets e) of this rank, 0 for padding; the results of all ranks that share the sequence are summed
    counts: (sets e,), over all ranks that share the sequence, without padding
    tokens: (sets,), likewise
    Source: Fedus et al. 2021, "Switch Transformers" (arXiv:2101.03961), equation 4.
    """
    sums = (scores.sum(0) * counts).view(len(tokens), -1).sum(1)
    experts = len(counts) // len(tokens)
    return (sums / tokens.clamp(min=1)).sum() * experts / (k * tokens.sum().clamp(min=1))


class Router(Layer):
    """Choice of each token's experts.

    loads: by each micro-batch's first sample, so that recompute counts nothing twice; (e + 2,) in FP64: tokens per expert without
        padding, unscaled balancing losses, unscaled z-loss; additive over ranks.
    """

    def __init__(self, name: str, context: Context) -> None:
        super().__init__(context)
        model = context.model
        experts = model.num_experts
        assert experts is not None
        self.weight = context.parameter(
            f"{name}.weight", (experts, model.hidden_size), std=model.init_method_std
        )
        self.bias = None
        if not model.disable_bias_linear:
            self.bias = context.parameter(f"{name}.bias", (experts,))
        biased = model.moe_router_enable_expert_bias
        self.expert_bias = (
            context.parameter(f"{name}.expert_bias", (experts,), balances=True) if biased else None
        )
        self.loads: dict[int, Tensor] = {}

    def forward(self, x: Tensor, forward_pass: Pass) -> tuple[Tensor, Tensor]:
        """Return (scores in FP32, experts), both (rows, k). Rows of padding are arbitrary."""
        ops = self.ops
        model = self.model
        logits = small_linear(ops, x, self.weight, self.bias)
        padding = forward_pass.documents.padding
        ranks = None
        if model.sinkhorn and forward_pass.training:
            even = partial(evenly, padding=None if padding is None else padding.flatten())
            # This rank's rows of the whole micro-batch.
            ranks = self.context.of_whole_sequence(even, logits, sequence=self.context.sequence)
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
                scores = _counted(ops, scores, counts, self.expert_bias)
        self.loads[forward_pass.first_sample] = load
        return scores, chosen

    def _with_losses(
        self,
        scores: Tensor,
        logits: Tensor,
        chosen: Tensor,
        samples: int,
        forward_pass: Pass,
        load: Tensor,
    ) -> Tensor:
        """Attach the balancing losses to the scores' backward, and record them in `load`."""
        model = self.model
        ranks = self.context.sequence_shares
        padding = forward_pass.documents.padding
        own = self.context.own_rows(padding, self.context.sequence)
        # Gradients are averaged over the ranks of a sequence.
        balance_factor = forward_pass.balance_factor * self.context.cp.size
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
            scores = attach_loss(scores, model.moe_z_loss_coeff * z_loss, balance_factor * weight)
        for kind, factor in model.balances:
            shares, hits = balancing_scores(logits, chosen, model)
            if own is not None:
                shares = shares.masked_fill(own.unsqueeze(1), 0.0)
                hits = hits.masked_fill(own.unsqueeze(1), 0.0)
            # With a loss per sequence, each sequence's experts count separately.
            sets = samples if kind == SEQUENCE_AUX else 1
            shares = shares.reshape(len(shares) // sets, -1)
            counts = hits.reshape(len(hits) // sets, -1).sum(0)
            self.context.sum_over_sequence(counts)
            if padding is None:
                tokens = torch.full((sets,), ranks * len(shares))
            else:
                tokens = (~padding).sum(0).view(sets, -1).sum(1)
            loss = balancing_loss(shares, counts, tokens, model.moe_router_topk)
            load[-2] += weight * loss.detach()
            scores = attach_loss(scores, factor * loss, balance_factor * weight)
        return scores

    def take_load(self) -> Tensor:
        """Return the sum of `loads`, (e + 2,), and reset them."""
        total = sum(self.loads.values(), torch.zeros(len(self.weight) + 2, dtype=torch.float64))
        self.loads.clear()
        return total
