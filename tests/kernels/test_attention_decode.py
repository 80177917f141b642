"""Attention of one new token against kept keys and values, against the textbook's formula in double precision.

Shapes: qkv (rows, (heads + 2 groups) d), keys and values (samples, groups, slots, d), out (rows, heads d).
"""

import math

import pytest
import torch

from fugaku_megatron.host import kernels

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
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
    """(out, keys, values) of the kernel, out full of NaN before."""
    keys = keys.clone()
    values = values.clone()
    out = qkv.new_full((len(qkv), qkv.shape[1] - 2 * keys.shape[1] * keys.shape[3]), math.nan)
    kernels.attention_decode(
        qkv, keys, values, *(torch.tensor(n, dtype=torch.int64) for n in (samples, positions)), out
    )
    return out, keys, values


def explicit(qkv, keys, values, samples=SAMPLES, positions=POSITIONS):
    """The same row by row and head by head."""
    keys = keys.clone()
    values = values.clone()
    _, groups, slots, d = keys.shape
    out = []
    for row, sample, position in zip(
        qkv.view(len(qkv), groups, -1, d), samples, positions, strict=True
    ):
        keys[sample, :, position % slots] = row[:, -2]
        values[sample, :, position % slots] = row[:, -1]
        known = min(position + 1, slots)
        k = keys[sample, :, :known].double()
        v = values[sample, :, :known].double()
        out.append(torch.softmax(row[:, :-2].double() @ k.transpose(1, 2) / math.sqrt(d), -1) @ v)
    return torch.stack(out).flatten(1), keys, values


def assert_same(got, want, tolerance):
    assert (got[0].double() - want[0]).abs().max() <= tolerance * max(1.0, want[0].abs().max())
    assert torch.equal(got[1], want[1]) and torch.equal(got[2], want[2])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_decoding_agrees_with_formula(target, dtype):
    assert decode(*make(4, 2, 8, 9, rows=0), [], [])[0].shape == (0, 32)
    for shape in SHAPES:
        tensors = make(*shape, dtype)
        assert_same(decode(*tensors), explicit(*tensors), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_reference_agrees_with_formula(reference, dtype):
    for shape in SHAPES[:3]:
        tensors = make(*shape, dtype)
        assert_same(
            reference(lambda tensors=tensors: decode(*tensors)),
            explicit(*tensors),
            TOLERANCE[dtype],
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_for_any_threads_and_rows(target, same_for_any_threads, dtype):
    tensors = make(6, 2, 64, 700, dtype)
    out = same_for_any_threads(lambda: decode(*tensors))[0]
    for row in range(3):
        alone = decode(
            tensors[0][row : row + 1],
            *tensors[1:],
            SAMPLES[row : row + 1],
            POSITIONS[row : row + 1],
        )[0]
        assert torch.equal(alone[0], out[row])


def test_slots_that_hold_nothing_yet_are_not_read(target):
    qkv, keys, values = make(4, 2, 64, 200)
    keys[0, :, 12:] = math.nan
    values[0, :, 12:] = math.inf
    keys[3] = math.nan
    values[3] = math.nan
    out = decode(qkv, keys, values)[0]
    assert torch.isfinite(out).all()
    assert_same(
        (out[0], out, out),
        (qkv[0].view(2, 4, 64)[:, 3:].expand(2, 2, 64).flatten().double(), out, out),
        2e-6,
    )


def test_large_scores_do_not_overflow(target):
    tensors = make(4, 2, 64, 300)
    tensors[0] *= 40
    tensors[1] *= 40
    assert_same(decode(*tensors), explicit(*tensors), 1e-3)


def test_bad_arguments_are_value_errors_before_a_byte_is_written():
    qkv, keys, values = make(4, 2, 8, 9)
    good = {
        "qkv": qkv,
        "keys": keys,
        "values": values,
        "samples": torch.tensor(SAMPLES),
        "positions": torch.tensor(POSITIONS),
        "out": torch.full((3, 32), 7.0),
    }
    before = keys.clone(), values.clone()
    for name, value, message in [
        ("qkv", qkv[:, :50].contiguous(), "qkv: expected .* 2 groups .* got 50 columns"),
        ("qkv", qkv.double(), "dtype"),
        ("keys", keys[:, :, :, :6].contiguous(), "d a multiple of 4"),
        ("values", values[:4], "shape"),
        ("values", keys, "apart from keys"),
        ("samples", torch.tensor([0, 1, 5]), "below 5, got 5"),
        ("samples", torch.tensor([0, -1, 3]), "got -1"),
        ("positions", torch.tensor([0, -1, 3]), "0 or more, got -1"),
        ("positions", torch.tensor([0, 1]), "shape"),
        ("out", torch.full((3, 28), 7.0), "shape"),
        ("samples", torch.tensor([0, 1, 3], dtype=torch.int32), "dtype"),
    ]:
        with pytest.raises(ValueError, match=message):
            kernels.attention_decode(**{**good, name: value})
    assert (
        (good["out"] == 7.0).all()
        and torch.equal(keys, before[0])
        and torch.equal(values, before[1])
    )
