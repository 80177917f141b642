"""Attention for one new token over cached keys and values, against the formula in double precision.

Shapes: qkv (rows, (heads + 2 groups) d), keys and values (samples, groups, slots, d), out (rows, heads d).
"""

import math

import pytest
import torch

from fugaku_megatron.host import kernels
from tests.checks.attention import TOLERANCE
from tests.kernels.numbers import assert_equal, for_each, refuses

pytestmark = pytest.mark.kernels

# (heads, groups, d, slots): tails of vectors, one and several splits of 128 slots, one key for all and one for each
SHAPES = [
    (4, 2, 64, 300),
    (3, 3, 20, 5),
    (8, 1, 128, 129),
    (7, 1, 80, 256),
    (2, 2, 4, 1),
    (6, 3, 96, 140),
    (2, 1, 256, 17),
]
SAMPLES = [3, 0, 4]  # of five
POSITIONS = [0, 11, 10_000]  # an empty cache, one partly filled, one that has gone round


def make(heads, groups, d, slots, dtype=torch.float32, rows=3):
    generator = torch.Generator().manual_seed(heads + slots)
    sizes = ((rows, (heads + 2 * groups) * d), (5, groups, slots, d), (5, groups, slots, d))
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def decode(qkv, keys, values, samples=SAMPLES, positions=POSITIONS):
    """Return the kernel's (out, keys, values), out full of NaN before."""
    keys = keys.clone()
    values = values.clone()
    out = qkv.new_full((len(qkv), qkv.shape[1] - 2 * keys.shape[1] * keys.shape[3]), math.nan)
    places = (torch.tensor(numbers, dtype=torch.int64) for numbers in (samples, positions))
    kernels.attention_decode(qkv, keys, values, *places, out)
    return out, keys, values


def explicit(qkv, keys, values):
    """Return the same row by row and head by head."""
    keys = keys.clone()
    values = values.clone()
    _, groups, slots, d = keys.shape
    rows = qkv.view(len(qkv), groups, -1, d)
    out = []
    for row, sample, position in zip(rows, SAMPLES, POSITIONS, strict=True):
        keys[sample, :, position % slots] = row[:, -2]
        values[sample, :, position % slots] = row[:, -1]
        known = min(position + 1, slots)
        k = keys[sample, :, :known].double()
        v = values[sample, :, :known].double()
        out.append(torch.softmax(row[:, :-2].double() @ k.transpose(1, 2) / math.sqrt(d), -1) @ v)
    return torch.stack(out).flatten(1), keys, values


def assert_explicit(tensors, tolerance):
    got = decode(*tensors)
    want = explicit(*tensors)
    assert (got[0].double() - want[0]).abs().max() <= tolerance * max(1.0, want[0].abs().max())
    assert_equal(got[1:], want[1:])


@for_each(dtype=TOLERANCE, shape=SHAPES)
def test_decoding_agrees_with_formula(every_target, dtype, shape):
    assert_explicit(make(*shape, dtype), TOLERANCE[dtype])


def test_no_rows(every_target):
    assert decode(*make(4, 2, 8, 9, rows=0), [], [])[0].shape == (0, 32)


@for_each(dtype=[torch.float32, torch.bfloat16])
def test_same_bits_for_any_threads_and_rows(target, same_for_any_threads, dtype):
    qkv, keys, values = make(6, 2, 64, 700, dtype)
    out = same_for_any_threads(lambda: decode(qkv, keys, values))[0]
    for row in range(3):
        own = slice(row, row + 1)
        alone = decode(qkv[own], keys, values, SAMPLES[own], POSITIONS[own])[0]
        assert torch.equal(alone, out[own])


def test_slots_that_hold_nothing_yet_are_not_read(target):
    qkv, keys, values = make(4, 2, 64, 200)
    keys[0, :, 12:] = math.nan
    values[0, :, 12:] = math.inf
    keys[3] = math.nan
    values[3] = math.nan
    out = decode(qkv, keys, values)[0]
    assert torch.isfinite(out).all()
    new_values = qkv[0].view(2, 4, 64)[:, 3:].expand(2, 2, 64).flatten()
    torch.testing.assert_close(out[0], new_values, rtol=2e-6, atol=2e-6)


def test_large_scores_do_not_overflow(target):
    qkv, keys, values = make(4, 2, 64, 300)
    assert_explicit((qkv * 40, keys * 40, values), 1e-3)


def test_bad_arguments_are_value_errors_before_a_byte_is_written():
    qkv, keys, values = make(4, 2, 8, 9)
    samples = torch.tensor(SAMPLES)
    positions = torch.tensor(POSITIONS)
    refuses(
        kernels.attention_decode,
        (qkv, keys, values, samples, positions, torch.full((3, 32), 7.0)),
        {
            "qkv: expected .* 2 groups .* got 50 columns": qkv[:, :50].contiguous(),
            "qkv: .*dtype": qkv.double(),
            "keys: .*d a multiple of 4": keys[:, :, :, :6].contiguous(),
            "values: .*shape": values[:4],
            "values: .*apart from keys": keys,
            "samples: .*below 5, got 5": torch.tensor([0, 1, 5]),
            "samples: .*got -1": torch.tensor([0, -1, 3]),
            "samples: .*dtype": samples.int(),
            "positions: .*0 or more, got -1": torch.tensor([0, -1, 3]),
            "positions: .*shape": positions[:2],
            "out: .*shape": torch.full((3, 28), 7.0),
        },
    )
