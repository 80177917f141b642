"""Recorded steps of generation: the same bits as through the layers, no layer called again, and nothing left out."""

import pytest
import torch

from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.inference import generation
from fugaku_megatron.inference.loading import quantize
from fugaku_megatron.inference.recorded_step import RecordingKernels
from tests.checks.generation import random_model

pytestmark = pytest.mark.unit

STEPS = (
    {0: [5, 9], 1: [3]},
    {0: [7], 1: [2]},
    {0: [11], 1: [90]},
    {1: [4]},
    {1: [8]},
    {0: [1]},
    {0: [6], 1: [3]},
)


def logits(decoder, new):
    """Return the logits after the new tokens of each sample."""
    tokens = torch.tensor([token for tokens in new.values() for token in tokens])
    lengths = [len(tokens) for tokens in new.values()]
    return decoder.logits(torch.tensor(list(new)), lengths, tokens)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt2", {}),
        ("gpt2", {"squared_relu": True}),
        ("gpt2", {"bias_gelu_fusion": False}),
        ("qwen3", {}),
        ("qwen3", {"swiglu": False, "geglu": True}),
    ],
)
def test_a_repeated_step_has_the_bits_of_the_layers(family, changes, monkeypatch):
    loaded = random_model(SoloComm(), family, 1, 1, **changes)
    forwards = []
    through = generation.through_stages
    monkeypatch.setattr(
        generation, "through_stages", lambda *args: forwards.append(args) or through(*args)
    )
    recorded, plain = (generation.Decoder(loaded, [8, 8]) for _ in range(2))
    plain._recorder = None
    for new in STEPS:
        expected = logits(plain, new)
        assert torch.equal(logits(recorded, new), expected), new
    assert len(forwards) == len(STEPS) + 3, (
        "the prompts and the first step of one and of two samples"
    )


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "mixtral"])
def test_weights_in_eight_bits(family):
    """Recorded steps read the quantized weights, and their logits are near those of the model's own weights."""
    loaded = random_model(SoloComm(), family, 1, 1)
    exact = [logits(generation.Decoder(loaded, [8, 8]), new) for new in STEPS[:1]]
    floats = sum(p.nbytes for p in loaded.stage.parameters())
    quantize(loaded.stage)
    assert sum(p.nbytes for p in loaded.stage.parameters()) < 0.6 * floats
    recorded, plain = (generation.Decoder(loaded, [8, 8]) for _ in range(2))
    plain._recorder = None
    got = []
    for new in STEPS:
        got.append(logits(recorded, new))
        assert torch.equal(got[-1], logits(plain, new)), new
    assert not torch.equal(got[0], exact[0])
    assert (got[0] - exact[0]).norm() < 0.1 * exact[0].norm()


def test_other_heads_and_what_no_kernel_computes():
    kernels = RecordingKernels()
    x = torch.ones(3)
    with pytest.raises(AssertionError, match="computes something that no kernel does"):
        kernels.record(lambda: x + 1, (x,))
    assert len(kernels.record(lambda: x.new_empty(3).view(3, 1), (x,)).calls) == 0
    loaded = random_model(SoloComm(), "gpt2", 1, 1, kv_channels=6, kernels="torch")
    one_by_one, at_once = (generation.Decoder(loaded, [8]) for _ in range(2))
    last = [logits(one_by_one, {0: ids}) for ids in ([5, 9], [7], [11], [4])][-1]
    torch.testing.assert_close(last, logits(at_once, {0: [5, 9, 7, 11, 4]}))
