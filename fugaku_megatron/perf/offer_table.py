"""What each of the trainer's offers (run/offers.py) is worth to the best plan: a table of the best plans with and without it.

    fugaku-megatron plan --recipe 30b --nodes 6144 --offers

What the trainer does not do has no time: nothing is modelled that is not built.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..published.markdown import pipe_table
from ..run.config import RunConfig
from ..run.offers import OFFERS, switched
from ..run.recompute import recompute_name
from .model import System, step
from .search import SWITCHED, VARIED, Plan, search

HEADER = ("offers", "sec/it", "slow network", "against all", "best layout")


@dataclass(frozen=True, kw_only=True)
class OfferRow:
    """The best plan of one choice of offers; None where no layout runs, or where the trainer has no such offer."""

    name: str
    plan: Plan | None
    built: bool = True

    @property
    def slow_seconds(self) -> float:
        """Seconds per iteration of the plan with large sums at the pessimistic rate."""
        plan = self.plan
        return step(plan.run, plan.layout, plan.system, plan.system.parameters, slow=True).seconds


def variants(run: RunConfig, system: System) -> Iterator[tuple[str, RunConfig, System]]:
    """(name, run, system) of the whole table: all that the search uses, without each, and with each that it does not use itself."""
    yield "all", run, system
    for name in OFFERS:
        if name not in system.software.offers.names:
            continue
        if name in SWITCHED or name in VARIED:
            yield f"without {name}", run, replace(system, software=system.software.without(name))
        else:
            yield f"with {name}", switched(run, name), system


def rows(run: RunConfig, system: System, held: frozenset[str]) -> list[OfferRow]:
    """The best plan of every variant, then the rows that the trainer does not offer."""
    found = []
    for name, variant, on in variants(run, system):
        plans = search(variant, on, held).plans
        found.append(OfferRow(name=name, plan=plans[0] if plans else None))
    return found + [OfferRow(name=name, plan=None, built=False) for name, offer in OFFERS.items() if not offer.built]


def text(table: list[OfferRow]) -> str:
    """The rows as Markdown; seconds are modelled."""
    whole = table[0].plan
    return "\n".join(pipe_table([HEADER, *(_cells(row, whole) for row in table)]))


def _cells(row: OfferRow, whole: Plan | None) -> tuple[str, ...]:
    plan = row.plan
    if plan is None:
        return row.name, "-", "-", "-", "no layout runs" if row.built else "not in the trainer: not modelled"
    change = "" if whole is None or plan is whole else f"{plan.seconds / whole.seconds - 1:+.1%}"
    layout = plan.layout
    return (row.name, f"{plan.seconds:.4g}", f"{row.slow_seconds:.4g}", change,
            f"{plan.system.ranks_per_node} ranks a node, DP {layout.dp} x TP {layout.tp} x PP {layout.pp}, "
            f"MBS {plan.run.batch.micro_batch_size}, recompute {recompute_name(plan.run)}, "
            f"ZeRO {plan.run.parallel.zero_stage}" + (", sequence parallel" if plan.run.parallel.sequence_parallel else "")
            + (", exchange overlapped" if plan.run.parallel.tp_comm_overlap else ""))
