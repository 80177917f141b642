"""GEMM with FP16 sums over chunks of k (kernels_sve/gemm/gemm_half.h): the reference against the definition, targets against it.

Legend: M rows, N output features, K input features; a weight is (N, K). Left out: how large the error is (docs/numerics.md).
"""

import itertools

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from fugaku_megatron.host import kernels
from tests.kernels.numbers import (
    assert_equal,
    assert_overwrites,
    having,
    linear_forms,
    packed,
    random,
    refuses,
)

pytestmark = pytest.mark.kernels

CHUNK = 16
EDGES = (0, 1, 13, 37)
SHAPES = [
    *itertools.islice(itertools.product(EDGES, EDGES, EDGES), 0, None, 3),
    (29, 131, 70),
    (48, 70, 300),
    (9, 140, 1030),
]


@pytest.fixture(params=having("fp16"))
def target(request):
    """Target in use that sums in FP16, by name."""
    with kernels.target(request.param):
        yield request.param


def half(*shape, seed=0):
    return random(*shape, dtype=torch.float16, seed=seed)


def strided(rows, cols, seed=0):
    """Return a matrix with three elements between its rows."""
    return half(rows, cols + 3, seed=seed)[:, :cols]


def matmul(a, b, chunk=CHUNK):
    out = torch.empty(a.shape[0], b.shape[1])
    kernels.gemm(a, b, out, fp16_chunk=chunk)
    return out


def by_definition(a, b, chunk):
    """Round every multiply-add, in double, to FP16 once; add the chunks' sums in double."""
    a = a.double().numpy()
    b = b.double().numpy()
    total = np.zeros((a.shape[0], b.shape[1]))
    with np.errstate(over="ignore", invalid="ignore"):
        for begin in range(0, a.shape[1], chunk):
            part = np.zeros_like(total, dtype=np.float16)
            for p in range(begin, min(a.shape[1], begin + chunk)):
                part = (a[:, p, None] * b[p] + part.astype(np.float64)).astype(np.float16)
            total += part
    return torch.from_numpy(total).float()


# The second scale ends in denormals, the third overflows.
@pytest.mark.parametrize("scale", [1.0, 2.0**-10, 2.0**6])
@pytest.mark.parametrize("chunk", [1, 8, 24, 300])
def test_reference_is_the_definition(reference, chunk, scale):
    a = half(7, 100) * scale
    b = half(100, 9, seed=1) * scale
    assert_equal([reference(lambda: matmul(a, b, chunk))], [by_definition(a, b, chunk)])


def forms(m, n, k, seed, with_packed):
    x = strided(m, k, seed)
    weight = strided(n, k, seed + 1)
    grad = strided(m, n, seed + 2)
    return linear_forms(x, weight, grad, with_packed, dtype=torch.float32, fp16_chunk=CHUNK)


def test_forms_match_the_reference(target, reference):
    for index, (m, n, k) in enumerate(SHAPES):
        fast = forms(m, n, k, index, index % 2)
        exact = reference(lambda s=(m, n, k, index, False): forms(*s))
        for got, want, depth in zip(fast, exact, (k, n, m, m), strict=True):
            # The FP16 sums have the same bits; what differs is the rounding of their sum.
            assert_close(got, want, rtol=1e-6, atol=2.0**-22 * (depth + 8))


def test_epilogue_and_half_output(target, reference):
    x = strided(37, 130)
    weight = strided(70, 130, 1)
    bias = half(70, seed=2)
    residual = strided(37, 70, 3)

    def run():
        out, pre = torch.empty(2, 37, 70, dtype=torch.float16)
        buffer = packed(weight, False, fp16_chunk=CHUNK)
        kernels.linear_forward(x, weight, out, bias, "gelu", pre, residual, buffer, CHUNK)
        return out, pre

    assert_close(run(), reference(run), rtol=2.0**-10, atol=2.0**-10)


@pytest.mark.parametrize("shape", [(61, 131, 509), (4, 300, 40), (1, 1, 600)])
def test_threads_and_packing_do_not_change_the_bits(target, same_for_any_threads, shape):
    assert_equal(same_for_any_threads(lambda: forms(*shape, 0, True)), forms(*shape, 0, False))


@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)])
def test_views(target, transposed):
    a = half(30, 41)
    b = half(41, 130, seed=1)
    views = (m.T.contiguous().T if t else m for m, t in zip((a, b), transposed, strict=True))
    assert_close(matmul(*views), by_definition(a, b, CHUNK), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rows", [5, 1030])
def test_a_gradient_that_overwrites_has_the_bits_of_one_added_to_zeros(target, rows):
    assert_overwrites(half(rows, 40), half(rows, 67, seed=1), fp16_chunk=CHUNK)


def test_a_chunk_overflows_where_its_sum_does(target):
    """FP16 ends at 65504: a term or a chunk's sum above it is infinite, the chunks' sum is not."""
    a = torch.full((14, 64), 200.0).half()
    b = torch.full((64, 66), 200.0).half()  # terms of 40000
    a[13] = 300.0  # 60000
    assert bool((matmul(a, b, 1)[:13] == 64 * 40000).all())
    assert bool((matmul(a, b, 2) == torch.inf).all())
    assert bool((matmul(a, -b, 2) == -torch.inf).all())
    a[3, 5] = torch.inf
    a[4, 6] = 300.0
    b[6] = 300.0
    got = matmul(a, b, 1)
    assert bool((got[3:5] == torch.inf).all()) and bool(
        got[torch.tensor([0, 1, 2, 5, 12])].isfinite().all()
    )
    b[5, 0] = 0.0
    assert bool(matmul(a, b, 1)[3, 0].isnan())
    exact = torch.empty(14, 66)
    kernels.gemm(a[:3], b, exact[:3])
    assert bool(exact[:3].isfinite().all()), "without a chunk sums are FP32"


def test_denormals(target):
    """FP32 denormals are flushed if a run asks for it, FP16 denormals never: neither read nor as sums."""
    a = torch.full((14, 20), 2.0**-10).half()
    b = torch.full((20, 66), 2.0**-13).half()
    a[3] = 2.0**-24
    b[:, 5] = 1.0
    single = torch.empty(14, 66)
    try:
        kernels.flush_denormals(True)
        got = matmul(a, b)
        kernels.gemm(a, b, single)
    finally:
        kernels.flush_denormals(False)
    assert single[3, 5] == 20 * 2.0**-24
    assert got[0, 0] == 20 * 2.0**-23 and got[3, 5] == 20 * 2.0**-24 and got[0, 5] == 20 * 2.0**-10


def test_refusals(target):
    x = half(4, 6)
    weight = half(5, 6)
    for_chunk = packed(weight, False, fp16_chunk=CHUNK)
    refuses(
        kernels.gemm,
        (x, weight.T, torch.empty(4, 5), False, CHUNK),
        {
            "fp16_chunk: expected 0 for operands of float32, got 16": {
                "a": x.float(),
                "b": weight.T.float(),
            },
            "fp16_chunk: expected 0 to 65536, got -1": -1,
        },
    )
    refuses(
        kernels.linear_forward,
        (x, weight, torch.empty(4, 5)),
        {
            "packed: expected a weight .*fp16_chunk=8.* got .*fp16_chunk=16": {
                "packed": for_chunk,
                "fp16_chunk": 8,
            },
            "packed: expected a weight .*fp16_chunk=0": for_chunk,
        },
    )


def test_a_target_without_fp16_arithmetic_refuses():
    for name in {*kernels.runnable_targets()} - {*having("fp16")}:
        message = f"fp16_chunk: .* 0 for target {name}, which has no FP16 arithmetic"
        with kernels.target(name):
            refuses(kernels.gemm, (half(2, 3), half(3, 4), torch.empty(2, 4)), {message: 8})
