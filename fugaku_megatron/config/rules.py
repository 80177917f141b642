"""Rules between flags in a group: flags that need others, exclude each other, or bound each other's values."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

from .fields import check_fields, flag, shortened
from .rows import ACTIVATIONS

Rule = Callable[[Any], str | None]  # config -> message, or None if the rule holds


def needs(name: str, other: str, end: str = ": pass both", with_value: bool = False) -> Rule:
    def mistake(config: Any) -> str | None:
        value = getattr(config, name)
        if not value or getattr(config, other):
            return None
        given = f"{flag(name)} {value}" if with_value else flag(name)
        return f"{given} needs {flag(other)}{end}"

    return mistake


def one_of(*names: str, unless: str = "") -> Rule:
    """Return the rule that at most one field is set, unless `unless` is."""

    def mistake(config: Any) -> str | None:
        given = [flag(name) for name in names if getattr(config, name)]
        if len(given) < 2 or (unless and getattr(config, unless)):
            return None
        return f"{' and '.join(given)} exclude each other: pass one"

    return mistake


def both_or_neither(name: str, other: str) -> Rule:
    def mistake(config: Any) -> str | None:
        value = getattr(config, name)
        other_value = getattr(config, other)
        if (value is None) == (other_value is None):
            return None
        return f"{flag(name)} is {value} and {flag(other)} is {other_value}: pass both or neither"

    return mistake


def _compared(
    name: str, other: str, remedy: str, *, relation: str, holds: Callable[[Any, Any], bool]
) -> Rule:
    """Return a rule between two values. relation: between values that break the rule"""

    def mistake(config: Any) -> str | None:
        value = getattr(config, name)
        bound = getattr(config, other)
        if value is None or bound is None or holds(value, bound):
            return None
        return f"{flag(name)} {value} is {relation} {flag(other)} {bound}: {remedy}"

    return mistake


at_most = partial(_compared, relation="above", holds=operator.le)
at_least = partial(_compared, relation="below", holds=operator.ge)
above = partial(_compared, relation="not above", holds=operator.gt)
divisible = partial(_compared, relation="not divisible by", holds=lambda a, b: a % b == 0)

# Class of a group of RunConfig -> its rules.
RULES: dict[str, tuple[Rule, ...]] = {
    "ModelConfig": (
        one_of(
            *(row.flag for row in ACTIVATIONS.values() if row.flag and not row.gelu),
            "activation_func",
        ),
        needs("glu_linear_offset", "quick_geglu", with_value=True),
        needs("activation_func_clamp_value", "quick_geglu", with_value=True),
        needs("window_attn_skip_freq", "window_size"),
        needs("window_rotary_base", "window_size"),
        needs("parallel_shared_norm", "parallel_residual"),
        at_least("padded_vocab_size", "vocab_size", "raise it, or leave it out"),
        divisible("num_attention_heads", "num_query_groups", "change one of them"),
        above(
            "rope_scaling_high_freq_factor", "rope_scaling_low_freq_factor", "change one of them"
        ),
        at_most("moe_router_topk", "num_experts", "lower it"),
        needs("moe_shared_expert_gate", "moe_shared_expert_intermediate_size"),
        both_or_neither("moe_router_num_groups", "moe_router_group_topk"),
        divisible("num_experts", "moe_router_num_groups", "change one"),
        at_most("moe_router_group_topk", "moe_router_num_groups", "lower it"),
        divisible("moe_router_topk", "moe_router_group_topk", "change one"),
        divisible("linear_num_value_heads", "linear_num_key_heads", "change one of them"),
        at_most("mtp_num_layers", "num_layers", "lower it"),
    ),
    "ParallelConfig": (
        one_of("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage"),
        needs("tp_comm_overlap", "sequence_parallel"),
        needs("overlap_param_gather", "overlap_grad_reduce"),
    ),
    "BatchConfig": (one_of("step_batch_size_schedule", "rampup_batch_size"),),
    "OptimizerConfig": (
        at_most("min_lr", "lr", "lower it"),
        at_most("lr_warmup_init", "lr", "lower it"),
        one_of("lr_decay_iters", "lr_decay_samples", "lr_decay_tokens"),
        one_of("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_tokens"),
        # In the forks with --lr-warmup-tokens, it takes precedence over a fraction.
        one_of(
            "lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction", unless="lr_warmup_tokens"
        ),
        one_of("lr_wsd_decay_iters", "lr_wsd_decay_samples"),
    ),
    "PrecisionConfig": (
        one_of("bf16", "fp16"),
        at_most("min_loss_scale", "initial_loss_scale", "lower it"),
    ),
    "TrainingConfig": (
        needs("multiple_validation_sets", "full_validation", ", as in Megatron-LM: pass both"),
    ),
    "DataConfig": (
        one_of(
            "mock_data",
            "data_path",
            "train_data_path",
            "data_args_path",
            "per_split_data_args_path",
        ),
    ),
    "OutputConfig": (
        needs(
            "wandb_project", "wandb_exp_name", ", the name of the run: pass both", with_value=True
        ),
        needs("ckpt_step", "load", ", the directory it is in", with_value=True),
        one_of("keep_last", "save_retain_interval"),
        needs("exit_on_missing_checkpoint", "load", ", the directory of the checkpoint"),
        needs("use_checkpoint_args", "load", ", the directory of the checkpoint"),
        above("profile_step_end", "profile_step_start", "raise it"),
    ),
}


class CheckedFields:
    """Base of the groups of a run's flags: ValueError for a field out of range, then for a broken rule, then from `_check`."""

    def __post_init__(self) -> None:
        check_fields(self)
        self._derive()
        for rule in RULES.get(type(self).__name__, ()):
            if mistake := rule(self):
                raise ValueError(shortened(mistake))
        self._check()

    def _derive(self) -> None:
        """Set the fields that other fields decide."""

    def _check(self) -> None:
        """Raise ValueError for other mistakes."""
