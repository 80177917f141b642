"""Continue to train a model of Hugging Face, and write it as one again. Without a path it makes a tiny one with random weights.

python examples/continue_hugging_face.py [DIRECTORY]
mpiexec -n 2 python examples/continue_hugging_face.py [DIRECTORY]
"""

import sys
import tempfile
from pathlib import Path

import fugaku_megatron as fm


def tiny_model(folder: Path) -> Path:
    """A directory as save_pretrained writes it."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "tiny")
    return folder / "tiny"


with tempfile.TemporaryDirectory() as temporary:
    folder = Path(fm.on_first_rank(lambda: temporary))  # that of the first rank, for all
    path = Path(sys.argv[1]) if sys.argv[1:] else fm.on_first_rank(lambda: tiny_model(folder))

    model = fm.load(path)
    config = model.config(
        seq_length=32, micro_batch_size=2, global_batch_size=4, train_iters=20, lr=1e-3
    )
    documents = [
        list(("to be, or not to be " * copies).encode()) for copies in range(1, 20)
    ]  # a token is a byte here
    trainer = fm.Trainer(config, documents)
    trainer.load(path)
    losses = [step.loss for step in trainer.steps()]
    trainer.save(folder / "checkpoint")

    if trainer.rank == 0:
        fm.load(folder / "checkpoint").save_hf(folder / "trained")
        files = sorted(file.name for file in (folder / "trained").iterdir())
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; wrote {', '.join(files)}")
    fm.on_first_rank(lambda: None)  # the folder stays until the first rank is done
assert losses[-1] < losses[0], losses
