"""Search the parallel layouts that a trainer can run on a number of nodes, by seconds per iteration. All times are modelled.

    fugaku-megatron plan --recipe 30b --nodes 384 --machine a64fx --train-tokens 300e9
    fugaku-megatron plan --recipe 30b --nodes 6144 --tensor-model-parallel-size 4 \\
        --pipeline-model-parallel-size 48 --checkpoint-activations --software fugaku_megatron --against torch1.10 --explain

The search varies TP, PP, the micro-batch, ranks per node, recompute and ZeRO as far as the software offers them; a value whose flag
is on the command line is kept. With --against the flags describe the run as it is today, and only the last step varies everything.
Left out: the placement of ranks in the torus, checkpoints, failures.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

from ..config import batches
from ..config.checks import check
from ..config.outputs import check_picture
from ..config.run_config import RunConfig
from . import explain, plan_text, software
from .model import Prediction
from .predict import as_json
from .request import add_system_arguments, run_of, system_of
from .search import RAMP_BATCH, RAMP_DP, Plan, Search, held_fields, search

SHOWN = 10  # plans in the table
Ranked = tuple[Plan, Prediction]
OWN = ("ramp_divisible", "explain", "offers", "against", "png")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_system_arguments(parser)
    group = parser.add_argument_group("plan")
    group.add_argument("--ramp-divisible", action="store_true",
                       help=f"only layouts whose batch can ramp up: DP %% {RAMP_DP} = 0 and global batch %% {RAMP_BATCH} = 0")
    group.add_argument("--explain", action="store_true", help="the best plan's bottlenecks, and what removing each would gain")
    group.add_argument("--offers", action="store_true",
                       help="instead of plans: the best plan with and without each thing that the trainer offers, as a table")
    group.add_argument("--against", metavar="SOFTWARE", help="with --explain: the steps from SOFTWARE's time to --software's")
    group.add_argument("--png", metavar="FILE", help="picture of the best plan's pipeline (needs matplotlib)")


def _with_length(run: RunConfig) -> RunConfig:
    """The run with as many iterations as --train-tokens needs; unchanged without that flag."""
    if run.training.train_tokens is None:
        return run
    assert run.batch.global_batch_size is not None
    iterations, _ = batches.run_length(run, run.batch.global_batch_size)
    return replace(run, training=replace(run.training, train_iters=iterations, train_samples=None, train_tokens=None))


def main(args: argparse.Namespace) -> int:
    """Search and print. Raises ValueError, one line, for flags that do not fit together and when no layout runs."""
    check(args.against is None or args.explain, "--against goes with --explain: give both")
    check(not (args.offers and (args.explain or args.json or args.png)), "--offers prints its own table: leave out --explain, "
          "--json and --png")
    if args.against:
        software.load(args.against, "--against")
    check_picture(args.png)
    system = system_of(args)
    run = run_of(args, system, OWN, {"micro_batch_size": 1})
    check(run.batch.global_batch_size is not None, "--global-batch-size must be given: the search goes over layouts of one batch")
    run = _with_length(run)
    if args.offers:
        print(explain.text(explain.rows(run, system, held_fields(args))))
        return 0
    result = search(run, system, frozenset() if args.against else held_fields(args), args.ramp_divisible)
    check(bool(result.plans), "no layout runs: " + "; ".join(f"{n} x {why}" for why, n in result.dropped.most_common()))
    best = [(plan, plan.predict()) for plan in result.plans[:SHOWN]]
    changes = explain.changes(run, system, args.against, best[0][0]) if args.against else []
    if args.png:
        plan_text.png(best[0][0], args.png)
    if args.json:
        _print_json(best, result, changes, args)
    else:
        _print_text(best, result, changes, args)
    return 0


def _print_json(best: list[Ranked], result: Search, changes: list[explain.Change], args: argparse.Namespace) -> None:
    output = {"plans": [plan_text.as_json(plan, as_json(p), args) for plan, p in best], "dropped": dict(result.dropped)}
    if args.explain:
        output["gains"] = explain.gains(best[0][0])
    if changes:
        output["changes"] = [vars(change) for change in changes]
    print(json.dumps(output))


def _print_text(best: list[Ranked], result: Search, changes: list[explain.Change], args: argparse.Namespace) -> None:
    first = best[0][0]
    print(plan_text.text(best, result, args))
    if args.explain:
        print(explain.bottlenecks(first))
    if changes:
        print(explain.steps(first.system, args.against, changes))
    if args.png:
        print(f"wrote {args.png}")
