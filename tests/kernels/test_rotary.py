"""Rotary position embedding and the norm of queries and keys on every target this CPU runs, against double precision.

Legend: s sequence, b micro-batch, d head size, half = pairs of columns that are turned, queries = of a group, which are followed by
its key and its value.
"""

from dataclasses import dataclass

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

EPSILON = 1e-3


@dataclass(frozen=True)
class Shape:
    s: int
    b: int
    groups: int
    queries: int
    d: int
    half: int

    def x(self, dtype=torch.float32, seed=0):
        return random(
            self.s, self.b, self.groups * (self.queries + 2), self.d, dtype=dtype, seed=seed
        )

    def angles(self):
        angles = random(self.s, self.half, seed=5) * 3
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


def turned(head, cos, sin, interleaved):
    """head (..., d) with its pairs turned: complex numbers times exp(i angle)."""
    half = cos.shape[-1]
    pairs = head[..., : 2 * half]
    rest = head[..., 2 * half :]
    pairs = pairs.unflatten(-1, (half, 2) if interleaved else (2, half))
    first, second = pairs.unbind(-1 if interleaved else -2)
    turn = torch.complex(first, second) * torch.complex(cos, sin)
    together = torch.stack([turn.real, turn.imag], -1 if interleaved else -2).flatten(-2)
    return torch.cat([together, rest], -1)


def exact(x, cos, sin, queries, interleaved, weights=None):
    """In double, by groups. x (s, b, heads, d), cos and sin (s, half)."""
    cos, sin = (t.double()[:, None, None, None] for t in (cos, sin))
    parts = x.unflatten(2, (-1, queries + 2)).split([queries, 1, 1], 3)
    done = []
    for part, weight in zip(parts[:2], weights or (None, None), strict=True):
        if weight is not None:
            part = part * (part.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * weight
        done.append(turned(part, cos, sin, interleaved))
    return torch.cat([*done, parts[2]], 3).flatten(2, 3)


@for_each(interleaved=[False, True], shape=SHAPES, dtype=DTYPES)
def test_rotary_and_its_inverse(every_target, shape, interleaved, dtype, guarded):
    x = shape.x(dtype)
    cos, sin = shape.angles()
    y = guarded(x.shape, dtype)
    kernels.rotary(x, cos, sin, y, shape.queries, interleaved)
    assert_near(y, exact(x.double(), cos, sin, shape.queries, interleaved), dtype, float32=4e-6)
    kernels.rotary(y, cos, sin, y, shape.queries, interleaved, inverse=True)
    assert_near(y, x, dtype, float32=4e-6)


@for_each(interleaved=[False, True], shape=SHAPES, dtype=DTYPES)
def test_rotary_norm_and_its_gradient(every_target, shape, interleaved, dtype, guarded):
    x = shape.x(dtype)
    cos, sin = shape.angles()
    dy = shape.x(dtype, seed=3)
    weights = [random(shape.d, dtype=dtype, seed=i) for i in (1, 2)]
    y = guarded(x.shape, dtype)
    dx = guarded(x.shape, dtype)
    sums = [torch.ones(shape.d), torch.full((shape.d,), 2.0)]
    kernels.rotary_norm(x, *weights, cos, sin, y, shape.queries, EPSILON, interleaved)
    kernels.rotary_norm_backward(
        dy, x, *weights, cos, sin, dx, *sums, shape.queries, EPSILON, interleaved
    )
    leaves = [t.double().requires_grad_() for t in (x, *weights)]
    want = exact(leaves[0], cos, sin, shape.queries, interleaved, leaves[1:])
    want.backward(dy.double())
    assert_near(y, want.detach(), dtype, float32=4e-6)
    assert_near(dx, leaves[0].grad, dtype, float32=4e-6)
    for got, leaf, begun in zip(sums, leaves[1:], (1, 2), strict=True):
        assert_near(got, leaf.grad + begun, torch.float32, float32=4e-6)


@for_each(interleaved=[False, True], shape=SHAPES[1:], dtype=DTYPES)
def test_positions_choose_the_angles_of_each_token(
    every_target, shape, interleaved, dtype, guarded
):
    """As if each sample were alone, with the rows of the table that its positions name."""
    table = [random(shape.s + 4, shape.half, seed=5 + i) for i in (0, 1)]
    rows = torch.randint(
        shape.s + 4,
        (shape.s, shape.b),
        dtype=torch.int32,
        generator=torch.Generator().manual_seed(7),
    )
    x = shape.x(dtype)
    dy = shape.x(dtype, seed=3)
    weights = [random(shape.d, dtype=dtype, seed=i) for i in (1, 2)]
    y, normed, dx = (guarded(x.shape, dtype) for _ in range(3))
    sums = [torch.zeros(shape.d) for _ in range(2)]
    kernels.rotary(x, *table, y, shape.queries, interleaved, positions=rows)
    kernels.rotary_norm(
        x, *weights, *table, normed, shape.queries, EPSILON, interleaved, positions=rows
    )
    kernels.rotary_norm_backward(
        dy, x, *weights, *table, dx, *sums, shape.queries, EPSILON, interleaved, positions=rows
    )
    wanted = [torch.zeros(shape.d) for _ in range(2)]
    for b in range(shape.b):
        own = slice(b, b + 1)
        turns = [angle[rows[:, b].long()] for angle in table]
        alone = [torch.empty_like(x[:, own]) for _ in range(3)]
        part = x[:, own].contiguous()
        gradient = dy[:, own].contiguous()
        kernels.rotary(part, *turns, alone[0], shape.queries, interleaved)
        kernels.rotary_norm(part, *weights, *turns, alone[1], shape.queries, EPSILON, interleaved)
        kernels.rotary_norm_backward(
            gradient, part, *weights, *turns, alone[2], *wanted, shape.queries, EPSILON, interleaved
        )
        assert all(
            torch.equal(all_of[:, own], one)
            for all_of, one in zip((y, normed, dx), alone, strict=True)
        )
    for got, want in zip(sums, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@for_each(interleaved=[False, True])
def test_rotary_is_undone_by_its_gradient(every_target, interleaved):
    """A turn keeps lengths, so <dy, R x> = <R^-1 dy, x> holds for the kernel's own results."""
    x = SMALL.x()
    dy = SMALL.x(seed=3)
    cos, sin = SMALL.angles()
    y = torch.empty_like(x)
    dx = torch.empty_like(x)
    kernels.rotary(x, cos, sin, y, SMALL.queries, interleaved)
    kernels.rotary(dy, cos, sin, dx, SMALL.queries, interleaved, inverse=True)
    torch.testing.assert_close(
        (y.double() * dy).sum(), (x.double() * dx).sum(), rtol=1e-5, atol=1e-5
    )
    assert (y - x).abs().max() > 0.1


@for_each(interleaved=[False, True])
def test_rotary_norm_backward_is_the_slope(every_target, interleaved):
    """Gradients are the slope of the kernel's own forward, through x and both weights."""
    x = SMALL.x()
    dy = SMALL.x(seed=3)
    cos, sin = SMALL.angles()
    leaves = [x, *(random(SMALL.d, seed=i) for i in (1, 2))]
    grads = [torch.empty_like(x), torch.zeros(SMALL.d), torch.zeros(SMALL.d)]
    kernels.rotary_norm_backward(dy, *leaves, cos, sin, *grads, SMALL.queries, EPSILON, interleaved)

    def value():
        y = torch.empty_like(x)
        kernels.rotary_norm(*leaves, cos, sin, y, SMALL.queries, EPSILON, interleaved)
        return (y.double() * dy.double()).sum()

    assert_slope(value, leaves, grads)


@for_each(interleaved=[False, True])
def test_in_place_and_for_any_number_of_threads(every_target, interleaved, same_for_any_threads):
    shape = Shape(101, 2, 2, 2, 24, 8)
    x = shape.x()
    dy = shape.x(seed=3)
    cos, sin = shape.angles()
    weights = random(shape.d, seed=1), random(shape.d, seed=2)
    arguments = shape.queries, EPSILON, interleaved

    def in_place():
        plain = x.clone()
        normed = x.clone()
        dx = dy.clone()
        dq = torch.zeros(shape.d)
        dk = torch.zeros(shape.d)
        kernels.rotary(plain, cos, sin, plain, shape.queries, interleaved)
        kernels.rotary_norm(normed, *weights, cos, sin, normed, *arguments)
        kernels.rotary_norm_backward(dx, x, *weights, cos, sin, dx, dq, dk, *arguments)
        return plain, normed, dx, dq, dk

    plain, normed, dx, dq, dk = same_for_any_threads(in_place)
    apart = [torch.empty_like(x) for _ in range(3)]
    kernels.rotary(x, cos, sin, apart[0], shape.queries, interleaved)
    kernels.rotary_norm(x, *weights, cos, sin, apart[1], *arguments)
    kernels.rotary_norm_backward(dy, x, *weights, cos, sin, apart[2], dq, dk, *arguments)
    assert all(torch.equal(a, b) for a, b in zip((plain, normed, dx), apart, strict=True))


def test_nan_travels_within_its_head(every_target):
    x = SMALL.x()
    cos, sin = SMALL.angles()
    x[1, 2, 0, 5] = float("nan")
    x[2, 0, SMALL.queries + 1, 3] = float("inf")  # a value
    weight = torch.ones(SMALL.d)
    y = torch.empty_like(x)
    kernels.rotary_norm(x, weight, weight, cos, sin, y, SMALL.queries, EPSILON)
    assert y[1, 2, 0].isnan().all() and y.isnan().sum() == SMALL.d
    assert torch.equal(y[:, :, SMALL.queries + 1], x[:, :, SMALL.queries + 1])


def test_wrong_arguments_leave_everything_untouched():
    x = torch.ones(3, 2, 6, 8)
    y = torch.ones(3, 2, 6, 8)
    c = torch.ones(3, 4)
    w = torch.ones(8)
    assert_refused(
        [
            (
                lambda: kernels.rotary(x, c, c, y, 2),
                "queries: expected groups of queries . 2 heads that make up x's 6, got 2",
            ),
            (
                lambda: kernels.rotary(x, torch.ones(3, 5), torch.ones(3, 5), y, 1),
                "cos: expected at most half of 8 columns, got 5",
            ),
            (
                lambda: kernels.rotary(x, c, c[:2], y, 1),
                r"sin: expected shape \(3, 4\), got \(2, 4\)",
            ),
            (
                lambda: kernels.rotary(x, c.double(), c, y, 1),
                "cos: expected dtype float32, got float64",
            ),
            (
                lambda: kernels.rotary(
                    x, c, c, y, 1, positions=torch.full((3, 2), 3, dtype=torch.int32)
                ),
                "positions: expected numbers below 3, got 3",
            ),
            (
                lambda: kernels.rotary(x, c, c, y, 1, positions=torch.zeros(3, 2)),
                "positions: expected dtype int32, got float32",
            ),
            (
                lambda: kernels.rotary_norm(x, w[:4], w, c, c, y, 1, EPSILON),
                r"q_weight: expected shape \(8,\), got \(4,\)",
            ),
            (lambda: kernels.rotary_norm(x, w, w, c, c, y, 1, -1.0), "eps: expected 0 or more"),
            (
                lambda: kernels.rotary_norm_backward(x, x, w, w, c, c, y, w.clone(), w, 1, 0.1),
                "dk_weight: expected memory apart from q_weight",
            ),
            (
                lambda: kernels.rotary_norm_backward(
                    y, x, w, w, c, c, x, w.clone(), w.clone(), 1, 0.1
                ),
                "dx: expected memory apart from x",
            ),
        ],
        untouched=(x, y, c, w),
    )
