"""Weights in eight bits (kernels_sve/gemm/q8.h, gemm_q8.h, decode.h) on every target: exact where the format says so.

Legend: M rows, N output features, K input features; a weight is (N, K), its scales (N, ceil(K / 64)).
"""

import pytest
import torch

from fugaku_megatron.host import kernels
from tests.kernels.numbers import (
    DTYPES,
    assert_equal,
    assert_near,
    assert_refused,
    for_each,
    random,
    randoms,
    refuses,
)

pytestmark = pytest.mark.kernels

BLOCK = 64
SHAPES = [
    (1, 1, 1),
    (0, 5, 8),
    (3, 0, 70),
    (5, 7, 64),
    (13, 33, 65),
    (37, 70, 1030),
    (64, 600, 130),
    (130, 96, 257),
]


def blocks_of(columns):
    return -(-columns // BLOCK)


def quantized(weight):
    """Return (values, scales) of a weight (..., N, K)."""
    values = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(*weight.shape[:-1], blocks_of(weight.shape[-1]), dtype=torch.bfloat16)
    kernels.quantize_q8(weight.flatten(0, -2), values.flatten(0, -2), scales.flatten(0, -2))
    return values, scales


def dequantized(values, scales, dtype=torch.float32):
    out = torch.empty(values.shape, dtype=dtype)
    kernels.dequantize_q8(values.flatten(0, -2), scales.flatten(0, -2), out.flatten(0, -2))
    return out


def wide_range(n, k, dtype=torch.float32):
    """Return a weight whose rows have magnitudes from 2^-14 to 2^9."""
    exponents = torch.arange(n) * 7 % 24 - 14
    return (random(n, k) * torch.exp2(exponents.float())[:, None]).to(dtype)


# Format --------------------------------------------------------------------------------------------------------------------------


@for_each(dtype=DTYPES, columns=[1, 15, 63, 64, 65, 128, 1030])
def test_values_and_scales_are_the_definition(every_target, dtype, columns):
    weight = wide_range(9, columns + 3, dtype)[:, :columns]
    values, scales = quantized(weight)
    for i, (block, codes) in enumerate(
        zip(weight.float().split(BLOCK, 1), values.split(BLOCK, 1), strict=True)
    ):
        scale = scales[:, i : i + 1].float()
        exact = block.abs().amax(1, keepdim=True) / 127
        assert bool((scale >= exact).all()) and bool((scale <= exact * (1 + 2**-7)).all())
        want = (block * (1 / scale)).nan_to_num(0).round()
        assert torch.equal(codes.float(), want)
    exact = values.double() * scales.double().repeat_interleave(BLOCK, 1)[:, :columns]
    assert torch.equal(dequantized(values, scales).double(), exact)
    assert torch.equal(dequantized(values, scales, dtype), exact.to(dtype))
    error = (exact - weight.double()).abs()
    assert bool((error <= scales.double().repeat_interleave(BLOCK, 1)[:, :columns] * 0.5001).all())


@for_each(dtype=DTYPES)
def test_all_targets_have_the_references_bits(every_target, reference, same_for_any_threads, dtype):
    weight = wide_range(70, 333, dtype)
    got = same_for_any_threads(lambda: quantized(weight))
    assert_equal(got, reference(lambda: quantized(weight)))


def test_zeros_nan_and_infinity_stay_in_their_blocks(every_target):
    weight = torch.ones(4, 200)
    weight[0, :64] = 0
    weight[1, 70] = float("nan")
    weight[2, 199] = float("-inf")
    weight[3, 64:128] = 1e-37  # below the smallest scale
    values, scales = quantized(weight)
    numbers = dequantized(values, scales)
    assert numbers[0, :64].eq(0).all() and scales[0, 0] == 0
    assert numbers[3, 64:128].eq(0).all()
    assert numbers[1].isnan().tolist() == [64 <= i < 128 for i in range(200)]
    assert numbers[2].isnan().tolist() == [i >= 192 for i in range(200)]
    x = torch.zeros(1, 200)
    out = torch.empty(1, 4)
    for multiply in (kernels.linear_few_rows, kernels.linear_forward):
        multiply(x, values, out, scales=scales)
        assert out.isnan().tolist() == [[False, True, True, False]]
    kernels.linear_forward(torch.ones(1, 200), values, out, scales=scales, int8=True)
    assert out.isnan().tolist() == [[False, True, True, False]]
    data = torch.empty(1, 200)
    kernels.linear_data_gradient(torch.zeros(1, 4), values, data, scales=scales)
    assert data[0].isnan().tolist() == [64 <= i < 128 or i >= 192 for i in range(200)]


# Matmuls -------------------------------------------------------------------------------------------------------------------------


def products(x, grad, weight, scales=None, with_packed=False, **kind):
    """Return x weight^T with an epilogue, and grad weight."""
    out = x.new_empty(len(x), len(weight))
    data = x.new_empty(len(x), weight.shape[1])
    packed = [None, None]
    if with_packed:
        for transposed in (False, True):
            size = kernels.packed_weight_size(*weight.shape, x.dtype, transposed, **kind)
            packed[transposed] = torch.empty(size, dtype=torch.uint8)
            kernels.pack_weight(
                weight, packed[transposed], transposed, scales=scales, dtype=x.dtype, **kind
            )
    bias = random(len(weight), dtype=x.dtype, seed=7)
    kernels.linear_forward(x, weight, out, bias, "gelu", packed=packed[0], scales=scales, **kind)
    kernels.linear_data_gradient(grad, weight, data, packed=packed[1], scales=scales, **kind)
    return out, data


@for_each(shape=SHAPES, dtype=DTYPES, int8=[False, True], with_packed=[False, True])
def test_matmuls_have_the_bits_of_the_dequantized_weight(
    every_target, shape, dtype, int8, with_packed
):
    m, n, k = shape
    x, grad = randoms((m, k), (m, n), dtype=dtype)
    values, scales = quantized(random(n, k, seed=3))
    numbers = dequantized(values, scales, dtype)
    kind = {"int8": True} if int8 else {}
    got = products(x, grad, values, scales, with_packed, **kind)
    assert_equal(got, products(x, grad, numbers, None, with_packed, **kind))


def test_three_bf16_parts_of_a_q8_weight(target):
    if not kernels.has_bf16_arithmetic():
        pytest.skip(f"{target} has no BF16 arithmetic")
    x, grad = randoms((37, 1030), (37, 70))
    values, scales = quantized(random(70, 1030, seed=3))
    got = products(x, grad, values, scales, bf16x3=True)
    assert_equal(got, products(x, grad, dequantized(values, scales), bf16x3=True))


def test_threads_change_no_bit(target, same_for_any_threads):
    x, grad = randoms((70, 1030), (70, 300))
    values, scales = quantized(random(300, 1030, seed=3))
    for kind in ({}, {"int8": True}):
        same_for_any_threads(lambda kind=kind: products(x, grad, values, scales, **kind))


def test_strided_rows_of_a_weight(every_target):
    """A shard along the inputs is a slice of whole blocks."""
    x, grad = randoms((5, 128), (5, 33))
    values, scales = quantized(random(33, 256, seed=3))
    numbers = dequantized(values, scales)
    got = products(x, grad, values[:, 128:], scales[:, 2:])
    assert_equal(got, products(x, grad, numbers[:, 128:].contiguous()))
    few = torch.empty(5, 33)
    want = torch.empty(5, 33)
    kernels.linear_few_rows(x, values[:, 128:], few, scales=scales[:, 2:])
    kernels.linear_few_rows(x, numbers[:, 128:], want)
    assert torch.equal(few, want)


@for_each(dtype=[torch.float32, torch.bfloat16], int8=[False, True])
def test_experts_have_the_bits_of_dequantized_weights(every_target, dtype, int8):
    counts = torch.tensor([0, 1, 13, 26])
    x, grad = randoms((40, 130), (40, 37), dtype=dtype)
    values, scales = quantized(random(4, 37, 130, seed=3))
    numbers = dequantized(values, scales, dtype)
    results = []
    for weight, factors in ((values, {"scales": scales}), (numbers, {})):
        out = x.new_empty(40, 37)
        data = x.new_empty(40, 130)
        kernels.grouped_linear_forward(x, weight, counts, out, int8=int8, **factors)
        kernels.grouped_linear_data_gradient(grad, weight, counts, data, int8=int8, **factors)
        results.append((out, data))
    assert_equal(*results)


# Few rows ------------------------------------------------------------------------------------------------------------------------


@for_each(
    dtype=DTYPES,
    shape=[(0, 3, 5), (1, 67, 33), (2, 5, 768), (3, 16, 15), (4, 7, 64), (7, 131, 200), (1, 0, 4)],
)
def test_few_rows(every_target, guarded, dtype, shape):
    m, n, k = shape
    x, bias = randoms((m, k), n, dtype=dtype)
    values, scales = quantized(random(n, k, seed=3))
    numbers = dequantized(values, scales)
    out = guarded((m, n), dtype)
    kernels.linear_few_rows(x, values, out, bias, scales=scales)
    assert_near(out, x.double() @ numbers.double().t() + bias.double(), dtype, float32=4e-6)
    if dtype == torch.float32:
        want = torch.empty(m, n)
        kernels.linear_few_rows(x, numbers, want, bias)
        assert torch.equal(out, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_whatever_the_others_and_the_threads_are(
    every_target, same_for_any_threads, dtype
):
    x = random(9, 257, dtype=dtype)
    values, scales = quantized(random(1031, 257, seed=3))

    def matmul(rows):
        out = torch.empty(len(rows), 1031, dtype=dtype)
        kernels.linear_few_rows(rows, values, out, scales=scales)
        return out

    whole = same_for_any_threads(lambda: matmul(x))
    assert torch.equal(whole, torch.cat([matmul(x[:1]), matmul(x[1:4]), matmul(x[4:])]))


# Misuse --------------------------------------------------------------------------------------------------------------------------


def test_wrong_arguments_leave_everything_untouched():
    weight = random(3, 70)
    values, scales = quantized(weight)
    refuses(
        kernels.quantize_q8,
        (weight, values, scales),
        {
            r"values: expected shape \(3, 70\) as weight, got \(2, 70\)": values[:2],
            r"scales: expected shape \(3, 2\), got \(3, 1\)": scales[:, :1],
            "values: expected dtype int8, got uint8": values.view(torch.uint8),
            "scales: expected dtype bfloat16, got float32": scales.float(),
            "weight: expected dtype float32 or bfloat16 or float16, got int8": values,
        },
    )
    refuses(
        kernels.dequantize_q8,
        (values, scales, weight),
        {r"scales: expected shape \(3, 2\), got \(2, 2\)": scales[:2]},
    )
    x = random(2, 70)
    out = torch.empty(2, 3)
    packed = torch.empty(1, dtype=torch.uint8)
    assert_refused(
        [
            (
                lambda: kernels.linear_forward(x, values, out),
                "weight: expected dtype float32 or bfloat16 or float16, got int8",
            ),
            (
                lambda: kernels.linear_forward(x, weight, out, scales=scales),
                "weight: expected dtype int8, got float32",
            ),
            (
                lambda: kernels.linear_forward(x, values, out, scales=scales[:, :1]),
                r"scales: expected shape \(3, 2\), got \(3, 1\)",
            ),
            (
                lambda: kernels.linear_few_rows(x, values, out, scales=scales.float()),
                "scales: expected dtype bfloat16, got float32",
            ),
            (
                lambda: kernels.linear_forward(x, values, out.bfloat16(), scales=scales),
                "out: expected dtype float32",
            ),
            (
                lambda: kernels.pack_weight(values, packed, scales=scales),
                "weight: expected dtype float32 or bfloat16 or float16, got int8",
            ),
        ]
    )
