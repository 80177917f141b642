"""One rank of a job of any size without the other ranks: for checking and costing a run in one process.

    SoloComm(rank, size)

Left out: traffic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .base import DONE, OPS, Handle, check, check_exchange, rows


class SoloComm:
    """Rank `rank` of `size` without the other ranks, a `comm.base.Comm`: no traffic, plausible values, any size at once.

    all_reduce and broadcast leave the tensor as it is, all_gather repeats this rank's part, reduce_scatter keeps this rank's
    part, all_to_all repeats this rank's rows,
    recv fills the tensor with zeros. With size 1 the results are exact: it is the communicator of a single process.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        assert 0 <= rank < size, f"rank {rank} of {size}"
        self.rank, self.size = rank, size

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        assert op in OPS, op
        return check(tensor)

    def all_gather(self, output: Tensor, tensor: Tensor) -> Tensor:
        # clone: this rank's part may be a view of the output
        rows(output, tensor, self.size).copy_(tensor.detach().clone().view(1, -1).expand(self.size, -1))
        return output

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Tensor:
        output.detach().view(-1).copy_(rows(tensor, output, self.size)[self.rank])
        return output

    def all_to_all(self, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int]) -> Tensor:
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

    def iall_to_all(self, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int]) -> Handle:
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
