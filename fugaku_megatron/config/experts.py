"""The experts of a model whose layers choose among several MLPs for each token, as fields of `model_config.ModelConfig`.

Names and meaning are those of Megatron-LM (megatron/core/transformer/transformer_config.py). Left out: how tokens are sent between
ranks, since every rank has all experts, split over tensor-parallel ranks as other matrices are.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

from .fields import check, check_positive, opt

NO_BALANCE, AUX, SEQUENCE_AUX, SINKHORN = BALANCES = (
    "none",
    "aux_loss",
    "seq_aux_loss",
    "sinkhorn",
)


SOFTMAX, SIGMOID = SCORES = ("softmax", "sigmoid")


MAX_PATTERN = 4096  # layers


@dataclass(frozen=True, kw_only=True)
class ExpertFields:
    """Experts instead of the MLP. They are all at their defaults in a model without --num-experts."""

    num_experts: int | None = opt(
        None,
        "experts of a layer, of which each token goes through --moe-router-topk (default: one MLP "
        "for all tokens)",
        type=int,
        maximum=2**12,
    )
    moe_layer_freq: str = opt(
        "1",
        "layers with experts: every Nth from the first, or a list of 0 and 1 for all layers, such as "
        "([0]*1+[1]*23)",
    )
    moe_ffn_hidden_size: int | None = opt(
        None, "width of each expert (default: --ffn-hidden-size)", type=int, maximum=2**22
    )
    moe_shared_expert_intermediate_size: int | None = opt(
        None,
        "width of a shared expert that every token goes through (default: none)",
        type=int,
        maximum=2**22,
    )
    moe_shared_expert_gate: bool = opt(
        False,
        "multiply the shared expert's result by the sigmoid of a number for each token, as "
        "Qwen2-MoE does",
    )
    moe_router_topk: int = opt(2, "number of experts that each token goes through", maximum=2**12)
    moe_router_score_function: str = opt(
        SOFTMAX, "function that turns the router's logits into scores", choices=SCORES
    )
    moe_router_pre_softmax: bool = opt(
        False,
        "softmax over all experts, whose scores are not normalised again over the chosen "
        "ones; otherwise over the chosen ones",
    )
    moe_router_topk_scaling_factor: float | None = opt(
        None, "multiply the scores of the chosen experts by this", type=float
    )
    moe_router_num_groups: int | None = opt(
        None,
        "groups of experts, of which a token takes the best --moe-router-group-topk, and "
        "experts in these alone",
        type=int,
        maximum=2**12,
    )
    moe_router_group_topk: int | None = opt(
        None,
        "groups that the experts of a token are in, for --moe-router-num-groups",
        type=int,
        maximum=2**12,
    )
    moe_router_enable_expert_bias: bool = opt(
        False,
        "choose experts by score + bias, and raise the bias of those with fewer "
        "tokens than the mean after each iteration, for a balance without a loss",
    )
    moe_router_bias_update_rate: float = opt(
        1e-3, "by how much --moe-router-enable-expert-bias changes a bias in an iteration"
    )
    moe_router_load_balancing_type: tuple[str, ...] = opt(
        (AUX,),
        "balancing losses, each counted per micro-batch: aux_loss, "
        "seq_aux_loss (of each sequence by itself) or none; or sinkhorn, without "
        "a loss: training chooses experts evenly",
        type=str,
        nargs="+",
    )
    moe_aux_loss_coeff: tuple[float, ...] = opt(
        (0.0,), "factor of each balancing loss", type=float, nargs="+"
    )
    moe_z_loss_coeff: float | None = opt(
        None,
        "add this x the mean of (log of the router's softmax denominator)^2 to the loss",
        type=float,
    )
    moe_expert_capacity_factor: float | None = opt(
        None,
        "an expert takes at most this x the mean number of tokens of a "
        "micro-batch and drops the rest (default: all)",
        type=float,
    )
    moe_token_drop_policy: str = opt(
        "probs",
        "which tokens an expert drops: those with the lowest scores, or the last ones of the sequence or chat",
        choices=("probs", "position"),
    )

    def _derive_experts(self, width: int) -> None:
        """Set what was not given; without experts every field has its default. width: of a dense MLP."""
        for field in fields(ExpertFields) if self.num_experts is None else ():
            object.__setattr__(self, field.name, field.default)
        if self.num_experts is not None and self.moe_ffn_hidden_size is None:
            object.__setattr__(self, "moe_ffn_hidden_size", width)
        if (
            self.moe_expert_capacity_factor is not None and self.moe_expert_capacity_factor < 0
        ):  # as in Megatron-LM
            object.__setattr__(self, "moe_expert_capacity_factor", None)

    def _check_experts(self, layers: int, bias: bool) -> None:
        """Raise ValueError where the flags contradict each other. bias: linear layers have biases."""
        if self.num_experts is None:
            return
        experts, topk = self.num_experts, self.moe_router_topk
        check(
            topk <= experts, f"--moe-router-topk {topk} is above --num-experts {experts}: lower it"
        )
        check(
            not bias,
            "--num-experts supports only experts without biases: pass --disable-bias-linear",
        )
        scored = (
            self.moe_router_score_function == SIGMOID
            or self.moe_router_pre_softmax
            or self.sinkhorn
        )
        check(
            topk > 1 or scored,
            "--moe-router-topk 1 needs --moe-router-pre-softmax, as in Megatron-LM: the softmax over one "
            "chosen expert is always 1",
        )
        check(
            not self.moe_router_enable_expert_bias or self.moe_router_score_function == SIGMOID,
            "--moe-router-enable-expert-"
            "bias needs --moe-router-score-function sigmoid, as in Megatron-LM: pass both",
        )
        check(
            not self.moe_shared_expert_gate or self.moe_shared_expert_intermediate_size,
            "--moe-shared-expert-gate needs --moe-shared-expert-intermediate-size: pass both",
        )
        check_positive(self, "moe_expert_capacity_factor")
        check(
            (self.moe_z_loss_coeff or 0.0) >= 0,
            f"--moe-z-loss-coeff is {self.moe_z_loss_coeff}: pass 0 or more",
        )
        self._check_groups(experts, topk)
        self._check_balance()
        check(
            any(experts_in(self.moe_layer_freq, layers)),
            f"--moe-layer-freq {self.moe_layer_freq} has no layer with experts: "
            "leave out --num-experts",
        )

    def _check_groups(self, experts: int, topk: int) -> None:
        groups, chosen = self.moe_router_num_groups, self.moe_router_group_topk
        check(
            (groups is None) == (chosen is None),
            f"--moe-router-num-groups is {groups} and --moe-router-group-topk is {chosen}: "
            "pass both or neither",
        )
        if groups is None or chosen is None:
            return
        check(
            experts % groups == 0,
            f"--num-experts {experts} is not divisible by --moe-router-num-groups {groups}: change one",
        )
        check(
            chosen <= groups,
            f"--moe-router-group-topk {chosen} is above --moe-router-num-groups {groups}: lower it",
        )
        check(
            topk % chosen == 0,
            f"--moe-router-topk {topk} is not divisible by --moe-router-group-topk {chosen}: change one",
        )
        check(
            topk // chosen <= experts // groups,
            f"--moe-router-topk {topk} asks {chosen} groups of {experts // groups} experts "
            f"for {topk // chosen} each: lower it, or take more groups",
        )

    def _check_balance(self) -> None:
        kinds, factors = self.moe_router_load_balancing_type, self.moe_aux_loss_coeff
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

    @property
    def sinkhorn(self) -> bool:
        """Whether experts are chosen evenly in training, see `nn.router.evenly`."""
        return SINKHORN in self.moe_router_load_balancing_type

    @property
    def balances(self) -> tuple[tuple[str, float], ...]:
        """(kind, factor) of each balancing loss that has an effect."""
        pairs = zip(self.moe_router_load_balancing_type, self.moe_aux_loss_coeff)
        return tuple((kind, factor) for kind, factor in pairs if kind != NO_BALANCE and factor)


@dataclass(frozen=True, kw_only=True)
class ExpertRanks:
    """How ranks share layers and experts, as fields of `groups.ParallelConfig`."""

    tensor_model_parallel_size: int = opt(
        1,
        "ranks that share each layer's matrices (TP)",
        aliases=("--model-parallel-size",),
        maximum=2**16,
    )
    expert_model_parallel_size: int = opt(
        1,
        "ranks that have different experts (EP): tokens are sent to their experts' ranks and "
        "back; they are data-parallel ranks, or with --expert-tensor-parallel-size 1 "
        "tensor-parallel ones, too",
        maximum=2**12,
    )
    expert_tensor_parallel_size: int | None = opt(
        None,
        "ranks that share each expert's matrices: 1, or the tensor-parallel size (default)",
        type=int,
        maximum=2**16,
    )

    def _check_expert_ranks(self, sequence_parallel: bool) -> None:
        tp, etp = self.tensor_model_parallel_size, self.expert_tensor_parallel_size
        check(
            etp in (None, 1, tp),
            f"--expert-tensor-parallel-size {etp} is not supported: pass 1, or "
            f"--tensor-model-parallel-size, which is {tp}",
        )
        check(
            not self.divides_experts or tp == 1 or sequence_parallel,
            f"{self.dividing_flag} with --tensor-model-parallel-size "
            f"{tp} needs --sequence-parallel, so that every rank sends other tokens: pass it",
        )

    @property
    def divides_experts(self) -> bool:
        """Whether the ranks of a stage hold experts in another way than other matrices."""
        etp = self.expert_tensor_parallel_size
        return self.expert_model_parallel_size > 1 or etp not in (
            None,
            self.tensor_model_parallel_size,
        )

    @property
    def dividing_flag(self) -> str:
        """The flag that divides them, with its value."""
        ep, etp = self.expert_model_parallel_size, self.expert_tensor_parallel_size
        return (
            f"--expert-model-parallel-size {ep}"
            if ep > 1
            else f"--expert-tensor-parallel-size {etp}"
        )


@lru_cache(maxsize=64)  # of every layer, again and again
def experts_in(pattern: str, layers: int) -> tuple[bool, ...]:
    """Which layers --moe-layer-freq names. ValueError, one line, for a text that is neither a number nor such a list."""
    mistake = f"--moe-layer-freq {pattern!r:.60}: pass a number above 0, or a list of 0 and 1, such as ([0]*1+[1]*23)"
    try:
        found = _value(ast.parse(pattern.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(mistake) from None
    if isinstance(found, int):
        check(found > 0, mistake)
        return tuple(layer % found == 0 for layer in range(layers))
    check(all(x in (0, 1) for x in found), mistake)
    check(
        len(found) == layers,
        f"--moe-layer-freq {pattern:.60} has {len(found)} layers, and --num-layers is {layers}: change one",
    )
    return tuple(map(bool, found))


def _value(node: ast.expr) -> int | Sequence[int]:
    """A whole number, a list of them, or lists that are added or repeated; nothing else is evaluated."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        numbers = [_value(element) for element in node.elts]
        if all(isinstance(number, int) for number in numbers):
            return [number for number in numbers if isinstance(number, int)]
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if (
            isinstance(node.op, ast.Add)
            and not isinstance(left, int)
            and not isinstance(right, int)
        ):
            return _short([*left, *right])
        if isinstance(node.op, ast.Mult):
            times, part = (left, right) if isinstance(left, int) else (right, left)
            if (
                isinstance(times, int)
                and not isinstance(part, int)
                and 0 <= times * len(part) <= MAX_PATTERN
            ):
                return _short([*part] * times)
    raise ValueError(ast.dump(node))


def _short(numbers: list[int]) -> list[int]:
    if len(numbers) > MAX_PATTERN:
        raise ValueError(len(numbers))
    return numbers


EXPERTS = tuple(field.name for field in fields(ExpertFields))


# What decides the course of training, and not what the weights mean.
BALANCE = (
    "moe_router_bias_update_rate",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
)


CAPACITY = ("moe_expert_capacity_factor", "moe_token_drop_policy")
