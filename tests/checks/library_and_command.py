"""Losses with the command and with the library."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import fugaku_megatron as fm
from fugaku_megatron.api import trainer as process
from fugaku_megatron.cli.arguments import build_parser, interpret
from fugaku_megatron.comm.agreement import find_nodes
from fugaku_megatron.comm.base import Comm, SoloComm
from fugaku_megatron.config.fields import flag_words
from fugaku_megatron.observe.hang.watchdog import Watchdog
from fugaku_megatron.run.assemble import StartLog, assemble
from fugaku_megatron.run.checks import check_run
from fugaku_megatron.run.loop import Session
from fugaku_megatron.run.pretrain import find_sources, open_session
from fugaku_megatron.run.train_command import with_checkpoint_model
from fugaku_megatron.training import trainer as trainer_module
from tests.checks.library import FLAGS
from tests.checks.tables import read_rows
from tests.helpers import DROPOUT

RUN = {**FLAGS, "train_iters": 4, "eval_iters": 0, "split": "1,0,0"}
Losses = list[float]


def command(world: Comm, **flags: Any) -> Losses:
    """Return what a run with these flags gives as the command."""
    words = [
        word
        for name, value in {**RUN, **flags}.items()
        for word in (flag_words(name, value) if value is not None else ())
    ]
    return command_line(world, words)


def command_line(world: Comm, words: list[str]) -> Losses:
    """Return losses, gradient norms and validation losses of a run of `fugaku-megatron train WORDS`."""
    arguments = interpret(with_checkpoint_model(vars(build_parser().parse_args(words))))
    plan, _ = check_run(arguments.run, world)
    nodes = find_nodes(world)
    plan, sources = find_sources(plan, world, nodes)
    assembly = assemble(plan, world, nodes, sources)
    session = open_session(assembly, nodes, Watchdog.off(), StartLog())
    losses: Losses = []
    step = session.trainer.train_step

    def train_step() -> trainer_module.IterationResult:
        result = step()
        losses.extend((result.loss, result.grad_norm))
        return result

    session.trainer.train_step = train_step
    session.writer.validation = lambda _, loss, *rest: losses.append(loss)
    with contextlib.closing(session.trainer):
        session.run()
    return losses


def library(world: Comm, data=None, valid=None, **flags: Any) -> Losses:
    """Return the library's losses for `command`."""
    with contextlib.closing(trainer_of(world, data, valid, **flags)) as trainer:
        losses = []
        for step in trainer.steps():
            losses += [step.loss, step.grad_norm]
            run = trainer.config
            iteration = trainer.iteration
            start = run.start_eval_at_iter or 0
            if run.eval_iters and iteration >= start and iteration % run.eval_interval == 0:
                before = max(0, -(-start // run.eval_interval) - 1)
                losses.append(trainer.evaluate(iteration // run.eval_interval - 1 - before))
    return losses


RANK = threading.local()


def trainer_of(world: Comm, data=None, valid=None, **flags: Any) -> fm.Trainer:
    RANK.world = world
    values = {name: value for name, value in {**RUN, **flags}.items() if value is not None}
    if data is not None:
        values.pop("split", None)
    return fm.Trainer(fm.Config(**values), data, valid)


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    """Run ranks as threads, and draw no pictures."""
    torch.set_num_threads(1)
    monkeypatch.setattr(process, "world", lambda: getattr(RANK, "world", None) or SoloComm())
    monkeypatch.setattr(Session, "_draw", lambda *_: None)


HALF = {"split": "2,1,0", "eval_interval": 2, "eval_iters": 1}
# Layouts and flags that are in the command and in the library alike.
FEATURES = read_rows(
    Path(__file__).resolve().parents[1] / "api" / "features.txt",
    {"half": HALF, "dropout": DROPOUT, "steps": {"step_batch_size_schedule": "0:2 64:4"}},
)


VALUES: dict[str, Any] = {
    "save": "a",
    "save_interval": 1,
    "save_interval_in_mins": 1.0,
    "save_hf_interval": 1,
    "save_memory": 1,
    "save_memory_group": 3,
    "skip_train": True,
    "multiple_validation_sets": True,
    "log_interval": 1,
    "log_live": "off",
    "log_file": "a",
    "log_ranks": "a",
    "tensorboard_dir": "a",
    "wandb_project": "a",
    "wandb_exp_name": "a",
    "wandb_entity": "a",
    "wandb_save_dir": "a",
    "otel_enabled": True,
    "otel_service_name": "a",
    "otel_span_groups": "all",
    "profile": True,
    "profile_step_start": 4,
    "profile_step_end": 6,
    "profile_ranks": (0,),
    "profile_dir": "a",
    "allocator": "stock",
    "thread_affinity": "none",
    "cpu_frequency": 2.0,
    "use_flush_denormal": False,
    "hang_timeout_in_secs": 60.0,
}
# Fields that reach the trainer within the run, as a test above says.
WITHIN_THE_RUN = set(
    """
    moe_layer_freq moe_shared_expert_intermediate_size moe_shared_expert_gate
    moe_router_score_function moe_router_pre_softmax moe_router_topk_scaling_factor
    moe_router_num_groups moe_router_group_topk moe_router_enable_expert_bias
    moe_router_bias_update_rate moe_router_load_balancing_type moe_z_loss_coeff
    moe_expert_capacity_factor moe_token_drop_policy ffn_hidden_size max_position_embeddings
    padded_vocab_size mask_vocab_padding init_method_std normalization apply_layernorm_1p
    layernorm_epsilon geglu squared_relu activation_func bias_gelu_fusion openai_gelu use_z_loss z_loss_strength
    group_query_attention num_query_groups kv_channels add_qkv_bias qk_layernorm
    qk_layernorm_all_heads position_embedding_type rotary_base rotary_percent rotary_interleaved
    rotary_seq_len_interpolation_factor rotary_scaling_factor yarn_original_max_position_embeddings
    yarn_beta_fast yarn_beta_slow yarn_correction_range_round_to_int mscale mscale_all_dim
    use_rope_scaling rope_scaling_factor rope_scaling_low_freq_factor rope_scaling_high_freq_factor
    rope_scaling_original_max_position_embeddings rope_dynamic_factor
    longrope_short_factors longrope_long_factors longrope_attention_factor
    untie_embeddings_and_output_weights window_size window_attn_skip_freq window_rotary_base
    no_rope_freq layer_types norm_placement parallel_shared_norm attention_output_gate attn_logit_softcapping
    experimental_attention_variant linear_attention_freq linear_conv_kernel_dim linear_key_head_dim
    linear_value_head_dim linear_num_key_heads linear_num_value_heads
    final_logit_softcapping parallel_residual embedding_multiplier
    residual_multiplier attention_multiplier logits_scaling muon_no_split_qkv muon_scale_mode
    muon_extra_scale_factor muon_coefficient_type muon_num_ns_steps muon_tp_mode vocab_file
    merge_file tokenizer_model tiktoken_pattern tiktoken_num_special_tokens fp16_accumulation_chunk
    fp32_matmul quick_geglu glu_linear_offset activation_func_clamp_value xielu softmax_type
    mtp_num_layers mtp_loss_scaling_factor
    multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type
    latent_layernorm_epsilon
    fim_data fim_rate fim_spm_rate fim_split_sample fim_fragment_rate fim_no_prefix fim_prefix_token
    fim_middle_token fim_suffix_token fim_pad_token fim_eod_token
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split recompute_modules
    apply_wd_to_qk_layernorm
    """.split()
)
# Fields of Trainer.save: tests/api/test_sources.py.
OF_SAVES = {"save_retain_interval", "no_save_optim", "keep_last", "save_local", "async_save"}
