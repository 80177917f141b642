"""Attention by blocks, merged, against the whole sequence in double precision.

Shapes: qkv (q, b, heads key_size + groups (key_size + d)), kv (k, b, groups (key_size + d)), out (q, b, heads d), lse
(b, heads, q).
"""

import itertools
import math
import random

import pytest
import torch

from fugaku_megatron.host import kernels
from fugaku_megatron.nn.attention.context_parallel import (
    AttentionGradients,
    AttentionMask,
    Block,
    Result,
    SharedCall,
    visible_blocks,
)
from fugaku_megatron.nn.attention.heads import Heads
from fugaku_megatron.nn.dropout_key import Dropout, DropoutKey
from fugaku_megatron.nn.ops import Ops
from tests.checks.attention import (
    DROPOUT,
    TOLERANCE,
    Case,
    assert_close,
    attention,
    cases,
    exact,
    make,
    split,
)
from tests.kernels.numbers import assert_equal, for_each, refuses

pytestmark = pytest.mark.kernels

FAST_DTYPES = [torch.float32, torch.bfloat16]


def cuts_of(s, seed):
    """Cut a sequence anywhere into up to four ranges."""
    chosen = sorted(random.Random(seed).sample(range(1, s), min(s - 1, 1 + seed % 3)))
    return [range(*bounds) for bounds in itertools.pairwise([0, *chosen, s])]


def keys_and_values(qkv, dout, heads, key_size=None):
    return split(qkv, dout, heads, key_size)[1].flatten(2).contiguous()


def block(queries, keys):
    return Block(slice(queries.start, queries.stop), queries, keys)


def forward(part, qkv, kv, dout, heads, s, **options):
    """Return a block's out and lse, full of NaN before."""
    out = torch.full_like(dout[part.rows], math.nan)
    lse = torch.full((out.shape[1], heads, len(out)), math.nan)
    keys = kv[part.keys.start : part.keys.stop]
    place = s, part.queries.start, part.keys.start
    kernels.attention_part_forward(qkv[part.rows], keys, out, lse, *place, **options)
    return out, lse


def in_blocks(qkv, dout, heads, ranges, every=False, **options):
    """Return (out, lse, dqkv) from blocks for all pairs in `ranges`. every: also pairs without a visible key"""
    s, b, _ = qkv.shape
    key_size = options.get("key_size")
    kv = keys_and_values(qkv, dout, heads, key_size)
    pairs = itertools.product(ranges, ranges)
    mask = AttentionMask(s, options.get("window"), options.get("starts"))
    if not every:
        visible = (visible_blocks(mask, [queries], keys) for queries, keys in pairs)
        pairs = [(part.queries, part.keys) for parts in visible for part in parts]
    blocks = [block(*pair) for pair in pairs]
    values = Heads(heads, heads, dout.shape[2] // heads)
    result = Result(s, b, SharedCall(values, mask, Dropout(0.0, DropoutKey(0, 0, 0, 0, 0))))
    for part in blocks:
        result.merge(part.rows, *forward(part, qkv, kv, dout, heads, s, **options))
    out = result.total.flatten(2).to(qkv.dtype)
    dqkv = torch.zeros(qkv.shape)
    dkv = torch.zeros(kv.shape)
    for part in blocks:
        rows = part.rows
        keys = slice(part.keys.start, part.keys.stop)
        lse = result.lse[..., rows].contiguous()
        tensors = qkv[rows], kv[keys], out[rows], lse, dout[rows], dqkv[rows], dkv[keys]
        place = s, part.queries.start, part.keys.start
        kernels.attention_part_backward(*tensors, *place, **options)
    own_keys = split(dqkv, dout, heads, key_size)[1]
    own_keys.copy_(dkv.view(own_keys.shape))
    return out, result.lse, dqkv


@pytest.mark.parametrize("dropout", [{}, DROPOUT], ids=["plain", "dropout"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_blocks_make_the_whole(every_target, dtype, dropout):
    for seed, case in enumerate(cases(every_target, dtype)):
        ranges = cuts_of(case.s, seed)
        got = in_blocks(*case.inputs(dtype), ranges, **case.options(), **dropout)
        assert_close(got, exact(case, dtype, bool(dropout)))


@for_each(dtype=FAST_DTYPES)
def test_queries_that_see_none_of_the_keys(target, dtype):
    """Their result and their sum are 0, and they add 0 to gradients."""
    case = Case(210, 1, 2, 96, groups=2, window=5)
    qkv, dout, heads = case.inputs(dtype)
    ranges = [range(100), range(100, 110), range(110, 210)]
    got = in_blocks(qkv, dout, heads, ranges, every=True, **case.mask())
    assert_close(got, exact(case, dtype))
    kv = torch.ones(100, 1, 2 * 192, dtype=dtype)
    out, lse = forward(block(range(110, 210), range(100)), qkv, kv, dout, heads, case.s, window=5)
    assert not out.any() and (lse == -math.inf).all()


@for_each(dtype=FAST_DTYPES, s=[200, 288], documents=[None, 5])
def test_a_block_of_all_keys_has_the_bits_of_the_whole(target, s, dtype, documents):
    """The block has the whole sequence's tiles, so queries that see all their keys in one block have the same sums."""
    case = Case(s, 2, 2, 16, groups=1, window=150, documents=documents, key_size=28)
    qkv, dout, heads = case.inputs(dtype)
    options = {**case.options(), **DROPOUT}
    out, lse, _ = attention(qkv, dout, heads, **options)
    kv = keys_and_values(qkv, dout, heads, case.key_size)
    for queries in (range(s), range(96, s), range(61, 131)):
        part = block(queries, range(queries.stop))
        got = forward(part, qkv, kv, dout, heads, s, **options)
        assert_equal(got, (out[part.rows], lse[..., part.rows]))


@for_each(dtype=FAST_DTYPES)
def test_the_same_bits_for_any_threads(target, same_for_any_threads, dtype):
    qkv, dout = make(300, 1, 6, 16, dtype, groups=2)
    ranges = [range(90), range(90, 197), range(197, 300)]
    same_for_any_threads(lambda: in_blocks(qkv, dout, 6, ranges, **DROPOUT))


@for_each(dtype=FAST_DTYPES)
def test_torch_makes_the_same_of_a_block(target, dtype):
    case = Case(120, 2, 4, 16, groups=2, window=50, documents=4)
    qkv, dout, heads = case.inputs(dtype)
    p, seed, stream, first_sample, first_head = DROPOUT.values()
    key = DropoutKey(seed, stream, first_sample, 0, first_head * case.s)
    mask = AttentionMask(case.s, **case.mask())
    lies = Heads(heads, 2, 16)
    call = SharedCall(lies, mask, Dropout(p, key))
    part = block(range(60, 100), range(20, 80))
    backend = Ops.build("torch")
    whole = keys_and_values(qkv, dout, heads)
    kv = whole[20:80]
    tensors = qkv[part.rows], kv
    options = {**case.mask(), **DROPOUT}
    out, lse = forward(part, qkv, whole, dout, heads, case.s, **options)
    want = backend.attend_block(call, part, *tensors)
    torch.testing.assert_close((out, lse), want, rtol=0, atol=2 * TOLERANCE[dtype])
    lse = lse.masked_fill(lse == -math.inf, 1.0)
    got, want = ((torch.ones(40, *qkv.shape[1:]), torch.ones(kv.shape)) for _ in range(2))
    kernels.attention_part_backward(
        *tensors, out, lse, dout[part.rows], *got, case.s, 60, 20, **options
    )
    gradients = AttentionGradients(qkv[part.rows], out, lse, dout[part.rows], want[0])
    backend.add_block_gradients(call, part, gradients, kv, want[1])
    torch.testing.assert_close(got, want, rtol=0, atol=4 * TOLERANCE[dtype])


def test_bad_arguments_of_a_block():
    qkv, dout = make(5, 2, 3, 8)
    kv = torch.zeros(4, 2, 48)
    lse = torch.zeros(2, 3, 5)
    place = 20, 10, 0
    refuses(
        kernels.attention_part_forward,
        (qkv, kv, dout, lse, *place),
        {
            "kv: .*shape": torch.zeros(4, 2, 24),
            "kv: .*one key or more": torch.zeros(0, 2, 48),
            "first_query: expected a position": 16,
            "first_key: ": -1,
        },
    )
    refuses(
        kernels.attention_part_backward,
        (qkv, kv, dout, lse, dout.clone(), torch.zeros(qkv.shape), torch.zeros(kv.shape), *place),
        {"dqkv: expected dtype float32": qkv.double()},
    )
