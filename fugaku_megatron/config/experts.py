"""Mixture-of-experts fields of the model.

Names and meaning follow Megatron-LM (megatron/core/transformer/transformer_config.py).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property, partial

from .fields import (
    BY_LAYER,
    COURSE,
    NOT_NEGATIVE,
    SAME,
    check,
    check_positive,
    course_option,
    weight_option,
    weight_optional,
)
from .layer_kinds import LAYERS, marked_layers

# Values of --moe-router-load-balancing-type.
NO_BALANCE = "none"
AUX = "aux_loss"
SEQUENCE_AUX = "seq_aux_loss"
SINKHORN = "sinkhorn"
BALANCES = (NO_BALANCE, AUX, SEQUENCE_AUX, SINKHORN)

SOFTMAX = "softmax"
SIGMOID = "sigmoid"

# Fields without effect in a model without experts: part of the weights' meaning, or of the course of training.
expert_field = partial(weight_option, needs="num_experts", megatron=SAME)
expert_course_field = partial(expert_field, meaning=COURSE)


@dataclass(frozen=True, kw_only=True)
class ExpertFields:
    """Flags of experts: their layers, widths, routing and load balancing."""

    num_experts: int | None = weight_optional(
        "experts of a layer; each token is dispatched to --moe-router-topk experts (default: one MLP "
        "for all tokens)",
        maximum=2**12,
        megatron=SAME,
    )
    moe_layer_freq: str = weight_option(
        "1",
        "layers with experts: every Nth from the first, or a list of 0 and 1 for all layers, such as "
        "([0]*1+[1]*23)",
        topic=LAYERS,
        needs="num_experts",
        megatron=BY_LAYER,
    )
    moe_ffn_hidden_size: int | None = expert_field(
        None,
        "width of each expert (default: --ffn-hidden-size)",
        maximum=2**22,
    )
    moe_shared_expert_intermediate_size: int | None = expert_field(
        None,
        "width of a shared expert, applied to every token (default: none)",
        maximum=2**22,
    )
    moe_shared_expert_gate: bool = expert_field(
        False,
        "multiply the shared expert's output by the sigmoid of a learned score per token, as in "
        "Qwen2-MoE",
    )
    moe_router_topk: int = expert_field(
        2,
        "number of experts per token",
        maximum=2**12,
    )
    moe_router_score_function: str = expert_field(
        SOFTMAX,
        "function from the router's logits to scores",
        choices=(SOFTMAX, SIGMOID),
    )
    moe_router_pre_softmax: bool = expert_field(
        False,
        "softmax over all experts, without normalising the scores again over the chosen "
        "experts; otherwise softmax over the chosen experts",
    )
    moe_router_topk_scaling_factor: float | None = expert_field(
        None,
        "multiply the scores of the chosen experts by this",
        range=None,
        neutral=1.0,
    )
    moe_router_num_groups: int | None = expert_field(
        None,
        "groups of experts; the experts of a token are in its best --moe-router-group-topk groups",
        maximum=2**12,
        neutral=1,
    )
    moe_router_group_topk: int | None = expert_field(
        None,
        "groups per token, with --moe-router-num-groups",
        maximum=2**12,
    )
    moe_router_enable_expert_bias: bool = expert_field(
        False,
        "choose experts by score + bias, and after each iteration raise the bias of experts with fewer "
        "tokens than the mean: balance without a loss",
    )
    moe_router_bias_update_rate: float = course_option(
        1e-3,
        "change of a bias per iteration, with --moe-router-enable-expert-bias",
        needs=("num_experts", "moe_router_enable_expert_bias"),
        megatron=SAME,
    )
    moe_router_load_balancing_type: tuple[str, ...] = expert_course_field(
        (AUX,),
        "balancing losses per micro-batch: aux_loss, seq_aux_loss (per sequence) or none; "
        "or sinkhorn, without a loss: training chooses experts evenly",
    )
    moe_aux_loss_coeff: tuple[float, ...] = expert_course_field(
        (0.0,), "factor of each balancing loss"
    )
    moe_z_loss_coeff: float | None = expert_course_field(
        None,
        "add this x the mean of (log of the router's softmax denominator)^2 to the loss",
        range=NOT_NEGATIVE,
    )
    moe_expert_capacity_factor: float | None = expert_course_field(
        None,
        "an expert processes at most this x the mean number of tokens per expert in a "
        "micro-batch and drops the rest (default: no limit)",
        range=None,
    )
    moe_token_drop_policy: str = course_option(
        "probs",
        "tokens that an expert drops: the lowest scores, or the last tokens of the sequence or chat",
        choices=("probs", "position"),
        needs=("num_experts", "moe_expert_capacity_factor"),
        megatron=SAME,
    )

    def _derive_experts(self, width: int) -> None:
        if self.num_experts is None:
            for field in fields(ExpertFields):
                object.__setattr__(self, field.name, field.default)
            return
        if self.moe_ffn_hidden_size is None:
            object.__setattr__(self, "moe_ffn_hidden_size", width)
        # As in Megatron-LM, a negative factor means no limit.
        if self.moe_expert_capacity_factor is not None and self.moe_expert_capacity_factor < 0:
            object.__setattr__(self, "moe_expert_capacity_factor", None)

    def _check_experts(self, layers: int, bias: bool) -> None:
        if self.num_experts is None:
            return
        check(
            not bias or self.moe_shared_expert_intermediate_size is None,
            f"--moe-shared-expert-intermediate-size {self.moe_shared_expert_intermediate_size} is computed "
            "without biases: pass --disable-bias-linear as well",
        )
        scored = (
            self.moe_router_score_function == SIGMOID
            or self.moe_router_pre_softmax
            or self.sinkhorn
        )
        check(
            self.moe_router_topk > 1 or scored,
            "--moe-router-topk 1 needs --moe-router-pre-softmax, as in Megatron-LM: the softmax over one "
            "chosen expert is always 1",
        )
        check(
            not self.moe_router_enable_expert_bias or self.moe_router_score_function == SIGMOID,
            "--moe-router-enable-expert-"
            "bias needs --moe-router-score-function sigmoid, as in Megatron-LM: pass both",
        )
        check_positive(self, "moe_expert_capacity_factor")
        self._check_groups(self.num_experts, self.moe_router_topk)
        self._check_balance()
        check(
            any(marked_layers("moe_layer_freq", self.moe_layer_freq, layers)),
            f"--moe-layer-freq {self.moe_layer_freq} has no layer with experts: "
            "leave out --num-experts",
        )

    def _check_groups(self, experts: int, topk: int) -> None:
        groups = self.moe_router_num_groups
        chosen = self.moe_router_group_topk
        if groups is None or chosen is None:
            return
        check(
            topk // chosen <= experts // groups,
            f"--moe-router-topk {topk} asks {chosen} groups of {experts // groups} experts "
            f"for {topk // chosen} each: lower it, or take more groups",
        )

    def _check_balance(self) -> None:
        kinds = self.moe_router_load_balancing_type
        factors = self.moe_aux_loss_coeff
        wrong = next((kind for kind in kinds if kind not in BALANCES), None)
        check(
            wrong is None,
            f"--moe-router-load-balancing-type {wrong} is not supported: pass {' or '.join(BALANCES)}",
        )
        check(
            len(kinds) == len(factors),
            f"--moe-router-load-balancing-type has {len(kinds)} words and --moe-aux-loss-coeff "
            f"{len(factors)} numbers: pass a number for each",
        )
        check(
            not self.sinkhorn
            or len(kinds) == 1
            and not any(factors)
            and not self.moe_router_enable_expert_bias
            and not self.moe_router_num_groups,
            "--moe-router-load-balancing-type sinkhorn excludes other types, --moe-aux-loss-coeff, "
            "--moe-router-enable-expert-bias and --moe-router-num-groups: pass it alone",
        )
        check(min(factors) >= 0, f"--moe-aux-loss-coeff is {min(factors)}: pass 0 or more")

    @cached_property
    def sinkhorn(self) -> bool:
        return SINKHORN in self.moe_router_load_balancing_type

    @cached_property
    def balances(self) -> tuple[tuple[str, float], ...]:
        pairs = zip(self.moe_router_load_balancing_type, self.moe_aux_loss_coeff)
        return tuple((kind, factor) for kind, factor in pairs if kind != NO_BALANCE and factor)
