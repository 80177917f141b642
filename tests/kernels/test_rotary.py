"""Rotary position embedding with norms for queries and keys on every target, against double precision.

Legend: s sequence, b micro-batch, d head size, half = rotated column pairs, queries = a group's, before its key and value.
"""

from typing import NamedTuple

import pytest
import torch
from torch.testing import assert_close

from fugaku_megatron.host import kernels
from tests.kernels.numbers import (
    DTYPES,
    assert_equal,
    assert_near,
    for_each,
    random,
    randoms,
    refuses,
    with_gradients,
)

pytestmark = pytest.mark.kernels

EPSILON = 1e-3


class Shape(NamedTuple):
    s: int
    b: int
    groups: int
    queries: int
    d: int
    half: int

    def inputs(self, dtype=torch.float32):
        """Return x, its output gradient, and two weights."""
        x = (self.s, self.b, self.groups * (self.queries + 2), self.d)
        return randoms(x, x, self.d, self.d, dtype=dtype)

    def angles(self, seed=5):
        angles = random(self.s, self.half, seed=seed) * 3
        return angles.cos(), angles.sin()


SHAPES = [
    Shape(0, 2, 1, 1, 8, 4),
    Shape(3, 1, 1, 1, 1, 0),
    Shape(3, 2, 2, 1, 2, 1),
    Shape(5, 2, 1, 4, 32, 16),
    Shape(4, 3, 3, 2, 67, 17),
    Shape(2, 1, 2, 3, 64, 8),
    Shape(3, 2, 1, 2, 128, 64),
]
SMALL = SHAPES[4]


class Turn(NamedTuple):
    """The kernels' angles and layout."""

    angles: tuple
    queries: int
    interleaved: bool
    positions: torch.Tensor | None = None

    def plain(self, x, y=None, inverse=False):
        """Rotate x into y or into a new tensor."""
        y = torch.empty_like(x) if y is None else y
        options = {"positions": self.positions, "inverse": inverse}
        kernels.rotary(x, *self.angles, y, self.queries, self.interleaved, **options)
        return y

    def normed(self, x, weights, y=None):
        y = torch.empty_like(x) if y is None else y
        end = (self.queries, EPSILON, self.interleaved, self.positions)
        kernels.rotary_norm(x, *weights, *self.angles, y, *end)
        return y

    def gradients(self, dy, x, weights, dx=None):
        """Return dx, and both weights' gradients, added to ones."""
        dx = torch.empty_like(x) if dx is None else dx
        sums = [torch.ones(x.shape[-1]) for _ in weights]
        end = (self.queries, EPSILON, self.interleaved, self.positions)
        kernels.rotary_norm_backward(dy, x, *weights, *self.angles, dx, *sums, *end)
        return dx, *sums

    def exact(self, x, *weights):
        """Return the result in double: complex column pairs times exp(i angle)."""
        cos, sin = (angle.double()[:, None, None, None] for angle in self.angles)
        dim = -1 if self.interleaved else -2
        half = cos.shape[-1]
        *turned, values = x.unflatten(2, (-1, self.queries + 2)).split([self.queries, 1, 1], 3)
        done = []
        for heads, weight in zip(turned, weights or (None, None), strict=True):
            if weight is not None:
                heads = heads * (heads.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * weight
            pairs, rest = heads.tensor_split([2 * half], -1)
            pairs = pairs.unflatten(-1, (half, 2) if self.interleaved else (2, half))
            product = torch.complex(*pairs.unbind(dim)) * torch.complex(cos, sin)
            pairs = torch.stack([product.real, product.imag], dim).flatten(-2)
            done.append(torch.cat([pairs, rest], -1))
        return torch.cat([*done, values], 3).flatten(2, 3)


@for_each(interleaved=[False, True], shape=SHAPES, dtype=DTYPES)
def test_rotary_and_its_inverse(every_target, shape, interleaved, dtype, guarded):
    x, *_ = shape.inputs(dtype)
    turn = Turn(shape.angles(), shape.queries, interleaved)
    y = turn.plain(x, guarded(x.shape, dtype))
    assert_near(y, turn.exact(x.double()), dtype, float32=4e-6)
    assert_near(turn.plain(y, y, inverse=True), x, dtype, float32=4e-6)


@for_each(interleaved=[False, True], shape=SHAPES, dtype=DTYPES)
def test_rotary_norm_and_its_gradient(every_target, shape, interleaved, dtype, guarded):
    x, dy, *weights = shape.inputs(dtype)
    turn = Turn(shape.angles(), shape.queries, interleaved)
    y = turn.normed(x, weights, guarded(x.shape, dtype))
    dx, *sums = turn.gradients(dy, x, weights, guarded(x.shape, dtype))
    want, gradient, *weight_gradients = with_gradients(turn.exact, [x, *weights], dy)
    assert_near(y, want, dtype, float32=4e-6)
    assert_near(dx, gradient, dtype, float32=4e-6)
    for got, gradient in zip(sums, weight_gradients, strict=True):
        assert_near(got, gradient + 1, torch.float32, float32=4e-6)


@for_each(interleaved=[False, True], shape=SHAPES[1:], dtype=DTYPES)
def test_positions_choose_the_angles_of_each_token(every_target, shape, interleaved, dtype):
    """As if each sample were alone, with the table rows that its positions name."""
    table = shape._replace(s=shape.s + 4).angles()
    generator = torch.Generator().manual_seed(7)
    rows = torch.randint(shape.s + 4, (shape.s, shape.b), generator=generator)
    x, dy, *weights = shape.inputs(dtype)
    turn = Turn(table, shape.queries, interleaved, rows.int())
    dx, *sums = turn.gradients(dy, x, weights)
    got = turn.plain(x), turn.normed(x, weights), dx
    wanted = [torch.ones(shape.d) for _ in weights]
    for b in range(shape.b):
        alone = Turn([angle[rows[:, b]] for angle in table], shape.queries, interleaved)
        own, own_dy = (t[:, b : b + 1].contiguous() for t in (x, dy))
        dx, *own_sums = alone.gradients(own_dy, own, weights)
        want = alone.plain(own), alone.normed(own, weights), dx
        assert_equal([t[:, b : b + 1] for t in got], want)
        for total, part in zip(wanted, own_sums, strict=True):
            total += part - 1
    assert_close(sums, wanted, rtol=1e-5, atol=1e-5)


@for_each(interleaved=[False, True])
def test_in_place_and_for_any_number_of_threads(every_target, interleaved, same_for_any_threads):
    shape = Shape(101, 2, 2, 2, 24, 8)
    x, dy, *weights = shape.inputs()
    turn = Turn(shape.angles(), shape.queries, interleaved)

    def in_place():
        results = [x.clone(), x.clone(), dy.clone()]
        turn.plain(results[0], results[0])
        turn.normed(results[1], weights, results[1])
        return *results[:2], *turn.gradients(results[2], x, weights, results[2])

    apart = turn.plain(x), turn.normed(x, weights), *turn.gradients(dy, x, weights)
    assert_equal(same_for_any_threads(in_place), apart)


def test_nan_travels_within_its_head(every_target):
    x, *_ = SMALL.inputs()
    value = SMALL.queries + 1
    x[1, 2, 0, 5] = float("nan")
    x[2, 0, value, 3] = float("inf")
    weight = torch.ones(SMALL.d)
    y = Turn(SMALL.angles(), SMALL.queries, False).normed(x, [weight, weight])
    assert y[1, 2, 0].isnan().all() and y.isnan().sum() == SMALL.d
    assert torch.equal(y[:, :, value], x[:, :, value])


def test_wrong_arguments_leave_everything_untouched():
    x, y = torch.ones(2, 3, 2, 6, 8)
    angles = torch.ones(3, 4)
    weight = torch.ones(8)
    sums = torch.ones(2, 8)
    long = torch.ones(3, 5)
    refuses(
        kernels.rotary,
        (x, angles, angles, y, 1),
        {
            "queries: expected groups of queries . 2 heads that make up x's 6, got 2": 2,
            "cos: expected at most half of 8 columns, got 5": {"cos": long, "sin": long},
            r"sin: expected shape \(3, 4\), got \(2, 4\)": angles[:2],
            "cos: expected dtype float32, got float64": angles.double(),
            "positions: expected numbers below 3, got 3": torch.full((3, 2), 3).int(),
            "positions: expected dtype int32, got float32": torch.zeros(3, 2),
        },
    )
    refuses(
        kernels.rotary_norm,
        (x, weight, weight, angles, angles, y, 1, EPSILON),
        {
            r"q_weight: expected shape \(8,\), got \(4,\)": weight[:4],
            "eps: expected 0 or more": -1.0,
        },
    )
    refuses(
        kernels.rotary_norm_backward,
        (y, x, weight, weight, angles, angles, torch.ones(x.shape), *sums, 1, EPSILON),
        {
            "dk_weight: expected memory apart from q_weight": weight,
            "dx: expected memory apart from x": x,
        },
    )
