"""Attention on ranks that share a sequence: work, bytes sent to each other, and results against one rank."""

import pytest
import torch

from fugaku_megatron.config.layout import Layout
from fugaku_megatron.costs.context_parallel import rank_segments
from fugaku_megatron.nn.attention.context_parallel import (
    AttentionMask,
    SharedCall,
    shared_attention,
    to_heads,
    to_rank_order,
    to_rows,
    to_sequence_order,
    visible_blocks,
)
from fugaku_megatron.nn.attention.heads import Heads
from fugaku_megatron.nn.dropout_key import Dropout, DropoutKey
from fugaku_megatron.nn.ops import Ops
from tests.checks.attention import document_starts
from tests.helpers import small_run
from tests.recording import RecordingComm
from tests.threads import ThreadWorld

pytestmark = pytest.mark.parallel

NATIVE = Ops.build()
HEADS = Heads(4, 2, 8)
S = 96
SAMPLES = 2
KEY = DropoutKey(7, 3, 2, sample_dim=0)
MASKS = {
    "causal": AttentionMask(S),
    "window": AttentionMask(S, 9),
    "documents": AttentionMask(S, None, document_starts(S, SAMPLES, 3)),
    "both": AttentionMask(S, 20, document_starts(S, SAMPLES, 8)),
}


def pairs(mask, queries, keys):
    """Return the number of visible pairs in the first sample."""
    query = torch.arange(queries.start, queries.stop)[:, None]
    key = torch.arange(keys.start, keys.stop)
    distance = query - key
    starts = torch.zeros(mask.length, dtype=torch.int32) if mask.starts is None else mask.starts[0]
    seen = (distance >= 0) & (distance < (mask.window or mask.length)) & (key >= starts[query])
    return int(seen.sum())


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_causal_work_is_the_same_on_every_rank_and_complete(ranks):
    s = 240 * ranks
    mask = AttentionMask(s)
    work = [
        sum(
            pairs(mask, part.queries, part.keys)
            for part in visible_blocks(mask, rank_segments(rank, ranks, s), range(s))
        )
        for rank in range(ranks)
    ]
    assert set(work) == {s * (s + 1) // 2 // ranks}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", list(MASKS))
def test_parts_hold_every_pair_and_begin_and_end_with_one(name, ranks):
    mask = MASKS[name]
    for rank in range(ranks):
        runs = rank_segments(rank, ranks, S)
        for other in range(ranks):
            for keys in rank_segments(other, ranks, S):
                found = list(visible_blocks(mask, runs, keys))
                assert all(part.rows.stop - part.rows.start == len(part.queries) for part in found)
                if SAMPLES == 1 or mask.starts is None:
                    want = sum(pairs(mask, run, keys) for run in runs)
                    assert sum(pairs(mask, part.queries, part.keys) for part in found) == want
                    assert all(pairs(mask, part.queries[:1], part.keys) for part in found)
                    assert all(pairs(mask, part.queries, part.keys[-1:]) for part in found)


def test_heads_of_whole_sequences_are_the_same_work_for_any_documents():
    """Exchanged heads: every rank has the same queries and keys, so only the number of heads counts."""
    run = small_run(context_parallel_size=4, num_attention_heads=8, hidden_size=64)
    assert set(run.cp_comm_types) == {"a2a"} and Layout.from_run(run, 4).cp == 4

    def heads(comm):
        x = torch.arange(S // 4 * 2 * 64, dtype=torch.float32).view(S // 4, 2, 64)
        assert torch.equal(to_rows(to_heads(x, comm), comm), x)
        permuted = x.transpose(0, 1).contiguous().transpose(0, 1)  # as torch's attention makes it
        assert torch.equal(to_rows(to_heads(permuted, comm), comm), x)
        whole = to_heads(x, comm)
        assert torch.equal(to_rows(whole.transpose(0, 1).contiguous().transpose(0, 1), comm), x)
        return to_heads(x, comm).shape

    assert set(ThreadWorld(4).run(heads)) == {(S, 2, 16)}


def computed(comm, qkv, dout, call, backend, way):
    """Return all ranks' (out, dqkv) in sequence order, and the bytes that this rank sent, by verb."""
    observed = RecordingComm(comm)
    own = to_rank_order(qkv, comm.size).chunk(comm.size)[comm.rank].clone().requires_grad_()
    out = shared_attention(backend, own, call, observed, way)
    out.backward(to_rank_order(dout, comm.size).chunk(comm.size)[comm.rank])
    sent = {verb: size for (_, verb), (_, size) in observed.tally().items()}
    whole = [
        comm.all_gather(x.new_empty(comm.size * len(x), *x.shape[1:]), x.contiguous())
        for x in (out.detach(), own.grad)
    ]
    return [to_sequence_order(x, comm.size) for x in whole], sent


def tensors(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(S, SAMPLES, width, generator=generator).to(dtype)
        for width in ((4 + 2 * 2) * 8, 4 * 8)
    )


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize(
    ("ranks", "way", "name"),
    [
        (2, "p2p", "causal"),
        (4, "p2p", "both"),
        (3, "p2p", "documents"),
        (8, "p2p", "window"),
        (2, "allgather", "both"),
        (4, "allgather", "causal"),
        (4, "allgather", "documents"),
        (3, "allgather", "window"),
    ],
)
def test_ranks_make_what_one_rank_makes(ranks, way, name, backend):
    ops = NATIVE if backend == "native" else Ops.build("torch")
    qkv, dout = tensors()
    call = SharedCall(HEADS, MASKS[name], Dropout(0.25, KEY))
    leaf = qkv.clone().requires_grad_()
    want = ops.attention(leaf, HEADS, call.dropped, call.mask.window, call.mask.starts)
    want.backward(dout)
    for found, _ in ThreadWorld(ranks).run(computed, qkv, dout, call, ops, way):
        torch.testing.assert_close(found[0], want.detach(), rtol=0, atol=2e-6)
        torch.testing.assert_close(found[1], leaf.grad, rtol=0, atol=5e-6)


class Watched:
    """NATIVE with a log: the first query and the first key in each block's backward."""

    def __init__(self, log):
        self.attend_block = NATIVE.attend_block
        self.log = log

    def add_block_gradients(self, call, part, *tensors):
        self.log.append(("backward", part.queries.start, part.keys.start))
        NATIVE.add_block_gradients(call, part, *tensors)


def test_gradients_of_others_keys_leave_before_the_last_own_part():
    """Each as soon as it is made. Own keys that the same queries hold come first, while the others' are on their way."""
    qkv, dout = tensors()
    call = SharedCall(HEADS, MASKS["causal"], Dropout(0.0, KEY))
    part = S // 4

    def backward(comm):
        observed = RecordingComm(comm, "cp")
        own = to_rank_order(qkv, 2).chunk(2)[comm.rank].clone().requires_grad_()
        out = shared_attention(Watched(observed.log), own, call, observed, "p2p")
        del observed.log[:]
        out.backward(to_rank_order(dout, 2).chunk(2)[comm.rank])
        return [
            event[1] if event[1] == "send" else (event[1] // part, event[2] // part)
            for event in observed.log
            if event[1] != "recv"
        ]

    assert ThreadWorld(2).run(backward) == [
        ["send", (0, 0), (3, 3), (3, 1), "send", (3, 2), "send", (3, 0)],
        ["send", "send", (1, 1), (2, 2), (1, 0), (2, 0), "send", (2, 1)],
    ]


def sent_by_ranks(ranks, starts):
    """Bytes that each rank sends with p2p, forward and backward."""
    qkv, dout = tensors()
    call = SharedCall(HEADS, AttentionMask(S, None, starts), Dropout(0.0, KEY))
    return [
        sent.get("send", 0)
        for _, sent in ThreadWorld(ranks).run(computed, qkv, dout, call, NATIVE, "p2p")
    ]


def test_parts_without_a_common_document_exchange_nothing():
    part = S // 8
    starts = (torch.arange(S, dtype=torch.int32) // part * part).repeat(SAMPLES, 1)
    assert sent_by_ranks(4, starts) == [0, 0, 0, 0]
    starts[:, part : 2 * part] = (
        part - 3
    )  # part 1, of rank 1, sees three tokens of part 0, of rank 0
    bytes = (
        3 * SAMPLES * 2 * 2 * 8 * 4
    )  # of keys, which are sent again in backward, and of their gradients
    starts[:, part - 3 : part] = part - 3
    assert sent_by_ranks(4, starts) == [2 * bytes, bytes, 0, 0]


def test_keys_that_come_later_are_not_sent():
    """Rank i sends its early part to 3 others and its late part to i, twice, and gradients of 3 early and 3 - i late parts."""
    part = S // 8 * SAMPLES * 2 * 2 * 8 * 4
    assert sent_by_ranks(4, None) == [(2 * (3 + rank) + 3 + 3 - rank) * part for rank in range(4)]


@pytest.mark.parametrize(
    ("heads", "groups", "given", "ways"),
    [
        (8, 8, None, "a2a a2a"),
        (6, 6, None, "p2p p2p"),
        (8, 2, None, "a2a a2a"),
        (12, 3, None, "p2p p2p"),
        (8, 8, ("p2p",), "p2p p2p"),
        (6, 6, ("a2a+p2p", "allgather"), "p2p allgather"),
    ],
)
def test_which_way_a_layer_takes(heads, groups, given, ways):
    run = small_run(
        num_layers=2,
        hidden_size=96,
        num_attention_heads=heads,
        kv_channels=8,
        group_query_attention=True,
        num_query_groups=groups,
        context_parallel_size=4,
        cp_comm_type=given,
    )
    Layout.from_run(run, 4)
    assert " ".join(run.cp_comm_types) == ways
