"""The one thread that makes a process's MPI calls, so that communication overlaps with computation.

An MPI library moves data only while somebody calls it, and many libraries grant no more than MPI_THREAD_SERIALIZED. Here one thread
initialises MPI and makes every later call, for which MPI_THREAD_FUNNELED is enough. It starts operations in the order in which the
program asks for them, and tests them. On the cores that compute it sleeps between tests while nobody waits, so that a computing
rank keeps its cores. On a core of its own it does not: a message moves only during a test, so that naps stretch it.

An operation is an iterator of steps. Each step starts nonblocking requests and yields them, or yields a function that returns
whether it is complete; the next step follows when they are complete.
Operations of one channel (a communicator's collectives) run one after another, because all ranks must start them in one order.
Channels are independent.

Left out: what is communicated (mpi.py).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")
Steps = Iterator[list[Any] | Callable[[], bool]]
# Seconds between two tests while nobody waits: the first after something happened, then twice as long each time.
SHORTEST_NAP = 50e-6
LONGEST_NAP = 500e-6
TURNS = 100  # tests in vain until a waiting rank of a crowded node naps
PATIENCE = 0.1  # s of waiting before `waits` is called, and before signals are handled


class Operation:
    """A started operation, as a `comm.base.Handle`; keeps `memory` alive, which MPI is using."""

    def __init__(self, engine: Engine, steps: Steps, channel: Hashable, memory: Any) -> None:
        self.steps = steps
        self.channel = channel
        self.requests: list[Any] | Callable[[], bool] = []
        self._engine = engine
        self._memory = memory
        self._complete = threading.Lock()  # held until the operation is complete
        self._complete.acquire()
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return not self._complete.locked()

    def wait(self) -> None:
        """Block until the operation is complete; raises what it failed with."""
        if self._complete.locked():
            self._engine.hurry(self._complete)
        if self._error is not None:
            raise self._error

    def end(self, error: BaseException | None) -> None:
        """Called by the engine."""
        self._error = error
        self._memory = None
        self._complete.release()


class Engine:
    """The thread and its queue. test: whether all requests of a list are complete, without blocking; called by the thread.

    crowded: the node has more ranks than cores, so that a waiting rank sleeps, too. waits: is called when a thread begins (True)
    and ends (False) to wait for other ranks, if that takes longer than PATIENCE. own_core: nothing else runs on the thread's core.
    """

    def __init__(
        self,
        test: Callable[[list[Any]], bool] = all,
        crowded: bool = False,
        waits: Callable[[bool], Any] = bool,
    ) -> None:
        self.test = test
        self.crowded = crowded
        self.waits = waits
        self.own_core = False
        self._orders: deque[Operation] = deque()
        self._channels: dict[Hashable, deque[Operation]] = {}
        self._active: list[Operation] = []
        self._waiting = 0
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="MPI", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], T]) -> T:
        """The result of function(), made by the thread; for calls that end soon on their own, and for set-up."""
        results: list[T] = []

        def steps() -> Steps:
            results.append(function())
            return
            yield

        self.start(steps()).wait()
        return results[0]

    def start(self, steps: Steps, channel: Hashable = None, memory: Any = None) -> Operation:
        """Queue an operation after those of its channel; one without a channel waits for no other."""
        operation = Operation(self, steps, channel or object(), memory)
        with self._wake:
            self._orders.append(operation)
            self._wake.notify()
        return operation

    def hurry(self, lock: threading.Lock) -> None:
        """Block until `lock` is released by the thread, which does not nap meanwhile."""
        with self._wake:
            self._waiting += 1
            self._wake.notify()
        try:
            if not lock.acquire(timeout=PATIENCE):
                with self.waiting():
                    lock.acquire()
            lock.release()
        finally:
            with self._wake:
                self._waiting -= 1

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what waits for other ranks."""
        self.waits(True)
        try:
            yield
        finally:
            self.waits(False)

    # The thread -----------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        nap = SHORTEST_NAP
        idle = 0
        while True:
            with self._wake:
                awake = self._waiting or self.own_core and self._active
                if not self._orders and not awake:
                    self._wake.wait(nap if self._active else None)
                orders = list(self._orders)
                self._orders.clear()
            for operation in orders:
                self._accept(operation)
            moved = self._progress() or bool(orders)
            nap, idle = (SHORTEST_NAP, 0) if moved else (min(2 * nap, LONGEST_NAP), idle + 1)
            if idle and awake:
                os.sched_yield() if idle < TURNS or not self.crowded else time.sleep(SHORTEST_NAP)

    def _accept(self, operation: Operation) -> None:
        queue = self._channels.setdefault(operation.channel, deque())
        queue.append(operation)
        if len(queue) == 1:
            self._begin(operation)

    def _begin(self, operation: Operation) -> None:
        self._active.append(operation)
        self._advance(operation)

    def _advance(self, operation: Operation) -> None:
        """Start the next step; at the end begin the channel's next operation."""
        try:
            operation.requests = next(operation.steps)
            return
        except StopIteration:
            error = None
        except BaseException as failure:  # raised where the operation is waited for
            error = failure
        self._active.remove(operation)
        operation.end(error)
        queue = self._channels[operation.channel]
        queue.popleft()
        if queue:
            self._begin(queue[0])
        else:
            del self._channels[operation.channel]

    def _progress(self) -> bool:
        """Test everything under way once; whether a step was complete."""
        moved = False
        for operation in list(self._active):
            try:
                requests = operation.requests
                complete = requests() if callable(requests) else self.test(requests)
            except BaseException as failure:
                operation.steps = _failing(failure)
                complete = True
            if complete:
                moved = True
                self._advance(operation)
        return moved


def _failing(error: BaseException) -> Steps:
    raise error
    yield
