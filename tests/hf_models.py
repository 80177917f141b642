"""Small models of Hugging Face with random weights, and what tests of conversions ask of them."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

from fugaku_megatron.checkpoint.manifest import read_manifest
from fugaku_megatron.cli import program
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.config.run_config import saved_run
from fugaku_megatron.inference.loading import load_model
from fugaku_megatron.nn.forward_context import Pass

VOCABULARY = 101  # a prime, so that rows of the vocabulary are added and taken away
LENGTH = 24


def gpt2(n_layer: int = 3) -> torch.nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=LENGTH,
            n_embd=48,
            n_layer=n_layer,
            n_head=4,
            initializer_range=0.2,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


OF_TEXT = (
    "Gemma3",
    "Qwen3_5",
    "Qwen3_5Moe",
)  # models with images, whose text model has a config of its own


def decoder(kind: str, **changes):
    """Return a function that builds a small model of Llama's family: grouped heads, untied unless `changes` tie it."""

    def build() -> torch.nn.Module:
        name = f"{kind}TextConfig" if kind in OF_TEXT else f"{kind}Config"
        config = getattr(transformers, name)(
            **{
                "vocab_size": VOCABULARY,
                "max_position_embeddings": LENGTH,
                "hidden_size": 48,
                "intermediate_size": 72,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "initializer_range": 0.2,
                "bos_token_id": 1,
                "eos_token_id": 2,
                "pad_token_id": None,
                **changes,
            }
        )
        return getattr(transformers, f"{kind}ForCausalLM")(config)

    return build


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
FAST = {"rope_type": "default", "rope_theta": 5000.0}
FULL = "full_attention"
WINDOWED = "sliding_attention"
LINEAR = "linear_attention"
# The norm after a delta rule divides by the size of its result, which is near 0 where a query and a key nearly cancel: with
# the usual epsilon the FP32 gradients of transformers differ from FP64 by 1e-4.
DELTA_NET = {
    "rms_norm_eps": 0.03,
    "num_hidden_layers": 3,
    "layer_types": [LINEAR, FULL, LINEAR],
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
MODELS = {
    "gpt2": gpt2,
    "llama": decoder("Llama", rope_parameters=LLAMA3, tie_word_embeddings=True),
    "mistral": decoder("Mistral", sliding_window=7, head_dim=16, rope_parameters=FAST),
    "qwen2": decoder("Qwen2", num_key_value_heads=4),
    "qwen3": decoder("Qwen3", head_dim=16, tie_word_embeddings=True),
    "phi3": decoder("Phi3", sliding_window=7, partial_rotary_factor=0.5),
    "granite": decoder(
        "Granite",
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.2,
        logits_scaling=2.5,
    ),
    "gemma": decoder("Gemma", head_dim=16, num_key_value_heads=1),
    "gpt_neox": decoder("GPTNeoX", num_key_value_heads=None, rotary_pct=0.5, rope_parameters=None),
    "falcon": decoder(
        "Falcon",
        new_decoder_architecture=True,
        num_kv_heads=2,
        ffn_hidden_size=72,
        num_key_value_heads=None,
        intermediate_size=None,
    ),
    "mixtral": decoder(
        "Mixtral",
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=7,
        rope_parameters=FAST,
    ),
    "qwen2_moe": decoder(
        "Qwen2Moe",
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=40,
        mlp_only_layers=[0],
        shared_expert_intermediate_size=36,
    ),
    "qwen3_moe": decoder(
        "Qwen3Moe",
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        tie_word_embeddings=True,
    ),
    "olmoe": decoder("Olmoe", num_experts=6, num_experts_per_tok=3, rope_parameters=FAST),
    "olmo": decoder("Olmo", rope_parameters=FAST),
    "smollm3": decoder("SmolLM3", num_hidden_layers=3, no_rope_layers=[1, 0, 0]),
    "ministral": decoder(
        "Ministral",
        sliding_window=7,
        head_dim=16,
        layer_types=[FULL, WINDOWED],
        rope_parameters=FAST,
    ),
    "olmo2": decoder("Olmo2", rope_parameters=FAST),
    "olmo3": decoder(
        "Olmo3",
        sliding_window=7,
        layer_types=[WINDOWED, FULL],
        rope_parameters={
            FULL: {**YARN, "rope_theta": 5000.0},
            WINDOWED: {"rope_type": "default", "rope_theta": 2000.0},
        },
    ),
    "exaone4": decoder("Exaone4", sliding_window=7, layer_types=[WINDOWED, FULL]),
    "gemma2": decoder(
        "Gemma2",
        head_dim=16,
        sliding_window=7,
        query_pre_attn_scalar=20,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3": decoder(
        "Gemma3",
        head_dim=16,
        sliding_window=7,
        layer_types=[WINDOWED, FULL],
        rope_parameters={
            FULL: {"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0},
            WINDOWED: {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
    "glm": decoder("Glm", head_dim=16),
    "glm4": decoder("Glm4", head_dim=16, attention_bias=False),
    "glm4_moe": decoder(
        "Glm4Moe",
        head_dim=16,
        use_qk_norm=True,
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=4,
        moe_intermediate_size=24,
        n_shared_experts=2,
        routed_scaling_factor=1.5,
        attention_bias=True,
    ),
    "granitemoehybrid": decoder(
        "GraniteMoeHybrid",
        layer_types=[FULL, FULL],
        num_local_experts=0,
        shared_intermediate_size=40,
        mamba_n_heads=4,
        position_embedding_type="rope",
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.2,
        logits_scaling=2.5,
    ),
    "cohere2": decoder(
        "Cohere2",
        num_hidden_layers=3,
        sliding_window=7,
        layer_types=[WINDOWED, FULL, WINDOWED],
        logit_scale=0.25,
    ),
    "gpt_oss": decoder(
        "GptOss",
        head_dim=16,
        sliding_window=7,
        num_local_experts=6,
        num_experts_per_tok=3,
        swiglu_limit=1.5,
        rope_parameters={**YARN, "truncate": False, "rope_theta": 1000.0},
    ),
    "apertus": decoder("Apertus", rope_parameters=LLAMA3),
    "qwen3_next": decoder(
        "Qwen3Next",
        **DELTA_NET,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=36,
        mlp_only_layers=[1],
    ),
    "qwen3_5": decoder("Qwen3_5", **DELTA_NET),
    "qwen3_5_moe": decoder(
        "Qwen3_5Moe",
        **DELTA_NET,
        intermediate_size=None,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=36,
    ),
    "stablelm": decoder("StableLm", use_qkv_bias=True, partial_rotary_factor=0.5),
}
RECENT = (
    *(
        "smollm3",
        "ministral",
        "olmo2",
        "olmo3",
        "exaone4",
        "gemma2",
        "gemma3",
        "glm",
        "glm4",
        "glm4_moe",
    ),
    *("granitemoehybrid", "cohere2", "gpt_oss", "apertus", "qwen3_next", "qwen3_5", "qwen3_5_moe"),
)


def convert(*words: object) -> int:
    return program.main(["convert", *map(str, words)])


def read_hf(source: Path, ours: Path, *more: object) -> None:
    """Convert a directory of Hugging Face to a checkpoint."""
    assert convert("--from-hf", source, "--save", ours, *more) == 0


def write_hf(ours: Path, target: Path, *more: object) -> None:
    """Convert a checkpoint to a directory of Hugging Face."""
    assert convert("--load", ours, "--to-hf", target, *more) == 0


def randomized(build) -> torch.nn.Module:
    """Build a model with random weights, biases and norms included."""
    torch.manual_seed(1)
    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.3 * torch.randn(buffer.shape))
    return model.eval()


def shifted_gpt2(vocabulary: int, length: int, shift: float) -> torch.nn.Module:
    """Return a random GPT-2 with shifted logits: the head's bias is one more element in each word."""
    model = randomized(
        lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=vocabulary,
                n_positions=length,
                n_embd=16,
                n_layer=2,
                n_head=4,
                initializer_range=0.2,
                bos_token_id=1,
                eos_token_id=2,
            )
        )
    )
    with torch.no_grad():
        model.transformer.wte.weight[:, 0] = 1.0
        model.transformer.ln_f.weight[0] = 0.0
        model.transformer.ln_f.bias[0] = shift
    return model


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a directory, each once."""
    return {
        name: tensor
        for file in sorted(directory.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    both = ((tensor, other[name]) for name, tensor in one.items() if name in other)
    return one.keys() == other.keys() and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in both
    )


W = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradient of every weight by its name in a file, where each expert's matrices are separate tensors."""
    if model.config.model_type == "gpt_oss":  # stores them together
        return {name: p.grad for name, p in model.named_parameters()}
    found = {}
    for name, p in model.named_parameters():
        prefix, kind = name.rsplit(".", 1)
        for expert, own in enumerate(p.grad if kind in ("gate_up_proj", "down_proj") else ()):
            for part, of_part in zip(
                ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,),
                own.chunk(2) if kind == "gate_up_proj" else (own,),
            ):
                found[f"{prefix}.{expert}.{part}.weight"] = of_part
        if kind not in ("gate_up_proj", "down_proj"):
            found[name] = p.grad
    if model.config.model_type != "mixtral":
        return found
    renamed = {
        name.replace(".mlp.", ".block_sparse_moe."): gradient for name, gradient in found.items()
    }
    return {
        ".".join(W.get(word, word) for word in name.split(".")): gradient
        for name, gradient in renamed.items()
    }


def our_logits(directory: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits of a converted checkpoint's model. tokens (s, b) -> (s, b, v)."""
    manifest = read_manifest(directory, 0)
    chunk = load_model(
        saved_run(manifest, (1, 1)), SoloComm(), str(directory), 0, manifest
    ).stage.last
    at = Pass(first_sample=0, training=False)
    with torch.no_grad():
        return chunk.logits(chunk.decode(chunk.embedding(tokens, at), at))
