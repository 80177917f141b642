"""Recipes: published models as functions that return a RunConfig, without the parallel layout.

124M and 30B are runs of the benchmark tables. Recipes with a repository's name follow its
config.json on huggingface.co. If no paper states batch size and learning rate, they are GPT-3's for
that size (Brown et al. 2020, table 2.1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .data import DataConfig
from .fields import FieldValues
from .layer_kinds import GATED_DELTA_NET
from .model import ModelConfig
from .optimizer import OptimizerConfig
from .output import OutputConfig
from .run_config import RunConfig
from .training import BatchConfig, TrainingConfig

GPT2_VOCABULARY = 50257
Recipe = Callable[[], RunConfig]


def demo() -> RunConfig:
    """0.8 M parameters on the standard library's text: for `make train`."""
    return RunConfig(
        model=ModelConfig(
            num_layers=4,
            hidden_size=128,
            num_attention_heads=4,
            seq_length=128,
            make_vocab_size_divisible_by=64,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        ),
        batch=BatchConfig(micro_batch_size=2, global_batch_size=8),
        optimizer=OptimizerConfig(
            lr=3e-3,
            min_lr=3e-4,
            lr_decay_style="cosine",
            lr_warmup_fraction=0.03,
            weight_decay=0.1,
            adam_beta2=0.95,
        ),
        training=TrainingConfig(train_iters=1600, eval_interval=400, eval_iters=16),
        output=OutputConfig(log_interval=20, save_interval=400),
    )


def _pretraining(
    model: ModelConfig, lr: float, global_batch_size: int, train_iters: int
) -> RunConfig:
    return RunConfig(
        model=model,
        batch=BatchConfig(micro_batch_size=1, global_batch_size=global_batch_size),
        optimizer=OptimizerConfig(
            lr=lr,
            min_lr=lr / 10,
            lr_decay_style="cosine",
            lr_warmup_fraction=0.01,
            weight_decay=0.1,
            adam_beta2=0.95,
        ),
        training=TrainingConfig(train_iters=train_iters),
        output=OutputConfig(log_interval=1, save_interval=250),
    )


def _gpt(*, lr: float, global_batch_size: int, **model: Any) -> RunConfig:
    return _pretraining(
        ModelConfig(vocab_size=GPT2_VOCABULARY, **model), lr, global_batch_size, train_iters=95367
    )


def gpt_124m() -> RunConfig:
    """GPT-2 124M, as in the 124M tables."""
    return _gpt(
        num_layers=12,
        hidden_size=768,
        num_attention_heads=12,
        seq_length=1024,
        lr=6e-4,
        global_batch_size=1024,
    )


def gpt_1b3() -> RunConfig:
    """GPT-3 XL, 1.3B."""
    return _gpt(
        num_layers=24,
        hidden_size=2048,
        num_attention_heads=16,
        seq_length=2048,
        init_method_std=0.013,
        lr=2e-4,
        global_batch_size=512,
    )


def gpt_13b() -> RunConfig:
    """13B as Fugaku-LLM trained it."""
    return _gpt(
        num_layers=40,
        hidden_size=5184,
        num_attention_heads=36,
        seq_length=2048,
        init_method_std=0.008,
        lr=1e-4,
        global_batch_size=2016,
    )


def gpt_30b() -> RunConfig:
    """30B of the tables."""
    return _gpt(
        num_layers=48,
        hidden_size=7168,
        num_attention_heads=56,
        seq_length=2048,
        init_method_std=0.006,
        lr=1e-4,
        global_batch_size=1536,
    )


def _llama(*, lr: float, global_batch_size: int, **model: Any) -> RunConfig:
    """Return a run with RMS norm, SwiGLU and rotary positions, without biases and dropout."""
    block: FieldValues = {
        "normalization": "RMSNorm",
        "swiglu": True,
        "disable_bias_linear": True,
        "position_embedding_type": "rope",
        "group_query_attention": "num_query_groups" in model,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    return _pretraining(ModelConfig(**block, **model), lr, global_batch_size, train_iters=100_000)


_LLAMA_3: FieldValues = {
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "vocab_size": 128256,
    "seq_length": 8192,
    "max_position_embeddings": 131072,
    "rotary_base": 500000.0,
    "use_rope_scaling": True,
}


def llama_32_1b() -> RunConfig:
    """Llama 3.2 1B (meta-llama/Llama-3.2-1B)."""
    return _llama(
        **_LLAMA_3,
        num_layers=16,
        hidden_size=2048,
        ffn_hidden_size=8192,
        lr=2e-4,
        global_batch_size=128,
        rope_scaling_factor=32.0,
    )


def llama_31_8b() -> RunConfig:
    """Llama 3.1 8B (meta-llama/Llama-3.1-8B).

    Learning rate: Dubey et al. 2024, table 3; batches of 4 M tokens, as their largest model began with.
    """
    return _llama(
        **_LLAMA_3,
        num_layers=32,
        hidden_size=4096,
        ffn_hidden_size=14336,
        lr=3e-4,
        global_batch_size=512,
        rope_scaling_factor=8.0,
        untie_embeddings_and_output_weights=True,
    )


_QWEN: FieldValues = {
    "vocab_size": 151936,
    "seq_length": 4096,
    "rotary_base": 1e6,
    "layernorm_epsilon": 1e-6,
}


def qwen_25_05b() -> RunConfig:
    """Qwen2.5 0.5B (Qwen/Qwen2.5-0.5B)."""
    return _llama(
        **_QWEN,
        num_layers=24,
        hidden_size=896,
        ffn_hidden_size=4864,
        num_attention_heads=14,
        num_query_groups=2,
        lr=3e-4,
        global_batch_size=128,
        max_position_embeddings=32768,
        add_qkv_bias=True,
    )


def qwen_3_06b() -> RunConfig:
    """Qwen3 0.6B (Qwen/Qwen3-0.6B)."""
    return _llama(
        **_QWEN,
        num_layers=28,
        hidden_size=1024,
        ffn_hidden_size=3072,
        num_attention_heads=16,
        num_query_groups=8,
        lr=2.5e-4,
        global_batch_size=128,
        kv_channels=128,
        max_position_embeddings=40960,
        qk_layernorm=True,
    )


def tinyllama_11b() -> RunConfig:
    """TinyLlama 1.1B (TinyLlama/TinyLlama_v1.1); trained as in Zhang et al. 2024."""
    return _llama(
        num_layers=22,
        hidden_size=2048,
        ffn_hidden_size=5632,
        num_attention_heads=32,
        num_query_groups=4,
        vocab_size=32000,
        seq_length=2048,
        lr=4e-4,
        global_batch_size=1024,
        untie_embeddings_and_output_weights=True,
    )


_MISTRAL: FieldValues = {
    "num_layers": 32,
    "hidden_size": 4096,
    "ffn_hidden_size": 14336,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "untie_embeddings_and_output_weights": True,
}


def mistral_7b() -> RunConfig:
    """Mistral 7B (mistralai/Mistral-7B-v0.1)."""
    return _llama(
        **_MISTRAL,
        seq_length=8192,
        lr=1.2e-4,
        global_batch_size=256,
        window_size="4095,0",
    )


def qwen_3_30b_a3b() -> RunConfig:
    """Qwen3 30B-A3B (Qwen/Qwen3-30B-A3B)."""
    return _llama(
        **_QWEN,
        num_layers=48,
        hidden_size=2048,
        ffn_hidden_size=6144,
        num_attention_heads=32,
        num_query_groups=4,
        lr=3e-4,
        global_batch_size=1024,
        kv_channels=128,
        max_position_embeddings=40960,
        qk_layernorm=True,
        untie_embeddings_and_output_weights=True,
        num_experts=128,
        moe_router_topk=8,
        moe_ffn_hidden_size=768,
        moe_aux_loss_coeff=(1e-3,),
    )


_LLM_JP_4: FieldValues = {
    "num_layers": 32,
    "vocab_size": 196608,
    "seq_length": 4096,
    "max_position_embeddings": 4096,
    "rotary_base": 500000.0,
    "layernorm_epsilon": 1e-6,
    "untie_embeddings_and_output_weights": True,
}


def llm_jp_4_8b() -> RunConfig:
    """LLM-jp-4 8B (llm-jp/llm-jp-4-8b-base) before its context was extended.

    Sizes follow from the numbers of parameters in its model card.
    """
    return _llama(
        **_LLM_JP_4,
        hidden_size=4096,
        ffn_hidden_size=14336,
        num_attention_heads=32,
        num_query_groups=8,
        lr=1.2e-4,
        global_batch_size=512,
    )


def llm_jp_4_32b_a3b() -> RunConfig:
    """LLM-jp-4 32B-A3B (llm-jp/llm-jp-4-32b-a3b-base) before its context was extended.

    Trained as its script in llm-jp/scripts says.
    """
    return _llama(
        **_LLM_JP_4,
        hidden_size=2560,
        ffn_hidden_size=960,
        num_attention_heads=40,
        num_query_groups=4,
        kv_channels=128,
        qk_layernorm=True,
        num_experts=128,
        moe_router_topk=8,
        moe_ffn_hidden_size=960,
        moe_aux_loss_coeff=(1e-2,),
        moe_z_loss_coeff=1e-3,
        init_method_std=0.006,
        lr=4e-4,
        global_batch_size=1024,
    )


_QWEN_36: FieldValues = {
    "vocab_size": 248320,
    "seq_length": 4096,
    "max_position_embeddings": 262144,
    "kv_channels": 256,
    "rotary_base": 1e7,
    "rotary_percent": 0.25,
    "layernorm_epsilon": 1e-6,
    "apply_layernorm_1p": True,
    "qk_layernorm": True,
    "attention_output_gate": True,
    "experimental_attention_variant": GATED_DELTA_NET,
    "linear_attention_freq": "4",
    "untie_embeddings_and_output_weights": True,
}


def qwen_36_27b() -> RunConfig:
    """Qwen3.6 27B (Qwen/Qwen3.6-27B)."""
    return _llama(
        **_QWEN_36,
        num_layers=64,
        hidden_size=5120,
        ffn_hidden_size=17408,
        num_attention_heads=24,
        num_query_groups=4,
        linear_num_value_heads=48,
        lr=1e-4,
        global_batch_size=256,
    )


def qwen_36_35b_a3b() -> RunConfig:
    """Qwen3.6 35B-A3B (Qwen/Qwen3.6-35B-A3B)."""
    return _llama(
        **_QWEN_36,
        num_layers=40,
        hidden_size=2048,
        num_attention_heads=16,
        num_query_groups=2,
        num_experts=256,
        moe_router_topk=8,
        moe_ffn_hidden_size=512,
        moe_shared_expert_intermediate_size=512,
        moe_shared_expert_gate=True,
        moe_aux_loss_coeff=(1e-3,),
        lr=1e-4,
        global_batch_size=256,
    )


def olmoe() -> RunConfig:
    """OLMoE 1B-7B (allenai/OLMoE-1B-7B-0924).

    Trained as in Muennighoff et al. 2024 (arXiv:2409.02060), table 10.
    """
    return _llama(
        num_layers=16,
        hidden_size=2048,
        ffn_hidden_size=1024,
        num_attention_heads=16,
        vocab_size=50304,
        seq_length=4096,
        lr=4e-4,
        global_batch_size=1024,
        qk_layernorm=True,
        qk_layernorm_all_heads=True,
        untie_embeddings_and_output_weights=True,
        num_experts=64,
        moe_router_topk=8,
        moe_router_pre_softmax=True,
        moe_aux_loss_coeff=(1e-2,),
        moe_z_loss_coeff=1e-3,
    )


def mixtral_8x7b() -> RunConfig:
    """Mixtral 8x7B (mistralai/Mixtral-8x7B-v0.1)."""
    return _llama(
        **_MISTRAL,
        seq_length=4096,
        lr=1e-4,
        global_batch_size=256,
        rotary_base=1e6,
        num_experts=8,
        moe_router_topk=2,
        moe_aux_loss_coeff=(1e-2,),
    )


def _on_chats(published: Recipe, how: str, lr: float, style: str, warmup: float) -> Recipe:
    def recipe() -> RunConfig:
        model = published().model
        return RunConfig(
            model=replace(model, seq_length=min(4096, model.seq_length)),
            data=DataConfig(sft=True),
            batch=BatchConfig(micro_batch_size=1, global_batch_size=128),
            optimizer=OptimizerConfig(
                lr=lr, lr_decay_style=style, lr_warmup_fraction=warmup, weight_decay=0.0
            ),
            training=TrainingConfig(train_iters=1000, eval_interval=100, eval_iters=4),
            output=OutputConfig(log_interval=1, save_interval=100),
        )

    name = (published.__doc__ or "").split(" (")[0]
    recipe.__doc__ = f"{name}, all of it fine-tuned on chats as {how}."
    return recipe


def _as_zephyr(published: Recipe) -> Recipe:
    return _on_chats(
        published,
        "Zephyr 7B was (huggingface/alignment-handbook, recipes/zephyr-7b-beta/sft/config_full.yaml)",
        lr=2e-5,
        style="cosine",
        warmup=0.1,
    )


def _as_tulu(published: Recipe) -> Recipe:
    return _on_chats(
        published,
        "Tulu 3 8B was (Lambert et al. 2024; allenai/open-instruct has the command)",
        lr=5e-6,
        style="linear",
        warmup=0.03,
    )


RECIPES: dict[str, Recipe] = {
    "demo": demo,
    "124m": gpt_124m,
    "1.3b": gpt_1b3,
    "13b": gpt_13b,
    "30b": gpt_30b,
    "llama-3.2-1b": llama_32_1b,
    "llama-3.1-8b": llama_31_8b,
    "qwen2.5-0.5b": qwen_25_05b,
    "qwen3-0.6b": qwen_3_06b,
    "tinyllama-1.1b": tinyllama_11b,
    "mistral-7b": mistral_7b,
    "qwen3-30b-a3b": qwen_3_30b_a3b,
    "llm-jp-4-8b": llm_jp_4_8b,
    "llm-jp-4-32b-a3b": llm_jp_4_32b_a3b,
    "qwen3.6-27b": qwen_36_27b,
    "qwen3.6-35b-a3b": qwen_36_35b_a3b,
    "olmoe": olmoe,
    "mixtral": mixtral_8x7b,
    "qwen2.5-0.5b-sft": _as_zephyr(qwen_25_05b),
    "qwen3-0.6b-sft": _as_zephyr(qwen_3_06b),
    "tinyllama-1.1b-sft": _as_zephyr(tinyllama_11b),
    "llama-3.2-1b-sft": _as_zephyr(llama_32_1b),
    "mistral-7b-sft": _as_zephyr(mistral_7b),
    "llama-3.1-8b-sft": _as_tulu(llama_31_8b),
}
