"""Write the small files in tests/foreign by transformers, peft and megatron-core, with their results.

pip install torch transformers peft megatron-core psutil
python tests/foreign/write_others.py tests/foreign
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy
import peft
import torch
import transformers
from megatron.core import __version__ as megatron_core
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

IDS = torch.randint(60, (1, 16), generator=torch.Generator().manual_seed(5))
DOCUMENTS = ([[3, 1, 4, 1], [5]], [[9, 2, 6]], [[65000, 0, 7, 8, 9]])  # sentences of documents


def model() -> torch.nn.Module:
    """Build a small Qwen2 with random biases and norms."""
    torch.manual_seed(11)
    config = transformers.Qwen2Config(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        initializer_range=0.2,
    )
    built = transformers.Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    return built.eval()


def write_expected(directory: Path, built: torch.nn.Module, by: str) -> None:
    with torch.no_grad():
        logits = built(IDS).logits[0]
    rounded = [[round(number, 5) for number in line] for line in logits.tolist()]
    expected = {"by": by, "tokens": IDS[0].tolist(), "logits": rounded}
    (directory / "expected.json").write_text(json.dumps(expected) + "\n")


def write_hugging_face(directory: Path) -> None:
    built = model()
    built.save_pretrained(directory)
    write_expected(directory, built, f"transformers {transformers.__version__}")


def write_peft(directory: Path) -> None:
    """Write adapters for the model from `write_hugging_face`."""
    config = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=["q_proj", "v_proj", "down_proj"],
        task_type="CAUSAL_LM",
        init_lora_weights=False,
    )
    adapted = peft.get_peft_model(model(), config)
    adapted.save_pretrained(directory)
    (directory / "README.md").unlink()
    write_expected(directory, adapted.eval(), f"peft {peft.__version__}")


def write_indexed(directory: Path) -> None:
    directory.mkdir()
    builder = IndexedDatasetBuilder(str(directory / "text_document.bin"), dtype=numpy.uint16)
    for document in DOCUMENTS:
        for sentence in document:
            builder.add_item(torch.tensor(sentence))
        builder.end_document()
    builder.finalize(str(directory / "text_document.idx"))
    expected = {"by": f"megatron-core {megatron_core}", "documents": DOCUMENTS}
    (directory / "expected.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    root = Path(sys.argv[1])
    write_hugging_face(root / "hugging_face")
    write_peft(root / "peft")
    write_indexed(root / "indexed")
