"""Memory and time of all ranks, and the loads of experts: what is gathered once in a while, and the log's lines of it.

A rank reads its own memory after an iteration, every READ_EVERY seconds at most. At the end of a log interval three numbers of all
ranks are reduced to their largest. Only where some rank grows (`steady_growth`) the ranks are asked which one, and what its node
has left for all ranks that grow there.

Each log interval also gathers where the time of every rank went, names slow ranks in the log, and writes --log-ranks. Ranks are
judged over log intervals that are enough together (JUDGED_ITERATIONS, JUDGED_SECONDS). A rank is named when it was slow in two
judgements in a row; a single one is often the system's. One small all-gather per interval. The tokens of each
expert are gathered in every iteration (`gather_loads`). Left out: the clock of a rank (`host.observed`), what is slow
(`logs.rank_table`), where tokens are counted (`nn.router.Router`).
"""

from __future__ import annotations

import platform
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import combinations
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ..comm.agreement import Nodes, agree, find_nodes, first_rank
from ..comm.base import Comm
from ..comm.grid import Grid, Groups
from ..config import batches
from ..config.checks import check
from ..config.layout import Layout
from ..config.run_config import ModelConfig, RunConfig
from ..costs import accounting, memory, run_schedule
from ..data.marks import Work
from ..host.allocator import free_bytes, node_bytes, usage
from ..host.energy import Counters
from ..host.observed import PHASES, Phases
from ..host.runtime import fma_peak_gflops
from ..logs.metrics import MetricsWriter, append
from ..logs.rank_table import NAMED, Interval, Straggler, find
from ..nn.experts import Experts
from ..nn.model import Stage
from ..nn.router import Router

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


class EnergyWatch:
    """Joules of all nodes during the iterations. counters: of this node. active: every node has some. Collective."""

    def __init__(self, world: Comm, nodes: Nodes, counters: Counters) -> None:
        self.world, self._counters = world, counters if nodes.leads else None
        self.active = bool(world.all_reduce(torch.tensor(int(bool(counters.counters))), "min"))
        self._joules, self._seconds = 0.0, 0.0

    def begin(self) -> None:
        """Before an iteration."""
        if self.active and self._counters:
            self._counters.joules()

    def end(self, seconds: float) -> None:
        """After it. seconds: that it took."""
        self._seconds += seconds
        if self.active and self._counters:
            passed = self._counters.joules()
            self._joules += float("nan") if passed is None else passed

    def finish_interval(self) -> float | None:
        """Watts of all nodes since the interval before; None where a counter is missing or has failed. Collective."""
        if not self.active:
            return None
        joules, seconds, self._joules, self._seconds = self._joules, self._seconds, 0.0, 0.0
        together = self.world.all_reduce(torch.tensor(joules, dtype=torch.float64)).item()
        return together / seconds if together > 0 and seconds > 0 else None  # NaN is above nothing


PROCESS_BYTES = 250 << 20  # of a rank before its first tensor: Python, torch, MPI
BEYOND_DOUBT = 1.1  # a run that needs this many times the memory of its node is refused
FMA_SHARE = (
    0.8,
    0.3,
)  # of the FP32 peak of multiply-adds: what a step reaches at best and where little fits the caches
PEAK_ROUNDS = 3


def rank_bytes(run: RunConfig, layout: Layout, rank: int) -> int:
    """Memory of one rank at the peak of a step, as --dry-run has it, with the process itself."""
    stage = Grid(*layout.sizes).coords(rank)[1]
    lists = run_schedule.of_run(run, layout.microbatches(run, layout.global_batch_size(run)))
    attention = memory.attention_bytes(run, layout.tp, torch.get_num_threads())
    return (
        memory.stage_memory(run, layout, stage, lists.held(stage)).total + attention + PROCESS_BYTES
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


def iteration_line(run: RunConfig, layout: Layout) -> str:
    """How long an iteration will take about, from the FMA peak measured here; communication is left out."""
    flops = accounting.hardware_flops(run, layout.global_batch_size(run)) / layout.world_size
    peak = fma_peak_gflops(PEAK_ROUNDS) * 1e9
    low, high = (_seconds(flops / peak / share) for share in FMA_SHARE)
    return (
        f"time: about {low} to {high} per iteration, with a log line every {run.output.log_interval} (estimate from "
        f"{peak / 1e9:.0f} GFLOP/s of FP32 multiply-adds in this rank)"
    )


def _seconds(value: float) -> str:
    return f"{value:.2g} s" if value < 100 else f"{value / 60:.0f} min"


def data_line(train: Any) -> str | None:
    """How often the data is read, from the rank's training set; None where it does not know."""
    epochs = getattr(train, "num_epochs", None)
    if epochs is None:
        return None
    once = "at most once" if epochs == 1 else f"{epochs:,} times (epochs)"
    return f"data: {len(train):,} samples of training read the data {once}"


def validation_line(valid: Any) -> str | None:
    """How much text validation has, from the rank's validation set; None where there is none, or it is random."""
    parts = getattr(valid, "datasets", [valid])
    if not all(hasattr(part, "num_tokens") for part in parts):
        return None
    documents, tokens = (
        sum(getattr(part, name) for part in parts) for name in ("num_documents", "num_tokens")
    )
    return f"data: validation has {documents:,} documents with {tokens:,} tokens"


def skip_line(run: RunConfig, train: Any) -> str | None:
    """What --skip-samples may do to the order of samples, which depends on how many a run of several epochs needs."""
    if (
        not run.data.skip_samples
        or run.training.train_iters is None
        or getattr(train, "num_epochs", 1) == 1
    ):
        return None
    return (
        "note: --skip-samples lengthens a run of --train-iters by the samples left out, and their number decides the order of "
        "data that is read several times: pass --train-samples to keep the order"
    )


Slow = set[tuple[int, str]]  # rank, phase
JUDGED_ITERATIONS, JUDGED_SECONDS = (
    10,
    5.0,
)  # a judgement needs as many of both; less is the noise of a start
ATTENTION_COST = 2.0  # seconds of attention's FLOPs, over those of as many FLOPs of a linear layer: about what is measured


class RankTimes:
    """The phases of a rank's iterations, and what all ranks' say at the end of an interval. say: prints a line on rank 0.

    Where attention ends with a document, a rank's share of the work goes with its phases.
    """

    def __init__(
        self,
        run: RunConfig,
        layout: Layout,
        world: Comm,
        phases: Phases,
        say: Callable[[str], None],
    ) -> None:
        self.run, self.layout, self.world, self.phases, self.say = run, layout, world, phases, say
        self.file = run.output.log_ranks if world.rank == 0 else None
        self.work = [
            sum(
                r.flops_forward + r.flops_backward
                for _, r in accounting.stage_records(run, layout, stage)
            )
            for stage in range(layout.pp)
        ]
        self._rows: list[
            list[float]
        ] = []  # of the interval's iterations: seconds of each phase, and the share
        self._judged: tuple[int, Tensor | float] = (
            0,
            0.0,
        )  # iterations since the last judgement, and their seconds (ranks, phases)
        self._before: Slow = set()  # slow in the judgement before
        self._named: Slow = set()

    def begin(self) -> None:
        """Before an iteration."""
        self.phases.begin()

    def end(self, seconds: float, work: Work | None = None) -> None:
        """After an iteration of so many seconds. work: of its marked samples."""
        self._rows.append([*self.phases.of_iteration(seconds), *self._share(work)])

    def _share(self, work: Work | None) -> list[float]:
        """This rank's computation over the mean of the data-parallel ranks, where their documents differ."""
        if work is None or not self.run.data.masks_attention:
            return []
        linear, attention = accounting.layer_flops(self.run)
        attention *= (
            ATTENTION_COST
            * work.squares
            / work.samples
            / self.run.model.seq_length
            / accounting.document_length(self.run)
        )
        return [(linear + attention * work.share) / (linear + attention)]

    def finish_interval(self, iteration: int) -> None:
        """After the interval's last iteration. Collective."""
        own = torch.tensor(self._rows).mean(0)
        everyone = torch.empty(self.world.size, len(own))
        self.world.all_gather(everyone, own)
        self._keep(self._interval(iteration, everyone))
        count, seconds = (
            self._judged[0] + len(self._rows),
            self._judged[1] + everyone * len(self._rows),
        )
        self._rows, self._judged = [], (count, seconds)
        if count >= JUDGED_ITERATIONS and float(seconds[0, : len(PHASES)].sum()) >= JUDGED_SECONDS:
            self._judged = 0, 0.0
            if self.world.size > 1:
                mean = seconds / count
                self._name(
                    find(
                        self._interval(iteration, mean),
                        self.work,
                        mean[:, len(PHASES) :].flatten().tolist(),
                    )
                )

    def _interval(self, iteration: int, seconds: Tensor) -> Interval:
        """seconds: of every rank in each phase (ranks, phases), and its share where documents differ."""
        phases = seconds[:, : len(PHASES)].t().tolist()
        return Interval(
            iteration,
            self.layout.tp,
            self.layout.pp,
            dict(zip(PHASES, phases, strict=True)),
            self.layout.cp,
        )

    def _keep(self, interval: Interval) -> None:
        try:
            append(self.file, interval.line())
        except OSError as error:  # not worth ending a run
            self.say(f"--log-ranks {self.file}: no longer written: {error.strerror}")
            self.file = None

    def _name(self, found: list[Straggler]) -> None:
        slow = {(s.rank, s.phase) for s in found}
        lasting = slow & self._before
        if lasting - self._named:
            shown = [s for s in found if (s.rank, s.phase) in lasting][:NAMED]
            hosts = [self.world.broadcast_object(socket.gethostname(), s.rank) for s in shown]
            more = f"; and {len(lasting) - NAMED} more" if len(lasting) > NAMED else ""
            self.say(
                "slow: "
                + "; ".join(s.text(host) for s, host in zip(shown, hosts, strict=True))
                + more
            )
        for rank, phase in sorted(self._named - slow):
            self.say(f"no longer slow: rank {rank}, {phase}")
        self._before, self._named = slow, (self._named | lasting) & slow


# Experts: the tokens of each one and the balancing losses. l layers of the model, e experts of a layer.

IDLE_NAMED = 8  # experts without tokens that a line names


def routers(stage: Stage) -> dict[int, Router]:
    """Those of a stage, by the layer, from 0."""
    return {
        layer.layer - 1: layer.mlp.router
        for layer in stage.layers
        if isinstance(layer.mlp, Experts)
    }


def forget_loads(stage: Stage) -> None:
    """Before an iteration: what was counted before belongs to none."""
    for router in routers(stage).values():
        router.loads.clear()


def gather_loads(stage: Stage, run: RunConfig, groups: Groups, microbatches: int) -> Tensor | None:
    """(l, e + 2) of an iteration in FP64, on every rank: each expert's tokens, the balancing losses and the z-loss, both means over
    micro-batches; zeros in layers without experts. None for a model without. Collective.
    """
    model = run.model
    if model.num_experts is None:
        return None
    table = torch.zeros(model.num_layers, model.num_experts + 2, dtype=torch.float64)
    for layer, router in routers(stage).items():
        table[layer] = router.take_load()
    if run.parallel.sequence_parallel:  # a rank has routed its part of the sequence
        groups.tp.all_reduce(table)
    groups.dp.all_reduce(table)
    groups.pp.all_reduce(table)
    table[:, -2:] /= microbatches * groups.data_size  # shares of the ranks of a sequence add up
    return table


def _mean_tokens(counts: Tensor) -> Tensor:
    """Return the mean of counts (l, e) over experts, (l, 1); 1 where every token is padding."""
    mean = counts.mean(1, keepdim=True)
    return mean.masked_fill(mean == 0, 1.0)


class ExpertWatch:
    """The tokens of every expert since the last report, (layers with experts, e). ep: ranks that have different experts."""

    def __init__(self, model: ModelConfig, ep: int = 1) -> None:
        self.model, self.ep = model, ep
        self.layers = [layer for layer, mlp in enumerate(model.mlps) if mlp == "experts"]
        self.tokens = torch.zeros(len(self.layers), model.num_experts or 0, dtype=torch.float64)

    def add(self, table: Tensor) -> dict[str, Any]:
        """Count an iteration's table (l, e + 2); returns its values for `logs.iteration.IterationMetrics`."""
        own = table[self.layers]
        counts = own[:, :-2]
        self.tokens += counts
        values = {"largest_load": (counts.amax(1) / _mean_tokens(counts).flatten()).max().item()}
        if self.model.balances:
            values["load_balancing_loss"] = own[:, -2].mean().item()
        if self.model.moe_z_loss_coeff:
            values["router_z_loss"] = own[:, -1].mean().item()
        return values

    def report(self, writer: MetricsWriter, iteration: int) -> None:
        """Keep every expert's load since the last report in the history, and print the extremes and experts without a token."""
        loads = self.tokens / _mean_tokens(self.tokens)
        writer.keep(
            "experts",
            iteration,
            layers=self.layers,
            loads=[[round(x, 3) for x in row] for row in loads.tolist()],
        )
        most, least = (
            self._named(index) + f" {loads.flatten()[index].item():.2f}"
            for index in (loads.argmax(), loads.argmin())
        )
        writer.print(
            f"load of the experts, 1 being the mean: {most} at most, {least} at least"
            + self._ranks()
        )
        idle = (self.tokens == 0).flatten().nonzero().flatten()
        if len(idle):
            more = len(idle) - IDLE_NAMED
            named = ", ".join(map(self._named, idle[:IDLE_NAMED])) + f" and {more} more" * (
                more > 0
            )
            writer.event(
                iteration,
                f"without a token since the last report: {named}: raise "
                "--moe-aux-loss-coeff, or pass --moe-router-enable-expert-bias",
            )
        self.tokens.zero_()

    def _ranks(self) -> str:
        """What the fullest of the ranks with different experts computes, which the others wait for."""
        if self.ep == 1:
            return ""
        each = self.tokens.shape[1] // self.ep
        loads = (
            self.tokens.view(len(self.layers), self.ep, each).sum((0, 2))
            / self.tokens.sum().clamp(min=1)
            * self.ep
        )
        first, load = int(loads.argmax()) * each, loads.max().item()
        return (
            f"; the rank with experts {first} to {first + each - 1} computes {load:.2f} of the mean"
        )

    def _named(self, index: Tensor) -> str:
        row, expert = divmod(int(index), self.tokens.shape[1])
        return f"expert {expert} of layer {self.layers[row]}"
