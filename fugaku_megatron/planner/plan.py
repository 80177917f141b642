"""Search the parallel layouts that a trainer can run on a number of nodes, by seconds per iteration. All times are modelled.

    fugaku-megatron plan --recipe 30b --nodes 384 --machine a64fx --train-tokens 300e9
    fugaku-megatron plan --recipe 30b --nodes 6144 --tensor-model-parallel-size 4 \
        --pipeline-model-parallel-size 48 --checkpoint-activations --software fugaku_megatron --against torch1.10 --explain

The search varies TP, PP, the micro-batch, ranks per node, recompute and ZeRO, but no value whose flag is on the command line. With
--against the flags describe the run as it is today, and only the last step varies everything.
With --mtbf the first plan's effective training time between faults follows. Left out: the placement of ranks in the torus.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import NamedTuple

from ..cli.output_files import check_picture
from ..config import batches
from ..config.features import FEATURES, switched
from ..config.fields import check
from ..config.layout import Layout
from ..config.run_config import RunConfig
from ..costs.run_schedule import recompute_name
from ..text.table import pipe_table
from . import fault_plan, plan_text, software
from .cost import Seconds
from .fault_plan import FaultPlan
from .model import Prediction, step
from .plan_text import schedule_name
from .predict import add_system_arguments, as_json, run_of, system_of
from .search import (
    KEPT,
    RAMP_BATCH,
    RAMP_DP,
    LayoutCandidate,
    Search,
    held_fields,
    search,
)
from .software import Parameters
from .system import System

SHOWN = 10  # plans in the table


Ranked = tuple[LayoutCandidate, Prediction]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the system's flags, and flags that limit the search or select the output."""
    add_system_arguments(parser)
    group = parser.add_argument_group("plan")
    add = group.add_argument
    add(
        "--ramp-divisible",
        action="store_true",
        help=f"only layouts whose batch can ramp up: DP %% {RAMP_DP} = 0 and global batch %% {RAMP_BATCH} = 0",
    )
    add(
        "--explain",
        action="store_true",
        help="the best plan's bottlenecks, and what removing each would gain",
    )
    add(
        "--features",
        "--offers",
        action="store_true",
        help="instead of plans: the best plan with and without each feature of the trainer, as a table",
    )
    add(
        "--against",
        metavar="SOFTWARE",
        help="with --explain: the steps from SOFTWARE's time to --software's",
    )
    add(
        "--png",
        metavar="FILE",
        help="picture of the best plan's pipeline, with --mtbf of its effective training time over the "
        "interval of copies (needs matplotlib)",
    )
    fault_plan.add_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Search the fastest layouts, or compare features, and print the result; return the exit code."""
    check(args.against is None or args.explain, "--against goes with --explain: pass both")
    check(
        not (args.features and (args.explain or args.json or args.png or args.mtbf)),
        "--features prints its own table: leave out --explain, --json, --mtbf and --png",
    )
    if args.against:
        software.load(args.against, "--against")
    check_picture(args.png)
    system = system_of(args)
    fault_plan.check_arguments(args, system)
    run = run_of(args, system, {"micro_batch_size": 1})
    if run.batch.global_batch_size is None:
        raise ValueError(
            "--global-batch-size is missing: pass it, because the search compares layouts "
            "for one batch"
        )
    training = run.training
    if training.train_tokens is not None:
        iterations, _ = batches.run_length(run, run.batch.global_batch_size)
        training = replace(training, train_iters=iterations, train_samples=None, train_tokens=None)
        run = replace(run, training=training)
    if args.features:
        plans = feature_plans(run, system, held_fields(args))
        cells = [_feature_cells(name, plan, plans["all"]) for name, plan in plans.items()]
        print(*pipe_table([FEATURES_HEADER, *cells]), sep="\n")
        return 0
    result = search(
        run, system, frozenset() if args.against else held_fields(args), args.ramp_divisible
    )
    check(
        bool(result.plans),
        "no layout runs: " + "; ".join(f"{n} x {why}" for why, n in result.dropped.most_common()),
    )
    best = [(plan, plan.predict()) for plan in result.plans[:SHOWN]]
    changes = changes_between(run, system, args.against, best[0][0]) if args.against else []
    faults = None
    if args.mtbf is not None:
        faults = FaultPlan.of(best[0][0], args)
    if args.png and faults:
        fault_plan.draw(args.png, faults)
    elif args.png:
        plan_text.png(best[0][0], args.png)
    if args.json:
        _print_json(best, result, changes, args, faults)
    else:
        _print_text(best, result, changes, args, faults)
    return 0


def _print_json(
    best: list[Ranked],
    result: Search,
    changes: list[Change],
    args: argparse.Namespace,
    faults: FaultPlan | None,
) -> None:
    output = {
        "plans": [plan_text.as_json(plan, as_json(p), args) for plan, p in best],
        "dropped": dict(result.dropped),
    }
    if args.explain:
        output["gains"] = gains(best[0][0])
    if changes:
        output["changes"] = [change._asdict() for change in changes]
    if faults:
        output["effective_training_time"] = faults.as_json()
    print(json.dumps(output))


def _print_text(
    best: list[Ranked],
    result: Search,
    changes: list[Change],
    args: argparse.Namespace,
    faults: FaultPlan | None,
) -> None:
    first = best[0][0]
    print(plan_text.text(best, result, args))
    if args.explain:
        print(
            f"\nthe first plan's {first.seconds:.4g} s (model): what would remain without one cause, the largest gain first"
        )
        for name, gain in sorted(gains(first).items(), key=lambda item: -item[1]):
            if gain > 1e-4 * first.seconds:
                print(
                    f"  without {name:<21}{first.seconds - gain:>9.4g} s {-gain / first.seconds:>7.1%}   {MEANINGS[name]}"
                )
    if changes:
        name = first.system.software.name
        print(f"\nfrom {args.against} to {name}, seconds per iteration, each a model")
        for previous, change in zip([changes[0], *changes], changes):
            factor = "" if change is changes[0] else f"x {change.seconds / previous.seconds:.2f}"
            print(f"  {change.name:<26}{change.seconds:>9.4g} s  {factor:<7} model  {change.note}")
    if faults:
        print(faults.text())
    if args.png:
        print(f"wrote {args.png}")


FEATURES_HEADER = ("feature", "sec/it", "slow network", "against all", "best layout")


def feature_variants(run: RunConfig, system: System) -> Iterator[tuple[str, RunConfig, System]]:
    """Yield (name, run, system) with all features, without each, and with each further feature."""
    yield "all", run, system
    for name in FEATURES:
        if name not in system.software.choices.names:
            continue
        if name in KEPT:
            yield f"with {name}", switched(run, name), system
        else:
            yield f"without {name}", run, replace(system, software=system.software.without(name))


def feature_plans(
    run: RunConfig, system: System, held: frozenset[str]
) -> dict[str, LayoutCandidate | None]:
    return {
        name: next(iter(search(variant, on, held).plans), None)
        for name, variant, on in feature_variants(run, system)
    }


def _feature_cells(
    name: str, plan: LayoutCandidate | None, whole: LayoutCandidate | None
) -> tuple[str, ...]:
    if plan is None:
        return name, "-", "-", "-", "no layout runs"
    slow = step(plan.run, plan.layout, plan.system, slow=True).seconds
    change = "" if whole is None or plan is whole else f"{plan.seconds / whole.seconds - 1:+.1%}"
    layout = plan.layout
    return (
        name,
        f"{plan.seconds:.4g}",
        f"{slow:.4g}",
        change,
        f"{plan.system.ranks_per_node} ranks a node, {layout}, "
        f"MBS {plan.run.batch.micro_batch_size}, recompute {recompute_name(plan.run)}, "
        f"ZeRO {plan.run.parallel.zero_stage}"
        + (", sequence parallel" if plan.run.parallel.sequence_parallel else "")
        + (", exchange overlapped" if plan.run.parallel.tp_comm_overlap else ""),
    )


MEANINGS = {
    "gemm": "matmuls outside attention",
    "attention": "Q K^T and P V",
    "elementwise": "element-wise operators",
    "page_faults": "memory that the allocator returned to the system faults in again",
    "calls": "operator calls, without the data they work on",
    "tensor_parallel": "all-reduces of tensor-parallel ranks",
    "context_parallel": "what ranks of a sequence send each other for attention",
    "slowest_stage_waits": "the slowest stage waits in the pipeline, and sends",
    "pipeline_warmup": "first micro-batch through each stage",
    "data_parallel": "gradient reduction, tied embedding, ZeRO's all-gather",
    "optimizer": "clipping, Adam, packing weights in INT8",
    "other": "data, log, stragglers",
}


class Change(NamedTuple):
    """Change between two software versions.

    seconds: iteration time after it
    """

    name: str
    seconds: float
    note: str = ""


def gains(plan: LayoutCandidate) -> dict[str, float]:
    """Return cause -> seconds per iteration saved by removing this cause alone."""
    inside = {f.name for f in fields(Seconds)}
    return {
        name: plan.seconds - step(plan.run, plan.layout, plan.system, without=name).seconds
        if name in inside
        else seconds
        for name, seconds in plan.breakdown.items()
    }


def changes_between(
    run: RunConfig, system: System, against: str, best: LayoutCandidate
) -> list[Change]:
    """Return the steps from the time of `against` to the best plan's, each with one change more."""
    old_code = software.load(against)
    new_code = system.software
    old = old_code.fitted.values
    new = new_code.fitted.values
    ranks = old_code.choices.ranks_per_node[0]
    before = replace(system, software=old_code, ranks_per_node=ranks)
    current = old_code.cut(run)
    layout = Layout.from_run(current, before.world_size)

    def seconds(on: System, values: Parameters) -> float:
        return step(current, layout, on, values).seconds

    without_faults = replace(before, software=replace(old_code, page_faults="none"))
    after = replace(before, software=new_code)
    kernels = replace(
        new,
        reduce_gbs=old.reduce_gbs,
        pipeline_warmup_s=old.pipeline_warmup_s,
        iteration_s=old.iteration_s,
    )
    rows = [
        Change(f"{against} as given", seconds(before, old)),
        Change("fewer faults", seconds(without_faults, old), "freed memory stays with the process"),
        Change("native kernels", seconds(after, kernels), "fused, attention without scores")
        if new_code.style == "native"
        else Change(f"operators of {new_code.name}", seconds(after, kernels)),
        Change(
            "no pipeline warm-up",
            seconds(after, new),
            "nothing is compiled or set up in an iteration",
        ),
    ]
    cut = frozenset(
        {
            "ranks_per_node",
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "micro_batch_size",
            "recompute_granularity",
            "zero_stage",
        }
    )
    units = system.machine.units
    if units in new_code.choices.ranks_per_node:
        spread = search(current, replace(after, ranks_per_node=units), cut)
        rows.append(_taken(rows[-1].seconds, spread))
    rows.append(Change("schedule and layout", best.seconds, _layout(best)))
    return rows


def _taken(before: float, result: Search) -> Change:
    name = "ranks per CMG"
    if not result.plans:
        reason = result.dropped.most_common(1)[0][0]
        return Change(name, before, f"not taken at this cut: {reason}")
    plan = result.plans[0]
    if plan.seconds >= before:
        return Change(name, before, f"not taken: {plan.seconds:.4g} s with {_layout(plan)}")
    return Change(name, plan.seconds, _layout(plan))


def _layout(plan: LayoutCandidate) -> str:
    layout = plan.layout
    return (
        f"{plan.system.ranks_per_node} ranks per node, {layout}, "
        f"MBS {plan.run.batch.micro_batch_size}, {schedule_name(plan.run)}, "
        f"{plan.layout.microbatches(plan.run)} micro-batches, "
        f"recompute {recompute_name(plan.run)}, bubble {plan.bubble_fraction:.0%}"
    )
