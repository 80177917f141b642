"""Output of `plan --mtbf`: effective training time of a plan whose nodes fail, for each way to copy the training state."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from statistics import mean
from typing import NamedTuple

from ..cli.output_files import picture
from ..config.fields import check, check_positive, flag
from ..config.layout import Layout
from ..text.named_files import JsonObject, StrPath
from ..text.numbers import duration_text
from ..text.table import pipe_table
from . import fault_costs
from .fault_costs import ASYNC, COPY, LOCAL, MEMORY, SAVE, Costs
from .fault_model import KINDS, NODE, TRAINING, WIDE, Faults, Strategy, expected, with_intervals
from .fault_simulation import RUNS, Simulated, simulate
from .model import step
from .plan_text import iterations
from .search import LayoutCandidate
from .system import System

HOUR = 3600.0
DAY = 86400.0
DAYS = 30.0  # of training, if the plan has no length
SHARES = (0.5, 0.4, 0.1)  # of process, node and wide faults (assumed)
ALLOCATION = 24.0  # hours
# of the best interval, in the picture
FACTORS = tuple(2 ** (power / 4) for power in range(-16, 17))
MOMENTS = 48  # at which lost nodes are counted in an allocation
LONGEST_MTBF = 1e9  # hours
EVENTS = 3e7  # simulated at most
HOPELESS = 5.0  # faults during a restart, above which nothing is trained
# Flag of copies -> flags of a run, with the place of the interval.
FLAGS = {
    SAVE: "--save-interval {}",
    ASYNC: "--save-interval {} --async-save",
    LOCAL: "--save-local DIR",
    COPY: "--save-interval {}",
    MEMORY: "--save-memory {}",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of faults, costs and the simulation."""
    group = parser.add_argument_group("faults")
    add = group.add_argument
    add(
        "--mtbf",
        type=float,
        metavar="HOURS",
        help="mean time between two faults of a node: effective training time, the best intervals of copies, spare nodes",
    )
    add(
        "--fault-shares",
        type=float,
        nargs=3,
        metavar=("PROCESS", "NODE", "WIDE"),
        help="shares of faults that leave the node, that lose a node, and that lose several or the whole job (default: "
        f"{' '.join(map(str, SHARES))}, assumed)",
    )
    add(
        "--costs-from",
        metavar="SAVE",
        help="--save of a run on these nodes, whose hours.jsonl has measured seconds (default: a model)",
    )
    add(
        "--file-system-gbs",
        type=float,
        help="rate at which the whole job writes and reads checkpoints (default: the machine's)",
    )
    add(
        "--allocation",
        type=float,
        metavar="HOURS",
        help=f"after which lost nodes are replaced by a new job (default: {ALLOCATION:g})",
    )
    add(
        "--simulate",
        type=float,
        metavar="DAYS",
        help=f"also simulate {RUNS} runs of so many days; --seed draws the faults",
    )


def check_arguments(args: argparse.Namespace, system: System) -> None:
    """Raise ValueError for wrong values, before the search."""
    for name in ("fault_shares", "costs_from", "file_system_gbs", "allocation", "simulate"):
        check(
            args.mtbf is not None or getattr(args, name) is None,
            f"{flag(name)} goes with --mtbf: pass both",
        )
    check_positive(args, "mtbf", "file_system_gbs", "allocation", "simulate")
    shares = args.fault_shares or SHARES
    check(
        min(shares) >= 0 and math.isclose(sum(shares), 1, abs_tol=1e-6),
        f"--fault-shares {' '.join(map(str, shares))}: pass three shares from 0 to 1 whose sum is 1",
    )
    check(
        args.mtbf is None or args.mtbf <= LONGEST_MTBF,
        f"--mtbf {args.mtbf}: pass hours up to {LONGEST_MTBF:g}",
    )
    if args.mtbf is not None:
        fault_costs.file_system_rate(system, args.file_system_gbs)
    if args.costs_from:
        fault_costs.read_history(args.costs_from)


class Choice(NamedTuple):
    """A way to copy the training state, with the best intervals.

    causes: share of each cause in the time of the job
    """

    strategy: Strategy
    causes: dict[str, float]
    simulated: Simulated | None

    @property
    def share(self) -> float:
        return self.causes[TRAINING]

    @property
    def flags(self) -> str:
        words = []
        for group in self.strategy:
            for each in group:
                words.append(FLAGS[each.flag].format(each.interval))
        return " ".join(reversed(words))


@dataclass(frozen=True)
class FaultPlan:
    """Effective training time of a plan.

    days: of training without faults
    simulated_days: None: no simulation
    """

    plan: LayoutCandidate
    faults: Faults
    costs: Costs
    allocation: float
    days: float
    simulated_days: float | None

    @staticmethod
    def of(plan: LayoutCandidate, args: argparse.Namespace) -> FaultPlan:
        """Return the fault plan that parsed flags ask for. ValueError if faults leave no time to train."""
        shares = dict(zip(KINDS, args.fault_shares or SHARES, strict=True))
        faults = Faults(plan.system.nodes, args.mtbf * HOUR, shares)
        rate = fault_costs.file_system_rate(plan.system, args.file_system_gbs)
        costs = fault_costs.modelled(plan, rate)
        if args.costs_from:
            costs = fault_costs.measured(costs, fault_costs.read_history(args.costs_from))
        slowest = costs.start + max(costs.detect.values()) + max(costs.load.values())
        check(
            faults.rate * slowest < HOPELESS,
            f"--mtbf {args.mtbf:g}: {plan.system.nodes} nodes fail every "
            f"{duration_text(1 / faults.rate)}, and a restart takes {duration_text(slowest)}: pass fewer "
            "nodes or a longer time",
        )
        count = iterations(plan)
        days = DAYS if count is None else count * costs.pace.seconds(1) / DAY
        allocation = args.allocation or ALLOCATION
        return FaultPlan(plan, faults, costs, allocation, days, args.simulate)

    @cached_property
    def choices(self) -> list[Choice]:
        """The ways to copy the state, most lost time first."""
        found = []
        pace = self.costs.pace
        for strategy in self.costs.strategies():
            best = with_intervals(strategy, self.faults, pace)
            simulated = self._simulate(best) if self.simulated_days else None
            found.append(Choice(best, expected(best, self.faults, pace), simulated))
        return sorted(found, key=lambda choice: choice.share)

    def _simulate(self, strategy: Strategy) -> Simulated:
        days = self.simulated_days or 0.0
        pace = self.costs.pace
        often = 1 / pace.seconds(strategy[0][0].interval) + self.faults.rate
        check(
            RUNS * days * DAY * often < EVENTS,
            f"--simulate {days:g}: {RUNS} runs would have more than {EVENTS:g} copies and faults: pass fewer days",
        )
        return simulate(strategy, self.faults, pace, days * DAY, self.plan.run.training.seed)

    def lost_node_hours(self, choice: Choice) -> float:
        return self.plan.system.nodes * self.days * 24 * (1 / choice.share - 1)

    @cached_property
    def spares(self) -> dict[int, float]:
        """Spare nodes, up to two more than the best -> node hours for each node hour of the whole job without lost nodes."""
        found: dict[int, float] = {}
        best = 0
        speed = cache(self._speed)
        while len(found) < best + 3:
            number = len(found)
            found[number] = self._node_hours(number, speed)
            best = min(found, key=found.__getitem__)
        return found

    def _node_hours(self, spares: int, speed_without: Callable[[int], float]) -> float:
        nodes = self.plan.system.nodes
        share = self.faults.shares[NODE] + self.faults.shares[WIDE]
        lost = self.faults.rate * share * self.allocation * HOUR  # mean at the end
        speed = 0.0
        for moment in range(MOMENTS):
            until = lost * (moment + 0.5) / MOMENTS
            most = int(until + 6 * math.sqrt(until) + 6)
            probability = math.exp(-until)
            for count in range(most + 1):
                speed += probability * speed_without(max(0, count - spares)) / MOMENTS
                probability *= until / (count + 1)
        return (nodes + spares) / nodes / speed if speed else math.inf

    def _speed(self, missing: int) -> float:
        """Return the speed without so many nodes: with fewer data-parallel replicas, as `supervise` continues."""
        if not missing:
            return 1.0
        plan = self.plan
        system = plan.system
        left = system.nodes - missing
        replica = plan.layout.world_size // plan.layout.dp
        for dp in range(left * system.ranks_per_node // replica, 0, -1):
            nodes, rest = divmod(dp * replica, system.ranks_per_node)
            if rest:
                continue
            try:
                layout = Layout.from_run(plan.run, dp * replica)
                layout.microbatches(plan.run)
            except ValueError:
                continue
            return plan.seconds / step(plan.run, layout, replace(system, nodes=nodes)).seconds
        return 0.0

    def as_json(self) -> JsonObject:
        """Return shares, causes and node hours of every way to copy, spare nodes and costs."""
        return {
            "hours_between_faults": 1 / self.faults.rate / HOUR,
            "days": self.days,
            "choices": [
                {
                    "flags": choice.flags,
                    "share": choice.share,
                    "causes": choice.causes,
                    "lost_node_hours": self.lost_node_hours(choice),
                    "simulated": choice.simulated and choice.simulated._asdict(),
                }
                for choice in self.choices
            ],
            "spare_nodes": min(self.spares, key=self.spares.__getitem__),
            "costs": {meaning: [value, source] for value, source, meaning in self.costs.rows()},
        }

    def text(self) -> str:
        """Return the tables of ways to copy, spare nodes and costs."""
        faults = self.faults
        kinds = ", ".join(f"{kind} {share:.0%}" for kind, share in faults.shares.items())
        lines = [
            "",
            f"effective training time of the first plan in {self.days:.4g} days of training (model): a node fails every "
            f"{faults.mtbf / HOUR:g} h, the job every {duration_text(1 / faults.rate)} ({kinds})",
            "",
            *pipe_table([self._header(), *map(self._row, self.choices)]),
        ]
        if self.simulated_days:
            counts = [each.simulated.faults for each in self.choices if each.simulated]
            lines += [
                "",
                f"simulated: means of {RUNS} runs of {self.simulated_days:g} days with {mean(counts):.0f} faults, +- their 95 % interval",
            ]
        best = min(self.spares, key=self.spares.__getitem__)
        rows = [("spare nodes", "node hours for one of the whole job")]
        for number, hours in self.spares.items():
            if number in (0, best - 1) or number >= best:
                rows.append((str(number), f"{hours:.4f}"))
        heading = f"spare nodes that pay in allocations of {self.allocation:g} h: {best}"
        costs = pipe_table([("cost", "source", "of"), *self.costs.rows()])
        return "\n".join([*lines, "", heading, "", *pipe_table(rows), "", *costs])

    def _header(self) -> tuple[str, ...]:
        columns = ["effective"]
        if self.simulated_days:
            columns.append("simulated")
        return *columns, "saving", "repeated", "restart", "node hours lost", "fewer", "flags"

    def _row(self, choice: Choice) -> tuple[str, ...]:
        columns = [f"{choice.share:.2%}"]
        if choice.simulated:
            columns.append(f"{choice.simulated.share:.2%} +- {choice.simulated.error:.2%}")
        lost = self.lost_node_hours(choice)
        saved = self.lost_node_hours(self.choices[0]) - lost
        causes = [f"{choice.causes[cause]:.2%}" for cause in ("saving", "repeated", "restart")]
        return *columns, *causes, f"{lost:,.0f}", f"{saved:,.0f}", choice.flags


def draw(path: StrPath, found: FaultPlan) -> None:
    """Draw the effective share over the interval of the most frequent copies, the others at their best."""
    pace = found.costs.pace
    with picture(path, 8, 4.5) as figure:
        axes = figure.subplots()
        for choice in found.choices:
            (group, *rest) = choice.strategy
            points = []
            for factor in FACTORS:
                interval = max(1, round(group[0].interval * factor))
                first = tuple(each._replace(interval=interval) for each in group)
                longer = [
                    tuple(each._replace(interval=max(interval, each.interval)) for each in other)
                    for other in rest
                ]
                share = expected((first, *longer), found.faults, pace)[TRAINING]
                points.append((pace.seconds(interval) / 60, 100 * share))
            minutes, shares = zip(*sorted(set(points)))
            (line,) = axes.plot(minutes, shares, label=choice.flags)
            best = pace.seconds(group[0].interval) / 60
            axes.plot([best], [100 * choice.share], "o", color=line.get_color())
        axes.set_xscale("log")
        axes.set(
            xlabel="minutes of training between two copies", ylabel="effective training time (%)"
        )
        lowest = min(choice.share for choice in found.choices)
        axes.set_ylim(bottom=max(0.0, 100 * lowest - 20), top=100)
        axes.legend(fontsize="small", title="best intervals (dots)")
        hours = 1 / found.faults.rate / HOUR
        axes.set_title(
            f"{found.plan.system.nodes} nodes, a fault of the job every {hours:.3g} h (model)",
            loc="left",
            fontsize="medium",
        )
