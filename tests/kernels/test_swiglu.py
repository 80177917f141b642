"""SwiGLU and its gradient on every target this CPU runs, against double precision."""

import torch

from fugaku_megatron.host import kernels
from tests.kernels.numbers import DTYPES, assert_near, assert_refused, assert_slope, for_each, random

SHAPES = [(0, 5), (1, 1), (3, 15), (4, 16), (5, 17), (7, 67), (211, 131), (9, 768)]


def exact(x):
    """In double, of x (rows, 2, cols)."""
    return torch.nn.functional.silu(x[:, 0]) * x[:, 1]


def forward(x):
    y = x.new_empty(x.shape[0], x.shape[2])
    kernels.swiglu(x, y)
    return y


@for_each(dtype=DTYPES, shape=SHAPES)
def test_swiglu_and_its_gradient(every_target, shape, dtype):
    rows, cols = shape
    x, dy = random(rows, 2, cols, dtype=dtype) * 3, random(rows, cols, dtype=dtype, seed=2)
    leaf = x.double().requires_grad_()
    want = exact(leaf)
    want.backward(dy.double())
    assert_near(forward(x), want.detach(), dtype)
    dx = torch.empty_like(x)
    kernels.swiglu_backward(dy, x, dx)
    assert_near(dx, leaf.grad, dtype)
    kernels.swiglu_backward(dy, x, x)
    assert torch.equal(x, dx)


def test_parts_and_threads_give_the_bits_of_the_whole(every_target, guarded, same_for_any_threads):
    x, dy = random(13, 2, 71), random(13, 71, seed=2)
    whole, whole_dx = forward(x), torch.empty_like(x)
    kernels.swiglu_backward(dy, x, whole_dx)
    dx = guarded((13, 2, 71)).copy_(x)
    for columns in (slice(0, 32), slice(32, 71)):
        part = dx[:, :, columns]
        assert torch.equal(forward(part), whole[:, columns])
        kernels.swiglu_backward(dy[:, columns].contiguous(), part, part)
    assert torch.equal(dx, whole_dx)
    x, dy = random(331, 2, 131), random(331, 131, seed=2)

    def both():
        dx = torch.empty_like(x)
        kernels.swiglu_backward(dy, x, dx)
        return forward(x), dx

    same_for_any_threads(both)


def test_swiglu_backward_is_the_slope(every_target):
    x, dy = random(5, 2, 19), random(5, 19, seed=1)
    dx = torch.empty_like(x)
    kernels.swiglu_backward(dy, x, dx)
    assert_slope(lambda: (forward(x).double() * dy.double()).sum(), [x], [dx])


def test_gates_far_from_zero(every_target):
    """Also where exp(-gate) overflows; NaN and infinity as torch has them."""
    gate = torch.cat([torch.linspace(-200, 200, 4001), torch.tensor([0.0, -0.0, 1e30, -1e30, 1e-30])])
    x, dy = torch.stack([gate, torch.ones_like(gate)]).unsqueeze(0), torch.ones(1, len(gate))
    leaf = x.double().requires_grad_()
    exact(leaf).sum().backward()
    dx = torch.empty_like(x)
    kernels.swiglu_backward(dy, x, dx)
    torch.testing.assert_close(forward(x).double(), exact(leaf).detach(), rtol=4e-7, atol=1e-35)
    torch.testing.assert_close(dx.double(), leaf.grad, rtol=4e-6, atol=2e-6)
    odd = torch.tensor([float("nan"), float("inf"), float("-inf"), 1.0] * 9).view(1, 2, 18)
    torch.testing.assert_close(forward(odd), exact(odd), rtol=1e-6, atol=0, equal_nan=True)


def test_wrong_arguments_leave_everything_untouched():
    x, y = torch.ones(4, 2, 8), torch.ones(4, 8)
    assert_refused([
        (lambda: kernels.swiglu(x[:, :1], y), r"x: expected shape \(\*, 2, \*\), got \(4, 1, 8\)"),
        (lambda: kernels.swiglu(x, y[:2]), r"y: expected shape \(4, 8\), got \(2, 8\)"),
        (lambda: kernels.swiglu(x[:, :, ::2], y[:, :4]), "x: expected a contiguous last dimension"),
        (lambda: kernels.swiglu_backward(y[:, :4], x[:, :, :4], torch.ones(4, 2, 4)), "dy: expected a contiguous tensor"),
        (lambda: kernels.swiglu_backward(x[:2].view(4, 8), x, x), "dx: expected memory apart from dy"),
    ], untouched=(x, y))
