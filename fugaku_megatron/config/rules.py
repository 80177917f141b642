"""Rules between flags: flags that need others, and flags that replace others."""

from __future__ import annotations

from collections.abc import Callable

from ..pipeline.schedule_names import AUTO
from .data import TIKTOKEN
from .experts import EXPERTS
from .model import ROPE, ROPE_SCALING, SCALINGS, YARN, YARN_SCALING
from .optimizer import MUON_FLAGS
from .run_config import RunConfig
from .training import RECOMPUTE

# What a run needs to have for these fields to mean anything, whether it has it, and the fields.
NEEDS: tuple[tuple[str, Callable[[RunConfig], bool], tuple[str, ...]], ...] = (
    (
        "--tensor-model-parallel-size above 1",
        lambda run: run.parallel.tensor_model_parallel_size > 1,
        ("sequence_parallel", "tp_comm_overlap"),
    ),
    ("--group-query-attention", lambda run: run.model.group_query_attention, ("num_query_groups",)),
    (
        "--position-embedding-type rope",
        lambda run: run.model.position_embedding_type == ROPE,
        ("rotary_percent", "rotary_interleaved", *SCALINGS, ROPE_SCALING[-1]),
    ),
    ("--position-embedding-type rope or yarn", lambda run: run.model.rotary, ("rotary_base",)),
    (
        "--position-embedding-type yarn",
        lambda run: run.model.position_embedding_type == YARN,
        YARN_SCALING,
    ),
    ("--use-z-loss", lambda run: run.model.use_z_loss, ("z_loss_strength",)),
    (
        "a GELU in the MLP",
        lambda run: "gelu" in run.model.activation,
        ("bias_gelu_fusion", "openai_gelu"),
    ),
    ("--num-experts", lambda run: run.model.num_experts is not None, EXPERTS[1:]),
    (
        "--moe-router-enable-expert-bias",
        lambda run: run.model.moe_router_enable_expert_bias,
        ("moe_router_bias_update_rate",),
    ),
    (
        "--moe-expert-capacity-factor",
        lambda run: run.model.moe_expert_capacity_factor is not None,
        ("moe_token_drop_policy",),
    ),
    ("--optimizer muon", lambda run: run.optimizer.muon, MUON_FLAGS),
    ("--decoupled-lr", lambda run: run.optimizer.decoupled_lr is not None, ("decoupled_min_lr",)),
    ("--use-rope-scaling", lambda run: run.model.use_rope_scaling, ROPE_SCALING[:-1]),
    (
        "--fp16",
        lambda run: run.precision.fp16,
        ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
    ),
    (
        "--recompute-granularity full",
        lambda run: run.training.recompute_granularity == "full",
        RECOMPUTE[1:],
    ),
    (
        "--recompute-auto or --pipeline-schedule auto",
        lambda run: run.training.recompute_auto or run.parallel.pipeline_schedule == AUTO,
        ("memory_per_rank",),
    ),
    (
        "--lr-decay-style WSD",
        lambda run: run.optimizer.lr_decay_style == "WSD",
        ("lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples"),
    ),
    (
        "--load",
        lambda run: run.output.load is not None,
        ("no_load_optim", "no_load_lr_state", "finetune"),
    ),
    (
        "--profile",
        lambda run: run.output.profile,
        ("profile_step_start", "profile_step_end", "profile_ranks", "profile_dir"),
    ),
    ("--rerun-on-spike", lambda run: run.numbers.rerun_on_spike, ("loss_spike_deviations",)),
    ("--vocab-file or --tokenizer-model", lambda run: run.data.has_tokenizer, ("tokenizer_type",)),
    (
        "--tokenizer-type TikTokenizer",
        lambda run: run.data.tokenizer_type == TIKTOKEN,
        ("tiktoken_pattern", "tiktoken_num_special_tokens"),
    ),
    ("--data-path", lambda run: run.data.data_path is not None, ("split", "legacy_split")),
    ("--sft", lambda run: run.data.sft, ("sft_truncate",)),
    (
        "--save",
        lambda run: run.output.save is not None,
        (
            "save_interval",
            "save_interval_in_mins",
            "keep_last",
            "save_retain_interval",
            "no_save_optim",
            "async_save",
            "save_local",
        ),
    ),
    (
        "--lora-rank",
        lambda run: run.lora.on,
        ("lora_alpha", "lora_dropout", "lora_target", "lora_use_rslora"),
    ),
    (
        "--wandb-project",
        lambda run: run.output.wandb_project is not None,
        ("wandb_exp_name", "wandb_entity"),
    ),
)

# What a field needs another one to be left out for: the one that wins, and the one that then has no effect.
WINS = (("lr_warmup_tokens", "lr_warmup_fraction"),)
