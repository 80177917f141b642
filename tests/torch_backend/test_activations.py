"""GELU and SiLU of torch and their gradients on the kernels."""

from functools import partial

import pytest
import torch
from torch.nn.functional import gelu

from fugaku_megatron.torch_backend import enabled
from tests.checks.torch_backend import assert_served, counting, serving

pytestmark = pytest.mark.unit

DTYPES = [torch.float32, torch.bfloat16]
FORMS = [("silu", {}), ("gelu", {"approximate": "none"}), ("gelu", {"approximate": "tanh"})]


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
@pytest.mark.parametrize(("name", "options"), FORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_gradients(layout, name, options, dtype):
    x = LAYOUTS[layout]().to(dtype)
    function = partial(getattr(torch.nn.functional, name), **options)
    for operator in (name, f"{name}_backward"):
        assert_served(function, x, operator=operator)


@pytest.mark.parametrize(("name", "options"), FORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs(layout, name, options):
    x = LAYOUTS[layout]()
    dy = torch.cos(x)
    aten = torch.ops.aten
    operator = getattr(aten, name)
    backward = getattr(aten, f"{name}_backward")
    with enabled(False):
        want = operator(x, **options)
        want_gradient = backward(dy, x, **options)
    place = x.clone()
    with serving():
        assert getattr(aten, f"{name}_")(place, **options) is place
        for shape in (x.shape, 0):
            got = operator.out(x, **options, out=torch.empty(shape))
            torch.testing.assert_close(got, want)
            got = backward.grad_input(dy, x, **options, grad_input=torch.empty(shape))
            torch.testing.assert_close(got, want_gradient)
    torch.testing.assert_close(place, want)


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
