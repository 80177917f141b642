"""GELU and SiLU of torch and their gradients on the kernels."""

import pytest
import torch
from torch.nn.functional import gelu, silu

from fugaku_megatron.torch_backend import enabled
from tests.checks.torch_backend import assert_served, counting, serving

pytestmark = pytest.mark.unit

DTYPES = [torch.float32, torch.bfloat16]
FORMS = ["none", "tanh"]


def random(*shape):
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(0))


LAYOUTS = {
    "contiguous": lambda: random(6, 10, 32),
    "transposed": lambda: random(6, 10, 32).transpose(0, 1),
    "columns first": lambda: random(6, 32, 10).transpose(1, 2),
    "channels last": lambda: random(2, 3, 5, 7).to(memory_format=torch.channels_last),
    "half of each row": lambda: random(6, 10, 64)[..., :32],
    "every second": lambda: random(6, 10, 64)[..., ::2],
    "many elements": lambda: random(8, 33, 512),
    "number": lambda: random(),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gelu(layout, form, dtype):
    x = LAYOUTS[layout]().to(dtype)
    for operator in ("gelu", "gelu_backward"):
        assert_served(lambda x: gelu(x, approximate=form), x, operator=operator)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_silu(layout, dtype):
    x = LAYOUTS[layout]().to(dtype)
    for operator in ("silu", "silu_backward"):
        assert_served(silu, x, operator=operator)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_of_silu(layout):
    x = LAYOUTS[layout]()
    dy = torch.cos(x)
    with enabled(False):
        want = silu(x)
        want_gradient = torch.ops.aten.silu_backward(dy, x)
    place = x.clone()
    with serving():
        outputs = [torch.ops.aten.silu.out(x, out=torch.empty(shape)) for shape in (x.shape, 0)]
        assert silu(place, inplace=True) is place
        gradients = [
            torch.ops.aten.silu_backward.grad_input(dy, x, grad_input=torch.empty(shape))
            for shape in (x.shape, 0)
        ]
    for got in (*outputs, place):
        torch.testing.assert_close(got, want)
    for got in gradients:
        torch.testing.assert_close(got, want_gradient)


@pytest.mark.parametrize("function", [gelu, silu])
def test_gradient_of_a_sum(function):
    """An expanded gradient, and a second derivative."""
    x = LAYOUTS["contiguous"]().requires_grad_()
    found = []
    for context in (enabled(False), serving()):
        with context:
            (dx,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
            found.append((dx, *torch.autograd.grad(dx.square().sum(), x)))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs(layout, form):
    x = LAYOUTS[layout]()
    with enabled(False):
        want = gelu(x, approximate=form)
    place = x.clone()
    with serving():
        out = torch._C._nn.gelu(x, approximate=form, out=torch.empty(x.shape))
        alone = torch._C._nn.gelu(x, approximate=form, out=torch.empty(0))
        assert torch._C._nn.gelu_(place, approximate=form) is place
    for got in (out, alone, place):
        torch.testing.assert_close(got, want)


def test_output_that_overlaps():
    memory = random(41)
    with serving(), pytest.raises(RuntimeError, match="memory"):
        torch._C._nn.gelu(memory[:40], out=memory[1:])


def test_calls_that_stay_with_torch():
    served = {}
    with serving(), counting(served):
        gelu(random(3, 4).double())
        gelu(random(0, 4))
        with pytest.raises(RuntimeError, match="approximate"):
            gelu(random(3, 4), approximate="exact")
    assert not served.get("gelu")
