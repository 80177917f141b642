"""Sequence segments of context-parallel ranks, and attention's messages between them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from ..config.parallel import A2A, ALLGATHER, P2P
from ..config.run_config import RunConfig
from .records import Collective, Collectives
from .sizes import FP32_BYTES, context_bytes, qkv_bytes


def segment_numbers(rank: int, ranks: int) -> tuple[int, int]:
    return rank, 2 * ranks - 1 - rank


def rank_segments(rank: int, ranks: int, s: int) -> list[range]:
    if ranks == 1:
        return [range(s)]
    length = s // (2 * ranks)
    return [range(n * length, (n + 1) * length) for n in segment_numbers(rank, ranks)]


def visible_keys(queries: range, keys: range, window: int | None) -> range:
    """Return the range in `keys` that any query sees; inverted if there is none."""
    first = max(keys.start, queries.start + 1 - window) if window else keys.start
    return range(first, min(keys.stop, queries.stop))


def span(ranges: Iterable[range]) -> range:
    full = [each for each in ranges if each]
    if not full:
        return range(0)
    return range(min(each.start for each in full), max(each.stop for each in full))


@lru_cache(maxsize=64)
def p2p_keys(s: int, ranks: int, window: int | None) -> tuple[tuple[int, int], ...]:
    """Return the number of keys that each rank (sends, receives) with --cp-comm-type p2p.

    A rank receives only the keys that its own queries see.
    """
    segments = [rank_segments(rank, ranks, s) for rank in range(ranks)]
    sent = [0 for _ in segments]
    received = [0 for _ in segments]
    for rank in range(ranks):
        for source in range(ranks):
            if source == rank:
                continue
            for keys in segments[source]:
                needed = len(span(visible_keys(own, keys, window) for own in segments[rank]))
                sent[source] += needed
                received[rank] += needed
    return tuple(zip(sent, received))


def attention_messages(
    run: RunConfig, cp_comm_type: str, window: int | None
) -> tuple[Collectives, Collectives]:
    """Return attention's context-parallel collectives, forward and backward; p2p: on the rank that sends most.

    a2a: sequence to heads before attention, back after it. allgather: keys and values, again in backward, which reduce-scatters their
    gradients. p2p: keys per step, and in backward their FP32 gradients.
    """
    cp = run.cp
    elements = key_elements(run)
    if cp == 1:
        return (), ()
    if cp_comm_type == A2A:
        exchanges = tuple(
            Collective("all_to_all", "cp", size)
            for size in (qkv_bytes(run, cp_comm_type), context_bytes(run))
        )
        return exchanges, exchanges[::-1]
    if cp_comm_type == ALLGATHER:
        gather = Collective("all_gather", "cp", elements * run.element_bytes)
        return (gather,), (gather, Collective("reduce_scatter", "cp", cp * elements * FP32_BYTES))
    each = elements * cp // run.model.seq_length  # of one position, all samples
    sent, received = (
        max(row) * each // (cp - 1) for row in zip(*p2p_keys(run.model.seq_length, cp, window))
    )
    keys = (Collective("send", "cp", sent * run.element_bytes),) * (cp - 1)
    return keys, (*keys, *(Collective("send", "cp", received * FP32_BYTES),) * (cp - 1))


def key_working_bytes(run: RunConfig) -> int:
    """Return the temporary bytes in attention's backward if ranks exchange keys.

    The context's gradient, two tensors with width h and FP32 gradients exist around it. allgather: a rank's keys and summed gradients,
    and all ranks' keys and twice their gradients. p2p: own and received keys, summed gradients, and for each other rank three
    segments' gradients in flight.
    """
    cp = run.cp
    comm_types = {*run.cp_comm_types} - {A2A}
    if cp == 1 or not comm_types:
        return 0
    own = key_elements(run)
    low = run.element_bytes
    gathered = low + FP32_BYTES + cp * (low + 2 * FP32_BYTES)
    passed = 2 * low + FP32_BYTES + (cp - 1) * 3 * FP32_BYTES // 2
    around = 2 * run.activation_bytes + context_bytes(run) + qkv_bytes(run, P2P) // low * FP32_BYTES
    return around + own * (gathered if ALLGATHER in comm_types else passed)


def key_elements(run: RunConfig) -> int:
    return run.tokens_per_microbatch * run.model.query_groups // run.tp * run.model.key_value_size
