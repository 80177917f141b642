"""Who is stuck and who merely waits: heartbeats become a census, and a census becomes a line of the log.

A rank that waits for others is innocent as long as its watchdog is awake. A rank that does something else, or is not awake, and has
not moved for too long, is stuck. Left out: where heartbeats come from (heartbeat.py).
Test: pytest tests/test_watchdog.py
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..comm.exit_codes import ExitCode

NAMED = 4  # ranks that a line names
ASLEEP = 3.0  # s: a watchdog that has not looked around for so long, or for half of the limit, is not awake


@dataclass(frozen=True)
class Standing:
    """A rank that does not move. seconds: for how long. limit: how long is too long. gone: its process is."""

    rank: int
    host: str
    what: str
    seconds: float
    limit: float
    gone: bool = False

    @property
    def overdue(self) -> bool:
        """Whether it has stood still for too long."""
        return self.seconds >= self.limit


@dataclass(frozen=True)
class Census:
    """Ranks of a node, or of several. waiting: how many wait.

    stuck: those that neither wait nor move, longest first, at most NAMED. more: stuck ranks beyond those. waiters: some that wait,
    longest last, at most NAMED. missing: ranks that never gave a sign of life.
    """

    ranks: int
    waiting: int
    stuck: tuple[Standing, ...] = ()
    more: int = 0
    waiters: tuple[Standing, ...] = ()
    missing: tuple[int, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """Why a job ends. text: one line. code: the job's exit code. stuck: ranks that cannot speak for themselves."""

    text: str
    code: int
    stuck: tuple[int, ...]


def count(standings: Iterable[Standing], waiting: Sequence[Standing], ranks: int, missing: tuple[int, ...] = ()) -> Census:
    """A census of ranks that are stuck, ranks that wait, and others that move."""
    stuck = sorted(standings, key=lambda s: (-s.seconds, s.rank))
    waiters = sorted(waiting, key=lambda s: (s.seconds, s.rank))
    return Census(ranks, len(waiters), tuple(stuck[:NAMED]), len(stuck[NAMED:]), tuple(waiters[:NAMED]), missing)


def judge(census: Census, alone: bool = False) -> Verdict | None:
    """What is wrong, if it has lasted long enough.

    alone: there are other nodes, and nobody here hears of them. They get as long again to say that a rank of theirs is stuck,
    before this node ends a job in which all of its own ranks wait.
    """
    overdue = tuple(s for s in census.stuck if s.overdue)
    if overdue:
        code = ExitCode.LOST_RANK if all(s.gone for s in overdue) else ExitCode.HANG
        return Verdict(_stuck(overdue, census), code, tuple(s.rank for s in overdue))
    if census.waiting == census.ranks > 0 and _patient(census.waiters[0], alone):
        return Verdict(_deadlock(census, alone), ExitCode.HANG, ())
    return None


def _patient(waiter: Standing, alone: bool) -> bool:
    """Whether a stuck rank would have been found by now among those that wait."""
    return waiter.seconds >= max(2 * ASLEEP, 2 * waiter.limit if alone else waiter.limit)


def _stuck(overdue: tuple[Standing, ...], census: Census) -> str:
    ranks = "; ".join(f"rank {s.rank} (node {s.host}) {'is gone, last seen' if s.gone else 'stopped'} in {s.what}, "
                      f"{s.seconds:.0f} s ago" for s in overdue)
    more = f"; and {census.more} more" * bool(census.more)
    return ranks + more + _waiting(census.waiting, "it" if len(overdue) + census.more == 1 else "them")


def _waiting(ranks: int, whom: str) -> str:
    return f"; {ranks} rank{'s wait' if ranks > 1 else ' waits'} for {whom}" if ranks else ""


def _deadlock(census: Census, alone: bool) -> str:
    shown = "; ".join(f"rank {s.rank} (node {s.host}) in {s.what}, {s.seconds:.0f} s" for s in census.waiters)
    if census.missing:
        shown = f"no sign of life yet from rank{'s' * (len(census.missing) > 1)} {', '.join(map(str, census.missing))}; {shown}"
    if alone:
        return f"all {census.ranks} ranks of this node wait, and no other node says for whom: {shown}"
    return f"no rank computes, all {census.ranks} wait: {shown}"
