"""Effective training time with faults: Daly's interval, his cost function, several kinds of copies, and the simulation."""

import math

import pytest

from fugaku_megatron.planner.fault_model import (
    KINDS,
    LONGEST,
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
    daly_interval,
    expected,
    with_intervals,
)

pytestmark = pytest.mark.unit

HOUR = 3600.0
PACE = Pace(iteration=10.0, besides=0.0)


def copies(flag="save", survives=KINDS, wait=30.0, delay=0.0, restart=600.0, interval=0):
    of_kind = dict.fromkeys(KINDS, restart)
    return Copies(flag, frozenset(survives), wait, delay, of_kind, interval)


def faults(hours, nodes=100, shares=(0.5, 0.4, 0.1)):
    """Return faults of a job that fails every so many hours."""
    return Faults(nodes, nodes * hours * HOUR, dict(zip(KINDS, shares, strict=True)))


def test_the_interval_is_dalys():
    """His example: 5 minutes for a dump, a fault a day: 200 minutes by the first order, less the dump's half."""
    first_order = math.sqrt(2 * 300 * 86400)
    assert daly_interval(300, 86400) == pytest.approx(
        first_order * (1 + math.sqrt(300 / 172800) / 3 + 300 / 172800 / 9) - 300
    )
    assert first_order - 300 < daly_interval(300, 86400) < first_order
    assert daly_interval(200, 100) == 100


@pytest.mark.parametrize("hours", [0.5, 2, 24, 1000])
@pytest.mark.parametrize("wait", [1.0, 30.0, 300.0])
def test_one_kind_of_copies_costs_what_daly_says_and_no_interval_is_better(hours, wait):
    mtbf = hours * HOUR
    every = faults(hours)

    def share(interval):
        return expected(((copies(wait=wait, interval=interval),),), every, PACE)[TRAINING]

    ((best,),) = with_intervals(((copies(wait=wait),),), every, PACE)
    for interval in (1, 7, best.interval):
        length = interval * PACE.iteration
        daly = mtbf * math.exp(600 / mtbf) * math.expm1((length + wait) / mtbf) / length
        assert share(interval) == pytest.approx(1 / daly)
    # Daly's estimate is within a per cent of the best at half an hour, and closer at rarer faults.
    most = max(map(share, range(1, 20 * best.interval)))
    assert share(best.interval) == pytest.approx(most, rel=0.01 if hours < 1 else 0.001)


def test_the_causes_are_the_whole_time():
    memory = copies("memory", (PROCESS, NODE), wait=1, delay=2, restart=300)
    strategy = with_intervals(((memory,), (copies(delay=40),)), faults(2), Pace(10, 0.02))
    found = expected(strategy, faults(2), Pace(10, 0.02))
    assert sum(found.values()) == pytest.approx(1) and min(found.values()) > 0
    rare = expected(strategy, faults(1e7), Pace(10, 0.02))
    assert rare[REPEATED] < 1e-6 and rare[RESTART] < 1e-6 and rare[SAVING] > 0.001


def test_copies_that_survive_more_faults_are_rarer_and_copies_help():
    memory = copies("memory", (PROCESS, NODE), wait=1, restart=300)
    save = copies(wait=30)
    every = faults(1)
    ((short,), (long,)) = with_intervals(((memory,), (save,)), every, PACE)
    ((alone,),) = with_intervals(((save,),), every, PACE)
    assert short.interval < alone.interval < long.interval and long.interval % short.interval == 0
    both = expected(((short,), (long,)), every, PACE)[TRAINING]
    assert both > expected(((alone,),), every, PACE)[TRAINING]


def test_a_kind_without_faults_is_copied_once_a_day_and_a_copy_ends_before_the_next():
    memory = copies("memory", (PROCESS, NODE), wait=1)
    none_wide = faults(1, nodes=10**6, shares=(0.5, 0.5, 0))
    *_, (save,) = with_intervals(((memory,), (copies(),)), none_wide, PACE)
    assert save.interval * PACE.iteration == pytest.approx(LONGEST, rel=0.01)
    slow = copies(wait=1, delay=5000)
    ((found,),) = with_intervals(((slow,),), faults(1), PACE)
    assert found.interval == 500


def test_a_pair_of_nodes_can_lose_the_copies_in_their_memory():
    """With few nodes the second fault hits the node with the copy more often."""
    memory = copies("memory", (PROCESS, NODE), wait=1, interval=10)
    strategy = ((memory,), (copies(interval=1000),))
    few = expected(strategy, faults(2, nodes=2), PACE)[TRAINING]
    many = expected(strategy, faults(2, nodes=10**6), PACE)[TRAINING]
    assert few < many
    assert sum(faults(2).shares.values()) == 1 and WIDE in KINDS
