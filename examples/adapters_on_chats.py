"""Train a small model, then adapters (LoRA) of it on chats, and generate with both together.

python examples/adapters_on_chats.py
mpiexec -n 2 python examples/adapters_on_chats.py
"""

import tempfile
from pathlib import Path

import fugaku_megatron as fm

QUESTION, ANSWER = list(b"to be, or not to be? "), list(b"that is the question.")
text = [list(b"to be, or not to be, that is not a question: " * copies) for copies in range(1, 20)]
# Token ids (a token is a byte here), and which of them are trained: the answer.
chats = [(QUESTION + ANSWER, [False] * len(QUESTION) + [True] * len(ANSWER))] * 8

config = fm.Config(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    seq_length=64,
    vocab_size=256,
    micro_batch_size=2,
    global_batch_size=4,
    train_iters=60,
    lr=3e-3,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
with tempfile.TemporaryDirectory() as temporary:
    folder = Path(fm.on_first_rank(lambda: temporary))  # of the first rank, for all
    base = fm.Trainer(config, text)
    list(base.steps())
    base.save(folder / "base")

    lora = config.replace(
        lora_rank=8, lr=2e-2, sft=True, pretrained_checkpoint=str(folder / "base")
    )
    trainer = fm.Trainer(lora, chats)
    losses = [step.loss for step in trainer.steps()]
    trainer.save(folder / "adapters")

    model, tokens = fm.load(folder / "adapters"), list(QUESTION)  # the adapters are in the weights
    for _ in ANSWER:
        tokens.append(int(model.logits(tokens)[-1].argmax()))
    fm.on_first_rank(lambda: print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}: {bytes(tokens)!r}"))
assert losses[-1] < losses[0] / 2, losses
