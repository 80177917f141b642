"""Fields of the config.json that models were published with at huggingface.co, by the name of the recipe that has their size."""

from __future__ import annotations

from typing import Any


def _decoder(
    model_type: str,
    hidden: int,
    width: int,
    layers: int,
    heads: int,
    groups: int,
    vocabulary: int,
    positions: int,
    epsilon: float,
    theta: float,
    tied: bool,
    **more: Any,
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        "rms_norm_eps": epsilon,
        "rope_theta": theta,
        "tie_word_embeddings": tied,
        "initializer_range": 0.02,
        **more,
    }


def _llama3(factor: float) -> dict[str, Any]:
    return {
        "factor": factor,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }


_NO_BIASES = {"attention_bias": False, "mlp_bias": False}
PUBLISHED = {
    "124m": {
        "activation_function": "gelu_new",
        "attn_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-5,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "resid_pdrop": 0.1,
        "vocab_size": 50257,
    },  # openai-community/gpt2
    "llama-3.2-1b": _decoder(
        "llama",
        2048,
        8192,
        16,
        32,
        8,
        128256,
        131072,
        1e-5,
        500000.0,
        True,
        head_dim=64,
        **_NO_BIASES,
        rope_scaling=_llama3(32.0),
    ),  # meta-llama/Llama-3.2-1B
    "llama-3.1-8b": _decoder(
        "llama",
        4096,
        14336,
        32,
        32,
        8,
        128256,
        131072,
        1e-5,
        500000.0,
        False,
        **_NO_BIASES,
        rope_scaling=_llama3(8.0),
    ),  # meta-llama/Llama-3.1-8B
    "tinyllama-1.1b": _decoder(
        "llama",
        2048,
        5632,
        22,
        32,
        4,
        32000,
        2048,
        1e-5,
        10000.0,
        False,
        attention_bias=False,
        rope_scaling=None,
    ),  # TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T
    "mistral-7b": _decoder(
        "mistral", 4096, 14336, 32, 32, 8, 32000, 32768, 1e-5, 10000.0, False, sliding_window=4096
    ),  # mistralai/Mistral-7B-v0.1
    "qwen2.5-0.5b": _decoder(
        "qwen2",
        896,
        4864,
        24,
        14,
        2,
        151936,
        32768,
        1e-6,
        1000000.0,
        True,
        sliding_window=32768,
        use_sliding_window=False,
        max_window_layers=24,
    ),  # Qwen/Qwen2.5-0.5B
    "qwen3-0.6b": _decoder(
        "qwen3",
        1024,
        3072,
        28,
        16,
        8,
        151936,
        40960,
        1e-6,
        1000000,
        True,
        head_dim=128,
        attention_bias=False,
        sliding_window=None,
        use_sliding_window=False,
        max_window_layers=28,
        rope_scaling=None,
    ),  # Qwen/Qwen3-0.6B
    "qwen3-30b-a3b": _decoder(
        "qwen3_moe",
        2048,
        6144,
        48,
        32,
        4,
        151936,
        40960,
        1e-6,
        1000000.0,
        False,
        head_dim=128,
        attention_bias=False,
        sliding_window=None,
        use_sliding_window=False,
        rope_scaling=None,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
        router_aux_loss_coef=0.001,
    ),  # Qwen/Qwen3-30B-A3B
    "olmoe": _decoder(
        "olmoe",
        2048,
        1024,
        16,
        16,
        16,
        50304,
        4096,
        1e-5,
        10000.0,
        False,
        attention_bias=False,
        clip_qkv=None,
        num_experts=64,
        num_experts_per_tok=8,
        norm_topk_prob=False,
        rope_scaling=None,
        router_aux_loss_coef=0.01,
    ),  # allenai/OLMoE-1B-7B-0924
    "mixtral": _decoder(
        "mixtral",
        4096,
        14336,
        32,
        32,
        8,
        32000,
        32768,
        1e-5,
        1e6,
        False,
        sliding_window=None,
        num_local_experts=8,
        num_experts_per_tok=2,
        router_aux_loss_coef=0.02,
    ),  # mistralai/Mixtral-8x7B-v0.1
}
