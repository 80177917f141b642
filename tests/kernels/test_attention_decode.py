"""Attention for one new token over cached keys and values, against the formula in double precision.

Shapes: qkv (rows, heads key_size + groups (key_size + d)), keys (samples, groups, slots, key_size), values (.., d), out
(rows, heads d). Shared values are the beginnings of keys, and qkv has none.
"""

import math

import pytest
import torch

from fugaku_megatron.host import kernels
from tests.checks.attention import TOLERANCE
from tests.kernels.numbers import assert_equal, for_each, refuses

pytestmark = pytest.mark.kernels

# (heads, groups, d, slots, key_size): tails of vectors, one and several splits of 128 slots, one key for all and one for each
SHAPES = [
    (4, 2, 64, 300, 64),
    (3, 3, 20, 5, 20),
    (8, 1, 128, 129, 128),
    (7, 1, 80, 256, 80),
    (2, 2, 4, 1, 4),
    (6, 3, 96, 140, 96),
    (2, 1, 256, 17, 256),
    (3, 3, 128, 140, 192),
    (9, 1, 12, 40, 148),
    (4, 2, 36, 131, 20),
]
# The same with shared values: DeepSeek's, tails of vectors and of heads, and tasks of several blocks
SHARED = [
    (16, 1, 512, 260, 576),
    (7, 1, 100, 19, 108),
    (4, 2, 12, 130, 28),
    (1, 1, 64, 5, 68),
    (10, 2, 8, 6500, 20),
]
SAMPLES = [3, 0, 4]  # of five
POSITIONS = [0, 11, 10_000]  # an empty cache, one partly filled, one that has gone round


def make(heads, groups, d, slots, key_size=None, dtype=torch.float32, shared=False):
    generator = torch.Generator().manual_seed(heads + slots)
    key_size = key_size or d
    new = key_size if shared else key_size + d
    sizes = ((3, heads * key_size + groups * new), (5, groups, slots, key_size))
    qkv, keys = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    if shared:
        return qkv, keys, keys[..., :d]
    return qkv, keys, torch.randn(5, groups, slots, d, generator=generator).to(dtype)


def copies(keys, values):
    """Clone a cache, whose values stay the beginnings of keys if they are."""
    own = keys.clone()
    shared = values.data_ptr() == keys.data_ptr()
    return own, own[..., : values.shape[-1]] if shared else values.clone()


def decode(qkv, keys, values, samples=SAMPLES, positions=POSITIONS, scale=None):
    """Return the kernel's (out, keys, values), out full of NaN before."""
    values_are_keys = values.data_ptr() == keys.data_ptr()
    new = keys.shape[3] + (0 if values_are_keys else values.shape[3])
    heads = (qkv.shape[1] - keys.shape[1] * new) // keys.shape[3]
    keys, values = copies(keys, values)
    out = qkv.new_full((len(qkv), heads * values.shape[3]), math.nan)
    places = (torch.tensor(numbers, dtype=torch.int64) for numbers in (samples, positions))
    kernels.attention_decode(qkv, keys, values, *places, out, scale)
    return out, keys, values


def explicit(qkv, keys, values, scale=None):
    """Return the same row by row and head by head."""
    keys, values = copies(keys, values)
    _, groups, slots, key_size = keys.shape
    d = values.shape[3]
    out = []
    for row, sample, position in zip(qkv, SAMPLES, POSITIONS, strict=True):
        slot = position % slots
        new = row.view(groups, -1)
        if values.data_ptr() != keys.data_ptr():
            values[sample, :, slot] = new[:, -d:]
            new = new[:, :-d]
        keys[sample, :, slot] = new[:, -key_size:]
        queries = new[:, :-key_size].double().unflatten(1, (-1, key_size))
        known = min(position + 1, slots)
        k = keys[sample, :, :known].double()
        v = values[sample, :, :known].double()
        scores = queries @ k.transpose(1, 2) * (scale or key_size**-0.5)
        out.append(torch.softmax(scores, -1) @ v)
    return torch.stack(out).flatten(1), keys, values


def assert_explicit(tensors, tolerance, scale=None):
    got = decode(*tensors, scale=scale)
    want = explicit(*tensors, scale)
    assert (got[0].double() - want[0]).abs().max() <= tolerance * max(1.0, want[0].abs().max())
    assert_equal(got[1:], want[1:])


@for_each(dtype=TOLERANCE, shape=SHAPES)
def test_decoding_agrees_with_formula(every_target, dtype, shape):
    assert_explicit(make(*shape, dtype), TOLERANCE[dtype])


@for_each(dtype=TOLERANCE, shape=SHARED)
def test_values_that_are_the_beginnings_of_keys(every_target, dtype, shape):
    assert_explicit(make(*shape, dtype, shared=True), TOLERANCE[dtype], scale=0.07)


def test_no_rows(every_target):
    qkv, keys, values = make(4, 2, 8, 9)
    assert decode(qkv[:0], keys, values, [], [])[0].shape == (0, 32)


@for_each(dtype=[torch.float32, torch.bfloat16], heads=[(6, 2, 64, 700, 80), (9, 1, 64, 6500, 80)])
def test_same_bits_for_any_threads_and_rows(target, same_for_any_threads, dtype, heads):
    qkv, keys, values = make(*heads, dtype, shared=heads[1] == 1)
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


@for_each(dtype=[torch.float32, torch.bfloat16])
def test_latents_that_hold_nothing_yet_are_not_read(target, dtype):
    qkv, keys, values = make(6, 1, 64, 200, 80, dtype, shared=True)
    keys[0, :, 12:] = math.nan
    keys[3] = math.nan
    out = decode(qkv, keys, values)[0]
    assert torch.isfinite(out).all()
    torch.testing.assert_close(
        out[0].view(6, 64), qkv[0].view(7, 80)[6:, :64].expand(6, 64), rtol=2e-6, atol=2e-6
    )


@for_each(shared=[False, True])
def test_large_scores_do_not_overflow(target, shared):
    qkv, keys, values = make(8, 2, 64, 300, 80, shared=shared)
    keys *= 40  # and values with these, if they are shared
    assert_explicit((qkv * 40, keys, values), 1e-3)


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
            "keys: .*key_size a multiple of 4": keys[:, :, :, :6].contiguous(),
            "values: .*value_size a multiple of 4, got value_size 6": values[..., :6].contiguous(),
            "values: expected the strides of keys": keys.flatten()[: 5 * 2 * 9 * 4].view(
                5, 2, 9, 4
            ),
            "scale: .*above 0": -1.0,
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
