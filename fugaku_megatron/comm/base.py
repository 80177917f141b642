"""Communicator protocol on torch tensors, and a communicator without other ranks.

Tensors are contiguous. dtypes: float32/64, int32/64, uint8, bool, bfloat16, float16. A bool sum is
a logical or. BF16 and FP16 sums are formed in FP32 in rank order and rounded once (once a level in
`comm.two_level`). As in MPI, every rank starts a communicator's collectives in one order; handles
may be waited for in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Handle(Protocol):
    """A started operation. Its tensors must not be touched before `wait` returns; the handle keeps them alive."""

    def wait(self) -> None: ...

    def done(self) -> bool:
        """Return True if `wait` would return at once."""


@dataclass(frozen=True)
class _Done:
    def wait(self) -> None:
        pass

    def done(self) -> bool:
        return True


DONE: Handle = _Done()


class Comm(Protocol):
    """A communicator: `size` ranks numbered from 0; this process (or thread) is `rank`.

    By default a blocking verb starts its nonblocking form and waits.

    inside_node: all ranks share memory, and the caller of a blocking collective does its work

    Shapes: p ranks; (n,) is any shape with n elements. `tensor` and `output` have one dtype.
    """

    rank: int
    size: int
    inside_node: bool = False

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce `tensor` (any shape) in place and return it.

        op: "sum", "max" or "min"
        """
        return self._wait(self.iall_reduce, tensor, op)

    def all_gather(self, output: Tensor, tensor: Tensor) -> Tensor:
        """Concatenate every rank's `tensor` (n,) in rank order into `output` (size * n,).

        `tensor` may be this rank's slice of `output`.
        """
        return self._wait(self.iall_gather, output, tensor)

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Tensor:
        """Sum `tensor` (size * n,) over ranks and store this rank's slice in `output` (n,).

        `output` may be this rank's slice of `tensor`; the other slices are unchanged.
        """
        return self._wait(self.ireduce_scatter, output, tensor)

    def all_to_all(
        self, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Tensor:
        """Send the first sent[0] rows of `tensor` (n, ...) to rank 0, the next sent[1] rows to rank
        1 ...

        received[i] rows from rank i are stored in `output` (m, ...) in rank order.
        """
        return self._wait(self.iall_to_all, output, tensor, received, sent)

    def _wait(self, start: Callable[..., Handle], output: Tensor, *operands: Any) -> Tensor:
        """Start a collective, wait for its end and return `output`. The caller's thread may do the work."""
        start(output, *operands).wait()
        return output

    def iall_reduce(self, tensor: Tensor, op: str = "sum") -> Handle: ...

    def iall_gather(self, output: Tensor, tensor: Tensor) -> Handle: ...

    def ireduce_scatter(self, output: Tensor, tensor: Tensor) -> Handle: ...

    def iall_to_all(
        self, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Handle: ...

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Copy `root`'s values into `tensor` (one shape on all ranks)."""

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        assert dst != self.rank, "a blocking send to oneself never returns"
        self.isend(tensor, dst, tag).wait()

    def recv(self, tensor: Tensor, src: int, tag: int = 0) -> Tensor:
        """Receive from rank `src` into `tensor` (as many elements as were sent)."""
        assert src != self.rank, "a blocking receive from oneself never returns"
        self.irecv(tensor, src, tag).wait()
        return tensor

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Handle: ...

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Handle: ...

    def barrier(self) -> None: ...

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        """Return `root`'s picklable object on every rank. For set-up, not for the step."""

    def gather_object(self, obj: Any, root: int = 0) -> list[Any] | None:
        """Return every rank's object in rank order on `root`, None elsewhere."""

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return every rank's object in rank order on every rank."""

    def split(self, color: int, key: int) -> Comm:
        """Build a communicator of the ranks with equal `color`, ordered by `key` (MPI_Comm_split)."""

    def free(self) -> None:
        """Free the communicator. Collective."""
        return None

    def abort(self, code: int = 1) -> None: ...


HALF = (torch.bfloat16, torch.float16)
SUMMED_DTYPES = (torch.float32, *HALF)  # activations and gradients
COMM_DTYPES = (
    torch.float32,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
    *HALF,
)
OPS = ("sum", "max", "min")


def check(tensor: Tensor) -> Tensor:
    assert tensor.is_contiguous(), (
        f"a communicated tensor must be contiguous: {tuple(tensor.shape)} {tensor.stride()}"
    )
    assert tensor.dtype in COMM_DTYPES, f"no communication of {tensor.dtype}"
    return tensor


def rows(whole: Tensor, part: Tensor, size: int) -> Tensor:
    """Return `whole` (size * n elements) as a view (size, n), one row for each rank."""
    assert check(whole).dtype == check(part).dtype, f"{whole.dtype} and {part.dtype}"
    assert whole.numel() == size * part.numel(), (
        f"{whole.numel()} elements are not {size} x {part.numel()}"
    )
    return whole.detach().view(size, part.numel())


def check_exchange(
    output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int], size: int
) -> None:
    """Assert that dtypes, row shapes and row counts fit an all-to-all. received, sent: rows by rank"""
    assert check(output).dtype == check(tensor).dtype, f"{output.dtype} and {tensor.dtype}"
    assert output.shape[1:] == tensor.shape[1:], (
        f"rows {tuple(output.shape[1:])} and {tuple(tensor.shape[1:])}"
    )
    assert (len(received), sum(received)) == (size, len(output)), (
        f"{received} for {len(output)} rows from {size} ranks"
    )
    assert (len(sent), sum(sent)) == (size, len(tensor)), (
        f"{sent} for {len(tensor)} rows to {size} ranks"
    )


def rank_order_sum(parts: Sequence[Tensor] | Tensor) -> Tensor:
    """Sum equally shaped tensors in their order; BF16 and FP16 are summed and returned in FP32."""
    first = parts[0].detach()
    total = first.float() if first.dtype in HALF else first.clone()
    for part in parts[1:]:
        total += part.detach()
    return total


class SoloComm(Comm):
    """Rank `rank` of `size` without the other ranks: no traffic, plausible values. Exact for size 1."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        assert 0 <= rank < size, f"rank {rank} of {size}"
        self.rank = rank
        self.size = size

    def iall_reduce(self, tensor: Tensor, op: str = "sum") -> Handle:
        assert op in OPS, op
        check(tensor)
        return DONE

    def iall_gather(self, output: Tensor, tensor: Tensor) -> Handle:
        shard = tensor.detach().clone()  # may be a view of the output
        rows(output, tensor, self.size).copy_(shard.view(1, -1).expand(self.size, -1))
        return DONE

    def ireduce_scatter(self, output: Tensor, tensor: Tensor) -> Handle:
        output.detach().view(-1).copy_(rows(tensor, output, self.size)[self.rank])
        return DONE

    def iall_to_all(
        self, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Handle:
        check_exchange(output, tensor, received, sent, self.size)
        if len(output) and not len(tensor):
            output.detach().zero_()
        elif len(output):
            output.detach().copy_(tensor.detach()[torch.arange(len(output)) % len(tensor)])
        return DONE

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        return check(tensor)

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Handle:
        check(tensor)
        return DONE

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Handle:
        check(tensor).detach().zero_()
        return DONE

    def barrier(self) -> None:
        pass

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        return obj

    def gather_object(self, obj: Any, root: int = 0) -> list[Any] | None:
        return self.all_gather_object(obj) if self.rank == root else None

    def all_gather_object(self, obj: Any) -> list[Any]:
        return [obj for _ in range(self.size)]

    def subgroup(self, ranks: Sequence[int]) -> SoloComm:
        return SoloComm(ranks.index(self.rank), len(ranks))

    def split(self, color: int, key: int) -> SoloComm:
        assert self.size == 1, "the colors of the other ranks are unknown here: use subgroup(ranks)"
        return SoloComm()

    def abort(self, code: int = 1) -> None:
        raise SystemExit(code)
