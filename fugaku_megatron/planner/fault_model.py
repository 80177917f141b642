"""Share of effective training time of a job with faults: best intervals between copies of its state, and expected seconds by cause.

Faults of nodes are independent and have no memory (Poisson). A fault costs the restart, and the training since the newest copy that
survives it. Intervals: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation
Computer Systems 22 (2006), 303-312, for each kind of copies with the faults that no more frequent copy survives. With one kind of
copies `expected` is Daly's complete cost function.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

PROCESS = "process"  # a process ends or hangs; its node remains
NODE = "node"  # a node is lost, with its memory and disk
WIDE = "wide"  # several nodes are lost, or the whole job
KINDS = (PROCESS, NODE, WIDE)
# Causes, as in observe/log/effective_time.py; "restart" is all from the fault to the next iteration.
TRAINING = "training"
BESIDES = "audit, other"
SAVING = "saving"
REPEATED = "repeated"
RESTART = "restart"
LONGEST = 86400.0  # seconds between two copies at most, also if no fault needs them


class Faults(NamedTuple):
    """Faults of a job's nodes.

    mtbf: mean seconds between two faults of one node
    shares: of each kind of KINDS
    """

    nodes: int
    mtbf: float
    shares: dict[str, float]

    @property
    def rate(self) -> float:
        """Faults of the job per second."""
        return self.nodes / self.mtbf


class Pace(NamedTuple):
    """A job's seconds without faults and copies.

    iteration: training and evaluation of an iteration
    besides: audits and other work, as a share of `iteration`
    """

    iteration: float
    besides: float

    def seconds(self, iterations: float) -> float:
        return iterations * self.iteration * (1 + self.besides)


class Copies(NamedTuple):
    """Copies of the training state that one flag makes.

    survives: kinds of faults
    wait: seconds for which training waits, for each copy
    delay: further seconds until the copy is complete
    restart: seconds from a fault to the next iteration, by kind of fault
    interval: iterations between two copies; 0: as `with_intervals` finds
    """

    flag: str
    survives: frozenset[str]
    wait: float
    delay: float
    restart: dict[str, float]
    interval: int = 0


Group = tuple[Copies, ...]  # with one interval, most specific first
Strategy = tuple[Group, ...]  # from the shortest interval to the longest


def daly_interval(wait: float, mtbf: float) -> float:
    """Return the seconds of training between two copies that cost least: Daly's equation 37."""
    if wait >= 2 * mtbf:
        return mtbf
    ratio = wait / (2 * mtbf)
    return math.sqrt(2 * wait * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - wait


def rates(strategy: Strategy, faults: Faults) -> list[float]:
    """Return the faults per second after which each group's copies are the newest that survive.

    A lost node's state is lost in memory, too, if the node with its copy fails during the restart.
    """
    left = dict(faults.shares)
    found = []
    for group in strategy:
        survived = [kind for kind in left if any(kind in each.survives for each in group)]
        share = sum(left.pop(kind) for kind in survived)
        if NODE in survived and not any(WIDE in each.survives for each in group):
            restart = newest(group, NODE).restart[NODE]
            pairs = faults.shares[NODE] * min(1.0, restart / faults.mtbf)
            share -= pairs
            left[WIDE] += pairs
        found.append(share * faults.rate)
    return found


def with_intervals(strategy: Strategy, faults: Faults, pace: Pace) -> Strategy:
    """Return the strategy with Daly's intervals, in whole iterations, each a multiple of the shorter one."""
    found: list[Group] = []
    shorter = 1
    for group, rate in zip(strategy, rates(strategy, faults), strict=True):
        wait = sum(each.wait for each in group)
        seconds = LONGEST
        if rate:
            seconds = min(LONGEST, daly_interval(wait, 1 / rate))
        seconds = max(seconds, *(wait + each.delay for each in group))
        iterations = seconds / pace.seconds(1)
        interval = max(1, round(iterations / shorter)) * shorter
        found.append(tuple(each._replace(interval=interval) for each in group))
        shorter = interval
    return tuple(found)


def expected(strategy: Strategy, faults: Faults, pace: Pace) -> dict[str, float]:
    """Return the share of each cause in the time of a long run.

    A cycle of a group is the time between two of its copies. It consists of cycles of the group before, and is repeated after each
    fault that only this group survives. `complete` is the probability that a cycle ends before a fault that no copy so far survives,
    and `seconds` its mean length until either.
    """
    copies = [each for group in strategy for each in group]
    own = rates(strategy, faults)
    shortest = strategy[0][0].interval
    waits = sum(each.wait / each.interval for each in copies)
    cycle = pace.seconds(shortest) + shortest * waits
    complete = math.exp(-faults.rate * cycle)
    seconds = -math.expm1(-faults.rate * cycle) / faults.rate
    interval = shortest
    left = faults.rate
    for group, rate in zip(strategy, own, strict=True):
        count = group[0].interval / interval
        fraction = complete**count
        if complete < 1:
            count = (1 - fraction) / (1 - complete)
        tried = 1.0
        if left > 0:
            tried = 1 - (1 - fraction) * min(1.0, rate / left)
        seconds *= count / tried
        complete = fraction / tried
        interval = group[0].interval
        left -= rate
    delayed = 0.0
    again = 0.0  # probability of a fault in a restart, which begins another one
    for kind, share in faults.shares.items():
        used = newest(copies, kind)
        delayed += share * faults.rate * used.delay
        again -= share * math.expm1(-faults.rate * used.restart[kind])
    running = seconds * (1 + delayed)
    restarting = running * again / (1 - again)
    training = interval * pace.iteration
    found = {
        TRAINING: training,
        BESIDES: training * pace.besides,
        SAVING: interval * waits,
        REPEATED: running - pace.seconds(interval) - interval * waits,
        RESTART: restarting,
    }
    total = running + restarting
    return {cause: value / total for cause, value in found.items()}


def newest(copies: Sequence[Copies], kind: str) -> Copies:
    """Return the first copies that survive a fault; the last ones survive every fault."""
    return next((each for each in copies if kind in each.survives), copies[-1])
