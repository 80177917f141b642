"""Tiny models of transformers with random weights."""

from __future__ import annotations

import torch
import transformers

VOCABULARY = 101
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 16}
MOE = {**GROUPED, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DELTA = {
    **GROUPED,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**GROUPED, tie_word_embeddings=True)
    ),
    "mistral": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**GROUPED, sliding_window=7)
    ),
    "qwen3_5": lambda: transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**DELTA)),
    "gpt_oss": lambda: transformers.GptOssForCausalLM(
        transformers.GptOssConfig(
            **GROUPED, num_local_experts=4, num_experts_per_tok=2, sliding_window=8
        )
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**MOE)),
    "bert": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    ),
}


def model_of(kind: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Return a model in training mode; parameters of norms are random too."""
    torch.manual_seed(3)
    model = MODELS[kind]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to(dtype).train()


def batch_of(kind: str, padding: str = "none", length: int = 19) -> dict[str, torch.Tensor]:
    """Return three samples with labels, of which two are padded on a side."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(1, VOCABULARY, (3, length), generator=generator)
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    batch["labels"][:, :4] = -100
    if padding != "none":
        visible = torch.ones_like(tokens)
        for sample, count in ((0, 5), (2, 2)):
            hidden = slice(0, count) if padding == "left" else slice(length - count, length)
            visible[sample, hidden] = 0
        batch["attention_mask"] = visible
        # A query of padding would predict the first token.
        predicted = torch.nn.functional.pad(visible[:, :-1], (1, 0))
        batch["labels"][(visible == 0) | (predicted == 0)] = -100
    return batch
