"""Why a plan takes its time, and what changes from one software to another. Every figure is modelled.

Test: pytest tests/test_perf_plan.py
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from ..accounting import Layout
from ..config import RunConfig
from . import model, software
from .cost import Seconds
from .model import Step, System
from .parameters import Parameters

if TYPE_CHECKING:
    from .plan import Plan

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
    run, layout, system, parameters = plan.run, plan.layout, plan.system, plan.system.software.fitted.values
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
    from .plan import search

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
             Change(name="native kernels", seconds=seconds(after, kernels), note="fused, attention without scores"),
             Change(name="no first calls", seconds=seconds(after, new), note="nothing is compiled or set up in an iteration")]
    current = found[-1].seconds
    for name, number in (("schedule and layout", ranks), ("ranks per CMG", system.machine.units)):
        plans = search(run, replace(after, ranks_per_node=number), frozenset({"ranks_per_node"})).plans
        note = _layout(plans[0]) if plans else "no layout fits the memory"
        if plans and plans[0].seconds < current:
            current = plans[0].seconds
        else:
            note = "not taken: " + note + (f", {plans[0].seconds:.4g} s" if plans else "")
        found.append(Change(name=name, seconds=current, note=note))
    made: Step = model.step(best.run, best.layout, best.system, new)
    found.append(Change(name="best plan of the search", seconds=made.seconds, note=_layout(best)))
    found.append(Change(name="overlap", seconds=made.seconds - made.data_parallel,
                        note="of gradient reduction with the backward: not in the trainer yet"))
    return found


def _layout(plan: Plan) -> str:
    layout = plan.layout
    return (f"{plan.system.ranks_per_node} ranks per node, DP {layout.dp} x TP {layout.tp} x PP {layout.pp}, "
            f"MBS {plan.run.batch.micro_batch_size}, 1F1B, "
            f"{plan.layout.microbatches(plan.run, plan.layout.global_batch_size(plan.run))} micro-batches, "
            f"recompute {plan.run.training.recompute_granularity or 'none'}, bubble {plan.bubble_fraction:.0%}")


def steps(run: RunConfig, system: System, against: str, best: Plan) -> str:
    """The changes as a table."""
    found = changes(run, system, against, best)
    lines = [f"\nfrom {against} to {system.software.name}, seconds per iteration, each a model"]
    for previous, change in zip([found[0], *found], found):
        factor = "" if change is found[0] else f"x {change.seconds / previous.seconds:.2f}"
        lines.append(f"  {change.name:<26}{change.seconds:>9.4g} s  {factor:<7} model  {change.note}")
    return "\n".join(lines)
