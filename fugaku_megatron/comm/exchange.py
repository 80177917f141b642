"""Rows that ranks send each other, as many to each as they have for it: the all-to-all of experts, as autograd functions.

    exchange_rows         forward all-to-all                         backward the all-to-all back
    copy_rows             forward all rows to every rank             backward sum of the gradients of all copies
    sum_copied_rows       forward sum over what ranks made of them   backward all gradients to every rank
    OverlappedExchange    exchange_rows in two calls, overlapped with what is computed between them

Left out: which rows go where (`nn.experts`).
Shapes: n rows of this rank, m rows that come to it, h hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from .base import Comm, Handle, rank_order_sum


@dataclass(frozen=True)
class Exchange:
    """Rows that the ranks of `comm` send each other: sent[i] to rank i and received[i] from it, both in the order of ranks."""

    comm: Comm
    sent: Sequence[int]
    received: Sequence[int]

    @property
    def back(self) -> Exchange:
        """The same rows on their way back."""
        return Exchange(self.comm, self.received, self.sent)

    def start(self, rows: Tensor) -> tuple[Tensor, Handle]:
        """Start to send rows (n, ...). The result (m, ...) is there when the handle says so."""
        result = rows.new_empty(sum(self.received), *rows.shape[1:])
        return result, self.comm.iall_to_all(result, rows.detach().contiguous(), self.received, self.sent)

    def send(self, rows: Tensor) -> Tensor:
        """rows (n, ...) -> (m, ...)."""
        result = rows.new_empty(sum(self.received), *rows.shape[1:])
        return self.comm.all_to_all(result, rows.detach().contiguous(), self.received, self.sent)

    def send_copies(self, rows: Tensor) -> Tensor:
        """rows (n, ...) of every rank -> (m, ...): all of them go to every rank, each of `sent` is n."""
        return self.send(rows.repeat(self.comm.size, *[1] * (rows.dim() - 1)))

    def sum_copies(self, rows: Tensor) -> Tensor:
        """rows (m, ...), what this rank made of the copies -> (n, ...): the sum over ranks in their order, rounded once."""
        parts = self.back.send(rows)
        return rank_order_sum(parts.view(self.comm.size, self.sent[0], *rows.shape[1:])).to(rows.dtype)

    def unread(self, rows: Tensor) -> Tensor:
        """In place of `send`, where nobody reads the result: rows (n, ...) -> (m, ...)."""
        return rows.new_empty(1).expand(sum(self.received), *rows.shape[1:])

    def unread_sum(self, rows: Tensor) -> Tensor:
        """In place of `sum_copies`, where nobody reads the result: rows (m, ...) -> (n, ...)."""
        return rows.new_empty(1).expand(self.sent[0], *rows.shape[1:])


class _Mapping(Function):
    """forward(rows), and backward(grad) on the gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.other_way = backward
        return forward(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.other_way(grad), None, None


def map_rows(rows: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Tensor:
    """forward(rows), whose gradient is backward(grad). Rows of any shape."""
    return _Mapping.apply(rows, forward, backward)


def exchange_rows(rows: Tensor, exchange: Exchange, needs_values: bool = True) -> Tensor:
    """rows (n, h) -> (m, h); gradients are sent back. needs_values: see `autograd.reduce_scatter_to_sequence_parallel`."""
    return map_rows(rows, exchange.send if needs_values else exchange.unread, exchange.back.send)


def copy_rows(rows: Tensor, exchange: Exchange) -> Tensor:
    """rows (n, h) of every rank -> (m, h), all of them on each; gradients are summed over the copies."""
    return rows if exchange.comm.size == 1 else map_rows(rows, exchange.send_copies, exchange.sum_copies)


def sum_copied_rows(rows: Tensor, exchange: Exchange, needs_values: bool = True) -> Tensor:
    """rows (m, h), made of copies -> (n, h), their sum over ranks; gradients go to all. needs_values: see `exchange_rows`."""
    if exchange.comm.size == 1:
        return rows
    return map_rows(rows, exchange.sum_copies if needs_values else exchange.unread_sum, exchange.send_copies)


class OverlappedExchange:
    """Tensors on their way in one exchange, while something else is computed, in forward and in backward.

        overlapped = OverlappedExchange(exchange)
        token = overlapped.start(rows, factors)
        ...                                          what does not read them
        rows, factors = overlapped.finish(token)

    In backward the gradients leave where `finish` was called and arrive where `start` was. Autograd goes backwards through a
    program, so it computes the gradients of what lies between the two meanwhile.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self._coming: list[tuple[Tensor, Handle]] = []

    def start(self, *rows: Tensor) -> Tensor:
        """Start to send rows (n, ...). The result is for `finish`."""
        return _Start.apply(self, *rows)

    def finish(self, token: Tensor) -> tuple[Tensor, ...]:
        """What has come of each tensor, (m, ...)."""
        return _Finish.apply(self, token)

    def send(self, exchange: Exchange, rows: Sequence[Tensor]) -> None:
        """Start to send each of `rows` (n, ...)."""
        self._coming = [exchange.start(each) for each in rows]

    def arrived(self) -> tuple[Tensor, ...]:
        """All results (m, ...), when they are there."""
        for _, handle in self._coming:
            handle.wait()
        results, self._coming = tuple(result for result, _ in self._coming), []
        return results


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, overlapped: OverlappedExchange, *rows: Tensor) -> Tensor:
        ctx.overlapped = overlapped
        overlapped.send(overlapped.exchange, rows)
        return torch.empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.overlapped.arrived()


class _Finish(Function):
    @staticmethod
    def forward(ctx: Any, overlapped: OverlappedExchange, token: Tensor) -> tuple[Tensor, ...]:
        ctx.overlapped = overlapped
        return overlapped.arrived()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        ctx.overlapped.send(ctx.overlapped.exchange.back, grads)
        return None, torch.empty(0)
