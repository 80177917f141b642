"""Loading in the background, of numpy arrays: torch in this thread would start more OpenMP threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")

# the mask of the process before its main thread is pinned: a thread inherits its creator's mask
_CPUS = os.sched_getaffinity(0)


class Prefetcher(Generic[T]):
    """Iterator over `source` that loads up to `depth` items ahead in a thread.

    `next` raises the source's exception in place of the item. `close` stops the thread after the
    current item.
    """

    def __init__(self, source: Iterable[T], depth: int = 2):
        assert depth >= 1
        self._source = iter(source)
        self._room = threading.Semaphore(depth)
        self._ready: SimpleQueue[Future[T]] = SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="data-prefetch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        os.sched_setaffinity(0, _CPUS)
        ended = False
        while not ended:
            self._room.acquire()
            if self._closed:
                return
            item: Future[T] = Future()
            try:
                item.set_result(next(self._source))
            except BaseException as error:  # StopIteration, or the caller's to handle
                item.set_exception(error)
                ended = True
            self._ready.put(item)

    def __iter__(self) -> Prefetcher[T]:
        return self

    def __next__(self) -> T:
        if self._closed:
            raise ValueError("this Prefetcher was closed; make a new one to go on")
        item = self._ready.get()
        if item.exception() is None:
            self._room.release()
        else:
            self._ready.put(item)  # for the next call
        return item.result()

    def close(self) -> None:
        self._closed = True
        self._room.release()
        self._thread.join()
