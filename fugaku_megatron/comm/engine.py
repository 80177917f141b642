"""The thread that makes all MPI calls of a process, so that communication overlaps with computation.

MPI libraries progress messages only inside calls. One thread makes every call: MPI_THREAD_FUNNELED suffices. While
nobody waits, it sleeps between tests unless it has a core of its own.

An operation is an iterator of steps; a step yields started requests, or a function that returns True on completion. A
channel's operations (a communicator's collectives) run in the order of their start; channels are independent.
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
# Seconds between two tests while nobody waits; doubled after each test without progress.
SHORTEST_NAP = 50e-6
LONGEST_NAP = 500e-6
SPINS = 100  # tests without progress until a waiting rank on a crowded node sleeps
PATIENCE = 0.1  # s of waiting before `waits` is called, and before signals are handled


class Operation:
    """Operation on the MPI thread, with its completion and error.

    memory: buffers that must exist until completion
    """

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
        return not self._complete.locked()

    def wait(self) -> None:
        if self._complete.locked():
            self._engine.hurry(self._complete)
        if self._error is not None:
            raise self._error

    def end(self, error: BaseException | None) -> None:
        self._error = error
        self._memory = None
        self._complete.release()


class Engine:
    """The MPI thread and its queue.

    crowded: more ranks than cores, so a waiting rank sleeps as well
    waits: called with True and False around a wait for other ranks beyond PATIENCE
    own_core: nothing else runs on the thread's core
    leaves: the process ends, so waits in shared memory raise RuntimeError
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
        self.leaves = False
        self._ended = False
        self._orders: deque[Operation] = deque()
        self._channels: dict[Hashable, deque[Operation]] = {}
        self._active: list[Operation] = []
        self._waiting = 0
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="MPI", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], T]) -> T:
        """Return function(), called by the thread; for short calls and set-up."""
        results: list[T] = []

        def steps() -> Steps:
            results.append(function())
            return
            yield

        self.start(steps()).wait()
        return results[0]

    def end(self, finalize: Callable[[], object]) -> None:
        """Call finalize() on the thread and end it: MPI aborts a process that tests a request later."""

        def last() -> None:
            self._ended = True
            finalize()

        self.call(last)

    def start(self, steps: Steps, channel: Hashable = None, memory: Any = None) -> Operation:
        """Start an operation. RuntimeError after `end`."""
        if self._ended:
            raise RuntimeError("MPI has ended in this process")
        operation = Operation(self, steps, channel or object(), memory)
        with self._wake:
            self._orders.append(operation)
            self._wake.notify()
        return operation

    def hurry(self, lock: threading.Lock) -> None:
        """Wait for an operation's lock while the MPI thread polls without sleep; report waits beyond PATIENCE."""
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
        self.waits(True)
        try:
            yield
        finally:
            self.waits(False)

    # The thread -----------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        nap = SHORTEST_NAP
        idle = 0
        while not self._ended:
            with self._wake:
                awake = self._waiting or self.own_core and self._active
                if not self._orders and not awake:
                    self._wake.wait(nap if self._active else None)
                orders = list(self._orders)
                self._orders.clear()
            for operation in orders:
                queue = self._channels.setdefault(operation.channel, deque())
                queue.append(operation)
                if len(queue) == 1:
                    self._begin(operation)
            moved = self._progress() or bool(orders)
            if moved:
                nap = SHORTEST_NAP
                idle = 0
                continue
            nap = min(2 * nap, LONGEST_NAP)
            idle += 1
            if awake and self.crowded and idle >= SPINS:
                time.sleep(SHORTEST_NAP)
            elif awake:
                os.sched_yield()

    def _begin(self, operation: Operation) -> None:
        self._active.append(operation)
        self._advance(operation)

    def _advance(self, operation: Operation) -> None:
        try:
            operation.requests = next(operation.steps)
        except StopIteration:
            self._end(operation, None)
        except BaseException as failure:  # `wait` raises it
            self._end(operation, failure)

    def _end(self, operation: Operation, error: BaseException | None) -> None:
        self._active.remove(operation)
        operation.end(error)
        queue = self._channels[operation.channel]
        queue.popleft()
        if queue:
            self._begin(queue[0])
        else:
            del self._channels[operation.channel]

    def _progress(self) -> bool:
        moved = False
        for operation in list(self._active):
            if self._ended:
                break
            try:
                requests = operation.requests
                complete = requests() if callable(requests) else self.test(requests)
            except BaseException as failure:
                moved = True
                self._end(operation, failure)
                continue
            if complete:
                moved = True
                self._advance(operation)
        return moved
