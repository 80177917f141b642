"""Vocabulary-parallel cross-entropy on every target this CPU runs, against double precision.

Legend: rows of logits, v vocabulary, of which a rank holds the words from first_row.
"""

import pytest
import torch
from torch.nn import functional as F

from fugaku_megatron.host import kernels
from tests.kernels.numbers import assert_refused, for_each

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


def double_loss(logits, labels, dloss):
    leaf = logits.double().requires_grad_()
    loss = F.cross_entropy(leaf, labels, reduction="none")
    loss.backward(dloss.double())
    return loss.detach(), leaf.grad


@for_each(dtype=ROUNDING, shape=SHAPES)
def test_forward_and_backward(every_target, shape, dtype):
    logits, labels, dloss = sample(*shape, dtype)
    row_max, sum_exp, target_logit = forward(logits, labels)
    loss, grad = double_loss(logits, labels, dloss)
    torch.testing.assert_close((sum_exp.log() - target_logit).double(), loss, rtol=2e-6, atol=4e-6)
    assert torch.equal(row_max, logits.float().amax(-1))
    for out in (
        torch.empty_like(logits, dtype=torch.bfloat16),
        torch.empty_like(logits, dtype=torch.float32),
        logits,
    ):
        kernels.cross_entropy_backward(
            logits, row_max, sum_exp, labels, 0, dloss, out
        )  # the last one in place
        torch.testing.assert_close(out.double(), grad, rtol=ROUNDING[out.dtype] * 2, atol=1e-6)


@pytest.mark.parametrize("ranks", [2, 3])
def test_split_vocabulary(every_target, ranks):
    """Ranks' shares with the all-reduces done by hand give what the whole vocabulary gives."""
    logits, labels, dloss = sample(9, 130 * ranks, seed=1)
    shares = [share.contiguous() for share in logits.chunk(ranks, 1)]
    row_maxima, sums, target_logit = ([torch.empty(9) for _ in shares] for _ in range(3))
    for share, row_max in zip(shares, row_maxima, strict=True):
        kernels.cross_entropy_max(share, row_max)
    row_max = torch.stack(row_maxima).amax(0)
    for i, share in enumerate(shares):
        kernels.cross_entropy_sum(share, row_max, labels, 130 * i, sums[i], target_logit[i])
    sum_exp = torch.stack(sums).sum(0)
    loss, grad = double_loss(logits, labels, dloss)
    torch.testing.assert_close(
        (sum_exp.log() - torch.stack(target_logit).sum(0)).double(), loss, rtol=2e-6, atol=4e-6
    )
    for i, share in enumerate(shares):
        kernels.cross_entropy_backward(share, row_max, sum_exp, labels, 130 * i, dloss, share)
    torch.testing.assert_close(torch.cat(shares, 1).double(), grad, rtol=4e-6, atol=1e-6)


@for_each(dtype=ROUNDING, words=[1, 17, 2048, 2063, 4500])
def test_masked_columns_count_nothing(every_target, words, dtype):
    """Padding of the vocabulary is -inf: loss and gradient are the same as for the words alone, and the padding's gradient is exactly 0."""
    logits, labels, dloss = sample(5, 4500, dtype, seed=6)
    logits = logits - 60
    labels = labels % words
    logits[:, words:] = float("-inf")
    row_max, sum_exp, target_logit = forward(logits, labels)
    loss, grad = double_loss(logits[:, :words], labels, dloss)
    torch.testing.assert_close((sum_exp.log() - target_logit).double(), loss, rtol=2e-6, atol=4e-6)
    kernels.cross_entropy_backward(logits, row_max, sum_exp, labels, 0, dloss, logits)
    torch.testing.assert_close(
        logits[:, :words].double(), grad, rtol=ROUNDING[dtype] * 2, atol=1e-6
    )
    assert not logits[:, words:].any()


@for_each(dtype=ROUNDING, odd=[1.0, float("nan"), float("inf"), float("-inf")])
def test_rows_without_a_label_count_nothing(every_target, odd, dtype):
    """A label of -1: whatever the row's logits are, its sums are 0 and its gradient is exactly 0; other rows keep their bits."""
    logits, labels, dloss = sample(7, 2050, dtype, seed=7)
    want = forward(logits, labels)
    gradient = torch.empty_like(logits)
    kernels.cross_entropy_backward(logits, *want[:2], labels, 0, dloss, gradient)
    ignored = torch.tensor([True, False, False, True, True, False, True])
    masked = labels.masked_fill(ignored, -1)
    logits[ignored, 5:2040] = odd
    for first_row in (0, 3):  # of a vocabulary in parts, -1 is not the label of another rank
        sums, target = torch.full((2, 7), 7.0)
        kernels.cross_entropy_sum(
            logits, want[0], masked + (masked >= 0) * first_row, first_row, sums, target
        )
        assert not sums[ignored].any() and not target[ignored].any()
    row_max, sum_exp, target_logit = forward(logits, masked)
    for got, before in zip((row_max, sum_exp, target_logit), want, strict=True):
        assert torch.equal(got, before.masked_fill(ignored, 0.0))
    kernels.cross_entropy_backward(logits, row_max, sum_exp, masked, 0, dloss, logits)
    assert torch.equal(logits, gradient.masked_fill(ignored.unsqueeze(-1), 0.0))


@for_each(dtype=ROUNDING, ranks=[1, 2])
def test_z_loss(every_target, ranks, dtype):
    """The gradient of a loss that has z_loss (log sum exp)^2 added, of a vocabulary on one rank or more; 0 changes no bit."""
    logits, labels, dloss = sample(6, 1034 * ranks, dtype, seed=8)
    leaf = logits.double().requires_grad_()
    loss = F.cross_entropy(leaf, labels, reduction="none") + 0.02 * leaf.logsumexp(-1) ** 2
    loss.backward(dloss.double())
    row_max, sum_exp, _ = forward(logits, labels)
    for i, share in enumerate(logits.chunk(ranks, 1)):
        share = share.contiguous()
        out = torch.empty(6, 1034)
        kernels.cross_entropy_backward(share, row_max, sum_exp, labels, 1034 * i, dloss, out, 0.02)
        torch.testing.assert_close(
            out.double(), leaf.grad[:, 1034 * i : 1034 * (i + 1)], rtol=4e-6, atol=1e-6
        )
        kernels.cross_entropy_backward(share, row_max, sum_exp, labels, 1034 * i, dloss, out, 0.0)
        kernels.cross_entropy_backward(
            share, row_max, sum_exp, labels, 1034 * i, dloss, plain := torch.empty(6, 1034)
        )
        assert torch.equal(out, plain)


def test_chunks_of_rows_give_the_bits_of_the_whole(every_target):
    logits, labels, dloss = sample(23, 300, seed=2)
    row_max, sum_exp, _ = forward(logits, labels)
    whole = torch.empty_like(logits)
    kernels.cross_entropy_backward(logits, row_max, sum_exp, labels, 0, dloss, whole)
    for rows in (slice(0, 7), slice(7, 8), slice(8, 23)):
        part_max, part_sum, _ = forward(logits[rows], labels[rows])
        part = torch.empty_like(logits[rows])
        kernels.cross_entropy_backward(
            logits[rows], part_max, part_sum, labels[rows], 0, dloss[rows], part
        )
        assert torch.equal(part, whole[rows])


def test_same_bits_for_any_number_of_threads(every_target, same_for_any_threads):
    logits, labels, dloss = sample(29, 2501, seed=3)

    def loss_and_gradient():
        row_max, sum_exp, target_logit = forward(logits, labels)
        out = torch.empty_like(logits)
        kernels.cross_entropy_backward(logits, row_max, sum_exp, labels, 0, dloss, out)
        return row_max, sum_exp, target_logit, out

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
    torch.testing.assert_close(
        sum_exp.log() - target_logit, want, rtol=1e-6, atol=1e-5, equal_nan=True
    )
    assert want.isnan().tolist() == [False, True, True, True, False]


def test_wrong_arguments_leave_everything_untouched():
    logits = torch.ones(4, 8)
    labels = torch.zeros(4, dtype=torch.int64)
    rows = [torch.ones(4) for _ in range(4)]
    half = logits.flatten().view(torch.bfloat16)[:32].view(4, 8)  # the first half of logits' bytes
    assert_refused(
        [
            (
                lambda: kernels.cross_entropy_forward(
                    logits, torch.tensor([0, 1, 8, 2]), *rows[:3]
                ),
                "labels: expected words of the vocabulary, 0 to 7, or -1, got 8 at 2",
            ),
            (
                lambda: kernels.cross_entropy_forward(
                    logits, torch.tensor([0, 1, -2, 2]), *rows[:3]
                ),
                "labels: expected words of the vocabulary, 0 to 7, or -1, got -2 at 2",
            ),
            (
                lambda: kernels.cross_entropy_sum(logits, rows[0], labels[:3], 0, *rows[1:3]),
                r"labels: expected shape \(4,\), got \(3,\)",
            ),
            (
                lambda: kernels.cross_entropy_forward(logits, labels.int(), *rows[:3]),
                "labels: expected dtype int64",
            ),
            (
                lambda: kernels.cross_entropy_forward(logits, labels, rows[0], rows[1], rows[1]),
                "target_logit: expected memory apart from sum_exp",
            ),
            (
                lambda: kernels.cross_entropy_backward(
                    logits, rows[0], rows[1], labels, 0, rows[2], half
                ),
                "out: expected the memory of logits or memory apart from it",
            ),
        ],
        untouched=(logits, *rows),
    )
