"""Philox: known answers, statistics, independent slices and threads."""

import itertools
import math

import pytest
import torch
from torch.testing import assert_close

from fugaku_megatron.host import kernels
from tests.kernels.numbers import DTYPES, for_each, refuses

pytestmark = pytest.mark.kernels

SIZES = [1, 3, 4, 5, 8, 15, 16, 17, 31, 61, 63, 64, 65, 127, 257, 1031]


def to_int32(words):
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)


def normal(rows, cols, **place):
    """Fill a matrix, by default a whole one."""
    out = torch.full((rows, cols), math.nan)
    defaults = {"seed": 1, "stream": 2, "row0": 0, "col0": 0, "full_cols": 2048, "std": 1.0}
    kernels.philox_normal(out, **{**defaults, **place})
    return out


def dropout(x, p=0.25, seed=1, stream=2, first_sample=0, **place):
    out = torch.full_like(x, math.nan)
    kernels.dropout(x, out, p, seed, stream, first_sample, **place)
    return out


# Random123, kat_vectors, philox4x32 with 10 rounds: counter, key, answer.
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@for_each(calls=[1, 15, 33])
def test_known_answers(every_target, calls):
    for counter, key, answer in KNOWN:
        out = torch.zeros(calls, 4, dtype=torch.int32)
        kernels.philox4x32(to_int32(counter).repeat(calls, 1), out, *key)
        assert torch.equal(out, to_int32(answer).repeat(calls, 1))


@for_each(cols=SIZES, col0=[0, 1, 16, 77])
def test_normal_agrees_with_reference(target, reference, cols, col0):
    place = {"row0": 5, "col0": col0, "std": 0.02, "mean": 0.5}
    want = reference(lambda: normal(3, cols, **place))
    assert_close(normal(3, cols, **place), want, rtol=1e-6, atol=1e-7)


def test_normal_slices_and_threads_give_the_bits_of_the_whole(target, same_for_any_threads):
    whole = same_for_any_threads(lambda: normal(40, 1031, full_cols=1031))
    for row0, col0, rows, cols in [
        (0, 0, 40, 150),
        (0, 150, 40, 150),
        (13, 7, 20, 64),
        (39, 1030, 1, 1),
    ]:
        part = normal(rows, cols, row0=row0, col0=col0, full_cols=1031)
        assert torch.equal(part, whole[row0 : row0 + rows, col0 : col0 + cols])
    refuses(
        kernels.philox_normal,
        (torch.zeros(2, 20), 1, 2, 0, 0, 100, 1.0),
        {r"col0: expected a slice within the 100 columns \(full_cols\).*90 to 110": 90},
    )


def test_normal_is_standard_normal(target):
    x = normal(1000, 1000).double()
    n = x.numel()
    for power, moment, variance in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)]:
        assert abs((x**power).mean() - moment) < 4 * math.sqrt(variance / n)
    # The share of each tenth of the distribution, and no correlation along rows or columns.
    tenths = torch.histc(torch.special.ndtr(x), 10, 0, 1) / n
    assert (tenths - 0.1).abs().max() < 4 * math.sqrt(0.09 / n)
    for a, b in [(x[:-1], x[1:]), *((x[:, :-lag], x[:, lag:]) for lag in (1, 16, 64))]:
        assert abs((a * b).mean()) < 4 / math.sqrt(a.numel())


def test_seeds_streams_and_samples_give_other_numbers():
    keys = [(seed, stream) for seed in (0, 1, 2, 2**63) for stream in (0, 1, 2, 2**63)]
    firsts = {tuple(normal(1, 4, seed=seed, stream=stream)[0].tolist()) for seed, stream in keys}
    assert len(firsts) == len(keys)
    a = normal(300, 300, seed=1, stream=0)
    b = normal(300, 300, seed=0, stream=1)
    assert abs((a * b).mean()) < 4 / 300
    x = torch.ones(64, 1, 64)
    places = itertools.product((1, 2), (1, 2), (0, 1, 2**32))
    masks = [dropout(x, 0.5, *place) != 0 for place in places]
    for a, b in itertools.combinations(masks, 2):
        assert abs(float((a == b).double().mean()) - 0.5) < 5 * 0.5 / 64


@for_each(dtype=DTYPES, cols=[0, *SIZES], sample_dim=[0, 1, 2])
def test_dropout_agrees_with_reference(target, reference, dtype, cols, sample_dim):
    x = torch.randn(3, 2, 2, cols).to(dtype)
    place = {"sample_dim": sample_dim, "row0": 9, "col0": 3, "first_sample": 2**33 + 1}
    assert torch.equal(dropout(x, **place), reference(lambda: dropout(x, **place)))


def test_dropout_scales_what_it_keeps_at_the_right_rate(target):
    x = torch.ones(500, 8, 256)
    n = x.numel()
    for p in (0.0, 0.1, 0.5, 0.9):
        out = dropout(x, p)
        kept = out != 0
        assert_close(out[kept], torch.full((int(kept.sum()),), 1 / (1 - p)))
        assert abs(float(kept.double().mean()) - (1 - p)) <= 4 * math.sqrt(p * (1 - p) / n)


def test_dropout_does_not_depend_on_the_layout_nor_on_threads(target, same_for_any_threads):
    x = torch.randn(12, 6, 200)  # (s, b, h)
    whole = same_for_any_threads(lambda: dropout(x, first_sample=100))
    for h0, h1 in [(0, 100), (100, 200), (50, 75)]:
        part = dropout(x[:, :, h0:h1].contiguous(), first_sample=100, col0=h0)
        assert torch.equal(part, whole[:, :, h0:h1])
    assert torch.equal(dropout(x[:, 2:5].contiguous(), first_sample=102), whole[:, 2:5])
    assert torch.equal(dropout(x[4:9].contiguous(), first_sample=100, row0=4), whole[4:9])
    scores = torch.randn(3, 8, 33, 33)  # (b, heads, s, s)
    part = dropout(scores[1:, 4:6].contiguous(), sample_dim=0, first_sample=8, row0=4 * 33)
    assert torch.equal(part, dropout(scores, sample_dim=0, first_sample=7)[1:, 4:6])


@for_each(cols=SIZES, col0=[0, 1, 63])
def test_writes_stay_inside_the_output(target, guarded, cols, col0):
    kernels.philox_normal(guarded((2, cols)), 1, 2, 0, col0, 2000, 1.0)
    for dtype in DTYPES:
        x = torch.ones(2, 1, cols, dtype=dtype)
        kernels.dropout(x, guarded(x.shape, dtype), 0.5, 1, 2, 0, col0=col0)


def test_dropout_is_a_mask_in_forward_and_backward(target):
    x = torch.randn(5, 3, 70)
    dy = torch.randn(5, 3, 70)
    mask = dropout(torch.ones(5, 3, 70)) != 0
    for values in (x, dy):
        assert_close(dropout(values), torch.where(mask, values / 0.75, 0.0))
    in_place = x.clone()
    kernels.dropout(in_place, in_place, 0.25, 1, 2, 0)
    assert torch.equal(in_place, dropout(x))
    x[:] = math.inf
    x[1] = math.nan
    out = dropout(x, 0.5)
    assert not bool(out[out != 0].isfinite().any()), "finite results are zeros"
    assert bool((out == 0).any()), "NaN and infinity are dropped as well"
