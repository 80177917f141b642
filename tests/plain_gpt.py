"""The model once more in plain torch: named global weights in, loss out. What tests compare the trainer with."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fugaku_megatron.config import ModelConfig


def loss(weights: dict[str, Tensor], tokens: Tensor, labels: Tensor, model: ModelConfig) -> Tensor:
    """Mean cross entropy without dropout. tokens, labels (s, b) -> ()."""
    (s, b), h, n = tokens.shape, model.hidden_size, model.num_attention_heads

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (h,), weights[f"{name}.weight"], weights[f"{name}.bias"], model.layernorm_epsilon)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    words = weights["embedding.word_embeddings.weight"]
    x = words[tokens] + weights["embedding.position_embeddings.weight"][:s].unsqueeze(1)  # (s, b, h)
    future = torch.ones(s, s, dtype=torch.bool).triu(1)
    for layer in (f"decoder.layers.{i}" for i in range(model.num_layers)):
        qkv = linear(norm(x, f"{layer}.input_layernorm"), f"{layer}.self_attention.linear_qkv")
        query, key, value = qkv.view(s, b, n, 3, h // n).permute(3, 1, 2, 0, 4)  # (b, n, s, d) each
        scores = (query @ key.transpose(-1, -2) / (h // n) ** 0.5).masked_fill(future, float("-inf"))
        context = (scores.softmax(-1) @ value).permute(2, 0, 1, 3).reshape(s, b, h)
        x = x + linear(context, f"{layer}.self_attention.linear_proj")
        inner = F.gelu(linear(norm(x, f"{layer}.pre_mlp_layernorm"), f"{layer}.mlp.linear_fc1"), approximate="tanh")
        x = x + linear(inner, f"{layer}.mlp.linear_fc2")
    return F.cross_entropy((norm(x, "decoder.final_layernorm") @ words.t()).flatten(0, 1), labels.flatten())
