"""Layer norm, RMS norm and bias_dropout_add, apart and fused, on every target this CPU runs, against double precision.

Left out: cross-entropy (test_cross_entropy.py). Legend: s sequence, b micro-batch, h hidden; rows = s b.
"""

import torch

from fugaku_megatron.host import kernels
from tests.kernels.numbers import (
    DTYPES,
    assert_near,
    assert_refused,
    assert_slope,
    for_each,
    random,
)

FAST = kernels.runnable_targets()[-1]
VL = {row["name"]: row["vector_bytes"] // 4 for row in kernels.targets()}[FAST]
SHAPES = [
    (0, 5),
    (1, 1),
    (3, VL - 1),
    (4, VL),
    (5, VL + 1),
    (7, 67),
    (211, 131),
    (9, 768),
    (6, 2053),
]
PLACE = {"p": 0.3, "seed": 11, "stream": 5, "first_sample": 2**33, "row0": 3}


def norm_forward(x, weight, bias, eps=1e-5):
    y = torch.empty_like(x)
    rows = x.numel() // x.shape[-1]
    mean = torch.empty(rows)
    rstd = torch.empty(rows)
    kernels.layer_norm(x, weight, bias, y, mean, rstd, eps)
    return y, mean, rstd


def double_norm(x, weight, bias, eps=1e-5):
    """(y, x, weight, bias) in double, ready for backward()."""
    leaves = [t.double().detach().requires_grad_() for t in (x, weight, bias)]
    return torch.nn.functional.layer_norm(leaves[0], (x.shape[-1],), *leaves[1:], eps), *leaves


@for_each(dtype=DTYPES, shape=SHAPES)
def test_layer_norm(every_target, shape, dtype):
    x = random(*shape, dtype=dtype) * 3 + 7
    weight = random(shape[1], dtype=dtype, seed=1)
    bias = random(shape[1], dtype=dtype, seed=2)
    y, mean, rstd = norm_forward(x, weight, bias)
    want = double_norm(x, weight, bias)[0].detach()
    assert_near(y, want, dtype)
    assert_near(mean, x.double().mean(-1), torch.float32)
    centred = x.double() - x.double().mean(-1, keepdim=True)
    assert_near(rstd, (centred.square().mean(-1) + 1e-5).rsqrt(), torch.float32, 4)


@for_each(dtype=DTYPES, shape=SHAPES)
def test_layer_norm_backward(every_target, shape, dtype):
    x = random(*shape, dtype=dtype)
    weight = random(shape[1], dtype=dtype, seed=1)
    dy = random(*shape, dtype=dtype, seed=3)
    add = random(*shape, dtype=dtype, seed=4)
    _, mean, rstd = norm_forward(x, weight, weight)
    dx = torch.empty_like(x)
    dweight = torch.full((shape[1],), 2.0)
    dbias = torch.full((shape[1],), 3.0)
    kernels.layer_norm_backward(dy, x, mean, rstd, weight, dx, dweight, dbias, add)
    y, x64, weight64, bias64 = double_norm(x, weight, weight)
    y.backward(dy.double())
    assert_near(dx, x64.grad + add.double(), dtype, 2, [rstd.view(-1, 1) * dy * weight])
    assert_near(dweight, weight64.grad + 2, torch.float32, 2)
    assert_near(dbias, bias64.grad + 3, torch.float32, 2)


def test_norms_backward_is_the_slope(every_target):
    x, weight, bias, dy = (
        random(*shape, seed=i) for i, shape in enumerate([(4, 19), (19,), (19,), (4, 19)])
    )
    _, mean, rstd = norm_forward(x, weight, bias)
    grads = torch.empty_like(x), torch.zeros_like(weight), torch.zeros_like(bias)
    kernels.layer_norm_backward(dy, x, mean, rstd, weight, *grads)
    assert_slope(
        lambda: (norm_forward(x, weight, bias)[0].double() * dy.double()).sum(),
        (x, weight, bias),
        grads,
    )
    grads = torch.empty_like(x), torch.zeros_like(weight)
    kernels.rms_norm_backward(dy, x, rms_forward(x, weight)[1], weight, *grads)
    assert_slope(
        lambda: (rms_forward(x, weight)[0].double() * dy.double()).sum(), (x, weight), grads
    )


def rms_forward(x, weight, eps=1e-5):
    y = torch.empty_like(x)
    rstd = torch.empty(x.numel() // x.shape[-1])
    kernels.rms_norm(x, weight, y, rstd, eps)
    return y, rstd


def double_rms(x, weight, eps=1e-5):
    """(y, x, weight) in double, ready for backward()."""
    leaves = [t.double().detach().requires_grad_() for t in (x, weight)]
    return leaves[0] * (leaves[0].square().mean(-1, keepdim=True) + eps).rsqrt() * leaves[
        1
    ], *leaves


@for_each(dtype=DTYPES, shape=SHAPES)
def test_rms_norm_and_its_gradient(every_target, shape, dtype):
    x = random(*shape, dtype=dtype) * 3 + 1
    weight = random(shape[1], dtype=dtype, seed=1)
    dy = random(*shape, dtype=dtype, seed=3)
    add = random(*shape, dtype=dtype, seed=4)
    y, rstd = rms_forward(x, weight)
    dx = torch.empty_like(x)
    dweight = torch.full((shape[1],), 2.0)
    kernels.rms_norm_backward(dy, x, rstd, weight, dx, dweight, add)
    want, x64, weight64 = double_rms(x, weight)
    want.backward(dy.double())
    assert_near(y, want.detach(), dtype)
    assert_near(rstd, (x.double().square().mean(-1) + 1e-5).rsqrt(), torch.float32)
    assert_near(dx, x64.grad + add.double(), dtype, 2, [rstd.view(-1, 1) * dy * weight])
    assert_near(dweight, weight64.grad + 2, torch.float32, 2)


@for_each(with_bias=[True, False], p=[0.0, 0.3])
def test_fused_rms_norm_is_its_two_parts(every_target, p, with_bias):
    """Bit by bit, forward and backward."""
    place = {**PLACE, "p": p}
    shape = (11, 3, 67)
    x, residual, dy, dsum = (random(*shape, dtype=torch.bfloat16, seed=i) for i in range(4))
    bias, weight = (random(67, dtype=torch.bfloat16, seed=i) for i in (4, 5))
    total, y, apart, dx = (torch.empty_like(x) for _ in range(4))
    rstd = torch.empty(33)
    kernels.bias_dropout_add_rms_norm(
        x, bias if with_bias else None, residual, total, weight, y, rstd, 1e-5, **place
    )
    kernels.bias_dropout_add(x, bias if with_bias else None, residual, apart, **place)
    assert torch.equal(total, apart) and torch.equal(y, rms_forward(total, weight)[0])
    dresidual = torch.empty_like(x)
    fused = torch.zeros(2, 67)
    parts = torch.zeros(2, 67)
    kernels.bias_dropout_add_rms_norm_backward(
        dy,
        dsum,
        total,
        rstd,
        weight,
        dresidual,
        dx if p else None,
        fused[0],
        fused[1] if with_bias else None,
        **place,
    )
    kernels.rms_norm_backward(dy, total, rstd, weight, apart, parts[0], dsum)
    assert torch.equal(dresidual, apart)
    kernels.bias_dropout_add_backward(apart, apart, parts[1] if with_bias else None, **place)
    assert torch.equal(fused, parts) and torch.equal(dx if p else dresidual, apart)


def dropped(x, place):
    """Dropout as the dropout kernel has it, in double; (s, b, h)."""
    ones = torch.ones(x.shape)
    out = torch.ones(x.shape)
    if place["p"]:
        kernels.dropout(ones, out, sample_dim=1, **place)
    return x.double() * out.double()


@for_each(
    dtype=DTYPES,
    p=[0.0, 0.3],
    shape=[(0, 2, 5), (3, 1, 1), (3, 2, VL + 1), (5, 3, 67), (2, 2, 768)],
)
def test_fused_forward_and_backward(every_target, shape, dtype, p):
    place = {**PLACE, "p": p}
    h = shape[-1]
    x, residual, dy, dsum = (random(*shape, dtype=dtype, seed=i) for i in range(4))
    bias, weight, norm_bias = (random(h, dtype=dtype, seed=i) for i in range(4, 7))
    total = torch.empty_like(x)
    y = torch.empty_like(x)
    mean = torch.empty(x.numel() // h)
    rstd = torch.empty(x.numel() // h)
    kernels.bias_dropout_add_layer_norm(
        x, bias, residual, total, weight, norm_bias, y, mean, rstd, 1e-5, **place
    )
    assert_near(total, residual.double() + dropped(x.double() + bias.double(), place), dtype)
    want, total64, weight64, norm_bias64 = double_norm(total, weight, norm_bias)
    assert_near(y, want.detach(), dtype, 2)
    dresidual = torch.empty_like(x)
    dx = torch.empty_like(x) if p else None
    sums = [torch.ones(h) for _ in range(3)]
    kernels.bias_dropout_add_layer_norm_backward(
        dy, dsum, total, mean, rstd, weight, dresidual, dx, *sums, **place
    )
    want.backward(dy.double())
    terms = [rstd.view(*shape[:2], 1) * dy * weight]
    assert_near(dresidual, total64.grad + dsum.double(), dtype, 4, terms)
    dx64 = dropped(total64.grad + dsum.double(), place)
    if p:
        mask = torch.empty_like(dresidual)
        kernels.dropout(dresidual, mask, sample_dim=1, **place)
        torch.testing.assert_close(dx, mask, rtol=0, atol=0)  # the bits of the dropout kernel
    for got, grad in zip(sums, (weight64.grad, norm_bias64.grad, dx64.sum((0, 1))), strict=True):
        assert_near(got, grad + 1, dtype if grad is not weight64.grad else torch.float32, 4, terms)


@for_each(dtype=DTYPES, p=[0.0, 0.3])
def test_bias_dropout_add(every_target, dtype, p):
    place = {**PLACE, "p": p}
    shape = (13, 3, 131)
    x = random(*shape, dtype=dtype)
    residual = random(*shape, dtype=dtype, seed=1)
    bias = random(131, dtype=dtype, seed=2)
    for b in (bias, None):
        out = torch.empty_like(x)
        kernels.bias_dropout_add(x, b, residual, out, **place)
        assert_near(
            out,
            residual.double() + dropped(x.double() + (0 if b is None else b.double()), place),
            dtype,
        )
    dx = torch.empty_like(x)
    dbias = torch.ones(131)
    kernels.bias_dropout_add_backward(x, dx, dbias, **place)
    want = dropped(x, place)
    assert_near(dx, want, dtype)
    assert_near(dbias, want.sum((0, 1)) + 1, torch.float32)
    kernels.bias_dropout_add(x, None, residual, residual, p=0.0)  # in place


def everything():
    """All outputs of one pass, for comparing bits."""
    x, residual, dy, dsum = (random(103, 2, 131, seed=i) for i in range(4))
    bias, weight, norm_bias = (random(131, seed=i) for i in range(4, 7))
    out = [torch.zeros_like(x) for _ in range(4)] + [torch.zeros(206) for _ in range(2)]
    total, y, dresidual, dx, mean, rstd = out
    sums = [torch.zeros(131) for _ in range(9)]
    kernels.bias_dropout_add_layer_norm(
        x, bias, residual, total, weight, norm_bias, y, mean, rstd, 1e-5, **PLACE
    )
    kernels.bias_dropout_add_layer_norm_backward(
        dy, dsum, total, mean, rstd, weight, dresidual, dx, *sums[:3], **PLACE
    )
    kernels.layer_norm_backward(dy, total, mean, rstd, weight, dx.clone(), *sums[3:5])
    kernels.bias_dropout_add_backward(dy, dx, sums[5], **PLACE)
    kernels.rms_norm_backward(dy, total, rstd, weight, dx.clone(), sums[6])
    kernels.bias_dropout_add_rms_norm_backward(
        dy, dsum, total, rstd, weight, dresidual, dx, *sums[7:], **PLACE
    )
    return *out, *sums


def test_same_bits_for_any_number_of_threads(target, same_for_any_threads):
    same_for_any_threads(everything)


@for_each(bad=[float("nan"), float("inf"), float("-inf")])
def test_nan_and_inf_travel_within_their_row(every_target, bad):
    x = random(6, 67)
    weight = random(67, seed=1)
    bias = random(67, seed=2)
    x[2, 5] = bad
    y, _, _ = norm_forward(x, weight, bias)
    want = torch.nn.functional.layer_norm(x, (67,), weight, bias)
    assert torch.equal(y.isnan(), want.isnan()) and y[2].isnan().all() and not y[3].isnan().any()


def test_wrong_arguments_leave_everything_untouched():
    x = torch.ones(4, 8)
    weight = torch.ones(8)
    rows = torch.ones(4)
    y = torch.ones(4, 8)
    cube = torch.ones(2, 2, 8)
    out = torch.ones(2, 2, 8)
    assert_refused(
        [
            *(
                (lambda arguments=arguments: kernels.layer_norm(*arguments, 1e-5), message)
                for arguments, message in [
                    (
                        (x, weight[:7], weight, y, rows, rows.clone()),
                        r"weight: expected shape \(8,\), got \(7,\)",
                    ),
                    (
                        (x, weight.double(), weight, y, rows, rows.clone()),
                        "weight: expected dtype float32 as x, got float64",
                    ),
                    (
                        (x.t(), weight, weight, y, rows, rows.clone()),
                        "x: expected a contiguous tensor",
                    ),
                    (
                        (x, weight, weight, y, rows[:3], rows.clone()),
                        r"mean: expected shape \(4,\)",
                    ),
                    ((x, weight, weight, y, rows, rows), "rstd: expected memory apart from mean"),
                    (
                        (x[:, :0].contiguous(), weight, weight, y, rows, rows.clone()),
                        "x: expected at least one column",
                    ),
                ]
            )
        ]
    )
    assert_refused(
        [
            (
                lambda: kernels.rms_norm(x, weight, y, y.view(-1)[:4], 1e-5),
                "rstd: expected memory apart from y",
            ),
            (lambda: kernels.rms_norm(x, weight, y, rows, -1.0), "eps: expected 0 or more"),
            (
                lambda: kernels.bias_dropout_add(cube, None, cube, out, p=1.0),
                "p: expected a probability",
            ),
            (
                lambda: kernels.bias_dropout_add_backward(cube, None, None, p=0.5),
                "dx: expected a tensor, since p is not 0",
            ),
            (lambda: kernels.bias_dropout_add(x, None, x, y), "x: expected 3 dimensions"),
            (
                lambda: kernels.layer_norm_backward(
                    x, x.clone(), rows, rows, weight, y, weight.double(), weight.clone()
                ),
                "dweight: expected dtype float32",
            ),
        ],
        untouched=(x, weight, rows, y, cube, out),
    )
