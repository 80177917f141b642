"""GELU of torch on the kernels."""

import pytest
import torch
from torch.nn.functional import gelu

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
    assert_served(lambda x: gelu(x, approximate=form), x, operator="gelu")


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
