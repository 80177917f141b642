"""--dry-run: the grid, every stage, the schedule and the memory of a run of any size, built in one process without traffic.

Stages are built for real (on the meta device) and their parameters compared with `accounting`. Left out: time (`perf`).
Run: python pretrain_gpt.py --recipe 30b --dry-run --world-size 12288 ...   Test: pytest tests/test_dry_run.py
"""

from __future__ import annotations

from dataclasses import dataclass

from .. import schedule
from ..comm.dry import DryComm
from ..comm.grid import Grid
from ..nn.model import Stage
from ..nn.ops import Ops
from ..run import accounting, batches, buckets
from ..run.accounting import Layout
from ..run.config import RunConfig
from ..run.memory import Memory, stage_memory


@dataclass(frozen=True)
class StagePlan:
    """One pipeline stage as one of its ranks holds it."""

    stage: int
    layers: range
    parameters: int
    in_flight: int
    memory: Memory


def plan_stage(run: RunConfig, layout: Layout, stage: int, microbatches: int) -> StagePlan:
    """Build stage `stage` on a world that only pretends to exist."""
    grid = Grid(layout.world_size, layout.tp, layout.pp)
    built = Stage(run, grid.groups(DryComm(grid.rank(0, stage, 0), layout.world_size)), Ops.build())
    parameters = sum(p.numel() for p in built.parameters())
    assert parameters == accounting.stage_parameters(run, layout, stage)
    in_flight = schedule.max_in_flight(stage, layout.pp, microbatches)
    return StagePlan(stage, accounting.stage_layers(run, stage), parameters, in_flight, stage_memory(run, layout, stage, in_flight))


def _alike(a: StagePlan, b: StagePlan) -> bool:
    return (a.parameters, a.in_flight, len(a.layers)) == (b.parameters, b.in_flight, len(b.layers))


def _row(plans: list[StagePlan]) -> str:
    first, last = plans[0], plans[-1]
    name = f"{first.stage}" if first is last else f"{first.stage}-{last.stage}"
    memory = first.memory
    figures = (memory.weights, memory.gradients, memory.optimizer, memory.activations, memory.logits,
               *([memory.saving] if memory.saving else []), memory.total)
    layers = f"{first.layers.start:>3}-{last.layers.stop - 1:<3}"
    return (f"  {name:>7} | {layers} | {first.parameters / 1e6:>10.2f} | {first.in_flight:>9} | "
            + " | ".join(f"{figure / 2**20:>9.0f}" for figure in figures))


def _table(plans: list[StagePlan]) -> list[str]:
    runs: list[list[StagePlan]] = []
    for plan in plans:
        if runs and _alike(runs[-1][-1], plan):
            runs[-1].append(plan)
        else:
            runs.append([plan])
    columns = ("weights", "gradients", "optimizer", "activ.", "logits", *(["saving"] if plans[0].memory.saving else []), "total")
    head = f"  {'stage':>7} | layers  | M params   | in flight | " + " | ".join(f"{c:>9}" for c in columns)
    return [head + "   (MiB per rank, model)", *map(_row, runs)]


def _picture(stages: int, microbatches: int, width: int = 24) -> list[str]:
    """The first instructions of a few stages: F forward, B backward, arrows left out."""
    mark = {schedule.FORWARD: "F", schedule.BACKWARD: "B"}
    lines = []
    for stage in sorted({0, stages // 2, stages - 1}):
        first = schedule.one_f_one_b(stage, stages, min(microbatches, stages + width))  # later ones come behind the shown steps
        steps = [f"{mark[i.op]}{i.microbatch}" for i in first if i.op in mark]
        more = f" ... ({2 * microbatches} in all)" if 2 * microbatches > width else ""
        lines.append(f"  stage {stage:>3}: {' '.join(steps[:width])}{more}")
    return lines


def report(run: RunConfig, world_size: int) -> str:
    """The plan as text. Raises ValueError for a run that does not fit on `world_size` ranks."""
    layout = Layout.from_run(run, world_size)
    size = layout.global_batch_size(run)
    microbatches = layout.microbatches(run, size)
    plans = [plan_stage(run, layout, stage, microbatches) for stage in range(layout.pp)]
    bubble = (layout.pp - 1) / (microbatches + layout.pp - 1)
    iterations, samples = batches.length(run.training, batches.RampUp.from_batch(run.batch, size))
    sent: dict[str, int] = {}
    for c in buckets.gradient_collectives(run, layout, 0):
        sent[f"{c.verb} {c.group}"] = sent.get(f"{c.verb} {c.group}", 0) + c.bytes
    return "\n".join([
        f"world size {world_size} = DP {layout.dp} x PP {layout.pp} x TP {layout.tp} (rank = (dp x PP + pp) x TP + tp)",
        f"parameters {accounting.parameters(run) / 1e6:.1f} M, "
        f"padded vocabulary {accounting.padded_vocab_size(run.model, layout.tp)}",
        f"global batch size {size}, micro-batch size {run.batch.micro_batch_size}, {microbatches} micro-batches per iteration; "
        f"{iterations} iterations, {samples} samples",
        f"schedule 1F1B, bubble {bubble:.1%} of the step's slots (model)",
        *_picture(layout.pp, microbatches),
        "memory of one rank per stage:",
        *_table(plans),
        f"FLOPs per iteration: {accounting.hardware_flops(run, size):.4e} hardware (the log's TFLOPs), "
        f"{accounting.model_flops(run, size):.4e} model",
        "bytes per rank, stage 0, once per iteration: "
        + (", ".join(f"{name} {bytes / 2**20:.1f} MiB" for name, bytes in sent.items()) or "none"),
    ])
