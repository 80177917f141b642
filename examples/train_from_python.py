"""Train a small GPT on arrays of tokens, evaluate it, save it, and generate with it.

python examples/train_from_python.py
mpiexec -n 2 python examples/train_from_python.py
"""

import tempfile
from pathlib import Path

import fugaku_megatron as fm

TEXT = "to be, or not to be, that is the question: "
documents = [list((TEXT * copies).encode()) for copies in range(1, 40)]  # a token is a byte here

config = fm.Config(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    seq_length=32,
    vocab_size=256,
    micro_batch_size=4,
    global_batch_size=8,
    train_iters=120,
    lr=3e-3,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    eval_iters=2,
)
trainer = fm.Trainer(config, documents[:-4], valid=documents[-4:])

for step in trainer.steps():
    if trainer.rank == 0 and step.iteration % 20 == 0:
        print(
            f"iteration {step.iteration}: loss {step.loss:.3f}, {step.consumed_tokens} tokens, {step.seconds * 1000:.0f} ms"
        )

loss = trainer.evaluate()  # of all ranks, so every rank calls it
assert loss < 0.8, loss

with tempfile.TemporaryDirectory() as temporary:
    folder = (
        Path(fm.on_first_rank(lambda: temporary)) / "checkpoint"
    )  # that of the first rank, for all
    trainer.save(folder)
    model = fm.load(folder)  # the whole model, on every rank
    tokens = list(b"to be, or not")
    for _ in range(10):
        tokens.append(int(model.logits(tokens)[-1].argmax()))
    fm.on_first_rank(
        lambda: print(f"validation loss {loss:.3f}; goes on with {bytes(tokens).decode()!r}")
    )
