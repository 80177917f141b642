"""Communicators that need no MPI: ranks as threads of one process, and one rank without the others.

    ThreadWorld(4).run(fn, x)       -> [fn(comm, x) of rank 0, ..., of rank 3]; for tests of parallel code
    DryComm(rank, size)             one rank of a job of any size; for checking and costing a run in one process

Left out: speed. A ThreadComm reduces every tensor on every rank, in rank order, so that results are reproducible. Counting what
passes through a communicator is in recording.py.
Test: pytest tests/test_local.py
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .base import Handle
from .tensors import OPS, check, rank_order_sum, rows


def _reduced(parts: Sequence[Tensor], op: str) -> Tensor:
    if op == "sum":
        return rank_order_sum(parts)
    stacked = torch.stack(list(parts))
    return stacked.amax(0) if op == "max" else stacked.amin(0)


class _Done:
    """The handle of an operation that is complete already."""

    def wait(self) -> None:
        pass


class _Broken(Exception):
    """Raised in a rank's thread because another rank failed."""


class _State:
    """What the ranks of one ThreadWorld share: the failure flag, and every barrier and condition that a failure must wake."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.failed = False
        self.changed = threading.Condition()
        self.barriers: list[threading.Barrier] = []

    def fail(self) -> None:
        with self.changed:
            self.failed = True
            self.changed.notify_all()
            for barrier in self.barriers:
                barrier.abort()


class _Shared:
    """What the ranks of one communicator share: one slot per rank, a barrier, and the messages under way."""

    def __init__(self, state: _State, size: int) -> None:
        self.state = state
        self.slots: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)
        self.messages: dict[tuple, Tensor] = {}  # key: (src, dst, tag, how many came before with these three)
        with state.changed:
            state.barriers.append(self.barrier)
            if state.failed:
                self.barrier.abort()


@dataclass
class _Receive:
    comm: ThreadComm
    tensor: Tensor
    key: tuple

    def wait(self) -> None:
        self.comm._take(self.tensor, self.key)


class ThreadComm:
    """One rank of a ThreadWorld, a `comm.base.Comm`. Sends are buffered; a wait beyond the time limit raises TimeoutError."""

    def __init__(self, rank: int, size: int, shared: _Shared) -> None:
        self.rank, self.size, self._shared = rank, size, shared
        self._sent: Counter = Counter()
        self._posted: Counter = Counter()

    def _meet(self, what: str) -> None:
        state = self._shared.state
        try:
            self._shared.barrier.wait(state.timeout)
        except threading.BrokenBarrierError:
            self._explain(what)

    def _explain(self, what: str) -> None:
        if self._shared.state.failed:
            raise _Broken from None
        raise TimeoutError(f"rank {self.rank} of {self.size} waited {self._shared.state.timeout} s in {what}") from None

    def _exchange(self, verb: str, value: Any, use: Callable[[list[Any]], Any]) -> Any:
        """Show `value` to every rank and return use(the values of all ranks); no rank changes its tensor while `use` runs."""
        slots = self._shared.slots
        slots[self.rank] = (verb, value)
        self._meet(verb)
        seen = [entered for entered, _ in slots]
        assert len(set(seen)) == 1, f"ranks entered different collectives: {seen}"
        result = use([shown for _, shown in slots])
        self._meet(verb)
        return result

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        assert op in OPS, op
        verb = f"all_reduce {op} {tensor.dtype} x {check(tensor).numel()}"
        total = self._exchange(verb, tensor, lambda seen: _reduced([part.detach().view(-1) for part in seen], op))
        tensor.detach().view(-1).copy_(total)
        return tensor

    def all_gather(self, output: Tensor, tensor: Tensor) -> Tensor:
        parts = rows(output, tensor, self.size)
        verb = f"all_gather {tensor.dtype} x {tensor.numel()}"
        parts.copy_(self._exchange(verb, tensor, lambda seen: torch.stack([p.detach().view(-1) for p in seen])))
        return output

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Tensor:
        whole = rows(tensor, output, self.size)
        verb = f"reduce_scatter {tensor.dtype} x {tensor.numel()}"
        total = self._exchange(verb, whole, lambda seen: rank_order_sum([part[self.rank] for part in seen]))
        output.detach().view(-1).copy_(total)
        return output

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        verb = f"broadcast from {root} {tensor.dtype} x {check(tensor).numel()}"

        def copy(seen: list[Tensor]) -> None:
            if self.rank != root:
                tensor.detach().view(-1).copy_(seen[root].detach().view(-1))

        self._exchange(verb, tensor, copy)
        return tensor

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        key = (self.rank, dst, tag)
        assert 0 <= dst < self.size, f"no rank {dst} in a communicator of {self.size}"
        with self._shared.state.changed:
            self._shared.messages[(*key, self._sent[key])] = check(tensor).detach().clone()
            self._sent[key] += 1
            self._shared.state.changed.notify_all()

    def recv(self, tensor: Tensor, src: int, tag: int = 0) -> Tensor:
        self.irecv(tensor, src, tag).wait()
        return tensor

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Handle:
        self.send(tensor, dst, tag)
        return _Done()

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Handle:
        assert 0 <= src < self.size, f"no rank {src} in a communicator of {self.size}"
        key = (src, self.rank, tag)
        self._posted[key] += 1
        return _Receive(self, check(tensor), (*key, self._posted[key] - 1))

    def _take(self, tensor: Tensor, key: tuple) -> None:
        state, messages = self._shared.state, self._shared.messages
        with state.changed:
            state.changed.wait_for(lambda: key in messages or state.failed, state.timeout)
            if key not in messages:
                self._explain(f"recv from rank {key[0]}, tag {key[2]}")
            message = messages.pop(key)
        assert (message.dtype, message.numel()) == (tensor.dtype, tensor.numel()), (
            f"rank {key[0]} sent {message.dtype} x {message.numel()}, "
            f"rank {key[1]} receives {tensor.dtype} x {tensor.numel()}"
        )
        tensor.detach().view(-1).copy_(message.view(-1))

    def barrier(self) -> None:
        self._exchange("barrier", None, lambda seen: None)

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        return self._exchange(f"broadcast_object from {root}", obj, lambda seen: seen[root])

    def gather_object(self, obj: Any, root: int = 0) -> list[Any] | None:
        seen = self._exchange(f"gather_object to {root}", obj, list)
        return seen if self.rank == root else None

    def all_gather_object(self, obj: Any) -> list[Any]:
        return self._exchange("all_gather_object", obj, list)

    def split(self, color: int, key: int) -> ThreadComm:
        pairs = self._exchange("split", (color, key), list)
        members = sorted((k, r) for r, (c, k) in enumerate(pairs) if c == color)
        ranks = [rank for _, rank in members]
        shared = _Shared(self._shared.state, len(ranks)) if ranks[0] == self.rank else None
        shared = self._exchange("split", shared, lambda seen: seen[ranks[0]])
        return ThreadComm(ranks.index(self.rank), len(ranks), shared)

    def abort(self, code: int = 1) -> None:
        raise SystemExit(code)


class ThreadWorld:
    """`size` ranks as threads of this process; `timeout` seconds bound every wait, so that no test can hang."""

    def __init__(self, size: int, timeout: float = 60.0) -> None:
        assert size >= 1, size
        self.size, self.timeout = size, timeout

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call fn(comm, *args) on every rank; returns the results in rank order.

        When a rank fails, the ranks that wait for it are woken. The exception of the lowest failing rank is raised again, with
        the attribute `rank` and a note that names it.
        """
        state = _State(self.timeout)
        shared = _Shared(state, self.size)
        results: list[Any] = [None] * self.size
        errors: dict[int, BaseException] = {}

        def work(rank: int) -> None:
            try:
                results[rank] = fn(ThreadComm(rank, self.size, shared), *args)
            except _Broken:
                pass
            except BaseException as error:  # also SystemExit and pytest's outcomes, which the caller must see
                errors[rank] = error
                state.fail()

        threads = [threading.Thread(target=work, args=(rank,), name=f"rank {rank}") for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            _raise_with_rank(*min(errors.items()))
        return results


def _raise_with_rank(rank: int, error: BaseException) -> None:
    error.rank = rank
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(f"raised on rank {rank}")
    raise error


class DryComm:
    """Rank `rank` of `size` without the other ranks, a `comm.base.Comm`: no traffic, plausible values, any size at once.

    all_reduce and broadcast leave the tensor as it is, all_gather repeats this rank's part, reduce_scatter keeps this rank's
    part, recv gives zeros. With size 1 the results are exact: it is the communicator of a single process.
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

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        return check(tensor)

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        check(tensor)

    def recv(self, tensor: Tensor, src: int, tag: int = 0) -> Tensor:
        check(tensor).detach().zero_()
        return tensor

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Handle:
        check(tensor)
        return _Done()

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Handle:
        self.recv(tensor, src, tag)
        return _Done()

    def barrier(self) -> None:
        pass

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        return obj

    def gather_object(self, obj: Any, root: int = 0) -> list[Any] | None:
        return [obj] * self.size if self.rank == root else None

    def all_gather_object(self, obj: Any) -> list[Any]:
        return [obj] * self.size

    def subgroup(self, ranks: Sequence[int]) -> DryComm:
        """The communicator of `ranks`, which include this rank; see `comm.grid.subgroup`."""
        return DryComm(ranks.index(self.rank), len(ranks))

    def split(self, color: int, key: int) -> DryComm:
        assert self.size == 1, "the colors of the other ranks are unknown here: use subgroup(ranks)"
        return DryComm()

    def abort(self, code: int = 1) -> None:
        raise SystemExit(code)
