"""--dry-run: the grid, every stage, the schedule and the memory for a run with any size, built in
one process without traffic.

Stages are built for real (on the meta device) and their parameters compared with `costs.stages`.
"""

from __future__ import annotations

import string
from collections import Counter
from dataclasses import asdict, replace
from itertools import groupby
from typing import NamedTuple

from ..comm.base import SoloComm
from ..comm.grid import Grid
from ..config.layout import Layout
from ..config.run_config import RunConfig
from ..costs.buckets import gradient_collectives
from ..costs.layers import layer_records
from ..costs.memory import Memory, frozen_bytes
from ..costs.plan import Plan
from ..costs.run_schedule import recomputed_layers
from ..costs.sizes import vocabulary_text
from ..costs.stages import active_parameters, model_parameters, stage_layers, stage_parameters
from ..data.chat.chat_dataset import lost_lines, packing_lines
from ..host.binding_problems import problems
from ..host.cpu_binding import map_ranks, rank_line
from ..host.topology import Node
from ..nn.model import Stage
from ..nn.ops import Ops
from ..observe.resources.memory_watch import PROCESS_BYTES
from ..pipeline.schedule import Schedule
from ..pipeline.schedule_names import row
from ..pipeline.timeline import Costs, walk
from ..planner import plan_text
from ..planner.model import step
from ..text.numbers import plural
from ..training.micro_batches import datasets_of
from .limits import MachineLimits, modelled_system

LARGE_BUBBLE = 0.2  # from which on other layouts are worth a search
SLOTS = 3  # of a micro-batch on a stage: forward, gradient of the input, gradient of the weights


class StagePlan(NamedTuple):
    """One rank's pipeline stage, by model chunk.

    in_flight: most micro-batches between forward and backward
    """

    stage: int
    layers: list[range]
    parameters: int
    in_flight: tuple[int, ...]
    again: list[int]
    memory: Memory

    @property
    def row(self) -> tuple[object, ...]:
        return self.parameters, self.in_flight, self.again, [*map(len, self.layers)]


def plan_stage(plan: Plan, stage: int) -> StagePlan:
    """Build a stage in this process, check the parameter formula, and return the stage's plan."""
    grid = Grid(*plan.layout.sizes)
    world = SoloComm(grid.rank(0, stage, 0), plan.layout.world_size)
    built = Stage(plan.config, grid.groups(world), Ops.build())
    parameters = sum(p.numel() for p in built.parameters())
    assert parameters == stage_parameters(plan.config, stage)
    moments = [moment.activations for moment in plan.schedule.in_flight(stage)]
    return StagePlan(
        stage,
        layers=stage_layers(plan.config, stage),
        parameters=parameters,
        in_flight=tuple(map(max, zip(*moments, strict=True))),
        again=recomputed_layers(plan.config, stage),
        memory=plan.memory[stage],
    )


HEADS = {"activations": "activ."}  # of columns that are narrower than their names


def _figures(memory: Memory) -> dict[str, int]:
    return {**asdict(memory), "reused": -memory.reused, "total": memory.total}


def _row(plans: list[StagePlan], columns: list[str]) -> str:
    first = plans[0]
    last = plans[-1]
    name = f"{first.stage}" if first is last else f"{first.stage}-{last.stage}"
    figures = _figures(first.memory)
    layers = ",".join(
        f"{a.start}-{b.stop - 1}" for a, b in zip(first.layers, last.layers, strict=True)
    )
    in_flight = ",".join(map(str, first.in_flight))
    again = ",".join(map(str, first.again))
    return (
        f"  {name:>7} | {layers:>7} | {first.parameters / 1e6:>10.2f} | {in_flight:>9} | {again:>9} | "
        + " | ".join(f"{figures[column] / 2**20:>9.0f}" for column in columns)
    )


def _table(plans: list[StagePlan]) -> list[str]:
    alike = [[*group] for _, group in groupby(plans, key=lambda plan: plan.row)]
    figures = [_figures(plan.memory) for plan in plans]
    columns = [column for column in figures[0] if any(each[column] for each in figures)]
    head = f"  {'stage':>7} | layers  | M params   | in flight | recompute | " + " | ".join(
        f"{HEADS.get(column, column):>9}" for column in columns
    )
    return [head + "   (MiB per rank, model)", *(_row(group, columns) for group in alike)]


PICTURED = 24  # instructions of a stage


def _picture(schedule: Schedule) -> list[str]:
    """Return a few stages' first instructions: F forward, B backward, or its halves I and W; without messages."""
    stages = schedule.placement.stages
    chunks = schedule.placement.model_chunks
    # Later micro-batches follow the steps that are shown.
    first = replace(schedule, microbatches=min(schedule.microbatches, stages * chunks + PICTURED))
    letters = string.ascii_lowercase if chunks > 1 else [""]
    count = (3 if schedule.splits_backward else 2) * schedule.microbatches * chunks
    more = f" ... ({count} in all)" if count > PICTURED else ""
    lines = []
    for stage in sorted({0, stages // 2, stages - 1}):
        steps = [
            f"{plan_text.LETTERS[i.op]}{i.microbatch}{letters[i.model_chunk % len(letters)]}"
            for i in first.instructions(stage)
            if i.op in plan_text.LETTERS
        ]
        lines.append(f"  stage {stage:>3}: {' '.join(steps[:PICTURED])}{more}")
    return lines


def _bubble(schedule: Schedule) -> float:
    """Return a stage's idle share of an iteration if all stages cost alike (`Costs.alike`)."""
    stages = schedule.placement.stages
    busy = SLOTS * schedule.microbatches
    if row(schedule.name).is_1f1b:  # for any number of micro-batches
        return (stages - 1) * SLOTS / (busy + (stages - 1) * SLOTS)
    few = schedule.shortened()
    idle = walk(few, Costs.alike(few)) - SLOTS * few.microbatches
    return idle / (busy + idle)


def packing(run: RunConfig) -> list[str]:
    """Return how full --sft samples are."""
    if not run.data.sft:
        return []
    if run.data.train_data_path or run.data.data_path:
        train = datasets_of(run, (1, 0, 0))[0]
        return [*packing_lines(train), *lost_lines(train)]
    return [
        "how full the samples of --sft are is not known without --data-path or --train-data-path"
    ]


def _divided_experts(run: RunConfig, layout: Layout) -> list[str]:
    if not run.parallel.divides_experts:
        return []
    records = layer_records(run)
    sent = sum(
        c.bytes for r in records for c in (*r.forward, *r.backward) if c.verb == "all_to_all"
    )
    return [
        f"experts: EP {layout.ep} x TP {layout.etp or layout.tp}, {(run.model.num_experts or 0) // layout.ep} of "
        f"{run.model.num_experts} on a rank, the same ones on {layout.edp} ranks of a stage; all-to-all of "
        f"{sent / 2**20:.1f} MiB per layer with experts and micro-batch, there and back, gradients included"
    ]


def _frozen_copies(run: RunConfig, layout: Layout) -> list[str]:
    """Return the memory of frozen weights shared inside a node, which the table counts on each rank."""
    if not run.has_frozen_weights or layout.replicas == 1:
        return []
    mib = max(frozen_bytes(run, stage) for stage in range(layout.pp)) / 2**20
    return [
        f"frozen weights: the ranks of a node with the same weights share one copy, which the table counts on each: k of them "
        f"need (k - 1) x {mib:.0f} MiB less"
    ]


def cores(node: Node, root: str, world_size: int, rank_bytes: int) -> list[str]:
    ranks = map_ranks(node, min(world_size, len(node.domains)), rank_bytes)
    start = f"mpiexec -n {len(ranks)}"
    if world_size > len(ranks):
        start = f"{-(-world_size // len(ranks))} nodes, {plural(len(ranks), 'rank')} a node"
    return [
        f"a node of {root}: {node.describe()}; {world_size} ranks: {start}",
        *(f"  {rank_line(node, rank)}" for rank in ranks),
        *(f"  note: {line}" for line in problems(node, ranks, {})),
    ]


def report(
    run: RunConfig, world_size: int, png: str | None = None, sys_root: str | None = None
) -> str:
    """Return the plan as text, and draw the pipeline over time into `png`."""
    node = Node.read(sys_root) if sys_root else None
    plan = MachineLimits().resolve(Plan.of(run, world_size))
    run = plan.config
    stages = [plan_stage(plan, stage) for stage in range(plan.layout.pp)]
    totals = [stage.memory.total for stage in stages]
    length = plan.length
    if png:
        mib = [total / 2**20 for total in totals]
        plan_text.draw(plan.config, plan.layout, modelled_system(plan.layout), png, mib)
    met = ""
    if run.model.num_experts:
        met = f"of which a token meets {active_parameters(run) / 1e6:.1f} M, "
    layout = plan.layout
    sizes = f"DP {layout.dp} x PP {layout.pp} x TP {layout.tp} (rank = (dp x PP + pp) x TP + tp)"
    if layout.cp > 1:
        sizes = (
            f"DP {layout.dp} x PP {layout.pp} x CP {layout.cp} x TP {layout.tp} "
            "(rank = ((dp x PP + pp) x CP + cp) x TP + tp)"
        )
    sent = Counter[str]()  # bytes of a rank
    for collective in gradient_collectives(run, layout, 0):
        sent[f"{collective.verb} {collective.group}"] += collective.bytes
    traffic = ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in sent.items())
    lines = [
        f"world size {layout.world_size} = {sizes}",
        *_divided_experts(plan.config, plan.layout),
        f"parameters {model_parameters(run) / 1e6:.1f} M, {met}{vocabulary_text(run)}",
        f"global batch size {plan.global_batch_size}, micro-batch size {plan.config.batch.micro_batch_size}, "
        f"{plan.microbatches} micro-batches per iteration; {length.iterations} iterations, {length.samples} samples",
        *packing(plan.config),
        *plan.choices,
        *_schedule_lines(plan),
        "memory of one rank per stage; recompute: layers of each chunk:",
        *_table(stages),
        *_frozen_copies(plan.config, plan.layout),
        f"FLOPs per iteration: {plan.flops.hardware:.4e} hardware (the log's TFLOPs), {plan.flops.model:.4e} model",
        f"bytes per rank, stage 0, once per iteration: {traffic or 'none'}",
    ]
    if node and sys_root:
        lines += cores(node, sys_root, world_size, max(totals) + PROCESS_BYTES)
    if png:
        lines.append(f"wrote {png}")
    return "\n".join(lines)


def _schedule_lines(plan: Plan) -> list[str]:
    schedule = plan.schedule
    bubble = _bubble(schedule)
    line = f"schedule {schedule.name}"
    if schedule.placement.model_chunks > 1:
        line += f", {schedule.placement.model_chunks} chunks of layers per stage"
    if schedule.splits_backward:
        line += f", {schedule.pending or plan.layout.pp} micro-batches held between F and W"
    line += f", bubble {bubble:.1%} of the step's slots (model)"
    system = modelled_system(plan.layout)
    seconds = step(plan.config, plan.layout, system).seconds
    lines = [
        line,
        *_picture(schedule),
        f"an iteration takes {seconds:.4g} s on {system.nodes} nodes of {system.machine.name}, 1 rank a node (model)",
    ]
    if bubble >= LARGE_BUBBLE:
        lines.append(
            f"a bubble of {bubble:.1%} is large: fugaku-megatron plan --nodes N searches layouts for one that is faster"
        )
    return lines
