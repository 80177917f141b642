"""GEMM (kernels_sve/gemm/gemm.h): every form, epilogue, dtype and target against double precision; threads; refusals; bf16x3.

Legend: M rows, N output features, K input features; a weight is (N, K). Left out: sums in FP16 (test_gemm_fp16.py), speed.
"""

import itertools

import pytest
import torch

from fugaku_megatron.host import kernels
from tests.kernels.numbers import (
    MLP_ACTIVATIONS,
    assert_refused,
    having,
    linear_forms,
    packed,
    random,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
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


def shapes():
    """Every small combination of edges, and the layers of a model scaled down."""
    small = [
        s for i, s in enumerate(itertools.product(EDGES, EDGES, EDGES)) if i % 5 == 0 or 0 in s[2:]
    ]
    return small + list(MODEL)


def strided(rows, cols, dtype, pad=3):
    """A random matrix whose rows are `pad` elements apart from each other."""
    return torch.randn(rows, cols + pad).to(dtype)[:, :cols]


def check(got, exact, magnitude, dtype, depth):
    """`exact` in double; `magnitude`: the matmul of absolute values, which bounds a sum's rounding (Higham 2002, section 3.1)."""
    bound = UNIT[dtype] * exact.abs() + 2 * UNIT[torch.float32] * (depth + 8) * magnitude + 1e-37
    if dtype == torch.float16:
        bound += 2.0**-24
    assert got.shape == exact.shape
    assert bool(((got.double() - exact).abs() <= bound).all()), float(
        ((got.double() - exact).abs() / bound).max()
    )


def check_forms(x, weight, grad, found, dtype):
    """Compare what linear_forms returned with double precision."""
    m, k = x.shape
    n = len(weight)
    x = x.double()
    w = weight.double()
    g = grad.double()
    out, data, gradient, bias = found
    check(out, x @ w.T, x.abs() @ w.abs().T, dtype, k)
    check(data, g @ w, g.abs() @ w.abs(), dtype, n)
    check(gradient, g.T @ x + 1, g.abs().T @ x.abs() + 1, torch.float32, m)
    check(bias, g.sum(0) + 1, g.abs().sum(0) + 1, torch.float32, m)


def check_every_shape(guarded, dtype, **kind):
    torch.manual_seed(0)
    for index, (m, n, k) in enumerate(shapes()):
        x = strided(m, k, dtype)
        weight = strided(n, k, dtype, index % 3)
        grad = strided(m, n, dtype, 1)
        check_forms(
            x, weight, grad, linear_forms(x, weight, grad, index % 2, guarded, dtype, **kind), dtype
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_forms_match_double_precision(target, dtype, guarded):
    check_every_shape(guarded, dtype)


@pytest.mark.parametrize("name", MLP_ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(37, 67, 29), (5, 130, 1030), (3, 5, 0)])
def test_epilogues(target, dtype, shape, name):
    torch.manual_seed(1)
    m, n, k = shape
    x = strided(m, k, dtype)
    weight = strided(n, k, dtype)
    bias = torch.randn(n).to(dtype)
    residual = strided(m, n, dtype, 5)
    linear = x.double() @ weight.double().T + bias.double()
    tolerance = dict(
        rtol=2 * UNIT[dtype], atol=(UNIT[dtype] + 2e-7 * (k + 8)) * float(linear.abs().max() + 1)
    )
    pre = torch.empty(m, n, dtype=dtype)
    out = strided(m, n, dtype)
    kernels.linear_forward(
        x,
        weight,
        out,
        bias=bias,
        activation=name,
        pre=pre,
        residual=residual,
        packed=packed(weight, False),
    )
    torch.testing.assert_close(pre.double(), linear, **tolerance)
    activated = MLP_ACTIVATIONS[name](linear)
    error = dict(tolerance)
    if name == "squared_relu":  # an error of the sum is multiplied by the slope
        error["atol"] *= 2 * float(linear.abs().max() + 1)
    torch.testing.assert_close(out.double(), activated + residual.double(), **error)
    kernels.linear_forward(x, weight, out, bias=bias)
    torch.testing.assert_close(out.double(), linear, **tolerance)

    grad = strided(m, k, dtype)
    argument = (3 * torch.randn(m, n)).to(dtype).double().requires_grad_()
    linear = grad.double() @ weight.double().T
    MLP_ACTIVATIONS[name](argument).backward(linear)
    tolerance["atol"] *= float(argument.detach().abs().max()) if name == "squared_relu" else 1
    kernels.linear_data_gradient(
        grad, weight.T.contiguous(), out, argument.detach().to(dtype), name
    )
    torch.testing.assert_close(out.double(), argument.grad, **tolerance)
    in_place = strided(m, n, dtype)
    in_place.copy_(argument.detach())
    kernels.linear_data_gradient(grad, weight.T.contiguous(), in_place, in_place, name)
    assert torch.equal(in_place, out)


@pytest.mark.parametrize("shape", [(61, 131, 1009), (4, 300, 40), (300, 7, 33), (1, 1, 600)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_and_packing_do_not_change_the_bits(target, same_for_any_threads, shape, dtype):
    m, n, k = shape
    x = random(m, k, dtype=dtype)
    weight = random(n, k, dtype=dtype, seed=1)
    grad = random(m, n, dtype=dtype, seed=2)

    def run():
        out = torch.empty(m, n, dtype=dtype)
        unpacked = torch.empty(m, n, dtype=dtype)
        kernels.linear_forward(x, weight, out, activation="gelu", packed=packed(weight, False))
        kernels.linear_forward(x, weight, unpacked, activation="gelu")
        return out, unpacked, *linear_forms(x, weight, grad, dtype=dtype)

    out, unpacked, *_ = same_for_any_threads(run)
    assert torch.equal(out, unpacked)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_float32_output_of_half_inputs(target, dtype):
    x = random(19, 700, dtype=dtype)
    weight = random(33, 700, dtype=dtype, seed=1)
    out = torch.empty(19, 33)
    kernels.linear_forward(x, weight, out, bias=torch.ones(33))
    xd = x.double()
    wd = weight.double()
    check(out, xd @ wd.T + 1, xd.abs() @ wd.abs().T + 1, torch.float32, 700)
    assert kernels.has_fp16_arithmetic() == (not target.startswith(("avx", "amx")))
    assert kernels.has_bf16_arithmetic() == (target.endswith("bf16") or target.startswith("amx"))


@pytest.mark.parametrize("target", ["amx", "amx_emulated"])
def test_a_step_of_tiles_has_the_bits_of_its_definition(target):
    """TDPBF16PS (Intel's Software Developer's Manual): fused sums of the even and of the odd k, then their sum, no denormals."""
    if target not in kernels.runnable_targets(emulated=True):
        pytest.skip(next(row["reason"] for row in kernels.targets() if row["name"] == target))
    a = random(16, 32, dtype=torch.bfloat16)
    b = random(32, 16, dtype=torch.bfloat16, seed=1)
    out = torch.empty(16, 16)
    a[3] *= 2.0**-130
    a[4] = a[4] * 2.0**-80  # results of about 2^-127
    b[:, 5] = b[:, 5] * 2.0**-47
    with kernels.target(target):
        kernels.gemm(a, b, out)

    def normal(x):
        return torch.where(x.abs() < 2.0**-126, 0.0, x)

    even = torch.zeros(16, 16)
    odd = torch.zeros(16, 16)
    for k in range(
        0, 32, 2
    ):  # a product of two bfloat16 is exact in double, and so is its sum with a float of like size
        even = normal(
            (even.double() + torch.outer(normal(a[:, k].double()), normal(b[k].double()))).float()
        )
        odd = normal(
            (
                odd.double() + torch.outer(normal(a[:, k + 1].double()), normal(b[k + 1].double()))
            ).float()
        )
    assert (
        torch.equal(out, normal(even + odd))
        and bool((out[3] == 0).all())
        and bool((out[:3] != 0).all())
    )
    assert bool((out[4, 5] == 0).any())


def test_gemm_of_views(target):
    a = torch.randn(30, 41)
    b = torch.randn(41, 50)
    left = (a, a.T.contiguous().T, strided(30, 41, torch.float32))
    right = (b, b.T.contiguous().T, b[:, :1], b.T.contiguous().T[:, 3:4])
    for x, y in itertools.product(left, right):
        out = torch.ones(30, y.shape[1])
        kernels.gemm(x, y, out)
        check(out, x.double() @ y.double(), x.double().abs() @ y.double().abs(), torch.float32, 41)
        kernels.gemm(x, y, out, accumulate=True)
        check(
            out,
            2 * x.double() @ y.double(),
            3 * x.double().abs() @ y.double().abs(),
            torch.float32,
            41,
        )


@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf")])
def test_special_values_travel(target, special):
    x = torch.rand(20, 50) + 1
    weight = torch.rand(40, 50) + 1
    x[13, 17] = special
    out = torch.empty(20, 40)
    kernels.linear_forward(x, weight, out)
    assert torch.equal(out[13].isnan(), torch.full((40,), special != special))
    assert not bool(out[13].isfinite().any()) and bool(out[torch.arange(20) != 13].isfinite().all())
    pre = torch.tensor([[100.0, -100.0, 3e38, -3e38, float("inf"), float("nan")]])
    kernels.linear_data_gradient(
        torch.ones(1, 1), torch.ones(1, 6), gradient := torch.empty(1, 6), activation_input=pre
    )
    assert gradient[0, :5].tolist() == [1, 0, 1, 0, 1] and bool(gradient[0, 5].isnan())


COUNTS = ((0, 1, 37, 0, 5), (0, 0, 64, 0), (0,), (300, 1, 2))  # rows of each group


def grouped(counts, n, k, dtype, rows=strided):
    """x, weight, grad and counts of groups of rows with a weight each."""
    total = sum(counts)
    return (
        rows(total, k, dtype),
        random(len(counts), n, k, dtype=dtype, seed=1),
        rows(total, n, dtype),
        torch.tensor(counts),
    )


def each_group(counts):
    """(number, rows) of every group."""
    return [(i, slice(sum(counts[:i]), sum(counts[: i + 1]))) for i in range(len(counts))]


@pytest.mark.parametrize("n, k", [(33, 70), (40, 70), (144, 513), (16, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_of_rows_have_weights_of_their_own(target, dtype, n, k, guarded):
    torch.manual_seed(3)
    for counts in COUNTS:
        x, weight, grad, numbers = grouped(counts, n, k, dtype)
        out = guarded((len(x), n), dtype)
        data = guarded((len(x), k), dtype)
        gradient = guarded((len(counts), n, k))
        gradient.fill_(0.5)
        kernels.grouped_linear_forward(x, weight, numbers, out)
        kernels.grouped_linear_data_gradient(grad, weight, numbers, data)
        kernels.grouped_linear_weight_gradient(grad, x, numbers, gradient)
        for i, rows in each_group(counts):
            xd = x[rows].double()
            wd = weight[i].double()
            gd = grad[rows].double()
            check(out[rows], xd @ wd.T, xd.abs() @ wd.abs().T, dtype, k)
            check(data[rows], gd @ wd, gd.abs() @ wd.abs(), dtype, n)
            check(gradient[i], gd.T @ xd + 0.5, gd.abs().T @ xd.abs() + 0.5, torch.float32, len(xd))
            assert len(xd) or bool((gradient[i] == 0.5).all())


@pytest.mark.parametrize("n, k", [(131, 259), (140, 1030)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_have_the_bits_of_single_matmuls_for_any_threads(
    target, same_for_any_threads, dtype, n, k
):
    """Also where a group with half of all rows is cut into parts, and where weights are read where they lie: n and k are even."""
    counts = (3, 200, 0, 70, 90, 37)
    x, weight, grad, numbers = grouped(
        counts, n, k, dtype, lambda rows, cols, dtype: random(rows, cols, dtype=dtype, seed=cols)
    )

    def run():
        out = torch.empty(len(x), n, dtype=dtype)
        data = torch.empty(len(x), k, dtype=dtype)
        gradient = torch.ones(len(counts), n, k)
        kernels.grouped_linear_forward(x, weight, numbers, out)
        kernels.grouped_linear_data_gradient(grad, weight, numbers, data)
        kernels.grouped_linear_weight_gradient(grad, x, numbers, gradient)
        return out, data, gradient

    out, data, gradient = same_for_any_threads(run)
    for i, rows in each_group(counts):
        one, two, three, _ = linear_forms(x[rows], weight[i], grad[rows], dtype=dtype)
        assert (
            torch.equal(out[rows], one)
            and torch.equal(data[rows], two)
            and torch.equal(gradient[i], three)
        )


def test_reference_agrees(reference):
    x = torch.randn(7, 20)
    weight = torch.randn(9, 20)
    grad = torch.randn(7, 9)
    weights = torch.randn(3, 9, 20)
    counts = torch.tensor([5, 0, 2])

    def run():
        out = torch.empty(7, 9)
        data = torch.empty(7, 20)
        gradient = torch.ones(9, 20)
        bias = torch.ones(9)
        kernels.linear_forward(x, weight, out, activation="gelu", packed=packed(weight, False))
        kernels.linear_data_gradient(
            grad, weight, data, activation_input=x, packed=packed(weight, True)
        )
        kernels.linear_weight_gradient(grad, x, gradient, bias)
        outs = torch.empty(7, 9)
        datas = torch.empty(7, 20)
        gradients = torch.ones(3, 9, 20)
        kernels.grouped_linear_forward(x, weights, counts, outs)
        kernels.grouped_linear_data_gradient(grad, weights, counts, datas)
        kernels.grouped_linear_weight_gradient(grad, x, counts, gradients)
        return out, data, gradient, bias, outs, datas, gradients

    for fast, exact in zip(run(), reference(run), strict=True):
        torch.testing.assert_close(fast, exact, rtol=1e-5, atol=1e-5)


def test_refusals():
    x = torch.randn(4, 6)
    weight = torch.randn(5, 6)
    out = torch.empty(4, 5)
    forward = kernels.linear_forward
    groups = torch.randn(2, 5, 6)

    def of_groups(*counts, out=out, weight=groups):
        return lambda: kernels.grouped_linear_forward(x, weight, torch.tensor(counts), out)

    refused = [
        ("counts: expected shape", of_groups(4)),
        ("counts: expected numbers from 0 to 4, got -1", of_groups(-1, 4)),
        ("counts: expected numbers from 0 to 4, got 5", of_groups(5, -1)),
        ("counts: expected a sum of 4, got 3", of_groups(1, 2)),
        ("counts: expected dtype int64", of_groups(2.0, 2.0)),
        (
            "weight: expected a contiguous tensor",
            of_groups(2, 2, weight=torch.randn(2, 6, 5).transpose(1, 2)),
        ),
        ("out: expected dtype float32", of_groups(2, 2, out=out.bfloat16())),
        ("x: expected shape", lambda: forward(torch.randn(4, 7), weight, out)),
        ("x: expected dtype", lambda: forward(x.bfloat16(), weight, out)),
        ("weight: expected dtype", lambda: forward(x.double(), weight.double(), out)),
        ("out: expected shape", lambda: forward(x, weight, torch.empty(4, 6))),
        ("out: expected memory apart from x", lambda: forward(x, weight, x[:, :5])),
        ("out: expected rows apart", lambda: forward(x, weight, torch.empty(5).expand(4, 5))),
        ("residual: expected memory apart", lambda: forward(x, weight, out, residual=out)),
        (
            "packed: expected the output of pack_weight",
            lambda: forward(x, weight, out, packed=torch.zeros(99, dtype=torch.uint8)),
        ),
        ("packed: expected a weight", lambda: forward(x, weight, out, packed=packed(weight, True))),
        (
            "packed: expected shape",
            lambda: kernels.pack_weight(weight, torch.empty(9, dtype=torch.uint8)),
        ),
        (
            "weight_gradient: expected dtype float32",
            lambda: kernels.linear_weight_gradient(out, x, weight.bfloat16()),
        ),
        (
            "bias_gradient: expected shape",
            lambda: kernels.linear_weight_gradient(out, x, torch.zeros(5, 6), torch.zeros(6)),
        ),
        (
            "a: expected contiguous rows",
            lambda: kernels.gemm(torch.randn(8, 12)[::2, ::2], weight.T, out),
        ),
        (
            "out: expected dtype float32",
            lambda: kernels.gemm(x.half(), weight.T.half(), out.half(), accumulate=True),
        ),
    ]
    assert_refused((call, message) for message, call in refused)


def test_a_weight_packed_for_another_target_is_refused():
    names = kernels.runnable_targets()
    if len(names) < 2:
        pytest.skip("this CPU runs one vector target only")
    weight = torch.randn(5, 6)
    with kernels.target(names[0]):
        buffer = packed(weight, False)
    with (
        kernels.target(names[1]),
        pytest.raises(ValueError, match=f"by target {names[1]}, got .* by target {names[0]}"),
    ):
        kernels.linear_forward(torch.randn(4, 6), weight, torch.empty(4, 5), packed=buffer)


@pytest.fixture(params=having("bf16", emulated=True))
def bf16_target(request):
    """Name of the target in use: those that multiply bfloat16."""
    with kernels.target(request.param):
        yield request.param


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
    x = random(m, k)
    weight = random(n, k, seed=1) * 0.02
    grad = random(m, n, seed=2)
    xd = x.double()
    wd = weight.double()
    gd = grad.double()
    exact = xd @ wd.T, gd @ wd, gd.T @ xd + 1, gd.sum(0) + 1
    for split, ieee, want in zip(
        linear_forms(x, weight, grad, bf16x3=True),
        linear_forms(x, weight, grad),
        exact,
        strict=True,
    ):
        assert root_mean_square(split, want) <= 2 * root_mean_square(ieee, want)
    # Sums over all k with both factors transposed.
    long = torch.empty(n, m)
    ieee = torch.empty(n, m)
    kernels.gemm(weight.T.contiguous().T, x.T, long, bf16x3=True)
    kernels.gemm(weight.T.contiguous().T, x.T, ieee)
    assert 0 < root_mean_square(long, exact[0].T) <= 2 * root_mean_square(ieee, exact[0].T)


def test_bf16x3_of_every_small_shape(bf16_target, guarded):
    check_every_shape(guarded, torch.float32, bf16x3=True)


@pytest.mark.parametrize("shape", [(37, 67, 29), (5, 130, 1030), (3, 5, 0)])
def test_bf16x3_with_epilogues(bf16_target, shape):
    m, n, k = shape
    x = random(m, k)
    weight = random(n, k, seed=1)
    bias = random(n, seed=2)
    residual = random(m, n, seed=3)
    argument = random(m, n)

    def run(bf16x3):
        out = torch.empty(m, n)
        pre = torch.empty(m, n)
        slope = torch.empty(m, n)
        kernels.linear_forward(x, weight, out, bias, "gelu", pre, residual, bf16x3=bf16x3)
        kernels.linear_data_gradient(
            x, weight.T.contiguous(), slope, argument, "gelu", bf16x3=bf16x3
        )
        return out, pre, slope

    for split, ieee in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(split, ieee, rtol=1e-5, atol=2e-7 * (k + 8))


@pytest.mark.parametrize("shape", [(61, 131, 1009), (4, 300, 40), (1, 1, 600)])
def test_bf16x3_has_the_same_bits_for_any_threads_and_packed(
    bf16_target, same_for_any_threads, shape
):
    m, n, k = shape
    x = random(m, k)
    weight = random(n, k, seed=1)
    grad = random(m, n, seed=2)
    one = same_for_any_threads(lambda: linear_forms(x, weight, grad, bf16x3=True))
    for a, b in zip(one, linear_forms(x, weight, grad, with_packed=True, bf16x3=True), strict=True):
        assert torch.equal(a, b)


def test_bf16x3_of_special_values(bf16_target):
    x = torch.rand(20, 50) + 1
    weight = torch.rand(40, 50) + 1
    plain = torch.empty(20, 40)
    kernels.linear_forward(x, weight, plain, bf16x3=True)
    for special in (float("nan"), float("inf"), -float("inf")):
        x[13, 17] = special
        out = torch.empty(20, 40)
        kernels.linear_forward(x, weight, out, bf16x3=True)
        others = torch.arange(20) != 13
        assert not bool(out[13].isfinite().any()) and torch.equal(out[others], plain[others])
    largest = torch.tensor(
        [[torch.finfo(torch.float32).max, -3.395e38, 1.0]]
    ).T  # both beyond the largest bfloat16 when rounded
    out = torch.empty(3, 1)
    kernels.gemm(largest, torch.full((1, 1), 0.75), out, bf16x3=True)
    torch.testing.assert_close(out.double(), 0.75 * largest.double(), rtol=1e-7, atol=0)


def test_bf16x3_is_refused_where_it_cannot_be(bf16_target):
    x = torch.randn(4, 6)
    weight = torch.randn(5, 6)
    out = torch.empty(4, 5)
    forward = kernels.linear_forward
    split = packed(weight, False, bf16x3=True)
    assert_refused(
        (call, message)
        for message, call in [
            (
                "bf16x3: expected False for operands of bfloat16, got True",
                lambda: forward(x.bfloat16(), weight.bfloat16(), out.bfloat16(), bf16x3=True),
            ),
            (
                "packed: expected a weight float32 .* got float32 in three bfloat16 parts",
                lambda: forward(x, weight, out, packed=split),
            ),
            (
                "packed: expected a weight float32 in three bfloat16 parts .* got float32 ",
                lambda: forward(x, weight, out, packed=packed(weight, False), bf16x3=True),
            ),
        ]
    )
    with kernels.target("portable"):
        assert_refused(
            [
                (
                    lambda: forward(x, weight, out, bf16x3=True),
                    "bf16x3: expected False for target portable, which has no BF16 arithmetic, got True",
                )
            ]
        )
