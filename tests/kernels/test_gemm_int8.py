"""GEMM of operands quantized to int8 (kernels_sve/gemm/gemm_int8.h): the same bits on every target, and what must not be hidden.

Legend: M rows, N output features, K input features; a weight is (N, K).
"""

import zlib

import pytest
import torch
from torch.testing import assert_close

from fugaku_megatron.host import kernels
from tests.kernels.numbers import (
    DTYPES,
    assert_equal,
    assert_overwrites,
    assert_refused,
    linear_forms,
    random,
    randoms,
)

pytestmark = pytest.mark.kernels

INT8 = {"int8": True}
SHAPES = [
    (1, 1, 1),
    (5, 7, 3),
    (0, 5, 8),
    (16, 32, 64),
    (37, 70, 1030),
    (13, 33, 4000),
    (64, 600, 130),
    (130, 96, 257),
]
# CRC-32 of the results below on every target; tests/arm/check_gemm.h asks the same of targets for ARM.
CHECKSUM = 2022273958


def operands(m, n, k, dtype=torch.float32):
    """Return (x, weight, dy) of a shape, always the same."""
    return randoms((m, k), (n, k), (m, n), dtype=dtype)


def forward(x, weight, **epilogue):
    """Return x weight^T in FP32."""
    out = torch.empty(len(x), len(weight))
    kernels.linear_forward(x, weight, out, **epilogue, **INT8)
    return out


def forms(x, weight, dy, with_packed=False):
    """Return x weight^T, dy weight, and 1 + dy^T x with 1 + the sums of dy's rows, all in FP32."""
    return linear_forms(x, weight, dy, with_packed, dtype=torch.float32, **INT8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_have_the_bits_of_the_reference(
    target, reference, same_for_any_threads, shape, dtype
):
    *got, _ = same_for_any_threads(lambda: forms(*operands(*shape, dtype)))
    *exact, _ = reference(lambda: forms(*operands(*shape, dtype)))
    assert_equal(got, exact)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_packed_weight_changes_no_bit(every_target, shape):
    numbers = operands(*shape, torch.bfloat16)
    assert_equal(forms(*numbers, with_packed=True), forms(*numbers))


def test_all_targets_have_one_checksum(every_target):
    """Operands are made by a formula, not by torch's generator, so that other programs can make them."""
    checksum = 0
    for m, n, k in ((61, 131, 1009), (97, 96, 256)):
        x = (torch.arange(m * k).view(m, k) * 7919 % 2003 - 1001) / 1024
        weight = (torch.arange(n * k).view(n, k) * 104729 % 1999 - 999) / 512
        for dtype in (torch.float32, torch.bfloat16):
            out = forward(x.to(dtype), weight.to(dtype))
            checksum = zlib.crc32(out.numpy().tobytes(), checksum)
    assert checksum == CHECKSUM


def test_the_sum_of_dy_is_no_sum_of_int8(every_target):
    x, weight, dy = operands(300, 70, 30)
    *_, bias = forms(x, weight, dy)
    assert_close(bias, 1 + dy.sum(0), rtol=1e-5, atol=1e-4)


def test_epilogues_follow_the_scaled_product(every_target):
    x, weight, _ = operands(37, 70, 130, torch.bfloat16)
    bias = random(70, dtype=torch.bfloat16, seed=5)
    residual = random(37, 70, dtype=torch.bfloat16, seed=6)
    pre = torch.empty(37, 70, dtype=torch.bfloat16)
    out = torch.empty_like(pre)
    kernels.linear_forward(x, weight, out, bias, "squared_relu", pre, residual, **INT8)
    argument = forward(x, weight) + bias.float()
    assert_close(pre.float(), argument, rtol=2.0**-8, atol=0)
    assert_close(
        out.float(), argument.relu().square() + residual.float(), rtol=2.0**-7, atol=2.0**-7
    )


def test_quantization_error_is_that_of_eight_bits(every_target):
    """A step is about 4 / 127 of the deviation of normal numbers, and a rounding error is uniform in it."""
    x, weight, _ = operands(64, 96, 768)
    exact = x.double() @ weight.double().T
    error = (forward(x, weight) - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 0.005 < error < 0.02


def test_a_row_of_zeros_is_zero(every_target):
    x, weight, _ = operands(5, 40, 65)
    x[2] = 0
    weight[7] = 0
    out = forward(x, weight)
    assert (out[2] == 0).all() and (out[:, 7] == 0).all()
    assert (out[3, :7] != 0).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_is_not_hidden(every_target, value, dtype):
    x, weight, dy = operands(20, 40, 70, dtype)
    x[3, 69] = value
    weight[33, 0] = value
    dy[4, 5] = value
    out, data, gradient, bias = forms(x, weight, dy)
    assert out[3].isnan().all() and out[:, 33].isnan().all()
    assert out.isfinite().sum() == 19 * 39
    assert data[4].isnan().all() and data[:, 0].isnan().all()
    assert gradient[5].isnan().all() and gradient[:, 69].isnan().all()
    assert not bias[5].isfinite() and bias[6].isfinite()


def test_the_largest_sums_do_not_overflow(every_target):
    """127 x 127 x 131,072 is the largest sum of all, and larger by far than int32 holds on the way if bytes are unsigned."""
    ones = torch.ones(2, 131072)
    assert_close(forward(ones, ones), torch.full((2, 2), 131072.0))
    assert_close(forward(ones, -ones), torch.full((2, 2), -131072.0))


def test_more_products_than_int32_holds_are_refused(every_target):
    x = torch.ones(1, 131073)
    message = "int8: expected at most 131072 products in a sum, got 131073"
    assert_refused([(lambda: forward(x, x), message)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", [(0, 3, 40, 1), (150, 0, 7, 11)], ids=str)
def test_groups_have_the_bits_of_single_matmuls(every_target, counts, dtype):
    rows, n, k = sum(counts), 70, 130
    x, weights, dy = randoms((rows, k), (len(counts), n, k), (rows, n), dtype=dtype)
    out = torch.empty_like(dy)
    dx = torch.empty_like(x)
    gradient = torch.ones(len(counts), n, k)
    numbers = torch.tensor(counts)
    kernels.grouped_linear_forward(x, weights, numbers, out, **INT8)
    kernels.grouped_linear_data_gradient(dy, weights, numbers, dx, **INT8)
    kernels.grouped_linear_weight_gradient(dy, x, numbers, gradient, **INT8)
    for i, group in enumerate(torch.arange(rows).split(counts)):
        alone = linear_forms(x[group], weights[i], dy[group], **INT8)
        assert_equal((out[group], dx[group], gradient[i]), alone[:3])


@pytest.mark.parametrize("kind", [{}, {"stochastic": True}], ids=str)
@pytest.mark.parametrize("rows", [3, 4000])
def test_a_gradient_that_overwrites_has_the_bits_of_one_added_to_zeros(every_target, rows, kind):
    assert_overwrites(*randoms((rows, 40), (rows, 67)), **INT8, **kind)


# Random rounding ---------------------------------------------------------------------------------------------------------------

STOCHASTIC = {"int8": True, "stochastic": True}


def stochastic_gradients(x, weight, dy):
    """Return dy weight and dy^T x in FP32, with dy rounded at random."""
    dx = torch.empty(len(x), weight.shape[1])
    kernels.linear_data_gradient(dy, weight, dx, **STOCHASTIC)
    gradient = torch.zeros(weight.shape)
    kernels.linear_weight_gradient(dy, x, gradient, **STOCHASTIC)
    return dx, gradient


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_random_rounding_has_the_bits_of_the_reference(
    target, reference, same_for_any_threads, shape, dtype
):
    got = same_for_any_threads(lambda: stochastic_gradients(*operands(*shape, dtype)))
    exact = reference(lambda: stochastic_gradients(*operands(*shape, dtype)))
    assert_equal(got, exact)
    x, weight, dy = operands(*shape, dtype)
    if len(x) > 4:
        assert not torch.equal(got[0], forms(x, weight, dy)[1])


def test_random_rounding_has_the_right_mean(target):
    """0.3 of a unit is 0 to the nearest, and 1 with a probability of 0.3."""
    k = 4096
    a = torch.full((3, k), 0.3)
    a[:, 0] = torch.tensor([127.0, -127.0, 127.0])
    a[2, 1:] = -0.3
    b = torch.ones(k, 1)
    nearest = torch.empty(3, 1)
    kernels.gemm(a, b, nearest, int8=True)
    assert_close(nearest.flatten(), torch.tensor([127.0, -127.0, 127.0]), rtol=1e-5, atol=0)
    mean = torch.empty(3, 1)
    kernels.gemm(a, b, mean, **STOCHASTIC)
    deviation = (k * 0.3 * 0.7) ** 0.5
    assert_close(mean, a.sum(1, keepdim=True), rtol=0, atol=4 * deviation)


def test_random_rounding_of_experts_is_that_of_their_own_matmuls(target):
    counts = torch.tensor([5, 0, 9])
    weights = random(3, 6, 20)
    x = random(14, 20, seed=1)
    dy = random(14, 6, seed=2)
    dx = torch.empty(14, 20)
    kernels.grouped_linear_data_gradient(dy, weights, counts, dx, **STOCHASTIC)
    gradient = torch.zeros(3, 6, 20)
    kernels.grouped_linear_weight_gradient(dy, x, counts, gradient, **STOCHASTIC)
    for expert, rows in enumerate((slice(0, 5), slice(5, 5), slice(5, 14))):
        own, of_weight = stochastic_gradients(x[rows], weights[expert], dy[rows])
        assert_equal([dx[rows], gradient[expert]], [own, of_weight])


def test_random_rounding_is_for_int8(target):
    x, weight, dy = operands(5, 7, 3)
    with pytest.raises(ValueError, match="stochastic: expected False without int8, got True"):
        kernels.linear_data_gradient(dy, weight, torch.empty_like(x), stochastic=True)
