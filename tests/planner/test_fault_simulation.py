"""Simulated faults, compared with the formulas, at small and large size."""

import random
import time

import pytest

from fugaku_megatron.planner.fault_model import (
    KINDS,
    NODE,
    PROCESS,
    REPEATED,
    RESTART,
    SAVING,
    TRAINING,
    WIDE,
    Copies,
    Faults,
    Pace,
    expected,
    with_intervals,
)
from fugaku_megatron.planner.fault_simulation import Run, simulate

pytestmark = pytest.mark.unit

HOUR = 3600.0
DAY = 86400.0
SHARES = dict(zip(KINDS, (0.4, 0.5, 0.1), strict=True))


def copies(flag, survives, wait, delay, restart):
    return Copies(flag, frozenset(survives), wait, delay, dict.fromkeys(KINDS, restart))


SAVE = copies("save", KINDS, 30, 0, 600)
BACKGROUND = copies("async_save", KINDS, 1, 40, 600)
LOCAL = copies("save_local", [PROCESS], 5, 0, 300)
COPIED = copies("save after save_local", KINDS, 0, 60, 600)
MEMORY = copies("save_memory", [PROCESS, NODE], 0.5, 2, 400)
STRATEGIES = {
    "save": ((SAVE,),),
    "async": ((BACKGROUND,),),
    "local": ((LOCAL, COPIED),),
    "memory": ((MEMORY,), (BACKGROUND,)),
}


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
@pytest.mark.parametrize("hours", [1, 6])
def test_formula_and_simulation_agree(strategy, hours):
    """Within twice the simulation's own 95 % interval, which eight right comparisons of this seed keep."""
    faults = Faults(1000, 1000 * hours * HOUR, SHARES)
    pace = Pace(20.0, 0.01)
    best = with_intervals(strategy, faults, pace)
    formula = expected(best, faults, pace)
    found = simulate(best, faults, pace, 20 * DAY, seed=3)
    assert found.faults == pytest.approx(20 * 24 / hours, rel=0.1)
    assert found.share == pytest.approx(formula[TRAINING], abs=2 * found.error)
    assert found.error < 0.004
    for cause in (SAVING, REPEATED, RESTART):
        assert found.causes[cause] == pytest.approx(formula[cause], rel=0.08, abs=0.0005)
    assert sum(found.causes.values()) == pytest.approx(1)


def test_a_restart_after_a_hang_may_end_as_a_shorter_one():
    """Faults come as often as restarts take, and hangs take three times as long."""
    restart = {PROCESS: 5.0, NODE: 15.0, WIDE: 5.0}
    save = Copies("save", frozenset(KINDS), 0.2, 0.0, restart)
    faults = Faults(1, 5.0, {PROCESS: 0.9, NODE: 0.1, WIDE: 0.0})
    pace = Pace(0.4, 0.1)
    best = with_intervals(((save,),), faults, pace)
    found = simulate(best, faults, pace, 20000, seed=1)
    formula = expected(best, faults, pace)
    assert found.share == pytest.approx(formula[TRAINING], abs=2 * found.error)
    assert found.causes[RESTART] == pytest.approx(formula[RESTART], rel=0.02)


def test_98304_ranks_over_30_days_take_seconds():
    faults = Faults(98304 // 4, 50000 * HOUR, SHARES)
    pace = Pace(17.2, 0.008)
    best = with_intervals(STRATEGIES["memory"], faults, pace)
    begin = time.process_time()
    found = simulate(best, faults, pace, 30 * DAY, seed=1)
    assert time.process_time() - begin < 30
    assert found.faults == pytest.approx(30 * 24 * 24576 / 50000, rel=0.05)
    assert abs(found.share - expected(best, faults, pace)[TRAINING]) < found.error


def test_the_same_seed_draws_the_same_faults():
    faults = Faults(10, 10 * HOUR, SHARES)
    best = with_intervals(STRATEGIES["save"], faults, Pace(5, 0))
    first, again, other = (simulate(best, faults, Pace(5, 0), DAY, seed) for seed in (1, 1, 2))
    assert first == again != other


class Drawn(random.Random):
    """Faults at given times, of given kinds and nodes."""

    def __init__(self, gaps, kinds, nodes):
        super().__init__()
        self.gaps = iter([*gaps, 1e9])
        self.kinds = iter(kinds)
        self.nodes = iter(nodes)

    def expovariate(self, rate):
        return next(self.gaps)

    def choices(self, kinds, weights):
        return [next(self.kinds)]

    def randrange(self, count):
        return next(self.nodes)


def run(strategy, gaps, kinds, nodes=()):
    fixed = tuple(tuple(each._replace(interval=10) for each in group) for group in strategy)
    return Run(fixed, Faults(4, HOUR, SHARES), Pace(10.0, 0.0), Drawn(gaps, kinds, nodes))


def test_a_fault_costs_the_training_since_the_newest_complete_copy():
    """Copies end at 130 and 260 s: the fault at 270 s repeats 10 s, the one at 250 s all 100 s of iterations 11 to 20."""
    for time_of_fault, repeated in ((270, 10), (250, 100)):
        simulated = run(STRATEGIES["save"], [time_of_fault], [WIDE])
        found = simulated.until(1000)
        assert found[REPEATED] == pytest.approx(repeated)
        assert found[RESTART] == 600 and simulated.count == 1
        assert sum(found.values()) == pytest.approx(simulated.time)


def test_a_copy_that_was_under_way_is_lost():
    """The background copy of 100 s is complete at 141 s: a fault at 120 s goes back to the start."""
    early = run(STRATEGIES["async"], [120], [PROCESS])
    early.until(130)
    late = run(STRATEGIES["async"], [150], [PROCESS])
    late.until(160)
    assert early.iteration == 0 and late.iteration == 10


@pytest.mark.parametrize(
    "gaps, nodes, iteration",
    [
        ([150, 300], [0, 1], 0),  # both nodes of a pair, the second in the restart
        ([150, 300], [0, 2], 10),
        ([150, 410], [0, 1], 10),  # the restart has made the copies again
    ],
)
def test_the_loss_of_both_nodes_of_a_pair_needs_the_file_system(gaps, nodes, iteration):
    never = BACKGROUND._replace(delay=1e6)
    simulated = run(((MEMORY,), (never,)), gaps, [NODE, NODE], nodes)
    simulated.until(600)
    assert simulated.iteration == iteration


def test_a_fault_in_a_restart_begins_it_again():
    simulated = run(STRATEGIES["save"], [150, 100], [PROCESS, PROCESS])
    found = simulated.until(800)
    assert found[RESTART] == 100 + 600 and simulated.count == 2
