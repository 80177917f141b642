"""Choices by the performance model: a run's schedule and recompute, and its parallel layout.

A choice depends on its arguments alone, so ranks and dry runs agree.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..config import features
from ..config.fields import FieldValues, of_topic
from ..config.layout import Layout, check_split
from ..config.parallel import CP_COMM_TYPES, SCHEDULE, ParallelConfig
from ..config.run_config import RunConfig
from ..config.training import RECOMPUTE, BatchConfig, TrainingConfig
from ..costs import run_schedule
from ..costs.memory import stage_memory
from ..pipeline.schedule_names import AUTO, ONE_F_ONE_B, row
from ..pipeline.zero_bubble import NoList
from ..text.progress_line import ProgressLine
from . import peak_memory
from .model import Prediction, predict, step
from .software import Choices, with_schedule
from .system import System

Held = frozenset[str]  # fields that the command line sets
Refuse = Callable[[RunConfig, System], str | None]
LONGEST = 512  # stages x micro-batches up to which several zero-bubble lists are tried; each is slow to make


PENDING = (1.5, 2)  # micro-batches per stage to try for zero-bubble schedules, besides 1


class Order(NamedTuple):
    """pending: --zero-bubble-max-pending-backward."""

    name: str
    chunks: int
    pending: int | None = None


class Candidate(NamedTuple):
    """seconds: per iteration."""

    run: RunConfig
    seconds: float
    fits: bool

    @property
    def name(self) -> str:
        parallel = self.run.parallel
        chunks = self.run.placement.model_chunks
        pending = parallel.zero_bubble_max_pending_backward
        name = parallel.schedule
        if chunks > 1 and row(name).chunks is None:
            name += f" with {chunks} chunks"
        if pending:
            name += f" holding {pending} micro-batches"
        return name


def schedules(choices: Choices, stages: int, microbatches: int) -> list[Order]:
    """Return the orders to try; with few micro-batches, also orders of more model chunks."""
    few = microbatches <= min(2 * stages, LONGEST // stages)
    orders = []
    for name in choices.schedules:
        schedule = row(name)
        chunks = schedule.tried_chunks
        if few:
            chunks += schedule.tried_chunks_if_few
        for count in chunks:
            if count in (1, schedule.chunks):
                orders += [Order(name, count, n) for n in pendings(name, stages, microbatches)]
            else:
                orders.append(Order(name, count))
    return orders


def pendings(name: str, stages: int, microbatches: int) -> tuple[int | None, ...]:
    """Return the minimum in flight, and more if there are enough micro-batches."""
    more = (
        PENDING if row(name).splits_backward and stages < microbatches <= LONGEST // stages else ()
    )
    return None, *(math.ceil(each * stages) for each in more)


def scheduled(run: RunConfig, layout: Layout, system: System, space: float) -> list[Candidate]:
    """Return the run in every possible schedule, best first. space: bytes for a rank's tensors."""
    found = []
    microbatches = layout.microbatches(run)
    for order in schedules(system.software.choices, layout.pp, microbatches):
        asked = with_schedule(run, *order)
        try:
            check_split(asked)
        except ValueError:  # too few layers, or layers given for another number of parts
            continue
        with contextlib.suppress(NoList):
            lists = run_schedule.full_batch_schedule(asked, layout)
            chosen = run_schedule.with_recompute(asked, layout, space, lists.in_flight)
            most = max(
                stage_memory(chosen, layout, stage, lists.in_flight(stage)).total
                for stage in range(layout.pp)
            )
            seconds = step(chosen, layout, system).seconds
            found.append(Candidate(run=chosen, seconds=seconds, fits=most <= space))
    return sorted(found, key=lambda candidate: (not candidate.fits, candidate.seconds))


def resolve(
    run: RunConfig, layout: Layout, system: System, space: float | None = None
) -> tuple[RunConfig, list[str]]:
    """Return the run with every automatic choice resolved, and log lines about the choices.

    If no schedule fits, use 1F1B, which needs least memory.
    """
    if space is None:
        space = peak_memory.tensor_room(run, layout, system)
    recompute_auto = run.training.recompute_auto
    if run.parallel.pipeline_schedule != AUTO or layout.pp == 1:
        if not recompute_auto:
            return run, []
        return run_schedule.resolve_recompute(run, layout, space)
    found = scheduled(run, layout, system, space)
    fitting = [candidate for candidate in found if candidate.fits]
    tight = [candidate for candidate in found if not candidate.fits]
    if fitting:
        best = fitting[0]
    else:
        best = next(c for c in found if row(c.run.parallel.schedule).is_1f1b)
    line = f"schedule: {best.name}, {best.seconds:.3g} s an iteration"
    line += "".join(f"; {c.name} {c.seconds:.3g} s" for c in fitting[1:])
    if tight:
        line += f"; no memory for {', '.join(c.name for c in tight)}"
    lines = [f"{line} (model, {system.machine.name})"]
    if recompute_auto:
        lines.append(run_schedule.choice_line(best.run, space))
    return best.run, lines


MICRO_BATCHES = (1, 2, 4, 8, 16)


# document 004: the batch grows in steps of 32 over a DP that 4 divides
RAMP_DP = 4
RAMP_BATCH = 32


class LayoutCandidate(NamedTuple):
    """seconds: per iteration; least_seconds: without a bubble
    memory_mib: on the fullest rank
    breakdown: seconds by cause (`Step.breakdown`)
    """

    asked: RunConfig
    run: RunConfig
    system: System
    layout: Layout
    seconds: float
    memory_mib: float
    bubble_fraction: float
    least_seconds: float
    breakdown: dict[str, float]

    def predict(self) -> Prediction:
        return predict(self.run, self.system)


PERIOD = 5.0  # seconds between two lines; a shorter search prints none


def _show(progress: ProgressLine, done: int, total: int, what: str, best: float) -> None:
    fastest = f", the fastest {best:.4g} s an iteration" if best < math.inf else ""
    progress(f"search: {done} of {total} {what} after {progress.seconds:.0f} s{fastest} (model)")


class Search(NamedTuple):
    """Plans, fastest first. dropped: reason -> number of impossible layouts."""

    plans: tuple[LayoutCandidate, ...]
    dropped: Counter[str]


def search(
    run: RunConfig,
    system: System,
    held: Held,
    ramp_divisible: bool = False,
    refuse: Refuse = lambda run, system: None,
) -> Search:
    """Model every layout with 1F1B, and promising ones with the other schedules. Print the progress on stderr.

    held: config fields that keep the run's value
    refuse: returns the reason against a layout, or None
    """
    progress = ProgressLine(PERIOD)
    best = math.inf  # seconds per iteration
    run = system.software.cut(run)
    plans = list[LayoutCandidate]()
    dropped = Counter[str]()
    possible = []
    for candidate in candidates(with_schedule(run, ONE_F_ONE_B, 1), system, held, ramp_divisible):
        if isinstance(candidate, str):
            dropped[candidate] += 1
        elif problem := refuse(*candidate):
            dropped[problem] += 1
        else:
            possible.append(candidate)
    for number, (layout, on) in enumerate(possible):
        _show(progress, number, total=len(possible), what="layouts with 1F1B", best=best)
        outcome = _judge(layout, on)
        if isinstance(outcome, str):
            dropped[outcome] += 1
        else:
            plans.append(outcome)
            best = min(best, outcome.seconds)
    asked = _asked(run, held)
    kept = plans if asked is None or row(asked).is_1f1b else []
    found = [*kept, *_rescheduled(plans, kept, run, held, progress)]
    return Search(
        plans=tuple(sorted(found, key=lambda p: (p.seconds, p.memory_mib))), dropped=dropped
    )


# Best plans of all schedules to find, and most layouts to try with each schedule.
WANTED = 10
TRIED = 60


def _asked(run: RunConfig, held: Held) -> str | None:
    given = {*of_topic(ParallelConfig, SCHEDULE)} & held
    return run.parallel.schedule if given and run.parallel.pipeline_schedule != AUTO else None


def _orders(run: RunConfig, plan: LayoutCandidate, held: Held) -> list[Order]:
    stages = plan.layout.pp
    microbatches = plan.layout.microbatches(plan.run)
    if (name := _asked(run, held)) is None:
        return [
            order
            for order in schedules(plan.system.software.choices, stages, microbatches)
            if not row(order.name).is_1f1b
        ]
    if row(name).is_1f1b:
        return []
    given = "zero_bubble_max_pending_backward" in held
    chosen = (
        (run.parallel.zero_bubble_max_pending_backward,)
        if given
        else pendings(name, stages, microbatches)
    )
    return [Order(name, run.placement.model_chunks, pending) for pending in chosen]


def _rescheduled(
    plans: Sequence[LayoutCandidate],
    kept: Sequence[LayoutCandidate],
    run: RunConfig,
    held: Held,
    progress: ProgressLine,
) -> list[LayoutCandidate]:
    """Return the plans in schedules other than 1F1B.

    Layouts are ordered by their lower bound; once it exceeds the WANTED best plans, stop. A
    schedule from the flags is tried with every layout.
    """
    found: list[LayoutCandidate] = []
    ordered = sorted(
        (plan for plan in plans if plan.layout.pp > 1), key=lambda plan: plan.least_seconds
    )
    best = sorted(plan.seconds for plan in kept)[:WANTED]
    tried = ordered[:TRIED] if _asked(run, held) is None else ordered
    for number, plan in enumerate(tried):
        if len(best) == WANTED and plan.least_seconds >= best[-1]:
            break
        for order in _orders(run, plan, held):
            fastest = best[0] if best else math.inf
            _show(
                progress,
                number,
                total=len(tried),
                what="layouts with the other schedules",
                best=fastest,
            )
            if plan.layout.pp * order.chunks > plan.run.model.num_layers:
                continue
            outcome = _judge(with_schedule(plan.asked, *order), plan.system)
            if isinstance(outcome, LayoutCandidate):
                found.append(outcome)
                best = sorted([*best, outcome.seconds])[:WANTED]
    return found


def candidates(
    run: RunConfig, system: System, held: Held, ramp_divisible: bool = False
) -> Iterator[tuple[RunConfig, System] | str]:
    """Yield every combination as (run, system), or the reason why its numbers do not divide."""
    choices = system.software.choices
    model = run.model
    parallel = run.parallel
    layers = model.num_layers

    def tried(field: str, values: Iterable[Any]) -> Sequence[Any]:
        return [run.values[field]] if field in held else list(values)

    cuts = range(1, layers + 1) if parallel.pipeline_split == "balanced" else _divisors(layers)
    switched = {
        name: tried(features.field_of(name), values if name in choices.names else (False,))
        for name, values in SWITCHED.items()
    }
    combined = list(
        itertools.product(
            tried("tensor_model_parallel_size", _divisors(model.query_groups)),
            _contexts(run, choices, held),
            tried("micro_batch_size", MICRO_BATCHES),
            tried("zero_stage", choices.zero_stages),
            (system.ranks_per_node,) if "ranks_per_node" in held else choices.ranks_per_node,
        )
    )
    for pp in tried("pipeline_model_parallel_size", cuts):
        for training in _recomputes(run, layers // pp, held, choices.recompute):
            for tp, (cp, cp_comm_type), mbs, stage, number in combined:
                host = replace(system, ranks_per_node=number)
                batch = replace(run.batch, micro_batch_size=mbs)
                dp, rest = divmod(host.world_size, tp * pp * cp)
                # of a shape with a rest once
                reason = _indivisible(host, dp, rest, cp, stage, batch, ramp_divisible)
                for switches in _divided(
                    run, _switches(switched, 1 if rest else tp, stage, number), tp, dp * cp, held
                ):
                    yield reason or (
                        replace(
                            run,
                            training=training,
                            batch=batch,
                            parallel=replace(
                                parallel,
                                tensor_model_parallel_size=tp,
                                pipeline_model_parallel_size=pp,
                                context_parallel_size=cp,
                                cp_comm_type=cp_comm_type,
                                zero_stage=stage,
                                **switches,
                            ),
                        ),
                        host,
                    )


# Sequence length from which context parallelism is tried, and its largest size.
LONG = 16384
SHARERS = 64


def _contexts(
    run: RunConfig, choices: Choices, held: Held
) -> Iterator[tuple[int, tuple[str, ...] | None]]:
    given = run.parallel.cp_comm_type
    shared = choices.names and run.model.seq_length >= LONG
    sizes = [2**i for i in range(SHARERS.bit_length())] if shared else [1]
    if "context_parallel_size" in held:
        sizes = [run.cp]
    for cp in sizes:
        each = "cp_comm_type" not in held and cp > 1
        yield from ((cp, (kind,)) for kind in CP_COMM_TYPES) if each else [(cp, given)]


def _indivisible(
    system: System, dp: int, rest: int, cp: int, zero_stage: int, batch: BatchConfig, ramp: bool
) -> str | None:
    """Return a reason against these numbers, or None. rest: ranks left by dp."""
    if system.ranks_per_node > system.machine.max_ranks:
        return "more ranks than a node has threads or GPUs"
    if rest:
        sizes = "TP x PP x CP" if cp > 1 else "TP x PP"
        return f"{sizes} does not divide the number of ranks"
    assert (size := batch.global_batch_size) is not None
    if size % (dp * batch.micro_batch_size):
        return "micro-batch x DP does not divide the global batch"
    if zero_stage and dp * cp == 1:
        return "ZeRO needs more than one data-parallel rank"
    if ramp and (dp % RAMP_DP or size % RAMP_BATCH):
        return (
            f"batch ramp-up: DP is not divisible by {RAMP_DP} or the global batch by {RAMP_BATCH}"
        )
    return None


# Features that a search leaves as the run has them, because they change results.
KEPT = (features.GRAD_REDUCE_IN_BF16,)


# Flags that the search sets: on if free in the model and without effect on results, or both on and off.
SWITCHED: dict[str, tuple[bool, ...]] = {
    features.OVERLAP_GRAD_REDUCE: (True,),
    features.OVERLAP_PARAM_GATHER: (True,),
    features.SEQUENCE_PARALLEL: (False, True),
    features.TP_COMM_OVERLAP: (False, True),
}


def _switches(
    tried: dict[str, Sequence[bool]], tp: int, zero_stage: int, ranks_per_node: int
) -> Iterator[FieldValues]:
    """Yield every meaningful combination of SWITCHED flags, by field.

    Skip overlapped collectives inside a node, whose reductions use all cores; always overlap with
    one rank per node.
    """
    for sequence in tried[features.SEQUENCE_PARALLEL] if tp > 1 else (False,):
        exchanges = (
            tried[features.TP_COMM_OVERLAP] if sequence and tp > ranks_per_node else (False,)
        )
        for overlapped in exchanges if ranks_per_node > 1 else exchanges[-1:]:
            for reduce in tried[features.OVERLAP_GRAD_REDUCE]:
                for gather in tried[features.OVERLAP_PARAM_GATHER]:
                    values = {
                        features.SEQUENCE_PARALLEL: sequence,
                        features.TP_COMM_OVERLAP: overlapped,
                        features.OVERLAP_GRAD_REDUCE: reduce,
                        features.OVERLAP_PARAM_GATHER: gather and reduce and zero_stage == 1,
                    }
                    yield {features.field_of(name): value for name, value in values.items()}


EXPERT_RANKS = 64  # largest size to try; all-to-alls among more ranks have short messages


def _divided(
    run: RunConfig, switches: Iterator[FieldValues], tp: int, dp: int, held: Held
) -> Iterator[FieldValues]:
    experts = run.model.num_experts
    given = {"expert_model_parallel_size", "expert_tensor_parallel_size"} & held
    for values in switches:
        yield (
            values
            if given
            else {**values, "expert_model_parallel_size": 1, "expert_tensor_parallel_size": None}
        )
        if experts and not given and (tp == 1 or values["sequence_parallel"]):
            for ep in (2**i for i in range(1, EXPERT_RANKS.bit_length())):
                if experts % ep == 0 and dp * tp % ep == 0:
                    yield {
                        **values,
                        "expert_model_parallel_size": ep,
                        "expert_tensor_parallel_size": 1 if tp > 1 else None,
                    }


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, number + 1) if number % d == 0)


def _recomputes(
    run: RunConfig, layers: int, held: Held, kinds: tuple[str, ...]
) -> Iterator[TrainingConfig]:
    """Yield training configs that differ in recompute; block: quarters of a stage's layers."""
    training = run.training
    if {"recompute_auto", *of_topic(TrainingConfig, RECOMPUTE)} & held:
        yield training
        return
    plain = replace(
        training,
        recompute_granularity=None,
        recompute_method="uniform",
        recompute_num_layers=1,
        recompute_part_layers=None,
        recompute_auto=False,
    )
    if "auto" in kinds:
        yield replace(plain, recompute_auto=True)
        return
    full = replace(plain, recompute_granularity="full")
    configs = {
        "none": [plain],
        "selective": [replace(plain, recompute_granularity="selective")],
        "full": [full],
        "block": [
            replace(full, recompute_method="block", recompute_num_layers=n)
            for n in sorted({layers // 4, layers // 2, 3 * layers // 4} - {0, layers})
        ],
    }
    for name in kinds:
        yield from configs[name]


def _judge(asked: RunConfig, system: System) -> LayoutCandidate | str:
    try:
        layout = Layout.from_run(asked, system.world_size)
    except ValueError:
        return "heads, MLP or layers do not divide"
    try:
        run = peak_memory.with_recompute(asked, layout, system)
        used = peak_memory.peak_mib(run, layout, system)
    except NoList:
        return "no list for the schedule"
    if used > system.limit_mib:
        return "out of memory"
    modelled = step(run, layout, system)
    return LayoutCandidate(
        asked=asked,
        run=run,
        system=system,
        layout=layout,
        seconds=modelled.seconds,
        memory_mib=used,
        bubble_fraction=modelled.bubble_fraction,
        least_seconds=modelled.least_seconds,
        breakdown=modelled.breakdown(),
    )


def held_fields(args: argparse.Namespace) -> Held:
    """Return the fields of command-line flags; a recipe's values do not count."""
    return frozenset(name for name, value in vars(args).items() if value is not None)
