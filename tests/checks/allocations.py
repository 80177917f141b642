"""Bytes that torch allocates in an iteration."""

from collections.abc import Iterator

import pytest
import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.config.run_config import RunConfig
from fugaku_megatron.costs import run_schedule
from fugaku_megatron.costs.memory import Memory, stage_memory
from fugaku_megatron.optim.optimizer import Optimizer
from tests.helpers import make_trainer

STAGES = 4
MICROBATCHES = 8
PIPELINE = {
    "num_layers": 16,
    "hidden_size": 64,
    "seq_length": 128,
    "max_position_embeddings": 128,
    "micro_batch_size": 2,
    "global_batch_size": 2 * MICROBATCHES,
    "pipeline_model_parallel_size": STAGES,
    "pipeline_split": "even",
}
MODEL = {**PIPELINE, "hidden_dropout": 0.1, "attention_dropout": 0.1}


def state_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of a rank's moments and master weights."""
    found = 0
    for shard in optimizer.shards:
        if shard.model_weights is not None:
            found += shard.master.nbytes
        found += shard.exp_avg.nbytes + shard.exp_avg_sq.nbytes
        found += sum(moment.nbytes for moment in shard.eight_bit or ())
    return found


def plan_memory(run: RunConfig, ranks: int = 1, stage: int = 0, microbatches: int = 2) -> Memory:
    """Return a rank's memory by the formulas."""
    in_flight = run_schedule.build_schedule(run, microbatches).in_flight(stage)
    return stage_memory(run, Layout.from_run(run, ranks), stage, in_flight)


def check_peak(world: SoloComm, run: RunConfig, microbatches: int = MICROBATCHES) -> None:
    """Compare the bytes that a rank allocates for activations in a step with the formula."""
    layout = Layout.from_run(run, world.size)
    stage = world.rank // (layout.tp * layout.cp) % layout.pp
    planned = plan_memory(run, world.size, stage, microbatches)
    expected = planned.activations + planned.logits
    assert allocated_peak(world, run) == pytest.approx(expected, rel=0.05)


def allocations(events: list) -> Iterator:
    for event in events:
        if event.typed[0] == _EventType.Allocation:
            yield event
        yield from allocations(event.children)


def allocated_peak(world: SoloComm, run: RunConfig) -> int:
    """Return the most bytes allocated by an iteration's forwards and backwards."""
    torch.set_num_threads(1)
    trainer = make_trainer(world, run)
    trainer.train_step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        trainer.train_step()
    trainer.close()
    return allocated(recorded)[1]


def allocated(recorded: profile) -> tuple[int, int]:
    """Return (bytes at the end, most bytes) that torch has allocated in a record."""
    sizes: dict[
        int, int
    ] = {}  # by address: what was there before the record may be freed in it, and counts for nothing
    held = peak = 0
    events = allocations(recorded.profiler.kineto_results.experimental_event_tree())
    for event in sorted(events, key=lambda event: event.start_time_ns):
        address = event.typed[1].ptr
        change = event.typed[1].alloc_size
        if change > 0:
            sizes[address] = change
        held += change if change > 0 else -sizes.pop(address, 0)
        peak = max(peak, held)
    return held, peak
