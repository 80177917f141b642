"""The memory of all ranks in the log, and a word when it grows without end, before the node or the job has none left.

A rank reads its own use after an iteration, every READ_EVERY seconds at most. At the end of a log interval three numbers of all
ranks are reduced to their largest. Only where some rank grows (`logs.growth`) more is asked: which one, and what its node has left
for all ranks that grow there.
"""

from __future__ import annotations

import platform
import time
from collections import deque
from collections.abc import Callable

import torch

from ..comm.agreement import first_rank
from ..comm.base import Comm
from ..comm.topology import Nodes
from ..host.memory_use import free_bytes, usage
from ..logs.growth import SPAN, steady_growth

READ_EVERY = 0.05  # s: a reading takes up to 0.1 ms
FIRST_ITERATIONS = 10  # of a start, in which buffers get their memory
NEW = 10  # readings after which growth is looked for again: that takes about 1 ms
AGAIN = 0.5  # of the iterations left that were told: then it is told again


class MemoryWatch:
    """Readings of this rank, and what all ranks' say. nodes: who shares memory. say: into the log, with the iteration."""

    def __init__(self, world: Comm, nodes: Nodes, say: Callable[[int, str], None]) -> None:
        self.world, self.here, self.say = world, nodes.ranks, say
        self._readings: deque[tuple[int, int]] = deque(maxlen=SPAN)
        self._iterations, self._new, self._next, self._told = 0, 0, 0.0, float("inf")

    def read(self, iteration: int) -> None:
        """After each iteration."""
        self._iterations += 1
        if self._iterations > FIRST_ITERATIONS and time.perf_counter() >= self._next:
            self._readings.append((iteration, usage().held))
            self._new += 1
            self._next = time.perf_counter() + READ_EVERY

    def _rate(self) -> float:
        """Bytes per iteration that this rank grows by; 0 while too little is new."""
        if self._new < NEW:
            return 0.0
        self._new = 0
        return steady_growth(list(self._readings))

    def finish_interval(self, iteration: int, seconds: float) -> tuple[float, float]:
        """Resident and shared memory of the largest rank, MiB. seconds: of an iteration. Collective."""
        now, rate = usage(), self._rate()
        largest = self.world.all_reduce(torch.tensor([now.resident, now.shared, rate], dtype=torch.float64), "max").tolist()
        if largest[2]:
            self._tell(iteration, seconds, rate)
        return largest[0] / 2**20, largest[1] / 2**20

    def _tell(self, iteration: int, seconds: float, rate: float) -> None:
        """Name the rank that grows fastest, and how long the memory of its node lasts. Collective."""
        together = self.here.all_reduce(torch.tensor(rate, dtype=torch.float64)).item()
        rank = first_rank(self.world, (2**50 - int(rate),) if rate else None, 1)
        free, left = free_bytes(), float("inf")
        if together:
            left = free / together
        left, text = self.world.broadcast_object((left, self._text(rate, together, free, left * seconds)), root=rank)
        if left < self._told:
            self.say(iteration, f"memory grows: {text}, {left:.0f} iterations")
            self._told = AGAIN * left

    def _text(self, rate: float, together: float, free: int, seconds: float) -> str:
        hours = f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{seconds / 60:.1f} minutes"
        return (f"rank {self.world.rank} (node {platform.node()}) by {rate / 2**20:.2f} MiB per iteration over the last {SPAN} or "
                f"more; its node or job has {free / 2**20:.0f} MiB left, which last for the {together / 2**20:.2f} MiB per "
                f"iteration of its {self.here.size} ranks {hours}")
