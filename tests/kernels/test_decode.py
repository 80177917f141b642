"""Matmuls with few rows on every target, against double precision."""

import pytest
import torch

from fugaku_megatron.host import kernels
from tests.kernels.numbers import (
    DTYPES,
    MLP_ACTIVATIONS,
    assert_near,
    for_each,
    random,
    randoms,
    refuses,
)

pytestmark = pytest.mark.kernels

SHAPES = [
    (0, 3, 5),
    (1, 1, 1),
    (1, 67, 33),
    (2, 5, 768),
    (3, 16, 15),
    (4, 7, 64),
    (5, 131, 17),
    (8, 25, 96),
    (9, 33, 131),
    (15, 50, 65),
    (1, 0, 4),
    (2, 3, 0),
]


@for_each(dtype=DTYPES, shape=SHAPES)
def test_linear_few_rows(every_target, shape, dtype, guarded):
    m, n, k = shape
    x = random(m, k, dtype=dtype)
    weight = random(n, k + 3, dtype=dtype, seed=1)[:, :k]
    bias = random(n, dtype=dtype, seed=2)
    exact = x.double() @ weight.double().t()
    out = guarded((m, n), dtype)
    kernels.linear_few_rows(x, weight, out)
    assert_near(out, exact, dtype, float32=3e-6)
    for name, function in MLP_ACTIVATIONS.items():
        kernels.linear_few_rows(x, weight, out, bias, name)
        assert_near(out, function(exact + bias.double()), dtype, float32=4e-6)


@for_each(dtype=DTYPES)
def test_a_row_has_the_same_bits_whatever_the_others_and_the_threads_are(
    every_target, same_for_any_threads, dtype
):
    x, weight, bias = randoms((15, 257), (1031, 257), 1031, dtype=dtype)

    def matmul(rows):
        out = torch.empty(len(rows), 1031, dtype=dtype)
        kernels.linear_few_rows(rows, weight, out, bias, "gelu")
        return out

    whole = same_for_any_threads(lambda: matmul(x))
    parts = [matmul(x[:1]), matmul(x[1:4]), matmul(x[4:10]), matmul(x[10:])]
    assert torch.equal(whole, torch.cat(parts))


def test_nan_and_inf_reach_the_outputs_they_belong_to(every_target):
    x = torch.ones(1, 70)
    weight = torch.ones(9, 70)
    out = torch.empty(1, 9)
    weight[2, 69] = float("nan")
    weight[5, 0] = float("inf")
    kernels.linear_few_rows(x, weight, out)
    assert (
        torch.isnan(out[0]).tolist() == [i == 2 for i in range(9)]
        and out[0, 5] == float("inf")
        and out[0, 0] == 70
    )


def test_wrong_arguments_leave_everything_untouched():
    x = torch.ones(2, 8)
    weight = torch.ones(3, 8)
    out = torch.ones(2, 3)
    bias = torch.ones(3)
    refuses(
        kernels.linear_few_rows,
        (x, weight, out, bias),
        {
            r"x: expected shape \(\*, 7\), got \(2, 8\)": {"weight": weight[:, :7]},
            r"out: expected shape \(2, 3\)": out[:1],
            r"bias: expected shape \(3,\), got \(2,\)": bias[:2],
            "x: expected dtype float16 as weight": {"weight": weight.half()},
        },
    )
