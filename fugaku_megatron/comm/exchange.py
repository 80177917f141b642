"""All-to-all of expert-parallel rows as autograd functions.

    copy_rows            forward rows to every rank                 backward sum of all copies' gradients
    sum_copied_rows      forward sum over ranks                     backward gradients to every rank
    GroupedExchange      dispatch or combine group by group, overlapped with other groups' computation

Shapes: n rows of this rank, m rows received, h hidden
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from .base import DONE, Comm, Handle, rank_order_sum


@dataclass(frozen=True)
class Exchange:
    """Row counts of an all-to-all: sent[i] rows to rank i of `comm`, received[i] rows from rank i."""

    comm: Comm
    sent: Sequence[int]
    received: Sequence[int]

    @property
    def back(self) -> Exchange:
        """The reverse exchange."""
        return Exchange(self.comm, self.received, self.sent)

    def start(
        self, rows: Tensor, result: Tensor | None = None, blocking: bool = False
    ) -> tuple[Tensor, Handle]:
        """Start to send rows (n, ...); return the result (m, ...), valid when the handle is complete.

        result: memory for the result, by default a new tensor
        """
        result = rows.new_empty(sum(self.received), *rows.shape[1:]) if result is None else result
        operands = result, rows.detach().contiguous(), self.received, self.sent
        if not blocking:
            return result, self.comm.iall_to_all(*operands)
        return self.comm.all_to_all(*operands), DONE

    def send(self, rows: Tensor) -> Tensor:
        """Send rows: (n, ...) -> (m, ...)."""
        return self.start(rows, blocking=True)[0]

    def send_copies(self, rows: Tensor) -> Tensor:
        """Send all rows (n, ...) to every rank: -> (m, ...). Every count in `sent` is n."""
        return self.send(rows.repeat(self.comm.size, *[1] * (rows.dim() - 1)))

    def sum_copies(self, rows: Tensor) -> Tensor:
        """Sum rows (m, ...) computed from copies over ranks, in rank order, rounded once: -> (n, ...)."""
        returned = self.back.send(rows)
        terms = returned.view(self.comm.size, self.sent[0], *rows.shape[1:])
        return rank_order_sum(terms).to(rows.dtype)

    def unread_sum(self, rows: Tensor) -> Tensor:
        """Return a placeholder for an unread `sum_copies`: (m, ...) -> (n, ...)."""
        return rows.new_empty(1).expand(self.sent[0], *rows.shape[1:])


class _Mapping(Function):
    """forward(rows), with backward(grad) as its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        forward: Callable[[Tensor], Tensor],
        backward: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.conjugate = backward
        return forward(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.conjugate(grad), None, None


def map_rows(
    rows: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return forward(rows), whose gradient is backward(grad). Rows of any shape."""
    return _Mapping.apply(rows, forward, backward)


def copy_rows(rows: Tensor, exchange: Exchange) -> Tensor:
    """Gather every rank's rows (n, h) -> (m, h); backward sums the copies' gradients."""
    if exchange.comm.size == 1:
        return rows
    return map_rows(rows, exchange.send_copies, exchange.sum_copies)


def sum_copied_rows(rows: Tensor, exchange: Exchange, needs_values: bool = True) -> Tensor:
    """Sum rows (m, h) computed from copies over ranks -> (n, h); backward sends gradients to all ranks.

    needs_values: see `autograd.reduce_scatter_to_sequence_parallel`
    """
    if exchange.comm.size == 1:
        return rows
    forward = exchange.sum_copies if needs_values else exchange.unread_sum
    return map_rows(rows, forward, exchange.send_copies)


class GroupedExchange:
    """Dispatch or combine by expert group, overlapped with computation in forward and backward.

        dispatch, combine = (GroupedExchange(exchanges, True) for _ in range(2))
        token = dispatch.leave(rows, factors)                start all groups; rows (n, ...) are ordered by group
        ...                                                  computation that does not read the rows
        for i in dispatch.sequence:
            rows, factors = dispatch.arrived(i, token)       (m, ...), while later groups are on their way
            tokens.append(combine.send_back(i, computed(...)))
        rows = combine.returned(tokens)                      (n, ...) of all groups

    In backward, gradients are sent in `returned` (last group first), waited for in `send_back`, returned in `arrived`, and collected in
    `leave`. An object serves one direction, once.

    overlaps: False uses blocking exchanges, which inside a node run on all threads of a rank
    sequence: order in which groups are sent and computed, the same on all ranks
    """

    def __init__(
        self, exchanges: Sequence[Exchange], overlaps: bool, sequence: Sequence[int] | None = None
    ) -> None:
        self.exchanges = exchanges
        self.overlaps = overlaps
        self.sequence = sequence or range(len(exchanges))
        self._sizes = [sum(each.sent) for each in exchanges]
        self._in_flight: dict[int, list[tuple[Tensor, Handle]]] = {}
        self._returned: list[Tensor] = []  # rows (n, ...) of all groups

    def leave(self, *rows: Tensor) -> Tensor:
        """Start to send rows (n, ...); pass the result to `arrived`."""
        return _Leave.apply(self, *rows)

    def arrived(self, i: int, token: Tensor) -> tuple[Tensor, ...]:
        """Return the received rows (m, ...) of group i, one tensor for each tensor sent."""
        return _Arrive.apply(self, i, token)

    def send_back(self, i: int, rows: Tensor, needs_values: bool = True) -> Tensor:
        """Start to return rows (m, ...) of group i; pass the result to `returned`. needs_values: see `sum_copied_rows`."""
        return _SendBack.apply(self, i, rows, needs_values)

    def returned(self, tokens: Sequence[Tensor]) -> Tensor:
        """Return the rows (n, ...) of all groups."""
        return _Return.apply(self, *tokens)

    # Steps of the autograd functions below ----------------------------------------------------------------------------------------

    def start_dispatch(self, rows: Sequence[Tensor], last_first: bool = False) -> None:
        """Start to send each tensor in `rows` (n, ...)."""
        groups = list(zip(*(each.split(self._sizes) for each in rows), strict=True))
        for i in reversed(self.sequence) if last_first else self.sequence:
            self._in_flight[i] = [
                self.exchanges[i].start(each, blocking=not self.overlaps) for each in groups[i]
            ]

    def wait_dispatch(self, i: int) -> tuple[Tensor, ...]:
        """Return the rows (m, ...) of group i."""
        return _complete(self._in_flight.pop(i))

    def start_combine(self, i: int, rows: Sequence[Tensor], needs_values: bool = True) -> None:
        """Start to return each tensor in `rows` (m, ...) of group i."""
        n = sum(self._sizes)
        exchange = self.exchanges[i].back
        if not needs_values:
            self._returned = [each.new_empty(1).expand(n, *each.shape[1:]) for each in rows]
            return
        self._returned = self._returned or [each.new_empty(n, *each.shape[1:]) for each in rows]
        self._in_flight[i] = [
            exchange.start(each, result.split(self._sizes)[i], not self.overlaps)
            for each, result in zip(rows, self._returned, strict=True)
        ]

    def wait_combine(self) -> tuple[Tensor, ...]:
        """Return the rows (n, ...) of all groups."""
        _complete([each for group in self._in_flight.values() for each in group])
        results = tuple(self._returned)
        self._returned = []
        self._in_flight = {}
        return results


def _complete(in_flight: list[tuple[Tensor, Handle]]) -> tuple[Tensor, ...]:
    for _, handle in in_flight:
        handle.wait()
    return tuple(result for result, _ in in_flight)


class _Leave(Function):
    @staticmethod
    def forward(ctx: Any, grouped: GroupedExchange, *rows: Tensor) -> Tensor:
        ctx.grouped = grouped
        grouped.start_dispatch(rows)
        return torch.empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.grouped.wait_combine()


class _Arrive(Function):
    @staticmethod
    def forward(ctx: Any, grouped: GroupedExchange, i: int, token: Tensor) -> tuple[Tensor, ...]:
        ctx.grouped = grouped
        ctx.i = i
        return grouped.wait_dispatch(i)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor]:
        ctx.grouped.start_combine(ctx.i, grads)
        return None, None, torch.empty(0)


class _SendBack(Function):
    @staticmethod
    def forward(
        ctx: Any, grouped: GroupedExchange, i: int, rows: Tensor, needs_values: bool
    ) -> Tensor:
        ctx.grouped = grouped
        ctx.i = i
        grouped.start_combine(i, (rows,), needs_values)
        return torch.empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[None, None, Tensor, None]:
        return None, None, *ctx.grouped.wait_dispatch(ctx.i), None


class _Return(Function):
    @staticmethod
    def forward(ctx: Any, grouped: GroupedExchange, *tokens: Tensor) -> Tensor:
        ctx.grouped = grouped
        ctx.groups = len(tokens)
        return grouped.wait_combine()[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.grouped.start_dispatch((grad,), last_first=True)
        return None, *[torch.empty(0)] * ctx.groups
