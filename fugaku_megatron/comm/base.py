"""The verbs a parallel trainer needs, as a protocol on torch tensors.

Implementations: `mpi.MPIComm` (real traffic), `local.ThreadComm` (ranks as threads), `local.DryComm` (no traffic) and
`local.RecordingComm` (tallies bytes). What is left out: groups are built by `grid.Grid`, autograd lives in `autograd`.

Conventions: tensors are contiguous; a communicator of size 1 is the identity; collectives are entered by every rank of
the communicator in the same order (as in MPI). Types: float32/64, int32/64, uint8, bool, bfloat16, float16. A sum of
bool is a logical or; sums of BF16 and FP16 are formed in FP32 in rank order and rounded once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Handle(Protocol):
    """A started operation. The tensor must stay alive and untouched until `wait` returns."""

    def wait(self) -> None:
        """Block until the operation is complete."""


class Comm(Protocol):
    """A communicator: `size` ranks numbered from 0, of which this process (or thread) is `rank`."""

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce in place over all ranks (`op`: "sum", "max" or "min"); returns `tensor`."""

    def all_gather(self, output: Tensor, tensor: Tensor) -> Tensor:
        """Concatenate every rank's `tensor` in rank order into `output` (`size` times as many elements).

        `tensor` may be this rank's own part of `output`.
        """

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Tensor:
        """Sum `tensor` over ranks and keep this rank's 1/size part of it in `output`.

        `output` may be that part of `tensor`; the other parts are left as they are.
        """

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Copy `root`'s values into `tensor` on every rank, in place."""

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        """Blocking send to rank `dst`."""

    def recv(self, tensor: Tensor, src: int, tag: int = 0) -> Tensor:
        """Blocking receive from rank `src` into `tensor`."""

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Handle:
        """Start a send to rank `dst`."""

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Handle:
        """Start a receive from rank `src` into `tensor`."""

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
