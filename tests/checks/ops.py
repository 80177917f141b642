"""Operations in both backends against plain torch."""

import pytest
import torch
from torch import Tensor

from fugaku_megatron.nn.ops import Ops

S = 5
B = 3
H = 12
OUT = 7
DTYPES = {
    "fp32": (torch.float32, 2e-6),
    "bf16": (torch.bfloat16, 3e-2),
    "fp16": (torch.float16, 4e-3),
}


@pytest.fixture(params=["native", "torch"])
def ops(request):
    torch.set_num_threads(1)
    return Ops.build(request.param)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def parameter(tensor: Tensor) -> torch.nn.Parameter:
    """Return a parameter as optim.FlatParameters makes it, with an FP32 gradient that is not zero."""
    made = torch.nn.Parameter(tensor)
    made.main_grad = torch.full(tensor.shape, 0.5)
    return made


def check(op, plain, inputs: list[Tensor], weights: list[Tensor], tolerance: float) -> None:
    """Compare op(*inputs, *weights) with `plain` in double: output, input gradients, weight gradients added twice."""
    parameters = [parameter(w) for w in weights]
    exact = [t.detach().double().requires_grad_() for t in (*inputs, *weights)]
    expected = plain(*exact)
    dy = random(*expected.shape, seed=77, dtype=inputs[0].dtype)
    gradients = torch.autograd.grad(expected, exact, dy.double())
    for times in (1, 2):
        leaves = [t.detach().clone().requires_grad_() for t in inputs]
        y = op(*leaves, *parameters)
        assert y.dtype == inputs[0].dtype and y.shape == expected.shape
        y.backward(dy)
        close(y, expected, tolerance)
        for leaf, exact_gradient in zip(leaves, gradients):
            close(leaf.grad, exact_gradient, tolerance)
        for p, exact_gradient in zip(parameters, gradients[len(inputs) :]):
            assert p.grad is None and p.main_grad.dtype == torch.float32
            close(p.main_grad, 0.5 + times * exact_gradient, tolerance * times)


def close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    scale = expected.abs().max().item()
    torch.testing.assert_close(
        actual.double(), expected.detach(), rtol=0, atol=tolerance * max(1.0, scale)
    )


each_dtype = pytest.mark.parametrize("name", DTYPES)


def plain_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-3) * weight
