"""The verbs a parallel trainer needs, as a protocol on torch tensors.

Implementations: `comm.mpi.MPIComm` (real traffic), `comm.node.NodeComm` (memory of a node), `comm.two_level.TwoLevelComm` (two
others) and `SoloComm` below (no traffic). The tests have ranks as threads, and one that counts bytes. Left out: building groups
(`comm.grid.Grid`) and autograd (`comm.autograd`).

Conventions: a tensor may have any shape and must be contiguous; only its number of elements n counts. A communicator of size 1 is
the identity. Collectives, blocking or not, are started by every rank of the communicator in the same order, as in MPI; handles may
be waited for in any order, and different communicators are independent. Types: float32/64, int32/64, uint8, bool, bfloat16,
float16. A sum of bool is a logical or; sums of BF16 and FP16 are formed in FP32 in rank order and rounded once, or once at each
level (`comm.two_level`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Handle(Protocol):
    """A started operation. Its tensors must stay untouched until `wait` returns; the handle keeps them alive."""

    def wait(self) -> None:
        """Block until the operation is complete."""

    def done(self) -> bool:
        """Whether `wait` would return at once."""


@dataclass(frozen=True)
class _Done:
    """The handle of an operation that is complete already."""

    def wait(self) -> None:
        pass

    def done(self) -> bool:
        return True


DONE: Handle = _Done()


class Comm(Protocol):
    """A communicator: `size` ranks numbered from 0, of which this process (or thread) is `rank`.

    inside_node: its collectives pass through memory that all ranks share, and who waits for one does its work.

    Blocking collectives start their nonblocking form and wait, unless an implementation has another way.

    Shapes: where a docstring says (n,), a tensor of any shape with n elements is accepted. `tensor` and `output` have one dtype.
    """

    rank: int
    size: int
    inside_node: bool = False

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce `tensor` (any shape) in place over all ranks (`op`: "sum", "max" or "min") and return it."""
        self.iall_reduce(tensor, op).wait()
        return tensor

    def all_gather(self, output: Tensor, tensor: Tensor) -> Tensor:
        """Concatenate every rank's `tensor` (n,) in rank order into `output` (size * n,); returns `output`.

        `tensor` may be this rank's own part of `output`.
        """
        self.iall_gather(output, tensor).wait()
        return output

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Tensor:
        """Sum `tensor` (size * n,) over ranks and keep this rank's part of the sum in `output` (n,); returns `output`.

        `output` may be this rank's part of `tensor`; the other parts are left as they are.
        """
        self.ireduce_scatter(output, tensor).wait()
        return output

    def all_to_all(
        self, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Tensor:
        """Send the rows of `tensor` (n, ...), sent[i] of them to rank i, in this order; returns `output`.

        Rows from rank i, received[i] of them, are put into `output` (m, ...) in the order of ranks. A row is what follows the first
        dimension.
        """
        self.iall_to_all(output, tensor, received, sent).wait()
        return output

    def iall_reduce(self, tensor: Tensor, op: str = "sum") -> Handle:
        """Start an all_reduce of `tensor` (any shape) in place."""

    def iall_gather(self, output: Tensor, tensor: Tensor) -> Handle:
        """Start an all_gather of `tensor` (n,) into `output` (size * n,)."""

    def ireduce_scatter(self, output: Tensor, tensor: Tensor) -> Handle:
        """Start a reduce_scatter of `tensor` (size * n,) into `output` (n,)."""

    def iall_to_all(
        self, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Handle:
        """Start an all_to_all of the rows of `tensor` (n, ...) into `output` (m, ...)."""

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Copy `root`'s values into `tensor` (any shape, the same on every rank), in place; returns `tensor`."""

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        """Blocking send of `tensor` (any shape) to rank `dst`."""

    def recv(self, tensor: Tensor, src: int, tag: int = 0) -> Tensor:
        """Blocking receive from rank `src` into `tensor` (any shape with as many elements as were sent); returns `tensor`."""

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Handle:
        """Start a send of `tensor` (any shape) to rank `dst`."""

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Handle:
        """Start a receive from rank `src` into `tensor` (any shape with as many elements as were sent)."""

    def barrier(self) -> None:
        """Return when every rank has entered."""

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        """Return `root`'s picklable object on every rank. For set-up, not for the step."""

    def gather_object(self, obj: Any, root: int = 0) -> list[Any] | None:
        """Return every rank's object in rank order on `root`, None elsewhere."""

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return every rank's object in rank order on every rank."""

    def split(self, color: int, key: int) -> Comm:
        """Ranks of equal `color` form a new communicator ordered by `key` (MPI_Comm_split)."""

    def abort(self, code: int = 1) -> None:
        """End the whole job at once with exit code `code`."""


HALF = (torch.bfloat16, torch.float16)
SUMMED_DTYPES = (torch.float32, *HALF)  # of activations and gradients, whose sums are large
COMM_DTYPES = (
    torch.float32,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    *HALF,
)
OPS = ("sum", "max", "min")


def check(tensor: Tensor) -> Tensor:
    """Assert that `tensor` (any shape) can be communicated: contiguous, of a known dtype. Returns it."""
    assert tensor.is_contiguous(), (
        f"a communicated tensor must be contiguous: {tuple(tensor.shape)} {tensor.stride()}"
    )
    assert tensor.dtype in COMM_DTYPES, f"no communication of {tensor.dtype}"
    return tensor


def rows(whole: Tensor, part: Tensor, size: int) -> Tensor:
    """`whole` (size * n elements, any shape) as a view (size, n), one row per rank of n elements as in `part`.

    Asserts that both tensors have one dtype and that their sizes fit.
    """
    assert check(whole).dtype == check(part).dtype, f"{whole.dtype} and {part.dtype}"
    assert whole.numel() == size * part.numel(), (
        f"{whole.numel()} elements are not {size} x {part.numel()}"
    )
    return whole.detach().view(size, part.numel())


def check_exchange(
    output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int], size: int
) -> None:
    """Assert that both tensors, (m, ...) and (n, ...), have rows of one kind, as many as the counts for `size` ranks say."""
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
    """The sum of `parts` (any shape, the same for all), in their order. BF16 and FP16 are summed, and returned, in FP32."""
    first = parts[0].detach()
    total = first.float() if first.dtype in HALF else first.clone()
    for part in parts[1:]:
        total += part.detach()
    return total


class SoloComm:
    """Rank `rank` of `size` without the other ranks, a `Comm`: no traffic, plausible values, any size at once.

    all_reduce and broadcast leave the tensor as it is, all_gather repeats this rank's part, reduce_scatter keeps this rank's
    part, all_to_all repeats this rank's rows,
    recv fills the tensor with zeros. With size 1 the results are exact: it is the communicator of a single process.
    """

    inside_node = False

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        assert 0 <= rank < size, f"rank {rank} of {size}"
        self.rank = rank
        self.size = size

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        assert op in OPS, op
        return check(tensor)

    def all_gather(self, output: Tensor, tensor: Tensor) -> Tensor:
        # clone: this rank's part may be a view of the output
        rows(output, tensor, self.size).copy_(
            tensor.detach().clone().view(1, -1).expand(self.size, -1)
        )
        return output

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Tensor:
        output.detach().view(-1).copy_(rows(tensor, output, self.size)[self.rank])
        return output

    def all_to_all(
        self, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Tensor:
        check_exchange(output, tensor, received, sent, self.size)
        if len(output) and not len(tensor):
            output.detach().zero_()
        elif len(output):
            output.detach().copy_(tensor.detach()[torch.arange(len(output)) % len(tensor)])
        return output

    def iall_reduce(self, tensor: Tensor, op: str = "sum") -> Handle:
        self.all_reduce(tensor, op)
        return DONE

    def iall_gather(self, output: Tensor, tensor: Tensor) -> Handle:
        self.all_gather(output, tensor)
        return DONE

    def ireduce_scatter(self, output: Tensor, tensor: Tensor) -> Handle:
        self.reduce_scatter(output, tensor)
        return DONE

    def iall_to_all(
        self, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Handle:
        self.all_to_all(output, tensor, received, sent)
        return DONE

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        return check(tensor)

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        check(tensor)

    def recv(self, tensor: Tensor, src: int, tag: int = 0) -> Tensor:
        check(tensor).detach().zero_()
        return tensor

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Handle:
        check(tensor)
        return DONE

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Handle:
        self.recv(tensor, src, tag)
        return DONE

    def barrier(self) -> None:
        pass

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        return obj

    def gather_object(self, obj: Any, root: int = 0) -> list[Any] | None:
        return [obj] * self.size if self.rank == root else None

    def all_gather_object(self, obj: Any) -> list[Any]:
        return [obj] * self.size

    def subgroup(self, ranks: Sequence[int]) -> SoloComm:
        """The communicator of `ranks`, which include this rank; see `comm.grid.subgroup`."""
        return SoloComm(ranks.index(self.rank), len(ranks))

    def split(self, color: int, key: int) -> SoloComm:
        assert self.size == 1, "the colors of the other ranks are unknown here: use subgroup(ranks)"
        return SoloComm()

    def abort(self, code: int = 1) -> None:
        raise SystemExit(code)
