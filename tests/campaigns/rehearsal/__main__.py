"""Rehearsal of faults: a small job restarted by `supervise` many times, and its effective training time as predicted and as measured.

    python -m tests.campaigns.rehearsal --count 200 --seed 1 --write          the table of docs/reliability.md
    python -m tests.campaigns.rehearsal --count 200 --seed 1 --minutes 20     fewer faults on a busy machine

A first run with --calibrate faults measures the costs, as `plan --costs-from` reads them. From these follow the interval of
checkpoints and the predicted share. Then the second run trains with this interval and --count faults.
"""

from __future__ import annotations

import argparse
import math
import random
import tempfile
from pathlib import Path
from typing import NamedTuple

from fugaku_megatron.host.machine import cpu_model
from fugaku_megatron.observe.log.effective_time import EffectiveTime, effective_time
from fugaku_megatron.planner import fault_costs
from fugaku_megatron.planner.fault_costs import SAVE, Costs
from fugaku_megatron.planner.fault_model import (
    BESIDES,
    KINDS,
    NODE,
    PROCESS,
    REPEATED,
    RESTART,
    SAVING,
    TRAINING,
    WIDE,
    Faults,
    Strategy,
    expected,
    with_intervals,
)
from fugaku_megatron.planner.fault_simulation import RUNS, STUDENT, Simulated, simulate
from fugaku_megatron.text.numbers import duration_text
from fugaku_megatron.text.table import pipe_table
from tests.campaigns import reliability_page, results
from tests.campaigns.faults import jobs
from tests.campaigns.rehearsal.job import Disturbed

FIRST_INTERVAL = 20  # iterations between checkpoints while costs are measured
FIRST_MTBF = 12.0  # s
RESTARTS = 1.0  # measured restarts from a fault to the next one, on average
# Cause of the prediction -> causes of hours.jsonl.
CAUSES = {
    TRAINING: ("training", "evaluation"),
    SAVING: ("saving",),
    REPEATED: ("repeated",),
    RESTART: ("fault", "hang", "waiting", "scheduler", "start", "load", "first iteration"),
    BESIDES: ("audit", "other"),
}


def parser() -> argparse.ArgumentParser:
    made = results.bare_parser("rehearsal", __doc__)
    made.add_argument(
        "--count", type=results.positive, default=200, help="faults (default: %(default)s)"
    )
    made.add_argument("--seed", type=int, default=1)
    made.add_argument(
        "--calibrate", type=results.positive, default=12, help="faults while costs are measured"
    )
    made.add_argument(
        "--mtbf-seconds",
        type=float,
        help=f"mean time between two faults of the job (default: {RESTARTS:g} measured restarts)",
    )
    made.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="end after so many minutes of the second run",
    )
    made.add_argument(
        "--stops",
        type=results.share,
        default=0.1,
        help="share of faults that stop a rank, which then hangs",
    )
    made.add_argument("--write", action="store_true", help="write the table of docs/reliability.md")
    return made


class Rehearsal(NamedTuple):
    """A prediction and what happened.

    costs, causes, simulated: from the first run
    own: causes that follow from the second run's costs
    """

    costs: Costs
    mtbf: float
    strategy: Strategy
    causes: dict[str, float]
    simulated: Simulated
    measured: EffectiveTime
    own: dict[str, float]
    faults: int


def costs_of(save: Path) -> Costs:
    """Return the costs in a run's hours.jsonl; kinds of faults that it did not meet cost nothing."""
    none = Costs(
        iteration=0.0,
        besides=0.0,
        start=0.0,
        detect=dict.fromkeys(KINDS, 0.0),
        wait={},
        delay={},
        load={SAVE: 0.0},
    )
    return fault_costs.measured(none, fault_costs.read_history(save))


def rehearse(options: argparse.Namespace, folder: Path) -> Rehearsal:
    data = jobs.write_data(folder)

    def disturbed(name: str, save_interval: int, mtbf: float) -> Disturbed:
        own = folder / name
        own.mkdir()
        draw = random.Random(f"{options.seed} {name}")
        return Disturbed(own, data, draw, mtbf, options.stops, save_interval)

    first = disturbed("costs", FIRST_INTERVAL, options.mtbf_seconds or FIRST_MTBF)
    first.run(options.calibrate)
    costs = costs_of(first.save)
    restart = costs.start + costs.load[SAVE] + costs.detect[PROCESS]
    mtbf = options.mtbf_seconds or RESTARTS * restart
    shares = {PROCESS: 1 - options.stops, NODE: options.stops, WIDE: 0.0}
    faults = Faults(1, mtbf, shares)
    strategy = with_intervals(costs.strategies()[0], faults, costs.pace)
    causes = expected(strategy, faults, costs.pace)
    seconds = options.count * mtbf
    simulated = simulate(strategy, faults, costs.pace, seconds, options.seed)
    print(
        f"a fault every {mtbf:.1f} s, a restart takes {restart:.1f} s; predicted: {causes[TRAINING]:.1%}",
        flush=True,
    )
    second = disturbed("faults", strategy[0][0].interval, mtbf)
    second.run(options.count, options.minutes)
    measured = effective_time(second.save)
    assert measured is not None
    after = costs_of(second.save)
    ((own,),) = after.strategies()[0]
    same = ((own._replace(interval=strategy[0][0].interval),),)
    return Rehearsal(
        costs,
        mtbf,
        strategy,
        causes,
        simulated,
        measured,
        own=expected(same, faults, after.pace),
        faults=second.faults,
    )


def table(found: Rehearsal, options: argparse.Namespace) -> str:
    """Return a sentence about the run, and its seconds by cause."""
    measured = found.measured
    rows = [("measured", "predicted", "simulated", "by the run's own costs", "cause")]
    for cause, names in CAUSES.items():
        share = sum(measured.seconds.get(name, 0.0) for name in names) / measured.total
        rows.append(
            (
                f"{share:.1%}",
                f"{found.causes[cause]:.1%}",
                f"{found.simulated.causes[cause]:.1%}",
                f"{found.own[cause]:.1%}",
                "effective: training" if cause == TRAINING else cause,
            )
        )
    seconds = [
        ("training" if name in CAUSES[TRAINING] else name, value)
        for name, value in sorted(measured.seconds.items(), key=lambda each: -each[1])
    ]
    listed = ", ".join(f"{name} {duration_text(value)}" for name, value in seconds if value >= 1)
    command = f"python -m tests.campaigns.rehearsal --count {options.count} --seed {options.seed}"
    if math.isfinite(options.minutes):
        command += f" --minutes {options.minutes:g}"
    interval = found.strategy[0][0].interval
    deviation = found.simulated.error * math.sqrt(RUNS) / STUDENT
    lines = [
        f"`{command}` ({cpu_model()}, {duration_text(measured.total)}): {found.faults} faults, one in "
        f"{found.mtbf:.1f} s on average, a checkpoint every {interval} iterations of {found.costs.iteration:.3f} s. The share of one "
        f"simulated run has a standard deviation of {deviation:.1%}.",
        "",
        *pipe_table(rows),
        "",
        f"Measured: {listed}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    options = parser().parse_args()
    with tempfile.TemporaryDirectory(prefix="rehearsal.", dir="/dev/shm") as folder:
        found = rehearse(options, Path(folder))
    text = table(found, options)
    print(text)
    if options.write:
        reliability_page.write("rehearsal", text)


if __name__ == "__main__":
    main()
