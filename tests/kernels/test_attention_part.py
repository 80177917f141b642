"""Attention of a part of a sequence: queries and keys from any position on, merged, against the whole sequence in double precision.

Shapes: qkv (q, b, (heads + 2 groups) d), kv (k, b, 2 groups d), out (q, b, heads d), lse (b, heads, q).
"""

import itertools
import math
import random

import pytest
import torch

from fugaku_megatron.costs.activations import rank_segments
from fugaku_megatron.host import kernels
from fugaku_megatron.nn.dropout_key import DropoutKey
from fugaku_megatron.nn.heads import Heads
from fugaku_megatron.nn.ops import Ops
from fugaku_megatron.nn.shared_attention import (
    AttentionMask,
    Block,
    Result,
    SharedCall,
    keys_of,
    visible_blocks,
)
from tests.checks.attention import (
    DROPOUT,
    GROUPED,
    SHAPES,
    TOLERANCE,
    assert_close,
    attention,
    document_starts,
    exact,
    explicit,
    make,
)

CASES = [*GROUPED, *((shape, None, None) for shape in SHAPES)]


def cuts_of(s, seed):
    """Up to four runs of the positions of a sequence, cut anywhere."""
    chosen = sorted(random.Random(seed).sample(range(1, s), min(s - 1, 1 + seed % 3)))
    return [range(*bounds) for bounds in itertools.pairwise([0, *chosen, s])]


def in_parts(qkv, dout, heads, runs, window=None, starts=None, every=False, **dropout):
    """(out, lse, dqkv) from parts of all pairs of runs of queries and keys. every: of all pairs, also of those that see nothing."""
    s, b, width = qkv.shape
    lies = Heads(heads, (width * heads // dout.shape[2] - heads) // 2, dout.shape[2] // heads)
    kv = keys_of(qkv, lies).flatten(2).contiguous()
    mask = AttentionMask(s, window, starts)
    options = {"window": window, "starts": starts}
    chosen = [
        Block(slice(q.start, q.stop), q, k) if every else part
        for q in runs
        for k in runs
        for part in ([None] if every else visible_blocks(mask, [q], k))
    ]
    chosen = (
        chosen
        if every
        else [part._replace(rows=slice(part.queries.start, part.queries.stop)) for part in chosen]
    )
    result = Result(s, b, lies)
    for part in chosen:
        out = torch.full((len(part.queries), *dout.shape[1:]), math.nan, dtype=qkv.dtype)
        lse = torch.full((b, heads, len(part.queries)), math.nan)
        keys = kv[part.keys.start : part.keys.stop]
        kernels.attention_part_forward(
            qkv[part.rows],
            keys,
            out,
            lse,
            s,
            part.queries.start,
            part.keys.start,
            **dropout,
            **options,
        )
        result.merge(part.rows, out, lse)
    out = result.total.flatten(2).to(qkv.dtype)
    dqkv = torch.zeros(qkv.shape)
    dkv = torch.zeros(kv.shape)
    for part in chosen:
        rows = part.rows
        keys = slice(part.keys.start, part.keys.stop)
        places = (s, part.queries.start, part.keys.start)
        lse = result.lse[..., rows].contiguous()
        kernels.attention_part_backward(
            qkv[rows],
            kv[keys],
            out[rows],
            lse,
            dout[rows],
            dqkv[rows],
            dkv[keys],
            *places,
            **dropout,
            **options,
        )
    keys_of(dqkv, lies).copy_(dkv.view(s, b, lies.groups, 2, -1))
    return out, result.lse, dqkv


@pytest.mark.parametrize("dropout", [{}, DROPOUT], ids=["plain", "dropout"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_parts_make_the_whole(target, dtype, dropout):
    for seed, (shape, groups, window) in enumerate(CASES if dtype == torch.float32 else CASES[::3]):
        qkv, dout = make(*shape, dtype, groups=groups)
        documents = seed if seed % 2 else None
        starts = None if documents is None else document_starts(*shape[:2], seed)
        got = in_parts(qkv, dout, shape[2], cuts_of(shape[0], seed), window, starts, **dropout)
        assert_close(
            got, exact(shape, dtype, bool(dropout), groups, window, documents), TOLERANCE[dtype]
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_that_see_none_of_the_keys(target, dtype):
    """Their result is 0 and their sum too, and what they add to gradients is 0."""
    shape = (210, 1, 2, 96)
    groups = 2
    window = 5
    qkv, dout = make(*shape, dtype, groups=groups)
    got = in_parts(qkv, dout, 2, [range(100), range(100, 110), range(110, 210)], window, every=True)
    assert_close(got, exact(shape, dtype, False, groups, window), TOLERANCE[dtype])
    out = torch.full((100, 1, 192), math.nan, dtype=dtype)
    lse = torch.full((1, 2, 100), math.nan)
    kernels.attention_part_forward(
        qkv[110:], torch.ones(100, 1, 2 * 192, dtype=dtype), out, lse, 210, 110, 0, window=window
    )
    assert not out.any() and (lse == -math.inf).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("s", [200, 288])
def test_a_part_of_everything_has_the_bits_of_the_whole(target, s, dtype):
    """The part has the whole sequence's blocks and tiles: queries that see all keys of theirs in one part have the same sums."""
    qkv, dout = make(s, 2, 4, 16, dtype, groups=2)
    starts = document_starts(s, 2, 5)
    options = {"window": 150, **DROPOUT}
    for documents in (None, starts):
        want = attention(qkv, dout, 4, starts=documents, **options)
        kv = keys_of(qkv, Heads(4, 2, 16)).flatten(2).contiguous()
        for queries in (range(s), range(96, s), range(61, 131)):
            rows = slice(queries.start, queries.stop)
            out = torch.empty_like(dout[rows])
            lse = torch.empty(2, 4, len(queries))
            kernels.attention_part_forward(
                qkv[rows],
                kv[: queries.stop],
                out,
                lse,
                s,
                queries.start,
                0,
                **options,
                starts=documents,
            )
            assert torch.equal(out, want[0][rows]) and torch.equal(lse, want[1][..., rows])


def test_the_same_bits_for_any_threads(target, same_for_any_threads):
    for dtype in (torch.float32, torch.bfloat16):
        qkv, dout = make(300, 1, 6, 16, dtype, groups=2)
        same_for_any_threads(
            lambda args=(qkv, dout, 6): in_parts(
                *args, [range(90), range(90, 197), range(197, 300)], **DROPOUT
            )
        )


def test_the_reference_and_torch_agree_with_the_formula(reference):
    for (s, b, heads, d), groups, window in [((17, 2, 3, 8), 3, None), ((33, 1, 4, 20), 2, 9)]:
        for starts in (None, document_starts(s, b, 3)):
            qkv, dout = make(s, b, heads, d, groups=groups)
            want = explicit(qkv, dout, heads, window=window, starts=starts, **DROPOUT)
            arguments = (
                qkv,
                dout,
                heads,
                rank_segments(0, 1, s) if starts is None else cuts_of(s, 2),
                window,
                starts,
            )
            assert_close(
                reference(lambda arguments=arguments: in_parts(*arguments, **DROPOUT)), want, 2e-6
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_makes_the_same_of_a_part(target, dtype):
    s = 120
    lies = Heads(4, 2, 16)
    qkv, dout = make(s, 2, 4, 16, dtype, groups=2)
    key = DropoutKey(
        DROPOUT["seed"], DROPOUT["stream"], DROPOUT["first_sample"], 0, DROPOUT["first_head"] * s
    )
    call = SharedCall(lies, AttentionMask(s, 50, document_starts(s, 2, 4)), DROPOUT["p"], key)
    part = Block(slice(60, 100), range(60, 100), range(20, 80))
    backend = Ops.build("torch")
    kv = keys_of(qkv, lies).flatten(2).contiguous()[20:80]
    arguments = (s, 60, 20, *DROPOUT.values(), 50, call.mask.starts)
    out = torch.empty_like(dout[60:100])
    lse = torch.empty(2, 4, 40)
    kernels.attention_part_forward(qkv[60:100], kv, out, lse, *arguments)
    for got, want in zip(
        (out, lse), backend.attend_block(call, part, qkv[60:100], kv), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=2 * TOLERANCE[dtype])
    lse = lse.masked_fill(lse == -math.inf, 1.0)
    gradients = [(torch.ones(40, 2, qkv.shape[2]), torch.ones(kv.shape)) for _ in range(2)]
    kernels.attention_part_backward(
        qkv[60:100], kv, out, lse, dout[60:100], *gradients[0], *arguments
    )
    backend.add_block_gradients(call, part, qkv[60:100], kv, out, lse, dout[60:100], *gradients[1])
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=4 * TOLERANCE[dtype])


def test_bad_arguments_of_a_part():
    qkv, dout = make(5, 2, 3, 8)
    good = {
        "qkv": qkv,
        "kv": torch.zeros(4, 2, 48),
        "out": dout,
        "lse": torch.zeros(2, 3, 5),
        "s": 20,
        "first_query": 10,
        "first_key": 0,
    }
    for name, value, message in [
        ("kv", torch.zeros(4, 2, 24), "shape"),
        ("kv", torch.zeros(0, 2, 48), "one key or more"),
        ("first_query", 16, "first_query: expected a position"),
        ("first_key", -1, "first_key"),
    ]:
        with pytest.raises(ValueError, match=message):
            kernels.attention_part_forward(**{**good, name: value})
    with pytest.raises(ValueError, match="dqkv: expected dtype float32"):
        kernels.attention_part_backward(
            *list(good.values())[:4], dout, qkv.double(), torch.zeros(4, 2, 48), 20, 10, 0
        )
