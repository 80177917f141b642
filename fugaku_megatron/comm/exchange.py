"""Rows that ranks send each other, as many to each as they have for it: the all-to-all of experts, as autograd functions.

    copy_rows            forward all rows to every rank             backward sum of the gradients of all copies
    sum_copied_rows      forward sum over what ranks made of them   backward all gradients to every rank
    GroupedExchange      an all-to-all there or back, group by group, overlapped with what is computed of other groups

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

from .base import DONE, Comm, Handle, rank_order_sum


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

    def start(
        self, rows: Tensor, result: Tensor | None = None, blocking: bool = False
    ) -> tuple[Tensor, Handle]:
        """Start to send rows (n, ...). The result (m, ...), a new tensor by default, is there when the handle says so."""
        result = rows.new_empty(sum(self.received), *rows.shape[1:]) if result is None else result
        operands = result, rows.detach().contiguous(), self.received, self.sent
        if not blocking:
            return result, self.comm.iall_to_all(*operands)
        return self.comm.all_to_all(*operands), DONE

    def send(self, rows: Tensor) -> Tensor:
        """rows (n, ...) -> (m, ...)."""
        return self.start(rows, blocking=True)[0]

    def send_copies(self, rows: Tensor) -> Tensor:
        """rows (n, ...) of every rank -> (m, ...): all of them go to every rank, each of `sent` is n."""
        return self.send(rows.repeat(self.comm.size, *[1] * (rows.dim() - 1)))

    def sum_copies(self, rows: Tensor) -> Tensor:
        """rows (m, ...), what this rank made of the copies -> (n, ...): the sum over ranks in their order, rounded once."""
        parts = self.back.send(rows)
        return rank_order_sum(parts.view(self.comm.size, self.sent[0], *rows.shape[1:])).to(
            rows.dtype
        )

    def unread_sum(self, rows: Tensor) -> Tensor:
        """In place of `sum_copies`, where nobody reads the result: rows (m, ...) -> (n, ...)."""
        return rows.new_empty(1).expand(self.sent[0], *rows.shape[1:])


class _Mapping(Function):
    """forward(rows), and backward(grad) on the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        forward: Callable[[Tensor], Tensor],
        backward: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.other_way = backward
        return forward(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.other_way(grad), None, None


def map_rows(
    rows: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
) -> Tensor:
    """forward(rows), whose gradient is backward(grad). Rows of any shape."""
    return _Mapping.apply(rows, forward, backward)


def copy_rows(rows: Tensor, exchange: Exchange) -> Tensor:
    """rows (n, h) of every rank -> (m, h), all of them on each; gradients are summed over the copies."""
    return (
        rows
        if exchange.comm.size == 1
        else map_rows(rows, exchange.send_copies, exchange.sum_copies)
    )


def sum_copied_rows(rows: Tensor, exchange: Exchange, needs_values: bool = True) -> Tensor:
    """rows (m, h), made of copies -> (n, h), their sum over ranks; gradients go to all.

    needs_values: see `autograd.reduce_scatter_to_sequence_parallel`.
    """
    if exchange.comm.size == 1:
        return rows
    return map_rows(
        rows, exchange.sum_copies if needs_values else exchange.unread_sum, exchange.send_copies
    )


class GroupedExchange:
    """Rows on their way there or back in one exchange after another, while something else is computed, in forward and in backward.

        there, back = (GroupedExchange(exchanges, True) for _ in range(2))
        token = there.leave(rows, factors)                   all groups leave, rows (n, ...) of one after those of another
        ...                                                  what does not read them
        for i in there.sequence:
            rows, factors = there.arrived(i, token)          (m, ...), while the groups after it are on their way
            tokens.append(back.send_back(i, computed(...)))
        rows = back.returned(tokens)                         (n, ...) of all groups

    Autograd goes backwards through a program: gradients leave, last group first, where `returned` was called, are waited for where
    `send_back` was, sent back where `arrived` was, and all there where `leave` was. Each object is for one way, and used once.
    overlaps: whether anything is computed meanwhile. Otherwise exchanges block, and inside a node use all threads of a rank.
    sequence: the numbers of the groups in the order in which they are sent and computed, the same on all ranks.
    """

    def __init__(
        self, exchanges: Sequence[Exchange], overlaps: bool, sequence: Sequence[int] | None = None
    ) -> None:
        self.exchanges = exchanges
        self.overlaps = overlaps
        self.sequence = sequence or range(len(exchanges))
        self._sizes = [sum(each.sent) for each in exchanges]
        self._coming: dict[int, list[tuple[Tensor, Handle]]] = {}
        self._home: list[Tensor] = []  # rows of all groups, (n, ...), as they come back

    def leave(self, *rows: Tensor) -> Tensor:
        """Start to send rows (n, ...). The result is for `arrived`."""
        return _Leave.apply(self, *rows)

    def arrived(self, i: int, token: Tensor) -> tuple[Tensor, ...]:
        """What has come of each tensor for group i, (m, ...)."""
        return _Arrive.apply(self, i, token)

    def send_back(self, i: int, rows: Tensor, needs_values: bool = True) -> Tensor:
        """Start to send rows (m, ...) of group i back. The result is for `returned`. needs_values: see `sum_copied_rows`."""
        return _SendBack.apply(self, i, rows, needs_values)

    def returned(self, tokens: Sequence[Tensor]) -> Tensor:
        """The rows of all groups, (n, ...)."""
        return _Return.apply(self, *tokens)

    # The same without gradients, which go the other way ---------------------------------------------------------------------------

    def start_there(self, rows: Sequence[Tensor], last_first: bool = False) -> None:
        """Start to send each of `rows` (n, ...)."""
        groups = list(zip(*(each.split(self._sizes) for each in rows), strict=True))
        for i in reversed(self.sequence) if last_first else self.sequence:
            self._coming[i] = [
                self.exchanges[i].start(each, None, not self.overlaps) for each in groups[i]
            ]

    def wait_there(self, i: int) -> tuple[Tensor, ...]:
        """The rows of group i, (m, ...)."""
        return _complete(self._coming.pop(i))

    def start_back(self, i: int, rows: Sequence[Tensor], needs_values: bool = True) -> None:
        """Start to send each of `rows` (m, ...) of group i."""
        n = sum(self._sizes)
        exchange = self.exchanges[i].back
        if not needs_values:
            self._home = [each.new_empty(1).expand(n, *each.shape[1:]) for each in rows]
            return
        self._home = self._home or [each.new_empty(n, *each.shape[1:]) for each in rows]
        self._coming[i] = [
            exchange.start(each, home.split(self._sizes)[i], not self.overlaps)
            for each, home in zip(rows, self._home, strict=True)
        ]

    def wait_back(self) -> tuple[Tensor, ...]:
        """The rows of all groups, (n, ...)."""
        _complete([each for group in self._coming.values() for each in group])
        results = tuple(self._home)
        self._home = []
        self._coming = {}
        return results


def _complete(coming: list[tuple[Tensor, Handle]]) -> tuple[Tensor, ...]:
    for _, handle in coming:
        handle.wait()
    return tuple(result for result, _ in coming)


class _Leave(Function):
    @staticmethod
    def forward(ctx: Any, grouped: GroupedExchange, *rows: Tensor) -> Tensor:
        ctx.grouped = grouped
        grouped.start_there(rows)
        return torch.empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.grouped.wait_back()


class _Arrive(Function):
    @staticmethod
    def forward(ctx: Any, grouped: GroupedExchange, i: int, token: Tensor) -> tuple[Tensor, ...]:
        ctx.grouped = grouped
        ctx.i = i
        return grouped.wait_there(i)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor]:
        ctx.grouped.start_back(ctx.i, grads)
        return None, None, torch.empty(0)


class _SendBack(Function):
    @staticmethod
    def forward(
        ctx: Any, grouped: GroupedExchange, i: int, rows: Tensor, needs_values: bool
    ) -> Tensor:
        ctx.grouped = grouped
        ctx.i = i
        grouped.start_back(i, (rows,), needs_values)
        return torch.empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[None, None, Tensor, None]:
        return None, None, *ctx.grouped.wait_there(ctx.i), None


class _Return(Function):
    @staticmethod
    def forward(ctx: Any, grouped: GroupedExchange, *tokens: Tensor) -> Tensor:
        ctx.grouped = grouped
        ctx.groups = len(tokens)
        return grouped.wait_back()[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.grouped.start_there((grad,), last_first=True)
        return None, *[torch.empty(0)] * ctx.groups
