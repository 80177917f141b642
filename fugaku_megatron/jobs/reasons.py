"""Why a plan is the fastest: the parts of its iteration, what other layouts cost, and a batch that is too small."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..config.training import BatchConfig
from ..costs.run_schedule import recompute_name
from ..planner.model import step
from ..planner.search import LayoutCandidate

OTHERS = 3  # layouts after the fastest
LARGE_BUBBLE = 0.25  # share of the pipeline's time from which a larger batch is proposed

# Part of an iteration -> fields of `Step.breakdown`.
PARTS = {
    "computation": ("gemm", "attention", "elementwise", "page_faults", "calls"),
    "tensor parallelism": ("tensor_parallel",),
    "context parallelism": ("context_parallel",),
    "waiting in the pipeline": ("slowest_stage_waits", "pipeline_warmup"),
    "gradients between replicas": ("data_parallel",),
    "the optimizer": ("optimizer",),
    "data and log": ("other",),
}


def why_this(plans: Sequence[LayoutCandidate]) -> Iterator[str]:
    """Yield the reasons. plans: fastest first."""
    best = plans[0]
    parts = _parts(best)
    shown = ", ".join(
        f"{name} {seconds:.3g}" for name, seconds in parts.items() if seconds > 0.005 * best.seconds
    )
    yield f"this layout is the fastest of {len(plans)} that run; of its {best.seconds:.4g} s (model): {shown}"
    layouts = {(best.layout, best.system.ranks_per_node)}
    for plan in plans[1:]:
        layout = (plan.layout, plan.system.ranks_per_node)
        if layout in layouts:
            continue
        layouts.add(layout)
        more = {name: seconds - parts[name] for name, seconds in _parts(plan).items()}
        largest = max(more, key=lambda name: more[name])
        yield (
            f"not {plan.layout} with {plan.system.ranks_per_node} ranks a node, {plan.run.parallel.schedule}, recompute "
            f"{recompute_name(plan.run)}: {plan.seconds:.4g} s, {plan.seconds / best.seconds - 1:+.1%} (model), "
            f"of which {largest} {more[largest]:+.3g} s"
        )
        if len(layouts) > OTHERS:
            break
    if best.bubble_fraction > LARGE_BUBBLE:
        # The model of a batch twice as large.
        twice = 2 * best.layout.global_batch_size(best.run)
        constant = BatchConfig(
            micro_batch_size=best.run.batch.micro_batch_size, global_batch_size=twice
        )
        run = replace(best.run, batch=constant)
        larger = step(run, best.layout, best.system)
        yield (
            f"the global batch is too small for {best.layout.pp} stages: with {microbatches(best)} micro-batches they wait "
            f"{best.bubble_fraction:.0%} of the time; --global-batch-size {twice} leaves {larger.bubble_fraction:.0%}, and a "
            f"sample takes {larger.seconds / best.seconds / 2:.2f} of the time (model); fewer --nodes help, too"
        )


def _parts(plan: LayoutCandidate) -> dict[str, float]:
    return {name: sum(plan.breakdown[field] for field in fields) for name, fields in PARTS.items()}


def microbatches(plan: LayoutCandidate) -> int:
    return plan.layout.microbatches(plan.run)
