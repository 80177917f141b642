"""Matrix products of the backend against PyTorch's own, in every layout."""

from functools import partial

import pytest
import torch

from fugaku_megatron.torch_backend import matmul
from tests.checks.torch_backend import assert_as_torch, counting, serving

pytestmark = pytest.mark.unit

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def rows(*shape):
    return torch.randn(shape)


def columns(*shape):
    return torch.randn(*shape[:-2], shape[-1], shape[-2]).mT


def strided(*shape):
    return torch.randn(*shape[:-2], 2 * shape[-2], 3 * shape[-1])[..., ::2, ::3]


def outer_rows(*shape):
    return torch.randn(*shape[:-1], shape[-1] + 5)[..., :-5]


def constant(*shape):
    return torch.randn(()).expand(shape)


LAYOUTS = (rows, columns, strided, outer_rows, constant)


# Products have PyTorch's strides.
compare = partial(assert_as_torch, rtol=1.6e-2, atol=1e-4 * 13, check_stride=True)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(3)


def operands(a, b, dtype, *groups):
    return a(*groups, 19, 13).to(dtype), b(*groups, 13, 35).to(dtype)


@DTYPES
@pytest.mark.parametrize("b", LAYOUTS)
@pytest.mark.parametrize("a", LAYOUTS)
def test_mm_and_bmm(a, b, dtype):
    left, right = operands(a, b, dtype)
    compare(lambda: torch.mm(left, right))
    compare(lambda: torch.mm(left[:3], right))
    left, right = operands(a, b, dtype, 4)
    compare(lambda: torch.bmm(left, right))


@DTYPES
@pytest.mark.parametrize("out", LAYOUTS[:4])
@pytest.mark.parametrize("b", [rows, columns])
def test_products_into_any_output(b, out, dtype):
    left, right = operands(rows, b, dtype)
    bias = torch.randn(35).to(dtype)
    compare(lambda: torch.mm(left, right, out=out(19, 35).to(dtype)))
    compare(lambda: torch.addmm(bias, left, right, out=out(19, 35).to(dtype)))
    left, right = operands(rows, b, dtype, 4)
    compare(lambda: torch.bmm(left, right, out=out(4, 19, 35).to(dtype)))


@DTYPES
@pytest.mark.parametrize("factors", [{}, {"beta": 0.5}, {"beta": 0}, {"alpha": 2}], ids=str)
@pytest.mark.parametrize("shape", [(35,), (1, 35), (19, 1), (19, 35), (1,), ()], ids=str)
@pytest.mark.parametrize("b", [rows, columns])
def test_addmm(b, shape, factors, dtype):
    left, right = operands(rows, b, dtype)
    added = torch.randn(shape).to(dtype)
    other = columns(19, 13).to(dtype)
    compare(lambda: torch.addmm(added, left, right, **factors))
    compare(lambda: torch.addmm(added, other, right, **factors))


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="torch 2.9 has none")
@DTYPES
@pytest.mark.parametrize("b", [rows, columns])
@pytest.mark.parametrize("ends", [[7, 7, 40], [0, 24, 32]], ids=str)
def test_grouped_mm(ends, b, dtype):
    offsets = torch.tensor(ends, dtype=torch.int32)
    inputs = [rows(40, 16).to(dtype), b(3, 16, 24).to(dtype)]

    def call():
        x, weight = (each.clone().requires_grad_() for each in inputs)
        product = torch.nn.functional.grouped_mm(x, weight, offs=offsets)
        # Rows after the last group are undefined.
        loss = product[: ends[-1]].float().square().sum()
        dx, dweight = torch.autograd.grad(loss, (x, weight))
        return product.detach()[: ends[-1]], dx[: ends[-1]], dweight

    assert_as_torch(call, rtol=1.6e-2, atol=1e-1)


@pytest.mark.parametrize("m, k, n", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (1, 1, 1), (1, 5, 1)])
def test_empty_and_single(m, k, n):
    compare(lambda: torch.mm(torch.ones(m, k), torch.ones(k, n)))
    compare(lambda: torch.addmm(torch.ones(n), torch.ones(m, k), torch.ones(k, n)))
    compare(lambda: torch.bmm(torch.ones(2, m, k), torch.ones(2, k, n)))
    compare(lambda: torch.mm(torch.ones(m, 1)[:, ::2], torch.ones(1, n)))


def test_other_calls_are_pytorchs():
    """Other types, outputs that are inputs, shapes that do not fit."""
    a = torch.randn(8, 8)
    served: dict[str, int] = {}
    with serving(), counting(served):
        torch.mm(a.double(), a.double())
    assert not served.get("mm")
    assert matmul.mm(a, a.bfloat16()) is NotImplemented
    assert matmul.mm(a, a, out=a) is NotImplemented
    assert matmul.grouped_mm(a, a.expand(2, 8, 8), None, None, None) is NotImplemented
    ends = torch.tensor([9, 9])
    assert matmul.grouped_mm(a, a.expand(2, 8, 8), ends, None, None) is NotImplemented
    assert matmul.addmm(a, a, a, 1, 1, a) is NotImplemented
    assert matmul.mm(a, a, out=torch.empty(1, 8).expand(8, 8)) is NotImplemented
    with serving(), pytest.raises(RuntimeError, match="cannot be multiplied"):
        torch.mm(a, a[1:])
    with serving(), pytest.raises(RuntimeError, match="size"):
        torch.addmm(torch.ones(3), a, a)
    with serving(), pytest.warns(UserWarning, match="resized"):
        assert torch.mm(a, a, out=torch.empty(3)).shape == (8, 8)
