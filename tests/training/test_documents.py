"""Training with document boundaries and loss masks, against plain PyTorch with explicit masks.

The rules themselves are tested in tests/data/test_marks.py, attention's kernels in tests/kernels/test_attention.py.
"""

import math
from contextlib import closing

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.data.marks import FIRST, labels, mark
from fugaku_megatron.nn.forward_context import Pass
from fugaku_megatron.nn.ops import Ops
from fugaku_megatron.training.micro_batches import documents_of
from tests.checks.documents import EOD, RESETS, Texts, left_to_right
from tests.checks.layouts import texts, train_together
from tests.checks.plain_model import plain_losses
from tests.helpers import DROPOUT, assert_near, make_trainer, small_run, whole_tensors

pytestmark = pytest.mark.parallel


def text_trainer(run, backend="native"):
    """Build a trainer for one rank and samples with several documents."""
    return make_trainer(SoloComm(), run, Ops.build(backend), texts(run))


ROPE = {"position_embedding_type": "rope", "num_layers": 2}
TWO = {"num_layers": 2}


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("number", range(1, 8))
def test_losses_of_a_plain_model_with_the_explicit_mask(number, backend):
    """Each combination of flags: the mean over the global batch's counted labels, and its gradient."""
    flags = {name: bool(number & 1 << bit) for bit, name in enumerate(RESETS)}
    with closing(text_trainer(small_run(**TWO, **flags), backend)) as trainer:
        weights = {name: w.requires_grad_() for name, w in whole_tensors(trainer, "weight").items()}
        result = trainer.train_step()
        got = whole_tensors(trainer, "grad")
    samples = [trainer.train[i][0] for i in range(16)]
    seen, mask, positions = (
        torch.from_numpy(np.stack(part))
        for part in zip(*(left_to_right(x[:-1], **flags) for x in samples))
    )
    tokens = torch.from_numpy(np.stack(samples))
    losses = plain_losses(
        weights, tokens[:, :-1], tokens[:, 1:], trainer.run.model, seen, positions
    )
    loss = (losses * mask).sum() / mask.sum()
    assert result.loss == pytest.approx(loss.item(), rel=1e-5) and result.work.counted == mask.sum()
    assert result.work.squares == sum(
        np.square(np.unique(row, return_counts=True)[1]).sum() for row in documents_in(samples)
    )
    gradients = torch.autograd.grad(loss, [*weights.values()])
    assert_near(got, dict(zip(weights, gradients, strict=True)), 1e-5)


def documents_in(samples):
    """Return every sample's document numbers by position."""
    return [np.concatenate([[0], np.cumsum(sample[:-2] == EOD)]) for sample in samples]


def test_a_batch_size_that_grows_counts_each_global_batch_by_itself():
    more = {**TWO, "eod_mask_loss": True, "rampup_batch_size": (4, 4, 16), "global_batch_size": 8}
    one, two = (train_together(ranks, more, texts, iterations=3) for ranks in (1, 2))
    assert one.counts == two.counts and len(set(one.counts)) > 2
    assert one.figures == pytest.approx(two.figures, rel=2e-5)


class Silent(Texts):
    """Samples without a counted label from the second global batch on, and in half of the first."""

    def __getitem__(self, index):
        tokens = super().__getitem__(index)
        return np.full_like(tokens, EOD) if index % 4 == 1 or index >= 16 else tokens


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_without_counted_labels_there_is_no_nan(backend):
    run = small_run(**TWO, **RESETS, micro_batch_size=1)
    with closing(text_trainer(run, backend)) as trainer:
        trainer.train = mark(Silent(run.model.vocab_size, 16, 4096, 7), EOD, True)
        first = trainer.train_step()
        second = trainer.train_step()
        assert math.isfinite(first.loss) and first.work.counted > 0 and not first.skipped
        assert (second.loss, second.grad_norm, second.work.counted, second.skipped) == (
            0.0,
            0.0,
            0,
            False,
        )
        # a loss of 0.0 would look like success
        assert math.isnan(trainer.evaluate(trainer.train, 16, 1))
        assert all(torch.isfinite(p).all() for p in trainer.optimizer.flat.parameters)


@pytest.mark.parametrize(
    ("changes", "flags"),
    [(TWO, {**RESETS, "reset_position_ids": False}), (ROPE, RESETS)],
    ids=["learned", "rope"],
)
def test_flags_without_a_document_change_no_bit(changes, flags):
    """If no sample has an end of a document, marks say what is so without them.

    Gradients of learned positions that restart are summed in another order.
    """

    def losses(**flags):
        run = small_run(**changes, **DROPOUT, **flags)
        with closing(text_trainer(run)) as trainer:
            plain = Texts(run.model.vocab_size, 16, 4096, 7)
            kept = type(
                "Kept",
                (Texts,),
                {"__getitem__": lambda self, i: np.where((t := plain[i]) == EOD, EOD + 1, t)},
            )
            trainer.train = kept(run.model.vocab_size, 16, 4096, 7)
            if run.data.marked:
                trainer.train = mark(trainer.train, EOD, run.data.eod_mask_loss)
            return [trainer.train_step().loss for _ in range(2)]

    assert losses() == losses(**flags)


# A document among others --------------------------------------------------------------------------------------------------------

TINY = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 32}
LENGTH = 16
KINDS = {
    "learned": {},
    "rope": {
        "position_embedding_type": "rope",
        "swiglu": True,
        "normalization": "RMSNorm",
        "group_query_attention": True,
        "num_query_groups": 1,
    },
}


@pytest.fixture(scope="module", params=["native", "torch"])
def models(request):
    """Build a tiny trainer for each kind of positions."""
    runs = {
        kind: small_run(**TINY, **changes, **RESETS, seq_length=LENGTH, init_method_std=0.3)
        for kind, changes in KINDS.items()
    }
    return {kind: text_trainer(run, request.param) for kind, run in runs.items()}


def scored(trainer, tokens, marks):
    """Return logits (s, v), gradients, and the summed loss for one sample. tokens, marks: (s + 1,)"""
    chunk = trainer.stage.last
    tokens = torch.tensor(tokens)[:, None]
    marks = torch.tensor(marks)[:, None]
    at = Pass(first_sample=0, documents=documents_of(marks, trainer.run.data), count=1)
    with torch.no_grad():
        logits = chunk.logits(chunk.decode(chunk.embedding(tokens[:-1], at), at))[:, 0].clone()
    trainer.optimizer.zero_grad()
    loss = chunk(tokens[:-1], labels(tokens, marks), at)
    loss.backward()
    return logits, whole_tensors(trainer, "grad"), loss.item()


@given(st.data())
@settings(max_examples=60)
@pytest.mark.parametrize("kind", KINDS)
def test_a_document_does_not_see_others(models, kind, data):
    """A packed document scores as it does alone, and a token in another document changes none of its bits."""
    trainer = models[kind]
    tokens = np.array(
        data.draw(st.lists(st.integers(4, 31), min_size=LENGTH + 1, max_size=LENGTH + 1))
    )
    ends = sorted(data.draw(st.sets(st.integers(0, LENGTH - 2), min_size=1, max_size=5)))
    tokens[ends] = EOD
    bounds = [0, *(end + 1 for end in ends), LENGTH]
    number = data.draw(st.integers(0, len(bounds) - 2))
    begin, end = bounds[number : number + 2]
    marks = np.zeros(LENGTH + 1, np.int64)
    marks[[b for b in bounds[:-1]]] |= FIRST
    # its own labels count; the token after it belongs to another document
    marks[begin + 1 : end] |= 1
    packed = scored(trainer, tokens, marks)
    alone = np.full(LENGTH + 1, 4), np.where(np.arange(LENGTH + 1) == end - begin, FIRST, 0)
    alone[0][: end - begin] = tokens[begin:end]
    alone[1][1 : end - begin] |= 1
    single = scored(trainer, *alone)
    torch.testing.assert_close(
        packed[0][begin:end],
        single[0][: end - begin],
        rtol=0,
        atol=1e-6 * single[0].abs().max().item(),
    )
    assert packed[2] == pytest.approx(single[2], rel=1e-6, abs=1e-6)
    for name, gradient in single[1].items():
        torch.testing.assert_close(
            packed[1][name],
            gradient,
            rtol=0,
            atol=1e-6 * max(1.0, gradient.abs().max().item()),
            msg=name,
        )
    others = [i for i in range(LENGTH + 1) if not begin <= i < end]
    place = data.draw(st.sampled_from(others))
    changed = tokens.copy()
    changed[place] = (tokens[place] + data.draw(st.integers(1, 27)) - 4) % 28 + 4
    other = scored(trainer, changed, marks)
    assert torch.equal(other[0][begin:end], packed[0][begin:end]) and other[2] == packed[2]
    assert all(torch.equal(other[1][name], packed[1][name]) for name in packed[1])
