"""Layer norm, RMS norm and bias_dropout_add, apart and fused, on every target, against double precision.

Legend: s sequence, b micro-batch, h hidden; rows = s b.
"""

import pytest
import torch
from torch.nn import functional as F

from fugaku_megatron.host import kernels
from tests.kernels.numbers import (
    DTYPES,
    assert_near,
    for_each,
    random,
    randoms,
    refuses,
    with_gradients,
)

pytestmark = pytest.mark.kernels

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
SAMPLES = [(0, 2, 5), (3, 1, 1), (3, 2, VL + 1), (5, 3, 67), (2, 2, 768)]
PLACE = {"p": 0.3, "seed": 11, "stream": 5, "first_sample": 2**33, "row0": 3}
EPS = 1e-5


def layer_norm(x, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def rms_norm(x, weight):
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


NORMS = {"layer_norm": layer_norm, "rms_norm": rms_norm}
PARAMETERS = {"layer_norm": ("weight", "bias"), "rms_norm": ("weight",)}


def norm(name, x, *parameters):
    """Return y and the row statistics: mean and rstd, or rstd alone."""
    y = torch.empty_like(x)
    statistics = [torch.empty(x.numel() // x.shape[-1]) for _ in parameters]
    getattr(kernels, name)(x, *parameters, y, *statistics, EPS)
    return y, statistics


def norm_backward(name, dy, x, statistics, weight, add=None):
    """Return dx and the parameters' gradients, added to twos."""
    dx = torch.empty_like(x)
    sums = [torch.full(weight.shape, 2.0) for _ in statistics]
    getattr(kernels, f"{name}_backward")(dy, x, *statistics, weight, dx, *sums, add)
    return dx, *sums


def fused(name, inputs, place):
    """Run bias_dropout_add with a norm; return (total, y, statistics, dresidual, dx, dweight, [dnorm_bias,] dbias).

    inputs: x, residual, dy, dsum, bias or None, and the norm's parameters; dx: None without dropout
    """
    x, residual, dy, dsum, bias, *parameters = inputs
    total, y, dresidual, dx = (torch.empty_like(x) for _ in range(4))
    statistics = [torch.empty(x.numel() // x.shape[-1]) for _ in parameters]
    sums = [torch.full(x.shape[-1:], 2.0) for _ in parameters]
    dbias = None if bias is None else torch.full(x.shape[-1:], 2.0)
    dx = dx if place["p"] else None
    forward = getattr(kernels, f"bias_dropout_add_{name}")
    forward(x, bias, residual, total, *parameters, y, *statistics, EPS, **place)
    backward = getattr(kernels, f"bias_dropout_add_{name}_backward")
    weight = parameters[0]
    backward(dy, dsum, total, *statistics, weight, dresidual, dx, *sums, dbias, **place)
    return total, y, *statistics, dresidual, dx, *sums, dbias


def apart(name, inputs, place):
    """Return the results of `fused` from separate kernels."""
    x, residual, dy, dsum, bias, *parameters = inputs
    total = torch.empty_like(x)
    kernels.bias_dropout_add(x, bias, residual, total, **place)
    y, statistics = norm(name, total, *parameters)
    dresidual, *sums = norm_backward(name, dy, total, statistics, parameters[0], dsum)
    dx = torch.empty_like(x)
    dbias = None if bias is None else torch.full(x.shape[-1:], 2.0)
    kernels.bias_dropout_add_backward(dresidual, dx, dbias, **place)
    return total, y, *statistics, dresidual, dx if place["p"] else None, *sums, dbias


def fused_inputs(name, shape, dtype=torch.float32):
    sizes = [shape[-1] for _ in ("bias of the sum", *PARAMETERS[name])]
    return randoms(shape, shape, shape, shape, *sizes, dtype=dtype)


@for_each(name=NORMS, dtype=DTYPES, shape=SHAPES)
def test_a_norm_and_its_gradient(every_target, name, shape, dtype):
    sizes = [shape[1] for _ in PARAMETERS[name]]
    x, dy, add, *parameters = randoms(shape, shape, shape, *sizes, dtype=dtype)
    x = x * 3 + 7
    y, statistics = norm(name, x, *parameters)
    want, dx, *sums = with_gradients(NORMS[name], [x, *parameters], dy)
    assert_near(y, want, dtype)
    mean = x.double().mean(-1) if name == "layer_norm" else torch.zeros(shape[0])
    rstd = ((x.double() - mean[:, None]).square().mean(-1) + EPS).rsqrt()
    for got, statistic in zip(statistics, (mean, rstd)[-len(sizes) :], strict=True):
        assert_near(got, statistic, torch.float32, 4)
    got, *got_sums = norm_backward(name, dy, x, statistics, parameters[0], add)
    assert_near(got, dx + add.double(), dtype, 2, [rstd[:, None] * dy * parameters[0]])
    for got, gradient in zip(got_sums, sums, strict=True):
        assert_near(got, gradient + 2, torch.float32, 2)


@for_each(name=NORMS, dtype=DTYPES, p=[0.0, 0.3], shape=SAMPLES, with_bias=[True, False])
def test_a_fused_norm_has_the_bits_of_its_parts(every_target, name, shape, dtype, p, with_bias):
    inputs = fused_inputs(name, shape, dtype)
    if not with_bias:
        inputs[4] = None
    place = {**PLACE, "p": p}
    for got, want in zip(fused(name, inputs, place), apart(name, inputs, place), strict=True):
        assert got is want is None or torch.equal(got, want)


def dropped(x, place):
    """Apply the dropout kernel's mask in double."""
    mask = torch.ones(x.shape)
    if place["p"]:
        kernels.dropout(torch.ones(x.shape), mask, sample_dim=1, **place)
    return x.double() * mask.double()


@for_each(dtype=DTYPES, p=[0.0, 0.3], shape=[*SAMPLES, (13, 3, 131)])
def test_bias_dropout_add(every_target, dtype, p, shape):
    place = {**PLACE, "p": p}
    x, residual, bias = randoms(shape, shape, shape[-1], dtype=dtype)
    for given in (bias, None):
        out = torch.empty_like(x)
        kernels.bias_dropout_add(x, given, residual, out, **place)
        biased = x.double() if given is None else x.double() + given.double()
        assert_near(out, residual.double() + dropped(biased, place), dtype)
    dx = torch.empty_like(x)
    dbias = torch.ones(shape[-1])
    kernels.bias_dropout_add_backward(x, dx, dbias, **place)
    want = dropped(x, place)
    assert_near(dx, want, dtype)
    assert_near(dbias, want.sum((0, 1)) + 1, torch.float32)
    kernels.bias_dropout_add(x, None, residual, residual, **place)
    assert torch.equal(residual, out), "in place"


def test_same_bits_for_any_number_of_threads(target, same_for_any_threads):
    for name in NORMS:
        inputs = fused_inputs(name, (103, 2, 131))
        for run in (fused, apart):
            same_for_any_threads(lambda run=run, name=name, inputs=inputs: run(name, inputs, PLACE))


@for_each(name=NORMS, bad=[float("nan"), float("inf"), float("-inf")])
def test_nan_and_inf_travel_within_their_row(every_target, name, bad):
    x, *parameters = randoms((6, 67), *(67 for _ in PARAMETERS[name]))
    x[2, 5] = bad
    y = norm(name, x, *parameters)[0]
    # An infinite root mean square has the reciprocal 0, or on SVE, which estimates it, NaN.
    assert y[2, 5].isnan() and (name == "rms_norm" or y[2].isnan().all())
    assert not y[[0, 1, 3, 4, 5]].isnan().any()


def test_wrong_arguments_leave_everything_untouched():
    x = random(4, 8)
    weight, bias = randoms(8, 8)
    y, dx = torch.ones(2, 4, 8)
    mean, rstd = torch.ones(2, 4)
    refuses(
        kernels.layer_norm,
        (x, weight, bias, y, mean, rstd, EPS),
        {
            r"weight: expected shape \(8,\), got \(7,\)": weight[:7],
            "weight: expected dtype float32 as x, got float64": weight.double(),
            "x: expected a contiguous tensor": x.t(),
            r"mean: expected shape \(4,\)": mean[:3],
            "rstd: expected memory apart from mean": mean,
            "x: expected at least one column": x[:, :0].contiguous(),
        },
    )
    refuses(
        kernels.rms_norm,
        (x, weight, y, rstd, EPS),
        {
            "rstd: expected memory apart from y": y.view(-1)[:4],
            "eps: expected 0 or more": -1.0,
        },
    )
    refuses(
        kernels.layer_norm_backward,
        (dx, x, mean, rstd, weight, y, bias.clone(), bias),
        {"dweight: expected dtype float32": weight.double()},
    )
    cube = torch.ones(2, 2, 8)
    refuses(
        kernels.bias_dropout_add,
        (cube, None, cube, torch.ones(2, 2, 8)),
        {"p: expected a probability": 1.0, "x: expected 3 dimensions": x},
    )
    refuses(
        kernels.bias_dropout_add_backward,
        (cube,),
        {"dx: expected a tensor, since p is not 0": {"dx": None, "dbias": None, "p": 0.5}},
    )
