"""Models of transformers with random weights, and the same as checkpoints of this program: what generation is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fugaku_megatron.checkpoint.manifest import read_manifest
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.config.run_config import saved_run
from fugaku_megatron.convert.hugging_face.conversion import open_hugging_face
from fugaku_megatron.convert.own_checkpoint import save_own
from fugaku_megatron.inference.generation import Sampling
from fugaku_megatron.inference.loading import LoadedModel, load_model
from fugaku_megatron.nn.parameter import scales_of

from . import driver

GREEDY = Sampling(temperature=0.0, top_k=0, top_p=0.0, seed=0)
THEIRS = "theirs"  # folder of transformers' files
# Configurations of transformers: class, values. "tiny" and "tiny-qwen" are for tests.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": (
        "GPT2",
        {"vocab_size": 96, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4},
    ),
    "tiny-qwen": (
        "Qwen2",
        {
            "vocab_size": 320,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "tie_word_embeddings": True,
            "initializer_range": 0.2,
        },
    ),
    "124m": ("GPT2", {}),
    "0.5b": (
        "Qwen2",
        {
            "vocab_size": 151936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "tie_word_embeddings": True,
        },
    ),
}


def save(name: str, dtype: str, folder: Path) -> Any:
    """Save transformers' model with random weights in folder/theirs, and return it."""
    import transformers

    torch.manual_seed(0)
    kind, values = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**values)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    model = model.to(driver.DTYPES[dtype]).eval()
    model.save_pretrained(folder / THEIRS)
    return model


def load_ours(folder: Path, q8: bool = False) -> LoadedModel:
    """Convert folder/theirs, and load the result."""
    save_own(open_hugging_face(folder / THEIRS), folder / "ours")
    manifest = read_manifest(folder / "ours", 0)
    run = saved_run(manifest, (1, 1))
    return load_model(run, SoloComm(), str(folder / "ours"), 0, manifest, q8)


def matrices(loaded: LoadedModel) -> list[nn.Parameter]:
    """Return the weights that a token reads whole: not an embedding, unless it is the head too."""
    head = loaded.stage.last.output_weight
    return [
        p
        for p in loaded.stage.parameters()
        if p.dim() > 1 and (p is head or not p.spec.name.startswith("embedding."))
    ]


def stored_bytes(weights: Sequence[nn.Parameter]) -> int:
    """Return the bytes of weights, with the scales of those in eight bits."""
    scales = filter(lambda found: found is not None, map(scales_of, weights))
    return sum(tensor.nbytes for tensor in (*weights, *scales))
