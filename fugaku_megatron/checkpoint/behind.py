"""A save behind the run: what it holds is copied to memory at once, and a thread writes the copy while training goes on.

    saving = SaveBehind(save_steps(...))     on every rank, with shards of a Snapshot
    saving.done                              whether this rank's thread waits for the other ranks
    saving.advance()                         when all are done: what the ranks do together, by the thread that communicates
    saving.finish()                          waits for everything that is left

The thread never communicates. Whoever drives it finds out whether all ranks are done by a collective of its own, such as the one
that a run's loop has in every iteration anyway. Left out: what the steps are (save.py).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch

from .save import Steps
from .shards import Shard

_CPUS = os.sched_getaffinity(0)  # the mask of the process before its main thread is pinned: a thread inherits its creator's mask


class Snapshot:
    """Memory for a copy of shards, touched once, so that copying does not wait for the system to hand out pages."""

    def __init__(self, shards: list[Shard]) -> None:
        self._copies = [torch.empty(shard.tensor.numel(), dtype=shard.tensor.dtype).fill_(0) for shard in shards]

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for copy in self._copies)

    def take(self, shards: list[Shard]) -> list[Shard]:
        """The shards, of the sizes that it was made for, with copies of their tensors; valid until the next call."""
        return [replace(shard, tensor=copy.copy_(shard.tensor.detach().view(-1)))
                for shard, copy in zip(shards, self._copies, strict=True)]


class SaveBehind:
    """Steps of a save whose work a thread of its own does. Collective, but for `done`; raises the ValueErrors of the steps."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._work = self._start(next(steps))

    @staticmethod
    def _start(work: Callable[[], Any]) -> Future:
        outcome: Future = Future()

        def run() -> None:
            try:
                os.sched_setaffinity(0, _CPUS)
                outcome.set_result(work())
            except BaseException as error:  # of any kind: the steps raise it on all ranks
                outcome.set_exception(error)

        threading.Thread(target=run, name="save", daemon=True).start()
        return outcome

    @property
    def done(self) -> bool:
        """Whether this rank's present work is done."""
        return self._work.done()

    def advance(self) -> bool:
        """Go to the next work, which begins; True where there is none. Waits for this rank's present work."""
        try:
            self._work = self._start(self._steps.send(self._work.result))
        except StopIteration:
            return True
        return False

    def finish(self) -> None:
        """Wait until all steps are gone."""
        while not self.advance():
            pass
