"""Cross-entropy of torch on the kernels."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.checks.torch_backend import assert_as_torch, assert_served, counting, serving

pytestmark = pytest.mark.unit

ROWS = 24
CLASSES = 70


def random(*shape):
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(0))


def targets(ignored=-100):
    labels = torch.randint(CLASSES, (ROWS,), generator=torch.Generator().manual_seed(1))
    labels[::5] = ignored
    return labels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("ignored", [-100, -1, 7])
def test_cross_entropy(ignored, reduction, dtype):
    labels = targets(ignored)

    def loss(logits):
        return cross_entropy(logits, labels, ignore_index=ignored, reduction=reduction)

    assert_served(loss, random(ROWS, CLASSES).to(dtype), operator="cross_entropy_loss", scale=2)


def test_masked_columns_and_rows_that_do_not_count():
    logits = random(ROWS, CLASSES)
    logits[:, [3, 60]] = float("-inf")
    logits.requires_grad_()
    labels = targets()
    labels[labels == 3] = 4

    def values():
        loss = cross_entropy(logits, labels)
        nothing = cross_entropy(logits, torch.full((ROWS,), -100))
        return loss, nothing, *torch.autograd.grad(loss, logits)

    assert_as_torch(values, equal_nan=True)


def test_calls_that_stay_with_torch():
    logits = random(ROWS, CLASSES)
    labels = targets()
    served = {}
    with serving(), counting(served):
        cross_entropy(logits.double(), labels)
        cross_entropy(logits, labels, weight=torch.ones(CLASSES))
        cross_entropy(logits, labels, label_smoothing=0.1)
        cross_entropy(logits, logits.softmax(1))
        cross_entropy(logits.view(2, 12, CLASSES).transpose(1, 2), labels.view(2, 12))
        cross_entropy(logits[0], labels[1])
        cross_entropy(logits[:0], labels[:0])
        for wrong in (CLASSES, -1):
            with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
                cross_entropy(logits, labels.index_fill(0, torch.tensor([2]), wrong))
        with pytest.raises(ValueError, match="batch_size"):
            cross_entropy(logits, labels[:5])
    assert not served.get("cross_entropy_loss")
