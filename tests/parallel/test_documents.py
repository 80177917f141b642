"""Training with document boundaries and loss masks: against plain PyTorch with explicit masks, and the same for every layout.

The rules themselves are tested in tests/unit/test_marks.py, attention's kernels in tests/kernels/test_attention.py.
"""

import functools
import math
from contextlib import closing

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.data.marks import FIRST, labels, mark
from fugaku_megatron.nn.forward_context import Pass
from fugaku_megatron.nn.ops import Ops
from fugaku_megatron.training.micro_batches import documents_of
from fugaku_megatron.training.trainer import Trainer
from tests.checks.documents import EOD, Texts, left_to_right
from tests.checks.plain_model import plain_losses
from tests.helpers import (
    ALLGATHER,
    CP2,
    CP4,
    DROPOUT,
    OVERLAP,
    P2P,
    PP2,
    TP2,
    build_trainer,
    small_run,
    whole_tensors,
)
from tests.llama_models import FAMILIES, copy_to, theirs
from tests.threads import ThreadWorld

ALL = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
ROPE = {"position_embedding_type": "rope", "num_layers": 2}
TWO = {"num_layers": 2}


def marked(run, data):
    return mark(data, EOD, run.data.eod_mask_loss) if run.data.marked else data


def made(world, run, backend="native") -> Trainer:
    torch.set_num_threads(1)
    data = (
        marked(run, Texts(run.model.vocab_size, run.model.seq_length, 4096, seed))
        for seed in (7, 8)
    )
    return build_trainer(run, world, *data, ops=Ops.build(backend))


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("number", range(1, 8))
def test_losses_of_a_plain_model_with_the_explicit_mask(number, backend):
    """Each combination of the flags: the mean over the labels of the global batch that count, and its gradient."""
    flags = {name: bool(number & 1 << bit) for bit, name in enumerate(ALL)}
    with closing(made(SoloComm(), small_run(**TWO, **flags), backend)) as trainer:
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
    for (name, _), gradient in zip(
        weights.items(), torch.autograd.grad(loss, [*weights.values()]), strict=True
    ):
        torch.testing.assert_close(
            got[name], gradient, rtol=0, atol=1e-5 * gradient.abs().max().item(), msg=name
        )


def documents_in(samples):
    """The number of each position's document, of every sample."""
    return [np.concatenate([[0], np.cumsum(sample[:-2] == EOD)]) for sample in samples]


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_rotary_models_of_transformers_with_the_explicit_mask(family, backend):
    """Windows, groups of heads, norms of queries and keys; all three flags."""
    pytest.importorskip("transformers")
    run = small_run(**FAMILIES[family], **ALL, init_method_std=0.2)
    with closing(made(SoloComm(), run, backend)) as trainer:
        model, ours = theirs(family), {p.spec.name: p for p in trainer.optimizer.flat.parameters}
        copy_to(model, ours, family)
        result = trainer.train_step()
    total = counted = 0.0
    for i in range(16):
        sample = trainer.train[i][0]
        seen, mask, positions = left_to_right(sample[:-1], **ALL)
        if family == "mistral":
            seen = np.triu(seen, -4)
        bias = torch.zeros(1, 1, *seen.shape).masked_fill(
            ~torch.from_numpy(seen), torch.finfo(torch.float32).min
        )
        inputs = torch.from_numpy(sample[:-1])[None]
        logits = model(
            inputs, attention_mask=bias, position_ids=torch.from_numpy(positions)[None]
        ).logits[0]
        losses = F.cross_entropy(logits, torch.from_numpy(sample[1:]), reduction="none")
        total, counted = (
            total + (losses.detach() * torch.from_numpy(mask)).sum().item(),
            counted + mask.sum(),
        )
    assert result.loss == pytest.approx(total / counted, rel=1e-5)


LAYOUTS = {
    "tp2": (2, TP2),
    "sequence": (2, {**TP2, "sequence_parallel": True}),
    "overlapped": (2, {**TP2, "sequence_parallel": True, "tp_comm_overlap": True}),
    "pp2": (2, PP2),
    "pp4": (4, {"pipeline_model_parallel_size": 4}),
    "dp2": (2, OVERLAP),
    "interleaved": (2, {**PP2, "num_layers_per_virtual_pipeline_stage": 1}),
    "zbv": (2, {**PP2, "pipeline_schedule": "zbv"}),
    "zb-h1 dp2": (4, {**PP2, "pipeline_schedule": "zb-h1"}),
    "one at a time": (1, {"micro_batch_size": 1}),
    "all at once": (1, {"micro_batch_size": 8}),
    "tp2 dp2": (4, {**TP2, "micro_batch_size": 4}),
    "cp2": (2, CP2),
    "cp2 sequence zbv": (
        8,
        {**CP2, **TP2, "sequence_parallel": True, **PP2, "pipeline_schedule": "zbv"},
    ),
    "cp4 p2p": (4, {**CP4, **P2P}),
    "cp2 allgather zbv": (4, {**CP2, **ALLGATHER, **PP2, "pipeline_schedule": "zbv"}),
    "full": (1, {"recompute_granularity": "full"}),
    "selective": (2, {**PP2, "recompute_granularity": "selective"}),
    "torch": (1, {}),
}


def course(world, run, backend="native", iterations=2):
    """Return losses, gradient norms and counted labels, and at last the loss of an evaluation."""
    with closing(made(world, run, backend)) as trainer:
        results = [trainer.train_step() for _ in range(iterations)]
        numbers = [(r.loss, r.grad_norm, r.work.counted, r.work.squares) for r in results]
        return [*numbers, trainer.evaluate(trainer.valid, 16, 2)]


TRAINED = {"global_batch_size": 8, **ALL, **DROPOUT}
POSITIONS = {"learned": TRAINED, "rope": {**TRAINED, "position_embedding_type": "rope"}}
LEARNED = ("sequence", "pp2", "zbv", "one at a time", "cp2", "cp2 sequence zbv", "torch")


@functools.cache
def alone(positions: str) -> list:
    return course(SoloComm(), small_run(**POSITIONS[positions]))


@pytest.mark.parametrize(
    ("positions", "name"),
    [
        *(("rope", name) for name in LAYOUTS),
        *(
            pytest.param("learned", name, marks=() if name in LEARNED else pytest.mark.full)
            for name in LAYOUTS
        ),
    ],
)
def test_every_layout_trains_alike(name, positions):
    ranks, layout = LAYOUTS[name]
    run = small_run(**{**POSITIONS[positions], **layout})
    expected = alone(positions)
    for got in ThreadWorld(ranks).run(course, run, "torch" if name == "torch" else "native"):
        for mine, wanted in zip(got[:-1], expected[:-1], strict=True):
            assert mine[2:] == wanted[2:] and mine[:2] == pytest.approx(wanted[:2], rel=2e-5)
        assert got[-1] == pytest.approx(expected[-1], rel=1e-5)


def test_a_batch_size_that_grows_counts_each_global_batch_by_itself():
    more = {**TWO, "eod_mask_loss": True, "rampup_batch_size": (4, 4, 16), "global_batch_size": 8}
    one = course(SoloComm(), small_run(**more), iterations=3)
    two = ThreadWorld(2).run(course, small_run(**more), "native", 3)[0]
    assert [a[2] for a in one[:-1]] == [b[2] for b in two[:-1]] and len(
        {a[2] for a in one[:-1]}
    ) > 1
    for a, b in zip(one[:-1], two[:-1], strict=True):
        assert a[:2] == pytest.approx(b[:2], rel=2e-5)


class Silent(Texts):
    """Samples of ends of documents alone, of which no label counts, from the second global batch on and in half of the first."""

    def __getitem__(self, index):
        tokens = super().__getitem__(index)
        return np.full_like(tokens, EOD) if index % 4 == 1 or index >= 16 else tokens


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_without_counted_labels_there_is_no_nan(backend):
    run = small_run(**TWO, **ALL, micro_batch_size=1)
    with closing(made(SoloComm(), run, backend)) as trainer:
        trainer.train = marked(run, Silent(run.model.vocab_size, 16, 4096, 7))
        first, second = trainer.train_step(), trainer.train_step()
        assert math.isfinite(first.loss) and first.work.counted > 0 and not first.skipped
        assert (second.loss, second.grad_norm, second.work.counted, second.skipped) == (
            0.0,
            0.0,
            0,
            False,
        )
        assert math.isnan(
            trainer.evaluate(trainer.train, 16, 1)
        )  # a loss of 0.0 would look like success
        assert all(torch.isfinite(p).all() for p in trainer.optimizer.flat.parameters)


@pytest.mark.parametrize(
    ("changes", "flags"),
    [(TWO, {**ALL, "reset_position_ids": False}), (ROPE, ALL)],
    ids=["learned", "rope"],
)
def test_flags_without_a_document_change_no_bit(changes, flags):
    """If no sample has an end of a document, marks say what is so without them.

    Gradients of learned positions that restart are summed in another order.
    """

    def losses(**flags):
        run = small_run(**changes, **DROPOUT, **flags)
        with closing(made(SoloComm(), run)) as trainer:
            plain = Texts(run.model.vocab_size, 16, 4096, 7)
            kept = type(
                "Kept",
                (Texts,),
                {"__getitem__": lambda self, i: np.where((t := plain[i]) == EOD, EOD + 1, t)},
            )
            trainer.train = marked(run, kept(run.model.vocab_size, 16, 4096, 7))
            return [trainer.train_step().loss for _ in range(2)]

    assert losses() == losses(**flags)


def test_a_run_goes_on_to_the_bit(tmp_path):
    """With another data-parallel size the samples are the same; with its own every bit is."""
    run = small_run(**TWO, **ALL, **DROPOUT)
    with closing(made(SoloComm(), run)) as trainer:
        for _ in range(2):
            trainer.train_step()
        trainer.save(str(tmp_path))
        wanted = [(trainer.train_step().loss, trainer.train_step().work.counted) for _ in range(2)]
    with closing(made(SoloComm(), run)) as again:
        again.load(str(tmp_path))
        assert [
            (again.train_step().loss, again.train_step().work.counted) for _ in range(2)
        ] == wanted


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
    """A tiny trainer of each kind of positions."""
    runs = {
        kind: small_run(**TINY, **changes, **ALL, seq_length=LENGTH, init_method_std=0.3)
        for kind, changes in KINDS.items()
    }
    return {kind: made(SoloComm(), run, request.param) for kind, run in runs.items()}


def scored(trainer, tokens, marks):
    """(logits (s, v), gradient of the words' embedding, sum of the losses) of one sample, tokens and marks (s + 1,)."""
    chunk, tokens, marks = (
        trainer.stage.last,
        torch.tensor(tokens)[:, None],
        torch.tensor(marks)[:, None],
    )
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
    """Packed among others it scores as alone; and a token of another document moves none of its bits. Of its labels alone."""
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
    marks[begin + 1 : end] |= (
        1  # its own labels count; the token after it belongs to another document
    )
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
