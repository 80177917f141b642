"""Who is stuck and who merely waits: heartbeats become a census, and a census becomes a line of the log.

A rank that waits for others is innocent as long as its watchdog is awake. A rank that does something else, or is not awake, and has
not moved for too long, is stuck. Left out: where heartbeats come from (heartbeat.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..comm.exit_codes import ExitCode

STOPPED, GONE, SILENT = "stopped in", "is gone, last seen in", "and its node do not answer, last seen in"
NAMED = 4  # ranks that a line names
ASLEEP = 3.0  # s: a watchdog that has not looked around for so long, or for half of the limit, is not awake


@dataclass(frozen=True)
class Standing:
    """A rank that does not move. seconds: for how long. limit: how long is too long. how: STOPPED, GONE or SILENT."""

    rank: int
    host: str
    what: str
    seconds: float
    limit: float
    how: str = STOPPED


@dataclass(frozen=True)
class Census:
    """Ranks of a node, or of several. waiting: how many wait.

    stuck: those that neither wait nor move, longest first, at most NAMED. more: stuck ranks beyond those. waiters: some that wait,
    longest last, at most NAMED. others: one that moves. missing: ranks that never gave a sign of life. nodes: how many.
    """

    ranks: int
    waiting: int
    stuck: tuple[Standing, ...] = ()
    more: int = 0
    waiters: tuple[Standing, ...] = ()
    others: tuple[Standing, ...] = ()
    missing: tuple[int, ...] = ()
    nodes: int = 1

    @classmethod
    def parsed(cls, record: dict) -> Census:
        """The inverse of `dataclasses.asdict`. KeyError or TypeError where it is something else."""
        standings = {name: tuple(Standing(**s) for s in record[name]) for name in ("stuck", "waiters", "others")}
        return cls(**{**record, **standings, "missing": tuple(record["missing"])})


@dataclass(frozen=True)
class Verdict:
    """Why a job ends. text: one line. code: the job's exit code. stuck: ranks that cannot speak for themselves."""

    text: str
    code: int
    stuck: tuple[int, ...]


def count(stuck: Iterable[Standing], waiting: Iterable[Standing], moving: Iterable[Standing] = (),
          missing: tuple[int, ...] = ()) -> Census:
    """A census of the ranks of a node."""
    stuck, waiting, moving = _longest(stuck), _shortest(waiting), tuple(moving)
    ranks = len(stuck) + len(waiting) + len(moving)
    return Census(ranks, len(waiting), stuck[:NAMED], len(stuck[NAMED:]), waiting[:NAMED], moving[:1], missing)


def merge(reports: Sequence[Census]) -> Census:
    """One census of several nodes."""
    stuck = _longest(s for report in reports for s in report.stuck)
    waiters = _shortest(s for report in reports for s in report.waiters)
    return Census(sum(report.ranks for report in reports), sum(report.waiting for report in reports), stuck[:NAMED],
                  sum(report.more for report in reports) + len(stuck[NAMED:]), waiters[:NAMED],
                  missing=tuple(rank for report in reports for rank in report.missing)[:NAMED],
                  nodes=sum(report.nodes for report in reports))


def _longest(standings: Iterable[Standing]) -> tuple[Standing, ...]:
    return tuple(sorted(standings, key=lambda s: (-s.seconds, s.rank)))


def _shortest(standings: Iterable[Standing]) -> tuple[Standing, ...]:
    return tuple(sorted(standings, key=lambda s: (s.seconds, s.rank)))


def judge(census: Census, alone: bool = False, late: float = 0.0) -> Verdict | None:
    """What is wrong, if it has lasted long enough.

    alone: there are other nodes, and this node does not hear from all of them. They get the same time again to report a stuck rank
    before this node ends a job in which all of its own ranks wait. late: s in which another node may report it first.
    A node that sends nothing has stopped only if no rank elsewhere moves: datagrams may be lost while the job continues.
    """
    silence_counts = _stands(census)
    overdue = tuple(s for s in census.stuck if s.seconds >= s.limit + late and (s.how != SILENT or silence_counts))
    if overdue:
        code = ExitCode.HANG if any(s.how == STOPPED for s in overdue) else ExitCode.LOST_RANK
        return Verdict(_stuck(overdue, census), code, tuple(s.rank for s in overdue))
    if census.waiting == census.ranks > 0 and _patient(census.waiters[0], alone, late):
        return Verdict(_deadlock(census, alone), ExitCode.HANG, ())
    return None


def _stands(census: Census) -> bool:
    """Whether every rank is stuck, or has waited as long as it takes to be listed as stuck."""
    waits = all(waiter.seconds >= waiter.limit / 2 for waiter in census.waiters[:1])
    return waits and census.ranks == census.waiting + len(census.stuck) + census.more


def _patient(waiter: Standing, alone: bool, late: float) -> bool:
    """Whether a stuck rank would have been found by now among those that wait."""
    return waiter.seconds >= max(2 * ASLEEP, 2 * waiter.limit if alone else waiter.limit) + late


def _stuck(overdue: tuple[Standing, ...], census: Census) -> str:
    ranks = "; ".join(f"rank {s.rank} (node {s.host}) {s.how} {s.what}, {s.seconds:.0f} s ago" for s in overdue)
    more = f"; and {census.more} more" * bool(census.more)
    return ranks + more + _waiting(census.waiting, "it" if len(overdue) + census.more == 1 else "them")


def _waiting(ranks: int, whom: str) -> str:
    return f"; {ranks} rank{'s wait' if ranks > 1 else ' waits'} for {whom}" if ranks else ""


def _deadlock(census: Census, alone: bool) -> str:
    shown = "; ".join(f"rank {s.rank} (node {s.host}) in {s.what}, {s.seconds:.0f} s" for s in census.waiters)
    if census.missing:
        shown = f"no sign of life yet from rank{'s' * (len(census.missing) > 1)} {', '.join(map(str, census.missing))}; {shown}"
    if alone:
        return f"all {census.ranks} ranks of this node wait, and no other node has reported a stuck rank: {shown}"
    return f"no rank computes, all {census.ranks} wait: {shown}"
