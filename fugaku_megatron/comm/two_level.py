"""Collectives first among the ranks inside a node, then between nodes, so that a node sends a sum once.

    all_reduce       reduce_scatter inside, all_reduce between, all_gather inside
    reduce_scatter   inside, then between
    all_gather       between, then inside
    all_to_all       to the local rank that sends to the target node; one message per pair of nodes; to the target rank

m ranks on each of k nodes have k communicators inside and m between (ranks with one index on each node).
BF16 and FP16 sums are rounded once a level. p = k m ranks
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .base import DONE, HALF, SUMMED_DTYPES, Comm, Handle, check, check_exchange, rows
from .engine import Engine, Steps

MANY = 64  # ranks of an all-to-all, beyond which rings were published to be faster
SMALL = 2**12  # elements of an all_reduce up to which latency dominates
PIECE = 2**20  # elements that a node's ranks exchange in one call, at least
Pair = tuple[int, int]  # (source, target) rank of rows
Calls = Iterator[tuple[Comm, str, tuple[Any, ...]]]  # (communicator, blocking verb, operands)


@dataclass(frozen=True)
class Levels:
    """Communicators inside this node, and between ranks with one index on each node.

    ranks: (m, k), whole communicator's rank at each index of each node
    """

    inside: Comm
    between: Comm
    ranks: Tensor

    def pieces(self, n: int) -> Iterator[slice]:
        ranks_per_node, nodes = self.ranks.shape
        step = max(1, PIECE // max(1, ranks_per_node * n))
        return (slice(start, start + step) for start in range(0, nodes, step))

    def view(self, parts: Tensor, nodes: slice) -> Tensor | None:
        """Return the rows (m, n) of `parts` (p, n) for these nodes, or None if not contiguous."""
        ranks = self.ranks[:, nodes]
        if ranks.shape[1] == 1 and self.consecutive:
            return parts[ranks[0, 0] : ranks[-1, 0] + 1]
        return None

    def served(self, node: int, place: int) -> list[int]:
        ranks_per_node, nodes = self.ranks.shape
        others = (other for other in range(nodes) if other != node)
        return [other for other in others if (node + other) % ranks_per_node == place]

    @cached_property
    def consecutive(self) -> bool:
        return bool((self.ranks.diff(dim=0) == 1).all())


def split_levels(comm: Comm, inside: Comm) -> Levels | None:
    """Build the levels, given this node's ranks; None unless all nodes have as many ranks. Collective."""
    sizes = comm.all_reduce(torch.tensor([inside.size, -inside.size]), "max")
    if sizes.sum():
        return None
    first = int(inside.broadcast(torch.tensor(comm.rank)))  # orders the nodes alike on all ranks
    between = comm.split(inside.rank, first)
    coords = torch.empty(comm.size, 2, dtype=torch.int64)
    comm.all_gather(coords, torch.tensor([inside.rank, between.rank]))
    ranks = torch.empty(inside.size, between.size, dtype=torch.int64)
    ranks[coords[:, 0], coords[:, 1]] = torch.arange(comm.size)
    return Levels(inside, between, ranks)


def stage_ranks(ranks: int) -> int | None:
    """Return the first level's size for sums in stages: the divisor up to MANY with the fewest messages per rank.

    None for a single stage: at most MANY ranks, or no such divisor.
    """
    if ranks <= MANY:
        return None
    divisors = [d for d in range(2, MANY + 1) if ranks % d == 0]
    return min(divisors, key=lambda d: d + ranks // d, default=None)


def in_stages(comm: Comm, engine: Engine) -> Comm:
    """Return `comm` with BF16 and FP16 sums by all-to-alls of at most MANY ranks, if its size permits. Collective.

    Among more ranks messages are short and therefore slow.
    """
    width = stage_ranks(comm.size)
    if width is None:
        return comm
    levels = split_levels(comm, comm.split(comm.rank // width, comm.rank))
    assert levels is not None, "groups of one size"
    levels = replace(levels, between=in_stages(levels.between, engine))
    return TwoLevelComm(comm, levels, engine, HALF, moves=False)


class TwoLevelComm:
    """`whole` with two-level sums of `dtypes`, and all_gathers and all_to_alls if `moves`."""

    def __init__(
        self,
        whole: Comm,
        levels: Levels,
        engine: Engine,
        dtypes: tuple[torch.dtype, ...] = SUMMED_DTYPES,
        moves: bool = True,
    ) -> None:
        self.whole = whole
        self.levels = levels
        self.engine = engine
        self.rank = whole.rank
        self.size = whole.size
        self._dtypes = dtypes
        self._moves = moves
        self._last: Handle = DONE
        self._blocks = False  # the caller of the collective waits for it

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)

    def free(self) -> None:
        """Free the communicators of both levels and the whole one. Collective."""
        for comm in (self.levels.inside, self.levels.between, self.whole):
            comm.free()

    # Collectives at two levels, or the whole communicator's -----------------------------------------------------------------------

    def iall_reduce(self, tensor: Tensor, op: str = "sum") -> Handle:
        return self._start("all_reduce", self._sums(tensor, op), tensor, op)

    def ireduce_scatter(self, output: Tensor, tensor: Tensor) -> Handle:
        return self._start("reduce_scatter", self._sums(tensor), output, tensor)

    def iall_gather(self, output: Tensor, tensor: Tensor) -> Handle:
        return self._start("all_gather", self._moves, output, tensor)

    def iall_to_all(
        self, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Handle:
        return self._start("all_to_all", self._moves, output, tensor, received, sent)

    all_reduce = Comm.all_reduce
    reduce_scatter = Comm.reduce_scatter
    all_gather = Comm.all_gather
    all_to_all = Comm.all_to_all

    def _sums(self, tensor: Tensor, op: str = "sum") -> bool:
        return op == "sum" and tensor.dtype in self._dtypes

    def _start(self, verb: str, levels: bool, *operands: Any) -> Handle:
        if not levels:
            handle: Handle = getattr(self.whole, f"i{verb}")(*operands)
            return handle
        calls: Calls = getattr(self, f"_{verb}")(*operands)
        if not self._blocks:
            self._last = self.engine.start(_nonblocking(calls), self, operands)
            return self._last
        for comm, each, tensors in calls:
            getattr(comm, each)(*tensors)
        return DONE

    def _wait(self, start: Callable[..., Handle], output: Tensor, *operands: Any) -> Tensor:
        self._blocks = self._last.done()
        try:
            start(output, *operands).wait()
        finally:
            self._blocks = False
        return output

    # Calls of each collective -----------------------------------------------------------------------------------------------------

    def _all_reduce(self, tensor: Tensor, op: str) -> Calls:
        flat = check(tensor).detach().view(-1)
        inside = self.levels.inside
        between = self.levels.between
        end = flat.numel() - flat.numel() % inside.size if flat.numel() > SMALL else 0
        if end:
            body = flat[:end]
            own = body.view(inside.size, -1)[inside.rank]
            yield inside, "reduce_scatter", (own, body)
            yield between, "all_reduce", (own,)
            yield inside, "all_gather", (body, own)
        if end < flat.numel():
            yield inside, "all_reduce", (flat[end:],)
            yield between, "all_reduce", (flat[end:],)

    def _reduce_scatter(self, output: Tensor, tensor: Tensor) -> Calls:
        parts = rows(tensor, output, self.size)
        levels = self.levels
        summed = parts.new_empty(levels.between.size, output.numel())  # (k, n)
        for nodes in levels.pieces(output.numel()):
            sent = levels.view(parts, nodes)
            if sent is None:
                sent = parts[levels.ranks[:, nodes]]
            yield levels.inside, "reduce_scatter", (summed[nodes], sent)
        yield levels.between, "reduce_scatter", (output, summed)

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Calls:
        parts = rows(output, tensor, self.size)
        levels = self.levels
        own = parts.new_empty(levels.between.size, tensor.numel())  # (k, n)
        yield levels.between, "all_gather", (own, tensor)
        for nodes in levels.pieces(tensor.numel()):
            view = levels.view(parts, nodes)
            if view is not None:
                yield levels.inside, "all_gather", (view, own[nodes])
                continue
            ranks = levels.ranks[:, nodes]
            gathered = parts.new_empty(*ranks.shape, tensor.numel())  # (m, nodes, n)
            yield levels.inside, "all_gather", (gathered, own[nodes])
            parts[ranks] = gathered

    def _all_to_all(
        self, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Calls:
        check_exchange(output, tensor, received, sent, self.size)
        inside = self.levels.inside
        between = self.levels.between
        ranks = self.levels.ranks.T.tolist()
        own = tensor.detach()
        local_ranks = ranks[between.rank]
        place = inside.rank
        nodes = range(len(ranks))
        gathered = torch.empty(inside.size, 2, self.size, dtype=torch.int64)
        yield inside, "all_gather", (gathered, torch.tensor([sent, received]))
        counts: dict[Pair, int] = {}  # rows of every pair with a rank of this node
        for rank, (sent_by_rank, received_by_rank) in zip(
            local_ranks, gathered.tolist(), strict=True
        ):
            counts |= {(rank, other): count for other, count in enumerate(sent_by_rank)}
            counts |= {(other, rank): count for other, count in enumerate(received_by_rank)}
        segments = {(self.rank, rank): rows for rank, rows in enumerate(own.split(list(sent)))}
        relay = _Relay(own[:0], counts, segments)
        served = [self.levels.served(between.rank, i) for i in range(inside.size)]  # nodes

        def to_sender(source: int, i: int) -> list[Pair]:
            distant = (rank for node in served[i] for rank in ranks[node])
            return [(source, rank) for rank in (local_ranks[i], *distant)]

        def to_node(source: int, target: int) -> list[Pair]:
            return [(sender, rank) for sender in ranks[source] for rank in ranks[target]]

        def to_target(i: int, target: int) -> list[Pair]:
            return [(sender, target) for node in served[i] for sender in ranks[node]]

        yield from relay.exchange(
            inside,
            [to_sender(self.rank, i) for i in range(inside.size)],
            [to_sender(rank, place) for rank in local_ranks],
        )
        if any(self.levels.served(node, place) for node in nodes):
            yield from relay.exchange(
                between,
                [to_node(between.rank, node) if node in served[place] else [] for node in nodes],
                [to_node(node, between.rank) if node in served[place] else [] for node in nodes],
            )
        yield from relay.exchange(
            inside,
            [to_target(place, rank) for rank in local_ranks],
            [to_target(i, self.rank) for i in range(inside.size)],
        )
        torch.cat([segments[rank, self.rank] for rank in range(self.size)], out=output.detach())


@dataclass
class _Relay:
    """Rows on the way from source to target ranks.

    empty: a tensor without rows
    counts: rows of each pair
    """

    empty: Tensor
    counts: dict[Pair, int]
    segments: dict[Pair, Tensor]

    def exchange(self, comm: Comm, outgoing: list[list[Pair]], incoming: list[list[Pair]]) -> Calls:
        sent = [sum(self.counts[pair] for pair in pairs) for pairs in outgoing]
        received = [sum(self.counts[pair] for pair in pairs) for pairs in incoming]
        leaving = (self.segments.pop(pair) for pairs in outgoing for pair in pairs)
        rows = torch.cat([self.empty, *leaving])
        result = self.empty.new_empty(sum(received), *self.empty.shape[1:])
        yield comm, "all_to_all", (result, rows, received, sent)
        arrived = [pair for pairs in incoming for pair in pairs]
        segments = result.split([self.counts[pair] for pair in arrived])
        self.segments.update(zip(arrived, segments, strict=True))


def _nonblocking(calls: Calls) -> Steps:
    for comm, verb, operands in calls:
        handle = getattr(comm, f"i{verb}")(*operands)
        yield handle.done
        handle.wait()
