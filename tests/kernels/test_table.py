"""The table of kernels (kernels_sve/kernels.inc): every row is bound and has its costs.

tests/arm/test_driver.py tests that kernel_driver knows every row.
"""

import math
import re

import pytest
import torch

from fugaku_megatron.costs.attention import ATTENTION_BACKWARD_SHARE, causal_attention_flops
from fugaku_megatron.host import kernel_costs, kernels
from tests.kernels.numbers import assert_refused

pytestmark = pytest.mark.kernels

ROWS = {row["name"]: row for row in kernels.table.rows()}
WORDS = (
    "tokens",
    "labels",
    "counter",
    "samples",
    "positions",
    "counts",
    "chosen",
    "pairs",
    "places",
)  # of int64
PRIMES = [3, 5, 7, 11, 13, 17, 19, 23, 29]


def test_every_row_is_bound():
    assert [name for name in ROWS if not callable(getattr(kernels, name, None))] == []


# Costs ---------------------------------------------------------------------------------------------------------------------------


def operands(row):
    """[(name, dimensions or None)] of a row."""
    pairs = re.findall(r"(\w+)(?: \(([^)]*)\))?(?:, |$)", row["operands"])
    return [(name, dims.split(",") if dims else None) for name, dims in pairs]


def signature(name):
    """Argument names of a bound function."""
    return re.findall(r"(\w+): ", getattr(kernels, name).__doc__.splitlines()[0])


def test_operands_are_the_leading_arguments():
    for name, row in ROWS.items():
        names = [operand for operand, _ in operands(row)]
        assert signature(name)[: len(names)] == names


def size_of(dimension, sizes):
    """A dimension's factors multiplied, of which heads+2groups is one."""
    factors = [
        re.sub(r"(\d)([a-z])", r"\1*\2", factor) for factor in dimension.replace("..", "").split()
    ]
    return math.prod(eval(factor, {"_": 9}, sizes) for factor in factors)


def example(row, sizes, dtype):
    """Return the arguments of a call of these sizes; the operands in WORDS are int64."""
    arguments = []
    for name, dims in operands(row):
        if dims is None:
            arguments.append(sizes.get(name, 0))
        else:
            whole = torch.int64 if name in WORDS else dtype
            arguments.append(torch.empty([size_of(dim, sizes) for dim in dims], dtype=whole))
    return arguments


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if "(" in row["operands"]])
def test_a_calls_sizes_and_costs_follow_from_its_shapes(name, dtype):
    row = ROWS[name]
    sizes = dict(zip(row["sizes"], PRIMES, strict=False))
    if "key_size" in sizes:
        sizes["cols"] = 997  # more than those of the queries
    arguments = example(row, sizes, dtype)
    seen = kernel_costs.sizes(name, *arguments)
    assert {symbol: seen[symbol] for symbol in sizes} == sizes
    flops, moved = kernels.table.cost(
        name, **sizes, e=seen["e"], e_out=seen["e_out"], e_avg=seen["e"], e_sq=seen["e"]
    )
    assert (kernel_costs.flops(name, *arguments), kernel_costs.moved_bytes(name, *arguments)) == (
        flops,
        moved,
    )
    assert moved > 0 and flops == eval(row["flops"], {}, sizes)
    by_name = dict(zip(signature(name), arguments, strict=False))
    assert kernel_costs.moved_bytes(name, **by_name) == moved


def test_operands_that_are_not_given_cost_nothing():
    x = torch.empty(4, 2, 8)
    sums = torch.empty(8)
    n = torch.empty(16)
    both, no_dx = (
        kernel_costs.moved_bytes("bias_dropout_add_backward", x, dx, sums)
        for dx in (torch.empty_like(x), None)
    )
    assert both - no_dx == x.nbytes
    plain = kernel_costs.moved_bytes("adamw", n, n, n, n, 1e-3, 0.9, 0.99, 1e-8, 0.0, 1)
    copied = kernel_costs.moved_bytes(
        "adamw", n, n, n, n, 1e-3, 0.9, 0.99, 1e-8, 0.0, 1, copy=n.bfloat16()
    )
    half = kernel_costs.moved_bytes(
        "adamw", n, n, n.bfloat16(), n.bfloat16(), 1e-3, 0.9, 0.99, 1e-8, 0.0, 1
    )
    assert (plain, copied, half) == (28 * 16, 30 * 16, 20 * 16)


@pytest.mark.parametrize(
    "b, heads, groups, s, d, window",
    [(1, 12, 12, 1024, 64, None), (3, 14, 2, 2048, 128, 300), (1, 4, 1, 128, 64, 4096)],
)
def test_attention_is_counted_as_costs_count_it(b, heads, groups, s, d, window):
    """The count by hand: pairs of a query and a key, those on the diagonal half."""
    qkv = torch.empty(s, b, (heads + 2 * groups) * d)
    out = torch.empty(s, b, heads * d)
    lse = torch.empty(b, heads, s)
    distance = torch.arange(s).unsqueeze(1) - torch.arange(s)
    seen = (distance >= 0) & (distance <= (window or s))
    edges = (distance == 0).sum() + (distance == (window or s)).sum()
    forward = causal_attention_flops(b * heads, s, d, window)
    assert forward == 4 * b * heads * d * (seen.sum() - edges / 2)
    assert kernel_costs.flops("attention_forward", qkv, out, lse, window=window) == forward
    backward = kernel_costs.flops("attention_backward", qkv, out, lse, out, qkv, window=window)
    assert backward == ATTENTION_BACKWARD_SHARE * forward


def test_wrong_shapes_and_sizes_are_value_errors():
    assert kernel_costs.flops("set_num_threads", 3) == kernel_costs.moved_bytes("active") == 0, (
        "what is not a kernel costs nothing"
    )
    assert_refused(
        [
            (lambda: kernel_costs.sizes("active"), "no kernel of the table is called active"),
            (lambda: kernels.table.cost("active"), "no kernel of the table is called active"),
            (
                lambda: kernel_costs.flops(
                    "linear_forward", torch.empty(4, 6), torch.empty(5, 7), torch.empty(4, 5)
                ),
                r"linear_forward: expected shapes x \(m, k\), weight \(n, k\), out \(m, n\), got a dimension of 7 instead of 6",
            ),
            (
                lambda: kernel_costs.flops("linear_forward", torch.empty(4), torch.empty(5, 6)),
                "got x with 1 dimensions",
            ),
            (
                lambda: kernel_costs.flops("linear_forward", torch.empty(4, 6)),
                "got none that tells n",
            ),
            (lambda: kernels.table.cost("activate", rows=3), "sizes: expected cols, got none"),
            (
                lambda: kernels.table.cost("activate", rows=3, cols=4, depth=3),
                "sizes: expected symbols of kernels.inc, got depth",
            ),
        ]
    )
