"""Ranks as threads in one process, without MPI.

    ThreadWorld(4).run(fn, x)       -> [fn(comm, x) for each rank]

A ThreadComm reduces every tensor on every rank, in rank order, so that results are reproducible. A collective copies a rank's
operands when it starts, so that no rank waits for another before `wait`.

Ranks take turns: one computes until it waits for another. Every PyTorch operation releases Python's lock, so that
ranks that compute at the same time would spend most time on passing the lock.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fugaku_megatron.comm.base import (
    DONE,
    OPS,
    Comm,
    Handle,
    check,
    check_exchange,
    rank_order_sum,
    rows,
)


def _reduced(parts: Sequence[Tensor], op: str) -> Tensor:
    if op == "sum":
        return rank_order_sum(parts)
    stacked = torch.stack(list(parts))
    return stacked.amax(0) if op == "max" else stacked.amin(0)


A_MOMENT = (
    1e-4  # s in which other ranks have their turn while one looks whether an operation is done
)


class _Broken(Exception):
    """An exception in a rank's thread after another rank failed."""


class _Turn:
    """One rank's right to compute. timeout: seconds before a waiting rank raises TimeoutError"""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._lock = threading.Lock()
        self._holder: int | None = None  # identifier of a thread

    @property
    def mine(self) -> bool:
        """True in the thread that holds it; threads that a rank has started never do."""
        return self._holder == threading.get_ident()

    def begin(self) -> None:
        if not self._lock.acquire(timeout=self.timeout):
            raise TimeoutError("a rank computes for too long, or waits outside its communicator")
        self._holder = threading.get_ident()

    def end(self) -> None:
        """Let another rank compute; nothing in a thread that does not hold the turn."""
        if self.mine:
            self._holder = None
            self._lock.release()

    @contextlib.contextmanager
    def left(self) -> Iterator[None]:
        """Let other ranks compute during the block."""
        mine = self.mine
        self.end()
        try:
            yield
        finally:
            if mine:
                self.begin()


class _State:
    """State shared by a ThreadWorld's ranks: the turn, the failure flag, and the condition that every change notifies."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.turn = _Turn(timeout)
        self.failed = False
        self.changed = threading.Condition()

    def fail(self) -> None:
        with self.changed:
            self.failed = True
            self.changed.notify_all()


@dataclass
class _Meeting:
    """One collective: each rank's (verb, value), and how many ranks have read the result."""

    shown: dict[int, tuple[str, Any]] = field(default_factory=dict)
    taken: int = 0


class _Shared:
    """State shared by a communicator's ranks: collectives and messages in progress."""

    def __init__(self, state: _State, size: int) -> None:
        self.state = state
        self.size = size
        self.meetings: dict[int, _Meeting] = {}  # by how many collectives came before
        self.messages: dict[
            tuple, Tensor
        ] = {}  # key: (src, dst, tag, how many came before with these three)

    def meeting(self, number: int) -> _Meeting:
        return self.meetings.setdefault(number, _Meeting())

    def complete(self, number: int) -> bool:
        """Return True if every rank has entered a collective that this rank has not left."""
        return len(self.meetings[number].shown) == self.size

    def leave(self, number: int) -> list[tuple[str, Any]]:
        """Return every rank's value in rank order; the last rank clears the collective."""
        meeting = self.meetings[number]
        meeting.taken += 1
        if meeting.taken == self.size:
            del self.meetings[number]
        return [meeting.shown[rank] for rank in range(self.size)]


@dataclass
class _Receive:
    comm: ThreadComm
    tensor: Tensor
    key: tuple
    taken: bool = False

    def done(self) -> bool:
        messages = self.comm.shared.messages
        return self.taken or self.comm.becomes(lambda: self.key in messages, A_MOMENT)

    def wait(self) -> None:
        if not self.taken:
            self.comm.take(self.tensor, self.key)
            self.taken = True


@dataclass
class _Collective:
    """A started collective. finish: computes this rank's result from all ranks' values"""

    comm: ThreadComm
    number: int
    verb: str
    finish: Callable[[list[Any]], Any]
    taken: bool = False
    result: Any = None

    def done(self) -> bool:
        shared = self.comm.shared
        return self.taken or self.comm.becomes(lambda: shared.complete(self.number), A_MOMENT)

    def wait(self) -> Any:
        if not self.taken:
            self.result = self.finish(self.comm.meet(self.number, self.verb))
            self.taken = True
        return self.result


class ThreadComm(Comm):
    """One rank in a ThreadWorld, a `comm.base.Comm`. Sends are buffered; a wait beyond the time limit raises TimeoutError."""

    def __init__(self, rank: int, size: int, shared: _Shared) -> None:
        self.rank = rank
        self.size = size
        self.shared = shared
        self._collectives = 0
        self._sent: Counter = Counter()
        self._posted: Counter = Counter()

    def _wait_for(self, ready: Callable[[], bool], what: str) -> None:
        """Wait until `ready`. Raises _Broken if another rank failed, TimeoutError after the time limit."""
        state = self.shared.state
        if self.becomes(ready, state.timeout):
            return
        if state.failed:
            raise _Broken from None
        raise TimeoutError(f"rank {self.rank} of {self.size} waited {state.timeout} s in {what}")

    def becomes(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Return True if `ready` within so many seconds. Other ranks compute meanwhile."""
        state = self.shared.state
        if not ready():
            with state.turn.left(), state.changed:
                state.changed.wait_for(lambda: ready() or state.failed, seconds)
        return ready()

    def _start(self, verb: str, value: Any, finish: Callable[[list[Any]], Any]) -> _Collective:
        """Publish `value`. No rank changes it afterwards."""
        number = self._collectives
        self._collectives = self._collectives + 1
        with self.shared.state.changed:
            self.shared.meeting(number).shown[self.rank] = (verb, value)
            if self.shared.complete(number):
                self.shared.state.changed.notify_all()
        return _Collective(self, number, verb, finish)

    def meet(self, number: int, verb: str) -> list[Any]:
        """Return all ranks' values."""
        self._wait_for(lambda: self.shared.complete(number), verb)
        with self.shared.state.changed:
            pairs = self.shared.leave(number)
        verbs = [entered for entered, _ in pairs]
        assert len(set(verbs)) == 1, f"ranks entered different collectives: {verbs}"
        return [value for _, value in pairs]

    def iall_reduce(self, tensor: Tensor, op: str = "sum") -> Handle:
        assert op in OPS, op
        verb = f"all_reduce {op} {tensor.dtype} x {check(tensor).numel()}"
        flat = tensor.detach().view(-1)
        return self._start(verb, flat.clone(), lambda parts: flat.copy_(_reduced(parts, op)))

    def iall_gather(self, output: Tensor, tensor: Tensor) -> Handle:
        whole = rows(output, tensor, self.size)
        verb = f"all_gather {tensor.dtype} x {tensor.numel()}"
        return self._start(
            verb, tensor.detach().view(-1).clone(), lambda parts: whole.copy_(torch.stack(parts))
        )

    def ireduce_scatter(self, output: Tensor, tensor: Tensor) -> Handle:
        whole = rows(tensor, output, self.size)
        own = output.detach().view(-1)
        verb = f"reduce_scatter {tensor.dtype} x {tensor.numel()}"
        return self._start(
            verb,
            whole.clone(),
            lambda parts: own.copy_(rank_order_sum([part[self.rank] for part in parts])),
        )

    def iall_to_all(
        self, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Handle:
        check_exchange(output, tensor, received, sent, self.size)
        parts = tensor.detach().clone().split(list(sent))
        result = output.detach()

        def finish(shown: list[Any]) -> None:
            own = [part[self.rank] for part in shown]
            assert [part.shape[0] for part in own] == list(received), (
                f"rank {self.rank} expects {received} rows of {list(map(len, own))}"
            )
            result.copy_(torch.cat(own))

        return self._start(f"all_to_all {tensor.dtype}", parts, finish)

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        verb = f"broadcast from {root} {tensor.dtype} x {check(tensor).numel()}"
        flat = tensor.detach().view(-1)
        shown = flat.clone() if self.rank == root else None
        self._start(
            verb, shown, lambda parts: None if self.rank == root else flat.copy_(parts[root])
        ).wait()
        return tensor

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        key = (self.rank, dst, tag)
        assert 0 <= dst < self.size, f"no rank {dst} in a communicator of {self.size}"
        with self.shared.state.changed:
            self.shared.messages[(*key, self._sent[key])] = check(tensor).detach().clone()
            self._sent[key] += 1
            self.shared.state.changed.notify_all()

    def recv(self, tensor: Tensor, src: int, tag: int = 0) -> Tensor:
        self.irecv(tensor, src, tag).wait()
        return tensor

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Handle:
        self.send(tensor, dst, tag)
        return DONE

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Handle:
        assert 0 <= src < self.size, f"no rank {src} in a communicator of {self.size}"
        key = (src, self.rank, tag)
        self._posted[key] += 1
        return _Receive(self, check(tensor), (*key, self._posted[key] - 1))

    def take(self, tensor: Tensor, key: tuple) -> None:
        """Receive a message into `tensor` (any shape)."""
        messages = self.shared.messages
        self._wait_for(lambda: key in messages, f"recv from rank {key[0]}, tag {key[2]}")
        message = messages.pop(key)
        assert (message.dtype, message.numel()) == (tensor.dtype, tensor.numel()), (
            f"rank {key[0]} sent {message.dtype} x {message.numel()}, "
            f"rank {key[1]} receives {tensor.dtype} x {tensor.numel()}"
        )
        tensor.detach().view(-1).copy_(message.view(-1))

    def barrier(self) -> None:
        self._start("barrier", None, lambda seen: None).wait()

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        return self._start(f"broadcast_object from {root}", obj, lambda seen: seen[root]).wait()

    def gather_object(self, obj: Any, root: int = 0) -> list[Any] | None:
        seen = self._start(f"gather_object to {root}", obj, list).wait()
        return seen if self.rank == root else None

    def all_gather_object(self, obj: Any) -> list[Any]:
        return self._start("all_gather_object", obj, list).wait()

    def split(self, color: int, key: int) -> ThreadComm:
        pairs = self._start("split", (color, key), list).wait()
        members = sorted((k, r) for r, (c, k) in enumerate(pairs) if c == color)
        ranks = [rank for _, rank in members]
        shared = _Shared(self.shared.state, len(ranks)) if ranks[0] == self.rank else None
        shared = self._start("split", shared, lambda seen: seen[ranks[0]]).wait()
        return ThreadComm(ranks.index(self.rank), len(ranks), shared)

    def abort(self, code: int = 1) -> None:
        raise SystemExit(code)


class ThreadWorld:
    """`size` ranks as threads in this process. timeout: seconds for every wait, so that no test hangs"""

    def __init__(self, size: int, timeout: float = 300.0) -> None:
        assert size >= 1, size
        self.size = size
        self.timeout = timeout

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call fn(comm, *args) on every rank; return the results in rank order.

        If a rank fails, waiting ranks are woken, and the lowest failing rank's exception is raised with the attribute `rank` and a note.
        """
        state = _State(self.timeout)
        shared = _Shared(state, self.size)
        results: list[Any] = [None for _ in range(self.size)]
        errors: dict[int, BaseException] = {}

        def work(rank: int) -> None:
            try:
                state.turn.begin()
                results[rank] = fn(ThreadComm(rank, self.size, shared), *args)
            except _Broken:
                pass
            except (
                BaseException
            ) as error:  # also SystemExit and pytest's outcomes, which the caller must see
                errors[rank] = error
                state.fail()
            finally:
                state.turn.end()

        threads = [
            threading.Thread(target=work, args=(rank,), name=f"rank {rank}")
            for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            _raise_with_rank(*min(errors.items()))
        return results


def _raise_with_rank(rank: int, error: BaseException) -> None:
    error.__dict__["rank"] = rank
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(f"raised on rank {rank}")
    raise error
