"""Seconds per iteration on a machine: stage costs, the schedule's critical path, and per-iteration
work.

Left out: input and output, evaluation, checkpoints.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from ..config.fields import flag
from ..config.layout import Layout
from ..config.run_config import RunConfig
from ..config.training import SELECTIVE
from ..costs import memory as rank_memory
from ..costs import run_schedule
from ..costs import sizes as activations
from ..costs.buckets import gradient_collectives, zero_shards
from ..costs.flops import hardware_flops
from ..costs.records import Collective
from ..costs.stages import (
    model_parameters,
    quantized_elements,
    stage_layers,
    stage_parameters,
    virtual_stage_layers,
    virtual_stage_recompute_groups,
    whole_layers,
)
from ..pipeline.instructions import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from ..pipeline.schedule import Schedule
from ..pipeline.timeline import Costs, makespan
from . import peak_memory, software, work
from .cost import Network, Rank, Seconds, exposed, quantized_bytes
from .software import Parameters, Software
from .system import System

NOISE_FLOOR = 0.08  # of a time's logarithm: campaigns of the same run differ by 5 to 13 %


LARGE_SHARE = 0.25  # of an iteration, from which tensor parallelism between nodes is reported


BAND = 1.645  # standard deviations on each side that hold nine of ten runs of a normal distribution


# Standard deviation of the logarithm of a tensor-parallel collective's time without a similar fitted row: MPI's published 5.2 GB/s
# per ring link from 1 to 4 MiB (machines/a64fx.json) is two deviations from the fitted 1.2.
UNSEEN = 0.72


FAR = 2.0  # doublings of group size and bytes from which a fitted row gives no information


class Prediction(NamedTuple):
    """lower, upper: bounds for nine in ten runs
    slow_network: seconds with large all-reduces at the pessimistic rate, if there is one
    """

    seconds: float
    lower: float
    upper: float
    slow_network: float
    tflops_per_node: float
    memory_mib_max: float
    oom: bool
    bubble_fraction: float
    breakdown: dict[str, float]
    warnings: tuple[str, ...] = ()


class Step(NamedTuple):
    """Modelled seconds of an iteration, by cause."""

    slowest: Seconds  # one micro-batch, forward and backward, of the stage that takes longest
    schedule: Schedule
    costs: Costs  # of one micro-batch on every stage
    pipeline: float  # all micro-batches, the schedule's critical path
    pipeline_least: float  # all stages always busy, or one micro-batch down and up all stages, whichever is more
    pipeline_warmup: float  # additional time of the first micro-batch through the stages
    data_parallel: float  # exposed gradient reduction, tied embedding and ZeRO's all-gather
    optimizer: float
    other: float  # per iteration, independent of the work
    bubble_fraction: float  # share of `pipeline` in which a stage waits, mean over the stages

    @property
    def seconds(self) -> float:
        return (
            self.pipeline + self.pipeline_warmup + self.data_parallel + self.optimizer + self.other
        )

    @property
    def least_seconds(self) -> float:
        return self.seconds - self.pipeline + self.pipeline_least

    def breakdown(self) -> dict[str, float]:
        busy = self.slowest * self.schedule.microbatches
        waiting = self.pipeline - busy.total if self.schedule.placement.stages > 1 else 0.0
        return {
            **vars(busy),
            "slowest_stage_waits": waiting,
            "pipeline_warmup": self.pipeline_warmup,
            "data_parallel": self.data_parallel,
            "optimizer": self.optimizer,
            "other": self.other,
        }


@lru_cache(maxsize=4096)
def virtual_stage_work(
    run: RunConfig, virtual_stage: int, code: Software
) -> tuple[work.Pieces, work.Pieces, work.Pieces]:
    """Return a virtual stage's (forward, backward, deferrable backward) for one micro-batch.

    Weight-gradient matmuls in layers are deferrable. A head with logits in blocks computes its
    gradients in forward.
    """
    own = virtual_stage_layers(run, virtual_stage)
    layer_kinds = run.model.all_layer_kinds[own.start : own.stop]
    counts = Counter(layer_kinds)
    by_kind = {kind: work.phases(run, code, kind) for kind in counts}
    forward = [(by_kind[kind]["layer_forward"], count) for kind, count in counts.items()]
    backward = [(by_kind[kind]["layer_backward"], count) for kind, count in counts.items()]
    weights = [(by_kind[kind]["layer_weights"], count) for kind, count in counts.items()]
    if groups := virtual_stage_recompute_groups(run, virtual_stage):
        backward += work.recomputed_layers(run, layer_kinds, groups, code)
    elif run.training.recompute_granularity == SELECTIVE:
        for kind, count in counts.items():
            backward.append((work.recomputed_mixer(run, kind, code), count))
    phases = work.phases(run, code)
    if virtual_stage == 0:
        forward.append((phases["embedding_forward"], 1))
        backward.append((phases["embedding_backward"], 1))
    if virtual_stage == run.placement.virtual_stages - 1:
        forward.append((phases["head_forward"], 1))
        head_gradients = forward if code.counts["logits_in_chunks"] else backward
        head_gradients.append((phases["head_backward"], 1))
    gradients = work.weight_gradients(run, virtual_stage, counts, code)
    backward.append((gradients, 1))
    return forward, backward, weights


@lru_cache(maxsize=4096)
def stage_collectives(run: RunConfig, layout: Layout) -> dict[int, list[Collective]]:
    return {
        stage: gradient_collectives(run, layout, stage)
        for stage in sorted(set(peak_memory.kinds(run)))
    }


def step(
    run: RunConfig,
    layout: Layout,
    system: System,
    parameters: Parameters | None = None,
    without: str = "",
    slow: bool = False,
) -> Step:
    """Model one iteration at the full global batch size.

    parameters: None: the system's
    without: Seconds field to set to zero
    """
    rank = Rank.of(run, layout, system, parameters=parameters, slow=slow)
    network = rank.network
    lists = run_schedule.full_batch_schedule(run, layout)
    seconds = _virtual_stage_seconds(run, rank, without)
    stages = [
        _stage_seconds([seconds[n] for n in run.placement.virtual_stages_of[stage]])
        for stage in range(layout.pp)
    ]
    transfer = network.seconds("send", "pp", run.residual_bytes) * system.machine.host_factor
    costs = _costs(lists, seconds, transfer)
    pipeline = makespan(lists, costs)
    slowest = max(stages, key=lambda stage: stage[0].total + stage[1].total)
    busy = (
        sum([forward.total + backward.total for forward, backward, _ in stages])
        / layout.pp
        * lists.microbatches
    )
    once = sum(
        [forward.total + backward.total - weights.total for forward, backward, weights in stages]
    )
    return Step(
        slowest=slowest[0] + slowest[1],
        schedule=lists,
        costs=costs,
        pipeline=pipeline,
        pipeline_least=max(busy, once),
        pipeline_warmup=(layout.pp - 1) * rank.parameters.pipeline_warmup_s,
        data_parallel=_exposed(run, layout, network, lists, stages),
        optimizer=_optimizer(run, layout, rank),
        other=rank.parameters.iteration_s,
        bubble_fraction=1 - busy / pipeline,
    )


PhaseSeconds = tuple[Seconds, Seconds, Seconds]  # forward, backward, deferrable backward


def _virtual_stage_seconds(run: RunConfig, rank: Rank, without: str) -> list[PhaseSeconds]:
    kinds = peak_memory.virtual_stage_kinds(run)
    known = dict[int, Seconds]()
    found = dict[int, PhaseSeconds]()

    def seconds(pieces: work.Pieces) -> Seconds:
        for piece, _ in pieces:  # virtual stages of different kinds share layer work
            if id(piece) not in known:
                known[id(piece)] = rank.seconds(piece)
        total = sum([known[id(piece)] * times for piece, times in pieces], Seconds())
        return replace(total, **{without: 0.0}) if without else total

    for kind in set(kinds):
        forward, backward, weights = map(seconds, virtual_stage_work(run, kind, rank.software))
        found[kind] = forward, backward, weights
    return [found[kind] for kind in kinds]


def _stage_seconds(chunks: Sequence[PhaseSeconds]) -> PhaseSeconds:
    if len(chunks) == 1:
        return chunks[0]
    forward, backward, weights = (sum(phase, Seconds()) for phase in zip(*chunks))
    return forward, backward, weights


def _costs(lists: Schedule, seconds: Sequence[PhaseSeconds], transfer: float) -> Costs:
    where = lists.placement
    by_stage = [
        [seconds[where.virtual_stage(stage, chunk)] for chunk in range(where.model_chunks)]
        for stage in range(where.stages)
    ]
    operations = {FORWARD: [[f.total for f, _, _ in chunks] for chunks in by_stage]}
    if lists.splits_backward:
        operations[BACKWARD_INPUT] = [
            [b.total - w.total for _, b, w in chunks] for chunks in by_stage
        ]
        operations[BACKWARD_WEIGHT] = [[w.total for _, _, w in chunks] for chunks in by_stage]
    else:
        operations[BACKWARD] = [[b.total for _, b, _ in chunks] for chunks in by_stage]
    return Costs(operations, transfer)


def _exposed(
    run: RunConfig,
    layout: Layout,
    network: Network,
    lists: Schedule,
    stages: Sequence[PhaseSeconds],
) -> float:
    """Return a stage's longest wait for reductions and gathers, in seconds per iteration.

    If backward is split, only the last micro-batch hides a reduction.
    """
    active = network.active
    waits = []
    for stage, collectives in stage_collectives(run, layout).items():
        forward, backward, weights = stages[stage]
        hiding = weights if lists.splits_backward else backward
        waits.append(
            exposed(
                collectives,
                lambda c: network.seconds(c.verb, c.group, c.bytes),
                forward.total,
                hiding.total,
                active,
            )
        )
    return max(waits)


def _optimizer(run: RunConfig, layout: Layout, rank: Rank) -> float:
    counts = rank.software.counts["optimizer"]
    kinds = set(peak_memory.kinds(run))
    saved_bytes = 2 * activations.FP32_BYTES - run.optimizer.moment_bytes
    if run.optimizer.main_params_dtype == "bf16":
        saved_bytes += 2
    trained = [
        stage_parameters(run, stage) - rank_memory.frozen_elements(run, stage) for stage in kinds
    ]
    parameters = max(trained)
    layers = max(
        sum(whole_layers(run.model, layers) for layers in stage_layers(run, stage))
        for stage in kinds
    )
    fp32 = replace(rank, precision="fp32")
    matmuls = max(fp32.seconds(work.optimizer_matmuls(run, stage)).gemm for stage in kinds)
    moved = counts["moved"] * activations.FP32_BYTES - 2 * saved_bytes
    packed_bytes = 0
    if run.system.int8 and rank.software.style == "native":
        quantized = max(quantized_elements(run, stage) for stage in kinds)
        packed_bytes = rank_memory.INT8_COPIES * quantized_bytes(quantized, run.element_bytes)
    return (
        rank.traffic(moved * parameters / zero_shards(run, layout) + packed_bytes)
        + rank.calls(counts["calls_per_layer"] * layers)
        + matmuls / layout.replicas
    )


# (ranks of a group, bytes of its collective, whether the group is inside a node, software)
TensorParallel = tuple[int, int, bool, str]


def tensor_parallel(run: RunConfig, layout: Layout, system: System) -> TensorParallel | None:
    if layout.tp == 1:
        return None
    return (
        layout.tp,
        run.activation_bytes,
        layout.tp <= system.ranks_per_node,
        system.software.name,
    )


def extrapolation(own: TensorParallel | None, seen: Sequence[TensorParallel]) -> float:
    """Return 0 for a fitted collective, up to 1 for one unlike all; another network or software
    counts as a doubling.
    """
    if own is None:
        return 0.0
    distances = (
        abs(math.log2(own[0] / other[0]))
        + abs(math.log2(own[1] / other[1]))
        + (own[2] != other[2])
        + (own[3] != other[3])
        for other in seen
    )
    return min(1.0, min(distances, default=FAR) / FAR)


def deviation(
    case: tuple[RunConfig, Layout, System],
    parameters: Parameters,
    names: Sequence[str],
    covariance: Sequence[Sequence[float]],
    noise: float,
    seen: Sequence[TensorParallel] | None = None,
) -> float:
    """Return the time logarithm's standard deviation from parameters, noise and extrapolation.

    covariance: between the logarithms of `names`
    noise: in repeated times' logarithm
    seen: fitted rows' `tensor_parallel`; None if `noise` is the whole error
    """
    modelled = step(*case, parameters)
    slopes = []
    change = 0.02
    seconds = modelled.seconds
    for name in names:
        raised = replace(parameters, **{name: getattr(parameters, name) * math.exp(change)})
        slopes.append(math.log(step(*case, raised).seconds / seconds) / change)
    variance = sum(a * b * c for a, row in zip(slopes, covariance) for b, c in zip(slopes, row))
    far = 0.0 if seen is None else extrapolation(tensor_parallel(*case), seen)
    unseen = UNSEEN * far * modelled.breakdown()["tensor_parallel"] / seconds
    return math.sqrt(max(0.0, variance) + noise**2 + unseen**2)


def predict(run: RunConfig, system: System) -> Prediction:
    """Predict at the full global batch size. Raise ValueError if the run does not fit."""
    requested = run
    run = system.software.cut(run)
    layout = Layout.from_run(run, system.world_size)
    fitted = system.software.fitted
    run = peak_memory.with_recompute(run, layout, system)
    modelled = step(run, layout, system)
    width = math.exp(
        BAND
        * deviation(
            (run, layout, system),
            system.parameters,
            fitted.names,
            fitted.covariance,
            max(fitted.noise, NOISE_FLOOR),
            fitted.tensor_parallel,
        )
    )
    used = peak_memory.peak_mib(run, layout, system)
    tflops = (
        hardware_flops(run, layout.global_batch_size(run)) / modelled.seconds / system.nodes / 1e12
    )
    return Prediction(
        seconds=modelled.seconds,
        lower=modelled.seconds / width,
        upper=modelled.seconds * width,
        slow_network=step(run, layout, system, slow=True).seconds,
        tflops_per_node=tflops,
        memory_mib_max=used,
        oom=used > system.limit_mib,
        bubble_fraction=modelled.bubble_fraction,
        breakdown=modelled.breakdown(),
        warnings=(
            *warnings(requested, layout, system, tflops),
            *far_tensor_parallel(
                layout, system, modelled.breakdown()["tensor_parallel"] / modelled.seconds
            ),
        ),
    )


def warnings(run: RunConfig, layout: Layout, system: System, tflops: float) -> Iterator[str]:
    """Yield the limits of a prediction: unmeasured, unmodelled, or outside the fitted rows."""
    code = system.software
    if code.name == software.THIS_PROJECT and system.machine.name == "a64fx":
        yield f"nobody has run {code.name} on an A64FX: its figures come from this model and from emulation"
    elif not code.measured:
        yield f"software {code.name} is a model of efficiencies, not fitted to measured runs"
    yield from unmeasured(run, system)
    yield from ignored_settings(run, code)
    if run.system.cpu_frequency not in (None, system.machine.ghz):
        yield f"--cpu-frequency {run.system.cpu_frequency} is not the clock of this time, {system.machine.ghz}: pass --ghz"
    peak = (
        system.machine.peak_tflops[code.counts["computes_in"][run.precision.name]]
        * system.machine.clock
    )
    if tflops > peak and not run.system.splits_fp32 and not run.system.int8:
        yield (
            f"{tflops:.4g} TFLOPs are above the {peak:.4g} of the machine: the tables' formula counts attention's full "
            f"square and all of a recompute, software {code.name} computes less"
        )
    yield from outside(code.fitted.ranges, facts(run, layout, system))


def ignored_settings(run: RunConfig, code: Software) -> Iterator[str]:
    """Yield a warning for each setting of the run that the model or the software does not have."""
    unmodelled = {
        "--kernels torch": run.system.kernels == "torch",
        "--allocator stock": run.system.allocator == "stock",
        "--fp16-accumulation-chunk": run.system.fp16_accumulation_chunk is not None,
        "--cache-packed-weights": run.system.cache_packed_weights,
    }
    for name, is_given in unmodelled.items():
        if is_given:
            yield f"the time is that of a run without {name}, which is not modelled"
    lacking = code.lacking(run)
    if code.style != "native":
        given = {"fp32_matmul": run.system.splits_fp32, "int8": run.system.int8}
        lacking += [name for name, is_given in given.items() if is_given]
    for name in lacking:
        yield f"software {code.name} has no {flag(name)}: the time is that of a run without it"
    for name in lacking_choices(run, code):
        yield f"software {code.name} has no {name}: the time is that of one that has it"


def unmeasured(run: RunConfig, system: System) -> Iterator[str]:
    """Yield a warning for each rate that is assumed because the machine lacks a measurement."""
    code = system.software
    if not code.known_on(system.machine):
        yield f"software {code.name} was never measured on {system.machine.name}: its shares of peak are carried over"
    if system.nodes > 1 and system.machine.sources["link_gbs"].startswith("not measured"):
        yield f"the network of {system.machine.name} was not measured: calibrate on two nodes"
    if system.machine.kind == "cpu":
        note = system.machine.curve_note(system.machine.threads // system.ranks_per_node)
        if note:
            yield note
    if run.system.int8 and code.style == "native" and not system.machine.int8_curves:
        yield (
            f"no rate of INT8 matmuls was measured on {system.machine.name}: they are assumed to reach FP32's share of "
            "their peak, and to quantize operands at the memory's rate"
        )


def far_tensor_parallel(layout: Layout, system: System, share: float) -> Iterator[str]:
    """Yield a warning if tensor parallelism crosses nodes and takes a large `share` of the time."""
    inside = system.nodes == 1 or system.ranks_per_node % layout.tp == 0
    if inside or share < LARGE_SHARE:
        return
    ranks = system.ranks_per_node
    remedy = (
        f"with --tensor-model-parallel-size {ranks} or a divisor of it"
        if ranks > 1
        else "with more ranks on a node (--ranks-per-node)"
    )
    yield (
        f"tensor parallelism over {layout.tp} ranks leaves the nodes, which have {ranks}, and "
        f"takes {share:.0%} of the time: keep "
        f"it inside a node, {remedy}, and use pipeline stages between nodes"
    )


def lacking_choices(run: RunConfig, code: Software) -> Iterator[str]:
    """Yield settings of the run that the software does not have, in words."""
    training = run.training
    zero = run.parallel.zero_stage
    kind = training.recompute_granularity or "none"
    kind = "block" if kind == "full" and training.recompute_method == "block" else kind
    if kind not in code.choices.recompute:
        yield f"{kind} recompute"
    if run.cp > 1 and code.style != "native":
        yield f"--context-parallel-size {run.cp}"
    if zero not in code.choices.zero_stages:
        yield f"--zero-stage {zero}"


def facts(run: RunConfig, layout: Layout, system: System) -> dict[str, float]:
    return {
        "nodes": system.nodes,
        "parameters": model_parameters(run),
        "sequence length": run.model.seq_length,
        "micro-batch size": run.batch.micro_batch_size,
        "tensor-parallel size": layout.tp,
        "pipeline stages": layout.pp,
        "ranks per node": system.ranks_per_node,
    }


def outside(ranges: dict[str, tuple[float, float]], values: dict[str, float]) -> Iterator[str]:
    for name, (low, high) in ranges.items():
        if not low <= values[name] <= high:
            yield f"{name} {values[name]:.5g} is outside the fitted {low:.5g} to {high:.5g}"
