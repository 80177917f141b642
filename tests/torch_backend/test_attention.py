"""Attention of torch on the kernels: masks, layouts, scales, and calls that stay with torch."""

import itertools

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from fugaku_megatron.host import kernels
from fugaku_megatron.torch_backend import enabled
from fugaku_megatron.torch_backend.attention import flash_attention, flash_attention_backward
from tests.checks.torch_backend import assert_served, counting

pytestmark = pytest.mark.unit

OPERATOR = "_scaled_dot_product_flash_attention_for_cpu"
DTYPES = [torch.float32, torch.bfloat16]


def heads(b, n, s, d, dtype=torch.float32, by_position=False, seed=0):
    shape = (b, s, n, d) if by_position else (b, n, s, d)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return x.transpose(1, 2) if by_position else x


def visible_keys(b, q, k):
    """Return boolean masks that broadcast to (b, 1, q, k), by name."""
    query = torch.arange(q).unsqueeze(1)
    key = torch.arange(k)
    lengths = torch.tensor([k, max(1, k // 3)] * b)[:b].view(b, 1, 1, 1)
    causal = key <= query
    return {
        "right padding": key < lengths,
        "left padding": key >= k - lengths,
        "padding of every query": (key < lengths).expand(b, 1, q, k),
        "causal": causal,
        "causal, right padding": causal & (key < lengths),
        "causal, left padding": causal & (key >= k - lengths),
        "last queries": key <= query + k - q,
        "window": causal & (key > query - 7),
        "documents": causal & (key // 20 == query // 20),
        "two-sided documents": key // 40 == query // 40,
        "prefix": causal | (key < 33).expand(q, k),
        "nothing": torch.zeros(q, k, dtype=torch.bool),
    }


MASKS = list(visible_keys(1, 2, 2))
SHAPES = [(2, 3, 70, 70, 8), (1, 2, 33, 130, 16), (2, 1, 130, 53, 64), (3, 2, 1, 9, 4)]


def tensors(shape, dtype, by_position):
    b, n, q, k, d = shape
    return [heads(b, n, s, d, dtype, by_position, seed) for seed, s in enumerate((q, k, k))]


@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_no_mask(shape, is_causal, dtype, by_position):
    def attend(*inputs):
        return scaled_dot_product_attention(*inputs, is_causal=is_causal)

    assert_served(attend, *tensors(shape, dtype, by_position), operator=OPERATOR, scale=4)


def call(inputs, *options):
    """Return the operator's values and gradients."""
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    names = dict(zip(("attn_mask", "scale"), options[2:], strict=True))
    values = attention(*inputs, *options[:2], **names)
    dout = torch.ones_like(inputs[0])
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return *values, *backward(dout, *inputs, *values, *options[:2], **names)


def serve(inputs, *options):
    values = flash_attention(*inputs, *options)
    if values is NotImplemented:
        return values
    return *values, *flash_attention_backward(
        torch.ones_like(inputs[0]), *inputs, *values, *options
    )


def additive(visible, dtype=torch.float32):
    return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, float("-inf"))


def assert_masked(inputs, visible):
    """Assert that the kernels serve a mask, with torch's values, gradients and layouts."""
    dtype = inputs[0].dtype
    options = (0.0, False, additive(visible, dtype), None)
    got = serve(inputs, *options)
    with enabled(False):
        want = call(inputs, *options)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.stride() == theirs.stride()
        tolerance = 1e-5 if dtype == torch.float32 else 4e-2
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MASKS)
def test_masks(name, dtype):
    """Also the log of sums, which is 0 for a query that sees no key."""
    for shape, by_position in itertools.product(SHAPES, [False, True]):
        b, _, q, k, _ = shape
        assert_masked(tensors(shape, dtype, by_position), visible_keys(b, q, k)[name])


@pytest.mark.parametrize("target", kernels.runnable_targets())
@pytest.mark.parametrize("later", [0, 37])  # queries are the last ones of the keys
@pytest.mark.parametrize("window", [1, 5, 17, 40, 64, 300])
def test_windows_in_documents(window, later, target):
    """The kernels work on vectors of queries, so windows and documents begin inside of them, on each target."""
    q = 150
    key = torch.arange(q + later)
    query = key[later:].unsqueeze(1)
    visible = (key <= query) & (key > query - window)
    inputs = tensors((1, 2, q, q + later, 8), torch.float32, True)
    with kernels.target(target):
        assert_masked(inputs, visible)
        for bounds in ((50, 120), (61, 62, 63, 101), (45,)):
            numbers = torch.bucketize(key, torch.tensor(bounds), right=True)
            assert_masked(inputs, visible & (numbers == numbers[later:].unsqueeze(1)))


def test_boolean_mask_of_the_interface():
    inputs = tensors((2, 3, 40, 40, 8), torch.float32, True)
    mask = visible_keys(2, 40, 40)["causal, left padding"][:1]

    def attend(*inputs):
        return scaled_dot_product_attention(*inputs, attn_mask=mask)

    assert_served(attend, *inputs, operator=OPERATOR, scale=4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [0.3, 8**-0.5])
def test_scale(scale, is_causal, dtype):
    def attend(*inputs):
        return scaled_dot_product_attention(*inputs, is_causal=is_causal, scale=scale)

    assert_served(attend, *tensors((2, 3, 40, 40, 8), dtype, True), operator=OPERATOR, scale=4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_query_groups(is_causal, dtype):
    query, key, value = tensors((2, 4, 40, 40, 8), dtype, True)

    def attend(*inputs):
        return scaled_dot_product_attention(*inputs, is_causal=is_causal, enable_gqa=True)

    assert_served(attend, query, key[:, ::2], value[:, ::2], operator=OPERATOR, scale=4)


REFUSED = {
    "dropout": (0.1, False, None, None),
    "random mask": (0.0, False, additive(torch.arange(1600).view(40, 40) % 3 > 0), None),
    "bias": (0.0, False, torch.arange(1600.0).view(40, 40) / 1600, None),
    "mask of heads": (0.0, False, torch.zeros(2, 3, 40, 40), None),
    "NaN": (0.0, False, torch.full((40, 40), float("nan")), None),
    "boolean": (0.0, False, torch.ones(40, 40, dtype=torch.bool), None),
    "causal and a mask": (0.0, True, torch.zeros(40, 40), None),
    "negative scale": (0.0, True, None, -0.3),
    "block and the one before": (
        0.0,
        False,
        additive(
            torch.ones(40, 40, dtype=torch.bool).tril()
            & (torch.arange(40) // 10 >= torch.arange(40).unsqueeze(1) // 10 - 1)
        ),
        None,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_calls_that_stay_with_torch(name):
    assert serve(tensors((2, 3, 40, 40, 8), torch.float32, True), *REFUSED[name]) is NotImplemented


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v: (q.double(), k.double(), v.double()),
        lambda q, k, v: (q[..., :6], k[..., :6], v[..., :6]),
        lambda q, k, v: (q, k[:, :2], v[:, :2]),
        lambda q, k, v: (q[:, :, :0], k, v),
        lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]),
        lambda q, k, v: (q, k, v[..., :4]),
    ],
)
def test_tensors_that_stay_with_torch(change):
    inputs = change(*tensors((2, 3, 40, 40, 8), torch.float32, True))
    assert serve(inputs, 0.0, False, None, None) is NotImplemented


def test_small_samples_stay_with_torch():
    served = {}
    with enabled(kernels="native"), counting(served):
        scaled_dot_product_attention(*tensors((64, 2, 8, 8, 8), torch.float32, True))
    assert not served.get(OPERATOR)
