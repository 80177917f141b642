"""Flags without effect, for want of another one or because one takes precedence."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from ..pipeline.schedule_names import AUTO
from .data import TIKTOKEN
from .delta_net import DELTA_SIZES
from .experts import EXPERTS
from .fields import flag
from .model import ROPE, ROPE_SCALING, SCALINGS, YARN, YARN_SCALING
from .optimizer import MUON_FLAGS
from .run_config import RunConfig
from .training import RECOMPUTE


class Requirement(NamedTuple):
    """Condition without which some fields have no effect. text: for a message"""

    text: str
    is_met: Callable[[RunConfig], bool]
    names: tuple[str, ...]


def _when_set(name: str, *names: str) -> Requirement:
    return Requirement(flag(name), lambda run: bool(run.values[name]), names)


def _when_equal(name: str, value: str, *names: str) -> Requirement:
    return Requirement(f"{flag(name)} {value}", lambda run: bool(run.values[name] == value), names)


REQUIREMENTS = (
    Requirement(
        "--tensor-model-parallel-size above 1",
        lambda run: run.parallel.tensor_model_parallel_size > 1,
        ("sequence_parallel", "tp_comm_overlap"),
    ),
    _when_set("group_query_attention", "num_query_groups"),
    _when_equal(
        "position_embedding_type",
        ROPE,
        "rotary_percent",
        "rotary_interleaved",
        *SCALINGS,
        ROPE_SCALING[-1],
    ),
    Requirement(
        "--position-embedding-type rope or yarn", lambda run: run.model.rotary, ("rotary_base",)
    ),
    _when_equal("position_embedding_type", YARN, *YARN_SCALING),
    _when_set("use_z_loss", "z_loss_strength"),
    Requirement(
        "a GELU in the MLP",
        lambda run: "gelu" in run.model.activation,
        ("bias_gelu_fusion", "openai_gelu"),
    ),
    _when_set("num_experts", *EXPERTS[1:]),
    _when_set("experimental_attention_variant", "linear_attention_freq"),
    Requirement("a gated delta net", lambda run: run.model.has_delta_nets, DELTA_SIZES),
    _when_set("moe_router_enable_expert_bias", "moe_router_bias_update_rate"),
    _when_set("moe_expert_capacity_factor", "moe_token_drop_policy"),
    Requirement("--optimizer muon", lambda run: run.optimizer.muon, MUON_FLAGS),
    _when_set("decoupled_lr", "decoupled_min_lr"),
    _when_set("use_rope_scaling", *ROPE_SCALING[:-1]),
    _when_set(
        "fp16",
        "loss_scale",
        "initial_loss_scale",
        "min_loss_scale",
        "loss_scale_window",
        "hysteresis",
    ),
    _when_equal("recompute_granularity", "full", *RECOMPUTE[1:]),
    Requirement(
        "--recompute-auto or --pipeline-schedule auto",
        lambda run: run.training.recompute_auto or run.parallel.pipeline_schedule == AUTO,
        ("memory_per_rank",),
    ),
    _when_equal(
        "lr_decay_style",
        "WSD",
        "lr_wsd_decay_style",
        "lr_wsd_decay_iters",
        "lr_wsd_decay_samples",
    ),
    _when_set("load", "no_load_optim", "no_load_lr_state", "finetune"),
    _when_set("profile", "profile_step_start", "profile_step_end", "profile_ranks", "profile_dir"),
    _when_set("rerun_on_spike", "loss_spike_deviations"),
    Requirement(
        "--vocab-file or --tokenizer-model",
        lambda run: run.data.has_tokenizer,
        ("tokenizer_type",),
    ),
    _when_equal("tokenizer_type", TIKTOKEN, "tiktoken_pattern", "tiktoken_num_special_tokens"),
    _when_set("data_path", "split", "legacy_split"),
    _when_set("sft", "sft_truncate"),
    _when_set(
        "save",
        "save_interval",
        "save_interval_in_mins",
        "keep_last",
        "save_retain_interval",
        "no_save_optim",
        "async_save",
        "save_local",
    ),
    _when_set("lora_rank", "lora_alpha", "lora_dropout", "lora_target", "lora_use_rslora"),
    _when_set("wandb_project", "wandb_exp_name", "wandb_entity"),
    _when_set("otel_enabled", "otel_service_name", "otel_span_groups"),
)

# A field that takes precedence, and the field that then has no effect.
PRECEDENCES = (("lr_warmup_tokens", "lr_warmup_fraction"),)


def no_effect_notes(
    run: RunConfig, values: Mapping[str, Any], passed: Collection[str] | None
) -> list[str]:
    """Return a note for each given value without effect.

    passed: fields that notes may mention; None: all of `values`
    """
    notes = []
    for text, is_met, names in REQUIREMENTS:
        if not is_met(run):
            notes += [
                f"{flag(name)} has no effect without {text}"
                for name in names
                if name in values and (passed is None or name in passed)
            ]
    for winner, loser in PRECEDENCES:
        if values.get(winner) and values.get(loser):
            notes.append(f"{flag(loser)} has no effect with {flag(winner)}, which wins")
    return notes
