"""Vocabulary-parallel cross-entropy on every target, against double precision.

Legend: v vocabulary; a rank's shard begins at first_row.
"""

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from fugaku_megatron.host import kernels
from tests.kernels.numbers import assert_equal, for_each, refuses, with_gradients

pytestmark = pytest.mark.kernels

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
SHAPES = [
    (0, 7),
    (1, 1),
    (3, 15),
    (2, 16),
    (5, 17),
    (7, 64),
    (3, 65),
    (4, 2048),
    (3, 2049),
    (5, 5027),
]


def sample(rows, v, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, v, generator=generator) * 5).to(dtype)
    return (
        logits,
        torch.randint(v, (rows,), generator=generator),
        torch.randn(rows, generator=generator),
    )


def forward(logits, labels):
    out = [torch.empty(len(logits)) for _ in range(3)]
    kernels.cross_entropy_forward(logits, labels, *out)
    return out


def backward(logits, sums, labels, dloss, out=None, first_row=0, **options):
    """Return the logits' gradient. sums: row_max, sum_exp, ..."""
    out = torch.empty_like(logits) if out is None else out
    kernels.cross_entropy_backward(logits, *sums[:2], labels, first_row, dloss, out, **options)
    return out


def double_loss(logits, labels, dloss, z_loss=0.0):
    def loss(x):
        return F.cross_entropy(x, labels, reduction="none") + z_loss * x.logsumexp(-1) ** 2

    return with_gradients(loss, [logits], dloss)


def assert_loss(sum_exp, target_logit, want):
    loss = (sum_exp.log() - target_logit).double()
    assert_close(loss, want, rtol=2e-6, atol=4e-6)


def assert_gradient(got, want):
    tolerance = 2 * ROUNDING[got.dtype]
    assert_close(got.double(), want, rtol=tolerance, atol=1e-6)


@for_each(dtype=ROUNDING, shape=SHAPES)
def test_forward_and_backward(every_target, shape, dtype):
    logits, labels, dloss = sample(*shape, dtype)
    sums = forward(logits, labels)
    loss, grad = double_loss(logits, labels, dloss)
    assert_loss(*sums[1:], loss)
    assert torch.equal(sums[0], logits.float().amax(-1))
    for out in (logits.new_empty(shape, dtype=torch.bfloat16), torch.empty(shape), logits):
        assert_gradient(backward(logits, sums, labels, dloss, out), grad)


@for_each(ranks=[2, 3])
def test_split_vocabulary(every_target, ranks):
    """Shards of the vocabulary, all-reduced by hand, have the results of the whole."""
    logits, labels, dloss = sample(9, 130 * ranks, seed=1)
    shards = [shard.contiguous() for shard in logits.chunk(ranks, 1)]
    row_max, sum_exp, target_logit = (torch.empty(ranks, 9) for _ in range(3))
    for shard, maximum in zip(shards, row_max, strict=True):
        kernels.cross_entropy_max(shard, maximum)
    row_max = row_max.amax(0)
    for i, shard in enumerate(shards):
        kernels.cross_entropy_sum(shard, row_max, labels, 130 * i, sum_exp[i], target_logit[i])
    sums = row_max, sum_exp.sum(0)
    loss, grad = double_loss(logits, labels, dloss)
    assert_loss(sums[1], target_logit.sum(0), loss)
    for i, shard in enumerate(shards):
        backward(shard, sums, labels, dloss, shard, 130 * i)
    assert_gradient(torch.cat(shards, 1), grad)


@for_each(dtype=ROUNDING, words=[1, 17, 2048, 2063, 4500])
def test_masked_columns_count_nothing(every_target, words, dtype):
    """Padding of the vocabulary is -inf: the words' results do not change, and the padding's gradient is exactly 0."""
    logits, labels, dloss = sample(5, 4500, dtype, seed=6)
    logits = logits - 60
    labels = labels % words
    logits[:, words:] = float("-inf")
    sums = forward(logits, labels)
    loss, grad = double_loss(logits[:, :words], labels, dloss)
    assert_loss(*sums[1:], loss)
    backward(logits, sums, labels, dloss, logits)
    assert_gradient(logits[:, :words], grad)
    assert not logits[:, words:].any()


@for_each(dtype=ROUNDING, odd=[1.0, float("nan"), float("inf"), float("-inf")])
def test_rows_without_a_label_count_nothing(every_target, odd, dtype):
    """With a label of -1 a row's sums and gradient are exactly 0; other rows keep their bits."""
    logits, labels, dloss = sample(7, 2050, dtype, seed=7)
    want = forward(logits, labels)
    gradient = backward(logits, want, labels, dloss)
    ignored = torch.tensor([True, False, False, True, True, False, True])
    masked = labels.masked_fill(ignored, -1)
    logits[ignored, 5:2040] = odd
    for first_row in (0, 3):  # in a shard of the vocabulary -1 is no other rank's label
        sums, target = torch.full((2, 7), 7.0)
        shifted = masked + (masked >= 0) * first_row
        kernels.cross_entropy_sum(logits, want[0], shifted, first_row, sums, target)
        assert not sums[ignored].any() and not target[ignored].any()
    got = forward(logits, masked)
    assert_equal(got, [before.masked_fill(ignored, 0.0) for before in want])
    backward(logits, got, masked, dloss, logits)
    assert torch.equal(logits, gradient.masked_fill(ignored.unsqueeze(-1), 0.0))


@for_each(dtype=ROUNDING, ranks=[1, 2])
def test_z_loss(every_target, ranks, dtype):
    """z_loss (log sum exp)^2 is added to the loss, also for shards; 0 changes no bit."""
    logits, labels, dloss = sample(6, 1034 * ranks, dtype, seed=8)
    _, grad = double_loss(logits, labels, dloss, 0.02)
    sums = forward(logits, labels)
    for i, shard in enumerate(logits.chunk(ranks, 1)):
        call = shard.contiguous(), sums, labels, dloss, torch.empty(6, 1034), 1034 * i
        assert_gradient(backward(*call, z_loss=0.02), grad[:, 1034 * i : 1034 * (i + 1)])
        without = backward(*call, z_loss=0.0).clone()
        assert torch.equal(without, backward(*call))


def test_chunks_of_rows_give_the_bits_of_the_whole(every_target):
    logits, labels, dloss = sample(23, 300, seed=2)
    whole = backward(logits, forward(logits, labels), labels, dloss)
    for rows in (slice(0, 7), slice(7, 8), slice(8, 23)):
        block = logits[rows], labels[rows]
        part = backward(block[0], forward(*block), block[1], dloss[rows])
        assert torch.equal(part, whole[rows])


def test_same_bits_for_any_number_of_threads(every_target, same_for_any_threads):
    logits, labels, dloss = sample(29, 2501, seed=3)

    def loss_and_gradient():
        sums = forward(logits, labels)
        return *sums, backward(logits, sums, labels, dloss)

    same_for_any_threads(loss_and_gradient)


def test_extreme_logits_as_torch(every_target):
    """Whole blocks of -inf are not words; +inf, NaN and a row of -inf give NaN, in that row alone."""
    logits, labels, _ = sample(5, 4500, seed=4)
    labels.fill_(4400)
    logits[0, :4200] = float("-inf")
    logits[1, 3000] = float("inf")
    logits[2, 9] = float("nan")
    logits[3] = float("-inf")
    logits[4, 17] = 3e38
    want = F.cross_entropy(logits, labels, reduction="none")
    _, sum_exp, target_logit = forward(logits, labels)
    got = sum_exp.log() - target_logit
    assert_close(got, want, rtol=1e-6, atol=1e-5, equal_nan=True)
    assert want.isnan().tolist() == [False, True, True, True, False]


def test_wrong_arguments_leave_everything_untouched():
    logits = torch.ones(4, 8)
    labels = torch.tensor([0, 1, 8, 2])
    good = torch.zeros(4, dtype=torch.int64)
    row_max, sum_exp, target_logit, dloss = torch.ones(4, 4)
    half = logits.flatten().view(torch.bfloat16)[:32].view(4, 8)  # the first half of logits' bytes
    refuses(
        kernels.cross_entropy_forward,
        (logits, good, row_max, sum_exp, target_logit),
        {
            "labels: expected words of the vocabulary, 0 to 7, or -1, got 8 at 2": labels,
            "labels: expected words of the vocabulary, 0 to 7, or -1, got -2 at 0": good - 2,
            "labels: expected dtype int64": labels.int(),
            "target_logit: expected memory apart from sum_exp": sum_exp,
        },
    )
    refuses(
        kernels.cross_entropy_sum,
        (logits, row_max, good, 0, sum_exp, target_logit),
        {r"labels: expected shape \(4,\), got \(3,\)": good[:3]},
    )
    refuses(
        kernels.cross_entropy_backward,
        (logits, row_max, sum_exp, good, 0, dloss, logits.clone()),
        {"out: expected the memory of logits or memory apart from it": half},
    )
