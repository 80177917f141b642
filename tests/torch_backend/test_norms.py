"""Layer norm and RMS norm of torch on the kernels."""

import pytest
import torch
from torch.nn.functional import layer_norm, rms_norm

from fugaku_megatron.torch_backend import enabled
from tests.checks.torch_backend import assert_served, counting, serving

pytestmark = pytest.mark.unit

DTYPES = [torch.float32, torch.bfloat16]
WIDTH = 32


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LAYOUTS = {
    "contiguous": lambda: random(6, 10, WIDTH),
    "transposed": lambda: random(6, 10, WIDTH).transpose(0, 1),
    "columns first": lambda: random(6, WIDTH, 10).transpose(1, 2),
    "every second": lambda: random(6, 10, 2 * WIDTH)[..., ::2],
    "expanded": lambda: random(6, 1, WIDTH).expand(6, 10, WIDTH),
    "one row": lambda: random(WIDTH),
}


def normalize_layer(x, weight, bias):
    return layer_norm(x, x.shape[-1:], weight, bias, 1e-3)


def normalize_root_mean_square(x, weight):
    return rms_norm(x, x.shape[-1:], weight, 1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parameters", [0, 1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layer_norm(layout, parameters, dtype):
    x = LAYOUTS[layout]().to(dtype)
    given = [random(WIDTH, seed=1).to(dtype), random(WIDTH, seed=2).to(dtype)]
    given = [*given[:parameters], None, None][:2]
    assert_served(normalize_layer, x, *given, operator="native_layer_norm_backward", scale=4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_weight", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rms_norm(layout, with_weight, dtype):
    x = LAYOUTS[layout]().to(dtype)
    weight = random(WIDTH, seed=1).to(dtype) if with_weight else None
    assert_served(normalize_root_mean_square, x, weight, operator="rms_norm", scale=4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_several_dimensions(dtype):
    x, weight, bias = (random(*shape).to(dtype) for shape in [(5, 4, 8), (4, 8), (4, 8)])

    def layer(x, weight, bias):
        return layer_norm(x, (4, 8), weight, bias)

    def root_mean_square(x, weight):
        return rms_norm(x, (4, 8), weight)

    assert_served(layer, x, weight, bias, operator="native_layer_norm", scale=4)
    assert_served(root_mean_square, x, weight, operator="rms_norm", scale=4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics(dtype):
    x = LAYOUTS["transposed"]().to(dtype)
    with serving():
        got = torch.native_layer_norm(x, [WIDTH], None, None, 1e-5)
    with enabled(False):
        want = torch.native_layer_norm(x, [WIDTH], None, None, 1e-5)
    for ours, theirs in zip(got, want, strict=True):
        assert (ours.shape, ours.stride()) == (theirs.shape, theirs.stride())
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "wanted", [[True, False, False], [False, True, True], [False, False, True]]
)
def test_wanted_gradients(wanted):
    x, dy, weight, bias = (random(*shape) for shape in [(6, WIDTH), (6, WIDTH), (WIDTH,), (WIDTH,)])
    _, *statistics = torch.native_layer_norm(x, [WIDTH], weight, bias, 1e-5)

    def backward():
        operator = torch.ops.aten.native_layer_norm_backward
        return operator(dy, x, [WIDTH], *statistics, weight, bias, wanted)

    with serving():
        got = backward()
    with enabled(False):
        want = backward()
    for ours, theirs in zip(got, want, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "function, shapes",
    [
        (lambda x, *p: layer_norm(x, x.shape[-1:], *p), [(0, 8), (8,), (8,)]),
        (lambda x, *p: rms_norm(x, x.shape[-1:], *p), [(0, 8), (8,)]),
        (lambda x, *p: rms_norm(x, (8,), *p), [(3, 0, 8), (8,)]),
    ],
)
def test_no_rows(function, shapes):
    inputs = [torch.ones(shape, requires_grad=True) for shape in shapes]

    def gradients():
        y = function(*inputs)
        return y, *torch.autograd.grad(y.sum(), inputs)

    with serving():
        got = gradients()
    with enabled(False):
        torch.testing.assert_close(got, gradients())


def test_mixed_types_stay_with_torch():
    x = random(6, WIDTH).bfloat16()
    served = {}
    with serving(), counting(served):
        layer_norm(x, (WIDTH,), torch.ones(WIDTH), torch.ones(WIDTH))
        rms_norm(x.double(), (WIDTH,))
    assert not served.get("native_layer_norm")
    assert not served.get("rms_norm")


@pytest.mark.parametrize("function", [layer_norm, rms_norm])
def test_errors_are_torchs(function):
    with serving(), pytest.raises(RuntimeError, match="normalized_shape"):
        function(random(6, WIDTH), (WIDTH + 1,))


def test_default_epsilon():
    x = 1e-4 * random(6, WIDTH)
    for dtype in DTYPES:
        with serving():
            got = rms_norm(x.to(dtype), (WIDTH,))
        with enabled(False):
            torch.testing.assert_close(got, rms_norm(x.to(dtype), (WIDTH,)))


class TestComposition:
    """RMS norm has no derivative of its own in torch."""

    @staticmethod
    def inputs():
        return [random(4, 8).requires_grad_(), random(8, seed=1).requires_grad_()]

    def test_second_derivative(self):
        x, weight = self.inputs()

        def second():
            y = rms_norm(x, (8,), weight, 1e-3)
            first = torch.autograd.grad(y.pow(2).sum(), (x, weight), create_graph=True)
            return torch.autograd.grad(sum(each.sin().sum() for each in first), (x, weight))

        with serving():
            got = second()
        with enabled(False):
            torch.testing.assert_close(got, second(), rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("wanted", [0, 1])
    def test_one_gradient(self, wanted):
        inputs = [each.detach() for each in self.inputs()]
        inputs[wanted].requires_grad_()

        def gradient():
            return torch.autograd.grad(rms_norm(inputs[0], (8,), inputs[1]).sum(), inputs[wanted])

        with serving():
            got = gradient()
        with enabled(False):
            torch.testing.assert_close(got, gradient())

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
        with serving(), counting(served):
            got = values()
            graph = torch.fx.experimental.proxy_tensor.make_fx(total)(x).graph
        assert not served.get("rms_norm")
        assert torch.ops.aten.rms_norm.default not in [node.target for node in graph.nodes]
        with enabled(False):
            torch.testing.assert_close(got, values(), rtol=1e-4, atol=1e-4)

    def test_gradient_that_is_a_negative_view(self):
        x, weight = self.inputs()

        def gradients():
            y = rms_norm(x, (8,), weight)
            return torch.autograd.grad(y, (x, weight), torch._neg_view(torch.ones_like(y)))

        with serving():
            got = gradients()
        with enabled(False):
            torch.testing.assert_close(got, gradients())

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
