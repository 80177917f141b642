"""All-to-all of expert-parallel rows as autograd functions.

Shapes: n rows of this rank, m rows received, h hidden
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .autograd import apply_conjugates
from .base import DONE, Comm, Handle, rank_order_sum


@dataclass(frozen=True)
class AllToAll:
    """Row counts of an all-to-all: sent[i] rows to rank i, received[i] rows from rank i."""

    comm: Comm
    sent: Sequence[int]
    received: Sequence[int]

    @property
    def back(self) -> AllToAll:
        return AllToAll(self.comm, self.received, self.sent)

    def start(
        self, rows: Tensor, result: Tensor | None = None, blocking: bool = False
    ) -> tuple[Tensor, Handle]:
        """Start to send rows (n, ...); return the result (m, ...), valid when the handle is complete."""
        if result is None:
            result = rows.new_empty(sum(self.received), *rows.shape[1:])
        rows = rows.detach().contiguous()
        if not blocking:
            return result, self.comm.iall_to_all(result, rows, self.received, self.sent)
        self.comm.all_to_all(result, rows, self.received, self.sent)
        return result, DONE

    def send(self, rows: Tensor) -> Tensor:
        return self.start(rows, blocking=True)[0]

    def send_copies(self, rows: Tensor) -> Tensor:
        """Send all rows (n, ...) to every rank: -> (m, ...). Every count in `sent` is n."""
        return self.send(rows.expand(self.comm.size, *rows.shape).flatten(0, 1))

    def sum_copies(self, rows: Tensor) -> Tensor:
        """Sum rows (m, ...) computed from copies, in rank order, rounded once: -> (n, ...)."""
        returned = self.back.send(rows)
        terms = returned.view(self.comm.size, self.sent[0], *rows.shape[1:])
        return rank_order_sum(terms).to(rows.dtype)

    def unread_sum(self, rows: Tensor) -> Tensor:
        return rows.new_empty(1).expand(self.sent[0], *rows.shape[1:])


def copy_rows(rows: Tensor, exchange: AllToAll) -> Tensor:
    """Gather every rank's rows (n, h) -> (m, h); backward sums the copies' gradients."""
    if exchange.comm.size == 1:
        return rows
    return apply_conjugates(exchange.send_copies, exchange.sum_copies, rows)


def sum_copied_rows(rows: Tensor, exchange: AllToAll, needs_values: bool = True) -> Tensor:
    """Sum rows (m, h) computed from copies -> (n, h); backward sends gradients to all ranks."""
    if exchange.comm.size == 1:
        return rows
    forward = exchange.sum_copies if needs_values else exchange.unread_sum
    return apply_conjugates(forward, exchange.send_copies, rows)


class GroupedAllToAll:
    """Dispatch or combine by expert group, overlapped with computation in forward and backward.

        there = GroupedAllToAll(exchanges, overlaps=True)
        back = GroupedAllToAll(exchanges, overlaps=True)
        token = there.dispatch(rows, factors)                start all groups; rows are ordered by group
        for i in there.sequence:
            rows, factors = there.dispatched(i, token)       while later groups are in flight
            tokens.append(back.combine(i, computed(...)))
        rows = back.combined(tokens)

    In backward, gradients are sent in `combined` (last group first), received in `combine`, sent back in `dispatched`, and received in
    `dispatch`. An object serves one direction, once.

    overlaps: False uses blocking exchanges, on all threads of a rank inside a node
    sequence: order of groups, the same on all ranks
    """

    def __init__(
        self, exchanges: Sequence[AllToAll], overlaps: bool, sequence: Sequence[int] | None = None
    ) -> None:
        self.exchanges = exchanges
        self.overlaps = overlaps
        self.sequence = sequence or range(len(exchanges))
        self._sizes = [sum(each.sent) for each in exchanges]
        self._in_flight: dict[int, list[tuple[Tensor, Handle]]] = {}
        self._returned: list[Tensor] = []  # rows (n, ...) of all groups

    def dispatch(self, *rows: Tensor) -> Tensor:
        return apply_conjugates(self._start_dispatch, lambda _: self._wait_combine(), *rows)

    def dispatched(self, i: int, token: Tensor) -> tuple[Tensor, ...]:
        """Wait for group i; return its rows (m, ...), a tensor for each sent."""
        return apply_conjugates(
            lambda _: self._wait_dispatch(i), partial(self._start_combine, i), token
        )

    def combine(self, i: int, rows: Tensor, needs_values: bool = True) -> Tensor:
        """Start to send group i's rows (m, ...) back; return a token for `combined`."""
        return apply_conjugates(
            partial(self._start_combine, i, needs_values=needs_values),
            lambda _: self._wait_dispatch(i),
            rows,
        )

    def combined(self, tokens: Sequence[Tensor]) -> Tensor:
        def backward(gradient: Tensor) -> list[Tensor]:
            self._start_dispatch(gradient, last_first=True)
            return [torch.empty(0) for _ in tokens]

        return apply_conjugates(lambda *_: self._wait_combine()[0], backward, *tokens)

    # Steps of forward and backward; a start returns a token ------------------------------------------------------------------------

    def _start_dispatch(self, *rows: Tensor, last_first: bool = False) -> Tensor:
        groups = list(zip(*(each.split(self._sizes) for each in rows), strict=True))
        for i in reversed(self.sequence) if last_first else self.sequence:
            exchange = self.exchanges[i]
            self._in_flight[i] = [
                exchange.start(each, blocking=not self.overlaps) for each in groups[i]
            ]
        return torch.empty(0)

    def _wait_dispatch(self, i: int) -> tuple[Tensor, ...]:
        return _complete(self._in_flight.pop(i))

    def _start_combine(self, i: int, *rows: Tensor, needs_values: bool = True) -> Tensor:
        n = sum(self._sizes)
        exchange = self.exchanges[i].back
        if not needs_values:
            self._returned = [each.new_empty(1).expand(n, *each.shape[1:]) for each in rows]
            return torch.empty(0)
        self._returned = self._returned or [each.new_empty(n, *each.shape[1:]) for each in rows]
        self._in_flight[i] = [
            exchange.start(each, result.split(self._sizes)[i], not self.overlaps)
            for each, result in zip(rows, self._returned, strict=True)
        ]
        return torch.empty(0)

    def _wait_combine(self) -> tuple[Tensor, ...]:
        _complete([each for group in self._in_flight.values() for each in group])
        results = tuple(self._returned)
        self._returned = []
        self._in_flight = {}
        return results


def _complete(in_flight: list[tuple[Tensor, Handle]]) -> tuple[Tensor, ...]:
    for _, handle in in_flight:
        handle.wait()
    return tuple(result for result, _ in in_flight)
