"""Collectives at two levels: first among the ranks inside each node, then between nodes, so that a node sends a sum once.

    split_levels(comm, inside)      the levels of comm where inside holds this rank's neighbours
    in_stages(comm, engine)         comm, its BF16 and FP16 sums by all-to-alls of few ranks each

k nodes with m ranks on each have k communicators inside nodes and m between them, of the ranks of one place on each node.
all_reduce: reduce_scatter inside, all_reduce between, all_gather inside; reduce_scatter: inside, then between; all_gather: between,
then inside. Each moves between nodes 1 / m of the bytes that a rank passes. all_to_all: rows for another node go to the rank of
this one that sends there, then in one message for each pair of nodes to the rank at its place, then to the ranks that they are for;
otherwise m x m messages would pass between two nodes.

A blocking verb goes through the levels' blocking verbs, so that inside a node all of a rank's threads add up. For a nonblocking one
the engine starts a level when the level before it is complete.

BF16 and FP16 sums are rounded once at each level. MPI's are an all-to-all, which is slow among many ranks because each message is
short. The same two levels over MANY ranks and more make it all-to-alls of at most MANY ranks, with as many bytes.

Left out: nodes with different numbers of ranks. Legend: p = k m ranks, n elements per rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .base import DONE, HALF, SUMMED_DTYPES, Comm, Handle, check, check_exchange, rows
from .engine import Engine, Steps

MANY = 64  # ranks of an all-to-all: among more of them rings were published to be faster
SMALL = 2**12  # elements of an all_reduce, up to which its latency counts and not its bytes
PIECE = (
    2**20
)  # elements that ranks of a node exchange at least in one call, where there are as many
Pair = tuple[int, int]  # the ranks that a row comes from and goes to
Calls = Iterator[
    tuple[Comm, str, tuple[Any, ...]]
]  # (communicator, blocking verb, operands), one after the other


@dataclass(frozen=True)
class Levels:
    """inside: the ranks of this node; between: those of this rank's place on each node.

    ranks: (m, k), the whole's rank at each place of each node.
    """

    inside: Comm
    between: Comm
    ranks: Tensor

    def pieces(self, n: int) -> Iterator[slice]:
        """Nodes whose ranks' parts of n elements, in shape (m, nodes, n), have about PIECE elements."""
        places, nodes = self.ranks.shape
        step = max(1, PIECE // max(1, places * n))
        return (slice(start, start + step) for start in range(0, nodes, step))

    def view(self, parts: Tensor, nodes: slice) -> Tensor | None:
        """The rows of `parts` (p, n) of those nodes' ranks in place, (m, n); None where they do not lie one after the other."""
        ranks = self.ranks[:, nodes]
        return (
            parts[ranks[0, 0] : ranks[-1, 0] + 1]
            if ranks.shape[1] == 1 and self.consecutive
            else None
        )

    def served(self, node: int, place: int) -> list[int]:
        """The other nodes that exchange rows with this one in one message each way, from and to its rank at `place`."""
        places, nodes = self.ranks.shape
        return [
            other for other in range(nodes) if other != node and (node + other) % places == place
        ]

    @cached_property
    def consecutive(self) -> bool:
        """Whether the ranks of each node follow one another."""
        return bool((self.ranks.diff(dim=0) == 1).all())


def split_levels(comm: Comm, inside: Comm) -> Levels | None:
    """The levels of `comm` whose ranks on this node are those of `inside`; None unless all nodes have as many. Collective."""
    sizes = comm.all_reduce(torch.tensor([inside.size, -inside.size]), "max")
    if sizes.sum():
        return None
    first = int(inside.broadcast(torch.tensor(comm.rank)))  # numbers the nodes alike at every place
    between = comm.split(inside.rank, first)
    places = comm.all_gather(
        torch.empty(comm.size, 2, dtype=torch.int64), torch.tensor([inside.rank, between.rank])
    )
    ranks = torch.empty(inside.size, between.size, dtype=torch.int64)
    ranks[places[:, 0], places[:, 1]] = torch.arange(comm.size)
    return Levels(inside, between, ranks)


def stage_ranks(ranks: int) -> int | None:
    """The ranks of each group of the first level of sums in stages: a divisor up to MANY with which a rank sends fewest messages.

    None: one stage, because there are at most MANY ranks, or because no such divisor exists.
    """
    divisors = [d for d in range(2, MANY + 1) if ranks % d == 0] if ranks > MANY else []
    return min(divisors, key=lambda d: d + ranks // d, default=None)


def in_stages(comm: Comm, engine: Engine) -> Comm:
    """`comm` with sums of BF16 and FP16 by all-to-alls of at most MANY ranks each, if that can be; else `comm`. Collective."""
    width = stage_ranks(comm.size)
    if width is None:
        return comm
    levels = split_levels(comm, comm.split(comm.rank // width, comm.rank))
    assert levels is not None, "groups of one size"
    return TwoLevelComm(
        comm, replace(levels, between=in_stages(levels.between, engine)), engine, HALF, moves=False
    )


class TwoLevelComm:
    """`whole` with sums of `dtypes` at two levels, and if `moves` all_gathers and all_to_alls, too; other verbs are the whole's."""

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

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)

    # The verbs: at two levels, or the whole's in the order in which they are called ----------------------------------------------

    def iall_reduce(self, tensor: Tensor, op: str = "sum") -> Handle:
        """Start an all_reduce of `tensor` (any shape) in place."""
        return self._start("all_reduce", self._sums(tensor, op), tensor, op)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce `tensor` (any shape) in place."""
        return self._do("all_reduce", self._sums(tensor, op), tensor, op)

    def ireduce_scatter(self, output: Tensor, tensor: Tensor) -> Handle:
        """Start a reduce_scatter of `tensor` (p * n,) into `output` (n,)."""
        return self._start("reduce_scatter", self._sums(tensor), output, tensor)

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Tensor:
        """Sum `tensor` (p * n,) over ranks, this rank's part into `output` (n,)."""
        return self._do("reduce_scatter", self._sums(tensor), output, tensor)

    def iall_gather(self, output: Tensor, tensor: Tensor) -> Handle:
        """Start an all_gather of `tensor` (n,) into `output` (p * n,)."""
        return self._start("all_gather", self._moves, output, tensor)

    def all_gather(self, output: Tensor, tensor: Tensor) -> Tensor:
        """Every rank's `tensor` (n,) in rank order into `output` (p * n,)."""
        return self._do("all_gather", self._moves, output, tensor)

    def iall_to_all(
        self, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Handle:
        """Start an all_to_all of the rows of `tensor` (n, ...) into `output` (m, ...)."""
        return self._start("all_to_all", self._moves, output, tensor, received, sent)

    def all_to_all(
        self, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Tensor:
        """Rows of `tensor` (n, ...) to every rank, and theirs into `output` (m, ...)."""
        return self._do("all_to_all", self._moves, output, tensor, received, sent)

    def _sums(self, tensor: Tensor, op: str = "sum") -> bool:
        return op == "sum" and tensor.dtype in self._dtypes

    def _start(self, verb: str, levels: bool, *operands: Any) -> Handle:
        if not levels:
            return getattr(self.whole, f"i{verb}")(*operands)
        self._last = self.engine.start(
            _nonblocking(getattr(self, f"_{verb}")(*operands)), self, operands
        )
        return self._last

    def _do(self, verb: str, levels: bool, *operands: Any) -> Tensor:
        """By the levels' blocking verbs, unless the engine still has an earlier collective of this communicator to do."""
        if not levels:
            return getattr(self.whole, verb)(*operands)
        if not self._last.done():
            self._start(verb, levels, *operands).wait()
            return operands[0]
        for comm, each, tensors in getattr(self, f"_{verb}")(*operands):
            getattr(comm, each)(*tensors)
        return operands[0]

    # What they are made of --------------------------------------------------------------------------------------------------------

    def _all_reduce(self, tensor: Tensor, op: str) -> Calls:
        flat = check(tensor).detach().view(-1)
        inside = self.levels.inside
        between = self.levels.between
        end = flat.numel() - flat.numel() % inside.size if flat.numel() > SMALL else 0
        if end:
            body = flat[:end]
            part = body.view(inside.size, -1)[inside.rank]
            yield inside, "reduce_scatter", (part, body)
            yield between, "all_reduce", (part,)
            yield inside, "all_gather", (body, part)
        if end < flat.numel():
            yield inside, "all_reduce", (flat[end:],)
            yield between, "all_reduce", (flat[end:],)

    def _reduce_scatter(self, output: Tensor, tensor: Tensor) -> Calls:
        parts = rows(tensor, output, self.size)
        levels = self.levels
        summed = parts.new_empty(levels.between.size, output.numel())  # (k, n)
        for nodes in levels.pieces(output.numel()):
            part = levels.view(parts, nodes)
            yield (
                levels.inside,
                "reduce_scatter",
                (summed[nodes], parts[levels.ranks[:, nodes]] if part is None else part),
            )
        yield levels.between, "reduce_scatter", (output, summed)

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Calls:
        parts = rows(output, tensor, self.size)
        levels = self.levels
        own = parts.new_empty(levels.between.size, tensor.numel())  # (k, n)
        yield levels.between, "all_gather", (own, tensor)
        for nodes in levels.pieces(tensor.numel()):
            part = levels.view(parts, nodes)
            ranks = levels.ranks[:, nodes]
            gathered = (
                parts.new_empty(*ranks.shape, tensor.numel()) if part is None else part
            )  # (m, nodes, n)
            yield levels.inside, "all_gather", (gathered, own[nodes])
            if part is None:
                parts[ranks] = gathered

    def _all_to_all(
        self, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Calls:
        check_exchange(output, tensor, received, sent, self.size)
        inside = self.levels.inside
        between = self.levels.between
        ranks = self.levels.ranks.T.tolist()
        own = tensor.detach()
        near = ranks[between.rank]
        place = inside.rank
        nodes = range(len(ranks))
        told = torch.empty(inside.size, 2, self.size, dtype=torch.int64)
        yield inside, "all_gather", (told, torch.tensor([sent, received]))
        numbers: dict[Pair, int] = {}  # of the rows of every pair with a rank of this node
        for rank, (leaving, coming) in zip(near, told.tolist(), strict=True):
            numbers |= {(rank, other): count for other, count in enumerate(leaving)}
            numbers |= {(other, rank): count for other, count in enumerate(coming)}
        held = {(self.rank, rank): part for rank, part in enumerate(own.split(list(sent)))}
        served = [self.levels.served(between.rank, i) for i in range(inside.size)]  # nodes

        def collected(sender: int, i: int) -> list[Pair]:
            return [
                (sender, rank)
                for rank in (near[i], *(rank for node in served[i] for rank in ranks[node]))
            ]

        def message(source: int, target: int) -> list[Pair]:
            return [(sender, rank) for sender in ranks[source] for rank in ranks[target]]

        def handed(i: int, rank: int) -> list[Pair]:
            return [(sender, rank) for node in served[i] for sender in ranks[node]]

        yield from _passed_on(
            inside,
            held,
            own[:0],
            numbers,
            [collected(self.rank, i) for i in range(inside.size)],
            [collected(rank, place) for rank in near],
        )
        if any(self.levels.served(node, place) for node in nodes):
            yield from _passed_on(
                between,
                held,
                own[:0],
                numbers,
                [message(between.rank, node) if node in served[place] else [] for node in nodes],
                [message(node, between.rank) if node in served[place] else [] for node in nodes],
            )
        yield from _passed_on(
            inside,
            held,
            own[:0],
            numbers,
            [handed(place, rank) for rank in near],
            [handed(i, self.rank) for i in range(inside.size)],
        )
        torch.cat([held[rank, self.rank] for rank in range(self.size)], out=output.detach())


def _passed_on(
    comm: Comm,
    held: dict[Pair, Tensor],
    none: Tensor,
    numbers: dict[Pair, int],
    leaving: list[list[Pair]],
    coming: list[list[Pair]],
) -> Calls:
    """Send rows of pairs that are `held`, leaving[i] to rank i of `comm`, and hold what comes, coming[i] from it. none: no row."""
    out, into = (
        [sum(numbers[pair] for pair in each) for each in pairs] for pairs in (leaving, coming)
    )
    rows = torch.cat([none, *(held.pop(pair) for each in leaving for pair in each)])
    result = none.new_empty(sum(into), *none.shape[1:])
    yield comm, "all_to_all", (result, rows, into, out)
    arrived = [pair for each in coming for pair in each]
    held.update(zip(arrived, result.split([numbers[pair] for pair in arrived]), strict=True))


def _nonblocking(calls: Calls) -> Steps:
    """Each call by its nonblocking form, when the one before is complete."""
    for comm, verb, operands in calls:
        handle = getattr(comm, f"i{verb}")(*operands)
        yield handle.done
        handle.wait()
