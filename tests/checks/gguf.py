"""Models and tokenizers in GGUF."""

import pytest
import torch

from fugaku_megatron.cli import program

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LATENT = {
    **SIZES,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "rms_norm_eps": 1e-6,
}
LATENT_EXPERTS = {
    **LATENT,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
}
LATENT_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
MODELS = {
    "gpt2": lambda t: t.GPT2Config(vocab_size=320, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "llama": lambda t: t.LlamaConfig(**SIZES, rope_scaling=LLAMA3),
    "mistral": lambda t: t.MistralConfig(**SIZES, sliding_window=None),
    "mixtral": lambda t: t.MixtralConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    ),
    "granite": lambda t: t.GraniteConfig(
        **SIZES,
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        logits_scaling=2.0,
        attention_multiplier=0.25,
    ),
    "qwen2": lambda t: t.Qwen2Config(**SIZES),
    "qwen3": lambda t: t.Qwen3Config(**SIZES, head_dim=16),
    "qwen2_moe": lambda t: t.Qwen2MoeConfig(
        **SIZES, **EXPERTS, shared_expert_intermediate_size=64, norm_topk_prob=False
    ),
    "qwen3_moe": lambda t: t.Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=True, head_dim=8),
    "olmoe": lambda t: t.OlmoeConfig(
        **{**SIZES, "num_key_value_heads": 4},
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=False,
    ),
    "deepseek_v2": lambda t: t.DeepseekV2Config(
        **LATENT_EXPERTS,
        q_lora_rank=20,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        rope_parameters={**LATENT_YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
    ),
    "deepseek_v3": lambda t: t.DeepseekV3Config(
        **LATENT_EXPERTS,
        q_lora_rank=20,
        first_k_dense_replace=2,
        n_group=4,
        topk_group=2,
        rope_parameters=LATENT_YARN,
    ),
    "glm4_moe_lite": lambda t: t.Glm4MoeLiteConfig(
        **LATENT_EXPERTS,
        q_lora_rank=20,
        n_group=1,
        topk_group=1,
        mlp_layer_types=["dense", "sparse", "sparse"],
    ),
    "minicpm3": lambda t: t.MiniCPM3Config(
        **{
            **LATENT,
            "tie_word_embeddings": True,
            "num_hidden_layers": 2,
            "v_head_dim": 8,
        },
        q_lora_rank=20,
        scale_emb=12,
        scale_depth=1.4,
        dim_model_base=256,
    ),
    "stablelm": lambda t: t.StableLmConfig(**SIZES, partial_rotary_factor=0.5, use_qkv_bias=True),
}
TEMPLATE = "{% for message in messages %}<|user|>{{ message.content }}{% endfor %}"


def write_tokenizer(folder, pre=None):
    """Write a byte-level BPE tokenizer with few merges with two special tokens and an added one."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = pre or tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>", "<|user|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    made.train_from_iterator(
        ["the model is the model that the user of the model has " * 9], trainer
    )
    made.add_tokens(["extra"])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return fast


def write_model(folder, kind):
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[kind](transformers)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_()
    model.save_pretrained(folder)
    return model


def convert(folder, file, *more):
    """Convert with transformers' tokenizer for Qwen's models. The tokenizer normalizes texts."""
    words = ["convert", "--from-hf", str(folder), "--to-gguf", str(file)]
    return program.main([*words, "--gguf-inexact-tokenizer", *more])
