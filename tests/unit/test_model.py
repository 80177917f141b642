"""The model against Hugging Face's GPT2LMHeadModel with the same random weights: logits, loss and every gradient."""

import pytest
import torch

from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.nn.forward_context import Pass
from tests.checks.gpt2 import (
    to_theirs,
)
from tests.helpers import make_trainer, small_run

transformers = pytest.importorskip("transformers")
LAYERS = 3
HIDDEN = 48
HEADS = 4
SEQUENCE = 20
VOCABULARY = 128


def test_logits_loss_and_gradients():
    run = small_run(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        seq_length=SEQUENCE,
        vocab_size=VOCABULARY,
        init_method_std=0.2,
    )
    trainer = make_trainer(SoloComm(), run)
    for p in (
        trainer.optimizer.flat.parameters
    ):  # biases and norms start at constants: make them random as well
        p.data.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=SEQUENCE,
        n_embd=HIDDEN,
        n_layer=LAYERS,
        n_head=HEADS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    theirs = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for name, tensor in theirs.state_dict().items():
            if name != "lm_head.weight":
                tensor.copy_(
                    to_theirs(
                        name, {p.spec.name: p for p in trainer.optimizer.flat.parameters}, run.model
                    )
                )
    tokens, labels = torch.randint(
        0, VOCABULARY, (2, SEQUENCE, 2), generator=torch.Generator().manual_seed(3)
    )  # (s, b) each
    chunk = trainer.stage.last
    at = Pass(first_sample=0)
    logits = chunk.logits(chunk.decode(chunk.embedding(tokens, at), at))
    expected = theirs(tokens.t()).logits.transpose(0, 1)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())

    trainer.optimizer.zero_grad()
    loss = chunk(tokens, labels, at)
    loss.backward()
    expected = torch.nn.functional.cross_entropy(
        theirs(tokens.t()).logits.flatten(0, 1), labels.t().flatten()
    )
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    grads = {p.spec.name: p.main_grad for p in trainer.optimizer.flat.parameters}
    for name, parameter in theirs.named_parameters():
        scale = parameter.grad.abs().max()
        torch.testing.assert_close(
            to_theirs(name, grads, trainer.run.model) / scale,
            parameter.grad / scale,
            rtol=0,
            atol=1e-5,
            msg=lambda m, n=name: f"{n}: {m}",
        )
