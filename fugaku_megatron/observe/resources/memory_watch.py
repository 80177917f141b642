"""Memory of all ranks: growth during a run, and a check before it."""

from __future__ import annotations

import platform
import time
from collections import deque
from collections.abc import Sequence
from itertools import combinations, pairwise
from statistics import median

import torch

from ...comm.agreement import Nodes, agree, find_nodes, first_rank
from ...comm.base import Comm
from ...comm.grid import Grid
from ...config import batches
from ...config.fields import check
from ...costs import memory
from ...costs.attention import attention_workspace_bytes
from ...costs.plan import Plan
from ...host.allocator import free_bytes, node_bytes, usage
from ...training.trainer import IterationResult
from ..observer import MetricValues, Observer, Say

SPAN = 50  # iterations of a steady growth, at least
FEWEST = 25  # readings in them, at least
BLOCKS = 5  # consecutive segments of readings, all of which must grow
LEAST = 8 << 20  # bytes in SPAN iterations; less is noise of Python and the allocator
SHARE = 0.4  # growth of every block relative to the mean, at least
READ_EVERY = 0.05  # s: a reading takes up to 0.1 ms
FIRST_ITERATIONS = 10  # without readings, because buffers are allocated
NEW = 10  # new readings between two searches for growth, which take about 1 ms
AGAIN = 0.5  # fraction of the reported remaining iterations at which to report again
PROCESS_BYTES = 250 << 20  # of a rank before its first tensor: Python, torch, MPI
BEYOND_DOUBT = 1.1  # a run that needs this many times its node's memory is refused


def steady_growth(readings: Sequence[tuple[int, int]]) -> float:
    """Return the steady growth in bytes per iteration, or 0. readings: (iteration, bytes), in order

    The rate is the median slope of all pairs (Theil 1950, Sen 1968), robust to outliers. Medians of consecutive
    segments must rise: a single step does not count.
    """
    if len(readings) < FEWEST or readings[-1][0] - readings[0][0] < SPAN - 1:
        return 0.0
    rate = median(
        (b - a) / (later - earlier) for (earlier, a), (later, b) in combinations(readings, 2)
    )
    bounds = [len(readings) * block // BLOCKS for block in range(BLOCKS + 1)]
    levels = [median(size for _, size in readings[a:b]) for a, b in pairwise(bounds)]
    smallest = SHARE * (levels[-1] - levels[0]) / (BLOCKS - 1)
    rises = all(b - a > smallest for a, b in pairwise(levels))
    return rate if rises and rate * SPAN >= LEAST else 0.0


class MemoryWatch(Observer):
    """Observer of memory: reports steady growth on any rank, and iterations until the node is full."""

    def __init__(self, world: Comm, nodes: Nodes, say: Say) -> None:
        self.world = world
        self.here = nodes.ranks
        self.say = say
        self._readings: deque[tuple[int, int]] = deque(maxlen=SPAN)
        self._iterations = 0
        self._seconds = 0.0  # of the last iteration
        self._new = 0
        self._next = 0.0
        self._told = float("inf")

    def end(self, result: IterationResult) -> MetricValues:
        self._seconds = result.seconds
        self._iterations += 1
        if self._iterations > FIRST_ITERATIONS and time.perf_counter() >= self._next:
            self._readings.append((self._iterations, usage().held))
            self._new += 1
            self._next = time.perf_counter() + READ_EVERY
        return {}

    def finish_interval(self, iteration: int) -> MetricValues:
        now = usage()
        rate = 0.0
        if self._new >= NEW:
            self._new = 0
            rate = steady_growth(list(self._readings))
        own = torch.tensor([now.resident, now.shared, rate], dtype=torch.float64)
        resident, shared, fastest = self.world.all_reduce(own, "max").tolist()
        if fastest:
            self._tell(iteration, rate)
        return {"resident_mib": resident / 2**20, "shared_mib": shared / 2**20}

    def _tell(self, iteration: int, rate: float) -> None:
        """Report the fastest-growing rank and the time until its node is full. Collective."""
        together = self.here.all_reduce(torch.tensor(rate, dtype=torch.float64)).item()
        rank = first_rank(self.world, (2**50 - int(rate),) if rate else None, 1)
        assert rank is not None, "some rank grows"
        free = free_bytes()
        left = float("inf")
        if together:
            left = free / together
        own = (left, self._text(rate, together, free, left * self._seconds))
        left, text = self.world.broadcast_object(own, root=rank)
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


def rank_bytes(plan: Plan, rank: int) -> int:
    """Return a rank's peak bytes: the --dry-run model and the process itself."""
    stage = Grid(*plan.layout.sizes).coords(rank)[1]
    attention = attention_workspace_bytes(plan.config, torch.get_num_threads())
    return plan.memory[stage].total + attention + PROCESS_BYTES


def check_memory(plan: Plan, world: Comm, nodes: Nodes | None = None) -> str:
    """Return the log's line. ValueError if a node has too little memory. Collective."""
    own = rank_bytes(plan, world.rank)
    has = node_bytes()
    here = (nodes or find_nodes(world)).ranks
    samples = batches.run_length(plan.config, plan.global_batch_size)[1]
    needed = int(here.all_reduce(torch.tensor(own)))
    needed += memory.data_index_bytes(plan.config, samples)
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
