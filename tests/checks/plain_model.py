"""The model in plain PyTorch, with Megatron-LM's options."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from fugaku_megatron.config.layer_kinds import LayerKind
from fugaku_megatron.config.rows import MLP_OF_EXPERTS
from fugaku_megatron.config.run_config import ModelConfig
from tests.checks.experts import plain_experts


def plain_angles(model: ModelConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return (cosines, sines) (s, d / 2), as megatron/core/models/common/embeddings/yarn_rotary_pos_embedding.py."""
    d = model.kv_channels
    base = model.rotary_base
    if model.rope_dynamic_factor:  # as transformers has it; 16 positions in these runs
        base *= (2.0 * 16 / 4 - 1.0) ** (d / (d - 2))
    extra = torch.tensor([base ** (-2 * i / d) for i in range(d // 2)])
    if model.position_embedding_type == "rope":
        angles = positions[:, None] / (model.rotary_seq_len_interpolation_factor or 1) * extra
        return angles.cos(), angles.sin()
    bounds = [
        d
        * math.log(model.yarn_original_max_position_embeddings / (beta * 2 * math.pi))
        / (2 * math.log(base))
        for beta in (model.yarn_beta_fast, model.yarn_beta_slow)
    ]
    if model.yarn_correction_range_round_to_int:
        bounds = [math.floor(bounds[0]), math.ceil(bounds[1])]
    low = max(bounds[0], 0)
    high = min(bounds[1], d - 1)
    keep = 1 - torch.clamp((torch.arange(d // 2) - low) / (high - low), 0, 1)
    assert 0 < keep.sum() < d // 2, "the case mixes both"
    angles = positions[:, None] * (extra / model.rotary_scaling_factor * (1 - keep) + extra * keep)
    grown = [
        0.1 * m * math.log(model.rotary_scaling_factor) + 1
        for m in (model.mscale, model.mscale_all_dim)
    ]
    return angles.cos() * grown[0] / grown[1], angles.sin() * grown[0] / grown[1]


def apply_rotary(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate x (b, n, s, d): elements half a head apart form a pair."""
    first, second = x.chunk(2, -1)
    cos, sin = angles
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def plain_mlp(x: Tensor, weights: dict[str, Tensor], name: str, model: ModelConfig) -> Tensor:
    weight = weights[f"{name}.linear_fc1.weight"]
    bias = weights.get(f"{name}.linear_fc1.bias")
    inner = F.linear(x, weight.view(-1, x.shape[-1]), None if bias is None else bias.view(-1))
    if model.geglu:
        gates, values = inner.chunk(2, -1)
        inner = F.gelu(gates, approximate="tanh") * values
    elif model.swiglu:
        gates, values = inner.chunk(2, -1)
        inner = F.silu(gates) * values
    elif model.squared_relu:
        inner = torch.clamp(inner, min=0) ** 2
    else:
        tanh = model.openai_gelu or not (model.disable_bias_linear or not model.bias_gelu_fusion)
        inner = F.gelu(inner, approximate="tanh" if tanh else "none")
    return F.linear(
        inner, weights[f"{name}.linear_fc2.weight"], weights.get(f"{name}.linear_fc2.bias")
    )


def experts_of(x: Tensor, weights: dict[str, Tensor], name: str, model: ModelConfig) -> Tensor:
    own = {
        key.removeprefix(f"{name}."): weight
        for key, weight in weights.items()
        if key.startswith(f"{name}.")
    }
    return plain_experts(own, x.flatten(0, 1), model).view(x.shape)


def plain_attention(
    x: Tensor, weights: dict[str, Tensor], name: str, model: ModelConfig, seen: Tensor | None
) -> Tensor:
    b, s, _ = x.shape
    n = model.num_attention_heads
    d = model.kv_channels
    g = model.query_groups
    qkv = F.linear(
        x, weights[f"{name}.linear_qkv.weight"], weights.get(f"{name}.linear_qkv.bias")
    ).view(b, s, g, n // g + 2, d)
    q = qkv[..., : n // g, :].flatten(2, 3).transpose(1, 2)  # (b, n, s, d)
    k, v = (qkv[..., n // g + i, :].repeat_interleave(n // g, 2).transpose(1, 2) for i in (0, 1))
    if model.qk_layernorm:
        scales = [
            weights[f"{name}.{norm}.weight"] + model.apply_layernorm_1p
            for norm in ("q_layernorm", "k_layernorm")
        ]
        biases = [weights[f"{name}.{norm}.bias"] for norm in ("q_layernorm", "k_layernorm")]
        q, k = (
            F.layer_norm(*each, model.layernorm_epsilon)
            for each in zip((q, k), ((d,), (d,)), scales, biases)
        )
    if model.position_embedding_type in ("rope", "yarn"):
        angles = plain_angles(model, torch.arange(s, dtype=torch.float32))
        q = apply_rotary(q, angles)
        k = apply_rotary(k, angles)
    scores = q @ k.transpose(-1, -2) * (model.attention_multiplier or 1 / math.sqrt(d))
    seen = torch.ones(1, s, s, dtype=torch.bool).tril() if seen is None else seen
    scores = scores.masked_fill(~seen[:, None], -math.inf)
    out = (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, n * d)
    return F.linear(
        out, weights[f"{name}.linear_proj.weight"], weights.get(f"{name}.linear_proj.bias")
    )


def plain_norm(x: Tensor, weights: dict[str, Tensor], name: str, model: ModelConfig) -> Tensor:
    width = (model.hidden_size,)
    weight = weights.get(f"{name}.weight")
    if weight is not None and model.apply_layernorm_1p:
        weight = weight + 1
    if model.normalization == "RMSNorm":
        return F.rms_norm(x, width, weight, model.layernorm_epsilon)
    return F.layer_norm(x, width, weight, weights.get(f"{name}.bias"), model.layernorm_epsilon)


def plain_layer(
    x: Tensor,
    weights: dict[str, Tensor],
    name: str,
    kind: LayerKind,
    model: ModelConfig,
    seen: Tensor | None = None,
) -> Tensor:
    """Return x (b, s, h) plus its attention and MLP. seen: visible pairs (b, s, s)"""
    attended = x
    if kind.mixer is not None:
        read = plain_norm(x, weights, f"{name}.input_layernorm", model)
        attended = x + model.residual_multiplier * plain_attention(
            read, weights, f"{name}.self_attention", model, seen
        )
    if kind.mlp is None:
        return attended
    before = x if model.parallel_residual else attended
    read = plain_norm(before, weights, f"{name}.pre_mlp_layernorm", model)
    out = (
        experts_of(read, weights, f"{name}.mlp", model)
        if kind.mlp == MLP_OF_EXPERTS
        else plain_mlp(read, weights, f"{name}.mlp", model)
    )
    return attended + model.residual_multiplier * out


def plain_hidden(
    weights: dict[str, Tensor],
    tokens: Tensor,
    model: ModelConfig,
    seen: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """Return the input of the head (b, s, h) for tokens (b, s); arguments as of `plain_losses`."""
    x = weights["embedding.word_embeddings.weight"][tokens] * model.embedding_multiplier
    if model.learned_positions:
        x = (
            x
            + weights["embedding.position_embeddings.weight"][
                torch.arange(tokens.shape[1]) if positions is None else positions
            ]
        )
    for layer, kind in enumerate(model.layer_kinds):
        x = plain_layer(x, weights, f"decoder.layers.{layer}", kind, model, seen)
    return plain_norm(x, weights, "decoder.final_layernorm", model)


def plain_head_losses(
    weights: dict[str, Tensor], x: Tensor, labels: Tensor, model: ModelConfig
) -> Tensor:
    """Return the loss of each label (b, s), at least 0, from the input of the head (b, s, h)."""
    words = weights["embedding.word_embeddings.weight"]
    logits = x @ weights.get("output_layer.weight", words).t() / model.logits_scaling
    if model.masks_padding:
        logits = logits[..., : model.vocab_size]
    z = torch.logsumexp(logits, -1)
    chosen = logits.gather(-1, labels[..., None])[..., 0]
    return z - chosen + (model.z_loss_strength * z * z if model.use_z_loss else 0.0)


def plain_losses(
    weights: dict[str, Tensor],
    tokens: Tensor,
    labels: Tensor,
    model: ModelConfig,
    seen: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """Return the loss of each label (b, s) of tokens (b, s).

    seen: visible pairs (b, s, s); None: all positions up to a token's own
    """
    x = plain_hidden(weights, tokens, model, seen, positions)
    return plain_head_losses(weights, x, labels, model)
