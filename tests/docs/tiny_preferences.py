"""Write a small model with random weights and a data set of preferences, which replace downloads in docs/pytorch.md.

python -m tests.docs.tiny_preferences MODEL DATASET
"""

import json
import sys
from pathlib import Path

import transformers

from tests.checks.tiny_transformers import VOCABULARY
from tests.torch_backend.test_trainers import texts, tokenizer


def main(model: Path, dataset: Path) -> None:
    """Write the model with a tokenizer of words, and the data set as JSON lines."""
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        pad_token_id=0,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(model)
    tokenizer().save_pretrained(model)
    dataset.mkdir(exist_ok=True)
    lines = [json.dumps(row) for row in texts("prompt", "chosen", "rejected")]
    (dataset / "train.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
