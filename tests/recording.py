"""A communicator that counts what passes through another one; tests compare the formulas of `costs/accounting.py` with it.

    record(groups)      the same groups, each counting its calls and bytes

Convention: the bytes of a call are the payload that its caller passes, numel * element_size of

    all_reduce, broadcast, send, recv   the tensor
    all_to_all                          this rank's rows, its own ones as well
    all_gather                          this rank's part (1 / size of the output)
    reduce_scatter                      the whole input (size times the output)

and 0 for barrier and the object verbs. A nonblocking verb counts as its blocking form: isend as send, iall_reduce as all_reduce.
This is not the traffic on the wire: a ring all-reduce of n bytes moves 2 (size - 1) / size * n bytes per rank, and sums of BF16
are sent as an all-to-all.

Left out: timing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from torch import Tensor

from fugaku_megatron.comm.base import Comm, Handle
from fugaku_megatron.comm.grid import Groups, subgroup


class RecordingComm:
    """The communicator `inner`, as a `comm.base.Comm`, with a log of (group name, verb, bytes) in the order of the calls.

    Communicators that are split from it share the log.
    """

    def __init__(self, inner: Comm, name: str = "world", log: list[tuple[str, str, int]] | None = None) -> None:
        self.inner, self.name = inner, name
        self.log = [] if log is None else log
        self.rank, self.size, self.inside_node = inner.rank, inner.size, inner.inside_node

    @property
    def records(self) -> list[tuple[str, int]]:
        """(verb, bytes) of every call on this group."""
        return [(verb, size) for name, verb, size in self.log if name == self.name]

    def tally(self) -> dict[tuple[str, str], tuple[int, int]]:
        """{(group name, verb): (calls, bytes)} of all groups that share the log."""
        totals: dict[tuple[str, str], tuple[int, int]] = {}
        for name, verb, size in self.log:
            calls, payload = totals.get((name, verb), (0, 0))
            totals[name, verb] = calls + 1, payload + size
        return totals

    def _note(self, verb: str, tensor: Tensor | None = None) -> Comm:
        self.log.append((self.name, verb, 0 if tensor is None else tensor.numel() * tensor.element_size()))
        return self.inner

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        return self._note("all_reduce", tensor).all_reduce(tensor, op)

    def all_gather(self, output: Tensor, tensor: Tensor) -> Tensor:
        return self._note("all_gather", tensor).all_gather(output, tensor)

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Tensor:
        return self._note("reduce_scatter", tensor).reduce_scatter(output, tensor)

    def all_to_all(self, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int]) -> Tensor:
        return self._note("all_to_all", tensor).all_to_all(output, tensor, received, sent)

    def iall_reduce(self, tensor: Tensor, op: str = "sum") -> Handle:
        return self._note("all_reduce", tensor).iall_reduce(tensor, op)

    def iall_gather(self, output: Tensor, tensor: Tensor) -> Handle:
        return self._note("all_gather", tensor).iall_gather(output, tensor)

    def ireduce_scatter(self, output: Tensor, tensor: Tensor) -> Handle:
        return self._note("reduce_scatter", tensor).ireduce_scatter(output, tensor)

    def iall_to_all(self, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int]) -> Handle:
        return self._note("all_to_all", tensor).iall_to_all(output, tensor, received, sent)

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        return self._note("broadcast", tensor).broadcast(tensor, root)

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        self._note("send", tensor).send(tensor, dst, tag)

    def recv(self, tensor: Tensor, src: int, tag: int = 0) -> Tensor:
        return self._note("recv", tensor).recv(tensor, src, tag)

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Handle:
        return self._note("send", tensor).isend(tensor, dst, tag)

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Handle:
        return self._note("recv", tensor).irecv(tensor, src, tag)

    def barrier(self) -> None:
        self._note("barrier").barrier()

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        return self._note("broadcast_object").broadcast_object(obj, root)

    def gather_object(self, obj: Any, root: int = 0) -> list[Any] | None:
        return self._note("gather_object").gather_object(obj, root)

    def all_gather_object(self, obj: Any) -> list[Any]:
        return self._note("all_gather_object").all_gather_object(obj)

    def subgroup(self, ranks: Sequence[int]) -> RecordingComm:
        """`comm.grid.subgroup` of the inner communicator, recorded under "<name>/subgroup"."""
        return RecordingComm(subgroup(self.inner, ranks), f"{self.name}/subgroup", self.log)

    def split(self, color: int, key: int) -> RecordingComm:
        return RecordingComm(self.inner.split(color, key), f"{self.name}/split", self.log)

    def abort(self, code: int = 1) -> None:
        self.inner.abort(code)


def record(groups: Groups) -> Groups:
    """The same groups, recorded under the names of their fields ("world", "tp", ...) in one common log."""
    log: list[tuple[str, str, int]] = []
    return Groups(**{f.name: RecordingComm(getattr(groups, f.name), f.name, log) for f in fields(groups)})
