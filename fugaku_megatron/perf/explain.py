"""Why a plan takes its time, and what changes from one software to another. Every figure is modelled.

Test: pytest tests/test_perf_plan.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from ..run.accounting import Layout
from ..run.config import RunConfig
from . import model, software
from .cost import Seconds
from .model import System
from .parameters import Parameters
from .search import Plan, Search, search

MEANINGS = {
    "gemm": "matrix products outside attention", "attention": "Q K^T and P V", "elementwise": "element-wise operators",
    "page_faults": "memory that the allocator gave back faults in again", "calls": "operator calls, apart from their data",
    "tensor_parallel": "all-reduces among tensor-parallel ranks", "bubble_and_transfers": "waiting in the pipeline, sends",
    "first_calls": "first micro-batch through each stage", "data_parallel": "gradient reduction, tied embedding, ZeRO's gathering",
    "optimizer": "clipping and Adam", "other": "data, log, stragglers",
}


@dataclass(frozen=True, kw_only=True)
class Change:
    """One step from one software to another: iteration time after it. note: what it stands on, or why it is not there."""

    name: str
    seconds: float
    note: str = ""


def gains(plan: Plan) -> dict[str, float]:
    """Cause -> seconds per iteration that removing it alone would save, the schedule walked again."""
    run, layout, system, parameters = plan.run, plan.layout, plan.system, plan.system.parameters
    made = model.step(run, layout, system, parameters)
    found = {f.name: made.seconds - model.step(run, layout, system, parameters, without=f.name).seconds for f in fields(Seconds)}
    found["bubble_and_transfers"] = made.breakdown()["bubble_and_transfers"]
    return found | {name: getattr(made, name) for name in ("first_calls", "data_parallel", "optimizer", "other")}


def bottlenecks(plan: Plan) -> str:
    """Causes, the largest gain first."""
    lines = [f"\nthe first plan's {plan.seconds:.4g} s (model): what removing a cause would leave, the largest first"]
    for name, gain in sorted(gains(plan).items(), key=lambda item: -item[1]):
        if gain > 1e-4 * plan.seconds:
            lines.append(f"  without {name:<21}{plan.seconds - gain:>9.4g} s {-gain / plan.seconds:>7.1%}   {MEANINGS[name]}")
    return "\n".join(lines)


def changes(run: RunConfig, system: System, against: str, best: Plan) -> list[Change]:
    """From `against` at the run's own layout, one rank per node as it was run, to the best plan of the system's software."""

    old_code, new_code = software.load(against), system.software
    old, new = old_code.fitted.values, new_code.fitted.values
    ranks = old_code.offers.ranks_per_node[0]
    before = replace(system, software=old_code, ranks_per_node=ranks)
    given = old_code.cut(run)
    layout = Layout.of(given, before.world_size)

    def seconds(on: System, values: Parameters) -> float:
        return model.step(given, layout, on, values).seconds

    kept = replace(before, software=replace(old_code, page_faults="none"))
    after = replace(before, software=new_code)
    kernels = replace(new, reduce_gbs=old.reduce_gbs, first_call_s=old.first_call_s, iteration_s=old.iteration_s)
    found = [Change(name=f"{against} as given", seconds=seconds(before, old)),
             Change(name="fewer faults", seconds=seconds(kept, old), note="freed memory stays with the process"),
             Change(name="native kernels", seconds=seconds(after, kernels), note="fused, attention without scores")
             if new_code.style == "native" else Change(name=f"operators of {new_code.name}", seconds=seconds(after, kernels)),
             Change(name="no first calls", seconds=seconds(after, new), note="nothing is compiled or set up in an iteration")]
    cut = frozenset({"ranks_per_node", "tensor_model_parallel_size", "pipeline_model_parallel_size", "micro_batch_size",
                     "recompute_granularity", "zero_stage"})
    units = system.machine.units
    if units in new_code.offers.ranks_per_node:
        spread = search(given, replace(after, ranks_per_node=units), cut)
        found.append(_taken("ranks per CMG", found[-1].seconds, spread))
    made = model.step(best.run, best.layout, best.system, new)
    found.append(Change(name="schedule and layout", seconds=made.seconds, note=_layout(best)))
    found.append(Change(name="overlap", seconds=made.seconds - made.data_parallel,
                        note="of gradient reduction with the backward: not in the trainer yet"))
    return found


def _taken(name: str, before: float, found: Search) -> Change:
    """A change that is made where it helps."""
    if not found.plans:
        return Change(name=name, seconds=before, note=f"not taken at this cut: {found.dropped.most_common(1)[0][0]}")
    plan = found.plans[0]
    if plan.seconds >= before:
        return Change(name=name, seconds=before, note=f"not taken: {plan.seconds:.4g} s with {_layout(plan)}")
    return Change(name=name, seconds=plan.seconds, note=_layout(plan))


def _layout(plan: Plan) -> str:
    layout = plan.layout
    return (f"{plan.system.ranks_per_node} ranks per node, DP {layout.dp} x TP {layout.tp} x PP {layout.pp}, "
            f"MBS {plan.run.batch.micro_batch_size}, 1F1B, "
            f"{plan.layout.microbatches(plan.run, plan.layout.global_batch_size(plan.run))} micro-batches, "
            f"recompute {plan.run.training.recompute_granularity or 'none'}, bubble {plan.bubble_fraction:.0%}")


def steps(system: System, against: str, found: Sequence[Change]) -> str:
    """The changes as a table."""
    lines = [f"\nfrom {against} to {system.software.name}, seconds per iteration, each a model"]
    for previous, change in zip([found[0], *found], found):
        factor = "" if change is found[0] else f"x {change.seconds / previous.seconds:.2f}"
        lines.append(f"  {change.name:<26}{change.seconds:>9.4g} s  {factor:<7} model  {change.note}")
    return "\n".join(lines)
