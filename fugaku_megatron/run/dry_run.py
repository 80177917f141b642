"""--dry-run: the grid, every stage, the schedule and the memory of a run of any size, built in one process without traffic.

Stages are built for real (on the meta device) and their parameters compared with `accounting`. Left out: other machines (`perf`).
Run: python pretrain_gpt.py --recipe 30b --dry-run --world-size 12288 ...
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..comm.base import SoloComm
from ..comm.grid import Grid
from ..config import batches
from ..config.layout import Layout
from ..config.run_config import RunConfig
from ..costs import accounting, run_schedule
from ..costs.activations import element_bytes
from ..costs.memory import Memory, frozen_elements, gradient_collectives, stage_memory
from ..costs.run_schedule import recomputed_layers
from ..data.chat_dataset import lost_lines, packing_lines
from ..host import placement
from ..nn.model import Stage
from ..nn.ops import Ops
from ..observe.memory import PROCESS_BYTES
from ..pipeline import schedule
from ..pipeline.instructions import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from ..pipeline.schedule_names import ONE_F_ONE_B
from ..pipeline.timeline import Costs, walk
from ..planner import plan_text
from ..planner.model import step
from ..training.micro_batches import datasets_of
from .plan import modelled_system, settle

LARGE_BUBBLE = 0.2  # from which on other layouts are worth a search


SLOTS = 3  # of a micro-batch on a stage: forward, gradient of the input, gradient of the weights


@dataclass(frozen=True)
class StagePlan:
    """One pipeline stage as one of its ranks holds it."""

    stage: int
    layers: list[range]  # of each chunk
    parameters: int
    in_flight: tuple[int, ...]  # micro-batches of each chunk between forward and backward, at most
    again: list[int]  # layers of each chunk that are recomputed
    memory: Memory


def plan_stage(run: RunConfig, layout: Layout, stage: int, lists: schedule.Schedule) -> StagePlan:
    """Build stage `stage` on a world that only pretends to exist."""
    grid = Grid(*layout.sizes)
    built = Stage(
        run, grid.groups(SoloComm(grid.rank(0, stage, 0), layout.world_size)), Ops.build()
    )
    parameters = sum(p.numel() for p in built.parameters())
    assert parameters == accounting.stage_parameters(run, layout, stage)
    held = lists.in_flight(stage)
    in_flight = tuple(map(max, zip(*(moment.activations for moment in held), strict=True)))
    return StagePlan(
        stage,
        accounting.stage_layers(run, stage),
        parameters,
        in_flight,
        recomputed_layers(run, stage),
        stage_memory(run, layout, stage, held),
    )


def _alike(a: StagePlan, b: StagePlan) -> bool:
    first, second = ((p.parameters, p.in_flight, p.again, [*map(len, p.layers)]) for p in (a, b))
    return first == second


def _figures(memory: Memory) -> dict[str, int]:
    """The columns of the table, of which those that are 0 on all stages are left out."""
    return {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activ.": memory.activations,
        "logits": memory.logits,
        "saving": memory.saving,
        "reused": -memory.reused,
        "total": memory.total,
    }


def _row(plans: list[StagePlan], columns: list[str]) -> str:
    first, last = plans[0], plans[-1]
    name = f"{first.stage}" if first is last else f"{first.stage}-{last.stage}"
    figures = _figures(first.memory)
    layers = ",".join(
        f"{a.start}-{b.stop - 1}" for a, b in zip(first.layers, last.layers, strict=True)
    )
    in_flight, again = (",".join(map(str, numbers)) for numbers in (first.in_flight, first.again))
    return (
        f"  {name:>7} | {layers:>7} | {first.parameters / 1e6:>10.2f} | {in_flight:>9} | {again:>9} | "
        + " | ".join(f"{figures[column] / 2**20:>9.0f}" for column in columns)
    )


def _table(plans: list[StagePlan]) -> list[str]:
    runs: list[list[StagePlan]] = []
    for plan in plans:
        if runs and _alike(runs[-1][-1], plan):
            runs[-1].append(plan)
        else:
            runs.append([plan])
    figures = [_figures(plan.memory) for plan in plans]
    columns = [column for column in figures[0] if any(each[column] for each in figures)]
    head = f"  {'stage':>7} | layers  | M params   | in flight | recompute | " + " | ".join(
        f"{c:>9}" for c in columns
    )
    return [head + "   (MiB per rank, model)", *(_row(run, columns) for run in runs)]


def _picture(lists: schedule.Schedule, width: int = 24) -> list[str]:
    """The first instructions of a few stages: F forward, B backward or I and W, its halves; arrows left out."""
    mark = {FORWARD: "F", BACKWARD: "B", BACKWARD_INPUT: "I", BACKWARD_WEIGHT: "W"}
    stages, chunks = lists.placement.stages, lists.placement.model_chunks
    first = replace(
        lists, microbatches=min(lists.microbatches, stages * chunks + width)
    )  # later ones come after the shown steps
    lines = []
    for stage in sorted({0, stages // 2, stages - 1}):
        steps = [
            f"{mark[i.op]}{i.microbatch}{'abcdefghijklmnopqrstuvwxyz'[i.model_chunk % 26] if chunks > 1 else ''}"
            for i in first.instructions(stage)
            if i.op in mark
        ]
        count = (3 if lists.splits_backward else 2) * lists.microbatches * chunks
        more = f" ... ({count} in all)" if count > width else ""
        lines.append(f"  stage {stage:>3}: {' '.join(steps[:width])}{more}")
    return lines


def _bubble(lists: schedule.Schedule) -> float:
    """Share of an iteration's slots in which a stage idles, where all stages cost alike (`timeline.Costs.alike`)."""
    stages, busy = lists.placement.stages, SLOTS * lists.microbatches
    if lists.name == ONE_F_ONE_B:  # whatever the number of micro-batches
        return (stages - 1) * SLOTS / (busy + (stages - 1) * SLOTS)
    few = lists.shortened()
    idle = walk(few, Costs.alike(few)) - SLOTS * few.microbatches
    return idle / (busy + idle)


def _time(run: RunConfig, layout: Layout, bubble: float) -> list[str]:
    """Modelled seconds of an iteration, as the picture has them, and what to do about a large bubble."""
    system = modelled_system(layout)
    ranks = f"{system.ranks_per_node} rank{'s' * (system.ranks_per_node > 1)}"
    seconds = step(run, layout, system, system.parameters).seconds
    lines = [
        f"an iteration takes {seconds:.4g} s on {system.nodes} nodes of {system.machine.name}, {ranks} a node (model)"
    ]
    if bubble >= LARGE_BUBBLE:
        lines.append(
            f"a bubble of {bubble:.1%} is large: fugaku-megatron plan --nodes N searches layouts for one that is faster"
        )
    return lines


def packing(run: RunConfig) -> list[str]:
    """How full the samples of --sft are. ValueError for chats that a run would refuse."""
    if not run.data.sft:
        return []
    if run.data.train_data_path or run.data.data_path:
        train = datasets_of(run, (1, 0, 0))[0]
        return [*packing_lines(train), *lost_lines(train)]
    return [
        "how full the samples of --sft are is not known without --data-path or --train-data-path"
    ]


def _divided_experts(run: RunConfig, layout: Layout) -> list[str]:
    """Where experts are, and what a layer sends for them."""
    if not run.parallel.divides_experts:
        return []
    records = accounting.layer_records(run, layout.tp, "experts")
    sent = sum(
        c.bytes for r in records for c in (*r.forward, *r.backward) if c.verb == "all_to_all"
    )
    return [
        f"experts: EP {layout.ep} x TP {layout.etp or layout.tp}, {(run.model.num_experts or 0) // layout.ep} of "
        f"{run.model.num_experts} on a rank, the same ones on {layout.edp} ranks of a stage; all-to-all of "
        f"{sent / 2**20:.1f} MiB per layer with experts and micro-batch, there and back, gradients included"
    ]


def _frozen_copies(run: RunConfig, layout: Layout) -> list[str]:
    """How much of the table's weights the ranks of a node with the same weights share."""
    if not run.lora.on or layout.replicas == 1:
        return []
    mib = (
        element_bytes(run)
        * max(frozen_elements(run, layout, stage) for stage in range(layout.pp))
        / 2**20
    )
    return [
        f"frozen weights: the ranks of a node with the same weights share one copy, which the table counts on each: k of them "
        f"need (k - 1) x {mib:.0f} MiB less"
    ]


def cores(node: placement.Node, root: str, world_size: int, rank_bytes: int) -> list[str]:
    """Which cores the ranks of the node described by root/sys compute on, one line for each; and what is wrong with it.

    rank_bytes: memory that a rank needs.
    """
    ranks = placement.map_ranks(node, min(world_size, len(node.domains)), rank_bytes)
    each = f"{len(ranks)} rank{'s' * (len(ranks) > 1)} a node"
    start = (
        f"mpiexec -n {len(ranks)}"
        if world_size <= len(ranks)
        else f"{-(-world_size // len(ranks))} nodes, {each}"
    )
    return [
        f"a node of {root}: {node.describe()}; {world_size} ranks: {start}",
        *(f"  {placement.rank_line(node, rank)}" for rank in ranks),
        *(f"  note: {line}" for line in placement.problems(node, ranks, {})),
    ]


def report(
    run: RunConfig, world_size: int, png: str | None = None, sys_root: str | None = None
) -> str:
    """The plan as text, and the pipeline over time as a picture in the file `png`. sys_root: folder of a node's /sys tree.

    Raises ValueError for a run that does not fit on `world_size` ranks, a picture that cannot be written, a folder without a tree.
    """
    node = placement.Node.read(sys_root) if sys_root else None
    layout = Layout.from_run(run, world_size)
    run, chosen = settle(run, layout)
    size = layout.global_batch_size(run)
    microbatches = layout.microbatches(run, size)
    lists = run_schedule.build_schedule(run, microbatches)
    plans = [plan_stage(run, layout, stage, lists) for stage in range(layout.pp)]
    iterations, samples = batches.run_length(run, size)
    if png:
        plan_text.draw(
            run, layout, modelled_system(layout), png, [plan.memory.total / 2**20 for plan in plans]
        )
    sent: dict[str, int] = {}
    for c in gradient_collectives(run, layout, 0):
        sent[f"{c.verb} {c.group}"] = sent.get(f"{c.verb} {c.group}", 0) + c.bytes
    active = (
        f"of which a token meets {accounting.active_parameters(run) / 1e6:.1f} M, "
        if run.model.num_experts
        else ""
    )
    return "\n".join(
        [
            f"world size {world_size} = DP {layout.dp} x PP {layout.pp} x TP {layout.tp} (rank = (dp x PP + pp) x TP + tp)"
            if layout.cp == 1
            else f"world size {world_size} = DP {layout.dp} x PP {layout.pp} x CP {layout.cp} x TP {layout.tp} "
            "(rank = ((dp x PP + pp) x CP + cp) x TP + tp)",
            *_divided_experts(run, layout),
            f"parameters {accounting.parameters(run) / 1e6:.1f} M, {active}"
            f"padded vocabulary {accounting.padded_vocab_size(run.model, layout.tp)}",
            f"global batch size {size}, micro-batch size {run.batch.micro_batch_size}, {microbatches} micro-batches per iteration; "
            f"{iterations} iterations, {samples} samples",
            *packing(run),
            *chosen,
            f"schedule {lists.name}"
            + f", {lists.placement.model_chunks} chunks of layers per stage"
            * (lists.placement.model_chunks > 1)
            + f", {lists.pending or layout.pp} micro-batches held between F and W"
            * lists.splits_backward
            + f", bubble {_bubble(lists):.1%} of the step's slots (model)",
            *_picture(lists),
            *_time(run, layout, _bubble(lists)),
            "memory of one rank per stage; recompute: layers of each chunk:",
            *_table(plans),
            *_frozen_copies(run, layout),
            f"FLOPs per iteration: {accounting.hardware_flops(run, size):.4e} hardware (the log's TFLOPs), "
            f"{accounting.model_flops(run, size):.4e} model",
            "bytes per rank, stage 0, once per iteration: "
            + (
                ", ".join(f"{name} {bytes / 2**20:.1f} MiB" for name, bytes in sent.items())
                or "none"
            ),
            *(
                cores(
                    node, sys_root, world_size, max(p.memory.total for p in plans) + PROCESS_BYTES
                )
                if node and sys_root
                else []
            ),
            *([f"wrote {png}"] if png else []),
        ]
    )
