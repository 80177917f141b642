"""Layer norm and RMS norm of torch on the kernels."""

import pytest
import torch
from torch.nn.functional import layer_norm, rms_norm

from tests.checks.torch_backend import assert_as_torch, assert_served, counting, serving

pytestmark = pytest.mark.unit

DTYPES = [torch.float32, torch.bfloat16]
WIDTH = 32


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
def test_several_dimensions(dtype):
    x, weight, bias = (random(*shape).to(dtype) for shape in [(5, 4, 8), (4, 8), (4, 8)])

    def layer(x, weight, bias):
        return layer_norm(x, (4, 8), weight, bias)

    def root_mean_square(x, weight):
        return rms_norm(x, (4, 8), weight)

    assert_served(layer, x, weight, bias, operator="native_layer_norm", scale=4)
    assert_served(root_mean_square, x, weight, operator="rms_norm", scale=4)


@pytest.mark.parametrize(
    "wanted", [[True, False, False], [False, True, True], [False, False, True]]
)
def test_wanted_gradients(wanted):
    x, dy, weight, bias = (random(*shape) for shape in [(6, WIDTH), (6, WIDTH), (WIDTH,), (WIDTH,)])
    _, *statistics = torch.native_layer_norm(x, [WIDTH], weight, bias, 1e-5)

    def backward():
        operator = torch.ops.aten.native_layer_norm_backward
        return operator(dy, x, [WIDTH], *statistics, weight, bias, wanted)

    assert_as_torch(backward)


def test_mixed_types_stay_with_torch():
    x = random(6, WIDTH).bfloat16()
    served = {}
    with serving(), counting(served):
        layer_norm(x, (WIDTH,), torch.ones(WIDTH), torch.ones(WIDTH))
        rms_norm(x.double(), (WIDTH,))
    assert not served.get("native_layer_norm")
    assert not served.get("rms_norm")


def test_default_epsilon():
    x = 1e-4 * random(6, WIDTH)
    assert_as_torch(lambda: [rms_norm(x.to(dtype), (WIDTH,)) for dtype in DTYPES])


class TestComposition:
    """RMS norm has no derivative of its own in torch."""

    @staticmethod
    def inputs():
        return [random(4, 8).requires_grad_(), random(8, seed=1).requires_grad_()]

    @pytest.mark.parametrize("wanted", [0, 1])
    def test_one_gradient(self, wanted):
        inputs = [each.detach() for each in self.inputs()]
        inputs[wanted].requires_grad_()

        def gradient():
            return torch.autograd.grad(rms_norm(inputs[0], (8,), inputs[1]).sum(), inputs[wanted])

        assert_as_torch(gradient)

    def test_transforms_modes_and_traces(self):
        """These see torch's own operators."""
        x, weight = (each.detach() for each in self.inputs())

        def total(x):
            return rms_norm(x, (8,), weight).sum()

        def values():
            return (
                torch.vmap(total)(x.unsqueeze(1)),
                torch.func.grad(total)(x),
                torch.func.jvp(total, (x,), (x,))[1],
                torch.func.hessian(total)(x),
            )

        served = {}
        with counting(served):
            assert_as_torch(values, rtol=1e-4, atol=1e-4)
        with serving(), counting(served):
            graph = torch.fx.experimental.proxy_tensor.make_fx(total)(x).graph
        assert not served.get("rms_norm")
        assert torch.ops.aten.rms_norm.default not in [node.target for node in graph.nodes]

    def test_compiled(self):
        x, weight = self.inputs()
        compiled = torch.compile(lambda x: 2 * rms_norm(x, (8,), weight), backend="aot_eager")
        with serving():
            got = torch.autograd.grad(compiled(x).sum(), (x, weight))
        want = torch.autograd.grad(2 * rms_norm(x, (8,), weight).sum(), (x, weight))
        torch.testing.assert_close(got, want)

    def test_inference(self):
        with serving(), torch.inference_mode():
            assert rms_norm(random(3, 8), (8,)).is_inference()
