"""Memory of all ranks: growth during a run, and a check before the run."""

from __future__ import annotations

import platform
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import combinations
from statistics import median

import torch

from ..comm.agreement import Nodes, agree, find_nodes, first_rank
from ..comm.base import Comm
from ..comm.grid import Grid
from ..config import batches
from ..config.fields import check
from ..config.layout import Layout
from ..config.run_config import RunConfig
from ..costs import memory, run_schedule
from ..host.allocator import free_bytes, node_bytes, usage

SPAN = 50  # iterations that a steady growth lasts at least


FEWEST = 25  # readings of them


BLOCKS = 5  # consecutive parts, each of which must have grown


LEAST = 8 << 20  # bytes in SPAN iterations: less is Python's and the allocator's business


SHARE = 0.4  # of the mean growth that every block must have


def steady_growth(readings: Sequence[tuple[int, int]]) -> float:
    """Bytes per iteration by which memory grows steadily; 0 where it does not. readings: (iteration, bytes), in order.

    The rate is the median of the slopes between all pairs of readings (Theil 1950, Sen 1968), which outliers hardly move. A step is
    no steady growth: the medians of consecutive parts must rise from each to the next.
    """
    if len(readings) < FEWEST or readings[-1][0] - readings[0][0] < SPAN - 1:
        return 0.0
    rate = median(
        (b - a) / (later - earlier) for (earlier, a), (later, b) in combinations(readings, 2)
    )
    bounds = [len(readings) * part // BLOCKS for part in range(BLOCKS + 1)]
    levels = [
        median(size for _, size in readings[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)
    ]
    smallest = SHARE * (levels[-1] - levels[0]) / (BLOCKS - 1)
    rises = all(b - a > smallest for a, b in zip(levels, levels[1:], strict=False))
    return rate if rises and rate * SPAN >= LEAST else 0.0


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
        largest = self.world.all_reduce(
            torch.tensor([now.resident, now.shared, rate], dtype=torch.float64), "max"
        ).tolist()
        if largest[2]:
            self._tell(iteration, seconds, rate)
        return largest[0] / 2**20, largest[1] / 2**20

    def _tell(self, iteration: int, seconds: float, rate: float) -> None:
        """Name the rank that grows fastest, and how long the memory of its node lasts. Collective."""
        together = self.here.all_reduce(torch.tensor(rate, dtype=torch.float64)).item()
        rank = first_rank(self.world, (2**50 - int(rate),) if rate else None, 1)
        assert rank is not None, "some rank grows"
        free, left = free_bytes(), float("inf")
        if together:
            left = free / together
        left, text = self.world.broadcast_object(
            (left, self._text(rate, together, free, left * seconds)), root=rank
        )
        if left < self._told:
            self.say(iteration, f"memory grows: {text}, which is {left:.0f} iterations")
            self._told = AGAIN * left

    def _text(self, rate: float, together: float, free: int, seconds: float) -> str:
        hours = f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{seconds / 60:.1f} minutes"
        return (
            f"rank {self.world.rank} (node {platform.node()}) by {rate / 2**20:.2f} MiB per iteration over the last {SPAN} or "
            f"more; its node or job has {free / 2**20:.0f} MiB left, and its {self.here.size} ranks grow by "
            f"{together / 2**20:.2f} MiB per iteration: they last for {hours}"
        )


PROCESS_BYTES = 250 << 20  # of a rank before its first tensor: Python, torch, MPI


BEYOND_DOUBT = 1.1  # a run that needs this many times the memory of its node is refused


def rank_bytes(run: RunConfig, layout: Layout, rank: int) -> int:
    """Memory of one rank at the peak of a step, as --dry-run has it, with the process itself."""
    stage = Grid(*layout.sizes).coords(rank)[1]
    lists = run_schedule.build_schedule(
        run, layout.microbatches(run, layout.global_batch_size(run))
    )
    attention = memory.attention_bytes(run, layout.tp, torch.get_num_threads())
    return (
        memory.stage_memory(run, layout, stage, lists.in_flight(stage)).total
        + attention
        + PROCESS_BYTES
    )


def check_memory(run: RunConfig, layout: Layout, world: Comm, nodes: Nodes | None = None) -> str:
    """The log's line. Raises ValueError on every rank when a node's ranks need more memory than it has. Collective."""
    own, has, here = (
        rank_bytes(run, layout, world.rank),
        node_bytes(),
        (nodes or find_nodes(world)).ranks,
    )
    samples = batches.run_length(run, layout.global_batch_size(run))[1]
    needed = int(here.all_reduce(torch.tensor(own))) + memory.data_index_bytes(run, samples)
    agree(
        world,
        lambda: check(
            needed <= BEYOND_DOUBT * has,
            f"this run needs about {_gib(needed)} on node {platform.node()} for its {here.size} ranks "
            f"(--dry-run shows each rank's share) and the node has {_gib(has)}: pass --checkpoint-activations or "
            "--recompute-auto, --sequence-parallel together with tensor parallelism, a smaller --micro-batch-size or model, more "
            "tensor- or pipeline-parallel ranks on other nodes, or --zero-stage 1",
        ),
        name_rank=False,
    )
    largest = int(world.all_reduce(torch.tensor(own), "max"))
    return (
        f"memory: about {_gib(largest)} for the largest rank, {_gib(needed)} for the {here.size} "
        f"ranks of this node, which has {_gib(has)} (model)"
    )


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
