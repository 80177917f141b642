"""Small models of transformers with latent attention, and the same models here."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

from tests.checks.documents import left_to_right

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_hidden_size": 48,
    "vocab_size": 96,
    "seq_length": 24,
    "global_batch_size": 4,
    "multi_latent_attention": True,
    "kv_lora_rank": 16,
    "qk_head_dim": 12,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
    "qk_layernorm": True,
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-6,  # transformers' norms of narrow vectors have it whatever rms_norm_eps says
    "swiglu": True,
    "disable_bias_linear": True,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
}
YARN: dict[str, Any] = {
    "rotary_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 8,
    "yarn_beta_fast": 8.0,
}


class Case(NamedTuple):
    """A model of transformers. changes: of its config. flags: of the same model here. in_halves: rope rotates halves"""

    kind: str
    changes: dict[str, Any]
    flags: dict[str, Any]
    in_halves: bool = False


CASES = {
    "deepseek_v3": Case(
        "DeepseekV3",
        {"q_lora_rank": 20, "first_k_dense_replace": 2, "mscale": 1.0, "mscale_all_dim": 1.0},
        {"q_lora_rank": 20, **YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "deepseek_v2_lite": Case(
        "DeepseekV2",
        {"q_lora_rank": None, "first_k_dense_replace": 2, "mscale": 0.9, "mscale_all_dim": 0.5},
        {**YARN, "mscale": 0.9, "mscale_all_dim": 0.5},
    ),
    "minicpm3": Case(
        "MiniCPM3",
        {"q_lora_rank": 20, "scale_emb": 3, "scale_depth": 0.9, "dim_model_base": 16},
        {
            "q_lora_rank": 20,
            "rope_type": "rope",
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.9 / 2**0.5,
            "logits_scaling": 2.0,
        },
        in_halves=True,
    ),
}
# Ours -> theirs.
ENDS = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
}
MODULES = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "self_attention.linear_q_proj": "self_attn.q_proj",
    "self_attention.linear_q_down_proj": "self_attn.q_a_proj",
    "self_attention.q_layernorm": "self_attn.q_a_layernorm",
    "self_attention.linear_q_up_proj": "self_attn.q_b_proj",
    "self_attention.linear_kv_down_proj": "self_attn.kv_a_proj_with_mqa",
    "self_attention.kv_layernorm": "self_attn.kv_a_layernorm",
    "self_attention.linear_kv_up_proj": "self_attn.kv_b_proj",
    "self_attention.linear_proj": "self_attn.o_proj",
    "mlp.linear_fc1": "mlp.gate_proj",
    "mlp.linear_fc2": "mlp.down_proj",
}


def flags(name: str) -> dict[str, Any]:
    return {**SIZES, **CASES[name].flags}


def theirs(name: str) -> Any:
    """Build the model of transformers in FP64 with random weights, norms included."""
    case = CASES[name]
    changes = dict(case.changes)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    if "mscale" in changes:
        rope = {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "beta_fast": 8.0,
            "beta_slow": 1.0,
            "mscale": changes.pop("mscale"),
            "mscale_all_dim": changes.pop("mscale_all_dim"),
        }
    config = getattr(transformers, f"{case.kind}Config")(
        vocab_size=SIZES["vocab_size"],
        hidden_size=SIZES["hidden_size"],
        intermediate_size=SIZES["ffn_hidden_size"],
        num_hidden_layers=SIZES["num_layers"],
        num_attention_heads=SIZES["num_attention_heads"],
        num_key_value_heads=SIZES["num_attention_heads"],
        kv_lora_rank=SIZES["kv_lora_rank"],
        qk_nope_head_dim=SIZES["qk_head_dim"],
        qk_rope_head_dim=SIZES["qk_pos_emb_head_dim"],
        v_head_dim=SIZES["v_head_dim"],
        rms_norm_eps=SIZES["layernorm_epsilon"],
        max_position_embeddings=64,
        tie_word_embeddings=False,
        initializer_range=0.2,
        attn_implementation="eager",
        rope_parameters=rope,
        **changes,
    )
    torch.manual_seed(1)
    model = getattr(transformers, f"{case.kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    return model.double()


def in_our_form(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights or gradients of their model with the names and shapes of ours."""
    case = CASES[name]
    found = {}
    for theirs_name, tensor in tensors.items():
        ours = next((ours for ours, other in ENDS.items() if other == theirs_name), None)
        if ours is None:
            _, _, layer, module = theirs_name.removesuffix(".weight").split(".", 3)
            if module == "mlp.up_proj":
                continue
            (place,) = (each for each, other in MODULES.items() if other == module)
            ours = f"decoder.layers.{layer}.{place}.weight"
            if module == "mlp.gate_proj":
                tensor = torch.stack((tensor, tensors[theirs_name.replace("gate", "up")]))
            if case.in_halves and module.endswith(("q_b_proj", "kv_a_proj_with_mqa")):
                heads = SIZES["num_attention_heads"] if module.endswith("q_b_proj") else 1
                tensor = _as_neighbours(tensor, heads)
        found[ours] = tensor
    return found


def _as_neighbours(tensor: Tensor, heads: int) -> Tensor:
    """Permute the rotated rows, the last of each head, from two halves to pairs of neighbours."""
    r = SIZES["qk_pos_emb_head_dim"]
    fixed, rotated = tensor.unflatten(0, (heads, -1)).split((tensor.shape[0] // heads - r, r), 1)
    pairs = rotated.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return torch.cat((fixed, pairs), 1).flatten(0, 1)


def expected_loss(model: Any, samples: list[np.ndarray], documents: bool) -> Tensor:
    """Return the mean loss over the counted labels of samples (s + 1,), with Megatron-LM's documents if they are masked."""
    total = torch.zeros((), dtype=torch.float64)
    count = 0.0
    for sample in samples:
        tokens = sample[:-1]
        visible, counted, positions = left_to_right(tokens, documents, documents, documents)
        hidden = torch.zeros(visible.shape, dtype=torch.float64)
        hidden.masked_fill_(~torch.from_numpy(visible), torch.finfo(torch.float64).min)
        logits = model(
            torch.from_numpy(tokens)[None],
            attention_mask=hidden[None, None],
            position_ids=torch.from_numpy(positions)[None],
        ).logits[0]
        losses = F.cross_entropy(logits, torch.from_numpy(sample[1:]), reduction="none")
        total = total + (losses * torch.from_numpy(counted)).sum()
        count += counted.sum()
    return total / count
