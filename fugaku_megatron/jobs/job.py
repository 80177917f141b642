"""A job: nodes and their shape, layout, memory and elapse time, from the performance model.

`decide` reads pretrain_gpt.py's flags; the planner chooses unset values.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..cli import arguments
from ..config import batches
from ..config.fields import check
from ..config.layout import Layout
from ..config.recipes import GPT2_VOCABULARY
from ..config.run_config import RunConfig
from ..costs.run_schedule import recompute_name
from ..layout_check.shrink import fewest_ranks
from ..planner import plan_text, search, software
from ..planner.predict import run_of
from ..planner.system import System, start_up
from ..text.numbers import duration_text
from . import limits, torus
from .limits import HOUR, Mode, ResourceGroup
from .reasons import microbatches, why_this


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job script's contents.

    flags: pretrain_gpt.py's, without paths
    elapse: seconds
    why: the decisions as text
    reasons: why the layout is the fastest
    check_ranks: ranks that check the layout before the run; None: no check
    """

    name: str
    nodes: int
    ranks_per_node: int
    shape: torus.Shape | None
    resource_group: str
    elapse: int
    mode: Mode
    volumes: tuple[str, ...]
    group: str | None
    flags: tuple[str, ...]
    layout: Layout
    iterations: int
    why: tuple[str, ...]
    reasons: tuple[str, ...]
    kind: str = "train"
    check_ranks: int | None = None

    @property
    def processes(self) -> int:
        return self.nodes * self.ranks_per_node


def placement_problem(tp: int, ranks_per_node: int, shape: torus.Shape | None) -> str | None:
    """Return the reason why tensor-parallel groups fit into no node or torus unit, or None."""
    if shape is None:
        fits = ranks_per_node % tp == 0
        inside = "a node (a job with a multiple of 12 --nodes is a torus with units of 2x3x2)"
    else:
        fits = torus.tensor_fits(tp, ranks_per_node)
        inside = "a node or a 2x3x2 unit"
    if fits and ranks_per_node in limits.RANKS_PER_NODE:
        return None
    return f"tensor-parallel groups do not fit into {inside}"


def placed_plans(
    run: RunConfig, system: System, held: frozenset[str], shape: torus.Shape | None
) -> tuple[search.LayoutCandidate, ...]:
    """Return the plans that can be placed, fastest first. ValueError if there is none."""
    result = search.search(
        run,
        system,
        held,
        refuse=lambda run, on: placement_problem(run.tp, on.ranks_per_node, shape),
    )
    check(
        result.plans,
        f"--nodes {system.nodes}: no layout runs: "
        + "; ".join(f"{n} x {why}" for why, n in result.dropped.most_common())
        + ": change --nodes, --global-batch-size, --ranks-per-node, --tensor-model-parallel-size or "
        "--pipeline-model-parallel-size",
    )
    return result.plans


def decide(args: argparse.Namespace) -> Job:
    """Return the job that parsed flags describe."""
    mode = limits.mode(args.mode)
    groups, source = limits.resource_groups()
    group = _group(args, groups)
    shape = torus.best_shape(args.nodes) if args.nodes % torus.UNIT_NODES == 0 else None
    near = " or ".join(map(str, torus.nearest(args.nodes)))
    check(
        shape is not None or args.nodes <= limits.TORUS_ABOVE,
        f"--nodes {args.nodes}: above {limits.TORUS_ABOVE} nodes a job on Fugaku is "
        f"a torus of 2x3x2 units, XxYxZ with X, Z even and Y a multiple of 3: pass {near}",
    )
    system = System.from_names(
        "a64fx",
        software.THIS_PROJECT,
        args.nodes,
        args.ranks_per_node,
        mode.ghz,
        mode.eco_state == 2,
    )
    run = run_of(args, system, {"micro_batch_size": 1})
    if run.batch.global_batch_size is None:
        raise ValueError("--global-batch-size is missing: the layout depends on it")
    limit = int(group.hours * HOUR)
    asked = None
    if args.elapse is not None:
        asked = limits.seconds(args.elapse, "--elapse ")
        check(
            0 < asked <= limit,
            f"--elapse {args.elapse}: {group.name} allows at most {limits.clock(limit)}: pass a time up to that, "
            "and continue with submit --steps",
        )
    plans = placed_plans(run, system, search.held_fields(args), shape)
    best = plans[0]
    iterations, _ = batches.run_length(best.run, run.batch.global_batch_size)
    whole = start_up(args.nodes) + iterations * best.seconds + limits.MARGIN
    elapse = asked or min(limit, 60 * math.ceil(whole / 60))
    job = Job(
        name=args.name or f"gpt_{args.recipe or 'run'}".replace(".", "_"),
        nodes=args.nodes,
        ranks_per_node=best.system.ranks_per_node,
        shape=shape,
        resource_group=group.name,
        elapse=elapse,
        mode=mode,
        volumes=tuple(args.volumes.split(":")),
        group=args.group,
        flags=_flags(best, args, mode),
        kind=args.kind,
        layout=best.layout,
        iterations=iterations,
        why=(),
        reasons=(),
        check_ranks=fewest_ranks(best.run, best.layout) if args.check_layout else None,
    )
    return replace(job, why=tuple(decisions(job, best, source)), reasons=tuple(why_this(plans)))


def _group(args: argparse.Namespace, groups: dict[str, ResourceGroup]) -> ResourceGroup:
    if args.resource_group is None:
        return limits.smallest(args.nodes, groups)
    check(
        args.resource_group in groups,
        f"--resource-group {args.resource_group} is unknown: pass one of {', '.join(groups)}",
    )
    group = groups[args.resource_group]
    check(
        group.accepts(args.nodes),
        f"--resource-group {group.name} accepts {group.smallest} to {group.largest} nodes, but --nodes is {args.nodes}: "
        "change one of them",
    )
    return group


def _flags(best: search.LayoutCandidate, args: argparse.Namespace, mode: Mode) -> tuple[str, ...]:
    run = best.run
    words = plan_text.train_flags(best, args)
    always = {
        "--tensor-model-parallel-size": run.tp,
        "--pipeline-model-parallel-size": run.pp,
        "--micro-batch-size": run.batch.micro_batch_size,
        "--global-batch-size": run.batch.global_batch_size,
        "--cpu-frequency": f"{mode.ghz:.1f}",
    }
    for name, value in always.items():
        words += [] if name in words else [name, str(value)]
    return tuple(words)


def decisions(job: Job, best: search.LayoutCandidate, source: str) -> Iterator[str]:
    """Yield the decisions as text. source: of the limits"""
    tp = job.layout.tp
    batch = best.run.batch
    prediction = best.predict()
    shape = f" as {torus.text(job.shape)} torus" if job.shape else ""
    place = "inside a node"
    if job.ranks_per_node % tp:
        place = f"on {tp // job.ranks_per_node} nodes of a 2x3x2 unit"
    yield f"{job.nodes} nodes{shape} x {job.ranks_per_node} ranks = {job.layout}; each tensor-parallel group is {place}"
    yield (
        f"micro-batch {batch.micro_batch_size}, global batch {job.layout.global_batch_size(best.run)}: "
        f"{microbatches(best)} micro-batches; recompute {recompute_name(best.run)}, "
        f"ZeRO {best.run.parallel.zero_stage}"
    )
    yield (
        f"model: {best.seconds:.4g} s per iteration (nine of ten runs should take {prediction.lower:.4g} to "
        f"{prediction.upper:.4g}; never run on an A64FX), "
        f"{prediction.tflops_per_node:.3f} TFLOPs per node, bubble {best.bubble_fraction:.1%}, "
        f"{best.memory_mib:.0f} MiB on the fullest rank"
    )
    yield duration(job, best.seconds, source)


def duration(job: Job, seconds: float, source: str) -> str:
    """Return a line about elapse time, jobs and node hours. seconds: of an iteration"""
    start = start_up(job.nodes)
    training = job.iterations * seconds
    # Each job starts, and trains at least one iteration.
    count = math.ceil(training / max(seconds, job.elapse - start - limits.MARGIN))
    hours = job.nodes * (training + count * start) / HOUR
    return (
        f"elapse {limits.clock(job.elapse)} in {job.resource_group} ({source}): {job.iterations} iterations and the start take "
        f"{duration_text(start + training + limits.MARGIN)} (model), {count} jobs in a row and {hours:,.0f} node hours; each job saves "
        f"and exits {limits.MARGIN // 60} minutes before its end"
    )


def rank_map(job: Job) -> torus.RankMap | None:
    layout = job.layout
    if job.shape is None:
        return None
    return torus.RankMap.from_layout(job.shape, job.ranks_per_node, layout.tp, layout.pp, layout.cp)


def interpret(flags: list[str]) -> Any:
    """Return the run of a script's flags, by default with GPT-2's vocabulary."""
    run = arguments.parse(flags).run
    return replace(
        run, model=replace(run.model, vocab_size=run.model.vocab_size or GPT2_VOCABULARY)
    )
