"""Small models of Hugging Face with random weights, and what tests of conversions ask of them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

from fugaku_megatron.checkpoint.manifest import read_manifest
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.config.run_config import saved_run
from fugaku_megatron.inference.loading import load_model
from fugaku_megatron.nn.forward_context import Pass
from tests.checks.conversions import convert

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


# Every other model's class and config. The norm after a delta rule divides by the size of its result, which is near 0 where a
# query and a key nearly cancel: with the usual rms_norm_eps the FP32 gradients of transformers differ from FP64 by 1e-4.
CONFIGS = json.loads(Path(__file__).with_suffix(".json").read_text())
LLAMA3 = CONFIGS["llama"]["rope_parameters"]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
MODELS = {
    "gpt2": gpt2,
    **{name: decoder(config.pop("class"), **config) for name, config in CONFIGS.items()},
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
    *("deepseek_v2_lite", "deepseek_v3", "minicpm3"),
    *("granitemoehybrid", "cohere2", "gpt_oss", "apertus", "qwen3_next", "qwen3_5", "qwen3_5_moe"),
)


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
