"""Cross-entropy of torch on the kernels."""

import pytest
import torch
from torch.func import grad, jvp, vmap
from torch.nn.functional import cross_entropy

from fugaku_megatron.torch_backend import enabled
from tests.checks.torch_backend import assert_served, counting, serving

pytestmark = pytest.mark.unit

ROWS = 24
CLASSES = 70


def random(*shape, seed=0):
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def targets(ignored=-100):
    labels = torch.randint(CLASSES, (ROWS,), generator=torch.Generator().manual_seed(1))
    labels[::5] = ignored
    return labels


LAYOUTS = {
    "contiguous": lambda: random(ROWS, CLASSES),
    "columns": lambda: random(CLASSES, ROWS).t(),
    "shifted": lambda: random(1, ROWS + 1, CLASSES)[:, :-1].reshape(-1, CLASSES),
    "masked columns": lambda: random(ROWS, CLASSES).index_fill_(
        1, torch.tensor([3, 60]), float("-inf")
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("ignored", [-100, -1, 7])
@pytest.mark.parametrize("layout", ["contiguous", "columns", "shifted"])
def test_cross_entropy(layout, ignored, reduction, dtype):
    labels = targets(ignored)

    def loss(logits):
        return cross_entropy(logits, labels, ignore_index=ignored, reduction=reduction)

    assert_served(loss, LAYOUTS[layout]().to(dtype), operator="cross_entropy_loss", scale=2)


def test_masked_columns_and_rows_that_do_not_count():
    logits = LAYOUTS["masked columns"]().requires_grad_()
    labels = targets()
    labels[labels == 3] = 4
    found = []
    for context in (enabled(False), serving()):
        with context:
            loss = cross_entropy(logits, labels)
            nothing = cross_entropy(logits, torch.full((ROWS,), -100))
            found.append((loss, nothing, *torch.autograd.grad(loss, logits)))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)


def test_transforms_and_second_derivatives():
    logits = random(ROWS, CLASSES)
    labels = targets()
    direction = random(ROWS, CLASSES, seed=2)

    def loss(x):
        return cross_entropy(x, labels)

    def values():
        x = logits.clone().requires_grad_()
        (dx,) = torch.autograd.grad(loss(x), x, create_graph=True)
        (second,) = torch.autograd.grad((dx * direction).sum(), x)
        batch = torch.stack([logits, direction])
        return (second, grad(loss)(logits), vmap(loss)(batch), *jvp(loss, (logits,), (direction,)))

    with enabled(False):
        expected = values()
    with serving():
        found = values()
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)


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
