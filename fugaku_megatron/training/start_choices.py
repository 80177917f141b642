"""What a run leaves to the program, settled before the model is built: the schedule, recompute, and the kernels.

Left out: how the performance model ranks schedules (`perf.search`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..comm.agreement import Nodes, find_nodes, on_root
from ..comm.base import Comm
from ..config import batches
from ..config.layout import Layout
from ..config.run_config import RunConfig
from ..costs import memory, run_schedule
from ..host import kernels
from ..host.allocator import node_bytes
from ..nn import autotune
from ..nn.ops import FAMILIES, Ops
from ..nn.parameter import PARAMETER_DTYPES
from ..pipeline.parts import AUTO
from .memory_watch import PROCESS_BYTES

if TYPE_CHECKING:
    from ..perf.model import System

MIB = 1 << 20
FIT = 0.9  # of a node's memory may be used by what is chosen; the system and the error of the model need the rest
MACHINE = "a64fx"  # whose costs rank the schedules everywhere, so that a dry run on another machine chooses the same


def room(run: RunConfig, layout: Layout, world: Comm | None = None, nodes: Nodes | None = None) -> int:
    """Bytes that the tensors of a rank may have, the same on every rank. Collective over `world`.

    From --memory-per-rank, or where it is not given from the smallest share of any node of which the ranks share nine tenths.
    Without a world from this node's memory, for one rank.
    """
    if own := run.training.memory_per_rank:
        return own * MIB - PROCESS_BYTES
    samples = batches.run_length(run, layout.global_batch_size(run))[1]
    share = int(FIT * node_bytes()) - memory.data_index_bytes(run, samples)
    if world is not None:
        share = int(world.all_reduce(torch.tensor(share // (nodes or find_nodes(world)).ranks.size), "min"))
    return share - PROCESS_BYTES


def modelled_system(layout: Layout) -> System:
    """The nodes, of one rank each, whose costs stand for those of any machine."""
    from ..perf.model import System
    from ..perf.software import THIS_PROJECT

    return System.from_names(MACHINE, THIS_PROJECT, layout.world_size, 1)


def settle(run: RunConfig, layout: Layout, world: Comm | None = None, nodes: Nodes | None = None) -> tuple[RunConfig, list[str]]:
    """The run with nothing left to choose, and the log's lines about it. Collective over `world`.

    Rank 0 chooses for all. Only --pipeline-schedule auto needs times, those of `modelled_system`: a run without it does not load
    the performance model.
    """
    ranks_schedules = run.parallel.pipeline_schedule == AUTO and layout.pp > 1
    if not run.training.recompute_auto and not ranks_schedules:
        return run, []
    space = room(run, layout, world, nodes)
    if not ranks_schedules:
        return on_root(world, lambda: run_schedule.settled(run, layout, space))
    from ..perf import search

    system = modelled_system(layout)
    return on_root(world, lambda: search.settled(run, layout, system, space))


@dataclass(frozen=True)
class Choice:
    """A backend for each family of operations, and what the log says of it."""

    backends: dict[str, str]
    lines: list[str]


def build_ops(run: RunConfig, backends: Mapping[str, str], library: Any = kernels) -> Ops:
    """The run's operations on these backends. library: the C++ kernels, or what a profiler put around them."""
    return Ops.build(backends, fp16_chunk=run.system.fp16_accumulation_chunk or 0,
                     keep_packed_weights=run.system.cache_packed_weights, kernels=library)


def choose_kernels(run: RunConfig, layout: Layout, world: Comm, saved: dict[str, str] | None = None) -> Choice:
    """The backend of every family, the same on all ranks, with the log's lines. Collective.

    A resumed run keeps the automatic choice that it was `saved` with: other kernels have other last bits.
    """
    choice = _with_fp16_accumulation(run, _backends(run, layout, world, saved))
    if not run.numbers.abft:
        return choice
    line = f"kernels: gemm native, its matmuls checked by checksums in layers {' '.join(run.numbers.abft)}"
    return Choice({**choice.backends, "gemm": "native"}, [*choice.lines, line])


def _backends(run: RunConfig, layout: Layout, world: Comm, saved: dict[str, str] | None) -> Choice:
    requested = run.system.kernels
    if requested == "auto" and saved:
        return Choice(saved, [f"kernels: as saved, {', '.join(f'{family} {name}' for family, name in saved.items())}"])
    if requested != "auto":
        return Choice(dict.fromkeys(FAMILIES, requested), [f"kernels: {requested} (instruction set {kernels.active()})"])
    timings = autotune.measure(run, layout.tp, PARAMETER_DTYPES[run.precision.name])
    return Choice(world.broadcast_object({t.family: t.faster for t in timings}),
                  [f"kernels: auto, forward and backward on this run's shapes, rank 0 (instruction set {kernels.active()})",
                   *autotune.table(timings)])


def _with_fp16_accumulation(run: RunConfig, choice: Choice) -> Choice:
    """The choice with products on the C++ kernels where linear layers sum in FP16: only they can."""
    chunk = run.system.fp16_accumulation_chunk
    if not chunk:
        return choice
    line = f"kernels: gemm native, partial sums of {chunk} terms in FP16, added up in FP32"
    return Choice({**choice.backends, "gemm": "native"}, [*choice.lines, line])
