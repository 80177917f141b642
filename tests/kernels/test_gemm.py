"""GEMM (kernels_sve/gemm/gemm.h): every form, epilogue, arithmetic and target against double precision; threads; refusals.

Legend: M rows, N output features, K input features; a weight is (N, K). Sums in FP16: test_gemm_fp16.py.
"""

import itertools
import math
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from fugaku_megatron.host import kernels
from tests.kernels.numbers import (
    DTYPES,
    MLP_ACTIVATIONS,
    assert_equal,
    assert_overwrites,
    having,
    linear_forms,
    packed,
    random,
    randoms,
    refuses,
)

pytestmark = pytest.mark.kernels

UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
VL = 16  # lanes of the longest vectors
EDGES = (0, 1, 5, VL - 1, VL, VL + 1, 37)
MODEL = (
    (64, 144, 48),
    (16, 40, 27),
    (64, 192, 48),
    (128, 48, 192),
    (61, 131, 1009),
    (97, 96, 256),
    (53, 67, 513),
)
# Every small combination of edges, and the layers of a model scaled down.
SHAPES = [
    *(s for i, s in enumerate(itertools.product(EDGES, repeat=3)) if i % 5 == 0 or s[2] == 0),
    *MODEL,
]
BF16X3 = {"bf16x3": True}
ARITHMETIC: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (torch.float32, {}),
    "bfloat16": (torch.bfloat16, {}),
    "float16": (torch.float16, {}),
    "bf16x3": (torch.float32, BF16X3),
}


@pytest.fixture(params=ARITHMETIC)
def arithmetic(request, every_target):
    """Operand dtype and keywords, for every target that has the arithmetic."""
    dtype, kind = ARITHMETIC[request.param]
    if kind and not kernels.has_bf16_arithmetic():
        pytest.skip("this target has no BF16 arithmetic")
    return dtype, kind


@pytest.fixture(params=having("bf16", emulated=True))
def bf16_target(request):
    """Target in use that multiplies bfloat16, by name."""
    with kernels.target(request.param):
        yield request.param


def strided(rows, cols, dtype, pad=3):
    """Return a random matrix with `pad` elements between its rows."""
    return torch.randn(rows, cols + pad).to(dtype)[:, :cols]


def check(got, exact, magnitude, depth):
    """Bound a sum's rounding (Higham 2002, section 3.1).

    exact: in double; magnitude: the absolute values' matmul; depth: terms in a sum
    """
    bound = UNIT[got.dtype] * exact.abs() + 2 * UNIT[torch.float32] * (depth + 8) * magnitude
    bound += 2.0**-24 if got.dtype == torch.float16 else 1e-37
    assert got.shape == exact.shape
    excess = (got.double() - exact).abs() / bound
    assert bool((excess <= 1).all()), float(excess.max())


def check_product(got, a, b, start=0.0):
    """Compare with start + a b."""
    a = a.double()
    b = b.double()
    check(got, a @ b + start, a.abs() @ b.abs() + abs(start), a.shape[1])


def check_forms(x, weight, grad, found):
    """Compare the results of linear_forms, or the first ones, with double precision."""
    ones = torch.ones(1, len(x))
    products = [(x, weight.T, 0), (grad, weight, 0), (grad.T, x, 1), (ones, grad, 1)]
    for got, product in zip(found, products, strict=False):
        check_product(torch.atleast_2d(got), *product)


def test_forms_match_double_precision(arithmetic, guarded):
    dtype, kind = arithmetic
    for index, (m, n, k) in enumerate(SHAPES):
        x = strided(m, k, dtype)
        weight = strided(n, k, dtype, index % 3)
        grad = strided(m, n, dtype, 1)
        check_forms(x, weight, grad, linear_forms(x, weight, grad, index % 2, guarded, **kind))


@pytest.mark.parametrize("name", MLP_ACTIVATIONS)
@pytest.mark.parametrize("shape", [(37, 67, 29), (5, 130, 1030), (3, 5, 0)])
def test_epilogues(arithmetic, shape, name):
    dtype, kind = arithmetic
    m, n, k = shape
    activation = MLP_ACTIVATIONS[name]
    x = strided(m, k, dtype)
    weight = strided(n, k, dtype)
    bias = torch.randn(n).to(dtype)
    residual = strided(m, n, dtype, 5)
    out = strided(m, n, dtype)
    pre = torch.empty(m, n, dtype=dtype)

    def close(got, want, slope=1.0):
        atol = (UNIT[dtype] + 2e-7 * (k + 8)) * float(linear.abs().max() + 1) * slope
        assert_close(got.double(), want, rtol=2 * UNIT[dtype], atol=atol)

    linear = x.double() @ weight.double().T + bias.double()
    buffer = packed(weight, False, **kind)
    kernels.linear_forward(x, weight, out, bias, name, pre, residual, buffer, **kind)
    close(pre, linear)
    # An error of the sum is multiplied by the slope of the activation.
    slope = 2 * float(linear.abs().max() + 1) if name == "squared_relu" else 1.0
    close(out, activation(linear) + residual.double(), slope)
    kernels.linear_forward(x, weight, out, bias=bias, **kind)
    close(out, linear)

    argument = (3 * torch.randn(m, n)).to(dtype)
    leaf = argument.double().requires_grad_()
    linear = x.double() @ weight.double().T
    activation(leaf).backward(linear)
    transposed = weight.T.contiguous()
    kernels.linear_data_gradient(x, transposed, out, argument, name, **kind)
    close(out, leaf.grad, float(argument.abs().max()) if name == "squared_relu" else 1.0)
    in_place = strided(m, n, dtype)
    in_place.copy_(argument)
    kernels.linear_data_gradient(x, transposed, in_place, in_place, name, **kind)
    assert torch.equal(in_place, out)


@pytest.mark.parametrize("shape", [(61, 131, 1009), (4, 300, 40), (300, 7, 33), (1, 1, 600)])
def test_threads_and_packing_do_not_change_the_bits(arithmetic, same_for_any_threads, shape):
    if kernels.active() == "reference":
        pytest.skip("a scalar loop, which takes seconds")
    dtype, kind = arithmetic
    m, n, k = shape
    x, weight, grad = randoms((m, k), (n, k), (m, n), dtype=dtype)

    def run(with_packed=False):
        out = torch.empty(m, n, dtype=dtype)
        buffer = packed(weight, False, **kind) if with_packed else None
        kernels.linear_forward(x, weight, out, activation="gelu", packed=buffer, **kind)
        return out, *linear_forms(x, weight, grad, with_packed, **kind)

    assert_equal(same_for_any_threads(run), run(with_packed=True))


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_float32_output_of_half_inputs(target, dtype):
    x, weight, grad = randoms((19, 700), (33, 700), (19, 33), dtype=dtype)
    found = linear_forms(x, weight, grad, dtype=torch.float32)
    assert found[0].dtype == torch.float32
    check_forms(x, weight, grad, found)
    assert kernels.has_fp16_arithmetic() == (not target.startswith(("avx", "amx")))
    assert kernels.has_bf16_arithmetic() == (target.endswith("bf16") or target.startswith("amx"))


@pytest.mark.parametrize("target", ["amx", "amx_emulated"])
def test_a_step_of_tiles_has_the_bits_of_its_definition(target):
    """TDPBF16PS (Intel's Software Developer's Manual): fused sums over even and odd k, then their sum, no denormals."""
    if target not in kernels.runnable_targets(emulated=True):
        pytest.skip(next(row["reason"] for row in kernels.targets() if row["name"] == target))
    a, b = randoms((16, 32), (32, 16), dtype=torch.bfloat16)
    out = torch.empty(16, 16)
    a[3] *= 2.0**-130
    a[4] = a[4] * 2.0**-80  # results of about 2^-127
    b[:, 5] = b[:, 5] * 2.0**-47
    with kernels.target(target):
        kernels.gemm(a, b, out)

    def normal(x):
        return torch.where(x.abs() < 2.0**-126, 0.0, x)

    sums = torch.zeros(2, 16, 16)  # of even and odd k
    for k in range(32):
        # A product of two bfloat16 is exact in double, and so is its sum with a float of like size.
        product = torch.outer(normal(a[:, k].double()), normal(b[k].double()))
        sums[k % 2] = normal((sums[k % 2].double() + product).float())
    assert torch.equal(out, normal(sums[0] + sums[1]))
    assert bool((out[3] == 0).all()) and bool((out[:3] != 0).all())
    assert bool((out[4, 5] == 0).any())


def test_gemm_of_views(target):
    a = torch.randn(30, 41)
    b = torch.randn(41, 50)
    left = (a, a.T.contiguous().T, strided(30, 41, torch.float32))
    right = (b, b.T.contiguous().T, b[:, :1], b.T.contiguous().T[:, 3:4])
    for x, y in itertools.product(left, right):
        out = torch.ones(30, y.shape[1])
        kernels.gemm(x, y, out)
        check_product(out, x, y)
        out.fill_(1)
        kernels.gemm(x, y, out, accumulate=True)
        check_product(out, x, y, 1)


@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf")])
def test_special_values_travel(arithmetic, special):
    dtype, kind = arithmetic
    x = (torch.rand(20, 50) + 1).to(dtype)
    weight = (torch.rand(40, 50) + 1).to(dtype)
    plain = torch.empty(20, 40, dtype=dtype)
    kernels.linear_forward(x, weight, plain, **kind)
    x[13, 17] = special
    out = torch.empty(20, 40, dtype=dtype)
    kernels.linear_forward(x, weight, out, **kind)
    others = torch.arange(20) != 13
    assert not bool(out[13].isfinite().any()) and torch.equal(out[others], plain[others])
    assert kind or torch.equal(out[13].isnan(), torch.full((40,), special != special))


COUNTS = ((0, 1, 37, 0, 5), (0, 0, 64, 0), (0,), (300, 1, 2))  # rows of each group


def grouped_forms(x, weight, grad, counts, make=torch.empty):
    """Return (forward, data gradient), and the weight gradient added to ones."""
    counts = torch.tensor(counts)
    out = make(grad.shape, dtype=x.dtype)
    data = make(x.shape, dtype=x.dtype)
    gradient = make(weight.shape).fill_(1)
    kernels.grouped_linear_forward(x, weight, counts, out)
    kernels.grouped_linear_data_gradient(grad, weight, counts, data)
    kernels.grouped_linear_weight_gradient(grad, x, counts, gradient)
    return out, data, gradient


@pytest.mark.parametrize("rows", [1, 37, 1300])
def test_a_gradient_that_overwrites_has_the_bits_of_one_added_to_zeros(arithmetic, rows):
    dtype, kind = arithmetic
    assert_overwrites(*randoms((rows, 40), (rows, 67), dtype=dtype), **kind)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_groups_that_overwrite_have_the_bits_of_sums(every_target, dtype):
    for counts in COUNTS:
        grad, x = randoms((sum(counts), 33), (sum(counts), 70), dtype=dtype)
        written = torch.full((len(counts), 33, 70), math.nan)
        added = torch.zeros_like(written)
        numbers = torch.tensor(counts)
        kernels.grouped_linear_weight_gradient(grad, x, numbers, written, overwrite=True)
        kernels.grouped_linear_weight_gradient(grad, x, numbers, added)
        assert_equal((written,), (added,))


def each_group(counts, x, weight, grad, forms):
    """Yield x, weight, grad and the forms of every group."""
    ends = list(itertools.accumulate(counts))
    out, data, gradient = forms
    for i, (count, end) in enumerate(zip(counts, ends, strict=True)):
        rows = slice(end - count, end)
        yield x[rows], weight[i], grad[rows], (out[rows], data[rows], gradient[i])


@pytest.mark.parametrize("n, k", [(33, 70), (40, 70), (144, 513), (16, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_of_rows_have_weights_of_their_own(every_target, dtype, n, k, guarded):
    for counts in COUNTS:
        x = strided(sum(counts), k, dtype)
        grad = strided(sum(counts), n, dtype)
        weight = random(len(counts), n, k, dtype=dtype)
        forms = grouped_forms(x, weight, grad, counts, guarded)
        for group in each_group(counts, x, weight, grad, forms):
            check_forms(*group)


@pytest.mark.parametrize("n, k", [(131, 259), (140, 1030)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_have_the_bits_of_single_matmuls_for_any_threads(
    target, same_for_any_threads, dtype, n, k
):
    """Also if a group with half the rows is divided, and if weights are read in place: n and k are even."""
    counts = (3, 200, 0, 70, 90, 37)
    x, grad, weight = randoms((400, k), (400, n), (len(counts), n, k), dtype=dtype)
    forms = same_for_any_threads(lambda: grouped_forms(x, weight, grad, counts))
    for *group, found in each_group(counts, x, weight, grad, forms):
        assert_equal(found, linear_forms(*group)[:3])


def test_refusals():
    x = torch.randn(4, 6)
    weight = torch.randn(5, 6)
    out = torch.empty(4, 5)
    refuses(
        kernels.linear_forward,
        (x, weight, out),
        {
            "x: expected shape": torch.randn(4, 7),
            "x: expected dtype": x.bfloat16(),
            "weight: expected dtype": {"x": x.double(), "weight": weight.double()},
            "out: expected shape": torch.empty(4, 6),
            "out: expected memory apart from x": x[:, :5],
            "out: expected rows apart": torch.empty(5).expand(4, 5),
            "residual: expected memory apart": out,
            "packed: expected the output of pack_weight": torch.zeros(99, dtype=torch.uint8),
            "packed: expected a weight": packed(weight, True),
        },
    )
    groups = torch.randn(2, 5, 6)
    refuses(
        kernels.grouped_linear_forward,
        (x, groups, torch.tensor([2, 2]), out),
        {
            "counts: expected shape": torch.tensor([4]),
            "counts: expected numbers from 0 to 4, got -1": torch.tensor([-1, 4]),
            "counts: expected numbers from 0 to 4, got 5": torch.tensor([5, -1]),
            "counts: expected a sum of 4, got 3": torch.tensor([1, 2]),
            "counts: expected dtype int64": torch.tensor([2.0, 2.0]),
            "weight: expected a contiguous tensor": groups.mT.contiguous().mT,
            "out: expected dtype float32": out.bfloat16(),
        },
    )
    refuses(
        kernels.pack_weight,
        (weight, packed(weight, False)),
        {"packed: expected shape": torch.empty(9, dtype=torch.uint8)},
    )
    refuses(
        kernels.linear_weight_gradient,
        (out, x, torch.zeros(5, 6), torch.zeros(5)),
        {
            "weight_gradient: expected dtype float32": weight.bfloat16(),
            "bias_gradient: expected shape": torch.zeros(6),
        },
    )
    half = {"a": x.half(), "b": weight.T.half(), "out": out.half(), "accumulate": True}
    refuses(
        kernels.gemm,
        (x, weight.T, out),
        {
            "a: expected contiguous rows": torch.randn(8, 12)[::2, ::2],
            "out: expected dtype float32": half,
        },
    )


def test_a_weight_packed_for_another_target_is_refused():
    names = kernels.runnable_targets()
    if len(names) < 2:
        pytest.skip("this CPU runs one vector target only")
    weight = torch.randn(5, 6)
    with kernels.target(names[0]):
        buffer = packed(weight, False)
    message = f"packed: .* by target {names[1]}, got .* by target {names[0]}"
    with kernels.target(names[1]):
        call = torch.randn(4, 6), weight, torch.empty(4, 5)
        refuses(kernels.linear_forward, call, {message: buffer})


def root_mean_square(got, exact):
    return float((got.double() - exact).square().mean().sqrt())


# Rows of a micro-batch and columns of a result: some of them; k as it is. Layers of 124M (h 768) and 30B (h 7168), then odd sizes.
@pytest.mark.parametrize(
    "shape",
    [
        (64, 72, 768),
        (40, 48, 3072),
        (16, 48, 7168),
        (13, 33, 28672),
        (61, 131, 1009),
        (53, 67, 513),
    ],
)
def test_bf16x3_is_as_exact_as_float32(bf16_target, shape):
    m, n, k = shape
    x, weight, grad = randoms((m, k), (n, k), (m, n))
    weight *= 0.02

    def results(**kind):
        long = torch.empty(n, m)  # sums over all k with both factors transposed
        kernels.gemm(weight.T.contiguous().T, x.T, long, **kind)
        return *linear_forms(x, weight, grad, **kind), long

    x64, weight64, grad64 = (t.double() for t in (x, weight, grad))
    product = x64 @ weight64.T
    exact = product, grad64 @ weight64, grad64.T @ x64 + 1, grad64.sum(0) + 1, product.T
    split = results(**BF16X3)
    for got, ieee, want in zip(split, results(), exact, strict=True):
        assert root_mean_square(got, want) <= 2 * root_mean_square(ieee, want)
    assert root_mean_square(split[-1], product.T) > 0


def test_bf16x3_of_the_largest_values(bf16_target):
    """Both are beyond the largest bfloat16 when rounded."""
    largest = torch.tensor([[torch.finfo(torch.float32).max, -3.395e38, 1.0]]).T
    out = torch.empty(3, 1)
    kernels.gemm(largest, torch.full((1, 1), 0.75), out, bf16x3=True)
    assert_close(out.double(), 0.75 * largest.double(), rtol=1e-7, atol=0)


def test_bf16x3_is_refused_where_it_cannot_be(bf16_target):
    x = torch.randn(4, 6)
    weight = torch.randn(5, 6)
    out = torch.empty(4, 5)
    half = {"x": x.bfloat16(), "weight": weight.bfloat16(), "out": out.bfloat16(), **BF16X3}
    split = packed(weight, False, **BF16X3)
    whole = {"packed": packed(weight, False), **BF16X3}
    refuses(
        kernels.linear_forward,
        (x, weight, out),
        {
            "bf16x3: expected False for operands of bfloat16, got True": half,
            "packed: expected a weight float32 .* got float32 in three bfloat16 parts": split,
            "packed: expected a weight float32 in three bfloat16 parts .* got float32 ": whole,
        },
    )
    message = "bf16x3: expected False for target portable, which has no BF16 arithmetic, got True"
    with kernels.target("portable"):
        refuses(kernels.linear_forward, (x, weight, out), {message: True})
